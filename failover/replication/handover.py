"""Handovers to wanted masters, a few partitions at a time. Sans-IO.

    waiting ── there is room ──> HELD ── all is committed ──> written ──> FOLLOWED
                                  ├── not within HANDING_NS_MAX ──> given up, waits again later
                                  └── nor in a failover ──> the wanted master is elected

Writers of a partition wait from HELD on, until its new master serves. A node may have to hand over
a thousand partitions, and each costs work on every node. So only GROUP_MAX of them are on their way
at a time, or UNWRITTEN_GROUP_MAX that were never written: held, or handed over and not yet followed
here. The others are served meanwhile. After a group the cluster rests as long as the group took:
then what the group delayed is done before the next one delays more.

Partitions of which nothing waits for a commit come first: they are written in the step in which
they are held, so their writers do not wait for a commit. Others are held once hardly any are left.

An operator's failover does not wait for this node's own disk for ever: a master whose disk is full
cannot sync, and so not commit, its last changes, and is failed over because of that. Its record is
written as by an election: the wanted master is in sync, so it has all that is committed, and begins
a version. The last changes were not answered; their clients are told that they are ambiguous, and
they are cut off.

Who calls it: `failover.replication.master`.

Invariants
- a group has at most GROUP_MAX partitions, or UNWRITTEN_GROUP_MAX that were never written, and
  begins when none is on its way;
- a partition whose new master is not followed here within FOLLOWED_NS_MAX holds up nobody;
- a record is handed over only with all of the partition's changes committed. Without that, a member
  in sync is elected only if an operator wants this master to be replaced, and if all that is on its
  disk is committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from failover.coordinator.view import ClusterView
from failover.replication.effects import Steps
from failover.replication.mastership import Mastership
from failover.rules.replication_record import HandedOver, ReplicationRecord, elect, hand_over, want
from vbucket.engine.partition import Hold, Partition, VbState

GROUP_MAX: Final = 8
"""Partitions on their way. Writers of all of them wait for the whole group, most of whose time is
work for each partition: 16 take twice as long. Each group costs a transaction and a map for every
client; 1,024 partitions are handed over within some seconds."""
UNWRITTEN_GROUP_MAX: Final = 32
"""The same of partitions that were never written: hardly anybody waits for them, and a new cluster
has nothing else to hand over."""
GROUP_REST_NS_MAX: Final = 100_000_000
"""The longest rest after a group: a new master that stands still holds up the others anyway."""
DRAINED_MIN: Final = 4
"""With fewer partitions that can be handed over at once, others are held: a partition that is
written all the time has never committed all of its changes."""
HANDING_NS_MAX: Final = 2_000_000_000
"""A handover that has not happened after so long is given up, and tried again after REST_NS."""
STUCK_NS_MAX: Final = 200_000_000
"""The same once a failover has waited in vain: the other partitions wait for the same disk."""
REST_NS: Final = 500_000_000
"""How long writers go on in between."""
DRAINED_NS_MAX: Final = 30_000_000
"""How long the held partitions wait for each other's changes to be committed: they share a
transaction, and who misses it waits for the next one."""
FOLLOWED_NS_MAX: Final = 200_000_000
"""How long the next partitions wait for one that is handed over: its new master may be slow."""


class Handovers:
    """See the module."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._waiting: dict[int, None] = {}
        """Partitions to hand over, in turn."""
        self._next: frozenset[int] = frozenset()
        """Those of them that may be held now."""
        self._began_ns = 0
        """When the group began that is on its way."""
        self._paused_until_ns: int | None = None
        """No group begins before."""
        self._retry_ns: dict[int, int] = {}
        """Partition -> when it may be held again, because its handover was given up."""
        self._held: set[int] = set()
        """Writers of these wait, and this node is still the master."""
        self._handed: dict[int, int] = {}
        """Partition -> when its record was written, until its new master is followed here."""
        self._is_stuck = False
        """Whether a failover has waited in vain for a commit, and is not over."""

    @property
    def is_under_way(self) -> bool:
        """Whether any partition waits, is held, or is not followed yet."""
        return bool(self._waiting or self._held or self._handed)

    def hurry(self) -> None:
        """Ask for a step if any is under way: something has changed that it may wait for."""
        if self.is_under_way:
            self._steps.ask()

    def wait(self, vb_ids: Iterable[int]) -> None:
        """These are to be handed over, as soon as there is room."""
        for vb_id in vb_ids:
            if vb_id not in self._held and vb_id not in self._handed:
                self._waiting.setdefault(vb_id)

    def due(self, now_ns: int, masterships: Mapping[int, Mastership]) -> list[int]:
        """Return the partitions to look at: those that are held, or else those that come next."""
        if self._held:
            return list(self._held)
        is_paused = self._paused_until_ns is not None and now_ns < self._paused_until_ns
        if self._handed or is_paused:
            return []
        drained: list[int] = []
        others: list[int] = []
        unwritten: list[int] = []
        for vb_id in self._waiting:
            if self._retry_ns.get(vb_id, 0) > now_ns:
                continue
            mastership = masterships.get(vb_id)
            is_drained = mastership is None or _is_drained(mastership.part)
            (drained if is_drained else others).append(vb_id)
            if mastership is not None and not mastership.part.high_seqno:
                unwritten.append(vb_id)
        if len(unwritten) > GROUP_MAX:
            chosen = unwritten[:UNWRITTEN_GROUP_MAX]
        else:
            chosen = drained if len(drained) >= DRAINED_MIN or not others else others
            del chosen[GROUP_MAX:]
        for vb_id in chosen:  # who cannot be handed over now lets others pass
            self._waiting[vb_id] = self._waiting.pop(vb_id)
        self._next = frozenset(chosen)
        return chosen

    def may_write(self, now_ns: int, masterships: Mapping[int, Mastership]) -> bool:
        """Whether those that can be handed over now should be: all are drained, or time is up."""
        held = [masterships[vb_id] for vb_id in self._held if vb_id in masterships]
        return all(
            _is_drained(each.part) or now_ns - each.handing_since_ns >= DRAINED_NS_MAX
            for each in held
        )

    def next_record(
        self,
        mastership: Mastership,
        record: ReplicationRecord,
        now_ns: int,
        *,
        may_write: bool,
        is_failover: bool = False,
    ) -> ReplicationRecord | None:
        """Return the record after the handover to the wanted master; None: not yet, or not wanted.

        The record must be written, and the partition be fenced. With `may_write` False writers are
        held back, and that is all. `is_failover`: an operator wants this master to be replaced.
        """
        part, wanted = mastership.part, record.wanted_master
        if wanted is None or wanted not in record.isr or part.state != VbState.ACTIVE:
            self._release(mastership)
            self._waiting.pop(part.vb_id, None)
            return None
        if part.vb_id not in self._held:
            if part.vb_id not in self._next:
                self._waiting[part.vb_id] = None
                return None
            self._waiting.pop(part.vb_id, None)
            if not self._held and not self._handed:
                self._began_ns = now_ns
            self._held.add(part.vb_id)
        if not mastership.handing_since_ns:
            mastership.handing_since_ns = now_ns
            part.hold_writes(Hold.REPLICATION, mastership.why_writes_wait)
        held_ns = now_ns - mastership.handing_since_ns
        may_elect = is_failover and _waits_for_own_disk(part)
        if held_ns > HANDING_NS_MAX and not may_elect:
            self._retry_ns[part.vb_id] = now_ns + REST_NS
            self._release(mastership)
            return None
        is_drained = _is_drained(part)
        is_in_vain = held_ns > (STUCK_NS_MAX if self._is_stuck else HANDING_NS_MAX)
        if not may_write or not (is_drained or (may_elect and is_in_vain)):
            return None
        mastership.has_handed = True
        if is_drained:
            return hand_over(record, HandedOver(part.vb_uuid, part.high_seqno))
        self._is_stuck = True
        return elect(record, wanted)

    def _release(self, mastership: Mastership) -> None:
        mastership.handing_since_ns = 0
        self._held.discard(mastership.part.vb_id)

    def ended(self, vb_id: int, now_ns: int, *, is_handed: bool) -> None:
        """A partition has another master, or the handover was not written."""
        self._waiting.pop(vb_id, None)
        self._retry_ns.pop(vb_id, None)
        if vb_id in self._held:
            self._held.discard(vb_id)
            if is_handed:
                self._handed[vb_id] = now_ns
        self._is_stuck &= self.is_under_way

    def note_followed(self, now_ns: int, is_followed: Callable[[int], bool]) -> None:
        """Forget the partitions whose new master is followed here, or was not for too long. If the
        last one of a group is followed, the cluster rests.
        """
        if not self._handed:
            return
        has_followed = False
        for vb_id, since_ns in tuple(self._handed.items()):
            is_late = now_ns - since_ns >= FOLLOWED_NS_MAX
            if is_followed(vb_id) or is_late:
                del self._handed[vb_id]
                has_followed = not is_late
        # Nobody works off what a new master that stands still has delayed: no rest after its group.
        if has_followed and self._waiting and not self._handed and not self._held:
            self._paused_until_ns = now_ns + min(now_ns - self._began_ns, GROUP_REST_NS_MAX)

    def take_pause_end(self, now_ns: int) -> bool:
        """Return whether a rest is over, once: the next group may begin."""
        if self._paused_until_ns is None or now_ns < self._paused_until_ns:
            return False
        self._paused_until_ns = None
        return True

    def any_held(self, vb_ids: Iterable[int]) -> bool:
        """Whether writers of any of these partitions wait."""
        return not self._held.isdisjoint(vb_ids)


def _is_drained(part: Partition) -> bool:
    """Whether all of a partition's changes are committed."""
    return part.committed_seqno == part.high_seqno


def _waits_for_own_disk(part: Partition) -> bool:
    """Whether all that is on this node's disk is committed. What it has beyond that was answered to
    nobody, whatever answers wait for.
    """
    return part.committed_seqno == part.synced_seqno


class Successors:
    """Chooses a successor for each partition, so that each member gets about as many."""

    def __init__(self, view: ClusterView, member: str) -> None:
        self._view = view
        self._member = member
        self._given: Counter[str] = Counter()
        self.is_leaving = False
        """Whether this node hands over all that it has."""

    def able(self, record: ReplicationRecord) -> list[str]:
        """Return the members that could be the next master."""
        return [
            member
            for member in record.copies
            if member in record.isr and member != self._member and self._view.stays(member)
        ]

    def wanted(self, record: ReplicationRecord) -> ReplicationRecord:
        """Return the record with the member in sync that has been given the fewest partitions as
        the wanted master; without one if there is none.
        """
        able = self.able(record)
        if record.wanted_master in able:
            return record
        chosen = min(able, key=lambda member: self._given[member], default=None)
        if chosen is not None:
            self._given[chosen] += 1
        return want(record, chosen)
