"""How long a single request waits while others write and merges run.

    python -m benchmarks.pauses --seconds 20 --keys 1000000

It starts a server that takes SETs from 8 connections with 64 in flight each, and merges meanwhile.
A client sends a NOOP every millisecond. The output is one JSON document, in milliseconds:

- noop      from sending a NOOP to its answer, with the share of the operating system
- wall      in the server: how late a timer of 1 ms fired, which is the length of a turn of the loop
- cpu       the same in processor time of the loop's thread: our own code, whatever else runs
- gc        passes of the cyclic collector by generation: count and maximum
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from socket import IPPROTO_TCP, TCP_NODELAY, create_connection
from typing import Any, Final

from benchmarks import workload
from benchmarks.child_process import generate
from benchmarks.generator import open_session
from benchmarks.peers import Dcpd
from benchmarks.run import LOAD_SHAPE
from clients.cli.node.histogram import Histogram
from dcp.wire.opcode import Opcode

TICK_SECONDS: Final = 0.001
REPORT_SECONDS: Final = 0.5
REPORT_PATH: Final = "BENCHMARK_PAUSES"
"""Environment variable: the file for the figures of the server in this module."""


def summary(histogram: Histogram) -> dict[str, float]:
    """Percentiles of microseconds, in milliseconds."""
    if not len(histogram):
        return {}
    wanted = {"p50": 50, "p99": 99, "p99.9": 99.9, "max": 100}
    return {name: histogram.percentile(percent) / 1000 for name, percent in wanted.items()}


class Probe:
    """A timer of 1 ms on the server's loop, and the times of the collector."""

    def __init__(self, path: Path, *, report_seconds: float = REPORT_SECONDS) -> None:
        self._report_seconds = report_seconds
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._wall, self._cpu = Histogram(), Histogram()
        self._passes: dict[int, list[float]] = {}
        self._gc_began = 0.0
        self._last = (0.0, 0.0)
        self._loop.call_later(self._report_seconds, self._begin)

    def _begin(self) -> None:
        # The start is over, including its full pass of the collector.
        gc.callbacks.append(self._collected)
        self._last = (time.perf_counter(), time.thread_time())
        self._report()
        self._tick()

    def _tick(self) -> None:
        self._note()
        self._loop.call_later(TICK_SECONDS, self._tick)

    def _note(self) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        self._wall.add(max(0, int(1e6 * (wall - self._last[0] - TICK_SECONDS))))
        self._cpu.add(int(1e6 * (cpu - self._last[1])))
        self._last = (wall, cpu)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began = time.perf_counter()
        else:
            spent = time.perf_counter() - self._gc_began
            passes = self._passes.setdefault(info["generation"], [0, 0.0])
            passes[0] += 1
            passes[1] = max(passes[1], 1000 * spent)

    def _report(self) -> None:
        self._note()
        seen = {"wall": summary(self._wall), "cpu": summary(self._cpu), "gc": self._passes}
        self._path.write_text(json.dumps(seen))
        self._last = (time.perf_counter(), time.thread_time())
        self._loop.call_later(self._report_seconds, self._report)


def serve() -> None:
    """Run dcpd with a probe on its loop."""
    from dcp.server.main import main as run_server

    def watch(_node: object) -> None:
        Probe(Path(os.environ[REPORT_PATH]))

    run_server(watch)


class ProbedDcpd(Dcpd):
    """Our server with the probe."""

    def command(self) -> list[str]:
        _, *arguments = super().command()
        return [sys.executable, "-m", "benchmarks.pauses", "serve", *arguments]


def send_noops(port: int, stop: threading.Event) -> Histogram:
    """Send a NOOP every millisecond until `stop`; return the latencies of the answers."""
    histogram = Histogram()
    request = workload.frame(Opcode.NOOP)
    with create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        open_session(connection)
        while not stop.is_set():
            began = time.perf_counter()
            connection.sendall(request)
            answered = 0
            while answered < len(request):
                answered += len(connection.recv(4096))
            spent = time.perf_counter() - began
            histogram.add(int(1e6 * spent))
            time.sleep(max(0.0, TICK_SECONDS - spent))
    return histogram


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write, merge and wait for NOOPs at the same time."""
    report = folder / "pauses.json"
    os.environ[REPORT_PATH] = str(report)
    peer = ProbedDcpd(folder / "data")
    peer.start()
    try:
        stop = threading.Event()
        found: dict[str, Any] = {}

        def write() -> None:
            try:
                found["sets"] = generate(
                    peer.protocol, peer.port, LOAD_SHAPE,
                    "--seconds", options.seconds, "--keys", options.keys,
                )["operations_per_second"]  # fmt: skip
            finally:
                stop.set()

        writer = threading.Thread(target=write)
        writer.start()
        found["noop"] = summary(send_noops(peer.port, stop))
        writer.join()
        time.sleep(2 * REPORT_SECONDS)
        seen: dict[str, Any] = json.loads(report.read_text())
        return found | seen
    finally:
        peer.discard()


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        del sys.argv[1]
        serve()
        return 0
    parser = argparse.ArgumentParser(prog="benchmarks.pauses")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--keys", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
