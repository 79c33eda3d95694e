"""The core that routes and repeats key-value operations: tables, and a model with random faults."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scripted_peer import config_of

from clients.errors import (
    AmbiguousWriteError,
    AuthenticationError,
    ConnectError,
    ConnectionLostError,
    NotFoundError,
    OperationTimeoutError,
    ServerError,
    TemporaryError,
    TopologyError,
    error_from_status,
)
from clients.kv.call import CONNECT_PATIENCE_S, Call
from clients.kv.routing import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    FETCH_GAP_S,
    FetchMap,
    Router,
    Send,
    backoff_s,
    place_of,
)
from clients.link.topology import ClusterNode
from clients.operation import (
    Document,
    MutationResult,
    get_operation,
    partitions_of,
    store_operation,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

PORTS = [9001, 9002, 9003]
NODES = [ClusterNode("127.0.0.1", port, 8091 + n) for n, port in enumerate(PORTS)]
FOUND = Document(b"v", 1)
STORED = MutationResult(1, 0, 5, 1)


def stored(index):
    return MutationResult(1, 0, 5, index)


GET = get_operation(b"k")
SET = store_operation(Opcode.SET, b"k", b"v")
JITTER = 0.0  # the longest pause


def config(owner, rev=1, partitions=4):
    """Every partition at one node, or a list with the node of each."""
    owners = owner if isinstance(owner, list) else [owner] * partitions
    return config_of(PORTS, owners, rev=rev)


def router_of(owner=0, rev=1):
    router = Router(ClusterNode("127.0.0.1", PORTS[0]))
    router.learn(config(owner, rev), "127.0.0.1")
    return router


def refusal(status, body=b"", node=NODES[0]):
    return error_from_status(status, "set", body=body, vb_id=1, key=b"k", node=node.name)


def lost(node=NODES[0]):
    return ConnectionLostError("the connection was lost", node=node.name)


def unreachable(node=NODES[0]):
    return ConnectError("cannot connect: connection refused", node=node.name)


def answer(call, send, outcome, now_s=0.0, *, sent=1):
    send.sent = sent
    send.outcomes[0] = outcome
    call.finish(send, now_s, JITTER)


def only(call, now_s, kind=Send):
    (action,) = call.step(now_s, JITTER)
    assert isinstance(action, kind)
    return action


# -- one outcome -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "sent", "ends_read", "ends_write"),
    [
        (refusal(Status.KEY_ENOENT), 1, NotFoundError, NotFoundError),
        (refusal(Status.EINTERNAL), 1, ServerError, ServerError),
        (refusal(Status.DURABILITY_INVALID_LEVEL), 1, ServerError, ServerError),
        (refusal(Status.DURABILITY_IMPOSSIBLE), 1, ServerError, ServerError),
        (refusal(Status.SYNC_WRITE_AMBIGUOUS), 1, AmbiguousWriteError, AmbiguousWriteError),
        (
            AuthenticationError("user 'eve' was refused"),
            0,
            AuthenticationError,
            AuthenticationError,
        ),
        (TopologyError("cannot be read"), 0, TopologyError, TopologyError),
        (refusal(Status.NOT_MY_VBUCKET), 1, None, None),
        (refusal(Status.ETMPFAIL), 1, None, None),
        (refusal(Status.EBUSY), 1, None, None),
        (refusal(Status.ENOMEM), 1, None, None),
        (refusal(Status.UNKNOWN_COLLECTION), 1, None, None),
        (unreachable(), 0, None, None),
        (lost(), 0, None, None),
        (lost(), 1, None, ConnectionLostError),
        (OperationTimeoutError("no session within 1 s"), 0, None, None),
        (None, 1, OperationTimeoutError, OperationTimeoutError),
    ],
)
@pytest.mark.parametrize("operation", [GET, SET])
def test_what_ends_an_operation_and_what_repeats_it(
    outcome, sent, ends_read, ends_write, operation
):
    call = Call(router_of(), [operation], 0.0, 10.0)
    answer(call, only(call, 0.0), outcome, sent=sent)
    ends = ends_read if operation is GET else ends_write
    assert call.is_done == (ends is not None)
    if ends is None:
        again = [a for a in call.step(call.wake_s(), JITTER) if isinstance(a, Send)]
        while not again:
            again = [a for a in call.step(call.wake_s(), JITTER) if isinstance(a, Send)]
        assert again[0].attempt == 1
    else:
        (result,) = call.results
        assert type(result) is ends
        is_unknown = operation is SET and sent == 1 and result.status is None
        assert result.may_have_applied == (is_unknown or ends is AmbiguousWriteError)
        assert ("may have been applied" in str(result)) == is_unknown


def test_pauses_grow_up_to_half_a_second_and_jitter_cuts_them():
    pauses = [backoff_s(attempt, 0.0) for attempt in range(12)]
    assert pauses[:5] == [0.02, 0.04, 0.08, 0.16, 0.32]
    assert set(pauses[5:]) == {BACKOFF_MAX_S}
    assert backoff_s(3, 0.5) == pytest.approx(0.12)


def test_a_temporary_refusal_is_repeated_until_the_deadline_and_the_error_says_so():
    call = Call(router_of(), [SET], 0.0, 3.0)
    now_s, sends = 0.0, 0
    while not call.is_done:
        for action in call.step(now_s, JITTER):
            sends += 1
            answer(call, action, refusal(Status.ETMPFAIL), now_s)
        now_s = call.wake_s()
    assert now_s == 3.0
    assert sends == 10
    (error,) = call.results
    assert isinstance(error, TemporaryError)
    assert str(error) == (
        "set: temporary failure (ETMPFAIL 0x86); 10 attempts in 3 s; nothing was changed"
        " (key 'k', vbucket 1, node 127.0.0.1:9001)"
    )


# -- maps ------------------------------------------------------------------------------------------


def test_the_newer_map_of_a_refusal_is_followed_at_once():
    router = router_of(0)
    call = Call(router, [SET], 0.0, 10.0)
    answer(call, only(call, 0.0), refusal(Status.NOT_MY_VBUCKET, config(1, rev=2)))
    assert only(call, 0.0).node == NODES[1]
    assert router.topology.revision == (1, 2)


@pytest.mark.parametrize("body", [b"", b"{", config(2, rev=0), config(0, rev=1)])
def test_without_a_newer_map_the_refusing_node_is_asked_first_and_others_later(body):
    call = Call(router_of(1), [SET], 0.0, 10.0)
    answer(call, only(call, 0.0), refusal(Status.NOT_MY_VBUCKET, body))
    first = only(call, 0.0, FetchMap)
    assert first.node == NODES[1]
    assert call.step(BACKOFF_FIRST_S, JITTER) == [], "the map that was asked for may say where"
    call.mapped(first, config(1, rev=1), 0.03)
    now_s, asked = 0.03, []
    while len(asked) < 3:
        for action in call.step(now_s, JITTER):
            if isinstance(action, FetchMap):
                asked.append(action.node)
                call.mapped(action, lost(), now_s)
            else:
                answer(call, action, refusal(Status.NOT_MY_VBUCKET), now_s)
        now_s = max(now_s + 0.001, call.wake_s())
    assert {*asked} == {*NODES}


def test_a_partition_without_a_master_waits_for_a_map_that_names_one():
    router = router_of([-1] * 4)
    call = Call(router, [SET], 0.0, 10.0)
    now_s, sends = 0.0, []
    while now_s < 2.0:
        for action in call.step(now_s, JITTER):
            assert isinstance(action, FetchMap)
            call.mapped(action, config([-1] * 4), now_s)
        now_s = call.wake_s()
    fetch = only(call, now_s, FetchMap)
    call.mapped(fetch, config(2, rev=2), now_s + 0.01)
    sends = [only(call, now_s + 0.6)]
    assert sends[0].node == NODES[2]


def test_a_partition_without_a_master_ends_with_the_deadline():
    call = Call(router_of([-1] * 4), [SET], 0.0, 1.0)
    now_s = 0.0
    while not call.is_done:
        for action in call.step(now_s, JITTER):
            call.mapped(action, lost(action.node), now_s)
        now_s = call.wake_s()
    (error,) = call.results
    assert isinstance(error, TopologyError)
    assert str(error).startswith("no node is active for this partition; ")
    assert "attempts in 1 s; nothing was changed (key 'k', vbucket" in str(error)


def test_ever_newer_maps_do_not_end_every_pause():
    """A node that lies about the map gets no requests without pauses."""
    call = Call(router_of(0), [SET], 0.0, 10.0)
    sends = 0
    for rev in range(2, 50):
        actions = call.step(0.0, JITTER)
        if not actions:
            break
        sends += 1
        answer(call, actions[0], refusal(Status.NOT_MY_VBUCKET, config(rev % 3, rev=rev)))
    assert sends == 4


def test_a_node_that_cannot_be_reached_is_tried_by_one_call_at_a_time():
    router = router_of(0)
    first, second = (Call(router, [SET], 0.0, 10.0) for _ in range(2))
    answer(first, only(first, 0.0), unreachable(), sent=0)
    fetch = only(first, 0.0, FetchMap)
    assert fetch.node != NODES[0]
    assert second.step(0.01, JITTER) == [], "neither the node nor a second request for the map"
    first.mapped(fetch, unreachable(fetch.node), 0.01)
    assert only(second, second.wake_s()).node == NODES[0]


def test_calls_that_fail_together_lengthen_the_pause_of_a_node_once():
    router = router_of(0)
    calls = [Call(router, [SET], 0.0, 10.0) for _ in range(3)]
    sends = [only(call, 0.0) for call in calls]
    for call, send in zip(calls, sends, strict=True):
        answer(call, send, unreachable(), 0.1, sent=0)
    assert {call.wake_s() for call in calls} == {0.1 + BACKOFF_FIRST_S}


def test_operations_keep_their_results_when_parts_are_repeated_together():
    keys = [b"a", b"b", b"c", b"d", b"e", b"f"]
    operations = [store_operation(Opcode.SET, key, b"v") for key in keys]
    call = Call(router_of([0, 1, 0, 1]), operations, 0.0, 10.0)
    for send in call.step(0.0, JITTER):
        send.sent = len(send.indexes)
        send.outcomes[:] = [refusal(Status.ETMPFAIL)] * len(send.indexes)
        call.finish(send, 0.0, JITTER)
    call._router.learn(config(2, rev=2), "127.0.0.1")
    again = only(call, BACKOFF_FIRST_S)
    assert sorted(again.indexes) == [*range(6)] != list(again.indexes)
    again.sent = 6
    again.outcomes[:] = [stored(index) for index in again.indexes]
    call.finish(again, 0.1, JITTER)
    assert call.results == [stored(index) for index in range(6)]


def test_a_slow_connection_is_left_when_the_partition_moves():
    router = router_of(0)
    call = Call(router, [SET], 0.0, 10.0)
    send = only(call, 0.0)
    assert call.wake_s() == CONNECT_PATIENCE_S
    fetch = only(call, CONNECT_PATIENCE_S, FetchMap)
    assert fetch.node != NODES[0]
    call.mapped(fetch, config(1, rev=2), 1.1)
    assert only(call, 1.1).node == NODES[1]
    assert send.is_abandoned
    answer(call, send, unreachable(), 1.2, sent=0)
    assert not call.is_done, "what comes from it later is ignored"


def test_what_was_sent_stays_where_it_is():
    call = Call(router_of(0), [SET], 0.0, 10.0)
    send = only(call, 0.0)
    send.sent = 1
    call._router.learn(config(1, rev=2), "127.0.0.1")
    assert call.step(5.0, JITTER) == []
    assert not send.is_abandoned


def test_the_first_server_is_not_waited_for_if_it_was_never_there():
    router = Router(ClusterNode("127.0.0.1", PORTS[0]))
    call = Call(router, [SET], 0.0, 10.0)
    answer(call, only(call, 0.0), unreachable(), sent=0)
    assert isinstance(call.results[0], ConnectError)
    router = Router(ClusterNode("127.0.0.1", PORTS[0]), needs_map=True)
    call = Call(router, [SET], 0.0, 10.0)
    call.mapped(only(call, 0.0, FetchMap), unreachable(), 0.1)
    assert isinstance(call.results[0], ConnectError)


def test_parts_of_a_batch_go_on_by_themselves():
    keys = [b"a", b"b", b"c", b"d", b"e", b"f"]
    operations = [store_operation(Opcode.SET, key, b"v") for key in keys]
    call = Call(router_of([0, 1, 0, 1]), operations, 0.0, 10.0)
    slow, quick = call.step(0.0, JITTER)
    assert {*slow.indexes} | {*quick.indexes} == {*range(6)}
    slow.sent = len(slow.indexes)
    quick.sent = len(quick.indexes)
    quick.outcomes[:] = [refusal(Status.ETMPFAIL)] + [STORED] * (len(quick.indexes) - 1)
    call.finish(quick, 0.0, JITTER)
    again = only(call, call.wake_s())
    assert list(again.indexes) == [quick.indexes[0]]
    answer(call, again, STORED, 0.1)
    slow.outcomes[0] = STORED
    assert call.step(10.0, JITTER) == []
    assert call.results[slow.indexes[0]] == STORED, "what was answered by then counts"
    slow.outcomes[1] = STORED
    for index in slow.indexes[1:]:
        assert isinstance(call.results[index], OperationTimeoutError)
        assert call.results[index].may_have_applied


def test_only_what_was_not_written_is_repeated_when_a_batch_loses_its_connection():
    operations = [store_operation(Opcode.SET, b"%d" % n, b"v") for n in range(4)]
    call = Call(router_of(0), operations, 0.0, 10.0)
    send = only(call, 0.0)
    send.sent = 2
    send.outcomes[:] = [STORED, lost(), lost(), lost()]
    call.finish(send, 0.0, JITTER)
    assert isinstance(call.results[1], ConnectionLostError)
    fetch, *_ = call.step(0.0, JITTER)
    call.mapped(fetch, config(0), 0.01)
    assert list(only(call, 0.3).indexes) == [2, 3]


def test_a_command_for_a_node_ends_when_the_node_leaves():
    router = router_of(0)
    call = Call(router, [(Opcode.STAT, b"", b"", b"", 0)], 0.0, 10.0, node=NODES[2])
    answer(call, only(call, 0.0), unreachable(NODES[2]), sent=0)
    fetch = only(call, 0.0, FetchMap)
    call.mapped(fetch, config_of(PORTS[:2], [0] * 4, rev=2), 0.01)
    assert call.step(0.1, JITTER) == []
    assert "no longer in the cluster" in str(call.results[0])


def test_every_node_is_asked_again_where_the_map_has_changed():
    router = router_of(0)
    asked = {}
    assert [router.next_node(asked) for _ in range(4)] == [*NODES, None]
    router.learn(config(1, rev=2), "127.0.0.1")
    assert [router.next_node(asked) for _ in range(4)] == [*NODES, None]


def test_direct_sends_need_no_call_while_one_node_serves_them():
    router = router_of([0, 1, 0, 1])
    assert router.direct([SET]).node in NODES[:2]
    assert router.direct([SET, GET]) is None, "a batch may go to several nodes"
    assert router_of([-1] * 4).direct([SET]) is None
    router = router_of(1)
    send = router.direct([SET, GET])
    assert (send.node, list(send.indexes)) == (NODES[1], [0, 1])
    call = Call(router, [SET, GET], 0.0, 10.0, direct=send)
    send.sent = 2
    send.outcomes[:] = [STORED, refusal(Status.ETMPFAIL)]
    call.finish(send, 0.0, JITTER)
    assert list(only(call, 1.0).indexes) == [1]
    router.note_down(NODES[1], unreachable(), 0.0, JITTER)
    assert router.direct([SET]) is None
    assert Router(NODES[0], needs_map=True).direct([SET]) is None
    assert Router(NODES[0]).direct([SET]).node == NODES[0]


# -- all of it, at random ----------------------------------------------------------------------


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
                assert topology.place_of(vb_id) == place_of(action.node), "not the master"
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
        kinds=st.lists(st.booleans(), min_size=1, max_size=5),
        first=st.integers(0, 9),
        timeout_s=st.sampled_from([0.01, 0.3, 2.0, 10.0]),
        is_direct=st.booleans(),
    )
    def begin(self, kinds, first, timeout_s, is_direct):
        operations = [
            get_operation(b"%d" % (first + n)) if is_read
            else store_operation(Opcode.SET, b"%d" % (first + n), b"v")
            for n, is_read in enumerate(kinds)
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
        if not send.is_abandoned:
            send.sent = data.draw(st.integers(send.sent, len(send.indexes)))
            self._note_sent(tracked, send)

    def _note_sent(self, tracked, send):
        for index in list(send.indexes)[: send.sent]:
            if tracked.operations[index][0] != Opcode.GET:
                tracked.unrepeatable.add(index)

    def _outcome(self, data, tracked, send, position):
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
        if send.is_abandoned:
            assert send.sent == 0
        was_over = tracked.call.is_done
        for position in range(len(send.indexes)):
            send.outcomes[position] = self._outcome(data, tracked, send, position)
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
            places += [index for send in call._flights for index in send.indexes]
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


TestRouting = RoutingMachine.TestCase
