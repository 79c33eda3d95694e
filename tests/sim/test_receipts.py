"""Unclean elections of whole clusters: what is lost is kept in files first, and is named."""

from __future__ import annotations

from typing import Any

import pytest

from sim import run
from sim.checkers import receipts
from sim.facts import CutOffFact, History, LostFact, LostFolder, Operation
from sim.plan import Plan, drawn
from sim.quarantine import kept
from sim.run import Options, Simulation
from sim.world import MS, SECOND

OTHERS_DIE_NS = 600 * MS
LAST_DIES_NS = 3 * SECOND
"""Long enough for those that died to leave the in-sync set, so that one alone answers."""
LAST_RETURNS_NS = 6 * SECOND
END_NS = 7 * SECOND


def scene(monkeypatch: pytest.MonkeyPatch, seed: int, **changes: Any) -> Simulation:
    """Return a cluster whose last master in sync dies, and comes back after an unclean election."""

    def planned(draw: Any, *, nodes: int, seconds: float | None) -> Plan:
        plan = drawn(draw, nodes=nodes, seconds=seconds)
        plan = plan._replace(
            copies=3, min_in_sync=1, unclean=True, acknowledge="committed", faults=(),
            load_ns=END_NS, timeout_ns=400 * MS, compact_share=0.0,
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


@pytest.mark.parametrize("seed", range(3))
def test_every_answered_write_that_is_lost_is_in_a_file(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    simulation = scene(monkeypatch, seed)
    assert simulation.run().violations == []
    facts = simulation.facts
    gone = gone_in(simulation)
    assert len(gone) > 20
    assert {fact.node for fact in facts.cut_off} == {"n1"}
    # The rules find a file and a receipt that are missing.
    for files, told in (([], facts.lost), (facts.cut_off, [])):
        problems = receipts.named(gone, files, told, [])
        assert len(problems) == len(gone)
