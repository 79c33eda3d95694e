"""Consumers that begin again and again while a round of `scripts/soak proxy` goes on.

A pass is one consumer, with options that it draws: every version or the newest ones, all keys or a
prefix, all partitions or some, from 0 or from where an earlier one has stopped. It reads to the end
that there is when it begins, and its validator checks each event. Passes go side by side, so while
one waits, because its connection is late or cut, or because it is slow, the others have the
processor.

A pass that can have all documents is compared with the server's once nobody writes any more.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from clients.consumer.consumer import Consumer
from clients.errors import TRANSIENT

SLOW_SHARE: Final = 0.01
SLOW_S: Final = 0.5
"""How often a reader takes how much time at most for a batch: the server waits for it."""
STOP_SHARE: Final = 0.2
"""How often a pass stops in the middle, and another consumer goes on from its positions."""
STOP_BATCHES: Final = 100
OPEN_AGAIN_S: Final = 0.05
"""Pause after a connection that was cut before the consumer had begun."""

Options = Mapping[str, Any]
Open = Callable[[Options], Consumer]


class Kind(NamedTuple):
    """A kind of pass."""

    weight: int
    options: Options
    has_all: bool = True
    """Whether it has all documents at its end."""


KINDS: Final = (
    Kind(6, {}),
    Kind(6, {"history": True}),
    Kind(2, {"key_prefixes": "key-1"}, has_all=False),
    Kind(2, {"vbuckets": range(0, 64, 3)}, has_all=False),
    Kind(1, {"collections": "all"}),
    Kind(1, {"history": True, "previous_values": True}),
)
"""The last two are checked event by event, the others in runs, too."""


class Readers:
    """See the module. `open_with` makes a consumer with more options."""

    def __init__(self, open_with: Open, draw: random.Random) -> None:
        self.events = 0
        """Changes that were validated."""
        self.passes = 0
        self.rollbacks = 0
        self.connections = 0
        self._open_with = open_with
        self._draw = draw
        self._is_over = False

    async def go_on(self) -> None:
        """Make one pass after the other until `stop`."""
        while not self._is_over:
            kind = self._draw.choices(KINDS, [each.weight for each in KINDS])[0]
            await self.one_pass(kind.options)

    def stop(self) -> None:
        """Let each pass that goes on be the last one."""
        self._is_over = True

    async def one_pass(self, options: Options, *, may_stop: bool = True) -> Consumer:
        """Read once from 0 to the end; return the consumer, which is closed. Raises
        StreamViolationError.
        """
        stop_after = 0
        if may_stop and self._draw.random() < STOP_SHARE:
            stop_after = self._draw.randrange(1, STOP_BATCHES)
        consumer, is_whole = await self._read(options, stop_after)
        if not is_whole:
            rest = {**options, "start": consumer.checkpoint()}
            consumer, _ = await self._read(rest)
        self.passes += 1
        return consumer

    async def _read(self, options: Options, stop_after: int = 0) -> tuple[Consumer, bool]:
        """Read to the end, or up to a number of batches; return whether that was the end."""
        batches = 0
        async with await self._opened(options) as consumer:
            async for _ in consumer.lazy_batches():
                batches += 1
                if batches == stop_after:
                    break
                if self._draw.random() < SLOW_SHARE:
                    await asyncio.sleep(self._draw.random() * SLOW_S)
        assert consumer.validator is not None, "each event is validated"
        assert consumer.validator.event_count == consumer.metrics.events
        self.events += consumer.metrics.changes
        self.rollbacks += consumer.metrics.rollbacks
        self.connections += consumer.metrics.connections
        return consumer, not stop_after or batches < stop_after

    async def _opened(self, options: Options) -> Consumer:
        """Return a consumer that has begun. Its first connection may be cut, too."""
        while True:
            consumer = self._open_with({**options, "until_now": True})
            try:
                await consumer.open()
            except TRANSIENT:
                await asyncio.sleep(OPEN_AGAIN_S)
            else:
                return consumer
