"""Collects runs of frames into chunks. A chunk is compressed and checksummed as one. Pure.

When a partition has CHUNK_BYTES of frames, they become a chunk. The remaining frames of finished
partitions share chunks, so a run with few changes has a few chunks, not a thousand.

    chunk    frames of section 1, frames of section 2, ...
    section  consecutive changes of one partition and leg

Invariants
- the sections of a leg are in seqno order across chunks: if a partition has frames in the open
  shared chunk, that chunk is finished before a chunk with only the partition's frames;
- a chunk contains the legs of its partitions as of its last change. If the run is killed, the next
  one continues from the legs in the chunks on disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Final, NamedTuple

from clients.backup.archives.legs import Leg
from dcp.wire.frame import HEADER_BYTES

CHUNK_BYTES: Final = 256 * 1024
"""Raw bytes of a chunk. Larger ones compress little better, and lose more when damaged."""
GATHERED_BYTES_MAX: Final = 48 * 1024 * 1024
"""Maximum bytes of frames that wait for a full chunk, over all partitions. Beyond it, partitions
share chunks."""

FRAME_HEAD: Final = Struct(">BBHBBHIIQQ")
"""A header and the seqno that follows it in every stored frame."""


class Piece(NamedTuple):
    """Frames of one partition and leg, in order, as they arrived."""

    vb_id: int
    leg: int
    first_seqno: int
    last_seqno: int
    changes: int
    data: bytes
    legs: list[Leg]
    """The partition's legs in this run, as of the last change. They are saved with it."""


class Section(NamedTuple):
    """The place of a partition's changes in a chunk."""

    vb_id: int
    leg: int
    chunk: int
    offset: int
    size_bytes: int
    changes: int
    first_seqno: int
    last_seqno: int


class RawChunk(NamedTuple):
    """A chunk before compression. The field `chunk` of its sections is 0."""

    sections: list[Section]
    data: bytes
    legs: dict[int, list[Leg]]


class _Gathered:
    """Waiting frames of one partition and leg."""

    __slots__ = ("count", "data", "first_seqno", "last_seqno", "leg", "legs", "size_bytes")

    def __init__(self, piece: Piece) -> None:
        self.leg = piece.leg
        self.first_seqno = piece.first_seqno
        self.last_seqno = 0
        self.count = self.size_bytes = 0
        self.data: list[bytes] = []
        self.legs: list[Leg] = []


class Chunker:
    """Collects the pieces of a run into chunks."""

    def __init__(
        self, chunk_bytes: int = CHUNK_BYTES, gathered_bytes_max: int = GATHERED_BYTES_MAX
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._gathered_bytes_max = gathered_bytes_max
        self._gathered: dict[int, _Gathered] = {}
        """By partition."""
        self._gathered_bytes = 0
        self._shared: list[tuple[int, _Gathered]] = []
        self._shared_bytes = 0

    def add(self, piece: Piece) -> Iterator[RawChunk]:
        """Add a run of frames; yield the chunks that are now full."""
        vb_id = piece.vb_id
        gathered = self._gathered.get(vb_id)
        if gathered is not None and gathered.leg != piece.leg:
            yield from self._share(vb_id)
            gathered = None
        if gathered is None:
            self._gathered[vb_id] = gathered = _Gathered(piece)
        assert gathered.last_seqno < piece.first_seqno, "changes of a leg come in order"
        gathered.data.append(piece.data)
        gathered.count += piece.changes
        gathered.size_bytes += len(piece.data)
        gathered.last_seqno = piece.last_seqno
        gathered.legs = piece.legs
        self._gathered_bytes += len(piece.data)
        if gathered.size_bytes >= self._chunk_bytes:
            if any(waiting == vb_id for waiting, _ in self._shared):
                yield self._take_shared()
            del self._gathered[vb_id]
            self._gathered_bytes -= gathered.size_bytes
            yield _chunk([(vb_id, gathered)])
        elif self._gathered_bytes > self._gathered_bytes_max:
            for waiting in list(self._gathered):
                yield from self._share(waiting)

    def finish(self, vb_id: int) -> Iterator[RawChunk]:
        """A partition is finished; yield the chunks that are now full."""
        if vb_id in self._gathered:
            yield from self._share(vb_id)

    def flush(self) -> Iterator[RawChunk]:
        """All partitions are finished; yield the remaining chunks."""
        for vb_id in list(self._gathered):
            yield from self._share(vb_id)
        if self._shared:
            yield self._take_shared()

    def _share(self, vb_id: int) -> Iterator[RawChunk]:
        gathered = self._gathered.pop(vb_id)
        self._gathered_bytes -= gathered.size_bytes
        self._shared.append((vb_id, gathered))
        self._shared_bytes += gathered.size_bytes
        if self._shared_bytes >= self._chunk_bytes:
            yield self._take_shared()

    def _take_shared(self) -> RawChunk:
        shared, self._shared, self._shared_bytes = self._shared, [], 0
        return _chunk(shared)


def frames_of(data: bytes, section: Section) -> Iterator[tuple[int, int, int]]:
    """Yield (seqno, start, stop) of a section's frames in its chunk's bytes.

    Raises ValueError if they do not match the section.
    """
    unpack = FRAME_HEAD.unpack_from
    at, end = section.offset, section.offset + section.size_bytes
    last, count = section.first_seqno - 1, 0
    if end > len(data):
        raise ValueError("a section reaches beyond its chunk")
    while end - at >= FRAME_HEAD.size:
        _, _, _, _, _, vb_id, body, _, _, seqno = unpack(data, at)
        stop = at + HEADER_BYTES + body
        if vb_id != section.vb_id or seqno <= last or stop > end:
            raise ValueError(f"a wrong frame after seqno {last} of partition {section.vb_id}")
        yield seqno, at, stop
        at, last = stop, seqno
        count += 1
    if at != end or count != section.changes or last != section.last_seqno:
        raise ValueError(
            f"{count} frames up to seqno {last} instead of {section.changes} up to"
            f" {section.last_seqno}"
        )


def _chunk(gathered: list[tuple[int, _Gathered]]) -> RawChunk:
    sections, parts, legs = [], [], {}
    offset = 0
    for vb_id, item in gathered:
        size = item.size_bytes
        sections.append(
            Section(vb_id, item.leg, 0, offset, size, item.count, item.first_seqno, item.last_seqno)
        )
        parts += item.data
        offset += size
        legs[vb_id] = item.legs
    return RawChunk(sections, b"".join(parts), legs)
