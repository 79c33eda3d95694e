"""Elections: which reports count, whether a master is gone, and who becomes the new one.

A replica that loses its master writes a report. The coordinator reads all reports of a partition
and asks `master_to_elect`.

Who calls it: the coordinator, the simulator and the model checker.

Why the longest log, and how logs are compared. Every member of the ISR has every committed change,
so any member is a safe choice: the model checker elects each of them. The comparison decides about
changes that are not committed. It is (epoch of the version at the log's end, seqno), as in Raft.
The version comes first, because a longer log of an older version is a tail that a later master has
already left behind: to elect it would bring that tail back and cut off what the later master wrote,
which it may have answered where `acknowledge=master` is set. Within one version the longer log has
all that the shorter one has. So it keeps the most, and nobody else has to roll back.

After an unclean election the same comparison finds the member that loses the least.

Whether the record may be believed. The metadata store may have gone back to an older copy, whose
in-sync set names members that lack committed changes. A change is committed only when every member
of the in-sync set knows that set's record durably (`isr.is_held`), and an in-sync set that commits
has `min_in_sync` members at least. So a record is the newest one if of any `min_in_sync` copies one
has spoken and has seen nothing newer; or if somebody is *sure*: the master said that it serves by
the record of the store, and this member's connection to the store has not broken since. Over one
connection the store cannot go back, so all later records are the newest, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from failover.rules.replication_record import UNSEEN, Rank, ReplicationRecord, majority

REPORT_VALID_NS: Final = 2_000_000_000
"""How long a report counts. Replicas repeat theirs every 500 ms while they hear no master. Two
short interruptions an hour apart must not add up to a majority."""


class SuspectReport(NamedTuple):
    """What a member says when it hears no master, about one partition."""

    member: str
    epoch: int
    """The epoch of the replication record that the member knows."""
    version_epoch: int
    """The epoch in which the version began that its log ends in (`FailoverLog.epoch_at`)."""
    end_seqno: int
    """Its last synced seqno; with an incomplete snapshot, the end of the last complete one."""
    received_ns: int
    """When the report arrived, by the coordinator's clock."""
    is_electable: bool = True
    """False while a de-duplicated snapshot is incomplete, or after a failed sync until the end of
    the log was written anew."""
    seen: Rank = UNSEEN
    """The newest record of the partition that its folder has ever seen."""
    is_sure: bool = False
    """Whether the partition's master said, some time since the member's present connection to the
    store began, that it serves by the record that the store had: the store has not gone back."""


def counting(
    record: ReplicationRecord, reports: Iterable[SuspectReport], now_ns: int
) -> tuple[SuspectReport, ...]:
    """Return the reports that count: of ISR members, under the record's epoch, and recent.

    A report under another epoch speaks of another master. A member that knows the record's epoch no
    longer acknowledges earlier ones.
    """
    return tuple(
        report
        for report in reports
        if report.member in record.isr
        and report.epoch == record.epoch
        and now_ns - report.received_ns <= REPORT_VALID_NS
    )


def is_master_gone(
    record: ReplicationRecord,
    reports: Iterable[SuspectReport],
    now_ns: int,
    *,
    is_lease_over: bool,
) -> bool:
    """Return whether enough witnesses say that the master is gone.

    The witnesses are members of the ISR other than the master, and the metadata store, which sees
    that the lease of the master's node is over. They must be a majority of the ISR. So with an ISR
    of two one cut cable does not depose a healthy master: the store has to agree. A report of the
    master's own folder comes from a new process, so the earlier one is gone for certain.
    """
    if record.master is None:
        return True
    members = {report.member for report in counting(record, reports, now_ns)}
    if record.master in members:
        return True
    return len(members) + is_lease_over >= majority(len(record.isr))


def knows_newer(record: ReplicationRecord, reports: Iterable[SuspectReport]) -> frozenset[str]:
    """Return who has seen a newer record than this one: the metadata store is older than that."""
    return frozenset(report.member for report in reports if report.seen > record.rank)


def must_speak(
    record: ReplicationRecord,
    reports: Iterable[SuspectReport],
    now_ns: int,
    *,
    min_in_sync: int,
) -> frozenset[str]:
    """Return the copies of which some have to report before the record may be believed; none: it
    may. Each report tells what its member has seen, under whatever epoch.
    """
    spoken: set[str] = set()
    for report in reports:
        if now_ns - report.received_ns <= REPORT_VALID_NS:
            if report.is_sure and report.seen == record.rank:
                return frozenset()
            spoken.add(report.member)
    silent = frozenset(record.copies) - spoken
    return silent if len(silent) >= min_in_sync else frozenset()


def is_newest(
    record: ReplicationRecord,
    reports: Iterable[SuspectReport],
    now_ns: int,
    *,
    min_in_sync: int,
) -> bool:
    """Return whether no newer record than this one can have had an effect."""
    told = tuple(reports)
    is_known = not must_speak(record, told, now_ns, min_in_sync=min_in_sync)
    return is_known and not knows_newer(record, told)


def master_to_elect(
    record: ReplicationRecord,
    reports: Iterable[SuspectReport],
    now_ns: int,
    *,
    is_lease_over: bool,
    min_in_sync: int,
) -> str | None:
    """Return which member of the ISR becomes master; None: nobody yet.

    It is the member with the longest log among the reports that count. The order of preference
    decides between equal logs only. Nobody is elected by a record that may be older than another
    one (`is_newest`). `min_in_sync`: members that a write needs.
    """
    told = tuple(reports)
    if not is_master_gone(record, told, now_ns, is_lease_over=is_lease_over):
        return None
    if not is_newest(record, told, now_ns, min_in_sync=min_in_sync):
        return None
    return _longest(record, (each for each in counting(record, told, now_ns) if each.is_electable))


def master_to_elect_uncleanly(
    record: ReplicationRecord, reports: Iterable[SuspectReport], now_ns: int, *, is_lease_over: bool
) -> str | None:
    """Return which member an unclean election chooses; None: nobody, or a clean one is possible.

    To be asked only on an explicit setting or command. Members outside the ISR count, under
    whatever epoch they know, but not copies that are being filled: they have only a part. Whoever
    is elected first cuts its log back to its last complete snapshot. Nobody is elected where a
    newer record was seen: that says who has what.
    """
    told = tuple(reports)
    if knows_newer(record, told):
        return None
    if not is_master_gone(record, told, now_ns, is_lease_over=is_lease_over):
        return None
    if _longest(record, (each for each in counting(record, told, now_ns) if each.is_electable)):
        return None
    copies = frozenset(record.copies) - record.filling
    return _longest(
        record,
        (
            report
            for report in told
            if report.member in copies and now_ns - report.received_ns <= REPORT_VALID_NS
        ),
    )


def _longest(record: ReplicationRecord, reports: Iterable[SuspectReport]) -> str | None:
    """Return the member with the longest log: by version, by seqno, then by preference."""
    best = max(
        reports,
        key=lambda report: (
            report.version_epoch,
            report.end_seqno,
            -record.copies.index(report.member),
        ),
        default=None,
    )
    return None if best is None else best.member
