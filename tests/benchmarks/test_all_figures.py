"""One command for all figures: sections, the machine's noise, failures, and figures over time."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import all as all_figures
from benchmarks.generator import Timeline
from benchmarks.run import about, form_told
from benchmarks.timeline import Lines, Sample, draw, grouped, since_measuring
from vbucket.native.form import form_text

PNG_MAGIC = b"\x89PNG\r\n"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False,
        timeout=250,
    )  # fmt: skip


@pytest.mark.crash
def test_one_command_writes_page_with_figures_and_noise(tmp_path: Path) -> None:
    done = run("-m", "benchmarks.all", "--quick", "--only", "core", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "figures.md").read_text()
    assert "## Processor time of the core" in page
    assert "| set_new | " in page
    assert "a spread of" in page
    assert f"dcpd ran {form_text()}" in page
    assert page.strip() == done.stdout.strip()


def test_a_part_that_fails_is_named_with_what_it_printed() -> None:
    part = all_figures.PARTS["pauses"]
    arguments = [*all_figures.command_of(part, Path("out"), is_full=False), "--nonsense"]
    outcome = all_figures.run_part(arguments)
    assert outcome.trouble == "exit code 2"
    assert "It failed: exit code 2." in all_figures.section_of(part, arguments, outcome)


@pytest.mark.parametrize("module", sorted({part.module for part in all_figures.PARTS.values()}))
def test_every_part_takes_its_arguments(module: str) -> None:
    done = run("-m", f"benchmarks.{module}", "--help")
    assert done.returncode == 0, done.stderr
    parts = [part for part in all_figures.PARTS.values() if part.module == module]
    words = {word for part in parts for word in f"{part.quick} {part.full}".split()}
    assert all(word in done.stdout for word in words if word.startswith("--"))


@pytest.mark.parametrize("form", ["loops in C", "plain Python"])
def test_figures_say_in_which_form_dcpd_ran(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what to do for those that a user gets, who installs the default form."""
    monkeypatch.setattr("benchmarks.run.form_text", lambda: form)
    rest = "" if form == "loops in C" else "; the default installation is loops in C"
    assert form_told().startswith(form + rest)
    assert ("scripts/install bench" in form_told()) == bool(rest)
    options = argparse.Namespace(runs=1, seconds=1.0, keys=10, peers=["dcpd"])
    assert about(options)["form of dcpd"] == form_told()


def test_documents_of_numbers_become_tables() -> None:
    assert all_figures.table_of('{"a": 1.25, "b": 3000}').splitlines()[2:] == [
        "| a | 1.25 |", "| b | 3,000 |",
    ]  # fmt: skip
    assert all_figures.table_of('{"a": [1]}') == ""
    assert all_figures.table_of("a table") == ""


def test_seconds_without_an_answer_are_rows_too() -> None:
    timeline = Timeline()
    timeline.add(0.1, 64, 1000)
    timeline.add(0.9, 64, 3000)
    timeline.add(3.5, 10, 500)
    timeline.end_second()
    assert [(row[0], row[1], row[3]) for row in timeline.rows] == [
        (0, 128, 2976), (1, 0, 0), (2, 0, 0), (3, 10, 500),
    ]  # fmt: skip


def test_pictures_have_means_of_rates_and_the_largest_p99() -> None:
    rows = [(second, 100 * second, 1000 * second, 0) for second in range(7)]
    assert grouped(rows) == [(0.0, 200.0, 4.0), (5.0, 550.0, 6.0)]


def test_samples_from_before_measuring_are_left_out(tmp_path: Path) -> None:
    rows = [(second, 10, 1000, 2000) for second in range(3)]
    samples = [Sample(float(at), 1 << 20, 2 << 20) for at in range(1, 7)]
    assert [sample.second for sample in since_measuring(rows, samples)] == [0.0, 1.0, 2.0, 3.0]
    draw(tmp_path / "lines.png", "title", {"dcpd": Lines(rows, samples)})
    assert (tmp_path / "lines.png").read_bytes().startswith(PNG_MAGIC)


@pytest.mark.crash
def test_a_sustained_run_draws_itself_and_counts_what_it_wrote(tmp_path: Path) -> None:
    picture = tmp_path / "sustained.png"
    done = run("-m", "benchmarks.sustained", "--peers", "dcpd", "--seconds", "2", "--keys", "1000",
               "--folder", tmp_path, "--png", picture)  # fmt: skip
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if "for each byte changed" in line)
    assert float(row.split("|")[4]) > 0.5, "the log at least has every change"
    row = next(line for line in done.stdout.splitlines() if "processor time a SET" in line)
    assert 0.5 < float(row.split("|")[4]) < 500, "microseconds"
    assert picture.read_bytes().startswith(PNG_MAGIC)
