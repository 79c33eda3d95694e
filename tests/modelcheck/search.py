"""Breadth-first search: every state within the bounds, and the shortest way to a broken promise.

A search can be saved between two states and goes on from there. All states are in memory, about
400 bytes each.
"""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from .model import Model
from .rules import RIGHT, Rules
from .values import Bounds, State, ViolationError

CHUNK_STATES = 20_000
"""States between two looks at the clock: about a second."""


class Broken(NamedTuple):
    """A promise that does not hold, and the shortest way there."""

    words: str
    steps: tuple[str, ...]


class Search:
    """The states found so far, each with the one that it was found from, and those to do."""

    def __init__(self, bounds: Bounds, rules: Rules = RIGHT) -> None:
        self.bounds = bounds
        self.model = Model(bounds, rules)
        first = self.model.first()
        self.origin: dict[State, State | None] = {first: None}
        self.level = [first]
        self.found: list[State] = []
        self.at = 0
        self.depth = 0
        self.seconds = 0.0
        """Processor time."""

    @property
    def is_done(self) -> bool:
        return not self.level

    @property
    def states(self) -> int:
        return len(self.origin)

    def run(self, states_max: int | None = None) -> Broken | None:
        """Search until all states are found, or this many; return the first broken promise."""
        with collector_off():
            while not self.is_done and (states_max is None or self.states < states_max):
                broken = self.advance()
                if broken is not None:
                    return broken
        return None

    def advance(self) -> Broken | None:
        """Go on for at most a chunk of states of the present depth."""
        began = time.process_time()
        model, origin, found = self.model, self.origin, self.found
        seen: set[State] = set()  # not canonical; to find the canonical name is what costs most
        upto = min(self.at + CHUNK_STATES, len(self.level))
        for state in self.level[self.at : upto]:
            try:
                for _, new in model.successors(state):
                    if new in seen:
                        continue
                    seen.add(new)
                    name = model.canonical(new)
                    if name not in origin:
                        found.append(name)  # first: Ctrl-C between the two must not lose it
                        origin[name] = state
            except ViolationError as violation:
                return Broken(violation.words, self._steps_to(state))
        self.at = upto
        if upto == len(self.level):
            self.level, self.found, self.at = found, [], 0
            self.depth += bool(found)
        self.seconds += time.process_time() - began
        return None

    def _steps_to(self, last: State) -> tuple[str, ...]:
        """Return the steps to a state and the one that breaks a promise, with constant names."""
        path: list[State] = []
        at: State | None = last
        while at is not None:
            path.append(at)
            at = self.origin[at]
        model = self.model
        real, words = path.pop(), []
        while path:
            wanted = path.pop()
            step, real = next(
                (step, new)
                for step, new in model.successors(real)
                if model.canonical(new) == wanted
            )
            words.append(str(step))
        try:
            for _ in model.successors(real):
                pass
        except ViolationError as violation:
            words.append(str(violation.step))
        return tuple(words)

    def save(self, path: Path) -> None:
        """Write all that is needed to go on; the file is whole or is not there."""
        tables = [table.values for table in self.model.tables]
        progress = (self.origin, self.level, self.found, self.at, self.depth, self.seconds)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            pickle.dump((self.bounds, tables, progress), file, pickle.HIGHEST_PROTOCOL)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Search:
        """Return a search of the right rules as it was saved."""
        with path.open("rb") as file:
            bounds, tables, progress = pickle.load(file)
        search = cls(bounds)
        for table, values in zip(search.model.tables, tables, strict=True):
            table.restore(values)
        search.origin, search.level, search.found, search.at, search.depth, search.seconds = (
            progress
        )
        return search


@contextmanager
def collector_off() -> Iterator[None]:
    """Millions of tuples without a circle: the collector would go over them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
