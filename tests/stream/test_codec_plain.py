"""Which frames leave in runs: only such as the connection's codec would not have touched."""

from __future__ import annotations

from itertools import product

import pytest

from dcp.stream.codec import frame_codec, plain_frames
from dcp.wire.message import OpenFlag
from vbucket.model.entry import PREFIX_BYTES, pack_deletion, pack_mutation
from vbucket.store.block import ONLY_MUTATIONS, ONLY_RAW, WITHOUT_XATTRS, kinds_of

FLAGS = [
    OpenFlag.PRODUCER,
    OpenFlag.PRODUCER | OpenFlag.INCLUDE_DELETE_TIMES,
    OpenFlag.PRODUCER | OpenFlag.NO_VALUE,
    OpenFlag.PRODUCER | OpenFlag.NO_VALUE_WITH_DATATYPE,
]
FRAMES = [
    pack_mutation(vb_id=1, key=b"\0k", value=b"v", cas=1 << 40, seqno=1, rev_seqno=1, datatype=kind)
    for kind in (0, 1)
] + [pack_deletion(vb_id=1, key=b"\0k", cas=1 << 40, seqno=1, rev_seqno=1)]


@pytest.mark.parametrize("open_flags", FLAGS)
def test_a_plain_frame_is_one_that_the_codec_leaves_alone(open_flags: OpenFlag) -> None:
    for has_collections, has_json, has_expiry in product((False, True), repeat=3):
        codec = frame_codec(
            open_flags, has_collections=has_collections, has_json=has_json,
            has_expiry_opcode=has_expiry,
        )  # fmt: skip
        plain = plain_frames(open_flags, has_collections=has_collections, has_json=has_json)
        for entry in FRAMES:
            frame = entry[PREFIX_BYTES:]
            is_taken = plain is not None and not plain & ~kinds_of(frame, [len(frame)])
            if is_taken:
                assert codec(frame) == frame


def test_what_our_consumer_asks_for_leaves_in_runs() -> None:
    plain = plain_frames(OpenFlag.PRODUCER, has_collections=True, has_json=False)
    assert plain == ONLY_MUTATIONS | ONLY_RAW
    frame = FRAMES[0][PREFIX_BYTES:]
    kinds = kinds_of(frame + frame, [len(frame), 2 * len(frame)])
    assert kinds == plain | WITHOUT_XATTRS
