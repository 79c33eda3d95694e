"""Changes that leave many at once are the bytes that leave one by one; damage is noticed too."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import accumulate

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.stream.codec import without_collection, without_xattrs
from dcp.wire.frame import pack_request
from dcp.wire.message import MUTATION_EXTRAS
from dcp.wire.opcode import Opcode
from dcp.wire.xattrs import pack_xattrs
from support.memory_node import START_NS, MemoryNode
from vbucket.engine.engine import SET, Engine
from vbucket.native import frame_loops
from vbucket.store import runs
from vbucket.store.block import (
    ONLY_MUTATIONS,
    ONLY_RAW,
    ONLY_UNPACKED,
    WITHOUT_XATTRS,
    Block,
    block_key,
    find_frame,
)
from vbucket.store.environment import StoreDamagedError
from vbucket.store.records import BY_SEQNO_TABLE
from vbucket.store.runs import ALL_PLAIN, STRIPPED, UNPREFIXED, entries_within

VB = 5
OPAQUE = 0xA1B2C3D4
PLAIN = [ALL_PLAIN, ONLY_MUTATIONS, ONLY_MUTATIONS | ONLY_RAW]
CUT = [
    UNPREFIXED | ONLY_MUTATIONS, UNPREFIXED | ONLY_MUTATIONS | ONLY_RAW,
    STRIPPED | ONLY_MUTATIONS, STRIPPED | UNPREFIXED | ONLY_MUTATIONS,
]  # fmt: skip
"""What streams ask for whose runs are cut."""
SECTION = pack_xattrs([(b"user", b'"%b"' % (b"x" * 150))])
DATATYPES = {"json": 1, "xattr": 4}
KEYS = [b"\0key", b"\0a longer key", b"\0z"]

changes = st.lists(
    st.tuples(
        st.sampled_from(
            ["set", "set", "set", "json", "xattr", "delete", "commit", "freeze", "merge"]
        ),
        st.sampled_from(KEYS),
        st.sampled_from([0, 1, 90, 20_000]),
    ),
    min_size=1,
    max_size=40,
)


def node_of(steps: list[tuple[str, bytes, int]]) -> MemoryNode:
    """A node whose partition VB has such changes, in blocks, in a frozen layer and in memory."""
    node = MemoryNode()
    engine = node.engine
    for what, key, value_bytes in steps:
        if what == "delete":
            engine.delete(VB, key, 0)
        elif what in {"set", "json", "xattr"}:
            section = SECTION if what == "xattr" else b""
            body = key + section + (b"1" if what == "json" else b"W") * value_bytes
            engine.store(SET, VB, key, body, 0, 0, DATATYPES.get(what, 0), 0)
        elif what == "merge":
            if engine.keyspace.memtables.is_merging:
                node.commit()
                node.end_merge()
            else:
                node.merge()
        elif what == "freeze" and not engine.keyspace.memtables.is_merging:
            node.begin_merge()
        else:
            node.commit()
    node.commit()
    return node


def converted(frames: list[bytes], plain: int) -> bytes:
    """What a stream makes of frames that go one by one."""
    if plain & STRIPPED:
        frames = list(map(without_xattrs, frames))
    return b"".join(map(without_collection, frames) if plain & UNPREFIXED else frames)


def one_by_one(
    engine: Engine, start: int, end: int, skip: set[int], plain: int = ALL_PLAIN
) -> bytes:
    frames: list[bytes] = []
    while start <= end:
        batch = engine.versions.frames(VB, start, end, OPAQUE.to_bytes(4, "big"), skip, 1 << 30)
        frames += batch.frames
        start = batch.next_seqno
    return converted(frames, plain)


def all_runs(
    engine: Engine, start: int, end: int, skip: set[int], bytes_max: int, plain: int
) -> bytes:
    """What a stream sends: runs where they can be had, else one by one."""
    sent = b""
    seqno = start
    merged = engine.partitions[VB].merged_seqno
    while seqno <= end:
        run = engine.versions.runs(VB, seqno, end, OPAQUE, skip, bytes_max, plain)
        if run is None:
            batch = engine.versions.frames(VB, seqno, end, OPAQUE.to_bytes(4, "big"), skip, 1)
            sent += converted(batch.frames, plain)
            next_seqno = batch.next_seqno
        else:
            joined = b"".join(run.pieces)
            assert run.wire_bytes == len(joined)
            assert len(joined) < bytes_max + 20_200
            stop = merged if seqno <= merged else end
            assert joined or run.next_seqno > min(stop, end), "a run has at least one frame"
            if run.next_seqno > end:
                found = engine.versions.frames(VB, end, end, bytes(4), (), 1).frames
                assert (run.last_seqno == end) == bool(found)
            sent += joined
            next_seqno = run.next_seqno
        assert seqno < next_seqno <= end + 1
        seqno = next_seqno
    return sent


@pytest.fixture(params=["plain", "native"], scope="module", autouse=True)
def _both_forms(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs each test with both forms of what cuts frames."""
    form = frame_loops() if request.param == "native" else None
    if request.param == "native" and form is None:
        pytest.skip("the C loops are not built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "_loops", form)
        yield


@settings(max_examples=60)
@given(steps=changes, data=st.data())
def test_runs_are_the_bytes_that_going_one_by_one_gives(
    steps: list[tuple[str, bytes, int]], data: st.DataObject
) -> None:
    engine = node_of(steps).engine
    high = engine.partitions[VB].committed_seqno
    if not high:
        return
    start = data.draw(st.integers(1, high))
    end = data.draw(st.integers(start, high))
    skip = data.draw(st.sets(st.integers(start, max(start, end - 1)), max_size=high))
    skip.discard(end)
    bytes_max = data.draw(st.sampled_from([1, 200, 5_000, 1 << 20]))
    plain = data.draw(st.sampled_from([*PLAIN, *CUT]))
    wanted = one_by_one(engine, start, end, skip, plain)
    assert all_runs(engine, start, end, skip, bytes_max, plain) == wanted


@settings(max_examples=30)
@given(
    lengths=st.lists(st.sampled_from([100, 100, 100, 100, 101]), min_size=1, max_size=400),
    data=st.data(),
)
def test_frames_of_one_length_and_of_several(lengths: list[int], data: st.DataObject) -> None:
    node = node_of([("set", b"\0key%05d" % at, length) for at, length in enumerate(lengths)])
    node.merge()
    start = data.draw(st.integers(1, len(lengths)))
    end = data.draw(st.integers(start, len(lengths)))
    bytes_max = data.draw(st.sampled_from([1, 5_000, 1 << 20]))
    for plain in (ALL_PLAIN, UNPREFIXED | ONLY_MUTATIONS):
        wanted = one_by_one(node.engine, start, end, set(), plain)
        assert all_runs(node.engine, start, end, set(), bytes_max, plain) == wanted


@pytest.mark.parametrize("plain", [ALL_PLAIN, UNPREFIXED | ONLY_MUTATIONS])
@pytest.mark.parametrize("is_merged", [True, False])
def test_all_frames_of_one_length(plain: int, is_merged: bool) -> None:
    node = MemoryNode()
    for at in range(700):
        # Lengths of keys and values differ, and their sum does not.
        key = b"\0key%05d" % at + b"-" * (at % 7)
        node.engine.store(SET, VB, key, key + b"W" * (100 - at % 7), 0, 0, 0, 0)
    node.commit()
    if is_merged:
        node.merge()
    for start, end, skip in ((1, 700, {1}), (2, 699, set()), (300, 300, set()), (1, 9, {2, 4})):
        wanted = one_by_one(node.engine, start, end, skip, plain)
        assert all_runs(node.engine, start, end, skip, 5_000, plain) == wanted


@pytest.mark.parametrize("is_merged", [True, False])
@pytest.mark.parametrize(
    ("special", "taken"),
    [
        (("delete", KEYS[0], 0), {ALL_PLAIN}),
        (("json", KEYS[0], 4), {ALL_PLAIN, ONLY_MUTATIONS}),
        (("set", KEYS[0], 4), {ALL_PLAIN, ONLY_MUTATIONS, ONLY_MUTATIONS | ONLY_RAW}),
    ],
)
def test_a_run_holds_only_what_leaves_as_it_is(
    special: tuple[str, bytes, int], taken: set[int], is_merged: bool
) -> None:
    steps = [("set", KEYS[0], 90), special, ("set", KEYS[1], 90)]
    engine = node_of([*steps, ("merge", b"", 0)] if is_merged else steps).engine
    for plain in (ALL_PLAIN, ONLY_MUTATIONS, ONLY_MUTATIONS | ONLY_RAW):
        run = engine.versions.runs(VB, 1, 3, OPAQUE, (), 1 << 20, plain)
        assert (run is not None) == (plain in taken)


def test_a_plain_block_after_another_kind_keeps_what_it_promises():
    """The merge adds to the last block: what that one holds counts."""
    steps = [("json", KEYS[0], 9), ("merge", b"", 0), ("set", KEYS[1], 9), ("merge", b"", 0)]
    node = node_of(steps)
    blocks = [Block(*item) for item in node.env.tables[BY_SEQNO_TABLE].items()]
    assert [block.kinds for block in blocks] == [ONLY_MUTATIONS | ONLY_UNPACKED | WITHOUT_XATTRS]


@given(sizes=st.lists(st.integers(13, 400), min_size=1, max_size=30), bytes_max=st.integers(1, 999))
def test_entries_are_cut_where_the_bytes_are_reached(sizes: list[int], bytes_max: int) -> None:
    entries = [bytes(size) for size in sizes]
    taken, size = entries_within(entries, bytes_max)
    assert taken == entries[: len(taken)]
    assert size == sum(sizes[: len(taken)]) - 12 * len(taken)
    assert len(taken) >= 1
    assert size >= bytes_max or len(taken) == len(entries)
    assert size - (len(taken[-1]) - 12) < bytes_max or len(taken) == 1


# -- damage --------------------------------------------------------------------------------------


def merged_node() -> MemoryNode:
    steps = [("set", key, size) for size in (9, 30) for key in KEYS]
    return node_of([*steps, ("merge", b"", 0)])


def test_every_flipped_bit_of_a_block_is_noticed_by_runs():
    node = merged_node()
    engine = node.engine
    truth = all_runs(engine, 1, 6, {2}, 1 << 20, ALL_PLAIN)
    key, value = next(iter(node.env.tables[BY_SEQNO_TABLE].items()))
    for position in range(len(value)):
        mask = 1 << position % 8
        node.env.flip(BY_SEQNO_TABLE, key, position, mask)
        with pytest.raises(StoreDamagedError):
            all_runs(engine, 1, 6, {2}, 1 << 20, ALL_PLAIN)
        node.env.flip(BY_SEQNO_TABLE, key, position, mask)
    assert all_runs(engine, 1, 6, {2}, 1 << 20, ALL_PLAIN) == truth


def test_document_is_right_or_refused_whatever_bit_flips():
    """A GET opens no block. What it does not look at may be damaged; what it answers may not."""
    node = merged_node()
    engine = node.engine
    wanted = {key: engine.get(VB, key) for key in KEYS}
    key, value = next(iter(node.env.tables[BY_SEQNO_TABLE].items()))
    refused = 0
    for position in range(len(value)):
        for bit in range(8):
            node.env.flip(BY_SEQNO_TABLE, key, position, 1 << bit)
            for name, document in wanted.items():
                try:
                    assert engine.get(VB, name) == document
                except StoreDamagedError:
                    refused += 1
            node.env.flip(BY_SEQNO_TABLE, key, position, 1 << bit)
    newest_bytes = sum(len(block_bytes(value, seqno)) for seqno in (4, 5, 6))
    assert refused >= 8 * newest_bytes, "every bit of the answered frames counts"


def block_bytes(value: bytes, seqno: int) -> bytes:
    entry = Block(block_key(VB, 1), value).entry(seqno)
    assert entry is not None
    return entry[12:]


def test_a_frame_is_taken_for_what_it_says_it_is():
    """Not for where it stands: seqno, key, CAS and partition have to fit."""
    node = merged_node()
    key, value = next(iter(node.env.tables[BY_SEQNO_TABLE].items()))
    document = node.store.meta_fields(VB, KEYS[0])
    assert document is not None
    cas, seqno = document[2:4]
    assert find_frame(key, value, seqno, KEYS[0], cas=cas) == block_bytes(value, seqno)
    assert find_frame(key, value, seqno, KEYS[1], cas=cas) is None
    assert find_frame(key, value, seqno, KEYS[0], cas=cas + 1) is None
    assert find_frame(key, value, seqno + 1, KEYS[0], cas=cas) is None
    assert find_frame(key, value, 99, KEYS[0], cas=cas) is None
    assert find_frame(block_key(VB + 1, 1), value, seqno, KEYS[0], cas=cas) is None
    assert find_frame(key, value[:20], seqno, KEYS[0], cas=cas) is None
    for end in range(len(value)):
        found = find_frame(key, value[:end], seqno, KEYS[0], cas=cas)
        assert found in {None, block_bytes(value, seqno)}


def test_documents_are_found_in_blocks_with_gaps():
    node = MemoryNode()
    engine = node.engine
    for number in range(6):
        key = b"\0key%d" % number
        engine.store(SET, VB, key, key + b"v%d" % number, 0, 0, 0, 0)
        if number % 2:  # as a compaction leaves it
            engine.partitions[VB].high_seqno += 3
    node.now_ns = START_NS
    node.merge()
    assert isinstance(Block(*next(iter(node.env.tables[BY_SEQNO_TABLE].items()))).seqnos[0], int)
    for number in range(6):
        found = engine.get(VB, b"\0key%d" % number)
        assert not isinstance(found, int)
        assert found.value == b"v%d" % number


@pytest.mark.skipif(frame_loops() is None, reason="the C loops are not built")
def test_frames_that_are_not_sound_are_left_to_python() -> None:
    """Each damage is in the first of two frames."""
    loops = frame_loops()
    assert loops is not None
    cutter = loops.cut
    key, section = b"\0key", pack_xattrs([(b"_a", b"1")])
    extras = MUTATION_EXTRAS.pack(1, 1, 0, 0, 0, 0, 0)
    frame = pack_request(
        Opcode.DCP_MUTATION, vb_id=VB, key=key, value=section + b"v", extras=extras, datatype=4
    )
    both, ends = frame * 2, array("I", (len(frame), 2 * len(frame)))
    assert cutter(both, ends, 0, 2, 0, True, True) == converted(
        [frame, frame], UNPREFIXED | STRIPPED
    )
    assert cutter(both, ends, 1, 2, 0, False, False) == frame
    section_at = 55 + len(key)
    for at, byte in ((1, 0x58), (4, 30), (11, 3), (2, 1), (section_at, 1), (section_at + 3, 99)):
        damaged = bytearray(both)
        damaged[at] = byte
        assert cutter(bytes(damaged), ends, 0, 2, 0, True, True) is None, at
        assert cutter(bytes(damaged), ends, 1, 2, 0, False, False) == frame
    for wrong in ((len(frame), 2 * len(frame) + 1), (len(frame), 9), (0, len(frame))):
        assert cutter(both, array("I", wrong), 0, 2, 0, True, True) is None
    for low, high in ((0, 3), (1, 1), (-1, 1)):
        with pytest.raises(ValueError, match="no frames"):
            cutter(both, ends, low, high, 0, True, True)


@pytest.mark.skipif(frame_loops() is None, reason="the C loops are not built")
def test_a_damaged_body_is_not_joined() -> None:
    loops = frame_loops()
    assert loops is not None
    frames = [pack_request(Opcode.DCP_MUTATION, key=b"key", value=b"v" * n) for n in range(3)]
    body, ends = b"".join(frames), array("I", accumulate(map(len, frames)))
    crc = google_crc32c.value(body)
    for low, high in ((0, 3), (1, 3), (1, 2)):
        joined = loops.join(memoryview(body), crc, ends, low, high, 0x01020304)
        expected = b"".join(f[:12] + b"\1\2\3\4" + f[16:] for f in frames[low:high])
        assert joined == expected
    assert loops.join(body[:-1] + b"x", crc, ends, 0, 1, 0) is None
    for wrong in ((len(body) + 1,), (3, len(body)), (0,)):
        assert loops.join(body, crc, array("I", wrong), 0, len(wrong), 0) is None
    for low, high in ((0, 4), (1, 1), (-1, 1)):
        with pytest.raises(ValueError, match="no frames"):
            loops.join(body, crc, ends, low, high, 0)
