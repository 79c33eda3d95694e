"""What this node's partitions keep for consumers: looked at before purges are planned.

Invariant: a state of a consumer that is worse than before is logged once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Final

from dcp.server.observe.event_log import EventLog
from dcp.server.observe.meter import Meter
from vbucket.engine.engine import Engine
from vbucket.engine.keeps import KeepState, Share, Standing, Unseen, share_of, standings, unseen_of
from vbucket.engine.partition import Partition, VbState
from vbucket.store.environment import StoreDamagedError
from vbucket.store.store import StoreView

LOOKED_AT_ONCE: Final = 32
"""Partitions between two turns of the loop: 0.1 ms each where a consumer is far behind."""
_WORSE: Final = tuple(KeepState)
_WARNINGS: Final = {
    KeepState.ENDING: "deletions are kept for a consumer, and a limit of that is nearly reached",
    KeepState.ENDED: "deletions that a consumer has not seen may be purged: a limit is passed",
    KeepState.LOST: "deletions that a consumer has not seen are purged: it will begin again at 0",
}


class KeptConsumers:
    """See the module."""

    def __init__(self, engine: Engine, store: StoreView, meter: Meter, log: EventLog) -> None:
        self._engine = engine
        self._store = store
        self._meter = meter
        self._log = log
        self._found: dict[int, list[Standing]] = {}
        """By partition, as of the last look at it; those that keep nothing are not in it."""
        self._unseen: dict[int, dict[str, Unseen]] = {}
        """The same, of all partitions of which this node is the master."""
        self.shares: dict[str, Share] = {}
        """By consumer: what each partition may keep for it."""
        self._told: dict[str, KeepState] = {}

    async def look(self, vb_ids: Iterable[int], now_ns: int) -> dict[int, int]:
        """Look at partitions of which this node is the master. Return how far those may be purged
        that keep anything. `now_ns` is Unix time.
        """
        limits: dict[int, int] = {}
        looked_at = []
        async for part in self._masters_of(vb_ids):
            try:
                unseen = unseen_of(self._engine, self._store, part)
            except StoreDamagedError:
                limits[part.vb_id] = part.purge_seqno  # nobody knows what it keeps
                continue
            self._unseen[part.vb_id] = unseen
            if unseen:
                looked_at.append(part.vb_id)
        self._share_out()
        async for part in self._masters_of(looked_at):
            try:
                found = standings(self._engine, self._store, part, now_ns, self.shares)
            except StoreDamagedError:
                limits[part.vb_id] = part.purge_seqno
                continue
            if found:
                self._found[part.vb_id] = found
                limits[part.vb_id] = min(each.purge_max for each in found)
        self._tell()
        return limits

    async def _masters_of(self, vb_ids: Iterable[int]) -> AsyncIterator[Partition]:
        """Go through the partitions that this node is the master of; forget the last look."""
        for index, vb_id in enumerate(vb_ids):
            if index % LOOKED_AT_ONCE == LOOKED_AT_ONCE - 1:
                await asyncio.sleep(0)
            part = self._engine.partitions[vb_id]
            self._found.pop(vb_id, None)
            if part.state == VbState.ACTIVE:
                yield part
            else:
                self._unseen.pop(vb_id, None)

    def _share_out(self) -> None:
        by_name: dict[str, list[Unseen]] = {}
        for rows in self._unseen.values():
            for name, each in rows.items():
                by_name.setdefault(name, []).append(each)
        parts = self._engine.partitions
        active = sum(part.state == VbState.ACTIVE for part in parts)
        self.shares = {
            name: share_of(rows, partitions=active, of_partitions=len(parts))
            for name, rows in by_name.items()
        }

    def found(self) -> dict[int, list[Standing]]:
        """Return what was found at the last look, by partition."""
        return dict(self._found)

    def _tell(self) -> None:
        counts: dict[str, Counter[str]] = {}
        worst: dict[str, Standing] = {}
        for rows in self._found.values():
            for each in rows:
                counts.setdefault(each.name, Counter())[each.state.value] += 1
                before = worst.get(each.name)
                if before is None or _WORSE.index(before.state) < _WORSE.index(each.state):
                    worst[each.name] = each
        self._meter.keeps = counts
        for name, each in worst.items():
            before_state = self._told.get(name, KeepState.KEPT)
            if _WORSE.index(each.state) > _WORSE.index(before_state):
                self._log.warning(
                    _WARNINGS[each.state], consumer=name, kept_for_s=each.keep.for_s,
                    kept_bytes=each.keep.bytes_max, vbuckets=counts[name][each.state.value],
                )  # fmt: skip
        self._told = {name: each.state for name, each in worst.items()}
