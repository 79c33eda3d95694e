"""The core that routes and repeats key-value operations: each rule alone."""

import pytest
from kv_call_parts import (
    GET,
    JITTER,
    NODES,
    PORTS,
    SET,
    STORED,
    config,
    lost,
    refusal,
    router_of,
    stored,
    unreachable,
)
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
)
from clients.kv.call import CONNECT_PATIENCE_S, Call
from clients.kv.routing import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    FetchMap,
    Router,
    Send,
    backoff_s,
)
from clients.link.topology import ClusterNode
from clients.operation import (
    store_operation,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status


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
