"""Is the history of a key linearizable? Wing and Gong's search, with Lowe's memory of states. Pure.

A history is linearizable if each operation can be given one moment between its call and its answer
so that, in the order of these moments, every answer is right. Operations without an answer may get
a moment after their call, or none.

The search takes calls in order, tries one that may be next, and goes back when an answer comes
whose operation has no moment yet. It remembers what it has tried: the set of operations that have a
moment, and the value after them.

Two things keep operations without an answer from multiplying the search:
- a value that no answer names looks like any other such value, so all of them are one;
- of operations that then are alike, the one that was called first goes first: it may stand wherever
  a later one may.

Limits: STEPS_MAX steps for a history; above that it raises TooHardError, and says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from tests.soak.cluster.history import Kind, Operation, Value

STEPS_MAX: Final = 2_000_000
"""A right history takes a few steps for each operation. This many take half a minute."""
SHOWN: Final = 12
"""Operations of a message on each side of the place that does not fit."""

_UNSEEN: Final = b"\0a value that no answer names"
_IMPOSSIBLE: Final = object()


class TooHardError(Exception):
    """The search was given up. It is not known whether the history is linearizable."""


class Violation(NamedTuple):
    """A history that is not linearizable."""

    stuck: Operation
    """The operation that had no place when the search had come farthest."""
    around: tuple[Operation, ...]
    """Operations near it, in the order of their calls."""

    def words(self) -> str:
        """Return it in several lines."""
        lines = [("> " if each == self.stuck else "  ") + each.words() for each in self.around]
        return "\n".join(("no order of these operations fits their answers:", *lines))


def violation_of(history: Iterable[Operation], start: Value = None) -> Violation | None:
    """Return why a key's history is not linearizable; None: it is. `start` is the key's value
    before. Raises TooHardError.
    """
    operations = sorted(history, key=lambda each: each.called_ns)
    stuck = _Search(_with_one_unseen(operations), start).run()
    if stuck is None:
        return None
    near = operations[max(0, stuck - SHOWN) : stuck + SHOWN + 1]
    return Violation(operations[stuck], tuple(near))


def _with_one_unseen(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations, those without an answer with one value if no answer names theirs."""
    named = {each.found for each in operations if not each.is_ambiguous}
    named |= {each.expected for each in operations if each.kind is Kind.SWAP}
    return [
        each._replace(value=_UNSEEN)
        if each.is_ambiguous and each.kind is not Kind.ADD and each.value not in named
        else each
        for each in operations
    ]


def _after(operation: Operation, state: Value) -> Value | object:
    """Return the value after an operation at a value, or _IMPOSSIBLE if its answer is wrong there.

    One without an answer is impossible where it changes nothing: it needs no moment then.
    """
    kind, is_ambiguous = operation.kind, operation.is_ambiguous
    if kind is Kind.WRITE:
        return operation.value
    if kind is Kind.READ:
        return state if not is_ambiguous and operation.found == state else _IMPOSSIBLE
    if kind is Kind.ADD:
        number = state + 1 if isinstance(state, int) else 1
        return number if is_ambiguous or operation.found == number else _IMPOSSIBLE
    if state == operation.expected:
        return operation.value if is_ambiguous or operation.found else _IMPOSSIBLE
    return _IMPOSSIBLE if is_ambiguous or operation.found else state


class _Entry:
    """A call or an answer, in a list in the order of time."""

    __slots__ = ("answer", "index", "is_call", "next", "previous")

    def __init__(self, index: int, *, is_call: bool) -> None:
        self.index = index
        self.is_call = is_call
        self.answer: _Entry | None = None
        """Of a call: its answer, if it has one."""
        self.previous: _Entry = self
        self.next: _Entry | None = None


class _Search:
    """One search; see the module."""

    def __init__(self, operations: list[Operation], start: Value) -> None:
        self._operations = operations
        self._state: Value = start
        self._placed = 0
        """Bit by bit: the operations that have a moment."""
        self._left = sum(not each.is_ambiguous for each in operations)
        self._head = _Entry(-1, is_call=False)
        self._link()
        alike: dict[tuple[Kind, Value, Value], list[int]] = {}
        self._alike: dict[int, list[int]] = {}
        """Operation without an answer -> all that are like it, first called first."""
        for index, each in enumerate(operations):
            if each.is_ambiguous:
                group = alike.setdefault((each.kind, each.value, each.expected), [])
                group.append(index)
                self._alike[index] = group

    def _link(self) -> None:
        """Make the list. An answer at the moment of a call comes after it: they overlap."""
        moments: list[tuple[int, bool, int, _Entry]] = []
        for index, each in enumerate(self._operations):
            call = _Entry(index, is_call=True)
            moments.append((each.called_ns, False, index, call))
            if each.returned_ns is not None:
                call.answer = _Entry(index, is_call=False)
                moments.append((each.returned_ns, True, index, call.answer))
        before = self._head
        for *_, entry in sorted(moments, key=lambda moment: moment[:3]):
            before.next, entry.previous = entry, before
            before = entry

    def run(self) -> int | None:
        """Return the operation that fits nowhere, or None."""
        tried: set[tuple[int, Value]] = set()
        path: list[tuple[_Entry, Value]] = []
        deepest, stuck = -1, 0
        entry = self._head.next
        steps = 0
        while self._left:
            steps += 1
            if steps > STEPS_MAX:
                raise TooHardError(f"{len(self._operations)} operations: given up")
            assert entry is not None, "the answer of an operation without a moment is in the list"
            if entry.is_call:
                after = self._try(entry, tried)
                if after is not _IMPOSSIBLE:
                    path.append((entry, self._state))
                    self._place(entry)
                    self._state = after  # type: ignore[assignment]
                    entry = self._head.next
                else:
                    entry = entry.next
                continue
            if len(path) > deepest:
                deepest, stuck = len(path), entry.index
            if not path:
                return stuck
            entry, self._state = path.pop()
            self._unplace(entry)
            entry = entry.next
        return None

    def _try(self, entry: _Entry, tried: set[tuple[int, Value]]) -> Value | object:
        """Return the value after an operation if it may be next and was not tried there."""
        index = entry.index
        for other in self._alike.get(index, ()):
            if other == index:
                break
            if not self._placed >> other & 1:
                return _IMPOSSIBLE
        after = _after(self._operations[index], self._state)
        if after is _IMPOSSIBLE:
            return after
        key = (self._placed | 1 << index, after)
        if key in tried:
            return _IMPOSSIBLE
        tried.add(key)  # type: ignore[arg-type]
        return after

    def _place(self, call: _Entry) -> None:
        self._placed |= 1 << call.index
        _take_out(call)
        if call.answer is not None:
            _take_out(call.answer)
            self._left -= 1

    def _unplace(self, call: _Entry) -> None:
        self._placed &= ~(1 << call.index)
        if call.answer is not None:
            _put_back(call.answer)
            self._left += 1
        _put_back(call)


def _take_out(entry: _Entry) -> None:
    entry.previous.next = entry.next
    if entry.next is not None:
        entry.next.previous = entry.previous


def _put_back(entry: _Entry) -> None:
    entry.previous.next = entry
    if entry.next is not None:
        entry.next.previous = entry


def mixed_tokens(history: Iterable[Operation]) -> list[str]:
    """Return which values of a key have several CAS, and which CAS have several values."""
    by_value: dict[Value, set[int]] = {}
    by_cas: dict[int, set[Value]] = {}
    for each in history:
        value = each.found if each.kind in {Kind.READ, Kind.ADD} else each.value
        if each.cas and not each.is_ambiguous and value is not None:
            by_value.setdefault(value, set()).add(each.cas)
            by_cas.setdefault(each.cas, set()).add(value)
    return [
        *(f"{value!r} has the CAS {sorted(found)}"
          for value, found in by_value.items() if len(found) > 1),
        *(f"CAS {cas} is that of {found!r}" for cas, found in by_cas.items() if len(found) > 1),
    ]  # fmt: skip
