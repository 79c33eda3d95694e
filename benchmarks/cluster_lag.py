"""How long after a write is due it is answered, at a consumer of masters, and to be read at copies.

    python -m benchmarks.cluster_lag --server 127.0.0.1:11210 [--from-replicas]

follows a cluster, in a process of its own. The values that come begin with the time at which their
write was due, in nanoseconds of the monotonic clock, which all processes share. A newline on
standard input asks for what it has seen so far, and then it ends.

A consumer of copies gets nothing but what is committed, and a copy answers GET_REPLICA for the same
changes: so its event tells when a write is visible there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.child_process import say
from benchmarks.cluster_load import STAMP_BYTES, latencies, tell
from benchmarks.cluster_nodes import CLUSTER, Nodes, loaded
from benchmarks.report import Report
from clients import Consumer, Mutation, Mutations
from clients.cli.node.histogram import Histogram

WARM_UP_SECONDS: Final = 3.0


class Follower:
    """The process that `main` runs. `what` is its name in tables."""

    def __init__(self, address: str, what: str, *arguments: str) -> None:
        self.what = what
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.cluster_lag", "--server", address, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it is there

    def begin(self) -> None:
        """Forget what it has seen."""
        self._ask("begin")

    def seen(self) -> dict[str, Any]:
        """Return the latencies of what it has seen since."""
        return self._ask("tell")

    def _ask(self, what: str) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{what}\n")
        stdin.flush()
        found: dict[str, Any] = json.loads(stdout.readline())
        return found

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def followed(address: str) -> Iterator[list[Follower]]:
    """Follow masters, and copies."""
    followers = []
    try:
        followers.append(Follower(address, "event at a consumer of masters"))
        followers.append(Follower(address, "visible at a copy", "--from-replicas"))
        yield followers
    finally:
        for follower in followers:
            follower.end()


def measure_lag(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """A steady load alone, and with two consumers."""
    with Nodes(folder / "lag") as nodes:
        for _ in range(options.runs):
            found = {"answer without consumers": seen(nodes, options, ())["answer"]}
            with followed(nodes.nodes["a"].address) as followers:
                found |= seen(nodes, options, followers)
            for what, window in found.items():
                say(f"  {what}: {window}")
                for percentile in ("p50", "p99"):
                    report.add(CLUSTER, f"{options.lag_rate:,.0f} SETs/s: {what}, {percentile}",
                               window[f"{percentile}_us"] / 1000, unit="ms",
                               more_is_better=False)  # fmt: skip
                report.add(CLUSTER, f"{options.lag_rate:,.0f} SETs/s: {what}, of them",
                           window["operations"] / options.lag_seconds, unit="/s",
                           more_is_better=True)  # fmt: skip


def seen(
    nodes: Nodes, options: argparse.Namespace, followers: Sequence[Follower]
) -> dict[str, dict[str, Any]]:
    """Return the latencies of some seconds of load, for each who sees it."""
    with loaded(nodes, options.lag_rate) as load:
        time.sleep(WARM_UP_SECONDS)
        load.split()
        for follower in followers:
            follower.begin()
        time.sleep(options.lag_seconds)
        return {"answer": load.split(), **{each.what: each.seen() for each in followers}}


# -- the process that follows ----------------------------------------------------------------------


class Lags:
    """Times from when a write was due to its event."""

    def __init__(self) -> None:
        self._found = Histogram()

    def take(self, values: list[bytes]) -> None:
        """Count what a batch has brought."""
        now_ns = time.monotonic_ns()
        for value in values:
            self._found.add((now_ns - int(value[:STAMP_BYTES])) // 1000)

    def obey(self, line: bytes) -> None:
        """Begin anew, or tell what was seen."""
        tell(latencies(self._found))
        if line.strip() == b"begin":
            self._found = Histogram()


async def follow(server: str, *, from_replicas: bool) -> None:
    """Follow until the process is killed."""
    lags = Lags()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, lambda: lags.obey(sys.stdin.buffer.readline()))
    async with Consumer(server, from_replicas=from_replicas) as consumer:
        tell({"ready": True})
        async for items in consumer.lazy_batches():
            for item in items:
                if isinstance(item, Mutations):
                    lags.take(item.values())
                elif isinstance(item, Mutation):
                    lags.take([item.value])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.cluster_lag", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--server", required=True)
    parser.add_argument("--from-replicas", action="store_true")
    options = parser.parse_args()
    asyncio.run(follow(options.server, from_replicas=options.from_replicas))
    return 0


if __name__ == "__main__":
    sys.exit(main())
