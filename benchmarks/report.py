"""Rows of figures, with the servers side by side; as JSON and as a Markdown table. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Final

OURS: Final = "dcpd"


@dataclass
class Row:
    """One figure: what it is, its unit, whether more is better, and each run's value."""

    what: str
    unit: str
    more_is_better: bool
    samples: dict[str, list[float]] = field(default_factory=dict)

    def add(self, peer: str, value: float) -> None:
        self.samples.setdefault(peer, []).append(value)

    def ratio_to(self, peer: str) -> float | None:
        """Our median over a peer's; None if one of them is missing or zero."""
        ours, theirs = self.samples.get(OURS), self.samples.get(peer)
        if not ours or not theirs or not median(theirs):
            return None
        return median(ours) / median(theirs)


class Report:
    """All rows in the order in which they were first named."""

    def __init__(self, about: dict[str, str]) -> None:
        self.about = about
        self.rows: dict[str, Row] = {}

    def add(self, peer: str, what: str, value: float, *, unit: str, more_is_better: bool) -> None:
        self.rows.setdefault(what, Row(what, unit, more_is_better)).add(peer, value)

    def peers(self) -> list[str]:
        """The servers besides ours, in the order in which they were first measured."""
        named = dict.fromkeys(name for row in self.rows.values() for name in row.samples)
        return [name for name in named if name != OURS]

    def to_document(self) -> dict[str, Any]:
        """Return everything, every run included."""
        rows = [
            {**asdict(row), "ratios": {peer: row.ratio_to(peer) for peer in self.peers()}}
            for row in self.rows.values()
        ]
        return {"about": self.about, "rows": rows}

    def to_markdown(self) -> str:
        """Return the tables: medians with minimum and maximum, and what was used."""
        peers = self.peers()
        table = _table(
            ["figure", "unit", "better", OURS, *peers, *(f"{OURS} / {peer}" for peer in peers)],
            (
                [
                    row.what, row.unit, "more" if row.more_is_better else "less",
                    *(_cell(row.samples.get(name)) for name in (OURS, *peers)),
                    *(_ratio_text(row.ratio_to(peer)) for peer in peers),
                ]
                for row in self.rows.values()
            ),
        )  # fmt: skip
        return f"{table}\nMedian (smallest to largest) of the runs.\n\n" + _table(
            ["used", ""], ([name, value] for name, value in self.about.items())
        )


def _cell(samples: Sequence[float] | None) -> str:
    if not samples:
        return ""
    if len(samples) == 1:
        return number_text(samples[0])
    low, high = number_text(min(samples)), number_text(max(samples))
    return f"**{number_text(median(samples))}** ({low} to {high})"


def _ratio_text(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def number_text(value: float) -> str:
    """Three significant digits or whole thousands: 0.0123, 1.23, 123, 188,000."""
    if value >= 100:
        return f"{round(value):,}"
    return f"{value:.3g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
