"""Faults of reads, scrubbing and repairs of damaged stores that can be put in on purpose.

Each replaces one rule of the product by a wrong one, as those of `sim.cluster_bugs` do. Plans with
`cold_damage` reach them, and those with probers the repairs that happen beside the store.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from google_crc32c import value as crc32c

from dcp.core.scrub_turns import CopyRepairs
from dcp.session.state import SessionState
from dcp.wire.frame import pack_response
from dcp.wire.status import RefusedError, Status
from sim import prober, twin_pages
from sim.planting import Bug, Replaced, answering, one
from vbucket.check import scrub_pieces
from vbucket.check.mend import FROM_COPY
from vbucket.check.scrub import TableScrub
from vbucket.store import store as store_module
from vbucket.store.block import PREFIX, Block
from vbucket.store.environment import StoreDamagedError
from vbucket.store.lmdb.page_mend import PageMender
from vbucket.store.records import BY_SEQNO_TABLE


def _entry_unchecked(block: Block, seqno: int) -> bytes | None:
    """Return the version that is found, whatever its checksum says."""
    index = bisect_left(block.seqnos, seqno)
    if index == len(block.seqnos) or block.seqnos[index] != seqno:
        return None
    start = block.ends[index - 1] if index else 0
    frame = bytes(block.body[start : block.ends[index]])
    return PREFIX.pack(block.prev_seqnos[index], block.epoch) + frame


def _as_found(pages: twin_pages.Pages, table: str, key: bytes, row: bytes) -> bytes:
    """Return what the disk has, old or another row's."""
    page = pages.wrong.get((table, key))
    if page is None or page.row is not row or page.now is None or pages.is_hidden:
        return _read(pages, table, key, row)
    return page.now


_read = twin_pages.Pages.read


def _absent(
    state: SessionState, opcode: int, opaque: int, vb_id: int,
    error: RefusedError | StoreDamagedError,
) -> None:  # fmt: skip
    """What cannot be read is answered as if it was not there."""
    if isinstance(error, StoreDamagedError):
        state.send(pack_response(opcode, Status.KEY_ENOENT, opaque=opaque))
    else:
        _answer_error(state, opcode, opaque, vb_id, error)


_answer_error = SessionState.answer_error


def put_older(mender: PageMender, key: bytes, _entries: Sequence[bytes]) -> str:
    """What cannot be read becomes what is before it in the block."""
    place = mender.place_of_value(BY_SEQNO_TABLE, key)
    assert place is not None
    value = mender.bytes_at(BY_SEQNO_TABLE, key, place)
    block, pieces = Block(key, value), [b""]
    body = bytes(block.body)
    for (start, end), crc in zip(pairwise((0, *block.ends)), block.frame_crcs, strict=True):
        frame = body[start:end]
        older = pieces[-1][: end - start].ljust(end - start, b"\0")
        pieces.append(frame if crc32c(frame) == crc else older)
    mender.put_value(BY_SEQNO_TABLE, key, place, value[: len(value) - len(body)] + b"".join(pieces))
    return FROM_COPY


DAMAGE_BUGS: Final[dict[str, Bug]] = {
    "damage-is-answered": Bug(
        "a version is answered although its checksum is wrong",
        (
            Replaced(store_module, "find_frame", answering()),  # it looks in the block instead
            Replaced(Block, "entry", _entry_unchecked),
        ),
        nodes=1,
    ),
    "old-page-is-read": one(
        "a page that the disk did not write is taken for the new one",
        twin_pages.Pages, "read", _as_found, nodes=1,
    ),
    "damaged-is-absent": one(
        "a document that cannot be read is answered as absent",
        SessionState, "answer_error", _absent, nodes=1,
    ),
    "block-passed-over": one(
        "the scrubber looks at no block", TableScrub, "_check_block", answering(), nodes=1
    ),
    "copies-unasked": one(
        "other copies are never asked for what is damaged", CopyRepairs, "due", answering([])
    ),
    "repair-in-vain": one(
        "what is damaged counts as mended, and nothing was put in place",
        scrub_pieces.ScrubPieces, "put_versions", answering(FROM_COPY),
    ),
    "older-is-put": one(
        "a repair puts older versions in place of those that a node cannot read",
        scrub_pieces, "put_versions", put_older,
    ),
    "repair-takes-all": one(
        "a copy takes versions of another history", prober, "why_not_taken", answering("")
    ),
    "repair-takes-older": one(
        "a copy puts an older version in place of the one that it lacks, and proves nothing",
        twin_pages, "put_versions", put_older,
    ),
}  # fmt: skip
