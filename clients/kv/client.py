"""`KvClient`: a key-value client for asyncio.

    async with KvClient.connect("127.0.0.1:11210") as kv:
        await kv.set("user:1", b'{"name":"Ada"}')
        print((await kv.get("user:1")).value)
        async with kv.pipeline() as batch:          # many operations in one write
            for n in range(10_000):
                batch.set(f"k{n}", b"v")
        failed = [r for r in batch.results if isinstance(r, DcpdError)]

What it does
- Every operation goes to the node that serves its partition. After NOT_MY_VBUCKET the client gets a
  newer configuration, from the answer or with a request, and sends the operation again.
- If a node cannot be reached, it asks another node for a newer configuration.
- After a TemporaryError nothing was changed, so it sends the operation again after a pause. An
  operation is sent up to `ATTEMPTS_MAX` times within the timeout.
- After a lost connection only reads are repeated. A write without a reply raises
  ConnectionLostError: it may or may not have been applied.
- A batch returns a result or a DcpdError for each operation, in the order of the operations.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from copy import copy
from typing import Any, Final, TypeVar

from clients.address import ServerAddress, parse_address
from clients.errors import (
    TEMPORARY_STATUSES,
    ConnectError,
    ConnectionLostError,
    DcpdError,
    NotFoundError,
    NotMyVbucketError,
    OperationTimeoutError,
    TemporaryError,
    TopologyError,
    UnknownCollectionError,
    UnsupportedError,
    error_from_status,
)
from clients.link.pipelined_link import Link
from clients.link.topology import ClusterNode, Topology, parse_topology, single_node
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
    partitions_of,
    store_operation,
)
from dcp.wire.frame import Frame
from dcp.wire.message import parse_failover_log, parse_vb_seqnos
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.model.ids import DEFAULT_COLLECTION_PREFIX
from vbucket.model.manifest import encode_leb128

ATTEMPTS_MAX: Final = 6
"""Maximum attempts per operation."""
BACKOFF_S: Final = 0.02
"""Pause before the second attempt. It doubles with each attempt (0.02 to 0.32 s)."""
BATCH_OPERATIONS_MAX: Final = 4096
"""Operations in one write: large enough for one fsync per batch, small enough for memory."""
BATCH_BYTES_MAX: Final = 4 * 1024 * 1024
CHUNKS_IN_FLIGHT: Final = 4

_T = TypeVar("_T", Document, MutationResult)
_R = TypeVar("_R")


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
    """See the module. Created by `KvClient.connect`. Many tasks of one loop may share it."""

    def __init__(self, address: ServerAddress, *, timeout_s: float = 10.0) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.topology: Topology | None = None
        self.collection_name: str | None = None
        """scope.collection of the documents; None: the default one."""
        self._collection_ids: dict[str, int] = {}
        self._links: dict[tuple[str, int], Link] = {}
        self._dialing: dict[tuple[str, int], asyncio.Lock] = {}

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
        return await self.execute(
            [(opcode, key_bytes(key), extras, value, 0) for key, value in pairs]
        )

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

        An operation without a reply gets OperationTimeoutError or ConnectionLostError.
        """
        results: list[Outcome | None] = [None] * len(operations)
        for start in range(0, len(operations), BATCH_OPERATIONS_MAX * CHUNKS_IN_FLIGHT):
            stop = min(start + BATCH_OPERATIONS_MAX * CHUNKS_IN_FLIGHT, len(operations))
            await self._execute_window(operations, range(start, stop), results)
        return [_assigned(outcome) for outcome in results]

    # -- partitions ----------------------------------------------------------------------------

    async def get_all_vb_seqnos(self) -> dict[int, int]:
        """Return the high seqno of every active partition, by partition, over all nodes."""
        seqnos: dict[int, int] = {}
        active = (1).to_bytes(4, "big")
        for node in await self._nodes():
            frame = await self._ask(node, Opcode.GET_ALL_VB_SEQNOS, extras=active)
            self._check(frame, "get all vbucket seqnos", node)
            seqnos.update(parsed(parse_vb_seqnos, frame.value, node.name))
        return dict(sorted(seqnos.items()))

    async def failover_log(self, vb_id: int) -> list[tuple[int, int]]:
        """Return a partition's versions as (vb_uuid, seqno at which it began), newest first."""
        for attempt in range(ATTEMPTS_MAX):
            topology = await self._topology()
            node = topology.node_of(vb_id)
            frame = await self._ask(node, Opcode.GET_FAILOVER_LOG, vb_id=vb_id)
            if frame.status != Status.NOT_MY_VBUCKET or attempt == ATTEMPTS_MAX - 1:
                break
            await self._learn(frame.value, node)
            await asyncio.sleep(BACKOFF_S * 2**attempt)
        self._check(frame, "get failover log", node, vb_id)
        return parsed(parse_failover_log, frame.value, node.name)

    async def stats(self, group: str = "", *, node: ClusterNode | None = None) -> dict[str, str]:
        """Return the statistics of a node (default: the first one), name -> value."""
        at = node or (await self._nodes())[0]
        link = await self._link((at.host, at.kv_port))
        frames = await self._in_time(link.request_stat(group.encode()), at.name)
        if frames and frames[-1].status:
            self._check(frames[-1], f"stat {group!r}", at)
        return {frame.key.decode(): frame.value.decode(errors="replace") for frame in frames}

    # -- inside --------------------------------------------------------------------------------

    async def _one(self, operation: Operation) -> Outcome:
        results: list[Outcome | None] = [None]
        await self._execute_window([operation], range(1), results)
        return _assigned(results[0])

    async def _execute_window(
        self, operations: list[Operation], indexes: range, results: list[Outcome | None]
    ) -> None:
        """Send the operations at `indexes`, repeat those that may be repeated, fill `results`."""
        pending: list[int] = list(indexes)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.timeout_s
        for attempt in range(ATTEMPTS_MAX):
            try:
                async with asyncio.timeout_at(deadline):
                    if attempt:
                        await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
                    await self._send_to_nodes(operations, pending, results)
            except TimeoutError:
                for index in pending:
                    if results[index] is None:
                        results[index] = OperationTimeoutError(
                            f"no answer within {self.timeout_s:g} s", key=operations[index][1]
                        )
            pending = [index for index in pending if _may_repeat(operations[index], results[index])]
            if not pending or attempt == ATTEMPTS_MAX - 1 or loop.time() >= deadline:
                return
            # If this fails, the next attempt may fail too, but every operation keeps its outcome.
            with suppress(DcpdError, TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._learn_from(results, pending)

    async def _send_to_nodes(
        self, operations: list[Operation], pending: list[int], results: list[Outcome | None]
    ) -> None:
        """Send each operation to the node of its partition and store the outcomes."""
        try:
            topology = await self._topology()
        except DcpdError as error:
            for index in pending:
                results[index] = error
            return
        vb_ids = partitions_of([operations[index] for index in pending], topology.num_vbuckets)
        groups: dict[int, list[int]] = {}
        for place, vb_id in enumerate(vb_ids):
            groups.setdefault(topology.vbucket_map[vb_id], []).append(place)
        sends = []
        for node_index, places in groups.items():
            group = [pending[place] for place in places]
            if node_index < 0:
                for index, place in zip(group, places, strict=True):
                    results[index] = TopologyError(
                        "no node is active for this partition", vb_id=vb_ids[place]
                    )
                continue
            group_vb_ids = [vb_ids[place] for place in places]
            node = topology.nodes[node_index]
            sends.append(self._send_group(node, operations, group, group_vb_ids, results))
        if len(sends) == 1:
            await sends[0]
        else:
            await asyncio.gather(*sends)

    async def _send_group(
        self,
        node: ClusterNode,
        operations: list[Operation],
        indexes: list[int],
        vb_ids: list[int],
        results: list[Outcome | None],
    ) -> None:
        """Send operations to one node in chunks, several in flight."""
        for index in indexes:
            results[index] = None
        try:
            link = await self._link((node.host, node.kv_port))
        except DcpdError as error:
            for index in indexes:
                results[index] = error
            return
        try:
            prefix = await self._prefix(link)
        except DcpdError as error:
            for index in indexes:
                results[index] = error
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
            flights.append((start, stop, link.send_batch(packets, opaque, stop - start)))
            await link.drain()
        for start, stop, future in flights:
            try:
                frames = await future
            except DcpdError as error:
                for index in indexes[start:stop]:
                    results[index] = error
                continue
            for place, frame in zip(range(start, stop), frames, strict=True):
                index = indexes[place]
                results[index] = outcome_of(operations[index], vb_ids[place], frame, node.name)

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

    async def _learn_from(self, results: list[Outcome | None], pending: list[int]) -> None:
        """Get a newer configuration from the refusals, or ask for one."""
        if any(isinstance(results[index], UnknownCollectionError) for index in pending):
            assert self.collection_name is not None, "the default collection always exists"
            self._collection_ids.pop(self.collection_name, None)
        refusals = [
            outcome for index in pending if isinstance(outcome := results[index], NotMyVbucketError)
        ]
        if refusals:
            body = next((refusal.config for refusal in refusals if refusal.config), b"")
            topology = await self._topology()
            named = refusals[0].node
            node = next((n for n in topology.nodes if n.name == named), topology.nodes[0])
            await self._learn(body, node)
        lost = {
            outcome.node
            for index in pending
            if isinstance(outcome := results[index], ConnectError | ConnectionLostError)
        }
        if lost:
            await self._learn_elsewhere(lost)

    async def _learn_elsewhere(self, lost: Collection[str | None]) -> None:
        """Ask another node for the configuration: partitions of a lost node may have moved."""
        for node in await self._nodes():
            if node.name not in lost:
                with suppress(DcpdError):
                    await self._learn(b"", node)
                    return

    async def _learn(self, body: bytes, node: ClusterNode) -> None:
        """Adopt the configuration in a NOT_MY_VBUCKET body, or fetch the node's own."""
        raw = body
        if not raw:
            frame = await self._ask(node, Opcode.GET_CLUSTER_CONFIG)
            raw = frame.value if frame.status == Status.OK else b""
        if raw:
            topology = parse_topology(raw, node.host, is_tls=self.address.is_tls)
            if topology.is_newer_than(self.topology):
                self.topology = topology

    async def _topology(self) -> Topology:
        if self.topology is None:
            await self._link((self.address.host, self.address.port))
        assert self.topology is not None
        return self.topology

    async def _nodes(self) -> tuple[ClusterNode, ...]:
        return (await self._topology()).nodes

    async def _link(self, place: tuple[str, int]) -> Link:
        """Return the connection to a node; reconnect if it broke."""
        link = self._links.get(place)
        if link is not None and not link.is_closed:
            return link
        async with self._dialing.setdefault(place, asyncio.Lock()):
            link = self._links.get(place)
            if link is not None and not link.is_closed:
                return link
            address = self.address.at(*place)
            link = await Link.connect(address, timeout_s=self.timeout_s)
            self._links[place] = link
            self._adopt_config(link)
            return link

    def _adopt_config(self, link: Link) -> None:
        assert link.handshake is not None
        host, port = link.address.host, link.address.port
        config = link.handshake.config
        topology = (
            parse_topology(config, host, is_tls=link.address.is_tls)
            if config
            else single_node(host, port)
        )
        if topology.is_newer_than(self.topology):
            self.topology = topology

    async def _ask(
        self, node: ClusterNode, opcode: Opcode, *, vb_id: int = 0, extras: bytes = b""
    ) -> Frame:
        """Send an idempotent command; retry after a lost connection or a temporary refusal."""
        for attempt in range(ATTEMPTS_MAX):
            try:
                link = await self._link((node.host, node.kv_port))
                request = link.request(opcode, vb_id=vb_id, extras=extras)
                frame = await self._in_time(request, node.name)
            except (ConnectionLostError, ConnectError):
                if attempt == ATTEMPTS_MAX - 1:
                    raise
            else:
                if frame.status not in TEMPORARY_STATUSES or attempt == ATTEMPTS_MAX - 1:
                    return frame
            await asyncio.sleep(BACKOFF_S * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    async def _in_time(self, request: Awaitable[_R], node: str) -> _R:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await request
        except TimeoutError:
            raise OperationTimeoutError(
                f"no answer within {self.timeout_s:g} s", node=node
            ) from None

    @staticmethod
    def _check(frame: Frame, operation: str, node: ClusterNode, vb_id: int | None = None) -> None:
        if frame.status:
            raise error_from_status(
                frame.status, operation, body=frame.value, vb_id=vb_id, node=node.name
            )


def _may_repeat(operation: Operation, outcome: Outcome | None) -> bool:
    """Whether an operation may be repeated: nothing was changed, or it only reads."""
    if isinstance(outcome, NotMyVbucketError | TemporaryError | ConnectError):
        return True
    if isinstance(outcome, UnknownCollectionError):
        return outcome.key is not None  # the id was refused; the name may have a new id now
    return isinstance(outcome, ConnectionLostError) and operation[0] == Opcode.GET


def _chunks(operations: list[Operation], indexes: list[int]) -> list[tuple[int, int]]:
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


def _expect(kind: type[_T], outcome: Outcome) -> _T:
    """Return the outcome as the expected type; raise it if it is an error."""
    if isinstance(outcome, DcpdError):
        raise outcome
    assert isinstance(outcome, kind)
    return outcome


def _assigned(outcome: Outcome | None) -> Outcome:
    assert outcome is not None, "every operation has an outcome"
    return outcome
