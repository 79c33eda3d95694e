"""A blocking client that sends chosen bytes, to test what a server refuses."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from types import TracebackType

from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, FrameDecoder, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

TIMEOUT_S = 20.0


class RawClient:
    """One connection; a context manager. Errors come with their context."""

    def __init__(
        self, port: int, user: str = "", password: str = "", from_host: str = "127.0.0.1"
    ) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S, (from_host, 0))
        self._decoder = FrameDecoder()
        self._frames: list[Frame] = []
        try:
            self.ask(Opcode.HELLO, value=Feature.XERROR.to_bytes(2, "big"))
            if user:
                assert self.log_in(user, password).status == Status.OK
                assert self.ask(Opcode.SELECT_BUCKET, key=b"default").status == Status.OK
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def hang_up(self) -> None:
        """Cut the connection, from any thread: callers that wait for an answer get none."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self) -> Frame | None:
        """Return the next frame, None if the server has closed."""
        while not self._frames:
            try:
                data = self._socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    def has_answer(self) -> bool:
        """Whether the next frame, or a part of it, has arrived."""
        return bool(self._frames or select.select([self._socket], [], [], 0)[0])

    def ask(self, opcode: int, **parts: int | bytes) -> Frame:
        """Send one request and return its one answer."""
        self.send(pack_request(opcode, **parts))  # type: ignore[arg-type]
        frame = self.receive()
        assert frame is not None, "the server has closed"
        return frame

    def log_in(self, user: str, password: str) -> Frame:
        return self.ask(Opcode.SASL_AUTH, key=b"PLAIN", value=f"\0{user}\0{password}".encode())

    def set(self, key: bytes, value: bytes = b"v") -> Frame:
        return self.ask(Opcode.SET, key=key, extras=bytes(8), value=value, vb_id=0)

    def is_closed(self) -> bool:
        """Wait for the server to close; anything it still sends is an error."""
        return self.receive() is None


def context_of(frame: Frame) -> str:
    """Return the text of an error response."""
    assert frame.status, "not an error"
    text: str = json.loads(frame.value)["error"]["context"]
    return text
