"""Looks for one order that explains a key's answers, in linear time, guided by seqnos and CAS. Pure.

The order that it finds is a proof, because every step of it is checked against the register and the
times. If it finds none, that says nothing: then `sim.checkers.linearizable` searches all orders.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.checkers.register import State, applied, step
from sim.facts import DEFINITE, Operation

Moments = Sequence[tuple[int, int, int]]
"""(time, 0 for a request and 1 for an answer, index of the operation), in order."""


def has_witness(history: Sequence[Operation], moments: Moments, initial: State) -> bool:
    """Return whether the guided order explains all answers."""
    return _Walk(history, initial).run(moments)


class _Walk:
    """One pass over the moments. `_pending` have an answer to come and have not taken effect."""

    def __init__(self, history: Sequence[Operation], initial: State) -> None:
        self._history = history
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
            before = self._before(operation)
            if before and not self._take_all(before):
                return False
        if self._take(index, operation):
            return True
        for other, write in self._ambiguous.items():
            after = applied(self._state, write)
            if after is not None and step(after, operation) is not None:
                self._state = after
                del self._ambiguous[other]
                return self._take(index, operation)
        return self._try_in_order(index, operation)

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

    def _take_all(self, indices: Sequence[int]) -> bool:
        return all(self._take(index, self._pending[index]) for index in indices)

    def _take(self, index: int, operation: Operation) -> bool:
        after = step(self._state, operation)
        if after is None:
            return False
        self._state = after
        del self._pending[index]
        return True

    def _try_in_order(self, index: int, operation: Operation) -> bool:
        """Let writes under way take effect one after another until the answer fits."""
        writes = sorted(
            (other for other, write in self._pending.items() if write.seqno and other != index),
            key=lambda other: self._pending[other].seqno,
        )
        for other in writes:
            if not self._take(other, self._pending[other]):
                return False
            if self._take(index, operation):
                return True
        return False
