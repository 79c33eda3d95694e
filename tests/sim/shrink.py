"""Makes a failing seed smaller: fewer faults, nodes, clients and keys, and less time, as long as
the same check fails.

A smaller plan draws other things, so it is another run: each candidate is tried with a few draws.
The one that fails is the next to be made smaller. What is left is named by options, so one command
repeats it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from sim.checks import DURING, Violation
from sim.plan import Plan
from sim.run import Options, Simulation, replay_command
from sim.story import observed
from sim.world import MS, SECOND

DRAWS: Final = 3
"""Runs of each candidate: a fault seldom needs one moment only."""
TRIES_MAX: Final = 120
SECONDS_MAX: Final = 40.0
"""Real time. What is reached by then is told."""
LATER_NS: Final = SECOND // 2
"""How much later than at first the check may fail in a smaller run, if it is one that can fail at
any time. Then the rest of a run need not be waited for."""
SHORTEST_NS: Final = 200 * MS
_NUMBERS: Final = (
    ("consumers", 1), ("clients", 1), ("keys", 2), ("partitions", 2), ("pipeline", 1),
)  # fmt: skip
"""Fields that are halved, and their smallest values."""


class Shrunk(NamedTuple):
    """What is left of a failing seed."""

    options: Options
    found: list[Violation]
    tries: int


def shrink(
    seed: int,
    options: Options,
    check: str,
    *,
    tries_max: int = TRIES_MAX,
    seconds_max: float = SECONDS_MAX,
) -> Shrunk:
    """Return the smallest options that were found with which the same check fails."""
    until = time.monotonic() + seconds_max
    simulation, _, found = observed(seed, options, [check])
    until_ns = simulation.world.now_ns + LATER_NS if check in DURING else None
    best, tries = Shrunk(options, found, 0), 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(seed, best.options):
            for draw in dict.fromkeys((best.options.draw, *range(DRAWS))):
                if tries >= tries_max or time.monotonic() >= until:
                    return best._replace(tries=tries)
                tries += 1
                if failed := _fails(seed, candidate._replace(draw=draw), check, until_ns):
                    best = Shrunk(candidate._replace(draw=draw), failed, tries)
                    is_smaller = True
                    break
            if is_smaller:
                break
    return best._replace(tries=tries)


def _fails(seed: int, options: Options, check: str, until_ns: int | None) -> list[Violation]:
    """Return how the check fails with these options; []: it does not, until then."""
    _, _, found = observed(seed, options, [check], until_ns=until_ns)
    return [violation for violation in found if violation.check == check]


def _smaller(seed: int, options: Options) -> Iterator[Options]:
    """Yield options with less of something, those that take most away first."""
    plan = Simulation(seed, options).plan
    if options.nodes > 3:
        yield options._replace(nodes=options.nodes - 1)
    if plan.faults:
        yield _changed(options, faults="")
    if plan.acts:
        yield _changed(options, acts="")
    for name in ("faults", "acts"):
        words: tuple[str, ...] = getattr(plan, name)
        if len(words) > 1:
            half = len(words) // 2
            for some in (words[:half], words[half:]):
                yield _changed(options, **{name: ",".join(some)})
            for word in words:
                yield _changed(options, **{name: ",".join(each for each in words if each != word)})
    yield from _shorter(options, plan)
    for name, least in _NUMBERS:
        value = len(plan.keys) if name == "keys" else getattr(plan, name)
        if value > least:
            yield _changed(options, **{name: str(max(least, value // 2))})


def _shorter(options: Options, plan: Plan) -> Iterator[Options]:
    """Yield options with a load that ends earlier."""
    for share in (2, 1.25):
        load_ns = int(plan.load_ns / share) // MS * MS
        if load_ns >= SHORTEST_NS:
            yield _changed(options, load_ns=str(load_ns))


def _changed(options: Options, **values: str) -> Options:
    changes = dict(options.changes) | values
    return options._replace(changes=tuple(sorted(changes.items())))


def told(seed: int, before: Options, shrunk: Shrunk) -> str:
    """Return what was made smaller, and the command that repeats it."""
    old, new = Simulation(seed, before).plan, Simulation(seed, shrunk.options).plan
    parts = [
        f"{len(old.faults)} to {len(new.faults)} kinds of faults",
        f"{len(old.acts)} to {len(new.acts)} acts",
        f"{before.nodes} to {shrunk.options.nodes} nodes",
        f"{old.clients} to {new.clients} clients",
        f"{old.load_ns / SECOND:g} to {new.load_ns / SECOND:g} s of load",
    ]
    return (
        f"made smaller in {shrunk.tries} tries: {', '.join(parts)}\n"
        f"repeat it with: {replay_command(seed, shrunk.options)}"
    )
