"""Reads LMDB's data file beside LMDB, and checks it before LMDB opens it.

Who calls it: `vbucket.store.lmdb.environment_lmdb`.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Final

from vbucket.store.environment import StoreDamagedError, StoreFailedError
from vbucket.store.lmdb.lmdb_pages import (
    META_BYTES,
    PAGES_KEPT_MAX,
    Meta,
    Page,
    PageReader,
    is_meta,
    read_meta,
)
from vbucket.store.lmdb.meta_pages import sound_metas
from vbucket.store.lmdb.page_sums import KnownSums, PageSums
from vbucket.store.lmdb.sums_writer import follow_a_crash

DATA_FILE_NAME: Final = "data.mdb"
LOOKS: Final = 3
"""So often meta pages are read that seem damaged: another process may just write them."""


class PageFile:
    """A data file open for reading. The file only grows; `reader` maps the new part if needed."""

    def __init__(self, folder: Path, by_heart: KnownSums | None = None) -> None:
        """Raises OSError, StoreFailedError, StoreDamagedError."""
        self.path = folder / DATA_FILE_NAME
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self._view = memoryview(b"")
        self._kept: dict[int, Page] = {}
        self.sums = PageSums(folder, by_heart)
        self._map_all()

    @property
    def view(self) -> memoryview:
        """The whole file as of when it was last mapped."""
        return self._view

    @property
    def fileno(self) -> int:
        """Its descriptor, to read from it with system calls."""
        return self._fd

    def close(self) -> None:
        """Close the file; values that were read stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._view = memoryview(b"")
            self._kept.clear()

    def newest(self) -> Meta:
        """Return the newest committed state. Raises StoreDamagedError."""
        first, second = self._metas()
        return second if second.transaction > first.transaction else first

    def before(self, state: Meta) -> Meta:
        """Return the state before the newest one. Raises StoreDamagedError."""
        return self._metas()[1 - (state.transaction & 1)]

    def state_of(self, transaction: int) -> Meta | None:
        """Return the state that a transaction committed; None if a later one has replaced it."""
        first, second = (self._metas()[transaction & 1] for _ in range(2))
        # Two reads differ while the page is being written.
        return first if first == second and first.transaction == transaction else None

    def check_metas(self) -> None:
        """Raise StoreDamagedError if a meta page is damaged, also if its copy tells its content."""
        for _ in range(LOOKS):
            bad = self._bad_meta()
            if bad is None:
                return
        raise self.damaged(
            f"its meta page {bad} is not what was written last; the process that writes the store, "
            "or a start of dcpd, puts it back, because the other one has a copy"
        )

    def _bad_meta(self) -> int | None:
        for slot, content in enumerate(sound_metas(self._fd) or ()):
            meta = read_meta(content, slot)
            assert meta is not None, "it was checked"
            found = os.pread(self._fd, META_BYTES, slot * meta.page_bytes)
            if found != content and len(found) == META_BYTES:  # else it is cut short
                return slot
        return None

    def reader(self, state: Meta) -> PageReader:
        """Return a reader of a state. Raises StoreFailedError."""
        self.map_state(state)
        if len(self._kept) > PAGES_KEPT_MAX:
            self._kept.clear()
        return PageReader(self._view, state, self._kept, self.sums)

    def map_state(self, state: Meta) -> None:
        """Map the file as far as a state needs it. Raises StoreFailedError."""
        if (state.last_page + 1) * state.page_bytes > len(self._view):
            self._map_all()

    def follow(self) -> Meta:
        """Return the newest state. Its pages can all be compared, also if a crash kept checksums of
        the last commit from the disk. Nobody may write meanwhile.
        """
        state = self.newest()
        if self.sums.transaction != state.transaction:
            self.map_state(state)
            follow_a_crash(self.sums, self._view, self.before(state), state)
        return state

    def damaged(self, what: str) -> StoreDamagedError:
        """Return the error that names the file."""
        return StoreDamagedError(f"{self.path}: {what}; check the disk and restore a backup")

    def is_ours(self) -> bool:
        """Whether the file has a meta page of LMDB; otherwise it is something else."""
        return any(is_meta(self._view[start:]) for start in (0, 4096, 16384, 65536))

    def _metas(self) -> tuple[Meta, Meta]:
        """Return what the meta pages hold, or held before they were damaged."""
        sound = sound_metas(self._fd)
        if sound is not None:
            first, second = (read_meta(content, slot) for slot, content in enumerate(sound))
            assert first is not None, "it was checked"
            assert second is not None, "it was checked"
            return first, second
        first = self._meta(0, 0)
        second = self._meta(1, first.page_bytes)
        if first.page_bytes != second.page_bytes:
            raise self.damaged("its two meta pages differ in the size of a page")
        return first, second

    def _meta(self, slot: int, start: int) -> Meta:
        data = bytes(self._view[start : start + META_BYTES])
        if len(data) < META_BYTES:
            raise self.damaged(
                f"it is cut short: it has {len(self._view)} bytes, and its meta page {slot} "
                f"begins at {start}"
            )
        meta = read_meta(data, slot)
        if meta is None:
            raise self.damaged(f"its meta page {slot} is not a valid one of LMDB")
        return meta

    def _map_all(self) -> None:
        """Map the file as long as it is now."""
        size = os.fstat(self._fd).st_size
        if size > len(self._view):
            # The old map stays as long as a value from it is in use.
            try:
                self._view = memoryview(mmap.mmap(self._fd, size, access=mmap.ACCESS_READ))
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                raise StoreFailedError(
                    f"{self.path}: its {size} bytes cannot be mapped: {error}; give the process "
                    "more address space or memory (ulimit -v)"
                ) from error


def check_file(folder: Path) -> set[str] | None:
    """Check a data file before LMDB maps it; return its tables.

    It checks the meta pages, the list of tables, the list of free pages, and whether the file is as
    long as its newest state needs. The cost depends on the free pages, not on the data. None: the
    file does not exist, is empty, or is not a file of LMDB; LMDB reports the last case. Raises
    StoreDamagedError, StoreFailedError, OSError.
    """
    path = folder / DATA_FILE_NAME
    if not path.exists() or not path.stat().st_size:
        return None
    file = PageFile(folder)
    try:
        if len(file.view) >= META_BYTES and not file.is_ours():
            return None
        known = file.sums.transaction
        file.check_metas()
        state = file.newest()
        file.sums.check_age(known, state.transaction)
        reader = file.reader(state)
        pages = len(file.view) // state.page_bytes
        missing = state.last_page + 1 - pages
        try:
            free = {number for number in reader.free_pages() if number >= pages}
        except StoreDamagedError:
            if missing <= 0:
                raise
            free = set()
        # A page that a transaction takes and frees again is never written. If it is the last page,
        # a healthy file is shorter than its number of pages says.
        if missing > len(free):
            needed = (state.last_page + 1) * state.page_bytes
            raise file.damaged(f"it is cut short: it has {len(file.view)} bytes of {needed}")
        return reader.tables
    finally:
        file.close()
