"""What a new master does before it serves, and what a deposed one keeps of what it cuts off.

Who calls it: the master and replica cores, the simulator and the model checker.

Every failover makes a new version at the new master's end, also if the new master was in sync.
Otherwise a dead master that had written further comes back, both sides call their histories by one
name, and `failover.rules.rollback.decide` finds no difference: the histories diverge. A new version
is durable before its master serves.

Only a handover makes none, because the old master says where it ended.
"""

from __future__ import annotations

from typing import NamedTuple

from failover.rules.history import FailoverLog
from failover.rules.replication_record import HandedOver, ReplicationRecord


class FirstStep(NamedTuple):
    """What a new master does to its own history first, in this order."""

    branch_seqno: int | None
    """Roll back to here, and begin the version of the operator's branch; None: no branch."""
    version_seqno: int | None
    """Begin the new version here; None: go on in the version that was handed over."""
    committed_seqno: int = 0
    """The HW is at least this: whoever hands over has committed all before."""


def takes_over(handover: HandedOver | None, log: FailoverLog, end_seqno: int) -> bool:
    """Return whether a new master goes on in the version that was handed over to it.

    It does so only if its own newest version and its own last seqno are the ones in the record.
    """
    return handover is not None and handover == (log.current.vb_uuid, end_seqno)


def first_step(record: ReplicationRecord, log: FailoverLog, end_seqno: int) -> FirstStep:
    """Return what a new master does before it serves; `log` and `end_seqno` are its own.

    A branch that the record names is finished here if this member has not rolled back yet. The
    branch's own version may have been used by the old master already, so the new master makes a
    version of its own on top of it. The branch's version goes into the log even if nothing is
    rolled back: it tells later masters that the branch is done. Without it the next one would roll
    back what was committed meanwhile.

    The master that started the branch makes the branch's version only.
    """
    branch = record.branch
    if branch is not None and log.upper_of(branch.vb_uuid, end_seqno) is None:
        seqno = min(branch.seqno, end_seqno)
        return FirstStep(seqno, seqno)
    if takes_over(record.handover, log, end_seqno):
        return FirstStep(None, None, end_seqno)
    return FirstStep(None, end_seqno)


def is_branch_done(record: ReplicationRecord, acknowledged_epochs: dict[str, int]) -> bool:
    """Return whether every ISR member has rolled back for the branch that is under way.

    `acknowledged_epochs` has the epoch under which each member last reconciled with this master;
    the master counts itself. A member that has reconciled under the record's epoch has rolled back.
    """
    return record.branch is not None and all(
        acknowledged_epochs.get(member) == record.epoch for member in record.isr
    )


def may_send_back(*, is_master: bool, hw_seqno: int, epoch_start_seqno: int) -> bool:
    """Return whether a consumer may be told ROLLBACK or ERANGE; otherwise it is told ETMPFAIL.

    `epoch_start_seqno` is the master's end when it became master. A replica, and a new master whose
    HW has not reached it, may be behind the consumer. They send nobody back. Replicas that ask are
    answered from the log at once.
    """
    return is_master and hw_seqno >= epoch_start_seqno


def may_have_been_answered(
    record: ReplicationRecord, reconciled_epoch: int, *, acknowledges_as_master: bool
) -> bool:
    """Return whether what a member cuts off may have been answered: it goes into a discard file.

    `reconciled_epoch` is the last epoch under which the member reconciled, or was master. After
    clean elections only changes that no client was told of are cut off, unless this node answers
    when only its own disk has a change.
    """
    unclean = record.unclean_epoch
    return acknowledges_as_master or (unclean is not None and reconciled_epoch < unclean)


def kept_elsewhere_seqno(
    record: ReplicationRecord, reconciled_epoch: int, committed_seqno: int, high_seqno: int
) -> int:
    """Return up to which seqno the copies of a record have what a member has that it does not name.

    `reconciled_epoch` is the last epoch under which the member reconciled, or was master. Under the
    record's epoch it has only what its master had on disk; if that epoch began with a handover, the
    same holds for the epoch before, up to where the handover was. Before, the others have what is
    committed, unless there was an unclean election: then nobody knows.
    """
    unclean = record.unclean_epoch
    if unclean is not None and reconciled_epoch < unclean:
        return 0
    if reconciled_epoch == record.epoch:
        return high_seqno
    known_seqno = committed_seqno
    if record.handover is not None and reconciled_epoch == record.epoch - 1:
        known_seqno = max(committed_seqno, record.handover.seqno)
    return min(known_seqno, high_seqno)
