"""The replication of one node: roles of its partitions, links, high watermarks. Sans-IO.

The shell (a server, or a simulated node) tells it what happens:

    records_changed(vb_ids)   the view of the metadata store has changed
    group_synced(published)   a commit group of this node is on disk
    tick()                    time passes, at least every 100 ms
    check_fence()             before every batch of requests
    outcome(...)              a change of a record that this node wrote was decided

and carries out `take_effects()` after each of these, and after bytes came for a session or a link.

Roles. A replication record says who holds a copy, who is master, and in which epoch. This node is
master only in epochs that began while this process was running (`replication_record.is_master`).

Invariants
- an epoch is never followed lower than one that was seen;
- a partition that this node does not master is REPLICA here: it takes no writes, expires nothing;
- what waits in connections is answered (`depose`) before history is cut off;
- a change of a record is written only by its master, one at a time for each partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from dcp.cluster.cluster_records import ReportedPartition, StoredPartition
from dcp.cluster.cluster_session import ClusterSession, SessionEffect
from dcp.cluster.cluster_view import Stored
from dcp.cluster.record_writer import OutcomeKind, RecordChange, WriteOutcome
from dcp.core.groups import GroupCycle, Published
from dcp.replication.mastership import Mastership, ReplicationSettings, Service
from dcp.replication.messages import (
    FORMAT,
    EntriesSection,
    Greeting,
    ReplicaPosition,
    Welcome,
    decode,
    encode,
    versions_of,
)
from dcp.replication.replica_feed import Followed, ReplicaFeed
from dcp.replication.replica_link import LinkState, ReplicaLink, from_here
from dcp.replication.replication_effects import Dial, MapChanged, ReplicationEffect
from dcp.session.replication_port import FeedAnswer, ReplicationError
from dcp.stream.hub import StreamHub
from dcp.wire.message import U64, StreamRequest
from dcp.wire.status import Status
from failover.fencing import refusal
from failover.isr import serves_from_ns
from failover.promotion import first_step, is_branch_done, may_send_back
from failover.replication_record import (
    HandedOver,
    ReplicationRecord,
    finish_branch,
    hand_over,
    is_master,
)
from failover.rollback import Question, decide
from vbucket.engine.branch import BranchRefusedError
from vbucket.engine.engine import Engine
from vbucket.engine.leadership import (
    FloorsRefusedError,
    StaleEpochError,
    adopt_failover_log,
    adopt_floors,
    begin_version,
    set_leader_epoch,
)
from vbucket.engine.partition import Hold, Partition, VbState
from vbucket.engine.replicated import ReplicatedChanges
from vbucket.model.entry import LOG_CONTROL, OPCODE_AT, control_document, vb_id_of
from vbucket.store.store import Store

UNHEARD_NS: Final = 600_000_000
"""A master whose node was not heard for so long is reported: six heartbeats."""
REDIAL_NS: Final = 200_000_000
"""Pause between two attempts to connect to a node."""
HANDING_NS_MAX: Final = 2_000_000_000
"""A handover that has not happened after so long is given up, and tried again later."""

CarryOut = Callable[[Iterable[SessionEffect]], None]


class ReplicationCore:
    """See the module. Implements what links, feeds and sessions ask of it."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        hub: StreamHub,
        groups: GroupCycle,
        session: ClusterSession,
        settings: ReplicationSettings,
        *,
        cluster: str,
        carry_out: CarryOut,
        depose: Callable[[tuple[int, ...], str], None],
        now_ns: int,
    ) -> None:
        """`carry_out` carries out effects of the session with the metadata store. `depose` answers
        what waits in connections for a commit in partitions that this node does not master any
        more, for the reason given: it may or may not be committed.
        """
        self._engine = engine
        self._keyspace = engine.keyspace
        self._commits = engine.commits
        self._hub = hub
        self._groups = groups
        self._session = session
        self._settings = settings
        self._cluster = cluster
        self._carry_out = carry_out
        self._depose = depose
        self._member = session.membership.member
        self._changes = ReplicatedChanges(engine, store)
        self._now_ns = self._started_ns = now_ns
        self._effects: list[ReplicationEffect] = []
        self._records: dict[int, Stored[StoredPartition]] = {}
        """The newest record of each partition that was acted upon."""
        self._first_epochs: dict[int, int] = {}
        """The epoch that a partition's record had when this process first read it."""
        self._masters: dict[int, Mastership] = {}
        self._feeds: dict[str, ReplicaFeed] = {}
        self.links: dict[str, ReplicaLink] = {}
        """By member: this node's links to the nodes of its masters."""
        self._heard_ns: dict[str, int] = {}
        self._dialled_ns: dict[str, int] = {}
        self._confirmed_ns: dict[int, int] = {}
        """When this process last confirmed a partition's master, of links that are gone."""
        self._hw: dict[int, int] = {}
        """The high watermark that the master told."""
        self._fence_ns: int | None = None
        """The first time at which some partition is not confirmed any more; None: none."""
        self._reported: tuple[ReportedPartition, ...] = ()
        self._has_reported_wrong_node = False
        for part in engine.partitions:
            part.has_copies = True
            part.state = VbState.REPLICA
            part.may_send_back = False
            part.committed_seqno = part.history_floor  # a floor is committed; more is not known

    # -- effects -----------------------------------------------------------------------------------

    def take_effects(self) -> list[ReplicationEffect]:
        """Return what the shell has to carry out, in order."""
        effects, self._effects = self._effects, []
        return effects

    # -- records -----------------------------------------------------------------------------------

    def records_changed(self, now_ns: int, vb_ids: Iterable[int]) -> None:
        """The view has other records of these partitions."""
        self._now_ns = now_ns
        for vb_id in sorted(vb_ids):
            stored = self._session.view.partitions.get(vb_id)
            if stored is not None and vb_id < self._engine.num_vbuckets:
                self._take_record(vb_id, stored)
        self._effects.append(MapChanged())

    def _take_record(self, vb_id: int, stored: Stored[StoredPartition]) -> None:
        record = stored.content.record
        first_epoch = self._first_epochs.setdefault(vb_id, record.epoch)
        known = self._records.get(vb_id)
        if known is not None and known.content.record.epoch > record.epoch:
            return
        self._records[vb_id] = stored
        mastership = self._masters.get(vb_id)
        if is_master(record, self._member, first_epoch):
            if mastership is not None and mastership.epoch == record.epoch:
                mastership.record = record
                if not mastership.is_writing:
                    mastership.asked = None
                self._raise_watermarks((vb_id,))
            else:
                self._become_master(vb_id, record, mastership)
            return
        if mastership is not None:
            self._step_down(vb_id, f"epoch {record.epoch} has begun")
        self._follow(vb_id, record)

    def _become_master(
        self, vb_id: int, record: ReplicationRecord, before: Mastership | None
    ) -> None:
        part = self._engine.partitions[vb_id]
        if part.leader_epoch > record.epoch:
            return  # the store was set back; nothing is guessed
        if before is not None:
            self._step_down(vb_id, f"epoch {record.epoch} has begun")
        confirmed_ns = self._last_confirmed_ns(vb_id)
        self._leave_links(vb_id)
        branch = record.branch
        first = first_step(record, part.failover, part.high_seqno)
        try:
            if branch is not None and first.branch_seqno is not None:
                log = part.failover.branch(branch.vb_uuid, first.branch_seqno, record.epoch)
                self._keyspace.replace_history(
                    part, log, record.epoch, rollback_to=first.branch_seqno
                )
            if before is not None and branch is not None:
                set_leader_epoch(self._engine, vb_id, record.epoch)
            elif first.version_seqno is not None:
                begin_version(self._engine, vb_id, record.epoch)
            else:
                set_leader_epoch(self._engine, vb_id, record.epoch)
        except StaleEpochError:
            return
        part.state = VbState.FENCED
        part.may_send_back = False
        mastership = Mastership(
            part, record, self._member, self._settings,
            now_ns=self._now_ns, ready_group=part.last_group,
            serves_from_ns=serves_from_ns(
                confirmed_ns, was_handed_over=record.handover is not None
            ),
        )  # fmt: skip
        part.guard = mastership
        self._masters[vb_id] = mastership
        if first.version_seqno is None and first.committed_seqno:
            self._hw[vb_id] = max(self._hw.get(vb_id, 0), first.committed_seqno)

    def _step_down(self, vb_id: int, why: str) -> None:
        """Stop being a partition's master."""
        part = self._engine.partitions[vb_id]
        self._depose((vb_id,), why)
        del self._masters[vb_id]
        part.state = VbState.REPLICA
        part.may_send_back = False
        part.guard = None
        part.release_writes(Hold.REPLICATION)
        self._hub.fenced(vb_id)
        for feed in self._feeds.values():
            feed.end(vb_id)
        self._confirmed_ns[vb_id] = max(self._confirmed_ns.get(vb_id, 0), self._now_ns)

    # -- replicas ----------------------------------------------------------------------------------

    def _follow(self, vb_id: int, record: ReplicationRecord) -> None:
        """Follow the master of a partition, if this node holds a copy."""
        master = record.master
        if self._member not in record.copies or master is None or master == self._member:
            self._leave_links(vb_id)
            return
        for member, link in self.links.items():
            if member != master:
                self._leave(member, link, vb_id)
        self._heard_ns.setdefault(master, self._now_ns)
        followed = self._link_to(master)
        if followed is not None:
            followed.follow(vb_id, record.epoch, self._now_ns)

    def _link_to(self, member: str) -> ReplicaLink | None:
        """Return the link to a member's node; dial it if there is none."""
        link = self.links.get(member)
        if link is not None and link.state is not LinkState.CLOSED:
            return link
        if self._now_ns - self._dialled_ns.get(member, -REDIAL_NS) < REDIAL_NS:
            return None
        if link is not None:
            self._drop_link(member)
        self._dialled_ns[member] = self._now_ns
        greeting = Greeting(
            FORMAT, self._cluster, self._member, self._session.membership.incarnation
        )
        link = ReplicaLink(
            self, greeting, now_ns=self._now_ns, value_bytes_max=self._settings.value_bytes_max
        )
        self.links[member] = link
        self._effects.append(Dial(member))
        return link

    def _drop_link(self, member: str) -> None:
        link = self.links.pop(member)
        self._heard_ns[member] = max(self._heard_ns.get(member, 0), link.heard_ns)
        for vb_id, stored in self._records.items():
            if stored.content.record.master == member:
                confirmed_ns = max(self._confirmed_ns.get(vb_id, 0), link.confirmed_ns)
                self._confirmed_ns[vb_id] = confirmed_ns

    def _leave(self, member: str, link: ReplicaLink, vb_id: int) -> None:
        if link.follows(vb_id):
            confirmed_ns = max(self._confirmed_ns.get(vb_id, 0), link.confirmed_ns)
            self._confirmed_ns[vb_id] = confirmed_ns
            link.leave(vb_id)
        assert member in self.links

    def _leave_links(self, vb_id: int) -> None:
        for member, link in self.links.items():
            self._leave(member, link, vb_id)

    def _last_confirmed_ns(self, vb_id: int) -> int:
        """Return when this process may last have confirmed another master of a partition."""
        confirmed_ns = max(self._confirmed_ns.get(vb_id, 0), self._started_ns)
        for link in self.links.values():
            if link.follows(vb_id):
                confirmed_ns = max(confirmed_ns, link.confirmed_ns)
        return confirmed_ns

    def position(self, vb_id: int, epoch: int) -> tuple[StreamRequest, ReplicaPosition]:
        """See ReplicaSide."""
        part = self._engine.partitions[vb_id]
        asked = from_here(part.high_seqno, part.vb_uuid)
        return asked, ReplicaPosition(epoch, versions_of(part.failover))

    def welcomed(self, vb_id: int, welcome: Welcome) -> None:
        """See ReplicaSide."""
        try:
            log = welcome.failover_log()
            adopt_failover_log(self._engine, vb_id, log, welcome.epoch)
            adopt_floors(
                self._engine, vb_id, welcome.history_floor, welcome.purge_seqno,
                welcome.committed_seqno,
            )  # fmt: skip
        except (StaleEpochError, FloorsRefusedError, ValueError) as error:
            raise ReplicationError(str(error)) from error
        self._told_hw(vb_id, welcome.committed_seqno)

    def roll_back(self, vb_id: int, epoch: int, seqno: int) -> None:
        """See ReplicaSide."""
        part = self._engine.partitions[vb_id]
        assert epoch >= part.leader_epoch, "an epoch is never followed lower"
        self._changes.settle()
        seqno = min(seqno, part.high_seqno)
        try:
            adopt_failover_log(
                self._engine, vb_id, part.failover.cut(seqno), part.leader_epoch,
                rollback_to=seqno,
            )  # fmt: skip
        except BranchRefusedError:
            adopt_failover_log(
                self._engine, vb_id, part.failover.cut(0), part.leader_epoch, rollback_to=0
            )

    def high_seqno(self, vb_id: int) -> int:
        """See ReplicaSide."""
        return self._engine.partitions[vb_id].high_seqno

    def unsynced_group(self, vb_id: int) -> int:
        """See ReplicaSide."""
        group = self._engine.partitions[vb_id].last_group
        return group if group > self._commits.synced_group else 0

    def apply(self, section: EntriesSection) -> None:
        """See ReplicaSide."""
        part = self._engine.partitions[section.vb_id]
        changes = []
        for entry in section.entries:
            if entry[OPCODE_AT] != LOG_CONTROL:
                changes.append(entry)
                continue
            self._changes.apply(part, changes)
            changes = []
            document = control_document(entry)
            adopt_floors(
                self._engine, part.vb_id, int(str(document["seqno"])), int(str(document["purge"])),
                section.committed_seqno,
            )  # fmt: skip
        self._changes.apply(part, changes)
        self._told_hw(section.vb_id, section.committed_seqno)

    def _told_hw(self, vb_id: int, seqno: int) -> None:
        if seqno > self._hw.get(vb_id, 0):
            self._hw[vb_id] = seqno
        self._raise_watermarks((vb_id,))

    # -- high watermarks ---------------------------------------------------------------------------

    def group_synced(self, now_ns: int, published: Published) -> None:
        """A commit group of this node is on disk."""
        group = published.group
        assert group is not None
        self._now_ns = now_ns
        self._changes.settle()
        for mastership in self._masters.values():
            if not mastership.is_ready and mastership.ready_group <= self._commits.synced_group:
                mastership.is_ready = True
        changes = self._changes_for_replicas(group.changes)
        if changes:
            for feed in self._feeds.values():
                feed.group_synced(changes)
        self._raise_watermarks(group.high_seqnos)
        for link in self.links.values():
            link.synced(self._commits.synced_group)

    def _changes_for_replicas(self, entries: Sequence[bytes]) -> dict[int, list[bytes]]:
        changes: dict[int, list[bytes]] = {}
        if not self._feeds:
            return changes
        for entry in entries:
            vb_id = vb_id_of(entry)
            if vb_id in self._masters and _is_for_replicas(entry):
                changes.setdefault(vb_id, []).append(entry)
        return changes

    def _raise_watermarks(self, vb_ids: Iterable[int]) -> None:
        """Commit what may be committed now in these partitions."""
        rose: list[int] = []
        for vb_id in vb_ids:
            part = self._engine.partitions[vb_id]
            mastership = self._masters.get(vb_id)
            if mastership is None:
                seqno = min(self._hw.get(vb_id, 0), part.synced_seqno)
            else:
                seqno = mastership.hw_seqno()
                if mastership.record.handover is not None and mastership.is_ready:
                    seqno = max(seqno, min(self._hw.get(vb_id, 0), part.synced_seqno))
            if self._commits.commit(vb_id, max(seqno, part.committed_seqno)):
                rose.append(vb_id)
        if rose:
            self._effects.append(self._groups.committed(rose))
            for feed in self._feeds.values():
                feed.hw_rose(rose)

    # -- the master's side of links ----------------------------------------------------------------

    def open_feed(self, greeting: bytes, schedule: Callable[[], None]) -> ReplicaFeed:
        """See ReplicationPort."""
        told: Greeting = decode(greeting, Greeting)
        if told.format != FORMAT:
            raise ReplicationError(
                f"member {told.member} has format {told.format} of the replication messages; "
                f"this node has {FORMAT}. Upgrade the older of the two"
            )
        if told.cluster != self._cluster:
            raise ReplicationError(
                f"member {told.member} belongs to cluster {told.cluster!r}, this node to "
                f"{self._cluster!r}"
            )
        if told.member not in self._session.view.members:
            raise ReplicationError(f"{told.member} is no member of this cluster")
        older = self._feeds.get(told.member)
        if older is not None:
            older.is_superseded = True
            older.close()
        feed = ReplicaFeed(self._engine, told.member, self, schedule, now_ns=self._now_ns)
        self._feeds[told.member] = feed
        return feed

    def feed_closed(self, feed: ReplicaFeed) -> None:
        """See MasterSide."""
        if self._feeds.get(feed.member) is feed:
            del self._feeds[feed.member]

    def admit(
        self,
        feed: ReplicaFeed,
        vb_id: int,
        asked: StreamRequest,
        told: ReplicaPosition,
        opaque: int,
    ) -> FeedAnswer:
        """See MasterSide."""
        part = self._engine.partitions[vb_id]
        stored = self._records.get(vb_id)
        own_epoch = stored.content.record.epoch if stored is not None else 0
        why = refusal(own_epoch, told.epoch)
        mastership = self._masters.get(vb_id)
        if why is None and (mastership is None or mastership.epoch != told.epoch):
            why = f"vb {vb_id}: this node is not the master in epoch {told.epoch}"
        if why is not None:
            return FeedAnswer(Status.X_FENCED, why.encode())
        assert mastership is not None
        if not mastership.is_ready:
            return FeedAnswer(Status.ETMPFAIL, b"the version of this epoch is not on disk yet")
        try:
            versions = tuple(told.failover_log().pairs())
        except ValueError as error:
            raise ReplicationError(f"vb {vb_id}: {error}") from error
        question = Question(
            asked.start_seqno, asked.vb_uuid, asked.snap_start_seqno, asked.snap_end_seqno, versions
        )
        decision = decide(question, part.failover, part.high_seqno, part.purge_seqno)
        if decision.rollback_seqno is not None:
            return FeedAnswer(Status.ROLLBACK, U64.pack(decision.rollback_seqno))
        if asked.start_seqno > part.synced_seqno:
            return FeedAnswer(Status.ETMPFAIL, b"the master has not synced so much yet")
        feed.open(vb_id, mastership.epoch, opaque, asked.start_seqno)
        return FeedAnswer(
            Status.OK,
            encode(
                Welcome(
                    mastership.epoch, versions_of(part.failover), part.history_floor,
                    part.purge_seqno, part.committed_seqno,
                )
            ),
        )  # fmt: skip

    def acknowledged(self, member: str, followed: Sequence[Followed]) -> None:
        """See MasterSide."""
        touched = []
        for each in followed:
            mastership = self._masters.get(each.vb_id)
            if mastership is not None and mastership.epoch == each.epoch:
                mastership.acknowledged(member, each.epoch, each.seqno)
                touched.append(each.vb_id)
        self._raise_watermarks(touched)

    # -- time --------------------------------------------------------------------------------------

    def check_fence(self, now_ns: int) -> None:
        """Fence the partitions that are not confirmed any more. Call it before every batch."""
        self._now_ns = max(self._now_ns, now_ns)
        if self._fence_ns is not None and now_ns >= self._fence_ns:
            self._serve()

    def tick(self, now_ns: int) -> None:
        """Let time pass: links, services, in-sync sets, handovers, reports."""
        self._now_ns = now_ns
        for member, link in tuple(self.links.items()):
            link.tick(now_ns)
            self._heard_ns[member] = max(self._heard_ns.get(member, 0), link.heard_ns)
        for vb_id, stored in self._records.items():
            if vb_id not in self._masters:
                self._follow(vb_id, stored.content.record)
        self._raise_watermarks(tuple(self._masters))
        self._serve()
        self._change_records()
        self._report()

    def _serve(self) -> None:
        """Let each partition of this master serve what it may, and find the next fence."""
        now_ns = self._now_ns
        fence_ns: int | None = None
        for vb_id, mastership in self._masters.items():
            until_ns = mastership.confirmed_until_ns(
                lambda member, vb_id=vb_id: self._confirmed_by(member, vb_id)  # type: ignore[misc]
            )
            service = mastership.service(now_ns, until_ns)
            self._set_service(mastership, service)
            if service in {Service.SERVING, Service.HANDING} and until_ns is not None:
                fence_ns = until_ns if fence_ns is None else min(fence_ns, until_ns)
        self._fence_ns = fence_ns

    def _confirmed_by(self, member: str, vb_id: int) -> int | None:
        feed = self._feeds.get(member)
        return None if feed is None else feed.confirmed_ns(vb_id)

    def _set_service(self, mastership: Mastership, service: Service | None) -> None:
        part = mastership.part
        was_active = part.state == VbState.ACTIVE
        may_serve = service in {Service.SERVING, Service.HANDING}
        part.may_send_back = may_send_back(
            is_master=service is not Service.PREPARING,
            hw_seqno=part.committed_seqno,
            epoch_start_seqno=mastership.epoch_start_seqno,
        )
        if may_serve != was_active:
            part.state = VbState.ACTIVE if may_serve else VbState.FENCED
            if was_active:
                self._hub.fenced(part.vb_id)
            else:
                self._keyspace.tell_missing_events(part)
        why = mastership.why_writes_wait if may_serve else ""
        if why:
            part.hold_writes(Hold.REPLICATION, why)
        else:
            part.release_writes(Hold.REPLICATION)

    # -- changes of records ------------------------------------------------------------------------

    def _change_records(self) -> None:
        """Write the changes of the records of this node's partitions that are due."""
        alive = self._session.view.alive
        changes: list[RecordChange] = []
        may_write = self._session.may_write
        for vb_id, mastership in self._masters.items():
            record = mastership.changed_isr(self._now_ns, alive)
            if record is None:
                record = self._next_record(mastership)
            if record is None or not may_write or mastership.is_writing:
                continue
            mastership.is_writing = True
            mastership.asked = record.isr
            changes.append(RecordChange(vb_id, record, self._records[vb_id]))
        if changes:
            self._carry_out(self._session.write(self._now_ns, changes))

    def _next_record(self, mastership: Mastership) -> ReplicationRecord | None:
        """Return the record after a handover or a finished branch, if one is due."""
        record, part = mastership.record, mastership.part
        if mastership.is_writing or not mastership.is_ready:
            return None
        if record.branch is not None:
            done = is_branch_done(record, mastership.acknowledged_epochs())
            return finish_branch(record) if done else None
        wanted = record.wanted_master
        if wanted is None or wanted not in record.isr or part.state != VbState.ACTIVE:
            if not mastership.is_writing:
                mastership.handing_since_ns = 0
            return None
        if not mastership.handing_since_ns:
            mastership.handing_since_ns = self._now_ns
            part.hold_writes(Hold.REPLICATION, mastership.why_writes_wait)
        elif self._now_ns - mastership.handing_since_ns > HANDING_NS_MAX:
            mastership.handing_since_ns = 0
            return None
        if part.committed_seqno < part.high_seqno or part.synced_seqno < part.high_seqno:
            return None
        mastership.has_handed = True
        part.state = VbState.FENCED
        self._hub.fenced(part.vb_id)
        return hand_over(record, HandedOver(part.vb_uuid, part.high_seqno))

    def outcome(self, now_ns: int, outcome: WriteOutcome) -> None:
        """A change that this node wrote was decided."""
        self._now_ns = now_ns
        vb_id = outcome.change.vb_id
        mastership = self._masters.get(vb_id)
        if mastership is None:
            return
        mastership.is_writing = mastership.has_handed = False
        mastership.handing_since_ns = 0
        if outcome.kind is not OutcomeKind.WRITTEN:
            mastership.asked = None
        stored = self._session.view.partitions.get(vb_id)
        if stored is not None:
            self._take_record(vb_id, stored)

    def _report(self) -> None:
        """Report the partitions whose master is not heard."""
        reported: list[ReportedPartition] = []
        for vb_id, stored in sorted(self._records.items()):
            record = stored.content.record
            if self._member not in record.copies or vb_id in self._masters:
                continue
            if record.master is not None and record.master != self._member:
                heard_ns = self._heard_ns.get(record.master, self._started_ns)
                if self._now_ns - heard_ns < UNHEARD_NS:
                    continue
            part = self._engine.partitions[vb_id]
            reported.append(
                ReportedPartition(
                    vb_id, record.epoch, part.vb_uuid, part.failover.current.epoch,
                    part.synced_seqno, member_is_electable(part),
                )
            )  # fmt: skip
        if tuple(reported) != self._reported:
            self._reported = tuple(reported)
            self._carry_out(self._session.report(self._now_ns, self._reported))


def member_is_electable(part: Partition) -> bool:
    """Whether this member may become a partition's master."""
    return part.high_seqno >= part.history_floor


def _is_for_replicas(entry: bytes) -> bool:
    """Whether an entry goes to replicas: changes, and floors. Versions come with the welcome."""
    if entry[OPCODE_AT] != LOG_CONTROL:
        return True
    return control_document(entry)["kind"] == "floor"
