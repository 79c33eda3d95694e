"""Requests, results and watch messages of a metadata store as bytes (MessagePack). Pure.

Who calls it: the embedded store's file, which keeps requests, and its connections. Every value is
checked when it is decoded, so that a peer cannot hand over something that no caller could build.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from failover.metadata.metastore import (
    Compact,
    Compacted,
    Compare,
    CompareTarget,
    Delete,
    Done,
    LeaseGrant,
    LeaseKeepAlive,
    LeaseResult,
    LeaseRevoke,
    Lost,
    Operation,
    OutcomeUnknown,
    Put,
    Range,
    RangeResult,
    StoreRefused,
    StoreRequest,
    StoreResult,
    StoreUnavailable,
    Txn,
    TxnResult,
    WatchBatch,
    WatchMessage,
)
from failover.metadata.revision_store import StoreImage

_Tagged = tuple[str, msgspec.Raw]


class _TxnFields(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A transaction whose operations carry their names."""

    compares: tuple[Compare, ...]
    then: tuple[_Tagged, ...]
    otherwise: tuple[_Tagged, ...]


_OPERATIONS: Final[dict[str, type]] = {"range": Range, "put": Put, "delete": Delete}
_REQUESTS: Final[dict[str, type]] = {
    "range": Range,
    "txn": _TxnFields,
    "lease_grant": LeaseGrant,
    "lease_keep_alive": LeaseKeepAlive,
    "lease_revoke": LeaseRevoke,
    "compact": Compact,
}
_RESULTS: Final[dict[str, type]] = {
    "range": RangeResult,
    "txn": TxnResult,
    "lease": LeaseResult,
    "done": Done,
    "refused": StoreRefused,
    "unavailable": StoreUnavailable,
    "unknown": OutcomeUnknown,
}
_WATCH_MESSAGES: Final[dict[str, type]] = {
    "batch": WatchBatch,
    "compacted": Compacted,
    "lost": Lost,
}
_NAMES: Final[dict[type, str]] = {
    cls: name
    for table in (_OPERATIONS, _REQUESTS, _RESULTS, _WATCH_MESSAGES)
    for name, cls in table.items()
}
_encode = msgspec.msgpack.Encoder().encode
_TAGGED: Final = msgspec.msgpack.Decoder(_Tagged)
_DECODERS: Final[dict[type, msgspec.msgpack.Decoder[Any]]] = {
    cls: msgspec.msgpack.Decoder(cls) for cls in _NAMES
}
_IMAGE: Final = msgspec.msgpack.Decoder(StoreImage)


class CodecError(Exception):
    """The bytes are no message of this kind; the text says why."""


def encode_request(request: StoreRequest) -> bytes:
    """Encode a request.

    Raises:
        CodecError: a number in it has more than 64 bits.
    """
    if isinstance(request, Txn):
        return _tagged(
            _TxnFields(
                request.compares,
                tuple((_NAMES[type(entry)], _raw(entry)) for entry in request.then),
                tuple((_NAMES[type(entry)], _raw(entry)) for entry in request.otherwise),
            )
        )
    return _tagged(request)


def decode_request(data: bytes | msgspec.Raw) -> StoreRequest:
    """Decode a request.

    Raises:
        CodecError: it is none.
    """
    found = _decode(_REQUESTS, data)
    if isinstance(found, _TxnFields):
        for compare in found.compares:
            _check_compare(compare)
        return Txn(found.compares, _operations(found.then), _operations(found.otherwise))
    _check_range(found)
    request: StoreRequest = found
    return request


def encode_result(result: StoreResult) -> bytes:
    """Encode a result."""
    return _tagged(result)


def decode_result(data: bytes | msgspec.Raw) -> StoreResult:
    """Decode a result.

    Raises:
        CodecError: it is none.
    """
    result: StoreResult = _decode(_RESULTS, data)
    return result


def encode_watch_message(message: WatchMessage) -> bytes:
    """Encode a message of a watch."""
    return _tagged(message)


def decode_watch_message(data: bytes | msgspec.Raw) -> WatchMessage:
    """Decode a message of a watch.

    Raises:
        CodecError: it is none.
    """
    message: WatchMessage = _decode(_WATCH_MESSAGES, data)
    return message


def encode_image(image: StoreImage) -> bytes:
    """Encode all that a store holds."""
    return _encode(image)


def decode_image(data: bytes) -> StoreImage:
    """Decode what `encode_image` made.

    Raises:
        CodecError: it is something else.
    """
    try:
        return _IMAGE.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(str(error)) from None


def _raw(value: object) -> msgspec.Raw:
    try:
        return msgspec.Raw(_encode(value))
    except OverflowError:
        raise CodecError("a number has more than 64 bits") from None


def _tagged(value: object) -> bytes:
    return _encode((_NAMES[type(value)], _raw(value)))


def _operations(entries: tuple[_Tagged, ...]) -> tuple[Operation, ...]:
    operations = tuple(_decode_tagged(_OPERATIONS, entry) for entry in entries)
    for operation in operations:
        _check_range(operation)
    return operations


def _check_compare(compare: Compare) -> None:
    wanted = bytes if compare.target is CompareTarget.VALUE else int
    if not isinstance(compare.operand, wanted):
        raise CodecError(f"a compare of the {compare.target} needs {wanted.__name__}")


def _check_range(request: object) -> None:
    if isinstance(request, Range) and (request.revision < 0 or request.limit < 0):
        raise CodecError("revision and limit of a read must not be negative")


def _decode(table: dict[str, type], data: bytes | msgspec.Raw) -> Any:
    try:
        tagged = _TAGGED.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(str(error)) from None
    return _decode_tagged(table, tagged)


def _decode_tagged(table: dict[str, type], tagged: _Tagged) -> Any:
    name, raw = tagged
    cls = table.get(name)
    if cls is None:
        raise CodecError(f"unknown kind {name[:40]!r}; one of {', '.join(table)} is expected")
    try:
        return _DECODERS[cls].decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"{name}: {error}") from None
