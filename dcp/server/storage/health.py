"""Whether clients should use this server, and whether it takes writes now.

The node reports when it is ready, the committer when the log has no room, backpressure when the
store is behind, a member of a cluster when the metadata store went back. /readyz, the status, the
metrics and all background writers ask here.

Backpressure is what happens to writers while the store cannot keep up with them:

    ROOM     the memtables have room                       writes are taken
    WAITING  they are full; a merge should soon make room  writes wait, for `wait_s` at most
    REFUSED  no merge made room in that time               writes get ETMPFAIL, with the reason

    ROOM -- full --> WAITING -- wait_s is over --> REFUSED
    WAITING, REFUSED -- a merge made room --> ROOM

Only sessions whose next command writes wait. Reads, logins, NOOPs, acknowledgements and streams
never do.

Invariant: while the log has no room, or the server started read-only, the engine refuses writes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import Final, NamedTuple

from dcp.server.observe.event_log import EventLog
from vbucket.engine.engine import Engine
from vbucket.engine.partition import Hold

READ_ONLY_TEXT: Final = (
    "writes are refused until there is room on the server's disk: it started read-only"
)
STORE_OLDER: Final = "metadata_store_older"
LOG_FULL_TEXT: Final = "writes are refused until there is room for the server's log"


class Pressure(Enum):
    """What happens to writers: see the module."""

    ROOM = auto()
    WAITING = auto()
    REFUSED = auto()


class OlderStore(NamedTuple):
    """That the metadata store of a cluster is older than what its nodes have seen."""

    partitions: int = 0
    """Those whose record in it is older, or gone; 0: it is not older."""
    since_s: float = 0.0
    """Unix time since which this node knows."""
    serves: bool = True
    """Whether this node serves any partition."""


class Health:
    """See the module. `let_writers_go_on` wakes the connections whose commands wait for room."""

    def __init__(
        self, engine: Engine, log: EventLog, *, let_writers_go_on: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._log = log
        self._let_writers_go_on = let_writers_go_on
        self._log_full_why = ""
        self._enrolling_why = ""
        self._is_behind = False
        """Whether writes are refused because the store is behind."""
        self.is_ready = False
        """Whether the server has started, and is neither stopping nor failed."""
        self.older_store = OlderStore()
        self.read_only_why = ""
        """Why there is no room yet for the first writes after the start; "" once they are made."""

    @property
    def write_refusal(self) -> str:
        """Why writes are refused now; "" if they are taken."""
        return (
            self.read_only_why
            or self._log_full_why
            or self._enrolling_why
            or self._engine.write_refusal
        )

    @property
    def refusal_kind(self) -> str:
        """The kind of refusal, one of `meter.REFUSAL_KINDS`; "" if writes are taken."""
        if self.read_only_why:
            return "read_only"
        if self._log_full_why:
            return "log_full"
        if self._enrolling_why:
            return "enrolling"
        return "store_behind" if self._engine.write_refusal else ""

    @property
    def unready_kind(self) -> str:
        """Why clients are not to be sent here although the server runs: a kind of refusal, or that
        it serves nothing beside an older metadata store; "" if they are.
        """
        older = self.older_store
        return self.refusal_kind or (STORE_OLDER if older.partitions and not older.serves else "")

    def store_is_older(self, partitions: int, unix_s: float, *, serves: bool) -> None:
        """Note of how many partitions the metadata store is older than what nodes have seen."""
        since_s = self.older_store.since_s or unix_s
        self.older_store = OlderStore(partitions, since_s if partitions else 0.0, serves)

    def read_only(self, why: str) -> None:
        """Note that the disk has no room for the first writes, or has room now ("")."""
        had_room, self.read_only_why = not self.read_only_why, why
        if why and had_room:
            self._engine.refuse_writes(READ_ONLY_TEXT)
            self._log.error("started read-only", reason=why)
        elif not why and not had_room:
            self._engine.refuse_writes("")
            self._log.info("the disk has room again, writes are taken")

    def log_full(self, why: str) -> None:
        """Note that the log has no room for a group, or has room again ("")."""
        self._log_full_why = why
        if why:
            self._engine.refuse_writes(LOG_FULL_TEXT)
            self._log.error("log full", reason=why)
        else:
            self._engine.refuse_writes("")
            self._log.info("log has room again")

    def enrolling(self, why: str) -> None:
        """Note that the node is becoming a member of a cluster, or that this failed ("")."""
        self._enrolling_why = why
        self._engine.refuse_writes(why, Hold.ENROLLING)
        self._log.info("writes refused: becoming a member" if why else "writes are taken again")
        self._let_writers_go_on()  # those that wait are refused, too

    def pressure_changed(self, pressure: Pressure, why: str) -> None:
        """Note a step of backpressure; `why` says why it refuses writes, "" if it does not."""
        if why:
            self._log.error("writes refused", reason=why)
            self._is_behind = True
        elif pressure is Pressure.ROOM and self._is_behind:
            self._log.info("writes are taken again")
            self._is_behind = False
        if pressure is not Pressure.WAITING:
            self._let_writers_go_on()


class MergeProgress:
    """How the merge of the log into the store stands (`dcp.server.storage.merging`)."""

    def __init__(self) -> None:
        self.began_s = 0.0
        """When the running merge began, monotonic; 0: none runs."""
        self.trouble = ""
        """Why it must be retried; "" if it need not."""

    @property
    def seconds(self) -> float:
        """How long the running merge has taken so far; 0 if none runs."""
        return time.monotonic() - self.began_s if self.began_s else 0.0

    def why_behind(self) -> str:
        """Return why the store is behind."""
        if self.trouble:
            return self.trouble
        if self.began_s:
            return f"a merge has been running for {self.seconds:.0f} s"
        return "it has fallen behind"


class Backpressure:
    """Steps of pressure. Lives on one event loop. `wait_s` is the setting write_wait.

    `update` is called after a commit group that may change it, and whenever a merge has made room;
    `reword` when a merge has met trouble.
    """

    def __init__(self, engine: Engine, health: Health, wait_s: float) -> None:
        self._engine = engine
        self.keyspace = engine.keyspace
        self._health = health
        self.merge = MergeProgress()
        self.wait_s = wait_s
        self._timer: asyncio.TimerHandle | None = None
        self.pressure = Pressure.ROOM

    def update(self) -> None:
        """Check how full the memtables are now."""
        is_full = self.keyspace.memtables.is_overfull
        if is_full and self.pressure is Pressure.ROOM:
            self.pressure = Pressure.WAITING
            self._engine.let_writers_wait()
            self._timer = asyncio.get_running_loop().call_later(self.wait_s, self._refuse)
            self._health.pressure_changed(self.pressure, "")
        elif not is_full and self.pressure is not Pressure.ROOM:
            self.pressure = Pressure.ROOM
            self.stop()
            self._engine.refuse_writes("", Hold.STORE_BEHIND)
            self._health.pressure_changed(self.pressure, "")

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
        return f"writes are refused until the store has caught up: {self.merge.why_behind()}"

    def _refuse(self) -> None:
        self.pressure = Pressure.REFUSED
        why = self._refusal()
        self._engine.refuse_writes(why, Hold.STORE_BEHIND)
        self._health.pressure_changed(self.pressure, why)
