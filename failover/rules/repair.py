"""What a copy may take from another one to mend itself. Pure.

A copy that cannot read versions of a partition asks the others for them, by their seqnos. It takes
only what both histories have: the version of the partition at the last of these seqnos is the same
in both failover logs. A version has one history below each of its seqnos, so what both have there
is the same, whoever is the master now. And only what is committed on both: nothing of it can be
undone without a rollback of both.

So nothing older replaces what is there: the versions asked for are those that this copy itself had.
Whoever takes them proves each by the checksum that it has of it (`vbucket.check.mend`).

Who calls it: `dcp.core.scrub_turns`, and the simulator's copies.
"""

from __future__ import annotations

from failover.rules.history import FailoverLog, Version
from failover.rules.replication_record import ReplicationRecord


def why_not_taken(
    own: FailoverLog, other: FailoverLog, last_seqno: int, *, own_committed: int, committed: int
) -> str:
    """Return why versions up to a seqno may not be taken from another copy; "": they may.

    `own_committed` and `committed`: the committed seqnos of this copy and of the other one.
    """
    if last_seqno > own_committed:
        return f"seqno {last_seqno} is not known to be committed here ({own_committed} is)"
    if last_seqno > committed:
        return f"seqno {last_seqno} is not committed there ({committed} is)"
    mine, theirs = version_of(own, last_seqno), version_of(other, last_seqno)
    if mine is None or theirs is None:
        return f"the version of seqno {last_seqno} is in no failover log any more"
    if mine != theirs:
        return f"seqno {last_seqno} is of version {theirs.vb_uuid} there, and {mine.vb_uuid} here"
    return ""


def sources(record: ReplicationRecord, member: str) -> list[str]:
    """Return the other copies of a partition in the order in which a member asks them: the
    master's first, then those in sync.
    """
    in_sync = [copy for copy in record.copies if copy in record.isr]
    order = dict.fromkeys((record.master, *in_sync, *record.copies))
    return [each for each in order if each is not None and each != member]


def version_of(log: FailoverLog, seqno: int) -> Version | None:
    """Return the version that a seqno belongs to; None: the log begins above it."""
    return next((version for version in log.entries if version.seqno < seqno), None)
