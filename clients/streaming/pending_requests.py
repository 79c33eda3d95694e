"""The pending requests of one DCP connection, with a handler for each reply. Sans-IO.

    requests = PendingRequests(node)
    requests.open(b"name", OpenFlag.PRODUCER, [(b"enable_noop", b"true")])
    opaque = requests.send(lambda opaque: pack_request(..., opaque=opaque), on_reply)
    send(requests.take_output())
    for frame in received:
        if not requests.take(frame): ...          # a message of a stream

Invariant: each request has its own opaque and one handler, which is called once. The reply to a
forgotten request is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from clients.errors import error_from_status
from dcp.wire.frame import Frame, pack_request, pack_response
from dcp.wire.message import pack_control, pack_open
from dcp.wire.opcode import Magic, Opcode

OnReply = Callable[[Frame], None]


class PendingRequests:
    """See the module. One per connection."""

    def __init__(self, node: str | None) -> None:
        self.node = node
        self.now_ns = 0
        """The current time. Callers that use `oldest_ns` set it."""
        self._pending: dict[int, tuple[OnReply, int]] = {}
        """Opaque -> (handler of the reply, time of the request), oldest first."""
        self._output: list[bytes] = []
        self._next_opaque = 1

    def take_output(self) -> bytes:
        """Return the bytes to send, each once."""
        output, self._output = self._output, []
        return b"".join(output)

    def write(self, packet: bytes) -> None:
        """Send a packet that has no reply."""
        self._output.append(packet)

    def send(self, pack: Callable[[int], bytes], on_reply: OnReply) -> int:
        """Send the request that `pack` makes from an opaque; return the opaque."""
        opaque = self._next_opaque
        self._next_opaque = opaque % 0xFFFF_FFFF + 1
        self._pending[opaque] = on_reply, self.now_ns
        self._output.append(pack(opaque))
        return opaque

    def open(self, name: bytes, flags: int, controls: Iterable[tuple[bytes, bytes]]) -> None:
        """Send DCP_OPEN and controls; it is an error if the server refuses one of them."""
        self.send(lambda opaque: pack_open(name, flags, opaque), self.accepted("DCP_OPEN"))
        for key, value in controls:
            self.control(key, value, self.accepted(f"DCP_CONTROL {key.decode()}"))

    def control(self, key: bytes, value: bytes, on_reply: OnReply) -> None:
        """Send DCP_CONTROL."""
        self.send(lambda opaque: pack_control(key, value, opaque), on_reply)

    def close_stream(self, vb_id: int) -> None:
        """Close a stream. It may already have ended."""
        close = Opcode.DCP_CLOSE_STREAM
        self.send(lambda opaque: pack_request(close, vb_id=vb_id, opaque=opaque), ignored)

    def forget(self, opaque: int) -> None:
        """Ignore the reply to a request."""
        self._pending.pop(opaque, None)

    def take(self, frame: Frame) -> bool:
        """Pass a reply to its handler, or answer a NOOP. Return False for any other frame."""
        if frame.magic == Magic.RESPONSE:
            on_reply, _ = self._pending.pop(frame.opaque, (ignored, 0))
            on_reply(frame)
            return True
        if frame.opcode == Opcode.DCP_NOOP:
            self._output.append(pack_response(Opcode.DCP_NOOP, opaque=frame.opaque))
            return True
        return False

    @property
    def oldest_ns(self) -> int | None:
        """The time of the oldest request without a reply."""
        return next((sent_ns for _, sent_ns in self._pending.values()), None)

    def accepted(self, operation: str) -> OnReply:
        """Return a handler that raises a StatusError for any status but OK."""
        return lambda frame: self.check(frame, operation)

    def check(self, frame: Frame, operation: str, vb_id: int | None = None) -> None:
        """Raise a StatusError if a reply has another status than OK."""
        if frame.status:
            raise error_from_status(
                frame.status, operation, body=frame.value, vb_id=vb_id, node=self.node
            )


def ignored(_frame: Frame) -> None:
    """Ignore a reply."""
