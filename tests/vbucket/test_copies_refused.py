"""What one node must not do to a partition that has copies on other nodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.memory_node import MemoryNode
from vbucket.engine import lifecycle
from vbucket.engine.partition import VbState

VB = 3
OPERATIONS: dict[str, tuple[Callable[[MemoryNode], object], str]] = {
    "branch": (lambda node: lifecycle.branch(node.engine, VB, 1), "dcpctl vb branch"),
    "failover": (lambda node: lifecycle.failover(node.engine, VB), "dcpctl cluster failover"),
    "state": (
        lambda node: lifecycle.set_state(node.engine, VB, VbState.DEAD), "wanted master",
    ),
    "purge": (lambda node: lifecycle.purge(node.engine, VB, 1), "ask the partition's master"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_it_is_refused_and_names_what_to_use(name: str) -> None:
    operation, instead = OPERATIONS[name]
    node = MemoryNode()
    peer = node.connect()
    peer.hello()
    for key in (b"a", b"b", b"c"):
        peer.set(VB, key, b"v")
    node.commit()
    part = node.engine.partitions[VB]
    part.has_copies = True
    part.state = VbState.REPLICA  # a master purges; its replicas follow it
    before = part.vb_uuid, part.high_seqno, part.state, part.purge_seqno
    with pytest.raises(lifecycle.HasCopiesError, match=f"partition {VB} has copies") as caught:
        operation(node)
    assert instead in caught.value.instead
    assert not node.engine.keyspace.has_pending
    assert (part.vb_uuid, part.high_seqno, part.state, part.purge_seqno) == before
    part.has_copies = False
    part.state = VbState.ACTIVE
    operation(node)
    assert node.engine.keyspace.has_pending
