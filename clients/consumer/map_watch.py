"""A connection for nothing but the cluster's maps, beside a consumer's only connection.

Servers push newer maps over every connection. If a node stands still, its streams move by the map
that another node pushes. A consumer with one connection would hear of it only after two NOOP
intervals. So it has a second connection, to another node.

Invariant: there is at most one such connection. If its node is silent for CHECK_S, another node is
tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any, Final

from clients.errors import DcpdError
from clients.link.pipelined_link import Link
from clients.link.topology import Place

CHECK_S: Final = 5.0
"""How often the node is asked for a sign of life, and how long that may take."""
PAUSE_S: Final = 1.0
"""Before another node is tried."""

_draw: Final = Random().random  # noqa: S311 - not for secrets


class MapWatch:
    """See the module. `on_config` gets each configuration, and the host that it came from."""

    def __init__(
        self,
        connect: Callable[[Place], Coroutine[Any, Any, Link]],
        on_config: Callable[[bytes, str], None],
    ) -> None:
        self._connect = connect
        self._on_config = on_config
        self._task: asyncio.Task[None] | None = None
        self._places: list[Place] = []

    @property
    def is_running(self) -> bool:
        """Whether there is, or will soon be, a connection."""
        return self._task is not None

    def update(self, used: Sequence[Place], nodes: Sequence[Place]) -> None:
        """Watch or not: `used` are the nodes with connections, `nodes` those of the map."""
        self._places = [place for place in nodes if place not in used]
        if len(used) == 1 and self._places:
            if self._task is None:
                self._task = asyncio.create_task(self._run(), name="consumer-map-watch")
        elif self._task is not None:
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        """Close the connection."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            places = self._places
            try:
                await self._watch(places[int(_draw() * len(places))])
            except DcpdError:
                await asyncio.sleep(PAUSE_S * (1 + _draw()))

    async def _watch(self, place: Place) -> None:
        """Take maps from a node until it is silent. Raises a transient error then."""
        link = await self._connect(place)
        try:
            self._take(link)
            link.on_config = self._take
            while True:
                await asyncio.sleep(CHECK_S)
                await link.sign_of_life(CHECK_S)
        finally:
            link.close()

    def _take(self, link: Link) -> None:
        assert link.handshake is not None
        if link.handshake.config:
            self._on_config(link.handshake.config, link.address.host)
