"""Compresses chunks, writes segments, and reads them back. A run does this in a thread.

A written segment is self-contained, and survives if the run is killed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from clients.backup.archives.archive import Archive, segment_file
from clients.backup.archives.archive_errors import ArchiveDamagedError
from clients.backup.archives.archive_manifest import SegmentRecord
from clients.backup.archives.chunk import RawChunk
from clients.backup.archives.lock import ArchiveLock
from clients.backup.archives.segment import Footer, SegmentBuilder
from clients.backup.archives.zstd import LEVEL

SEGMENT_BYTES: Final = 16 * 1024 * 1024
"""Size of a segment. It is held in memory, and a killed run repeats at most this much."""


class SegmentWriter:
    """Builds and writes segments. Used by one thread at a time."""

    def __init__(
        self,
        archive: Archive,
        lock: ArchiveLock,
        run: int,
        started_ns: int,
        *,
        is_history: bool,
        level: int = LEVEL,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.records: list[SegmentRecord] = []
        self.changes = self.raw_bytes = 0
        self._archive = archive
        self._lock = lock
        self._run = run
        self._started_ns = started_ns
        self._is_history = is_history
        self._level = level
        self._segment_bytes = segment_bytes
        self._is_base = False
        self._has_failed = False
        """A segment could not be written. The caller got the error, and writing has stopped."""
        self._builder = self._new()

    @classmethod
    def of_base(cls, archive: Archive, lock: ArchiveLock, run: int, now_ns: int) -> SegmentWriter:
        """Return a writer for the base of a run."""
        writer = cls(archive, lock, run, now_ns, is_history=False)
        writer._is_base = True
        return writer

    def adopt(self, found: Iterable[tuple[str, int, Footer]]) -> None:
        """Continue after existing segments."""
        for path, size_bytes, footer in found:
            self.records.append(SegmentRecord(path, size_bytes, footer.held()))
            sections = [footer.section(index) for index in range(footer.section_count())]
            self.changes += sum(section.changes for section in sections)
            self.raw_bytes += sum(section.size_bytes for section in sections)
        self._builder = self._new()

    def add(self, chunk: RawChunk) -> None:
        """Compress a chunk; write the segment if it is full. Raises ArchiveErrors, once."""
        if self._has_failed:
            return
        self._builder.add(chunk, self._level)
        self.changes += sum(section.changes for section in chunk.sections)
        self.raw_bytes += len(chunk.data)
        if self._builder.size_bytes >= self._segment_bytes:
            self.close()

    def close(self) -> None:
        """Write the open segment unless it is empty, and read it back.

        Raises ArchiveErrors, once; ArchiveLockedError if the lock is lost.
        """
        if self._builder.is_empty or self._has_failed:
            return
        self._has_failed = True
        self._lock.keep()  # another holder would write files with the same names
        data = self._builder.finish()
        path = segment_file(self._run, len(self.records), is_base=self._is_base)
        self._archive.write(path, data)
        if self._archive.read(path) != data:
            raise ArchiveDamagedError(
                f"{path} was read back and differs from what was written", node=self._archive.url,
                hint="Check the disk or the object store of the archive.",
            )  # fmt: skip
        self._has_failed = False
        self.records.append(SegmentRecord(path, len(data), self._builder.held()))
        self._builder = self._new()

    def _new(self) -> SegmentBuilder:
        return SegmentBuilder(
            self._run, len(self.records), self._started_ns,
            is_history=self._is_history, archive_id=self._archive.record.archive_id,
        )  # fmt: skip
