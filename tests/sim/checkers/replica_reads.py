"""What a replica answers was committed: a master published it before. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from sim.facts import Committed, History, Operation, Outcome, cas_of


def uncommitted(
    reads: Iterable[Operation], histories: Iterable[History], committed: Iterable[Committed]
) -> list[str]:
    """Look at answers of GET_REPLICA. `histories` say which change has the CAS of an answer; one
    that was compacted away is not looked for.
    """
    answered = [read for read in reads if read.outcome is Outcome.OK]
    if not answered:
        return []
    seqnos: dict[tuple[int, int], int] = {}
    owners: dict[tuple[int, int], set[int]] = defaultdict(set)
    wanted = {(read.vb_id, read.cas) for read in answered}
    histories = tuple(histories)
    for history in histories:
        changes = [(seqno, cas_of(change)) for seqno, change in history.entries.items()]
        for seqno, cas in (*changes, *history.tail.items()):
            if (history.vb_id, cas) in wanted:
                seqnos[history.vb_id, cas] = seqno
                owners[history.vb_id, cas].add(_owner(history, seqno))
    versions = {
        key: {uuid for owner in owners[key] for uuid in _with(histories, key[0], owner, seqno)}
        for key, seqno in seqnos.items()
    }
    first_ns: dict[tuple[int, int], int] = {}
    for fact in committed:
        for key in wanted:
            is_reached = key in seqnos and key[0] == fact.vb_id and fact.seqno >= seqnos[key]
            if is_reached and fact.vb_uuid in versions[key]:
                first_ns[key] = min(first_ns.get(key, fact.at_ns), fact.at_ns)
    problems = []
    for read in answered:
        key = read.vb_id, read.cas
        if key not in seqnos or read.ended_ns is None:
            continue
        if key not in first_ns or first_ns[key] > read.ended_ns:
            problems.append(f"a replica answered what was not committed: {read}, seqno"
                            f" {seqnos[key]}")  # fmt: skip
    return problems


def _owner(history: History, seqno: int) -> int:
    """Return the version in which a change was made."""
    made_in = (uuid for uuid, began in history.versions if began < seqno)
    return next(made_in, history.versions[-1][0])


def _with(histories: Iterable[History], vb_id: int, owner: int, seqno: int) -> Iterator[int]:
    """Yield a version and those that go on from it with a change of it, also where a history of
    them has compacted the change away.
    """
    yield owner
    for history in histories:
        end = history.end_of(owner) if history.vb_id == vb_id else None
        if end is not None and end >= seqno:
            uuids = [uuid for uuid, _ in history.versions]
            yield from uuids[: uuids.index(owner)]
