"""The events of a stream, as `clients.streaming.stream_connection` tells them. Pure.

Opened | RollbackAsked | Moved | Postponed | Ahead | Refused      answer to a stream request
Ended                                                             end of an open stream
"""

from __future__ import annotations

from typing import NamedTuple

from clients.errors import StatusError
from clients.position import Versions
from clients.streaming.verdict import Verdict


class Opened(NamedTuple):
    """The server streams. Its failover log replaces what the client knew."""

    versions: Versions


class RollbackAsked(NamedTuple):
    """The client holds what the server does not, and has to go back."""

    seqno: int
    """To this seqno or below."""
    versions: Versions
    """The server's failover log, () where it does not come with the answer."""


class Moved(NamedTuple):
    """The node does not have the partition. `config`: the configuration that it sent, or b""."""

    config: bytes


class Postponed(NamedTuple):
    """The server cannot do it now."""

    error: StatusError


class Ahead(NamedTuple):
    """The position lies above what the server has (ERANGE)."""

    error: StatusError


class Refused(NamedTuple):
    """The server will not stream the partition from there, however often it is asked."""

    error: StatusError


class Ended(NamedTuple):
    """An open stream ended."""

    reason: int
    verdict: Verdict


StreamOutcome = Opened | RollbackAsked | Moved | Postponed | Ahead | Refused | Ended
