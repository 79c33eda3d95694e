"""Commands about collections, and keys in them."""

from __future__ import annotations

import json

import pytest

from dcp.session.access.rights import EVERYTHING, Rights, Role, Scope
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame
from dcp.wire.message import U32, VB_SEQNO
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import START_NS, MemoryNode, Peer
from vbucket.model.manifest import INITIAL_MANIFEST
from vbucket.store.key_record import StoredMeta

VB = 7
NOW_S = START_NS // 1_000_000_000
ANSWER = "{:016x}{:08x}"


@pytest.fixture
def node() -> MemoryNode:
    """Collections inventory.hotel (8, at most an hour) and _default.note (9)."""
    node = MemoryNode()
    manifest = node.engine.keyspace.manifest.create_scope("inventory")
    manifest = manifest.create_collection("inventory", "hotel", 3600)
    node.engine.keyspace.set_manifest(manifest.create_collection("_default", "note"))
    node.commit()
    return node


@pytest.fixture
def peer(node: MemoryNode) -> Peer:
    peer = node.connect()
    peer.hello(Feature.COLLECTIONS, Feature.XERROR)
    return peer


def drop(node: MemoryNode, scope: str, name: str) -> None:
    node.engine.keyspace.set_manifest(node.engine.keyspace.manifest.drop_collection(scope, name))


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize(
    ("path", "status", "answer"),
    [
        (b"inventory.hotel", Status.OK, ANSWER.format(3, 8)),
        (b"_default.note", Status.OK, ANSWER.format(3, 9)),
        (b".note", Status.OK, ANSWER.format(3, 9)),
        (b"_default._default", Status.OK, ANSWER.format(3, 0)),
        (b"inventory.", Status.UNKNOWN_COLLECTION, ""),
        (b"inventory.note", Status.UNKNOWN_COLLECTION, ""),
        (b"nowhere.hotel", Status.UNKNOWN_SCOPE, ""),
        (b"hotel", Status.EINVAL, ""),
        (b"a.b.c", Status.EINVAL, ""),
        (b"a." + b"x" * 600, Status.EINVAL, ""),
    ],
)
def test_ids_of_collections(
    peer: Peer, where: str, path: bytes, status: Status, answer: str
) -> None:
    frame = peer.ask(Opcode.GET_COLLECTION_ID, **{where: path})
    assert (frame.status, frame.extras.hex()) == (status, answer)
    if status in {Status.UNKNOWN_COLLECTION, Status.UNKNOWN_SCOPE}:
        assert json.loads(frame.value) == {"manifest_uid": "3"}


@pytest.mark.parametrize(
    ("path", "status", "answer"),
    [
        (b"inventory", Status.OK, ANSWER.format(3, 8)),
        (b"inventory.anything", Status.OK, ANSWER.format(3, 8)),
        (b"_default", Status.OK, ANSWER.format(3, 0)),
        (b"nowhere", Status.UNKNOWN_SCOPE, ""),
        (b"a.b.c", Status.EINVAL, ""),
    ],
)
def test_ids_of_scopes(peer: Peer, path: bytes, status: Status, answer: str) -> None:
    frame = peer.ask(Opcode.GET_SCOPE_ID, key=path)
    assert (frame.status, frame.extras.hex()) == (status, answer)


def test_answers_wait_until_the_manifest_they_tell_is_committed(
    node: MemoryNode, peer: Peer
) -> None:
    for ask in (
        lambda: peer.ask(Opcode.GET_COLLECTIONS_MANIFEST),
        lambda: peer.ask(Opcode.GET_COLLECTION_ID, key=b"inventory.hotel"),
        lambda: peer.ask(Opcode.GET_SCOPE_ID, key=b"nowhere"),
        lambda: peer.ask(Opcode.GET_ALL_VB_SEQNOS, extras=U32.pack(1) + U32.pack(8)),
        lambda: peer.set(VB, b"\x09k", b"v"),
    ):
        ask()
        node.commit()
        assert not peer.must_wait
    drop(node, "_default", "note")
    frame = peer.set(VB, b"\x09k", b"v")
    assert frame.status == Status.UNKNOWN_COLLECTION
    assert json.loads(frame.value) == {"manifest_uid": "4"}
    assert peer.must_wait, "a crash could bring the collection back"
    node.commit()
    assert not peer.must_wait


# -- the manifest as a whole -----------------------------------------------------------------------


def manifest_of(peer: Peer) -> dict:
    return json.loads(peer.ask(Opcode.GET_COLLECTIONS_MANIFEST).value)


def set_manifest(peer: Peer, document: object) -> Frame:
    return peer.ask(Opcode.SET_COLLECTIONS_MANIFEST, value=json.dumps(document).encode())


def test_a_manifest_is_taken_over_and_told_to_every_partition(node: MemoryNode, peer: Peer) -> None:
    document = manifest_of(peer)
    document["uid"] = "20"
    document["scopes"].append(
        {"name": "s", "uid": "1f", "collections": [{"name": "c", "uid": "1ff"}]}
    )
    assert set_manifest(peer, document).status == Status.OK
    assert peer.must_wait
    node.commit()
    assert manifest_of(peer) == document
    assert {part.high_seqno for part in node.engine.partitions} == {5}
    assert set_manifest(peer, document).status == Status.OK, "the same again changes nothing"
    assert node.engine.keyspace.take_group() is None
    node.crash()
    assert node.engine.keyspace.manifest.json() == document
    assert node.engine.keyspace.manifest.next_collection_id == 0x200


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (b"", Status.EINVAL),
        (b"[]", Status.EINVAL),
        (b"{}", Status.EINVAL),
        (b"\xff", Status.EINVAL),
        (b'{"uid":"9","scopes":[]}', Status.CANNOT_APPLY_COLLECTIONS_MANIFEST),
        (
            json.dumps(INITIAL_MANIFEST.json() | {"uid": "1"}).encode(),
            Status.CANNOT_APPLY_COLLECTIONS_MANIFEST,
        ),
    ],
)
def test_manifests_that_are_refused(
    node: MemoryNode, peer: Peer, value: bytes, status: Status
) -> None:
    before = node.engine.keyspace.manifest
    frame = peer.ask(Opcode.SET_COLLECTIONS_MANIFEST, value=value)
    assert frame.status == status
    assert json.loads(frame.value)["error"]["context"]
    assert node.engine.keyspace.manifest == before


# -- documents -------------------------------------------------------------------------------------


def test_the_same_key_in_two_collections_is_two_documents(node: MemoryNode, peer: Peer) -> None:
    for key, value in ((b"\0k", b"0"), (b"\x08k", b"8"), (b"\x09k", b"9")):
        assert peer.set(VB, key, value).status == Status.OK
    assert [peer.ask(Opcode.GET, vb_id=VB, key=k + b"k").value for k in (b"\0", b"\x08")] == [
        b"0",
        b"8",
    ]
    assert peer.delete(VB, b"\x08k").status == Status.OK
    assert peer.ask(Opcode.GET, vb_id=VB, key=b"\x08k").status == Status.KEY_ENOENT
    found = peer.ask(Opcode.GETK, vb_id=VB, key=b"\x09k")
    assert (found.key, found.value) == (b"\x09k", b"9")
    legacy = node.connect()
    legacy.hello()
    assert legacy.ask(Opcode.GET, vb_id=VB, key=b"k").value == b"0"


@pytest.mark.parametrize("key", [b"\x80\x00k", b"\x89\x00k", b"\xff" * 5 + b"\x01k", b"\x80"])
def test_ids_that_are_not_canonical_are_invalid(peer: Peer, key: bytes) -> None:
    for frame in (
        peer.set(VB, key, b"v"),
        peer.delete(VB, key),
        peer.ask(Opcode.GET, vb_id=VB, key=key),
    ):
        assert frame.status == Status.EINVAL


@pytest.mark.parametrize("key", [b"\x08", b"\0"])
def test_an_id_alone_is_no_key(peer: Peer, key: bytes) -> None:
    assert peer.set(VB, key, b"v").status == Status.EINVAL
    assert peer.ask(Opcode.GET, vb_id=VB, key=key).status == Status.EINVAL


@pytest.mark.parametrize("key", [b"\x01k", b"\x01\0\0\0\0\x08\0\0\0\x08hotel", b"\x07k"])
def test_reserved_collections_are_unknown(node: MemoryNode, peer: Peer, key: bytes) -> None:
    assert peer.set(VB, key, b"v").status == Status.UNKNOWN_COLLECTION
    assert peer.ask(Opcode.GET, vb_id=VB, key=key).status == Status.UNKNOWN_COLLECTION


def test_documents_of_a_dropped_collection_are_gone_at_once(node: MemoryNode, peer: Peer) -> None:
    peer.set(VB, b"\x09k", b"v")
    peer.set(VB, b"\0k", b"v")
    part = node.engine.partitions[VB]
    assert part.item_count == 2
    drop(node, "_default", "note")
    assert part.item_count == 1
    for opcode in (Opcode.GET, Opcode.DELETE, Opcode.GET_META):
        frame = peer.ask(opcode, vb_id=VB, key=b"\x09k")
        assert frame.status == Status.UNKNOWN_COLLECTION
    node.merge()
    assert part.item_count == 1
    node.crash()
    assert node.engine.partitions[VB].item_count == 1


def test_a_flush_leaves_what_is_unreachable_alone(node: MemoryNode, peer: Peer) -> None:
    for key in (b"\x08k", b"\x09k", b"\0k"):
        peer.set(VB, key, b"v")
    drop(node, "_default", "note")
    part = node.engine.partitions[VB]
    before = part.high_seqno
    assert peer.ask(Opcode.FLUSH).status == Status.OK
    assert part.item_count == 0
    assert part.high_seqno == before + 2


# -- time to live ----------------------------------------------------------------------------------


def expiry_of(node: MemoryNode, key: bytes) -> int:
    meta = node.engine.meta(VB, key)
    assert isinstance(meta, StoredMeta)
    return meta.expiry


@pytest.mark.parametrize(
    ("key", "asked", "expected"),
    [
        (b"\x08k", 0, NOW_S + 3600),
        (b"\x08k", 60, NOW_S + 60),
        (b"\x08k", 3600, NOW_S + 3600),
        (b"\x08k", 3601, NOW_S + 3600),
        (b"\x08k", NOW_S + 99, NOW_S + 99),
        (b"\x08k", NOW_S + 9999, NOW_S + 3600),
        (b"\x09k", 0, 0),
        (b"\x09k", 9999, NOW_S + 9999),
        (b"\0k", 0, 0),
    ],
)
def test_documents_live_no_longer_than_their_collection_allows(
    node: MemoryNode, peer: Peer, key: bytes, asked: int, expected: int
) -> None:
    extras = U32.pack(5) + U32.pack(asked)
    stored = peer.ask(Opcode.SET, vb_id=VB, key=key, value=b"v", extras=extras)
    assert stored.status == Status.OK
    assert expiry_of(node, key) == expected
    found = peer.ask(Opcode.GET, vb_id=VB, key=key)
    assert (found.extras, found.value) == (U32.pack(5), b"v")
    peer.ask(Opcode.TOUCH, vb_id=VB, key=key, extras=U32.pack(asked))
    assert expiry_of(node, key) == expected


def test_counters_too(node: MemoryNode, peer: Peer) -> None:
    extras = bytes(8) + (5).to_bytes(8, "big") + bytes(4)
    assert peer.ask(Opcode.INCREMENT, vb_id=VB, key=b"\x08n", extras=extras).status == Status.OK
    assert expiry_of(node, b"\x08n") == NOW_S + 3600


# -- seqnos ----------------------------------------------------------------------------------------


def seqno(peer: Peer, *extras: int) -> int:
    frame = peer.ask(Opcode.GET_ALL_VB_SEQNOS, extras=b"".join(map(U32.pack, extras)))
    assert frame.status == Status.OK
    return dict(VB_SEQNO.iter_unpack(frame.value))[VB]


def test_high_seqnos_by_collection(node: MemoryNode, peer: Peer) -> None:
    """Seqnos 1 to 3 are the collections' beginnings."""
    for key in (b"\0k", b"\x08k", b"\x09k", b"\x08k"):
        peer.set(VB, key, b"v")
    node.commit()
    legacy = node.connect()
    legacy.hello()
    assert [seqno(peer, 1, collection_id) for collection_id in (0, 8, 9)] == [4, 7, 6]
    assert seqno(peer) == seqno(peer, 1) == 7
    assert seqno(legacy) == 4, "all that it will ever be shown"
    peer.set(VB, b"\0k", b"v")
    node.commit()
    assert (seqno(peer, 1, 0), seqno(legacy)) == (8, 8)
    unknown = peer.ask(Opcode.GET_ALL_VB_SEQNOS, extras=U32.pack(1) + U32.pack(12))
    assert unknown.status == Status.UNKNOWN_COLLECTION


# -- rights ----------------------------------------------------------------------------------------


def test_rights_for_one_collection(node: MemoryNode, peer: Peer) -> None:
    peer.state.login.user = "ada"
    hotels = Scope(b"", "inventory.hotel")
    peer.state.login.rights = Rights({Role.WRITE: (hotels,), Role.READ: (EVERYTHING,)})
    assert peer.set(VB, b"\x08k", b"v").status == Status.OK
    assert peer.set(VB, b"\x09k", b"v").status == Status.EACCESS
    assert peer.set(VB, b"\0k", b"v").status == Status.EACCESS
    assert set_manifest(peer, {}).status == Status.EACCESS
