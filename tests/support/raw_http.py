"""An HTTP client that sends chosen bytes, to test what an admin port refuses."""

from __future__ import annotations

import asyncio
import json
import ssl
from base64 import b64encode
from types import TracebackType
from typing import Any, NamedTuple

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
