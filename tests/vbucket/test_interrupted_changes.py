"""Memory that runs out in the middle of a change: it has not happened, or the engine knows.

The engine's lists are replaced by one that cannot grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import pytest

from dcp.wire.status import Status
from support.memory_node import MemoryNode
from vbucket.engine.engine import SET, Engine
from vbucket.engine.keyspace import DELETION, MUTATION
from vbucket.engine.partition import Partition

VB = 7
KEY = b"\0k"


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


def put(engine: Engine, value: bytes) -> None:
    assert engine.store(SET, VB, KEY, KEY + value, 0, 0, 0, 0)[0] == Status.OK


class NoMemory(list[bytes]):
    """A list that cannot grow."""

    def append(self, _: bytes) -> None:
        raise MemoryError


def change_all(engine: Engine) -> Iterator[Callable[[], object]]:
    """Yield changes of every kind, each of a document that is there."""
    yield lambda: put(engine, b"x")
    yield lambda: engine.delete(VB, KEY, 0)
    yield lambda: engine.put_with_meta(DELETION, VB, KEY, KEY, 0, 0, 0, 9, 9 << 16, 0)
    yield lambda: engine.put_with_meta(MUTATION, VB, KEY, KEY + b"v", 0, 0, 0, 9, 9 << 16, 0)


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("place", ["pending", "entries"])
def test_change_that_is_cut_short_is_noticed_or_has_not_happened(
    node: MemoryNode, index: int, place: str
) -> None:
    engine = node.engine
    put(engine, b"1")
    assert engine.keyspace.broken_invariant() == ""
    part = engine.partitions[VB]
    before = (part.high_seqno, part.max_cas, part.item_count, engine.get(VB, KEY))
    if place == "pending":
        engine.keyspace.pending = NoMemory(engine.keyspace.pending)
    else:
        part.append_entry = NoMemory().append
    with pytest.raises(MemoryError):
        list(change_all(engine))[index]()
    after = (part.high_seqno, part.max_cas, part.item_count, engine.get(VB, KEY))
    if place == "pending":
        assert after == before
        assert engine.keyspace.broken_invariant() == ""
    else:
        assert (
            f"partition {VB}: seqno 2 was not applied wholly" in engine.keyspace.broken_invariant()
        )


@pytest.mark.parametrize("index", range(4))
def test_group_a_partition_cannot_note_is_not_its_last(node: MemoryNode, index: int) -> None:
    """Else the group's changes there would never be published."""
    engine = node.engine
    put(engine, b"1")
    node.commit()
    part, keyspace = engine.partitions[VB], engine.keyspace
    keyspace.touched = cast("list[Partition]", NoMemory())
    with pytest.raises(MemoryError):
        list(change_all(engine))[index]()
    assert part.last_group < keyspace.group
    assert f"partition {VB}: seqno 2 was not applied wholly" in keyspace.broken_invariant()
