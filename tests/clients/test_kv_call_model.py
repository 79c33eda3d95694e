"""The core that routes and repeats key-value operations, under random faults."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv_call_parts import FOUND, PORTS, config, lost, refusal, stored, unreachable

from clients.errors import AmbiguousWriteError
from clients.kv.call import Call
from clients.kv.routing import BACKOFF_FIRST_S, Router
from clients.link.topology import FETCH_GAP_S, ClusterNode, FetchMap
from clients.operation import MutationResult, get_operation, partitions_of, store_operation
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status


class Tracked:
    """A call, and what the model knows of it."""

    def __init__(self, call, operations, ends_s):
        self.call = call
        self.operations = operations
        self.ends_s = ends_s
        self.final = {}
        """Results by index, as they were first seen."""
        self.unrepeatable = set()
        """Writes that a node may have applied."""
        self.unsure = set()
        """The same for those with a CAS, which may be sent again."""
        self.silent = set()
        """Operations of which an attempt got no answer."""
        self.last = {}
        """Index -> when it was last sent, and the map then."""


class RoutingMachine(RuleBasedStateMachine):
    """A client of three nodes. Maps change, nodes refuse and vanish, and answers come late."""

    def __init__(self):
        super().__init__()
        self.now_s = 0.0
        self.rev = 1
        self.configs = [config([0, 1, 2, 0])]
        self.router = Router(ClusterNode("127.0.0.1", PORTS[0]), needs_map=True)
        self.router.learn(self.configs[0], "127.0.0.1")
        self.calls = []
        self.flights = []
        """(tracked, Send) that were not finished."""
        self.fetches = []
        self.fetched_s = -1.0
        self.seen = (0, 0)

    def pump(self, tracked, jitter=0.5):
        call = tracked.call
        if call.is_done:
            return
        for action in call.step(self.now_s, jitter):
            if isinstance(action, FetchMap):
                assert self.now_s >= self.fetched_s + FETCH_GAP_S or self.fetched_s < 0
                self.fetched_s = self.now_s
                self.fetches.append((tracked, action))
                continue
            topology = self.router.topology
            asked = [tracked.operations[index] for index in action.indexes]
            assert list(action.vb_ids) == partitions_of(asked, topology.num_vbuckets)
            for index, vb_id in zip(action.indexes, action.vb_ids, strict=True):
                assert index not in tracked.unrepeatable, "sent again after it may be applied"
                assert call.results[index] is None
                assert topology.place_of(vb_id) == action.node.place, "not the master"
                before = tracked.last.get(index)
                if before is not None and before[1] is topology:
                    assert self.now_s - before[0] >= BACKOFF_FIRST_S / 2
                tracked.last[index] = (self.now_s, topology)
            self.flights.append((tracked, action))
        if self.now_s >= tracked.ends_s:
            assert call.is_done, "the deadline is the end"

    def pump_all(self):
        for tracked in self.calls:
            self.pump(tracked)

    @rule(
        kinds=st.lists(st.sampled_from(["get", "set", "cas"]), min_size=1, max_size=5),
        first=st.integers(0, 9),
        timeout_s=st.sampled_from([0.01, 0.3, 2.0, 10.0]),
        is_direct=st.booleans(),
    )
    def begin(self, kinds, first, timeout_s, is_direct):
        operations = [
            get_operation(b"%d" % (first + n)) if kind == "get"
            else store_operation(Opcode.SET, b"%d" % (first + n), b"v", cas=9 * (kind == "cas"))
            for n, kind in enumerate(kinds)
        ]  # fmt: skip
        direct = self.router.direct(operations) if is_direct else None
        call = Call(self.router, operations, self.now_s, timeout_s, direct=direct)
        tracked = Tracked(call, operations, self.now_s + timeout_s)
        self.calls.append(tracked)
        if direct is not None:
            self.flights.append((tracked, direct))
            for index in direct.indexes:
                tracked.last[index] = (self.now_s, self.router.topology)
        self.pump(tracked)

    @rule(pause_s=st.sampled_from([0.0, 0.005, 0.02, 0.1, 0.6, 3.0]))
    def wait(self, pause_s):
        self.now_s += pause_s
        self.pump_all()

    @precondition(lambda self: any(not tracked.call.is_done for tracked in self.calls))
    @rule()
    def wake(self):
        wakes = [t.call.wake_s() for t in self.calls if not t.call.is_done]
        self.now_s = max(self.now_s, min(wakes))
        self.pump_all()

    @rule(owners=st.lists(st.integers(-1, 2), min_size=4, max_size=4))
    def move(self, owners):
        self.rev += 1
        self.configs.append(config(owners, rev=self.rev))

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def write(self, data):
        tracked, send = data.draw(st.sampled_from(self.flights))
        if not (send.is_abandoned or send.is_cut):
            send.sent = data.draw(st.integers(send.sent, len(send.indexes)))
            self._note_sent(tracked, send)

    def _note_sent(self, tracked, send):
        for index in list(send.indexes)[: send.sent]:
            opcode, _, _, _, cas = tracked.operations[index]
            if opcode != Opcode.GET and not cas:
                tracked.unrepeatable.add(index)
            elif cas:
                tracked.unsure.add(index)

    def _outcome(self, data, tracked, send, position, counts):
        index = send.indexes[position]
        if position >= send.sent:
            kind = data.draw(st.sampled_from(["unreachable", "lost"]))
        else:
            kinds = ["ok", "ok", "busy", "moved", "lost", "none", "missing", "ambiguous"]
            kind = data.draw(st.sampled_from(kinds))
        bodies = [b"", b"{", *self.configs[-2:]] if kind == "moved" else [b""]
        body = data.draw(st.sampled_from(bodies))
        if kind in {"busy", "moved"}:
            tracked.unrepeatable.discard(index)  # the server says that nothing was changed
        if kind in {"lost", "none"} and position < send.sent and counts:
            tracked.silent.add(index)
        is_read = tracked.operations[index][0] == Opcode.GET
        return {
            "ok": FOUND if is_read else stored(index),
            "busy": refusal(Status.ETMPFAIL, node=send.node),
            "moved": refusal(Status.NOT_MY_VBUCKET, body, node=send.node),
            "missing": refusal(Status.KEY_ENOENT, node=send.node),
            "ambiguous": refusal(Status.SYNC_WRITE_AMBIGUOUS, node=send.node),
            "lost": lost(send.node),
            "unreachable": unreachable(send.node),
            "none": None,
        }[kind]

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), jitter=st.floats(0, 0.99))
    def answer(self, data, jitter):
        """It may come after the call has ended, or was sent elsewhere."""
        tracked, send = data.draw(st.sampled_from(self.flights))
        self.flights.remove((tracked, send))
        was_over = tracked.call.is_done
        for position in range(len(send.indexes)):
            counts = not (was_over or send.is_abandoned or position in send.left)
            send.outcomes[position] = self._outcome(data, tracked, send, position, counts)
        tracked.call.finish(send, self.now_s, jitter)
        if not was_over:
            self.pump(tracked, jitter)

    @precondition(lambda self: self.fetches)
    @rule(data=st.data())
    def map_arrives(self, data):
        tracked, fetch = data.draw(st.sampled_from(self.fetches))
        self.fetches.remove((tracked, fetch))
        reply = data.draw(st.sampled_from([*self.configs[-3:], b"", b"{", lost(fetch.node)]))
        tracked.call.mapped(fetch, reply, self.now_s)
        self.pump(tracked)

    @invariant()
    def results_stay(self):
        for tracked in self.calls:
            for index, result in enumerate(tracked.call.results):
                known = tracked.final.get(index)
                assert known is None or result is known, "a result has changed"
                if isinstance(result, MutationResult):
                    assert result.seqno == index, "the result of another operation"
                if result is not None:
                    tracked.final[index] = result

    @invariant()
    def each_operation_is_in_one_place(self):
        for tracked in self.calls:
            call = tracked.call
            if call.is_done:
                assert None not in call.results
                continue
            places = [index for held in call._held for index in held.indexes]
            places += [
                index
                for send in call._flights
                for position, index in enumerate(send.indexes)
                if position not in send.left
            ]
            places += [index for index, result in enumerate(call.results) if result is not None]
            assert sorted(places) == [*range(len(tracked.operations))]

    @invariant()
    def the_map_gets_only_newer(self):
        assert self.router.topology.revision >= self.seen
        self.seen = self.router.topology.revision

    def teardown(self):
        """The faults end. Calls that have time left succeed; all end by their deadline."""
        self.move([0, 1, 2, 0])
        for _ in range(2000):
            running = [t for t in self.calls if not t.call.is_done]
            if not running:
                break
            for tracked, send in list(self.flights):
                self.flights.remove((tracked, send))
                if not send.is_abandoned:
                    send.sent = len(send.indexes)
                send.outcomes[:] = [
                    FOUND if tracked.operations[index][0] == Opcode.GET else stored(index)
                    for index in send.indexes
                ]
                tracked.call.finish(send, self.now_s, 0.5)
            for tracked, fetch in list(self.fetches):
                self.fetches.remove((tracked, fetch))
                tracked.call.mapped(fetch, self.configs[-1], self.now_s)
            running = [t for t in self.calls if not t.call.is_done]
            if running:
                self.now_s = max(self.now_s, min(t.call.wake_s() for t in running))
            self.pump_all()
        assert all(tracked.call.is_done for tracked in self.calls)
        self.results_stay()
        for tracked in self.calls:
            for index in tracked.unrepeatable | tracked.unsure:
                self.check_told(tracked, index)

    @staticmethod
    def check_told(tracked, index):
        """No write that may have been applied ends with an error that says that it was not."""
        result = tracked.call.results[index]
        if index in tracked.silent and not isinstance(result, MutationResult):
            assert isinstance(result, AmbiguousWriteError), result
        if isinstance(result, AmbiguousWriteError):
            assert result.may_have_applied


TestRouting = RoutingMachine.TestCase
