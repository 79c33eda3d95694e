"""A node's lease and keys in the metadata store, and its report of masters that it does not
hear. Pure.

**The lease**, and the keys that say that the process runs.

    ABSENT --- lease granted ----------------------------------> ANNOUNCING
    ANNOUNCING --- keys written -------------------------------> ALIVE
    ANNOUNCING --- another process has one of them ------------> ANNOUNCING: it waits for its lease
    ANNOUNCING --- that process renews its lease --------------> REFUSED (for good)
    ANNOUNCING, ALIVE --- the lease may have run out ----------> ABSENT
    ALIVE --- the node is about to stop -----------------------> ANNOUNCING, with `is_leaving`
    any --- a newer process of this member runs ---------------> REPLACED (for good)
    any --- the node has handed over, and stops ---------------> LEFT (for good)

The keys are the member's, and one for each address that it is reached at. So two processes that
live never share a member (a copied data folder) or an address. A process that finds the key of an
earlier one of the same folder takes it over at once: it has the folder's lock, so that one is dead.

The member's other keys that have to vanish with it (its report, the leader's key) use this lease.
That it is held says "probably alive" to others, and to the member itself nothing: rights come from
records, and reads are fenced by the in-sync set.

Invariants
- `lease_id` is set only while the store may still hold the lease by this node's own clock: from the
  time before the last successful grant or keep-alive was asked for. Time in which this process did
  not run is not counted: it asks first what became of the lease, because something else may have
  renewed it (`etcd_lease_thread`), or the store stood still as well
- an answer to any keep-alive of the lease counts, also one that comes late
- the keys are written in one transaction, with compares on the state that was read, so that a late
  write of an earlier process does not replace a newer one's

**The report**: the partitions whose master this member does not hear.

The report is one key under the member's lease. While it names partitions it is written again every
REPEAT_NS, because a report counts for a bounded time only
(`failover.rules.election.REPORT_VALID_NS`).

Each write compares the key's mod revision, and the key is not deleted: a report without partitions
takes its place. So a write that comes late cannot bring an old report back.

A report is written again after the keys that say that the process runs, and over a new connection
only when the node has looked at the records that the store has. So a report that is newer than the
member's alive key says what the member knows of this store, also where it names nothing.

Who calls it: the node's session with the store.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, NamedTuple, TypeAlias

from failover.coordinator.clock import RanTime
from failover.coordinator.effects import (
    ANSWER_NS_MAX,
    RETRY_NS,
    Answered,
    Notice,
    StoreEffect,
    StoreEvent,
    Submit,
    Tag,
    Tick,
)
from failover.coordinator.records import (
    AliveRecord,
    ClusterKeys,
    KeyKind,
    MemberReport,
    RecordUnreadableError,
    ReportedPartition,
    decode_record,
    encode_record,
)
from failover.coordinator.view import Stored
from failover.metadata.metastore import (
    KeyValue,
    LeaseGrant,
    LeaseKeepAlive,
    LeaseResult,
    LeaseRevoke,
    Put,
    Range,
    RefusalKind,
    StoreRefused,
    StoreRequest,
    StoreResult,
    Txn,
    TxnResult,
    if_unchanged,
)

LEASE_TTL_S: Final = 3
"""How long a dead node's keys stay. etcd grants no less than 2 s; one more for a missed renewal."""
RENEWALS: Final = 3
"""How often a lease is renewed in its time: it survives the loss of one renewal."""
LATE_RENEWALS: Final = 2
"""A renewal is late if the lease has less than a third of its time left by then."""
BLOCKED_LEASES: Final = 3
"""For so many leases a process waits for the keys of another one. A store that restarts gives every
lease its whole time again, so one is not enough."""
BLOCKED_RETRY_NS: Final = 200_000_000
"""Time between two looks at them."""
MEMBERSHIP: Final = "membership"
_COPY_ADVICE: Final = (
    "Stop one of the two. To run both, start this one with an empty --data folder and join it as a "
    "node of its own"
)
_ADDRESS_ADVICE: Final = (
    "Give this node other ports (--port, --admin-port) or its own host (--advertise-host), or stop "
    "that one"
)
_NS_PER_S: Final = 1_000_000_000

MembershipEffect: TypeAlias = StoreEffect | Notice


class ProcessFacts(NamedTuple):
    """What a process tells about itself. The shell knows it, and does not change it."""

    place: str = "here"
    """Names the data folder on this machine since its boot: who has it also has the lock of the
    folder. "": not known."""
    name: str = ""
    """The node's name, for messages."""
    protocol: int = 1
    """The newest version of the replication messages."""
    oldest_protocol: int = 1
    addresses: tuple[str, ...] = ()
    """HOST:PORT of each port that others reach the node at, the key-value port first."""


class MembershipState(Enum):
    """See the module."""

    ABSENT = auto()
    ANNOUNCING = auto()
    ALIVE = auto()
    REFUSED = auto()
    REPLACED = auto()
    LEFT = auto()


_OVER: Final = frozenset({MembershipState.REFUSED, MembershipState.REPLACED, MembershipState.LEFT})


class Renewals:
    """How a lease is kept, and whether the store may still hold it by this node's own clock: the
    module has the invariants.
    """

    def __init__(self, keep_alive_ns: int) -> None:
        """`keep_alive_ns`: the lease is to be renewed so often."""
        self.keep_alive_ns: Final = keep_alive_ns
        self.late = 0
        """How often a renewal was answered after LATE_RENEWALS times its interval, or not at
        all."""
        self._ran: RanTime | None = None
        """From the first tick on."""
        self._kept_ns = 0
        """When the last grant or keep-alive that was answered was asked for."""
        self._ttl_ns = 0
        self._keeping: dict[Tag, int] = {}
        """Keep-alives of the present lease without an answer, and when they were asked for."""

    def tick(self, now_ns: int) -> None:
        """Let time pass: this process runs."""
        self._ran = self._ran or RanTime(now_ns)
        self._ran.tick(now_ns)

    def has_lapsed(self, now_ns: int) -> bool:
        """Whether the lease may have run out."""
        assert self._ran is not None
        return now_ns - self._kept_ns - self._ran.lost_since(self._kept_ns) >= self._ttl_ns

    def asked(self, tag: Tag, now_ns: int) -> None:
        """A keep-alive is asked for."""
        self._keeping[tag] = now_ns

    def answered(self, tag: Tag, now_ns: int) -> None:
        """A grant or a keep-alive was answered, perhaps late."""
        asked_ns = self._keeping.get(tag)
        if asked_ns is not None:
            self.late += now_ns - self._kept_ns > LATE_RENEWALS * self.keep_alive_ns
            self._kept_ns = max(self._kept_ns, asked_ns)
            self._keeping = {each: ns for each, ns in self._keeping.items() if ns > asked_ns}

    def kept(self, asked_ns: int, ttl_ns: int) -> None:
        """The lease holds for its whole time from when this was asked for."""
        self._ttl_ns = ttl_ns
        self._kept_ns = max(self._kept_ns, asked_ns)

    def lost(self) -> None:
        """The lease is over, or may be."""
        self._keeping.clear()
        self.late += 1


class Membership:
    """See the module. `incarnation` grows with every start of this member's process."""

    def __init__(
        self,
        keys: ClusterKeys,
        member: str,
        incarnation: int,
        *,
        lease_s: int = LEASE_TTL_S,
        facts: ProcessFacts | None = None,
    ) -> None:
        self.member: Final = member
        self.incarnation: Final = incarnation
        self.state = MembershipState.ABSENT
        self.lease_id = 0
        """The lease to write keys under; 0: none."""
        self.why_over = ""
        """Why the process takes no further part, where it is REFUSED or REPLACED."""
        self.may_register = True
        """Whether the node can do what a member does: a disk without room cannot."""
        self.has_registered = False
        """Whether the keys were ever written. Before that the process must not act as the
        member."""
        self._lease_s: Final = lease_s
        self.lease_ns: Final = lease_s * _NS_PER_S
        self.renewals: Final = Renewals(self.lease_ns // RENEWALS)
        self._cluster_keys: Final = keys
        self._key: Final = keys.of_member(KeyKind.ALIVE, member)
        self._facts = ProcessFacts()
        self._seen: dict[bytes, int] = {}
        """The mod revision that each key has, as far as this process has read."""
        self._blocked_since_ns = 0
        """Since when another process has one of the keys; 0: none has."""
        self._asked_ns = 0
        self._next_ns = 0
        self.written_revision = 0
        """A view at or above this revision has the alive key."""
        self.is_leaving = False
        self._link = 0
        """See `AliveRecord.link`."""
        self._is_waiting = False
        self._tag = Tag(MEMBERSHIP, 0)
        self.introduce(facts or ProcessFacts())

    def introduce(self, facts: ProcessFacts) -> None:
        """Say what the process is, before the first event."""
        assert self.state is MembershipState.ABSENT
        assert not self._is_waiting
        self._facts = facts
        addresses = map(self._cluster_keys.of_address, facts.addresses)
        self._seen = dict.fromkeys((self._key, *addresses), 0)

    @property
    def is_alive(self) -> bool:
        """Whether the alive key was written under the present lease."""
        return self.state is MembershipState.ALIVE

    def on_event(self, now_ns: int, event: StoreEvent) -> list[MembershipEffect]:
        """Take one event; return what to do."""
        if self.state in _OVER:
            return []
        if isinstance(event, Answered) and isinstance(event.result, LeaseResult):
            self.renewals.answered(event.tag, now_ns)
        effects: list[MembershipEffect] = []
        if isinstance(event, Tick):
            self.renewals.tick(now_ns)
            if self.lease_id and self.renewals.has_lapsed(now_ns):
                effects = self._lose(now_ns, "it was not renewed in time")
            if now_ns >= self._next_ns and self.may_register:
                effects.append(self._ask(now_ns))
        elif isinstance(event, Answered) and event.tag == self._tag and self._is_waiting:
            self._is_waiting = False
            self._next_ns = now_ns + RETRY_NS
            effects += self._answered(now_ns, event.result)
        return effects

    def begin_to_leave(self, now_ns: int) -> None:
        """Let the others know that this process is about to stop."""
        self.is_leaving = True
        if self.state is MembershipState.ALIVE:
            self.state = MembershipState.ANNOUNCING
            self._is_waiting, self._next_ns = False, now_ns

    def begin_again(self, now_ns: int, link: int) -> None:
        """There is a new connection to the store, with this name: tell it in the keys."""
        self._link = link
        if self.state in {MembershipState.ALIVE, MembershipState.ANNOUNCING}:
            self.state = MembershipState.ANNOUNCING
            self._is_waiting, self._next_ns = False, now_ns

    def leave(self) -> list[MembershipEffect]:
        """End the lease, and take no further part."""
        if self.state in _OVER:
            return []
        lease_id, self.lease_id = self.lease_id, 0
        self.state = MembershipState.LEFT
        self._tag = Tag(MEMBERSHIP, self._tag.number + 1)
        return [Submit(self._tag, LeaseRevoke(lease_id))] if lease_id else []

    def see(
        self, now_ns: int, own: Stored[AliveRecord] | None, revision: int
    ) -> list[MembershipEffect]:
        """Take what a view at a revision has under this member's alive key."""
        if not self.is_alive or revision < self.written_revision:
            return []
        if own is None:  # somebody deleted it: the lease would have told with its next renewal
            self.state = MembershipState.ANNOUNCING
            self._seen[self._key], self._next_ns = 0, now_ns
            return [Notice(f"cluster: the key of member {self.member} is gone; writing it again")]
        if own.content.incarnation > self.incarnation:
            return self._replaced(own.content)
        return []

    def _lose(self, now_ns: int, why: str) -> list[MembershipEffect]:
        self.renewals.lost()
        text = f"cluster: lease {self.lease_id} of member {self.member} is over: {why}"
        self.state = MembershipState.ABSENT
        self.lease_id = 0
        self._is_waiting = False
        self._next_ns = now_ns
        return [Notice(text)]

    def _ask(self, now_ns: int) -> Submit:
        self._tag = Tag(MEMBERSHIP, self._tag.number + 1)
        self._is_waiting = True
        self._asked_ns = now_ns
        self._next_ns = now_ns + ANSWER_NS_MAX
        request = self._request()
        if isinstance(request, LeaseKeepAlive):
            self.renewals.asked(self._tag, now_ns)
        return Submit(self._tag, request)

    def _request(self) -> StoreRequest:
        if self.state is MembershipState.ABSENT:
            return LeaseGrant(self._lease_s)
        if self.state is MembershipState.ALIVE:
            return LeaseKeepAlive(self.lease_id)
        value = self._value()
        return Txn(
            tuple(if_unchanged(key, seen) for key, seen in self._seen.items()),
            tuple(Put(key, value, self.lease_id) for key in self._seen),
            tuple(map(Range, self._seen)),
        )

    def _value(self) -> bytes:
        facts = self._facts
        record = AliveRecord(
            member=self.member, incarnation=self.incarnation, is_leaving=self.is_leaving,
            name=facts.name, place=facts.place, protocol=facts.protocol,
            oldest_protocol=facts.oldest_protocol,
            address=facts.addresses[0] if facts.addresses else "", link=self._link,
        )  # fmt: skip
        return encode_record(record)

    def _answered(self, now_ns: int, result: StoreResult) -> list[MembershipEffect]:
        if isinstance(result, LeaseResult):
            self.lease_id = result.lease_id
            self.renewals.kept(self._asked_ns, result.ttl_s * _NS_PER_S)
            if self.state is MembershipState.ABSENT:
                self.state = MembershipState.ANNOUNCING
                self._next_ns = now_ns
                return [self._ask(now_ns)]
            self._next_ns = self._asked_ns + self.renewals.keep_alive_ns
            return []
        if isinstance(result, TxnResult):
            return self._announced(now_ns, result)
        if isinstance(result, StoreRefused) and result.kind is RefusalKind.LEASE_NOT_FOUND:
            return self._lose(now_ns, result.text)
        return []  # unknown or unavailable: ask again after a pause; each request can be repeated

    # -- the keys ----------------------------------------------------------------------------------

    def _announced(self, now_ns: int, result: TxnResult) -> list[MembershipEffect]:
        if result.succeeded:
            self._seen = dict.fromkeys(self._seen, result.revision)
            return self._registered(result.revision)
        found: dict[bytes, KeyValue] = {}
        for key, read in zip(self._seen, result.ranges, strict=True):
            found.update((key, item) for item in read.items)
        self._seen = {
            key: found[key].mod_revision if key in found else 0 for key in self._seen
        }  # fmt: skip
        value = self._value()
        own = found.get(self._key)
        if own is not None and own.lease_id == self.lease_id and own.value == value:
            return self._registered(result.revision)  # an earlier attempt, whose answer was lost
        for item in found.values():
            try:
                holder = decode_record(item, AliveRecord)
            except RecordUnreadableError as error:
                self._seen = dict.fromkeys(self._seen, 0)
                return [Notice(f"cluster: member {self.member} waits for its key: {error}")]
            if holder.member == self.member and holder.incarnation > self.incarnation:
                return self._replaced(holder)
            if not self._is_over(holder):
                return self._blocked(now_ns, item, holder)
        return [self._ask(now_ns)]

    def _is_over(self, holder: AliveRecord) -> bool:
        """Whether the process that wrote a key has ended, or is this one."""
        if holder.member != self.member:
            return False
        if holder.incarnation == self.incarnation:
            return holder.place == self._facts.place
        return bool(holder.place) and holder.place == self._facts.place

    def _registered(self, revision: int) -> list[MembershipEffect]:
        self.state = MembershipState.ALIVE
        self.has_registered = True
        self.written_revision = revision
        self._blocked_since_ns = 0
        self._next_ns = self._asked_ns + self.renewals.keep_alive_ns
        return []

    def _blocked(self, now_ns: int, item: KeyValue, holder: AliveRecord) -> list[MembershipEffect]:
        """Another process has a key: it may be dead, and then its lease ends."""
        self._next_ns = now_ns + BLOCKED_RETRY_NS
        self._seen = dict.fromkeys(self._seen, 0)  # no key of the other one is written over
        patience_s = BLOCKED_LEASES * self._lease_s
        what, advice = self._conflict(item, holder)
        if not self._blocked_since_ns:
            self._blocked_since_ns = now_ns
            return [
                Notice(f"cluster: {what}. Waiting up to {patience_s} s for the end of its lease")
            ]
        if now_ns - self._blocked_since_ns < patience_s * _NS_PER_S:
            return []
        why = f"{what}, and still renews its lease after {patience_s} s. {advice}"
        return self._end(MembershipState.REFUSED, why)

    def _conflict(self, item: KeyValue, holder: AliveRecord) -> tuple[str, str]:
        """Return what another process has, and what to try."""
        who = f"node {holder.name or holder.member}"
        where = f" at {holder.address}" if holder.address else ""
        if holder.member == self.member:
            return (
                f"another process runs as {who}{where}, with a copy of this data folder",
                _COPY_ADVICE,
            )
        address = item.key[len(self._cluster_keys.of_address("")) :].decode("utf-8", "replace")
        return f"{who} of this cluster has the address {address}", _ADDRESS_ADVICE

    def _replaced(self, newer: AliveRecord) -> list[MembershipEffect]:
        where = f" at {newer.address}" if newer.address else ""
        return self._end(
            MembershipState.REPLACED,
            f"a newer process{where} is member {self.member} of the cluster now, with this data "
            f"folder or a copy of it (incarnation {newer.incarnation}, here {self.incarnation}). "
            f"{_COPY_ADVICE}",
        )

    def _end(self, state: MembershipState, why: str) -> list[MembershipEffect]:
        self.state, self.why_over = state, why
        lease_id, self.lease_id = self.lease_id, 0
        self._tag = Tag(MEMBERSHIP, self._tag.number + 1)
        effects: list[MembershipEffect] = [Notice(f"cluster: {why}")]
        if lease_id:
            effects.append(Submit(self._tag, LeaseRevoke(lease_id)))
        return effects


REPEAT_NS: Final = 500_000_000
"""How often a report is repeated: four times while it counts."""
REPORTER: Final = "reporter"

ReporterEffect: TypeAlias = StoreEffect


class SuspectReporter:
    """See the module."""

    def __init__(self, keys: ClusterKeys, membership: Membership) -> None:
        self._membership = membership
        self._key = keys.of_member(KeyKind.SUSPECT, membership.member)
        self._wanted: tuple[ReportedPartition, ...] | None = None
        """None: the node has not looked at what the present store has."""
        self._written: tuple[ReportedPartition, ...] | None = None
        """What the store has under the present lease; None: unknown."""
        self._lease_id = 0
        self._mod_revision = 0
        self._asked: tuple[ReportedPartition, ...] = ()
        self._is_waiting = False
        self._next_ns = 0
        """When a missing answer counts as none, or when to write again."""
        self._tag = Tag(REPORTER, 0)

    def report(
        self, now_ns: int, partitions: tuple[ReportedPartition, ...]
    ) -> list[ReporterEffect]:
        """Take the partitions to report from now on, with their present ends; () for none."""
        self._wanted = partitions
        return self._step(now_ns)

    def begin_again(self) -> None:
        """The store may be another one: what it has of this member's report is not known, and what
        the node knows better than this store it has to say anew.
        """
        self._written = self._wanted = None

    def on_event(self, now_ns: int, event: StoreEvent) -> list[ReporterEffect]:
        """Take one event; return what to do."""
        if isinstance(event, Answered) and event.tag == self._tag and self._is_waiting:
            self._is_waiting = False
            self._answered(now_ns, event)
        elif isinstance(event, Tick) and self._is_waiting and now_ns >= self._next_ns:
            self._is_waiting, self._written = False, None
        return self._step(now_ns)

    def _answered(self, now_ns: int, event: Answered) -> None:
        result = event.result
        self._written = None
        if not isinstance(result, TxnResult):
            self._next_ns = now_ns + RETRY_NS
        elif result.succeeded:
            self._written = self._asked
            self._mod_revision = result.revision
            self._next_ns = now_ns + REPEAT_NS
        else:
            found = result.ranges[0].items
            self._mod_revision = found[0].mod_revision if found else 0
            self._next_ns = now_ns

    def _step(self, now_ns: int) -> list[ReporterEffect]:
        if self._is_waiting or self._wanted is None or not self._membership.is_alive:
            return []
        if self._membership.lease_id != self._lease_id:
            self._lease_id, self._written, self._next_ns = self._membership.lease_id, None, now_ns
        if self._written is not None and self._mod_revision < self._membership.written_revision:
            self._written, self._next_ns = None, now_ns
        has_news = self._written is not None and self._wanted != self._written
        must_repeat = self._written is None or bool(self._wanted)
        if has_news or (must_repeat and now_ns >= self._next_ns):
            return [self._submit(now_ns, self._wanted)]
        return []

    def _submit(self, now_ns: int, wanted: tuple[ReportedPartition, ...]) -> Submit:
        self._tag = Tag(REPORTER, self._tag.number + 1)
        self._is_waiting = True
        self._asked = wanted
        self._next_ns = now_ns + ANSWER_NS_MAX
        report = MemberReport(member=self._membership.member, partitions=wanted)
        put = Put(self._key, encode_record(report), self._lease_id)
        compare = if_unchanged(self._key, self._mod_revision)
        return Submit(self._tag, Txn((compare,), (put,), (Range(self._key),)))
