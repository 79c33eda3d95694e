"""Looks for one order that explains a key's answers, in linear time. Pure.

Seqnos and CAS guide it. The order that it finds is a proof, because every step of it is checked
against the register and the times. If it finds none, that says nothing: then
`sim.checkers.linearizable` searches all orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sim.checkers.register import State, changes_nothing, step
from sim.facts import DEFINITE, Operation

Moments = Sequence[tuple[int, int, int]]
"""(time, 0 for a request and 1 for an answer, index of the operation), in order."""


Way = tuple[State, frozenset[int], frozenset[int]]
"""State, and what has taken effect: of operations with an answer, and of writes without one."""
FindWay = Callable[[State, int, dict[int, Operation], dict[int, Operation]], Way | None]
"""Returns one way in which an operation may have taken effect, or None."""


def has_witness(
    history: Sequence[Operation], moments: Moments, initial: State, find_way: FindWay
) -> bool:
    """Return whether the guided order explains all answers. `find_way` is asked where seqnos and
    CAS do not tell.
    """
    return _Walk(history, initial, find_way).run(moments)


class _Walk:
    """One pass over the moments. `_pending` have an answer to come and have not taken effect."""

    def __init__(self, history: Sequence[Operation], initial: State, find_way: FindWay) -> None:
        self._history = history
        self._find_way = find_way
        self._state = initial
        self._pending: dict[int, Operation] = {}
        self._ambiguous: dict[int, Operation] = {}

    def run(self, moments: Moments) -> bool:
        """Return whether every answer could be explained."""
        history, pending = self._history, self._pending
        for _, is_answer, index in moments:
            operation = history[index]
            if not is_answer:
                under_way = pending if operation.outcome in DEFINITE else self._ambiguous
                under_way[index] = operation
            elif index in pending and not self._explain(index, operation):
                return False
        return True

    def _explain(self, index: int, operation: Operation) -> bool:
        """Let an operation take effect, after those that must come before it."""
        pending = self._pending
        if len(pending) > 1:
            self._take_reads()
            for other in self._before(operation):
                if index not in pending:
                    break
                if not self._take(other):
                    return False
                self._take_reads()
        if index not in pending or self._take(index):
            return True
        way = self._find_way(self._state, index, pending, self._ambiguous)
        if way is None:
            return False
        self._state, taken, used = way
        for other in (index, *taken):
            pending.pop(other, None)
        for other in used:
            del self._ambiguous[other]
        return True

    def _before(self, operation: Operation) -> list[int]:
        """Return the operations under way that took effect before, as seqnos and CAS tell."""
        seqno = operation.seqno
        if not seqno and operation.cas and operation.cas != self._state[1]:
            seen = (other for other in self._pending.values() if other.cas == operation.cas)
            seqno = next((other.seqno + 1 for other in seen if other.seqno), 0)
        if not seqno:
            return []
        return sorted(
            (other for other, write in self._pending.items() if 0 < write.seqno < seqno),
            key=lambda other: self._pending[other].seqno,
        )

    def _take_reads(self) -> None:
        """Let everything take effect that fits and changes nothing: later would be no better."""
        state = self._state
        for index, operation in list(self._pending.items()):
            if changes_nothing(operation) and step(state, operation) == state:
                del self._pending[index]

    def _take(self, index: int) -> bool:
        after = step(self._state, self._pending[index])
        if after is None:
            return False
        self._state = after
        del self._pending[index]
        return True
