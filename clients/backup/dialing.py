"""Finds the nodes of a backup's partitions, and connects to all of them at the same time.

Called by `clients.backup.run`, which owns the sessions and calls `step` regularly. `step` does not
block, so a silent node delays only its own partitions. `clients.link` has the map, the pauses and
the connection attempts.

Invariants
- a partition is in exactly one place: without a session (its node may be dialed), waiting for a
  newer map, or returned by `step`;
- only partitions that left their node, or have none, wait for a newer map.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine
from typing import Any, NamedTuple

from clients.backup.feed import Feed
from clients.errors import DcpdError
from clients.link.copies import Copies
from clients.link.dials import Dials
from clients.link.pipelined_link import Link
from clients.link.topology import Place


class Home(NamedTuple):
    """Partitions and the node that serves them."""

    place: Place
    link: Link | None
    """A new connection; None if the node already has a session."""
    feeds: list[Feed]


class Dialing:
    """The partitions of a backup that have no session. `find` brings a newer map to `dials`.

    `copies`: those to read from; None: masters.
    """

    def __init__(
        self,
        dials: Dials,
        find: Callable[[], Coroutine[Any, Any, None]],
        copies: Copies | None = None,
    ) -> None:
        self.failure: DcpdError | None = None
        """The last error that keeps a partition from being streamed."""
        self._cluster = dials.cluster
        self._find = find
        self._dials = dials
        self._copies = copies
        self._homeless: dict[int, Feed] = {}
        """Also those whose node is being dialed."""
        self._waiting: dict[int, Feed] = {}
        """They wait for a newer map."""

    @property
    def is_idle(self) -> bool:
        """Whether every partition has a session."""
        return not (self._homeless or self._waiting)

    def add(self, feeds: Collection[Feed]) -> None:
        """Find the nodes of partitions in the known map."""
        self._homeless.update((feed.vb_id, feed) for feed in feeds)

    def add_lost(self, feeds: Collection[Feed]) -> None:
        """Find nodes for partitions whose connection was lost. The same node is tried first."""
        self.add(feeds)
        self._cluster.is_stale = self._cluster.is_stale or bool(feeds)

    def add_moved(self, feeds: Collection[Feed]) -> None:
        """Find nodes for partitions that left their node. This needs a newer map."""
        self._waiting.update((feed.vb_id, feed) for feed in feeds)
        self._cluster.is_stale = self._cluster.is_stale or bool(feeds)

    def reset(self) -> None:
        """Forget failures, and make pauses short again."""
        self.failure = None
        self._cluster.progress(None, is_placed=True)

    def step(self, now_s: float, sessions: Collection[Place]) -> list[Home]:
        """Return the partitions that have a node now. `sessions` are the connected nodes.

        Raises DcpdErrors that are not transient.
        """
        self.failure = self._dials.refreshed() or self.failure
        homes = self._collect(now_s)
        homes += self._assign(now_s, {*sessions, *(home.place for home in homes)})
        self._dials.refresh_when_due(now_s, 0.0, self._refresh, is_placed=self.is_idle)
        return homes

    async def close(self) -> None:
        """Cancel all connection attempts."""
        await self._dials.close()

    # -- inside --------------------------------------------------------------------------------

    async def _refresh(self) -> None:
        await self._find()
        self._cluster.is_stale = False
        self._homeless.update(self._waiting)
        self._waiting.clear()

    def _collect(self, now_s: float) -> list[Home]:
        """Return the partitions of each connection that is ready."""
        homes = []
        for place, vb_ids, link, failure in self._dials.finished(now_s, 0.0):
            if link is None:
                self.failure = failure
                if self._copies is not None:
                    self._copies.pass_over(vb_ids, now_s)
            else:
                homes.append(Home(place, link, self._taken(vb_ids)))
        return homes

    def _assign(self, now_s: float, sessions: Collection[Place]) -> list[Home]:
        """Give partitions to sessions, to running dials, or to new dials."""
        free = {*sessions, *self._dials}
        groups, without = self._cluster.due(self._homeless, now_s, 0.0, free)
        self.failure = next(iter(without.values()), self.failure)
        self._waiting.update((vb_id, self._homeless.pop(vb_id)) for vb_id in without)
        homes = []
        for place, vb_ids in groups.items():
            if place in sessions:
                homes.append(Home(place, None, self._taken(vb_ids)))
            else:
                self._dials.start(place, vb_ids)
        return homes

    def _taken(self, vb_ids: Collection[int]) -> list[Feed]:
        return [self._homeless.pop(vb_id) for vb_id in vb_ids if vb_id in self._homeless]
