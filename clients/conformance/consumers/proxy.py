"""A proxy between a consumer and a server: it notes what is said, and disturbs it on purpose.

    proxy = Proxy(server)
    proxy.add(Hold(MUTATION, after=2))      # the third one waits
    proxy.cut()                             # all connections

One thread for each direction of a connection reads packets and lets rules decide; the first rule
that takes a packet is the last. The configuration that a server sends names its own ports, also on
the admin port. The proxy puts its own in their place, so the consumer comes back through it.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from clients.conformance.packet import (
    DCP_STREAM_REQ,
    GET_CLUSTER_CONFIG,
    HEADER_BYTES,
    MARKER,
    NOT_MY_VBUCKET,
    SERVER_REQUEST,
    MalformedError,
    Packet,
    pack,
    take,
)
from clients.testing.process import DcpServer

READ_BYTES: Final = 1 << 16
NOTED_MAX: Final = 20_000
"""Packets that are kept for the report; of documents only the head is noted."""
SLOW_PIECE_S: Final = 0.02
_NOTED_BYTES_MAX: Final = 512
_LAST_DIGITS: Final = re.compile(rb"(?<!\d)\d{1,4}\Z")


class Noted(NamedTuple):
    """A packet that passed."""

    at_s: float
    """`time.monotonic`."""
    connection: int
    is_from_server: bool
    packet: Packet
    """Long values are cut off."""
    size: int
    """All its bytes."""


class Link:
    """One connection: the consumer's socket and the server's."""

    def __init__(self, number: int, consumer: socket.socket, server: socket.socket) -> None:
        self.number = number
        self._sockets = consumer, server
        self._locks = threading.Lock(), threading.Lock()

    def send(self, data: bytes, *, to_consumer: bool, bytes_per_s: float = 0) -> None:
        """Send, all at once or slowly. 1 byte a time if `bytes_per_s` is below 0."""
        side = 0 if to_consumer else 1
        with self._locks[side]:
            if not bytes_per_s:
                self._sockets[side].sendall(data)
                return
            step = 1 if bytes_per_s < 0 else max(1, int(bytes_per_s * SLOW_PIECE_S))
            for at in range(0, len(data), step):
                self._sockets[side].sendall(data[at : at + step])
                if bytes_per_s > 0:
                    time.sleep(SLOW_PIECE_S)
                elif at % 8 == 0:  # or the kernel joins what is sent at once
                    time.sleep(0.0001)

    def read(self, *, from_server: bool) -> bytes:
        """Return what comes next from one side; b"" at the end."""
        return self._sockets[1 if from_server else 0].recv(READ_BYTES)

    def close(self) -> None:
        """Cut the connection, both sides."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


class Passing(NamedTuple):
    """A packet on its way."""

    packet: Packet
    is_from_server: bool
    link: Link


Rule = Callable[[Passing], bytes | None]
"""Returns the bytes to send instead of a packet, b"" for none, or None: it is for another rule. A
rule may wait."""


class Hold:
    """A rule: from a message of this kind on that comes after so many of them (`vb_id`: in that
    partition), nothing goes to the consumer on that connection until `let_go`.
    """

    def __init__(self, opcode: int, vb_id: int | None = None, *, after: int = 0) -> None:
        self._opcode = opcode
        self._vb_id = vb_id
        self._after = after
        self._gone = threading.Event()
        self.holds = threading.Event()
        """Set when a packet is held."""

    def __call__(self, passing: Passing) -> None:
        """See Rule."""
        packet = passing.packet
        is_wanted = packet.opcode == self._opcode and self._vb_id in {None, packet.field}
        if passing.is_from_server and is_wanted and not self._gone.is_set():
            if self._after:
                self._after -= 1
                return
            self.holds.set()
            self._gone.wait()

    def let_go(self) -> None:
        """Let everything pass from now on."""
        self._gone.set()


class CutAt:
    """A rule: cut the connection after so many bytes of a snapshot marker, once for each count."""

    def __init__(self, counts: list[int]) -> None:
        self.left = counts

    def __call__(self, passing: Passing) -> bytes | None:
        """See Rule."""
        packet, is_from_server, link = passing
        if not (is_from_server and packet.opcode == MARKER and self.left):
            return None
        link.send(pack(packet)[: self.left.pop(0)], to_consumer=True)
        link.close()
        return b""


class Proxy:
    """See the module. A context manager; `port` is where the consumer connects."""

    def __init__(self, server: DcpServer) -> None:
        self._server = server
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.port, self.admin_port = (each.getsockname()[1] for each in self._listeners)
        self.rules: tuple[Rule, ...] = ()
        self.refuses = False
        """Whether new connections are closed at once."""
        self.bytes_per_s = 0.0
        """The rate to the consumer; 0: no limit, below 0: byte by byte."""
        self.noted: deque[Noted] = deque(maxlen=NOTED_MAX)
        self._links: dict[int, Link] = {}
        self._opened = 0
        self._is_closed = False
        for listener, carry in zip(self._listeners, (self._pass_on, self._pass_http), strict=True):
            threading.Thread(target=self._accept, args=(listener, carry), daemon=True).start()

    def __enter__(self) -> Proxy:
        """It listens since it was made."""
        return self

    def __exit__(self, *_: object) -> None:
        """See `close`."""
        self.close()

    def close(self) -> None:
        """Stop, and cut all connections."""
        self._is_closed = True
        for listener in self._listeners:
            with suppress(OSError):  # wakes the thread that waits in accept: it holds the port
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for rule in self.rules:
            if isinstance(rule, Hold):
                rule.let_go()
        self.cut()

    def add(self, rule: Rule) -> None:
        """Let a rule decide before those that there are."""
        self.rules = (rule, *self.rules)

    def cut(self) -> int:
        """Cut all connections; return how many there were."""
        links = list(self._links.values())
        for link in links:
            link.close()
        return len(links)

    def links(self) -> list[Link]:
        """Return the connections that there are."""
        return list(self._links.values())

    def _accept(self, listener: socket.socket, carry: Callable[[Link, bool], None]) -> None:
        while not self._is_closed:
            try:
                consumer, _ = listener.accept()
            except OSError:
                return
            if self.refuses:
                consumer.close()
                continue
            is_admin = listener is self._listeners[1]
            port = self._server.admin_port if is_admin else self._server.port
            try:
                server = socket.create_connection(("127.0.0.1", port), 5)
            except OSError:
                consumer.close()
                continue
            server.settimeout(None)
            for each in (consumer, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._opened += 1
            link = self._links[self._opened] = Link(self._opened, consumer, server)
            for is_from_server in (False, True):
                threading.Thread(target=carry, args=(link, is_from_server), daemon=True).start()

    def _pass_http(self, link: Link, is_from_server: bool) -> None:
        """Carry one direction of a connection to the admin port until it ends.

        Lengths stay right: the kernel's free ports have five digits each.
        """
        held = b""
        try:
            while piece := link.read(from_server=is_from_server):
                data, held = held + piece, b""
                if is_from_server:
                    data = self._with_own_port(data)
                    if last := _LAST_DIGITS.search(data):  # the rest of a port may follow
                        held = last[0]
                        data = data[: last.start()]
                link.send(data, to_consumer=is_from_server)
            link.send(held, to_consumer=is_from_server)
        except OSError:
            pass  # either side has closed
        finally:
            link.close()
            self._links.pop(link.number, None)

    def _pass_on(self, link: Link, is_from_server: bool) -> None:
        """Carry one direction of a connection until it ends."""
        data = bytearray()
        try:
            while piece := link.read(from_server=is_from_server):
                data += piece
                out = bytearray()
                while raw := _first_packet(data):
                    found = take(raw)
                    assert found is not None, "it is whole"
                    out += self._decided(found[0], raw, is_from_server, link)
                    if is_from_server or len(out) > READ_BYTES:
                        self._send(link, out, is_from_server)
                self._send(link, out, is_from_server)
        except (OSError, MalformedError):
            pass  # either side has closed, or says what is no packet
        finally:
            link.close()
            self._links.pop(link.number, None)

    def _send(self, link: Link, out: bytearray, is_from_server: bool) -> None:
        if out:
            rate = self.bytes_per_s if is_from_server else 0
            link.send(bytes(out), to_consumer=is_from_server, bytes_per_s=rate)
            out.clear()

    def _decided(self, packet: Packet, raw: bytes, is_from_server: bool, link: Link) -> bytes:
        if is_from_server and _names_ports(packet):
            packet = packet._replace(value=self._with_own_port(packet.value))
            raw = pack(packet)
        noted = packet
        if len(packet.value) > _NOTED_BYTES_MAX and packet.opcode != DCP_STREAM_REQ:
            noted = packet._replace(value=packet.value[:_NOTED_BYTES_MAX])
        self.noted.append(Noted(time.monotonic(), link.number, is_from_server, noted, len(raw)))
        for rule in self.rules:
            decided = rule(Passing(packet, is_from_server, link))
            if decided is not None:
                return decided
        return raw

    def _with_own_port(self, config: bytes) -> bytes:
        server = self._server
        for old, own in ((server.port, self.port), (server.admin_port, self.admin_port)):
            config = re.sub(rb"(?<!\d)%d(?!\d)" % old, b"%d" % own, config)
        return config


def _first_packet(data: bytearray) -> bytes:
    """Cut the first packet off what came, and return it; b"" if it is not whole."""
    size = HEADER_BYTES + int.from_bytes(data[8:12], "big")
    if len(data) < HEADER_BYTES or len(data) < size:
        return b""
    raw = bytes(data[:size])
    del data[:size]
    return raw


def _names_ports(packet: Packet) -> bool:
    """Whether a packet may bring a configuration."""
    if packet.is_request:
        return packet.magic == SERVER_REQUEST
    return packet.opcode == GET_CLUSTER_CONFIG or packet.field == NOT_MY_VBUCKET
