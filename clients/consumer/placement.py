"""Assigns partitions to connections, and finds nodes for partitions without one.

Invariants
- a followed partition is in exactly one place: with a session's core, in `homeless`, or with the
  consumer (held for a decision, paused);
- the newest configuration is used, from whichever node it came. If it moves a partition to another
  node, the stream moves too. An older one than was known is used only if no node has a newer one;
- nodes are dialed independently, and asked for the map beside that, so a stalled node delays only
  its own partitions;
- two attempts at the same node are at least a pause apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from random import Random
from typing import Final

from clients.address import ServerAddress
from clients.consumer.counters import ConsumerMetrics
from clients.consumer.map_watch import MapWatch
from clients.consumer.moves import Moves
from clients.consumer.node_session import LOG, ConsumerSession
from clients.consumer.options import ConsumerOptions
from clients.consumer.streams import Wanted
from clients.errors import (
    TRANSIENT,
    DcpdError,
    OperationTimeoutError,
    TopologyError,
    none_answered,
)
from clients.link.dials import Dials, Pause
from clients.link.first_answer import first_answer, give_up
from clients.link.handshake import PUSH_FEATURES
from clients.link.pipelined_link import Link
from clients.link.topology import Place, Topology, parse_topology, single_node

OPEN_PAUSE_S: Final = 0.2
OPEN_PATIENCE_S: Final = 1.0
"""While a consumer opens: how long nodes have before another one is asked for a newer map, and the
pause before that."""

jitter: Final = Random().random  # noqa: S311 - not for secrets


class Placement:
    """See the module. `make_session` gets a link that is ready for DCP_OPEN."""

    def __init__(
        self,
        address: ServerAddress,
        metrics: ConsumerMetrics,
        make_session: Callable[[Link], ConsumerSession],
        options: ConsumerOptions,
    ) -> None:
        self.address = address
        self.topology: Topology | None = None
        self.sessions: dict[Place, ConsumerSession] = {}
        self.homeless: dict[int, Wanted] = {}
        self._metrics = metrics
        self._make_session = make_session
        self._connect_timeout_s = options.connect_timeout_s
        self._give_up_after_s = options.give_up_after_s
        self._work = asyncio.Event()
        self._dials = Dials(self._dial, self._work.set)
        self._pauses: dict[Place, Pause] = {}
        """Node -> pause before the next attempt."""
        self._refresh_pause = Pause()
        self.has_paused = False
        """A pause has begun since all were short."""
        self._is_stale = False
        """The configuration must be refreshed before the next attempt."""
        self._avoid: Place | None = None
        """A node that refuses for long: a newer configuration is wanted, from another one."""
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshes = 0
        self._watch = MapWatch(self._dial, self.take_pushed)
        self._moves = Moves(LOG.warning)
        self._spare: dict[Place, Link] = {}
        self._revision: tuple[int, int] | None = None
        """Revision of the newest configuration so far."""
        self._nodes: list[Place] = []
        """Nodes of that configuration, to ask if the first node is gone."""

    # -- called by the consumer ------------------------------------------------------------------

    def wanted(self, partitions: Mapping[int, Wanted]) -> None:
        """Add partitions that need a connection."""
        if partitions:
            self.homeless.update(partitions)
            self._work.set()

    def progress(self, session: ConsumerSession | None = None) -> None:
        """A node (None: any) sent data, so its next pause is short again.

        The pause between refreshes of the configuration is reset only if all partitions have a
        node. Progress of other partitions does not help one without a node.
        """
        if session is None or not self.homeless:
            self._refresh_pause.shorten()
        pauses = self._pauses
        for place in pauses if session is None else pauses.keys() & {session.link.place}:
            pauses[place].shorten()
        self.has_paused = not all(
            pause.is_short for pause in (self._refresh_pause, *pauses.values())
        )

    def lost(self, session: ConsumerSession) -> bool:
        """A connection is lost. Return False if it was already replaced."""
        place = session.link.place
        if self.sessions.get(place) is not session:
            return False
        del self.sessions[place]
        self.topology = None
        self._work.set()
        return True

    def want_map(self, session: ConsumerSession) -> None:
        """A node refuses for long: ask another one for a newer configuration."""
        self._avoid = session.link.place
        self._work.set()

    def has_moved(self, vb_id: int, session: ConsumerSession) -> bool:
        """Whether the known configuration gives a partition to another node than a session's. Then
        a refusal without a configuration tells nothing new.
        """
        place = self.topology.place_of(vb_id) if self.topology is not None else None
        return place not in {None, session.link.place}

    def adopt(self, config: bytes, host: str, *, is_last_resort: bool = False) -> None:
        """Adopt a configuration if it is newer. b"" means that the known one is out of date."""
        if not config:
            self.topology = None
            return
        topology = parse_topology(config, host, is_tls=self.address.is_tls)
        if not topology.is_newer_than(self.topology):
            return
        if self._revision is not None and topology.revision < self._revision:
            if not is_last_resort:
                return  # its node is cut off from the cluster, or late
            LOG.warning("the cluster configuration went back from %s", self._revision)
        is_new = self._revision is not None and topology.revision > self._revision
        if is_new:
            self._metrics.topology_changes += 1
            LOG.info(
                "new cluster configuration %s (was %s): %d nodes",
                topology.revision, self._revision, len(topology.nodes),
            )  # fmt: skip
        self._revision = topology.revision
        self._nodes = [node.place for node in topology.nodes]
        self.topology = topology
        self._avoid = None
        known = {*self._nodes, *self.sessions}
        self._pauses = {place: pause for place, pause in self._pauses.items() if place in known}
        if is_new:
            self._move_streams(topology)

    def take_pushed(self, config: bytes, host: str) -> None:
        """Adopt a pushed configuration. If it cannot be read, log that and keep the old one."""
        try:
            self.adopt(config, host)
        except TopologyError as error:
            LOG.warning("%s; keeping the previous configuration", error)

    async def close(self) -> None:
        """Close all connections."""
        self._moves.finish()
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        await self._watch.close()
        sessions, self.sessions = self.sessions, {}
        for session in sessions.values():
            session.close()
        self.close_spare()
        await self._dials.close()

    def _move_streams(self, topology: Topology) -> None:
        """Remove streams from nodes that no longer serve their partition.

        A partition without a node stays where it is until its stream ends. So does one that is held
        for a decision.
        """
        for place, session in list(self.sessions.items()):
            for vb_id in session.core.streams.unfinished():
                if topology.place_of(vb_id) in {place, None}:
                    continue
                wanted = session.core.streams.remove(vb_id)
                if wanted is not None:
                    self._metrics.streams_moved += 1
                    self.wanted({vb_id: wanted})
            session.flush()

    # -- connections -----------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Get the configuration from the first node that answers, and keep its connection.

        A node whose configuration is older than the known one counts only if no other answers. Each
        time another node is asked first. If none answers, raises the last connection error.
        """
        known = list(dict.fromkeys([*self.address.places, *self.sessions, *self._nodes]))
        turn = self._refreshes % len(known)
        self._refreshes += 1
        left = known[turn:] + known[:turn]
        if self._avoid in left:
            left.append(left.pop(left.index(self._avoid)))
        self._avoid = None
        older: tuple[Place, Link] | None = None
        while left:
            try:
                place, link = await first_answer(self._dial, left, Link.close)
            except TRANSIENT as error:
                if older is None:
                    raise none_answered(error, known) from error
                break
            if older is not None:
                older[1].close()
            older = place, link
            if not self._is_older(link):
                break
            left.remove(place)
        assert older is not None, "there is at least one node"
        place, link = older
        self._keep_spare(place, link)
        assert link.handshake is not None
        if link.handshake.config:
            self.adopt(link.handshake.config, place[0], is_last_resort=True)
        if self.topology is None:
            self.topology = single_node(*place)
        self._is_stale = False

    def _is_older(self, link: Link) -> bool:
        """Whether a new connection brought an older configuration than the known one."""
        assert link.handshake is not None
        if self._revision is None or not link.handshake.config:
            return False
        try:
            return link.topology().revision < self._revision
        except TopologyError:
            return True  # it cannot be read; another node's may

    async def links_of(self, vb_ids: list[int]) -> list[tuple[Link, list[int]]]:
        """Return a connection, not yet streaming, for each node of these partitions.

        Follows newer configurations as `place` does.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._connect_timeout_s
        patience_s = OPEN_PATIENCE_S
        while True:
            assert self.topology is not None
            has_several = len(self.topology.nodes) > 1
            failure: DcpdError | None = None
            groups: dict[Place, list[int]] = {}
            try:
                for vb_id in vb_ids:
                    node = self.topology.node_of(vb_id)
                    groups.setdefault(node.place, []).append(vb_id)
            except TopologyError as error:
                failure = error
            limit_s = min(patience_s, self._connect_timeout_s) if has_several else None
            failure = failure or await self._dial_spares(list(groups), limit_s)
            if failure is None:
                return [(self._spare[place], members) for place, members in groups.items()]
            if loop.time() >= deadline_s or not has_several:
                raise failure
            patience_s *= 2
            await self._look_again(deadline_s)

    async def _dial_spares(self, places: list[Place], limit_s: float | None) -> DcpdError | None:
        """Keep a connection to each node; return why one has none. Raises what is not transient."""
        tasks = {
            asyncio.create_task(self._dial(place)): place
            for place in places
            if place not in self._spare or self._spare[place].is_closed
        }
        if not tasks:
            return None
        done, pending = await asyncio.wait(tasks, timeout=limit_s)
        failure: DcpdError | None = None
        errors = []
        for task in done:
            error = task.exception()
            if error is None:
                self._keep_spare(tasks[task], task.result())
            elif isinstance(error, TRANSIENT):
                failure = error
            else:
                errors.append(error)
        await give_up(list(pending), Link.close)
        if errors:
            raise errors[0]
        if pending:
            names = ", ".join(f"{host}:{port}" for host, port in map(tasks.__getitem__, pending))
            return OperationTimeoutError(f"no session within {limit_s:g} s", node=names)
        return failure

    async def _look_again(self, deadline_s: float) -> None:
        """While the consumer opens: pause, and ask for a newer configuration."""
        loop = asyncio.get_running_loop()
        pause_s = OPEN_PAUSE_S * (1 - jitter() / 2)
        await asyncio.sleep(min(pause_s, deadline_s - loop.time()))
        with suppress(*TRANSIENT):  # then the known one is tried again
            await self.refresh()

    def any_link(self) -> Link:
        """Return a connection that does not stream yet."""
        return next(iter(self._spare.values()))

    async def place(self) -> None:
        """Assign each partition without a stream to the connection of its node.

        Follows newer configurations for `connect_timeout_s`, if there are several nodes. If some
        partitions have no node then, or it cannot be reached, raises the last error.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._connect_timeout_s
        if self.topology is None:
            await self.refresh()
        while True:
            failure = self._assign(None)
            has_several = self.topology is not None and len(self.topology.nodes) > 1
            patience_s = OPEN_PATIENCE_S if has_several else self._connect_timeout_s
            failure = await self._settle(loop.time() + patience_s) or failure
            if not self.homeless:
                self._watch.update([*self.sessions], self._nodes)
                return
            if loop.time() >= deadline_s or (failure is not None and not has_several):
                raise failure or OperationTimeoutError(
                    f"{len(self.homeless)} partitions have no connection within"
                    f" {self._connect_timeout_s:g} s"
                )
            await self._look_again(deadline_s)

    async def _settle(self, until_s: float) -> DcpdError | None:
        """Wait for all dials until a time; return the error of a failed one."""
        failure = None
        try:
            async with asyncio.timeout_at(until_s):
                while self._dials:
                    await self._dials.wait()
                    failure = self._collect() or failure
        except TimeoutError:
            pass
        return failure

    async def keep_placed(
        self, on_failure: Callable[[DcpdError], None], on_placed: Callable[[], None]
    ) -> None:
        """Assign partitions without a connection, with growing pauses, until cancelled."""
        loop = asyncio.get_running_loop()
        failing_since: float | None = None
        while True:
            await self._wait_for_work()
            try:
                failure = self._round(loop.time())
            except DcpdError as error:
                on_failure(error)
                return
            if failure is not None and self.homeless:
                if failing_since is None:
                    failing_since = loop.time()
                LOG.warning(
                    "%d partitions have no stream: %s; retrying", len(self.homeless), failure
                )
                limit_s = self._give_up_after_s
                if limit_s is not None and loop.time() - failing_since >= limit_s:
                    on_failure(failure)
                    return
            elif not self.homeless:
                failing_since = None
            on_placed()

    # -- inside --------------------------------------------------------------------------------

    def _round(self, now_s: float) -> DcpdError | None:
        """Assign the partitions that can be assigned now; return a transient error.

        Raises other DcpdErrors. It waits for nobody.
        """
        failure = self._collect() or self._refreshed()
        if self._needs_refresh() and now_s >= self._refresh_pause.until_s:
            self._pause(self._refresh_pause, now_s)
            self._refreshing = asyncio.create_task(self.refresh(), name="consumer-map")
            self._refreshing.add_done_callback(lambda _task: self._work.set())
        if self.topology is not None:
            failure = self._assign(now_s) or failure
        self._watch.update([*self.sessions], self._nodes)
        return failure

    def _needs_refresh(self) -> bool:
        """Whether a configuration is wanted, and none is being asked for."""
        is_unknown = self.topology is None or self._is_stale
        is_wanted = (bool(self.homeless) and is_unknown) or self._avoid is not None
        return is_wanted and self._refreshing is None

    def _refreshed(self) -> DcpdError | None:
        """Take the end of a refresh; return its error. Raises one that is not transient."""
        task = self._refreshing
        if task is None or not task.done():
            return None
        self._refreshing = None
        try:
            task.result()
        except TRANSIENT as error:
            return error
        return None

    def _collect(self) -> DcpdError | None:
        """Begin a session for each link that is ready; return the error of a failed one."""
        failure = None
        now_s = asyncio.get_running_loop().time()
        for place, vb_ids, link, problem in self._dials.finished():
            if link is None:
                failure = problem
                self._pause(self._pause_of(place), now_s)
                self._is_stale = True  # the node may be gone for good
            else:
                self._begin(place, link, vb_ids)
        return failure

    def _assign(self, now_s: float | None) -> DcpdError | None:
        """Assign homeless partitions to sessions and dials, except if their node has a pause.

        `now_s` None: ignore pauses. Return the error of partitions without a node.
        """
        assert self.topology is not None
        groups: dict[Place, list[int]] = {}
        failure: DcpdError | None = None
        for vb_id in self.homeless:
            try:
                node = self.topology.node_of(vb_id)
            except TopologyError as error:
                failure = error
                self._is_stale = True
                continue
            groups.setdefault(node.place, []).append(vb_id)
        for place, vb_ids in groups.items():
            if place in self._dials:
                self._dials.start(place, vb_ids)
                continue
            if now_s is not None:
                pause = self._pause_of(place)
                if now_s < pause.until_s:
                    continue
                self._pause(pause, now_s)
            if place in self.sessions:
                partitions = {vb_id: self.homeless.pop(vb_id) for vb_id in vb_ids}
                self.sessions[place].add(partitions)
                self._moves.placed(partitions, place)
                continue
            spare = self._spare.pop(place, None)
            if spare is None or spare.is_closed:
                self._dials.start(place, vb_ids)
            else:
                self._begin(place, spare, vb_ids)
        self.close_spare()
        return failure

    def _begin(self, place: Place, link: Link, vb_ids: list[int]) -> None:
        """Stream partitions over a new connection."""
        # They are taken only now, because the user may have paused some of them meanwhile.
        partitions = {vb_id: self.homeless.pop(vb_id) for vb_id in vb_ids if vb_id in self.homeless}
        if not partitions or place in self.sessions:
            link.close()
            self.homeless.update(partitions)
            return
        session = self.sessions[place] = self._make_session(link)
        for vb_id, wanted in partitions.items():
            session.core.add(vb_id, wanted)
        session.begin()
        self._moves.placed(partitions, place)
        assert link.handshake is not None
        if link.handshake.config:
            self.take_pushed(link.handshake.config, place[0])

    async def _wait_for_work(self) -> None:
        """Wait until a partition needs a connection, a dial has ended, or a pause is over."""
        try:
            async with asyncio.timeout_at(self._next_attempt_s()):
                await self._work.wait()
        except TimeoutError:
            pass
        self._work.clear()

    def _next_attempt_s(self) -> float | None:
        """Return when a homeless partition can be assigned next; None: no pause is running."""
        if not self.homeless:
            return self._refresh_pause.until_s if self._needs_refresh() else None
        topology = self.topology
        places = {topology.place_of(vb_id) for vb_id in self.homeless} if topology else set()
        times_s = [
            self._pause_of(place).until_s
            for place in places
            if place is not None and place not in self._dials
        ]
        if self._needs_refresh():
            times_s.append(self._refresh_pause.until_s)
        return min(times_s, default=None)

    def _pause(self, pause: Pause, now_s: float) -> None:
        pause.begin(now_s, jitter())
        self.has_paused = True

    def _pause_of(self, place: Place) -> Pause:
        return self._pauses.setdefault(place, Pause())

    async def _dial(self, place: Place) -> Link:
        return await Link.connect(
            self.address.at(*place), timeout_s=self._connect_timeout_s, features=PUSH_FEATURES
        )

    def _keep_spare(self, place: Place, link: Link) -> None:
        before = self._spare.pop(place, None)
        if before is not None:
            before.close()
        self._spare[place] = link

    def close_spare(self) -> None:
        """Close unused connections."""
        spare, self._spare = self._spare, {}
        for link in spare.values():
            link.close()
