"""Nodes with real cluster sessions and a plain model of replication, in virtual time.

A node holds a log end for each partition. It hears another node if both run and the link between
them is not cut. A replica that does not hear its master reports it; a master hands over when asked
to, and takes silent members out of its in-sync set and heard ones in. Nothing of that moves
documents: what is tested is who becomes master.

`PlannedCluster`: whole clusters of coordinators, and an operator who asks for plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from random import Random

from failover.coordinator.cluster_session import ClusterSession, SessionEffect, StoreDriver
from failover.coordinator.coordinator import Elected
from failover.coordinator.effects import Notice
from failover.coordinator.partition_choices import CoordinatorSettings
from failover.coordinator.plans.plan_steps import progress_of
from failover.coordinator.plans.request_answers import (
    Answer,
    Prepared,
    Stamp,
)
from failover.coordinator.record_writer import RecordChange, WriteOutcome
from failover.coordinator.records import (
    ClusterKeys,
    ClusterRecord,
    KeyKind,
    MemberRecord,
    ReportedPartition,
    StoredPartition,
    decode_partition,
    encode_partition,
    encode_record,
)
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import (
    Put,
    Range,
    Txn,
    TxnResult,
    WatchBatch,
    WatchEvent,
    WatchMessage,
)
from failover.metadata.revision_store import RevisionStore
from failover.rules.replication_record import (
    HandedOver,
    ReplicationRecord,
    create,
    expand,
    hand_over,
    is_master,
    shrink,
)
from memory.meta_store import MemoryWatch
from support.metastore_faults import MS, FaultyMetaStore, StoreFaults
from support.waiting import VirtualTime

ROOT = b"/test/"
KEYS = ClusterKeys(ROOT)
TICK_NS = 50 * MS
SILENT_NS = 200 * MS
"""A replica reports after it has not heard its master for so long."""
VB_UUID = 77


class ModelNode:
    """One process of a member, and the folder that survives it."""

    def __init__(self, cluster: ModelCluster, member: str) -> None:
        self.cluster = cluster
        self.member = member
        self.faults = StoreFaults()
        self.store = FaultyMetaStore(
            cluster.store, cluster.time.now, cluster.time.schedule, cluster.random, self.faults
        )
        self.incarnation = 0
        self.is_up = False
        self.is_paused = False
        self.hands_over = True
        self.driver: StoreDriver | None = None
        self.ends: dict[int, tuple[int, int]] = {}
        """Partition -> (epoch of its newest version, log end)."""
        self.heard_ns: dict[int, int] = {}
        self.first_epochs: dict[int, int] = {}
        self.notices: list[str] = []
        self.elected: list[Elected] = []
        self.outcomes: list[WriteOutcome] = []

    @property
    def session(self) -> ClusterSession:
        assert self.driver is not None
        return self.driver.session

    def start(self) -> None:
        assert not self.is_up
        self.incarnation += 1
        self.is_up, self.is_paused = True, False
        self.heard_ns, self.first_epochs = {}, {}
        session = ClusterSession(ROOT, self.member, self.incarnation, self.cluster.settings)
        self.driver = StoreDriver(session, self.store, self)
        self._tick_later(self.driver)

    def kill(self) -> None:
        self.is_up = False
        assert self.driver is not None
        self.driver.close()

    def now_ns(self) -> int:
        return self.cluster.time.now_ns

    def guarded(self, step: Callable[[], None]) -> None:
        step()

    def take(self, effect: SessionEffect) -> None:
        if isinstance(effect, Notice):
            self.notices.append(effect.text)
        elif isinstance(effect, Elected):
            self.elected.append(effect)
        elif isinstance(effect, WriteOutcome):
            self.outcomes.append(effect)

    def hears(self, member: str) -> bool:
        other = self.cluster.nodes[member]
        cut = {frozenset((self.member, member))}
        return other.is_up and not other.is_paused and not cut & self.cluster.cuts

    def serves(self, vb_id: int) -> bool:
        record = self.session.view.partitions[vb_id].content.record
        return is_master(record, self.member, self.first_epochs[vb_id])

    # ---- The model of replication

    def _tick_later(self, driver: StoreDriver) -> None:
        def tick() -> None:
            if self.driver is driver and self.is_up:
                if not self.is_paused:
                    self._work(driver)
                self._tick_later(driver)

        self.cluster.time.schedule(TICK_NS, tick)

    def _work(self, driver: StoreDriver) -> None:
        driver.tick()
        now_ns = self.cluster.time.now_ns
        view = self.session.view
        suspects, changes = [], []
        asked = view.reported_by_others(self.member)
        for vb_id, stored in sorted(view.partitions.items()):
            record = stored.content.record
            if self.member not in record.copies:
                continue
            first_epoch = self.first_epochs.setdefault(vb_id, self.first_epoch(record))
            if is_master(record, self.member, first_epoch):
                changed = self._as_master(vb_id, record)
                if changed != record:
                    changes.append(RecordChange(vb_id, changed, stored))
            elif self._suspects(now_ns, vb_id, record):
                version_epoch, end = self.ends.setdefault(vb_id, (1, 0))
                suspects.append(
                    ReportedPartition(
                        vb_id, record.epoch, VB_UUID, version_epoch, end, True, *record.rank
                    )
                )
                continue
            if vb_id in asked:
                suspects.append(ReportedPartition(vb_id, 0, VB_UUID, 1, 0, False, *record.rank))
        driver.carry_out(self.session.report(now_ns, tuple(suspects)))
        if changes and self.session.may_write:
            driver.carry_out(self.session.write(now_ns, changes))

    def first_epoch(self, record: ReplicationRecord) -> int:
        """The first start of all has seen the records from their creation."""
        return 0 if self.incarnation == 1 else record.epoch

    def _suspects(self, now_ns: int, vb_id: int, record: ReplicationRecord) -> bool:
        is_heard = record.master not in {None, self.member} and self.hears(record.master)
        if is_heard:
            self.heard_ns[vb_id] = now_ns
        return now_ns - self.heard_ns.setdefault(vb_id, now_ns) >= SILENT_NS

    def _as_master(self, vb_id: int, record: ReplicationRecord) -> ReplicationRecord:
        end = self.ends.get(vb_id, (1, 0))[1] + 1
        self.ends[vb_id] = (record.epoch, end)
        others = set(record.copies) - {self.member}
        heard = {member for member in others if self.hears(member)}
        for member in heard & record.isr:
            self.cluster.nodes[member].ends[vb_id] = self.ends[vb_id]
        wanted = record.wanted_master
        if self.hands_over and wanted in record.isr & heard:
            return hand_over(record, HandedOver(VB_UUID, end))
        if record.isr - heard - {self.member}:
            return shrink(record, record.isr - heard - {self.member})
        joining = heard - record.isr
        return expand(record, joining) if joining else record


class ModelCluster:
    """Nodes, their links, and the one store."""

    def __init__(
        self,
        members: Iterable[str] = "abc",
        partitions: int = 2,
        seed: int = 1,
        settings: CoordinatorSettings | None = None,
    ) -> None:
        self.random = Random(seed)
        self.settings = settings if settings is not None else CoordinatorSettings()
        self.time = VirtualTime()
        self.store = RevisionStore()
        self.cuts: set[frozenset[str]] = set()
        self.history: list[WatchMessage] = []
        self.nodes = {member: ModelNode(self, member) for member in members}
        for vb_id in range(partitions):
            names = list(self.nodes)
            turn = vb_id % len(names)
            self.put(vb_id, create(names[turn:] + names[:turn]))

    def put(self, vb_id: int, record: ReplicationRecord) -> None:
        """Write a record as an operator would, past all sessions."""
        self.put_bytes(vb_id, encode_partition(StoredPartition(record, "operator")))

    def put_bytes(self, vb_id: int, value: bytes) -> None:
        self.put_key(KEYS.of_partition(KeyKind.PARTITION, vb_id), value)

    def put_key(self, key: bytes, value: bytes) -> None:
        self.store.apply(self.time.now_ns, Txn(then=(Put(key, value),)))

    def start(self) -> ModelCluster:
        for node in self.nodes.values():
            node.start()
        return self

    def keep_history(self) -> None:
        """Remember all changes of records from now on, whatever is compacted."""
        self._watch = MemoryWatch(ROOT, self.store.revision + 1, self.history.append)
        self.store.subscribe(lambda: self._watch.catch_up(self.store))
        for item in self.store.apply(0, Range(ROOT, is_prefix=True)).items:
            self.history.append(WatchBatch(item.mod_revision, (WatchEvent(item),)))

    def batches(self, key: bytes) -> list[WatchBatch]:
        """Return the changes of one key, in order."""
        assert all(isinstance(message, WatchBatch) for message in self.history)
        found = [
            WatchBatch(batch.revision, tuple(e for e in batch.events if e.item.key == key))
            for batch in self.history
        ]
        return [batch for batch in found if batch.events]

    def run(self, seconds: float) -> None:
        self.time.run_until(self.time.now_ns + round(seconds * 1000) * MS)

    def run_until(self, is_so, seconds: float = 30) -> float:
        """Run until a condition holds; return how many seconds it took."""
        begin_ns = self.time.now_ns
        self.time.run_while(lambda: not is_so(), round(seconds * 1000) * MS)
        return (self.time.now_ns - begin_ns) / 1000 / MS

    def values(self) -> dict[bytes, bytes]:
        read = self.store.apply(self.time.now_ns, Range(ROOT, is_prefix=True))
        return {item.key: item.value for item in read.items}

    def record(self, vb_id: int = 0) -> ReplicationRecord:
        key = KEYS.of_partition(KeyKind.PARTITION, vb_id)
        (item,) = self.store.apply(self.time.now_ns, Range(key)).items
        return decode_partition(item).record

    def leaders(self) -> list[str]:
        """The members that believe to lead."""
        return [
            node.member
            for node in self.nodes.values()
            if node.is_up and node.session.coordinator.term > 0
        ]

    def leader(self) -> str:
        (leader,) = self.leaders()
        return leader


PARTITIONS = 12


class Cluster(ModelCluster):
    """Nodes that are members, and an operator. `plain` members hold the copies at the beginning."""

    def __init__(
        self,
        members: str = "abcd",
        plain: str = "abc",
        copies: int = 3,
        *,
        cut: str = "",
        racks: Mapping[str, str] | None = None,
        **numbers: float,
    ) -> None:
        super().__init__(members, 0, settings=CoordinatorSettings())
        for vb_id in range(PARTITIONS):
            turn = vb_id % len(plain)
            chain = (plain[turn:] + plain[:turn])[:copies]
            self.put(vb_id, create(chain))
        cluster = ClusterRecord(copies=copies, **numbers)  # type: ignore[arg-type]
        self.put_key(KEYS.cluster, encode_record(cluster))
        for member in members:
            self.join(member, rack=(racks or {}).get(member, ""))
        if cut:
            self.cuts.add(frozenset(cut))
        self.keep_history()
        self.start()
        self.run_until(self.leaders)
        self.run(1)
        self.asked = 0

    def join(self, member: str, *, rack: str = "") -> None:
        record = MemberRecord(member=member, address=f"{member}:1", name=f"n-{member}", rack=rack)
        self.put_key(KEYS.of_member(KeyKind.MEMBER, member), encode_record(record))
        self.put_key(KEYS.of_name(f"n-{member}"), member.encode())

    def add(self, member: str) -> None:
        """Let a new node join and run."""
        self.join(member)
        self.nodes[member] = ModelNode(self, member)
        self.nodes[member].start()

    @property
    def view(self) -> ClusterView:
        """The view of a node that runs."""
        return next(node.session.view for node in self.nodes.values() if node.is_up)

    def stamp(self) -> Stamp:
        self.asked += 1
        return Stamp(f"operator{self.asked}", 1000)

    def ask(self, answer: Answer) -> Prepared:
        """Write a request."""
        assert isinstance(answer, Prepared), answer
        for txn in answer.txns:
            result = self.store.apply(self.time.now_ns, txn)
            assert isinstance(result, TxnResult)
            assert result.succeeded
        self.run(0.2)
        return answer

    def until_done(self, seconds: float = 30) -> None:
        self.run_until(lambda: KEYS.plan not in self.values(), seconds)
        assert KEYS.plan not in self.values(), progress_of(self.view)
        self.run(0.3)

    def records(self) -> dict[int, ReplicationRecord]:
        return {vb_id: self.record(vb_id) for vb_id in range(PARTITIONS)}

    def copies(self) -> Counter[str]:
        return Counter(copy for record in self.records().values() for copy in record.copies)

    def masters(self) -> Counter[str | None]:
        return Counter(record.master for record in self.records().values())

    def check_history(self, in_sync_min: int) -> None:
        """No change left fewer copies in sync than there were, or than are wanted."""
        for vb_id in range(PARTITIONS):
            batches = self.batches(KEYS.of_partition(KeyKind.PARTITION, vb_id))
            records = [decode_partition(event.item).record for b in batches for event in b.events]
            for before, after in pairwise(records):
                if after.copies != before.copies:
                    assert len(after.isr) >= min(len(before.isr), in_sync_min), (before, after)
                    assert after.epoch == before.epoch
                assert after.master is not None


def even(counts: Counter[str], members: str, total: int) -> bool:
    found = [counts[member] for member in members]
    return sum(found) == total and max(found) - min(found) <= 1
