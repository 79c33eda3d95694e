"""The hot modules compiled, as they are by default: they work, and say so. test_plain_python.py has
installations where they cannot be compiled.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import hatch_build
from dcp.compiled import compiled_modules, form_text, problem
from support.installations import (
    COMPILED_OR_FAILED,
    COMPILING,
    ROOT,
    WITHOUT_COMPILER,
    build_wheel,
    copied_sources,
    no_compiler,
    plain_environment,
    run,
    unpack,
    use,
)
from support.registry import no_registry

PACKAGES = ("dcp", "vbucket", "failover", "clients")
BUILT_FROM = (
    "dcp", "vbucket", "failover", "requirements/compile.txt", "pyproject.toml", "hatch_build.py",
)  # fmt: skip
"""What the compiled modules are made of. While none of it changes, they are not compiled again."""
SOURCE_SUFFIXES = {".py", ".pyi", ".c", ".h", ".txt", ".toml"}
CACHE = Path(sys.prefix) / "compiled-tests"
"""Beside what is installed; remove it to compile again."""
SMALL_LOOPS = """
#include <Python.h>
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "vbucket.native.loops"};
PyMODINIT_FUNC PyInit_loops(void) { return PyModule_Create(&definition); }
"""
"""Instead of all loops, where only matters that something is built, and when."""
LOOPS_SAID = "compiled the loops in C beside the sources\n"
CORE = (
    "session/test_session_documents.py", "session/test_session_get_runs.py",
    "session/test_session_put_frames.py", "session/test_session_set_runs.py",
    "session/test_session_with_meta.py", "stream/test_codec_plain.py", "stream/test_send_state.py",
    "stream/test_stream_model.py", "stream/test_stream_snapshots.py", "vbucket/test_apply_paths.py",
    "vbucket/test_block.py", "vbucket/test_compaction.py", "vbucket/test_damaged_pages.py",
    "vbucket/test_engine.py", "vbucket/test_engine_model.py", "vbucket/test_group_runs.py",
    "vbucket/test_item_cache.py", "vbucket/test_key_record.py", "vbucket/test_key_tree.py",
    "vbucket/test_kvenv.py", "vbucket/test_loads.py", "vbucket/test_loads_beside.py",
    "vbucket/test_log.py", "vbucket/test_merge.py", "vbucket/test_merge_slices.py",
    "vbucket/test_native.py", "vbucket/test_replay_run.py", "vbucket/test_runs.py",
    "vbucket/test_store.py", "vbucket/test_tally.py", "vbucket/test_scan_walks.py",
    "wire/test_frame.py",
)  # fmt: skip
"""Tests of compiled modules, which also run as plain Python, like all tests."""
REPLACING_METHODS = (
    "session/test_session_put_frames.py::test_damaged_data_changes_nothing",
    "vbucket/test_item_cache.py::test_a_change_with_a_condition_asks_the_store_once",
)
"""Tests of these files that run as plain Python only: they put methods of their own into objects,
which compiled callers do not use, or which compiled objects refuse."""
CHECK = """
import importlib, hatch_build
for name in hatch_build.COMPILED:
    module = importlib.import_module(name.removesuffix(".py").replace("/", "."))
    assert module.__file__.endswith((".so", ".pyd")), module.__file__
importlib.import_module(hatch_build.LOOPS)
print(len(hatch_build.COMPILED))
"""


def digest(*names: str) -> str:
    """Return a checksum of files, of all that is in folders, and of where the interpreter is."""
    found = hashlib.sha256(f"{sys.version} {sys.prefix}".encode())
    for name in names:
        path = ROOT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in SOURCE_SUFFIXES and file.name != "compiled_sources.txt":
                found.update(f"{file.relative_to(ROOT)} ".encode() + file.read_bytes())
    return found.hexdigest()[:20]


class Built:
    """A copy of the sources, and what was built of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = folder / "source"
        self.site = folder / "site"
        """The compiled packages alone, to import them from."""
        self.environment = folder / "environment"
        """An environment that had nothing but pip, and then `pip install .`; if `not_run` is ""."""
        self.not_run = ""

    def python(self) -> Path:
        if self.not_run:
            pytest.skip(self.not_run)
        return self.environment / "bin" / "python"

    def build(self) -> None:
        """Build as the README says, or with what is installed where nothing can be fetched."""
        self.folder.mkdir(parents=True)
        copied_sources(self.folder)
        self.not_run = no_registry(self.folder / "probe")
        if self.not_run:
            self.build_here()
        else:
            self.install()
        (self.folder / "not-run").write_text(self.not_run)  # the last file: all is there

    def take_over(self) -> bool:
        """Take what an earlier run has built of the same sources; False where there is none."""
        if not (self.folder / "not-run").exists():
            return False
        self.not_run = (self.folder / "not-run").read_text()
        shutil.rmtree(self.source)
        copied_sources(self.folder)
        shutil.rmtree(self.site / "clients")  # not compiled, so it may have changed
        shutil.copytree(self.source / "clients", self.site / "clients")
        return True

    def install(self) -> None:
        """Do as the README says, in an environment of its own."""
        venv.create(self.environment, with_pip=True)
        installed = run("-m", "pip", "install", ".", cwd=self.source, python=self.python(),
                        **COMPILING)  # fmt: skip
        assert installed.returncode == 0, installed.stdout + installed.stderr
        (packages,) = self.environment.glob("lib/python*/site-packages")
        for name in PACKAGES:
            shutil.copytree(packages / name, self.site / name)
        for library in packages.glob("*__mypyc*.so"):
            shutil.copyfile(library, self.site / library.name)

    def build_here(self) -> None:
        """Make a wheel with what is installed here: where nothing can be fetched."""
        built = build_wheel(self.source, self.folder, **COMPILED_OR_FAILED)
        assert built.returncode == 0, built.stdout + built.stderr
        unpack(self.folder, self.site)


@pytest.fixture(scope="module")
def built() -> Built:
    """Compiled once for all tests, and kept while its sources stay the same: it takes a minute."""
    if why := no_compiler():
        pytest.skip(why)
    CACHE.mkdir(exist_ok=True)
    built = Built(CACHE / digest(*BUILT_FROM))
    if not built.take_over():
        for older in CACHE.iterdir():
            shutil.rmtree(older)
        built.build()
    shutil.copyfile(ROOT / "hatch_build.py", built.site / "hatch_build.py")
    return built


@pytest.fixture(scope="module")
def site(built: Built) -> Path:
    return built.site


@pytest.mark.timeout(900)
def test_pip_compiles_in_an_empty_environment(built: Built, tmp_path: Path) -> None:
    """Nothing is there but what pip brings. The build has hatchling and the rest as locked."""
    python = built.python()
    version = run(str(python.with_name("dcpd")), "--version", python=python)
    assert version.stdout.endswith("(compiled)\n"), version.stderr
    assert "(compiled) is ready" in use(python, tmp_path)
    smoke = run(str(ROOT / "scripts" / "smoke.py"), python=python, cwd=tmp_path)
    assert smoke.returncode == 0, smoke.stderr
    assert "(compiled), Python" in smoke.stdout


def in_place(source: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Compile in place as scripts/install does; `more` replaces the prefix of what is kept, too."""
    code = (
        "import sys, runpy; sys.prefix = sys.argv.pop(1); "
        "runpy.run_path('hatch_build.py', run_name='__main__')"
    )
    return run("-c", code, str(source.parent / "env"), *arguments, cwd=source, **COMPILING, **more)


def small_sources(folder: Path) -> Path:
    """Copy the sources, with next to nothing to compile."""
    source = copied_sources(folder)
    for name in hatch_build.LOOPS_SOURCES:
        is_module = Path(name).stem == hatch_build.LOOPS.rpartition(".")[2]
        (source / name).write_text(SMALL_LOOPS if is_module else "")
    return source


def test_the_loops_have_no_warnings() -> None:
    """But one: methods take their own type for `self`, as is usual in extensions."""
    if why := no_compiler():
        pytest.skip(why)
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    flags = [
        "-fsyntax-only", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror",
        "-Wno-cast-function-type", "-I", sysconfig.get_path("include"),
    ]  # fmt: skip
    sources = [str(ROOT / name) for name in hatch_build.LOOPS_SOURCES]
    done = subprocess.run([compiler, *flags, *sources], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_loops_are_compiled_in_place_and_again_after_a_change(tmp_path: Path) -> None:
    if why := no_compiler():
        pytest.skip(why)
    source = small_sources(tmp_path)
    said = "compiled the loops in C beside the sources\n"
    assert in_place(source, "--loops").stdout == said
    assert form_text(source) == "plain Python, loops in C"
    assert in_place(source, "--loops").stdout == "", "nothing has changed"
    (library,) = source.glob("vbucket/native/*.so")
    loops = source / "vbucket" / "native" / "loops.c"
    text = loops.read_text()
    loops.write_text(text + "/* changed */\n")
    assert "1 modules were changed after they were compiled" in problem(source)
    with library.open("rb") as running:  # its inode is not given to another file while it is open
        assert in_place(source, "--loops").stdout == said
        assert problem(source) == ""
        before = os.fstat(running.fileno())
        assert not before.st_nlink, "a process that runs the old one keeps it"
        assert library.stat().st_ino != before.st_ino
    removed = in_place(source, DCPD_COMPILE="0")
    assert removed.stdout == "removed 2 files: dcpd runs as plain Python\n"
    assert form_text(source) == "plain Python"
    kept = in_place(source, "--loops", **WITHOUT_COMPILER)
    assert kept.stdout == said, "it was kept, and is copied"
    loops.write_text(text)
    failed = in_place(source, "--loops", **WITHOUT_COMPILER)
    assert failed.returncode == 1
    assert failed.stderr == ("nothing can be compiled: there is no C compiler (no-such-compiler)\n")
    assert form_text(source) == "plain Python", "the old library is not used with new sources"


def test_two_builds_at_once_wait_for_each_other(tmp_path: Path) -> None:
    """Both wrote to the same folder: one failed, and then removed what the other one had made."""
    if why := no_compiler():
        pytest.skip(why)
    source = small_sources(tmp_path)
    with ThreadPoolExecutor() as threads:
        builds = [threads.submit(in_place, source, "--loops") for _ in range(2)]
        done = [build.result() for build in builds]
    assert [build.returncode for build in done] == [0, 0], done
    assert sorted(build.stdout for build in done) == ["", LOOPS_SAID], "one finds it done"
    assert form_text(source) == "plain Python, loops in C"


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """As in a tree that is read-only, which it is not for root: other things are in the way."""
    if why := no_compiler():
        pytest.skip(why)
    source = small_sources(tmp_path)
    (tmp_path / "env").touch()
    failed = in_place(source, "--loops")
    assert failed.returncode == 1
    (line,) = failed.stderr.splitlines()
    assert line.startswith("the build could not read or write a file: ")
    assert form_text(source) == "plain Python"
    (tmp_path / "env").unlink()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    in_the_way = source / "vbucket" / "native" / f"loops{suffix}.new"
    in_the_way.mkdir()
    failed = in_place(source, "--loops")
    assert failed.returncode == 1
    (line,) = failed.stderr.splitlines()
    assert line.startswith("the compiled modules cannot be read or written here: ")
    assert str(in_the_way) in line
    in_the_way.rmdir()
    assert in_place(source, "--loops").stdout == LOOPS_SAID


def test_a_library_cut_short_is_not_used_again(tmp_path: Path) -> None:
    """What is kept is compared with what was compiled; a server that finds it broken says so."""
    if why := no_compiler():
        pytest.skip(why)
    source = small_sources(tmp_path)
    assert in_place(source, "--loops").stdout == LOOPS_SAID
    (library,) = source.glob("vbucket/native/*.so")
    whole = library.read_bytes()
    replace_file(library, whole[:100])
    started = run("-m", "dcp.server.main", "--data", str(tmp_path / "data"), "--port", "0",
                  cwd=source, PYTHONPATH=str(source))  # fmt: skip
    assert started.returncode == 1
    (line,) = started.stderr.splitlines()
    assert "the loops in C cannot be loaded" in line
    assert "scripts/compile --remove" in line
    (kept,) = (tmp_path / "env").rglob("*.so")
    replace_file(kept, whole[:100])
    assert in_place(source, DCPD_COMPILE="0").returncode == 0
    assert in_place(source, "--loops").stdout == LOOPS_SAID
    assert kept.stat().st_size > 100
    (library,) = source.glob("vbucket/native/*.so")
    assert library.stat().st_size > 100


def replace_file(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def test_sources_that_change_during_a_build_are_noticed(tmp_path: Path) -> None:
    """As by `git pull`: what was compiled is that of before, and so is its list."""
    if why := no_compiler():
        pytest.skip(why)
    source = small_sources(tmp_path)
    real = (sysconfig.get_config_var("CC") or "cc").split()[0]
    compiler = tmp_path / "compiler"
    header = source / "vbucket" / "native" / "counts.h"
    compiler.write_text(f'#!/bin/sh\necho "/* changed */" >> {header}\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    assert in_place(source, "--loops", CC=str(compiler)).stdout == LOOPS_SAID
    assert "1 modules were changed after they were compiled (vbucket/native/counts.h)" in problem(
        source
    )
    assert in_place(source, "--loops").stdout == LOOPS_SAID
    assert problem(source) == ""


def test_an_interrupted_build_and_one_for_another_python_are_told_apart(tmp_path: Path) -> None:
    names = ("dcp/one.py", "dcp/two.py", "vbucket/native/loops.c")
    imported = "dcp/three.py"
    listing = tmp_path / "dcp" / "compiled_sources.txt"
    for name in (*names, imported):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    lines = [f"{hashlib.sha256(name.encode()).hexdigest()}  {name}\n" for name in names]
    lines.append(f"{hashlib.sha256(imported.encode()).hexdigest()} *{imported}\n")
    listing.write_text("".join(lines))
    for name in names:
        (tmp_path / name).with_suffix(".cpython-39-other.so").touch()
    (tmp_path / "dcp" / "one.py").write_text("changed")
    assert problem(tmp_path) == "", "this Python loads none of them"
    assert form_text(tmp_path) == "plain Python"
    (tmp_path / "dcp" / "one.py").write_text("dcp/one.py")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    (tmp_path / "dcp" / "one.py").with_suffix(suffix).touch()
    assert "2 of 3 compiled modules are missing (dcp/two.py, vbucket/native/loops.c)" in problem(
        tmp_path
    )
    for name in names:
        (tmp_path / name).with_suffix(suffix).touch()
    assert problem(tmp_path) == ""
    assert compiled_modules(tmp_path) == ["dcp/one.py", "dcp/two.py"]
    (tmp_path / imported).write_text("changed")
    assert "1 modules were changed after they were compiled (dcp/three.py)" in problem(tmp_path)


def test_what_compiled_modules_import_counts_as_source() -> None:
    """The compiler replaces constants by their values, also those of modules that stay plain."""
    rows = hatch_build.sources_text(ROOT).splitlines()
    imported = {row[66:] for row in rows if row[64:66] == " *"}
    assert {"vbucket/model/datatype.py", "dcp/wire/opcode.py", "dcp/wire/xattrs.py"} <= imported
    assert not imported & set(hatch_build.COMPILED)
    assert "dcp/server/main.py" not in imported


def test_scripts_install_compiles_or_says_in_one_line_why_not(tmp_path: Path) -> None:
    """In an environment that counts as installed, and sees the packages that are here."""
    if why := no_compiler():
        pytest.skip(why)
    source = copied_sources(tmp_path)
    shutil.copytree(ROOT / "scripts", source / "scripts")
    venv.create(source / ".venv", with_pip=False)
    (packages,) = source.glob(".venv/lib/python*/site-packages")
    (packages / "here.pth").write_text(sysconfig.get_path("purelib"))
    project = (source / "pyproject.toml").read_bytes()
    for name in ("run", "test"):
        lock = (source / "requirements" / f"{name}.txt").read_bytes()
        stamp = f"{hashlib.sha256(lock + project).hexdigest()} {source}\n"
        (source / ".venv" / f".locked-{name}").write_text(stamp)

    def install(name: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "scripts/install", name], cwd=source, env=plain_environment() | more,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    assert install("test").stdout == "compiled the loops in C beside the sources\n"
    assert form_text(source) == "plain Python, loops in C"
    assert install("test").stdout == "", "nothing has changed"
    asked = install("run", DCPD_COMPILE="1", **WITHOUT_COMPILER)
    why = "nothing can be compiled: there is no C compiler (no-such-compiler)"
    assert (asked.returncode, asked.stderr) == (1, f"{why}\n")
    done = install("run", **WITHOUT_COMPILER)
    assert done.returncode == 0
    assert done.stdout == f"dcpd runs as plain Python: {why} (DCPD_COMPILE=1 tells more)\n"
    assert form_text(source) == "plain Python"
    assert install("test").stdout == "compiled the loops in C beside the sources\n", "copied"
    assert "removed 2 files" in install("run", DCPD_COMPILE="0").stdout


@pytest.mark.parametrize(
    ("name", "compiled"), [("run", "[]"), ("bench", "[]"), ("test", "['--loops']")]
)
def test_benchmarks_have_the_form_that_users_have(name: str, compiled: str, tmp_path: Path) -> None:
    """All that is hot, compiled; the tests run plain Python with the loops in C."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copyfile(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    (tmp_path / "hatch_build.py").write_text("import sys; print(sys.argv[1:])")
    venv.create(tmp_path / ".venv", with_pip=False)
    (packages,) = tmp_path.glob(".venv/lib/python*/site-packages")
    (packages / "here.pth").write_text(sysconfig.get_path("purelib"))
    lock = (tmp_path / "requirements" / f"{name}.txt").read_bytes()
    project = (tmp_path / "pyproject.toml").read_bytes()
    stamp = f"{hashlib.sha256(lock + project).hexdigest()} {tmp_path}\n"
    (tmp_path / ".venv" / f".locked-{name}").write_text(stamp)
    done = subprocess.run(
        ["bash", "scripts/install", name], cwd=tmp_path, env=plain_environment(),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == f"{compiled}\n", done.stderr


def test_what_compiling_needs_is_locked_to_versions(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "hatch_build.py"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    ask = "from hatchling.build import get_requires_for_build_wheel as ask; print(ask())"
    assert run("-c", ask, cwd=ROOT, DCPD_COMPILE="0").stdout == "[]\n", "plain needs nothing"
    assert run("-c", ask, cwd=ROOT, **WITHOUT_COMPILER).stdout == "[]\n", "nor does it here"
    without_lock = run("-c", ask, cwd=tmp_path, **COMPILED_OR_FAILED)
    assert "requirements/compile.txt is missing" in without_lock.stderr
    asked = run("-c", ask, cwd=ROOT, **COMPILED_OR_FAILED).stdout
    for name in (
        "mypy", "setuptools", "msgspec", "cbor2", "lmdb", "sortedcontainers-stubs", "hatchling",
    ):  # fmt: skip
        assert re.search(rf"'{name}==[0-9.]+'", asked), asked


def run_python(site: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.timeout(900)
def test_the_core_passes_its_tests_compiled(site: Path, tmp_path: Path) -> None:
    tests = [f"tests/{name}" for name in CORE]
    shared = [
        str(path.relative_to(ROOT))
        for folder in sorted({(ROOT / name).parent for name in tests})
        for path in sorted(folder.glob("*.py"))
        if not path.name.startswith("test_")
    ]
    made_of = digest("clients", "tests/support", "tests/conftest.py", *shared, *tests)
    stamp = site.parent / f"passed-{made_of}"
    if stamp.exists():
        pytest.skip(f"the same tests have passed with the same modules; remove {stamp} to run them")
    checked = run_python(site, "-c", CHECK, cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("npm"))
    shutil.copyfile(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    left_out = [f"--deselect=tests/{name}" for name in REPLACING_METHODS]
    ran = run_python(
        site, "-m", "pytest", "-q", "-p", "no:cacheprovider", *left_out, *tests, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
    stamp.touch()


@pytest.mark.timeout(900)
def test_a_compiled_server_says_so_and_refuses_changed_sources(site: Path, tmp_path: Path) -> None:
    version = run_python(site, "-m", "dcp.server.main", "--version", cwd=tmp_path)
    assert version.stdout.endswith("(compiled)\n"), version.stderr
    source = site / "vbucket" / "engine" / "engine.py"
    text = source.read_text()
    try:
        source.write_text(text + "# changed\n")
        refused = run_python(site, "-m", "dcp.server.main", "--data", "data", cwd=tmp_path)
    finally:
        source.write_text(text)
    assert refused.returncode == 1
    assert (
        "1 modules were changed after they were compiled (vbucket/engine/engine.py)"
        in refused.stderr
    )
    assert "scripts/compile" in refused.stderr
    assert not (tmp_path / "data").exists()
