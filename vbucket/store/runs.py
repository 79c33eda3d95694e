"""Runs: many stored frames joined for a stream. Pure.

A backlog is sent in runs. The body of a block is copied once, the opaques are written into the
copy, and the copy is sent. This works only for frames that are sent as they are stored. A stream
that must look at each frame (filter, other form, previous values) takes them one by one.

The flags of `vbucket.store.block` tell which frames can be sent unchanged: all flags that the
caller asks for must hold for each frame of a run. `ALL_PLAIN` asks for none.

Runs make two changes, the `CUTS`. `STRIPPED` cuts out XATTRs, and `UNPREFIXED` the byte of the
default collection. A loop in C (vbucket/native/frames.c) does both, for 0.04 us per frame. Without
it, frames of one length take as much, others 0.5. One by one it takes 1.5 to 2.

Who calls it: store and versions. A run has the same bytes as its single frames.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import accumulate, repeat
from operator import itemgetter
from struct import Struct
from typing import Final, NamedTuple

from dcp.wire.frame import HEADER_BYTES
from dcp.wire.opcode import Opcode
from dcp.wire.xattrs import DATATYPE_XATTR
from vbucket.model.datatype import SNAPPY
from vbucket.model.entry import (
    DATATYPE_AT,
    MUTATION_EXTRAS_BYTES,
    MUTATION_FORM,
    OPCODE_AT,
    PREFIX_BYTES,
)
from vbucket.native import frame_loops
from vbucket.store.block import (
    BODY_BYTES_TARGET,
    ONLY_MUTATIONS,
    ONLY_RAW,
    ONLY_UNPACKED,
    Block,
)

ALL_PLAIN: Final = 0
"""All stored frames are sent unchanged."""
STRIPPED: Final = 0x20
"""Beside flags of blocks: XATTRs are cut out of the frames, which may have some."""
UNPREFIXED: Final = 0x40
"""Beside flags of blocks: the byte in the key that names the default collection is cut out, because
the client does not know collections. The caller makes sure that all keys have it.
"""
CUTS: Final = STRIPPED | UNPREFIXED

_OPAQUE_AT: Final = 12
_HEAD: Final = Struct(">HHBBHII")
"""A mutation's header up to its CAS: magic and opcode, key length, extras length, datatype,
vbucket, body length, opaque."""
_HEAD_BYTES: Final = _HEAD.size
_pack_head: Final = _HEAD.pack
_unpack_head: Final = Struct(">2xHxBHI").unpack_from
"""Key length, datatype, vbucket, body length."""
_unpack_length: Final = Struct(">I").unpack_from
_FORM: Final = MUTATION_FORM
_KEY_LENGTH_AT: Final = 3
"""The low byte of the key's length. The high one is 0: keys have 251 bytes at most."""
_BODY_LENGTH_AT: Final = 8
_COLLECTION_AT: Final = HEADER_BYTES + MUTATION_EXTRAS_BYTES
"""The first byte of a mutation's key, in its frame."""
_ONE_LESS: Final = bytes((byte - 1) % 256 for byte in range(256))
_loops: Final = frame_loops()
_put_opaque: Final = Struct(">I").pack_into
_opcode_of: Final = itemgetter(OPCODE_AT)
_datatype_of: Final = itemgetter(DATATYPE_AT)
_frame_of: Final = itemgetter(slice(PREFIX_BYTES, None))
_FEW: Final = 4
"""Up to this many entries, as on a live stream, joining costs more than it saves."""
_MUTATIONS: Final = frozenset({int(Opcode.DCP_MUTATION)})
_RAW: Final = frozenset({0})
_UNPACKED: Final = frozenset(datatype for datatype in range(256) if not datatype & SNAPPY)
_kind_of: Final = itemgetter(slice(OPCODE_AT, DATATYPE_AT + 1, DATATYPE_AT - OPCODE_AT))
"""Opcode and datatype: what clients with the feature JSON ask for is one look at each entry."""
_PLAIN_KINDS: Final = frozenset(
    bytes((opcode, datatype))
    for opcode in _MUTATIONS
    for datatype in range(256)
    if not datatype & (DATATYPE_XATTR | SNAPPY)
)


class RunBatch(NamedTuple):
    """Joined frames of a backlog. Continue at `next_seqno`."""

    pieces: list[bytes | bytearray]
    """Each holds one or more whole frames."""
    next_seqno: int
    wire_bytes: int
    last_seqno: int
    """The last version of the range, sent or skipped; 0: none."""


def run_of_block(
    block: Block, low: int, high: int, opaque: int, skip: Collection[int]
) -> list[bytes | bytearray]:
    """Return the frames with indexes low to high - 1, joined and with the opaque set.

    Frames whose seqno is in `skip` are left out; each gap begins a new piece. Raises
    BlockDamagedError.
    """
    ends = block.ends
    if _loops is not None and not skip:
        run = _loops.join(block.body, block.body_crc, ends, low, high, opaque)
        if run is not None:
            return [run]
    body = block.checked_body()
    first, frame_bytes = ends[low - 1] if low else 0, ends[0]
    joined = bytearray(memoryview(body)[first : ends[high - 1]])
    if frame_bytes <= BODY_BYTES_TARGET and ends == _multiples(frame_bytes)[: len(ends)]:
        _set_opaques_evenly(joined, frame_bytes, opaque)
        if not skip:
            return [joined]
    starts = ends[low - 1 : high - 1] if low else array("I", (0, *ends[: high - 1]))
    _set_opaques(joined, [at - first for at in starts] if first else starts, opaque)
    if not skip:
        return [joined]
    seqnos = block.seqnos
    gone = [at for at in range(low, high) if seqnos[at] in skip]
    pieces: list[bytes | bytearray] = []
    begin = 0
    for at in gone:
        end = starts[at - low] - first
        if end > begin:
            pieces.append(joined[begin:end])
        begin = ends[at] - first
    if begin < len(joined):
        pieces.append(joined[begin:] if begin else joined)
    return pieces


def cut_run_of_block(
    block: Block, low: int, high: int, opaque: int, skip: Collection[int], cuts: int
) -> list[bytes | bytearray]:
    """Return what `run_of_block` does, without the `CUTS`. All frames are mutations."""
    body, ends, seqnos = block.checked_body(), block.ends, block.seqnos
    start, frame_bytes = ends[low - 1] if low else 0, ends[0]
    is_even = frame_bytes <= BODY_BYTES_TARGET and ends == _multiples(frame_bytes)[: len(ends)]
    if cuts == UNPREFIXED and is_even and not skip:
        joined = bytearray(memoryview(body)[start : ends[high - 1]])
        _set_opaques_evenly(joined, frame_bytes, opaque)
        _cut_collections_evenly(joined, frame_bytes)
        return [joined]
    if _loops is not None and not skip:
        found = _loops.cut(
            body, ends, low, high, opaque, bool(cuts & UNPREFIXED), bool(cuts & STRIPPED)
        )
        if found is not None:
            return [found]
    pieces: list[bytes] = []
    for at in range(low, high):
        end = ends[at]
        if not skip or seqnos[at] not in skip:
            pieces += _cut(body, start, end, opaque, cuts)
        start = end
    return [b"".join(pieces)] if pieces else []


def cut_run_of_entries(entries: list[bytes], opaque: int, cuts: int) -> list[bytes | bytearray]:
    """Return what `run_of_entries` does, without the `CUTS`. All entries are mutations."""
    if cuts == UNPREFIXED and len(entries) > _FEW and len(set(map(len, entries))) == 1:
        frame_bytes = len(entries[0]) - PREFIX_BYTES
        joined = bytearray().join(map(_frame_of, entries))
        _set_opaques_evenly(joined, frame_bytes, opaque)
        _cut_collections_evenly(joined, frame_bytes)
        return [joined]
    if _loops is not None and len(entries) > _FEW:
        ends = array("I", accumulate([len(entry) - PREFIX_BYTES for entry in entries]))
        found = _loops.cut(
            b"".join(map(_frame_of, entries)), ends, 0, len(ends), opaque,
            bool(cuts & UNPREFIXED), bool(cuts & STRIPPED),
        )  # fmt: skip
        if found is not None:
            return [found]
    pieces: list[bytes] = []
    for entry in entries:
        pieces += _cut(entry, PREFIX_BYTES, len(entry), opaque, cuts)
    return [b"".join(pieces)]


def _cut(data: bytes, start: int, end: int, opaque: int, cuts: int) -> tuple[bytes, ...]:
    """Return the pieces of a mutation without the `CUTS`."""
    key_bytes, datatype, vb_id, body_bytes = _unpack_head(data, start)
    key_at = start + _COLLECTION_AT
    value_at = key_at + key_bytes
    cut = 0
    if cuts & STRIPPED and datatype & DATATYPE_XATTR:
        cut = _unpack_length(data, value_at)[0] + 4
        datatype &= ~DATATYPE_XATTR
    unprefixed = 1 if cuts & UNPREFIXED else 0
    head = _pack_head(
        _FORM, key_bytes - unprefixed, MUTATION_EXTRAS_BYTES, datatype, vb_id,
        body_bytes - cut - unprefixed, opaque,
    )  # fmt: skip
    cas_and_extras = data[start + _HEAD_BYTES : key_at]
    if not cut:
        return head, cas_and_extras, data[key_at + unprefixed : end]
    return head, cas_and_extras, data[key_at + unprefixed : value_at], data[value_at + cut : end]


def _cut_collections_evenly(joined: bytearray, frame_bytes: int) -> None:
    """Cut the collection's byte out of mutations of one length: each step is one byte of every
    frame.
    """
    count = len(joined) // frame_bytes
    body_bytes = frame_bytes - HEADER_BYTES - 1
    for place, byte in enumerate(body_bytes.to_bytes(4, "big"), _BODY_LENGTH_AT):
        joined[place::frame_bytes] = bytes((byte,)) * count
    lengths = joined[_KEY_LENGTH_AT::frame_bytes]
    joined[_KEY_LENGTH_AT::frame_bytes] = lengths.translate(_ONE_LESS)
    del joined[_COLLECTION_AT::frame_bytes]


def _set_opaques(joined: bytearray, starts: Sequence[int], opaque: int) -> None:
    """Write the opaque into frames of any length that begin at `starts`."""
    with memoryview(joined) as view, view[_OPAQUE_AT:] as opaques:
        # C makes one call per frame; nothing in plain Python is faster.
        deque(map(_put_opaque, repeat(opaques), starts, repeat(opaque)), maxlen=0)


def _set_opaques_evenly(joined: bytearray, frame_bytes: int, opaque: int) -> None:
    """Write the opaque into frames of one length: four writes, each of one byte of every frame."""
    count = len(joined) // frame_bytes
    for place, byte in enumerate(opaque.to_bytes(4, "big"), _OPAQUE_AT):
        joined[place::frame_bytes] = bytes((byte,)) * count


@lru_cache(maxsize=64)
def _multiples(frame_bytes: int) -> array[int]:
    """Return the ends of the frames in a full block if all have this length; some KiB."""
    return array("I", range(frame_bytes, BODY_BYTES_TARGET + 1, frame_bytes))


def are_plain(entries: list[bytes], plain: int) -> bool:
    """Whether the frames of these entries can be sent in a run."""
    if plain & ONLY_RAW and not _RAW.issuperset(map(_datatype_of, entries)):
        return False
    if plain & ONLY_UNPACKED and not _UNPACKED.issuperset(map(_datatype_of, entries)):
        return False
    return not plain & ONLY_MUTATIONS or _MUTATIONS.issuperset(map(_opcode_of, entries))


def are_wholly_plain(entries: list[bytes]) -> bool:
    """Whether all entries are mutations that are not compressed and have no XATTRs."""
    return _PLAIN_KINDS.issuperset(map(_kind_of, entries))


def entries_within(entries: list[bytes], bytes_max: int) -> tuple[list[bytes], int]:
    """Return as many of the first entries as reach `bytes_max` of frames, and the bytes of their
    frames; all entries if they do not reach it.
    """
    size = sum(map(len, entries)) - PREFIX_BYTES * len(entries)
    if size < bytes_max or len(entries) == 1:
        return entries, size
    ends = list(accumulate(len(entry) - PREFIX_BYTES for entry in entries))
    stop = min(bisect_left(ends, bytes_max) + 1, len(ends))
    return entries[:stop], ends[stop - 1]


def run_of_entries(entries: list[bytes], opaque: int) -> list[bytes | bytearray]:
    """Return the frames of entries with the opaque set, joined unless they are few."""
    if len(entries) <= _FEW:
        opaque_bytes = opaque.to_bytes(4, "big")
        return [entry[PREFIX_BYTES:24] + opaque_bytes + entry[28:] for entry in entries]
    joined = bytearray().join(map(_frame_of, entries))
    frame_bytes = len(entries[0]) - PREFIX_BYTES
    if frame_bytes * len(entries) == len(joined) and len(set(map(len, entries))) == 1:
        _set_opaques_evenly(joined, frame_bytes, opaque)
    else:
        lengths = [len(entry) - PREFIX_BYTES for entry in entries]
        _set_opaques(joined, list(accumulate(lengths[:-1], initial=0)), opaque)
    return [joined]


assert array("I").itemsize == 4
