"""Connections that may be closed to make room, because nobody has logged in on them yet.

Called by the node and the TLS listener. A newcomer is

- a connection of a TLS port during its handshake;
- a connection on which nobody has logged in;
- if clients of this machine need no login: one that has not sent a complete packet yet.

At `connections_max`, a new connection replaces the oldest newcomer. So connections that never log
in keep nobody out, and connections of users are never closed for a newcomer.

Invariants
- newcomers are in the order of their arrival; a closed one is removed;
- if users have all `connections_max` connections, a new connection is closed itself.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol


class Newcomer(Protocol):
    """A connection, or a TLS handshake."""

    def abort(self, reason: str) -> None:
        """Close at once."""


class Newcomers:
    """See the module."""

    def __init__(self, connections_max: int) -> None:
        self.connections_max = connections_max
        self._line: OrderedDict[Newcomer, None] = OrderedDict()
        self.closed_total = 0
        """Newcomers that were closed to make room."""

    def __len__(self) -> int:
        """Return how many newcomers there are."""
        return len(self._line)

    def enter(self, newcomer: Newcomer, connections: int) -> None:
        """Add a newcomer; `connections` is the number of connections now, this one included."""
        self._line[newcomer] = None
        if connections <= self.connections_max:
            return
        oldest, _ = self._line.popitem(last=False)
        limit = f"{self.connections_max} connections are open, the limit"
        why = "" if oldest is newcomer else ", and of those without a login this one is the oldest"
        self.closed_total += 1
        oldest.abort(f"{limit}{why} (setting connections_max)")

    def leave(self, newcomer: Newcomer) -> None:
        """Remove a newcomer: it is gone or has logged in."""
        self._line.pop(newcomer, None)
