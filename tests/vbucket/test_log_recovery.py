"""Recovery of the log: what is read, what is cut, and where the log has to end."""

from __future__ import annotations

import pytest

from vbucket.log.device import (
    MARK_SLOTS,
    SEGMENT_HEADER_BYTES,
    SyncFailedError,
)
from vbucket.log.device_memory import MemoryLogDevice
from vbucket.log.end_mark import NO_RECORD, LogEnd, pack_mark, read_marks
from vbucket.log.record import (
    RECORD_BYTES,
    LogDamagedError,
    pack_group,
    scan_segment,
)
from vbucket.log.recovery import Recovery, TornTail, recover
from vbucket.log.writer import LogWriter

HEADER = SEGMENT_HEADER_BYTES
PAYLOADS = [b"first", b"", b"the third group", b"4"]

# -- recovery ------------------------------------------------------------------------------------


def device_with(*segments: list[bytes]) -> MemoryLogDevice:
    return written(*segments).device  # type: ignore[return-value]


def written(*segments: list[bytes]) -> LogWriter:
    writer = LogWriter(MemoryLogDevice())
    for payloads in segments:
        writer.rotate()
        for payload in payloads:
            writer.append(writer.end.group + 1, payload)
    return writer


def test_recovery_reads_all_segments_after_the_merged_one() -> None:
    device = device_with([b"a", b"b"], [b"c"], [], [b"d"])
    recovery = recover(device, 1)
    found = [(group.segment, group.group, group.payload) for group in recovery.groups()]
    assert found == [(2, 3, b"c"), (4, 4, b"d")]
    assert recovery.end.group == 4
    assert recovery.finish() is None


@pytest.mark.parametrize("kept", range(RECORD_BYTES + 4))
def test_recovery_cuts_a_torn_tail_and_the_log_goes_on(kept: int) -> None:
    writer = written([b"a"], [b"b"])
    writer.sync()
    device = writer.device
    assert isinstance(device, MemoryLogDevice)
    record = pack_group(3, b"torn", device.salt, writer.end.crc)
    device.append(record)
    after = device.crash(keep_unsynced_bytes=kept)
    torn_bytes = len(record[:kept].rstrip(b"\0"))
    recovery = recover(after, 0)
    assert [group.payload for group in recovery.groups()] == [b"a", b"b"]
    good = HEADER + RECORD_BYTES + 1
    assert recovery.finish() == (TornTail(2, good, torn_bytes) if kept else None)
    again = LogWriter(after, recovery.end)
    again.rotate()
    again.append(recovery.end.group + 1, b"again")
    found = recover(after, 0)
    assert [group.payload for group in found.groups()] == [b"a", b"b", b"again"]


def test_recovery_cuts_zeros_without_a_word_about_a_torn_tail() -> None:
    device = device_with([b"a"], [b"b\0\0"])
    device.sync()
    after = device.crash()
    assert after.current_bytes > device.current_bytes
    recovery = recover(after, 0)
    assert [group.payload for group in recovery.groups()] == [b"a", b"b\0\0"]
    assert recovery.finish() is None
    assert after.current_bytes == device.current_bytes


def test_recovery_syncs_what_it_has_read() -> None:
    device = device_with([b"a"])
    assert device.unsynced_bytes
    recovery = recover(device, 0)
    list(recovery.groups())
    recovery.finish()
    assert device.unsynced_bytes == 0


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


def test_a_second_failed_sync_during_recovery_is_made_good_by_the_next_one() -> None:
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


def test_groups_that_are_known_to_be_synced_are_not_written_again() -> None:
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


def test_finish_before_all_groups_were_read_is_a_fault() -> None:
    with pytest.raises(AssertionError):
        recover(device_with([b"a"]), 0).finish()


@pytest.mark.parametrize(("after_segment", "missing"), [(0, 1), (5, 6)])
def test_a_missing_segment_is_damage(after_segment: int, missing: int) -> None:
    device = device_with([b"a"], [b"b"], [b"c"])
    device.delete(1)
    with pytest.raises(LogDamagedError, match=f"log segment {missing} is missing"):
        list(recover(device, after_segment).groups())


def test_an_empty_log_beside_a_store_is_damage() -> None:
    with pytest.raises(LogDamagedError, match="log segment 1 is missing"):
        list(recover(MemoryLogDevice(), 0).groups())


def test_a_sealed_segment_that_lost_whole_groups_is_damage() -> None:
    device = device_with([b"a", b"b"], [])
    device.truncate(1, HEADER + RECORD_BYTES + 1)
    with pytest.raises(LogDamagedError, match="when it was sealed"):
        list(recover(device, 0).groups())


def test_a_flipped_bit_in_a_sealed_segment_is_damage() -> None:
    device = device_with([b"a", b"b"], [b"c"])
    device.flip(1, device.read(1).index(b"b", HEADER))
    with pytest.raises(LogDamagedError, match="segment 1 is damaged at byte"):
        list(recover(device, 0).groups())


# -- where the log ends --------------------------------------------------------------------------


def cut_to(writer: LogWriter, groups: int) -> MemoryLogDevice:
    """Return the log of one segment with so many of its groups, as if it had never been longer."""
    device = writer.device
    assert isinstance(device, MemoryLogDevice)
    after = device.crash()
    ends = [group.end for group in scan_segment(after.read(1), 1, is_newest=True)]
    after.truncate(1, ends[groups - 1] if groups else HEADER)
    return after


@pytest.mark.parametrize("left", range(4))
def test_groups_that_were_on_disk_and_are_gone_are_damage(left: int) -> None:
    """Cut at the end of a record, the file looks whole; the end mark beside it knows better."""
    writer = written(PAYLOADS)
    writer.sync()
    with pytest.raises(LogDamagedError, match=f"ends here with group {left}, but it had group 4"):
        list(recover(cut_to(writer, left), 0).groups())
    assert len(list(recover(cut_to(writer, 4), 0).groups())) == 4


def test_zeros_in_place_of_groups_that_were_on_disk_are_damage() -> None:
    writer = written(PAYLOADS)
    writer.sync()
    after = cut_to(writer, 2)
    after.append(bytes(300))
    with pytest.raises(LogDamagedError, match="but it had group 4"):
        list(recover(after, 0).groups())


def test_groups_that_were_never_synced_may_be_missing() -> None:
    writer = written(PAYLOADS)
    writer.sync()
    writer.append(5, b"never answered")
    assert len(list(recover(cut_to(writer, 4), 0).groups())) == 4


def test_a_group_other_than_the_marked_one_is_damage() -> None:
    writer = written(PAYLOADS)
    writer.sync()
    after = cut_to(writer, 3)
    scanned = list(scan_segment(after.read(1), 1, is_newest=True))
    after.append(pack_group(4, b"of another log", after.salt, scanned[-1].crc))
    with pytest.raises(LogDamagedError, match="group 4 is not the one that the end mark names"):
        list(recover(after, 0).groups())


def test_a_log_without_an_end_mark_is_damage() -> None:
    writer = written(PAYLOADS)
    writer.sync()
    after = cut_to(writer, 4)
    after._marks = []
    with pytest.raises(LogDamagedError, match="no end mark beside the log"):
        list(recover(after, 0).groups())
    after._marks = [b"\xff" * 64, b""]
    with pytest.raises(LogDamagedError, match="none of the 3 end marks"):
        list(recover(after, 0).groups())


@pytest.mark.parametrize("left", range(5))
def test_after_a_clean_stop_the_log_ends_exactly_where_it_did(left: int) -> None:
    writer = written(PAYLOADS)
    writer.sync()
    clean_end = writer.end
    after = cut_to(writer, left)
    after._marks = []  # the clean end is known without them
    recovery = recover(after, 0, clean_end=clean_end)
    if left == 4:
        assert len(list(recovery.groups())) == 4
        assert recovery.end == clean_end
        return
    with pytest.raises(LogDamagedError, match=f"group {left}; a clean stop left it at group 4"):
        list(recovery.groups())


def test_after_a_clean_stop_a_torn_tail_is_damage_and_so_is_a_group_too_many() -> None:
    writer = written(PAYLOADS)
    writer.sync()
    before_last = written(PAYLOADS[:3]).end
    with pytest.raises(LogDamagedError, match="with group 4; a clean stop left it at group 3"):
        list(recover(cut_to(writer, 4), 0, clean_end=before_last).groups())
    after = cut_to(writer, 4)
    after.truncate(1, after.current_bytes - 1)
    with pytest.raises(LogDamagedError, match="with group 3; a clean stop left it at group 4"):
        list(recover(after, 0, clean_end=writer.end).groups())


def test_the_log_continues_what_the_store_has_merged() -> None:
    writer = written([b"a", b"b"], [b"c"])
    writer.sync()
    device = writer.device
    first = list(scan_segment(device.read(1), 1))[-1]
    merged_end = LogEnd(1, first.end, 2, first.crc)
    found = list(recover(device, 1, merged_end=merged_end).groups())
    assert [group.group for group in found] == [3]
    with pytest.raises(LogDamagedError, match="group 3 was not written after"):
        list(recover(device, 1, merged_end=merged_end._replace(crc=7)).groups())
    with pytest.raises(LogDamagedError, match="group 3 follows group 1"):
        list(recover(device, 1, merged_end=merged_end._replace(group=1)).groups())


def test_marks_are_written_in_turn_and_the_newest_good_one_counts() -> None:
    ends = [LogEnd(1, 100 * group, group, group) for group in range(1, 4)]
    slots = [pack_mark(ends[1], 8), pack_mark(ends[2], 9)]
    assert read_marks(slots) == (ends[2], 9, "", 1)
    for position in range(len(slots[1])):
        torn = bytearray(slots[1])
        torn[position] ^= 1
        assert read_marks([slots[0], bytes(torn)])[:2] == (ends[1], 8)
    assert read_marks([b"", b""]).end is None
    assert read_marks([]).problem


def test_the_writer_marks_what_is_synced_and_goes_on_with_the_chain() -> None:
    writer = written([b"a", b"b"])
    device = writer.device
    assert read_marks(device.marks()).end == NO_RECORD
    writer.sync()
    assert read_marks(device.marks()).end == writer.end == writer.synced_end
    writer.append(3, b"c")
    assert read_marks(device.marks()).end != writer.end
    writer.rotate()
    assert read_marks(device.marks()).end == writer.end
    again = LogWriter(device, writer.end)
    again.rotate()
    again.append(4, b"d")
    again.sync()
    assert [group.group for group in recover(device, 0).groups()] == [1, 2, 3, 4]


def test_no_mark_goes_over_the_newest_one_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are synced while a mark is: a power cut then leaves one of the two."""
    writer = written([b"a"])
    device, slots = writer.device, []

    def sync_mark_beside_groups() -> None:
        before = read_marks(device.marks()).slot
        writer.append(writer.end.group + 1, b"meanwhile")
        writer.sync()
        slots.append((before, read_marks(device.marks()).slot))

    writer.sync()
    monkeypatch.setattr(device, "sync_mark", sync_mark_beside_groups)
    on_disk = -1
    for _ in range(2 * MARK_SLOTS):
        writer.sync_mark()
        being_synced, written_meanwhile = slots[-1]
        assert written_meanwhile not in {being_synced, on_disk}
        on_disk = being_synced


def test_marks_that_were_given_up_count_no_more() -> None:
    writer = written(PAYLOADS)
    writer.sync()
    after = cut_to(writer, 1)
    first = list(scan_segment(after.read(1), 1, is_newest=True))[-1]
    LogWriter(after, LogEnd(1, first.end, 1, first.crc)).mark_anew()
    assert [group.group for group in recover(after, 0).groups()] == [1]
