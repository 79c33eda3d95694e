"""Connects to the first of several nodes that answers, over blocking sockets.

A blocking connection can wait for one node only, so each has a thread. A node that is silent costs
STAGGER_S. With one node there is no thread.

Invariant: a connection that is not returned is closed, by its thread. The thread ends with the
timeout, whatever the node does.
"""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Final

from clients.address import ServerAddress
from clients.errors import TRANSIENT, DcpdError, OperationTimeoutError, none_answered
from clients.link.blocking_link import SyncLink

STAGGER_S: Final = 0.25
"""As in `clients.link.first_answer`, which needs asyncio."""


def first_sync_link(address: ServerAddress, timeout_s: float) -> SyncLink:
    """Return a connection to one of the address's nodes; its `address` names that one.

    Raises ConnectError if none answers. An error that is not transient is raised at once.
    """
    if not address.others:
        return SyncLink(address, timeout_s=timeout_s)
    race = _Race()
    try:
        return race.run(address, timeout_s)
    finally:
        race.end()


class _Race:
    """See the module."""

    def __init__(self) -> None:
        self._ended: SimpleQueue[SyncLink | DcpdError] = SimpleQueue()
        self._lock = Lock()
        self._is_over = False

    def run(self, address: ServerAddress, timeout_s: float) -> SyncLink:
        deadline_s = time.monotonic() + timeout_s
        failure: DcpdError = OperationTimeoutError(
            f"none of the {len(address.places)} nodes answered within {timeout_s:g} s",
            node=address.node,
        )
        left, running = list(address.places), 0
        while left or running:
            now_s = time.monotonic()
            if left:
                self._start(address.at(*left.pop(0)), max(deadline_s - now_s, STAGGER_S))
                running += 1
            pause_s = STAGGER_S if left else max(0.0, deadline_s - now_s)
            try:
                ended = self._ended.get(timeout=pause_s)
            except Empty:
                if not left:
                    raise failure from None
                continue
            running -= 1
            if isinstance(ended, SyncLink):
                return ended
            if not isinstance(ended, TRANSIENT):
                raise ended
            failure = none_answered(ended, address.places)
        raise failure

    def end(self) -> None:
        """Close what has been connected. What is connected later is closed by its thread."""
        with self._lock:
            self._is_over = True
        while not self._ended.empty():
            ended = self._ended.get()
            if isinstance(ended, SyncLink):
                ended.close()

    def _start(self, address: ServerAddress, timeout_s: float) -> None:
        name = f"dcpd-dial-{address.port}"
        Thread(target=self._dial, args=(address, timeout_s), name=name, daemon=True).start()

    def _dial(self, address: ServerAddress, timeout_s: float) -> None:
        try:
            ended: SyncLink | DcpdError = SyncLink(address, timeout_s=timeout_s)
        except DcpdError as error:
            ended = error
        with self._lock:
            if not self._is_over:
                self._ended.put(ended)
            elif isinstance(ended, SyncLink):
                ended.close()
