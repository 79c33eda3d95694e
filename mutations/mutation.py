"""What a mutation is."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """A fault: `old` becomes `new`. `tests`: names of test files, the likeliest first."""

    name: str
    old: str
    new: str
    tests: tuple[str, ...]
