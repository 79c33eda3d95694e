"""A connection over a blocking socket, for commands that must start fast.

Used by `clients.kv.sync_client` for dcpctl, and by the Spark source. It does not import asyncio
(60 ms), and imports SCRAM only if the server is not on loopback. The handshake is the same as that
of the asyncio link (`clients.link.handshake`).

With several nodes, `first_sync_link` connects to the first one that answers. A node that is silent
costs STAGGER_S. With one node there is no thread.

Invariant: replies come in the order of the requests, each with its request's opaque.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import Final

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
from clients.link.handshake import Handshake
from clients.link.topology import (
    STAGGER_S,
    ClusterMap,
    FetchMap,
    Topology,
    parse_topology,
    single_node,
)
from dcp.wire.frame import Frame, FrameDecoder, ProtocolError, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

TIMEOUT_MIN_S: Final = 0.001
"""A socket takes a timeout of 0 for "do not wait at all"."""
READ_BYTES: Final = 256 * 1024
WAIT_S: Final = 30.0
"""How long `wait_until_ready` waits at least. A server with a gigabyte of log takes that long."""
PAUSE_S: Final = 0.05
"""Between two attempts. An attempt costs a millisecond of processor time."""
ATTEMPT_S: Final = 2.0
"""How long one attempt may take: a server that starts may accept a connection and answer later."""
TIMEOUT_CHANGE_S: Final = 0.01
"""A change of the timeout below this is not worth a system call."""

Answer = tuple[FetchMap, bytes | DcpdError]
"""A request for the map, and its answer: the configuration, b"" if the node has none."""


class SyncLink:
    """A connection that is authenticated and has a bucket selected; a context manager."""

    def __init__(self, address: ServerAddress, *, timeout_s: float = 10.0) -> None:
        """Connect. Raises ConnectError, AuthenticationError, OperationTimeoutError."""
        self.address = address
        self.place = address.host, address.port
        self.node = address.node
        self._timeout_s = timeout_s
        self._deadline_s: float | None = time.monotonic() + timeout_s
        """When the request under way has to be done; None: each read has the timeout."""
        self._decoder = FrameDecoder()
        self._frames: deque[Frame] = deque()
        self._next_opaque = 1
        self.is_usable = True
        """False while a request is pending. If its caller gives up, the reply may still arrive."""
        try:
            self._socket = socket.create_connection((address.host, address.port), timeout_s)
        except TimeoutError:
            raise OperationTimeoutError(
                f"no connection within {timeout_s:g} s", node=self.node
            ) from None
        except OSError as error:
            raise ConnectError.of(error, self.node) from error
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if address.is_tls:
                self._socket = self._with_tls()
            self.handshake = self._shake()
        except BaseException:
            self._socket.close()
            raise
        self.has_collections = self.handshake.has_collections
        self.has_durability = self.handshake.has_durability
        self._deadline_s = None

    def __enter__(self) -> SyncLink:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def detach(self) -> socket.socket:
        """Return the socket, for a caller that speaks for itself from now on, and closes it."""
        return self._socket

    def set_deadline(self, deadline_s: float) -> None:
        """Bound the next request, however many reads it takes (time.monotonic)."""
        self._deadline_s = deadline_s
        timeout_s = max(deadline_s - time.monotonic(), TIMEOUT_MIN_S)
        if not 0 <= self._timeout_s - timeout_s < TIMEOUT_CHANGE_S:
            self._timeout_s = timeout_s
            self._socket.settimeout(timeout_s)

    def take_opaque(self) -> int:
        """Return the opaque for the next request."""
        opaque = self._next_opaque
        self._next_opaque = opaque + 1 & 0xFFFF_FFFF
        return opaque

    def exchange(self, packet: bytes, opaque: int) -> Frame:
        """Send one packet and return its reply."""
        self.start(packet)
        return self.finish(opaque)

    def start(self, packet: bytes) -> None:
        """Send one packet. The link is not usable until `finish` has returned."""
        self.is_usable = False
        self._write(packet)

    def finish(self, opaque: int) -> Frame:
        """Return the reply to the packet that was started.

        It may be called again after OperationTimeoutError, with a later deadline.
        """
        frame = self._reply(opaque)
        self.is_usable = True
        return frame

    def request(
        self,
        opcode: Opcode,
        *,
        vb_id: int = 0,
        extras: bytes = b"",
        key: bytes = b"",
        value: bytes = b"",
    ) -> Frame:
        """Send one request and return its reply, whatever its status."""
        opaque = self.take_opaque()
        return self.exchange(
            pack_request(opcode, vb_id=vb_id, opaque=opaque, extras=extras, key=key, value=value),
            opaque,
        )

    def request_stat(self, group: bytes) -> list[Frame]:
        """Send STAT and return its replies, or only the refusal if there is one."""
        opaque = self.take_opaque()
        self.start(pack_request(Opcode.STAT, opaque=opaque, key=group))
        return self.finish_stat(opaque, [])

    def finish_stat(self, opaque: int, frames: list[Frame]) -> list[Frame]:
        """Return the replies to a STAT that was started. Those so far are in `frames`, so that it
        may be called again as `finish`.
        """
        while not frames or (frames[-1].key and not frames[-1].status):
            frames.append(self._reply(opaque))
        self.is_usable = True
        return frames[-1:] if frames[-1].status else frames[:-1]

    def fetch_config(self) -> bytes:
        """Return the cluster configuration that the node has now, b"" if it has none."""
        frame = self.request(Opcode.GET_CLUSTER_CONFIG)
        return frame.value if frame.status == Status.OK else b""

    def topology(self) -> Topology:
        """Return the cluster configuration that the node has now.

        A server without one has all partitions. Raises TopologyError if it cannot be read.
        """
        config = self.fetch_config()
        if not config:
            return single_node(*self.place)
        return parse_topology(config, self.address.host, is_tls=self.address.is_tls)

    def _with_tls(self) -> socket.socket:
        from clients.link.client_tls import client_context, connect_error

        context = client_context(self.address)
        try:
            return context.wrap_socket(self._socket, server_hostname=self.address.host)
        except TimeoutError:
            raise OperationTimeoutError(
                f"no TLS connection within {self._timeout_s:g} s", node=self.node
            ) from None
        except OSError as error:
            raise connect_error(error, self.node) from error

    def _shake(self) -> Handshake:
        peer = self._socket.getpeername()[0]
        handshake = Handshake(self.address, is_loopback=is_loopback(peer), wants_config=False)
        try:
            self._write(handshake.begin())
            while not handshake.is_done:
                reply = handshake.receive(self._next_frame())
                if reply:
                    self._write(reply)
        except ConnectionLostError as error:
            raise ConnectError(f"no session: {error.what}", node=self.node) from error
        return handshake

    def _reply(self, opaque: int) -> Frame:
        frame = self._next_frame()
        while frame.is_request:
            frame = self._next_frame()  # skip pushed configurations
        if frame.opaque != opaque:
            raise ConnectionLostError(
                f"a reply with opaque {frame.opaque}, expected {opaque}", node=self.node
            )
        return frame

    def _next_frame(self) -> Frame:
        is_first = True
        while not self._frames:
            if self._deadline_s is not None and not is_first:
                self._bound(self._deadline_s)
            is_first = False
            data = self._receive(READ_BYTES)
            try:
                self._frames += self._decoder.feed(data)
            except ProtocolError as error:
                raise WrongProtocolError.of_bytes(data, str(error), self.node) from error
        return self._frames.popleft()

    def _bound(self, deadline_s: float) -> None:
        """Give the next read what is left of the request's time."""
        self._timeout_s = deadline_s - time.monotonic()
        if self._timeout_s <= 0:
            raise OperationTimeoutError("no complete answer in time", node=self.node)
        self._socket.settimeout(self._timeout_s)

    def _receive(self, bytes_max: int) -> bytes:
        """Return received bytes, at least one."""
        try:
            data = self._socket.recv(bytes_max)
        except TimeoutError:
            raise OperationTimeoutError(
                f"no answer within {self._timeout_s:g} s", node=self.node
            ) from None
        except OSError as error:
            raise ConnectionLostError(
                f"the connection was lost: {error.strerror or error}", node=self.node
            ) from error
        if not data:
            raise ConnectionLostError("the server closed the connection", node=self.node)
        return data

    def _write(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except TimeoutError:
            raise OperationTimeoutError(
                f"the server read nothing for {self._timeout_s:g} s", node=self.node
            ) from None
        except OSError as error:
            raise ConnectionLostError(
                f"the connection was lost: {error.strerror or error}", node=self.node
            ) from error


def first_sync_link(address: ServerAddress, timeout_s: float) -> SyncLink:
    """Return a connection to one of the address's nodes; its `address` names that one.

    Raises ConnectError if none answers. An error that is not transient is raised at once.
    """
    if not address.others:
        return SyncLink(address, timeout_s=timeout_s)
    race = _Race()
    try:
        return race.run(address, timeout_s)
    finally:
        race.end()


def refresh_map(cluster: ClusterMap, address: ServerAddress, timeout_s: float = 10.0) -> Topology:
    """Go by the map of the first node that answers, and return it. `address` has the credentials.

    The nodes that are named, and those of the newest map, are asked in turn. Raises what
    `first_sync_link` raises.
    """
    first, *others = cluster.to_ask()
    with first_sync_link(address.at(*first)._replace(others=tuple(others)), timeout_s) as link:
        cluster.adopt(link.topology(), is_last_resort=True)
    assert cluster.topology is not None
    return cluster.topology


def wait_until_ready(address: ServerAddress, timeout_s: float) -> None:
    """Return when the server, or one of several, accepts a login: the option --wait of dcpctl.

    A server that starts reads its data first, and then opens its ports. Until then connections are
    refused, so it tries again. Raises at once what cannot change by waiting (a wrong password, a
    port that speaks something else), and the last error when the time is over.
    """
    limit_s = max(WAIT_S, timeout_s)
    deadline_s = time.monotonic() + limit_s
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            first_sync_link(address, max(min(left_s, ATTEMPT_S), PAUSE_S)).close()
        except WrongProtocolError:
            raise
        except TRANSIENT as error:
            if left_s <= PAUSE_S:
                raise _not_ready(error, limit_s) from error
        else:
            return
        time.sleep(PAUSE_S)


def _not_ready(error: DcpdError, limit_s: float) -> DcpdError:
    """Return the last error with the time that was waited in its text; its class stays."""
    if not isinstance(error, OperationTimeoutError):
        error.what = f"{error.what}; the server was not ready within {limit_s:g} s"
    return error


class _Race:
    """Connects to several nodes. A blocking connection can wait for one node only, so each has a
    thread, which ends with the timeout, whatever the node does. A connection that is not returned
    is closed by its thread.
    """

    def __init__(self) -> None:
        self._ended: SimpleQueue[SyncLink | DcpdError] = SimpleQueue()
        self._lock = Lock()
        self._is_over = False

    def run(self, address: ServerAddress, timeout_s: float) -> SyncLink:
        deadline_s = time.monotonic() + timeout_s
        failure: DcpdError = OperationTimeoutError(
            f"none of the {len(address.places)} nodes answered within {timeout_s:g} s",
            node=address.node,
        )
        left, running = list(address.places), 0
        while left or running:
            now_s = time.monotonic()
            if left:
                self._start(address.at(*left.pop(0)), max(deadline_s - now_s, STAGGER_S))
                running += 1
            pause_s = STAGGER_S if left else max(0.0, deadline_s - now_s)
            try:
                ended = self._ended.get(timeout=pause_s)
            except Empty:
                if not left:
                    raise failure from None
                continue
            running -= 1
            if isinstance(ended, SyncLink):
                return ended
            if not isinstance(ended, TRANSIENT):
                raise ended
            failure = none_answered(ended, address.places)
        raise failure

    def end(self) -> None:
        """Close what has been connected. What is connected later is closed by its thread."""
        with self._lock:
            self._is_over = True
        while not self._ended.empty():
            ended = self._ended.get()
            if isinstance(ended, SyncLink):
                ended.close()

    def _start(self, address: ServerAddress, timeout_s: float) -> None:
        name = f"dcpd-dial-{address.port}"
        Thread(target=self._dial, args=(address, timeout_s), name=name, daemon=True).start()

    def _dial(self, address: ServerAddress, timeout_s: float) -> None:
        try:
            ended: SyncLink | DcpdError = SyncLink(address, timeout_s=timeout_s)
        except DcpdError as error:
            ended = error
        with self._lock:
            if not self._is_over:
                self._ended.put(ended)
            elif isinstance(ended, SyncLink):
                ended.close()


class MapFetches:
    """Asks nodes for the map in threads, beside a blocking client that waits for an answer.

        fetches.start(fetch)                     # a FetchMap of `clients.link.topology`
        for fetch, answer in fetches.take(wait_s): call.mapped(fetch, answer, now_s)

    A node that stands still must not keep the client from asking another one. So each request has a
    thread and a connection of its own. Both end with the time limit of the request. There are few
    of them: the map bounds how often a client asks.
    """

    def __init__(self, address: ServerAddress) -> None:
        self.running = 0
        """Requests whose end was not taken."""
        self._address = address
        self._ended: SimpleQueue[Answer] = SimpleQueue()

    def start(self, fetch: FetchMap) -> None:
        """Ask a node for its map."""
        self.running += 1
        name = f"dcpd-map-{fetch.node.kv_port}"
        Thread(target=self._run, args=(fetch,), name=name, daemon=True).start()

    def take(self, wait_s: float) -> list[Answer]:
        """Return the requests that have ended. If none has, wait for one, up to `wait_s`."""
        answers: list[Answer] = []
        while len(answers) < self.running:
            try:
                wait_now_s = 0.0 if answers else max(0.0, wait_s)
                answers.append(self._ended.get(timeout=wait_now_s))
            except Empty:
                break
        self.running -= len(answers)
        return answers

    def _run(self, fetch: FetchMap) -> None:
        self._ended.put((fetch, fetched(self._address, fetch)))


def fetched(address: ServerAddress, fetch: FetchMap) -> bytes | DcpdError:
    """Return the configuration of a node, b"" if it has none, over a new connection."""
    left_s = max(fetch.until_s - time.monotonic(), TIMEOUT_MIN_S)
    try:
        with SyncLink(address.at(*fetch.node.place), timeout_s=left_s) as link:
            link.set_deadline(fetch.until_s)
            return link.fetch_config()
    except DcpdError as error:
        return error
