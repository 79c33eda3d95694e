"""A second judge of histories: Porcupine, in a process of its own (tests/foreign/go/porcupine).

`scripts/soak cluster --porcupine` has the histories of each round judged by it, too. `soak` has
those of simulated seeds judged by it and by `sim.checkers.linearizable`, key by key. In each seed
one history more has an answer that nobody can have had: both have to refuse it. Judges that do not
agree end the run.

Keys of partitions whose history was cut back are left out: the checker in Python judges them in
pieces, where nothing is known of the document at first.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

from sim import facts as simulated
from sim.checkers import linearizable as of_seeds
from sim.checkers.expiries import Expiries
from sim.checks import failovers
from sim.run import Options, Simulation
from tests.soak.cluster import linearizable as of_rounds
from tests.soak.cluster.history import Kind, Operation, Value
from tests.soak.simulate import options_of

PROGRAM: Final = Path(__file__).parents[2] / ".venv" / "go" / "porcupine"
LIMIT: Final = "10s"
"""For one history. Most take less than a millisecond."""
OK: Final = "Ok"
ILLEGAL: Final = "Illegal"
UNKNOWN: Final = "Unknown"
PLANTED: Final = "planted"
"""The name of the history with an answer that nobody can have had, and that answer."""
SEEDS_AT_ONCE: Final = 16
Row = dict[str, Any]
"""An operation as the program reads it."""
Rows = Mapping[str, Sequence[Row]]
"""The histories of keys by their names."""


class JudgeError(Exception):
    """The judges do not agree, or a history is wrong; the text has it."""


def judged(histories: Rows) -> dict[str, str]:
    """Return what Porcupine says to each history. Raises JudgeError if the program is missing."""
    if not PROGRAM.exists():
        raise JudgeError(f"{PROGRAM} is not there: scripts/go-consumers builds it, and needs Go")
    lines = [
        json.dumps({"name": name, "operations": operations})
        for name, operations in histories.items()
    ]
    done = subprocess.run(
        [str(PROGRAM), LIMIT], input="\n".join(lines), text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise JudgeError(f"Porcupine ended with {done.returncode}: {done.stderr[-2000:]}")
    found = {}
    for line in done.stdout.splitlines():
        verdict, name = line.split("\t")
        found[name] = verdict
    assert found.keys() == histories.keys(), "each history has a verdict"
    return found


def compared(own: Mapping[str, str], rows: Rows) -> Counter[str]:
    """Have histories judged by Porcupine; return how many there are with each verdict. Raises
    JudgeError if it says otherwise than `own`, or passes what is planted.
    """
    counts: Counter[str] = Counter()
    for name, theirs in judged(rows).items():
        if name == PLANTED:
            if OK in {own[name], theirs}:
                raise JudgeError(f"a wrong history is {own[name]} here, {theirs} for Porcupine")
        elif UNKNOWN in {own[name], theirs}:
            counts[UNKNOWN] += 1
        elif own[name] == theirs == OK:
            counts[OK] += 1
        else:
            text = json.dumps(rows[name])
            raise JudgeError(f"{name} is {own[name]} here, {theirs} for Porcupine: {text}")
    return counts


# -- rounds of real processes ----------------------------------------------------------------------


def judge_round(histories: Mapping[bytes, Sequence[Operation]]) -> Counter[str]:
    """Have the histories of a round judged by both. Raises JudgeError."""
    named = {repr(key): [*history] for key, history in histories.items()}
    for history in named.values():
        at = next((at for at, each in enumerate(history) if each.kind is Kind.READ), None)
        if at is not None:
            wrong = history[at]._replace(found=PLANTED.encode())
            named[PLANTED] = [*history[:at], wrong, *history[at + 1 :]]
            break
    own = {name: _own_of_round(history) for name, history in named.items()}
    return compared(own, {name: [*map(row_of, history)] for name, history in named.items()})


def _own_of_round(history: Sequence[Operation]) -> str:
    try:
        return OK if of_rounds.violation_of(history) is None else ILLEGAL
    except of_rounds.TooHardError:
        return UNKNOWN


def row_of(operation: Operation) -> Row:
    """Return an operation of a round for the program."""
    kind, found = operation.kind, operation.found
    row: Row = {"called": operation.called_ns, "returned": operation.returned_ns}
    row |= {"cas": operation.cas, "outcome": "ok"}
    if kind is Kind.READ:
        outcome = "absent" if found is None else "ok"
        return row | {"kind": "get", "outcome": outcome, "found": _text(found)}
    if kind is Kind.ADD:
        return row | {"kind": "increment", "argument": "1", "initial": "1", "found": _text(found)}
    row |= {"kind": "set", "argument": _text(operation.value)}
    if kind is Kind.SWAP:
        outcome = "exists" if found is False else "ok"
        row |= {"expected": _text(operation.expected), "outcome": outcome}
    return row


def _text(value: Value) -> str | None:
    if value is None:
        return None
    return str(value) if isinstance(value, int) else value.decode("latin-1")


# -- simulated seeds -------------------------------------------------------------------------------


def judge_seed(seed: int) -> Counter[str]:
    """Run a seed and have its histories judged by both; see `compared`."""
    simulation = Simulation(seed, options_of(seed, Options()))
    report = simulation.run()
    if report.violations:
        raise JudgeError(f"seed {seed} fails by itself: {report.violations[0]}")
    facts, plan = simulation.facts, simulation.plan
    operations = [*facts.operations, *Expiries(plan).events(facts.operations)]
    cuts = [*facts.excuses, *failovers(facts, plan)]
    cut = {each.vb_id for each in cuts if each.kind != "purge"}
    histories = _by_key(operations)
    kept = {name: each for name, each in histories.items() if each[0].vb_id not in cut}
    for history in kept.values():
        if wrong := _with_a_wrong_answer(history):
            kept[PLANTED] = wrong
            break
    own = {name: _own_of_seed(history) for name, history in kept.items()}
    rows = {name: [*rows_of_seed(history)] for name, history in kept.items()}
    try:
        return compared(own, rows) + Counter(
            {"cut": len(histories) - len(kept) + (PLANTED in kept)}
        )
    except JudgeError as error:
        raise JudgeError(f"seed {seed}: {error}") from None


def _by_key(operations: Iterable[simulated.Operation]) -> dict[str, list[simulated.Operation]]:
    by_key: dict[str, list[simulated.Operation]] = defaultdict(list)
    for each in operations:
        if each.kind is not simulated.Kind.OBSERVE:  # it is about a partition
            by_key[f"{each.collection:x} {each.key!r}"].append(each)
    return by_key


def _own_of_seed(history: Sequence[simulated.Operation]) -> str:
    verdict = of_seeds.search(history)
    if not verdict.is_sure:
        return UNKNOWN
    return ILLEGAL if verdict.problem else OK


def _with_a_wrong_answer(history: list[simulated.Operation]) -> list[simulated.Operation]:
    """Return a history in which a read found what nobody wrote; []: there is no read."""
    for at, each in enumerate(history):
        if each.kind is simulated.Kind.GET and each.outcome is simulated.Outcome.OK:
            wrong = copy.copy(each)
            wrong.value = PLANTED.encode()
            return [*history[:at], wrong, *history[at + 1 :]]
    return []


def rows_of_seed(history: Iterable[simulated.Operation]) -> Iterator[Row]:
    """Yield the operations of a simulated key for the program."""
    for each in history:
        outcome = each.outcome
        is_known = outcome in simulated.DEFINITE
        if outcome in simulated.NOTHING_DONE or (each.kind is simulated.Kind.GET and not is_known):
            continue
        yield {
            "kind": each.kind.name.lower(),
            "called": each.invoked_ns,
            "returned": each.ended_ns if is_known else None,
            "outcome": outcome.name.lower() if outcome is not None and is_known else "",
            "argument": _text(each.argument),
            "asked": each.cas_asked,
            "initial": None if each.initial is None else str(each.initial),
            "found": _text(each.value) if outcome is simulated.Outcome.OK else None,
            "cas": each.cas,
        }


def soak(seeds_wanted: int, state_path: Path, jobs: int | None = None) -> int:
    """Judge this many seeds, over all runs with this state file; return the exit code. `jobs`: how
    many at once; None: one for each processor.
    """
    state: dict[str, Any] = {"seeds": 0, "counts": {}}
    if state_path.exists():
        state |= json.loads(state_path.read_text())
    counts, began_s, begun = Counter(state["counts"]), time.monotonic(), state["seeds"]
    with ProcessPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        for first in range(begun, seeds_wanted, SEEDS_AT_ONCE):
            after = min(first + SEEDS_AT_ONCE, seeds_wanted)
            for found in pool.map(judge_seed, range(first, after)):
                counts += found
            state_path.write_text(json.dumps({"seeds": after, "counts": counts}))
            rate = (after - begun) / (time.monotonic() - began_s)
            print(f"\r{after:,} of {seeds_wanted:,} seeds, {rate:.1f}/s", end="", flush=True)
    print(f"\n{seeds_wanted:,} seeds: {counts_words(counts)}")
    return 0


def counts_words(counts: Mapping[str, int]) -> str:
    """Say in words what `compared` has counted."""
    return (
        f"{counts.get(OK, 0):,} histories judged the same by both, {counts.get(UNKNOWN, 0):,} "
        f"given up by one, {counts.get('cut', 0):,} of cut partitions left out"
    )
