"""A small part of the fuzzing that `scripts/soak fuzz` does at length."""

from __future__ import annotations

import pytest

from dcp.session.access.rights import MESSAGES_TO_CONSUMERS
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from tests.soak.fuzz import PARTS, STRANGE_PARTITIONS, USED_PARTITIONS, request_of, run_round
from vbucket.engine.partition import VbState
from vbucket.model.ids import NUM_VBUCKETS


@pytest.mark.parametrize("seed", range(0, 60, 20))
def test_garbage_is_answered_or_closes_the_connection(seed: int) -> None:
    played = [run_round(number) for number in range(seed, seed + 20)]
    assert sum(one.frames for one in played) > 10_000
    assert any(one.closed for one in played), "some of it must have been beyond answering"


@pytest.mark.parametrize("state", VbState)
@pytest.mark.parametrize("kind", ["plain", "hello", "collections", "dcp"])
def test_every_opcode_at_strange_partitions_is_answered(kind: str, state: VbState) -> None:
    node = MemoryNode(partitions=NUM_VBUCKETS)
    for vb_id in (*USED_PARTITIONS, 1023):
        node.engine.partitions[vb_id].state = state
    peer = strange_peer(node, kind)
    for opcode in range(256):
        for vb_id in STRANGE_PARTITIONS:
            answers = peer.send(request_of(opcode, vb_id, 1) + pack_request(Opcode.NOOP, opaque=2))
            if peer.state.is_closing:
                assert peer.state.close_reason
                assert opcode in MAY_CLOSE
                if peer.state.producer is not None:
                    peer.producer.close()
                peer = strange_peer(node, kind)
                continue
            assert (answers[-1].opcode, answers[-1].opaque) == (Opcode.NOOP, 2), hex(opcode)
            is_refused = opcode in DOCUMENT_COMMANDS and kind != "plain"
            if vb_id >= NUM_VBUCKETS and (is_refused or opcode in HISTORY_COMMANDS):
                assert [(a.status, a.opaque) for a in answers[:-1]] == [(Status.NOT_MY_VBUCKET, 1)]


def strange_peer(node: MemoryNode, kind: str) -> Peer:
    peer = node.connect()
    if kind == "plain":
        return peer
    peer.hello(*([Feature.COLLECTIONS, Feature.XERROR] if kind == "collections" else []))
    if kind == "dcp":
        peer.open(b"strange")
    return peer


MAY_CLOSE = {Opcode.QUIT, Opcode.QUITQ, Opcode.SASL_AUTH, *MESSAGES_TO_CONSUMERS}
HISTORY_COMMANDS = {
    Opcode.GET_FAILOVER_LOG, Opcode.DCP_GET_FAILOVER_LOG, Opcode.OBSERVE_SEQNO,
}  # fmt: skip
DOCUMENT_COMMANDS = {opcode for opcode, (_, key, _) in PARTS.items() if key}


@pytest.mark.parametrize("features", [None, [], [Feature.COLLECTIONS, Feature.XERROR]])
@pytest.mark.parametrize(
    "opcode",
    [
        Opcode.GET_FAILOVER_LOG, Opcode.DCP_GET_FAILOVER_LOG, Opcode.OBSERVE_SEQNO,
        Opcode.RANGE_SCAN_CREATE, Opcode.DCP_STREAM_REQ,
    ],
)  # fmt: skip
def test_a_partition_beyond_the_last_is_not_my_vbucket(
    opcode: Opcode, features: list[int] | None
) -> None:
    peer = MemoryNode().connect()
    if features is not None:
        peer.hello(*features)
    if opcode == Opcode.DCP_STREAM_REQ:
        peer.open(b"name")
    for vb_id in (16, 1024, 65_535):
        behind = pack_request(Opcode.NOOP, opaque=2)
        refused, noop = peer.send(request_of(opcode, vb_id, 1) + behind)
        assert (refused.status, refused.opaque) == (Status.NOT_MY_VBUCKET, 1)
        assert (noop.status, noop.opaque) == (Status.OK, 2)
