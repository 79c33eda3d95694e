"""Acts for what neither random faults nor the other acts bring about. Only `--act` brings them, so
that recorded seeds stay what they are; ranges of seeds (`sim.reached`, `scripts/soak sim`) ask for
them in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from sim.node import SingleNode
from sim.world import MS

if TYPE_CHECKING:
    from sim.acts import Scene

LOOK_NS: Final = 100 * MS
LOOKS: Final = 40
"""How often a master compacts until a replica lacks what is gone."""
UNCLEAN_MS: Final = 1200
"""How long nobody of an in-sync set has to be left, and a little more."""
BYTES_PER_S: Final = 1_500
"""So slow that a snapshot of a few documents takes a while."""


def snapshot_dies(scene: Scene) -> None:
    """A replica is down until its master has compacted what it lacks. It gets a snapshot over a
    narrow link, and within that the master dies, or the connection breaks.
    """
    if not scene.replicas:
        return
    faults, master, behind = scene.faults, scene.master, scene.replicas[-1]
    end = scene.end(behind)
    faults.happen_to("kill", behind, LOOKS * LOOK_NS + 500 * MS)

    def is_in_snapshot() -> bool:
        node = behind.node
        if not isinstance(node, SingleNode):
            return False
        return any(part.incomplete_snapshot is not None for part in node.engine.partitions)

    def strike() -> None:
        if faults.world.chance(0.3):
            scene.cut(master, behind, scene.between(700, 1500))
            for side in faults.stage.network.open_sides():
                if {side.host.name, side.peer.host.name} == {master.name, behind.name}:
                    faults.stage.network.break_connection(side, 0)
        else:
            scene.later(0, scene.one_of("kill", "power_cut"), master, scene.between(300, 1500))

    def look(left: int) -> None:
        node = master.node
        if faults.is_over or node is None or behind.node is not None:
            return
        if end < node.history_floor(scene.vb_id):
            scene.narrow(master, behind, BYTES_PER_S, 2500 * MS)
            behind.start()
            scene.when(is_in_snapshot, strike)
        elif left:
            node.compact()
            faults.world.after(LOOK_NS, look, left - 1)

    look(LOOKS)


def last_in_sync(scene: Scene) -> None:
    """A master loses its replicas until it is alone in the in-sync set. Then it dies for longer
    than its lease, and an operator elects one of the others, which lack what it had committed.
    """
    controls, master, vb_id = scene.controls, scene.master, scene.vb_id
    lease_ms = scene.faults.stage.plan.lease_s * 1000
    mends = [scene.cut(master, other, 3000 * MS) for other in scene.others]

    def die() -> None:
        down_ms = lease_ms + UNCLEAN_MS
        scene.later(
            scene.between(20, 300), scene.one_of("kill", "power_cut"), master,
            scene.between(down_ms + 300, down_ms + 1500),
        )  # fmt: skip
        for at_ms in range(lease_ms, down_ms + 300, 300):
            scene.after(at_ms * MS, elect)
        scene.after(500 * MS, lambda: [mend() for mend in mends])

    def elect() -> None:
        if not scene.faults.is_over and master.node is None:
            controls.elect_unclean(vb_id)

    scene.when(lambda: controls.in_sync(vb_id) == {master.name}, die)


ACTS: Final[dict[str, Callable[[Scene], None]]] = {
    "snapshot_dies": snapshot_dies, "last_in_sync": last_in_sync,
}  # fmt: skip
