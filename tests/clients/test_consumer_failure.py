"""Errors in the middle of a read: what came before them is handed out, and positions fit it."""

from __future__ import annotations

import pytest
from test_consumer_core import Session

from clients.consumer.streams import Wanted
from clients.errors import StreamViolationError, TemporaryError
from clients.event import Mutation, SnapshotStart
from clients.position import Position
from dcp.wire.frame import RemoteProtocolError, pack_response
from dcp.wire.message import DELETION_EXTRAS, pack_previous_value
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status


def read_of(session, *frames):
    """Feed several frames at once; return the batch and where another connection would go on."""
    batch = session.core.receive(b"".join(frames), 0)
    (wanted,) = session.core.streams.unfinished().values()
    return batch, wanted.position


@pytest.mark.parametrize("status", [Status.ETMPFAIL, Status.EBUSY, Status.ENOMEM])
def test_what_came_before_error_reply_in_same_read_is_handed_out(status):
    session = Session()
    session.accept()
    session.core.streams.connection.ask_high_seqnos(lambda _seqnos: None)
    (question,) = session.decoder.feed(session.core.take_output())
    batch, position = read_of(
        session, session.marker(0, 5), session.mutation(1), session.mutation(2),
        pack_response(question.opcode, status, opaque=question.opaque), session.mutation(3),
    )  # fmt: skip
    assert isinstance(session.core.failure, TemporaryError)
    assert [type(event) for event in batch.events] == [SnapshotStart, Mutation, Mutation]
    assert position == batch.positions[17]
    assert position.seqno == 2


BREAKING = {
    "outside": lambda s: [s.mutation(6)],
    "previous of a mutation": lambda s: [
        pack_previous_value(17, s.opaque, 9, 1, b"old", 0), s.mutation(3)
    ],
    "previous of a deletion": lambda s: [
        pack_previous_value(17, s.opaque, 9, 1, b"old", 0),
        s.message(Opcode.DCP_DELETION, DELETION_EXTRAS.pack(3, 6, 0), b"\0k"),
    ],
    "cut short": lambda s: [s.message(Opcode.DCP_SEQNO_ADVANCED, b"\0\0")],
    "no frame": lambda _s: [b"HTTP/1.1 400 Bad Request"],
}  # fmt: skip


@pytest.mark.parametrize("what", BREAKING)
def test_positions_match_events_where_a_stream_breaks_rules(what):
    session = Session()
    session.accept()
    frames = BREAKING[what](session)
    batch, position = read_of(session, session.marker(0, 5), session.mutation(2), *frames)
    assert isinstance(session.core.failure, StreamViolationError | RemoteProtocolError)
    assert [type(event) for event in batch.events] == [SnapshotStart, Mutation]
    assert batch.positions[17] == position
    assert position.seqno == 2


def test_a_rollback_that_cannot_be_told_does_not_move_the_place():
    session = Session({17: Wanted(Position(((99, 60), (77, 0)), 100, 100, 100))})
    torn = (55).to_bytes(8, "big") + b"torn"
    request = session.stream_request()
    reply = pack_response(request.opcode, Status.ROLLBACK, opaque=request.opaque, value=torn)
    batch, position = read_of(session, reply)
    assert isinstance(session.core.failure, RemoteProtocolError)
    assert (batch.events, position.seqno) == ([], 100)


def test_of_read_with_key_of_no_collection_nothing_is_handed_out():
    session = Session(collections=(8, 9))
    session.accept()
    keyless = bytearray(session.mutation(2, b"\xff" * 6))
    keyless[55] = 0xFF  # where the id of its collection was
    batch = session.core.receive(session.marker(0, 5) + session.mutation(1) + keyless, 0)
    assert isinstance(session.core.failure, RemoteProtocolError)
    assert (batch.events, batch.positions) == ([], {})
