"""The partitions of a node, their commit groups, memtable layers and collections. Sans-IO.

Everything that all changes have in common is here. A change goes into the active layer of its
partition and into the open commit group. Groups are taken, committed in order, and merged. A
partition's history can branch. `vbucket.engine.engine.Engine` has a keyspace and implements the
commands on documents with it. The shell drives it like this:

    take_group() -> Group    closes the open group; the shell writes it as one log record
    group_synced(group)      the record is on disk; `vbucket.engine.commits` says what that commits

When `memtables.wants_freeze` is true, at a group boundary: freeze(), rotate the log, merge the
sealed segments into the store, then merged(report), and drop_frozen() in slices.

Invariants
- every change goes into memory and into `pending` together; nothing else reaches the log;
- groups are numbered without gaps; only the open group is not in the log yet;
- whatever an answer shows was changed by a group <= the `last_group` of its partition; an answer
  that waits until that group is committed there never shows what a crash can undo.

Rules: kv_engine's failover tables and system events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from dcp.wire.opcode import Opcode
from failover.rules.history import FailoverLog
from vbucket.engine.commits import Commits
from vbucket.engine.documents.item_cache import ItemCache
from vbucket.engine.partition import ABSENT, Branch, Hold, Partition, VbState, check_undo, restored
from vbucket.engine.versions import Versions
from vbucket.log.commit_group import CommitGroup
from vbucket.model.collection_counts import CollectionCounts
from vbucket.model.control import pack_control, watermarks_document
from vbucket.model.entry import LOG_CONTROL, META, head_of, is_deleted, pack_system_event, seqno_of
from vbucket.model.ids import NUM_VBUCKETS, Draws, draw_vb_uuid
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
from vbucket.store.store import Store
from vbucket.upkeep.merge import NODE_VB_ID, MergeReport

MUTATION: Final = int(Opcode.DCP_MUTATION)
DELETION: Final = int(Opcode.DCP_DELETION)
EXPIRATION: Final = int(Opcode.DCP_EXPIRATION)
_UNPACK_META: Final = META.unpack_from

OVERFULL: Final = 2
"""How many memtables the store may lag behind: one that is being merged, and a full one. With a
higher limit, writers that outrun merging would wait less often but longer."""
ROOMY: Final = 1.5
"""Background work writes only below this many memtables. It leaves half a memtable to clients, so
it never makes them wait, and it need not stop while a memtable is merged."""


class Memtables:
    """How much the layers of all partitions hold, and which commit groups merges bring in.

        active ── freeze ──> frozen ── merged, dropped in slices ──> store

    Invariants: frozen bytes only while a merge runs; `merged_group` never falls.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        """A merge begins when the active layers hold as much."""
        self.active_bytes = 0
        self.frozen_bytes = 0
        """Of the frozen layers that are not dropped yet."""
        self._frozen_bytes_at_first = 0
        self.is_merging = False
        self.merged_group = 0
        """The last group that a merge of this process has brought into the store."""
        self._frozen_group = 0
        """The last group of the merge that runs, or ran last."""
        self._wanted_group = 0
        """A merge of the groups up to this one is asked for; 0: none."""

    @property
    def wants_freeze(self) -> bool:
        """Whether a merge should begin: the memtable is full or a merge was asked for, and no other
        merge is running.
        """
        is_due = self._wanted_group or self.active_bytes >= self.bytes_max
        return bool(is_due) and not self.is_merging

    @property
    def held_bytes(self) -> int:
        """What all layers hold."""
        return self.active_bytes + self.frozen_bytes

    @property
    def has_room(self) -> bool:
        """Whether background work may write: merging keeps up with the clients."""
        return self.held_bytes < ROOMY * self.bytes_max

    @property
    def room_bytes(self) -> int:
        """How much the memtables may grow before writers must wait; negative if they wait."""
        return OVERFULL * self.bytes_max - self.held_bytes

    @property
    def is_overfull(self) -> bool:
        """Whether writers must wait because merging has fallen behind.

        A start after a crash replays all that is not merged, so the limit bounds its time.
        """
        return self.room_bytes <= 0

    @property
    def merging_group(self) -> int:
        """The group that the merge under way reaches; 0: no merge runs."""
        return self._frozen_group if self.is_merging else 0

    def want(self, group: int) -> None:
        """Ask for a merge of all groups up to this one."""
        self._wanted_group = group

    def freeze(self, group: int) -> None:
        """A merge of all groups up to this one begins."""
        assert not self.is_merging
        self.is_merging = True
        self._frozen_group = group
        if self._wanted_group <= group:
            self._wanted_group = 0
        self.frozen_bytes = self._frozen_bytes_at_first = self.active_bytes
        self.active_bytes = 0

    def drop(self, partitions: int, of: int) -> None:
        """The frozen layers of so many partitions, `of` all, are dropped."""
        dropped = self._frozen_bytes_at_first * partitions // of
        self.frozen_bytes = max(0, self.frozen_bytes - dropped)

    def end(self) -> None:
        """All frozen layers are dropped: the merge is over."""
        assert self.is_merging
        self.frozen_bytes = 0
        self.is_merging = False
        self.merged_group = self._frozen_group


class Keyspace:
    """See the module. The engine reads and writes `pending` and `touched` on its hot path."""

    def __init__(
        self,
        store: Store,
        draws: Draws,
        num_vbuckets: int,
        memtable_bytes_max: int = 64 << 20,
        *,
        item_cache_bytes: int = 0,
    ) -> None:
        assert 0 < num_vbuckets <= NUM_VBUCKETS, "more than the wire has"
        assert not num_vbuckets & (num_vbuckets - 1), "partitions are bits of a key's hash"
        self._store = store
        self.draws = draws
        self.memtables = Memtables(memtable_bytes_max)
        self.num_vbuckets = num_vbuckets
        records = store.partitions()
        missing = sorted(set(range(num_vbuckets)) - records.keys())
        if missing:
            raise StoreDamagedError(
                f"the store has no record of partition {missing[0]} and {len(missing) - 1} other "
                "partitions; check the disk and restore a backup"
            )
        self.partitions: list[Partition] = []
        self.item_cache = ItemCache(self.partitions, item_cache_bytes)
        self.versions = Versions(store, self.partitions, self.item_cache)
        for vb_id in range(num_vbuckets):
            self.partitions.append(restored(vb_id, records[vb_id]))
        self.manifest = self.committed_manifest = store.manifest()
        """Which collections there are; as commands see it, and as streams do."""
        self._adopt_manifest(self.manifest)
        self.manifest_group = 0
        """The commit group that changed the manifest last; answers that tell of it wait for it."""
        self.group = 1
        """Number of the open group."""
        self.commits = Commits(self.partitions)
        self.watermarks: dict[int, int] = {}
        """High watermarks of partitions with replicas that the next group tells the log."""
        self.known_watermarks: dict[int, int] = {}
        """Those that the log told at the start."""
        self.pending: list[bytes] = []
        self.touched: list[Partition] = []
        self._has_control = False
        self._branched: list[int] = []
        self._restated: list[int] = []
        self.due = DueDocuments()
        self.holds_groups = False
        """Whether no group is taken: a test holds commits."""
        self.loading: set[int] = set()
        """Partitions that get documents straight into the store now (`loading.loads`)."""
        self.quarantined: dict[int, str] = {}
        """Partitions whose stored data is damaged -> why; merges leave them out."""
        for vb_id, item in store.quarantine().items():
            self._quarantine(vb_id, item.why)

    def apply(self, part: Partition, key: bytes, entry: bytes, seqno: int, documents: int) -> None:
        """Apply a change: put it into the memtable and into the open group. `documents` is how many
        live documents there are more: 1, 0 or -1.
        """
        self.pending.append(entry)
        part.append_entry(entry)
        part.newest[key] = entry
        if part.last_group != self.group:
            self.touched.append(part)
            part.last_group = self.group
        seqno_before, part.high_seqno = part.high_seqno, seqno
        if key[0]:
            part.tally.note(key, seqno, seqno_before, self.manifest)
            if documents:
                self.count(part, key, documents)
        else:
            part.item_count += documents

    def apply_many(self, part: Partition, keys: Sequence[bytes], entries: list[bytes]) -> None:
        """Apply changes with consecutive seqnos. The caller notes them in the tally."""
        self.pending += entries
        part.active.entries += entries
        part.newest.update(zip(keys, entries, strict=True))
        if part.last_group != self.group:
            self.touched.append(part)
            part.last_group = self.group
        part.high_seqno += len(entries)

    def broken_invariant(self) -> str:
        """Return what an exception left half done in the open group, "" if nothing.

        A change first goes into `pending`, and sets `high_seqno` last. So an interrupted change is
        pending, but not at the end of its partition.
        """
        newest: dict[int, int] = {}
        for entry in self.pending:
            head = head_of(entry)
            if head.opcode == LOG_CONTROL:
                newest.pop(head.vb_id, None)  # a branch may have cut what came before
            else:
                newest[head.vb_id] = seqno_of(entry)
        for vb_id, seqno in newest.items():
            part = self.partitions[vb_id]
            entries = part.active.entries
            if part.high_seqno != seqno or not entries or seqno_of(entries[-1]) != seqno:
                return f"partition {vb_id}: seqno {seqno} was not applied wholly"
        return ""

    def count(self, part: Partition, key: bytes, documents: int) -> None:
        """Add to the number of live documents; documents of dropped collections do not count."""
        if key[0]:
            collection_id = collection_of(key)
            if self.manifest.is_gone(collection_id):
                return
            part.tally.count(collection_id, documents)
        part.item_count += documents

    # -- groups ------------------------------------------------------------------------------

    @property
    def has_pending(self) -> bool:
        """Whether the open group holds anything."""
        return bool(self.pending)

    def take_group(self) -> CommitGroup | None:
        """Close the open group and return it; None if it is empty."""
        if not self.pending:
            return None
        has_watermarks = bool(self.watermarks)
        if has_watermarks:
            self.pending.append(pack_control(NODE_VB_ID, watermarks_document(self.watermarks)))
            self.watermarks = {}
        payload = b"".join(self.pending)
        group = CommitGroup(
            self.group,
            payload,
            {part.vb_id: part.high_seqno for part in self.touched},
            self._branched,
            self._restated,
            len(self.pending),
            self.pending,
            self.manifest if self.manifest_group == self.group else None,
            self._has_control,
            has_watermarks,
        )
        self.memtables.active_bytes += len(payload)
        self.pending = []
        self.touched = []
        self._has_control = False
        self._branched = []
        self._restated = []
        self.group += 1
        self.commits.in_flight.append(group)
        return group

    def group_synced(self, group: CommitGroup, *, is_on_disk: bool = True) -> None:
        """Publish a group that is in the log, as safe as the durability requires (and on disk, if
        `is_on_disk`).
        """
        if group.manifest is not None:
            self.committed_manifest = group.manifest
        self.commits.synced(group, is_on_disk=is_on_disk)

    def group_of_version(self, part: Partition, key: bytes) -> int:
        """Return the group that must be committed in a partition before anybody may see the newest
        version of a key there; 0 if everybody may.
        """
        group = part.undo_group
        entry = part.newest.get(key)
        if entry is None and part.frozen is not None:
            entry = part.frozen.newest.get(key)
        # A merge may bring changes into the store before they are committed.
        seqno = part.merged_seqno if entry is None else seqno_of(entry) if entry else 0
        if seqno > part.committed_seqno:
            group = max(group, self.commits.group_of(part.vb_id, seqno) or self.group)
        return 0 if self.commits.is_committed(part.vb_id, group) else group

    # -- versions and states -----------------------------------------------------------------

    def branch(self, vb_id: int, at_seqno: int, epoch: int | None = None) -> Branch:
        """Begin a new version of a partition at `at_seqno` and undo all changes above it.

        The version begins in the leader epoch `epoch` (None: the present one), which must not be
        below the present one. Raises BranchRefusedError if the partition cannot go back there, and
        StoreDamagedError if damaged data is in the way. In both cases nothing was changed.
        """
        part = self.partitions[vb_id]
        began_in = part.leader_epoch if epoch is None else epoch
        assert began_in >= part.leader_epoch, "a leader epoch never falls"
        check_undo(part, at_seqno)
        if at_seqno and part.durable_state == VbState.ACTIVE:
            self.check_system_events(part)
        before = part.high_seqno
        failover = part.failover.branch(draw_vb_uuid(self.draws), at_seqno, began_in)
        undone_keys = self.replace_history(part, failover, began_in, rollback_to=at_seqno)
        if part.durable_state == VbState.ACTIVE:
            self.tell_missing_events(part)
        return Branch(vb_id, part.failover, at_seqno, before - at_seqno, undone_keys)

    def replace_history(
        self, part: Partition, failover: FailoverLog, epoch: int, *, rollback_to: int | None
    ) -> int:
        """Undo everything above `rollback_to` (None: nothing) and replace failover log and leader
        epoch, with one control entry. Return how many keys changed.

        Raises StoreDamagedError, before anything is changed.
        """
        assert part.vb_id not in self.loading, "its seqnos are taken"
        undone_keys = 0 if rollback_to is None else self.roll_back(part, rollback_to)
        self._put_history(part, failover, epoch, rollback_to)
        if rollback_to == 0 and part.vb_id in self.quarantined:
            # Merges left out the partition's earlier state entry, so write it again.
            state = {"kind": "state", "state": int(part.durable_state)}
            self._put_control(part.vb_id, state)
        if rollback_to is not None:
            part.undo_group = self.group
            self.commits.cut(part.vb_id, rollback_to)
        return undone_keys

    def _put_history(
        self, part: Partition, failover: FailoverLog, epoch: int, rollback_to: int | None
    ) -> None:
        part.set_failover(failover)
        part.raise_epoch(epoch)
        document: dict[str, object] = {
            "kind": "failover",
            "log": failover.to_document(),
            "rollback_to": rollback_to,
        }
        if part.leader_epoch != failover.current.epoch:
            document["epoch"] = part.leader_epoch
        self.add_control(part, document)
        self._branched.append(part.vb_id)
        part.branch_group = self.group

    def add_control(self, part: Partition, document: dict[str, object]) -> None:
        """Put a control entry of a partition into the open group."""
        self._put_control(part.vb_id, document)
        if document["kind"] == "state":
            self._restated.append(part.vb_id)
            part.state_group = self.group
        if part.last_group != self.group:
            self.touched.append(part)
            part.last_group = self.group

    def _put_control(self, vb_id: int, document: dict[str, object]) -> None:
        self.pending.append(pack_control(vb_id, document))
        self._has_control = True

    def roll_back(self, part: Partition, seqno: int) -> int:
        """Undo what lies above `seqno` in memory, for a branch; return how many keys changed. It
        reads everything first, so nothing has changed when it raises StoreDamagedError.
        """
        if not seqno:
            documents_before = part.item_count
            part.empty()
            self.item_cache.clear(part)
            return documents_before
        first_changes = self.versions.first_changes_after(part, seqno)
        restored: dict[bytes, bytes] = {}
        documents: dict[bytes, int] = {}
        for key, prev_seqno in first_changes.items():
            entry = self.versions.entry_at(part, prev_seqno) if prev_seqno else ABSENT
            if entry is None:
                if prev_seqno > part.purge_seqno and not self.manifest.is_gone(collection_of(key)):
                    raise StoreDamagedError(
                        f"partition {part.vb_id}: a rollback needs seqno {prev_seqno} of key "
                        f"{key!r}, which the store does not have; restore a backup",
                        part.vb_id,
                    )
                entry = ABSENT  # a tombstone that was purged, or of a collection that was dropped
            restored[key] = entry
            documents[key] = bool(entry and not is_deleted(entry)) - self._is_live(part, key)
        tally = CollectionCounts(part.tally.to_document())
        tally.roll_back(seqno, self.versions.backward(part, seqno))
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
        return self.versions.meta_below(part, key, entry)[0] == MUTATION

    def raise_floor(
        self, vb_id: int, floor: int, purge: int, *, known_seqno: int = 0
    ) -> tuple[int, int]:
        """Give up the states below `floor` and the tombstones at or below `purge`, as far as they
        are committed (`Partition.floors_within`). Return the floor and the purge seqno of now.

        `floor` is the seqno of a change. `known_seqno` is a committed seqno that the master has
        told. The store drops what is below after it has merged the group that raised the floor.
        """
        part = self.partitions[vb_id]
        floor, purge = part.floors_within(floor, purge, known_seqno)
        if (floor, purge) != (part.history_floor, part.purge_seqno):
            part.history_floor, part.purge_seqno = floor, purge
            self.add_control(part, {"kind": "floor", "seqno": floor, "purge": purge})
        return floor, purge

    # -- collections -------------------------------------------------------------------------

    def set_manifest(self, manifest: Manifest) -> None:
        """Replace the collections manifest. Each active partition gets the system events; one that
        is fenced may be handed over, and gets them when it is served (`tell_missing_events`).

        Documents of a dropped collection are unreachable from now on and no longer counted.
        """
        assert not self.loading, "the seqnos of events are taken"
        events = events_between(self.manifest, manifest)
        self._adopt_manifest(manifest)
        self.manifest_group = self.group
        document: dict[str, object] = {"kind": "manifest", "manifest": manifest.to_document()}
        self._put_control(NODE_VB_ID, document)
        for part in self.partitions:
            if part.state == VbState.ACTIVE:
                for event in events:
                    self._tell(part, event)

    def is_reachable(self, key: bytes) -> bool:
        """Whether the collection of a stored key exists.

        Streams leave unreachable documents out, and compaction removes them entirely.
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
            backward = self.versions.backward(part, seqno)
            found = next((at for at, key in backward if not key[0]), 0)
        return found

    def tell_missing_events(self, part: Partition) -> None:
        """Add the system events that a partition lacks compared with the manifest.

        It lacks some if it was rolled back below them, or was not active when they happened. The
        manifest belongs to the node and does not roll back.
        """
        if self.manifest.uid:
            for event in missing_events(self.versions.system_keys(part), self.manifest):
                self._tell(part, event)

    def check_system_events(self, part: Partition) -> None:
        """Raise StoreDamagedError if `tell_missing_events` could not read what it needs.

        Call it before a change that must not stop halfway.
        """
        if self.manifest.uid:
            self.versions.system_keys(part)

    def _tell(self, part: Partition, event: ManifestEvent) -> None:
        seqno = part.high_seqno + 1
        entry = pack_system_event(part.vb_id, seqno, event, part.leader_epoch)
        self.apply(part, system_key(event), entry, seqno, 0)

    def _adopt_manifest(self, manifest: Manifest) -> None:
        self.manifest = manifest
        for part in self.partitions:
            part.item_count -= part.tally.forget(manifest)

    # -- merging -----------------------------------------------------------------------------

    def merge_soon(self) -> int:
        """Ask for a merge of all changes so far; return the group it must reach (0: none).

        A merge begins at a group boundary. So an empty open group gets an entry without effect.
        """
        if not (self.pending or self.commits.in_flight or self.memtables.active_bytes):
            return self.memtables.merging_group
        if not self.pending:
            part = self.partitions[0]
            floor, purge = part.history_floor, part.purge_seqno
            self.add_control(part, {"kind": "floor", "seqno": floor, "purge": purge})
        self.memtables.want(self.group)
        return self.group

    def freeze(self) -> None:
        """Set the memtable aside for a merge. Nothing may be pending."""
        assert not self.pending, "a freeze stands at a group boundary"
        self.memtables.freeze(self.group - 1)
        for part in self.partitions:
            part.freeze()
        self.due.freeze()

    def merged(self, report: MergeReport) -> None:
        """Take note that the store holds what was frozen; reads of it go to the store."""
        assert self.memtables.is_merging
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
            f"partition {vb_id} is in quarantine, because its stored data is damaged: {why}. It "
            "takes writes again after a branch at 0, which empties it; restore a backup then",
        )

    def drop_frozen(self, first_vb: int, last_vb: int) -> None:
        """Forget the frozen layers of a slice of partitions, `last_vb` excluded.

        The slice that ends with the last partition ends the merge.
        """
        assert self.memtables.is_merging
        if first_vb == 0:
            self.item_cache.begin_absorbing()
        for vb_id in range(first_vb, last_vb):
            part = self.partitions[vb_id]
            if vb_id in self.quarantined:
                part.take_back_frozen()
                continue
            if part.frozen is not None:
                self.item_cache.absorb(part, part.frozen.newest)
            part.drop_frozen()
        self.memtables.drop(last_vb - first_vb, self.num_vbuckets)
        self.due.drop(-((first_vb - self.num_vbuckets) // (last_vb - first_vb)))
        if last_vb == self.num_vbuckets:
            self.memtables.end()

    # -- recovery ----------------------------------------------------------------------------

    def continue_after(self, group: int) -> None:
        """Continue the numbering of groups after `group`, the last one in the log."""
        assert not self.pending, "groups are numbered before anything is written"
        self.group = group + 1
        self.commits.continue_after(group)

    def note_watermarks(self) -> None:
        """Have the next group tell the high watermarks of all partitions with replicas: the log
        has begun a segment, and earlier ones may be deleted.
        """
        for part in self.partitions:
            if part.has_copies:
                self.watermarks[part.vb_id] = part.committed_seqno

    def replay_watermarks(self, seqnos: Mapping[int, int]) -> None:
        """Take note of high watermarks that the log tells."""
        self.known_watermarks.update(seqnos)

    def replay_manifest(self, manifest: Manifest) -> None:
        """Adopt a manifest from the log; it is committed."""
        self._adopt_manifest(manifest)
        self.committed_manifest = manifest

    def begin_new_versions(self, vb_ids: Iterable[int] | None = None) -> list[int]:
        """Begin a new version of these partitions (None: all) at their end, because changes that
        somebody saw may be lost. Return the partitions; the control entries are in the open group.

        It undoes nothing and reads nothing, so damaged data is no obstacle.
        """
        chosen = range(len(self.partitions)) if vb_ids is None else vb_ids
        changed = list(chosen)
        for vb_id in changed:
            part = self.partitions[vb_id]
            last_group = part.last_group
            vb_uuid = draw_vb_uuid(self.draws)
            failover = part.failover.branch(vb_uuid, part.high_seqno, part.leader_epoch)
            self._put_history(part, failover, part.leader_epoch, part.high_seqno)
            part.last_group = last_group  # documents are what they were: reads need not wait
        return changed
