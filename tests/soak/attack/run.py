"""The loop over cases, and the state file that a later run continues from.

    {"seed", "next": number of the next case, "tallies": {kind: ...}, "failures": [...]}

The file is replaced after each case. An interrupted case counts as not run. A failed case is
recorded with its seed, its reason and its folders, which are kept; then the run continues.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from clients.errors import DcpdError
from clients.testing import ServerStartError
from tests.soak.attack import (
    archives,
    arrays,
    cas,
    crowds,
    damage,
    disks,
    garbage,
    processes,
    restored,
    stale,
    starved,
)
from tests.soak.attack.case import HANG_S, AttackError, Case, Fault, NotRunError, Stage
from tests.soak.attack.probe import WRONG, Measured, Probe
from tests.soak.attack.table import Tally, from_document, table, to_document
from tests.soak.kill_writer import KillLoopError

REASON_CHARS: Final = 400
"""Characters of a failure's reason that are printed; the state file has all of it."""
SEEDS_PER_RUN: Final = 1_000_000
FOLDER: Final = ".soak-attack"
"""Where cases work. Folders of failed cases stay there."""
KINDS: Final[dict[str, tuple[int, Callable[[Case], None]]]] = {
    "kill": (2, processes.kill),
    "stall": (2, processes.stall),
    "disk": (2, disks.disk),
    "map": (1, disks.lmdb_map),
    "damage": (6, damage.run),
    "archive": (3, archives.run),
    "crowd": (2, crowds.crowd),
    "logins": (1, crowds.logins),
    "cas": (1, cas.run),
    "garbage": (2, garbage.run),
    "arrays": (2, arrays.run),
    "starved": (1, starved.run),
    "stale page": (3, stale.run),
    "restored store": (1, restored.run),
}
"""Kind -> its weight, and the function that runs a case."""


class Outcome:
    """The outcome of one case."""

    def __init__(self, case: Case, seconds: float) -> None:
        self.case = case
        self.measured = case.measured
        self.seconds = seconds
        self.kept: list[Path] = []

    @property
    def reason(self) -> str:
        """Why it failed, in one line; "" if it passed."""
        return "; ".join(f"{one.fault}: {one.text}" for one in self.case.findings).replace(
            "\n", " "
        )

    def tally(self) -> Tally:
        faults = {str(finding.fault): 0 for finding in self.case.findings}
        for finding in self.case.findings:
            faults[str(finding.fault)] += 1
        return Tally(1, faults, self.measured.worst_s, dict.fromkeys(self.case.documented, 1))


def kind_of(seed: int) -> str:
    """Return the kind of a case; it depends only on the seed."""
    weights = [weight for weight, _ in KINDS.values()]
    return random.Random(f"kind {seed}").choices(list(KINDS), weights)[0]


def run_case(seed: int, stage: Stage, kind: str | None = None) -> Outcome:
    """Run one case. Raises NotRunError."""
    name = kind or kind_of(seed)
    folder = stage.folder / f"case-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    case = Case(name, seed, folder, stage)
    began_s = time.monotonic()
    try:
        KINDS[name][1](case)
    except NotRunError:
        shutil.rmtree(folder)
        raise
    except KillLoopError as error:
        case.find(Fault.WRONG, str(error))
    except AttackError as error:
        case.find(error.fault, str(error))
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        (folder / "traceback.txt").write_text(traceback.format_exc())
        case.find(Fault.BROKEN, f"no answer in time: {last_place(error)}")
    except ServerStartError as error:
        case.find(Fault.BROKEN, f"the server did not start: {error}"[-700:])
    except (AssertionError, OSError, DcpdError, subprocess.SubprocessError) as error:
        text = f"{type(error).__name__}: {error} {last_place(error)}"
        (folder / "traceback.txt").write_text(traceback.format_exc())
        case.find(Fault.BROKEN, text[:700])
    case.rest()
    judge_probe(case, case.measured)
    outcome = Outcome(case, time.monotonic() - began_s)
    tidy(outcome, stage)
    return outcome


def judge_probe(case: Case, measured: Measured, *, hang_s: float = HANG_S) -> None:
    for name, seconds in measured.worst_s.items():
        if seconds > hang_s:
            case.find(Fault.BROKEN, f"the probe's {name} was not answered for {seconds:.1f} s")
    for text in measured.troubles:
        case.find(Fault.WRONG if WRONG in text else Fault.BROKEN, f"the probe: {text}")


def last_place(error: BaseException) -> str:
    """Return where an exception came from: the innermost line within this package."""
    rows = traceback.extract_tb(error.__traceback__)
    rows = [row for row in rows if Path(row.filename).parent == Path(__file__).parent] or rows
    return f"({Path(rows[-1].filename).name}:{rows[-1].lineno})" if rows else ""


def tidy(outcome: Outcome, stage: Stage) -> None:
    """Remove the folder of a case that passed; keep those of one that failed."""
    case = outcome.case
    if not case.findings:
        shutil.rmtree(case.folder, ignore_errors=True)
        return
    (case.folder / "case.txt").write_text(
        f"{case.kind} {case.seed}: {case.words}\n{outcome.reason}\n"
    )
    outcome.kept.append(case.folder)
    for name in case.uses:
        if folder := stage.drop(name, keep=True):
            outcome.kept.append(folder)


class Run:
    """See the module."""

    def __init__(self, state_path: Path, seed: int | None, kinds: Collection[str]) -> None:
        self._path = state_path
        state = json.loads(state_path.read_text()) if state_path.exists() else {}
        self.seed: int = state.get("seed", 1) if seed is None else seed
        if self.seed != state.get("seed", self.seed):
            state = {}
        self.next: int = state.get("next", 0)
        self.tallies = from_document(state.get("tallies", {}))
        self.failures: list[dict[str, Any]] = state.get("failures", [])
        self.kinds = list(kinds or KINDS)
        self.not_run: dict[str, str] = {}

    @property
    def cases(self) -> int:
        return sum(tally.cases for tally in self.tallies.values())

    def save(self) -> None:
        document = {
            "seed": self.seed, "next": self.next, "tallies": to_document(self.tallies),
            "failures": self.failures,
        }  # fmt: skip
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_text(json.dumps(document, indent=1))
        new.replace(self._path)

    def step(self, stage: Stage) -> Outcome | None:
        """Run the next case; return None if its kind is not wanted or cannot run."""
        seed = self.seed * SEEDS_PER_RUN + self.next
        kind = kind_of(seed)
        outcome = None
        if kind in self.kinds and kind not in self.not_run:
            try:
                outcome = run_case(seed, stage)
            except NotRunError as error:
                self.not_run[kind] = str(error)
        self.next += 1
        if outcome is not None:
            self.note(outcome)
            self.save()
        return outcome

    def note(self, outcome: Outcome) -> None:
        case = outcome.case
        self.tallies.setdefault(case.kind, Tally()).add(outcome.tally())
        if case.findings:
            self.failures.append(
                {
                    "case": case.seed, "kind": case.kind, "drawn": case.words,
                    "reason": outcome.reason, "folders": [str(path) for path in outcome.kept],
                }
            )  # fmt: skip

    def report(self) -> str:
        failures = (
            f"FAILED: scripts/soak attack --case {failure['case']}   {failure['kind']}:"
            f" {failure['reason']:.{REASON_CHARS}}"
            for failure in self.failures
        )
        return "\n".join([table(self.tallies, self.kinds, self.not_run), *failures])


def said(outcome: Outcome) -> str:
    """Return a case as one line."""
    case = outcome.case
    worst = " ".join(f"{name} {1000 * s:.0f}" for name, s in outcome.measured.worst_s.items())
    verdict = f"FAILED: {outcome.reason:.{REASON_CHARS}}" if case.findings else "ok"
    more = f" [documented: {'; '.join(case.documented)}]" if case.documented else ""
    return (
        f"{case.seed} {case.kind:8} {outcome.seconds:5.1f} s  {worst} ms  {case.words}: {verdict}"
        f"{more}"
    )


@contextmanager
def on_stage(folder: Path | None, *, is_short: bool = False) -> Iterator[Stage]:
    """Create what cases share; close it afterwards."""
    place = folder or Path(FOLDER)
    place.mkdir(parents=True, exist_ok=True)
    with Probe() as probe:
        stage = Stage(place.absolute(), probe, is_short=is_short)
        try:
            yield stage
        finally:
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            stage.close()
            signal.signal(signal.SIGINT, before)


def attack(
    state_path: Path,
    *,
    seed: int | None = None,
    kinds: Collection[str] = (),
    minutes: float | None = None,
    cases: int | None = None,
    folder: Path | None = None,
) -> int:
    """Run cases for `minutes`, or until `cases` were run in all runs; return the exit code."""
    run = Run(state_path, seed, kinds)
    until_s = None if minutes is None else time.monotonic() + 60 * minutes
    with on_stage(folder) as stage:
        try:
            while (until_s is None or time.monotonic() < until_s) and (
                cases is None or run.cases < cases
            ):
                if set(run.kinds) <= run.not_run.keys():
                    break
                if outcome := run.step(stage):
                    print(said(outcome), flush=True)
        except KeyboardInterrupt:
            print("\nstopped: the same command continues with the interrupted case")
    run.save()
    print(run.report())
    return 1 if run.failures else 0


def attack_once(seed: int, folder: Path | None = None) -> int:
    """Repeat one case; return the exit code."""
    with on_stage(folder) as stage:
        outcome = run_case(seed, stage)
    print(said(outcome))
    for path in outcome.kept:
        print(f"kept: {path}")
    return 1 if outcome.case.findings else 0
