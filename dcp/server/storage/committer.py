"""Group commit: does the jobs of the log, and reports what they publish.

`dcp.core.groups` says what the log has to do next. Here are the threads, the clock and the retries.
Everything that arrives while a group is written forms the next group. The loop itself writes small
groups, because a hand-over to a thread would take longer than the disk. A thread that needs no
interpreter lock (`dcp.server.storage.log_thread`) writes larger ones, so the loop can decode the
next batches meanwhile, and small ones for a while after a sync of the loop was slow: beside a
commit of the store a sync takes tens of milliseconds, and reads and heartbeats should not wait for
it. A thread of Python does all other jobs. It also writes groups that the disk did not take, to
find out why, and all of them if the loops in C are not built.

Zeros are written ahead of the log's end (`dcp.server.storage.log_ahead`): by that thread in this
segment, by another one in the next. One more thread syncs the log's end mark.

Invariants
- jobs are done one at a time, in the order in which the cycle gives them;
- `LogEvents.begun` comes once for each group that is synced, before anything else waits for the
  disk, and `published` when a group is as safe as the durability requires;
- if the log has no room (`room.full_why`), the group stays and is retried with the same bytes until
  there is room, before any later group. Nobody is answered meanwhile, and nothing is lost;
- after any other failed write, a failed sync, or an unexpected exception, nothing is committed any
  more: `LogEvents.failed` ends the process, and the next start recovers.

`commit`: one append and one sync per group, then the answers. `interval`: one append per group, and
a sync every so often (`sync_every`), between two groups if they come without a pause. `none`: one
append per group; the operating system decides when to write.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from dcp.core.groups import GroupCycle, Job, LogTask, Published, WriteGroup
from dcp.server.observe.meter import Histogram
from dcp.server.storage.log_ahead import LogAhead, SlowDisk, WaitForRoom
from dcp.server.storage.log_thread import GroupThread, LogThreads, Work, Written, start_group_thread
from dcp.server.storage.merging import Merging
from vbucket.log.commit_group import CommitGroup
from vbucket.log.device import LogFullError, SyncFailedError
from vbucket.log.record import RECORD_BYTES
from vbucket.log.writer import GroupAside, LogWriter

INLINE_BYTES_MAX: Final = 8 * 1024
"""Groups up to this size are written by the loop itself (docs/decisions.md)."""
SLOW_SYNC_NS: Final = 2_000_000
"""A slower sync of the loop holds up the server by more than the thread would cost (60 us)."""
ALONE_NS: Final = 2_000_000
"""A connection that was the only one to bring changes for so long waits for no others: a turn of
the loop, which saves several of them a sync. It is a few syncs of a quick disk."""
PREPARED_FROM_BYTES: Final = 4 << 20
"""Length of a segment from which the next one is prepared: few changes need no zeros ahead."""
MARK_AFTER_S: Final = 0.005
"""How soon the log's end is marked after a sync: marking takes a tenth of a small commit."""
MARK_S: Final = 0.1
"""Time between syncs of the log's end mark while groups are committed, and after the last one. They
have a thread: beside a large commit of the store one takes tens of milliseconds."""
JOIN_S: Final = 2.0
"""How long to wait for the thread's end: a disk that does not answer blocks it for ever."""


class LogEvents:
    """What the committer tells, on the loop; `dcp.server.net.after_commit` acts on it."""

    has_replicas = False
    """Whether to call `begun`: once for each group that is synced, before anything waits for it."""

    def begun(self, group: CommitGroup) -> None:
        """A group is about to be written."""

    def published(self, published: Published) -> None:
        """A group is as safe as the durability requires."""

    def rotated(self, segment: int) -> None:
        """The log has sealed a segment; the new one has this number."""

    def full(self, why: str) -> None:
        """The log has no room for a group, or has room again ("")."""

    def failed(self, error: Exception) -> None:
        """Nothing is committed any more: end the process. The next start recovers."""


class Committer:
    """See the module. Lives on one event loop: `start` first, `stop` after the last group."""

    def __init__(
        self,
        cycle: GroupCycle,
        writer: LogWriter,
        events: LogEvents,
        ahead: LogAhead,
        *,
        sync_seconds: Histogram,
        pace: Merging | None = None,
        room: WaitForRoom | None = None,
    ) -> None:
        self._cycle = cycle
        self._writer = writer
        writer.marking = threading.Lock()
        self._device = writer.device
        self.events = events
        self._sync_seconds = sync_seconds
        self._pace = pace
        self._pausing: asyncio.TimerHandle | None = None
        """Set while the next group has to wait."""
        self.room = room or WaitForRoom()
        self.ahead = ahead
        self._disk = SlowDisk()
        self._loop = asyncio.get_running_loop()
        self._threads = LogThreads()
        self._group_thread: GroupThread | None = None
        """Writes large groups, if the loops in C are built."""
        self._aside: GroupAside | None = None
        """The group that it writes."""
        self._is_marking = False
        self._is_scheduled = False
        self._source = self._alone_from_ns = 0
        """The `id` of who brought changes last, and from when on that one counts as alone."""
        self._drains = 0
        """Callers that wait until everything is written: groups do not wait meanwhile."""
        self._has_started = False
        self._has_failed = False
        self._next_mark: asyncio.TimerHandle | None = None
        self._next_mark_sync: asyncio.TimerHandle | None = None
        self._next_sync: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self) -> None:
        """Start the threads; from now on groups are written."""
        self._has_started = True
        self._threads.start(self._work)
        self._group_thread = start_group_thread(self._loop)

    def kick(self, source: object = None) -> None:
        """Write what is pending: at once if `source` is alone, else after this turn of the loop."""
        now_ns = time.monotonic_ns()
        if id(source) != self._source:
            self._source, self._alone_from_ns = id(source), now_ns + ALONE_NS
        if self._may_begin and source is not None and now_ns >= self._alone_from_ns:
            self._guarded(self._begin)
        elif self._may_begin:
            self._is_scheduled = True
            self._loop.call_soon(self._guarded, self._begin)

    @property
    def _may_begin(self) -> bool:
        return self._has_started and not (
            self._cycle.job is not None or self._is_scheduled or self._has_failed
        )

    def halt(self) -> None:
        """Write no more groups: the server has failed, and what is pending may be wrong."""
        self._has_failed = True
        self._writer.mark_end()  # the timer for it does nothing any more
        self._idle.set()

    def sync_every(self, interval_s: float) -> None:
        """Sync now, and repeatedly until `stop` (durability `interval`)."""
        self._cycle.sync_soon()
        self.kick()
        self._next_sync = self._loop.call_later(interval_s, self.sync_every, interval_s)

    async def drain(self) -> None:
        """Return when nothing is pending or being written, or if the log has no room for it."""
        self._drains += 1
        if self._pausing is not None:
            self._pausing.cancel()
            self._pausing = None
            self._is_scheduled = False
        try:
            await self._drain()
        finally:
            self._drains -= 1

    async def _drain(self) -> None:
        while not self._has_failed and self._cycle.has_work:
            if self.room.full_why or not self._has_started:
                return
            self.kick()
            await asyncio.sleep(0)
            await self._idle.wait()

    def stop(self) -> None:
        """End the threads; sync what it has appended, unless it failed. A group that waits for room
        is dropped: nobody has seen it. Raises SyncFailedError, also if the disk does not answer.
        """
        self.room.cancel()
        for timer in (self._next_mark, self._next_mark_sync, self._next_sync, self._pausing):
            if timer is not None:
                timer.cancel()
        if not self._has_started:
            return
        self._writer.mark_end()  # the rest may fail
        self._threads.finish()
        has_ended, written = True, None
        if self._group_thread is not None:
            has_ended, written = self._group_thread.close(JOIN_S)
        if not (self._threads.join(JOIN_S) and has_ended):
            self._has_failed = True
            raise SyncFailedError(f"the log's disk has not answered for {JOIN_S:g} s")
        if written is not None and written.is_written and self._aside is not None:
            self._end_aside(self._aside, written)
        if not self._has_failed:
            self._writer.sync()
            self._writer.sync_mark()

    # -- on the loop -------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin what the log has to do next, unless it is busy. The loop does small groups."""
        self._is_scheduled = False
        if self._put_off():
            return
        job = None if self._has_failed else self._cycle.next_job()
        if job is None:
            return
        if self._is_paced and isinstance(job, WriteGroup):
            assert self._pace is not None, "asked there"
            self._pace.group_taken(len(job.group.payload))
        if not isinstance(job, WriteGroup) or not self._is_for_the_loop(job):
            self._give(job)
            self._tell_begun(job)
            return
        self._tell_begun(job)  # before the loop stands still in the sync
        try:
            self._write(job, self._sync_on_loop)
        except LogFullError as error:
            self._wait_for_room(job, error)
            return
        self._publish(job)
        if self.ahead.finds_room and self._device.room_bytes < self.ahead.room_bytes_min:
            self._reserve()

    def _tell_begun(self, job: Job) -> None:
        """Tell that a group is being written, if it is synced as well."""
        if self.events.has_replicas and isinstance(job, WriteGroup) and job.is_synced:
            self.events.begun(job.group)

    @property
    def _is_paced(self) -> bool:
        """Whether groups may have to wait."""
        return self._pace is not None and self._pace.paces and not self._drains

    def _put_off(self) -> bool:
        """Begin later if the next group has to wait; return whether it has to."""
        if self._pausing is not None:
            self._pausing.cancel()  # this may be another call than the one that it waits for
            self._pausing = None
        if not self._is_paced or not self._cycle.next_is_group:
            return False
        assert self._pace is not None, "asked above"
        pause_s = self._pace.pause_s()
        if pause_s:
            self._is_scheduled = True
            self._pausing = self._loop.call_later(pause_s, self._guarded, self._begin)
        return bool(pause_s)

    def _is_for_the_loop(self, job: WriteGroup) -> bool:
        record_bytes = RECORD_BYTES + len(job.group.payload)
        if job.rotates or record_bytes > INLINE_BYTES_MAX or self._disk.avoiding:
            return False
        # An append that extends the file would wait while zeros are being written.
        return not (self.ahead.is_reserving and record_bytes > self._device.room_bytes)

    def _sync_on_loop(self) -> None:
        if self._sync() >= SLOW_SYNC_NS:
            self._disk.was_slow()
        elif self._disk.is_wary:
            self._disk.was_fast()

    def _give(self, job: Job) -> None:
        """Let a thread do a job."""
        self._idle.clear()
        if isinstance(job, WriteGroup):
            self._disk.given()
            if self._begin_aside(job):
                return
            work = self._work_of(job)
        elif job is LogTask.ROTATE:
            self.ahead.rotating()
            work = Work(self._writer.rotate, self._rotated, job)
        else:
            work = Work(self._sync, partial(self._written, job), job)
        self._threads.jobs.put(work)

    def _work_of(self, job: WriteGroup) -> Work:
        return Work(partial(self._write, job, self._sync), partial(self._written, job), job)

    def _begin_aside(self, job: WriteGroup) -> bool:
        """Give a group to the thread that needs no interpreter lock, if that can write it."""
        # While zeros are written, no group may be, and the thread of Python does one at a time.
        if self._group_thread is None or self.ahead.is_reserving or not job.is_synced:
            return False
        self._aside = self._writer.begin_append(job.group)
        if self._aside is not None:
            done = partial(self._guarded, self._aside_done, job, self._aside)
            self._group_thread.give(self._aside.aside, done)
        return self._aside is not None

    def _aside_done(self, job: WriteGroup, group: GroupAside, written: Written) -> None:
        self._aside = None
        if written.is_written:
            self._end_aside(group, written)
            self._written(job, None)
        else:
            # The thread of Python does what can be done, or says what is wrong.
            self._threads.jobs.put(self._work_of(job))

    def _end_aside(self, group: GroupAside, written: Written) -> None:
        if written.sync_errno:
            group.aside.sync_failed(OSError(written.sync_errno, os.strerror(written.sync_errno)))
        self._sync_seconds.observe(written.sync_ns / 1e9)
        self._writer.end_append(group)

    def _written(self, job: Job, _: None) -> None:
        self._got_room()
        self._publish(job)
        self._go_on()

    def _rotated(self, segment: int) -> None:
        self._got_room()
        self.ahead.rotated()
        self._publish(LogTask.ROTATE)
        self.events.rotated(segment)
        self._go_on()

    def _got_room(self) -> None:
        """Tell that the disk has room again, if it was full."""
        if self.room.got_it():
            self.events.full("")

    def _go_on(self) -> None:
        """Continue after a job of the thread."""
        self._begin()
        if self._cycle.job is None:
            self._idle.set()

    def _reserve(self) -> None:
        # Publishing a group may have begun the next one.
        if not self.ahead.is_reserving and self._aside is None:
            self.ahead.is_reserving = True
            self._threads.jobs.put(Work(self._device.reserve, self.ahead.reserved))

    def _prepare(self) -> None:
        """Have more of the next segment prepared, if it is time."""
        if self.ahead.wants_prepared:
            self.ahead.is_preparing = True
            prepared = partial(self._guarded, self._prepared, self._device.prepared_bytes)
            self._loop.run_in_executor(None, self._device.prepare).add_done_callback(prepared)

    def _prepared(self, before_bytes: int, done: asyncio.Future[None]) -> None:
        self.ahead.prepared(before_bytes)
        done.result()

    def _wait_for_room(self, job: Job, error: LogFullError) -> None:
        """Retry a job later: the disk is full, and the log is as it was before."""
        attempt = partial(self._guarded, self._give, job)
        if self.room.retry(error, self._loop, attempt):
            self.events.full(self.room.full_why)
        self._idle.set()  # `drain` gives up

    def _publish(self, job: Job) -> None:
        published = self._cycle.done(job)
        if published.group is not None:
            self.events.published(published)
            if not self.ahead.is_preparing and self._device.current_bytes >= PREPARED_FROM_BYTES:
                self._prepare()
        if self._next_mark is None:  # a sync or a new segment moves the end on disk, too
            self._next_mark = self._loop.call_later(MARK_AFTER_S, self._guarded, self._mark)
        if self._next_mark_sync is None:
            self._next_mark_sync = self._loop.call_later(MARK_S, self._guarded, self._sync_mark)

    def _mark(self) -> None:
        """Mark the end of what is on disk."""
        self._next_mark = None
        self._writer.mark_end()

    def _sync_mark(self) -> None:
        """Sync the newest end mark, beside groups: nobody waits for it."""
        self._next_mark_sync = None
        self._writer.mark_end()
        if self._is_marking:
            self._next_mark_sync = self._loop.call_later(MARK_S, self._guarded, self._sync_mark)
        elif self._writer.has_unsynced_mark:
            self._is_marking = True
            self._threads.marks.put(Work(self._writer.sync_mark, self._marked))

    def _marked(self, _: None) -> None:
        self._is_marking = False

    def _guarded(self, step: Callable[..., None], *arguments: Any) -> None:
        """Run a step of the commit path. An unexpected exception ends the process, because writers
        would get no answer, or a wrong one.
        """
        if self._has_failed:
            return
        try:
            step(*arguments)
        except Exception as error:  # noqa: BLE001 - a named supervision point
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.halt()
        self.events.failed(error)

    # -- on a thread, or on the loop for small groups ----------------------------------------------

    def _work(self, jobs: queue.SimpleQueue[Work | None]) -> None:
        """Run on a thread: one job after another."""
        call_soon = self._loop.call_soon_threadsafe
        while (job := jobs.get()) is not None:
            try:
                result = job.work()
            except LogFullError as error:
                assert job.job is not None, "only jobs of the log take room"
                call_soon(self._guarded, self._wait_for_room, job.job, error)
            except Exception as error:  # noqa: BLE001 - a named supervision point
                # If the thread ended here, the loop would wait for it for ever.
                call_soon(self._fail, error)
            else:
                call_soon(self._guarded, job.then, result)

    def _write(self, job: WriteGroup, sync: Callable[[], object]) -> None:
        # The newest segment cannot change before: one job is under way at a time.
        writer, group = self._writer, job.group
        writer.append(group.number, group.payload, group.changes, sync_follows=job.is_synced)
        if job.is_synced:
            sync()

    def _sync(self) -> int:
        """Sync what was appended. Return how long it took, in nanoseconds."""
        began_ns = time.monotonic_ns()
        self._writer.sync_unmarked()
        took_ns = time.monotonic_ns() - began_ns
        self._sync_seconds.observe(took_ns / 1e9)
        return took_ns
