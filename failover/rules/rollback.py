"""The rule that answers a stream request with OK or ROLLBACK, and says why.

Who calls it: the server for every stream request, the Spark source when it plans a batch, and
`failover.rules.explain` (`decide`); consumers, backups and Spark tasks, which compare their
versions with a failover log that a server sent (`common_seqno`). They share one rule so that they
agree.

Sources: kv_engine's rule for one vb_uuid (FailoverTable::needsRollback), extended to a client's
list of versions. With a list one round is enough; with one vb_uuid it takes several, or a rollback
to 0.

The caller ensures that
- snap_start <= start <= snap_end (the answer is ERANGE otherwise); asserted here
- `high_seqno` is that of the partition's log, not the high watermark
- a client that is ahead of a node which merely lags behind gets ETMPFAIL before this rule is asked

A client handles ROLLBACK(r) like this: it restores a state at or below r, forgets the versions that
began above that state, and asks again from there (from 0 with vb_uuid 0). The next answer is OK
or 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from failover.rules.history import FAILOVER_ENTRIES_SHOWN, FailoverLog


class Question(NamedTuple):
    """The client's position in a stream request.

    The client has everything up to `snap_start_seqno`. Of the snapshot that ends at
    `snap_end_seqno` it has the changes at or below `start_seqno`. `vb_uuid` names its branch.
    """

    start_seqno: int
    vb_uuid: int
    snap_start_seqno: int
    snap_end_seqno: int
    versions: tuple[tuple[int, int], ...] = ()
    """(vb_uuid, seqno at which it began), newest first; empty: only `vb_uuid` is known."""
    strict: bool = False
    """Check the vb_uuid at seqno 0 too (stream request flag 0x20)."""
    ignore_purged: bool = False
    """The client does not need purged tombstones (flag 0x80)."""
    client_purge_seqno: int = 0
    """The purge seqno at the time the client got its data; 0: not given."""


class RollbackKind(StrEnum):
    """Why a client must roll back."""

    PURGED = "purged"
    """The client may have missed purged deletions."""
    UNKNOWN_VERSION = "unknown_version"
    """The failover log has none of the client's versions."""
    BRANCHED = "branched"
    """The client has changes that are not part of this history."""
    INSIDE_SNAPSHOT = "inside_snapshot"
    """History branched inside a snapshot of which the client has only a part."""


class Decision(NamedTuple):
    """The seqno to roll back to (None: no rollback), and the reason in words."""

    rollback_seqno: int | None
    reason: str
    kind: RollbackKind | None = None
    """The reason in one word, for counters; None if there is no rollback."""


class _Known(NamedTuple):
    """A version that both sides know, and the last seqno at which their histories agree."""

    vb_uuid: int
    common_seqno: int
    ended: str


def decide(question: Question, log: FailoverLog, high_seqno: int, purge_seqno: int) -> Decision:
    """Decide whether a stream may continue at the client's position, or how far it must roll back.

    `log`, `high_seqno` and `purge_seqno` are the partition's own.
    """
    start = question.start_seqno
    assert question.snap_start_seqno <= start <= question.snap_end_seqno
    named = question.vb_uuid or bool(question.versions)
    if start == 0 and not (question.strict and named):
        return Decision(None, "The client starts at seqno 0 and has no data.")
    purge = 0 if question.ignore_purged else purge_seqno
    told_purge = question.client_purge_seqno
    if 0 < start < purge and told_purge != purge:
        return Decision(
            0,
            f"The client is at seqno {start}. Deletions up to seqno {purge} have been purged, and"
            f" it may have missed some (it names purge seqno {told_purge}).",
            RollbackKind.PURGED,
        )
    known = _newest_known(question, log, high_seqno)
    if known is None:
        return Decision(0, _unknown_reason(question, log), RollbackKind.UNKNOWN_VERSION)
    decision = _place(question, known)
    back_to = decision.rollback_seqno
    # With a list of versions the next round would answer 0 anyway. A client that names our own
    # purge seqno would pass the next round, but after the rollback its data is older than that.
    if back_to and back_to < purge and (question.versions or told_purge == purge):
        return Decision(
            0,
            f"{decision.reason} Deletions up to seqno {purge} have been purged, so back to 0.",
            RollbackKind.PURGED,
        )
    return decision


def common_seqno(versions: Sequence[tuple[int, int]], seqno: int, log: FailoverLog) -> int:
    """Return up to which seqno two histories agree.

    One is the history of a client at `seqno`, which knows `versions` (newest first). The other is
    that of `log`. The newest version that both know decides. The result is at most `seqno`, and 0
    if they share no version.
    """
    question = Question(seqno, 0, seqno, seqno, tuple(versions))
    known = _newest_known(question, log, seqno) if versions else None
    return min(seqno, known.common_seqno) if known is not None else 0


def _newest_known(question: Question, log: FailoverLog, high_seqno: int) -> _Known | None:
    """Return the client's newest version that the log knows; None if it knows none."""
    if not question.versions:
        upper = log.upper_of(question.vb_uuid, high_seqno)
        if upper is None:
            return None
        return _Known(question.vb_uuid, upper, f"goes up to seqno {upper} here")
    # `start` does not bound the newest version. Otherwise a client in the middle of a snapshot
    # would be rolled back for no reason.
    client_upper: int | None = None
    uppers = log.uppers(high_seqno)
    for vb_uuid, seqno in question.versions:
        upper = uppers.get(vb_uuid)
        if upper is not None:
            if client_upper is None or upper <= client_upper:
                return _Known(vb_uuid, upper, f"goes up to seqno {upper} here")
            ended = f"goes up to seqno {upper} here, while the client left it at {client_upper}"
            return _Known(vb_uuid, client_upper, ended)
        client_upper = seqno if client_upper is None else min(seqno, client_upper)
    return None


def _place(question: Question, known: _Known) -> Decision:
    """Decide for a version that both sides know."""
    start, _, snap_start, snap_end = question[:4]
    held = f"snapshot {snap_start} to {snap_end}"
    if start == snap_start:
        snap_end = start  # the client has nothing of that snapshot
    common = known.common_seqno
    version = f"version {known.vb_uuid}, which {known.ended}"
    if snap_end <= common:
        return Decision(
            None, f"The client is at seqno {start} ({held}) on {version}: nothing differs."
        )
    if start == snap_end:
        snap_start = start  # the client has the whole snapshot
    if common < snap_start:
        return Decision(
            common,
            f"The client is at seqno {start} ({held}) on {version}: back to where the"
            f" histories part, seqno {common}.",
            RollbackKind.BRANCHED,
        )
    return Decision(
        snap_start,
        f"The client is at seqno {start}, inside {held}, on {version}: its part of that snapshot"
        f" may lack changes up to seqno {common}, so back to the snapshot's start,"
        f" seqno {snap_start}.",
        RollbackKind.INSIDE_SNAPSHOT,
    )


def _unknown_reason(question: Question, log: FailoverLog) -> str:
    """Return the reason for a rollback to 0 if no version is shared."""
    ours = _listed([f"{vb_uuid} from seqno {seqno}" for vb_uuid, seqno, _ in log.entries])
    theirs = _listed([str(vb_uuid) for vb_uuid, _ in question.versions]) or str(question.vb_uuid)
    return (
        f"The client is at seqno {question.start_seqno}, and none of its versions ({theirs}) is in"
        f" this partition's failover log ({ours})."
    )


def _listed(versions: Sequence[str]) -> str:
    """Return versions as a text of bounded length, newest first."""
    more = len(versions) - FAILOVER_ENTRIES_SHOWN
    shown = ", ".join(versions[:FAILOVER_ENTRIES_SHOWN])
    return f"{shown} and {more} older" if more > 0 else shown
