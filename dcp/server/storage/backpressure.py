"""Backpressure: what happens to writers while the store cannot keep up with them.

    ROOM     the memtables have room                       writes are taken
    WAITING  they are full; a merge should soon make room  writes wait, for `wait_s` at most
    REFUSED  no merge made room in that time               writes get ETMPFAIL, with the reason

    ROOM -- full --> WAITING -- wait_s is over --> REFUSED
    WAITING, REFUSED -- a merge made room --> ROOM

`update` is called after each commit group and whenever a merge has made room. Only sessions whose
next command writes wait. Reads, logins, NOOPs, acknowledgements and streams never do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto

from vbucket.engine.engine import Engine
from vbucket.engine.partition import Hold


class Pressure(Enum):
    """See the module."""

    ROOM = auto()
    WAITING = auto()
    REFUSED = auto()


class Backpressure:
    """See the module. Lives on one event loop.

    `wait_s` is the setting write_wait. `why` says why the store is behind, in words. `on_change` is
    called after each step, with the reason if writes are refused and "" if not.
    """

    def __init__(
        self,
        engine: Engine,
        wait_s: float,
        *,
        why: Callable[[], str],
        on_change: Callable[[Pressure, str], None],
    ) -> None:
        self._engine = engine
        self.wait_s = wait_s
        self._why = why
        self._on_change = on_change
        self._timer: asyncio.TimerHandle | None = None
        self.pressure = Pressure.ROOM

    def update(self) -> None:
        """Check how full the memtables are now."""
        is_full = self._engine.keyspace.is_overfull
        if is_full and self.pressure is Pressure.ROOM:
            self.pressure = Pressure.WAITING
            self._engine.let_writers_wait()
            self._timer = asyncio.get_running_loop().call_later(self.wait_s, self._refuse)
            self._on_change(self.pressure, "")
        elif not is_full and self.pressure is not Pressure.ROOM:
            self.pressure = Pressure.ROOM
            self.stop()
            self._engine.refuse_writes("", Hold.STORE_BEHIND)
            self._on_change(self.pressure, "")

    def stop(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def reword(self) -> None:
        """Update the reason of the refusal: a merge that was only slow may have failed since."""
        if self.pressure is Pressure.REFUSED:
            self._engine.refuse_writes(self._refusal(), Hold.STORE_BEHIND)

    def _refusal(self) -> str:
        return f"writes are refused until the store has caught up: {self._why()}"

    def _refuse(self) -> None:
        self.pressure = Pressure.REFUSED
        why = self._refusal()
        self._engine.refuse_writes(why, Hold.STORE_BEHIND)
        self._on_change(self.pressure, why)
