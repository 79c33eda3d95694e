"""Group commit: takes groups from the engine, puts them into the log, tells when they are there.

All that arrives while a group is being written forms the next one. A small group is written by the
loop itself, where handing it to a thread would take longer than the disk does; a larger one by the
committer's own thread, so that the loop decodes the next batches meanwhile.

Invariants
- groups reach the log in the order of their numbers, one at a time;
- `on_commit` runs on the loop, after the group is as safe as the durability asks for;
- after a failed write or sync nothing is committed any more: `on_failure` ends the process.

`commit`: one append and one sync per group, then the answers. `interval`: one append per group, a
sync every `sync_interval_s`. `none`: one append per group; the operating system decides.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from dcp.server.meter import Histogram
from vbucket.device import LogDevice, LogWriteError, SyncFailedError
from vbucket.engine import Engine
from vbucket.keyspace import Group

INLINE_BYTES_MAX: Final = 8 * 1024
"""Groups up to this size are written by the loop itself (docs/performance.md)."""


class Committer:
    """See the module. Lives on one event loop; `start` before use, `stop` after the last group."""

    def __init__(
        self,
        engine: Engine,
        device: LogDevice,
        *,
        syncs_groups: bool,
        on_commit: Callable[[Group], None],
        on_rotated: Callable[[int], None],
        on_failure: Callable[[Exception], None],
        sync_seconds: Histogram,
    ) -> None:
        self._engine = engine
        self._device = device
        self._syncs_groups = syncs_groups
        self._on_commit = on_commit
        self._on_rotated = on_rotated
        self._on_failure = on_failure
        self._sync_seconds = sync_seconds
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[tuple[Group | None, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="log", daemon=True)
        self._is_busy = False
        self._is_scheduled = False
        self._has_failed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.group_count = 0
        self.is_synced = True
        """Whether everything in the log is on disk."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def kick(self) -> None:
        """Something is pending: write it once this turn of the loop has read all that is there."""
        if not (self._is_busy or self._is_scheduled or self._has_failed):
            self._is_scheduled = True
            self._loop.call_soon(self._begin)

    def sync_soon(self) -> None:
        """Sync what was appended, as a job of its own (`interval`)."""
        if not (self._is_busy or self._has_failed or self.is_synced):
            self._is_busy = True
            self._idle.clear()
            self._jobs.put((None, False))

    async def drain(self) -> None:
        """Return when nothing is pending or being written."""
        while not self._has_failed and (self._engine.has_pending or self._is_busy):
            self.kick()
            await asyncio.sleep(0)
            await self._idle.wait()

    def stop(self) -> None:
        """End the thread; sync what it has appended, unless it failed."""
        self._jobs.put(None)
        self._thread.join()
        if not self._has_failed:
            self._device.sync()

    def _begin(self) -> None:
        self._is_scheduled = False
        if self._is_busy or self._has_failed:
            return
        group = self._engine.take_group()
        if group is None:
            return
        rotates = self._engine.wants_freeze
        if rotates:
            # Here and nowhere else: what is frozen is exactly what the sealed segments hold.
            self._engine.freeze()
        if not rotates and len(group.record) <= INLINE_BYTES_MAX:
            try:
                self._write(group)
            except (LogWriteError, SyncFailedError) as error:
                self._fail(error)
                return
            self._commit(group)
            return
        self._is_busy = True
        self._idle.clear()
        self._jobs.put((group, rotates))

    def _write(self, group: Group) -> None:
        self._device.append(group.record)
        if self._syncs_groups:
            self._sync()
        else:
            self.is_synced = False

    def _sync(self) -> None:
        began_ns = time.monotonic_ns()
        self._device.sync()
        self._sync_seconds.observe((time.monotonic_ns() - began_ns) / 1e9)

    def _commit(self, group: Group) -> None:
        self.group_count += 1
        self._engine.group_committed(group, is_synced=self._syncs_groups)
        self._on_commit(group)

    def _work(self) -> None:
        """The thread: one job after another."""
        call_soon = self._loop.call_soon_threadsafe
        while (job := self._jobs.get()) is not None:
            group, rotates = job
            try:
                if group is None:
                    self._sync()
                    call_soon(self._synced)
                    continue
                self._write(group)
                segment = self._device.rotate() if rotates else None
            except (LogWriteError, SyncFailedError) as error:
                call_soon(self._fail, error)
                continue
            call_soon(self._written, group, segment)

    def _written(self, group: Group, segment: int | None) -> None:
        self._is_busy = False
        self._commit(group)
        if segment is not None:
            self._on_rotated(segment)
        if self._engine.has_pending:
            self._begin()
        if not self._is_busy:
            self._idle.set()

    def _synced(self) -> None:
        self._is_busy = False
        self.is_synced = True
        self._engine.synced()
        if self._engine.has_pending:
            self._begin()
        if not self._is_busy:
            self._idle.set()

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        self._is_busy = False
        self._idle.set()
        self._on_failure(error)
