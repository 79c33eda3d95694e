"""Power cuts at random points of random lives of a node in memory, over all durabilities.

Each round is one life, which depends on the round's number only (`support.power_node`). The node
does everything that a real node does. Power is cut between steps, within them, and during the start
after a cut, and syncs fail. In addition, in one stretch of each life a cut is tried at every point.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from support.power_node import SHARES, Story, live

DURABILITIES = ("commit", "interval", "none")
STEPS = 60
STEPS_WITH_EVERY_POINT = 8
FAIL_SHARE = 0.1
"""Share of the steps during which a sync may fail."""


def run_round(seed: int) -> int:
    """Play one life; return its number of points."""
    story = Story(seed, DURABILITIES[seed % len(DURABILITIES)])
    live(story, STEPS, fail_share=FAIL_SHARE)
    story.shares = SHARES
    live(story, STEPS_WITH_EVERY_POINT, fail_share=FAIL_SHARE)
    return story.power.points


def soak(rounds_wanted: int, state_path: Path) -> int:
    """Play this many rounds, over all runs with this state file."""
    state = json.loads(state_path.read_text()) if state_path.exists() else {}
    seed, points = state.get("rounds", 0), state.get("points", 0)
    began, began_seed = time.monotonic(), seed
    while seed < rounds_wanted:
        try:
            points += run_round(seed)
        except BaseException:
            print(f"round {seed} failed; replay it with: scripts/soak power --round {seed}")
            raise
        seed += 1
        if seed % 20 == 0 or seed == rounds_wanted:
            rate = (seed - began_seed) / (time.monotonic() - began)
            state_path.write_text(json.dumps({"rounds": seed, "points": points}))
            print(f"\r{seed:,} of {rounds_wanted:,} lives, {rate:,.1f}/s", end="", flush=True)
    print(f"\n{seed:,} lives with {points:,} points: what was answered was there after each cut")
    return 0
