"""An embedded metadata store in this process, with clients over loopback, for synchronous tests.

    python -m support.embedded_store FOLDER PORT

owns one until it is killed, and prints a line when it listens.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

from failover.metadata.embedded.client import EmbeddedClient
from failover.metadata.embedded.server import EmbeddedServer
from failover.metadata.keyring import Keyring


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


KEYRING = Keyring(["s" * 32])
WAIT_S = 30
"""How long anything may take on a busy machine."""
UNKNOWN_DEADLINE_S = 0.3


class LoopHarness:
    """A loop of its own that `wait` runs."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.loop = self.runner.get_loop()
        self.clients: list = []
        self.proxies: list[StoreProxy] = []
        self.notices: list[str] = []
        self.prefixes = 0

    def new_prefix(self) -> bytes:
        self.prefixes += 1
        return b"/%d/" % self.prefixes

    def run(self, work):
        async def bounded():
            async with asyncio.timeout(WAIT_S):
                return await work

        return self.runner.run(bounded())

    def wait(self, is_so: Callable[[], object]) -> None:
        async def until() -> None:
            while not is_so():  # noqa: ASYNC110 - nobody sets an event for it
                await asyncio.sleep(0.001)

        self.run(until())

    def proxy(self, port: int) -> tuple[StoreProxy, int]:
        proxy = StoreProxy(port)
        self.proxies.append(proxy)
        return proxy, self.run(proxy.start())

    def close(self) -> None:
        for client in self.clients:
            self.run(client.close())
        for proxy in self.proxies:
            self.run(proxy.close())
        self.runner.close()


class EmbeddedHarness(LoopHarness):
    """The store of a folder, and its clients. Its time can be pushed on."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.ahead_ns = 0
        self.server = None
        self.port = 0
        self.start()

    def start(self) -> None:
        async def started() -> None:
            self.server = EmbeddedServer(self.folder, KEYRING, self.notices.append, self.now_ns)
            self.port = await self.server.start(port=self.port)

        self.run(started())

    def stop(self) -> None:
        self.run(self.server.close())

    def now_ns(self) -> int:
        return time.monotonic_ns() + self.ahead_ns

    def client(self, port: int = 0, keyring: Keyring = KEYRING, **options) -> EmbeddedClient:
        async def made() -> EmbeddedClient:
            return EmbeddedClient(
                "127.0.0.1", port or self.port, keyring, self.notices.append, **options
            )

        self.clients.append(self.run(made()))
        return self.clients[-1]

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.ahead_ns += 100_000_000
            self.server.tick()

    def unknown_client(self, *, applied: bool) -> EmbeddedClient:
        proxy, port = self.proxy(self.port)
        client = self.client(port, deadline_s=UNKNOWN_DEADLINE_S)
        self.wait(lambda: not client.trouble)
        proxy.swallow_answers, proxy.swallow_requests = applied, not applied
        return client

    def close(self) -> None:
        super_close = super().close
        for client in self.clients:
            self.run(client.close())
        self.clients.clear()
        self.stop()
        super_close()


async def main(folder: str, port: str) -> str:
    server = EmbeddedServer(Path(folder), KEYRING, lambda text: print(text, file=sys.stderr))
    await server.start(port=int(port))
    print("listening", flush=True)
    return await server.failed


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
