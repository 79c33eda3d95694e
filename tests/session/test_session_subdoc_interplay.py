"""Sub-documents and XATTRs together with Snappy, locks, durability, the fence, and answer marks."""

from __future__ import annotations

import json
import struct
from itertools import product
from typing import Any

import pytest
from cramjam import snappy

from dcp.session.access.rights import NEEDS, Role
from dcp.session.kv.with_meta import META_EXTRAS
from dcp.session.node_facts import Limits
from dcp.session.request_frames import DURABLE
from dcp.wire.feature import Feature
from dcp.wire.frame import FLEX_HEADER, Frame, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from dcp.wire.xattrs import pack_xattrs, section_of, unpack_xattrs
from support.memory_node import MemoryNode, Peer
from support.replicated import ReplicatedConnection, commit, get, noop, replicate
from support.subdoc_client import (
    XATTR,
    lookup_value,
    mutation_value,
    packed_mutation,
    results,
    single,
)
from vbucket.engine.documents.locks import LOCKED_CAS
from vbucket.engine.partition import VbState
from vbucket.model.entry import DATATYPE_AT, value_of
from vbucket.store.plain_value import plain_value

VB, OTHER = 5, 6
KEY = b"\0k"
JSON, SNAPPY, XATTRS = 1, 2, 4
BODY = b'{"a":1,"text":"' + b"again and " * 40 + b'"}'
SECTION = pack_xattrs([(b"user", b'{"n":1.50}'), (b"_system", b'"s"')])
UPSERT, GET_PATH = Opcode.SUBDOC_DICT_UPSERT, Opcode.SUBDOC_GET

SINGLE_LOOKUPS = (Opcode.SUBDOC_GET, Opcode.SUBDOC_EXISTS, Opcode.SUBDOC_GET_COUNT)
CHANGES: dict[Opcode, tuple[bytes, bytes]] = {
    Opcode.SUBDOC_DICT_ADD: (b"new", b"1"),
    Opcode.SUBDOC_DICT_UPSERT: (b"a", b"2"),
    Opcode.SUBDOC_DELETE: (b"a", b""),
    Opcode.SUBDOC_REPLACE: (b"a", b"2"),
    Opcode.SUBDOC_ARRAY_PUSH_LAST: (b"list", b"2"),
    Opcode.SUBDOC_ARRAY_PUSH_FIRST: (b"list", b"2"),
    Opcode.SUBDOC_ARRAY_INSERT: (b"list[0]", b"2"),
    Opcode.SUBDOC_ARRAY_ADD_UNIQUE: (b"list", b"2"),
    Opcode.SUBDOC_COUNTER: (b"a", b"2"),
    Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR: (b"user", b""),
    Opcode.SUBDOC_MULTI_MUTATION: (b"a", b"2"),
}
"""Opcode -> a path and a value with which it succeeds."""
LISTED = b'{"a":1,"list":[1]}'


def packed(value: bytes) -> bytes:
    return bytes(snappy.compress_raw(value))


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


def connect(node: MemoryNode, *features: int, **limits: Any) -> Peer:
    peer = node.connect(limits=Limits(**limits))
    peer.hello(
        Feature.COLLECTIONS, Feature.XERROR, Feature.MUTATION_SEQNO, Feature.SYNC_REPLICATION,
        Feature.ALT_REQUEST, *features,
    )  # fmt: skip
    return peer


def connect_all(node: MemoryNode, **limits: Any) -> Peer:
    return connect(node, Feature.JSON, Feature.SNAPPY, Feature.XATTR, **limits)


def with_meta(
    peer: Peer, value: bytes, datatype: int, *, opcode: int = Opcode.SET_WITH_META, rev: int = 1
) -> Frame:
    extras = META_EXTRAS.pack(7, 0, rev, rev)
    return peer.ask(opcode, vb_id=VB, key=KEY, value=value, extras=extras, datatype=datatype)


def stored(node: MemoryNode) -> tuple[int, bytes, bytes]:
    """Return datatype, XATTRs and body of the newest version."""
    entry = node.engine.partitions[VB].newest[KEY]
    datatype = entry[DATATYPE_AT]
    return datatype, section_of(value_of(entry), datatype), plain_value(entry)


def wire_form(datatype: int) -> bytes:
    """Return a value of a datatype as clients send it: compressed with its XATTRs."""
    value = SECTION * bool(datatype & XATTRS) + BODY
    return packed(value) if datatype & SNAPPY else value


def change(opcode: Opcode, opaque: int = 0, cas: int = 0, key: bytes = KEY, vb: int = VB) -> bytes:
    path, value = CHANGES[opcode]
    if opcode == Opcode.SUBDOC_MULTI_MUTATION:
        return packed_mutation(key, (UPSERT, 0, path, value), vb_id=vb, opaque=opaque)[:16] + (
            cas.to_bytes(8, "big") + key + mutation_value((UPSERT, 0, path, value))
        )
    flags = XATTR if opcode == Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR else 0
    extras = struct.pack(">HB", len(path), flags)
    return pack_request(
        opcode, vb_id=vb, key=key, value=path + value, extras=extras, cas=cas, opaque=opaque
    )


def look_up_request(opcode: int = Opcode.SUBDOC_MULTI_LOOKUP, opaque: int = 0) -> bytes:
    if opcode == Opcode.SUBDOC_MULTI_LOOKUP:
        value = lookup_value((GET_PATH, 0, b"a"))
        return pack_request(opcode, vb_id=VB, key=KEY, value=value, opaque=opaque)
    extras = struct.pack(">HB", 4 if opcode == Opcode.SUBDOC_GET_COUNT else 1, 0)
    path = b"list" if opcode == Opcode.SUBDOC_GET_COUNT else b"a"
    return pack_request(opcode, vb_id=VB, key=KEY, value=path, extras=extras, opaque=opaque)


# -- datatypes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize("datatype", range(8))
def test_every_command_shows_each_client_what_it_negotiated(
    node: MemoryNode, datatype: int, is_merged: bool
) -> None:
    assert with_meta(connect_all(node), wire_form(datatype), datatype).status == Status.OK
    node.commit()
    if is_merged:
        node.merge()
        node.crash()
    has_xattrs = bool(datatype & XATTRS)
    for knows_json, knows_snappy, knows_xattrs in product((0, 1), repeat=3):
        asked = ((Feature.JSON,) * knows_json + (Feature.SNAPPY,) * knows_snappy
                 + (Feature.XATTR,) * knows_xattrs)  # fmt: skip
        reader = connect(node, *asked)
        is_packed = bool(datatype & SNAPPY) and knows_snappy and not has_xattrs
        form = (
            Status.OK, (JSON & knows_json) | is_packed << 1,
            packed(BODY) if is_packed else BODY,
        )  # fmt: skip
        for opcode, extras in (
            (Opcode.GET, b""), (Opcode.GETQ, b""), (Opcode.GETK, b""), (Opcode.GAT, bytes(4)),
            (Opcode.GET_RANDOM_KEY, b""), (Opcode.GET_AND_LOCK, b""),
        ):  # fmt: skip
            key = b"" if opcode == Opcode.GET_RANDOM_KEY else KEY
            found = reader.ask(opcode, vb_id=VB, key=key, extras=extras)
            assert (found.status, found.datatype, found.value) == form, opcode
        node.engine.locks.held.clear()
        run = reader.send(pack_request(Opcode.GET, vb_id=VB, key=KEY) * 3)
        assert [(each.status, each.datatype, each.value) for each in run] == [form] * 3
        for each in reader.send(look_up_request() * 3):
            assert (each.status, results(each.value)) == (Status.OK, [(0, b"1")])
        assert single(reader, GET_PATH, KEY, b"a").value == b"1"
        found = single(reader, GET_PATH, KEY, b"user.n", flags=XATTR)
        if not knows_xattrs:
            assert found.status == Status.NOT_SUPPORTED
        else:
            assert found.value == (b"1.50" if has_xattrs else b"")
        meta = reader.ask(Opcode.GET_META, vb_id=VB, key=KEY, extras=b"\x02")
        assert meta.extras[-1] & XATTRS == datatype & XATTRS


@pytest.mark.parametrize("datatype", range(8))
def test_every_change_keeps_xattrs_and_works_on_plain_value(
    node: MemoryNode, datatype: int
) -> None:
    """What is stored with XATTRs is never compressed."""
    peer = connect_all(node)
    section = SECTION if datatype & XATTRS else b""
    store: dict[str, Any] = {"vb_id": VB, "key": KEY, "extras": bytes(8)}
    changes: list[tuple[bytes, bytes]] = [
        (pack_request(Opcode.SET, value=packed(BODY), datatype=3, **store), BODY),
        (pack_request(Opcode.SET, value=BODY, datatype=1, **store) * 3, BODY),
        (pack_request(Opcode.APPEND, vb_id=VB, key=KEY, value=packed(BODY), datatype=2), BODY * 2),
        (pack_request(Opcode.TOUCH, vb_id=VB, key=KEY, extras=b"\0\0\1\0"), BODY),
        (change(Opcode.SUBDOC_DICT_UPSERT), BODY.replace(b":1", b":2")),
        (change(Opcode.SUBDOC_MULTI_MUTATION) * 3, BODY.replace(b":1", b":2")),
    ]
    for rev, (request, wanted) in enumerate(changes, 1):
        assert with_meta(peer, wire_form(datatype), datatype, rev=100 * rev).status == Status.OK
        assert {answer.status for answer in peer.send(request)} == {Status.OK}
        kind, kept, body = stored(node)
        assert (kept, body) == (section, wanted), request
        assert bool(kind & XATTRS) == bool(section)
        assert not (kind & XATTRS and kind & SNAPPY)


@pytest.mark.parametrize("datatype", [2, 3])
def test_an_xattr_of_a_compressed_document(node: MemoryNode, datatype: int) -> None:
    peer = connect_all(node)
    assert with_meta(peer, packed(BODY), datatype).status == Status.OK
    changed = single(peer, UPSERT, KEY, b"new", b"1", flags=XATTR)
    assert changed.status == Status.OK
    kind, section, body = stored(node)
    assert (kind, unpack_xattrs(section), body) == (XATTRS | JSON, {b"new": b"1"}, BODY)
    facts = json.loads(single(peer, GET_PATH, KEY, b"$document", flags=XATTR).value)
    assert facts["value_bytes"] == len(BODY)


def test_xattrs_and_snappy_must_both_be_negotiated(node: MemoryNode) -> None:
    value = packed(SECTION + BODY)
    for features in ((), (Feature.XATTR,), (Feature.SNAPPY,)):
        assert with_meta(connect(node, *features), value, 6).status == Status.EINVAL
    peer = connect_all(node)
    set_: dict[str, Any] = {"vb_id": VB, "key": KEY, "extras": bytes(8)}
    for datatype in (4, 5, 6, 7):
        refused = peer.ask(Opcode.SET, value=wire_form(datatype), datatype=datatype, **set_)
        assert refused.status == Status.EINVAL
    assert peer.ask(Opcode.GET, vb_id=VB, key=KEY).status == Status.KEY_ENOENT


def test_a_size_is_checked_before_anything_is_inflated(node: MemoryNode) -> None:
    peer = connect_all(node, value_bytes_max=10_000)
    assert with_meta(peer, packed(SECTION + bytes(10_000)), 6).status == Status.E2BIG
    lie = b"\xff\xff\xff\xff\x0f" + packed(SECTION + BODY)[2:]
    assert with_meta(peer, lie, 6).status == Status.E2BIG
    assert with_meta(peer, b"\x10nothing", 6).status == Status.EINVAL
    assert with_meta(peer, packed(b"\0\0\0\x09no xattrs"), 6).status == Status.EINVAL


def test_a_removal_with_compressed_xattrs(node: MemoryNode) -> None:
    peer = connect_all(node)
    remove: dict[str, Any] = {"opcode": Opcode.DEL_WITH_META, "rev": 9}
    assert with_meta(peer, packed(SECTION + BODY), 6, **remove).status == Status.EINVAL
    assert with_meta(peer, packed(SECTION), 2, **remove).status == Status.EINVAL
    assert with_meta(peer, packed(SECTION), 6, **remove).status == Status.OK
    entry = node.engine.partitions[VB].newest[KEY]
    assert (entry[DATATYPE_AT], value_of(entry)) == (XATTRS, SECTION)


# -- locks, durability, fence ---------------------------------------------------------------------


@pytest.fixture
def holder(node: MemoryNode) -> Peer:
    peer = connect_all(node)
    assert with_meta(peer, SECTION + LISTED, 5).status == Status.OK
    node.commit()
    return peer


@pytest.mark.parametrize("opcode", CHANGES, ids=lambda opcode: opcode.name)
def test_a_lock_holds_against_parts_too(node: MemoryNode, holder: Peer, opcode: Opcode) -> None:
    own_cas = holder.ask(Opcode.GET, vb_id=VB, key=KEY).cas
    lock_cas = holder.ask(Opcode.GET_AND_LOCK, vb_id=VB, key=KEY).cas
    other = connect_all(node)
    before = node.engine.partitions[VB].high_seqno
    for cas in (0, own_cas, LOCKED_CAS):
        refused = other.send(change(opcode, cas=cas) * 2)
        assert [each.status for each in refused] == [Status.LOCKED] * 2
    assert node.engine.partitions[VB].high_seqno == before
    assert [each.status for each in other.send(change(opcode, cas=lock_cas))] == [Status.OK]
    assert other.ask(Opcode.UNLOCK, vb_id=VB, key=KEY, cas=lock_cas).status == Status.NOT_LOCKED


def test_look_ups_show_that_a_document_is_locked(node: MemoryNode, holder: Peer) -> None:
    lock = pack_request(Opcode.GET_AND_LOCK, vb_id=VB, key=KEY)
    others = b"".join(map(look_up_request, SINGLE_LOOKUPS))
    answers = holder.send(look_up_request() * 2 + lock + look_up_request() * 2 + others)
    assert {each.status for each in answers} == {Status.OK}
    assert LOCKED_CAS not in {each.cas for each in answers[:3]}
    assert {each.cas for each in answers[3:]} == {LOCKED_CAS}


def test_every_change_of_parts_may_ask_for_durability(node: MemoryNode, holder: Peer) -> None:
    subdoc = {each for each in NEEDS if Opcode(each).name.startswith("SUBDOC_")}
    writing = {each for each in subdoc if any(Role.WRITE in roles for roles in NEEDS[each].roles)}
    assert set(CHANGES) == writing == subdoc & DURABLE
    for opcode in subdoc:
        plain = change(Opcode(opcode)) if opcode in writing else look_up_request(opcode)
        frame = b"\x13\x01\x00\x64"
        _, _, key_len, extras_len, datatype, vb_id, body, opaque, cas = struct.unpack(
            ">BBHBBHIIQ", plain[:24]
        )
        head = FLEX_HEADER.pack(
            0x08, opcode, len(frame), key_len, extras_len, datatype, vb_id, body + len(frame),
            opaque, cas,
        )  # fmt: skip
        assert with_meta(holder, SECTION + LISTED, 5, rev=holder_rev(node)).status == Status.OK
        node.commit()
        (answer,) = holder.send(head + frame + plain[24:])
        wanted = Status.OK if opcode in writing else Status.EINVAL
        assert answer.status == wanted, Opcode(opcode)
        assert holder.must_wait == (opcode in writing)
        node.commit()


def holder_rev(node: MemoryNode) -> int:
    high_seqno: int = node.engine.partitions[VB].high_seqno
    return high_seqno + 100


@pytest.mark.parametrize(
    "opcode", [*CHANGES, *SINGLE_LOOKUPS, Opcode.SUBDOC_MULTI_LOOKUP], ids=lambda each: each.name
)
def test_a_fenced_partition_answers_later(node: MemoryNode, holder: Peer, opcode: Opcode) -> None:
    part = node.engine.partitions[VB]
    holder.send(change(Opcode.SUBDOC_MULTI_MUTATION))
    before, part.state = part.high_seqno, VbState.FENCED
    other = connect_all(node)
    request = change(opcode) if opcode in CHANGES else look_up_request(opcode)
    assert [each.status for each in other.send(request * 2)] == [Status.ETMPFAIL] * 2
    assert part.high_seqno == before
    assert not other.must_wait, "a commit may not come"


# -- what answers wait for ------------------------------------------------------------------------


@pytest.mark.parametrize("opcode", [*SINGLE_LOOKUPS, Opcode.SUBDOC_MULTI_LOOKUP])
def test_a_look_up_waits_for_the_version_that_it_shows_only(
    node: MemoryNode, holder: Peer, opcode: Opcode
) -> None:
    writer, reader = connect_all(node), connect_all(node)
    writer.send(change(Opcode.SUBDOC_MULTI_MUTATION, key=b"\0absent"))
    writer.ask(Opcode.SET, vb_id=VB, key=b"\0another", extras=bytes(8), value=b"v")
    reader.send(look_up_request(opcode) * 2)
    assert not reader.must_wait
    writer.send(change(Opcode.SUBDOC_MULTI_MUTATION))
    reader.send(look_up_request(opcode) * 2)
    assert reader.must_wait
    node.commit()
    assert not reader.must_wait


FEATURES = (
    Feature.MUTATION_SEQNO, Feature.XATTR, Feature.XERROR, Feature.SYNC_REPLICATION,
    Feature.COLLECTIONS, Feature.JSON,
)  # fmt: skip


@pytest.fixture
def replicated(node: MemoryNode, holder: Peer) -> ReplicatedConnection:
    del holder
    replicate(node, VB)
    return ReplicatedConnection(node, *FEATURES)


def test_lost_runs_of_changes_are_ambiguous_and_reads_come_again(
    node: MemoryNode, holder: Peer
) -> None:
    assert with_meta(holder, LISTED, 1, rev=holder_rev(node)).status == Status.OK
    node.commit()
    replicate(node, VB)
    replicated = ReplicatedConnection(node, *FEATURES)
    multi = b"".join(change(Opcode.SUBDOC_MULTI_MUTATION, opaque) for opaque in range(20, 24))
    reads = b"".join(look_up_request(opaque=opaque) for opaque in range(30, 33))
    one = look_up_request(Opcode.SUBDOC_EXISTS, 33)
    replicated.ask(multi, reads, one, noop(40), get(OTHER, 41))
    replicated.held.depose({VB})
    wanted = [(opaque, Status.SYNC_WRITE_AMBIGUOUS) for opaque in range(20, 24)]
    wanted += [(opaque, Status.ETMPFAIL) for opaque in range(30, 34)]
    assert replicated.left() == [*wanted, (40, Status.OK), (41, Status.KEY_ENOENT)]


@pytest.mark.parametrize("opcode", CHANGES, ids=lambda opcode: opcode.name)
def test_a_lost_change_of_a_part_is_ambiguous(
    replicated: ReplicatedConnection, opcode: Opcode
) -> None:
    replicated.ask(change(opcode, 1))
    replicated.held.depose({VB})
    assert replicated.left() == [(1, Status.SYNC_WRITE_AMBIGUOUS)]


def test_a_look_up_that_let_its_document_expire_changed_nothing(
    node: MemoryNode, holder: Peer
) -> None:
    due_s = node.now_ns // 1_000_000_000 + 10
    extras = META_EXTRAS.pack(0, due_s, 50, 50)
    set_: dict[str, Any] = {"vb_id": VB, "key": KEY, "extras": extras, "datatype": 5}
    holder.ask(Opcode.SET_WITH_META, value=SECTION + LISTED, **set_)
    node.commit()
    replicate(node, VB)
    replicated = ReplicatedConnection(node, *FEATURES)
    node.now_ns += 20_000_000_000
    access_deleted = struct.pack(">HBB", 7, XATTR, 0x04)
    look_up = pack_request(
        GET_PATH, vb_id=VB, key=KEY, value=b"_system", extras=access_deleted, opaque=1
    )
    replicated.ask(look_up)
    assert replicated.held, "the expiry is not committed"
    replicated.held.depose({VB})
    assert replicated.left() == [(1, Status.ETMPFAIL)]


def test_a_lost_change_of_a_deletion_is_ambiguous(
    node: MemoryNode, holder: Peer, replicated: ReplicatedConnection
) -> None:
    holder.delete(VB, KEY)
    node.commit()
    commit(node, VB)
    access_deleted = struct.pack(">HBB", 4, XATTR, 0x04)
    replicated.ask(
        pack_request(
            UPSERT, vb_id=VB, key=KEY, value=b"user" + b"1", extras=access_deleted, opaque=1
        )
    )
    replicated.held.depose({VB})
    assert replicated.left() == [(1, Status.SYNC_WRITE_AMBIGUOUS)]
