"""The log as real files: `0000000001.log`, `0000000002.log`, ... and `end.mark` in one folder.

Who calls it: the shell opens it; the engine appends and syncs. What a full disk or a short write
leaves behind is cut at once. If even that fails, the device takes no more appends, and the next
start cuts it as a torn tail. Others read the files with `vbucket.log.segment_files`.

A new segment is written under a temporary name, synced and renamed, so it appears as a whole. It
begins with zeros ahead of its end. `reserve` writes more of them, `prepare` those of the next
segment: its file has its temporary name until `rotate` needs it.

Larger groups go past the page cache (O_DIRECT), if a sync follows. The sync of a large commit of
the store puts 100 MB into the disk's queue. Writes from the page cache wait there for their turn,
direct ones do not (docs/decisions.md).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from functools import partial
from pathlib import Path
from typing import Final

from vbucket.log.device import (
    AHEAD_BYTES,
    DIRECT_BYTES_MAX,
    DIRECT_BYTES_MIN,
    MARK_BYTES_MAX,
    MARK_SLOT_BYTES,
    MARK_SLOTS,
    PIECE_BYTES,
    PREPARE_BYTES,
    SEGMENT_HEADER_BYTES,
    AppendAside,
    LogFullError,
    LogWriteError,
    SyncFailedError,
    mark_slots,
    pack_segment_header,
)
from vbucket.log.segment_files import MARK_NAME, SEGMENT_NAME, segment_name
from vbucket.model.ids import Draws

_NEW_NAME: Final = "new-segment.tmp"
_BLOCK_BYTES: Final = 4096
"""Direct writes are whole blocks: a page of the page cache, and no disk has larger ones."""
_NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""The process or the system has reached its limit of open files (ulimit -n)."""
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG}) | _NO_DESCRIPTOR
"""Errors that may pass: also a full disk, an exhausted quota, the file size limit (ulimit -f)."""


class FolderDisk:
    """Files by name, in a folder that is created when missing; `release` it. Every call may raise
    OSError, and a power cut can come between any two. Tests run the device over a disk that forgets
    part of what was not synced (tests/support/forgetful_disk.py).

    The promises are those of POSIX: data and length of a file are durable after `sync`, written
    data (and a greater length) after `sync_data`, names after `sync_folder`.

    The folder stays open: its sync must not fail because the process has no descriptor left.
    """

    has_system_descriptors = True
    """Whether the descriptors are those of the operating system, so that others may write to them
    past this object."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def names(self) -> list[str]:
        """Return the names of all files."""
        return [path.name for path in self._folder.iterdir()]

    def read(self, name: str) -> bytes:
        """Return a file's bytes. Raises FileNotFoundError."""
        return (self._folder / name).read_bytes()

    def create(self, name: str) -> int:
        """Return a descriptor of a new, empty file; one of this name is emptied."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        return os.open(self._folder / name, flags, 0o600)

    def open(self, name: str) -> int:
        """Return a descriptor to write a file with."""
        return os.open(self._folder / name, os.O_WRONLY | os.O_CLOEXEC)

    def open_direct(self, name: str) -> int:
        """Return a descriptor whose writes bypass the page cache; `sync` is needed all the same.

        Positions, lengths and the addresses of the data are multiples of the disk's blocks. A file
        system that cannot do it refuses here, or the first write.
        """
        direct = getattr(os, "O_DIRECT", 0)  # Linux and FreeBSD have it, macOS does not
        if not direct:
            raise OSError(errno.EINVAL, "this system has no direct writes", name)
        return os.open(self._folder / name, os.O_WRONLY | os.O_CLOEXEC | direct)

    def size(self, fd: int) -> int:
        """Return a file's length in bytes."""
        return os.fstat(fd).st_size

    def write(self, fd: int, data: bytes | memoryview, at: int) -> int:
        """Write at a position; return how many bytes were taken."""
        return os.pwrite(fd, data, at)

    def cut(self, fd: int, size_bytes: int) -> None:
        """Set a file's length."""
        os.ftruncate(fd, size_bytes)

    def sync(self, fd: int) -> None:
        """Return when data and length of the file are on disk."""
        os.fsync(fd)

    def sync_data(self, fd: int) -> None:
        """Return when all written data is on disk; a cut of the file need not be."""
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def rename(self, old: str, new: str) -> None:
        """Rename a file."""
        (self._folder / old).rename(self._folder / new)

    def remove(self, name: str) -> None:
        """Remove a file. Raises FileNotFoundError."""
        (self._folder / name).unlink()

    def sync_folder(self) -> None:
        """Return when all names are on disk."""
        os.fsync(self._folder_fd)

    def release(self) -> None:
        """Close the folder. May be repeated."""
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1


class FileLogDevice:
    """`LogDevice` over the files of one folder; the folder is created when missing.

    `draws` gives each new segment a salt of 64 bits. Clients must not be able to guess it.

    Invariants
    - `_end` is the end of the last successful append to the newest segment, and
      `_end` <= `_ahead_end` <= the file's length;
    - the bytes between `_end` and `_ahead_end` are zeros on disk. Bytes after them are zeros, too,
      except after a failed append that could not be cut (then `_refusal` is set);
    - the file grows and shrinks only under `_growing`, and while others write an append
      (`_is_aside`) not at all: so `reserve` never overwrites an append;
    - a direct write has whole blocks, rewrites the bytes before `_end` in the first one, and ends
      below `_ahead_end` with zeros. No zeros are written beside it (`_growing`, `_is_aside`): the
      kernel could report an error of the disk;
    - once a segment has direct writes, every append writes whole blocks where it can. The page
      cache lacks the block before `_end`, so a shorter write would have to read it from the disk;
    - the file with the temporary name is used only under `_preparing`. Its first `_prepared_bytes`
      are zeros on disk.
    """

    def __init__(
        self,
        folder: Path,
        draws: Draws,
        disk: FolderDisk | None = None,
        *,
        direct_bytes_min: int = DIRECT_BYTES_MIN,
    ) -> None:
        self._folder = folder
        self._draws = draws
        self._salt: int | None = None
        self._disk = disk or FolderDisk(folder)
        self._refusal: Exception | None = None
        self._fd = -1
        self._end = self._ahead_end = 0
        self._direct_bytes_min = direct_bytes_min
        self._direct_fd = -1
        """The newest segment past the page cache; -1: not open."""
        self._may_be_direct = True  # as far as known
        # Direct writes need an address like that of a map: at the beginning of a page.
        self._blocks = mmap.mmap(-1, DIRECT_BYTES_MAX + 2 * _BLOCK_BYTES)
        self._tail: bytes | None = None
        """The segment's bytes in the block that holds `_end`. None: not known, because this device
        did not begin the segment, or has cut it."""
        self._growing = threading.RLock()
        self._is_aside = False
        self._next_fd = -1
        """The file that `prepare` writes."""
        self._prepared_bytes = 0
        self._closing = threading.Event()
        self._preparing = threading.Lock()
        self._mark_fd = -1
        self._is_mark_name_doubtful = True
        """Whether a power cut could take the marks' file: the last process may have left that."""
        names = self._disk.names()
        if MARK_NAME in names:
            self._mark_fd = self._disk.open(MARK_NAME)
        if _NEW_NAME in names:
            self._disk.remove(_NEW_NAME)
        self._segments = sorted(int(found[1]) for found in map(SEGMENT_NAME.match, names) if found)
        if self._segments:
            self._fd = self._disk.open(segment_name(self._segments[-1]))
            self._end = self._ahead_end = self._disk.size(self._fd)

    @property
    def current_bytes(self) -> int:
        """See LogDevice."""
        return self._end

    @property
    def room_bytes(self) -> int:
        """See LogDevice."""
        return self._ahead_end - self._end

    @property
    def prepared_bytes(self) -> int:
        """See LogDevice."""
        return self._prepared_bytes

    @property
    def salt(self) -> int:
        """See LogDevice."""
        assert self._salt is not None, "records go only into a segment that was begun here"
        return self._salt

    def segments(self) -> list[int]:
        """See LogDevice."""
        return list(self._segments)

    def read(self, segment: int) -> bytes:
        """See LogDevice."""
        try:
            data = self._disk.read(segment_name(segment))
        except FileNotFoundError:
            raise KeyError(segment) from None
        return data[: self._end] if segment == self._segments[-1] else data

    def append(self, data: bytes, *, sync_follows: bool = False) -> None:
        """See LogDevice."""
        self._refuse_if_broken()
        self._is_aside = False
        if self._fd < 0:
            raise LogWriteError(f"{self._folder}: there is no segment yet; call rotate() first")
        is_direct = sync_follows and self._is_direct(len(data))
        if (is_direct or self._direct_fd >= 0) and self._append_blocks(data, is_direct=is_direct):
            return
        if self._end + len(data) <= self._ahead_end:
            self._append(data)
            return
        with self._growing:
            self._append(data)
            self._ahead_end = max(self._ahead_end, self._end)

    def begin_append(self, data: bytes) -> AppendAside | None:
        """See LogDevice."""
        self._refuse_if_broken()
        if self._fd < 0 or not self._disk.has_system_descriptors:
            return None
        is_direct = self._is_direct(len(data))
        whole = self._whole_blocks(data) if is_direct or self._direct_fd >= 0 else None
        pieces, at = ((data,), self._end) if whole is None else whole
        direct = self._direct_blocks(pieces) if is_direct and whole is not None else None
        fd, written = (self._fd, b"".join(pieces)) if direct is None else (self._direct_fd, direct)
        self._is_aside = True
        done = partial(self._end_append, data)
        return AppendAside(fd, self._fd, written, at, done, self._fail_sync_of_segment)

    def _end_append(self, data: bytes) -> None:
        self._is_aside = False
        with self._growing:
            self._advance(data)
            self._ahead_end = max(self._ahead_end, self._end)

    def sync(self) -> None:
        """See LogDevice."""
        self._refuse_if_broken()
        if self._fd < 0:
            return
        try:
            self._disk.sync_data(self._fd)
        except OSError as error:
            self._fail_sync_of_segment(error)

    def _fail_sync_of_segment(self, error: OSError) -> None:
        self._fail_sync(f"segment {self._segments[-1]} could not be synced: {error}", error)

    def reserve(self) -> None:
        """See LogDevice."""
        assert not self._is_aside, "zeros could go over what is being written"
        with self._growing:
            if self._refusal is not None or self._fd < 0:
                return
            segment, at = self._segments[-1], self._ahead_end
            # Each descriptor gets an error of the disk once: a sync of the log must not miss it.
            try:
                fd = self._disk.open(segment_name(segment))
            except OSError:
                return  # no descriptor is left
            try:
                self._write_all(fd, bytes(AHEAD_BYTES), at)
            except OSError:
                with contextlib.suppress(OSError):
                    self._disk.cut(fd, at)  # leftover zeros do no harm, but the disk is full
            else:
                try:
                    self._disk.sync_data(fd)
                except OSError as error:
                    self._fail_sync(f"segment {segment} could not be synced: {error}", error)
                self._ahead_end = at + AHEAD_BYTES
            finally:
                self._disk.close(fd)

    def prepare(self) -> None:
        """See LogDevice."""
        with self._preparing:
            if self._closing.is_set() or self._refusal is not None:
                return
            try:
                if self._next_fd < 0:
                    self._next_fd = self._disk.create(_NEW_NAME)
                begin, piece = self._prepared_bytes, bytes(PIECE_BYTES)
                for at in range(begin, begin + PREPARE_BYTES, PIECE_BYTES):
                    self._write_all(self._next_fd, piece, at)
                self._disk.sync_data(self._next_fd)
            except OSError:
                self._drop_prepared()  # nothing needs it: `rotate` finds out what is wrong
            else:
                self._prepared_bytes += PREPARE_BYTES
            if self._closing.is_set():
                self._drop_prepared()

    def rotate(self, at_least: int = 1) -> int:
        """See LogDevice."""
        assert not self._is_aside, "the segment could be sealed below what is being written"
        self.sync()
        with self._growing:
            segment = self._segments[-1] + 1 if self._segments else at_least
            if self._fd >= 0:
                self._seal()
            salt = self._draws.getrandbits(64)
            # It stays open, because later there may be no free descriptor.
            with self._preparing:
                header = pack_segment_header(segment, self._end, salt)
                fd, room_bytes = self._create(segment, header)
            try:
                self._sync_folder()
            except SyncFailedError:
                self._disk.close(fd)
                raise
            self._segments.append(segment)
            self._close_newest()
            self._fd = fd
            self._salt = salt
            self._end, self._tail = SEGMENT_HEADER_BYTES, header
            self._ahead_end = self._end + room_bytes
        return segment

    def rewrite(self, at: int, data: bytes | memoryview) -> None:
        """See LogDevice."""
        self._refuse_if_broken()
        assert at + len(data) <= self._end
        try:
            self._write_all(self._fd, data, at)
        except OSError as error:
            text = (
                f"{self._folder}: segment {self._segments[-1]} could not be written again from "
                f"byte {at} on: {error}; check the disk, then start again"
            )
            raise _write_error(text, error) from error

    def truncate(self, segment: int, size_bytes: int) -> None:
        """See LogDevice."""
        self._refuse_if_broken()
        if segment not in self._segments:
            raise KeyError(segment)
        with self._growing:
            fd = self._disk.open(segment_name(segment))
            try:
                self._cut_durably(segment, fd, size_bytes)
            finally:
                self._disk.close(fd)
            if segment == self._segments[-1]:
                self._end = self._ahead_end = size_bytes
                self._tail = None

    def delete(self, segment: int) -> None:
        """See LogDevice."""
        if segment not in self._segments:
            raise KeyError(segment)
        if segment == self._segments[-1]:
            raise ValueError(f"segment {segment} is the newest one; rotate() before deleting it")
        self._disk.remove(segment_name(segment))
        self._sync_folder()
        self._segments.remove(segment)

    def drop_after(self, segment: int) -> None:
        """See LogDevice."""
        self._refuse_if_broken()
        with self._growing:
            while self._segments and self._segments[-1] > segment:
                self._close_newest()
                name = segment_name(self._segments[-1])
                try:
                    self._disk.remove(name)
                except OSError as error:
                    raise _write_error(f"{name} could not be removed: {error}", error) from error
                self._sync_folder()
                del self._segments[-1]
                self._tail = None
                if self._segments:
                    self._fd = self._disk.open(segment_name(self._segments[-1]))
                    self._end = self._ahead_end = self._disk.size(self._fd)

    def mark(self, slot: int, data: bytes) -> None:
        """See LogDevice."""
        assert 0 <= slot < MARK_SLOTS
        assert len(data) <= MARK_BYTES_MAX
        if self._mark_fd < 0 and not self._closing.is_set():
            self._create_mark()
        with contextlib.suppress(OSError):
            self._disk.write(self._mark_fd, data, slot * MARK_SLOT_BYTES)

    def sync_mark(self) -> None:
        """See LogDevice."""
        self._refuse_if_broken()
        if self._mark_fd < 0:
            return
        try:
            if self._is_mark_name_doubtful:
                self._disk.sync(self._mark_fd)
            else:
                self._disk.sync_data(self._mark_fd)
        except OSError as error:
            self._fail_sync(f"{MARK_NAME} could not be synced: {error}", error)
        if self._is_mark_name_doubtful:
            self._sync_folder()
            self._is_mark_name_doubtful = False

    def marks(self) -> list[bytes]:
        """See LogDevice."""
        try:
            data = self._disk.read(MARK_NAME)
        except FileNotFoundError:
            return []
        return mark_slots(data)

    def close(self) -> None:
        """See LogDevice."""
        has_more = self._fd >= 0 and (self._ahead_end > self._end or self._is_aside)
        if has_more and self._refusal is None:
            with contextlib.suppress(OSError):  # the next start cuts it
                self._disk.cut(self._fd, self._end)
        self._closing.set()
        if self._preparing.acquire(blocking=False):  # or else `prepare` removes it
            self._drop_prepared()
            self._preparing.release()
        self._close_newest()
        if self._mark_fd >= 0:
            self._disk.close(self._mark_fd)
            self._mark_fd = -1
        self._disk.release()

    def _create_mark(self) -> None:
        try:
            self._mark_fd = self._disk.create(MARK_NAME)
            self._write_all(self._mark_fd, bytes(MARK_SLOTS * MARK_SLOT_BYTES), 0)
        except OSError as error:
            text = f"{self._folder}: cannot create {MARK_NAME}: {error}; free some space"
            raise _write_error(text, error) from error

    def _is_direct(self, size_bytes: int) -> bool:
        """Whether an append of this size goes past the page cache if a sync follows."""
        return self._direct_bytes_min <= size_bytes <= DIRECT_BYTES_MAX

    def _append_blocks(self, data: bytes, *, is_direct: bool) -> bool:
        """Append by writing whole blocks; return whether it was done. If not, nothing has changed
        that a plain append does not set right.
        """
        whole = self._whole_blocks(data)
        if whole is None:
            return False
        pieces, at = whole
        if not (is_direct and self._write_directly(pieces, at)):
            blocks = b"".join(pieces)
            try:
                self._write_all(self._fd, blocks, at)
            except OSError as error:
                raise self._cut_failed_append(len(data), error) from error
        self._advance(data)
        return True

    def _whole_blocks(self, data: bytes) -> tuple[tuple[bytes, bytes, bytes], int] | None:
        """Return the whole blocks that append `data`, in pieces, and their position. None: the
        bytes before `_end` are not known, or there are no zeros to overwrite.
        """
        tail = self._tail
        if tail is None:
            return None
        at = self._end - len(tail)
        used_bytes = len(tail) + len(data)
        size_bytes = -(-used_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
        if at + size_bytes > self._ahead_end:
            return None
        return (tail, data, bytes(size_bytes - used_bytes)), at

    def _write_directly(self, pieces: tuple[bytes, ...], at: int) -> bool:
        """Write blocks past the page cache; return whether all were written. After an error some of
        them may be: the caller writes them again, and the sync tells whether that was possible.
        """
        with self._growing:
            blocks = self._direct_blocks(pieces)
            if blocks is None:
                return False
            try:
                is_written = self._disk.write(self._direct_fd, blocks, at) == len(blocks)
            except OSError:
                is_written = False
            if not is_written:
                self._may_be_direct = False
                self._close_direct()
            return is_written

    def _direct_blocks(self, pieces: tuple[bytes, ...]) -> memoryview | None:
        """Return the pieces where a direct write can take them from; None: it cannot be made."""
        if not self._opens_directly():
            return None
        self._blocks.seek(0)
        for piece in pieces:
            self._blocks.write(piece)
        return memoryview(self._blocks)[: self._blocks.tell()]

    def _opens_directly(self) -> bool:
        """Open the newest segment for direct writes; return whether it is open."""
        if self._direct_fd < 0 and self._may_be_direct:
            try:
                self._direct_fd = self._disk.open_direct(segment_name(self._segments[-1]))
            except OSError as error:
                self._may_be_direct = error.errno in _NO_DESCRIPTOR
        return self._direct_fd >= 0

    def _advance(self, data: bytes) -> None:
        """Note that `data` was appended."""
        self._end += len(data)
        if self._tail is not None:
            tail_bytes = self._end % _BLOCK_BYTES
            if len(data) < tail_bytes:
                self._tail += data
            else:
                self._tail = data[len(data) - tail_bytes :]
            assert len(self._tail) == tail_bytes

    def _append(self, data: bytes) -> None:
        end = self._end
        try:
            # Usually one call does it. After a short write (signal, full disk) write the rest.
            written = self._disk.write(self._fd, data, end)
            if written < len(data):
                self._write_all(self._fd, memoryview(data)[written:], end + written)
        except OSError as error:
            raise self._cut_failed_append(len(data), error) from error
        self._advance(data)

    def _write_all(self, fd: int, data: bytes | memoryview, at: int) -> None:
        left = memoryview(data)
        while left:
            written = self._disk.write(fd, left, at)
            if written == 0:
                raise OSError(errno.ENOSPC, "the disk took no more bytes")
            left = left[written:]
            at += written

    def _seal(self) -> None:
        """Give the newest segment exactly its length, durably."""
        # Always, even without zeros to cut: the cut of the last stop may not be on disk.
        self._cut_durably(self._segments[-1], self._fd, self._end)
        self._ahead_end = self._end

    def _cut_durably(self, segment: int, fd: int, size_bytes: int) -> None:
        try:
            self._disk.cut(fd, size_bytes)
        except OSError as error:
            raise _write_error(f"segment {segment} could not be cut: {error}", error) from error
        try:
            self._disk.sync(fd)
        except OSError as error:
            self._fail_sync(f"segment {segment} could not be synced: {error}", error)

    def _create(self, segment: int, header: bytes) -> tuple[int, int]:
        """Write the next segment and give it its name; return its descriptor, and how many zeros
        lie ahead in it.
        """
        fd, prepared_bytes = self._next_fd, self._prepared_bytes
        self._next_fd, self._prepared_bytes = -1, 0
        try:
            if fd < 0:
                fd = self._disk.create(_NEW_NAME)
            self._write_all(fd, header, 0)
            if prepared_bytes:
                room_bytes = prepared_bytes - len(header)
                self._disk.sync_data(fd)  # its length is on disk
            else:
                room_bytes = self._write_first_zeros(fd, len(header))
                self._disk.sync(fd)
            self._disk.rename(_NEW_NAME, segment_name(segment))
        except OSError as error:
            if fd >= 0:
                self._disk.close(fd)
            with contextlib.suppress(OSError):
                self._disk.remove(_NEW_NAME)
            if error.errno in _NO_DESCRIPTOR:
                what_to_try = "close connections, or allow more open files (ulimit -n)"
            else:
                what_to_try = "free some space or check the folder's permissions, then try again"
            raise _write_error(
                f"{self._folder}: cannot create log segment {segment}: {error}; {what_to_try}",
                error,
            ) from error
        return fd, room_bytes

    def _write_first_zeros(self, fd: int, at: int) -> int:
        try:
            self._write_all(fd, bytes(AHEAD_BYTES), at)
        except OSError:
            self._disk.cut(fd, at)
            return 0
        return AHEAD_BYTES

    def _drop_prepared(self) -> None:
        """Remove the file for the next segment. The caller holds `_preparing`."""
        if self._next_fd >= 0:
            self._disk.close(self._next_fd)
            self._next_fd, self._prepared_bytes = -1, 0
            with contextlib.suppress(OSError):  # the next start removes it
                self._disk.remove(_NEW_NAME)

    def _close_direct(self) -> None:
        if self._direct_fd >= 0:
            self._disk.close(self._direct_fd)
            self._direct_fd = -1

    def _close_newest(self) -> None:
        self._close_direct()
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def _refuse_if_broken(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _sync_folder(self) -> None:
        try:
            self._disk.sync_folder()
        except OSError as error:
            self._fail_sync(f"the folder could not be synced: {error}", error)

    def _fail_sync(self, what: str, cause: OSError) -> None:
        self._refusal = SyncFailedError(
            f"{self._folder}: {what}; anything written since the last good sync may be lost. "
            "Check the disk, then start again: acknowledged changes are in the log"
        )
        raise self._refusal from cause

    def _cut_failed_append(self, wanted_bytes: int, cause: OSError) -> LogWriteError:
        text = (
            f"{self._folder}: segment {self._segments[-1]} took no group of {wanted_bytes} bytes "
            f"at {self._end}: {cause}; free some space on this disk and try again"
        )
        with self._growing:
            try:
                self._disk.cut(self._fd, self._end)
            except OSError as error:
                text += f" (cutting the partial write failed too: {error})"
                self._refusal = LogWriteError(text)
                return LogWriteError(text)
            self._ahead_end = self._end
        with self._preparing:
            self._drop_prepared()
        return _write_error(text, cause)


def _write_error(text: str, cause: OSError) -> LogWriteError:
    """Return LogFullError if trying again can help, else LogWriteError."""
    return LogFullError(text) if cause.errno in _NO_ROOM else LogWriteError(text)


def sync_folder(folder: Path) -> None:
    """Make creations, renames and removals in a folder durable. Raises SyncFailedError."""
    try:
        disk = FolderDisk(folder)
        try:
            disk.sync_folder()
        finally:
            disk.release()
    except OSError as error:
        raise SyncFailedError(f"{folder}: the folder could not be synced: {error}") from error
