"""The traces of docs/traces.md are what happens, and the first hour's reading is short enough."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Final

import pytest

from sim.scenario import Scenario
from walks.flows import Tracer, Walk, all_walks

ROOT: Final = Path(__file__).resolve().parent.parent
FLOWS: Final = {
    "A SET": ("SET",),
    "A stream request that is answered with ROLLBACK": ("stream request, ROLLBACK",),
    "A commit group with two replicas": (
        "master: a group begins, to two replicas",
        "replica: a group in, applied",
        "replica: synced, acknowledgement out",
        "master: acknowledgement in, committed",
    ),
    "A failover": ("failover",),
}
FIRST_HOUR_LINES: Final = 7_000
"""What a newcomer can read in the first hour, at most."""
QUESTIONS: Final = 10


@lru_cache(maxsize=1)
def walks() -> dict[str, Walk]:
    return {walk.flow: walk for walk in [*all_walks(), failover()]}


def failover() -> Walk:
    tracer = Tracer()
    cluster = Scenario()
    died_ns, master = cluster.now_ns, cluster.machine(cluster.master())
    with tracer.installed(), tracer.walk("failover"):
        master.kill()
        cluster.first_answer_s(died_ns)
    return tracer.walks[0]


def rows(title: str) -> list[tuple[str, str]]:
    """Return file and function of each row of a trace."""
    page = (ROOT / "docs" / "traces.md").read_text()
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| \S", section, re.MULTILINE)


@pytest.mark.parametrize("title", FLOWS)
def test_each_row_of_a_trace_is_called_after_the_one_before(title: str) -> None:
    calls = iter(
        (name, function)
        for flow in FLOWS[title]
        for name, functions in walks()[flow].way
        for function in functions
    )
    wanted = rows(title)
    assert len(wanted) > 5
    for row in wanted:
        assert row in calls, f"{row} is not called, or not here"


def test_the_page_has_these_traces_and_no_others() -> None:
    page = (ROOT / "docs" / "traces.md").read_text()
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == list(FLOWS)


def first_hour() -> str:
    page = (ROOT / "docs" / "architecture.md").read_text()
    return page.partition("\n## The first hour\n")[2].partition("\n## ")[0]


def test_the_reading_of_the_first_hour_is_short_enough() -> None:
    files = re.findall(r"`([a-z_/]+\.py)`", first_hour().partition("### Ten questions")[0])
    assert len(files) == len(set(files)) > 15
    lines = sum(len((ROOT / name).read_text().splitlines()) for name in files)
    assert lines <= FIRST_HOUR_LINES
    said = re.search(r"([\d,]+) lines", first_hour())
    assert said is not None
    assert 0 <= int(said[1].replace(",", "")) - lines < 200, (
        f"the page says another figure: {lines}"
    )


def test_each_of_the_ten_questions_is_answered_in_the_code() -> None:
    """Each answer names a file, and a name that is defined there."""
    answers = re.findall(
        r"^\d+\. .+?`([a-z_/]+\.py)`, `([A-Za-z_.]+)`", first_hour(), re.MULTILINE | re.DOTALL
    )
    assert len(answers) == QUESTIONS
    for name, what in answers:
        source = (ROOT / name).read_text()
        for part in what.split("."):
            assert re.search(rf"(def|class) {part}\b|\b{part}\b.* = ", source), (name, what)
