"""Many frames at once: stored changes as they leave on a stream, joined. Pure.

A backlog is sent in runs: the body of a block is copied once, the opaques are written into the
copy, and the copy is what leaves. That holds for frames which leave as they are stored; whoever has
to look at each frame (a filter, another form, previous values) takes them one by one.

Which frames those are is told by the flags of `vbucket.store.block`: a run holds frames for which
all of them are true; `ALL_PLAIN` asks for none.

Who calls it: store and versions. The bytes are those that going frame by frame gives.
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
from vbucket.model.entry import DATATYPE_AT, OPCODE_AT, PREFIX_BYTES
from vbucket.store.block import BODY_BYTES_TARGET, ONLY_MUTATIONS, ONLY_RAW, Block

ALL_PLAIN: Final = 0
"""Every stored frame leaves as it is."""

_OPAQUE_AT: Final = 12
_put_opaque: Final = Struct(">I").pack_into
_opcode_of: Final = itemgetter(OPCODE_AT)
_datatype_of: Final = itemgetter(DATATYPE_AT)
_frame_of: Final = itemgetter(slice(PREFIX_BYTES, None))
_FEW: Final = 4
"""Entries up to which joining them costs more than it saves: what a live stream sends."""
_MUTATIONS: Final = frozenset({int(Opcode.DCP_MUTATION)})
_RAW: Final = frozenset({0})


class RunBatch(NamedTuple):
    """Frames of a backlog, joined. `next_seqno`: where to go on."""

    pieces: list[bytes | bytearray]
    """Each holds one or more whole frames."""
    next_seqno: int
    wire_bytes: int
    last_seqno: int
    """The last version that was there, sent or left out; 0: none."""


def run_of_block(
    block: Block, body: bytes, low: int, high: int, opaque: int, skip: Collection[int]
) -> list[bytes | bytearray]:
    """Return the frames with the indexes low to high - 1, joined, their opaque set.

    `body` is the block's, checked. Those whose seqno is in `skip` are left out, and what is left
    comes in as many pieces as that makes.
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
        # One call for each frame, made by C: nothing else that plain Python has is faster.
        deque(map(_put_opaque, repeat(opaques), starts, repeat(opaque)), maxlen=0)


def _set_opaques_evenly(joined: bytearray, frame_bytes: int, opaque: int) -> None:
    """Write the opaque into frames of one length: four writes, each of one byte of every frame."""
    count = len(joined) // frame_bytes
    for place, byte in enumerate(opaque.to_bytes(4, "big"), _OPAQUE_AT):
        joined[place::frame_bytes] = bytes((byte,)) * count


@lru_cache(maxsize=64)
def _multiples(frame_bytes: int) -> array[int]:
    """Return where the frames of a full block end that all have this length; some KiB."""
    return array("I", range(frame_bytes, BODY_BYTES_TARGET + 1, frame_bytes))


def are_plain(entries: list[bytes], plain: int) -> bool:
    """Whether the frames of these entries leave as they are."""
    if plain & ONLY_MUTATIONS and not _MUTATIONS.issuperset(map(_opcode_of, entries)):
        return False
    return not plain & ONLY_RAW or _RAW.issuperset(map(_datatype_of, entries))


def entries_within(entries: list[bytes], bytes_max: int) -> tuple[list[bytes], int]:
    """Return the first entries, as many as it takes to reach `bytes_max` of frames, and the bytes
    of their frames; all where they do not reach it.
    """
    size = sum(map(len, entries)) - PREFIX_BYTES * len(entries)
    if size < bytes_max or len(entries) == 1:
        return entries, size
    ends = list(accumulate(len(entry) - PREFIX_BYTES for entry in entries))
    stop = min(bisect_left(ends, bytes_max) + 1, len(ends))
    return entries[:stop], ends[stop - 1]


def run_of_entries(entries: list[bytes], opaque: int) -> list[bytes | bytearray]:
    """Return the frames of entries, their opaque set; many of them joined."""
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
