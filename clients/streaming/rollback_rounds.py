"""One round of a rollback: the position of the next request after the server's ROLLBACK. Pure.

Invariants
- every round lowers the seqno or the number of versions, so the number of rounds is bounded;
- if the answer has the server's failover log, a client keeps nothing above the seqno up to which
  both histories agree. `failover.rules.rollback` compares the client's versions with that log.
"""

from __future__ import annotations

from clients.errors import StreamViolationError
from clients.position import Position, Versions, rolled_back
from clients.streaming.outcome import RollbackAsked
from failover.rules.history import FailoverLog
from failover.rules.rollback import common_seqno


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
    """Return the position of the next request: a complete state at or below the server's seqno.

    `is_exact`: the server saw all versions of the client, so its answer is final. Otherwise older
    versions are tried, one per round. `to_beginning`: return 0, whatever the server's seqno is.

    Raises StreamViolationError if the server's failover log cannot be one.
    """
    seqno = asked.seqno
    if asked.versions:
        seqno = min(seqno, agreed_seqno(before.versions, before.seqno, asked.versions, vb_id))
    position = rolled_back(before, seqno, to_beginning=to_beginning, is_exact=is_exact)
    step = (position.seqno, len(position.versions))
    assert step < (before.seqno, len(before.versions)), "each round goes down, so they are bounded"
    return position
