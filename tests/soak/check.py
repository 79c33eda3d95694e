"""The model checker over the rules of replication, within one bound after the other.

First it finds what each wrong rule breaks, so that it is known to find something.
Each bound is searched until all its states are found or memory is used up. The search is saved
every few minutes, so the same command goes on where the last one was.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from modelcheck.__main__ import find_broken
from modelcheck.broken import ALL
from modelcheck.search import Search, collector_off
from modelcheck.values import Bounds

LADDER = (
    Bounds(3, 2, 3, 1),
    Bounds(3, 2, 3, 1, min_in_sync=1),
    Bounds(3, 2, 3, 0, branches=1),
    Bounds(3, 1, 3, 1, branches=1),
    Bounds(3, 3, 2, 1),
    Bounds(2, 3, 4, 2),
    Bounds(3, 2, 3, 2),
    Bounds(3, 1, 2, 0, restores=1, changes=1),
    Bounds(3, 1, 2, 0, min_in_sync=1, restores=1, changes=2),
    Bounds(3, 1, 4, 1),
    Bounds(4, 1, 3, 1),
    Bounds(3, 3, 3, 1),
    Bounds(3, 2, 4, 1),
    Bounds(4, 2, 3, 1),
)
"""Smaller ones first."""

STATES_MAX = 12_000_000
"""States of one bound: about 5 GiB of memory."""

SAVE_EVERY_S = 300


def soak(folder: Path, minutes: float | None, states_max: int) -> int:
    """Go through the ladder from where the last run was; return the exit code."""
    folder.mkdir(exist_ok=True)
    done_path, saved_path = folder / "done.json", folder / "search.pickle"
    done: dict[str, str] = json.loads(done_path.read_text()) if done_path.exists() else {}
    for name in ALL:
        if name not in done:
            if find_broken(name):
                return 1
            done[name] = "found"
            done_path.write_text(json.dumps(done, indent=1))
    until = None if minutes is None else time.monotonic() + minutes * 60
    for bounds in LADDER:
        if str(bounds) in done:
            print(f"{bounds}: {done[str(bounds)]}")
            continue
        search = open_search(saved_path, bounds)
        try:
            code = go_on(search, saved_path, until, states_max)
        except KeyboardInterrupt:
            search.save(saved_path)
            print(f"\nstopped at {search.states:,} states; the same command goes on")
            return 130
        if code is not None:
            return code
        word = "all" if search.is_done else "not all"
        rate = search.states / max(search.seconds, 0.01)
        done[str(bounds)] = (
            f"{search.states:,} states, {word}, {search.depth} steps, {rate:,.0f} states/s"
        )
        done_path.write_text(json.dumps(done, indent=1))
        saved_path.unlink(missing_ok=True)
        print(f"\r{bounds}: {done[str(bounds)]}")
    print("every promise held in each of these states")
    return 0


def open_search(saved_path: Path, bounds: Bounds) -> Search:
    """Return the saved search if it is within these bounds, or a new one."""
    if saved_path.exists():
        search = Search.load(saved_path)
        if search.bounds == bounds:
            return search
    return Search(bounds)


def go_on(search: Search, saved_path: Path, until: float | None, states_max: int) -> int | None:
    """Search until all is found; return the exit code if the run ends here."""
    saved_at = time.monotonic()
    with collector_off():
        while not search.is_done and search.states < states_max:
            broken = search.advance()
            if broken is not None:
                print(f"\n{search.bounds}: {broken.words}", *broken.steps, sep="\n  ")
                return 1
            now = time.monotonic()
            if until is not None and now >= until:
                search.save(saved_path)
                print(
                    f"\n{search.bounds}: {search.states:,} states so far; the same command goes on"
                )
                return 0
            if now - saved_at >= SAVE_EVERY_S:
                search.save(saved_path)
                saved_at = time.monotonic()
            line = f"{search.bounds}: {search.states:,} states, {search.depth} steps"
            print(f"\r{line}", end="", flush=True)
    return None
