"""What sessions answer while the log has no room: changes are refused at once, reads go on."""

from __future__ import annotations

import json

import pytest

from dcp.session.state import FLUSH_PAUSE_NS
from dcp.session.text import TextSession
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from vbucket.engine.documents import read_modify_write as updates
from vbucket.engine.partition import Hold

VB = 7
WHY = "the disk is full"


def new_peer() -> tuple[MemoryNode, Peer]:
    node = MemoryNode()
    peer = node.connect()
    peer.hello(Feature.XERROR)
    return node, peer


def test_a_refusal_says_why_and_waits_for_nothing() -> None:
    node, peer = new_peer()
    peer.set(VB, b"k", b"committed")
    node.commit()
    writer = node.connect()
    writer.hello(Feature.XERROR)
    writer.set(VB, b"pending", b"v")
    node.engine.refuse_writes(WHY)
    answers = [peer.set(VB, b"k", b"new"), peer.delete(VB, b"k")]
    touch = {"vb_id": VB, "key": b"k", "extras": (2**31).to_bytes(4, "big")}
    answers += [peer.ask(Opcode.TOUCH, **touch), peer.ask(Opcode.GAT, **touch)]
    for answer in answers:
        assert answer.status == Status.ETMPFAIL
        assert json.loads(answer.value)["error"]["context"] == WHY
    assert not peer.must_wait
    assert writer.must_wait
    other = VB + 1
    assert peer.ask(Opcode.GET, vb_id=other, key=b"k").status == Status.KEY_ENOENT
    assert not peer.must_wait
    assert peer.ask(Opcode.GET, vb_id=VB, key=b"k").value == b"committed"
    assert not peer.must_wait, "the change that waits is of another key"
    assert peer.ask(Opcode.GET, vb_id=VB, key=b"pending").value == b"v"
    assert peer.must_wait, "nobody may see it yet"
    node.engine.refuse_writes("")
    assert peer.set(VB, b"k", b"new").status == Status.OK


def test_the_manifest_stays_and_says_why() -> None:
    node, peer = new_peer()
    before = node.engine.keyspace.manifest
    document = json.dumps(before.create_scope("inventory").json()).encode()
    node.engine.refuse_writes(WHY)
    refused = peer.ask(Opcode.SET_COLLECTIONS_MANIFEST, value=document)
    assert refused.status == Status.ETMPFAIL
    assert json.loads(refused.value)["error"]["context"] == WHY
    assert node.engine.keyspace.manifest is before
    assert not node.engine.keyspace.has_pending
    node.engine.refuse_writes("")
    assert peer.ask(Opcode.SET_COLLECTIONS_MANIFEST, value=document).status == Status.OK
    assert node.engine.keyspace.manifest.scope_id("inventory") is not None


def test_the_text_protocol_says_why() -> None:
    node = MemoryNode()
    peer = node.connect()
    session = TextSession(peer.state)
    node.engine.refuse_writes(WHY)
    lines = (b"set a 0 0 1", b"x", b"delete a", b"incr a 1", b"flush_all", b"get a", b"")
    session.receive(b"\r\n".join(lines), node.now_ns)
    answers = b"".join(peer.state.answers).split(b"\r\n")
    refusal = b"SERVER_ERROR " + WHY.encode()
    assert answers == [refusal, refusal, b"NOT_FOUND", refusal, b"END", b""]


def test_an_expired_document_is_gone_without_a_change() -> None:
    node, peer = new_peer()
    peer.ask(Opcode.SET, vb_id=VB, key=b"k", extras=bytes(4) + (10).to_bytes(4, "big"), value=b"v")
    node.commit()
    node.engine.refuse_writes(WHY)
    node.now_ns += 20 * 10**9
    assert peer.ask(Opcode.GET, vb_id=VB, key=b"k").status == Status.KEY_ENOENT
    assert peer.ask(Opcode.GET_META, vb_id=VB, key=b"k").status == Status.KEY_ENOENT
    assert not node.engine.keyspace.has_pending
    node.engine.refuse_writes("")
    assert peer.ask(Opcode.GET, vb_id=VB, key=b"k").status == Status.KEY_ENOENT
    assert node.engine.keyspace.has_pending, "it expires now"


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush looks at three keys a step."""
    step = updates.Flush.step
    monkeypatch.setattr(updates.Flush, "step", lambda self: step(self, 3))


def begin_flush(node: MemoryNode, peer: Peer) -> int:
    """Begin to flush ten documents; return how many are left after the first step."""
    for number in range(10):
        peer.set(VB, b"k%d" % number, b"v")
    node.commit()
    peer.session.receive(pack_request(Opcode.FLUSH), node.now_ns)
    left = node.engine.partitions[VB].item_count
    assert 0 < left < 10
    return left


@pytest.mark.usefixtures("small_steps")
def test_a_flush_under_way_is_refused_and_keeps_nobody_waiting() -> None:
    node, peer = new_peer()
    left = begin_flush(node, peer)
    node.engine.refuse_writes(WHY)
    noop = peer.send(pack_request(Opcode.NOOP))
    assert [answer.opcode for answer in noop] == [Opcode.FLUSH, Opcode.NOOP]
    assert noop[0].status == Status.ETMPFAIL
    assert json.loads(noop[0].value)["error"]["context"].startswith(f"{WHY}; some documents")
    assert node.engine.partitions[VB].item_count == left
    assert not peer.state.is_full
    node.engine.refuse_writes("")
    assert peer.ask(Opcode.FLUSH).status == Status.OK
    assert node.engine.partitions[VB].item_count == 0


@pytest.mark.usefixtures("small_steps")
def test_a_flush_under_way_waits_with_other_writers() -> None:
    node, peer = new_peer()
    left = begin_flush(node, peer)
    node.engine.let_writers_wait()
    for _ in range(3):
        peer.session.resume(node.now_ns)
        assert peer.state.is_full
        assert peer.state.pause.until_ns == node.now_ns + FLUSH_PAUSE_NS
        assert node.engine.partitions[VB].item_count == left
        node.now_ns += FLUSH_PAUSE_NS
    node.engine.refuse_writes("", Hold.STORE_BEHIND)
    while peer.state.is_full:
        peer.session.resume(node.now_ns)
    assert node.engine.partitions[VB].item_count == 0
    assert len(peer.state.answers) == 1


@pytest.mark.usefixtures("small_steps")
def test_a_flush_of_the_text_protocol_is_refused_too() -> None:
    node = MemoryNode()
    peer = node.connect()
    for number in range(10):
        peer.ask(Opcode.SET, key=b"k%d" % number, extras=bytes(8), value=b"v")
    session = TextSession(peer.state)
    session.receive(b"flush_all\r\n", node.now_ns)
    node.engine.refuse_writes(WHY)
    session.receive(b"version\r\n", node.now_ns)
    refused, version, _ = b"".join(peer.state.answers).split(b"\r\n")
    assert refused.startswith(b"SERVER_ERROR " + WHY.encode())
    assert version.startswith(b"VERSION")


def test_each_reason_to_hold_writers_ends_by_itself() -> None:
    node, peer = new_peer()
    part = node.engine.partitions[VB]
    takeover, other = object(), object()
    part.hold_writes(takeover, "a takeover catches up")
    part.hold_writes(other, "another one does")
    assert "takeover" in json.loads(peer.set(VB, b"k", b"v").value)["error"]["context"]
    node.engine.refuse_writes(WHY)
    part.release_writes(takeover)
    assert peer.set(VB, b"k", b"v").status == Status.ETMPFAIL
    node.engine.refuse_writes("")
    assert "another one" in json.loads(peer.set(VB, b"k", b"v").value)["error"]["context"]
    part.release_writes(other)
    assert peer.set(VB, b"k", b"v").status == Status.OK
