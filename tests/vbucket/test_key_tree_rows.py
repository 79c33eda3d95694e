"""Records of some buckets, read from LMDB's pages in C: those that Python finds."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keyspace_model import ModelPartition

from support.stored_bytes import PAGE_BYTES, layout_of
from vbucket.native import key_tree, new_staged
from vbucket.native.key_hashes import KeyHashes, Row, rows_of_buckets
from vbucket.store.environment import StoreDamagedError
from vbucket.store.hashes import form_of
from vbucket.store.key_record import by_key_items
from vbucket.store.lmdb.environment_lmdb import LmdbEnv
from vbucket.store.lmdb.lmdb_file import PageFile
from vbucket.store.lmdb.page_sums import SUMS_FILE_NAME
from vbucket.store.records import TABLES
from vbucket.store.store import Store

pytestmark = pytest.mark.skipif(
    new_staged() is None, reason="the loops in C are not built (scripts/compile)"
)

TABLE = "by_key"
PREFIX = b"\0\x05"
FORM = form_of(8)
STOP = PREFIX + b"\x09"


def rows_of(vb_id: int, count: int) -> list[Row]:
    """Records of documents and deletions in two collections, ascending."""
    model, newest = ModelPartition(vb_id), dict[bytes, bytes]()
    for number in range(count):
        value = None if number % 7 == 0 else b"v"
        key = b"%c%05d%s" % (8 + number % 3 // 2, number, b"k" * (number % 90))
        newest[key] = model.write(key, value)
    keys = sorted(newest)
    return by_key_items(vb_id.to_bytes(2, "big"), keys, [newest[key] for key in keys])


@lru_cache
def written() -> tuple[bytes, int, int, int, frozenset[int], tuple[Row, ...]]:
    """Return a file, its last page, depth and root of the table, its pages, and its rows."""
    rows = [row for vb_id in (4, 5, 6) for row in rows_of(vb_id, 3000)]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        env = LmdbEnv(store, (TABLE,), map_size_bytes=1 << 28)
        with env.write() as write:
            write.put_sorted(TABLE, rows)
        env.close()
        file = PageFile(store)
        state = file.newest()
        tree = file.reader(state)._tree(TABLE)
        layout = layout_of(store)[TABLE]
        pages = frozenset(layout.branches) | frozenset(layout.leaves)
        found = (bytes(file.view), state.last_page, tree.depth, tree.root, pages, tuple(rows))
        file.close()
        return found


def read(data: bytes, first: bytes, wanted: bytes, bits: int, at_once: int) -> list[Row] | None:
    """Read all records in steps; None: something is damaged."""
    _, last_page, depth, root, *_ = written()
    tree = key_tree(memoryview(data), PAGE_BYTES, last_page, depth, root)
    assert tree is not None
    found: list[Row] = []
    go_on: bytes | None = first
    while go_on is not None:
        step = tree.within(go_on, STOP, at_once, wanted, bits, *FORM)
        if step is None:
            return None
        rows, go_on = step
        found += rows
    return found


def asked(bits: int, every: int) -> bytes:
    return bytes(bucket % every == 0 for bucket in range(1 << bits))


@settings(max_examples=60)
@given(
    bits=st.integers(0, 12), every=st.integers(1, 300), at_once=st.sampled_from((1, 50, 1 << 16)),
    number=st.integers(0, 3000), end=st.sampled_from((b"", b"\0", b"\xff")),
)  # fmt: skip
def test_loop_finds_what_python_finds(
    bits: int, every: int, at_once: int, number: int, end: bytes
) -> None:
    data, *_, rows = written()
    first = PREFIX + b"\x08%05d" % number + end
    wanted = asked(bits, every)
    expected = [row for row in rows if first <= row[0] < STOP]
    assert read(data, first, wanted, bits, at_once) == rows_of_buckets(expected, FORM, bits, wanted)


@settings(max_examples=30)
@given(bits=st.integers(0, 12), at_once=st.sampled_from((1, 700, 1 << 16)))
def test_loop_adds_the_hashes_that_python_adds(bits: int, at_once: int) -> None:
    data, last_page, depth, root, _, rows = written()
    tree = key_tree(memoryview(data), PAGE_BYTES, last_page, depth, root)
    assert tree is not None
    wanted, found = KeyHashes(bits), KeyHashes(bits)
    wanted.change([], [row for row in rows if row[0].startswith(PREFIX + b"\x08")], FORM)
    go_on: bytes | None = PREFIX + b"\x08"
    while go_on is not None:
        step = tree.add_hashes(go_on, STOP, at_once, found.sums, bits, *FORM)
        assert step is not None
        count, go_on = step
        found.documents += count
    assert (found.documents, found.sums) == (wanted.documents, wanted.sums)
    with pytest.raises(ValueError, match="8 bytes for each bucket"):
        tree.add_hashes(PREFIX, STOP, 1, bytearray(3), bits, *FORM)


def test_an_answer_is_bounded() -> None:
    data, last_page, depth, root, _, rows = written()
    tree = key_tree(memoryview(data), PAGE_BYTES, last_page, depth, root)
    assert tree is not None
    step = tree.within(b"\0\4", b"\0\7", 1 << 16, b"\1", 0, 2, b"", 2, 18, -1)
    assert step is not None
    found, go_on = step
    assert found == list(rows[:4096])
    assert go_on == rows[4096][0]


@settings(max_examples=100)
@given(data=st.data())
def test_damage_is_left_to_python(data: st.DataObject) -> None:
    """A record that is not what was written is never told, whatever the pages have."""
    good, *_, pages, rows = written()
    bad = bytearray(good)
    number = data.draw(st.sampled_from(sorted(pages)))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, 15) | st.integers(16, 400) | st.integers(0, PAGE_BYTES - 1))
        bad[number * PAGE_BYTES + at] = data.draw(st.sampled_from((0, 1, 2, 0x7F, 0x80, 0xFF)))
    found = read(bytes(bad), PREFIX + b"\x08", b"\1", 0, 1 << 16)
    assert found is None or set(found) <= set(rows)


def test_a_damaged_record_is_named_by_python(tmp_path: Path) -> None:
    """The loop leaves it to Python, also if no bucket that is asked for has it."""
    rows = rows_of(5, 300)
    env = LmdbEnv(tmp_path / "store", TABLES, map_size_bytes=1 << 28)
    key, record = rows[100]
    with env.write() as write:
        write.put_sorted(TABLE, [*rows[:100], (key, record[:-1] + b"?"), *rows[101:]])
    store = Store(env)
    assert store.key_tree() is not None
    with pytest.raises(StoreDamagedError, match="does not match its checksum"):
        store.rows_within(5, b"\x08", FORM, 4, bytes(16))
    store.close()
    env.close()


@pytest.mark.parametrize(
    ("bits", "wanted"), [(13, bytes(8192)), (2, bytes(3)), (0, b"")]
)  # fmt: skip
def test_buckets_that_do_not_fit_are_refused(bits: int, wanted: bytes) -> None:
    with pytest.raises(ValueError, match="a byte for each bucket"):
        read(written()[0], PREFIX, wanted, bits, 1)


@pytest.mark.parametrize("has_sums", [True, False])
def test_rows_of_keys_and_that_others_have_none(tmp_path: Path, has_sums: bool) -> None:
    """With checksums every key is proven to be there or not; without them, those between others."""
    env = LmdbEnv(tmp_path / "store", TABLES, map_size_bytes=1 << 28)
    rows = rows_of(5, 3_000)
    with env.write() as write:
        write.put_sorted(TABLE, rows)
    if not has_sums:
        env.close()
        (tmp_path / "store" / SUMS_FILE_NAME).write_bytes(b"")
        file = PageFile(tmp_path / "store")
        found = file.reader(file.newest()).tree_in_c(TABLE)
    else:
        store = Store(env)
        found = store.key_tree()
    assert found is not None
    there = [key[2:] for key, _ in rows]
    absent = [key + b"x" for key in there]
    keys = sorted([*there, *absent, b"\0", b"\xff"])
    some, unproven = found.rows_of(PREFIX, keys)
    assert some == rows
    assert set(unproven) <= set(absent) | {b"\0", b"\xff"}
    assert bool(unproven) != has_sums
    assert len(unproven) < len(keys) / 20
    if has_sums:
        assert store.rows_of(5, keys) == rows
        data = env._file.view
        leaf = max(layout_of(tmp_path / "store")[TABLE].leaves)
        assert len(data) > leaf * PAGE_BYTES
        with (tmp_path / "store" / "data.mdb").open("r+b") as damaged:
            damaged.seek(leaf * PAGE_BYTES + 3_000)
            damaged.write(b"damage")
        store.refresh()
        with pytest.raises(StoreDamagedError):
            store.rows_of(5, [absent[-1]])
        store.close()
        env.close()
    with pytest.raises(ValueError, match="this is no key"):
        found.rows_of(PREFIX, [bytes(600)])
