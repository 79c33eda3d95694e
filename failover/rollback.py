"""The rule that answers a stream request with OK or ROLLBACK, and says why.

Who calls it: the server for every stream request, the Spark source when it plans a batch, and
whoever explains a decision.

Sources: kv_engine's rule for one vb_uuid (FailoverTable::needsRollback), and its generalisation to
the client's whole list of versions, which needs one round where the other needs several or falls
back to 0.

Preconditions
- snap_start <= start <= snap_end (ERANGE otherwise), asserted here
- `high_seqno` is the last seqno of the partition

After ROLLBACK(r) a client restores a state that it held at or below r, forgets versions that began
above that state, and asks again from there; from 0 it asks with vb_uuid 0. The next answer is OK or
ROLLBACK(0).
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from failover.history import FailoverLog


class Question(NamedTuple):
    """The position of a client in one stream request.

    The client holds everything up to `snap_start_seqno`. Of the snapshot that ends at
    `snap_end_seqno` it holds the part up to `start_seqno`. `vb_uuid` names the branch.
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
    """The client ignores purged tombstones (flag 0x80)."""
    client_purge_seqno: int = 0
    """The purge seqno at which the client got its data; 0: unknown."""


class RollbackKind(StrEnum):
    """Why a client has to go back."""

    PURGED = "purged"
    """Deletions that the client may have missed are gone."""
    UNKNOWN_VERSION = "unknown_version"
    """The failover log has no version that the client knows."""
    BRANCHED = "branched"
    """The client holds changes that this history does not have."""
    INSIDE_SNAPSHOT = "inside_snapshot"
    """History branched inside a snapshot that the client holds in part."""


class Decision(NamedTuple):
    """The answer: the seqno to go back to (None: no rollback), and the reason in words."""

    rollback_seqno: int | None
    reason: str
    kind: RollbackKind | None = None
    """The reason in one word, for counting; None where there is no rollback."""


class _Known(NamedTuple):
    """A version that both sides know, and the last seqno at which their histories agree."""

    vb_uuid: int
    common_seqno: int
    ended: str


def decide(question: Question, log: FailoverLog, high_seqno: int, purge_seqno: int) -> Decision:
    """Decide whether a stream may start at the client's position, or how far it must go back.

    `log`, `high_seqno` and `purge_seqno` are the partition's own.
    """
    start = question.start_seqno
    assert question.snap_start_seqno <= start <= question.snap_end_seqno
    named = question.vb_uuid or bool(question.versions)
    if start == 0 and not (question.strict and named):
        return Decision(None, "The client starts at seqno 0 and holds nothing.")
    purge = 0 if question.ignore_purged else purge_seqno
    told_purge = question.client_purge_seqno
    if 0 < start < purge and told_purge != purge:
        return Decision(
            0,
            f"The client stands at seqno {start}, deletions up to seqno {purge} have been purged"
            f" and it may have missed some (it names purge seqno {told_purge}).",
            RollbackKind.PURGED,
        )
    known = _newest_known(question, log, high_seqno)
    if known is None:
        return Decision(0, _unknown_reason(question, log), RollbackKind.UNKNOWN_VERSION)
    decision = _place(question, known)
    back_to = decision.rollback_seqno
    # With a list the next round would only say 0. A client that names our own purge seqno would
    # be let through in the next round, though that seqno tells of newer data than it then holds.
    if back_to and back_to < purge and (question.versions or told_purge == purge):
        return Decision(
            0,
            f"{decision.reason} Deletions up to seqno {purge} have been purged, so from seqno 0.",
            RollbackKind.PURGED,
        )
    return decision


def _newest_known(question: Question, log: FailoverLog, high_seqno: int) -> _Known | None:
    """Return the client's newest version that the log knows; None if it knows none."""
    if not question.versions:
        upper = log.upper_of(question.vb_uuid, high_seqno)
        if upper is None:
            return None
        return _Known(question.vb_uuid, upper, f"goes up to seqno {upper} here")
    # The newest version is unbounded, not bounded by `start`: a client in the middle of a
    # snapshot would otherwise be rolled back for nothing.
    client_upper: int | None = None
    for vb_uuid, seqno in question.versions:
        upper = log.upper_of(vb_uuid, high_seqno)
        if upper is not None:
            if client_upper is None or upper <= client_upper:
                return _Known(vb_uuid, upper, f"goes up to seqno {upper} here")
            ended = f"goes up to seqno {upper} here and was left at {client_upper} by the client"
            return _Known(vb_uuid, client_upper, ended)
        client_upper = seqno if client_upper is None else min(seqno, client_upper)
    return None


def _place(question: Question, known: _Known) -> Decision:
    """Decide within a history that both sides know: steps 4 and 5 of the rule."""
    start, _, snap_start, snap_end = question[:4]
    held = f"snapshot {snap_start} to {snap_end}"
    if start == snap_start:
        snap_end = start  # nothing of that snapshot is held
    common = known.common_seqno
    version = f"version {known.vb_uuid}, which {known.ended}"
    if snap_end <= common:
        return Decision(
            None, f"The client stands at seqno {start} ({held}) on {version}: nothing differs."
        )
    if start == snap_end:
        snap_start = start  # the whole snapshot is held
    if common < snap_start:
        return Decision(
            common,
            f"The client stands at seqno {start} ({held}) on {version}: back to where the"
            f" histories part, seqno {common}.",
            RollbackKind.BRANCHED,
        )
    return Decision(
        snap_start,
        f"The client stands at seqno {start}, inside {held}, on {version}: what it holds of that"
        f" snapshot may leave out changes up to seqno {common}, so back to the snapshot's start,"
        f" seqno {snap_start}.",
        RollbackKind.INSIDE_SNAPSHOT,
    )


def _unknown_reason(question: Question, log: FailoverLog) -> str:
    """Return the reason for going back to 0 when no version is shared."""
    ours = ", ".join(f"{vb_uuid} from seqno {seqno}" for vb_uuid, seqno in log.pairs())
    theirs = ", ".join(str(vb_uuid) for vb_uuid, _ in question.versions) or str(question.vb_uuid)
    return (
        f"The client stands at seqno {question.start_seqno} and none of the versions that it knows"
        f" ({theirs}) is in this partition's failover log ({ours})."
    )
