"""Reads a store leaf by leaf, for a check of all of it, and goes on behind damage.

Each page is read from the file with a system call: a sector that the disk cannot read is an error
here, and no signal that ends the process. Nothing is kept from an earlier check.

Who calls it: the scrubber (`vbucket.check.scrub`). Nobody may write meanwhile: it shows the newest
state as of its beginning.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from contextlib import suppress
from typing import NamedTuple

from vbucket.store.environment import StoreDamagedError, partition_of, place_of
from vbucket.store.lmdb.lmdb_file import PageFile
from vbucket.store.lmdb.lmdb_pages import (
    BIG_VALUE,
    BRANCH,
    FIRST_PAGE_ONLY,
    HEADER_BYTES,
    METAS,
    PageReader,
    page_number,
    pages_of,
)


class Leaf(NamedTuple):
    """What a leaf has from a key on."""

    found: list[tuple[bytes, bytes]]
    """Pairs whose pages are sound."""
    damages: list[tuple[bytes, bytes | None, str]]
    """First key of what cannot be read, the first one behind it (None: the table's end), and why.
    """
    behind: bytes | None
    """Where the next leaf begins; None: this was the last one."""
    size_bytes: int
    """Bytes that were read of the file."""


class PageScan(PageReader):
    """See the module. `close` closes no file: that is the caller's."""

    def __init__(self, file: PageFile) -> None:
        """Raises StoreDamagedError if the file has no state that can be read."""
        state = file.follow()
        file.map_state(state)
        super().__init__(file.view, state, sums=file.sums)
        self._fd = file.fileno
        self._size_bytes = 0

    def leaf(self, table: str, key: bytes) -> Leaf:
        """Return the leaf where a key is or would be, from the key on; never raises."""
        before = self._size_bytes
        found: list[tuple[bytes, bytes]] = []
        damages: list[tuple[bytes, bytes | None, str]] = []
        behind: bytes | None = None
        try:
            leaf = self._leaf_of(table, key)
            if leaf is not None:
                number, _, behind = leaf
                page = self._keys_of(table, key, leaf)
                raw = self._page_of(table, key, number, 1)
                for at in range(bisect_left(page.keys, key), len(page.keys)):
                    own, (place, size, flags) = page.keys[at], page.nodes[at]
                    if not flags:
                        found.append((own, raw[place : place + size]))
                        continue
                    try:
                        found.append((own, self._large(table, own, raw, place, size, flags)))
                    except StoreDamagedError as error:
                        damages.append((own, own + b"\0", str(error)))
        except StoreDamagedError as error:
            behind = self._behind_damage(table, key)
            damages.append((key, behind, str(error)))
        return Leaf(found, damages, behind, self._size_bytes - before)

    def _behind_damage(self, table: str, key: bytes) -> bytes | None:
        """Return the first key behind the lowest page on the way to a key that can be reached;
        None: there is none, or nobody can tell.
        """
        high: bytes | None = None
        with suppress(StoreDamagedError):
            depth, number, _ = self._tree(table)
            for _ in range(1, depth):
                page = self._page(table, key, number, BRANCH)
                after = bisect_right(page.keys, key)
                if after < len(page.keys):
                    high = page.keys[after]
                number = page.children[after - 1]
        return high

    def _bytes(self, table: str, key: bytes, start: int, stop: int) -> bytes:
        try:
            raw = os.pread(self._fd, stop - start, start)
        except OSError as error:
            raise StoreDamagedError(
                f"{place_of(table, key)}: bytes {start} to {stop} of the store's file cannot be "
                f"read: {error.strerror}; check the disk and restore a backup",
                partition_of(table, key),
            ) from error
        self._size_bytes += len(raw)
        return raw

    def _large(
        self, table: str, key: bytes, leaf: bytes, place: int, size: int, flags: int
    ) -> bytes:
        """Return a value that has pages of its own."""
        (number,) = page_number(leaf, place)
        if flags != BIG_VALUE:
            raise self._damaged(table, key, number, f"is named by a node with the flags {flags}")
        pages = pages_of(size, self._page_bytes)
        if not METAS <= number <= self._state.last_page - pages + 1:
            raise self._damaged(table, key, number, "holds a value that is not within the file")
        raw = self._page_of(table, key, number, pages)
        has_own_sums = table in FIRST_PAGE_ONLY
        self._compare(table, key, number, raw[: self._page_bytes] if has_own_sums else raw)
        return raw[HEADER_BYTES : HEADER_BYTES + size]

    def _page_of(self, table: str, key: bytes, number: int, pages: int) -> bytes:
        start = number * self._page_bytes
        return self._bytes(table, key, start, start + pages * self._page_bytes)
