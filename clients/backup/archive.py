"""An archive: a folder behind any fsspec URL, and who may write to it.

    dcpd-archive            what this folder is (manifest.ArchiveRecord)
    lock                    who writes to it
    runs/000001.run         a finished run's manifest, written last
    runs/000001/0000.seg    its segments
    runs/000003/base-0000.seg   what older runs were folded into

Who calls it: everything that reads or writes an archive; nothing else knows of fsspec.

Invariants
- a file is written as a whole and never changed; a manifest names only files that are there;
- local files are synced, then renamed; object stores show a file when it is whole; what another
  file system shows half-written has no sound trailer and counts as not there;
- only who holds the lock writes. Local archives are locked by the system, which lets go of a
  process that dies; elsewhere a lease is renewed while the holder lives (LEASE_S).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from clients.backup.errors import (
    EXTRA_HINT,
    ArchiveDamagedError,
    ArchiveError,
    ArchiveFormatError,
    ArchiveLockedError,
    ArchiveMissingError,
    BackupError,
    MissingExtraError,
)
from clients.backup.manifest import (
    ArchiveRecord,
    RunRecord,
    pack_archive,
    pack_run,
    parse_archive,
    parse_run,
)
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
LOCK_FILE: Final = "lock"
RUNS_FOLDER: Final = "runs"
RUNS_MAX: Final = 999_999
LEASE_S: Final = 300
"""A lease that was not renewed for so long belongs to nobody: its holder was killed."""
FOOTER_READ_BYTES: Final = 256 * 1024
"""What is read of a segment's end at first: mostly all of the footer."""

_RUN_FILE: Final = re.compile(r"runs/(\d{6})\.run")
_SEGMENT_FILE: Final = re.compile(r"runs/(\d{6})/(base-)?(\d{4,})\.seg")
_PARTIAL: Final = ".part"


class Archive:
    """See the module. Made by `open_archive` or `create_archive`."""

    def __init__(self, fs: Any, root: str, url: str) -> None:
        self.url = url
        self.record = ArchiveRecord("", 0)
        self._fs = fs
        self._root = root.rstrip("/")
        protocols = fs.protocol if isinstance(fs.protocol, tuple | list) else (fs.protocol,)
        self.is_local = bool({"file", "local"} & set(protocols))

    # -- files ---------------------------------------------------------------------------------

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return a file's bytes, or a range of them (a negative `start` counts from the end).

        Raises FileNotFoundError, ArchiveError.
        """
        try:
            data: bytes = self._fs.cat_file(f"{self._root}/{path}", start=start, end=end)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _io_error(self.url, f"{path} cannot be read", error) from error
        return data

    def write(self, path: str, data: bytes) -> None:
        """Write a file as a whole, durably where that is ours to see to. Raises ArchiveError."""
        try:
            if self.is_local:
                _write_local(Path(self._root, path), data)
            else:
                self._fs.pipe_file(f"{self._root}/{path}", data)
        except OSError as error:
            raise _io_error(self.url, f"{path} cannot be written", error) from error

    def delete(self, path: str) -> None:
        """Delete a file if it is there."""
        try:
            self._fs.rm_file(f"{self._root}/{path}")
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _io_error(self.url, f"{path} cannot be deleted", error) from error

    def files(self) -> dict[str, int]:
        """Return the files below runs/ and their sizes."""
        folder = f"{self._root}/{RUNS_FOLDER}"
        try:
            self._fs.invalidate_cache()
            found = self._fs.find(folder, detail=True)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise _io_error(self.url, "it cannot be listed", error) from error
        return {
            name[name.rindex(f"/{RUNS_FOLDER}/") + 1 :]: int(info["size"] or 0)
            for name, info in found.items()
        }

    # -- runs ----------------------------------------------------------------------------------

    def runs(self) -> list[RunRecord]:
        """Return the finished runs, oldest first. Raises ArchiveDamagedError."""
        runs, damages = self.runs_and_damages()
        if damages:
            raise ArchiveDamagedError(
                "; ".join(f"{path}: {what}" for path, what in damages.items()), node=self.url
            )
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
            and (_RUN_FILE.fullmatch(name) or _SEGMENT_FILE.fullmatch(name.removesuffix(_PARTIAL)))
        ]
        for name in sorted(spare):
            self.delete(name)
        return len(spare)

    def lock(self, purpose: str) -> ArchiveLock:
        """Return the lock, to be used with `with`."""
        return ArchiveLock(self, purpose)


class ArchiveLock:
    """The right to write to an archive; a context manager. Raises ArchiveLockedError."""

    def __init__(self, archive: Archive, purpose: str) -> None:
        self._archive = archive
        self._file: int | None = None
        self._document = {
            "purpose": purpose, "host": socket.gethostname(), "pid": os.getpid(),
            "token": secrets.token_hex(8),
        }  # fmt: skip

    def __enter__(self) -> ArchiveLock:
        """Lock."""
        if self._archive.is_local:
            self._lock_local()
        else:
            self._take_lease()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Unlock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        elif self._holder().get("token") == self._document["token"]:
            self._archive.delete(LOCK_FILE)

    def renew(self) -> None:
        """Say that the holder lives. Raises ArchiveLockedError where somebody took the lease."""
        if self._file is None:
            holder = self._holder()
            if holder.get("token") != self._document["token"]:
                raise self._refusal(holder)
            self._archive.write(LOCK_FILE, self._bytes())

    def _lock_local(self) -> None:
        import fcntl

        path = Path(self._archive._root, LOCK_FILE)  # noqa: SLF001  one module
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(self._file, 0)
            os.pwrite(self._file, self._bytes(), 0)
        except BlockingIOError:
            os.close(self._file or 0)
            self._file = None
            raise self._refusal(self._holder()) from None
        except OSError as error:
            raise _io_error(self._archive.url, "it cannot be locked", error) from error

    def _take_lease(self) -> None:
        archive = self._archive
        place = f"{archive._root}/{LOCK_FILE}"  # noqa: SLF001  one module
        try:
            archive._fs.pipe_file(place, self._bytes(), mode="create")  # noqa: SLF001
        except FileExistsError:
            holder = self._holder()
            age_s = time.time() - float(holder.get("renewed_s", 0))
            if age_s < LEASE_S:
                raise self._refusal(holder) from None
            archive.write(LOCK_FILE, self._bytes())
        except OSError as error:
            raise _io_error(archive.url, "it cannot be locked", error) from error
        holder = self._holder()
        if holder.get("token") != self._document["token"]:
            raise self._refusal(holder)

    def _bytes(self) -> bytes:
        return json.dumps({**self._document, "renewed_s": time.time()}).encode()

    def _holder(self) -> dict[str, Any]:
        try:
            holder = json.loads(self._archive.read(LOCK_FILE))
        except (FileNotFoundError, ValueError):
            return {}
        return holder if isinstance(holder, dict) else {}

    def _refusal(self, holder: dict[str, Any]) -> ArchiveLockedError:
        who = f"{holder.get('purpose', 'a command')} of process {holder.get('pid', '?')}"
        hint = "Wait until it has ended."
        if not self._archive.is_local:
            hint += f" Was it killed? The lock is free {LEASE_S} s after its last sign of life."
        return ArchiveLockedError(
            f"the archive is in use by {who} on {holder.get('host', '?')}",
            node=self._archive.url, hint=hint,
        )  # fmt: skip


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
    archive = _place(url)
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
    archive = _place(url)
    with suppress(ArchiveMissingError):
        return open_archive(url)
    if archive.files() or (archive.is_local and _is_foreign(Path(archive._root))):  # noqa: SLF001
        raise ArchiveError(
            "the folder is not empty, and it is no archive", node=url, hint="Name a new folder."
        )
    archive.record = ArchiveRecord(secrets.token_hex(8), now_ns)
    archive.write(ARCHIVE_FILE, pack_archive(archive.record))
    return archive


def filesystem_of(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it. Raises BackupError."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise MissingExtraError("fsspec is not installed, archives are reached by it") from None
    try:
        fs, root = url_to_fs(url)
    except ImportError as error:
        raise MissingExtraError(
            f"no driver for this URL: {error}", node=url,
            hint=f"{EXTRA_HINT} brings local files; for others install what fsspec names.",
        ) from None  # fmt: skip
    except ValueError as error:
        raise ArchiveError(
            f"the URL cannot be used: {error}", node=url,
            hint="A path, or a URL that fsspec knows, such as s3://bucket/folder",
        ) from error  # fmt: skip
    except OSError as error:
        raise _io_error(url, "the URL cannot be used", error) from error
    return fs, str(root)


def _place(url: str) -> Archive:
    if not url:
        raise ArchiveError("no archive is named", hint="--archive takes a path or a URL.")
    fs, root = filesystem_of(url)
    return Archive(fs, root, url)


def _is_foreign(folder: Path) -> bool:
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def _io_error(url: str, what: str, error: OSError) -> BackupError:
    return ArchiveError(f"{what}: {error.strerror or error}", node=url)


def _write_local(path: Path, data: bytes) -> None:
    """Write, sync, rename, sync the folder: after a crash the file is whole or not there."""
    partial = path.with_name(path.name + _PARTIAL)
    path.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
