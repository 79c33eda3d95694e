"""Range scans over the bytes of real sessions."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pytest
from cramjam import snappy

from dcp.session.access.rights import EVERYTHING, Rights, Role, Scope
from dcp.session.kv.scans import BOUND_BYTES_MAX, CONTINUE_EXTRAS, DOCUMENT_META
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from support.subdoc_client import XATTR, aware_peer, mutate
from vbucket.engine.lifecycle import put_state
from vbucket.engine.partition import VbState
from vbucket.model.manifest import decode_leb128
from vbucket.store.records import BY_SEQNO_TABLE

VB = 5
ALL = (b"", b"\xff")


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


@pytest.fixture
def peer(node: MemoryNode) -> Peer:
    return connect(node)


def connect(node: MemoryNode) -> Peer:
    peer = node.connect()
    peer.hello(Feature.JSON, Feature.XERROR, Feature.COLLECTIONS)
    return peer


def put(peer: Peer, *keys: bytes, expiry: int = 0, collection: bytes = b"\0") -> None:
    for key in keys:
        extras = b"\0\0\0\7" + expiry.to_bytes(4, "big")
        answer = peer.ask(
            Opcode.SET, vb_id=VB, key=collection + key, value=b"v:" + key, extras=extras
        )
        assert answer.status == Status.OK


def create(peer: Peer, *bounds: bytes, vb_id: int = VB, **asked: Any) -> Frame:
    if bounds:
        names = asked.pop("names", ("start", "end"))
        asked["range"] = dict(zip(names, (b64encode(key).decode() for key in bounds), strict=True))
    value = json.dumps(asked).encode()
    return peer.ask(Opcode.RANGE_SCAN_CREATE, vb_id=vb_id, value=value, datatype=1)


def created(peer: Peer, *bounds: bytes, **asked: Any) -> bytes:
    answer = create(peer, *bounds, **asked)
    assert answer.status == Status.OK, answer
    assert len(answer.value) == 16
    return answer.value


def go_on(peer: Peer, scan_id: bytes, *limits: int, vb_id: int = VB) -> Frame:
    extras = CONTINUE_EXTRAS.pack(scan_id, *(limits or (0, 0, 0)))
    return peer.ask(Opcode.RANGE_SCAN_CONTINUE, vb_id=vb_id, extras=extras)


def cut(data: bytes) -> tuple[bytes, bytes]:
    decoded = decode_leb128(data)
    assert decoded is not None
    length, at = decoded
    return data[at : at + length], data[at + length :]


def documents_of(answer: Frame) -> list[tuple[bytes, bytes, tuple[int, ...]]]:
    """Return key, value, (flags, expiry, seqno, CAS, datatype) of each document."""
    assert answer.extras == b"\0\0\0\1"
    found, data = [], answer.value
    while data:
        meta = DOCUMENT_META.unpack_from(data)
        key, data = cut(data[DOCUMENT_META.size :])
        value, data = cut(data)
        found.append((key, value, meta))
    return found


def keys_of(answer: Frame) -> list[bytes]:
    if answer.extras != bytes(4):
        return [key for key, _, _ in documents_of(answer)]
    found, data = [], answer.value
    while data:
        key, data = cut(data)
        found.append(key)
    return found


def all_keys(peer: Peer, scan_id: bytes, *limits: int) -> list[bytes]:
    keys: list[bytes] = []
    for _ in range(1000):
        answer = go_on(peer, scan_id, *limits)
        keys += keys_of(answer)
        if answer.status == Status.RANGE_SCAN_COMPLETE:
            return keys
        assert answer.status == Status.RANGE_SCAN_MORE
    raise AssertionError("the scan never ends")


@pytest.mark.parametrize("layers", ["memory", "store", "both"])
def test_a_scan_answers_documents_as_of_when_it_was_made(
    node: MemoryNode, peer: Peer, layers: str
) -> None:
    put(peer, b"b", b"a", b"c", b"gone")
    if layers != "memory":
        node.merge()
    if layers == "both":
        put(peer, b"b", b"d")
    peer.ask(Opcode.DELETE, vb_id=VB, key=b"\0gone")
    node.commit()
    scan_id = created(peer, *ALL)
    assert not peer.must_wait
    put(peer, b"a", b"new")
    peer.ask(Opcode.DELETE, vb_id=VB, key=b"\0c")
    if layers != "memory":
        node.merge()
    answer = go_on(peer, scan_id)
    assert answer.status == Status.RANGE_SCAN_COMPLETE
    found = documents_of(answer)
    wanted = [b"a", b"b", b"c", b"d"] if layers == "both" else [b"a", b"b", b"c"]
    assert [(key, value) for key, value, _ in found] == [(key, b"v:" + key) for key in wanted]
    assert found[0][2][:3] == (7, 0, 2)
    assert all(meta[3] for _, _, meta in found)
    assert go_on(peer, scan_id).status == Status.KEY_ENOENT
    assert len(node.scans) == len(node.views) == 0


def test_the_answer_waits_until_what_is_shown_is_committed(node: MemoryNode, peer: Peer) -> None:
    put(peer, b"a")
    node.commit()
    other = connect(node)
    put(other, b"b")
    created(peer, *ALL)
    assert peer.must_wait
    node.commit()
    assert not peer.must_wait


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (("start", "end"), [b"b", b"ba", b"c", b"d"]),
        (("excl_start", "end"), [b"ba", b"c", b"d"]),
        (("start", "excl_end"), [b"b", b"ba", b"c"]),
        (("excl_start", "excl_end"), [b"ba", b"c"]),
    ],
)
def test_ends_are_in_or_out(peer: Peer, names: tuple[str, str], wanted: list[bytes]) -> None:
    put(peer, b"a", b"b", b"ba", b"c", b"d", b"e")
    scan_id = created(peer, b"b", b"d", names=names, key_only=True)
    assert all_keys(peer, scan_id) == wanted


def test_limits_of_documents_and_bytes_cut_the_answers(peer: Peer) -> None:
    keys = [b"key%03d" % number for number in range(100)]
    put(peer, *keys)
    assert all_keys(peer, created(peer, *ALL), 7, 0, 0) == keys
    scan_id = created(peer, *ALL)
    answer = go_on(peer, scan_id, 0, 0, 1)
    assert (answer.status, keys_of(answer)) == (Status.RANGE_SCAN_MORE, keys[:1])
    answer = go_on(peer, scan_id, 0, 0, 60)  # a document is 7 bytes of key and 8 of value
    assert keys_of(answer) == keys[1:5]
    assert all_keys(peer, scan_id, 10, 50, 10_000) == keys[5:]


def test_one_request_does_a_bounded_amount_of_work(peer: Peer, node: MemoryNode) -> None:
    keys = [b"key%04d" % number for number in range(2000)]
    put(peer, *keys)
    node.merge()
    scan_id = created(peer, *ALL, key_only=True)
    assert 0 < len(keys_of(go_on(peer, scan_id))) <= 400
    assert len(all_keys(peer, scan_id)) > 1500


def test_a_scan_of_nothing_is_not_made(peer: Peer, node: MemoryNode) -> None:
    assert create(peer, *ALL).status == Status.KEY_ENOENT
    assert not peer.state.notes.lines, "an empty range is no refusal"
    put(peer, b"k")
    assert create(peer, b"a", b"c").status == Status.KEY_ENOENT
    peer.ask(Opcode.DELETE, vb_id=VB, key=b"\0k")
    assert create(peer, *ALL).status == Status.KEY_ENOENT
    assert create(peer, sampling={"samples": 3}).status == Status.KEY_ENOENT
    assert len(node.scans) == len(node.views) == 0


def test_documents_are_shown_without_xattrs(peer: Peer, node: MemoryNode) -> None:
    put(peer, b"a")
    other = aware_peer(node, Feature.COLLECTIONS)
    xattr = (Opcode.SUBDOC_DICT_UPSERT, XATTR, b"x", b"1")
    assert mutate(other, b"\0a", xattr, vb_id=VB).status == Status.OK
    ((key, value, meta),) = documents_of(go_on(peer, created(peer, b"a", b"z")))
    assert (key, value, meta[-1]) == (b"a", b"v:a", 0)


def test_documents_whose_time_is_over_are_left_out(peer: Peer, node: MemoryNode) -> None:
    put(peer, b"due", expiry=5)
    put(peer, b"later", expiry=50)
    node.now_ns += 10 * 10**9
    answer = go_on(peer, created(peer, *ALL))
    assert keys_of(answer) == [b"later"]


def test_collections_are_apart(peer: Peer, node: MemoryNode) -> None:
    engine = node.engine
    engine.keyspace.set_manifest(engine.keyspace.manifest.create_collection("_default", "fruit"))
    put(peer, b"default")
    put(peer, b"apple", b"pear", collection=b"\x08")
    scan_id = created(peer, *ALL, collection="8")
    assert keys_of(go_on(peer, scan_id, 1, 0, 0)) == [b"apple"]
    assert keys_of(go_on(peer, created(peer, *ALL))) == [b"default"]
    unknown = create(peer, *ALL, collection="9")
    assert unknown.status == Status.UNKNOWN_COLLECTION
    assert json.loads(unknown.value) == {"manifest_uid": f"{engine.keyspace.manifest.uid:x}"}
    engine.keyspace.set_manifest(engine.keyspace.manifest.drop_collection("_default", "fruit"))
    assert go_on(peer, scan_id).status == Status.UNKNOWN_COLLECTION
    assert len(node.scans) == 0


def test_a_sample_takes_so_many_at_most_and_the_same_again(peer: Peer) -> None:
    keys = [b"key%03d" % number for number in range(300)]
    put(peer, *keys)
    samples = [
        all_keys(peer, created(peer, sampling={"samples": 50, "seed": seed}, key_only=True))
        for seed in (1, 1, 2)
    ]
    assert samples[0] == samples[1] != samples[2]
    for sample in samples:
        assert 25 <= len(sample) <= 50
        assert sample == sorted(set(sample))
        assert set(sample) <= set(keys)
    assert all_keys(peer, created(peer, sampling={"samples": 300})) == keys


def test_snapshot_requirements(peer: Peer, node: MemoryNode) -> None:
    put(peer, b"a", b"b")
    vb_uuid = str(node.engine.partitions[VB].vb_uuid)

    def status(seqno: int, uuid: str = vb_uuid, **more: Any) -> int:
        requirements = {"vb_uuid": uuid, "seqno": seqno, "timeout_ms": 5, **more}
        return create(peer, *ALL, snapshot_requirements=requirements).status

    assert status(2) == Status.OK
    assert status(2, seqno_exists=True) == Status.OK
    assert status(0, seqno_exists=True) == Status.NOT_STORED
    assert status(3) == Status.ETMPFAIL
    assert status(2, "17") == Status.RANGE_SCAN_VB_UUID_NOT_EQUAL


def test_a_branch_below_ends_a_scan_and_one_above_does_not(peer: Peer, node: MemoryNode) -> None:
    put(peer, b"a", b"b", b"c")
    scan_id = created(peer, *ALL)
    assert keys_of(go_on(peer, scan_id, 1, 0, 0)) == [b"a"]
    put(peer, b"b", b"d")
    node.engine.keyspace.branch(VB, 3)
    assert keys_of(go_on(peer, scan_id, 1, 0, 0)) == [b"b"]
    node.engine.keyspace.branch(VB, 2)
    answer = go_on(peer, scan_id)
    assert answer.status == Status.RANGE_SCAN_CANCELLED
    assert b"rolled back to seqno 2" in answer.value
    assert len(node.scans) == len(node.views) == 0


def test_a_partition_that_stops_to_be_active_ends_its_scans(peer: Peer, node: MemoryNode) -> None:
    put(peer, b"a", b"b")
    scan_id = created(peer, *ALL)
    put_state(node.engine, VB, VbState.REPLICA)
    answer = go_on(peer, scan_id)
    assert (answer.status, answer.value) == (Status.NOT_MY_VBUCKET, node.bucket_config())
    assert create(peer, *ALL).status == Status.NOT_MY_VBUCKET
    assert create(peer, *ALL, vb_id=4000).status == Status.NOT_MY_VBUCKET
    assert len(node.scans) == 0


def test_scans_are_given_up_by_command_and_with_their_connection(
    peer: Peer, node: MemoryNode
) -> None:
    put(peer, b"a", b"b")
    scan_id = created(peer, *ALL)
    assert peer.ask(Opcode.RANGE_SCAN_CANCEL, vb_id=VB + 1, extras=scan_id).status == 1
    assert peer.ask(Opcode.RANGE_SCAN_CANCEL, vb_id=VB, extras=scan_id).status == Status.OK
    assert peer.ask(Opcode.RANGE_SCAN_CANCEL, vb_id=VB, extras=scan_id).status == 1
    mine, taken = created(peer, *ALL), created(peer, *ALL)
    other = connect(node)
    assert keys_of(go_on(other, taken, 1, 0, 0)) == [b"a"]
    node.scans.leave(peer.state)
    assert go_on(peer, mine).status == Status.KEY_ENOENT
    assert keys_of(go_on(other, taken)) == [b"b"]
    assert not node.engine.partitions[VB].pins


def test_another_user_cannot_use_a_scan(peer: Peer, node: MemoryNode) -> None:
    put(peer, b"a")
    scan_id = created(peer, *ALL)
    other = connect(node)
    other.state.login.user = "eve"
    assert go_on(other, scan_id).status == Status.KEY_ENOENT


def test_users_scan_within_what_they_may_read(peer: Peer, node: MemoryNode) -> None:
    put(peer, b"user:1", b"user:2", b"other")
    state = peer.state
    state.login.user, state.login.rights = "ada", Rights({Role.READ: (Scope(b"user:"),)})
    assert all_keys(peer, created(peer, b"user:", b"user:\xff")) == [b"user:1", b"user:2"]
    for bounds in (ALL, (b"user", b"user:9"), (b"user:", b"v")):
        answer = create(peer, *bounds)
        assert answer.status == Status.EACCESS
        assert b"may not scan" in answer.value
    assert create(peer, sampling={"samples": 1}).status == Status.EACCESS
    state.login.rights = Rights({Role.READ: (Scope(b"", "_default.fruit"),)})
    assert create(peer, b"user:", b"user:\xff").status == Status.EACCESS
    state.login.rights = Rights({Role.WRITE: (EVERYTHING,)})
    assert create(peer, *ALL).status == Status.EACCESS
    state.login.rights = Rights({Role.READ: (EVERYTHING,)})
    assert create(peer, *ALL).status == Status.OK


def test_damage_ends_a_scan_with_an_error(peer: Peer, node: MemoryNode) -> None:
    put(peer, *(b"key%d" % number for number in range(9)))
    node.merge()
    scan_id = created(peer, *ALL)
    (block,) = node.env.tables[BY_SEQNO_TABLE]
    node.env.flip(BY_SEQNO_TABLE, block, len(node.env.tables[BY_SEQNO_TABLE][block]) - 3)
    node.store.refresh()
    assert go_on(peer, scan_id).status == Status.EINTERNAL
    assert go_on(peer, scan_id).status == Status.KEY_ENOENT


def test_there_are_only_so_many(peer: Peer, node: MemoryNode) -> None:
    put(peer, b"a")
    node.views._views_max = 2
    created(peer, *ALL)
    created(peer, *ALL)
    answer = create(peer, *ALL)
    assert answer.status == Status.ETMPFAIL
    assert b"2 read views are open" in answer.value


def test_one_user_does_not_keep_others_out(peer: Peer, node: MemoryNode) -> None:
    put(peer, b"a", b"b")
    node.views._views_max = 4
    peer.state.login.user = "greedy"
    held = [created(peer, *ALL) for _ in range(4)]
    other = connect(node)
    other.state.login.user = "ada"
    scan_id = created(other, *ALL)
    assert keys_of(go_on(other, scan_id)) == [b"a", b"b"]
    answer = go_on(peer, held[0])
    assert answer.status == Status.RANGE_SCAN_CANCELLED
    assert b"another user needed one" in answer.value
    for _ in range(50):  # scans whose view was closed, and that nobody asks for any more
        for view in tuple(node.views._open):
            node.views.close(view)
        created(other, *ALL)
    assert len(node.scans) <= 9


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({}, b"either"),
        ({"range": {"start": "", "end": ""}, "sampling": {"samples": 1}}, b"either"),
        ({"range": {"start": ""}}, b"excl_end"),
        ({"range": {"start": "", "excl_start": "", "end": ""}}, b"excl_start"),
        ({"range": {"start": "?", "end": ""}}, b"not a valid range scan"),
        ({"range": {"start": "Yg==", "end": "YQ=="}}, b"ends before it starts"),
        ({"range": {"start": "", "end": "YWFh" * BOUND_BYTES_MAX}}, b"make sense"),
        ({"range": {"start": "", "end": ""}, "collection": "x"}, b"hexadecimal"),
        ({"sampling": {"samples": 0}}, b"1 or more"),
        ({"sampling": {}}, b"samples"),
    ],
)
def test_what_is_no_scan_is_refused(peer: Peer, asked: dict[str, Any], why: bytes) -> None:
    put(peer, b"a")
    answer = create(peer, **asked)
    assert answer.status == Status.EINVAL
    assert why in answer.value


def test_frames_that_are_no_scans_are_refused(peer: Peer, node: MemoryNode) -> None:
    put(peer, b"a")
    value = b'{"sampling":{"samples":1}}'
    create_opcode = Opcode.RANGE_SCAN_CREATE
    for parts in ({"key": b"k"}, {"extras": b"e"}, {"datatype": 0}):
        answer = peer.ask(create_opcode, **{"vb_id": VB, "value": value, "datatype": 1, **parts})
        assert answer.status == Status.EINVAL
    plain = node.connect()
    plain.hello()
    answer = plain.ask(create_opcode, vb_id=VB, value=value, datatype=1)
    assert answer.status == Status.EINVAL
    for opcode in (Opcode.RANGE_SCAN_CONTINUE, Opcode.RANGE_SCAN_CANCEL):
        assert peer.ask(opcode, vb_id=VB, extras=bytes(15)).status == Status.EINVAL
    assert peer.ask(Opcode.RANGE_SCAN_CANCEL, vb_id=VB, extras=bytes(16)).status == 1


def test_values_that_came_compressed_are_scanned_plain(node: MemoryNode) -> None:
    value = b"again and " * 20
    writer = node.connect()
    writer.hello(Feature.JSON, Feature.COLLECTIONS, Feature.SNAPPY)
    sent = bytes(snappy.compress_raw(value))
    stored = writer.ask(Opcode.SET, vb_id=VB, key=b"\0k", value=sent, extras=bytes(8), datatype=3)
    assert stored.status == Status.OK
    for peer in (writer, connect(node)):
        ((_, scanned, meta),) = documents_of(go_on(peer, created(peer, *ALL)))
        assert (scanned, meta[-1]) == (value, 0)  # the client said JSON; it is none
