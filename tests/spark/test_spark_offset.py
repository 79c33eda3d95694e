"""Offsets as text: what goes in comes out, the same is the same text, and errors say where."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.position import Position
from clients.spark.offset import (
    RANGES_MAX,
    Entry,
    decode,
    encode,
    entries_of,
    entry_at,
    offset_of,
    thinned,
)

seqnos = st.integers(0, 2**40)


@st.composite
def entries(draw):
    seqno = draw(st.integers(1, 2**40))
    begins = sorted(draw(st.lists(st.integers(0, seqno), min_size=1, max_size=5)), reverse=True)
    uuids = draw(
        st.lists(st.integers(1, 2**64 - 1), min_size=len(begins), max_size=len(begins), unique=True)
    )
    versions = tuple(zip(uuids, begins, strict=True))
    points = sorted(draw(st.sets(st.integers(0, seqno - 1), max_size=12)) | {seqno})
    complete = tuple((point, point) for point in points)
    base = draw(st.integers(0, points[0]))
    rollback = draw(st.none() | st.integers(0, seqno))
    return entry_at(seqno, versions, complete=complete, base_seqno=base, rollback_to=rollback)


@given(st.dictionaries(st.integers(0, 1023), entries()))
def test_offsets_come_back_as_they_were(positions):
    offset = json.loads(json.dumps(offset_of(positions)))
    assert entries_of(offset) == positions
    assert list(offset) == [str(vb_id) for vb_id in sorted(positions)]
    assert json.dumps(offset_of(entries_of(offset))) == json.dumps(offset)


def test_a_usual_entry_is_short():
    entry = entry_at(120, ((0x5F3A, 100), (0x77AA, 0), (0x99, 130)))
    assert encode(entry) == "120 5f3a@100,77aa@0"
    assert len(json.dumps(offset_of(dict.fromkeys(range(1024), entry)))) < 40_000


def test_empty_partition_is_left_out_unless_it_rolled_back():
    assert offset_of({5: Entry(), 6: entry_at(0, (), rollback_to=0)}) == {"6": "0 rollback=0"}
    assert decode("0 rollback=0") == Entry(Position(complete=((0, 0),)), 0)


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=300, unique=True))
def test_few_complete_states_are_kept_the_newest_among_them(points):
    ranges = tuple((point, point) for point in sorted(points))
    kept = thinned(ranges)
    assert len(kept) <= RANGES_MAX
    assert set(kept) <= set(ranges)
    assert kept[-1] == ranges[-1]
    assert list(kept) == sorted(kept)


@pytest.mark.parametrize(
    ("offset", "complaint"),
    [
        ({"1024": "1 a@0"}, "1024"),
        ({"x": "1 a@0"}, "not a partition"),
        ({"7": "a"}, "partition 7: 'a' does not begin with a seqno"),
        ({"7": "5"}, "partition 7: '5' has no version"),
        ({"7": "5 zz@0"}, "partition 7.*'zz' is not a hexadecimal"),
        ({"7": "5 a@x"}, "partition 7.*UUID@SEQNO"),
        ({"7": "5 a@0 what=3"}, "partition 7.*'what=3'"),
        ({"7": "5 a@0 complete=3"}, "partition 7.*FIRST-LAST"),
        ({"7": "5 a@0 base=x"}, "partition 7.*base"),
        ({"7": 5}, "partition 7: expected text"),
    ],
)
def test_a_wrong_offset_is_named(offset, complaint):
    with pytest.raises(ValueError, match=complaint):
        entries_of(offset)
