"""Performs the calls of `SyncKv`: does over blocking sockets what a Call says.

Its coroutines wait where they are called, so each ends at its first step (`clients.kv.commands`).
One operation is under way at a time. While its answer takes long, threads ask other nodes for a
newer map (`MapFetches`).

Invariant: a connection with a reply under way is used by nobody else. If the operation goes
elsewhere, that connection is closed before the next use of its node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any, Final, NamedTuple, cast

from clients.address import ServerAddress
from clients.errors import (
    DcpdError,
    NotFoundError,
    OperationTimeoutError,
    UnknownCollectionError,
    UnsupportedError,
)
from clients.kv.call import Call, is_answer
from clients.kv.commands import KvTransport, reply_of
from clients.kv.routing import (
    PATIENCE_S,
    Result,
    Router,
    Send,
    patience_s,
)
from clients.link.blocking_link import TIMEOUT_MIN_S, MapFetches, SyncLink, first_sync_link
from clients.link.topology import STAGGER_S, ClusterNode, FetchMap, Place, Topology, single_node
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
from dcp.wire.frame import Frame, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.model.ids import DEFAULT_COLLECTION_PREFIX

CONNECT_LIMIT_S: Final = 5.0
"""How long one connection attempt may take. Meanwhile nobody can be asked whether the partition has
moved, so this is less than the usual timeout of a call. Where other nodes are known, attempts begin
with PATIENCE_S, and the limit doubles up to this one."""
SLICE_S: Final = 0.02
"""While a thread asks another node for a newer map, the wait for an answer looks this often whether
that has ended."""

jitter: Final = Random().random  # noqa: S311 - not for secrets

REPLICA_LIMIT_S: Final = 0.5
"""How long a replica may take before the next one, or the master, is asked."""


class Started(NamedTuple):
    """An operation that was sent."""

    link: SyncLink
    end: Callable[[], Result]
    """Returns its result. May be called again after OperationTimeoutError."""


Begin = Callable[[Send, SyncLink], Started]
"""Sends an operation over a connection."""


class BlockingExchange(KvTransport):
    """Performs the calls of one `SyncKv` over blocking sockets."""

    def __init__(self, address: ServerAddress, router: Router) -> None:
        self.router = router
        self._address = address
        self._links: dict[Place, SyncLink] = {}
        self._fetches: MapFetches | None = None
        self._collection_ids: dict[str, int] = {}

    # -- as a transport ------------------------------------------------------------------------

    async def documents(
        self,
        operations: list[Operation],
        timeout_s: float,
        level: DurabilityLevel,
        collection: str | None,
    ) -> list[Outcome]:
        """See KvTransport. It takes one operation: answers to more could fill both sockets."""
        (operation,) = operations
        begun_s = time.monotonic()
        deadline_s = begun_s + timeout_s
        self._reach_one(deadline_s)
        begin = self._beginner(operation, level, deadline_s, collection)
        direct = self.router.direct(operations)
        flight: tuple[Send, Started] | None = None
        if direct is not None:
            started = self._begin(direct, begin, deadline_s)
            asks_at_s = begun_s + patience_s(timeout_s)
            if started is not None and not waited_for(direct, started, asks_at_s):
                flight = direct, started
            if is_answer(direct.outcomes[0]):
                self.router.note_up(direct.node)
                return cast("list[Outcome]", direct.outcomes)
        call = Call(self.router, operations, begun_s, timeout_s, direct=direct)
        if direct is not None and flight is None:
            call.finish(direct, time.monotonic(), jitter())
        self._run(call, begin, flight)
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
        """See KvTransport."""
        now_s = time.monotonic()
        self._reach_one(now_s + timeout_s)
        call = Call(
            self.router, [(opcode, key, extras, b"", 0)], now_s, timeout_s, vb_id=vb_id, node=node
        )

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
                return reply_of(opcode, what, replies, vb_id, send.node.name)

            return Started(link, end)

        self._run(call, begin)
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
        """See KvTransport. Each has REPLICA_LIMIT_S, one after the other."""
        for send in sorted(sends, key=lambda _send: jitter()):
            until_s = min(deadline_s, time.monotonic() + REPLICA_LIMIT_S)
            begin = self._beginner(operation, DurabilityLevel.NONE, until_s, collection)
            started = self._begin(send, begin, until_s)
            if started is not None:
                waited_for(send, started, until_s)
            outcome = send.outcomes[0]
            if isinstance(outcome, Document | NotFoundError):
                return outcome
            self.router.learn_from(outcome, send.node.host)
        return await master()

    async def named_node(self, timeout_s: float) -> ClusterNode:
        """See KvTransport."""
        self._reach_one(time.monotonic() + timeout_s)
        return self.router.seed

    async def topology(self, timeout_s: float) -> Topology:
        """See KvTransport."""
        router = self.router
        if router.topology is None:
            seed = await self.named_node(timeout_s)
            reply = await self.command(
                Opcode.GET_CLUSTER_CONFIG, "get cluster config", timeout_s, node=seed
            )
            if isinstance(reply, DcpdError):
                raise reply
            assert isinstance(reply, Frame)
            if reply.status == Status.OK and reply.value:
                router.learn(reply.value, seed.host)
            else:
                router.adopt(single_node(*seed.place))
        assert router.topology is not None
        return router.topology

    async def pause(self, seconds: float) -> None:
        """See KvTransport."""
        time.sleep(seconds)  # noqa: ASYNC251 - it waits where it is called

    def now_s(self) -> float:
        """See KvTransport."""
        return time.monotonic()

    # -- sending -------------------------------------------------------------------------------

    def _beginner(
        self,
        operation: Operation,
        level: DurabilityLevel,
        deadline_s: float,
        collection: str | None,
    ) -> Begin:
        """Return what sends a document operation to a node."""

        def begin(send: Send, link: SyncLink) -> Started:
            if level and not link.has_durability:
                raise UnsupportedError("the server has no durability levels", node=link.node)
            prefix = self._prefix(link, collection)
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
                if collection is not None and isinstance(outcome, UnknownCollectionError):
                    self._collection_ids.pop(collection, None)  # the name may have a new id now
                return outcome

            return Started(link, end)

        return begin

    def _prefix(self, link: SyncLink, name: str | None) -> bytes:
        """Return the collection prefix of keys.

        Raises UnknownCollectionError, UnsupportedError.
        """
        if name is None:
            return DEFAULT_COLLECTION_PREFIX
        if not link.has_collections:
            raise UnsupportedError("the server has no collections", node=link.node)
        from vbucket.model.manifest import encode_leb128  # 3 ms that few commands need

        found = self._collection_ids.get(name)
        if found is None:
            frame = link.request(Opcode.GET_COLLECTION_ID, key=name.encode())
            found = self._collection_ids[name] = collection_id_of(frame, name, link.node)
        return encode_leb128(found)

    def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _reach_one(self, deadline_s: float) -> None:
        """Connect to one of several servers that the user named."""
        if self.router.was_reached or not self._address.others:
            return
        left_s = max(deadline_s - time.monotonic(), TIMEOUT_MIN_S)
        link = first_sync_link(self._address, min(left_s, CONNECT_LIMIT_S))
        self._links[link.place] = link
        self.router.begin_at(link.place)

    def _begin(self, send: Send, begin: Begin, deadline_s: float) -> Started | None:
        """Send an operation. If that fails, fill in its outcome and return None."""
        try:
            return begin(send, self._link(send.node, deadline_s, send.attempt))
        except OperationTimeoutError as error:
            # If the time is over, the call says what was not answered.
            if time.monotonic() < deadline_s:
                send.outcomes[0] = error
        except DcpdError as error:
            send.outcomes[0] = error
        return None

    def _run(self, call: Call, begin: Begin, flight: tuple[Send, Started] | None = None) -> None:
        """Do what the call says until it is done. `flight` is under way already."""
        self._fetches = None  # what an earlier call asked for is not for this one
        while True:
            has_news = False
            for action in call.step(time.monotonic(), jitter()):
                if isinstance(action, FetchMap):
                    has_news = self._fetch(call, action) or has_news
                    continue
                started = self._begin(action, begin, call.deadline_s)
                if started is None:
                    call.finish(action, time.monotonic(), jitter())
                else:
                    flight = action, started
            if flight is not None and flight[0].is_abandoned:
                flight = None
            if call.is_done:
                return
            if not has_news and self._wait(call, flight):
                flight = None

    def _wait(self, call: Call, flight: tuple[Send, Started] | None) -> bool:
        """Wait until something has ended, or the call has to go on. Return whether the operation
        under way has ended.
        """
        fetches, until_s, has_ended = self._fetches, call.wake_s(), False
        is_fetching = fetches is not None and fetches.running > 0
        if flight is not None:
            if is_fetching:
                until_s = min(until_s, time.monotonic() + SLICE_S)
            has_ended = waited_for(*flight, until_s)
            if has_ended:
                call.finish(flight[0], time.monotonic(), jitter())
            until_s = 0.0
        elif not is_fetching:
            time.sleep(max(0.0, until_s - time.monotonic()))
        if fetches is not None:
            for fetch, answer in fetches.take(until_s - time.monotonic()):
                call.mapped(fetch, answer, time.monotonic())
        return has_ended

    # -- maps ----------------------------------------------------------------------------------

    def _fetch(self, call: Call, fetch: FetchMap) -> bool:
        """Ask a node for its map: in a thread, or at once over a connection that is at hand. Return
        whether the call knows the answer already.
        """
        link = self._links.get(fetch.node.place)
        is_first = link is None and not self.router.was_reached
        if is_first or (link is not None and link.is_usable):
            limit_s = fetch.until_s if is_first else time.monotonic() + STAGGER_S
            answer = self._fetched(fetch, min(limit_s, call.deadline_s))
            call.mapped(fetch, answer, time.monotonic())
            return True
        if self._fetches is None:
            self._fetches = MapFetches(self._address)
        self._fetches.start(fetch)
        return False

    def _fetched(self, fetch: FetchMap, until_s: float) -> bytes | DcpdError:
        """Return the configuration of a node, b"" if it has none."""
        try:
            return self._link(fetch.node, until_s, 0).fetch_config()
        except DcpdError as error:
            return error

    # -- connections ---------------------------------------------------------------------------

    def _link(self, node: ClusterNode, deadline_s: float, attempt: int) -> SyncLink:
        """Return the connection to a node, whose next request may take until the deadline.

        Raises ConnectError, OperationTimeoutError, AuthenticationError.
        """
        place = node.place
        link = self._links.get(place)
        if link is not None and not link.is_usable:
            link.close()
            link = None
        if link is None:
            limit_s = max(deadline_s - time.monotonic(), TIMEOUT_MIN_S)
            limit_s = min(limit_s, CONNECT_LIMIT_S)
            if self.router.was_reached and len(self.router.nodes()) > 1:
                limit_s = min(limit_s, PATIENCE_S * (1 << min(attempt, 3)))
            self._links.pop(place, None)
            link = self._links[place] = SyncLink(self._address.at(*place), timeout_s=limit_s)
        link.set_deadline(deadline_s)
        return link


def waited_for(send: Send, started: Started, until_s: float) -> bool:
    """Wait for the answer to what was sent; fill in its outcome. False: there is none yet."""
    started.link.set_deadline(until_s)
    try:
        send.outcomes[0] = started.end()
    except OperationTimeoutError:
        return False
    except DcpdError as error:
        send.outcomes[0] = error
    return True
