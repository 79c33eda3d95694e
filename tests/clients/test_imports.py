"""What imports what among the clients: no circle, imports for types and late ones included."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import clients

ROOT = Path(clients.__path__[0])


def modules():
    for path in ROOT.rglob("*.py"):
        parts = ("clients", *path.relative_to(ROOT).with_suffix("").parts)
        yield ".".join(parts).removesuffix(".__init__"), path


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_import_goes_round_in_a_circle():
    known = dict(modules())
    graph = {
        name: {other for other in imported(path) if other in known and other != name}
        for name, path in known.items()
    }
    assert graph["clients.consumer"] >= {"clients.consumer.core", "clients.errors"}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
