"""The command line of the replication demo: scripts/sim-demo.

Exit code 0: everything is equal and nothing is lost. 1: not so, or something stood still. 2: bad
arguments.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from examples.demos.flight_data import DataError, packaged_csv, read_flights
from sim.demo import Demo, DemoError, Script, Summary
from sim.world import SECOND

DIFFERENCES_SHOWN = 10


def main(words: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit code."""
    arguments = _parser().parse_args(words)
    began = time.monotonic()

    def say(now_ns: int, text: str) -> None:
        print(f"  {now_ns / SECOND:8.3f} s  {text}", file=sys.stderr, flush=True)

    print("  reading the flights", file=sys.stderr, flush=True)
    try:
        flights = read_flights(arguments.csv or packaged_csv())[: arguments.rows]
        documents = [
            (b"%06d:%s" % (number, flight.key[:40]), flight.document)
            for number, flight in enumerate(flights, 1)
        ]
        del flights
        print(
            f"  {len(documents):,} flights go to 3 nodes with 3 copies; the times are virtual",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        script = Script(arguments.deaths, arguments.deaths // 4)
        simulated = time.monotonic()
        summary = Demo(documents, script, say, arguments.seed).run()
    except (DataError, DemoError) as error:
        print(f"sim-demo: {error}", file=sys.stderr)
        return 1
    now = time.monotonic()
    print(summary_text(summary, now - simulated, now - began))
    return int(bool(summary.differences or summary.lost))


def summary_text(summary: Summary, simulated_s: float, time_s: float) -> str:
    """Return the summary as it is printed."""
    happened, outages = summary.happened, [each / SECOND for each in summary.outages_ns]
    kills, cuts = happened.get("kill", 0), happened.get("power cut", 0)
    deaths = (
        f"{kills + cuts} of masters ({kills} killed, {cuts} power cuts), "
        f"{happened.get('blackout', 0)} power cut of all nodes, "
        f"{happened.get('consumer', 0)} of the consumer"
    )
    outage = sum(outages) / max(len(outages), 1)
    writes = (
        f"{summary.answered:,} of {summary.documents:,} writes, {summary.repeated:,} sent again "
        "because no answer came"
    )
    consumer_rollbacks = summary.consumer_rollbacks
    writes_per_s = summary.answered / simulated_s
    rows = (
        ("answered", writes),
        ("lost", f"{summary.lost:,}"),
        ("deaths", deaths),
        ("one-way cuts", f"{happened.get('cut', 0)}"),
        ("no master", f"{outage:.2f} s on average, {max(outages, default=0):.2f} s at most"),
        ("failovers", f"{summary.failovers:,} of partitions, and {summary.handovers:,} handovers"),
        (
            "rollbacks",
            f"{summary.replica_rollbacks} of replicas, {consumer_rollbacks} of the consumer",
        ),
        ("differences", f"{len(summary.differences):,}"),
        ("simulated", f"{summary.virtual_ns / SECOND:.1f} s, {summary.events:,} events"),
        ("rate", f"{summary.events / simulated_s:,.0f} events/s, {writes_per_s:,.0f} writes/s"),
        ("time", f"{time_s:.1f} s"),
    )
    is_equal = not (summary.differences or summary.lost)
    title = "sim-demo: all equal" if is_equal else "sim-demo: NOT equal"
    problems = [f"  {problem}" for problem in summary.differences[:DIFFERENCES_SHOWN]]
    more = len(summary.differences) - DIFFERENCES_SHOWN
    if more > 0:
        problems.append(f"  and {more:,} more")
    return "\n".join((title, *(f"  {name:<14}{text}" for name, text in rows), *problems))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/sim-demo", description="Flights through a simulated cluster that fails."
    )
    parser.add_argument("--rows", type=int, help="only the first flights", metavar="N")
    parser.add_argument("--deaths", type=int, default=30, help="deaths of masters", metavar="N")
    parser.add_argument("--seed", type=int, default=1, help="another one is another story")
    parser.add_argument("--csv", type=Path, help="another file of the same columns, also zipped")
    return parser


if __name__ == "__main__":
    sys.exit(main())
