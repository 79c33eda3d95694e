"""Kept blocks are those that a walk through the store finds, within bounds, until it changes."""

from __future__ import annotations

import pytest

from support.memory_node import START_NS, MemoryNode
from vbucket.engine.engine import SET
from vbucket.store.block import BODY_BYTES_TARGET, WALK_BLOCKS_MAX, WALKS_MAX
from vbucket.store.store import Store, StoreView

VALUE = bytes(BODY_BYTES_TARGET // 2 + 1)
"""Large enough that each version has a block of its own."""


def node_of(vb_ids: list[int], versions: int) -> MemoryNode:
    node = MemoryNode(partitions=1 << max(vb_ids).bit_length())
    node.engine.begin_batch(START_NS)
    for vb_id in vb_ids:
        for number in range(versions):
            key = b"\0key%d" % (number % 3)
            node.engine.store(SET, vb_id, key, key + VALUE, 0, 0, 0, 0)
    node.commit()
    node.merge()
    return node


def firsts(store: StoreView, vb_id: int, start: int, end: int) -> list[int]:
    return [block.first_seqno for block in store._blocks(vb_id, start, end)]


@pytest.mark.parametrize("versions", [1, 7, WALK_BLOCKS_MAX, WALK_BLOCKS_MAX + 5])
def test_kept_blocks_are_those_of_the_store(versions: int) -> None:
    store = Store(node_of([3], versions).env)
    ranges = [(start, end) for start in range(1, versions + 1) for end in (start, versions)]
    before = [firsts(store, 3, start, end) for start, end in ranges]
    superseded = store.superseded(3, 1, versions)
    assert superseded == set(range(1, versions - 2))
    kept = store._walks.blocks(3, 1, versions)
    assert (kept is None) == (versions > WALK_BLOCKS_MAX)
    assert [firsts(store, 3, start, end) for start, end in ranges] == before


def test_a_walk_answers_for_its_own_range_only() -> None:
    store = Store(node_of([3], 9).env)
    assert store.superseded(3, 4, 6) == set()
    assert firsts(store, 3, 4, 6) == [4, 5, 6]
    assert firsts(store, 3, 3, 6) == [3, 4, 5, 6]
    assert firsts(store, 3, 4, 9) == [4, 5, 6, 7, 8, 9]


def test_the_oldest_walks_go() -> None:
    vb_ids = list(range(WALKS_MAX + 2))
    store = Store(node_of(vb_ids, 2).env)
    for vb_id in vb_ids:
        store.superseded(vb_id, 1, 2)
    kept = [vb_id for vb_id in vb_ids if store._walks.blocks(vb_id, 1, 2) is not None]
    assert kept == vb_ids[2:]


def test_a_store_that_is_read_anew_keeps_none() -> None:
    node = node_of([3], 4)
    store = Store(node.env)
    assert store.superseded(3, 1, 4) == {1}
    node.engine.store(SET, 3, b"\0key1", b"\0key1" + VALUE, 0, 0, 0, 0)
    node.commit()
    node.merge()
    store.refresh()
    assert store.superseded(3, 1, 5) == {1, 2}
    assert firsts(store, 3, 1, 5) == [1, 2, 3, 4, 5]
    store.refresh()
    assert store._walks.blocks(3, 1, 5) is None
    store.close()
