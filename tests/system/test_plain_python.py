"""Plain Python, where the loops in C cannot be built or shall not be: it is installed, works,
and says why it is plain.
"""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import hatch_build
from support.installations import (
    BUILT_OR_FAILED,
    COMPILING,
    ROOT,
    WITHOUT_COMPILER,
    build_wheel,
    copied_sources,
    native,
    no_compiler,
    no_registry,
    run,
    unpack,
    use,
)
from vbucket.native.form import form_text, has_loops, problem, version_and_form


@pytest.mark.timeout(900)
def test_pip_installs_plain_python_without_a_compiler(tmp_path: Path) -> None:
    """Into an environment that has only pip, and what dcpd needs as locked. It says so in one line,
    and in `dcpd --version`. Nothing but hatchling is asked for.
    """
    if why := no_registry(tmp_path / "probe"):
        pytest.skip(why)
    source = copied_sources(tmp_path)
    venv.create(tmp_path / "environment", with_pip=True)
    python = tmp_path / "environment" / "bin" / "python"

    def pip(*arguments: str) -> str:
        done = run("-m", "pip", *arguments, cwd=source, python=python, **WITHOUT_COMPILER)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    pip("install", "--require-hashes", "--only-binary", ":all:", "-r", "requirements/run.txt")
    said = pip("install", "-v", ".").splitlines()
    why = "nothing can be compiled: there is no C compiler (no-such-compiler)"
    (line,) = [line for line in said if "built without the loops in C" in line]
    assert line.strip() == f"dcpd: built without the loops in C: {why}"
    assert not [line for line in said if re.search(r"Collecting (mypy|setuptools)", line)]
    pip("check")
    output = use(python, tmp_path)
    assert "is ready" in output
    assert "loops" not in output
    version = run(str(python.with_name("dcpd")), "--version", cwd=tmp_path, python=python)
    assert version.stdout.endswith(f"(plain Python: {why})\n"), version.stderr


def test_each_thing_that_compiling_needs_is_missed_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert hatch_build.cannot_compile() == "there is no C compiler (no-such-compiler)"
    monkeypatch.setenv("CC", f"{sys.executable} -O2")
    header = tmp_path / "include" / "Python.h"
    assert hatch_build.cannot_compile() == f"Python's headers are missing ({header})"
    with pytest.raises(hatch_build.CompileError, match="Python's headers are missing"):
        hatch_build.build(ROOT, tmp_path / "built")
    assert not (tmp_path / "built").exists()
    header.parent.mkdir()
    header.touch()
    assert hatch_build.cannot_compile() == ""


def test_compiler_without_python_headers_is_no_error_unasked(tmp_path: Path) -> None:
    """As on Debian with gcc, and without python3-dev."""
    source = copied_sources(tmp_path)
    build = (
        "import sys, sysconfig; found = sysconfig.get_path; "
        "sysconfig.get_path = lambda name, *more: '/none' if name == 'include' else "
        "found(name, *more); "
        "from hatchling import build; print(build.get_requires_for_build_wheel()); "
        "build.build_wheel(sys.argv[1])"
    )
    there = {"CC": sys.executable}
    made = run("-c", build, str(tmp_path), cwd=source, **there)
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines()[0] == "[]", "nothing is fetched to compile"
    assert unpack(tmp_path, tmp_path / "plain").endswith("-py3-none-any.whl")
    why = "nothing can be compiled: Python's headers are missing (/none/Python.h)"
    assert form_text(native(tmp_path / "plain" / "dcpd")) == f"plain Python: {why}"
    failed = run("-c", build, str(tmp_path), cwd=source, **BUILT_OR_FAILED, **there)
    assert failed.returncode != 0
    assert f"CompileError: {why}" in failed.stderr


def test_a_compiler_that_fails_is_no_error_unless_asked(tmp_path: Path) -> None:
    """It is there, and makes nothing: as if a header of the system is missing."""
    if why := no_compiler():
        pytest.skip(why)
    source = copied_sources(tmp_path)
    made = build_wheel(source, tmp_path / "made", CC="false", **COMPILING)
    assert made.returncode == 0, made.stderr
    reason = "the loops in C could not be compiled"
    assert f"dcpd: built without the loops in C: {reason}\n" in made.stderr
    plain = tmp_path / "plain"
    assert unpack(tmp_path / "made", plain).endswith("-py3-none-any.whl")
    assert form_text(native(plain / "dcpd")) == f"plain Python: {reason}"
    for more in ({"CC": "false"}, WITHOUT_COMPILER):
        failed = build_wheel(source, tmp_path / "failed", **BUILT_OR_FAILED, **more)
        assert failed.returncode != 0
        assert "CompileError" in failed.stderr
    assert not (tmp_path / "failed").exists() or not list((tmp_path / "failed").iterdir())


def test_plain_python_can_be_asked_for(tmp_path: Path) -> None:
    made = build_wheel(copied_sources(tmp_path), tmp_path / "made", DCPD_COMPILE="0")
    assert made.returncode == 0, made.stderr
    assert unpack(tmp_path / "made", tmp_path / "plain").endswith("-py3-none-any.whl")
    assert form_text(native(tmp_path / "plain" / "dcpd")) == "plain Python: DCPD_COMPILE=0"
    wrong = build_wheel(tmp_path / "source", tmp_path / "made", DCPD_COMPILE="yes")
    assert "DCPD_COMPILE is 'yes'; it must be 0 or 1" in wrong.stderr


def test_plain_modules_are_no_problem_and_say_nothing(tmp_path: Path) -> None:
    assert not has_loops(tmp_path)
    assert problem(tmp_path) == ""
    assert version_and_form("1.2", tmp_path) == "1.2 (plain Python)"


CORE = (
    "tests/stream", "tests/session/test_session_documents.py",
    "tests/session/test_session_collections.py", "tests/vbucket/test_block.py",
    "tests/vbucket/test_compaction.py", "tests/vbucket/test_damaged_pages.py",
    "tests/vbucket/test_engine.py", "tests/vbucket/test_merge.py",
    "tests/vbucket/test_page_sums.py", "tests/vbucket/test_recovery.py",
    "tests/vbucket/test_runs.py", "tests/vbucket/test_store.py",
)  # fmt: skip


@pytest.mark.timeout(900)
def test_the_core_passes_its_tests_without_the_loops(tmp_path: Path) -> None:
    """All other tests run with them."""
    source = copied_sources(tmp_path)
    shutil.copytree(ROOT / "tests", source / "tests", ignore=shutil.ignore_patterns("npm"))
    here = {"PYTHONPATH": str(source)}
    form = run(
        "-c", "from vbucket.native.form import form_text; print(form_text())", cwd=source, **here
    )
    assert form.stdout == "plain Python\n", form.stderr
    ran = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *CORE, cwd=source, **here)
    assert ran.returncode == 0, ran.stdout[-5000:]
