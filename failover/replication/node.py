"""The replication of one node: roles of its partitions, and their high watermarks. Sans-IO.

    ReplicationCore ──> Master      masterships, feeds of replicas, changes of records
                    └─> Replica    links to masters, what comes on them

The shell (a server, or a simulated node) tells it what happens:

    records_changed(vb_ids)   the view of the metadata store has changed
    group_begun(group)        a commit group of this node is about to be written
    group_synced(group)       it is on disk
    time_passes()             the process runs, at least every 100 ms
    tick()                    the same, and it is time to look at all links and partitions
    step()                    the effect StepDue asked for it
    check_fence()             before every batch of requests
    outcome(...)              a change of a record that this node wrote was decided

and carries out `take_effects()` after each of these, and after bytes came for a session or a link.
What comes after what in a shell is `NodeTurns`.

Roles. A replication record says who holds a copy, who is master, and in which epoch. This node is
master only in epochs that began while this process was running (`replication_record.is_master`).

Invariants
- an epoch is never followed lower than one that was seen, and no record that is older than one
  that this folder has seen (`failover.coordinator.seen_records`): the metadata store may go back;
- a partition that this node does not master is REPLICA here, or DEAD without a copy: it takes no
  writes, expires nothing;
- a partition whose record does not name this member is emptied (`DroppedCopies`);
- a replica that hears no master is marked (`Partition.is_unheard`) and has no streams of clients;
- what waits in connections is answered (`NodeShell.depose`) before history is cut off;
- the high watermark of a master comes from its in-sync set, that of a replica from its master.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from dcp.core.groups import GroupCycle, Published
from dcp.stream.hub import StreamHub
from failover.coordinator.clock import RanTime
from failover.coordinator.cluster_session import ClusterSession, NodeShell
from failover.coordinator.effects import Notice
from failover.coordinator.meta_restore import HeldLog
from failover.coordinator.record_writer import OutcomeKind, WriteOutcome
from failover.coordinator.records import KeyKind, ReportedPartition, StoredPartition
from failover.coordinator.seen_records import SeenRecords, older_records
from failover.coordinator.view import Stored
from failover.replication.effects import MapChanged, ReplicationEffect
from failover.replication.master import Master
from failover.replication.mastership import (
    Identity,
    Mastership,
    ReplicationParts,
    ReplicationSettings,
)
from failover.replication.messages import StoreSeen
from failover.replication.pace import HeardMasters
from failover.replication.replica import DroppedCopies, Replica
from failover.rules.isr import may_change_record
from failover.rules.replication_record import UNSEEN, Rank, ReplicationRecord, is_master
from vbucket.engine.engine import Engine
from vbucket.engine.partition import Partition, VbState
from vbucket.engine.replicated import ReplicatedChanges
from vbucket.log.commit_group import CommitGroup
from vbucket.model.receipt import ElectionLoss
from vbucket.store.store import Store


class UnheardMasters:
    """Marks the copies of this node whose master is not heard, and ends their streams.

    Nothing is done for each partition unless a record or what is heard has changed.
    """

    def __init__(
        self,
        engine: Engine,
        hub: StreamHub,
        member: str,
        records: Mapping[int, Stored[StoredPartition]],
        masterships: Mapping[int, Mastership],
        heard: HeardMasters,
        now_ns: int,
    ) -> None:
        """`records` and `masterships` are the tables of the node."""
        self._engine = engine
        self._hub = hub
        self._member = member
        self._records = records
        self._masterships = masterships
        self._heard = heard
        self.next_ns = now_ns
        """When the next partition counts as unheard, unless its master is heard before."""
        self.masters: frozenset[str | None] = frozenset()
        """The masters of followed partitions that are not heard; None: there is none."""
        self._followed: set[str | None] | None = None
        """Masters of the partitions that this node does not master; None: records have changed
        since that was known."""

    def record_changed(self) -> None:
        """A partition has another record."""
        self._followed = None

    def mark(self) -> None:
        """Mark the copies whose master is not heard now."""
        self.next_ns = self._heard.unheard_from_ns
        has_new_records = self._followed is None
        if self._followed is None:
            self._followed = {
                self._records[vb_id].content.record.master
                for vb_id in self._records.keys() - self._masterships.keys()
            }
        unheard = frozenset(filter(self._heard.is_unheard, self._followed))
        if unheard == self.masters and not has_new_records:
            return
        self.masters = unheard
        for vb_id, stored in self._records.items():
            record, part = stored.content.record, self._engine.partitions[vb_id]
            was_unheard = part.is_unheard
            part.is_unheard = (
                part.state == VbState.REPLICA
                and self._member in record.copies
                and record.master in unheard
            )
            if part.is_unheard and not was_unheard:
                self._hub.fenced(vb_id)


class ReplicationCore:
    """See the module."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        groups: GroupCycle,
        session: ClusterSession,
        settings: ReplicationSettings,
        shell: NodeShell,
        *,
        cluster: str,
        now_ns: int,
        kept: SeenRecords | None = None,
    ) -> None:
        """`kept` is what this folder has seen of the store's records; None: nothing, and it is not
        kept in a file.
        """
        membership = session.membership
        self._kept = kept or SeenRecords(session.view.keys)
        self._era = 0
        self._sure: set[int] = set()
        """Partitions whose record is known to be the newest: see `election.SuspectReport`."""
        self.unproven: set[int] = set()
        """Partitions whose record may be older than one by which this master was deposed: see
        `isr.may_change_record`."""
        self._unproven_ns = 0
        """Since when confirmations count for them; 0: from the next look on."""
        self._masters_all: bool | None = None
        """Whether this node masters all partitions whose record names it; None: look."""
        self._engine = engine
        self._session = session
        self._shell = shell
        self._member = membership.member
        self._changes = ReplicatedChanges(engine, store)
        self._now_ns = now_ns
        self._effects: list[ReplicationEffect] = []
        self.records: dict[int, Stored[StoredPartition]] = {}
        """The newest record of each partition that was acted upon."""
        self._distrusted: dict[int, str] = {}
        """Partitions whose record in the store is not followed, and why. Nobody writes it."""
        self._first_epochs: dict[int, int] = {}
        """The epoch that a partition's record had when this process first read it."""
        self._reported: tuple[ReportedPartition, ...] | None = None
        """None: this store was told nothing yet."""
        self._ran = RanTime(now_ns)
        parts = ReplicationParts(
            engine, groups.hub, session, settings,
            Identity(cluster, membership.member, membership.incarnation), self._effects,
            self._ran, self._kept, shell,
        )  # fmt: skip
        self.master = Master(parts, groups, now_ns)
        self.watermarks = self.master.watermarks
        self.replica = Replica(
            parts, self._changes, self.records, self.watermarks, self.master.handovers,
            store_seen=self._store_seen, now_ns=now_ns,
        )  # fmt: skip
        self._dropped = DroppedCopies(engine, groups.hub, self.replica)
        self._unheard = UnheardMasters(
            engine, groups.hub, membership.member, self.records, self.master.masterships,
            self.replica.heard, now_ns,
        )  # fmt: skip
        self._begin_unheard()

    def _begin_unheard(self) -> None:
        """Serve nothing before a record says what this node is to a partition."""
        engine = self._engine
        for part in engine.partitions:
            part.has_copies = True
            part.state = VbState.REPLICA
            part.is_unheard = True  # until a record says that there is no copy here, or a master
            part.may_send_back = False
            # A floor is committed, and so is what the log says. More is not known.
            known_seqno = engine.keyspace.known_watermarks.get(part.vb_id, 0)
            part.committed_seqno = max(part.history_floor, min(known_seqno, part.high_seqno))

    @property
    def partitions(self) -> Sequence[Partition]:
        """The partitions of this node."""
        return self._engine.partitions

    @property
    def has_effects(self) -> bool:
        """Whether the shell has something to carry out."""
        return bool(self._effects)

    def take_effects(self) -> list[ReplicationEffect]:
        """Return what the shell has to carry out, in order."""
        effects = self._effects[:]
        self._effects.clear()
        return effects

    # -- records -----------------------------------------------------------------------------------

    def held_logs(self) -> list[HeldLog]:
        """Return where the logs of this node's copies end, for a restoration of the records."""
        return [
            HeldLog(
                part.vb_id, part.leader_epoch, *_end_of(part),
                part.vb_id in self.master.masterships and part.vb_id not in self.unproven,
            )
            for part in self.partitions
            if part.high_seqno or part.leader_epoch
        ]  # fmt: skip

    def records_changed(self, now_ns: int, vb_ids: Iterable[int]) -> None:
        """The view has other records of these partitions."""
        self._now_ns = now_ns
        self._look_at_era()
        vb_ids = tuple(sorted(vb_ids))
        cluster = self._session.view.cluster
        if cluster is not None and self.master.take_min_in_sync(cluster.content.min_in_sync):
            self.watermarks.advance(tuple(self.master.masterships))
        for vb_id in vb_ids:
            if vb_id >= self._engine.num_vbuckets:
                continue
            stored = self._session.view.partitions.get(vb_id)
            if stored is not None:
                self._take_record(vb_id, stored)
            else:
                view = self._session.view
                key = view.keys.of_partition(KeyKind.PARTITION, vb_id)
                self._distrust(vb_id, view.unreadable.get(key, "its record is gone"))
        self._effects.append(MapChanged(vb_ids))
        if self._kept.kept_revision:
            self.records_were_kept()

    def _look_at_era(self) -> None:
        """Forget what is known of the store only by another connection than the present one."""
        if self._era != self._session.era:
            self._era = self._session.era
            self._kept.begin_again(self._era)
            self._sure.clear()
            self._reported = None
            self.replica.served_by.begin_again()
            for mastership in self.master.masterships.values():
                mastership.store_begins_again()
            self.unproven, self._unproven_ns = set(self.master.masterships), 0

    def _store_seen(self) -> StoreSeen:
        """Return what is on disk here of the records of the store."""
        self._look_at_era()
        return StoreSeen(self._session.link, self._kept.kept_revision)

    def records_were_kept(self) -> None:
        """More of the store's records is on disk (`SeenRecords.kept`)."""
        self.replica.records_were_kept()
        self.master.records_were_kept()

    def _distrust(self, vb_id: int, why: str) -> None:
        """Leave a partition as it is, because its record says nothing that can be followed. Say so
        once.
        """
        if self._distrusted.get(vb_id) != why:
            self._distrusted[vb_id] = why
            known = self.records.get(vb_id)
            epoch = self._engine.partitions[vb_id].leader_epoch
            master = "not known"
            if known is not None:
                epoch, master = known.content.record.epoch, known.content.record.master or "none"
            self._effects.append(
                Notice(
                    f"partition {vb_id} stays as it is (leader epoch {epoch}, master {master}): "
                    f"{why}"
                )
            )

    def _record_of(self, vb_id: int) -> ReplicationRecord:
        return self.records[vb_id].content.record

    def _take_record(self, vb_id: int, stored: Stored[StoredPartition]) -> None:
        record = stored.content.record
        seen_epoch = self._engine.partitions[vb_id].leader_epoch
        if vb_id in self.records:
            seen_epoch = max(seen_epoch, self._record_of(vb_id).epoch)
        self._masters_all = None
        is_newest = self._kept.note_partition(vb_id, stored)
        if record.epoch < seen_epoch or not is_newest:
            older = self._kept.older.get(vb_id, UNSEEN)
            seen = max(older, self._kept.rank(vb_id), Rank(seen_epoch, 0))
            self._kept.older[vb_id] = seen
            self._distrust(
                vb_id,
                f"the metadata store was set back: it has leader epoch {record.epoch}, change "
                f"{record.partition_epoch}, and epoch {seen.epoch}, change {seen.partition_epoch} "
                "was seen. Restore a newer state of the store, or build the records anew: dcpctl "
                "cluster meta restore",
            )
            return
        # An old epoch of a store that was set back is not the first one: a later one, which began
        # before this process, would make it master.
        is_new = self._session.view.saw_creation(stored.item)
        first_epoch = self._first_epochs.setdefault(vb_id, 0 if is_new else record.epoch)
        self._distrusted.pop(vb_id, None)
        self.records[vb_id] = stored
        self._unheard.record_changed()
        mastership = self.master.masterships.get(vb_id)
        if not is_master(record, self._member, first_epoch):
            if mastership is not None:
                self.master.step_down(vb_id, f"epoch {record.epoch} has begun")
                self.replica.confirmations.note(vb_id, self._now_ns)
            holds_copy = self._member in record.copies
            self._engine.partitions[vb_id].state = VbState.REPLICA if holds_copy else VbState.DEAD
            self.replica.follow(vb_id, record, self._now_ns)
            self._dropped.note(vb_id, holds_copy=holds_copy)
        elif mastership is None or mastership.epoch != record.epoch:
            confirmed_ns = self.replica.last_confirmed_ns(vb_id)
            self.replica.leave(vb_id)
            self._changes.settle()
            part = self._engine.partitions[vb_id]
            announced_seqno = max(self.watermarks.announced.take(vb_id), part.committed_seqno)
            self._tell_loss(vb_id, record, announced_seqno)
            self.master.begin(
                vb_id, record, confirmed_ns=confirmed_ns, announced_seqno=announced_seqno,
                sender=self.replica.take_sender(vb_id, record.epoch), now_ns=self._now_ns,
            )  # fmt: skip
        else:
            self.master.take_record(vb_id, record, stored.item.mod_revision)
            self.watermarks.advance((vb_id,))
        self.master.decide_waiting(vb_id)
        if (ended := self.master.branch_ended(vb_id, record)) is not None:
            self._effects.append(ended)

    def _tell_loss(self, vb_id: int, record: ReplicationRecord, announced_seqno: int) -> None:
        """Emit a receipt if this node is the first master since an unclean election."""
        part = self._engine.partitions[vb_id]
        if record.unclean_epoch is not None and part.leader_epoch < record.unclean_epoch:
            versions = tuple(part.failover.pairs())
            self._effects.append(
                ElectionLoss(
                    vb_id, record.epoch, versions, part.high_seqno, announced_seqno or None
                )
            )

    def outcome(self, now_ns: int, outcome: WriteOutcome) -> None:
        """A change that this node wrote was decided."""
        self._now_ns = now_ns
        vb_id = outcome.change.vb_id
        mastership = self.master.masterships.get(vb_id)
        if mastership is None:
            return
        self.master.decided(mastership, is_written=outcome.kind is OutcomeKind.WRITTEN)
        stored = self._session.view.partitions.get(vb_id)
        if stored is not None:
            self._take_record(vb_id, stored)

    # -- high watermarks ---------------------------------------------------------------------------

    def group_begun(self, now_ns: int, group: CommitGroup) -> bool:
        """A commit group of this node is about to be written, and to be synced; return whether
        replicas get it already.
        """
        self._now_ns = now_ns
        return self.master.groups.begun(now_ns, group)

    def group_synced(self, now_ns: int, group: CommitGroup) -> None:
        """A commit group of this node is on disk."""
        self._now_ns = now_ns
        self._changes.settle()
        if mastered := self.master.group_synced(now_ns, group):
            self.watermarks.advance(mastered)
        if followed := self._followed_and_announced(group):
            self.watermarks.advance(followed)
        for link in self.replica.links.values():
            link.synced(self._engine.commits.synced_group)

    def _followed_and_announced(self, group: CommitGroup) -> list[int]:
        """Return the followed partitions of a group where it commits something: the master has
        announced a high watermark that was not synced here, or the group has no changes (but a
        version).
        """
        masterships, awaiting = self.master.masterships, self.watermarks.announced.vb_ids
        if len(masterships) == self._engine.num_vbuckets:
            return []
        found: Iterable[int] = awaiting & group.high_seqnos.keys()
        if group.has_control:
            partitions = self._engine.partitions
            found = [
                vb_id
                for vb_id, seqno in group.high_seqnos.items()
                if seqno <= partitions[vb_id].committed_seqno or vb_id in awaiting
            ]
        return [vb_id for vb_id in found if vb_id not in masterships]

    # -- time --------------------------------------------------------------------------------------

    def check_fence(self, now_ns: int) -> None:
        """Fence the partitions that are not confirmed any more, and mark those whose master is not
        heard. Call it before every batch: the process may have been stopped since the last tick.
        Go on with handovers that have rested: nothing else may ask for a step before the next tick.
        """
        fence_ns = self.master.serving.fence_ns
        if fence_ns is not None and now_ns >= fence_ns:
            self.master.serve(now_ns)
        if self.master.arriving:
            self.master.serving.arrivals.expire(now_ns)
        if self.master.handovers.take_pause_end(now_ns):
            self.master.steps.ask()
        if now_ns >= self._unheard.next_ns:
            self.replica.note_heard(now_ns)
            self._unheard.mark()

    def time_passes(self, now_ns: int) -> None:
        """Note that the process runs, and send heartbeats that are due."""
        self._ran.tick(now_ns)
        self.master.followers.beat(now_ns)
        self.master.cuts.tick(now_ns)

    def missed(self, now_ns: int, lost_ns: int) -> None:
        """Note that this process did not run for so long just now, in the middle of its work."""
        self._ran.missed(now_ns, lost_ns)

    def tick(self, now_ns: int) -> None:
        """Let time pass: links, services, in-sync sets, handovers, reports."""
        self._now_ns = now_ns
        self._ran.tick(now_ns)
        self.master.steps.is_due = False
        self.replica.tick(now_ns)
        self._dropped.tick(now_ns)
        masterships = self.master.masterships
        if self.replica.take_gaps():
            for vb_id, stored in self.records.items():
                if vb_id not in masterships:
                    self.replica.follow(vb_id, stored.content.record, now_ns)
        active = self.master.serving.active()
        self.watermarks.advance(self._engine.commits.lagging.keys() | active)
        self.master.serve(now_ns)
        self.master.serving.arrivals.expire(now_ns)
        self._unheard.mark()
        self._note_followed()
        self._note_serving()
        changes = self.master.record_changes(self._trusted(), may_write=self._session.may_write)
        if changes:
            self._shell.ask_store(self._session.write(now_ns, changes))
        self._report()

    def step(self, now_ns: int) -> None:
        """Do what need not wait for the next tick (`StepDue`): serve partitions that may be served
        now, and go on with handovers.
        """
        self._now_ns = now_ns
        self.master.steps.is_due = False
        self.master.serving.serve_more(now_ns)
        self._note_followed()
        if self.master.handovers.is_under_way and self._session.may_write:
            changes = self.master.handover_changes(now_ns, self._trusted())
            if changes:
                self._shell.ask_store(self._session.write(now_ns, changes))

    def _trusted(self) -> Mapping[int, Stored[StoredPartition]]:
        """Return the records that are followed, and may be written. Nobody writes one that is older
        than what anybody has seen.
        """
        view = self._session.view
        older = {each.vb_id for each in older_records(view)} if view.reports else set[int]()
        self._unproven_ns = self._unproven_ns or self._now_ns
        self.unproven = {vb_id for vb_id in self.unproven if not self._is_proven(vb_id)}
        if not self._distrusted and not older and not self.unproven:
            return self.records
        older |= self.unproven
        return {
            vb_id: stored
            for vb_id, stored in self.records.items()
            if vb_id not in self._distrusted and vb_id not in older
        }  # fmt: skip

    def _is_proven(self, vb_id: int) -> bool:
        """Whether nobody else can have become master by a record that the store has lost."""
        mastership = self.master.masterships.get(vb_id)
        if mastership is None:
            return True
        copies = mastership.record.copies  # one that is not in sync is no other master's, too
        asked_ns = self.master.serving.confirmations(mastership, copies)
        heard = {member for member, at_ns in asked_ns.items() if at_ns >= self._unproven_ns}
        return may_change_record(
            mastership.isr, copies, {*heard, self._member}, mastership.min_in_sync
        )

    def _note_serving(self) -> None:
        """Note by which records of the store this node serves all that it masters."""
        self._look_at_era()
        view = self._session.view
        if self._masters_all is None:
            mastered = sum(
                stored.content.record.master == self._member for stored in view.partitions.values()
            )
            self._masters_all = mastered == len(self.master.masterships)
        may_say = self._masters_all and not self._distrusted and view.revision > 0
        seen = StoreSeen(self._session.link, view.revision)
        may_say &= not self.master.serving.has_unserved
        self.master.departures.note_serving(seen, serves_all=may_say)
        if len(self._sure) < len(self.records):
            self._note_sure(self.master.departures.serves_by)

    def _note_sure(self, own: StoreSeen) -> None:
        """Note whose master, here or elsewhere, serves by the record that the store has."""
        own_revision = own.revision if own.link == self._session.link else 0
        for vb_id, stored in self.records.items():
            if vb_id in self._sure or vb_id in self._distrusted:
                continue
            master, revision = stored.content.record.master, stored.item.mod_revision
            is_own = master == self._member and revision <= own_revision
            if is_own or self.replica.served_by.has(master, revision):
                self._sure.add(vb_id)

    def _note_followed(self) -> None:
        self.master.handovers.note_followed(self._now_ns, self.replica.is_followed)

    def take_damages(self) -> list[int]:
        """Return the partitions in which replication met damaged data since the last call, and
        those that wait to be mended before they are served.
        """
        damages = sorted(self._changes.damages | self.master.serving.unreadable.keys())
        self._changes.damages.clear()
        return damages

    def resolve_counts(self) -> None:
        """Resolve the counts of documents. Call it before the collections change."""
        self._changes.settle()

    def _report(self) -> None:
        """Report the partitions whose master is not heard."""
        older = self._kept.older
        view = self._session.view
        asked = view.reported_by_others(self._member) if view.reports else frozenset[int]()
        if self._reported is None and not self._session.has_read:
            return
        may_be_quiet = self._reported == () and not older and not asked
        if may_be_quiet and not self._unheard.masters:
            return
        alive = self._session.view.alive
        suspects = frozenset(
            master
            for master in self._unheard.masters
            if self.replica.is_suspect(master, has_lease=master in alive)
        )
        if may_be_quiet and not suspects:
            return
        reported: list[ReportedPartition] = []
        for vb_id, stored in sorted(self.records.items()):
            part, record = self._engine.partitions[vb_id], stored.content.record
            is_suspected = part.is_unheard and record.master in suspects
            is_asked = vb_id in asked and self._member in record.copies
            if vb_id in older or not (is_suspected or is_asked):
                continue
            reported.append(
                ReportedPartition(
                    vb_id, record.epoch if is_suspected else 0, part.vb_uuid, *_end_of(part),
                    part.incomplete_snapshot is None and not _is_branch_below(record, part),
                    *max(self._kept.rank(vb_id), Rank(part.leader_epoch, 0)),
                    is_sure=vb_id in self._sure,
                )
            )  # fmt: skip
        # Who has seen a newer record says so all the time.
        for vb_id, seen in older.items():
            part = self._engine.partitions[vb_id]
            reported.append(
                ReportedPartition(
                    vb_id, 0, part.vb_uuid, part.failover.epoch_at(part.synced_seqno),
                    part.synced_seqno, False, *seen,
                )
            )  # fmt: skip
        reported.sort()
        if tuple(reported) != self._reported:
            self._reported = tuple(reported)
            self._shell.ask_store(self._session.report(self._now_ns, self._reported))


class NodeTurns(ABC):
    """What comes after what on a node of a cluster: fences, syncs, acknowledgements, answers.

    A server's process (`dcp.server.cluster.replicated_node`) and a simulated node are both one.
    They have the clock, the connections and the disks; the order is here.

    Invariants
    - what may not be answered any more is fenced before each batch of requests;
    - replicas in step get a group before this node's disk has it, and the core knows that it is
      synced before anybody else does. What that allows, acknowledgements first, leaves before
      clients are answered;
    - effects are carried out in their order, never in the middle of another one or of a core's
      call, and until none is left.
    """

    core: ReplicationCore
    _is_carrying = False

    def fence(self, now_ns: int) -> None:
        """Requests come next."""
        self.core.check_fence(now_ns)

    def group_begins(self, now_ns: int, group: CommitGroup) -> None:
        """A group is about to be written, and synced: replicas write it at the same time."""
        if self.core.group_begun(now_ns, group):
            self.feed()

    def job_done(self, now_ns: int, published: Published) -> None:
        """A job of the log is done, and the group cycle has published it."""
        if published.group is not None:
            self.core.group_synced(now_ns, published.group)
            self.feed()
            self.acknowledge()
        self.publish(published)
        self.carry_out()

    def carry_out(self) -> None:
        """Carry out all effects, and send what they left on links."""
        if self._is_carrying:
            return  # an answer that left has brought the next commit: the call below goes on
        self._is_carrying = True
        while self.core.has_effects:
            for effect in self.core.take_effects():
                self.carry_out_one(effect)
        self._is_carrying = False
        self.end_turn()

    @abstractmethod
    def feed(self) -> None:
        """Send replicas what is for them now, if this turn would delay it."""

    @abstractmethod
    def acknowledge(self) -> None:
        """Send masters what links have for them now, if this turn would delay it."""

    @abstractmethod
    def publish(self, published: Published) -> None:
        """Tell the rest of the node what is committed, and release the answers that waited."""

    @abstractmethod
    def carry_out_one(self, effect: ReplicationEffect) -> None:
        """Carry out an effect."""

    @abstractmethod
    def end_turn(self) -> None:
        """Send what links have, forget those that are over, and have pending changes written."""


def _end_of(part: Partition) -> tuple[int, int]:
    """Return where a partition's log ends, as elections compare it: (epoch, seqno)."""
    window = part.incomplete_snapshot
    end_seqno = part.synced_seqno if window is None else window.start
    return part.failover.epoch_at(end_seqno), end_seqno


def _is_branch_below(record: ReplicationRecord, part: Partition) -> bool:
    """Whether a branch is under way that a member can only make by beginning again at 0."""
    branch = record.branch
    return (
        branch is not None
        and 0 < branch.seqno < part.history_floor
        and part.failover.upper_of(branch.vb_uuid, part.high_seqno) is None
    )
