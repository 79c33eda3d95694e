"""One seed of `scripts/soak cluster`: a cluster, its load, and faults in the order of the seed.

Most faults come alone; some come while another one lasts, or before all copies are in sync again.
At the end everything is healed, and checked:

- every key's history is linearizable, and a value has one CAS;
- nothing that was answered is lost, and nothing is there that was refused;
- the copies of a document are equal, on all nodes;
- consumers that have followed all the time, of masters and of copies, have what the nodes have, as
  has one that begins now;
- each change had its effect once in the sink of a group of consumers whose members die;
- each backup, restored into an empty node, is a state that the histories allow.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from clients.kv.client import KvClient
from clients.mirror.mirror import Mirror
from support.forgetful_disk import small_disk
from tests.soak.cluster.backups import Backups
from tests.soak.cluster.beside import Beside
from tests.soak.cluster.contents import check_contents
from tests.soak.cluster.faults import ALONE, FAULTS, Begun, Scene
from tests.soak.cluster.group import LivingGroup
from tests.soak.cluster.history import Operation
from tests.soak.cluster.linearizable import mixed_tokens, violation_of
from tests.soak.cluster.load import TIMEOUT_S, Load
from tests.soak.cluster.nodes import NAMES, FaultyCluster, NodeError
from tests.soak.porcupine import counts_words
from vbucket.model.ids import NUM_VBUCKETS

PROGRESS_S: Final = 300.0
DISK_MEBIBYTES: Final = 96
COUNTED: Final = ("answered", "ambiguous", "sigkills", "events", "deaths", "effects", "backups",
                  "cuts")  # fmt: skip
"""What is added up over all runs with one state file."""
SETTLE_S: Final = 1.0
"""Load before the first fault."""


class Pace(NamedTuple):
    """How fast faults follow each other."""

    faults: int = 12
    """In a round, without those that come while another one lasts."""
    together: float = 0.25
    """How often another one begins while one lasts."""
    at_once: int = 2
    """Faults that last at one time, at most."""
    dead: int = 0
    """Nodes that may be dead when another fault begins."""
    haste: float = 0.25
    """How often the next one does not wait until all copies are in sync."""
    share: float = 1.0
    """Of the time that a fault lasts."""
    progress: int = 60
    """Operations that are answered before the next fault."""
    progress_in_haste: int = 0
    """The same, if it does not wait for copies."""
    deaths_s: tuple[float, float] = (1.0, 6.0)
    """Time between two deaths of members of the group."""
    partitions: int = NUM_VBUCKETS
    is_forked: bool = False
    """Whether most nodes are forked from a process that has their imports."""


USUAL: Final = Pace()
OF_FEW: Final = Pace(faults=24)
"""Of few kinds of faults: most of a round's time is theirs, not the cluster's start."""
KILLING: Final = Pace(
    faults=60, together=0.6, at_once=4, dead=2, haste=0.8, share=0.3, progress=20,
    progress_in_haste=20, deaths_s=(5.0, 20.0), partitions=64, is_forked=True,
)  # fmt: skip
"""Of SIGKILLs only. No disk is lost, so all nodes may be dead at once. Before the next ones only
answers are waited for, and in a few cases until the copies are in sync.
"""
KILLS: Final = frozenset({"kill node", "kill store", "kill etcd"})

Judge = Callable[[Mapping[bytes, Sequence[Operation]]], Counter[str]]


class WrongError(Exception):
    """What was answered, or what is stored, cannot be right."""


class RoundReport(NamedTuple):
    """The result of a round without a finding."""

    answered: int
    ambiguous: int
    faults: Counter[str]
    seconds: float
    sigkills: int = 0
    """Processes that were killed: nodes, store processes, members of etcd."""
    events: int = 0
    """Changes that consumers took, each through the validator."""
    deaths: int = 0
    """How often members of the group were killed, were frozen, or left."""
    effects: int = 0
    """Changes that had their effect in the group's sink, each once."""
    backups: int = 0
    """Runs that were restored and compared."""
    cuts: int = 0
    """Of these, the runs that end at a cut."""
    histories: Mapping[bytes, Sequence[Operation]] = MappingProxyType({})
    """What happened to each key that is written again and again."""

    def words(self) -> str:
        """Return it in one line."""
        return (
            f"{self.answered:,} answered, {self.ambiguous:,} ambiguous, "
            f"{self.faults.total()} faults, {self.sigkills} SIGKILLs, {self.events:,} events, "
            f"{self.effects:,} effects through {self.deaths} deaths in the group, {self.backups} "
            f"backups ({self.cuts} cuts) in {self.seconds:.0f} s"
        )


class Round:
    """One seed on a running cluster."""

    def __init__(
        self,
        cluster: FaultyCluster,
        kv: KvClient,
        views: Mapping[str, Mirror],
        seed: int,
        second: Sequence[str] = (),
        beside: Sequence[Beside] = (),
        pace: Pace = USUAL,
    ) -> None:
        self.cluster = cluster
        self.load = Load(kv, self._addresses, seed)
        self.faults: Counter[str] = Counter()
        self.sigkills = 0
        self._kv, self._views = kv, views
        self._scene = Scene(cluster, random.Random(seed))
        self._second = second
        """What may begin while another fault lasts; (): all."""
        self._beside = beside
        self._pace = pace
        self._healing: list[Begun] = []

    def _addresses(self) -> dict[str, str]:
        return {name: self.cluster.address(name) for name in self.cluster.nodes}

    async def run(self, names: Sequence[str]) -> None:
        """Let faults happen under load, then check everything."""
        self.load.begin()
        try:
            for each in self._beside:
                each.begin()
            await self._rest(SETTLE_S)
            for name in names:
                await self._one(name)
            await self._heal()
            await asyncio.to_thread(self.cluster.until_in_sync)
            for each in self._beside:
                await each.stop()
            await self.load.stop()
            await self.check()
        except BaseException:
            await self.load.abandon()
            raise
        finally:
            for each in self._beside:
                await each.abandon()

    async def _one(self, name: str) -> None:
        draw, cluster, pace = self._scene.draw, self.cluster, self._pace
        if name in ALONE:
            await asyncio.to_thread(cluster.until_in_sync)
        await self._begin(name)
        while len(self._healing) < pace.at_once:
            other = draw.choice(self._second) if self._second else choose(draw, cluster)
            dead = len(cluster.nodes) - len(cluster.running())
            is_more = draw.random() < pace.together and not ALONE & {name, other}
            if not is_more or dead > pace.dead:
                break
            await self._begin(other)
        await self._heal()
        if draw.random() >= pace.haste or name in ALONE:
            await asyncio.to_thread(self.cluster.until_in_sync)
            await self._progress(pace.progress)
        else:
            await self._progress(pace.progress_in_haste)

    async def _begin(self, name: str) -> None:
        self.faults[name] += 1
        begun = await asyncio.to_thread(FAULTS[name].fault, self._scene)
        self.sigkills += begun.sigkills
        say(begun.words)
        self._healing.append(begun)
        await self._rest(self._scene.draw.uniform(*FAULTS[name].seconds) * self._pace.share)

    async def _heal(self) -> None:
        """End all faults that last, in the order in which they began."""
        healing, self._healing = self._healing, []
        await asyncio.to_thread(self.cluster.network.heal)
        for begun in healing:
            await asyncio.to_thread(begun.heal)
        for name in self.cluster.nodes.keys() - self.load.read_from:
            self.load.add_reader(name)
        if healing:
            say("healed")

    async def _rest(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            self._check_alive()
            await asyncio.sleep(min(left_s, 0.2))

    def _check_alive(self) -> None:
        self.load.check_alive()
        for each in self._beside:
            each.check()
        for name, node in self.cluster.nodes.items():
            process = node._process
            if process is not None and process.poll() is not None:
                raise NodeError(f"node {name} has ended: {node.log_path.read_text()[-3000:]}")

    async def _progress(self, count: int) -> None:
        """Wait until this many more operations are answered."""
        wanted, give_up_s = self.load.answers + count, time.monotonic() + PROGRESS_S
        while self.load.answers < wanted:
            self._check_alive()
            if time.monotonic() > give_up_s:
                raise WrongError(f"nothing is answered any more: {self.load.refusals}")
            await asyncio.sleep(0.05)

    async def check(self) -> None:
        """Check everything. Raises WrongError."""
        await self.load.read_all()
        wrong: list[str] = []
        for each in self._beside:
            wrong += await each.wrong(self.load, self._kv)
        for key, history in self.load.histories.items():
            found = violation_of(history)
            wrong += [f"{key!r}: {found.words()}"] if found is not None else []
            wrong += [f"{key!r}: {text}" for text in mixed_tokens(history)]
        wrong += await check_contents(self.cluster, self._kv, self._views, self.load)
        if wrong:
            raise WrongError("\n".join(wrong))


def say(text: str) -> None:
    """Print a step with its time of day."""
    print(f"  {time.strftime('%H:%M:%S')}  {text}", flush=True)


def choose(draw: random.Random, cluster: FaultyCluster) -> str:
    """Choose a fault by its weight."""
    names = [name for name in FAULTS if name != "full disk" or cluster.with_disks()]
    return draw.choices(names, [FAULTS[name].weight for name in names])[0]


async def run_round(
    folder: Path,
    seed: int,
    names: Sequence[str] = (),
    *,
    disks: dict[str, Path] | None = None,
    pace: Pace = USUAL,
) -> RoundReport:
    """Run one seed, with these faults, or with those that it draws. Raises as `run_on`."""
    cluster = FaultyCluster(
        folder, disks or {}, partitions=pace.partitions, is_forked=pace.is_forked
    )
    return await run_on(cluster, seed, names, pace)


async def run_on(
    cluster: FaultyCluster, seed: int, names: Sequence[str] = (), pace: Pace = USUAL
) -> RoundReport:
    """Start a cluster and run one seed on it. Raises WrongError, NodeError, LoadError,
    TooHardError.
    """
    try:
        await asyncio.to_thread(cluster.__enter__)
        return await run_faults(cluster, seed, names, pace)
    finally:
        await asyncio.to_thread(cluster.__exit__, None, None, None)


async def run_faults(
    cluster: FaultyCluster, seed: int, names: Sequence[str] = (), pace: Pace = USUAL
) -> RoundReport:
    """Run one seed on a cluster that runs and holds nothing. Raises as `run_on`."""
    begun_s = time.monotonic()
    draw = random.Random(f"{seed} faults")
    drawn = names or [choose(draw, cluster) for _ in range(pace.faults)]
    address = cluster.address(draw.choice(NAMES))
    async with (
        KvClient.connect(address, timeout_s=TIMEOUT_S) as kv,
        Mirror(address, validate=True) as of_masters,
        Mirror(address, validate=True, from_replicas=True) as of_copies,
    ):
        views = {"a consumer": of_masters, "a consumer of the copies": of_copies}
        group = LivingGroup(
            cluster.folder, cluster.everywhere, random.Random(f"{seed} group"), pace.deaths_s
        )
        backups = Backups(cluster, random.Random(f"{seed} backups"))
        one = Round(cluster, kv, views, seed, second=names, beside=(backups, group), pace=pace)
        await one.run(drawn)
    await asyncio.sleep(0)  # connections that were closed end in the loop's next turn
    counts = one.load.counts
    return RoundReport(
        counts["answered"], counts["ambiguous"], one.faults, time.monotonic() - begun_s,
        one.sigkills, sum(view.consumer.metrics.changes for view in views.values()),
        group.deaths.total(), group.effects, len(backups.runs),
        sum(run.is_cut for run in backups.runs), one.load.histories,
    )  # fmt: skip


def soak(
    state_path: Path,
    *,
    minutes: float | None = None,
    rounds: int | None = None,
    keep: Path | None = None,
    only: Sequence[str] = (),
    judge: Judge | None = None,
) -> int:
    """Run seeds from where the last run was; return the exit code. `only`: these faults. `judge`:
    a second one of the histories.
    """
    state: dict[str, Any] = dict.fromkeys(("seed", *COUNTED), 0)
    if state_path.exists():
        state |= json.loads(state_path.read_text())
    until_s = None if minutes is None else time.monotonic() + minutes * 60
    while (rounds is None or state["seed"] < rounds) and (
        until_s is None or time.monotonic() < until_s
    ):
        try:
            report = run_seed(state["seed"], keep, only)
        except KeyboardInterrupt:
            print(f"\nstopped in seed {state['seed']}; the same command begins it again")
            return 130
        state["seed"] += 1
        for name in COUNTED:
            state[name] += getattr(report, name)
        faults = Counter(state.get("faults", {})) + report.faults
        state["faults"] = dict(faults)
        if judge is not None:
            state["judged"] = Counter(state.get("judged", {})) + judge(report.histories)
        state_path.write_text(json.dumps(state))
        print(
            f"seed {state['seed'] - 1}: {report.words()}; {state['sigkills']:,} SIGKILLs and "
            f"{state['events']:,} events so far",
            flush=True,
        )
    counted = ", ".join(f"{count} {name}" for name, count in sorted(state["faults"].items()))
    print(
        f"{state['seed']:,} seeds, {state['answered']:,} answered, {state['ambiguous']:,} "
        f"ambiguous, {state['sigkills']:,} SIGKILLs, {state['events']:,} events, "
        f"{state['deaths']:,} deaths in the group, {state['effects']:,} effects, "
        f"{state['backups']:,} backups: 0 lost, 0 stale, 0 different, 0 twice\n{counted}"
    )
    if judged := state.get("judged"):
        print(f"Porcupine: {counts_words(judged)}")
    return 0


def run_seed(seed: int, keep: Path | None = None, only: Sequence[str] = ()) -> RoundReport:
    """Run one seed with folders of its own; what fails is kept if `keep` says where. `only`: the
    faults to choose from.
    """
    pace = (KILLING if KILLS.issuperset(only) else OF_FEW) if only else USUAL
    weights = [FAULTS[name].weight for name in only]
    names = random.Random(seed).choices(only, weights, k=pace.faults) if only else []
    print(f"seed {seed}", flush=True)
    with contextlib.ExitStack() as stack:
        if keep is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="dcpd-soak-")))
        else:
            folder = keep / f"seed-{seed}"
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier run of this seed
            folder.mkdir(parents=True)
        disks = {} if KILLS.issuperset(only) and only else own_disks(stack)
        try:
            return asyncio.run(run_round(folder, seed, names, disks=disks, pace=pace))
        except KeyboardInterrupt:
            raise
        except BaseException:
            print(f"seed {seed} failed; repeat it with: scripts/soak cluster --round {seed}")
            raise


def own_disks(stack: contextlib.ExitStack) -> dict[str, Path]:
    """Mount a small disk for one node, if this user may."""
    import pytest

    try:
        return {"c": stack.enter_context(small_disk(f"{DISK_MEBIBYTES}m"))}
    except pytest.skip.Exception as error:
        print(f"did not run: a full disk: {error}")
        return {}
