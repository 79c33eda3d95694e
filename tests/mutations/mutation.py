"""What a mutation is."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """A fault: `old` becomes `new`. `tests`: names of test files, the likeliest first."""

    name: str
    old: str
    new: str
    tests: tuple[str, ...]
    needs_loops: bool = False
    """Whether the tests need the loops in C, which must be built. Others are tried without them, so
    that a fault in Python is not passed by.
    """
