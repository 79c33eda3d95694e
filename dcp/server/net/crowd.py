"""Who is connected to the admin ports: how many, for how long, and who makes room. Pure.

One `Crowd` is shared by the admin ports of a node. Time is an argument (seconds of a clock that
never goes back).

Invariants
- at most `connections_max` connections are open, those in their TLS handshake included, and a new
  one always gets in: where a bound is reached, the connection that matters least is cut. So a
  health check has a place whoever else sits on the port;
- a connection that waits for its client has a deadline; one whose request is being worked on has
  none;
- an address has at most half of the connections, and of each kind of `Places`. Addresses of IPv6
  count by their /64, which usually belongs to one machine or one network;
- there are fewer `Places` than connections, in all and for an address. So there is always a
  connection that only waits for its client and can be cut: no answer is cut to make room.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from enum import Enum
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import Final, NamedTuple

from dcp.server.config.settings import ADMIN_CONNECTIONS_MIN


class Phase(Enum):
    """What a connection is doing; the value says what it waits for."""

    HANDSHAKE = "the end of the TLS handshake"
    REQUEST = "the whole header of a request"
    BODY = "the whole body of a request"
    IDLE = "another request"
    ANSWER = "our answer"
    REST = "the rest of a body that is not needed any more"
    UNREAD = "the client to read its answer"
    CLOSING = "the client to read the end of its answer"


_REQUEST_PHASES: Final = frozenset({Phase.HANDSHAKE, Phase.REQUEST, Phase.BODY, Phase.REST})


class PortLimits(NamedTuple):
    """Bounds and deadlines of the admin ports."""

    connections_max: int = 256
    """Setting admin_connections_max."""
    request_timeout_s: float = 10.0
    """For a TLS handshake, for a header, and for a body; setting handshake_timeout."""
    idle_timeout_s: float = 30.0
    """Between two requests of a connection."""
    unread_timeout_s: float = 300.0
    """To read what is buffered: 64 KiB, with TLS half a MiB. Somebody may page through a dump."""

    def deadlines(self) -> dict[Phase, float]:
        """Return how long a connection may be in a phase; those not named have no deadline."""
        return {
            **dict.fromkeys(_REQUEST_PHASES, self.request_timeout_s),
            Phase.IDLE: self.idle_timeout_s,
            Phase.UNREAD: self.unread_timeout_s,
            Phase.CLOSING: self.unread_timeout_s,
        }

    def late_text(self, phase: Phase) -> str:
        """Say why a connection is closed that was too long in a phase."""
        timeout_s = self.deadlines()[phase]
        setting = " (setting handshake_timeout)" if phase in _REQUEST_PHASES else ""
        return f"the server waited {timeout_s:g} s for {phase.value}{setting}"

    def crowded_text(self) -> str:
        """Say why a connection is closed to make room."""
        return (
            f"another one needed its place: there may be {self.connections_max} connections, and"
            f" {self.connections_max // 2} from one address (setting admin_connections_max)"
        )


def group_of(host: str) -> str:
    """Return what an address counts as: itself, or the /64 that it belongs to."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Network((int(address) >> 64 << 64, 64)))


class TooManyError(Exception):
    """There is no place for what a client wants; the text says how many are taken."""


class Places:
    """A bounded number of things under way, half of them at most for one address."""

    def __init__(self, what: str, places_max: int) -> None:
        assert places_max >= 2, "an address gets half of them"
        self._what = what
        self._max = places_max
        self._taken: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return how many places are taken."""
        return self._taken.total()

    def take(self, host: str) -> Callable[[], None]:
        """Take a place and return what gives it back. Raises TooManyError."""
        group = group_of(host)
        taken = self._taken.get(group, 0)
        if len(self) >= self._max or taken >= self._max // 2:
            raise TooManyError(
                f"{len(self)} {self._what} are under way, {taken} of them from this address;"
                f" {self._max} and {self._max // 2} are the limits"
                " (setting admin_connections_max)"
            )
        self._taken[group] = taken + 1

        def give_back() -> None:
            self._taken[group] -= 1
            if not self._taken[group]:
                del self._taken[group]

        return give_back


class Visitor:
    """One connection. The server sets `end`, which closes it after a deadline, and `cut`, which
    closes it at once to make room.
    """

    __slots__ = ("cut", "end", "group", "host", "phase", "since_s")

    def __init__(self, host: str, phase: Phase, now_s: float) -> None:
        self.host = host
        self.group = group_of(host)
        self.phase = phase
        self.since_s = now_s
        """When the phase began."""
        self.end: Callable[[], None] = _nothing
        self.cut: Callable[[], None] = _nothing


def _nothing() -> None:
    """A connection that is not served yet has nothing to close."""


class Crowd:
    """See the module."""

    def __init__(self, limits: PortLimits | None = None) -> None:
        self.limits = limits or PortLimits()
        size = self.limits.connections_max
        assert size >= ADMIN_CONNECTIONS_MIN, "the setting's minimum"
        self.requests = Places("requests", size * 3 // 8)
        """Logins that are checked, and requests that are worked on until their answer begins."""
        self.streams = Places("streams and dumps", size // 2)
        """Answers that take as long as the client and the node like."""
        self.entered = 0
        """Connections that ever were let in."""
        self._deadlines = self.limits.deadlines()
        self._visitors: dict[Visitor, None] = {}
        """In the order in which they came: a loop's clock may have coarse steps."""
        self._by_group: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return how many connections there are."""
        return len(self._visitors)

    def enter(self, host: str, phase: Phase, now_s: float) -> tuple[Visitor, Visitor | None]:
        """Let a connection in. Return it, and who has to make room: that one is to be cut."""
        visitor = Visitor(host, phase, now_s)
        leaver = self._least_needed(visitor.group)
        if leaver is not None:
            self.leave(leaver)
        self.entered += 1
        self._visitors[visitor] = None
        self._by_group[visitor.group] += 1
        assert len(self._visitors) <= self.limits.connections_max, "whoever is too many was cut"
        return visitor, leaver

    def leave(self, visitor: Visitor) -> None:
        """Forget a connection that is gone. Idempotent."""
        if visitor in self._visitors:
            del self._visitors[visitor]
            self._by_group[visitor.group] -= 1
            if not self._by_group[visitor.group]:
                del self._by_group[visitor.group]

    def moved(self, visitor: Visitor, phase: Phase, now_s: float) -> None:
        """Note what a connection does now. The deadline of a phase counts from its beginning."""
        if phase is not visitor.phase:
            visitor.phase = phase
            visitor.since_s = now_s

    def overdue(self, now_s: float) -> list[Visitor]:
        """Return the connections that have waited too long for their clients, to be ended."""
        return [
            visitor
            for visitor in self._visitors
            if now_s - visitor.since_s > self._deadlines.get(visitor.phase, math.inf)
        ]

    def _least_needed(self, group: str) -> Visitor | None:
        """Return who makes room for one more of a group, None where there is room.

        It is one that waits for its client, of the address with the most connections; of those the
        one that has waited longest.
        """
        size = self.limits.connections_max
        if self._by_group[group] >= size // 2:
            pool = [visitor for visitor in self._visitors if visitor.group == group]
        elif len(self._visitors) >= size:
            pool = list(self._visitors)
        else:
            return None
        return min(
            pool,
            key=lambda visitor: (
                visitor.phase is Phase.ANSWER,
                -self._by_group[visitor.group],
                visitor.since_s,
            ),
        )
