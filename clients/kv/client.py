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
- A write that was sent, and got no answer, may have been applied. It is not repeated, and raises
  AmbiguousWriteError. All other errors of a write say that nothing was changed.
- Each call takes a `timeout_s` of its own, and writes a durability level.
- A batch returns a result or a DcpdError for each operation, in the order of the operations.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from copy import copy
from typing import Any, Final

from clients.address import ServerAddress, parse_address
from clients.errors import DcpdError, NotFoundError
from clients.kv.batch import AtomicBatch
from clients.kv.commands import KvCommands, checked_timeout
from clients.kv.exchange import BATCH_OPERATIONS_MAX, Exchange, NodeLinks
from clients.kv.routing import Router
from clients.link.topology import ClusterNode, Topology
from clients.operation import (
    Document,
    DurabilityChoice,
    DurabilityLevel,
    Operation,
    Outcome,
    counter_operation,
    delete_operation,
    durability_of,
    get_operation,
    key_bytes,
    store_operation,
    value_bytes,
)
from dcp.wire.frame import MAX_VALUE_BYTES
from dcp.wire.opcode import Opcode

CHUNKS_IN_FLIGHT: Final = 4


class KvClient(KvCommands):
    """A key-value client for asyncio.

    Create it with `KvClient.connect`. Each operation goes to the node that serves its partition,
    and is retried until the timeout. Many tasks of one event loop may share a client.
    """

    def __init__(self, address: ServerAddress, *, timeout_s: float = 10.0) -> None:
        seed, *others = (ClusterNode(*place) for place in address.places)
        router = Router(seed, others, is_tls=address.is_tls, needs_map=True)
        self._router = router
        self._connections = NodeLinks(address, router, checked_timeout(timeout_s))
        super().__init__(address, timeout_s, None, Exchange(router, self._connections))

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

        `server` is HOST:PORT or dcpd://user:password@host:port, or several hosts of a cluster:
        dcpd://a,b:11211,c. `timeout_s` bounds every call that has no timeout of its own.
        """
        client = await cls.open(server, timeout_s=timeout_s)
        try:
            yield client
        finally:
            await client.close()

    @classmethod
    async def open(cls, server: str | ServerAddress, *, timeout_s: float = 10.0) -> KvClient:
        """Connect. The caller must call `close`. Raises ConnectError and AuthenticationError."""
        address = parse_address(server) if isinstance(server, str) else server
        client = cls(address, timeout_s=timeout_s)
        await client._connections.open()
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
        await self._connections.close()

    # -- batches -------------------------------------------------------------------------------

    async def get_many(
        self, keys: Iterable[bytes | str], *, timeout_s: float | None = None
    ) -> dict[bytes, Document]:
        """Return the existing documents by key. Raises the first error except NotFoundError."""
        operations = [get_operation(key) for key in keys]
        found: dict[bytes, Document] = {}
        outcomes = await self.execute(operations, timeout_s=timeout_s)
        for operation, outcome in zip(operations, outcomes, strict=True):
            if not isinstance(outcome, NotFoundError):
                if isinstance(outcome, DcpdError):
                    raise outcome
                assert isinstance(outcome, Document)
                found[operation[1]] = outcome
        return found

    async def set_many(
        self,
        documents: Mapping[Any, bytes] | Iterable[tuple[bytes | str, bytes]],
        *,
        flags: int = 0,
        expiry_s: int = 0,
        durability: DurabilityChoice = DurabilityLevel.NONE,
        timeout_s: float | None = None,
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
        return await self.execute(operations, durability=durability, timeout_s=timeout_s)

    @asynccontextmanager
    async def pipeline(
        self,
        *,
        durability: DurabilityChoice = DurabilityLevel.NONE,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Pipeline]:
        """Collect operations and send them together at the end of the `async with`.

        `batch.results` then has one result or error per operation, in order. The durability level
        is for the writes among them.
        """
        level = durability_of(durability)
        batch = Pipeline(self, level, timeout_s)
        yield batch
        await batch.execute()

    @asynccontextmanager
    async def batch(self, *, timeout_s: float | None = None) -> AsyncIterator[AtomicBatch]:
        """Collect changes, and make them together at the end of the `async with`: all of them or
        none, also if the server is killed, with one CAS. `batch.results` has their results then.

        All are of one collection. Nodes of clusters refuse batches (UnsupportedError), before
        anything is changed.

        Raises ExistsError or NotFoundError if a change cannot be made as asked (the text says which
        one), and AmbiguousWriteError if all or none of them may have been made. After every other
        error, and if the block raises, nothing was changed.
        """
        batch = AtomicBatch()
        yield batch
        batch.results = await self.apply_batch(batch.changes, timeout_s=timeout_s)

    async def execute(
        self,
        operations: list[Operation],
        *,
        durability: DurabilityChoice = DurabilityLevel.NONE,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        """Send operations together; return one result or error per operation, in order.

        The operations are independent: if one of two operations on the same key has to be repeated,
        they may be applied in the other order. A write without an answer gets AmbiguousWriteError.
        Every 16,384 operations have the whole timeout.
        """
        level, time_s = durability_of(durability), self._time(timeout_s)
        window = BATCH_OPERATIONS_MAX * CHUNKS_IN_FLIGHT
        if len(operations) <= window:
            return await self._wire.documents(operations, time_s, level, self.collection_name)
        results: list[Outcome] = []
        for start in range(0, len(operations), window):
            some = operations[start : start + window]
            results += await self._wire.documents(some, time_s, level, self.collection_name)
        return results


class Pipeline:
    """Operations that are collected and sent together; see `KvClient.pipeline`."""

    def __init__(
        self, client: KvClient, durability: DurabilityLevel, timeout_s: float | None
    ) -> None:
        self.results: list[Outcome] = []
        """After `execute`: one result or error per operation, in order."""
        self._client = client
        self._durability = durability
        self._timeout_s = timeout_s
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

    def increment(
        self, key: bytes | str, delta: int = 1, *, initial: int | None = None, expiry_s: int = 0
    ) -> None:
        """Add an INCREMENT; its result is a CounterResult."""
        operation = counter_operation(Opcode.INCREMENT, key, delta, initial, expiry_s)
        self._operations.append(operation)

    async def execute(self) -> list[Outcome]:
        """Send the collected operations; return one result or error per operation, in order."""
        operations, self._operations = self._operations, []
        self.results = await self._client.execute(
            operations, durability=self._durability, timeout_s=self._timeout_s
        )
        return self.results
