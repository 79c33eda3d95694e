"""The newest records of a cluster that a data folder has ever seen, whatever the store says. Pure.

The metadata store may go back to an older copy: somebody restores one. Then each folder knows by
what it has seen that the store is older, and `meta_restore` builds the records anew.

Who calls it: the core of a node notes the records of partitions; the shell notes the others, and
keeps all of it in a file (`dcp.server.cluster.seen_file`).

Invariants
- the rank of a partition's newest record never falls, over restarts of the process as well;
- `kept_revision` is told to others only for the present connection to the store: revisions of
  another store, or of one that went back, mean something else;
- without a file (`is_kept_in_file` false) everything counts as kept at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from failover.coordinator.cluster_keys import ClusterKeys, KeyKind
from failover.coordinator.cluster_records import (
    RecordUnreadableError,
    StoredPartition,
    decode_partition,
)
from failover.coordinator.cluster_view import ClusterView, Stored
from failover.metadata.metastore import KeyValue
from failover.rules.replication_record import UNSEEN, Rank, ReplicationRecord

LASTING: Final = frozenset(
    {
        KeyKind.CLUSTER,
        KeyKind.MANIFEST,
        KeyKind.USERS,
        KeyKind.MEMBER,
        KeyKind.REMOVED,
        KeyKind.PARTITION,
    }
)
"""The kinds of records that outlive the processes of the cluster, but for the plan under way."""


class SeenRecord(NamedTuple):
    """A record as the store had it."""

    value: bytes
    mod_revision: int


class SeenContent(NamedTuple):
    """What is kept: the records by their keys without the root."""

    records: Mapping[str, SeenRecord]
    revision: int = 0
    """The store's, when the newest of them was seen."""


class SeenPiece(NamedTuple):
    """A content to be kept, and what is known to others when it is."""

    content: SeenContent
    era: int
    revision: int


class SeenRecords:
    """See the module. `kept` is what an earlier process of this folder has kept."""

    def __init__(
        self, keys: ClusterKeys, kept: SeenContent | None = None, *, is_kept_in_file: bool = False
    ) -> None:
        self._keys = keys
        self._is_kept_in_file = is_kept_in_file
        self._records: dict[str, SeenRecord] = dict(kept.records) if kept is not None else {}
        self._revision = kept.revision if kept is not None else 0
        self._partitions: dict[int, ReplicationRecord] = {}
        self.older: dict[int, Rank] = {}
        """Partitions whose record in the store is older than one that was seen, with a rank that a
        record must have to be believed."""
        self.kept_revision = 0
        """All records of partitions that the store had up to here are kept."""
        self._era = 0
        self._era_revision = 0
        """The newest mod revision of a partition's record that was noted in this era."""
        self._is_dirty = False
        for name, seen in self._records.items():
            key = keys.parse(keys.root + name.encode())
            if key is not None and key.kind is KeyKind.PARTITION:
                item = KeyValue(keys.root + name.encode(), seen.value, 1, seen.mod_revision, 1)
                try:
                    self._partitions[key.vb_id] = decode_partition(item).record
                except RecordUnreadableError:
                    continue  # a newer version wrote it; the partition's own epoch still counts

    @property
    def has_cluster(self) -> bool:
        """Whether the cluster's own record was ever seen."""
        return KeyKind.CLUSTER in self._records

    def revision_of(self, kind: KeyKind, member: str = "") -> int:
        """Return the mod revision of a record when it was seen last; 0: it never was."""
        seen = self._records.get(f"{kind}/{member}" if member else kind)
        return 0 if seen is None else seen.mod_revision

    def rank(self, vb_id: int) -> Rank:
        """Return the rank of the newest record of a partition that was seen."""
        record = self._partitions.get(vb_id)
        return UNSEEN if record is None else record.rank

    def record(self, vb_id: int) -> ReplicationRecord | None:
        """Return that record; None: none was seen."""
        return self._partitions.get(vb_id)

    def content(self) -> SeenContent:
        """Return all of it."""
        return SeenContent(dict(self._records), self._revision)

    # -- what the store has ------------------------------------------------------------------------

    def begin_again(self, era: int) -> None:
        """The store may be another one: what is told of its revisions begins anew."""
        if era != self._era:
            self._era, self._era_revision, self.kept_revision = era, 0, 0

    def note_partition(self, vb_id: int, stored: Stored[StoredPartition]) -> bool:
        """Take the record that the store has; return whether it is the newest that was seen."""
        record, item = stored.content.record, stored.item
        seen = self._partitions.get(vb_id)
        self._era_revision = max(self._era_revision, item.mod_revision)
        self._is_dirty = True
        if not self._is_kept_in_file:
            self.kept_revision = self._era_revision
        if seen is not None and (
            record.rank < seen.rank or (record.rank == seen.rank and record != seen)
        ):
            # Of two records with one rank nobody knows which one others have seen.
            forked = Rank(seen.epoch, seen.partition_epoch + 1)
            self.older[vb_id] = forked if record.rank == seen.rank else seen.rank
            return False
        self.older.pop(vb_id, None)
        self._partitions[vb_id] = record
        self._take(item)
        return True

    def note_others(self, view: ClusterView) -> None:
        """Take the other lasting records of a view."""
        keys = [view.keys.cluster, view.keys.manifest, view.keys.users, view.keys.removed]
        keys += [view.keys.of_member(KeyKind.MEMBER, member) for member in view.members]
        for key in keys:
            item = view.item(key)
            if item is not None and item.mod_revision > self._seen_revision(key):
                self._take(item)
        if view.cluster is None:
            return
        prefix = f"{KeyKind.MEMBER}/"
        removed_revision = view.mod_revision(view.keys.removed)
        for name in [name for name in self._records if name.startswith(prefix)]:
            is_gone = name.removeprefix(prefix) not in view.members
            if is_gone and self._records[name].mod_revision < removed_revision:
                del self._records[name]
                self._is_dirty = True

    def _seen_revision(self, key: bytes) -> int:
        seen = self._records.get(self._name(key))
        return 0 if seen is None else seen.mod_revision

    def _name(self, key: bytes) -> str:
        return key.removeprefix(self._keys.root).decode("utf-8", "replace")

    def _take(self, item: KeyValue) -> None:
        self._records[self._name(item.key)] = SeenRecord(item.value, item.mod_revision)
        self._revision = max(self._revision, item.mod_revision)
        self._is_dirty = True

    def is_older(self, view: ClusterView, kind: KeyKind) -> bool:
        """Return whether a view has an older record of the whole cluster than was seen, or none."""
        key = self._keys.root + kind.encode()
        return view.mod_revision(key) < self.revision_of(kind)

    # -- the file ----------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether something is to be kept."""
        return self._is_dirty

    def take_piece(self) -> SeenPiece | None:
        """Return what is to be kept now; None: nothing has changed."""
        if not self._is_dirty:
            return None
        self._is_dirty = False
        return SeenPiece(self.content(), self._era, self._era_revision)

    def kept(self, piece: SeenPiece) -> None:
        """A piece is on disk."""
        if piece.era == self._era:
            self.kept_revision = max(self.kept_revision, piece.revision)

    def not_kept(self) -> None:
        """A piece could not be written: it is tried again."""
        self._is_dirty = True
