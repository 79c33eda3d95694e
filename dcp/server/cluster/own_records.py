"""What a node writes of itself into the metadata store, and whether it is a member by that.

**It writes** its address, its clock and its figures.

Its own record says where nodes and clients reach it. Only a member that is recorded changes its
record. One that was removed does not come back by itself.

The other members' clock records tell it whose clock is far from its own.

**A process acts as its member** once it is registered. It does not register while it cannot write
(`why_idle`): then it only follows the records, to tell its clients where the partitions are. Two
processes of one member would both count as master of the same epoch, and each would answer writes
that the other does not have. So a process that finds another one in its place ends, and so does one
whose member was removed.
"""

from __future__ import annotations

import time
from typing import Final

import msgspec

from dcp.server.cluster.joining.enrolment import Enrolment, EnrolmentEvent, EnrolmentState
from dcp.server.observe.elapsed import elapsed_ns
from dcp.server.observe.event_log import EventLog, MembershipOverError, NodeRemovedError
from failover.coordinator.clock import ClockWatch
from failover.coordinator.cluster_session import ClusterSession
from failover.coordinator.membership import MembershipState
from failover.coordinator.records import (
    ClockRecord,
    FiguresRecord,
    KeyKind,
    MemberRecord,
    encode_record,
)
from failover.coordinator.seen_records import SeenRecords
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import (
    Compare,
    CompareTarget,
    MetaStore,
    Put,
    StoreResult,
    Txn,
    if_unchanged,
)
from failover.replication.node import ReplicationCore

RETRY_NS: Final = 1_000_000_000
"""Time between attempts to change the record."""


class OwnRecord:
    """See the module."""

    def __init__(self, view: ClusterView, wanted: MemberRecord, meta: MetaStore) -> None:
        self._view = view
        self._wanted = wanted
        self._meta = meta
        self._next_ns = 0

    def tick(self, now_ns: int) -> None:
        """Let time pass: write the record if the view has another one."""
        stored = self._view.members.get(self._wanted.member)
        if stored is None or now_ns < self._next_ns:
            return
        wanted = msgspec.structs.replace(
            self._wanted,
            name=stored.content.name,
            rack=stored.content.rack,
            is_drained=stored.content.is_drained,
        )
        if stored.content == wanted:
            return
        self._next_ns = now_ns + RETRY_NS
        key = self._view.keys.of_member(KeyKind.MEMBER, wanted.member)
        compare = if_unchanged(key, stored.item.mod_revision)
        self._meta.submit(Txn((compare,), (Put(key, encode_record(wanted)),)), _decided)


def _decided(_result: StoreResult) -> None:
    """Do nothing: the view shows whether it was written."""


TELL_NS: Final = 20_000_000_000
"""Time between two records: a clock that was set is noticed within a minute."""
CLOCK_ADVICE: Final = "Let NTP set the clocks of all nodes: CAS and expiry follow them"


class OwnClock:
    """See the module."""

    def __init__(self, session: ClusterSession, meta: MetaStore, log: EventLog) -> None:
        self._session = session
        self._meta = meta
        self._log = log
        self._watch = ClockWatch(session.membership.member)
        self._told: frozenset[str] = frozenset()
        """Members whose clock was logged as off."""
        self._next_ns = 0

    def tick(self, now_ns: int) -> None:
        """Let time pass: write the clock if that is due. A record that gets lost is no loss."""
        membership, view = self._session.membership, self._session.view
        if now_ns < self._next_ns or not membership.is_alive or not view.is_loaded:
            return
        self._next_ns = now_ns + TELL_NS
        record = ClockRecord(member=membership.member, unix_ms=time.time_ns() // 1_000_000)
        key = view.keys.of_member(KeyKind.CLOCK, membership.member)
        self._meta.submit(of_this_process(self._session, key, encode_record(record)), _written)

    def view_changed(self) -> None:
        """Look at the clocks of the view."""
        self._watch.see(self._session.view.clocks, time.time_ns() // 1_000_000)
        off = frozenset(self._watch.offsets_ms)
        if off - self._told:
            for what in self.problems():
                self._log.warning("a wall clock is off", reason=f"{what}. {CLOCK_ADVICE}")
        self._told = off

    def problems(self) -> list[str]:
        """Return whose clock is off."""
        members = self._session.view.members
        return [
            f"the clock of node {members[member].content.name if member in members else member} is "
            f"{abs(offset_ms) / 1000:.0f} s {'ahead of' if offset_ms > 0 else 'behind'} this node's"
            for member, offset_ms in sorted(self._watch.offsets_ms.items())
        ]


FIGURES_NS: Final = 5_000_000_000
"""Time between two records of figures. Each is one small write of the store."""


class OwnFigures:
    """See the module."""

    def __init__(self, session: ClusterSession, meta: MetaStore) -> None:
        self._session = session
        self._meta = meta
        self._next_ns = 0
        self.wanted: FiguresRecord | None = None
        """The newest figures; None: nothing was measured yet."""

    def tick(self, now_ns: int) -> None:
        """Let time pass: write the figures if that is due and they are others."""
        membership, view = self._session.membership, self._session.view
        if now_ns < self._next_ns or not membership.is_alive or not view.is_loaded:
            return
        self._next_ns = now_ns + FIGURES_NS
        stored = view.figures.get(membership.member)
        if self.wanted is None or (stored is not None and stored.content == self.wanted):
            return
        key = view.keys.of_member(KeyKind.FIGURES, membership.member)
        txn = of_this_process(self._session, key, encode_record(self.wanted))
        self._meta.submit(txn, _written)


class OwnRecords:
    """All that a node writes of itself. It knows its own record once its ports are open."""

    def __init__(self, session: ClusterSession, meta: MetaStore, log: EventLog) -> None:
        self._view = session.view
        self._meta = meta
        self._record: OwnRecord
        self.clock = OwnClock(session, meta, log)
        self.figures = OwnFigures(session, meta)

    def begin(self, own: MemberRecord) -> None:
        """Others reach this node as this record says."""
        self._record = OwnRecord(self._view, own, self._meta)

    def tick(self, now_ns: int) -> None:
        """Let time pass: write what is due."""
        self._record.tick(now_ns)
        self.clock.tick(now_ns)
        self.figures.tick(now_ns)


def of_this_process(session: ClusterSession, key: bytes, value: bytes) -> Txn:
    """Return the transaction that writes a key of this process, and is gone with it."""
    membership, view = session.membership, session.view
    alive = view.keys.of_member(KeyKind.ALIVE, membership.member)
    compares = (
        # The lease of the alive key: a newer process of this member has another one.
        Compare(alive, CompareTarget.LEASE, membership.lease_id),
        if_unchanged(key, view.mod_revision(key)),
    )
    return Txn(compares, (Put(key, value, membership.lease_id),))


def _written(_result: StoreResult) -> None:
    """Do nothing: the next record says the same."""


_REMOVED_ADVICE: Final = (
    "Its data folder stays as it is. To let this node join again, start it with an empty --data "
    "folder"
)


class OwnMembership:
    """See the module. `name` is that of the node.

    Invariant: the core is told all partitions once, with the first look after the registration.
    """

    def __init__(
        self, session: ClusterSession, core: ReplicationCore, seen: SeenRecords, name: str
    ) -> None:
        self._session = session
        self._core = core
        self._seen = seen
        self._name = name
        self._enrolment = Enrolment(EnrolmentState.MEMBER)
        self.why_idle = ""
        """Why this node takes no part in the cluster; "": it does."""
        self._may_act = False

    def take_part(self, why_idle: str) -> None:
        """Register from now on, or do not, with the reason."""
        self.why_idle = why_idle
        self._session.membership.may_register = not why_idle

    def check(self) -> bool:
        """Return whether this process may act as the member. Raises MembershipOverError."""
        membership, view = self._session.membership, self._session.view
        if membership.state in {MembershipState.REPLACED, MembershipState.REFUSED}:
            if self._enrolment.state is EnrolmentState.MEMBER:
                self._enrolment.handle(EnrolmentEvent.REPLACED)
            raise MembershipOverError(membership.why_over)
        key = view.keys.of_member(KeyKind.MEMBER, membership.member)
        was_member = self._seen.revision_of(KeyKind.MEMBER, membership.member)
        if view.is_loaded and not view.mod_revision(key) and not was_member:
            raise NodeRemovedError(
                f"node {self._name} was removed from its cluster, and takes no further part. "
                f"{_REMOVED_ADVICE}"
            )
        if membership.has_registered and not self._may_act:
            self._may_act = True
            self._core.records_changed(elapsed_ns(), tuple(view.partitions))
        return self._may_act

    def stop(self) -> None:
        """The node stops."""
        self._enrolment.handle(EnrolmentEvent.STOPPED)
