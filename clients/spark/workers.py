"""Checks that Spark's Python workers have this package, because Spark's own error does not help.

Spark starts Python processes of its own, for the source's planning and for its tasks. They run the
interpreter of PYSPARK_PYTHON, by default the `python3` of the PATH. That is not the interpreter of
the program if it runs in a virtual environment that is not activated.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from functools import cache
from typing import Final

PROBE_TIMEOUT_S: Final = 20.0
NEEDED: Final = ("clients", "pyspark", "pyarrow")
_PROBE: Final = (
    "import importlib.util, sys;"
    "print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])"
)


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


_TRY: Final = (
    f"Set PYSPARK_PYTHON={sys.executable} before the session starts (on a cluster: an interpreter"
    " that has dcpd on every machine)"
)
