"""Merging goes on whatever is lacking for a while: room, or another store process."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from dcp.server import merging
from dcp.server.compaction import Compaction, CompactionError
from dcp.server.config import Settings
from dcp.server.merging import merge_patiently
from dcp.server.meter import Meter
from dcp.server.store_process import StoreProcessDiedError
from vbucket.kvenv import StoreFullError
from vbucket.merge import MergeReport

REPORT = MergeReport(3, {5: 9}, 9)


class Process:
    """A store process that does as it is told, once."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.merge_s = 1.5

    async def merge(self, segments: list[int]) -> MergeReport:
        if self.error is not None:
            raise self.error
        return REPORT

    async def used_bytes(self) -> int:
        await self.merge([])
        return 7


class Node:
    """What merging sees of a node. `starts` is what comes of starting another process."""

    def __init__(self, first: Exception, *starts: Exception | Process) -> None:
        self.store_process = Process(first)
        self.starts = list(starts)
        self.meter = Meter()
        self.merge_trouble = ""
        self.said: list[str] = []

    async def renew_store_process(self, failed: Process) -> None:
        assert failed is self.store_process
        start = self.starts.pop(0)
        if isinstance(start, Exception):
            raise start
        self.store_process = start

    def warning(self, event: str, **_: object) -> None:
        self.said.append(event)

    error = info = warning


NO_DESCRIPTOR = OSError(errno.EMFILE, "Too many open files")
DIED = StoreProcessDiedError("it ended")
FULL = StoreFullError("the disk is full")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "PAUSE_S", 0.0)


@pytest.mark.parametrize("first", [DIED, FULL])
async def test_a_process_that_cannot_be_started_yet_is_waited_for(first: Exception) -> None:
    node: Any = Node(first, NO_DESCRIPTOR, NO_DESCRIPTOR, Process(FULL), Process(None))
    assert await merge_patiently(node, [1, 2, 3], node) == REPORT
    assert node.starts == []
    assert node.merge_trouble == ""
    assert node.said[-2:] == ["merge put off", "merging goes on"]
    assert node.meter.merge_failures == 3 + (first is FULL)
    assert node.meter.last_merge_s == node.meter.merge_seconds.total == 1.5


async def test_a_process_that_dies_of_it_every_time_ends_it() -> None:
    node: Any = Node(DIED, Process(DIED), Process(DIED))
    with pytest.raises(RuntimeError, match="could not be merged"):
        await merge_patiently(node, [1], node)


async def test_compaction_is_put_off_where_no_process_can_be_started() -> None:
    node: Any = Node(DIED, NO_DESCRIPTOR, Process(None))
    work = Compaction(node, Settings())
    for _ in range(2):
        with pytest.raises(CompactionError, match="it ended"):
            await work._asked(lambda process: process.used_bytes())
    assert await work._asked(lambda process: process.used_bytes()) == 7
