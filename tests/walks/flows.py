"""The flows, and what records the way of each. See `walks.__main__`."""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import msgspec

from clients import Consumer
from dcp.server.access.users import USERS_FILE, Users
from dcp.server.config.settings import Settings
from dcp.server.node import Node
from dcp.server.observe.event_log import EventLog
from dcp.server.storage import committer
from dcp.wire.feature import Feature
from dcp.wire.frame import HEADER, HEADER_BYTES, pack_request
from dcp.wire.message import OpenFlag, StreamRequest, pack_open, pack_stream_request
from dcp.wire.opcode import Opcode
from support.core_cluster import TICK_NS, CoreCluster

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = tuple(f"{ROOT}/{name}/" for name in ("dcp", "vbucket", "failover", "clients"))
END: Final = 2**64 - 1
VB: Final = 5
_QUIET_S: Final = 0.3
"""After it nothing of the step before is under way any more."""


class Walk(NamedTuple):
    """One flow: the files in the order in which they were entered, with the functions called."""

    flow: str
    way: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def files(self) -> int:
        """How many files were entered."""
        return len({name for name, _ in self.way})

    @property
    def folders(self) -> int:
        """How many folders these files are in."""
        return len({Path(name).parent for name, _ in self.way})

    @property
    def moves(self) -> int:
        """How often a call entered another file."""
        return len(self.way) - 1

    @property
    def returns(self) -> int:
        """How many moves led to a file that was visited already."""
        return len(self.way) - self.files


class Tracer:
    """Collects the walks. It profiles all threads, so nothing else may run in the process."""

    def __init__(self) -> None:
        self.walks: list[Walk] = []
        self._calls: list[tuple[str, str]] | None = None

    def _on_event(self, frame: FrameType, event: str, _argument: Any) -> None:
        if self._calls is None or event != "call":
            return
        name = frame.f_code.co_filename
        if name.startswith(PACKAGES):
            self._calls.append((name[len(str(ROOT)) + 1 :], frame.f_code.co_qualname))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Profile this thread and those that are started meanwhile."""
        sys.setprofile(self._on_event)
        threading.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def walk(self, flow: str) -> Iterator[None]:
        """Record what is called meanwhile as the walk of a flow."""
        self._calls = []
        try:
            yield
        finally:
            calls, self._calls = self._calls, None
        way: list[tuple[str, list[str]]] = []
        for name, function in calls:
            if way and way[-1][0] == name:
                way[-1][1].append(function)
            else:
                way.append((name, [function]))
        self.walks.append(Walk(flow, tuple((name, tuple(called)) for name, called in way)))


class Peer:
    """A raw connection to the node. It packs and counts its packets beside the walks: a client's
    own code is no part of them.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._reader = reader
        self._received = b""

    @classmethod
    async def connect(cls, port: int) -> Peer:
        """Connect to the node's key-value port."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, packet: bytes, answers: int = 1) -> None:
        """Send one packet and wait for this many packets."""
        self.writer.write(packet)
        await self.receive(answers)

    async def receive(self, answers: int) -> None:
        """Wait for this many packets."""
        while answers > 0:
            self._received += await self._reader.read(1 << 20)
            while len(self._received) >= HEADER_BYTES:
                size = HEADER_BYTES + HEADER.unpack_from(self._received)[6]
                if len(self._received) < size:
                    break
                self._received = self._received[size:]
                answers -= 1


def _set(key: bytes) -> bytes:
    return pack_request(
        Opcode.SET, vb_id=VB, key=b"\0" + key, value=b"v" * 100, extras=bytes(8), opaque=7
    )


def _stream(vb_id: int, start: int, vb_uuid: int) -> bytes:
    request = StreamRequest(0, start, END, vb_uuid, start, start)
    return pack_stream_request(vb_id, request, 9, b"")


async def _key_value_walks(tracer: Tracer, port: int) -> Peer:
    kv = await Peer.connect(port)
    features = (Feature.TCP_NODELAY, Feature.MUTATION_SEQNO, Feature.XERROR, Feature.COLLECTIONS)
    hello = b"".join(feature.to_bytes(2, "big") for feature in features)
    await kv.ask(pack_request(Opcode.HELLO, key=b"walk", value=hello))
    for number in range(3):
        await kv.ask(_set(b"k%d" % number))
    await asyncio.sleep(_QUIET_S)
    change, read = _set(b"kx"), pack_request(Opcode.GET, vb_id=VB, key=b"\0kx")
    with tracer.walk("SET"):
        await kv.ask(change)
    await asyncio.sleep(_QUIET_S)
    with tracer.walk("GET"):
        await kv.ask(read)
    return kv


async def _stream_walks(tracer: Tracer, port: int, kv: Peer) -> None:
    dcp = await Peer.connect(port)
    await dcp.ask(pack_open(b"walk", OpenFlag.PRODUCER, 1))
    ahead, backlog, change = _stream(VB + 1, 4, 12345), _stream(VB, 0, 0), _set(b"live")
    with tracer.walk("stream request, ROLLBACK"):
        await dcp.ask(ahead)
    await asyncio.sleep(_QUIET_S)
    with tracer.walk("stream request, backlog from memory"):
        await dcp.ask(backlog, 6)
    await asyncio.sleep(_QUIET_S)
    with tracer.walk("SET with one live stream"):
        await kv.ask(change)
        await dcp.receive(2)  # the snapshot marker and the mutation
    dcp.writer.close()


async def _store_walk(tracer: Tracer, node: Node, port: int) -> None:
    node.engine.keyspace.merge_soon()
    node.write.groups.begin_merge()
    node.write.committer.kick()
    for _ in range(100):
        await asyncio.sleep(0.1)
        if (
            not node.engine.keyspace.memtables.is_merging
            and not node.engine.keyspace.memtables.active_bytes
        ):
            break
    dcp = await Peer.connect(port)
    await dcp.ask(pack_open(b"walk2", OpenFlag.PRODUCER, 1))
    backlog = _stream(VB, 0, 0)
    with tracer.walk("stream request, backlog from LMDB"):
        await dcp.ask(backlog, 5)
    dcp.writer.close()


async def _consumer_walk(tracer: Tracer, port: int, kv: Peer) -> None:
    async with Consumer(f"127.0.0.1:{port}", vbuckets=[VB]) as consumer:
        events = aiter(consumer)

        async def next_event() -> object:
            return await anext(events)

        task = asyncio.ensure_future(next_event())
        while (await asyncio.wait([task], timeout=0.5))[0]:
            task = asyncio.ensure_future(next_event())
        change = _set(b"event")
        with tracer.walk("SET to a consumer's event, both ends"):
            kv.writer.write(change)
            await task


@contextmanager
def _every_disk_is_fast() -> Iterator[None]:
    """After a slow sync a thread would write the next groups, which is another way."""
    slow_ns = committer.SLOW_SYNC_NS
    committer.SLOW_SYNC_NS = 1 << 62  # type: ignore[misc]
    try:
        yield
    finally:
        committer.SLOW_SYNC_NS = slow_ns  # type: ignore[misc]


async def _node_walks(tracer: Tracer, folder: Path) -> None:
    data = folder / "data"
    settings = msgspec.structs.replace(
        Settings(), data=data, port=0, admin_port=0, expiry_interval_s=0, compact_interval_s=0
    )
    users = Users(data / USERS_FILE, iterations=4096)
    node = Node(settings, users, EventLog(logging.getLogger("walk")))
    await node.start()
    assert node.ports.kv is not None
    kv = await _key_value_walks(tracer, node.ports.kv)
    await _stream_walks(tracer, node.ports.kv, kv)
    await _store_walk(tracer, node, node.ports.kv)
    await _consumer_walk(tracer, node.ports.kv, kv)
    kv.writer.close()
    await node.stop()


def _replica_walks(tracer: Tracer) -> None:
    cluster = CoreCluster("abc")
    cluster.run(TICK_NS * 20)
    cluster.a.put()
    cluster.settle()
    cluster.run(TICK_NS * 4)
    cluster.a.put(b"\0k2")
    with tracer.walk("master: a group begins, to two replicas"):
        job = cluster.a.next_job()
    wire = next(
        wire for wire in cluster.wires if wire.master is cluster.a and wire.node is cluster.b
    )
    sent = b"".join(wire.peer.state.feed.pump(1 << 20))
    with tracer.walk("replica: a group in, applied"):
        wire.link.receive(sent, cluster.now_ns)
    with tracer.walk("replica: synced, acknowledgement out"):
        mine = cluster.b.next_job()
        cluster.b.writer.append(mine.group.number, mine.group.payload)
        cluster.b.writer.sync()
        cluster.b.published(cluster.b.groups.done(mine))
        cluster.b.core.group_synced(cluster.now_ns, mine.group)
        out = wire.link.bytes_to_send()
    cluster.a.finish(job)
    with tracer.walk("master: acknowledgement in, committed"):
        wire.peer.state.feed.heard(cluster.now_ns)
        wire.peer.session.receive(out, cluster.a.now_ns)


def all_walks() -> list[Walk]:
    """Run all flows in this process; return their walks."""
    tracer = Tracer()
    with tempfile.TemporaryDirectory() as folder, tracer.installed(), _every_disk_is_fast():
        asyncio.run(_node_walks(tracer, Path(folder)))
        _replica_walks(tracer)
    return tracer.walks
