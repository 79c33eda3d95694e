"""A client's connection attempts over asyncio: to nodes of partitions, and for the cluster's map.

    dials = Dials(address, wake)
    dials.start(place, [3, 4])                       # at most one per node
    for dialed in dials.finished(now_s, jitter): ...
    dials.refresh_when_due(now_s, jitter, refresh)   # asks for a newer map if one is wanted

`clients.link.topology.ClusterMap` decides whom to ask and when to try again. Consumers and backups
decide what goes over the connections.

Invariants
- nodes are dialed independently, and asked for the map beside that, so a stalled node delays only
  its own partitions;
- a dial ends with a link or an error after `timeout_s`, whatever the node does;
- a link that is not taken is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from random import Random
from typing import Any, Final, NamedTuple

from clients.address import ServerAddress
from clients.errors import TRANSIENT, DcpdError, TopologyError, none_answered
from clients.link.handshake import PUSH_FEATURES
from clients.link.pipelined_link import CONNECT_TIMEOUT_S, Link, first_answer, give_up
from clients.link.topology import PAUSE_MAX_S, ClusterMap, ClusterNode, Place

CHECK_S: Final = 5.0
"""How often the node of a map watch is asked for a sign of life, and how long that may take."""
PAUSE_S: Final = 1.0
"""Before another node is watched."""

_draw: Final = Random().random  # noqa: S311 - not for secrets


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
    """The running attempts of one client. `wake` is set when one has ended."""

    def __init__(
        self,
        address: ServerAddress,
        wake: asyncio.Event,
        *,
        timeout_s: float = CONNECT_TIMEOUT_S,
        features: tuple[int, ...] = PUSH_FEATURES,
        longest_s: float = PAUSE_MAX_S,
    ) -> None:
        named = [ClusterNode(*place) for place in address.places]
        self.cluster = ClusterMap(named, is_tls=address.is_tls, longest_s=longest_s)
        self._address = address
        self._wake = wake
        self._timeout_s = timeout_s
        self._features = features
        self._dials: dict[Place, _Dial] = {}
        self._refreshing: asyncio.Task[None] | None = None

    def __contains__(self, place: object) -> bool:
        """Whether a node is being dialed."""
        return place in self._dials

    def __iter__(self) -> Iterator[Place]:
        """Iterate the nodes that are being dialed."""
        return iter(self._dials)

    @property
    def node(self) -> str:
        """The address as the user wrote it, for errors."""
        return self._address.node

    def __len__(self) -> int:
        """The number of running dials."""
        return len(self._dials)

    async def connect(self, place: Place) -> Link:
        """Return a new connection to a node. Raises what `Link.connect` raises."""
        return await Link.connect(
            self._address.at(*place), timeout_s=self._timeout_s, features=self._features
        )

    async def close(self) -> None:
        """Cancel all attempts."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        dials, self._dials = self._dials, {}
        await give_up([dial.task for dial in dials.values()], lambda link: link.close())

    # -- to the nodes of partitions --------------------------------------------------------------

    def start(self, place: Place, vb_ids: Iterable[int]) -> None:
        """Connect to a node for some partitions. If a dial is running, add them to it."""
        dial = self._dials.get(place)
        if dial is None:
            task = asyncio.create_task(self.connect(place), name=f"dial-{place[1]}")
            task.add_done_callback(lambda _task: self._wake.set())
            dial = self._dials[place] = _Dial(task, {})
        dial.vb_ids.update(dict.fromkeys(vb_ids))

    async def wait(self) -> None:
        """Wait until a dial has ended, if there is one."""
        if self._dials:
            tasks = [dial.task for dial in self._dials.values()]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    def finished(self, now_s: float, jitter: float) -> list[Dialed]:
        """Return the dials that have ended, each once. A node that was not reached gets a pause,
        and a newer map is wanted: it may be gone for good.

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
            if failure is not None:
                self.cluster.pause(place, now_s, jitter)
                self.cluster.is_stale = True
            link = task.result() if failure is None else None
            dialed.append(Dialed(place, list(vb_ids), link, failure))
        return dialed

    # -- for the map -----------------------------------------------------------------------------

    async def newest_link(self, used: Iterable[Place] = ()) -> Link:
        """Return a connection to the first node that answers. Its configuration counts.

        A node whose configuration is older than the newest one counts only if no other answers.
        `used`: further nodes to ask. If none answers, raises the last connection error.
        """
        left = self.cluster.to_ask(used)
        known = tuple(left)
        older: Link | None = None
        while left:
            try:
                _, link = await first_answer(self.connect, left, Link.close)
            except TRANSIENT as error:
                if older is None:
                    raise none_answered(error, known) from error
                break
            except BaseException:
                if older is not None:
                    older.close()
                raise
            if older is not None:
                older.close()
            older = link
            if not self._is_older(link):
                break
            left.remove(link.place)
        assert older is not None, "there is at least one node"
        return older

    async def refreshed_link(self) -> Link:
        """Go by the map of the first node that answers; return the connection to it."""
        link = await self.newest_link()
        try:
            self.cluster.adopt(link.topology(), is_last_resort=True)
        except TopologyError:
            link.close()
            raise
        return link

    @property
    def is_refreshing(self) -> bool:
        """Whether nodes are being asked for the map."""
        return self._refreshing is not None

    def refresh_when_due(
        self,
        now_s: float,
        jitter: float,
        refresh: Callable[[], Coroutine[Any, Any, None]],
        *,
        is_placed: bool,
    ) -> None:
        """Begin `refresh` if a newer map is wanted, and the pause since the last one is over.

        `is_placed`: all partitions have a node.
        """
        cluster = self.cluster
        if self.is_refreshing or not cluster.wants_newer(is_placed=is_placed):
            return
        if now_s >= cluster.map_pause.until_s:
            cluster.map_pause.begin(now_s, jitter)
            cluster.has_paused = True
            self._refreshing = asyncio.create_task(refresh(), name="dcpd-map")
            self._refreshing.add_done_callback(lambda _task: self._wake.set())

    def refreshed(self) -> DcpdError | None:
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

    def _is_older(self, link: Link) -> bool:
        """Whether a new connection brought an older configuration than the newest one."""
        newest = self.cluster.newest
        assert link.handshake is not None
        if newest is None or not link.handshake.config:
            return False
        try:
            return link.topology().revision < newest.revision
        except TopologyError:
            return True  # it cannot be read; another node's may


class MapWatch:
    """A connection for nothing but the cluster's maps, beside a consumer's only connection.

    Servers push newer maps over every connection. If a node stands still, its streams move by the
    map that another node pushes. A consumer with one connection would hear of it only after two
    NOOP intervals. So it has a second connection, to another node. If that is silent for CHECK_S,
    another node is tried. `on_config` gets each configuration, and the host that it came from.
    """

    def __init__(
        self,
        dials: Dials,
        on_config: Callable[[bytes, str], None],
    ) -> None:
        self._dials = dials
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
        link = await self._dials.connect(place)
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
