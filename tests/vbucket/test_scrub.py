"""The scrubber's reading: a sound store has no damage; of a damaged one nothing is left out."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import NamedTuple, cast

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.core.store_schedule import (
    BUSY_MAX,
    MENDED_REST_S,
    SCRUB_FIRST_S,
    SCRUB_REST_MAX_S,
    scrub_due_in_s,
    scrub_rest_s,
)
from support.stored_bytes import PAGE_BYTES, layout_of, overwrite, pack_deletion, pack_mutation
from vbucket.check import relist
from vbucket.check.mend import (
    BIT,
    FROM_COPY,
    REBUILT,
    RELINKED,
    REMEMBERED,
    SUMMED,
    lacking_in,
    mend,
    put_leaf,
    put_versions,
)
from vbucket.check.relist import RELISTED, left_by_compactions
from vbucket.check.scrub import AREAS, Damage, LogScrub, ScrubPlace, TableScrub, segment_to_scrub
from vbucket.engine.partition import VbState
from vbucket.log.device import pack_segment_header
from vbucket.log.end_mark import LogEnd
from vbucket.log.record import pack_group
from vbucket.model.entry import seqno_of
from vbucket.model.flipped_bit import bit_of
from vbucket.model.manifest import INITIAL_MANIFEST
from vbucket.store.block import Block, block_key, build_blocks, is_block_of
from vbucket.store.environment import StoreDamagedError
from vbucket.store.key_record import by_key_items
from vbucket.store.lmdb.environment_lmdb import ROW_IN_LEAF_MAX, LmdbEnv, LmdbPageReader
from vbucket.store.lmdb.lmdb_file import PageFile
from vbucket.store.lmdb.page_mend import PageMender
from vbucket.store.lmdb.page_scan import PageScan
from vbucket.store.lmdb.page_sums import SUMS_FILE_NAME, PageSums
from vbucket.store.lmdb.rows_copy import ROWS_FILE_NAME
from vbucket.store.records import (
    BY_KEY_TABLE,
    BY_SEQNO_TABLE,
    FAILOVER_TABLE,
    META_TABLE,
    STATE_TABLE,
    TABLES,
    PartitionRecord,
    put_manifest,
    put_partition,
)
from vbucket.store.store import StoreView

KEYS = 400
RECORD = PartitionRecord(
    int(VbState.ACTIVE), KEYS, 0, 0, KEYS, KEYS, 1, [[7, 0, 1]], last_seqno=KEYS, versions=KEYS,
    keys=KEYS,
)  # fmt: skip
SALT = 0x1234567890ABCDEF
VBS = range(8)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("scrub") / "store", (20, 300), 9000)


def made(folder: Path, value_bytes: tuple[int, ...], block_bytes: int) -> Path:
    draw = random.Random(2)
    env = LmdbEnv(folder, TABLES, map_size_bytes=1 << 30)
    with env.write() as write:
        for vb_id in VBS:
            keys = [b"\0key that is long %04d" % number for number in range(KEYS)]
            entries = [
                pack_mutation(
                    vb_id=vb_id, key=key, value=draw.randbytes(draw.choice(value_bytes)), cas=seqno,
                    seqno=seqno, rev_seqno=1, epoch=1,
                )
                for seqno, key in enumerate(keys, 1)
            ]  # fmt: skip
            write.put_sorted(BY_KEY_TABLE, by_key_items(vb_id.to_bytes(2, "big"), keys, entries))
            write.put_sorted(
                BY_SEQNO_TABLE,
                build_blocks(vb_id, entries, seqno_before=0, body_bytes_target=block_bytes),
            )
            put_partition(write, vb_id, RECORD)
    env.close()
    return folder


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "store"))


def damages_in(folder: Path, piece_bytes: int = 1) -> list[Damage]:
    """Read all tables in small pieces."""
    file = PageFile(folder)
    place, found = ScrubPlace(), []
    while AREAS[place.area] != "log":
        piece = TableScrub(PageScan(file)).piece(place, piece_bytes, lambda: False)
        assert piece.place > place, "each piece moves on"
        place = piece.place
        found += piece.damages
    file.close()
    return found


@pytest.mark.parametrize("piece_bytes", [1, 1 << 30])
def test_a_sound_store_has_no_damage(sound: Path, piece_bytes: int) -> None:
    assert damages_in(sound, piece_bytes) == []


def test_all_pairs_are_read(sound: Path) -> None:
    """What is found is what the tables have, so nothing is left out unseen."""
    env, file = LmdbEnv(sound, TABLES, map_size_bytes=1 << 30), PageFile(sound)
    snapshot = env.snapshot()
    for table in TABLES:
        found, key, scan = [], b"\0", PageScan(file)
        while (leaf := scan.leaf(table, key)).behind is not None:
            found, key = found + leaf.found, leaf.behind
        rows = [(key, bytes(value)) for key, value in snapshot.range(table, b"\0")]
        assert found + leaf.found == rows
    snapshot.close()
    env.close()
    file.close()


@pytest.mark.parametrize("what", ["zeros", "ones", "other"])
def test_every_damaged_page_is_named(copy: Path, what: str) -> None:
    """Also those that hold nothing but a part of a large value."""
    draw = random.Random(3)
    layout = layout_of(copy)
    env = LmdbEnv(copy, TABLES, map_size_bytes=1 << 30)
    snapshot = env.snapshot()
    sizes = {key: len(value) for key, value in snapshot.range(BY_SEQNO_TABLE, b"\0")}
    snapshot.close()
    env.close()
    pages: dict[int, tuple[str, set[bytes]]] = {}
    for table in (BY_KEY_TABLE, BY_SEQNO_TABLE):
        pages |= {page: (table, keys) for page, keys in layout[table].leaves.items()}
        pages |= {page: (table, keys) for page, keys in layout[table].branches.items()}
        pages |= {page: (table, {key}) for page, key in layout[table].large.items()}
        pages |= {page + 1: (table, {key}) for page, key in layout[table].large.items() if
                  sizes[key] > 2 * PAGE_BYTES}  # fmt: skip
    whole = (copy / "data.mdb").read_bytes()
    for page in draw.sample(sorted(pages), 24):
        overwrite(copy, page, what)
        table, keys = pages[page]
        named = [each for each in damages_in(copy) if table in each.where]
        assert named, f"page {page} of {table}"
        vb_ids = {int.from_bytes(key[:2], "big") for key in keys}
        assert {each.vb_id for each in named} & vb_ids or len(vb_ids) == len(VBS), page
        (copy / "data.mdb").write_bytes(whole)
    assert damages_in(copy) == []


def test_a_first_leaf_has_one_name_for_passes_and_looks(copy: Path) -> None:
    """Else it is told twice, and what a look mends stays listed until the next pass."""
    layout = layout_of(copy)
    tables = (STATE_TABLE, BY_SEQNO_TABLE, BY_KEY_TABLE)
    for table in tables:
        leaves = layout[table].leaves
        overwrite(copy, min(leaves, key=lambda page, of=leaves: min(of[page])), "zeros")
    by_pass = {(each.table, each.key): each for each in damages_in(copy)}
    file = PageFile(copy)
    by_look = {(each.table, each.key): each for each in TableScrub(PageScan(file)).partition(0)}
    file.close()
    assert [table for table, _ in sorted(by_look)] == sorted(tables)
    assert {place: by_pass.get(place) for place in by_look} == by_look


def flips(data: bytearray, draw: random.Random) -> Iterator[int]:
    while True:
        at = draw.randrange(len(data))
        data[at] ^= 1 << draw.randrange(8)
        yield at


def mended(folder: Path) -> list[tuple[Damage, str]]:
    """Mend all that is damaged, as often as something is found; return what could be mended."""
    file, done = PageFile(folder), []
    for _ in range(20):
        found = damages_in(folder)
        hows = []
        for each in found:
            with PageMender(file) as mender:
                hows.append(mend(mender, each.table, each.key))
        done += [(each, how) for each, how in zip(found, hows, strict=True) if how]
        if not any(hows):
            break
    file.close()
    return done


def test_one_flipped_bit_anywhere_in_a_page_is_put_back(copy: Path) -> None:
    """Also in a branch, in the list of tables, and in the head and the body of a block."""
    draw = random.Random(11)
    layout = layout_of(copy)
    whole = (copy / "data.mdb").read_bytes()
    pages = [
        page for table in layout.values() for page in (*table.leaves, *table.branches, *table.large)
    ]
    pages += [page + 1 for page in layout[BY_SEQNO_TABLE].large][:-8]
    for page in draw.sample(pages, 25):
        data = bytearray(whole)
        data[page * PAGE_BYTES + draw.randrange(PAGE_BYTES)] ^= 1 << draw.randrange(8)
        (copy / "data.mdb").write_bytes(data)
        for damage, how in mended(copy):
            assert how == BIT, damage
        assert damages_in(copy) == []
    assert (copy / "data.mdb").read_bytes()[: len(whole) // 2] != b"", "it was written"


@pytest.mark.parametrize("what", ["zeros", "ones", "other"])
def test_a_leaf_of_keys_is_rebuilt_from_the_versions(copy: Path, what: str) -> None:
    before = pairs_in(copy, BY_KEY_TABLE)
    leaves = sorted(layout_of(copy)[BY_KEY_TABLE].leaves)
    for leaf in (leaves[0], leaves[len(leaves) // 2], leaves[-1]):
        overwrite(copy, leaf, what)
    assert {how for _, how in mended(copy)} == {REBUILT}
    assert damages_in(copy) == []
    assert pairs_in(copy, BY_KEY_TABLE) == before
    env = LmdbEnv(copy, TABLES, map_size_bytes=1 << 30)
    with env.write() as write:  # LMDB itself takes the page for its own
        for vb_id in VBS:
            write.delete(BY_KEY_TABLE, vb_id.to_bytes(2, "big") + b"\0key that is long 0009")
            write.put(
                BY_KEY_TABLE, vb_id.to_bytes(2, "big") + b"\0key that is long 9999", b"x" * 38
            )
    env.close()
    assert len(pairs_in(copy, BY_KEY_TABLE)) == len(before)


def test_a_block_is_looked_for_in_partitions_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stands behind the last leaf, and each look costs the checksum of a page."""
    copy = made(tmp_path / "store", (300,), 4000)
    looked: set[int] = set()

    def look(key: bytes, value: bytes) -> bool:
        looked.add(int.from_bytes(key[:2], "big"))
        return is_block_of(key, value)

    monkeypatch.setattr(relist, "is_block_of", look)
    for leaf in layout_of(copy)[BY_SEQNO_TABLE].leaves:
        overwrite(copy, leaf, "zeros")
        assert [how for _, how in mended(copy)] == [RELISTED]
    assert looked == set(VBS)


@pytest.mark.parametrize("what", ["zeros", "ones", "other"])
def test_branches_and_lists_of_blocks_are_found_again(tmp_path: Path, what: str) -> None:
    """Whatever became of the page: what it led to is there, and nothing else leads to it."""
    copy = made(tmp_path / "store", (300,), 4000)
    before = {table: pairs_in(copy, table) for table in (BY_KEY_TABLE, BY_SEQNO_TABLE)}
    layout = layout_of(copy)
    assert len(layout[BY_SEQNO_TABLE].leaves) > 2
    for kind, pages in (
        (RELINKED, [page for table in before for page in layout[table].branches]),
        (RELISTED, layout[BY_SEQNO_TABLE].leaves),
    ):
        for page in pages:
            overwrite(copy, page, what)
            assert {how for _, how in mended(copy)} == {kind}, page
    assert damages_in(copy) == []
    assert {table: pairs_in(copy, table) for table in before} == before
    env = LmdbEnv(copy, TABLES, map_size_bytes=1 << 30)
    with env.write() as write:  # LMDB itself takes the pages for its own
        for key in before[BY_SEQNO_TABLE]:
            write.delete(BY_SEQNO_TABLE, key)
        for key in before[BY_KEY_TABLE]:
            write.delete(BY_KEY_TABLE, key)
    env.close()
    assert pairs_in(copy, BY_KEY_TABLE) == pairs_in(copy, BY_SEQNO_TABLE) == {}


def test_small_blocks_of_a_list_come_from_elsewhere(tmp_path: Path) -> None:
    """The last one of each partition, which stood in the leaf itself. They must be complete, and
    agree with the records of their keys.
    """
    copy = made(tmp_path / "store", (300,), 4500)
    before = pairs_in(copy, BY_SEQNO_TABLE)
    versions = {vb_id: [] for vb_id in VBS}
    for key, value in sorted(before.items()):
        versions[int.from_bytes(key[:2], "big")] += Block(key, value).entries()
    for leaf in sorted(layout_of(copy)[BY_SEQNO_TABLE].leaves):
        overwrite(copy, leaf, "zeros")
        (damage,) = damages_in(copy)
        file, given = PageFile(copy), {}
        with PageMender(file) as mender:
            assert mend(mender, damage.table, damage.key) == ""
            lacking = lacking_in(mender, damage.key)
            assert lacking
            for each in lacking:
                of = versions[int.from_bytes(each.key[:2], "big")]
                some = of[each.first_seqno - 1 : each.last_seqno]
                other = [entry[:28] + b"other CA" + entry[36:] for entry in some]
                for wrong in (some[1:], some[:-1], other):
                    assert put_leaf(mender, each.key, {**given, each.key: wrong}) == ""
                given[each.key] = some
                how = put_leaf(mender, each.key, given)
                assert bool(how) == (each == lacking[-1])
            assert put_leaf(mender, damage.key, given) is None, "it is sound"
            assert put_versions(mender, lacking[0].key, []) == FROM_COPY
        file.close()
    assert damages_in(copy) == []
    assert pairs_in(copy, BY_SEQNO_TABLE) == before


def test_damage_of_the_partition_before_is_not_met(tmp_path: Path) -> None:
    """A partition without a block has no last one, whatever the row before became."""
    copy = made(tmp_path / "store", (300,), 4000)
    large = layout_of(copy)[BY_SEQNO_TABLE].large
    last = max(VBS)
    key = max(pairs_in(copy, BY_SEQNO_TABLE))
    env = LmdbEnv(copy, TABLES, map_size_bytes=1 << 30)
    with env.write() as write:  # the last block of the table has pages of its own then
        for other in pairs_in(copy, BY_SEQNO_TABLE):
            if other > max(large.values()):
                write.delete(BY_SEQNO_TABLE, other)
    env.close()
    page = next(page for page, each in large.items() if each == max(large.values()))
    assert key[:2] == last.to_bytes(2, "big")
    overwrite(copy, page, "zeros")
    env = LmdbEnv(copy, TABLES, map_size_bytes=1 << 30)
    for reader in (env.snapshot(), None):
        if reader is None:
            with env.write() as write:
                assert StoreView(write).last_block(last + 1) is None
            continue
        view = StoreView(reader)
        assert view.last_block(last + 1) is view.block_at(last + 1, 7) is None
        assert list(view.backward(last + 1, 7)) == []
        with pytest.raises(StoreDamagedError):
            view.last_block(last)
        reader.close()
    env.close()


def test_a_block_that_cannot_be_read_comes_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the sector is written again, as on a disk that puts another one in its place."""
    copy = made(tmp_path / "store", (300,), 4000)
    before = pairs_in(copy, BY_SEQNO_TABLE)
    page, key = min(layout_of(copy)[BY_SEQNO_TABLE].large.items())
    bad = {page * PAGE_BYTES}
    pread, pwrite = os.pread, os.pwrite

    def reads(fd: int, size: int, at: int) -> bytes:
        if any(each < at + size and at < each + PAGE_BYTES for each in bad):
            raise OSError(errno.EIO, "Input/output error")
        return pread(fd, size, at)

    def writes(fd: int, data: bytes, at: int) -> int:
        bad.difference_update(range(at, at + len(data), PAGE_BYTES))
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pread", reads)
    monkeypatch.setattr(os, "pwrite", writes)
    file = PageFile(copy)
    with PageMender(file) as mender:
        entries = Block(key, before[key]).entries()
        assert put_versions(mender, key, entries[1:]) == ""
        assert put_versions(mender, key, entries) == FROM_COPY
    file.close()
    assert not bad
    assert pairs_in(copy, BY_SEQNO_TABLE) == before


def test_a_wrong_checksum_is_written_again_where_a_copy_agrees(tmp_path: Path) -> None:
    """Of a block. An older block under the same key is sound in itself, and stays damaged."""
    copy = made(tmp_path / "store", (300,), 4000)
    before = pairs_in(copy, BY_SEQNO_TABLE)
    page, key = min(layout_of(copy)[BY_SEQNO_TABLE].large.items())
    sums = PageSums(copy)
    sums.put(page, (sums.known(page) or 0) ^ 0x5A5A5A5A)
    entries = Block(key, before[key]).entries()
    others = [entries[0][:-1] + bytes([entries[0][-1] ^ 1]), *entries[1:]]
    file = PageFile(copy)
    with PageMender(file) as mender:
        bad = mender.bad_page(BY_SEQNO_TABLE, key)
        assert bad is not None
        assert bad.number == page
        for lacking in ([], entries[1:], entries[:-1], others):
            assert put_versions(mender, key, lacking) == ""
            assert mender.bad_page(BY_SEQNO_TABLE, key) == bad
        place = mender.place_of_value(BY_SEQNO_TABLE, key)
        assert place is not None
        at = min(place.at + place.size, (page + 1) * PAGE_BYTES) - 1
        last = (copy / "data.mdb").read_bytes()[at]
        mender.put_bytes(at, bytes([last ^ 1]))
        assert put_versions(mender, key, entries) == "", "a version on that page is damaged, too"
        assert mender.bad_page(BY_SEQNO_TABLE, key) == bad
        mender.put_bytes(at, bytes([last]))
        assert put_versions(mender, key, entries) == SUMMED
    file.close()
    assert damages_in(copy) == []
    assert pairs_in(copy, BY_SEQNO_TABLE) == before


class Compacted(NamedTuple):
    """A store with a partition of one block, and that partition's versions."""

    store: Path
    versions: list[bytes]
    left: list[bytes]
    """Those that compaction has left."""


@contextmanager
def compacted(
    floor: int, order: list[int], value_bytes: int, filled: int = 0
) -> Iterator[Compacted]:
    """Keys 0 to 3 have as many versions each. Key 3 ends with a deletion, which may be purged.
    `filled`: up to there the copy was filled by a snapshot, so it knows of nothing before.
    """
    with TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        numbers = [at % 4 for at in order]
        yield Compacted(
            store, *_compacted(store, floor, numbers, value_bytes=value_bytes, filled=filled)
        )


@settings(max_examples=20)
@given(st.integers(0, 60), st.integers(0, 70), st.permutations(range(60)))
def test_a_copy_that_has_more_mends_a_block(floor: int, filled: int, order: list[int]) -> None:
    """It was compacted less, or filled earlier."""
    with compacted(floor, order, 900, filled) as (store, versions, left):
        before = pairs_in(store, BY_SEQNO_TABLE)
        (key,) = before
        overwrite(store, min(layout_of(store)[BY_SEQNO_TABLE].large), "zeros")
        file = PageFile(store)
        with PageMender(file) as mender:
            assert put_versions(mender, key, left[1:]) == ""
            assert put_versions(mender, key, versions) == FROM_COPY
        file.close()
        assert pairs_in(store, BY_SEQNO_TABLE) == before


@settings(max_examples=20)
@given(st.integers(0, 20), st.permutations(range(20)))
def test_a_copy_that_was_compacted_less_mends_a_list(floor: int, order: list[int]) -> None:
    with compacted(floor, order, 8) as (store, versions, left):
        (leaf,) = layout_of(store)[BY_SEQNO_TABLE].leaves
        overwrite(store, leaf, "zeros")
        file = PageFile(store)
        with PageMender(file) as mender:
            key = block_key(3, 1)
            (lacking,) = lacking_in(mender, key)
            assert put_leaf(mender, key, {lacking.key: left[1:]}) == ""
            assert put_leaf(mender, key, {lacking.key: versions})
        file.close()
        (found,) = pairs_in(store, BY_SEQNO_TABLE).items()
        assert list(Block(*found).seqnos) == [seqno_of(entry) for entry in left]


def test_what_many_compactions_left_is_made_only_where_it_fits() -> None:
    """Another node may send many small versions: each compaction is not tried by itself."""
    entries = [
        pack_mutation(vb_id=3, key=b"\0k", value=b"", cas=at, seqno=at, rev_seqno=1, epoch=1)
        for at in range(1, 20_001)
    ]
    asked: list[int] = []

    def fits(count: int, _size_bytes: int) -> bool:
        asked.append(count)
        return count == 7

    row = by_key_items(b"\0\3", [b"\0k"], [entries[-1]])[0][1]
    mender = SimpleNamespace(get=lambda *_: row)
    (found,) = left_by_compactions(cast("PageMender", mender), 3, entries, fits)
    assert found == entries[-7:]
    assert asked == list(range(20_000, 0, -1))


def _compacted(
    store: Path, floor: int, numbers: list[int], *, value_bytes: int, filled: int
) -> tuple[list[bytes], list[bytes]]:
    """Write a partition of one block, compacted up to a floor; return its versions, and what is
    left of them.
    """
    last = {number: seqno for seqno, number in enumerate(numbers, 1)}
    is_purged = last[3] < floor
    pack_set = partial(pack_mutation, value=bytes(value_bytes))
    entries: list[bytes] = []
    left: list[bytes] = []
    newest: dict[bytes, bytes] = {}
    after = dict.fromkeys(last, 1 << 62)
    for seqno, number in reversed(list(enumerate(numbers, 1))):
        key, is_deletion = b"\0key %d" % number, number == 3 and seqno == last[number]
        before = max((at for at in range(1, seqno) if numbers[at - 1] == number), default=0)
        entry = (pack_deletion if is_deletion else pack_set)(
            vb_id=3, key=key, cas=seqno, seqno=seqno, rev_seqno=1, epoch=1, prev_seqno=before
        )
        entries.insert(0, entry)
        newest.setdefault(key, entry)
        if after[number] > floor and not (is_deletion and is_purged):
            left.insert(0, bytes(8) + entry[8:] if seqno <= filled else entry)
        after[number] = seqno
    keys = sorted(key for key in newest if not (is_purged and key == b"\0key 3"))
    record = RECORD._replace(last_seqno=len(numbers), versions=len(left), keys=len(keys))
    env = LmdbEnv(store, TABLES, map_size_bytes=1 << 30)
    with env.write() as write:
        rows = by_key_items(b"\0\3", keys, [newest[key] for key in keys])
        write.put_sorted(BY_KEY_TABLE, rows)
        blocks = build_blocks(3, left, seqno_before=0, body_bytes_target=1 << 20)
        write.put_sorted(BY_SEQNO_TABLE, blocks)
        put_partition(write, 3, record)
    env.close()
    return entries, left


@pytest.mark.parametrize("table", [STATE_TABLE, FAILOVER_TABLE, META_TABLE])
def test_records_are_written_as_the_process_knows_them(copy: Path, table: str) -> None:
    """As of its last commit; not those of a transaction that was given up, nor if rows lack."""
    env = LmdbEnv(copy, TABLES, map_size_bytes=1 << 30)
    kept = env.keep_rows((STATE_TABLE, FAILOVER_TABLE, META_TABLE))
    with env.write() as write:
        put_partition(write, 3, RECORD._replace(epoch=5, failover=[[9, 7, 5], [7, 0, 1]]))
        put_manifest(write, INITIAL_MANIFEST)
    with suppress(ZeroDivisionError), env.write() as write:
        put_partition(write, 4, RECORD._replace(epoch=6, failover=[[8, 7, 6], [7, 0, 1]]))
        raise ZeroDivisionError
    before = pairs_in(copy, table)
    assert kept[table] == before
    (leaf,) = layout_of(copy)[table].leaves
    overwrite(copy, leaf, "zeros")
    (damage,) = [each for each in damages_in(copy) if each.table == table]
    file = PageFile(copy, env.by_heart)
    with PageMender(file) as mender:
        assert mend(mender, table, damage.key, {}) == ""
        fewer = {table: {key: row for key, row in before.items() if key != min(before)}}
        assert mend(mender, table, damage.key, fewer) == ""
        assert mend(mender, table, damage.key, kept) == REMEMBERED
    file.close()
    assert pairs_in(copy, table) == before
    with env.write() as write:
        put_partition(write, 4, RECORD)
    env.close()
    assert damages_in(copy) == []


def test_rows_that_are_damaged_at_a_start_come_from_their_copy(copy: Path) -> None:
    """The page is damaged after the server has read it, and before the store process has."""
    tables = (STATE_TABLE, FAILOVER_TABLE)
    before = {table: pairs_in(copy, table) for table in tables}
    server = LmdbEnv(copy, TABLES, map_size_bytes=1 << 30)
    server.copy_rows(tables)
    server.close()
    for leaf in chain.from_iterable([layout_of(copy)[table].leaves for table in tables]):
        overwrite(copy, leaf, "zeros")
    for _ in range(2):  # the copy is there for the next one, too
        env = LmdbEnv(copy, TABLES, map_size_bytes=1 << 30)
        assert env.keep_rows(tables) == before
        env.copy_rows()
        env.close()
    (copy / ROWS_FILE_NAME).unlink()
    env = LmdbEnv(copy, TABLES, map_size_bytes=1 << 30)
    assert env.keep_rows(tables) == {}
    env.close()


def test_a_row_of_several_pages_is_not_written_from_memory(copy: Path) -> None:
    """Only its beginning is kept: such a row of hashes may be large."""
    env = LmdbEnv(copy, TABLES, map_size_bytes=1 << 30)
    with env.write() as write:
        write.put(META_TABLE, b"before", bytes(9000))
    kept = env.keep_rows((META_TABLE,))
    with env.write() as write:
        write.put(META_TABLE, b"later", bytes(9000))
    env.close()
    assert {key: len(row) for key, row in kept[META_TABLE].items() if not any(row)} == {
        b"before": ROW_IN_LEAF_MAX + 1, b"later": ROW_IN_LEAF_MAX + 1,
    }  # fmt: skip
    (leaf,) = layout_of(copy)[META_TABLE].leaves
    overwrite(copy, leaf, "zeros")
    (damage,) = [each for each in damages_in(copy) if each.table == META_TABLE]
    file = PageFile(copy, env.by_heart)
    with PageMender(file) as mender:
        assert mend(mender, META_TABLE, damage.key, kept) == ""
    file.close()


def test_a_branch_is_not_guessed(copy: Path) -> None:
    """If a page below it is gone, too, or another branch, nobody can tell what it led to."""
    layout = layout_of(copy)[BY_KEY_TABLE]
    overwrite(copy, sorted(layout.leaves)[3], "zeros")
    overwrite(copy, min(layout.branches), "zeros")
    before = (copy / "data.mdb").read_bytes()
    assert mended(copy) == []
    assert (copy / "data.mdb").read_bytes() == before


def test_a_leaf_is_not_rebuilt_from_what_is_damaged_itself(copy: Path) -> None:
    layout = layout_of(copy)
    overwrite(copy, sorted(layout[BY_KEY_TABLE].leaves)[3], "zeros")
    for page in layout[BY_SEQNO_TABLE].leaves:
        overwrite(copy, page, "zeros")
    before = (copy / "data.mdb").read_bytes()
    assert mended(copy) == []
    assert (copy / "data.mdb").read_bytes() == before, "nothing was invented"


def test_more_than_one_bit_is_not_put_back(copy: Path) -> None:
    draw = random.Random(5)
    whole = (copy / "data.mdb").read_bytes()
    leaves = sorted(layout_of(copy)[BY_SEQNO_TABLE].leaves)
    for _ in range(40):
        data = bytearray(whole)
        for _ in range(draw.choice((2, 3, 40))):
            data[draw.choice(leaves) * PAGE_BYTES + draw.randrange(PAGE_BYTES)] ^= draw.randrange(
                1, 256
            )
        (copy / "data.mdb").write_bytes(data)
        found = damages_in(copy)
        mended(copy)
        left = (copy / "data.mdb").read_bytes()
        changed = [
            at
            for at in range(0, len(whole), PAGE_BYTES)
            if left[at : at + PAGE_BYTES] != data[at : at + PAGE_BYTES]
        ]
        for at in changed:
            assert left[at : at + PAGE_BYTES] == whole[at : at + PAGE_BYTES]
        assert found


def pairs_in(folder: Path, table: str) -> dict[bytes, bytes]:
    reader = LmdbPageReader(folder, TABLES)
    pairs = {key: bytes(value) for key, value in reader.range(table, b"\0")}
    reader.close()
    return pairs


@given(st.binary(min_size=1, max_size=5000), st.integers(0), st.integers(0, 7))
def test_a_checksum_names_the_bit_that_is_flipped(data: bytes, at: int, bit: int) -> None:
    at %= len(data)
    flipped = bytearray(data)
    flipped[at] ^= 1 << bit
    assert (
        bit_of(google_crc32c.value(bytes(flipped)) ^ google_crc32c.value(data), len(data))
        == 8 * at + bit
    )


def test_a_bit_that_the_checksum_of_its_page_was_made_of(copy: Path) -> None:
    """The file of checksums was lost, and made of the damage: the version's own tells."""
    large = layout_of(copy)[BY_SEQNO_TABLE].large
    before = pairs_in(copy, BY_SEQNO_TABLE)
    (copy / SUMS_FILE_NAME).unlink()
    data = bytearray((copy / "data.mdb").read_bytes())
    for page in sorted(large)[:3]:
        data[page * PAGE_BYTES + PAGE_BYTES - 9] ^= 4
    (copy / "data.mdb").write_bytes(data)
    LmdbEnv(copy, TABLES, map_size_bytes=1 << 30).close()
    assert [how for _, how in mended(copy)] == [BIT] * 3
    assert damages_in(copy) == []
    assert pairs_in(copy, BY_SEQNO_TABLE) == before


def test_a_checksum_that_no_page_has_names_no_bit() -> None:
    """What replaces an outdated page has one: vbucket.store.lmdb.sums_writer."""
    page = bytes(PAGE_BYTES)
    assert bit_of(0xFFFFFFFF, len(page)) is None
    assert bit_of(0, len(page)) is None, "nothing is flipped"


def test_a_page_that_was_there_before_is_named(copy: Path) -> None:
    """A lost write: the page is sound in itself."""
    older = (copy / "data.mdb").read_bytes()
    env = LmdbEnv(copy, TABLES, map_size_bytes=1 << 30)
    for round_number in range(3):
        with env.write() as write:
            key = b"\0key that is long 0007"
            entry = pack_mutation(
                vb_id=3, key=key, value=b"new", cas=9, seqno=900 + round_number, rev_seqno=2
            )
            write.put_sorted(BY_KEY_TABLE, by_key_items(b"\0\3", [key], [entry]))
    env.close()
    now = (copy / "data.mdb").read_bytes()
    leaf = next(p for p, ks in layout_of(copy)[BY_KEY_TABLE].leaves.items() if b"\0\3" + key in ks)
    old = layout_at(older, key)
    lost = bytearray(old)
    lost[:8] = leaf.to_bytes(8, "little")
    start = leaf * PAGE_BYTES
    (copy / "data.mdb").write_bytes(now[:start] + bytes(lost) + now[start + PAGE_BYTES :])
    (found,) = damages_in(copy)
    assert "was written last" in found.what
    assert found.vb_id in {2, 3}


def layout_at(data: bytes, key: bytes) -> bytes:
    """Return the leaf of an older file that has partition 3's key."""
    at = data.index(b"\0\3" + key) // PAGE_BYTES * PAGE_BYTES
    return data[at : at + PAGE_BYTES]


def test_a_group_of_the_log_that_is_damaged_is_named() -> None:
    data, crc = bytearray(pack_segment_header(7, 0, SALT)), 0
    ends = []
    for group in range(1, 30):
        record, crc = pack_group(group, b"x" * 500, SALT, crc)
        data += record
        ends.append(len(data))
    place = ScrubPlace(AREAS.index("log"), (7).to_bytes(8, "big"))

    def read(data: bytes) -> list[Damage]:
        scrub, found, at = LogScrub(7, data, "log/7.log"), [], place
        while at == place:
            piece = scrub.piece(place, 1000, lambda: False)
            at, found = piece.place, found + piece.damages
        assert at.key == (8).to_bytes(8, "big")
        return found

    assert read(bytes(data)) == []
    for at in flips(data, random.Random(4)):
        (damage,) = read(bytes(data))
        assert damage.file == "log/7.log"
        assert "segment 7 is damaged" in damage.what
        if at > 5000:
            break


def test_segments_are_read_up_to_what_is_on_disk() -> None:
    end = LogEnd(5, 1000, 9, 0)
    log = AREAS.index("log")
    at = ScrubPlace(log)
    assert segment_to_scrub(at, [3, 5, 6], end) == (3, None)
    assert segment_to_scrub(ScrubPlace(log, (4).to_bytes(8, "big")), [3, 5, 6], end) == (5, 1000)
    assert segment_to_scrub(ScrubPlace(log, (6).to_bytes(8, "big")), [3, 5, 6], end) is None


def test_rests_are_as_long_as_share_and_rate_say() -> None:
    assert scrub_rest_s(0.01, 1, 100, 0.0, is_hurried=True) == pytest.approx(0.01 / BUSY_MAX - 0.01)
    assert scrub_rest_s(0.01, 1 << 20, 1 << 30, 86400.0, is_hurried=True) < 0.2
    assert scrub_rest_s(3.0, 1, 100, 0.0, is_hurried=True) == MENDED_REST_S, "it was a mend"
    slow = scrub_rest_s(0.01, 1 << 20, 1 << 34, 7 * 86400.0, is_hurried=False)
    assert slow == pytest.approx(7 * 86400 / (1 << 14))
    assert scrub_rest_s(0.01, 1 << 20, 1, 7 * 86400.0, is_hurried=False) == SCRUB_REST_MAX_S
    fast = scrub_rest_s(0.01, 1 << 20, 1 << 40, 1.0, is_hurried=False)
    assert fast == pytest.approx(0.19), "never above its share, whatever the period asks for"


def test_a_pass_is_due_a_period_after_the_last_one() -> None:
    day = 86400.0
    assert scrub_due_in_s(0.0, 100.0, 100.0, 0.0) is None, "only on command"
    assert scrub_due_in_s(0.0, 100.0, 100.0, day) == SCRUB_FIRST_S
    assert scrub_due_in_s(0.0, 100.0, 100.0, 5.0) == 5.0
    assert scrub_due_in_s(1000.0, 0.0, 1000.0 + day, day) == 0.0
    assert scrub_due_in_s(1000.0, 0.0, 1000.0 + day / 4, day) == 0.75 * day
    assert scrub_due_in_s(9e9, 0.0, 1000.0, day) == day, "the clock was set back"
