"""The store's records of the node, its partitions and collections, and the end of the log. Pure.

    meta      b"node"             NodeRecord                                   (CBOR)
              b"manifest"         vbucket.model.manifest.Manifest.to_document        (CBOR)
              b"clean-end"        CleanEnd, from a clean stop to the next start (CBOR)
              b"quarantine"       vb -> Quarantined                            (CBOR)
    failover  vb                  [[vb_uuid, seqno, epoch], ...] newest first  (CBOR)
    state     vb                  the rest of PartitionRecord                  (CBOR)

Who calls it: `vbucket.store.store`, which adds keys and versions; the merge and recovery write
records.

Invariant: every record has a CRC-32C over table, key and document, checked on every read. It is
stored before the document.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final, NamedTuple

import cbor2
import google_crc32c

from vbucket.log.device import UnknownFormatError
from vbucket.log.end_mark import LogEnd
from vbucket.model.ids import NUM_VBUCKETS
from vbucket.model.manifest import INITIAL_MANIFEST, Manifest
from vbucket.store.environment import (
    Buffer,
    KvReader,
    KvWrite,
    StoreFailedError,
    partition_of,
    place_of,
)
from vbucket.store.key_record import RecordDamagedError

STORE_FORMAT_VERSION: Final = 5
"""Format 4 has no `PartMerged`; a merge makes it 5. Formats 1 to 3 were in no release."""
OLDEST_FORMAT_VERSION: Final = 4
META_TABLE: Final = "meta"
FAILOVER_TABLE: Final = "failover"
STATE_TABLE: Final = "state"
BY_KEY_TABLE: Final = "by_key"
BY_SEQNO_TABLE: Final = "by_seqno"
EXPIRY_TABLE: Final = "expiry"
TABLES: Final = (
    META_TABLE, FAILOVER_TABLE, STATE_TABLE, BY_KEY_TABLE, BY_SEQNO_TABLE, EXPIRY_TABLE,
)  # fmt: skip
"""The tables of a store's KvEnv."""
RECORD_TABLES: Final = (META_TABLE, FAILOVER_TABLE, STATE_TABLE)
"""Those that are small: a start reads all of them."""

_NODE_KEY: Final = b"node"
_MANIFEST_KEY: Final = b"manifest"
_CLEAN_END_KEY: Final = b"clean-end"
_QUARANTINE_KEY: Final = b"quarantine"
_CRC_BYTES: Final = 4
_crc32c = google_crc32c.value


class Mended(NamedTuple):
    """The last time the partition's highest CAS was lowered: versions up to `seqno` may have a CAS
    above `cas`, and are older than `time_ns`.
    """

    seqno: int
    cas: int
    time_ns: int

    def cut(self, seqno: int) -> Mended:
        """Return what holds after a rollback to `seqno`."""
        return self._replace(seqno=min(self.seqno, seqno))


class Quarantined(NamedTuple):
    """A quarantined partition: its stored data is damaged, so merges leave it out.

    The partition's entries stay in memory, and in log segments that are kept for it. Writes to it
    are refused. Reads and streams of undamaged data go on. A branch at 0 ends the quarantine,
    because then a merge does not need the damaged data. The merge writes the quarantine in the
    transaction that leaves a partition out; a start reads it, and replays what the store lacks.

    Invariant: the store has the partition as it was before `first_segment`. The log keeps the
    segments `first_segment` to `last_segment` with all later changes.
    """

    first_segment: int
    last_segment: int
    max_cas: int
    """The highest CAS of the entries that are not merged."""
    why: str


Quarantine = Mapping[int, Quarantined]
"""By partition."""


class PartitionRecord(NamedTuple):
    """What the store knows of a partition.

    `epoch` is the leader epoch: it never falls, and is at least that of the newest version.
    `item_count` counts live documents. `failover` is [[vb_uuid, seqno, epoch], ...], newest first.
    `last_seqno` is that of the last version in a block; `high_seqno` may be above it after a
    rollback to a seqno that has no version. Versions superseded at or below `history_floor` may be
    gone, and tombstones at or below `purge_seqno`, which is below the floor (or both are 0).
    """

    state: int
    high_seqno: int
    purge_seqno: int
    history_floor: int
    max_cas: int
    item_count: int
    epoch: int
    failover: list[list[int]]
    last_seqno: int = 0
    tally: list[Any] | None = None
    """vbucket.model.collection_counts.CollectionCounts.to_document."""
    versions: int = 0
    """Versions in by_seqno."""
    keys: int = 0
    """Keys in by_key, deleted ones too."""
    compacted: list[int] | None = None
    """History floor, purge seqno and manifest uid of the last compaction that was finished."""
    mended: list[int] | None = None
    """`Mended`. The document omits it if it is None."""
    snapshot: list[int] | None = None
    """`vbucket.model.control.SnapshotWindow` of a replica that has a part of the snapshot. The
    document omits it if it is None."""


class PartMerged(NamedTuple):
    """A merge that has not come to its end. Of the groups of the log after `merged_segment` and up
    to `group`, the store has all that partitions below `vb_id` have there, and nothing of others.
    It has the newest manifest of collections: partitions count the documents of each.
    """

    group: int
    vb_id: int


class NodeRecord(NamedTuple):
    """What the store knows of its node. All segments <= `merged_segment` are in the store.

    `engine_version` is that of the KvEnv, `node_id` is hex.
    """

    format_version: int
    engine_version: str
    node_id: str
    clean_shutdown: bool
    durability: str
    merged_segment: int
    merged_end: list[int] | None = None
    """The last record of the log that the store has merged (`LogEnd.to_document`). None: nothing
    was merged. The document omits it then."""
    part_merged: list[int] | None = None
    """`PartMerged`. The document omits it if it is None, because formats before 5 do not know it.
    """
    partitions: int = NUM_VBUCKETS
    """How many the node has, since its store was created. The document omits the default, which
    is what formats before 5 have."""


class CleanEnd(NamedTuple):
    """The end of the log at a clean stop, and the state of the partitions then."""

    end: LogEnd
    partitions: dict[int, tuple[int, int]]
    """vb -> high seqno, vb_uuid."""


class RecordView:
    """Reads the records of one state."""

    def __init__(self, reader: KvReader) -> None:
        self._reader = reader

    def node(self) -> NodeRecord | None:
        """Return the node's record, None if the store was never created.

        Raises UnknownFormatError for a format that this program does not know.
        """
        document = self._document(META_TABLE, _NODE_KEY)
        if document is None:
            return None
        if not OLDEST_FORMAT_VERSION <= document["format_version"] <= STORE_FORMAT_VERSION:
            raise UnknownFormatError(
                f"the store has format version {document['format_version']}, this program knows "
                f"{OLDEST_FORMAT_VERSION} to {STORE_FORMAT_VERSION}; use the version of dcpd that "
                "wrote it, or move the data with a backup"
            )
        return NodeRecord(**document)

    def manifest(self) -> Manifest:
        """Return the collections manifest, the initial one if none was ever written."""
        document = self._document(META_TABLE, _MANIFEST_KEY)
        return INITIAL_MANIFEST if document is None else Manifest.from_document(document)

    def clean_end(self) -> CleanEnd | None:
        """Return the end of the log at the last clean stop. None if the last stop was not clean."""
        document = self._document(META_TABLE, _CLEAN_END_KEY)
        if document is None:
            return None
        end, partitions = document
        return CleanEnd(LogEnd.from_document(end), {v: tuple(p) for v, p in partitions.items()})

    def quarantine(self) -> dict[int, Quarantined]:
        """Return the quarantined partitions."""
        document = self._document(META_TABLE, _QUARANTINE_KEY) or {}
        return {vb_id: Quarantined(*item) for vb_id, item in document.items()}

    def partition(self, vb_id: int) -> PartitionRecord | None:
        """Return a partition's record, None if it was never created."""
        key = vb_id.to_bytes(2, "big")
        document = self._document(STATE_TABLE, key)
        if document is None:
            return None
        failover = self._document(FAILOVER_TABLE, key)
        if failover is None:
            text = f"partition {vb_id}: the store has a state and no failover log"
            raise RecordDamagedError(text, vb_id)
        return PartitionRecord(**document, failover=failover)

    def partitions(self, without: Container[int] = ()) -> dict[int, PartitionRecord]:
        """Return the records of all partitions except those in `without`."""
        records: dict[int, PartitionRecord] = {}
        for key, _ in self._reader.range(STATE_TABLE, b"\x00"):
            vb_id = int.from_bytes(key, "big")
            if vb_id in without:
                continue
            record = self.partition(vb_id) if len(key) == 2 else None
            if record is None:
                raise RecordDamagedError(
                    f"table {STATE_TABLE} of the store has a record of {key.hex()}, which a "
                    "look-up does not find; check the disk and restore a backup"
                )
            records[vb_id] = record
        return records

    def _document(self, table: str, key: bytes) -> Any:
        # Not `get`, which trusts the pages that it reads.
        found = self._reader.last_at_or_before(table, key)
        if found is None or found[0] != key:
            for beside, other in self._reader.neighbours(table, key):
                check_document(table, beside, other)
            return None
        return read_document(table, key, found[1])


def put_node(write: KvWrite, node: NodeRecord) -> None:
    """Write the node's record."""
    document = node._asdict()
    for name in ("merged_end", "part_merged", "partitions"):
        if document[name] == NodeRecord._field_defaults[name]:
            del document[name]
    _put_document(write, META_TABLE, _NODE_KEY, document)


def put_manifest(write: KvWrite, manifest: Manifest) -> None:
    """Write the collections manifest."""
    _put_document(write, META_TABLE, _MANIFEST_KEY, manifest.to_document())


def put_clean_end(write: KvWrite, clean_end: CleanEnd | None) -> None:
    """Write the end of the log at a clean stop; None: remove it."""
    if clean_end is None:
        write.delete(META_TABLE, _CLEAN_END_KEY)
    else:
        document = [clean_end.end.to_document(), clean_end.partitions]
        _put_document(write, META_TABLE, _CLEAN_END_KEY, document)


def put_quarantine(write: KvWrite, items: Quarantine) -> None:
    """Write the quarantine."""
    if items:
        _put_document(
            write, META_TABLE, _QUARANTINE_KEY, {vb_id: list(item) for vb_id, item in items.items()}
        )
    else:
        write.delete(META_TABLE, _QUARANTINE_KEY)


def put_partition(
    write: KvWrite, vb_id: int, record: PartitionRecord, stored: PartitionRecord | None = None
) -> None:
    """Write a partition's record, its failover log included. `stored`: the record that the store
    has; what is the same there is not written.
    """
    key = vb_id.to_bytes(2, "big")
    document = record._asdict()
    for name in ("mended", "snapshot"):
        if document[name] is None:
            del document[name]
    failover = document.pop("failover")
    if stored is None or stored.failover != failover:
        _put_document(write, FAILOVER_TABLE, key, failover)
    _put_document(write, STATE_TABLE, key, document)


def put_failover(write: KvWrite, vb_id: int, log: list[list[int]]) -> None:
    """Write a partition's failover log. Raises StoreFailedError for an unknown partition."""
    record = RecordView(write).partition(vb_id)
    if record is None:
        raise StoreFailedError(
            f"partition {vb_id}: the store has no such partition; create it first"
        )
    epoch = max(record.epoch, log[0][2])
    put_partition(write, vb_id, record._replace(failover=log, epoch=epoch))


def _put_document(write: KvWrite, table: str, key: bytes, document: Any) -> None:
    write.put(table, key, pack_document(table, key, document))


def pack_document(table: str, key: bytes, document: Any) -> bytes:
    """Return the value for a document."""
    body = cbor2.dumps(document)
    return _crc(table, key, body) + body


def read_document(table: str, key: bytes, value: Buffer) -> Any:
    """Decode the document in a value. Raises RecordDamagedError."""
    check_document(table, key, value)
    return cbor2.loads(bytes(value[_CRC_BYTES:]))


def check_document(table: str, key: bytes, value: Buffer) -> None:
    """Raise RecordDamagedError if a value does not match its checksum."""
    if bytes(value[:_CRC_BYTES]) != _crc(table, key, bytes(value[_CRC_BYTES:])):
        raise RecordDamagedError(
            f"{place_of(table, key)}: the checksum does not match; check the disk and restore a "
            "backup",
            partition_of(table, key),
        )


def _crc(table: str, key: bytes, body: bytes) -> bytes:
    crc: int = _crc32c(table.encode() + key + body)
    return crc.to_bytes(_CRC_BYTES, "big")


def kept_segments(quarantine: Quarantine) -> set[int]:
    """Return the segments that the log must keep."""
    kept: set[int] = set()
    for item in quarantine.values():
        kept.update(range(item.first_segment, item.last_segment + 1))
    return kept


def is_kept_for(item: Quarantined | None, segment: int) -> bool:
    """Whether a segment has unmerged entries of a quarantined partition."""
    return item is not None and item.first_segment <= segment <= item.last_segment
