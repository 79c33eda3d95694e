"""Every answer waits until what it observed is committed; no answer waits for anything else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dcp.wire.frame import pack_request
from dcp.wire.message import VB_SEQNO
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer

VB, OTHER = 7, 8


def connected(node: MemoryNode) -> Peer:
    peer = node.connect()
    peer.hello()
    return peer


@pytest.fixture
def node() -> MemoryNode:
    """A node with a committed document in each of two partitions."""
    node = MemoryNode()
    peer = connected(node)
    peer.set(VB, b"k", b"v")
    peer.set(OTHER, b"k", b"v")
    node.commit()
    return node


def dcp(node: MemoryNode) -> Peer:
    peer = connected(node)
    peer.open(b"reader")
    return peer


def uuid_of(node: MemoryNode) -> int:
    return node.engine.partitions[VB].vb_uuid


READS: dict[str, Callable[[MemoryNode], tuple[Peer, int]]] = {}
"""What can be asked about a partition, and the opcode whose answer it is."""


def read(function: Callable[[Peer, MemoryNode], object]) -> None:
    def run(node: MemoryNode) -> tuple[Peer, int]:
        peer = dcp(node)
        function(peer, node)
        return peer, peer.state.wait_group

    READS[function.__name__] = run


@read
def get_of_a_hit(peer: Peer, _: MemoryNode) -> None:
    peer.ask(Opcode.GET, vb_id=VB, key=b"k")


@read
def quiet_get_of_a_hit(peer: Peer, _: MemoryNode) -> None:
    assert len(peer.send(pack_request(Opcode.GETQ, vb_id=VB, key=b"k"))) == 1


@read
def get_meta(peer: Peer, _: MemoryNode) -> None:
    assert peer.ask(Opcode.GET_META, vb_id=VB, key=b"k").status == Status.OK


@read
def add_of_what_is_there(peer: Peer, _: MemoryNode) -> None:
    answer = peer.ask(Opcode.ADD, vb_id=VB, key=b"k", extras=bytes(8))
    assert answer.status == Status.KEY_EEXISTS


@read
def replace_of_what_is_missing(peer: Peer, _: MemoryNode) -> None:
    answer = peer.ask(Opcode.REPLACE, vb_id=VB, key=b"missing", extras=bytes(8))
    assert answer.status == Status.KEY_ENOENT


@read
def cas_mismatch_of_a_set(peer: Peer, _: MemoryNode) -> None:
    answer = peer.ask(Opcode.SET, vb_id=VB, key=b"k", extras=bytes(8), cas=1)
    assert answer.status == Status.KEY_EEXISTS


@read
def cas_mismatch_of_a_delete(peer: Peer, _: MemoryNode) -> None:
    assert peer.ask(Opcode.DELETE, vb_id=VB, key=b"k", cas=1).status == Status.KEY_EEXISTS


@read
def delete_of_what_is_missing(peer: Peer, _: MemoryNode) -> None:
    assert peer.delete(VB, b"missing").status == Status.KEY_ENOENT


@read
def failover_log(peer: Peer, _: MemoryNode) -> None:
    peer.ask(Opcode.GET_FAILOVER_LOG, vb_id=VB)


@read
def dcp_failover_log(peer: Peer, _: MemoryNode) -> None:
    peer.ask(Opcode.DCP_GET_FAILOVER_LOG, vb_id=VB)


@read
def observe_seqno(peer: Peer, node: MemoryNode) -> None:
    answer = peer.ask(Opcode.OBSERVE_SEQNO, vb_id=VB, value=uuid_of(node).to_bytes(8, "big"))
    assert answer.status == Status.OK


@read
def observe_seqno_of_an_unknown_version(peer: Peer, _: MemoryNode) -> None:
    answer = peer.ask(Opcode.OBSERVE_SEQNO, vb_id=VB, value=bytes(7) + b"\1")
    assert answer.status == Status.KEY_ENOENT


@read
def stream_request(peer: Peer, _: MemoryNode) -> None:
    assert peer.stream(VB).status == Status.OK


@read
def stream_request_that_must_roll_back(peer: Peer, _: MemoryNode) -> None:
    assert peer.stream(VB, 1, uuid=1).status == Status.ROLLBACK


@read
def stream_request_from_latest_that_is_out_of_range(peer: Peer, node: MemoryNode) -> None:
    high = node.engine.partitions[VB].committed_seqno
    assert peer.stream(VB, end=high - 1, flags=0x40).status == Status.ERANGE


@pytest.mark.parametrize("name", READS)
def test_an_answer_about_committed_state_does_not_wait(node: MemoryNode, name: str) -> None:
    connected(node).set(OTHER, b"k", b"uncommitted")
    peer, _ = READS[name](node)
    assert not peer.must_wait


UNCOMMITTED: dict[str, Callable[[MemoryNode], object]] = {
    "write": lambda node: connected(node).set(VB, b"k", b"new"),
    "delete": lambda node: (
        connected(node).delete(VB, b"k"),
        connected(node).set(VB, b"k", b"again"),
    ),
    "branch": lambda node: node.engine.keyspace.branch(VB, node.engine.partitions[VB].high_seqno),
}


@pytest.mark.parametrize("change", UNCOMMITTED)
@pytest.mark.parametrize("name", READS)
def test_answer_about_uncommitted_changes_waits_for_them(
    node: MemoryNode, name: str, change: str
) -> None:
    UNCOMMITTED[change](node)
    peer, wait_group = READS[name](node)
    assert peer.must_wait
    assert wait_group == node.engine.keyspace.group
    node.commit()
    assert not peer.must_wait


@pytest.mark.parametrize("name", READS)
def test_an_answer_waits_for_the_group_that_is_being_written(node: MemoryNode, name: str) -> None:
    connected(node).set(VB, b"k", b"new")
    group = node.take()
    connected(node).set(OTHER, b"k", b"in the next group")
    peer, wait_group = READS[name](node)
    assert wait_group == group.group.number
    node.finish(group)
    assert not peer.must_wait


@pytest.mark.parametrize(
    "opcode", [Opcode.SET, Opcode.SETQ, Opcode.REPLACE, Opcode.DELETE, Opcode.DELETEQ]
)
def test_a_write_waits_for_its_own_group(node: MemoryNode, opcode: int) -> None:
    peer = connected(node)
    extras = b"" if opcode in {Opcode.DELETE, Opcode.DELETEQ} else bytes(8)
    peer.send(pack_request(opcode, vb_id=VB, key=b"k", extras=extras))
    assert peer.must_wait
    assert peer.state.wait_group == node.engine.keyspace.group
    node.commit()
    assert not peer.must_wait


def test_a_miss_after_an_uncommitted_delete_waits(node: MemoryNode) -> None:
    connected(node).delete(VB, b"k")
    peer = connected(node)
    assert peer.ask(Opcode.GET, vb_id=VB, key=b"k").status == Status.KEY_ENOENT
    assert peer.must_wait


@pytest.mark.parametrize("opcode", [Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GET_META])
@pytest.mark.parametrize("key", [b"k", b"missing"])
def test_a_read_waits_for_no_change_of_another_key(
    node: MemoryNode, opcode: int, key: bytes
) -> None:
    connected(node).set(VB, b"other", b"uncommitted")
    peer = connected(node)
    peer.send(pack_request(opcode, vb_id=VB, key=key))
    assert not peer.must_wait


def test_read_waits_for_the_version_it_shows_and_no_later_one(
    node: MemoryNode,
) -> None:
    connected(node).set(VB, b"k", b"new")
    group = node.take()
    connected(node).set(VB, b"other", b"in the next group")
    peer = connected(node)
    peer.ask(Opcode.GET, vb_id=VB, key=b"k")
    assert peer.state.wait_group == group.group.number
    node.finish(group)
    assert not peer.must_wait


def test_a_miss_after_an_uncommitted_branch_waits(node: MemoryNode) -> None:
    """A crash would bring the document back."""
    node.engine.keyspace.branch(VB, 0)
    peer = connected(node)
    assert peer.ask(Opcode.GET, vb_id=VB, key=b"k").status == Status.KEY_ENOENT
    assert peer.must_wait
    node.commit()
    assert not peer.must_wait


def test_a_miss_by_expiry_waits_for_the_deletion(node: MemoryNode) -> None:
    writer, reader = connected(node), connected(node)
    extras = bytes(4) + (10).to_bytes(4, "big")
    writer.ask(Opcode.SET, vb_id=VB, key=b"short", extras=extras)
    node.commit()
    node.now_ns += 10_000_000_000
    reader.send(pack_request(Opcode.GETQ, vb_id=VB, key=b"short"))
    assert reader.must_wait


def test_what_does_not_tell_of_documents_never_waits(node: MemoryNode) -> None:
    connected(node).set(VB, b"k", b"uncommitted")
    peer = dcp(node)
    peer.ask(Opcode.NOOP)
    peer.ask(Opcode.GET_CLUSTER_CONFIG)
    peer.ask(Opcode.GET_ALL_VB_SEQNOS)
    peer.ask(Opcode.GET, vb_id=5000, key=b"k")
    assert not peer.must_wait


def test_all_vb_seqnos_tell_committed_seqnos_only(node: MemoryNode) -> None:
    connected(node).set(VB, b"k", b"uncommitted")
    peer = dcp(node)
    seqnos = dict(VB_SEQNO.iter_unpack(peer.ask(Opcode.GET_ALL_VB_SEQNOS).value))
    assert seqnos[VB] == 1
    node.commit()
    seqnos = dict(VB_SEQNO.iter_unpack(peer.ask(Opcode.GET_ALL_VB_SEQNOS).value))
    assert seqnos[VB] == 2


def test_all_vb_seqnos_wait_for_an_uncommitted_branch(node: MemoryNode) -> None:
    node.engine.keyspace.branch(VB, 0)
    peer = dcp(node)
    seqnos = dict(VB_SEQNO.iter_unpack(peer.ask(Opcode.GET_ALL_VB_SEQNOS).value))
    assert seqnos[VB] == 0
    assert peer.must_wait
    node.commit()
    assert not peer.must_wait
