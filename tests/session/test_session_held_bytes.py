"""What a session keeps of what it received is told exactly, however the network cut it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.session.node_facts import Limits
from dcp.session.session import GATHERED_BYTES_MIN, Session
from dcp.session.text import KEY_BYTES, TextSession
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from support.memory_node import MemoryNode, Peer

LARGE = 3 * GATHERED_BYTES_MIN


def stored(key: bytes, size: int) -> bytes:
    return pack_request(Opcode.SET, key=key, value=bytes(size), extras=bytes(8))


def kept_by(session: Session | TextSession) -> int:
    if isinstance(session, TextSession):
        keys = 0 if session._read is None else KEY_BYTES * len(session._read.keys)
        return len(session._buffer) + keys
    return len(session.state.buffer) + len(session._gathered)


@pytest.fixture
def peer() -> Peer:
    return MemoryNode().connect()


def test_an_incomplete_packet_is_held_until_it_is_complete(peer: Peer) -> None:
    packet = stored(b"k", LARGE)
    for cut in (1, 23, 24, 100, GATHERED_BYTES_MIN, LARGE, len(packet) - 1):
        begun = peer.state.taken_bytes
        peer.send(packet[:cut])
        assert peer.state.held_bytes == kept_by(peer.session) == cut
        assert peer.state.taken_bytes == begun
        peer.send(packet[cut:])
        assert peer.state.held_bytes == kept_by(peer.session) == 0
        assert peer.state.taken_bytes == begun + len(packet)


@given(st.lists(st.integers(0, LARGE), max_size=6), st.lists(st.integers(1, 50_000), min_size=1))
def test_at_any_cut_all_that_came_is_taken_or_held(sizes: list[int], cuts: list[int]) -> None:
    peer = MemoryNode().connect()
    data = b"".join(stored(b"%d" % at, size) for at, size in enumerate(sizes)) + bytes([0x80]) * 9
    at = turn = 0
    while at < len(data):
        end = min(len(data), at + cuts[turn % len(cuts)])
        peer.send(data[at:end])
        at, turn = end, turn + 1
        assert peer.state.held_bytes == kept_by(peer.session)
        assert peer.state.taken_bytes + peer.state.held_bytes == at
    assert peer.state.held_bytes == 9


def test_commands_whose_answers_are_unread_are_held(peer: Peer) -> None:
    peer.send(stored(b"k", 3 << 20))
    gets = pack_request(Opcode.GET, key=b"k") * 5
    peer.session.receive(gets, peer.node.now_ns)
    assert peer.state.is_full
    assert peer.state.held_bytes == kept_by(peer.session) == len(gets) * 3 // 5
    peer.state.answers.clear()
    peer.session.resume(peer.node.now_ns)
    assert peer.state.held_bytes == kept_by(peer.session) == len(gets) // 5


def test_what_waits_for_a_delay_is_held(peer: Peer) -> None:
    peer.state.pause.until_ns = peer.node.now_ns + 1
    peer.session.receive(pack_request(Opcode.NOOP), peer.node.now_ns)
    assert peer.state.held_bytes == kept_by(peer.session) == 24


def test_nothing_is_held_once_the_connection_is_gone(peer: Peer) -> None:
    for part in (stored(b"k", LARGE)[:-1], pack_request(Opcode.NOOP)[:10]):
        peer.send(part)
        assert peer.state.held_bytes == len(part)
        peer.session.drop_received()
        assert peer.state.held_bytes == kept_by(peer.session) == 0


# -- text ------------------------------------------------------------------------------------------


def text_session() -> TextSession:
    return TextSession(MemoryNode().connect(limits=Limits()).state)


@given(st.lists(st.integers(1, 700), min_size=1))
def test_text_holds_what_it_has_not_taken(cuts: list[int]) -> None:
    session = text_session()
    data = b"set a 0 0 2000\r\n" + bytes(2000) + b"\r\nget a\r\nget " + b"b" * 100
    at = turn = 0
    while at < len(data):
        end = min(len(data), at + cuts[turn % len(cuts)])
        session.receive(data[at:end], 1)
        at, turn = end, turn + 1
        assert session.state.held_bytes == kept_by(session)
        assert session.state.taken_bytes + session.state.held_bytes == at
    assert session.state.held_bytes == 104
    session.drop_received()
    assert session.state.held_bytes == kept_by(session) == 0


def test_text_counts_the_keys_of_a_get_that_goes_on_later() -> None:
    session = text_session()
    session.receive(b"set a 0 0 %d\r\n" % (3 << 20) + bytes(3 << 20) + b"\r\n", 1)
    session.receive(b"get" + b" a" * 10 + b"\r\n", 1)
    assert session.state.is_full
    assert session.state.held_bytes == kept_by(session) == 8 * KEY_BYTES
