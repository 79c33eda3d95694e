"""One document as a state machine: what operations may do to it, and what they answer. Pure.

A state is (value, CAS); a value of None means that there is no document. The CAS is 0 where nobody
knows it: a write without an answer got some CAS, and the first one that is seen is taken for it.
ANYTHING is a state of which nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sim.facts import Kind, Operation, Outcome

State = tuple[bytes | None, int]

NOTHING: Final[State] = (None, 0)
"""There is no document."""
ANYTHING: Final[State] = (b"\0anything", 0)
"""Nobody knows what is there."""
KEEPING: Final = frozenset({Kind.APPEND, Kind.PUSH, Kind.TOUCH})
"""What they leave depends on what was there, and their answers do not tell it."""
TOUCHES: Final = frozenset({Kind.TOUCH, Kind.GET_AND_TOUCH})
SHOWING: Final = frozenset({Kind.GET, Kind.GET_AND_LOCK})
"""They leave the document as it is. A lock is none of its changes (`sim.checkers.locks`)."""
_TELLING: Final = SHOWING | {Kind.INCREMENT, Kind.GET_AND_TOUCH}
_U64: Final = 1 << 64


def step(state: State, operation: Operation) -> State | None:
    """Return the state after an operation with a definite outcome; None: it cannot have had it."""
    if state == ANYTHING:
        return _from_anything(operation)
    return _STEPS[operation.kind](state, operation)


def applied(state: State, operation: Operation) -> State | None:
    """Return the state after an operation whose outcome nobody knows; None: it changes nothing."""
    if state == ANYTHING:
        return None  # whatever it leaves is covered
    value, _ = state
    kind, argument = operation.kind, operation.argument
    if kind is Kind.EXPIRE:
        return NOTHING if _expires(state, operation) else None
    if kind is Kind.PUSH:
        return pushed(value, operation), 0
    if kind is Kind.SET_WITH_META:
        return argument, 0
    if operation.cas_asked and (value is None or not _matches(state, operation)):
        return None
    if kind is Kind.SET:
        return argument, 0
    if kind is Kind.ADD:
        return (argument, 0) if value is None else None
    if kind is Kind.INCREMENT:
        number = counted(value, operation)
        return None if number is None else (number, 0)
    if value is None:
        return None
    if kind is Kind.DELETE:
        return NOTHING
    if kind in TOUCHES:
        return value, 0
    return (argument if kind is Kind.REPLACE else value + argument), 0


def _expires(state: State, operation: Operation) -> bool:
    """Whether a document is the one that an EXPIRE is about, as far as that is known."""
    value, cas = state
    is_other = bool(operation.cas_asked) and cas not in {0, operation.cas_asked}
    return value is not None and not is_other and operation.argument in {b"", value}


def pushed(value: bytes | None, operation: Operation) -> bytes:
    """Return what a PUSH makes of a list, or of nothing."""
    return b"[%b]" % operation.argument if value is None else b"%b,%b]" % (
        value[:-1], operation.argument
    )  # fmt: skip


def counted(value: bytes | None, operation: Operation) -> bytes | None:
    """Return what an INCREMENT makes of a value; None: it makes nothing of it."""
    if value is None:
        return None if operation.initial is None else b"%d" % operation.initial
    if not value.isdigit() or len(value) > 20:
        return None
    return b"%d" % ((int(value) + int(operation.argument)) % _U64)


def changes_nothing(operation: Operation) -> bool:
    """Whether the answer says that the operation left the document as it was."""
    return operation.kind in SHOWING or operation.outcome is not Outcome.OK


def _from_anything(operation: Operation) -> State | None:
    """What an answer tells of a document of which nothing was known."""
    kind, outcome = operation.kind, operation.outcome
    if outcome is Outcome.OK:
        if kind in _TELLING:
            return operation.value, operation.cas
        if kind is Kind.DELETE:
            return NOTHING
        if kind in KEEPING:
            return ANYTHING
        return operation.argument, operation.cas
    if outcome in {Outcome.ABSENT, Outcome.NOT_STORED}:
        return NOTHING
    return ANYTHING


def _matches(state: State, operation: Operation) -> bool:
    """Whether the CAS that was asked for may be that of the document, or opens its lock."""
    value, cas = state
    is_opened = operation.locked_value is not None and value == operation.locked_value
    return is_opened or not operation.cas_asked or cas in {0, operation.cas_asked}


def _differs(state: State, operation: Operation) -> bool:
    """Whether the CAS that was asked for may be another one."""
    return bool(operation.cas_asked) and state[1] != operation.cas_asked


def _get(state: State, operation: Operation) -> State | None:
    value, cas = state
    if operation.outcome is Outcome.ABSENT:
        return state if value is None else None
    if operation.outcome is Outcome.OK and value is not None and value == operation.value:
        if not operation.cas:
            return state  # of a locked document, nobody is told the CAS
        return (value, operation.cas) if cas in {0, operation.cas} else None
    return None


def _set(state: State, operation: Operation) -> State | None:
    exists = state[0] is not None
    match operation.outcome:
        case Outcome.OK:
            if operation.cas_asked and not (exists and _matches(state, operation)):
                return None
            return operation.argument, operation.cas
        case Outcome.EXISTS:
            return state if exists and _differs(state, operation) else None
        case Outcome.ABSENT:
            return state if operation.cas_asked and not exists else None
    return None


def _add(state: State, operation: Operation) -> State | None:
    exists = state[0] is not None
    match operation.outcome:
        case Outcome.OK:
            return None if exists else (operation.argument, operation.cas)
        case Outcome.EXISTS:
            return state if exists else None
    return None


def _replace(state: State, operation: Operation) -> State | None:
    exists = state[0] is not None
    match operation.outcome:
        case Outcome.OK:
            fits = exists and _matches(state, operation)
            return (operation.argument, operation.cas) if fits else None
        case Outcome.EXISTS:
            return state if exists and _differs(state, operation) else None
        case Outcome.ABSENT:
            return None if exists else state
    return None


def _delete(state: State, operation: Operation) -> State | None:
    exists = state[0] is not None
    match operation.outcome:
        case Outcome.OK:
            return NOTHING if exists and _matches(state, operation) else None
        case Outcome.EXISTS:
            return state if exists and _differs(state, operation) else None
        case Outcome.ABSENT:
            return None if exists else state
    return None


def _increment(state: State, operation: Operation) -> State | None:
    value = state[0]
    number = counted(value, operation)
    match operation.outcome:
        case Outcome.OK:
            if number is None or number != operation.value:
                return None
            return number, operation.cas
        case Outcome.ABSENT:
            return state if value is None and operation.initial is None else None
        case Outcome.NOT_A_NUMBER:
            return state if value is not None and number is None else None
    return None


def _append(state: State, operation: Operation) -> State | None:
    value = state[0]
    match operation.outcome:
        case Outcome.OK:
            if value is None or not _matches(state, operation):
                return None
            return value + operation.argument, operation.cas
        case Outcome.EXISTS:
            return state if value is not None and _differs(state, operation) else None
        case Outcome.NOT_STORED | Outcome.ABSENT:
            return state if value is None else None
    return None


def _touch(state: State, operation: Operation) -> State | None:
    value = state[0]
    match operation.outcome:
        case Outcome.OK:
            is_shown = operation.kind is Kind.TOUCH or value == operation.value
            return (value, operation.cas) if value is not None and is_shown else None
        case Outcome.ABSENT:
            return state if value is None else None
    return None


def _push(state: State, operation: Operation) -> State | None:
    return (pushed(state[0], operation), operation.cas) if operation.outcome is Outcome.OK else None


def _set_with_meta(state: State, operation: Operation) -> State | None:
    match operation.outcome:
        case Outcome.OK:
            return operation.argument, operation.cas
        case Outcome.EXISTS:
            return state  # it lost: to a document, or to what is left of one
    return None


_STEPS: Final[dict[Kind, Callable[[State, Operation], State | None]]] = {
    Kind.GET: _get,
    Kind.GET_AND_LOCK: _get,
    Kind.SET: _set,
    Kind.ADD: _add,
    Kind.REPLACE: _replace,
    Kind.DELETE: _delete,
    Kind.INCREMENT: _increment,
    Kind.APPEND: _append,
    Kind.TOUCH: _touch,
    Kind.GET_AND_TOUCH: _touch,
    Kind.PUSH: _push,
    Kind.SET_WITH_META: _set_with_meta,
}
