"""Applies the user's strategy (`on_rollback`) to a rollback. Pure, except the user's function."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Final, Literal, NamedTuple

from clients.errors import HistoryBranchedError
from clients.event import Rollback
from clients.position import Position, gone_back

Decision = Literal["undo", "restart", "fail"] | int
"""What to do: "undo" goes back to the event's seqno, "restart" to 0, "fail" raises
HistoryBranchedError. A seqno means the newest complete state at or below it."""
_WORDS: Final = ("undo", "restart", "fail")
OnRollback = (
    Literal["undo", "restart", "fail"] | Callable[[Rollback], Decision | Awaitable[Decision]]
)


def check_strategy(strategy: OnRollback) -> OnRollback:
    """Return the strategy. Raises ValueError if it is not a known word or a function."""
    if not callable(strategy) and strategy not in _WORDS:
        raise ValueError(
            f"on_rollback {strategy!r}: use {', '.join(map(repr, _WORDS))}, or a function that gets"
            " the Rollback and returns one of them or a seqno"
        )
    return strategy


class Decided(NamedTuple):
    """The event for the user, and the position from which the partition continues."""

    event: Rollback
    position: Position


async def decide_rollback(strategy: OnRollback, event: Rollback, position: Position) -> Decided:
    """Decide a rollback. `position` is the partition's position after the event.

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
            f"history branched: rollback from seqno {event.from_seqno} to {event.to_seqno}:"
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
    reason = f"{event.reason}; on_rollback chose seqno {position.seqno}"
    return Decided(
        Rollback(
            event.vb_id, position.seqno, event.server_seqno, event.from_seqno, reason,
            event.failover_log,
        ),
        position,
    )  # fmt: skip
