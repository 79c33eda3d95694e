"""All figures of docs/performance.md with one command.

    python -m benchmarks.all --quick                 every part with short runs
    python -m benchmarks.all --full --out figures    as in docs/performance.md
    python -m benchmarks.all --quick --only set,backup

It runs the other benchmarks one after another, each in its own process, and writes what they print
into figures.md in the output folder, with pictures of the long runs beside it. The page says in
which form dcpd ran: `scripts/install bench` installs the default one, with the loops in C. Between
them it times a fixed loop of Python: its spread says how much the machine itself varied in the same
run. A part that fails is named at the end, with exit code 1, and does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.child_process import say
from benchmarks.report import number_text
from benchmarks.run import check_names, form_told, names_of

LOOP_ROUNDS: Final = 2_000_000
LOOPS: Final = 3
"""Of the fixed loop, before each part and after the last one."""
OUT: Final = "{out}"
"""Stands for the output folder in the arguments below."""


class Part(NamedTuple):
    """One benchmark: what it shows, its module, and the arguments of a quick and of a full run."""

    title: str
    module: str
    quick: str
    full: str


PARTS: Final[dict[str, Part]] = {
    "core": Part("Processor time of the core", "cpu",
                 "--keys 20000 --operations 20000", "--keys 1000000 --operations 200000"),
    "set": Part("SETs beside Redis", "run", "--only generator,set --runs 1 --seconds 3",
                "--only generator,set --runs 5"),
    "loaded": Part("Reads and streams beside Redis", "run",
                   "--only catchup,memory,get,serve,tail,idle,restart --runs 1 --keys 100000",
                   "--only catchup,memory,get,serve,tail,idle,restart --runs 5"),
    "everyone": Part("Clients of every kind", "run",
                     "--only plain,cold,many,large,events --runs 1 --seconds 2 --keys 50000",
                     "--only plain,cold,many,large,events --runs 3"),
    "sustained": Part("Ten minutes of uniform SETs", "sustained",
                      f"--seconds 30 --keys 200000 --png {OUT}/sustained.png",
                      f"--seconds 600 --keys 1000000 --load --restart --png {OUT}/sustained.png"),
    "disk": Part("The disk alone: one commit group, at the rate of the ten minutes", "disk",
                 "--seconds 5 --rate 400", "--seconds 120 --rate 400"),
    "large": Part("Ten million keys", "sustained",
                  "--peers dcpd --seconds 10 --keys 300000 --load --restart",
                  "--peers dcpd,redis-bounded --seconds 40 --keys 10000000 --load --restart"),
    "backup": Part("Backup and restore", "backup", "--documents 100000 --rounds 1",
                   "--documents 1000000 --rounds 3"),
    "pauses": Part("Pauses of the loop", "pauses", "--seconds 5", "--seconds 60"),
    "subdocs": Part("Sub-documents", "subdocs", "", ""),
    "arrays": Part("Look-ups into a large array", "subdoc_large", "--lookups 5", "--lookups 40"),
    "replication": Part("Replication in one process", "replication", "", ""),
}  # fmt: skip


class Outcome(NamedTuple):
    """What a part printed; `trouble` is empty if it succeeded."""

    printed: str
    seconds: float
    trouble: str


def fixed_loop() -> float:
    """Return the milliseconds that a loop of always the same work takes."""
    began = time.perf_counter()
    total = 0
    for number in range(LOOP_ROUNDS):
        total += number & 7
    assert total
    return 1000 * (time.perf_counter() - began)


def command_of(part: Part, out: Path, *, is_full: bool) -> list[str]:
    """Return the arguments after `python`, without the interpreter."""
    arguments = (part.full if is_full else part.quick).replace(OUT, str(out))
    return ["-m", f"benchmarks.{part.module}", *shlex.split(arguments)]


def run_part(arguments: Sequence[str]) -> Outcome:
    """Run a benchmark; its progress goes to stderr."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    trouble = f"exit code {done.returncode}" if done.returncode else ""
    return Outcome(done.stdout.strip(), time.perf_counter() - began, trouble)


def table_of(printed: str) -> str:
    """Return one JSON document of numbers as a table; "" if it is something else."""
    try:
        document = json.loads(printed)
    except ValueError:
        return ""
    if not isinstance(document, dict) or not all(
        isinstance(value, int | float) for value in document.values()
    ):
        return ""
    rows = "".join(f"| {name} | {number_text(value)} |\n" for name, value in document.items())
    return f"| figure | value |\n| --- | --- |\n{rows}"


def section_of(part: Part, arguments: Sequence[str], outcome: Outcome) -> str:
    """Return a part of the page."""
    printed = outcome.printed
    if not printed.startswith("|"):
        printed = table_of(printed) or f"```\n{printed}\n```"
    told = f"\n\nIt failed: {outcome.trouble}." if outcome.trouble else ""
    return (
        f"## {part.title}\n\n`python {shlex.join(arguments)}`, {outcome.seconds:.0f} s{told}\n\n"
        f"{printed}\n"
    )


def noise_of(loops: Sequence[float]) -> str:
    """Say how much the fixed loop varied."""
    middle = statistics.median(loops)
    spread = 100 * (max(loops) - min(loops)) / middle
    return (
        f"A fixed loop took {number_text(middle)} ms (median of {len(loops)}; "
        f"{number_text(min(loops))} to {number_text(max(loops))}, a spread of {spread:.0f} %). "
        "Differences below that spread mean nothing.\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.all", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--quick", action="store_true", help="short runs, to see that all works")
    size.add_argument("--full", action="store_true", help="as documented; more than an hour")
    parser.add_argument("--only", type=names_of, default=list(PARTS), metavar="PART,...",
                        help=f"of {', '.join(PARTS)}")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the results")
    options = parser.parse_args()
    check_names(parser, options.only, PARTS)
    options.out.mkdir(parents=True, exist_ok=True)
    sections, failed, loops = [], [], [fixed_loop() for _ in range(LOOPS)]
    for name in options.only:
        part = PARTS[name]
        arguments = command_of(part, options.out, is_full=options.full)
        say(f"{name}: python {shlex.join(arguments)}")
        outcome = run_part(arguments)
        loops += [fixed_loop() for _ in range(LOOPS)]
        sections.append(section_of(part, arguments, outcome))
        failed += [name] if outcome.trouble else []
    form = f"dcpd ran {form_told()}.\n"
    page = "\n".join(["# Figures\n", form, noise_of(loops), *sections])
    (options.out / "figures.md").write_text(page)
    print(page)
    for name in failed:
        say(f"failed: {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
