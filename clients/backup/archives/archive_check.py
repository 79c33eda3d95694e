"""Verify: read a whole archive and report damage.

For each segment: the file exists and has its size, the footer matches the run's manifest, the
chunks' checksums are right, and the frames match the table of sections in partition, order and
number. For each run: the manifest is in its own place (`RunRecord.problem_as`), and the legs of
every partition continue the earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from clients.backup.archives.archive import ARCHIVE_FILE, Archive
from clients.backup.archives.archive_errors import ArchiveFormatError
from clients.backup.archives.archive_manifest import RunRecord, SegmentRecord
from clients.backup.archives.chunk import frames_of
from clients.backup.archives.legs import end_of
from clients.backup.archives.point import chain_of
from clients.backup.archives.segment import DamagedError, parse_chunk
from clients.backup.reading import Damage


class VerifyReport(NamedTuple):
    """The result of a check."""

    runs: int
    segments: int
    chunks: int
    changes: int
    stored_bytes: int
    damages: list[Damage]
    broken: dict[str, str]
    """Where -> what: manifests and marks that are damaged or not in their places, and gaps between
    legs."""
    unused: dict[str, str]
    """File -> why it may be there: files that no run needs. They are no damage."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damages and not self.broken


def verify(archive: Archive, on_progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Check an archive."""
    runs, broken = archive.runs_and_damages()
    unused = {} if broken else archive.unused(runs)
    broken |= _legs_that_do_not_follow(runs)
    segments = [(record, segment) for record in runs for segment in record.segments]
    chunks = changes = 0
    damages: list[Damage] = []
    for index, (record, segment) in enumerate(segments):
        found = _verify_segment(archive, record, segment)
        chunks += found[0]
        changes += found[1]
        damages += found[2]
        if on_progress is not None:
            on_progress(index + 1, len(segments))
    stored = sum(segment.size_bytes for _, segment in segments)
    return VerifyReport(len(runs), len(segments), chunks, changes, stored, damages, broken, unused)


def _verify_segment(
    archive: Archive, record: RunRecord, segment: SegmentRecord
) -> tuple[int, int, list[Damage]]:
    """Return chunks, changes and damages of a segment."""
    try:
        footer = archive.footer(segment.path)
        data = archive.read(segment.path)
        if len(data) != segment.size_bytes:
            raise DamagedError(f"it has {len(data)} bytes, but {segment.size_bytes} were written")
        if not record.wrote(footer, segment):
            raise DamagedError("it is not the segment that the run wrote")
    except FileNotFoundError:
        return 0, 0, _all_of(segment, "the file is missing")
    except (DamagedError, ArchiveFormatError) as error:
        return 0, 0, _all_of(segment, str(error))
    sections = [footer.section(index) for index in range(footer.section_count())]
    changes = 0
    damages: list[Damage] = []
    problems: dict[int, str] = {}
    chunks: dict[int, bytes] = {}
    for number, (at, size) in enumerate(footer.chunks):
        try:
            chunks = {number: parse_chunk(data[at : at + size])}
        except DamagedError as error:
            chunks, problems[number] = {}, str(error)
        for section in sections:
            if section.chunk != number:
                continue
            try:
                if number in problems:
                    raise ValueError(problems[number])
                changes += sum(1 for _ in frames_of(chunks[number], section))
            except ValueError as error:
                what = f"the chunk at {at}: {error}"
                damages.append(
                    Damage(
                        segment.path, what, section.vb_id, section.first_seqno, section.last_seqno
                    )
                )
    return len(footer.chunks), changes, damages


def _all_of(segment: SegmentRecord, what: str) -> list[Damage]:
    return [
        Damage(segment.path, what, vb_id, first, last) for vb_id, _, first, last in segment.held
    ]


def _legs_that_do_not_follow(runs: Sequence[RunRecord]) -> dict[str, str]:
    """Return the partitions with a gap between legs."""
    found = {}
    for vb_id in {vb_id for record in runs for vb_id in record.legs}:
        chain = chain_of(runs, vb_id)
        for index, (run, leg) in enumerate(chain):
            if leg.from_seqno > end_of(chain[:index]):
                found[f"{ARCHIVE_FILE}, partition {vb_id}"] = (
                    f"run {run} continues at seqno {leg.from_seqno}, but the runs before it end at"
                    f" {end_of(chain[:index])}"
                )
    return found
