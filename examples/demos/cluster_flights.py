"""A year of flights, written to a cluster whose nodes die, while a consumer follows.

    scripts/cluster-demo                       # installs what it needs, then runs this
    scripts/cluster-demo --all                 # with all that can follow a cluster
    python examples/demos/cluster_flights.py --rows 20000 --deaths 3 --csv FILE.csv.zip --keep

What happens, with real processes only
1. three members of etcd and three nodes start on loopback; examples/demos/replica.py follows;
2. KvClient and the official SDK write 336,776 flights, one document each, until all are answered;
3. every few seconds the node that is master of most partitions is killed with SIGKILL, and started
   again when others have followed it;
4. a node is frozen with SIGSTOP, and goes on later;
5. the leader of etcd is killed;
6. a fourth node joins, copies and masters are spread over all four, and one node is drained;
7. what the writers were answered, what the masters hold, what each replica holds and what the
   consumer has are compared key by key.

With --all, a mirror that reads from copies, a group of consumers, a backup every ten seconds and a
Spark query follow as well (cluster_audience.py). Members of the group and the mirror are killed
while nodes die. A table at the end has a row for each, with the documents that differ.

The exit code is 0 only if nothing that was answered is lost and all are equal. Whatever happens,
all processes that it started have ended when it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cluster_audience import Audience, Follower, documents_of_users
from cluster_cast import PARTITIONS, Etcd, Nodes, say
from cluster_writers import (
    PROBE_PREFIX,
    Backlog,
    Document,
    KvWriters,
    Ledger,
    Probes,
    SdkWriters,
)
from flight_data import DataError, packaged_csv, read_flights
from processes import ProcessFailedError, ReplicaProcess

from dcpd import DcpdError, KvClient
from tests.soak.cluster.replicas import Compared, compare_replicas

DIFFERENCES_SHOWN = 20
DEATHS = 8
DEATHS_OF_ALL = 3
"""With an audience each takes longer, and all of it should take less than five minutes."""
FREEZE_S = 3.0
TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 0.5
"""A frozen node answers nothing: a probe gives it up and asks the next one."""
READ_AT_ONCE = 20_000
CHECK_S = 0.5
"""How often the processes are looked at while the last documents are written."""
NODES = ("n1", "n2", "n3")
FAILURES = (DataError, ProcessFailedError, DcpdError)


class Side(NamedTuple):
    """A row of the table at the end."""

    name: str
    documents: int
    differences: int
    story: str


class Summary(NamedTuple):
    """What is printed at the end."""

    documents: int
    """How many there are to write."""
    ledger: Ledger
    lost: list[str]
    replicated: int
    """Documents of replicas that were compared with the masters'."""
    differences: list[str]
    gaps_s: list[float]
    deaths: int
    versions: int
    rollbacks: int
    load_s: float
    sides: list[Side]
    """A row for each that has the documents, if there is more than the consumer to follow."""

    @property
    def written(self) -> int:
        """How many documents were answered; each counts once."""
        return sum(not key.startswith(PROBE_PREFIX) for key in self.ledger.answered)

    @property
    def wrong(self) -> list[str]:
        """Everything because of which the demo has failed."""
        unwritten = self.documents - self.written
        never = [f"{unwritten:,} of {self.documents:,} documents were never answered"]
        return [*(never if unwritten else []), *self.lost, *self.differences]


class Story:
    """The acts. Each waits until the cluster is whole again."""

    def __init__(self, nodes: Nodes, etcd: Etcd, probes: Probes, kv: KvClient) -> None:
        self.deaths = 0
        """Nodes that were killed or frozen while they were masters."""
        self._nodes, self._etcd, self._probes, self._kv = nodes, etcd, probes, kv

    async def kill(self) -> None:
        """Kill the node with most partitions."""
        name, followed = await self._lose(self._nodes.kill, "SIGKILL")
        await asyncio.to_thread(self._nodes.start, name)
        await asyncio.to_thread(self._nodes.until_in_sync)
        say(f"{name} is back; {followed}")

    async def freeze(self) -> None:
        """Freeze the node with most partitions."""
        name, followed = await self._lose(self._nodes.freeze, "SIGSTOP")
        await asyncio.sleep(FREEZE_S)
        self._nodes.thaw(name)
        await asyncio.to_thread(self._nodes.until_in_sync)
        say(f"{name} goes on; {followed}")

    async def _lose(self, act: Callable[[str], None], word: str) -> tuple[str, str]:
        masters = await asyncio.to_thread(self._nodes.masters)
        name = max(masters, key=lambda name: masters[name])
        port = self._nodes.servers[name].port
        topology = self._kv.topology
        assert topology is not None
        places = {vb_id: topology.place_of(vb_id) for vb_id in range(PARTITIONS)}
        mine = [vb_id for vb_id, place in places.items() if place and place[1] == port]
        since_s = time.monotonic()
        act(name)
        self.deaths += 1
        say(f"{name}: {word}; it was master of {len(mine)} partitions")
        first = len(self._probes.gaps_s)
        await self._probes.measure(mine, since_s)
        await asyncio.to_thread(self._nodes.until_followed, name)
        longest_s = max(self._probes.gaps_s[first:], default=0.0)
        return name, f"its partitions answered again after {longest_s:.1f} s at most"

    async def kill_leader(self) -> None:
        """Kill etcd's leader, and start it again."""
        number = await asyncio.to_thread(self._etcd.leader)
        assert number is not None
        self._etcd.kill(number)
        await asyncio.to_thread(self._until_other_leader)
        self._etcd.start(number)
        say(f"etcd's leader, member {number}: SIGKILL; another one leads, and it starts again")

    def _until_other_leader(self) -> None:
        give_up_s = time.monotonic() + TIMEOUT_S
        while self._etcd.leader() is None:
            if time.monotonic() > give_up_s:
                raise ProcessFailedError("etcd has no leader")
            time.sleep(0.1)

    async def join(self) -> None:
        """Add a fourth node."""
        await asyncio.to_thread(self._nodes.add, "n4")
        await asyncio.to_thread(self._nodes.until_known, "n4")
        say("n4 has joined")

    async def rebalance(self) -> None:
        """Spread copies and masters over all nodes."""
        await self._change("rebalance")

    async def drain(self) -> None:
        """Move everything away from a node."""
        await self._change("drain", node="n2")

    async def _change(self, name: str, **body: Any) -> None:
        begun_s = time.monotonic()
        done = await asyncio.to_thread(lambda: self._nodes.change(name, **body))
        masters = await asyncio.to_thread(self._nodes.masters)
        shares = ", ".join(f"{node} {count}" for node, count in sorted(masters.items()))
        took_s = time.monotonic() - begun_s
        words = " ".join((name, *body.values()))
        say(f"{words}: {len(done['moves'])} partitions in {took_s:.1f} s; masters: {shares}")


# -- the whole -------------------------------------------------------------------------------------


async def run_demo(
    documents: list[Document], deaths: int, folder: Path, *, has_audience: bool = False
) -> Summary:
    """Run the steps of the module's docstring. Return the summary."""
    etcd = Etcd(folder, 3)
    nodes = Nodes(folder, etcd.url)
    replica: ReplicaProcess | None = None
    audience: Audience | None = None
    try:
        await asyncio.to_thread(etcd.start_all)
        for name in NODES:
            await asyncio.to_thread(nodes.add, name)
        await asyncio.to_thread(nodes.until_in_sync)
        await asyncio.to_thread(nodes.until_shared)
        say(f"three nodes and three members of etcd run; clients begin at {nodes.address}")
        replica = ReplicaProcess(folder / "replica.sqlite")
        replica.start(nodes.address)
        if has_audience:
            audience = Audience(folder, nodes)
            audience.start()
        async with (
            KvClient.connect(nodes.address, timeout_s=TIMEOUT_S) as kv,
            KvClient.connect(nodes.address, timeout_s=PROBE_TIMEOUT_S) as probing,
        ):
            return await _loaded(
                documents, deaths, Cast(etcd, nodes, replica, audience, kv, probing)
            )
    finally:
        # Ctrl-C again does not keep processes alive.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if replica is not None:
            replica.close()
        if audience is not None:
            audience.close()
        nodes.close()
        etcd.close()


class Cast(NamedTuple):
    """What takes part."""

    etcd: Etcd
    nodes: Nodes
    replica: ReplicaProcess
    audience: Audience | None
    kv: KvClient
    probing: KvClient

    def check(self) -> None:
        """Raise ProcessFailedError if a process ended by itself."""
        self.nodes.check()
        self.replica.check()
        if self.audience is not None:
            self.audience.check()


async def _loaded(documents: list[Document], deaths: int, cast: Cast) -> Summary:
    kv, nodes = cast.kv, cast.nodes
    ledger, backlog = Ledger(), Backlog(documents)
    probes = Probes(cast.probing, ledger)
    story = Story(nodes, cast.etcd, probes, kv)
    before = await _versions(kv)
    begun_s = time.monotonic()
    sdk = await asyncio.to_thread(SdkWriters, nodes.address, backlog, ledger)
    writers = asyncio.create_task(KvWriters(kv, backlog, ledger).run())
    tasks = [writers]
    if cast.audience is not None:
        tasks.append(asyncio.create_task(cast.audience.play()))
    try:
        acts = acts_of(story, deaths)
        for number, act in enumerate(acts, 1):
            backlog.allow(number / len(acts))
            await _or_failure(act(), tasks)
            sdk.check()
            cast.check()
        while not writers.done():  # a thread of the SDK that has failed gives nothing back
            await _or_failure(asyncio.sleep(CHECK_S), tasks)
            sdk.check()
            cast.check()
        writers.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(sdk.close)
    sdk.check()
    load_s = time.monotonic() - begun_s
    say("comparing what was answered, masters, replicas and the consumer, key by key")
    await asyncio.to_thread(nodes.until_in_sync)
    followers = await cast.audience.followers(kv) if cast.audience is not None else []
    cast.replica.kill()
    await asyncio.to_thread(cast.replica.catch_up, nodes.address)
    stored = await _stored(kv, ledger.answered)
    replicas = await compare_replicas(nodes, stored, ledger.answered)
    held = consumer_documents(cast.replica)
    after = await _versions(kv)
    return judged(
        len(documents), ledger, stored, held, replicas, gaps_s=probes.gaps_s, deaths=story.deaths,
        versions=after - before, rollbacks=len(cast.replica.file.rollbacks()), load_s=load_s,
        followers=followers,
    )  # fmt: skip


def judged(
    documents: int,
    ledger: Ledger,
    stored: Mapping[bytes, bytes],
    held: Mapping[bytes, bytes],
    replicas: Compared,
    followers: Iterable[Follower] = (),
    **figures: Any,
) -> Summary:
    """Compare what was answered and what the consumer and the other followers have with what the
    masters have. Of `replicas` that is done.
    """
    differences = compare("the consumer", held, stored)
    sides = [Side("consumer", len(held), len(differences), "reads from masters")]
    for name, found in sorted(replicas.wrong.items()):
        those = {key: stored[key] for key in found if key in stored}
        there = {key: value for key, value in found.items() if value is not None}
        differences += compare(f"the replica on {name}", there, those)
    wrong_copies = len(differences) - sides[0].differences
    for follower in followers:
        theirs = documents_of_users(follower.documents)
        found = compare(f"the {follower.name}", theirs, stored)
        sides.append(Side(follower.name, len(theirs), len(found), follower.story))
        differences += found
    lost = compare("answered", ledger.answered, stored)
    summary = Summary(
        documents=documents,
        ledger=ledger,
        lost=lost,
        replicated=replicas.documents,
        differences=differences,
        sides=[],
        **figures,
    )
    if not followers:
        return summary
    unanswered = documents - summary.written
    first = [
        Side("writer", len(ledger.answered), unanswered, "what it was answered, with the probes"),
        Side("nodes", len(stored), len(lost), f"{summary.deaths} died or froze while masters"),
        Side("copies", replicas.documents, wrong_copies, "two beside each master"),
    ]
    return summary._replace(sides=first + sides)


def acts_of(story: Story, deaths: int) -> list[Callable[[], Any]]:
    """Return the acts in their order."""
    half = deaths // 2
    return [
        *[story.kill] * half, story.freeze, story.kill_leader, *[story.kill] * (deaths - half),
        story.join, story.rebalance, story.drain,
    ]  # fmt: skip


async def _or_failure(act: Any, tasks: Iterable[asyncio.Task[None]]) -> None:
    """Play an act; raise at once what ends one of the tasks."""
    playing = asyncio.ensure_future(act)
    await asyncio.wait({playing, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()
    await playing


async def _versions(kv: KvClient) -> int:
    """Return how many versions the partitions have had."""
    logs = [await kv.failover_log(vb_id) for vb_id in range(PARTITIONS)]
    return sum(len(log) for log in logs)


async def _stored(kv: KvClient, keys: Iterable[bytes]) -> dict[bytes, bytes]:
    """Return what the masters have."""
    wanted, stored = list(keys), {}
    for first in range(0, len(wanted), READ_AT_ONCE):
        found = await kv.get_many(wanted[first : first + READ_AT_ONCE])
        stored.update((key, document.value) for key, document in found.items())
    return stored


def consumer_documents(replica: ReplicaProcess) -> dict[bytes, bytes]:
    """Return what the consumer has, by key."""
    return documents_of_users(replica.file.documents())


def compare(name: str, ours: Mapping[bytes, bytes], nodes: Mapping[bytes, bytes]) -> list[str]:
    """Return in words how `ours` differs from the documents of the masters."""
    return [
        f"{key.decode()}: {name} is {show(ours.get(key))}, the nodes have {show(nodes.get(key))}"
        for key in sorted(ours.keys() | nodes.keys())
        if ours.get(key) != nodes.get(key)
    ]


def show(document: bytes | None) -> str:
    """Return a document as a difference names it."""
    return "nothing" if document is None else repr(document[:60])


# -- what one sees ---------------------------------------------------------------------------------


def summary_text(summary: Summary, time_s: float) -> str:
    """Return the summary as it is printed."""
    ledger, gaps_s = summary.ledger, sorted(summary.gaps_s)
    by = ", ".join(f"{count:,} by {client}" for client, count in sorted(ledger.by.items()))
    cuts = statistics.quantiles(gaps_s, n=100) if len(gaps_s) > 1 else [0.0] * 99
    gap = f"gap p50 {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s"
    total = sum(ledger.by.values())
    rows = (
        ("documents", f"{summary.written:,} of {summary.documents:,} were answered"),
        ("answered", f"{total:,}: {by}"),
        ("lost", f"{len(summary.lost):,}"),
        (
            "failovers",
            f"{summary.deaths} of nodes, {len(gaps_s):,} of partitions; {gap}",
        ),
        (
            "versions",
            f"{summary.versions:,} new ones; {summary.rollbacks:,} rollbacks of the consumer",
        ),
        (
            "ambiguous",
            f"{ledger.ambiguous:,} of writers, {ledger.unsure:,} of probes; all written again",
        ),
        ("replicas", f"{summary.replicated:,} documents compared with the masters'"),
        ("differences", f"{len(summary.differences):,}"),
        ("rate", f"{total / summary.load_s:,.0f} writes/s, all deaths included"),
        ("time", f"{time_s:.1f} s"),
    )
    wrong = summary.wrong
    title = "cluster-demo: NOT equal" if wrong else "cluster-demo: all equal, nothing lost"
    problems = [f"  {problem}" for problem in wrong[:DIFFERENCES_SHOWN]]
    if len(wrong) > DIFFERENCES_SHOWN:
        problems.append(f"  and {len(wrong) - DIFFERENCES_SHOWN:,} more")
    told = [f"  {name:<14}{text}" for name, text in rows]
    return "\n".join((title, *told, *table_text(summary.sides), *problems))


def table_text(sides: Sequence[Side]) -> list[str]:
    """Return the lines of the table at the end; none without an audience."""
    if not sides:
        return []
    rows = [
        f"  {side.name:<14}{side.documents:>10,}{side.differences:>13,}  {side.story}"
        for side in sides
    ]
    return ["", f"  {'':<14}{'documents':>10}{'differences':>13}", *rows]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/cluster-demo", description="Flights, and a cluster whose nodes die."
    )
    parser.add_argument("--rows", type=int, help="only the first flights", metavar="N")
    parser.add_argument(
        "--deaths", type=int, metavar="N",
        help=f"nodes to kill (default: {DEATHS}; {DEATHS_OF_ALL} with --all)",
    )  # fmt: skip
    parser.add_argument("--csv", type=Path, help="another file of the same columns, also zipped")
    parser.add_argument(
        "--all", action="store_true", dest="has_audience",
        help="a mirror, a group, backups and a Spark query follow as well",
    )  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="keep folders and logs afterwards")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    options = _parser().parse_args(words)
    deaths = options.deaths
    if deaths is None:
        deaths = DEATHS_OF_ALL if options.has_audience else DEATHS
    begun_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="dcpd-cluster-demo-"))
    try:
        say("reading the flights")
        flights = read_flights(options.csv or packaged_csv())[: options.rows]
        documents = [
            (b"%06d:%s" % (number, flight.key[:40]), flight.document)
            for number, flight in enumerate(flights, 1)
        ]
        summary = asyncio.run(
            run_demo(documents, deaths, folder, has_audience=options.has_audience)
        )
    except FAILURES as error:
        print(f"cluster-demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        if options.keep:
            print(f"cluster-demo: folders and logs are in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder)
    print(summary_text(summary, time.monotonic() - begun_s))
    return int(bool(summary.wrong))


if __name__ == "__main__":
    # SIGTERM ends it like Ctrl-C, so that what it started is ended too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
