"""Checks a store and its log off line. Pure: database and segments are arguments.

Who calls it: dcp.server.check.verify. `vbucket.check.finding` lists what it can find. No damage
stops the check, but without a readable node record there is little to compare with.

    records     node, manifest, every partition's state and failover log
    log         every segment, and that it continues the store (vbucket.check.log_check)
    partitions  blocks and keys, each against the other (vbucket.check.partition_check)
    strays      data of partitions that do not exist
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import cbor2

from failover.rules.history import FailoverLog
from vbucket.check.finding import Finding, Kind
from vbucket.check.log_check import KnownEnds, LogCheck
from vbucket.check.partition_check import FINDINGS_MAX, SLICE_KEYS, PartitionCheck
from vbucket.engine.partition import VbState
from vbucket.log.end_mark import LogEnd, read_marks
from vbucket.model.control import SnapshotWindow
from vbucket.model.ids import NUM_VBUCKETS, SEQNO_MAX
from vbucket.model.manifest import INITIAL_MANIFEST, Manifest
from vbucket.store.due import read_due
from vbucket.store.environment import KvReader, StoreDamagedError
from vbucket.store.records import (
    BY_KEY_TABLE,
    BY_SEQNO_TABLE,
    EXPIRY_TABLE,
    FAILOVER_TABLE,
    META_TABLE,
    STATE_TABLE,
    NodeRecord,
    PartitionRecord,
    PartMerged,
    kept_segments,
)
from vbucket.store.store import StoreView

_UNDECODABLE: Final = (cbor2.CBORDecodeError, KeyError, TypeError, ValueError)
"""Errors of a record with a right checksum and a document that is not ours."""


class CheckProgress(NamedTuple):
    """The progress of a check."""

    partitions: int
    keys: int
    versions: int
    size_bytes: int
    log_changes: int = 0
    """Changes of the log that are not merged, so they are not among keys and versions."""


class StoreCheck:
    """One check. `steps` does the work; the other attributes are valid after it.

    `segments` reads one when it is asked for, and raises LogDamagedError if it cannot be read.
    `marks` are the slots of the log's end mark (LogDevice.marks); None: they are not checked.
    """

    def __init__(
        self,
        reader: KvReader,
        segments: Mapping[int, bytes],
        *,
        vb_ids: Iterable[int] = (),
        marks: Sequence[bytes] | None = None,
        slice_keys: int = SLICE_KEYS,
        cas_max: int = SEQNO_MAX,
    ) -> None:
        """`vb_ids`: the partitions to check; none: all that the node's record says.

        `cas_max`: a higher CAS is too far ahead.
        """
        self._reader = reader
        self._view = StoreView(reader)
        self._segments = segments
        self._marks = marks
        self._vb_ids = list(vb_ids)
        self._slice_keys = slice_keys
        self._cas_max = cas_max
        self._records: dict[int, PartitionRecord] = {}
        self._quarantined: frozenset[int] = frozenset()
        self._is_log_whole = True
        self.progress = CheckProgress(0, 0, 0, 0)
        self.log: LogCheck | None = None

    def findings(self) -> Iterator[Finding]:
        """Yield what is wrong. Raises UnknownFormatError for a store of another version."""
        return (step for step in self.steps() if isinstance(step, Finding))

    def steps(self) -> Iterator[Finding | CheckProgress]:
        """Like `findings`; yield the progress, too."""
        node, manifest = None, INITIAL_MANIFEST
        try:
            node = self._view.node()
            if node is None:
                yield Finding(Kind.RECORD, f"table {META_TABLE}", "the node's record is missing")
        except (StoreDamagedError, *_UNDECODABLE) as error:
            yield _record(META_TABLE, "the node's record", error)
        try:
            manifest = self._view.manifest()
        except (StoreDamagedError, *_UNDECODABLE) as error:
            yield _record(META_TABLE, "the collections manifest", error)
        if not self._vb_ids:
            self._vb_ids = list(range(NUM_VBUCKETS if node is None else node.partitions))
        for vb_id in self._vb_ids:
            yield from self._partition_record(vb_id)
        known = yield from self._known_ends(node)
        self.log = LogCheck(
            self._segments,
            known=known,
            high_seqnos={vb_id: record.high_seqno for vb_id, record in self._records.items()},
            epochs={vb_id: record.epoch for vb_id, record in self._records.items()},
            is_synced_per_group=node is None or node.durability == "commit",
        )
        for finding in self.log.findings():
            self._is_log_whole &= finding.kind != Kind.LOG
            yield finding
        self.progress = self.progress._replace(log_changes=self.log.changes)
        yield from self._tables(manifest)

    # -- records -------------------------------------------------------------------------------

    def _known_ends(self, node: NodeRecord | None) -> Generator[Finding, None, KnownEnds]:
        """Return what is known of the log's end; yield the partitions in quarantine, too."""
        known = KnownEnds()
        if self._marks is not None:
            known = known._replace(mark=read_marks(self._marks))
        if node is None:
            return known
        known = known._replace(merged_segment=node.merged_segment)
        if node.part_merged is not None:
            known = known._replace(part_merged=PartMerged(*node.part_merged))
        try:
            if node.merged_end is not None:
                known = known._replace(merged_end=LogEnd.from_document(node.merged_end))
            clean_end = self._view.clean_end() if node.clean_shutdown else None
            if clean_end is not None:
                known = known._replace(clean_end=clean_end.end)
        except (StoreDamagedError, *_UNDECODABLE) as error:
            yield _record(META_TABLE, "the log's clean end", error)
        try:
            items = self._view.quarantine()
        except (StoreDamagedError, *_UNDECODABLE) as error:
            yield _record(META_TABLE, "the quarantine", error)
            return known
        self._quarantined = frozenset(items)
        for vb_id, item in sorted(items.items()):
            yield Finding(Kind.QUARANTINE, f"partition {vb_id}", item.why)
        return known._replace(kept=frozenset(kept_segments(items)))

    def _partition_record(self, vb_id: int) -> Iterator[Finding]:
        where = f"partition {vb_id}"
        try:
            record = self._view.partition(vb_id)
            if record is None:
                what = f"table {STATE_TABLE} has no record of it"
                yield Finding(Kind.RECORD, where, what)
                return
            log = FailoverLog.from_document(record.failover)
            VbState(record.state)
            window = record.snapshot and SnapshotWindow.from_document(record.snapshot)
            self._records[vb_id] = record
        except (StoreDamagedError, *_UNDECODABLE) as error:
            yield _record(f"{STATE_TABLE} or {FAILOVER_TABLE}", where, error)
            return
        if log.current.epoch > record.epoch:
            what = (
                f"its version began in leader epoch {log.current.epoch}, the record's is "
                f"{record.epoch}"
            )
            yield Finding(Kind.COUNT, where, what)
        if window and not record.history_floor <= window.start <= record.high_seqno <= window.end:
            what = (
                f"it has a part of the snapshot from seqno {window.start} to {window.end}, and the "
                f"record says history_floor {record.history_floor}, high_seqno {record.high_seqno}"
            )
            yield Finding(Kind.COUNT, where, what)
        key = vb_id.to_bytes(2, "big")
        for table in (STATE_TABLE, FAILOVER_TABLE):
            by_scan = next(self._reader.range(table, key, key + b"\x00"), None)
            if by_scan is None:
                yield Finding(Kind.PAGES, where, f"table {table} leads to its record one way only")

    # -- tables --------------------------------------------------------------------------------

    def _tables(self, manifest: Manifest) -> Iterator[Finding | CheckProgress]:
        expiring = 0
        for vb_id in self._vb_ids:
            if vb_id in self._records:
                check = PartitionCheck(
                    self._reader,
                    vb_id,
                    self._records[vb_id],
                    manifest,
                    slice_keys=self._slice_keys,
                    cas_max=self._cas_max,
                    living_seqno=self._living_seqno(vb_id),
                )
                for step in check.steps():
                    yield self._within_partition(check) if step is None else step
                expiring += check.expiring
                done = self.progress
                self.progress = done._replace(
                    keys=done.keys + check.keys,
                    versions=done.versions + check.versions,
                    size_bytes=done.size_bytes + check.size_bytes,
                )
            self.progress = self.progress._replace(partitions=self.progress.partitions + 1)
            yield self.progress
        yield from self._expiry_rows(expiring)
        yield from self._strays()

    def _living_seqno(self, vb_id: int) -> int:
        """Return up to which seqno the store's versions are of the history that the failover log
        tells of. The log in the store may be ahead of the merged versions.
        """
        assert self.log is not None
        if vb_id in self._quarantined or not self._is_log_whole:
            return 0
        return self.log.rolled_back_to.get(vb_id, SEQNO_MAX)

    def _expiry_rows(self, expiring: int) -> Iterator[Finding]:
        """Find rows of the expiry table without a document."""
        rows = bad = 0
        try:
            for row, value in self._reader.range(EXPIRY_TABLE, b"\x00"):
                rows += 1
                try:
                    read_due(row, bytes(value))
                except StoreDamagedError as error:
                    bad += 1
                    if bad <= FINDINGS_MAX:
                        yield Finding(Kind.EXPIRY, f"table {EXPIRY_TABLE}", str(error))
        except StoreDamagedError as error:
            yield Finding(Kind.PAGES, f"table {EXPIRY_TABLE}", str(error))
            return
        if rows != expiring:
            what = f"it has {rows} rows ({bad} damaged), {expiring} documents have an expiry"
            yield Finding(Kind.EXPIRY, f"table {EXPIRY_TABLE}", what)

    def _within_partition(self, check: PartitionCheck) -> CheckProgress:
        done = self.progress
        return done._replace(
            keys=done.keys + check.keys, size_bytes=done.size_bytes + check.size_bytes
        )

    def _strays(self) -> Iterator[Finding]:
        """Find data of partitions that the node does not have: its key is damaged."""
        known = set(self._vb_ids)
        for table in (BY_KEY_TABLE, BY_SEQNO_TABLE, STATE_TABLE, FAILOVER_TABLE):
            at = b"\x00"
            try:
                while (found := self._reader.first_at_or_after(table, at)) is not None:
                    vb_id = int.from_bytes(found[0][:2], "big")
                    if vb_id not in known:
                        text = f"it has a key of partition {vb_id}"
                        yield Finding(Kind.STRAY, f"table {table}", text)
                    if vb_id >= 0xFFFF or len(found[0]) < 2:
                        break
                    at = (vb_id + 1).to_bytes(2, "big")
            except StoreDamagedError as error:
                yield Finding(Kind.PAGES, f"table {table}", str(error))


def _record(table: str, what: str, error: Exception) -> Finding:
    return Finding(Kind.RECORD, what, f"cannot be read from table {table}: {error}")
