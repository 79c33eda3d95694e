"""Connections that may make room for others: nobody has logged in on them yet.

Called by the node and the TLS listener. A newcomer is

- a connection of a TLS port whose handshake is under way;
- a connection on which nobody has logged in;
- where this machine's clients need no login: one that has not sent a complete packet yet.

Where `connections_max` is reached, a new connection takes the place of the oldest newcomer. So
connections that never log in keep nobody out; those of users are never closed for a newcomer.

Invariants
- newcomers are in the order of their arrival; one that was closed is none any more;
- with `connections_max` connections of users, whoever comes is closed itself.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol


class Newcomer(Protocol):
    """A connection, or one to be."""

    def abort(self, reason: str) -> None:
        """Close at once."""


class Newcomers:
    """See the module."""

    def __init__(self, connections_max: int) -> None:
        self._connections_max = connections_max
        self._line: OrderedDict[Newcomer, None] = OrderedDict()
        self.closed_total = 0
        """Newcomers that were closed for others."""

    def __len__(self) -> int:
        """Return how many newcomers there are."""
        return len(self._line)

    def enter(self, newcomer: Newcomer, connections: int) -> None:
        """Take one in that has just arrived; there are so many connections now, it included."""
        self._line[newcomer] = None
        if connections <= self._connections_max:
            return
        oldest, _ = self._line.popitem(last=False)
        limit = f"{self._connections_max} connections are open, the limit"
        why = "" if oldest is newcomer else ", and of those without a login this one is the oldest"
        self.closed_total += 1
        oldest.abort(f"{limit}{why} (setting connections_max)")

    def leave(self, newcomer: Newcomer) -> None:
        """A newcomer is gone, or has logged in."""
        self._line.pop(newcomer, None)
