"""Parts of `benchmarks.run` about clients of every kind. Each compares servers in turn, and has the
servers' processor time beside each rate.

- plain      SETs, GETs and absent keys of clients without HELLO, also in the text protocol, and
             GETs of 100 keys: beside memcached, which keeps nothing on a disk, and Redis
- cold       GETs of documents that only the store has (dcpd alone)
- many       10,000 connections with a GET a second each, beside both
- large      values of 1 and 20 MiB: SET, GET, others' p99 meanwhile, beside both; streams of dcpd
- events     a consumer with an event object for each change, beside redis-py with hiredis
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.child_process import generate, say, tool
from benchmarks.peers import ColdDcpd, Dcpd, Memcached, Peer, Redis, cpu_seconds
from benchmarks.report import Report

SHAPE: Final = (8, 64)
KEYS: Final = 100_000
VALUE_BYTES: Final = 128
RIVALS: Final[tuple[type[Peer], ...]] = (Dcpd, Memcached, Redis)
SETS: Final = {
    "dcpd": ("memcached", "text"),
    "memcached": ("memcached", "text"),
    "redis": ("resp",),
}
GETS: Final = {
    "dcpd": ("memcached", "text", "text-100"),
    "memcached": ("memcached", "text", "text-100"),
    "redis": ("resp", "resp-100"),
}
ROWS_OF: Final = {
    "memcached": ("without HELLO",), "text": ("text",), "text-100": ("of 100 keys",),
    "resp": ("without HELLO", "text"), "resp-100": ("of 100 keys",),
}  # fmt: skip
"""Protocol -> the rows that it stands in. Redis has one protocol for both."""
MERGED_SECONDS: Final = 5.0
"""After that nearly all of KEYS are in the store of a server with a small memtable."""
LARGE_MIB: Final = (1, 20)


def add(report: Report, peer: str, what: str, unit: str, value: float) -> None:
    is_rate = unit.endswith("/s")
    report.add(peer, what, value, unit=unit, more_is_better=is_rate)
    say(f"  {peer:9} {what}: {value:,.4g} {unit}")


def in_turn(
    folder: Path,
    name: str,
    kinds: tuple[type[Peer], ...],
    runs: int,
    measure: Callable[[Peer], None],
) -> None:
    """Start each server, alone and on an empty folder, and measure it."""
    for run in range(runs):
        for kind in kinds:
            peer = kind(folder / f"{kind.name}-{name}-{run}")
            try:
                peer.start()
                measure(peer)
            finally:
                peer.discard()


def load(peer: Peer, protocol: str, keys: int) -> None:
    generate(protocol, peer.port, SHAPE, "--load", "--keys", keys)


def record_reads(
    report: Report, peer: Peer, protocol: str, options: argparse.Namespace, what: str, *more: object
) -> None:
    in_flight = 1 if protocol.endswith("-100") else SHAPE[1]
    found = tool("reading", protocol, "--port", peer.port, "--pid", peer.pid, "--keys", KEYS,
                 "--seconds", options.seconds, "--connections", SHAPE[0],
                 "--in-flight", in_flight, *more)  # fmt: skip
    add(report, peer.name, what, "keys/s", found["operations_per_second"])
    add(report, peer.name, f"{what}, p99", "ms", found["p99_us"] / 1000)
    add(report, peer.name, f"{what}, processor time", "us", found["server_us"])


def measure_plain(report: Report, options: argparse.Namespace, folder: Path) -> None:
    def measure(peer: Peer) -> None:
        for protocol in SETS[peer.name]:
            spent = cpu_seconds(peer.pid)
            found = generate(protocol, peer.port, SHAPE, "--seconds", options.seconds,
                             "--warmup-seconds", 0, "--keys", KEYS)  # fmt: skip
            spent = 1e6 * (cpu_seconds(peer.pid) - spent) / found["operations"]
            for row in ROWS_OF[protocol]:
                rate = found["operations_per_second"]
                add(report, peer.name, f"SET, {row}", "op/s", rate)
                add(report, peer.name, f"SET, {row}, processor time", "us", spent)
        load(peer, SETS[peer.name][0], KEYS)
        for protocol in GETS[peer.name]:
            for row in ROWS_OF[protocol]:
                record_reads(report, peer, protocol, options, f"GET, {row}")
        for protocol in SETS[peer.name]:
            for row in ROWS_OF[protocol]:
                record_reads(report, peer, protocol, options, f"GET, absent, {row}", "--absent")

    in_turn(folder, "plain", RIVALS, options.runs, measure)


def measure_cold(report: Report, options: argparse.Namespace, folder: Path) -> None:
    def measure(peer: Peer) -> None:
        load(peer, "binary", KEYS)
        time.sleep(MERGED_SECONDS)
        record_reads(report, peer, "binary", options, "GET, only the store has it")

    in_turn(folder, "cold", (ColdDcpd,), options.runs, measure)


def measure_many(report: Report, options: argparse.Namespace, folder: Path) -> None:
    def measure(peer: Peer) -> None:
        protocol = "resp" if peer.name == "redis" else "text"
        found = tool("many", protocol, "--port", peer.port, "--pid", peer.pid)
        what = "10,000 connections"
        add(report, peer.name, f"{what}, a core", "%", 100 * found["share_of_a_core"])
        add(report, peer.name, f"{what}, each", "KiB", found["bytes_per_connection"] / 1024)
        add(report, peer.name, f"{what}, p99", "ms", found["p99_us"] / 1000)

    in_turn(folder, "many", RIVALS, options.runs, measure)


def measure_large(report: Report, options: argparse.Namespace, folder: Path) -> None:
    for mib in LARGE_MIB:

        def measure(peer: Peer, mib: int = mib) -> None:
            protocol = "resp" if peer.name == "redis" else "text"
            size = mib if mib < max(LARGE_MIB) else mib - 1  # with its key it must fit
            found: dict[str, Any] = tool(
                "large", protocol, "--port", peer.port, "--pid", peer.pid, "--value-mib", size
            )
            for name in ("set", "get"):
                what = f"{name.upper()} of {size} MiB"
                add(report, peer.name, what, "MB/s", found[f"{name}_mb_per_second"])
                cpu = 1000 * found[f"{name}_cpu_s_per_gb"]
                add(report, peer.name, f"{what}, processor time a GB", "ms", cpu)
                p99 = found[f"{name}_others_p99_us"] / 1000
                add(report, peer.name, f"{what}, others' p99", "ms", p99)
            if peer.name == "dcpd":
                rounds = max(1, 64 // size)
                drained = tool("following", "drain-dcpd", "--port", peer.port,
                               "--changes", SHAPE[0] * rounds)  # fmt: skip
                rate = drained["bytes"] / drained["seconds"] / 1e6
                add(report, peer.name, f"stream of {size} MiB values", "MB/s", rate)

        in_turn(folder, f"large-{mib}", RIVALS, options.runs, measure)


def measure_events(report: Report, options: argparse.Namespace, folder: Path) -> None:
    def measure(peer: Peer) -> None:
        load(peer, peer.protocol, options.keys)
        forms = ("redis",) if peer.name == "redis" else ("dcpd", "events", "each")
        for form in forms:
            spent = cpu_seconds(peer.pid)
            found = tool("catchup", form, "--port", peer.port, "--changes", options.keys)
            spent = 1e6 * (cpu_seconds(peer.pid) - spent) / options.keys
            for what in ROWS_OF_CONSUMERS[form]:
                add(report, peer.name, what, "changes/s", options.keys / found["seconds"])
                add(report, peer.name, f"{what}, server", "us", spent)

    in_turn(folder, "events", (Dcpd, Redis), options.runs, measure)


ROWS_OF_CONSUMERS: Final = {
    "dcpd": ("catch-up, lazy_batches()",),
    "events": ("catch-up, batches()",),
    "each": ("catch-up, async for",),
    "redis": ("catch-up, lazy_batches()", "catch-up, batches()", "catch-up, async for"),
}
MEASURE: Final[dict[str, Callable[[Report, argparse.Namespace, Path], None]]] = {
    "plain": measure_plain, "cold": measure_cold, "many": measure_many, "large": measure_large,
    "events": measure_events,
}  # fmt: skip
