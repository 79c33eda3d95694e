"""What a run has reached: how often what the plans are after has happened. Pure.

A fault that was drawn has not happened yet: a snapshot that no master's death met, or a purge that
nobody was behind, tests nothing. So the moments and facts of a run are counted, whatever the plan
said. `WANTED` is what a range of seeds has to reach.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from sim.checkers import keeps
from sim.checkers.histories import PURGE, explains
from sim.facts import Excuse, Facts, Kind, Operation, Outcome, RolledBack
from sim.moments import STORE, Moment, short
from sim.twin_pages import ALONE, FROM_COPY, NAMED, PUT_RIGHT
from sim.world import SECOND

ELECTIONS: Final = frozenset({"election", "election of the same master", "unclean election"})
_COUNTED: Final = {
    "election": "elections of another master",
    "election of the same master": "elections of the same master",
    "unclean election": "unclean elections",
    "record built anew": "records built anew",
    "in-sync set shrinks": "in-sync sets that shrink",
    "in-sync set grows": "in-sync sets that grow",
    "snapshot begun": "snapshots begun",
    "snapshot completed": "snapshots completed",
    "snapshot cut off": "snapshots cut off",
    "handover": "handovers",
    "branch": "branches",
    "rollback of a replica": "rollbacks of a replica",
    "rollback of a replica to 0": "rollbacks of a replica to 0",
    "fence": "fences",
    "window full": "full windows",
    "lost folder": "folders lost",
    "store goes back": "stores that went back",
    "older master": "links to a master of the format before",
    "older replica": "links of a replica of the format before",
    "upgraded": "nodes upgraded",
    "set back": "nodes set back to the version before",
}
"""Kind of a moment -> how its count is called."""
_BY_CAUSE: Final = {
    PURGE: "rollbacks of a consumer after a purge",
    "branch": "rollbacks of a consumer after a branch",
    "unclean": "rollbacks of a consumer after an unclean election",
}
OF_VIEWS: Final = (
    "scans", "scans with changes under way", "hashes read", "repairs", "repairs in place", "cuts",
    "cuts after a rollback", "batches made", "batches refused", "batches without an answer",
)  # fmt: skip
"""What probers and consumers that ask for cuts reach. Batches are of a node alone."""
OF_DAMAGE: Final = (
    "pages damaged", "reads of damaged pages", "pages mended alone",
    "pages mended by another copy", "pages named and put right",
)  # fmt: skip
"""What plans with damaged stores reach."""
OF_LOCKS: Final = (
    "locks taken", "locks that refused a write", "documents that expired by a maxTTL",
    "observes answered", "purges behind a consumer that is kept",
)  # fmt: skip
"""What clients that lock documents reach (`sim.lock_workload`)."""
OF_CLUSTERS: Final = (
    *_COUNTED.values(),
    "elections after a clock jump",
    "snapshots at a master's death",
    "handovers with writes under way",
    "purges with a consumer behind",
    "purges with a replica behind",
    *_BY_CAUSE.values(),
    "discard files",
    "receipts",
    "operations refused",
    "writes without an answer",
    *OF_VIEWS[:7],
    *OF_DAMAGE,
    *OF_LOCKS,
)
"""All counts of clusters."""
LEFT_COPIES: Final = "damaged copies that consumers left"
"""Few plans have damages and consumers that read from copies."""
ALL: Final = (*OF_CLUSTERS, *OF_VIEWS[7:], LEFT_COPIES)
WANTED: Final = frozenset(OF_CLUSTERS)
"""What seeds of clusters have to reach."""
_READS: Final = frozenset({Kind.GET})
_ENDS: Final = {
    ALONE: OF_DAMAGE[2],
    FROM_COPY: OF_DAMAGE[3],
    PUT_RIGHT: OF_DAMAGE[4],
    NAMED: OF_DAMAGE[4],
}


class Told(Protocol):
    """A fault, as `sim.faults` tells it."""

    name: str
    began_ns: int


def reached(facts: Facts, moments: Sequence[Moment], faults: Iterable[Told]) -> dict[str, int]:
    """Return how often each of `OF_CLUSTERS` has happened, without those that never have."""
    found = Counter(_COUNTED[each.kind] for each in moments if each.kind in _COUNTED)
    jumps = [fault.began_ns for fault in faults if fault.name == "clock_jump"]
    if jumps:
        found["elections after a clock jump"] = sum(
            each.kind in ELECTIONS and each.at_ns > min(jumps) for each in moments
        )
    found["snapshots at a master's death"] = _snapshots_at_a_death(moments)
    found["handovers with writes under way"] = _handovers_under_writes(facts.operations, moments)
    found["purges with a replica behind"] = sum(
        each.kind == "snapshot begun" and "purged" in each.text for each in moments
    )
    found["purges with a consumer behind"] = _purges_with_consumers_behind(facts)
    for event in facts.rolled_back:
        found.update(_causes(event, facts.excuses))
    found["discard files"] = len(facts.cut_off)
    found["receipts"] = len(facts.lost)
    outcomes = Counter(
        operation.outcome for operation in facts.operations if operation.kind not in _READS
    )
    found["operations refused"] = outcomes[Outcome.REFUSED]
    found["writes without an answer"] = outcomes[Outcome.AMBIGUOUS]
    found += _views(facts)
    found.update(_locks(facts.operations, facts.excuses))
    found["pages damaged"] = len(facts.damaged)
    found["reads of damaged pages"] = facts.met_damage
    found[LEFT_COPIES] = facts.left_copies
    found.update(_ENDS[each.ended] for each in facts.damaged if each.ended in _ENDS)
    return {name: found[name] for name in ALL if found[name]}


def _views(facts: Facts) -> Counter[str]:
    """Count what was seen of many documents at once."""
    sent_back = {event.consumer: event.at_ns for event in reversed(facts.rolled_back)}
    of_batches = Counter(batch.outcome for batch in facts.batches)
    return Counter(
        {
            "scans": len(facts.scans),
            "scans with changes under way": sum(
                facts.ledger.has_moved(scan.vb_id, scan.began_ns, scan.created_ns)
                for scan in facts.scans
            ),
            "hashes read": len(facts.hashes),
            "repairs": len(facts.repairs),
            "repairs in place": sum(bool(repair.put) for repair in facts.repairs),
            "batches made": of_batches[Outcome.OK],
            "batches refused": of_batches[Outcome.REFUSED],
            "batches without an answer": of_batches[Outcome.AMBIGUOUS],
            "cuts": len(facts.cuts),
            "cuts after a rollback": sum(
                cut.at_ns > sent_back.get(cut.consumer, cut.at_ns) for cut in facts.cuts
            ),
        }
    )


def _locks(operations: Sequence[Operation], excuses: Sequence[Excuse]) -> dict[str, int]:
    """Count what clients that lock documents were answered, as `OF_LOCKS` has it."""
    refused = [each for each in operations if each.outcome is Outcome.LOCKED]
    of_locks = {Kind.GET_AND_LOCK, Kind.UNLOCK}
    counts = (
        sum(each.kind is Kind.GET_AND_LOCK and each.outcome is Outcome.OK for each in operations),
        sum(each.kind not in of_locks for each in refused),
        _expired(operations),
        sum(each.observed is not None for each in operations),
        sum(1 for _ in keeps.purges(operations, excuses)),
    )
    return dict(zip(OF_LOCKS, counts, strict=True))


def _expired(operations: Iterable[Operation]) -> int:
    """Count the documents that were read as absent after the maxTTL of their collection."""
    stored: dict[tuple[int, bytes], Operation] = {}
    count = 0
    limited = (each for each in operations if each.collection and each.ended_ns is not None)
    for each in sorted(limited, key=lambda each: each.ended_ns or 0):
        place = each.collection, each.key
        if each.kind is Kind.DELETE or each.outcome is Outcome.AMBIGUOUS:
            stored.pop(place, None)
        elif each.max_ttl_s and each.outcome is Outcome.OK:
            stored[place] = each
        elif each.kind is Kind.GET and each.outcome is Outcome.ABSENT and place in stored:
            write = stored.pop(place)
            life_ns = write.life_s * SECOND
            count += each.invoked_ns > (write.ended_ns or 0) + life_ns
    return count


def _snapshots_at_a_death(moments: Iterable[Moment]) -> int:
    """Count the snapshots that were under way when the process of their sender ended."""
    masters: dict[int, str] = {}
    open_: dict[tuple[int, str], str] = {}
    count = 0
    for each in moments:
        if each.who == STORE and each.vb_id is not None:
            masters[each.vb_id] = each.text.partition("master ")[2].partition(",")[0]
        elif each.kind == "snapshot begun" and each.vb_id is not None:
            open_[each.vb_id, each.who] = masters.get(each.vb_id, "").partition("-")[0]
        elif each.kind in {"snapshot completed", "snapshot given up"} and each.vb_id is not None:
            open_.pop((each.vb_id, each.who), None)
        elif each.kind == "end":
            met = [key for key, master in open_.items() if master == short(each.who)]
            count += len(met)
            for key in met:
                del open_[key]
    return count


def _handovers_under_writes(operations: Iterable[Operation], moments: Iterable[Moment]) -> int:
    at_ns: dict[int, list[int]] = defaultdict(list)
    for each in moments:
        if each.kind == "handover" and each.vb_id is not None:
            at_ns[each.vb_id].append(each.at_ns)
    met = {
        (operation.vb_id, moment_ns)
        for operation in operations
        if operation.kind not in _READS
        for moment_ns in at_ns.get(operation.vb_id, ())
        if operation.invoked_ns <= moment_ns
        and (operation.ended_ns is None or operation.ended_ns > moment_ns)
    }
    return len(met)


def _purges_with_consumers_behind(facts: Facts) -> int:
    """Count the purges above what a consumer had received until then."""
    count = 0
    for excuse in facts.excuses:
        if excuse.kind == PURGE:
            has: dict[str, int] = {}
            for event in facts.streamed:
                if event.vb_id == excuse.vb_id and event.at_ns <= excuse.at_ns:
                    has[event.consumer] = event.seqno
            count += any(seqno < excuse.to_seqno for seqno in has.values())
    return count


def _causes(event: RolledBack, excuses: Iterable[Excuse]) -> set[str]:
    """Return the kinds of cuts that explain a rollback, as counts are called."""
    return {
        _BY_CAUSE[excuse.kind]
        for excuse in excuses
        if excuse.kind in _BY_CAUSE
        and excuse.vb_id == event.vb_id
        and excuse.at_ns <= event.at_ns
        and explains(excuse, event)
    }


def table(found: Counter[str]) -> str:
    """Return what was reached, and what was not, for people."""
    lines = [f"  {found[name]:8,}  {name}" for name in ALL if found[name]]
    missing = [name for name in OF_CLUSTERS if not found[name]]
    if missing:
        lines.append(f"  never: {', '.join(missing)}")
    return "\n".join(["reached:", *lines])
