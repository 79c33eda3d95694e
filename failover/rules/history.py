"""The failover log: the versions of a partition, and the seqno at which each began.

A version is a named stretch of history. It has the writes from the seqno at which it began up to
the seqno at which the next newer version began. If two parties know the same version, they have
the same writes up to the lower of the two seqnos at which it ended for them. A rollback decision
needs nothing else (failover/rules/rollback.py).

Who calls it: the keyspace keeps one log per partition, sessions send it, and clients store the log
of each stream that they open.

A version also has the leader epoch in which it began. The partition's own leader epoch may be
higher: a handover between two masters begins a new epoch, but no version. Plain DCP has no field
for the epoch, so clients never see it.

Invariants, asserted when a log is made
- 1 to FAILOVER_ENTRIES_MAX entries, newest first
- seqnos do not rise towards older entries. Equal seqnos are valid: a version without writes stays
  in the log, so its followers roll back to its seqno and not to 0
- epochs do not rise towards older entries, and fit into the prefix of an entry
- uuids are not 0 and are distinct

A client's log may be newer than its data: it stores the log before the changes arrive. New versions
are made with `branch`, which drops the versions that began above.

The rules are those of kv_engine's failover table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from vbucket.model.ids import SEQNO_MAX

FAILOVER_ENTRIES_MAX: Final = 200
"""Entries a log keeps; the oldest go first. Every failover uses one up, and a client whose versions
are all gone starts again at 0. 200 last for half a year of daily failovers. They take 3,200 bytes
in an answer, and 2.5 KB in each log record that changes them."""
FAILOVER_ENTRIES_SHOWN: Final = 25
"""The newest entries, which plain DCP clients get: kv_engine keeps no more
(`max_failover_entries`), so no client expects more."""
EPOCH_MAX: Final = 2**32 - 1
"""The width of the epoch in an entry's prefix (vbucket.model.entry) and in a block's header."""

VB_UUID_MAX: Final = 2**64 - 1
"""The wire's width. Ours have 48 bits, those of other servers may have more."""


class Version(NamedTuple):
    """A partition version: its name, and the seqno and the leader epoch in which it began."""

    vb_uuid: int
    seqno: int
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class FailoverLog:
    """The versions of one partition, newest first. Immutable: a change returns a new log."""

    entries: tuple[Version, ...]

    def __post_init__(self) -> None:
        problem = _problem_of(self.entries)
        assert not problem, problem

    @classmethod
    def create(cls, vb_uuid: int, epoch: int = 0) -> FailoverLog:
        """Return the log of a new partition: one version that begins at seqno 0."""
        return cls((Version(vb_uuid, 0, epoch),))

    @classmethod
    def from_document(cls, document: object) -> FailoverLog:
        """Return the log from its `to_document` form; a missing epoch is 0. Raises ValueError."""
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

    def branch(
        self,
        vb_uuid: int,
        seqno: int,
        epoch: int | None = None,
        *,
        entries_max: int = FAILOVER_ENTRIES_MAX,
    ) -> FailoverLog:
        """Return the log with a new version that begins at `seqno` in a leader epoch (None: that
        of the current version).

        Versions that began above `seqno` are removed: they are not part of this history. One that
        began at `seqno` stays. If there are too many entries, the oldest is removed.
        """
        began_in = self.current.epoch if epoch is None else epoch
        kept = self._begun_up_to(seqno)
        return FailoverLog((Version(vb_uuid, seqno, began_in), *kept)[:entries_max])

    def cut(self, seqno: int) -> FailoverLog:
        """Return the log of a replica that gave up everything above `seqno`, without a version of
        its own.

        Versions that began above are removed. The oldest one always stays: what lies below its
        start is part of its history, too.
        """
        return FailoverLog(self._begun_up_to(seqno) or self.entries[-1:])

    def _begun_up_to(self, seqno: int) -> tuple[Version, ...]:
        return tuple(entry for entry in self.entries if entry.seqno <= seqno)

    def epoch_at(self, seqno: int) -> int:
        """Return the leader epoch of the newest version that begins at or below `seqno`; 0: none.
        A replica has the log of its master before the changes: the newest may begin above its end.
        """
        return next((entry.epoch for entry in self.entries if entry.seqno <= seqno), 0)

    def upper_of(self, vb_uuid: int, high_seqno: int) -> int | None:
        """Return the last seqno of a version; None if the version is unknown.

        That is the start of the next newer version, or `high_seqno` for the newest.
        """
        return self.uppers(high_seqno).get(vb_uuid)

    def uppers(self, high_seqno: int) -> dict[int, int]:
        """Return vb_uuid -> last seqno of every version, newest first."""
        ends = (high_seqno, *(entry.seqno for entry in self.entries))
        return {entry.vb_uuid: end for entry, end in zip(self.entries, ends, strict=False)}

    def pairs(self) -> list[tuple[int, int]]:
        """Return (vb_uuid, seqno) of every version, newest first, as the wire carries them."""
        return [(entry.vb_uuid, entry.seqno) for entry in self.entries]

    def shown_pairs(self) -> list[tuple[int, int]]:
        """Return the newest FAILOVER_ENTRIES_SHOWN of `pairs`, for plain DCP clients."""
        return self.pairs()[:FAILOVER_ENTRIES_SHOWN]

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
    newer_seqno, newer_epoch = SEQNO_MAX, EPOCH_MAX
    known: set[int] = set()
    for index, (vb_uuid, seqno, epoch) in enumerate(entries):
        where = f"failover log, entry {index} (vb_uuid {vb_uuid}, seqno {seqno}): "
        if not 0 < vb_uuid <= VB_UUID_MAX:
            return f"{where}the vb_uuid must be 1 to 2^64-1"
        if vb_uuid in known:
            return f"{where}the vb_uuid stands in the log twice"
        if not 0 <= seqno <= newer_seqno:
            return f"{where}the seqno must be 0 to {newer_seqno}, where the next newer one began"
        if not 0 <= epoch <= newer_epoch:
            return (
                f"{where}the epoch {epoch} must be 0 to {newer_epoch}, that of the next newer one"
            )
        known.add(vb_uuid)
        newer_seqno, newer_epoch = seqno, epoch
    return ""
