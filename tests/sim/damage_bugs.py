"""Faults of reads, scrubbing and repairs of damaged stores that can be put in on purpose.

Each replaces one rule of the product by a wrong one, as those of `sim.cluster_bugs` do. Plans with
`cold_damage` reach them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Final

from dcp.core.scrub_turns import CopyRepairs, DamageRow
from dcp.session.state import SessionState
from dcp.wire.frame import pack_response
from dcp.wire.status import RefusedError, Status
from sim import twin_pages
from sim.planting import Bug, Replaced, one
from vbucket.check import scrub_pieces
from vbucket.check.mend import FROM_COPY
from vbucket.check.scrub import TableScrub
from vbucket.store import store as store_module
from vbucket.store.block import PREFIX, Block
from vbucket.store.environment import StoreDamagedError


def _entry_unchecked(block: Block, seqno: int) -> bytes | None:
    """Return the version that is found, whatever its checksum says."""
    index = bisect_left(block.seqnos, seqno)
    if index == len(block.seqnos) or block.seqnos[index] != seqno:
        return None
    start = block.ends[index - 1] if index else 0
    frame = bytes(block.body[start : block.ends[index]])
    return PREFIX.pack(block.prev_seqnos[index], block.epoch) + frame


def _not_found(*_args: object, **_named: object) -> None:
    """Look in the block instead."""


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


def _passed_over(*_args: object, **_named: object) -> None:
    """A block is not looked at."""


def _none_due(_repairs: CopyRepairs, _rows: Sequence[DamageRow], _now_s: float) -> list[DamageRow]:
    """No other copy is ever asked."""
    return []


def _in_vain(_pieces: Any, _key: bytes, _entries: list[bytes]) -> str:
    """Nothing is put in place, and it counts as mended."""
    return FROM_COPY


DAMAGE_BUGS: Final[dict[str, Bug]] = {
    "damage-is-answered": Bug(
        "a version is answered although its checksum is wrong",
        (
            Replaced(store_module, "find_frame", _not_found),
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
        "the scrubber looks at no block", TableScrub, "_check_block", _passed_over, nodes=1
    ),
    "copies-unasked": one(
        "other copies are never asked for what is damaged", CopyRepairs, "due", _none_due
    ),
    "repair-in-vain": one(
        "what is damaged counts as mended, and nothing was put in place",
        scrub_pieces.ScrubPieces, "put_versions", _in_vain,
    ),
}  # fmt: skip
