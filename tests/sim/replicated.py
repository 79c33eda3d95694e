"""A cluster of replicated nodes: members, records, the metadata store and its faults."""

from __future__ import annotations

import json
from contextlib import suppress

from clients.errors import TopologyError
from clients.link.copies import Copies
from clients.link.topology import Topology, parse_topology
from failover.coordinator.meta_restore import NodeTestimony
from failover.coordinator.records import (
    ClusterKeys,
    ClusterRecord,
    KeyKind,
    ManifestRecord,
    MemberRecord,
    OperatorCommand,
    StoredPartition,
    decode_partition,
    decode_record,
    encode_partition,
    encode_record,
)
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import KeyValue, Put, Range, RangeResult, Txn
from failover.metadata.revision_store import RevisionStore, StoreImage
from failover.rules.replication_record import ReplicationRecord, add_copy, create, majority, want
from sim.cluster import Setting
from sim.cluster_node import ROOT, ClusterNode
from sim.facts import LostFolder
from sim.faults import Controls, Mend
from sim.in_sync import InSyncWatch
from sim.kv_client import Caller
from sim.machine import Machine
from sim.manifests import changed, ids, max_ttls
from sim.moments import STORE, of_record
from sim.move_watch import MoveWatch
from sim.node import StartFailedError, StartRefusedError
from sim.operator import Operator
from sim.plan import MOVE_NODES
from sim.record_watch import RecordWatch
from sim.restorer import Nodes, Restorer
from sim.routed_caller import KV_PORT, RoutedCaller
from sim.routing import OfMasters, Routing
from sim.store_client import StoreClient
from sim.unserved import why_unserved
from sim.world import SECOND, Host, World
from support.metastore_faults import Absence
from vbucket.log.device import LogWriteError, SyncFailedError, UnknownFormatError
from vbucket.log.record import LogDamagedError
from vbucket.model.manifest import INITIAL_MANIFEST
from vbucket.store.environment import StoreDamagedError

KEYS = ClusterKeys(ROOT)
FOLDERS_LOST_MAX = 1
"""Folders that one machine loses in a run: each adds a copy."""
GOES_BACK_MAX = 2
"""How often the store goes back in a run, so that some of it is about something else."""
MASTERS_RETURN_S = 0.7
"""Of clusters that move copies: about as long as an election takes."""
_ABSENCES = (Absence.REFUSING, Absence.SILENT, Absence.DEAF_TO_ANSWERS)
_STORE_HARMS = {
    "slow": StoreClient.be_slow,
    "late": StoreClient.be_late,
    "deaf": StoreClient.be_deaf,
    "forgets": StoreClient.forget_answers,
    "forgets_write": StoreClient.forget_next_write,
    "compacts": StoreClient.compact,
}


def _member_put(member: str, name: str) -> Put:
    record = MemberRecord(member=member, address=name)
    return Put(KEYS.of_member(KeyKind.MEMBER, member), encode_record(record))


MASTER_ONE_OF = 8
"""How often a consumer that reads from copies looks at the master first."""
RETURN_S = 0.5
"""When it asks copies again that were damaged: a run is short."""


class MapRouting(OfMasters):
    """Knows the newest map that any node has told; without one, it tries nodes in turn."""

    def __init__(self, world: World, nodes: list[str]) -> None:
        self._world = world
        self._nodes = nodes
        self._version = 0, 0
        """(revEpoch, rev)"""
        self._masters: list[str | None] = []

    def node_of(self, vb_id: int) -> str | None:
        """See Routing."""
        master = self._masters[vb_id] if self._masters else None
        if master is None:
            return self._nodes[self._world.below(len(self._nodes))]
        return master

    def refused(self, vb_id: int, node: str, status: int, body: bytes) -> None:
        """See Routing."""
        try:
            told = json.loads(body)
            version = told.get("revEpoch", 0), told["rev"]
            servers = told["vBucketServerMap"]["serverList"]
            chains = told["vBucketServerMap"]["vBucketMap"]
        except (ValueError, KeyError, TypeError):
            self._forget(vb_id)
            return
        if version >= self._version:
            self._version = version
            names = [server.partition(":")[0] for server in servers]
            self._masters = [names[chain[0]] if chain[0] >= 0 else None for chain in chains]

    def lost(self, node: str) -> None:
        """See Routing."""
        for vb_id, master in enumerate(self._masters):
            if master == node:
                self._masters[vb_id] = None

    def _forget(self, vb_id: int) -> None:
        if self._masters:
            self._masters[vb_id] = None


class CopyRouting(MapRouting):
    """Sends most partitions to nodes that are not their masters. Where one cannot read its copy,
    the clients' rule says which comes next, and which is the last one (`clients.link.copies`).
    """

    def __init__(self, world: World, nodes: list[str]) -> None:
        super().__init__(world, nodes)
        self._copies = Copies(return_after_s=RETURN_S)
        self._newest: Topology | None = None
        self._damaged: set[tuple[int, str]] = set()

    def refused(self, vb_id: int, node: str, status: int, body: bytes) -> None:
        """See Routing."""
        super().refused(vb_id, node, status, body)
        with suppress(TopologyError):
            newest = parse_topology(body, node)
            if newest.is_newer_than(self._newest):
                self._newest = newest

    def node_of(self, vb_id: int) -> str | None:
        """See Routing."""
        if self._copies.return_when_due(self._world.now_ns / SECOND):
            self._damaged.clear()
        master = super().node_of(vb_id)
        others = [name for name in self._nodes if name != master]
        node = master
        if others and self._world.below(MASTER_ONE_OF):
            node = others[self._world.below(len(others))]
        if node is None or (vb_id, node) not in self._damaged:
            return node
        if self._newest is None:
            return next(iter(self._sound(vb_id)), node)
        place = self._copies.chosen(self._newest).place_of(vb_id)
        return node if place is None else place[0]

    def _sound(self, vb_id: int) -> list[str]:
        return [name for name in self._nodes if (vb_id, name) not in self._damaged]

    def left_out(self, vb_id: int, node: str) -> None:
        """See Routing."""
        self._damaged.add((vb_id, node))
        self._copies.leave_out(vb_id, (node, KV_PORT), self._world.now_ns / SECOND)

    def is_last(self, vb_id: int, node: str) -> bool:
        """See Routing."""
        if self._newest is None:
            return len(self._sound(vb_id)) <= 1
        return self._copies.is_last(self._newest, vb_id)


class ReplicatedNodes:
    """See the module. Also what only a cluster can suffer (`Controls`)."""

    node_type = ClusterNode

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._world = setting.world
        self.controls: Controls | None = self
        self.store = RevisionStore()
        self._records = RecordWatch(self._changed)
        self._clients: dict[str, StoreClient] = {}
        """By machine."""
        self._watch = InSyncWatch(
            setting.world, setting.facts, setting.plan.partitions,
            self._records.newest, lambda member: member.rpartition("-")[0],
            reads_copies=bool(setting.plan.from_replicas),
        )  # fmt: skip
        self._names = [f"n{number}" for number in range(1, setting.plan.nodes + 1)]
        self._members = {name: f"{name}-1" for name in self._names}
        """Machine -> the member that its folder is."""
        self._machines: dict[str, Machine] = {}
        """By member."""
        self._unclean: set[tuple[int, int]] = set()
        self._branching: set[int] = set()
        self._lost: list[str] = []
        self._read: dict[int, tuple[KeyValue, ReplicationRecord]] = {}
        """The records that were read at a revision of the store; they are looked at often."""
        self._read_at = -1
        self._dead: set[str] = set()
        """Members whose folders are lost."""
        self._went_back = 0
        self.restorer = Restorer(
            setting.world,
            Nodes(
                lambda: self.store,
                self._views,
                self._testimonies,
                self._all_run,
                self._are_unproven,
                self._collections_uid,
            ),
        )
        self.operator: Operator | None = None
        """Of clusters that move copies."""
        self._moves: MoveWatch | None = None
        if setting.plan.nodes >= MOVE_NODES:
            self.operator = Operator(
                setting.world, lambda: self.store, setting.plan.copies, self._views,
                lambda: self._dead,
            )  # fmt: skip
            self._moves = MoveWatch(
                setting.world, lambda: self.store, setting.facts, setting.plan.copies,
                self.restorer.restored,
            )  # fmt: skip

    def boot(self, machine: Machine) -> ClusterNode:
        """See Cluster."""
        client = self._clients.get(machine.name)
        if client is None:
            client = StoreClient(self._world, machine.host, self.store)
            self._clients[machine.name] = client
        client.process_began()
        setting = self._setting
        try:
            make_node = setting.node_type or self.node_type
            node = make_node(machine, setting.plan, setting.facts, client, self._note_record)
        except (LogDamagedError, UnknownFormatError, StoreDamagedError) as error:
            raise StartRefusedError(str(error)) from error
        except (LogWriteError, SyncFailedError) as error:
            raise StartFailedError(str(error)) from error
        node.note_committed = self._watch.committed
        self._watch.booted(machine, node)
        self._machines[node.member] = machine
        self._join(node.member, machine.name)
        return node

    def _join(self, member: str, name: str) -> None:
        """Make a machine's new folder a member; it gets the copies that the old one had."""
        before = self._members[name]
        if member == before:
            return
        self._members[name] = member
        puts = [_member_put(member, name)]
        if self.operator is not None:  # the operator removes the old member, which moves its copies
            self.store.apply(self._world.now_ns, Txn((), tuple(puts)))
            return
        for vb_id in range(self._setting.plan.partitions):
            item, record = self._stored(vb_id)
            if before in record.copies:
                more = StoredPartition(add_copy(record, member), f"joined{self._world.now_ns}")
                puts.append(Put(item.key, encode_partition(more)))
        self.store.apply(self._world.now_ns, Txn((), tuple(puts)))

    def _note_record(self, vb_id: int, record: ReplicationRecord) -> None:
        """A node sees a new record, and acts on it next: note what it excuses."""
        world, facts = self._world, self._setting.facts
        if record.unclean_epoch == record.epoch and (vb_id, record.epoch) not in self._unclean:
            self._unclean.add((vb_id, record.epoch))
            is_given_up = (vb_id, record.epoch) in self.restorer.given_up
            alone = next(iter(record.isr)) if is_given_up else ""  # who has the longest log
            machine = self._machines.get(record.master or alone)
            node = machine.node if machine is not None else None
            kept_seqno = 0
            if isinstance(node, ClusterNode):
                kept_seqno = self._watch.shared_seqno(node.engine.partitions[vb_id])
            facts.excuse(world.now_ns, vb_id, kept_seqno, "unclean")
        if record.branch is not None:
            self._branching.add(vb_id)
        elif vb_id in self._branching:
            self._branching.discard(vb_id)
            facts.settle(world.now_ns, vb_id)

    def caller(self, host: Host) -> Caller:
        """See Cluster."""
        setting = self._setting
        return RoutedCaller(
            setting.network, host, setting.facts, self._names, setting.plan.timeout_ns
        )

    def routing(self) -> Routing:
        """See Cluster."""
        kind = CopyRouting if self._setting.plan.from_replicas else MapRouting
        return kind(self._world, self._names)

    def begin(self) -> None:
        """Write the records of members and partitions, as the making of a cluster does."""
        plan = self._setting.plan
        members = list(self._members.values())
        puts = [_member_put(member, name) for name, member in self._members.items()]
        if plan.founded_ns:
            self._world.after(plan.founded_ns, self._create_partitions, members)
        else:
            puts += self._partition_puts(members)
        returns_s = 0.0 if self.operator is None else MASTERS_RETURN_S
        cluster = ClusterRecord(
            copies=plan.copies, min_in_sync=plan.min_in_sync, masters_return_s=returns_s
        )
        puts.append(Put(KEYS.cluster, encode_record(cluster)))
        self.store.apply(self._world.now_ns, Txn((), tuple(puts)))
        self._records.follow(self._world.now_ns, self.store)
        self._watch.begin()
        self.restorer.begin()
        if self.operator is not None:
            self.operator.begin()

    def _partition_puts(self, members: list[str]) -> list[Put]:
        puts, plan = [], self._setting.plan
        for vb_id in range(plan.partitions):
            holders = members if self.operator is None else members[:-1]  # the last one is new
            copies = [holders[(vb_id + at) % len(holders)] for at in range(plan.copies)]
            stored = StoredPartition(create(copies), "made")
            puts.append(Put(KEYS.of_partition(KeyKind.PARTITION, vb_id), encode_partition(stored)))
        return puts

    def _create_partitions(self, members: list[str]) -> None:
        self.store.apply(self._world.now_ns, Txn((), tuple(self._partition_puts(members))))
        self._records.follow(self._world.now_ns, self.store)

    def mend(self) -> None:
        """See Cluster."""
        for client in self._clients.values():
            client.mend()
        self.restorer.is_tidying = True
        if self.operator is not None:
            self.operator.is_tidying = True

    def why_unsettled(self) -> str:
        """See Cluster."""
        if self._moves is None:
            return ""
        for view in self._views():
            if lost := sorted(self._dead & view.members.keys()):
                return f"{lost[0]} is a member, and its folder is lost"
        nodes = [(machine.node, member) for member, machine in self._machines.items()]
        return self._moves.why_unsettled([
            (node.member, node.engine) for node, member in nodes
            if isinstance(node, ClusterNode) and node.member == member
        ])  # fmt: skip

    def why_unserved(self, vb_id: int) -> str:
        """See Cluster."""
        return why_unserved(vb_id, self.record(vb_id), self._machines)

    def _views(self) -> list[ClusterView]:
        return [
            machine.node.session.view
            for machine in dict.fromkeys(self._machines.values())
            if isinstance(machine.node, ClusterNode) and machine.node.session.view.is_loaded
        ]

    def _testimonies(self, operation: str) -> list[NodeTestimony]:
        """Return what the nodes that run have."""
        nodes = [machine.node for machine in dict.fromkeys(self._machines.values())]
        return [node.testimony(operation) for node in nodes if isinstance(node, ClusterNode)]

    def _are_unproven(self) -> bool:
        nodes = [machine.node for machine in dict.fromkeys(self._machines.values())]
        return any(isinstance(node, ClusterNode) and node.core.unproven for node in nodes)

    def _collections_uid(self) -> int:
        nodes = [machine.node for machine in dict.fromkeys(self._machines.values())]
        uids = (n.engine.keyspace.manifest.uid for n in nodes if isinstance(n, ClusterNode))
        return max(uids, default=0)

    def _all_run(self) -> bool:
        machines = dict.fromkeys(self._machines.values())
        return all(machine.node is not None for machine in machines)

    def _changed(
        self, vb_id: int, before: ReplicationRecord | None, record: ReplicationRecord
    ) -> None:
        self._world.tell(*self._told_of(before, record), vb_id)
        if self._moves is not None:
            self._moves.changed(vb_id, before, record)

    @staticmethod
    def _told_of(
        before: ReplicationRecord | None, record: ReplicationRecord
    ) -> tuple[str, str, str]:
        kind, text = of_record(before, record)
        return kind, STORE, text

    # -- Controls ----------------------------------------------------------------------------------

    def handover(self, vb_id: int, wanted: str | None = None) -> None:
        """See Controls."""
        if vb_id in self._records.older:
            return  # the product changes no record that somebody reports
        item, record = self._stored(vb_id)
        member = self._members[wanted] if wanted is not None else None
        if member not in record.copies:
            member = record.copies[self._world.below(len(record.copies))]
        stored = StoredPartition(want(record, member), f"wanted{self._world.now_ns}")
        self.store.apply(self._world.now_ns, Txn((), (Put(item.key, encode_partition(stored)),)))

    def record(self, vb_id: int) -> ReplicationRecord:
        """See Controls."""
        return self._stored(vb_id)[1]

    def in_sync(self, vb_id: int) -> frozenset[str]:
        """See Controls."""
        return frozenset(member.rpartition("-")[0] for member in self.record(vb_id).isr)

    def elect_unclean(self, vb_id: int) -> bool:
        """See Controls."""
        _, record = self._stored(vb_id)
        command = OperatorCommand(elect_uncleanly_in_epoch=record.epoch)
        key = KEYS.of_partition(KeyKind.COMMAND, vb_id)
        self.store.apply(self._world.now_ns, Txn((), (Put(key, encode_record(command)),)))
        return True

    def change_collections(self) -> None:
        """See Controls."""
        if self._went_back and (not self._all_run() or self.restorer.lacks_collections()):
            return  # a list that is made from an older one gives ids again
        found = self.store.apply(self._world.now_ns, Range(KEYS.manifest))
        assert isinstance(found, RangeResult)
        manifest = INITIAL_MANIFEST
        for item in found.items:
            manifest = decode_record(item, ManifestRecord).manifest()
        manifest = changed(self._world, manifest, self._setting.plan.max_ttl_s)
        self._setting.facts.collections = ids(manifest)
        self._setting.facts.max_ttls |= max_ttls(manifest)
        put = Put(KEYS.manifest, encode_record(ManifestRecord.of(manifest)))
        self.store.apply(self._world.now_ns, Txn((), (put,)))
        self._world.note(f"collections {manifest.uid}")

    def operate(self, kind: str, machine: str | None = None) -> bool:
        """See Controls."""
        about = None if machine is None else self._members[machine]
        return self.operator is not None and self.operator.ask(kind, about)

    def may_lose_folder(self, machine: str) -> bool:
        """See Controls: somebody else has all that is committed."""
        member = self._members[machine]
        if sum(name == machine for name in self._lost) >= FOLDERS_LOST_MAX:
            return False
        if self._went_back:
            return False  # who has seen that the store is older may be lost with the folder
        down = {name for name, other in self._machines.items() if other.node is None}
        gone = self._dead | {member} | down  # the others may be left behind before they are back
        records = [self._stored(vb_id)[1] for vb_id in range(self._setting.plan.partitions)]
        if any(self._dead & record.isr or record.isr <= gone for record in records):
            return False  # one after the other: a majority has to be left to report
        copies = self._setting.plan.copies
        lost = (len((self._dead | {member}).intersection(record.copies)) for record in records)
        if any(copies < majority(copies + number) for number in lost):
            return False  # a lost copy stays in the record, and counts for majorities
        if any(self._may_be_left_to(gone, machine) for machine in self._machines.values()):
            return False
        self._lost.append(machine)
        self._setting.facts.lost_folders.append(LostFolder(self._world.now_ns, machine))
        self._dead.add(member)
        return True

    @staticmethod
    def _may_be_left_to(gone: set[str], machine: Machine) -> bool:
        """Whether a master has asked for an in-sync set of these members only, and is not answered:
        the store may have that record a moment later.
        """
        node = machine.node
        return isinstance(node, ClusterNode) and any(
            mastership.asked is not None and mastership.asked <= gone
            for mastership in node.core.master.masterships.values()
        )

    def harm_store(self, kind: str, machine: str | None = None) -> Mend | None:
        """See Controls."""
        clients = list(self._clients.values()) if machine is None else [self._clients[machine]]
        way = _ABSENCES[self._world.below(len(_ABSENCES))]
        for client in clients:
            if kind == "away":
                client.be_away(way)
            else:
                _STORE_HARMS[kind](client)

        def mend() -> None:
            for client in clients:
                client.mend()

        return mend

    def copy_store(self) -> Mend | None:
        """See Controls."""
        if self._went_back >= GOES_BACK_MAX or self._dead:
            return None
        image = self.store.image()

        def put_back() -> None:
            if self._went_back < GOES_BACK_MAX and not self._dead:
                self._went_back += 1
                self._world.note(f"the store goes back to revision {image.revision}")
                text = f"goes back to its copy of revision {image.revision}"
                self._world.tell("store goes back", STORE, text)
                self._replace_store(image)

        return put_back

    def restart_store(self) -> Mend:
        """See Controls."""
        self._replace_store(self.store.image())
        return _nothing

    def _replace_store(self, image: StoreImage) -> None:
        """There is another store from now on; leases have their whole time again."""
        now_ns = self._world.now_ns
        store = self.store = RevisionStore.of_image(image, now_ns)
        for deadline_ns in store.deadlines_ns():
            self._world.after(deadline_ns - now_ns, self._expire, store)
        self._read_at = -1
        self._records.follow(now_ns, store)
        for client in self._clients.values():
            client.replace_store(store)

    def _expire(self, store: RevisionStore) -> None:
        store.expire(self._world.now_ns)

    def store_cut(self, machine: str) -> Mend:
        """See Controls."""
        client = self._clients[machine]
        ways = (Absence.SILENT, Absence.DEAF_TO_ANSWERS)
        client.be_away(ways[self._world.below(2)])
        return client.mend

    def _stored(self, vb_id: int) -> tuple[KeyValue, ReplicationRecord]:
        if self._read_at != self.store.revision:
            self._read_at, self._read = self.store.revision, {}
        found = self._read.get(vb_id)
        if found is None:
            key = KEYS.of_partition(KeyKind.PARTITION, vb_id)
            result = self.store.apply(self._world.now_ns, Range(key))
            assert isinstance(result, RangeResult)
            found = self._read[vb_id] = result.items[0], decode_partition(result.items[0]).record
        return found


def _nothing() -> None:
    """There is nothing to mend."""
