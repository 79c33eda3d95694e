"""The errors of archives and backup commands."""

from __future__ import annotations

from clients.errors import DcpdError

EXTRA_HINT = "pip install 'dcpd[backup]'"


class BackupError(DcpdError):
    """A backup command cannot do what was asked."""


class ArchiveError(BackupError):
    """The archive cannot be used: it does not exist, is no archive, or cannot be reached.

    `node` is its URL.
    """

    def __str__(self) -> str:
        """Return what happened and where, in one line."""
        vbucket = "" if self.vb_id is None else f"vbucket {self.vb_id}, "
        where = f" ({vbucket}archive {self.node})" if self.node else ""
        return f"{self.what}{where}"


class ArchiveMissingError(ArchiveError):
    """There is no archive at the URL."""


class ArchiveFormatError(ArchiveError):
    """The archive, or a part of it, is of a format version that this program does not know."""

    default_hint = "A newer dcpctl wrote it: use that one, or a newer one."


class ArchiveLockedError(ArchiveError):
    """Another command works on the archive."""


class ArchiveDamagedError(ArchiveError):
    """A part of the archive is damaged: which, and what is lost with it."""

    default_hint = "dcpctl backup verify names all damage; restore leaves out what is damaged."


class PointError(BackupError):
    """There is no such point in the archive's history."""


class MissingExtraError(BackupError):
    """A package that the command needs is not installed."""

    default_hint = EXTRA_HINT
