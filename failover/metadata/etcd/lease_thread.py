"""A thread that renews a node's lease in etcd, however busy the node's event loop is.

    loop:    renew ──────────── renew ──────────── (busy) ───────────────── renew
    thread:    └─ etcd ─┘  …  ─┘  └─ etcd ─┘ … etcd ─ etcd ─ etcd ─ etcd ─┘  └─ etcd

The event loop of a node that gets little of a processor comes round late. Its lease must not end
for that: elections would make more work for everybody. So the loop asks for a renewal as often as
before, and the thread goes on with it alone, `RENEWALS` times in the lease's time, when the loop
does not ask.

It goes on for `ALONE_LEASES` times the lease's time at most. After that the loop is stuck, and the
node is as good as dead: the lease ends, as it does at once with the process.

Who calls it: the client of etcd. The thread has a connection of its own. gRPC without a loop works
beside gRPC on one.

Invariants
- one lease at a time is renewed without being asked: the newest that was granted or renewed by the
  loop
- each `renew` gets one result, on the loop
- nothing is renewed after `forget` or `close`, or for a loop that is stuck
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, Final, NamedTuple

import grpc
from grpc import aio

from failover.metadata.etcd.settings import EtcdSettings
from failover.metadata.etcd_stubs import etcd_api_pb2 as pb

RENEWALS: Final = 3
"""How often the thread renews a lease in its time, as the loop does."""
ALONE_LEASES: Final = 2
"""How long the thread renews a lease without a word of the loop, in times of the lease's own."""
RETRY_S: Final = 0.2
_KEEP_ALIVE: Final = "/etcdserverpb.Lease/LeaseKeepAlive"


class LeaseStreamEndedError(Exception):
    """etcd ended the stream of a renewal without an answer."""


class LeasePlace(NamedTuple):
    """Where a lease is renewed, and as whom."""

    endpoint: str
    metadata: tuple[tuple[str, str], ...]


class LeaseThread:
    """See the module. Make it on the event loop, and `close` it there."""

    def __init__(self, settings: EtcdSettings, call_s: float) -> None:
        """`call_s`: how long etcd may take for an answer."""
        self._call_s = call_s
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._lease_id = 0
        self._ttl_s = 0.0
        self._asked_s = 0.0
        """When the loop asked last."""
        self._next_s = 0.0
        self._place: LeasePlace | None = None
        self._waiting: dict[int, list[asyncio.Future[Any]]] = {}
        """Lease -> who waits for its renewal."""
        self._is_closed = False
        self._channel: grpc.Channel | None = None
        self._channel_place = ""
        self._thread: threading.Thread | None = None

    def keep(self, place: LeasePlace, lease_id: int, ttl_s: float) -> None:
        """Renew a lease that was just granted."""
        with self._changed:
            self._begin(place, lease_id)
            self._ttl_s = ttl_s
            self._next_s = self._asked_s + ttl_s / RENEWALS

    def renew(self, place: LeasePlace, lease_id: int) -> asyncio.Future[Any]:
        """Renew a lease now; return etcd's response. The future may have an RpcError instead, or a
        LeaseStreamEndedError; it is cancelled by `close`.
        """
        waiter: asyncio.Future[Any] = self._loop.create_future()
        with self._changed:
            if lease_id != self._lease_id:
                self._ttl_s = 0.0  # known with the answer
            self._begin(place, lease_id)
            self._waiting.setdefault(lease_id, []).append(waiter)
            self._changed.notify()
        return waiter

    def forget(self, lease_id: int = 0) -> None:
        """Renew this lease no more; 0: none."""
        with self._changed:
            if lease_id in {0, self._lease_id}:
                self._lease_id = 0

    def close(self) -> None:
        """End the thread; who waits gets no answer."""
        with self._changed:
            self._is_closed = True
            self._lease_id = 0
            waiting, self._waiting = self._waiting, {}
            self._changed.notify()
        for waiters in waiting.values():
            for waiter in waiters:
                waiter.cancel()

    def _begin(self, place: LeasePlace, lease_id: int) -> None:
        self._place, self._lease_id = place, lease_id
        self._asked_s = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="etcd-lease", daemon=True)
            self._thread.start()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while (due := self._wait()) is not None:
            place, lease_id, waiting = due
            answer, error = None, None
            try:
                answer = self._call(place, lease_id)
            except StopIteration:
                error = LeaseStreamEndedError("etcd ended a lease's stream without an answer")
            except grpc.RpcError as failure:
                nothing = aio.Metadata()
                error = aio.AioRpcError(failure.code(), nothing, nothing, failure.details())
            if error is not None:
                self._disconnect()
            self._note(lease_id, answer)
            self._tell(waiting, answer, error)
        self._disconnect()

    def _wait(self) -> tuple[LeasePlace, int, list[asyncio.Future[Any]]] | None:
        """Wait until a renewal is due; None: it is over."""
        with self._changed:
            while not self._is_closed:
                assert self._place is not None
                if self._waiting:
                    lease_id = next(iter(self._waiting))
                    return self._place, lease_id, self._waiting.pop(lease_id)
                now_s = time.monotonic()
                is_alone = now_s - self._asked_s < ALONE_LEASES * self._ttl_s
                may_renew = self._lease_id and is_alone
                if may_renew and now_s >= self._next_s:
                    return self._place, self._lease_id, []
                self._changed.wait(self._next_s - now_s if may_renew else None)
            return None

    def _note(self, lease_id: int, answer: Any) -> None:
        """Note when the next renewal is due."""
        with self._changed:
            if lease_id != self._lease_id:
                return
            now_s = time.monotonic()
            if answer is None:
                self._next_s = now_s + RETRY_S
            elif not answer.TTL:
                self._lease_id = 0  # it is over
            else:
                self._ttl_s = float(answer.TTL)
                self._next_s = now_s + self._ttl_s / RENEWALS

    def _tell(
        self, waiting: list[asyncio.Future[Any]], answer: Any, error: BaseException | None
    ) -> None:
        def tell() -> None:
            for waiter in waiting:
                if waiter.done():
                    continue
                if error is None:
                    waiter.set_result(answer)
                else:
                    waiter.set_exception(error)

        if waiting:
            try:
                self._loop.call_soon_threadsafe(tell)
            except RuntimeError:
                self._lease_id = 0  # the loop is closed, and nobody waits any more

    def _call(self, place: LeasePlace, lease_id: int) -> Any:
        """Renew a lease once. Raises grpc.RpcError, StopIteration."""
        if self._channel is None or self._channel_place != place.endpoint:
            self._disconnect()
            self._channel, self._channel_place = self._connected(place.endpoint), place.endpoint
        call = self._channel.stream_stream(
            _KEEP_ALIVE,
            request_serializer=pb.LeaseKeepAliveRequest.SerializeToString,
            response_deserializer=pb.LeaseKeepAliveResponse.FromString,
        )(
            iter((pb.LeaseKeepAliveRequest(ID=lease_id),)),
            timeout=self._call_s,
            metadata=place.metadata,
        )
        try:
            return next(call)
        finally:
            call.cancel()

    def _connected(self, endpoint: str) -> grpc.Channel:
        settings = self._settings
        options = (("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1))
        if not settings.ca:
            return grpc.insecure_channel(endpoint, options=options)
        credentials = grpc.ssl_channel_credentials(
            settings.ca, settings.private_key or None, settings.certificate or None
        )
        return grpc.secure_channel(endpoint, credentials, options=options)

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
