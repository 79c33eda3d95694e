"""The loops in C: built into wheels and beside the sources, and never used with other sources."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import venv
from concurrent.futures import ThreadPoolExecutor
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
    plain_environment,
    run,
    unpack,
    use,
)
from vbucket.native.form import form_text, has_loops, problem

LOOPS_SAID = (
    f"compiling the loops in C: {len(list((ROOT / hatch_build.FOLDER).glob('*.c')))} files\n"
    "compiled the loops in C beside the sources\n"
)
CHANGED = "1 sources of the loops in C were changed after they were built"
SMALL_LOOPS = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "loops", .m_size = -1};
PyMODINIT_FUNC PyInit_loops(void) { return PyModule_Create(&module); }
"""

pytestmark = pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())


HAS_HEADERS = (
    "import pathlib, sysconfig; "
    "print((pathlib.Path(sysconfig.get_path('include')) / 'Python.h').exists())"
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [f"python3.{minor}" for minor in range(11, 15)])
def test_pip_builds_the_loops_in_an_empty_environment(name: str, tmp_path: Path) -> None:
    """Nothing is there but what pip brings. The build has hatchling as locked, and nothing else."""
    if why := no_registry(tmp_path / "probe"):
        pytest.skip(why)
    interpreter = shutil.which(name)
    if interpreter is None or run("-c", HAS_HEADERS, python=interpreter).stdout != "True\n":
        pytest.skip(f"the command {name} is missing, or Python.h of it")
    source = copied_sources(tmp_path)
    made = run("-m", "venv", str(tmp_path / "environment"), python=interpreter)
    assert made.returncode == 0, made.stdout + made.stderr
    python = tmp_path / "environment" / "bin" / "python"
    installed = run("-m", "pip", "install", ".", cwd=source, python=python, **COMPILING)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    version = run(str(python.with_name("dcpd")), "--version", python=python)
    assert version.stdout.endswith("(loops in C)\n"), version.stderr
    assert "is ready" in use(python, tmp_path)
    smoke = run(str(ROOT / "scripts" / "smoke.py"), python=python, cwd=tmp_path)
    assert smoke.returncode == 0, smoke.stderr
    assert "(loops in C), Python" in smoke.stdout


def test_a_wheel_has_the_loops_and_what_they_were_built_from(tmp_path: Path) -> None:
    built = build_wheel(copied_sources(tmp_path), tmp_path / "made", **BUILT_OR_FAILED)
    assert built.returncode == 0, built.stdout + built.stderr
    assert not unpack(tmp_path / "made", tmp_path / "site").endswith("-py3-none-any.whl")
    folder = native(tmp_path / "site" / "dcpd")
    assert (folder / "built_from.txt").read_text() == hatch_build.sources_text(ROOT)
    assert (has_loops(folder), problem(folder)) == (True, "")


def without_progress(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """The same without the lines that a slow machine prints in addition."""
    done.stdout = re.sub(r"^  \d+ of \d+\n", "", done.stdout, flags=re.MULTILINE)
    return done


def in_place(source: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Build beside the sources as scripts/install does."""
    return without_progress(
        run("scripts/build_beside.py", *arguments, cwd=source, **COMPILING, **more)
    )


def small_sources(folder: Path) -> Path:
    """Copy the sources, with next to nothing to compile."""
    source = copied_sources(folder)
    for path in native(source).glob("*.c"):
        path.write_text(SMALL_LOOPS if path.stem == "loops" else "")
    return source


def test_the_loops_have_no_warnings() -> None:
    """But one: methods take their own type for `self`, as is usual in extensions."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    flags = [
        "-fsyntax-only", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror",
        "-Wno-cast-function-type", "-I", sysconfig.get_path("include"),
    ]  # fmt: skip
    sources = list(map(str, native(ROOT).glob("*.c")))
    done = subprocess.run([compiler, *flags, *sources], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_loops_are_compiled_in_place_and_again_after_change(tmp_path: Path) -> None:
    source = small_sources(tmp_path)
    said = LOOPS_SAID
    assert in_place(source).stdout == said
    assert form_text(native(source)) == "loops in C"
    assert in_place(source).stdout == "", "nothing has changed"
    (library,) = source.glob("vbucket/native/*.so")
    loops = source / "vbucket" / "native" / "loops.c"
    text = loops.read_text()
    loops.write_text(text + "/* changed */\n")
    assert CHANGED in problem(native(source))
    with library.open("rb") as running:  # its inode is not given to another file while it is open
        assert in_place(source).stdout == said
        assert problem(native(source)) == ""
        before = os.fstat(running.fileno())
        assert not before.st_nlink, "a process that runs the old one keeps it"
        assert library.stat().st_ino != before.st_ino
    removed = in_place(source, DCPD_COMPILE="0")
    assert removed.stdout == "removed the loops in C: dcpd runs as plain Python\n"
    assert form_text(native(source)) == "plain Python"
    failed = in_place(source, **WITHOUT_COMPILER)
    assert failed.returncode == 1
    assert failed.stderr == ("nothing can be compiled: there is no C compiler (no-such-compiler)\n")
    assert form_text(native(source)) == "plain Python", "the old library is gone"


def test_two_builds_at_once_wait_for_each_other(tmp_path: Path) -> None:
    """Both wrote to the same folder: one failed, and then removed what the other one had made."""
    source = small_sources(tmp_path)
    with ThreadPoolExecutor() as threads:
        builds = [threads.submit(in_place, source) for _ in range(2)]
        done = [build.result() for build in builds]
    assert [build.returncode for build in done] == [0, 0], done
    assert sorted(build.stdout for build in done) == ["", LOOPS_SAID], "one finds it done"
    assert form_text(native(source)) == "loops in C"


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """As in a tree that is read-only, which it is not for root: other things are in the way."""
    source = small_sources(tmp_path)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    in_the_way = source / "vbucket" / "native" / f"loops{suffix}.new"
    in_the_way.mkdir()
    failed = in_place(source)
    assert failed.returncode == 1
    (line,) = failed.stderr.splitlines()
    assert line.startswith("the loops cannot be read or written here: ")
    assert str(in_the_way) in line
    in_the_way.rmdir()
    assert in_place(source).stdout == LOOPS_SAID


def test_a_library_cut_short_is_named(tmp_path: Path) -> None:
    """A server that finds it broken says so."""
    source = small_sources(tmp_path)
    assert in_place(source).stdout == LOOPS_SAID
    (library,) = source.glob("vbucket/native/*.so")
    whole = library.read_bytes()
    replace_file(library, whole[:100])
    started = run("-m", "dcp.server.main", "--data", str(tmp_path / "data"), "--port", "0",
                  cwd=source, PYTHONPATH=str(source))  # fmt: skip
    assert started.returncode == 1
    (line,) = started.stderr.splitlines()
    assert "the loops in C cannot be loaded" in line
    assert "scripts/compile --remove" in line


def replace_file(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def test_sources_that_change_during_a_build_are_noticed(tmp_path: Path) -> None:
    """As by `git pull`: what was compiled is that of before, and so is its list."""
    source = small_sources(tmp_path)
    real = (sysconfig.get_config_var("CC") or "cc").split()[0]
    compiler = tmp_path / "compiler"
    header = source / "vbucket" / "native" / "counts.h"
    compiler.write_text(f'#!/bin/sh\necho "/* changed */" >> {header}\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    assert in_place(source, CC=str(compiler)).stdout == LOOPS_SAID
    assert f"{CHANGED} (vbucket/native/counts.h)" in problem(native(source))
    assert in_place(source).stdout == LOOPS_SAID
    assert problem(native(source)) == ""


def test_loops_of_another_python_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "loops.cpython-39-other.so").touch()
    (tmp_path / "loops.c").write_text("changed")
    (tmp_path / "built_from.txt").write_text(f"{'0' * 64}  vbucket/native/loops.c\n")
    assert problem(tmp_path) == "", "this Python loads none of them"
    assert form_text(tmp_path) == "plain Python"
    (tmp_path / f"loops{sysconfig.get_config_var('EXT_SUFFIX')}").touch()
    assert "1 sources of the loops in C were changed" in problem(tmp_path)
    assert form_text(tmp_path) == "loops in C"


def test_scripts_install_compiles_or_says_in_one_line_why_not(tmp_path: Path) -> None:
    """In an environment that counts as installed, and sees the packages that are here."""
    source = copied_sources(tmp_path)
    venv.create(source / ".venv", with_pip=False)
    (packages,) = source.glob(".venv/lib/python*/site-packages")
    (packages / "here.pth").write_text(sysconfig.get_path("purelib"))
    project = (source / "pyproject.toml").read_bytes()
    for name in ("run", "test"):
        lock = (source / "requirements" / f"{name}.txt").read_bytes()
        stamp = f"{hashlib.sha256(lock + project).hexdigest()} {source}\n"
        (source / ".venv" / f".locked-{name}").write_text(stamp)

    def install(name: str, **more: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["bash", "scripts/install", name], cwd=source, env=plain_environment() | more,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return without_progress(done)

    assert install("test").stdout == LOOPS_SAID
    assert form_text(native(source)) == "loops in C"
    assert install("test").stdout == "", "nothing has changed"
    with (native(source) / "loops.c").open("a") as file:
        file.write("/* changed */\n")
    asked = install("run", DCPD_COMPILE="1", **WITHOUT_COMPILER)
    why = "nothing can be compiled: there is no C compiler (no-such-compiler)"
    assert (asked.returncode, asked.stderr) == (1, f"{why}\n")
    done = install("run", **WITHOUT_COMPILER)
    assert done.returncode == 0
    assert done.stdout == f"dcpd runs as plain Python: {why} (DCPD_COMPILE=1 tells more)\n"
    assert form_text(native(source)) == "plain Python"
    assert install("test").stdout == LOOPS_SAID
    assert "removed the loops in C" in install("run", DCPD_COMPILE="0").stdout
