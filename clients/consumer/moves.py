"""Tells where partitions have moved: one line for a wave of them, not one for each.

A wave ends when nothing has moved for QUIET_S, or after WAVE_S_MAX.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from clients.link.topology import Place

QUIET_S: Final = 1.0
WAVE_S_MAX: Final = 10.0


class Moves:
    """See the module. `tell` gets the line."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._places: dict[int, Place] = {}
        """The node that streams each partition, or did so last."""
        self._moved: dict[int, Place] = {}
        """Where the partitions of the wave are now."""
        self._until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def placed(self, vb_ids: Iterable[int], place: Place) -> None:
        """A node streams these partitions from now on."""
        vb_ids = tuple(vb_ids)
        moved = [vb_id for vb_id in vb_ids if self._places.get(vb_id, place) != place]
        self._places.update(dict.fromkeys(vb_ids, place))
        if not moved:
            return
        loop = asyncio.get_running_loop()
        if not self._moved:
            self._until_s = loop.time() + WAVE_S_MAX
        self._moved.update(dict.fromkeys(moved, place))
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(min(loop.time() + QUIET_S, self._until_s), self.finish)

    def finish(self) -> None:
        """Tell of the wave that has not ended yet, if there is one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        moved, self._moved = self._moved, {}
        if moved:
            self._tell(moves_text(moved))


def moves_text(moved: dict[int, Place]) -> str:
    """Return a line for partitions and their new nodes; the node that got most comes first."""
    counts = Counter(moved.values()).most_common()
    what = "1 partition moved" if counts[0][1] == 1 else f"{counts[0][1]} partitions moved"
    others = [f"{count} to {host}:{port}" for (host, port), count in counts[1:]]
    return ", ".join([f"{what} to {counts[0][0][0]}:{counts[0][0][1]}", *others])
