"""Durable SETs for minutes over many keys: does the rate hold once the data is large?

    python -m benchmarks.sustained --peers dcpd,redis-bounded,nats,etcd --keys 1000000
    python -m benchmarks.sustained --keys 10000000 --load --seconds 60

Keys are chosen uniformly; 8 connections x 64 in flight, 128-byte values. With `--load` every key is
written once first. The peers run in turn, each alone on the machine; `--runs` repeats everything.
Besides rate and latency, the output has the processor time of all processes of the server for each
SET, memory and disk at the end, and what was written to the disk for each byte changed; what other
programs write counts, too. With `--restart` it has the time
until the server answers again after SIGKILL. With `--png` it draws rate, p99, disk and memory over
time, of the last run of each peer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from benchmarks import workload
from benchmarks.child_process import generate, say
from benchmarks.generator import Load
from benchmarks.peers import (
    PEERS,
    Peer,
    cpu_seconds,
    disk_written_bytes,
    folder_bytes,
    memory_bytes,
)
from benchmarks.report import Report
from benchmarks.run import (
    LOAD_SHAPE,
    MIB,
    add_output_options,
    check_names,
    names_of,
    record_sets,
    reported,
)
from benchmarks.timeline import Lines, draw, sampled

PREBUILT_MIN: Final = 524_288
PREBUILT_PER_KEY: Final = 2
"""Operations built beforehand per key, and sent in turn: nearly every key is used."""
VALUE_BYTES: Final = 128
PREBUILT_MAX: Final = 12_000_000
"""Their requests take up to 350 bytes each."""


def measure(
    report: Report, options: argparse.Namespace, peer: Peer, run: int, lines: dict[str, Lines]
) -> None:
    """One peer, one run, on an empty folder."""
    what = f"{options.keys:,} keys, {options.seconds:.0f} s"
    prebuilt = min(PREBUILT_MAX, max(PREBUILT_MIN, PREBUILT_PER_KEY * options.keys))
    peer.start()
    written = disk_written_bytes(peer.folder.parent)
    if options.load:
        loaded = generate(peer.protocol, peer.port, LOAD_SHAPE, "--load", "--keys", options.keys)
        rate = loaded["operations_per_second"]
        report.add(peer.name, f"{options.keys:,} new keys", rate, unit="op/s", more_is_better=True)
        say(f"  {peer.name:6} wrote {options.keys:,} keys, {rate:,.0f} op/s")
        written = disk_written_bytes(peer.folder.parent)
    spent = cpu_seconds(peer.pid)
    with sampled(peer) as samples:
        result = generate(
            peer.protocol, peer.port, LOAD_SHAPE, "--seconds", options.seconds,
            "--keys", options.keys, "--prebuilt", prebuilt, "--seed", run + 1, "--timeline",
        )  # fmt: skip
    spent = cpu_seconds(peer.pid) - spent
    lines[peer.name] = Lines(result["timeline"], samples)
    record_sets(report, peer.name, result, what)
    # The warm-up's operations are not in the result, and their processor time is.
    sets = result["operations_per_second"] * (options.seconds + Load.warmup_seconds)
    report.add(peer.name, f"{what}, processor time a SET", 1e6 * spent / sets, unit="us",
               more_is_better=False)  # fmt: skip
    for name, key in (("p99.99", "p9999_us"), ("longest", "max_us")):
        report.add(peer.name, f"{what}, {name}", result[key] / 1000, unit="ms",
                   more_is_better=False)  # fmt: skip
    for kind, count in memory_bytes(peer.pid).items():
        report.add(peer.name, f"{what}, memory, {kind}", count / MIB, unit="MiB",
                   more_is_better=False)  # fmt: skip
    written_now = disk_written_bytes(peer.folder.parent)
    if written is not None and written_now is not None:
        changed = result["operations"] * (VALUE_BYTES + len(workload.key_of(0)))
        report.add(peer.name, f"{what}, written for each byte changed",
                   (written_now - written) / changed, unit="bytes",
                   more_is_better=False)  # fmt: skip
    report.add(peer.name, f"{what}, on disk", folder_bytes(peer.folder) / MIB, unit="MiB",
               more_is_better=False)  # fmt: skip
    if not options.restart:
        return
    peer.kill()
    seconds = peer.start()
    say(f"  {peer.name:6} ready after SIGKILL: {seconds:.2f} s")
    report.add(peer.name, f"{what}, ready after SIGKILL", seconds, unit="s", more_is_better=False)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.sustained", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--peers", type=names_of, default=["dcpd", "redis-bounded"], metavar="PEER,..."
    )
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--load", action="store_true", help="write every key once before")
    parser.add_argument("--restart", action="store_true", help="kill and start again at the end")
    parser.add_argument("--png", type=Path, help="draw the figures over time into this file")
    add_output_options(parser)
    options = parser.parse_args()
    check_names(parser, options.peers, PEERS)
    return options


def main() -> int:
    options = parse_arguments()
    lines: dict[str, Lines] = {}
    with reported(options) as (report, folder):
        for run in range(options.runs):
            for name in options.peers:
                peer = PEERS[name](folder / f"{name}-{run}")
                try:
                    measure(report, options, peer, run, lines)
                finally:
                    peer.discard()
    if options.png:
        title = f"SET 8 x 64, {options.keys:,} keys, 128-byte values"
        draw(options.png, title, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
