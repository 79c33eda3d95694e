"""A restore, over asyncio: from an archive as of a point into a server.

    Reader -> newest versions, in seqno order -> SETQ_WITH_META / DELQ_WITH_META -> Link

Documents keep flags, expiry, datatype, revision and CAS, and come in the order of their changes.
The server decides conflicts: a document or deletion that it has wins by a higher revision, or the
same and a CAS that is not lower (`force`: the archive's wins always). What the archive does not
know stays. So a restore can simply be run again.

Invariants
- the commands are quiet: of a batch only refusals come back, and the answer to its NOOP, which
  says that all before it is done, durably where the server's durability says so;
- at most BATCHES_MAX batches are under way per node;
- what was refused for now is sent again; what was refused for good is counted by its status, and
  the first of each kind is named.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from struct import Struct
from typing import Final, NamedTuple

from clients.address import ServerAddress
from clients.backup.archive import Archive
from clients.backup.errors import BackupError
from clients.backup.manifest import RunRecord
from clients.backup.point import Point
from clients.backup.reading import Damage, Reader, View
from clients.backup.run import STREAM_FEATURES, collections_of
from clients.backup.selection import Routes, Selection, split_key
from clients.errors import (
    ConnectionLostError,
    DcpdError,
    OperationTimeoutError,
    TemporaryError,
    error_from_status,
)
from clients.link import Link
from clients.topology import Topology, parse_topology, single_node
from dcp.wire.frame import HEADER, HEADER_BYTES, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

BATCH_BYTES: Final = 256 * 1024
BATCH_ITEMS: Final = 2_000
BATCHES_MAX: Final = 64
"""Batches under way to a node, 16 MiB: the server syncs its log in groups, and with less in flight
it would wait for us after each."""
RETRY_PAUSE_S: Final = 0.2
RETRIES_MAX: Final = 50
"""How often items are sent again that the server could not take for now: 10 s."""
NOOP_OPAQUE: Final = 0xFFFF_FFFF

SKIP_CONFLICT_RESOLUTION: Final = 0x01
IS_EXPIRATION: Final = 0x10

_STORED: Final = Struct(">BBHBBHIIQQQ")
"""A header, seqno and revision of a stored frame."""
_MUTATION_HEAD: Final = Struct(">BBHBBHIIQQQII")
"""The same, flags and expiry."""
_TIME: Final = Struct(">I")
_REQUEST: Final = Struct(">BBHBBHIIQIIQQ")
"""A header; flags, expiry, revision, CAS."""
_REQUEST_WITH_OPTIONS: Final = Struct(">BBHBBHIIQIIQQI")
_RETRIED: Final = frozenset({Status.ETMPFAIL, Status.EBUSY, Status.ENOMEM, Status.NOT_MY_VBUCKET})
_FATAL: Final = frozenset({Status.EACCESS, Status.UNKNOWN_COMMAND, Status.NOT_SUPPORTED})
_MUTATION: Final = int(Opcode.DCP_MUTATION)
_EXPIRATION: Final = int(Opcode.DCP_EXPIRATION)
_SYSTEM_EVENT: Final = int(Opcode.DCP_SYSTEM_EVENT)


class RestorePlan(NamedTuple):
    """What a restore will do, or did."""

    runs: tuple[int, ...]
    partitions: int
    """Partitions that have something."""
    documents: int
    deletions: int
    value_bytes: int
    by_collection: dict[str, int]
    """Documents by the collection that they go into."""
    earlier: dict[int, tuple[int, int]]
    """Partition -> (wanted seqno, the whole state at or below that is taken)."""
    damages: list[Damage]


class RestoreReport(NamedTuple):
    """What a restore did."""

    plan: RestorePlan
    written: int
    kept_newer: int
    """Documents where the server's own version won."""
    refused: dict[int, tuple[int, str]]
    """Status -> how many were refused for good, and the first of them in words."""
    created: tuple[str, ...]
    """Collections that were created."""
    seconds: float


class _Counts:
    """What is counted on the way."""

    def __init__(self) -> None:
        self.deletions = self.value_bytes = self.partitions = 0
        self.by_source: Counter[bytes] = Counter()
        """Documents by the collection id that they have in the archive."""
        self.earlier: dict[int, tuple[int, int]] = {}
        self.damages: list[Damage] = []

    def view(self, view: View) -> None:
        """Take note of a partition."""
        self.partitions += bool(view.winners)
        if view.seqno != view.wanted_seqno:
            self.earlier[view.vb_id] = (view.wanted_seqno, view.seqno)
        self.damages += view.damages

    def plan(self, runs: Sequence[RunRecord], names: Mapping[bytes, str]) -> RestorePlan:
        """Return what was counted. `names`: where each collection id's documents go."""
        by_collection: Counter[str] = Counter()
        for source, documents in self.by_source.items():
            by_collection[names[source]] += documents
        return RestorePlan(
            tuple(record.run for record in runs), self.partitions, self.by_source.total(),
            self.deletions, self.value_bytes, dict(by_collection), self.earlier, self.damages,
        )  # fmt: skip


class Restore:
    """One restore. `create`: makes a collection (scope.collection, max_ttl_s) that the server does
    not have; without it a missing one is an error.
    """

    def __init__(
        self,
        archive: Archive,
        point: Point,
        selection: Selection,
        *,
        force: bool = False,
        salvage: bool = False,
        create: Callable[[str, int], None] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Raises BackupErrors for a point or a selection that the archive does not have."""
        self.runs = point.runs_of(archive.runs_and_damages()[0] if salvage else archive.runs())
        self._point = point
        self._selection = selection
        self._routes = Routes(selection, self.runs)
        self._reader = Reader(archive, self.runs, salvage=salvage)
        self._options = SKIP_CONFLICT_RESOLUTION if force else 0
        self._prefix = selection.prefix
        self._create = create
        self._on_progress = on_progress or (lambda _done, _total: None)
        self._vb_ids = sorted({vb_id for record in self.runs for vb_id in record.legs})
        self._counts = _Counts()
        self._prefixes: dict[bytes, bytes] = {}
        self._names: dict[bytes, str] = {}

    def plan(self) -> RestorePlan:
        """Return what would be done, without any server."""
        names = {path: key for key, path in enumerate(sorted(self._targets()), 8)}
        self._use(names)
        for view in self._views():
            for data, start, stop in self._reader.frames(view):
                self._packet(data, start, stop)
        return self._counts.plan(self.runs, self._names)

    async def run(self, address: ServerAddress) -> RestoreReport:
        """Restore into a server. Raises DcpdErrors; a restore that failed can be run again."""
        began_s = time.monotonic()
        link = await Link.connect(address, features=STREAM_FEATURES)
        try:
            created = await self._prepare_collections(link)
            assert link.handshake is not None
            config = link.handshake.config
        finally:
            link.close()
        topology = single_node(address.host, address.port)
        if config:
            topology = parse_topology(config, address.host, is_tls=address.is_tls)
        writer = _Writer(address, topology)
        try:
            for view in self._views():
                await self._send(view, writer)
            await writer.finish()
        finally:
            await writer.close()
        refused = {
            status: (count, writer.examples[status]) for status, count in writer.refused.items()
        }
        plan = self._counts.plan(self.runs, self._names)
        lost = writer.kept_newer + sum(writer.refused.values())
        return RestoreReport(
            plan, plan.documents + plan.deletions - lost, writer.kept_newer, refused, created,
            time.monotonic() - began_s,
        )  # fmt: skip

    # -- inside --------------------------------------------------------------------------------

    def _targets(self) -> set[str]:
        routes = self._routes
        return {path for key in routes.paths if (path := routes.target(key)) is not None}

    def _use(self, ids: dict[str, int]) -> None:
        """Take the target's ids of collections."""
        self._prefixes = self._routes.key_prefixes(ids)
        by_id = {key: self._routes.target(split_key(key + b"k")[0]) or "" for key in self._prefixes}
        self._names = by_id

    async def _prepare_collections(self, link: Link) -> tuple[str, ...]:
        found = await collections_of(link)
        ids = {path: key for key, (path, _) in found.items()}
        missing = sorted(self._targets() - ids.keys())
        # Only those of the archive's newest run must be there: others may be dropped for good.
        current = {path for path, _ in self.runs[-1].collections.values()}
        mapping = self._selection.mapping
        wanted = [path for path in missing if path in {mapping.get(item, item) for item in current}]
        if wanted and self._create is None:
            raise BackupError(
                f"the server has no collection {', '.join(wanted)}", node=link.node,
                hint="--create-collections makes them; --map takes others; --collection chooses.",
            )  # fmt: skip
        for path in wanted:
            assert self._create is not None
            source = next((a for a, b in mapping.items() if b == path), path)
            await asyncio.to_thread(self._create, path, self._routes.max_ttl_s.get(source, 0))
        if wanted:
            found = await collections_of(link)
            ids = {path: key for key, (path, _) in found.items()}
        self._use(ids)
        return tuple(wanted)

    def _views(self) -> Iterator[View]:
        for index, vb_id in enumerate(self._vb_ids):
            view = self._reader.view(vb_id, self._point)
            self._counts.view(view)
            yield view
            self._on_progress(index + 1, len(self._vb_ids))

    async def _send(self, view: View, writer: _Writer) -> None:
        channel = await writer.channel(view.vb_id)
        for data, start, stop in self._reader.frames(view):
            packet = self._packet(data, start, stop, len(channel.packets))
            if packet is not None and channel.add(packet):
                await writer.send(channel)

    def _packet(self, data: bytes, start: int, stop: int, opaque: int = 0) -> bytes | None:
        """Return the request that brings a stored frame back; None for what is not wanted."""
        if data[start + 1] != _MUTATION:
            return self._removal(data, start, stop, opaque)
        _, _, key_len, extras_len, datatype, vb_id, _, _, cas, _, rev_seqno, flags, expiry = (
            _MUTATION_HEAD.unpack_from(data, start)
        )
        key_at = start + HEADER_BYTES + extras_len
        source = data[key_at : key_at + 1]
        if source >= b"\x80":
            source = _collection_id_of(data, key_at)
        target = self._prefixes.get(source)
        if target is None or (self._prefix and not self._is_wanted(data, key_at + len(source))):
            return None
        if target == source:
            rest = data[key_at:stop]
        else:
            rest = target + data[key_at + len(source) : stop]
            key_len += len(target) - len(source)
        counts = self._counts
        counts.by_source[source] += 1
        counts.value_bytes += len(rest) - key_len
        if not self._options:
            head = _REQUEST.pack(
                0x80, 0xA3, key_len, 24, datatype, vb_id, 24 + len(rest), opaque,
                0, flags, expiry, rev_seqno, cas,
            )  # fmt: skip
        else:
            head = _REQUEST_WITH_OPTIONS.pack(
                0x80, 0xA3, key_len, 28, datatype, vb_id, 28 + len(rest), opaque,
                0, flags, expiry, rev_seqno, cas, self._options,
            )  # fmt: skip
        return head + rest

    def _removal(self, data: bytes, start: int, stop: int, opaque: int) -> bytes | None:
        """The same for a deletion or an expiry; nothing for a system event."""
        _, opcode, key_len, extras_len, _, vb_id, _, _, cas, _, rev_seqno = _STORED.unpack_from(
            data, start
        )
        if opcode == _SYSTEM_EVENT:
            return None
        key_at = start + HEADER_BYTES + extras_len
        source = _collection_id_of(data, key_at)
        target = self._prefixes.get(source)
        if target is None or not self._is_wanted(data, key_at + len(source)):
            return None
        self._counts.deletions += 1
        options, expiry = self._options, 0
        if opcode == _EXPIRATION:
            options |= IS_EXPIRATION
            expiry = _TIME.unpack_from(data, start + 40)[0]
        key = target + data[key_at + len(source) : min(stop, key_at + key_len)]
        return (
            _REQUEST_WITH_OPTIONS.pack(
                0x80, 0xA9, len(key), 28, 0, vb_id, 28 + len(key), opaque,
                0, 0, expiry, rev_seqno, cas, options,
            )
            + key
        )  # fmt: skip

    def _is_wanted(self, data: bytes, key_at: int) -> bool:
        return data.startswith(self._prefix, key_at)


def _collection_id_of(data: bytes, key_at: int) -> bytes:
    """Return the collection id that a key begins with, as its bytes."""
    end = key_at + 1
    while data[end - 1] & 0x80:
        end += 1
    return data[key_at:end]


class _Batch:
    """Packets that are under way; an item's opaque is its place."""

    __slots__ = ("packets", "retried")

    def __init__(self, packets: list[bytes]) -> None:
        self.packets = packets
        self.retried: list[int] = []


class _Writer:
    """Sends batches to the nodes of their partitions, and counts what comes back."""

    def __init__(self, address: ServerAddress, topology: Topology) -> None:
        self.kept_newer = 0
        self.refused: Counter[int] = Counter()
        self.examples: dict[int, str] = {}
        self._address = address
        self._topology = topology
        self._channels: dict[tuple[str, int], _Channel] = {}
        self._again: list[bytes] = []
        self._failure: DcpdError | None = None

    async def send(self, channel: _Channel) -> None:
        """Send what a channel has gathered; wait while too much is under way."""
        while len(channel.batches) >= BATCHES_MAX and self._failure is None:
            await channel.wait()
        self._check()
        if channel.packets:
            channel.send()
            await channel.link.drain()

    async def finish(self) -> None:
        """Wait until all is answered; send again what was refused for now."""
        for _ in range(RETRIES_MAX):
            for channel in self._channels.values():
                await self.send(channel)
                while channel.batches and self._failure is None:
                    await channel.wait()
            self._check()
            if not self._again:
                return
            await asyncio.sleep(RETRY_PAUSE_S)
            again, self._again = self._again, []
            link = await Link.connect(self._address, features=STREAM_FEATURES)
            assert link.handshake is not None
            if link.handshake.config:
                self._topology = parse_topology(
                    link.handshake.config, self._address.host, is_tls=self._address.is_tls
                )
            link.close()
            for packet in again:
                channel = await self.channel(_vb_id_of(packet))
                opaque = len(channel.packets).to_bytes(4, "big")
                if channel.add(packet[:12] + opaque + packet[16:]):
                    await self.send(channel)
        raise TemporaryError(
            f"the server did not take {len(self._again)} documents in {RETRIES_MAX} attempts",
            node=self._address.node, hint="Run it again when the server is well.",
        )  # fmt: skip

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            channel.link.close()
        await asyncio.sleep(0)  # lets the transports finish closing

    def answered(self, batch: _Batch, status: int, opaque: int, body: bytes, node: str) -> None:
        """Take a refusal."""
        if status == Status.KEY_EEXISTS:
            self.kept_newer += 1
        elif status in _RETRIED:
            batch.retried.append(opaque)
        else:
            self.refused[status] += 1
            error = error_from_status(
                status, "restore of a document", body=body,
                vb_id=_vb_id_of(batch.packets[opaque]), node=node,
            )  # fmt: skip
            self.examples.setdefault(status, str(error))
            if status in _FATAL and self._failure is None:
                self._failure = error

    def done(self, batch: _Batch) -> None:
        """All of a batch is answered."""
        self._again += (batch.packets[at] for at in batch.retried)

    def fail(self, error: DcpdError) -> None:
        """A connection is gone."""
        if self._failure is None:
            self._failure = error

    def _check(self) -> None:
        if self._failure is not None:
            if isinstance(self._failure, ConnectionLostError | OperationTimeoutError):
                self._failure.hint = "Run it again: what is there already is kept as it is."
            raise self._failure

    async def channel(self, vb_id: int) -> _Channel:
        """Return the connection to a partition's node."""
        node = self._topology.node_of(vb_id)
        place = (node.host, node.kv_port)
        channel = self._channels.get(place)
        if channel is None:
            link = await Link.connect(self._address.at(*place), features=STREAM_FEATURES)
            channel = self._channels[place] = _Channel(self, link)
        return channel


def _vb_id_of(packet: bytes) -> int:
    return packet[6] << 8 | packet[7]


_NOOP: Final = pack_request(Opcode.NOOP, opaque=NOOP_OPAQUE)


class _Channel:
    """One node's connection: batches under way, oldest first."""

    def __init__(self, writer: _Writer, link: Link) -> None:
        self.link = link
        self.batches: deque[_Batch] = deque()
        self.packets: list[bytes] = []
        """What is gathered for the next batch."""
        self._packet_bytes = 0
        self._writer = writer
        self._rest = b""
        self._wake = asyncio.Event()
        link.hand_over(self._on_bytes, self._on_lost)

    def add(self, packet: bytes) -> bool:
        """Gather a packet; True when there is enough for a batch."""
        self.packets.append(packet)
        self._packet_bytes += len(packet)
        return self._packet_bytes >= BATCH_BYTES or len(self.packets) >= BATCH_ITEMS

    def send(self) -> None:
        """Send what is gathered, and a NOOP whose answer says that it is done."""
        self.link.write(b"".join((*self.packets, _NOOP)))
        self.batches.append(_Batch(self.packets))
        self.packets, self._packet_bytes = [], 0

    async def wait(self) -> None:
        """Wait until something is answered, or the connection is gone."""
        self._wake.clear()
        await self._wake.wait()

    def _on_bytes(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        at, end = 0, len(data)
        while end - at >= HEADER_BYTES:
            _, opcode, key_len, extras_len, _, status, body, opaque, _ = HEADER.unpack_from(
                data, at
            )
            stop = at + HEADER_BYTES + body
            if stop > end:
                break
            if opcode == Opcode.NOOP and self.batches:
                self._writer.done(self.batches.popleft())
                self._wake.set()
            elif status and self.batches:
                value_at = at + HEADER_BYTES + extras_len + key_len
                self._writer.answered(
                    self.batches[0], status, opaque, data[value_at:stop], self.link.node
                )
            at = stop
        self._rest = data[at:]

    def _on_lost(self, error: DcpdError) -> None:
        self._writer.fail(error)
        self._wake.set()
