"""The demo of replication: many documents through a cluster whose masters die one after the other.

    Loader ──> three whole nodes, 3 copies, min in-sync 2, `committed` ──> SimConsumer

The story is a list of steps. In each step every partition gets its share of the documents, and in
the middle of that something happens: a master dies, a link is cut one way, all lose power. The next
step begins when everything of this one is answered. At the end clients, masters, replicas and the
consumer are compared key by key.

Everything is simulated but the documents and the product's cores, and depends on the seed only.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from dcp.wire.frame import HEADER
from dcp.wire.opcode import Opcode
from sim.cluster import Setting
from sim.cluster_node import ClusterNode
from sim.consumer import SimConsumer
from sim.demo_load import Loader
from sim.facts import Facts, History
from sim.faults import SHARES
from sim.machine import Machine
from sim.network import Network
from sim.plan import Plan, drawn
from sim.replicated import ReplicatedNodes
from sim.world import MS, SECOND, World
from vbucket.engine.partition import Partition

NODES: Final = 3
PARTITIONS: Final = 16
BATCH: Final = 256
"""Writes of a client in one batch: large enough that an event of the simulator carries much."""
MEMTABLE_BYTES: Final = 4 << 20
"""Small enough that nodes merge often, and a restart has little log to read."""
CONSUMER_BUFFER_BYTES: Final = 1 << 20
LOOK_NS: Final = 20 * MS
PATIENCE_NS: Final = 60 * SECOND
"""A step that takes longer has failed: something waits for ever."""
DOWN_NS: Final = (300 * MS, 2 * SECOND)
CUT_NS: Final = (500 * MS, 2500 * MS)
SENT_BEFORE_MAX: Final = 12
"""Something happens when so many batches of a step, at most, were sent."""
HANDOVERS_PER_STEP: Final = 2
CONSUMER_DEATH_EVERY: Final = 5
"""Steps from one death of the consumer to the next."""

Say = Callable[[int, str], None]
"""Told of a step when it is over: virtual time, what happened."""


class DemoError(Exception):
    """The demo cannot go on: something stands still. The text says what."""


class Script(NamedTuple):
    """What happens in the story."""

    deaths: int = 30
    cuts: int = 7
    has_blackout: bool = True
    """Whether all nodes lose power at once, in the middle."""

    def steps(self) -> list[str]:
        """Return what happens in each step."""
        steps = [("kill", "power cut")[number % 2] for number in range(self.deaths)]
        for number in range(self.cuts):
            steps.insert((2 * number + 1) * len(steps) // (2 * self.cuts), "cut")
        if self.has_blackout:
            steps.insert(len(steps) // 2, "blackout")
        return steps


class Summary(NamedTuple):
    """What came of it."""

    documents: int
    answered: int
    lost: int
    """Answered writes that their master does not have."""
    repeated: int
    happened: dict[str, int]
    failovers: int
    handovers: int
    replica_rollbacks: int
    consumer_rollbacks: int
    outages_ns: list[int]
    """After each death: how long until every partition of it had a master again."""
    differences: list[str]
    virtual_ns: int
    events: int


class DemoFacts(Facts):
    """Facts of the demo."""

    def __init__(self) -> None:
        super().__init__()
        self.handovers: set[tuple[int, int]] = set()
        """(partition, epoch) of masters that came by a handover."""
        self.replica_rollbacks = 0
        """Of processes that have ended."""


class DemoNode(ClusterNode):
    """A node of the demo. It keeps no record of every change, which checkers of seeds need: that
    would take more memory than the documents.
    """

    _record: DemoFacts

    def _record_committed(self, vb_ids: Iterable[int]) -> None:
        """Keep nothing."""

    def histories(self) -> list[History]:
        """See SimNode."""
        return []

    def ended(self) -> None:
        """See SimNode."""
        self._record.replica_rollbacks += self.core.replica.rollbacks
        super().ended()

    def _note_masterships(self) -> None:
        known = len(self._record.masterships)
        super()._note_masterships()
        for item in self._record.masterships[known:]:
            if self.core.master.masterships[item.vb_id].record.handover is not None:
                self._record.handovers.add((item.vb_id, item.epoch))


class DemoNodes(ReplicatedNodes):
    """A cluster of such nodes."""

    node_type = DemoNode


class Demo:
    """See the module."""

    def __init__(
        self, documents: Sequence[tuple[bytes, bytes]], script: Script, say: Say, seed: int = 1
    ) -> None:
        self.world = world = World(seed)
        self._documents = documents
        self._script = script
        self._say = say
        self._facts = DemoFacts()
        self._plan = plan = plan_of(seed)
        self._network = Network(world, plan.delay_min_ns, plan.delay_max_ns)
        self._cluster = DemoNodes(Setting(world, self._network, plan, self._facts, None))
        self._machines = [
            Machine(world, self._network, f"n{number}", self._cluster.boot)
            for number in range(1, NODES + 1)
        ]
        names = [machine.name for machine in self._machines]
        self._loader = Loader(self._network, documents, plan.partitions, names, BATCH)
        self._consumer = SimConsumer(
            self._network, "consumer", plan, self._facts, self._cluster.routing()
        )
        self._consumer.buffer_bytes = CONSUMER_BUFFER_BYTES
        self._happened: Counter[str] = Counter()
        self._outages_ns: list[int] = []
        self._died_ns = 0
        self._orphans: set[int] = set()
        """Partitions whose master has died in this step."""
        self._told = ""
        """What has happened in this step, "" before."""

    def run(self) -> Summary:
        """Play the story, and compare. Raises DemoError."""
        self._cluster.begin()
        for machine in self._machines:
            machine.start()
        self._consumer.begin()
        self._wait(self._is_served, "the cluster does not begin to serve")
        self._facts.masterships.clear()  # the first masters succeed nobody
        self._facts.handovers.clear()
        steps = self._script.steps()
        for number, what in enumerate(steps):
            self._step(what, number, (number + 1) / len(steps))
        self._loader.allow(1.0)
        self._wait(lambda: self._loader.is_idle, "writes are not answered")
        self._wait(self._is_level, "replicas or the consumer do not catch up")
        self._say(self.world.now_ns, "all is written; the client reads every flight back")
        self._loader.read_all()
        self._wait(lambda: self._loader.is_idle, "reads are not answered")
        return self._summary()

    # -- one step ----------------------------------------------------------------------------------

    def _step(self, what: str, number: int, share: float) -> None:
        """Load up to a share of the documents; meanwhile something happens."""
        world = self.world
        left = 1 + world.below(SENT_BEFORE_MAX)
        self._told = ""

        def on_sent(node: str) -> None:
            nonlocal left
            left -= 1
            if not left:
                world.after(world.below(6 * MS), self._happen, what, node)

        self._loader.on_sent = on_sent
        for _ in range(HANDOVERS_PER_STEP):
            world.after(world.below(20 * MS), self._hand_over)
        if number % CONSUMER_DEATH_EVERY == CONSUMER_DEATH_EVERY - 1:
            world.after(world.below(20 * MS), self._kill_consumer)
        self._loader.allow(share)
        self._wait(lambda: self._loader.is_idle, "writes are not answered")
        if left > 0:
            left = 0  # a short step: it happens at its end
            self._happen(what, self._machines[number % NODES].name)
        self._wait(lambda: bool(self._told) and self._is_whole(), "a partition has no master")
        answered = len(self._loader.answered)
        self._say(world.now_ns, f"{self._told}{self._outage()}; {answered:,} answered")

    def _happen(self, what: str, node: str) -> None:
        machine = next(machine for machine in self._machines if machine.name == node)
        self._happened[what] += 1
        if what == "cut":
            self._cut(machine)
            return
        victims = self._machines if what == "blackout" else [machine]
        self._died_ns = self.world.now_ns
        mastered = {vb_id for victim in victims for vb_id in self._served_by(victim)}
        self._orphans = mastered
        for victim in victims:
            if what == "kill":
                victim.kill()
            else:
                victim.cut_power(SHARES[self.world.below(len(SHARES))])
            self.world.after(self.world.between(*DOWN_NS), self._start, victim)
        who = "all nodes" if what == "blackout" else f"{node}, master of {len(mastered)} partitions"
        self._told = f"{_WORDS[what]}: {who}"

    def _cut(self, machine: Machine) -> None:
        others = [name for name in self._network.hosts if name != machine.name]
        one, other = machine.name, others[self.world.below(len(others))]
        if self.world.chance(0.5):
            one, other = other, one
        self._network.cut(one, other)
        self.world.after(self.world.between(*CUT_NS), self._network.mend, one, other)
        self._told = f"{_WORDS['cut']}: nothing passes from {one} to {other}"

    def _start(self, machine: Machine) -> None:
        machine.start()
        for why in machine.refusals:
            raise DemoError(why)

    def _hand_over(self) -> None:
        self._cluster.handover(self.world.below(self._plan.partitions))

    def _kill_consumer(self) -> None:
        consumer = self._consumer
        self._happened["consumer"] += 1
        consumer.crash()
        self.world.after(300 * MS, self._start_consumer)

    def _start_consumer(self) -> None:
        self._consumer.host.rise()
        self._consumer.begin()

    def _outage(self) -> str:
        """Return in words how long partitions had no master in this step."""
        if not self._orphans:
            return ""
        first: dict[int, int] = {}
        for item in reversed(self._facts.masterships):
            if item.at_ns <= self._died_ns:
                break
            first[item.vb_id] = item.at_ns
        outage_ns = max(first[vb_id] for vb_id in self._orphans) - self._died_ns
        self._orphans = set()
        self._outages_ns.append(outage_ns)
        return f"; served again after {outage_ns / SECOND:.2f} s"

    # -- what is going on --------------------------------------------------------------------------

    def _wait(self, is_done: Callable[[], bool], problem: str) -> None:
        world = self.world
        deadline_ns = world.now_ns + PATIENCE_NS
        while not is_done():
            if self._facts.problems:
                raise DemoError(self._facts.problems[0])
            if world.now_ns >= deadline_ns:
                raise DemoError(f"{problem} within {PATIENCE_NS // SECOND} s of virtual time")
            world.run_until(world.now_ns + LOOK_NS)

    def _served_by(self, machine: Machine) -> list[int]:
        node = machine.node
        if node is None:
            return []
        return [vb_id for vb_id in range(self._plan.partitions) if node.serves(vb_id)]

    def _is_served(self) -> bool:
        served = {vb_id for machine in self._machines for vb_id in self._served_by(machine)}
        return len(served) == self._plan.partitions

    def _is_whole(self) -> bool:
        """Whether all nodes run, the consumer runs, nothing is cut, and all is served."""
        hosts = self._network.hosts
        is_cut = any(self._network.link(one, other).is_cut for one in hosts for other in hosts)
        is_up = self._consumer.host.is_up and all(machine.node for machine in self._machines)
        return is_up and not is_cut and self._is_served()

    def _nodes(self) -> list[DemoNode]:
        nodes = [machine.node for machine in self._machines]
        return [node for node in nodes if isinstance(node, DemoNode)]

    def _is_level(self) -> bool:
        nodes = self._nodes()
        if len(nodes) != NODES or not self._is_whole():
            return False
        return all(
            len({(part.high_seqno, part.committed_seqno) for part in _parts(nodes, vb_id)}) == 1
            and nodes[0].engine.partitions[vb_id].committed_seqno == nodes[0].high_seqno(vb_id)
            and self._consumer.seqno(vb_id) == nodes[0].high_seqno(vb_id)
            for vb_id in range(self._plan.partitions)
        )

    # -- the end -----------------------------------------------------------------------------------

    def _summary(self) -> Summary:
        loader, facts = self._loader, self._facts
        masters: dict[bytes, bytes] = {}
        differences: list[str] = []
        for vb_id in range(self._plan.partitions):
            copies = {node.name: _documents(node, vb_id) for node in self._nodes()}
            master = next(node.name for node in self._nodes() if node.serves(vb_id))
            masters |= copies[master]
            for name, held in copies.items():
                if name != master:
                    differences += compare(f"replica {name}", held, f"{master}", copies[master])
        wanted = dict(self._documents)
        lost = sum(masters.get(key) != value for key, value in loader.answered.items())
        differences += compare("the flights", wanted, "the client's answers", loader.answered)
        differences += compare("the client's reads", loader.read, "the masters", masters)
        differences += compare("the flights", wanted, "the masters", masters)
        differences += compare(
            "the consumer", self._consumer.map().documents, "the masters", masters
        )
        served = {(item.vb_id, item.epoch) for item in facts.masterships}
        rollbacks = facts.replica_rollbacks + sum(
            node.core.replica.rollbacks for node in self._nodes()
        )
        return Summary(
            len(self._documents), len(loader.answered), lost, loader.repeated,
            dict(self._happened), len(served - facts.handovers), len(facts.handovers), rollbacks,
            len(facts.rolled_back),
            self._outages_ns, differences, self.world.now_ns, self.world.events,
        )  # fmt: skip


_WORDS: Final = {
    "kill": "killed", "power cut": "power cut", "cut": "cut one way", "blackout": "power cut",
}  # fmt: skip


SERVER_BYTES: Final = 256 << 10
"""What a server sends in one turn or message. Random plans draw less, down to one byte, with which
hundreds of thousands of writes take hours of virtual time."""


def plan_of(seed: int) -> Plan:
    """Return the sizes of the demo's cluster."""
    return drawn(random.Random(seed), nodes=NODES)._replace(
        section_bytes=SERVER_BYTES, pump_bytes=SERVER_BYTES,
        partitions=PARTITIONS, copies=NODES, min_in_sync=2, acknowledge="committed", unclean=False,
        delay_min_ns=MS // 10, delay_max_ns=MS, sync_min_ns=MS // 5, sync_max_ns=2 * MS,
        drift_ppm=0, memtable_bytes=MEMTABLE_BYTES, item_cache_bytes=0, compact_share=0.0,
        save_every_ns=SECOND,
    )  # fmt: skip


def _parts(nodes: Sequence[DemoNode], vb_id: int) -> list[Partition]:
    return [node.engine.partitions[vb_id] for node in nodes]


def _documents(node: DemoNode, vb_id: int) -> dict[bytes, bytes]:
    """Return what a node holds of a partition, as master or as replica."""
    end_seqno = node.engine.partitions[vb_id].committed_seqno
    documents: dict[bytes, bytes] = {}
    seqno = 1
    while seqno <= end_seqno:
        batch = node.engine.versions.frames(vb_id, seqno, end_seqno, bytes(4), (), 1 << 20)
        for frame in batch.frames:
            if frame[1] == Opcode.DCP_MUTATION:
                head = HEADER.unpack_from(frame)
                key_at = HEADER.size + head[3]
                value_at = key_at + head[2]
                documents[bytes(frame[key_at + 1 : value_at])] = bytes(frame[value_at:])
        seqno = batch.next_seqno
    return documents


def compare(
    name: str, ours: Mapping[bytes, bytes], other: str, theirs: Mapping[bytes, bytes]
) -> list[str]:
    """Return in words how `ours` differs from `theirs`."""
    if ours == theirs:
        return []
    return [
        f"{key.decode()}: {name}: {_show(ours.get(key))}; {other}: {_show(theirs.get(key))}"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    ]


def _show(value: bytes | None) -> str:
    return "nothing" if value is None else repr(value[:40])
