"""The log's records: what is found again, what is cut, what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.log_device import MemoryLogDevice
from support.stored_bytes import pack_deletion, pack_mutation
from vbucket.log.device import (
    MARK_SLOTS,
    SEGMENT_HEADER,
    SEGMENT_HEADER_BYTES,
    UnknownFormatError,
    pack_segment_header,
)
from vbucket.log.end_mark import NO_RECORD, LogEnd, pack_mark, read_marks
from vbucket.log.record import (
    RECORD,
    RECORD_BYTES,
    LogDamagedError,
    ScannedGroup,
    groups_after,
    pack_group,
    scan_segment,
    split_entries,
    written_bytes,
)
from vbucket.log.recovery import TornTail, recover
from vbucket.log.writer import LogWriter
from vbucket.model.control import pack_control

HEADER = SEGMENT_HEADER_BYTES
PAYLOADS = [b"first", b"", b"the third group", b"4"]
SALT = 0x0123_4567_89AB_CDEF


def segment_of(payloads: list[bytes], *, number: int = 1, first_group: int = 1) -> bytes:
    return pack_segment_header(number, 0, SALT) + b"".join(records_of(payloads, first_group))


def records_of(payloads: list[bytes], first_group: int = 1, crc: int = 0) -> list[bytes]:
    records = []
    for group, payload in enumerate(payloads, first_group):
        record, crc = pack_group(group, payload, SALT, crc)
        records.append(record)
    return records


def record_crc(record: bytes) -> int:
    return int(RECORD.unpack_from(record)[-1])


def ends_of(payloads: list[bytes]) -> list[int]:
    """Positions at which a cut leaves whole groups only."""
    ends = [HEADER]
    for payload in payloads:
        ends.append(ends[-1] + RECORD_BYTES + len(payload))
    return ends


@given(st.lists(st.binary(max_size=200), max_size=8), st.integers(1, 2**63))
def test_groups_come_back_as_they_were_packed(payloads: list[bytes], first_group: int) -> None:
    data = segment_of(payloads, first_group=first_group)
    ends = ends_of(payloads)
    crcs = map(record_crc, records_of(payloads, first_group))
    wanted = [
        ScannedGroup(first_group + i, payload, ends[i + 1], crc)
        for i, (payload, crc) in enumerate(zip(payloads, crcs, strict=True))
    ]
    assert list(scan_segment(data, 1)) == wanted
    before = LogEnd(0, 0, first_group - 1, 0)
    assert list(scan_segment(data, 1, is_newest=True, before=before)) == wanted


def test_every_cut_of_newest_segment_is_clean_end_or_torn_tail() -> None:
    data = segment_of(PAYLOADS)
    ends = ends_of(PAYLOADS)
    for size in range(HEADER, len(data) + 1):
        groups = list(scan_segment(data[:size], 1, is_newest=True))
        whole = sum(end <= size for end in ends) - 1
        assert [group.payload for group in groups] == PAYLOADS[:whole]
        if size not in ends:
            with pytest.raises(
                LogDamagedError, match=f"segment 1 is damaged at byte {ends[whole]}"
            ):
                list(scan_segment(data[:size], 1))


@pytest.mark.parametrize("zeros", [0, 1, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 200_000])
@pytest.mark.parametrize("written", [b"", b"x", b"x\0y", b"x" * (64 << 10), bytes(70_000) + b"x"])
def test_zeros_at_the_end_are_not_counted_however_many_there_are(
    written: bytes, zeros: int
) -> None:
    assert written_bytes(written + bytes(zeros)) == len(written)


def test_zeros_after_the_last_group_end_the_newest_segment_only() -> None:
    data = segment_of(PAYLOADS)
    assert written_bytes(data + bytes(300)) == len(data)
    groups = list(scan_segment(data + bytes(300), 1, is_newest=True))
    assert [group.payload for group in groups] == PAYLOADS
    assert groups[-1].end == len(data)
    with pytest.raises(LogDamagedError, match=f"damaged at byte {len(data)}"):
        list(scan_segment(data + bytes(300), 1))


def test_zeros_where_a_group_was_are_damage_if_a_group_follows() -> None:
    ends = ends_of(PAYLOADS)
    for start, end in pairwise(ends[:-1]):
        data = bytearray(segment_of(PAYLOADS) + bytes(300))
        data[start:end] = bytes(end - start)
        with pytest.raises(LogDamagedError, match="but one follows"):
            list(scan_segment(bytes(data), 1, is_newest=True))


@pytest.mark.parametrize("filler", [b"\x00" * 300 + b"\1", b"\xff" * 40, b"\x01\x23\x45\x67" * 9])
def test_garbage_after_the_last_group_is_a_torn_tail(filler: bytes) -> None:
    data = segment_of(PAYLOADS)
    groups = list(scan_segment(data + filler, 1, is_newest=True))
    assert [group.payload for group in groups] == PAYLOADS
    assert groups[-1].end == len(data)


def test_every_flipped_bit_is_cut_or_refused_and_never_read() -> None:
    data = segment_of(PAYLOADS)
    last_group_at = ends_of(PAYLOADS)[-2]
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            with pytest.raises((LogDamagedError, UnknownFormatError)):
                list(scan_segment(bytes(flipped), 1))
            if position < last_group_at:
                with pytest.raises((LogDamagedError, UnknownFormatError)):
                    list(scan_segment(bytes(flipped), 1, is_newest=True))
            else:
                found = list(scan_segment(bytes(flipped), 1, is_newest=True))
                assert [group.payload for group in found] == PAYLOADS[:-1]


@pytest.mark.parametrize("size", range(HEADER))
def test_a_header_that_is_cut_short_is_damage(size: int) -> None:
    with pytest.raises(LogDamagedError, match=f"cut short to {size} bytes"):
        list(scan_segment(segment_of([])[:size], 1, is_newest=True))


def test_a_segment_under_another_number_is_damage() -> None:
    with pytest.raises(LogDamagedError, match="says that it is segment 1"):
        list(scan_segment(segment_of(PAYLOADS), 2))


def test_an_unknown_format_version_is_refused_with_what_to_do() -> None:
    for version in (3, 5):
        header = SEGMENT_HEADER.pack(b"dcpd-log", version, 0, 1, 0, SALT, 0)
        match = f"version {version}, this program knows 4; use the version .* with a backup"
        with pytest.raises(UnknownFormatError, match=match):
            list(scan_segment(header, 1))


def test_group_numbers_that_jump_are_damage() -> None:
    data = segment_of([b"a"]) + pack_group(3, b"c", SALT)[0]
    with pytest.raises(LogDamagedError, match="group 3 follows group 1"):
        list(scan_segment(data, 1))
    with pytest.raises(LogDamagedError, match="group 1 follows group 7"):
        list(scan_segment(segment_of([b"a"]), 1, before=LogEnd(0, 0, 7, 0)))


def test_a_record_that_was_exchanged_breaks_the_chain() -> None:
    """Every checksum is right, and the numbers too; only the record after it knows the other."""
    records = records_of(PAYLOADS)
    for index in range(len(records) - 1):
        crc = record_crc(records[index - 1]) if index else 0
        other = pack_group(index + 1, b"of another log", SALT, crc)[0]
        data = pack_segment_header(1, 0, SALT) + b"".join(
            [*records[:index], other, *records[index + 1 :]]
        )
        not_after = f"group {index + 2} was not written after this group"
        with pytest.raises(LogDamagedError, match=not_after):
            list(scan_segment(data, 1, is_newest=True))


def test_the_first_record_continues_the_one_that_the_store_knows() -> None:
    data = segment_of(PAYLOADS, first_group=8)
    with pytest.raises(LogDamagedError, match="group 8 was not written after this group 7"):
        list(scan_segment(data, 1, before=LogEnd(0, 0, 7, 99)))


def test_what_can_still_be_read_after_damage() -> None:
    ends = ends_of(PAYLOADS)
    data = bytearray(segment_of(PAYLOADS) + b"torn" + bytes(50))
    data[ends[1] + 3] ^= 1
    assert list(groups_after(bytes(data), 1, ends[1])) == [PAYLOADS[2], PAYLOADS[3]]
    assert list(groups_after(bytes(data), 1, 0)) == [PAYLOADS[0], PAYLOADS[2], PAYLOADS[3]]
    data[3] ^= 1
    assert list(groups_after(bytes(data), 1, 0)) == []


# -- values that look like records ---------------------------------------------------------------


def torn_around(value: bytes) -> bytes:
    """A group that did not reach the disk whole: its first bytes did not, its value did."""
    record = bytearray(pack_group(3, b"a key, and then: " + value, SALT)[0])
    record[:RECORD_BYTES] = bytes(RECORD_BYTES)
    return bytes(record)


@pytest.mark.parametrize("group", [3, 4, 1000])
def test_record_like_value_is_cut_with_its_torn_group(group: int) -> None:
    data = segment_of([b"a", b"b"])
    crafted = pack_group(group, b"what a client wrote", 0)[0]
    found = list(scan_segment(data + torn_around(crafted), 1, is_newest=True))
    assert [scanned.payload for scanned in found] == [b"a", b"b"]


def test_a_record_of_another_segment_is_not_one_of_this() -> None:
    """Who stores the files of a log as values cannot know the salt of the segment under way."""
    data = segment_of([b"a", b"b"])
    for salt in (SALT ^ 1, SALT ^ 1 << 32):
        torn = torn_around(pack_group(3, b"from a log", salt)[0])
        assert len(list(scan_segment(data + torn, 1, is_newest=True))) == 2


def test_a_record_with_the_salt_behind_a_bad_place_is_damage() -> None:
    data = segment_of([b"a", b"b"]) + torn_around(pack_group(4, b"of our own", SALT)[0])
    with pytest.raises(LogDamagedError, match="but one follows"):
        list(scan_segment(data, 1, is_newest=True))


def test_without_sync_per_group_hole_is_cut_with_what_follows() -> None:
    data = bytearray(segment_of(PAYLOADS))
    data[HEADER + 1] ^= 1
    assert list(scan_segment(bytes(data), 1, is_newest=True, is_synced_per_group=False)) == []


# -- entries -------------------------------------------------------------------------------------

ENTRIES = [
    pack_mutation(vb_id=3, key=b"\x00k", value=b"value", cas=1, seqno=1, rev_seqno=1),
    pack_deletion(vb_id=3, key=b"\x00k", cas=2, seqno=2, rev_seqno=2, prev_seqno=1),
    pack_control(3, {"kind": "state", "state": 1}),
    pack_mutation(vb_id=3, key=b"\x00", value=b"", cas=3, seqno=3, rev_seqno=1),
]


@given(st.lists(st.sampled_from(ENTRIES)))
def test_a_payload_splits_into_its_entries(entries: list[bytes]) -> None:
    assert split_entries(b"".join(entries)) == entries


def test_a_payload_whose_lengths_do_not_add_up_is_refused() -> None:
    payload = b"".join(ENTRIES)
    good = {0}
    for entry in ENTRIES:
        good.add(max(good) + len(entry))
    for size in range(len(payload) + 1):
        if size in good:
            assert b"".join(split_entries(payload[:size])) == payload[:size]
        else:
            with pytest.raises(LogDamagedError, match="do not add up"):
                split_entries(payload[:size])


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
    record = pack_group(3, b"torn", device.salt, writer.end.crc)[0]
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


def test_what_a_start_has_found_is_never_cut_by_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The power cut took the newest marks. Then the start that reads the log dies before it writes
    anything, and the last group is damaged: it is no half-written one any more.
    """
    writer = written([b"a"], [b"b"])
    device = writer.device
    assert isinstance(device, MemoryLogDevice)
    writer.sync()
    old_marks = device.marks()
    writer.append(writer.end.group + 1, b"answered")
    writer.sync()
    for slot, data in enumerate(old_marks):
        device.mark(slot, data)
    recovery = recover(device, 0)
    assert [group.payload for group in recovery.groups()][-1] == b"answered"
    steps: list[int | str] = []
    write_mark = device.mark
    monkeypatch.setattr(
        device, "mark", lambda slot, data: (steps.append(slot), write_mark(slot, data))
    )
    monkeypatch.setattr(device, "sync_mark", lambda: steps.append("sync"))
    recovery.finish()
    read, _, found, _ = steps
    assert steps == [read, "sync", found, "sync"], "the mark that was read is on disk first"
    assert read != found
    device.flip(2, device.current_bytes - 1)
    with pytest.raises(LogDamagedError):
        list(recover(device, 0).groups())


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
    after.append(pack_group(4, b"of another log", after.salt, scanned[-1].crc)[0])
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


def test_after_a_clean_stop_a_torn_tail_is_damage() -> None:
    writer = written(PAYLOADS)
    writer.sync()
    before_last = LogEnd(1, 0, 3, record_crc(records_of(PAYLOADS)[2]))
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


def test_marks_are_written_in_turn_and_newest_good_one_counts() -> None:
    ends = [LogEnd(1, 100 * group, group, group) for group in range(1, 4)]
    slots = [pack_mark(ends[1], 8), pack_mark(ends[2], 9)]
    assert read_marks(slots) == (ends[2], 9, "", 1)
    for position in range(len(slots[1])):
        torn = bytearray(slots[1])
        torn[position] ^= 1
        assert read_marks([slots[0], bytes(torn)])[:2] == (ends[1], 8)
    assert read_marks([b"", b""]).end is None
    assert read_marks([]).problem


def test_writer_marks_what_is_synced_and_goes_on_with_chain() -> None:
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


def test_entries_in_memory_give_the_bytes_of_their_segment() -> None:
    """Until it is merged; not if an entry of a group is not known."""
    writer = LogWriter(MemoryLogDevice())
    writer.rotate()
    entries = [pack_control(number, {"kind": "state", "state": 1}) for number in range(9)]
    for number, group in enumerate((entries[:1], entries[1:3], entries[3:4], entries[4:]), 1):
        if number == 3:
            writer.rotate()
        writer.append(number, b"".join(group), group)
    writer.sync()
    for segment in (1, 2):
        content = writer.kept.content_of(segment)
        assert content is not None
        assert content.to_bytes() == writer.device.read(segment)
    assert [writer.kept.is_newest(segment) for segment in (1, 2)] == [False, True]
    writer.append(5, entries[0])
    writer.append(6, entries[0], entries[:1])
    assert [writer.kept.knows(segment) for segment in (1, 2, 3)] == [True, False, False]
    writer.kept.forget([1])
    assert writer.kept.content_of(1) is None
