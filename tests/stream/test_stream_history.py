"""Streams and the history that is given up: what they keep, where they end, what ends them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dcp.server.config.settings import Settings
from dcp.server.observe.meter import Meter
from dcp.server.storage import compaction_schedule as compaction
from dcp.server.storage.compaction_schedule import Compaction
from dcp.server.storage.waiters import CommitWaiters
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame
from dcp.wire.message import (
    EndReason,
    StreamFlag,
    parse_mutation,
)
from dcp.wire.status import Status
from stream.shape import connect, set_all, shape
from support.memory_node import MemoryNode, Peer
from vbucket.engine.leadership import adopt_floors
from vbucket.engine.lifecycle import PurgeRefusedError, purge
from vbucket.upkeep.retention import FloorStep

VB = 7


def compact(node: MemoryNode, floor: int, purge_seqno: int = 0) -> tuple[int, int]:
    """Raise as far as may be, merge, compact; return floor and purge seqno."""
    node.merge()
    may = node.raise_floor(VB, floor, purge_seqno)
    node.merge()
    node.compact([VB])
    return may.floor, may.purge


# -- requests that end below the floor ------------------------------------------------------------


def test_stream_that_would_end_below_floor_shows_state_as_of_it(
    node: MemoryNode, writer: Peer
) -> None:
    set_all(node, writer, "abcabd")
    assert compact(node, 5) == (5, 0)
    peer = connect(node, x_exact_end="true")
    peer.stream(VB, end=3)
    assert shape(peer.drain()) == [(0, 5), "3:c", "4:a", "5:b", EndReason.OK]
    uuid = node.engine.partitions[VB].vb_uuid
    peer.stream(VB, 3, 4, uuid=uuid)
    assert shape(peer.drain()) == [(3, 5), "4:a", "5:b", EndReason.OK]
    peer.stream(VB, 5, 6, uuid=uuid)
    assert shape(peer.drain()) == [(5, 6), "6:d", EndReason.OK]


def test_with_every_version_wanted_too(node: MemoryNode, writer: Peer) -> None:
    set_all(node, writer, "abcabd")
    compact(node, 5)
    peer = connect(node, change_streams="true")
    peer.stream(VB, end=3)
    assert shape(peer.drain()) == [(0, 5), "3:c", "4:a", "5:b", EndReason.OK]


@pytest.mark.parametrize("knows_collections", [False, True])
def test_where_the_floor_is_a_change_of_another_collection(
    node: MemoryNode, writer: Peer, knows_collections: bool
) -> None:
    """A snapshot ends on an item, or on SEQNO_ADVANCED; the one before the floor is still there."""
    node.engine.keyspace.set_manifest(
        node.engine.keyspace.manifest.create_collection("_default", "other")
    )  # 1
    set_all(node, writer, "abab")  # to 5
    writer.delete(VB, b"a")
    for _ in range(3):
        assert node.engine.store(0, VB, b"\x08x", b"\x08xvalue", 0, 0, 0, 0)[0] == 0
    node.commit()
    assert compact(node, 9, 8) == (9, 8)
    if knows_collections:
        peer = connect(node, Feature.COLLECTIONS, enable_noop="true")
        peer.stream(VB, end=4, value=b'{"collections":["0"]}')
        told = shape(peer.drain())
        assert told == [(0, 9), "5:\0b", "6:-\0a", "9:", EndReason.OK]
    else:
        peer = connect(node)
        peer.stream(VB, end=4)
        assert shape(peer.drain()) == [(0, 6), "5:b", "6:-a", EndReason.OK]


# -- streams under way ----------------------------------------------------------------------------


def begin(node: MemoryNode, peer: Peer, start: int = 0, **parts: int) -> list[Frame]:
    """Begin a stream and take its marker and one change."""
    uuid = node.engine.partitions[VB].vb_uuid if start else 0
    assert peer.stream(VB, start, uuid=uuid, **parts).status == Status.OK
    frames = peer.pump(1)
    while len(frames) < 2:
        frames += peer.pump(1)
    return frames


def test_a_snapshot_under_way_keeps_what_it_still_has_to_send(
    node: MemoryNode, writer: Peer
) -> None:
    set_all(node, writer, "abcd")
    peer = connect(node)
    frames = begin(node, peer)
    set_all(node, writer, "bcdbcd")
    assert compact(node, 10, 9) == (4, 3), "its end holds the floor"
    frames += peer.drain()
    assert shape(frames)[:5] == [(0, 4), "1:a", "2:b", "3:c", "4:d"]
    assert shape(frames)[5:] == [(5, 10), "8:b", "9:c", "10:d"]
    assert compact(node, 10, 9) == (10, 9), "between snapshots a stream holds nothing"


def test_every_version_of_a_history_snapshot_under_way_stays(
    node: MemoryNode, writer: Peer
) -> None:
    set_all(node, writer, "ab" * 5)
    peer = connect(node, change_streams="true")
    frames = begin(node, peer)
    next_seqno = parse_mutation(frames[-1]).by_seqno + 1
    assert compact(node, 10, 9) == (next_seqno, next_seqno - 1)
    frames += peer.drain()
    assert [f for f in shape(frames) if isinstance(f, str)] == [
        f"{n}:{'ab'[(n + 1) % 2]}" for n in range(1, 11)
    ]


@pytest.mark.parametrize("flags", [0, StreamFlag.IGNORE_PURGED_TOMBSTONES])
def test_deletions_still_to_come_stay_for_who_needs_them(
    node: MemoryNode, writer: Peer, flags: int
) -> None:
    set_all(node, writer, "abcd")
    for key in (b"b", b"c", b"d"):
        writer.delete(VB, key)
    set_all(node, writer, "e")
    peer = connect(node)
    begin(node, peer, 1, flags=flags)
    assert compact(node, 8, 7) == (8, 7 if flags else 5)
    assert shape(peer.drain())[-1] == "8:e"


def test_purge_on_command_ends_a_snapshot_it_takes_from(node: MemoryNode, writer: Peer) -> None:
    set_all(node, writer, "abcd")
    peer = connect(node)
    begin(node, peer)
    set_all(node, writer, "abcd")
    purge(node.engine, VB)
    assert shape(peer.drain()) == [EndReason.ROLLBACK]
    node.merge()
    node.compact([VB])
    peer.stream(VB)
    assert shape(peer.drain()) == [(0, 8), "5:a", "6:b", "7:c", "8:d"]


def test_nothing_is_sent_while_the_floor_is_not_committed(node: MemoryNode, writer: Peer) -> None:
    set_all(node, writer, "ab")
    peer = connect(node)
    for key in (b"a", b"b"):
        writer.set(VB, key, b"value")
    adopt_floors(node.engine, VB, 4, 3, committed_seqno=4)  # as a replica that knows less than that
    peer.stream(VB)
    assert peer.drain() == [], "the state as of seqno 2 may go with the next crash or commit"
    node.commit()
    assert shape(peer.drain()) == [(0, 4), "3:a", "4:b"]


def test_a_purge_on_command_waits_for_a_read_view(node: MemoryNode, writer: Peer) -> None:
    set_all(node, writer, "abcd")
    part = node.engine.partitions[VB]
    part.pins.add(2)
    with pytest.raises(PurgeRefusedError, match="as of seqno 2"):
        purge(node.engine, VB, 3)
    assert purge(node.engine, VB, 1) == 1
    assert compact(node, 4, 3) == (2, 1)
    part.pins.remove(2)
    assert compact(node, 4, 3) == (4, 3)


def test_a_purge_waits_for_a_client_that_is_connected_and_behind(
    node: MemoryNode, writer: Peer
) -> None:
    """Between snapshots, too: after the purge it would be sent back to 0."""
    set_all(node, writer, "abcd")
    peer = connect(node)
    peer.stream(VB, 2, uuid=node.engine.partitions[VB].vb_uuid)
    assert compact(node, 4, 3) == (4, 2)
    assert shape(peer.drain()) == [(2, 4), "3:c", "4:d"]
    assert compact(node, 4, 3) == (4, 3)


def test_one_that_holds_nothing_needs_no_deletions(node: MemoryNode, writer: Peer) -> None:
    set_all(node, writer, "abcd")
    connect(node).stream(VB)
    assert compact(node, 4, 3) == (4, 3)


# -- streams that stand still ---------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def monotonic(self) -> float:
        return self.now_s

    def time_ns(self) -> int:
        return int(self.now_s * 1e9)


def test_end_4_too_slow_for_who_stands_while_compaction_waits(
    node: MemoryNode, writer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(compaction, "time", clock)
    warnings: list[str] = []
    log: Any = SimpleNamespace(warning=lambda event, **facts: warnings.append(f"{event} {facts}"))
    meter = Meter()
    unused: Any = None
    work = Compaction(
        node.engine, node.floors, node.hub, CommitWaiters(node.engine, node.commit), unused,
        unused, unused, meter, log, Settings(),
    )  # fmt: skip
    set_all(node, writer, "abcd" * 4)
    standing, moving = connect(node), connect(node)
    begin(node, standing)
    begin(node, moving)
    set_all(node, writer, "abcd" * 4)
    node.merge()
    step = FloorStep(VB, node.engine.partitions[VB].vb_uuid, 32, 0)
    for waited_s in (0, 100, 100, 99):
        clock.now_s += waited_s
        moving.pump(1)
        asyncio.run(work._raise([step]))
        work._end_what_stands_still(clock.now_s)
        assert node.engine.partitions[VB].history_floor == 16
    assert not warnings
    clock.now_s += 1
    moving.pump(1)
    asyncio.run(work._raise([step]))
    work._end_what_stands_still(clock.now_s)
    (warning,) = warnings
    assert "'seqno': 14" in warning
    assert shape(standing.drain())[-1] == EndReason.TOO_SLOW
    assert node.hub.too_slow == 1
    assert EndReason.TOO_SLOW not in shape(moving.drain())
    asyncio.run(work._raise([step]))
    assert node.engine.partitions[VB].history_floor == 32
