"""Sequences of faults that are about elections, one after another.

Random faults that pile up leave a cluster without masters most of the time, and then nothing can go
wrong. An act begins when all partitions are served. It is a few faults at bad moments: a master
that loses its replicas, its successor that dies, a handover whose outcome is unknown.

    served ── a while ──> act ──> served again, or PATIENCE_NS ──> the next act
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from failover.replication.handover import HANDING_NS_MAX
from sim import rare_acts
from sim.faults import BRANCHES_MAX, Controls, Faults, Mend
from sim.machine import Machine
from sim.world import MS

LOOK_NS: Final = 20 * MS
PATIENCE_NS: Final = 2000 * MS
"""Then the next act begins, served or not."""
CALM_NS: Final = 300 * MS
"""Load between acts, at most."""
WATCH_NS: Final = 2 * MS
"""How often an act looks whether its next step is due."""
WAIT_NS_MAX: Final = 1600 * MS
"""How long it waits for that."""


UNDER_WAY_NS: Final = 40 * MS
"""Then what was under way before a cut has arrived."""
SOME_CHANGES: Final = 4
"""So many a branch has to undo something of, to matter."""


class Scene(NamedTuple):
    """Whom an act is about: a partition, its master, and the others in a drawn order."""

    faults: Faults
    vb_id: int
    master: Machine
    others: list[Machine]

    @property
    def controls(self) -> Controls:
        """What only a cluster can do."""
        controls = self.faults.stage.controls
        assert controls is not None
        return controls

    @property
    def replicas(self) -> list[Machine]:
        """The others that are in the in-sync set."""
        in_sync = self.controls.in_sync(self.vb_id)
        return [machine for machine in self.others if machine.name in in_sync]

    def later(self, delay_ns: int, name: str, machine: Machine, last_ns: int = 0) -> None:
        """Let a fault happen to a machine after a while, for a time (0: as long as usual)."""
        self.faults.world.after(delay_ns, self.faults.happen_to, name, machine, last_ns)

    def after(self, delay_ns: int, then: Callable[[], object]) -> None:
        """Do something after a while."""
        self.faults.world.after(delay_ns, then)

    def cut(self, one: Machine, other: Machine, last_ns: int) -> Mend:
        """Let nothing pass between two machines for a time. Return what mends it earlier."""
        mends = self.cut_way(one, other, last_ns), self.cut_way(other, one, last_ns)

        def mend() -> None:
            for each in mends:
                each()

        return mend

    def cut_way(self, source: Machine, target: Machine, last_ns: int) -> Mend:
        """Let nothing pass from a machine to another for a time."""
        network = self.faults.stage.network
        network.cut(source.name, target.name)
        return self.faults.began("cut", lambda: network.mend(source.name, target.name), last_ns)

    def narrow(self, one: Machine, other: Machine, bytes_per_s: int, last_ns: int) -> None:
        """Let little pass from a machine to another for a time."""
        widen = self.faults.stage.network.narrow(one.name, other.name, bytes_per_s)
        self.faults.began("narrow", widen, last_ns)

    def when(self, is_so: Callable[[], bool], then: Callable[[], None]) -> None:
        """Do something as soon as something is so. Give up after a while, and with the faults."""
        faults, world = self.faults, self.faults.world
        until_ns = world.now_ns + WAIT_NS_MAX
        faults.steps_due += 1

        def look() -> None:
            if faults.is_over or world.now_ns >= until_ns:
                faults.steps_due -= 1
            elif is_so():
                then()
                faults.steps_due -= 1
            else:
                world.after(WATCH_NS, look)

        look()

    def end(self, machine: Machine) -> int:
        """Return the last seqno that a machine has of the partition; -1 if its process is down."""
        return -1 if machine.node is None else machine.node.high_seqno(self.vb_id)

    def is_served_by(self, machine: Machine) -> bool:
        """Whether a machine would answer for the partition now."""
        return machine.node is not None and machine.node.would_answer(self.vb_id)

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
    """A master is away until another one is elected. Then it is confirmed once more, because nobody
    has heard of the election yet; and is away again, so that it hears nothing of it either.
    """
    controls, vb_id, master = scene.controls, scene.vb_id, scene.master
    epoch = controls.record(vb_id).epoch
    scene.later(0, "store_late", master, 2500 * MS)
    scene.later(0, "one_store_away", master, 2500 * MS)
    mends = [scene.cut(master, other, 1600 * MS) for other in scene.others]

    def come_back() -> None:
        for mend in mends:
            mend()
        scene.when(
            lambda: scene.is_served_by(master),
            lambda: scene.later(0, "cut_off", master, scene.between(500, 1000)),
        )

    scene.when(lambda: controls.record(vb_id).epoch > epoch, come_back)


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


def unanswered(scene: Scene) -> None:
    """Replicas get changes, and their acknowledgements do not arrive. Then the master loses them,
    but not the store: it hears of the next election while clients wait for these changes.
    """
    last_ns, later_ns = scene.between(1000, 1400), scene.between(30, 150)
    for other in scene.others:
        scene.cut_way(other, scene.master, last_ns)
        scene.after(later_ns, partial(scene.cut_way, scene.master, other, last_ns - later_ns))


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


def behind(scene: Scene) -> None:
    """A replica leaves the in-sync set, and what waited for it is committed at once. Then the
    master restarts, knows little of what is committed, and hears of nobody but this replica.
    """
    faults, controls, replicas = scene.faults, scene.controls, scene.replicas
    if len(replicas) < 2:
        return
    other, behind = replicas[:2]
    mend = scene.cut(scene.master, behind, 2000 * MS)

    def restart() -> None:
        # Without power nothing arrives that was held back on the way to the replica.
        faults.happen_to("power_cut", scene.master, scene.between(10, 60))
        scene.cut(scene.master, other, scene.between(900, 1400))
        scene.narrow(scene.master, behind, 4_000, 1500 * MS)
        mend()

    def is_committed() -> bool:
        """Whether the master has committed what waited."""
        node = scene.master.node
        return (
            behind.name not in controls.in_sync(scene.vb_id)
            and node is not None
            and node.committed_seqno(scene.vb_id) > scene.end(behind) >= 0
        )

    scene.when(is_committed, lambda: scene.after(scene.between(0, 5), restart))


def came_back(scene: Scene) -> None:
    """A partition moves, is cut back by a branch, and moves back before all have what came then."""
    faults, controls, replicas = scene.faults, scene.controls, scene.replicas
    if len(replicas) < 2:
        return
    second, third = replicas[:2]
    epoch = controls.record(scene.vb_id).epoch

    def branch() -> None:
        node = second.node
        assert node is not None
        if faults.branches < BRANCHES_MAX and node.branch(
            scene.vb_id, 0.7 * faults.world.draw.random()
        ):
            faults.branches += 1
            scene.when(is_branched, part)

    def is_branched() -> bool:
        record = controls.record(scene.vb_id)
        return record.epoch > epoch + 1 and record.branch is None and scene.is_served_by(second)

    def part() -> None:
        scene.cut(second, third, 1500 * MS)
        scene.after(UNDER_WAY_NS, lambda: scene.when(is_ahead, end))

    def is_ahead() -> bool:
        return scene.end(scene.master) > scene.end(third) >= 0

    def end() -> None:
        scene.later(0, "kill", second, scene.between(1000, 1500))

    def move() -> None:
        controls.handover(scene.vb_id, second.name)
        scene.when(lambda: scene.is_served_by(second), branch)

    scene.when(lambda: scene.end(scene.master) >= SOME_CHANGES, move)


def forgotten(scene: Scene) -> None:
    """A replica comes back into the in-sync set, and falls behind at once. The answer of the store
    to its master is lost, and that master hears nothing of the store from then on.
    """
    controls, vb_id, master = scene.controls, scene.vb_id, scene.master
    if not scene.replicas:
        return
    replica = scene.replicas[0]
    mend = scene.cut(master, replica, 2000 * MS)

    def come_back() -> None:
        scene.later(0, "one_store_forgets_write", master, scene.between(800, 1500))
        mend()
        scene.when(
            lambda: replica.name in controls.in_sync(vb_id),
            lambda: scene.cut(master, replica, scene.between(600, 900)),
        )

    scene.when(lambda: replica.name not in controls.in_sync(vb_id), come_back)


def gone_back(scene: Scene) -> None:
    """A replica dies and leaves the in-sync set. Then the metadata store goes back to a copy that
    has it in there, and it comes back while the others are down, or go on.
    """
    faults, controls = scene.faults, scene.controls
    if not scene.replicas or (put_back := controls.copy_store()) is None:
        return
    behind = scene.replicas[0]
    others = [each for each in (scene.master, *scene.others) if each is not behind]
    last_ns = scene.between(1700, 2500)
    faults.began("store_copied", _nothing, last_ns)
    scene.later(0, scene.one_of("kill", "power_cut"), behind, last_ns)

    def go_back() -> None:
        if faults.world.chance(0.7):
            for other in others:
                scene.later(0, scene.one_of("kill", "stop"), other, scene.between(1000, 3500))
        faults.counts["store_goes_back"] = faults.counts.get("store_goes_back", 0) + 1
        put_back()
        if behind.node is None and faults.world.chance(0.7):
            behind.start()

    scene.when(
        lambda: behind.name not in controls.in_sync(scene.vb_id),
        lambda: scene.after(scene.between(50, 300), go_back),
    )


def _nothing() -> None:
    """There is nothing to mend."""


def moving(scene: Scene) -> None:
    """Copies move, and somebody who takes part fails meanwhile."""
    controls = scene.controls
    controls.operate(scene.one_of("rebalance", "drain", "move"))
    scene.later(0, "slow_from", scene.others[0], 600 * MS)
    victim = scene.one_of("master", "other")
    scene.later(
        scene.between(50, 700), scene.one_of("kill", "power_cut", "pause", "isolate"),
        scene.master if victim == "master" else scene.others[-1], scene.between(50, 1200),
    )  # fmt: skip


def moving_away(scene: Scene) -> None:
    """A node loses all its copies. As soon as the master's is dropped, those that are left fail one
    after the other: what was not copied before that is lost.
    """
    controls, vb_id, master = scene.controls, scene.vb_id, scene.master
    if not controls.operate("drain"):
        controls.operate("rebalance")
    before = controls.in_sync(vb_id)

    def strike() -> None:
        for name in sorted(controls.in_sync(vb_id)):
            machine = next(each for each in (master, *scene.others) if each.name == name)
            if name not in before:
                scene.later(scene.between(0, 30), "power_cut", machine, scene.between(20, 300))

    scene.when(lambda: bool(before - controls.in_sync(vb_id)), strike)


def collections(scene: Scene) -> None:
    """Collections come and go while a partition moves, and a node hears late of them."""
    faults, controls = scene.faults, scene.controls
    if faults.world.chance(0.6):
        machine = (scene.master, *scene.others)[faults.world.below(1 + len(scene.others))]
        scene.later(0, scene.one_of("store_late", "one_store_deaf"), machine, 1200 * MS)
    if faults.world.chance(0.4):
        scene.later(scene.between(0, 400), scene.one_of("kill", "isolate"), scene.master)
    for at_ms in (50, 350):
        scene.after(at_ms * MS, partial(controls.handover, scene.vb_id))
    for _ in range(12):
        scene.after(scene.between(40, 500), controls.change_collections)


def starved(scene: Scene) -> None:
    """A node gets a slice of a processor, and perhaps another one dies meanwhile."""
    machines = (scene.master, *scene.others)
    scene.later(0, "starve", machines[scene.faults.world.below(len(machines))], 4000 * MS)
    if scene.faults.world.chance(0.5):
        scene.later(
            scene.between(500, 2500), "kill", machines[scene.faults.world.below(len(machines))]
        )


def all_starved(scene: Scene) -> None:
    """All nodes get slices of a processor, and perhaps one dies meanwhile."""
    for machine in (scene.master, *scene.others):
        scene.later(scene.between(0, 100), "starve", machine, 4000 * MS)
    if scene.faults.world.chance(0.5):
        scene.later(scene.between(500, 2500), "kill", scene.master)


def full_master(scene: Scene) -> None:
    """The disk of a master is full, and an operator fails it over. There is room, or the master is
    lost to the others, at about the moment at which the handover is given up.
    """
    controls, vb_id, master = scene.controls, scene.vb_id, scene.master
    given_up_ms = HANDING_NS_MAX // MS
    scene.later(0, "disk_full", master, scene.between(given_up_ms + 300, given_up_ms + 2500))

    def is_stuck() -> bool:
        node = master.node
        return node is not None and node.committed_seqno(vb_id) < scene.end(master)

    def ask() -> None:
        if is_stuck() and controls.operate("fail_over", master.name):
            scene.faults.began("fail_over", _nothing, 1)
            trouble = scene.one_of("kill", "power_cut", "pause", "isolate", "disk_full")
            scene.later(scene.between(given_up_ms - 50, given_up_ms + 250), trouble, master)

    scene.when(is_stuck, lambda: scene.after(scene.between(200, 700), ask))


def _nothing() -> None:
    """There is nothing to mend."""


ACTS: Final[dict[str, Callable[[Scene], None]]] = {
    "deposed": deposed, "blink": blink, "two_deaths": two_deaths,
    "master_and_replica": master_and_replica, "all_die": all_die, "to_and_fro": to_and_fro,
    "late_acks": late_acks, "moved_under_load": moved_under_load, "behind": behind,
    "came_back": came_back, "forgotten": forgotten, "unanswered": unanswered,
    "gone_back": gone_back,
    "moving": moving, "moving_away": moving_away, "collections": collections,
    "starved": starved, "all_starved": all_starved,
    "full_master": full_master, **rare_acts.ACTS,
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
        is_busy = faults.has_open or faults.steps_due > 0
        if (is_busy and is_patient) or not serving:
            world.after(LOOK_NS, self._look)
            return
        self._since_ns = world.now_ns
        others = [machine for machine in machines if machine is not serving[0]]
        world.draw.shuffle(others)
        name = plan.acts[world.below(len(plan.acts))]
        world.note(f"act {name} vb {vb_id} {serving[0].name}")
        ACTS[name](Scene(faults, vb_id, serving[0], others))
        world.after(100 * MS + world.below(CALM_NS), self._look)
