"""Asks nodes for the cluster's map in threads, beside a blocking client that waits for an answer.

    fetches = MapFetches(address)
    fetches.start(fetch)                     # a FetchMap of clients.kv.call
    for fetch, answer in fetches.take(wait_s): call.mapped(fetch, answer, now_s)

A node that stands still must not keep the client from asking another one. So each request has a
thread and a connection of its own. Both end with the time limit of the request. There are few of
them: the router bounds how often a client asks.
"""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from threading import Thread

from clients.address import ServerAddress
from clients.errors import DcpdError
from clients.kv.routing import FetchMap
from clients.link.blocking_link import TIMEOUT_MIN_S, SyncLink

Answer = tuple[FetchMap, bytes | DcpdError]


class MapFetches:
    """See the module."""

    def __init__(self, address: ServerAddress) -> None:
        self.running = 0
        """Requests whose end was not taken."""
        self._address = address
        self._ended: SimpleQueue[Answer] = SimpleQueue()

    def start(self, fetch: FetchMap) -> None:
        """Ask a node for its map."""
        self.running += 1
        name = f"dcpd-map-{fetch.node.kv_port}"
        Thread(target=self._run, args=(fetch,), name=name, daemon=True).start()

    def take(self, wait_s: float) -> list[Answer]:
        """Return the requests that have ended. If none has, wait for one, up to `wait_s`."""
        answers: list[Answer] = []
        while len(answers) < self.running:
            try:
                wait_now_s = 0.0 if answers else max(0.0, wait_s)
                answers.append(self._ended.get(timeout=wait_now_s))
            except Empty:
                break
        self.running -= len(answers)
        return answers

    def _run(self, fetch: FetchMap) -> None:
        self._ended.put((fetch, fetched(self._address, fetch)))


def fetched(address: ServerAddress, fetch: FetchMap) -> bytes | DcpdError:
    """Return the configuration of a node, b"" if it has none, over a new connection."""
    left_s = max(fetch.until_s - time.monotonic(), TIMEOUT_MIN_S)
    try:
        with SyncLink(address.at(*fetch.node.place), timeout_s=left_s) as link:
            link.set_deadline(fetch.until_s)
            return link.fetch_config()
    except DcpdError as error:
        return error
