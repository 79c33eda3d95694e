"""The core that routes and repeats key-value operations: each rule alone."""

import itertools

import pytest
from kv_call_parts import (
    FOUND,
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
    AmbiguousStatusError,
    AmbiguousWriteError,
    AuthenticationError,
    CasMismatchError,
    ConnectError,
    ConnectionLostError,
    DurabilityImpossibleError,
    NotFoundError,
    OperationTimeoutError,
    ServerError,
    TemporaryError,
    TopologyError,
)
from clients.kv.call import ANSWER_GRACE_MAX_S, ANSWER_GRACE_S, READ_SILENCE_S, Call
from clients.kv.routing import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    PATIENCE_S,
    Router,
    Send,
    backoff_s,
)
from clients.link.topology import ClusterNode, FetchMap
from clients.operation import MutationResult, get_operation, store_operation
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
        (
            refusal(Status.DURABILITY_IMPOSSIBLE),
            1,
            DurabilityImpossibleError,
            DurabilityImpossibleError,
        ),
        (refusal(Status.SYNC_WRITE_AMBIGUOUS), 1, AmbiguousStatusError, AmbiguousStatusError),
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
        (lost(), 1, None, AmbiguousWriteError),
        (OperationTimeoutError("no session within 1 s"), 0, None, None),
        (None, 1, OperationTimeoutError, AmbiguousWriteError),
    ],
)
@pytest.mark.parametrize("operation", [GET, SET])
def test_what_ends_an_operation_and_what_repeats_it(
    outcome, sent, ends_read, ends_write, operation
):
    call = Call(router_of(), [operation], 0.0, 10.0)
    now_s = 10.0 if outcome is None else 0.0
    answer(call, only(call, 0.0), outcome, now_s, sent=sent)
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
        assert result.may_have_applied == isinstance(result, AmbiguousWriteError)
        assert ("may have been applied" in str(result)) == is_unknown


def test_pauses_grow_up_to_half_a_second_and_jitter_cuts_them():
    pauses = [backoff_s(attempt, 0.0) for attempt in range(12)]
    assert pauses[:5] == [0.02, 0.04, 0.08, 0.16, 0.32]
    assert set(pauses[5:]) == {BACKOFF_MAX_S}
    assert backoff_s(3, 0.5) == pytest.approx(0.12)


def test_temporary_refusal_is_repeated_until_the_deadline():
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
        " (key 'k', partition 1, node 127.0.0.1:9001)"
    )


# -- maps ------------------------------------------------------------------------------------------


def test_the_newer_map_of_a_refusal_is_followed_at_once():
    router = router_of(0)
    call = Call(router, [SET], 0.0, 10.0)
    answer(call, only(call, 0.0), refusal(Status.NOT_MY_VBUCKET, config(1, rev=2)))
    assert only(call, 0.0).node == NODES[1]
    assert router.topology.revision == (1, 2)


@pytest.mark.parametrize("body", [b"", b"{", config(2, rev=0), config(0, rev=1)])
def test_without_newer_map_the_refusing_node_is_asked_first(body):
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


def test_partition_without_master_waits_for_map_that_names_one():
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
    assert "attempts in 1 s; nothing was changed (key 'k', partition" in str(error)


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


def test_a_node_that_cant_be_reached_is_tried_by_one_call_each():
    router = router_of(0)
    first, second = (Call(router, [SET], 0.0, 10.0) for _ in range(2))
    answer(first, only(first, 0.0), unreachable(), sent=0)
    fetch = only(first, 0.0, FetchMap)
    assert fetch.node != NODES[0]
    assert second.step(0.01, JITTER) == [], "neither the node nor a second request for the map"
    first.mapped(fetch, unreachable(fetch.node), 0.01)
    assert only(second, second.wake_s()).node == NODES[0]


def test_calls_that_fail_together_lengthen_pause_of_node_once():
    router = router_of(0)
    calls = [Call(router, [SET], 0.0, 10.0) for _ in range(3)]
    sends = [only(call, 0.0) for call in calls]
    for call, send in zip(calls, sends, strict=True):
        answer(call, send, unreachable(), 0.1, sent=0)
    assert {call.wake_s() for call in calls} == {0.1 + BACKOFF_FIRST_S}


def test_operations_keep_results_when_parts_are_repeated():
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
    assert call.wake_s() == PATIENCE_S
    fetch = only(call, PATIENCE_S, FetchMap)
    assert fetch.node != NODES[0]
    call.mapped(fetch, config(1, rev=2), 1.1)
    assert only(call, 1.1).node == NODES[1]
    assert send.is_abandoned
    answer(call, send, unreachable(), 1.2, sent=0)
    assert not call.is_done, "what comes from it later is ignored"


def test_calls_with_a_short_timeout_learn_of_a_newer_map_too():
    """Otherwise each of them would go to the node that stands still, and end before it asks."""
    router = router_of(0)
    first = Call(router, [SET], 0.0, 0.4)
    written(first, only(first, 0.0))
    assert first.wake_s() == 0.2
    fetch = only(first, 0.2, FetchMap)
    assert fetch.node != NODES[0]
    first.mapped(fetch, config(1, rev=2), 0.3)
    first.step(0.4, JITTER)
    assert first.is_done
    second = Call(router, [SET], 0.4, 0.4)
    assert only(second, 0.4).node == NODES[1]


def written(call, send):
    send.sent = len(send.indexes)
    return send


def test_sent_read_goes_to_the_new_master_of_a_newer_map():
    """Its node stands still: it took the request, and will not answer."""
    call = Call(router_of(0), [GET], 0.0, 10.0)
    send = written(call, only(call, 0.0))
    fetch = only(call, PATIENCE_S, FetchMap)
    assert fetch.node != NODES[0]
    call.mapped(fetch, config(1, rev=2), 1.1)
    again = only(call, 1.1)
    assert (again.node, again.is_fresh) == (NODES[1], False)
    assert send.is_abandoned
    answer(call, send, FOUND, 1.2)
    assert not call.is_done, "the old master's answer may be out of date"
    answer(call, again, FOUND, 1.3)
    assert call.results == [FOUND]


def test_read_that_meets_silence_is_sent_over_a_new_connection():
    """The map has not changed: the connection may lead nowhere. The pauses grow."""
    call = Call(router_of(0), [GET], 0.0, 60.0)
    send, sends, asked, now_s = written(call, only(call, 0.0)), [0.0], [], 0.0
    while now_s < 50.0:
        now_s = call.wake_s()
        for action in call.step(now_s, JITTER):
            if isinstance(action, FetchMap):
                asked.append(now_s)
                call.mapped(action, config(0), now_s)
            else:
                assert send.is_abandoned
                assert action.is_fresh
                send = written(call, action)
                sends.append(now_s)
    gaps = [after - before for before, after in itertools.pairwise(sends)]
    assert gaps[0] == READ_SILENCE_S
    assert gaps[1] >= 2 * READ_SILENCE_S
    assert gaps[2] >= 4 * READ_SILENCE_S
    assert len(asked) < 25, "nobody is asked all the time"


def test_sent_write_waits_with_the_old_master_then_is_ambiguous():
    call = Call(router_of(0), [SET], 0.0, 8.0)
    send = written(call, only(call, 0.0))
    call._router.learn(config(1, rev=2), "127.0.0.1")
    assert call.step(0.5, JITTER) == []
    assert not send.is_abandoned, "a master that hands over still answers"
    assert call.wake_s() <= 0.5 + ANSWER_GRACE_S
    actions = call.step(0.5 + ANSWER_GRACE_S, JITTER)
    assert all(isinstance(action, FetchMap) for action in actions), "it is not sent again"
    (error,) = call.results
    assert call.is_done
    assert type(error) is AmbiguousWriteError
    assert str(error) == (
        "no answer from the node before its partition moved to another one; the change may have"
        " been applied (key 'k', partition 2, node 127.0.0.1:9001)"
    )


def test_sent_write_is_not_given_up_if_its_node_is_master_again():
    call = Call(router_of(0), [SET], 0.0, 60.0)
    send = written(call, only(call, 0.0))
    call._router.learn(config(1, rev=2), "127.0.0.1")
    call.step(0.1, JITTER)
    call._router.learn(config(0, rev=3), "127.0.0.1")
    call.step(0.2, JITTER)
    call.step(30.0, JITTER)
    assert not send.is_abandoned
    answer(call, send, STORED, 30.0)
    assert call.results == [STORED]


@pytest.mark.parametrize("how", ["lost", "moved"])
@pytest.mark.parametrize(
    ("second", "result"),
    [
        (STORED, MutationResult),
        (CasMismatchError("CAS mismatch", status=Status.KEY_EEXISTS), AmbiguousWriteError),
        (refusal(Status.KEY_ENOENT), AmbiguousWriteError),
        (refusal(Status.EACCESS), AmbiguousWriteError),
        (unreachable(), AmbiguousWriteError),
    ],
)
def test_write_with_cas_is_sent_again_and_its_success_is_certain(how, second, result):
    guarded = store_operation(Opcode.SET, b"k", b"v", cas=77)
    call = Call(router_of(0), [guarded], 0.0, 10.0)
    send, now_s = written(call, only(call, 0.0)), 0.0
    call._router.learn(config(1, rev=2), "127.0.0.1")
    if how == "lost":
        answer(call, send, lost())
    else:
        call.step(now_s, JITTER)
        now_s = ANSWER_GRACE_MAX_S
    while not call.is_done:
        for action in call.step(now_s, JITTER):
            if isinstance(action, FetchMap):
                call.mapped(action, config(1, rev=2), now_s)
            else:
                assert action.node == NODES[1]
                answer(call, action, second, now_s, sent=int(second.__class__ is not ConnectError))
        now_s = max(now_s + 0.001, call.wake_s())
    (ended,) = call.results
    assert type(ended) is result
    if result is AmbiguousWriteError:
        assert "the change may have been applied" in str(ended)
        assert "nothing was changed" not in str(ended)
        assert type(ended.cause) is type(second)


def test_parts_of_batch_leave_node_that_stands_each_in_its_way():
    """One read and one write were sent, one write was not: the newer map moves all."""
    operations = [get_operation(b"a"), store_operation(Opcode.SET, b"b", b"v"),
                  store_operation(Opcode.SET, b"c", b"v")]  # fmt: skip
    call = Call(router_of(0), operations, 0.0, 60.0)
    send = only(call, 0.0)
    send.sent = 2
    call._router.learn(config(1, rev=2), "127.0.0.1")
    again = only(call, 0.1)
    assert sorted(again.indexes) == [0, 2]
    assert send.is_cut, "what was not written must not be written any more"
    again.sent = 2
    again.outcomes[:] = [FOUND if index == 0 else stored(2) for index in again.indexes]
    call.finish(again, 0.2, JITTER)
    assert not call.is_done
    call.step(0.1 + ANSWER_GRACE_S, JITTER)
    assert not call.is_done, "who waits long waits a little longer for the old master"
    call.step(0.1 + ANSWER_GRACE_MAX_S, JITTER)
    assert call.is_done
    assert (call.results[0], call.results[2]) == (FOUND, stored(2))
    assert type(call.results[1]) is AmbiguousWriteError


def test_direct_attempt_that_takes_long_notices_map_of_meanwhile():
    router = router_of(0)
    send = written(None, router.direct([GET]))
    router.learn(config(2, rev=2), "127.0.0.1")
    call = Call(router, [GET], 0.0, 10.0, direct=send)
    assert only(call, PATIENCE_S).node == NODES[2]


def test_any_named_server_has_map_when_all_known_nodes_are_gone():
    named = [ClusterNode("127.0.0.1", port) for port in (9009, 9008)]
    router = Router(named[0], named[1:])
    router.begin_at(("127.0.0.1", 9008))
    assert router.seed == named[1]
    router.learn(config(0), "127.0.0.1")
    assert {node.kv_port for node in router.nodes().values()} == {*PORTS, 9008, 9009}


def test_first_server_is_not_waited_for_if_it_was_never_there():
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
        assert isinstance(call.results[index], AmbiguousWriteError)
        assert isinstance(call.results[index].cause, OperationTimeoutError)


def test_unwritten_operations_are_repeated_after_a_lost_batch():
    operations = [store_operation(Opcode.SET, b"%d" % n, b"v") for n in range(4)]
    call = Call(router_of(0), operations, 0.0, 10.0)
    send = only(call, 0.0)
    send.sent = 2
    send.outcomes[:] = [STORED, lost(), lost(), lost()]
    call.finish(send, 0.0, JITTER)
    assert isinstance(call.results[1], AmbiguousWriteError)
    assert isinstance(call.results[1].cause, ConnectionLostError)
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
