"""`KvClient`: a key-value client for asyncio.

    async with KvClient.connect("127.0.0.1:11210") as kv:
        await kv.set("user:1", b'{"name":"Ada"}')
        print((await kv.get("user:1")).value)
        async with kv.pipeline() as batch:          # many operations in one write
            for n in range(10_000):
                batch.set(f"k{n}", b"v")
        failed = [r for r in batch.results if isinstance(r, DcpdError)]

What it does
- Every operation goes to the node that serves its partition. If that node is gone, refuses for a
  while, or no longer serves it, the operation is repeated until `timeout_s` is over, with growing
  pauses and newer maps of the cluster. `clients.kv.call` has the rules.
- A write that was sent, and whose connection broke before the reply, is not repeated: it raises
  ConnectionLostError, because it may have been applied. So do OperationTimeoutError and
  AmbiguousWriteError; `may_have_applied` of an error says so.
- A batch returns a result or a DcpdError for each operation, in the order of the operations.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from copy import copy
from random import Random
from typing import Any, Final, TypeVar, cast

from clients.address import ServerAddress, parse_address
from clients.errors import (
    DcpdError,
    NotFoundError,
    OperationTimeoutError,
    TopologyError,
    UnknownCollectionError,
    UnsupportedError,
    error_from_status,
)
from clients.kv.call import Call
from clients.kv.reaction import is_answer
from clients.kv.routing import Action, FetchMap, Place, Result, Router, Send, place_of
from clients.link.handshake import PUSH_FEATURES
from clients.link.pipelined_link import Link
from clients.link.topology import ClusterNode, Topology, single_node
from clients.operation import (
    Document,
    MutationResult,
    Operation,
    Outcome,
    collection_id_of,
    delete_operation,
    get_operation,
    key_bytes,
    outcome_of,
    pack_operations,
    parsed,
    store_operation,
    value_bytes,
)
from dcp.wire.frame import MAX_VALUE_BYTES, Frame
from dcp.wire.message import parse_failover_log, parse_vb_seqnos
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.model.ids import DEFAULT_COLLECTION_PREFIX
from vbucket.model.manifest import encode_leb128

BATCH_OPERATIONS_MAX: Final = 4096
"""Operations in one write: large enough for one fsync per batch, small enough for memory."""
BATCH_BYTES_MAX: Final = 4 * 1024 * 1024
CHUNKS_IN_FLIGHT: Final = 4

_jitter: Final = Random().random  # noqa: S311 - not for secrets

_T = TypeVar("_T")


class Pipeline:
    """Operations that are collected and sent together; see `KvClient.pipeline`."""

    def __init__(self, client: KvClient) -> None:
        self.results: list[Outcome] = []
        """After `execute`: one result or error per operation, in order."""
        self._client = client
        self._operations: list[Operation] = []

    def __len__(self) -> int:
        """Return the number of collected operations."""
        return len(self._operations)

    def get(self, key: bytes | str) -> None:
        """Add a GET; its result is a Document."""
        self._operations.append(get_operation(key))

    def set(
        self, key: bytes | str, value: bytes, *, flags: int = 0, expiry_s: int = 0, cas: int = 0
    ) -> None:
        """Add a SET; its result is a MutationResult."""
        self._operations.append(store_operation(Opcode.SET, key, value, flags, expiry_s, cas))

    def add(self, key: bytes | str, value: bytes, *, flags: int = 0, expiry_s: int = 0) -> None:
        """Add an ADD."""
        self._operations.append(store_operation(Opcode.ADD, key, value, flags, expiry_s))

    def replace(
        self, key: bytes | str, value: bytes, *, flags: int = 0, expiry_s: int = 0, cas: int = 0
    ) -> None:
        """Add a REPLACE."""
        self._operations.append(store_operation(Opcode.REPLACE, key, value, flags, expiry_s, cas))

    def delete(self, key: bytes | str, *, cas: int = 0) -> None:
        """Add a DELETE."""
        self._operations.append(delete_operation(key, cas))

    async def execute(self) -> list[Outcome]:
        """Send the collected operations; return one result or error per operation, in order."""
        operations, self._operations = self._operations, []
        self.results = await self._client.execute(operations)
        return self.results


class KvClient:
    """A key-value client for asyncio.

    Create it with `KvClient.connect`. Each operation goes to the node that serves its partition,
    and is retried until the timeout. Many tasks of one event loop may share a client.
    """

    def __init__(self, address: ServerAddress, *, timeout_s: float = 10.0) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.collection_name: str | None = None
        """scope.collection of the documents; None: the default one."""
        self._collection_ids: dict[str, int] = {}
        seed = ClusterNode(address.host, address.port)
        self._router = Router(seed, is_tls=address.is_tls, needs_map=True)
        self._links: dict[Place, Link] = {}
        self._dials: dict[Place, asyncio.Task[Link]] = {}

    @property
    def topology(self) -> Topology | None:
        """The newest known configuration of the cluster."""
        return self._router.topology

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, server: str | ServerAddress, *, timeout_s: float = 10.0
    ) -> AsyncIterator[KvClient]:
        """Connect for the duration of an `async with`.

        `server` is HOST:PORT or dcpd://user:password@host:port; `timeout_s` bounds every call.
        """
        client = await cls.open(server, timeout_s=timeout_s)
        try:
            yield client
        finally:
            await client.close()

    @classmethod
    async def open(cls, server: str | ServerAddress, *, timeout_s: float = 10.0) -> KvClient:
        """Connect. The caller must call `close`."""
        address = parse_address(server) if isinstance(server, str) else server
        client = cls(address, timeout_s=timeout_s)
        await client._link((address.host, address.port))
        return client

    def collection(self, name: str) -> KvClient:
        """Return a client for the documents of a collection, "scope.collection".

        It shares the connections of this client and ends with it. Operations raise
        UnknownCollectionError if there is no such collection. A collection that was dropped and
        created again is found again.
        """
        other = copy(self)
        other.collection_name = name
        return other

    async def close(self) -> None:
        """Close all connections."""
        dials = list(self._dials.values())
        for dial in dials:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)
        links, self._links = self._links, {}
        for link in links.values():
            link.close()
        await asyncio.sleep(0)  # lets the transports finish closing

    # -- single operations ---------------------------------------------------------------------

    async def get(self, key: bytes | str) -> Document:
        """Return a document. Raises NotFoundError."""
        return _expect(Document, await self._one(get_operation(key)))

    async def set(
        self, key: bytes | str, value: bytes, *, flags: int = 0, expiry_s: int = 0, cas: int = 0
    ) -> MutationResult:
        """Store a document; with a CAS only if it still has that CAS (CasMismatchError)."""
        operation = store_operation(Opcode.SET, key, value, flags, expiry_s, cas)
        return _expect(MutationResult, await self._one(operation))

    async def add(
        self, key: bytes | str, value: bytes, *, flags: int = 0, expiry_s: int = 0
    ) -> MutationResult:
        """Store a new document. Raises ExistsError."""
        operation = store_operation(Opcode.ADD, key, value, flags, expiry_s)
        return _expect(MutationResult, await self._one(operation))

    async def replace(
        self, key: bytes | str, value: bytes, *, flags: int = 0, expiry_s: int = 0, cas: int = 0
    ) -> MutationResult:
        """Store an existing document. Raises NotFoundError or CasMismatchError."""
        operation = store_operation(Opcode.REPLACE, key, value, flags, expiry_s, cas)
        return _expect(MutationResult, await self._one(operation))

    async def delete(self, key: bytes | str, *, cas: int = 0) -> MutationResult:
        """Delete a document. Raises NotFoundError or CasMismatchError."""
        return _expect(MutationResult, await self._one(delete_operation(key, cas)))

    # -- batches -------------------------------------------------------------------------------

    async def get_many(self, keys: Iterable[bytes | str]) -> dict[bytes, Document]:
        """Return the existing documents by key. Raises the first error except NotFoundError."""
        operations = [get_operation(key) for key in keys]
        found: dict[bytes, Document] = {}
        for operation, outcome in zip(operations, await self.execute(operations), strict=True):
            if not isinstance(outcome, NotFoundError):
                found[operation[1]] = _expect(Document, outcome)
        return found

    async def set_many(
        self,
        documents: Mapping[Any, bytes] | Iterable[tuple[bytes | str, bytes]],
        *,
        flags: int = 0,
        expiry_s: int = 0,
    ) -> list[Outcome]:
        """Store many documents; return a MutationResult or a DcpdError for each, in order."""
        pairs = documents.items() if isinstance(documents, Mapping) else documents
        # For speed: one extras object for all, and the tuples of `store_operation` built here.
        extras = store_operation(Opcode.SET, b"k", b"", flags, expiry_s)[2]
        opcode = Opcode.SET
        operations: list[Operation] = []
        for key, value in pairs:
            raw = key_bytes(key)
            if type(value) is not bytes or len(value) > MAX_VALUE_BYTES:
                value = value_bytes(value, raw, "set")  # noqa: PLW2901
            operations.append((opcode, raw, extras, value, 0))
        return await self.execute(operations)

    @asynccontextmanager
    async def pipeline(self) -> AsyncIterator[Pipeline]:
        """Collect operations and send them together at the end of the `async with`.

        `batch.results` then has one result or error per operation, in order.
        """
        batch = Pipeline(self)
        yield batch
        await batch.execute()

    async def execute(self, operations: list[Operation]) -> list[Outcome]:
        """Send operations together; return one result or error per operation, in order.

        The operations are independent: if one of two operations on the same key has to be repeated,
        they may be applied in the other order. An operation without a reply gets
        OperationTimeoutError or ConnectionLostError.
        """
        window = BATCH_OPERATIONS_MAX * CHUNKS_IN_FLIGHT
        if len(operations) <= window:
            return await self._documents(operations)
        results: list[Outcome] = []
        for start in range(0, len(operations), window):
            results += await self._documents(operations[start : start + window])
        return results

    # -- partitions ----------------------------------------------------------------------------

    async def get_all_vb_seqnos(self) -> dict[int, int]:
        """Return the high seqno of every active partition, by partition, over all nodes."""
        seqnos: dict[int, int] = {}
        active = (1).to_bytes(4, "big")
        deadline_s = asyncio.get_running_loop().time() + self.timeout_s
        await self._nodes()
        asked: dict[ClusterNode, tuple[int, int]] = {}
        while (node := self._router.next_node(asked)) is not None:
            reply = await self._command(
                Opcode.GET_ALL_VB_SEQNOS, "get all vbucket seqnos", extras=active, node=node,
                deadline_s=deadline_s,
            )  # fmt: skip
            if isinstance(reply, Frame):
                seqnos.update(parsed(parse_vb_seqnos, reply.value, node.name))
            elif self._router.is_serving(node):
                _expect(Frame, reply)
        return dict(sorted(seqnos.items()))

    async def failover_log(self, vb_id: int) -> list[tuple[int, int]]:
        """Return a partition's versions as (vb_uuid, seqno at which it began), newest first."""
        reply = await self._command(Opcode.GET_FAILOVER_LOG, "get failover log", vb_id=vb_id)
        frame = _expect(Frame, reply)
        return parsed(parse_failover_log, frame.value, self._router.name_of(vb_id))

    async def stats(self, group: str = "", *, node: ClusterNode | None = None) -> dict[str, str]:
        """Return the statistics of a node (default: the first one), name -> value."""
        at = node or (await self._nodes())[0]
        reply = await self._command(Opcode.STAT, f"stat {group!r}", key=group.encode(), node=at)
        frames = _expect(list, reply)
        return {frame.key.decode(): frame.value.decode(errors="replace") for frame in frames}

    # -- inside --------------------------------------------------------------------------------

    async def _one(self, operation: Operation) -> Outcome:
        return (await self._documents([operation]))[0]

    async def _documents(self, operations: list[Operation]) -> list[Outcome]:
        loop = asyncio.get_running_loop()
        begun_s, timeout_s = loop.time(), self.timeout_s
        send = self._router.direct(operations)
        if send is not None and self._is_open(send.node):
            with suppress(TimeoutError):
                async with asyncio.timeout_at(begun_s + timeout_s):
                    await self._transmit(operations, send)
            if all(map(is_answer, send.outcomes)):
                self._router.note_up(send.node)
                return cast("list[Outcome]", send.outcomes)
        else:
            send = None
        call = Call(self._router, operations, begun_s, timeout_s, direct=send)
        if send is not None:
            call.finish(send, loop.time(), _jitter())
        await self._run(call, lambda send: self._transmit(operations, send))
        return cast("list[Outcome]", call.results)

    async def _command(
        self,
        opcode: Opcode,
        what: str,
        *,
        key: bytes = b"",
        extras: bytes = b"",
        vb_id: int | None = None,
        node: ClusterNode | None = None,
        deadline_s: float | None = None,
    ) -> Result:
        """Send a command to the node of a partition, or to a node; return its reply or an error.

        `what` names it in errors.
        """
        now_s = asyncio.get_running_loop().time()
        timeout_s = self.timeout_s if deadline_s is None else max(0.0, deadline_s - now_s)
        operation = (opcode, key, extras, b"", 0)
        call = Call(self._router, [operation], now_s, timeout_s, vb_id=vb_id, node=node)
        await self._run(call, lambda send: self._transmit_command(operation, what, vb_id, send))
        result = call.results[0]
        assert result is not None, "every operation has an outcome"
        return result

    async def _run(self, call: Call, transmit: Callable[[Send], Coroutine[Any, Any, None]]) -> None:
        """Do what the call says until it is done."""
        loop = asyncio.get_running_loop()
        tasks: dict[asyncio.Task[Any], Action] = {}
        try:
            while not call.is_done:
                for action in call.step(loop.time(), _jitter()):
                    work = transmit(action) if isinstance(action, Send) else self._fetch(action)
                    tasks[asyncio.create_task(work)] = action
                if not call.is_done:
                    await self._wait(call, tasks)
        finally:
            if tasks:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    async def _wait(call: Call, tasks: dict[asyncio.Task[Any], Action]) -> None:
        """Wait until a task has ended or the call has to go on; tell the call what has ended."""
        loop = asyncio.get_running_loop()
        for task, action in tasks.items():
            if isinstance(action, Send) and action.is_abandoned:
                task.cancel()
        pause_s = max(0.0, call.wake_s() - loop.time())
        if not tasks:
            await asyncio.sleep(pause_s)
            return
        done, _ = await asyncio.wait(tasks, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            action = tasks.pop(task)
            if isinstance(action, FetchMap):
                call.mapped(action, task.result(), loop.time())
            elif not action.is_abandoned:
                task.result()
                call.finish(action, loop.time(), _jitter())

    async def _transmit(self, operations: list[Operation], send: Send) -> None:
        """Send operations to one node in chunks, several in flight; fill in the outcomes."""
        indexes, vb_ids, outcomes = send.indexes, send.vb_ids, send.outcomes
        try:
            link = await self._link(place_of(send.node))
            prefix = await self._prefix(link)
        except DcpdError as error:
            outcomes[:] = [error] * len(outcomes)
            return
        flights: list[tuple[int, int, asyncio.Future[list[Frame]]]] = []
        for start, stop in _chunks(operations, indexes):
            chunk = [operations[index] for index in indexes[start:stop]]
            opaque = link.take_opaques(stop - start)
            packets = pack_operations(
                chunk,
                vb_ids[start:stop],
                opaque=opaque,
                has_collections=link.has_collections,
                collection_prefix=prefix,
            )
            future = link.send_batch(packets, opaque, stop - start)
            if not future.done():  # otherwise the connection broke before
                send.sent = stop
            flights.append((start, stop, future))
            await link.drain()
        name = send.node.name
        for start, stop, future in flights:
            try:
                frames = await future
            except DcpdError as error:
                outcomes[start:stop] = [error] * (stop - start)
                continue
            for place, frame in zip(range(start, stop), frames, strict=True):
                outcomes[place] = outcome_of(operations[indexes[place]], vb_ids[place], frame, name)
        if self.collection_name is not None and any(
            isinstance(outcome, UnknownCollectionError) for outcome in outcomes
        ):
            self._collection_ids.pop(self.collection_name, None)

    async def _transmit_command(
        self, operation: Operation, what: str, vb_id: int | None, send: Send
    ) -> None:
        """Send a command that only reads; fill in its reply or the error that it means."""
        opcode, key, extras, _, _ = operation
        try:
            link = await self._link(place_of(send.node))
            send.sent = 1
            if opcode == Opcode.STAT:
                frames = await link.request_stat(key)
            else:
                request = link.request(Opcode(opcode), vb_id=vb_id or 0, extras=extras, key=key)
                frames = [await request]
        except DcpdError as error:
            send.outcomes[0] = error
            return
        status, node = frames[-1].status if frames else 0, send.node.name
        if status:
            send.outcomes[0] = error_from_status(
                status, what, body=frames[-1].value, vb_id=vb_id, node=node
            )
        else:
            send.outcomes[0] = frames if opcode == Opcode.STAT else frames[0]

    async def _fetch(self, fetch: FetchMap) -> bytes | DcpdError:
        """Return the configuration of a node, b"" if it has none."""
        try:
            async with asyncio.timeout_at(fetch.until_s):
                link = await self._link(place_of(fetch.node))
                frame = await link.request(Opcode.GET_CLUSTER_CONFIG)
        except DcpdError as error:
            return error
        except TimeoutError:
            return OperationTimeoutError("no configuration in time", node=fetch.node.name)
        return frame.value if frame.status == Status.OK else b""

    async def _prefix(self, link: Link) -> bytes:
        """Return the collection prefix of keys.

        Raises UnknownCollectionError, UnsupportedError.
        """
        name = self.collection_name
        if name is None:
            return DEFAULT_COLLECTION_PREFIX
        if not link.has_collections:
            raise UnsupportedError("the server has no collections", node=link.node)
        found = self._collection_ids.get(name)
        if found is None:
            frame = await link.request(Opcode.GET_COLLECTION_ID, key=name.encode())
            found = self._collection_ids[name] = collection_id_of(frame, name, link.node)
        return encode_leb128(found)

    async def _nodes(self) -> tuple[ClusterNode, ...]:
        if self._router.topology is None:
            await self._link((self.address.host, self.address.port))
        assert self._router.topology is not None
        return self._router.topology.nodes

    def _is_open(self, node: ClusterNode) -> bool:
        link = self._links.get(place_of(node))
        return link is not None and not link.is_closed

    async def _link(self, place: Place) -> Link:
        """Return the connection to a node; reconnect if it broke.

        All who wait for the same node share one attempt. It goes on if they give up.
        """
        link = self._links.get(place)
        if link is not None and not link.is_closed:
            return link
        dial = self._dials.get(place)
        if dial is None:
            dial = self._dials[place] = asyncio.create_task(self._dial(place))
        await asyncio.wait([dial])
        return dial.result()

    async def _dial(self, place: Place) -> Link:
        try:
            link = await Link.connect(
                self.address.at(*place), timeout_s=self.timeout_s, features=PUSH_FEATURES
            )
            self._links[place] = link
            self._adopt_config(link)
            link.on_config = self._config_pushed
            return link
        finally:
            del self._dials[place]

    def _config_pushed(self, link: Link) -> None:
        assert link.handshake is not None
        with suppress(TopologyError):  # the next answer that needs a map brings one
            self._router.learn(link.handshake.config, link.address.host)

    def _adopt_config(self, link: Link) -> None:
        """Adopt the configuration of a new connection. Raises TopologyError if none is known."""
        assert link.handshake is not None
        host, port = link.address.host, link.address.port
        config = link.handshake.config
        if not config:
            self._router.adopt(single_node(host, port))
            return
        try:
            self._router.learn(config, host)
        except TopologyError:
            if self._router.topology is None:
                raise


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


def _expect(kind: type[_T], outcome: Any) -> _T:
    """Return the outcome as the expected type; raise it if it is an error."""
    if isinstance(outcome, DcpdError):
        raise outcome
    assert isinstance(outcome, kind)
    return outcome
