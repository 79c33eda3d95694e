"""Simulated clusters from seeds, on all processors (tests/sim).

Each seed is one whole life of nodes, clients and consumers under faults. It says how many nodes
there are, one to five. Every fourth round has an act that only such ranges ask for, and every
second one of a node alone ends its process at a write or sync, each in turn. What fails goes into a
table with the command that repeats it, and the run goes on. The table, and what the seeds have
reached, are in the state file: a run that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from sim.plan import ASKED_ACTS
from sim.reached import table
from sim.run import Options, Report, replay_command
from sim.seed_range import collect_less, reports

SAVED_EVERY_S = 5.0
NODES = (3, 1, 2, 3, 4, 5)
"""How many nodes a seed has, in turn. Three are the smallest cluster that loses one without harm,
and have the most elections a second."""
ROUNDS_OF_ACTS = 4
"""One round of so many has an asked act where it has three nodes."""
CRASH_POINTS = 250
"""Every second seed of a node alone has no faults but one: the process ends at a write, sync,
rename or commit, each time at the next one."""
CRASH_LOAD_S = 0.2
SENTENCE_CHARS = 160


def options_of(seed: int, options: Options) -> Options:
    """Return the options of a seed: those of the run, with the seed's number of nodes and its act.
    Bugs belong to single nodes or to clusters, so a run with a bug keeps its number.
    """
    if options.bug:
        return options
    turn, at = divmod(seed, len(NODES))
    act = ""
    if NODES[at] == 3 and turn % ROUNDS_OF_ACTS == ROUNDS_OF_ACTS - 1:
        act = ASKED_ACTS[turn // ROUNDS_OF_ACTS % len(ASKED_ACTS)]
    if NODES[at] == 1 and turn % 2:
        crash = 1 + turn // 2 % CRASH_POINTS
        crash = -crash if turn // 2 % 2 else crash
        return options._replace(nodes=1, crash=crash, seconds=CRASH_LOAD_S, has_faults=False)
    return options._replace(nodes=NODES[at], act=act)


def soak(seeds_wanted: int, state_path: Path, options: Options, jobs: int | None = None) -> int:
    """Run this many seeds, over all runs with this state file; return the exit code. `jobs`: how
    many at once; None: one for each processor.
    """
    state: dict[str, Any] = json.loads(state_path.read_text()) if state_path.exists() else {}
    found: list[dict[str, Any]] = state.get("found", [])
    reached = Counter(state.get("reached", {}))
    begun, events = state.get("seeds", 0), state.get("events", 0)
    began = saved = time.monotonic()
    collect_less()
    for of_seed, report in reports(
        range(begun, seeds_wanted), lambda seed: options_of(seed, options), jobs or _processors()
    ):
        events += report.events
        reached.update(report.reached)
        if report.violations:
            found.append(_row(report, of_seed))
            print(f"\nseed {report.seed}: {report.violations[0]}")
            print(f"replay it with: {found[-1]['command']}")
        now, done = time.monotonic(), report.seed + 1
        if now - saved >= SAVED_EVERY_S or done == seeds_wanted:
            saved = now
            per_hour = (done - begun) / max(now - began, 1e-9) * 3600
            document = {"seeds": done, "events": events, "found": found, "reached": reached}
            state_path.write_text(json.dumps(document))
            print(
                f"\r{done:,} of {seeds_wanted:,} seeds, {per_hour:,.0f} an hour", end="", flush=True
            )
    failed = [row["seed"] for row in found]
    print(f"\n{seeds_wanted:,} seeds with {events:,} events: {len(found)} failed {failed or ''}")
    print(table(reached))
    for row in found:
        print(f"{row['check']:16}  {row['command']}\n    {row['what']}")
    return int(bool(found))


def _row(report: Report, options: Options) -> dict[str, Any]:
    """Return what the table has of a seed that failed."""
    return {
        "seed": report.seed,
        "check": report.checks[0],
        "what": report.violations[0].strip().splitlines()[-1][:SENTENCE_CHARS],
        "command": replay_command(report.seed, options),
    }


def _processors() -> int:
    return len(os.sched_getaffinity(0))
