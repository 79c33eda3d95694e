"""The last slow operations: what took long, when, and for whom. The web console shows them.

Connections and the sampler write here.

Invariant: at most SLOW_KEPT operations are kept; older ones are dropped.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from dcp.wire.opcode import Opcode

SLOW_KEPT: Final = 50
TEXT_COMMAND: Final = "a command of the text protocol"
_NAMES: Final = {int(opcode): opcode.name for opcode in Opcode}


def command_of(answers: bytes) -> str:
    """Return the command whose answer is the first of these (binary protocol)."""
    return _NAMES.get(answers[1], "a command") if len(answers) > 1 else "a command"


class SlowOperation(NamedTuple):
    """One slow operation."""

    time_s: float
    """When it ended, Unix time."""
    what: str
    seconds: float
    peer: str
    """The client's address; "" if the server itself was slow."""
    user: str


class SlowOperations:
    """See the module."""

    def __init__(self, slow_s: float) -> None:
        self.slow_s = slow_s
        """Operations at or above this are slow (setting slow_after)."""
        self._kept: deque[SlowOperation] = deque(maxlen=SLOW_KEPT)
        self.count = 0
        """Since the start, including those that are no longer kept."""

    def note(self, operation: SlowOperation) -> None:
        """Keep an operation."""
        self.count += 1
        self._kept.append(operation)

    def newest_first(self) -> list[SlowOperation]:
        """Return what is kept."""
        return list(reversed(self._kept))
