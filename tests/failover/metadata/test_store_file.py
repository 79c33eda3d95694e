"""The embedded store's file: what was appended is there, or the next start refuses in words."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from failover.metadata.embedded.store_file import (
    STORE_ID_BYTES,
    StoreFileBrokenError,
    StoreFileError,
    StoreFileFullError,
    create_file,
    open_file,
)
from support.forgetful_disk import ForgetfulDisk, Power

STORE_ID = bytes(range(STORE_ID_BYTES))
RECORDS = [b"first", b"second" * 20, b"third"]


class PowerCutError(Exception):
    """The power is gone."""


@pytest.fixture
def disk():
    return ForgetfulDisk(Power())


def written(disk, records=RECORDS):
    file = create_file(disk, STORE_ID, b"snapshot")
    for record in records:
        file.append(record)
    return file


def read(disk):
    file, content = open_file(disk)
    file.close()
    return [content.snapshot, *content.records]


def set_bytes(disk, name, data):
    fd = disk.create(name)
    disk.write(fd, data, 0)
    disk.close(fd)


def test_an_empty_folder_has_no_file(disk):
    assert open_file(disk) is None


def test_what_was_appended_is_there(disk):
    file = written(disk)
    file.close()
    again, content = open_file(disk)
    assert again.store_id == STORE_ID
    assert (content.snapshot, content.records, content.torn_bytes) == (b"snapshot", RECORDS, 0)
    again.append(b"fourth")
    again.close()
    assert read(disk) == [b"snapshot", *RECORDS, b"fourth"]


def test_a_record_takes_one_sync(disk, monkeypatch):
    file = written(disk)
    syncs = []
    sync_data = disk.sync_data
    monkeypatch.setattr(disk, "sync_data", lambda fd: (sync_data(fd), syncs.append(fd)))
    for number in range(1, 4):
        file.append(b"more")
        assert len(syncs) == number


def test_a_rewritten_file_begins_with_the_new_snapshot(disk):
    file = written(disk)
    file.rewrite(b"all of it")
    file.append(b"next")
    file.close()
    assert disk.names() == ["meta-000002"]
    assert read(disk) == [b"all of it", b"next"]


def test_a_torn_last_record_is_cut_wherever_it_was_torn(disk):
    file = written(disk)
    whole = file.end
    marks = disk.read("meta-000001")[:1536]
    file.append(b"never answered")
    data = marks + disk.read("meta-000001")[1536:]
    file.close()
    for size in range(whole, len(data)):
        torn = ForgetfulDisk(Power())
        set_bytes(torn, "meta-000001", data[:size])
        again, content = open_file(torn)
        assert content.records == RECORDS
        assert content.torn_bytes == size - whole
        assert len(torn.read("meta-000001")) == whole
        again.append(b"next")
        again.close()
        assert read(torn) == [b"snapshot", *RECORDS, b"next"]


def test_a_flipped_bit_is_refused_in_words_or_changes_nothing(disk):
    """Nothing reads the bytes between the head and the marks; all others are covered."""
    written(disk).close()
    data = disk.read("meta-000001")
    refused = {}
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        damaged = ForgetfulDisk(Power())
        set_bytes(damaged, "meta-000001", bytes(flipped))
        try:
            found = read(damaged)
        except StoreFileError as error:
            refused[at] = str(error)
            found = [b"snapshot", *RECORDS]
            assert damaged.read("meta-000001") == flipped, "nothing was changed"
        assert found == [b"snapshot", *RECORDS]
    assert all("meta-000001" in text for text in refused.values())
    assert all("Put back a copy" in text for at, text in refused.items() if at >= 1536)
    assert refused.keys() >= {*range(32), *range(1536, len(data))}


def test_a_file_that_lacks_answered_records_is_refused(disk):
    file = written(disk)
    file.close()
    data = disk.read("meta-000001")
    for size in range(1536, len(data)):
        short = ForgetfulDisk(Power())
        set_bytes(short, "meta-000001", data[:size])
        with pytest.raises(StoreFileError, match="damaged or missing"):
            open_file(short)


def test_both_marks_damaged_is_refused(disk):
    written(disk).close()
    data = bytearray(disk.read("meta-000001"))
    data[512] ^= 1
    data[1024] ^= 1
    set_bytes(disk, "meta-000001", bytes(data))
    with pytest.raises(StoreFileError, match="both end marks are damaged"):
        open_file(disk)


def test_damage_behind_mark_that_whole_record_follows_is_refused(disk):
    """After a power cut the mark may lack a record, but a torn one is the last one."""
    file = written(disk, [])
    marks = disk.read("meta-000001")[:1536]
    at = file.end
    file.append(b"one")
    file.append(b"two")
    file.close()
    data = bytearray(marks + disk.read("meta-000001")[1536:])
    data[at + 9] ^= 1
    set_bytes(disk, "meta-000001", bytes(data))
    with pytest.raises(StoreFileError, match="and a whole one follows"):
        open_file(disk)


def test_a_newer_format_is_refused_with_what_to_do(disk, monkeypatch):
    monkeypatch.setattr("failover.metadata.embedded.store_file.FORMAT_VERSION", 2)
    written(disk).close()
    monkeypatch.undo()
    with pytest.raises(StoreFileError, match="Start it with the version that wrote it"):
        open_file(disk)


def test_a_full_disk_refuses_the_record_and_keeps_the_others(disk):
    file = written(disk)
    disk.is_full = True
    for _ in range(2):
        with pytest.raises(StoreFileFullError, match="no room"):
            file.append(b"fourth")
    with pytest.raises(StoreFileFullError, match="no room for a snapshot"):
        file.rewrite(b"all of it")
    disk.is_full = False
    file.append(b"fifth")
    file.close()
    assert read(disk) == [b"snapshot", *RECORDS, b"fifth"]


def test_after_failed_sync_next_start_writes_file_again(disk):
    file = written(disk)
    disk.syncs_to_fail = 1
    with pytest.raises(StoreFileBrokenError, match="nobody knows what is on disk"):
        file.append(b"fourth")
    file.close()
    found = read(disk)
    assert found[-1] == b"fourth", "it reads back from memory"
    after = disk.after(Power(), random.Random(1), 0.0)
    assert read(after) == found, "what a start has served survives a power cut"


@settings(max_examples=150)
@given(data=st.data())
def test_what_was_appended_survives_a_power_cut_at_any_point(data):
    """`records` says what must be there; one more record, under way, may be."""
    power = Power()
    disk = ForgetfulDisk(power)
    draw = random.Random(data.draw(st.integers(0, 1 << 30)))
    cut_at = data.draw(st.integers(8, 60))
    sizes = data.draw(st.lists(st.integers(0, 1500), min_size=3, max_size=12))
    rewrites = data.draw(st.sets(st.integers(0, 11), max_size=3))
    share = data.draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    file = create_file(disk, STORE_ID, b"snapshot")
    records = [b"snapshot"]
    under_way: list[bytes] | None = None

    def on_point(_name):
        if power.points >= cut_at:
            raise PowerCutError

    power.on_point = on_point
    try:
        for number, size in enumerate(sizes):
            content = bytes([number + 1]) * size
            under_way = [*records, content]
            file.append(content)
            records, under_way = under_way, None
            if number in rewrites:
                under_way = [b"snapshot %d" % number]
                file.rewrite(under_way[0])
                records, under_way = under_way, None
    except PowerCutError:
        pass
    power.on_point = lambda _: None
    after = disk.after(Power(), draw, share)
    found = read(after)
    assert found in (records, under_way)
    assert read(after.after(Power(), draw, 0.0)) == found
