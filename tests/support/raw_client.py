"""Clients that send chosen bytes, to test what a server and its admin port (HTTP) refuse."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import ssl
from base64 import b64encode
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NamedTuple

from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, FrameDecoder, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.model.ids import vbucket_of

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


GIVE_UP_S = 20.0
"""Limit of a wait, so that a failure does not hang."""


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: Any
    """The JSON document, if it is JSON."""

    @property
    def what(self) -> str:
        """The text of an error document."""
        return str(self.body["error"]["what"])


def login(user: str = "guest", password: str = "guest") -> str:
    return "authorization: Basic " + b64encode(f"{user}:{password}".encode()).decode()


def request(method: str, path: str, *headers: str, host: str | None = "localhost") -> bytes:
    """Return the header of a request."""
    lines = [f"{method} {path} HTTP/1.1", *(() if host is None else (f"host: {host}",)), *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class RawHttp:
    """One connection; an asynchronous context manager."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(
        cls, port: int, from_host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
    ) -> RawHttp:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, local_addr=(from_host, 0), ssl=tls
        )
        return cls(reader, writer)

    async def __aenter__(self) -> RawHttp:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.writer.transport.abort()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> Answer:
        """Return the next answer, which has a content-length."""
        async with asyncio.timeout(GIVE_UP_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
            headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in head[1:] if line)
            }
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        is_json = headers.get("content-type", "").endswith("json")
        return Answer(int(head[0].split()[1]), headers, json.loads(body) if is_json else body)

    async def ask(self, method: str, path: str, *headers: str, body: bytes = b"") -> Answer:
        """Send a whole request and return its answer."""
        if body:
            headers = (*headers, f"content-length: {len(body)}")
        await self.send(request(method, path, *headers) + body)
        return await self.answer()

    async def rest(self) -> bytes:
        """Return everything until the server closes."""
        found = b""
        async with asyncio.timeout(GIVE_UP_S):
            try:
                while data := await self.reader.read(1 << 16):
                    found += data
            except ConnectionResetError:
                pass  # the server had not read everything that we sent
        return found


async def ask(
    port: int,
    method: str,
    path: str,
    *headers: str,
    from_host: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
    host: str | None = "localhost",
    body: bytes = b"",
) -> Answer:
    """Send one request on its own connection."""
    async with await RawHttp.open(port, from_host, tls) as connection:
        if body:
            headers = (*headers, f"content-length: {len(body)}")
        await connection.send(request(method, path, *headers, host=host) + body)
        return await connection.answer()


def set_all(port: int, documents: Iterable[tuple[bytes, bytes]], partitions: int) -> None:
    """Set documents, and return when all are answered for."""
    with RawClient(port) as client:
        client.send(
            b"".join(
                pack_request(
                    Opcode.SETQ, key=key, value=value, extras=bytes(8),
                    vb_id=vbucket_of(key, partitions),
                )
                for key, value in documents
            )
        )  # fmt: skip
        assert client.ask(Opcode.NOOP).status == Status.OK
