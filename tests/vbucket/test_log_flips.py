"""What is wrong of a log segment before a start is put back where its checksums prove it."""

from __future__ import annotations

import random
from random import Random

import pytest

from memory.log_device import MemoryLogDevice
from support.stored_bytes import pack_mutation
from vbucket.log.device import SEGMENT_HEADER_BYTES
from vbucket.log.end_mark import LogEnd
from vbucket.log.log_flips import patches_of
from vbucket.log.record import RECORD_BYTES, LogDamagedError, read_segment_header, record_at
from vbucket.log.recovery import recover
from vbucket.log.writer import LogWriter


def entry(number: int) -> bytes:
    value = Random(number).randbytes(20 + number)
    return pack_mutation(
        vb_id=3, key=b"\0k%d" % number, value=value, seqno=number, cas=number, rev_seqno=1
    )


def written(groups: int, segments: int = 1) -> list[bytes]:
    """Return the bytes of segments."""
    device = MemoryLogDevice()
    writer = LogWriter(device)
    number = 0
    for _ in range(segments):
        writer.rotate()
        for _ in range(groups):
            number += 1
            payload = entry(number)
            writer.append(number, payload, [payload])
            writer.sync()
    return [device.read(segment) for segment in device.segments()]


def patched(
    data: bytes, segment: int, last: tuple[int, int] | None = None, marked: LogEnd | None = None
) -> bytes:
    patches = patches_of(data, segment, last, marked).patches
    for at, piece in patches:
        data = data[:at] + piece + data[at + len(piece) :]
    return data


@pytest.mark.parametrize("knows_the_last", [False, True])
def test_every_flipped_bit_is_put_back(knows_the_last: bool) -> None:
    before, data = written(3, segments=2)
    last = patches_of(before, 1, None).last if knows_the_last else None
    found = patches_of(data, 2, last)
    assert found.patches == []
    assert found.last is not None
    marked = LogEnd(2, len(data), *found.last)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        found = patched(bytes(flipped), 2, last, marked)
        is_first_head = not knows_the_last and 0 <= bit // 8 - SEGMENT_HEADER_BYTES < RECORD_BYTES
        if not is_first_head or found != bytes(flipped):
            assert found == data, bit


def test_whatever_becomes_of_the_head_of_a_record_is_put_back() -> None:
    data = written(3)[0]
    salt = read_segment_header(data, 1).salt
    first = record_at(data, SEGMENT_HEADER_BYTES, salt)
    assert first is not None
    at = first[2]
    for head in (bytes(RECORD_BYTES), Random(4).randbytes(RECORD_BYTES)):
        assert patched(data[:at] + head + data[at + RECORD_BYTES :], 1) == data


def test_more_than_checksums_prove_is_left_alone() -> None:
    data = written(3)[0]
    draw = random.Random(5)
    for _ in range(200):
        wrong = bytearray(data)
        for at in draw.sample(range(SEGMENT_HEADER_BYTES + RECORD_BYTES, len(data)), 3):
            wrong[at] ^= 1 << draw.randrange(8)
        found = patched(bytes(wrong), 1)
        for at in range(len(data)):
            assert found[at] in {data[at], wrong[at]}, "nothing is invented"
    in_the_end = data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]
    assert patched(in_the_end, 1) == in_the_end, "nobody knows whether it was on disk"
    torn = data[:-5]
    assert patched(torn, 1) == torn, "a crash leaves this: recovery cuts it"
    assert patches_of(data[:10], 1, None).patches == []


def test_a_start_knows_the_segments_that_it_has_read() -> None:
    device = MemoryLogDevice()
    writer = LogWriter(device)
    for number in range(1, 7):
        if number % 2:
            writer.rotate()
        writer.append(number, entry(number), [entry(number)])
        writer.sync()
    whole = {segment: device.read(segment) for segment in device.segments()}
    again = device.crash()
    recovery = recover(again, 0)
    list(recovery.groups())
    recovery.finish()
    for segment, data in whole.items():
        content = recovery.kept.content_of(segment)
        assert content is not None
        assert content.to_bytes() == data.rstrip(b"\0")[: content.end.size_bytes]
    damaged = device.crash()
    damaged.flip(2, SEGMENT_HEADER_BYTES + 3)
    with pytest.raises(LogDamagedError):
        list(recover(damaged, 0).groups())
