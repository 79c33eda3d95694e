"""One partition whose master this node is, in one leader epoch. Sans-IO.

    PREPARING   its version of this epoch is not on disk yet: nobody is served, no replica either
    REPLAYING   replicas are fed; the high watermark has not reached the start of the epoch, or
                replicas that confirmed the former master may still do so, or this node has not read
                of all collections that the partition has (failover.replication.serving)
    SERVING     clients are served, as long as the in-sync set confirms this master
    HANDING     writers are held back: the wanted master gets the partition next

Who calls it: `failover.replication.node`, which carries out what it decides.

Invariants
- the high watermark is the smallest synced seqno over the effective in-sync set, each acknowledged
  in this epoch (`failover.rules.isr.high_watermark`), and it never falls. The former master counts
  as one more copy of what it sent;
- nothing is answered that claims to be current without the confirmation of the in-sync set;
- what a member acknowledged counts for its present copy only: it may have emptied an earlier one;
- who has left the in-sync set counts until every member of it holds the record durably that says
  so (`failover.rules.isr.is_held`): the metadata store may go back to an older copy;
- one change of the record is under way at a time. `asked` is the in-sync set that it asks for, from
  the moment when it is asked for until its outcome is in the view;
- a branch that is wanted stays possible here: no history floor rises above it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Final, NamedTuple

from dcp.stream.hub import StreamHub
from failover.coordinator.clock import RanTime
from failover.coordinator.cluster_session import ClusterSession, NodeShell
from failover.coordinator.seen_records import SeenRecords
from failover.replication.effects import ReplicationEffect
from failover.replication.messages import FORMAT
from failover.rules.fencing import is_same_copy
from failover.rules.isr import (
    ELECTION_NS,
    NOBODY_LATE,
    Acknowledgement,
    Candidate,
    Lateness,
    Sender,
    confirmed_until_ns,
    effective_isr,
    high_watermark,
    is_enough,
    is_held,
    may_answer_reads,
    may_be_deposed,
    may_join,
    min_in_sync_of,
    must_leave,
    slow_to_leave,
)
from failover.rules.replication_record import BranchUnderWay, ReplicationRecord, expand, shrink
from failover.rules.write_answer import Durability, WriteState
from vbucket.engine.engine import Engine
from vbucket.engine.partition import FloorError, Partition, check_undo

_IN_NO_STORE: Final = 1 << 63
"""Above every revision."""
WINDOW_BYTES: Final = 8 << 20
"""Entries on their way to one replica: at 100 MB/s, 80 ms of them."""
SECTION_BYTES: Final = 256 << 10
"""Entries from a cursor, in one message: a fair share of a turn."""


class Service(Enum):
    """See the module."""

    PREPARING = auto()
    REPLAYING = auto()
    SERVING = auto()
    HANDING = auto()


class ReplicationSettings(NamedTuple):
    """What an operator decides about replication."""

    min_in_sync: int | None = None
    """Members that must be in sync for a write to be taken; None: a majority of the copies. The
    cluster's record says it for all nodes, as soon as it is known."""
    replica_lag_max_ns: int = 1_000_000_000
    beat_ns: int = 100_000_000
    """Time between heartbeats, and the longest time between two questions."""
    unheard_ns: int = 600_000_000
    """A master whose node was not heard for so long is reported: six heartbeats."""
    acknowledges_as_master: bool = False
    """Answer writes when this node's disk has them (`acknowledge=master`)."""
    value_bytes_max: int = 20 << 20
    window_bytes: int = WINDOW_BYTES
    fill_bytes_per_s: int = 0
    """How fast this node fills copies elsewhere for the first time; 0: without a limit."""
    section_bytes: int = SECTION_BYTES
    """Entries from a cursor, in one message: a fair share of a turn."""
    format: int = FORMAT
    """The newest format of the messages that this node speaks."""


class Identity(NamedTuple):
    """Who this node is."""

    cluster: str
    member: str
    incarnation: int


class ReplicationParts(NamedTuple):
    """What both sides of a node's replication use, `Master` and `Replica`."""

    engine: Engine
    hub: StreamHub
    session: ClusterSession
    settings: ReplicationSettings
    identity: Identity
    effects: list[ReplicationEffect]
    """For the shell, in order."""
    ran: RanTime
    kept: SeenRecords
    """What this folder has seen of the metadata store's records."""
    shell: NodeShell


class InSyncSet(NamedTuple):
    """An effective in-sync set, and how many members it must have for anything to commit."""

    members: frozenset[str]
    min_in_sync: int


def _nothing_to_tell() -> None:
    """Nobody depends on in-sync sets."""


class Mastership:
    """See the module. It is the partition's `WriteGuard`. `changed` is called when `in_sync_set`
    may be another one, and when the mastership becomes ready.
    """

    def __init__(
        self,
        part: Partition,
        record: ReplicationRecord,
        member: str,
        settings: ReplicationSettings,
        *,
        now_ns: int,
        ready_group: int,
        serves_from_ns: int,
        known_seqno: int,
        sender: Sender | None = None,
        changed: Callable[[], None] = _nothing_to_tell,
    ) -> None:
        """`known_seqno`: everything up to there is known to be committed. `sender`: the master from
        which this node has its log, if this process knows it.
        """
        self.part = part
        self._changed = changed
        self._record = record
        self._settings = settings
        self.epoch = record.epoch
        self.epoch_start_seqno = part.high_seqno
        self.ready_group = ready_group
        """The commit group that begins this epoch here."""
        self.serves_from_ns = serves_from_ns
        self.known_seqno = min(known_seqno, part.high_seqno)
        self._sender = sender
        self._is_ready = False
        self._asked: frozenset[str] | None = None
        self._parting: frozenset[str] = frozenset()
        """Who has left the in-sync set by a record that not all of its members hold yet."""
        self._parting_revision = 0
        """Its mod revision."""
        self.in_sync_set = self._effective_set()
        """What the high watermark depends on, beside acknowledgements."""
        self.is_writing = False
        """Whether a change of the record is under way."""
        self.handing_since_ns = 0
        self.branch_wanted: BranchUnderWay | None = None
        """What an operator has asked for, until the record says it; see `want_branch`."""
        self._floors: dict[str, int] = {}
        """The history floors of members."""
        self.in_snapshot: frozenset[str] = frozenset()
        """Members that have only a part of a de-duplicated snapshot."""
        self.has_handed = False
        """Whether the handover is written, or may be: nobody serves until that is decided."""
        self._member = member
        self._acknowledged: dict[str, Acknowledgement] = {}
        self._caught_up_ns = dict.fromkeys(record.copies, now_ns)
        self._synced_at_tick = part.high_seqno
        changed()

    # -- what the in-sync set depends on -----------------------------------------------------------

    @property
    def record(self) -> ReplicationRecord:
        """The partition's record of this epoch, as the metadata store had it last."""
        return self._record

    @property
    def min_in_sync(self) -> int:
        """How many members must be in sync for the high watermark to rise."""
        return self.in_sync_set.min_in_sync

    @property
    def is_ready(self) -> bool:
        """Whether the beginning of this epoch is on disk here."""
        return self._is_ready

    def become_ready(self) -> None:
        """The beginning of this epoch is on disk here."""
        self._is_ready = True
        self._changed()

    @property
    def asked(self) -> frozenset[str] | None:
        """The in-sync set that is asked for, if a change is under way."""
        return self._asked

    def ask(self, asked: frozenset[str] | None) -> None:
        """Ask for an in-sync set; None: nothing is asked for any more."""
        self._asked = asked
        self._renew_set()

    def _effective_set(self) -> InSyncSet:
        members = effective_isr(self._record.isr, self._asked, self._parting)
        counted_copies = self._record.counted_copies
        return InSyncSet(members, min_in_sync_of(self._settings.min_in_sync, counted_copies))

    def _renew_set(self) -> None:
        self.in_sync_set = self._effective_set()
        self._changed()

    # -- what is known -----------------------------------------------------------------------------

    @property
    def isr(self) -> frozenset[str]:
        """The effective in-sync set."""
        return self.in_sync_set.members

    @property
    def has_parting(self) -> bool:
        """Whether somebody still counts who has left the in-sync set."""
        return bool(self._parting)

    def members_saw(self, seen: Mapping[str, int]) -> bool:
        """Take up to which revision of the metadata store members hold its records on disk. Return
        whether nobody counts any more who has left the in-sync set.
        """
        if self._parting and is_held(self._record.isr, self._parting_revision, seen):
            self._parting = frozenset()
            self._renew_set()
        return not self._parting

    def store_begins_again(self) -> None:
        """There is a new connection to the metadata store, which may be an older copy of itself:
        nobody holds the record in it before `take_record` has its revision there.
        """
        self._parting_revision = _IN_NO_STORE

    def acknowledged(self, member: str, epoch: int, seqno: int) -> None:
        """A member has synced everything up to a seqno, in an epoch."""
        before = self._acknowledged.get(member)
        if before is None or before.epoch < epoch or before.synced_seqno < seqno:
            self._acknowledged[member] = Acknowledgement(epoch, seqno)

    def match(self, member: str) -> int:
        """Return what a member has acknowledged in this epoch; 0: nothing."""
        given = self._acknowledged.get(member)
        return 0 if given is None or given.epoch != self.epoch else given.synced_seqno

    def begins_at(self, member: str, seqno: int, history_floor: int) -> None:
        """A member has all up to a seqno, and perhaps less than it acknowledged before: deletions
        that it needed were purged, so it began again at 0.
        """
        self._floors[member] = history_floor
        given = self._acknowledged.get(member)
        if given is not None and given.epoch == self.epoch and seqno < given.synced_seqno:
            self._acknowledged[member] = Acknowledgement(self.epoch, seqno)

    def acknowledged_epochs(self) -> dict[str, int]:
        """Return the epoch under which each member last reconciled with this node."""
        epochs = {member: given.epoch for member, given in self._acknowledged.items()}
        return epochs | {self._member: self.epoch} if self.is_ready else epochs

    def hw_seqno(self) -> int:
        """Return the high watermark as of now."""
        part = self.part
        if not self.is_ready:
            return part.committed_seqno
        self.acknowledged(self._member, self.epoch, part.synced_seqno)
        known_seqno = max(part.committed_seqno, self.known_seqno)
        return high_watermark(
            known_seqno, self.epoch, self.isr, self._acknowledged, self.min_in_sync, self._sender
        )

    def write_state(self, durability: Durability | None) -> WriteState:
        """Return what the master knows now, for a write with this durability frame."""
        return WriteState(
            durability, len(self.record.isr), self.record.counted_copies, self.min_in_sync,
            is_confirmed=True, hw_seqno=self.part.committed_seqno,
            epoch_start_seqno=self.epoch_start_seqno,
        )  # fmt: skip

    # -- branches ----------------------------------------------------------------------------------

    def check_branch(self, seqno: int) -> None:
        """Raise BranchRefusedError if this node, or a member in sync, cannot go back to a seqno."""
        check_undo(self.part, seqno)
        for member in sorted(self.isr - {self._member}):
            floor = self._floors.get(member, 0)
            if 0 < seqno < floor:
                raise FloorError(
                    f"partition {self.part.vb_id}: member {member} keeps every version from seqno "
                    f"{floor} "
                    f"only; it cannot go back to {seqno}, but to {floor} and above, or to 0"
                )

    def want_branch(self, branch: BranchUnderWay | None) -> None:
        """Want a branch, or none any more. No floor rises above it meanwhile."""
        pins = self.part.pins
        if self.branch_wanted is not None:
            pins.remove(self.branch_wanted.seqno)
        if branch is not None:
            pins.add(branch.seqno)
        self.branch_wanted = branch

    # -- decisions ---------------------------------------------------------------------------------

    def take_record(self, record: ReplicationRecord, revision: int = 0) -> set[str]:
        """Take the record of this epoch, as the metadata store has it now, and its mod revision
        there (0: all members hold it). `members_saw` follows. Return the members whose copies are
        others than before, or gone: what they acknowledged does not count any more.
        """
        assert record.epoch == self.epoch
        before, self._record = self._record, record
        if record.isr != before.isr:
            self._parting = (self._parting | before.isr) - record.isr if revision else frozenset()
            self._parting_revision = revision
        elif revision:
            self._parting_revision = min(self._parting_revision, revision)
        renewed: set[str] = set()
        if (before.copies, before.added) != (record.copies, record.added):
            renewed = {
                member
                for member in {*before.copies, *record.copies}
                if not is_same_copy(before.number_of(member), record.number_of(member))
            }
        for member in renewed:
            self._acknowledged.pop(member, None)
            self._caught_up_ns.pop(member, None)
        self.ask(self._asked if self.is_writing else None)
        return renewed

    def take_min_in_sync(self, setting: int | None) -> None:
        """Take how many members must be in sync from now on; None: a majority of the copies."""
        self._settings = self._settings._replace(min_in_sync=setting)
        self._renew_set()

    def decided(self, *, is_written: bool) -> None:
        """A change of the record has its outcome; `take_record` follows if it was written."""
        self.is_writing = self.has_handed = False
        self.handing_since_ns = 0
        self.ask(self._asked if is_written else None)

    def is_steady(self, alive: Mapping[str, object]) -> bool:
        """Whether nothing is under way. The record changes then only if a member is lost or comes,
        if a copy that is filled may join, or if somebody asks for it.
        """
        record = self._record
        if (
            self.is_writing
            or self._asked is not None
            or self._parting
            or self.handing_since_ns
            or self.branch_wanted is not None
            or record.branch is not None
            or record.wanted_master not in {None, record.master}
        ):
            return False
        can_wait = is_enough(record.isr, self.min_in_sync, record.counted_copies)
        for member in record.copies:
            is_as_it_stays = (member in record.isr) == (member in alive)
            if not is_as_it_stays and not (can_wait and member in record.filling):
                return False
        return True

    def confirmed_until_ns(self, asked_ns: Mapping[str, int]) -> int | None:
        """Return until when reads may be answered; None: without limit. `asked_ns` has, for each
        member, when it was asked the question that it confirmed last.
        """
        return confirmed_until_ns(self._member, self.isr, asked_ns)

    def service(self, now_ns: int, until_ns: int | None) -> Service | None:
        """Return what may be served now; None: nothing, because this master is not confirmed."""
        if not self.is_ready:
            return Service.PREPARING
        if now_ns < self.serves_from_ns or self.part.committed_seqno < self.epoch_start_seqno:
            return Service.REPLAYING
        if self.has_handed or not may_answer_reads(now_ns, until_ns):
            return None
        return Service.HANDING if self.handing_since_ns else Service.SERVING

    @property
    def why_writes_wait(self) -> str:
        """Why no write can be committed now; "" if writes are taken."""
        if self.handing_since_ns:
            return "another node becomes the partition's master"
        if len(self.isr) < self.min_in_sync:
            return (
                f"{len(self.isr)} of {self.record.counted_copies} copies are in sync; "
                f"{self.min_in_sync} must be"
            )
        return ""

    def changed_isr(
        self,
        now_ns: int,
        alive: Mapping[str, object],
        heard_ns: Mapping[str, int],
        lateness: Lateness = NOBODY_LATE,
        *,
        may_fill: bool = True,
        lost_ns: int = 0,
    ) -> ReplicationRecord | None:
        """Return the record with another in-sync set, if it has to change; None: it need not.

        Call it at every tick. `alive` are the members whose nodes are not known to be gone,
        `heard_ns` has when each was asked the question that it confirmed last, `lateness` who
        acknowledges late, all partitions taken together. `may_fill`: whether a copy that was filled
        may join now; if there are too few in sync, it need not wait. `lost_ns`: for how long this
        process did not run within the last `replica_lag_max` of its running time. It heard nobody
        meanwhile, so that time says nothing of the members.
        """
        self._note_caught_up(heard_ns)
        if self.is_writing or not self.is_ready or self.record.master != self._member:
            return None
        record = self.record
        is_cut_off = self._may_be_cut_off(now_ns - lost_ns, alive, heard_ns)
        lag_max_ns = self._lag_max_ns(is_cut_off=is_cut_off) + lost_ns
        leaving = [
            member
            for member in record.isr
            if member != self._member
            and must_leave(
                self._caught_up_ns.get(member, now_ns), now_ns, is_node_gone=member not in alive,
                lag_max_ns=lag_max_ns,
            )
        ]  # fmt: skip
        if not leaving and lateness.slow and not is_cut_off:
            leaving = sorted(
                slow_to_leave(
                    record.isr, self._member, lateness,
                    min_in_sync=self.min_in_sync, counted_copies=record.counted_copies,
                )
            )  # fmt: skip
        if leaving:
            return shrink(record, leaving)
        if len(record.isr) == len(record.copies):
            return None
        filling = record.filling
        can_wait = is_enough(record.isr, self.min_in_sync, record.counted_copies)
        joining = [
            member
            for member in record.copies
            if member not in record.isr and member in alive
            and not (can_wait and (member in lateness.slow or (member in filling and not may_fill)))
            and self._may_join(member, heard_ns.get(member))
            and now_ns - heard_ns[member] <= lag_max_ns  # it would leave at once
        ]  # fmt: skip
        return expand(record, joining) if joining else None

    def _lag_max_ns(self, *, is_cut_off: bool) -> int:
        """Return how long a member may lag before it leaves."""
        settings = self._settings
        if is_cut_off:
            return max(settings.replica_lag_max_ns, settings.unheard_ns) + ELECTION_NS
        return settings.replica_lag_max_ns

    def _may_be_cut_off(
        self, now_ns: int, alive: Mapping[str, object], heard_ns: Mapping[str, int]
    ) -> bool:
        """Return whether so many members are silent that they could depose this master.

        They fall silent some heartbeats apart, so half of the time counts as silence. Otherwise the
        first one would leave alone, and the second one could elect nobody.
        """
        silent_from_ns = now_ns - self._settings.replica_lag_max_ns // 2
        silent = [
            member
            for member in self.record.isr
            if member != self._member and member in alive
            and heard_ns.get(member, 0) < silent_from_ns
        ]  # fmt: skip
        return may_be_deposed(len(self.record.isr), len(silent))

    def was_steady(self, caught_up_ns: Mapping[str, int]) -> None:
        """`changed_isr` was not called for a while because nothing had to change. `caught_up_ns`
        has when members had caught up in all partitions, but for those of which they have a copy
        that is filled.
        """
        for member in caught_up_ns.keys() - self._record.filling:
            self._caught_up_ns[member] = max(
                self._caught_up_ns.get(member, 0), caught_up_ns[member]
            )

    def _may_join(self, member: str, heard_ns: int | None) -> bool:
        given = self._acknowledged.get(member)
        if given is None or heard_ns is None:
            return False
        candidate = Candidate(
            given, is_caught_up=self._caught_up_ns.get(member) == heard_ns,
            has_incomplete_snapshot=member in self.in_snapshot,
        )  # fmt: skip
        return may_join(candidate, self.epoch, self.part.committed_seqno, self.epoch_start_seqno)

    def _note_caught_up(self, heard_ns: Mapping[str, int]) -> None:
        """A member had caught up when it was heard, if it has all that was synced here at the last
        tick. One that says nothing is not: while it keeps this master from serving, nothing new
        is synced that it could lack.
        """
        for member, given in self._acknowledged.items():
            if given.epoch == self.epoch and given.synced_seqno >= self._synced_at_tick:
                at_ns = heard_ns.get(member, 0)
                self._caught_up_ns[member] = max(self._caught_up_ns.get(member, 0), at_ns)
        self._synced_at_tick = self.part.synced_seqno
