"""An archive: a folder at a path or fsspec URL.

    dcpd-archive            identifies the folder (archive_manifest.ArchiveRecord)
    lock, locks/            the write lock (clients.backup.archives.lock)
    runs/000001.run         a finished run's manifest
    runs/000001/0000.seg    its segments
    runs/000003/base-0000.seg   a segment of the base that older runs were folded into
    finished/000003         the mark of the newest finished run

Invariants
- files are written as a whole; a manifest lists only files that exist;
- segments are written first, then the manifest, then the mark. A run without a manifest is
  - unfinished if it has no mark: the next run continues from its segments;
  - lost if it has a mark: the archive accepts no new runs until the user gives it up;
- a file counts only in its own place: a copied manifest, mark or segment is damage there;
- a finished run's manifest is replaced only by a fold into that run;
- only the holder of the lock writes. It checks the lock right before each manifest.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from clients.backup.archives.archive_errors import (
    ArchiveDamagedError,
    ArchiveError,
    ArchiveFormatError,
    ArchiveMissingError,
)
from clients.backup.archives.archive_manifest import (
    BASE_SEGMENT,
    ArchiveRecord,
    MarkRecord,
    RunRecord,
    pack_archive,
    pack_mark,
    pack_run,
    parse_archive,
    parse_mark,
    parse_run,
)
from clients.backup.archives.lock import LOCK_TIMES, ArchiveLock, LockTimes
from clients.backup.archives.place import PARTIAL, Place
from clients.backup.archives.point import Point, time_text
from clients.backup.archives.segment import (
    MAGIC,
    TRAILER,
    DamagedError,
    Footer,
    check_head,
    footer_place,
    parse_footer,
)

ARCHIVE_FILE: Final = "dcpd-archive"
RUNS_FOLDER: Final = "runs"
MARKS_FOLDER: Final = "finished"
"""Separate from runs/, so marks survive deletions there. The name sorts first: an interrupted copy
has the mark without the run, which is noticed."""
RUNS_MAX: Final = 999_999
"""Maximum number of a run: file names have six digits."""
FOOTER_READ_BYTES: Final = 256 * 1024
"""First read at a segment's end. It usually contains the whole footer."""

_RUN_FILE: Final = re.compile(r"runs/(\d{6})\.run")
_MARK_FILE: Final = re.compile(r"finished/(\d{6})")
_SEGMENT_FILE: Final = re.compile(rf"runs/(\d{{6}})/({BASE_SEGMENT})?(\d{{4,}})\.seg")


class Archive:
    """One archive. Created by `open_archive` or `create_archive`."""

    def __init__(
        self, place: Place, *, lock_times: LockTimes = LOCK_TIMES, runs_max: int = RUNS_MAX
    ) -> None:
        self.url = place.url
        self._lock_times = lock_times
        self._runs_max = runs_max
        self.record = ArchiveRecord("", 0)
        self._place = place
        self.read = place.read
        self.write = place.write
        self.delete = place.delete

    def follow_partitions(self, count: int, *, is_empty: bool) -> None:
        """Take the number of partitions of the server that is backed up. Raises ArchiveError if
        the archive has changes of another number.
        """
        if count == self.record.partitions:
            return
        if not is_empty:
            raise ArchiveError(
                f"the archive is of {self.record.partitions} partitions, and the server has"
                f" {count}",
                node=self.url, hint="Use a new archive. A restore of this one goes by key.",
            )  # fmt: skip
        self.record = self.record._replace(partitions=count)
        self.write(ARCHIVE_FILE, pack_archive(self.record))

    def files(self) -> dict[str, int]:
        """Return the files below runs/ and their sizes. Raises ArchiveError."""
        return self._place.files(RUNS_FOLDER)

    # -- runs ----------------------------------------------------------------------------------

    def runs(self) -> list[RunRecord]:
        """Return the finished runs, oldest first. Raises ArchiveDamagedError."""
        runs, damages = self.runs_and_damages()
        if damages:
            raise self._damaged(runs, damages)
        return runs

    def runs_of(self, point: Point, *, salvage: bool = False) -> list[RunRecord]:
        """Return the runs that a point needs, oldest first.

        Raises PointError, and ArchiveDamagedError if damage may hide some; with `salvage`, only if
        it hides all.
        """
        return self.runs_and_losses_of(point, salvage=salvage)[0]

    def runs_and_losses_of(
        self, point: Point, *, salvage: bool = False
    ) -> tuple[list[RunRecord], dict[str, str]]:
        """Return the runs that a point needs, and the damage (by manifest) that may hide others.

        Without `salvage` such damage raises ArchiveDamagedError.
        """
        runs, damages = self.runs_and_damages()
        if not damages or point.is_within(runs):
            return point.runs_of(runs), {}
        if not salvage or not runs:
            raise self._damaged(runs, damages)
        return point.runs_of(runs), damages

    def runs_and_damages(self) -> tuple[list[RunRecord], dict[str, str]]:
        """Return the runs before the first lost or damaged one, and the damage by manifest.

        A run builds on those before it, so nothing after a damaged manifest can be read.
        """
        mark = self._newest_mark()  # read first: otherwise a run that ends now would look lost
        found: dict[int, RunRecord] = {}
        damaged: dict[int, str] = {}
        unreadable: set[int] = set()
        for name in sorted(self.files()):
            match = _RUN_FILE.fullmatch(name)
            if match is None:
                continue
            run = int(match[1])
            try:
                record = parse_run(self.read(name))
            except DamagedError as error:
                damaged[run] = str(error)
                unreadable.add(run)
            except FileNotFoundError:  # folded since the listing
                damaged[run] = "it is missing"
            else:
                if problem := record.problem_as(run, self.record.archive_id):
                    damaged[run] = problem
                else:
                    found[run] = record
        next_run = max((mark.run if mark is not None else 0, *found)) + 1
        if mark is not None and next_run in unreadable and next_run == max(damaged):
            del damaged[next_run]  # the run died while it wrote its manifest
        begin = max((0, *(record.base_through for record in found.values())))
        end = max((0, *found))
        if mark is not None and mark.run not in found:
            begin, end = max(begin, mark.base_through), max(end, mark.run)
        later = sorted(run for run in damaged if run > end)
        records: list[RunRecord] = []
        damages = self._misplaced_marks()
        is_whole = True
        for run in (*range(begin + 1, end + 1), *later):
            if run not in found:
                what = damaged.get(run, "it is missing")
                damages[run_file(run)] = what + _of_mark(run, mark)
                is_whole = False
            elif is_whole:
                records.append(found[run])
        return records, damages

    def begin_run(
        self, lock: ArchiveLock, give_up: int | None = None
    ) -> tuple[list[RunRecord], int, list[tuple[str, int, Footer]]]:
        """Prepare the next run; return the finished runs, its number and its `unfinished` segments.

        `give_up` is the first lost or damaged run. It and all later runs are dropped. Unneeded
        files are deleted. Raises ArchiveDamagedError, ArchiveError.
        """
        runs, damages = self.runs_and_damages()
        last = runs[-1].run if runs else 0
        if give_up is not None:
            self._check_give_up(give_up, runs, damages)
            self._give_up_after(last, lock)
        elif damages:
            raise self._damaged(runs, damages)
        mark = self._newest_mark()
        if mark is None or mark.run < last:  # an older version wrote the run, or it died here
            self._write_mark(_mark_of(runs[-1]) if runs else MarkRecord(0))
        run = self.next_run(runs)
        found = self.unfinished(run)
        self.sweep(needed_files(runs) | {path for path, _, _ in found}, lock)
        return runs, run, found

    def next_run(self, runs: Sequence[RunRecord]) -> int:
        """Return the number of the run after these. Raises ArchiveError if there is none."""
        run = runs[-1].run + 1 if runs else 1
        if run > self._runs_max:
            raise ArchiveError(
                f"the archive had {self._runs_max} runs, and has no room for another one",
                node=self.url, hint="Start a new archive in another folder.",
            )  # fmt: skip
        return run

    def write_run(self, record: RunRecord, lock: ArchiveLock, *, is_fold: bool = False) -> None:
        """Write a run's manifest, which finishes the run, and then its mark.

        Only a fold (`is_fold`) replaces a manifest. Raises ArchiveError if there is one, and
        ArchiveLockedError if the lock is lost.
        """
        lock.renew()
        path = run_file(record.run)
        if not is_fold and path in self.files():
            raise ArchiveError(
                f"{path} is there already, so run {record.run} was not finished: nothing was"
                " overwritten", node=self.url,
                hint="Another writer finished a run meanwhile: dcpctl backup verify",
            )  # fmt: skip
        self.write(path, pack_run(record))
        mark = self._newest_mark()
        if mark is None or mark.run <= record.run:
            self._write_mark(_mark_of(record))

    def footer(self, path: str) -> Footer:
        """Return a segment's footer. Raises DamagedError, FileNotFoundError, ArchiveError."""
        tail = self.read(path, -FOOTER_READ_BYTES)
        trailer = tail[-TRAILER.size :]
        offset, size_bytes = footer_place(trailer)
        begin = len(tail) - TRAILER.size - size_bytes
        packed = tail[max(0, begin) : len(tail) - TRAILER.size]
        if begin < 0:
            packed = self.read(path, offset, offset + size_bytes)
        check_head(self.read(path, 0, len(MAGIC)))
        return parse_footer(packed, trailer)

    def unfinished(self, run: int) -> list[tuple[str, int, Footer]]:
        """Return (path, bytes, footer) of the segments that a killed run finished, in order.

        Segments after a missing, damaged or misplaced one are not used: they build on it.
        """
        found: list[tuple[str, int, Footer]] = []
        files = self.files()
        for number in range(len(files)):
            path = segment_file(run, number)
            if path not in files:
                break
            try:
                footer = self.footer(path)
            except (DamagedError, ArchiveFormatError):
                break
            started_ns = found[0][2].started_ns if found else footer.started_ns
            place = (footer.run, footer.number, footer.started_ns)
            if place != (run, number, started_ns) or self._is_foreign(footer.archive_id):
                break  # a copy of another run's, or another archive's
            found.append((path, files[path], footer))
        return found

    def sweep(self, keep: set[str], lock: ArchiveLock) -> int:
        """Delete files that no run needs; return their number.

        Raises ArchiveLockedError if the lock is lost.
        """
        lock.renew()
        spare = [name for name in self.files() if name not in keep and _is_swept(name)]
        for name in sorted(spare):
            self.delete(name)
        return len(spare)

    def unused(self, runs: Sequence[RunRecord]) -> dict[str, str]:
        """Return the files below runs/ that these runs, all of the archive, do not need, and why
        they may be there.
        """
        begun = {path for path, _, _ in self.unfinished(runs[-1].run + 1 if runs else 1)}
        needed = needed_files(runs)
        return {
            name: "the next run continues from it" if name in begun
            else "no run needs it, and the next run deletes it" if _is_swept(name)
            else "it is not a file of an archive"
            for name in sorted(self.files()) if name not in needed
        }  # fmt: skip

    def lock(self, purpose: str) -> ArchiveLock:
        """Return the lock, to be used with `with`."""
        return ArchiveLock(self._place, purpose, times=self._lock_times)

    # -- marks ---------------------------------------------------------------------------------

    def _newest_mark(self) -> MarkRecord | None:
        """Return the newest mark; None if only older versions wrote the archive."""
        marks = [mark for name, mark in self._all_marks().items() if _mark_file(mark.run) == name]
        return max(marks, default=None)

    def _all_marks(self) -> dict[str, MarkRecord]:
        """Return the marks by file; of one that cannot be read the number in its name."""
        found = {}
        for name in self._marks():
            match = _MARK_FILE.fullmatch(name)
            if match is None:
                continue
            try:
                found[name] = parse_mark(self.read(name))
            except (DamagedError, FileNotFoundError):
                found[name] = MarkRecord(int(match[1]))
        return found

    def _misplaced_marks(self) -> dict[str, str]:
        """Return the marks under another run's number, and what is wrong with them."""
        return {
            name: f"it is the mark of run {mark.run}"
            for name, mark in self._all_marks().items()
            if _mark_file(mark.run) != name
        }

    def _is_foreign(self, archive_id: str) -> bool:
        return archive_id not in {"", self.record.archive_id}

    def _write_mark(self, mark: MarkRecord) -> None:
        """Write a mark and delete the older ones."""
        path = _mark_file(mark.run)
        self.write(path, pack_mark(mark))
        for name in self._marks():
            if name < path:
                self.delete(name)

    def _marks(self) -> list[str]:
        return sorted(self._place.files(MARKS_FOLDER))

    def _check_give_up(
        self, give_up: int, runs: Sequence[RunRecord], damages: dict[str, str]
    ) -> None:
        if not damages:
            raise ArchiveError(
                f"run {give_up} cannot be given up: no run is lost or damaged", node=self.url,
                hint="Run again without --give-up.",
            )  # fmt: skip
        if give_up != _first_run_of(damages):
            raise self._damaged(runs, damages)

    def _give_up_after(self, last: int, lock: ArchiveLock) -> None:
        """Drop all runs after `last`. If this is interrupted, they still count as lost."""
        lock.renew()
        for name in sorted(self.files(), reverse=True):
            match = _RUN_FILE.fullmatch(name)
            if match is not None and int(match[1]) > last:
                self.delete(name)
        # The newest mark is deleted last: until then the runs count as lost.
        later = [name for name in self._marks() if name > _mark_file(last)]
        self.write(_mark_file(last), pack_mark(MarkRecord(last)))
        for name in later:
            self.delete(name)

    def _damaged(self, runs: Sequence[RunRecord], damages: dict[str, str]) -> ArchiveDamagedError:
        first = _first_run_of(damages)
        if not first:
            return ArchiveDamagedError(
                "; ".join(f"{path}: {what}" for path, what in damages.items()), node=self.url,
                hint=f"Move {', '.join(damages)} out of the archive.",
            )  # fmt: skip
        how = f"continues after run {runs[-1].run}" if runs else "starts again from 0"
        before = "restore and export can use the runs before it, with --run or --salvage; "
        return ArchiveDamagedError(
            "; ".join(f"{path}: {what}" for path, what in damages.items()), node=self.url,
            hint="Copy the file back from another copy of the archive. Without one:"
            f" {before if runs else ''}dcpctl backup run --give-up {first} gives up run {first} and"
            f" all later runs, and {how}.",
        )  # fmt: skip


def _first_run_of(damages: dict[str, str]) -> int:
    """Return the first lost or damaged run; 0: only marks are out of their places."""
    matches = map(_RUN_FILE.fullmatch, damages)
    return min((int(match[1]) for match in matches if match is not None), default=0)


def run_file(run: int) -> str:
    """Return the path of a run's manifest."""
    return f"{RUNS_FOLDER}/{run:06}.run"


def segment_file(run: int, number: int, *, is_base: bool = False) -> str:
    """Return the path of a segment."""
    return f"{RUNS_FOLDER}/{run:06}/{BASE_SEGMENT if is_base else ''}{number:04}.seg"


def _is_swept(name: str) -> bool:
    """Whether a file has the name of a run's file, or of one that was being written."""
    name = name.removesuffix(PARTIAL)
    return any(kind.fullmatch(name) for kind in (_RUN_FILE, _SEGMENT_FILE))


def _mark_file(run: int) -> str:
    return f"{MARKS_FOLDER}/{run:06}"


def _mark_of(record: RunRecord) -> MarkRecord:
    return MarkRecord(record.run, record.base_through, record.ended_ns, record.changes)


def _of_mark(run: int, mark: MarkRecord | None) -> str:
    """Return what the mark tells about a missing run."""
    if mark is None or mark.run != run or not mark.ended_ns:
        return ""
    return f" (the run ended at {time_text(mark.ended_ns)} with {mark.changes} changes)"


def needed_files(runs: Sequence[RunRecord]) -> set[str]:
    """Return the files of these runs."""
    files = {segment.path for record in runs for segment in record.segments}
    return files | {run_file(record.run) for record in runs}


def open_archive(
    url: str, *, lock_times: LockTimes = LOCK_TIMES, runs_max: int = RUNS_MAX
) -> Archive:
    """Return the archive at a path or fsspec URL.

    Raises ArchiveError if there is none, ArchiveDamagedError, MissingExtraError,
    ArchiveFormatError.
    """
    archive = Archive(Place.of(url), lock_times=lock_times, runs_max=runs_max)
    try:
        archive.record = parse_archive(archive.read(ARCHIVE_FILE))
    except FileNotFoundError:
        if any(map(_RUN_FILE.fullmatch, archive.files())):
            raise ArchiveDamagedError(
                f"{ARCHIVE_FILE}: it is missing, although there are runs", node=url,
                hint="Copy the file back from another copy of the archive.",
            ) from None  # fmt: skip
        raise ArchiveMissingError(
            "there is no archive", node=url, hint="Create one: dcpctl backup run --archive URL"
        ) from None
    except DamagedError as error:
        raise ArchiveDamagedError(f"{ARCHIVE_FILE}: {error}", node=url) from error
    return archive


def create_archive(
    url: str, now_ns: int, *, lock_times: LockTimes = LOCK_TIMES, runs_max: int = RUNS_MAX
) -> Archive:
    """Return the archive at a path or fsspec URL; create it if there is none."""
    with suppress(ArchiveMissingError):
        return open_archive(url, lock_times=lock_times, runs_max=runs_max)
    place = Place.of(url)
    archive = Archive(place, lock_times=lock_times, runs_max=runs_max)
    if archive.files() or place.is_taken:
        raise ArchiveError(
            "the folder is not empty and not an archive", node=url, hint="Use a new folder."
        )
    archive.record = ArchiveRecord(secrets.token_hex(8), now_ns)
    archive.write(ARCHIVE_FILE, pack_archive(archive.record))
    return archive
