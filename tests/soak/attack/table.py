"""The result of an attack: numbers for each kind, kept across runs, and one table of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from tests.soak.attack.case import Fault
from tests.soak.attack.probe import NAMES

_HEADS: Final = (
    "kind", "cases", "wrong answers", "unnamed damage", "crashes, hangs",
    "longest read (ms)", "longest NOOP (ms)", "longest /livez (ms)",
)  # fmt: skip


class Tally(msgspec.Struct):
    """The numbers of one kind."""

    cases: int = 0
    faults: dict[str, int] = {}
    worst_s: dict[str, float] = {}
    documented: dict[str, int] = {}
    """Limit named in the documentation -> number of cases that met it."""

    def add(self, other: Tally) -> None:
        self.cases += other.cases
        for limit, count in other.documented.items():
            self.documented[limit] = self.documented.get(limit, 0) + count
        for fault, count in other.faults.items():
            self.faults[fault] = self.faults.get(fault, 0) + count
        for name, seconds in other.worst_s.items():
            self.worst_s[name] = max(self.worst_s.get(name, 0.0), seconds)

    def row(self, kind: str) -> list[str]:
        faults = [str(self.faults.get(fault, 0)) for fault in Fault]
        worst = [f"{1000 * self.worst_s.get(name, 0.0):,.0f}" for name in NAMES]
        return [kind, f"{self.cases:,}", *faults, *worst]


def to_document(tallies: Mapping[str, Tally]) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(dict(tallies))
    return document


def from_document(document: Mapping[str, Any]) -> dict[str, Tally]:
    return msgspec.convert(dict(document), dict[str, Tally])


def table(tallies: Mapping[str, Tally], kinds: Iterable[str], not_run: Mapping[str, str]) -> str:
    """Return the table as Markdown, with a line for each limit that was met and kind not run."""
    total = Tally()
    rows = []
    for kind in kinds:
        tally = tallies.get(kind, Tally())
        total.add(tally)
        rows.append(tally.row(kind))
    rows.append(total.row("all"))
    lines = [
        _line(_HEADS), _line(["---", *["---:"] * (len(_HEADS) - 1)]), *(_line(row) for row in rows)
    ]  # fmt: skip
    if total.documented:
        lines += ["", "Limits that docs/operations.md names, and how many cases have met them:", ""]
        lines += [f"- {limit}: {count:,}" for limit, count in total.documented.items()]
    lines += [f"did not run: {kind}: {why}" for kind, why in not_run.items()]
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
