"""Asks the server for a consistent cut, for the driver (docs/consistent-cuts.md).

A consumer that starts now, on connections of its own, is told where each partition is at the next
cut. The batch then ends there. Executors need no cut: they read up to the seqnos that it names.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final, NamedTuple

from clients.checkpoint.checkpoint import Checkpoint
from clients.consumer.consumer import Consumer
from clients.errors import TRANSIENT, DcpdError, OperationTimeoutError, StatusError
from clients.spark.options import SourceSettings
from clients.sync import LoopThread

_RETRY_S: Final = 0.1


class DrawnCut(NamedTuple):
    """A cut: its closed time, a CAS, and the position of each partition at it."""

    time: int
    positions: Checkpoint

    @property
    def seqnos(self) -> dict[int, int]:
        """The seqno of each partition."""
        return {vb_id: position.seqno for vb_id, position in self.positions.items()}


def draw_cut(settings: SourceSettings, patience_s: float) -> DrawnCut:
    """Return the next cut of the partitions and collections that are read.

    Raises OperationTimeoutError if the nodes tell none in this time, DcpdError if they tell none at
    all.
    """
    thread = LoopThread("dcpd-spark-cut")  # callers may have a loop of their own
    try:
        return thread.call(_patiently(settings, patience_s))
    except StatusError as error:
        raise DcpdError(
            f"the server closes no times, so no batch can end at a cut: {error}",
            hint="Leave out the option consistent, or see docs/consistent-cuts.md.",
        ) from error
    finally:
        thread.stop()


async def _patiently(settings: SourceSettings, patience_s: float) -> DrawnCut:
    give_up_s = time.monotonic() + patience_s
    while True:
        left_s = max(_RETRY_S, give_up_s - time.monotonic())
        try:
            async with asyncio.timeout(left_s):
                return await _next_cut(settings)
        except TimeoutError:
            raise OperationTimeoutError(
                f"the nodes told no consistent cut within {patience_s:g} s",
                node=settings.servers[0].node,
                hint="docs/consistent-cuts.md says what may hold up a cut.",
            ) from None
        except TRANSIENT:
            if time.monotonic() > give_up_s:
                raise
            await asyncio.sleep(_RETRY_S)


async def _next_cut(settings: SourceSettings) -> DrawnCut:
    first, *others = settings.servers
    places = tuple(place for server in (first, *others) for place in server.places)
    address = first.at(*places[0])._replace(others=places[1:])
    consumer = Consumer(
        address, cuts=True, start="now", vbuckets=settings.partitions,
        collections=settings.collections,
    )  # fmt: skip
    async with consumer:
        async for cut in consumer.cuts():
            if cut.time:
                return DrawnCut(cut.time, cut.positions)
    raise AssertionError("a consumer that is open has a next cut")
