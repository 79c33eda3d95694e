"""A checksum for each page of LMDB's file, in a file beside it: a write that the disk lost shows.

A page that holds what it held some commits ago is sound in itself; only another place can tell that
it is old. `pages.sums` is that place: it has the CRC-32C of each page of the newest state.

    bytes 0 to 7    SUMS_MAGIC
    bytes 8 to 15   the transaction whose pages all have their checksum
    then            u32 for each page number, in the byte order of the machine

LMDB writes a page only if no state that a crash could bring back uses it. So the checksums of the
state before are still there while those of the newest one are written, and one table serves both.

Who calls it: `vbucket.store.lmdb.sums_writer` writes it after each commit, `lmdb_pages` compares.

Invariants
- a checksum is written after LMDB's commit and synced before the next one. So after a crash only
  those of the last commit can be missing; `follow` finds its pages by comparing the two states;
- the transaction in the header is written after the checksums are on disk, so it is at most that of
  the newest meta page, and at least the second before it;
- a page that a commit replaces is checked first. If it was outdated, what replaces it gets a
  checksum that no page has, so damage stays damage.

Of a value on pages of its own the first page has a checksum. That is the whole value's, except for
blocks: these have checksums of their own in it, so their first page tells.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path
from struct import Struct
from typing import Final

from vbucket.store.environment import StoreDamagedError

SUMS_FILE_NAME: Final = "pages.sums"
LAG_MAX: Final = 2
"""Commits of which a crash can keep the header's word from the disk."""
SUMS_MAGIC: Final = b"dcpdsum1"
SUMS_HEADER: Final = Struct("=8sQ")
ENTRIES_AT: Final = SUMS_HEADER.size // 4
"""Words before that of page 0."""
BY_HEART_BYTES_MAX: Final = 16 << 20
"""The checksums of 16 GiB of pages."""
_transaction_in: Final = Struct("=Q").unpack_from


class KnownSums:
    """What the only process that writes knows of the file by heart, for as long as it is small: it
    has read it once, and then notes what it writes there.
    """

    def __init__(self) -> None:
        self.content: bytearray | None = None

    @property
    def transaction(self) -> int | None:
        """The transaction in the header; None: nothing is known."""
        return None if self.content is None else int(_transaction_in(self.content, 8)[0])

    def words(self, size_bytes: int) -> memoryview | None:
        """Return the words of a file of this size, to be released; None: nothing is known."""
        content = self.content
        if content is None or size_bytes > BY_HEART_BYTES_MAX:
            self.content = None
            return None
        content.extend(bytes(max(0, size_bytes - len(content))))
        return memoryview(content).cast("I")

    def put(self, number: int, crc: int) -> None:
        """Take note of the checksum of a page."""
        at = 4 * (ENTRIES_AT + number)
        if self.content is not None and at < len(self.content):
            self.content[at : at + 4] = crc.to_bytes(4, sys.byteorder)


class PageSums:
    """The checksums, open for reading."""

    def __init__(self, folder: Path, by_heart: KnownSums | None = None) -> None:
        """If there is no file, nothing is compared. Raises OSError, StoreDamagedError."""
        self.path = folder / SUMS_FILE_NAME
        self._by_heart = by_heart
        self._map: memoryview | None = None
        self._entries: memoryview | None = None
        self._followed = 0
        self._new: frozenset[int] = frozenset()
        self._load()

    def view(self, last_page: int) -> memoryview | None:
        """Return the file, with this page's checksum if it is written; None: there is no file."""
        if self.known(last_page) is None:
            self._load()
        return self._map

    @property
    def transaction(self) -> int:
        """The transaction whose pages all have checksums; 0: none has."""
        if self._map is None:
            self._load()
        return 0 if self._map is None else _transaction_in(self._map, 8)[0]

    def differs(self, number: int, crc: int, transaction: int) -> bool:
        """Whether a page of the state of a transaction is not the one that was written last."""
        if number in self._new:
            return False
        if max(self.transaction, self._followed) < transaction:
            return False  # of a commit whose checksums are being written
        self.view(number)  # which loads the file again if it has grown
        return self.known(number) != crc

    def check_age(self, known: int, transaction: int) -> None:
        """Compare `transaction` as it was, `known`, with that of the newest state, read after it.

        Raises StoreDamagedError if a crash cannot explain the difference.
        """
        if not known:
            return
        data, lag = self.path.with_name("data.mdb"), transaction - known
        if lag < 0:
            old, newer = f"{data} is older than {self.path}", f"{transaction} instead of {known}"
        elif lag > LAG_MAX:
            old, newer = f"{self.path} is older than {data}", f"{known} instead of {transaction}"
        else:
            return
        raise StoreDamagedError(
            f"{old} (transaction {newer}): the disk has lost a write, or an older file was put "
            "back; check the disk, and restore the whole folder from one copy, or a backup"
        )

    def accept(self, new: frozenset[int], transaction: int) -> None:
        """Go on to the state of a transaction, without a comparison of these pages."""
        self._new = new
        self._followed = transaction

    def known(self, number: int) -> int | None:
        """Return the checksum that a page has to have; None: what is loaded has none."""
        at, entries = ENTRIES_AT + number, self._entries
        return None if entries is None or at >= len(entries) else entries[at]

    def put(self, number: int, crc: int) -> None:
        """Replace the checksum of a page that is mended. Raises OSError."""
        if self._by_heart is not None:
            self._by_heart.put(number, crc)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, crc.to_bytes(4, sys.byteorder), 4 * (ENTRIES_AT + number))
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def _load(self) -> None:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            size = os.fstat(fd).st_size & ~3
            if size < SUMS_HEADER.size:
                return
            view = memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ))
        finally:
            os.close(fd)
        if bytes(view[:8]) != SUMS_MAGIC:
            raise StoreDamagedError(
                f"{self.path}: it does not begin as such a file does; check the disk and restore "
                "a backup"
            )
        self._map, self._entries = view, view.cast("I")
