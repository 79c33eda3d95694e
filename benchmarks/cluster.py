"""The figures of a cluster in docs/performance.md: three nodes as processes of this machine.

    python -m benchmarks.cluster                              everything but `busy`, some minutes
    python -m benchmarks.cluster --quick                      everything, as short as it can be
    python -m benchmarks.cluster --only handover --runs 5
    python -m benchmarks.cluster --only kill,freeze,cut --rounds 100
    python -m benchmarks.cluster --only kill,freeze,cut --rounds 100 --isr 2
    python -m benchmarks.cluster --only busy --seconds 600

The nodes and the load share the machine's cores, so its other work is in every figure: the table
has the machine's load. The cluster has 3 copies and the embedded metadata store, which the first
node owns, or one member of etcd where any node may be away (`restart`, `kill-coordinator`). `dcpd`
in the table is the cluster.

Parts
- set       durable SETs at 1 x 1 and 8 x 64, and the same on one node, in turn
- peers     the same at 1 x 1, 1 x 128 and 8 x 64 beside clusters of NATS, etcd and Redis, in turn
            (`benchmarks.cluster_peers`)
- idle      processor time and written bytes of three nodes that nobody uses
- handover  a node stops (SIGTERM) under `--rate` writes a second: what writes wait
- restart   all nodes in turn stop (SIGTERM), start, and are in sync again, under `--restart-rate`
            writes a second: what writes wait, and new versions, of which there must be none
- kill      SIGKILL of a master's node under `--gap-rate` writes a second: the time to the first
            answered write of each of its partitions. With `--isr 2` there are two nodes and copies
- kill-coordinator   the same with etcd, of the node that is the coordinator each time
- freeze    the same by SIGSTOP
- cut       the same by cutting its cables to nodes, clients and the metadata store (by a proxy)
- sdk       the longest upsert of the official Couchbase SDK around a SIGKILL
- slow      each sync of one node takes 50 ms, then 500 ms (by `strace`, which needs ptrace): the
            latencies of all writes, and of those to partitions of other masters
- join      a fourth node joins under load and gets its share of `--join-mib` of documents by a
            rebalance: MB a second, and the writes' p99 before and meanwhile
- lag       at `--lag-rate` writes a second for `--lag-seconds`: from when a write is due to its
            answer, to its event at a consumer of masters, and at a consumer of copies
- away      SIGKILL of a node, which starts again after `--away` changes at `--rate` a second more:
            how fast it is level again while `--lag-rate` writes a second go on
- purged    a node of three with `--documents` is away until deletions that it missed are purged on
            all partitions: how fast it is level again, and what the others send it meanwhile
- backup    a backup of `--documents` from three nodes and from one, in turn
- memory    of each node, with its processor time, at that rate and with so many documents
- busy      full load for `--seconds`: elections and new versions, of which there must be none
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.child_process import generate, say
from benchmarks.cluster_costs import (
    measure_away,
    measure_backup,
    measure_memory,
    measure_purged,
)
from benchmarks.cluster_gaps import (
    ISRS,
    in_sync,
    measure_cut,
    measure_freeze,
    measure_kill,
    measure_kill_coordinator,
)
from benchmarks.cluster_lag import measure_lag
from benchmarks.cluster_nodes import (
    CLUSTER,
    ONE_NODE,
    POLL_SECONDS,
    Nodes,
    NodesOnEtcd,
    loaded,
    processor_ns,
)
from benchmarks.cluster_peers import PEER_CLUSTERS
from benchmarks.cluster_sdk import longest_upsert_ms
from benchmarks.generator import Load as GeneratorLoad
from benchmarks.peers import Dcpd, descendants
from benchmarks.report import Report
from benchmarks.run import MIB, add_output_options, check_names, names_of, reported

SHAPES: Final = ((1, 1), (8, 64))
PEER_SHAPES: Final = ((1, 1), (1, 128), (8, 64))
BEFORE_SECONDS: Final = 3.0
"""How long a load runs before something happens to it."""
AFTER_SECONDS: Final = 3.0
DOCUMENT_BYTES: Final = 1024
SLOW_SYNCS_MS: Final = (50, 500)
SLOW: Final = "c"
"""The node whose syncs are slow, until the end of its load."""
OTHERS: Final = "each_second_of_others"
VICTIMS: Final = "bc"
"""Nodes that die. The first one owns the metadata store, without which nobody is elected."""
WARM_UP_SECONDS: Final = GeneratorLoad.warmup_seconds
SETTLED_SECONDS: Final = 2.0
"""How long a load runs before its latencies count."""


def seconds_of(
    result: dict[str, Any], first: int, last: int, key: str = "each_second"
) -> tuple[float, float]:
    """Return the worst p99 and the longest latency of some seconds of a load, in milliseconds."""
    rows = [row for second, row in result[key].items() if first <= int(second) < last]
    p99_us = max((row[2] for row in rows), default=0)
    return p99_us / 1000, max((row[3] for row in rows), default=0) / 1000


def measure_set(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """Durable SETs on one node and on three, each run on empty folders."""
    for run in range(options.runs):
        for name in (ONE_NODE, CLUSTER):
            if name == ONE_NODE:
                peer = Dcpd(folder / f"one-{run}")
                try:
                    peer.start()
                    record_sets(report, name, peer.port, options)
                finally:
                    peer.discard()
            else:
                with Nodes(folder / f"set-{run}") as nodes:
                    record_sets(report, name, nodes.ports[0], options, "--cluster")


def measure_peers(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """SETs on three of ours and on three of each peer, each run on empty folders."""
    for run in range(options.runs):
        with Nodes(folder / f"peers-{run}") as nodes:
            spent = nodes.processor_ns
            record_sets(
                report, CLUSTER, nodes.ports[0], options, "--cluster", shapes=PEER_SHAPES,
                spent_ns=spent,
            )  # fmt: skip
        for name, made in PEER_CLUSTERS.items():
            with made(folder / f"{name}-{run}") as peer:

                def spent(pids: list[int] = peer.pids) -> int:
                    return sum(processor_ns(pid) for pid in pids)

                record_sets(
                    report, name, peer.port, options, protocol=peer.protocol, shapes=PEER_SHAPES,
                    spent_ns=spent,
                )  # fmt: skip


def record_sets(
    report: Report,
    name: str,
    port: int,
    options: argparse.Namespace,
    *arguments: str,
    protocol: str = "binary",
    shapes: Sequence[tuple[int, int]] = SHAPES,
    spent_ns: Callable[[], int] = lambda: 0,
) -> None:
    """Measure SETs. `spent_ns`: the servers' processor time."""
    for shape in shapes:
        before_ns = spent_ns()
        result = generate(
            protocol, port, shape, "--seconds", options.seconds_of_set, "--keys", options.keys,
            *arguments,
        )  # fmt: skip
        operations = result["operations_per_second"] * (options.seconds_of_set + WARM_UP_SECONDS)
        if each_us := (spent_ns() - before_ns) / 1000 / operations:
            report.add(name, f"SET {shape[0]} x {shape[1]}, servers' processor time", each_us,
                       unit="us", more_is_better=False)  # fmt: skip
        what, rate = f"SET {shape[0]} x {shape[1]}", result["operations_per_second"]
        say(f"  {name:9} {what}: {rate:,.0f} op/s, p50 {result['p50_us'] / 1000:.2f} ms")
        report.add(name, what, rate, unit="op/s", more_is_better=True)
        for percentile in ("p50", "p99"):
            report.add(name, f"{what}, {percentile}", result[f"{percentile}_us"] / 1000, unit="ms",
                       more_is_better=False)  # fmt: skip


def written_bytes(nodes: Nodes) -> int:
    """Return how many bytes the nodes' processes have written, most of them to each other."""
    total = 0
    for node in nodes.nodes.values():
        for pid in descendants(node.pid):
            fields = dict(line.split(": ") for line in _lines(f"/proc/{pid}/io"))
            total += int(fields["wchar"])
    return total


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def measure_idle(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """Three nodes at rest."""
    with Nodes(folder / "idle") as nodes:
        time.sleep(options.rest_seconds)
        for _ in range(options.runs):
            began, cpu, written = time.monotonic(), nodes.processor_ns(), written_bytes(nodes)
            parts = {name: processor_ns(node.pid) for name, node in nodes.nodes.items()}
            time.sleep(options.rest_seconds)
            seconds = time.monotonic() - began
            share = (nodes.processor_ns() - cpu) / 1e9 / seconds
            rate = (written_bytes(nodes) - written) / seconds
            each = {
                name: f"{(processor_ns(node.pid) - parts[name]) / 1e7 / seconds:.2f} %"
                for name, node in nodes.nodes.items()
            }
            say(f"  idle: {100 * share:.2f} % of a core ({each}), {rate / 1000:.1f} KB/s")
            report.add(CLUSTER, "three idle nodes", 100 * share, unit="% of a core",
                       more_is_better=False)  # fmt: skip
            report.add(CLUSTER, "three idle nodes, written", rate / 1000, unit="KB/s",
                       more_is_better=False)  # fmt: skip


def measure_handover(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """Nodes stop under load, one after the other, and come back."""
    with Nodes(folder / "handover") as nodes:
        for run in range(options.runs):
            name = VICTIMS[run % len(VICTIMS)]
            count, epochs = nodes.masters()[name], nodes.epochs()
            with loaded(nodes, options.rate) as load:
                time.sleep(BEFORE_SECONDS)
                began = time.monotonic()
                nodes.nodes[name].stop()
                seconds = time.monotonic() - began
                time.sleep(1)
                result = load.stop()
            before_ms, _ = seconds_of(result, 1, int(BEFORE_SECONDS))
            risen = sum(epoch - epochs[vb_id] for vb_id, epoch in nodes.epochs().items())
            say(f"  handover of {count} in {seconds:.2f} s: longest wait of a refused write "
                f"{result['longest_refused_ms']} ms, of any {result['max_us'] / 1000:.0f} ms; "
                f"{risen} epochs; refusals {result['refusals']}")  # fmt: skip
            for what, value in (
                ("before, p99", before_ms),
                ("longest wait of a refused write", result["longest_refused_ms"]),
                ("longest wait of any write", result["max_us"] / 1000),
            ):
                report.add(CLUSTER, f"handover at {options.rate:,.0f}/s, {what}", value,
                           unit="ms", more_is_better=False)  # fmt: skip
            nodes.nodes[name].start()
            nodes.settle(3, is_even=False)


def measure_restart(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """A rolling restart of all nodes, `--runs` times."""
    nodes = NodesOnEtcd(folder / "restart", ISRS[options.isr])
    with in_sync(nodes, options.isr):
        for _ in range(options.runs):
            nodes.settle(options.isr)  # masters return a minute after the run before
            versions, began = nodes.versions(), time.monotonic()
            stops_s: dict[str, float] = {}
            waits_ms: dict[str, float] = {}
            with loaded(nodes, options.restart_rate) as load:
                time.sleep(SETTLED_SECONDS)
                before = load.split()
                for name in nodes.nodes:
                    stopped = time.monotonic()
                    nodes.nodes[name].stop()
                    stops_s[name] = time.monotonic() - stopped
                    waits_ms[f"{name} stops"] = load.split()["max_us"] / 1000
                    nodes.nodes[name].start()
                    for each in nodes.nodes:
                        nodes.settle(options.isr, each, is_even=False)
                    waits_ms[f"{name} starts"] = load.split()["max_us"] / 1000
                result = load.stop()
            new = sum(version != versions[vb_id] for vb_id, version in nodes.versions().items())
            longest_ms = max(waits_ms.values())
            say(f"  restart of all in {time.monotonic() - began:.0f} s, stops in "
                + ", ".join(f"{seconds:.1f}" for seconds in stops_s.values())
                + f" s; longest waits {waits_ms}; p99 before {before['p99_us'] / 1000:.0f} ms; "
                f"{new} new versions; refusals {result['refusals']}")  # fmt: skip
            what = f"rolling restart of all nodes at {options.restart_rate:,.0f}/s"
            for which, value in (
                ("longest wait of any write", longest_ms),
                ("longest wait of a refused write", result["longest_refused_ms"]),
                ("p99 before", before["p99_us"] / 1000),
            ):
                report.add(CLUSTER, f"{what}, {which}", value, unit="ms", more_is_better=False)
            report.add(CLUSTER, f"{what}, new versions", new, unit="", more_is_better=False)


def measure_sdk(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """SIGKILL, as users of the official SDK see it."""
    with Nodes(folder / "sdk") as nodes:
        nodes.masters_return_soon()
        for _ in range(options.rounds):
            name = max(VICTIMS, key=lambda name: nodes.masters()[name])
            timer = threading.Timer(BEFORE_SECONDS, nodes.nodes[name].kill)
            timer.start()
            longest_ms = longest_upsert_ms(nodes.nodes["a"].address, 3 * BEFORE_SECONDS)
            timer.join()
            say(f"  sdk: longest upsert {longest_ms:.0f} ms")
            report.add(CLUSTER, "kill, longest upsert of the SDK", longest_ms / 1000, unit="s",
                       more_is_better=False)  # fmt: skip
            nodes.nodes[name].start()
            nodes.settle(3)


def measure_slow(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """One replica syncs slowly, for some seconds."""
    for delay_ms in SLOW_SYNCS_MS:
        with (
            Nodes(folder / f"slow-{delay_ms}") as nodes,
            loaded(nodes, options.gap_rate, SLOW) as load,
        ):
            time.sleep(BEFORE_SECONDS)
            slow = slow_syncs(nodes.nodes[SLOW].pid, delay_ms)
            own = nodes.masters()[SLOW]
            until = time.monotonic() + 4 * AFTER_SECONDS
            while time.monotonic() < until and nodes.status()["in_sync_sizes"].get("3", 0) > own:
                time.sleep(POLL_SECONDS)
            left_s = time.monotonic() - until + 4 * AFTER_SECONDS
            time.sleep(AFTER_SECONDS)
            sizes = nodes.status()["in_sync_sizes"]
            slow.terminate()
            slow.wait()
            result = load.stop()
        begin = int(BEFORE_SECONDS)
        say(f"  sync of {delay_ms} ms: in sync {sizes} after {left_s:.1f} s")
        for key in ("each_second", OTHERS):
            rows = {int(second): row for second, row in result[key].items()}
            say(f"    {key}, p99 in ms: "
                + " ".join(f"{rows[second][2] / 1000:.0f}" for second in sorted(rows)))  # fmt: skip
        for what, value in (
            ("before", seconds_of(result, 1, begin)[0]),
            ("worst second", seconds_of(result, begin, 1000)[0]),
            ("of the other masters after 2 s", seconds_of(result, begin + 3, 1000, OTHERS)[0]),
        ):
            report.add(CLUSTER, f"a replica's sync takes {delay_ms} ms: p99, {what}", value,
                       unit="ms", more_is_better=False)  # fmt: skip
        if sizes.get("3", 0) <= own:
            report.add(CLUSTER, f"a replica's sync takes {delay_ms} ms: it is out after", left_s,
                       unit="s", more_is_better=False)  # fmt: skip


def slow_syncs(pid: int, delay_ms: int) -> subprocess.Popen[bytes]:
    """Let each fdatasync of a process take so much longer, until `terminate`."""
    return subprocess.Popen(
        ["strace", "-f", "-qq", "-o", os.devnull, "-p", str(pid), "-e", "trace=fdatasync",
         "-e", f"inject=fdatasync:delay_enter={1000 * delay_ms}"]
    )  # fmt: skip


def measure_join(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """A fourth node joins three that hold data, and gets its share by a rebalance."""
    keys = options.join_mib * MIB // DOCUMENT_BYTES
    with in_sync(Nodes(folder / "join", ISRS[options.isr]), options.isr) as nodes:
        generate("binary", nodes.ports[0], (3, 64), "--load", "--keys", keys, "--value-bytes",
                 DOCUMENT_BYTES, "--cluster")  # fmt: skip
        with loaded(nodes, options.join_rate) as load:
            time.sleep(SETTLED_SECONDS)
            load.split()
            time.sleep(options.before_seconds)
            before = load.split()
            nodes.add("d").start()
            nodes.until(lambda: "d" in nodes.alive())
            seconds = nodes.rebalance()
            during = load.split()
            load.stop()
        copied = sum("d" in row["copies"] for row in nodes.partition_map())
    mib = options.join_mib * copied / 1024
    rate, worse = mib * MIB / 1e6 / seconds, during["p99_us"] / max(before["p99_us"], 1)
    say(f"  join: {copied} copies, {mib:.0f} MiB in {seconds:.1f} s, {rate:.1f} MB/s; p99 before "
        f"{before['p99_us'] / 1000:.0f} ms, meanwhile {during['p99_us'] / 1000:.0f} ms "
        f"({worse:.1f} times)")  # fmt: skip
    what = f"one more node joins, {options.join_mib} MiB"
    report.add(CLUSTER, what, rate, unit="MB/s", more_is_better=True)
    for when, window in (("before", before), ("meanwhile", during)):
        report.add(CLUSTER, f"{what}, writes' p99 {when}", window["p99_us"] / 1000, unit="ms",
                   more_is_better=False)  # fmt: skip


def measure_busy(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """Full load: a node that is only slow must not be deposed."""
    with in_sync(Nodes(folder / "busy", ISRS[options.isr]), options.isr) as nodes:
        epochs, versions = nodes.epochs(), nodes.versions()
        result = generate(
            "binary", nodes.ports[0], (8, 64), "--seconds", options.seconds, "--keys",
            options.keys, "--cluster",
        )  # fmt: skip
        elections = sum(epoch - epochs[vb_id] for vb_id, epoch in nodes.epochs().items())
        lost = 1024 - nodes.status()["in_sync_sizes"].get(str(options.isr), 0)
        new = sum(version != versions[vb_id] for vb_id, version in nodes.versions().items())
        rate = result["operations_per_second"]
        say(f"  busy for {options.seconds:.0f} s: {elections} elections, {new} new versions, "
            f"{lost} partitions not in sync, {rate:,.0f} op/s")  # fmt: skip
        for node in nodes.nodes.values():
            for line in _lines(str(node.log_path)):
                if '"masters elected"' in line or "lease" in line:
                    say(f"    {node.data.name}: {line[:200]}")
    what = f"{options.seconds:.0f} s of full load"
    for count, name in ((elections, "elections"), (new, "new versions")):
        report.add(CLUSTER, f"{name} in {what}", count, unit="", more_is_better=False)
    report.add(CLUSTER, "SET 8 x 64 meanwhile", rate, unit="op/s", more_is_better=True)
    report.add(CLUSTER, "SET 8 x 64 meanwhile, longest", result["max_us"] / 1000, unit="ms",
               more_is_better=False)  # fmt: skip


PARTS: Final[dict[str, Callable[[Report, argparse.Namespace, Path], None]]] = {
    "set": measure_set,
    "peers": measure_peers,
    "idle": measure_idle,
    "handover": measure_handover,
    "restart": measure_restart,
    "kill": measure_kill,
    "kill-coordinator": measure_kill_coordinator,
    "freeze": measure_freeze,
    "cut": measure_cut,
    "sdk": measure_sdk,
    "slow": measure_slow,
    "join": measure_join,
    "lag": measure_lag,
    "away": measure_away,
    "purged": measure_purged,
    "backup": measure_backup,
    "memory": measure_memory,
    "busy": measure_busy,
}


QUICK: Final = {
    "runs": 1, "rounds": 2, "seconds": 2.0, "seconds_of_set": 1.0, "rest_seconds": 1.0,
    "keys": 2_000, "rate": 1_000, "restart_rate": 500, "gap_rate": 500, "join_rate": 500,
    "join_mib": 4, "before_seconds": 1.0, "lag_rate": 500, "lag_seconds": 1.0, "away": 1_000,
    "documents": 3_000,
}  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.cluster", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--only", type=names_of, metavar="PART,...")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, for a test")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5, help="of kill, freeze, cut and sdk")
    parser.add_argument("--isr", type=int, choices=sorted(ISRS), default=3,
                        help="nodes and copies of all but handover, sdk and slow")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=600.0, help="of busy")
    parser.add_argument("--before-seconds", type=float, default=20.0, help="of join")
    parser.add_argument("--seconds-of-set", type=float, default=5.0)
    parser.add_argument("--rest-seconds", type=float, default=10.0, help="of idle")
    parser.add_argument("--keys", type=int, default=200_000)
    parser.add_argument(
        "--rate", type=float, default=20_000, help="writes a second, handover and away"
    )
    parser.add_argument("--restart-rate", type=float, default=2_000, help="the same, restart")
    parser.add_argument("--gap-rate", type=float, default=2_000, help="the same, kill and slow")
    parser.add_argument("--join-rate", type=float, default=2_000, help="the same, join")
    parser.add_argument("--join-mib", type=int, default=1024, help="documents of 1 KiB in join")
    parser.add_argument("--lag-rate", type=float, default=10_000, help="of lag, away and memory")
    parser.add_argument("--lag-seconds", type=float, default=20.0, help="of lag and memory")
    parser.add_argument("--away", type=int, default=1_000_000, help="changes a replica misses")
    parser.add_argument("--documents", type=int, default=1_000_000, help="of backup and memory")
    add_output_options(parser)
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**QUICK, only=list(PARTS))
    options = parser.parse_args()
    options.only = options.only or [name for name in PARTS if name != "busy"]
    check_names(parser, options.only, PARTS)
    options.peers = ["dcpd"]
    return options


def main() -> int:
    options = parse_arguments()
    began = os.getloadavg()
    with reported(options) as (report, folder):
        for name in options.only:
            say(f"{name}:")
            PARTS[name](report, options, folder)
        loads = " and ".join(f"{load[0]:.1f}" for load in (began, os.getloadavg()))
        report.about["load of the machine"] = f"{loads} at the beginning and at the end"
        report.about["documents"] = f"{options.keys:,} keys, 128-byte values; dcpd is three nodes"
        report.about["runs"] = f"{options.runs}; kill, freeze, cut and sdk {options.rounds}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
