"""Runs of changes: the loops in C against the same in Python, and a consumer that decodes late
against one that decodes each frame by itself, for any bytes and any cut of them.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_consumer_core import core_with

from clients.backup.feed import Feed
from clients.backup.intake import Intake
from clients.consumer import core as core_module
from clients.consumer.streams import Wanted, advance
from clients.errors import DcpdError, StreamViolationError
from clients.event import Mutation
from clients.position import Position
from clients.streaming import change_runs, mutations
from clients.streaming.change_runs import PLAIN
from clients.streaming.mutations import Mutations
from dcp.wire.frame import FrameDecoder, ProtocolError, pack_request, pack_response
from dcp.wire.message import (
    DELETION_EXTRAS,
    DELETION_V2_EXTRAS,
    EXPIRATION_EXTRAS,
    MUTATION_EXTRAS,
    PREVIOUS_VALUE_EXTRAS,
    SYSTEM_EVENT_EXTRAS,
    U64,
    SnapshotMarker,
    pack_failover_log,
    pack_marker,
    pack_stream_end,
)
from dcp.wire.opcode import Opcode
from dcp.wire.xattrs import DATATYPE_XATTR, pack_xattrs
from vbucket.native import change_loops

NATIVE = change_loops()
FORMS = [
    pytest.param(PLAIN, id="plain"),
    pytest.param(
        NATIVE, id="native",
        marks=pytest.mark.skipif(NATIVE is None, reason="the C loops are not built"),
    ),
]  # fmt: skip
LOG = [(77, 0)]
VB_IDS = (17, 18)


def mutation(seqno, *, vb_id=17, opaque=5, key=b"\0key", value=b"v", datatype=0, cas=9):
    extras = MUTATION_EXTRAS.pack(seqno, 3, 4, 5, 0, 0, 0)
    return pack_request(
        Opcode.DCP_MUTATION, vb_id=vb_id, opaque=opaque, cas=cas, key=key, value=value,
        extras=extras, datatype=datatype,
    )  # fmt: skip


def removal(seqno, *, opcode=Opcode.DCP_DELETION, extras=None, vb_id=17, opaque=5):
    extras = extras or DELETION_EXTRAS.pack(seqno, 3, 0)
    return pack_request(
        opcode, vb_id=vb_id, opaque=opaque, cas=9, key=b"\0key", extras=extras
    )  # fmt: skip


# -- the loops themselves --------------------------------------------------------------------------


@st.composite
def received(draw) -> bytes:
    """Frames of changes, some of them damaged, and the beginning of another one."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    seqno, frames = 0, []
    for _ in range(draw(st.integers(0, 12))):
        seqno += rng.choice((1, 1, 1, 1, 2, 300, 0, -1, 2**40))
        vb_id = rng.choice((17,) * 9 + (18,))
        opaque = rng.choice((5,) * 9 + (6,))
        number = max(seqno, 0)
        kind = rng.randrange(14)
        if kind == 0:
            frame = removal(number, vb_id=vb_id, opaque=opaque)
        elif kind == 1:
            extras = EXPIRATION_EXTRAS.pack(number, 3, 0)
            frame = removal(number, opcode=Opcode.DCP_EXPIRATION, extras=extras, opaque=opaque)
        elif kind == 2:
            extras = DELETION_V2_EXTRAS.pack(number, 3, 0, 0)
            frame = removal(number, extras=extras, opaque=opaque)
        elif kind == 3:
            extras = SYSTEM_EVENT_EXTRAS.pack(number, 0, 0)
            frame = removal(number, opcode=Opcode.DCP_SYSTEM_EVENT, extras=extras, opaque=opaque)
        elif kind == 4:
            frame = pack_request(Opcode.DCP_NOOP)
        else:
            key = b"\0" + bytes(rng.randrange(256) for _ in range(rng.choice((0, 1, 5, 5, 250))))
            value = rng.randbytes(rng.choice((0, 1, 9, 9, 9, 300)))
            datatype = DATATYPE_XATTR if kind == 5 else rng.choice((0, 1))
            frame = mutation(
                number, vb_id=vb_id, opaque=opaque, key=key[kind == 6 :], value=value,
                datatype=datatype, cas=rng.randrange(2**64),
            )  # fmt: skip
        frames.append(frame)
    data = bytearray(b"".join(frames))
    for _ in range(draw(st.integers(0, 2))):
        if data:
            data[rng.randrange(len(data))] = rng.choice((0, 1, 0x57, 0x80, 0xFF))
    return bytes(data[: len(data) - draw(st.integers(0, 60))])


@pytest.mark.skipif(NATIVE is None, reason="the C loops are not built")
@settings(max_examples=400)
@given(data=received(), floor=st.integers(0, 3), limit=st.sampled_from((5, 400, 2**64 - 1)))
def test_the_loops_find_and_read_the_same_as_python(data, floor, limit):
    assert NATIVE is not None
    at, end = 0, len(data)
    while at < end:
        assert NATIVE.stored_run(data, at, end, floor, limit) == PLAIN.stored_run(
            data, at, end, floor, limit
        )
        assert NATIVE.change_places(data, at, end) == PLAIN.change_places(data, at, end)
        found = PLAIN.mutations_run(data, at, end, floor, limit)
        assert NATIVE.mutations_run(data, at, end, floor, limit) == found
        stop, count, _ = found
        for skipped in (0, 1, 7):
            assert NATIVE.mutation_rows(data, at, count, skipped) == PLAIN.mutation_rows(
                data, at, count, skipped
            )
            assert NATIVE.mutation_keys(data, at, count, skipped) == PLAIN.mutation_keys(
                data, at, count, skipped
            )
        assert NATIVE.mutation_values(data, at, count) == PLAIN.mutation_values(data, at, count)
        for place in (change_runs.SEQNO_AT, change_runs.CAS_AT, change_runs.DATATYPE_AT):
            assert NATIVE.mutation_numbers(data, at, count, *place) == PLAIN.mutation_numbers(
                data, at, count, *place
            )
        at = stop if count else at + 1


@pytest.mark.parametrize("loops", FORMS)
def test_where_runs_stop(loops):
    frames = [mutation(1), mutation(2), mutation(4), removal(5), mutation(6)]
    data = b"".join(frames)
    three = sum(map(len, frames[:3]))
    assert loops.mutations_run(data, 0, len(data), 0, 9) == (three, 3, 4)
    assert loops.mutations_run(data, 0, len(data), 0, 3) == (len(frames[0]) * 2, 2, 2)
    assert loops.mutations_run(data, 0, len(data), 1, 9) == (0, 0, 1), "seqno 1 is not new"
    assert loops.mutations_run(data, 0, three - 1, 0, 9) == (len(frames[0]) * 2, 2, 2)
    assert loops.stored_run(data, 0, len(data), 0, 9) == (len(data), 5, 6)
    places, stop = loops.change_places(data, 0, len(data))
    assert stop == len(data)
    assert array("q", places).tolist() == [sum(map(len, frames[:n])) for n in range(5)]
    for other in (
        mutation(2, vb_id=18), mutation(2, opaque=6), mutation(2, datatype=DATATYPE_XATTR)
    ):  # fmt: skip
        both = frames[0] + other
        assert loops.mutations_run(both, 0, len(both), 0, 9)[1] == 1


@pytest.mark.skipif(NATIVE is None, reason="the C loops are not built")
def test_the_loops_read_nothing_outside_the_bytes():
    assert NATIVE is not None
    data = mutation(1)
    for call in (
        lambda: NATIVE.mutations_run(data, -1, len(data), 0, 9),
        lambda: NATIVE.mutations_run(data, 0, len(data) + 1, 0, 9),
        lambda: NATIVE.stored_run(data, 5, 4, 0, 9),
        lambda: NATIVE.change_places(data, 0, len(data) + 1),
        lambda: NATIVE.mutation_keys(data, 0, 2, 0),
        lambda: NATIVE.mutation_keys(data, 0, -1, 0),
        lambda: NATIVE.mutation_keys(data, 0, 1, -1),
        lambda: NATIVE.mutation_values(data, 1, 1),
        lambda: NATIVE.mutation_values(data[:-1], 0, 1),
        lambda: NATIVE.mutation_rows(data, 60, 1, 0),
        lambda: NATIVE.mutation_numbers(data, 0, 1, 48, 8),
        lambda: NATIVE.mutation_numbers(data, 0, 1, 0, 9),
    ):
        with pytest.raises(ValueError):
            call()


@pytest.mark.skipif(NATIVE is None, reason="the C loops are not built")
@pytest.mark.parametrize("rest_bytes", [0, 1, 3, 4, 23, 54])
def test_a_frame_that_is_cut_is_refused(rest_bytes):
    """The first one is long enough for two, so the bytes seem to be enough for both."""
    assert NATIVE is not None
    data = mutation(1, value=b"v" * 100) + mutation(2)[:rest_bytes]
    for call in (
        lambda: NATIVE.mutation_rows(data, 0, 2, 0),
        lambda: NATIVE.mutation_keys(data, 0, 2, 0),
        lambda: NATIVE.mutation_values(data, 0, 2),
        lambda: NATIVE.mutation_numbers(data, 0, 2, *change_runs.SEQNO_AT),
    ):
        with pytest.raises(ValueError, match="not a mutation"):
            call()


NEXT_PAGE = """
import ctypes, mmap, sys
from vbucket.native import loops

data = bytes.fromhex(sys.argv[1])
size = sys.getsizeof(data)
pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
begin = ctypes.addressof(ctypes.c_char.from_buffer(pages))
end = begin + mmap.PAGESIZE
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
copy = ctypes.cast(ctypes.c_void_p(end - size), ctypes.py_object)
ctypes.memmove(end - size, id(data), size)
ctypes.c_ssize_t.from_address(end - size).value = 1 << 20  # nothing frees it
assert copy.value == data
try:
    loops.mutation_keys(copy.value, 0, 2, 0)
except ValueError as error:
    print(error, flush=True)
"""


@pytest.mark.skipif(NATIVE is None, reason="the C loops are not built")
def test_nothing_is_read_behind_a_run_that_is_too_short():
    """Nobody may read the page behind the bytes. In a process of its own, which would die of it."""
    root = str(Path(__file__).parents[2])
    value_bytes = 103 - (len(mutation(1)) - 1 + sys.getsizeof(b"") + 103) % 8  # it needs no padding
    data = mutation(1, value=b"v" * value_bytes)
    assert sys.getsizeof(data) % 8 == 0
    done = subprocess.run(
        [sys.executable, "-c", NEXT_PAGE, data.hex()], env=os.environ | {"PYTHONPATH": root},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "a frame here is not a mutation\n"), done.stderr


# -- consumers -------------------------------------------------------------------------------------


class Side:
    """A consumer's core with two open streams."""

    def __init__(self, **options: Any) -> None:
        self.core = core_with(**options)
        for vb_id in VB_IDS:
            self.core.add(vb_id, Wanted(Position()))
        decoder = FrameDecoder()
        requests = decoder.feed(self.core.begin(0))
        while requests:
            for frame in requests:
                value = pack_failover_log(LOG) if frame.opcode == Opcode.DCP_STREAM_REQ else b""
                self.core.receive(pack_response(frame.opcode, opaque=frame.opaque, value=value), 0)
            requests = decoder.feed(self.core.take_output())
        self.opaques = {stream.vb_id: opaque for opaque, stream in self.open.items()}
        self.told: list[Any] = []
        self.positions = self.core.positions()
        self.is_filtered = bool(options.keys() & {"key_prefixes", "hidden", "older_than"})
        self.acknowledged = 0

    @property
    def open(self):
        return self.core.streams.connection.open

    def feed(self, data: bytes) -> None:
        """Take bytes. Compare the positions in the middle of the batch with those at its end."""
        if self.core.failure is not None:
            return
        batch = self.core.receive(data, 0)
        before = dict(self.positions)
        self.positions.update(batch.positions)
        if not self.is_filtered:
            advance(before, batch.items, batch.markers, batch.collections, batch.filter)
            assert before == self.positions, "positions in the middle of a batch"
        self.told += batch.events
        self.acknowledged += batch.wire_bytes


@st.composite
def conversations(draw):
    """What a server sends, as functions of the opaques; and where it is cut into reads."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    seqnos = dict.fromkeys(VB_IDS, 0)
    ends = dict.fromkeys(VB_IDS, 0)
    parts = []
    for _ in range(draw(st.integers(1, 25))):
        vb_id = rng.choice(VB_IDS)
        if not ends[vb_id]:
            ends[vb_id] = seqnos[vb_id] + rng.randint(1, 12)
            begin = seqnos[vb_id] + rng.choice((1, 1, 1, 3))
            parts.append((vb_id, "marker", begin, ends[vb_id]))
        for _ in range(rng.randint(1, 9)):
            if not ends[vb_id]:
                break
            seqnos[vb_id] = min(ends[vb_id], seqnos[vb_id] + rng.choice((1, 1, 1, 2, 3)))
            kind = rng.choices(
                ("set", "delete", "xattr", "previous", "advanced", "wrong"), (60, 6, 4, 4, 4, 1)
            )[0]
            parts.append((vb_id, kind, seqnos[vb_id], rng.randrange(300)))
            if seqnos[vb_id] == ends[vb_id]:
                ends[vb_id] = 0
        if rng.random() < 0.02:
            parts.append((vb_id, "end", 0, 0))
    damage = draw(st.none() | st.tuples(st.integers(0, 10**6), st.integers(0, 255)))
    return parts, damage, draw(st.integers(0, 2**32)), draw(st.sampled_from((40, 400, 5000)))


def bytes_of(parts, damage, opaques) -> bytes:
    data = bytearray()
    for vb_id, kind, seqno, size in parts:
        opaque = opaques[vb_id]
        here = {"vb_id": vb_id, "opaque": opaque}
        value = bytes([size & 255]) * size
        if kind == "marker":
            data += pack_marker(vb_id, opaque, SnapshotMarker(seqno, size, 1))
        elif kind == "delete":
            data += removal(seqno, **here)
        elif kind == "advanced":
            data += pack_request(Opcode.DCP_SEQNO_ADVANCED, extras=U64.pack(seqno), **here)
        elif kind == "xattr":
            section = pack_xattrs([(b"_a", b"{}")])
            data += mutation(seqno, value=section + value, datatype=DATATYPE_XATTR, **here)
        elif kind == "previous":
            extras = PREVIOUS_VALUE_EXTRAS.pack(seqno, 0)
            data += pack_request(Opcode.DCP_PREVIOUS_VALUE, extras=extras, value=b"before", **here)
            data += mutation(seqno, value=value, **here)
        elif kind == "wrong":
            data += mutation(max(0, seqno - 2), value=value, **here)
        elif kind == "end":
            data += pack_stream_end(vb_id, opaque, 0)
        else:
            data += mutation(seqno, key=b"\0k%d" % size, value=value, cas=size, **here)
    if damage is not None and data:
        data[damage[0] % len(data)] = damage[1]
    return bytes(data)


def nothing_found(data, at, end, seqno, limit):
    """As if no mutations belonged together: each is decoded by itself."""
    return at, 0, seqno


OPTIONS: list[dict[str, Any]] = [
    {}, {"collections": ()}, {"key_prefixes": (b"k1",)}, {"hidden": (b"k2",)},
    {"older_than": {17: 50}}, {"previous_values": True},
]  # fmt: skip


@pytest.mark.parametrize("loops", FORMS)
@settings(max_examples=150)
@given(talk=conversations(), options=st.sampled_from(OPTIONS))
def test_late_decoding_tells_same_as_one_frame_after_other(loops, talk, options):
    parts, damage, seed, read_max = talk
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutations, "LOOPS", loops)
        patch.setattr(core_module, "LOOPS", loops)
        late = Side(**options)
        patch.setattr(core_module, "LOOPS", loops._replace(mutations_run=nothing_found))
        single = Side(**options)
        data = bytes_of(parts, damage, late.opaques)
        assert late.opaques == single.opaques
        rng = random.Random(seed)
        at = 0
        while at < len(data):
            size = rng.randint(1, read_max)
            for side in (late, single):
                side.feed(data[at : at + size])
            at += size
            assert late.positions == single.positions
            assert late.told == single.told
            assert late.acknowledged == single.acknowledged
            assert repr(late.core.failure) == repr(single.core.failure)
            assert late.core.take_output() == single.core.take_output()
            assert late.core.positions() == single.core.positions()


@pytest.mark.parametrize("loops", FORMS)
def test_the_columns_are_those_of_the_events(loops, monkeypatch):
    monkeypatch.setattr(mutations, "LOOPS", loops)
    frames = [mutation(n, key=b"\0k%d" % n, value=b"v" * n, cas=n) for n in (1, 2, 5)]
    found = Mutations(17, 1, 5, 3, (b"".join(frames), 0, 1))
    assert list(found.items()) == [(b"k1", b"v"), (b"k2", b"vv"), (b"k5", b"vvvvv")]
    assert found[1] == Mutation(17, b"k2", b"vv", 2, 3, 2, 4, 5)
    events = list(found)
    assert found[-2:] == events[-2:]
    assert len(found) == len(events) == 3
    for name, column in {
        "key": found.keys(), "value": found.values(), "seqno": found.seqnos(),
        "rev_seqno": found.rev_seqnos(), "cas": found.cas(), "flags": found.flags(),
        "expiry_s": found.expiries_s(), "datatype": found.datatypes(),
    }.items():  # fmt: skip
        assert column == [getattr(event, name) for event in events], name
    assert repr(found) == "Mutations(vb_id=17, 3 changes, seqno 1 to 5)"


# -- backups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("loops", FORMS)
@settings(max_examples=100)
@given(talk=conversations())
def test_a_backup_keeps_the_frames_as_they_came_for_any_cut(loops, talk):
    """The model looks at one frame after the other, and stops at the first one out of order."""
    parts, _, seed, read_max = talk
    parts = [part for part in parts if part[1] in {"marker", "set", "delete", "wrong"}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clients.backup.intake.LOOPS", loops)
        intake = Intake(b"b", history=True)
        for vb_id in VB_IDS:
            intake.add(Feed(vb_id, 1, [], []))
        _open_streams(intake)
        opaques = {feed.vb_id: feed.opaque for feed in intake.feeds.values()}
        wanted, is_broken, sent = _model_of(parts, opaques)
        rng = random.Random(seed)
        at, pieces, error = 0, [], None
        while at < len(sent) and error is None:
            size = rng.randint(1, read_max)
            try:
                intake.receive(sent[at : at + size], 0)
            except (DcpdError, ProtocolError) as caught:
                error = caught
            pieces += intake.take_pieces()
            at += size
    got = {vb_id: b"".join(p.data for p in pieces if p.vb_id == vb_id) for vb_id in VB_IDS}
    assert got == wanted
    assert isinstance(error, StreamViolationError) == is_broken
    for piece in pieces:
        seqnos = [U64.unpack_from(frame.extras)[0] for frame in FrameDecoder().feed(piece.data)]
        assert (seqnos[0], seqnos[-1], len(seqnos)) == (
            piece.first_seqno, piece.last_seqno, piece.changes
        )  # fmt: skip


def _open_streams(intake: Intake) -> None:
    decoder = FrameDecoder()
    requests = decoder.feed(intake.begin())
    while requests:
        for frame in requests:
            value = b""
            if frame.opcode == Opcode.DCP_STREAM_REQ:
                value = pack_failover_log(LOG)
            elif frame.opcode == Opcode.GET_ALL_VB_SEQNOS:
                value = b"".join(vb_id.to_bytes(2, "big") + U64.pack(10**6) for vb_id in VB_IDS)
            intake.receive(pack_response(frame.opcode, opaque=frame.opaque, value=value), 0)
        requests = decoder.feed(intake.take_output())


def _model_of(parts, opaques):
    wanted: dict[int, bytes] = dict.fromkeys(VB_IDS, b"")
    seqnos, ends, sent = dict.fromkeys(VB_IDS, 0), dict.fromkeys(VB_IDS, 0), b""
    for part in parts:
        vb_id, kind, seqno, end = part
        frame = bytes_of([part], None, opaques)
        sent += frame
        if kind == "marker":
            if ends[vb_id] or end <= seqnos[vb_id]:
                return wanted, True, sent
            ends[vb_id] = end
            continue
        seqno = max(0, seqno - 2) if kind == "wrong" else seqno
        if not seqnos[vb_id] < seqno <= ends[vb_id]:
            return wanted, True, sent
        wanted[vb_id] += frame
        seqnos[vb_id] = seqno
        if seqno == ends[vb_id]:
            ends[vb_id] = 0
    return wanted, False, sent


@pytest.mark.parametrize("loops", FORMS)
def test_a_backup_refuses_a_change_without_a_seqno(loops, monkeypatch):
    monkeypatch.setattr("clients.backup.intake.LOOPS", loops)
    intake = Intake(b"b", history=True)
    intake.add(Feed(17, 1, [], []))
    _open_streams(intake)
    opaque = intake.feeds[17].opaque
    short = pack_request(Opcode.DCP_MUTATION, vb_id=17, opaque=opaque, extras=b"1234567")
    with pytest.raises(ProtocolError, match="a change with a body of 7 bytes"):
        intake.receive(short + mutation(1, opaque=opaque), 0)
