"""Keeps opened blocks for the stream that reads them. Pure.

A snapshot of a stream first reads all of its blocks to find the superseded versions, and then sends
them in several turns. The blocks opened first are kept for these turns.

Who calls it: the store, which clears it when it moves to another state.

Invariants
- a walk holds all blocks that reach into its range, in order and without gaps;
- at most WALKS_MAX walks of at most WALK_BLOCKS_MAX blocks are kept; the oldest is dropped first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import chain, islice, takewhile
from typing import Final, NamedTuple

from vbucket.store.block import Block

WALK_BLOCKS_MAX: Final = 32
WALKS_MAX: Final = 16
"""As many as the running backlogs of a connection. A block takes some KiB for its columns."""


class _OpenedBlock(NamedTuple):
    start_seqno: int
    end_seqno: int
    blocks: list[Block]


class OpenedBlocks:
    """See the module."""

    def __init__(self) -> None:
        self._walks: dict[int, _OpenedBlock] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._walks.clear()

    def keep(
        self, vb_id: int, start_seqno: int, end_seqno: int, blocks: Iterator[Block]
    ) -> Iterable[Block]:
        """Return the blocks that `blocks` yields for [start, end]; keep them unless they are too
        many.
        """
        kept = list(islice(blocks, WALK_BLOCKS_MAX + 1))
        if len(kept) > WALK_BLOCKS_MAX:
            return chain(kept, blocks)
        self._walks.pop(vb_id, None)
        if len(self._walks) >= WALKS_MAX:
            del self._walks[next(iter(self._walks))]
        self._walks[vb_id] = _OpenedBlock(start_seqno, end_seqno, kept)
        return kept

    def blocks(self, vb_id: int, start_seqno: int, end_seqno: int) -> Iterator[Block] | None:
        """Return the blocks that reach into [start, end], None if they are not kept."""
        walk = self._walks.get(vb_id)
        if walk is None or start_seqno < walk.start_seqno or end_seqno > walk.end_seqno:
            return None
        at = bisect_left(walk.blocks, start_seqno, key=_last_seqno)
        return takewhile(lambda block: block.first_seqno <= end_seqno, walk.blocks[at:])


def _last_seqno(block: Block) -> int:
    return block.last_seqno
