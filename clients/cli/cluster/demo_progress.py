"""How far a demo of a cluster is: lines for its user, and when nothing moves any more.

On a machine that is busy with other things the nodes take long. As long as anything becomes better,
the demo waits: more nodes take part, more copies are in sync, or more of the plan is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

TELL_S: Final = 5.0
"""Time between two lines about the same step."""
STILL_S: Final = 60.0
"""How long nothing has to move before the demo gives up, at least."""


class DemoProgress:
    """See the module. `tell` shows a line; `still_s` is how long nothing may move."""

    def __init__(self, tell: Callable[[str], None], now_s: float, still_s: float = STILL_S) -> None:
        self._tell = tell
        self._still_s = still_s
        self._best = (0, 0, 0)
        self._moved_s = self._told_s = now_s
        self._told = ""

    def note(self, now_s: float, status: dict[str, Any]) -> None:
        """Take what a node says of the cluster; {}: it does not answer."""
        alive, in_sync, wanted = counts(status)
        here = (alive, in_sync, _done(status))
        best = (
            max(here[0], self._best[0]),
            max(here[1], self._best[1]),
            max(here[2], self._best[2]),
        )
        if best != self._best:
            self._best, self._moved_s = best, now_s
        text = f"{alive} nodes take part, {in_sync:,} of {wanted:,} copies are in sync"
        if not status:
            text = "n1 does not answer yet"
        if text != self._told and now_s - self._told_s >= TELL_S:
            self._told, self._told_s = text, now_s
            self._tell(text)

    def is_stuck(self, now_s: float) -> bool:
        """Whether nothing has moved for too long."""
        return now_s - self._moved_s >= self._still_s

    @property
    def text(self) -> str:
        """What was reached."""
        alive, in_sync, _ = self._best
        return (
            f"nothing has moved for {self._still_s:.0f} s: {alive} nodes take part, and "
            f"{in_sync:,} copies are in sync"
        )


def counts(status: dict[str, Any]) -> tuple[int, int, int]:
    """Return how many nodes take part, how many copies are in sync, and how many are to be."""
    alive = [node for node in status.get("nodes", ()) if node["is_alive"]]
    sizes = status.get("in_sync_sizes", {})
    in_sync = sum(int(size) * number for size, number in sizes.items())
    able = sum(not node["is_drained"] for node in alive)
    return len(alive), in_sync, min(status.get("copies", 0), able) * status.get("partitions", 0)


def _done(status: dict[str, Any]) -> int:
    """Return how many partitions of the plan are done."""
    plan = status.get("plan") or {}
    done = plan.get("done", 0)
    return done if isinstance(done, int) else 0


@contextmanager
def told_while_it_takes(tell: Callable[[str], None], what: str, log: Path) -> Iterator[None]:
    """Tell at once what begins, and again every `TELL_S` while it takes."""
    tell(f"{what}; log: {log}")
    is_done = threading.Event()

    def repeat() -> None:
        seconds = TELL_S
        while not is_done.wait(TELL_S):
            tell(f"{what} ({seconds:.0f} s)")
            seconds += TELL_S

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
