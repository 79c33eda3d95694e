"""Streams from a copy that is not the master: what it serves, to whom, and when they end."""

from __future__ import annotations

import pytest

from dcp.wire.feature import Feature
from dcp.wire.message import EndReason
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from vbucket.engine.leadership import begin_snapshot
from vbucket.engine.partition import VbState
from vbucket.model.control import SnapshotWindow

VB = 3
KEY = b"\0k"
ACTIVE_ONLY = 0x10


@pytest.fixture
def node() -> MemoryNode:
    """A node that has a copy with four changes, of which it knows three as committed."""
    node = MemoryNode()
    peer = connect(node)
    for number in range(4):
        peer.set(VB, KEY + b"%d" % number, b"v")
    node.commit()
    part = node.engine.partitions[VB]
    part.state, part.has_copies = VbState.REPLICA, True
    part.may_send_back = False
    part.committed_seqno = 3
    return node


def connect(node: MemoryNode) -> Peer:
    peer = node.connect()
    peer.hello(Feature.JSON, Feature.XERROR, Feature.COLLECTIONS)
    return peer


def dcp(node: MemoryNode, *, from_replicas: bool = True) -> Peer:
    peer = connect(node)
    peer.open()
    peer.control(b"enable_noop", b"true")
    peer.control(b"x_version_log", b"true")
    if from_replicas:
        assert peer.control(b"x_from_replicas", b"true").status == Status.OK
    return peer


def mutations(peer: Peer) -> int:
    return sum(frame.opcode == Opcode.DCP_MUTATION for frame in [*peer.pump(), *peer.pump()])


def ends(peer: Peer) -> list[int]:
    return [
        int.from_bytes(frame.extras, "big")
        for frame in [*peer.pump(), *peer.pump()]
        if frame.opcode == Opcode.DCP_STREAM_END
    ]


def test_it_sends_what_is_committed_to_those_who_asked(node: MemoryNode) -> None:
    peer = dcp(node)
    assert peer.stream(VB).status == Status.OK
    assert mutations(peer) == 3
    assert dcp(node, from_replicas=False).stream(VB).status == Status.NOT_MY_VBUCKET
    assert dcp(node).stream(VB, flags=ACTIVE_ONLY).status == Status.NOT_MY_VBUCKET


def test_it_sends_nobody_back(node: MemoryNode) -> None:
    assert dcp(node).stream(VB, 2, uuid=99).status == Status.ETMPFAIL, "another history"
    uuid = node.engine.partitions[VB].vb_uuid
    assert dcp(node).stream(VB, 9, uuid=uuid).status == Status.ETMPFAIL, "this copy is behind"
    part = node.engine.partitions[VB]
    part.state, part.may_send_back = VbState.ACTIVE, True
    assert dcp(node).stream(VB, 2, uuid=99).status == Status.ROLLBACK, "of a master"


def test_a_copy_that_is_filled_serves_nobody(node: MemoryNode) -> None:
    peer = dcp(node)
    assert peer.stream(VB).status == Status.OK
    assert mutations(peer) == 3
    begin_snapshot(node.engine, VB, SnapshotWindow(4, 9, 0))
    assert dcp(node).stream(VB).status == Status.ETMPFAIL
    node.engine.partitions[VB].committed_seqno = 4
    node.hub.committed([VB])
    assert ends(peer) == [EndReason.STATE_CHANGED], "and nothing of the snapshot's part"


def test_a_copy_that_is_cut_back_ends_its_streams(node: MemoryNode) -> None:
    peer = dcp(node)
    assert peer.stream(VB).status == Status.OK
    assert mutations(peer) == 3
    node.engine.partitions[VB].high_seqno = 1
    node.hub.committed([VB])
    assert ends(peer) == [EndReason.STATE_CHANGED]
