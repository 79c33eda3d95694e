"""Assigns partitions to connections, and finds nodes for partitions without one.

Invariants
- a followed partition is in exactly one place: with a session's core, in `homeless`, or with the
  consumer (held for a decision, paused);
- if the newest configuration moves a partition to another node, the stream moves too;
- two attempts at a node, also to stream over a connection that it has, are at least a pause apart.

`clients.link` has the map, the pauses and the connection attempts.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from random import Random
from typing import Final

from clients.address import ServerAddress
from clients.consumer.counters import ConsumerMetrics
from clients.consumer.node_session import LOG, ConsumerSession
from clients.consumer.options import ConsumerOptions
from clients.consumer.streams import Wanted
from clients.errors import (
    TRANSIENT,
    DcpdError,
    OperationTimeoutError,
    TopologyError,
)
from clients.link.copies import Copies
from clients.link.dials import Dials, MapWatch
from clients.link.pipelined_link import Link, give_up
from clients.link.topology import Place, Topology, single_node

OPEN_PAUSE_S: Final = 0.2
OPEN_PATIENCE_S: Final = 1.0
"""While a consumer opens: how long nodes have before another one is asked for a newer map, and the
pause before that."""
QUIET_S: Final = 1.0
WAVE_S_MAX: Final = 10.0
"""A wave of moved partitions, of which one line is logged, ends after such a silence or time."""

draws: Final = Random()  # noqa: S311 - not for secrets
jitter: Final = draws.random


class Placement:
    """The sessions of a consumer, and its partitions without one.

    `make_session` gets a link that is ready for DCP_OPEN.
    """

    def __init__(
        self,
        address: ServerAddress,
        metrics: ConsumerMetrics,
        make_session: Callable[[Link], ConsumerSession],
        options: ConsumerOptions,
    ) -> None:
        self.address = address
        self.sessions: dict[Place, ConsumerSession] = {}
        self.homeless: dict[int, Wanted] = {}
        self._metrics = metrics
        self._make_session = make_session
        self._connect_timeout_s = options.connect_timeout_s
        self._give_up_after_s = options.give_up_after_s
        self._work = asyncio.Event()
        self._dials = Dials(address, self._work, timeout_s=self._connect_timeout_s)
        self.cluster = self._dials.cluster
        self._watch = MapWatch(self._dials, self.take_pushed)
        self._moves = Moves()
        self._spare: dict[Place, Link] = {}
        self._copies = Copies(options.rack) if options.from_replicas else None

    @property
    def reads_copies(self) -> bool:
        """Whether partitions are read from copies that are not masters."""
        return self._copies is not None

    @property
    def topology(self) -> Topology | None:
        """The configuration to go by; None: it is unknown, or out of date."""
        return self.cluster.topology

    # -- called by the consumer ------------------------------------------------------------------

    def wanted(self, partitions: Mapping[int, Wanted]) -> None:
        """Add partitions that need a connection."""
        if partitions:
            self.homeless.update(partitions)
            self._work.set()

    def progress(self, session: ConsumerSession | None = None) -> None:
        """A node (None: any) sent data, so its next pause is short again."""
        place = None if session is None else session.link.place
        self.cluster.progress(place, is_placed=session is None or not self.homeless)

    def lost(self, session: ConsumerSession) -> bool:
        """A connection is lost. Return False if it was already replaced."""
        place = session.link.place
        if self.sessions.get(place) is not session:
            return False
        del self.sessions[place]
        self.cluster.topology = None
        self._work.set()
        return True

    def want_map(self, session: ConsumerSession) -> None:
        """A node refuses for long: ask another one for a newer configuration."""
        self.cluster.avoid = session.link.place
        self._work.set()

    def has_moved(self, vb_id: int, session: ConsumerSession) -> bool:
        """Whether the known configuration gives a partition to another node than a session's. Then
        a refusal without a configuration tells nothing new.
        """
        place = self.topology.place_of(vb_id) if self.topology is not None else None
        return place not in {None, session.link.place}

    def adopt(self, config: bytes, host: str, *, is_last_resort: bool = False) -> None:
        """Adopt a configuration if it is newer. b"" means that the known one is out of date."""
        cluster = self.cluster
        if not config:
            cluster.topology = None
            return
        before = None if cluster.newest is None else cluster.newest.revision
        if not cluster.learn(config, host, is_last_resort=is_last_resort):
            return
        topology = self._choose()
        if before is not None and topology.revision < before:
            LOG.warning("the cluster configuration went back from %s", before)
        if before is not None and topology.revision > before:
            self._metrics.topology_changes += 1
            LOG.info(
                "new cluster configuration %s (was %s): %d nodes",
                topology.revision, before, len(topology.nodes),
            )  # fmt: skip
            self._move_streams(topology)

    def pass_over(self, place: Place, vb_ids: Iterable[int]) -> None:
        """A node does not serve these partitions: if they are to be read from copies, others do."""
        if self._copies is None or self.topology is None:
            return
        here = [vb_id for vb_id in vb_ids if self.topology.place_of(vb_id) == place]
        if here:
            self._copies.pass_over(here, asyncio.get_running_loop().time())
            self._choose()

    def leave_out(self, place: Place, vb_id: int) -> None:
        """A node cannot read what it has stored of a partition: other copies serve it."""
        assert self._copies is not None, "else the stream stays, or fails"
        self._copies.leave_out(vb_id, place, asyncio.get_running_loop().time())
        if self.topology is not None:
            self._choose()

    def _taken(self, vb_ids: Iterable[int]) -> dict[int, Wanted]:
        """Take partitions to stream them now, with what they need to know of their other copies."""
        copies, newest = self._copies, self.cluster.newest
        taken = {vb_id: self.homeless.pop(vb_id) for vb_id in vb_ids if vb_id in self.homeless}
        if copies is None or newest is None:
            return taken
        return {
            vb_id: wanted._replace(is_last=copies.is_last(newest, vb_id))
            for vb_id, wanted in taken.items()
        }

    def _choose(self) -> Topology:
        """Choose the copies to read from in the newest configuration, if masters are not read."""
        topology = self.cluster.newest
        assert topology is not None
        if self._copies is not None:
            topology = self._copies.chosen(topology)
        self.cluster.topology = topology
        return topology

    def take_pushed(self, config: bytes, host: str) -> None:
        """Adopt a pushed configuration. If it cannot be read, log that and keep the old one."""
        try:
            self.adopt(config, host)
        except TopologyError as error:
            LOG.warning("%s; keeping the previous configuration", error)

    async def close(self) -> None:
        """Close all connections."""
        self._moves.finish()
        await self._dials.close()
        await self._watch.close()
        sessions, self.sessions = self.sessions, {}
        for session in sessions.values():
            session.close()
        self.close_spare()

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

        If none answers, raises the last connection error.
        """
        link = await self._dials.newest_link(self.sessions)
        self._keep_spare(link)
        assert link.handshake is not None
        if link.handshake.config:
            self.adopt(link.handshake.config, link.place[0], is_last_resort=True)
        if self.topology is None:
            self.cluster.topology = single_node(*link.place)
        self.cluster.is_stale = False

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
            masters = self.topology if self._copies is None else self.cluster.newest
            assert masters is not None
            groups, without = masters.by_place(vb_ids)
            failure: DcpdError | None = next(iter(without.values()), None)
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
            asyncio.create_task(self._dials.connect(place)): place
            for place in places
            if place not in self._spare or self._spare[place].is_closed
        }
        if not tasks:
            return None
        try:
            done, pending = await asyncio.wait(tasks, timeout=limit_s)
        except BaseException:
            await give_up(list(tasks), Link.close)
            raise
        failure: DcpdError | None = None
        errors = []
        for task in done:
            error = task.exception()
            if error is None:
                self._keep_spare(task.result())
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
            if self.topology is None:  # a connection that streams already was lost meanwhile
                await self._go_by_known_map()
            failure = self._assign(None)
            has_several = self.topology is not None and len(self.topology.nodes) > 1
            patience_s = OPEN_PATIENCE_S if has_several else self._connect_timeout_s
            failure = await self._settle(loop.time() + patience_s) or failure
            if not self.homeless:
                self._watch.update([*self.sessions], self._nodes())
                return
            if loop.time() >= deadline_s or (failure is not None and not has_several):
                raise failure or OperationTimeoutError(
                    f"{len(self.homeless)} partitions have no connection within"
                    f" {self._connect_timeout_s:g} s"
                )
            await self._look_again(deadline_s)

    async def _go_by_known_map(self) -> None:
        """Try the newest configuration once more: a newer one is asked for after that."""
        if self.cluster.newest is None:
            await self.refresh()
        else:
            self._choose()

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
        failure = self._collect() or self._dials.refreshed()
        self._dials.refresh_when_due(now_s, jitter(), self.refresh, is_placed=not self.homeless)
        if self.topology is not None:
            if self._copies is not None and self._copies.return_when_due(now_s):
                self._move_streams(self._choose())
            failure = self._assign(now_s) or failure
        self._watch.update([*self.sessions], self._nodes())
        return failure

    def _nodes(self) -> list[Place]:
        newest = self.cluster.newest
        return [] if newest is None else [node.place for node in newest.nodes]

    def _collect(self) -> DcpdError | None:
        """Begin a session for each link that is ready; return the error of a failed one."""
        failure = None
        now_s = asyncio.get_running_loop().time()
        for place, vb_ids, link, problem in self._dials.finished(now_s, jitter()):
            if link is None:
                failure = problem
                self.pass_over(place, vb_ids)
            else:
                self._begin(link, vb_ids)
        return failure

    def _assign(self, now_s: float | None) -> DcpdError | None:
        """Assign homeless partitions to sessions and dials, except if their node has a pause.

        `now_s` None: ignore pauses. Return the error of partitions without a node.
        """
        groups, without = self.cluster.due(self.homeless, now_s, jitter(), self._dials)
        for place, vb_ids in groups.items():
            if place in self._dials:
                self._dials.start(place, vb_ids)
                continue
            if place in self.sessions:
                partitions = self._taken(vb_ids)
                self.sessions[place].add(partitions)
                self._moves.placed(partitions, place)
                continue
            spare = self._spare.pop(place, None)
            if spare is None or spare.is_closed:
                self._dials.start(place, vb_ids)
            else:
                self._begin(spare, vb_ids)
        self.close_spare()
        return next(iter(without.values()), None)

    def _begin(self, link: Link, vb_ids: list[int]) -> None:
        """Stream partitions over a new connection."""
        place = link.place
        # They are taken only now, because the user may have paused some of them meanwhile.
        partitions = self._taken(vb_ids)
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
        cluster, topology = self.cluster, self.topology
        places = {topology.place_of(vb_id) for vb_id in self.homeless} if topology else set()
        times_s = [
            cluster.pause_of(place).until_s
            for place in places
            if place is not None and place not in self._dials
        ]
        wants_newer = cluster.wants_newer(is_placed=not self.homeless)
        if wants_newer and not self._dials.is_refreshing:
            times_s.append(cluster.map_pause.until_s)
        if self._copies is not None and self._copies.return_s is not None:
            times_s.append(self._copies.return_s)
        return min(times_s, default=None)

    def _keep_spare(self, link: Link) -> None:
        before = self._spare.pop(link.place, None)
        if before is not None:
            before.close()
        self._spare[link.place] = link

    def close_spare(self) -> None:
        """Close unused connections."""
        spare, self._spare = self._spare, {}
        for link in spare.values():
            link.close()


class Moves:
    """Tells where partitions have moved: one line for a wave of them, not one for each.

    A wave ends when nothing has moved for QUIET_S, or after WAVE_S_MAX. The line is logged.
    """

    def __init__(self) -> None:
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
            LOG.warning(moves_text(moved))


def moves_text(moved: dict[int, Place]) -> str:
    """Return a line for partitions and their new nodes; the node that got most comes first."""
    counts = Counter(moved.values()).most_common()
    what = "1 partition moved" if counts[0][1] == 1 else f"{counts[0][1]} partitions moved"
    others = [f"{count} to {host}:{port}" for (host, port), count in counts[1:]]
    return ", ".join([f"{what} to {counts[0][0][0]}:{counts[0][0][1]}", *others])
