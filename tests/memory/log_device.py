"""The log in memory, for tests and simulation: same rules as files, crashes and faults on demand.

Deterministic: the caller says what survives a crash. A fault point is armed for the nth call from
now (1 = the next one) and fires once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vbucket.log.device import (
    MARK_SLOTS,
    SEGMENT_HEADER,
    LogDevice,
    LogFullError,
    LogWriteError,
    SyncFailedError,
    pack_segment_header,
)

MEMORY_AHEAD_BYTES = 512
"""Zeros that `reserve` writes: few, so that tests reach their end."""
_SALT_STEP = 0x9E37_79B9_7F4A_7C15
"""Gives each segment another salt, the same in every run."""
_SALT_TOP = 1 << 63
"""The top bit of every salt, so that no record begins with a zero byte. Then whatever a crash keeps
of a record is visible."""


class SegmentsOf(Mapping[int, bytes]):
    """The segments of a device, each read when it is asked for."""

    def __init__(self, device: LogDevice) -> None:
        self._device = device

    def __getitem__(self, segment: int) -> bytes:
        return self._device.read(segment)

    def __iter__(self) -> Iterator[int]:
        return iter(self._device.segments())

    def __len__(self) -> int:
        return len(self._device.segments())


class MemoryLogDevice:
    """`LogDevice` over bytearrays.

    Invariants
    - 0 <= `_synced` <= length of the newest segment; a sync has covered sealed segments wholly;
    - `_ahead_end` is where the newest segment's zeros end; `_data` does not contain them;
    - `_failed` (segment -> start, end) is what failed syncs covered. It can be read and a power cut
      takes it, even after a later sync, until it was rewritten and synced.
    """

    def __init__(self) -> None:
        self._data: dict[int, bytearray] = {}
        self._marks: list[bytes] = []
        self._synced = 0
        self._ahead_end = 0
        self._prepared_bytes = 0
        self._refusal: Exception | None = None
        self._append_countdown = 0
        self._append_keeps_bytes = 0
        self._append_is_cut = True
        self._sync_countdown = 0
        self._failed: dict[int, tuple[int, int]] = {}
        self._rewritten: list[tuple[int, int]] = []
        """(start, end) in the newest segment: rewritten, not yet synced."""

    @property
    def current_bytes(self) -> int:
        """See LogDevice."""
        return len(self._newest()) if self._data else 0

    @property
    def room_bytes(self) -> int:
        """See LogDevice."""
        return max(0, self._ahead_end - self.current_bytes)

    @property
    def prepared_bytes(self) -> int:
        """See LogDevice."""
        return self._prepared_bytes

    @property
    def unsynced_bytes(self) -> int:
        """How many bytes a crash may lose."""
        return self.current_bytes - self._synced

    @property
    def salt(self) -> int:
        """See LogDevice."""
        salt: int = SEGMENT_HEADER.unpack_from(self._newest())[5]
        return salt

    def segments(self) -> list[int]:
        """See LogDevice."""
        return sorted(self._data)

    def read(self, segment: int) -> bytes:
        """See LogDevice."""
        return bytes(self._data[segment])

    def append(self, data: bytes, *, sync_follows: bool = False) -> None:
        """See LogDevice."""
        self._refuse_if_broken()
        if not self._data:
            raise LogWriteError("memory log: there is no segment yet; call rotate() first")
        if self._append_countdown:
            self._append_countdown -= 1
            if self._append_countdown == 0:
                self._fail_this_append(data)
        self._newest().extend(data)

    def sync(self) -> None:
        """See LogDevice."""
        self._refuse_if_broken()
        if self._sync_countdown:
            self._sync_countdown -= 1
            if self._sync_countdown == 0:
                self._fail_range(self._synced, self.current_bytes)
                self._refusal = SyncFailedError("memory log: the armed sync fault")
                raise self._refusal
        self._synced = self.current_bytes
        for start, end in self._rewritten:
            self._settle(max(self._data), start, end)
        self._rewritten.clear()

    def begin_append(self, data: bytes) -> None:
        """See LogDevice: there is nothing that others could write to."""

    def reserve(self) -> None:
        """See LogDevice."""
        if self._refusal is None and self._data:
            self._ahead_end = max(self._ahead_end, self.current_bytes) + MEMORY_AHEAD_BYTES

    def prepare(self) -> None:
        """See LogDevice."""
        if self._refusal is None:
            self._prepared_bytes += MEMORY_AHEAD_BYTES

    def rotate(self, at_least: int = 1) -> int:
        """See LogDevice."""
        self.sync()
        newest = max(self._data, default=at_least - 1)
        salt = (newest + 1) * _SALT_STEP % (1 << 64) | _SALT_TOP
        header = pack_segment_header(newest + 1, self.current_bytes, salt)
        self._data[newest + 1] = bytearray(header)
        self._synced = len(header)
        self._ahead_end = max(self._prepared_bytes, self._synced + MEMORY_AHEAD_BYTES)
        self._prepared_bytes = 0
        return newest + 1

    def rewrite(self, at: int, data: bytes | memoryview) -> None:
        """See LogDevice."""
        self._refuse_if_broken()
        assert bytes(self._newest()[at : at + len(data)]) == bytes(data), "they are not there"
        self._rewritten.append((at, at + len(data)))

    def truncate(self, segment: int, size_bytes: int) -> None:
        """See LogDevice."""
        self._refuse_if_broken()
        data = self._data[segment]
        self._settle(segment, size_bytes, len(data))
        del data[size_bytes:]
        data.extend(bytes(size_bytes - len(data)))
        if segment == max(self._data):
            self._synced = self._ahead_end = size_bytes

    def delete(self, segment: int) -> None:
        """See LogDevice."""
        if segment not in self._data:
            raise KeyError(segment)
        if segment == max(self._data):
            raise ValueError(f"segment {segment} is the newest one; rotate() before deleting it")
        del self._data[segment]
        self._failed.pop(segment, None)

    def drop_after(self, segment: int) -> None:
        """See LogDevice."""
        self._refuse_if_broken()
        for newer in [number for number in self._data if number > segment]:
            del self._data[newer]
            self._failed.pop(newer, None)
        self._synced = self._ahead_end = self.current_bytes

    def mark(self, slot: int, data: bytes) -> None:
        """See LogDevice."""
        self._marks = self._marks or [b""] * MARK_SLOTS
        self._marks[slot] = data

    def sync_mark(self) -> None:
        """See LogDevice: a crash takes no mark here."""

    def marks(self) -> list[bytes]:
        """See LogDevice."""
        return list(self._marks)

    def close(self) -> None:
        """See LogDevice."""
        self._ahead_end = self.current_bytes

    def crash(self, *, keep_unsynced_bytes: int = 0) -> MemoryLogDevice:
        """Return the device as the next process finds it after a power cut; this one takes no more
        appends and syncs.

        Of the bytes appended since the last sync, the first `keep_unsynced_bytes` survive; so do as
        many of those that a failed sync covered. The zeros ahead survive as a part of the segment.
        """
        data = self._copied()
        if data:
            newest = data[max(data)]
            kept = min(self._synced + keep_unsynced_bytes, self.current_bytes)
            newest[kept:] = bytes(max(0, self._ahead_end - kept))
        for segment, (start, end) in self._failed.items():
            stop = min(end, len(data[segment]))
            lost_at = min(start + keep_unsynced_bytes, stop)
            data[segment][lost_at:stop] = bytes(stop - lost_at)
        return self._successor(data, {})

    def kill(self) -> MemoryLogDevice:
        """Return the device as the next process finds it after the end of this one: nothing is
        lost, synced or not. This one takes no more appends and syncs.
        """
        data = self._copied()
        if data:
            newest = data[max(data)]
            newest.extend(bytes(max(0, self._ahead_end - len(newest))))
        return self._successor(data, self._failed, self._synced)

    def fail_append(self, nth: int, *, after_bytes: int = 0, is_cut: bool = True) -> None:
        """Arm a full disk for the nth append from now, after `after_bytes` of its data.

        With `is_cut` false the partial write stays and the device takes no more appends.
        """
        self._append_countdown = nth
        self._append_keeps_bytes = after_bytes
        self._append_is_cut = is_cut

    def fail_sync(self, nth: int) -> None:
        """Arm a failing sync for the nth one from now (`rotate` syncs too)."""
        self._sync_countdown = nth

    def flip(self, segment: int, position: int, mask: int = 1) -> None:
        """Damage one byte of a segment."""
        self._data[segment][position] ^= mask

    def _copied(self) -> dict[int, bytearray]:
        return {segment: bytearray(data) for segment, data in self._data.items()}

    def _successor(
        self,
        data: dict[int, bytearray],
        failed: dict[int, tuple[int, int]],
        synced: int | None = None,
    ) -> MemoryLogDevice:
        """Return a device with this data, and end this one. Without `synced` all is on disk."""
        after = MemoryLogDevice()
        after._data = data
        after._failed = dict(failed)
        after._marks = list(self._marks)
        after._ahead_end = after.current_bytes
        after._synced = after.current_bytes if synced is None else synced
        self._refusal = SyncFailedError("memory log: this device has crashed")
        return after

    def _fail_range(self, start: int, end: int) -> None:
        """A sync of this part of the newest segment has failed."""
        segment = max(self._data, default=0)
        failed_start, failed_end = self._failed.get(segment, (start, end))
        self._failed[segment] = (min(start, failed_start), max(end, failed_end))
        self._rewritten.clear()

    def _settle(self, segment: int, start: int, end: int) -> None:
        """Take out a part that was rewritten and synced, or cut."""
        failed_start, failed_end = self._failed.get(segment, (0, 0))
        if start <= failed_start:
            failed_start = max(failed_start, end)
        elif end >= failed_end:
            failed_end = min(failed_end, start)
        self._failed[segment] = (failed_start, failed_end)
        if failed_start >= failed_end:
            del self._failed[segment]

    def _newest(self) -> bytearray:
        return self._data[max(self._data)]

    def _refuse_if_broken(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _fail_this_append(self, data: bytes) -> None:
        if self._append_is_cut:
            self._ahead_end = self.current_bytes
            self._prepared_bytes = 0
            raise LogFullError("memory log: the armed append fault")
        self._newest().extend(data[: self._append_keeps_bytes])
        self._refusal = LogWriteError("memory log: the armed append fault, which was not cut")
        raise self._refusal
