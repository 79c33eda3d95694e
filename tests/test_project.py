"""Habits of the project that no other tool checks, in the spirit of TigerBeetle's tidy."""

import ast
import re
import subprocess
import tomllib
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import hatch_build

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("dcp", "vbucket", "failover", "clients")
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 800
"""For a file that is one idea. What counts is the way of a request: `tests/test_caps.py`."""
LINE_CHARS_MAX = 100

VAGUE_NAMES = frozenset(
    f"{name}{plural}"
    for name in ("util", "helper", "manager", "common", "base", "misc", "tool")
    for plural in ("", "s")
)

SUPERVISION_POINTS: frozenset[tuple[str, str]] = frozenset(
    {
        # The commit path: the process ends with the reason, instead of leaving writers hanging.
        ("dcp/server/storage/committer.py", "_guarded"),
        ("dcp/server/storage/committer.py", "_work"),
        # A session: its connection ends, the others go on.
        ("dcp/server/net/connection.py", "data_received"),
        ("dcp/server/net/connection.py", "_supervised"),
        ("dcp/server/net/connection.py", "run"),
        # The cores of replication: the process ends, because what it would answer may be wrong.
        ("dcp/server/cluster/replicated_node.py", "guarded"),
        # Housekeeping: it is logged and counted, and the task goes on.
        ("dcp/server/observe/housekeeping.py", "repeat"),
        ("dcp/server/observe/housekeeping.py", "step"),
    }
)
"""(file, function) where any exception may be caught, because the failure of one task must not take
the others with it. Each entry needs a reason beside it."""

# Put together here, so that this file does not hold what it looks for.
REGISTRY_HOSTS = tuple(
    ".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "com"))
)
MACHINE_PATHS = tuple(
    re.compile(rf"(?<![\w.~-])/{folder}/\w") for folder in ("work", "root", "home", "Users")
)


def tracked_files() -> list[Path]:
    """Files under version control; in an exported archive, all but what is installed there."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
        ).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        paths = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        listed = [str(path) for path in paths if not path.parts[0].startswith(".")]
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


TRACKED = tracked_files()
PYTHON = [path for path in TRACKED if path.suffix == ".py"]
PRODUCT = [path for path in PYTHON if path.relative_to(ROOT).parts[0] in PACKAGES]
C_SOURCES = [path for path in TRACKED if path.suffix in {".c", ".h"}]
SCRIPTS = [path for path in TRACKED if path.relative_to(ROOT).parts[0] in {"scripts", ".ci"}]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@lru_cache(maxsize=1)
def trees() -> dict[Path, ast.Module]:
    """Every file's syntax tree. Not made while tests are collected: every worker does that."""
    return {path: ast.parse(path.read_text()) for path in PYTHON}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def lines_without_docstring(function: Function) -> int:
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None and first.end_lineno is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def test_there_is_something_to_check():
    assert {path.relative_to(ROOT).parts[0] for path in PRODUCT} == set(PACKAGES)


def test_functions_fit_on_a_screen():
    too_long = [
        f"{name_of(path)}:{function.lineno} {function.name}: {lines} lines"
        for path, tree in trees().items()
        for function in functions(tree)
        if (lines := lines_without_docstring(function)) > FUNCTION_LINES_MAX
    ]
    assert too_long == []


def test_files_stay_readable():
    too_long = [
        f"{name_of(path)}: {lines} lines"
        for path in PYTHON
        if (lines := len(path.read_text().splitlines())) > FILE_LINES_MAX
    ]
    assert too_long == []


def test_c_is_only_in_the_native_package_and_short():
    """The same limits as for Python."""
    assert {name_of(path.parent) for path in C_SOURCES} == {"vbucket/native"}
    built = {line.split()[1] for line in hatch_build.sources_text(ROOT).splitlines()}
    assert {name_of(path) for path in C_SOURCES} == built, "all of it is built, and checked"
    too_long = []
    for path in C_SOURCES:
        lines = path.read_text().splitlines()
        too_long += [name_of(path)] if len(lines) > FILE_LINES_MAX else []
        begins = [at for at, line in enumerate(lines) if line == "{"]
        ends = [at for at, line in enumerate(lines) if line == "}"]
        assert len(begins) <= len(ends), f"{name_of(path)}: a brace of a function stands alone"
        for begin in begins:
            length = min(end for end in ends if end > begin) - begin + 1
            too_long += [f"{name_of(path)}:{begin}"] if length > FUNCTION_LINES_MAX else []
    assert too_long == []


def test_lines_of_scripts_and_c_fit():
    """Ruff sees to those of Python."""
    too_long = [
        f"{name_of(path)}:{number}"
        for path in [*SCRIPTS, *C_SOURCES]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > LINE_CHARS_MAX
    ]
    assert too_long == []


def test_modules_are_named_for_what_they_hold():
    vague = [name_of(path) for path in PYTHON if path.stem in VAGUE_NAMES]
    assert vague == []


def is_broad(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = [node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)]
    is_broad_name = bool({"Exception", "BaseException"} & set(names))
    reraises = any(isinstance(node, ast.Raise) and node.exc is None for node in ast.walk(handler))
    return is_broad_name and not reraises


def test_only_supervision_points_catch_everything():
    """A handler that cleans up and raises again is not one of them."""
    found = {
        (name_of(path), function.name)
        for path in PRODUCT
        for function in functions(trees()[path])
        for node in ast.walk(function)
        if isinstance(node, ast.ExceptHandler) and is_broad(node)
    }
    assert found == SUPERVISION_POINTS


def public_without_docstring(body: list[ast.stmt], prefix: str) -> list[str]:
    missing = []
    for node in body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None:
            missing.append(f"{prefix}{node.name}")
        if isinstance(node, ast.ClassDef):
            missing += public_without_docstring(node.body, f"{prefix}{node.name}.")
    return missing


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_public_is_documented(package):
    missing = []
    for path in PRODUCT:
        if path.relative_to(ROOT).parts[0] == package:
            tree = trees()[path]
            if ast.get_docstring(tree) is None:
                missing.append(name_of(path))
            missing += public_without_docstring(tree.body, f"{name_of(path)}: ")
    assert missing == []


def test_a_newcomer_finds_the_usual_files():
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        assert (ROOT / name).stat().st_size > 0, name
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 60, "more than one screen"
    version = re.search(r'__version__ = "(.+)"', (ROOT / "dcp/__init__.py").read_text())
    assert version is not None
    titles = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version[1] in titles[0], "the newest section of CHANGELOG.md is that of the version"


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def normal(requirement: str) -> str:
    """The name in a requirement, as package indexes compare names."""
    return re.sub(
        r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", requirement.strip(), maxsplit=1)[0]
    ).lower()


def locked(name: str) -> dict[str, str]:
    """Name -> version of a file of locked requirements."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    pins = re.findall(r"^([A-Za-z0-9_.-]+)==([^ ;\\]+)", text, re.MULTILINE)
    return {normal(package): version for package, version in pins}


def test_every_dependency_is_locked_with_hashes():
    project = pyproject()["project"]
    built_with = pyproject()["build-system"]["requires"]
    extras = project["optional-dependencies"]
    wanted_by_lock = {
        "run": built_with, "test": [*built_with, *extras["test"]],
        "bench": [*built_with, *extras["bench"]],
        "docs": [*built_with, *extras["docs"]],
    }  # fmt: skip
    for lock, wanted in wanted_by_lock.items():
        names = {normal(item) for item in [*project["dependencies"], *wanted]}
        assert names - set(locked(lock)) == set(), f"run scripts/lock for {lock}"
    for path in (ROOT / "requirements").glob("*.txt"):
        for block in re.split(r"\n(?=\S)", path.read_text()):
            assert block.startswith("#") or "--hash=sha256:" in block, f"{path.name}: {block}"


def test_locks_agree_with_each_other():
    run, test, bench = locked("run"), locked("test"), locked("bench")
    assert {name: test.get(name) for name in run} == run
    assert {name: bench.get(name) for name in run} == run
    site = locked("docs")
    assert {name: test.get(name) for name in site} == site, "tests build the site with the same"


def test_what_builds_the_project_has_the_versions_of_the_locks():
    """Hatchling, and all that it requires: pip would take the newest of what is not named."""
    pins = dict(item.split("==") for item in pyproject()["build-system"]["requires"])
    for lock in ("run", "test"):
        found = locked(lock)
        assert {name: found.get(name) for name in pins} == pins, f"run scripts/lock for {lock}"
    wanted = (ROOT / "requirements" / "build.in").read_text().splitlines()
    todo = [normal(line) for line in wanted if not line.startswith("#")]
    needed = set()
    while todo:
        name = todo.pop()
        needed.add(name)
        required = map(Requirement, metadata.requires(name) or ())
        todo += [
            normal(item.name)
            for item in required
            if item.marker is None or item.marker.evaluate({"extra": ""})
        ]
    assert needed == set(pins), "run scripts/lock"


def test_nothing_names_a_registry_or_a_machine():
    found = []
    for path in TRACKED:
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{name_of(path)}: {host}" for host in REGISTRY_HOSTS if host in text]
        found += [f"{name_of(path)}: {p.pattern}" for p in MACHINE_PATHS if p.search(text)]
    assert found == []


def test_asserts_are_kept():
    """Invariants are asserts: nothing may start Python with them removed."""
    # `python -O` itself is refused, see test_main.py.
    assert SCRIPTS
    for path in SCRIPTS:
        assert not re.search(r"PYTHONOPTIMIZE|python\S*\s+-OO?\b", path.read_text()), path.name


def test_scripts_stop_at_the_first_failure():
    for path in SCRIPTS:
        text = path.read_text()
        if text.startswith("#!/usr/bin/env bash"):
            assert "\nset -euo pipefail\n" in text, path.name


def test_the_readme_is_two_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
