"""One partition: its seqnos, its failover log, and the data that is not in LMDB yet.

The keyspace has 1,024 of these. A partition refers to every version since the last merge twice,
without a copy: in seqno order (`entries`, for streams and rollbacks), and the newest by key
(`newest`, for documents). Both exist in two layers, because writes go on during a merge:

    active   changes since the last freeze            newest wins
    frozen   changes that the running merge puts into the store
    store    merged changes: by_seqno up to `merged_seqno`, by_key

Invariants
- entries are in seqno order; the seqnos of frozen and active entries are above `merged_seqno`
  until the merge that covers them is done;
- committed_seqno <= high_seqno; synced_seqno <= high_seqno. A sync of the log raises
  `synced_seqno`. `committed_seqno` is the high watermark: what clients and streams may see. With
  one copy, a group that is as safe as the durability requires raises both; `interval` and `none`
  commit before the sync. With more copies, the in-sync replicas raise it, later than the sync;
- purge_seqno < history_floor <= high_seqno, or the first two are 0; every seqno from the floor on
  has a version. The floor is committed, although a replica may not know that yet;
- while `incomplete_snapshot` is set, seqnos above its start have gaps, and documents are those of
  no seqno. history_floor <= start < high_seqno <= end, since the note and the first changes are in
  one group. Such a partition is a replica, and nobody
  reads it;
- leader_epoch never falls. It is at least the epoch in which the current version began; after a
  handover it is higher. New entries carry it, and no entry carries a higher one;
- `ABSENT` (b"") in a `newest` layer means that the key does not exist, whatever lower layers hold;
- versions in the store above `merged_seqno` do not count: a rollback undid them, and the next merge
  removes them.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum, IntEnum, auto
from typing import Final, NamedTuple

from sortedcontainers import SortedList

from failover.rules.history import FailoverLog
from failover.rules.write_answer import WriteGuard
from vbucket.model.collection_counts import CollectionCounts
from vbucket.model.control import SnapshotWindow
from vbucket.model.entry import seqno_of
from vbucket.store.records import Mended, PartitionRecord

ABSENT: Final = b""
_NO_HOLDS: Final[dict[object, str]] = {}
"""All partitions share it while nothing holds their writes: each change looks at it, and a table of
each partition's own would not be in the processor's cache."""


class VbState(IntEnum):
    """State of a partition on this node, numbered as on the wire."""

    ACTIVE = 1
    REPLICA = 2
    PENDING = 3
    DEAD = 4
    FENCED = 5
    """Active, but it may not answer now: its replicas have not confirmed this master for a while.
    Only in memory: the log, the store and the wire know it as active (`Partition.durable_state`).
    """


class Hold(Enum):
    """Why the node refuses writes for a while."""

    LOG_FULL = auto()
    """The disk has no room for the log."""
    STORE_BEHIND = auto()
    """Merging is so far behind that the memtables are full."""
    QUARANTINE = auto()
    """The stored data of this partition is damaged; merges leave it out."""
    REPLICATION = auto()
    """The partition cannot commit a change now: too few replicas are in sync, or this master is not
    confirmed."""
    ENROLLING = auto()
    """The node is becoming a member of a cluster."""
    LOADING = auto()
    """Documents of a restore go straight into the store (`vbucket.engine.loading.loads`)."""


class Layer:
    """A memtable layer of one partition."""

    __slots__ = ("cut_seqno", "entries", "newest")

    def __init__(self) -> None:
        self.newest: dict[bytes, bytes] = {}
        self.entries: list[bytes] = []
        self.cut_seqno: int | None = None
        """Of the active layer: the lowest rollback seqno since the last freeze. The running merge
        does not know it."""

    def position_of(self, seqno: int) -> int:
        """Return the index of the first entry at or above `seqno`."""
        entries = self.entries
        if not entries:
            return 0
        # Seqnos are dense unless a de-duplicated backfill filled this layer.
        guess = seqno - seqno_of(entries[0])
        if guess <= 0:
            return 0
        if guess >= len(entries):
            if seqno_of(entries[-1]) < seqno:
                return len(entries)  # the common case: the stream is up to date
        elif seqno_of(entries[guess]) == seqno:
            return guess
        return bisect_left(entries, seqno, key=seqno_of)

    def between(self, start_seqno: int, end_seqno: int) -> list[bytes]:
        """Return the entries with start <= seqno <= end."""
        entries = self.entries
        if not entries:
            return []
        # A live stream asks for the entries up to the end, and no seqno is missing there.
        if seqno_of(entries[-1]) <= end_seqno:
            low = start_seqno - seqno_of(entries[0])
            if 0 <= low < len(entries) and seqno_of(entries[low]) == start_seqno:
                return entries[low:]
        return entries[self.position_of(start_seqno) : self.position_of(end_seqno + 1)]

    def cut_above(self, seqno: int) -> None:
        """Forget the entries above `seqno`; the caller corrects `newest`."""
        del self.entries[self.position_of(seqno + 1) :]


class Partition:
    """See the module. The engine's hot path uses the attributes directly."""

    __slots__ = (
        "active",
        "append_entry",
        "branch_group",
        "committed_seqno",
        "failover",
        "frozen",
        "guard",
        "has_copies",
        "high_seqno",
        "history_floor",
        "holds",
        "incomplete_snapshot",
        "is_unheard",
        "item_count",
        "last_group",
        "leader_epoch",
        "max_cas",
        "may_send_back",
        "mended",
        "merged_seqno",
        "newest",
        "older",
        "older_bytes",
        "pins",
        "purge_seqno",
        "recent",
        "recent_bytes",
        "state",
        "state_group",
        "synced_seqno",
        "tally",
        "undo_group",
        "vb_id",
        "vb_uuid",
    )

    def __init__(self, vb_id: int, failover: FailoverLog) -> None:
        self.vb_id = vb_id
        self.state = VbState.ACTIVE
        self.failover = failover
        self.vb_uuid = failover.current.vb_uuid
        self.leader_epoch = failover.current.epoch
        """The epoch of the partition's present master, for new entries and versions."""
        self.high_seqno = 0
        self.committed_seqno = 0
        self.synced_seqno = 0
        self.merged_seqno = 0
        self.purge_seqno = 0
        self.history_floor = 0
        self.incomplete_snapshot: SnapshotWindow | None = None
        self.pins: SortedList[int] = SortedList()
        """Seqnos of open read views: the history floor must not rise above any of them."""
        self.holds = _NO_HOLDS
        """Who holds writes (a `Hold`, or a takeover) -> the reason for clients. Writes are refused
        while there is any."""
        self.max_cas = 0
        self.mended: Mended | None = None
        self.item_count = 0
        self.tally = CollectionCounts()
        self.last_group = 0
        """The last commit group that changed the partition; answers wait for it."""
        self.branch_group = 0
        """The commit group that began the newest version, 0 if it is older than this process."""
        self.undo_group = 0
        """The commit group of the last branch that may have undone changes; readers wait for it."""
        self.state_group = 0
        """The last commit group that changed the state, 0 if it is older than this process."""
        self.has_copies = False
        """Whether replicas must have a change before it is committed (see `Keyspace`)."""
        self.is_unheard = False
        """Whether this is a replica that hears no master: what it holds may be out of date."""
        self.guard: WriteGuard | None = None
        """Says whether a change with a durability frame may be applied, and whether it is done;
        None: the partition has no replicas."""
        self.may_send_back = True
        """Whether a consumer may be told to roll back. A master that does not know yet what is
        committed, and a replica, may be behind the consumer."""
        self.active = Layer()
        self.newest = self.active.newest
        """`active.newest`, to save the hot path a lookup."""
        self.append_entry = self.active.entries.append
        """`active.entries.append`, likewise."""
        self.frozen: Layer | None = None
        self.recent: dict[bytes, bytes] = {}
        """Cached entries of the store. Only `vbucket.engine.documents.item_cache` changes the cache
        attributes."""
        self.older: dict[bytes, bytes] = {}
        self.recent_bytes = 0
        self.older_bytes = 0

    @property
    def durable_state(self) -> VbState:
        """The state as the log, the store and other nodes know it."""
        return VbState.ACTIVE if self.state == VbState.FENCED else self.state

    @property
    def persisted_seqno(self) -> int:
        """The last seqno that is on disk and committed: what clients are told."""
        return min(self.synced_seqno, self.committed_seqno)

    def hold_writes(self, holder: object, why: str) -> None:
        """Refuse writes until this holder and all others release them."""
        self.holds = {**self.holds, holder: why}

    def release_writes(self, holder: object) -> None:
        """Remove a hold; without one, nothing happens."""
        if holder in self.holds:
            left = {each: why for each, why in self.holds.items() if each != holder}
            self.holds = left or _NO_HOLDS

    def lower_cas(self, mended: Mended) -> None:
        """Lower the highest CAS of the partition."""
        self.max_cas, self.mended = mended.cas, mended

    def set_failover(self, failover: FailoverLog) -> None:
        """Replace the failover log; its newest entry is the current version. The leader epoch is
        at least the one in which that version began.
        """
        self.failover = failover
        self.vb_uuid = failover.current.vb_uuid
        self.raise_epoch(failover.current.epoch)

    def raise_epoch(self, epoch: int) -> None:
        """Raise the leader epoch; a lower one changes nothing."""
        self.leader_epoch = max(self.leader_epoch, epoch)

    def floors_within(self, floor: int, purge: int, known_seqno: int = 0) -> tuple[int, int]:
        """Return how far the history floor and the purge seqno may rise towards these values.

        Neither falls. Neither rises above the committed seqno, whoever asks: a replica that must
        cut off changes that were not committed could not stop there, and would start again at 0.
        `known_seqno` is a higher committed seqno that the master has told (0: none).
        """
        limit = min(max(self.committed_seqno, known_seqno), self.high_seqno)
        floor = max(min(floor, limit), self.history_floor)
        purge = max(min(purge, floor - 1, limit - 1), self.purge_seqno)
        assert floor <= limit or floor == self.history_floor, "only what is committed is given up"
        assert purge < limit or purge == self.purge_seqno, "only what is committed is given up"
        assert purge < floor or not floor, "what is purged lies below the floor"
        return floor, purge

    def freeze(self) -> None:
        """Make the active layer the frozen one. There must be no frozen layer."""
        assert self.frozen is None, "a merge of this partition is under way"
        if self.active.entries or self.active.newest:
            self.frozen = self.active
            self.active = Layer()
            self.newest = self.active.newest
            self.append_entry = self.active.entries.append
        self.active.cut_seqno = None

    def become_merged(self, merged_seqno: int) -> None:
        """Take note that the store holds everything up to `merged_seqno` as of the freeze."""
        if self.active.cut_seqno is not None:
            merged_seqno = min(merged_seqno, self.active.cut_seqno)
        # The store may have more: a load came after what this merge brought in.
        self.merged_seqno = max(merged_seqno, self.merged_seqno)

    def drop_frozen(self) -> None:
        """Forget the frozen layer after `become_merged`."""
        self.frozen = None

    def take_back_frozen(self) -> None:
        """Put the frozen layer back below the active one, because the merge left it out."""
        frozen, active = self.frozen, self.active
        if frozen is None:
            return
        frozen.newest.update(active.newest)
        frozen.entries += active.entries
        frozen.cut_seqno = active.cut_seqno
        self.frozen = None
        self.active = frozen
        self.newest = frozen.newest
        self.append_entry = frozen.entries.append

    def layers(self) -> tuple[Layer, ...]:
        """Return the layers in seqno order."""
        return (self.active,) if self.frozen is None else (self.frozen, self.active)

    def roll_back(self, seqno: int, restored: dict[bytes, bytes]) -> None:
        """Undo everything above `seqno`. `restored` maps each key that changed above it to its
        entry as of `seqno`, or ABSENT.
        """
        assert self.history_floor <= seqno <= self.high_seqno
        assert self.purge_seqno < seqno or not self.purge_seqno
        for layer in self.layers():
            layer.cut_above(seqno)
        self.newest.update(restored)
        self.high_seqno = seqno
        if self.incomplete_snapshot is not None:
            self.incomplete_snapshot = self.incomplete_snapshot.after_rollback(seqno)
        self.mended = self.mended and self.mended.cut(seqno)
        self.committed_seqno = min(self.committed_seqno, seqno)
        self.synced_seqno = min(self.synced_seqno, seqno)
        self.merged_seqno = min(self.merged_seqno, seqno)
        cut_seqno = self.active.cut_seqno
        self.active.cut_seqno = seqno if cut_seqno is None else min(cut_seqno, seqno)

    def empty(self) -> None:
        """Undo everything. Data in the store does not count; the next merge removes it. Seqnos
        start again at 1 and all counts are 0. The highest CAS is kept.
        """
        if self.frozen is not None:
            self.frozen = Layer()
        self.active = Layer()
        self.newest = self.active.newest
        self.append_entry = self.active.entries.append
        self.high_seqno = self.committed_seqno = self.synced_seqno = self.merged_seqno = 0
        self.history_floor = self.purge_seqno = 0
        self.incomplete_snapshot = None
        self.mended = self.mended and self.mended.cut(0)
        self.item_count = 0
        self.tally = CollectionCounts()
        self.active.cut_seqno = 0


def restored(vb_id: int, record: PartitionRecord) -> Partition:
    """Return a partition as the store has it."""
    part = Partition(vb_id, FailoverLog.from_document(record.failover))
    part.raise_epoch(record.epoch)
    part.state = VbState(record.state)
    part.high_seqno = part.committed_seqno = part.synced_seqno = record.high_seqno
    part.merged_seqno = record.high_seqno
    part.purge_seqno = record.purge_seqno
    part.history_floor = record.history_floor
    if record.snapshot is not None:
        part.incomplete_snapshot = SnapshotWindow.from_document(record.snapshot)
    part.max_cas = record.max_cas
    part.mended = Mended(*record.mended) if record.mended else None
    part.item_count = record.item_count
    part.tally = CollectionCounts(record.tally)
    return part


class BranchRefusedError(Exception):
    """A history branch cannot begin there; the text says why."""


class FloorError(BranchRefusedError):
    """The branch point is below the history floor. A branch at 0 is still possible."""


class Branch(NamedTuple):
    """A new partition version that an operator asked for.

    `undone_keys` counts the keys whose newest version changed. For a branch at 0 it counts the
    documents that were there: finding all keys would take longer than undoing them.
    """

    vb_id: int
    failover: FailoverLog
    seqno: int
    undone_seqnos: int
    undone_keys: int


def check_undo(part: Partition, at_seqno: int) -> None:
    """Raise BranchRefusedError if a partition cannot go back to a seqno."""
    vb_id = part.vb_id
    if at_seqno > part.high_seqno:
        raise BranchRefusedError(
            f"partition {vb_id} ends at seqno {part.high_seqno}; a branch cannot begin at "
            f"{at_seqno}"
        )
    if 0 < at_seqno < part.history_floor:
        raise FloorError(
            f"partition {vb_id} cannot go back to {at_seqno}: its history floor is "
            f"{part.history_floor}, and older versions may have been removed by compaction. It can "
            f"go back to {part.history_floor} and above, or to 0"
        )
