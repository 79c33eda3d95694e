"""What answers to stream requests and ends of streams mean: verdicts, and events with them. Pure.

Opened | RollbackAsked | Moved | Postponed | Ahead | Damaged | Refused    answer to a stream request
Ended                                                                     end of an open stream

There is one table for statuses and one for end reasons. What is not in its table is REFUSED.
`clients.streaming.stream_connection` reports the events.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Final, NamedTuple

from clients.errors import TEMPORARY_STATUSES, StatusError
from clients.position import Versions
from dcp.wire.message import EndReason
from dcp.wire.status import Status

_END_REASONS: Final = frozenset(EndReason)


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


class Damaged(NamedTuple):
    """The server cannot read what it has stored of the partition (EINTERNAL). Another copy may."""

    error: StatusError


class Refused(NamedTuple):
    """The server refused the request for good."""

    error: StatusError


class Ended(NamedTuple):
    """An open stream ended."""

    reason: int
    verdict: Verdict


StreamOutcome = Opened | RollbackAsked | Moved | Postponed | Ahead | Damaged | Refused | Ended


class Verdict(Enum):
    """What a status or end reason means for a stream."""

    OPENED = auto()
    """The server streams from the requested position."""
    BRANCHED = auto()
    """History branched: the client must roll back, or learns that by a new request."""
    MOVED = auto()
    """Another node serves the partition."""
    LATER = auto()
    """The same request may work after a pause."""
    AHEAD = auto()
    """The position is above the server's high seqno."""
    DONE = auto()
    """The stream reached its requested end."""
    EMPTY = auto()
    """All requested collections were dropped, so nothing more can come."""
    DAMAGED = auto()
    """The server could not read its stored data. The cause may be temporary."""
    REFUSED = auto()
    """The server refused for good, or sent an unknown status or reason."""


STATUS_VERDICTS: Final[Mapping[int, Verdict]] = MappingProxyType(
    {
        Status.OK: Verdict.OPENED,
        Status.ROLLBACK: Verdict.BRANCHED,
        Status.NOT_MY_VBUCKET: Verdict.MOVED,
        Status.ERANGE: Verdict.AHEAD,
        Status.EINTERNAL: Verdict.DAMAGED,
        **dict.fromkeys(TEMPORARY_STATUSES, Verdict.LATER),
    }
)
"""Status of an answer to DCP_STREAM_REQ."""
END_VERDICTS: Final[Mapping[int, Verdict]] = MappingProxyType(
    {
        EndReason.OK: Verdict.DONE,
        EndReason.FILTER_EMPTY: Verdict.EMPTY,
        EndReason.ROLLBACK: Verdict.BRANCHED,
        EndReason.STATE_CHANGED: Verdict.MOVED,
        EndReason.DISCONNECTED: Verdict.LATER,
        EndReason.TOO_SLOW: Verdict.LATER,
        EndReason.BACKFILL_FAILED: Verdict.DAMAGED,
    }
)
"""Reason of a DCP_STREAM_END."""


def verdict_of_status(status: int, body_bytes: int) -> Verdict:
    """Return what an answer with a body of `body_bytes` means."""
    verdict = STATUS_VERDICTS.get(status, Verdict.REFUSED)
    if verdict is Verdict.BRANCHED and body_bytes < 8:
        return Verdict.REFUSED  # the seqno to roll back to is missing
    return verdict


def verdict_of_end(reason: int) -> Verdict:
    """Return what a stream end means."""
    return END_VERDICTS.get(reason, Verdict.REFUSED)


def reason_name(reason: int) -> str:
    """Return the name of an end reason, "?" if it is unknown."""
    return EndReason(reason).name if reason in _END_REASONS else "?"
