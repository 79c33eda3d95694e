"""What a partition keeps for a consumer that is away: no purge passes its position. Pure.

A keep counts from its answer on, unless a branch or an election may have undone it. A position
counts from its request on: nobody knows when it is committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sim.facts import Excuse, Operation, Outcome
from sim.plan import Plan
from sim.world import MS
from vbucket.model.consumer_documents import keep_key


def passed(operations: Iterable[Operation], excuses: Sequence[Excuse], plan: Plan) -> list[str]:
    """Return the purges that passed the consumer."""
    if plan.nodes > 1 and plan.acknowledge != "committed":
        return []  # an election may lose what was answered
    stored = [each for each in operations if each.kept_seqno is not None]
    problems = []
    for purge in purges(stored, excuses):
        highest = max(
            each.kept_seqno or 0
            for each in stored
            if each.vb_id == purge.vb_id and each.invoked_ns <= purge.at_ns
        )
        if purge.to_seqno > highest:
            problems.append(
                f"a purge of vb {purge.vb_id} up to seqno {purge.to_seqno} at"
                f" {purge.at_ns / MS:.3f} ms passed the consumer for which deletions are kept: it"
                f" was at {highest} at most"
            )
    return problems


def purges(operations: Iterable[Operation], excuses: Sequence[Excuse]) -> Iterator[Excuse]:
    """Yield the purges of partitions that keep something for certain."""
    since_ns: dict[int, int] = {}
    for each in operations:
        is_keep = each.kept_seqno is not None and each.key == keep_key(each.vb_id)
        if is_keep and each.outcome is Outcome.OK and each.ended_ns is not None:
            since_ns[each.vb_id] = min(each.ended_ns, since_ns.get(each.vb_id, each.ended_ns))
    undone = {each.vb_id for each in excuses if each.kind != "purge"}
    for each in excuses:
        is_kept = each.vb_id in since_ns and each.vb_id not in undone
        if each.kind == "purge" and is_kept and each.at_ns > since_ns[each.vb_id]:
            yield each
