"""How the tests are run: two workers leave nothing out without a word, and warnings stay errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = """
import pathlib, time, warnings
import pytest

BUSY = pathlib.Path(__file__).with_name("busy")

@pytest.mark.parametrize("number", range(8))
def test_busy(number):
    BUSY.touch()
    time.sleep(0.02)
    BUSY.unlink()
"""
ONE = """
import warnings
import pytest

def test_skipped():
    pytest.skip("the reason")

def test_warns():
    warnings.warn("a warning")

def test_left_out():
    pass

def test_passes():
    pass
"""
QUIET = """
import pathlib
import pytest

@pytest.mark.quiet
@pytest.mark.parametrize("number", range(8))
def test_quiet(number):
    assert not pathlib.Path(__file__).with_name("busy").exists()
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run pytest over a folder of files of tests, under the conftest of this project."""
    for name in ("conftest.py", "test_project.py"):
        (folder / name).write_bytes((ROOT / "tests" / name).read_bytes())
    config = (ROOT / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(config.replace('"tests"', '"."'))
    (folder / "test_project.py").write_text("")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    command.append(f"--basetemp={folder / 'tmp'}")
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    ran = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_did_not_run_is_told_and_warnings_are_errors(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_one.py").write_text(ONE)
    code, output = run(tmp_path, "-n", workers, "-k", "not left_out")
    assert code == 1, output
    assert "test_one.py::test_skipped: Skipped: the reason" in output
    assert "did not run: 1 tests that the arguments leave out" in output
    assert "FAILED test_one.py::test_warns - UserWarning: a warning" in output
    assert "1 failed, 1 passed, 1 skipped" in output
    code, output = run(tmp_path, "-n", workers, "test_one.py::test_passes")
    assert (code, "nothing: every collected test ran" in output) == (0, True), output


def test_a_quiet_test_runs_alone(tmp_path: Path) -> None:
    """Each of the two files is one worker's."""
    (tmp_path / "test_busy.py").write_text(TESTS)
    (tmp_path / "test_quiet.py").write_text(QUIET)
    code, output = run(tmp_path, "-n", "2")
    assert (code, "16 passed" in output) == (0, True), output


def test_a_file_is_one_workers(tmp_path: Path) -> None:
    source = "import os, pytest\n@pytest.mark.parametrize('n', range(20))\ndef test_it(n): pass\n"
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text(source)
    code, output = run(tmp_path, "-n", "2", "-v", "-v")
    assert code == 0, output
    workers = {
        (line.split("] ")[0], line.split("::")[0].rsplit(" ", 1)[1])
        for line in output.splitlines()
        if line.startswith("[gw") and " PASSED " in line
    }
    assert len(workers) == 2, output
