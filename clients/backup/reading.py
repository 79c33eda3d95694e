"""A partition as of a point: the newest version of each key, read in two passes.

The first pass finds which seqno is the newest of each key, the second one gives those frames, in
seqno order. So what is in memory are one partition's keys and the chunks in use, never the values
of a partition, and never the keys of two.

Damage: what cannot be read is named (`Damage`). A partition with damage is given as of its newest
whole state before it, mostly an older one; with `salvage` it is all that can be read, and keys may
come back in versions that were replaced or deleted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import repeat
from struct import Struct
from typing import Final, NamedTuple

from clients.backup.archive import Archive
from clients.backup.chunk import Section
from clients.backup.errors import ArchiveFormatError, PointError
from clients.backup.legs import Interval, end_of, intervals, newest_whole, whole_states
from clients.backup.manifest import RunRecord, SegmentRecord
from clients.backup.point import Point, chain_of
from clients.backup.segment import DamagedError, Footer, parse_chunk
from dcp.wire.frame import HEADER_BYTES
from dcp.wire.message import SYSTEM_EVENT_EXTRAS
from dcp.wire.opcode import Opcode
from vbucket.ids import time_ns_from_cas
from vbucket.manifest import SystemEventKind, collection_of, parse_system_event

CACHE_BYTES: Final = 32 * 1024 * 1024
"""Chunks that are kept: those of a partition are read twice, shared ones by many partitions."""

_CHANGE: Final = Struct(">xBHBxxxIxxxxQQ")
"""Opcode, key length, extras length, body length, CAS, seqno."""
_BODY: Final = Struct(">8xI")
_SEQNO: Final = Struct(">24xQ")
_SYSTEM_EVENT: Final = int(Opcode.DCP_SYSTEM_EVENT)
_MUTATION: Final = int(Opcode.DCP_MUTATION)

Frame = tuple[bytes, int, int]
"""A chunk's bytes, and where in them a frame is."""


Bounds = tuple[list[int], list[int]]
"""Where frames begin, and where they end."""


class Stretch(NamedTuple):
    """Frames of one chunk, in seqno order: its bytes, and where in them each begins and ends."""

    data: bytes
    starts: Sequence[int]
    ends: Sequence[int]
    is_dense: bool
    """Between the first and the last nothing is left out."""


class Damage(NamedTuple):
    """What cannot be read: where it is, and what it held of a partition."""

    path: str
    what: str
    vb_id: int
    first_seqno: int
    last_seqno: int

    def __str__(self) -> str:
        """Return it in words."""
        reach = f"vbucket {self.vb_id}, seqno {self.first_seqno} to {self.last_seqno}"
        return f"{self.path}: {self.what}: {reach}"


class Part(NamedTuple):
    """A section that is to be read, and which seqnos of it: (low, high]."""

    path: str
    chunk: tuple[int, int]
    section: Section
    low_seqno: int
    high_seqno: int


class View(NamedTuple):
    """A partition as of a point."""

    vb_id: int
    wanted_seqno: int
    """Where the point is; `seqno` below it is where the archive has a whole state."""
    seqno: int
    parts: list[Part]
    winners: frozenset[int] | set[int]
    """Seqnos of the newest versions, deletions too."""
    damages: list[Damage]


class Reader:
    """See the module. Reads runs of one archive."""

    def __init__(
        self, archive: Archive, runs: Sequence[RunRecord], *, salvage: bool = False
    ) -> None:
        self._archive = archive
        self._runs = runs
        self._salvage = salvage
        self._segments = {record.run: record.segments for record in runs}
        self._footers: dict[str, Footer | str] = {}
        """By path; in words what is wrong with it where it cannot be read."""
        self._chunks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._chunk_bytes = 0
        self._damaged_chunks: dict[tuple[str, int], str] = {}
        self._known_bounds: dict[tuple[str, int, int], Bounds] = {}
        """By path, chunk and offset in it, of the partition that was asked for last."""

    def view(self, vb_id: int, point: Point) -> View:
        """Return a partition as of a point. Raises PointError."""
        self._known_bounds.clear()
        chain = chain_of(self._runs, vb_id)
        end = end_of(chain)
        wanted = end if point.seqnos is None else point.seqnos.get(vb_id, end)
        if wanted > end:
            raise PointError(
                f"the archive ends at seqno {end} there, {wanted} is not in it", vb_id=vb_id
            )
        ranges = whole_states(chain)
        seqno = newest_whole(ranges, wanted)
        time_ns = point.time_ns
        damages: list[Damage] = []
        while True:
            parts, lost = self._parts(vb_id, intervals(chain, seqno))
            newest, stop, is_late, more = self._newest(parts, time_ns)
            damages += [damage for damage in (*lost, *more) if damage not in damages]
            if lost and not self._salvage:
                stop = min((stop, *(damage.first_seqno for damage in lost)))
                is_late = is_late and stop <= min(damage.first_seqno for damage in lost)
            if stop > seqno:
                break
            if is_late:
                wanted, time_ns = stop - 1, None
            seqno = newest_whole(ranges, stop - 1)
        return View(vb_id, wanted, seqno, parts, set(newest.values()), damages)

    def frames(self, view: View) -> Iterator[Frame]:
        """Yield the newest versions in seqno order."""
        for data, starts, ends, _ in self.stretches(view):
            yield from zip(repeat(data), starts, ends)

    def stretches(self, view: View) -> Iterator[Stretch]:
        """Yield the same, all that a section has of them at once."""
        winners = view.winners
        for part in view.parts:
            data = self._chunk(part)
            if data is None:
                continue
            starts, ends = self._bounds(part, data)
            if not starts:
                continue
            seqnos = [seqno for (seqno,) in map(_SEQNO.unpack_from, repeat(data), starts)]
            low, high = part.low_seqno, part.high_seqno
            if winners.issuperset(seqnos) and low < min(seqnos) and max(seqnos) <= high:
                yield Stretch(data, starts, ends, is_dense=True)
                continue
            chosen = [
                index
                for index, seqno in enumerate(seqnos)
                if seqno in winners and low < seqno <= high
            ]
            if chosen:
                yield Stretch(
                    data, [starts[at] for at in chosen], [ends[at] for at in chosen], is_dense=False
                )

    # -- inside --------------------------------------------------------------------------------

    def _bounds(self, part: Part, data: bytes) -> Bounds:
        """Return where each frame of a section begins and ends; both passes need it."""
        place = (part.path, part.chunk[0], part.section.offset)
        bounds = self._known_bounds.get(place)
        if bounds is None:
            bounds = self._known_bounds[place] = _bounds_of(data, part.section)
        return bounds

    def _newest(
        self, parts: list[Part], time_ns: int | None
    ) -> tuple[dict[bytes, int], int, bool, list[Damage]]:
        """Return key -> seqno of its newest version; the first seqno that does not count, and
        whether that is for its time; and what is damaged.
        """
        newest: dict[bytes, int] = {}
        damages: list[Damage] = []
        for part in parts:
            data = self._chunk(part)
            if data is None:
                section = part.section
                first = max(section.first_seqno, part.low_seqno + 1)
                what = self._damaged_chunks[part.path, part.chunk[0]]
                damages.append(
                    Damage(
                        part.path, f"the chunk at {part.chunk[0]}: {what}", section.vb_id, first,
                        min(section.last_seqno, part.high_seqno),
                    )
                )  # fmt: skip
                if not self._salvage:
                    return newest, first, False, damages
                continue
            late_seqno = _fold(newest, data, self._bounds(part, data), part, time_ns)
            if late_seqno:
                return newest, late_seqno, True, damages
        return newest, 2**64, False, damages

    def _parts(self, vb_id: int, visible: list[Interval]) -> tuple[list[Part], list[Damage]]:
        """Return what is to be read of a partition, in seqno order, and what is lost."""
        parts: list[Part] = []
        damages: list[Damage] = []
        for run, leg, low, high in visible:
            for segment in self._segments[run]:
                footer = self._footer(segment)
                if isinstance(footer, str):
                    damages += (
                        Damage(segment.path, footer, vb_id, max(first, low + 1), min(last, high))
                        for held_vb, held_leg, first, last in segment.held
                        if (held_vb, held_leg) == (vb_id, leg) and first <= high and last > low
                    )
                    continue
                parts += (
                    Part(segment.path, footer.chunks[section.chunk], section, low, high)
                    for section in footer.sections_of(vb_id)
                    if section.leg == leg
                    and section.first_seqno <= high
                    and section.last_seqno > low
                )
        parts.sort(key=lambda part: (part.low_seqno, part.section.first_seqno))
        return parts, damages

    def _footer(self, segment: SegmentRecord) -> Footer | str:
        footer = self._footers.get(segment.path)
        if footer is None:
            try:
                footer = self._archive.footer(segment.path)
                if footer.held() != segment.held:
                    footer = "it is not the segment that its run wrote"
            except FileNotFoundError:
                footer = "the file is missing"
            except (DamagedError, ArchiveFormatError) as error:
                footer = str(error)
            self._footers[segment.path] = footer
        return footer

    def _chunk(self, part: Part) -> bytes | None:
        """Return a chunk's bytes, None where it is damaged."""
        offset, size_bytes = part.chunk
        place = (part.path, offset)
        data = self._chunks.get(place)
        if data is not None:
            self._chunks.move_to_end(place)
            return data
        if place in self._damaged_chunks:
            return None
        try:
            data = parse_chunk(self._archive.read(part.path, offset, offset + size_bytes))
            if part.section.offset + part.section.size_bytes > len(data):
                raise DamagedError("it is too short")
        except (DamagedError, FileNotFoundError) as error:
            self._damaged_chunks[place] = str(error)
            return None
        self._chunks[place] = data
        self._chunk_bytes += len(data)
        while self._chunk_bytes > CACHE_BYTES and len(self._chunks) > 1:
            self._chunk_bytes -= len(self._chunks.popitem(last=False)[1])
        return data


def _bounds_of(data: bytes, section: Section) -> Bounds:
    """Return where each frame of a section begins, and where it ends."""
    unpack = _BODY.unpack_from
    at, end = section.offset, section.offset + section.size_bytes
    starts: list[int] = []
    while at < end:
        starts.append(at)
        at += HEADER_BYTES + unpack(data, at)[0]
    return starts, [*starts[1:], at]


def _fold(
    newest: dict[bytes, int], data: bytes, bounds: Bounds, part: Part, time_ns: int | None
) -> int:
    """Note a section's changes; return the first seqno that is later than `time_ns`, or 0."""
    starts, ends = bounds
    if not starts:
        return 0
    low, high = part.low_seqno, part.high_seqno
    rows = list(map(_CHANGE.unpack_from, repeat(data), starts))
    opcodes, key_sizes, extras_sizes, _, all_cas, seqnos = zip(*rows, strict=True)
    is_early = time_ns is None or time_ns_from_cas(max(all_cas)) <= time_ns
    if is_early and _SYSTEM_EVENT not in opcodes and low < min(seqnos) and max(seqnos) <= high:
        # Mostly so; the loop below does the same, change by change.
        keys = [
            data[(key_at := at + HEADER_BYTES + extras_len) : key_at + key_len]
            for at, extras_len, key_len in zip(starts, extras_sizes, key_sizes, strict=True)
        ]
        newest.update(zip(keys, seqnos, strict=True))
        return 0
    for row, at, stop in zip(rows, starts, ends, strict=True):
        opcode, key_len, extras_len, _, cas, seqno = row
        if low < seqno <= high:
            if time_ns is not None and time_ns_from_cas(cas) > time_ns:
                return int(seqno)
            if opcode == _SYSTEM_EVENT:
                _apply_event(newest, data[at:stop])
            else:
                key_at = at + HEADER_BYTES + extras_len
                newest[data[key_at : key_at + key_len]] = seqno
    return 0


def _apply_event(newest: dict[bytes, int], frame: bytes) -> None:
    """Forget what was in a collection that is dropped."""
    key_at = HEADER_BYTES + frame[4]
    value_at = key_at + int.from_bytes(frame[2:4], "big")
    _, kind, version = SYSTEM_EVENT_EXTRAS.unpack_from(frame, HEADER_BYTES)
    try:
        event = parse_system_event(kind, version, frame[key_at:value_at], frame[value_at:])
    except ValueError:
        return  # of a kind that is not known here: it drops nothing that we know of
    if event.kind == SystemEventKind.DROP_COLLECTION:
        gone = [key for key in newest if collection_of(key) == event.collection_id]
        for key in gone:
            del newest[key]
