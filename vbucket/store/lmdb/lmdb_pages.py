"""Reads and checks LMDB's pages without LMDB. Pure.

LMDB trusts its pages. A cursor that moves to a page of the wrong type (a page of zeros, for
example) ends the process with an assertion. A size that leads beyond the end of the file ends it
with SIGBUS. A page with the content of another page silently hides existing keys. Here every page
on the way is checked, and damage raises a StoreDamagedError that names the table, the key and the
page.

Who calls it: `vbucket.store.lmdb.environment_lmdb`, for what LMDB does not do safely.

Invariants
- a reader shows one committed state, which a read transaction pins (or nobody writes). So its pages
  do not change. Checked pages are kept, and compared if another state has them, too;
- a checked page has its own number, the type of its level, and all nodes within it. Its keys ascend
  and lie between the keys that led to it. So a descent is at most as long as the tree is deep, a
  walk only moves forward, and a key that is not found is not in the tree;
- no byte behind the end of the file is read.

An outdated page of the same table (a write that the disk lost) and changed bytes in a page are
detected by the checksums beside the file (`vbucket.store.lmdb.page_sums`).

The format is that of LMDB 0.9 (data version 1), in the byte order of the machine.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import lt
from struct import Struct, unpack_from
from typing import TYPE_CHECKING, Final, NamedTuple

import google_crc32c

from vbucket.native import key_tree
from vbucket.store.environment import Buffer, StoreDamagedError, partition_of, place_of

if TYPE_CHECKING:
    from vbucket.native.loops import KeyTree
    from vbucket.store.lmdb.page_sums import PageSums

PAGES_KEPT_MAX: Final = 2048
"""Pages whose keys are kept, at some 10 KiB each: the branches above five million keys."""
METAS: Final = 2
"""Meta pages: the first pages of a file. A transaction writes the one of its parity."""
_MAGIC: Final = 0xBEEFC0DE
_DATA_VERSION: Final = 1
BRANCH, LEAF, LARGE, _META = 1, 2, 4, 8
BIG_VALUE: Final = 1
_TABLE: Final = 2
"""Flags of a node: its value is on pages of its own; it is a table's record."""
_KINDS: Final = {BRANCH: "branch", LEAF: "leaf"}
_NODES_MIN: Final = {BRANCH: 2, LEAF: 1}
NO_ROOT: Final = 2**64 - 1
DEPTH_MAX: Final = 32
_PAGE_BYTES_MIN, _PAGE_BYTES_MAX = 256, 0x8000
PAGE_HEAD: Final = Struct("=QHHHH")
"""Page number, pad, flags, lower and upper end of the free space between slots and nodes."""
HEADER_BYTES: Final = PAGE_HEAD.size
LARGE_HEAD: Final = Struct("=QHHI")
"""Of a value that has pages of its own: page number, pad, flags, how many pages."""
NODE: Final = Struct("=IHH")
"""Size of the value (of a branch: low bits of the child's number), flags (high bits), key size."""
_NODE_BYTES: Final = NODE.size
TREE_RECORD: Final = Struct("=IHHQQQQQ")
"""Pad (page size, in the free list's), flags, depth, branch, leaf and overflow pages, entries,
root."""
TREE_RECORD_BYTES: Final = TREE_RECORD.size
_META_BODY: Final = Struct("=II16x48s48sQQ")
"""Magic, version, the trees of free pages and of tables, last page, transaction."""
META_BYTES: Final = HEADER_BYTES + _META_BODY.size
_U64: Final = Struct("=Q")
page_number: Final = _U64.unpack_from
_key_bytes: Final = Struct("=H").unpack_from
MAIN_TABLE: Final = "(tables)"
FREE_TABLE: Final = "(free pages)"
"""Names for LMDB's own trees."""
FIRST_PAGE_ONLY: Final = frozenset({"by_seqno"})
"""Tables whose large values begin with checksums of their own: the first page tells the value."""
OUTDATED: Final = (
    "is not the one that was written last (the disk has lost a write, or changed it later)"
)
_OUTSIDE: Final = "has nodes that are not within it"
_crc32c = google_crc32c.value


class Tree(NamedTuple):
    """Where a table's pages begin."""

    depth: int
    root: int
    large_pages: int
    """Pages of values that have pages of their own."""


class Meta(NamedTuple):
    """One committed state."""

    transaction: int
    last_page: int
    page_bytes: int
    free: Tree
    main: Tree


class Page:
    """A checked page. The first key of a branch counts as empty, whatever is stored."""

    __slots__ = ("children", "crc", "keys", "kind", "nodes", "seen")

    def __init__(self, kind: int, crc: int, seen: int) -> None:
        self.kind = kind
        self.crc = crc
        self.seen = seen
        """The transaction of the state in which it was last checked."""
        self.keys: list[bytes] = []
        self.children: list[int] = []
        self.nodes: list[tuple[int, int, int]] = []
        """In a leaf, for each value: its position in the page, size and flags."""

    def fill(self, raw: bytes, slots: Sequence[int], *, is_ordered: bool) -> str:
        """Decode the nodes of a page; return what is wrong with them, "" if nothing is."""
        nodes = [NODE.unpack_from(raw, at) for at in slots]
        ends = [at + _NODE_BYTES + node[2] for at, node in zip(slots, nodes, strict=True)]
        self.keys = keys = [
            raw[at + _NODE_BYTES : end] for at, end in zip(slots, ends, strict=True)
        ]
        if self.kind == BRANCH:
            keys[0] = b""
            self.children = [low | flags << 32 for low, flags, _ in nodes]
        else:
            self.nodes = [
                (end, size, flags) for end, (size, flags, _) in zip(ends, nodes, strict=True)
            ]
            ends = [
                end + (_U64.size if flags & BIG_VALUE else size) for end, size, flags in self.nodes
            ]
        if max(ends) > len(raw) or (self.kind == LEAF and not keys[0]):
            return _OUTSIDE
        # Nodes begin at even places, and there is nothing between them.
        if sum(end + (end & 1) for end in ends) - sum(slots) != len(raw) - min(slots):
            return "has gaps or overlaps between its nodes"
        if is_ordered and not all(map(lt, keys, keys[1:])):
            return "has keys that do not ascend"
        return ""


class _PageDamagedError(StoreDamagedError):
    """The content of a page is damaged, whatever its place in the tree."""


_Leaf = tuple[int, bytes, bytes | None]
"""Page number of a leaf, and the bounds of its keys: low <= key < high."""


class PageReader:
    """`KvReader` over one committed state. Values are views into the map of the file.

    Every read may raise StoreDamagedError.
    """

    def __init__(
        self,
        view: memoryview,
        state: Meta,
        kept: dict[int, Page] | None = None,
        sums: PageSums | None = None,
    ) -> None:
        """`view` is the file; `kept` caches checked pages, of other states too. With `sums` each
        page is compared with its checksum.
        """
        self._view = view
        self._sums = sums
        self._state = state
        self._kept = {} if kept is None else kept
        self._transaction = state.transaction
        self._page_bytes = state.page_bytes
        self._trees: dict[str, Tree] = {MAIN_TABLE: state.main}
        self._in_c: dict[str, KeyTree | None] = {}
        self._awaited: PageSums | None = None
        """Set if trees in C were made before the checksums of new pages were in their file."""

    @property
    def tables(self) -> set[str]:
        """The tables in the file, unknown ones included."""
        return set(self._tables())

    # -- KvReader ------------------------------------------------------------------------------

    def get(self, table: str, key: bytes) -> Buffer | None:
        """See KvReader."""
        for found, value in self._beside(table, key):
            if found == key:
                return value
        return None

    def get_many(self, table: str, keys: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        """See KvReader."""
        found = ((key, self.get(table, key)) for key in keys)
        return [(key, bytes(value)) for key, value in found if value is not None]

    def neighbours(self, table: str, key: bytes) -> list[tuple[bytes, Buffer]]:
        """See KvReader: only those in the page where the look-up ends."""
        found = self._beside(table, key)
        if any(at == key for at, _ in found):
            raise StoreDamagedError(
                f"{place_of(table, key)} exists, but LMDB does not find it; check the disk and "
                "restore a backup",
                partition_of(table, key),
            )
        return found

    def first_at_or_after(self, table: str, key: bytes) -> tuple[bytes, Buffer] | None:
        """See KvReader."""
        return next(self.range(table, key), None)

    def last_at_or_before(self, table: str, key: bytes) -> tuple[bytes, Buffer] | None:
        """See KvReader."""
        leaf = self._leaf_of(table, key)
        if leaf is None:
            return None
        page = self._keys_of(table, key, leaf)
        at = bisect_right(page.keys, key) - 1
        if at < 0:
            leaf = self._leaf_of(table, leaf[1], is_below=True) if leaf[1] else None
            if leaf is None:
                return None
            page = self._keys_of(table, key, leaf)
        found = page.keys[at]
        return found, self._value(table, found, leaf[0], page.nodes[at])

    def range(
        self, table: str, start: bytes, stop: bytes | None = None
    ) -> Iterator[tuple[bytes, Buffer]]:
        """See KvReader."""
        for number, page, low, high in self._leaves(table, start, stop):
            keys, nodes = page.keys, page.nodes
            for at in range(low, high):
                yield keys[at], self._value(table, keys[at], number, nodes[at])

    # -- other reads -----------------------------------------------------------------------------

    def check_range(self, table: str, start: bytes, stop: bytes | None = None) -> bytes | None:
        """Check all pages with keys of a range. If the page after them is damaged, return the last
        key of the range (b"" if it is empty), otherwise None.
        """
        last = b""
        for number, page, low, high in self._leaves(table, start, stop):
            for at in range(low, high):
                last = page.keys[at]
                self._value(table, last, number, page.nodes[at])
        try:
            next(self._leaves(table, last + b"\0" if last else start, None), None)
        except StoreDamagedError:
            return last
        return None

    def check_ways(self, table: str, keys: Sequence[bytes]) -> None:
        """Check the pages where these keys are or would be; fast if the loops are built."""
        tree = self.tree_in_c(table)
        for key in keys if tree is None else tree.unsound(list(keys)):
            leaf = self._leaf_of(table, key)
            if leaf is not None:
                self._keys_of(table, key, leaf)

    def free_pages(self) -> Iterator[int]:
        """Yield the numbers of the pages that are free."""
        depth, root, _ = self._state.free
        level = [] if root == NO_ROOT else [root]
        for _ in range(1, depth):
            pages = [self._page(FREE_TABLE, b"", number, BRANCH) for number in level]
            level = [child for page in pages for child in page.children]
        for number in level:
            page = self._page(FREE_TABLE, b"", number, LEAF)
            for key, node in zip(page.keys, page.nodes, strict=True):
                data = bytes(self._value(FREE_TABLE, key, number, node))
                count = _U64.unpack_from(data)[0] if len(data) >= _U64.size else -1
                if len(key) != _U64.size or len(data) != (count + 1) * _U64.size:
                    raise self._damaged(FREE_TABLE, key, number, "has a list of the wrong size")
                yield from unpack_from(f"={count}Q", data, _U64.size)

    def tree_in_c(self, table: str) -> KeyTree | None:
        """Return what looks up keys of a table in C, None if the loops are not built. It compares
        each page with its checksum once; otherwise it checks less than this reader.
        """
        if self._awaited is not None and self._awaited.transaction >= self._transaction:
            self._awaited = None
            self._in_c.clear()
        if table not in self._in_c:
            tree, last_page, view, sums = self._tree(table), self._state.last_page, None, self._sums
            if sums is not None:
                is_behind = sums.transaction < self._transaction
                view = sums.view(last_page)
                if is_behind and view is not None and sums.known(last_page) is None:
                    self._awaited = sums
            self._in_c[table] = key_tree(
                self._view, self._page_bytes, last_page, tree.depth, tree.root, view,
                self._transaction,
            )  # fmt: skip
        return self._in_c[table]

    # -- ways through the tree -------------------------------------------------------------------

    def _tree(self, table: str) -> Tree:
        tree = self._trees.get(table)
        if tree is None:
            self._trees |= self._tables()
            tree = self._trees.get(table)
            if tree is None:
                raise StoreDamagedError(
                    f"the store has no table {table}; check the disk and restore a backup"
                )
        return tree

    def _tables(self) -> dict[str, Tree]:
        found: dict[str, Tree] = {}
        for number, page, low, high in self._leaves(MAIN_TABLE, b"", None):
            for at in range(low, high):
                place, size, flags = page.nodes[at]
                if flags != _TABLE or size != TREE_RECORD.size:
                    what = "has a node that is no table"
                    raise self._damaged(MAIN_TABLE, page.keys[at], number, what)
                start = number * self._page_bytes + place
                record = bytes(self._view[start : start + size])
                _, tree_flags, *_ = TREE_RECORD.unpack(record)
                if tree_flags:  # LMDB opens no table whose flags differ
                    why = f"has a table with the flags {tree_flags}"
                    raise self._damaged(MAIN_TABLE, page.keys[at], number, why)
                name = page.keys[at].decode(errors="backslashreplace")
                found[name] = tree_of(record)
        return found

    def _leaf_of(self, table: str, key: bytes, *, is_below: bool = False) -> _Leaf | None:
        """Return the leaf where a key is or would be; with `is_below`, the leaf of the keys below
        it. None: the table is empty.
        """
        depth, number, _ = self._trees.get(table) or self._tree(table)
        if number == NO_ROOT:
            return None
        if not 0 < depth <= DEPTH_MAX:
            raise self._damaged(table, key, number, f"is the root of a tree of {depth} levels")
        bisect = bisect_left if is_below else bisect_right
        low = b""
        high: bytes | None = None
        for _ in range(1, depth):
            page = self._page(table, key, number, BRANCH)
            keys = page.keys
            if keys[1] < low or (high is not None and keys[-1] >= high):
                raise self._misplaced(table, key, number)
            after = bisect(keys, key)
            if after < len(keys):
                high = keys[after]
            if after > 1:
                low = keys[after - 1]
            number = page.children[after - 1]
        return number, low, high

    def _leaves(
        self, table: str, start: bytes, stop: bytes | None
    ) -> Iterator[tuple[int, Page, int, int]]:
        """Yield number and page of the leaves of a range, and which of their keys belong to it.

        Leaves that cannot hold keys of the range are not read.
        """
        key = start
        while leaf := self._leaf_of(table, key):
            page = self._keys_of(table, key, leaf)
            low = bisect_left(page.keys, start) if key == start else 0
            high = len(page.keys) if stop is None else bisect_left(page.keys, stop)
            if key == start and not low:
                self._check_before(table, leaf)
            if low < high:
                yield leaf[0], page, low, high
            if leaf[2] is None:
                return
            if stop is not None and leaf[2] >= stop:
                if high == len(page.keys):
                    self._check_behind(table, leaf)
                return
            key = leaf[2]

    def _beside(self, table: str, key: bytes) -> list[tuple[bytes, Buffer]]:
        """Return up to two pairs of a page: the one before the place of a key, and the one at it,
        which is the key's own if the key exists, else the next one.
        """
        leaf = self._leaf_of(table, key)
        if leaf is None:
            return []
        number, lowest, highest = leaf
        if len(self._kept) < PAGES_KEPT_MAX or number in self._kept:
            page = self._keys_of(table, key, leaf)
            keys = page.keys
            at = bisect_left(keys, key)
            found: list[tuple[bytes, Buffer]] = [
                (keys[side], self._value(table, keys[side], number, page.nodes[side]))
                for side in range(max(at - 1, 0), min(at + 1, len(keys)))
            ]
            self._check_sides(table, leaf, at, len(keys))
            return found
        # Look-ups touch all leaves of a table, too many to keep. Search the raw page.
        raw, slots = self._raw(table, key, number, LEAF)
        at = bisect_left(slots, key, key=partial(_key_at, raw))
        found = []
        for slot in slots[max(at - 1, 0) : at + 1]:
            size, flags, key_bytes = NODE.unpack_from(raw, slot)
            end = slot + _NODE_BYTES + key_bytes
            there = raw[slot + _NODE_BYTES : end]
            if there < lowest or (highest is not None and there >= highest):
                raise self._misplaced(table, key, number)
            if end + (_U64.size if flags & BIG_VALUE else size) > len(raw):
                raise self._damaged(table, key, number, _OUTSIDE)
            found.append((there, self._value(table, there, number, (end, size, flags))))
        self._compare(table, key, number, raw)
        self._check_sides(table, leaf, at, len(slots))
        return found

    def _check_sides(self, table: str, leaf: _Leaf, at: int, count: int) -> None:
        """If a look-up ended at an edge of a page, check the bounds of the page there."""
        if not at:
            self._check_before(table, leaf)
        elif at == count:
            self._check_behind(table, leaf)

    def _check_before(self, table: str, leaf: _Leaf) -> None:
        """Check that the previous leaf has no keys that belong in this one.

        If that leaf itself is damaged, the bounds of this one are trusted.
        """
        with suppress(_PageDamagedError):
            before = self._leaf_of(table, leaf[1], is_below=True) if leaf[1] else None
            if before is not None:
                self._keys_of(table, leaf[1], before)

    def _check_behind(self, table: str, leaf: _Leaf) -> None:
        """Do the same for the next leaf."""
        with suppress(_PageDamagedError):
            behind = None if leaf[2] is None else self._leaf_of(table, leaf[2])
            if behind is not None:
                assert leaf[2] is not None
                self._keys_of(table, leaf[2], behind)

    # -- pages -----------------------------------------------------------------------------------

    def _keys_of(self, table: str, key: bytes, leaf: _Leaf) -> Page:
        """Return a checked leaf with keys within its bounds."""
        number, low, high = leaf
        page = self._page(table, key, number, LEAF)
        keys = page.keys
        if keys[0] < low or (high is not None and keys[-1] >= high):
            raise self._misplaced(table, key, number)
        return page

    def _page(self, table: str, key: bytes, number: int, kind: int) -> Page:
        """Return a checked page."""
        page = self._kept.get(number)
        if page is not None and page.seen == self._transaction and page.kind == kind:
            return page
        raw, slots = self._raw(table, key, number, kind)
        crc = _crc32c(raw)
        if page is None or page.crc != crc or page.kind != kind:
            page = Page(kind, crc, 0)
            if problem := page.fill(raw, slots, is_ordered=table != FREE_TABLE):
                raise self._damaged(table, key, number, problem)
        if self._sums is not None and self._sums.differs(number, crc, self._transaction):
            raise self._damaged(table, key, number, OUTDATED)
        page.seen = self._transaction
        self._kept[number] = page
        return page

    def _compare(self, table: str, key: bytes, number: int, raw: bytes) -> None:
        """Compare a page, or the pages of a large value, with the checksum."""
        sums = self._sums
        if sums is not None and sums.differs(number, _crc32c(raw), self._transaction):
            raise self._damaged(table, key, number, OUTDATED)

    def _raw(self, table: str, key: bytes, number: int, kind: int) -> tuple[bytes, tuple[int, ...]]:
        """Return a page's bytes and where its nodes begin, after a check of its header."""
        start = number * self._page_bytes
        stop = start + self._page_bytes
        if not METAS <= number <= self._state.last_page or stop > len(self._view):
            raise self._damaged(table, key, number, "is not in the file")
        raw = self._bytes(table, key, start, stop)
        own, _, flags, lower, upper = PAGE_HEAD.unpack_from(raw)
        if own != number:
            raise self._damaged(table, key, number, f"says that it is page {own}")
        if flags != kind:
            raise self._damaged(table, key, number, f"is not a {_KINDS[kind]} page (flags {flags})")
        count = (lower - HEADER_BYTES) // 2
        if count < _NODES_MIN[kind]:
            raise self._damaged(table, key, number, f"has {count} nodes")
        if not lower <= upper <= len(raw) or lower & 1:
            what = f"has its free space from {lower} to {upper}"
            raise self._damaged(table, key, number, what)
        slots = unpack_from(f"={count}H", raw, HEADER_BYTES)
        is_within = min(slots) == upper and max(slots) <= len(raw) - _NODE_BYTES
        if not is_within or len(set(slots)) != count:
            raise self._damaged(table, key, number, _OUTSIDE)
        return raw, slots

    def _bytes(self, _table: str, _key: bytes, start: int, stop: int) -> bytes:
        """Return bytes of the file."""
        return bytes(self._view[start:stop])

    def _value(self, table: str, key: bytes, number: int, node: tuple[int, int, int]) -> memoryview:
        """Return a value of a leaf."""
        place, size, flags = node
        start = number * self._page_bytes + place
        if not flags:
            return self._view[start : start + size]
        if flags != BIG_VALUE:
            raise self._damaged(table, key, number, f"has a node with the flags {flags}")
        (number,) = page_number(self._view, start)
        first = number * self._page_bytes
        start = first + HEADER_BYTES
        if number > self._state.last_page or start + size > len(self._view):
            raise self._damaged(table, key, number, "holds a value that is not within the file")
        if self._sums is not None:
            pages = 1 if table in FIRST_PAGE_ONLY else pages_of(size, self._page_bytes)
            raw = bytes(self._view[first : first + pages * self._page_bytes])
            self._compare(table, key, number, raw)
        return self._view[start : start + size]

    def _damaged(self, table: str, key: bytes, number: int, what: str) -> _PageDamagedError:
        return _PageDamagedError(_text(table, key, number, what), partition_of(table, key))

    def _misplaced(self, table: str, key: bytes, number: int) -> StoreDamagedError:
        text = _text(table, key, number, "has keys that do not belong there")
        return StoreDamagedError(text, partition_of(table, key))


def _text(table: str, key: bytes, number: int, what: str) -> str:
    return (
        f"{place_of(table, key)}: page {number} of the store's file {what}; check the disk and "
        "restore a backup"
    )


def pages_of(size: int, page_bytes: int) -> int:
    """Return how many pages a value of this size takes if it has pages of its own."""
    return -(-(size + HEADER_BYTES) // page_bytes)


def is_meta(data: memoryview) -> bool:
    """Whether a page begins as the meta pages of this format do."""
    words = (_MAGIC, _DATA_VERSION)
    head = bytes(data[HEADER_BYTES : HEADER_BYTES + 8])
    return head == b"".join(word.to_bytes(4, sys.byteorder) for word in words)


def read_meta(data: bytes, slot: int) -> Meta | None:
    """Return the content of a meta page from its first META_BYTES, None if it is invalid."""
    number, _, flags, _, _ = PAGE_HEAD.unpack_from(data)
    magic, version, free, main, last_page, transaction = _META_BODY.unpack_from(data, HEADER_BYTES)
    page_bytes: int = TREE_RECORD.unpack(free)[0]
    is_sound = (
        number == slot
        and flags & _META
        and (magic, version) == (_MAGIC, _DATA_VERSION)
        and (not transaction or transaction & 1 == slot)
        and _PAGE_BYTES_MIN <= page_bytes <= _PAGE_BYTES_MAX
        and not page_bytes & (page_bytes - 1)
        and last_page >= METAS - 1
        and not TREE_RECORD.unpack(main)[1]  # LMDB opens no table if the list of tables has flags
    )
    if not is_sound:
        return None
    return Meta(transaction, last_page, page_bytes, tree_of(free), tree_of(main))


def tree_of(record: bytes) -> Tree:
    """Return the tree that a table's record describes (TREE_RECORD_BYTES)."""
    _, _, depth, _, _, large_pages, _, root = TREE_RECORD.unpack(record)
    return Tree(depth, root, large_pages)


def _key_at(raw: bytes, slot: int) -> bytes:
    at = slot + _NODE_BYTES
    size: int = _key_bytes(raw, at - 2)[0]
    return raw[at : at + size]
