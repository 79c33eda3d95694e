"""One round of going back: where to ask again after the server said ROLLBACK. Pure.

Invariants
- every round goes down, in seqno or in the number of versions, so the rounds are bounded;
- a client keeps nothing above the seqno up to which both histories agree, whatever the server says:
  `failover.rollback` compares the client's versions with the server's failover log.
"""

from __future__ import annotations

from clients.errors import StreamViolationError
from clients.position import Position, Versions, rolled_back
from clients.streaming.outcome import RollbackAsked
from failover.history import FailoverLog
from failover.rollback import common_seqno


def log_of(versions: Versions, vb_id: int | None = None) -> FailoverLog:
    """Return a failover log that a server sent. Raises StreamViolationError if it cannot be one."""
    try:
        return FailoverLog.from_document(versions)
    except ValueError as error:
        raise StreamViolationError(f"the server sent a bad {error}", vb_id=vb_id) from error


def agreed_seqno(versions: Versions, seqno: int, server: Versions, vb_id: int | None = None) -> int:
    """Return up to which seqno a client at `seqno` and a server agree.

    Raises StreamViolationError if `server` cannot be a failover log.
    """
    return common_seqno(versions, seqno, log_of(server, vb_id))


def next_round(
    before: Position,
    asked: RollbackAsked,
    *,
    is_exact: bool,
    to_beginning: bool = False,
    vb_id: int | None = None,
) -> Position:
    """Return where to ask again: a complete state at or below what the server said.

    `is_exact`: the server saw all versions of the client, so its answer is the last one; otherwise
    older versions are tried, one a round. `to_beginning`: at 0, whatever the server said.

    Raises StreamViolationError if the server's failover log cannot be one.
    """
    seqno = asked.seqno
    if asked.versions:
        seqno = min(seqno, agreed_seqno(before.versions, before.seqno, asked.versions, vb_id))
    position = rolled_back(before, seqno, to_beginning=to_beginning, is_exact=is_exact)
    step = (position.seqno, len(position.versions))
    assert step < (before.seqno, len(before.versions)), "goes down, so rounds are bounded"
    return position
