"""The keyspace of a node: 1,024 partitions, their commit groups, versions and collections. Sans-IO.

What every change has in common, whatever command it comes from: it goes into the newest layer of
its partition and into the open commit group; groups are taken, committed in order and merged; a
partition's history can branch; the log's groups can be applied again after a crash.
`vbucket.engine.engine.Engine` adds the commands on documents.

Invariants
- an operation changes memory and `pending` together; nothing else ever reaches the log;
- a group's number is one more than its predecessor's; at most the open group is unnumbered by the
  log, groups commit in order;
- what an answer observed was changed by a group <= the `last_group` of its partition, so an answer
  that waits for that group never shows what a crash can take back;
- streams read at or below `committed_seqno` only.

Rules: architecture of the write path, kv_engine's semantics of CAS (hybrid clock), rev_seqno
(counts a document's revisions, deletes included) and failover tables.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable
from typing import Final, NamedTuple

from dcp.wire.opcode import Opcode
from failover.history import FailoverLog
from vbucket.engine.item_cache import ItemCache
from vbucket.engine.partition import ABSENT, Hold, Partition, VbState
from vbucket.engine.versions import Versions
from vbucket.log.commit_group import CommitGroup
from vbucket.model.collection_counts import CollectionCounts
from vbucket.model.entry import (
    DATATYPE_AT,
    LOG_CONTROL,
    META,
    head_of,
    is_deleted,
    pack_control,
    pack_system_event,
    prev_seqno_of,
    seqno_of,
    value_of,
)
from vbucket.model.ids import NUM_VBUCKETS
from vbucket.model.manifest import (
    DEFAULT_COLLECTION,
    Manifest,
    ManifestEvent,
    collection_of,
    events_between,
    missing_events,
    system_key,
)
from vbucket.store.due import DueDocuments
from vbucket.store.environment import StoreDamagedError
from vbucket.store.records import Mended
from vbucket.store.runs import RunBatch
from vbucket.store.store import Accepts, FrameBatch, Store
from vbucket.upkeep.merge import NODE_VB_ID, MergeReport

MUTATION: Final = int(Opcode.DCP_MUTATION)
DELETION: Final = int(Opcode.DCP_DELETION)
EXPIRATION: Final = int(Opcode.DCP_EXPIRATION)
_UNPACK_META: Final = META.unpack_from

OVERFULL: Final = 2
"""Memtables that the store may be behind: a frozen one that is being merged, and a full one. With
more, writers that are faster than merging would wait less often, and longer each time."""
ROOMY: Final = 1.5
"""Memtables below which work that can wait writes too: half of one is left to writers, so that it
is not this work which makes them wait, and while one is merged it need not stand still."""


class BranchRefusedError(Exception):
    """A history branch cannot begin there; the text says why."""


class FloorError(BranchRefusedError):
    """A partition cannot go back there because its history does not reach so far; to 0 it can."""


class Branch(NamedTuple):
    """A new partition version that an operator asked for.

    `undone_keys` have another version than before, or none; of a branch at 0 it is the documents
    that were there, because finding all keys would take longer than undoing them.
    """

    vb_id: int
    failover: FailoverLog
    seqno: int
    undone_seqnos: int
    undone_keys: int


class Keyspace:
    """See the module. `vbucket.engine.engine.Engine` is the one that is used."""

    def __init__(
        self,
        store: Store,
        draw_uuid: Callable[[], int],
        num_vbuckets: int,
        memtable_bytes_max: int = 64 << 20,
        *,
        item_cache_bytes: int = 0,
    ) -> None:
        assert 0 < num_vbuckets <= NUM_VBUCKETS, "more than the wire has"
        assert not num_vbuckets & (num_vbuckets - 1), "partitions are bits of a key's hash"
        self._store = store
        self._draw_uuid = draw_uuid
        self._memtable_bytes_max = memtable_bytes_max
        self.num_vbuckets = num_vbuckets
        records = store.partitions()
        missing = sorted(set(range(num_vbuckets)) - records.keys())
        if missing:
            raise StoreDamagedError(
                f"the store has no record of vb {missing[0]} and {len(missing) - 1} other "
                "partitions; check the disk and restore a backup"
            )
        self.partitions: list[Partition] = []
        self.item_cache = ItemCache(self.partitions, item_cache_bytes)
        self._versions = Versions(store, self.item_cache)
        for vb_id in range(num_vbuckets):
            record = records[vb_id]
            part = Partition(vb_id, FailoverLog.from_document(record.failover))
            part.state = VbState(record.state)
            part.high_seqno = part.committed_seqno = part.persisted_seqno = record.high_seqno
            part.merged_seqno = record.high_seqno
            part.purge_seqno = record.purge_seqno
            part.history_floor = record.history_floor
            part.max_cas = record.max_cas
            part.mended = Mended(*record.mended) if record.mended else None
            part.item_count = record.item_count
            part.tally = CollectionCounts(record.tally)
            self.partitions.append(part)
        self.manifest = self.committed_manifest = store.manifest()
        """Which collections there are; as commands see it, and as streams do."""
        self._adopt_manifest(self.manifest)
        self.manifest_group = 0
        """The commit group that changed the manifest last; answers that tell of it wait for it."""
        self.group = 1
        """Number of the open group."""
        self.committed_group = 0
        self._pending: list[bytes] = []
        self._touched: list[Partition] = []
        self._branched: list[int] = []
        self._restated: list[int] = []
        self._in_flight: list[CommitGroup] = []
        self._refusals: dict[Hold, str] = {}
        self.due = DueDocuments()
        self.expired_on_access = 0
        self._cas_floor = 0
        self._now_s = 0
        self.active_bytes = 0
        self.frozen_bytes = 0
        self.is_merging = False
        self.merged_group = 0
        """The last group that a merge of this process has brought into the store."""
        self.quarantined: dict[int, str] = {}
        """Partitions whose stored data is damaged -> why; merges leave them out."""
        for vb_id, item in store.quarantine().items():
            self._quarantine(vb_id, item.why)
        self._frozen_group = 0
        self._merge_wanted_for = 0
        """A merge of the groups up to this one is asked for; 0: none."""

    def _applied(self, part: Partition, key: bytes, entry: bytes, seqno: int) -> None:
        self._pending.append(entry)
        part.append_entry(entry)
        part.newest[key] = entry
        part.high_seqno = seqno
        if part.last_group != self.group:
            part.last_group = self.group
            self._touched.append(part)
        if key[0]:
            part.tally.note(key, seqno, seqno - 1, self.manifest.collections)

    def broken_invariant(self) -> str:
        """Say what an exception left half done in the open group, "" where that is nothing.

        Memory and `_pending` change together, `_pending` first and `high_seqno` last, so a change
        that was cut short is one that is pending and not at the end of its partition.
        """
        newest: dict[int, int] = {}
        for entry in self._pending:
            head = head_of(entry)
            if head.opcode == LOG_CONTROL:
                newest.pop(head.vb_id, None)  # a branch may have cut what came before
            else:
                newest[head.vb_id] = seqno_of(entry)
        for vb_id, seqno in newest.items():
            part = self.partitions[vb_id]
            entries = part.active.entries
            if part.high_seqno != seqno or not entries or seqno_of(entries[-1]) != seqno:
                return f"vb {vb_id}: seqno {seqno} was not applied wholly"
        return ""

    def count(self, part: Partition, key: bytes, documents: int) -> None:
        """Count live documents in or out; those of dropped collections do not count."""
        if key[0]:
            collection_id = collection_of(key)
            if collection_id not in self.manifest.collections:
                return
            part.tally.count(collection_id, documents)
        part.item_count += documents

    # -- groups ------------------------------------------------------------------------------

    @property
    def has_pending(self) -> bool:
        """Whether the open group holds anything."""
        return bool(self._pending)

    def take_group(self) -> CommitGroup | None:
        """Close the open group and return it; None when there is nothing in it."""
        if not self._pending:
            return None
        payload = b"".join(self._pending)
        group = CommitGroup(
            self.group,
            payload,
            {part.vb_id: part.high_seqno for part in self._touched},
            self._branched,
            self._restated,
            len(self._pending),
            self.manifest if self.manifest_group == self.group else None,
        )
        self.active_bytes += len(payload)
        self._pending = []
        self._touched = []
        self._branched = []
        self._restated = []
        self._in_flight.append(group)
        self.group += 1
        return group

    def group_committed(self, group: CommitGroup, *, is_synced: bool = True) -> None:
        """The group is in the log (and on disk, if `is_synced`): it may be seen now."""
        assert self._in_flight, "a group commits after it was taken"
        assert self._in_flight[0] is group, "groups commit in the order they were taken"
        del self._in_flight[0]
        self.committed_group = group.number
        if group.manifest is not None:
            self.committed_manifest = group.manifest
        partitions = self.partitions
        for vb_id, seqno in group.high_seqnos.items():
            part = partitions[vb_id]
            part.committed_seqno = seqno
            if is_synced:
                part.persisted_seqno = seqno

    def synced(self) -> None:
        """Everything that was committed without a sync is on disk now (`interval` durability)."""
        for part in self.partitions:
            part.persisted_seqno = part.committed_seqno

    # -- versions and states -----------------------------------------------------------------

    def branch(self, vb_id: int, at_seqno: int) -> Branch:
        """Begin a new version of a partition at `at_seqno`; what follows is undone exactly.

        Raises BranchRefusedError where the partition cannot go back there; nothing is changed then,
        nor where damaged data (StoreDamagedError) is in the way.
        """
        part = self.partitions[vb_id]
        if at_seqno > part.high_seqno:
            raise BranchRefusedError(
                f"vb {vb_id} ends at seqno {part.high_seqno}; a branch cannot begin at {at_seqno}"
            )
        if 0 < at_seqno < part.history_floor:
            raise FloorError(
                f"vb {vb_id} keeps every version from seqno {part.history_floor} only (its history "
                f"floor; older ones may be compacted away); it cannot go back to {at_seqno}, but "
                f"to {part.history_floor} and above, or to 0"
            )
        if at_seqno and part.state == VbState.ACTIVE:
            self.check_system_events(part)
        before = part.high_seqno
        undone_keys = self.roll_back(part, at_seqno)
        self._begin_version(part, at_seqno)
        if not at_seqno and vb_id in self.quarantined:
            # What the log said of its state before is not merged, and no longer needed otherwise.
            state = {"kind": "state", "state": int(part.state)}
            self._pending.append(pack_control(vb_id, state))
        for group in self._in_flight:
            if vb_id in group.high_seqnos:
                group.high_seqnos[vb_id] = min(group.high_seqnos[vb_id], at_seqno)
        if part.state == VbState.ACTIVE:
            self.tell_missing_events(part)
        return Branch(vb_id, part.failover, at_seqno, before - at_seqno, undone_keys)

    def _begin_version(self, part: Partition, seqno: int) -> None:
        failover = part.failover.branch(self._draw_uuid(), seqno, part.epoch)
        part.set_failover(failover)
        document: dict[str, object] = {
            "kind": "failover",
            "log": failover.to_document(),
            "rollback_to": seqno,
        }
        self.add_control(part, document)
        self._branched.append(part.vb_id)
        part.branch_group = self.group

    def add_control(self, part: Partition, document: dict[str, object]) -> None:
        """Put what was done to a partition into the open group, beside its changes."""
        self._pending.append(pack_control(part.vb_id, document))
        if document["kind"] == "state":
            self._restated.append(part.vb_id)
        if part.last_group != self.group:
            part.last_group = self.group
            self._touched.append(part)

    def roll_back(self, part: Partition, seqno: int) -> int:
        """Undo what lies above `seqno` in memory, for a branch; return how many keys changed back.

        Reads all that it needs before it changes anything: damaged data stops it without a trace.
        """
        if not seqno:
            documents_before = part.item_count
            part.empty()
            self.item_cache.clear(part)
            return documents_before
        first_changes = self._versions.first_changes_after(part, seqno)
        restored: dict[bytes, bytes] = {}
        documents: dict[bytes, int] = {}
        for key, prev_seqno in first_changes.items():
            entry = self._versions.entry_at(part, prev_seqno) if prev_seqno else ABSENT
            if entry is None:
                if prev_seqno > part.purge_seqno and self.is_reachable(key):
                    raise StoreDamagedError(
                        f"vb {part.vb_id}: a rollback needs seqno {prev_seqno} of key {key!r}, "
                        "which the store does not have; restore a backup"
                    )
                entry = ABSENT  # a tombstone that was purged, or of a collection that was dropped
            restored[key] = entry
            documents[key] = bool(entry and not is_deleted(entry)) - self._is_live(part, key)
        tally = CollectionCounts(part.tally.to_document())
        tally.roll_back(seqno, self._versions.backward(part, seqno))
        part.tally = tally
        for key, change in documents.items():
            if change:
                self.count(part, key, change)
        part.roll_back(seqno, restored)
        for entry in restored.values():
            if entry and not is_deleted(entry):
                self.due.add(entry)
        return len(restored)

    def _is_live(self, part: Partition, key: bytes) -> bool:
        entry = part.newest.get(key)
        if entry:
            return not is_deleted(entry)
        return self._versions.meta_below(part, key, entry)[0] == MUTATION

    def raise_floor(self, vb_id: int, floor: int, purge: int) -> None:
        """Give up the states below `floor`, and tombstones at or below `purge`, from now on.

        Neither falls. `floor` is the seqno of a change; the store lets go of what is below after
        it has merged the group that says so.
        """
        part = self.partitions[vb_id]
        floor = max(floor, part.history_floor)
        purge = max(purge, part.purge_seqno)
        assert floor <= part.high_seqno, "the floor is a change that is there"
        assert purge < floor or not floor, "what is purged lies below the floor"
        if (floor, purge) == (part.history_floor, part.purge_seqno):
            return
        part.history_floor, part.purge_seqno = floor, purge
        self.add_control(part, {"kind": "floor", "seqno": floor, "purge": purge})

    # -- collections -------------------------------------------------------------------------

    def set_manifest(self, manifest: Manifest) -> None:
        """Change which collections there are, at once; every active partition tells its streams.

        What a collection held that is no longer there is unreachable and counts no more.
        """
        events = events_between(self.manifest, manifest)
        self._adopt_manifest(manifest)
        self.manifest_group = self.group
        document: dict[str, object] = {"kind": "manifest", "manifest": manifest.to_document()}
        self._pending.append(pack_control(NODE_VB_ID, document))
        for part in self.partitions:
            if part.state == VbState.ACTIVE:
                for event in events:
                    self._tell(part, event)

    def is_reachable(self, key: bytes) -> bool:
        """Whether the collection of a stored key exists. What is not reachable waits for its
        removal: streams leave it out, and compaction may take it away, its last version included.
        """
        return collection_of(key) in self.manifest.collections

    def collection_seqno(self, vb_id: int, collection_id: int) -> int:
        """Return a collection's high seqno in a partition, committed changes only; 0 if none."""
        part = self.partitions[vb_id]
        if collection_id == DEFAULT_COLLECTION:
            return self.default_seqno_at(vb_id, part.committed_seqno)
        numbers = part.tally.collections.get(collection_id)
        return min(numbers[0], part.committed_seqno) if numbers else 0

    def default_seqno_at(self, vb_id: int, seqno: int) -> int:
        """Return the default collection's last change at or below a seqno, 0 if there is none."""
        part = self.partitions[vb_id]
        found = part.tally.default_seqno_at(seqno)
        if found is None:  # some changes that are not committed yet lie in between
            backward = self._versions.backward(part, seqno)
            found = next((at for at, key in backward if not key[0]), 0)
        return found

    def tell_missing_events(self, part: Partition) -> None:
        """Bring a partition's system events up to the manifest: it was rolled back behind some, or
        was not active when they happened. The manifest is the node's and does not roll back.
        """
        if self.manifest.uid:
            for event in missing_events(self._versions.system_keys(part), self.manifest):
                self._tell(part, event)

    def check_system_events(self, part: Partition) -> None:
        """Read what `tell_missing_events` needs, and raise StoreDamagedError where that cannot be:
        for who will need it amid a change that must not stop halfway.
        """
        if self.manifest.uid:
            self._versions.system_keys(part)

    def _tell(self, part: Partition, event: ManifestEvent) -> None:
        seqno = part.high_seqno + 1
        entry = pack_system_event(part.vb_id, seqno, event, part.epoch)
        self._applied(part, system_key(event), entry, seqno)

    def _adopt_manifest(self, manifest: Manifest) -> None:
        self.manifest = manifest
        for part in self.partitions:
            part.item_count -= part.tally.forget(manifest.collections)

    # -- streams -----------------------------------------------------------------------------

    def frames(
        self,
        vb_id: int,
        start_seqno: int,
        end_seqno: int,
        opaque: bytes,
        skip: Container[int],
        bytes_max: int,
        accepts: Accepts | None = None,
    ) -> FrameBatch:
        """Return `Versions.frames` of a partition; nothing that is not committed."""
        part = self.partitions[vb_id]
        assert end_seqno <= part.committed_seqno, "streams show what is committed"
        return self._versions.frames(part, start_seqno, end_seqno, opaque, skip, bytes_max, accepts)

    def runs(
        self,
        vb_id: int,
        start_seqno: int,
        end_seqno: int,
        opaque: int,
        skip: Collection[int],
        bytes_max: int,
        plain: int,
    ) -> RunBatch | None:
        """Return `Versions.runs` of a partition; nothing that is not committed."""
        part = self.partitions[vb_id]
        assert end_seqno <= part.committed_seqno, "streams show what is committed"
        return self._versions.runs(part, start_seqno, end_seqno, opaque, skip, bytes_max, plain)

    def superseded(self, vb_id: int, start_seqno: int, end_seqno: int) -> set[int]:
        """Return the seqnos in [start, end] whose key has a newer version in [start, end]."""
        return self._versions.superseded(self.partitions[vb_id], start_seqno, end_seqno)

    def previous_value(self, vb_id: int, seqno: int) -> tuple[int, int, bytes] | None:
        """Return seqno, datatype and value of the document that the change with `seqno` replaced.

        None where there was none, or where that version is not kept any more.
        """
        part = self.partitions[vb_id]
        entry = self._versions.entry_at(part, seqno)
        prev_seqno = prev_seqno_of(entry) if entry else 0
        # It may be gone: superseded below the history floor, or a tombstone that was purged.
        before = self._versions.entry_at(part, prev_seqno) if prev_seqno else None
        if not before or is_deleted(before):
            return None
        return prev_seqno, before[DATATYPE_AT], value_of(before)

    # -- merging -----------------------------------------------------------------------------

    @property
    def wants_freeze(self) -> bool:
        """Whether the memtable is large enough to be merged, or a merge is asked for, and none is
        under way.
        """
        is_due = self._merge_wanted_for or self.active_bytes >= self._memtable_bytes_max
        return bool(is_due) and not self.is_merging

    def merge_soon(self) -> int:
        """Ask for a merge of all that was applied by now; return the group that it has to reach, 0
        where everything is merged.

        It begins with the open group; where that is empty, it gets an entry that changes nothing.
        """
        if not (self._pending or self._in_flight or self.active_bytes):
            return self._frozen_group if self.is_merging else 0
        if not self._pending:
            part = self.partitions[0]
            floor, purge = part.history_floor, part.purge_seqno
            self.add_control(part, {"kind": "floor", "seqno": floor, "purge": purge})
        self._merge_wanted_for = self.group
        return self.group

    @property
    def has_room(self) -> bool:
        """Whether merging keeps up so far that work which can wait may write too."""
        return self.active_bytes + self.frozen_bytes < ROOMY * self._memtable_bytes_max

    @property
    def is_overfull(self) -> bool:
        """Whether merging has fallen so far behind that writers must wait for it.

        What is not merged has to be replayed after a crash, so more would be a longer start.
        """
        return self.active_bytes + self.frozen_bytes >= OVERFULL * self._memtable_bytes_max

    def freeze(self) -> None:
        """Set the memtable aside for a merge. Only at a group boundary, nothing pending."""
        assert not self._pending, "a freeze stands at a group boundary"
        assert not self.is_merging
        self.is_merging = True
        self._frozen_group = self.group - 1
        if self._merge_wanted_for <= self._frozen_group:
            self._merge_wanted_for = 0
        for part in self.partitions:
            part.freeze()
        self.due.freeze()
        self.frozen_bytes, self.active_bytes = self.active_bytes, 0

    def merged(self, report: MergeReport) -> None:
        """The store holds what was frozen; reads below go there from now on."""
        assert self.is_merging
        self._store.refresh()
        for vb_id, seqno in report.high_seqnos.items():
            self.partitions[vb_id].become_merged(seqno)
        for vb_id, why in report.quarantined.items():
            self._quarantine(vb_id, why)
        for vb_id in self.quarantined.keys() - report.quarantined.keys():
            del self.quarantined[vb_id]
            self.partitions[vb_id].release_writes(Hold.QUARANTINE)
        self.due.become_merged()

    def _quarantine(self, vb_id: int, why: str) -> None:
        self.quarantined[vb_id] = why
        self.partitions[vb_id].hold_writes(
            Hold.QUARANTINE,
            f"vb {vb_id} is in quarantine, because its stored data is damaged: {why}. It takes "
            "writes again after a branch at 0, which empties it; restore a backup then",
        )

    def drop_frozen(self, first_vb: int, last_vb: int) -> None:
        """Forget the frozen layers of a slice of partitions, `last_vb` excluded.

        The slice that ends with the last partition ends the merge.
        """
        assert self.is_merging
        for vb_id in range(first_vb, last_vb):
            part = self.partitions[vb_id]
            if vb_id in self.quarantined:
                part.take_back_frozen()
                continue
            if part.frozen is not None:
                self.item_cache.absorb(part, part.frozen.newest)
            part.drop_frozen()
        self.due.drop(-((first_vb - self.num_vbuckets) // (last_vb - first_vb)))
        if last_vb == self.num_vbuckets:
            self.frozen_bytes = 0
            self.is_merging = False
            self.merged_group = self._frozen_group

    # -- recovery ----------------------------------------------------------------------------

    def continue_after(self, group: int) -> None:
        """Number the groups to come from here on: the log's last one is `group`."""
        assert not self._pending, "groups are numbered before anything is written"
        self.group = group + 1
        self.committed_group = group

    def replay_manifest(self, manifest: Manifest) -> None:
        """Take the collections that the log tells of; they are committed."""
        self._adopt_manifest(manifest)
        self.committed_manifest = manifest

    def begin_new_versions(self, vb_ids: Iterable[int] | None = None) -> list[int]:
        """Begin a new version of these partitions (None: of all) at their end: what somebody had
        seen may be lost. Return the partitions; the entries are in the open group.

        Nothing is undone and nothing is read, so damaged data is not in the way.
        """
        chosen = range(len(self.partitions)) if vb_ids is None else vb_ids
        changed = list(chosen)
        for vb_id in changed:
            part = self.partitions[vb_id]
            last_group = part.last_group
            self._begin_version(part, part.high_seqno)
            part.last_group = last_group  # documents are what they were: reads need not wait
        return changed
