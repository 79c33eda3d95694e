"""One seed from beginning to end: plan, load with faults, rest, checks.

    LOAD with faults (plan.load_ns)
    GRACE: everything is mended, and no load (plan.grace_ns)
    with something broken for good (sim.broken): load, and time for the rest to serve again
    CALM: load without faults (plan.calm_ns); every operation is answered
    REST: every key is read, and consumers catch up (within plan.rest_ns)
    CHECKS

The result depends on the seed and the options only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from failover.replication.link import DAMAGED_RETRY_NS
from sim.acts import Acts
from sim.broken import CUTS, UNDER_LOAD_NS, WITHIN_NS, allowing, break_for_good
from sim.checkers import receipts
from sim.checks import (
    DURING,
    ONE_MESSAGE_BYTES,
    PROBLEM,
    Violation,
    at_the_end,
    failovers,
    linear,
    named,
)
from sim.cluster import MakeCluster, Setting, SingleNodes
from sim.cluster_bugs import node_type, planted
from sim.consumer import SimConsumer
from sim.facts import Facts, Map
from sim.faults import SHARES, Faults, collections
from sim.keep_workload import KeepWorkload
from sim.kv_client import KvClient
from sim.last_damage import damage_once_more, look_at
from sim.lock_workload import LockWorkload
from sim.machine import RESTART_NS, Machine
from sim.network import Network
from sim.node import SingleNode
from sim.plan import (
    Plan,
    about_elections,
    changed,
    damaged,
    drawn,
    locked,
    mixed,
    probed,
    reverted,
    widened,
)
from sim.prober import Prober
from sim.quarantine import kept
from sim.reached import reached
from sim.replicated import ReplicatedNodes
from sim.twin_pages import TwinEnv
from sim.wide_workload import WideWorkload
from sim.world import MS, SECOND, Trace, World
from support.forgetful_disk import ForgetfulEnv

LOCKING = "locking 10482"
"""Its number lets as many seeds as possible, of those that tests name, stay what they are."""
KINDS_OF_PLANS = (
    ("wide", widened),
    ("probed", probed),
    ("mixed", mixed),
    ("media", damaged),
    ("reverted", reverted),
    (LOCKING, locked),
)
"""What is added to a plan, and the name of the source that it is drawn from."""
LOOK_NS = 50 * MS
"""How often the end of the rest is looked for."""
COLLECTION_NS = 100 * MS
"""Where collections have a maxTTL, the first one is created so early."""
MENDED_NS = 2 * SECOND
"""What can be proven is mended so long after two passes, at most."""
CALM_TIMEOUT_NS = 2 * SECOND
"""Timeout of operations once the faults are over: they have no reason to take so long."""
ONE_MESSAGE_TIMES = 4
"""Moves have so much more time to end where copies get one change at a time."""


class Options(NamedTuple):
    """What a run depends on beside its seed."""

    nodes: int = 1
    seconds: float | None = None
    """How long the load lasts, in virtual seconds; None: as the seed says."""
    has_faults: bool = True
    bug: str = ""
    """A fault of the product that is put in on purpose (`sim.cluster_bugs.PLANTED`)."""
    act: str = ""
    """The one act that every plan has; "": as the seed says."""
    changes: tuple[tuple[str, str], ...] = ()
    """Fields of the plan that have other values than the seed says (`sim.plan.changed`)."""
    forever: str = ""
    """What stays broken when the faults are over: one of `sim.broken.KINDS`, or nothing."""
    draw: int = 0
    """Another number makes another run of the same plan."""
    crash: int = 0
    """The process of n1 ends inside an event: at its so manieth write, sync, rename or commit of
    the store. Below 0: the machine loses power there. 0: not at all."""


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
    checks: tuple[str, ...] = ()
    """The check that each violation fails."""
    reached: dict[str, int] = {}  # noqa: RUF012 - nobody changes it
    """How often what the plan is after has happened (`sim.reached`)."""


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
        draw = self.world.draw
        self.plan: Plan = plan or drawn(draw, nodes=options.nodes, seconds=options.seconds)
        if options.act:
            self.plan = about_elections(
                self.plan, draw, nodes=options.nodes, seconds=options.seconds, act=options.act
            )
        if plan is None:
            for kind, change in KINDS_OF_PLANS:
                self.plan = change(self.plan, random.Random(f"{seed} {kind}"))
        if not options.has_faults:
            self.plan = self.plan._replace(faults=(), acts=())
        self._forever, self._crash = options.forever, options.crash
        if options.forever:
            self.plan = allowing(self.plan)
        self.plan = changed(self.plan, options.changes)
        if options.draw:
            draw.seed(f"{seed} {options.draw}")
        self.facts = Facts()
        plan, world = self.plan, self.world
        world.note(f"seed {seed} {plan}")
        self.network = network = Network(world, plan.delay_min_ns, plan.delay_max_ns)
        if make_cluster is None:
            make_cluster = SingleNodes if options.nodes == 1 else ReplicatedNodes
        self._cluster = make_cluster(
            Setting(world, network, plan, self.facts, node_type(options.bug))
        )
        self.controls = self._cluster.controls
        self.machines = [
            Machine(
                world, self.network, f"n{number}", self._cluster.boot,
                drift_ppm=world.below(2 * plan.drift_ppm + 1) - plan.drift_ppm,
                env_type=TwinEnv if plan.scrub_ns else ForgetfulEnv,
            )
            for number in range(1, options.nodes + 1)
        ]  # fmt: skip
        self.clients = self._clients()
        self.reader = self._client("reader")
        self.consumers = [self._consumer(f"w{number}") for number in range(1, plan.consumers + 1)]
        self.consumers += [
            SimConsumer(
                self.network, f"x{number}", plan, self.facts, self._cluster.routing(),
                takes_cuts=True,
            )
            for number in range(1, plan.cut_consumers + 1)
        ]  # fmt: skip
        self._probers = [
            Prober(
                network, f"p{number}", plan, self.facts, self._cluster.routing(), self.machines
            )
            for number in range(1, plan.probers + 1)
        ]  # fmt: skip
        self.faults = Faults(self)
        self._dead: Machine | None = None
        """The node that never comes back."""
        self._stuck: set[str] = set()
        """Consumers that stand still because a link is cut for good."""

    def _clients(self) -> list[KvClient]:
        """Return the clients that make the load."""
        plan = self.plan
        kinds = (
            ("c", None, plan.clients),
            ("d", WideWorkload, plan.wide_clients),
            ("l", LockWorkload, plan.lock_clients),
        )
        clients = [
            self._client(f"{name}{number}", workload)
            for name, workload, count in kinds
            for number in range(1, count + 1)
        ]
        if plan.has_keeps:
            clients.append(self._client("keeper", KeepWorkload))
        return clients

    def _client(self, name: str, workload: type[WideWorkload] | None = None) -> KvClient:
        caller = self._cluster.caller
        return KvClient(self.network, name, self.plan, caller, self.facts, workload)

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
        if self._crash:
            share = None if self._crash > 0 else SHARES[-self._crash % len(SHARES)]
            self.machines[0].end_inside(abs(self._crash), share)
            self.world.after(RESTART_NS, self._start_again)
        self._start_machines()
        if self.plan.waits_for_masters or self.plan.founded_ns:
            self._wait(self._are_all_served, "a partition has no master")
        for client in (*self.clients, *self._probers):
            client.begin()
        for consumer in self.consumers:
            consumer.begin()
        if self.plan.max_ttl_s:
            self.world.after(COLLECTION_NS, collections, self.faults)

    def _start_again(self) -> None:
        """Start what has ended inside an event, as a supervisor does."""
        if self.faults.is_over:
            return
        if self.machines[0].points_left == 0:
            self.faults.counts["crash"] = 1
        self._start_machines()
        self.world.after(RESTART_NS, self._start_again)

    def finish(self) -> Report:
        """Bring everything to rest, and check."""
        self._rest()
        return self._check()

    def _start_machines(self) -> None:
        for machine in self.machines:
            if machine.node is None and machine is not self._dead:
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
        for prober in self._probers:
            prober.stop()
        for client in self.clients:
            client.stop()
            client.caller.timeout_ns = CALM_TIMEOUT_NS
        world.run_until(world.now_ns + self.plan.grace_ns)
        self._put_right()
        self._wait(self._are_clients_idle, "clients still wait for answers")
        if facts.lost_folders and self.plan.needs_every_copy:
            # Without one of its copies a partition rightly refuses durable writes.
            self._wait(lambda: not self._cluster.why_unsettled(), "lost copies are not replaced")
        if self.plan.scrub_ns and not facts.problems:
            self._damage_once_more()
            if facts.met_damage and len(self.machines) > 1:
                world.run_until(world.now_ns + DAMAGED_RETRY_NS + SECOND)  # replicas come back
        if self._forever and not facts.problems:
            self._break_for_good()
        if self.plan.max_ttl_s and not facts.problems:
            self.reader.read_all()  # what is due by now is not written again before it is read
            self._wait(lambda: self.reader.is_idle, "a key cannot be read")
        facts.works_ns = world.now_ns
        for client in (*self.clients, *self._probers):
            client.begin()
        for number in range(1, self.plan.late_consumers + 1):
            self.consumers.append(self._consumer(f"late{number}"))
            self.consumers[-1].begin()
        world.run_until(world.now_ns + self.plan.calm_ns)
        for client in (*self.clients, *self._probers):
            client.stop()
        self._wait(self._are_clients_idle, "clients wait for answers")
        self.reader.caller.timeout_ns = CALM_TIMEOUT_NS
        self.reader.read_all()
        self._wait(lambda: self.reader.is_idle, "a key cannot be read")
        self._wait(self._are_nodes_quiet, "changes are not committed")
        # With a message under way at a time, a copy takes a round trip for each change.
        times = 1 if self.plan.window_bytes > ONE_MESSAGE_BYTES else ONE_MESSAGE_TIMES
        self._wait(lambda: not self._cluster.why_unsettled(), "moves do not end", times)
        if self.plan.cut_consumers and len(self.machines) > 1:
            for machine in self.machines:
                machine.clock.set_right()  # a node whose clock is off takes part in no cut
        if self._forever not in CUTS:
            self._wait(self._have_consumers_caught_up, "consumers do not catch up")
            return
        # A consumer that asks a replica which hears no master is told to try again, for ever.
        world.run_until(world.now_ns + WITHIN_NS)
        behind = self._why_behind()
        self._stuck = {each.name for each in self.consumers if f"{each.name} has" in behind}

    def _damage_once_more(self) -> None:
        """Now that nothing else is wrong, what can be proven is mended soon, and answered then."""
        page, world = damage_once_more(self), self.world
        if page is not None:
            self.reader.read_all()
            until_ns = world.now_ns + MENDED_NS + 2 * self.plan.scrub_ns
            while world.now_ns < until_ns and not (page.ended and self.reader.is_idle):
                world.run_until(world.now_ns + LOOK_NS)
                look_at(self, page)
            self._put_right()
            self._wait(lambda: self.reader.is_idle, "a key cannot be read")

    def _put_right(self) -> None:
        """What no copy can give comes from a backup."""
        for machine in self.machines:
            if machine.env.put_right("") and isinstance(machine.node, SingleNode):
                machine.node.store.refresh()
                if machine.node.scrubber is not None:
                    machine.node.scrubber.forget()

    def _break_for_good(self) -> None:
        """Break something under load, and give the rest its time."""
        world = self.world
        self.reader.read_all()  # it learns where the nodes are
        self._wait(lambda: self.reader.is_idle, "a key cannot be read")
        for client in self.clients:
            client.begin()
        world.run_until(world.now_ns + UNDER_LOAD_NS)
        self._dead = break_for_good(self, self._forever)
        world.run_until(world.now_ns + WITHIN_NS)
        for client in self.clients:
            client.stop()
            client.caller.timeout_ns = CALM_TIMEOUT_NS
        self._wait(self._are_clients_idle, "clients still wait for answers")
        self.reader.read_all()  # it may learn by a timeout that a node is dead
        self._wait(lambda: self.reader.is_idle, "a key cannot be read")

    def _wait(self, is_done: Callable[[], bool], problem: str, times: int = 1) -> None:
        """Go on until it is done, for `times` the plan's time of rest at most."""
        world = self.world
        rest_ns = times * self.plan.rest_ns
        deadline_ns = world.now_ns + rest_ns
        while not is_done():
            if world.now_ns >= deadline_ns:
                seconds = rest_ns / SECOND
                why = self._why_unserved() or self._cluster.why_unsettled() or self._why_behind()
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

    def _why_unserved(self) -> str:
        """Say of each partition that nobody serves on whom it waits, and why."""
        running = [machine.node for machine in self.machines if machine.node is not None]
        return "; ".join(
            self._cluster.why_unserved(vb_id)
            for vb_id in range(self.plan.partitions)
            if not any(node.serves(vb_id) for node in running)
        )

    def _are_clients_idle(self) -> bool:
        return all(client.is_idle for client in self.clients)

    def _are_nodes_quiet(self) -> bool:
        if self._forever:  # a replica that its master does not reach stays as it is
            served = [(self._master_of(vb_id), vb_id) for vb_id in range(self.plan.partitions)]
            return all(
                machine.node is not None
                and machine.node.committed_seqno(vb_id) == machine.node.high_seqno(vb_id)
                for machine, vb_id in served
            )
        return all(
            machine.node is not None and machine.node.is_quiet() for machine in self.machines
        )

    def _have_consumers_caught_up(self) -> bool:
        if not self._are_all_served():
            return False  # a handover is under way
        return not self._why_behind()

    def _why_behind(self) -> str:
        """Say which consumers lack what in partitions that are served."""
        behind = []
        for vb_id in range(self.plan.partitions):
            node = self._master_of(vb_id).node
            end = 0 if node is None else node.high_seqno(vb_id)
            behind += [
                f"{consumer.name} has vb {vb_id} up to seqno {consumer.seqno(vb_id)} of {end}, and"
                f" is connected to {', '.join(consumer.links) or 'nobody'}"
                for consumer in self.consumers
                if consumer.seqno(vb_id) != end
            ]
        return "; ".join(behind)

    def _master_of(self, vb_id: int) -> Machine:
        serving = (
            machine
            for machine in self.machines
            if machine.node is not None and machine.node.serves(vb_id)
        )
        return next(serving, self.machines[0])

    # -- checks ------------------------------------------------------------------------------------

    def _check(self) -> Report:
        facts = self.facts
        self._look_at_nodes()
        found, unsure = named(PROBLEM, facts.problems), 0
        if not found:
            texts, unsure = linear(facts, self.plan, facts.operations)
            found += named("linearizable", texts)
            found += named("receipts", self._check_receipts())
            for check, texts_of in DURING.items():
                found += named(check, texts_of(facts))
            found += at_the_end(facts, self.plan)
        return self.report(found, unsure)

    def report(self, found: Sequence[Violation], unsure: int = 0) -> Report:
        """Return what came of the run so far."""
        world = self.world
        for violation in found:
            world.note(f"violation {violation.text}")
        return Report(
            self.seed, [violation.text for violation in found], world.events,
            len(self.facts.operations), unsure, world.now_ns, self.faults.counts,
            "" if world.trace is None else world.trace.digest,
            tuple(violation.check for violation in found),
            reached(self.facts, world.moments, self.faults.told),
        )  # fmt: skip

    def _check_receipts(self) -> list[str]:
        facts = self.facts
        excuses = [*facts.excuses, *failovers(facts, self.plan)]
        gone = receipts.lost_by_election(facts.operations, facts.final, excuses)
        on_disk = {machine.name: kept(machine.disk) for machine in self.machines}
        return [
            *receipts.named(gone, facts.cut_off, facts.lost, facts.lost_folders),
            *receipts.still_there(
                facts.cut_off,
                facts.final,
                facts.handed,
                {(each.vb_id, each.epoch) for each in facts.masterships},
            ),
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
        if len(self.machines) > 1:
            facts.copy_maps = [self._copies_of(vb_id) for vb_id in masters]
        facts.consumer_maps = [
            consumer.map() for consumer in self.consumers if consumer.name not in self._stuck
        ]

    def _copies_of(self, vb_id: int) -> tuple[Map, list[Map]]:
        """Return what a partition's master has, and its copies in sync that have come as far."""
        at = {machine.name: machine.node for machine in self.machines if machine.node is not None}
        name = self._master_of(vb_id).name
        master = at.pop(name, None)
        if master is None:
            return Map(f"the master of vb {vb_id}", {}), []
        copies = [
            Map(f"{other}'s copy of vb {vb_id}", at[other].documents_of(vb_id))
            for other in sorted(at.keys() & self.controls.in_sync(vb_id))
            if at[other].high_seqno(vb_id) == master.high_seqno(vb_id)
        ]
        return Map(f"the master {name}", master.documents_of(vb_id)), copies


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
    if not options.has_faults:
        words = [*words, "--no-faults"]
    if options.forever:
        words = [*words, f"--forever {options.forever}"]
    if options.draw:
        words = [*words, f"--draw {options.draw}"]
    if options.crash:
        words = [*words, f"--crash {options.crash}"]
    words = [*words, *(f"--set {name}={value}" for name, value in options.changes)]
    return " ".join(words)
