"""Runs: many stored frames joined for a stream. Pure.

A backlog is sent in runs. The body of a block is copied once, the opaques are written into the
copy, and the copy is sent. This works only for frames that are sent as they are stored. A stream
that must look at each frame (filter, other form, previous values) takes them one by one.

The flags of `vbucket.store.block` tell which frames can be sent unchanged: all flags that the
caller asks for must hold for each frame of a run. `ALL_PLAIN` asks for none.

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

from dcp.wire.opcode import Opcode
from dcp.wire.xattrs import DATATYPE_XATTR
from vbucket.model.entry import DATATYPE_AT, OPCODE_AT, PREFIX_BYTES
from vbucket.store.block import (
    BODY_BYTES_TARGET,
    ONLY_MUTATIONS,
    ONLY_RAW,
    WITHOUT_XATTRS,
    Block,
)

ALL_PLAIN: Final = 0
"""All stored frames are sent unchanged."""

_OPAQUE_AT: Final = 12
_put_opaque: Final = Struct(">I").pack_into
_opcode_of: Final = itemgetter(OPCODE_AT)
_datatype_of: Final = itemgetter(DATATYPE_AT)
_frame_of: Final = itemgetter(slice(PREFIX_BYTES, None))
_FEW: Final = 4
"""Up to this many entries, as on a live stream, joining costs more than it saves."""
_MUTATIONS: Final = frozenset({int(Opcode.DCP_MUTATION)})
_RAW: Final = frozenset({0})
_WITHOUT_XATTRS: Final = frozenset(
    datatype for datatype in range(256) if not datatype & DATATYPE_XATTR
)
_MUTATIONS_WITHOUT_XATTRS: Final = ONLY_MUTATIONS | WITHOUT_XATTRS
_kind_of: Final = itemgetter(slice(OPCODE_AT, DATATYPE_AT + 1, DATATYPE_AT - OPCODE_AT))
"""Opcode and datatype: what clients with the feature JSON ask for is one look at each entry."""
_PLAIN_KINDS: Final = frozenset(
    bytes((opcode, datatype)) for opcode in _MUTATIONS for datatype in _WITHOUT_XATTRS
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
    block: Block, body: bytes, low: int, high: int, opaque: int, skip: Collection[int]
) -> list[bytes | bytearray]:
    """Return the frames with indexes low to high - 1, joined and with the opaque set.

    `body` is the block's checked body. Frames whose seqno is in `skip` are left out; each gap
    begins a new piece.
    """
    ends = block.ends
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
    """Whether the frames of these entries can be sent unchanged."""
    if plain & ONLY_RAW:
        if not _RAW.issuperset(map(_datatype_of, entries)):
            return False
    elif plain == _MUTATIONS_WITHOUT_XATTRS:
        return _PLAIN_KINDS.issuperset(map(_kind_of, entries))
    elif plain & WITHOUT_XATTRS and not _WITHOUT_XATTRS.issuperset(map(_datatype_of, entries)):
        return False
    return not plain & ONLY_MUTATIONS or _MUTATIONS.issuperset(map(_opcode_of, entries))


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
