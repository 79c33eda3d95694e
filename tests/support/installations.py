"""Copies of the sources, what is built of them, and the use of what is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = (
    "dcp", "vbucket", "failover", "clients", "requirements", "scripts", "pyproject.toml",
    "hatch_build.py", "README.md", "LICENSE",
)  # fmt: skip
COMPILING = {"DCPD_COMPILE_LEVEL": "0"}
"""The C compiler's quickest level."""
BUILT_OR_FAILED = {"DCPD_COMPILE": "1", **COMPILING}
WITHOUT_COMPILER = {"CC": "no-such-compiler"}


def no_compiler() -> str:
    """Why nothing can be compiled here, "" if it can."""
    command = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(command) is None:
        return f"there is no C compiler here ({command}; Debian: sudo apt-get install gcc)"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        return f"Python's headers are missing ({header}; Debian: sudo apt-get install python3-dev)"
    return ""


def plain_environment() -> dict[str, str]:
    """The environment without what would compile, or lead to other sources."""
    left_out = {*BUILT_OR_FAILED, "PYTHONPATH"}
    return {name: value for name, value in os.environ.items() if name not in left_out}


def run(
    *arguments: str, cwd: Path | None = None, python: Path | str = sys.executable, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with `more` in its environment."""
    return subprocess.run(
        [str(python), *arguments], cwd=cwd, env=plain_environment() | more,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def copied_sources(folder: Path) -> Path:
    """Copy the sources, without what was built beside them; return the new folder's path."""
    source = folder / "source"
    source.mkdir()
    without = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd", "built_from.txt")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=without)
        else:
            shutil.copyfile(ROOT / name, source / name)
    return source


def native(folder: Path) -> Path:
    """Return where the loops are, below the sources or what was installed."""
    return folder / "vbucket" / "native"


def build_wheel(source: Path, target: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Build with what is installed here."""
    return run("-m", "hatchling", "build", "-t", "wheel", "-d", str(target), cwd=source, **more)


def unpack(folder: Path, target: Path) -> str:
    """Unpack the one wheel in a folder; return its name."""
    (wheel,) = folder.glob("dcpd-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return wheel.name


def use(python: Path, folder: Path, **more: str) -> str:
    """Start dcpd from an environment, write and read with dcpctl; return what dcpd printed."""
    output = ""
    bin_folder = python.parent
    server = subprocess.Popen(
        [str(bin_folder / "dcpd"), "--port", "0", "--admin-port", "0", "--data", "data"],
        cwd=folder, env=plain_environment() | more, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        for line in server.stdout:
            output += line
            if "dcpctl --server" in line:
                break
        address = re.search(r"dcpctl --server (\S+)", output)
        assert address is not None, "it did not start"
        for command, wanted in (("set hello world", ""), ("get hello", "world")):
            done = run(
                str(bin_folder / "dcpctl"), "--server", address[1], *command.split(),
                python=python, cwd=folder, **more,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert wanted in done.stdout
    finally:
        server.terminate()
        server.communicate(timeout=30)
    assert server.returncode == 0
    return output


def no_registry(folder: Path) -> str:
    """Why pip can fetch nothing here, "" if it can. It asks for what every build needs."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), "hatchling"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return "" if asked.returncode == 0 else f"pip fetches no packages: {asked.stderr.strip()[:200]}"
