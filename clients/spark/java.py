"""Checks for a suitable Java, because Spark's own error message does not help."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

JAVA_MIN: Final = 17
"""Spark 4 is compiled for Java 17."""
_TRY: Final = (
    "Debian and Ubuntu: sudo apt-get install openjdk-17-jre-headless; elsewhere install a JDK or"
    " JRE and set JAVA_HOME"
)


class JavaMissingError(RuntimeError):
    """Java is missing or too old. The text says what to install."""


def check_java() -> int:
    """Return the version of the Java that Spark will use. Raises JavaMissingError."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        where = f"JAVA_HOME is {home}, but it has no bin/java" if home else "no java in the PATH"
        raise JavaMissingError(f"Spark needs Java {JAVA_MIN} or newer: {where}. {_TRY}")
    told = subprocess.run(  # noqa: S603 - the java that Spark would start
        [java, "-version"], capture_output=True, text=True, check=False
    )
    found = re.search(r'version "(?:1\.)?(\d+)', told.stderr + told.stdout)
    version = int(found[1]) if found else 0
    if version < JAVA_MIN:
        raise JavaMissingError(
            f"Spark needs Java {JAVA_MIN} or newer: {java} is version {version or '?'}. {_TRY}"
        )
    return version
