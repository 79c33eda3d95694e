"""Nodes in memory that hold copies of the same partitions, and the bytes between them.

Replication core, feeds, links and sessions are the product's. The test writes the replication
records, as a coordinator does, and decides when bytes, groups and time move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dcp.core.groups import Job, Published
from dcp.session.access.rights import FULL_RIGHTS, Role
from dcp.wire.frame import FrameDecoder
from dcp.wire.opcode import Opcode
from failover.coordinator.cluster_session import ClusterSession, SessionEffect
from failover.coordinator.partition_choices import CoordinatorSettings
from failover.coordinator.records import (
    AliveRecord,
    ClusterKeys,
    KeyKind,
    MemberRecord,
    StoredPartition,
    encode_partition,
    encode_record,
)
from failover.metadata.metastore import KeyValue
from failover.replication.effects import Dial
from failover.replication.link import LinkState, ReplicaLink
from failover.replication.mastership import ReplicationSettings
from failover.replication.messages import GroupMessage, Message, unpack_entries, unpack_group
from failover.replication.node import ReplicationCore
from failover.rules.replication_record import ReplicationRecord, create, elect
from support.memory_node import MemoryNode, Peer
from vbucket.engine.engine import SET
from vbucket.engine.partition import Partition, VbState
from vbucket.log.commit_group import CommitGroup
from vbucket.model.entry import key_of, vb_id_of
from vbucket.store.due import EXPIRY_AT, read_due

KEYS = ClusterKeys(b"/test/")
TICK_NS = 50_000_000
CLUSTER = "test"


class CopyNode(MemoryNode):
    """A node of the cluster. After `crash` it is another incarnation of the same member."""

    def __init__(self, copies: Copies, member: str, seed: int, partitions: int) -> None:
        self.copies = copies
        self.member = member
        self.incarnation = 0
        super().__init__(seed, partitions=partitions)

    def _open(self) -> None:
        super()._open()
        self.under_way: Job | None = None
        self.incarnation += 1
        self.session = ClusterSession(
            KEYS.root, self.member, self.incarnation, CoordinatorSettings()
        )
        self.core = ReplicationCore(
            self.engine, self.store, self.groups, self.session,
            ReplicationSettings(min_in_sync=1), self, cluster=CLUSTER, now_ns=self.copies.now_ns,
        )  # fmt: skip

    def ask_store(self, effects: Iterable[SessionEffect]) -> None:
        """Write nothing: the test writes the records."""

    def depose(self, vb_ids: tuple[int, ...], why: str) -> None:
        """No client waits."""

    def begin(self) -> None:
        """Take the open group, unless one is being written: it is on its way to the disk."""
        if self.under_way is None:
            self.under_way = self.next_job()

    def commit(self) -> None:
        """Write and sync what is under way, and all else."""
        if self.under_way is not None:
            job, self.under_way = self.under_way, None
            self.finish(job)
        super().commit()

    def begun(self, group: CommitGroup) -> None:
        self.core.group_begun(self.copies.now_ns, group)

    def published(self, published: Published) -> None:
        if published.group is not None:
            self.core.group_synced(self.copies.now_ns, published.group)

    def accept(self) -> Peer:
        """Return a connection of another node."""
        peer = self.connect()
        peer.joins(self.core.master)
        peer.state.login.rights = FULL_RIGHTS.granted(Role.REPLICATE)
        return peer


class Wire:
    """A link, the session on its other side, and the bytes that are on their way."""

    def __init__(self, node: CopyNode, link: ReplicaLink, master: CopyNode) -> None:
        self.node, self.link, self.master = node, link, master
        self.peer = master.accept()
        self.to_master = self.to_replica = b""
        self.is_open = True

    def take(self) -> bool:
        """Take what both sides have to send; return whether anything is on its way."""
        self.to_master += self.link.bytes_to_send()
        state = self.peer.state
        self.to_replica += b"".join(state.answers)
        state.answers.clear()
        sender = state.sender
        if sender is not None and sender.has_output:
            self.to_replica += b"".join(sender.pump(1 << 20))
        return bool(self.to_master or self.to_replica)

    def deliver(self, up: int, down: int) -> None:
        """Deliver so many bytes to the master's node, and to the replica's."""
        copies = self.node.copies
        data, self.to_master = self.to_master[:up], self.to_master[up:]
        if data:
            if (sender := self.peer.state.sender) is not None:
                sender.heard(copies.now_ns)
            self.peer.session.receive(data, self.master.now_ns)
        data, self.to_replica = self.to_replica[:down], self.to_replica[down:]
        if data:
            self.link.receive(data, copies.now_ns)

    def tick(self) -> None:
        """Let time pass for the master's side, and close what is over."""
        state = self.peer.state
        sender = state.sender
        is_alive = sender is None or (
            not sender.is_superseded and sender.tick(self.node.copies.now_ns)
        )
        if not is_alive or state.is_closing or self.link.state is LinkState.CLOSED:
            self.cut()

    def cut(self) -> None:
        """Lose the connection, and what was on its way."""
        if self.is_open:
            self.is_open = False
            if self.peer.state.sender is not None:
                self.peer.state.sender.close()
            self.link.closed()


class Copies:
    """See the module. Node "a" is the first master of all partitions."""

    def __init__(self, members: str = "ab", partitions: int = 4) -> None:
        self.now_ns = 10**12
        self.wires: list[Wire] = []
        self.problems: list[str] = []
        """Why links were closed by the replica's side."""
        self._revision = 1
        self._written: dict[int, int] = {}
        """The revision of each partition's record."""
        self.records: dict[int, ReplicationRecord] = {}
        self.nodes = {
            member: CopyNode(self, member, seed, partitions) for seed, member in enumerate(members)
        }
        for vb_id in range(partitions):
            self.write(vb_id, create(self.nodes))
        for vb_id in range(partitions):
            self.write(vb_id, elect(self.records[vb_id], members[0]))

    @property
    def a(self) -> CopyNode:
        return self.nodes["a"]

    @property
    def b(self) -> CopyNode:
        return self.nodes["b"]

    def master(self, vb_id: int) -> CopyNode:
        """Return the node that a record names."""
        member = self.records[vb_id].master
        assert member is not None
        return self.nodes[member]

    # -- records -----------------------------------------------------------------------------------

    def write(self, vb_id: int, record: ReplicationRecord) -> None:
        """Write a partition's record; all nodes see it at once."""
        self.records[vb_id] = record
        self._revision += 1
        self._written[vb_id] = self._revision
        for node in self.nodes.values():
            self.show(node)

    def show(self, node: CopyNode) -> None:
        """Show a node all records. It acts upon those that it has not seen."""
        items = [
            KeyValue(
                KEYS.of_member(KeyKind.MEMBER, member),
                encode_record(MemberRecord(member=member, address=member)),
                1, 1, 1,
            )
            for member in self.nodes
        ]  # fmt: skip
        items += [
            KeyValue(
                KEYS.of_member(KeyKind.ALIVE, member),
                encode_record(AliveRecord(member=member, incarnation=1)), 1, 1, 1,
            )
            for member in self.nodes
        ]  # fmt: skip
        items += [
            KeyValue(
                KEYS.of_partition(KeyKind.PARTITION, vb_id),
                encode_partition(StoredPartition(record, "test")),
                1, self._written[vb_id], 1,
            )
            for vb_id, record in self.records.items()
        ]  # fmt: skip
        node.session.reader.starts_over = False
        node.core.records_changed(self.now_ns, node.session.view.replace(items, self._revision))

    def revive(self) -> None:
        """Show all nodes that all members are alive."""
        self._revision += 1
        alive = [
            KeyValue(
                KEYS.of_member(KeyKind.ALIVE, member),
                encode_record(AliveRecord(member=member, incarnation=1)),
                self._revision, self._revision, 1,
            )
            for member in self.nodes
        ]  # fmt: skip
        for node in self.nodes.values():
            node.session.view.learn(alive, self._revision)

    # -- steps -------------------------------------------------------------------------------------

    def dial(self) -> None:
        """Connect the links that ask for it."""
        for node in self.nodes.values():
            for effect in node.core.take_effects():
                if isinstance(effect, Dial):
                    link = node.core.replica.links[effect.member]
                    self.wires.append(Wire(node, link, self.nodes[effect.member]))

    def move(self, up: int = 1 << 30, down: int = 1 << 30) -> bool:
        """Deliver bytes on all connections; return whether there were any."""
        self.dial()
        has_moved = False
        for wire in self.wires:
            if wire.take():
                has_moved = True
                wire.deliver(up, down)
        self._sweep()
        return has_moved

    def tick(self) -> None:
        """Let TICK_NS pass."""
        self.now_ns += TICK_NS
        for node in self.nodes.values():
            node.now_ns += TICK_NS
            node.engine.begin_batch(node.now_ns)
            node.core.tick(self.now_ns)
        for wire in self.wires:
            wire.tick()
        self._sweep()

    def _sweep(self) -> None:
        for wire in self.wires:
            if wire.link.state is LinkState.CLOSED and wire.is_open:
                self.problems.append(wire.link.problem)
                wire.cut()
        self.wires = [wire for wire in self.wires if wire.is_open]

    def rest(self) -> None:
        """Let everything come to rest: groups, bytes, and time for what waits for it."""
        for _ in range(200):
            for node in self.nodes.values():
                node.commit()
            self.move()
            if self._is_level():
                return
            if not any(wire.take() for wire in self.wires):
                self.tick()
        raise AssertionError(f"no rest; links: {self.problems}")

    def _is_level(self) -> bool:
        """Whether every copy holds what its master has committed, and the master serves."""
        for vb_id in self.records:
            master = self.master(vb_id).engine.partitions[vb_id]
            for node in self.nodes.values():
                part = node.engine.partitions[vb_id]
                if (part.vb_uuid, part.committed_seqno) != (master.vb_uuid, master.high_seqno):
                    return False
            if master.state != VbState.ACTIVE:
                return False
        return True

    def until(self, condition: Callable[[], bool]) -> None:
        """Let bytes, groups and time move until something holds."""
        for _ in range(200):
            if condition():
                return
            for node in self.nodes.values():
                node.commit()
            self.move()
            self.tick()
        raise AssertionError(f"it never holds; links: {self.problems}")


def holdings(node: CopyNode, vb_id: int) -> dict[str, Any]:
    """Return everything that copies of a partition have in common at rest."""
    part: Partition = node.engine.partitions[vb_id]
    entries = node.engine.versions.entries(part, 1, part.high_seqno, 1 << 40)
    return {
        "entries": entries,
        "versions": part.failover.to_document(),
        "epoch": part.leader_epoch,
        "floors": (part.history_floor, part.purge_seqno),
        "documents": part.item_count,
        "cas": part.max_cas,
        "seqnos": (part.high_seqno, part.synced_seqno, part.committed_seqno),
        "due": due_documents(node, part),
    }


def due_documents(node: CopyNode, part: Partition) -> set[tuple[int, bytes]]:
    """Return (expiry, key) of the documents that the pager will find when they are due."""
    due = {
        (expiry_of(entry), key_of(entry))
        for layer in node.engine.due.layers()
        for held in layer.lists()
        for entry in held
        if vb_id_of(entry) == part.vb_id
    }
    for row, value in node.store.due_rows(b"", 2**32 - 1):
        found = read_due(row, bytes(value))
        if found.vb_id == part.vb_id:
            due.add((found.expiry, found.key))
    documents = ((key, node.engine.document_entry(part, key)) for _, key in due)
    return due & {(expiry_of(entry), key) for key, entry in documents if entry is not None}


def expiry_of(entry: bytes) -> int:
    return int.from_bytes(entry[EXPIRY_AT : EXPIRY_AT + 4], "big")


def put(copies: Copies, vb_id: int, key: bytes = b"\0k") -> None:
    """Write a document on node a."""
    node = copies.a
    node.now_ns += 1 << 16
    node.engine.begin_batch(node.now_ns)
    assert node.engine.store(SET, vb_id, key, key + b"v", 0, 0, 0, 0)[0] == 0


def messages_to(copies: Copies, member: str) -> list[Message | GroupMessage]:
    """Return what is on its way to a member, without delivering it."""
    wire = next(wire for wire in copies.wires if wire.node.member == member)
    wire.take()
    kinds = {Opcode.X_REPLICA_ENTRIES: unpack_entries, Opcode.X_REPLICA_GROUP: unpack_group}
    frames = FrameDecoder().feed(wire.to_replica)
    return [kinds[Opcode(frame.opcode)](frame) for frame in frames if frame.opcode in kinds]


def groups_to(copies: Copies, member: str) -> list[bytes]:
    """Return the whole groups that are on their way to a member."""
    found = messages_to(copies, member)
    return [each.entries for each in found if isinstance(each, GroupMessage) and each.entries]
