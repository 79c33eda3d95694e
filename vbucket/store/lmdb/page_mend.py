"""Puts back what a page of a store held, in place, if the checksums prove it.

    a flipped bit    the difference of two CRC-32C names the bit; the page is written as it was
    a leaf           with the rows that the caller derived from other tables, and a new checksum
    a branch         with the pages that nothing else leads to (`page_orphans`), and a new checksum

Nothing else of the file changes: no tree, no state, no transaction. So readers of any state see the
damaged page or the mended one. A crash in between leaves a damaged page, which is mended again.

Who calls it: `vbucket.check.mend`, in the only process that writes, between transactions.

Invariants
- a bit is put back only if the page is sound then. Damage of many bits looks like one flipped bit
  in 8 of a million cases; then the checksum that each record and block has itself still tells;
- a page that has no checksum, or one that no page can have (vbucket.store.lmdb.page_sums), is never
  written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from struct import Struct
from types import TracebackType
from typing import Final, NamedTuple

import google_crc32c

from vbucket.model.flipped_bit import unflipped
from vbucket.store.environment import StoreDamagedError
from vbucket.store.lmdb.lmdb_file import PageFile
from vbucket.store.lmdb.lmdb_pages import (
    BIG_VALUE,
    BRANCH,
    FIRST_PAGE_ONLY,
    HEADER_BYTES,
    LARGE,
    LARGE_HEAD,
    LEAF,
    NODE,
    PAGE_HEAD,
    pages_of,
)
from vbucket.store.lmdb.page_orphans import OrphanScan

_SUMMED_MAX: Final = 4
"""Of so many pages the place of a flipped bit is certain."""
_crc32c = google_crc32c.value


class LargePlace(NamedTuple):
    """A value that has pages of its own."""

    number: int
    size: int


def leaf_of_rows(
    number: int, page_bytes: int, rows: Sequence[tuple[bytes, bytes | LargePlace]]
) -> bytes | None:
    """Return a leaf with these rows, which ascend; None: they do not fit, or there are none."""
    nodes = [
        NODE.pack(value.size, BIG_VALUE, len(key)) + key + value.number.to_bytes(8, sys.byteorder)
        if isinstance(value, LargePlace)
        else NODE.pack(len(value), 0, len(key)) + key + value
        for key, value in rows
    ]
    return _page_of_nodes(number, page_bytes, LEAF, nodes)


def branch_of(number: int, page_bytes: int, below: Sequence[tuple[bytes, int]]) -> bytes | None:
    """Return a branch above these pages, each with its lowest key; None: they do not fit."""
    keys = [b"", *(key for key, _ in below[1:])]
    nodes = [
        NODE.pack(child & 0xFFFF_FFFF, child >> 32, len(key)) + key
        for key, (_, child) in zip(keys, below, strict=True)
    ]
    return _page_of_nodes(number, page_bytes, BRANCH, nodes)


def _page_of_nodes(number: int, page_bytes: int, kind: int, nodes: list[bytes]) -> bytes | None:
    page = bytearray(page_bytes)
    slots: list[int] = []
    end = page_bytes
    for node in nodes:
        end -= len(node) + (len(node) & 1)
        if end < PAGE_HEAD.size + 2 * len(nodes):
            return None
        page[end : end + len(node)] = node
        slots.append(end)
    if not slots:
        return None
    lower = PAGE_HEAD.size + 2 * len(slots)
    PAGE_HEAD.pack_into(page, 0, number, 0, kind, lower, end)
    Struct(f"={len(slots)}H").pack_into(page, PAGE_HEAD.size, *slots)
    return bytes(page)


class BadPage(NamedTuple):
    """The first damaged page on the way to a key, and which keys it can have."""

    number: int
    kind: int
    """BRANCH, a leaf, or 0: a large value."""
    pages: int
    summed_pages: int
    """Of those, how many its checksum covers."""
    low: bytes
    high: bytes | None

    @property
    def is_leaf(self) -> bool:
        """Whether it has rows."""
        return self.kind == LEAF


class ValuePlace(NamedTuple):
    """Where a value is in the file."""

    at: int
    size: int
    number: int | None
    """Its first page, if it has pages of its own."""


class PageMender(OrphanScan):
    """See the module. `with` closes its descriptor."""

    def __init__(self, file: PageFile) -> None:
        """Raises OSError, StoreDamagedError."""
        super().__init__(file)
        self._write_fd = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
        self._tried: dict[int, bytes] = {}
        """By where they begin in the file: bytes that are checked before they are written."""

    def __enter__(self) -> PageMender:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._write_fd)

    def bad_page(self, table: str, key: bytes) -> BadPage | None:
        """Return the first damaged page on the way to a key and its value; None: all are sound.

        Raises StoreDamagedError if the list of tables is damaged.
        """
        depth, number, _ = self._tree(table)
        low, high = b"", None
        for level in range(depth, 0, -1):
            kind = BRANCH if level > 1 else LEAF
            try:
                page = self._page(table, key, number, kind)
            except StoreDamagedError:
                return BadPage(number, kind, 1, 1, low, high)
            if kind == LEAF:
                return self._bad_value(table, key, number)
            after = next((at for at, each in enumerate(page.keys) if each > key), len(page.keys))
            high = page.keys[after] if after < len(page.keys) else high
            low = page.keys[after - 1] or low
            number = page.children[after - 1]
        return None

    def _bad_value(self, table: str, key: bytes, leaf: int) -> BadPage | None:
        page = self._page(table, key, leaf, LEAF)
        if key not in page.keys:
            return None
        place, size, flags = page.nodes[page.keys.index(key)]
        if flags != BIG_VALUE:
            return None
        raw = self._page_of(table, key, leaf, 1)
        try:
            self._large(table, key, raw, place, size, flags)
        except StoreDamagedError:
            pages = pages_of(size, self._page_bytes)
            number = int.from_bytes(raw[place : place + 8], "little")
            summed = 1 if table in FIRST_PAGE_ONLY else pages
            return BadPage(number, 0, pages, summed, key, key + b"\0")
        return None

    def put_bit_back(self, table: str, key: bytes, bad: BadPage) -> bool:
        """Mend a page in which one bit is flipped; return whether that was it."""
        wanted = None if self._sums is None else self._sums.known(bad.number)
        if wanted is None or bad.summed_pages > _SUMMED_MAX:
            return False
        try:
            raw = self._page_of(table, key, bad.number, bad.summed_pages)
        except StoreDamagedError:
            return False
        fixed = unflipped(raw, wanted)
        return fixed is not None and self._put(table, key, bad, fixed)

    def put_rows(
        self, table: str, key: bytes, bad: BadPage,
        rows: Sequence[tuple[bytes, bytes | LargePlace]],
    ) -> bool:  # fmt: skip
        """Mend a leaf with the rows that it must have; return whether they fit."""
        return self._put_anew(table, key, bad, leaf_of_rows(bad.number, self._page_bytes, rows))

    def put_branch(self, table: str, key: bytes, bad: BadPage) -> bool:
        """Mend a branch with the pages that nothing else leads to; return whether that was it.
        Raises StoreDamagedError.
        """
        below = self.orphans(table, bad.number, bad.low)
        if not below or (bad.high is not None and below[-1][0] >= bad.high):
            return False
        if any(lowest < bad.low for lowest, _ in below):
            return False
        page = branch_of(bad.number, self._page_bytes, below)
        return self._put_anew(table, key, bad, page)

    def _put_anew(self, table: str, key: bytes, bad: BadPage, page: bytes | None) -> bool:
        """Mend a page with a content that has another checksum."""
        sums = self._sums
        before = None if sums is None else sums.known(bad.number)
        if page is None or sums is None or before is None:
            return False
        sums.put(bad.number, _crc32c(page))
        is_mended = self._put(table, key, bad, page)
        if not is_mended:
            sums.put(bad.number, before)
        return is_mended

    def put_bytes(self, at: int, data: bytes) -> None:
        """Write bytes of a value that the caller has proven. Raises OSError."""
        os.pwrite(self._write_fd, data, at)
        os.fdatasync(self._write_fd)

    def put_part(self, table: str, key: bytes, place: ValuePlace, at: int, data: bytes) -> None:
        """Write a part of a value, from a place in it on, that the caller has proven. The page
        matched its checksum before: then the checksum was made of the damage, and follows.
        Raises OSError, StoreDamagedError.
        """
        self.put_bytes(place.at + at, data)
        number = place.number if place.number is not None else place.at // self._page_bytes
        crc = _crc32c(self._page_of(table, key, number, 1))
        if self._sums is not None and self._sums.known(number) not in {None, crc}:
            self._sums.put(number, crc)

    def place_of_value(self, table: str, key: bytes) -> ValuePlace | None:
        """Return where the value of a key is in the file; None: it is not there.

        Raises StoreDamagedError.
        """
        leaf = self._leaf_of(table, key)
        if leaf is None:
            return None
        page = self._keys_of(table, key, leaf)
        if key not in page.keys:
            return None
        place, size, flags = page.nodes[page.keys.index(key)]
        if not flags:
            return ValuePlace(leaf[0] * self._page_bytes + place, size, None)
        raw = self._page_of(table, key, leaf[0], 1)
        number = int.from_bytes(raw[place : place + 8], "little")
        return ValuePlace(number * self._page_bytes + HEADER_BYTES, size, number)

    def bytes_at(self, table: str, key: bytes, place: ValuePlace) -> bytes:
        """Return the bytes of a value as they are. Raises StoreDamagedError if the disk cannot
        read them.
        """
        return self._bytes(table, key, place.at, place.at + place.size)

    def put_value(self, table: str, key: bytes, place: ValuePlace, value: bytes) -> bool:
        """Write a value that has pages of its own, if the first of them has its checksum then;
        return whether it has. Raises OSError.
        """
        assert place.number is not None, "it has pages of its own"
        pages = pages_of(len(value), self._page_bytes)
        head = LARGE_HEAD.pack(place.number, 0, LARGE, pages)
        try:
            tail = self._page_of(table, key, place.number + pages - 1, 1)
        except StoreDamagedError:
            tail = bytes(self._page_bytes)
        left = pages * self._page_bytes - len(head) - len(value)
        wanted = None if self._sums is None else self._sums.known(place.number)
        for rest in (tail[len(tail) - left :], bytes(left)):
            data = head + value + rest
            if wanted == _crc32c(data[: self._page_bytes]):
                self.put_bytes(place.number * self._page_bytes, data)
                return True
        return False

    def put_sum(self, table: str, key: bytes, place: ValuePlace) -> bool:
        """Take the first page of a value, which the caller has proven, for what was written last;
        return whether it has a checksum. Raises OSError, StoreDamagedError.
        """
        assert place.number is not None, "it has pages of its own"
        if self._sums is None or self._sums.known(place.number) is None:
            return False
        self._sums.put(place.number, _crc32c(self._page_of(table, key, place.number, 1)))
        self._kept.pop(place.number, None)
        return True

    def _put(self, table: str, key: bytes, bad: BadPage, data: bytes) -> bool:
        """Write a page if it is sound with this content."""
        at = bad.number * self._page_bytes
        self._tried[at] = data
        self._kept.pop(bad.number, None)
        try:
            if bad.kind:
                self._page(table, key, bad.number, bad.kind)
        except StoreDamagedError:
            return False
        finally:
            del self._tried[at]
        self.put_bytes(at, data)
        return True

    def _bytes(self, table: str, key: bytes, start: int, stop: int) -> bytes:
        tried = self._tried.get(start)
        return super()._bytes(table, key, start, stop) if tried is None else tried
