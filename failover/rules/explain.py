"""Explains the answer to a stream request in words, with the data that it is based on.

Who calls it: the admin API, and `dcpctl explain rollback`, which also works against servers that
only speak DCP. `failover.rules.rollback` has the rule. The checks come in the order of STREAM_REQ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from failover.rules.history import FailoverLog
from failover.rules.replication_record import ReplicationRecord
from failover.rules.rollback import Question, decide


class VersionRow(NamedTuple):
    """One line of the failover log, as the rule sees it."""

    vb_uuid: int
    from_seqno: int
    upto_seqno: int
    """The last seqno of this version: the start of the next newer one, or the high seqno."""
    is_asked_for: bool
    """Whether the client named this version."""


class Explanation(NamedTuple):
    """`answer` is OK, ROLLBACK or ERANGE; `rollback_seqno` is set with ROLLBACK only."""

    answer: str
    rollback_seqno: int | None
    reason: str
    table: tuple[VersionRow, ...]
    high_seqno: int
    purge_seqno: int

    def to_document(self) -> dict[str, Any]:
        """Return it as JSON; 64-bit names are decimal texts."""
        return {
            "answer": self.answer,
            "rollback_seqno": self.rollback_seqno,
            "reason": self.reason,
            "high_seqno": self.high_seqno,
            "purge_seqno": self.purge_seqno,
            "failover_log": [
                {
                    "vb_uuid": str(row.vb_uuid),
                    "from_seqno": row.from_seqno,
                    "upto_seqno": row.upto_seqno,
                    "asked_for": row.is_asked_for,
                }
                for row in self.table
            ],
        }


def explain(question: Question, log: FailoverLog, high_seqno: int, purge_seqno: int) -> Explanation:
    """Answer a question with its reasons."""
    answer, rollback_seqno, reason = _answer(question, log, high_seqno, purge_seqno)
    asked_for = {question.vb_uuid, *(vb_uuid for vb_uuid, _ in question.versions)}
    upper = high_seqno
    table = []
    for version in log.entries:
        is_asked_for = version.vb_uuid in asked_for
        table.append(VersionRow(version.vb_uuid, version.seqno, upper, is_asked_for))
        upper = version.seqno
    return Explanation(answer, rollback_seqno, reason, tuple(table), high_seqno, purge_seqno)


def _answer(
    question: Question, log: FailoverLog, high_seqno: int, purge_seqno: int
) -> tuple[str, int | None, str]:
    start, _, snap_start, snap_end = question[:4]
    if not snap_start <= start <= snap_end:
        return "ERANGE", None, f"start {start} is outside the snapshot {snap_start} to {snap_end}"
    decision = decide(question, log, high_seqno, purge_seqno)
    if decision.rollback_seqno is not None:
        return "ROLLBACK", decision.rollback_seqno, decision.reason
    if start > high_seqno:
        return "ERANGE", None, f"start {start} is above the high seqno {high_seqno}"
    return "OK", None, decision.reason


class Eligibility(NamedTuple):
    """Whether a copy may become master, or is it, and why."""

    may_become_master: bool
    why: str


def eligibility(record: ReplicationRecord, member: str, *, runs: bool) -> Eligibility:
    """Return whether a copy may become master, and why. `runs`: its process does.

    The rule itself is in `failover.rules.election`: a clean election takes a member of the in-sync
    set.
    """
    assert member in record.copies, f"{member} holds no copy"
    if member in record.filling:
        return Eligibility(
            False,
            "it is being filled and has only a part; it joins the in-sync set when it is full",
        )
    if member not in record.isr:
        return Eligibility(
            False,
            "it is not in sync: it may lack answered changes. It joins again when it has caught up;"
            " only an unclean failover makes it master before, and loses what it lacks",
        )
    if not runs:
        return Eligibility(
            False, "its process does not run; it is in sync, so it may as soon as it runs again"
        )
    if member == record.master:
        return Eligibility(True, "it is the master")
    if member == record.wanted_master:
        return Eligibility(True, "it is in sync, and the partition is being handed over to it")
    return Eligibility(True, "it is in sync: it has every change that was committed")
