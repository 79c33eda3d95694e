"""Nothing waits for ever once the faults have ended. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sim.facts import DEFINITE, Operation, Outcome

_ANSWERS = DEFINITE | {Outcome.NO_COLLECTION, Outcome.LOCKED, Outcome.NOT_LOCKED}


WITHOUT_COPIES: Final = "status 0xa1"
"""What a durable write is answered while too few copies are in sync (DURABILITY_IMPOSSIBLE)."""


def late(
    operations: Iterable[Operation], works_ns: int, *, copies_keep_up: bool = True
) -> list[str]:
    """Every operation ends. The faults are over at `works_ns`: then each gets a real answer.

    `copies_keep_up`: whether a replica can take as much as clients write. Else it may never come
    into the in-sync set, and a durable write is rightly refused.
    """
    problems = []
    for operation in operations:
        if operation.ended_ns is None:
            problems.append(f"an operation never ended: {operation}")
        elif not copies_keep_up and operation.why == WITHOUT_COPIES:
            continue
        elif operation.invoked_ns >= works_ns and operation.outcome not in _ANSWERS:
            problems.append(
                f"long after the faults, an operation was not answered: {operation}"
                f" ({operation.why})"
            )
    return problems
