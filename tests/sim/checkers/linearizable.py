"""Per-key linearizability: is there an order of a key's operations that explains all answers? Pure.

The search is that of Wing and Gong as Lowe refined it: go through the answers in the order of time,
and keep every configuration that is possible. A configuration is a state, and which of the
operations under way have already taken effect. An operation takes effect between its request and
its answer, and only as late as an answer needs it.

A write without an answer may take effect at any later time, or never. So of two configurations with
the same state, the one that has used fewer of these writes covers the other.

Most histories have an order that seqnos and CAS tell (`sim.checkers.witness`). It is checked first,
because one order is enough.

A partition whose history was cut back (a branch, an unclean election) is checked in pieces: before,
and after, where nothing is known at first. What was under way then belongs to both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sim.checkers.register import (
    ANYTHING,
    KEEPING,
    NOTHING,
    SHOWING,
    State,
    applied,
    changes_nothing,
    step,
)
from sim.checkers.witness import has_witness
from sim.facts import DEFINITE, NOTHING_DONE, Excuse, Kind, Operation, Outcome

CONFIGURATIONS_MAX = 3_000
"""Configurations of one answer above which a key is given up: it would take too long."""

_OF_OTHERS = frozenset({Kind.OBSERVE, Kind.UNLOCK})
"""They are about a partition, or about a lock."""
_NOBODY: frozenset[int] = frozenset()
Configuration = tuple[State, frozenset[int], frozenset[int]]
"""State; operations under way that have taken effect; writes without an answer that have."""


class Verdict(NamedTuple):
    """What a search found: `problem` is "" if there is an order. `is_sure`: it was not given up."""

    problem: str
    is_sure: bool = True


def check(operations: Iterable[Operation], excuses: Sequence[Excuse]) -> tuple[list[str], int]:
    """Return the violations, and how many keys were given up."""
    by_key: dict[tuple[int, bytes], list[Operation]] = defaultdict(list)
    for operation in operations:
        if operation.kind in _OF_OTHERS:
            continue
        by_key[operation.collection, operation.key].append(operation)
    problems, given_up = [], 0
    for (_, key), history in by_key.items():
        cuts = [excuse for excuse in excuses if excuse.vb_id == history[0].vb_id]
        for verdict in _in_pieces(history, cuts):
            given_up += not verdict.is_sure
            if verdict.problem:
                problems.append(f"key {key!r} is not linearizable: {verdict.problem}")
                break
    return problems, given_up


def _in_pieces(history: list[Operation], cuts: list[Excuse]) -> Iterable[Verdict]:
    """Check a key between the times at which its partition may have been cut back."""
    since_ns, initial = 0, NOTHING
    for cut in sorted(cuts, key=lambda cut: cut.at_ns):
        if cut.kind == "purge":
            continue
        yield search(_piece(history, since_ns, cut.at_ns), initial)
        since_ns, initial = _end_of(cut, history), ANYTHING
    yield search(_piece(history, since_ns, None), initial)


def _end_of(cut: Excuse, history: list[Operation]) -> int:
    if cut.until_ns is not None:
        return cut.until_ns
    return max(operation.ended_ns or 0 for operation in history) + 1


def _piece(history: list[Operation], since_ns: int, until_ns: int | None) -> list[Operation]:
    """Return the operations of a piece; those that reach beyond it have no known outcome."""
    piece = []
    for operation in history:
        ended_ns = operation.ended_ns
        if until_ns is not None and operation.invoked_ns >= until_ns:
            continue
        is_open = ended_ns is None or operation.outcome not in DEFINITE
        if not is_open and ended_ns is not None and ended_ns < since_ns:
            continue
        crosses = operation.invoked_ns < since_ns or (
            until_ns is not None and ended_ns is not None and ended_ns >= until_ns
        )
        piece.append(_unknown(operation) if crosses and not is_open else operation)
    return piece


def _unknown(operation: Operation) -> Operation:
    copy = Operation(
        operation.client, 0, operation.kind, operation.vb_id, operation.key, operation.argument,
        cas_asked=operation.cas_asked, initial=operation.initial,
        collection=operation.collection, expiry_s=operation.expiry_s,
        invoked_ns=operation.invoked_ns,
        ended_ns=operation.ended_ns, outcome=Outcome.AMBIGUOUS,
    )  # fmt: skip
    copy.name, copy.locked_value = operation.name, operation.locked_value
    return copy


def search(history: Sequence[Operation], initial: State = NOTHING) -> Verdict:
    """Look for an order that explains one key's operations."""
    moments: list[tuple[int, int, int]] = []
    for index, operation in enumerate(history):
        outcome = operation.outcome
        if outcome in NOTHING_DONE or (operation.kind in SHOWING and outcome not in DEFINITE):
            continue
        moments.append((operation.invoked_ns, 0, index))
        if outcome in DEFINITE:
            assert operation.ended_ns is not None
            moments.append((operation.ended_ns, 1, index))
    moments.sort()
    if has_witness(history, moments, initial, _first_after):
        return Verdict("")
    definite: dict[int, Operation] = {}
    """Under way, with an answer to come."""
    ambiguous: dict[int, Operation] = {}
    configurations: set[Configuration] = {(initial, _NOBODY, _NOBODY)}
    for _, is_answer, index in moments:
        operation = history[index]
        if not is_answer:
            (definite if operation.outcome in DEFINITE else ambiguous)[index] = operation
            continue
        possible = _after_answer(configurations, index, definite, ambiguous)
        if possible is None:
            return Verdict("", is_sure=False)
        del definite[index]
        if not possible:
            return Verdict(_explain(operation, configurations, ambiguous))
        configurations = possible
    return Verdict("")


def _first_after(
    state: State, index: int, definite: dict[int, Operation], ambiguous: dict[int, Operation]
) -> Configuration | None:
    """Return one way in which an answered operation may have taken effect."""
    found = _Expansion(index, definite, ambiguous).run([(state, _NOBODY, _NOBODY)], is_one=True)
    return next(iter(found)) if found else None


def _after_answer(
    configurations: set[Configuration],
    index: int,
    definite: dict[int, Operation],
    ambiguous: dict[int, Operation],
) -> set[Configuration] | None:
    """Return the configurations in which an answered operation has taken effect; None: too many."""
    answered = definite[index]
    if len(configurations) == 1 and len(definite) == 1:
        # The common case: nobody else is under way, and what is known explains the answer. Only
        # after these does the state still tell what was there before.
        ((state, taken, used),) = configurations
        if index in taken:
            return {(state, _NOBODY, used)}
        if answered.kind not in KEEPING or len(used) == len(ambiguous):
            after = step(state, answered)
            if after is not None:
                return {(after, _NOBODY, used)}
    expansion = _Expansion(index, definite, ambiguous)
    return expansion.run(configurations)


class _Expansion:
    """All ways in which operations under way may take effect before an answer."""

    def __init__(
        self, index: int, definite: dict[int, Operation], ambiguous: dict[int, Operation]
    ) -> None:
        self._index = index
        self._ambiguous = ambiguous
        self._twins = _twins(ambiguous)
        self._reads = [item for item in definite.items() if changes_nothing(item[1])]
        self._writes = [item for item in definite.items() if not changes_nothing(item[1])]
        self._seen: dict[tuple[State, frozenset[int]], list[frozenset[int]]] = {}
        self._is_one = False
        self._count = 0
        self._level: list[Configuration] = []
        self._after: dict[State, list[tuple[int, State]]] = {}
        """State -> the writes without an answer that change it, and what each makes of it."""

    def run(
        self, configurations: Iterable[Configuration], *, is_one: bool = False
    ) -> set[Configuration] | None:
        """Return the configurations in which the answered operation has taken effect; with
        `is_one`, one of them, with writes in the order of their seqnos.
        """
        index = self._index
        self._is_one = is_one
        found: set[Configuration] = set()
        self._level = []
        for configuration in sorted(configurations, key=lambda item: len(item[2])):
            self._add(*configuration)
        while self._level:
            level, self._level = self._level, []
            for state, taken, used in level:
                if index in taken:
                    found.add((state, taken - {index}, used))
                    if is_one:
                        return found
                else:
                    self._expand(state, taken, used)
            if self._count > CONFIGURATIONS_MAX:
                return None
        return found

    def _expand(self, state: State, taken: frozenset[int], used: frozenset[int]) -> None:
        for other, operation in [*self._next_writes(taken), *self._reads]:
            if other not in taken:
                after = step(state, operation)
                if after is not None:
                    self._add(after, taken | {other}, used)
        changes = self._after.get(state)
        if changes is None:
            changes = self._after[state] = self._changes_of(state)
        for other, after in changes:
            if other not in used and self._twins.get(other, -1) in {-1, *used}:
                self._add(after, taken, used | {other})

    def _changes_of(self, state: State) -> list[tuple[int, State]]:
        return [
            (other, after)
            for other, operation in self._ambiguous.items()
            if (after := applied(state, operation)) is not None and after != state
        ]

    def _next_writes(self, taken: frozenset[int]) -> list[tuple[int, Operation]]:
        """Return the writes that may be next: all of them, or the one that seqnos tell."""
        if not self._is_one:
            return self._writes
        left = [item for item in self._writes if item[0] not in taken]
        return [min(left, key=lambda item: item[1].seqno)] if left else []

    def _add(self, state: State, taken: frozenset[int], used: frozenset[int]) -> None:
        """Go on with a configuration, unless one that covers it is known.

        What changes nothing takes effect as soon as it fits: later would be no better.
        """
        for read, operation in self._reads:
            if read not in taken and step(state, operation) == state:
                taken |= {read}
        known = self._seen.setdefault((state, taken), [])
        if any(fewer <= used for fewer in known):
            return
        known.append(used)
        self._count += 1
        self._level.append((state, taken, used))


def _twins(ambiguous: dict[int, Operation]) -> dict[int, int]:
    """Return number -> the write before it that does the same, which takes effect first: of equal
    writes without an answer it does not matter which one did.
    """
    twins: dict[int, int] = {}
    last: dict[object, int] = {}
    for number, operation in ambiguous.items():
        what = operation.kind, operation.argument, operation.cas_asked, operation.initial
        if what in last:
            twins[number] = last[what]
        last[what] = number
    return twins


def _explain(
    operation: Operation, configurations: set[Configuration], ambiguous: dict[int, Operation]
) -> str:
    states = sorted({_shown(state) for state, _, _ in configurations})
    more = f" and {len(states) - 4} more" if len(states) > 4 else ""
    text = f"{operation}; before it: {', '.join(states[:4])}{more}"
    if ambiguous:
        names = ", ".join(str(other) for other in list(ambiguous.values())[-4:])
        text += f"; {len(ambiguous)} writes without an answer, the last ones: {names}"
    return text


def _shown(state: State) -> str:
    value, cas = state
    if state == ANYTHING:
        return "anything"
    return "no document" if value is None else f"{value[:60]!r} CAS {cas:x}"
