"""The pages of the store's twin: what a disk did with them, and what reads and mends them.

Each row of `by_key` and `by_seqno` stands for a page that has a checksum elsewhere, as LMDB's pages
have (`pages.sums`). The checksum of a block's page covers its head, which has the checksums of its
versions; that of a record covers all of it. The product's code finds what is wrong, and mends it;
only the pages are the twin's.

    TwinEnv       the database, of which pages can be damaged while a process runs
    TwinScan      what the scrubber reads (for `vbucket.store.lmdb.page_scan.PageScan`)
    TwinMender    what writes pages again (for `vbucket.store.lmdb.page_mend.PageMender`)
    put_in_place  a block is damaged beside the store, and mended from another copy's versions

Invariants
- damage is of the page, so all states of the store that have it see it; a commit that writes the
  row again writes another page;
- rows themselves stay what was committed: `as_written` shows them to checkers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, Final, cast

import google_crc32c
from sortedcontainers import SortedDict

from memory.kv_env import MemoryEnv, MemorySnapshot, MemoryWrite, _Reader
from sim.checkers.shown import NAMED, PUT_RIGHT
from sim.facts import Damaged
from support.forgetful_disk import ForgetfulEnv, Power
from vbucket.check.mend import put_versions
from vbucket.check.scrub import AREAS, Piece, ScrubPlace
from vbucket.check.scrub_pieces import ScrubPieces
from vbucket.model.entry import seqno_of
from vbucket.model.flipped_bit import unflipped
from vbucket.store.block import Block
from vbucket.store.environment import StoreDamagedError, WriteLostError, partition_of, place_of
from vbucket.store.lmdb.lmdb_pages import LEAF
from vbucket.store.lmdb.page_mend import BadPage, PageMender, ValuePlace
from vbucket.store.lmdb.page_scan import Leaf
from vbucket.store.records import BY_KEY_TABLE, BY_SEQNO_TABLE

PAGED: Final = (BY_SEQNO_TABLE, BY_KEY_TABLE)
KINDS: Final = ("flip", "zeros", "lost write", "misdirected write", "unreadable")
LEAF_ROWS: Final = 8
ALONE, FROM_COPY = "mended alone", "mended by another copy"
"""How a damage ends."""
SECTOR_BYTES: Final = 512
_PAGE: Final = 7
"""Number of a page: nobody looks at it."""
_crc32c = google_crc32c.value


class Pages:
    """The pages that are not what was written."""

    def __init__(self) -> None:
        self.wrong: dict[tuple[str, bytes], Damaged] = {}
        self.is_hidden = False
        self.were_ever_wrong = False

    def read(self, table: str, key: bytes, row: bytes) -> bytes:
        """Return what a read of a row gets. Raises StoreDamagedError."""
        page = self.wrong.get((table, key))
        if page is None or page.row is not row or self.is_hidden:
            return row
        if page.now is None:
            what = "its sector cannot be read"
        elif _sum(page, page.now) != page.known:
            what = "its page is not what was written"
        else:
            return page.now
        raise StoreDamagedError(f"{place_of(table, key)}: {what}", partition_of(table, key))

    def damage(self, table: str, key: bytes, row: bytes, page: Damaged, now: bytes | None) -> None:
        """Let a page have this content, or be unreadable."""
        page.row, page.head_bytes = row, len(row)
        if table == BY_SEQNO_TABLE:
            page.head_bytes = len(head_of(key, row))
        page.known = _sum(page, row)
        page.now = None if now is None else now[: len(row)].ljust(len(row), b"\0")
        self.wrong[table, key] = page
        self.were_ever_wrong = True

    def put(self, table: str, key: bytes, data: bytes, *, is_proven: bool, how: str) -> None:
        """A page was written again, to mend it. `is_proven`: all of it is, and not its head."""
        page = self.wrong[table, key]
        page.now = data
        if data == page.row:
            page.ended = how
            del self.wrong[table, key]
        elif is_proven:
            page.is_put_wrong = True


def _sum(page: Damaged, data: bytes) -> int:
    return _crc32c(data[: page.head_bytes])


def head_of(key: bytes, value: bytes) -> bytes:
    """Return what a block has before its versions: their checksums, too."""
    return value[: len(value) - len(Block(key, value).body)]


class _Paged(_Reader):
    """Reads of rows through their pages."""

    _pages: Pages

    def get(self, table: str, key: bytes) -> bytes | None:
        value = super().get(table, key)
        return None if value is None else self._pages.read(table, key, value)

    def get_many(self, table: str, keys: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        return [self._read(table, row) for row in super().get_many(table, keys)]

    def neighbours(self, table: str, key: bytes) -> list[tuple[bytes, bytes]]:
        return [self._read(table, row) for row in super().neighbours(table, key)]

    def first_at_or_after(self, table: str, key: bytes) -> tuple[bytes, bytes] | None:
        found = super().first_at_or_after(table, key)
        return None if found is None else self._read(table, found)

    def last_at_or_before(self, table: str, key: bytes) -> tuple[bytes, bytes] | None:
        found = super().last_at_or_before(table, key)
        return None if found is None else self._read(table, found)

    def range(
        self, table: str, start: bytes, stop: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        for row in super().range(table, start, stop):
            yield self._read(table, row)

    def _read(self, table: str, row: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
        return row[0], self._pages.read(table, *row)


class _Snapshot(_Paged, MemorySnapshot):
    def __init__(self, env: TwinEnv) -> None:
        super().__init__(env)
        self._pages = env.pages


class _Write(_Paged, MemoryWrite):
    """A write next to damage is lost: it would copy a page that is not what was written."""

    def __init__(self, env: TwinEnv) -> None:
        super().__init__(env)
        self._pages = env.pages

    def put(self, table: str, key: bytes, value: bytes) -> None:
        self._check(table, key)
        super().put(table, key, value)

    def delete(self, table: str, key: bytes) -> bool:
        self._check(table, key)
        return super().delete(table, key)

    def _check(self, table: str, key: bytes) -> None:
        if table != BY_SEQNO_TABLE and (table, key) in self._pages.wrong:
            try:
                self.get(table, key)
            except StoreDamagedError as error:
                raise WriteLostError(str(error)) from error


class TwinEnv(ForgetfulEnv):
    """See the module."""

    def __init__(self, power: Power, tables: Sequence[str]) -> None:
        super().__init__(power, tables)
        self.pages = Pages()

    def snapshot(self) -> MemorySnapshot:
        """See KvEnv."""
        return _Snapshot(self)

    def new_write(self) -> MemoryWrite:
        """See ForgetfulEnv."""
        return _Write(self)

    def after(self, power: Power, draw: Random, share: float) -> TwinEnv:
        """See ForgetfulEnv: what a disk did stays."""
        env = super().after(power, draw, share)
        assert isinstance(env, TwinEnv)
        env.pages = self.pages
        return env

    def current(self) -> list[Damaged]:
        """Return the damages of rows that are still the committed ones; forget the others."""
        for (table, key), page in list(self.pages.wrong.items()):
            if self.tables[table].get(key) is not page.row:
                page.ended = page.ended or "its row was written anew"
                del self.pages.wrong[table, key]
        return list(self.pages.wrong.values())

    def strike(self, draw: Random, table: str, key: bytes, page: Damaged) -> bool:
        """Damage a row in a way; return whether it is something else now."""
        row, rows = self.tables[table][key], self.tables[table]
        now: bytes | None = row
        if page.kind == "flip":
            bit = draw.randrange(8 * len(row))
            now = row[: bit // 8] + bytes([row[bit // 8] ^ 1 << bit % 8]) + row[bit // 8 + 1 :]
        elif page.kind == "zeros":
            at = draw.randrange(len(row))
            now = row[:at] + bytes(len(row[at : at + SECTOR_BYTES])) + row[at + SECTOR_BYTES :]
        elif page.kind == "unreadable":
            now = None
        else:
            older = [each[table][key] for each in self._earlier if key in each[table]]
            older = [each for each in older if each != row]
            others = rows.values() if page.kind == "misdirected write" or not older else older
            now = others[draw.randrange(len(others))]
        self.pages.damage(table, key, row, page, now)
        if self.pages.wrong[table, key].now == row:
            del self.pages.wrong[table, key]
            return False
        return True

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """See ForgetfulEnv."""
        before, self.pages.is_hidden = self.pages.is_hidden, True
        try:
            yield
        finally:
            self.pages.is_hidden = before

    def put_right(self, why: str, vb_ids: Sequence[int] | None = None) -> bool:
        """Have the disk's content again as a backup has it, of these partitions or of all; return
        whether anything was wrong. `why`: what has named it; "": the scrubber has, or nobody.
        """
        found = [page for page in self.current() if vb_ids is None or page.vb_id in vb_ids]
        for page in found:
            page.named = page.named or why
            page.ended = NAMED if why else PUT_RIGHT
            del self.pages.wrong[page.table, page.key]
        return bool(found)


class TwinScan(_Paged):
    """See the module."""

    def __init__(self, env: TwinEnv) -> None:
        super().__init__(env.tables)
        self._pages = env.pages

    def leaf(self, table: str, key: bytes) -> Leaf:
        """See PageScan."""
        rows = self._tables[table]
        keys = list(rows.irange(key))[: LEAF_ROWS + 1]
        found: list[tuple[bytes, bytes]] = []
        damages: list[tuple[bytes, bytes | None, str]] = []
        size_bytes = 0
        for own in keys[:LEAF_ROWS]:
            size_bytes += len(rows[own])
            try:
                found.append((own, self._pages.read(table, own, rows[own])))
            except StoreDamagedError as error:
                damages.append((own, own + b"\0", str(error)))
        behind = keys[LEAF_ROWS] if len(keys) > LEAF_ROWS else None
        return Leaf(found, damages, behind, size_bytes)


class TwinMender(_Paged):
    """See the module."""

    def __init__(
        self, tables: Mapping[str, Any], pages: Pages, power_point: Callable[[str], None]
    ) -> None:
        """`power_point` is called before each write."""
        super().__init__(tables)
        self._pages = pages
        self._power_point = power_point

    def __enter__(self) -> TwinMender:
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to close."""

    def _wrong(self, table: str, key: bytes) -> Damaged | None:
        page = self._pages.wrong.get((table, key))
        return page if page is not None and self._tables[table].get(key) is page.row else None

    def bad_page(self, table: str, key: bytes) -> BadPage | None:
        """See PageMender."""
        page = self._wrong(table, key)
        if page is None or (page.now is not None and _sum(page, page.now) == page.known):
            return None
        kind = 0 if table == BY_SEQNO_TABLE else LEAF
        return BadPage(_PAGE, kind, 1, 1, key, key + b"\0")

    def put_bit_back(self, table: str, key: bytes, _bad: BadPage) -> bool:
        """See PageMender."""
        page = self._wrong(table, key)
        assert page is not None
        if page.now is None:
            return False
        fixed = unflipped(page.now[: page.head_bytes], page.known)
        if fixed is None:
            return False
        self._put(table, key, fixed + page.now[page.head_bytes :], is_proven=False)
        return True

    def put_rows(
        self, table: str, key: bytes, _bad: BadPage, rows: Sequence[tuple[bytes, bytes]]
    ) -> bool:
        """See PageMender."""
        if [own for own, _ in rows] != [key]:
            return False
        page = self._wrong(table, key)
        assert page is not None
        page.known = _crc32c(rows[0][1])
        page.head_bytes = len(rows[0][1])
        self._put(table, key, rows[0][1])
        return True

    def put_branch(self, *_: object) -> bool:
        """See PageMender: there are none."""
        return False

    def place_of_value(self, table: str, key: bytes) -> ValuePlace | None:
        """See PageMender."""
        row = self._tables[table].get(key)
        return None if row is None else ValuePlace(0, len(row), _PAGE)

    def bytes_at(self, table: str, key: bytes, _place: ValuePlace) -> bytes:
        """See PageMender."""
        page = self._wrong(table, key)
        row = self._tables[table][key] if page is None else page.now
        if row is None:
            raise StoreDamagedError(f"{place_of(table, key)}: its sector cannot be read")
        return row

    def put_part(self, table: str, key: bytes, place: ValuePlace, at: int, data: bytes) -> None:
        """See PageMender."""
        row = self.bytes_at(table, key, place)
        self._put(table, key, row[:at] + data + row[at + len(data) :])

    def put_value(self, table: str, key: bytes, _place: ValuePlace, value: bytes) -> bool:
        """See PageMender."""
        page = self._wrong(table, key)
        if page is None or _sum(page, value) != page.known:
            return False
        self._put(table, key, value, how=FROM_COPY)
        return True

    def put_sum(self, _table: str, _key: bytes, _place: ValuePlace) -> bool:
        """See PageMender. A simulated page always has its right checksum."""
        return False

    def _put(
        self, table: str, key: bytes, data: bytes, *, is_proven: bool = True, how: str = ALONE
    ) -> None:
        self._power_point("store repair")
        self._pages.put(table, key, data, is_proven=is_proven, how=how)


class TwinPieces(ScrubPieces):
    """What the scrubber of a simulated node reads. Its log is read at starts and merges only."""

    piece_bytes = 2 << 10

    def __init__(self, env: TwinEnv) -> None:
        super().__init__()
        self._env = env

    def reader(self) -> Any:
        """See ScrubPieces."""
        return TwinScan(self._env)

    def mender(self) -> Any:
        """See ScrubPieces."""
        return TwinMender(self._env.tables, self._env.pages, self._env.power_point)

    def check_file(self) -> None:
        """See ScrubPieces. All that the twin has belongs to tables."""

    def log_piece(self, _place: ScrubPlace, _is_over: object) -> Piece:
        """See ScrubPieces."""
        return Piece(ScrubPlace(len(AREAS)), 0, [])


def put_in_place(env: MemoryEnv, vb_id: int, entries: Sequence[bytes]) -> bool | None:
    """Damage a copy of a block of a partition that has one of these versions of another node, and
    have it mended with them; return whether it is what it was. None: there is no such block, or
    they are not taken. The store stays as it is: plans without damages do this, too.
    """
    given = {seqno_of(entry) for entry in entries}
    for key, value in env.tables[BY_SEQNO_TABLE].items():
        if key[:2] == vb_id.to_bytes(2, "big"):
            seqnos = Block(key, value).seqnos
            lost = next((at for at, seqno in enumerate(seqnos) if seqno in given), None)
            if lost is not None:
                return _mended(key, value, lost, entries)
    return None


def _mended(key: bytes, value: bytes, lost: int, entries: Sequence[bytes]) -> bool | None:
    """Mend a block of which the last bit of a version is wrong."""
    damaged = bytearray(value)
    damaged[len(head_of(key, value)) + Block(key, value).ends[lost] - 1] ^= 1
    pages, page = Pages(), Damaged(0, "", BY_SEQNO_TABLE, key, KINDS[0])
    pages.damage(BY_SEQNO_TABLE, key, value, page, bytes(damaged))
    mender = TwinMender({BY_SEQNO_TABLE: SortedDict({key: value})}, pages, lambda _: None)
    how = put_versions(cast("PageMender", mender), key, entries)
    return not pages.wrong if how else None
