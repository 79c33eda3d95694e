"""Writes documents in batches with the ordinary client, also while the server crashes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from flight_data import Flight

from dcpd import KvClient, MutationResult

RETRY_PAUSE_S = 0.1
PATIENCE_S = 60.0
"""How long to try to have one batch acknowledged."""


class WriteFailedError(Exception):
    """A batch could not be written; the text says why."""


class Writer:
    """Writes flights in batches, and remembers what the server must then hold."""

    def __init__(self, kv: KvClient, batch_rows: int) -> None:
        self.expected: dict[bytes, bytes] = {}
        self.writes = 0
        self.repeated = 0
        self.load_s = 0.0
        self.batch_sent = asyncio.Event()
        """Set while each batch is under way."""
        self._kv = kv
        self._batch_rows = batch_rows

    async def write(self, flights: Sequence[Flight]) -> None:
        """Write flights in order. Return when all are acknowledged."""
        began = time.monotonic()
        for start in range(0, len(flights), self._batch_rows):
            batch = flights[start : start + self._batch_rows]
            await self._write_batch(batch)
            self.expected.update((flight.key, flight.document) for flight in batch)
            self.writes += len(batch)
        self.load_s += time.monotonic() - began

    async def _write_batch(self, batch: Sequence[Flight]) -> None:
        """Send a batch until all of it is acknowledged. After a crash, go on at the first gap.

        What came without an answer may have been done. Doing it twice is harmless, as long as the
        order of a key's flights stays: hence everything after the gap again, answered or not.
        """
        left = [(flight.key, flight.document) for flight in batch]
        deadline = time.monotonic() + PATIENCE_S
        while True:
            under_way = asyncio.ensure_future(self._kv.set_many(left))
            await asyncio.sleep(0)  # it is sent
            self.batch_sent.set()
            results = await under_way
            done = [isinstance(result, MutationResult) for result in results]
            if all(done):
                return
            if time.monotonic() > deadline:
                raise WriteFailedError(
                    f"a write failed for {PATIENCE_S:g} s: {results[done.index(False)]}"
                )
            left = left[done.index(False) :]
            self.repeated += len(left)
            await asyncio.sleep(RETRY_PAUSE_S)
