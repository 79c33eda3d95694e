"""The data folder: created, recognised, and locked for one process.

    data/
      dcpd-folder   marker: what this folder is, and its format version. dcpd-folder.twin has the
                    same line and its checksum: if the marker is another one, it is damaged
      lock          flock'ed by the server (and inherited by its store process); holds the pid
      cluster.json  of a node of a cluster only (dcp.server.cluster.cluster_file)
      map.json      of the same (dcp.server.cluster.node_map)
      seen.json     of the same (dcp.server.cluster.seen_file)
      log/          segments (vbucket.log.device_files)
      store/        LMDB (vbucket.store.lmdb.environment_lmdb)

Who calls it: the server, before anything else touches the folder; `dcpctl` for error texts. The
marker is written before the lock, so a crash at any point leaves a folder that we recognise.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import google_crc32c

from dcp.server.files import TWIN_SUFFIX
from vbucket.log.device_files import sync_folder

FOLDER_FORMAT_VERSION: Final = 1
MARKER_NAME: Final = "dcpd-folder"
LOCK_NAME: Final = "lock"
CLUSTER_FILE: Final = "cluster.json"
"""There only in the folder of a node of a cluster (dcp.server.cluster.cluster_file)."""
ORPHAN_WAIT_S: Final = 5.0
"""How long the store process of a killed server may take to notice that and end."""
_POLL_S: Final = 0.02
_PID_CHARS: Final = 10
"""A process id is padded to this length, so that a shorter one overwrites a longer one."""
_MARKER_TITLE: Final = "dcpd data folder, format version "
_NEW_MARKER_NAME: Final = "dcpd-folder.tmp"
_TWIN_NAME: Final = MARKER_NAME + TWIN_SUFFIX
_OF_MARKER: Final = {_NEW_MARKER_NAME, MARKER_NAME, _TWIN_NAME}


class FolderError(Exception):
    """The data folder cannot be used; the text says which, why and what to try."""


class ForeignFolderError(FolderError):
    """The folder is not empty and not ours."""


class FolderFormatError(FolderError):
    """The folder has a format version that this program does not know."""


class FolderInUseError(FolderError):
    """Another process uses the folder."""


class DataFolder:
    """An open, locked data folder, made by `open_folder`. `close` releases the lock.

    The store process inherits `lock_fd`, so the folder stays locked until that process has ended,
    too. `is_new`: the marker was just written. `mended`: files of the marker that were damaged.
    """

    def __init__(
        self, path: Path, lock_fd: int, *, is_new: bool, mended: Sequence[str] = ()
    ) -> None:
        self.path = path
        self.lock_fd = lock_fd
        self.is_new = is_new
        self.mended = mended

    @property
    def log_path(self) -> Path:
        """Folder of the log's segments."""
        return log_path(self.path)

    @property
    def store_path(self) -> Path:
        """Folder of the LMDB environment."""
        return store_path(self.path)

    def close(self) -> None:
        """Release the lock."""
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1


def log_path(data_path: Path) -> Path:
    """Return the folder of the log's segments."""
    return data_path / "log"


def store_path(data_path: Path) -> Path:
    """Return the folder of the LMDB environment."""
    return data_path / "store"


def open_folder(
    path: Path,
    *,
    orphan_wait_s: float = ORPHAN_WAIT_S,
    now_s: Callable[[], float] = time.monotonic,
    sleep_s: Callable[[float], None] = time.sleep,
) -> DataFolder:
    """Create the data folder if it is missing, check that it is ours, and lock it.

    Waits up to `orphan_wait_s` for a lock whose owner is dead (its store process is about to end).
    Raises ForeignFolderError, FolderFormatError, FolderInUseError, FolderError.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_new = _recognise(path)
        lock_fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise FolderError(f"{path} is a file; give a folder with --data") from error
    except OSError as error:
        raise FolderError(
            f"the data folder {path} cannot be used: {error.strerror}; check its permissions, or "
            "give another one with --data"
        ) from error
    try:
        _lock(path, lock_fd, orphan_wait_s, now_s, sleep_s)
        mended: list[str] = []
        with contextlib.suppress(OSError):  # a full disk: the next start tries it again
            _put_marker_right(path, mended)
        # In place, and a failure does not matter: a full disk may have no block for it.
        with contextlib.suppress(OSError):
            os.pwrite(lock_fd, f"{os.getpid():<{_PID_CHARS}}\n".encode(), 0)
    except BaseException:
        os.close(lock_fd)
        raise
    return DataFolder(path, lock_fd, is_new=is_new, mended=mended)


def lock_folder_to_read(
    path: Path,
    *,
    orphan_wait_s: float = ORPHAN_WAIT_S,
    now_s: Callable[[], float] = time.monotonic,
    sleep_s: Callable[[float], None] = time.sleep,
) -> DataFolder:
    """Lock an existing data folder without changing anything in it, while no server uses it.

    Raises ForeignFolderError, FolderFormatError, FolderInUseError, FolderError.
    """
    try:
        text = _marker_text(path)
        if text is None:
            raise ForeignFolderError(
                f"{path} is not a dcpd data folder: it has no file {MARKER_NAME}; give the folder "
                "that dcpd was started with (--data)"
            )
        _check_marker(path, text)
        lock_fd = os.open(path / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise FolderError(
            f"the data folder {path} cannot be read: {error.strerror}: {error.filename}; check its "
            "permissions, and create a missing lock file with `touch`"
        ) from error
    try:
        _lock(path, lock_fd, orphan_wait_s, now_s, sleep_s)
    except BaseException:
        os.close(lock_fd)
        raise
    return DataFolder(path, lock_fd, is_new=False)


def _marker_text(path: Path) -> str | None:
    """Return the marker's line, as its twin has it if that one is sound."""
    twin = _text_of(path / _TWIN_NAME)
    marker = f"{_MARKER_TITLE}{FOLDER_FORMAT_VERSION}\n"
    return marker if twin == _twin_text(marker) else _text_of(path / MARKER_NAME)


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _twin_text(marker: str) -> str:
    return f"{marker}crc32c {google_crc32c.value(marker.encode()):08x}\n"


def _put_marker_right(path: Path, mended: list[str]) -> None:
    """Write marker and twin where they are not as they should be. Raises OSError."""
    marker = f"{_MARKER_TITLE}{FOLDER_FORMAT_VERSION}\n"
    for name, wanted in ((MARKER_NAME, marker), (_TWIN_NAME, _twin_text(marker))):
        found = _text_of(path / name)
        if found != wanted:
            _write_whole(path, name, wanted)
            sync_folder(path)
            if name == MARKER_NAME or found is not None:
                mended.append(name)


def _recognise(path: Path) -> bool:
    """Check the marker, or write it into an empty folder; return whether it was written."""
    marker = path / MARKER_NAME
    text = _marker_text(path)
    if text is None:
        names = sorted({entry.name for entry in path.iterdir()} - _OF_MARKER)
        if names and not marker.exists():
            raise ForeignFolderError(
                f"{path} is not a dcpd data folder and not empty (it holds {', '.join(names[:3])}"
                f"{', ...' if len(names) > 3 else ''}); nothing was changed. Give an empty or new "
                "folder with --data"
            )
        _write_marker(path)
        return True
    _check_marker(path, text)
    return False


def _check_marker(path: Path, text: str) -> None:
    marker = path / MARKER_NAME
    version = text.removeprefix(_MARKER_TITLE).strip()
    if not text.startswith(_MARKER_TITLE):
        raise ForeignFolderError(
            f"{marker} is not the marker that dcpd writes; nothing was changed. Give another "
            "folder with --data"
        )
    if version != str(FOLDER_FORMAT_VERSION):
        raise FolderFormatError(
            f"{path} has format version {version!r}, this program knows {FOLDER_FORMAT_VERSION}; "
            "use the version of dcpd that wrote it, or move the data with a backup"
        )


def _write_marker(path: Path) -> None:
    _write_whole(path, MARKER_NAME, f"{_MARKER_TITLE}{FOLDER_FORMAT_VERSION}\n")
    sync_folder(path)
    sync_folder(path.parent)


def _write_whole(path: Path, name: str, text: str) -> None:
    new = path / _NEW_MARKER_NAME
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path / name)


def _lock(
    path: Path,
    lock_fd: int,
    orphan_wait_s: float,
    now_s: Callable[[], float],
    sleep_s: Callable[[float], None],
) -> None:
    give_up_at_s = now_s() + orphan_wait_s
    while not _try_lock(path, lock_fd):
        owner_pid = _owner_pid(lock_fd)
        if owner_pid is not None and _is_alive(owner_pid):
            raise FolderInUseError(
                f"{path} is in use by process {owner_pid}; stop it first, or give another folder "
                "with --data"
            )
        if now_s() >= give_up_at_s:
            raise FolderInUseError(
                f"{path} is locked, but process {owner_pid} that locked it has ended. A process "
                f"that it started, or `dcpctl verify`, still holds the lock after "
                f"{orphan_wait_s:g} s. Find it with `fuser {path / LOCK_NAME}`, and try again when "
                "it has ended"
            )
        sleep_s(_POLL_S)


def _try_lock(path: Path, lock_fd: int) -> bool:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.EWOULDBLOCK, errno.EAGAIN}:
            return False
        raise FolderError(
            f"{path / LOCK_NAME} cannot be locked: {error.strerror}; use a local disk"
        ) from error
    return True


def _owner_pid(lock_fd: int) -> int | None:
    """Return the pid in the lock file, None if its owner has not written it yet."""
    text = os.pread(lock_fd, 32, 0).strip()
    return int(text) if text.isdigit() else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
