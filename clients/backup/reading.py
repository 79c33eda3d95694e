"""A partition as of a point: the newest version of each key, read in two passes.

The first pass finds the newest seqno of each key. The second pass returns those frames in seqno
order. So memory holds the keys of one partition and the cached chunks, but not all its values.

Damage is reported (`Damage`). A damaged partition is read as of its newest complete state before
the damage. With `salvage` everything readable is returned; then keys may have versions that were
replaced or deleted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Final, NamedTuple

from clients.backup.archives.archive import Archive
from clients.backup.archives.archive_errors import ArchiveFormatError, PointError
from clients.backup.archives.archive_manifest import RunRecord, SegmentRecord
from clients.backup.archives.chunk import Section, frames_of
from clients.backup.archives.legs import Interval, end_of, intervals, newest_whole, whole_states
from clients.backup.archives.point import Point, chain_of
from clients.backup.archives.segment import DamagedError, Footer, parse_chunk
from clients.backup.strip import Stretch, Strip
from failover.rules.history import FailoverLog, Version

CACHE_BYTES: Final = 32 * 1024 * 1024
"""Size of the chunk cache. Each chunk is read twice, shared ones by many partitions."""

STRIP_FRAMES_MAX: Final = 100_000
"""Frames whose offsets are kept from the first pass for the second, about 80 bytes each."""

_NO_STOP: Final = 2**64

Frame = tuple[bytes, int, int]
"""(bytes of a chunk, start and end of a frame in them)."""


class Damage(NamedTuple):
    """A part that cannot be read: its file, and the lost seqnos of a partition."""

    path: str
    what: str
    vb_id: int
    first_seqno: int
    last_seqno: int

    def __str__(self) -> str:
        """Return the damage as text."""
        reach = f"partition {self.vb_id}, seqno {self.first_seqno} to {self.last_seqno}"
        return f"{self.path}: {self.what}: {reach}"


class Part(NamedTuple):
    """A section to read, and the seqnos in it: (low, high]."""

    path: str
    chunk: tuple[int, int]
    section: Section
    low_seqno: int
    high_seqno: int


class View(NamedTuple):
    """A partition as of a point."""

    vb_id: int
    wanted_seqno: int
    """The point's seqno. `seqno` is the newest complete state at or below it."""
    seqno: int
    parts: list[Part]
    winners: frozenset[int] | set[int] | None
    """Seqnos of the newest versions, deletions included; None: all changes are newest."""
    damages: list[Damage]


class Findings:
    """What was found while partitions were read as of a point."""

    def __init__(self) -> None:
        self.earlier: dict[int, tuple[int, int]] = {}
        """Partition -> (requested seqno, seqno of the complete state before it that is used)."""
        self.damages: list[Damage] = []
        self._has_state = False

    def take(self, view: View) -> None:
        """Add a partition."""
        self._has_state = self._has_state or view.seqno > 0
        self.damages += view.damages
        if view.seqno != view.wanted_seqno:
            self.earlier[view.vb_id] = (view.wanted_seqno, view.seqno)

    def check(self, url: str) -> None:
        """Raise PointError if no partition has a state at the point."""
        if self.earlier and not (self._has_state or self.damages):
            raise PointError(
                f"the archive has no complete state of any partition at or before that"
                f" point: {url}",
                hint="Name a later point. dcpctl backup list shows when runs ended, info --run N"
                " shows the complete states of each partition.",
            )


class _Newest(NamedTuple):
    """The result of the first pass."""

    seqnos: dict[bytes, int]
    """Key -> seqno of its newest version."""
    is_all: bool
    """No key occurred twice and no event removed a key: every change is a newest version."""
    stop_seqno: int
    """The first seqno that must not be used; `_NO_STOP` if there is none."""
    is_late: bool
    """`stop_seqno` is later than the requested time. False: it is damaged, or there is none."""
    damages: list[Damage]


class PointReader:
    """Reads partitions of one archive as of a point."""

    def __init__(
        self, archive: Archive, runs: Sequence[RunRecord], *, salvage: bool = False
    ) -> None:
        self._archive = archive
        self._runs = runs
        self._salvage = salvage
        self._records = {record.run: record for record in runs}
        self._footers: dict[str, Footer | str] = {}
        """Path -> footer, or why it cannot be read."""
        self._chunks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._chunk_bytes = 0
        self._damaged_chunks: dict[tuple[str, int], str] = {}
        self._strips: dict[tuple[str, int, int], Strip] = {}
        """(path, chunk, offset) -> strip, for the last requested partition."""
        self._strip_frames = 0

    def view(self, vb_id: int, point: Point, *, names_winners: bool = False) -> View:
        """Return a partition as of a point. Raises PointError.

        `names_winners`: the view's `winners` is not None.
        """
        self._strips.clear()
        self._strip_frames = 0
        chain = chain_of(self._runs, vb_id)
        end = end_of(chain)
        wanted = end if point.seqnos is None else point.seqnos.get(vb_id, end)
        if wanted > end:
            raise PointError(
                f"seqno {wanted} is not in the archive: the partition ends at seqno {end}",
                vb_id=vb_id,
            )
        ranges = whole_states(chain)
        seqno = newest_whole(ranges, wanted)
        time_ns = point.time_ns
        damages: list[Damage] = []
        while True:
            parts, lost = self._parts(vb_id, intervals(chain, seqno))
            newest = self._newest(parts, time_ns)
            stop = newest.stop_seqno
            damages += [damage for damage in (*lost, *newest.damages) if damage not in damages]
            if lost and not self._salvage:
                stop = min((stop, *(damage.first_seqno for damage in lost)))
            if stop > seqno:
                break
            if newest.is_late and stop == newest.stop_seqno:
                wanted, time_ns = stop - 1, None
            seqno = newest_whole(ranges, stop - 1)
        is_all = newest.is_all and not names_winners
        winners = None if is_all else set(newest.seqnos.values())
        return View(vb_id, wanted, seqno, parts, winners, damages)

    def versions(self, vb_id: int, upto_seqno: int) -> Iterator[tuple[int, bytes]]:
        """Yield seqno and frame of the changes of a partition that the archive has of its newest
        history, in seqno order. What is damaged is left out.
        """
        chain = chain_of(self._runs, vb_id)
        parts, _ = self._parts(vb_id, intervals(chain, min(upto_seqno, end_of(chain))))
        for part in parts:
            data = self._chunk(part)
            if data is not None:
                for seqno, start, stop in frames_of(data, part.section):
                    if part.low_seqno < seqno <= part.high_seqno:
                        yield seqno, data[start:stop]

    def history(self, vb_id: int) -> tuple[int, FailoverLog] | None:
        """Return up to which seqno the archive has a partition, and the versions of that history;
        None: it has nothing of it.
        """
        chain = chain_of(self._runs, vb_id)
        versions = next((each.leg.versions for each in reversed(chain) if each.leg.versions), None)
        if versions is None:
            return None
        return end_of(chain), FailoverLog(tuple(Version(*version) for version in versions))

    def frames(self, view: View) -> Iterator[Frame]:
        """Yield the newest versions in seqno order."""
        for stretch in self.stretches(view):
            yield from zip(repeat(stretch.data), stretch.starts, stretch.ends)

    def stretches(self, view: View) -> Iterator[Stretch]:
        """Yield the newest versions in seqno order, those of a section at once."""
        for part in view.parts:
            data = self._chunk(part)
            if data is None:
                continue
            strip = self._strip(part, data)
            if view.winners is None:
                yield strip.whole(data)
                continue
            chosen = strip.chosen(data, view.winners, part.low_seqno, part.high_seqno)
            if chosen is not None:
                yield chosen

    # -- inside --------------------------------------------------------------------------------

    def _strip(self, part: Part, data: bytes) -> Strip:
        """Return the strip of a section, which both passes need."""
        place = (part.path, part.chunk[0], part.section.offset)
        strip = self._strips.get(place)
        if strip is None:
            strip = Strip(data, part.section)
            self._strip_frames += len(strip)
            if self._strip_frames <= STRIP_FRAMES_MAX:
                self._strips[place] = strip
        return strip

    def _newest(self, parts: list[Part], time_ns: int | None) -> _Newest:
        """Read all changes; collect the newest seqno of each key."""
        newest: dict[bytes, int] = {}
        damages: list[Damage] = []
        changes, is_within = 0, True
        for part in parts:
            data = self._chunk(part)
            low, high = part.low_seqno, part.high_seqno
            if data is None:
                section = part.section
                first = max(section.first_seqno, low + 1)
                what = self._damaged_chunks[part.path, part.chunk[0]]
                damages.append(
                    Damage(
                        part.path, f"the chunk at {part.chunk[0]}: {what}", section.vb_id, first,
                        min(section.last_seqno, high),
                    )
                )  # fmt: skip
                if not self._salvage:
                    return _Newest(newest, False, first, False, damages)
                continue
            strip = self._strip(part, data)
            late_seqno = strip.fold(newest, data, low, high, time_ns)
            if late_seqno:
                return _Newest(newest, False, late_seqno, True, damages)
            changes += len(strip)
            is_within = is_within and strip.is_within(low, high)
        is_all = is_within and changes == len(newest)
        return _Newest(newest, is_all, _NO_STOP, False, damages)

    def _parts(self, vb_id: int, visible: list[Interval]) -> tuple[list[Part], list[Damage]]:
        """Return the parts to read of a partition, in seqno order, and the lost parts."""
        parts: list[Part] = []
        damages: list[Damage] = []
        for run, leg, low, high in visible:
            for segment in self._records[run].segments:
                footer = self._footer(self._records[run], segment)
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

    def _footer(self, record: RunRecord, segment: SegmentRecord) -> Footer | str:
        footer = self._footers.get(segment.path)
        if footer is None:
            try:
                footer = self._archive.footer(segment.path)
                if not record.wrote(footer, segment):
                    footer = "it is not the segment that the run wrote"
            except FileNotFoundError:
                footer = "the file is missing"
            except (DamagedError, ArchiveFormatError) as error:
                footer = str(error)
            self._footers[segment.path] = footer
        return footer

    def _chunk(self, part: Part) -> bytes | None:
        """Return a chunk's bytes, None if it is damaged."""
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
                raise DamagedError("the chunk is too short")
        except (DamagedError, FileNotFoundError) as error:
            self._damaged_chunks[place] = str(error)
            return None
        self._chunks[place] = data
        self._chunk_bytes += len(data)
        while self._chunk_bytes > CACHE_BYTES and len(self._chunks) > 1:
            self._chunk_bytes -= len(self._chunks.popitem(last=False)[1])
        return data
