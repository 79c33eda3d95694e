"""Asks several nodes, shortly after each other, and takes the first one that answers.

Used where it does not matter which node it is: to begin with a cluster, and for its map.

Invariants
- a node that stands still delays the next one by STAGGER_S, a node that refuses by nothing;
- what comes from another node later is given to `discard`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from clients.errors import TRANSIENT, DcpdError
from clients.link.topology import STAGGER_S, Place

_T = TypeVar("_T")


async def first_answer(
    ask: Callable[[Place], Coroutine[Any, Any, _T]],
    places: Sequence[Place],
    discard: Callable[[_T], None],
) -> tuple[Place, _T]:
    """Return the first node that answers, and its answer. They are asked in order.

    If none answers, raises the last error. An error that is not transient is raised at once.
    """
    tasks: dict[asyncio.Task[_T], Place] = {}
    failure: DcpdError | None = None
    left = list(places)
    try:
        while left or tasks:
            if left:
                place = left.pop(0)
                tasks[asyncio.create_task(ask(place))] = place
            timeout_s = STAGGER_S if left else None
            done, _ = await asyncio.wait(
                tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                place = tasks[task]
                try:
                    answer = task.result()
                except TRANSIENT as error:
                    failure = error
                    del tasks[task]
                    continue
                del tasks[task]
                return place, answer
        assert failure is not None, "there is at least one node"
        raise failure
    finally:
        await give_up(list(tasks), discard)


async def give_up(tasks: Sequence[asyncio.Task[_T]], discard: Callable[[_T], None]) -> None:
    """Cancel tasks. Give what some of them have returned already to `discard`."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(result, BaseException):
            discard(result)
