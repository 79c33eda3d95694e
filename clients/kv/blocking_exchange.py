"""Performs the calls of `SyncKv`: does over blocking sockets what a Call says.

One operation is under way at a time. While its answer takes long, threads ask other nodes for a
newer map (`clients.kv.map_fetches`).

Invariant: a connection with a reply under way is used by nobody else. If the operation goes
elsewhere, that connection is closed before the next use of its node.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple

from clients.address import ServerAddress
from clients.errors import DcpdError, OperationTimeoutError
from clients.kv.call import Call
from clients.kv.routing import (
    FETCH_STAGGER_S,
    PATIENCE_S,
    FetchMap,
    Place,
    Result,
    Router,
    Send,
    place_of,
)
from clients.link.blocking_link import TIMEOUT_MIN_S, SyncLink
from clients.link.topology import ClusterNode
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

if TYPE_CHECKING:
    from clients.kv.map_fetches import MapFetches

CONNECT_LIMIT_S: Final = 5.0
"""How long one connection attempt may take. Meanwhile nobody can be asked whether the partition has
moved, so this is less than the usual timeout of a call. Where other nodes are known, attempts begin
with PATIENCE_S, and the limit doubles up to this one."""
SLICE_S: Final = 0.02
"""While a thread asks another node for a newer map, the wait for an answer looks this often whether
that has ended."""

jitter: Final = Random().random  # noqa: S311 - not for secrets


class Started(NamedTuple):
    """An operation that was sent."""

    link: SyncLink
    end: Callable[[], Result]
    """Returns its result. May be called again after OperationTimeoutError."""


Begin = Callable[[Send, SyncLink], Started]
"""Sends an operation over a connection."""


class BlockingExchange:
    """See the module."""

    def __init__(self, address: ServerAddress, router: Router) -> None:
        self._address = address
        self._router = router
        self._links: dict[Place, SyncLink] = {}
        self._fetches: MapFetches | None = None

    def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def reach_one(self, deadline_s: float) -> None:
        """Connect to one of several servers that the user named."""
        if self._router.was_reached or not self._address.others:
            return
        from clients.link.first_sync_link import first_sync_link

        left_s = max(deadline_s - time.monotonic(), TIMEOUT_MIN_S)
        link = first_sync_link(self._address, min(left_s, CONNECT_LIMIT_S))
        place = link.address.host, link.address.port
        self._links[place] = link
        self._router.begin_at(place)

    def begin(self, send: Send, begin: Begin, deadline_s: float) -> Started | None:
        """Send an operation. If that fails, fill in its outcome and return None."""
        try:
            return begin(send, self._link(send.node, deadline_s, send.attempt))
        except OperationTimeoutError as error:
            # If the time is over, the call says what was not answered.
            if time.monotonic() < deadline_s:
                send.outcomes[0] = error
        except DcpdError as error:
            send.outcomes[0] = error
        return None

    def run(self, call: Call, begin: Begin, flight: tuple[Send, Started] | None = None) -> None:
        """Do what the call says until it is done. `flight` is under way already."""
        self._fetches = None  # what an earlier call asked for is not for this one
        while True:
            has_news = False
            for action in call.step(time.monotonic(), jitter()):
                if isinstance(action, FetchMap):
                    has_news = self._has_fetched(call, action) or has_news
                    continue
                started = self.begin(action, begin, call.deadline_s)
                if started is None:
                    call.finish(action, time.monotonic(), jitter())
                else:
                    flight = action, started
            if flight is not None and flight[0].is_abandoned:
                flight = None
            if call.is_done:
                return
            if not has_news and self._has_waited(call, flight):
                flight = None

    def _has_waited(self, call: Call, flight: tuple[Send, Started] | None) -> bool:
        """Wait until something has ended, or the call has to go on. Return whether the operation
        under way has ended.
        """
        fetches, until_s, has_ended = self._fetches, call.wake_s(), False
        is_fetching = fetches is not None and fetches.running > 0
        if flight is not None:
            if is_fetching:
                until_s = min(until_s, time.monotonic() + SLICE_S)
            has_ended = has_outcome(*flight, until_s)
            if has_ended:
                call.finish(flight[0], time.monotonic(), jitter())
            until_s = 0.0
        elif not is_fetching:
            time.sleep(max(0.0, until_s - time.monotonic()))
        if fetches is not None:
            for fetch, answer in fetches.take(until_s - time.monotonic()):
                call.mapped(fetch, answer, time.monotonic())
        return has_ended

    # -- maps ----------------------------------------------------------------------------------

    def _has_fetched(self, call: Call, fetch: FetchMap) -> bool:
        """Ask a node for its map: in a thread, or at once over a connection that is at hand. Return
        whether the call knows the answer already.
        """
        link = self._links.get(place_of(fetch.node))
        is_first = link is None and not self._router.was_reached
        if is_first or (link is not None and link.is_usable):
            limit_s = fetch.until_s if is_first else time.monotonic() + FETCH_STAGGER_S
            answer = self._fetched(fetch, min(limit_s, call.deadline_s))
            call.mapped(fetch, answer, time.monotonic())
            return True
        if self._fetches is None:
            from clients.kv.map_fetches import MapFetches

            self._fetches = MapFetches(self._address)
        self._fetches.start(fetch)
        return False

    def _fetched(self, fetch: FetchMap, until_s: float) -> bytes | DcpdError:
        """Return the configuration of a node, b"" if it has none."""
        try:
            link = self._link(fetch.node, until_s, 0)
            frame = link.request(Opcode.GET_CLUSTER_CONFIG)
        except DcpdError as error:
            return error
        return frame.value if frame.status == Status.OK else b""

    # -- connections ---------------------------------------------------------------------------

    def _link(self, node: ClusterNode, deadline_s: float, attempt: int) -> SyncLink:
        """Return the connection to a node, whose next request may take until the deadline.

        Raises ConnectError, OperationTimeoutError, AuthenticationError.
        """
        place = place_of(node)
        link = self._links.get(place)
        if link is not None and not link.is_usable:
            link.close()
            link = None
        if link is None:
            limit_s = max(deadline_s - time.monotonic(), TIMEOUT_MIN_S)
            limit_s = min(limit_s, CONNECT_LIMIT_S)
            if self._router.was_reached and len(self._router.nodes()) > 1:
                limit_s = min(limit_s, PATIENCE_S * (1 << min(attempt, 3)))
            self._links.pop(place, None)
            link = self._links[place] = SyncLink(self._address.at(*place), timeout_s=limit_s)
        link.set_deadline(deadline_s)
        return link


def has_outcome(send: Send, started: Started, until_s: float) -> bool:
    """Wait for the answer to what was sent; fill in its outcome. False: there is none yet."""
    started.link.set_deadline(until_s)
    try:
        send.outcomes[0] = started.end()
    except OperationTimeoutError:
        return False
    except DcpdError as error:
        send.outcomes[0] = error
    return True
