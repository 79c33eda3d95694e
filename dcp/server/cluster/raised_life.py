"""Raises the life of the cluster in the metadata store, if the store was set back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from failover.coordinator.map_life import MapLife
from failover.metadata.metastore import MetaStore, StoreResult

HEARD_NS: Final = 3_000_000_000
"""How long the life has to be raised before it is: nodes that have seen newer records say so within
a second or two."""
RETRY_NS: Final = 1_000_000_000
"""Time between attempts."""


class RaisedLife:
    """See the module. `unix_s` is the wall clock."""

    def __init__(
        self, life: MapLife, meta: MetaStore, unix_s: Callable[[], float] = time.time
    ) -> None:
        self._life = life
        self._meta = meta
        self._unix_s = unix_s
        self._next_ns = self._due_since_ns = 0

    def tick(self, now_ns: int) -> None:
        """Let time pass: raise the life if that is due."""
        if now_ns < self._next_ns:
            return
        txn = self._life.raising(self._unix_s())
        if txn is None:
            self._due_since_ns = 0
            return
        self._due_since_ns = self._due_since_ns or now_ns
        if now_ns - self._due_since_ns >= HEARD_NS:
            self._next_ns = now_ns + RETRY_NS
            self._meta.submit(txn, _decided)


def _decided(_result: StoreResult) -> None:
    """Do nothing: the view shows whether it was written."""
