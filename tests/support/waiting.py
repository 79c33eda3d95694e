"""Waiting for what another process, thread or task does soon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

GIVE_UP_S: Final = 120.0
"""Limit of a wait, so that a failure does not hang. Waits usually take a second at most."""
PAUSE_S: Final = 0.01
COSTLY: Final = 5
"""A question is asked again after this many times what its answer took: who asks a cluster for its
state without a rest takes the processors from what it waits for."""


def until(is_so: Callable[[], object], give_up_s: float = GIVE_UP_S) -> None:
    """Return once a condition holds."""
    give_up_at_s = time.monotonic() + give_up_s
    while True:
        began_s = time.monotonic()
        if is_so():
            return
        assert began_s < give_up_at_s, "the condition did not become true"
        time.sleep(max(PAUSE_S, COSTLY * (time.monotonic() - began_s)))


async def until_so(is_so: Callable[[], object]) -> None:
    """Return once a condition holds that other code on this event loop makes true."""
    async with asyncio.timeout(GIVE_UP_S):
        while True:
            began_s = time.monotonic()
            if is_so():
                return
            await asyncio.sleep(max(PAUSE_S, COSTLY * (time.monotonic() - began_s)))
