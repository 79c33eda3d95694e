"""The requests of one DCP connection, and who takes the reply to each. Sans-IO.

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
        """The present time, set by a caller that has a clock and reads `oldest_ns`."""
        self._pending: dict[int, tuple[OnReply, int]] = {}
        """By opaque: the handler of the reply, and when the request was sent; the oldest first."""
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
        """Close a stream. It is no error if it has ended already."""
        close = Opcode.DCP_CLOSE_STREAM
        self.send(lambda opaque: pack_request(close, vb_id=vb_id, opaque=opaque), ignored)

    def forget(self, opaque: int) -> None:
        """Ignore the reply to a request."""
        self._pending.pop(opaque, None)

    def take(self, frame: Frame) -> bool:
        """Hand a reply to its handler, or answer a NOOP. Returns False for any other frame."""
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
        """When the oldest request was sent that has no reply yet."""
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
    """Take any reply; it does not matter."""
