"""Which partitions a master serves, until when their replicas have confirmed it, and why one is not
served; how those that follow it keep up, and who still counts after it has left. Sans-IO.

Most of the time nothing changes: all partitions are served, and the replicas go on confirming that.
Such partitions are *steady*. A look at each in-sync set and each feed says the same of them as one
at each of them, so nothing is done for each. A change of a record, of a replica's stream or of the
members that live makes the partitions that it concerns active, and no others. A partition of which
a copy is filled is steady, too, but for the ticks at which full copies may join.

Who calls it: `failover.replication.master`; sessions look at the partitions that arrive, and get
the text of a refusal.

Invariants
- clients are served only while the in-sync set confirms this master. Who is not served any more has
  its streams ended, so that a consumer that reaches only a deposed master notices;
- a partition that is not served gets no change, also no system event: it may be handed over with
  its end as of the fence. What is missing is added when it is served;
- a partition is not served before this node has read of the collections that the partition tells
  of: its record may be known here first. Streams would leave them out, and announce their drop;
- a steady partition is served, nothing is under way for its record, and the stream of each member
  in sync was confirmed. Nothing of that has changed since but the time of confirmations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from dcp.stream.hub import StreamHub
from failover.coordinator.clock import RanTime
from failover.coordinator.cluster_session import ClusterSession
from failover.coordinator.seen_records import SeenRecords
from failover.coordinator.view import ClusterView
from failover.replication.commit import OpenGroups
from failover.replication.effects import PartitionsArrived, ReplicationEffect
from failover.replication.feed import ReplicaFeed
from failover.replication.handover import GROUP_MAX
from failover.replication.mastership import Mastership, Service
from failover.replication.messages import NOT_SEEN, StoreSeen
from failover.replication.pace import LateMembers, allowance_ns, is_starved
from failover.replication.progress import SILENCE_NS_MAX
from failover.rules.isr import CONFIRMATION_NS, Lateness, confirmed_until_ns, may_answer_reads
from failover.rules.promotion import may_send_back
from vbucket.engine.engine import Engine
from vbucket.engine.leadership import knows_collections
from vbucket.engine.partition import Hold, Partition, VbState
from vbucket.store.environment import StoreDamagedError

LOOK_NS_PER_PARTITION: Final = 20_000
"""Pause between looks at partitions that are not served yet: ten times what a look costs."""
LOOK_AT_ONCE: Final = 2 * GROUP_MAX
"""So few are looked at whenever there may be news: a handover is under way."""
_SERVING: Final = Service.SERVING
_HANDING: Final = Service.HANDING


ARRIVAL_NS_MAX: Final = 100_000_000
"""How long after its record a partition is expected to be served. The median is 15 to 35 ms on two
busy cores; a disk or a replica that takes longer may take any time."""


class Arrivals:
    """Partitions that were handed over to this node, and that it serves in a moment.

        began ──> ARRIVING ── served, or another master, or ARRIVAL_NS_MAX is over ──> ended

    A client that has the new map may ask before the first commit group of the epoch is on disk
    here. Its request waits in its session (`ReplicationPort.arriving`) instead of being refused:
    the refusal would be sent behind the answers before it, and the request would come again after
    that. An end leaves an effect, so that the requests go on.

    Only a handover brings an arrival. After a failover a master may have to wait for confirmations
    to lapse, which takes longer than a request should wait. An arrival does not begin again in the
    same epoch.
    """

    def __init__(self, effects: list[ReplicationEffect]) -> None:
        self._effects = effects
        self._began_ns: dict[int, int] = {}
        self.vb_ids = self._began_ns.keys()
        """The partitions that are arriving; the same object for ever."""

    def began(self, vb_id: int, now_ns: int) -> None:
        """The record of a handover has made this node a partition's master."""
        self._began_ns[vb_id] = now_ns

    def ended(self, vb_id: int) -> None:
        """A partition is served, or has another master; nothing happens if it was not arriving."""
        if self._began_ns.pop(vb_id, None) is not None:
            self._tell()

    def expire(self, now_ns: int) -> None:
        """End the arrivals that take too long: requests are refused from now on."""
        overdue = [
            vb_id
            for vb_id, began_ns in self._began_ns.items()
            if now_ns - began_ns >= ARRIVAL_NS_MAX
        ]
        for vb_id in overdue:
            self.ended(vb_id)

    def _tell(self) -> None:
        """Leave one effect, however many partitions it is about."""
        if not any(isinstance(effect, PartitionsArrived) for effect in self._effects):
            self._effects.append(PartitionsArrived())


class Departures:
    """The partitions of a master where somebody still counts who has left the in-sync set.

    Such a member counts until all members of the newer set hold the record durably that says so
    (`failover.rules.isr.is_held`). The metadata store may go back to an older copy, in which it is
    in sync. Then each member of the newer set knows better.
    """

    def __init__(
        self,
        member: str,
        session: ClusterSession,
        kept: SeenRecords,
        masterships: Mapping[int, Mastership],
        feeds: Mapping[str, ReplicaFeed],
    ) -> None:
        self._member = member
        self._session = session
        self._kept = kept
        self._masterships = masterships
        self._feeds = feeds
        self._parting: set[int] = set()
        self.serves_by = NOT_SEEN
        """By which records of the store this node serves all that it masters."""

    def note(self, vb_id: int) -> None:
        """A partition has a newer record: members may have left its in-sync set by it."""
        if self._masterships[vb_id].has_parting:
            self._parting.add(vb_id)
            self._release((vb_id,))

    def release(self) -> list[int]:
        """More of the store's records is on disk, here or at a member: return the partitions where
        nobody counts any more who has left the in-sync set.
        """
        return self._release(tuple(self._parting)) if self._parting else []

    def _release(self, vb_ids: Iterable[int]) -> list[int]:
        seen = {
            member: feed.seen.revision
            for member, feed in self._feeds.items()
            if feed.seen.link == self._session.link_of(member)
        }
        seen[self._member] = self._kept.kept_revision
        masterships = self._masterships
        held = [
            vb_id
            for vb_id in vb_ids
            if vb_id not in masterships or masterships[vb_id].members_saw(seen)
        ]
        self._parting.difference_update(held)
        return [vb_id for vb_id in held if vb_id in masterships]

    def note_serving(self, seen: StoreSeen, *, serves_all: bool) -> None:
        """Note by which records of the store this node serves, if it serves by all of them."""
        if seen.link != self.serves_by.link:
            self.serves_by = NOT_SEEN
        if serves_all and not self._parting:
            self.serves_by = seen


class Followers:
    """How the members that follow a master keep up, all partitions of each taken together."""

    def __init__(
        self,
        member: str,
        ran: RanTime,
        lag_max_ns: int,
        feeds: Mapping[str, ReplicaFeed],
        groups: OpenGroups,
        now_ns: int,
    ) -> None:
        self._member = member
        self._ran = ran
        self._lag_max_ns = lag_max_ns
        self._feeds = feeds
        self._groups = groups
        self._late = LateMembers(lag_max_ns, now_ns)
        self._caught_up_ns: dict[str, int] = {}
        """When members had all that was synced here, in all partitions that they follow."""
        self._steady_ns: dict[str, int] = {}
        """The same as of the last tick, for partitions that were steady until then."""

    @property
    def allowance_ns(self) -> int:
        """How much later than usual a silent member leaves its in-sync set."""
        return allowance_ns(self._ran, self._lag_max_ns)

    def beat(self, now_ns: int) -> None:
        """Let feeds ask their replicas whether this node is still the master, where that is due."""
        silence_ns = self._ran.stretched(SILENCE_NS_MAX)
        for feed in tuple(self._feeds.values()):
            feed.heartbeat.silence_ns = silence_ns
            feed.tick(now_ns)

    def look_for_late(self, now_ns: int) -> Lateness:
        """Return who acknowledges late. A member that is filled is not judged meanwhile."""
        delays = {}
        for member, feed in self._feeds.items():
            if feed.inflights.delays.has_news and feed.streams.is_filling:
                feed.inflights.delays.take(now_ns)
            else:
                delays[member] = feed.inflights.delays
        return self._late.look(now_ns, delays, is_starved=is_starved(self._ran, now_ns))

    def any_in_sync(self, members: frozenset[str]) -> bool:
        """Whether any of these is in sync, in any partition."""
        return any(not members.isdisjoint(each.members) for each in self._groups.in_sync_sets())

    def note_caught_up(self, now_ns: int) -> bool:
        """Note who has caught up; return whether no member in sync lags, in any partition."""
        for member, feed in self._feeds.items():
            if feed.take_caught_up():
                self._caught_up_ns[member] = max(self._caught_up_ns.get(member, 0), feed.asked_ns)
        since_ns = now_ns - self._lag_max_ns - self.allowance_ns
        caught_up = {member for member, at_ns in self._caught_up_ns.items() if at_ns >= since_ns}
        caught_up.add(self._member)
        return all(in_sync.members <= caught_up for in_sync in self._groups.in_sync_sets())

    def take_steady(self) -> Mapping[str, int]:
        """Return when members had caught up as of the last tick, for partitions that were steady
        until then. Call it at every tick.
        """
        steady_ns, self._steady_ns = self._steady_ns, dict(self._caught_up_ns)
        return steady_ns


class Fence(NamedTuple):
    """Why a partition whose master this node is is fenced."""

    why: str
    missing: tuple[str, ...] = ()
    """Members in sync that do not confirm this master."""


class Unwritable(NamedTuple):
    """A partition whose master this node is, and that takes no writes now."""

    vb_id: int
    why: str
    missing: tuple[str, ...] = ()
    """Members in sync that do not confirm this master."""


class Serving:
    """See the module. `masterships`, `feeds` and `groups` are those of `Master`."""

    def __init__(
        self,
        engine: Engine,
        hub: StreamHub,
        view: ClusterView,
        member: str,
        masterships: Mapping[int, Mastership],
        feeds: Mapping[str, ReplicaFeed],
        groups: OpenGroups,
        effects: list[ReplicationEffect],
    ) -> None:
        self._engine = engine
        self._hub = hub
        self._view = view
        self._member = member
        self._masterships = masterships
        self._feeds = feeds
        self._groups = groups
        self.arrivals = Arrivals(effects)
        self.store_trouble = ""
        """Why the metadata store does not answer, as the shell saw it last; "": it does."""
        self.fence_ns: int | None = None
        """When the first partition is not confirmed any more; None: none is served so."""
        self._steady: set[int] = set()
        self._left: set[int] = set()
        """Partitions that were steady since their in-sync sets were looked at last."""
        self._filled: set[int] = set()
        """Partitions that were steady although a copy of them is filled."""
        self._alive: Mapping[str, object] = {}
        self._unserved: set[int] = set()
        """Partitions that were not served when they were looked at last."""
        self._look_ns = 0
        """When they are looked at again."""
        self.awaited: dict[int, int] = {}
        """Partition that has events of a newer manifest than this node -> the uid of this node's
        when they were compared."""
        self.unreadable: dict[int, str] = {}
        """Partition whose events of collections cannot be read -> why. It waits to be mended."""

    # -- what changes ------------------------------------------------------------------------------

    def began(self, vb_id: int, handed_over_ns: int | None) -> None:
        """A partition has its master here; `handed_over_ns` is when it was handed over to it."""
        self._unserved.add(vb_id)
        if handed_over_ns is not None:
            self.arrivals.began(vb_id, handed_over_ns)

    def ended(self, vb_id: int) -> None:
        """A partition has not its master here any more."""
        self._unserved.discard(vb_id)
        self.awaited.pop(vb_id, None)
        self.unreadable.pop(vb_id, None)
        self.arrivals.ended(vb_id)
        self._steady.discard(vb_id)
        self._left.discard(vb_id)

    def changed(self, vb_id: int) -> None:
        """A partition is not steady any more."""
        if vb_id in self._steady:
            self._steady.discard(vb_id)
            self._left.add(vb_id)

    def all_changed(self) -> None:
        """No partition is steady any more."""
        self._left |= self._steady
        self._steady.clear()

    def _note_changes(self) -> None:
        for feed in self._feeds.values():
            for vb_id in feed.streams.changes.take():
                self.changed(vb_id)
        alive = dict.fromkeys(self._view.alive)
        if alive != self._alive:
            self._alive = alive
            self.all_changed()

    # -- what is known -----------------------------------------------------------------------------

    @property
    def has_unserved(self) -> bool:
        """Whether a partition was not served when it was looked at last."""
        return bool(self._unserved)

    def active(self, *, may_fill: bool = False) -> set[int]:
        """Return the partitions that are not steady. `may_fill`: those of which a copy is filled
        are not, because it may join if it is full.
        """
        self._note_changes()
        if may_fill:
            for vb_id in self._filled:
                self.changed(vb_id)
            self._filled.clear()
        return self._masterships.keys() - self._steady

    def take_left(self) -> set[int]:
        """Return the partitions that were steady since this was called last."""
        left, self._left = self._left, set()
        return left

    def confirmations(
        self, mastership: Mastership, members: Iterable[str] | None = None
    ) -> dict[str, int]:
        """Return member -> when it was asked the question that it confirmed last, of `members`;
        None: of those that are in sync.
        """
        vb_id, feeds = mastership.part.vb_id, self._feeds
        asked: dict[str, int] = {}
        for member in mastership.isr if members is None else members:
            if (feed := feeds.get(member)) is not None:
                asked_ns = feed.confirmed_ns(vb_id)
                if asked_ns is not None:
                    asked[member] = asked_ns
        return asked

    # -- looks -------------------------------------------------------------------------------------

    def serve(self, now_ns: int) -> None:
        """Let each partition serve what it may, and find the next fence."""
        self.fence_ns = None
        active = self.active()
        if self._steady and not self._serve_on(now_ns):
            self.all_changed()
            active = set(self._masterships)
        for vb_id in active:
            mastership = self._masterships[vb_id]
            service = self._look_at(mastership, now_ns)
            if service is Service.SERVING and mastership.is_steady(self._alive):
                self._steady.add(vb_id)
                if mastership.record.filling:
                    self._filled.add(vb_id)

    def serve_more(self, now_ns: int) -> None:
        """Let partitions serve that are not served yet, if there is news of them."""
        if now_ns >= self._look_ns:
            if len(self._unserved) > LOOK_AT_ONCE:
                self._look_ns = now_ns + LOOK_NS_PER_PARTITION * len(self._unserved)
            for vb_id in tuple(self._unserved):
                self._look_at(self._masterships[vb_id], now_ns)

    def _serve_on(self, now_ns: int) -> bool:
        """Find the next fence of the steady partitions; False: some must not be served."""
        asked = {member: feed.asked_ns for member, feed in self._feeds.items()}
        for in_sync, vb_ids in self._groups.in_sync_sets().items():
            if self._steady.isdisjoint(vb_ids):
                continue
            until_ns = confirmed_until_ns(self._member, in_sync.members, asked)
            if not may_answer_reads(now_ns, until_ns):
                return False
            self._fence_at(until_ns)
        return True

    def _fence_at(self, until_ns: int | None) -> None:
        if until_ns is not None:
            self.fence_ns = until_ns if self.fence_ns is None else min(self.fence_ns, until_ns)

    def _look_at(self, mastership: Mastership, now_ns: int) -> Service | None:
        """Let one partition serve what it may; note when it is fenced."""
        until_ns = mastership.confirmed_until_ns(self.confirmations(mastership))
        service = mastership.service(now_ns, until_ns)
        is_served = service is _SERVING or service is _HANDING
        if is_served and not self._knows_collections(mastership.part):
            service, is_served = Service.REPLAYING, False
        self._set_service(mastership, service, is_served=is_served)
        if is_served:
            self._unserved.discard(mastership.part.vb_id)
            self._fence_at(until_ns)
        else:
            self._unserved.add(mastership.part.vb_id)
        return service

    def _knows_collections(self, part: Partition) -> bool:
        """Whether this node has read of the collections of a partition that it is to serve."""
        if part.state == VbState.ACTIVE:
            return True
        uid = self._engine.keyspace.manifest.uid
        if self.awaited.get(part.vb_id) == uid:
            return False
        try:
            is_known = knows_collections(self._engine, part.vb_id)
            self._engine.keyspace.check_system_events(part)
        except StoreDamagedError as error:
            self.unreadable[part.vb_id] = str(error)
            return False
        self.unreadable.pop(part.vb_id, None)
        if not is_known:
            self.awaited[part.vb_id] = uid
            return False
        self.awaited.pop(part.vb_id, None)
        return True

    def _set_service(
        self, mastership: Mastership, service: Service | None, *, is_served: bool
    ) -> None:
        part = mastership.part
        was_active = part.state == VbState.ACTIVE
        part.may_send_back = may_send_back(
            is_master=service is not Service.PREPARING, hw_seqno=part.committed_seqno,
            epoch_start_seqno=mastership.epoch_start_seqno,
        )  # fmt: skip
        if is_served and not was_active:
            part.state = VbState.ACTIVE
            self._engine.keyspace.tell_missing_events(part)
            self.arrivals.ended(part.vb_id)
        elif was_active and not is_served:
            self.fence(part)
        why = mastership.why_writes_wait if is_served else ""
        if why:
            part.hold_writes(Hold.REPLICATION, why)
        else:
            part.release_writes(Hold.REPLICATION)

    def fence(self, part: Partition) -> None:
        """Let a partition serve nobody, and end its streams."""
        part.state = VbState.FENCED
        self._hub.fenced(part.vb_id)

    # -- why a partition is not served -------------------------------------------------------------

    def fence_of(self, mastership: Mastership, now_ns: int) -> Fence:
        """Return why a partition that is fenced serves nobody."""
        if not mastership.is_ready:
            return Fence("the beginning of the new master's epoch is not on disk yet")
        if mastership.has_handed:
            return Fence("another node becomes the partition's master")
        if missing := self._missing(mastership, now_ns):
            why = "a copy in sync does not confirm the master, so it may answer nothing"
            return Fence(why, missing)
        if damage := self.unreadable.get(mastership.part.vb_id):
            return Fence(f"what it has of collections is damaged, and waits to be mended: {damage}")
        if mastership.part.vb_id in self.awaited:
            return Fence("the master has not read of all collections in the metadata store yet")
        return Fence("the new master waits until copies in sync have caught up")

    def why_fenced(self, vb_id: int, now_ns: int) -> str:
        """Return why a partition is fenced in words for clients; "" if this is not its master."""
        mastership = self._masterships.get(vb_id)
        if mastership is None:
            return ""
        why, missing = self.fence_of(mastership, now_ns)
        if not missing:
            return why
        members = self._view.members
        names = [members[each].content.name if each in members else each for each in missing]
        text = f"no confirmation from {', '.join(names)} for a while that this node is its master"
        if self.store_trouble:
            text += "; no copy can leave the in-sync set while the metadata store is away"
        return text

    def _missing(self, mastership: Mastership, now_ns: int) -> tuple[str, ...]:
        """Return the members in sync that have not confirmed this master in time."""
        vb_id = mastership.part.vb_id
        late = []
        for other in sorted(mastership.isr - {self._member}):
            feed = self._feeds.get(other)
            confirmed_ns = None if feed is None else feed.confirmed_ns(vb_id)
            if confirmed_ns is None or now_ns - confirmed_ns >= CONFIRMATION_NS:
                late.append(other)
        return tuple(late)

    def unwritable(self, now_ns: int) -> Iterator[Unwritable]:
        """Yield the partitions of this master that take no writes now, and why."""
        for vb_id, mastership in self._masterships.items():
            part = mastership.part
            if part.state == VbState.ACTIVE:
                if part.holds:
                    yield Unwritable(vb_id, next(iter(part.holds.values())))
            else:
                yield Unwritable(vb_id, *self.fence_of(mastership, now_ns))
