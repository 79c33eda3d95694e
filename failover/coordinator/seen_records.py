"""What nodes have seen of the metadata store, and whether it is older than that.
Pure.

**The newest records that a data folder has ever seen**, whatever the store says.

The metadata store may go back to an older copy: somebody restores one. Then each folder knows by
what it has seen that the store is older, and `meta_restore` builds the records anew.

Who calls it: the core of a node notes the records of partitions; the shell notes the others, and
keeps all of it in a file (`dcp.server.cluster.seen_file`).

Invariants
- the rank of a partition's newest record never falls, over restarts of the process as well;
- `kept_revision` is told to others only for the present connection to the store: revisions of
  another store, or of one that went back, mean something else;
- without a file (`is_kept_in_file` false) everything counts as kept at once.

**Whether the store is older than what nodes have seen**, as far as a view tells.

Each member says in its report what it has seen of the partitions that somebody misses a master of,
and of those whose record in the store is older (`failover.rules.election`).

Who calls it: the status of the cluster, and the restoration of the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from failover.coordinator.plans.request_answers import name_of
from failover.coordinator.records import (
    ClusterKeys,
    KeyKind,
    RecordUnreadableError,
    ReportedPartition,
    StoredPartition,
    decode_partition,
)
from failover.coordinator.view import ClusterView, Stored
from failover.metadata.metastore import KeyValue
from failover.rules.election import SuspectReport, knows_newer, must_speak
from failover.rules.isr import min_in_sync_of
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


META_RESTORE = "dcpctl cluster meta restore"
"""What builds the records anew."""


class OlderRecord(NamedTuple):
    """A partition whose record in the store is older than one that was seen."""

    vb_id: int
    members: frozenset[str]
    """Who has seen a newer one."""


def reports_in(view: ClusterView) -> dict[int, list[SuspectReport]]:
    """Return what members report, by partition."""
    found: dict[int, list[SuspectReport]] = {}
    for member, told in _told(view):
        report = SuspectReport(
            member, told.epoch, told.version_epoch, told.end_seqno, 0, told.is_electable, told.seen,
            told.is_sure,
        )  # fmt: skip
        found.setdefault(told.vb_id, []).append(report)
    return found


def _told(view: ClusterView) -> Iterator[tuple[str, ReportedPartition]]:
    for member, stored in view.reports.items():
        if stored.item.mod_revision > view.begun_revision:
            for told in stored.content.partitions:
                yield member, told


def older_records(view: ClusterView) -> list[OlderRecord]:
    """Return the partitions whose record is older than what somebody says to have seen."""
    found: dict[int, set[str]] = {}
    for member, told in _told(view):
        stored = view.partitions.get(told.vb_id)
        if stored is not None and told.seen > stored.content.record.rank:
            found.setdefault(told.vb_id, set()).add(member)
    return [OlderRecord(vb_id, frozenset(members)) for vb_id, members in sorted(found.items())]


def knows_newer_collections(view: ClusterView) -> frozenset[str]:
    """Return the members where a newer list of collections is in force than the store has. A master
    that has not seen that list serves no partition whose changes tell of it.
    """
    uid = 0 if view.manifest is None else view.manifest.content.uid
    told = view.collections.items()
    return frozenset(member for member, stored in told if stored.content.uid > uid)


def _needed(view: ClusterView, record: ReplicationRecord) -> int:
    setting = None if view.cluster is None else view.cluster.content.min_in_sync
    return min_in_sync_of(setting, record.counted_copies)


def why_not_elected(
    view: ClusterView, record: ReplicationRecord, reports: Sequence[SuspectReport]
) -> tuple[str, str]:
    """Return why nobody is elected for a partition by its record and by what is reported of it, and
    what to do; ("", ""): nothing of the kind.
    """
    if newer := knows_newer(record, reports):
        names = names_of(view, newer)
        why = (
            f"the metadata store is older than what node {names} {_have(newer)} seen, so nobody is "
            "elected by it"
        )
        return why, f"`{META_RESTORE}` builds the records anew from what the nodes have"
    needed = _needed(view, record)
    if silent := must_speak(record, reports, 0, min_in_sync=needed):
        names = names_of(view, silent)
        some = len(silent) - needed + 1
        why = (
            f"nobody is elected before {some} of {names} {'has' if some == 1 else 'have'} said "
            "what the newest record is that it has seen: the metadata store may be older"
        )
        advice = f"Start {names}. What is lost for good, `{META_RESTORE} --accept-loss` gives up"
        return why, advice
    return "", ""


def names_of(view: ClusterView, members: frozenset[str]) -> str:
    """Return what the operator calls these members."""
    return ", ".join(sorted(name_of(view, member) for member in members))


def older_collections_text(view: ClusterView, members: frozenset[str]) -> str:
    """Say who has a newer list of collections in force than the store has."""
    return (
        "the metadata store has an older list of collections than is in force on node "
        f"{names_of(view, members)}: it went back to a copy"
    )


def _have(members: frozenset[str]) -> str:
    return "has" if len(members) == 1 else "have"


def older_text(view: ClusterView, older: list[OlderRecord]) -> str:
    """Say of which partitions the store is older, and who knows it."""
    members = frozenset().union(*(each.members for each in older))
    return (
        f"the metadata store is older than what node {names_of(view, members)} {_have(members)} "
        f"seen: of {len(older)} partitions (partition {older[0].vb_id} is the first) it has an "
        "older "
        "record. Masters that run go on, nobody else is elected there, and no in-sync set changes"
    )
