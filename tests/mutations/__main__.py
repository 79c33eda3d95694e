"""python -m tests.mutations: apply each mutation to a copy of the project and run its tests there.

Prints a Markdown table; exits with 1 if a mutation survives, with 2 if one cannot be applied.
The first test that fails with a mutation has found it. That test is then run without the mutation:
if it fails again, it has found nothing. A run that reaches its time limit finds nothing either.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.mutations.mutation import Mutation
from tests.mutations.table import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("dcp", "vbucket", "failover", "clients")
LOOPS = "vbucket/native/loops.*.so"
LIMIT_S = 240.0
"""For the tests of one mutation. On an idle machine they take seconds."""
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.so", "*.pyd", "compiled_sources.txt")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class AnchorError(Exception):
    """The old text of a mutation is not exactly once in the product code."""


class Finding(NamedTuple):
    """What became of one mutation. `test`: what found it, "" for a survivor."""

    mutation: Mutation
    place: str
    test: str
    seconds: float
    note: str = ""


def place_of(mutation: Mutation, root: Path = ROOT) -> Path:
    """Return the file that has a mutation's old text. Raises AnchorError."""
    paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    found = [path for path in paths for _ in range(path.read_text().count(mutation.old))]
    if len(found) != 1:
        where = ", ".join(str(path.relative_to(root)) for path in found) or "nowhere"
        raise AnchorError(
            f"{mutation.name}: its old text must be exactly once in {', '.join(PACKAGES)}; it is"
            f" {len(found)} times ({where}). Adapt tests/mutations/table.py:\n{mutation.old}"
        )
    return found[0]


def files_of_tests(mutation: Mutation, root: Path = ROOT) -> list[str]:
    """Return the paths of a mutation's test files. Raises AnchorError where one is missing."""
    paths = []
    for name in mutation.tests:
        found = list((root / "tests").rglob(f"{name}.py"))
        if len(found) != 1:
            raise AnchorError(
                f"{mutation.name}: {len(found)} files tests/**/{name}.py, one is wanted."
                " Adapt tests/mutations/table.py."
            )
        paths.append(str(found[0].relative_to(root)))
    return paths


def copy_project(target: Path) -> None:
    """Copy what the tests need."""
    for path in ROOT.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name, ignore=_LEFT_OUT)
        else:
            shutil.copyfile(path, target / path.name)


def run_tests(folder: Path, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Run tests in a copy; return pytest's exit code (None: the time limit) and what it printed."""
    environment = os.environ | {
        "PYTHONPATH": f"{folder}:{folder / 'tests'}",
        "HYPOTHESIS_PROFILE": "mutate",
    }
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
        f"--basetemp={folder.with_suffix('.tmp')}", *tests,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return None, ""
    return process.returncode, output


def _place_loops(folder: Path, *, are_needed: bool) -> None:
    for built in ROOT.glob(LOOPS):
        copy = folder / built.relative_to(ROOT)
        if are_needed:
            shutil.copyfile(built, copy)
        else:
            copy.unlink(missing_ok=True)


def try_mutation(mutation: Mutation, folder: Path, limit_s: float) -> Finding:
    """Apply a mutation in a copy, run its tests, and take it back."""
    path = place_of(mutation, folder)
    place = str(path.relative_to(folder))
    tests = files_of_tests(mutation, folder)
    sound = path.read_text()
    _place_loops(folder, are_needed=mutation.needs_loops)
    path.write_text(sound.replace(mutation.old, mutation.new))
    began = time.monotonic()
    try:
        code, output = run_tests(folder, tests, limit_s)
    finally:
        path.write_text(sound)
    seconds = time.monotonic() - began
    if code is None:
        return Finding(mutation, place, "", seconds, f"nothing within {limit_s:g} s")
    if code == 0:
        return Finding(mutation, place, "", seconds, "all tests passed")
    failed = _FAILED.search(output)
    if code != 1 or failed is None:
        return Finding(mutation, place, "", seconds, f"pytest ended with {code}: {output[-300:]!r}")
    code, output = run_tests(folder, [failed[1]], limit_s)
    if code != 0:
        note = f"{failed[1]} fails without the mutation too"
        return Finding(mutation, place, "", seconds, note)
    return Finding(mutation, place, failed[1], seconds)


def try_all(mutations: Sequence[Mutation], jobs: int, limit_s: float) -> list[Finding]:
    """Try mutations, `jobs` at a time, each in a copy of its own."""
    with tempfile.TemporaryDirectory(prefix="dcpd-mutations-") as name:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(jobs):
            copy = Path(name) / str(number)
            copy.mkdir()
            copy_project(copy)
            copies.put(copy)

        def attempt(mutation: Mutation) -> Finding:
            copy = copies.get()
            try:
                finding = try_mutation(mutation, copy, limit_s)
            finally:
                copies.put(copy)
            print(row_of(finding), flush=True)
            return finding

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(attempt, mutations))


def row_of(finding: Finding) -> str:
    """Return a finding as a row of the Markdown table."""
    found_by = f"`{finding.test}`" if finding.test else f"**survived**: {finding.note}"
    return f"| {finding.mutation.name} | `{finding.place}` | {found_by} | {finding.seconds:.1f} |"


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("--name", action="append", help="only this mutation; may be repeated")
    parser.add_argument("--list", action="store_true", help="print names, places and tests")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default 2)")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="time limit of each")
    asked = parser.parse_args()
    by_name = {mutation.name: mutation for mutation in MUTATIONS}
    unknown = set(asked.name or ()) - set(by_name)
    if unknown:
        print(f"no mutation {', '.join(sorted(unknown))}; see --list", file=sys.stderr)
        return 2
    mutations = [by_name[name] for name in asked.name] if asked.name else list(MUTATIONS)
    try:
        places = [(place_of(mutation), files_of_tests(mutation)) for mutation in mutations]
    except AnchorError as error:
        print(error, file=sys.stderr)
        return 2
    if asked.list:
        for mutation, (path, tests) in zip(mutations, places, strict=True):
            print(f"{mutation.name}  {path.relative_to(ROOT)}  {' '.join(tests)}")
        return 0
    print("| mutation | in | found by | seconds |\n|---|---|---|---|")
    survivors = [f for f in try_all(mutations, asked.jobs, asked.limit_s) if not f.test]
    print(f"\n{len(mutations) - len(survivors)} of {len(mutations)} found")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
