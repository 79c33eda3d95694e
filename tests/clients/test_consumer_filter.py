"""Leaving keys out on this side gives what a server gives that knows prefixes, for any changes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from test_consumer_pair import forget_extensions

from clients.consumer.core import ConsumerCore
from clients.consumer.extensions import left_in
from clients.consumer.options import ConsumerOptions
from clients.consumer.streams import Wanted
from clients.event import Deletion, Mutation, SeqnoAdvanced, SnapshotEnd, SnapshotStart
from clients.position import Position
from clients.validator import StreamValidator
from dcp.wire.feature import Feature
from dcp.wire.opcode import Opcode
from support.memory_node import MemoryNode

VB = 9
KEYS = [b"user:1", b"user:2", b"cart:1", b"u"]


class Follower:
    """A core that follows a node, and what its events say."""

    def __init__(self, node, *, has_collections, knows_prefixes):
        self.node = node
        self.peer = node.connect()
        self.peer.hello(Feature.SELECT_BUCKET, *[Feature.COLLECTIONS] * has_collections)
        self.peer.ask(Opcode.SASL_AUTH, key=b"PLAIN", value=b"\0guest\0guest")
        self.peer.ask(Opcode.SELECT_BUCKET, key=b"default")
        self.core = ConsumerCore(
            b"knows" if knows_prefixes else b"does not",
            ConsumerOptions(key_prefixes=(b"user:", b"cart:1")), has_collections=has_collections,
        )  # fmt: skip
        if not knows_prefixes:
            forget_extensions(self.peer)
        self.core.add(VB, Wanted(Position()))
        self.validator = StreamValidator()
        self.events = []
        self.peer.session.receive(self.core.begin(0), node.now_ns)
        self.follow()

    def follow(self):
        for _ in range(20):
            output = self.core.take_output()
            if output:
                self.peer.session.receive(output, self.node.now_ns)
            data = b"".join(self.peer.state.answers)
            self.peer.state.answers.clear()
            if self.peer.state.producer is not None:
                data += b"".join(self.peer.state.producer.pump(1 << 20))
            if not data and not output:
                return
            batch = self.core.receive(data, 0)
            assert self.core.failure is None
            for event in batch.events:
                self.validator.observe(event)
            self.events += batch.events
            self.core.processed(batch)


@settings(max_examples=40, deadline=None)
@given(
    rounds=st.lists(
        st.lists(st.tuples(st.sampled_from(KEYS), st.booleans()), max_size=5), max_size=5
    ),
    has_collections=st.booleans(),
)
def test_both_sides_filter_alike(rounds, has_collections):
    node = MemoryNode(4)
    writer = node.connect()
    writer.hello()
    there, here = (
        Follower(node, has_collections=has_collections, knows_prefixes=knows)
        for knows in (True, False)
    )
    for number, changes in enumerate(rounds):
        for key, is_deletion in changes:
            if is_deletion:
                writer.delete(VB, key)
            else:
                writer.set(VB, key, b"%d" % number)
        node.commit()
        there.follow()
        here.follow()
    assert there.events == here.events
    assert there.validator.seqnos() == here.validator.seqnos()
    assert there.core.positions()[VB].seqno == here.core.positions()[VB].seqno
    assert b"u" not in there.validator.documents()


def test_change_left_out_at_snapshots_end_becomes_passed_seqno():
    events = [
        SnapshotStart(1, 1, 3, 1),
        Mutation(1, b"_x:1", b"", 1, 1, 50, 0, 0),
        Mutation(1, b"a", b"", 2, 1, 60, 0, 0),
        Deletion(1, b"_x:2", 3, 1, 70),
        SnapshotEnd(1, 3),
    ]
    kept = left_in(events, (), (b"_x:",))
    assert kept == [events[0], events[2], SeqnoAdvanced(1, 3), events[4]]
    assert left_in(events, (), (), {1: 65}) == [events[0], events[3], events[4]]
    assert left_in(events, (), (), {2: 65}) == events
    # What is hidden is of the default collection.
    other = Mutation(1, b"_x:1", b"", 1, 1, 50, 0, 0, collection_id=8)
    assert left_in([other], (), (b"_x:",)) == [other]
