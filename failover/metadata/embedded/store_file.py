"""The embedded store's file: a snapshot, then a record for each change since. Each is synced.

    0      title, format version, store id, checksum
    512    end mark: how far the file was synced     (two slots; the newer one counts)
    1024   end mark
    1536   records: length, checksum, content. The first one is the snapshot

Who calls it: the embedded store's server, in a thread of its own. The file of generation 7 is
`meta-000007`. Compaction writes the next generation beside it, and then removes the old one.

Invariants
- at most one record is not synced: the last one. It has not been answered
- what `append` returned for is in the file, or the next start says that it is missing
- after a failed append without space the file ends where it ended before

The mark of a record is written after the record's sync, and reaches the disk with the next one's.
So a start can tell a torn record from a damaged one: below the mark all is whole, or refused. After
a power cut the mark may lack the last record. If the disk lost that one, too, no start can tell.
"""

from __future__ import annotations

import contextlib
import errno
import re
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import google_crc32c

from vbucket.log.device_files import FolderDisk

FORMAT_VERSION: Final = 1
STORE_ID_BYTES: Final = 16
RECORD_BYTES_MAX: Final = 256 << 20
"""A snapshot of the largest store, with its history, has less. A longer length is damage."""

_TITLE: Final = b"dcpdmeta"
_HEAD: Final = struct.Struct(">8sI16sI")
_MARK: Final = struct.Struct(">QI")
_MARKS_AT: Final = (512, 1024)
"""In sectors of their own: a torn write of one leaves the other."""
_RECORDS_AT: Final = 1536
_RECORD: Final = struct.Struct(">II")
_POSITION: Final = struct.Struct(">Q")
_NAME: Final = re.compile(r"meta-(\d{6})")
_NEW_NAME: Final = "meta.new"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class StoreFileError(Exception):
    """The file cannot be used; the text says where, why and what to try."""


class StoreFileFullError(StoreFileError):
    """There is no room for a record. Nothing was written."""


class StoreFileBrokenError(StoreFileError):
    """A write or sync failed, and nobody knows what is on disk. Open the file again."""


class FileContent(NamedTuple):
    """What `open_file` found."""

    snapshot: bytes
    records: list[bytes]
    torn_bytes: int
    """What was cut off its end: a record that was never answered."""


class StoreFile:
    """An open file; see the module. Made by `create_file` or `open_file`."""

    def __init__(self, disk: FolderDisk, generation: int, store_id: bytes, end: int) -> None:
        self.generation = generation
        self.store_id: Final = store_id
        self.end = end
        """Where the next record goes: the size of the file."""
        self.snapshot_bytes = 0
        self._disk = disk
        self._fd = disk.open(_name(generation))
        self._slot = 0
        self._is_broken = False

    def append(self, content: bytes) -> None:
        """Write a record and return when it is on disk.

        Raises:
            StoreFileFullError: there is no room. The file is as it was before.
            StoreFileBrokenError: nobody knows whether the record is on disk.
        """
        assert not self._is_broken, "a broken file takes no more records"
        record = _record(content, self.end)
        try:
            _write_all(self._disk, self._fd, record, self.end)
        except OSError as error:
            self._cut_back(error)
            text = f"no room for a record of {len(record)} bytes: {error.strerror}"
            raise StoreFileFullError(text) from error
        self._sync()
        self.end += len(record)
        self._write_mark()

    def rewrite(self, snapshot: bytes) -> None:
        """Replace the file by a new generation that begins with this snapshot.

        Raises:
            StoreFileFullError: there is no room. The present file stays.
            StoreFileBrokenError: the new file's name may not be on disk.
        """
        assert not self._is_broken
        generation = self.generation + 1
        try:
            end = _write_new(self._disk, self.store_id, snapshot)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._disk.remove(_NEW_NAME)
            text = f"no room for a snapshot of {len(snapshot)} bytes: {error.strerror}"
            raise StoreFileFullError(text) from error
        try:
            self._disk.rename(_NEW_NAME, _name(generation))
            self._disk.sync_folder()
            new_fd = self._disk.open(_name(generation))
        except OSError as error:
            raise self._broken(error) from error
        self._disk.close(self._fd)
        self._fd, self._slot = new_fd, 0
        with contextlib.suppress(OSError):  # the next start removes it
            self._disk.remove(_name(self.generation))
        self.generation, self.end, self.snapshot_bytes = generation, end, len(snapshot)

    def secure(self, tail: bytes) -> None:
        """Cut what follows the last record, and write the unmarked records again: `tail`.

        They may be unsynced after a kill, or after a failed sync. They will be served, so they
        have to be on disk; and a sync does not repeat what an earlier one failed to write.

        Raises:
            StoreFileBrokenError: a write or a sync failed.
        """
        try:
            self._disk.cut(self._fd, self.end)
            _write_all(self._disk, self._fd, tail, self.end - len(tail))
            self._disk.sync(self._fd)
            for at in _MARKS_AT:
                self._disk.write(self._fd, _mark(self.end), at)
            self._disk.sync_data(self._fd)
        except OSError as error:
            raise self._broken(error) from error

    def close(self) -> None:
        """Sync the mark and close the file."""
        if not self._is_broken:
            with contextlib.suppress(OSError):  # every record was synced; it is only the mark
                self._disk.sync_data(self._fd)
        self._disk.close(self._fd)

    def _sync(self) -> None:
        try:
            self._disk.sync_data(self._fd)
        except OSError as error:
            raise self._broken(error) from error

    def _cut_back(self, cause: OSError) -> None:
        if cause.errno not in _FULL:
            raise self._broken(cause) from cause
        try:
            self._disk.cut(self._fd, self.end)
        except OSError as error:
            raise self._broken(error) from error

    def _broken(self, cause: OSError) -> StoreFileBrokenError:
        self._is_broken = True
        return StoreFileBrokenError(
            f"{_name(self.generation)}: writing failed ({cause.strerror}), so nobody knows what is"
            " on disk. Check the disk and start again"
        )

    def _write_mark(self) -> None:
        self._slot = 1 - self._slot
        with contextlib.suppress(OSError):  # then the mark lacks this record, as after a power cut
            self._disk.write(self._fd, _mark(self.end), _MARKS_AT[self._slot])


def create_file(disk: FolderDisk, store_id: bytes, snapshot: bytes) -> StoreFile:
    """Make the first file of a new store.

    Raises:
        StoreFileFullError: there is no room.
    """
    assert len(store_id) == STORE_ID_BYTES
    assert not _generations(disk)
    try:
        end = _write_new(disk, store_id, snapshot)
        disk.rename(_NEW_NAME, _name(1))
        disk.sync_folder()
    except OSError as error:
        text = f"the metadata store's file cannot be made: {error.strerror}. Make room for it"
        raise StoreFileFullError(text) from error
    return _opened(disk, 1, store_id, end, snapshot)


def open_file(disk: FolderDisk) -> tuple[StoreFile, FileContent] | None:
    """Open the newest file, or return None if there is none.

    Raises:
        StoreFileError: it is damaged, or of a format that this version does not know.
    """
    with contextlib.suppress(FileNotFoundError):
        disk.remove(_NEW_NAME)
    generations = _generations(disk)
    if not generations:
        return None
    generation = generations[-1]
    data = disk.read(_name(generation))
    store_id, marked_end = _read_head(_name(generation), data)
    contents, end = _read_records(_name(generation), data, marked_end)
    for older in generations[:-1]:
        disk.remove(_name(older))
    file = _opened(disk, generation, store_id, end, contents[0])
    try:
        file.secure(data[min(marked_end, end) : end])
    except StoreFileError:
        file.close()
        raise
    return file, FileContent(contents[0], contents[1:], len(data) - end)


def _opened(
    disk: FolderDisk, generation: int, store_id: bytes, end: int, snapshot: bytes
) -> StoreFile:
    file = StoreFile(disk, generation, store_id, end)
    file.snapshot_bytes = len(snapshot)
    return file


def _generations(disk: FolderDisk) -> list[int]:
    found = (_NAME.fullmatch(name) for name in disk.names())
    return sorted(int(match[1]) for match in found if match is not None)


def _name(generation: int) -> str:
    return f"meta-{generation:06}"


def _write_new(disk: FolderDisk, store_id: bytes, snapshot: bytes) -> int:
    """Write and sync a whole file under its temporary name; return its size."""
    head = _HEAD.pack(_TITLE, FORMAT_VERSION, store_id, 0)[:-4]
    head += struct.pack(">I", google_crc32c.value(head))
    record = _record(snapshot, _RECORDS_AT)
    end = _RECORDS_AT + len(record)
    data = bytearray(_RECORDS_AT)
    data[: len(head)] = head
    for at in _MARKS_AT:
        data[at : at + _MARK.size] = _mark(end)
    fd = disk.create(_NEW_NAME)
    try:
        _write_all(disk, fd, bytes(data) + record, 0)
        disk.sync(fd)
    finally:
        disk.close(fd)
    return end


def _write_all(disk: FolderDisk, fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        taken = disk.write(fd, view, at)
        view, at = view[taken:], at + taken


def _record(content: bytes, at: int) -> bytes:
    return _RECORD.pack(len(content), _record_crc(content, at)) + content


def _record_crc(content: bytes | memoryview, at: int) -> int:
    """The position is part of it: a record that stands elsewhere is damage, too."""
    head = _POSITION.pack(at) + _RECORD.pack(len(content), 0)
    crc: int = google_crc32c.extend(google_crc32c.value(head), bytes(content))
    return crc


def _mark(end: int) -> bytes:
    return _MARK.pack(end, google_crc32c.value(_POSITION.pack(end)))


def _read_head(name: str, data: bytes) -> tuple[bytes, int]:
    """Return the store's id and where the newest mark says that the file ends."""
    if len(data) < _RECORDS_AT or not data.startswith(_TITLE):
        raise StoreFileError(f"{name}: not a file of a metadata store, or cut short; {_ADVICE}")
    _, version, store_id, crc = _HEAD.unpack_from(data)
    if google_crc32c.value(data[: _HEAD.size - 4]) != crc:
        raise StoreFileError(f"{name}: its head is damaged; {_ADVICE}")
    if version != FORMAT_VERSION:
        raise StoreFileError(
            f"{name}: format {version}, and this version of dcpd knows {FORMAT_VERSION} only."
            " Start it with the version that wrote it"
        )
    marks = [_MARK.unpack_from(data, at) for at in _MARKS_AT]
    ends = [end for end, crc in marks if google_crc32c.value(_POSITION.pack(end)) == crc]
    if not ends:
        raise StoreFileError(f"{name}: both end marks are damaged; {_ADVICE}")
    return store_id, max(ends)


def _read_records(name: str, data: bytes, marked_end: int) -> tuple[list[bytes], int]:
    """Return all records and where the last whole one ends."""
    contents: list[bytes] = []
    at = _RECORDS_AT
    for content, next_at in _whole_records(data, at):
        contents.append(content)
        at = next_at
    if at < marked_end:
        raise StoreFileError(
            f"{name}: the record at byte {at} of {marked_end} is damaged or missing, and it was"
            f" answered; {_ADVICE}"
        )
    if _is_followed_by_another(data, at):
        raise StoreFileError(
            f"{name}: the record at byte {at} is damaged, and a whole one follows; {_ADVICE}"
        )
    assert contents, "the mark covers the snapshot"
    return contents, at


def _whole_records(data: bytes, at: int) -> Iterator[tuple[bytes, int]]:
    while at + _RECORD.size <= len(data):
        length, crc = _RECORD.unpack_from(data, at)
        content = data[at + _RECORD.size : at + _RECORD.size + length]
        if length > RECORD_BYTES_MAX or len(content) < length or _record_crc(content, at) != crc:
            return
        at += _RECORD.size + length
        yield content, at


def _is_followed_by_another(data: bytes, at: int) -> bool:
    if at + _RECORD.size > len(data):
        return False
    behind = at + _RECORD.size + _RECORD.unpack_from(data, at)[0]
    return next(_whole_records(data, behind), None) is not None


_ADVICE: Final = (
    "nothing was changed. Put back a copy of this file that is whole, and check the disk and its"
    " file system"
)
