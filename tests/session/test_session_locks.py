"""GET_AND_LOCK and UNLOCK over the bytes of real sessions."""

from __future__ import annotations

import struct

import pytest

from dcp.session.kv.with_meta import META_EXTRAS
from dcp.session.text import TextSession
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer, node_for
from vbucket.engine.documents import locks
from vbucket.engine.documents.locks import LOCKED_CAS
from vbucket.engine.lifecycle import set_state
from vbucket.engine.partition import VbState
from vbucket.model.ids import vbucket_of

KEY = b"\0k"
TEXT_KEY = b"k"
SECOND_NS = 1_000_000_000


@pytest.fixture
def node(request: pytest.FixtureRequest) -> MemoryNode:
    return node_for(request)


@pytest.fixture
def vb(node: MemoryNode) -> int:
    return vbucket_of(TEXT_KEY, node.partitions)


def connect(node: MemoryNode) -> Peer:
    peer = node.connect()
    peer.hello(Feature.COLLECTIONS, Feature.MUTATION_SEQNO, Feature.XERROR, Feature.PRESERVE_TTL)
    return peer


@pytest.fixture
def holder(node: MemoryNode) -> Peer:
    return connect(node)


@pytest.fixture
def other(node: MemoryNode) -> Peer:
    return connect(node)


def lock(peer: Peer, vb: int, seconds: int | None = None) -> Frame:
    extras = b"" if seconds is None else seconds.to_bytes(4, "big")
    return peer.ask(Opcode.GET_AND_LOCK, vb_id=vb, key=KEY, extras=extras)


def unlock(peer: Peer, vb: int, cas: int) -> int:
    return peer.ask(Opcode.UNLOCK, vb_id=vb, key=KEY, cas=cas).status


def store(peer: Peer, vb: int, cas: int = 0, opcode: int = Opcode.SET) -> int:
    return peer.ask(opcode, vb_id=vb, key=KEY, value=b"w", extras=bytes(8), cas=cas).status


def seen_cas(peer: Peer, vb: int) -> int:
    return peer.ask(Opcode.GET, vb_id=vb, key=KEY).cas


def changes(cas: int) -> list[tuple[int, dict[str, int | bytes]]]:
    """Every command that changes a document that is there."""
    meta, later = (META_EXTRAS.pack(0, 0, revision, 9) for revision in (1000, 2000))
    return [
        (Opcode.SET, {"value": b"w", "extras": bytes(8), "cas": cas}),
        (Opcode.REPLACE, {"value": b"w", "extras": bytes(8), "cas": cas}),
        (Opcode.DELETE, {"cas": cas}),
        (Opcode.APPEND, {"value": b"1", "cas": cas}),
        (Opcode.PREPEND, {"value": b"1", "cas": cas}),
        (Opcode.INCREMENT, {"extras": struct.pack(">QQI", 1, 0, 0), "cas": cas}),
        (Opcode.DECREMENT, {"extras": struct.pack(">QQI", 1, 0, 0), "cas": cas}),
        (Opcode.SET_WITH_META, {"value": b"w", "extras": meta, "cas": cas}),
        (Opcode.DEL_WITH_META, {"extras": later, "cas": cas}),
    ]


def test_a_locked_document_is_changed_by_nobody_but_the_holder(
    node: MemoryNode, vb: int, holder: Peer, other: Peer
) -> None:
    for index in range(len(changes(0))):
        own_cas = holder.set(vb, KEY, b"1").cas
        found = lock(holder, vb)
        assert (found.status, found.value, len(found.extras)) == (Status.OK, b"1", 4)
        assert found.cas > own_cas
        for cas in (0, own_cas, 1):
            opcode, parts = changes(cas)[index]
            refused = other.ask(opcode, vb_id=vb, key=KEY, **parts)
            assert refused.status == Status.LOCKED, (Opcode(opcode), cas)
        opcode, parts = changes(found.cas)[index]
        assert holder.ask(opcode, vb_id=vb, key=KEY, **parts).status == Status.OK, Opcode(opcode)
        assert other.set(vb, KEY, b"2").status == Status.OK, "the change ended the lock"
        assert not node.engine.locks.held or index >= 7  # with-meta changes leave it to the time
        other.delete(vb, KEY)


def test_expiry_cannot_be_changed_and_add_finds_the_document(
    vb: int, holder: Peer, other: Peer
) -> None:
    holder.set(vb, KEY, b"v")
    lock(holder, vb)
    for opcode in (Opcode.TOUCH, Opcode.GAT):
        for expiry in (0, 10):  # 0 is the expiry that it has
            extras = expiry.to_bytes(4, "big")
            assert other.ask(opcode, vb_id=vb, key=KEY, extras=extras).status == Status.LOCKED
    assert store(other, vb, opcode=Opcode.ADD) == Status.KEY_EEXISTS


def test_readers_see_no_cas_while_a_document_is_locked(vb: int, holder: Peer, other: Peer) -> None:
    own_cas = holder.set(vb, KEY, b"v").cas
    locked = lock(holder, vb).cas
    reads = [Opcode.GET, Opcode.GETK, Opcode.GETQ, Opcode.GETKQ, Opcode.GET_META]
    assert {other.ask(opcode, vb_id=vb, key=KEY).cas for opcode in reads} == {LOCKED_CAS}
    assert seen_cas(holder, vb) == LOCKED_CAS, "the holder has it from the answer"
    assert unlock(holder, vb, locked) == Status.OK
    assert {other.ask(opcode, vb_id=vb, key=KEY).cas for opcode in reads} == {own_cas}


def test_gets_and_sets_in_a_row_look_for_locks_too(vb: int, holder: Peer, other: Peer) -> None:

    holder.set(vb, KEY, b"v")
    get = pack_request(Opcode.GET, vb_id=vb, key=KEY)
    put = pack_request(Opcode.SET, vb_id=vb, key=KEY, value=b"w", extras=bytes(8))
    lock_it = pack_request(Opcode.GET_AND_LOCK, vb_id=vb, key=KEY)
    answers = other.send(get + get + lock_it + get + get + put + put)
    assert [frame.cas == LOCKED_CAS for frame in answers[:5]] == [False] * 3 + [True] * 2
    assert [frame.status for frame in answers[5:]] == [Status.LOCKED] * 2


def test_a_lock_ends_at_its_time(node: MemoryNode, vb: int, holder: Peer, other: Peer) -> None:
    holder.set(vb, KEY, b"v")
    for asked, lasts in ((None, 15), (0, 15), (1, 1), (30, 30), (31, 15), (2**32 - 1, 15)):
        assert lock(holder, vb, asked).status == Status.OK
        node.now_ns += lasts * SECOND_NS - 1
        assert lock(other, vb).status == Status.LOCKED, asked
        node.now_ns += 1
        assert store(other, vb) == Status.OK, asked
    assert not node.engine.locks.held


def test_the_cas_of_a_lock_that_is_over_changes_nothing(
    node: MemoryNode, vb: int, holder: Peer
) -> None:
    holder.set(vb, KEY, b"v")
    cas = lock(holder, vb, 1).cas
    node.now_ns += SECOND_NS
    assert store(holder, vb, cas) == Status.KEY_EEXISTS
    assert unlock(holder, vb, cas) == Status.NOT_LOCKED


def test_no_document_gets_the_cas_of_a_lock(node: MemoryNode, vb: int) -> None:
    """The clock was set back, and the next process knows nothing of the lock."""
    holder = connect(node)
    holder.set(vb, KEY, b"v")
    node.now_ns -= 10 * SECOND_NS
    cas = lock(holder, vb).cas
    node.commit()
    node.crash()
    other = connect(node)
    assert other.set(vb, KEY, b"of another client").cas != cas
    assert store(other, vb, cas) == Status.KEY_EEXISTS


def test_unlock_takes_the_cas_of_the_lock(vb: int, holder: Peer, other: Peer) -> None:
    own_cas = holder.set(vb, KEY, b"v").cas
    assert unlock(holder, vb, own_cas) == Status.NOT_LOCKED
    cas = lock(holder, vb).cas
    assert unlock(other, vb, own_cas) == Status.LOCKED
    assert unlock(other, vb, 0) == Status.EINVAL
    assert store(other, vb) == Status.LOCKED
    assert unlock(other, vb, cas) == Status.OK
    assert unlock(holder, vb, cas) == Status.NOT_LOCKED


def test_what_is_not_there_cannot_be_locked(vb: int, holder: Peer) -> None:
    assert lock(holder, vb).status == Status.KEY_ENOENT
    assert unlock(holder, vb, 5) == Status.KEY_ENOENT
    for key, extras in ((b"", b""), (KEY, b"123"), (KEY, bytes(8))):
        asked = holder.ask(Opcode.GET_AND_LOCK, vb_id=vb, key=key, extras=extras)
        assert asked.status == Status.EINVAL


def test_a_lock_is_no_change_and_streams_do_not_see_it(
    node: MemoryNode, vb: int, holder: Peer
) -> None:
    seqno = holder.set(vb, KEY, b"v").extras[8:]
    cas = lock(holder, vb).cas
    unlock(holder, vb, cas)
    part = node.engine.partitions[vb]
    assert part.high_seqno == int.from_bytes(seqno, "big")


def test_the_answer_waits_until_the_document_is_on_disk(
    node: MemoryNode, vb: int, holder: Peer
) -> None:
    other = connect(node)
    other.set(vb, KEY, b"v")
    lock(holder, vb)
    assert holder.must_wait
    node.commit()
    assert not holder.must_wait


def test_a_branch_a_change_of_state_and_a_restart_end_locks(node: MemoryNode, vb: int) -> None:
    holder = connect(node)
    holder.set(vb, KEY, b"1")
    node.commit()
    lock(holder, vb)
    node.engine.keyspace.branch(vb, 1)  # nothing is undone, and yet it is another version
    assert store(holder, vb) == Status.OK
    lock(holder, vb)
    for state in (VbState.REPLICA, VbState.ACTIVE):
        set_state(node.engine, vb, state)
    assert store(holder, vb) == Status.OK, "another node may have been active meanwhile"
    lock(holder, vb)
    node.commit()
    node.crash()
    assert store(connect(node), vb) == Status.OK


def test_branch_to_a_locked_version_brings_no_lock_back(node: MemoryNode, vb: int) -> None:
    holder = connect(node)
    holder.set(vb, KEY, b"1")
    cas = lock(holder, vb).cas
    store(holder, vb, cas)
    lock(holder, vb)
    node.commit()
    node.engine.keyspace.branch(vb, 1)
    assert store(connect(node), vb) == Status.OK


def test_too_many_locks_are_refused_until_some_are_over(
    node: MemoryNode, vb: int, holder: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "LOCKS_MAX", 2)
    for key in (b"\0a", b"\0b", KEY):
        holder.set(vb, key, b"v")
    for key in (b"\0a", b"\0b"):
        asked = holder.ask(Opcode.GET_AND_LOCK, vb_id=vb, key=key, extras=bytes(3) + b"\x05")
        assert asked.status == Status.OK
    refused = lock(holder, vb)
    assert refused.status == Status.ETMPFAIL
    assert b"2 documents are locked" in refused.value
    node.now_ns += 5 * SECOND_NS
    assert lock(holder, vb).status == Status.OK
    assert len(node.engine.locks.held) == 1


def test_locks_of_deleted_documents_go_with_their_time(node: MemoryNode, vb: int) -> None:
    holder = connect(node)
    holder.set(vb, KEY, b"v")
    lock(holder, vb, 30)
    node.engine.delete_up_to(vb, KEY, 2**60)  # as a flush does
    assert store(holder, vb, opcode=Opcode.ADD) == Status.OK, "another version, another document"
    node.now_ns += 31 * SECOND_NS
    seen_cas(holder, vb)
    assert not node.engine.locks.held


def test_text_clients_see_locks(node: MemoryNode, vb: int, holder: Peer) -> None:
    holder.set(vb, KEY, b"1")
    lock(holder, vb)
    text = node.connect()
    session = TextSession(text.state)
    session.receive(
        b"gets k\r\nset k 0 0 1\r\n2\r\nincr k 1\r\ndelete k\r\ntouch k 5\r\n", node.now_ns
    )
    said = b"".join(text.state.answers)
    assert said.startswith(b"VALUE k 0 1 %d\r\n1\r\nEND\r\n" % LOCKED_CAS)
    assert said.count(b"SERVER_ERROR another client locked the document\r\n") == 4
