"""The kinds of faults, and when they happen.

A fault is a function that harms something now, and says when and how that is mended; None: there is
nothing to mend, or it mends itself. Faults of the plan happen at random times until the load ends.
Then everything is mended, and all machines run again.

Invariant: faults draw from the world's randomness only, and choose among things in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from failover.rules.replication_record import ReplicationRecord
from sim import cluster_faults
from sim.consumer import SimConsumer
from sim.facts import Damaged, Facts
from sim.kv_client import KvClient
from sim.machine import Machine
from sim.network import Network
from sim.plan import Plan
from sim.twin_pages import KINDS, PAGED, TwinEnv
from sim.world import MS, SECOND, World
from tests.memory.log_device import SegmentsOf
from vbucket.check.store_check import StoreCheck
from vbucket.log.record import written_bytes
from vbucket.store.records import BY_KEY_TABLE, BY_SEQNO_TABLE

Mend = Callable[[], None]


class FaultTold:
    """A fault as a story tells it. `ended_ns` is None until it is mended."""

    __slots__ = ("began_ns", "ended_ns", "name", "number", "victims")

    def __init__(self, number: int, name: str, victims: str, began_ns: int) -> None:
        self.number = number
        self.name = name
        self.victims = victims
        self.began_ns = began_ns
        self.ended_ns: int | None = None


SHARES = (0.0, 0.3, 0.7, 1.0)
"""How much of what was not synced survives a power cut."""
RESTART_MAX_NS = 400 * MS
HARM_MAX_NS = 800 * MS
"""How long a fault lasts at most, until it is mended."""
LONG_HARMS = frozenset({"isolate", "lonely_consumer", "store_goes_back"})
LONG_HARMS_NS = ((500 * MS, 1000 * MS), (1500 * MS, 3000 * MS))
"""How long these last: about as long as an election takes, or longer."""
STALL_NS = 1500 * MS
POINTS_MAX = 12
"""A process ends at one of its next writes, syncs, renames or commits, at most so many ahead."""
NEAR_THE_END_BYTES = 2048
"""Where the newest segment rots: groups that were answered just now."""
DAMAGED_MAX = 3
"""Pages that are damaged at the same time, all of one machine."""
FORGOTTEN_MAX = 5
"""Commits that a store forgets."""
BRANCHES_MAX = 3
"""Branches of a run, so that some history is left to check."""
EMPTIED_SHARE = 0.15
"""Of many branches, so many are at 0."""
LEFT_BEHIND_LOOK_NS = 200 * MS
LEFT_BEHIND_LOOKS = 20
"""How often a machine that is left behind is looked at, before it is started in any case."""
LEFT_BEHIND_AFTER_NS = 500 * MS


class Controls(Protocol):
    """What only a cluster can do: the seam for replicated nodes."""

    def handover(self, vb_id: int, wanted: str | None = None) -> None:
        """Name another wanted master of a partition: a machine, or any of its copies."""

    def record(self, vb_id: int) -> ReplicationRecord:
        """Return a partition's record as the metadata store has it."""

    def in_sync(self, vb_id: int) -> frozenset[str]:
        """Return the machines in a partition's in-sync set."""

    def elect_unclean(self, vb_id: int) -> bool:
        """Elect a master outside the in-sync set, where nobody of it is left. False: refused.

        It records the excuse, as `SimNode.branch` does.
        """

    def change_collections(self) -> None:
        """Create a collection, or drop one."""

    def operate(self, kind: str, machine: str | None = None) -> bool:
        """Let an operator ask for a move of copies or masters; return whether it begins. What is
        about a node is about that of the machine, or any.
        """

    def may_lose_folder(self, machine: str) -> bool:
        """Whether a machine may lose its folder now without a loss of what was committed."""

    def harm_store(self, kind: str, machine: str | None = None) -> Mend | None:
        """Let the metadata store be away, slow, forgetful, or compact its history: for one machine,
        or for all.
        """

    def copy_store(self) -> Mend | None:
        """Copy the metadata store; what is returned puts the copy back. None: not now."""

    def restart_store(self) -> Mend:
        """Restart the metadata store, or let it change its leader: all connections to it break."""

    def store_cut(self, machine: str) -> Mend:
        """Cut a machine off from the metadata store."""


class Stage(Protocol):
    """Everything that faults can harm."""

    world: World
    network: Network
    plan: Plan
    facts: Facts
    machines: list[Machine]
    clients: list[KvClient]
    consumers: list[SimConsumer]
    controls: Controls | None


Fault = Callable[["Faults"], Mend | None]


class Faults:
    """Lets the faults of a plan happen, and mends what is left at the end."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.world = stage.world
        self.counts: dict[str, int] = {}
        self.branches = 0
        self.strikes = 0
        """New masters that were struck, and one more if they are looked for."""
        self.steps_due = 0
        """Steps of acts that wait for something."""
        self._victim: Machine | None = None
        self._open: dict[int, Mend] = {}
        """What is to be mended, by number."""
        self._number = 0
        self.told: list[FaultTold] = []
        self._chosen: list[str] = []
        """Whom the fault that begins has chosen."""
        self._state_before: dict[str, tuple[object, ...]] = {}
        self._is_happening = False
        """Whether a fault of `happen` begins: then what it changes is known."""
        self.is_over = False

    def begin(self) -> None:
        """Let the first fault happen after a while."""
        if "left_behind" in self.stage.plan.faults:
            # It takes long, so it seldom comes to an end if it begins at a random time.
            self.world.after(LEFT_BEHIND_AFTER_NS, self.happen, "left_behind")
        if self.stage.plan.faults:
            self._pause()

    def end(self) -> None:
        """Mend everything, and let no more faults happen."""
        self.is_over = True
        for number in list(self._open):
            self._mend(number)
        self.stage.network.refused_share = 0.0
        for machine in self.stage.machines:
            machine.disk.syncs_to_fail = 0
            machine.end_inside(0, None)

    def _pause(self) -> None:
        pause_ns = int(self.stage.plan.fault_every_ns * self.world.draw.expovariate(1))
        self.world.after(pause_ns, self._next)

    def _next(self) -> None:
        if self.is_over:
            return
        name = self.stage.plan.faults[self.world.below(len(self.stage.plan.faults))]
        self.happen(name)
        self._pause()

    def happen(self, name: str, last_ns: int = 0) -> None:
        """Let one fault happen now, for a time (0: it is drawn)."""
        self.world.note(f"fault {name}")
        self._chosen, self._state_before, self._is_happening = [], self._state(), True
        mend = FAULTS[name](self)
        if mend is not None:
            between_ns = 1, HARM_MAX_NS
            if name in LONG_HARMS:
                between_ns = LONG_HARMS_NS[self.world.below(len(LONG_HARMS_NS))]
            self.began(name, mend, last_ns or self.world.between(*between_ns))
        self._is_happening = False

    def began(self, name: str, mend: Mend, last_ns: int) -> Mend:
        """Note a fault, which is mended after a while. Return what mends it earlier."""
        self.counts[name] = self.counts.get(name, 0) + 1
        self._number += 1
        self._open[self._number] = mend
        self.told.append(FaultTold(self._number, name, self._victims(), self.world.now_ns))
        self.world.after(last_ns, self._mend, self._number)
        return partial(self._mend, self._number)

    def happen_to(self, name: str, machine: Machine, last_ns: int = 0) -> None:
        """Let a fault happen to a machine whose process runs."""
        if self.is_over or machine.node is None:
            return
        self._victim = machine
        self.happen(name, last_ns)
        self._victim = None

    @property
    def has_open(self) -> bool:
        """Whether something is to be mended."""
        return bool(self._open)

    def _mend(self, number: int) -> None:
        mend = self._open.pop(number, None)
        if mend is not None:
            self.told[number - 1].ended_ns = self.world.now_ns
            mend()
            self._state_before = self._state()

    # -- what a story tells ------------------------------------------------------------------------

    def _state(self) -> dict[str, tuple[object, ...]]:
        """Return what faults change: of processes, and of the ways between them."""
        network = self.stage.network
        hosts = {name: (host.is_up, host.is_paused) for name, host in network.hosts.items()}
        return hosts | network.state()

    def _victims(self) -> str:
        """Return whom the fault has changed since it began, or has chosen."""
        after, before = self._state(), self._state_before
        network = self.stage.network
        changed = [
            name
            for name in after
            if after[name] != before.get(name, network.untouched)
            and (self._is_happening or name not in network.hosts)
        ]
        self._state_before = after
        return ", ".join(changed) or " and ".join(self._chosen if self._is_happening else ())

    # -- choosing ----------------------------------------------------------------------------------

    def running(self) -> Machine | None:
        """Return a machine whose process runs; None: there is none."""
        running = [machine for machine in self.stage.machines if machine.node is not None]
        found = self._victim
        if found is None and running:
            found = running[self.world.below(len(running))]
        self._chosen = [] if found is None else [found.name]
        return found

    def two_hosts(self) -> tuple[str, str]:
        """Return two hosts that talk to each other: a machine and somebody else."""
        names = list(self.stage.network.hosts)
        machine = self.stage.machines[self.world.below(len(self.stage.machines))].name
        names.remove(machine)
        self._chosen = [machine, names[self.world.below(len(names))]]
        return self._chosen[0], self._chosen[1]

    def starter(self, machines: list[Machine]) -> Mend:
        """Return what starts machines again."""

        def start_all() -> None:
            for machine in machines:
                if machine.node is None:
                    machine.start()

        return start_all


# -- machines --------------------------------------------------------------------------------------


def kill(faults: Faults) -> Mend | None:
    """A process is killed."""
    machine = faults.running()
    if machine is None:
        return None
    machine.kill()
    return faults.starter([machine])


def stop(faults: Faults) -> Mend | None:
    """A process is stopped in order."""
    machine = faults.running()
    if machine is None or machine.host.is_paused:
        return None
    assert machine.node is not None
    machine.node.stop()
    if machine.node is not None:
        machine.kill()
    return faults.starter([machine])


def power_cut(faults: Faults) -> Mend | None:
    """A machine loses power."""
    machine = faults.running()
    if machine is None:
        return None
    machine.cut_power(SHARES[faults.world.below(len(SHARES))])
    return faults.starter([machine])


def power_cut_all(faults: Faults) -> Mend | None:
    """All machines lose power at once."""
    for machine in faults.stage.machines:
        machine.cut_power(SHARES[faults.world.below(len(SHARES))])
    return faults.starter(faults.stage.machines)


def pause(faults: Faults) -> Mend | None:
    """A process is stopped for a while and knows nothing of it."""
    machine = faults.running()
    if machine is None:
        return None
    machine.pause()
    return machine.resume


def disk_full(faults: Faults) -> Mend | None:
    """A disk is full for a while."""
    machine = faults.running()
    if machine is None:
        return None
    machine.disk.is_full = True

    def free() -> None:
        machine.disk.is_full = False

    return free


def sync_fails(faults: Faults) -> Mend | None:
    """The next sync fails; the process ends by itself and is started again."""
    machine = faults.running()
    if machine is None:
        return None
    machine.disk.syncs_to_fail = 1
    return faults.starter([machine])


def lost_folder(faults: Faults) -> Mend | None:
    """A machine loses its folder."""
    machine, controls = faults.running(), faults.stage.controls
    if machine is None or controls is None or not controls.may_lose_folder(machine.name):
        return None
    machine.kill()
    machine.lose_folder()
    return faults.starter([machine])


def left_behind(faults: Faults) -> Mend | None:
    """A process is down until the masters on other machines have compacted what it lacks."""
    machine = faults.running()
    is_down = any(each.node is None for each in faults.stage.machines)
    if machine is None or is_down or faults.stage.controls is None:
        return None  # the others must go on
    assert machine.node is not None
    ends = {vb_id: machine.node.high_seqno(vb_id) for vb_id in range(faults.stage.plan.partitions)}
    machine.kill()
    start = faults.starter([machine])
    others = [each for each in faults.stage.machines if each is not machine]

    def look(left: int) -> None:
        running = [each.node for each in others if each.node is not None]
        if not left or any(
            0 < end < node.history_floor(vb_id) for node in running for vb_id, end in ends.items()
        ):
            start()
            return
        for node in running:
            node.compact()
        faults.world.after(LEFT_BEHIND_LOOK_NS, look, left - 1)

    look(LEFT_BEHIND_LOOKS)
    return _nothing


def clock_jump(faults: Faults) -> Mend | None:
    """A wall clock jumps, forward or back."""
    machine = faults.running()
    if machine is None:
        return None
    machine.clock.jump(faults.world.between(-3600 * SECOND, 3600 * SECOND))
    return _nothing


def branch(faults: Faults) -> Mend | None:
    """An operator branches a partition."""
    plan, machine = faults.stage.plan, faults.running()
    if machine is None or machine.host.is_paused or faults.branches >= plan.branches:
        return None
    assert machine.node is not None
    vb_id = faults.world.below(plan.partitions)
    share = faults.world.draw.random()
    if plan.branches > BRANCHES_MAX:
        share = 0 if share < EMPTIED_SHARE else 1 - (1 - share) ** 2
    if not machine.node.branch(vb_id, share):
        return None
    faults.branches += 1
    return _nothing


def collections(faults: Faults) -> Mend | None:
    """A collection is created, or dropped with its documents. Its name may come back."""
    controls = faults.stage.controls
    if controls is not None:
        controls.change_collections()
        return _nothing
    machine = faults.running()
    if machine is None or machine.host.is_paused:
        return None
    assert machine.node is not None
    machine.node.change_collections()
    return _nothing


def disk_stalls(faults: Faults) -> Mend | None:
    """A disk stands still: a sync takes as long as the fault lasts."""
    machine = faults.running()
    if machine is None:
        return None
    machine.slow_sync_ns = STALL_NS

    def mend() -> None:
        machine.slow_sync_ns = 0

    return mend


def bit_rot(faults: Faults) -> Mend | None:
    """A sector of a sealed segment of the log is not what was written. The process restarts: it
    names that, or does not need the sector. If it names it, the folder is given up, or the disk is
    mended.
    """
    machine, world = faults.running(), faults.world
    if machine is None or machine.host.is_paused:
        return None
    segments = _segments(machine)[:-1]
    if not segments:
        return None
    machine.kill()
    mend_disk = machine.disk.rot(segments[world.below(len(segments))], world.draw)
    if not _start_or_mend(faults, machine, mend_disk):
        mend_disk()
    return faults.starter([machine])


def newest_rot(faults: Faults) -> Mend | None:
    """A sector of the newest segment of the log is not what was written. The process restarts: it
    names that, or the sector is behind the end.
    """
    machine = faults.running()
    if machine is None or machine.host.is_paused or not (segments := _segments(machine)):
        return None
    machine.kill()
    end = written_bytes(machine.disk.read(segments[-1]))
    within = max(0, end - NEAR_THE_END_BYTES), max(1, end)
    mend_disk = machine.disk.rot(segments[-1], faults.world.draw, within=within)
    _start_or_mend(faults, machine, mend_disk)
    return faults.starter([machine])


def store_forgets_commits(faults: Faults) -> Mend | None:
    """A machine loses power, and its store lacks some commits that were on disk, as it was told.
    The log has the same changes still, or the process names what is missing.
    """
    machine, world = faults.running(), faults.world
    if machine is None:
        return None
    machine.cut_power(SHARES[world.below(len(SHARES))])
    _start_or_mend(faults, machine, machine.env.forget(1 + world.below(FORGOTTEN_MAX)))
    return faults.starter([machine])


def store_rot(faults: Faults) -> Mend | None:
    """A bit of a version or of a key's record in the store is wrong. The check names it, and it is
    mended before the process starts again.
    """
    machine, world = faults.running(), faults.world
    if machine is None or machine.host.is_paused:
        return None
    assert machine.node is not None
    machine.kill()
    table = (BY_SEQNO_TABLE, BY_KEY_TABLE)[world.below(2)]
    if (mend_store := machine.env.rot(table, world.draw)) is not None:
        if not findings(machine, faults.stage.plan.partitions):
            faults.stage.facts.problems.append(
                f"{machine.name}: a wrong bit in the table {table} of the store is not named"
            )
        mend_store()
    return faults.starter([machine])


def cold_damage(faults: Faults) -> Mend | None:
    """A page of the store of one node is not what was written, or cannot be read. Its process goes
    on: whoever reads it is refused, until it is mended, or named.
    """
    damaged = [each for each in faults.stage.machines if _damaged(each)]
    machine = damaged[0] if damaged else faults.running()
    world = faults.world
    if machine is None or not isinstance(machine.env, TwinEnv):
        return None
    if not faults.stage.plan.scrub_ns:
        return None  # nobody would find it
    if machine.node is None or len(_damaged(machine)) >= DAMAGED_MAX:
        return None
    table = PAGED[world.below(len(PAGED))]
    rows = machine.env.tables[table]
    if not rows:
        return None
    key = rows.peekitem(world.below(len(rows)))[0]
    page = Damaged(world.now_ns, machine.name, table, key, KINDS[world.below(len(KINDS))])
    if (table, key) in machine.env.pages.wrong or not machine.env.strike(
        world.draw, table, key, page
    ):
        return None
    faults.stage.facts.damaged.append(page)
    world.tell("page damaged", machine.name, str(page), page.vb_id)
    return _nothing


def _damaged(machine: Machine) -> list[Damaged]:
    return machine.env.current() if isinstance(machine.env, TwinEnv) else []


def findings(machine: Machine, partitions: int) -> list[str]:
    """Return what `verify` finds in a machine's folder, whose process is down."""
    device = machine.open_device()
    check = StoreCheck(machine.env.snapshot(), SegmentsOf(device), vb_ids=range(partitions))
    return [finding.line() for finding in check.findings() if not finding.is_harmless]


def _segments(machine: Machine) -> list[str]:
    return sorted(name for name in machine.disk.names() if name.endswith(".log"))


def _start_or_mend(faults: Faults, machine: Machine, mend_disk: Mend) -> bool:
    """Start a process on a disk with damage. If it names that, the folder is given up, or the disk
    is mended. Return whether it did.
    """
    machine.start()
    if machine.node is None and not machine.refusals:
        mend_disk()  # the start has met damage of the store, and comes again
        return True
    if not machine.refusals:
        return False
    machine.refusals.clear()
    controls = faults.stage.controls
    if controls is not None and controls.may_lose_folder(machine.name):
        machine.lose_folder()
    else:
        mend_disk()
    return True


def _inside(*, has_power: bool) -> Fault:
    def fault(faults: Faults) -> Mend | None:
        machine = faults.running()
        if machine is None:
            return None
        share = None if has_power else SHARES[faults.world.below(len(SHARES))]
        machine.end_inside(1 + faults.world.below(POINTS_MAX), share)
        return faults.starter([machine])

    return fault


def _nothing() -> None:
    """There is nothing to mend."""


# -- network ---------------------------------------------------------------------------------------


def break_connection(faults: Faults) -> Mend | None:
    """A connection breaks in the middle of what is under way."""
    network = faults.stage.network
    sides = network.open_sides()
    if not sides:
        return None
    side = sides[faults.world.below(len(sides))]
    network.break_connection(side, (0, 20 * MS, 500 * MS)[faults.world.below(3)])
    return _nothing


def cut_one_way(faults: Faults) -> Mend | None:
    """Bytes pass in one direction only."""
    network = faults.stage.network
    one, other = faults.two_hosts()
    if faults.world.chance(0.5):
        one, other = other, one
    network.cut(one, other)
    return lambda: network.mend(one, other)


def partition(faults: Faults) -> Mend | None:
    """Some hosts cannot reach the others."""
    network = faults.stage.network
    group = [name for name in network.hosts if faults.world.chance(0.5)]
    cut = network.partition(group)

    def mend() -> None:
        for one, other in cut:
            network.mend(one, other)

    return mend if cut else None


def slow_link(faults: Faults) -> Mend | None:
    """A direction has little bandwidth."""
    one, other = faults.two_hosts()
    if faults.world.chance(0.5):
        one, other = other, one
    bytes_per_s = (2_000, 20_000, 200_000)[faults.world.below(3)]
    return faults.stage.network.narrow(one, other, bytes_per_s)


def long_delays(faults: Faults) -> Mend | None:
    """A direction has long delays."""
    one, other = faults.two_hosts()
    link = faults.stage.network.link(one, other)
    link.delay_max_ns = (50 * MS, 300 * MS, 1000 * MS)[faults.world.below(3)]

    def mend() -> None:
        link.delay_max_ns = faults.stage.network.delay_max_ns

    return mend


def refuse_connects(faults: Faults) -> Mend | None:
    """Half of the requests to connect are refused."""
    network = faults.stage.network
    network.refused_share = 0.5

    def mend() -> None:
        network.refused_share = 0.0

    return mend


# -- consumers -------------------------------------------------------------------------------------


def consumer_crash(faults: Faults) -> Mend | None:
    """A consumer dies and begins again from its checkpoint."""
    up = [consumer for consumer in faults.stage.consumers if consumer.host.is_up]
    if not up:
        return None
    consumer = up[faults.world.below(len(up))]
    consumer.crash()

    def begin() -> None:
        consumer.host.rise()
        consumer.begin()

    return begin


def consumer_pause(faults: Faults) -> Mend | None:
    """A consumer is stopped for a while."""
    consumers = faults.stage.consumers
    consumer = consumers[faults.world.below(len(consumers))]
    consumer.host.pause()
    return consumer.host.resume


FAULTS: dict[str, Fault] = {
    "kill": kill, "stop": stop, "power_cut": power_cut, "power_cut_all": power_cut_all,
    "pause": pause, "disk_full": disk_full, "sync_fails": sync_fails, "lost_folder": lost_folder,
    "left_behind": left_behind, "clock_jump": clock_jump, "branch": branch,
    "break_connection": break_connection, "cut_one_way": cut_one_way, "partition": partition,
    "slow_link": slow_link, "long_delays": long_delays, "refuse_connects": refuse_connects,
    "collections": collections, "bit_rot": bit_rot, "disk_stalls": disk_stalls,
    "newest_rot": newest_rot, "store_forgets_commits": store_forgets_commits,
    "store_rot": store_rot, "cold_damage": cold_damage,
    "crash_inside": _inside(has_power=True), "power_cut_inside": _inside(has_power=False),
    "consumer_crash": consumer_crash, "consumer_pause": consumer_pause,
    **cluster_faults.FAULTS,
}  # fmt: skip
"""Name in the plan -> fault."""
