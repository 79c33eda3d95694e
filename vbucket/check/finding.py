"""Findings of a check of a data folder: kind, place, problem. Each kind has its advice.

The kinds are explained one by one in docs/operations.md.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple


class Kind(StrEnum):
    """What is wrong. The values are a contract, because the JSON output shows them."""

    TORN_TAIL = "torn-tail"
    UNSYNCED_TAIL = "unsynced-tail"
    LEFTOVER = "leftover"
    LOG = "log"
    PAGES = "pages"
    CRASH = "crash"
    RECORD = "record"
    BLOCK = "block"
    GAP = "gap"
    HISTORY = "history"
    KEY_RECORD = "key-record"
    KEY_LOST = "key-lost"
    KEY_STALE = "key-stale"
    EXPIRY = "expiry"
    COUNT = "count"
    HASHES = "hashes"
    STRAY = "stray"
    QUARANTINE = "quarantine"
    CAS = "cas"
    FILE = "file"


HARMLESS: Final = frozenset({Kind.TORN_TAIL, Kind.UNSYNCED_TAIL, Kind.LEFTOVER, Kind.CAS})
"""Leftovers of a crash, which the next start removes, and data that is as it was written."""

_RESTORE: Final = "check the disk, and restore the data folder from a backup"
_BY_STREAM: Final = (
    "the changes are intact, so streams still show them: follow the partition into a new folder, "
    "or restore a backup"
)
_REPORT: Final = "every checksum is right, so this is a bug in dcpd: please report it"

ADVICE: Final[dict[Kind, str]] = {
    Kind.TORN_TAIL: (
        "nothing to do: the group was being written when the server ended, and the next start "
        "cuts it"
    ),
    Kind.UNSYNCED_TAIL: (
        "the next start cuts it and begins new versions; what was answered in it is lost, as a "
        "crash may do with this durability"
    ),
    Kind.LEFTOVER: "nothing to do: the store has all of it, and the next merge removes it",
    Kind.LOG: (
        "check the disk, then restore this file from a copy, or the data folder from a backup; to "
        "give up what cannot be read, start with dcpd --accept-log-loss"
    ),
    Kind.PAGES: _RESTORE,
    Kind.CRASH: _RESTORE,
    Kind.RECORD: _RESTORE,
    Kind.BLOCK: (
        "check the disk, and take it from a backup: dcpctl repair --from-backup ARCHIVE while the "
        "server runs, or a restore; other partitions are not affected"
    ),
    Kind.GAP: "check the disk, and restore a backup; other partitions are not affected",
    Kind.HISTORY: _REPORT,
    Kind.KEY_RECORD: _BY_STREAM,
    Kind.KEY_LOST: _BY_STREAM,
    Kind.KEY_STALE: _BY_STREAM,
    Kind.EXPIRY: (
        "check the disk; reads treat such a document as expired, but streams may never get its "
        "expiry: set it again, or restore a backup"
    ),
    Kind.COUNT: _REPORT,
    Kind.HASHES: (
        "check the disk; the next merge of the partition counts its documents again, and no "
        "document is affected"
    ),
    Kind.STRAY: _RESTORE,
    Kind.QUARANTINE: (
        "merges skip the partition, because its stored data is damaged: start the server, "
        "branch it at 0 (dcpctl vb branch VB --at 0), and restore it from a backup"
    ),
    Kind.FILE: "check the disk, and restore the file from a copy, or the folder from a backup",
    Kind.CAS: "no data is damaged; run dcpctl vb mend-cas while the server runs",
}


class Finding(NamedTuple):
    """One problem that a check found."""

    kind: Kind
    where: str
    what: str

    @property
    def is_harmless(self) -> bool:
        """Whether the data needs no repair."""
        return self.kind in HARMLESS

    def line(self) -> str:
        """Return the finding as one line: kind, where, what, what to do."""
        return f"{self.kind}: {self.where}: {self.what}; {ADVICE[self.kind]}"

    def to_document(self) -> dict[str, object]:
        """Return the finding as JSON shows it."""
        return {
            "kind": str(self.kind),
            "where": self.where,
            "what": self.what,
            "try": ADVICE[self.kind],
            "harmless": self.is_harmless,
        }
