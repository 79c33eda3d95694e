"""Requests, results and watch messages of a metadata store as etcd's messages. Pure.

Who calls it: the client of etcd.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any, Final

from failover.metadata.etcd_stubs import etcd_api_pb2 as pb
from failover.metadata.metastore import (
    Compact,
    Compare,
    CompareSign,
    CompareTarget,
    Done,
    KeyValue,
    LeaseGrant,
    LeaseKeepAlive,
    LeaseResult,
    LeaseRevoke,
    Operation,
    Put,
    Range,
    RangeResult,
    RefusalKind,
    StoreRefused,
    StoreRequest,
    StoreResult,
    Txn,
    TxnResult,
    WatchBatch,
    WatchEvent,
    prefix_end,
)

_EVERYTHING_BEHIND: Final = b"\x00"
"""As the end of a range: all keys from its begin on. As its begin: the first possible key."""

_SIGNS: Final = {
    CompareSign.EQUAL: pb.Compare.EQUAL,
    CompareSign.NOT_EQUAL: pb.Compare.NOT_EQUAL,
    CompareSign.LESS: pb.Compare.LESS,
    CompareSign.GREATER: pb.Compare.GREATER,
}
_TARGETS: Final = {
    CompareTarget.CREATE_REVISION: (pb.Compare.CREATE, "create_revision"),
    CompareTarget.MOD_REVISION: (pb.Compare.MOD, "mod_revision"),
    CompareTarget.VERSION: (pb.Compare.VERSION, "version"),
    CompareTarget.LEASE: (pb.Compare.LEASE, "lease"),
    CompareTarget.VALUE: (pb.Compare.VALUE, "value"),
}

# ---- Requests


def message_of(request: StoreRequest) -> Any:
    """Return etcd's message for a request.

    Raises:
        ValueError: a number in it has more than 64 bits.
    """
    return _MESSAGES[type(request)](request)


def range_ends(key: bytes, *, is_prefix: bool) -> tuple[bytes, bytes]:
    """Return etcd's `key` and `range_end` for one key, or for a prefix."""
    if not is_prefix:
        return key, b""
    return key or _EVERYTHING_BEHIND, prefix_end(key) or _EVERYTHING_BEHIND


def _range(request: Range) -> Any:
    key, range_end = range_ends(request.key, is_prefix=request.is_prefix)
    return pb.RangeRequest(
        key=key, range_end=range_end, limit=request.limit, revision=request.revision
    )


def _txn(txn: Txn) -> Any:
    return pb.TxnRequest(
        compare=[_compare(compare) for compare in txn.compares],
        success=[_operation(operation) for operation in txn.then],
        failure=[_operation(operation) for operation in txn.otherwise],
    )


def _compare(compare: Compare) -> Any:
    target, field = _TARGETS[compare.target]
    return pb.Compare(
        result=_SIGNS[compare.sign], target=target, key=compare.key, **{field: compare.operand}
    )


def _operation(operation: Operation) -> Any:
    if isinstance(operation, Range):
        return pb.RequestOp(request_range=_range(operation))
    if isinstance(operation, Put):
        put = pb.PutRequest(key=operation.key, value=operation.value, lease=operation.lease_id)
        return pb.RequestOp(request_put=put)
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=operation.key))


_MESSAGES: Final[dict[type, Callable[[Any], Any]]] = {
    Range: _range,
    Txn: _txn,
    LeaseGrant: lambda grant: pb.LeaseGrantRequest(TTL=grant.ttl_s, ID=grant.lease_id),
    LeaseKeepAlive: lambda keep: pb.LeaseKeepAliveRequest(ID=keep.lease_id),
    LeaseRevoke: lambda revoke: pb.LeaseRevokeRequest(ID=revoke.lease_id),
    Compact: lambda compact: pb.CompactionRequest(revision=compact.revision),
}

# ---- Results


def result_of(response: Any) -> StoreResult:
    """Return the result that a response of etcd means."""
    return _RESULTS[type(response)](response)


def _range_result(response: Any, revision: int = 0) -> RangeResult:
    items = tuple(_item(kv) for kv in response.kvs)
    return RangeResult(response.header.revision or revision, items, response.more)


def _txn_result(response: Any) -> TxnResult:
    revision = response.header.revision
    ranges = tuple(
        _range_result(entry.response_range, revision)
        for entry in response.responses
        if entry.HasField("response_range")
    )
    return TxnResult(revision, response.succeeded, ranges)


def _granted(response: Any) -> StoreResult:
    return LeaseResult(response.ID, response.TTL)


def _kept(response: Any) -> StoreResult:
    if response.TTL <= 0:
        return _refused(RefusalKind.LEASE_NOT_FOUND)
    return LeaseResult(response.ID, response.TTL)


def _done(response: Any) -> Done:
    return Done(response.header.revision)


def _item(kv: Any) -> KeyValue:
    return KeyValue(kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)


_RESULTS: Final[dict[type, Callable[[Any], StoreResult]]] = {
    pb.RangeResponse: _range_result,
    pb.TxnResponse: _txn_result,
    pb.LeaseGrantResponse: _granted,
    pb.LeaseKeepAliveResponse: _kept,
    pb.LeaseRevokeResponse: _done,
    pb.CompactionResponse: _done,
}

# ---- Refusals

_REFUSALS: Final = {
    "etcdserver: key is not provided": RefusalKind.EMPTY_KEY,
    "etcdserver: too many operations in txn request": RefusalKind.TOO_MANY_OPERATIONS,
    "etcdserver: duplicate key given in txn request": RefusalKind.DUPLICATE_KEY,
    "etcdserver: request is too large": RefusalKind.TOO_BIG,
    "etcdserver: requested lease not found": RefusalKind.LEASE_NOT_FOUND,
    "etcdserver: lease already exists": RefusalKind.LEASE_EXISTS,
    "etcdserver: too large lease TTL": RefusalKind.BAD_TTL,
    "etcdserver: mvcc: required revision has been compacted": RefusalKind.COMPACTED,
    "etcdserver: mvcc: required revision is a future revision": RefusalKind.FUTURE_REVISION,
    "etcdserver: mvcc: database space exceeded": RefusalKind.NO_SPACE,
}
NO_SPACE_TEXT: Final = (
    "etcd's quota is full (alarm NOSPACE), so nothing can be written. Run: etcdctl compact"
    " REVISION; etcdctl defrag; etcdctl alarm disarm"
)
_TEXTS: Final = {
    RefusalKind.NO_SPACE: NO_SPACE_TEXT,
    RefusalKind.LEASE_NOT_FOUND: "the lease does not exist; it may have run out. Make a new one",
}


def refusal_of(details: str) -> StoreRefused | None:
    """Return the refusal that an error of etcd means; None if it is none."""
    kind = _REFUSALS.get(details)
    return _refused(kind, details) if kind is not None else None


def _refused(kind: RefusalKind, details: str = "") -> StoreRefused:
    return StoreRefused(kind, _TEXTS.get(kind, details))


# ---- Watches


def batches_of(response: Any) -> list[WatchBatch]:
    """Return what a watch response delivers, one batch for each revision.

    etcd does not split a revision over responses, unless a client asks for fragments.
    """
    events = (_event(event) for event in response.events)
    return [
        WatchBatch(revision, tuple(of_revision))
        for revision, of_revision in groupby(events, lambda event: event.item.mod_revision)
    ]


def _event(event: Any) -> WatchEvent:
    if event.type == pb.Event.DELETE:
        return WatchEvent(KeyValue(event.kv.key, b"", 0, event.kv.mod_revision, 0))
    return WatchEvent(_item(event.kv))
