"""The live tail of the console: what it shows, to whom, how much of it, and rollbacks."""

from __future__ import annotations

import pytest

from dcp.server.operate import change_tail
from dcp.server.operate.change_tail import ChangeTail, TailFilter, TailStep
from dcp.session.access.rights import FULL_RIGHTS, Rights, Role, Scope
from support.memory_node import MemoryNode, Peer

KEY = b"app:1"
VB = 1


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode(partitions=4)


def tail_of(
    node: MemoryNode, wanted: TailFilter | None = None, rights: Rights = FULL_RIGHTS
) -> ChangeTail:
    return ChangeTail(node.engine, rights, wanted or TailFilter(), 100.0)


def write(node: MemoryNode, peer: Peer, *keys: bytes) -> None:
    for key in keys:
        peer.set(VB, key, b'{"n": 1}')
    node.commit()


def keys_of(step: TailStep) -> list[str]:
    return [row.key for row in step.changes]


def test_it_shows_what_is_committed_after_it_began(node: MemoryNode) -> None:
    peer = node.connect()
    write(node, peer, b"before")
    tail = tail_of(node)
    peer.set(VB, KEY, b'{"n": 2}')
    assert keys_of(tail.step(101.0)) == []  # not committed
    node.commit()
    step = tail.step(102.0)
    (row,) = step.changes
    assert (row.kind, row.key, row.value, row.vb) == ("set", "app:1", '{"n": 2}', VB)
    assert (row.collection, row.seqno, step.passed, step.seconds) == ("_default._default", 1, 1, 1)
    peer.delete(VB, KEY)
    node.commit()
    (row,) = tail.step(103.0).changes
    assert (row.kind, row.value) == ("deleted", None)
    assert tail.step(104.0).passed == 0


def test_filters_and_rights_leave_changes_out_but_count_them(node: MemoryNode) -> None:
    peer = node.connect()
    only_deleted = tail_of(node, TailFilter(kinds=frozenset({"deleted"})))
    with_prefix = tail_of(node, TailFilter(prefix=b"app:"))
    elsewhere = tail_of(node, TailFilter(collection_id=9))
    limited = tail_of(node, rights=Rights({Role.READ: (Scope(b"other:"),)}))
    write(node, peer, KEY, b"other:1")
    assert keys_of(only_deleted.step(101.0)) == []
    assert keys_of(with_prefix.step(101.0)) == ["app:1"]
    step = elsewhere.step(101.0)
    assert (step.changes, step.passed) == ([], 2)
    assert keys_of(limited.step(101.0)) == ["other:1"]


def test_a_branch_is_a_rollback_if_shown_changes_are_gone(node: MemoryNode) -> None:
    peer = node.connect()
    tail = tail_of(node)
    for number in range(4):
        peer.set(VB, KEY, b"%d" % number)
    node.commit()
    assert tail.step(101.0).passed == 4
    late = tail_of(node)
    node.engine.keyspace.branch(VB, 1)
    node.commit()
    peer.set(VB, KEY, b"new")
    node.commit()
    step = tail.step(102.0)
    (version,) = step.versions
    assert (version.vb, version.seqno, version.undone) == (VB, 1, 3)
    assert [(row.seqno, row.value) for row in step.changes] == [(2, "new")]
    assert late.step(102.0).versions[0].undone == 3
    assert tail.step(103.0).versions == []


def test_more_than_a_person_can_read_is_counted(node: MemoryNode) -> None:
    peer = node.connect()
    tail = tail_of(node)
    for number in range(change_tail.ROWS_MAX + 30):
        peer.set(VB, KEY, b"%d" % number)
    node.commit()
    step = tail.step(101.0)
    assert len(step.changes) == change_tail.ROWS_MAX
    assert step.changes[-1].value == str(change_tail.ROWS_MAX + 29)  # the newest are shown
    assert (step.left_out, step.passed) == (30, change_tail.ROWS_MAX + 30)
