"""What a node does as a master: its masterships, the feeds of replicas, changes of records.
Sans-IO.

Who calls it: `dcp.replication.node_core`; sessions open feeds here (`ReplicationPort`), and feeds
ask and tell (`MasterSide`).

Invariants
- a replica is admitted only in the epoch that both sides are on, and after the version of that
  epoch is on disk here;
- clients are served only while the in-sync set confirms this master. Who is not served any more has
  its streams ended, so that a consumer that reaches only a deposed master notices;
- from the moment when a branch is asked for, the history floor does not rise above its seqno;
- a record is changed by one write at a time, and from the moment of a handover's write nobody is
  served until its outcome is known;
- at rest nothing is done for each partition. As long as `_settled` holds, all partitions are
  served, and a look at each in-sync set and each feed says the same as one at each mastership.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from dcp.cluster.cluster_records import StoredPartition
from dcp.cluster.cluster_view import ClusterView, Stored
from dcp.cluster.effects import Notice
from dcp.cluster.record_writer import COMPARES_MAX, RecordChange
from dcp.replication.asked_branches import AskedBranches
from dcp.replication.fed_stream import Followed, window_of
from dcp.replication.fill_pace import FillPace
from dcp.replication.mastership import Mastership, ReplicationSettings, Service
from dcp.replication.messages import (
    FORMAT,
    Greeting,
    ReplicaPosition,
    Welcome,
    decode,
    encode,
    versions_of,
)
from dcp.replication.replica_feed import ReplicaFeed
from dcp.replication.shell_effects import BranchEnded, ReplicationEffect
from dcp.replication.successors import Successors
from dcp.replication.whole_groups import WholeGroup, WholeGroups
from dcp.session.replication_port import FeedAnswer, ReplicationError
from dcp.stream.hub import StreamHub
from dcp.wire.message import U64, StreamRequest
from dcp.wire.status import Status
from failover.fencing import is_same_copy, refusal
from failover.isr import confirmed_until_ns, may_answer_reads, serves_from_ns
from failover.promotion import first_step, is_branch_done, may_send_back
from failover.replication_record import (
    HandedOver,
    ReplicationRecord,
    finish_branch,
    hand_over,
    start_branch,
)
from failover.rollback import Question, decide
from vbucket.engine.branch import BranchRefusedError, check_undo
from vbucket.engine.engine import Engine
from vbucket.engine.leadership import begin_version, set_leader_epoch
from vbucket.engine.partition import Hold, Partition, VbState
from vbucket.log.commit_group import CommitGroup
from vbucket.model.entry import LOG_CONTROL, OPCODE_AT, control_document, vb_id_of
from vbucket.store.environment import StoreDamagedError

HANDING_NS_MAX: Final = 2_000_000_000
"""A handover that has not happened after so long is given up, and tried again later."""
_SERVED: Final = frozenset({Service.SERVING, Service.HANDING})


class Leading:
    """See the module. `depose` answers what waits in connections as ambiguous."""

    def __init__(
        self,
        engine: Engine,
        hub: StreamHub,
        view: ClusterView,
        settings: ReplicationSettings,
        *,
        cluster: str,
        member: str,
        raise_watermarks: Callable[[Iterable[int]], None],
        commit_many: Callable[[Mapping[int, int]], None],
        depose: Callable[[tuple[int, ...], str], None],
        effects: list[ReplicationEffect],
        now_ns: int,
    ) -> None:
        self._engine = engine
        self._hub = hub
        self._view = view
        self._settings = settings
        self._cluster = cluster
        self._member = member
        self._raise_watermarks = raise_watermarks
        self._commit_many = commit_many
        self._depose = depose
        self._effects = effects
        self._now_ns = now_ns
        self.masterships: dict[int, Mastership] = {}
        self._preparing: set[int] = set()
        """Partitions whose mastership may not be ready yet."""
        self._wholes = WholeGroups(member, self.masterships, engine.num_vbuckets)
        self.feeds: dict[str, ReplicaFeed] = {}
        """By member."""
        self.branches = AskedBranches(engine, self.masterships, member)
        self._settled: tuple[object, ...] | None = None
        """What was so when all partitions were served and nothing was under way; None: not so."""
        self._level_ns: dict[str, int] = {}
        """When members had all that was synced here, in all partitions that they follow."""
        self._rested_ns: dict[str, int] = {}
        """The same when nothing was done for each partition: then members in sync follow all."""
        self._ticked_ns = now_ns
        self._is_leaving = False
        self._successors = Successors(view, member)
        self._pace = FillPace(settings.fill_bytes_per_s)
        self.fence_ns: int | None = None
        """When the first partition is not confirmed any more; None: none is served so."""

    # -- epochs ------------------------------------------------------------------------------------

    def begin(
        self, vb_id: int, record: ReplicationRecord, *,
        confirmed_ns: int, told_seqno: int, now_ns: int,
    ) -> None:  # fmt: skip
        """Become master in the record's epoch.

        `confirmed_ns` is when this process may last have confirmed another master, `told_seqno` the
        high watermark that the former master told.
        """
        self._now_ns = now_ns
        part = self._engine.partitions[vb_id]
        assert part.leader_epoch <= record.epoch, "an epoch is never followed lower"
        self._give_up_snapshot(part)
        was_master = vb_id in self.masterships
        if was_master:
            self.step_down(vb_id, f"epoch {record.epoch} has begun")
        first = first_step(record, part.failover, part.high_seqno)
        branch_only = was_master and record.branch is not None
        if first.branch_seqno is not None:
            branch_only &= self._carry_out_branch(part, record, first.branch_seqno)
        if first.version_seqno is None or branch_only:
            set_leader_epoch(self._engine, vb_id, record.epoch)
        else:
            begin_version(self._engine, vb_id, record.epoch)
        part.state = VbState.FENCED
        part.is_unheard = False
        mastership = Mastership(
            part, record, self._member, self._settings, now_ns=now_ns,
            ready_group=part.last_group,
            serves_from_ns=serves_from_ns(
                confirmed_ns, was_handed_over=record.handover is not None or was_master
            ),
            known_seqno=max(told_seqno, first.committed_seqno),
            changed=self._wholes.mastership_changed,
        )  # fmt: skip
        part.guard = mastership
        self._preparing.add(vb_id)
        self.masterships[vb_id] = mastership

    def _carry_out_branch(self, part: Partition, record: ReplicationRecord, seqno: int) -> bool:
        """Begin the version of the branch that a record names; return whether that was possible.

        If it is not, because data is damaged or after an unclean election, nothing is undone, and
        this master begins a version at its end. Nobody has seen the branch yet: it is served when
        all members in sync have rolled back, and this one has not.
        """
        assert record.branch is not None
        log = part.failover.branch(record.branch.vb_uuid, seqno, record.epoch)
        try:
            check_undo(part, seqno)
            self._engine.keyspace.replace_history(part, log, record.epoch, rollback_to=seqno)
        except (BranchRefusedError, StoreDamagedError) as error:
            self._effects.append(
                Notice(
                    f"vb {part.vb_id}: its record asks for a branch at seqno {seqno} (version "
                    f"{record.branch.vb_uuid}), which this master cannot carry out: {error}. "
                    "Nothing is undone; ask for another branch"
                )
            )
            return False
        return True

    def _give_up_snapshot(self, part: Partition) -> None:
        """Cut off a part of a snapshot: only an unclean election makes such a replica master."""
        window = part.incomplete_snapshot
        if window is not None:
            seqno = window.start if window.start >= part.history_floor else 0
            log = part.failover.cut(seqno)
            self._engine.keyspace.replace_history(part, log, part.leader_epoch, rollback_to=seqno)

    def take_record(self, vb_id: int, record: ReplicationRecord) -> None:
        """Take a newer record of the same epoch."""
        for member in self.masterships[vb_id].take_record(record):
            feed = self.feeds.get(member)
            if feed is not None:  # its stream may still bring what it had of another copy
                feed.end(vb_id)

    def step_down(self, vb_id: int, why: str) -> None:
        """Stop being a partition's master."""
        self._depose((vb_id,), why)
        self.masterships.pop(vb_id).want_branch(None)
        self._wholes.mastership_changed()
        part = self._engine.partitions[vb_id]
        part.state = VbState.REPLICA
        part.may_send_back = False
        part.guard = None
        part.release_writes(Hold.REPLICATION)
        self._hub.fenced(vb_id)
        for feed in self.feeds.values():
            feed.end(vb_id)

    def group_synced(self, group: CommitGroup) -> Iterable[int]:
        """A group is on disk: replicas get its changes, wholly where all of it is in step.

        Commit what of a whole group waits for nobody else. Return the partitions of this master
        where something else may be committed now.
        """
        self._note_ready()
        whole = self._wholes.begin(group) if self.feeds else None
        sectioned = [
            feed for feed in self.feeds.values() if whole is None or not feed.send_whole(whole)
        ]
        if sectioned and (changes := self._changes_for_replicas(group.changes)):
            for feed in sectioned:
                feed.group_synced(changes)
        if whole is None:
            return group.high_seqnos.keys() & self.masterships.keys()
        self.groups_acknowledged(self._member, (whole,))
        return ()

    def _note_ready(self) -> None:
        """Note which masterships are ready, because the beginning of their epoch is on disk."""
        synced_group = self._engine.commits.synced_group
        for vb_id in tuple(self._preparing):
            mastership = self.masterships.get(vb_id)
            if mastership is None or mastership.ready_group <= synced_group:
                self._preparing.discard(vb_id)
                if mastership is not None:
                    mastership.become_ready()

    def _changes_for_replicas(self, entries: Sequence[bytes]) -> dict[int, list[bytes]]:
        """Return partition -> what its replicas get of a group: changes, and floors. Versions come
        with the welcome.
        """
        changes: dict[int, list[bytes]] = {}
        for entry in entries:
            vb_id = vb_id_of(entry)
            is_control = entry[OPCODE_AT] == LOG_CONTROL
            if vb_id in self.masterships and not (
                is_control and control_document(entry)["kind"] != "floor"
            ):
                changes.setdefault(vb_id, []).append(entry)
        return changes

    # -- ReplicationPort and MasterSide ------------------------------------------------------------

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
        if told.master != self._member:
            raise ReplicationError(
                f"member {told.member} wants to reach member {told.master}; here is {self._member}"
            )
        if told.member not in self._view.members:
            raise ReplicationError(f"{told.member} is no member of this cluster")
        alive = self._view.alive.get(told.member)
        if alive is not None and told.incarnation < alive.content.incarnation:
            raise ReplicationError(
                f"member {told.member} runs as incarnation {alive.content.incarnation}; this is "
                f"{told.incarnation}, an older process with the same data folder or a copy of it"
            )
        older = self.feeds.get(told.member)
        if older is not None:
            older.is_superseded = True
            older.close()
        feed = ReplicaFeed(
            self._engine, told.member, self, schedule, now_ns=self._now_ns,
            window_bytes=self._settings.window_bytes, section_bytes=self._settings.section_bytes,
            pace=self._pace,
        )  # fmt: skip
        feed.beat_ns = self._settings.beat_ns
        self.feeds[told.member] = feed
        return feed

    def feed_closed(self, feed: ReplicaFeed) -> None:
        """See MasterSide."""
        if self.feeds.get(feed.member) is feed:
            del self.feeds[feed.member]

    def admit(
        self,
        feed: ReplicaFeed,
        vb_id: int,
        asked: StreamRequest,
        told: ReplicaPosition,
        opaque: int,
    ) -> FeedAnswer:
        """See MasterSide."""
        part, mastership = self._engine.partitions[vb_id], self.masterships.get(vb_id)
        stored = self._view.partitions.get(vb_id)
        own_epoch = max(part.leader_epoch, 0 if stored is None else stored.content.record.epoch)
        why = refusal(own_epoch, told.epoch)
        if why is None and (mastership is None or mastership.epoch != told.epoch):
            why = f"vb {vb_id}: this node is not the master in epoch {told.epoch}"
        if why is not None:
            return FeedAnswer(Status.X_FENCED, why.encode())
        assert mastership is not None
        number = mastership.record.number_of(feed.member)
        if not is_same_copy(number, told.copy_number):
            why = (
                f"vb {vb_id}: member {feed.member} asks for copy {told.copy_number}, the record of"
            )
            return FeedAnswer(Status.X_FENCED, f"{why} this master has {number}".encode())
        if not mastership.is_ready:
            return FeedAnswer(Status.ETMPFAIL, b"the version of this epoch is not on disk yet")
        try:
            versions = tuple(told.failover_log().pairs())
        except ValueError as error:
            raise ReplicationError(f"vb {vb_id}: {error}") from error
        window = window_of(vb_id, asked, told)
        question = Question(
            asked.start_seqno, asked.vb_uuid, asked.snap_start_seqno, asked.snap_end_seqno,
            versions, client_purge_seqno=told.snapshot_purge,
        )  # fmt: skip
        decision = decide(question, part.failover, part.high_seqno, part.purge_seqno)
        if decision.rollback_seqno is not None:
            return FeedAnswer(Status.ROLLBACK, U64.pack(decision.rollback_seqno))
        if asked.snap_end_seqno > part.synced_seqno:
            return FeedAnswer(Status.ETMPFAIL, b"the master has not synced so much yet")
        whole_seqno = asked.start_seqno
        if window is not None:
            whole_seqno = window.start
            window = window._replace(purge=part.purge_seqno)
        mastership.begins_at(feed.member, whole_seqno, told.history_floor)
        feed.open(
            vb_id, mastership.epoch, opaque, asked.start_seqno, window,
            is_filling=feed.member in mastership.record.filling,
        )  # fmt: skip
        welcome = Welcome(
            mastership.epoch, versions_of(part.failover), part.history_floor, part.purge_seqno,
            max(part.committed_seqno, part.history_floor),  # a floor is committed
        )  # fmt: skip
        return FeedAnswer(Status.OK, encode(welcome))

    def acknowledged(self, member: str, followed: Sequence[Followed]) -> None:
        """See MasterSide."""
        touched = []
        for each in followed:
            mastership = self.masterships.get(each.vb_id)
            if mastership is not None and mastership.epoch == each.epoch:
                mastership.acknowledged(member, each.epoch, each.seqno)
                touched.append(each.vb_id)
        self._raise_watermarks(touched)

    def groups_acknowledged(self, member: str, groups: Sequence[WholeGroup]) -> None:
        """See MasterSide."""
        found = self._wholes.acknowledged(member, groups)
        if found.committed:
            self._commit_many(found.committed)
            for feed in self.feeds.values():
                for whole in found.groups:
                    feed.group_committed(whole, found.committed)
        if found.one_by_one:
            self._raise_watermarks(found.one_by_one)

    def note_acknowledged(self, mastership: Mastership) -> None:
        """Tell a mastership what replicas have acknowledged in whole groups."""
        for feed in self.feeds.values():
            if given := feed.group_acknowledgement(mastership.part.vb_id):
                mastership.acknowledged(feed.member, *given)

    # -- what is served ----------------------------------------------------------------------------

    def serve(self, now_ns: int) -> None:
        """Let each partition serve what it may, and find the next fence."""
        self._now_ns = now_ns
        if self.is_settled and self._serve_on(now_ns):
            return
        alive, are_settled = self._view.alive, True
        fence_ns: int | None = None
        for mastership in self.masterships.values():
            until_ns = mastership.confirmed_until_ns(self._confirmations(mastership))
            service = mastership.service(now_ns, until_ns)
            self._set_service(mastership, service)
            if service in _SERVED and until_ns is not None:
                fence_ns = until_ns if fence_ns is None else min(fence_ns, until_ns)
            are_settled &= service is Service.SERVING and mastership.is_settled(alive)
        self.fence_ns = fence_ns
        self._settled = self._state() if are_settled and not self._is_leaving else None

    def _state(self) -> tuple[object, ...]:
        feeds = tuple((feed, feed.streams_revision) for feed in self.feeds.values())
        return self._wholes.revision, feeds, frozenset(self._view.alive)

    @property
    def is_settled(self) -> bool:
        """Whether all partitions were served when they were looked at last, and nothing has changed
        that this depends on, but time and confirmations.
        """
        return self._settled is not None and self._settled == self._state()

    def _serve_on(self, now_ns: int) -> bool:
        """Find the next fence of partitions that are all served; False: some must not be."""
        asked: dict[str, int] = {}
        for member, feed in self.feeds.items():
            asked_ns = feed.all_confirmed_ns()
            if asked_ns is not None:
                asked[member] = asked_ns
        fences: list[int] = []
        for in_sync in self._wholes.in_sync_sets():
            until_ns = confirmed_until_ns(self._member, in_sync.members, asked)
            if not may_answer_reads(now_ns, until_ns):
                return False
            if until_ns is not None:
                fences.append(until_ns)
        self.fence_ns = min(fences, default=None)
        return True

    def _are_level(self) -> bool:
        """Whether no member of an in-sync set may have to leave it."""
        for member, feed in self.feeds.items():
            if feed.is_level():
                self._level_ns[member] = max(self._level_ns.get(member, 0), feed.asked_ns)
        since_ns = self._now_ns - self._settings.replica_lag_max_ns
        level = {member for member, at_ns in self._level_ns.items() if at_ns >= since_ns}
        level.add(self._member)
        return all(in_sync.members <= level for in_sync in self._wholes.in_sync_sets())

    def _confirmations(self, mastership: Mastership) -> dict[str, int]:
        """Return member -> when it was asked the question that it confirmed last, of all copies."""
        vb_id = mastership.part.vb_id
        asked: dict[str, int] = {}
        for member in mastership.record.copies:
            feed = self.feeds.get(member)
            asked_ns = None if feed is None else feed.confirmed_ns(vb_id)
            if asked_ns is not None:
                asked[member] = asked_ns
        return asked

    def _set_service(self, mastership: Mastership, service: Service | None) -> None:
        part = mastership.part
        was_active, may_serve = part.state == VbState.ACTIVE, service in _SERVED
        part.may_send_back = may_send_back(
            is_master=service is not Service.PREPARING, hw_seqno=part.committed_seqno,
            epoch_start_seqno=mastership.epoch_start_seqno,
        )  # fmt: skip
        if may_serve and not was_active:
            part.state = VbState.ACTIVE
            self._engine.keyspace.tell_missing_events(part)
        elif was_active and not may_serve:
            self._fence(part)
        why = mastership.why_writes_wait if may_serve else ""
        if why:
            part.hold_writes(Hold.REPLICATION, why)
        else:
            part.release_writes(Hold.REPLICATION)

    def _fence(self, part: Partition) -> None:
        part.state = VbState.FENCED
        self._hub.fenced(part.vb_id)

    # -- changes of records ------------------------------------------------------------------------

    def record_changes(
        self, records: Mapping[int, Stored[StoredPartition]], *, may_write: bool
    ) -> list[RecordChange]:
        """Return the changes of this master's records that are due, as many as one transaction
        takes. They must be written. Records that are not in `records` are left alone.
        """
        ticked_ns, self._ticked_ns = self._ticked_ns, self._now_ns
        if self._are_level() and self.is_settled:
            self._rested_ns = dict(self._level_ns)
            return []
        alive = self._view.alive
        heard_ns = {member: feed.asked_ns for member, feed in self.feeds.items()}
        changes: list[RecordChange] = []
        for vb_id, mastership in self.masterships.items():
            if len(mastership.record.isr) < len(mastership.record.copies):
                mastership.in_snapshot = frozenset(
                    member for member, feed in self.feeds.items() if feed.is_in_snapshot(vb_id)
                )
            self.note_acknowledged(mastership)
            mastership.rested(ticked_ns, self._rested_ns)
            record = mastership.changed_isr(self._now_ns, alive, heard_ns)
            if mastership.is_writing or not mastership.is_ready or not may_write:
                continue
            if len(changes) == COMPARES_MAX:
                continue  # the rest comes with the next tick
            if vb_id not in records:
                continue  # what the store has is not followed, so it is not written either
            if record is None:
                record = self._next_record(mastership)
            if record is not None:
                mastership.is_writing = True
                mastership.ask(record.isr)
                changes.append(RecordChange(vb_id, record, records[vb_id]))
        return changes

    def _next_record(self, mastership: Mastership) -> ReplicationRecord | None:
        """Return the record after a branch or a handover that is due; None: nothing is."""
        record, part = mastership.record, mastership.part
        if record.branch is not None:
            done = is_branch_done(record, mastership.acknowledged_epochs())
            return finish_branch(record) if done else None
        wanted_branch = mastership.branch_wanted
        if wanted_branch is not None and part.state == VbState.ACTIVE:
            try:
                mastership.check_branch(wanted_branch.seqno)
            except BranchRefusedError as error:  # somebody else has joined since, for example
                mastership.want_branch(None)
                self.branches.give_up(part.vb_id)
                self._effects.append(BranchEnded(part.vb_id, wanted_branch.vb_uuid, str(error)))
                return None
            return start_branch(record, wanted_branch)
        if self._is_leaving:
            record = self._successors.wanted(record)
        wanted = record.wanted_master
        if wanted is None or wanted not in record.isr or part.state != VbState.ACTIVE:
            mastership.handing_since_ns = 0
            return None
        if not mastership.handing_since_ns:
            mastership.handing_since_ns = self._now_ns
            part.hold_writes(Hold.REPLICATION, mastership.why_writes_wait)
        elif self._now_ns - mastership.handing_since_ns > HANDING_NS_MAX:
            mastership.handing_since_ns = 0
            return None
        if part.committed_seqno < part.high_seqno:
            return None
        mastership.has_handed = True
        self._fence(part)
        return hand_over(record, HandedOver(part.vb_uuid, part.high_seqno))

    def take_min_in_sync(self, setting: int | None) -> bool:
        """Take how many members must be in sync from now on; return whether that is another number
        than before.
        """
        if setting == self._settings.min_in_sync:
            return False
        self._settings = self._settings._replace(min_in_sync=setting)
        for mastership in self.masterships.values():
            mastership.take_min_in_sync(setting)
        return True

    def leave(self) -> None:
        """Hand over all partitions: this node is about to stop."""
        self._is_leaving = True
        self._settled = None

    def want_branch(self, vb_id: int, seqno: int, vb_uuid: int) -> str:
        """See `AskedBranches.want`."""
        self._settled = None
        return self.branches.want(vb_id, seqno, vb_uuid)
