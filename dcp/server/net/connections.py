"""The open key-value connections, and the limits on all of them together.

A connection adds and removes itself. The commit path releases answers here, the upkeep calls
`tick`, a stop finishes or aborts all, and operations look for streams.

Invariants
- a connection is in `open` from `connection_made` to `connection_lost`;
- subsets of `open`: `waiting`, connections with answers that wait for a commit; `feeding`, those of
  replicas' nodes; `awaiting_arrival`, those whose next request waits for a partition; `watched`,
  those that stream, have TLS, or were sent much since their last turn;
- a TLS handshake counts as a connection from its accept on, but is not in `open`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, Protocol

from dcp.server.access.access import Access
from dcp.server.access.logins import PeerLogins
from dcp.server.config.settings import Settings
from dcp.server.net.held_bytes import HeldBytes, Holder, receive_buffers, send_buffers
from dcp.session.session import Session
from dcp.session.text import TextSession

SOON_TICKS: Final = 4
"""A connection that waits for a commit, or is watched, has a turn within so many: a second."""
LATE_TICKS: Final = 16
"""The same for all others: the deadlines of 10,000 may be noticed four seconds late. Mostly, a turn
costs the reading of a connection's memory: 5 % of a core if each of 10,000 has one a second.
"""
TURN_MIN: Final = 250
"""Connections that have their turn in a tick, if there are as many."""
TICKED_AT_ONCE: Final = 50
"""After that many the loop does what has come meanwhile."""
LARGE_BYTES: Final = 64 << 10
"""Answers of a connection, at a time, that count as large."""
LARGE_TURN_BYTES: Final = 1 << 20
"""Large answers that are sent in one turn of the loop; the last one may exceed it. A MiB takes a
millisecond.
"""


class Newcomers:
    """Connections that may be closed to make room, because nobody has logged in on them yet.

    A newcomer is

    - a connection of a TLS port during its handshake;
    - a connection on which nobody has logged in;
    - if clients of this machine need no login: one that has not sent a complete packet yet.

    At `connections_max`, a new connection replaces the oldest newcomer. So connections that never
    log in keep nobody out, and connections of users are never closed for a newcomer.

    Invariants
    - newcomers are in the order of their arrival; a closed one is removed;
    - if users have all `connections_max` connections, a new connection is closed itself.
    """

    def __init__(self, connections_max: int) -> None:
        self.connections_max = connections_max
        self._line: OrderedDict[Holder, None] = OrderedDict()
        self.closed_total = 0
        """Newcomers that were closed to make room."""

    def __len__(self) -> int:
        """Return how many newcomers there are."""
        return len(self._line)

    def enter(self, newcomer: Holder, connections: int) -> None:
        """Add a newcomer; `connections` is the number of connections now, this one included."""
        self._line[newcomer] = None
        if connections <= self.connections_max:
            return
        oldest, _ = self._line.popitem(last=False)
        limit = f"{self.connections_max} connections are open, the limit"
        why = "" if oldest is newcomer else ", and of those without a login this one is the oldest"
        self.closed_total += 1
        oldest.abort(f"{limit}{why} (setting connections_max)")

    def leave(self, newcomer: Holder) -> None:
        """Remove a newcomer: it is gone or has logged in."""
        self._line.pop(newcomer, None)


class OpenConnection(Holder, Protocol):
    """What other parts use of a connection (dcp.server.net.connection)."""

    session: Session | TextSession
    logins: PeerLogins
    """Its logins, and the address of its peer."""

    def data_received(self, data: bytes) -> None:
        """Handle received bytes."""

    def rights_changed(self, *, may_stream: bool) -> None:
        """React to changed rights of the user; the session has the new ones."""

    def release(self) -> bool:
        """Send the answers that may leave after a commit; return whether any still wait."""

    def depose(self, vb_ids: tuple[int, ...]) -> None:
        """Replace the answers that wait for a commit in partitions with another master now."""

    def tell_map(self) -> None:
        """Push the newest map to a client that asked for that."""

    def pump_now(self) -> None:
        """Send the stream messages that are scheduled."""

    def tick(self, now_ns: int) -> None:
        """Let time pass; monotonic nanoseconds."""

    def writers_may_go_on(self) -> None:
        """Resume commands that write: there is room, or they are refused."""

    def go_on(self) -> None:
        """Resume if the next request waited for a partition: it may have arrived."""

    def finish(self, reason: str) -> None:
        """Close once everything that was received is answered."""


class _Turns:
    """Gives each of many connections a turn within so many ticks."""

    def __init__(self, ticks: int) -> None:
        self._ticks = ticks
        self._left: list[OpenConnection] = []
        """Those that have not had their turn yet since all had one."""

    def take(self, connections: set[OpenConnection]) -> list[OpenConnection]:
        """Return whose turn it is in this tick; some may be closed."""
        if not self._left:
            self._left = list(connections)
        count = max(TURN_MIN, -(-len(connections) // self._ticks))
        turn, self._left = self._left[:count], self._left[count:]
        return turn


class AwaitingArrival:
    """Connections whose next request waits for a partition that is handed over to this node.

    Each goes on when partitions have come, and when its time is over. A timer may outlast its wait:
    then a later wait is looked at early, and goes on.
    """

    def __init__(self) -> None:
        self._waiting: set[OpenConnection] = set()
        self._timers: dict[OpenConnection, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._waiting)

    def add(self, connection: OpenConnection, wait_s: float) -> None:
        """A connection waits, for so long at most."""
        self._waiting.add(connection)
        if connection not in self._timers:
            call_later = asyncio.get_running_loop().call_later
            self._timers[connection] = call_later(wait_s, self._over, connection)

    def _over(self, connection: OpenConnection) -> None:
        del self._timers[connection]
        connection.go_on()

    def arrived(self) -> None:
        """Partitions are served now, or will not be served soon: resume all."""
        waiting, self._waiting = self._waiting, set()
        for connection in waiting:
            connection.go_on()

    def leave(self, connection: OpenConnection) -> None:
        """Forget a connection: it is closed."""
        self._waiting.discard(connection)
        if (timer := self._timers.pop(connection, None)) is not None:
            timer.cancel()


class LargeAnswers:
    """Lets connections that get large answers take turns, so others wait for about one such answer.

    Copying an answer of 20 MiB takes 15 ms. If many are asked for at the same time, each turn of
    the loop answers some of them, and small requests in between.

    Invariants
    - only connections wait whose last answers were large;
    - of one that waits, nothing more is read.
    """

    def __init__(self) -> None:
        self.is_spent = False
        """Whether this turn of the loop has sent enough large answers."""
        self.waiting: dict[OpenConnection, bytes] = {}
        """Connection -> what was received, and waits for its turn."""
        self._recent: set[OpenConnection] = set()
        self._sent_bytes = 0

    def sent(self, connection: OpenConnection, size_bytes: int) -> None:
        """A connection was sent answers of LARGE_BYTES or more."""
        if not self._sent_bytes:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._sent_bytes += size_bytes
        self.is_spent = self._sent_bytes >= LARGE_TURN_BYTES
        self._recent.add(connection)

    def _next_turn(self) -> None:
        self._sent_bytes, self.is_spent = 0, False
        while self.waiting and not self.is_spent:
            connection = next(iter(self.waiting))
            connection.data_received(self.take(connection))

    def takes_part(self, connection: OpenConnection) -> bool:
        """Return whether it gets large answers: where a turn is spent, it waits for the next."""
        return connection in self._recent

    def keep(self, connection: OpenConnection, data: bytes) -> bool:
        """Keep what was received if it has to wait; return whether it has."""
        if connection in self.waiting:
            self.waiting[connection] += data
        elif self.is_spent and connection in self._recent:
            self.waiting[connection] = data
        else:
            return False
        return True

    def take(self, connection: OpenConnection) -> bytes:
        """Return what has waited, b"" if nothing has; its next answers may be small."""
        self._recent.discard(connection)
        return self.waiting.pop(connection, b"")


class Connections:
    """See the module. Lives on one event loop."""

    def __init__(self, settings: Settings) -> None:
        self.open: set[OpenConnection] = set()
        self.waiting: set[OpenConnection] = set()
        self.watched: set[OpenConnection] = set()
        self.feeding: set[OpenConnection] = set()
        self.awaiting_arrival = AwaitingArrival()
        self.large_answers = LargeAnswers()
        self.pumping: list[OpenConnection] = []
        """Those that send stream messages in the next turn of the loop: `pump_now` is called."""
        self._soon, self._late = _Turns(SOON_TICKS), _Turns(LATE_TICKS)
        self._handshakes: set[Holder] = set()
        self.newcomers = Newcomers(settings.connections_max)
        self.receive_buffers: HeldBytes = receive_buffers(settings.receive_buffers_bytes_max)
        self.send_buffers: HeldBytes = send_buffers(settings.send_buffers_bytes_max)
        self.opened_total = 0
        self._why_over = ""
        """Why each connection that is opened now is closed at once; "": it is not."""
        self._all_gone = asyncio.Event()

    def __len__(self) -> int:
        """Return how many connections are open, without handshakes."""
        return len(self.open)

    def __iter__(self) -> Iterator[OpenConnection]:
        """Iterate over the connections that are open now; they may close meanwhile."""
        return iter(tuple(self.open))

    # -- called by connections and handshakes ------------------------------------------------------

    def opened(self, connection: OpenConnection) -> None:
        """Add a connection. If there are too many, the oldest newcomer is closed, or this one. One
        that was accepted before a stop, and comes after it, is closed, too.
        """
        self.open.add(connection)
        self.opened_total += 1
        self.enter_newcomer(connection)
        if self._why_over:
            connection.abort(self._why_over)

    def closed(self, connection: OpenConnection) -> None:
        """Remove a connection."""
        self.open.discard(connection)
        self.waiting.discard(connection)
        self.watched.discard(connection)
        self.feeding.discard(connection)
        self.awaiting_arrival.leave(connection)
        self.large_answers.take(connection)
        self.newcomers.leave(connection)
        self.receive_buffers.forget(connection)
        self.send_buffers.forget(connection)
        if not self.open:
            self._all_gone.set()

    def enter_newcomer(self, newcomer: Holder) -> None:
        """Count a connection as one without a login."""
        self.newcomers.enter(newcomer, len(self.open) + len(self._handshakes))

    def handshake_began(self, handshake: Holder) -> None:
        """Count a TLS handshake, or close it if there is no room for it."""
        self._handshakes.add(handshake)
        self.enter_newcomer(handshake)

    def handshake_ended(self, handshake: Holder) -> None:
        """Remove a handshake: it has become a connection or has failed."""
        self._handshakes.discard(handshake)
        self.newcomers.leave(handshake)
        self.receive_buffers.forget(handshake)

    # -- for all of them ---------------------------------------------------------------------------

    def release(self) -> None:
        """Send the answers that may leave after a commit."""
        waiting = self.waiting
        if waiting:
            self.waiting = {connection for connection in waiting if connection.release()} | (
                self.waiting - waiting
            )

    def loaded(self) -> None:
        """Documents of a restore are in the store: send their answers, and take more."""
        self.release()
        self.writers_may_go_on()

    def feed(self) -> None:
        """Send what is scheduled for replicas, without waiting for the next turn of the loop."""
        for connection in tuple(self.feeding):
            connection.pump_now()

    def arrived(self) -> None:
        """Partitions are served now, or will not be served soon: resume those that waited."""
        self.awaiting_arrival.arrived()

    def tell_map(self) -> None:
        """Push the newest map to all clients that asked for that."""
        for connection in self:
            connection.tell_map()

    def tick(self, now_ns: int) -> None:
        """Let time pass for some connections; monotonic nanoseconds. See SOON_TICKS, LATE_TICKS."""
        soon = self._soon.take(self.watched | self.waiting)
        self._tick_some(soon + self._late.take(self.open), now_ns)

    def _tick_some(self, turn: list[OpenConnection], now_ns: int) -> None:
        for connection in turn[:TICKED_AT_ONCE]:
            if connection in self.open:
                connection.tick(now_ns)
        if rest := turn[TICKED_AT_ONCE:]:
            asyncio.get_running_loop().call_soon(self._tick_some, rest, now_ns)

    def apply_rights(self, access: Access) -> None:
        """Give every open connection the rights that its user has now."""
        if access.take_users_revision():
            for connection in self:
                may_stream = access.apply_rights(connection.session.state)
                if may_stream is not None:
                    connection.rights_changed(may_stream=may_stream)

    def writers_may_go_on(self) -> None:
        """Resume commands that write."""
        for connection in self:
            connection.writers_may_go_on()

    def finish(self, reason: str) -> None:
        """Close each connection once everything that it has sent is answered."""
        for connection in self:
            connection.finish(reason)

    def abort(self, reason: str) -> None:
        """Close all connections now, and each that is opened later."""
        self._why_over = reason
        for connection in self:
            connection.abort(reason)

    async def until_all_gone(self) -> None:
        """Return once no connection is open."""
        if self.open:
            self._all_gone.clear()
            await self._all_gone.wait()
