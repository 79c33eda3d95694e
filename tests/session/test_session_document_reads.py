"""GET_REPLICA and GET_RANDOM_KEY over the bytes of real sessions."""

from __future__ import annotations

import pytest

from dcp.session.kv import reads as document_reads
from dcp.wire.feature import Feature
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from vbucket.engine.lifecycle import set_state
from vbucket.engine.partition import VbState
from vbucket.model.ids import DEFAULT_COLLECTION_PREFIX
from vbucket.model.manifest import INITIAL_MANIFEST

KEY = b"\0k"
VB = 3


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


@pytest.fixture
def peer(node: MemoryNode) -> Peer:
    peer = node.connect()
    peer.hello(Feature.COLLECTIONS, Feature.XERROR, Feature.JSON)
    return peer


def test_a_replica_answers_get_replica_and_nothing_else(node: MemoryNode, peer: Peer) -> None:
    cas = peer.set(VB, KEY, b"v").cas
    assert peer.ask(Opcode.GET_REPLICA, vb_id=VB, key=KEY).status == Status.NOT_MY_VBUCKET
    node.commit()
    set_state(node.engine, VB, VbState.REPLICA)
    found = peer.ask(Opcode.GET_REPLICA, vb_id=VB, key=KEY)
    assert (found.status, found.value, found.cas, found.extras) == (0, b"v", cas, bytes(4))
    assert peer.ask(Opcode.GET_REPLICA, vb_id=VB, key=b"\0x").status == Status.KEY_ENOENT
    assert peer.ask(Opcode.GET, vb_id=VB, key=KEY).status == Status.NOT_MY_VBUCKET
    assert peer.ask(Opcode.GET_REPLICA, vb_id=VB, key=b"").status == Status.EINVAL


def test_replica_hides_deleted_and_due_documents(node: MemoryNode, peer: Peer) -> None:
    peer.set(VB, KEY, b"v")
    peer.delete(VB, KEY)
    extras = bytes(7) + b"\x05"
    peer.ask(Opcode.SET, vb_id=VB, key=b"\0due", value=b"v", extras=extras)
    node.merge()
    set_state(node.engine, VB, VbState.REPLICA)
    high_seqno = node.engine.partitions[VB].high_seqno
    assert peer.ask(Opcode.GET_REPLICA, vb_id=VB, key=b"\0due").status == Status.OK
    node.now_ns += 5_000_000_000
    for key in (KEY, b"\0due"):
        assert peer.ask(Opcode.GET_REPLICA, vb_id=VB, key=key).status == Status.KEY_ENOENT
    assert node.engine.partitions[VB].high_seqno == high_seqno


@pytest.mark.parametrize("is_merged", [False, True], ids=["in the log", "in the store"])
def test_a_replica_shows_what_is_committed_and_waits_for_nothing(
    node: MemoryNode, peer: Peer, *, is_merged: bool
) -> None:
    """The uncommitted ones may be lost: a new version, a deletion, a new document."""
    for value in (b"1", b"2"):
        peer.set(VB, KEY, value)
    peer.set(VB, b"\0gone", b"here")
    if is_merged:
        node.merge()
    peer.set(VB, KEY, b"3")
    peer.delete(VB, b"\0gone")
    peer.set(VB, b"\0new", b"v")
    node.commit()
    set_state(node.engine, VB, VbState.REPLICA)
    node.commit()
    part = node.engine.partitions[VB]

    def found(key: bytes) -> bytes | None:
        answer = peer.ask(Opcode.GET_REPLICA, vb_id=VB, key=key)
        return answer.value if answer.status == Status.OK else None

    seen = {}
    for committed in range(3 if is_merged else 0, 7):
        part.committed_seqno = committed
        seen[committed] = found(KEY), found(b"\0gone"), found(b"\0new")
    expected = {
        0: (None, None, None),
        1: (b"1", None, None),
        2: (b"2", None, None),
        3: (b"2", b"here", None),
        4: (b"3", b"here", None),
        5: (b"3", None, None),
        6: (b"3", None, b"v"),
    }
    assert seen == {committed: expected[committed] for committed in seen}


def test_replica_that_does_not_have_change_sends_its_reader_away(
    node: MemoryNode, peer: Peer
) -> None:
    for value in (b"1", b"2"):
        peer.set(VB, KEY, value)
    node.commit()
    set_state(node.engine, VB, VbState.REPLICA)
    part = node.engine.partitions[VB]

    def status(vb_uuid: int, seqno: int) -> int:
        token = vb_uuid.to_bytes(8, "big") + seqno.to_bytes(8, "big")
        return peer.ask(Opcode.GET_REPLICA, vb_id=VB, key=KEY, extras=token).status

    assert [status(part.vb_uuid, seqno) for seqno in (1, 2, 3)] == [0, 0, Status.ETMPFAIL]
    part.committed_seqno = 1
    assert status(part.vb_uuid, 2) == Status.ETMPFAIL
    assert status(part.vb_uuid + 1, 1) == Status.ETMPFAIL, "of a history that it does not know"
    part.committed_seqno = 2
    older = part.vb_uuid
    node.engine.keyspace.branch(VB, 1)
    node.commit()
    assert [status(older, seqno) for seqno in (1, 2)] == [0, Status.ETMPFAIL], "it was undone"
    assert peer.ask(Opcode.GET_REPLICA, vb_id=VB, key=KEY, extras=bytes(8)).status == Status.EINVAL


def random_key(peer: Peer, extras: bytes = b"") -> tuple[int, bytes, bytes]:
    found = peer.ask(Opcode.GET_RANDOM_KEY, extras=extras)
    return found.status, found.key, found.value


def test_random_keys_are_different_documents_with_their_values(
    node: MemoryNode, peer: Peer
) -> None:
    assert random_key(peer)[0] == Status.KEY_ENOENT
    documents = {b"\0key-%d" % number: b"value-%d" % number for number in range(60)}
    for number, (key, value) in enumerate(documents.items()):
        peer.set(number % 2, key, value)
        if number == 30:
            node.merge()
    drawn = {random_key(peer) for _ in range(200)}
    assert all(status == Status.OK and documents[key] == value for status, key, value in drawn)
    assert len(drawn) > 15


def test_clients_without_collections_get_keys_without_prefix(node: MemoryNode) -> None:
    peer = node.connect()
    peer.hello(Feature.XERROR)
    peer.set(VB, b"k", b"v")
    assert random_key(peer) == (Status.OK, b"k", b"v")
    assert random_key(peer, bytes(4))[0] == Status.EINVAL
    assert peer.ask(Opcode.GET_RANDOM_KEY, extras=b"1").status == Status.EINVAL


def test_a_random_key_is_of_the_collection_that_was_asked_for(node: MemoryNode, peer: Peer) -> None:
    manifest = INITIAL_MANIFEST.create_scope("s").create_collection("s", "c")
    node.engine.keyspace.set_manifest(manifest)
    collection_id = max(manifest.collections)
    peer.set(VB, KEY, b"default")
    assert random_key(peer, collection_id.to_bytes(4, "big"))[0] == Status.KEY_ENOENT
    peer.set(VB, bytes([collection_id]) + b"k", b"other")
    found = random_key(peer, collection_id.to_bytes(4, "big"))
    assert found == (Status.OK, bytes([collection_id]) + b"k", b"other")
    assert {random_key(peer) for _ in range(20)} == {(Status.OK, KEY, b"default")}
    assert random_key(peer, b"\0\0\0\x63")[0] == Status.UNKNOWN_COLLECTION


def test_a_search_among_deletions_ends(
    node: MemoryNode, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_reads, "WALK_KEYS", 4)
    monkeypatch.setattr(document_reads, "WALK_KEYS_MAX", 8)
    for number in range(40):
        peer.set(VB, DEFAULT_COLLECTION_PREFIX + b"%d" % number, b"v")
    for number in range(39):
        peer.delete(VB, DEFAULT_COLLECTION_PREFIX + b"%d" % number)
    refused = peer.ask(Opcode.GET_RANDOM_KEY)
    assert refused.status == Status.ETMPFAIL
    assert b"no document among 8 keys" in refused.value
