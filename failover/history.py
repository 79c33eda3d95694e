"""The failover log: the versions of a partition's history, and the seqno at which each began.

A version is a named stretch of history. It has the changes from the seqno at which it began to the
seqno at which the next newer version began. A server and a client that know the same version have
the same changes up to the smaller of their two ends of it. A rollback decision needs no more
(failover/rollback.py).

Who calls it: the engine (keeps one log per partition), sessions (send it), clients (replace theirs
with the log of an accepted stream request, at once and durably).

Invariants, asserted when a log is made
- 1 to FAILOVER_ENTRIES_MAX entries, newest first
- seqnos do not rise towards older entries; equal ones are allowed: a version that ended where it
  began stays known, so that its followers are sent back to that seqno and not to 0
- uuids are not 0 and distinct

A log may be newer than the data beside it: a client stores the server's log before the changes
arrive. New versions are made by `branch`, which drops entries above the branch.

The rules are those of kv_engine's failover table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from vbucket.model.ids import SEQNO_MAX

FAILOVER_ENTRIES_MAX: Final = 25
"""Entries a log keeps; the oldest go first (kv_engine's `max_failover_entries`)."""

VB_UUID_MAX: Final = 2**64 - 1
"""The wire's width. Ours have 48 bits, those of other servers may have more."""


class Version(NamedTuple):
    """A partition version: its name, the seqno at which it began and its leader epoch."""

    vb_uuid: int
    seqno: int
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class FailoverLog:
    """The versions of one partition, newest first. Immutable: changes give a new log."""

    entries: tuple[Version, ...]

    def __post_init__(self) -> None:
        problem = _problem_of(self.entries)
        assert not problem, problem

    @classmethod
    def create(cls, vb_uuid: int, epoch: int = 0) -> FailoverLog:
        """Return the log of a partition that is new: one version that begins at seqno 0."""
        return cls((Version(vb_uuid, 0, epoch),))

    @classmethod
    def from_document(cls, document: object) -> FailoverLog:
        """Return the log stored as `to_document` gave it; an entry may lack its epoch (0).

        Raises ValueError saying which entry is wrong and why.
        """
        if not isinstance(document, list | tuple):
            raise ValueError(
                f"failover log: a list of [vb_uuid, seqno, epoch] is wanted, found"
                f" {type(document).__name__}"
            )
        entries = tuple(_version_of(index, item) for index, item in enumerate(document))
        problem = _problem_of(entries)
        if problem:
            raise ValueError(problem)
        return cls(entries)

    @property
    def current(self) -> Version:
        """The version that new writes belong to."""
        return self.entries[0]

    def branch(self, vb_uuid: int, seqno: int, epoch: int = 0) -> FailoverLog:
        """Return the log after a new version began at `seqno`.

        Versions that began above `seqno` are not part of this history and go; one that began at
        `seqno` itself is and stays. The oldest entry goes when there are too many.
        """
        kept = tuple(entry for entry in self.entries if entry.seqno <= seqno)
        return FailoverLog((Version(vb_uuid, seqno, epoch), *kept)[:FAILOVER_ENTRIES_MAX])

    def upper_of(self, vb_uuid: int, high_seqno: int) -> int | None:
        """Return the last seqno of a version in this history; None for an unknown version.

        That is where the next newer version began, or `high_seqno` for the newest.
        """
        upper = high_seqno
        for entry in self.entries:
            if entry.vb_uuid == vb_uuid:
                return upper
            upper = entry.seqno
        return None

    def pairs(self) -> list[tuple[int, int]]:
        """Return (vb_uuid, seqno) of every version, newest first, as the wire carries them."""
        return [(entry.vb_uuid, entry.seqno) for entry in self.entries]

    def to_document(self) -> list[list[int]]:
        """Return [[vb_uuid, seqno, epoch], ...], newest first, for CBOR or JSON."""
        return [list(entry) for entry in self.entries]


def _version_of(index: int, item: object) -> Version:
    """Return one stored entry, or raise ValueError."""
    if not isinstance(item, list | tuple) or len(item) not in {2, 3}:
        raise ValueError(f"failover log, entry {index}: [vb_uuid, seqno, epoch] wanted, {item!r}")
    if any(type(number) is not int for number in item):
        raise ValueError(f"failover log, entry {index}: whole numbers wanted, {item!r}")
    return Version(*item)


def _problem_of(entries: Sequence[Version]) -> str:
    """Return what is wrong with a list of versions, in words; "" if nothing is."""
    if not 1 <= len(entries) <= FAILOVER_ENTRIES_MAX:
        return f"failover log: 1 to {FAILOVER_ENTRIES_MAX} entries wanted, found {len(entries)}"
    newer_seqno = SEQNO_MAX
    known: set[int] = set()
    for index, (vb_uuid, seqno, epoch) in enumerate(entries):
        where = f"failover log, entry {index} (vb_uuid {vb_uuid}, seqno {seqno}): "
        if not 0 < vb_uuid <= VB_UUID_MAX:
            return f"{where}the vb_uuid must be 1 to 2^64-1"
        if vb_uuid in known:
            return f"{where}the vb_uuid stands in the log twice"
        if not 0 <= seqno <= newer_seqno:
            return f"{where}the seqno must be 0 to {newer_seqno}, where the next newer one began"
        if epoch < 0:
            return f"{where}the epoch {epoch} is negative"
        known.add(vb_uuid)
        newer_seqno = seqno
    return ""
