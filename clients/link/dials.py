"""Connection attempts to nodes, and the pauses between them. The attempts run independently.

    dials.start(place, [3, 4])         # at most one per node
    for dialed in dials.finished(): ...

Invariants
- a dial ends with a link or an error after the timeout of `connect`, whatever the node does;
- a link that is not taken is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, NamedTuple

from clients.errors import TRANSIENT, DcpdError
from clients.link.first_answer import give_up
from clients.link.pipelined_link import Link
from clients.link.topology import Place

PAUSE_FIRST_S: Final = 0.05
PAUSE_MAX_S: Final = 5.0
"""Pause between two attempts at the same node: doubles from the first to the longest."""

Connect = Callable[[Place], Coroutine[Any, Any, Link]]


class Pause:
    """The time of the next attempt. Pauses double up to `longest_s`."""

    def __init__(self, longest_s: float = PAUSE_MAX_S) -> None:
        self.until_s = 0.0
        self._longest_s = longest_s
        self._next_s = PAUSE_FIRST_S

    def begin(self, now_s: float, jitter: float = 0.0) -> None:
        """Pause, longer each time. `jitter`, random from 0 up to 1, cuts it by up to half."""
        self.until_s = now_s + self._next_s * (1 - jitter / 2)
        self._next_s = min(self._next_s * 2, self._longest_s)

    @property
    def is_short(self) -> bool:
        """Whether the next pause is the shortest."""
        return self._next_s == PAUSE_FIRST_S

    def shorten(self) -> None:
        """Make the next pause short again. A pause that has begun stays."""
        self._next_s = PAUSE_FIRST_S


class Dialed(NamedTuple):
    """The result of a dial."""

    place: Place
    vb_ids: list[int]
    link: Link | None
    failure: DcpdError | None


class _Dial(NamedTuple):
    task: asyncio.Task[Link]
    vb_ids: dict[int, None]
    """Its partitions, in the order of their requests."""


class Dials:
    """See the module. `on_news` is called when a dial has ended."""

    def __init__(self, connect: Connect, on_news: Callable[[], None]) -> None:
        self.connect = connect
        self._on_news = on_news
        self._dials: dict[Place, _Dial] = {}

    def __contains__(self, place: Place) -> bool:
        """Whether a node is being dialed."""
        return place in self._dials

    def __len__(self) -> int:
        """The number of running dials."""
        return len(self._dials)

    def start(self, place: Place, vb_ids: Iterable[int]) -> None:
        """Connect to a node for some partitions. If a dial is running, add them to it."""
        dial = self._dials.get(place)
        if dial is None:
            task = asyncio.create_task(self.connect(place), name=f"dial-{place[1]}")
            task.add_done_callback(lambda _task: self._on_news())
            dial = self._dials[place] = _Dial(task, {})
        dial.vb_ids.update(dict.fromkeys(vb_ids))

    async def wait(self) -> None:
        """Wait until a dial has ended, if there is one."""
        if self._dials:
            tasks = [dial.task for dial in self._dials.values()]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    def finished(self) -> list[Dialed]:
        """Return the dials that have ended, each once.

        Raises an error that is not transient. Then the dials stay, for `close`.
        """
        ended = {place: dial for place, dial in self._dials.items() if dial.task.done()}
        for dial in ended.values():
            error = dial.task.exception()
            if error is not None and not isinstance(error, TRANSIENT):
                raise error
        dialed = []
        for place, (task, vb_ids) in ended.items():
            del self._dials[place]
            failure = task.exception()
            assert failure is None or isinstance(failure, TRANSIENT)
            link = task.result() if failure is None else None
            dialed.append(Dialed(place, list(vb_ids), link, failure))
        return dialed

    async def close(self) -> None:
        """Cancel all dials."""
        dials, self._dials = self._dials, {}
        await give_up([dial.task for dial in dials.values()], lambda link: link.close())
