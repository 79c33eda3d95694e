"""The errors of archives and backup commands."""

from __future__ import annotations

from typing import Final

from clients.errors import DcpdError
from clients.install_hint import install_hint

EXTRA_HINT: Final = install_hint("backup")


class BackupError(DcpdError):
    """A backup command failed."""


class ArchiveError(BackupError):
    """The archive cannot be used: it is missing, is not an archive, or cannot be accessed.

    `node` is its URL.
    """

    def __str__(self) -> str:
        """Return what happened and where, in one line."""
        vbucket = "" if self.vb_id is None else f"partition {self.vb_id}, "
        where = f" ({vbucket}archive {self.node})" if self.node else ""
        return f"{self.what}{where}"


class ArchiveMissingError(ArchiveError):
    """There is no archive at the URL."""


class ArchiveFormatError(ArchiveError):
    """The archive, or a part of it, has a format version that this program does not support."""

    default_hint = "A newer dcpctl wrote it. Use that version, or a newer one."


class ArchiveLockedError(ArchiveError):
    """Another command writes to the archive."""


class ArchiveDamagedError(ArchiveError):
    """A part of the archive is damaged. The text says which part."""

    default_hint = "dcpctl backup verify lists all damage; restore --salvage uses what is readable."


class PointError(BackupError):
    """The archive has no such point in its history."""


class MissingExtraError(BackupError):
    """A required package is not installed."""

    default_hint = EXTRA_HINT
