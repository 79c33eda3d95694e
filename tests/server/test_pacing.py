"""Writers are slowed down while a merge runs, so that they need not stop."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dcp.core.groups import GroupCycle, Published
from dcp.core.store_schedule import PACED_FROM, PAUSE_MAX_S, Pacing, left_of_merge_s
from dcp.server.node import Node
from dcp.server.observe.meter import Histogram
from dcp.server.storage.committer import Committer, LogEvents
from dcp.server.storage.log_ahead import LogAhead
from dcp.server.storage.process.store_process import StoreProcess
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.cluster_here import Client, node_here, until
from support.load import GROUP_BYTES, MEMTABLE
from support.memory_node import MemoryNode
from support.raw_client import ask, login
from vbucket.engine.engine import SET
from vbucket.engine.keyspace import Keyspace
from vbucket.model.ids import vbucket_of
from vbucket.upkeep.merge import MergeReport


@dataclass
class Rates:
    """What a machine can do."""

    group_s: float
    """Time for a commit group if nothing holds it back."""
    merge_s: float
    turn_s: float
    """A turn of compaction before each merge."""


@dataclass
class Run:
    """A server of these rates under full load."""

    rates: Rates
    keyspace: Keyspace
    longest_s: float = 0.0
    """Longest pause."""
    stops: int = 0
    """Groups that found the memtables full."""
    groups: int = 0
    now_s: float = 0.0

    def go(self, seconds: float, *, paced: bool) -> None:
        pacing = Pacing(self.keyspace)
        ends_s = 0.0
        while self.now_s < seconds:
            keyspace = self.keyspace
            if ends_s and self.now_s >= ends_s:
                keyspace.memtables.frozen_bytes, keyspace.memtables.is_merging, ends_s = (
                    0,
                    False,
                    0.0,
                )
            if keyspace.memtables.wants_freeze:
                keyspace.memtables.is_merging = True
                keyspace.memtables.frozen_bytes, keyspace.memtables.active_bytes = (
                    keyspace.memtables.active_bytes,
                    0,
                )
                ends_s = self.now_s + self.rates.turn_s + self.rates.merge_s
            if keyspace.memtables.is_overfull:
                self.stops += 1
                self.longest_s = max(self.longest_s, ends_s - self.now_s)
                self.now_s = ends_s
                continue
            pause_s = pacing.pause_s(self.now_s) if paced else 0.0
            self.longest_s = max(self.longest_s, pause_s)
            self.now_s += pause_s
            left_s = max(0.0, ends_s - self.now_s)
            pacing.taken(self.now_s, GROUP_BYTES, left_s)
            keyspace.memtables.active_bytes += GROUP_BYTES
            self.groups += 1
            self.now_s += self.rates.group_s


@pytest.mark.parametrize(
    "rates",
    [
        # Filling a memtable takes 2.2 s: merge and compaction take longer.
        Rates(group_s=0.0033, merge_s=1.7, turn_s=1.0),
        Rates(group_s=0.0033, merge_s=2.5, turn_s=0.0),
        Rates(group_s=0.005, merge_s=2.0, turn_s=2.0),
    ],
)
def test_nothing_stops_no_pause_is_long_and_the_rate_is_the_same(
    keyspace: Keyspace, rates: Rates
) -> None:
    paced = Run(rates, keyspace)
    paced.go(60.0, paced=True)
    keyspace.memtables.active_bytes = keyspace.memtables.frozen_bytes = 0
    keyspace.memtables.is_merging = False
    stopping = Run(rates, keyspace)
    stopping.go(60.0, paced=False)
    assert stopping.stops > 10
    assert stopping.longest_s > 0.2, "what pacing is for"
    assert paced.stops == 0
    assert paced.longest_s < 0.004
    assert paced.groups > 0.97 * stopping.groups


def test_with_room_nothing_waits(keyspace: Keyspace) -> None:
    pacing = Pacing(keyspace)
    keyspace.memtables.frozen_bytes = MEMTABLE
    keyspace.memtables.active_bytes = int((PACED_FROM - 1) * MEMTABLE) - 1
    pacing.taken(1.0, GROUP_BYTES, 5.0)
    assert pacing.pause_s(1.0) == 0.0


def test_merge_is_expected_to_take_somewhat_longer_than_last_one() -> None:
    assert left_of_merge_s(2.0, 0.0) == pytest.approx(2.5)
    assert left_of_merge_s(2.0, 1.5) == pytest.approx(1.0)
    assert left_of_merge_s(2.0, 20.0) == pytest.approx(5.0), "it is late, and may take longer"
    assert left_of_merge_s(0.0, 0.0) > 0, "the first one"


def test_without_a_merge_nothing_waits(keyspace: Keyspace) -> None:
    pacing = Pacing(keyspace)
    keyspace.memtables.active_bytes = MEMTABLE * 19 // 10
    pacing.taken(1.0, GROUP_BYTES, 0.0)
    assert pacing.pause_s(1.0) == 0.0


def test_a_pause_is_bounded_and_ends_when_there_is_room(keyspace: Keyspace) -> None:
    pacing = Pacing(keyspace)
    keyspace.memtables.frozen_bytes = MEMTABLE
    keyspace.memtables.active_bytes = MEMTABLE - 1
    pacing.taken(1.0, GROUP_BYTES, 60.0)
    assert pacing.pause_s(1.0) == pytest.approx(PAUSE_MAX_S)
    assert pacing.paused_s == PAUSE_MAX_S
    keyspace.memtables.frozen_bytes = 0
    assert pacing.pause_s(1.0) == 0.0


def test_short_pauses_add_up(keyspace: Keyspace) -> None:
    pacing = Pacing(keyspace)
    keyspace.memtables.frozen_bytes = MEMTABLE
    keyspace.memtables.active_bytes = MEMTABLE // 2
    pauses = 0.0
    for _ in range(100):
        pacing.taken(1.0, GROUP_BYTES // 100, 1.0)
        pauses = pacing.pause_s(1.0)
    assert pauses == pytest.approx(GROUP_BYTES / (MEMTABLE // 2), rel=0.05)


async def test_committer_waits_before_group_and_not_while_it_drains() -> None:
    node = MemoryNode()
    published: list[Published] = []
    pace: Any = SteadyPace()
    told: Any = LogEvents()
    told.published = published.append
    committer = Committer(
        GroupCycle(node.engine, node.hub, syncs_groups=True), node.writer,
        told, LogAhead(node.device, finds_room=False), sync_seconds=Histogram(), pace=pace,
    )  # fmt: skip
    committer.start()
    loop = asyncio.get_running_loop()

    def change() -> None:
        node.engine.store(SET, 5, b"\0k", b"\0kv", 0, 0, 0, 0)
        committer.kick()

    change()
    await asyncio.sleep(0)
    assert published == [], "it waits"
    began_s = loop.time()
    async with asyncio.timeout(20):
        while not published:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.001)
    assert loop.time() - began_s >= pace.seconds / 2
    assert len(pace.groups) == 1
    pace.seconds = 3600.0
    change()
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await committer.drain()
    assert len(published) == 2
    committer.stop()


async def test_a_server_slows_its_writers_down_while_a_merge_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merge does not begin to work before the test lets it."""
    may_merge = asyncio.Event()
    merge = StoreProcess.merge

    async def held_merge(*arguments: Any) -> MergeReport:
        await may_merge.wait()
        return await merge(*arguments)

    def set_packet(number: int) -> bytes:
        key = b"k%d" % number
        return pack_request(
            Opcode.SET, key=key, value=bytes(300_000), extras=bytes(8), vb_id=vbucket_of(key)
        )

    monkeypatch.setattr(StoreProcess, "merge", held_merge)
    async with (
        node_here(tmp_path, {}, memtable_bytes=1 << 20) as node,
        Client.connect(node) as client,
    ):
        for number in range(4):
            assert (await client.ask(set_packet(number))).status == Status.OK
        await until(node.write.merging.left_s)
        assert node.engine.keyspace.memtables.frozen_bytes >= PACED_FROM * (1 << 20)
        assert await paced_seconds(node) == 0.0, "nothing was written beside it"
        assert (await client.ask(set_packet(4))).status == Status.OK
        assert await paced_seconds(node) > 0.0
        may_merge.set()


async def paced_seconds(node: Node) -> float:
    """What a server's metrics say of its writers' pauses."""
    page = (await ask(node.ports.admin, "GET", "/metrics", login())).body
    found = re.search(rb"^dcpd_writers_paced_seconds_total (\S+)$", page, re.MULTILINE)
    assert found is not None
    return float(found[1])


class SteadyPace:
    """Every group waits as long."""

    paces = True

    def __init__(self) -> None:
        self.seconds = 0.05
        self.groups: list[int] = []
        self._has_waited = False

    def group_taken(self, group_bytes: int) -> None:
        self.groups.append(group_bytes)
        self._has_waited = False

    def pause_s(self) -> float:
        if self._has_waited:
            return 0.0
        self._has_waited = True
        return self.seconds
