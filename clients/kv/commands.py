"""The commands of a key-value client, written once for asyncio and for blocking programs.

    class KvClient(KvCommands)       its transport is `clients.kv.exchange`, over asyncio
    class SyncKv                     runs the same coroutines over `clients.kv.blocking_exchange`

All waiting is in the transport. That of a blocking client waits where it is called, so its
coroutines end at their first step, without an event loop. This module imports no asyncio, because
dcpctl must start fast.

Which node gets a command, and what follows an error, is in `clients.kv.call`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from clients.address import ServerAddress
from clients.errors import (
    CasMismatchError,
    DcpdError,
    NotFoundError,
    NotJsonError,
    error_from_status,
)
from clients.kv.call import RETRY_STATUSES
from clients.kv.routing import Result, Router, Send
from clients.link.topology import ClusterNode, Topology
from clients.operation import (
    BODY_LOOKUP,
    LOOKUPS_MAX,
    CounterResult,
    Document,
    DurabilityChoice,
    DurabilityLevel,
    MutationResult,
    Operation,
    Outcome,
    Token,
    batch_operation,
    batch_results,
    counter_operation,
    delete_operation,
    durability_of,
    get_operation,
    get_replica_operation,
    key_bytes,
    lookup_operation,
    parsed,
    partitions_of,
    results_of,
    store_operation,
    touch_operation,
    xattr_lookup,
)
from clients.position import may_be_longer, version_log_group, versions_of
from dcp.wire.frame import Frame
from dcp.wire.message import parse_failover_log, parse_vb_seqnos
from dcp.wire.opcode import Opcode
from vbucket.model.ids import NUM_VBUCKETS

LOOK_UPS_MAX: Final = 6
LOOK_UP_PAUSE_S: Final = 0.02
"""How often, and with what pause, a document is read with its XATTRs while it keeps changing."""
MASTER_SHARE_S: Final = 0.001
"""What the master gets at least after replicas that did not answer."""
JSON_FLAGS: Final = 0x0200_0006
"""Flags by which Couchbase SDKs recognize a JSON document."""

Json = Mapping[str, "Json"] | Sequence["Json"] | str | int | float | bool | None
"""What JSON can hold. Tuples become arrays."""

_T = TypeVar("_T")


class Lookups(NamedTuple):
    """The answer to look-ups in one document."""

    cas: int
    results: list[tuple[int, bytes]]
    """Status and value of each."""


class JsonDocument(NamedTuple):
    """A document whose value is JSON."""

    value: Any
    """Of dict, list, str, int, float, bool and None."""
    cas: int
    """Changes with each change of the document. Pass it to a write to change only this version."""
    flags: int


class KvTransport(ABC):
    """Sends operations to nodes, and waits for what comes back."""

    router: Router

    @abstractmethod
    async def documents(
        self,
        operations: list[Operation],
        timeout_s: float,
        level: DurabilityLevel,
        collection: str | None,
    ) -> list[Outcome]:
        """Send operations; return one result or error per operation, in order."""

    @abstractmethod
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

    @abstractmethod
    async def ask_replicas(
        self,
        operation: Operation,
        sends: Sequence[Send],
        deadline_s: float,
        collection: str | None,
        master: Callable[[], Coroutine[Any, Any, Outcome]],
    ) -> Outcome:
        """Send a read to replicas in random order, shortly after each other, and at last to the
        `master`; return the first answer.
        """

    @abstractmethod
    async def named_node(self, timeout_s: float) -> ClusterNode:
        """Return the node of the address that answers: the first one that could be reached."""

    @abstractmethod
    async def topology(self, timeout_s: float) -> Topology:
        """Return the cluster configuration. It is fetched once, and replaced by newer ones."""

    @abstractmethod
    async def pause(self, seconds: float) -> None:
        """Do nothing for a while."""

    @abstractmethod
    def now_s(self) -> float:
        """Return the time of the clock that deadlines are of."""


class KvCommands:
    """The commands of one client. Each goes to the node that serves its partition, and is retried
    until its timeout. `timeout_s` None: that of the client, in seconds.
    """

    def __init__(
        self, address: ServerAddress, timeout_s: float, collection: str | None, wire: KvTransport
    ) -> None:
        self.address = address
        self.timeout_s = checked_timeout(timeout_s)
        """How long a call may take that has no timeout of its own."""
        self.collection_name = collection
        """scope.collection of the documents; None: the default one."""
        self._wire = wire

    # -- documents -----------------------------------------------------------------------------

    async def get(
        self,
        key: bytes | str,
        *,
        from_replica: bool = False,
        at_least: Token | None = None,
        timeout_s: float | None = None,
    ) -> Document:
        """Return a document.

        `from_replica`: a replica may answer, with what is committed as far as it knows. If no
        replica answers, the master does. `at_least`, the result of a write, makes replicas refuse
        that do not have that change yet.

        Raises NotFoundError; OperationTimeoutError, ConnectError and other DcpdErrors if no node
        answers in time.
        """
        if from_replica:
            return await self._get_from_replica(key, at_least, self._time(timeout_s))
        if at_least is not None:
            raise ValueError("at_least goes with from_replica=True: the master has every change")
        return _expect(Document, await self._one(get_operation(key), timeout_s))

    async def get_json(self, key: bytes | str, *, timeout_s: float | None = None) -> JsonDocument:
        """Return a document with its JSON decoded. Raises what `get` does, and NotJsonError."""
        import json

        value, cas, flags = await self.get(key, timeout_s=timeout_s)
        try:
            return JsonDocument(json.loads(value), cas, flags)
        except ValueError as error:
            raise NotJsonError(f"the value is not JSON: {error}", key=key_bytes(key)) from error

    async def store(
        self,
        opcode: Opcode,
        key: bytes | str,
        value: bytes,
        *,
        flags: int = 0,
        expiry_s: int = 0,
        cas: int = 0,
        durability: DurabilityChoice = DurabilityLevel.NONE,
        timeout_s: float | None = None,
    ) -> MutationResult:
        """Do a SET, ADD or REPLACE; see `set`. Raises what `set`, `add` and `replace` do."""
        operation = store_operation(opcode, key, value, flags, expiry_s, cas)
        return _expect(MutationResult, await self._one(operation, timeout_s, durability))

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
        """Store a document; with a CAS only if it still has that CAS.

        `flags` are 32 bits of the user's. `expiry_s`: seconds from now up to 30 days, above that
        Unix seconds; 0: never. `durability`: when the server answers (docs/key-value.md).

        Raises CasMismatchError; AmbiguousWriteError if the change may have been applied; any other
        DcpdError says that nothing was changed.
        """
        return await self.store(
            Opcode.SET, key, value, flags=flags, expiry_s=expiry_s, cas=cas,
            durability=durability, timeout_s=timeout_s,
        )  # fmt: skip

    async def apply_batch(
        self, changes: Sequence[Operation], *, timeout_s: float | None = None
    ) -> list[MutationResult]:
        """Make changes together, or none of them. Raises what `KvClient.batch` does."""
        if not changes:
            return []
        answer = _expect(Document, await self._one(batch_operation(changes), timeout_s))
        topology = self._wire.router.topology
        count = NUM_VBUCKETS if topology is None else topology.num_vbuckets
        return batch_results(changes, answer, count)

    async def set_json(
        self,
        key: bytes | str,
        value: Json,
        *,
        flags: int = JSON_FLAGS,
        expiry_s: int = 0,
        cas: int = 0,
        durability: DurabilityChoice = DurabilityLevel.NONE,
        timeout_s: float | None = None,
    ) -> MutationResult:
        """Store a value as JSON; see `set`.

        Raises TypeError or ValueError for what JSON cannot hold (bytes, dates, NaN), and what `set`
        does.
        """
        import json

        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return await self.set(
            key, text.encode(), flags=flags, expiry_s=expiry_s, cas=cas,
            durability=durability, timeout_s=timeout_s,
        )  # fmt: skip

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
        """Store a new document; see `set`. Raises ExistsError, and what `set` does."""
        return await self.store(
            Opcode.ADD, key, value, flags=flags, expiry_s=expiry_s, durability=durability,
            timeout_s=timeout_s,
        )  # fmt: skip

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
        """Store an existing document; see `set`. Raises NotFoundError, and what `set` does."""
        return await self.store(
            Opcode.REPLACE, key, value, flags=flags, expiry_s=expiry_s, cas=cas,
            durability=durability, timeout_s=timeout_s,
        )  # fmt: skip

    async def delete(
        self,
        key: bytes | str,
        *,
        cas: int = 0,
        durability: DurabilityChoice = DurabilityLevel.NONE,
        timeout_s: float | None = None,
    ) -> MutationResult:
        """Delete a document; with a CAS only if it still has that CAS.

        Raises NotFoundError or CasMismatchError, and what `set` does.
        """
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
        """Add to a counter, a document of decimal digits; subtract if `delta` is negative.

        It does not go below 0, and wraps at 2^64. `initial` creates a missing one. Raises
        NotFoundError without `initial`, ServerError if the document is no number, and what `set`
        does.
        """
        opcode = Opcode.INCREMENT if delta >= 0 else Opcode.DECREMENT
        operation = counter_operation(opcode, key, abs(delta), initial, expiry_s)
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
        """Subtract from a counter; otherwise as `increment`. Raises what that does."""
        operation = counter_operation(Opcode.DECREMENT, key, delta, initial, expiry_s)
        return _expect(CounterResult, await self._one(operation, timeout_s, durability))

    async def touch(
        self, key: bytes | str, expiry_s: int, *, timeout_s: float | None = None
    ) -> int:
        """Change when a document expires (`expiry_s` as in `set`; 0: never); return its new CAS.

        Raises NotFoundError, and what `set` does.
        """
        outcome = await self._one(touch_operation(key, expiry_s), timeout_s)
        return _expect(MutationResult, outcome).cas

    async def metadata(self, key: bytes | str) -> dict[str, Any]:
        """Return what the server knows of a document without its value: the XATTR $document, with
        `CAS`, `exptime` (Unix seconds, 0: never), `flags`, `value_bytes`, `seqno` and others.

        Raises NotFoundError.
        """
        import json

        found = await self._look_up(key, [xattr_lookup(b"$document")])
        ((status, text),) = found.results
        if status:
            raise error_from_status(status, "look up", key=key_bytes(key), node=self.address.node)
        facts: dict[str, Any] = json.loads(text)
        return facts

    async def get_with_xattrs(self, key: bytes | str) -> tuple[Document, dict[str, bytes]]:
        """Return a document and its XATTRs: name -> JSON text. System ones are among them if the
        user may read them.

        Raises NotFoundError, CasMismatchError if it changes all the time.
        """
        import json

        changed = CasMismatchError("the document changes all the time", node=self.address.node)
        for attempt in range(LOOK_UPS_MAX):
            if attempt:
                await self._wire.pause(LOOK_UP_PAUSE_S)
            asked = (xattr_lookup(b"$document.flags"), xattr_lookup(b"$XTOC"), BODY_LOOKUP)
            found = await self._look_up(key, asked)
            flags, names, body = (value for _, value in found.results)
            xattrs: dict[str, bytes] = {}
            left: list[str] = json.loads(names)
            try:
                while left:
                    chunk, left = left[:LOOKUPS_MAX], left[LOOKUPS_MAX:]
                    lookups = [xattr_lookup(name.encode()) for name in chunk]
                    texts = (await self._look_up(key, lookups, found.cas)).results
                    xattrs |= zip(chunk, (text for _, text in texts), strict=True)
            except CasMismatchError as error:
                changed = error  # between two requests
            else:
                return Document(body, found.cas, int(flags)), xattrs
        raise changed

    # -- partitions and nodes ------------------------------------------------------------------

    async def get_all_vb_seqnos(self) -> dict[int, int]:
        """Return the high seqno of every active partition, by partition, over all nodes.

        Raises DcpdError if a node of the newest map does not answer in time.
        """
        wire, router = self._wire, self._wire.router
        seqnos: dict[int, int] = {}
        active = (1).to_bytes(4, "big")
        deadline_s = wire.now_s() + self.timeout_s
        await wire.topology(self.timeout_s)
        asked: dict[ClusterNode, tuple[int, int]] = {}
        while (node := router.next_node(asked)) is not None:
            left_s = max(0.0, deadline_s - wire.now_s())
            reply = await wire.command(
                Opcode.GET_ALL_VB_SEQNOS, "get all seqnos", left_s, extras=active, node=node
            )
            if isinstance(reply, Frame):
                seqnos.update(parsed(parse_vb_seqnos, reply.value, node.name))
            elif router.is_serving(node):
                _expect(Frame, reply)
        return dict(sorted(seqnos.items()))

    async def failover_log(self, vb_id: int) -> list[tuple[int, int]]:
        """Return a partition's versions as (vb_uuid, seqno at which it began), newest first.

        The server shows the newest 25. Raises DcpdError, ConnectError for a malformed answer.
        """
        reply = await self._wire.command(
            Opcode.GET_FAILOVER_LOG, "get failover log", self.timeout_s, vb_id=vb_id
        )
        frame = _expect(Frame, reply)
        return parsed(parse_failover_log, frame.value, self._wire.router.name_of(vb_id))

    async def version_log(self, vb_id: int) -> list[tuple[int, int]]:
        """Return all of a partition's versions, where the server tells more than `failover_log`.

        Raises what that does.
        """
        shown = await self.failover_log(vb_id)
        if not may_be_longer(shown):
            return shown
        reply = await self._wire.command(
            Opcode.STAT, "get version log", self.timeout_s, key=version_log_group(vb_id),
            vb_id=vb_id,
        )  # fmt: skip
        if isinstance(reply, NotFoundError):
            return shown  # the server does not know the group
        return list(versions_of(_expect(list, reply), vb_id)) or shown

    async def stats(self, group: str = "", *, node: ClusterNode | None = None) -> dict[str, str]:
        """Return the statistics of a node, name -> value. Default: the named one that answers.

        Raises NotFoundError if the server does not know the group.
        """
        at = node or await self._wire.named_node(self.timeout_s)
        reply = await self._wire.command(
            Opcode.STAT, f"stat {group!r}", self.timeout_s, key=group.encode(), node=at
        )
        frames = _expect(list, reply)
        return {frame.key.decode(): frame.value.decode(errors="replace") for frame in frames}

    async def collections_manifest(self) -> bytes:
        """Return the scopes and collections, as JSON. Raises DcpdError if no node answers."""
        at = await self._wire.named_node(self.timeout_s)
        reply = await self._wire.command(
            Opcode.GET_COLLECTIONS_MANIFEST, "get collections", self.timeout_s, node=at
        )
        return _expect(Frame, reply).value

    async def named_node(self) -> ClusterNode:
        """Return the node of the address that answers: the first one that could be reached.

        Raises DcpdError if none is reached in time.
        """
        return await self._wire.named_node(self.timeout_s)

    async def cluster_map(self) -> Topology:
        """Return the cluster configuration. It is fetched once, and replaced by newer ones.

        Raises DcpdError if no node answers in time.
        """
        return await self._wire.topology(self.timeout_s)

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
        outcomes = await self._wire.documents(
            [operation], self._time(timeout_s), level, self.collection_name
        )
        return outcomes[0]

    async def _look_up(self, key: bytes | str, lookups: Iterable[bytes], cas: int = 0) -> Lookups:
        outcome = _expect(Document, await self._one(lookup_operation(key, lookups, cas), None))
        return Lookups(outcome.cas, parsed(results_of, outcome.value, self.address.node))

    async def _get_from_replica(
        self, key: bytes | str, at_least: Token | None, timeout_s: float
    ) -> Document:
        """Ask the replicas of a key, and then its master."""
        wire = self._wire
        operation = get_replica_operation(key, at_least)
        deadline_s = wire.now_s() + timeout_s
        topology = await wire.topology(timeout_s)
        (vb_id,) = partitions_of([operation], topology.num_vbuckets)
        if at_least is not None and at_least.vb_id != vb_id:
            raise ValueError(f"at_least is of partition {at_least.vb_id}, and the key of {vb_id}")
        replicas = topology.replicas_of(vb_id)
        sends = [Send(node, range(1), [vb_id], 0, wire.now_s()) for node in replicas]

        async def master() -> Outcome:
            left_s = max(deadline_s - wire.now_s(), MASTER_SHARE_S)
            return await self._one(get_operation(key), left_s)

        outcome = await wire.ask_replicas(
            operation, sends, deadline_s, self.collection_name, master
        )
        return _expect(Document, outcome)


def reply_of(opcode: int, what: str, replies: list[Frame], vb_id: int | None, node: str) -> Result:
    """Return the reply to a command that only reads (STAT: its replies), or the error it means.

    A server without a cluster configuration refuses to tell one: that is a reply, too.
    """
    status = replies[-1].status if replies else 0
    has_none = opcode == Opcode.GET_CLUSTER_CONFIG and status not in RETRY_STATUSES
    if status and not has_none:
        return error_from_status(status, what, body=replies[-1].value, vb_id=vb_id, node=node)
    return replies if opcode == Opcode.STAT else replies[0]


def checked_timeout(timeout_s: float) -> float:
    """Return a timeout. Raises ValueError for one that is not above 0."""
    if not timeout_s > 0:
        raise ValueError(f"timeout_s {timeout_s}: it must be above 0")
    return timeout_s


def _expect(kind: type[_T], outcome: object) -> _T:
    """Return the outcome as the expected type; raise it if it is an error."""
    if isinstance(outcome, DcpdError):
        raise outcome
    assert isinstance(outcome, kind)
    return outcome
