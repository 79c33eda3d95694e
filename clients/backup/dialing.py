"""Connects a backup to the nodes of its partitions, to all nodes at the same time.

Called by `clients.backup.run`, which owns the sessions and calls `step` regularly. `step` does not
block, so a silent node delays only its own partitions.

Invariants
- a partition is in exactly one place: without a node, waiting for a newer topology, with a dial, or
  returned by `step`;
- there is at most one dial per node and one topology request at a time. Only partitions without a
  node in the known topology wait for that request;
- a failed attempt is repeated after a pause that doubles up to PAUSE_MAX_S, until `reset`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Final, NamedTuple

from clients.backup.feed import Feed
from clients.errors import TRANSIENT, DcpdError, TopologyError
from clients.link.dials import Dials, Pause
from clients.link.pipelined_link import Link
from clients.link.topology import Place, Topology

PAUSE_MAX_S: Final = 2.0


class Home(NamedTuple):
    """Partitions and the node that serves them."""

    place: Place
    link: Link | None
    """A new connection; None if the node already has a session."""
    feeds: list[Feed]


class Dialing:
    """See the module. `find` fetches the topology, `connect` connects to a node, and `on_news` is
    called when `step` has something to do.
    """

    def __init__(
        self,
        topology: Topology,
        find: Callable[[], Coroutine[Any, Any, Topology]],
        connect: Callable[[Place], Coroutine[Any, Any, Link]],
        on_news: Callable[[], None],
    ) -> None:
        self.failure: DcpdError | None = None
        """The last error that keeps a partition from being streamed."""
        self._topology = topology
        self._is_stale = False
        self._find = find
        self._on_news = on_news
        self._finding: asyncio.Task[Topology] | None = None
        self._find_pause = Pause(PAUSE_MAX_S)
        self._dials = Dials(connect, on_news)
        self._dialed: dict[int, Feed] = {}
        """Partition -> its feed, while its node is dialed."""
        self._pauses: dict[Place, Pause] = {}
        self._homeless: list[Feed] = []
        self._waiting: list[Feed] = []

    @property
    def is_idle(self) -> bool:
        """Whether every partition has a node."""
        return not (self._homeless or self._waiting or self._dials)

    def add(self, feeds: Collection[Feed]) -> None:
        """Find the nodes of partitions in the known topology."""
        self._homeless += feeds

    def add_lost(self, feeds: Collection[Feed]) -> None:
        """Find nodes for partitions whose connection was lost. The same node is tried first."""
        self._homeless += feeds
        self._is_stale = self._is_stale or bool(feeds)

    def add_moved(self, feeds: Collection[Feed]) -> None:
        """Find nodes for partitions that left their node. This needs a newer topology."""
        self._waiting += feeds
        self._is_stale = self._is_stale or bool(feeds)

    def reset(self) -> None:
        """Forget failures and start with short pauses again."""
        self.failure = None
        self._find_pause = Pause(PAUSE_MAX_S)
        self._pauses.clear()

    def step(self, now_s: float, sessions: Collection[Place]) -> list[Home]:
        """Return the partitions that have a node now. `sessions` are the connected nodes.

        Raises DcpdErrors that are not transient.
        """
        self._collect_topology(now_s)
        homes = self._collect_dials(now_s)
        homes += self._assign(now_s, {*sessions, *(home.place for home in homes)})
        if self._is_stale and self._finding is None and now_s >= self._find_pause.until_s:
            self._find_pause.begin(now_s)
            self._finding = asyncio.create_task(self._find(), name="backup-map")
            self._finding.add_done_callback(lambda _task: self._on_news())
        return homes

    async def close(self) -> None:
        """Cancel all dials and requests."""
        await self._dials.close()
        if self._finding is not None:
            self._finding.cancel()
            await asyncio.gather(self._finding, return_exceptions=True)

    # -- inside --------------------------------------------------------------------------------

    def _collect_topology(self, now_s: float) -> None:
        task = self._finding
        if task is None or not task.done():
            return
        self._finding = None
        try:
            self._topology = task.result()
        except TRANSIENT as error:
            self.failure = error
            self._find_pause.begin(now_s)
            return
        self._is_stale = False
        self._homeless += self._waiting
        self._waiting.clear()

    def _collect_dials(self, now_s: float) -> list[Home]:
        homes = []
        for place, vb_ids, link, failure in self._dials.finished():
            feeds = [self._dialed.pop(vb_id) for vb_id in vb_ids]
            if link is None:
                self.failure = failure
                self._pauses.setdefault(place, Pause(PAUSE_MAX_S)).begin(now_s)
                self.add_lost(feeds)
            else:
                homes.append(Home(place, link, feeds))
        return homes

    def _assign(self, now_s: float, sessions: Collection[Place]) -> list[Home]:
        """Give partitions to sessions, to running dials, or to new dials."""
        by_place: dict[Place, list[Feed]] = {}
        left: list[Feed] = []
        for feed in self._homeless:
            try:
                node = self._topology.node_of(feed.vb_id)
            except TopologyError as error:
                self.failure = error
                self.add_moved([feed])
                continue
            by_place.setdefault(node.place, []).append(feed)
        homes = []
        for place, feeds in by_place.items():
            if place in sessions:
                homes.append(Home(place, None, feeds))
            elif (
                place not in self._dials
                and place in self._pauses
                and now_s < self._pauses[place].until_s
            ):
                left += feeds
            else:
                self._dialed.update((feed.vb_id, feed) for feed in feeds)
                self._dials.start(place, [feed.vb_id for feed in feeds])
        self._homeless = left
        return homes
