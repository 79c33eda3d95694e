"""What memcached's clients expect beside the commands: texts of errors, statistics."""

from __future__ import annotations

import struct

import pytest

from dcp.session.access.rights import EVERYTHING, Rights, Role
from dcp.session.kv import prefix_counts
from dcp.session.kv.prefix_counts import PrefixCounts
from dcp.session.node_facts import Limits
from dcp.session.text import TextSession
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from vbucket.engine.lifecycle import set_state
from vbucket.engine.partition import VbState
from vbucket.model.ids import vbucket_of


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


@pytest.fixture
def peer(node: MemoryNode) -> Peer:
    """A memcached client: it sends neither HELLO nor SELECT_BUCKET."""
    return node.connect(limits=Limits(value_bytes_max=100))


def put(
    peer: Peer, key: bytes, value: bytes = b"v", opcode: int = Opcode.SET, cas: int = 0
) -> Frame:
    return peer.ask(opcode, key=key, value=value, extras=bytes(8), cas=cas)


# -- texts ---------------------------------------------------------------------------------------


def test_errors_have_memcacheds_texts(peer: Peer) -> None:
    put(peer, b"k")
    counter = struct.pack(">QQI", 1, 0, 0)
    asked = [
        peer.ask(Opcode.GET, key=b"none"),
        peer.ask(Opcode.GETK, key=b"none"),
        peer.ask(Opcode.DELETE, key=b"none"),
        put(peer, b"k", opcode=Opcode.ADD),
        put(peer, b"k", cas=5),
        put(peer, b"k", bytes(101)),
        peer.ask(Opcode.GET),
        peer.ask(Opcode.APPEND, key=b"none", value=b"v"),
        peer.ask(Opcode.INCREMENT, key=b"k", extras=counter),
        peer.ask(0x66),
    ]
    assert [frame.value.decode() for frame in asked] == [
        "Not found", "Not found", "Not found", "Data exists for key.", "Data exists for key.",
        "Too large.", "Invalid arguments", "Not stored.",
        "Non-numeric server-side value for incr or decr", "Unknown command",
    ]  # fmt: skip
    assert {frame.datatype for frame in asked} == {0}


def test_couchbase_clients_do_not_get_them(peer: Peer) -> None:
    peer.hello()
    assert peer.ask(Opcode.GET, key=b"none").value == b""
    assert peer.ask(0x66).value == b""
    peer.hello(Feature.XERROR)
    assert peer.ask(0x66).value.startswith(b"{")


# -- counts by key prefix ------------------------------------------------------------------------


def detail(peer: Peer, argument: bytes) -> list[Frame]:
    return peer.send(pack_request(Opcode.STAT, key=b"detail" + argument))


def dumped(peer: Peer) -> str:
    first, last = detail(peer, b" dump")
    assert (first.key, last.key, last.value) == (b"detailed", b"", b"")
    return first.value.decode()


@pytest.mark.parametrize("has_collections", [False, True])
def test_requests_are_counted_by_prefix_while_it_is_on(peer: Peer, has_collections: bool) -> None:
    if has_collections:
        peer.hello(Feature.COLLECTIONS, Feature.MUTATION_SEQNO)
    byte = b"\0" * has_collections
    put(peer, byte + b"foo:1")
    assert dumped(peer) == "END\r\n"
    assert [frame.status for frame in detail(peer, b" on")] == [Status.OK]
    get = pack_request(Opcode.GET, key=byte + b"foo:1")
    peer.send(get * 3)
    peer.ask(Opcode.GETK, key=byte + b"foo:none")
    peer.send(pack_request(Opcode.GETQ, key=byte + b"foo:none"))
    put(peer, byte + b"foo:2")
    put(peer, byte + b"bar:2", opcode=Opcode.ADD)
    put(peer, byte + b"plain")
    peer.ask(Opcode.DELETE, key=byte + b"foo:2")
    assert dumped(peer) == (
        "PREFIX foo get 5 hit 3 set 1 del 1\r\nPREFIX bar get 0 hit 0 set 1 del 0\r\nEND\r\n"
    )
    detail(peer, b" off")
    put(peer, byte + b"bar:3")
    assert "bar get 0 hit 0 set 1" in dumped(peer)
    peer.send(pack_request(Opcode.STAT, key=b"reset"))
    assert dumped(peer) == "END\r\n"


def test_other_words_are_no_statistics(peer: Peer) -> None:
    for argument in (b"", b" none", b" on off"):
        (refused,) = detail(peer, argument)
        assert refused.status == Status.KEY_ENOENT


def test_a_user_needs_the_role_admin(peer: Peer) -> None:
    everything = (EVERYTHING,)
    peer.state.login.logged_in("user", Rights(dict.fromkeys((Role.READ, Role.WRITE), everything)))
    for argument in (b" on", b" dump"):
        (refused,) = detail(peer, argument)
        assert refused.status == Status.EACCESS
    assert not peer.state.shared.prefixes.is_on


def test_text_clients_count_and_read_the_same_table(node: MemoryNode) -> None:
    peer = node.connect()
    text = TextSession(peer.state)

    def say(line: bytes) -> bytes:
        text.receive(line, node.now_ns)
        said = b"".join(peer.state.answers)
        peer.state.answers.clear()
        return said

    assert say(b"stats detail on\r\n") == b"OK\r\n"
    say(b"set foo:1 0 0 1\r\nv\r\nget foo:1 foo:2\r\ndelete foo:1\r\n")
    line = b"PREFIX foo get 2 hit 1 set 1 del 1\r\nEND\r\n"
    assert say(b"stats detail dump\r\n") == line
    assert say(b"stats detail off\r\n") == b"OK\r\n"
    assert say(b"stats detail\r\n").startswith(b"CLIENT_ERROR usage")
    say(b"get foo:1\r\n")
    assert say(b"stats detail dump\r\n") == line


def test_the_table_is_bounded_and_its_lines_are_not_forged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_counts, "PREFIXES_MAX", 2)
    counts = PrefixCounts()
    for key in (b"a:1", b"b\r\nEND\r\n:1", b"b:1", b"c:1", b"a:2"):
        counts.stored(key)
    assert counts.dump() == (
        b"PREFIX a get 0 hit 0 set 2 del 0\r\nPREFIX b get 0 hit 0 set 1 del 0\r\n"
    )


def test_flushes_are_counted(node: MemoryNode, peer: Peer) -> None:
    assert node.engine.flushes == 0
    peer.ask(Opcode.FLUSH)
    peer.send(pack_request(Opcode.FLUSHQ))
    assert node.engine.flushes == 2


def test_a_key_of_another_node_is_refused_with_its_address(node: MemoryNode) -> None:
    """Clients without HELLO know no partitions, and cannot use the map."""
    peer = node.connect()
    vb_id = vbucket_of(b"k", node.partitions)
    assert peer.ask(Opcode.SET, key=b"k", value=b"v", extras=bytes(8)).status == Status.OK
    node.commit()
    set_state(node.engine, vb_id, VbState.REPLICA)
    node.commit()
    told = b"this key is on another node of the cluster: node-of-%d:11210" % vb_id
    for opcode in (Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ, Opcode.DELETE):
        refused = peer.ask(opcode, key=b"k")
        assert (refused.status, refused.value) == (Status.NOT_MY_VBUCKET, told), opcode
    for opcode in (Opcode.SET, Opcode.SETQ, Opcode.ADD, Opcode.REPLACE):
        refused = peer.ask(opcode, key=b"k", value=b"w", extras=bytes(8))
        assert (refused.status, refused.value) == (Status.NOT_MY_VBUCKET, told), opcode
    counter = bytes(16) + b"\xff" * 4
    assert peer.ask(Opcode.INCREMENT, key=b"k", extras=counter).value == told
    peer.hello(Feature.XERROR)
    refused = peer.ask(Opcode.GET, vb_id=vb_id, key=b"k")
    assert refused.value.startswith(b'{"rev"'), "a client of partitions gets the map"
