"""XATTRs over the bytes of real sessions: names, lifetimes, virtual ones, macros, deletions."""

from __future__ import annotations

import json
import struct
from typing import Any

import google_crc32c
import pytest

from dcp.session.access.rights import Rights, Role, Scope
from dcp.wire.feature import Feature
from dcp.wire.frame import MAX_VALUE_BYTES, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from dcp.wire.xattrs import (
    DATATYPE_XATTR,
    XATTRS_BYTES_MAX,
    is_name,
    pack_xattrs,
    problem_of,
    system_section,
    unpack_xattrs,
)
from support.memory_node import START_NS, MemoryNode, Peer, node_for
from support.subdoc_client import (
    ACCESS_DELETED,
    ADD,
    CREATE_AS_DELETED,
    MACRO,
    MKDIR_P,
    REVIVE,
    XATTR,
    aware_peer,
    body,
    look_up,
    mutate,
    single,
)

VB = 5
KEY = b"k"
GET, EXISTS, UPSERT = Opcode.SUBDOC_GET, Opcode.SUBDOC_EXISTS, Opcode.SUBDOC_DICT_UPSERT


@pytest.fixture
def node(request: pytest.FixtureRequest) -> MemoryNode:
    return node_for(request)


@pytest.fixture
def peer(node: MemoryNode) -> Peer:
    """A document with a user's and a system XATTR."""
    peer = aware_peer(node)
    peer.ask(Opcode.SET, vb_id=VB, key=KEY, value=b'{"a":1}', extras=bytes(8), datatype=1)
    mutate(peer, KEY, (UPSERT, XATTR, b"user", b'{"n":1.50}'), (UPSERT, XATTR, b"_sys", b'"s"'))
    return peer


def names(peer: Peer, key: bytes = KEY, doc_flags: int = 0) -> Any:
    status, found = look_up(peer, key, (GET, XATTR, b"$XTOC"), doc_flags=doc_flags)
    return json.loads(found[0][1]) if found else Status(status)


def settle(node: MemoryNode, is_merged: bool) -> None:
    node.commit()
    if is_merged:
        node.merge()


def test_xattrs_are_read_and_changed_by_path(peer: Peer) -> None:
    assert look_up(peer, KEY, (GET, XATTR, b"user.n"), (GET, XATTR, b"_sys"), (GET, 0, b"a")) == (
        0, [(0, b"1.50"), (0, b'"s"'), (0, b"1")],
    )  # fmt: skip
    assert single(peer, Opcode.SUBDOC_COUNTER, KEY, b"user.c", b"3", flags=XATTR).value == b"3"
    assert single(peer, GET, KEY, b"user", flags=XATTR).value == b'{"n":1.50,"c":3}'
    assert single(peer, Opcode.SUBDOC_DELETE, KEY, b"user.n", flags=XATTR).status == Status.OK
    assert single(peer, Opcode.SUBDOC_DELETE, KEY, b"user", flags=XATTR).status == Status.OK
    assert names(peer) == ["_sys"]
    assert single(peer, GET, KEY, b"user", flags=XATTR).status == Status.SUBDOC_PATH_ENOENT
    single(peer, Opcode.SUBDOC_DELETE, KEY, b"_sys", flags=XATTR)
    assert names(peer) == []
    assert json.loads(single(peer, GET, KEY, b"$document.datatype", flags=XATTR).value) == ["json"]
    assert body(peer, KEY) == b'{"a":1}'


def test_plain_reads_do_not_show_them(node: MemoryNode, peer: Peer) -> None:
    stored = peer.ask(Opcode.GET, vb_id=VB, key=KEY)
    assert (stored.value, stored.datatype) == (b'{"a":1}', 1)
    for opcode in (Opcode.GETK, Opcode.GETQ):
        assert peer.ask(opcode, vb_id=VB, key=KEY).value == b'{"a":1}'
    gat = peer.ask(Opcode.GAT, vb_id=VB, key=KEY, extras=bytes(4))
    assert (gat.value, gat.datatype) == (b'{"a":1}', 1)
    meta = peer.ask(Opcode.GET_META, vb_id=VB, key=KEY, extras=b"\x02")
    assert meta.extras[-1] == 1 | DATATYPE_XATTR
    runs = aware_peer(node, Feature.COLLECTIONS)
    together = runs.send(pack_request(Opcode.GET, vb_id=VB, key=b"\0" + KEY) * 3)
    assert [(each.value, each.datatype) for each in together] == [(b'{"a":1}', 1)] * 3
    two = look_up(runs, b"\0" + KEY, (GET, 0, b"a"))
    assert [look_up(runs, b"\0" + KEY, (GET, 0, b"a")) for _ in range(3)] == [two] * 3


@pytest.mark.parametrize("is_merged", [False, True])
def test_stores_keep_them(node: MemoryNode, peer: Peer, is_merged: bool) -> None:
    changes = [
        (Opcode.SET, bytes(8), b"5"),
        (Opcode.REPLACE, bytes(8), b"6"),
        (Opcode.INCREMENT, struct.pack(">QQI", 4, 0, 0), b""),
        (Opcode.APPEND, b"", b"1"),
        (Opcode.PREPEND, b"", b"9"),
        (Opcode.TOUCH, struct.pack(">I", 1000), b""),
    ]
    for opcode, extras, value in changes:
        settle(node, is_merged)
        answer = peer.ask(opcode, vb_id=VB, key=KEY, extras=extras, value=value)
        assert answer.status == Status.OK
        assert names(peer) == ["user", "_sys"], opcode
    assert body(peer, KEY) == b"9101"
    plain = aware_peer(node, Feature.COLLECTIONS)
    plain.set(VB, b"\0" + KEY, b"run")
    plain.set(VB, b"\0" + KEY, b"run again")
    assert names(peer) == ["user", "_sys"]
    assert body(peer, KEY) == b"run again"


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize("way", ["delete", "expiry", "multi", "flush"])
def test_a_deletion_keeps_the_system_ones(
    node: MemoryNode, peer: Peer, way: str, is_merged: bool
) -> None:
    settle(node, is_merged)
    if way == "delete":
        peer.delete(VB, KEY)
    elif way == "multi":
        mutate(peer, KEY, (Opcode.DELETE, 0, b""))
    elif way == "flush":
        peer.ask(Opcode.FLUSH)
    else:
        peer.ask(Opcode.TOUCH, vb_id=VB, key=KEY, extras=struct.pack(">I", 5))
        node.now_ns += 6 * 10**9
    assert peer.ask(Opcode.GET, vb_id=VB, key=KEY).status == Status.KEY_ENOENT
    settle(node, is_merged)
    assert names(peer) == Status.KEY_ENOENT
    status, found = look_up(
        peer, KEY, (GET, XATTR, b"_sys"), (EXISTS, XATTR, b"user"), doc_flags=ACCESS_DELETED
    )
    assert status == Status.SUBDOC_MULTI_PATH_FAILURE_DELETED
    assert found == [(0, b'"s"'), (Status.SUBDOC_PATH_ENOENT, b"")]
    status, found = look_up(peer, KEY, (GET, XATTR, b"$document.deleted"), doc_flags=ACCESS_DELETED)
    assert (status, found) == (Status.SUBDOC_SUCCESS_DELETED, [(0, b"true")])
    peer.set(VB, KEY, b"new")
    assert names(peer) == [], "a document that is stored again begins without"


def test_a_due_document_gives_its_xattrs_to_nobody(node: MemoryNode, peer: Peer) -> None:
    peer.ask(Opcode.TOUCH, vb_id=VB, key=KEY, extras=struct.pack(">I", 5))
    node.now_ns += 6 * 10**9
    peer.set(VB, KEY, b"new")
    assert names(peer) == []


def test_document_without_system_xattrs_leaves_empty_deletion(peer: Peer) -> None:
    single(peer, Opcode.SUBDOC_DELETE, KEY, b"_sys", flags=XATTR)
    peer.delete(VB, KEY)
    assert names(peer, doc_flags=ACCESS_DELETED) == []
    meta = peer.ask(Opcode.GET_META, vb_id=VB, key=KEY, extras=b"\x02")
    assert (meta.extras[3], meta.extras[-1]) == (1, 0)


def test_deletions_are_changed_created_and_revived(peer: Peer) -> None:
    peer.delete(VB, KEY)
    staged = mutate(
        peer, KEY, (UPSERT, XATTR | MKDIR_P, b"txn.op.stgd", b'{"b":2.0}'),
        doc_flags=ACCESS_DELETED,
    )  # fmt: skip
    assert staged.status == Status.SUBDOC_SUCCESS_DELETED
    assert len(staged.extras) == 16
    assert names(peer, doc_flags=ACCESS_DELETED) == ["_sys", "txn"]
    with_body = mutate(peer, KEY, (Opcode.SET, 0, b"", b"{}"), doc_flags=ACCESS_DELETED)
    assert with_body.status == Status.SUBDOC_DELETED_DOCUMENT_CANT_HAVE_VALUE
    failed = mutate(peer, KEY, (UPSERT, 0, b"a", b"1"), doc_flags=ACCESS_DELETED)
    assert failed.status == Status.SUBDOC_MULTI_PATH_FAILURE
    assert failed.value == struct.pack(">BH", 0, Status.SUBDOC_DOC_NOTJSON)
    added = mutate(peer, KEY, (UPSERT, XATTR, b"x", b"1"), doc_flags=ACCESS_DELETED | ADD)
    assert added.status == Status.KEY_EEXISTS
    revived = mutate(
        peer, KEY, (Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR, XATTR, b"txn.op.stgd"),
        (Opcode.SUBDOC_DELETE, XATTR, b"txn"), doc_flags=ACCESS_DELETED | REVIVE,
    )  # fmt: skip
    assert revived.status == Status.OK
    assert body(peer, KEY) == b'{"b":2.0}'
    assert names(peer) == ["_sys"]
    again = mutate(peer, KEY, (UPSERT, XATTR, b"x", b"1"), doc_flags=ACCESS_DELETED | REVIVE)
    assert again.status == Status.SUBDOC_CAN_ONLY_REVIVE_DELETED_DOCUMENTS
    made = mutate(peer, b"ghost", (UPSERT, XATTR, b"_x", b"1"), doc_flags=CREATE_AS_DELETED | ADD)
    assert made.status == Status.SUBDOC_SUCCESS_DELETED
    assert peer.ask(Opcode.GET, vb_id=VB, key=b"ghost").status == Status.KEY_ENOENT
    assert names(peer, b"ghost", ACCESS_DELETED) == ["_x"]
    part = peer.node.engine.partitions[VB]
    assert part.item_count == 1, "deletions are no documents"


def test_virtual_xattrs(node: MemoryNode, peer: Peer) -> None:
    found = json.loads(single(peer, GET, KEY, b"$document", flags=XATTR).value)
    stored = peer.ask(Opcode.GET, vb_id=VB, key=KEY)
    part = node.engine.partitions[VB]
    assert found == {
        "CAS": f"0x{stored.cas:016x}", "datatype": ["json", "xattr"], "deleted": False,
        "exptime": 0, "flags": 0, "last_modified": str(START_NS // 10**9), "revid": "2",
        "seqno": "0x0000000000000002", "value_bytes": 7,
        "value_crc32c": f"0x{google_crc32c.value(stored.value):08x}",
        "vbucket_uuid": f"0x{part.vb_uuid:016x}",
    }  # fmt: skip
    assert single(peer, EXISTS, KEY, b"$document.revid", flags=XATTR).status == Status.OK
    clock = json.loads(single(peer, GET, KEY, b"$vbucket.HLC", flags=XATTR).value)
    assert clock["now"] == str(START_NS // 10**9)
    unknown = single(peer, GET, KEY, b"$nothing", flags=XATTR)
    assert unknown.status == Status.SUBDOC_XATTR_UNKNOWN_VATTR
    changed = single(peer, UPSERT, KEY, b"$document.CAS", b"1", flags=XATTR)
    assert changed.status == Status.SUBDOC_XATTR_CANT_MODIFY_VATTR


def test_macros(peer: Peer) -> None:
    before = peer.ask(Opcode.GET, vb_id=VB, key=KEY)
    flags = XATTR | MACRO | MKDIR_P
    answer = mutate(
        peer, KEY, (UPSERT, flags, b"m.cas", b'"${Mutation.CAS}"'),
        (UPSERT, flags, b"m.seqno", b'"${Mutation.seqno}"'),
        (UPSERT, flags, b"m.crc", b'"${Mutation.value_crc32c}"'),
        (UPSERT, flags, b"m.before", b'"${$document.CAS}"'),
        (UPSERT, XATTR, b"m.text", b'"${Mutation.CAS}"'),
        (UPSERT, 0, b"b", b"2"),
    )  # fmt: skip
    assert answer.status == Status.OK
    after = peer.ask(Opcode.GET, vb_id=VB, key=KEY)
    found = json.loads(single(peer, GET, KEY, b"m", flags=XATTR).value)
    assert found == {
        "cas": "0x" + after.cas.to_bytes(8, "little").hex(),
        "seqno": "0x0000000000000003",
        "crc": f"0x{google_crc32c.value(after.value):08x}",
        "before": f"0x{before.cas:016x}",
        "text": "${Mutation.CAS}",
    }
    unknown = single(peer, UPSERT, KEY, b"m", b'"${Mutation.none}"', flags=XATTR | MACRO)
    assert unknown.status == Status.SUBDOC_XATTR_UNKNOWN_MACRO
    unknown = single(peer, UPSERT, KEY, b"m", b'"${$document.none}"', flags=XATTR | MACRO)
    assert unknown.status == Status.SUBDOC_XATTR_UNKNOWN_VATTR_MACRO


@pytest.mark.parametrize("path", [b"", b".a", b"a" * 17, b"#a", b"+", b"\x01a", b"[0]", b"a\xff"])
def test_names_that_no_xattr_has(peer: Peer, path: bytes) -> None:
    assert single(peer, UPSERT, KEY, path, b"1", flags=XATTR).status == Status.XATTR_EINVAL


def test_they_have_to_be_negotiated(node: MemoryNode) -> None:
    peer = node.connect()
    peer.hello()
    peer.set(VB, KEY, b"{}")
    refused = single(peer, UPSERT, KEY, b"x", b"1", flags=XATTR)
    assert refused.status == Status.NOT_SUPPORTED
    for feature in (Feature.VATTR, Feature.SUBDOC_DOCUMENT_MACRO_SUPPORT):
        assert peer.hello(feature).status == Status.EINVAL
        assert peer.hello(Feature.XATTR, feature).status == Status.OK
    stored = peer.ask(
        Opcode.SET, vb_id=VB, key=KEY, extras=bytes(8), datatype=DATATYPE_XATTR,
        value=pack_xattrs([(b"x", b"1")]) + b"{}",
    )  # fmt: skip
    assert stored.status == Status.EINVAL


def test_system_xattrs_need_more_roles(peer: Peer) -> None:
    scopes = dict.fromkeys((Role.READ, Role.WRITE), (Scope(),))
    allowed = {(): (False, False), (Role.STREAM,): (True, False), (Role.ADMIN,): (True, True)}
    for more, (reads, writes) in allowed.items():
        peer.state.login.rights = Rights({**scopes, **dict.fromkeys(more, (Scope(),))})
        found = single(peer, GET, KEY, b"_sys", flags=XATTR)
        assert found.status == (Status.OK if reads else Status.EACCESS)
        stored = single(peer, UPSERT, KEY, b"_sys", b"1", flags=XATTR)
        assert stored.status == (Status.OK if writes else Status.EACCESS)
        assert names(peer) == (["user", "_sys"] if reads else ["user"])
        assert single(peer, GET, KEY, b"user", flags=XATTR).status == Status.OK


def test_limits(peer: Peer) -> None:
    large = b'"' + b"x" * (XATTRS_BYTES_MAX + 1) + b'"'
    assert single(peer, UPSERT, KEY, b"large", large, flags=XATTR).status == Status.E2BIG
    single(peer, UPSERT, KEY, b"large", large[:1000] + b'"', flags=XATTR)
    assert peer.set(VB, KEY, bytes(MAX_VALUE_BYTES)).status == Status.E2BIG
    aware = aware_peer(peer.node, Feature.COLLECTIONS)
    assert aware.set(VB, b"\0" + KEY, bytes(MAX_VALUE_BYTES)).status == Status.E2BIG
    assert body(peer, KEY) == b'{"a":1}'


def with_meta(peer: Peer, opcode: int, value: bytes, datatype: int, rev: int = 9) -> int:
    extras = struct.pack(">IIQQ", 0, 0, rev, START_NS)
    return peer.ask(opcode, vb_id=VB, key=KEY, extras=extras, value=value, datatype=datatype).status


def test_with_meta_carries_them(node: MemoryNode, peer: Peer) -> None:
    section = pack_xattrs([(b"u", b"1"), (b"_s", b"2")])
    assert with_meta(peer, Opcode.SET_WITH_META, section + b"text", DATATYPE_XATTR) == Status.OK
    assert names(peer) == ["u", "_s"]
    assert body(peer, KEY) == b"text"
    removal = Opcode.DEL_WITH_META
    assert with_meta(peer, removal, section + b"x", DATATYPE_XATTR, 10) == Status.EINVAL
    assert with_meta(peer, removal, section, DATATYPE_XATTR, 10) == Status.OK
    assert names(peer, doc_flags=ACCESS_DELETED) == ["u", "_s"]
    unaware = node.connect()
    unaware.hello()
    assert with_meta(unaware, Opcode.SET_WITH_META, section, DATATYPE_XATTR, 11) == Status.EINVAL
    assert with_meta(peer, Opcode.SET_WITH_META, b"", DATATYPE_XATTR, 11) == Status.EINVAL


UNSOUND = [
    b"", b"\0\0\0", b"\0\0\0\0", b"\0\0\0\x05", b"\0\0\0\x04\0\0\0\0",
    b"\0\0\0\x08\0\0\0\x04x\x001", b"\0\0\0\x08\0\0\0\x05x\x001\0",
    pack_xattrs([(b"x", b"not json")]), pack_xattrs([(b"x" * 17, b"1")]),
    pack_xattrs([(b"x", b"1"), (b"x", b"2")]), pack_xattrs([(b"$v", b"1")]),
    pack_xattrs([(b"x", b"1\0")]), pack_xattrs([(b"x", b'"\xff"')]),
    pack_xattrs([(b"x", b"[" * 50_000 + b"]" * 50_000)]),
    pack_xattrs([(b"x", b'"' + b"x" * XATTRS_BYTES_MAX + b'"')]),
]  # fmt: skip


@pytest.mark.parametrize("value", UNSOUND, ids=range(len(UNSOUND)))
def test_sections_that_are_not_sound_are_refused(peer: Peer, value: bytes) -> None:
    assert problem_of(value)
    assert with_meta(peer, Opcode.SET_WITH_META, value, DATATYPE_XATTR) == Status.EINVAL
    assert names(peer) == ["user", "_sys"]


def test_sections() -> None:
    pairs = {b"a": b"1", b"_b": b'{"x":[1.50]}', "é".encode(): b"null"}
    section = pack_xattrs(pairs.items())
    assert section == (
        b"\0\0\0\x28" b"\0\0\0\x04a\x001\0" b"\0\0\0\x10_b\0" b'{"x":[1.50]}\0'
        b"\0\0\0\x08\xc3\xa9\0null\0"
    )  # fmt: skip
    assert unpack_xattrs(section) == pairs
    assert problem_of(section + b"body") == ""
    assert unpack_xattrs(system_section(section)) == {b"_b": b'{"x":[1.50]}'}
    assert system_section(pack_xattrs([(b"a", b"1")])) == b""
    assert is_name(b"x" * 16)
    assert not is_name(b"a\0")
