"""Empties the partitions whose records do not name this member any more. Sans-IO.

    record without this member ── note ──> due ── tick ──> empty
    record with it again ───────── note ──> not due

A copy is dropped while its member is down, too: then the first record that its next process reads
says so. Emptying is a change of memory and one control entry, so it is durable with its commit
group, before anything that comes later. The documents leave the store with the next merge.

What the other copies may lack goes into quarantine files first, if it may have been answered
(`failover.promotion`).

Who calls it: `dcp.replication.node_core`.

Invariant: only a readable record, of an epoch that is not over, empties a partition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dcp.stream.hub import StreamHub
from vbucket.engine.engine import Engine

EMPTIED_MAX: Final = 64
"""Partitions that are emptied in one turn: a fraction of a millisecond each."""


class DroppedCopies:
    """See the module. `empty` returns whether nothing of a partition is left to do."""

    def __init__(self, engine: Engine, hub: StreamHub, empty: Callable[[int], bool]) -> None:
        self._engine = engine
        self._hub = hub
        self._empty = empty
        self._due: dict[int, None] = {}
        self._must_merge = False

    def note(self, vb_id: int, *, holds_copy: bool) -> None:
        """Take a partition's newest record: whether this member is in it."""
        if holds_copy:
            self._due.pop(vb_id, None)
        elif self._engine.partitions[vb_id].high_seqno:
            self._hub.fenced(vb_id)
            self._due[vb_id] = None

    def tick(self) -> None:
        """Empty what is due."""
        emptied = 0
        for vb_id in tuple(self._due):
            if emptied == EMPTIED_MAX:
                return
            if self._empty(vb_id):
                del self._due[vb_id]
                emptied += 1
        self._must_merge |= emptied > 0
        if self._must_merge and not self._due:
            self._must_merge = False
            self._engine.keyspace.merge_soon()  # the room on disk is free after it
