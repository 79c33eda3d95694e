"""The pager: expires documents that are due, even if nobody asks for them.

Who calls it: the node, a slice at a time. Each expiry is a change with its own seqno, the same one
that an access makes; streams send it like any change.

Invariants
- an entry only says when to look: the document's newest version and the engine's clock decide;
- only partitions that take writes are touched: active ones without a takeover. Due documents of
  other partitions are looked at again once these take writes;
- each row of the store is looked at once between two merges, because only merges remove rows;
- documents of dropped collections are left to compaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vbucket.engine.engine import Engine
from vbucket.engine.partition import VbState
from vbucket.model.entry import head_of, key_of
from vbucket.store.due import DueLayer, read_due
from vbucket.store.environment import StoreDamagedError
from vbucket.store.store import Store

SLICE_LOOKS: Final = 150
"""Entries per slice: 1 to 2 ms if all of them expire."""
DAMAGES_MAX: Final = 16
"""Error texts kept per slice."""


class Pager:
    """See the module."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self._engine = engine
        self._store = store
        self._generation = -1
        self._after = b""
        """The last row of the store that was processed."""
        self._blocked: set[int] = set()
        """Partitions with due documents that were skipped."""
        self.expired = 0
        """Documents that expired here."""
        self.damages: list[str] = []
        """Errors of unreadable data; the caller logs and clears them."""

    def step(self, now_ns: int, looks_max: int = SLICE_LOOKS) -> bool:
        """Process up to `looks_max` due entries; return False if more are due. `now_ns` is Unix
        time.

        While merging is behind or writes are refused, it does nothing and returns True: clients'
        writes have priority.
        """
        engine = self._engine
        if not engine.keyspace.memtables.has_room or engine.write_refusal:
            return True
        engine.begin_batch(now_ns)
        now_s = now_ns // 1_000_000_000
        self._unblock()
        for layer in engine.due.layers():
            entries = layer.take(now_s, looks_max)
            looks_max -= len(entries)
            for entry in entries:
                self._look_at_entry(layer, entry)
        for row, value in self._rows(now_s):
            if not looks_max:
                return False
            looks_max -= 1
            self._after = row
            self._look_at_row(row, value)
        return looks_max > 0

    def _unblock(self) -> None:
        """Resume partitions that take writes again, and after a merge the rows of the store."""
        due = self._engine.due
        if self._generation != due.generation:
            self._generation = due.generation
            self._after = b""
        for vb_id in [vb_id for vb_id in self._blocked if self._takes_writes(vb_id)]:
            self._blocked.discard(vb_id)
            self._after = b""
            for layer in due.layers():
                layer.release(vb_id)

    def _rows(self, now_s: int) -> Iterator[tuple[bytes, bytes]]:
        try:
            for row, value in self._store.due_rows(self._after, now_s):
                yield row, bytes(value)
        except StoreDamagedError as error:  # the table itself: later rows cannot be reached
            self._note(error)

    def _look_at_entry(self, layer: DueLayer, entry: bytes) -> None:
        vb_id = head_of(entry).vb_id
        if self._takes_writes(vb_id):
            self._look_at(vb_id, key_of(entry))
        else:
            self._blocked.add(vb_id)
            layer.held.setdefault(vb_id, []).append(entry)

    def _look_at_row(self, row: bytes, value: bytes) -> None:
        try:
            _, vb_id, key = read_due(row, value)
        except StoreDamagedError as error:
            self._note(error)
            return
        if self._takes_writes(vb_id):
            self._look_at(vb_id, key)
        else:
            self._blocked.add(vb_id)

    def _look_at(self, vb_id: int, key: bytes) -> None:
        if not self._engine.keyspace.is_reachable(key):
            return
        try:
            self.expired += self._engine.expire(vb_id, key)
        except StoreDamagedError as error:
            self._note(error)

    def _takes_writes(self, vb_id: int) -> bool:
        part = self._engine.partitions[vb_id]
        return part.state == VbState.ACTIVE and not part.holds

    def _note(self, error: StoreDamagedError) -> None:
        if len(self.damages) < DAMAGES_MAX:
            self.damages.append(str(error))
