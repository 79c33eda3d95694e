"""Keeps on disk which times may have been closed, so that a restart takes no CAS at or below one.

    reserve ──> closed.json has a time AHEAD_NS ahead of the clock ──> Engine.closed_max

Who calls it: the timer of cuts (`dcp.server.net.cut_timer`), while somebody follows cuts.

Invariant: no time above `Engine.closed_max` is closed, and `closed.json` is never below that. A
start begins above it, also if the clock was set back while the node was down.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import msgspec

from dcp.server.files.kept_twice import read_kept, write_kept
from dcp.server.observe.event_log import EventLog
from dcp.server.observe.housekeeping import Tasks
from vbucket.engine.cut import close_time
from vbucket.engine.engine import Engine

CLOSED_FILE: Final = "closed.json"
AHEAD_NS: Final = 1_500_000_000
LEFT_NS: Final = 1_000_000_000
"""How far a reservation goes: a node that is back before that gets times so far ahead of the clock.
It is renewed when LEFT_NS are left, twice as much as a cut of a cluster may be ahead."""


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    time: str
    """Decimal: readers of JSON round large numbers."""


class ClosedTimes:
    """See the module. Lives on one event loop. Without its file nothing is closed."""

    def __init__(self, engine: Engine, data_dir: Path, tasks: Tasks, log: EventLog) -> None:
        self._engine = engine
        self._path = data_dir / CLOSED_FILE
        self._tasks = tasks
        self._log = log
        self._is_writing = False
        self._told = ""
        try:
            keep_closed(engine, read_closed(data_dir))
        except FileNotFoundError:
            pass  # nothing was ever closed
        except (OSError, ValueError) as error:
            log.error(
                "closed times of before are not known: if the clock was set back since, changes may"
                " get a CAS that consumers took for closed", path=str(self._path),
                reason=str(error),
            )  # fmt: skip

    def reserve(self, next_ns: int) -> None:
        """Reserve more time if that is due. `next_ns`: what is closed next."""
        closed_max = time_to_reserve(next_ns, self._engine.closed_max)
        if closed_max is not None and not self._is_writing:
            self._is_writing = True
            self._tasks.begin(self._write(closed_max))

    async def _write(self, closed_max: int) -> None:
        data = msgspec.json.encode(_Kept(str(closed_max))) + b"\n"
        try:
            await asyncio.to_thread(write_kept, self._path, data)
        except OSError as error:
            if str(error) != self._told:
                self._log.warning("this node closes no times", reason=str(error))
            self._told = str(error)
        else:
            self._told = ""
            self._engine.closed_max = max(self._engine.closed_max, closed_max)
        self._is_writing = False


def keep_closed(engine: Engine, closed_max: int) -> None:
    """A start: take no CAS at or below what the disk has as reserved. Less is not reserved again: a
    node of a cluster does not know yet what it will be asked to close.
    """
    close_time(engine, closed_max)
    engine.closed_max = max(engine.closed_max, closed_max)


def time_to_reserve(next_ns: int, closed_max: int) -> int | None:
    """Return the time to reserve now; None: enough is left. `next_ns`: what is closed next,
    `closed_max`: what is reserved.
    """
    return next_ns + AHEAD_NS if next_ns + LEFT_NS >= closed_max else None


def read_closed(data_dir: Path) -> int:
    """Return the time that a folder reserved last. Raises OSError, ValueError."""
    return int(msgspec.json.decode(read_kept(data_dir / CLOSED_FILE).content, type=_Kept).time)
