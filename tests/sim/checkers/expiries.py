"""What expiries may do, and what they must have done. Pure.

The time of an expiry is one of the server's wall clock in whole seconds, so it is known within a
second here, and within more where several machines, drifting clocks or jumps of them take part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

from sim.facts import DEFINITE, NOTHING_DONE, Kind, Operation, Outcome
from sim.plan import Plan
from sim.world import MS, SECOND

BOOT_NS: Final = SECOND
"""Clocks of two machines differ by less, without jumps (`sim.clock`)."""
SLACK_NS: Final = 200 * MS
PPM: Final = 1_000_000
KEEPING: Final = frozenset({Kind.APPEND, Kind.INCREMENT})
"""They keep the expiry of what was there, so what they leave may be due at any time."""


class Expiries:
    """What is known of the clocks of a run."""

    def __init__(self, plan: Plan) -> None:
        self._jumps = "clock_jump" in plan.faults
        self._skew_ns = BOOT_NS if plan.nodes > 1 else 0
        self._drift_ppm = 2 * plan.drift_ppm

    def events(self, operations: Iterable[Operation]) -> Iterator[Operation]:
        """Yield what may let each document expire: an operation without an answer, which begins as
        early as any clock says. A checker lets it happen then or later, or never.
        """
        for operation in operations:
            if not operation.life_s or operation.outcome in NOTHING_DONE:
                continue
            is_known = operation.outcome in DEFINITE
            if is_known and operation.outcome is not Outcome.OK:
                continue
            event = Operation(
                operation.client, 0, Kind.EXPIRE, operation.vb_id, operation.key,
                b"" if is_known or operation.kind in KEEPING else operation.argument,
                cas_asked=operation.cas,
                collection=operation.collection,
                invoked_ns=operation.invoked_ns + self._soonest_ns(operation),
                outcome=Outcome.AMBIGUOUS,
            )  # fmt: skip
            event.name = f"the expiry of {operation.name}"
            yield event

    def _soonest_ns(self, operation: Operation) -> int:
        if self._jumps or operation.kind in KEEPING:
            return 0
        after_ns = (operation.life_s - 1) * SECOND - self._skew_ns
        return max(0, after_ns - self._drifted_ns(operation.invoked_ns + after_ns))

    def _drifted_ns(self, at_ns: int) -> int:
        return abs(at_ns) * self._drift_ppm // PPM + MS

    def overdue(self, operations: Iterable[Operation]) -> list[str]:
        """No read answers with a document that has expired on every clock."""
        if self._jumps:
            return []
        by_cas: dict[tuple[int, bytes, int], list[Operation]] = defaultdict(list)
        reads = []
        for operation in operations:
            if operation.outcome is not Outcome.OK:
                continue
            if operation.kind in {Kind.GET, Kind.GET_REPLICA}:
                reads.append(operation)
            elif operation.cas:
                by_cas[operation.collection, operation.key, operation.cas].append(operation)
        problems = []
        for read in reads:
            writes = by_cas.get((read.collection, read.key, read.cas), [])
            if not writes or not all(write.life_s for write in writes):
                continue
            due_ns = max((write.ended_ns or 0) + write.life_s * SECOND for write in writes)
            if read.invoked_ns > due_ns + self._skew_ns + self._drifted_ns(due_ns) + SLACK_NS:
                problems.append(f"an expired document is answered: {read}; it was due at"
                                f" {due_ns / MS:.3f} ms ({writes[-1]})")  # fmt: skip
        return problems
