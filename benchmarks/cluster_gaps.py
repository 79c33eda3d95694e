"""How long partitions have no master after a node is killed, frozen, or cut off from everybody.

One load goes on through all rounds. In each round the fault happens to another node, and one write
goes to each partition that it is master of: how long is it from the fault to its answer? Then the
fault ends, and the next round begins when all copies are in sync and each node is master of its
share.

`kill-coordinator` has etcd behind the nodes, and kills each time the node that is the coordinator
at the moment, and master of its share: the next coordinator elects.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.child_process import say
from benchmarks.cluster_nodes import CLUSTER, Nodes, NodesBehindCables, NodesOnEtcd, loaded
from benchmarks.report import Report

BEFORE_SECONDS: Final = 1.0
"""How long the load runs before the first fault."""
PERCENTS: Final = (50, 99, 100)
ISRS: Final = {3: "abc", 2: "ab"}
"""Copies in sync -> the nodes. With two of them, one goes on alone."""


class Fault(NamedTuple):
    """What happens to a node, how it ends, the nodes that it needs, and whether it happens to the
    coordinator each time.
    """

    begin: Callable[[Any, str], object]
    end: Callable[[Any, str], object]
    nodes: type[Nodes] = Nodes
    is_for_coordinator: bool = False


KILL: Final = Fault(lambda nodes, name: nodes.nodes[name].kill(),
                    lambda nodes, name: nodes.nodes[name].start())  # fmt: skip
FAULTS: Final[dict[str, Fault]] = {
    "kill": KILL,
    "kill-coordinator": KILL._replace(nodes=NodesOnEtcd, is_for_coordinator=True),
    "freeze": Fault(lambda nodes, name: nodes.freeze(name), lambda nodes, _: nodes.thaw_all()),
    "cut": Fault(lambda nodes, name: nodes.cut(name), lambda nodes, _: nodes.heal(),
                 NodesBehindCables),
}  # fmt: skip


@contextmanager
def in_sync(nodes: Nodes, isr: int) -> Iterator[Nodes]:
    """Run the nodes of `ISRS`, with so many copies of each partition."""
    with nodes:
        if isr < len(ISRS[3]):
            nodes.change("set", copies=isr, min_in_sync=1)
        nodes.settle(isr)
        yield nodes


def measure_gaps(report: Report, options: argparse.Namespace, folder: Path, how: str) -> None:
    """Let a fault happen again and again, and report the times of all partitions together."""
    fault, names = FAULTS[how], ISRS[options.isr]
    victims = names[1:]  # the first one owns the metadata store, without which nobody is elected
    gaps_s: list[float] = []
    began_s = time.monotonic()
    with in_sync(fault.nodes(folder / f"{how}-{options.isr}", names), options.isr) as nodes:
        nodes.masters_return_soon()
        with loaded(nodes, options.gap_rate) as load:
            time.sleep(BEFORE_SECONDS)
            for number in range(options.rounds):
                name = victims[number % len(victims)]
                if fault.is_for_coordinator:
                    name = nodes.coordinator()
                since_s = time.monotonic()
                fault.begin(nodes, name)
                load.begin_mark(nodes.nodes[name].port, since_s)
                found = [gap_ms / 1000 for gap_ms in load.end_mark()]
                say(f"  {how} {number + 1}, {name}: {len(found)} partitions, "
                    f"{found[0]:.2f} to {found[-1]:.2f} s")  # fmt: skip
                gaps_s += found
                fault.end(nodes, name)
                nodes.settle(options.isr, name)
            result = load.stop()
    say(f"  {options.rounds} rounds in {time.monotonic() - began_s:.0f} s; longest wait of any "
        f"write {result['max_us'] / 1e6:.2f} s; refusals {result['refusals']}")  # fmt: skip
    what = f"{how} to the first write, {options.isr} in sync"
    gaps_s.sort()
    for percent in PERCENTS:
        at = min(len(gaps_s) * percent // 100, len(gaps_s) - 1)
        report.add(CLUSTER, f"{what}, p{percent} of {len(gaps_s):,} partitions", gaps_s[at],
                   unit="s", more_is_better=False)  # fmt: skip
    say(f"  {what}: median {statistics.median(gaps_s):.2f} s")


def measure_kill(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """SIGKILL."""
    measure_gaps(report, options, folder, "kill")


def measure_kill_coordinator(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """SIGKILL of the coordinator, which is a master, too."""
    measure_gaps(report, options, folder, "kill-coordinator")


def measure_freeze(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """SIGSTOP."""
    measure_gaps(report, options, folder, "freeze")


def measure_cut(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """All cables of a node are cut: to nodes, clients and the metadata store."""
    measure_gaps(report, options, folder, "cut")
