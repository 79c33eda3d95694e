"""A client's connections, one per node, and the cluster's maps that come with them.

Used by `clients.kv.exchange`.

Invariants
- a node has one connection that is used. Connections that met with silence are replaced, and wait
  for late answers until they have none to wait for;
- all who wait for a node share one attempt to connect;
- a map that comes with a connection, or is pushed over it, goes to the router.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from clients.address import ServerAddress
from clients.errors import DcpdError, OperationTimeoutError, TopologyError
from clients.kv.routing import PATIENCE_S, Router
from clients.link.handshake import PUSH_FEATURES
from clients.link.pipelined_link import CONNECT_TIMEOUT_S, Link
from clients.link.topology import ClusterNode, FetchMap, Place


class News:
    """Tells waiting calls that a newer map is known."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None

    def future(self) -> asyncio.Future[None]:
        """Return what ends when the next newer map is known."""
        if self._future is None:
            self._future = asyncio.get_running_loop().create_future()
        return self._future

    def tell(self) -> None:
        """A newer map is known."""
        future, self._future = self._future, None
        if future is not None and not future.done():
            future.set_result(None)


class NodeLinks:
    """The connections of one client, one per node."""

    def __init__(self, address: ServerAddress, router: Router, timeout_s: float) -> None:
        self.address = address
        self.news = News()
        self._router = router
        router.on_newer = self.news.tell
        self._timeout_s = timeout_s
        self._links: dict[Place, Link] = {}
        self._dials: dict[Place, asyncio.Task[Link]] = {}
        self._retired: list[Link] = []

    async def open(self) -> None:
        """Connect to the first of the named nodes that answers."""
        link = await Link.connect(self.address, timeout_s=self._timeout_s, features=PUSH_FEATURES)
        place = link.place
        try:
            self._router.begin_at(place)
            self._keep(place, link)
        except BaseException:
            link.close()
            raise

    async def close(self) -> None:
        """Close all connections."""
        dials = list(self._dials.values())
        for dial in dials:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)
        links = (*self._links.values(), *self._retired)
        self._links.clear()
        self._retired.clear()
        for link in links:
            link.close()
        await asyncio.sleep(0)  # lets the transports finish closing

    def is_open(self, node: ClusterNode) -> bool:
        """Whether there is a connection to a node."""
        link = self._links.get(node.place)
        return link is not None and not link.is_closed

    async def fetch(self, fetch: FetchMap) -> bytes | DcpdError:
        """Return the configuration of a node, b"" if it has none."""
        try:
            async with asyncio.timeout_at(fetch.until_s):
                link = await self.link(fetch.node.place)
                return await link.fetch_config()
        except DcpdError as error:
            return error
        except TimeoutError:
            return OperationTimeoutError("no configuration in time", node=fetch.node.name)

    async def link(self, place: Place, *, is_fresh: bool = False) -> Link:
        """Return the connection to a node; reconnect if it broke.

        All who wait for the same node share one attempt. It goes on if they give up. `is_fresh`:
        replace a connection that is silent.
        """
        link = self._links.get(place)
        if link is not None and not link.is_closed:
            is_silent = link.now_s - link.heard_s >= PATIENCE_S
            if not (is_fresh and is_silent):
                return link
        dial = self._dials.get(place)
        if dial is None:
            dial = self._dials[place] = asyncio.create_task(self._dial(place))
            dial.add_done_callback(_seen)
        await asyncio.wait([dial])
        return dial.result()

    async def _dial(self, place: Place) -> Link:
        try:
            link = await Link.connect(
                self.address.at(*place),
                timeout_s=min(self._timeout_s, CONNECT_TIMEOUT_S),
                features=PUSH_FEATURES,
            )
            self._keep(place, link)
            return link
        finally:
            del self._dials[place]

    def _keep(self, place: Place, link: Link) -> None:
        """Use a new connection. Raises TopologyError if no configuration is known."""
        before = self._links.get(place)
        if before is not None and not before.is_closed:
            self._retired.append(before)
        for old in self._retired:
            if not old.pending:
                old.close()
        self._retired[:] = [old for old in self._retired if not old.is_closed]
        self._links[place] = link
        self._adopt_config(link)
        link.on_config = self._config_pushed

    def _config_pushed(self, link: Link) -> None:
        with suppress(TopologyError):  # the next answer that needs a map brings one
            self._router.adopt(link.topology())

    def _adopt_config(self, link: Link) -> None:
        """Adopt the configuration of a new connection. Raises TopologyError if none is known."""
        try:
            self._router.adopt(link.topology())
        except TopologyError:
            if self._router.topology is None:
                raise


def _seen(dial: asyncio.Task[Link]) -> None:
    """Look at an error that nobody may be waiting for any more, or asyncio reports it."""
    if not dial.cancelled():
        dial.exception()
