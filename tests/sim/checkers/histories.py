"""Rules over versions and histories. Pure.

- nothing answered is lost: the final history holds every version and seqno that a client was told;
- equal versions mean equal histories, on all nodes and at all times;
- a partition has one master in an epoch;
- a rollback has a cause: a branch, an unclean election, or a purge.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from sim.facts import (
    Begun,
    Excuse,
    History,
    Mastership,
    Operation,
    Outcome,
    RolledBack,
    Streamed,
    cas_of,
    fingerprint,
)

PURGE = "purge"


def lost_writes(
    operations: Iterable[Operation],
    final: Iterable[History],
    excuses: Sequence[Excuse],
    failovers: Sequence[Excuse] = (),
) -> list[str]:
    """Every answered write must be in the final history of its partition, and what an OBSERVE said
    to be persisted.

    Writes above the seqno of an excuse that were answered before it took effect do not count. A
    failover (`failovers`) excuses writes without a durability frame only.
    """
    by_vb = {history.vb_id: history for history in final}
    problems = []
    for operation in operations:
        if operation.outcome is not Outcome.OK or not operation.seqno:
            continue
        history = by_vb.get(operation.vb_id)
        problem = "nobody holds the partition" if history is None else missing(operation, history)
        causes = excuses if operation.level else [*excuses, *failovers]
        if problem and not _is_excused(operation, causes):
            problems.append(f"an answered write is lost: {operation}; {problem}")
    return problems


def missing(operation: Operation, history: History) -> str:
    """Return why a write is not in a history; "" if it is, or was before it was compacted."""
    end = history.end_of(operation.vb_uuid)
    if end is None:
        return "its version is gone"
    if operation.seqno > end:
        return f"its version ends at {end}"
    change = history.entries.get(operation.seqno)
    if change is not None and operation.cas and cas_of(change) != operation.cas:
        return f"its seqno has another change, with CAS {cas_of(change):x}"
    return ""


def _is_excused(operation: Operation, excuses: Sequence[Excuse]) -> bool:
    return is_excused_by(operation, excuses, None)


def is_excused_by(
    operation: Operation, excuses: Sequence[Excuse], kinds: frozenset[str] | None
) -> bool:
    """Whether a write may be gone for a reason of these kinds; None: all but a purge."""
    invoked_ns = operation.invoked_ns
    return any(
        excuse.vb_id == operation.vb_id
        and (excuse.kind in kinds if kinds is not None else excuse.kind != PURGE)
        and excuse.to_seqno < operation.seqno
        and (excuse.until_ns is None or invoked_ns <= excuse.until_ns)
        for excuse in excuses
    )


def failovers(masterships: Iterable[Mastership]) -> list[Excuse]:
    """Return what failovers may have cut off, if masters answer alone (`acknowledge=master`): all
    above the start of a new master's own version, until that master began to serve. A handover
    begins no version, and loses nothing.
    """
    seen: set[tuple[int, int]] = set()
    cuts = []
    for item in masterships:
        if (item.vb_id, item.vb_uuid) not in seen:
            seen.add((item.vb_id, item.vb_uuid))
            cuts.append(Excuse(item.at_ns, item.vb_id, item.since_seqno, "failover", item.at_ns))
    return cuts


def diverged(histories: Iterable[History]) -> list[str]:
    """Histories that share a version must be equal up to the lower of its two ends."""
    known: dict[tuple[int, int, int], tuple[int, History]] = {}
    """(partition, version, seqno) -> checksum, and where it was seen first."""
    began: dict[tuple[int, int], tuple[int, History]] = {}
    tails: list[tuple[int, int, int, int, History]] = []
    problems = []
    for history in histories:
        vb_id = history.vb_id
        versions = list(history.versions)
        for uuid, start in versions:
            first, where = began.setdefault((vb_id, uuid), (start, history))
            if first != start:
                problems.append(
                    f"vb {vb_id}: version {uuid:x} began at {first} on {_place(where)}, and at"
                    f" {start} on {_place(history)}"
                )
        at = len(versions) - 1
        for seqno, cas in history.tail.items():
            uuid = next((uuid for uuid, start in versions if start < seqno), versions[-1][0])
            tails.append((vb_id, uuid, seqno, cas, history))
        for seqno in sorted(history.entries):
            while at > 0 and versions[at - 1][1] < seqno:
                at -= 1
            uuid = versions[at][0]
            digest = history.entries[seqno]
            first, where = known.setdefault((vb_id, uuid, seqno), (digest, history))
            if first != digest:
                problems.append(
                    f"vb {vb_id}: version {uuid:x} has another change with seqno {seqno} on"
                    f" {_place(where)} than on {_place(history)}"
                )
                break
    for vb_id, uuid, seqno, cas, history in tails:
        digest, where = known.setdefault((vb_id, uuid, seqno), (fingerprint(cas, 0), history))
        if cas_of(digest) != cas:
            problems.append(
                f"vb {vb_id}: version {uuid:x} has another change with seqno {seqno} on"
                f" {_place(where)} than on {_place(history)}, where it was not committed"
            )
            break
    return problems


def _place(history: History) -> str:
    return f"{history.node} at {history.at_ns / 1e6:.3f} ms"


def masters(masterships: Iterable[Mastership]) -> list[str]:
    """A partition has one master in an epoch: one node."""
    by_epoch: dict[tuple[int, int], dict[str, Mastership]] = defaultdict(dict)
    for mastership in masterships:
        by_epoch[mastership.vb_id, mastership.epoch].setdefault(mastership.node, mastership)
    return [
        f"vb {vb_id} has {len(nodes)} masters in epoch {epoch}: "
        + ", ".join(f"{item.node} at {item.at_ns / 1e6:.3f} ms" for item in nodes.values())
        for (vb_id, epoch), nodes in by_epoch.items()
        if len(nodes) > 1
    ]


def rollbacks(rolled_back: Iterable[RolledBack], excuses: Sequence[Excuse]) -> list[str]:
    """What a consumer has seen was committed: only a cut history may take it back."""
    problems = []
    for event in rolled_back:
        causes = [
            excuse
            for excuse in excuses
            if excuse.vb_id == event.vb_id
            and excuse.at_ns <= event.at_ns
            and explains(excuse, event)
        ]
        if not causes:
            problems.append(
                f"{event.consumer} was rolled back in vb {event.vb_id} from {event.from_seqno} to"
                f" {event.to_seqno} at {event.at_ns / 1e6:.3f} ms, and history was not cut back"
            )
    return problems


def not_rolled_back(
    followed: Iterable[Streamed | RolledBack | Begun], final: Iterable[History]
) -> list[str]:
    """A consumer that holds what was cut off is rolled back before it receives anything else."""
    by_vb = {history.vb_id: history for history in final}
    held: dict[tuple[str, int], Streamed] = {}
    """The last that each consumer received of a partition, as long as it has that."""
    problems = []
    for event in followed:
        if isinstance(event, Begun):
            held = {key: value for key, value in held.items() if key[0] != event.consumer}
            continue
        key = event.consumer, event.vb_id
        before, history = held.pop(key, None), by_vb.get(event.vb_id)
        if isinstance(event, RolledBack):
            continue
        held[key] = event
        if before is None or history is None or before.vb_uuid == event.vb_uuid:
            continue
        end = history.end_of(before.vb_uuid)
        if end is not None and end < before.seqno and history.end_of(event.vb_uuid) is not None:
            problems.append(
                f"{event.consumer} had seqno {before.seqno} of vb {event.vb_id}, whose version"
                f" {before.vb_uuid:x} ended at {end}, and received seqno {event.seqno} of version"
                f" {event.vb_uuid:x} without a rollback"
            )
    return problems


def explains(excuse: Excuse, event: RolledBack) -> bool:
    """Whether a rollback may come from a cut of history, or from a purge that it was below. Who has
    a part of a snapshot loses it if the cut is below the snapshot's end.
    """
    if excuse.kind == PURGE:
        return event.to_seqno == 0 and event.from_seqno < excuse.to_seqno
    return excuse.to_seqno < max(event.from_seqno, event.snap_end)
