"""Unclean elections of whole clusters: what is lost is kept in files first, and is named."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from sim import run
from sim.checkers import receipts
from sim.facts import CutOffFact, History, LostFolder, Operation, fingerprint
from sim.plan import Plan, drawn
from sim.quarantine import SUFFIX
from sim.run import Options, Simulation
from sim.world import MS, SECOND
from support.forgetful_disk import ForgetfulDisk
from support.stored_bytes import pack_mutation
from vbucket.model.receipt import CutOff

OTHERS_DIE_NS = 600 * MS
LAST_DIES_NS = 4800 * MS
"""Long enough for those that died to leave the in-sync set, so that one alone answers."""
LAST_RETURNS_NS = 11 * SECOND
"""Long enough for its lease to end, and for an unclean election."""
END_NS = 12 * SECOND


def scene(monkeypatch: pytest.MonkeyPatch, seed: int, **changes: Any) -> Simulation:
    """Return a cluster whose last master in sync dies, and comes back after an unclean election."""

    def planned(draw: Any, *, nodes: int, seconds: float | None) -> Plan:
        plan = drawn(draw, nodes=nodes, seconds=seconds)
        plan = plan._replace(
            copies=3, min_in_sync=1, unclean=True, acknowledge="committed", faults=(),
            acts=(), waits_for_masters=False, load_ns=END_NS, timeout_ns=400 * MS,
            compact_share=0.0, clients=3, think_ns=8 * MS,
        )  # fmt: skip
        return plan._replace(**changes)

    monkeypatch.setattr(run, "drawn", planned)
    simulation = Simulation(seed, Options(nodes=3))
    first, *others = simulation.machines
    after = simulation.world.after
    for other in others:
        after(OTHERS_DIE_NS, other.kill)
        after(LAST_DIES_NS, other.start)
    after(LAST_DIES_NS, first.kill)
    after(LAST_RETURNS_NS, first.start)
    return simulation


def gone_in(simulation: Simulation) -> list[Operation]:
    facts = simulation.facts
    return receipts.lost_by_election(facts.operations, facts.final, facts.excuses)


@pytest.mark.parametrize("seed", [1, 3, 5])
def test_every_answered_write_that_is_lost_is_in_a_file(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    simulation = scene(monkeypatch, seed)
    assert simulation.run().violations == []
    facts = simulation.facts
    gone = gone_in(simulation)
    assert len(gone) >= 10
    assert {fact.node for fact in facts.cut_off} == {"n1"}
    # The rules find a file and a receipt that are missing.
    for files, told in (([], facts.lost), (facts.cut_off, [])):
        problems = receipts.named(gone, files, told, [])
        assert len(problems) == len(gone)


def test_a_full_disk_holds_up_the_truncation(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = scene(monkeypatch, 0)
    world = simulation.world
    free_ns = LAST_RETURNS_NS + 800 * MS
    refused: list[int] = []
    create = ForgetfulDisk.create

    def full(disk: ForgetfulDisk, name: str) -> int:
        if name.endswith(SUFFIX) and world.now_ns < free_ns:
            refused.append(world.now_ns)
            raise OSError(errno.ENOSPC, "the disk is full")
        return create(disk, name)

    monkeypatch.setattr(ForgetfulDisk, "create", full)
    assert simulation.run().violations == []
    assert len(refused) > 3, "it is tried again"
    facts = simulation.facts
    assert gone_in(simulation)
    assert min(fact.at_ns for fact in facts.cut_off) >= free_ns


def test_what_the_rules_find() -> None:
    entry = pack_mutation(vb_id=0, key=b"\0k", value=b"v", cas=77, seqno=4, rev_seqno=1)
    fact = CutOffFact(5, "n1", CutOff(0, 3, ((9, 0),), (entry,)))
    still = History(9, "n2", 0, ((9, 0),), 4, {4: fingerprint(77, 1)})
    (problem,) = receipts.still_there([fact], [still])
    assert "seqno 4 of vb 0" in problem
    other = still._replace(entries={4: fingerprint(78, 1)})
    assert receipts.still_there([fact], [other]) == []
    dropped = fact._replace(dropped_in=2)
    assert receipts.still_there([dropped], [still]) == [], "it asks nobody after an election"
    assert receipts.still_there([dropped], [still], {(0, 3)}), "a handover tells what is kept"
    assert receipts.still_there([fact._replace(dropped_in=3)], [still]), "its master had it"
    assert receipts.still_there([fact._replace(dropped_in=1)], [still], {(0, 3)}) == []
    assert receipts.readable([fact], [], {"n1": [fact.cut]}) == []
    assert receipts.readable([fact], [LostFolder(6, "n1")], {"n1": []}) == []
    (problem,) = receipts.readable([fact], [LostFolder(4, "n1")], {"n1": []})
    assert "n1 lost the quarantine file vb0000-version9-epoch3-4-4.cut" in problem
