"""X_READ_VERSIONS: nodes read the versions of a range, committed ones only, and nobody else may."""

from __future__ import annotations

import pytest

from dcp.session.access.rights import EVERYTHING, FULL_RIGHTS, Rights, Role
from dcp.session.nodes.version_reads import RANGE, READ_BYTES_MAX, VersionsRead, read_answer
from dcp.wire.frame import Frame
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from vbucket.log.record import split_entries
from vbucket.model.entry import key_of, prev_seqno_of, seqno_of
from vbucket.model.ids import vbucket_of

NODE_PARTITIONS = MemoryNode().partitions
KEYS = [
    key for key in (b"k%d" % number for number in range(NODE_PARTITIONS * 20))
    if vbucket_of(key, NODE_PARTITIONS) == 0
]  # fmt: skip


@pytest.fixture
def node() -> MemoryNode:
    node = MemoryNode()
    peer = node.connect()
    for number in range(9):
        peer.set(0, KEYS[number % 4], b"v%d" % number)
    node.commit()
    return node


def of_a_node(node: MemoryNode) -> Peer:
    peer = node.connect()
    peer.state.login.rights = FULL_RIGHTS.granted(Role.REPLICATE)
    return peer


def asked(peer: Peer, first: int, last: int) -> Frame:
    return peer.ask(Opcode.X_READ_VERSIONS, vb_id=0, extras=RANGE.pack(first, last))


def read(peer: Peer, first: int, last: int) -> VersionsRead:
    return read_answer(asked(peer, first, last))


def test_a_node_reads_all_versions_of_a_range(node: MemoryNode) -> None:
    part = node.engine.partitions[0]
    for is_merged in (False, True):
        found = read(of_a_node(node), 2, 7)
        entries = split_entries(found.entries)
        assert [seqno_of(entry) for entry in entries] == [2, 3, 4, 5, 6, 7]
        assert [key_of(entry)[1:] for entry in entries[:2]] == KEYS[1:3]
        assert prev_seqno_of(entries[-1]) == 3, "replaced versions are there, too"
        assert found.failover == part.failover
        assert found.committed_seqno == 9
        if not is_merged:
            node.merge()


def test_only_what_is_committed_is_told(node: MemoryNode) -> None:
    node.connect().set(0, KEYS[5], b"v")
    peer = of_a_node(node)
    assert asked(peer, 9, 10).status == Status.ERANGE
    node.commit()
    assert asked(peer, 9, 10).status == Status.OK
    for first, last in ((0, 3), (5, 4), (11, 11)):
        assert asked(peer, first, last).status == Status.ERANGE


def test_an_answer_is_bounded(node: MemoryNode) -> None:
    peer = node.connect()
    for _ in range(4):
        peer.set(0, KEYS[4], bytes(READ_BYTES_MAX // 2))
    node.commit()
    entries = split_entries(read(of_a_node(node), 9, 13).entries)
    assert [seqno_of(entry) for entry in entries] == [9, 10, 11]


def test_clients_may_not_read_versions(node: MemoryNode) -> None:
    peer = node.connect()
    peer.state.login.rights = Rights({Role.READ: (EVERYTHING,), Role.STREAM: (EVERYTHING,)})
    assert asked(peer, 1, 2).status == Status.EACCESS


@pytest.mark.parametrize("cut", [0, 1, 5, 20])
def test_an_answer_that_is_cut_short_is_refused(node: MemoryNode, cut: int) -> None:
    answer = asked(of_a_node(node), 2, 7)
    with pytest.raises(ValueError, match=r"no answer|cut short"):
        read_answer(answer._replace(value=answer.value[:cut]))
