"""What a node does as a replica: links to the masters' nodes, and what comes on them. Sans-IO.

Who calls it: `failover.replication.node`.

Invariants
- a partition is followed on one link at most: that of its master, in the epoch of its record;
- an epoch is never followed lower than the partition's own;
- what this process confirmed to any master is not forgotten with the link: `last_confirmed_ns`
  bounds from when it may serve if it becomes master;
- a master is suspected only after a silence in which this process ran (`RanTime`). What is served
  here is fenced by the clock alone (`is_unheard`): it may be old, whatever this process did;
- what may have been answered goes into files before it is cut off (`Discards`), and one piece of a
  partition is with the shell at a time. What is in files counts for the same history only: another
  version or another end begins anew;
- only a readable record, of an epoch that is not over, empties a partition (`DroppedCopies`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from dcp.core.floors import LateFloors
from dcp.session.replication_port import ReplicationError
from dcp.stream.hub import StreamHub
from dcp.stream.remote_readers import Held, held_by
from dcp.wire.message import StreamRequest
from failover.coordinator.cluster_session import ClusterSession
from failover.coordinator.effects import Notice
from failover.coordinator.records import StoredPartition
from failover.coordinator.view import Stored
from failover.replication.commit import HighWatermarks
from failover.replication.effects import Dial, ReplicationEffect
from failover.replication.handover import Handovers
from failover.replication.link import HEARD_NS_MAX, LinkState, NewestGroup, ReplicaLink, from_here
from failover.replication.mastership import ReplicationParts
from failover.replication.messages import (
    Control,
    EntriesSection,
    Floors,
    Greeting,
    ReplicaPosition,
    SnapshotDone,
    StoreSeen,
    Welcome,
    unpack_control_entry,
    versions_of,
)
from failover.replication.pace import HeardMasters
from failover.rules.isr import Sender, has_sent, sender_seqno
from failover.rules.promotion import kept_elsewhere_seqno, may_have_been_answered
from failover.rules.replication_record import ReplicationRecord
from vbucket.engine.engine import Engine
from vbucket.engine.leadership import (
    FloorsRefusedError,
    StaleEpochError,
    adopt_failover_log,
    begin_snapshot,
    end_snapshot,
)
from vbucket.engine.partition import BranchRefusedError, Partition
from vbucket.engine.replicated import ReplicatedChange, ReplicatedChanges
from vbucket.engine.resync import UNENDED, Remaining, Resync, resync_for
from vbucket.model.control import SnapshotWindow
from vbucket.model.entry import LOG_CONTROL, OPCODE_AT
from vbucket.model.ids import SEQNO_MAX
from vbucket.model.receipt import DISCARD_BYTES_MAX, CutOff
from vbucket.store.environment import StoreDamagedError

REDIAL_NS: Final = 200_000_000
"""Pause between two attempts to connect to a node."""
BARRED_REDIAL_NS_MAX: Final = 32 * REDIAL_NS
"""The longest pause if one of the two nodes does not accept the other. It doubles with each attempt
until then: an operator has to do something, and each attempt costs both sides a login."""


class _Welcome(NamedTuple):
    """The last time when a partition's log was reconciled."""

    epoch: int
    master: str
    seqno: int
    """The end of the log then. The master had all of it on disk."""
    synced_seqno: int = SEQNO_MAX
    """What the master is known to have on disk, if the link is gone that brought the log."""


class Senders:
    """Which masters sent the logs of partitions, and what of that they have on disk.

    A master sends a commit group while it writes it, and begins no other group before that one is
    synced. So what a replica has of a master is on that master's disk, but for the newest group of
    the link. That one is, too, when the replica hears that it is committed, or gets the next one.
    Sections, and what is read from cursors, are synced before they are sent.

    A node that is left alone by its master counts that master's disk (`failover.rules.isr.Sender`).
    """

    def __init__(self) -> None:
        self._welcomes: dict[int, _Welcome] = {}

    def welcomed(self, vb_id: int, epoch: int, master: str, seqno: int) -> None:
        """A master lets this node follow a partition, whose log here ends at a seqno."""
        self._welcomes[vb_id] = _Welcome(epoch, master, seqno)

    def link_gone(self, master: str, newest: NewestGroup | None) -> None:
        """A link to a master's node is replaced by another one. What was reconciled on it keeps
        what is known, until it is reconciled again.
        """
        for vb_id, begin in ({} if newest is None else newest.begins()).items():
            welcome = self._welcomes.get(vb_id)
            if welcome is not None and welcome.master == master:
                synced_seqno = min(welcome.synced_seqno, max(welcome.seqno, begin))
                self._welcomes[vb_id] = welcome._replace(synced_seqno=synced_seqno)

    def take(
        self, vb_id: int, epoch: int, high_seqno: int, newest: Mapping[str, NewestGroup | None]
    ) -> Sender | None:
        """Return the master that sent this node a partition's log, and forget it: this node becomes
        the master in an epoch. None: it did not follow the master of the epoch before, so the end
        of its log may be on no other disk.

        `newest` has the newest groups of the links that there are.
        """
        welcome = self._welcomes.pop(vb_id, None)
        if welcome is None or not has_sent(welcome.epoch, epoch):
            return None
        synced_seqno = welcome.synced_seqno
        group = newest.get(welcome.master)
        begin = None if group is None else group.begins().get(vb_id)
        if begin is not None:
            synced_seqno = min(synced_seqno, max(welcome.seqno, begin))
        return Sender(welcome.master, sender_seqno(synced_seqno, high_seqno))


class _Discard:
    """How far the changes above a seqno of a partition are in files."""

    __slots__ = ("end", "from_seqno", "kept_seqno", "piece")

    def __init__(self, end: tuple[int, int], from_seqno: int) -> None:
        self.end = end
        """(version, last seqno) of the history that is cut."""
        self.from_seqno = self.kept_seqno = from_seqno
        self.piece: CutOff | None = None
        """What the shell writes now."""


class Discards:
    """What a replica keeps in files before it cuts it off.

        keep ── CutOff, the shell writes a file ── kept ──> next piece, or: cut it off
                                                └─ not_kept ──> the same piece again

    Nothing is cut off until the shell has reported every piece as kept. The link asks its master
    again meanwhile, and the question comes back with each ROLLBACK. So a full disk holds up the
    truncation of that partition only.
    """

    def __init__(
        self,
        engine: Engine,
        effects: list[ReplicationEffect],
        *,
        piece_bytes_max: int = DISCARD_BYTES_MAX,
    ) -> None:
        self._engine = engine
        self._effects = effects
        self._piece_bytes_max = piece_bytes_max
        self._discards: dict[int, _Discard] = {}

    def keep(self, part: Partition, epoch: int, seqno: int) -> bool:
        """Return whether all above a seqno is in files. If not, the next piece goes to the shell.

        `epoch` is that of the master that does not have it.
        """
        end = part.vb_uuid, part.high_seqno
        discard = self._discards.get(part.vb_id)
        if discard is None or (discard.end, discard.from_seqno) != (end, seqno):
            discard = self._discards[part.vb_id] = _Discard(end, seqno)
        if discard.piece is None and discard.kept_seqno < part.high_seqno:
            self._begin_piece(part, epoch, discard)
        if discard.kept_seqno < part.high_seqno:
            return False
        del self._discards[part.vb_id]
        return True

    def _begin_piece(self, part: Partition, epoch: int, discard: _Discard) -> None:
        entries = self._engine.versions.entries(
            part, discard.kept_seqno + 1, part.high_seqno, self._piece_bytes_max
        )
        if not entries:  # what was there is compacted away
            discard.kept_seqno = part.high_seqno
            return
        discard.piece = CutOff(part.vb_id, epoch, tuple(part.failover.pairs()), tuple(entries))
        self._effects.append(discard.piece)

    def kept(self, piece: CutOff) -> None:
        """The file of a piece is on disk."""
        discard = self._discards.get(piece.vb_id)
        if discard is not None and discard.piece is piece:
            discard.piece = None
            discard.kept_seqno = piece.last_seqno

    def not_kept(self, piece: CutOff) -> None:
        """The file of a piece could not be written: it is tried again with the next ROLLBACK."""
        discard = self._discards.get(piece.vb_id)
        if discard is not None and discard.piece is piece:
            discard.piece = None


HELD_NS: Final = 1_000_000_000
"""Between two words to masters of what the streams served here hold."""
EMPTIED_MAX: Final = 64
"""Partitions that are emptied in one turn: a fraction of a millisecond each."""
REST_NS: Final = 5_000_000_000
"""A merge is asked for when no partition was emptied for so long."""
ROOM_NS: Final = 60_000_000_000
"""A merge is asked for so long after the first partition was emptied, whatever else is: nodes that
lose copies get others, and need the room on disk."""


class DroppedCopies:
    """Empties the partitions whose records do not name this member any more.

        record without this member ── note ──> due ── tick ──> empty
        record with it again ───────── note ──> not due

    A copy is dropped while its member is down, too: then the first record that its next process
    reads says so. Emptying is a change of memory and one control entry, so it is durable with its
    commit group, before anything that comes later. The documents leave the store with the next
    merge. One is asked for when nothing was emptied for a while: during a rebalance copies are
    dropped all the time, and a merge writes all that was written anywhere on the node.

    What the other copies may lack goes into discard files first, if it may have been answered
    (`failover.rules.promotion`).
    """

    def __init__(self, engine: Engine, hub: StreamHub, replica: Replica) -> None:
        self._engine = engine
        self._hub = hub
        self._replica = replica
        self._due: dict[int, None] = {}
        self._emptied_ns: tuple[int, int] | None = None
        """When the first and the last partition were emptied since a merge was asked for."""

    def note(self, vb_id: int, *, holds_copy: bool) -> None:
        """Take a partition's newest record: whether this member is in it."""
        if holds_copy:
            self._due.pop(vb_id, None)
            return
        self._hub.fenced(vb_id)  # consumers may read from an empty copy, too
        if self._engine.partitions[vb_id].high_seqno:
            self._due[vb_id] = None

    def tick(self, now_ns: int) -> None:
        """Empty what is due, and ask for a merge when it is time."""
        emptied = 0
        for vb_id in tuple(self._due):
            if emptied == EMPTIED_MAX:
                break
            if self._replica.empty(vb_id):
                del self._due[vb_id]
                emptied += 1
        if emptied:
            first_ns = now_ns if self._emptied_ns is None else self._emptied_ns[0]
            self._emptied_ns = first_ns, now_ns
        if self._emptied_ns is not None and self._is_time_to_merge(now_ns, *self._emptied_ns):
            self._emptied_ns = None
            self._engine.keyspace.merge_soon()  # the room on disk is free after it

    @staticmethod
    def _is_time_to_merge(now_ns: int, first_ns: int, last_ns: int) -> bool:
        return now_ns - last_ns >= REST_NS or now_ns - first_ns >= ROOM_NS


class ServedBy:
    """By which records of the metadata store other masters serve, as they say."""

    def __init__(self, session: ClusterSession) -> None:
        self._session = session
        self._revisions: dict[str, int] = {}
        """Member -> up to which revision. Only for this node's present connection to the store."""

    def begin_again(self) -> None:
        """There is a new connection to the store: nobody has said anything about it yet."""
        self._revisions.clear()

    def note(self, master: str, seen: StoreSeen) -> None:
        """A master serves all that it masters by the records that it has seen."""
        if seen.link == self._session.link_of(master):
            self._revisions[master] = max(self._revisions.get(master, 0), seen.revision)

    def has(self, master: str | None, revision: int) -> bool:
        """Whether a master has said that it serves by a record of this mod revision, of the store
        to which this node has its present connection.
        """
        return master is not None and self._revisions.get(master, 0) >= revision


class Redials:
    """When nodes were dialled, and may be again."""

    def __init__(self) -> None:
        self._dialled_ns: dict[str, int] = {}
        self.pauses_ns: dict[str, int] = {}
        """By member that does not let this node in, or is not accepted: time between attempts."""

    def take(self, member: str, now_ns: int, *, was_barred: bool) -> bool:
        """Return whether a member's node may be dialled; it is dialled then. `was_barred`: one of
        the two nodes did not accept the other on the link before.
        """
        pause_ns = self.pauses_ns.get(member, REDIAL_NS)
        if now_ns - self._dialled_ns.get(member, -pause_ns) < pause_ns:
            return False
        self.pauses_ns.pop(member, None)
        if was_barred:
            self.pauses_ns[member] = min(2 * pause_ns, BARRED_REDIAL_NS_MAX)
        self._dialled_ns[member] = now_ns
        return True


class Confirmations:
    """When this process last confirmed a partition's master, or was it, apart from links that still
    follow it. What it confirmed before it began is not known, so all counts as confirmed then.
    """

    def __init__(self, now_ns: int) -> None:
        self._started_ns = now_ns
        self._at_ns: dict[int, int] = {}

    def note(self, vb_id: int, at_ns: int) -> None:
        """Note that this process confirmed a master of a partition, or was one, until then."""
        self._at_ns[vb_id] = max(self._at_ns.get(vb_id, 0), at_ns)

    def last_ns(self, vb_id: int) -> int:
        """Return when that was last."""
        return max(self._at_ns.get(vb_id, 0), self._started_ns)


class Replica:
    """See the module."""

    def __init__(
        self,
        parts: ReplicationParts,
        changes: ReplicatedChanges,
        records: Mapping[int, Stored[StoredPartition]],
        watermarks: HighWatermarks,
        handovers: Handovers,
        *,
        store_seen: Callable[[], StoreSeen],
        now_ns: int,
    ) -> None:
        """`records`: the newest record of each partition that was acted upon."""
        self._engine = parts.engine
        self._changes = changes
        self._identity = parts.identity
        self._settings = parts.settings
        self._records = records
        self._watermarks = watermarks
        self._handovers = handovers
        self.store_seen = store_seen
        """See ReplicaSide."""
        self.served_by = ServedBy(parts.session)
        self._effects = parts.effects
        self._now_ns = now_ns
        self.links: dict[str, ReplicaLink] = {}
        """By member, the links to the nodes of masters."""
        self.heard = HeardMasters(
            parts.identity.member, parts.ran, parts.settings.unheard_ns, parts.settings.beat_ns,
            now_ns,
        )  # fmt: skip
        self.redials = Redials()
        self.confirmations = Confirmations(now_ns)
        """On links that are left or gone."""
        self.rollbacks = 0
        """How often a partition was cut back to where its master's history parts."""
        self._has_gaps = False
        """Whether some partition may not be followed, because its master's link is closed."""
        self._senders = Senders()
        self._discards = Discards(parts.engine, parts.effects)
        self._hub = parts.hub
        self._late_floors = LateFloors(parts.engine, parts.hub)
        self._held_due_ns = 0
        self._damaged: dict[int, str] = {}
        """Partitions that could not be cut back, and what was said about it."""
        self._resyncs: dict[int, Resync] = {}
        """What the next request for a partition asks about."""

    # -- the metadata store may go back to an older copy -------------------------------------------

    def master_serves(self, master: str, seen: StoreSeen) -> None:
        """See ReplicaSide."""
        self.served_by.note(master, seen)

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
            self.heard.begin(master, now_ns)
        followed = self._link_to(master)
        if followed is not None:
            followed.follow(vb_id, record.epoch, now_ns, record.number_of(member) or 0)
        else:
            self._has_gaps = True

    def _record_of(self, vb_id: int) -> ReplicationRecord:
        return self._records[vb_id].content.record

    def leave(self, vb_id: int) -> None:
        """Follow nobody for a partition."""
        for link in self.links.values():
            self._leave(link, vb_id)

    def _leave(self, link: ReplicaLink, vb_id: int) -> None:
        if link.follows(vb_id):
            self.confirmations.note(vb_id, link.confirmed_ns)
            link.leave(vb_id)

    def _link_to(self, member: str) -> ReplicaLink | None:
        """Return the link to a member's node; dial it if there is none."""
        link = self.links.get(member)
        if link is not None and link.state is not LinkState.CLOSED:
            return link
        was_barred = link is not None and link.is_barred
        if not self.redials.take(member, self._now_ns, was_barred=was_barred):
            return None
        if link is not None:
            self._keep_confirmations(link)
            self._senders.link_gone(member, link.newest_group)
            self._has_gaps = True  # what it followed is followed on the new one
        identity = self._identity
        greeting = Greeting(
            self._settings.format, identity.cluster, identity.member, identity.incarnation, member
        )
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
            link.tick(now_ns, self.heard.silence_ns(member, HEARD_NS_MAX))
            if link.state is LinkState.CLOSED:
                self._has_gaps = True
                self._keep_confirmations(link)
        self._late_floors.tick(now_ns)
        if now_ns >= self._held_due_ns:
            self._held_due_ns = now_ns + HELD_NS
            for link in self.links.values():
                link.readers_are(self._held(link))

    def _held(self, link: ReplicaLink) -> dict[int, Held]:
        """Return what streams hold here of the partitions that are followed on a link."""
        if not self._hub.connection_count:
            return {}
        found = {vb_id: held_by(self._hub.reading(vb_id)) for vb_id in link.followed()}
        return {
            vb_id: held for vb_id, held in found.items() if held is not None and link.is_open(vb_id)
        }

    def note_heard(self, now_ns: int) -> None:
        """Note when the masters' nodes were last heard."""
        self._now_ns = now_ns
        self.heard.at(now_ns)
        for member, link in self.links.items():
            self.heard.note(member, link.confirmed_ns, is_refused=link.is_refused)

    def is_suspect(self, master: str | None, *, has_lease: bool) -> bool:
        """Whether a master that is unheard is to be reported. `has_lease`: the metadata store has
        heard of it. Then it may only be slow, and has the time that it lately took.
        """
        link = None if master is None else self.links.get(master)
        is_refused = link is not None and link.is_refused
        return is_refused or self.heard.is_suspect(master, has_lease=has_lease)

    def _keep_confirmations(self, link: ReplicaLink) -> None:
        """Note what a closed link has confirmed; it still says what it followed."""
        for vb_id in link.followed():
            self.confirmations.note(vb_id, link.confirmed_ns)

    def take_gaps(self) -> bool:
        """Return whether `follow` must be called for all partitions again, and forget it."""
        has_gaps, self._has_gaps = self._has_gaps, False
        return has_gaps

    def is_followed(self, vb_id: int) -> bool:
        """Whether the present master of a partition feeds this node."""
        return any(link.is_open(vb_id) for link in self.links.values())

    def last_confirmed_ns(self, vb_id: int) -> int:
        """Return when this process may last have confirmed another master of a partition."""
        confirmed_ns = self.confirmations.last_ns(vb_id)
        for link in self.links.values():
            if link.follows(vb_id):
                confirmed_ns = max(confirmed_ns, link.confirmed_ns)
        return confirmed_ns

    # -- ReplicaSide -------------------------------------------------------------------------------

    def position(self, vb_id: int, epoch: int) -> tuple[StreamRequest, ReplicaPosition]:
        """See ReplicaSide."""
        part = self._engine.partitions[vb_id]
        window = part.incomplete_snapshot
        if window is not None and window.end == UNENDED:
            with suppress(ReplicationError):  # its master has no use for it, and says so
                self.roll_back(vb_id, epoch, window.start, part.high_seqno)
            window = part.incomplete_snapshot
        asked = from_here(part.high_seqno, part.vb_uuid, window)
        purge = window.purge if window is not None else 0
        versions = versions_of(part.failover)
        number = self._record_of(vb_id).number_of(self._identity.member) or 0
        return asked, ReplicaPosition(
            epoch, versions, purge, part.history_floor, number, self._resyncs.pop(vb_id, None)
        )

    def welcomed(self, vb_id: int, welcome: Welcome) -> None:
        """See ReplicaSide."""
        part = self._engine.partitions[vb_id]
        try:
            log = welcome.failover_log()
            adopt_failover_log(self._engine, vb_id, log, welcome.epoch)
            if part.incomplete_snapshot is None and welcome.history_floor <= part.high_seqno:
                # Otherwise a snapshot comes, and brings the floors at its end.
                floors = Floors(welcome.history_floor, welcome.purge_seqno)
                self._late_floors.take(part, floors, welcome.committed_seqno)
        except (StaleEpochError, FloorsRefusedError, ValueError) as error:
            raise ReplicationError(str(error)) from error
        record = self._record_of(vb_id)
        if record.master is not None and record.epoch == welcome.epoch:
            self._senders.welcomed(vb_id, record.epoch, record.master, part.high_seqno)
        # An earlier master's word about changes that are not here says nothing about this history:
        # a branch or an unclean election may have replaced them.
        self._watermarks.announced.cap(part.vb_id, part.high_seqno)
        self._watermarks.announced.note(vb_id, welcome.committed_seqno)
        self._watermarks.advance((vb_id,))
        self._handovers.hurry()

    def roll_back(
        self,
        vb_id: int,
        epoch: int,
        seqno: int,
        shared_seqno: int,
        remaining: Remaining | None = None,
    ) -> None:
        """See ReplicaSide."""
        part = self._engine.partitions[vb_id]
        if epoch < part.leader_epoch:
            raise ReplicationError(
                f"partition {vb_id} is in leader epoch {part.leader_epoch}; epoch {epoch} is over"
            )
        self._changes.settle()
        if remaining is not None and self._begin_resync(part, remaining):
            return
        seqno = min(seqno, part.high_seqno)
        if part.incomplete_snapshot is not None:
            seqno = min(seqno, part.incomplete_snapshot.start)
        try:
            if not self._keep(part, epoch, shared_seqno):
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

    def _begin_resync(self, part: Partition, known: Remaining) -> bool:
        """Whether the next request asks the master about what does not remain, instead of a cut
        back to 0. A member in sync lacks nothing.
        """
        is_complete = part.incomplete_snapshot is None
        if not is_complete or self._identity.member in self._record_of(part.vb_id).isr:
            return False
        try:
            asked = resync_for(self._engine, part, known)
        except StoreDamagedError:
            return False  # filled anew, it is not damaged any more
        if asked is not None:
            self._resyncs[part.vb_id] = asked
        return asked is not None

    def empty(self, vb_id: int) -> bool:
        """Give up all of a partition that this node does not hold any more; False: what may have
        been answered and is in no other copy goes into files first.
        """
        part, record = self._engine.partitions[vb_id], self._record_of(vb_id)
        seqno = kept_elsewhere_seqno(
            record, part.leader_epoch, part.committed_seqno, part.high_seqno
        )
        try:
            if not self._keep(part, record.epoch, seqno):
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
        self._changes.forget(part.vb_id)
        self._late_floors.forget(part.vb_id)
        adopt_failover_log(self._engine, part.vb_id, log, part.leader_epoch, rollback_to=seqno)
        self.rollbacks += 1
        self._damaged.pop(part.vb_id, None)
        self._watermarks.announced.cap(part.vb_id, seqno)
        watermarks = self._engine.keyspace.watermarks
        if watermarks.get(part.vb_id, 0) > seqno:  # the log would say so after the cut
            watermarks[part.vb_id] = seqno

    def _tell_damage(self, part: Partition, seqno: int, why: StoreDamagedError, then: str) -> None:
        """Say once that a partition cannot be cut back, and what follows."""
        if self._damaged.get(part.vb_id) != then:
            self._damaged[part.vb_id] = then
            self._effects.append(
                Notice(
                    f"partition {part.vb_id} cannot go back to seqno {seqno}, as its master asks: "
                    f"{why}. "
                    f"{then}; the other partitions go on. Check the disk"
                )
            )

    def _keep(self, part: Partition, epoch: int, seqno: int) -> bool:
        """Return whether all above a seqno that may have been answered is in files. If not, the
        next piece goes to the shell.
        """
        may_matter = seqno < part.high_seqno and may_have_been_answered(
            self._record_of(part.vb_id), part.leader_epoch,
            acknowledges_as_master=self._settings.acknowledges_as_master,
        )  # fmt: skip
        return not may_matter or self._discards.keep(part, epoch, seqno)

    def kept(self, piece: CutOff) -> None:
        """The shell has written the discard file of a CutOff, and it is on disk."""
        self._discards.kept(piece)

    def not_kept(self, piece: CutOff) -> None:
        """The discard file of a CutOff could not be written: the shell gets it again."""
        self._discards.not_kept(piece)

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
                self._take_control(section, unpack_control_entry(entry))
            self._changes.apply(part, changes)
        except (FloorsRefusedError, StoreDamagedError) as error:
            raise ReplicationError(str(error)) from error
        self._watermarks.announced.note(section.vb_id, section.committed_seqno)

    def apply_group(
        self, payload: bytes, highs: dict[int, int], epochs: dict[int, int], body_bytes_max: int
    ) -> tuple[int, dict[int, int]] | None:
        """See ReplicaSide."""
        try:
            return self._changes.apply_whole(payload, highs, epochs, body_bytes_max)
        except StoreDamagedError as error:
            raise ReplicationError(str(error)) from error

    def apply_changes(self, changes: Sequence[ReplicatedChange]) -> int:
        """See ReplicaSide."""
        try:
            return self._changes.apply_group(changes)
        except StoreDamagedError as error:
            raise ReplicationError(str(error)) from error

    def committed(self, seqnos: Mapping[int, int], *, is_synced: bool) -> None:
        """See ReplicaSide."""
        if is_synced:
            self._watermarks.commit_many(seqnos)
            return
        for vb_id, seqno in seqnos.items():
            self._watermarks.announced.note(vb_id, seqno)
        self._watermarks.advance(seqnos)

    def applied(self, vb_ids: Iterable[int]) -> None:
        """See ReplicaSide."""
        self._watermarks.advance(vb_ids)

    def _take_control(self, section: EntriesSection, control: Control) -> None:
        engine, vb_id = self._engine, section.vb_id
        if isinstance(control, SnapshotWindow):
            begin_snapshot(engine, vb_id, control)
        elif isinstance(control, SnapshotDone):
            part, floors = engine.partitions[vb_id], Floors(control.seqno, control.purge)
            end_snapshot(engine, vb_id, self._late_floors.purge_now(part, floors), control.cas)
        else:
            self._late_floors.take(engine.partitions[vb_id], control, section.committed_seqno)

    def take_sender(self, vb_id: int, epoch: int) -> Sender | None:
        """Return what of a partition's log its former master has on disk, and forget it: this node
        becomes the master in an epoch (`Senders.take`).
        """
        newest = {member: link.newest_group for member, link in self.links.items()}
        high_seqno = self._engine.partitions[vb_id].high_seqno
        return self._senders.take(vb_id, epoch, high_seqno, newest)
