"""One seed from beginning to end: plan, load with faults, rest, checks.

    LOAD with faults (plan.load_ns)
    GRACE: everything is mended, and no load (plan.grace_ns)
    CALM: load without faults (plan.calm_ns); every operation is answered
    REST: every key is read, and consumers catch up (within plan.rest_ns)
    CHECKS

The result depends on the seed and the options only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sim.acts import Acts
from sim.checkers import (
    expiries,
    histories,
    linearizable,
    liveness,
    membership,
    receipts,
    replica_reads,
    streams,
)
from sim.cluster import MakeCluster, Setting, SingleNodes
from sim.cluster_bugs import planted
from sim.consumer import SimConsumer
from sim.facts import Facts, Map
from sim.faults import Faults
from sim.kv_client import KvClient
from sim.machine import Machine
from sim.network import Network
from sim.plan import Plan, about_elections, drawn, widened
from sim.quarantine import kept
from sim.replicated import ReplicatedNodes
from sim.world import MS, SECOND, Trace, World

LOOK_NS = 50 * MS
"""How often the end of the rest is looked for."""
CALM_TIMEOUT_NS = 2 * SECOND
"""Timeout of operations once the faults are over: they have no reason to take so long."""


class Options(NamedTuple):
    """What a run depends on beside its seed."""

    nodes: int = 1
    seconds: float | None = None
    """How long the load lasts, in virtual seconds; None: as the seed says."""
    has_faults: bool = True
    bug: str = ""
    """A fault of the product that is put in on purpose (`sim.bugs`)."""
    act: str = ""
    """The one act that every plan has; "": as the seed says."""


DEFAULTS = Options()


class Report(NamedTuple):
    """What came of a seed."""

    seed: int
    violations: list[str]
    events: int
    operations: int
    unsure: int
    """Keys whose linearizability could not be decided in bounded time."""
    virtual_ns: int
    faults: dict[str, int]
    digest: str
    """Hash of the trace; "" without one."""


class Simulation:
    """A run under way. `Stage` of the faults."""

    def __init__(
        self,
        seed: int,
        options: Options,
        trace: Trace | None = None,
        make_cluster: MakeCluster | None = None,
        plan: Plan | None = None,
    ) -> None:
        """`plan` replaces the one that the seed draws."""
        self.seed = seed
        self._bug = options.bug
        self.world = World(seed, trace)
        self.plan: Plan = plan or drawn(
            self.world.draw, nodes=options.nodes, seconds=options.seconds
        )
        if options.act:
            self.plan = about_elections(
                self.plan, self.world.draw, nodes=options.nodes, seconds=options.seconds,
                act=options.act,
            )  # fmt: skip
        if plan is None:
            self.plan = widened(self.plan, random.Random(f"{seed} wide"))
        if not options.has_faults:
            self.plan = self.plan._replace(faults=(), acts=())
        self.facts = Facts()
        plan, world = self.plan, self.world
        world.note(f"seed {seed} {plan}")
        self.network = Network(world, plan.delay_min_ns, plan.delay_max_ns)
        if make_cluster is None:
            make_cluster = SingleNodes if options.nodes == 1 else ReplicatedNodes
        self._cluster = make_cluster(Setting(world, self.network, plan, self.facts, options.bug))
        self.controls = self._cluster.controls
        self.machines = [
            Machine(
                world, self.network, f"n{number}", self._cluster.boot,
                drift_ppm=world.below(2 * plan.drift_ppm + 1) - plan.drift_ppm,
            )
            for number in range(1, options.nodes + 1)
        ]  # fmt: skip
        self.clients = [self._client(f"c{number}") for number in range(1, plan.clients + 1)]
        self.clients += [
            self._client(f"d{number}", is_wide=True) for number in range(1, plan.wide_clients + 1)
        ]
        self.reader = self._client("reader")
        self.consumers = [self._consumer(f"w{number}") for number in range(1, plan.consumers + 1)]
        self.faults = Faults(self)

    def _client(self, name: str, *, is_wide: bool = False) -> KvClient:
        caller = self._cluster.caller
        return KvClient(self.network, name, self.plan, caller, self.facts, is_wide=is_wide)

    def _consumer(self, name: str) -> SimConsumer:
        return SimConsumer(self.network, name, self.plan, self.facts, self._cluster.routing())

    def run(self) -> Report:
        """Run to the end, and check."""
        with planted(self._bug):
            self.begin()
            self.faults.begin()
            Acts(self.faults).begin()
            self.world.run_until(self.world.now_ns + self.plan.load_ns)
            return self.finish()

    def begin(self) -> None:
        """Start everything."""
        self._cluster.begin()
        self._start_machines()
        if self.plan.waits_for_masters:
            self._wait(self._are_all_served, "a partition has no master")
        for client in self.clients:
            client.begin()
        for consumer in self.consumers:
            consumer.begin()

    def finish(self) -> Report:
        """Bring everything to rest, and check."""
        self._rest()
        return self._check()

    def _start_machines(self) -> None:
        for machine in self.machines:
            if machine.node is None:
                machine.start()
            self.facts.problems += machine.refusals
            machine.refusals.clear()

    # -- rest --------------------------------------------------------------------------------------

    def _rest(self) -> None:
        """Mend everything, and wait until nothing moves any more."""
        world, facts = self.world, self.facts
        self.faults.end()
        self._cluster.mend()
        self._start_machines()
        for client in self.clients:
            client.stop()
            client.caller.timeout_ns = CALM_TIMEOUT_NS
        world.run_until(world.now_ns + self.plan.grace_ns)
        self._wait(self._are_clients_idle, "clients still wait for answers")
        facts.works_ns = world.now_ns
        for client in self.clients:
            client.begin()
        for number in range(1, self.plan.late_consumers + 1):
            self.consumers.append(self._consumer(f"late{number}"))
            self.consumers[-1].begin()
        world.run_until(world.now_ns + self.plan.calm_ns)
        for client in self.clients:
            client.stop()
        self._wait(self._are_clients_idle, "clients wait for answers")
        self.reader.caller.timeout_ns = CALM_TIMEOUT_NS
        self.reader.read_all()
        self._wait(lambda: self.reader.is_idle, "a key cannot be read")
        self._wait(self._are_nodes_quiet, "changes are not committed")
        self._wait(lambda: not self._cluster.why_unsettled(), "moves do not end")
        self._wait(self._have_consumers_caught_up, "consumers do not catch up")

    def _wait(self, is_done: Callable[[], bool], problem: str) -> None:
        world = self.world
        deadline_ns = world.now_ns + self.plan.rest_ns
        while not is_done():
            if world.now_ns >= deadline_ns:
                seconds = self.plan.rest_ns / SECOND
                why = self._cluster.why_unsettled()
                self.facts.problems.append(
                    f"{problem}, {seconds:g} s after the faults and the load"
                    + f" ({why})" * bool(why)
                )
                return
            self._start_machines()
            if self.facts.problems:
                return  # it has failed already, and may never come to rest
            world.run_until(world.now_ns + LOOK_NS)

    def _are_all_served(self) -> bool:
        return all(
            any(
                machine.node is not None and machine.node.serves(vb_id) for machine in self.machines
            )
            for vb_id in range(self.plan.partitions)
        )

    def _are_clients_idle(self) -> bool:
        return all(client.is_idle for client in self.clients)

    def _are_nodes_quiet(self) -> bool:
        return all(
            machine.node is not None and machine.node.is_quiet() for machine in self.machines
        )

    def _have_consumers_caught_up(self) -> bool:
        if not self._are_all_served():
            return False  # a handover is under way
        for vb_id in range(self.plan.partitions):
            node = self._master_of(vb_id).node
            if node is None:
                return False
            end = node.high_seqno(vb_id)
            if any(consumer.seqno(vb_id) != end for consumer in self.consumers):
                return False
        return True

    def _master_of(self, vb_id: int) -> Machine:
        serving = (
            machine
            for machine in self.machines
            if machine.node is not None and machine.node.serves(vb_id)
        )
        return next(serving, self.machines[0])

    # -- checks ------------------------------------------------------------------------------------

    def _check(self) -> Report:
        facts, world = self.facts, self.world
        self._look_at_nodes()
        problems = list(facts.problems)
        if not problems:
            if self.plan.acknowledge == "master":
                facts.failovers = histories.failovers(facts.masterships, facts.final)
            cuts = [*facts.excuses, *facts.failovers]
            expiring = expiries.Expiries(self.plan)
            found, unsure = linearizable.check(
                [*facts.operations, *expiring.events(facts.operations)], cuts
            )
            problems += expiring.overdue(facts.operations)
            problems += replica_reads.uncommitted(
                facts.replica_reads, facts.histories, facts.committed
            )
            problems += found
            problems += histories.lost_writes(
                facts.operations, facts.final, facts.excuses, facts.failovers
            )
            problems += self._check_receipts()
            problems += histories.diverged(facts.histories)
            problems += histories.masters(facts.masterships)
            problems += histories.rollbacks(facts.rolled_back, facts.excuses)
            problems += histories.not_rolled_back(
                facts.streamed, facts.rolled_back, facts.begun, facts.final
            )
            problems += membership.lacking(facts.lacking)
            problems += membership.overlaps(facts.overlaps, facts.excuses)
            problems += membership.kept(facts.kept)
            problems += membership.new_versions(facts.masterships, facts.handed)
            problems += streams.uncommitted(facts.streamed, facts.committed)
            if facts.master_map is not None:
                problems += streams.maps(facts.master_map, facts.consumer_maps)
            problems += liveness.late(facts.operations, facts.works_ns)
        else:
            unsure = 0
        for problem in problems:
            world.note(f"violation {problem}")
        return Report(
            self.seed, problems, world.events, len(facts.operations), unsure, world.now_ns,
            self.faults.counts, "" if world.trace is None else world.trace.digest,
        )  # fmt: skip

    def _check_receipts(self) -> list[str]:
        facts = self.facts
        gone = receipts.lost_by_election(facts.operations, facts.final, facts.excuses)
        on_disk = {machine.name: kept(machine.disk) for machine in self.machines}
        return [
            *receipts.named(gone, facts.cut_off, facts.lost, facts.lost_folders),
            *receipts.still_there(facts.cut_off, facts.final, facts.handed),
            *receipts.readable(facts.cut_off, facts.lost_folders, on_disk),
        ]

    def _look_at_nodes(self) -> None:
        """Record what nodes and consumers hold at rest."""
        facts = self.facts
        documents: dict[bytes, bytes] = {}
        for machine in self.machines:
            if machine.node is not None:
                facts.histories += machine.node.histories()
                facts.problems += machine.node.damages()
                documents |= machine.node.documents()
        masters = {vb_id: self._master_of(vb_id).name for vb_id in range(self.plan.partitions)}
        facts.final = [item for item in facts.histories if masters[item.vb_id] == item.node]
        facts.master_map = Map("the master", documents)
        facts.consumer_maps = [consumer.map() for consumer in self.consumers]


def run_seed(seed: int, options: Options = DEFAULTS, trace: Trace | None = None) -> Report:
    """Run one seed."""
    return Simulation(seed, options, trace).run()


def replay_command(seed: int, options: Options) -> str:
    """Return the command that runs a seed again."""
    words: Sequence[str] = ["python -m tests.sim", f"--seed {seed}"]
    if options.nodes != 1:
        words = [*words, f"--nodes {options.nodes}"]
    if options.bug:
        words = [*words, f"--bug {options.bug}"]
    if options.act:
        words = [*words, f"--act {options.act}"]
    if options.seconds is not None:
        words = [*words, f"--seconds {options.seconds:g}"]
    return " ".join(words)
