"""One damaged page of LMDB's file: what is on it is refused by name, all else is read on.

A key and all that a table has are asked for in every way that there is, of a snapshot and of a
write transaction. `tests/soak/flip.py` damages pages at random.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.kv_env import MemoryEnv
from support.stored_bytes import PAGE_BYTES, Table, layout_of, overwrite
from vbucket.log.device import UnknownFormatError
from vbucket.store.environment import (
    Buffer,
    KvReader,
    KvSnapshot,
    StoreDamagedError,
    WriteLostError,
)
from vbucket.store.lmdb.environment_lmdb import LmdbEnv, LmdbPageReader
from vbucket.store.lmdb.lmdb_file import check_file
from vbucket.store.lmdb.meta_pages import COPY_AT, COPY_BYTES
from vbucket.store.lmdb.page_sums import SUMS_FILE_NAME

TABLES = ("by_key", "by_seqno")
VBS = range(40)
REFUSED = "refused"
Rows = dict[bytes, bytes]
"""`other`: of a page with another's content LMDB may tell some of what it holds."""
Kinds = pytest.mark.parametrize("what", ["zeros", "ones", "other"])


def vb_key(vb_id: int, rest: bytes) -> bytes:
    return vb_id.to_bytes(2, "big") + rest


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Rows]]:
    """A store of three levels: many short values, and some that have pages of their own."""
    folder = tmp_path_factory.mktemp("pages") / "store"
    draw = random.Random(3)
    rows: dict[str, Rows] = {
        "by_key": {
            vb_key(vb_id, b"\0a key that is long enough for three levels %05d" % number):
                b"value %d" % number
            for vb_id in VBS for number in range(200)
        },
        "by_seqno": {
            vb_key(vb_id, number.to_bytes(8, "big")): draw.randbytes(draw.choice((300, 9000)))
            for vb_id in VBS for number in range(1, 21)
        },
    }  # fmt: skip
    env = LmdbEnv(folder, TABLES, map_size_bytes=1 << 28)
    with env.write() as write:
        for table in TABLES:
            write.put_sorted(table, sorted(rows[table].items()))
    env.close()
    return folder, rows


@pytest.fixture
def store(written: tuple[Path, dict[str, Rows]], tmp_path: Path) -> Path:
    copy = tmp_path / "store"
    shutil.copytree(written[0], copy)
    return copy


def opened(store: Path) -> LmdbEnv:
    return LmdbEnv(store, TABLES, map_size_bytes=1 << 28)


def told(ask: Callable[[], object], place: str) -> object:
    """Return the answer to a question, or REFUSED; the words say of which place."""
    try:
        return ask()
    except StoreDamagedError as error:
        words = str(error)
    return REFUSED if place in words and "restore a backup" in words else words


def ways_to(reader: KvReader, table: str, key: bytes) -> Iterator[Callable[[], object]]:
    """Yield every way to ask for a key; what is not found is asked for again."""

    def got() -> object:
        value = reader.get(table, key)
        return pairs(reader.neighbours(table, key)) if value is None else [(key, bytes(value))]

    def got_among_many() -> object:
        return pairs(reader.get_many(table, [key])) or pairs(reader.neighbours(table, key))

    yield got
    yield got_among_many
    yield lambda: pairs([reader.last_at_or_before(table, key)])
    yield lambda: pairs([reader.first_at_or_after(table, key)])
    yield lambda: pairs(reader.range(table, key, key + b"\0"))


def check_keys(reader: KvReader, table: str, rows: Rows, lost: set[bytes]) -> int:
    """Ask for each key in every way: all answers are right, but those of `lost` may be refused.

    Return how many keys were refused whatever the way.
    """
    refused = 0
    for key, value in rows.items():
        place = f"partition {int.from_bytes(key[:2], 'big')}: table {table} of the store"
        answers = [told(ask, place) for ask in ways_to(reader, table, key)]
        wrong = [answer for answer in answers if answer not in (REFUSED, [(key, value)])]
        assert not wrong, key
        assert key in lost or REFUSED not in answers, key
        refused += answers.count(REFUSED) == len(answers)
    return refused


def pairs(found: Iterable[tuple[bytes, Buffer] | None]) -> list[tuple[bytes, bytes]]:
    return [(pair[0], bytes(pair[1])) for pair in found if pair is not None]


def victims(table: Table, kind: str) -> tuple[int, set[bytes]]:
    """Return a page of a kind in the middle of a table, and the keys that need it."""
    if kind == "large value":
        page = sorted(table.large, key=table.large.__getitem__)[len(table.large) // 2]
        return page, {table.large[page]}
    pages = table.leaves if kind == "leaf" else table.branches
    below = {page: keys for page, keys in pages.items() if len(keys) < 2000}
    page = sorted(below, key=lambda number: min(below[number]))[len(below) // 2]
    return page, below[page]


@Kinds
@pytest.mark.parametrize(
    ("table", "kind"), [("by_key", "leaf"), ("by_key", "branch"), ("by_seqno", "leaf")]
)
def test_what_is_not_on_the_page_is_read_on(
    written: tuple[Path, dict[str, Rows]], store: Path, table: str, kind: str, what: str
) -> None:
    rows = written[1]
    page, lost = victims(layout_of(store)[table], kind)
    assert 0 < len(lost) < len(rows[table]) / 2
    overwrite(store, page, what)
    env = opened(store)
    snapshot = env.snapshot()
    other = next(name for name in TABLES if name != table)
    for _ in range(2):
        refused = check_keys(snapshot, table, rows[table], lost)
        assert refused == len(lost) or what == "other"
        assert dict(pairs(snapshot.range(other, b"\0"))) == rows[other]
        snapshot.refresh()
    with env.write() as write:
        check_keys(write, table, rows[table], lost)
        assert dict(pairs(write.range(other, b"\0"))) == rows[other]
    env.close()


def test_a_failed_read_is_in_nobodys_way(
    written: tuple[Path, dict[str, Rows]], store: Path
) -> None:
    """What is held, what is being gone through and what is asked for later is of one state, though
    another one was committed meanwhile.
    """
    rows = written[1]["by_key"]
    page, lost = victims(layout_of(store)["by_key"], "leaf")
    overwrite(store, page, "zeros")
    env = opened(store)
    snapshot = env.snapshot()
    first, *_, last = sorted(rows)
    held = snapshot.get("by_key", first)
    under_way = snapshot.range("by_key", first)
    assert next(under_way)[0] == first
    with env.write() as write:
        write.put("by_key", first, b"new")
        write.put("by_key", last, b"new")
        write.put("by_key", last + b"!", b"new")
    for key in sorted(lost) * 2:
        with pytest.raises(StoreDamagedError):
            snapshot.get("by_key", key)
    assert held is not None
    assert bytes(held) == rows[first]
    expected = sorted(rows.items())[1:100]
    assert pairs(islice(under_way, len(expected))) == expected
    assert bytes(snapshot.get("by_key", last) or b"") == rows[last]
    assert snapshot.get("by_key", last + b"!") is None
    assert pairs(snapshot.range("by_key", last)) == [(last, rows[last])]
    snapshot.refresh()
    assert [bytes(snapshot.get("by_key", key) or b"") for key in (first, last)] == [b"new"] * 2
    assert pairs(snapshot.range("by_key", last)) == [(last, b"new"), (last + b"!", b"new")]
    env.close()


def test_read_that_fails_in_write_transaction_leaves_it_whole(
    written: tuple[Path, dict[str, Rows]], store: Path
) -> None:
    rows = written[1]["by_key"]
    page, lost = victims(layout_of(store)["by_key"], "leaf")
    overwrite(store, page, "zeros")
    env = opened(store)
    first, *_, last = sorted(rows)
    with env.write() as write:
        write.put("by_key", first, b"before")
        write.put_sorted("by_key", [(first + b"!", b"before")])
        for ask in ways_to(write, "by_key", min(lost)):
            assert told(ask, "by_key") == REFUSED
        write.put("by_key", last, b"after")
        write.put_sorted("by_key", [(last + b"!", b"after")])
        assert write.get("by_key", first) == b"before"
    snapshot = env.snapshot()
    for key, value in ((first, b"before"), (first + b"!", b"before"), (last, b"after"),
                       (last + b"!", b"after")):  # fmt: skip
        assert bytes(snapshot.get("by_key", key) or b"") == value
    env.close()


@pytest.mark.parametrize("how", ["put", "put_sorted", "delete"])
def test_write_that_meets_damage_is_named_and_does_nothing(
    written: tuple[Path, dict[str, Rows]], store: Path, how: str
) -> None:
    rows = written[1]["by_key"]
    page, lost = victims(layout_of(store)["by_key"], "leaf")
    overwrite(store, page, "zeros")
    env = opened(store)
    first, key = min(rows), min(lost)

    def write_there() -> None:
        with env.write() as write:
            write.put("by_key", first, b"new")
            act = {
                "put": lambda: write.put("by_key", key, b"new"),
                "put_sorted": lambda: write.put_sorted("by_key", [(first, b"new"), (key, b"new")]),
                "delete": lambda: write.delete("by_key", key),
            }[how]
            with pytest.raises(WriteLostError, match=re.escape(repr(key[2:]))):
                act()
            for go_on in (
                lambda: write.get("by_key", first),
                lambda: write.put("by_key", first, b""),
            ):
                with pytest.raises(WriteLostError):
                    go_on()
            act()

    with pytest.raises(WriteLostError, match=f"partition {int.from_bytes(key[:2], 'big')}: "):
        write_there()
    assert bytes(env.snapshot().get("by_key", first) or b"") == rows[first]
    with env.write() as write:
        write.put("by_key", first, b"new")
    env.close()


def test_damaged_end_of_table_is_in_way_of_its_own_rows_only(
    written: tuple[Path, dict[str, Rows]], store: Path
) -> None:
    """Rows above all others are appended, so the last page is looked at first."""
    rows = written[1]["by_key"]
    first, *_, last = sorted(rows)
    leaves = layout_of(store)["by_key"].leaves
    overwrite(store, next(page for page, keys in leaves.items() if last in keys), "zeros")
    env = opened(store)
    new = [(first + b"!", b"new"), (first + b"?", b"new")]
    with env.write() as write:
        write.put_sorted("by_key", new)
    assert [bytes(env.snapshot().get("by_key", key) or b"") for key, _ in new] == [b"new"] * 2
    with pytest.raises(WriteLostError, match=f"partition {VBS[-1]}: "), env.write() as write:
        write.put_sorted("by_key", [(last + b"!", b"new")])
    env.close()


# -- the file, before LMDB opens it ----------------------------------------------------------------


@pytest.mark.parametrize("pages", [0.001, 1, 1.5, 2, 3, 0.25, -10, -1, -0.001])
def test_a_file_that_is_cut_short_is_named(store: Path, pages: float) -> None:
    """After so many pages, of which a fraction below one is that of all, or without so many."""
    path = store / "data.mdb"
    whole = path.stat().st_size
    size = int(whole + pages * PAGE_BYTES)
    if pages > 0:
        size = int(pages * (PAGE_BYTES if pages >= 1 else whole))
    with path.open("r+b") as file:
        file.truncate(size)
    for open_it in (opened, lambda store: LmdbPageReader(store, TABLES)):
        with pytest.raises(StoreDamagedError, match="cut short") as caught:
            open_it(store)
        assert str(path) in str(caught.value)
        assert f"has {size} bytes" in str(caught.value)
    assert path.stat().st_size == size


def test_a_file_that_is_shorter_than_its_pages_may_be_whole(tmp_path: Path) -> None:
    """LMDB does not write a page that its transaction gives back, be it the last one."""
    env = LmdbEnv(tmp_path / "s", ("fruit",))

    def change(*changes: tuple[bytes, int | None]) -> None:
        with env.write() as write:
            for key, size in changes:
                if size is None:
                    write.delete("fruit", key)
                else:
                    write.put("fruit", key, bytes(size))

    change((b"small", 10), (b"large", 9_000))
    change((b"large", None))
    change((b"small", 11))
    change((b"small", 12), (b"huge", 60_000), (b"huge", None))
    env.close()
    file = tmp_path / "s" / "data.mdb"
    needed = 1 + max(
        int.from_bytes(file.read_bytes()[at : at + 8], "little")
        for at in (16 + 120, PAGE_BYTES + 16 + 120)
    )
    assert file.stat().st_size < needed * PAGE_BYTES, "this is the case at hand"
    env = LmdbEnv(tmp_path / "s", ("fruit",))
    assert pairs(env.snapshot().range("fruit", b"\0")) == [(b"small", bytes(12))]
    env.close()
    with file.open("r+b") as end:
        end.truncate(3 * PAGE_BYTES)
    with pytest.raises(StoreDamagedError, match="cut short"):
        LmdbEnv(tmp_path / "s", ("fruit",))


def damaged_meta(store: Path, slot: int, what: str) -> tuple[Path, bytes]:
    """Damage a meta page; return the file, and what it held before."""
    path = store / "data.mdb"
    before = path.read_bytes()
    data = bytearray(before)
    at = slot * PAGE_BYTES
    other = data[(1 - slot) * PAGE_BYTES :][:PAGE_BYTES]
    if what in {"root", "transaction", "last page"}:
        data[at + 16 + {"root": 112, "transaction": 128, "last page": 125}[what]] ^= 2
    else:
        new = {"zeros": bytes(PAGE_BYTES), "ones": b"\xff" * PAGE_BYTES, "other": other}[what]
        data[at : at + PAGE_BYTES] = new
    path.write_bytes(data)
    return path, before


Metas = pytest.mark.parametrize(
    "what", ["zeros", "ones", "other", "root", "transaction", "last page"]
)


@pytest.mark.parametrize("slot", [0, 1])
@Metas
def test_a_damaged_meta_page_is_put_back(store: Path, slot: int, what: str) -> None:
    """At a start from the copy in the other one; both are the newest or the one before."""
    path, before = damaged_meta(store, slot, what)
    with pytest.raises(StoreDamagedError, match=f"its meta page {slot} is not what was written"):
        LmdbPageReader(store, TABLES)
    assert opened_and_closed(store) == [f"meta page {slot}"]
    assert path.read_bytes() == before
    assert opened_and_closed(store) == []


def opened_and_closed(store: Path) -> list[str]:
    env = opened(store)
    mended = env.mend()
    env.close()
    return mended


@pytest.mark.parametrize("slot", [0, 1])
@Metas
def test_a_damaged_meta_page_of_a_store_in_use(store: Path, slot: int, what: str) -> None:
    """The process that writes puts it back; readers are refused until then, and see no other
    state. Pages of commits after it are right.
    """
    env = opened(store)
    env.keep_rows(())
    snapshot = env.snapshot()
    for number in range(3):
        damaged_meta(store, slot, what)
        with pytest.raises(StoreDamagedError, match=f"meta page {slot} is not what was written"):
            snapshot.refresh()
        if number:
            assert env.mend() == [f"meta page {slot}"]
        with env.write() as write:
            write.put("by_key", b"new", b"%d" % number)
            if number == 2:  # while a transaction is under way
                damaged_meta(store, slot, "zeros")
        env.mend()
        snapshot.refresh()
        assert snapshot.get("by_key", b"new") == b"%d" % number
    snapshot.close()
    env.close()
    assert opened_and_closed(store) == []


def test_a_meta_page_without_a_copy_is_named(store: Path) -> None:
    """As an older dcpd leaves it, whose copies are older, or if both pages are damaged."""
    path, before = damaged_meta(store, 0, "zeros")
    data = bytearray(path.read_bytes())
    at = PAGE_BYTES + COPY_AT
    data[at : at + COPY_BYTES] = bytes(COPY_BYTES)
    path.write_bytes(data)
    with pytest.raises(StoreDamagedError, match="its meta page 0 is not a valid one of LMDB"):
        opened(store)
    path.write_bytes(before)
    older = (store / SUMS_FILE_NAME).read_bytes()
    env = opened(store)
    for number in range(4):
        with env.write() as write:
            write.put("by_key", b"new", b"%d" % number)
    env.close()
    data = bytearray(path.read_bytes())
    for slot in (0, 1):
        at = slot * PAGE_BYTES + COPY_AT
        data[at : at + COPY_BYTES] = before[at : at + COPY_BYTES]
    path.write_bytes(data)
    assert older != (store / SUMS_FILE_NAME).read_bytes()
    assert opened_and_closed(store) == [], "older copies are no damage"
    path.write_bytes(bytes(PAGE_BYTES) + bytes(data[PAGE_BYTES:]))
    with pytest.raises(StoreDamagedError, match="its meta page 0 is not a valid one of LMDB"):
        opened(store)


def test_a_damaged_list_of_tables_or_of_free_pages_is_named(tmp_path: Path, store: Path) -> None:
    path = store / "data.mdb"
    for tree in (0, 1):
        env = opened(store)
        with env.write() as write:
            write.delete("by_key", next(write.range("by_key", b"\0"))[0])
        env.close()
        data = path.read_bytes()
        slot = max((0, 1), key=lambda s: data[s * PAGE_BYTES + 16 + 128 :][:8][::-1])
        at = slot * PAGE_BYTES + 16 + 24 + 48 * tree + 40
        root = int.from_bytes(data[at : at + 8], "little")
        overwrite(store, root, "zeros")
        with pytest.raises(StoreDamagedError, match=f"page {root} of the store's file"):
            opened(store)
        path.write_bytes(data)


@pytest.mark.parametrize("slot", [0, 1])
def test_flags_that_the_list_of_tables_does_not_have_are_named(store: Path, slot: int) -> None:
    """LMDB opens no table of a list that has flags."""
    path = store / "data.mdb"
    data = path.read_bytes()
    at = slot * PAGE_BYTES + 16 + 24 + 48 + 4
    for bit in range(16):
        damaged = bytearray(data)
        damaged[at + bit // 8] ^= 1 << bit % 8
        copy = (1 - slot) * PAGE_BYTES + COPY_AT
        damaged[copy : copy + COPY_BYTES] = bytes(COPY_BYTES)
        path.write_bytes(damaged)
        with pytest.raises(StoreDamagedError, match=f"meta page {slot} is not a valid one"):
            opened(store)


def test_flags_that_a_table_does_not_have_are_named(store: Path) -> None:
    """LMDB opens no table under other flags than it was made with. Without checksums beside the
    file, only this shows the damage.
    """
    path = store / "data.mdb"
    (store / SUMS_FILE_NAME).unlink()
    data = path.read_bytes()
    records = [found.end() for found in re.finditer(b"by_key", data)]
    for bit in range(16):
        damaged = bytearray(data)
        for at in records:  # of the newest state and of older ones
            damaged[at + 4 + bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(StoreDamagedError, match=f"has a table with the flags {1 << bit}"):
            opened(store)


def test_what_is_no_file_of_lmdb_is_no_damage(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    assert check_file(folder) is None
    (folder / "data.mdb").write_bytes(b"")
    assert check_file(folder) is None
    (folder / "data.mdb").write_bytes(b"something else" * 1000)
    with pytest.raises(UnknownFormatError):
        opened(folder)


# -- a file that is well ---------------------------------------------------------------------------

KEYS = st.binary(min_size=1, max_size=300)
CHANGES = st.lists(
    st.tuples(KEYS, st.none() | st.integers(0, 40) | st.integers(1_000, 12_000)), max_size=40
)


@given(
    transactions=st.lists(CHANGES, min_size=1, max_size=6),
    probes=st.lists(KEYS, min_size=1, max_size=10),
    filling=st.integers(0, 400),
)
def test_what_is_well_is_read_as_it_is(
    tmp_path_factory: pytest.TempPathFactory,
    transactions: list[list[tuple[bytes, int | None]]],
    probes: list[bytes],
    filling: int,
) -> None:
    """No false alarm: after each transaction the file is in order, and its pages tell what the
    database in memory tells.
    """
    folder = tmp_path_factory.mktemp("well")
    disk = LmdbEnv(folder / "s", TABLES, map_size_bytes=1 << 26)
    memory = MemoryEnv(TABLES)
    first = [(b"%05d" % (number * 7919 % 10007) * 8, 30) for number in range(filling)]
    for changes in [first, *transactions]:
        for env in (disk, memory):
            with env.write() as write:
                for key, size in changes:
                    if size is None:
                        write.delete("by_key", key)
                    else:
                        write.put("by_key", key, bytes(size))
        assert check_file(folder / "s") == set(TABLES)
        shown: list[KvSnapshot] = [disk.snapshot(), memory.snapshot()]
        whole = LmdbPageReader(folder / "s", TABLES)
        there = dict(pairs(shown[1].range("by_key", b"\0")))
        readers: list[KvReader] = [shown[0], whole]
        for reader in readers:
            assert dict(pairs(reader.range("by_key", b"\0"))) == there
            for probe in [*probes, *list(there)[:5]]:
                assert asked(reader, probe) == asked(shown[1], probe)
        for each in (*shown, whole):
            each.close()
    disk.close()


def asked(reader: KvReader, key: bytes) -> list[object]:
    """Return what a reader tells of a key and of what is around it."""
    value = reader.get("by_key", key)
    if value is None:
        reader.neighbours("by_key", key)
    beside = [reader.first_at_or_after("by_key", key), reader.last_at_or_before("by_key", key)]
    return [
        None if value is None else bytes(value),
        *(found if found is None else (found[0], bytes(found[1])) for found in beside),
        pairs(reader.range("by_key", key, key + b"\xff")),
        dict(reader.get_many("by_key", [key])),
    ]
