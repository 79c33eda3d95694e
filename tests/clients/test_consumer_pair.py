"""The consumer's core against a whole in-memory node: any interleaving of writes, commits, merges,
history branches, cut connections and crashes ends with the same documents on both sides, and no
event on the way breaks a rule of DCP."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from clients.consumer.core import ConsumerCore
from clients.consumer.options import ConsumerOptions
from clients.consumer.streams import Wanted, advance
from clients.position import Position
from clients.validator import StreamValidator
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode
from vbucket.engine.partition import BranchRefusedError
from vbucket.model.ids import NUM_VBUCKETS

VB_IDS = (3, 17)
ROUNDS_MAX = 1000
KEYS = [b"a", b"b", b"c", b"d"]


class ConsumerPair(RuleBasedStateMachine):
    """See the module."""

    @initialize(
        seed=st.integers(0, 2**16),
        has_collections=st.booleans(),
        window=st.sampled_from([1, 150, 10_000]),
        to_beginning=st.booleans(),
        wishes=st.fixed_dictionaries({"history": st.booleans(), "previous_values": st.booleans()}),
        grants=st.booleans(),
        asks=st.booleans(),
    )
    def begin(self, seed, has_collections, window, to_beginning, wishes, grants, asks):
        self.node = MemoryNode(seed, partitions=NUM_VBUCKETS)
        self.has_collections = has_collections
        self.window = window
        self.to_beginning = to_beginning
        self.wishes = wishes
        self.grants = grants
        self.asks = asks
        self.validator = StreamValidator()
        self.positions = {vb_id: Position() for vb_id in VB_IDS}
        self.value = 0
        self.waiting = []
        self.connect_writer()
        self.connect_consumer({vb_id: Wanted(Position()) for vb_id in VB_IDS})

    def connect_writer(self):
        self.writer = self.node.connect()
        self.writer.hello(Feature.SELECT_BUCKET)
        self.writer.ask(Opcode.SASL_AUTH, key=b"PLAIN", value=b"\0guest\0guest")
        self.writer.ask(Opcode.SELECT_BUCKET, key=b"default")

    def connect_consumer(self, wanted):
        peer = self.node.connect()
        peer.hello(Feature.SELECT_BUCKET, *[Feature.COLLECTIONS] * self.has_collections)
        peer.ask(Opcode.SASL_AUTH, key=b"PLAIN", value=b"\0guest\0guest")
        peer.ask(Opcode.SELECT_BUCKET, key=b"default")
        self.peer = peer
        self.core = ConsumerCore(
            b"pair",
            ConsumerOptions(
                buffer_bytes=self.window,
                on_rollback="fail" if self.asks else "restart" if self.to_beginning else "undo",
                **self.wishes,
            ),
            has_collections=self.has_collections,
        )
        if not self.grants:
            forget_extensions(peer)
        for vb_id, want in wanted.items():
            self.core.add(vb_id, want)
        peer.session.receive(self.core.begin(0), self.node.now_ns)

    # -- what may happen -----------------------------------------------------------------------

    @rule(vb_id=st.sampled_from(VB_IDS), key=st.sampled_from(KEYS), size=st.integers(0, 40))
    def store(self, vb_id, key, size):
        self.value += 1
        self.writer.set(vb_id, key, b"%d" % self.value + bytes(size))

    @rule(vb_id=st.sampled_from(VB_IDS), key=st.sampled_from(KEYS))
    def delete(self, vb_id, key):
        self.writer.delete(vb_id, key)

    @rule()
    def commit(self):
        self.node.commit()

    @rule()
    def merge(self):
        self.node.merge()

    @rule(vb_id=st.sampled_from(VB_IDS), back=st.integers(0, 6))
    def branch(self, vb_id, back):
        high_seqno = self.node.engine.partitions[vb_id].high_seqno
        try:
            self.node.engine.keyspace.branch(vb_id, max(0, high_seqno - back))
        except BranchRefusedError:
            return
        self.node.commit()

    @rule(pieces=st.lists(st.integers(1, 90), max_size=6), handed_out=st.integers(0, 5))
    def deliver(self, pieces, handed_out):
        """Bring over what the server sends, cut anywhere."""
        data = self.exchange()
        for piece in pieces:
            self.receive(data[:piece], handed_out)
            data = data[piece:]
        self.receive(data, handed_out)

    @rule()
    def decide(self):
        """The user says what becomes of partitions that were rolled back."""
        for vb_id in self.core.streams.held():
            self.core.streams.go_on(vb_id, None)

    @rule(vb_id=st.sampled_from(VB_IDS))
    def take_off_and_on(self, vb_id):
        """The user pauses a partition and resumes it, with anything under way."""
        wanted = self.core.streams.remove(vb_id)
        assert wanted is not None
        self.core.add(vb_id, wanted)

    @rule()
    def restart_what_is_behind(self):
        """As after a stall that was none."""
        high = dict.fromkeys(VB_IDS, 10**9)
        for _ in range(2):
            self.core.streams.restart_stalled(high)

    @rule(kept=st.integers(0, 400))
    def cut(self, kept):
        """The connection breaks with bytes under way."""
        self.receive(self.exchange()[:kept], 0)
        self.peer.session.state.producer and self.peer.session.state.producer.close()
        self.connect_consumer(self.core.streams.unfinished() | self.core.streams.held())

    @rule(kept=st.integers(0, 400))
    def crash(self, kept):
        """The server dies; what was not synced is gone."""
        self.receive(self.exchange()[:kept], 0)
        self.node.crash()
        self.connect_writer()
        self.connect_consumer(self.core.streams.unfinished() | self.core.streams.held())

    # -- delivery ------------------------------------------------------------------------------

    def exchange(self):
        """Return the server's bytes after it saw ours."""
        output = self.core.take_output()
        state = self.peer.state
        if output:
            self.peer.session.receive(output, self.node.now_ns)
        data = b"".join(state.answers)
        state.answers.clear()
        if state.producer is not None:
            data += b"".join(state.producer.pump(500))
        return data

    def receive(self, data, handed_out):
        if not data:
            return
        batch = self.core.receive(data, 0)
        assert self.core.failure is None
        for event in batch.events:
            self.validator.observe(event)
        in_the_middle = dict(self.positions)
        advance(in_the_middle, batch.events[:handed_out], batch.markers, batch.collections)
        for position in in_the_middle.values():
            assert position.snap_start <= position.seqno <= position.snap_end
        folded = dict(self.positions)
        advance(folded, batch.events, batch.markers, batch.collections)
        self.positions.update(batch.positions)
        # All but the versions and the window: a version that the server does not know is given up
        # without an event where that does not cost a change.
        for vb_id, position in self.positions.items():
            assert folded[vb_id].seqno == position.seqno
            assert folded[vb_id].complete == position.complete
            assert folded[vb_id].collections == position.collections
        self.core.processed(batch)

    @invariant()
    def nothing_is_unplaced(self):
        if hasattr(self, "core"):
            assert not self.core.streams.homeless

    def teardown(self):
        if not hasattr(self, "core"):
            return
        self.node.commit()
        quiet = 0
        for _ in range(ROUNDS_MAX):
            data = self.exchange()
            self.receive(data, 0)
            self.core.tick(10**15)
            self.decide()
            quiet = 0 if data else quiet + 1
            if quiet == 3:
                break
        assert quiet == 3, "the consumer and the server never come to rest"
        documents = {}
        for vb_id in VB_IDS:
            for key in KEYS:
                answer = self.writer.ask(Opcode.GET, vb_id=vb_id, key=key)
                if answer.status == 0:
                    documents.setdefault(vb_id, {})[key] = answer.value
        for vb_id in VB_IDS:
            high_seqno = self.node.engine.partitions[vb_id].high_seqno
            assert self.validator.seqnos().get(vb_id, 0) == high_seqno, vb_id
            held = self.validator.documents_of(vb_id)
            assert {key: item.value for key, item in held.items()} == documents.get(vb_id, {})


def forget_extensions(peer):
    """Make a server that has not heard of what consumers of ours ask for."""
    control = peer.session._cold[Opcode.DCP_CONTROL]

    def control_or_refuse(request):
        if request.key.startswith(b"x_") or request.key == b"change_streams":
            peer.state.refuse(request.opcode, request.opaque, Status.EINVAL, "no such control")
        else:
            control(request)

    peer.session._cold[Opcode.DCP_CONTROL] = control_or_refuse


TestConsumerPair = ConsumerPair.TestCase
TestConsumerPair.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_ping_of_the_writer():
    """A MemoryNode answers what the pair's helpers send."""
    node = MemoryNode(1, partitions=NUM_VBUCKETS)
    assert node.connect().send(pack_request(Opcode.NOOP))[0].opcode == Opcode.NOOP
