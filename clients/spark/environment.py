"""Checks for what Spark needs beside this package, because Spark's own errors do not help.

Spark needs Java. It starts Python processes of its own, for the source's planning and for its
tasks. They run the interpreter of PYSPARK_PYTHON, by default the `python3` of the PATH. That is not
the interpreter of the program if it runs in a virtual environment that is not activated.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Final

JAVA_MIN: Final = 17
"""Spark 4 is compiled for Java 17."""
_INSTALL: Final = (
    "Debian and Ubuntu: sudo apt-get install openjdk-17-jre-headless; elsewhere install a JDK or"
    " JRE and set JAVA_HOME"
)
PROBE_TIMEOUT_S: Final = 20.0
NEEDED: Final = (__name__.partition(".")[0], "pyspark", "pyarrow")
_PROBE: Final = (
    "import importlib.util, sys;"
    "print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])"
)
_TRY: Final = (
    f"Set PYSPARK_PYTHON={sys.executable} before the session starts (on a cluster: an interpreter"
    " that has dcpd on every machine)"
)


class JavaMissingError(RuntimeError):
    """Java is missing or too old. The text says what to install."""


def check_java() -> int:
    """Return the version of the Java that Spark will use. Raises JavaMissingError."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        where = f"JAVA_HOME is {home}, but it has no bin/java" if home else "no java in the PATH"
        raise JavaMissingError(f"Spark needs Java {JAVA_MIN} or newer: {where}. {_INSTALL}")
    told = subprocess.run(  # noqa: S603 - the java that Spark would start
        [java, "-version"], capture_output=True, text=True, check=False
    )
    found = re.search(r'version "(?:1\.)?(\d+)', told.stderr + told.stdout)
    version = int(found[1]) if found else 0
    if version < JAVA_MIN:
        raise JavaMissingError(
            f"Spark needs Java {JAVA_MIN} or newer: {java} is version {version or '?'}. {_INSTALL}"
        )
    return version


class WorkerPythonError(RuntimeError):
    """Spark's Python workers cannot run the source. The text says what to set."""


@cache
def warn_about_workers() -> None:
    """Warn once if the workers cannot run the source. In a worker there is nothing to check, and
    a Spark Connect session does not tell which interpreter its workers run.
    """
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    context = getattr(session, "sparkContext", None)
    if context is None:
        return
    try:
        check_workers(context.pythonExec)
    except WorkerPythonError as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=4)


def check_workers(interpreter: str | None = None) -> None:
    """Raise WorkerPythonError if the workers' interpreter on this machine lacks a package.

    `interpreter`: the one that they run; None: what the environment says. On a cluster this checks
    the driver's machine only, where the source is planned.
    """
    chosen = interpreter or os.environ.get("PYSPARK_PYTHON") or "python3"
    found = shutil.which(chosen)
    if found is None:
        raise WorkerPythonError(f"Spark's Python workers run {chosen!r}, which is not here. {_TRY}")
    if found == sys.executable:
        return
    try:
        told = subprocess.run(  # noqa: S603 - the interpreter that Spark would start
            [found, "-c", _PROBE, *NEEDED],
            capture_output=True, text=True, check=False, timeout=PROBE_TIMEOUT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WorkerPythonError(
            f"Spark's Python workers run {found}, which does not work: {error}. {_TRY}"
        ) from error
    missing = told.stdout.split()
    if told.returncode or missing:
        lacks = f"has no package {', '.join(missing)}" if missing else told.stderr.strip()[-300:]
        raise WorkerPythonError(f"Spark's Python workers run {found}, which {lacks}. {_TRY}")
