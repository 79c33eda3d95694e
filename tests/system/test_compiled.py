"""The hot modules compiled: a wheel made with them passes the tests of the core, and says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from dcp.compiled import compiled_modules, problem, version_text

ROOT = Path(__file__).parents[2]
SOURCES = (
    "dcp", "vbucket", "failover", "clients", "pyproject.toml", "hatch_build.py", "README.md",
    "LICENSE",
)  # fmt: skip
CORE = (
    "vbucket/test_damaged_pages.py",
    "vbucket/test_engine.py",
    "vbucket/test_log.py",
    "vbucket/test_runs.py",
    "vbucket/test_store.py",
    "session/test_session_documents.py",
    "session/test_session_with_meta.py",
    "stream/test_codec_plain.py",
    "stream/test_stream_snapshots.py",
)
CHECK = """
import importlib, hatch_build
for name in hatch_build.COMPILED:
    module = importlib.import_module(name.removesuffix(".py").replace("/", "."))
    assert module.__file__.endswith((".so", ".pyd")), module.__file__
print(len(hatch_build.COMPILED))
"""


def no_compiler() -> str:
    """Why nothing can be compiled here, "" if it can."""
    command = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(command) is None:
        return f"there is no C compiler here ({command}; Debian: sudo apt-get install gcc)"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        return f"Python's headers are missing ({header}; Debian: sudo apt-get install python3-dev)"
    return ""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import a compiled wheel from."""
    if why := no_compiler():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("compiled")
    source = folder / "source"
    source.mkdir()
    without = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd", "compiled_sources.txt")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=without)
        else:
            shutil.copyfile(ROOT / name, source / name)
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=source, env=os.environ | {"DCPD_COMPILE": "1", "DCPD_COMPILE_LEVEL": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = folder.glob("*.whl")
    assert "none-any" not in wheel.name, "a compiled wheel is for one Python on one platform"
    target = folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    shutil.copyfile(ROOT / "hatch_build.py", target / "hatch_build.py")
    return target


def run_python(site: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.timeout(300)
def test_the_core_passes_its_tests_compiled(site: Path, tmp_path: Path) -> None:
    checked = run_python(site, "-c", CHECK, cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("npm"))
    shutil.copyfile(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    tests = [f"tests/{name}" for name in CORE]
    ran = run_python(site, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout[-5000:]


@pytest.mark.timeout(300)
def test_a_compiled_server_says_so_and_refuses_changed_sources(site: Path, tmp_path: Path) -> None:
    version = run_python(site, "-m", "dcp.server.main", "--version", cwd=tmp_path)
    assert version.stdout.endswith("(compiled)\n"), version.stderr
    source = site / "vbucket" / "engine.py"
    text = source.read_text()
    try:
        source.write_text(text + "# changed\n")
        refused = run_python(site, "-m", "dcp.server.main", "--data", "data", cwd=tmp_path)
    finally:
        source.write_text(text)
    assert refused.returncode == 1
    assert "1 modules were changed after they were compiled (vbucket/engine.py)" in refused.stderr
    assert "scripts/compile" in refused.stderr
    assert not (tmp_path / "data").exists()


def test_plain_modules_are_no_problem_and_say_nothing(tmp_path: Path) -> None:
    assert compiled_modules(tmp_path) == []
    assert problem(tmp_path) == ""
    assert version_text("1.2", tmp_path) == "1.2"
