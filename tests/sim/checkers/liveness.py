"""Nothing waits for ever once the faults have ended. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from sim.facts import DEFINITE, Operation, Outcome

_ANSWERS = DEFINITE | {Outcome.NO_COLLECTION}


def late(operations: Iterable[Operation], works_ns: int) -> list[str]:
    """Every operation ends. The faults are over at `works_ns`: then each gets a real answer."""
    problems = []
    for operation in operations:
        if operation.ended_ns is None:
            problems.append(f"an operation never ended: {operation}")
        elif operation.invoked_ns >= works_ns and operation.outcome not in _ANSWERS:
            problems.append(
                f"long after the faults, an operation was not answered: {operation}"
                f" ({operation.why})"
            )
    return problems
