"""The consumer's core when a node refuses for a while: pauses, and the wish for a newer map."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from test_consumer_core import Session, high_seqnos

from clients.consumer.streams import MAP_AFTER_NS, RETRY_FIRST_NS, Wanted
from clients.errors import InvalidRequestError
from dcp.wire.frame import pack_response
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status


def refused_until(session, pause_ns):
    """Refuse the stream again and again, until it has this pause; return the number of refusals."""
    now_ns, refusals = 0, 0
    request = session.stream_request()
    while True:
        refusals += 1
        refusal = pack_response(request.opcode, Status.ETMPFAIL, opaque=request.opaque)
        session.feed(refusal, now_ns)
        if session.core.streams.connection.next_due_ns - now_ns >= pause_ns:
            return refusals
        now_ns = session.core.streams.connection.next_due_ns
        session.core.tick(now_ns)
        (request,) = session.decoder.feed(session.core.take_output())


def test_node_that_refuses_for_long_makes_core_want_newer_map():
    session = Session()
    assert refused_until(session, MAP_AFTER_NS // 2) == 4
    assert not session.core.streams.wants_map, "a few refusals are everyday life"
    session = Session()
    assert refused_until(session, MAP_AFTER_NS) == 5
    assert session.core.streams.wants_map
    session.core.streams.wants_map = False
    session.core.tick(session.core.streams.connection.next_due_ns)
    (again,) = session.decoder.feed(session.core.take_output())
    assert not session.core.streams.wants_map
    session.reply(again, Status.ETMPFAIL)
    assert session.core.streams.wants_map, "each later refusal asks again, at its own pace"


@pytest.mark.parametrize(("drawn", "share"), [(0.0, 1.0), (0.5, 0.75), (0.999, 0.5005)])
def test_randomness_cuts_the_pauses_by_up_to_half(drawn, share):
    session = Session(draws=SimpleNamespace(random=lambda: drawn))
    session.reply(session.stream_request(), Status.ETMPFAIL)
    assert session.core.streams.connection.next_due_ns == pytest.approx(
        RETRY_FIRST_NS * share, rel=1e-6
    )


def test_active_partitions_are_asked_and_a_busy_node_later():
    """A replica that hears no master must not make the node refuse the question."""
    session = Session({17: Wanted(None)})
    ask = session.open_requests[-1]
    assert (ask.opcode, ask.extras) == (Opcode.GET_ALL_VB_SEQNOS, (1).to_bytes(4, "big"))
    assert session.reply(ask, Status.ETMPFAIL) == []
    assert session.core.streams.connection.next_due_ns == RETRY_FIRST_NS
    session.core.tick(RETRY_FIRST_NS)
    (again,) = session.decoder.feed(session.core.take_output())
    session.reply(again, value=high_seqnos(v17=6))
    assert [frame.opcode for frame in session.sent] == [Opcode.DCP_GET_FAILOVER_LOG]
    session.core.streams.connection.ask_high_seqnos(lambda _: None)
    (question,) = session.decoder.feed(session.core.take_output())
    with pytest.raises(InvalidRequestError):
        session.reply(question, Status.EINVAL)
