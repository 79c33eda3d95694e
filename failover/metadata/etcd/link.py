"""One connection to one member of etcd: login, checks, calls and watch streams.

Who calls it: the client of etcd. All gRPC of a process that runs on an event loop runs on one:
gRPC's threads wake one loop, and a second one would wait for ever now and then. Renewals of leases
run on no loop (`etcd_lease_thread`).

- Calls carry `hasleader`: a member without a leader refuses them at once, and ends watches.
- gRPC does not repeat calls: what may have happened is for the caller to find out.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc
from grpc import aio

from failover.metadata.etcd.codec import range_ends
from failover.metadata.etcd.lease_thread import LeasePlace
from failover.metadata.etcd.settings import EtcdSettings
from failover.metadata.etcd.trouble import version_trouble
from failover.metadata.etcd_stubs import etcd_api_pb2 as pb
from failover.metadata.metastore import (
    Compact,
    LeaseGrant,
    LeaseRevoke,
    Range,
    StoreRequest,
    Txn,
)

LOGIN_S: Final = 2.0
"""How long a login and the first read may take, an election of etcd's leader not included."""
RECEIVE_BYTES_MAX: Final = 64 << 20
"""A read of all records. gRPC's own limit is 4 MiB."""
_OPTIONS: Final = (
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", RECEIVE_BYTES_MAX),
    ("grpc.max_send_message_length", -1),  # requests are checked before
    # Pings find a dead connection below a watch. etcd closes connections that ping more often.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
    # A link that broke is given up as a whole, and its successor begins at once.
    ("grpc.use_local_subchannel_pool", 1),
)
_UNARY: Final[dict[type, tuple[str, Any]]] = {
    Range: ("/etcdserverpb.KV/Range", pb.RangeResponse),
    Txn: ("/etcdserverpb.KV/Txn", pb.TxnResponse),
    Compact: ("/etcdserverpb.KV/Compact", pb.CompactionResponse),
    LeaseGrant: ("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantResponse),
    LeaseRevoke: ("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeResponse),
}
_WATCH: Final = ("/etcdserverpb.Watch/Watch", pb.WatchResponse)
_STATUS: Final = ("/etcdserverpb.Maintenance/Status", pb.StatusResponse)
_AUTHENTICATE: Final = ("/etcdserverpb.Auth/Authenticate", pb.AuthenticateResponse)
_LEADER: Final = (("hasleader", "true"),)

RpcError: Final = aio.AioRpcError
_loops: list[asyncio.AbstractEventLoop] = []
"""The loop that has gRPC now."""


class LinkLostError(Exception):
    """The link was given up before the request was sent."""


class EtcdUnfitError(Exception):
    """The etcd cannot be used; the text says why and what to try."""


def claim_loop() -> None:
    """Say that the running loop has gRPC.

    Raises:
        RuntimeError: another loop has it.
    """
    loop = asyncio.get_running_loop()
    if _loops and _loops[0] is not loop and not _loops[0].is_closed():
        raise RuntimeError("gRPC of a process runs on one event loop, and another one has it")
    _loops[:] = [loop]


class EtcdLink:
    """See the module. `log_in` first, `close` at the end."""

    def __init__(self, endpoint: str, settings: EtcdSettings) -> None:
        self.endpoint: Final = endpoint
        self.version = ""
        """Empty: etcd does not tell this user."""
        self.cluster_id = 0
        self.revision = 0
        """etcd's revision at the login."""
        self.is_full = False
        self.heard_s = 0.0
        """When something came last, in the loop's time."""
        self.lost: Final[asyncio.Future[str]] = asyncio.get_running_loop().create_future()
        self._settings = settings
        self._metadata: tuple[tuple[str, str], ...] = _LEADER
        self._channel = _channel(endpoint, settings)

    async def log_in(self) -> None:
        """Log in, and check that this etcd can be used.

        Raises:
            EtcdUnfitError: it is too old.
            RpcError: it does not answer, or refuses the user.
        """
        settings = self._settings
        if settings.user:
            login = pb.AuthenticateRequest(name=settings.user, password=settings.password)
            answer = await self._unary(_AUTHENTICATE, login, LOGIN_S)
            self._metadata = (*_LEADER, ("token", answer.token))
        await self._look_at_version()
        # A read that a majority confirms: its revision is not below any that was told before.
        key, range_end = range_ends(settings.prefix, is_prefix=True)
        read = pb.RangeRequest(key=key, range_end=range_end, limit=1, keys_only=True)
        answer = await self._unary(_UNARY[Range], read, LOGIN_S)
        self.cluster_id = answer.header.cluster_id
        self.revision = answer.header.revision

    async def _look_at_version(self) -> None:
        try:
            status = await self._unary(_STATUS, pb.StatusRequest(), LOGIN_S)
        except RpcError as error:
            if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                return  # from 3.6 on only root may ask
            raise
        self.version = status.version
        trouble = version_trouble(self.endpoint, self.version)
        if trouble:
            raise EtcdUnfitError(trouble)
        self.is_full = any("NOSPACE" in error for error in status.errors)

    def lose(self, text: str) -> None:
        """Say that this link is of no use any more."""
        if not self.lost.done():
            self.lost.set_result(text)

    async def close(self) -> None:
        """Cancel what is under way, and disconnect."""
        self.lose("closed")
        await self._channel.close()

    async def call(self, request: StoreRequest, message: Any, timeout_s: float) -> Any:
        """Send a request; return etcd's response.

        Raises:
            LinkLostError: it was not sent.
            RpcError: etcd refuses it, or no answer came in time.
        """
        self._check_lost()
        return await self._unary(_UNARY[type(request)], message, timeout_s)

    def lease_place(self) -> LeasePlace:
        """Return where and as whom leases are renewed. Raises LinkLostError."""
        self._check_lost()
        return LeasePlace(self.endpoint, self._metadata)

    def watch_stream(self) -> Any:
        """Return a stream of watch requests and responses. Raises LinkLostError."""
        self._check_lost()
        return self._stream(_WATCH, None)

    def _check_lost(self) -> None:
        if self.lost.done():
            raise LinkLostError(self.lost.result())

    def hear(self) -> None:
        """Note that something came."""
        self.heard_s = asyncio.get_running_loop().time()

    async def _unary(self, method: tuple[str, Any], message: Any, timeout_s: float) -> Any:
        path, response = method
        call = self._channel.unary_unary(
            path,
            request_serializer=type(message).SerializeToString,
            response_deserializer=response.FromString,
        )
        answer = await call(message, timeout=timeout_s, metadata=self._metadata)
        self.hear()
        return answer

    def _stream(self, method: tuple[str, Any], timeout_s: float | None) -> Any:
        path, response = method
        return self._channel.stream_stream(
            path,
            request_serializer=pb.WatchRequest.SerializeToString,
            response_deserializer=response.FromString,
        )(timeout=timeout_s, metadata=self._metadata)


def _channel(endpoint: str, settings: EtcdSettings) -> Any:
    if not settings.ca:
        return aio.insecure_channel(endpoint, options=_OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        settings.ca, settings.private_key or None, settings.certificate or None
    )
    return aio.secure_channel(endpoint, credentials, options=_OPTIONS)
