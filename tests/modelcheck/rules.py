"""The rules that the model runs: the product's own functions, handed in as one object.

Two rules are no functions there, because they say when the product does something: what is sent
(`OpenGroups.begun`), and what is acknowledged (`ReplicaLink.synced`).

`RIGHT` is the product. modelcheck/broken.py replaces single functions. The product has no switch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from failover.rules import election, fencing, isr, promotion, replication_record
from failover.rules.history import FailoverLog
from failover.rules.replication_record import ReplicationRecord
from failover.rules.rollback import Question, decide


class Entry(NamedTuple):
    """One change in a log: the version and epoch that it was written in, and which change it is."""

    vb_uuid: int
    epoch: int
    value: int


class History(NamedTuple):
    """One side of a reconciliation: log, versions, HW."""

    log: tuple[Entry, ...]
    versions: FailoverLog
    hw_seqno: int


def sendable_seqno(synced_seqno: int, high_seqno: int) -> int:
    """Return the last seqno that a master sends to replicas: all that it has begun to write.

    It need not be on its own disk yet, so all disks of a partition sync a change at the same time.
    A power cut of the master may then leave it with less than its replicas. It is not a master when
    it has started again (`replication_record.is_master`), so it gives none of these seqnos to
    another change of the same version.
    """
    assert synced_seqno <= high_seqno
    return high_seqno


def acknowledgeable_seqno(synced_seqno: int, received_seqno: int) -> int:
    """Return the last seqno that a replica acknowledges: the last one on its own disk."""
    assert synced_seqno <= received_seqno
    return synced_seqno


def truncation(replica: History, master: History) -> int | None:
    """Return the seqno that a replica cuts its log back to; None: it goes on at its end."""
    end = len(replica.log)
    newest = replica.versions.current.vb_uuid
    question = Question(end, newest, end, end, tuple(replica.versions.pairs()))
    return decide(question, master.versions, len(master.log), 0).rollback_seqno


def start_to_reach(version_start_seqno: int, epoch_start_seqno: int) -> int:
    """Return what a master's HW must have reached before anybody joins."""
    return epoch_start_seqno


@dataclass(frozen=True)
class Rules:
    """One function per rule."""

    sendable_seqno: Callable[[int, int], int] = sendable_seqno
    acknowledgeable_seqno: Callable[[int, int], int] = acknowledgeable_seqno
    effective_isr: Callable[[frozenset[str], frozenset[str] | None], frozenset[str]] = (
        isr.effective_isr
    )
    high_watermark: Callable[
        [int, int, Collection[str], Mapping[str, isr.Acknowledgement], int, isr.Sender | None], int
    ] = isr.high_watermark
    is_held: Callable[..., bool] = isr.is_held
    may_change_record: Callable[..., bool] = isr.may_change_record
    has_sent: Callable[[int, int], bool] = isr.has_sent
    sender_seqno: Callable[[int, int], int] = isr.sender_seqno
    may_join: Callable[[isr.Candidate, int, int, int], bool] = isr.may_join
    is_same_epoch: Callable[[int, int], bool] = fencing.is_same_epoch
    is_same_copy: Callable[[int | None, int | None], bool] = fencing.is_same_copy
    is_master: Callable[[ReplicationRecord, str, int], bool] = replication_record.is_master
    master_to_elect: Callable[..., str | None] = election.master_to_elect
    truncation: Callable[[History, History], int | None] = truncation
    first_step: Callable[[ReplicationRecord, FailoverLog, int], promotion.FirstStep] = (
        promotion.first_step
    )
    start_to_reach: Callable[[int, int], int] = start_to_reach


RIGHT = Rules()
