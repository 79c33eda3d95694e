"""The events of a stream, as `clients.streaming.stream_connection` reports them. Pure.

Opened | RollbackAsked | Moved | Postponed | Ahead | Refused      answer to a stream request
Ended                                                             end of an open stream
"""

from __future__ import annotations

from typing import NamedTuple

from clients.errors import StatusError
from clients.position import Versions
from clients.streaming.verdict import Verdict


class Opened(NamedTuple):
    """The server accepted. Its failover log replaces the client's."""

    versions: Versions


class RollbackAsked(NamedTuple):
    """The client has changes that are not in the server's history, and must roll back."""

    seqno: int
    """Roll back to this seqno or below."""
    versions: Versions
    """The server's failover log; () if the answer does not contain it."""


class Moved(NamedTuple):
    """The node does not serve the partition. `config`: the configuration in its answer, or b""."""

    config: bytes


class Postponed(NamedTuple):
    """The server cannot do it now."""

    error: StatusError


class Ahead(NamedTuple):
    """The position is above the server's high seqno (ERANGE)."""

    error: StatusError


class Refused(NamedTuple):
    """The server refused the request for good."""

    error: StatusError


class Ended(NamedTuple):
    """An open stream ended."""

    reason: int
    verdict: Verdict


StreamOutcome = Opened | RollbackAsked | Moved | Postponed | Ahead | Refused | Ended
