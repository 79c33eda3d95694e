"""Merge and prune: fold old runs into the base of a newer run, and delete them.

    runs 1 2 3 4 5      merge --into 3, or prune --keep 3
         [1 2 -> base of 3] 4 5

The base of run K is the state at the end of run K-1: the newest version of each key, and older
versions that are needed because later runs rolled a partition back below that end. The changes of
run K stay as they are. So run K and later runs can be restored as before, and the next run
continues as before. Points before the end of run K-1 are lost, and a rollback below it goes to the
nearest state that was kept.

Crash safety: first the segments of the base are written, then the manifest of run K, which lists
them and the folded runs. Unneeded files are deleted last (`Archive.sweep`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from clients.backup.archives.archive import Archive, needed_files
from clients.backup.archives.archive_errors import ArchiveDamagedError, BackupError
from clients.backup.archives.archive_manifest import RunRecord
from clients.backup.archives.chunk import CHUNK_BYTES, Chunker, Piece
from clients.backup.archives.legs import BASE_LEG, Leg, Placed, cuts_of, end_of, position_of
from clients.backup.archives.point import Point, chain_of
from clients.backup.archives.segment_writer import SegmentWriter
from clients.backup.reading import PointReader
from dcp.wire.frame import HEADER_BYTES
from dcp.wire.message import U64


class FoldReport(NamedTuple):
    """The result of a fold."""

    into_run: int
    folded: tuple[int, ...]
    """The runs that were folded and deleted."""
    changes_before: int
    changes: int
    """Changes in the folded runs, and in the base."""
    bytes_before: int
    bytes_after: int
    """Stored bytes of all runs, before and after."""


def run_to_keep(
    runs: Sequence[RunRecord], keep: int | None, older_than_ns: int | None
) -> int | None:
    """Return the oldest run to keep; None: there is nothing to prune.

    The newest run is always kept.
    """
    stays = [
        record.run
        for index, record in enumerate(runs)
        if (keep is not None and index >= len(runs) - max(1, keep))
        or (older_than_ns is not None and record.ended_ns >= older_than_ns)
        or index == len(runs) - 1
    ]
    return stays[0] if stays and stays[0] != runs[0].run else None


def fold(
    archive: Archive, into_run: int, on_progress: Callable[[int, int], None] | None = None
) -> FoldReport:
    """Fold all runs before `into_run` into its base. Raises BackupErrors, ArchiveLockedError.

    Damaged runs are not folded, because that would hide the damage.
    """
    with archive.lock("backup merge") as lock:
        runs = archive.runs()
        old = [record for record in runs if record.run < into_run]
        kept = [record for record in runs if record.run >= into_run]
        if not kept or kept[0].run != into_run:
            raise BackupError(
                f"the archive has no run {into_run}", node=archive.url,
                hint="dcpctl backup list --archive URL",
            )  # fmt: skip
        bytes_before = sum(record.stored_bytes for record in runs)
        if not old:
            return FoldReport(into_run, (), 0, 0, bytes_before, bytes_before)
        reader = PointReader(archive, old)
        writer = SegmentWriter.of_base(archive, lock, into_run, time.time_ns())
        chunker = Chunker()
        bases: dict[int, Leg] = {}
        vb_ids = sorted({vb_id for record in old for vb_id in record.legs})
        for index, vb_id in enumerate(vb_ids):
            chain = chain_of(old, vb_id)
            cuts = cuts_of(chain, chain_of(kept, vb_id))
            base = _base_of(chain, cuts)
            bases[vb_id] = base
            for piece in _pieces(reader, vb_id, (*cuts, end_of(chain)), base):
                for chunk in chunker.add(piece):
                    writer.add(chunk)
            for chunk in chunker.finish(vb_id):
                writer.add(chunk)
            lock.keep()
            if on_progress is not None:
                on_progress(index + 1, len(vb_ids))
        for chunk in chunker.flush():
            writer.add(chunk)
        writer.close()
        first = kept[0]
        merged = first._replace(
            base_through=into_run - 1,
            base_ended_ns=old[-1].ended_ns,
            segments=[*writer.records, *first.segments],
            legs={
                vb_id: [*([bases[vb_id]] if vb_id in bases else []), *first.legs.get(vb_id, [])]
                for vb_id in sorted({*bases, *first.legs})
            },
            changes=first.changes + writer.changes,
            raw_bytes=first.raw_bytes + writer.raw_bytes,
        )
        archive.write_run(merged, lock, is_fold=True)
        after = [merged, *kept[1:]]
        archive.sweep(needed_files(after), lock)
        return FoldReport(
            into_run, tuple(record.run for record in old), sum(item.changes for item in old),
            writer.changes, bytes_before, sum(record.stored_bytes for record in after),
        )  # fmt: skip


def _base_of(chain: list[Placed], cuts: list[int]) -> Leg:
    """Return one leg for a chain, with complete states at its end and at the cuts."""
    end = position_of(chain)
    seqno = end_of(chain)
    ranges = tuple((at, at) for at in sorted({0, *cuts, seqno}))
    if end.seqno != end.snap_end:  # other servers may end a run inside a snapshot
        ranges = ranges[:-1]
    return Leg(BASE_LEG, 0, seqno, end.snap_start, end.snap_end, chain[-1].leg.versions, ranges)


def _pieces(reader: PointReader, vb_id: int, seqnos: Sequence[int], base: Leg) -> Iterator[Piece]:
    """Yield the frames of the states at these seqnos (ascending), in order."""
    points = [Point(seqnos={vb_id: seqno}) for seqno in seqnos]
    views = [reader.view(vb_id, point, names_winners=True) for point in points]
    damages = [damage for view in views for damage in view.damages]
    if damages:
        raise ArchiveDamagedError(
            str(damages[0]), vb_id=vb_id,
            hint="Damaged runs cannot be folded. dcpctl backup verify lists all damage.",
        )  # fmt: skip
    winners: set[int] = set().union(*(view.winners or () for view in views))
    frames: list[bytes] = []
    size = first = last = 0
    for data, start, stop in reader.frames(views[-1]._replace(winners=winners)):
        last = U64.unpack_from(data, start + HEADER_BYTES)[0]
        first = first or last
        frames.append(data[start:stop])
        size += stop - start
        if size >= CHUNK_BYTES:
            yield Piece(vb_id, BASE_LEG, first, last, len(frames), b"".join(frames), [base])
            frames, size, first = [], 0, 0
    if frames:
        yield Piece(vb_id, BASE_LEG, first, last, len(frames), b"".join(frames), [base])
