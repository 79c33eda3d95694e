"""A node's lease in the metadata store, and the key that says that its process runs. Pure.

    ABSENT --- lease granted ----> ANNOUNCING --- key written --> ALIVE
    ANNOUNCING, ALIVE --- the lease may have run out ----------> ABSENT
    ALIVE --- the node is about to stop -----------------------> ANNOUNCING, with `is_leaving`
    any --- a newer process of this member runs ---------------> REPLACED (for good)
    any --- the node has handed over, and stops ---------------> LEFT (for good)

The member's other keys that have to vanish with it (its report, the leader's key) use this lease.
That it is held says "probably alive" to others, and to the member itself nothing: rights come from
records, and reads are fenced by the in-sync set.

Invariants
- `lease_id` is set only while the store may still hold the lease by this node's own clock: from the
  time before the last successful grant or keep-alive was asked for
- the alive key is written with a compare on the state that was read, so that a late write of an
  earlier process does not replace a newer one's
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, TypeAlias

from dcp.cluster.cluster_keys import ClusterKeys, KeyKind
from dcp.cluster.cluster_records import (
    AliveRecord,
    RecordUnreadableError,
    decode_record,
    encode_record,
)
from dcp.cluster.cluster_view import Stored
from dcp.cluster.effects import (
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
from dcp.cluster.metastore import (
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
KEEP_ALIVE_NS: Final = 1_000_000_000
"""How often the lease is renewed: a lease survives the loss of one renewal."""
MEMBERSHIP: Final = "membership"
_NS_PER_S: Final = 1_000_000_000

MembershipEffect: TypeAlias = StoreEffect | Notice


class MembershipState(Enum):
    """See the module."""

    ABSENT = auto()
    ANNOUNCING = auto()
    ALIVE = auto()
    REPLACED = auto()
    LEFT = auto()


_OVER: Final = frozenset({MembershipState.REPLACED, MembershipState.LEFT})


class Membership:
    """See the module. `incarnation` grows with every start of this member's process."""

    def __init__(self, keys: ClusterKeys, member: str, incarnation: int) -> None:
        self.member: Final = member
        self.incarnation: Final = incarnation
        self.state = MembershipState.ABSENT
        self.lease_id = 0
        """The lease to write keys under; 0: none."""
        self._key: Final = keys.of_member(KeyKind.ALIVE, member)
        self._lapses_ns = 0
        self._asked_ns = 0
        self._next_ns = 0
        self._seen_mod_revision = 0
        self._written_revision = 0
        """A view at or above this revision has the alive key."""
        self.is_leaving = False
        self._is_waiting = False
        self._tag = Tag(MEMBERSHIP, 0)

    @property
    def is_alive(self) -> bool:
        """Whether the alive key was written under the present lease."""
        return self.state is MembershipState.ALIVE

    def on_event(self, now_ns: int, event: StoreEvent) -> list[MembershipEffect]:
        """Take one event; return what to do."""
        if self.state in _OVER:
            return []
        effects = self._check_lapse(now_ns)
        if isinstance(event, Tick):
            if now_ns >= self._next_ns:
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
        if not self.is_alive or revision < self._written_revision:
            return []
        if own is None:  # somebody deleted it: the lease would have told with its next renewal
            self.state = MembershipState.ANNOUNCING
            self._seen_mod_revision, self._next_ns = 0, now_ns
            return [Notice(f"cluster: the key of member {self.member} is gone; writing it again")]
        if own.content.incarnation > self.incarnation:
            return self._replaced(own.content.incarnation)
        return []

    def _check_lapse(self, now_ns: int) -> list[MembershipEffect]:
        if not self.lease_id or now_ns < self._lapses_ns:
            return []
        return self._lose(now_ns, "it was not renewed in time")

    def _lose(self, now_ns: int, why: str) -> list[MembershipEffect]:
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
        return Submit(self._tag, self._request())

    def _request(self) -> StoreRequest:
        if self.state is MembershipState.ABSENT:
            return LeaseGrant(LEASE_TTL_S)
        if self.state is MembershipState.ALIVE:
            return LeaseKeepAlive(self.lease_id)
        record = AliveRecord(
            member=self.member, incarnation=self.incarnation, is_leaving=self.is_leaving
        )
        return Txn(
            (if_unchanged(self._key, self._seen_mod_revision),),
            (Put(self._key, encode_record(record), self.lease_id),),
            (Range(self._key),),
        )

    def _answered(self, now_ns: int, result: StoreResult) -> list[MembershipEffect]:
        if isinstance(result, LeaseResult):
            self.lease_id = result.lease_id
            self._lapses_ns = self._asked_ns + result.ttl_s * _NS_PER_S
            if self.state is MembershipState.ABSENT:
                self.state = MembershipState.ANNOUNCING
                self._next_ns = now_ns
                return [self._ask(now_ns)]
            self._next_ns = self._asked_ns + KEEP_ALIVE_NS
            return []
        if isinstance(result, TxnResult):
            return self._announced(now_ns, result)
        if isinstance(result, StoreRefused) and result.kind is RefusalKind.LEASE_NOT_FOUND:
            return self._lose(now_ns, result.text)
        return []  # unknown or unavailable: ask again after a pause; each request can be repeated

    def _announced(self, now_ns: int, result: TxnResult) -> list[MembershipEffect]:
        found = result.ranges[0].items if result.ranges else ()
        if result.succeeded or (found and self._is_ours(found[0])):
            self.state = MembershipState.ALIVE
            self._written_revision = result.revision
            self._next_ns = self._asked_ns + KEEP_ALIVE_NS
            return []
        try:
            incarnation = decode_record(found[0], AliveRecord).incarnation if found else -1
        except RecordUnreadableError as error:
            return [Notice(f"cluster: member {self.member} waits for its key: {error}")]
        self._seen_mod_revision = found[0].mod_revision if found else 0
        if incarnation <= self.incarnation:
            return [self._ask(now_ns)]
        return self._replaced(incarnation)

    def _replaced(self, incarnation: int) -> list[MembershipEffect]:
        self.state = MembershipState.REPLACED
        self.lease_id = 0
        return [
            Notice(
                f"cluster: member {self.member} runs as incarnation {incarnation}, and this process"
                f" is {self.incarnation}: it takes no further part. Stop one of the two processes,"
                " or give a copied data folder an id of its own"
            )
        ]

    def _is_ours(self, item: KeyValue) -> bool:
        return item.lease_id == self.lease_id
