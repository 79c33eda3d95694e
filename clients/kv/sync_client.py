"""`SyncKv`: a blocking key-value client for dcpctl and small scripts.

    with SyncKv(parse_address("127.0.0.1:11210")) as kv:
        kv.set(b"user:1", b"Ada")

The first operation goes to the named server. If another node serves the partition, or a node is
gone or refuses for a while, the operation is repeated until `timeout_s` is over, with growing
pauses and newer maps of the cluster. `clients.kv.call` has the rules. A write that may have been
applied is not repeated: it raises AmbiguousWriteError.

While it waits for an answer for long, threads ask other nodes for a newer map
(`clients.kv.map_fetches`). If that moves the partition, a read goes to the new master.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Final, NamedTuple, TypeVar

from clients.address import ServerAddress
from clients.errors import (
    CasMismatchError,
    DcpdError,
    NotFoundError,
    UnknownCollectionError,
    UnsupportedError,
    error_from_status,
)
from clients.kv.blocking_exchange import (
    Begin,
    BlockingExchange,
    Started,
    has_outcome,
    jitter,
)
from clients.kv.call import Call
from clients.kv.reaction import RETRY_STATUSES, is_answer
from clients.kv.routing import (
    Result,
    Router,
    Send,
    patience_s,
)
from clients.link.blocking_link import TIMEOUT_MIN_S, SyncLink
from clients.link.topology import ClusterNode, Topology, single_node
from clients.link.version_log import may_be_longer, version_log_group, versions_of
from clients.operation import (
    BODY_LOOKUP,
    LOOKUPS_MAX,
    CounterResult,
    Document,
    DurabilityChoice,
    DurabilityLevel,
    MutationResult,
    Operation,
    Token,
    collection_id_of,
    counter_operation,
    delete_operation,
    durability_frame,
    durability_of,
    get_operation,
    get_replica_operation,
    lookup_operation,
    outcome_of,
    pack_operations,
    parsed,
    partitions_of,
    results_of,
    store_operation,
    xattr_lookup,
)
from dcp.wire.frame import Frame, pack_request
from dcp.wire.message import parse_failover_log, parse_vb_seqnos
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.model.ids import DEFAULT_COLLECTION_PREFIX

REPLICA_LIMIT_S: Final = 0.5
"""How long a replica may take before the next one, or the master, is asked."""

_T = TypeVar("_T")

LOOK_UPS_MAX: Final = 6
LOOK_UP_PAUSE_S: Final = 0.02
"""How often, and with what pause, a document is read with its XATTRs while it keeps changing."""


class Lookups(NamedTuple):
    """The answer to look-ups in one document."""

    cas: int
    results: list[tuple[int, bytes]]
    """Status and value of each."""


class SyncKv:
    """A blocking key-value client; a context manager.

    Each operation goes to the node that serves its partition, and is retried until the timeout.
    """

    def __init__(
        self, address: ServerAddress, *, timeout_s: float = 10.0, collection: str | None = None
    ) -> None:
        """`collection`: scope.collection of the documents; None: the default one.

        `timeout_s` bounds every call that has no timeout of its own.
        """
        self.address = address
        self.collection_name = collection
        self._collection_id: int | None = None
        self._timeout_s = timeout_s
        seed, *others = (ClusterNode(*place) for place in address.places)
        self._router = Router(seed, others, is_tls=address.is_tls)
        self._exchange = BlockingExchange(address, self._router)

    def __enter__(self) -> SyncKv:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close all connections."""
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._exchange.close()

    def get(
        self,
        key: bytes | str,
        *,
        from_replica: bool = False,
        at_least: Token | None = None,
        timeout_s: float | None = None,
    ) -> Document:
        """Return a document. Raises NotFoundError. The arguments are those of `KvClient.get`."""
        if from_replica:
            return self._get_from_replica(key, at_least, timeout_s)
        if at_least is not None:
            raise ValueError("at_least goes with from_replica=True: the master has every change")
        outcome = self._execute(get_operation(key), timeout_s=timeout_s)
        assert isinstance(outcome, Document)
        return outcome

    def _get_from_replica(
        self, key: bytes | str, at_least: Token | None, timeout_s: float | None
    ) -> Document:
        """Ask the replicas of a key in random order, and then its master."""
        operation = get_replica_operation(key, at_least)
        topology = self.topology()
        (vb_id,) = partitions_of([operation], topology.num_vbuckets)
        if at_least is not None and at_least.vb_id != vb_id:
            raise ValueError(f"at_least is of vbucket {at_least.vb_id}, and the key of {vb_id}")
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        for node in sorted(topology.replicas_of(vb_id), key=lambda _node: jitter()):
            send = Send(node, range(1), [vb_id], 0, 0.0)
            until_s = min(deadline_s, time.monotonic() + REPLICA_LIMIT_S)
            begin = self._beginner(operation, DurabilityLevel.NONE, until_s)
            started = self._exchange.begin(send, begin, until_s)
            if started is not None:
                has_outcome(send, started, until_s)
            outcome = send.outcomes[0]
            if isinstance(outcome, Document):
                return outcome
            if isinstance(outcome, NotFoundError):
                raise outcome
            self._router.learn_from(outcome, node.host)
        return self.get(key, timeout_s=max(deadline_s - time.monotonic(), TIMEOUT_MIN_S))

    def get_with_xattrs(self, key: bytes | str) -> tuple[Document, dict[str, bytes]]:
        """Return a document and its XATTRs: name -> JSON text. System ones are among them if the
        user may read them. Raises NotFoundError, CasMismatchError if it changes all the time.
        """
        import json

        changed = CasMismatchError("the document changes all the time", node=self.address.node)
        for attempt in range(LOOK_UPS_MAX):
            if attempt:
                time.sleep(LOOK_UP_PAUSE_S)
            asked = (xattr_lookup(b"$document.flags"), xattr_lookup(b"$XTOC"), BODY_LOOKUP)
            found = self._look_up(key, asked)
            flags, names, body = (value for _, value in found.results)
            xattrs: dict[str, bytes] = {}
            left: list[str] = json.loads(names)
            try:
                while left:
                    chunk, left = left[:LOOKUPS_MAX], left[LOOKUPS_MAX:]
                    lookups = [xattr_lookup(name.encode()) for name in chunk]
                    texts = self._look_up(key, lookups, found.cas).results
                    xattrs |= zip(chunk, (text for _, text in texts), strict=True)
            except CasMismatchError as error:
                changed = error  # between two requests
            else:
                return Document(body, found.cas, int(flags)), xattrs
        raise changed

    def _look_up(self, key: bytes | str, lookups: Iterable[bytes], cas: int = 0) -> Lookups:
        outcome = self._execute(lookup_operation(key, lookups, cas))
        assert isinstance(outcome, Document)
        return Lookups(outcome.cas, parsed(results_of, outcome.value, self.address.node))

    def store(
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
        """Do a SET, ADD or REPLACE. With a CAS only if the document still has that CAS."""
        operation = store_operation(opcode, key, value, flags, expiry_s, cas)
        outcome = self._execute(operation, durability, timeout_s)
        assert isinstance(outcome, MutationResult)
        return outcome

    def set(
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
        return self.store(
            Opcode.SET, key, value, flags=flags, expiry_s=expiry_s, cas=cas,
            durability=durability, timeout_s=timeout_s,
        )  # fmt: skip

    def delete(
        self,
        key: bytes | str,
        *,
        cas: int = 0,
        durability: DurabilityChoice = DurabilityLevel.NONE,
        timeout_s: float | None = None,
    ) -> MutationResult:
        """Delete a document. Raises NotFoundError or CasMismatchError."""
        outcome = self._execute(delete_operation(key, cas), durability, timeout_s)
        assert isinstance(outcome, MutationResult)
        return outcome

    def increment(
        self,
        key: bytes | str,
        delta: int = 1,
        *,
        initial: int | None = None,
        expiry_s: int = 0,
        durability: DurabilityChoice = DurabilityLevel.NONE,
        timeout_s: float | None = None,
    ) -> CounterResult:
        """Add to a counter, or subtract if `delta` is negative; see `KvClient.increment`."""
        opcode = Opcode.INCREMENT if delta >= 0 else Opcode.DECREMENT
        operation = counter_operation(opcode, key, abs(delta), initial, expiry_s)
        outcome = self._execute(operation, durability, timeout_s)
        assert isinstance(outcome, CounterResult)
        return outcome

    def failover_log(self, vb_id: int) -> list[tuple[int, int]]:
        """Return a partition's versions as (vb_uuid, seqno at which it began), newest first."""
        reply = self._command(Opcode.GET_FAILOVER_LOG, "get failover log", vb_id=vb_id)
        frame = _expect(Frame, reply)
        return parsed(parse_failover_log, frame.value, self._router.name_of(vb_id))

    def version_log(self, vb_id: int) -> list[tuple[int, int]]:
        """Return all of a partition's versions, where the server tells more than `failover_log`."""
        shown = self.failover_log(vb_id)
        if not may_be_longer(shown):
            return shown
        group = version_log_group(vb_id)
        reply = self._command(Opcode.STAT, "get version log", key=group, vb_id=vb_id)
        if isinstance(reply, NotFoundError):
            return shown  # the server does not know the group
        return list(versions_of(_expect(list, reply), vb_id)) or shown

    def get_all_vb_seqnos(self) -> dict[int, int]:
        """Return the high seqno of every active partition, over all nodes."""
        seqnos: dict[int, int] = {}
        active = (1).to_bytes(4, "big")
        deadline_s = time.monotonic() + self._timeout_s
        self.topology()
        asked: dict[ClusterNode, tuple[int, int]] = {}
        while (node := self._router.next_node(asked)) is not None:
            reply = self._command(
                Opcode.GET_ALL_VB_SEQNOS, "get all vbucket seqnos", extras=active, node=node,
                deadline_s=deadline_s,
            )  # fmt: skip
            if isinstance(reply, Frame):
                seqnos.update(parsed(parse_vb_seqnos, reply.value, node.name))
            elif self._router.is_serving(node):
                _expect(Frame, reply)
        return dict(sorted(seqnos.items()))

    def stats(self, group: str = "") -> dict[str, str]:
        """Return the statistics of the named server."""
        reply = self._command(
            Opcode.STAT, f"stat {group!r}", key=group.encode(), node=self._reached()
        )
        frames = _expect(list, reply)
        return {frame.key.decode(): frame.value.decode(errors="replace") for frame in frames}

    def collections_manifest(self) -> bytes:
        """Return the scopes and collections, as JSON."""
        reply = self._command(
            Opcode.GET_COLLECTIONS_MANIFEST, "get collections", node=self._reached()
        )
        return _expect(Frame, reply).value

    def named_node(self) -> ClusterNode:
        """Return the node of the address that answers: the first one that could be reached."""
        return self._reached()

    def topology(self) -> Topology:
        """Return the cluster configuration. It is fetched once, and replaced by newer ones."""
        router = self._router
        if router.topology is None:
            seed = self._reached()
            reply = self._command(Opcode.GET_CLUSTER_CONFIG, "get cluster config", node=seed)
            frame = _expect(Frame, reply)
            if frame.status == Status.OK and frame.value:
                router.learn(frame.value, seed.host)
            else:
                router.adopt(single_node(seed.host, seed.kv_port))
        assert router.topology is not None
        return router.topology

    def _execute(
        self,
        operation: Operation,
        durability: DurabilityChoice = DurabilityLevel.NONE,
        timeout_s: float | None = None,
    ) -> Document | MutationResult | CounterResult:
        level = durability_of(durability)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if not timeout_s > 0:
            raise ValueError(f"timeout_s {timeout_s}: it must be above 0")
        begun_s = time.monotonic()
        deadline_s = begun_s + timeout_s
        self._exchange.reach_one(deadline_s)
        begin = self._beginner(operation, level, deadline_s)
        direct = self._router.direct([operation])
        flight: tuple[Send, Started] | None = None
        if direct is not None:
            started = self._exchange.begin(direct, begin, deadline_s)
            asks_at_s = begun_s + patience_s(timeout_s)
            if started is not None and not has_outcome(direct, started, asks_at_s):
                flight = direct, started
            if is_answer(direct.outcomes[0]):
                self._router.note_up(direct.node)
                return _document(direct.outcomes[0])
        call = Call(self._router, [operation], begun_s, timeout_s, direct=direct)
        if direct is not None and flight is None:
            call.finish(direct, time.monotonic(), jitter())
        self._exchange.run(call, begin, flight)
        return _document(call.results[0])

    def _beginner(self, operation: Operation, level: DurabilityLevel, deadline_s: float) -> Begin:
        """Return what sends a document operation to a node."""

        def begin(send: Send, link: SyncLink) -> Started:
            if level and not link.has_durability:
                raise UnsupportedError("the server has no durability levels", node=link.node)
            prefix = self._prefix(link)
            opaque = link.take_opaque()
            packet = pack_operations(
                [operation], send.vb_ids, opaque=opaque, has_collections=link.has_collections,
                collection_prefix=prefix,
                framing=durability_frame(level, deadline_s - time.monotonic()),
            )  # fmt: skip
            send.sent = 1
            link.start(packet)

            def end() -> Result:
                outcome = outcome_of(operation, send.vb_ids[0], link.finish(opaque), link.node)
                if isinstance(outcome, UnknownCollectionError):
                    self._collection_id = None  # the name may have a new id now
                return outcome

            return Started(link, end)

        return begin

    def _reached(self) -> ClusterNode:
        """Return the named server. Of several, the first one that answered."""
        self._exchange.reach_one(time.monotonic() + self._timeout_s)
        return self._router.seed

    def _command(
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
        now_s = time.monotonic()
        timeout_s = self._timeout_s if deadline_s is None else max(0.0, deadline_s - now_s)
        operation = (opcode, key, extras, b"", 0)
        self._exchange.reach_one(now_s + timeout_s)
        call = Call(self._router, [operation], now_s, timeout_s, vb_id=vb_id, node=node)

        def begin(send: Send, link: SyncLink) -> Started:
            opaque = link.take_opaque()
            send.sent = 1
            link.start(
                pack_request(opcode, vb_id=vb_id or 0, opaque=opaque, extras=extras, key=key)
            )
            frames: list[Frame] = []

            def end() -> Result:
                replies = (
                    link.finish_stat(opaque, frames)
                    if opcode == Opcode.STAT
                    else [link.finish(opaque)]
                )
                status, name = replies[-1].status if replies else 0, send.node.name
                has_none = opcode == Opcode.GET_CLUSTER_CONFIG and status not in RETRY_STATUSES
                if status and not has_none:
                    return error_from_status(
                        status, what, body=replies[-1].value, vb_id=vb_id, node=name
                    )
                return replies if opcode == Opcode.STAT else replies[0]

            return Started(link, end)

        self._exchange.run(call, begin)
        result = call.results[0]
        assert result is not None, "every operation has an outcome"
        return result

    def _prefix(self, link: SyncLink) -> bytes:
        """Return the collection prefix of keys.

        Raises UnknownCollectionError, UnsupportedError.
        """
        name = self.collection_name
        if name is None:
            return DEFAULT_COLLECTION_PREFIX
        if not link.has_collections:
            raise UnsupportedError("the server has no collections", node=link.node)
        from vbucket.model.manifest import encode_leb128  # 3 ms that few commands need

        if self._collection_id is None:
            frame = link.request(Opcode.GET_COLLECTION_ID, key=name.encode())
            self._collection_id = collection_id_of(frame, name, link.node)
        return encode_leb128(self._collection_id)


def _document(outcome: object) -> Document | MutationResult | CounterResult:
    """Return the outcome of a document operation; raise it if it is an error."""
    if isinstance(outcome, DcpdError):
        raise outcome
    assert isinstance(outcome, Document | MutationResult | CounterResult)
    return outcome


def _expect(kind: type[_T], outcome: object) -> _T:
    """Return the outcome as the expected type; raise it if it is an error."""
    if isinstance(outcome, DcpdError):
        raise outcome
    assert isinstance(outcome, kind)
    return outcome
