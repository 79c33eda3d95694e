"""Breadth-first search: every state within the bounds, and the shortest way to a broken promise."""

from __future__ import annotations

import time
from typing import NamedTuple

from .model import Model
from .values import State, ViolationError


class Outcome(NamedTuple):
    """What a search found."""

    states: int
    depth: int
    seconds: float
    problem: str
    """"" if every promise holds in every state."""
    steps: tuple[str, ...] = ()


class Search:
    """All states found so far, each with the state that it was found from, and those to do."""

    def __init__(self, model: Model) -> None:
        self.model = model
        first = model.first()
        self.origin: dict[State, State | None] = {first: None}
        self.level = [first]
        self.depth = 0

    def run(self) -> Outcome:
        began = time.process_time()
        while self.level:
            problem = self._next_level()
            if problem is not None:
                words, state = problem
                seconds = time.process_time() - began
                steps = self.steps_to(state)
                return Outcome(len(self.origin), self.depth + 1, seconds, words, steps)
        return Outcome(len(self.origin), self.depth, time.process_time() - began, "")

    def _next_level(self) -> tuple[str, State] | None:
        model, origin, found = self.model, self.origin, []
        seen: set[State] = set()  # under other names; finding the names is what costs most
        for state in self.level:
            try:
                for _, new in model.successors(state):
                    if new in seen:
                        continue
                    seen.add(new)
                    name = model.canonical(new)
                    if name not in origin:
                        origin[name] = state
                        found.append(name)
            except ViolationError as violation:
                return violation.words, state
        self.level = found
        self.depth += bool(found)
        return None

    def steps_to(self, last: State) -> tuple[str, ...]:
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
            for step, new in model.successors(real):
                if model.canonical(new) == wanted:
                    words.append(str(step))
                    real = new
                    break
        try:
            for _ in model.successors(real):
                pass
        except ViolationError as violation:
            words.append(str(violation.step))
        return tuple(words)
