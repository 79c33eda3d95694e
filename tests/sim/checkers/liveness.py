"""Nothing waits for ever once the faults have ended. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from sim.facts import DEFINITE, Operation


def late(operations: Iterable[Operation], faults_ended_ns: int, bound_ns: int) -> list[str]:
    """Every operation ends, and one that began `bound_ns` after the faults gets a real answer."""
    problems = []
    for operation in operations:
        if operation.ended_ns is None:
            problems.append(f"an operation never ended: {operation}")
        elif (
            operation.invoked_ns >= faults_ended_ns + bound_ns and operation.outcome not in DEFINITE
        ):
            problems.append(
                f"{bound_ns / 1e9:g} s after the faults, an operation was not answered:"
                f" {operation} ({operation.why})"
            )
    return problems
