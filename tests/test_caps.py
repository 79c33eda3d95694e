"""Caps of the structure: they only ever get tighter. What counts is the way, not lines.

Each cap has today's figure and the one that is wanted in the end. A change that lowers a figure
lowers the cap with it, so it does not rise again: a cap with room is a failure, too. Lines of code
may vary by LINES_ROOM. A feature that users get on top of what was there is named in FEATURES with
the files and lines that it may add; nothing else makes a cap grow.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = ("dcp", "vbucket", "failover", "clients")
NAME_LETTERS_MAX: Final = 60
"""A longer name is a sentence, which the docstring can say."""
LINES_ROOM: Final = 1_000

SETTINGS_TABLES: Final = frozenset({"ServerSettings"})
"""Classes whose attributes are a table of settings: one for each option."""
LOOP_TABLES: Final = frozenset({"Partition"})
"""Classes whose slots the loops in C read, most of them for each operation."""


class Cap(NamedTuple):
    """The most of something now, and in the end."""

    now: int
    wanted: int


class Feature(NamedTuple):
    """What a new feature may add."""

    files: int
    lines: int


FEATURES: Final[dict[str, Feature]] = {
    "retention for named consumers": Feature(6, 1125),
    "groups that live, dcpctl consumer groups": Feature(3, 542),
    "rollback on demand in a cluster": Feature(1, 390),
    "a cluster for each test": Feature(1, 270),
    "streams from copies that are not masters": Feature(1, 340),
    "purges wait for streams that copies serve": Feature(0, 260),
    "cuts between nodes, a demo that is controlled over HTTP": Feature(1, 310),
    "collections are answered when all nodes have written them, and no id is given twice": Feature(
        0, 135
    ),
    "dcpctl: edit, incr, touch, exists, expiries, JSON errors, --vb everywhere": Feature(3, 659),
    "dcpctl status on one screen, dcpctl top": Feature(5, 573),
    "dcpctl bench, also at a rate": Feature(4, 655),
    "dcpctl logs, dcpctl config": Feature(2, 265),
    "console: cluster, live changes, documents by key, sessions, log": Feature(5, 1200),
    "metrics of a cluster, and lag in seconds": Feature(2, 520),
    "spans for OpenTelemetry": Feature(1, 230),
    "import dcpd": Feature(5, 80),
    "dcpctl conformance consumer": Feature(14, 2600),
    "dcpctl conformance server": Feature(18, 5819),
    "backups in the console and in dcpctl backup list": Feature(3, 356),
    "dcpctl starts in less time, and a full output is an error": Feature(0, 20),
    "lag of what is not acknowledged, versions of streams, own rates": Feature(1, 140),
    "documents as of a moment": Feature(1, 111),
    "new clusters that begin with all of their nodes": Feature(1, 250),
    "settings that change while the server runs": Feature(2, 160),
    "dcpctl explain partition": Feature(2, 332),
    "merges that find records in C and have hashes in memory": Feature(0, 101),
    "merges that tell how much is done, so that writers need not stop": Feature(0, 44),
    "versions side by side, and new clusters that spread in less time": Feature(0, 30),
    "runs of all plain changes": Feature(0, 36),
    "live snapshots are cut once for all streams, more changes in runs": Feature(0, 30),
    "dcpd --partitions, and scenarios of the kit about it": Feature(0, 237),
    "Couchbase's consumers keep their connections while partitions move": Feature(0, 20),
    "a cluster's secret changes while nodes run": Feature(3, 390),
    "consistent cuts, atomic batches": Feature(7, 950),
    "consistent cuts of clusters": Feature(8, 1010),
    "cuts go on when clocks are set right again": Feature(0, 60),
    "copies find their differences by hashes": Feature(11, 2044),
    "a mirror's file keeps hashes": Feature(0, 140),
    "large answers take turns, so others wait for about one of them": Feature(0, 186),
    "hashes with more buckets, two groups of partitions compared at a time": Feature(0, 120),
    "a server says in one answer in what it differs from a copy": Feature(0, 170),
    "a restore sends what differs by its hashes": Feature(1, 180),
    "damage is found and mended, also from copies and backups": Feature(12, 2580),
    "branches, lists of blocks and records of partitions are mended": Feature(2, 500),
    "meta pages, checksums of pages and the log are mended": Feature(2, 500),
    "Spark: batches that end at cuts, tables as of a cut; dcpctl diff of a table": Feature(2, 560),
    "freed memory stays for the next large value": Feature(0, 30),
    "a start mends what checksums prove": Feature(3, 480),
    "a member gives up the rest of a damaged log": Feature(2, 246),
    "small files of a data folder are kept twice, and mended": Feature(2, 500),
    "a copy that was compacted less mends a block": Feature(0, 60),
    "a backup of a cluster streams while it waits for its cut": Feature(0, 60),
    "mutations are validated in runs": Feature(0, 120),
    "a consumer gets in what it differs": Feature(1, 420),
    "Spark reads in what its table differs": Feature(1, 420),
    "what is read and mended next is one core, which the simulator runs": Feature(2, 100),
    "damage that was mended and comes again is asked for at once": Feature(0, 7),
    "consumers take live changes by a short way, blocks of copies filled anew": Feature(0, 100),
    "who reads from copies goes on at another one where one is damaged": Feature(0, 132),
    "a replica keeps what it has where deletions are purged": Feature(1, 510),
    "a checksum of a block that became wrong is written again": Feature(0, 42),
    "servers of the testing kit find their ports again": Feature(0, 16),
    "connections without streams have fewer turns": Feature(0, 40),
    "locks that nobody was told of are taken back, their CAS is no document's": Feature(0, 38),
}
"""Feature, as users call it -> the files and lines that it may add to the product."""

CAPS: Final = {
    "attributes of a class": Cap(25, 25),
    "slots of a class that loops read": Cap(34, 25),
    "arguments of a constructor": Cap(10, 10),
    "callbacks passed to constructors": Cap(40, 40),
    "Protocol classes": Cap(25, 25),
    "support modules of tests": Cap(25, 25),
    "long names of tests": Cap(0, 0),
    "files": Cap(468 + sum(each.files for each in FEATURES.values()), 340),
    "files in a folder": Cap(15, 15),
    "lines": Cap(103_427 + sum(each.lines for each in FEATURES.values()), 87_000),
}


class Measured(NamedTuple):
    """A figure, and where it comes from."""

    figure: int
    where: str


@lru_cache(maxsize=1)
def sources() -> dict[Path, ast.Module]:
    """Path -> syntax tree of each module of the product that a person wrote."""
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return {path: ast.parse(path.read_text()) for path in paths if "_pb2" not in path.stem}


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield f"{path.relative_to(ROOT)}: {node.name}", node


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the names that a class declares, or sets on itself."""
    found = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for method in node.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            found |= {
                each.attr
                for each in ast.walk(method)
                if isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and isinstance(each.value, ast.Name)
                and each.value.id == "self"
            }
    return found


def constructor_arguments(node: ast.ClassDef) -> list[ast.arg]:
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            arguments = method.args
            return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs][1:]
    return []


def is_callback(argument: ast.arg) -> bool:
    return argument.annotation is not None and "Callable" in ast.unparse(argument.annotation)


def is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).split("[")[0] == "Protocol" for base in node.bases)


@lru_cache(maxsize=1)
def measured() -> dict[str, Measured]:
    folders = Counter(str(path.parent.relative_to(ROOT)) for path in sources())
    fullest, in_fullest = folders.most_common(1)[0]
    wide = [
        Measured(len(attributes(node)), name)
        for name, node in classes()
        if node.name not in SETTINGS_TABLES | LOOP_TABLES
    ]
    slots = [
        Measured(len(attributes(node)), name)
        for name, node in classes()
        if node.name in LOOP_TABLES
    ]
    long = [Measured(len(constructor_arguments(node)), name) for name, node in classes()]
    callbacks = [
        f"{name}.{argument.arg}"
        for name, node in classes()
        for argument in constructor_arguments(node)
        if is_callback(argument)
    ]
    protocols = [name for name, node in classes() if is_protocol(node)]
    lines = sum(len(path.read_text().splitlines()) for path in sources())
    support = list((ROOT / "tests" / "support").glob("*.py"))
    names = [
        name
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
        if len(name) > NAME_LETTERS_MAX
    ]
    return {
        "attributes of a class": max(wide),
        "slots of a class that loops read": max(slots),
        "arguments of a constructor": max(long),
        "callbacks passed to constructors": Measured(len(callbacks), ", ".join(callbacks)),
        "Protocol classes": Measured(len(protocols), ", ".join(protocols)),
        "files": Measured(len(sources()), "dcp, vbucket, failover, clients"),
        "files in a folder": Measured(in_fullest, fullest),
        "lines": Measured(lines, "dcp, vbucket, failover, clients"),
        "support modules of tests": Measured(len(support), "tests/support"),
        "long names of tests": Measured(len(names), ", ".join(names[-3:])),
    }


@pytest.mark.parametrize("name", CAPS)
def test_no_cap_is_passed_and_none_has_room(name: str) -> None:
    cap, found = CAPS[name], measured()[name]
    assert found.figure <= cap.now, f"{name}: {found.figure} of at most {cap.now}: {found.where}"
    room = LINES_ROOM if name == "lines" else 0
    lowered = max(found.figure, cap.wanted)
    assert cap.now - lowered <= room, f"{name}: lower the cap from {cap.now} to {lowered}"


def test_what_the_caps_count_is_found() -> None:
    """The counting itself, on a class that has one of each."""
    source = """
class Wired(Protocol[T]):
    declared: int
    def __init__(self, plain: int, done: Callable[[], None], *, named: int) -> None:
        self.first = plain
        self.declared = named
    def later(self) -> None:
        self.second = self.first
"""
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.ClassDef)
    assert is_protocol(node)
    assert attributes(node) == {"declared", "first", "second"}
    assert [each.arg for each in constructor_arguments(node)] == ["plain", "done", "named"]
    assert [each.arg for each in constructor_arguments(node) if is_callback(each)] == ["done"]
