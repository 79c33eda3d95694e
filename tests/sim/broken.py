"""Something that stays broken for good: a node that never comes back, a link that stays cut.

Everything else works again. Then the rest serves all that its copies allow, within seconds: every
partition takes writes, as long as enough of its copies are left.

    grace ── load ──> broken ── WITHIN_NS of load ──> from here on every operation is answered
"""

from __future__ import annotations

from typing import Final

from sim.faults import Stage
from sim.machine import Machine
from sim.plan import Plan
from sim.world import MS, SECOND

CUTS: Final = ("cut", "cut_one_way")
KINDS: Final = ("dead", *CUTS)
UNDER_LOAD_NS: Final = 150 * MS
"""There is load for so long before it breaks."""
WITHIN_NS: Final = 6 * SECOND
"""What a dead node takes: its lease, an election, and the shrinking of in-sync sets. Clients
that wait for it have their timeouts beside that."""
NODES_MIN: Final = 3


def allowing(plan: Plan) -> Plan:
    """Return a plan whose partitions have enough copies without one node, or one link."""
    copies = max(plan.copies, NODES_MIN)
    return plan._replace(copies=copies, min_in_sync=min(plan.min_in_sync, copies - 1))


def break_for_good(stage: Stage, kind: str) -> Machine | None:
    """Break something; return the node that does not come back, if it is one.

    A node dies of whose copies no partition depends: others of its in-sync set are left.
    """
    world, machines, controls = stage.world, list(stage.machines), stage.controls
    assert controls is not None
    world.draw.shuffle(machines)
    first, second, *_ = machines
    if kind == "dead":
        dead = next((each for each in machines if _may_die(stage, each)), None)
        if dead is not None:
            world.note(f"{dead.name} dies for good")
            dead.kill() if world.chance(0.5) else dead.cut_power(0.0)
            world.tell("broken for good", dead.name, "dies, and never comes back")
        return dead
    ways = [(first, second), (second, first)][: 1 if kind == "cut_one_way" else 2]
    for source, target in ways:
        world.note(f"{source.name} to {target.name} is cut for good")
        stage.network.cut(source.name, target.name)
        text = f"nothing passes from {source.name} to {target.name} any more"
        world.tell("broken for good", source.name, text)
    return None


def _may_die(stage: Stage, machine: Machine) -> bool:
    """Whether each partition has somebody else in sync, and enough copies that run."""
    controls = stage.controls
    assert controls is not None
    running = {each.name for each in stage.machines if each.node is not None} - {machine.name}
    return all(
        controls.in_sync(vb_id) & running and len(running) >= stage.plan.min_in_sync
        for vb_id in range(stage.plan.partitions)
    )
