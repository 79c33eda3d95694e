"""An archive: a folder behind any fsspec URL, and who may write to it.

    dcpd-archive            what this folder is (manifest.ArchiveRecord)
    lock                    who writes to it
    runs/000001.run         a finished run's manifest, written last
    runs/000001/0000.seg    its segments
    runs/000003/base-0000.seg   what older runs were folded into

Who calls it: everything that reads or writes an archive.

Invariants
- a file is written as a whole and never changed; a manifest names only files that are there;
- only who holds the lock writes (clients.backup.lock).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from clients.backup.errors import (
    ArchiveDamagedError,
    ArchiveError,
    ArchiveFormatError,
    ArchiveMissingError,
)
from clients.backup.lock import ArchiveLock
from clients.backup.manifest import (
    ArchiveRecord,
    RunRecord,
    pack_archive,
    pack_run,
    parse_archive,
    parse_run,
)
from clients.backup.place import PARTIAL, Place
from clients.backup.segment import (
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
RUNS_MAX: Final = 999_999
"""Runs that an archive ever has: names of their files have six digits."""
FOOTER_READ_BYTES: Final = 256 * 1024
"""What is read of a segment's end at first: mostly all of the footer."""

_RUN_FILE: Final = re.compile(r"runs/(\d{6})\.run")
_SEGMENT_FILE: Final = re.compile(r"runs/(\d{6})/(base-)?(\d{4,})\.seg")


class Archive:
    """See the module. Made by `open_archive` or `create_archive`."""

    def __init__(self, place: Place) -> None:
        self.url = place.url
        self.record = ArchiveRecord("", 0)
        self._place = place
        self.read = place.read
        self.write = place.write
        self.delete = place.delete

    def files(self) -> dict[str, int]:
        """Return the files below runs/ and their sizes. Raises ArchiveError."""
        return self._place.files(RUNS_FOLDER)

    # -- runs ----------------------------------------------------------------------------------

    def runs(self) -> list[RunRecord]:
        """Return the finished runs, oldest first. Raises ArchiveDamagedError."""
        runs, damages = self.runs_and_damages()
        if damages:
            raise ArchiveDamagedError(
                "; ".join(f"{path}: {what}" for path, what in damages.items()), node=self.url,
                hint="restore and export --salvage take the runs before it; further runs need the"
                " file back, from a copy of the archive, or a new archive.",
            )  # fmt: skip
        return runs

    def runs_and_damages(self) -> tuple[list[RunRecord], dict[str, str]]:
        """Return the runs before the first whose manifest is damaged, and what is damaged.

        A run stands on those before it: what follows a damaged manifest cannot be read either.
        """
        found: dict[int, RunRecord] = {}
        damaged: dict[int, str] = {}
        for name in sorted(self.files()):
            match = _RUN_FILE.fullmatch(name)
            if match is None:
                continue
            try:
                found[int(match[1])] = parse_run(self.read(name))
            except DamagedError as error:
                damaged[int(match[1])] = str(error)
            except FileNotFoundError:  # folded away since it was listed
                damaged[int(match[1])] = "it is missing"
        base_through = max((record.base_through for record in found.values()), default=0)
        records: list[RunRecord] = []
        damages: dict[str, str] = {}
        for run in range(base_through + 1, max((0, *found, *damaged)) + 1):
            if run not in found:
                damages[run_file(run)] = damaged.get(run, "it is missing")
            elif not damages:
                records.append(found[run])
        return records, damages

    def next_run(self, runs: Sequence[RunRecord]) -> int:
        """Return the number of the run after these. Raises ArchiveError where there is none."""
        run = runs[-1].run + 1 if runs else 1
        if run > RUNS_MAX:
            raise ArchiveError(
                f"the archive had {RUNS_MAX} runs, and has no room for another one",
                node=self.url, hint="Begin a new archive: name another folder.",
            )  # fmt: skip
        return run

    def write_run(self, record: RunRecord) -> None:
        """Write a run's manifest: from then on the run is there."""
        self.write(run_file(record.run), pack_run(record))

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

        Up to the first that is missing or not whole: the later ones stand on it.
        """
        found = []
        files = self.files()
        for number in range(len(files)):
            path = segment_file(run, number)
            if path not in files:
                break
            try:
                footer = self.footer(path)
            except (DamagedError, ArchiveFormatError):
                break
            found.append((path, files[path], footer))
        return found

    def sweep(self, keep: set[str]) -> int:
        """Delete what no run needs; return how many files went. Needs the lock."""
        spare = [
            name
            for name in self.files()
            if name not in keep
            and any(
                kind.fullmatch(name.removesuffix(PARTIAL)) for kind in (_RUN_FILE, _SEGMENT_FILE)
            )
        ]
        for name in sorted(spare):
            self.delete(name)
        return len(spare)

    def lock(self, purpose: str) -> ArchiveLock:
        """Return the lock, to be used with `with`."""
        return ArchiveLock(self._place, purpose)


def run_file(run: int) -> str:
    """Return the place of a run's manifest."""
    return f"{RUNS_FOLDER}/{run:06}.run"


def segment_file(run: int, number: int, *, is_base: bool = False) -> str:
    """Return the place of a segment."""
    return f"{RUNS_FOLDER}/{run:06}/{'base-' if is_base else ''}{number:04}.seg"


def needed_files(runs: Sequence[RunRecord]) -> set[str]:
    """Return the files that these runs consist of."""
    files = {segment.path for record in runs for segment in record.segments}
    return files | {run_file(record.run) for record in runs}


def open_archive(url: str) -> Archive:
    """Return the archive at a path or fsspec URL.

    Raises ArchiveError where there is none, MissingExtraError, ArchiveFormatError.
    """
    archive = Archive(Place.of(url))
    try:
        archive.record = parse_archive(archive.read(ARCHIVE_FILE))
    except FileNotFoundError:
        raise ArchiveMissingError(
            "there is no archive", node=url, hint="Make one with: dcpctl backup run --archive URL"
        ) from None
    except DamagedError as error:
        raise ArchiveDamagedError(f"{ARCHIVE_FILE}: {error}", node=url) from error
    return archive


def create_archive(url: str, now_ns: int) -> Archive:
    """Return the archive at a path or fsspec URL, a new one where there is none."""
    with suppress(ArchiveMissingError):
        return open_archive(url)
    place = Place.of(url)
    archive = Archive(place)
    if archive.files() or place.is_taken:
        raise ArchiveError(
            "the folder is not empty, and it is no archive", node=url, hint="Name a new folder."
        )
    archive.record = ArchiveRecord(secrets.token_hex(8), now_ns)
    archive.write(ARCHIVE_FILE, pack_archive(archive.record))
    return archive
