"""Sequences of faults that are about elections, one after another.

Random faults that pile up leave a cluster without masters most of the time, and then nothing can go
wrong. An act begins when all partitions are served. It is a few faults at bad moments: a master
that loses its replicas, its successor that dies, a handover whose outcome is unknown.

    served ── a while ──> act ──> served again, or PATIENCE_NS ──> the next act
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from sim.faults import Faults
from sim.machine import Machine
from sim.world import MS

LOOK_NS: Final = 20 * MS
PATIENCE_NS: Final = 2000 * MS
"""Then the next act begins, served or not."""
CALM_NS: Final = 300 * MS
"""Load between acts, at most."""


class Scene(NamedTuple):
    """Whom an act is about: a partition, its master, and the others in a drawn order."""

    faults: Faults
    vb_id: int
    master: Machine
    others: list[Machine]

    def later(self, delay_ns: int, name: str, machine: Machine, last_ns: int = 0) -> None:
        """Let a fault happen to a machine after a while, for a time (0: as long as usual)."""
        self.faults.world.after(delay_ns, self.faults.happen_to, name, machine, last_ns)

    def between(self, low_ms: int, high_ms: int) -> int:
        """Draw a time."""
        return self.faults.world.between(low_ms * MS, high_ms * MS)

    def one_of(self, *names: str) -> str:
        """Draw a name."""
        return names[self.faults.world.below(len(names))]


def deposed(scene: Scene) -> None:
    """A master loses its replicas and the store until another one is elected."""
    if scene.faults.world.chance(0.5):
        scene.later(0, "lonely_consumer", scene.master, 2500 * MS)
    scene.later(0, "isolate", scene.master, scene.between(1500, 2600))


def blink(scene: Scene) -> None:
    """A master is away just as long as it takes to suspect it."""
    length_ns = scene.between(610, 800)
    scene.later(0, "one_store_away", scene.master, length_ns + 800 * MS)
    scene.later(0, "cut_off", scene.master, length_ns)


def two_deaths(scene: Scene) -> None:
    """A master dies, and its successor soon after it begins to serve or to follow."""
    scene.later(0, scene.one_of("kill", "power_cut"), scene.master, scene.between(50, 700))
    scene.later(0, "strike", scene.others[0])


def master_and_replica(scene: Scene) -> None:
    """A replica falls behind; then the others die and come back at about the same time."""
    behind = scene.others[-1]
    scene.later(0, scene.one_of("pause", "cut_off"), behind, scene.between(1300, 1700))
    for machine in (scene.master, *scene.others[:-1]):
        scene.later(
            scene.between(1250, 1300), scene.one_of("kill", "power_cut"), machine,
            scene.between(20, 300),
        )  # fmt: skip
    scene.later(1200 * MS, scene.one_of("slow_from", "strike"), scene.others[0], 1000 * MS)


def late_acks(scene: Scene) -> None:
    """Acknowledgements are late; then the master loses its replicas, but not the store."""
    scene.later(0, "slow_from", scene.master, 3000 * MS)
    scene.later(scene.between(200, 500), "cut_off", scene.master, scene.between(1000, 1800))


def all_die(scene: Scene) -> None:
    """All nodes lose power, and one of them soon again."""
    scene.later(0, "power_cut_all", scene.master, scene.between(20, 400))
    scene.later(0, "strike", scene.master)


def to_and_fro(scene: Scene) -> None:
    """A partition moves while the master has trouble with the store."""
    trouble = scene.one_of("one_store_forgets", "one_store_deaf", "one_store_deaf")
    scene.later(0, trouble, scene.master, 1200 * MS)
    scene.later(scene.between(0, 100), "handovers", scene.master)


def moved_under_load(scene: Scene) -> None:
    """A partition moves while its replicas are slow."""
    for machine in scene.others:
        scene.later(0, "slow_from", machine, 800 * MS)
    scene.later(scene.between(0, 200), "handovers", scene.master)


ACTS: Final[dict[str, Callable[[Scene], None]]] = {
    "deposed": deposed, "blink": blink, "two_deaths": two_deaths,
    "master_and_replica": master_and_replica, "all_die": all_die, "to_and_fro": to_and_fro,
    "late_acks": late_acks, "moved_under_load": moved_under_load,
}  # fmt: skip


class Acts:
    """See the module."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._world = faults.world
        self._since_ns = 0

    def begin(self) -> None:
        """Begin the first act after a while."""
        if self._faults.stage.plan.acts:
            self._world.after(self._world.below(CALM_NS), self._look)

    def _look(self) -> None:
        faults, world = self._faults, self._world
        if faults.is_over:
            return
        plan, machines = faults.stage.plan, faults.stage.machines
        vb_id = world.below(plan.partitions)
        serving = [
            machine
            for machine in machines
            if machine.node is not None and machine.node.serves(vb_id)
        ]
        is_patient = world.now_ns - self._since_ns < PATIENCE_NS
        if (faults.has_open and is_patient) or not serving:
            world.after(LOOK_NS, self._look)
            return
        self._since_ns = world.now_ns
        others = [machine for machine in machines if machine is not serving[0]]
        world.draw.shuffle(others)
        name = plan.acts[world.below(len(plan.acts))]
        world.note(f"act {name} vb {vb_id} {serving[0].name}")
        ACTS[name](Scene(faults, vb_id, serving[0], others))
        world.after(100 * MS + world.below(CALM_NS), self._look)
