"""Rules that are known to be wrong, each in one respect. The checker finds what each one breaks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from failover.rules import election, isr, promotion
from failover.rules.election import SuspectReport
from failover.rules.history import FailoverLog
from failover.rules.isr import Acknowledgement, Candidate, Sender
from failover.rules.promotion import FirstStep
from failover.rules.replication_record import ReplicationRecord

from .rules import RIGHT, History, Rules
from .values import Bounds


class BrokenRule(NamedTuple):
    """A wrong rule, and bounds within which it is found."""

    rules: Rules
    bounds: Bounds
    words: str


def cut_to_hw(replica: History, master: History) -> int | None:
    """A replica cuts off whatever it does not know to be committed."""
    return replica.hw_seqno if replica.hw_seqno < len(replica.log) else None


def _epoch_starts(history: History) -> list[tuple[int, int]]:
    """(epoch, seqno at which it began), oldest first, from the log only, as KIP-101 has it."""
    starts: list[tuple[int, int]] = []
    for seqno, entry in enumerate(history.log):
        if not starts or starts[-1][0] != entry.epoch:
            starts.append((entry.epoch, seqno))
    return starts


def _master_starts(history: History) -> list[tuple[int, int]]:
    """The same of a master, which knows its own epoch before it has written anything."""
    return [(each.epoch, each.seqno) for each in reversed(history.versions.entries)]


def kip_101(replica: History, master: History) -> int | None:
    """The master answers where the first epoch after the replica's newest one begins."""
    starts = _epoch_starts(replica)
    if not starts:
        return None
    newest = starts[-1][0]
    later = [seqno for epoch, seqno in _master_starts(master) if epoch > newest]
    end = min(later) if later else len(master.log)
    return end if end < len(replica.log) else None


def any_epoch(own_epoch: int, other_epoch: int) -> bool:
    """Nothing is fenced."""
    return True


def any_record(
    record: ReplicationRecord, reports: Iterable[SuspectReport], now_ns: int, **how: Any
) -> str | None:
    """Nobody is asked whether there was a newer record."""
    told = [report._replace(seen=record.rank, is_sure=True) for report in reports]
    return election.master_to_elect(record, told, now_ns, **how)


def hw_of_any_epoch(
    hw_seqno: int,
    epoch: int,
    members: Collection[str],
    acknowledged: Mapping[str, Acknowledgement],
    min_in_sync: int,
    sender: Sender | None,
) -> int:
    """An acknowledgement counts under whichever epoch it was given."""
    given = {member: ack._replace(epoch=epoch) for member, ack in acknowledged.items()}
    return isr.high_watermark(hw_seqno, epoch, members, given, min_in_sync, sender)


def join_at_hw(candidate: Candidate, epoch: int, hw_seqno: int, epoch_start_seqno: int) -> bool:
    """A replica joins when it has reached the HW, whatever the master's HW is."""
    return candidate.acknowledgement.synced_seqno >= hw_seqno


def version_start(version_start_seqno: int, epoch_start_seqno: int) -> int:
    """The HW must reach the start of the version. After a handover that is older than the epoch."""
    return version_start_seqno


def no_version(record: ReplicationRecord, log: FailoverLog, end_seqno: int) -> FirstStep:
    """A new master goes on in the version that it has."""
    return FirstStep(None, None)


def no_committed_seqno(record: ReplicationRecord, log: FailoverLog, end_seqno: int) -> FirstStep:
    """A new master does not conclude from a handover what is committed."""
    return promotion.first_step(record, log, end_seqno)._replace(committed_seqno=0)


def branch_not_noted(record: ReplicationRecord, log: FailoverLog, end_seqno: int) -> FirstStep:
    """A new master that has nothing to roll back for a branch does not note the branch."""
    step = promotion.first_step(record, log, end_seqno)
    return FirstStep(None, end_seqno) if step.branch_seqno == end_seqno else step


def branch_not_finished(record: ReplicationRecord, log: FailoverLog, end_seqno: int) -> FirstStep:
    """A new master goes on with a branch that its predecessor started as if there were none."""
    return FirstStep(None, end_seqno)


def received(synced_seqno: int, received_seqno: int) -> int:
    """What was received counts as if it were on disk."""
    return received_seqno


def shrunk_at_once(confirmed: frozenset[str], asked: frozenset[str] | None) -> frozenset[str]:
    """A member that leaves counts no longer from the moment the master asks."""
    return confirmed if asked is None or asked > confirmed else asked


def grown_when_confirmed(confirmed: frozenset[str], asked: frozenset[str] | None) -> frozenset[str]:
    """A member that joins counts when the master has heard the store's answer."""
    return confirmed


def same_after_restart(record: ReplicationRecord, member: str, first_seen_epoch: int) -> bool:
    """A process that restarts is master again, without an election."""
    return record.master == member


BROKEN = {
    "cut-to-hw": BrokenRule(
        replace(RIGHT, truncation=cut_to_hw),
        Bounds(3, 1, 3, 0),
        "truncation to the HW instead of a comparison of histories",
    ),
    "kip-101": BrokenRule(
        replace(RIGHT, truncation=kip_101),
        Bounds(3, 2, 3, 0),
        "KIP-101 alone: one question for the end of the replica's newest epoch",
    ),
    "kip-279": BrokenRule(
        replace(
            RIGHT, is_same_epoch=any_epoch, high_watermark=hw_of_any_epoch, may_join=join_at_hw
        ),
        Bounds(3, 2, 3, 0),
        "KIP-279 alone: histories are compared, but nothing is fenced (the rules of KIP-320)",
    ),
    "early-join": BrokenRule(
        replace(RIGHT, may_join=join_at_hw),
        Bounds(3, 1, 3, 0),
        "a replica joins before the HW has reached the start of the master's epoch",
    ),
    "version-join": BrokenRule(
        replace(RIGHT, start_to_reach=version_start, first_step=no_committed_seqno),
        Bounds(3, 1, 3, 0),
        "a replica joins when the HW has reached the start of the version, not of the epoch",
    ),
    "no-version": BrokenRule(
        replace(RIGHT, first_step=no_version),
        Bounds(3, 2, 3, 0),
        "no version at failovers",
    ),
    "branch-not-finished": BrokenRule(
        replace(RIGHT, first_step=branch_not_finished),
        Bounds(3, 1, 3, 0, branches=1),
        "a new master does not finish a branch that is under way",
    ),
    "received": BrokenRule(
        replace(RIGHT, acknowledgeable_seqno=received),
        Bounds(3, 1, 2, 1),
        "the HW counts what was received, not what was synced",
    ),
    "early-shrink": BrokenRule(
        replace(RIGHT, effective_isr=shrunk_at_once),
        Bounds(3, 1, 2, 0),
        "a shrink counts before it is confirmed",
    ),
    "late-expand": BrokenRule(
        replace(RIGHT, effective_isr=grown_when_confirmed),
        Bounds(3, 1, 2, 0),
        "an expansion counts only when it is confirmed",
    ),
    "send-early": BrokenRule(
        replace(RIGHT, is_master=same_after_restart),
        Bounds(3, 2, 2, 1),
        "a master sends what it has not synced, and goes on as master after a restart",
    ),
    "unsynced-sender": BrokenRule(
        replace(RIGHT, sender_seqno=received),
        Bounds(3, 1, 2, 0),
        "the sender of a log counts as a copy of what it may not have synced",
    ),
    "old-sender": BrokenRule(
        replace(RIGHT, has_sent=lambda reconciled_epoch, epoch: True),
        Bounds(3, 1, 3, 0),
        "the sender of a log counts as a copy although there was another master since",
    ),
    "old-copy": BrokenRule(
        replace(RIGHT, is_same_copy=lambda number, other: True),
        Bounds(3, 1, 2, 0, moves=2),
        "what a member acknowledged counts for a copy that it gets later",
    ),
}

BROKEN |= {
    "stale-isr": BrokenRule(
        replace(RIGHT, master_to_elect=any_record),
        Bounds(2, 1, 2, 0, min_in_sync=1, restores=1, changes=2),
        "a record is believed although the store may have gone back to an older copy",
    ),
}

BROKEN |= {
    "unseen-shrink": BrokenRule(
        replace(RIGHT, is_held=lambda isr, revision, seen: True),
        Bounds(3, 1, 2, 0, restores=1, changes=1),
        "who has left an in-sync set counts no more before its members hold that record",
    ),
}

SLOW = {
    "stale-master": BrokenRule(
        replace(RIGHT, may_change_record=lambda isr, copies, heard, min_in_sync: True),
        Bounds(3, 1, 2, 0, min_in_sync=1, restores=1, changes=2),
        "a master writes records over a new connection, though another one may have been elected",
    ),
    "branch-not-noted": BrokenRule(
        replace(RIGHT, first_step=branch_not_noted),
        Bounds(3, 2, 4, 0, branches=1),
        "a new master does not note a branch for which it had nothing to roll back",
    ),
    "stale-ack": BrokenRule(
        replace(RIGHT, high_watermark=hw_of_any_epoch),
        Bounds(3, 1, 4, 0),
        "the HW counts acknowledgements of an earlier epoch",
    ),
}
"""Found too, but later: by `scripts/soak check`, not by the tests."""

ALL = BROKEN | SLOW
