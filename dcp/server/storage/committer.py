"""Group commit: takes groups from the engine, writes them to the log, reports when they are there.

All that arrives while a group is being written forms the next one. A small group is written by the
loop itself, where handing it to a thread would take longer than the disk does; a larger one by the
committer's own thread, so that the loop decodes the next batches meanwhile. The same thread writes
zeros ahead of the log's end while small groups come: overwriting them takes a third less time.

Invariants
- groups reach the log in the order of their numbers, one at a time;
- `on_commit` runs on the loop, after the group is as safe as the durability asks for;
- if the log has no room (`full_why`), the group stays and is tried again with the same bytes until
  there is room, before any later group; nobody is answered meanwhile, nothing is lost;
- after any other failed write, after a failed sync, and after any exception that nobody expected,
  nothing is committed any more: `on_failure` ends the process, and the next start recovers.

`commit`: one append and one sync per group, then the answers. `interval`: one append per group, a
sync every `sync_interval_s`, before the next group where groups come without a pause. `none`: one
append per group; the operating system decides. A group that branches a partition's history is
synced whatever the durability.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from dcp.server.observe.meter import Histogram
from vbucket.engine.engine import Engine
from vbucket.log.commit_group import CommitGroup
from vbucket.log.device import AHEAD_BYTES, LogFullError, SyncFailedError
from vbucket.log.record import RECORD_BYTES
from vbucket.log.writer import LogWriter

INLINE_BYTES_MAX: Final = 8 * 1024
"""Groups up to this size are written by the loop itself (docs/lab-notes.md)."""
ROOM_BYTES_MIN: Final = AHEAD_BYTES // 2
"""Room ahead below which more is made: what some hundred small groups take while it is written."""
RETRY_FIRST_S: Final = 0.25
RETRY_MAX_S: Final = 5.0
"""Pauses between attempts on a full disk: soon after the first, no burden when it stays full."""
MARK_S: Final = 0.1
"""How often the log's end mark is synced while groups are committed; also the time after the last
one. It costs a tenth of a millisecond of the thread."""
JOIN_S: Final = 2.0
"""How long the thread may take to end: a disk that does not answer keeps it for ever."""


class _Job(NamedTuple):
    """Work for the thread, and what the loop does with its result."""

    work: Callable[[], Any]
    then: Callable[[Any], None]


class Committer:
    """See the module. Lives on one event loop; `start` before use, `stop` after the last group."""

    def __init__(
        self,
        engine: Engine,
        writer: LogWriter,
        *,
        syncs_groups: bool,
        on_commit: Callable[[CommitGroup], None],
        on_rotated: Callable[[int], None],
        on_full: Callable[[str], None],
        on_failure: Callable[[Exception], None],
        sync_seconds: Histogram,
        retry_first_s: float = RETRY_FIRST_S,
        retry_max_s: float = RETRY_MAX_S,
        room_bytes_min: int = ROOM_BYTES_MIN,
    ) -> None:
        self._engine = engine
        self._writer = writer
        writer.marking = threading.Lock()
        self._device = writer.device
        self._syncs_groups = syncs_groups
        self._on_commit = on_commit
        self._on_rotated = on_rotated
        self._on_full = on_full
        self._on_failure = on_failure
        self._sync_seconds = sync_seconds
        self._retry_first_s = retry_first_s
        self._retry_max_s = retry_max_s
        self._room_bytes_min = room_bytes_min
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="log", daemon=True)
        self._is_busy = False
        """A group or the log itself is in the thread's hands, or waits for room."""
        self._is_scheduled = False
        self._is_sync_wanted = False
        """A sync is due (`interval`), as soon as the thread has its hands free."""
        self._is_reserving = False
        self._finds_room = syncs_groups
        """Whether zeros can be written ahead in this segment; without syncs they help nobody."""
        self._has_started = False
        self._has_failed = False
        self._next_mark: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._pause_s = self._retry_first_s
        self._idle = asyncio.Event()
        self._idle.set()
        self.full_why = ""
        """Why the log has no room for the waiting group; "" if no group waits."""
        self.is_synced = True
        """Whether everything in the log is on disk."""

    def start(self) -> None:
        """Start the thread; groups are taken from now on."""
        self._has_started = True
        self._thread.start()

    def kick(self) -> None:
        """Something is pending: write it once this turn of the loop has read all that is there."""
        if self._has_started and not (self._is_busy or self._is_scheduled or self._has_failed):
            self._is_scheduled = True
            self._loop.call_soon(self._guarded, self._begin)

    def kick_now(self) -> None:
        """Write what is pending at once, where nobody else could add to it in this turn."""
        if self._has_started and not (self._is_busy or self._is_scheduled or self._has_failed):
            self._guarded(self._begin)

    def sync_soon(self) -> None:
        """Sync what was appended, as a job of its own (`interval`): now, or after the group that
        the thread is writing.
        """
        if self._has_failed or self.is_synced:
            return
        if self._is_busy:
            self._is_sync_wanted = True
        else:
            self._give(_Job(self._sync, self._synced))

    def halt(self) -> None:
        """Take no group any more: the server has failed, and what is pending may be wrong."""
        self._has_failed = True
        self._idle.set()

    async def drain(self) -> None:
        """Return when nothing is pending or being written, or when the log has no room for it."""
        while not self._has_failed and (self._engine.keyspace.has_pending or self._is_busy):
            if self.full_why or not self._has_started:
                return
            self.kick()
            await asyncio.sleep(0)
            await self._idle.wait()

    def stop(self) -> None:
        """End the thread; sync what it has appended, unless it failed. A group that waits for room
        is dropped: nobody has seen it. Raises SyncFailedError, also where the disk does not answer.
        """
        for timer in (self._retry, self._next_mark):
            if timer is not None:
                timer.cancel()
        if not self._has_started:
            return
        self._jobs.put(None)
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            self._has_failed = True
            raise SyncFailedError(f"the log's disk has not answered for {JOIN_S:g} s")
        if not self._has_failed:
            self._writer.sync()
            self._writer.sync_mark()

    # -- on the loop -------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._is_scheduled = False
        if self._is_busy or self._has_failed:
            return
        group = self._engine.keyspace.take_group()
        if group is None:
            return
        rotates = self._engine.keyspace.wants_freeze
        if rotates:
            # Here and nowhere else: what is frozen is exactly what the sealed segments hold.
            self._engine.keyspace.freeze()
        job = _Job(partial(self._write, group), partial(self._written, group, rotates))
        if rotates or not self._is_for_the_loop(RECORD_BYTES + len(group.payload)):
            self._give(job)
            return
        try:
            self._write(group)
        except LogFullError as error:
            self._wait_for_room(job, error)
            return
        self._commit(group)
        if self._finds_room and self._device.room_bytes < self._room_bytes_min:
            self._reserve()

    def _is_for_the_loop(self, record_bytes: int) -> bool:
        # While zeros are being written, an append that makes the file longer would wait for them.
        return record_bytes <= INLINE_BYTES_MAX and not (
            self._is_reserving and record_bytes > self._device.room_bytes
        )

    def _give(self, job: _Job) -> None:
        """Hand over what has to be done before the next group is written."""
        self._is_busy = True
        self._idle.clear()
        self._jobs.put(job)

    def _go_on(self) -> None:
        """What was handed over is done."""
        self._is_busy = False
        self._pause_s = self._retry_first_s
        if self.full_why:
            self.full_why = ""
            self._on_full("")
        if self._is_sync_wanted:
            self._is_sync_wanted = False
            self._give(_Job(self._sync, self._synced))
        elif self._engine.keyspace.has_pending:
            self._begin()
        if not self._is_busy:
            self._idle.set()

    def _written(self, group: CommitGroup, rotates: bool, _: None) -> None:
        self._commit(group)
        if rotates:
            self._give(_Job(self._writer.rotate, self._rotated))
        else:
            self._go_on()

    def _rotated(self, segment: int) -> None:
        self._finds_room = self._syncs_groups
        self._on_rotated(segment)
        self._go_on()

    def _synced(self, _: None) -> None:
        self.is_synced = True
        self._engine.keyspace.synced()
        self._go_on()

    def _reserve(self) -> None:
        if not self._is_reserving:
            self._is_reserving = True
            self._jobs.put(_Job(self._device.reserve, self._reserved))

    def _reserved(self, _: None) -> None:
        self._is_reserving = False
        self._finds_room = self._device.room_bytes >= self._room_bytes_min

    def _wait_for_room(self, job: _Job, error: LogFullError) -> None:
        """Try a job again after a while: the disk is full, and was left as it was before."""
        self._is_busy = True
        self._retry = self._loop.call_later(self._pause_s, self._guarded, self._give, job)
        self._pause_s = min(2 * self._pause_s, self._retry_max_s)
        if not self.full_why:
            self.full_why = str(error)
            self._on_full(self.full_why)
        self._idle.set()  # whoever drains gives up

    def _commit(self, group: CommitGroup) -> None:
        self._engine.keyspace.group_committed(group, is_synced=self._is_synced_with(group))
        self._on_commit(group)
        if self._next_mark is None:
            self._next_mark = self._loop.call_later(MARK_S, self._sync_mark)

    def _sync_mark(self) -> None:
        """Have the newest end mark synced. Beside groups: nobody waits for it."""
        self._next_mark = None
        if self._writer.has_unsynced_mark and not self._has_failed:
            self._jobs.put(_Job(self._writer.sync_mark, _nothing))

    def _guarded(self, step: Callable[..., None], *arguments: Any) -> None:
        """Take a step of the commit path. Whatever nobody expected ends the process: going on would
        leave writers without an answer, or tell them what is not so.
        """
        if self._has_failed:
            return
        try:
            step(*arguments)
        except Exception as error:  # noqa: BLE001 - a named supervision point
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        self._is_busy = False
        self._idle.set()
        self._on_failure(error)

    # -- on the thread, or on the loop for small groups --------------------------------------------

    def _work(self) -> None:
        """The thread: one job after another."""
        call_soon = self._loop.call_soon_threadsafe
        while (job := self._jobs.get()) is not None:
            try:
                result = job.work()
            except LogFullError as error:
                call_soon(self._guarded, self._wait_for_room, job, error)
            except Exception as error:  # noqa: BLE001 - a named supervision point
                # A thread that ended here would be waited for in vain.
                call_soon(self._fail, error)
            else:
                call_soon(self._guarded, job.then, result)

    def _write(self, group: CommitGroup) -> None:
        # The newest segment cannot change before: `_begin` is not reached while it does.
        self._writer.append(group.number, group.payload)
        if self._is_synced_with(group):
            self._sync()
        else:
            self.is_synced = False

    def _is_synced_with(self, group: CommitGroup) -> bool:
        # A branch always: its failover log goes into the store next, which must not know of
        # versions that the log has lost.
        return self._syncs_groups or bool(group.branched)

    def _sync(self) -> None:
        began_ns = time.monotonic_ns()
        self._writer.sync()
        self._sync_seconds.observe((time.monotonic_ns() - began_ns) / 1e9)


def _nothing(_: None) -> None:
    """Nothing is to be done after it."""


class PeriodicSync:
    """Syncs the log every `interval_s` (durability `interval`), until `stop`."""

    def __init__(self, committer: Committer, interval_s: float) -> None:
        self._committer = committer
        self._interval_s = interval_s
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Sync now, and again and again."""
        self._committer.sync_soon()
        self._next = asyncio.get_running_loop().call_later(self._interval_s, self.start)

    def stop(self) -> None:
        """Sync no more."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
