"""Locks of documents: GET_AND_LOCK and UNLOCK. Pure.

A lock begins between the request and the answer of its GET_AND_LOCK, and is over after the time
that was asked for, with an UNLOCK or a change that has its CAS, and with the next master or version
of its partition. So there is a time in which it is there for certain, and one in which it may be.
Where wall clocks jump, nobody knows when a lock is over by itself.

It says nothing of values: `sim.checkers.linearizable` knows which of them a lock's CAS opens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from sim.facts import Excuse, Kind, Mastership, Operation, Outcome
from sim.plan import Plan
from sim.world import MS, SECOND

SLACK_NS: Final = 20 * MS
PPM: Final = 1_000_000
NOT_OPENED: Final = "the CAS of a lock did not open it"
"""Told last: mostly a change that the lock should have refused is why."""
FOR_EVER_NS: Final = 1 << 62
_CHANGING: Final = frozenset(
    {Kind.SET, Kind.REPLACE, Kind.APPEND, Kind.DELETE, Kind.TOUCH, Kind.ADD}
)
_UNSURE: Final = frozenset({Outcome.AMBIGUOUS, Outcome.UNKNOWN, None})


class Lock(NamedTuple):
    """A lock of one key. It is there for certain from the answer of `taken` until `sure_until_ns`,
    and may be there from its request until `over_ns`.
    """

    taken: Operation
    sure_until_ns: int
    over_ns: int


def broken(
    operations: Iterable[Operation],
    masterships: Sequence[Mastership],
    excuses: Sequence[Excuse],
    plan: Plan,
) -> list[str]:
    """Return what was done in spite of a lock, or refused without one."""
    by_key: dict[bytes, list[Operation]] = defaultdict(list)
    for operation in operations:
        if not operation.collection and operation.kind is not Kind.OBSERVE:
            by_key[operation.key].append(operation)
    ends: dict[int, list[int]] = defaultdict(list)
    for mastership in masterships:
        ends[mastership.vb_id].append(mastership.at_ns)
    problems = []
    for history in by_key.values():
        if not any(each.kind is Kind.GET_AND_LOCK for each in history):
            problems += [_unexplained(each) for each in history if _meets_a_lock(each)]
            continue
        cuts = [each for each in excuses if each.vb_id == history[0].vb_id]
        locks = [
            _lock_of(each, history, ends[each.vb_id], cuts, plan)
            for each in history
            if each.kind is Kind.GET_AND_LOCK and (each.lock_cas or each.outcome in _UNSURE)
        ]
        for operation in history:
            problems += _wrong(operation, history, locks)
    return sorted(problems, key=lambda each: each.startswith(NOT_OPENED))


def _lock_of(
    taken: Operation,
    history: Iterable[Operation],
    ends: Iterable[int],
    cuts: Iterable[Excuse],
    plan: Plan,
) -> Lock:
    """Return when a lock is there. What opens it is not looked at: that depends on who asks."""
    began_ns, jumps = taken.invoked_ns, "clock_jump" in plan.faults
    if taken.outcome is not Outcome.OK:
        return Lock(taken, 0, FOR_EVER_NS)  # its request may arrive at any time
    lasts_ns = taken.lock_s * SECOND
    drift_ns = lasts_ns * plan.drift_ppm // PPM + SLACK_NS
    sure_ns = began_ns if jumps else began_ns + lasts_ns - drift_ns
    sure_ns = min([sure_ns, *(at_ns for at_ns in ends if at_ns > began_ns)])
    for cut in cuts:
        if cut.kind != "purge" and (cut.until_ns is None or cut.until_ns >= began_ns):
            sure_ns = min(sure_ns, cut.at_ns)
    assert taken.ended_ns is not None
    over_ns = FOR_EVER_NS if jumps else taken.ended_ns + lasts_ns + drift_ns
    gone = (each.ended_ns for each in history if _ends(each, taken) and each.ended_ns is not None)
    return Lock(taken, sure_ns, min([over_ns, *gone]))


def _ends(operation: Operation, taken: Operation) -> bool:
    """Whether an operation that began after a lock was taken has ended it: the document was
    changed, or unlocked.
    """
    if operation.outcome is not Outcome.OK or operation.invoked_ns < (taken.ended_ns or 0):
        return False
    if operation.kind is Kind.UNLOCK:
        return operation.lock_cas == taken.lock_cas
    return operation.kind in _CHANGING


def _wrong(
    operation: Operation, history: Sequence[Operation], locks: Sequence[Lock]
) -> Iterable[str]:
    """Compare an answer with the locks of its key."""
    if operation.ended_ns is None or operation.outcome in _UNSURE:
        return
    if _meets_a_lock(operation) and not any(_may_hold(each, operation) for each in locks):
        yield _unexplained(operation)
    is_unlocked = operation.kind is Kind.UNLOCK and operation.outcome is Outcome.OK
    if is_unlocked and operation.cas_asked not in {each.taken.lock_cas for each in locks}:
        yield f"an UNLOCK was made with a CAS that is none of a lock: {operation}"
    for lock in locks:
        is_own = operation.cas_asked == lock.taken.lock_cas
        if is_own and operation.outcome is Outcome.OK and operation.invoked_ns > lock.over_ns:
            yield f"a lock that was over let this pass: {operation}; {lock.taken}"
        if not _holds(lock, operation, history):
            continue
        if is_own and operation.outcome in {Outcome.LOCKED, Outcome.NOT_LOCKED, Outcome.EXISTS}:
            yield f"{NOT_OPENED}: {operation}; {lock.taken}"
        elif not is_own and operation.outcome is Outcome.OK:
            if operation.kind in _CHANGING:
                yield f"a locked document was changed: {operation}; {lock.taken}"
            elif operation.kind is Kind.GET_AND_LOCK:
                yield f"a locked document was locked again: {operation}; {lock.taken}"
            elif operation.kind is Kind.GET and not operation.is_locked:
                yield f"a locked document showed its CAS: {operation}; {lock.taken}"


def _holds(lock: Lock, operation: Operation, history: Iterable[Operation]) -> bool:
    """Whether a lock was there for certain, from the request of an operation to its answer."""
    taken, ended_ns = lock.taken, operation.ended_ns
    if operation is taken or taken.ended_ns is None or ended_ns is None:
        return False
    if operation.invoked_ns < taken.ended_ns or ended_ns > lock.sure_until_ns:
        return False
    return not any(
        each is not operation and each.cas_asked == taken.lock_cas and each.invoked_ns <= ended_ns
        for each in history
    )


def _may_hold(lock: Lock, operation: Operation) -> bool:
    """Whether a lock may have been there at some moment between request and answer."""
    if lock.taken is operation:
        return False
    ended_ns = operation.ended_ns or 0
    return lock.taken.invoked_ns <= ended_ns and lock.over_ns >= operation.invoked_ns


def _meets_a_lock(operation: Operation) -> bool:
    return operation.outcome is Outcome.LOCKED or operation.is_locked


def _unexplained(operation: Operation) -> str:
    return f"a document is called locked, and no lock is there: {operation}"
