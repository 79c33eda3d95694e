"""Why a store refuses a request whatever it holds: sizes, counts, empty keys, bad times. Pure.

Who calls it: the store's semantics, and clients of stores that answer in other words.
"""

from __future__ import annotations

from typing import Final

from failover.metadata.metastore import (
    REQUEST_BYTES_MAX,
    TXN_OPERATIONS_MAX,
    Delete,
    LeaseGrant,
    Operation,
    Put,
    Range,
    RefusalKind,
    StoreRefused,
    StoreRequest,
    Txn,
)

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
