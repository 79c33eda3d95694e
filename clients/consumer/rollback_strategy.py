"""What a consumer does when history branched: the user's strategy, applied to one rollback. Pure
but for the user's own function.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Final, Literal, NamedTuple

from clients.errors import HistoryBranchedError
from clients.event import Rollback
from clients.position import Position, gone_back

Decision = Literal["undo", "restart", "fail"] | int
"""What to do: go back to the state that the event names, to 0, not at all (HistoryBranchedError),
or to the newest complete state at or below a seqno."""
_WORDS: Final = ("undo", "restart", "fail")
OnRollback = (
    Literal["undo", "restart", "fail"] | Callable[[Rollback], Decision | Awaitable[Decision]]
)


def check_strategy(strategy: OnRollback) -> OnRollback:
    """Return it. Raises ValueError for a word that is none, before any history branches."""
    if not callable(strategy) and strategy not in _WORDS:
        raise ValueError(
            f"on_rollback {strategy!r}: {', '.join(map(repr, _WORDS))}, or a function of the"
            " Rollback that returns one of them or a seqno"
        )
    return strategy


class Decided(NamedTuple):
    """The event as the user gets it, and where the partition goes on."""

    event: Rollback
    position: Position


async def decide_rollback(strategy: OnRollback, event: Rollback, position: Position) -> Decided:
    """Settle one rollback; `position` is where the event puts the partition.

    Raises HistoryBranchedError.
    """
    decision: Decision
    if callable(strategy):
        answer = strategy(event)
        decision = await answer if inspect.isawaitable(answer) else answer
    else:
        decision = strategy
    if decision == "undo":
        return Decided(event, position)
    if decision == "fail":
        error = HistoryBranchedError(
            f"history branched: back from seqno {event.from_seqno} to {event.to_seqno}:"
            f" {event.reason}",
            vb_id=event.vb_id,
        )
        error.to_seqno = event.to_seqno
        raise error
    if decision == "restart":
        decision = 0
    assert isinstance(decision, int), 'on_rollback returns "undo", "restart", "fail" or a seqno'
    if decision >= event.to_seqno:
        return Decided(event, position)
    position = gone_back(position, decision)
    reason = f"{event.reason}; the user went back to {position.seqno}"
    return Decided(
        Rollback(
            event.vb_id, position.seqno, event.server_seqno, event.from_seqno, reason,
            event.failover_log,
        ),
        position,
    )  # fmt: skip
