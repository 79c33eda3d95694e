"""The command line of the simulator.

    python -m tests.sim --seed 7              one seed
    python -m tests.sim --seed 7 --trace      the same, one line per event, messages decoded
    python -m tests.sim --seeds 0..1500 -j 2  many seeds on two processors; stops at the first that
                                              fails
    python -m tests.sim --minutes 3           seeds from 0 (or from A of --seeds A..B) for some time
    python -m tests.sim --until-fail          until one fails
    python -m tests.sim --bug all --seeds 400
                                              for each planted bug, with the nodes that it takes,
                                              the first seed that shows it, the check, and how;
                                              with --keep-on, how many of the seeds do

What fails is told as a story (`sim.story`), and made smaller (`sim.shrink`); the command at the end
repeats the small one. Many seeds end with a table of what they have reached (`sim.reached`).

Exit code 0: nothing was found. 1: a violation, or a crash of the simulated code. 2: bad arguments.
With `--bug all`, 0: each bug was found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from sim.broken import KINDS, NODES_MIN
from sim.cluster_bugs import PLANTED
from sim.plan import ACTS, ASKED_ACTS, FAILOVER_ACTS, MOVE_ACTS, Plan
from sim.reached import table
from sim.run import Options, Report, replay_command
from sim.seed_range import attempt, collect_less, reports
from sim.shrink import shrink, told
from sim.story import tell
from sim.world import SECOND

VIOLATIONS_SHOWN = 10
ALL_BUGS = "all"
FOUND_WITHIN = (0, 399)
"""Within these seeds each bug has to be found."""


class Totals:
    """What many seeds amount to."""

    def __init__(self) -> None:
        self.seeds = self.failed = self.events = self.operations = self.unsure = 0
        self.virtual_ns = 0
        self.faults: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()
        self._began = time.monotonic()

    def add(self, report: Report) -> None:
        """Count a seed."""
        self.seeds += 1
        self.failed += bool(report.violations)
        self.events += report.events
        self.operations += report.operations
        self.unsure += report.unsure
        self.virtual_ns += report.virtual_ns
        self.faults.update(report.faults)
        self.reached.update(report.reached)

    def __str__(self) -> str:
        passed_s = max(time.monotonic() - self._began, 1e-9)
        return (
            f"{self.seeds:,} seeds, {self.failed} failed; {self.events:,} events,"
            f" {self.operations:,} operations, {self.virtual_ns / SECOND:,.0f} virtual seconds;"
            f" {self.seeds / passed_s:,.1f} seeds/s, {self.events / passed_s:,.0f} events/s;"
            f" {self.unsure} keys undecided"
        )


def main(words: Sequence[str]) -> int:
    """Run what the arguments say; return the exit code."""
    parser = _parser()
    arguments = parser.parse_args(words)
    if arguments.nodes == 1 and arguments.act:
        parser.error("--act is about replication; add --nodes 3")
    if arguments.forever and arguments.nodes != NODES_MIN:
        parser.error("--forever is about three nodes; add --nodes 3")
    bug = PLANTED.get(arguments.bug)
    if bug is not None and bug.nodes == 1 < arguments.nodes and bug.node is not None:
        parser.error(f"--bug {arguments.bug} is of a node alone; leave out --nodes")
    options = Options(
        nodes=arguments.nodes if bug is None else max(arguments.nodes, bug.nodes),
        has_faults=not arguments.no_faults,
        seconds=arguments.seconds,
        bug=arguments.bug,
        act=arguments.act or ("" if bug is None else bug.act),
        changes=tuple(sorted(arguments.set)),
        draw=arguments.draw,
        forever=arguments.forever,
        crash=arguments.crash,
    )
    collect_less()
    if arguments.bug == ALL_BUGS:
        return find_bugs(
            options, arguments.seeds or FOUND_WITHIN, arguments.j, keep_on=arguments.keep_on
        )
    many = arguments.seeds is not None or arguments.minutes or arguments.until_fail
    if not many:
        totals = Totals()
        report = attempt(arguments.seed, options, trace=arguments.trace)
        totals.add(report)
        _tell(report, options, shrinks=not arguments.no_shrink and not arguments.trace)
        print(totals)
        return int(bool(report.violations))
    return _run_many(arguments, options)


def _run_many(arguments: argparse.Namespace, options: Options) -> int:
    totals = Totals()
    deadline = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    for _, report in reports(_seeds(arguments), lambda _seed: options, arguments.j):
        totals.add(report)
        if report.violations:
            shrinks = not arguments.no_shrink and not arguments.keep_on
            _tell(report, options, shrinks=shrinks, is_story=not arguments.keep_on)
            if not arguments.keep_on:
                break
        if totals.seeds % 100 == 0 and sys.stderr.isatty():
            print(f"\r{totals}", end="", file=sys.stderr, flush=True)
        if deadline is not None and time.monotonic() >= deadline:
            break
    print(totals)
    faults = ", ".join(f"{name} {count}" for name, count in sorted(totals.faults.items()))
    print(f"faults: {faults or 'none'}")
    if options.nodes > 1:
        print(table(totals.reached))
    return int(totals.failed > 0)


def find_bugs(options: Options, seeds: tuple[int, int], jobs: int, *, keep_on: bool) -> int:
    """Print a table: bug, the seed that found it, how it is told. Return the exit code."""
    first, last = seeds
    missed = 0
    for bug, planted in PLANTED.items():
        one = options._replace(bug=bug, act=planted.act, nodes=planted.nodes)
        found: list[Report] = []
        for _, report in reports(range(first, last + 1), _always(one), jobs):
            if report.violations:
                found.append(report)
                if not keep_on:
                    break
        missed += not found
        share = f", {len(found)} of {last + 1 - first} seeds" if keep_on else ""
        if found:
            told = found[0].violations[0].strip().splitlines()[-1]
            print(
                f"{bug:22} seed {found[0].seed:4}{share}  {found[0].checks[0]}: {told}", flush=True
            )
        else:
            print(f"{bug:22} no seed from {first} to {last}", flush=True)
    return int(missed > 0)


def _always(options: Options) -> Callable[[int], Options]:
    return lambda _seed: options


def _tell(
    report: Report, options: Options, *, shrinks: bool = False, is_story: bool = True
) -> None:
    """Print what failed, its story, and the command that repeats it in small."""
    for violation in report.violations[:VIOLATIONS_SHOWN]:
        print(f"seed {report.seed}: {violation}", flush=True)
    more = len(report.violations) - VIOLATIONS_SHOWN
    if more > 0:
        print(f"seed {report.seed}: and {more} more")
    if report.digest:
        print(f"trace {report.digest}")
    elif report.violations and is_story:
        print(f"\n{tell(report, options)}\n", flush=True)
    if report.violations:
        print(f"replay it with: {replay_command(report.seed, options)} --trace", flush=True)
    if report.violations and shrinks and not options.changes:
        small = shrink(report.seed, options, report.checks[0])
        print(told(report.seed, options, small), flush=True)


def _seeds(arguments: argparse.Namespace) -> Iterator[int]:
    first, last = arguments.seeds or (arguments.seed, None)
    if arguments.minutes or arguments.until_fail:
        last = None
    yield from count(first) if last is None else range(first, last + 1)


def _changed(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or name not in Plan._fields:
        raise argparse.ArgumentTypeError(f"{text!r} is no field of a plan; write clients=1")
    return name, value


def _range(text: str) -> tuple[int, int]:
    first, dots, last = text.partition("..")
    if text.isdigit() and int(text):
        return 0, int(text) - 1
    if not dots or not first.isdigit() or not last.isdigit() or int(first) > int(last):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no range of seeds; write for example 0..99 or 100"
        )
    return int(first), int(last)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim", description="Simulates nodes, clients and consumers from seeds."
    )
    parser.add_argument("--seed", type=int, default=0, help="one seed, or the first of many")
    parser.add_argument("--seeds", type=_range, metavar="A..B", help="all seeds from A to B")
    parser.add_argument("--minutes", type=float, help="go on with further seeds for this time")
    parser.add_argument("--until-fail", action="store_true", help="go on until a seed fails")
    parser.add_argument("--keep-on", action="store_true", help="go on after a seed that failed")
    parser.add_argument("--trace", action="store_true", help="print one line for each event")
    parser.add_argument("--seconds", type=float, help="virtual seconds of load")
    parser.add_argument("--nodes", type=int, default=1, choices=range(1, 6))
    parser.add_argument("-j", type=int, default=1, metavar="N", help="run N seeds at once")
    parser.add_argument("--no-shrink", action="store_true", help="do not make smaller what fails")
    parser.add_argument(
        "--set", type=_changed, action="append", default=[], metavar="FIELD=VALUE",
        help="let a field of the plan (tests/sim/plan.py) have another value than the seed says",
    )  # fmt: skip
    parser.add_argument(
        "--forever", default="", choices=KINDS, help="leave something broken for good"
    )
    parser.add_argument("--draw", type=int, default=0, help="another run of the same plan")
    parser.add_argument(
        "--crash", type=int, default=0, metavar="N",
        help="n1 is killed at its Nth write, sync, rename or commit; below 0: it loses power there",
    )  # fmt: skip
    parser.add_argument("--no-faults", action="store_true", help="let nothing go wrong")
    parser.add_argument(
        "--bug",
        default="",
        choices=[*sorted(PLANTED), ALL_BUGS],
        help="put in a known bug",
    )
    parser.add_argument(
        "--act",
        default="",
        choices=sorted((*ACTS, *ASKED_ACTS, *MOVE_ACTS, *FAILOVER_ACTS)),
        help="let each seed have this act; those with operators do nothing below --nodes 4",
    )
    return parser
