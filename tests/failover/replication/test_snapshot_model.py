"""Replicas below the floor, with any compactions, cuts, crashes and merges, end with what their
master has; and who is promoted then tells consumers what the master would have told them.
"""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.wire.frame import Frame
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.rules.rollback import Question, decide
from support.memory_node import Peer
from support.replica_pair import COLLECTIONS, REPLICA, VB, Member, ReplicaPair
from vbucket.model.entry import key_of, prev_seqno_of, seqno_of

KEYS = tuple(b"k%d" % number for number in range(5))
STEPS = 6
"""Messages of one step of the link, at most."""


class Consumer(NamedTuple):
    """What a consumer of the master had at some moment."""

    seqno: int
    vb_uuid: int
    documents: dict[bytes, bytes]


class Run:
    """A pair, and what happens to it."""

    def __init__(self) -> None:
        self.pair = ReplicaPair()
        self.consumers: list[Consumer] = []

    def set(self, number: int) -> None:
        self.pair.set(KEYS[number % len(KEYS)], value=b"%d" % number)

    def delete(self, number: int) -> None:
        key = KEYS[number % len(KEYS)]
        if b"\0" + key in self.pair.master.documents():
            self.pair.delete(key)

    def compact(self, number: int) -> None:
        """Raise the floor and maybe the purge seqno, and drop some or all of what is below."""
        master = self.pair.master
        master.merge()
        if not (high := master.part.merged_seqno):
            return
        floor = 1 + number % high
        purge = number // 7 % floor if number % 2 else 0
        master.node.raise_floor(VB, floor, purge)
        master.commit()
        master.compact()

    def compact_replica(self, number: int) -> None:
        """The replica compacts up to the floors that it knows."""
        replica = self.pair.replica
        replica.merge()
        part = replica.part
        if part.history_floor:
            replica.node.raise_floor(VB, part.history_floor, part.purge_seqno)
            replica.commit()
            replica.compact()

    def step(self, number: int) -> None:
        for _ in range(number % STEPS):
            self.pair.step()

    def sync(self, number: int) -> None:
        self.pair.replica.commit()

    def cut(self, number: int) -> None:
        self.pair.cut()

    def crash(self, number: int) -> None:
        self.pair.cut()
        self.pair.replica.crash(keep_unsynced_bytes=number % 64)

    def freeze(self, number: int) -> None:
        """A merge of the replica begins; the next one ends it."""
        replica = self.pair.replica
        replica.commit()
        if not replica.node.engine.keyspace.memtables.is_merging:
            replica.node.groups.begin_merge()
            replica.commit()

    def consume(self, number: int) -> None:
        master = self.pair.master
        documents = {key: value for key, (_, value) in master.documents().items()}
        part = master.part
        self.consumers.append(Consumer(part.high_seqno, part.vb_uuid, documents))

    # -- what holds --------------------------------------------------------------------------------

    def check(self) -> None:
        """A part of a snapshot counts for nothing, and the replica's versions are linked."""
        pair, part = self.pair, self.pair.replica.part
        window = part.incomplete_snapshot
        if window is not None:
            assert part.history_floor <= window.start <= part.high_seqno <= window.end
            assert pair.acknowledged() <= window.start
        newest: dict[bytes, int] = {}
        versions = pair.replica.node.engine.versions
        for entry in versions.entries(part, 1, part.high_seqno, 1 << 30):
            key, prev_seqno = key_of(entry), prev_seqno_of(entry)
            assert newest.get(key, prev_seqno) == prev_seqno
            newest[key] = seqno_of(entry)

    def check_end(self) -> None:
        """The replica has what the master has, its folder is sound, and so it is after a crash."""
        pair = self.pair
        pair.follow()
        master, replica = pair.master, pair.replica
        assert replica.part.incomplete_snapshot is None
        for _ in range(2):
            assert replica.documents() == master.documents()
            assert replica.part.item_count == master.part.item_count == len(master.documents())
            assert replica.part.max_cas == master.part.max_cas
            assert floors(replica) == floors(master)
            assert replica.part.failover == master.part.failover
            pair.cut()
            replica.merge()
            assert replica.findings() == []
            replica.crash()
        pair.follow()

    def check_promoted(self) -> None:
        """Consumers are told by the replica, promoted, what the master would have told them."""
        pair = self.pair
        expected = [decided(each, pair.master) for each in self.consumers]
        assert [decided(each, pair.replica) for each in self.consumers] == expected
        end = {key: value for key, (_, value) in pair.master.documents().items()}
        pair.lead(pair.replica)
        for consumer, rollback_seqno in zip(self.consumers, expected, strict=True):
            assert streamed(consumer, rollback_seqno, pair.replica) == end


def floors(member: Member) -> tuple[int, int]:
    return member.part.history_floor, member.part.purge_seqno


def decided(consumer: Consumer, member: Member) -> int | None:
    part, seqno = member.part, consumer.seqno
    question = Question(seqno, consumer.vb_uuid, seqno, seqno)
    return decide(question, part.failover, part.high_seqno, part.purge_seqno).rollback_seqno


def streamed(consumer: Consumer, rollback_seqno: int | None, member: Member) -> dict[bytes, bytes]:
    """Return what a consumer has after it has streamed up to the end; each key once a snapshot."""
    peer: Peer = member.node.connect()
    peer.hello(COLLECTIONS)
    peer.open()
    peer.control(b"enable_noop", b"true")
    documents = dict(consumer.documents)
    asked = peer.stream(VB, consumer.seqno, uuid=consumer.vb_uuid)
    if rollback_seqno is None:
        assert asked.status == Status.OK
    else:
        assert (asked.status, int.from_bytes(asked.value[:8], "big")) == (Status.ROLLBACK, 0)
        documents = {}
        assert peer.stream(VB, 0).status == Status.OK
    in_snapshot: set[bytes] = set()
    for frame in peer.drain():
        apply(frame, documents, in_snapshot)
    return documents


def apply(frame: Frame, documents: dict[bytes, bytes], in_snapshot: set[bytes]) -> None:
    if frame.opcode == Opcode.DCP_SNAPSHOT_MARKER:
        in_snapshot.clear()
    if frame.opcode in {Opcode.DCP_MUTATION, Opcode.DCP_DELETION}:
        assert frame.key not in in_snapshot, "a key comes once in a snapshot"
        in_snapshot.add(frame.key)
        documents.pop(frame.key, None)
    if frame.opcode == Opcode.DCP_MUTATION:
        documents[frame.key] = frame.value


ACTIONS = (
    "set", "set", "set", "set", "set", "delete", "delete", "compact", "compact", "compact_replica",
    "step", "step", "step", "sync", "sync", "cut", "crash", "freeze", "consume",
)  # fmt: skip


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2**12)), min_size=25, max_size=60)
)
def test_any_way_to_the_end(actions: list[tuple[str, int]]) -> None:
    run = Run()
    for name, number in actions:
        getattr(run, name)(number)
        run.check()
    if run.pair.replica.node.engine.keyspace.memtables.is_merging:
        run.pair.replica.node.end_merge()
    run.check_end()
    run.check_promoted()
    assert run.pair.taken.master == REPLICA
