"""python -m tests.modelcheck: searches all states of a small cluster under the product's rules.

Without --broken it expects that every promise holds in every state. With --broken it expects to
find what the named wrong rule breaks, and prints the steps. Exit code 0 if it is as expected.
`scripts/soak check` runs larger bounds and can be resumed.
"""

from __future__ import annotations

import argparse
import sys

from .broken import ALL
from .rules import RIGHT
from .search import Search
from .values import Bounds


def main() -> int:
    default = Bounds()
    parser = argparse.ArgumentParser(
        prog="python -m tests.modelcheck",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--replicas", type=int, choices=range(1, 6), default=default.replicas)
    parser.add_argument("--records", type=int, default=default.writes)
    parser.add_argument("--epochs", type=int, default=default.epochs)
    parser.add_argument("--cuts", type=int, default=default.cuts, help="power cuts")
    parser.add_argument("--min-in-sync", type=int, default=0, help="default: a majority")
    parser.add_argument("--branches", type=int, choices=(0, 1), default=0)
    parser.add_argument("--moves", type=int, default=0, help="copies dropped and added")
    parser.add_argument("--restores", type=int, default=0, help="of the store, to an older copy")
    parser.add_argument("--changes", type=int, default=default.changes, help="of the record")
    parser.add_argument("--states", type=int, help="stop at this many states")
    parser.add_argument("--broken", choices=[*ALL, "all"], help="a rule that is wrong")
    arguments = parser.parse_args()
    if arguments.broken:
        names = ALL if arguments.broken == "all" else [arguments.broken]
        return max(find_broken(name) for name in names)
    bounds = Bounds(
        arguments.replicas,
        arguments.records,
        arguments.epochs,
        arguments.cuts,
        arguments.min_in_sync,
        arguments.branches,
        arguments.moves,
        arguments.restores,
        arguments.changes,
    )
    search = Search(bounds, RIGHT)
    broken = search.run(arguments.states)
    print(f"{bounds}: {figures(search)}")
    if broken is not None:
        print(f"BROKEN: {broken.words}", *broken.steps, sep="\n  ")
        return 1
    if not search.is_done:
        print("stopped before all states were found: no promise was broken so far")
        return 1
    print("all states found: every promise holds in each of them")
    return 0


def find_broken(name: str) -> int:
    """Search with one wrong rule and print what it breaks; return the exit code."""
    rule = ALL[name]
    search = Search(rule.bounds, rule.rules)
    broken = search.run()
    print(f"{name} ({rule.words}): {figures(search)}")
    if broken is None:
        print("  NOT FOUND: no promise was broken")
        return 1
    print(f"  {broken.words}, in {len(broken.steps)} steps:")
    print(*(f"  {number}. {step}" for number, step in enumerate(broken.steps, 1)), sep="\n")
    return 0


def figures(search: Search) -> str:
    """Return what a search has done, in figures."""
    rate = search.states / max(search.seconds, 0.01)
    return (
        f"{search.states:,} states, up to {search.depth} steps,"
        f" {search.seconds:,.1f} s of processor time, {rate:,.0f} states/s"
    )


if __name__ == "__main__":
    sys.exit(main())
