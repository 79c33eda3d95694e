"""Batches: all changes are made, or none. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from sim.facts import Batch, Excuse, Outcome
from sim.ledger import Ledger


def torn(batches: Iterable[Batch], ledger: Ledger, excuses: Sequence[Excuse]) -> list[str]:
    """Look for the values of each batch among all that was ever committed. A branch of a partition
    may undo what is not committed of it.
    """
    values = ledger.values()
    branched = {excuse.vb_id for excuse in excuses}
    problems = []
    for batch in batches:
        changes = [each for each in batch.operations if each.argument]
        made = [each for each in changes if each.argument in values]
        missing = [
            each for each in changes if each.argument not in values and each.vb_id not in branched
        ]
        if made and batch.outcome is Outcome.REFUSED:
            problems.append(f"a batch was refused, and a part of it was made: {made[0]}")
        elif missing and (made or batch.outcome is Outcome.OK):
            problems.append(f"a part of a batch was not made: {missing[0]}, of {batch.name}")
        if batch.outcome is Outcome.OK:
            problems += _unlike(batch, ledger, branched)
    return problems


def _unlike(batch: Batch, ledger: Ledger, branched: Container[int]) -> Iterable[str]:
    """Each change is where its token says, with the CAS of the batch."""
    for each in batch.operations:
        change = ledger.change(each.vb_id, each.vb_uuid, each.seqno)
        if change is None and each.vb_id in branched:
            continue
        if change is None or (change.key, change.cas) != (each.key, each.cas):
            yield f"a change of a batch is not what was answered: {each}; {change} is there"
