"""Document commands: packs operations, and reads their replies. Pure.

An `Operation` is a plain tuple, because batches make thousands of them:

    (opcode, logical key, extras, value, cas)

Extras of a store are u32 flags and u32 expiry; a key gets its collection prefix when it is packed.
Expiry: 0 never, up to 30 days relative seconds, above that absolute Unix seconds (memcached).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from struct import Struct
from typing import Final, Literal, NamedTuple, TypeVar
from zlib import crc32

from clients.errors import ConnectError, DcpdError, TooBigError, error_from_status
from dcp.wire.frame import HEADER, MAX_KEY_BYTES, MAX_VALUE_BYTES, Frame, RemoteProtocolError
from dcp.wire.message import BATCH_CHANGE, BATCH_CHANGES_MAX, MUTATION_TOKEN, U32, U64
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.status import Status
from vbucket.model import ids
from vbucket.model.ids import DEFAULT_COLLECTION_PREFIX, NUM_VBUCKETS

Operation = tuple[int, bytes, bytes, bytes, int]


class DurabilityLevel(IntEnum):
    """What a write waits for before its answer.

    In a dcpd cluster all levels above NONE mean the same: the change is on the disks of all copies
    in sync, and those are a majority. NONE asks for what the server does by itself.
    """

    NONE = 0
    MAJORITY = 1
    MAJORITY_AND_PERSIST_TO_ACTIVE = 2
    PERSIST_TO_MAJORITY = 3


DurabilityChoice = (
    DurabilityLevel
    | Literal["none", "majority", "majority_and_persist_to_active", "persist_to_majority"]
)
DURABILITY_NAMES: Final = tuple(level.name.lower() for level in DurabilityLevel)
_DURABILITY_FRAME: Final = Struct(">BBH")
"""Id 1 and length 3 of the frame info, level, timeout in ms."""
_DURABILITY_HEAD: Final = 1 << 4 | 3
_DURABILITY_MS_MAX: Final = 65_534
"""The frame reserves 65535, and 0."""
_SERVER_SHARE: Final = 0.9
"""Share of the time left that the server gets for a durable write. So it can say AMBIGUOUS before
the client stops waiting (as Couchbase's SDKs do)."""
_COUNTER_EXTRAS: Final = Struct(">QQI")
_NO_INITIAL: Final = 0xFFFF_FFFF
"""Expiry of a counter that is not created."""
_COUNTERS: Final = frozenset({Opcode.INCREMENT, Opcode.DECREMENT})
_DURABLE: Final = frozenset(
    {Opcode.SET, Opcode.ADD, Opcode.REPLACE, Opcode.DELETE, Opcode.INCREMENT, Opcode.DECREMENT}
)

STORE_EXTRAS: Final = Struct(">II")
COLLECTION_ID_EXTRAS: Final = Struct(">QI")
"""Of an answer to GET_COLLECTION_ID: manifest uid, collection id."""
_NO_OPTIONS: Final = STORE_EXTRAS.pack(0, 0)
_READS: Final = frozenset({Opcode.GET, Opcode.GET_REPLICA, Opcode.X_GROUP_BEAT})
_BATCH_MODES: Final = {Opcode.SET: 0, Opcode.ADD: 1, Opcode.REPLACE: 2, Opcode.DELETE: 3}
_STORES: Final = frozenset({Opcode.SET, Opcode.ADD, Opcode.REPLACE})
_NAMES: Final = {
    Opcode.GET: "get",
    Opcode.GET_REPLICA: "get from replica",
    Opcode.INCREMENT: "increment",
    Opcode.DECREMENT: "decrement",
    Opcode.SET: "set",
    Opcode.ADD: "add",
    Opcode.REPLACE: "replace",
    Opcode.DELETE: "delete",
    Opcode.SUBDOC_MULTI_LOOKUP: "look up",
    Opcode.TOUCH: "touch",
    Opcode.X_GROUP_BEAT: "beat of a group's member",
    Opcode.X_BATCH: "batch",
}
LOOKUPS_MAX: Final = 16
"""Most look-ups of one SUBDOC_MULTI_LOOKUP."""
XATTR_PATH: Final = 0x04
_LOOKUP: Final = Struct(">BBH")
_LOOKUP_RESULT: Final = Struct(">HI")


class Document(NamedTuple):
    """A document as GET returns it."""

    value: bytes
    cas: int
    flags: int = 0


class MutationResult(NamedTuple):
    """The result of a write: its CAS, and the partition, version and seqno of the change.

    `vb_uuid` and `seqno` are 0 if the server did not grant MUTATION_SEQNO.
    """

    cas: int
    vb_id: int
    vb_uuid: int
    seqno: int


class CounterResult(NamedTuple):
    """The result of a counter: its new number, and the rest as in MutationResult."""

    number: int
    cas: int
    vb_id: int
    vb_uuid: int
    seqno: int


Token = MutationResult | CounterResult
"""What tells where a change is: its partition, version and seqno."""

_T = TypeVar("_T")

Outcome = Document | MutationResult | CounterResult | DcpdError
"""Result of one operation of a batch."""


def key_bytes(key: bytes | str) -> bytes:
    """Return the key as the wire has it.

    Raises ValueError when it is empty or too long, TypeError when it is neither str nor bytes.
    """
    raw: object = key.encode() if isinstance(key, str) else key
    if not isinstance(raw, bytes):
        raise TypeError(f"a key is str or bytes, not {type(key).__name__}")
    if not 0 < len(raw) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, this one {len(raw)}: {raw[:40]!r}")
    return raw


def value_bytes(value: object, key: bytes, what: str) -> bytes:
    """Return the value as the wire has it; `what` names the operation in errors.

    Raises TypeError for anything but bytes (a str has many encodings, so the caller chooses one),
    and TooBigError for a value that the server would refuse, before it is sent.
    """
    if not isinstance(value, bytes | bytearray | memoryview):
        advice = ": use value.encode()" if isinstance(value, str) else ""
        raise TypeError(f"a value is bytes, not {type(value).__name__}{advice} (key {key!r})")
    raw = value if isinstance(value, bytes) else bytes(value)
    if len(raw) > MAX_VALUE_BYTES:
        raise TooBigError(
            f"{what}: the value has {len(raw)} bytes, and the limit is {MAX_VALUE_BYTES} (20 MiB);"
            " nothing was sent",
            status=Status.E2BIG,
            key=key,
            hint="Split the document, or store the content elsewhere and a reference to it here.",
        )
    return raw


def vbucket_of(key: bytes | str, num_vbuckets: int = NUM_VBUCKETS) -> int:
    """Return the partition of a key. Raises as `key_bytes`."""
    return ids.vbucket_of(key_bytes(key), num_vbuckets)


def get_operation(key: bytes | str) -> Operation:
    """Return a GET."""
    return Opcode.GET, key_bytes(key), b"", b"", 0


def get_replica_operation(key: bytes | str, at_least: Token | None = None) -> Operation:
    """Return a GET_REPLICA. With `at_least`, a replica that does not have that change refuses.

    Raises ValueError for a token of another partition, or without a seqno.
    """
    raw = key_bytes(key)
    if at_least is None:
        return Opcode.GET_REPLICA, raw, b"", b"", 0
    if not at_least.seqno:
        raise ValueError("at_least has no seqno: the server granted no mutation tokens")
    return (
        Opcode.GET_REPLICA, raw, MUTATION_TOKEN.pack(at_least.vb_uuid, at_least.seqno), b"", 0
    )  # fmt: skip


def counter_operation(
    opcode: Opcode, key: bytes | str, delta: int, initial: int | None, expiry_s: int, cas: int = 0
) -> Operation:
    """Return an INCREMENT or DECREMENT. `initial` None: a missing counter is an error.

    Raises ValueError for numbers that are not 0 to 2**64 - 1.
    """
    for name, number in (("delta", delta), ("initial", initial or 0)):
        if not 0 <= number < 1 << 64:
            raise ValueError(f"{name} {number}: a counter takes 0 to 2**64 - 1")
    expiry = _NO_INITIAL if initial is None else expiry_s
    return opcode, key_bytes(key), _COUNTER_EXTRAS.pack(delta, initial or 0, expiry), b"", cas


def durability_of(level: DurabilityChoice) -> DurabilityLevel:
    """Return a durability level by its name. Raises ValueError that lists the names."""
    if isinstance(level, DurabilityLevel):
        return level
    try:
        return DurabilityLevel(DURABILITY_NAMES.index(level))
    except ValueError:
        names = ", ".join(DURABILITY_NAMES)
        raise ValueError(f"there is no durability level {level!r}; there are {names}") from None


def durability_frame(level: DurabilityLevel, left_s: float) -> bytes:
    """Return the frame info that asks for a level, with a timeout below the time that is left."""
    if not level:
        return b""
    timeout_ms = max(1, min(int(left_s * _SERVER_SHARE * 1000), _DURABILITY_MS_MAX))
    return _DURABILITY_FRAME.pack(_DURABILITY_HEAD, level, timeout_ms)


def xattr_lookup(path: bytes) -> bytes:
    """Return a look-up of a path into the XATTRs."""
    return _LOOKUP.pack(Opcode.SUBDOC_GET, XATTR_PATH, len(path)) + path


BODY_LOOKUP: Final = _LOOKUP.pack(Opcode.GET, 0, 0)
"""A look-up of the whole document; it comes after those of XATTRs."""


def lookup_operation(key: bytes | str, lookups: Iterable[bytes], cas: int = 0) -> Operation:
    """Return a SUBDOC_MULTI_LOOKUP; the value of its document is for `results_of`."""
    return Opcode.SUBDOC_MULTI_LOOKUP, key_bytes(key), b"", b"".join(lookups), cas


def results_of(value: bytes) -> list[tuple[int, bytes]]:
    """Return status and value of each look-up. Raises RemoteProtocolError."""
    results: list[tuple[int, bytes]] = []
    at = 0
    while at < len(value):
        value_at = at + _LOOKUP_RESULT.size
        if value_at > len(value):
            raise RemoteProtocolError("a result of a look-up is cut short")
        status, value_bytes = _LOOKUP_RESULT.unpack_from(value, at)
        at = value_at + value_bytes
        results.append((status, value[value_at:at]))
    if at != len(value):
        raise RemoteProtocolError("the value of a look-up is cut short")
    return results


def store_operation(
    opcode: Opcode, key: bytes | str, value: bytes, flags: int = 0, expiry_s: int = 0, cas: int = 0
) -> Operation:
    """Return a SET, ADD or REPLACE. Raises as `key_bytes` and `value_bytes`."""
    assert opcode in _STORES
    extras = STORE_EXTRAS.pack(flags, expiry_s) if flags or expiry_s else _NO_OPTIONS
    raw = key_bytes(key)
    return opcode, raw, extras, value_bytes(value, raw, _NAMES[opcode]), cas


def delete_operation(key: bytes | str, cas: int = 0) -> Operation:
    """Return a DELETE."""
    return Opcode.DELETE, key_bytes(key), b"", b"", cas


def batch_operation(changes: Sequence[Operation]) -> Operation:
    """Return one operation that makes changes of documents together.

    Raises ValueError for none or too many of them, and for two of one document; TooBigError.
    """
    if not 0 < len(changes) <= BATCH_CHANGES_MAX:
        raise ValueError(f"a batch has 1 to {BATCH_CHANGES_MAX} changes, not {len(changes)}")
    if len({change[1] for change in changes}) < len(changes):
        raise ValueError("a batch changes each document once: leave out what is replaced at once")
    parts: list[bytes] = []
    for opcode, key, extras, value, cas in changes:
        options = STORE_EXTRAS.unpack(extras) if extras else (0, 0)
        mode = _BATCH_MODES[Opcode(opcode)]
        parts += BATCH_CHANGE.pack(mode, 0, len(key), *options, cas, len(value)), key, value
    first = changes[0][1]
    value = value_bytes(b"".join(parts), first, "batch")
    return Opcode.X_BATCH, first, U32.pack(len(changes)), value, 0


def batch_results(
    changes: Sequence[Operation], answer: Document, num_vbuckets: int
) -> list[MutationResult]:
    """Return the result of each change of a batch. Raises ConnectError if the answer is cut."""
    if len(answer.value) != MUTATION_TOKEN.size * len(changes):
        raise ConnectError(f"an answer of {len(answer.value)} bytes to {len(changes)} changes")
    vb_ids = partitions_of(changes, num_vbuckets)
    tokens = MUTATION_TOKEN.iter_unpack(answer.value)
    return [
        MutationResult(answer.cas, vb_id, *token)
        for vb_id, token in zip(vb_ids, tokens, strict=True)
    ]


def touch_operation(key: bytes | str, expiry_s: int) -> Operation:
    """Return a TOUCH."""
    return Opcode.TOUCH, key_bytes(key), U32.pack(expiry_s), b"", 0


def partitions_of(operations: Iterable[Operation], num_vbuckets: int) -> list[int]:
    """Return the partition of each operation's key (the hash of `vbucket.model.ids.vbucket_of`)."""
    # Inlined: a call per operation would be a third of the batch's cost.
    return [((crc32(operation[1]) >> 16) & 0x7FFF) % num_vbuckets for operation in operations]


def pack_operations(
    operations: Iterable[Operation],
    vb_ids: Iterable[int],
    *,
    opaque: int,
    has_collections: bool,
    collection_prefix: bytes = DEFAULT_COLLECTION_PREFIX,
    framing: bytes = b"",
) -> bytes:
    """Return the packets of many operations, with opaques that count up from `opaque`.

    `framing` (`durability_frame`) is for those that change a document.
    """
    prefix = collection_prefix if has_collections else b""
    prefix_len = len(prefix)
    pack = HEADER.pack
    parts: list[bytes] = []
    append = parts.append
    for (opcode, key, extras, value, cas), vb_id in zip(operations, vb_ids, strict=True):
        key_len, extras_len = len(key) + prefix_len, len(extras)
        body = extras_len + key_len + len(value)
        if framing and opcode in _DURABLE:
            body += len(framing)
            # A flex request: the key's length is one byte, behind that of the framing extras.
            key_len |= len(framing) << 8
            append(
                pack(Magic.FLEX_REQUEST, opcode, key_len, extras_len, 0, vb_id, body, opaque, cas)
            )
            append(framing)
        else:
            append(pack(Magic.REQUEST, opcode, key_len, extras_len, 0, vb_id, body, opaque, cas))
        append(extras)
        append(prefix)
        append(key)
        append(value)
        opaque = opaque + 1 & 0xFFFF_FFFF
    return b"".join(parts)


def outcome_of(operation: Operation, vb_id: int, frame: Frame, node: str) -> Outcome:
    """Return the outcome that a reply means; errors are returned, not raised."""
    if frame.status == Status.SUBDOC_MULTI_PATH_FAILURE:
        return Document(frame.value, frame.cas)  # `results_of` tells which
    if frame.status:
        opcode, key, _, _, cas = operation
        return error_from_status(
            frame.status, _NAMES[Opcode(opcode)], body=frame.value, cas=cas, vb_id=vb_id,
            key=key, node=node,
        )  # fmt: skip
    if operation[0] in {Opcode.SUBDOC_MULTI_LOOKUP, Opcode.X_BATCH}:
        return Document(frame.value, frame.cas)
    if operation[0] in _READS:
        flags = U32.unpack(frame.extras)[0] if len(frame.extras) == 4 else 0
        return Document(frame.value, frame.cas, flags)
    vb_uuid, seqno = MUTATION_TOKEN.unpack(frame.extras) if len(frame.extras) == 16 else (0, 0)
    if operation[0] in _COUNTERS:
        if len(frame.value) != U64.size:
            return ConnectError(f"a counter of {len(frame.value)} bytes, not 8", node=node)
        return CounterResult(U64.unpack(frame.value)[0], frame.cas, vb_id, vb_uuid, seqno)
    return MutationResult(frame.cas, vb_id, vb_uuid, seqno)


def collection_id_of(frame: Frame, name: str, node: str) -> int:
    """Return the id in an answer to GET_COLLECTION_ID.

    Raises UnknownCollectionError or another StatusError, ConnectError for one that is cut short.
    """
    if frame.status:
        raise error_from_status(frame.status, f"collection {name!r}", body=frame.value, node=node)
    if len(frame.extras) != COLLECTION_ID_EXTRAS.size:
        raise ConnectError(
            f"collection {name!r}: an answer with extras of {len(frame.extras)} bytes", node=node
        )
    collection_id: int = COLLECTION_ID_EXTRAS.unpack(frame.extras)[1]
    return collection_id


def parsed(parse: Callable[[bytes], _T], value: bytes, node: str) -> _T:
    """Return a parsed answer. Raises ConnectError if it is cut short."""
    try:
        return parse(value)
    except RemoteProtocolError as error:
        raise ConnectError(f"an answer that cannot be read: {error}", node=node) from error
