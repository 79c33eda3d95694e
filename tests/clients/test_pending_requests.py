"""Requests of a DCP connection, and whose each reply is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.errors import InvalidRequestError
from clients.streaming.stream_connection import PendingRequests, ignored
from dcp.wire.frame import FrameDecoder, pack_request, pack_response
from dcp.wire.message import OpenFlag
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status


def frames(data):
    return FrameDecoder().feed(data)


def reply(opaque, status=0):
    (frame,) = frames(pack_response(Opcode.NOOP, status, opaque=opaque))
    return frame


@given(
    count=st.integers(1, 6),
    replied=st.lists(st.integers(1, 8)),
    forgotten=st.sets(st.integers(1, 8)),
)
def test_each_reply_finds_who_asked_once(count, replied, forgotten):
    requests, told = PendingRequests("node"), []
    for number in range(count):
        requests.now_ns = number * 10
        opaque = requests.send(
            lambda opaque: pack_request(Opcode.NOOP, opaque=opaque),
            lambda frame: told.append(frame.opaque),
        )
        assert opaque == number + 1
    assert [frame.opaque for frame in frames(requests.take_output())] == list(range(1, count + 1))
    assert requests.take_output() == b""
    for opaque in forgotten:
        requests.forget(opaque)
    for opaque in replied:
        assert requests.take(reply(opaque))
    asked = set(range(1, count + 1)) - forgotten
    assert told == list(dict.fromkeys(opaque for opaque in replied if opaque in asked))
    left = asked - set(told)
    assert requests.oldest_ns == (min(left) * 10 - 10 if left else None)


def test_what_is_no_reply_is_left_to_the_caller_but_for_a_noop():
    requests = PendingRequests(None)
    (noop, change) = frames(
        pack_request(Opcode.DCP_NOOP, opaque=7) + pack_request(Opcode.DCP_MUTATION, opaque=7)
    )
    assert requests.take(noop)
    (answer,) = frames(requests.take_output())
    assert (answer.opcode, answer.opaque, answer.is_request) == (Opcode.DCP_NOOP, 7, False)
    assert not requests.take(change)
    assert requests.take_output() == b""


def test_connection_opened_otherwise_is_an_error_that_says_so():
    requests = PendingRequests("10.0.0.1:11210")
    requests.open(b"name", OpenFlag.PRODUCER, [(b"enable_noop", b"true")])
    requests.control(b"nice_to_have", b"true", ignored)
    requests.close_stream(17)
    opened, noop, wish, close = frames(requests.take_output())
    assert [f.opcode for f in (opened, noop, wish, close)] == [
        Opcode.DCP_OPEN, Opcode.DCP_CONTROL, Opcode.DCP_CONTROL, Opcode.DCP_CLOSE_STREAM,
    ]  # fmt: skip
    for frame in (wish, close):
        requests.take(reply(frame.opaque, Status.EINVAL))
    requests.take(reply(opened.opaque))
    with pytest.raises(InvalidRequestError, match="enable_noop") as raised:
        requests.take(reply(noop.opaque, Status.EINVAL))
    assert raised.value.node == "10.0.0.1:11210"


def test_opaques_begin_anew_at_their_end_and_are_never_zero():
    requests = PendingRequests(None)
    requests._next_opaque = 0xFFFF_FFFF
    pack = lambda opaque: pack_request(Opcode.NOOP, opaque=opaque)  # noqa: E731
    assert [requests.send(pack, ignored) for _ in range(2)] == [0xFFFF_FFFF, 1]
