"""What OBSERVE_SEQNO tells of a partition: its newest version, how far that is persisted and
committed, and where an older version ended. Pure.

A replica answers, too. It tells what is on its disk, which need not be committed anywhere, and may
be less than what was answered.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from sim.facts import (
    Committed,
    Facts,
    History,
    Kind,
    Mastership,
    Observed,
    Operation,
    Outcome,
)
from sim.plan import Plan
from sim.world import SECOND

ELECTION_NS: Final = 5 * SECOND
"""A former master is a replica so long at most before the next one serves."""


def wrong(facts: Facts, plan: Plan) -> list[str]:
    """Return what was told of a partition that was not so."""
    asked = [each for each in facts.operations if each.kind is Kind.OBSERVE]
    if not asked:
        return []
    reached = _Reached(facts.committed)
    problems, of_masters = [], []
    for operation in asked:
        seen = operation.observed
        if seen is None:
            if operation.outcome is Outcome.ABSENT:
                problems += _unknown(operation, facts)
            continue
        if seen.persisted_seqno > seen.seqno:
            problems.append(
                f"an OBSERVE_SEQNO tells that seqno {seen.persisted_seqno} is persisted, and only"
                f" {seen.seqno} is committed: {operation}"
            )
        problems += _ended_elsewhere(operation, seen, facts.histories)
        if is_of_master(operation, facts.masterships):
            of_masters.append(operation)
            problems += _uncommitted(operation, seen, reached)
    if plan.acknowledge == "committed":
        problems += _behind(of_masters, facts.operations)
    return problems


def is_of_master(operation: Operation, masterships: Iterable[Mastership]) -> bool:
    """Whether the partition's master answered, for certain."""
    ended_ns, master = operation.ended_ns or 0, ""
    if not operation.node:
        return True  # a node alone
    for each in masterships:
        if each.vb_id == operation.vb_id:
            if each.at_ns <= operation.invoked_ns:
                master = each.node
            elif each.at_ns <= ended_ns + ELECTION_NS:
                return False
    return master == operation.node


def _unknown(operation: Operation, facts: Facts) -> Iterator[str]:
    """A version of which a client was told stays known, unless history was cut back."""
    at_rest = {each.vb_id: each for each in facts.final}.get(operation.vb_id)
    is_there = at_rest is not None and operation.vb_uuid in dict(at_rest.versions)
    if is_there and is_of_master(operation, facts.masterships):
        yield f"an OBSERVE_SEQNO does not know a version that there is: {operation}"


def _uncommitted(operation: Operation, seen: Observed, reached: _Reached) -> Iterator[str]:
    """What a master tells is committed."""
    committed = reached.until(operation.vb_id, seen.vb_uuid, operation.ended_ns or 0)
    if committed is None:
        yield f"an OBSERVE_SEQNO tells a version that nobody served: {operation}"
    elif seen.seqno > committed:
        yield (
            f"an OBSERVE_SEQNO tells seqno {seen.seqno}, and only {committed} was committed:"
            f" {operation}"
        )


def _ended_elsewhere(
    operation: Operation, seen: Observed, histories: Iterable[History]
) -> Iterator[str]:
    """The version that was asked for has ended where histories that go on from it say."""
    if (seen.ended_seqno is None) != (seen.asked_uuid == seen.vb_uuid):
        yield f"an OBSERVE_SEQNO does not tell whether the version has ended: {operation}"
        return
    for history in histories:
        uuids = [uuid for uuid, _ in history.versions]
        if history.vb_id != operation.vb_id or not {seen.asked_uuid, seen.vb_uuid} <= {*uuids}:
            continue
        end = history.end_of(seen.asked_uuid)
        if seen.ended_seqno not in {None, end}:
            yield (
                f"an OBSERVE_SEQNO tells that a version ended at {seen.ended_seqno}, and it ended"
                f" at {end}: {operation}"
            )
            return


def _behind(asked: Iterable[Operation], operations: Iterable[Operation]) -> Iterator[str]:
    """What was answered before the request is told, and persisted."""
    answered: dict[tuple[int, int], list[Operation]] = defaultdict(list)
    for each in operations:
        if each.outcome is Outcome.OK and each.seqno and each.kind is not Kind.OBSERVE:
            answered[each.vb_id, each.vb_uuid].append(each)
    for operation in asked:
        seen = operation.observed
        assert seen is not None
        for write in answered.get((operation.vb_id, seen.vb_uuid), ()):
            was_before = write.ended_ns is not None and write.ended_ns < operation.invoked_ns
            if was_before and write.seqno > min(seen.seqno, seen.persisted_seqno):
                yield f"an OBSERVE_SEQNO lacks what was answered before: {operation}; {write}"
                break


class _Reached:
    """How far versions were committed, and when."""

    def __init__(self, committed: Sequence[Committed]) -> None:
        self._facts: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for fact in sorted(committed, key=lambda each: each.at_ns):
            known = self._facts.setdefault((fact.vb_id, fact.vb_uuid), [])
            highest = max(fact.seqno, known[-1][1]) if known else fact.seqno
            known.append((fact.at_ns, highest))

    def until(self, vb_id: int, vb_uuid: int, at_ns: int) -> int | None:
        """Return the highest seqno of a version that was committed by then; None: nobody served
        the version.
        """
        known = self._facts.get((vb_id, vb_uuid), [])
        at = bisect_right(known, at_ns, key=lambda each: each[0])
        return known[at - 1][1] if at else None
