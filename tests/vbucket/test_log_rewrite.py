"""What recovery writes again: all that a failed sync may have covered, and no more."""

from __future__ import annotations

import pytest

from memory.log_device import MemoryLogDevice
from vbucket.log.device import SyncFailedError
from vbucket.log.end_mark import LogEnd
from vbucket.log.record import RECORD_BYTES
from vbucket.log.recovery import Recovery, recover
from vbucket.log.writer import LogWriter


def written(*segments: list[bytes]) -> LogWriter:
    writer = LogWriter(MemoryLogDevice())
    for payloads in segments:
        writer.rotate()
        for payload in payloads:
            writer.append(writer.end.group + 1, payload)
    return writer


def after_failed_sync(writer: LogWriter) -> MemoryLogDevice:
    """Return what the next process finds after a failed sync."""
    device = writer.device
    assert isinstance(device, MemoryLogDevice)
    device.fail_sync(1)
    with pytest.raises(SyncFailedError):
        writer.sync()
    return device.kill()


def read_and_finished(device: MemoryLogDevice, clean_end: LogEnd | None = None) -> Recovery:
    recovery = recover(device, 0, clean_end=clean_end)
    list(recovery.groups())
    recovery.finish()
    return recovery


def test_what_a_failed_sync_covered_is_on_disk_after_recovery() -> None:
    writer = written([b"a"], [b"b"])
    writer.sync()
    writer.append(3, b"doubtful")
    device = after_failed_sync(writer)
    recovery = read_and_finished(device)
    assert recovery.end.group == 3
    assert recovery.rewritten_bytes == RECORD_BYTES + len(b"doubtful"), "no more than that"
    after = device.crash()
    assert [group.payload for group in recover(after, 0).groups()] == [b"a", b"b", b"doubtful"]


def test_second_failed_sync_in_recovery_is_mended_by_the_next() -> None:
    writer = written([b"a"])
    device = after_failed_sync(writer)
    recovery = recover(device, 0)
    list(recovery.groups())
    device.fail_sync(1)
    with pytest.raises(SyncFailedError):
        recovery.finish()
    device = device.kill()
    read_and_finished(device)
    assert [group.payload for group in recover(device.crash(), 0).groups()] == [b"a"]


def test_groups_known_to_be_synced_are_not_written_again() -> None:
    writer = written([b"a", b"b"])
    writer.sync()
    assert isinstance(writer.device, MemoryLogDevice)
    assert read_and_finished(writer.device.kill()).rewritten_bytes == 0
    writer = written([b"a", b"b"])
    device = writer.device
    assert isinstance(device, MemoryLogDevice)
    device.sync()  # and no mark
    assert read_and_finished(device.kill(), writer.end).rewritten_bytes == 0, "a clean stop"
    assert read_and_finished(device.kill()).rewritten_bytes == 2 * RECORD_BYTES + 2


def test_a_mark_of_an_older_segment_proves_nothing_of_the_newest() -> None:
    writer = written([b"a"], [b"b", b"c"])
    device = after_failed_sync(writer)
    assert read_and_finished(device).rewritten_bytes == 2 * RECORD_BYTES + 2
    found = recover(device.crash(), 0)
    assert [group.payload for group in found.groups()] == [b"a", b"b", b"c"]
