"""The generated parts of docs/simulator.md: kinds of faults, acts, counts, planted
faults, and a story.

`python -m tests.sim.page` writes them anew; a test compares the page with what is written here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sim.acts import ACTS
from sim.checks import RULES
from sim.cluster_bugs import PLANTED
from sim.faults import FAULTS
from sim.found import FOUND
from sim.plan import ASKED_ACTS
from sim.reached import OF_CLUSTERS
from sim.run import Options, run_seed
from sim.story import tell, what_it_does

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "simulator.md"
SEED: Final = 1
EXAMPLE: Final = Options(
    nodes=3,
    bug="promoted-at-once",
    changes=(
        ("acts", "blink"), ("clients", "1"), ("consumers", "1"), ("faults", ""), ("keys", "2"),
        ("load_ns", "1280000000"), ("pipeline", "1"),
    ),
)  # fmt: skip
"""A planted fault: a replica that is elected serves at once. It is what `sim.shrink` left."""


def example() -> str:
    """Return the story that the page shows, as the command prints it."""
    report = run_seed(SEED, EXAMPLE)
    return f"```text\n{tell(report, EXAMPLE)}\n```"


def _table(head: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {head} |", "|---|---|", *(f"| `{name}` | {what} |" for name, what in rows)]
    return "\n".join(lines)


def _act(name: str) -> str:
    text = re.sub(r"\s+", " ", ACTS[name].__doc__ or "").strip()
    return f"{text} Only with `--act`." if name in ASKED_ACTS else text


def _planted() -> str:
    """Return the table of planted faults."""
    lines = [
        "| bug | what is wrong | nodes | seed | check | is told |",
        "|---|---|---|---|---|---|",
    ]
    for name, (seed, check, words) in FOUND.items():
        bug = PLANTED[name]
        nodes = f"{bug.nodes}, `--act {bug.act}`" if bug.act else bug.nodes
        lines.append(f"| `{name}` | {bug.what} | {nodes} | {seed} | `{check}` | {words} |")
    return "\n".join(lines)


PARTS: Final[dict[str, Callable[[], str]]] = {
    "rules": lambda: _table("check | rule", RULES.items()),
    "faults": lambda: _table("fault | what it does", ((n, what_it_does(n)) for n in FAULTS)),
    "acts": lambda: _table("act | what it does", ((name, _act(name)) for name in ACTS)),
    "reached": lambda: ", ".join(OF_CLUSTERS) + ".",
    "planted": _planted,
    "example": example,
}
"""Name of a part -> what stands between its two marks."""


def written(page: str) -> str:
    """Return a page with its generated parts as they are today."""
    for name, part in PARTS.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        assert end in rest, f"the page lacks the marks of {name}"
        page = f"{before}{begin}\n{part()}\n\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
