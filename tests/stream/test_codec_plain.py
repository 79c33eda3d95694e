"""Which frames leave in runs: only such as the connection's codec would not have touched."""

from __future__ import annotations

from itertools import product

import pytest

from dcp.stream.codec import Known, frame_codec, plain_frames
from dcp.wire.frame import FrameDecoder
from dcp.wire.message import OpenFlag
from dcp.wire.xattrs import pack_xattrs
from support.stored_bytes import pack_deletion, pack_mutation
from vbucket.model.datatype import compressed
from vbucket.model.entry import PREFIX_BYTES
from vbucket.store.block import (
    ONLY_MUTATIONS,
    ONLY_RAW,
    ONLY_UNPACKED,
    WITHOUT_XATTRS,
    Block,
    build_blocks,
    kinds_of,
)
from vbucket.store.plain_value import plain
from vbucket.store.runs import CUTS, STRIPPED, UNPREFIXED, are_plain, cut_run_of_entries

VALUES_LEFT_OUT = OpenFlag.NO_VALUE | OpenFlag.NO_VALUE_WITH_DATATYPE
FLAGS = [
    OpenFlag.PRODUCER,
    OpenFlag.PRODUCER | OpenFlag.INCLUDE_DELETE_TIMES,
    OpenFlag.PRODUCER | OpenFlag.NO_VALUE,
    OpenFlag.PRODUCER | OpenFlag.NO_VALUE_WITH_DATATYPE,
]
FLAGS += [flags | OpenFlag.INCLUDE_XATTRS for flags in FLAGS]
BODY = b"v" * 64
SECTION = pack_xattrs([(b"user", b'{"text":"%b"}' % (b"x" * 40)), (b"_system", b"1")])
VALUES = {
    0: BODY, 1: BODY, 2: compressed(BODY), 3: compressed(BODY), 4: SECTION + BODY, 5: SECTION + BODY
}  # fmt: skip
"""Datatype -> a stored value of it. There are no compressed ones with XATTRs."""
FRAMES = [
    pack_mutation(
        vb_id=1, key=b"\0k", value=value, cas=1 << 40, seqno=1, rev_seqno=1, datatype=kind
    )
    for kind, value in VALUES.items()
] + [pack_deletion(vb_id=1, key=b"\0k", cas=1 << 40, seqno=1, rev_seqno=1)]
ALL_KNOWN = [Known(*flags) for flags in product((False, True), repeat=5)]


@pytest.mark.parametrize("open_flags", FLAGS)
def test_a_plain_frame_is_one_that_the_codec_leaves_alone(open_flags: OpenFlag) -> None:
    taken = 0
    for known in ALL_KNOWN:
        codec, plain = frame_codec(open_flags, known), plain_frames(open_flags, known)
        for entry in FRAMES:
            frame = entry[PREFIX_BYTES:]
            kinds = kinds_of(frame, [len(frame)])
            is_taken = plain is not None and not plain & ~(kinds | CUTS)
            assert is_taken == (plain is not None and are_plain([entry], plain))
            taken += is_taken
            if is_taken:
                assert plain is not None
                cuts = plain & (UNPREFIXED if kinds & WITHOUT_XATTRS else CUTS)
                for count in (1, 9):
                    run = cut_run_of_entries([entry] * count, 0, cuts) if cuts else [frame] * count
                    assert codec(frame) * count == b"".join(run)
    assert taken or open_flags & VALUES_LEFT_OUT


@pytest.mark.parametrize("open_flags", FLAGS)
def test_a_client_gets_the_value_in_a_datatype_that_it_knows(open_flags: OpenFlag) -> None:
    for known in ALL_KNOWN:
        mask = known.has_json | known.has_snappy << 1
        has_xattrs = bool(open_flags & OpenFlag.INCLUDE_XATTRS)
        for kind, entry in zip(VALUES, FRAMES, strict=False):
            sent = frame_codec(open_flags, known)(entry[PREFIX_BYTES:])
            (frame,) = FrameDecoder().feed(sent)
            section = SECTION if has_xattrs and kind & 4 else b""
            assert bool(frame.datatype & 4) == bool(section)
            others = frame.datatype & ~4
            if open_flags & OpenFlag.NO_VALUE:
                assert (others, frame.value) == (0, section)
            elif open_flags & OpenFlag.NO_VALUE_WITH_DATATYPE:
                assert (others, frame.value) == (kind & mask, section)
            else:
                is_packed = known.wants_compression or bool(kind & mask & 2)
                assert others == kind & mask & 1 | is_packed << 1
                assert plain(frame.datatype, frame.value)[1] == section + BODY


def test_what_our_consumer_asks_for_leaves_in_runs() -> None:
    known = Known(has_collections=True, has_json=False)
    plain = plain_frames(OpenFlag.PRODUCER, known)
    assert plain == ONLY_MUTATIONS | ONLY_RAW
    frame = FRAMES[0][PREFIX_BYTES:]
    kinds = kinds_of(frame + frame, [len(frame), 2 * len(frame)])
    assert kinds == plain | ONLY_UNPACKED | WITHOUT_XATTRS


def test_a_client_without_collections_gets_runs_too() -> None:
    known = Known(has_collections=False, has_json=True, has_snappy=True)
    plain = plain_frames(OpenFlag.PRODUCER, known)
    assert plain == ONLY_MUTATIONS | UNPREFIXED | STRIPPED
    plain = plain_frames(OpenFlag.PRODUCER | OpenFlag.INCLUDE_XATTRS, known)
    assert plain == ONLY_MUTATIONS | UNPREFIXED, "it asked for the XATTRs"


def test_blocks_without_snappy_promise_that_there_is_none() -> None:
    for entry, flag in ((FRAMES[0], 0), (FRAMES[1], 0), (FRAMES[2], ONLY_UNPACKED)):
        ((key, value),) = build_blocks(1, [entry], seqno_before=0)
        assert value[1] & ONLY_UNPACKED == flag, "the flag is set for packed values only"
        assert Block(key, value).kinds & ONLY_UNPACKED == ONLY_UNPACKED - flag
