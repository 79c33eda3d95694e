"""A master and a replica of one partition: whole nodes in memory, joined by a real link.

The replication cores are the product's. Bytes pass only when a test says so, so that a link can be
cut and a process can die between any two messages.

A master's node with one feed, which a test steps by hand, is here, too.
"""

from __future__ import annotations

from collections.abc import Iterable

from dcp.core.groups import Published, WriteGroup
from dcp.session.access.rights import FULL_RIGHTS, Role
from dcp.session.replication_port import FeedAnswer
from dcp.session.session import Session
from dcp.session.state import ClientLogin, SessionParts, SessionState
from dcp.wire.frame import Frame, FrameDecoder
from dcp.wire.message import StreamRequest
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.coordinator.cluster_session import ClusterSession, SessionEffect
from failover.coordinator.coordinator import CoordinatorSettings
from failover.coordinator.records import (
    ClusterKeys,
    KeyKind,
    MemberRecord,
    ReportedPartition,
    StoredPartition,
)
from failover.coordinator.view import Stored
from failover.metadata.metastore import KeyValue
from failover.replication.feed import (
    WINDOW_BYTES,
    Match,
    ReplicaFeed,
)
from failover.replication.link import LinkState, ReplicaLink
from failover.replication.mastership import ReplicationSettings
from failover.replication.messages import (
    NOT_SEEN,
    EntriesSection,
    Message,
    ReplicaPosition,
    pack_ack,
    unpack_entries,
)
from failover.replication.node import ReplicationCore
from failover.rules.replication_record import ReplicationRecord
from memory.log_device import SegmentsOf
from support.credentials import OpenDoor
from support.memory_node import MemoryNode, Peer
from vbucket.check.store_check import StoreCheck
from vbucket.engine.engine import SET
from vbucket.engine.partition import Partition
from vbucket.model.entry import seqno_of, vb_id_of

VB = 1
PARTITIONS = 2
MASTER, REPLICA = "a", "b"
ROOT = b"/c/"
COLLECTIONS = 0x12
BEAT_NS = 100_000_000
FIRST = ReplicationRecord((MASTER, REPLICA), frozenset({MASTER}), 1)
"""Nobody is the master yet: a process is none in the epoch that it finds."""


class Member:
    """A node and its replication core. Every partition but VB is left alone."""

    def __init__(self, name: str, node: MemoryNode, section_bytes: int) -> None:
        self.name = name
        self.node = node
        self._settings = ReplicationSettings(min_in_sync=1, section_bytes=section_bytes)
        self._incarnation = 0
        self.now_ns = 10**9
        self._stored = FIRST
        self.begin()

    def begin(self) -> None:
        """Begin a process on what the node has."""
        self._incarnation += 1
        node = self.node
        self.session = ClusterSession(ROOT, self.name, self._incarnation, CoordinatorSettings())
        for member in (MASTER, REPLICA):
            record = MemberRecord(member=member, address=member)
            self.session.view.members[member] = Stored(record, KeyValue(b"m", b"", 1, 1, 0))
        self.core = ReplicationCore(
            node.engine, node.store, node.groups, self.session, self._settings, self,
            cluster="c", now_ns=self.now_ns,
        )  # fmt: skip
        self.record(self._stored)

    def ask_store(self, effects: Iterable[SessionEffect]) -> None:
        """Write nothing: the test writes the records."""

    def depose(self, vb_ids: tuple[int, ...], why: str) -> None:
        """No client waits."""

    def record(self, record: ReplicationRecord) -> None:
        """The metadata store has this record of VB."""
        self._stored = record
        key = ClusterKeys(ROOT).of_partition(KeyKind.PARTITION, VB)
        item = KeyValue(key, b"", 1, 1, 0)
        self.session.reader.starts_over = False
        self.session.view.partitions[VB] = Stored(StoredPartition(record, "test"), item)
        self.core.records_changed(self.now_ns, [VB])

    @property
    def part(self) -> Partition:
        return self.node.engine.partitions[VB]

    def commit(self) -> None:
        """Write and sync what is pending."""
        while (job := self.node.groups.next_job()) is not None:
            if isinstance(job, WriteGroup):
                self.core.group_begun(self.now_ns, job.group)
            self.node.finish(job)
            if isinstance(job, WriteGroup):
                self.core.group_synced(self.now_ns, job.group)

    def merge(self) -> None:
        self.commit()
        if not self.node.engine.keyspace.memtables.is_merging:
            self.node.groups.begin_merge()
        self.commit()
        self.node.end_merge()

    def compact(self, slices: int | None = None) -> None:
        if VB in self.node.floors.committed():
            self.node.compact([VB], slices=slices)
            if slices is None:
                self.node.floors.compacted(VB)

    def tick(self) -> None:
        self.now_ns += BEAT_NS
        self.core.tick(self.now_ns)

    def crash(self, keep_unsynced_bytes: int = 0) -> None:
        """Kill the process, and start another one."""
        self.node.crash(keep_unsynced_bytes)
        self.begin()

    def documents(self) -> dict[bytes, tuple[int, bytes]]:
        """Return the documents of VB: key -> CAS, value."""
        found = {}
        view = self.node.views.open(VB)
        scan = view.scan()
        while not scan.is_done:
            for shown in scan.step(100):
                found[shown.key] = (shown.meta.cas, shown.value)
        self.node.views.close(view)
        return found

    def findings(self) -> list[str]:
        """Return what the offline check finds in store and log."""
        node = self.node
        check = StoreCheck(
            node.env.snapshot(), SegmentsOf(node.device),
            vb_ids=range(node.partitions),
        )  # fmt: skip
        return [found.line() for found in check.findings() if not found.is_harmless]


class ReplicaPair:
    """See the module. `master` serves VB in epoch 2, `replica` follows it."""

    def __init__(self, *, section_bytes: int = 1) -> None:
        self.master = Member(MASTER, MemoryNode(1, partitions=PARTITIONS), section_bytes)
        self.replica = Member(REPLICA, MemoryNode(2, partitions=PARTITIONS), section_bytes)
        self.taken = FIRST
        self._link: ReplicaLink | None = None
        self._state: SessionState | None = None
        self._to_replica: list[bytes] = []
        self.lead(self.master)

    def lead(self, member: Member) -> None:
        """Let a member be the master from a new epoch on, alone in sync."""
        self.cut()
        isr = frozenset({member.name})
        self.taken = ReplicationRecord(
            (MASTER, REPLICA), isr, self.taken.epoch + 1, master=member.name
        )
        for each in (self.master, self.replica):
            each.record(self.taken)
            each.commit()
        member.now_ns += 10 * BEAT_NS  # it may serve once earlier confirmations have lapsed
        member.tick()
        member.commit()

    def client(self, member: Member | None = None) -> Peer:
        """Return a client of a node that serves VB."""
        client = (member or self.master).node.connect()
        client.hello(COLLECTIONS)
        return client

    # -- the link ----------------------------------------------------------------------------------

    def connect(self) -> None:
        """Join replica and master, if they are not joined."""
        replica, node = self.replica, self.master.node
        if self._link is not None and self._link.state is not LinkState.CLOSED:
            return
        self.cut()
        for _ in range(10):
            if replica.core.replica.links and not self._is_closed():
                break
            replica.tick()
        else:
            raise AssertionError("the replica does not follow the master")
        self._link = replica.core.replica.links[MASTER]
        self._state = SessionState(
            SessionParts.of(
                node.engine,
                node.hub,
                node,
                node.connect().state.shared.limits,
                scans=node.scans,
                replication=self.master.core.master,
            ),
            ClientLogin(OpenDoor(), peer_is_loopback=True),
        )
        self._state.login.rights = FULL_RIGHTS.granted(Role.REPLICATE)
        self._session = Session(self._state)

    def _is_closed(self) -> bool:
        return self.replica.core.replica.links[MASTER].state is LinkState.CLOSED

    def cut(self) -> None:
        """Lose the connection, and what is on its way."""
        if self._link is not None:
            self._link.closed()
        if self._state is not None and self._state.sender is not None:
            self._state.sender.close()
        self._link = self._state = None
        self._to_replica.clear()

    def step(self) -> bool:
        """Let the replica's bytes and one message of the master pass; False: none was there."""
        self.connect()
        link, state = self._link, self._state
        assert link is not None
        assert state is not None
        if data := link.bytes_to_send():
            self._session.receive(data, self.master.node.now_ns)
            self._to_replica += state.answers
            state.answers.clear()
        if state.sender is not None:
            self._to_replica += map(bytes, state.sender.pump(1))
            assert not state.sender.damages, state.sender.damages
        if not self._to_replica:
            return bool(data)
        link.receive(self._to_replica.pop(0), self.replica.now_ns)
        assert not link.problem, link.problem
        return True

    def follow(self) -> None:
        """Go on until the replica has all that the master has synced, and the master knows it."""
        self.master.commit()
        for _ in range(10_000):
            is_moving = self.step()
            self.replica.commit()
            if not is_moving:
                if self.acknowledged() == self.master.part.synced_seqno:
                    return
                self.replica.tick()
                self.master.tick()
                self.master.commit()
        raise AssertionError("the replica does not catch up")

    def acknowledged(self) -> int:
        """Return what counts for the high watermark."""
        given = self.master.core.master.masterships[VB]._acknowledged.get(REPLICA)
        return -1 if given is None else given.synced_seqno

    # -- what tests do -----------------------------------------------------------------------------

    def set(self, *keys: bytes, value: bytes = b"v") -> None:
        client = self.client()
        for key in keys:
            assert client.set(VB, b"\0" + key, value).status == 0
        self.master.commit()

    def delete(self, *keys: bytes) -> None:
        client = self.client()
        for key in keys:
            assert client.delete(VB, b"\0" + key).status == 0
        self.master.commit()

    def raise_floor(self, floor: int, purge: int = 0, *, drops: bool = True) -> None:
        """Let the master give up what is below a floor, and drop it."""
        self.master.merge()
        self.master.node.raise_floor(VB, floor, purge)
        self.master.commit()
        if drops:
            self.master.compact()

    def reports(self) -> tuple[ReportedPartition, ...]:
        """Return what the replica reports once it has not heard its master for a while."""
        self.cut()
        for _ in range(10):
            self.replica.now_ns += BEAT_NS
            self.replica.core.tick(self.replica.now_ns)
        return self.replica.core._reported or ()


EPOCH = 3
MS = 1_000_000


class Master(MemoryNode):
    """A node with one feed. Every stream that is asked for is opened."""

    def __init__(self, window_bytes: int = WINDOW_BYTES, partitions: int = 4) -> None:
        super().__init__(partitions=partitions)
        for part in self.engine.partitions:
            part.has_copies = True
        self.serves_by = NOT_SEEN
        self.acknowledged_: list[Match] = []
        self.closed: list[ReplicaFeed] = []
        self.rings = 0
        self.feed = ReplicaFeed(
            self.engine, "r", self, self._ring, now_ns=0, window_bytes=window_bytes
        )
        self._decoder = FrameDecoder()

    def _ring(self) -> None:
        self.rings += 1

    # -- MasterSide --------------------------------------------------------------------------------

    def admit(
        self, feed: ReplicaFeed, vb_id: int, asked: StreamRequest, told: ReplicaPosition,
        opaque: int,
    ) -> FeedAnswer:  # fmt: skip
        feed.open(vb_id, told.epoch, opaque, asked.start_seqno)
        return FeedAnswer(Status.OK, b"")

    def acknowledged(self, member: str, followed: tuple[Match, ...]) -> None:
        assert member == "r"
        self.acknowledged_ += followed

    def confirmed(self, feed: ReplicaFeed) -> None:
        assert feed is self.feed

    def records_were_kept(self) -> None:
        """Nothing waits for it."""

    def readers_are(self, feed: ReplicaFeed, held: object) -> None:
        """Nothing is purged."""

    def feed_closed(self, feed: ReplicaFeed) -> None:
        self.closed.append(feed)

    # -- steps -------------------------------------------------------------------------------------

    def put(self, vb_id: int, *values: bytes) -> None:
        for value in values:
            assert self.engine.store(SET, vb_id, b"\0k", b"\0k" + value, 0, 0, 0, 0)[0] == 0

    def published(self, published: Published) -> None:
        changes: dict[int, list[bytes]] = {}
        for entry in published.group.changes if published.group is not None else ():
            changes.setdefault(vb_id_of(entry), []).append(entry)
        self.feed.group_synced(changes)

    def commit_all(self) -> None:
        """All replicas have what is synced."""
        parts = self.engine.partitions
        rose = [p.vb_id for p in parts if self.engine.commits.commit(p.vb_id, p.synced_seqno)]
        self.engine.commits.settle()
        self.feed.hw_rose(rose)

    def open(self, *vb_ids: int, opaque: int = 1) -> None:
        for vb_id in vb_ids:
            self.feed.open(vb_id, EPOCH, opaque, 0)

    def frames(self, bytes_max: int = 1 << 20) -> list[Frame]:
        frames: list[Frame] = []
        while self.feed.has_output:
            frames += self._decoder.feed(b"".join(self.feed.pump(bytes_max)))
        return frames

    def messages(self) -> list[Message]:
        return [
            unpack_entries(frame)
            for frame in self.frames()
            if frame.opcode == Opcode.X_REPLICA_ENTRIES
        ]

    def ack(self, number: int, question: int | None = None) -> None:
        [frame] = FrameDecoder().feed(pack_ack(number, number if question is None else question))
        self.feed.take_acknowledgement(frame.extras)


def seqnos(section: EntriesSection) -> list[int]:
    return [seqno_of(entry) for entry in section.entries]


def told(messages: list[Message]) -> list[tuple[int, list[int]]]:
    """(partition, seqnos) of all sections with entries."""
    return [(s.vb_id, seqnos(s)) for message in messages for s in message.sections if s.entries]
