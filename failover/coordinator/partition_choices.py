"""What the coordinator wants to write: elections, the steps of the plan, wanted masters. Pure.

It adds to the rules of `failover.rules.election` what they leave to the caller: when a report was
seen, which leases are over, and how long things have been as they are.

Who calls it: the coordinator. Every member keeps one up to date, so that it can see whether an
election is due.

Invariants
- a partition without a readable record is never in a result
- a change that relies on the end of a lease names that member's alive key, which must be absent
  when the change is written
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from failover.coordinator.plans.plan_steps import plan_changes
from failover.coordinator.record_writer import RecordChange
from failover.coordinator.records import MASTERS_RETURN_S, KeyKind, StoredPartition
from failover.coordinator.view import ClusterView, Stored
from failover.rules.election import (
    SuspectReport,
    counting,
    master_to_elect,
    master_to_elect_uncleanly,
)
from failover.rules.isr import min_in_sync_of
from failover.rules.replication_record import ReplicationRecord, elect, unclean_elect, want

GATHER_NS: Final = 100_000_000
"""How long an election that is due waits for the rest of the ISR to report, so that the longest log
wins. Members lose a dead master at about the same time."""
UNCLEAN_WAIT_NS: Final = 1_000_000_000
"""How long nobody of the ISR has to be left before an unclean election. Members repeat reports
every 500 ms, so by then all that are left have reported."""
AGAIN_NS: Final = 2_000_000_000
"""How long members have to connect to the store again, and to say what they miss and know."""
STEP_NS: Final = 100_000_000
"""Time between searches for steps of the plan, which look at each of its partitions, while there
are many. Each finds as many as fill a transaction, so 1,000 partitions take a second."""
FEW_STEPS: Final = 16
FEW_STEPS_NS: Final = 500_000_000
"""The same after a search that found FEW_STEPS at most: copies are filled meanwhile. A search takes
the coordinator's node some milliseconds, in which nobody is answered, and each step that is written
is taken over by all nodes."""
_NS_PER_S: Final = 1_000_000_000


class CoordinatorSettings(NamedTuple):
    """What the operator decides."""

    elects_uncleanly: bool = False
    """Elect a member outside the ISR when nobody of the ISR is left. Committed changes are lost."""
    prefers_first: bool = True
    """Ask for the most preferred copy as master when it has been in sync for
    `ClusterRecord.masters_return_s`."""


class PartitionChoices:
    """See the module."""

    def __init__(self, view: ClusterView, settings: CoordinatorSettings) -> None:
        self.settings = settings
        self._view = view
        self._seen: dict[str, tuple[int, int]] = {}
        """Member -> mod revision of its report, and when it was first seen."""
        self._reports: dict[int, list[SuspectReport]] = {}
        self._due_since: dict[int, tuple[int, int]] = {}
        """Partition -> epoch, and since when an election is due under it."""
        self._nobody_since: dict[int, int] = {}
        """Partition -> since when an unclean election is the only way."""
        self._first_in_sync: dict[int, tuple[str, int]] = {}
        """Partition -> its first copy, which is in sync and not the master, and since when."""
        self._moves_ns = 0
        """From when on copies and masters are moved: see `begin_again`."""
        self._leases_ns = 0
        """From when on a lease that this store had before the present connection says that its
        process runs."""
        self._step_ns = 0
        """When steps of the plan are looked for next."""

    def begin_again(self, now_ns: int, lease_ns: int) -> None:
        """The store may be another one: no report that was read counts, and nothing moves before
        those who have seen newer records have said so.
        """
        self._seen, self._reports = {}, {}
        self._leases_ns = now_ns + lease_ns + AGAIN_NS
        self._moves_ns = now_ns + AGAIN_NS

    def take_view(self, now_ns: int, vb_ids: Iterable[int]) -> None:
        """Take over that the view changed, and for which partitions."""
        for vb_id in vb_ids:
            self._note_first(now_ns, vb_id)
        # What is not newer than this connection may be of an older copy of the store.
        reports = {
            member: stored
            for member, stored in self._view.reports.items()
            if stored.item.mod_revision > self._view.begun_revision
        }
        revisions = {member: stored.item.mod_revision for member, stored in reports.items()}
        if revisions == {member: revision for member, (revision, _) in self._seen.items()}:
            return
        self._seen = {
            member: self._seen[member]
            if self._seen.get(member, (0, 0))[0] == revision
            else (revision, now_ns)
            for member, revision in revisions.items()
        }
        by_partition = defaultdict(list)
        for member, stored in reports.items():
            received_ns = self._seen[member][1]
            for told in stored.content.partitions:
                report = SuspectReport(
                    member, told.epoch, told.version_epoch, told.end_seqno, received_ns,
                    told.is_electable, told.seen, told.is_sure,
                )  # fmt: skip
                by_partition[told.vb_id].append(report)
        self._reports = dict(by_partition)

    @property
    def are_any_reported(self) -> bool:
        """Whether any member misses a master: what is due then changes with the time."""
        return bool(self._reports)

    def masters_due(self, now_ns: int) -> dict[int, str | None]:
        """Return partition -> master for which a clean election is due."""
        return {
            vb_id: stored.content.record.master
            for vb_id, stored in self._reported()
            if self._clean_choice(now_ns, vb_id, stored.content.record) is not None
        }

    def changes(self, now_ns: int) -> Iterator[RecordChange]:
        """Yield what is to be written, elections first."""
        for vb_id, stored in self._reported():
            record = stored.content.record
            member = self._clean_choice(now_ns, vb_id, record)
            if member is not None:
                self._nobody_since.pop(vb_id, None)
                if self._gather(now_ns, vb_id, record):
                    gone = self._gone(now_ns, vb_id, record) - {member}
                    yield self._change(vb_id, elect(record, member, gone), stored)
            elif (left := self._unclean_choice(now_ns, vb_id, record)) is not None:
                yield self._change(vb_id, unclean_elect(record, left), stored)
        if now_ns < self._moves_ns:
            return
        wanted = self._view.wanted
        busy = set(self._reports)
        for change in self._wishes(now_ns):
            if change.vb_id not in wanted:
                busy.add(change.vb_id)
                yield change
        if wanted and now_ns >= self._step_ns:
            present = self._present_members(now_ns)
            busy.update(
                vb_id
                for vb_id, stored in self._view.partitions.items()
                if stored.content.record.master not in present
            )
            steps = list(plan_changes(self._view, wanted, busy))
            self._step_ns = now_ns + (STEP_NS if len(steps) > FEW_STEPS else FEW_STEPS_NS)
            yield from steps

    def _present_members(self, now_ns: int) -> set[str]:
        """Return who runs, is connected to this store, and has said what it knows better. Under
        other masters, nobody may be left to say that the store has gone back.
        """
        reports, begun_revision = self._view.reports, self._view.begun_revision
        return {
            member
            for member, alive in self._view.alive.items()
            if (now_ns >= self._leases_ns or alive.item.mod_revision > begun_revision)
            and member in reports
            and reports[member].item.mod_revision > alive.item.mod_revision
        }

    def _reported(self) -> Iterator[tuple[int, Stored[StoredPartition]]]:
        """Yield the partitions with a report and a record that can be read."""
        for vb_id in sorted(self._reports):
            stored = self._view.partitions.get(vb_id)
            if stored is not None:
                yield vb_id, stored

    # ---- Elections

    def _is_lease_over(self, record: ReplicationRecord) -> bool:
        return record.master is not None and record.master not in self._view.alive

    def _clean_choice(self, now_ns: int, vb_id: int, record: ReplicationRecord) -> str | None:
        return master_to_elect(
            record, self._reports[vb_id], now_ns, is_lease_over=self._is_lease_over(record),
            min_in_sync=self._min_in_sync(record),
        )  # fmt: skip

    def _min_in_sync(self, record: ReplicationRecord) -> int:
        cluster = self._view.cluster
        setting = None if cluster is None else cluster.content.min_in_sync
        return min_in_sync_of(setting, record.counted_copies)

    def _gather(self, now_ns: int, vb_id: int, record: ReplicationRecord) -> bool:
        """Gather reports; return whether all of the ISR that live have given one, or had time."""
        epoch, since_ns = self._due_since.get(vb_id, (0, 0))
        if epoch != record.epoch:
            self._due_since[vb_id] = (record.epoch, now_ns)
            since_ns = now_ns
        missing = record.isr - self._gone(now_ns, vb_id, record) - self._told(now_ns, vb_id, record)
        return not missing or now_ns - since_ns >= GATHER_NS

    def _told(self, now_ns: int, vb_id: int, record: ReplicationRecord) -> set[str]:
        return {report.member for report in counting(record, self._reports[vb_id], now_ns)}

    def _gone(self, now_ns: int, vb_id: int, record: ReplicationRecord) -> frozenset[str]:
        """Return who leaves the ISR with this election: the old master, and whose lease is over."""
        reporters = self._told(now_ns, vb_id, record)
        return frozenset(
            member
            for member in record.isr - reporters
            if member == record.master or member not in self._view.alive
        )

    def _unclean_choice(self, now_ns: int, vb_id: int, record: ReplicationRecord) -> str | None:
        """Return whom to elect although it was not in sync; None: nobody, or not yet.

        Nobody of the ISR is left if no member of it reports and all their leases are over. Then the
        store alone is witness, and the record is judged as if the master were the whole ISR.
        """
        reports = self._reports[vb_id]
        told = self._told(now_ns, vb_id, record)
        if any(member in told or member in self._view.alive for member in record.isr):
            self._nobody_since.pop(vb_id, None)
            return None
        since_ns = self._nobody_since.setdefault(vb_id, now_ns)
        if not self._may_be_unclean(vb_id, record) or now_ns - since_ns < UNCLEAN_WAIT_NS:
            return None
        alone = frozenset({record.master}) if record.master is not None else record.isr
        judged = replace(record, isr=alone)
        return master_to_elect_uncleanly(judged, reports, now_ns, is_lease_over=True)

    def _may_be_unclean(self, vb_id: int, record: ReplicationRecord) -> bool:
        command = self._view.commands.get(vb_id)
        is_told = command is not None and command.content.elect_uncleanly_in_epoch == record.epoch
        return self.settings.elects_uncleanly or is_told

    # ---- Wanted masters

    def _note_first(self, now_ns: int, vb_id: int) -> None:
        """Note since when the first copy of a partition could be its master again."""
        stored = self._view.partitions.get(vb_id)
        record = None if stored is None else stored.content.record
        if (
            record is None
            or record.copies[0] == record.master
            or record.copies[0] not in record.isr
        ):
            self._first_in_sync.pop(vb_id, None)
        elif self._first_in_sync.get(vb_id, ("", 0))[0] != record.copies[0]:
            self._first_in_sync[vb_id] = record.copies[0], now_ns

    def _wishes(self, now_ns: int) -> Iterator[RecordChange]:
        """Yield the records whose first copy gets its partition back."""
        if not self._first_in_sync or not self.settings.prefers_first:
            return
        cluster = self._view.cluster
        returns_s = MASTERS_RETURN_S if cluster is None else cluster.content.masters_return_s
        if not returns_s:
            return
        since_ns = now_ns - int(returns_s * _NS_PER_S)
        present = self._present_members(now_ns)
        for vb_id, (first, in_sync_ns) in self._first_in_sync.items():
            stored = self._view.partitions[vb_id]
            record = stored.content.record
            member = self._view.members.get(first)
            if (
                in_sync_ns <= since_ns
                and record.master in present
                and record.wanted_master is None
                and record.branch is None
                and self._view.stays(first)
                and not (member is not None and member.content.is_drained)
                and vb_id not in self._reports
            ):
                yield RecordChange(vb_id, want(record, first), stored)

    def _change(
        self, vb_id: int, record: ReplicationRecord, before: Stored[StoredPartition]
    ) -> RecordChange:
        """Return the change, on condition that a lease is still over if it is over in the view."""
        old = before.content.record
        key = None
        if self._is_lease_over(old):
            assert old.master is not None
            key = self._view.keys.of_member(KeyKind.ALIVE, old.master)
        return RecordChange(vb_id, record, before, key)
