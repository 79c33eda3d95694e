"""The connections to the admin ports: how many, for how long, and which one makes room. Pure.

One `Crowd` is shared by the admin ports of a node. Time is an argument (seconds of a clock that
never goes back).

Invariants
- at most `connections_max` connections are open, TLS handshakes included, and a new one always gets
  in: at a limit, the least important connection is closed. So a health check gets in, even if
  somebody occupies the port;
- a connection that waits for its client has a deadline. One whose request is being handled has
  none;
- an address has at most half of the connections, and of each kind of `Places`. Addresses of IPv6
  count by their /64, which usually belongs to one machine or one network;
- there are fewer `Places` than connections, in total and per address. So there is always a
  connection that only waits for its client and can be closed: no answer is cut to make room.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from enum import Enum
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import Final, NamedTuple

from dcp.server.config.server_settings import ADMIN_CONNECTIONS_MIN


class Phase(Enum):
    """What a connection does; the value is the text for what it waits for."""

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
    """To read what is buffered: 64 KiB, with TLS 512 KiB. Somebody may page through a dump."""

    def deadlines(self) -> dict[Phase, float]:
        """Return how long a connection may be in each phase. Others have no deadline."""
        return {
            **dict.fromkeys(_REQUEST_PHASES, self.request_timeout_s),
            Phase.IDLE: self.idle_timeout_s,
            Phase.UNREAD: self.unread_timeout_s,
            Phase.CLOSING: self.unread_timeout_s,
        }

    def late_text(self, phase: Phase) -> str:
        """Return why a connection is closed that was in a phase for too long."""
        timeout_s = self.deadlines()[phase]
        setting = " (setting handshake_timeout)" if phase in _REQUEST_PHASES else ""
        return f"the server waited {timeout_s:g} s for {phase.value}{setting}"

    def crowded_text(self) -> str:
        """Return why a connection is closed to make room."""
        return (
            f"another one needed its place: the limits are {self.connections_max} connections"
            f" and {self.connections_max // 2} from one address (setting admin_connections_max)"
        )


def group_of(host: str) -> str:
    """Return the group of an address: itself, or its /64 for IPv6."""
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
    """There is no place left; the text says how many are taken."""


class Places:
    """A limited number of running requests or streams, at most half of them for one address."""

    def __init__(self, what: str, places_max: int) -> None:
        assert places_max >= 2, "an address gets half of them"
        self._what = what
        self._max = places_max
        self._taken: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return how many places are taken."""
        return self._taken.total()

    def take(self, host: str) -> Callable[[], None]:
        """Take a place; return the function that gives it back. Raises TooManyError."""
        group = group_of(host)
        taken = self._taken.get(group, 0)
        if len(self) >= self._max or taken >= self._max // 2:
            raise TooManyError(
                f"{len(self)} {self._what} are running, {taken} of them from this address;"
                f" the limits are {self._max} and {self._max // 2}"
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
    """Do nothing: a connection that is not served yet has nothing to close."""


class Crowd:
    """See the module."""

    def __init__(self, limits: PortLimits | None = None) -> None:
        self.limits = limits or PortLimits()
        size = self.limits.connections_max
        assert size >= ADMIN_CONNECTIONS_MIN, "the setting's minimum"
        self.requests = Places("requests", size * 3 // 8)
        """Logins that are being checked, and requests until their answer begins."""
        self.streams = Places("streams and dumps", size // 2)
        """Answers that may take very long."""
        self.entered = 0
        """Connections let in since the start."""
        self._deadlines = self.limits.deadlines()
        self._visitors: dict[Visitor, None] = {}
        """In the order of arrival, because a loop's clock may have coarse steps."""
        self._by_group: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return how many connections there are."""
        return len(self._visitors)

    def enter(self, host: str, phase: Phase, now_s: float) -> tuple[Visitor, Visitor | None]:
        """Let a connection in. Return it, and the one to close for it, if any."""
        visitor = Visitor(host, phase, now_s)
        leaver = self._least_needed(visitor.group)
        if leaver is not None:
            self.leave(leaver)
        self.entered += 1
        self._visitors[visitor] = None
        self._by_group[visitor.group] += 1
        assert len(self._visitors) <= self.limits.connections_max, "one was closed for it"
        return visitor, leaver

    def leave(self, visitor: Visitor) -> None:
        """Remove a connection. Idempotent."""
        if visitor in self._visitors:
            del self._visitors[visitor]
            self._by_group[visitor.group] -= 1
            if not self._by_group[visitor.group]:
                del self._by_group[visitor.group]

    def moved(self, visitor: Visitor, phase: Phase, now_s: float) -> None:
        """Note the phase of a connection. The deadline of a phase counts from its beginning."""
        if phase is not visitor.phase:
            visitor.phase = phase
            visitor.since_s = now_s

    def overdue(self, now_s: float) -> list[Visitor]:
        """Return the connections that have waited too long for their clients."""
        return [
            visitor
            for visitor in self._visitors
            if now_s - visitor.since_s > self._deadlines.get(visitor.phase, math.inf)
        ]

    def _least_needed(self, group: str) -> Visitor | None:
        """Return the connection that makes room for one more of a group, None if there is room.

        It is one that waits for its client. Among these it is of the address with the most
        connections, and has waited longest.
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
