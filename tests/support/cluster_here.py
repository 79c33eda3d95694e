"""Nodes in this process, with real sockets and folders: alone with clients that send chosen
requests, or in a cluster whose store is in memory, and has the event loop's time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import SystemRandom
from typing import Any, Final

import msgspec

from clients.address import ServerAddress
from clients.kv.client import KvClient
from dcp.server.access.users import USERS_FILE, Users
from dcp.server.cluster.cluster_file import ClusterFile, write_cluster_file
from dcp.server.cluster.joining.enrolment import NewCluster, found_cluster, join_cluster
from dcp.server.cluster.meta_access import MetaAccess
from dcp.server.config.settings import Settings
from dcp.server.net.fixed_port import free_port
from dcp.server.node import ROOM_RETRY_S, Node
from dcp.server.observe.elapsed import elapsed_ns
from dcp.server.observe.event_log import EventLog
from dcp.session.access.rights import FULL_RIGHTS
from dcp.wire.frame import Frame, FrameDecoder, pack_request
from dcp.wire.opcode import Opcode
from failover.coordinator.records import MemberRecord
from failover.metadata.keyring import Keyring
from failover.metadata.metastore import StoreRequest, StoreResult, WatchMessage
from failover.metadata.revision_store import RevisionStore
from memory.meta_store import MemoryMetaStore, MemoryWatch
from support.waiting import until_so
from vbucket.engine.partition import VbState

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


ADVANCE_S = 0.02
PARTITIONS: Final = 64
"""Partitions of these clusters: 1,024 take three times as long to start, and show nothing more."""


class LoopMetaStore:
    """A store; `client()` makes a client of it for one node. Close it at the end."""

    def __init__(self) -> None:
        self.store = RevisionStore()
        self._clients: list[LoopClient] = []
        self._loop = asyncio.get_running_loop()
        self._is_scheduled = False
        self._timer = self._loop.call_later(ADVANCE_S, self._pass_time)

    def client(self) -> LoopClient:
        client = LoopClient(self)
        self._clients.append(client)
        return client

    def close(self) -> None:
        self._timer.cancel()

    def advance_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._advance)

    def _pass_time(self) -> None:
        self._timer = self._loop.call_later(ADVANCE_S, self._pass_time)
        self._advance()

    def _advance(self) -> None:
        self._is_scheduled = False
        revision = -1
        while revision != self.store.revision:
            revision = self.store.revision
            for client in self._clients:
                if not client.is_away:
                    client.advance(elapsed_ns())


class LoopClient(MemoryMetaStore):
    """One node's client. While `is_away`, it neither sends nor receives."""

    def __init__(self, owner: LoopMetaStore) -> None:
        super().__init__(owner.store)
        self._owner = owner
        self.is_away = False

    @property
    def trouble(self) -> str:
        return "it is away" if self.is_away else ""

    async def close(self) -> None:
        """End nothing: there is no connection."""

    def submit(self, request: StoreRequest, done: Callable[[StoreResult], None]) -> None:
        super().submit(request, done)
        self._owner.advance_soon()

    def watch(
        self, prefix: bytes, from_revision: int, deliver: Callable[[WatchMessage], None]
    ) -> MemoryWatch:
        self._owner.advance_soon()
        return super().watch(prefix, from_revision, deliver)


CLUSTER = "ab" * 16

SECRET: Final = "s" * 43
HOST: Final = "127.0.0.1"


class ClusterHere:
    """See the module. `async with ClusterHere(folder) as cluster` stops what still runs."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self._folder = folder
        self._settings = settings
        self._root = f"/dcpd/{CLUSTER}/".encode()
        self.nodes: dict[str, Node] = {}
        self.clients: dict[str, LoopClient] = {}
        self._ports: dict[str, tuple[int, int]] = {}
        self.starts_without_store = False
        """Whether nodes that start do not reach the store."""

    async def __aenter__(self) -> ClusterHere:
        self.meta = LoopMetaStore()
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes.values():
            if node.replicated is not None:  # without handing over to nodes that stop, too
                node.replicated.stop()
            await node.stop()
        self.meta.close()

    def _new(self, name: str) -> Node:
        data = self._folder / name
        if name not in self._ports:  # kept over restarts, so none of the ephemeral range
            drawn = SystemRandom()
            self._ports[name] = free_port(HOST, drawn) or 0, free_port(HOST, drawn) or 0
        port, admin_port = self._ports[name]
        settings = msgspec.structs.replace(
            Settings(), data=data, port=port, admin_port=admin_port,
            **{"partitions": PARTITIONS, **self._settings},
        )  # fmt: skip
        table = Users(data / USERS_FILE, iterations=4096)
        log = EventLog(logging.getLogger(f"test.{name}"))
        return Node(
            settings, table, log,
            open_meta=lambda file: MetaAccess._of(
                self._client(name), file.meta, Keyring(file.secrets), file.name
            ),
        )  # fmt: skip

    def _client(self, name: str) -> LoopClient:
        client = self.clients[name] = self.meta.client()
        client.is_away = self.starts_without_store
        return client

    async def start(self, name: str) -> Node:
        """Start a node on the folder that it has."""
        node = self.nodes[name] = self._new(name)
        await node.start()
        return node

    async def become_member(self, name: str, *, copies: int = 0, secret: str = SECRET) -> Node:
        """Make a node that runs alone a member, and restart it; with `copies`: the first one."""
        await self.joins(name, copies=copies)
        node = self.nodes[name]
        content = ClusterFile(cluster=CLUSTER, meta="memory", secret=secret, name=name)
        await node.stop()
        write_cluster_file(self._folder / name, content)
        return await self.start(name)

    async def joins(self, name: str, *, copies: int = 0) -> None:
        """Write into the store that a node is a member, and leave the node as it is."""
        node = self.nodes[name]
        member = MemberRecord(
            member=node._storage.node.node_id, address=f"127.0.0.1:{node.ports.kv}", name=name,
            admin_port=node.ports.admin,
        )  # fmt: skip
        meta = self.meta.client()
        if copies:
            nodes = self._settings.get("cluster_nodes", 1)
            assert isinstance(nodes, int), "as the setting says"
            wanted = NewCluster(copies, None, nodes)
            await found_cluster(meta, self._root, node.engine, member, wanted, node._users.text)
        else:
            await join_cluster(meta, self._root, node.engine, member)

    async def kill(self, name: str) -> None:
        """End a node without a stop: connections break, nothing more is written or answered."""
        node = self.nodes.pop(name)
        self.clients[name].is_away = True
        assert node.replicated is not None
        node.replicated.stop()
        node._fail(RuntimeError("killed by the test"))
        await node.stop()

    def client(
        self, name: str, timeout_s: float = 20.0
    ) -> contextlib.AbstractAsyncContextManager[KvClient]:
        """Connect a client that begins at a node."""
        address = ServerAddress("127.0.0.1", self.nodes[name].ports.kv)
        return KvClient.connect(address, timeout_s=timeout_s)

    def active(self, name: str) -> set[int]:
        """Return the partitions that a node serves."""
        return {
            part.vb_id
            for part in self.nodes[name].engine.partitions
            if part.state == VbState.ACTIVE
        }

    def in_sync(self, name: str) -> set[int]:
        """Return the sizes of the in-sync sets, as a node knows them."""
        replicated = self.nodes[name].replicated
        assert replicated is not None
        records = replicated.session.view.partitions.values()
        return {len(stored.content.record.isr) for stored in records}

    def hands_over(self, name: str) -> bool:
        """Return whether a node hands partitions over, or rests between two groups of them."""
        replicated = self.nodes[name].replicated
        assert replicated is not None
        return replicated.core.master.handovers.is_under_way

    def plans(self, name: str) -> bool:
        """Return whether a move of copies and masters is under way, as a node knows."""
        replicated = self.nodes[name].replicated
        assert replicated is not None
        return replicated.session.view.plan is not None

    async def until_all_in_sync(self, copies: int) -> None:
        """Return once each partition is served, with so many copies in sync, and none moves."""
        await until_so(
            lambda: (
                not any(self.hands_over(name) for name in self.nodes)
                and sum(len(self.active(name)) for name in self.nodes)
                == max(node.engine.num_vbuckets for node in self.nodes.values())
                and all(self.in_sync(name) == {copies} for name in self.nodes)
                and not any(self.plans(name) for name in self.nodes)
            )
        )

    async def of_three(self) -> None:
        """Start three members with three copies."""
        await self.start("n1")
        await self.become_member("n1", copies=3)
        for name in ("n2", "n3"):
            await self.start(name)
            await self.become_member(name)
        await self.until_all_in_sync(3)
