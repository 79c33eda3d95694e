"""Consistent cuts: one state of the whole store, as docs/consistent-cuts.md has the rule. Pure.

It holds for the partitions of one node and of a cluster, and says nothing of how cuts are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from sim.checkers.falling import CAS_FROM_ELSEWHERE
from sim.facts import AfterCut, Batch, CutHeld, Facts, Kind, Mastership, Operation, Outcome
from sim.ledger import Ledger, Log, end_of
from sim.world import MS


def broken(facts: Facts) -> list[str]:
    """Return what was wrong with cuts, or came after one."""
    problems = [*_late(facts.after_cuts, facts.masterships), *_falling(facts.cuts)]
    answered = [
        each for each in facts.operations if each.outcome is Outcome.OK and each.seqno
        and each.kind is not Kind.OBSERVE
    ]  # fmt: skip
    for cut in facts.cuts:
        problems += _split(cut, answered, facts.ledger)
        problems += _divided(cut, facts.batches, facts.ledger)
        problems += _unlike(cut, facts.ledger)
    return problems


def _late(after: Iterable[AfterCut], masterships: Iterable[Mastership]) -> Iterator[str]:
    """What a node changes after a cut has a CAS above its time. Not what it gets with one. And not
    where another node may have made the change: it need not have taken part in the cut.
    """
    masters: dict[int, set[str]] = {}
    for mastership in masterships:
        masters.setdefault(mastership.vb_id, set()).add(mastership.node)
    for each in after:
        is_of_one = len(masters.get(each.vb_id, ())) < 2
        if is_of_one and each.key[:1] != CAS_FROM_ELSEWHERE:
            yield (
                f"{each.consumer} held the cut {each.time:x}, and then received seqno {each.seqno}"
                f" of vb {each.vb_id}, {each.key!r}, with CAS {each.cas:x},"
                f" at {each.at_ns / MS:.3f} ms"
            )


def _falling(cuts: Iterable[CutHeld]) -> Iterator[str]:
    """The closed times of a connection rise."""
    newest: dict[str, int] = {}
    for cut in cuts:
        if cut.time <= newest.get(cut.connection, 0):
            yield f"{_named(cut)}: its time is not above that of the cut before"
        newest[cut.connection] = cut.time


def _split(cut: CutHeld, answered: Sequence[Operation], ledger: Ledger) -> Iterator[str]:
    """What was answered before something in the cut began is in it."""
    missing: list[Operation] = []
    newest: Operation | None = None
    for operation in answered:
        is_in = has(cut.positions, operation, ledger)
        if is_in and (newest is None or operation.invoked_ns > newest.invoked_ns):
            newest = operation
        elif is_in is False:
            missing.append(operation)
    for operation in missing:
        if newest is not None and (operation.ended_ns or 0) < newest.invoked_ns:
            yield f"{_named(cut)} has {newest}, and lacks what was answered before: {operation}"
            return


def _divided(cut: CutHeld, batches: Iterable[Batch], ledger: Ledger) -> Iterator[str]:
    """A batch is in a cut with all of its changes, or with none."""
    for batch in batches:
        if batch.outcome is Outcome.OK:
            found = {has(cut.positions, operation, ledger) for operation in batch.operations}
            if {True, False} <= found:
                yield f"{_named(cut)} has a part of the batch {batch.name}"


def _unlike(cut: CutHeld, ledger: Ledger) -> Iterator[str]:
    """The consumer's documents are those of its positions. Keys of the default collection are
    lower-case letters here, and other keys begin with their collection's id.
    """
    for vb_id, documents in cut.documents.items():
        log, seqno = cut.positions[vb_id]
        state = {key: change.value for key, change in ledger.state(vb_id, log, seqno).items()}
        for key in sorted(state.keys() | documents.keys()):
            if key[:1].islower() and state.get(key) != documents.get(key):
                yield (
                    f"{_named(cut)}: at seqno {seqno} of vb {vb_id}, {key!r} was"
                    f" {state.get(key)!r}, and the consumer has {documents.get(key)!r}"
                )
                return


def has(
    positions: Mapping[int, tuple[Log, int]], operation: Operation, ledger: Ledger
) -> bool | None:
    """Whether positions have a change; None: it was undone, or they do not say."""
    if operation.vb_id not in positions:
        return None
    log, seqno = positions[operation.vb_id]
    end = end_of(log, operation.vb_uuid, seqno)
    if end is not None:
        if operation.seqno <= end:
            return True
        return False if operation.vb_uuid == log[0][0] else None
    # A later master made it, in a history that goes on from these positions.
    later = ledger.log_of(operation.vb_id, operation.vb_uuid)
    last = end_of(later, log[0][0], operation.seqno)
    return False if last is not None and seqno <= last else None


def _named(cut: CutHeld) -> str:
    return f"the cut {cut.time:x} of {cut.consumer} at {cut.at_ns / MS:.3f} ms"
