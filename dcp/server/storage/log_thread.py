"""The threads of the log: one without the interpreter lock for large groups, two of Python.

A thread of Python needs the interpreter lock after each system call, and waits for it while the
event loop works: three times for each group. The loops in C have a thread that does not
(`vbucket.native.log_thread`). The loop gives it one group at a time, and is woken through a
descriptor. Of the threads of Python one does all other jobs of the log, and one syncs its end mark.

Invariants
- one group at a time, from `give` to the call of its `then` or to `close`;
- what that thread could not write or sync is not tried again here: the caller learns of it;
- a thread of Python does one thing at a time, in the order in which it got them.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from dcp.core.groups import Job
from vbucket.log.device import AppendAside
from vbucket.native import log_thread

if TYPE_CHECKING:
    from vbucket.native.loops import LogThread


class Written(NamedTuple):
    """What became of a group."""

    is_written: bool
    """Whether all of it was written. If not, a part may be, and nothing was synced."""
    sync_errno: int
    """Why it could not be synced; 0: it is on disk."""
    sync_ns: int


class GroupThread:
    """See the module. Lives on one event loop; made by `start_group_thread`, ended by `close`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: LogThread, done_fd: int) -> None:
        self._loop = loop
        self._thread = thread
        self._done_fd = done_fd
        self._then: Callable[[Written], None] | None = None
        loop.add_reader(done_fd, self._done)

    def give(self, aside: AppendAside, then: Callable[[Written], None]) -> None:
        """Have a group written and synced; `then` is called on the loop."""
        assert self._then is None, "one group at a time"
        self._then = then
        self._thread.give(aside.fd, aside.sync_fd, aside.data, aside.at)

    def close(self, seconds: float) -> tuple[bool, Written | None]:
        """End the thread after its group; `then` is not called any more. Return whether it has
        ended in time (if not, the disk does not answer), and what became of the group under way.
        """
        self._loop.remove_reader(self._done_fd)
        written = None
        if self._then is not None and self._thread.wait(seconds):
            self._then = None
            written = self._take()
        has_ended = self._thread.close(0 if self._then else seconds)
        if has_ended:
            os.close(self._done_fd)
        # What the disk answered only now is not known: as if it had not answered.
        return has_ended and self._then is None, written

    def _done(self) -> None:
        os.eventfd_read(self._done_fd)
        then, self._then = self._then, None
        assert then is not None
        then(self._take())

    def _take(self) -> Written:
        is_written, _, sync_errno, sync_ns = self._thread.take()
        return Written(is_written, sync_errno, sync_ns)


def start_group_thread(loop: asyncio.AbstractEventLoop) -> GroupThread | None:
    """Start the thread. None: the loops are not built, or the system has no such thread."""
    if not hasattr(os, "eventfd"):
        return None
    try:
        done_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    except OSError:
        return None  # no descriptor is left; the thread of Python writes the log
    thread = log_thread(done_fd)
    if thread is None:
        os.close(done_fd)
        return None
    return GroupThread(loop, thread, done_fd)


class Work(NamedTuple):
    """Work for a thread of Python, and what the loop does with the result."""

    work: Callable[[], Any]
    then: Callable[[Any], None]
    job: Job | None = None
    """The job of the cycle, which is repeated if the disk is full."""


class LogThreads:
    """The threads of Python. See the module."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self.marks: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[queue.SimpleQueue[Work | None]], None]) -> None:
        """Start them. `work` takes from its queue until it gets None."""
        for name, queued in (("log", self.jobs), ("log mark", self.marks)):
            thread = threading.Thread(target=work, args=(queued,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def finish(self) -> None:
        """Have them end after what they got."""
        self.jobs.put(None)
        self.marks.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the end of each, for so long; return whether all have ended."""
        for thread in self._threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)
