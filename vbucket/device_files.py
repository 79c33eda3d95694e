"""The log as real files: `0000000001.log`, `0000000002.log`, ... in one folder.

Who calls it: the shell opens it; the engine appends and syncs. The store process uses only
`read_segment`. What a full disk or a short write leaves behind is cut away at once; if even that
fails, the device takes no more appends and the next start cuts it as a torn tail.

A new segment is written under a temporary name, synced and renamed, so that it appears whole.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from vbucket.device import LogWriteError, SyncFailedError, pack_segment_header

SEGMENT_NAME: Final = re.compile(r"\A(\d{10,20})\.log\Z")
_NEW_NAME: Final = "new-segment.tmp"


def segment_path(folder: Path, segment: int) -> Path:
    """Return the file of a segment."""
    return folder / f"{segment:010d}.log"


def read_segment(folder: Path, segment: int) -> bytes:
    """Return all bytes of a segment. Raises KeyError when there is no such segment."""
    try:
        return segment_path(folder, segment).read_bytes()
    except FileNotFoundError:
        raise KeyError(segment) from None


def sync_folder(folder: Path) -> None:
    """Make creations, renames and removals in a folder durable. Raises SyncFailedError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        raise SyncFailedError(f"{folder}: the folder could not be synced: {error}") from error
    finally:
        os.close(fd)


class FileLogDevice:
    """`LogDevice` over the files of one folder; the folder is created when missing.

    Invariants: `_end` is the length of the newest segment as far as appends succeeded; the file is
    never longer, except after a failed append that could not be cut (`_refusal` is set then).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._refusal: Exception | None = None
        self._fd = -1
        self._end = 0
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / _NEW_NAME).unlink(missing_ok=True)
        names = (SEGMENT_NAME.match(path.name) for path in folder.iterdir())
        self._segments = sorted(int(name[1]) for name in names if name)
        if self._segments:
            self._open_newest()

    @property
    def current_bytes(self) -> int:
        """See LogDevice."""
        return self._end

    def segments(self) -> list[int]:
        """See LogDevice."""
        return list(self._segments)

    def read(self, segment: int) -> bytes:
        """See LogDevice."""
        return read_segment(self._folder, segment)

    def append(self, data: bytes) -> None:
        """See LogDevice."""
        self._refuse_if_broken()
        if self._fd < 0:
            raise LogWriteError(f"{self._folder}: there is no segment yet; call rotate() first")
        end = self._end
        try:
            # The usual case is one call; a short write (signal, full disk) goes on where it ended.
            written = os.pwrite(self._fd, data, end)
            while written < len(data):
                more = os.pwrite(self._fd, memoryview(data)[written:], end + written)
                if more == 0:
                    raise OSError("the disk took no more bytes")
                written += more
        except OSError as error:
            raise self._cut_failed_append(len(data), error) from error
        self._end = end + written

    def sync(self) -> None:
        """See LogDevice."""
        self._refuse_if_broken()
        if self._fd < 0:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self._fail_sync(f"segment {self._segments[-1]} could not be synced: {error}", error)

    def rotate(self) -> int:
        """See LogDevice."""
        self.sync()
        self._refuse_if_broken()
        segment = self._segments[-1] + 1 if self._segments else 1
        new = self._folder / _NEW_NAME
        try:
            with new.open("wb") as file:
                file.write(pack_segment_header(segment, self._end))
                file.flush()
                os.fsync(file.fileno())
            new.rename(segment_path(self._folder, segment))
        except OSError as error:
            new.unlink(missing_ok=True)
            raise LogWriteError(
                f"{self._folder}: cannot create log segment {segment}: {error}; "
                "free some space or check the folder's permissions, then try again"
            ) from error
        self._sync_folder()
        self._segments.append(segment)
        self._open_newest()
        return segment

    def truncate(self, segment: int, size_bytes: int) -> None:
        """See LogDevice."""
        self._refuse_if_broken()
        if segment not in self._segments:
            raise KeyError(segment)
        fd = os.open(segment_path(self._folder, segment), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
        except OSError as error:
            raise LogWriteError(f"segment {segment} could not be cut: {error}") from error
        else:
            try:
                os.fsync(fd)
            except OSError as error:
                self._fail_sync(f"segment {segment} could not be synced: {error}", error)
        finally:
            os.close(fd)
        if segment == self._segments[-1]:
            self._end = size_bytes

    def delete(self, segment: int) -> None:
        """See LogDevice."""
        if segment not in self._segments:
            raise KeyError(segment)
        if segment == self._segments[-1]:
            raise ValueError(f"segment {segment} is the newest one; rotate() before deleting it")
        segment_path(self._folder, segment).unlink()
        self._sync_folder()
        self._segments.remove(segment)

    def close(self) -> None:
        """See LogDevice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open_newest(self) -> None:
        self.close()
        path = segment_path(self._folder, self._segments[-1])
        self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._end = os.fstat(self._fd).st_size

    def _refuse_if_broken(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _sync_folder(self) -> None:
        try:
            sync_folder(self._folder)
        except SyncFailedError as error:
            self._refusal = error
            raise

    def _fail_sync(self, what: str, cause: OSError) -> None:
        self._refusal = SyncFailedError(
            f"{self._folder}: {what}; nothing written since the last good sync is certain. "
            "Check the disk, then start again: what was acknowledged is in the log"
        )
        raise self._refusal from cause

    def _cut_failed_append(self, wanted_bytes: int, cause: OSError) -> LogWriteError:
        text = (
            f"{self._folder}: segment {self._segments[-1]} took no group of {wanted_bytes} bytes "
            f"at {self._end}: {cause}; free some space on this disk and try again"
        )
        try:
            os.ftruncate(self._fd, self._end)
        except OSError as error:
            self._refusal = LogWriteError(f"{text} (cutting what was written failed too: {error})")
            return self._refusal
        return LogWriteError(text)
