"""What bytes may go where: the faults of a network, as a table. Pure.

A *flow* goes one way: all bytes from one party to another, over connections that either of them has
opened. A flow is open, late by some time, or held. What is held waits, as bytes wait in TCP while a
cable is cut: it arrives when the flow is open again, unless the connection is broken first.
"""

from __future__ import annotations

from typing import Final, NamedTuple

DELAY_MAX_S: Final = 5.0
"""A longer delay is a cut."""


class Flow(NamedTuple):
    """The state of a flow."""

    is_held: bool = False
    delay_s: float = 0.0


OPEN: Final = Flow()


class FlowTable:
    """The flows that are not open. Parties are names; any may be asked for."""

    def __init__(self) -> None:
        self._flows: dict[tuple[str, str], Flow] = {}

    def set(self, source: str, target: str, flow: Flow) -> None:
        """Change one flow. Raises ValueError."""
        if source == target:
            raise ValueError(f"a flow has two ends, not {source!r} twice")
        if not 0 <= flow.delay_s <= DELAY_MAX_S:
            raise ValueError(f"a delay is 0 to {DELAY_MAX_S:g} s, not {flow.delay_s:g} s")
        if flow == OPEN:
            self._flows.pop((source, target), None)
        else:
            self._flows[source, target] = flow

    def heal(self) -> None:
        """Open all flows."""
        self._flows.clear()

    def flow(self, source: str, target: str) -> Flow:
        """Return the state of a flow."""
        return self._flows.get((source, target), OPEN)
