"""What a node does as a master: its masterships, the feeds of replicas, changes of records.
Sans-IO.

Who calls it: `failover.replication.node`; sessions open feeds here (`ReplicationPort`), and
feeds ask and tell (`MasterSide`).

Invariants
- a replica is admitted only in the epoch that both sides are on, and after the version of that
  epoch is on disk here;
- from the moment when a branch is asked for, the history floor does not rise above its seqno;
- a record is changed by one write at a time, and from the moment of a handover's write nobody is
  served until its outcome is known;
- at rest nothing is done for each partition (`failover.replication.serving`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from dcp.core.groups import GroupCycle
from dcp.session.replication_port import FeedAnswer, ReplicationError
from dcp.stream.remote_readers import Held
from dcp.wire.message import StreamRequest
from dcp.wire.status import Status
from failover.coordinator.effects import Notice
from failover.coordinator.record_writer import COMPARES_MAX, RecordChange
from failover.coordinator.records import StoredPartition
from failover.coordinator.view import Stored
from failover.replication.commit import HighWatermarks, OpenGroups
from failover.replication.cuts.cut_member import CutMember
from failover.replication.effects import BranchEnded, Steps, Undone
from failover.replication.feed import ReplicaFeed
from failover.replication.group import Group
from failover.replication.handover import Handovers, Successors
from failover.replication.mastership import Mastership, ReplicationParts
from failover.replication.messages import (
    RESYNC_FORMAT,
    Greeting,
    ReplicaPosition,
    StoreSeen,
    Welcome,
    common_format,
    decode,
    encode,
    pack_rollback,
    versions_of,
)
from failover.replication.pace import FillPace
from failover.replication.progress import Match
from failover.replication.serving import Departures, Followers, Serving
from failover.rules.cut import Ask
from failover.rules.fencing import is_same_copy, refusal
from failover.rules.isr import Sender, serves_from_ns
from failover.rules.promotion import first_step, is_branch_done
from failover.rules.replication_record import (
    BranchUnderWay,
    ReplicationRecord,
    finish_branch,
    start_branch,
)
from failover.rules.rollback import Question, RollbackKind, common_seqno, decide
from vbucket.engine.leadership import begin_version, set_leader_epoch
from vbucket.engine.partition import BranchRefusedError, Hold, Partition, VbState, check_undo
from vbucket.engine.resync import Deletions
from vbucket.log.commit_group import CommitGroup
from vbucket.model.control import SnapshotWindow
from vbucket.store.environment import StoreDamagedError


class FollowerLag(NamedTuple):
    """How far one member's copies are behind the partitions whose master this node is."""

    member: str
    copies: int
    behind_partitions: int
    behind_changes: int
    """Changes that are on disk here and not known to be on disk there."""
    heard_ns: int | None
    """How long ago it was asked what it confirmed last; None: it has no link here."""


class _AskedBranch:
    """A branch that was asked for here."""

    __slots__ = ("branch", "is_recorded", "undone")

    def __init__(self, branch: BranchUnderWay) -> None:
        self.branch = branch
        self.is_recorded = False
        """Whether a record was seen that names it."""
        self.undone = Undone(0, 0)


class Master:
    """See the module."""

    def __init__(self, parts: ReplicationParts, cycle: GroupCycle, now_ns: int) -> None:
        engine, member = parts.engine, parts.identity.member
        self._engine = engine
        self._hub = parts.hub
        self._view = view = parts.session.view
        self._settings = parts.settings
        self._identity = parts.identity
        self._member = member
        self._shell = parts.shell
        self._effects = parts.effects
        self._now_ns = now_ns
        self.masterships: dict[int, Mastership] = {}
        self._preparing: set[int] = set()
        """Partitions whose mastership may not be ready yet."""
        self.feeds: dict[str, ReplicaFeed] = {}
        """By member."""
        self.groups = OpenGroups(member, self.masterships, self.feeds, engine.num_vbuckets)
        self.departures = Departures(
            member, parts.session, parts.kept, self.masterships, self.feeds
        )
        self._branches: dict[int, _AskedBranch] = {}
        """The branches that operators asked this node for, until each is decided."""
        self.followers = Followers(
            member, parts.ran, parts.settings.replica_lag_max_ns, self.feeds, self.groups, now_ns
        )
        self._successors = Successors(view, member)
        self.pace = FillPace(parts.settings.fill_bytes_per_s)
        self.serving = Serving(
            engine, parts.hub, view, member, self.masterships, self.feeds, self.groups,
            parts.effects,
        )  # fmt: skip
        self.arriving = self.serving.arrivals.vb_ids
        """See ReplicationPort."""
        self.steps = Steps(parts.effects)
        self.handovers = Handovers(self.steps)
        self.watermarks = HighWatermarks(
            engine, cycle, self.masterships, self.feeds, self.handovers, parts.effects
        )
        self.cuts = CutMember(
            engine, parts.hub, self.watermarks,
            acknowledges_as_master=parts.settings.acknowledges_as_master,
        )  # fmt: skip

    # -- epochs ------------------------------------------------------------------------------------

    def begin(
        self, vb_id: int, record: ReplicationRecord, *,
        confirmed_ns: int, announced_seqno: int, sender: Sender | None, now_ns: int,
    ) -> None:  # fmt: skip
        """Become master in the record's epoch.

        `confirmed_ns` is when this process may last have confirmed another master,
        `announced_seqno` the high watermark that the former master announced, `sender` the master
        that sent all of the log.
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
            known_seqno=max(announced_seqno, first.committed_seqno),
            sender=sender,
            changed=partial(self._mastership_changed, vb_id),
        )  # fmt: skip
        part.guard = mastership
        self.serving.began(vb_id, None if record.handover is None else now_ns)
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
        seqnos = part.high_seqno - seqno
        try:
            check_undo(part, seqno)
            keys = self._engine.keyspace.replace_history(part, log, record.epoch, rollback_to=seqno)
        except (BranchRefusedError, StoreDamagedError) as error:
            self._effects.append(
                Notice(
                    f"partition {part.vb_id}: its record asks for a branch at seqno {seqno} "
                    "(version "
                    f"{record.branch.vb_uuid}), which this master cannot carry out: {error}. "
                    "Nothing is undone; ask for another branch"
                )
            )
            return False
        asked = self._branches.get(part.vb_id)
        if asked is not None and asked.branch == record.branch:
            asked.undone = Undone(seqnos, keys)
        return True

    def _give_up_snapshot(self, part: Partition) -> None:
        """Cut off a part of a snapshot: only an unclean election makes such a replica master."""
        window = part.incomplete_snapshot
        if window is not None:
            seqno = window.start if window.start >= part.history_floor else 0
            log = part.failover.cut(seqno)
            self._engine.keyspace.replace_history(part, log, part.leader_epoch, rollback_to=seqno)

    def take_record(self, vb_id: int, record: ReplicationRecord, revision: int) -> None:
        """Take a newer record of the same epoch, and its mod revision."""
        renewed = self.masterships[vb_id].take_record(record, revision)
        self.departures.note(vb_id)
        for member in renewed & self.feeds.keys():
            self.feeds[member].end(vb_id)  # it may still bring what it had of another copy

    def step_down(self, vb_id: int, why: str) -> None:
        """Stop being a partition's master."""
        self._shell.depose((vb_id,), why)
        mastership = self.masterships.pop(vb_id)
        mastership.want_branch(None)
        self.handovers.ended(vb_id, self._now_ns, is_handed=mastership.has_handed)
        self.serving.ended(vb_id)
        self.handovers.hurry()
        self.groups.mastership_changed(vb_id)
        part = self._engine.partitions[vb_id]
        part.state = VbState.REPLICA
        part.may_send_back = False
        part.guard = None
        part.release_writes(Hold.REPLICATION)
        self._hub.fenced(vb_id)
        for feed in self.feeds.values():
            feed.end(vb_id)

    def records_were_kept(self) -> None:
        """See MasterSide. The same for this node's own disk."""
        if held := self.departures.release():
            self.watermarks.advance(held)
            self.steps.ask()

    @property
    def serves_by(self) -> StoreSeen:
        """See MasterSide."""
        return self.departures.serves_by

    def _mastership_changed(self, vb_id: int) -> None:
        self.groups.mastership_changed(vb_id)
        self.serving.changed(vb_id)

    def group_synced(self, now_ns: int, group: CommitGroup) -> Collection[int]:
        """A group is on disk: replicas get its changes.

        Commit what of it waits for nobody else. Return the partitions of this master
        where something else may be committed now.
        """
        self._note_ready()
        sent = self.groups.synced(now_ns, group)
        found: Collection[int] = ()
        if sent is None or sent.revision != self.groups.revision:
            found = group.high_seqnos.keys() & self.masterships.keys()
        if sent is not None:
            self.groups_acknowledged(self._member, (sent,))
        return found

    def _note_ready(self) -> None:
        """Note which masterships are ready, because the beginning of their epoch is on disk."""
        synced_group = self._engine.commits.synced_group
        for vb_id in tuple(self._preparing):
            mastership = self.masterships.get(vb_id)
            if mastership is None or mastership.ready_group <= synced_group:
                self._preparing.discard(vb_id)
                if mastership is not None:
                    mastership.become_ready()
                    self.decide_waiting(vb_id)

    def decide_waiting(self, vb_id: int) -> None:
        """A record or the beginning of an epoch is known here now: replicas may wait for that."""
        for feed in self.feeds.values():
            feed.decide_waiting(vb_id)

    # -- ReplicationPort and MasterSide ------------------------------------------------------------

    def open_feed(self, greeting: bytes, schedule: Callable[[], None]) -> tuple[ReplicaFeed, bytes]:
        """See ReplicationPort."""
        peer: Greeting = decode(greeting, Greeting)
        chosen = common_format(peer.format, peer.oldest, self._settings.format)
        if not chosen:
            raise ReplicationError(
                f"member {peer.member} has format {peer.format} of the replication messages; "
                f"this node has {self._settings.format}. Upgrade the older of the two"
            )
        if peer.cluster != self._identity.cluster:
            raise ReplicationError(
                f"member {peer.member} belongs to cluster {peer.cluster!r}, this node to "
                f"{self._identity.cluster!r}"
            )
        if peer.master != self._member:
            raise ReplicationError(
                f"member {peer.member} wants to reach member {peer.master}; here is {self._member}"
            )
        if peer.member not in self._view.members:
            raise ReplicationError(f"{peer.member} is no member of this cluster")
        alive = self._view.alive.get(peer.member)
        if alive is not None and peer.incarnation < alive.content.incarnation:
            raise ReplicationError(
                f"member {peer.member} runs as incarnation {alive.content.incarnation}; this is "
                f"{peer.incarnation}, an older process with the same data folder or a copy of it"
            )
        older = self.feeds.get(peer.member)
        if older is not None:
            older.is_superseded = True
            older.close()
            self.serving.all_changed()
        feed = ReplicaFeed(
            self._engine, peer.member, self, schedule, now_ns=self._now_ns,
            window_bytes=self._settings.window_bytes, section_bytes=self._settings.section_bytes,
            pace=self.pace,
        )  # fmt: skip
        feed.heartbeat.beat_ns, feed.format = self._settings.beat_ns, chosen
        self.feeds[peer.member] = feed
        return feed, b"%d" % chosen

    @property
    def why_no_cuts(self) -> str:
        """See ReplicationPort."""
        return self.cuts.why_never

    def draw_cut(self, ask: Ask, clock_ns: int) -> str:
        """See ReplicationPort."""
        return self.cuts.draw(ask, clock_ns)

    def complete_cut(self, round_: int, time: int) -> bool:
        """See ReplicationPort."""
        return self.cuts.complete(round_, time)

    def why_fenced(self, vb_id: int) -> str:
        """See ReplicationPort."""
        return self.serving.why_fenced(vb_id, self._now_ns)

    def readers_are(self, feed: ReplicaFeed, held: Mapping[int, Held]) -> None:
        """See MasterSide."""
        if self.feeds.get(feed.member) is feed:
            self._hub.remote.take(feed.member, held)

    def feed_closed(self, feed: ReplicaFeed) -> None:
        """See MasterSide."""
        if self.feeds.get(feed.member) is feed:
            del self.feeds[feed.member]
            self._hub.remote.lost(feed.member)
            self.serving.all_changed()

    def admit(
        self,
        feed: ReplicaFeed,
        vb_id: int,
        asked: StreamRequest,
        position: ReplicaPosition,
        opaque: int,
    ) -> FeedAnswer | None:
        """See MasterSide."""
        part, mastership = self._engine.partitions[vb_id], self.masterships.get(vb_id)
        stored = self._view.partitions.get(vb_id)
        own_epoch = max(part.leader_epoch, 0 if stored is None else stored.content.record.epoch)
        if position.epoch > own_epoch:
            return None  # the replica has read the record first: it comes here, too
        why = refusal(own_epoch, position.epoch)
        if why is None and (mastership is None or mastership.epoch != position.epoch):
            why = f"partition {vb_id}: this node is not the master in epoch {position.epoch}"
        if why is not None:
            return FeedAnswer(Status.X_FENCED, why.encode())
        assert mastership is not None
        number = mastership.record.number_of(feed.member)
        if not is_same_copy(number, position.copy_number):
            why = (
                f"partition {vb_id}: member {feed.member} asks for copy {position.copy_number}, "
                "the record"
                f" of this master has {number}"
            )
            return FeedAnswer(Status.X_FENCED, why.encode())
        try:
            versions = tuple(position.failover_log().pairs())
        except ValueError as error:
            raise ReplicationError(f"partition {vb_id}: {error}") from error
        window = _window_of(vb_id, asked, position)
        if not mastership.is_ready:
            return None
        question = Question(
            asked.start_seqno, asked.vb_uuid, asked.snap_start_seqno, asked.snap_end_seqno,
            versions, client_purge_seqno=position.snapshot_purge,
        )  # fmt: skip
        decision = decide(question, part.failover, part.high_seqno, part.purge_seqno)
        deletions: Deletions | None = None
        if decision.rollback_seqno is not None:
            shared = min(common_seqno(versions, asked.start_seqno, part.failover), part.high_seqno)
            found: Deletions | bytes | None = pack_rollback(decision.rollback_seqno, shared)
            is_purged = decision.kind is RollbackKind.PURGED and window is None
            if is_purged and feed.format >= RESYNC_FORMAT:
                found = feed.resynced(part, question, shared, position.resync)
            if not isinstance(found, Deletions):
                return None if found is None else FeedAnswer(Status.ROLLBACK, found)
            deletions = found
        if asked.snap_end_seqno > part.synced_seqno:
            return FeedAnswer(Status.ETMPFAIL, b"the master has not synced so much yet")
        complete_seqno = asked.start_seqno
        if window is not None:
            complete_seqno = window.start
            window = window._replace(purge=part.purge_seqno)
        mastership.begins_at(feed.member, complete_seqno, position.history_floor)
        feed.open(
            vb_id, mastership.epoch, opaque, asked.start_seqno, window, deletions=deletions,
            is_filling=feed.member in mastership.record.filling,
        )  # fmt: skip
        welcome = Welcome(
            mastership.epoch, versions_of(part.failover), part.history_floor, part.purge_seqno,
            max(part.committed_seqno, part.history_floor),  # a floor is committed
        )  # fmt: skip
        return FeedAnswer(Status.OK, encode(welcome))

    def acknowledged(self, member: str, followed: Sequence[Match]) -> None:
        """See MasterSide."""
        touched = []
        for each in followed:
            mastership = self.masterships.get(each.vb_id)
            if mastership is not None and mastership.epoch == each.epoch:
                mastership.acknowledged(member, each.epoch, each.seqno)
                touched.append(each.vb_id)
        self.watermarks.advance(touched)

    def groups_acknowledged(self, member: str, groups: Sequence[Group]) -> None:
        """See MasterSide."""
        found = self.groups.acknowledged(member, groups)
        if self.watermarks.held is not None:
            self.watermarks.held.update(found.committed)
        elif found.committed:
            self.watermarks.commit_many(found.committed)
            for feed in self.feeds.values():
                for group in found.groups:
                    feed.group_committed(group, found.committed)
        if found.one_by_one:
            self.watermarks.advance(found.one_by_one)

    def confirmed(self, feed: ReplicaFeed) -> None:
        """See MasterSide."""
        if self.serving.has_unserved and self.feeds.get(feed.member) is feed:
            self.steps.ask()

    # -- changes of records ------------------------------------------------------------------------

    def serve(self, now_ns: int) -> None:
        """Let each partition serve what it may, and find the next fence."""
        self._now_ns = now_ns
        self.serving.serve(now_ns)

    def record_changes(
        self, records: Mapping[int, Stored[StoredPartition]], *, may_write: bool
    ) -> list[RecordChange]:
        """Return the changes of this master's records that are due, as many as one transaction
        takes. They must be written. Records that are not in `records` are left alone.
        """
        if not self.followers.note_caught_up(self._now_ns):
            self.serving.all_changed()
        self.pace.look(self._now_ns, (feed.inflights.delays for feed in self.feeds.values()))
        lateness = self.followers.look_for_late(self._now_ns)
        if self.followers.any_in_sync(lateness.slow):
            self.serving.all_changed()
        may_fill = self.pace.take_join(self._now_ns)
        active, left = self.serving.active(may_fill=may_fill), self.serving.take_left()
        steady_ns, alive = self.followers.take_steady(), self._view.alive
        heard_ns = {member: feed.asked_ns for member, feed in self.feeds.items()}
        lost_ns = self.followers.allowance_ns
        changes: list[RecordChange] = []
        for vb_id in sorted(active):
            mastership = self.masterships[vb_id]
            if len(mastership.record.isr) < len(mastership.record.copies):
                mastership.in_snapshot = frozenset(
                    member for member, feed in self.feeds.items() if feed.is_in_snapshot(vb_id)
                )
            self.watermarks.note_acknowledged(mastership)
            if vb_id in left:
                mastership.was_steady(steady_ns)
            record = mastership.changed_isr(
                self._now_ns, alive, heard_ns, lateness, may_fill=may_fill, lost_ns=lost_ns
            )
            if mastership.is_writing or not mastership.is_ready or not may_write:
                continue
            if len(changes) == COMPARES_MAX or vb_id not in records:
                continue  # the rest comes with the next tick; what is not followed is not written
            record = record or self._next_record(mastership)
            if record is not None:
                changes.append(self._change(mastership, record, records[vb_id]))
        if self._successors.is_leaving:
            self._want_successors()
        if may_write and not changes and self.handovers.is_under_way:
            changes = self.handover_changes(self._now_ns, records)
        else:
            self.handovers.hurry()
        return changes

    def _next_record(
        self, mastership: Mastership, *, may_hand_over: bool = False
    ) -> ReplicationRecord | None:
        """Return the record after a branch or a handover that is due; None: nothing is.
        `may_hand_over`: a handover that is ready is to be written now.
        """
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
                self._branches.pop(part.vb_id, None)
                self._effects.append(BranchEnded(part.vb_id, wanted_branch.vb_uuid, str(error)))
                return None
            return start_branch(record, wanted_branch)
        if self._successors.is_leaving:
            record = self._successors.wanted(record)
        after = self.handovers.next_record(
            mastership, record, self._now_ns, may_write=may_hand_over,
            is_failover=self._view.fails_over(part.vb_id, record.wanted_master),
        )  # fmt: skip
        if after is not None:
            self.serving.fence(part)
        return after

    def handover_changes(
        self, now_ns: int, records: Mapping[int, Stored[StoredPartition]]
    ) -> list[RecordChange]:
        """Return the handovers that are due now, before the next tick. They must be written."""
        self._now_ns = now_ns
        due = self.handovers.due(now_ns, self.masterships)
        self._next_handovers(due, records, may_write=False)
        may_write = self.handovers.may_write(now_ns, self.masterships)
        return self._next_handovers(due, records, may_write=may_write)

    def _next_handovers(
        self,
        vb_ids: Iterable[int],
        records: Mapping[int, Stored[StoredPartition]],
        *,
        may_write: bool,
    ) -> list[RecordChange]:
        changes: list[RecordChange] = []
        for vb_id in vb_ids:
            mastership = self.masterships.get(vb_id)
            if mastership is None or mastership.is_writing or vb_id not in records:
                continue
            self.serving.changed(vb_id)
            if (record := self._next_record(mastership, may_hand_over=may_write)) is not None:
                changes.append(self._change(mastership, record, records[vb_id]))
        return changes

    def _change(
        self, mastership: Mastership, record: ReplicationRecord, before: Stored[StoredPartition]
    ) -> RecordChange:
        mastership.is_writing = True
        mastership.ask(record.isr)
        return RecordChange(mastership.part.vb_id, record, before)

    def decided(self, mastership: Mastership, *, is_written: bool) -> None:
        """A change of a record has its outcome."""
        if mastership.has_handed and not is_written:
            self.handovers.ended(mastership.part.vb_id, self._now_ns, is_handed=False)
        mastership.decided(is_written=is_written)
        self.handovers.hurry()

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
        self._successors.is_leaving = True
        self._want_successors()

    def _want_successors(self) -> None:
        able = self._successors.able
        self.handovers.wait(vb_id for vb_id, each in self.masterships.items() if able(each.record))

    # -- branches ----------------------------------------------------------------------------------

    def want_branch(self, vb_id: int, seqno: int, vb_uuid: int) -> None:
        """Ask for a branch of a partition. Raises BranchRefusedError if it cannot begin.

        The record says so first, then all of the in-sync set rolls back. The effect BranchEnded
        says when that is done.
        """
        self.serving.changed(vb_id)
        mastership = self.masterships.get(vb_id)
        part = self._engine.partitions[vb_id]
        if mastership is None or part.state != VbState.ACTIVE:
            raise BranchRefusedError(
                f"partition {vb_id}: this node does not serve it now; ask its master"
            )
        if mastership.branch_wanted is not None or mastership.record.branch is not None:
            raise BranchRefusedError(f"partition {vb_id}: another branch is under way")
        mastership.check_branch(seqno)
        branch = BranchUnderWay(vb_uuid, seqno)
        mastership.want_branch(branch)
        self._branches[vb_id] = _AskedBranch(branch)

    def withdraw_branch(self, vb_id: int, vb_uuid: int) -> bool:
        """Do not want a branch any more; return whether it will not be made.

        One that may be in the record already is finished, by this master or the next one.
        """
        mastership, asked = self.masterships.get(vb_id), self._branches.get(vb_id)
        if mastership is None or asked is None or asked.branch.vb_uuid != vb_uuid:
            return False
        if asked.is_recorded or mastership.is_writing or mastership.branch_wanted != asked.branch:
            return False
        mastership.want_branch(None)
        del self._branches[vb_id]
        return True

    def branch_ended(self, vb_id: int, record: ReplicationRecord) -> BranchEnded | None:
        """Return the end of a branch that was asked for here, if a new record says that it ended.

        A branch that a record names is finished, by this master or the next one, unless damaged
        data is in the way. All members in sync have the master's failover log by then.
        """
        asked = self._branches.get(vb_id)
        if asked is None:
            return None
        if record.branch == asked.branch:
            asked.is_recorded = True
            return None
        mastership = self.masterships.get(vb_id)
        if mastership is not None and mastership.branch_wanted == asked.branch:
            return None  # it is not written yet
        del self._branches[vb_id]
        vb_uuid = asked.branch.vb_uuid
        log = self._engine.partitions[vb_id].failover
        if (
            asked.is_recorded
            and record.branch is None
            and self._member in record.isr
            and vb_uuid in dict(log.pairs())
        ):
            return BranchEnded(vb_id, vb_uuid, "", asked.undone)
        return BranchEnded(
            vb_id, vb_uuid,
            f"partition {vb_id}: this node is not its master any more, or could not carry the "
            "branch out "
            f"(its log says why). If the failover log has version {vb_uuid}, the branch was made; "
            "otherwise ask the present master for it",
        )  # fmt: skip

    # -- the status --------------------------------------------------------------------------------

    def copies_behind(self) -> Iterator[tuple[int, str, int]]:
        """Yield (partition, member, changes that it lacks) for each copy at another member."""
        for vb_id, mastership in self.masterships.items():
            self.watermarks.note_acknowledged(mastership)
            for copy in mastership.record.copies:
                if copy != self._member:
                    behind = mastership.part.synced_seqno - mastership.match(copy)
                    yield vb_id, copy, max(0, behind)

    def lags(self, now_ns: int) -> list[FollowerLag]:
        """Return the lag of each member that has a copy of a partition of this master."""
        found: dict[str, list[int]] = {}
        for _vb_id, copy, behind in self.copies_behind():
            found.setdefault(copy, []).append(behind)
        return [
            FollowerLag(
                copy, len(behind), sum(map(bool, behind)), sum(behind),
                _heard_ns(self.feeds.get(copy), now_ns),
            )
            for copy, behind in sorted(found.items())
        ]  # fmt: skip


def _heard_ns(feed: ReplicaFeed | None, now_ns: int) -> int | None:
    return None if feed is None or not feed.asked_ns else max(0, now_ns - feed.asked_ns)


def _window_of(
    vb_id: int, asked: StreamRequest, position: ReplicaPosition
) -> SnapshotWindow | None:
    """Return the snapshot of which a replica has a part; None: what it has is
    complete. Raises ReplicationError.
    """
    start, seqno, end = asked.snap_start_seqno, asked.start_seqno, asked.snap_end_seqno
    if not start <= seqno <= end or not 0 <= position.snapshot_purge <= end:
        raise ReplicationError(
            f"partition {vb_id}: a replica cannot be at seqno {seqno} of a snapshot from {start} "
            f"to {end} with purge seqno {position.snapshot_purge}"
        )
    return SnapshotWindow(start, end, position.snapshot_purge) if start < seqno else None
