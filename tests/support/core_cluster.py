"""Replication cores with hand-made records: the test decides when bytes, groups, time and writes to
the metadata store move, and what the store answers.
"""

from __future__ import annotations

from collections.abc import Iterable

from dcp.core.groups import Job, WriteGroup
from dcp.session.access.rights import EVERYTHING, Rights, Role
from failover.coordinator.cluster_session import ClusterSession, SessionEffect
from failover.coordinator.effects import Answered, Submit, ViewChanged
from failover.coordinator.partition_choices import CoordinatorSettings
from failover.coordinator.record_writer import WriteOutcome
from failover.coordinator.records import (
    AliveRecord,
    ClusterKeys,
    KeyKind,
    MemberRecord,
    ReportedPartition,
    StoredPartition,
    decode_partition,
    encode_partition,
    encode_record,
)
from failover.metadata.metastore import OutcomeUnknown, Put, Range, RangeResult, StoreResult, Txn
from failover.metadata.revision_store import RevisionStore
from failover.replication.effects import Dial, ReplicationEffect
from failover.replication.link import LinkState, ReplicaLink
from failover.replication.mastership import Mastership, ReplicationSettings
from failover.replication.node import ReplicationCore
from failover.rules.replication_record import ReplicationRecord, create, elect, rebuild
from support.memory_node import MemoryNode, Peer
from vbucket.engine.engine import SET
from vbucket.engine.partition import Partition
from vbucket.log.commit_group import CommitGroup

KEYS = ClusterKeys(b"/test/")
MS = 1_000_000
TICK_NS = 50 * MS
CLUSTER = "test"
VB = 1


def vacated(record: ReplicationRecord) -> ReplicationRecord:
    """Return the record without a master, as a restoration of the metadata store leaves it."""
    return rebuild(record, record.copies, record.isr, above=record.rank, is_clean=True)


class RecordingSession(ClusterSession):
    """Notes what the node reports, instead of writing it."""

    reported: tuple[ReportedPartition, ...] = ()

    def report(self, now_ns: int, partitions: tuple[ReportedPartition, ...]) -> list[SessionEffect]:
        self.reported = partitions
        return []


class CoreNode(MemoryNode):
    """A member. After `crash` it is another incarnation."""

    def __init__(self, cluster: CoreCluster, member: str, seed: int) -> None:
        self.cluster = cluster
        self.member = member
        self.incarnation = 0
        super().__init__(seed, partitions=4)

    def _open(self) -> None:
        super()._open()
        self.incarnation += 1
        self.session = RecordingSession(
            KEYS.root, self.member, self.incarnation, CoordinatorSettings()
        )
        self.submits: list[Submit] = []
        self.effects: list[ReplicationEffect] = []
        self.deposed: list[tuple[tuple[int, ...], str, int]] = []
        """Partitions, the reason, and the high seqno of the first one at that moment."""
        self.core = ReplicationCore(
            self.engine, self.store, self.groups, self.session, self.cluster.settings,
            self, cluster=CLUSTER, now_ns=self.cluster.now_ns,
        )  # fmt: skip

    def depose(self, vb_ids: tuple[int, ...], why: str) -> None:
        self.deposed.append((vb_ids, why, self.engine.partitions[vb_ids[0]].high_seqno))

    def crash(self, keep_unsynced_bytes: int = 0) -> None:
        for wire in self.cluster.wires:
            if self in {wire.node, wire.master}:
                wire.cut()
        super().crash(keep_unsynced_bytes)

    def begun(self, group: CommitGroup) -> None:
        self.core.group_begun(self.cluster.now_ns, group)

    def finish(self, job: Job) -> None:
        super().finish(job)
        if isinstance(job, WriteGroup):
            self.core.group_synced(self.cluster.now_ns, job.group)

    def ask_store(self, effects: Iterable[SessionEffect]) -> None:
        """Carry out effects of the session: requests wait for `answer`."""
        now_ns = self.cluster.now_ns
        for effect in effects:
            if isinstance(effect, Submit):
                self.submits.append(effect)
            elif isinstance(effect, ViewChanged):
                self.core.records_changed(now_ns, effect.vb_ids)
            elif isinstance(effect, WriteOutcome):
                self.core.outcome(now_ns, effect)

    def answer(self, result: StoreResult | None = None) -> None:
        """Let the oldest request happen, and answer it; with a result: answer this instead."""
        submit = self.submits.pop(0)
        if result is None:
            result = self.cluster.store.apply(self.cluster.now_ns, submit.request)
        self.ask_store(self.session.on_event(self.cluster.now_ns, Answered(submit.tag, result)))

    def told(self, kind: type) -> list:
        """Return the effects of a kind so far."""
        self.effects += self.core.take_effects()
        return [effect for effect in self.effects if isinstance(effect, kind)]

    @property
    def part(self) -> Partition:
        return self.engine.partitions[VB]

    @property
    def mastership(self) -> Mastership:
        return self.core.master.masterships[VB]

    def put(self, key: bytes = b"\0k", value: bytes = b"v") -> None:
        """Write a document, as a session does after its guards; it is not committed yet."""
        self.now_ns += 1 << 16
        self.engine.begin_batch(self.now_ns)
        assert self.engine.store(SET, VB, key, key + value, 0, 0, 0, 0)[0] == 0


class Wire:
    """A link, and the session on its other side."""

    def __init__(self, node: CoreNode, link: ReplicaLink, master: CoreNode) -> None:
        self.node, self.link, self.master = node, link, master
        self.peer: Peer = master.connect()
        self.peer.joins(master.core.master)
        self.peer.state.login.rights = Rights(dict.fromkeys(Role, (EVERYTHING,)))
        self.is_open = self.is_up = self.is_down = True
        """Whether it is open, and whether bytes go to the master and to the replica."""

    def move(self) -> bool:
        """Deliver what both sides have to send; return whether there was anything."""
        now_ns, state = self.node.cluster.now_ns, self.peer.state
        has_moved = False
        if self.is_up and (data := self.link.bytes_to_send()):
            if state.feed is not None:
                state.feed.heard(now_ns)
            self.peer.session.receive(data, self.master.now_ns)
            has_moved = True
        if self.is_down:
            data = b"".join(state.answers)
            state.answers.clear()
            if state.feed is not None and state.feed.has_output:
                data += b"".join(state.feed.pump(1 << 20))
            if data:
                self.link.receive(data, now_ns)
                has_moved = True
        if self.link.state is LinkState.CLOSED or state.is_closing:
            self.cut()
        return has_moved

    def cut(self) -> None:
        """Lose the connection."""
        if self.is_open:
            self.is_open = False
            if self.peer.state.feed is not None:
                self.peer.state.feed.close()
            self.link.closed()


class CoreCluster:
    """See the module. Records exist for partition VB alone, and "a" is its first master."""

    def __init__(self, members: str = "ab", settings: ReplicationSettings | None = None) -> None:
        self.now_ns = 10**12
        self.settings = settings or ReplicationSettings(min_in_sync=1)
        self.store = RevisionStore()
        self.wires: list[Wire] = []
        self.nodes = {member: CoreNode(self, member, seed) for seed, member in enumerate(members)}
        self.refused: list[str] = []
        """Why links were closed."""
        for member in members:
            self._put(
                KEYS.of_member(KeyKind.MEMBER, member),
                encode_record(MemberRecord(member=member, address=member)),
            )
            self.revive(member)
        self.write(create(members))
        self.write(elect(self.record, members[0]))

    @property
    def a(self) -> CoreNode:
        return self.nodes["a"]

    @property
    def b(self) -> CoreNode:
        return self.nodes["b"]

    # -- the store ---------------------------------------------------------------------------------

    def _put(self, key: bytes, value: bytes) -> None:
        self.store.apply(self.now_ns, Txn((), (Put(key, value),)))

    def revive(self, member: str) -> None:
        """A member's lease is there."""
        value = encode_record(AliveRecord(member=member, incarnation=1))
        self._put(KEYS.of_member(KeyKind.ALIVE, member), value)

    @property
    def record(self) -> ReplicationRecord:
        """The record of the partition."""
        result = self.store.apply(self.now_ns, Range(KEYS.of_partition(KeyKind.PARTITION, VB)))
        assert isinstance(result, RangeResult)
        return decode_partition(result.items[0]).record

    def write(self, record: ReplicationRecord, *readers: str) -> None:
        """Write the record; these members read it, all if none is named."""
        self.write_raw(encode_partition(StoredPartition(record, "test")), *readers)

    def write_raw(self, value: bytes, *readers: str) -> None:
        self._put(KEYS.of_partition(KeyKind.PARTITION, VB), value)
        for member in readers or self.nodes:
            self.show(self.nodes[member])

    def show(self, node: CoreNode) -> None:
        """Let a node read the store."""
        found = self.store.apply(self.now_ns, Range(KEYS.root, is_prefix=True))
        assert isinstance(found, RangeResult)
        changed = node.session.view.replace(found.items, found.revision)
        node.session.reader.starts_over = False
        node.core.records_changed(self.now_ns, changed)

    # -- steps -------------------------------------------------------------------------------------

    def _move_wires(self) -> bool:
        moved = [wire.move() for wire in self.wires]
        self.refused += [wire.link.problem for wire in self.wires if not wire.is_open]
        self.wires = [wire for wire in self.wires if wire.is_open]
        return any(moved)

    def dial(self) -> None:
        """Connect the links that ask for it."""
        for node in self.nodes.values():
            for effect in node.told(Dial):
                link = node.core.replica.links[effect.member]
                if link.state is not LinkState.CLOSED:
                    self.wires.append(Wire(node, link, self.nodes[effect.member]))
            node.effects = [item for item in node.effects if not isinstance(item, Dial)]

    def settle(self) -> None:
        """Let groups and bytes come to rest; no time passes, and the store does not answer."""
        for _ in range(50):
            for node in self.nodes.values():
                node.commit()
            self.dial()
            if not self._move_wires() and not any(
                node.engine.keyspace.has_pending for node in self.nodes.values()
            ):
                return
        raise AssertionError("no rest")

    def tick(self, *members: str, ns: int = TICK_NS) -> None:
        """Let time pass for these members, for all if none is named."""
        self.now_ns += ns
        for wire in self.wires:
            if wire.peer.state.feed is not None:
                wire.peer.state.feed.tick(self.now_ns)
        for member in members or self.nodes:
            self.nodes[member].core.tick(self.now_ns)

    def run(self, ns: int, *, answers: bool = True) -> None:
        """Let time, bytes and groups move for a while; the store answers, or does not."""
        for _ in range(max(1, ns // TICK_NS)):
            self.tick()
            self.settle()
            while answers and any(node.submits for node in self.nodes.values()):
                for node in self.nodes.values():
                    while node.submits:
                        node.answer()
                for node in self.nodes.values():
                    self.show(node)
                self.settle()


UNKNOWN = OutcomeUnknown("the answer was lost")
