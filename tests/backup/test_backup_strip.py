"""A section's frames as columns, against a look at each of them."""

from __future__ import annotations

import struct
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.backup import strip as strip_module
from clients.backup.archives.chunk import Section
from clients.backup.strip import Strip
from dcp.wire.frame import pack_request
from dcp.wire.message import DELETION_EXTRAS, MUTATION_EXTRAS, SYSTEM_EVENT_EXTRAS
from dcp.wire.opcode import Opcode
from vbucket.model.ids import time_ns_from_cas
from vbucket.native import archive_loops

VB = 9
BEGIN_NS = 1_800_000_000 << 30
STEP = 1 << 20
KINDS = (
    Opcode.DCP_MUTATION, Opcode.DCP_MUTATION, Opcode.DCP_MUTATION, Opcode.DCP_DELETION,
    Opcode.DCP_EXPIRATION, Opcode.DCP_SYSTEM_EVENT,
)  # fmt: skip
keys = st.sampled_from([b"\0", b"\0a", b"\0b" * 100, b"\x08a", b"\x88\x01a"])
changes = st.tuples(st.sampled_from(KINDS), keys, st.binary(max_size=9), st.integers(1, 3))
"""Kind, key, value, how far its seqno is above the one before."""


def frame(kind, key, value, seqno):
    if kind == Opcode.DCP_MUTATION:
        extras = MUTATION_EXTRAS.pack(seqno, 1, 0, 0, 0, 0, 0)
    elif kind == Opcode.DCP_DELETION:
        extras, value = DELETION_EXTRAS.pack(seqno, 1, 0), b""
    elif kind == Opcode.DCP_EXPIRATION:
        extras, value = struct.pack(">QQI", seqno, 1, 5), b""
    else:  # of a kind that nobody knows: it drops nothing
        extras, key = SYSTEM_EVENT_EXTRAS.pack(seqno, 77, 1), b""
    cas = BEGIN_NS + seqno * STEP
    return pack_request(kind, vb_id=VB, cas=cas, extras=extras, key=key, value=value)


@given(
    told=st.lists(changes, min_size=1, max_size=12), before=st.binary(max_size=3),
    after=st.binary(max_size=3), only_mutations=st.booleans(), is_dense=st.booleans(),
    low=st.integers(0, 12), high=st.integers(12, 40),
    late=st.none() | st.integers(0, 40), data=st.data(), native=st.booleans(),
)  # fmt: skip
def test_columns_say_what_the_frames_say(
    told, before, after, only_mutations, is_dense, low, high, late, data, native
):
    with patch.object(strip_module, "_LOOPS", archive_loops() if native else None):
        check_columns(told, before, after, only_mutations, is_dense, low, high, late, data)


def check_columns(told, before, after, only_mutations, is_dense, low, high, late, data):
    seqno, frames, rows = 0, [], []
    for kind, key, value, step in told:
        seqno += 1 if is_dense else step
        found = Opcode.DCP_MUTATION if only_mutations else kind
        frames.append(frame(found, key, value, seqno))
        rows.append((seqno, found, key))
    chunk = before + b"".join(frames) + after
    size = sum(map(len, frames))
    section = Section(VB, 0, 0, len(before), size, len(frames), rows[0][0], seqno)
    strip = Strip(chunk, section)
    assert len(strip) == len(frames)
    assert strip.is_within(low, high) == all(low < seqno <= high for seqno, _, _ in rows)
    whole = strip.whole(chunk)
    assert cut(whole) == frames
    assert list(whole.body_sizes) == [len(frame) - 24 for frame in frames]

    # the newest of each key, up to a time
    time_ns = None if late is None else time_ns_from_cas(BEGIN_NS + late * STEP)
    wanted, stopped = {}, 0
    for number, kind, key in rows:
        if low < number <= high:
            if late is not None and number > late:
                stopped = number
                break
            if kind != Opcode.DCP_SYSTEM_EVENT:
                wanted[key] = number
    newest = {}
    assert strip.fold(newest, chunk, low, high, time_ns) == stopped
    if not stopped:
        assert newest == wanted

    # some of them
    winners = data.draw(st.sets(st.sampled_from([number for number, _, _ in rows])))
    chosen = strip.chosen(chunk, winners, low, high)
    indexes = [at for at, row in enumerate(rows) if row[0] in winners and low < row[0] <= high]
    if not indexes:
        assert chosen is None
        return
    assert cut(chosen) == [frames[at] for at in indexes]
    assert list(chosen.opcodes) == [rows[at][1] for at in indexes]
    assert (chosen.body_sizes is None) == (len(indexes) < len(rows))
    for at, opcode, first, size in zip(
        indexes, chosen.opcodes, chosen.first_bytes, chosen.key_sizes, strict=True
    ):
        if opcode != Opcode.DCP_SYSTEM_EVENT:
            assert (first, size) == (rows[at][2][0], len(rows[at][2]))
            assert chosen.extras_sizes[indexes.index(at)] == frames[at][4]


def cut(stretch):
    return [
        stretch.data[start:stop] for start, stop in zip(stretch.starts, stretch.ends, strict=True)
    ]


@pytest.mark.skipif(archive_loops() is None, reason="the C loops are not built (scripts/compile)")
@given(
    told=st.lists(changes, min_size=1, max_size=4), at=st.integers(0, 200),
    put=st.binary(min_size=1, max_size=4), cut_bytes=st.integers(0, 30),
)  # fmt: skip
def test_loops_take_sound_frames_only(told, at, put, cut_bytes):
    """Whatever the bytes are: the columns lie within them, or there are none."""
    frames = [frame(kind, key, value, 1 + n) for n, (kind, key, value, _) in enumerate(told)]
    data = bytearray(b"".join(frames))
    data[at : at + len(put)] = put
    chunk = bytes(data[: max(0, len(data) - cut_bytes)])
    loops = archive_loops()
    found, keys = loops.split(chunk, 0, len(chunk)), loops.keys(chunk, 0, len(chunk))
    assert (found is None) == (keys is None)
    if found is None:
        return
    starts, ends, body_sizes, opcodes, key_sizes, extras_sizes, firsts = found
    assert [0, *ends[:-1]] == starts if starts else not chunk
    assert not ends or ends[-1] == len(chunk)
    assert [end - start - 24 for start, end in zip(starts, ends, strict=True)] == body_sizes
    assert [chunk[start + 1] for start in starts] == list(opcodes)
    assert list(map(len, keys)) == list(key_sizes)
    for start, extras, key, first in zip(starts, extras_sizes, keys, firsts, strict=True):
        assert chunk[start + 24 + extras :].startswith(key)
        assert first == (key[0] if key else 0)


@pytest.mark.skipif(archive_loops() is None, reason="the C loops are not built (scripts/compile)")
@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 1), (0, 4)])
def test_loops_refuse_sections_outside_the_data(start, end):
    with pytest.raises(ValueError, match="not within"):
        archive_loops().split(b"abc", start, end)
    with pytest.raises(ValueError, match="not within"):
        archive_loops().keys(b"abc", start, end)
