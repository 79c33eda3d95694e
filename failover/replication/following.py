"""What a node does as a replica: links to the masters' nodes, and what comes on them. Sans-IO.

Who calls it: `failover.replication.node`.

Invariants
- a partition is followed on one link at most: that of its master, in the epoch of its record;
- an epoch is never followed lower than the partition's own;
- what this process confirmed to any master is not forgotten with the link: `last_confirmed_ns`
  bounds from when it may serve if it becomes master;
- a master is suspected only after a silence in which this process ran (`ran_time`). What is served
  here is fenced by the clock alone (`is_unheard`): it may be old, whatever this process did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView, Mapping, Sequence
from typing import Final, NamedTuple

from dcp.session.replication_port import ReplicationError
from dcp.wire.message import StreamRequest
from failover.coordinator.effects import Notice
from failover.coordinator.ran_time import RanTime
from failover.replication.cut_off import Quarantine
from failover.replication.effects import Dial, ReplicationEffect
from failover.replication.link import HEARD_NS_MAX, LinkState, ReplicaLink, from_here
from failover.replication.mastership import ReplicationSettings
from failover.replication.messages import (
    FORMAT,
    EntriesSection,
    Greeting,
    ReplicaPosition,
    SnapshotDone,
    StoreSeen,
    Told,
    Welcome,
    unpack_told,
    versions_of,
)
from failover.replication.pace import HeardGaps
from failover.replication.receipt import CutOff
from failover.replication.senders import Senders
from failover.rules.isr import Sender
from failover.rules.promotion import kept_elsewhere_seqno, may_have_been_answered
from failover.rules.replication_record import ReplicationRecord
from vbucket.engine.branch import BranchRefusedError
from vbucket.engine.engine import Engine
from vbucket.engine.leadership import (
    FloorsRefusedError,
    StaleEpochError,
    adopt_failover_log,
    adopt_floors,
    begin_snapshot,
    end_snapshot,
)
from vbucket.engine.partition import Partition
from vbucket.engine.replicated import ReplicatedChange, ReplicatedChanges
from vbucket.model.control import SnapshotWindow
from vbucket.model.entry import LOG_CONTROL, OPCODE_AT
from vbucket.store.environment import StoreDamagedError

REDIAL_NS: Final = 200_000_000
"""Pause between two attempts to connect to a node."""
BARRED_REDIAL_NS_MAX: Final = 32 * REDIAL_NS
"""The longest pause if one of the two nodes does not accept the other. It doubles with each attempt
until then: an operator has to do something, and each attempt costs both sides a login."""


class Identity(NamedTuple):
    """Who this node is."""

    cluster: str
    member: str
    incarnation: int


class Following:
    """See the module. `raise_watermarks` is called with partitions whose master told a new one."""

    def __init__(
        self,
        engine: Engine,
        changes: ReplicatedChanges,
        identity: Identity,
        settings: ReplicationSettings,
        *,
        record_of: Callable[[int], ReplicationRecord],
        raise_watermarks: Callable[[Iterable[int]], None],
        commit_many: Callable[[Mapping[int, int]], None],
        was_welcomed: Callable[[], None],
        store_seen: Callable[[], StoreSeen],
        link_of: Callable[[str], int | None],
        effects: list[ReplicationEffect],
        now_ns: int,
        ran: RanTime,
    ) -> None:
        self._engine = engine
        self._changes = changes
        self._ran = ran
        self._identity = identity
        self._settings = settings
        self._record_of = record_of
        self._raise_watermarks = raise_watermarks
        self._commit_many = commit_many
        self._was_welcomed = was_welcomed
        self.store_seen = store_seen
        """See ReplicaSide."""
        self._link_of = link_of
        self._served_by: dict[str, int] = {}
        """Member -> up to which revision of the metadata store it serves by its records. Only for
        this node's present connection to that store."""
        self._effects = effects
        self._now_ns = self._started_ns = now_ns
        self.links: dict[str, ReplicaLink] = {}
        """By member, the links to the nodes of masters."""
        self._heard_ns: dict[str, int] = {}
        self._gaps: dict[str, HeardGaps] = {}
        """How long masters' nodes are silent between two words."""
        self._dialled_ns: dict[str, int] = {}
        self._pauses_ns: dict[str, int] = {}
        """By member that does not let this node in, or is not accepted: time between attempts."""
        self._confirmed_ns: dict[int, int] = {}
        """When a partition's master was last confirmed, on links that are left or gone."""
        self.rollbacks = 0
        """How often a partition was cut back to where its master's history parts."""
        self._has_gaps = False
        """Whether some partition may not be followed, because its master's link is closed."""
        self._hw: dict[int, int] = {}
        """The high watermarks that masters told, above those of here."""
        self._senders = Senders()
        self._quarantine = Quarantine(engine, effects)
        self._damaged: dict[int, str] = {}
        """Partitions that could not be cut back, and what was said about it."""

    # -- the metadata store may go back to an older copy -------------------------------------------

    def begin_again(self) -> None:
        """There is a new connection to the store: nobody has said anything about it yet."""
        self._served_by.clear()

    def master_serves(self, master: str, seen: StoreSeen) -> None:
        """See ReplicaSide."""
        if seen.link == self._link_of(master):
            self._served_by[master] = max(self._served_by.get(master, 0), seen.revision)

    def is_served(self, master: str | None, revision: int) -> bool:
        """Whether a master has said that it serves by a record of this mod revision, of the store
        to which this node has its present connection.
        """
        return master is not None and self._served_by.get(master, 0) >= revision

    def records_were_kept(self) -> None:
        """More of the metadata store's records is on disk here: the masters wait for that."""
        for link in self.links.values():
            link.store_seen()

    # -- which links -------------------------------------------------------------------------------

    def follow(self, vb_id: int, record: ReplicationRecord, now_ns: int) -> None:
        """Follow the master of a partition, if this node holds a copy and is not it."""
        self._now_ns = now_ns
        master, member = record.master, self._identity.member
        if member not in record.copies or master is None or master == member:
            self.leave(vb_id)
            return
        for other, link in self.links.items():
            if other != master:
                self._leave(link, vb_id)
        known = self.links.get(master)
        if known is None or not known.follows_any:
            # Nothing was to be heard of it until now: it has as much time as any other master.
            self._heard_ns[master] = now_ns
        followed = self._link_to(master)
        if followed is not None:
            followed.follow(vb_id, record.epoch, now_ns, record.number_of(member) or 0)
        else:
            self._has_gaps = True

    def leave(self, vb_id: int) -> None:
        """Follow nobody for a partition."""
        for link in self.links.values():
            self._leave(link, vb_id)

    def _leave(self, link: ReplicaLink, vb_id: int) -> None:
        if link.follows(vb_id):
            self.confirmed(vb_id, link.confirmed_ns)
            link.leave(vb_id)

    def _link_to(self, member: str) -> ReplicaLink | None:
        """Return the link to a member's node; dial it if there is none."""
        link = self.links.get(member)
        if link is not None and link.state is not LinkState.CLOSED:
            return link
        pause_ns = self._pauses_ns.get(member, REDIAL_NS)
        if self._now_ns - self._dialled_ns.get(member, -pause_ns) < pause_ns:
            return None
        self._pauses_ns.pop(member, None)
        if link is not None:
            if link.is_barred:
                self._pauses_ns[member] = min(2 * pause_ns, BARRED_REDIAL_NS_MAX)
            self._keep_confirmations(link)
            self._senders.link_gone(member, link.newest_group)
            self._has_gaps = True  # what it followed is followed on the new one
        self._dialled_ns[member] = self._now_ns
        identity = self._identity
        greeting = Greeting(FORMAT, identity.cluster, identity.member, identity.incarnation, member)
        link = ReplicaLink(
            self, greeting, now_ns=self._now_ns, value_bytes_max=self._settings.value_bytes_max
        )
        self.links[member] = link
        self._effects.append(Dial(member))
        return link

    def tick(self, now_ns: int) -> None:
        """Let time pass; note what links that are gone have confirmed."""
        self.note_heard(now_ns)
        for member, link in self.links.items():
            silence_ns = max(HEARD_NS_MAX, self._patience_ns(member))
            link.tick(now_ns, self._ran.stretched(silence_ns))
            if link.state is LinkState.CLOSED:
                self._has_gaps = True
                self._keep_confirmations(link)

    def note_heard(self, now_ns: int) -> None:
        """Note when the masters' nodes were last heard. One whose connections are refused has no
        process: nobody waits for a word of it.
        """
        self._now_ns = now_ns
        for member, link in self.links.items():
            heard_ns = self._heard_ns.get(member, 0)
            if link.master_heard_ns > heard_ns:
                self._note_gap(member, heard_ns, link.master_heard_ns)
            self._heard_ns[member] = max(heard_ns, link.master_heard_ns)
            if link.is_refused:
                since_ns = now_ns - self._settings.unheard_ns
                self._heard_ns[member] = min(self._heard_ns[member], since_ns)

    def _note_gap(self, member: str, before_ns: int, heard_ns: int) -> None:
        gaps = self._gaps.setdefault(member, HeardGaps())
        if before_ns:
            gaps.note(heard_ns, heard_ns - before_ns - self._ran.lost_since(before_ns))

    def _patience_ns(self, member: str) -> int:
        gaps = self._gaps.get(member)
        unheard_ns = self._settings.unheard_ns
        return unheard_ns if gaps is None else gaps.patience_ns(self._now_ns, unheard_ns)

    def is_suspect(self, master: str | None, *, has_lease: bool) -> bool:
        """Whether a master that is unheard is to be reported. `has_lease`: the metadata store has
        heard of it. Then it may only be slow, and has the time that it lately took.
        """
        if master is None or master == self._identity.member:
            return True
        link = self.links.get(master)
        if link is not None and link.is_refused:
            return True
        silence_ns = self._patience_ns(master) if has_lease else self._settings.unheard_ns
        heard_ns = self._heard_ns.get(master, self._started_ns)
        return self._now_ns - heard_ns >= self._ran.stretched(silence_ns)

    @property
    def unheard_from_ns(self) -> int:
        """When the first node of a master counts as unheard, unless it is heard before. Only nodes
        that are heard now count.
        """
        unheard_ns = self._settings.unheard_ns
        heard = (at_ns for at_ns in self._heard_ns.values() if self._now_ns - at_ns < unheard_ns)
        return min(heard, default=self._now_ns) + unheard_ns

    def _keep_confirmations(self, link: ReplicaLink) -> None:
        """Note what a closed link has confirmed; it still says what it followed."""
        for vb_id in link.followed():
            self.confirmed(vb_id, link.confirmed_ns)

    def take_gaps(self) -> bool:
        """Return whether `follow` must be called for all partitions again, and forget it."""
        has_gaps, self._has_gaps = self._has_gaps, False
        return has_gaps

    def synced(self, group: int) -> None:
        """A commit group of this node is on disk: acknowledge it."""
        for link in self.links.values():
            link.synced(group)

    def is_followed(self, vb_id: int) -> bool:
        """Whether the present master of a partition feeds this node."""
        return any(link.is_open(vb_id) for link in self.links.values())

    def is_unheard(self, master: str | None) -> bool:
        """Whether this master was not heard for a while, or there is none."""
        if master is None or master == self._identity.member:
            return True
        return (
            self._now_ns - self._heard_ns.get(master, self._started_ns) >= self._settings.unheard_ns
        )

    # -- confirmations -----------------------------------------------------------------------------

    def confirmed(self, vb_id: int, at_ns: int) -> None:
        """Note that this process confirmed a master of a partition, or was one, until then."""
        self._confirmed_ns[vb_id] = max(self._confirmed_ns.get(vb_id, 0), at_ns)

    def last_confirmed_ns(self, vb_id: int) -> int:
        """Return when this process may last have confirmed another master of a partition."""
        confirmed_ns = max(self._confirmed_ns.get(vb_id, 0), self._started_ns)
        for link in self.links.values():
            if link.follows(vb_id):
                confirmed_ns = max(confirmed_ns, link.confirmed_ns)
        return confirmed_ns

    # -- ReplicaSide -------------------------------------------------------------------------------

    def position(self, vb_id: int, epoch: int) -> tuple[StreamRequest, ReplicaPosition]:
        """See ReplicaSide."""
        part = self._engine.partitions[vb_id]
        window = part.incomplete_snapshot
        asked = from_here(part.high_seqno, part.vb_uuid, window)
        purge = window.purge if window is not None else 0
        versions = versions_of(part.failover)
        number = self._record_of(vb_id).number_of(self._identity.member) or 0
        return asked, ReplicaPosition(epoch, versions, purge, part.history_floor, number)

    def welcomed(self, vb_id: int, welcome: Welcome) -> None:
        """See ReplicaSide."""
        part = self._engine.partitions[vb_id]
        try:
            log = welcome.failover_log()
            adopt_failover_log(self._engine, vb_id, log, welcome.epoch)
            if part.incomplete_snapshot is None and welcome.history_floor <= part.high_seqno:
                # Otherwise a snapshot comes, and brings the floors at its end.
                adopt_floors(
                    self._engine, vb_id, welcome.history_floor, welcome.purge_seqno,
                    welcome.committed_seqno,
                )  # fmt: skip
        except (StaleEpochError, FloorsRefusedError, ValueError) as error:
            raise ReplicationError(str(error)) from error
        record = self._record_of(vb_id)
        if record.master is not None and record.epoch == welcome.epoch:
            self._senders.welcomed(vb_id, record.epoch, record.master, part.high_seqno)
        # An earlier master's word about changes that are not here says nothing about this history:
        # a branch or an unclean election may have replaced them.
        self._cap_told(part, part.high_seqno)
        self._note_told(vb_id, welcome.committed_seqno)
        self._raise_watermarks((vb_id,))
        self._was_welcomed()

    def roll_back(self, vb_id: int, epoch: int, seqno: int) -> None:
        """See ReplicaSide."""
        part = self._engine.partitions[vb_id]
        if epoch < part.leader_epoch:
            raise ReplicationError(
                f"vb {vb_id} is in leader epoch {part.leader_epoch}; epoch {epoch} is over"
            )
        self._changes.settle()
        seqno = min(seqno, part.high_seqno)
        if part.incomplete_snapshot is not None:
            seqno = min(seqno, part.incomplete_snapshot.start)
        try:
            if not self._is_kept(part, epoch, seqno):
                return
        except StoreDamagedError as error:
            self._tell_damage(part, seqno, error, "What it would cut off cannot be kept: it stays")
            return
        if seqno < part.history_floor:
            if seqno and self._identity.member in self._record_of(vb_id).isr:
                # It would lack what is committed, and could be elected. The master takes it out of
                # the in-sync set, because it does not keep up; then it begins again at 0.
                return
            seqno = 0
        try:
            self._cut(part, seqno)
        except BranchRefusedError as error:
            raise ReplicationError(str(error)) from error
        except StoreDamagedError as error:
            if self._identity.member in self._record_of(vb_id).isr:
                then = "It is filled anew when it has left the in-sync set"
                self._tell_damage(part, seqno, error, then)
                return
            self._tell_damage(part, seqno, error, "It is filled anew")
            self._cut(part, 0)

    def empty(self, vb_id: int) -> bool:
        """Give up all of a partition that this node does not hold any more; False: what may have
        been answered and is in no other copy goes into files first.
        """
        part, record = self._engine.partitions[vb_id], self._record_of(vb_id)
        seqno = kept_elsewhere_seqno(
            record, part.leader_epoch, part.committed_seqno, part.high_seqno
        )
        try:
            if not self._is_kept(part, record.epoch, seqno):
                return False
        except StoreDamagedError as error:
            then = "What nobody else may have cannot be kept in a file: the partition stays"
            self._tell_damage(part, 0, error, then)
            return True
        self._changes.settle()
        rollbacks = self.rollbacks
        self._cut(part, 0)
        self.rollbacks = rollbacks  # no history has parted
        return True

    def _cut(self, part: Partition, seqno: int) -> None:
        """Cut off what lies above a seqno. Raises BranchRefusedError, StoreDamagedError."""
        log = part.failover.cut(seqno)
        adopt_failover_log(self._engine, part.vb_id, log, part.leader_epoch, rollback_to=seqno)
        self.rollbacks += 1
        self._damaged.pop(part.vb_id, None)
        self._cap_told(part, seqno)
        watermarks = self._engine.keyspace.watermarks
        if watermarks.get(part.vb_id, 0) > seqno:  # the log would be told after the cut
            watermarks[part.vb_id] = seqno

    def _cap_told(self, part: Partition, seqno: int) -> None:
        """Forget what was told of changes above a seqno."""
        if part.vb_id in self._hw:
            self._hw[part.vb_id] = min(self._hw[part.vb_id], seqno)

    def _tell_damage(self, part: Partition, seqno: int, why: StoreDamagedError, then: str) -> None:
        """Say once that a partition cannot be cut back, and what follows."""
        if self._damaged.get(part.vb_id) != then:
            self._damaged[part.vb_id] = then
            self._effects.append(
                Notice(
                    f"vb {part.vb_id} cannot go back to seqno {seqno}, as its master asks: {why}. "
                    f"{then}; the other partitions go on. Check the disk"
                )
            )

    def _is_kept(self, part: Partition, epoch: int, seqno: int) -> bool:
        """Whether all above a seqno that may have been answered is in quarantine."""
        may_matter = seqno < part.high_seqno and may_have_been_answered(
            self._record_of(part.vb_id), part.leader_epoch,
            acknowledges_as_master=self._settings.acknowledges_as_master,
        )  # fmt: skip
        return not may_matter or self._quarantine.is_kept(part, epoch, seqno)

    def kept(self, piece: CutOff) -> None:
        """The shell has written the quarantine file of a CutOff, and it is on disk."""
        self._quarantine.kept(piece)

    def not_kept(self, piece: CutOff) -> None:
        """The quarantine file of a CutOff could not be written: the shell gets it again."""
        self._quarantine.not_kept(piece)

    def high_seqno(self, vb_id: int) -> int:
        """See ReplicaSide."""
        return self._engine.partitions[vb_id].high_seqno

    def unsynced_group(self, vb_id: int) -> int:
        """See ReplicaSide."""
        group = self._engine.partitions[vb_id].last_group
        return group if group > self._engine.commits.synced_group else 0

    def incomplete_snapshot(self, vb_id: int) -> SnapshotWindow | None:
        """See ReplicaSide."""
        return self._engine.partitions[vb_id].incomplete_snapshot

    def apply(self, section: EntriesSection) -> None:
        """See ReplicaSide."""
        part = self._engine.partitions[section.vb_id]
        changes: list[bytes] = []
        try:
            for entry in section.entries:
                if entry[OPCODE_AT] != LOG_CONTROL:
                    changes.append(entry)
                    continue
                self._changes.apply(part, changes)
                changes = []
                self._take_told(section, unpack_told(entry))
            self._changes.apply(part, changes)
        except (FloorsRefusedError, StoreDamagedError) as error:
            raise ReplicationError(str(error)) from error
        self._note_told(section.vb_id, section.committed_seqno)

    def apply_whole(
        self, payload: bytes, highs: dict[int, int], epochs: dict[int, int], body_bytes_max: int
    ) -> tuple[int, dict[int, int]] | None:
        """See ReplicaSide."""
        try:
            return self._changes.apply_whole(payload, highs, epochs, body_bytes_max)
        except StoreDamagedError as error:
            raise ReplicationError(str(error)) from error

    def apply_group(self, changes: Sequence[ReplicatedChange]) -> int:
        """See ReplicaSide."""
        try:
            return self._changes.apply_group(changes)
        except StoreDamagedError as error:
            raise ReplicationError(str(error)) from error

    def told_committed(self, seqnos: Mapping[int, int], *, is_synced: bool) -> None:
        """See ReplicaSide."""
        if is_synced:
            self._commit_many(seqnos)
            return
        for vb_id, seqno in seqnos.items():
            self._note_told(vb_id, seqno)
        self._raise_watermarks(seqnos)

    def applied(self, vb_ids: Iterable[int]) -> None:
        """See ReplicaSide."""
        self._raise_watermarks(vb_ids)

    def _take_told(self, section: EntriesSection, told: Told) -> None:
        engine, vb_id = self._engine, section.vb_id
        if isinstance(told, SnapshotWindow):
            begin_snapshot(engine, vb_id, told)
        elif isinstance(told, SnapshotDone):
            end_snapshot(engine, vb_id, told.purge, told.cas)
        else:
            adopt_floors(engine, vb_id, told.floor, told.purge, section.committed_seqno)

    # -- high watermarks ---------------------------------------------------------------------------

    @property
    def awaiting_sync(self) -> KeysView[int]:
        """Partitions whose master told a high watermark that this node had not synced yet."""
        return self._hw.keys()

    def reached(self, vb_id: int, seqno: int) -> None:
        """A partition is committed up to a seqno here."""
        if self._hw.get(vb_id, seqno + 1) <= seqno:
            del self._hw[vb_id]

    def told_hw(self, vb_id: int) -> int:
        """Return the high watermark that a partition's masters told, unless it is reached."""
        return self._hw.get(vb_id, 0)

    def take_told_hw(self, vb_id: int) -> int:
        """Return the same and forget it: this node becomes the master."""
        return self._hw.pop(vb_id, 0)

    def take_sender(self, vb_id: int, epoch: int) -> Sender | None:
        """Return what of a partition's log its former master has on disk, and forget it: this node
        becomes the master in an epoch (`Senders.take`).
        """
        newest = {member: link.newest_group for member, link in self.links.items()}
        high_seqno = self._engine.partitions[vb_id].high_seqno
        return self._senders.take(vb_id, epoch, high_seqno, newest)

    def _note_told(self, vb_id: int, seqno: int) -> None:
        if seqno > self._hw.get(vb_id, 0):
            self._hw[vb_id] = seqno
