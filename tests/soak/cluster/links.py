"""A TCP proxy before each node and each member of the metadata store, whose flows can be cut.

    node a ──> 127.0.0.2:11210 (here) ──> 127.0.0.1:11210 (node b)

A node is reached at ADVERTISED by the others and by clients, with its own port number; it listens
at 127.0.0.1 itself. Who has dialled is found by the process that has the other end of the
connection: a node, or else a client. A member of the metadata store has one port for each node, so
it is known who dials.

It runs in a process of its own (`python -m tests.soak.cluster.links`), so that what the tests do
does not delay nodes. Orders come as lines of JSON at the standard input, each is answered by a
line, and the end of the input ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import struct
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from tests.soak.cluster.flows import Flow, FlowTable

ADVERTISED: Final = "127.0.0.2"
"""Where others find a node: a name of the loopback interface that only the proxy listens at."""
BEHIND: Final = "127.0.0.1"
CLIENT: Final = "client"
PORTS: Final = range(15_000, 30_000)
"""Below the range for outgoing connections, one of which could take a port while its node is down.
"""
CHUNK_BYTES: Final = 1 << 16
_TCP: Final = Path("/proc/net/tcp")


class Links:
    """The proxy. Call its methods on its event loop."""

    def __init__(self) -> None:
        self.flows = FlowTable()
        self._processes: dict[str, int] = {}
        """Node -> process id."""
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: dict[asyncio.Task[None], tuple[str, str]] = {}
        """Connection -> who has dialled whom."""
        self._changed = asyncio.Event()

    async def serve(self, target: str, port: int, *, source: str = "", to_port: int = 0) -> int:
        """Listen for a party; return the port. `source`: who dials there, if that is known."""
        host = BEHIND if source else ADVERTISED

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # A plain function: asyncio would log the cancellation of a coroutine.
            task = asyncio.create_task(self._serve(reader, writer, source, target, to_port or port))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

        server = await asyncio.start_server(accept, host, port, limit=CHUNK_BYTES)
        self._servers.append(server)
        found: int = server.sockets[0].getsockname()[1]
        return found

    def runs(self, node: str, pid: int) -> None:
        """Learn which process a node is."""
        self._processes[node] = pid

    def set(self, source: str, target: str, flow: Flow) -> None:
        """Change a flow."""
        self.flows.set(source, target, flow)
        self._wake()

    def heal(self) -> None:
        """Open all flows. What was held arrives."""
        self.flows.heal()
        self._wake()

    def reset(self, one: str, other: str) -> int:
        """Break all connections between two parties; return how many."""
        found = [task for task, ends in self._open.items() if {*ends} == {one, other}]
        for task in found:
            task.cancel()
        return len(found)

    async def close(self) -> None:
        """Stop listening, break everything."""
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._open.pop(task, None)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _serve(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        source: str,
        target: str,
        to_port: int,
    ) -> None:
        inner: asyncio.StreamWriter | None = None
        try:
            source = source or self._dialler(writer)
            task = asyncio.current_task()
            assert task is not None
            self._open[task] = (source, target)
            # Who dials through a cut link waits, and does not reach the node before it is healed.
            await self._pass(source, target)
            inner_reader, inner = await asyncio.open_connection(BEHIND, to_port, limit=CHUNK_BYTES)
            pumps = [
                asyncio.create_task(self._pump(reader, inner, source, target)),
                asyncio.create_task(self._pump(inner_reader, writer, target, source)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            return  # the node is down: so is the connection
        finally:
            writer.transport.abort()
            if inner is not None:
                inner.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: str, target: str
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                await self._pass(source, target)
                writer.write(data)
                await writer.drain()
            # The end of a connection does not pass a cut either.
            await self._pass(source, target)

    async def _pass(self, source: str, target: str) -> None:
        """Wait while a flow is held, and for its delay."""
        if delay_s := self.flows.flow(source, target).delay_s:
            await asyncio.sleep(delay_s)
        while self.flows.flow(source, target).is_held:
            await self._changed.wait()

    def _dialler(self, writer: asyncio.StreamWriter) -> str:
        """Return which party has the other end of a connection."""
        inode = socket_inode(writer.get_extra_info("peername"), writer.get_extra_info("sockname"))
        for node, pid in self._processes.items():
            if inode and _has_socket(pid, inode):
                return node
        return CLIENT


def free_port(draw: random.Random, taken: Collection[int]) -> int:
    """Return a port that is free at both addresses, and is none of those of nodes that are down."""
    while True:
        port = draw.choice(PORTS)
        if port in taken:
            continue
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for host in (BEHIND, ADVERTISED):
                stack.enter_context(socket.create_server((host, port)))
            return port


def socket_inode(local: tuple[str, int], remote: tuple[str, int]) -> int:
    """Return the inode of a TCP socket of this machine; 0: there is none."""
    wanted = (_hexadecimal(local), _hexadecimal(remote))
    with _TCP.open() as lines:
        next(lines)
        for line in lines:
            columns = line.split()
            if (columns[1], columns[2]) == wanted:
                return int(columns[9])
    return 0


def _hexadecimal(address: tuple[str, int]) -> str:
    """Return an address as /proc/net/tcp has it."""
    (raw,) = struct.unpack("=I", socket.inet_aton(address[0]))
    return f"{raw:08X}:{address[1]:04X}"


def _has_socket(pid: int, inode: int) -> bool:
    wanted = f"socket:[{inode}]"
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):  # noqa: PTH208 - a hundred names, at each connection
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/{name}") == wanted:  # noqa: PTH115
                    return True
    return False


# -- the process -----------------------------------------------------------------------------------


async def obey(links: Links, order: dict[str, Any]) -> Any:
    """Do what one line says; return what the answer has."""
    what = order.pop("do")
    if what == "serve":
        return await links.serve(**order)
    if what == "set":
        flow = Flow(order.pop("is_held"), order.pop("delay_s"))
        return links.set(**order, flow=flow)
    return {"runs": links.runs, "heal": links.heal, "reset": links.reset}[what](**order)


async def main() -> None:
    """Obey the lines of the standard input."""
    links = Links()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        try:
            answer: Any = {"answer": await obey(links, json.loads(line))}
        except (OSError, ValueError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
    await links.close()


if __name__ == "__main__":
    asyncio.run(main())
