"""A node's view of the metadata store, and what keeps it up to date.
Pure.

**The view** has the records, as far as the node's watch has come. It is a copy and may be old.
Whoever decides by it writes with compares, so that an old view makes a refused write and not a
wrong one.

Who calls it: the reader fills it; the coordinator, and the node for its partitions, read it.

Invariants
- the view has each key's newest state that it was told, whatever the order
- a partition is in `partitions` or in `unreadable`, not in both. One that cannot be read keeps its
  key's mod revision, and nobody writes it

**The reader** reads all keys once, then watches.

    READING --- all keys read ----> WATCHING --- Compacted --> READING
    READING --- no answer --------> PAUSED   --- pause over -> READING, or WATCHING where it was
    WATCHING --- Lost ------------> PAUSED
    any --- a new connection -----> READING: the store may be another one, so the view starts over

A store that has no record of the cluster, although there was one, has lost everything: it counts as
one that does not answer, and the view stays as it is.

A watch resumes at the view's revision + 1, which moves only with what was read or delivered. A
watch that delivers nothing for REWATCH_NS is begun again there: an idle watch and a dead one look
the same, and a new one costs one message.

Who calls it: the node's session with the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import Final, Generic, NamedTuple, TypeVar

from failover.coordinator.effects import (
    ANSWER_NS_MAX,
    RETRY_NS,
    Answered,
    CancelWatch,
    Delivered,
    Notice,
    StoreEffect,
    StoreEvent,
    Submit,
    Tag,
    Tick,
    ViewChanged,
    Watch,
)
from failover.coordinator.records import (
    AliveRecord,
    ClockRecord,
    ClusterKeys,
    ClusterRecord,
    CollectionsRecord,
    FiguresRecord,
    KeyKind,
    LeaderRecord,
    LinksRecord,
    ManifestRecord,
    MemberRecord,
    MemberReport,
    OperatorCommand,
    ParsedKey,
    PlanKind,
    PlanRecord,
    RecordUnreadableError,
    StoredPartition,
    UsersRecord,
    decode_partition,
    decode_record,
    unreadable,
)
from failover.metadata.metastore import Compacted, KeyValue, Lost, Range, RangeResult, WatchBatch
from failover.rules.replication_record import ReplicationRecord
from vbucket.model.partition_map import NO_NODE, MapNode, PartitionMap

_OF_MAP: Final = frozenset({KeyKind.CLUSTER, KeyKind.MEMBER, KeyKind.PARTITION, KeyKind.REMOVED})
"""What the partition map is made of."""
_Content = TypeVar("_Content")
CHAIN_LENGTH_MAX: Final = 4
"""A master and three replicas: clients know no more."""


class Stored(NamedTuple, Generic[_Content]):
    """A record, and its key as the store holds it."""

    content: _Content
    item: KeyValue


class ClusterView:
    """See the module. All tables are read-only for callers."""

    def __init__(self, keys: ClusterKeys) -> None:
        self.keys = keys
        self.revision = 0
        """All changes up to here are in the view; 0: nothing was read yet."""
        self.begun_revision = 0
        """The store's revision when it was read first over the present connection. What is not
        newer may be of an older copy that the store went back to."""
        self.map_revision = 0
        """The newest mod revision that a record of the partition map ever had, readable or not."""
        self.life = 0
        """The highest life that the cluster's record ever had; 0: none was read."""
        self.partitions: dict[int, Stored[StoredPartition]] = {}
        self.members: dict[str, Stored[MemberRecord]] = {}
        self.alive: dict[str, Stored[AliveRecord]] = {}
        self.clocks: dict[str, Stored[ClockRecord]] = {}
        self.links: dict[str, Stored[LinksRecord]] = {}
        self.figures: dict[str, Stored[FiguresRecord]] = {}
        self.collections: dict[str, Stored[CollectionsRecord]] = {}
        self.reports: dict[str, Stored[MemberReport]] = {}
        self.commands: dict[int, Stored[OperatorCommand]] = {}
        self.cluster: Stored[ClusterRecord] | None = None
        self.manifest: Stored[ManifestRecord] | None = None
        self.users: Stored[UsersRecord] | None = None
        self.plan: Stored[PlanRecord] | None = None
        self.wanted: dict[int, tuple[str, ...]] = {}
        """The chains of the plan."""
        self.leader: Stored[LeaderRecord] | None = None
        self.leader_item: KeyValue | None = None
        """The leader's key, also where its record cannot be read."""
        self.unreadable: dict[bytes, str] = {}
        """Keys whose records cannot be read, with the reason."""
        self._items: dict[bytes, KeyValue] = {}
        self._changes: Final[dict[KeyKind, Callable[[ParsedKey, KeyValue | None], None]]] = {
            KeyKind.CLUSTER: self._change_cluster,
            KeyKind.MANIFEST: self._change_manifest,
            KeyKind.USERS: self._change_users,
            KeyKind.PLAN: self._change_plan,
            KeyKind.LEADER: self._change_leader,
            KeyKind.CLOCK: lambda name, item: _change(self.clocks, name.member, item, ClockRecord),
            KeyKind.LINKS: lambda name, item: _change(self.links, name.member, item, LinksRecord),
            KeyKind.FIGURES: lambda name, item: _change(
                self.figures, name.member, item, FiguresRecord
            ),
            KeyKind.COLLECTIONS: lambda name, item: _change(
                self.collections, name.member, item, CollectionsRecord
            ),
            KeyKind.ALIVE: lambda name, item: _change(self.alive, name.member, item, AliveRecord),
            KeyKind.MEMBER: lambda name, item: _change(
                self.members, name.member, item, MemberRecord
            ),
            KeyKind.SUSPECT: lambda name, item: _change(
                self.reports, name.member, item, MemberReport
            ),
            KeyKind.COMMAND: lambda name, item: _change(
                self.commands, name.vb_id, item, OperatorCommand
            ),
            KeyKind.PARTITION: self._change_partition,
            KeyKind.REMOVED: lambda _name, _item: None,
        }

    @property
    def is_loaded(self) -> bool:
        """Whether the records were read at least once."""
        return self.revision > 0

    def reported_by_others(self, member: str) -> set[int]:
        """Return the partitions whose master somebody else misses. Who holds a copy says then what
        it has seen: nobody is elected by a record that may be older.
        """
        return {
            told.vb_id
            for reporter, stored in self.reports.items()
            if reporter != member and stored.item.mod_revision > self.begun_revision
            for told in stored.content.partitions
            if told.is_witness
        }

    def stays(self, member: str) -> bool:
        """Whether a member's process runs, and is not about to stop."""
        stored = self.alive.get(member)
        return stored is not None and not stored.content.is_leaving

    def can_follow(self, member: str, master: str | None) -> bool:
        """Whether nothing is known that keeps a member from following a master."""
        stored = self.links.get(member)
        return stored is None or master not in stored.content.refused

    def fails_over(self, vb_id: int, member: str | None) -> bool:
        """Whether an operator wants this member to replace a partition's master."""
        chain = self.wanted.get(vb_id)
        is_failover = self.plan is not None and self.plan.content.kind is PlanKind.FAILOVER
        return is_failover and chain is not None and chain[0] == member

    def mod_revision(self, key: bytes) -> int:
        """Return the mod revision of a key; 0 if it does not exist."""
        item = self._items.get(key)
        return item.mod_revision if item is not None else 0

    def saw_creation(self, item: KeyValue) -> bool:
        """Whether a key was made after this process had read all keys over its present connection,
        and has not changed since: no earlier process can have acted by it.
        """
        return self.begun_revision < item.create_revision == item.mod_revision

    def item(self, key: bytes) -> KeyValue | None:
        """Return a key as the store has it; None if it does not exist."""
        return self._items.get(key)

    def value(self, key: bytes) -> bytes | None:
        """Return the value of a key; None if it does not exist."""
        item = self._items.get(key)
        return item.value if item is not None else None

    # ---- What the view is told

    def replace(self, items: Iterable[KeyValue], revision: int) -> frozenset[int]:
        """Take over a read of all keys; return the partitions that changed."""
        found = {item.key: item for item in items}
        gone = [
            key
            for key, item in self._items.items()
            if key not in found and item.mod_revision <= revision
        ]
        changed = [self._forget(key) for key in gone]
        changed += [self._learn(item) for item in found.values()]
        self.revision = max(self.revision, revision)
        return _partitions(changed)

    def start_over(self, items: Iterable[KeyValue], revision: int) -> frozenset[int]:
        """Take over a read of all keys of a store that may be another one, or an older copy:
        nothing that was known counts. Return all partitions, also those that are as before: their
        masters have to know that this store has their records, too.
        """
        found = {item.key: item for item in items}
        changed = [self._forget(key) for key in tuple(self._items) if key not in found]
        self.map_revision = self.life = 0
        for key, item in found.items():
            name = self.keys.parse(key)
            if name is not None and name.kind in _OF_MAP:
                self.map_revision = max(self.map_revision, item.mod_revision)
            changed.append(name if self._items.get(key) == item else self._set(key, item))
        if self.cluster is not None:
            self.life = max(self.life, self.cluster.content.life)
        self.revision = self.begun_revision = revision
        return _partitions(changed)

    def apply(self, batch: WatchBatch) -> frozenset[int]:
        """Take over a batch of the watch; return the partitions that changed."""
        assert batch.revision > self.revision, "a watch delivers each revision once"
        changed: list[ParsedKey | None] = []
        for event in batch.events:
            item = event.item
            if not event.is_delete:
                changed.append(self._learn(item))
            elif self.mod_revision(item.key) < item.mod_revision:
                changed.append(self._forget(item.key))
        self.revision = batch.revision
        return _partitions(changed)

    def learn(self, items: Iterable[KeyValue], revision: int) -> frozenset[int]:
        """Take over keys that were read at a revision, perhaps before the watch delivers them."""
        if revision < self.revision:
            return frozenset()
        return _partitions([self._learn(item) for item in items])

    # ---- Changes of one key

    def _learn(self, item: KeyValue) -> ParsedKey | None:
        if item.mod_revision <= self.mod_revision(item.key):
            return None
        return self._set(item.key, item)

    def _forget(self, key: bytes) -> ParsedKey | None:
        return self._set(key, None) if key in self._items else None

    def _set(self, key: bytes, item: KeyValue | None) -> ParsedKey | None:
        name = self.keys.parse(key)
        self.unreadable.pop(key, None)
        if item is None:
            del self._items[key]
        else:
            self._items[key] = item
        if name is None:
            return None  # a key of a newer version: not ours to judge
        if item is not None and name.kind in _OF_MAP:
            self.map_revision = max(self.map_revision, item.mod_revision)
        try:
            self._changes[name.kind](name, item)
        except RecordUnreadableError as error:
            self._changes[name.kind](name, None)
            self.unreadable[key] = str(error)
            if name.kind is KeyKind.LEADER:
                self.leader_item = item
        return name

    def _change_cluster(self, name: ParsedKey, item: KeyValue | None) -> None:
        assert name.kind is KeyKind.CLUSTER
        self.cluster = None if item is None else Stored(decode_record(item, ClusterRecord), item)
        if self.cluster is not None:
            self.life = max(self.life, self.cluster.content.life)

    def _change_manifest(self, name: ParsedKey, item: KeyValue | None) -> None:
        assert name.kind is KeyKind.MANIFEST
        self.manifest = None
        if item is not None:
            record = decode_record(item, ManifestRecord)
            record.manifest()  # raises if it cannot be used
            self.manifest = Stored(record, item)

    def _change_users(self, name: ParsedKey, item: KeyValue | None) -> None:
        assert name.kind is KeyKind.USERS
        self.users = None if item is None else Stored(decode_record(item, UsersRecord), item)

    def _change_plan(self, name: ParsedKey, item: KeyValue | None) -> None:
        assert name.kind is KeyKind.PLAN
        self.plan, self.wanted = None, {}
        if item is not None:
            record = decode_record(item, PlanRecord)
            if problem := record.problem():
                raise unreadable(item, problem)
            self.plan, self.wanted = Stored(record, item), record.wanted()

    def _change_leader(self, name: ParsedKey, item: KeyValue | None) -> None:
        assert name.kind is KeyKind.LEADER
        self.leader_item = item
        self.leader = None
        if item is not None:
            self.leader = Stored(decode_record(item, LeaderRecord), item)

    def _change_partition(self, name: ParsedKey, item: KeyValue | None) -> None:
        if item is None:
            self.partitions.pop(name.vb_id, None)
        else:
            self.partitions[name.vb_id] = Stored(decode_partition(item), item)


_Name = TypeVar("_Name")


def _change(
    table: dict[_Name, Stored[_Content]], name: _Name, item: KeyValue | None, kind: type[_Content]
) -> None:
    """Set or remove one record of a table."""
    if item is None:
        table.pop(name, None)
    else:
        table[name] = Stored(decode_record(item, kind), item)


def _partitions(changed: Iterable[ParsedKey | None]) -> frozenset[int]:
    return frozenset(
        name.vb_id for name in changed if name is not None and name.kind is KeyKind.PARTITION
    )


REWATCH_NS: Final = 5_000_000_000
"""How long a watch may be silent. It bounds how long a dead watch stays unnoticed."""

READER: Final = "reader"
EMPTIED_NS: Final = 1_000_000_000
"""Time between reads of a store that has lost all records."""
EMPTIED_TEXT: Final = (
    "cluster view: the metadata store has lost all records of this cluster. Nodes go on with what "
    "they know. `dcpctl cluster meta restore` builds the records anew"
)


class ReaderState(Enum):
    """See the module."""

    READING = auto()
    WATCHING = auto()
    PAUSED = auto()


ReaderEffect = StoreEffect | ViewChanged | Notice


class ViewReader:
    """See the module. Begins to read with the first event."""

    def __init__(self, view: ClusterView) -> None:
        self.view = view
        self.state = ReaderState.PAUSED
        self._must_read = True
        self._until_ns = 0
        """When the state ends by itself: a pause, a missing answer, a silent watch."""
        self.must_have_cluster = False
        """Whether the cluster's record was seen before."""
        self.is_emptied = False
        """Whether the store lacks it."""
        self.starts_over = True
        """Whether nothing was read over the present connection."""
        self._tag = Tag(READER, 0)
        self._watching: Tag | None = None

    def begin_again(self, now_ns: int) -> list[ReaderEffect]:
        """There is a new connection, perhaps to a store that went back: read all of it."""
        self._must_read = self.starts_over = True
        return self._read(now_ns)

    def on_event(self, now_ns: int, event: StoreEvent) -> list[ReaderEffect]:
        """Take one event; return what to do."""
        if isinstance(event, Tick):
            return self._tick(now_ns)
        if event.tag != self._tag:
            return []
        if isinstance(event, Answered):
            return self._answered(now_ns, event)
        return self._delivered(now_ns, event)

    def _tick(self, now_ns: int) -> list[ReaderEffect]:
        if now_ns < self._until_ns:
            return []
        return self._read(now_ns) if self._must_read else self._watch(now_ns)

    def _read(self, now_ns: int) -> list[ReaderEffect]:
        self.state = ReaderState.READING
        self._until_ns = now_ns + ANSWER_NS_MAX
        effects = self._end_watch()
        return [*effects, Submit(self._next_tag(), Range(self.view.keys.root, is_prefix=True))]

    def _watch(self, now_ns: int) -> list[ReaderEffect]:
        effects = self._end_watch()
        self.state = ReaderState.WATCHING
        self._until_ns = now_ns + REWATCH_NS
        self._watching = self._next_tag()
        return [*effects, Watch(self._watching, self.view.keys.root, self.view.revision + 1)]

    def _answered(self, now_ns: int, event: Answered) -> list[ReaderEffect]:
        assert self.state is ReaderState.READING
        if not isinstance(event.result, RangeResult):
            self._pause(now_ns)
            return [Notice(f"cluster view: the records were not read: {event.result}")]
        view, items = self.view, event.result.items
        knew_cluster = self.must_have_cluster or view.cluster is not None
        was_emptied = self.is_emptied
        self.is_emptied = knew_cluster and not any(item.key == view.keys.cluster for item in items)
        if self.is_emptied:
            self._pause(now_ns, EMPTIED_NS)
            return [] if was_emptied else [Notice(EMPTIED_TEXT)]
        before = view.unreadable.copy()
        take = view.start_over if self.starts_over else view.replace
        changed = take(items, event.result.revision)
        self._must_read = self.starts_over = False
        return [*self._watch(now_ns), ViewChanged(changed), *self._unreadable(before)]

    def _unreadable(self, before: dict[bytes, str]) -> list[ReaderEffect]:
        """Return a notice for each record that cannot be read and was not told before."""
        return [
            Notice(f"cluster: a record cannot be read: {text}")
            for key, text in self.view.unreadable.items()
            if before.get(key) != text
        ]

    def _delivered(self, now_ns: int, event: Delivered) -> list[ReaderEffect]:
        assert self.state is ReaderState.WATCHING
        message = event.message
        if isinstance(message, WatchBatch):
            self._until_ns = now_ns + REWATCH_NS
            before = self.view.unreadable.copy()
            return [ViewChanged(self.view.apply(message)), *self._unreadable(before)]
        self._watching = None
        if isinstance(message, Compacted):
            self._must_read = True
            return self._read(now_ns)
        assert isinstance(message, Lost)
        self._pause(now_ns)
        return [Notice(f"cluster view: the watch ended and begins again: {message.text}")]

    def _pause(self, now_ns: int, for_ns: int = RETRY_NS) -> None:
        self.state = ReaderState.PAUSED
        self._until_ns = now_ns + for_ns
        self._next_tag()

    def _end_watch(self) -> list[ReaderEffect]:
        tag, self._watching = self._watching, None
        return [CancelWatch(tag)] if tag is not None else []

    def _next_tag(self) -> Tag:
        self._tag = Tag(READER, self._tag.number + 1)
        return self._tag


def bucket_map(
    view: ClusterView,
    num_vbuckets: int,
    member: str,
    nodes: Mapping[str, MapNode],
    *,
    rev: int,
    rev_epoch: int = 1,
) -> PartitionMap:
    """Return the map as of the view, for the node of a member. `nodes`: member -> its node.

    A partition without a record, or without a master, has no active node. Its replicas are those in
    sync. Members that are in sync nowhere are not in the map: SDKs would wait for a dead one.
    """
    records = {vb_id: stored.content.record for vb_id, stored in view.partitions.items()}
    serving = {name for record in records.values() for name in record.isr}  # masters, too
    members = sorted(serving & nodes.keys()) or [member]
    index = {name: number for number, name in enumerate(members)}
    width = max((len(record.copies) for record in records.values()), default=1)
    width = min(width, CHAIN_LENGTH_MAX)
    nobody = (NO_NODE,) * width
    found: dict[tuple[object, ...], tuple[int, ...]] = {}  # hundreds of partitions share a chain
    chains = []
    for vb_id in range(num_vbuckets):
        record = records.get(vb_id)
        if record is None:
            chains.append(nobody)
            continue
        kind = record.master, record.copies, record.isr
        chain = found.get(kind)
        if chain is None:
            chain = found[kind] = (*_chain(record, index), *nobody)[:width]
        chains.append(chain)
    return PartitionMap(
        tuple(nodes[name] for name in members), tuple(chains), rev=rev, rev_epoch=rev_epoch,
        this_node=index.get(member, NO_NODE),
    ).checked()  # fmt: skip


def _chain(record: ReplicationRecord, index: Mapping[str, int]) -> list[int]:
    """Return the nodes of a partition: its master, and its replicas in sync."""
    master = NO_NODE if record.master is None else index.get(record.master, NO_NODE)
    replicas = [copy for copy in record.copies if copy in record.isr and copy != record.master]
    return [master, *(index.get(copy, NO_NODE) for copy in replicas)]
