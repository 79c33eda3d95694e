"""A whole node in this process, with its sockets, and clients that send chosen requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

from dcp.server.access.users import USERS_FILE, Users
from dcp.server.config.settings import Settings
from dcp.server.node import ROOM_RETRY_S, Node
from dcp.server.observe.event_log import EventLog
from dcp.session.access.rights import FULL_RIGHTS
from dcp.wire.frame import Frame, FrameDecoder, pack_request
from dcp.wire.opcode import Opcode

TIMEOUT_S = 20.0


@contextlib.asynccontextmanager
async def node_here(
    folder: Path,
    users: dict[str, str],
    *,
    room_retry_s: float = ROOM_RETRY_S,
    **settings: Any,
) -> AsyncIterator[Node]:
    """Run a node with these users (name -> password); it is stopped afterwards."""
    data = folder / "data"
    table = Users(data / USERS_FILE, iterations=4096)
    # The pager writes too, which would disturb the test.
    chosen = {"data": data, "port": 0, "admin_port": 0, "expiry_interval_s": 0, **settings}
    chosen_settings = msgspec.structs.replace(Settings(), **chosen)
    log = EventLog(logging.getLogger("test"))
    node = Node(chosen_settings, table, log, room_retry_s=room_retry_s)
    await node.start()
    try:
        for name, password in users.items():
            table.add(name, password, FULL_RIGHTS)
        yield node
    finally:
        await node.stop()


async def until(is_so: Callable[[], object]) -> None:
    """Return once a condition holds that no event reports."""
    async with asyncio.timeout(TIMEOUT_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0)


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._decoder = FrameDecoder()
        self._frames: list[Frame] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, node: Node, *, host: str = "127.0.0.1") -> AsyncIterator[Client]:
        """Connect from an address of this machine; 127.0.0.2 and so on are others."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", node.ports.kv, local_addr=(host, 0)
        )
        try:
            yield cls(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def send(self, *packets: bytes) -> None:
        self.writer.write(b"".join(packets))

    async def receive(self) -> Frame | None:
        """Return the next frame, None if the server has closed."""
        async with asyncio.timeout(TIMEOUT_S):
            while not self._frames:
                try:
                    data = await self.reader.read(1 << 16)
                except ConnectionResetError:
                    return None
                if not data:
                    return None
                self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    async def ask(self, packet: bytes) -> Frame:
        """Send one request and return its one answer."""
        self.send(packet)
        frame = await self.receive()
        assert frame is not None, "the server has closed"
        return frame


def plain(user: str, password: str, *, opaque: int = 0) -> bytes:
    """Return a login."""
    value = f"\0{user}\0{password}".encode()
    return pack_request(Opcode.SASL_AUTH, key=b"PLAIN", value=value, opaque=opaque)
