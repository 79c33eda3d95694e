"""Simulated clusters from seeds, one after another (tests/sim).

Each seed is one whole life of nodes, clients and consumers under faults. It says how many nodes
there are, one to five. A failing seed is named with the command that replays it, and the run goes
on after it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from sim.command import attempt
from sim.run import Options, replay_command

SAVED_EVERY_S = 5.0
NODES = (3, 1, 2, 3, 4, 5)
"""How many nodes a seed has, in turn. Three are the smallest cluster that loses one without harm,
and have the most elections a second."""


def options_of(seed: int, options: Options) -> Options:
    """Return the options of a seed: those of the run, with the seed's number of nodes. Bugs belong
    to single nodes or to clusters, so a run with a bug keeps its number.
    """
    return options if options.bug else options._replace(nodes=NODES[seed % len(NODES)])


def soak(seeds_wanted: int, state_path: Path, options: Options) -> int:
    """Run this many seeds, over all runs with this state file; return the exit code."""
    state = json.loads(state_path.read_text()) if state_path.exists() else {}
    seed, events = state.get("seeds", 0), state.get("events", 0)
    failed: list[int] = state.get("failed", [])
    began = told = time.monotonic()
    began_seed = seed
    while seed < seeds_wanted:
        of_seed = options_of(seed, options)
        report = attempt(seed, of_seed)
        events += report.events
        if report.violations:
            failed.append(seed)
            print(f"\nseed {seed}: {report.violations[0]}")
            print(f"replay it with: {replay_command(seed, of_seed)} --trace")
        seed += 1
        now = time.monotonic()
        if now - told >= SAVED_EVERY_S or seed == seeds_wanted:
            told = now
            per_hour = (seed - began_seed) / max(now - began, 1e-9) * 3600
            document = {"seeds": seed, "events": events, "failed": failed}
            state_path.write_text(json.dumps(document))
            print(
                f"\r{seed:,} of {seeds_wanted:,} seeds, {per_hour:,.0f} an hour", end="", flush=True
            )
    print(f"\n{seed:,} seeds with {events:,} events: {len(failed)} failed {failed or ''}")
    return int(bool(failed))
