"""What a scenario is, and the table of all."""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from typing import Final, NamedTuple

from clients.conformance.consumers.stage import Stage
from vbucket.model.ids import NUM_VBUCKETS


class Scenario(NamedTuple):
    """Something that happens to a consumer. `play` raises JudgedError if the consumer fails."""

    name: str
    group: str
    title: str
    """What happens, in one line."""
    page: str
    """What a consumer must do, and what goes wrong often."""
    play: Callable[[Stage], None]
    needs_cluster: bool
    timeout_s: float
    """How much longer than usual it may take, in s."""
    partitions: int
    """Of its server."""


SCENARIOS: Final[dict[str, Scenario]] = {}


def scenario(
    group: str,
    title: str,
    *,
    needs_cluster: bool = False,
    timeout_s: float = 0.0,
    partitions: int = NUM_VBUCKETS,
) -> Callable[[Callable[[Stage], None]], Callable[[Stage], None]]:
    """Put a function into the table. Its name is the scenario's, its docstring the page."""

    def add(play: Callable[[Stage], None]) -> Callable[[Stage], None]:
        name = play.__name__.replace("_", "-")
        assert name not in SCENARIOS, "two scenarios share a name"
        page = cleandoc(play.__doc__ or "")
        SCENARIOS[name] = Scenario(
            name, group, title, page, play, needs_cluster, timeout_s, partitions
        )
        return play

    return add
