"""The power goes at the same points for LMDB and for its twin in memory: a start finds the same.

The life of a node is that of `test_power_loss`. The points are those of the store: its commits, and
the moments between a merge's commit and the deletion of its segments. The twin forgets a commit or
has it. LMDB leaves what its order of writes allows: pages of an unfinished commit under the meta
pages of before; a finished one whose checksums (`pages.sums`) are missing, or there in part.
"""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from test_power_loss import live_fixed

from support.forgetful_disk import Power
from support.memory_node import LmdbNode, MemoryNode
from support.power_node import Picture, PowerNode, Story
from vbucket.engine.engine import SET
from vbucket.store.environment import KvWrite
from vbucket.store.lmdb.environment_lmdb import LmdbEnv
from vbucket.store.lmdb.page_sums import SUMS_FILE_NAME, SUMS_HEADER
from vbucket.store.records import META_TABLE, TABLES, NodeRecord

SHARES = (0, 1)
POINTS = frozenset({"store commit", "remove"})
PAGE_BYTES, META_PAGES = 4096, 2
MAP_BYTES = 1 << 24
FILES = ("data.mdb", SUMS_FILE_NAME)
Files = dict[str, bytes]


class LmdbCopies:
    """`ForgetfulEnv` over LMDB: what a cut leaves is a folder with other files."""

    left: ClassVar[Counter[str]] = Counter()
    """How often a cut left what."""

    def __init__(self, power: Power, folder: Path, number: Iterator[int], files: Files) -> None:
        self._power = power
        self._folder, self._number = folder, number
        self._place = folder / str(next(number))
        self._place.mkdir()
        for name, data in files.items():
            (self._place / name).write_bytes(data)
        self._env = LmdbEnv(self._place, TABLES, map_size_bytes=MAP_BYTES)
        self._before: Files | None = None
        """The files before the commit that is being made; None: none is."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def _files(self) -> Files:
        return {name: (self._place / name).read_bytes() for name in FILES}

    @contextmanager
    def write(self) -> Iterator[KvWrite]:
        """See KvEnv."""
        before = self._files()
        with self._env.write() as write:
            yield write
        self._before = before
        self._power.point("store commit")
        self._before = None

    def after(self, power: Power, draw: random.Random, share: float) -> LmdbCopies:
        """Return what a power cut leaves now. It draws as often as the twin does."""
        is_there, files = draw.random() < share, self._files()
        if self._before is not None:
            tears = random.Random(len(files["data.mdb"]) + power.points)
            leave = finished if is_there else unfinished
            files, what = leave(self._before, files, tears)
            self.left[what] += 1
        return LmdbCopies(power, self._folder, self._number, files)


def unfinished(before: Files, after: Files, tears: random.Random) -> tuple[Files, str]:
    """Return what a cut within a commit leaves: any of its pages, and no new meta page."""
    old, new = before["data.mdb"], bytearray(after["data.mdb"])
    share = tears.choice((0, 0.5, 1))
    for at in range(0, len(new), PAGE_BYTES):
        if at < META_PAGES * PAGE_BYTES or tears.random() >= share:
            page = old[at : at + PAGE_BYTES]
            new[at : at + PAGE_BYTES] = page or bytes(PAGE_BYTES)
    return before | {"data.mdb": bytes(new)}, f"{share} of an unfinished commit"


def finished(before: Files, after: Files, tears: random.Random) -> tuple[Files, str]:
    """Return what a cut after a commit leaves: checksums of before, or some new ones, or all."""
    share = tears.choice((0, 0.5, 1))
    old, new = before[SUMS_FILE_NAME], bytearray(after[SUMS_FILE_NAME])
    if share < 1:
        new[: SUMS_HEADER.size] = old[: SUMS_HEADER.size]
    for at in range(SUMS_HEADER.size, len(new), 4):
        if tears.random() >= share:
            new[at : at + 4] = old[at : at + 4].ljust(4, b"\0")
    return after | {SUMS_FILE_NAME: bytes(new)}, f"{share} of a commit's checksums"


class StoreCuts(Story):
    """Tries cuts at the points of the store, and notes what each start found."""

    def __init__(self, seed: int, durability: str) -> None:
        super().__init__(seed, durability)
        self.found: list[tuple[str, Picture]] = []
        self._cuts = SHARES
        self._nodes: list[PowerNode] = []

    def _at_point(self, name: str) -> None:
        self.shares = self._cuts if name in POINTS else ()
        super()._at_point(name)

    def _start(self, *parts: Any) -> PowerNode:
        node = super()._start(*parts)
        self._nodes.append(node)
        return node

    def try_cut(self, share: float) -> None:
        super().try_cut(share)
        node = self._nodes.pop()
        node.store.close()
        node.env.close()

    def _check(self, node: PowerNode, possible: list[Picture]) -> None:
        super()._check(node, possible)
        self.found.append((self.point_name, node.picture()))


@pytest.mark.parametrize("durability", ["commit", "none"])
def test_lmdb_and_its_twin_leave_the_same_at_each_cut(durability: str, tmp_path: Path) -> None:
    twin, story = StoreCuts(1, durability), StoreCuts(1, durability)
    live_fixed(twin)
    LmdbCopies.left.clear()
    story.env = LmdbCopies(story.power, tmp_path, itertools.count(), {})  # type: ignore[assignment]
    live_fixed(story)
    assert story.points_by_name == twin.points_by_name
    assert story.found == twin.found
    assert {name for name, _ in story.found} >= POINTS
    assert len(LmdbCopies.left) == 6, "each of what LMDB may leave was tried"
    story.env.close()


KILLED_MERGE = """
import os, signal, sys
from pathlib import Path
from vbucket.store.lmdb.environment_lmdb import LmdbEnv
from vbucket.store.records import TABLES
from vbucket.upkeep.merge import merge

folder, slices = Path(sys.argv[1]), int(sys.argv[2])
sealed = [(int(path.name), path.read_bytes()) for path in sorted((folder / "log").iterdir())]
commits = iter(range(slices))
merge(
    LmdbEnv(folder / "store", TABLES), sealed, slice_pages=1,
    before_commit=lambda: None if next(commits, None) is not None else os.kill(os.getpid(), 9),
)
"""
"""What the store process does with a merge, killed in the middle of a transaction."""


def rows_of(node: MemoryNode) -> tuple[NodeRecord, dict[str, list[tuple[bytes, bytes]]]]:
    """Return all that a store holds, but for the name of its engine."""
    node.store.refresh()
    record, snapshot = node.store.node(), node.env.snapshot()
    assert record is not None
    rows = {
        table: [
            (bytes(key), bytes(value))
            for key, value in snapshot.range(table, b"\0")
            if (table, bytes(key)) != (META_TABLE, b"node")
        ]
        for table in TABLES
    }
    snapshot.close()
    return record._replace(engine_version=""), rows


@pytest.mark.parametrize("slices", [0, 1, 3])
def test_a_merge_that_is_killed_leaves_what_the_twin_has(slices: int, tmp_path: Path) -> None:
    """Then both finish it; row by row, the stores are equal at each step."""
    twin, node = MemoryNode(5, partitions=4), LmdbNode(5, partitions=4)
    folder = Path(node._folder.name)
    for each in (twin, node):
        for vb_id, value in itertools.product(range(4), (b"old", b"new")):
            each.engine.store(SET, vb_id, b"\0k", b"\0k" + value, 0, 0, 0, 0)
            each.engine.store(SET, vb_id, b"\0" + value, b"\0" + value + b"v", 0, 0, 0, 0)
        each.engine.delete(2, b"\0old", 0)
        each.begin_merge()
    assert rows_of(node) == rows_of(twin)
    twin.stop_merge(slices)
    (folder / "log").mkdir()
    for segment in node.device.segments():
        (folder / "log" / str(segment)).write_bytes(node.device.read(segment))
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_MERGE, str(folder), str(slices)], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert rows_of(node) == rows_of(twin)
    for each in (twin, node):
        each.crash()
    assert [part.high_seqno for part in node.engine.partitions] == [
        part.high_seqno for part in twin.engine.partitions
    ]
    for each in (twin, node):
        each.merge()
    assert rows_of(node) == rows_of(twin)
    node.close()
