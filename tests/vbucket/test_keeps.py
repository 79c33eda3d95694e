"""Retention for named consumers: no purge passes one that deletions are kept for.

The property runs a node in memory with its planner, merges, compactions and crashes against a plain
model of what a consumer has seen.
"""

from __future__ import annotations

import asyncio
import logging

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.server.observe.event_log import EventLog
from dcp.server.observe.meter import Meter
from dcp.server.storage.kept_consumers import KeptConsumers
from support.memory_node import MemoryNode
from vbucket.engine.engine import SET
from vbucket.engine.keeps import KeepState, Unseen, purge_max, share_of, standings
from vbucket.engine.lifecycle import PurgeRefusedError, purge
from vbucket.model.consumer_documents import (
    NAME_BYTES_MAX,
    Keep,
    checkpoint_key,
    checkpoint_of,
    decode_keeps,
    encode_keeps,
    keep_key,
)
from vbucket.model.ids import NUM_VBUCKETS, vbucket_of
from vbucket.upkeep.retention import Planner, Windows

VB = 7
SECOND_NS = 1_000_000_000
NAME = "billing"
FOR_S = 1_000.0
MANY = 1 << 40
ALL_GOES = Windows(0, 0, 0)


class Keeping:
    """A node, one partition, and a consumer that saves its position."""

    def __init__(self) -> None:
        self.node = MemoryNode()
        self.changed: list[tuple[int, int]] = []
        """(seqno, time) of each change that is not the consumer's own."""
        self.saved: int | None = None
        self.kept = False

    @property
    def part(self):
        return self.node.engine.partitions[VB]

    def put(self, key: bytes, value: bytes) -> None:
        stored = b"\0" + key
        self.node.engine.begin_batch(self.node.now_ns)
        assert self.node.engine.store(SET, VB, stored, stored + value, 0, 0, 0, 0)[0] == 0

    def change(self, key: bytes, value: bytes = b"v", *, deletes: bool = False) -> None:
        self.node.now_ns += SECOND_NS
        if deletes:
            self.node.engine.begin_batch(self.node.now_ns)
            if self.node.engine.delete(VB, b"\0" + key, 0)[0]:
                return
        else:
            self.put(key, value)
        self.changed.append((self.part.high_seqno, self.node.now_ns))

    def save(self, seqno: int) -> None:
        positions = cbor2.dumps({VB: [[[1, 0]], seqno, seqno, seqno, [], 0]})
        self.put(checkpoint_key(NAME, VB), cbor2.dumps({"positions": positions}))
        self.node.commit()
        self.saved = seqno

    def keep(self, for_s: float = FOR_S, bytes_max: int = MANY) -> None:
        keep = Keep(for_s, bytes_max, self.part.purge_seqno)
        self.put(keep_key(VB), encode_keeps({NAME: keep}))
        self.node.commit()
        self.kept = True

    def forget(self) -> None:
        self.node.engine.begin_batch(self.node.now_ns)
        self.node.engine.delete(VB, b"\0" + keep_key(VB), 0)
        self.node.commit()
        self.kept = False

    def purge_what_may_go(self, *, knows: bool = True) -> None:
        """Plan, raise and compact, as the server does. `knows`: the plan was made with what is kept
        now, and not before it was kept.
        """
        node = self.node
        node.merge()
        kept = purge_max(node.engine, node.store, self.part, node.now_ns)
        limits = {VB: kept} if knows and kept is not None else {}
        steps, _, _ = Planner().plan(
            node.store, [VB], ALL_GOES, node.now_ns, purge_max=limits, is_forced=True
        )
        for step in steps:
            node.raise_floor(VB, step.floor, step.purge)
        node.commit()
        node.compact([VB])
        for vb_id in node.floors.committed():
            node.floors.compacted(vb_id)

    def state(self) -> KeepState:
        (found,) = standings(self.node.engine, self.node.store, self.part, self.node.now_ns)
        return found.state


@pytest.fixture
def it() -> Keeping:
    return Keeping()


ACTS = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 5)),
    st.tuples(st.just("delete"), st.integers(0, 5)),
    st.tuples(st.just("save"), st.integers(0, 100)),
    st.tuples(st.just("keep"), st.just(0)),
    st.tuples(st.just("forget"), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 600)),
    st.tuples(st.just("purge"), st.booleans()),
    st.tuples(st.just("crash"), st.just(0)),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(ACTS, min_size=10, max_size=60))
def test_no_purge_passes_a_kept_consumer_within_its_limits(acts: list[tuple[str, int]]) -> None:
    it = Keeping()
    promised: int | None = None
    """The highest purge seqno that the promise allows; None: there is none."""
    for act, number in acts:
        match act:
            case "set":
                it.change(b"k%d" % number)
            case "delete":
                it.change(b"k%d" % number, deletes=True)
            case "save":
                seqno = max(it.saved or 0, it.part.committed_seqno * number // 100)
                if seqno >= it.part.purge_seqno:
                    it.save(seqno)
            case "keep":
                it.keep()
            case "forget":
                it.forget()
            case "wait":
                it.node.now_ns += number * SECOND_NS
            case "purge":
                it.node.commit()
                before = it.part.purge_seqno
                it.purge_what_may_go(knows=bool(number))
                after = it.part.purge_seqno
                promised = it.saved if it.saved is not None else before
                unseen = [at_ns for seqno, at_ns in it.changed if seqno > promised]
                is_within = not unseen or it.node.now_ns - min(unseen) <= FOR_S * SECOND_NS
                if it.kept and is_within and before <= promised:
                    assert after <= promised, "its next start would be rolled back to 0"
            case "crash":
                it.node.commit()
                it.node.crash()


def test_what_is_not_kept_is_purged(it: Keeping) -> None:
    """The same purge without the promise, so that the property says something."""
    for number in range(5):
        it.change(b"k%d" % number)
    it.save(5)
    for number in range(4):
        it.change(b"k%d" % number, deletes=True)
    it.change(b"last")
    it.keep()
    it.purge_what_may_go()
    assert it.part.purge_seqno <= 5
    it.forget()
    it.purge_what_may_go()
    assert it.part.purge_seqno == 10


def test_without_a_position_nothing_more_is_purged(it: Keeping) -> None:
    it.change(b"a")
    it.change(b"a", deletes=True)
    it.change(b"b")
    it.keep()
    it.purge_what_may_go()
    assert (it.part.purge_seqno, it.state()) == (0, KeepState.KEPT)


def test_it_is_told_before_a_limit_in_time_and_after(it: Keeping) -> None:
    it.change(b"a")
    it.save(1)
    it.keep()
    it.node.now_ns += 10**15
    assert it.state() is KeepState.KEPT, "it has seen all: documents of consumers do not count"
    it.change(b"a", deletes=True)
    it.change(b"b")
    it.node.commit()
    it.node.now_ns += int(0.7 * FOR_S * SECOND_NS)
    assert it.state() is KeepState.KEPT
    it.node.now_ns += int(0.2 * FOR_S * SECOND_NS)
    assert it.state() is KeepState.ENDING
    it.purge_what_may_go()
    assert it.part.purge_seqno <= 1
    it.node.now_ns += int(0.2 * FOR_S * SECOND_NS)
    assert it.state() is KeepState.ENDED
    it.purge_what_may_go()
    assert (it.part.purge_seqno, it.state()) == (4, KeepState.LOST)
    it.save(5)
    assert it.state() is KeepState.KEPT, "it began again"


def test_it_is_told_before_a_limit_in_bytes_and_after(it: Keeping) -> None:
    it.change(b"a")
    it.save(1)
    it.keep(bytes_max=10_000 * it.node.engine.num_vbuckets)
    it.change(b"a", deletes=True)
    states = []
    for number in range(12):
        it.change(b"n%d" % number, b"x" * 1_000)
        it.node.merge()
        states.append(it.state())
    assert states[0] is KeepState.KEPT
    assert states[8] is KeepState.ENDING
    assert states[-1] is KeepState.ENDED
    it.purge_what_may_go()
    assert it.state() is KeepState.LOST


@given(st.lists(st.integers(0, 1_000), min_size=1, max_size=20), st.integers(0, 5_000))
def test_a_limit_is_for_all_partitions_together(sizes: list[int], limit: int) -> None:
    share = share_of([Unseen(size, limit) for size in sizes], partitions=4, of_partitions=4)
    kept = [min(size, share.bytes_max) for size in sizes]
    assert sum(kept) <= limit
    if sum(sizes) <= limit:
        assert kept == sizes
    else:
        assert limit - sum(kept) < len(sizes), "all that there is room for is kept"
        assert share.bytes_max >= limit // len(sizes), "nobody has less than an equal part"
    assert share.near_bytes <= share.bytes_max


def test_one_busy_partition_may_keep_most_of_the_bytes(it: Keeping) -> None:
    """A limit of 30,000 bytes is 29 for each of 1,024 partitions."""
    node = it.node
    it.change(b"a")
    it.save(1)
    it.keep(bytes_max=30_000)
    it.change(b"a", deletes=True)
    kept = KeptConsumers(node.engine, node.store, Meter(), EventLog(logging.getLogger("test")))
    states = []
    for number in range(40):
        it.change(b"n%d" % number, b"x" * 1_000)
        node.merge()
        limits = asyncio.run(kept.look(range(node.engine.num_vbuckets), node.now_ns))
        states.append(kept.found()[VB][0].state)
        assert limits[VB] == purge_max(node.engine, node.store, it.part, node.now_ns, kept.shares)
    assert states[20] is KeepState.KEPT
    assert states[26] is KeepState.ENDING
    assert states[-1] is KeepState.ENDED
    assert limits[VB] > 1


def test_an_operator_purges_nothing_that_is_kept(it: Keeping) -> None:
    for _ in range(3):
        it.change(b"a")
    it.save(2)
    it.keep()
    with pytest.raises(PurgeRefusedError, match="'billing' has not seen the deletions up to"):
        purge(it.node.engine, VB, 3)
    assert purge(it.node.engine, VB, 2) == 2
    it.forget()
    assert purge(it.node.engine, VB, 3) == 3


def test_a_position_that_is_not_committed_does_not_count(it: Keeping) -> None:
    """A failover may take it back, and the consumer starts from the one before."""
    for _ in range(3):
        it.change(b"a")
    it.save(1)
    it.keep()
    part = it.part
    committed = part.committed_seqno
    it.save(3)
    part.committed_seqno = committed
    (found,) = standings(it.node.engine, it.node.store, part, it.node.now_ns)
    assert found.position == 1


@pytest.mark.parametrize("name", ["a", "é:5", "x" * NAME_BYTES_MAX])
def test_documents_of_consumers_lie_in_their_partition(name: str) -> None:
    for vb_id in range(NUM_VBUCKETS):
        key = checkpoint_key(name, vb_id)
        assert (vbucket_of(key), checkpoint_of(key)) == (vb_id, (name, vb_id))
        assert len(key) <= 250
        assert vbucket_of(keep_key(vb_id)) == vb_id
    assert checkpoint_of(b"_dcpd:checkpoint:a:7") is None


def test_a_damaged_keep_is_refused_in_words() -> None:
    keeps = {"é": Keep(60.0, 1 << 20, 4)}
    assert decode_keeps(encode_keeps(keeps)) == keeps
    for raw in (b"", b"[]", b"{}", b'{"keeps": {"a": 1}}'):
        with pytest.raises(ValueError, match=r"keeps|Expecting"):
            decode_keeps(raw)
