"""Streams while everything else happens: writes, commits, merges, branches, compactions, purges,
crashes, slow readers.

Several producers with windows of all sizes follow more partitions than backlogs may be under way;
one of them wants every version.
Whoever holds a complete snapshot holds exactly the partition as it was at that seqno.
"""

from __future__ import annotations

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from dcp.session.node_facts import Limits
from dcp.stream.active_stream import SendState
from dcp.wire.message import EndReason, pack_buffer_ack
from dcp.wire.status import Status
from stream.follower import Follower
from support.memory_node import LmdbNode, MemoryNode, Peer
from vbucket.engine.engine import SET
from vbucket.engine.lifecycle import purge
from vbucket.log.commit_group import CommitGroup
from vbucket.model.ids import NUM_VBUCKETS

BACKLOGS_MAX = 2
"""Instead of 16, so that few partitions are enough to make some wait."""
VBUCKETS = 5
WINDOWS = (0, 1, 300, 300)
HISTORY_NUMBER = 3
"""The consumer that wants every version."""
KEYS = b"abc"
IN_READY_QUEUE = {SendState.READY, SendState.WINDOW_FULL}

vb_ids = st.integers(0, VBUCKETS - 1)
consumers = st.integers(0, len(WINDOWS) - 1)
Versions = tuple[tuple[bytes, bytes | None], ...]


def state(versions: Versions, seqno: int) -> dict[bytes, bytes]:
    documents: dict[bytes, bytes] = {}
    for key, value in versions[:seqno]:
        if value is None:
            documents.pop(key, None)
        else:
            documents[key] = value
    return documents


class StreamMachine(RuleBasedStateMachine):
    partitions = 8
    """Of the node; those from VBUCKETS on stay empty."""

    def __init__(self) -> None:
        super().__init__()
        self.node = self.new_node()
        self.node.set_sizes(body_bytes_target=300, step_bytes=500)
        self.live: list[Versions] = [()] * VBUCKETS
        self.durable: list[Versions] = [()] * VBUCKETS
        self.taken: tuple[CommitGroup, list[Versions]] | None = None
        self.is_merging = False
        self.has_branched = False
        self.has_purged = False
        self.has_crashed = False
        self.count = 0
        self.followers = [Follower(self.connect(n)) for n in range(len(WINDOWS))]

    def new_node(self) -> MemoryNode:
        return MemoryNode(partitions=self.partitions)

    def connect(self, number: int) -> Peer:
        peer = self.node.connect(limits=Limits(backlogs_max=BACKLOGS_MAX))
        peer.hello()
        peer.open(b"consumer%d" % number)
        peer.control(b"connection_buffer_size", str(WINDOWS[number]).encode())
        if number == HISTORY_NUMBER:
            assert peer.control(b"change_streams", b"true").status == Status.OK
        return peer

    @initialize(with_history=st.sets(vb_ids), order=st.permutations(range(VBUCKETS)))
    def begin(self, with_history: set[int], order: list[int]) -> None:
        """Some partitions have a history, and everybody follows all."""
        if with_history:
            self.set(with_history, list(KEYS + KEYS))
            self.commit()
        for number in range(len(WINDOWS)):
            for vb_id in order:
                self.follow(number, vb_id)

    # -- the server's side -----------------------------------------------------------------------

    @rule(vb_ids=st.sets(vb_ids, min_size=1), keys=st.lists(st.sampled_from(KEYS), min_size=1))
    def set(self, vb_ids: set[int], keys: list[int]) -> None:
        for vb_id in sorted(vb_ids):
            for number in keys:
                key = bytes([number])
                self.count += 1
                value = b"%d" % self.count
                stored = b"\0" + key
                self.node.engine.store(SET, vb_id, stored, stored + value, 0, 0, 0, 0)
                self.live[vb_id] += ((key, value),)

    @rule(vb_ids=st.sets(vb_ids, min_size=1), number=st.sampled_from(KEYS))
    def delete(self, vb_ids: set[int], number: int) -> None:
        key = bytes([number])
        for vb_id in sorted(vb_ids):
            if self.node.engine.delete(vb_id, b"\0" + key, 0)[0] == 0:
                self.live[vb_id] += ((key, None),)

    @precondition(lambda self: self.taken is None)
    @rule()
    def take_group(self) -> None:
        group = self.node.groups.next_job()
        if group is not None:
            self.taken = group, list(self.live)

    @precondition(lambda self: self.taken is not None)
    @rule()
    def finish_group(self) -> None:
        assert self.taken is not None
        group, self.durable = self.taken
        self.taken = None
        self.node.finish(group)

    @rule()
    def commit(self) -> None:
        if self.taken is not None:
            self.finish_group()
        self.take_group()
        if self.taken is not None:
            self.finish_group()

    @precondition(lambda self: self.taken is None and not self.is_merging)
    @rule()
    def begin_merge(self) -> None:
        self.node.begin_merge()
        self.durable = list(self.live)
        self.is_merging = True

    @precondition(lambda self: self.is_merging)
    @rule()
    def end_merge(self) -> None:
        self.node.end_merge()
        self.is_merging = False

    @rule(vb_id=vb_ids, part=st.floats(0, 1), purge=st.floats(0, 1))
    def raise_floor(self, vb_id: int, part: float, purge: float) -> None:
        """As far as snapshots under way allow."""
        floor = int(self.node.engine.partitions[vb_id].merged_seqno * part)
        may = self.node.raise_floor(vb_id, floor, int(floor * purge))
        self.has_purged |= may.purge > 0

    @rule(slices=st.integers(1, 3) | st.none())
    def compact(self, slices: int | None) -> None:
        self.node.compact(range(VBUCKETS), slices=slices)

    @precondition(lambda self: self.taken is None and not self.is_merging)
    @rule(part=st.floats(0.5, 1), with_purge=st.booleans())
    def give_up_history(self, part: float, with_purge: bool) -> None:
        """All of it together, because chance rarely brings it in this order."""
        for raised in (False, True):
            if raised:
                for vb_id in range(VBUCKETS):
                    self.raise_floor(vb_id, part, 1.0 if with_purge else 0.0)
            self.begin_merge()
            self.end_merge()
        self.compact(None)

    @rule(vb_id=vb_ids)
    def purge(self, vb_id: int) -> None:
        """An operator does not ask who is under way."""
        self.has_purged |= purge(self.node.engine, vb_id) > 0

    @rule(vb_id=vb_ids, part=st.floats(0, 1), reads=st.integers(0, 4))
    def branch(self, vb_id: int, part: float, reads: int) -> None:
        at = int(len(self.live[vb_id]) * part)
        if at < self.node.engine.partitions[vb_id].history_floor:
            at = 0
        self.node.engine.keyspace.branch(vb_id, at)
        self.live[vb_id] = self.live[vb_id][:at]
        self.has_branched = True
        for number in range(len(WINDOWS)):
            self.read(number, reads)

    @precondition(lambda self: not self.has_crashed)
    @rule()
    def crash(self) -> None:
        """Once an example is enough: a restart takes longer than all the rest."""
        self.has_crashed = True
        self.node.crash()
        self.live = list(self.durable)
        self.taken = None
        self.is_merging = False
        for number, follower in enumerate(self.followers):
            follower.disconnected(self.connect(number))

    # -- the consumers' side ---------------------------------------------------------------------

    @rule(number=consumers)
    def follow_all(self, number: int) -> None:
        for vb_id in range(VBUCKETS):
            self.follow(number, vb_id)

    @rule(number=consumers, vb_id=vb_ids)
    def follow(self, number: int, vb_id: int) -> None:
        follower = self.followers[number]
        if not follower.is_following(vb_id):
            went_back = follower.resume(vb_id)
            assert self.has_branched or self.has_purged or not went_back

    @rule(number=consumers, vb_id=vb_ids)
    def close(self, number: int, vb_id: int) -> None:
        follower = self.followers[number]
        if follower.peer.producer.has_stream(vb_id):
            follower.close(vb_id)

    @rule(number=consumers, bytes_max=st.sampled_from([1, 100, 1 << 20]), count=st.integers(1, 40))
    def pump(self, number: int, bytes_max: int, count: int) -> None:
        for _ in range(count):
            self.followers[number].pump(bytes_max)

    @rule(number=consumers, share=st.floats(0, 1))
    def acknowledge(self, number: int, share: float) -> None:
        peer = self.followers[number].peer
        peer.send(pack_buffer_ack(int(peer.producer.unacked_bytes * share)))

    @rule(number=consumers, rounds=st.integers(1, 300))
    def read(self, number: int, rounds: int) -> None:
        """Take and acknowledge for a while."""
        for _ in range(rounds):
            if not self.followers[number].pump(200):
                break
            self.acknowledge(number, 1.0)

    @rule(number=consumers)
    def catch_up(self, number: int) -> None:
        self.read(number, 10_000)

    # -- what must hold ----------------------------------------------------------------------------

    @invariant()
    def whoever_holds_a_snapshot_holds_the_partition_as_it_was(self) -> None:
        for follower in self.followers:
            for vb_id, seqno in follower.seqnos.items():
                if not follower.is_following(vb_id):
                    continue
                if self.node.engine.partitions[vb_id].vb_uuid != follower.logs[vb_id][0][0]:
                    continue  # a branch that is on its way to the consumer
                versions = self.durable[vb_id]
                assert seqno <= len(versions), "nothing uncommitted is sent"
                if follower.is_between_snapshots(vb_id):
                    assert follower.documents[vb_id] == state(versions, seqno)

    @invariant()
    def backlogs_are_bounded_and_none_waits_for_nothing(self) -> None:
        for follower in self.followers:
            producer = follower.peer.producer
            under_way = sum(
                stream.is_backlog and stream.snap_end_seqno is not None
                for stream in producer._streams.values()
            )
            assert producer._backlogs == under_way <= BACKLOGS_MAX
            may_take_a_place = [
                stream
                for stream in producer._ready
                if stream.is_backlog and stream.snap_end_seqno is None
            ]
            if producer._waiting:
                assert under_way == BACKLOGS_MAX or may_take_a_place
            queued = [*producer._ready, *producer._waiting]
            assert len(set(map(id, queued))) == len(queued)
            assert {stream.state for stream in producer._ready} <= IN_READY_QUEUE
            assert {stream.state for stream in producer._waiting} <= {SendState.WAITS_FOR_BACKFILL}
            for stream in producer._streams.values():
                is_queued = stream.state in {*IN_READY_QUEUE, SendState.WAITS_FOR_BACKFILL}
                assert is_queued == any(stream is other for other in queued)
                assert stream.state is not SendState.SENDING, "a turn ends in another state"

    def teardown(self) -> None:
        """In the end everybody has everything."""
        if self.taken is not None:
            self.finish_group()
        self.commit()
        for number, follower in enumerate(self.followers):
            producer = follower.peer.producer
            follower.peer.send(pack_buffer_ack(producer.unacked_bytes))
            while producer.has_output or self.must_ask_again(number):
                follower.pump()
                follower.peer.send(pack_buffer_ack(producer.unacked_bytes))
            assert follower.seqnos == {n: len(v) for n, v in enumerate(self.durable)}
            for vb_id, versions in enumerate(self.durable):
                assert follower.documents[vb_id] == state(versions, len(versions))

    def must_ask_again(self, number: int) -> bool:
        follower = self.followers[number]
        missing = [n for n in range(VBUCKETS) if not follower.is_following(n)]
        for vb_id in missing:
            assert follower.ended.get(vb_id, EndReason.CLOSED) in {
                EndReason.CLOSED,
                EndReason.DISCONNECTED,
                EndReason.ROLLBACK,
            }
            self.follow(number, vb_id)
        return bool(missing)


StreamMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, phases=set(Phase) - {Phase.explain}
)


class WholeStreamMachine(StreamMachine):
    """The same with as many partitions as the product has."""

    partitions = NUM_VBUCKETS


WholeStreamMachine.TestCase.settings = settings(
    max_examples=4, stateful_step_count=50, deadline=None, phases=set(Phase) - {Phase.explain}
)


class LmdbStreamMachine(StreamMachine):
    """The same over LMDB."""

    def new_node(self) -> MemoryNode:
        return LmdbNode(partitions=self.partitions)

    def teardown(self) -> None:
        super().teardown()
        assert isinstance(self.node, LmdbNode)
        self.node.close()


LmdbStreamMachine.TestCase.settings = settings(
    max_examples=8, stateful_step_count=50, deadline=None, phases=set(Phase) - {Phase.explain}
)


TestStreams = StreamMachine.TestCase
TestWholeStreams = WholeStreamMachine.TestCase
TestStreamsOverLmdb = LmdbStreamMachine.TestCase
