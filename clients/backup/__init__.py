"""Backup: archives of a server's change streams.

    archives          what an archive holds:
      legs, point       its history of a partition, and points in it             pure
      chunk, segment,   frames -> chunks -> segments, and the manifests          pure
      archive_manifest
      place, lock       an fsspec folder, and its write lock
      archive           the content of such a folder; archive_check verifies it
      segment_writer    the writer thread of a run
    feed, intake      one DCP connection that collects frames                    pure
    dialing, run      a backup over links to all nodes
    strip             the frames of a section, as columns                        pure
    reading           a partition as of a point: the newest version of each key
    restore, export,  operations on an archive
    fold

The format is docs/backup.md.
The errors can be imported from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clients.lazy_names import lazy_names

if TYPE_CHECKING:
    from clients.backup.archives.archive_errors import (
        ArchiveDamagedError,
        ArchiveError,
        ArchiveFormatError,
        ArchiveLockedError,
        ArchiveMissingError,
        BackupError,
        MissingExtraError,
        PointError,
    )

__all__ = [
    "ArchiveDamagedError", "ArchiveError", "ArchiveFormatError", "ArchiveLockedError",
    "ArchiveMissingError", "BackupError", "MissingExtraError", "PointError",
]  # fmt: skip

__getattr__ = lazy_names(__name__, {"archives.archive_errors": " ".join(__all__)})
