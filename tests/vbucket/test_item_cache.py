"""The item cache: what a read finds in it, what a change does to it, and what it may hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.memory_node import MemoryNode
from vbucket.engine.documents.item_cache import (
    GENERATION_BYTES_MAX,
    ITEM_OVERHEAD_BYTES,
    SKIPPED_MERGES,
)
from vbucket.engine.engine import ADD, REPLACE, SET, StoredDocument
from vbucket.engine.keyspace import MUTATION
from vbucket.store.records import BY_KEY_TABLE
from vbucket.store.store import StoredMeta

VB = 7
DAY_S = 86_400


def put(node: MemoryNode, key: bytes, value: bytes, *, vb_id: int = VB, expiry: int = 0) -> None:
    assert node.engine.store(SET, vb_id, key, key + value, 0, expiry, 0, 0)[0] == 0


def value_of(node: MemoryNode, key: bytes, vb_id: int = VB) -> bytes | None:
    found = node.engine.get(vb_id, key)
    return found.value if isinstance(found, StoredDocument) else None


def merged(*keys: bytes, item_cache_bytes: int = 1 << 20) -> MemoryNode:
    """A node whose store has documents, and nothing in memory."""
    node = MemoryNode(item_cache_bytes=item_cache_bytes)
    for key in keys:
        put(node, key, b"first")
    node.merge()
    for part in node.engine.partitions:
        node.engine.item_cache.clear(part)
    assert node.engine.item_cache.held_bytes == 0
    return node


def read_twice(node: MemoryNode, key: bytes) -> tuple[int, int]:
    """Return hits and misses of two reads."""
    cache = node.engine.item_cache
    hits, misses = cache.hits, cache.misses
    assert value_of(node, key) == value_of(node, key) == b"first"
    return cache.hits - hits, cache.misses - misses


def test_a_second_read_does_not_go_to_the_store() -> None:
    assert read_twice(merged(b"\0a"), b"\0a") == (1, 1)


def test_without_a_budget_every_read_goes_to_the_store() -> None:
    node = merged(b"\0a", item_cache_bytes=0)
    assert read_twice(node, b"\0a") == (0, 2)
    put(node, b"\0a", b"second")
    node.merge()
    assert node.engine.item_cache.held_bytes == 0


def test_what_was_merged_is_there_at_once() -> None:
    node = MemoryNode(item_cache_bytes=1 << 20)
    put(node, b"\0a", b"first")
    node.merge()
    assert read_twice(node, b"\0a") == (2, 0)


@pytest.mark.parametrize("in_older", [False, True])
def test_a_change_is_seen_before_and_after_its_merge(in_older: bool) -> None:
    node = merged(b"\0a")
    assert value_of(node, b"\0a") == b"first"
    part = node.engine.partitions[VB]
    if in_older:
        part.older, part.recent = part.recent, part.older
        part.older_bytes, part.recent_bytes = part.recent_bytes, part.older_bytes
    put(node, b"\0a", b"second")
    assert not part.recent
    assert not part.older, "what is superseded takes no room"
    assert value_of(node, b"\0a") == b"second"
    node.begin_merge()
    assert value_of(node, b"\0a") == b"second"
    node.end_merge()
    assert value_of(node, b"\0a") == b"second"
    node.engine.delete(VB, b"\0a", 0)
    node.merge()
    assert value_of(node, b"\0a") is None


def test_a_cached_document_gives_the_revision_for_the_next_one() -> None:
    node, cold = merged(b"\0a"), merged(b"\0a", item_cache_bytes=0)
    for each in (node, cold):
        assert value_of(each, b"\0a") == b"first"
        put(each, b"\0a", b"second")
    (entry,), (other,) = (each.engine.partitions[VB].newest.values() for each in (node, cold))
    assert entry == other, "previous seqno, revision and all"
    assert node.engine.meta(VB, b"\0a") == cold.engine.meta(VB, b"\0a")


def test_metadata_of_a_cached_document_is_that_of_the_store() -> None:
    node = merged(b"\0a")
    from_store = node.engine.meta(VB, b"\0a")
    assert value_of(node, b"\0a") == b"first"
    assert isinstance(from_store, StoredMeta)
    assert from_store.opcode == MUTATION
    assert node.engine.meta(VB, b"\0a") == from_store
    assert node.engine.store(ADD, VB, b"\0a", b"\0ax", 0, 0, 0, 0)[0] != 0
    assert read_twice(node, b"\0a") == (2, 0), "a refused change leaves it"


@pytest.mark.parametrize("change", ["add", "add after its time", "replace", "cas", "delete"])
def test_a_change_with_a_condition_asks_the_store_once(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    node = MemoryNode()
    now_s = node.now_ns // 1_000_000_000
    put(node, b"\0a", b"first", expiry=now_s + DAY_S)
    cas = node.engine.partitions[VB].max_cas
    if change == "add":
        node.engine.delete(VB, b"\0a", 0)
    node.merge()
    node.engine.begin_batch(node.now_ns + 2 * DAY_S * 10**9 * (change == "add after its time"))
    asked: list[bytes] = []
    for name in ("meta", "meta_fields"):
        monkeypatch.setattr(node.store, name, _counted(getattr(node.store, name), asked))
    if change == "delete":
        status, _, _ = node.engine.delete(VB, b"\0a", cas)
    else:
        mode = {"replace": REPLACE, "cas": SET}.get(change, ADD)
        expected = cas if change == "cas" else 0
        status, _, _ = node.engine.store(mode, VB, b"\0a", b"\0ax", 0, 0, 0, expected)
    assert (status, asked) == (0, [b"\0a"])


def _counted(ask: Callable[[int, bytes], object], asked: list[bytes]) -> object:
    def counting(vb_id: int, key: bytes) -> object:
        asked.append(key)
        return ask(vb_id, key)

    return counting


@pytest.mark.parametrize("change", ["replace", "cas", "delete"])
def test_a_change_with_a_condition_takes_out_what_it_replaces(change: str) -> None:
    node = MemoryNode(item_cache_bytes=1 << 20)
    put(node, b"\0a", b"first")
    node.merge()
    part, cas = node.engine.partitions[VB], node.engine.partitions[VB].max_cas
    assert node.engine.store(SET, VB, b"\0a", b"\0ax", 0, 0, 0, cas + 1)[0] != 0
    assert node.engine.delete(VB, b"\0a", cas + 1)[0] != 0
    assert read_twice(node, b"\0a") == (2, 0), "a refused change leaves it"
    if change == "delete":
        assert node.engine.delete(VB, b"\0a", cas)[0] == 0
    else:
        mode, expected = (REPLACE, 0) if change == "replace" else (SET, cas)
        assert node.engine.store(mode, VB, b"\0a", b"\0ax", 0, 0, 0, expected)[0] == 0
    assert not part.recent
    assert node.engine.item_cache.held_bytes == 0


def test_what_expires_in_the_cache_is_gone() -> None:
    node = MemoryNode(item_cache_bytes=1 << 20)
    now_s = node.now_ns // 1_000_000_000
    put(node, b"\0a", b"first", expiry=now_s + DAY_S)
    node.merge()
    assert value_of(node, b"\0a") == b"first"
    node.now_ns += 2 * DAY_S * 1_000_000_000
    node.engine.begin_batch(node.now_ns)
    assert value_of(node, b"\0a") is None
    node.merge()
    assert value_of(node, b"\0a") is None


def test_a_branch_brings_back_what_the_cache_no_longer_has() -> None:
    node = merged(b"\0a")
    seqno = node.engine.partitions[VB].high_seqno
    put(node, b"\0a", b"second")
    node.merge()
    assert value_of(node, b"\0a") == b"second"
    node.engine.keyspace.branch(VB, seqno)
    assert value_of(node, b"\0a") == b"first"
    node.merge()
    assert value_of(node, b"\0a") == b"first"


def test_a_branch_during_a_merge_hides_what_the_merge_brings() -> None:
    node = merged(b"\0a")
    seqno = node.engine.partitions[VB].high_seqno
    put(node, b"\0a", b"second")
    put(node, b"\0b", b"new")
    node.begin_merge()
    node.engine.keyspace.branch(VB, seqno)
    node.end_merge()
    for _ in range(2):
        assert (value_of(node, b"\0a"), value_of(node, b"\0b")) == (b"first", None)
        node.merge()


def test_emptied_partition_is_empty_once_store_is_asked_again() -> None:
    node = merged(b"\0a")
    assert value_of(node, b"\0a") == b"first"
    node.engine.keyspace.branch(VB, 0)
    put(node, b"\0b", b"new")
    node.merge()
    assert node.engine.partitions[VB].merged_seqno
    assert (value_of(node, b"\0a"), value_of(node, b"\0b")) == (None, b"new")


def test_the_budget_holds_and_what_is_read_again_stays() -> None:
    keys = [b"\0%04d" % number for number in range(1000)]
    cost = len(keys[0]) + 67 + len(keys[0]) + len(b"first") + ITEM_OVERHEAD_BYTES
    node = merged(*keys, item_cache_bytes=100 * cost)
    cache = node.engine.item_cache
    for key in keys:
        assert value_of(node, keys[0]) == value_of(node, key) == b"first"
        assert cache.held_bytes <= cache.bytes_max
    assert cache.held_bytes > 0
    assert cache.misses == len(keys), "the first one never had to be read again"


def test_partitions_take_turns() -> None:
    node = MemoryNode(partitions=32, item_cache_bytes=3000)
    vb_ids = range(20)
    for vb_id in vb_ids:
        put(node, b"\0a", b"first", vb_id=vb_id)
    node.merge()
    for _ in range(3):
        for vb_id in vb_ids:
            assert value_of(node, b"\0a", vb_id) == b"first"
    held = [vb_id for vb_id in vb_ids if node.engine.partitions[vb_id].recent]
    assert 2 < len(held) < len(vb_ids)


def test_no_dictionary_grows_without_end() -> None:
    assert GENERATION_BYTES_MAX < 16 << 20
    keys = [b"\0%04d" % number for number in range(200)]
    node = merged(*keys)
    node.engine.item_cache.resize(node.item_cache_bytes, generation_bytes_max=5000)
    part = node.engine.partitions[VB]
    for key in keys * 2:
        assert value_of(node, key) == b"first"
        assert max(part.recent_bytes, part.older_bytes) <= 5000 + 300
    for key in keys:
        put(node, key, b"second")
    node.merge()
    assert max(part.recent_bytes, part.older_bytes) <= 5000, "a merge brings no more in"
    assert {value_of(node, key) for key in keys} == {b"second"}


def test_a_document_larger_than_the_budget_passes_by() -> None:
    node = merged(b"\0a", item_cache_bytes=100)
    assert read_twice(node, b"\0a") == (0, 2)


def test_cached_document_is_served_whatever_happens_to_store() -> None:
    """It was checked when it was read."""
    node = merged(b"\0a")
    assert value_of(node, b"\0a") == b"first"
    node.env.flip(BY_KEY_TABLE, VB.to_bytes(2, "big") + b"\0a", 3)  # type: ignore[attr-defined]
    node.store.refresh()
    assert value_of(node, b"\0a") == b"first"


ROUND_KEYS = 300
PARTITIONS = 8


def written_and_merged(node: MemoryNode, first: int) -> None:
    """Write keys that are new, and merge them."""
    for number in range(first, first + ROUND_KEYS):
        put_numbered(node, number)
    node.merge()


def put_numbered(node: MemoryNode, number: int) -> None:
    """Write one of the numbered keys, which are spread over some partitions."""
    put(node, b"\0%06d" % number, b"x" * 20, vb_id=number % PARTITIONS)


def is_found(node: MemoryNode, number: int) -> bool:
    """Read one of them."""
    return value_of(node, b"\0%06d" % number, number % PARTITIONS) is not None


def small_node() -> MemoryNode:
    """A node whose cache holds the keys of about one round."""
    return MemoryNode(item_cache_bytes=1 << 17)


def test_writes_of_ever_new_keys_leave_a_full_cache() -> None:
    node = small_node()
    held = []
    for number in range(SKIPPED_MERGES + 6):
        written_and_merged(node, number * ROUND_KEYS)
        misses = node.engine.item_cache.misses
        held.append(is_found(node, number * ROUND_KEYS) and misses == node.engine.item_cache.misses)
    assert held[0], "nothing is known yet"
    skipped = held.index(False)
    assert held[skipped : skipped + SKIPPED_MERGES] == [False] * SKIPPED_MERGES
    assert held[skipped + SKIPPED_MERGES], "one merge tries again"


@pytest.mark.parametrize("use", ["read", "write"])
def test_a_full_cache_that_is_used_takes_what_is_merged(use: str) -> None:
    node = small_node()
    for number in range(2 * SKIPPED_MERGES):
        written_and_merged(node, number * ROUND_KEYS)
        assert node.engine.item_cache.held_bytes > 0
        for index in range((number + 1) * ROUND_KEYS - 100, (number + 1) * ROUND_KEYS):
            if use == "read":
                assert is_found(node, index)
            else:
                put_numbered(node, index)
    node.engine.item_cache.begin_absorbing()
    assert not node.engine.item_cache.is_skipping


def test_cache_that_holds_all_takes_unread_merged_documents() -> None:
    node = MemoryNode(item_cache_bytes=1 << 22)
    for number in range(3):
        written_and_merged(node, number * ROUND_KEYS)
    misses = node.engine.item_cache.misses
    assert all(is_found(node, number) for number in range(3 * ROUND_KEYS))
    assert node.engine.item_cache.misses == misses


def test_merge_that_is_skipped_leaves_no_older_version_in_cache() -> None:
    node = small_node()
    node.engine.item_cache.skip_merges()
    put(node, b"\0a", b"first")
    node.merge()
    assert value_of(node, b"\0a") == b"first"
    put(node, b"\0a", b"second")
    node.merge()
    assert value_of(node, b"\0a") == b"second"


def test_bytes_that_nothing_holds_do_not_stay_counted() -> None:
    """Turns cannot drop them: the rounds end all the same."""
    node = merged(b"\0a")
    assert value_of(node, b"\0a") == b"first"
    cache = node.engine.item_cache
    cache.held_bytes += 2 * cache.bytes_max
    cache.resize(cache.bytes_max)
    assert cache.held_bytes == 0
    assert not any(part.recent or part.older for part in node.engine.partitions)
    assert read_twice(node, b"\0a") == (1, 1)
