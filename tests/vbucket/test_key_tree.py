"""Look-ups of keys in LMDB's pages in C: what LMDB holds, and no byte beyond the file."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.stored_bytes import PAGE_BYTES, layout_of
from vbucket.native import key_tree, new_staged
from vbucket.store.lmdb.environment_lmdb import LmdbEnv
from vbucket.store.lmdb.lmdb_file import PageFile

pytestmark = pytest.mark.skipif(
    new_staged() is None, reason="the loops in C are not built (scripts/compile)"
)

TABLE = "by_key"
ROWS = {
    b"%c%s" % (number % 7, b"%05d" % number * (1 + number % 17)): b"value %d" % number * 3
    for number in range(4000)
}
BIG = b"\x03 on pages of its own"
OTHERS = [b"\0", b"\xff" * 511, *(key[:-1] for key in ROWS), *(key + b"\0" for key in ROWS)]


@lru_cache
def written() -> tuple[bytes, int, int, int, frozenset[int]]:
    """Return a file, its last page, depth and root of a table of three levels, and its pages."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        env = LmdbEnv(store, (TABLE,), map_size_bytes=1 << 28)
        with env.write() as write:
            write.put_sorted(TABLE, sorted((ROWS | {BIG: bytes(9000)}).items()))
        env.close()
        file = PageFile(store)
        state = file.newest()
        tree = file.reader(state)._tree(TABLE)
        layout = layout_of(store)[TABLE]
        pages = frozenset(layout.branches) | frozenset(layout.leaves)
        found = (bytes(file.view), state.last_page, tree.depth, tree.root, pages)
        file.close()
        return found


def lookup(data: bytes, key: bytes) -> bytes | bool | None:
    _, last_page, depth, root, _ = written()
    tree = key_tree(memoryview(data), PAGE_BYTES, last_page, depth, root)
    assert tree is not None
    return tree.get(key)


def test_keys_are_found_as_they_are_there() -> None:
    data, last_page, depth, root, _ = written()
    assert depth == 3
    tree = key_tree(memoryview(data), PAGE_BYTES, last_page, depth, root)
    assert tree is not None
    assert {key: tree.get(key) for key in ROWS} == ROWS
    assert {tree.get(key) for key in OTHERS if key not in ROWS} == {None}
    assert tree.get(BIG) is False, "a value on other pages is for Python"


@settings(max_examples=100)
@given(data=st.data())
def test_damaged_pages_are_left_to_python_or_harmless(data: st.DataObject) -> None:
    """Whatever pages have: a value lies in the file, and an untouched way finds its key."""
    good, *_, pages = written()
    bad = bytearray(good)
    number = data.draw(st.sampled_from(sorted(pages)))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, 15) | st.integers(16, 400) | st.integers(0, PAGE_BYTES - 1))
        bad[number * PAGE_BYTES + at] = data.draw(st.sampled_from((0, 1, 2, 0x7F, 0x80, 0xFF)))
    for key in data.draw(st.lists(st.sampled_from(sorted(ROWS)), min_size=1, max_size=8)):
        value = lookup(bytes(bad), key)
        assert value is None or value is False or bytes(value) in bytes(bad)


@pytest.mark.parametrize("at", [0, 10, 12])
def test_a_page_with_a_wrong_head_is_left_to_python(at: int) -> None:
    """Its number, its type, how many nodes it has."""
    good, _, _, _, pages = written()
    bad = bytearray(good)
    for number in pages:
        bad[number * PAGE_BYTES + at] ^= 0x80 if at < 12 else 0xFF
        if at == 12:
            bad[number * PAGE_BYTES + at + 1] = 0x7F
    assert {lookup(bytes(bad), key) for key in ROWS} == {False}


def test_a_file_that_is_cut_short_is_left_to_python() -> None:
    good, *_ = written()
    assert {lookup(good[: 2 * PAGE_BYTES], key) for key in ROWS} == {False}
    assert lookup(b"", b"\0") is False


def test_an_empty_table_has_no_key() -> None:
    tree = key_tree(memoryview(bytes(PAGE_BYTES)), PAGE_BYTES, 1, 0, 2**64 - 1)
    assert tree is not None
    assert tree.get(b"\0") is None


@pytest.mark.parametrize(
    ("page_bytes", "depth"), [(0, 1), (255, 1), (1 << 16, 1), (4096, 0), (4096, 33)]
)
def test_what_is_no_tree_is_none(page_bytes: int, depth: int) -> None:
    assert key_tree(memoryview(bytes(8192)), page_bytes, 1, depth, 2) is None
