"""Faults of clusters: what happens to the metadata store, and to masters at bad moments.

Elections and handovers are where replication can go wrong. Random faults seldom meet them, so some
faults here choose their victims: the master of a partition, the one that has just become it, or
both sides of a connection between a consumer and what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sim.plan import MOVE_FAULTS
from sim.world import MS

if TYPE_CHECKING:
    from sim.faults import Fault, Faults, Mend
    from sim.machine import Machine
    from sim.world import World

SLICE_NS: Final = 30 * MS
"""For how long a starved process runs at a time."""
STARVED_NS: Final = (100 * MS, 450 * MS)
"""For how long it stands still between two slices: it gets a tenth of a processor."""
STRIKE_LOOK_NS: Final = 10 * MS
"""How often new masters are looked for."""
STRIKE_NS_MAX: Final = 150 * MS
"""How soon after its election a master is struck, at most."""
STRIKE_SHARE: Final = 0.3
STRIKES_MAX: Final = 6
"""Strikes of a run, so that some masters live."""
STRIKES: Final = ("kill", "power_cut", "pause", "isolate")
HANDOVERS: Final = 3


def handover(faults: Faults) -> Mend | None:
    """A partition gets another wanted master."""
    controls = faults.stage.controls
    if controls is None:
        return None
    controls.handover(faults.world.below(faults.stage.plan.partitions))
    return _nothing


def handovers(faults: Faults) -> Mend | None:
    """An operator moves a partition of a node to and fro."""
    controls, world = faults.stage.controls, faults.world
    if controls is None:
        return None
    machine = faults.running()
    if machine is None:
        return None
    assert machine.node is not None
    served = [vb_id for vb_id in range(faults.stage.plan.partitions) if machine.node.serves(vb_id)]
    if not served:
        return None
    vb_id = served[world.below(len(served))]
    for number in range(HANDOVERS):
        world.after(number * 300 * MS, controls.handover, vb_id)
    return _nothing


def _operator(kind: str) -> Fault:
    def ask(faults: Faults) -> Mend | None:
        controls = faults.stage.controls
        return _nothing if controls is not None and controls.operate(kind) else None

    return ask


def unclean_election(faults: Faults) -> Mend | None:
    """An operator elects a master outside the in-sync set."""
    controls = faults.stage.controls
    if controls is None or not faults.stage.plan.unclean:
        return None
    is_done = controls.elect_unclean(faults.world.below(faults.stage.plan.partitions))
    return _nothing if is_done else None


def _store(kind: str, *, is_for_all: bool) -> Fault:
    def harm(faults: Faults) -> Mend | None:
        controls = faults.stage.controls
        if controls is None:
            return None
        one = None if is_for_all else faults.running()
        if one is None and not is_for_all:
            return None
        return controls.harm_store(kind, one.name if one is not None else None)

    return harm


def store_goes_back(faults: Faults) -> Mend | None:
    """The metadata store is copied, and goes back to the copy when the fault ends."""
    controls = faults.stage.controls
    return None if controls is None else controls.copy_store()


def store_restarts(faults: Faults) -> Mend | None:
    """The metadata store restarts, or changes its leader."""
    controls = faults.stage.controls
    return None if controls is None else controls.restart_store()


def cut_off(faults: Faults) -> Mend | None:
    """A node loses all other nodes, in both directions."""
    machine = faults.running()
    if machine is None:
        return None
    network = faults.stage.network
    names = [other.name for other in faults.stage.machines if other is not machine]
    cut = [(machine.name, name) for name in names] + [(name, machine.name) for name in names]
    for pair in cut:
        network.cut(*pair)

    def mend() -> None:
        for pair in cut:
            network.mend(*pair)

    return mend


def slow_from(faults: Faults) -> Mend | None:
    """Whatever other nodes send to a node takes long."""
    machine = faults.running()
    if machine is None:
        return None
    network = faults.stage.network
    links = [
        network.link(other.name, machine.name)
        for other in faults.stage.machines
        if other is not machine
    ]
    for link in links:
        link.delay_min_ns, link.delay_max_ns = 60 * MS, 200 * MS

    def mend() -> None:
        for link in links:
            link.delay_min_ns, link.delay_max_ns = network.delay_min_ns, network.delay_max_ns

    return mend


def starve(faults: Faults) -> Mend | None:
    """A process gets a slice of a processor: it runs for a moment, and stands still for longer."""
    machine = faults.running()
    return None if machine is None else starved(faults.world, machine)


def starved(world: World, machine: Machine) -> Mend:
    """Let a process run in slices until that is mended. It may be killed meanwhile."""
    host, incarnation, is_over = machine.host, machine.host.incarnation, False

    def stop() -> None:
        if not is_over and host.incarnation == incarnation and not host.is_paused:
            machine.pause()
            world.after(world.between(*STARVED_NS), go_on)

    def go_on() -> None:
        if host.incarnation == incarnation:
            machine.resume()
            world.after(SLICE_NS, stop)

    def mend() -> None:
        nonlocal is_over
        is_over = True

    stop()
    return mend


def isolate(faults: Faults) -> Mend | None:
    """A node loses all other nodes, and mostly the store. Clients and consumers still reach it."""
    machine = faults.running()
    return None if machine is None else isolated(faults, machine)


def isolated(faults: Faults, machine: Machine) -> Mend:
    """Isolate a machine, in both directions or one."""
    world, network = faults.world, faults.stage.network
    ways = (True, True), (True, True), (True, False), (False, True)
    outward, inward = ways[world.below(len(ways))]
    cut: list[tuple[str, str]] = []
    for other in faults.stage.machines:
        if other is not machine:
            cut += [(machine.name, other.name)] * outward
            cut += [(other.name, machine.name)] * inward
    for one, other_name in cut:
        network.cut(one, other_name)
    controls = faults.stage.controls
    is_store_cut = controls is not None and world.chance(0.8)
    store_is_back = controls.store_cut(machine.name) if controls and is_store_cut else _nothing

    def mend() -> None:
        for one, other_name in cut:
            network.mend(one, other_name)
        # What the node missed of the store may come later than what it missed of the others.
        if is_store_cut:
            world.after(world.below(400 * MS), store_is_back)

    return mend


def lonely_consumer(faults: Faults) -> Mend | None:
    """A consumer reaches one node only."""
    network, world = faults.stage.network, faults.world
    consumer = faults.stage.consumers[world.below(len(faults.stage.consumers))]
    machines = faults.stage.machines
    reached = faults.running()
    if reached is None:
        return None
    cut = [
        pair
        for machine in machines
        if machine is not reached
        for pair in ((machine.name, consumer.name), (consumer.name, machine.name))
    ]
    for one, other in cut:
        network.cut(one, other)

    def mend() -> None:
        for one, other in cut:
            network.mend(one, other)

    return mend


def strike(faults: Faults) -> Mend | None:
    """From now on, new masters are struck soon after their elections."""
    if faults.strikes:
        return None
    faults.strikes = 1
    seen = len(faults.stage.facts.masterships)

    def look() -> None:
        nonlocal seen
        found = faults.stage.facts.masterships[seen:]
        seen += len(found)
        for name in dict.fromkeys(item.node for item in found):
            if faults.strikes <= STRIKES_MAX and faults.world.chance(STRIKE_SHARE):
                faults.strikes += 1
                faults.world.after(faults.world.below(STRIKE_NS_MAX), hit, name)
        if not faults.is_over:
            faults.world.after(STRIKE_LOOK_NS, look)

    def hit(name: str) -> None:
        machine = next(each for each in faults.stage.machines if each.name == name)
        faults.happen_to(STRIKES[faults.world.below(len(STRIKES))], machine)

    look()
    return _nothing


def _nothing() -> None:
    """There is nothing to mend."""


FAULTS: Final[dict[str, Fault]] = {
    "handover": handover, "handovers": handovers, "unclean_election": unclean_election,
    "isolate": isolate, "lonely_consumer": lonely_consumer, "strike": strike,
    "starve": starve, "cut_off": cut_off, "slow_from": slow_from,
    "store_away": _store("away", is_for_all=True), "store_slow": _store("slow", is_for_all=True),
    "store_goes_back": store_goes_back, "store_restarts": store_restarts,
    "store_late": _store("late", is_for_all=True),
    "store_forgets": _store("forgets", is_for_all=True),
    "store_compacts": _store("compacts", is_for_all=True),
    "one_store_away": _store("away", is_for_all=False),
    "one_store_deaf": _store("deaf", is_for_all=False),
    "one_store_forgets_write": _store("forgets_write", is_for_all=False),
    "one_store_forgets": _store("forgets", is_for_all=False),
    **{kind: _operator(kind) for kind in MOVE_FAULTS},
}  # fmt: skip
"""Name in the plan -> fault."""
