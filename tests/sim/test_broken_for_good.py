"""With a node dead or a link cut for good, the rest serves all that its copies allow."""

from __future__ import annotations

import pytest

from sim.broken import KINDS, NODES_MIN, allowing
from sim.command import main
from sim.plan import drawn
from sim.run import Options, Simulation, replay_command
from sim.world import SECOND, World

SEEDS = 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_serves_what_its_copies_allow(kind: str) -> None:
    """`Report.violations` has operations without an answer, and partitions without a master."""
    served = 0
    for seed in range(SEEDS):
        options = Options(nodes=NODES_MIN, forever=kind)
        simulation = Simulation(seed, options)
        assert simulation.run().violations == [], replay_command(seed, options)
        moments = [each for each in simulation.world.moments if each.kind == "broken for good"]
        assert moments, "it broke"
        late = [
            operation
            for operation in simulation.facts.operations
            if operation.seqno and operation.invoked_ns > moments[-1].at_ns + 6 * SECOND
        ]
        served += len(late)
        if kind == "dead":
            (dead,) = (machine for machine in simulation.machines if machine.node is None)
            assert dead.name == moments[0].who
    assert served > SEEDS, "writes were taken"


def test_whoever_waits_for_the_dead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A master that shrinks no in-sync set takes no writes without the dead node."""
    from failover.replication.mastership import Mastership

    monkeypatch.setattr(Mastership, "changed_isr", lambda *_args, **_named: None)
    violations = Simulation(0, Options(nodes=NODES_MIN, forever="dead")).run().violations
    assert violations


def test_plans_have_a_copy_to_spare() -> None:
    for seed in range(20):
        plan = allowing(drawn(World(seed).draw, nodes=NODES_MIN))
        assert plan.copies >= NODES_MIN
        assert plan.min_in_sync < plan.copies


def test_it_is_about_three_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--forever", "dead"])
    assert "add --nodes 3" in capsys.readouterr().err
