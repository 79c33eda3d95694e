"""Performs the calls of `KvClient`: does over asyncio what a Call says.

    exchange = Exchange(router, connections)
    outcomes = await exchange.documents(operations, timeout_s, level, collection)
    reply = await exchange.command(opcode, "what it is", timeout_s, node=node)

The usual case, in which one node serves all operations and answers, needs no Call. After a second
without all answers a Call takes over. What was sent is still waited for.

Invariants of the connections (`NodeLinks`)
- a node has one connection that is used. Connections that met with silence are replaced, and wait
  for late answers until they have none to wait for;
- all who wait for a node share one attempt to connect;
- a map that comes with a connection, or is pushed over it, goes to the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from random import Random
from typing import Any, Final, cast

from clients.address import ServerAddress
from clients.errors import (
    DcpdError,
    NotFoundError,
    OperationTimeoutError,
    TemporaryError,
    TopologyError,
    UnknownCollectionError,
    UnsupportedError,
)
from clients.kv.call import Call, is_answer
from clients.kv.commands import KvTransport, reply_of
from clients.kv.routing import (
    PATIENCE_S,
    Action,
    Result,
    Router,
    Send,
    patience_s,
)
from clients.link.handshake import PUSH_FEATURES
from clients.link.pipelined_link import CONNECT_TIMEOUT_S, Link, first_answer
from clients.link.topology import ClusterNode, FetchMap, Place, Topology
from clients.operation import (
    Document,
    DurabilityLevel,
    Operation,
    Outcome,
    collection_id_of,
    durability_frame,
    outcome_of,
    pack_operations,
)
from dcp.wire.frame import Frame
from dcp.wire.opcode import Opcode
from vbucket.model.ids import DEFAULT_COLLECTION_PREFIX
from vbucket.model.manifest import encode_leb128

BATCH_OPERATIONS_MAX: Final = 4096
"""Operations in one write: large enough for one fsync per batch, small enough for memory."""
BATCH_BYTES_MAX: Final = 4 * 1024 * 1024
jitter: Final = Random().random  # noqa: S311 - not for secrets
Flights = list[tuple[int, int, "asyncio.Future[list[Frame]]"]]
"""Chunks that were written: first position, end position, their replies."""


class Exchange(KvTransport):
    """Performs the calls of a `KvClient` over asyncio. The client and its collections share one."""

    def __init__(self, router: Router, connections: NodeLinks) -> None:
        self.router = router
        self._connections = connections
        self._collection_ids: dict[str, int] = {}

    async def documents(
        self,
        operations: list[Operation],
        timeout_s: float,
        level: DurabilityLevel,
        collection: str | None,
    ) -> list[Outcome]:
        """Send operations; return one result or error per operation, in order."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        deadline_s = begun_s + timeout_s
        work: dict[Send, Flights] = {}

        def transmit(send: Send) -> Coroutine[Any, Any, None]:
            flights = work.setdefault(send, [])
            return self.transmit(operations, send, flights, level, deadline_s, collection)

        send = self.router.direct(operations)
        is_over = True
        if send is not None and self._connections.is_open(send.node):
            try:
                async with asyncio.timeout_at(begun_s + patience_s(timeout_s)):
                    await transmit(send)
            except TimeoutError:
                is_over = False
            if all(map(is_answer, send.outcomes)):
                self.router.note_up(send.node)
                return cast("list[Outcome]", send.outcomes)
        else:
            send = None
        call = Call(self.router, operations, begun_s, timeout_s, direct=send)
        tasks: dict[asyncio.Task[Any], Action] = {}
        if send is not None:
            if is_over:
                call.finish(send, loop.time(), jitter())
            else:  # go on waiting, and look for a newer map meanwhile
                tasks[asyncio.create_task(transmit(send))] = send
        await self._run(call, transmit, tasks)
        return cast("list[Outcome]", call.results)

    async def command(
        self,
        opcode: Opcode,
        what: str,
        timeout_s: float,
        *,
        key: bytes = b"",
        extras: bytes = b"",
        vb_id: int | None = None,
        node: ClusterNode | None = None,
    ) -> Result:
        """Send a command to the node of a partition, or to a node; return its reply or an error.

        `what` names it in errors.
        """
        now_s = asyncio.get_running_loop().time()
        operation = (opcode, key, extras, b"", 0)
        call = Call(self.router, [operation], now_s, timeout_s, vb_id=vb_id, node=node)
        await self._run(call, lambda send: self._transmit_command(operation, what, vb_id, send), {})
        result = call.results[0]
        assert result is not None, "every operation has an outcome"
        return result

    async def ask_replicas(
        self,
        operation: Operation,
        sends: Sequence[Send],
        deadline_s: float,
        collection: str | None,
        master: Callable[[], Coroutine[Any, Any, Outcome]],
    ) -> Outcome:
        """See KvTransport. The next one is asked while the one before may still answer."""
        by_place = {send.node.place: send for send in sends}

        async def ask(place: Place) -> Outcome:
            send = by_place.get(place)
            if send is None:
                return await master()
            await self.transmit([operation], send, [], DurabilityLevel.NONE, deadline_s, collection)
            outcome = send.outcomes[0]
            if isinstance(outcome, Document | NotFoundError):
                return outcome
            self.router.learn_from(outcome, send.node.host)
            raise TemporaryError(f"the replica does not answer: {outcome}")

        _, outcome = await first_answer(
            ask, [*sorted(by_place, key=lambda _place: jitter()), ("", 0)], lambda _outcome: None
        )
        return outcome

    async def topology(self, timeout_s: float) -> Topology:  # noqa: ARG002 - see below
        """See KvTransport. It comes with the first connection, which has a timeout of its own."""
        if self.router.topology is None:
            await self._connections.link(self.router.seed.place)
        assert self.router.topology is not None
        return self.router.topology

    async def named_node(self, timeout_s: float) -> ClusterNode:
        """See KvTransport. If that node has left the map, the first one of the map."""
        nodes = (await self.topology(timeout_s)).nodes
        seed = self.router.seed.place
        return next((node for node in nodes if node.place == seed), nodes[0])

    async def pause(self, seconds: float) -> None:
        """See KvTransport."""
        await asyncio.sleep(seconds)

    def now_s(self) -> float:
        """See KvTransport."""
        return asyncio.get_running_loop().time()

    async def _run(
        self,
        call: Call,
        transmit: Callable[[Send], Coroutine[Any, Any, None]],
        tasks: dict[asyncio.Task[Any], Action],
    ) -> None:
        """Do what the call says until it is done. `tasks` are under way already."""
        loop = asyncio.get_running_loop()
        try:
            while not call.is_done:
                for action in call.step(loop.time(), jitter()):
                    work = (
                        transmit(action)
                        if isinstance(action, Send)
                        else self._connections.fetch(action)
                    )
                    tasks[asyncio.create_task(work)] = action
                if not call.is_done:
                    await self._wait(call, tasks)
        finally:
            if tasks:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, call: Call, tasks: dict[asyncio.Task[Any], Action]) -> None:
        """Wait until a task has ended, a newer map is known, or the call has to go on; tell the
        call what has ended.
        """
        loop = asyncio.get_running_loop()
        for task, action in tasks.items():
            if isinstance(action, Send) and action.is_abandoned:
                task.cancel()
        pause_s = max(0.0, call.wake_s() - loop.time())
        news = self._connections.news.future()
        done, _ = await asyncio.wait(
            {*tasks, news}, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in [task for task in tasks if task in done]:
            action = tasks.pop(task)
            if isinstance(action, FetchMap):
                call.mapped(action, task.result(), loop.time())
            elif not action.is_abandoned:
                task.result()
                call.finish(action, loop.time(), jitter())

    async def transmit(
        self,
        operations: list[Operation],
        send: Send,
        flights: Flights,
        level: DurabilityLevel,
        deadline_s: float,
        collection: str | None,
    ) -> None:
        """Send operations to one node in chunks, several in flight; fill in the outcomes.

        It may be cancelled and called again. Then it goes on with what is left.
        """
        try:
            await self._write(operations, send, flights, level, deadline_s, collection)
        except DcpdError as error:
            send.outcomes[send.sent :] = [error] * (len(send.outcomes) - send.sent)
        outcomes, name = send.outcomes, send.node.name
        for start, stop, future in flights:
            if outcomes[start] is not None:
                continue
            try:
                frames = await asyncio.shield(future)
            except DcpdError as error:
                outcomes[start:stop] = [error] * (stop - start)
                continue
            for place, frame in zip(range(start, stop), frames, strict=True):
                operation = operations[send.indexes[place]]
                outcomes[place] = outcome_of(operation, send.vb_ids[place], frame, name)
        if collection is not None and any(
            isinstance(outcome, UnknownCollectionError) for outcome in outcomes
        ):
            self._collection_ids.pop(collection, None)

    async def _write(
        self,
        operations: list[Operation],
        send: Send,
        flights: Flights,
        level: DurabilityLevel,
        deadline_s: float,
        collection: str | None,
    ) -> None:
        """Write what is left of a Send. Raises DcpdError for what cannot be written."""
        indexes, vb_ids = send.indexes, send.vb_ids
        for start, stop in _chunks(operations, indexes):
            if start < send.sent:
                continue  # before it was cancelled
            link = await self._connections.link(send.node.place, is_fresh=send.is_fresh)
            prefix = await self._prefix(link, collection)
            if level and not link.has_durability:
                raise UnsupportedError("the server has no durability levels", node=link.node)
            if send.is_cut:
                return
            opaque = link.take_opaques(stop - start)
            packets = pack_operations(
                [operations[index] for index in indexes[start:stop]],
                vb_ids[start:stop],
                opaque=opaque,
                has_collections=link.has_collections,
                collection_prefix=prefix,
                framing=durability_frame(level, deadline_s - link.now_s),
            )
            future = link.send_batch(packets, opaque, stop - start)
            if future.done():
                error = future.exception()
                assert error is not None, "the connection broke before"
                raise error
            flights.append((start, stop, future))
            send.sent = stop
            await link.drain()

    async def _transmit_command(
        self, operation: Operation, what: str, vb_id: int | None, send: Send
    ) -> None:
        """Send a command that only reads; fill in its reply or the error that it means."""
        opcode, key, extras, _, _ = operation
        try:
            link = await self._connections.link(send.node.place, is_fresh=send.is_fresh)
            send.sent = 1
            if opcode == Opcode.STAT:
                frames = await link.request_stat(key)
            else:
                request = link.request(Opcode(opcode), vb_id=vb_id or 0, extras=extras, key=key)
                frames = [await request]
        except DcpdError as error:
            send.outcomes[0] = error
            return
        send.outcomes[0] = reply_of(opcode, what, frames, vb_id, send.node.name)

    async def _prefix(self, link: Link, name: str | None) -> bytes:
        """Return the collection prefix of keys.

        Raises UnknownCollectionError, UnsupportedError.
        """
        if name is None:
            return DEFAULT_COLLECTION_PREFIX
        if not link.has_collections:
            raise UnsupportedError("the server has no collections", node=link.node)
        found = self._collection_ids.get(name)
        if found is None:
            frame = await link.request(Opcode.GET_COLLECTION_ID, key=name.encode())
            found = self._collection_ids[name] = collection_id_of(frame, name, link.node)
        return encode_leb128(found)


def _chunks(operations: list[Operation], indexes: Sequence[int]) -> list[tuple[int, int]]:
    """Split a batch into writes with a bounded number of operations and bytes."""
    chunks = []
    start = size = 0
    for place, index in enumerate(indexes):
        size += len(operations[index][3])
        if place + 1 - start == BATCH_OPERATIONS_MAX or size >= BATCH_BYTES_MAX:
            chunks.append((start, place + 1))
            start, size = place + 1, 0
    if start < len(indexes):
        chunks.append((start, len(indexes)))
    return chunks


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
