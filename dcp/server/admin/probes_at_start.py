"""The admin port of a member while it recovers its folder: it answers probes, and nothing else.

    GET /livez     200: the process answers
    GET /readyz    503: the node starts
    others         503, with a reason and Retry-After

Recovery may take minutes, and an orchestrator that gets no answer would kill the node again and
again. The same listening socket goes to the admin interface afterwards, so no connection is lost.

Invariants
- one request for each connection, CONNECTIONS_MAX connections at a time, REQUEST_S each;
- nothing of a request but its path counts, and nothing of the node is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from http import HTTPStatus
from typing import Final, Self

import msgspec

from dcp.server.admin.answers import JSON_TYPE, PROBLEM_TYPE, problem
from dcp.server.admin.bodies import HealthAnswer
from dcp.server.admin.port import HEADER_BYTES_MAX, listen

CONNECTIONS_MAX: Final = 64
"""Orchestrators need a handful."""
REQUEST_S: Final = 5.0
RETRY_AFTER_S: Final = 1


class ProbesAtStart:
    """See the module. `async with` encloses a start."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._listener: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Listen, and answer from now on. Raises OSError."""
        self._listener = listen(self._host, self._port)
        self._server = await asyncio.start_server(
            self._answer, sock=self._listener.dup(), limit=HEADER_BYTES_MAX
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Give the port up, unless somebody has it now."""
        await self._stop()
        if self._listener is not None:
            self._listener.close()

    async def hand_over(self) -> socket.socket:
        """Answer no more, and return the socket. Connections that wait in the kernel are for who
        accepts next.
        """
        await self._stop()
        listener, self._listener = self._listener, None
        assert listener is not None, "it was not handed over before"
        return listener

    async def _stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        if server is not None:
            await server.wait_closed()  # newer Pythons wait for its connections, too

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._answering) >= CONNECTIONS_MAX:
            writer.close()
            return
        self._answering.add(task)
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(answer_to(head))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # it asked nothing, or is gone
        finally:
            self._answering.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def answer_to(head: bytes) -> bytes:
    """Return the response to a request; `head` is its line and headers."""
    line = head.split(b"\r\n", 1)[0].decode("ascii", "replace").split(" ")
    path = line[1].partition("?")[0] if len(line) > 1 else ""
    status, kind = HTTPStatus.SERVICE_UNAVAILABLE, JSON_TYPE
    if path == "/livez":
        status, body = HTTPStatus.OK, msgspec.json.encode(HealthAnswer("ok"))
    elif path == "/readyz":
        body = msgspec.json.encode(HealthAnswer("not ready", "starting"))
    else:
        kind = PROBLEM_TYPE
        body = problem(
            status, "the request was not carried out",
            "this node of a cluster starts, and reads its data folder", "Try again in a second",
        )  # fmt: skip
    headers = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"content-type: {kind}",
        f"content-length: {len(body)}",
        f"retry-after: {RETRY_AFTER_S}",
        "connection: close",
    )
    return "\r\n".join(headers).encode() + b"\r\n\r\n" + (b"" if line[0] == "HEAD" else body)
