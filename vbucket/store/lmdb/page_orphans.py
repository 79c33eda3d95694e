"""Finds the pages that nothing leads to any more because the page above them is damaged.

LMDB's pages do not know what is above them. But each page of the file is free, or something leads
to it. So what is sound, not free and led to by nothing was below the damaged page.

Who calls it: `vbucket.store.lmdb.page_mend`, which makes the damaged page again. Reading all pages
of the file takes a second for some GiB, so files of more than PAGES_MAX pages are left alone.

Invariants
- each page that is found has its own number and the checksum that is known of it;
- the pages below a branch are found all or not at all: the table's record counts its pages;
- if a page above others is damaged elsewhere, too, nothing is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import google_crc32c

from vbucket.store.environment import StoreDamagedError
from vbucket.store.lmdb.lmdb_pages import (
    BRANCH,
    FREE_TABLE,
    LARGE,
    LARGE_HEAD,
    LEAF,
    MAIN_TABLE,
    METAS,
    NO_ROOT,
    PAGE_HEAD,
    TREE_RECORD,
    Page,
    Tree,
)
from vbucket.store.lmdb.page_scan import PageScan

PAGES_MAX: Final = 1 << 21
"""8 GiB in pages of 4 KiB."""
_READ_PAGES: Final = 256
_crc32c = google_crc32c.value


class OrphanScan(PageScan):
    """See the module. Everything may raise StoreDamagedError: then nobody can tell."""

    def orphans(self, table: str, branch: int, low: bytes) -> list[tuple[bytes, int]]:
        """Return the pages that a damaged branch led to, each with its lowest key (the first one
        with `low`, the bound of the branch); []: nobody can tell. Raises StoreDamagedError.
        """
        branches, leaves = self._below(table, self._tree(table), branch)
        used = branches | leaves
        for name, tree in self._all_trees().items():
            if name != table:
                used = used.union(*self._below(name, tree, branch))
        lost = {
            number: self._page(table, low, number, kind)
            for number, kind in self._unused(used).items()
            if kind != LARGE
        }
        nested = {child for page in lost.values() for child in page.children}
        counts = [sum(page.kind == kind for page in lost.values()) for kind in (BRANCH, LEAF)]
        if [len(branches) + counts[0], len(leaves) + counts[1]] != self._counted(table):
            return []
        top = [number for number in lost if number not in nested]
        if len({lost[number].kind for number in top}) != 1:
            return []
        found = sorted((_lowest(lost, number), number) for number in top)
        return [(low, found[0][1]), *found[1:]]

    def large_values(self) -> Iterator[tuple[int, bytes]]:
        """Yield first page and content of each value with pages of its own that is not free,
        whether or not something leads to it. The content ends with what its last page has behind
        it. Raises StoreDamagedError.
        """
        for number, kind in self._unused(set()).items():
            if kind == LARGE:
                head = self._page_of(MAIN_TABLE, b"", number, 1)
                *_, pages = LARGE_HEAD.unpack_from(head)
                yield number, self._page_of(MAIN_TABLE, b"", number, pages)[LARGE_HEAD.size :]

    def _all_trees(self) -> dict[str, Tree]:
        state = self._state
        return {FREE_TABLE: state.free, MAIN_TABLE: state.main, **self._tables()}

    def _below(self, table: str, tree: Tree, without: int) -> tuple[set[int], set[int]]:
        """Return the branches and leaves of a table, but for what is below one branch."""
        level = set() if tree.root == NO_ROOT else {tree.root}
        branches: set[int] = set()
        for _ in range(1, tree.depth):
            branches |= level
            pages = (self._page(table, b"", each, BRANCH) for each in level if each != without)
            level = {child for page in pages for child in page.children}
        return branches, level

    def _counted(self, table: str) -> list[int]:
        """Return how many branches and leaves a table has, as its record says."""
        for number, page, _, _ in self._leaves(MAIN_TABLE, b"", None):
            for key, (place, _, _) in zip(page.keys, page.nodes, strict=True):
                if key == table.encode():
                    raw = self._page_of(MAIN_TABLE, key, number, 1)
                    return [*TREE_RECORD.unpack_from(raw, place)[3:5]]
        return []

    def _unused(self, used: set[int]) -> dict[int, int]:
        """Return the pages that are neither used nor free and are what was written last: page ->
        its kind.
        """
        end = self._state.last_page + 1
        if end > PAGES_MAX or self._sums is None:
            raise StoreDamagedError(f"a file of {end} pages is not searched")
        used = used | set(self.free_pages())
        found: dict[int, int] = {}
        for first in range(METAS, end, _READ_PAGES):
            count = min(_READ_PAGES, end - first)
            raw = self._page_of(MAIN_TABLE, b"", first, count)
            for number in range(first, first + count):
                at = (number - first) * self._page_bytes
                own, _, kind, _, _ = PAGE_HEAD.unpack_from(raw, at)
                if own != number or kind not in {BRANCH, LEAF, LARGE} or number in used:
                    continue
                page = raw[at : at + self._page_bytes]
                if _crc32c(page) == self._sums.known(number):
                    found[number] = kind
        return found


def _lowest(pages: dict[int, Page], number: int) -> bytes:
    """Return the lowest key below a page. Raises StoreDamagedError if its pages are not there."""
    page = pages[number]
    while page.kind == BRANCH:
        if page.children[0] not in pages:
            raise StoreDamagedError("a page below it is missing")
        page = pages[page.children[0]]
    return page.keys[0]
