"""All checks of a run by name, with the rule that each one guards. Pure: facts in, violations out.

Those of `DURING` may be asked at any moment of a run, so a story stops where one fails first. The
others need to know how the run ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from sim.checkers import (
    batches,
    cuts,
    expiries,
    histories,
    keeps,
    linearizable,
    liveness,
    locks,
    membership,
    metadata,
    observed,
    replica_reads,
    shown,
    streams,
)
from sim.facts import Excuse, Facts, Operation
from sim.plan import Plan


class Violation(NamedTuple):
    """A check that failed, and how."""

    check: str
    text: str


def named(check: str, texts: Iterable[str]) -> list[Violation]:
    """Return what a check found."""
    return [Violation(check, text) for text in texts]


PROBLEM: Final = "problem"
CRASH: Final = "crash"

RULES: Final = {
    "in-sync": "Whatever a node calls committed is on the disk of every member of the in-sync set.",
    "durable": "A write that was answered as durable is on the disks of a majority of the copies.",
    "one master": "At any moment one node at most answers requests for a partition, unless none of"
    " those that do can commit anything.",
    "streams end": "A master that was replaced ends its streams, so nobody is left with it.",
    "histories": "Two histories that share a version are equal up to the lower of their ends.",
    "epochs": "A partition has one master in each epoch.",
    "links": "What a replica says to its master is in the format that both speak.",
    "rollbacks": "A consumer is only sent back where history was cut: by a branch, an unclean"
    " election, or a purge.",
    "handover version": "A master by handover goes on in the version that was handed over.",
    "committed first": "A consumer receives a change only after a master called it committed.",
    "linearizable": "One order of all operations on a key explains every answer, and an operation"
    " takes effect between its request and its answer.",
    "answered writes": "A write that was answered is in the final history of its partition.",
    "expiry": "A document that has expired does not come back.",
    "metadata": "Flags, expiry and revision of a document are what its changes asked for, or left"
    " as it was, and what clients and consumers are told.",
    "locks": "A locked document is changed by nobody but who has the CAS of the lock, which nobody"
    " else is told, until the lock is over; then it is not locked.",
    "observed": "What OBSERVE_SEQNO tells of a partition is committed, and where a version ended.",
    "keeps": "No purge passes the position of a consumer for which a partition keeps deletions.",
    "replica reads": "What a replica answers was committed.",
    "rollbacks due": "A consumer that has what is not in history any more is sent back.",
    "cuts": "At a cut, a consumer holds one state of the store: what was answered before something"
    " in it began is in it, too, documents are those of that moment, and what follows is later.",
    "scans": "A scan shows a partition as it was at one moment, with all that was answered before.",
    "hashes": "Hashes and keys are those of all documents at the seqno that is told with them.",
    "repairs": "What a copy takes of another one, and puts in place, is what it had itself.",
    "damages": "What is damaged in a store is mended to the byte, or named; never told as sound.",
    "batches": "Of a batch, all changes are made, or none.",
    "receipts": "What an unclean election loses is in a receipt and in a discard file.",
    "same documents": "At rest, consumers and copies in sync have the documents of the masters.",
    "liveness": "Once the faults are over, every operation gets a real answer.",
    PROBLEM: "The run has to come to rest, on data that passes the product's own checks.",
    CRASH: "The code does not raise what nobody handles.",
}
"""Check -> what it guards."""

DURING: Final[dict[str, Callable[[Facts], list[str]]]] = {
    PROBLEM: lambda facts: facts.problems,
    "in-sync": lambda facts: membership.lacking(facts.lacking),
    "durable": lambda facts: facts.on_few_disks,
    "one master": lambda facts: membership.overlaps(facts.overlaps, facts.excuses),
    "streams end": lambda facts: membership.kept(facts.kept),
    "epochs": lambda facts: histories.masters(facts.masterships),
    "links": lambda facts: facts.refused,
    "rollbacks": lambda facts: histories.rollbacks(facts.rolled_back, facts.excuses),
    "handover version": lambda facts: membership.new_versions(facts.masterships, facts.handed),
    "histories": lambda facts: histories.diverged(facts.histories),
    "committed first": lambda facts: streams.uncommitted(facts.streamed, facts.committed),
}


def failovers(facts: Facts, plan: Plan) -> list[Excuse]:
    """Return from where on failovers may have lost writes without a durability frame."""
    return histories.failovers(facts.masterships) if plan.acknowledge == "master" else []


def linear(facts: Facts, plan: Plan, operations: Sequence[Operation]) -> tuple[list[str], int]:
    """Check operations, given what may have cut history back, and what has expired."""
    expired = expiries.Expiries(plan).events(operations)
    return linearizable.check([*operations, *expired], [*facts.excuses, *failovers(facts, plan)])


def _claims(facts: Facts) -> list[Operation]:
    """Return the operations whose answers say that a change is there to stay: all but those in
    which a replica told what is on its disk.
    """
    return [
        each
        for each in facts.operations
        if each.observed is None or observed.is_of_master(each, facts.masterships)
    ]


ONE_MESSAGE_BYTES: Final = 1000
"""A window with room for a message or two: three changes each 5 ms, fewer than clients write."""


def at_the_end(facts: Facts, plan: Plan) -> list[Violation]:
    """Return what is only known when a run is over; see `receipts` for the rest."""
    found = named("expiry", expiries.Expiries(plan).overdue(facts.operations))
    found += named(
        "replica reads",
        replica_reads.uncommitted(facts.replica_reads, facts.histories, facts.committed),
    )
    found += named("locks", locks.broken(facts.operations, facts.masterships, facts.excuses, plan))
    found += named("keeps", keeps.passed(facts.operations, facts.excuses, plan))
    found += named("observed", observed.wrong(facts, plan))
    found += named("metadata", metadata.wrong(facts.operations, facts.told, facts.ledger))
    found += named(
        "rollbacks due",
        histories.not_rolled_back(facts.followed, facts.final),
    )
    found += named("cuts", cuts.broken(facts))
    found += named("scans", shown.scans(facts.scans, facts.ledger, facts.excuses))
    found += named(
        "hashes", shown.hashes(facts.hashes, facts.read_by_seqno, facts.ledger, facts.excuses)
    )
    found += named("repairs", shown.repairs(facts.repairs))
    found += named("damages", shown.damages(facts.damaged))
    found += named("batches", batches.torn(facts.batches, facts.ledger, facts.excuses))
    found += named(
        "answered writes",
        histories.lost_writes(_claims(facts), facts.final, facts.excuses, failovers(facts, plan)),
    )
    if facts.master_map is not None:
        found += named("same documents", streams.maps(facts.master_map, facts.consumer_maps))
    for master, copies in facts.copy_maps:
        found += named("same documents", streams.maps(master, copies))
    keeps_up = plan.window_bytes > ONE_MESSAGE_BYTES
    return found + named(
        "liveness", liveness.late(facts.operations, facts.works_ns, copies_keep_up=keeps_up)
    )
