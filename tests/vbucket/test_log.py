"""The log's records: what is found again, what is cut, what is refused."""

from __future__ import annotations

from itertools import pairwise

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vbucket.log.device import (
    OLD_SALT,
    OLD_SEGMENT_HEADER,
    SEGMENT_HEADER_BYTES,
    UnknownFormatError,
    pack_segment_header,
)
from vbucket.log.end_mark import LogEnd
from vbucket.log.record import (
    KIND_GROUP,
    OLD_RECORD_HEAD,
    RECORD_BYTES,
    LogDamagedError,
    ScannedGroup,
    groups_after,
    pack_group,
    read_segment_header,
    record_crc,
    scan_segment,
    split_entries,
    written_bytes,
)
from vbucket.model.entry import pack_control, pack_deletion, pack_mutation

HEADER = SEGMENT_HEADER_BYTES
PAYLOADS = [b"first", b"", b"the third group", b"4"]
SALT = 0x0123_4567_89AB_CDEF


def segment_of(payloads: list[bytes], *, number: int = 1, first_group: int = 1) -> bytes:
    return pack_segment_header(number, 0, SALT) + b"".join(records_of(payloads, first_group))


def records_of(payloads: list[bytes], first_group: int = 1, crc: int = 0) -> list[bytes]:
    records = []
    for group, payload in enumerate(payloads, first_group):
        records.append(pack_group(group, payload, SALT, crc))
        crc = record_crc(records[-1])
    return records


def old_segment_of(payloads: list[bytes]) -> bytes:
    """Segment 1 as format version 1 has it."""
    head = OLD_SEGMENT_HEADER.pack(b"dcpd-log", 1, 0, 1, 0, 0)[:-4]
    records = [plain_record(i + 1, payload) for i, payload in enumerate(payloads)]
    return head + google_crc32c.value(head).to_bytes(4, "big") + b"".join(records)


def plain_record(group: int, payload: bytes) -> bytes:
    """A record of format version 1: whoever knows the format can make it."""
    head = OLD_RECORD_HEAD.pack(0xDC9D_106E, KIND_GROUP, len(payload), group)
    return head + google_crc32c.value(head + payload).to_bytes(4, "big") + payload


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


def test_every_cut_of_the_newest_segment_is_a_clean_end_or_a_torn_tail() -> None:
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


def test_zeros_after_the_last_group_are_a_clean_end_of_the_newest_segment_alone() -> None:
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
    header = OLD_SEGMENT_HEADER.pack(b"dcpd-log", 5, 0, 1, 0, 0)
    with pytest.raises(UnknownFormatError, match=r"version 5, .* up to 4; use the version"):
        list(scan_segment(header, 1))


def test_group_numbers_that_jump_are_damage() -> None:
    data = segment_of([b"a"]) + pack_group(3, b"c", SALT)
    with pytest.raises(LogDamagedError, match="group 3 follows group 1"):
        list(scan_segment(data, 1))
    with pytest.raises(LogDamagedError, match="group 1 follows group 7"):
        list(scan_segment(segment_of([b"a"]), 1, before=LogEnd(0, 0, 7, 0)))


def test_a_record_that_was_exchanged_breaks_the_chain() -> None:
    """Every checksum is right, and the numbers too; only the record after it knows the other."""
    records = records_of(PAYLOADS)
    for index in range(len(records) - 1):
        crc = record_crc(records[index - 1]) if index else 0
        other = pack_group(index + 1, b"of another log", SALT, crc)
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
    record = bytearray(pack_group(3, b"a key, and then: " + value, SALT))
    record[:RECORD_BYTES] = bytes(RECORD_BYTES)
    return bytes(record)


@pytest.mark.parametrize("group", [3, 4, 1000])
def test_a_value_made_to_look_like_a_record_is_cut_with_its_torn_group(group: int) -> None:
    data = segment_of([b"a", b"b"])
    crafted = plain_record(group, b"what a client wrote")
    found = list(scan_segment(data + torn_around(crafted), 1, is_newest=True))
    assert [scanned.payload for scanned in found] == [b"a", b"b"]


def test_a_record_of_another_segment_is_not_one_of_this() -> None:
    """Who stores the files of a log as values cannot know the salt of the segment under way."""
    data = segment_of([b"a", b"b"])
    for salt in (SALT ^ 1, SALT ^ 1 << 32, OLD_SALT):
        torn = torn_around(pack_group(3, b"from a log", salt))
        assert len(list(scan_segment(data + torn, 1, is_newest=True))) == 2


def test_a_record_with_the_salt_behind_a_bad_place_is_damage() -> None:
    data = segment_of([b"a", b"b"]) + torn_around(pack_group(4, b"of our own", SALT))
    with pytest.raises(LogDamagedError, match="but one follows"):
        list(scan_segment(data, 1, is_newest=True))


# -- segments of version 1 ------------------------------------------------------------------------


def test_a_segment_of_version_1_is_read_to_its_end() -> None:
    data = old_segment_of(PAYLOADS)
    assert read_segment_header(data, 1) == (0, OLD_SALT, OLD_SEGMENT_HEADER.size, False)
    assert [group.payload for group in scan_segment(data, 1)] == PAYLOADS
    torn = data + plain_record(5, b"torn")[:-1] + bytes(90)
    found = list(scan_segment(torn, 1, is_newest=True))
    assert ([group.payload for group in found], found[-1].end) == (PAYLOADS, len(data))


def test_a_hole_in_a_segment_of_version_1_is_damage() -> None:
    data = bytearray(old_segment_of(PAYLOADS))
    data[OLD_SEGMENT_HEADER.size + 1] ^= 1
    with pytest.raises(LogDamagedError, match="but one follows"):
        list(scan_segment(bytes(data), 1, is_newest=True))


def test_in_a_segment_of_version_1_the_group_number_keeps_old_records_in_values_apart() -> None:
    data = old_segment_of([b"a", b"b"])
    torn = plain_record(3, b"value: " + plain_record(1, b"a log file as a value") + b" more")[:-1]
    assert len(list(scan_segment(data + torn, 1, is_newest=True))) == 2


@pytest.mark.parametrize("size", range(OLD_SEGMENT_HEADER.size))
def test_a_header_of_version_1_that_is_cut_short_is_damage(size: int) -> None:
    with pytest.raises(LogDamagedError, match=f"cut short to {size} bytes"):
        list(scan_segment(old_segment_of([])[:size], 1, is_newest=True))


def test_without_a_sync_per_group_a_hole_is_cut_with_what_follows() -> None:
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
