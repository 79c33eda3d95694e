"""The rule that answers a stream request with OK or ROLLBACK, and says why.

Who calls it: the server for every stream request, the Spark source when it plans a batch, and
whoever explains a decision (`decide`); consumers, backups and Spark tasks, which compare their
versions with a failover log that a server sent (`common_seqno`). One rule, so that all agree.

Sources: kv_engine's rule for one vb_uuid (FailoverTable::needsRollback), and its generalisation to
the client's whole list of versions, which needs one round where the other needs several or falls
back to 0.

What the caller sees to
- snap_start <= start <= snap_end (ERANGE otherwise), asserted here
- `high_seqno` is that of the partition's log, never the high watermark
- a client that has seen more than this node holds or has committed, because the node is behind and
  not because history branched, is told to retry (ETMPFAIL) before this rule is asked

What a client does with ROLLBACK(r): it restores a state it held at or below r, forgets versions
that began above that state, and asks again from there; from 0 it asks with vb_uuid 0. The next
answer is then OK, or 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from failover.history import FailoverLog


class Question(NamedTuple):
    """What a client says it holds: the position of one stream request.

    The client holds everything up to `snap_start_seqno`, of the snapshot that goes on to
    `snap_end_seqno` what lies at or below `start_seqno`, on the branch that `vb_uuid` names.
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
    """Purged tombstones do not matter to this client (flag 0x80)."""
    client_purge_seqno: int = 0
    """The purge seqno under which the client's data was sent to it; 0: it does not say."""


class RollbackKind(StrEnum):
    """Why a client has to go back."""

    PURGED = "purged"
    """Deletions that it may have missed are gone."""
    UNKNOWN_VERSION = "unknown_version"
    """No version that it knows is in the failover log."""
    BRANCHED = "branched"
    """It holds changes that this history does not have."""
    INSIDE_SNAPSHOT = "inside_snapshot"
    """History branched inside the snapshot that it holds in part."""


class Decision(NamedTuple):
    """The answer: None for no rollback, else the seqno to go back to; and the reason in words."""

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
    """Decide whether a stream may go on where the client stands, or how far it must go back.

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


def common_seqno(versions: Sequence[tuple[int, int]], seqno: int, log: FailoverLog) -> int:
    """Return up to which seqno two histories agree.

    One is that of a client at `seqno`, which knows `versions` (newest first), the other that of
    `log`. The newest version that both know decides. The result is at most `seqno`, and 0 if they
    share no version.
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
