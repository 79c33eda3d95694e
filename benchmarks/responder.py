"""A server that does nothing but answer. It shows how fast the generator itself can be.

    python -m benchmarks.responder          prints the port it listens on

It understands just enough of both protocols to count operations, and sends prepared answers.
`--wrong-every N` makes each N-th answer an error, to test that the generator notices.
"""

from __future__ import annotations

import argparse
import selectors
import socket
import sys
from typing import Final

from benchmarks import workload

RESP_LINES: Final = workload.resp_set(b"k", b"v").count(b"\n")  # lines of one operation's request
SET_OK: Final = workload.HEADER.pack(0x81, workload.OP_SET, 0, 16, 0, 0, 16, 0, 1) + bytes(16)
SET_WRONG: Final = workload.HEADER.pack(0x81, workload.OP_SET, 0, 0, 0, 0x86, 4, 0, 0) + b"busy"
RESP_OK: Final = b"+OK\r\n$15\r\n1700000000000-0\r\n"
RESP_WRONG: Final = b"-OOM command not allowed\r\n$15\r\n1700000000000-0\r\n"


ANSWERS: Final = ("dcpd", "redis")
"""The server whose protocol it understands."""


class Peer:
    """One connection; `operation_bytes` is 0 until its first SET shows the length."""

    def __init__(self, connection: socket.socket, wrong_every: int) -> None:
        self.socket = connection
        self.unsent = b""
        self._wrong_every = wrong_every
        self._answered = 0
        self._operation_bytes = 0
        self._rest = b""  # before the first SET
        self._pending = 0  # bytes or lines after it, not yet a whole operation
        self._is_resp = False

    def answer(self, chunk: bytes) -> bytes:
        """Return the answers to received bytes."""
        if self._is_resp or (not self._operation_bytes and chunk[:1] == b"*"):
            self._is_resp = True
            done, self._pending = divmod(self._pending + chunk.count(b"\n"), RESP_LINES)
            return self._answers(done, RESP_OK, RESP_WRONG)
        answers = b""
        if not self._operation_bytes:
            answers, chunk = self._session(self._rest + chunk)
            if not self._operation_bytes:
                self._rest = chunk
                return answers
        done, self._pending = divmod(self._pending + len(chunk), self._operation_bytes)
        return answers + self._answers(done, SET_OK, SET_WRONG)

    def _session(self, buffer: bytes) -> tuple[bytes, bytes]:
        """Answer the opening of a session; return the answers, and the bytes from the first SET."""
        answers = b""
        while len(buffer) >= 24:
            end = 24 + int.from_bytes(buffer[8:12], "big")
            if buffer[1] == workload.OP_SET:
                self._operation_bytes = end
                break
            if end > len(buffer):
                break
            is_hello = buffer[1] == workload.OP_HELLO
            value = buffer[24 + int.from_bytes(buffer[2:4], "big") : end] if is_hello else b""
            head = workload.HEADER.pack(0x81, buffer[1], 0, 0, 0, 0, len(value), 0, 0)
            answers += head + value
            buffer = buffer[end:]
        return answers, buffer

    def _answers(self, count: int, right: bytes, wrong: bytes) -> bytes:
        before, self._answered = self._answered, self._answered + count
        if not self._wrong_every:
            return right * count
        return b"".join(
            right if n % self._wrong_every else wrong for n in range(before + 1, before + count + 1)
        )


def serve(listener: socket.socket, wrong_every: int = 0) -> None:
    """Answer until the last connection has closed (it serves one run of the generator)."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, None)
    peers = 0
    seen_one = False
    while peers or not seen_one:
        for key, _ in selector.select():
            if key.data is None:
                connection, _ = listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(connection, selectors.EVENT_READ, Peer(connection, wrong_every))
                peers, seen_one = peers + 1, True
            elif not _serve_one(key.data):
                selector.unregister(key.data.socket)
                key.data.socket.close()
                peers -= 1
    selector.close()
    listener.close()


def _serve_one(peer: Peer) -> bool:
    """Answer what one peer sent; False if it has closed."""
    try:
        chunk = peer.socket.recv(256 * 1024)
        if chunk:
            peer.socket.sendall(peer.answer(chunk))
    except ConnectionError:
        return False
    return bool(chunk)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.responder", description=__doc__)
    parser.add_argument("--wrong-every", type=int, default=0)
    arguments = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    serve(listener, arguments.wrong_every)
    return 0


if __name__ == "__main__":
    sys.exit(main())
