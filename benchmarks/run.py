"""The figures of docs/performance.md: our server and its peers, measured in one run.

    python -m benchmarks.run                        everything, about ten minutes
    python -m benchmarks.run --only set --runs 3    one part
    python -m benchmarks.run --peers dcpd,redis,nats,etcd

Each measurement starts a server on an empty folder, alone on the machine. The servers take turns
(A B A B ...), and the table shows medians. Progress goes to stderr, the Markdown to stdout.

Parts
- generator  the load generator against a responder that only answers: the upper limit
- set        durable SETs a second and latency, at 1 x 1, 1 x 128 and 8 x 64 in flight
- catchup    a Python consumer follows all changes from the beginning
- memory     of the server with its child processes, after all keys were written
- get        GETs a second and latency, 8 x 64 in flight, of existing keys
- serve      all changes from the beginning into a socket that counts, 128-byte and 1 KiB values;
             of dcpd also to a client that knows no collections
- tail       from sending a SET to its answer and to its event, at 10,000 a second (dcpd alone)
- crowd      1,000 SETs a second of one partition, which 1, 10 and 100 connections follow: processor
             time of a change for each (dcpd alone)
- idle       1,024 streams on each of 100 connections: memory, processor time (dcpd alone)
- restart    SIGKILL, start again, until the first GET is answered
- plain, cold, many, large, events   clients of every kind, beside memcached and Redis whatever
             `--peers` says: see benchmarks.everyone

The output says in which form dcpd ran. `scripts/install bench` installs the default one, with
the loops in C.

For processor time of the server's core without sockets: python -m benchmarks.cpu
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks import everyone, following, responder, workload
from benchmarks.child_process import generate, say, tool
from benchmarks.peers import PEERS, Peer, folder_bytes, memory_bytes
from benchmarks.report import Report
from vbucket.native.form import form_text

LOADED_PARTS: Final = ("memory", "get", "catchup", "serve", "tail", "crowd", "idle", "restart")
"""What is measured on a server that holds all keys, in this order."""
PARTS: Final = ("generator", "set", *LOADED_PARTS, *everyone.MEASURE)
LARGE_VALUE_BYTES: Final = 1024
SHAPES: Final = ((1, 1), (1, 128), (8, 64))
"""Connections x operations in flight on each."""
LOAD_SHAPE: Final = (8, 64)
SETTLED_SECONDS: Final = 3.0
SETTLE_SECONDS_MAX: Final = 60.0
SETTLED_CHANGE: Final = 0.01
KEYS_CHECKED: Final = 25
MIB: Final = 1024 * 1024
VERSION: Final = re.compile(r"\d+\.\d+\.\d+")
VERSION_OF: Final = {
    "dcpd": [sys.executable, "-m", "dcp.server.main", "--version"],
    "dcpd-memcached": [sys.executable, "-m", "dcp.server.main", "--version"],
    "redis": ["redis-server", "--version"],
    "redis-bounded": ["redis-server", "--version"],
    "nats": ["nats-server", "--version"],
    "etcd": ["etcd", "--version"],
}
DEFAULT_FORM: Final = "loops in C"
"""What `pip install` and scripts/install make where there is a C compiler."""
HOW_SET: Final = {
    "dcpd": "durability commit",
    "dcpd-memcached": "durability commit; clients without HELLO",
    "redis": "appendonly yes, appendfsync always, save off; SET + XADD",
    "redis-bounded": "the same; SET + XADD MAXLEN ~ 2000",
    "nats": "JetStream KV put, file storage, default sync_interval (not synced)",
    "etcd": "one member, Put over gRPC",
}
"""The setup of each server, and what one operation is."""


def record_sets(report: Report, peer: str, result: dict[str, Any], what: str) -> None:
    rate = result["operations_per_second"]
    report.add(peer, what, rate, unit="op/s", more_is_better=True)
    for name in ("p50", "p99"):
        report.add(peer, f"{what}, {name}", result[f"{name}_us"] / 1000, unit="ms",
                   more_is_better=False)  # fmt: skip
    share = 100 * result["generator_cpu_share"]
    report.add(peer, f"{what}, generator's core", share, unit="%", more_is_better=False)
    say(f"  {peer:6} {what}: {rate:,.0f} op/s, p99 {result['p99_us'] / 1000:.2f} ms")


def measure_generator(report: Report, options: argparse.Namespace) -> None:
    """The generator against the responder."""
    for shape in SHAPES:
        for name in [name for name in options.peers if name in responder.ANSWERS]:
            with subprocess.Popen(
                [sys.executable, "-m", "benchmarks.responder"], stdout=subprocess.PIPE
            ) as process:
                assert process.stdout is not None
                port = int(process.stdout.readline())
                result = generate(PEERS[name].protocol, port, shape, "--seconds", options.seconds)
            record_sets(report, name, result, f"ceiling {shape[0]} x {shape[1]}")


def measure_set(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """Durable SETs, each run on an empty folder."""
    for shape in SHAPES:
        for run in range(options.runs):
            for name in options.peers:
                peer = PEERS[name](folder / f"{name}-{shape[0]}x{shape[1]}-{run}")
                try:
                    peer.start()
                    result = generate(
                        peer.protocol, peer.port, shape, "--seconds", options.seconds,
                        "--keys", options.keys, "--seed", run + 1,
                    )  # fmt: skip
                finally:
                    peer.discard()
                record_sets(report, name, result, f"SET {shape[0]} x {shape[1]}")


def measure_loaded(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """What is measured on a server that holds all keys: memory, catch-up, restart."""
    for run in range(options.runs):
        for name in options.peers:
            peer = PEERS[name](folder / f"{name}-loaded-{run}")
            try:
                peer.start()
                result = generate(peer.protocol, peer.port, LOAD_SHAPE, "--load",
                                  "--keys", options.keys)  # fmt: skip
                rate = result["operations_per_second"]
                say(f"  {name:6} wrote {result['operations']:,} keys, {rate:,.0f} op/s")
                report.add(name, f"{options.keys:,} new keys", rate, unit="op/s",
                           more_is_better=True)  # fmt: skip
                for part in LOADED_PARTS:
                    if part in options.only and is_measured(part, name):
                        MEASURE[part](report, peer, options)
            finally:
                peer.discard()


def measure_large_values(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """Measure the server's side of a catch-up again, with values of 1 KiB."""
    keys = max(1, options.keys // 4)
    for run in range(options.runs):
        for name in options.peers:
            if not is_measured("serve", name):
                continue
            peer = PEERS[name](folder / f"{name}-large-{run}")
            try:
                peer.start()
                generate(peer.protocol, peer.port, LOAD_SHAPE, "--load", "--keys", keys,
                         "--value-bytes", LARGE_VALUE_BYTES)  # fmt: skip
                record_serving(report, peer, keys, "served, 1 KiB values")
            finally:
                peer.discard()


def record_serving(report: Report, peer: Peer, changes: int, what: str, client: str = "") -> None:
    drained = f"drain-{client or peer.name}"
    document = tool("following", drained, "--port", peer.port, "--changes", changes)
    rate = changes / document["seconds"]
    report.add(peer.name, what, rate, unit="changes/s", more_is_better=True)
    mb_per_second = document["bytes"] / document["seconds"] / 1e6
    report.add(peer.name, f"{what}, bytes", mb_per_second, unit="MB/s", more_is_better=True)
    say(f"  {peer.name:6} {what}: {rate:,.0f} changes/s, {mb_per_second:,.0f} MB/s")


def measure_serve(report: Report, peer: Peer, options: argparse.Namespace) -> None:
    record_serving(report, peer, options.keys, "served")
    if peer.name == "dcpd":
        record_serving(report, peer, options.keys, "served without collections", "bare")


def measure_get(report: Report, peer: Peer, options: argparse.Namespace) -> None:
    connections, in_flight = LOAD_SHAPE
    result = tool("reading", peer.protocol, "--port", peer.port, "--keys", options.keys,
                  "--seconds", options.seconds, "--connections", connections,
                  "--in-flight", in_flight)  # fmt: skip
    record_sets(report, peer.name, result, f"GET {connections} x {in_flight}")


def measure_tail(report: Report, peer: Peer, options: argparse.Namespace) -> None:
    document = tool("following", "tail", "--port", peer.port, "--keys", options.keys,
                    "--seconds", options.seconds)  # fmt: skip
    for what in ("set_p50", "set_p99", "event_p50", "event_p99"):
        name = what.replace("set", "answer").replace("_", ", ")
        report.add(peer.name, f"at 10,000 SETs/s: {name}", document[f"{what}_us"] / 1000,
                   unit="ms", more_is_better=False)  # fmt: skip
    say(f"  {peer.name:6} tail: {document}")


def measure_crowd(report: Report, peer: Peer, _options: argparse.Namespace) -> None:
    document = tool("following", "crowd", "--port", peer.port, "--pid", peer.pid, "--rate", 1000)
    for count in following.CROWDS:
        report.add(peer.name, f"a change, for each of {count} connections",
                   document[f"us_per_stream_of_{count}"], unit="us",
                   more_is_better=False)  # fmt: skip
    say(f"  {peer.name:6} crowd: {document}")


def measure_idle(report: Report, peer: Peer, _options: argparse.Namespace) -> None:
    document = tool("following", "idle", "--port", peer.port, "--pid", peer.pid)
    report.add(peer.name, "102,400 idle streams", document["anonymous_bytes_added"] / MIB,
               unit="MiB", more_is_better=False)  # fmt: skip
    report.add(peer.name, "102,400 idle streams, core", 100 * document["idle_share_of_a_core"],
               unit="%", more_is_better=False)  # fmt: skip
    report.add(peer.name, "a change, for each of 100 followers",
               document["us_per_change_and_follower"], unit="us",
               more_is_better=False)  # fmt: skip
    say(f"  {peer.name:6} idle: {document}")


def measure_catchup(report: Report, peer: Peer, options: argparse.Namespace) -> None:
    changes = options.keys
    document = tool("catchup", peer.name, "--port", peer.port, "--changes", changes)
    assert document["changes"] == document["keys"] == changes, document
    rate = changes / document["seconds"]
    say(f"  {peer.name:6} catch-up: {rate:,.0f} changes/s")
    report.add(peer.name, "consumer's catch-up", rate, unit="changes/s", more_is_better=True)


def measure_memory(report: Report, peer: Peer, _options: argparse.Namespace) -> None:
    """Memory once it no longer changes: rewriting and merging continue after the last write."""
    deadline = time.monotonic() + SETTLE_SECONDS_MAX
    now = memory_bytes(peer.pid)
    while time.monotonic() < deadline:
        before = now
        time.sleep(SETTLED_SECONDS)
        now = memory_bytes(peer.pid)
        if abs(now["Rss"] - before["Rss"]) <= SETTLED_CHANGE * before["Rss"]:
            break
    for kind, count in now.items():
        report.add(peer.name, f"memory, {kind}", count / MIB, unit="MiB", more_is_better=False)
    on_disk = folder_bytes(peer.folder)
    report.add(peer.name, "on disk", on_disk / MIB, unit="MiB", more_is_better=False)
    say(f"  {peer.name:6} memory: {now['Rss'] / MIB:,.0f} MiB, disk {on_disk / MIB:,.0f} MiB")


def measure_restart(report: Report, peer: Peer, options: argparse.Namespace) -> None:
    """SIGKILL, start, first GET answered; then a check of some documents."""
    keys = options.keys
    peer.kill()
    seconds = peer.start()
    pool = set(workload.values(1, 128))
    for index in range(0, keys, max(1, keys // KEYS_CHECKED)):
        value = peer.get(workload.key_of(index))
        if value not in pool:
            raise SystemExit(f"{peer.name} lost {workload.key_of(index)!r}: {value!r}")
    say(f"  {peer.name:6} ready after SIGKILL: {seconds:.3f} s")
    report.add(peer.name, "ready after SIGKILL", seconds, unit="s", more_is_better=False)


MEASURE: Final[dict[str, Callable[[Report, Peer, argparse.Namespace], None]]] = {
    "memory": measure_memory,
    "get": measure_get,
    "catchup": measure_catchup,
    "serve": measure_serve,
    "tail": measure_tail,
    "crowd": measure_crowd,
    "idle": measure_idle,
    "restart": measure_restart,
}
PEERS_OF: Final = {
    "get": {"dcpd", "redis"},
    "serve": {"dcpd", "redis"},
    "tail": {"dcpd"},
    "crowd": {"dcpd"},
    "idle": {"dcpd"},
}
"""Parts in which only some servers can be measured in the same way."""


def is_measured(part: str, name: str) -> bool:
    if part == "catchup":
        return name != "etcd"  # there is no comparable consumer of etcd
    return name in PEERS_OF.get(part, PEERS)


def form_told() -> str:
    """Return the form of dcpd, with what to do if it is not that of the default installation."""
    form = form_text()
    if form == DEFAULT_FORM:
        return form
    return f"{form}; the default installation is {DEFAULT_FORM} (scripts/install bench)"


def about(options: argparse.Namespace) -> dict[str, str]:
    """Describe what was measured and with what, without names of machines or folders."""
    used = {
        "processor cores": str(os.cpu_count()),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "Python": platform.python_version(),
        "runs": f"{options.runs} of {options.seconds:g} s",
        "documents": f"{options.keys:,} keys, 128-byte values",
    }
    for name in options.peers:
        shown = subprocess.run(VERSION_OF[name], capture_output=True, text=True, check=True)
        found = VERSION.search(shown.stdout)
        used[name] = f"{found[0] if found else '?'}, {HOW_SET[name]}"
    if "dcpd" in options.peers:
        used["form of dcpd"] = form_told()
    return used


def names_of(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `reported` reads."""
    parser.add_argument("--folder", type=Path, help="where the servers keep their data")
    parser.add_argument("--json", type=Path, help="write every run's figures here")


def check_names(parser: argparse.ArgumentParser, given: list[str], known: Iterable[str]) -> None:
    """End with a usage message if a name is unknown."""
    for name in given:
        if name not in known:
            parser.error(f"{name!r} is not one of {', '.join(known)}")


@contextmanager
def reported(options: argparse.Namespace) -> Iterator[tuple[Report, Path]]:
    """A report to fill, and a folder for servers. At the end the report is printed."""
    report = Report(about(options))
    folder = Path(tempfile.mkdtemp(prefix="benchmark-", dir=options.folder))
    try:
        yield report, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(report.to_markdown())
    if options.json:
        options.json.write_text(json.dumps(report.to_document(), indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.run", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--only", type=names_of, default=list(PARTS), metavar="PART,...")
    parser.add_argument("--peers", type=names_of, default=["dcpd", "redis"], metavar="PEER,...",
                        help=f"of {', '.join(PEERS)}; default dcpd,redis")  # fmt: skip
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each SET run")
    parser.add_argument("--keys", type=int, default=500_000)
    add_output_options(parser)
    options = parser.parse_args()
    check_names(parser, options.only, PARTS)
    check_names(parser, options.peers, PEERS)
    return options


def main() -> int:
    options = parse_arguments()
    say(f"dcpd is {form_told()}")
    with reported(options) as (report, folder):
        if "generator" in options.only:
            measure_generator(report, options)
        if "set" in options.only:
            measure_set(report, options, folder)
        if set(LOADED_PARTS).intersection(options.only):
            measure_loaded(report, options, folder)
        if "serve" in options.only:
            measure_large_values(report, options, folder)
        for name, measure in everyone.MEASURE.items():
            if name in options.only:
                measure(report, options, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
