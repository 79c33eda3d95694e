"""Which connection streams which partition: placing those that have none, node by node.

Invariants
- a partition that is followed is in exactly one place: with a session's core, in `homeless`, or
  with the consumer (held for a decision, paused);
- the newest configuration heard of counts; where none is known, the first node that answers is
  asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from clients.address import ServerAddress
from clients.consumer.counters import ConsumerMetrics
from clients.consumer.node_session import LOG, ConsumerSession
from clients.consumer.partition_stream import Wanted
from clients.errors import TRANSIENT, DcpdError, TopologyError
from clients.link.pipelined_link import Link
from clients.link.topology import Topology, parse_topology, single_node

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 5.0
"""Pause between attempts to place partitions that no connection streams; doubles."""

Place = tuple[str, int]


class Placement:
    """See the module. `make_session` gets a link that is ready for DCP_OPEN."""

    def __init__(
        self,
        address: ServerAddress,
        metrics: ConsumerMetrics,
        make_session: Callable[[Link], ConsumerSession],
        *,
        connect_timeout_s: float,
        give_up_after_s: float | None,
    ) -> None:
        self.address = address
        self.topology: Topology | None = None
        self.sessions: dict[Place, ConsumerSession] = {}
        self.homeless: dict[int, Wanted] = {}
        self._metrics = metrics
        self._make_session = make_session
        self._connect_timeout_s = connect_timeout_s
        self._give_up_after_s = give_up_after_s
        self._backoff_s = BACKOFF_FIRST_S
        self._work = asyncio.Event()
        self._spare: dict[Place, Link] = {}
        self._revision: tuple[int, int] | None = None
        """Of the newest configuration ever taken over."""
        self._nodes: list[Place] = []
        """Of the same one: who to ask where the first node is gone."""

    # -- what the consumer tells -----------------------------------------------------------------

    def wanted(self, partitions: Mapping[int, Wanted]) -> None:
        """Partitions need a connection."""
        if partitions:
            self.homeless.update(partitions)
            self._work.set()

    def progress(self) -> None:
        """Something came in: the next pause is a short one again."""
        self._backoff_s = BACKOFF_FIRST_S

    def lost(self, session: ConsumerSession) -> bool:
        """A connection is gone. False where it was not one of ours any more."""
        place = (session.link.address.host, session.link.address.port)
        if self.sessions.get(place) is not session:
            return False
        del self.sessions[place]
        self.topology = None
        self._work.set()
        return True

    def adopt(self, config: bytes, host: str) -> None:
        """Take a configuration over if it is newer; b"": what is known is not right any more."""
        if not config:
            self.topology = None
            return
        topology = parse_topology(config, host, is_tls=self.address.is_tls)
        if not topology.is_newer_than(self.topology):
            return
        if self._revision is not None and topology.revision > self._revision:
            self._metrics.topology_changes += 1
            LOG.warning(
                "new cluster configuration %s (was %s): %d nodes",
                topology.revision, self._revision, len(topology.nodes),
            )  # fmt: skip
        self._revision = topology.revision
        self._nodes = [(node.host, node.kv_port) for node in topology.nodes]
        self.topology = topology

    def close(self) -> None:
        """Close all connections."""
        sessions, self.sessions = self.sessions, {}
        for session in sessions.values():
            session.close()
        self.close_spare()

    # -- connections -----------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Ask the first node that answers; keep the connection for its streams."""
        seed = (self.address.host, self.address.port)
        places = list(dict.fromkeys([seed, *self.sessions, *self._nodes]))
        for number, place in enumerate(places, 1):
            try:
                link = await self._dial(place)
            except TRANSIENT:
                if number == len(places):
                    raise
                continue
            self._keep_spare(place, link)
            assert link.handshake is not None
            if link.handshake.config:
                self.adopt(link.handshake.config, place[0])
            if self.topology is None:
                self.topology = single_node(*place)
            return

    async def links_of(self, vb_ids: list[int]) -> list[tuple[Link, list[int]]]:
        """Return a connection for each node that has some of the partitions, not yet streaming."""
        assert self.topology is not None
        groups: dict[Place, list[int]] = {}
        for vb_id in vb_ids:
            node = self.topology.node_of(vb_id)
            groups.setdefault((node.host, node.kv_port), []).append(vb_id)
        found = []
        for place, members in groups.items():
            if place not in self._spare or self._spare[place].is_closed:
                self._keep_spare(place, await self._dial(place))
            found.append((self._spare[place], members))
        return found

    def any_link(self) -> Link:
        """Return a connection that does not stream yet."""
        return next(iter(self._spare.values()))

    async def place(self) -> None:
        """Give each partition without a stream to the connection of its node.

        Raises the last error where some have no node, or one that cannot be reached; all others
        have their place by then.
        """
        if self.topology is None:
            await self.refresh()
        assert self.topology is not None
        groups: dict[Place, list[int]] = {}
        failure: DcpdError | None = None
        for vb_id in self.homeless:
            try:
                node = self.topology.node_of(vb_id)
            except TopologyError as error:
                failure = error
                continue
            groups.setdefault((node.host, node.kv_port), []).append(vb_id)
        try:
            for place, vb_ids in groups.items():
                try:
                    await self._place_at(place, vb_ids)
                except TRANSIENT as error:
                    failure = error
        finally:
            self.close_spare()
        if failure is not None:
            raise failure

    async def _place_at(self, place: Place, vb_ids: list[int]) -> None:
        """Stream homeless partitions from a node."""
        session = self.sessions.get(place)
        is_new = session is None
        if session is None:
            session = self._make_session(await self._take_link(place))
        # Taken only now: while we connected, the user may have paused some of them.
        partitions = {vb_id: self.homeless.pop(vb_id) for vb_id in vb_ids if vb_id in self.homeless}
        if not is_new:
            session.add(partitions)
            return
        self.sessions[place] = session
        for vb_id, wanted in partitions.items():
            session.core.add(vb_id, wanted)
        session.begin()

    async def keep_placed(
        self, on_failure: Callable[[DcpdError], None], on_placed: Callable[[], None]
    ) -> None:
        """Find a place for partitions that have none, with growing pauses, until cancelled."""
        loop = asyncio.get_running_loop()
        failing_since: float | None = None
        while True:
            await self._work.wait()
            self._work.clear()
            if not self.homeless:
                failing_since = None
                continue
            await asyncio.sleep(self._backoff_s)
            self._backoff_s = min(self._backoff_s * 2, BACKOFF_MAX_S)
            try:
                await self.place()
            except TRANSIENT as error:
                if failing_since is None:
                    failing_since = loop.time()
                LOG.warning(
                    "%d partitions have no stream: %s; trying again", len(self.homeless), error
                )
                limit_s = self._give_up_after_s
                if limit_s is not None and loop.time() - failing_since >= limit_s:
                    on_failure(error)
                    return
                self.topology = None
            except DcpdError as error:
                on_failure(error)
                return
            else:
                failing_since = None
            on_placed()
            if self.homeless:
                self._work.set()

    async def _dial(self, place: Place) -> Link:
        return await Link.connect(self.address.at(*place), timeout_s=self._connect_timeout_s)

    async def _take_link(self, place: Place) -> Link:
        link = self._spare.pop(place, None)
        return await self._dial(place) if link is None or link.is_closed else link

    def _keep_spare(self, place: Place, link: Link) -> None:
        before = self._spare.pop(place, None)
        if before is not None:
            before.close()
        self._spare[place] = link

    def close_spare(self) -> None:
        """Close the connections that nobody took over."""
        spare, self._spare = self._spare, {}
        for link in spare.values():
            link.close()
