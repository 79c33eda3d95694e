"""One set of situations for both shells of a node: the server's process, and the simulator's node.

What orders syncs, acknowledgements, answers and fences is the product's, and both use it. Each has
its own connections, its own way to the disk and its own clock. So each situation runs on three
nodes of either kind. Nothing here waits for a time: what must not have happened yet is looked at
when something else has.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from dcp.server.node import Node
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, FrameDecoder, pack_request
from dcp.wire.message import OPEN_EXTRAS, EndReason, OpenFlag, StreamRequest, pack_stream_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.replication.node import ReplicationCore
from sim.facts import Kind
from sim.network import Side
from sim.scenario import Scenario
from sim.world import SECOND, Host
from support.cluster_here import HOST, ClusterHere
from support.waiting import until_so
from vbucket.engine.engine import Engine
from vbucket.engine.partition import Partition, VbState
from vbucket.log.device import SyncFailedError
from vbucket.model.entry import seqno_of
from vbucket.model.ids import SEQNO_MAX

KEY, OTHER = b"situation", b"another"
PATIENCE_S = 60
"""No answer is given up, and no replica leaves the in-sync set, while a busy machine is slow."""
HELLO = pack_request(
    Opcode.HELLO, key=b"test",
    value=b"".join(code.to_bytes(2, "big") for code in (Feature.XERROR, Feature.SYNC_REPLICATION)),
)  # fmt: skip
OPEN = pack_request(Opcode.DCP_OPEN, key=b"reader", extras=OPEN_EXTRAS.pack(0, OpenFlag.PRODUCER))


class Caller:
    """A connection to the master's node, and what came on it."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.send = write
        self.frames: list[Frame] = []
        self.is_closed = False
        self._decoder = FrameDecoder()

    def take(self, data: bytes) -> None:
        self.frames += self._decoder.feed(data)

    def answers(self, opcode: Opcode) -> list[Frame]:
        return [frame for frame in self.frames if frame.opcode == opcode]


class Shell(ABC):
    """Three nodes; `vb_id` is a partition of which `master` is the master."""

    vb_id: int
    master: str
    replicas: list[str]

    @abstractmethod
    def engine(self, name: str) -> Engine:
        """Return that of a node."""

    @abstractmethod
    def core(self) -> ReplicationCore:
        """Return the master's."""

    @abstractmethod
    async def call(self) -> Caller:
        """Connect to the master's node."""

    @abstractmethod
    async def until(self, is_so: Callable[[], object]) -> None:
        """Let things happen until something is so."""

    @abstractmethod
    def hold_syncs(self, name: str) -> None:
        """Let no sync of a node's log end."""

    @abstractmethod
    def let_sync(self) -> None:
        """End the syncs that are held, and hold no more."""

    @abstractmethod
    def fail_sync(self) -> None:
        """Let the next sync of the master's log fail."""

    @abstractmethod
    def cut_off(self) -> None:
        """Let the master hear nothing of other nodes and of the metadata store."""

    @abstractmethod
    def show_records(self) -> None:
        """Let it hear the metadata store again."""

    @abstractmethod
    def mend(self) -> None:
        """Let it hear everything again."""

    def part(self, name: str) -> Partition:
        return self.engine(name).partitions[self.vb_id]

    def is_acknowledged(self, seqno: int) -> bool:
        """Whether all others have synced a change, and the master has heard it. Nobody else writes,
        so nothing is on its way then.
        """
        return all(self.part(name).synced_seqno >= seqno for name in self.replicas) and not any(
            feed.inflights.cost for feed in self.core().master.feeds.values()
        )

    async def round_trip(self, caller: Caller) -> None:
        """Ask for something else, and get the answer: what could leave before has left."""
        before = len(caller.frames)
        caller.send(self.get(OTHER))
        await self.until(lambda: len(caller.frames) > before)

    def set(self, key: bytes = KEY, value: bytes = b"new") -> bytes:
        return pack_request(Opcode.SET, vb_id=self.vb_id, key=key, value=value, extras=bytes(8))

    def get(self, key: bytes = KEY) -> bytes:
        return pack_request(Opcode.GET, vb_id=self.vb_id, key=key)

    async def asked(
        self, harm: Callable[[], object], *, as_one: bool = False
    ) -> tuple[Caller, Caller, int]:
        """Do harm, so that no answer may leave; then write a key on one connection and read it on
        another. Return both, and the seqno of the change. `as_one`: in one batch, on the first.
        """
        writer, reader = await self.call(), await self.call()
        harm()
        writer.send(self.set() + self.get() if as_one else self.set())
        newest = self.part(self.master).newest
        await self.until(lambda: b"\0" + KEY in newest)
        seqno = seqno_of(newest[b"\0" + KEY])
        if as_one:
            return writer, writer, seqno
        reader.send(self.get())
        return writer, reader, seqno

    async def stream(self) -> Caller:
        """Open a stream of the partition, of what comes from now on."""
        consumer = await self.call()
        part = self.part(self.master)
        at = part.high_seqno
        asked = StreamRequest(0, at, SEQNO_MAX, part.vb_uuid, at, at)
        consumer.send(OPEN + pack_stream_request(self.vb_id, asked, 7))
        await self.until(lambda: consumer.answers(Opcode.DCP_STREAM_REQ))
        assert consumer.answers(Opcode.DCP_STREAM_REQ)[0].status == Status.OK
        return consumer


class CallerSocket(asyncio.Protocol):
    """The caller's end of a real connection."""

    caller: Caller

    def data_received(self, data: bytes) -> None:
        self.caller.take(data)

    def connection_lost(self, _error: Exception | None) -> None:
        self.caller.is_closed = True


class ServerShell(Shell):
    """Nodes of the server, on real sockets and disks."""

    def __init__(self, cluster: ClusterHere) -> None:
        self._cluster = cluster
        self.master, *self.replicas = cluster.nodes
        records = self._records(self.master)
        self.vb_id = next(
            vb_id
            for vb_id in sorted(cluster.active(self.master))
            if records[vb_id].content.record.copies[0] == self._member(self.master)
        )
        self._gate = threading.Event()
        self._transports: list[asyncio.Transport] = []

    def _replicated(self, name: str) -> Any:
        return self._cluster.nodes[name].replicated

    def _member(self, name: str) -> str:
        return str(self._replicated(name).member)

    def _records(self, name: str) -> Any:
        return self._replicated(name).session.view.partitions

    def engine(self, name: str) -> Engine:
        return self._cluster.nodes[name].engine

    def core(self) -> ReplicationCore:
        found = self._replicated(self.master).core
        assert isinstance(found, ReplicationCore)
        return found

    async def call(self) -> Caller:
        port = self._cluster.nodes[self.master].ports.kv
        loop = asyncio.get_running_loop()
        transport, socket = await loop.create_connection(CallerSocket, HOST, port)
        self._transports.append(transport)
        caller = socket.caller = Caller(transport.write)
        caller.send(HELLO)
        await self.until(lambda: caller.answers(Opcode.HELLO))
        return caller

    async def until(self, is_so: Callable[[], object]) -> None:
        await until_so(is_so)

    def _sync_by(self, node: Node, sync: Callable[[Callable[[], object]], None]) -> None:
        """Have a thread of Python write all groups, and sync so."""
        committer = node.write.committer
        real = committer._writer.sync_unmarked
        committer._is_for_the_loop = lambda _job: False  # type: ignore[method-assign]
        committer._begin_aside = lambda _job: False  # type: ignore[method-assign]
        committer._writer.sync_unmarked = lambda: sync(real)  # type: ignore[method-assign]

    def hold_syncs(self, name: str) -> None:
        def late(real: Callable[[], object]) -> None:
            self._gate.wait()
            real()

        self._sync_by(self._cluster.nodes[name], late)

    def let_sync(self) -> None:
        self._gate.set()

    def fail_sync(self) -> None:
        def failing(_real: Callable[[], object]) -> None:
            raise SyncFailedError("the disk is gone")

        self._sync_by(self._cluster.nodes[self.master], failing)

    def cut_off(self) -> None:
        for name in self.replicas:
            self._replicated(name).cut_off(self._member(self.master))
        self._cluster.clients[self.master].is_away = True

    def show_records(self) -> None:
        self._cluster.clients[self.master].is_away = False

    def mend(self) -> None:
        self.show_records()
        for name in self.replicas:
            self._replicated(name).links.cut_members.clear()

    def end(self) -> None:
        self._gate.set()
        for transport in self._transports:
            transport.abort()


class SimHandler:
    """The caller's end of a simulated connection."""

    def __init__(self, caller: Caller) -> None:
        self.on_bytes = caller.take
        self._caller = caller

    def on_closed(self, _why: str) -> None:
        self._caller.is_closed = True

    def on_writable(self) -> None:
        """Do nothing: requests are short."""


class SimShell(Shell):
    """Nodes of the simulator, in virtual time. Nobody else writes."""

    def __init__(self) -> None:
        self._cluster = Scenario(
            commit_timeout_ns=PATIENCE_S * SECOND, lag_ns=PATIENCE_S * SECOND, clients=1,
            consumers=0, kinds=(Kind.GET,), kind_weights=(1.0,),
        )  # fmt: skip
        self.vb_id = 0
        self.master, self.replicas = self._cluster.master(), self._cluster.replicas()
        self._held: list[tuple[Any, Any]] = []
        self._host = Host(self._cluster.world, "caller")
        self._cluster.network.add(self._host)

    def engine(self, name: str) -> Engine:
        return self._cluster.node(name).engine

    def core(self) -> ReplicationCore:
        return self._cluster.node(self.master).core

    async def call(self) -> Caller:
        sides: list[Side] = []
        self._cluster.network.connect(self._host, self.master, sides.append, pytest.fail)
        await self.until(lambda: sides)
        caller = Caller(sides[0].write)
        sides[0].handler = SimHandler(caller)
        caller.send(HELLO)
        await self.until(lambda: caller.answers(Opcode.HELLO))
        return caller

    async def until(self, is_so: Callable[[], object]) -> None:
        self._cluster.until(lambda: bool(is_so()))

    def hold_syncs(self, name: str) -> None:
        node = self._cluster.node(name)

        def late(job: Any) -> None:
            self._held.append((node, job))

        node._sync = late  # type: ignore[method-assign]

    def let_sync(self) -> None:
        for node, job in self._held:
            if "_sync" in vars(node):
                del node._sync
            node._sync(job)

    def fail_sync(self) -> None:
        self._cluster.machine(self.master).disk.syncs_to_fail = 1

    def cut_off(self) -> None:
        for name in self.replicas:
            self._cluster.cut(self.master, name)
            self._cluster.cut(name, self.master)
        self._hear = self._cluster.cluster.store_cut(self.master)

    def show_records(self) -> None:
        self._hear()

    def mend(self) -> None:
        self._hear()
        self._cluster.mend()


@contextlib.asynccontextmanager
async def shell_of(kind: str, folder: Path) -> AsyncIterator[Shell]:
    if kind == "simulator":
        yield SimShell()
        return
    settings = {"replica_lag_max_s": PATIENCE_S, "commit_timeout_s": PATIENCE_S}
    async with ClusterHere(folder, **settings) as cluster:
        await cluster.of_three()
        shell = ServerShell(cluster)
        try:
            yield shell
        finally:
            shell.end()


both = pytest.mark.parametrize("kind", ["server", "simulator"])


def results(writer: Caller, reader: Caller) -> tuple[list[int], list[int]]:
    """Return the statuses that a write and a read got so far."""
    return (
        [frame.status for frame in writer.answers(Opcode.SET)],
        [frame.status for frame in reader.answers(Opcode.GET)],
    )


NOTHING: tuple[list[int], list[int]] = [], []
ANSWERED = [Status.OK], [Status.OK]


@both
async def test_nothing_is_answered_before_the_masters_sync(kind: str, tmp_path: Path) -> None:
    """Replicas have a group, and their disks, before its master's disk: that does not commit it."""
    async with shell_of(kind, tmp_path) as shell:
        consumer, late = await shell.stream(), await shell.call()
        writer, reader, seqno = await shell.asked(lambda: shell.hold_syncs(shell.master))
        await shell.until(lambda: shell.is_acknowledged(seqno))
        await shell.round_trip(late)
        assert shell.part(shell.master).committed_seqno < seqno
        assert results(writer, reader) == NOTHING
        assert consumer.answers(Opcode.DCP_MUTATION) == []
        shell.let_sync()
        await shell.until(lambda: results(writer, reader) == ANSWERED)
        assert reader.answers(Opcode.GET)[0].value == b"new"
        await shell.until(lambda: consumer.answers(Opcode.DCP_MUTATION))
        assert shell.part(shell.master).committed_seqno >= seqno


@both
async def test_a_replica_acknowledges_what_it_has_synced(kind: str, tmp_path: Path) -> None:
    async with shell_of(kind, tmp_path) as shell:
        late = await shell.call()
        writer, reader, seqno = await shell.asked(
            lambda: [shell.hold_syncs(name) for name in shell.replicas]
        )
        await shell.until(
            lambda: all(shell.part(name).high_seqno >= seqno for name in shell.replicas)
        )
        await shell.until(lambda: shell.part(shell.master).synced_seqno >= seqno)
        await shell.round_trip(late)
        assert shell.part(shell.master).committed_seqno < seqno
        assert results(writer, reader) == NOTHING
        shell.let_sync()
        await shell.until(lambda: results(writer, reader) == ANSWERED)


@both
async def test_after_a_failed_sync_nobody_is_answered(kind: str, tmp_path: Path) -> None:
    async with shell_of(kind, tmp_path) as shell:
        idle = await shell.call()
        writer, reader, _ = await shell.asked(shell.fail_sync)
        await shell.until(lambda: writer.is_closed and reader.is_closed and idle.is_closed)
        assert results(writer, reader) == NOTHING


@both
async def test_a_fence_refuses_reads_and_ends_streams(kind: str, tmp_path: Path) -> None:
    """What waited goes on to wait, and is answered if the master is confirmed again."""
    async with shell_of(kind, tmp_path) as shell:
        consumer, late = await shell.stream(), await shell.call()
        writer, reader, _ = await shell.asked(shell.cut_off, as_one=True)
        await shell.until(lambda: shell.part(shell.master).state == VbState.FENCED)
        late.send(shell.get(OTHER))
        await shell.until(lambda: late.answers(Opcode.GET))
        assert late.answers(Opcode.GET)[0].status == Status.ETMPFAIL
        await shell.until(lambda: consumer.answers(Opcode.DCP_STREAM_END))
        (end,) = consumer.answers(Opcode.DCP_STREAM_END)
        assert int.from_bytes(end.extras, "big") == EndReason.STATE_CHANGED
        assert results(writer, reader) == NOTHING
        shell.mend()
        await shell.until(lambda: results(writer, reader) == ANSWERED)


@both
async def test_deposed_between_sync_and_answer_it_claims_nothing(kind: str, tmp_path: Path) -> None:
    """The change may be there or not, so the writer is told that; the reader asks again."""
    async with shell_of(kind, tmp_path) as shell:
        late = await shell.call()
        writer, reader, seqno = await shell.asked(shell.cut_off, as_one=True)
        await shell.until(lambda: shell.part(shell.master).synced_seqno >= seqno)
        await shell.until(
            lambda: any(shell.part(name).state == VbState.ACTIVE for name in shell.replicas)
        )
        assert results(writer, reader) == NOTHING
        shell.show_records()
        lost = [Status.SYNC_WRITE_AMBIGUOUS], [Status.ETMPFAIL]
        await shell.until(lambda: results(writer, reader) == lost)
        assert shell.part(shell.master).state == VbState.REPLICA
        late.send(shell.get(OTHER))
        await shell.until(lambda: late.answers(Opcode.GET))
        assert late.answers(Opcode.GET)[0].status == Status.NOT_MY_VBUCKET
