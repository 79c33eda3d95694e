"""The time on disk that no closed time passes."""

from __future__ import annotations

import logging
from pathlib import Path

from dcp.server.observe.event_log import EventLog
from dcp.server.observe.housekeeping import Tasks
from dcp.server.storage.closed_times import AHEAD_NS, LEFT_NS, ClosedTimes, read_closed
from support.memory_node import MemoryNode
from support.waiting import until_so
from vbucket.engine.cut import close_time
from vbucket.engine.engine import Engine

SOON_NS = 5_000_000_000


def closed_times(folder: Path, failures: list[Exception]) -> tuple[ClosedTimes, Engine]:
    engine = MemoryNode().engine
    log = EventLog(logging.getLogger("test"))
    return ClosedTimes(engine, folder, Tasks(failures.append), log), engine


async def test_what_is_reserved_follows_what_is_closed_next(tmp_path: Path) -> None:
    """Not this node's clock: a node whose clock is ahead would close nothing for long after it is
    set right.
    """
    failures: list[Exception] = []
    closed, engine = closed_times(tmp_path, failures)
    closed.reserve(SOON_NS)
    await until_so(lambda: engine.closed_max)
    assert engine.closed_max == read_closed(tmp_path) == SOON_NS + AHEAD_NS
    before = (tmp_path / "closed.json").stat().st_mtime_ns
    closed.reserve(SOON_NS + AHEAD_NS - LEFT_NS - 1)
    assert not closed._is_writing
    assert (tmp_path / "closed.json").stat().st_mtime_ns == before
    closed.reserve(SOON_NS + AHEAD_NS - LEFT_NS)
    await until_so(lambda: engine.closed_max > SOON_NS + AHEAD_NS)
    closed_max = engine.closed_max
    close_time(engine, closed_max)
    restarted, again = closed_times(tmp_path, failures)
    assert again.first_open_ns > closed_max, "a restart takes no CAS that may have been closed"
    restarted.reserve(0)  # as a node of a cluster before it is asked to close anything
    assert not restarted._is_writing
    assert read_closed(tmp_path) == closed_max, "what is reserved never falls"
    assert failures == []
