"""What copies cost: a node that catches up, a backup of three nodes, and what each node takes."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import time
from pathlib import Path
from typing import Final

from benchmarks.child_process import generate, say, tool
from benchmarks.cluster_nodes import CLUSTER, ONE_NODE, Nodes, loaded, processor_ns
from benchmarks.differences import load
from benchmarks.peers import memory_bytes
from benchmarks.report import Report
from benchmarks.workload import key_of
from clients import KvClient
from clients.testing import DcpCluster, DcpServer
from vbucket.model.ids import vbucket_of

MIB: Final = 1 << 20
AWAY: Final = "c"
"""The node that dies. The first one owns the metadata store, without which nobody is elected."""
BEFORE_SECONDS: Final = 2.0
"""How long a load runs before something happens."""
WRITTEN_POLL_SECONDS: Final = 0.5
KEYS_PER_PARTITION: Final = 128
"""Of the changes that a node misses."""
VALUE_BYTES: Final = 256
CHANGED_PART: Final = 0.001
"""Of the documents; as many are deleted."""
LEVEL_SECONDS: Final = 600.0
LEVEL_POLL_SECONDS: Final = 0.2


def measure_away(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """SIGKILL of a node, so it finds its place on its disk; it is started when so many changes were
    made, and is level when it is in sync with all partitions while writes go on.
    """
    rate = options.lag_rate
    with Nodes(folder / "away") as nodes:
        nodes.masters_return_soon()
        for _ in range(options.runs):
            nodes.settle(3)
            with loaded(nodes, rate) as load:
                time.sleep(BEFORE_SECONDS)
                load.split()
                nodes.nodes[AWAY].kill()
                nodes.until(lambda: nodes.are_in_sync(2))
                missed = load.split()["operations"]
                missed += write(nodes, options.rate, options.away)
                missed += load.split()["operations"]
                began_s = time.monotonic()
                nodes.nodes[AWAY].start()
                started_s = time.monotonic() - began_s
                nodes.until(lambda: nodes.are_in_sync(3), LEVEL_SECONDS, LEVEL_POLL_SECONDS)
                seconds = time.monotonic() - began_s
                during = load.split()
                load.stop()
            changes = missed + during["operations"]
            say(f"  away for {missed:,} changes: level after {seconds:.1f} s, of which its start "
                f"took {started_s:.1f} s; {changes / seconds:,.0f} changes/s; writes' p99 "
                f"{during['p99_us'] / 1000:.0f} ms")  # fmt: skip
            what = f"a replica was away for {options.away:,} changes, {rate:,.0f}/s go on"
            report.add(CLUSTER, f"{what}, catching up", changes / seconds, unit="changes/s",
                       more_is_better=True)  # fmt: skip
            for which, value, unit in (
                ("level after", seconds, "s"),
                ("of that its start", started_s, "s"),
                ("writes' p99 meanwhile", during["p99_us"] / 1000, "ms"),
            ):
                report.add(CLUSTER, f"{what}, {which}", value, unit=unit, more_is_better=False)


def measure_purged(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """SIGKILL of a node that starts again when deletions that it missed are purged."""
    documents: int = options.documents
    with DcpCluster(data=folder / "purged") as cluster:
        asyncio.run(load(cluster.address, documents, VALUE_BYTES))
        *others, away = cluster.nodes
        for run in range(options.runs):
            cluster.wait_until_in_sync()
            cluster.kill(away)
            asyncio.run(_change(cluster.address, documents, run))
            for vb in cluster.masters():
                cluster.purge(vb)
            before = _sent_bytes(cluster, others)
            began_s = time.monotonic()
            cluster.restart(away)
            seconds = time.monotonic() - began_s
            sent = _sent_bytes(cluster, others) - before
            say(f"  purged: level after {seconds:.1f} s, {sent:,} bytes from the others")
            what = f"a replica of {documents:,} documents whose deletions are purged"
            for which, value, unit in (("level after", seconds, "s"), ("sent", sent, "bytes")):
                report.add(CLUSTER, f"{what}, {which}", value, unit=unit, more_is_better=False)


async def _change(server: str, documents: int, run: int) -> None:
    """Change some documents, delete others, and have a change in every partition at the end."""
    step = round(1 / CHANGED_PART)
    async with KvClient.connect(server) as kv:
        for number in range(2 * run, documents, step):
            await kv.set(key_of(number), b"changed" * 20)
            await kv.delete(key_of(number + 1))
        last = {vbucket_of(key): key for key in map(b"last %d".__mod__, range(20_000))}
        await kv.set_many([(key, b"%d" % run) for key in last.values()])


def _sent_bytes(cluster: DcpCluster, names: list[str]) -> int:
    return sum(int(cluster.nodes[name].metrics()["dcpd_sent_bytes_total"]) for name in names)


def write(nodes: Nodes, rate: float, changes: int) -> int:
    """Write at a rate; return how many changes were answered."""
    written = 0
    with loaded(nodes, rate, keys_per_partition=KEYS_PER_PARTITION) as load:
        while written < changes:
            time.sleep(WRITTEN_POLL_SECONDS)
            written += load.split()["operations"]
        load.stop()
    return written


def measure_backup(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """The same documents on one node and on three, backed up in turn."""
    archive, keys = folder / "archive", options.documents
    with Nodes(folder / "backup") as nodes, DcpServer(folder / "one") as one:
        addresses = {ONE_NODE: one.address, CLUSTER: nodes.nodes["a"].address}
        for port, arguments in ((one.port, ()), (nodes.ports[0], ("--cluster",))):
            generate("binary", port, (3, 16), "--load", "--keys", keys, *arguments)
        for _ in range(options.runs):
            for name, address in addresses.items():
                found = tool("backup", "--step", "backup", "--history", "--server", address,
                             "--archive", archive)  # fmt: skip
                shutil.rmtree(archive)
                assert found["changes"] == keys, found
                rate = keys / found["seconds"]
                say(f"  backup, {name}: {rate:,.0f} changes/s, client "
                    f"{found['client_cpu'] / keys * 1e6:.2f} us a change")  # fmt: skip
                report.add(name, f"backup of {keys:,} documents", rate, unit="changes/s",
                           more_is_better=True)  # fmt: skip


def measure_memory(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """Each of three nodes, with documents and under load."""
    keys, rate = options.documents, options.lag_rate
    with Nodes(folder / "memory") as nodes:
        generate("binary", nodes.ports[0], (3, 16), "--load", "--keys", keys, "--cluster")
        for _ in range(options.runs):
            with loaded(nodes, rate) as load:
                time.sleep(BEFORE_SECONDS)
                before_ns = {name: processor_ns(node.pid) for name, node in nodes.nodes.items()}
                began_s = time.monotonic()
                time.sleep(options.lag_seconds)
                seconds = time.monotonic() - began_s
                for name, node in nodes.nodes.items():
                    memory = memory_bytes(node.pid)
                    share = (processor_ns(node.pid) - before_ns[name]) / 1e7 / seconds
                    say(f"  node {name}: {memory['Anonymous'] / MIB:.0f} MiB anonymous, "
                        f"{memory['Pss'] / MIB:.0f} MiB PSS, {share:.1f} % of a core")  # fmt: skip
                    what = f"node {name} with {keys:,} documents at {rate:,.0f} SETs/s"
                    for kind in ("Anonymous", "Pss"):
                        report.add(CLUSTER, f"{what}, {kind}", memory[kind] / MIB, unit="MiB",
                                   more_is_better=False)  # fmt: skip
                    report.add(CLUSTER, f"{what}, processor time", share, unit="% of a core",
                               more_is_better=False)  # fmt: skip
                load.stop()
