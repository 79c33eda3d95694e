"""Compaction: drops versions from the store that nobody can ask for any more. Pure.

The history floor F and the purge seqno P of a partition decide what may be dropped:

    superseded versions    replaced by a version at or below F
    tombstones             deletions at or below P that are the newest version of their key; the
                           key leaves by_key with them
    unreachable versions   at or below F, of collections whose drop is at or below F, too

Some versions stay in any case: the last one at or below F, the last one there of every existing
collection, and the last one there outside of the default collection. So every snapshot can end on
an item, and the tally as of any seqno >= F can be computed from the remaining versions.

F and P are those of the stored record, or higher ones that the log already has. The first slice
writes them into the record. They are raised in the log first. From then on no rollback goes below F
(except to 0), and F is not above the merged part of the present history. So a compaction can run
beside merges, stop anywhere and be repeated: it drops only what no state at or above F needs.

Invariants
- a version is dropped only after all older versions of its key, or in the same transaction. In
  between, a reader sees a history of the key that begins later, never one with a hole or without
  its deletion. So a partition is first read from the floor down, and then rewritten from the bottom
  up. Reading needs memory for one seqno per key and one byte per version;
- the chain of blocks (`seqno_before`) is intact after every step. A step that finds it broken, or a
  block damaged, changes nothing;
- if a partition was rolled back between two slices, its compaction starts again: blocks are
  shorter, or, after a rollback to 0, there may be other versions under the same seqnos. The merge
  says so (`Compactor.begin_again`), because a replica's rollback may leave the failover log as it
  was. A changed failover log means the same. All other changes are above the floor, or in by_key,
  which is read when a version is dropped;
- what is known of a block between two steps is about its versions at or below the floor.

Who calls it: the store process, between merges.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import not_
from typing import Final, NamedTuple

from dcp.wire.opcode import Opcode
from vbucket.model.entry import key_in_frame
from vbucket.model.manifest import (
    DEFAULT_COLLECTION,
    SYSTEM_COLLECTION,
    SYSTEM_KEY,
    Manifest,
    SystemEventKind,
    collection_of,
)
from vbucket.native import CompactionLoops, compaction_loops
from vbucket.store.block import BODY_BYTES_TARGET, Block, block_key, follow_seqno, repack_blocks
from vbucket.store.due import ExpiryRows
from vbucket.store.environment import KvEnv, KvWrite, StoreDamagedError, WriteLostError
from vbucket.store.records import BY_KEY_TABLE, BY_SEQNO_TABLE, PartitionRecord, put_partition
from vbucket.store.store import StoreView, last_row, missing_blocks

STEP_BYTES: Final = 1 << 20
"""Bytes that one step reads and rewrites: about ten milliseconds, then the time is checked."""
SLICE_BYTES: Final = 16 << 20
"""Bytes that one transaction rewrites at most. Its freed pages can be reused two transactions
later, so the file is larger by some of these. The sync of a transaction takes some milliseconds.
"""
FREE_PAGES_BYTES: Final = 3 * SLICE_BYTES
"""Pages that wait for reuse: those of two slices, and some in pieces that are too small."""

_DELETIONS: Final = frozenset({int(Opcode.DCP_DELETION), int(Opcode.DCP_EXPIRATION)})
_SYSTEM_EVENT: Final = int(Opcode.DCP_SYSTEM_EVENT)
_ANY: Final = -1
_ANY_OTHER: Final = -2
"""Members of the set of seen collections: any collection, any but the default one."""


class Floors(NamedTuple):
    """A partition's history floor and purge seqno."""

    floor: int
    purge: int


class SliceReport(NamedTuple):
    """The result of one slice. `finished`: partitions that need no further slice. `damages`:
    partition and error text where stored data could not be read; such a partition is unchanged.
    """

    finished: list[int]
    versions: int
    tombstones: int
    damages: list[tuple[int, str]]

    def plus(self, other: SliceReport) -> SliceReport:
        """Return the sum of both."""
        return SliceReport(
            self.finished + other.finished,
            self.versions + other.versions,
            self.tombstones + other.tombstones,
            self.damages + other.damages,
        )


class PartitionCompaction:
    """The compaction of one partition: a pass down from the floor, then a pass back up to it."""

    def __init__(
        self,
        view: StoreView,
        vb_id: int,
        record: PartitionRecord,
        *,
        step_bytes: int = STEP_BYTES,
        body_bytes_target: int = BODY_BYTES_TARGET,
        loops: CompactionLoops | None = None,
    ) -> None:
        self.vb_id = vb_id
        self._loops = loops
        self._superseded_natively = None if loops is None else loops.superseded()
        """Instead of `_superseded`."""
        self._step_bytes = step_bytes
        self._body_bytes_target = body_bytes_target
        self.failover = record.failover
        self.floor = record.history_floor
        self.purge = record.purge_seqno
        self.is_done = not self.floor
        self.versions = 0
        """Dropped versions, tombstones included."""
        self.tombstones = 0
        self._prefix = vb_id.to_bytes(2, "big")
        self._down_seqno = self.floor
        """Everything above it has been read."""
        self._seqno_below: int | None = None
        """Where the next block down must end: 0 at the bottom, None at the beginning."""
        self._up_seqno = 0
        """Everything below it has been rewritten."""
        self._superseded: set[int] = set()
        self._marked: dict[int, bytes] = {}
        """First seqno of a block -> a byte for each version at or below the floor, 0 if it is
        superseded. What the block has above the floor may change before it is rewritten.
        """
        self._seen: set[int] = set()
        self._kept: set[int] = set()
        """Seqnos that stay: the last ones of their collection at or below the floor."""
        self._manifest = view.manifest()
        self._gone = _gone_collections(view, vb_id, self._manifest, self.floor)
        self._has_others = bool(record.tally)
        self._unsaved_versions = self._unsaved_keys = 0

    def is_of(self, other: PartitionCompaction) -> bool:
        """Whether this is the same work as one that has just begun."""
        mine = (self.vb_id, self.failover, self.floor, self.purge)
        return mine == (other.vb_id, other.failover, other.floor, other.purge)

    def step(self, write: KvWrite, rows: ExpiryRows) -> int:
        """Do about STEP_BYTES of work; return how many bytes were written.

        Raises StoreDamagedError before any change.
        """
        if self._seqno_below == 0:
            return self._step_up(write, rows, self._read_up(write))
        is_first = self._seqno_below is None
        blocks = self._step_down(write)
        if self._seqno_below != 0:
            return 0
        if not (self._marked or self._gone or self.purge):
            self.is_done = True
        elif is_first:
            # Usually one step reads all of it, so it need not be read again.
            return self._step_up(write, rows, blocks[::-1])
        return 0

    def save(self, write: KvWrite) -> None:
        """Correct the counts; call it before the transaction of the steps ends."""
        record = StoreView(write).partition(self.vb_id)
        assert record is not None
        if self.is_done:
            record = record._replace(compacted=[self.floor, self.purge, self._manifest.uid])
        record = record._replace(
            history_floor=max(record.history_floor, self.floor),
            purge_seqno=max(record.purge_seqno, self.purge),
            versions=max(0, record.versions - self._unsaved_versions),
            keys=max(0, record.keys - self._unsaved_keys),
        )
        self._unsaved_versions = self._unsaved_keys = 0
        put_partition(write, self.vb_id, record)

    # -- down: find superseded versions, and those that stay anyway ----------------------------

    def _step_down(self, write: KvWrite) -> list[Block]:
        """Read the next blocks downwards; return them."""
        blocks: list[Block] = []
        size = 0
        while size < self._step_bytes and self._seqno_below != 0:
            found = last_row(write, self.vb_id, self._down_seqno)
            if found is None:
                if self._seqno_below:
                    raise missing_blocks(self.vb_id, 0, self._seqno_below)
                self._seqno_below = 0
                break
            block = Block(*found)
            if self._seqno_below is not None and block.last_seqno != self._seqno_below:
                raise missing_blocks(self.vb_id, block.last_seqno, self._seqno_below)
            self._mark(block)
            self._keep(block)
            size += len(found[1])
            self._seqno_below, self._down_seqno = block.seqno_before, block.first_seqno - 1
            blocks.append(block)
        return blocks

    def _mark(self, block: Block) -> None:
        """Mark the superseded versions of a block; remember those in blocks further down.

        Set operations handle all versions of a block in one call, because there are many.
        """
        if self._superseded_natively is not None:
            try:
                kept = self._superseded_natively.mark(block.key, bytes(block.value), self.floor)
            except ValueError:
                raise block.damaged("has lengths or seqnos that do not ascend") from None
            if kept is not None:
                low = bisect_right(block.seqnos, self.floor)
                self._marked[block.first_seqno] = kept[:low]
            return
        seqnos, superseded = block.seqnos, self._superseded
        low = bisect_right(seqnos, self.floor)
        superseded.update(block.prev_seqnos[:low])
        here = superseded.intersection(seqnos[:low])
        if here:
            superseded -= here
            marks = map(not_, map(here.__contains__, seqnos[:low]))
            self._marked[block.first_seqno] = bytes(marks)

    def _keep(self, block: Block) -> None:
        """Note the versions of a block that are the last ones of their collection."""
        if not self._has_others:
            if not self._kept:
                self._kept.add(block.seqnos[bisect_right(block.seqnos, self.floor) - 1])
            return
        if not (self._gone or self.purge):
            return
        body = block.checked_body()
        for index in range(bisect_right(block.seqnos, self.floor) - 1, -1, -1):
            start = block.ends[index - 1] if index else 0
            collection_id = collection_of(key_in_frame(body[start : block.ends[index]]))
            kinds = {_ANY}
            if collection_id != DEFAULT_COLLECTION:
                kinds.add(_ANY_OTHER)
            if not self._manifest.is_gone(collection_id):
                kinds.add(collection_id)
            if not kinds <= self._seen:
                self._seen |= kinds
                self._kept.add(block.seqnos[index])

    # -- up: drop versions ---------------------------------------------------------------------

    def _step_up(self, write: KvWrite, rows: ExpiryRows, blocks: list[Block]) -> int:
        view = StoreView(write)
        if not blocks:
            self.is_done = True
            return 0
        masks: list[bytes | None] = []
        gone: list[bytes] = []
        tombstones = written_bytes = 0
        for block in blocks:
            kept = self._marked.pop(block.first_seqno, None)
            if kept is not None:
                if len(kept) != bisect_right(block.seqnos, self.floor):
                    raise block.damaged("has other versions than when it was read before")
                kept = kept.ljust(len(block.seqnos), b"\1")
            if self._gone or self.purge >= block.first_seqno:
                kept, keys, deletions = self._without_useless(view, block, kept)
                gone += keys
                tombstones += deletions
            masks.append(kept)
        versions = sum(kept.count(0) for kept in masks if kept is not None)
        if versions:
            written_bytes = self._rewrite(write, blocks, masks)
            for key in gone:
                rows.replace(self._prefix + key, view.meta(self.vb_id, key), 0)
                write.delete(BY_KEY_TABLE, self._prefix + key)
            self.versions += versions
            self.tombstones += tombstones
            self._unsaved_versions += versions
            self._unsaved_keys += len(gone)
        self._up_seqno = blocks[-1].last_seqno + 1
        self.is_done = self._up_seqno > self.floor
        return written_bytes

    def _read_up(self, write: KvWrite) -> list[Block]:
        """Return the next blocks upwards, as far as the floor. Raises StoreDamagedError."""
        blocks: list[Block] = []
        size = 0
        stop = block_key(self.vb_id, self.floor + 1)
        for key, value in write.range(BY_SEQNO_TABLE, block_key(self.vb_id, self._up_seqno), stop):
            block = Block(key, value)
            if blocks and block.seqno_before != blocks[-1].last_seqno:
                raise missing_blocks(self.vb_id, blocks[-1].last_seqno, block.seqno_before)
            blocks.append(block)
            size += len(value)
            if size >= self._step_bytes:
                break
        return blocks

    def _without_useless(
        self, view: StoreView, block: Block, kept: bytes | None
    ) -> tuple[bytes | None, list[bytes], int]:
        """Drop tombstones and unreachable versions from what is kept of a block. Return the new
        mask, the keys that go with them, and how many of them are tombstones.
        """
        mask = bytearray(kept or b"\1" * len(block.seqnos))
        keys: list[bytes] = []
        tombstones = 0
        body = block.checked_body()
        for index in range(bisect_right(block.seqnos, self.floor)):
            seqno = block.seqnos[index]
            start = block.ends[index - 1] if index else 0
            is_deletion = body[start + 1] in _DELETIONS
            if not mask[index] or seqno in self._kept or body[start + 1] == _SYSTEM_EVENT:
                continue
            if not self._gone and not (is_deletion and seqno <= self.purge):
                continue
            key = key_in_frame(body[start : block.ends[index]])
            is_gone = collection_of(key) in self._gone
            if not is_gone and not (is_deletion and seqno <= self.purge):
                continue
            meta = view.meta(self.vb_id, key)
            if meta is not None and meta.seqno == seqno:
                keys.append(key)
            elif not is_gone:
                continue  # a newer version is above the floor, and a rollback may undo it
            mask[index] = 0
            tombstones += is_deletion
        return (bytes(mask) if 0 in mask else None), keys, tombstones

    def _rewrite(self, write: KvWrite, blocks: list[Block], masks: Sequence[bytes | None]) -> int:
        """Replace blocks by their kept versions; return how many bytes were written."""
        items: list[tuple[bytes, bytes]] = []
        run: list[tuple[Block, bytes | None]] = []
        run_bytes = 0
        kept_keys: set[bytes] = set()
        seqno_before = blocks[0].seqno_before

        def flush() -> None:
            nonlocal seqno_before, run_bytes
            repacked = self._repacked(run, seqno_before)
            if repacked:
                items.extend(repacked)
                seqno_before = Block(*repacked[-1]).last_seqno
            run.clear()
            run_bytes = 0

        for block, kept in zip(blocks, masks, strict=True):
            if kept is not None or 0 < run_bytes < self._body_bytes_target // 2:
                run.append((block, kept))
                run_bytes += _kept_bytes(block, kept)
                continue
            flush()
            if block.seqno_before == seqno_before:
                kept_keys.add(block_key(self.vb_id, block.first_seqno))
            else:
                items.append(follow_seqno(block, seqno_before))
            seqno_before = block.last_seqno
        flush()
        items += self._following(write, blocks[-1], seqno_before)
        written = kept_keys | {key for key, _ in items}
        for block in blocks:
            key = block_key(self.vb_id, block.first_seqno)
            if key not in written:
                write.delete(BY_SEQNO_TABLE, key)
        write.put_sorted(BY_SEQNO_TABLE, items)
        return sum(len(value) for _, value in items)

    def _repacked(
        self, run: list[tuple[Block, bytes | None]], seqno_before: int
    ) -> list[tuple[bytes, bytes]]:
        """Return what is kept of these blocks as blocks of the target size."""
        repacked = None
        if self._loops is not None:
            parts = [(block.key, bytes(block.value), kept) for block, kept in run]
            repacked = self._loops.repack(self.vb_id, parts, seqno_before, self._body_bytes_target)
        if repacked is None:
            repacked = repack_blocks(
                self.vb_id, run,
                seqno_before=seqno_before, body_bytes_target=self._body_bytes_target,
            )  # fmt: skip
        return repacked

    def _following(
        self, write: KvWrite, block: Block, seqno_before: int
    ) -> list[tuple[bytes, bytes]]:
        """Return the block after `block` if it must change because `block` now ends at
        `seqno_before`.
        """
        after = block_key(self.vb_id, block.last_seqno + 1)
        stop = (self.vb_id + 1).to_bytes(2, "big")
        found = next(iter(write.range(BY_SEQNO_TABLE, after, stop)), None)
        if found is None:
            record = StoreView(write).partition(self.vb_id)
            last_seqno = record.last_seqno if record else 0
            if last_seqno != block.last_seqno:
                raise missing_blocks(self.vb_id, block.last_seqno, last_seqno)
            assert seqno_before == last_seqno, "the last version of a partition stays"
            return []
        following = Block(*found)
        if following.seqno_before != block.last_seqno:
            raise missing_blocks(self.vb_id, block.last_seqno, following.seqno_before)
        return [] if seqno_before == block.last_seqno else [follow_seqno(following, seqno_before)]


class Compactor:
    """Compacts partitions one after another, in slices: one transaction each."""

    def __init__(
        self,
        *,
        step_bytes: int = STEP_BYTES,
        slice_bytes: int = SLICE_BYTES,
        body_bytes_target: int = BODY_BYTES_TARGET,
        native: bool = True,
    ) -> None:
        """`native`: use the loops in C where they are built; the result is the same."""
        self._loops = compaction_loops() if native else None
        self._step_bytes = step_bytes
        self._slice_bytes = slice_bytes
        self._body_bytes_target = body_bytes_target
        self._under_way: PartitionCompaction | None = None

    def begin_again(self, vb_id: int) -> None:
        """Forget what is known of a partition, because a merge undoes versions of it."""
        if self._under_way is not None and self._under_way.vb_id == vb_id:
            self._under_way = None

    def run(
        self,
        env: KvEnv,
        vb_ids: Iterable[int],
        is_over: Callable[[], bool],
        *,
        floors: Mapping[int, Floors] | None = None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> SliceReport:
        """Continue with these partitions until all are done, SLICE_BYTES are written, or `is_over`
        returns True. At least one step is made.

        `floors` are those of the log, where the stored ones may be lower. Raises StoreFullError,
        StoreFailedError; then nothing happened.
        """
        job, self._under_way = self._under_way, None
        report = SliceReport([], 0, 0, [])
        left_bytes = self._slice_bytes
        at_work: list[int] = []
        """The partitions to blame if a write is lost."""
        try:
            with env.write() as write:
                view = StoreView(write)
                rows = ExpiryRows()
                for vb_id in vb_ids:
                    at_work = [vb_id]
                    try:
                        job = self._job_of(view, vb_id, job, (floors or {}).get(vb_id))
                        before = job.versions, job.tombstones
                        left_bytes -= _go_on(job, write, rows, is_over, left_bytes)
                    except WriteLostError:
                        raise
                    except StoreDamagedError as error:
                        report = report.plus(SliceReport([vb_id], 0, 0, [(vb_id, str(error))]))
                        job = None
                        continue
                    done = [vb_id] if job.is_done else []
                    versions, tombstones = job.versions - before[0], job.tombstones - before[1]
                    report = report.plus(SliceReport(done, versions, tombstones, []))
                    if not job.is_done:
                        break
                    job = None
                    if left_bytes <= 0 or is_over():
                        break
                at_work = [*report.finished, *at_work]
                rows.write(write)
                before_commit()
        except WriteLostError as error:
            # Work on other partitions in this transaction is lost, too. They start again.
            damages = [(vb_id, str(error)) for vb_id in dict.fromkeys(at_work)]
            return SliceReport([vb_id for vb_id, _ in damages], 0, 0, damages)
        self._under_way = job
        return report

    def _job_of(
        self, view: StoreView, vb_id: int, job: PartitionCompaction | None, floors: Floors | None
    ) -> PartitionCompaction:
        """Return the work on a partition: the current one, unless it must start again."""
        record = view.partition(vb_id)
        assert record is not None, f"partition {vb_id} is not in the store"
        if floors is not None:
            record = record._replace(
                history_floor=max(record.history_floor, floors.floor),
                purge_seqno=max(record.purge_seqno, floors.purge),
            )
        new = PartitionCompaction(
            view, vb_id, record,
            step_bytes=self._step_bytes, body_bytes_target=self._body_bytes_target,
            loops=self._loops,
        )  # fmt: skip
        return job if job is not None and job.is_of(new) else new


def _go_on(
    job: PartitionCompaction,
    write: KvWrite,
    rows: ExpiryRows,
    is_over: Callable[[], bool],
    bytes_max: int,
) -> int:
    """Make at least one step, and more until `bytes_max` are written or time is over; return how
    many bytes were written.

    The counts are saved even if a step fails.
    """
    written_bytes = 0
    try:
        while not job.is_done:
            written_bytes += job.step(write, rows)
            if written_bytes >= bytes_max or is_over():
                break
    finally:
        job.save(write)
    return written_bytes


def _kept_bytes(block: Block, kept: bytes | None) -> int:
    """Return about how much is kept of a block."""
    if kept is None:
        return len(block.body)
    return len(block.body) * kept.count(1) // len(kept)


def _gone_collections(
    view: StoreView, vb_id: int, manifest: Manifest, floor: int
) -> frozenset[int]:
    """Return the collections whose drop event is at or below the floor."""
    if not manifest.has_dropped:
        return frozenset()
    head = bytes([SYSTEM_COLLECTION, SystemEventKind.DROP_COLLECTION])
    gone = set()
    for key, meta in view.metas(vb_id, head):
        collection_id = SYSTEM_KEY.unpack_from(key)[3]
        if meta.seqno <= floor and manifest.is_gone(collection_id):
            gone.add(collection_id)
    return frozenset(gone)
