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

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from copy import copy
from functools import partial
from random import Random
from typing import Any, Final, TypeVar

from clients.address import ServerAddress, parse_address
from clients.errors import (
    DcpdError,
    NotFoundError,
    TemporaryError,
)
from clients.kv.exchange import BATCH_OPERATIONS_MAX, Exchange
from clients.kv.node_links import NodeLinks
from clients.kv.pipeline import Pipeline
from clients.kv.routing import (
    Place,
    Router,
    Send,
    place_of,
)
from clients.link.first_answer import first_answer
from clients.link.topology import ClusterNode, Topology
from clients.operation import (
    CounterResult,
    Document,
    DurabilityChoice,
    DurabilityLevel,
    MutationResult,
    Operation,
    Outcome,
    Token,
    counter_operation,
    delete_operation,
    durability_of,
    get_operation,
    get_replica_operation,
    key_bytes,
    parsed,
    partitions_of,
    store_operation,
    value_bytes,
)
from dcp.wire.frame import MAX_VALUE_BYTES, Frame
from dcp.wire.message import parse_failover_log, parse_vb_seqnos
from dcp.wire.opcode import Opcode

CHUNKS_IN_FLIGHT: Final = 4

_jitter: Final = Random().random  # noqa: S311 - not for secrets

_T = TypeVar("_T")


class KvClient:
    """A key-value client for asyncio.

    Create it with `KvClient.connect`. Each operation goes to the node that serves its partition,
    and is retried until the timeout. Many tasks of one event loop may share a client.
    """

    def __init__(self, address: ServerAddress, *, timeout_s: float = 10.0) -> None:
        self.address = address
        self.timeout_s = checked_timeout(timeout_s)
        self.collection_name: str | None = None
        """scope.collection of the documents; None: the default one."""
        seed, *others = (ClusterNode(*place) for place in address.places)
        self._router = Router(seed, others, is_tls=address.is_tls, needs_map=True)
        self._connections = NodeLinks(address, self._router, timeout_s)
        self._exchange = Exchange(self._router, self._connections)

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
        """Connect. The caller must call `close`."""
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

    # -- single operations ---------------------------------------------------------------------

    async def get(
        self,
        key: bytes | str,
        *,
        from_replica: bool = False,
        at_least: Token | None = None,
        timeout_s: float | None = None,
    ) -> Document:
        """Return a document. Raises NotFoundError.

        `from_replica`: a replica may answer, with what is committed as far as it knows. If no
        replica answers, the master does. `at_least`, the result of a write, makes replicas refuse
        that do not have that change yet.
        """
        if from_replica:
            return await self._get_from_replica(key, at_least, self._time(timeout_s))
        if at_least is not None:
            raise ValueError("at_least goes with from_replica=True: the master has every change")
        return _expect(Document, await self._one(get_operation(key), timeout_s))

    async def set(
        self,
        key: bytes | str,
        value: bytes,
        *,
        flags: int = 0,
        expiry_s: int = 0,
        cas: int = 0,
        durability: DurabilityChoice = DurabilityLevel.NONE,
        timeout_s: float | None = None,
    ) -> MutationResult:
        """Store a document; with a CAS only if it still has that CAS (CasMismatchError)."""
        operation = store_operation(Opcode.SET, key, value, flags, expiry_s, cas)
        return _expect(MutationResult, await self._one(operation, timeout_s, durability))

    async def add(
        self,
        key: bytes | str,
        value: bytes,
        *,
        flags: int = 0,
        expiry_s: int = 0,
        durability: DurabilityChoice = DurabilityLevel.NONE,
        timeout_s: float | None = None,
    ) -> MutationResult:
        """Store a new document. Raises ExistsError."""
        operation = store_operation(Opcode.ADD, key, value, flags, expiry_s)
        return _expect(MutationResult, await self._one(operation, timeout_s, durability))

    async def replace(
        self,
        key: bytes | str,
        value: bytes,
        *,
        flags: int = 0,
        expiry_s: int = 0,
        cas: int = 0,
        durability: DurabilityChoice = DurabilityLevel.NONE,
        timeout_s: float | None = None,
    ) -> MutationResult:
        """Store an existing document. Raises NotFoundError or CasMismatchError."""
        operation = store_operation(Opcode.REPLACE, key, value, flags, expiry_s, cas)
        return _expect(MutationResult, await self._one(operation, timeout_s, durability))

    async def delete(
        self,
        key: bytes | str,
        *,
        cas: int = 0,
        durability: DurabilityChoice = DurabilityLevel.NONE,
        timeout_s: float | None = None,
    ) -> MutationResult:
        """Delete a document. Raises NotFoundError or CasMismatchError."""
        operation = delete_operation(key, cas)
        return _expect(MutationResult, await self._one(operation, timeout_s, durability))

    async def increment(
        self,
        key: bytes | str,
        delta: int = 1,
        *,
        initial: int | None = None,
        expiry_s: int = 0,
        durability: DurabilityChoice = DurabilityLevel.NONE,
        timeout_s: float | None = None,
    ) -> CounterResult:
        """Add to a counter, a document of decimal digits. `initial` creates a missing one.

        Raises NotFoundError without `initial`, ServerError if the document is no number.
        """
        operation = counter_operation(Opcode.INCREMENT, key, delta, initial, expiry_s)
        return _expect(CounterResult, await self._one(operation, timeout_s, durability))

    async def decrement(
        self,
        key: bytes | str,
        delta: int = 1,
        *,
        initial: int | None = None,
        expiry_s: int = 0,
        durability: DurabilityChoice = DurabilityLevel.NONE,
        timeout_s: float | None = None,
    ) -> CounterResult:
        """Subtract from a counter; it does not go below 0. Otherwise as `increment`."""
        operation = counter_operation(Opcode.DECREMENT, key, delta, initial, expiry_s)
        return _expect(CounterResult, await self._one(operation, timeout_s, durability))

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
                found[operation[1]] = _expect(Document, outcome)
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
        batch = Pipeline(partial(self.execute, durability=level, timeout_s=timeout_s))
        yield batch
        await batch.execute()

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
            return await self._exchange.documents(operations, time_s, level, self.collection_name)
        results: list[Outcome] = []
        for start in range(0, len(operations), window):
            some = operations[start : start + window]
            results += await self._exchange.documents(some, time_s, level, self.collection_name)
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
            left_s = max(0.0, deadline_s - asyncio.get_running_loop().time())
            reply = await self._exchange.command(
                Opcode.GET_ALL_VB_SEQNOS, "get all vbucket seqnos", left_s, extras=active, node=node
            )
            if isinstance(reply, Frame):
                seqnos.update(parsed(parse_vb_seqnos, reply.value, node.name))
            elif self._router.is_serving(node):
                _expect(Frame, reply)
        return dict(sorted(seqnos.items()))

    async def failover_log(self, vb_id: int) -> list[tuple[int, int]]:
        """Return a partition's versions as (vb_uuid, seqno at which it began), newest first."""
        reply = await self._exchange.command(
            Opcode.GET_FAILOVER_LOG, "get failover log", self.timeout_s, vb_id=vb_id
        )
        frame = _expect(Frame, reply)
        return parsed(parse_failover_log, frame.value, self._router.name_of(vb_id))

    async def stats(self, group: str = "", *, node: ClusterNode | None = None) -> dict[str, str]:
        """Return the statistics of a node, name -> value. Default: the one that it began with, or
        the first one of the map if that has left.
        """
        nodes = await self._nodes()
        seed = place_of(self._router.seed)
        at = node or next((each for each in nodes if place_of(each) == seed), nodes[0])
        reply = await self._exchange.command(
            Opcode.STAT, f"stat {group!r}", self.timeout_s, key=group.encode(), node=at
        )
        frames = _expect(list, reply)
        return {frame.key.decode(): frame.value.decode(errors="replace") for frame in frames}

    # -- inside --------------------------------------------------------------------------------

    def _time(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else checked_timeout(timeout_s)

    async def _one(
        self,
        operation: Operation,
        timeout_s: float | None,
        durability: DurabilityChoice = DurabilityLevel.NONE,
    ) -> Outcome:
        level = durability_of(durability)
        outcomes = await self._exchange.documents(
            [operation], self._time(timeout_s), level, self.collection_name
        )
        return outcomes[0]

    async def _get_from_replica(
        self, key: bytes | str, at_least: Token | None, timeout_s: float
    ) -> Document:
        """Ask the replicas of a key in random order, and then its master."""
        operation = get_replica_operation(key, at_least)
        await self._nodes()
        topology = self._router.topology
        assert topology is not None
        (vb_id,) = partitions_of([operation], topology.num_vbuckets)
        if at_least is not None and at_least.vb_id != vb_id:
            raise ValueError(f"at_least is of vbucket {at_least.vb_id}, and the key of {vb_id}")
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        replicas = {place_of(node): node for node in topology.replicas_of(vb_id)}
        master = ("", 0)

        async def ask(place: Place) -> Outcome:
            if place == master:
                return await self._one(get_operation(key), max(deadline_s - loop.time(), 0.001))
            send = Send(replicas[place], range(1), [vb_id], 0, loop.time())
            await self._exchange.transmit(
                [operation], send, [], DurabilityLevel.NONE, deadline_s, self.collection_name
            )
            outcome = send.outcomes[0]
            if isinstance(outcome, Document | NotFoundError):
                return outcome
            self._router.learn_from(outcome, send.node.host)
            raise TemporaryError(f"the replica does not answer: {outcome}")

        places = sorted(replicas, key=lambda _place: _jitter())
        _, outcome = await first_answer(ask, [*places, master], lambda _outcome: None)
        return _expect(Document, outcome)

    async def _nodes(self) -> tuple[ClusterNode, ...]:
        if self._router.topology is None:
            await self._connections.link(place_of(self._router.seed))
        assert self._router.topology is not None
        return self._router.topology.nodes


def checked_timeout(timeout_s: float) -> float:
    """Return a timeout. Raises ValueError for one that is not above 0."""
    if not timeout_s > 0:
        raise ValueError(f"timeout_s {timeout_s}: it must be above 0")
    return timeout_s


def _expect(kind: type[_T], outcome: Any) -> _T:
    """Return the outcome as the expected type; raise it if it is an error."""
    if isinstance(outcome, DcpdError):
        raise outcome
    assert isinstance(outcome, kind)
    return outcome
