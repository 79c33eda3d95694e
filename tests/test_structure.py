"""How modules depend on each other, in ways that import-linter's layers do not cover.

The graph is read from the sources. It holds every import, also those inside functions and under
TYPE_CHECKING: a type that two modules need of each other is a circle, too.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("dcp", "vbucket", "failover", "clients")
NODE = "dcp.server.node"

Graph = dict[str, set[str]]


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield what a module of this package imports: a module, or a module and a name in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")
            origin = above[: len(above) + 1 - node.level] if node.level else []
            origin += [node.module] if node.module else []
            yield from (".".join([*origin, alias.name]) for alias in node.names)


def import_graph(root: Path, packages: tuple[str, ...]) -> Graph:
    """Return module -> the modules of these packages that it imports."""
    paths = {
        module_name(path, root): path
        for package in packages
        for path in sorted((root / package).rglob("*.py"))
    }
    graph: Graph = {}
    for name, path in paths.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        names = imported_names(ast.parse(path.read_text()), package)
        found = {full if full in paths else full.rpartition(".")[0] for full in names}
        graph[name] = (found & paths.keys()) - {name}
    return graph


def circle_in(graph: Graph) -> list[str]:
    """Return the modules of a circle of imports, the first one again at the end; [] without one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])[::-1]
    return []


GRAPH = import_graph(ROOT, PACKAGES)


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circle_in(GRAPH) == []


def test_the_node_is_only_run_and_not_used() -> None:
    """It knows all parts of the server; a part that knew it would know all others."""
    users = {name for name, others in GRAPH.items() if NODE in others}
    assert users == {"dcp.server.main", "dcp.server.signal_watch"}


def test_imports_are_found_wherever_they_stand(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    (package / "inner").mkdir(parents=True)
    sources = {
        "__init__.py": "",
        "plain.py": "import pack.late\n",
        "late.py": "def f():\n    from pack import typed\n    import os\n",
        "typed.py": (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack.inner import X\n"
        ),
        "inner/__init__.py": "from .relative import X\n",
        "inner/relative.py": "from .. import plain\nX = 1\n",
    }
    for name, source in sources.items():
        (package / name).write_text(source)
    graph = import_graph(tmp_path, ("pack",))
    assert graph == {
        "pack": set(),
        "pack.plain": {"pack.late"},
        "pack.late": {"pack.typed"},
        "pack.typed": {"pack.inner"},
        "pack.inner": {"pack.inner.relative"},
        "pack.inner.relative": {"pack.plain"},
    }
    assert len(circle_in(graph)) == len(graph)  # all but the package itself, and the first again
    graph["pack.late"].clear()
    assert circle_in(graph) == []


def test_a_class_has_its_name_alone_in_its_package() -> None:
    """Elsewhere another class may have it: the package says which is meant."""
    places: dict[tuple[Path, str], list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[path.parent, node.name].append(path.name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


RULES = sorted((ROOT / "failover" / "rules").glob("*.py"))


def names_used(paths: list[Path]) -> set[str]:
    """Return the names and attributes that sources read."""
    return {
        node.id if isinstance(node, ast.Name) else node.attr
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name | ast.Attribute)
    }


def test_every_rule_of_failover_has_a_caller_in_the_product() -> None:
    """What the model checker proves is what runs: a rule that only tests use proves nothing."""
    product = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    used = names_used(product)
    rules = [
        f"{path.stem}.{node.name}"
        for path in RULES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    assert len(rules) > 50
    assert [rule for rule in rules if rule.rpartition(".")[2] not in used] == []


PREDICATES = ("is_", "has_", "can_", "must_", "may_", "waits_", "pauses")
CHANGES = frozenset(
    [
        "add",
        "append",
        "appendleft",
        "clear",
        "discard",
        "extend",
        "insert",
        "pop",
        "popitem",
        "popleft",
        "remove",
        "setdefault",
        "update",
    ]
)


def root_of(node: ast.expr) -> str:
    """Return the name at the root of `name.attribute[index]`; "": there is none."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def predicates_that_change(tree: ast.AST) -> list[str]:
    """Return the predicates that change what they got, or their object."""
    found = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not function.name.lstrip("_").startswith(PREDICATES):
            continue
        got = {argument.arg for argument in [*function.args.args, *function.args.kwonlyargs]}
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(
                node.ctx, ast.Load
            ):
                changed = root_of(node)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                changed = root_of(node.func) if node.func.attr in CHANGES else ""
            else:
                continue
            if changed in got:
                found.append(function.name)
                break
    return found


@pytest.mark.parametrize("package", ["dcp", "failover", "vbucket"])
def test_a_predicate_changes_nothing(package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    found = {path.name: predicates_that_change(ast.parse(path.read_text())) for path in paths}
    assert {name: names for name, names in found.items() if names} == {}


def test_a_predicate_that_changes_something_is_found() -> None:
    source = """
class Queue:
    def is_empty(self): return not self._items
    def has_next(self):
        self._items.pop()
    def _can_wait(self, other):
        other.count += 1
    def may_join(self):
        self._seen[1] = 2
    def take(self):
        self._items.clear()
"""
    assert predicates_that_change(ast.parse(source)) == ["has_next", "_can_wait", "may_join"]
