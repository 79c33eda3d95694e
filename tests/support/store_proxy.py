"""A TCP proxy that can swallow what a client sends, or what a server answers."""

from __future__ import annotations

import asyncio


class StoreProxy:
    """Forwards connections to a port. `swallow_*` drops bytes and keeps the connections."""

    def __init__(self, port: int) -> None:
        self.swallow_requests = False
        self.swallow_answers = False
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Cut all connections."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _connected(self, reader, writer) -> None:
        self._tasks.add(asyncio.current_task())
        self._writers.append(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers.append(far_writer)
        try:
            await asyncio.gather(
                self._forward(reader, far_writer, lambda: self.swallow_requests),
                self._forward(far_reader, writer, lambda: self.swallow_answers),
            )
        finally:
            writer.transport.abort()
            far_writer.transport.abort()

    async def _forward(self, reader, writer, is_swallowed) -> None:
        try:
            while data := await reader.read(65536):
                if not is_swallowed():
                    writer.write(data)
                    await writer.drain()
        except OSError:
            pass
        writer.transport.abort()
