"""A partition as a list of versions, and a writer of segments: what the store is compared to."""

from __future__ import annotations

from dataclasses import dataclass, field

from memory.log_device import MemoryLogDevice
from support.stored_bytes import pack_deletion, pack_mutation
from vbucket.log.writer import LogWriter
from vbucket.model.control import pack_control
from vbucket.model.entry import PREFIX_BYTES
from vbucket.store.environment import KvEnv
from vbucket.store.key_record import StoredMeta
from vbucket.store.records import STORE_FORMAT_VERSION, NodeRecord, PartitionRecord
from vbucket.store.store import Store

MUTATION = 0x57
DELETION = 0x58


@dataclass
class Version:
    seqno: int
    key: bytes
    prev_seqno: int
    is_live: bool
    entry: bytes
    meta: StoredMeta


@dataclass
class ModelPartition:
    """The truth: every version, in order."""

    vb_id: int
    versions: list[Version] = field(default_factory=list)
    high_seqno: int = 0
    max_cas: int = 0
    epoch: int = 0
    failover: list[list[int]] = field(default_factory=lambda: [[1, 0, 0]])

    def write(self, key: bytes, value: bytes | None, *, gap: int = 0) -> bytes:
        """Set (or with None delete) a key, after `gap` unused seqnos; return the entry."""
        before = self.newest(key)
        self.high_seqno = seqno = self.high_seqno + 1 + gap
        self.max_cas += 1 << 16
        prev_seqno = before.seqno if before else 0
        rev_seqno = before.meta.rev_seqno + 1 if before else 1
        shared = {
            "vb_id": self.vb_id, "key": key, "cas": self.max_cas, "seqno": seqno,
            "rev_seqno": rev_seqno, "prev_seqno": prev_seqno, "epoch": self.epoch,
        }  # fmt: skip
        if value is None:
            entry = pack_deletion(**shared)
            meta = StoredMeta(DELETION, 0, self.max_cas, seqno, rev_seqno, 0, 0)
        else:
            entry = pack_mutation(**shared, value=value, flags=seqno + 7, expiry=9, datatype=1)
            meta = StoredMeta(MUTATION, 1, self.max_cas, seqno, rev_seqno, seqno + 7, 9)
        self.versions.append(Version(seqno, key, prev_seqno, value is not None, entry, meta))
        return entry

    def branch(self, seqno: int) -> bytes:
        """Undo what lies above `seqno` and begin a new version; return the control entry."""
        self.epoch += 1
        kept = [entry for entry in self.failover if entry[1] <= seqno]
        self.failover = [[1000 + self.epoch, seqno, self.epoch], *kept][:200]
        return self.undo(seqno)

    def undo(self, seqno: int) -> bytes:
        """Undo what lies above `seqno`, as a replica that goes on in the same version; return the
        control entry.
        """
        self.versions = [version for version in self.versions if version.seqno <= seqno]
        self.high_seqno = min(self.high_seqno, seqno)
        kept = [entry for entry in self.failover if entry[1] <= seqno]
        self.failover = kept or self.failover[-1:]
        document = {"kind": "failover", "log": self.failover, "rollback_to": seqno}
        return pack_control(self.vb_id, document)

    def hand_over(self, *, with_log: bool = False) -> bytes:
        """Begin a leader epoch and no version; return the control entry. `with_log`: as a replica
        writes it that takes over its master's failover log.
        """
        self.epoch += 1
        if with_log:
            document = {"kind": "failover", "log": self.failover, "rollback_to": None}
            return pack_control(self.vb_id, {**document, "epoch": self.epoch})
        return pack_control(self.vb_id, {"kind": "epoch", "epoch": self.epoch})

    def newest(self, key: bytes) -> Version | None:
        return next((v for v in reversed(self.versions) if v.key == key), None)

    def between(self, start: int, end: int) -> list[Version]:
        return [version for version in self.versions if start <= version.seqno <= end]

    def keys(self) -> list[bytes]:
        return sorted({version.key for version in self.versions})

    def check(self, store: Store, all_keys: list[bytes]) -> None:
        """Compare everything the store can say with the truth."""
        vb_id, high = self.vb_id, self.high_seqno
        record = store.partition(vb_id)
        assert record is not None
        assert record.high_seqno == high
        assert record.max_cas == self.max_cas
        assert record.failover == self.failover
        assert record.epoch == self.epoch
        live = [key for key in self.keys() if (newest := self.newest(key)) and newest.is_live]
        assert record.item_count == len(live)
        assert store.keys(vb_id, b"", 1000) == self.keys()
        for key in all_keys:
            newest = self.newest(key)
            assert store.meta(vb_id, key) == (newest.meta if newest else None)
        entries = {version.seqno: version.entry for version in self.versions}
        for seqno in range(1, high + 2):
            assert store.entry(vb_id, seqno) == entries.get(seqno)
        middle = (high + 1) // 2
        for start, end in [(1, high), (1, middle), (middle, high), (middle, middle), (1, high + 9)]:
            self.check_range(store, start, end)

    def check_range(self, store: Store, start: int, end: int) -> None:
        """Compare the answers about seqnos in [start, end]."""
        there = self.between(start, end)
        old = {version.prev_seqno for version in there if version.prev_seqno >= start}
        assert store.superseded(self.vb_id, start, end) == old
        changes: dict[bytes, int] = {}
        for version in there:
            if version.prev_seqno < start:  # what is there begins later where it was compacted
                changes.setdefault(version.key, version.prev_seqno)
        assert store.first_changes_after(self.vb_id, start - 1, end) == changes
        for bytes_max in (1, 500, 1 << 20):
            frames: list[bytes] = []
            at = start
            while at <= end:
                batch = store.frames(self.vb_id, at, end, b"opaq", old, bytes_max)
                assert batch.wire_bytes == sum(map(len, batch.frames))
                assert at < batch.next_seqno <= end + 1
                assert batch.frames or batch.next_seqno == end + 1
                assert sum(map(len, batch.frames[:-1])) < bytes_max
                frames += batch.frames
                at = batch.next_seqno
            wanted = [version.entry[PREFIX_BYTES:] for version in there if version.seqno not in old]
            assert frames == [frame[:12] + b"opaq" + frame[16:] for frame in wanted]


class SegmentWriter:
    """Writes groups into sealed segments, the way the engine and the shell do."""

    def __init__(self) -> None:
        self.device = MemoryLogDevice()
        self.writer = LogWriter(self.device)
        self.writer.rotate()
        self.group = 0
        self.pending: list[bytes] = []

    def add(self, *entries: bytes) -> None:
        self.pending += entries

    def end_group(self) -> None:
        self.group += 1
        self.writer.append(self.group, b"".join(self.pending))
        self.pending = []

    def seal(self) -> None:
        if self.pending:
            self.end_group()
        self.writer.rotate()

    def sealed(self) -> list[tuple[int, bytes]]:
        return [(number, self.device.read(number)) for number in self.device.segments()[:-1]]


def create_store(env: KvEnv, vb_ids: list[int], **changes: object) -> Store:
    """Return a new store with empty partitions."""
    node = NodeRecord(STORE_FORMAT_VERSION, env.engine, "00ff", clean_shutdown=False,
                       durability="commit",
                      merged_segment=0)._replace(**changes)  # fmt: skip
    empty = PartitionRecord(1, 0, 0, 0, 0, 0, 0, [[1, 0, 0]])
    return Store.create(env, node, dict.fromkeys(vb_ids, empty))
