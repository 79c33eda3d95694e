"""Atomic batches (X_BATCH) over the bytes of real sessions: all of it or nothing, with one CAS."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.operation import Operation, batch_operation, delete_operation, store_operation
from dcp.session.access.rights import Rights, Role, Scope
from dcp.session.kv.documents import DocumentCommands
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame
from dcp.wire.message import BATCH_CHANGE, MUTATION_TOKEN, U32, parse_mutation
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from vbucket.engine.cut import draw_cut
from vbucket.engine.partition import VbState
from vbucket.model.ids import vbucket_of

SET, ADD, REPLACE = Opcode.SET, Opcode.ADD, Opcode.REPLACE


def place(node: MemoryNode, key: bytes) -> int:
    return vbucket_of(key, node.partitions)


def connect(node: MemoryNode, *features: int) -> Peer:
    peer = node.connect()
    peer.hello(Feature.XERROR, Feature.JSON, *features)
    return peer


def send(peer: Peer, *changes: Operation, prefix: bytes = b"") -> Frame:
    _, key, extras, value, _ = batch_operation(changes)
    vb_id = place(peer.node, key)
    return peer.ask(Opcode.X_BATCH, vb_id=vb_id, key=prefix + key, extras=extras, value=value)


def put(key: bytes, value: bytes, cas: int = 0, opcode: Opcode = SET) -> Operation:
    return store_operation(opcode, key, value, cas=cas)


KEYS = b"a b z gone there none locked dead before".split() + [b"key%d" % n for n in range(6)]


def documents(node: MemoryNode) -> dict[bytes, bytes]:
    """Return those of KEYS that are there."""
    found = {}
    for key in KEYS:
        document = node.engine.get(place(node, key), b"\0" + key)
        if not isinstance(document, int):
            found[key] = document.value
    return found


def seqnos(node: MemoryNode) -> list[int]:
    return [part.high_seqno for part in node.engine.partitions]


def test_all_changes_have_one_cas_and_their_own_seqnos() -> None:
    node = MemoryNode()
    peer = connect(node)
    for key in (b"gone", b"there"):
        peer.set(place(node, key), key, b"1")
    answer = send(
        peer, put(b"a", b"1"), put(b"b", b"2", opcode=ADD), put(b"there", b"3", opcode=REPLACE),
        delete_operation(b"gone"),
    )  # fmt: skip
    assert answer.status == 0
    assert peer.must_wait, "the answer waits for the commit"
    tokens = list(MUTATION_TOKEN.iter_unpack(answer.value))
    for key, (vb_uuid, seqno) in zip((b"a", b"b", b"there", b"gone"), tokens, strict=True):
        part = node.engine.partitions[place(node, key)]
        meta = node.engine.newest_meta(part.vb_id, b"\0" + key)
        assert meta is not None
        assert (meta.cas, meta.seqno, part.vb_uuid) == (answer.cas, seqno, vb_uuid)
    assert documents(node) == {b"a": b"1", b"b": b"2", b"there": b"3"}


def test_documents_of_one_partition_have_the_same_cas_too() -> None:
    node = MemoryNode(partitions=1)
    peer = connect(node)
    peer.set(0, b"first", b"1")
    before = node.engine.partitions[0].max_cas
    answer = send(peer, put(b"a", b"1"), put(b"b", b"2"))
    assert answer.cas > before
    assert node.engine.partitions[0].max_cas == answer.cas
    after = peer.set(0, b"last", b"1").cas
    assert after > answer.cas


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (put(b"there", b"2", opcode=ADD), Status.KEY_EEXISTS),
        (put(b"there", b"2", cas=7), Status.KEY_EEXISTS),
        (put(b"none", b"2", opcode=REPLACE), Status.KEY_ENOENT),
        (put(b"none", b"2", cas=7), Status.KEY_ENOENT),
        (delete_operation(b"none"), Status.KEY_ENOENT),
        (delete_operation(b"there", 7), Status.KEY_EEXISTS),
        (put(b"locked", b"2"), Status.LOCKED),
        (put(b"dead", b"2"), Status.NOT_MY_VBUCKET),
    ],
)
def test_if_one_cannot_be_made_none_is(change: Operation, status: Status) -> None:
    node = MemoryNode()
    peer = connect(node)
    dead = place(node, b"dead")
    assert dead not in {place(node, key) for key in (b"there", b"locked", b"none", b"a", b"z")}
    for key in (b"there", b"locked"):
        peer.set(place(node, key), key, b"1")
    peer.ask(Opcode.GET_AND_LOCK, vb_id=place(node, b"locked"), key=b"locked")
    node.engine.partitions[dead].state = VbState.DEAD
    before = documents(node), seqnos(node), [part.max_cas for part in node.engine.partitions]
    answer = send(peer, put(b"a", b"1"), change, put(b"z", b"1"))
    assert answer.status == status
    if status != Status.NOT_MY_VBUCKET:
        assert b"change 1 " in answer.value
        assert b"nothing of the batch was changed" in answer.value
    after = documents(node), seqnos(node), [part.max_cas for part in node.engine.partitions]
    assert after == before


def test_a_cas_that_fits_is_taken_and_opens_a_lock() -> None:
    node = MemoryNode()
    peer = connect(node)
    cas = peer.set(place(node, b"a"), b"a", b"1").cas
    peer.set(place(node, b"b"), b"b", b"1")
    lock = peer.ask(Opcode.GET_AND_LOCK, vb_id=place(node, b"b"), key=b"b").cas
    assert send(peer, put(b"a", b"2", cas=cas), delete_operation(b"b", lock)).status == 0
    assert documents(node) == {b"a": b"2"}
    assert send(peer, put(b"b", b"3", opcode=ADD)).status == 0


def test_xattrs_stay_as_with_single_changes() -> None:
    node = MemoryNode()
    peer = connect(node, Feature.XATTR)
    for key in (b"a", b"b"):
        vb_id = place(node, key)
        peer.set(vb_id, key, b"1")
        extras = (5).to_bytes(2, "big") + b"\x04"
        peer.ask(Opcode.SUBDOC_DICT_UPSERT, vb_id=vb_id, key=key, extras=extras, value=b"_note7")
    alone = connect(node, Feature.XATTR)
    alone.set(place(node, b"a"), b"a", b"2")
    assert send(peer, put(b"b", b"2")).status == 0
    entries = []
    for key in (b"a", b"b"):
        part = node.engine.partitions[place(node, key)]
        entry = node.engine.document_entry(part, b"\0" + key)
        assert entry is not None
        entries.append(entry[68 + len(key) :])
    assert entries[0] == entries[1]
    assert b"_note" in entries[0]


def test_expiry_counts_from_now_and_the_key_names_the_collection() -> None:
    node = MemoryNode()
    peer = connect(node, Feature.COLLECTIONS)
    assert send(peer, store_operation(SET, b"a", b"1", 3, 60), prefix=b"\0").status == 0
    meta = node.engine.newest_meta(place(node, b"a"), b"\0a")
    assert meta is not None
    assert (meta.flags, meta.expiry) == (3, node.engine.now_s + 60)
    assert send(peer, put(b"a", b"1"), prefix=b"\x09").status == Status.UNKNOWN_COLLECTION


def test_malformed_requests_change_nothing() -> None:
    node = MemoryNode()
    peer = connect(node)
    _, key, extras, value, _ = batch_operation([put(b"a", b"1"), put(b"b", b"2")])
    good = {"vb_id": place(node, key), "key": key, "extras": extras, "value": value}
    no_mode = BATCH_CHANGE.pack(9, 0, 1, 0, 0, 0, 1) + b"a1"
    twice = value[: len(value) // 2] * 2
    for wrong in (
        {"value": value[:-1]}, {"value": value + b"\0"}, {"extras": U32.pack(3)},
        {"extras": b""}, {"extras": U32.pack(0)}, {"extras": U32.pack(2**32 - 1)}, {"key": b""},
        {"value": no_mode, "extras": U32.pack(1)}, {"value": twice}, {"value": b""},
    ):  # fmt: skip
        assert peer.ask(Opcode.X_BATCH, **{**good, **wrong}).status == Status.EINVAL, wrong
    assert seqnos(node) == [0] * node.partitions
    assert peer.ask(Opcode.X_BATCH, **good).status == 0


def test_no_more_changes_are_read_than_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    node = MemoryNode()
    peer = connect(node)
    _, key, _, value, _ = batch_operation([put(b"k%d" % number, b"v") for number in range(100)])
    read = []
    kept = DocumentCommands.absolute_expiry
    monkeypatch.setattr(
        DocumentCommands, "absolute_expiry", lambda *args: (read.append(1), kept(*args))[1]
    )
    answer = peer.ask(
        Opcode.X_BATCH, vb_id=place(node, key), key=key, extras=U32.pack(2), value=value
    )
    assert (answer.status, len(read)) == (Status.EINVAL, 3)
    assert seqnos(node) == [0] * node.partitions


def test_each_change_needs_its_rights() -> None:
    node = MemoryNode()
    peer = connect(node)
    peer.state.login.rights = Rights({Role.WRITE: (Scope(prefix=b"mine"),)})
    assert send(peer, put(b"mine1", b"1"), put(b"other", b"1")).status == Status.EACCESS
    assert seqnos(node) == [0] * node.partitions
    assert send(peer, put(b"mine1", b"1"), put(b"mine2", b"1")).status == 0


def test_a_node_of_a_cluster_refuses_batches_with_what_to_do() -> None:
    node = MemoryNode()
    peer = connect(node)
    peer.joins(SimpleNamespace(arriving=()))  # type: ignore[arg-type]
    answer = send(peer, put(b"a", b"1"))
    assert answer.status == Status.NOT_SUPPORTED
    assert b"put what belongs together into one document" in answer.value
    assert seqnos(node) == [0] * node.partitions


def test_a_log_that_is_cut_at_any_byte_has_all_or_none() -> None:
    node = MemoryNode()
    peer = connect(node)
    peer.set(place(node, b"before"), b"before", b"1")
    node.commit()
    keys = [b"key%d" % n for n in range(6)]
    assert len({place(node, key) for key in keys}) > 2
    assert send(peer, *(put(key, b"value") for key in keys)).status == 0
    job = node.take()
    node.writer.append(job.group.number, job.group.payload)
    device, counts = node.device, set()
    for kept in range(len(job.group.payload) + 200):
        node.device = device
        node.crash(keep_unsynced_bytes=kept)
        found = documents(node)
        assert found.pop(b"before") == b"1"
        assert len(found) in {0, len(keys)}, f"{kept} bytes of the record: {sorted(found)}"
        counts.add(len(found))
    assert counts == {0, len(keys)}


def test_a_cut_has_all_of_a_batch_or_nothing() -> None:
    node = MemoryNode()
    peer, stream = connect(node), connect(node)
    stream.open()
    stream.control(b"x_closed_times", b"true")
    for vb_id in range(node.partitions):
        stream.stream(vb_id)
    sent = []
    for number in range(6):
        if number == 3:
            cut = draw_cut(node.engine, node.now_ns)
            stream.producer.begin_cut(cut)
        sent.append(send(peer, *(put(b"key%d" % n, b"%d" % number) for n in range(6))).cas)
    node.commit()
    before, after = [], []
    seen = before
    for frame in stream.drain():
        if frame.opcode == Opcode.DCP_CLOSED_TIME:
            seen = after
        elif frame.opcode == Opcode.DCP_MUTATION:
            seen.append((frame.cas, parse_mutation(frame).by_seqno))
    assert [cas for cas, _ in before] == sent[2:3] * 6
    assert [cas for cas, _ in after] == sent[5:] * 6


changes = st.lists(
    st.tuples(st.sampled_from([SET, ADD, REPLACE, Opcode.DELETE]), st.integers(0, 4)),
    min_size=1, max_size=4, unique_by=lambda change: change[1],
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(st.lists(changes, max_size=8), st.booleans())
def test_a_batch_leaves_what_its_changes_leave_one_by_one(
    batches: list[list[tuple[Opcode, int]]], merges: bool
) -> None:
    node, model = MemoryNode(), MemoryNode()
    peer, single = connect(node), connect(model)
    for count, batch in enumerate(batches):
        value = b"%d" % count
        made: list[Operation] = []
        for opcode, number in batch:
            key = b"key%d" % number
            is_deletion = opcode == Opcode.DELETE
            made.append(delete_operation(key) if is_deletion else put(key, value, opcode=opcode))
        before = documents(model)
        can = all(
            opcode == SET or (b"key%d" % number in before) == (opcode != ADD)
            for opcode, number in batch
        )
        assert (send(peer, *made).status == 0) == can
        if can:
            for opcode, key, extras, text, _ in made:
                vb_id = place(model, key)
                assert not single.ask(
                    opcode, vb_id=vb_id, key=key, extras=extras, value=text
                ).status
        if merges:
            node.merge()
    assert documents(node) == documents(model)
    assert seqnos(node) == seqnos(model)
    assert [p.item_count for p in node.engine.partitions] == [
        p.item_count for p in model.engine.partitions
    ]
