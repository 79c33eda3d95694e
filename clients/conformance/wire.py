"""One connection to the judged server: it sends, expects and records. Every wait has a deadline.

A server that says nothing, closes, or sends what is no packet raises `WireError`; a check that does
not catch it fails with the reason.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from struct import pack as struct_pack
from typing import Final, NamedTuple

from clients.conformance import packet as p
from clients.conformance.packet import MalformedError, Packet

RECEIVED_BYTES: Final = 1 << 16
EXCHANGE_PACKETS_MAX: Final = 2_000
"""Packets that an exchange keeps, the last ones."""
PENDING_PACKETS_MAX: Final = 100_000
"""More packets that nobody asked for are a flood."""
SEQNO_MAX: Final = (1 << 64) - 1


class WireError(Exception):
    """The connection has no more to say. The text says why."""


class SilenceError(WireError):
    """Nothing came within the deadline."""


class ClosedError(WireError):
    """The server closed the connection."""


class Exchange:
    """What a check and the server said to each other, on all its connections."""

    def __init__(self) -> None:
        self._packets: deque[tuple[int, str, Packet | str]] = deque(maxlen=EXCHANGE_PACKETS_MAX)
        self._connections = 0

    def connect(self) -> int:
        """Return the number of a new connection."""
        self._connections += 1
        return self._connections

    def note(self, connection: int, arrow: str, what: Packet | str) -> None:
        """Add what was sent (">"), was received ("<") or happened ("-")."""
        self._packets.append((connection, arrow, what))

    def lines(self) -> Iterator[str]:
        """Yield the exchange, decoded. A login's value is left out."""
        for connection, arrow, what in self._packets:
            if isinstance(what, Packet) and what.opcode == p.SASL_AUTH and what.is_request:
                shown = str(what._replace(value=b"")) + ", value not shown"
            else:
                shown = str(what)
            yield f"{connection} {arrow} {shown}"


class Stream(NamedTuple):
    """An answered stream request: the answer, and the opaque of all messages."""

    answer: Packet
    opaque: int

    @property
    def log(self) -> list[tuple[int, int]]:
        """The failover log of the answer: (uuid, seqno), as it came. Raises MalformedError."""
        return failover_log(self.answer)


def failover_log(answer: Packet) -> list[tuple[int, int]]:
    """Return the (uuid, seqno) of an answer. Raises MalformedError."""
    if len(answer.value) % 16:
        raise MalformedError(f"a failover log has {len(answer.value)} bytes, no multiple of 16")
    entries = (answer.value[at : at + 16] for at in range(0, len(answer.value), 16))
    return [(int.from_bytes(each[:8], "big"), int.from_bytes(each[8:], "big")) for each in entries]


class Wire:
    """One connection. A request's opaque is its number, so each answer finds its request."""

    def __init__(self, connected: socket.socket, timeout_s: float, exchange: Exchange) -> None:
        self.timeout_s = timeout_s
        self.answers_noops = True
        """Whether DCP_NOOP is answered, as a consumer should."""
        self.features: frozenset[int] = frozenset()
        """What HELLO granted."""
        self._socket = connected
        self._exchange = exchange
        self._number = exchange.connect()
        self._buffer = bytearray()
        self._pending: deque[Packet] = deque()
        self._opaque = 0x1000 * self._number

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    # -- sending ---------------------------------------------------------------------------------

    def send(self, opcode: int, vb_id: int = 0, **parts: int | bytes) -> int:
        """Send a request; return its opaque. `parts` are fields of a Packet."""
        self._opaque += 1
        fields = {"magic": p.REQUEST, "field": vb_id, "opaque": self._opaque, **parts}
        if fields.get("framing"):
            fields["magic"] = p.FLEX_REQUEST
        request = Packet(opcode=opcode, **fields)  # type: ignore[arg-type]
        self._exchange.note(self._number, ">", request)
        self._write(p.pack(request))
        return request.opaque

    def answer(self, request: Packet, status: int = p.OK) -> None:
        """Answer a request of the server."""
        response = Packet(p.RESPONSE, request.opcode, status, request.opaque)
        self._exchange.note(self._number, ">", response)
        self._write(p.pack(response))

    def send_bytes(self, data: bytes) -> None:
        """Send bytes that need not be a packet."""
        self._exchange.note(self._number, ">", f"bytes {p.shown(data, as_hex=True)}")
        self._write(data)

    def _write(self, data: bytes) -> None:
        self._socket.settimeout(self.timeout_s)
        try:
            self._socket.sendall(data)
        except TimeoutError:
            raise self._ended(SilenceError("the server does not read what is sent")) from None
        except OSError as error:
            raise self._ended(ClosedError(f"the connection broke: {error}")) from None

    # -- receiving -------------------------------------------------------------------------------

    def receive(self, timeout_s: float | None = None) -> Packet:
        """Return the next packet from the socket. NOOPs are answered, and returned, too.

        Raises SilenceError, ClosedError, MalformedError.
        """
        deadline_s = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        while True:
            try:
                taken = p.take(self._buffer)
            except MalformedError as error:
                self._exchange.note(self._number, "-", str(error))
                raise
            if taken is not None:
                break
            self._fill(deadline_s)
        packet, size = taken
        del self._buffer[:size]
        self._exchange.note(self._number, "<", packet)
        if packet.opcode == p.DCP_NOOP and packet.is_request and self.answers_noops:
            self.answer(packet)
        return packet

    def _fill(self, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise self._ended(SilenceError(self._silence()))
        self._socket.settimeout(left_s)
        try:
            data = self._socket.recv(RECEIVED_BYTES)
        except TimeoutError:
            raise self._ended(SilenceError(self._silence())) from None
        except OSError as error:
            raise self._ended(ClosedError(f"the connection broke: {error}")) from None
        if not data:
            half = f" after {len(self._buffer)} bytes of a packet" if self._buffer else ""
            raise self._ended(ClosedError(f"the server closed the connection{half}"))
        self._buffer += data

    def _silence(self) -> str:
        half = f" but {len(self._buffer)} bytes of a packet" if self._buffer else ""
        return f"nothing came in time{half}"

    def _ended(self, error: WireError) -> WireError:
        self._exchange.note(self._number, "-", str(error))
        return error

    def expect(self, opaque: int) -> Packet:
        """Return the answer with an opaque. What else comes meanwhile stays for `message`."""
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            packet = self.receive(max(0.0, deadline_s - time.monotonic()))
            if not packet.is_request and packet.opaque == opaque:
                return packet
            self._keep(packet)

    def _keep(self, packet: Packet) -> None:
        self._pending.append(packet)
        if len(self._pending) > PENDING_PACKETS_MAX:
            raise self._ended(WireError(f"{PENDING_PACKETS_MAX:,} packets came unasked"))

    def ask(self, opcode: int, vb_id: int = 0, **parts: int | bytes) -> Packet:
        """Send a request and return its answer."""
        return self.expect(self.send(opcode, vb_id, **parts))

    def message(self, timeout_s: float | None = None) -> Packet:
        """Return the next packet that was not yet returned, except NOOPs."""
        deadline_s = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        while True:
            if self._pending:
                packet = self._pending.popleft()
            else:
                packet = self.receive(max(0.0, deadline_s - time.monotonic()))
            if packet.opcode != p.DCP_NOOP:
                return packet

    def messages(self, until: Callable[[Packet], bool]) -> list[Packet]:
        """Return the next messages, up to the first for which `until` holds, with it."""
        found = [self.message()]
        deadline_s = time.monotonic() + self.timeout_s
        while not until(found[-1]):
            found.append(self.message(max(0.0, deadline_s - time.monotonic())))
            if len(found) > PENDING_PACKETS_MAX:
                raise self._ended(WireError(f"{PENDING_PACKETS_MAX:,} messages and no end"))
        return found

    def messages_for(self, time_s: float) -> list[Packet]:
        """Return the messages that come within a time."""
        found: list[Packet] = []
        deadline_s = time.monotonic() + time_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                found.append(self.message(left_s))
            except SilenceError:
                break
        return found

    def is_closed(self, timeout_s: float | None = None) -> bool:
        """Whether the server closes within the deadline, whatever it sends before."""
        try:
            deadline_s = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
            while True:
                self.receive(max(0.0, deadline_s - time.monotonic()))
        except ClosedError:
            return True
        except SilenceError:
            return False

    # -- what every consumer sends ---------------------------------------------------------------

    def hello(self, features: Sequence[int], agent: bytes = b"conformance") -> Packet:
        """Negotiate features."""
        value = struct_pack(f">{len(features)}H", *features)
        answer = self.ask(p.HELLO, key=agent, value=value)
        pairs = range(0, len(answer.value) - 1, 2)
        self.features = frozenset(int.from_bytes(answer.value[at : at + 2], "big") for at in pairs)
        return answer

    def control(self, key: str, value: str) -> Packet:
        """Set a property of a DCP connection."""
        return self.ask(p.CONTROL, key=key.encode(), value=value.encode())

    def open(self, name: str, flags: int = 1, **parts: int | bytes) -> Packet:
        """Make the connection a DCP connection."""
        parts = {"key": name.encode(), "extras": struct_pack(">II", 0, flags), **parts}
        return self.expect(self.send(p.DCP_OPEN, 0, **parts))

    def stream(
        self,
        vb_id: int,
        start: int = 0,
        end: int = SEQNO_MAX,
        uuid: int = 0,
        snapshot: tuple[int, int] | None = None,
        flags: int = 0,
        value: bytes = b"",
    ) -> Stream:
        """Ask for a stream; without a snapshot, a complete one that ended at `start` is named."""
        bounds = (start, start) if snapshot is None else snapshot
        extras = struct_pack(">II5Q", flags, 0, start, end, uuid, *bounds)
        opaque = self.send(p.DCP_STREAM_REQ, vb_id, extras=extras, value=value)
        return Stream(self.expect(opaque), opaque)


def connect(
    host: str, port: int, timeout_s: float, exchange: Exchange, tls: ssl.SSLContext | None = None
) -> Wire:
    """Connect. Raises WireError."""
    deadline_s = time.monotonic() + timeout_s
    try:
        connected = socket.create_connection((host, port), timeout_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            connected.settimeout(max(0.01, deadline_s - time.monotonic()))
            connected = tls.wrap_socket(connected, server_hostname=host)
    except OSError as error:
        raise WireError(f"cannot connect to {host}:{port}: {error}") from None
    return Wire(connected, timeout_s, exchange)
