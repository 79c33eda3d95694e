"""What can go wrong with the nodes, their store processes, etcd, disks and links, and how it ends.

Each fault begins at once and returns what it did, in words, and how it is healed. `heal` opens all
links in addition. A fault never takes what a cluster is not made to survive: one folder at most is
lost, and not while anything else is wrong.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from clients.testing import ServerRefusedError
from support.forgetful_disk import fill
from tests.soak.cluster.links import CLIENT
from tests.soak.cluster.nodes import FaultyCluster


class Begun(NamedTuple):
    """A fault that has begun."""

    words: str
    heal: Callable[[], None]
    sigkills: int = 0
    """How many processes it has killed."""


class Scene(NamedTuple):
    """Where faults happen, and the dice that choose among them."""

    cluster: FaultyCluster
    draw: random.Random

    def a_node(self) -> str:
        """Choose a node that runs."""
        return self.draw.choice(self.cluster.running())

    def pair(self) -> tuple[str, str]:
        """Choose two nodes."""
        one, other = self.draw.sample(list(self.cluster.nodes), 2)
        return one, other


def _nothing() -> None:
    """Healing of what only needs open links, or nothing at all."""


def kill_node(scene: Scene) -> Begun:
    """SIGKILL of a node, which starts again."""
    name = scene.a_node()
    scene.cluster.kill(name)
    return Begun(f"SIGKILL of node {name}", lambda: scene.cluster.start(name), sigkills=1)


def freeze_node(scene: Scene) -> Begun:
    """SIGSTOP of a node, which goes on later as if nothing had been."""
    name = scene.a_node()
    pid = scene.cluster.nodes[name].pid
    scene.cluster.freeze_process(pid)
    return Begun(f"SIGSTOP of node {name}", lambda: scene.cluster.thaw_process(pid))


def starve_node(scene: Scene) -> Begun:
    """A node gets a tenth of the time, as if its machine were busy with other things."""
    name = scene.a_node()
    pid = scene.cluster.nodes[name].pid
    scene.cluster.starve_process(pid)
    return Begun(f"node {name} runs a tenth of the time", lambda: scene.cluster.thaw_process(pid))


def starve_all(scene: Scene) -> Begun:
    """All nodes get a tenth of the time."""
    pids = [scene.cluster.nodes[name].pid for name in scene.cluster.running()]
    for pid in pids:
        scene.cluster.starve_process(pid)

    def heal() -> None:
        for pid in pids:
            scene.cluster.thaw_process(pid)

    return Begun("all nodes run a tenth of the time", heal)


def kill_store(scene: Scene) -> Begun:
    """SIGKILL of a node's store process, which the node replaces."""
    name = scene.a_node()
    pid, sigkills = scene.cluster.store_process(name), 0
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            sigkills = 1
    return Begun(f"SIGKILL of the store process of node {name}", _nothing, sigkills)


def freeze_store(scene: Scene) -> Begun:
    """SIGSTOP of a node's store process."""
    name = scene.a_node()
    pid = scene.cluster.store_process(name)
    if pid is None:
        return Begun(f"node {name} has no store process now", _nothing)
    scene.cluster.freeze_process(pid)
    words = f"SIGSTOP of the store process of node {name}"
    return Begun(words, lambda: scene.cluster.thaw_process(pid))


def kill_member(scene: Scene) -> Begun:
    """SIGKILL of a member of etcd, often its leader."""
    etcd = scene.cluster.etcd
    assert etcd is not None
    living = [number for number, process in enumerate(etcd.processes) if process is not None]
    if not living:
        return Begun("no member of etcd runs", _nothing)
    is_leader = scene.draw.random() < 0.6 and len(living) == len(etcd.processes)
    number = etcd.leader() if is_leader else scene.draw.choice(living)
    etcd.kill(number)
    words = f"SIGKILL of etcd's member {number}"
    return Begun(words, lambda: scene.cluster.start_member(number), sigkills=1)


def freeze_member(scene: Scene) -> Begun:
    """SIGSTOP of a member of etcd, often its leader."""
    etcd = scene.cluster.etcd
    assert etcd is not None
    number = etcd.leader() if scene.draw.random() < 0.6 else scene.draw.randrange(3)
    process = etcd.processes[number]
    assert process is not None
    scene.cluster.freeze_process(process.pid)
    words = f"SIGSTOP of etcd's member {number}"
    return Begun(words, lambda: scene.cluster.thaw_process(process.pid))


def cut_pair(scene: Scene) -> Begun:
    """A cable between two nodes is cut."""
    one, other = scene.pair()
    scene.cluster.network.cut(one, other)
    return Begun(f"nodes {one} and {other} are cut off from each other", _nothing)


def cut_one_way(scene: Scene) -> Begun:
    """What one node sends to another does not arrive; the other way it does."""
    one, other = scene.pair()
    scene.cluster.network.hold(one, other)
    return Begun(f"nothing arrives from node {one} at node {other}", _nothing)


def cut_from_nodes(scene: Scene) -> Begun:
    """A node reaches no other node, but etcd and its clients."""
    name = scene.draw.choice(list(scene.cluster.nodes))
    for other in scene.cluster.nodes:
        if other != name:
            scene.cluster.network.cut(name, other)
    return Begun(f"node {name} is cut off from the other nodes", _nothing)


def deaf_node(scene: Scene) -> Begun:
    """A node hears no other node, but is heard; or the other way round."""
    name = scene.draw.choice(list(scene.cluster.nodes))
    is_mute = scene.draw.random() < 0.5
    for other in scene.cluster.nodes:
        if other != name:
            scene.cluster.network.hold(*((name, other) if is_mute else (other, name)))
    return Begun(f"node {name} {'is heard by' if is_mute else 'hears'} no other node", _nothing)


def cut_from_etcd(scene: Scene) -> Begun:
    """A node does not reach etcd."""
    name = scene.draw.choice(list(scene.cluster.nodes))
    for member in scene.cluster.member_names:
        scene.cluster.network.cut(name, member)
    return Begun(f"node {name} is cut off from etcd", _nothing)


def no_etcd(scene: Scene) -> Begun:
    """No node reaches etcd."""
    for name in scene.cluster.nodes:
        for member in scene.cluster.member_names:
            scene.cluster.network.cut(name, member)
    return Begun("etcd is away", _nothing)


def cut_from_clients(scene: Scene) -> Begun:
    """Clients do not reach a node, one way or both."""
    name = scene.draw.choice(list(scene.cluster.nodes))
    way = scene.draw.choice(("both ways", "to it", "from it"))
    if way != "from it":
        scene.cluster.network.hold(CLIENT, name)
    if way != "to it":
        scene.cluster.network.hold(name, CLIENT)
    return Begun(f"clients and node {name} are cut off from each other, {way}", _nothing)


def cut_from_all(scene: Scene) -> Begun:
    """A node reaches nobody."""
    name = scene.draw.choice(list(scene.cluster.nodes))
    for other in (*scene.cluster.nodes, *scene.cluster.member_names, CLIENT):
        if other != name:
            scene.cluster.network.cut(name, other)
    return Begun(f"node {name} is cut off from everybody", _nothing)


def late(scene: Scene) -> Begun:
    """What a node sends to the others is late."""
    name = scene.draw.choice(list(scene.cluster.nodes))
    delay_s = scene.draw.choice((0.02, 0.1, 0.3, 0.7))
    for other in (*scene.cluster.nodes, CLIENT):
        if other != name:
            scene.cluster.network.delay(name, other, delay_s)
    return Begun(f"what node {name} sends is {delay_s * 1000:g} ms late", _nothing)


def break_connections(scene: Scene) -> Begun:
    """All connections of a node break, again and again."""
    name = scene.draw.choice(list(scene.cluster.nodes))
    parties = (*scene.cluster.nodes, *scene.cluster.member_names, CLIENT)
    count = sum(scene.cluster.network.reset(name, other) for other in parties if other != name)
    return Begun(f"{count} connections of node {name} break", _nothing)


def full_disk(scene: Scene) -> Begun:
    """The disk of a node is full, for it as a replica and as a master."""
    if not (names := scene.cluster.with_disks()):
        return Begun("no disk is full: the node with a disk of its own was lost before", _nothing)
    name = scene.draw.choice(names)
    filler: Path = fill(scene.cluster.disks[name])
    return Begun(f"the disk of node {name} is full", lambda: filler.unlink(missing_ok=True))


def wipe(scene: Scene) -> Begun:
    """A node and its folder are lost. A new node takes its place."""
    name = scene.a_node()
    scene.cluster.kill(name)
    scene.cluster.wipe(name)
    words = f"node {name} and its folder are lost"
    return Begun(words, lambda: scene.cluster.replace(name), sigkills=1)


def drain(scene: Scene) -> Begun:
    """A node is drained, and gets copies again later, both while clients write."""
    name = scene.a_node()
    cluster = scene.cluster
    try:
        cluster.ask_to("drain", node=name)
    except (OSError, ServerRefusedError) as error:
        return Begun(f"draining node {name} is refused: {error}", _nothing)

    def heal() -> None:
        cluster.insist("undrain", node=name)
        cluster.insist("rebalance")

    return Begun(f"node {name} is drained", heal)


Fault = Callable[[Scene], Begun]


class Entry(NamedTuple):
    """A fault, how often it is chosen, and how long it lasts."""

    fault: Fault
    weight: int
    seconds: tuple[float, float]


FAULTS: Final[dict[str, Entry]] = {
    "kill node": Entry(kill_node, 5, (0.0, 5.0)),
    "freeze node": Entry(freeze_node, 5, (0.3, 5.0)),
    "starve node": Entry(starve_node, 2, (3.0, 8.0)),
    "starve all": Entry(starve_all, 2, (3.0, 8.0)),
    "kill store": Entry(kill_store, 2, (0.0, 1.0)),
    "freeze store": Entry(freeze_store, 2, (0.5, 4.0)),
    "kill etcd": Entry(kill_member, 2, (0.5, 4.0)),
    "freeze etcd": Entry(freeze_member, 2, (0.5, 4.0)),
    "cut pair": Entry(cut_pair, 3, (0.3, 5.0)),
    "cut one way": Entry(cut_one_way, 3, (0.3, 5.0)),
    "cut from nodes": Entry(cut_from_nodes, 3, (0.3, 5.0)),
    "deaf node": Entry(deaf_node, 3, (0.3, 5.0)),
    "cut from etcd": Entry(cut_from_etcd, 2, (1.0, 6.0)),
    "no etcd": Entry(no_etcd, 1, (1.0, 6.0)),
    "cut from clients": Entry(cut_from_clients, 2, (0.3, 4.0)),
    "cut from all": Entry(cut_from_all, 3, (0.3, 5.0)),
    "late": Entry(late, 2, (0.5, 4.0)),
    "break": Entry(break_connections, 2, (0.0, 0.5)),
    "drain": Entry(drain, 2, (0.5, 5.0)),
    "full disk": Entry(full_disk, 2, (2.0, 6.0)),
    "wipe": Entry(wipe, 1, (0.5, 3.0)),
}
"""Chosen by their weights. A full disk needs a disk of its own."""
ALONE: Final = frozenset({"wipe"})
"""Faults that come when all copies are in sync, and alone: no folder more may be lost."""
