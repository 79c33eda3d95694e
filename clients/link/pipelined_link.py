"""One connection with asyncio: pipelined requests, replies in order.

Used by `clients.kv` for commands. Consumers, backups and restores take over the bytes after the
handshake.

Invariants
- replies come in the order of the requests, each with the opaque of its request. Anything else
  closes the connection, so a late reply cannot reach the wrong caller;
- there is one future per batch, not per operation;
- if a caller gives up (timeout), its batch stays in the queue, and its replies are dropped.

Limits: a frame as in `dcp.wire.frame`; writers wait while the transport's buffer is full.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from clients.address import ServerAddress, is_loopback
from clients.errors import (
    TRANSIENT,
    ConnectError,
    ConnectionLostError,
    DcpdError,
    OperationTimeoutError,
    WrongProtocolError,
    none_answered,
)
from clients.link.handshake import FEATURES, Handshake, is_config_push
from clients.link.topology import STAGGER_S, Place, Topology, parse_topology, single_node
from dcp.wire.frame import Frame, FrameDecoder, ProtocolError, RemoteProtocolError, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

if TYPE_CHECKING:
    from ssl import SSLContext

CONNECT_TIMEOUT_S: Final = 5.0
OPAQUE_MASK: Final = 0xFFFF_FFFF
WRITE_HIGH_BYTES: Final = 4 * 1024 * 1024
"""Writers wait while this many bytes are unsent (a batch or two). So a slow server does not fill
memory."""

_T = TypeVar("_T")


class _Batch:
    """Requests that were written together and wait for `count` replies.

    The number of replies to STAT is unknown (`is_open_ended`). The last one has an empty key.
    """

    __slots__ = ("count", "frames", "future", "is_open_ended", "opaque")

    def __init__(
        self, opaque: int, count: int, future: asyncio.Future[list[Frame]], *, is_open_ended: bool
    ) -> None:
        self.opaque = opaque
        self.count = count
        self.future = future
        self.frames: list[Frame] = []
        self.is_open_ended = is_open_ended


class Link(asyncio.Protocol):
    """A connection that is authenticated and has a bucket selected. Made by `Link.connect`."""

    def __init__(self, address: ServerAddress, features: tuple[int, ...] = FEATURES) -> None:
        self.address = address
        self.place = address.host, address.port
        self._features = features
        self.node = address.node
        self.handshake: Handshake | None = None
        self.is_closed = False
        self.heard_s = 0.0
        """When something was last received, by the loop's clock."""
        self.has_collections = False
        self.has_durability = False
        self._transport: asyncio.Transport | None = None
        self._decoder = FrameDecoder()
        self._batches: deque[_Batch] = deque()
        self._next_opaque = 1
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._take_bytes: Callable[[bytes], None] | None = None
        self._on_lost: Callable[[DcpdError], None] | None = None
        self._failure: DcpdError | None = None
        self.on_config: Callable[[Link], None] | None = None
        """Called when the server has pushed a newer configuration (`handshake.config`)."""

    def topology(self) -> Topology:
        """Return the cluster configuration that came over the connection, the newest one.

        A server without one has all partitions. Raises TopologyError if it cannot be read.
        """
        assert self.handshake is not None
        config = self.handshake.config
        if not config:
            return single_node(*self.place)
        return parse_topology(config, self.address.host, is_tls=self.address.is_tls)

    async def fetch_config(self) -> bytes:
        """Return the cluster configuration that the node has now, b"" if it has none."""
        frame = await self.request(Opcode.GET_CLUSTER_CONFIG)
        return frame.value if frame.status == Status.OK else b""

    @classmethod
    async def connect(
        cls,
        address: ServerAddress,
        *,
        timeout_s: float = CONNECT_TIMEOUT_S,
        features: tuple[int, ...] = FEATURES,
    ) -> Link:
        """Connect, authenticate, select the bucket. `features` are asked for (HELLO).

        If the address names several nodes, the first one that answers counts, and `Link.address`
        names that one.

        Raises ConnectError, AuthenticationError, OperationTimeoutError or a StatusError.
        """
        if address.others:
            return await cls._connect_to_one_of(address, timeout_s, features)
        loop = asyncio.get_running_loop()
        link: Link | None = None
        is_ready = False
        tls: SSLContext | None = None
        explain = ConnectError.of
        if address.is_tls:
            from clients.link.client_tls import client_context, connect_error

            tls, explain = client_context(address), connect_error
        try:
            async with asyncio.timeout(timeout_s):
                _, link = await loop.create_connection(
                    lambda: cls(address, features), address.host, address.port, ssl=tls
                )
                await link.ready
                is_ready = True
        except TimeoutError:
            raise OperationTimeoutError(
                f"no session within {timeout_s:g} s", node=address.node
            ) from None
        except OSError as error:
            raise explain(error, address.node) from error
        finally:
            # After a timeout, a refusal or a cancellation, no one else can close it.
            if link is not None and not is_ready:
                link.close()
        return link

    @classmethod
    async def _connect_to_one_of(
        cls, address: ServerAddress, timeout_s: float, features: tuple[int, ...]
    ) -> Link:
        def connect(place: Place) -> Coroutine[Any, Any, Link]:
            return cls.connect(address.at(*place), timeout_s=timeout_s, features=features)

        try:
            async with asyncio.timeout(timeout_s):
                _, link = await first_answer(connect, address.places, Link.close)
        except TimeoutError as error:
            if isinstance(error, DcpdError):
                raise none_answered(error, address.places) from error
            raise OperationTimeoutError(
                f"none of the {len(address.places)} nodes answered within {timeout_s:g} s",
                node=address.node,
            ) from None
        except TRANSIENT as error:
            raise none_answered(error, address.places) from error
        return link

    @property
    def now_s(self) -> float:
        """The time of the loop."""
        return self._loop.time()

    @property
    def pending(self) -> int:
        """Number of batches that wait for replies."""
        return len(self._batches)

    # -- requests ------------------------------------------------------------------------------

    def take_opaques(self, count: int) -> int:
        """Return the first of `count` opaques for the next batch."""
        opaque = self._next_opaque
        self._next_opaque = opaque + count & OPAQUE_MASK
        return opaque

    def send_batch(
        self, packets: bytes, opaque: int, count: int, *, is_open_ended: bool = False
    ) -> asyncio.Future[list[Frame]]:
        """Write packets whose opaques count up from `opaque`; the future has their replies."""
        future: asyncio.Future[list[Frame]] = asyncio.get_running_loop().create_future()
        transport = self._transport
        # A transport that a failed write is closing drops what it gets: that was not sent.
        if self._failure is not None or transport is None or transport.is_closing():
            future.set_exception(self._failure or self._lost())
            return future
        self._batches.append(_Batch(opaque, count, future, is_open_ended=is_open_ended))
        transport.write(packets)
        return future

    async def request(
        self,
        opcode: Opcode,
        *,
        vb_id: int = 0,
        extras: bytes = b"",
        key: bytes = b"",
        value: bytes = b"",
    ) -> Frame:
        """Send one request and return its reply, whatever its status."""
        opaque = self.take_opaques(1)
        packet = pack_request(
            opcode, vb_id=vb_id, opaque=opaque, extras=extras, key=key, value=value
        )
        return (await self.send_batch(packet, opaque, 1))[0]

    async def request_stat(self, group: bytes) -> list[Frame]:
        """Send STAT and return its replies, without the empty one that ends them."""
        opaque = self.take_opaques(1)
        packet = pack_request(Opcode.STAT, opaque=opaque, key=group)
        frames = await self.send_batch(packet, opaque, 1, is_open_ended=True)
        return frames if frames[-1].status else frames[:-1]

    async def sign_of_life(self, timeout_s: float) -> None:
        """Ask for an answer to NOOP. Raises ConnectionLostError, OperationTimeoutError."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.request(Opcode.NOOP)
        except TimeoutError:
            raise OperationTimeoutError(
                f"no sign of life within {timeout_s:g} s", node=self.node
            ) from None

    async def drain(self) -> None:
        """Wait until the transport accepts more bytes."""
        await self._can_write.wait()

    # -- handing over to a stream --------------------------------------------------------------

    def hand_over(
        self, take_bytes: Callable[[bytes], None], on_lost: Callable[[DcpdError], None]
    ) -> None:
        """From now on pass all bytes to `take_bytes`, and call `on_lost` once at the end."""
        assert not self._batches
        self._take_bytes = take_bytes
        self._on_lost = on_lost
        if self._failure is not None:
            on_lost(self._failure)

    def write(self, data: bytes) -> None:
        """Send raw bytes (after `hand_over`)."""
        if self._transport is not None and not self.is_closed:
            self._transport.write(data)

    def pause_reading(self) -> None:
        """Stop reading from the peer."""
        if self._transport is not None and not self.is_closed:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading."""
        if self._transport is not None and not self.is_closed:
            self._transport.resume_reading()

    def close(self) -> None:
        """Close. Pending requests fail with ConnectionLostError."""
        self._fail(self._lost("the connection was closed by this client"))

    # -- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        peer = transport.get_extra_info("peername")
        host = peer[0] if isinstance(peer, tuple) else ""
        self.handshake = Handshake(
            self.address, is_loopback=is_loopback(host), features=self._features
        )
        self._transport.write(self.handshake.begin())

    def data_received(self, data: bytes) -> None:
        """Process received bytes."""
        self.heard_s = self._loop.time()
        if self._take_bytes is not None:
            self._take_bytes(data)
            return
        try:
            frames = self._decoder.feed(data)
            handshake = self.handshake
            if handshake is not None and not handshake.is_done:
                frames = self._shake(handshake, frames)
            if frames:
                self._take_replies(frames)
        except ProtocolError as error:
            is_new = self.handshake is not None and not self.handshake.is_done
            broken = self._lost(f"the server broke the protocol: {error}")
            wrong = WrongProtocolError.of_bytes(data, str(error), self.node)
            self._fail(wrong if is_new else broken)
        except DcpdError as error:
            self._fail(error)

    def pause_writing(self) -> None:
        """Writers wait."""
        self._can_write.clear()

    def resume_writing(self) -> None:
        """Writers continue."""
        self._can_write.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all waiting requests."""
        self._fail(self._lost(f"the connection was lost: {exc or 'closed by the server'}"))

    # -- inside --------------------------------------------------------------------------------

    def _shake(self, handshake: Handshake, frames: list[Frame]) -> list[Frame]:
        """Hand frames to the handshake; return those that came after its end."""
        for index, frame in enumerate(frames):
            reply = handshake.receive(frame)
            if reply and self._transport is not None:
                self._transport.write(reply)
            if handshake.is_done:
                self.has_collections = handshake.has_collections
                self.has_durability = handshake.has_durability
                if not self.ready.done():
                    self.ready.set_result(None)
                return frames[index + 1 :]
        return []

    def _take_replies(self, frames: list[Frame]) -> None:
        batches = self._batches
        for frame in frames:
            if frame.is_request:
                if self.handshake is not None and is_config_push(frame):
                    self.handshake.config = frame.value
                    if self.on_config is not None:
                        self.on_config(self)
                continue
            if not batches:
                raise RemoteProtocolError(f"an unexpected reply with opaque {frame.opaque}")
            batch = batches[0]
            if frame.opaque != batch.opaque:
                raise RemoteProtocolError(
                    f"a reply with opaque {frame.opaque}, expected {batch.opaque}"
                )
            batch.frames.append(frame)
            if batch.is_open_ended:
                if frame.key and not frame.status:
                    continue
            else:
                batch.opaque = batch.opaque + 1 & OPAQUE_MASK
                batch.count -= 1
                if batch.count:
                    continue
            batches.popleft()
            if not batch.future.done():
                batch.future.set_result(batch.frames)

    def _lost(self, what: str = "the connection was lost") -> ConnectionLostError:
        return ConnectionLostError(what, node=self.node)

    def _fail(self, error: DcpdError) -> None:
        """Close. All waiting requests fail with `error`."""
        if self.is_closed:
            return
        self.is_closed = True
        self._failure = error
        self._can_write.set()
        if self._transport is not None:
            # close() would wait until the peer, which may be gone, has read the unsent bytes.
            self._transport.abort()
        if not self.ready.done():
            if isinstance(error, ConnectionLostError):
                error = ConnectError(f"no session: {error.what}", node=self.node)
            self.ready.set_exception(error)
            self.ready.exception()  # seen: after a timeout nobody waits for it
        for batch in self._batches:
            if not batch.future.done():
                batch.future.set_exception(error)
                batch.future.exception()  # seen: its caller may have given up
        self._batches.clear()
        if self._on_lost is not None:
            self._on_lost(error)


async def first_answer(
    ask: Callable[[Place], Coroutine[Any, Any, _T]],
    places: Sequence[Place],
    discard: Callable[[_T], None],
) -> tuple[Place, _T]:
    """Return the first node that answers, and its answer: for where any node will do.

    They are asked in order. One that stands still delays the next by STAGGER_S, one that refuses by
    nothing. What comes from another node later is given to `discard`. If none answers, raises the
    last error. An error that is not transient is raised at once.
    """
    tasks: dict[asyncio.Task[_T], Place] = {}
    failure: DcpdError | None = None
    left = list(places)
    try:
        while left or tasks:
            if left:
                place = left.pop(0)
                tasks[asyncio.create_task(ask(place))] = place
            timeout_s = STAGGER_S if left else None
            done, _ = await asyncio.wait(
                tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                place = tasks[task]
                try:
                    answer = task.result()
                except TRANSIENT as error:
                    failure = error
                    del tasks[task]
                    continue
                del tasks[task]
                return place, answer
        assert failure is not None, "there is at least one node"
        raise failure
    finally:
        await give_up(list(tasks), discard)


async def give_up(tasks: Sequence[asyncio.Task[_T]], discard: Callable[[_T], None]) -> None:
    """Cancel tasks. Give what some of them have returned already to `discard`."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(result, BaseException):
            discard(result)
