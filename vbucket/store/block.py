"""Blocks: many versions of one partition, in seqno order, in one database value.

    key     vb u16, first seqno u64 (big-endian: blocks sort by partition and seqno)
    value   header, columns, body
    header  format, flags, reserved, count, epoch, seqno before, first, last seqno, body length,
            CRC-32C of the body, CRC-32C of key + header + columns
    columns frame ends u32[], CRC-32C of each frame u32[], prev seqnos u64[], and where the seqnos
            have gaps: seqnos u64[]      (little-endian, so that arrays take them as they are)
    body    the frames of the entries, without their 12-byte prefix, one after another

Who calls it: the store reads blocks, merge and compaction build them. Pure.

Invariants
- seqnos ascend strictly within a block; a block never spans two leader epochs;
- `seqno_before` is the last seqno of the block before this one (0: none). So a reader notices when
  a whole block has vanished;
- the body aims at `BODY_BYTES_TARGET`; one larger frame makes a larger block;
- every flipped bit is noticed: opening a block checks header and columns, reading a single frame
  its own checksum, a scan that of the body. `find_frame` does not open the block: it checks the
  frame's checksum, seqno, key and CAS.

**Opened blocks.** A snapshot of a stream first reads all of its blocks to find the superseded
versions, and then sends them in several turns. `OpenedBlocks` keeps the blocks opened first for
these turns: at most WALKS_MAX walks of at most WALK_BLOCKS_MAX blocks, the oldest dropped first. A
walk holds all blocks that reach into its range, in order and without gaps. The store clears it when
it moves to another state.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, compress, groupby, islice, pairwise, takewhile
from operator import ge, itemgetter, sub
from struct import Struct
from typing import Final, NamedTuple

import google_crc32c

from dcp.wire.opcode import Opcode
from dcp.wire.xattrs import DATATYPE_XATTR
from vbucket.model.datatype import SNAPPY
from vbucket.model.entry import PREFIX, PREFIX_BYTES
from vbucket.store.environment import Buffer, StoreDamagedError

BODY_BYTES_TARGET: Final = 32 * 1024
"""Every merge rewrites each touched partition's last block. Measured with 300,000 changes of 128
bytes over 1,024 partitions: 3.6 us per entry instead of 5.4 with 64 KiB; backfills cost the same
(0.4 us per frame), with 16 KiB half as much again."""
BLOCK_FORMAT: Final = 1
BLOCK_KEY: Final = Struct(">HQ")
"""vbucket, first seqno."""
BLOCK_HEADER: Final = Struct("<BBHIIQQQIII")
BLOCK_HEADER_BYTES: Final = BLOCK_HEADER.size
_CRC_AT: Final = BLOCK_HEADER_BYTES - 4
_HAS_SEQNOS: Final = 0x01
ONLY_MUTATIONS: Final = 0x02
"""Flag: every frame is a DCP_MUTATION. Older versions do not set it."""
ONLY_RAW: Final = 0x04
"""Flag: every frame has datatype raw."""
ONLY_UNPACKED: Final = 0x08
"""Flag: no frame has a compressed value. In a block this flag and the next are inverted, because
older versions stored nothing else and set no flag."""
WITHOUT_XATTRS: Final = 0x10
"""Flag: no frame has XATTRs."""
_INVERTED: Final = ONLY_UNPACKED | WITHOUT_XATTRS
_KINDS: Final = ONLY_MUTATIONS | ONLY_RAW | _INVERTED
_MUTATION: Final = int(Opcode.DCP_MUTATION)
_opcode_of: Final = itemgetter(1)
_datatype_of: Final = itemgetter(5)
_frame_of: Final = itemgetter(slice(PREFIX_BYTES, None))
_numbers: Final = Struct(">QI24xQ").unpack_from
"""Previous seqno, epoch and seqno of an entry."""
_u32: Final = Struct("<I").unpack_from
_FRAME_HEAD: Final = Struct(">xxHBxHI4xQQ")
"""Key length, extras length, vbucket, body length, CAS of a frame, and its seqno."""
_FRAME_HEAD_BYTES: Final = _FRAME_HEAD.size
_frame_head: Final = _FRAME_HEAD.unpack_from
_crc32c = google_crc32c.value
WALK_BLOCKS_MAX: Final = 32
WALKS_MAX: Final = 16
"""As many as the running backlogs of a connection. A block takes some KiB for its columns."""


def described_in(value: bytes) -> tuple[int, int]:
    """Return how long a block is, as its header says, and its first seqno."""
    _, flags, _, count, _, _, first, _, body_bytes, _, _ = BLOCK_HEADER.unpack_from(value)
    return BLOCK_HEADER_BYTES + count * (24 if flags & _HAS_SEQNOS else 16) + body_bytes, first


def is_block_of(key: bytes, value: bytes) -> bool:
    """Whether the header of a block of this length has the checksum of a block with this key."""
    if len(value) < BLOCK_HEADER_BYTES:
        return False
    _, flags, _, count, *_, crc = BLOCK_HEADER.unpack_from(value)
    body_at = BLOCK_HEADER_BYTES + count * (24 if flags & _HAS_SEQNOS else 16)
    return bool(_crc32c(key + value[:_CRC_AT] + value[BLOCK_HEADER_BYTES:body_at]) == crc)


def may_have_size(size_bytes: int, count: int, body_bytes: int) -> bool:
    """Whether a block of so many versions may have this size, with gaps between seqnos or none."""
    return size_bytes - BLOCK_HEADER_BYTES - body_bytes in {16 * count, 24 * count}


class BlockDamagedError(StoreDamagedError):
    """A block is not what was written, or is missing."""


class Block:
    """An open block: header and columns are checked, the body is not yet.

    `seqnos` is a range if there are no gaps. `value` and `body` are as the database handed them
    out.
    """

    __slots__ = (
        "_frame_crcs",
        "body",
        "body_crc",
        "ends",
        "epoch",
        "first_seqno",
        "kinds",
        "last_seqno",
        "prev_seqnos",
        "seqno_before",
        "seqnos",
        "value",
        "vb_id",
    )

    def __init__(self, key: bytes, value: Buffer) -> None:
        if len(key) != BLOCK_KEY.size:
            raise BlockDamagedError(
                f"the key {key.hex()} of a block is not {BLOCK_KEY.size} bytes long; check the "
                "disk and restore a backup"
            )
        vb_id, first_seqno = BLOCK_KEY.unpack(key)
        self.vb_id: int = vb_id
        self.first_seqno: int = first_seqno
        if len(value) < BLOCK_HEADER_BYTES:
            raise self.damaged("is cut short")
        (
            _, flags, _, count, epoch, seqno_before, first, last_seqno, body_bytes, body_crc, crc,
        ) = BLOCK_HEADER.unpack_from(value)  # fmt: skip
        self.epoch: int = epoch
        self.seqno_before: int = seqno_before
        self.last_seqno: int = last_seqno
        self.body_crc: int = body_crc
        columns_bytes = count * (24 if flags & _HAS_SEQNOS else 16)
        body_at = BLOCK_HEADER_BYTES + columns_bytes
        if body_at + body_bytes != len(value):
            raise self.damaged("has a wrong length")
        head = bytes(value[:body_at])
        if _crc32c(key + head[:_CRC_AT] + head[BLOCK_HEADER_BYTES:]) != crc or first != first_seqno:
            raise self.damaged("has a header that does not match its checksum")
        if head[0] != BLOCK_FORMAT:
            raise self.damaged(f"has format {head[0]}, this program knows {BLOCK_FORMAT}")
        at = BLOCK_HEADER_BYTES
        self.ends = _column("I", head[at : at + 4 * count])
        self._frame_crcs = head[at + 4 * count : at + 8 * count]
        self.prev_seqnos = _column("Q", head[at + 8 * count : at + 16 * count])
        self.seqnos: Sequence[int] = (
            _column("Q", head[at + 16 * count :])
            if flags & _HAS_SEQNOS
            else range(first_seqno, first_seqno + count)
        )
        self.kinds: int = (flags ^ _INVERTED) & _KINDS
        """Which flags (ONLY_MUTATIONS and so on) the block promises."""
        self.value = value
        self.body = value[body_at:]

    @property
    def key(self) -> bytes:
        """The block's key in the table."""
        return BLOCK_KEY.pack(self.vb_id, self.first_seqno)

    @property
    def frame_crcs(self) -> array[int]:
        """The checksum of each frame. Streams do not need them."""
        return _column("I", self._frame_crcs)

    def checked_body(self) -> bytes:
        """Return the body. Raises BlockDamagedError if it is not what was written."""
        body = bytes(self.body)
        if _crc32c(body) != self.body_crc:
            raise self.damaged("has a body that does not match its checksum")
        return body

    def entry(self, seqno: int) -> bytes | None:
        """Return the entry of a seqno, None if it is in a gap. Raises BlockDamagedError."""
        index = bisect_left(self.seqnos, seqno)
        if index == len(self.seqnos) or self.seqnos[index] != seqno:
            return None
        start = self.ends[index - 1] if index else 0
        frame = bytes(self.body[start : self.ends[index]])
        if _crc32c(frame) != self.frame_crcs[index]:
            raise self.damaged(f"has a frame (seqno {seqno}) that does not match its checksum")
        return PREFIX.pack(self.prev_seqnos[index], self.epoch) + frame

    def entries(self, count: int | None = None) -> list[bytes]:
        """Return all entries, or the first `count`. Raises BlockDamagedError."""
        body = self.checked_body()
        ends = self.ends[:count]
        starts = [0, *ends[:-1]]
        pack = PREFIX.pack
        epoch = self.epoch
        return [
            pack(prev_seqno, epoch) + body[start:end]
            for prev_seqno, start, end in zip(self.prev_seqnos, starts, ends, strict=False)
        ]

    def damaged(self, what: str) -> BlockDamagedError:
        """Return the error that names this block."""
        last = getattr(self, "last_seqno", None)
        return BlockDamagedError(
            f"partition {self.vb_id}: the block of seqnos {self.first_seqno} to {last or '?'} "
            f"{what}. "
            "This partition's history cannot be served; check the disk and restore a backup"
        )


def block_key(vb_id: int, seqno: int) -> bytes:
    """Return the key of the block that begins with `seqno`."""
    return BLOCK_KEY.pack(vb_id, seqno)


def follow_seqno(block: Block, seqno_before: int) -> tuple[bytes, bytes]:
    """Return key and value of a block with another `seqno_before`.

    Raises BlockDamagedError: damage is not written to other pages, whose checksums would be right.
    """
    body = block.checked_body()
    return _packed_block(
        block.vb_id, block.epoch, seqno_before, block.seqnos, block.prev_seqnos, block.ends,
        block.frame_crcs, body, block.body_crc,
        _KINDS if block.kinds == _KINDS else kinds_of(body, block.ends),
    )  # fmt: skip


def _packed_block(
    vb_id: int,
    epoch: int,
    seqno_before: int,
    seqnos: Sequence[int],
    prev_seqnos: Sequence[int],
    ends: Sequence[int],
    frame_crcs: Sequence[int],
    body: bytes,
    body_crc: int,
    kinds: int,
) -> tuple[bytes, bytes]:
    first, last, count = seqnos[0], seqnos[-1], len(seqnos)
    is_dense = last - first + 1 == count
    columns = (
        _packed("I", ends)
        + _packed("I", frame_crcs)
        + _packed("Q", prev_seqnos)
        + (b"" if is_dense else _packed("Q", seqnos))
    )
    flags = kinds ^ _INVERTED | (0 if is_dense else _HAS_SEQNOS)
    key = BLOCK_KEY.pack(vb_id, first)
    header = BLOCK_HEADER.pack(
        BLOCK_FORMAT, flags, 0, count, epoch, seqno_before, first, last,
        len(body), body_crc, 0,
    )[:_CRC_AT]  # fmt: skip
    crc: int = _crc32c(key + header + columns)
    return key, b"".join((header, crc.to_bytes(4, "little"), columns, body))


def find_frame(
    block_key: bytes, value: Buffer, seqno: int, key: bytes, *, cas: int
) -> bytes | None:
    """Return the frame of a version with this seqno, key and CAS without opening its block; None if
    it is not there or anything about it is wrong.

    Header and columns are not checked. The frame has its own checksum, and its seqno, key and CAS
    must match.
    """
    if len(block_key) != BLOCK_KEY.size or len(value) < BLOCK_HEADER_BYTES:
        return None
    vb_id, first_seqno = BLOCK_KEY.unpack(block_key)
    _, flags, _, count, *_ = BLOCK_HEADER.unpack_from(value)
    seqnos_at = BLOCK_HEADER_BYTES + 16 * count
    body_at = seqnos_at + (8 * count if flags & _HAS_SEQNOS else 0)
    if body_at > len(value):
        return None
    index = seqno - first_seqno
    if flags & _HAS_SEQNOS:
        index = bisect_left(_column("Q", bytes(value[seqnos_at:body_at])), seqno)
    if not 0 <= index < count:
        return None
    at = BLOCK_HEADER_BYTES + 4 * index
    start = _u32(value, at - 4)[0] if index else 0
    frame = bytes(value[body_at + start : body_at + _u32(value, at)[0]])
    if len(frame) < _FRAME_HEAD_BYTES or _crc32c(frame) != _u32(value, at + 4 * count)[0]:
        return None
    key_bytes, extras_bytes, frame_vb, body_bytes, frame_cas, frame_seqno = _frame_head(frame)
    key_at = _FRAME_HEAD_BYTES - 8 + extras_bytes
    is_it = (
        (frame_vb, frame_seqno, frame_cas) == (vb_id, seqno, cas)
        and frame[key_at : key_at + key_bytes] == key
        and _FRAME_HEAD_BYTES - 8 + body_bytes == len(frame)
    )
    return frame if is_it else None


def kinds_of(body: bytes, ends: Sequence[int]) -> int:
    """Return which kinds (ONLY_MUTATIONS and so on) hold for all frames of a body."""
    return _kinds([body[start:end] for start, end in pairwise((0, *ends))])


def _kinds(frames: Sequence[bytes]) -> int:
    kinds = ONLY_MUTATIONS if set(map(_opcode_of, frames)) == {_MUTATION} else 0
    bits = 0
    for datatype in set(map(_datatype_of, frames)):
        bits |= datatype
    if not bits & SNAPPY:
        kinds |= ONLY_UNPACKED
    if not bits & DATATYPE_XATTR:
        kinds |= WITHOUT_XATTRS
    return kinds if bits else kinds | ONLY_RAW


class _Columns:
    """Frames of one epoch on their way into blocks, and what a block tells of each of them."""

    __slots__ = ("are_plain", "frame_crcs", "lengths", "pieces", "prev_seqnos", "seqnos")

    def __init__(self) -> None:
        self.seqnos: list[int] = []
        self.prev_seqnos: list[int] = []
        self.lengths: list[int] = []
        self.frame_crcs: list[int] = []
        self.pieces: list[bytes] = []
        """The frames' bytes: whole bodies or single frames."""
        self.are_plain = True
        """Whether all blocks that were added promise all kinds. One that promises nothing may be
        of a version that did not say so: what it holds is looked at."""

    def add_block(self, block: Block, kept: bytes | None) -> None:
        """Add what is `kept` of a block (a byte for each version, 0 or 1), or all of it.

        Frames keep their checksums, so damage stays as noticeable as it was. Raises
        BlockDamagedError.
        """
        body, ends = block.checked_body(), block.ends
        self.are_plain &= block.kinds == _KINDS
        if kept is None:
            self.seqnos += block.seqnos
            self.prev_seqnos += block.prev_seqnos
            self.lengths += map(sub, ends, chain((0,), ends))
            self.frame_crcs += block.frame_crcs
            self.pieces.append(body)
            return
        assert len(kept) == len(ends), "what becomes of each version is said"
        self.seqnos += compress(block.seqnos, kept)
        self.prev_seqnos += compress(block.prev_seqnos, kept)
        self.frame_crcs += compress(block.frame_crcs, kept)
        spans = compress(pairwise(chain((0,), ends)), kept)
        frames = [body[start:end] for start, end in spans]
        self.lengths += map(len, frames)
        self.pieces += frames

    def add_frames(
        self, seqnos: Sequence[int], prev_seqnos: Sequence[int], frames: Sequence[bytes]
    ) -> None:
        """Add frames, opaque 0."""
        self.are_plain &= _kinds(frames) == _KINDS
        self.seqnos += seqnos
        self.prev_seqnos += prev_seqnos
        self.lengths += map(len, frames)
        self.frame_crcs += map(_crc32c, frames)
        self.pieces += frames

    def blocks(
        self, vb_id: int, epoch: int, seqno_before: int, body_bytes_target: int
    ) -> list[tuple[bytes, bytes]]:
        """Return key and value of blocks of the target size."""
        body = b"".join(self.pieces)
        ends = list(accumulate(self.lengths))
        blocks = []
        first = start = 0
        while first < len(ends):
            stop = max(first + 1, bisect_right(ends, start + body_bytes_target, first))
            part = slice(first, stop)
            own_ends = [end - start for end in ends[part]] if start else ends[part]
            own_body = body[start : ends[stop - 1]]
            kinds = _KINDS if self.are_plain else kinds_of(own_body, own_ends)
            blocks.append(
                _packed_block(
                    vb_id, epoch, seqno_before, self.seqnos[part], self.prev_seqnos[part],
                    own_ends, self.frame_crcs[part], own_body, _crc32c(own_body), kinds,
                )
            )  # fmt: skip
            seqno_before = self.seqnos[stop - 1]
            first, start = stop, ends[stop - 1]
        return blocks


def build_blocks(
    vb_id: int,
    entries: Sequence[bytes],
    *,
    seqno_before: int,
    tail: Block | None = None,
    body_bytes_target: int = BODY_BYTES_TARGET,
) -> list[tuple[bytes, bytes]]:
    """Return entries of one partition, in order, as blocks (key, value) of the target size.

    `seqno_before` is the last seqno that the partition has before them (0: none), `tail` its last
    block: when it has room and the epoch is the same, the first block returned replaces it.
    Raises ValueError when the seqnos do not ascend, BlockDamagedError.
    """
    if not entries:
        return []
    prev_seqnos, epochs, seqnos = zip(*map(_numbers, entries), strict=True)
    if any(map(ge, (seqno_before, *seqnos), seqnos)):
        raise ValueError(
            f"partition {vb_id}: seqnos do not ascend from {seqno_before}: {seqnos[:50]}"
        )
    frames = list(map(_frame_of, entries))
    has_room = tail is not None and len(tail.body) + len(frames[0]) <= body_bytes_target
    blocks: list[tuple[bytes, bytes]] = []
    first = 0
    for epoch, same in groupby(epochs):
        stop = first + len(list(same))
        columns = _Columns()
        if tail is not None and tail.epoch == epoch and has_room:
            columns.add_block(tail, None)
            seqno_before = tail.seqno_before
        tail = None
        columns.add_frames(seqnos[first:stop], prev_seqnos[first:stop], frames[first:stop])
        blocks += columns.blocks(vb_id, epoch, seqno_before, body_bytes_target)
        first, seqno_before = stop, seqnos[stop - 1]
    return blocks


def repack_blocks(
    vb_id: int,
    parts: Iterable[tuple[Block, bytes | None]],
    *,
    seqno_before: int,
    body_bytes_target: int = BODY_BYTES_TARGET,
) -> list[tuple[bytes, bytes]]:
    """Return what is kept of blocks that follow each other as blocks of the target size.

    Beside each block stands a byte for each of its versions, 1 where it is kept, or None where all
    are. Raises BlockDamagedError.
    """
    blocks: list[tuple[bytes, bytes]] = []
    for epoch, same in groupby(parts, key=_epoch_of):
        columns = _Columns()
        for block, kept in same:
            columns.add_block(block, kept)
        blocks += columns.blocks(vb_id, epoch, seqno_before, body_bytes_target)
        if columns.seqnos:
            seqno_before = columns.seqnos[-1]
    return blocks


def _epoch_of(part: tuple[Block, bytes | None]) -> int:
    return part[0].epoch


def _column(typecode: str, data: bytes) -> array[int]:
    column = array(typecode, data)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def _packed(typecode: str, values: Iterable[int]) -> bytes:
    column = array(typecode, values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


assert array("I").itemsize == 4, "columns of 4 bytes are arrays of type I"
assert array("Q").itemsize == 8, "columns of 8 bytes are arrays of type Q"


class _OpenedBlock(NamedTuple):
    start_seqno: int
    end_seqno: int
    blocks: list[Block]


class OpenedBlocks:
    """See the module."""

    def __init__(self) -> None:
        self._walks: dict[int, _OpenedBlock] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._walks.clear()

    def keep(
        self, vb_id: int, start_seqno: int, end_seqno: int, blocks: Iterator[Block]
    ) -> Iterable[Block]:
        """Return the blocks that `blocks` yields for [start, end]; keep them unless they are too
        many.
        """
        kept = list(islice(blocks, WALK_BLOCKS_MAX + 1))
        if len(kept) > WALK_BLOCKS_MAX:
            return chain(kept, blocks)
        self._walks.pop(vb_id, None)
        if len(self._walks) >= WALKS_MAX:
            del self._walks[next(iter(self._walks))]
        self._walks[vb_id] = _OpenedBlock(start_seqno, end_seqno, kept)
        return kept

    def blocks(self, vb_id: int, start_seqno: int, end_seqno: int) -> Iterator[Block] | None:
        """Return the blocks that reach into [start, end], None if they are not kept."""
        walk = self._walks.get(vb_id)
        if walk is None or start_seqno < walk.start_seqno or end_seqno > walk.end_seqno:
            return None
        at = bisect_left(walk.blocks, start_seqno, key=_last_seqno)
        return takewhile(lambda block: block.first_seqno <= end_seqno, walk.blocks[at:])


def _last_seqno(block: Block) -> int:
    return block.last_seqno
