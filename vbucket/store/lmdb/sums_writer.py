"""Writes the checksums of LMDB's pages (`vbucket.store.lmdb.page_sums`) by comparing two states of
the file: a page that both have has not changed, because LMDB writes to copies.

Who calls it: `vbucket.store.lmdb.environment_lmdb` after each commit, and `lmdb_file` for a reader
after a crash.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count, repeat
from pathlib import Path
from struct import Struct, unpack_from
from typing import Final, NamedTuple

from vbucket.native import page_crcs
from vbucket.store.environment import StoreDamagedError
from vbucket.store.lmdb.lmdb_pages import (
    DEPTH_MAX,
    FIRST_PAGE_ONLY,
    FREE_TABLE,
    MAIN_TABLE,
    TREE_RECORD_BYTES,
    Meta,
    Tree,
    pages_of,
    tree_of,
)
from vbucket.store.lmdb.page_sums import (
    BY_HEART_BYTES_MAX,
    ENTRIES_AT,
    SUMS_FILE_NAME,
    SUMS_HEADER,
    SUMS_MAGIC,
    KnownSums,
    PageSums,
)

_GROWTH_BYTES: Final = 1 << 16
"""The file grows by so much at a time: the checksums of 64 MiB of pages."""
_WRONG: Final = 0xFFFFFFFF
"""Changes a checksum into one that its page does not have."""
_U64: Final = Struct("=Q").unpack_from
_PAGE_HEAD: Final = Struct("=8xHHHH").unpack_from
_NODE: Final = Struct("=IHH").unpack_from
_LINK: Final = Struct("=IH").unpack_from
_PAGE_HEADER_BYTES: Final = 16
_NODE_HEADER_BYTES: Final = 8
_BRANCH: Final = 1
_BIG_VALUE, _TABLE = 1, 2
_NO_ROOT: Final = 2**64 - 1

State = dict[str, Tree]
"""Table -> its tree, the lists of free pages and of tables included."""

Bounds = tuple[bytes, bytes | None]
"""The keys that a page can have: low <= key < high."""
_Link = tuple[int, int]
"""How a branch names a child: the low and the high bits of its number."""
_Place = tuple[tuple[bytes, Sequence[int], Bounds], int]
"""A branch, where its nodes are and its bounds, and which of the nodes leads to the child."""


class Changed(NamedTuple):
    """Pages of one height that are in one of two states only, or large values."""

    table: str
    height: int
    """0 for leaves; -1 for large values."""
    bytes_summed: int
    """Of each page, or value, from its beginning."""
    pages: dict[int, Bounds]
    """By the number of the page, or the first page."""


class _Damaged(NamedTuple):
    """An outdated page that a commit has replaced."""

    table: str
    height: int
    low: bytes
    high: bytes | None


class SumsWriter:
    """Keeps the file as new as the store. One process has it at a time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SUMS_FILE_NAME
        self._fd = -1
        self._map: mmap.mmap | None = None
        self.by_heart = KnownSums()

    def follow(self, view: memoryview, before: Meta | None, after: Meta) -> list[str]:
        """Write the checksums of the pages that `after` has and `before` has not; None: of all.

        Return the tables in which an outdated page was replaced. Raises OSError.
        """
        compare = _Comparison(view, after.page_bytes)
        new, gone = compare.states(before, after)
        last_page = max(after.last_page, 0 if before is None else before.last_page)
        entries = self._room(last_page)
        assert self._map is not None
        heart = self.by_heart.words(len(self._map))
        known = entries if heart is None else heart
        damaged = [
            each for part in gone for each in _damaged(compare, part, known, last_page)
        ]  # fmt: skip
        highest: dict[str, int] = {}
        for part in new:
            highest[part.table] = max(part.height, highest.get(part.table, part.height))
        for part in new:
            numbers = [number for number in part.pages if number <= last_page]
            for number, crc in zip(numbers, compare.sums(part, numbers), strict=True):
                entries[ENTRIES_AT + number] = known[ENTRIES_AT + number] = crc
            for each in damaged:
                if part.table == each.table and part.height == min(
                    each.height, highest[part.table]
                ):
                    for number in _that_may_be_from(each, part, numbers):
                        known[ENTRIES_AT + number] ^= _WRONG
                        entries[ENTRIES_AT + number] = known[ENTRIES_AT + number]
        entries.release()
        if heart is not None:
            heart.release()
        self._map.flush()
        header = SUMS_HEADER.pack(SUMS_MAGIC, after.transaction)
        self._map[8:16] = header[8:]
        if self.by_heart.content is not None:
            self.by_heart.content[: len(header)] = header
        return sorted({each.table for each in damaged})

    def learn(self) -> None:
        """Know the file by heart from now on. No other process may write it."""
        with suppress(FileNotFoundError):
            size = self._path.stat().st_size & ~3
            if SUMS_HEADER.size <= size <= BY_HEART_BYTES_MAX:
                self.by_heart.content = bytearray(self._path.read_bytes()[:size])

    def put_back(self, *, is_whole: bool) -> bool:
        """Make the file what is known of it; return whether it was not. Without `is_whole` only its
        header is compared, which costs nothing. Raises OSError.
        """
        content = self.by_heart.content
        if content is None:
            return False
        size = len(content) if is_whole else SUMS_HEADER.size
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # the next start makes it anew
            return False
        try:
            if os.pread(fd, size, 0) == content[:size]:
                return False
            os.pwrite(fd, content, 0)  # in place: others have mapped it
            os.fdatasync(fd)
        finally:
            os.close(fd)
        return True

    def close(self) -> None:
        """Close the file."""
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _room(self, last_page: int) -> memoryview:
        """Return the file's words, enough for this page."""
        needed = SUMS_HEADER.size + 4 * (last_page + 1)
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._fd).st_size
        if size < needed:
            grown = -(-needed // _GROWTH_BYTES) * _GROWTH_BYTES
            os.posix_fallocate(self._fd, size, grown - size)
            if size < SUMS_HEADER.size:
                os.pwrite(self._fd, SUMS_HEADER.pack(SUMS_MAGIC, 0), 0)
            size = grown
        if self._map is None or len(self._map) < size & ~3:
            if self._map is not None:
                self._map.close()
            self._map = mmap.mmap(self._fd, size & ~3)
        return memoryview(self._map).cast("I")


class _Comparison:
    """Two states of a file. Pages of the earlier one may be damaged, so nothing is believed."""

    def __init__(self, view: memoryview, page_bytes: int) -> None:
        self._view = view
        self._page_bytes = page_bytes

    def states(self, before: Meta | None, after: Meta) -> tuple[list[Changed], list[Changed]]:
        """Return the pages that only the later state has, and those that only the earlier one has.

        A page of both has not changed, so what is below it is not looked at.
        """
        new: list[Changed] = []
        gone: list[Changed] = []
        old, now = (
            {}
            if state is None
            else {FREE_TABLE: state.free, MAIN_TABLE: state.main} | self.tables(state.main)
            for state in (before, after)
        )
        for table in old.keys() | now.keys():
            self.tree(table, old.get(table), now.get(table), gone, new)
        return new, gone

    def sums(self, part: Changed, numbers: list[int]) -> list[int]:
        """Return the checksums of some of the pages."""
        return page_crcs(self._view, self._page_bytes, part.bytes_summed, numbers)

    def keys(self, number: int) -> list[bytes]:
        """Return the keys that a page has."""
        return [key for key, *_ in self._nodes(number)]

    def tables(self, main: Tree) -> State:
        """Return the tables that a list of tables names."""
        found: State = {}
        leaves = [
            part.pages for part in self._only_in(None, main, MAIN_TABLE)[1] if not part.height
        ]
        numbers = [number for pages in leaves for number in pages]
        for key, flags, at, size in (node for number in numbers for node in self._nodes(number)):
            if flags == _TABLE and size == TREE_RECORD_BYTES:
                record = bytes(self._view[at : at + size])
                found[key.decode(errors="backslashreplace")] = tree_of(record)
        return found

    def tree(
        self,
        table: str,
        old: Tree | None,
        new: Tree | None,
        gone: list[Changed],
        added: list[Changed],
    ) -> None:
        """Add the pages that only one of two states of a table has."""
        parts = self._only_in(old, new, table)
        large: list[dict[tuple[int, int], Bounds]] = [{}, {}]
        for tree, found, values in zip((old, new), parts, large, strict=True):
            if tree is not None and tree.large_pages:
                for part in found:
                    for number in part.pages if not part.height else ():
                        values.update(self._large(table, number))
        for at, into in ((0, gone), (1, added)):
            into.extend(parts[at])
            by_pages: dict[int, dict[int, Bounds]] = {}
            for first, pages in large[at].keys() - large[1 - at].keys():
                by_pages.setdefault(pages, {})[first] = large[at][first, pages]
            for pages, found_values in by_pages.items():
                into.append(Changed(table, -1, pages * self._page_bytes, found_values))

    def _only_in(
        self, old: Tree | None, new: Tree | None, table: str
    ) -> tuple[list[Changed], list[Changed]]:
        """Return the pages that only one of two trees has."""
        found: tuple[list[Changed], list[Changed]] = ([], [])
        levels: list[dict[int, Bounds]] = [{}, {}]
        trees = (old, new)
        depth = max(0 if tree is None else min(tree.depth, DEPTH_MAX) for tree in trees)
        for height in reversed(range(depth)):
            for tree, level in zip(trees, levels, strict=True):
                if tree is not None and tree.depth == height + 1 and tree.root != _NO_ROOT:
                    level[tree.root] = (b"", None)
            for number in levels[0].keys() & levels[1].keys():
                del levels[0][number], levels[1][number]
            below: list[dict[_Link, _Place]] = [{}, {}]
            for level, parts, children in zip(levels, found, below, strict=True):
                if level:
                    parts.append(Changed(table, height, self._page_bytes, level))
                for number, bounds in level.items() if height else ():
                    children.update(self._children(number, bounds))
            both = below[0].keys() & below[1].keys()
            levels = [
                {
                    size | flags << 32: _bounds_of(place)
                    for (size, flags), place in each.items()
                    if (size, flags) not in both
                }
                for each in below
            ]
        return found

    def _children(self, number: int, bounds: Bounds) -> Iterator[tuple[_Link, _Place]]:
        """Return the children of a branch, which can have keys in these bounds."""
        if self._head(number)[0] != _BRANCH:
            return iter(())
        raw, slots = self._page(number)
        links = map(_LINK, repeat(raw), slots)
        places = zip(repeat((raw, slots, bounds)), count(), strict=False)
        return zip(links, places, strict=False)

    def _large(self, table: str, number: int) -> Iterator[tuple[tuple[int, int], Bounds]]:
        """Yield first page and pages of the values of a leaf that have pages of their own."""
        pages = 1
        for key, flags, at, size in self._nodes(number):
            if flags & _BIG_VALUE and at + 8 <= len(self._view):
                if table not in FIRST_PAGE_ONLY:
                    pages = pages_of(size, self._page_bytes)
                yield (_U64(self._view, at)[0], pages), (key, key + b"\0")

    def _head(self, number: int) -> tuple[int, int]:
        """Return flags and end of the slots of a page; zeros if it is not in the file."""
        start = number * self._page_bytes
        if start + self._page_bytes > len(self._view):
            return 0, 0
        _, flags, lower, _ = _PAGE_HEAD(self._view, start)
        return flags, min(lower, self._page_bytes)

    def _nodes(self, number: int) -> list[tuple[bytes, int, int, int]]:
        """Return for each node of a page: key, flags, where its value begins in the file, size."""
        raw, slots = self._page(number)
        start = number * self._page_bytes + _NODE_HEADER_BYTES
        found = []
        for slot in slots:
            size, flags, key_bytes = _NODE(raw, slot)
            at = slot + _NODE_HEADER_BYTES
            if at + key_bytes <= len(raw):
                value_at = start + slot + key_bytes
                found.append((raw[at : at + key_bytes], flags, value_at, size))
        return found

    def _page(self, number: int) -> tuple[bytes, Sequence[int]]:
        """Return a page, and where its nodes are."""
        lower = self._head(number)[1]
        start = number * self._page_bytes
        raw = bytes(self._view[start : start + self._page_bytes])
        if len(raw) < self._page_bytes:
            return raw, ()
        slots = unpack_from(f"={max(lower - _PAGE_HEADER_BYTES, 0) // 2}H", raw, 16)
        end = len(raw) - _NODE_HEADER_BYTES
        if max(slots, default=0) > end:
            slots = tuple(slot for slot in slots if slot <= end)
        return raw, slots


def _bounds_of(place: _Place) -> Bounds:
    """Return the keys that a child can have."""
    (raw, slots, (low, high)), index = place
    if index:
        low = _key_of(raw, slots[index])
    if index + 1 < len(slots):
        high = _key_of(raw, slots[index + 1])
    return low, high


def _key_of(raw: bytes, slot: int) -> bytes:
    at = slot + _NODE_HEADER_BYTES
    return raw[at : at + _NODE(raw, slot)[2]]


def _damaged(
    compare: _Comparison, part: Changed, entries: memoryview, last_page: int
) -> Iterator[_Damaged]:
    """Yield the pages whose checksums differ, with bounds that have the keys in them, too."""
    numbers = [number for number in part.pages if number <= last_page]
    sums = compare.sums(part, numbers)
    known = [entries[ENTRIES_AT + number] for number in numbers]
    if known == sums and len(numbers) == len(part.pages):
        return
    right = {n for n, crc, there in zip(numbers, sums, known, strict=True) if crc == there}
    for number in part.pages.keys() - right:
        low, high = part.pages[number]
        if not part.height:
            keys = compare.keys(number)
            low = min([low, *keys])
            high = None if high is None else max([high, *(key + b"\0" for key in keys)])
        yield _Damaged(part.table, part.height, low, high)


def _that_may_be_from(damaged: _Damaged, part: Changed, numbers: list[int]) -> Iterator[int]:
    """Yield the new pages that may have content of a damaged one."""
    for number in numbers:
        low, high = part.pages[number]
        is_below = high is not None and high <= damaged.low
        is_above = damaged.high is not None and low >= damaged.high
        # The keys of the list of free pages do not ascend as bytes.
        if part.table == FREE_TABLE or not (is_below or is_above):
            yield number


def put_header_back(folder: Path, state: Meta) -> bool:
    """Write the header of the file again if its first bytes are damaged, and the checksums prove
    that they are those of this state, the newest one; return whether it was so. Raises OSError.

    A header that only has another transaction is left: then the data file may be an older one.
    """
    path = folder / SUMS_FILE_NAME
    header = SUMS_HEADER.pack(SUMS_MAGIC, state.transaction)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return False
    magic, _ = SUMS_HEADER.unpack_from(raw.ljust(SUMS_HEADER.size, b"\0"))
    if len(raw) <= SUMS_HEADER.size or magic == SUMS_MAGIC:
        return False
    with path.with_name("data.mdb").open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    compare, known = _Comparison(view, state.page_bytes), memoryview(raw[: len(raw) & ~3]).cast("I")
    for part in compare.states(None, state)[0]:
        numbers = list(part.pages)
        if ENTRIES_AT + max(numbers, default=0) >= len(known):
            return False
        if [known[ENTRIES_AT + number] for number in numbers] != compare.sums(part, numbers):
            return False
    with path.open("r+b") as sums:
        sums.write(header)
        sums.flush()
        os.fdatasync(sums.fileno())
    return True


def follow_a_crash(sums: PageSums, view: memoryview, before: Meta, after: Meta) -> None:
    """Let a reader compare all pages of a state, also if a crash kept the checksums of its commit
    from the file. Nobody may write meanwhile. The new pages themselves are not compared.

    Raises StoreDamagedError if the commit has replaced an outdated page.
    """
    if not sums.transaction:
        return
    compare = _Comparison(view, after.page_bytes)
    new, gone = compare.states(before, after)
    for part in gone:
        numbers = list(part.pages)
        if [sums.known(number) for number in numbers] != compare.sums(part, numbers):
            raise StoreDamagedError(
                f"{sums.path.with_name('data.mdb')}: table {part.table}: a page that the last "
                "commit has replaced was not the one that was written last (the disk has lost a "
                "write, or an older file was put back); check the disk and restore a backup"
            )
    sums.accept(frozenset(number for part in new for number in part.pages), after.transaction)
