"""The metadata store of a cluster: etcd's data model as requests, results and watch messages.

The store keeps a few thousand small records and orders their changes. It is not in the path of
document writes. Who calls it: a node's session with the store; etcd, the embedded store and the
store in memory implement it. `tests/failover/metadata/metastore_suite.py` is the conformance suite
that every implementation passes.

The model
- A global revision counts transactions that change something. It begins at 1, before any change.
- A key has a create revision, a mod revision, a version (1 when created, then one more for each
  put) and a lease (0: none). An absent key compares as 0 in each of them.
- A transaction compares, then runs one of two lists of operations, all at one revision.
- A lease has a time to live. When it runs out, its keys are deleted, all at one revision.
- A watch delivers every change of a prefix from a revision on, one batch for each revision.

Rules for callers
- A lease says "probably alive", never "the only one". After a restart of the store every lease has
  its whole time again. So every write compares: the create revision of the writer's own key, and
  the mod revision of the record that it read.
- A transaction without an answer may have happened, or may still happen. `OutcomeUnknown` says so.
  Write an operation id into the record, read it back, and decide then. Do not repeat the write.
- A watch position moves only with delivered batches: after `Lost`, watch again from the last
  delivered revision + 1. After `Compacted`, read the prefix again and watch from the revision of
  that read + 1.

Rules for implementations
- `done` is called once for each request, later and not from inside `submit`. A request that gets no
  answer within the implementation's deadline ends as OutcomeUnknown.
- `deliver` is called later and not from inside `watch`. After Compacted, Lost or `cancel` it is not
  called again.
- StoreRefused and StoreUnavailable mean that nothing happened and that nothing will.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple, Protocol, TypeAlias

TXN_OPERATIONS_MAX: Final = 128
"""Compares, and operations of each list, in one transaction (etcd's --max-txn-ops)."""
REQUEST_BYTES_MAX: Final = 1_572_864
"""Keys and values of one request together (etcd's --max-request-bytes)."""
FIRST_REVISION: Final = 1
"""The revision of an empty store."""


class KeyValue(NamedTuple):
    """A key as the store holds it."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease_id: int = 0


# ---- Requests


class CompareTarget(StrEnum):
    """What of a key is compared. An absent key has 0 in all but VALUE, and no value equals it."""

    CREATE_REVISION = "create_revision"
    MOD_REVISION = "mod_revision"
    VERSION = "version"
    LEASE = "lease"
    VALUE = "value"


class CompareSign(StrEnum):
    """How it is compared."""

    EQUAL = "="
    NOT_EQUAL = "!="
    LESS = "<"
    GREATER = ">"


class Compare(NamedTuple):
    """One condition of a transaction: bytes for VALUE, a number for every other target."""

    key: bytes
    target: CompareTarget
    operand: int | bytes
    sign: CompareSign = CompareSign.EQUAL


class Range(NamedTuple):
    """Read one key, or all keys that begin with `key`, in the order of their bytes."""

    key: bytes
    is_prefix: bool = False
    revision: int = 0
    """As of this revision; 0: as of now."""
    limit: int = 0
    """Return this many keys at most; 0: all."""


class Put(NamedTuple):
    """Write a key. A lease deletes it when it ends; 0 detaches the key from its former lease."""

    key: bytes
    value: bytes
    lease_id: int = 0


class Delete(NamedTuple):
    """Delete a key. Deleting an absent key changes nothing."""

    key: bytes


Operation: TypeAlias = Range | Put | Delete


class Txn(NamedTuple):
    """Run `then` if every compare holds, else `otherwise`. Each list has 128 entries at most.

    Operations run in their order and see the ones before them. A list may not put a key twice, nor
    put and delete the same key.
    """

    compares: tuple[Compare, ...] = ()
    then: tuple[Operation, ...] = ()
    otherwise: tuple[Operation, ...] = ()


class LeaseGrant(NamedTuple):
    """Make a lease. The store may give it more time than asked for."""

    ttl_s: int
    lease_id: int = 0
    """The caller's choice of a name; 0: the store chooses."""


class LeaseKeepAlive(NamedTuple):
    """Give a lease its whole time again."""

    lease_id: int


class LeaseRevoke(NamedTuple):
    """End a lease now and delete its keys."""

    lease_id: int


class Compact(NamedTuple):
    """Forget what was overwritten or deleted before a revision."""

    revision: int


StoreRequest: TypeAlias = Range | Txn | LeaseGrant | LeaseKeepAlive | LeaseRevoke | Compact


# ---- Results


class RangeResult(NamedTuple):
    """What was read, and the store's revision at that moment."""

    revision: int
    items: tuple[KeyValue, ...]
    has_more: bool = False


class TxnResult(NamedTuple):
    """A transaction that was carried out, and the store's revision after it."""

    revision: int
    succeeded: bool
    """Whether all compares held, so that `then` was run."""
    ranges: tuple[RangeResult, ...] = ()
    """The results of the Range operations of the list that was run, in their order."""


class LeaseResult(NamedTuple):
    """A lease that was made or kept, with its time to live from now on."""

    lease_id: int
    ttl_s: int


class Done(NamedTuple):
    """A lease was revoked, or the history compacted."""

    revision: int


class RefusalKind(StrEnum):
    """Why a store refuses a request."""

    TOO_MANY_OPERATIONS = "too_many_operations"
    TOO_BIG = "too_big"
    DUPLICATE_KEY = "duplicate_key"
    EMPTY_KEY = "empty_key"
    LEASE_NOT_FOUND = "lease_not_found"
    LEASE_EXISTS = "lease_exists"
    BAD_TTL = "bad_ttl"
    COMPACTED = "compacted"
    FUTURE_REVISION = "future_revision"
    NO_SPACE = "no_space"
    """The store's disk or its quota is full. Reads and leases go on."""


class StoreRefused(NamedTuple):
    """The store refused the request: nothing happened."""

    kind: RefusalKind
    text: str


class StoreUnavailable(NamedTuple):
    """The request did not reach a store: nothing happened, and nothing will. Try again later."""

    text: str
    is_denied: bool = False
    """Whether the store does not let this client in. Then trying again does not help."""
    is_unfit: bool = False
    """Whether nobody can use this store as it is, for example because it is too old."""


class OutcomeUnknown(NamedTuple):
    """No answer came: the request may have happened, or may still happen. Read it back."""

    text: str


StoreResult: TypeAlias = (
    RangeResult | TxnResult | LeaseResult | Done | StoreRefused | StoreUnavailable | OutcomeUnknown
)


# ---- Watches


class WatchEvent(NamedTuple):
    """One change of a key. A deletion has key and mod revision; its version is 0."""

    item: KeyValue

    @property
    def is_delete(self) -> bool:
        """Whether the key was deleted, or its lease has ended."""
        return self.item.version == 0


class WatchBatch(NamedTuple):
    """All changes of one revision below the watched prefix, in their order."""

    revision: int
    events: tuple[WatchEvent, ...]


class Compacted(NamedTuple):
    """The watch ended: what it had still to deliver is gone. Read the prefix again."""

    compact_revision: int


class Lost(NamedTuple):
    """The watch ended, for example with its connection. Watch again from where it was."""

    text: str


WatchMessage: TypeAlias = WatchBatch | Compacted | Lost


class StoreWatch:
    """A running watch, and where it goes on. Clients of a store extend it."""

    def __init__(
        self, prefix: bytes, from_revision: int, deliver: Callable[[WatchMessage], None]
    ) -> None:
        assert from_revision >= 1, "a watch names its first revision"
        self.prefix: Final = prefix
        self.next_revision = from_revision
        """Behind the last batch that the store sent."""
        self.is_over = False
        self._deliver = deliver

    def cancel(self) -> None:
        """End the watch: `deliver` is not called again."""
        self.is_over = True

    def hand_over(self, message: WatchMessage) -> None:
        """Deliver a message, unless the watch was cancelled meanwhile."""
        if not self.is_over:
            self.is_over = not isinstance(message, WatchBatch)
            self._deliver(message)


class MetaStore(Protocol):
    """A client of the store. See the module for the rules of both sides."""

    @property
    def era(self) -> int:
        """How many connections this client has had. Over another one the store may be another, or
        an older copy of itself: whoever knows something of it reads it again.
        """
        ...

    def submit(self, request: StoreRequest, done: Callable[[StoreResult], None]) -> None:
        """Send a request; `done` gets its result later."""
        ...

    def watch(
        self, prefix: bytes, from_revision: int, deliver: Callable[[WatchMessage], None]
    ) -> StoreWatch:
        """Deliver all changes of a prefix from `from_revision` on (at least 1)."""
        ...


def prefix_end(prefix: bytes) -> bytes | None:
    """Return the first key behind all keys with this prefix; None: there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


def if_absent(key: bytes) -> Compare:
    """Return the compare that holds if a key does not exist."""
    return Compare(key, CompareTarget.CREATE_REVISION, 0)


def if_unchanged(key: bytes, mod_revision: int) -> Compare:
    """Return the compare that holds if a key was not written since this mod revision."""
    return Compare(key, CompareTarget.MOD_REVISION, mod_revision)


def if_created_at(key: bytes, create_revision: int) -> Compare:
    """Return the compare that holds if a key is still the one created at this revision."""
    return Compare(key, CompareTarget.CREATE_REVISION, create_revision)


# ---- What a store refuses, whatever it holds: sizes, counts, empty keys, bad times

LEASE_TTL_MAX_S: Final = 9_000_000_000
"""etcd's limit."""


def request_refusal(request: StoreRequest) -> StoreRefused | None:
    """Return why a request is refused, whatever the store holds; None if it is not."""
    if isinstance(request, Txn):
        return txn_refusal(request)
    if isinstance(request, LeaseGrant):
        return ttl_refusal(request.ttl_s)
    return range_refusal(request) if isinstance(request, Range) else None


def range_refusal(request: Range) -> StoreRefused | None:
    """Return why a read is refused."""
    if not request.key and not request.is_prefix:
        return StoreRefused(RefusalKind.EMPTY_KEY, "the key is empty; name a key or a prefix")
    return None


def ttl_refusal(ttl_s: int) -> StoreRefused | None:
    """Return why a lease with this time is refused."""
    if 0 < ttl_s <= LEASE_TTL_MAX_S:
        return None
    text = f"a lease of {ttl_s} s was asked for; 1 to {LEASE_TTL_MAX_S} s are valid"
    return StoreRefused(RefusalKind.BAD_TTL, text)


def txn_refusal(txn: Txn) -> StoreRefused | None:
    """Return why a transaction is refused, whatever the store holds; None if it is not."""
    lists = {"compares": txn.compares, "then": txn.then, "otherwise": txn.otherwise}
    for name, entries in lists.items():
        if len(entries) > TXN_OPERATIONS_MAX:
            text = (
                f"the transaction has {len(entries)} entries in `{name}`; at most"
                f" {TXN_OPERATIONS_MAX} are allowed. Split it"
            )
            return StoreRefused(RefusalKind.TOO_MANY_OPERATIONS, text)
        if any(not entry.key and not getattr(entry, "is_prefix", False) for entry in entries):
            return StoreRefused(RefusalKind.EMPTY_KEY, f"a key in `{name}` is empty")
    size = sum(
        len(entry.key) + len(getattr(entry, "value", b""))
        for entries in lists.values()
        for entry in entries
    )
    if size > REQUEST_BYTES_MAX:
        text = (
            f"the transaction has {size} bytes; at most {REQUEST_BYTES_MAX} are allowed. Split it"
        )
        return StoreRefused(RefusalKind.TOO_BIG, text)
    return _duplicate_refusal(txn.then) or _duplicate_refusal(txn.otherwise)


def _duplicate_refusal(operations: tuple[Operation, ...]) -> StoreRefused | None:
    put: set[bytes] = set()
    deleted = {operation.key for operation in operations if isinstance(operation, Delete)}
    for operation in operations:
        if isinstance(operation, Put):
            if operation.key in put or operation.key in deleted:
                text = f"the transaction writes key {operation.key!r} twice; write it once"
                return StoreRefused(RefusalKind.DUPLICATE_KEY, text)
            put.add(operation.key)
    return None
