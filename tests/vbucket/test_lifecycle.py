"""Failover, states and purges: in memory, after a crash, in the store after a merge."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.wire.message import EndReason, parse_stream_end
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from vbucket.engine.engine import SET, Engine
from vbucket.engine.lifecycle import PurgeRefusedError, failover, purge, set_state
from vbucket.engine.partition import BranchRefusedError, FloorError, Partition, VbState
from vbucket.store.block import BODY_BYTES_TARGET
from vbucket.store.environment import StoreDamagedError
from vbucket.store.records import BY_KEY_TABLE, BY_SEQNO_TABLE

VB = 7


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


@pytest.fixture
def writer(node: MemoryNode) -> Peer:
    peer = node.connect()
    peer.hello()
    for key in (b"a", b"b", b"a", b"c"):
        peer.set(VB, key, b"value")
    node.commit()
    return peer


def survives(node: MemoryNode, how: str) -> Partition:
    """Commit, then lose memory: by a crash, or by a merge and a crash."""
    node.commit()
    if how == "merge":
        node.merge()
    node.crash()
    return node.engine.partitions[VB]


def facts(part: Partition) -> tuple[object, ...]:
    return part.state, part.high_seqno, part.purge_seqno, part.failover.pairs(), part.item_count


@pytest.mark.parametrize("how", ["replay", "merge"])
def test_a_failover_makes_a_version_at_the_high_seqno(
    node: MemoryNode, writer: Peer, how: str
) -> None:
    before = node.engine.partitions[VB].vb_uuid
    failover(node.engine, VB)
    part = survives(node, how)
    pairs = part.failover.pairs()
    assert [seqno for _, seqno in pairs] == [4, 0]
    assert pairs[1][0] == before != pairs[0][0]
    assert (part.high_seqno, part.item_count) == (4, 3)


@pytest.mark.parametrize("how", ["replay", "merge"])
def test_failover_to_copy_that_was_behind_loses_last_changes(
    node: MemoryNode, writer: Peer, how: str
) -> None:
    branch = failover(node.engine, VB, 2)
    assert (branch.seqno, branch.undone_seqnos, branch.undone_keys) == (2, 2, 2)
    part = survives(node, how)
    assert (part.high_seqno, part.item_count, part.failover.current.seqno) == (2, 2, 2)


def test_more_than_there_is_cannot_be_lost(node: MemoryNode, writer: Peer) -> None:
    with pytest.raises(BranchRefusedError, match="ends at seqno 4; it cannot lose 5"):
        failover(node.engine, VB, 5)
    assert not node.engine.keyspace.has_pending


@pytest.mark.parametrize("how", ["replay", "merge"])
@pytest.mark.parametrize("state", [VbState.REPLICA, VbState.PENDING, VbState.DEAD])
def test_a_partition_that_is_not_active_takes_no_commands(
    node: MemoryNode, writer: Peer, how: str, state: VbState
) -> None:
    assert set_state(node.engine, VB, state) is None
    assert writer.set(VB, b"d", b"").status == Status.NOT_MY_VBUCKET
    assert writer.ask(Opcode.GET, vb_id=VB, key=b"a").status == Status.NOT_MY_VBUCKET
    before = facts(node.engine.partitions[VB])
    part = survives(node, how)
    assert part.state == state
    assert facts(part) == before


@pytest.mark.parametrize("how", ["replay", "merge"])
def test_becoming_active_makes_a_version(node: MemoryNode, writer: Peer, how: str) -> None:
    set_state(node.engine, VB, VbState.DEAD)
    branch = set_state(node.engine, VB, VbState.ACTIVE)
    assert branch is not None
    assert branch.seqno == 4
    part = survives(node, how)
    assert part.state == VbState.ACTIVE
    assert part.failover.current == branch.failover.current


def test_the_state_that_a_partition_has_changes_nothing(node: MemoryNode, writer: Peer) -> None:
    assert set_state(node.engine, VB, VbState.ACTIVE) is None
    assert not node.engine.keyspace.has_pending


def test_a_failover_makes_a_replica_active(node: MemoryNode, writer: Peer) -> None:
    set_state(node.engine, VB, VbState.REPLICA)
    failover(node.engine, VB)
    node.commit()
    assert node.engine.partitions[VB].state == VbState.ACTIVE
    assert writer.set(VB, b"d", b"").status == Status.OK


@pytest.mark.parametrize("how", ["replay", "merge"])
def test_a_purge_makes_who_stood_below_it_start_again(
    node: MemoryNode, writer: Peer, how: str
) -> None:
    assert purge(node.engine, VB, 3) == 3
    assert purge(node.engine, VB, 2) == 3, "it never falls"
    part = survives(node, how)
    assert part.purge_seqno == 3
    peer = node.connect()
    peer.hello()
    peer.open()
    answer = peer.stream(VB, 2, uuid=part.vb_uuid)
    assert (answer.status, answer.value) == (Status.ROLLBACK, bytes(8))
    assert peer.stream(VB, 3, uuid=part.vb_uuid).status == Status.OK


def test_the_change_at_the_high_seqno_is_never_purged(node: MemoryNode, writer: Peer) -> None:
    assert purge(node.engine, VB) == 3
    for upto_seqno in (4, 5):
        with pytest.raises(PurgeRefusedError, match="ends at seqno 4"):
            purge(node.engine, VB, upto_seqno)
    assert purge(node.engine, VB + 1) == 0, "an empty partition has nothing to purge"


def test_what_is_not_committed_is_never_purged(node: MemoryNode, writer: Peer) -> None:
    """Groups that were taken and not committed, and an open one."""
    part = node.engine.partitions[VB]
    for key in (b"a", b"b"):
        writer.set(VB, key, b"newer")
    group = node.take()
    writer.set(VB, b"c", b"newer")
    assert (part.committed_seqno, part.high_seqno) == (4, 7)
    for upto_seqno in (4, 6):
        with pytest.raises(PurgeRefusedError, match="is committed up to seqno 4"):
            purge(node.engine, VB, upto_seqno)
    assert purge(node.engine, VB) == 3
    node.finish(group)
    assert purge(node.engine, VB) == 5
    assert part.history_floor == 6


@given(
    counts=st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(0, 5)),
    steps=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1),
)
def test_no_floor_is_above_what_is_committed_whoever_asks(
    counts: tuple[int, int, int], steps: list[tuple[int, int]]
) -> None:
    """Some is committed, some is in a group under way, some in the open one."""
    node = MemoryNode()
    peer = node.connect()
    peer.hello()
    part, keyspace = node.engine.partitions[VB], node.engine.keyspace
    committed, taken, pending = counts
    for number in range(committed):
        peer.set(VB, b"a%d" % (number % 2), b"v")
    node.commit()
    for number in range(taken):
        peer.set(VB, b"a%d" % (number % 2), b"v")
    keyspace.take_group()
    for number in range(pending):
        peer.set(VB, b"a%d" % (number % 2), b"v")
    before = (0, 0)
    for floor, purge_seqno in steps:
        now = keyspace.raise_floor(VB, floor, purge_seqno)
        assert now == (part.history_floor, part.purge_seqno)
        assert now[0] == max(before[0], min(floor, committed))
        assert now[1] < max(now[0], 1)
        assert now >= before
        assert now[1] >= before[1]
        before = now
    keyspace.branch(VB, committed)  # cutting off the rest is always possible
    assert part.high_seqno == committed


@pytest.mark.parametrize("how", ["replay", "merge"])
def test_a_purge_ends_history_and_only_a_rollback_to_0_undoes_it(
    node: MemoryNode, writer: Peer, how: str
) -> None:
    purge(node.engine, VB, 2)
    assert node.engine.partitions[VB].history_floor == 3
    with pytest.raises(FloorError, match=r"back to 2: .* to 3 and above, or to 0"):
        failover(node.engine, VB, 2)
    failover(node.engine, VB, 1)
    part = survives(node, how)
    assert (part.purge_seqno, part.history_floor, part.high_seqno) == (2, 3, 3)
    failover(node.engine, VB, 3)
    part = survives(node, how)
    assert (part.purge_seqno, part.history_floor, part.high_seqno, part.item_count) == (0, 0, 0, 0)


# -- damaged data ----------------------------------------------------------------------------------


def with_a_collection(node: MemoryNode) -> None:
    """Merge changes in and outside of a collection, whose creation is seqno 5."""
    manifest = node.engine.keyspace.manifest.create_collection("_default", "note")
    node.engine.keyspace.set_manifest(manifest)
    for key in (b"\x08a", b"\x08b"):
        assert node.engine.store(SET, VB, key, key, 0, 0, 0, 0)[0] == Status.OK
    node.merge()


def flip(node: MemoryNode, table: str, row: bytes) -> None:
    node.env.flip(table, VB.to_bytes(2, "big") + row, 3)  # type: ignore[attr-defined]
    node.store.refresh()


def flip_event(node: MemoryNode) -> None:
    part = node.engine.partitions[VB]
    (key,) = node.engine.versions.system_keys(part)
    flip(node, BY_KEY_TABLE, key)


def become_active(engine: Engine, vb_id: int) -> None:
    set_state(engine, vb_id, VbState.ACTIVE)


REFUSED: dict[str, tuple[VbState, Callable[[Engine, int], object]]] = {
    "branch": (VbState.ACTIVE, lambda engine, vb_id: engine.keyspace.branch(vb_id, 6)),
    "failover": (VbState.ACTIVE, lambda engine, vb_id: failover(engine, vb_id, 1)),
    "promotion": (VbState.REPLICA, lambda engine, vb_id: failover(engine, vb_id, 1)),
    "state": (VbState.REPLICA, become_active),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_a_damaged_system_event_changes_nothing(
    node: MemoryNode, writer: Peer, what: str
) -> None:
    with_a_collection(node)
    before, change = REFUSED[what]
    set_state(node.engine, VB, before)
    node.commit()
    flip_event(node)
    part = node.engine.partitions[VB]
    known = facts(part)
    with pytest.raises(StoreDamagedError):
        change(node.engine, VB)
    assert facts(part) == known
    assert not node.engine.keyspace.has_pending


def test_a_branch_at_0_needs_nothing_of_the_store(node: MemoryNode, writer: Peer) -> None:
    with_a_collection(node)
    flip_event(node)
    failover(node.engine, VB, 7)
    assert node.engine.partitions[VB].high_seqno == 1, "the collection is told of anew"


def test_a_damaged_document_stops_no_branch_that_leaves_it(node: MemoryNode, writer: Peer) -> None:
    with_a_collection(node)
    flip(node, BY_KEY_TABLE, b"\x08a")
    failover(node.engine, VB, 1)
    assert facts(node.engine.partitions[VB])[1] == 6


def test_rollback_that_finds_no_last_documents_changes_nothing(node: MemoryNode) -> None:
    """Which change of the default collection is the last one stands in a damaged block."""
    engine, value = node.engine, bytes(BODY_BYTES_TARGET)
    for key in (b"\0a", b"\0b"):
        assert engine.store(SET, VB, key, key + value, 0, 0, 0, 0)[0] == Status.OK
    with_a_collection(node)
    assert engine.store(SET, VB, b"\x08c", b"\x08c" + value, 0, 0, 0, 0)[0] == Status.OK
    node.merge()
    flip(node, BY_SEQNO_TABLE, (2).to_bytes(8, "big"))
    part = engine.partitions[VB]
    known, tally = facts(part), part.tally.to_document()
    with pytest.raises(StoreDamagedError):
        engine.keyspace.branch(VB, 5)
    assert (facts(part), part.tally.to_document()) == (known, tally)
    assert not engine.keyspace.has_pending


def test_streams_end_with_the_state(node: MemoryNode, writer: Peer) -> None:
    peer = node.connect()
    peer.hello()
    peer.open()
    peer.stream(VB)
    peer.drain()
    set_state(node.engine, VB, VbState.DEAD)
    node.commit()
    (end,) = peer.drain()
    assert parse_stream_end(end) == EndReason.STATE_CHANGED
    assert peer.stream(VB).status == Status.NOT_MY_VBUCKET
