"""The merge: brings sealed log segments into the store, slice by slice.

A slice is a range of partitions, merged in one transaction. So neither memory nor the bytes that a
commit writes at once grow with the merge, and the log's syncs wait only for a slice.

Who calls it: the store process while the server runs, the server itself at start and stop. Pure:
database and segments are arguments.

Invariants
- the store is a function of the merged prefix of the log: merging the same segments again, or in
  two merges instead of one, gives the same content (blocks may be cut at other places);
- a partition is merged wholly or not at all. `NodeRecord.part_merged` says which partitions have
  the groups of an unfinished merge; every slice moves it on. The next merge first finishes that
  one. The manifest of collections comes with the first slice;
- the last slice also moves `merged_segment`; a segment at or below it is skipped. Retries are
  idempotent and return an equivalent report;
- a partition whose stored data is damaged is left out as a whole (`vbucket.store.records`); all
  others are merged. A branch at 0 ends that. The stored quarantine has what the slices so far left
  out;
- the staged entries of a partition ascend by seqno and lie above what the store keeps.

The segments of one merge bound what is staged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from vbucket.log.end_mark import LogEnd
from vbucket.log.record import (
    LogDamagedError,
    entries_from,
    read_segment_header,
    scan_segment,
)
from vbucket.store.block import BODY_BYTES_TARGET
from vbucket.store.due import ExpiryRows
from vbucket.store.environment import KvEnv, KvWrite
from vbucket.store.hashes import HashTables
from vbucket.store.records import (
    STORE_FORMAT_VERSION,
    NodeRecord,
    PartitionRecord,
    PartMerged,
    kept_segments,
    put_manifest,
    put_node,
    put_quarantine,
)
from vbucket.store.store import StoreView
from vbucket.upkeep.partition_merge import merge_partition, plain_changes, put_plain
from vbucket.upkeep.staging import (
    MergeRefusedError,
    PartitionDamagedError,
    Staging,
    naming_damage,
)

if TYPE_CHECKING:
    from vbucket.upkeep.stage import Stage

NODE_VB_ID: Final = 0xFFFF
"""Partition id of control entries of the node."""
DAMAGED_MAX: Final = 64
"""Partitions that one merge may put into quarantine, those before it stopped included. The merge
starts again for each; if there are more, the disk is at fault."""
SLICE_PAGES: Final = 4096
"""Pages that a slice may change, 16 MiB, as estimated from above. Smaller slices rewrite LMDB's
list of free pages more often; larger ones make the log wait longer (docs/decisions.md)."""


class MergeReport(NamedTuple):
    """What a merge did.

    All segments <= `merged_segment` are in the store. `high_seqnos` are those of the partitions it
    touched, of all partitions where it found nothing to merge, or finished an earlier merge.
    `entries` were read from the log, control entries included. `quarantined`: why partitions are
    left out, old ones and new ones; the segments `kept` must stay for them.
    """

    merged_segment: int
    high_seqnos: dict[int, int]
    entries: int
    quarantined: dict[int, str]
    kept: list[int]


def merge(
    env: KvEnv,
    segments: Iterable[tuple[int, bytes]],
    *,
    hash_tables: HashTables | None = None,
    before_commit: Callable[[], None] = lambda: None,
    body_bytes_target: int = BODY_BYTES_TARGET,
    native: bool = True,
    slice_pages: int = SLICE_PAGES,
    step: Callable[[float], None] = lambda _: None,
    before_undo: Callable[[int], None] = lambda _: None,
    mend: Callable[[int], bool] = lambda _: False,
) -> MergeReport:
    """Merge sealed segments (id, bytes), in order, into the store; durable on return.

    Segments that are in the store already are skipped. If a partition's data is damaged, the
    transaction is aborted, and `segments` is iterated again without that partition; so it is after
    an earlier merge was finished. `hash_tables`: those of the merges before. `before_commit` is
    called for each slice, and may raise to abort the merge. `native`: use the loops in C where they
    are built (the result is the same). `step` is called after each staged group and each merged
    partition with the part of the partitions that is merged, 0 to 1, and may wait. `before_undo` is
    called with each partition of which stored versions are undone: what others know of its blocks
    ends. `mend` is called once with a damaged partition, between transactions; True: it is tried
    again.
    Raises MergeRefusedError, LogDamagedError, StoreFullError, StoreFailedError, UnknownFormatError;
    StoreDamagedError if more than DAMAGED_MAX partitions are damaged, or shared data is. Then some
    slices may have been merged, and the next merge goes on after them.
    """
    damaged: dict[int, str] = {}
    tried: set[int] = set()
    high_seqnos: dict[int, int] = {}
    entries = 0
    hash_tables = hash_tables or HashTables()
    while True:
        one = _Pass(
            segments, damaged, hash_tables, body_bytes_target, slice_pages, step, before_undo,
            native=native,
        )  # fmt: skip
        try:
            while one.has_more:
                with hash_tables.changing(env) as write:
                    one.merge_slice(write)
                    before_commit()
        except PartitionDamagedError as error:
            if error.vb_id not in tried:
                tried.add(error.vb_id)
                if mend(error.vb_id):
                    continue
            damaged[error.vb_id] = str(error)
            if len(one.left_out | damaged.keys()) > DAMAGED_MAX:
                raise error.cause from error
            continue
        report = one.report()
        high_seqnos |= report.high_seqnos
        entries += report.entries
        if not one.stopped_early:
            return report._replace(high_seqnos=high_seqnos, entries=entries)


class _Pass:
    """Merges segments in slices: those of an unfinished merge, or all if there is none.

    `merge_slice` until `has_more` is false. The first slice also reads and stages all segments.
    """

    def __init__(
        self,
        segments: Iterable[tuple[int, bytes]],
        damaged: Mapping[int, str],
        hash_tables: HashTables,
        body_bytes_target: int,
        slice_pages: int,
        step: Callable[[float], None],
        before_undo: Callable[[int], None],
        *,
        native: bool,
    ) -> None:
        self._segments = segments
        self._damaged = damaged
        self._hash_tables = hash_tables
        self._body_bytes_target = body_bytes_target
        self._slice_pages = slice_pages
        self._step = step
        self._before_undo = before_undo
        self._native = native
        self._staging: Staging | None = None
        self._order: list[int] = []
        """Staged partitions that are not merged yet, the lowest last."""
        self._partitions = 0
        """How many were staged."""
        self._merged_segment = 0
        self._end: LogEnd | None = None
        """The end of the last record; None: unknown."""
        self._high_seqnos: dict[int, int] = {}
        self._kept: list[int] = []
        self._finishes_other = False
        self.has_more = True
        self.stopped_early = False
        """Whether there are segments after those of the unfinished merge."""

    @property
    def left_out(self) -> set[int]:
        """The partitions that this merge has put into quarantine, also before it stopped."""
        if self._staging is None:
            return set()
        merged_segment = self._staging.node.merged_segment
        items = self._staging.quarantine.items()
        return {vb_id for vb_id, item in items if item.first_segment > merged_segment}

    def merge_slice(self, write: KvWrite) -> None:
        """Merge the next partitions in this transaction."""
        view = StoreView(write)
        staging = self._staging
        if staging is None:
            staging = self._stage(view)
        rows = ExpiryRows()
        pages = 0
        while self._order and pages < self._slice_pages:
            stage = staging.stages.pop(self._order.pop())
            if stage.trim_to is not None:
                self._before_undo(stage.vb_id)
            with naming_damage(stage.vb_id):
                record = self._merge_stage(write, view, staging, stage, rows)
            self._high_seqnos[stage.vb_id] = record.high_seqno
            pages += stage.written_pages
            self._step(1 - len(self._order) / self._partitions)
        rows.write(write)
        if self._order:
            self._put_progress(write, view, staging)
        else:
            self._put_end(write, view, staging)
            self.has_more = False

    def report(self) -> MergeReport:
        """Return what was done, after the last slice."""
        assert self._staging is not None, "the first slice stages"
        return MergeReport(
            self._merged_segment,
            self._high_seqnos,
            self._staging.entries,
            {vb_id: item.why for vb_id, item in self._staging.quarantine.items()},
            self._kept,
        )

    def _stage(self, view: StoreView) -> Staging:
        node = view.node()
        if node is None:
            raise MergeRefusedError("the store was never created; create it before merging")
        self._staging = staging = Staging(view, node, self._damaged, native=self._native)
        self._stage_segments(staging, node)
        self._finishes_other = node.part_merged is not None
        self._order = sorted(staging.stages, reverse=True)
        self._partitions = len(self._order)
        return staging

    def _stage_segments(self, staging: Staging, node: NodeRecord) -> None:
        """Stage the groups of unmerged segments, up to the end of an unfinished merge."""
        merged_segment = node.merged_segment
        end = None if node.merged_end is None else LogEnd.from_document(node.merged_end)
        part = None if node.part_merged is None else PartMerged(*node.part_merged)
        size_before = 0
        for segment, data in self._segments:
            if segment <= merged_segment:
                continue
            if segment != merged_segment + 1:
                raise MergeRefusedError(
                    f"log segment {segment} cannot be merged: the store has all up to "
                    f"{merged_segment}, so {merged_segment + 1} must be next"
                )
            expected_bytes = read_segment_header(data, segment).previous_bytes
            if size_before and expected_bytes != size_before:
                raise LogDamagedError(
                    f"log segment {merged_segment} has {size_before} bytes, but had "
                    f"{expected_bytes} when it was sealed; restore it from a copy, or the data "
                    "folder from a backup"
                )
            for group, payload, at, crc in scan_segment(data, segment, before=end):
                if part is not None:
                    if group > part.group:
                        self.stopped_early = True
                        break
                    payload = entries_from(payload, part.vb_id)  # noqa: PLW2901 - what is left of it
                staging.add_group(segment, payload)
                end = LogEnd(segment, at, group, crc)
                self._step(0.0)
            if self.stopped_early:
                assert end is None or end.segment != segment, "a merge ends with a segment"
                break
            merged_segment, size_before = segment, len(data)
        if part is not None and not self.stopped_early and (end is None or end.group < part.group):
            raise MergeRefusedError(
                f"an unfinished merge had the groups of the log up to {part.group}; the segments "
                f"end before, with segment {merged_segment}"
            )
        self._merged_segment, self._end = merged_segment, end

    def _merge_stage(
        self, write: KvWrite, view: StoreView, staging: Staging, stage: Stage, rows: ExpiryRows
    ) -> PartitionRecord:
        """Merge a partition: by the native loops, or by Python if the stage has more than changes
        of documents, or data is damaged.
        """
        staged, tables = staging.staged(stage.vb_id), self._hash_tables
        if staged is not None:
            merged = plain_changes(write, stage, staged, tables, self._body_bytes_target)
            if merged is not None:
                return put_plain(write, stage, merged, staging.manifest, rows, tables)
        staging.list_entries(stage)
        return merge_partition(
            write, view, stage, staging.manifest, rows, tables, self._body_bytes_target
        )

    def _put_progress(self, write: KvWrite, view: StoreView, staging: Staging) -> None:
        """Note which partitions the slices so far have merged, and which they left out."""
        next_vb_id = self._order[-1]
        assert self._end is not None, "partitions are staged from groups"
        node = view.node()
        assert node is not None, "the first slice found it"
        stored = view.quarantine()
        left_out = {vb_id: item for vb_id, item in stored.items() if vb_id >= next_vb_id} | {
            vb_id: item for vb_id, item in staging.quarantine.items() if vb_id < next_vb_id
        }
        if left_out != stored:
            put_quarantine(write, left_out)
        if staging.manifest != view.manifest():
            put_manifest(write, staging.manifest)
        part = list(PartMerged(self._end.group, next_vb_id))
        put_node(write, node._replace(format_version=STORE_FORMAT_VERSION, part_merged=part))

    def _put_end(self, write: KvWrite, view: StoreView, staging: Staging) -> None:
        """Note that all partitions are merged."""
        node = view.node()
        assert node is not None, "the first slice found it"
        if self._finishes_other or self._merged_segment == node.merged_segment:
            # Somebody asks again, because the first answer may have been lost.
            records = view.partitions(without=staging.quarantine)
            self._high_seqnos = {vb_id: record.high_seqno for vb_id, record in records.items()}
        if staging.manifest != view.manifest():
            put_manifest(write, staging.manifest)
        if staging.quarantine != view.quarantine():
            put_quarantine(write, staging.quarantine)
        self._kept = sorted(kept_segments(staging.quarantine))
        put_node(
            write,
            node._replace(
                format_version=STORE_FORMAT_VERSION,
                durability=staging.node.durability,
                merged_segment=self._merged_segment,
                merged_end=None if self._end is None else self._end.to_document(),
                part_merged=None,
            ),
        )
