"""The checksums beside LMDB's file: right after each commit, after a crash before they were
written, and without the loops in C; an outdated page stays one when a commit replaces it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.stored_bytes import PAGE_BYTES, layout_of
from vbucket.native import new_staged
from vbucket.store.environment import StoreDamagedError, WriteLostError
from vbucket.store.lmdb import lmdb_pages, sums_writer
from vbucket.store.lmdb.environment_lmdb import LmdbEnv, LmdbPageReader
from vbucket.store.lmdb.lmdb_file import PageFile
from vbucket.store.lmdb.page_sums import ENTRIES_AT, SUMS_FILE_NAME
from vbucket.store.lmdb.sums_writer import SumsWriter

TABLES = ("by_key", "by_seqno")
KEYS = st.integers(0, 400).map(lambda number: b"%05d" % number * 12)
CHANGES = st.lists(
    st.tuples(st.sampled_from(TABLES), KEYS, st.none() | st.sampled_from((9, 700, 3_000, 9_000))),
    max_size=40,
)


def opened(folder: Path) -> LmdbEnv:
    return LmdbEnv(folder, TABLES, map_size_bytes=1 << 27)


def change(env: LmdbEnv, changes: list[tuple[str, bytes, int | None]], fill: int) -> None:
    with env.write() as write:
        for table, key, size in changes:
            if size is None:
                write.delete(table, key)
            else:
                write.put(table, key, bytes([fill]) * size)


def checked_rows(folder: Path) -> int:
    """Read every page of a store that nobody has open; return the rows."""
    reader = LmdbPageReader(folder, TABLES)
    rows = sum(len(list(reader.range(table, b"\0"))) for table in TABLES)
    list(reader.free_pages())
    reader.close()
    return rows


@settings(max_examples=25)
@given(transactions=st.lists(CHANGES, min_size=1, max_size=6), crash=st.integers(0, 6))
def test_they_are_right_after_each_commit_and_after_a_crash(
    tmp_path_factory: pytest.TempPathFactory,
    transactions: list[list[tuple[str, bytes, int | None]]],
    crash: int,
) -> None:
    folder = tmp_path_factory.mktemp("sums") / "store"
    env = opened(folder)
    first = [(table, b"%05d" % n * 12, 20) for table in TABLES for n in range(0, 400, 3)]
    for number, changes in enumerate([first, *transactions]):
        before = (folder / SUMS_FILE_NAME).read_bytes()
        change(env, changes, number)
        if number == crash:
            env.close()
            (folder / SUMS_FILE_NAME).write_bytes(before)
            rows = checked_rows(folder)
            env = opened(folder)
            assert checked_rows(folder) == rows
        # What was written step by step is what all pages have.
        step_by_step = (folder / SUMS_FILE_NAME).read_bytes()
        file = PageFile(folder)
        state = file.newest()
        there = [page for part in sums_writer._Comparison(file.view, state.page_bytes).states(
            None, state)[0] for page in part.pages]  # fmt: skip
        whole = folder.parent / "whole"
        shutil.rmtree(whole, ignore_errors=True)
        whole.mkdir()
        writer = SumsWriter(whole)
        assert writer.follow(file.view, None, state) == []
        writer.close()
        expected = memoryview((whole / SUMS_FILE_NAME).read_bytes()).cast("I")
        found = memoryview(step_by_step).cast("I")
        assert found[2:4] == expected[2:4], "the transaction"
        for page in there:
            assert found[ENTRIES_AT + page] == expected[ENTRIES_AT + page], page
        file.close()
    env.close()


def aged(folder: Path) -> tuple[int, set[bytes]]:
    """Make a store with one outdated leaf; return its page and keys."""
    env = opened(folder)
    keys = [b"%05d" % n * 12 for n in range(2_000)]
    older = []
    for number in range(5):
        change(env, [("by_key", key, 20) for key in keys[:: 1 + number]], number)
        older.append((folder / "data.mdb").read_bytes())
    env.close()
    leaves = layout_of(folder)["by_key"].leaves
    data = bytearray((folder / "data.mdb").read_bytes())
    for page, there in leaves.items():
        start = page * PAGE_BYTES
        for then in older[:-1]:
            old, now = then[start : start + PAGE_BYTES], bytes(data[start : start + PAGE_BYTES])
            if old[:12] == now[:12] and old != now and len(old) == PAGE_BYTES:
                data[start : start + PAGE_BYTES] = old
                (folder / "data.mdb").write_bytes(data)
                return page, there
    pytest.fail("no page was written twice")


def write_by(env: LmdbEnv, act: str, key: bytes) -> None:
    with env.write() as write:
        if act == "put":
            write.put("by_key", key, b"new")
        elif act == "put_sorted":
            write.put_sorted("by_key", [(key, b"new")])
        else:
            write.delete("by_key", key)


@pytest.mark.skipif(new_staged() is None, reason="the loops in C are not built (scripts/compile)")
@pytest.mark.parametrize("is_late", [False, True])
def test_a_look_up_in_c_has_the_checksums_of_new_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    """Their file has grown since it was opened, or grows when the look-ups have begun."""
    monkeypatch.setattr(sums_writer, "_GROWTH_BYTES", 64)
    env = opened(tmp_path / "store")
    keys = [b"%05d" % number for number in range(3000)]
    change(env, [("by_key", keys[0], 9)], 1)
    snapshot = env.snapshot()
    assert snapshot.get("by_key", keys[0]) == b"\1" * 9
    with monkeypatch.context() as late:
        if is_late:
            late.setattr(SumsWriter, "follow", lambda *_: [])
        change(env, [("by_key", key, 9) for key in keys], 2)
        snapshot.refresh()
        tree = snapshot.tree("by_key")
        assert tree is not None
        assert tree.get(keys[-1]) == b"\2" * 9
    with env.write():
        pass  # writes the checksums that the last commit left out
    tree = snapshot.tree("by_key")
    assert tree is not None
    assert {tree.get(key) for key in keys} == {b"\2" * 9}
    absent = [key + b"x" for key in keys]
    assert tree.rows_of(b"", absent) == ([], [])
    env.close()


@pytest.mark.parametrize("is_native", [True, False])
def test_an_outdated_leaf_is_refused_in_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_native: bool
) -> None:
    if not is_native:
        monkeypatch.setattr(lmdb_pages, "key_tree", lambda *_: None)
    folder = tmp_path / "store"
    page, lost = aged(folder)
    env = opened(folder)
    snapshot = env.snapshot()
    key = sorted(lost)[len(lost) // 2]
    words = f"page {page} of the store's file is not the one that was written last"
    for ask in (
        lambda: snapshot.get("by_key", key),
        lambda: (
            snapshot.get("by_key", key + b"absent")
            or snapshot.neighbours("by_key", key + b"absent")
        ),
        lambda: list(snapshot.get_many("by_key", [key])),
        lambda: snapshot.last_at_or_before("by_key", key),
        lambda: list(snapshot.range("by_key", key, key + b"\0")),
    ):
        with pytest.raises(StoreDamagedError, match=words):
            ask()
    with env.write() as write, pytest.raises(StoreDamagedError, match=words):
        write.get("by_key", key)
    for act in ("put", "put_sorted", "delete"):
        with pytest.raises(WriteLostError, match=words):
            write_by(env, act, key)
    env.close()


def test_what_replaces_an_outdated_leaf_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB may copy a page that nobody asked for, when it joins it with a neighbour."""
    folder = tmp_path / "store"
    _, lost = aged(folder)
    env = opened(folder)
    key = sorted(lost)[len(lost) // 2]
    with monkeypatch.context() as patch:
        patch.setattr(lmdb_pages.PageReader, "check_ways", lambda *_: None)
        change(env, [("by_key", key, 20)], 99)
    with pytest.raises(StoreDamagedError, match="is not the one that was written last"):
        env.snapshot().get("by_key", key)
    change(env, [("by_key", b"elsewhere", 20)], 1)
    env.close()
    with pytest.raises(StoreDamagedError, match="is not the one that was written last"):
        checked_rows(folder)


def filled(folder: Path) -> LmdbEnv:
    env = opened(folder)
    for number in range(3):
        change(env, [("by_key", b"%05d" % n * 12, 20) for n in range(600)], number)
    return env


@pytest.mark.parametrize("at", [0, 8, 400, None])
def test_the_process_that_writes_puts_checksums_back(tmp_path: Path, at: int | None) -> None:
    """A header, some checksums, or the end of the file; also those of pages that it has mended."""
    folder = tmp_path / "store"
    env = filled(folder)
    env.keep_rows(())
    path = folder / SUMS_FILE_NAME
    file = PageFile(folder, env.by_heart)
    file.sums.put(15_000, 77)
    sound = path.read_bytes()
    for act in (env.mend, lambda: change(env, [("by_key", b"a", 20)], 9) or env.mend()):
        path.write_bytes(
            sound[:300] if at is None else sound[:at] + b"\xff" * 64 + sound[at + 64 :]
        )
        assert act() == [SUMS_FILE_NAME]
        if act == env.mend:
            assert path.read_bytes() == sound
    assert file.sums.known(15_000) == 77
    file.close()
    env.close()


def test_what_is_written_is_known_without_reading_it_again(tmp_path: Path) -> None:
    """A commit learns no checksum that the file has got wrong meanwhile."""
    folder = tmp_path / "store"
    env = filled(folder)
    env.keep_rows(())
    path = folder / SUMS_FILE_NAME
    sound = path.read_bytes()
    path.write_bytes(sound[:-64] + b"\xff" * 64)  # of pages that are not there yet
    change(env, [("by_key", b"a", 20)], 9)
    assert env.mend(is_whole=False) == [], "its header is right"
    assert env.mend() == [SUMS_FILE_NAME]
    assert path.read_bytes()[-64:] == sound[-64:]
    assert env.mend() == []
    env.close()
    assert checked_rows(folder)


@pytest.mark.parametrize("damage", [b"dcpdsum2", b""])
def test_a_start_puts_the_header_of_the_checksums_back(tmp_path: Path, damage: bytes) -> None:
    """If all checksums are those of the newest state; else it is an older one, or an older file."""
    folder = tmp_path / "store"
    filled(folder).close()
    path, data = folder / SUMS_FILE_NAME, folder / "data.mdb"
    sound, now = path.read_bytes(), data.read_bytes()
    path.write_bytes(sound[:8] + b"\xff" * 7 + sound[15:])  # the data file may be an older one
    with pytest.raises(StoreDamagedError):
        opened(folder)
    path.write_bytes(damage.ljust(16, b"\xff") + sound[16:])
    damaged = path.read_bytes()
    with pytest.raises(StoreDamagedError):
        LmdbPageReader(folder, TABLES)
    env = opened(folder)
    assert env.mend() == [SUMS_FILE_NAME]
    env.close()
    assert path.read_bytes() == sound
    leaf = max(layout_of(folder)["by_key"].leaves)
    path.write_bytes(damaged)
    data.write_bytes(now[: leaf * PAGE_BYTES + 900] + b"x" + now[leaf * PAGE_BYTES + 901 :])
    with pytest.raises(StoreDamagedError):
        opened(folder)
