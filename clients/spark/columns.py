"""Turns the bytes of a stream into columns, without a Python object per change.

A loop (in C if it is built) finds where each packet begins; everything else works on all packets
at once. numpy gathers the numbers. For keys and values the whole buffer becomes one Arrow array of
pieces, without a copy; key, XATTRs and value are the second to fourth piece of each packet.

    HEADER 24 | extras 31, 18, 20 or 21 | collection id, key | XATTRs | value   (dcp/wire/frame.py)

Invariant: `Chunk.places` has the offsets of complete and well-formed DCP_MUTATION, DCP_DELETION and
DCP_EXPIRATION packets in `Chunk.data`, in ascending order (`clients.streaming.change_runs`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from clients.errors import DcpdError
from clients.position import Versions
from dcp.wire.frame import HEADER_BYTES, RemoteProtocolError
from dcp.wire.opcode import Opcode
from dcp.wire.xattrs import (
    DATATYPE_XATTR,
    section_of,
    split_xattrs,
    unpack_xattrs,
    xattrs_text,
)

OPS: Final = ("set", "delete", "expire", "rollback", "cut", "compared", "gone")
"""Values of the column `op`."""
ROLLBACK: Final = OPS.index("rollback")
CUT: Final = OPS.index("cut")
COMPARED: Final = OPS.index("compared")
GONE: Final = OPS.index("gone")
_REMOVALS: Final[dict[int, str]] = {Opcode.DCP_DELETION: "delete", Opcode.DCP_EXPIRATION: "expire"}
_OP_OF: Final = np.array([OPS.index(_REMOVALS.get(code, "set")) for code in range(256)], np.int8)
_MUTATION_EXTRAS_BYTES: Final = 31
_TIME_BITS: Final = np.uint64(2**64 - 2**16)
"""The bits of a CAS that hold ns since 1970. The others are a counter."""

ValueParser = Callable[[Any], Any]
"""Converts an Arrow array of bytes to the value column."""


class Chunk(NamedTuple):
    """Received bytes, and the offsets of the changes in them."""

    data: bytes
    places: bytes
    """64-bit numbers of this machine."""


class Heads(NamedTuple):
    """The numbers of a chunk's changes, one array each."""

    places: Any
    vb_ids: Any
    opaques: Any
    cas: Any
    seqnos: Any
    revisions: Any


class Changes(NamedTuple):
    """Changes as columns."""

    heads: Heads
    vb_uuids: Any
    ops: Any
    """Index into `OPS`."""
    flags: Any
    expiry_s: Any
    keys: Any
    values: Any
    collection_ids: Any
    """None if keys have no collection prefix."""
    xattrs: Any
    """Sections of XATTRs (dcp/wire/xattrs.py), empty for changes without."""


def _view(data: bytes, dtype: str, offset: int, places: Any) -> Any:
    """Return the numbers at `offset` bytes after each place, in native byte order."""
    width = np.dtype(dtype).itemsize
    # A view with a number at every byte offset, of which only those at `places` are used.
    everywhere = np.ndarray((len(data) - width + 1,), dtype, data, strides=(1,))
    return everywhere[places + offset].astype(dtype.replace(">", "="))


def heads_of(chunk: Chunk) -> Heads:
    """Return the fields that every change has."""
    data, places = chunk.data, np.frombuffer(chunk.places, np.int64)
    return Heads(
        places,
        _view(data, ">u2", 6, places),
        _view(data, ">u4", 12, places),
        _view(data, ">u8", 16, places),
        _view(data, ">u8", HEADER_BYTES, places),
        _view(data, ">u8", HEADER_BYTES + 8, places),
    )


def last_seqnos(heads: Heads) -> dict[int, int]:
    """Return the seqno of the last change of each stream, by opaque."""
    opaques, from_behind = np.unique(heads.opaques[::-1], return_index=True)
    seqnos = heads.seqnos[::-1][from_behind]
    return dict(zip(opaques.tolist(), seqnos.tolist(), strict=True))


def without(heads: Heads, opaques: list[int]) -> Heads:
    """Return the heads without those of the given streams."""
    mask = ~np.isin(heads.opaques, opaques)
    return Heads(*(column[mask] for column in heads))


def changes_of(
    data: bytes, heads: Heads, versions_of: Mapping[int, Versions], *, has_prefix: bool
) -> Changes:
    """Return the changes with these heads. `versions_of`: versions by opaque, newest first.

    With `has_prefix` each key begins with its collection id. Raises DcpdError if one does not, or
    if XATTRs are malformed.
    """
    places = heads.places
    octets = np.frombuffer(data, np.uint8)
    opcodes = octets[places + 1]
    extras_len = octets[places + 4].astype(np.int64)
    key_len = _view(data, ">u2", 2, places).astype(np.int64)
    body_len = _view(data, ">u4", 8, places).astype(np.int64)
    key_at = places + HEADER_BYTES + extras_len
    value_at = key_at + key_len
    collection_ids = None
    if has_prefix:
        collection_ids, prefix_len = _collection_ids(octets, key_at)
        key_at = key_at + prefix_len
        if (key_at > value_at).any():  # Arrow would read outside the buffer
            index = int(np.argmax(key_at > value_at))
            raise DcpdError(
                f"the change with seqno {heads.seqnos[index]} has a key without a collection id",
                vb_id=int(heads.vb_ids[index]),
            )
    end_at = places + HEADER_BYTES + body_len
    ops = _OP_OF[opcodes]
    is_set = ops == 0
    body_at = _bodies(data, octets, places, value_at, end_at)
    keys, xattrs, values = _pieces(data, places, key_at, value_at, body_at, end_at, is_set)
    # Deletions have shorter extras. For them these fields are read elsewhere and masked.
    safe = np.where(is_set, places, places[0] if len(places) else 0)
    flags = np.zeros(len(places), np.uint32)
    expiry_s = np.zeros(len(places), np.uint32)
    if is_set.any():
        first = places[np.argmax(is_set)]
        safe = np.where(is_set, places, first)
        assert (extras_len[is_set] == _MUTATION_EXTRAS_BYTES).all()
        flags = np.where(is_set, _view(data, ">u4", HEADER_BYTES + 16, safe), 0)
        expiry_s = np.where(is_set, _view(data, ">u4", HEADER_BYTES + 20, safe), 0)
    return Changes(
        heads, _vb_uuids(heads, versions_of), ops, flags, expiry_s, keys, values, collection_ids,
        xattrs,
    )  # fmt: skip


def _bodies(data: bytes, octets: Any, places: Any, value_at: Any, end_at: Any) -> Any:
    """Return where the values begin behind the XATTRs, which few changes have. Raises DcpdError."""
    has_xattrs = (octets[places + 5] & DATATYPE_XATTR).astype(bool)
    if not has_xattrs.any():
        return value_at
    body_at = value_at.copy()
    for index in np.nonzero(has_xattrs)[0].tolist():
        value = data[value_at[index] : end_at[index]]
        try:
            split_xattrs(value)
        except RemoteProtocolError as error:
            raise DcpdError(f"a change cannot be read: {error}") from error
        body_at[index] += len(section_of(value, DATATYPE_XATTR))
    return body_at


def _pieces(
    data: bytes, places: Any, key_at: Any, value_at: Any, body_at: Any, end_at: Any, is_set: Any
) -> Any:
    """Return keys, XATTRs and values. Each packet has five pieces; the last is the gap after it."""
    count = len(places)
    offsets = np.empty(5 * count + 1, np.int32)
    offsets[0:-1:5], offsets[1:-1:5] = places, key_at
    offsets[2:-1:5], offsets[3:-1:5], offsets[4:-1:5] = value_at, body_at, end_at
    offsets[-1] = len(data)
    pieces = pa.Array.from_buffers(
        pa.binary(), 5 * count, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
    index = np.arange(count, dtype=np.int64) * 5
    keys = pieces.take(pa.array(index + 1))
    xattrs = pieces.take(pa.array(index + 2))
    values = pieces.take(pa.array(index + 3, mask=None if is_set.all() else ~is_set))
    return keys, xattrs, values


def _collection_ids(octets: Any, key_at: Any) -> tuple[Any, Any]:
    """Return the LEB128 numbers at the beginning of the keys, and their lengths."""
    ids = np.zeros(len(key_at), np.int64)
    lengths = np.zeros(len(key_at), np.int64)
    goes_on = np.ones(len(key_at), bool)
    for byte_index in range(5):
        octet = octets[np.minimum(key_at + byte_index, len(octets) - 1)]
        ids += np.where(goes_on, (octet & 0x7F).astype(np.int64) << (7 * byte_index), 0)
        lengths += goes_on
        goes_on &= octet >= 0x80
        if not goes_on.any():
            break
    return ids, lengths


def _vb_uuids(heads: Heads, versions_of: Mapping[int, Versions]) -> Any:
    """Return the version of each change: the newest that began below its seqno."""
    opaques, inverse = np.unique(heads.opaques, return_inverse=True)
    newest = [versions_of[int(opaque)] for opaque in opaques]
    numbers = np.array([versions[0][0] if versions else 0 for versions in newest], np.uint64)
    result = numbers[inverse]
    for index, versions in enumerate(newest):
        if len(versions) > 1:
            rows = np.nonzero(inverse == index)[0]
            began = np.array([seqno for _, seqno in reversed(versions)], np.uint64)
            uuids = np.array([vb_uuid for vb_uuid, _ in reversed(versions)], np.uint64)
            at = np.searchsorted(began, heads.seqnos[rows], side="left") - 1
            result[rows] = uuids[np.maximum(at, 0)]
    return result


def record_batch(
    changes: Changes, schema: pa.Schema, parse: ValueParser, names: Mapping[int, str] | None
) -> pa.RecordBatch:
    """Return changes as a batch with exactly this schema.

    `names`: collection id -> name for the column `collection`; None if there is no such column.
    Raises DcpdError if the schema wants text and the bytes are not UTF-8.
    """
    heads = changes.heads
    is_set = changes.ops == 0
    key_type = schema.field("key").type
    no_expiry = (changes.expiry_s == 0) | ~is_set
    columns = {
        "vb": pa.array(heads.vb_ids.astype(np.int32)),
        "seqno": pa.array(heads.seqnos.view(np.int64)),
        "vb_uuid": pa.array(changes.vb_uuids.view(np.int64)),
        # Not created at import: pa.array loads pandas, half of a query's start-up time.
        "op": pa.array(OPS).take(pa.array(changes.ops)),
        "key": _named("key", heads, lambda keys: text_or_bytes(keys, key_type), changes.keys),
        "value": _named("value", heads, parse, changes.values),
        "cas": pa.array(heads.cas.view(np.int64)),
        "revision": pa.array(heads.revisions.view(np.int64)),
        "flags": pa.array(changes.flags.astype(np.int64), mask=~is_set),
        "expiry": _moments(changes.expiry_s.astype(np.int64) * 1_000_000, no_expiry),
        "time": _moments((heads.cas & _TIME_BITS).view(np.int64) // 1000, heads.cas == 0),
    }
    if names is not None:
        assert changes.collection_ids is not None
        ids, inverse = np.unique(changes.collection_ids, return_inverse=True)
        texts = pa.array([names.get(int(number), f"{number:x}") for number in ids], pa.string())
        columns["collection"] = texts.take(pa.array(inverse))
    if "xattrs" in schema.names:
        texts = [_xattrs_text(section) for section in changes.xattrs.to_pylist()]
        columns["xattrs"] = pa.array(texts, pa.string())
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _xattrs_text(section: bytes) -> str | None:
    return xattrs_text(unpack_xattrs(section)) if section else None


def rollback_batch(rollbacks: list[tuple[int, int, int]], schema: pa.Schema) -> pa.RecordBatch:
    """Return rollback rows from tuples (vb, seqno to go back to, vb_uuid)."""
    told = {
        "vb": [vb_id for vb_id, _, _ in rollbacks],
        "seqno": [seqno for _, seqno, _ in rollbacks],
        "vb_uuid": [_signed(vb_uuid) for _, _, vb_uuid in rollbacks],
        "op": [OPS[ROLLBACK]] * len(rollbacks),
    }
    nothing = [None] * len(rollbacks)
    return pa.RecordBatch.from_arrays(
        [pa.array(told.get(field.name, nothing), field.type) for field in schema], schema=schema
    )


def compared_batch(
    vb_id: int, end_seqno: int, path: str, gone: Sequence[tuple[bytes, str]], schema: pa.Schema
) -> pa.RecordBatch:
    """Return the row that says that a partition was compared with the table at `path`, and those of
    keys that are gone, each with the name of its collection.
    """
    count = len(gone)
    keys = [path.encode(), *(key for key, _ in gone)]
    told = {
        "vb": [vb_id] * (1 + count),
        "seqno": [end_seqno] * (1 + count),
        "op": [OPS[COMPARED], *[OPS[GONE]] * count],
        "key": text_or_bytes(pa.array(keys, pa.binary()), schema.field("key").type).to_pylist(),
        "collection": [None, *(name for _, name in gone)],
    }
    nothing = [None] * (1 + count)
    return pa.RecordBatch.from_arrays(
        [pa.array(told.get(field.name, nothing), field.type) for field in schema], schema=schema
    )


def cut_batch(time: int, schema: pa.Schema) -> pa.RecordBatch:
    """Return the row that says at which cut a batch ends; `time` 0: at none."""
    moment = _moments(np.array([(time & int(_TIME_BITS)) // 1000]), np.array([not time]))
    told = {"op": [OPS[CUT]], "cas": [time or None], "time": moment}
    return pa.RecordBatch.from_arrays(
        [pa.array(told.get(field.name, [None]), field.type) for field in schema], schema=schema
    )


def text_or_bytes(array: Any, wanted: Any) -> Any:
    """Return an array of bytes as it is, or as text if that is wanted.

    Raises NotTextError if an item is not UTF-8.
    """
    if wanted == pa.binary():
        return array
    try:
        return array.cast(pa.string())
    except pa.ArrowInvalid:
        raise NotTextError(_first_not_text(array)) from None


class NotTextError(ValueError):
    """The item at `index` of an array of bytes is not UTF-8."""

    def __init__(self, index: int) -> None:
        super().__init__(f"item {index} is not UTF-8 text")
        self.index = index


def _first_not_text(array: Any) -> int:
    for index, item in enumerate(array.to_pylist()):
        try:
            (item or b"").decode()
        except UnicodeDecodeError:
            return index
    raise AssertionError("pyarrow refused an array in which every item is UTF-8")


def _named(name: str, heads: Heads, make: ValueParser, array: Any) -> Any:
    """Apply `make` to an array. Raises DcpdError, which names the change."""
    try:
        return make(array)
    except NotTextError as error:
        raise DcpdError(
            f"the {name} of the change with seqno {heads.seqnos[error.index]} is not UTF-8 text",
            vb_id=int(heads.vb_ids[error.index]),
            hint=f"Use the option {name}Format=binary to read the bytes.",
        ) from None


def _moments(microseconds: Any, is_null: Any) -> Any:
    return pa.array(microseconds, pa.int64(), mask=is_null).cast(pa.timestamp("us", tz="UTC"))


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
