"""Empties the partitions whose records do not name this member any more. Sans-IO.

    record without this member ── note ──> due ── tick ──> empty
    record with it again ───────── note ──> not due

A copy is dropped while its member is down, too: then the first record that its next process reads
says so. Emptying is a change of memory and one control entry, so it is durable with its commit
group, before anything that comes later. The documents leave the store with the next merge. One is
asked for when nothing was emptied for a while: during a rebalance copies are dropped all the time,
and a merge writes all that was written anywhere on the node.

What the other copies may lack goes into quarantine files first, if it may have been answered
(`failover.rules.promotion`).

Who calls it: `failover.replication.node`.

Invariant: only a readable record, of an epoch that is not over, empties a partition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dcp.stream.hub import StreamHub
from vbucket.engine.engine import Engine

EMPTIED_MAX: Final = 64
"""Partitions that are emptied in one turn: a fraction of a millisecond each."""
REST_NS: Final = 5_000_000_000
"""A merge is asked for when no partition was emptied for so long."""
ROOM_NS: Final = 60_000_000_000
"""A merge is asked for so long after the first partition was emptied, whatever else is: nodes that
lose copies get others, and need the room on disk."""


class DroppedCopies:
    """See the module. `empty` returns whether nothing of a partition is left to do."""

    def __init__(self, engine: Engine, hub: StreamHub, empty: Callable[[int], bool]) -> None:
        self._engine = engine
        self._hub = hub
        self._empty = empty
        self._due: dict[int, None] = {}
        self._emptied_ns: tuple[int, int] | None = None
        """When the first and the last partition were emptied since a merge was asked for."""

    def note(self, vb_id: int, *, holds_copy: bool) -> None:
        """Take a partition's newest record: whether this member is in it."""
        if holds_copy:
            self._due.pop(vb_id, None)
        elif self._engine.partitions[vb_id].high_seqno:
            self._hub.fenced(vb_id)
            self._due[vb_id] = None

    def tick(self, now_ns: int) -> None:
        """Empty what is due, and ask for a merge when it is time."""
        emptied = 0
        for vb_id in tuple(self._due):
            if emptied == EMPTIED_MAX:
                break
            if self._empty(vb_id):
                del self._due[vb_id]
                emptied += 1
        if emptied:
            first_ns = now_ns if self._emptied_ns is None else self._emptied_ns[0]
            self._emptied_ns = first_ns, now_ns
        if self._emptied_ns is not None and self._is_time_to_merge(now_ns, *self._emptied_ns):
            self._emptied_ns = None
            self._engine.keyspace.merge_soon()  # the room on disk is free after it

    @staticmethod
    def _is_time_to_merge(now_ns: int, first_ns: int, last_ns: int) -> bool:
        return now_ns - last_ns >= REST_NS or now_ns - first_ns >= ROOM_NS
