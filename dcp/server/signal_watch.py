"""Signals of the process, and what is said to its operator on stderr.

Invariant: SIGTERM and SIGINT stop the node that runs, also when it is being started again as a
member of a cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from dcp.server.node import Node
    from dcp.server.observe.service_notices import ServiceNotices

STOP_LIMIT_S: Final = 9.5
"""A stop that takes longer is cut short. The next start recovers."""
KEPT: Final = {
    "commit": "Every answered write is on disk",
    "interval": "Writes that were answered before the last sync are on disk",
    "none": "Writes that were answered since the start may be lost",
}
"""What survives a failure of log or store, by durability."""
_FAILED: Final = 1
"""The exit code of a stop that was cut short."""


def say(text: str) -> None:
    """Write a message to the operator on stderr."""
    # The reader of our stderr may be gone.
    with contextlib.suppress(OSError):
        click.echo(f"dcpd: {text}", err=True)


class SignalWatch:
    """Waits for signals in its own thread, and stops the server at SIGTERM and SIGINT.

    The event loop would not see a signal while it hangs in a system call because a disk does not
    answer. Before there is a server, SIGTERM and SIGINT end the process at once. Create this before
    any other thread starts, because other threads would receive the signals.
    """

    _NUMBERS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

    def __init__(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, self._NUMBERS)
        self._node: Node | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._notices: ServiceNotices | None = None
        self.is_stopping = False
        """Whether a signal has asked for the end of the process."""
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def serve(self, node: Node, notices: ServiceNotices) -> None:
        """From now on SIGTERM and SIGINT stop this node. SIGHUP makes it read its files again."""
        self._loop = asyncio.get_running_loop()
        self._notices = notices
        self._node = node
        if self.is_stopping:  # the signal came while this node started
            self._stop()

    def _watch(self) -> None:
        while (number := signal.sigwait(self._NUMBERS)) == signal.SIGHUP and self._loop:
            assert self._node is not None
            self._loop.call_soon_threadsafe(self._node.reload)
        node, loop = self._node, self._loop
        if node is None or loop is None:
            os._exit(128 + number)  # nothing was answered yet
        self.is_stopping = True
        say("stopping; a second signal stops at once")
        if self._notices is not None:
            self._notices.stopping()
        loop.call_soon_threadsafe(self._stop)
        limit_s = STOP_LIMIT_S + node.ending.leave_s
        second = signal.sigtimedwait(self._NUMBERS - {signal.SIGHUP}, limit_s)
        if second is None:
            say(
                f"the stop took more than {limit_s:g} s and is cut short. "
                f"{KEPT[node.about.durability]}; the next start recovers it."
            )
        # At once is safe: what was answered is in the log, as after SIGKILL.
        os._exit(_FAILED if second is None else 128 + second.si_signo)

    def _stop(self) -> None:
        """Stop the node that runs now: it may have been started again meanwhile."""
        node = self._node
        assert node is not None
        task = asyncio.get_running_loop().create_task(node.stop())
        task.add_done_callback(_retrieved)  # dcp.server.main tells how it ended


def _retrieved(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
