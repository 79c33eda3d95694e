"""What this node's partitions keep for consumers: looked at before purges are planned.

Invariant: a state of a consumer that is worse than before is logged once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Final

from dcp.server.observe.event_log import EventLog
from dcp.server.observe.meter import Meter
from vbucket.engine.engine import Engine
from vbucket.engine.keeps import KeepState, Standing, standings
from vbucket.engine.partition import VbState
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
        self._told: dict[str, KeepState] = {}

    async def look(self, vb_ids: Iterable[int], now_ns: int) -> dict[int, int]:
        """Look at partitions of which this node is the master. Return how far those may be purged
        that keep anything. `now_ns` is Unix time.
        """
        limits: dict[int, int] = {}
        for index, vb_id in enumerate(vb_ids):
            if index % LOOKED_AT_ONCE == LOOKED_AT_ONCE - 1:
                await asyncio.sleep(0)
            part = self._engine.partitions[vb_id]
            self._found.pop(vb_id, None)
            if part.state != VbState.ACTIVE:
                continue
            try:
                found = standings(self._engine, self._store, part, now_ns)
            except StoreDamagedError:
                limits[vb_id] = part.purge_seqno  # nobody knows what it keeps
                continue
            if found:
                self._found[vb_id] = found
                limits[vb_id] = min(each.purge_max for each in found)
        self._tell()
        return limits

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
