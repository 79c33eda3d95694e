"""Many frames at once: stored changes as they leave on a stream, joined. Pure.

A backlog is sent in runs: the body of a block is copied once, the opaques are written into the
copy, and the copy is what leaves. That holds for frames which leave as they are stored; whoever has
to look at each frame (a filter, another form, previous values) takes them one by one.

Which frames those are is told by the flags of `vbucket.block`: a run holds frames for which all of
them are true; `ALL_PLAIN` asks for none.

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
from vbucket.block import BODY_BYTES_TARGET, ONLY_MUTATIONS, ONLY_RAW, Block
from vbucket.entry import DATATYPE_AT, OPCODE_AT, PREFIX_BYTES

ALL_PLAIN: Final = 0
"""Every stored frame leaves as it is."""

_OPAQUE_AT: Final = 12
_put_opaque: Final = Struct(">I").pack_into
_opcode_of: Final = itemgetter(OPCODE_AT)
_datatype_of: Final = itemgetter(DATATYPE_AT)
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
    starts = ends[low - 1 : high - 1] if low else array("I", (0, *ends[: high - 1]))
    first = starts[0]
    joined = bytearray(memoryview(body)[first : ends[high - 1]])
    _set_opaques(joined, block.ends, starts, opaque)
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


def _set_opaques(joined: bytearray, ends: array[int], starts: Sequence[int], opaque: int) -> None:
    """Write the opaque into joined frames. `ends` are those of the whole block, `starts` of these
    frames.
    """
    frame_bytes, count, first = ends[0], len(starts), starts[0]
    if frame_bytes <= BODY_BYTES_TARGET and ends == _multiples(frame_bytes)[: len(ends)]:
        # All are of one length: four writes, each of one byte of every frame.
        for place, byte in enumerate(opaque.to_bytes(4, "big"), _OPAQUE_AT):
            joined[place::frame_bytes] = bytes((byte,)) * count
        return
    with memoryview(joined) as view, view[_OPAQUE_AT:] as opaques:
        # One call for each frame, made by C: nothing else that plain Python has is faster.
        places: Sequence[int] = [at - first for at in starts] if first else starts
        deque(map(_put_opaque, repeat(opaques), places, repeat(opaque)), maxlen=0)


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


def run_of_entries(entries: list[bytes], opaque: bytes) -> list[bytes]:
    """Return the frames of entries, their opaque set."""
    return [entry[PREFIX_BYTES:24] + opaque + entry[28:] for entry in entries]


assert array("I").itemsize == 4
