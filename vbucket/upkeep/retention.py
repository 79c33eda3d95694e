"""Decides which history floors are worth raising now. Pure.

A version is kept while it is inside both windows, history by time and history by bytes. It may be
dropped when the change that replaced it is outside of one of them. A tombstone may be dropped at
the purge age. The time of a change is its CAS (hybrid clock, nanoseconds).

A compaction rewrites most of a partition, so a floor is raised only if that frees enough. Versions
number at most one and a half times the keys (plus what is inside the windows), and at least half a
byte was written for each rewritten byte. Results of reading the store are remembered, so planning
every few seconds costs little.

History by bytes is planned so that the store's file, which never shrinks, stays within three times
the live data plus `history_bytes`. `_Budget` subtracts what else is in the file: other tables, free
pages, versions that are not yet worth a compaction, and what merges add before the next one. At
least HISTORY_SHARE_MIN of the setting is kept anyway. Bytes raise a floor only if enough versions
go: a partition that is compacted only for its deletions keeps what the time window keeps.

Invariants of a step: purge < floor, or both are 0; floor is the seqno of a version in the store and
not below the stored one; likewise purge.

Who calls it: the store process; the node applies the steps as far as running streams allow.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, NamedTuple

from dcp.wire.opcode import Opcode
from vbucket.store.block import BODY_BYTES_TARGET
from vbucket.store.environment import StoreDamagedError
from vbucket.store.records import PartitionRecord
from vbucket.store.store import StoreView
from vbucket.upkeep.seqno_at_time import seqno_before

WORTH_VERSIONS_MIN: Final = 128
"""Fewer versions are not worth a transaction: about 25 KB."""
HISTORY_SHARE_MIN: Final = 0.5
"""The share of `history_bytes` that a floor leaves at least. If merges add more than three times
the live data and the history, they determine the file's size."""
COLUMN_BYTES: Final = 16
BLOCK_FILL: Final = 0.95
"""Bytes of a version besides its frame, and how much of their pages blocks fill. They convert bytes
on disk to bytes of frames."""
FREE_MERGES: Final = 3
"""Free pages that merges leave, as a multiple of the pages that one merge rewrites."""
WALKED_BLOCKS: Final = 8
"""Blocks read of a partition to find how far a number of bytes reaches."""
_DELETIONS: Final = frozenset({int(Opcode.DCP_DELETION), int(Opcode.DCP_EXPIRATION)})


class Windows(NamedTuple):
    """How much history is kept. 0: only the newest versions."""

    history_ns: int
    history_bytes: int
    """Disk space for the history of the whole node. Partitions share it by their number of
    superseded versions.
    """
    purge_age_ns: int


class DiskUse(NamedTuple):
    """The store's disk space, and what it needs room for."""

    blocks_bytes: int
    """by_seqno."""
    other_bytes: int
    """All other tables."""
    inflow_bytes: int
    """Bytes that merges may add between a plan and the end of its compaction."""
    compaction_bytes: int
    """Pages that are free because of compaction itself."""


class FloorStep(NamedTuple):
    """A floor to raise, and then a partition to compact. `vb_uuid`: the version it was planned for.

    `floor` and `purge` may be the stored ones: then only the compaction is missing.
    """

    vb_id: int
    vb_uuid: int
    floor: int
    purge: int


class PlanReport(NamedTuple):
    """What a plan found. `damages`: partition and error text where stored data is unreadable."""

    steps: list[FloorStep]
    damages: list[tuple[int, str]]
    planned: int
    """How many partitions were looked at; the rest is for another call."""


class _Budget(NamedTuple):
    """How much history to keep, over all partitions.

    `history_bytes` counts frames; `spare` is the number of superseded versions.
    """

    now_ns: int
    history_bytes: int
    spare: int

    @classmethod
    def of(
        cls,
        records: Collection[PartitionRecord],
        windows: Windows,
        now_ns: int,
        use: DiskUse | None,
        *,
        worth_versions_min: int,
        body_bytes_target: int,
    ) -> _Budget:
        """Return the budget for these records and this use of the disk.

        Free pages are estimated: a merge may rewrite every page of by_key and the last block of
        every partition, and LMDB reuses a page two transactions after it was freed. As much again
        lies between used pages, in pieces too small for a block (seen in long runs).
        """
        spare = sum(map(_spare, records))
        if use is None:
            return cls(now_ns, windows.history_bytes, spare)
        written = [record for record in records if record.last_seqno]
        versions = sum(record.versions for record in written)
        version_bytes = use.blocks_bytes / max(1, versions)
        live_bytes = version_bytes * sum(record.item_count for record in written)
        newest_bytes = version_bytes * sum(record.keys for record in written)
        merge_bytes = use.other_bytes + len(written) * body_bytes_target // 2
        free_bytes = FREE_MERGES * merge_bytes + use.compaction_bytes
        waiting_versions = sum(_worth(record.keys, worth_versions_min) for record in written)
        waiting_bytes = version_bytes * waiting_versions
        room_bytes = (
            windows.history_bytes + 3 * live_bytes - newest_bytes
            - use.other_bytes - free_bytes - waiting_bytes - use.inflow_bytes
        )  # fmt: skip
        least_bytes = HISTORY_SHARE_MIN * windows.history_bytes
        history_bytes = max(least_bytes, min(windows.history_bytes, room_bytes))
        frames_share = max(0.5, BLOCK_FILL - COLUMN_BYTES / max(1, version_bytes))
        return cls(now_ns, int(history_bytes * frames_share), spare)


class _LastPlanned(NamedTuple):
    """When a partition was examined, and its state then."""

    now_ns: int
    last_seqno: int


class Planner:
    """Makes plans, and remembers what it examined."""

    def __init__(
        self,
        *,
        worth_versions_min: int = WORTH_VERSIONS_MIN,
        body_bytes_target: int = BODY_BYTES_TARGET,
    ) -> None:
        self._worth_versions_min = worth_versions_min
        self._body_bytes_target = body_bytes_target
        self._seen: dict[int, _LastPlanned] = {}
        self._budget = _Budget(0, 0, 0)

    def plan(
        self,
        view: StoreView,
        vb_ids: Iterable[int],
        windows: Windows,
        now_ns: int,
        *,
        use: DiskUse | None = None,
        purge_max: Mapping[int, int] | None = None,
        is_forced: bool = False,
        is_over: Callable[[], bool] = lambda: False,
    ) -> PlanReport:
        """Return the steps that are worth doing, or all that free anything, if forced.

        `purge_max`: how far partitions may be purged that keep deletions for consumers.

        Without `use`, `history_bytes` alone limits the history. Ends early when `is_over` returns
        True. A plan may take several calls; calls with the same `now_ns` belong together.
        """
        planned = 0
        if self._budget.now_ns != now_ns:
            self._budget = _Budget.of(
                view.partitions().values(), windows, now_ns, use,
                worth_versions_min=self._worth_versions_min,
                body_bytes_target=self._body_bytes_target,
            )  # fmt: skip
        manifest_uid = view.manifest().uid
        steps: list[FloorStep] = []
        damages: list[tuple[int, str]] = []
        for vb_id in vb_ids:
            try:
                record = view.partition(vb_id)
                if record is not None and record.last_seqno:
                    look = _PartitionPlan(
                        view, vb_id, record, windows, self._budget, manifest_uid,
                        self._worth_versions_min, (purge_max or {}).get(vb_id),
                    )  # fmt: skip
                    steps += self._steps(look, is_forced=is_forced)
            except StoreDamagedError as error:
                damages.append((vb_id, str(error)))
            planned += 1
            if is_over():
                break
        return PlanReport(steps, damages, planned)

    def _steps(self, look: _PartitionPlan, *, is_forced: bool) -> list[FloorStep]:
        if not (is_forced or look.is_unfinished or self._is_due(look)):
            return []
        self._seen[look.vb_id] = _LastPlanned(look.now_ns, look.record.last_seqno)
        step = look.step(is_forced=is_forced)
        return [] if step is None else [step]

    def _is_due(self, look: _PartitionPlan) -> bool:
        """Whether a step is possible and enough has changed since the last examination."""
        record, windows = look.record, look.windows
        if _spare(record) < look.worth and record.keys - record.item_count < look.worth:
            return False
        seen = self._seen.get(look.vb_id)
        if seen is None or seen.last_seqno > record.last_seqno:
            return True
        window_ns = min(windows.history_ns, windows.purge_age_ns)
        return (
            record.last_seqno - seen.last_seqno >= max(record.keys // 8, self._worth_versions_min)
            or look.now_ns - seen.now_ns >= window_ns // 8
        )


class _PartitionPlan:
    """One examination of one partition."""

    def __init__(
        self,
        view: StoreView,
        vb_id: int,
        record: PartitionRecord,
        windows: Windows,
        budget: _Budget,
        manifest_uid: int,
        worth_versions_min: int,
        purge_max: int | None,
    ) -> None:
        self.vb_id = vb_id
        self.record = record
        self.windows = windows
        self.now_ns = budget.now_ns
        self.worth = _worth(record.keys, worth_versions_min)
        """How many versions have to go for a compaction."""
        self._view = view
        self._budget = budget
        self._manifest_uid = manifest_uid
        self._purge_max = purge_max
        self._done_floor, self._done_purge, self._done_uid = record.compacted or (0, 0, 0)

    @property
    def is_unfinished(self) -> bool:
        """Whether floor or purge seqno were raised, and no compaction has followed."""
        record = self.record
        return record.history_floor > self._done_floor or record.purge_seqno > self._done_purge

    def step(self, *, is_forced: bool) -> FloorStep | None:
        """Return the step to do, None if nothing is worth it."""
        record = self.record
        by_time = self._floor_by_time()
        floor = max(by_time, self._floor_by_bytes())
        is_new = floor > self._done_floor
        is_worth = is_new and (
            (is_forced and _spare(record) > 0)
            or self._droppable(floor) >= self.worth
            or self._frees_collections(floor, is_forced=is_forced)
        )
        if not is_worth:
            # Bytes are not worth a step. Other work, mostly deletions, is no reason to drop more
            # history than the time window does.
            floor = by_time
        purge = record.purge_seqno
        if record.keys > record.item_count or is_forced:
            purge = max(purge, self._purge(floor, is_forced=is_forced))
        if not (is_worth or self.is_unfinished or purge > record.purge_seqno):
            return None
        return FloorStep(self.vb_id, record.failover[0][0], floor, purge)

    def _floor_by_time(self) -> int:
        """Return the floor that the time window allows, at least the stored one."""
        record, windows = self.record, self.windows
        if not (windows.history_ns and windows.history_bytes):
            return max(record.last_seqno, record.history_floor)
        after_seqno = min(record.history_floor, record.last_seqno)
        before_ns = self.now_ns - windows.history_ns
        floor = seqno_at(
            self._view, self.vb_id, record.last_seqno, before_ns,
            after_seqno=after_seqno, mended=record.mended,
        )  # fmt: skip
        return max(floor, record.history_floor)

    def _floor_by_bytes(self) -> int:
        """Return the floor at which the partition's history fits its share of the bytes, 0 if it
        has no superseded versions.
        """
        record, budget = self.record, self._budget
        spare = _spare(record)
        if not spare:
            return 0
        share_bytes = budget.history_bytes * spare // max(1, budget.spare)
        return seqno_below(self._view, self.vb_id, record.last_seqno, share_bytes)

    def _droppable(self, floor: int) -> int:
        """Return about how many superseded versions a compaction with a floor drops.

        It assumes that keys are overwritten as they were before. Then as many versions go as lie
        between two floors. Only reading the blocks would tell exactly.
        """
        return min(_spare(self.record), floor - self._done_floor)

    def _frees_collections(self, floor: int, *, is_forced: bool) -> bool:
        """Whether collections were dropped whose versions may go now."""
        record = self.record
        if self._manifest_uid == self._done_uid or not record.tally:
            return False
        unreachable = record.keys - record.item_count
        return unreachable >= (1 if is_forced else self.worth) and (
            is_forced or floor >= record.tally[0] or floor - self._done_floor >= self.worth
        )

    def _purge(self, floor: int, *, is_forced: bool) -> int:
        """Return the seqno of the last tombstone to drop, 0 if it is not worth it."""
        view, record = self._view, self.record
        last_seqno = min(floor, record.last_seqno) - 1
        worth = 1 if is_forced else self.worth
        if record.keys - record.item_count < worth and not is_forced:
            return 0
        limit = last_seqno if self._purge_max is None else min(last_seqno, self._purge_max)
        if self.windows.purge_age_ns:
            before_ns = self.now_ns - self.windows.purge_age_ns
            made = seqno_at(
                view, self.vb_id, record.last_seqno, before_ns, mended=record.mended
            )  # fmt: skip
            limit = min(limit, made)
        if limit <= self._done_purge + (0 if is_forced else worth):
            return 0
        seqnos = [
            meta.seqno
            for _, meta in view.metas(self.vb_id)
            if meta.opcode in _DELETIONS and meta.seqno <= limit
        ]
        return max(seqnos, default=0) if len(seqnos) >= worth else 0


def _spare(record: PartitionRecord) -> int:
    """Return how many versions are not the newest of their key."""
    return max(0, record.versions - record.keys)


def _worth(keys: int, versions_min: int) -> int:
    """Return how many versions a compaction must drop to be worth it, for this many keys."""
    return max(keys // 2, versions_min)


# -- looking for seqnos ----------------------------------------------------------------------------


def seqno_at(
    view: StoreView,
    vb_id: int,
    last_seqno: int,
    cas_max: int,
    *,
    after_seqno: int = 0,
    mended: list[int] | None = None,
) -> int:
    """Return the last version in (after, last] made at or before a time, `after_seqno` if there is
    none. `cas_max` is nanoseconds since the Unix epoch; `mended` the record's.
    """
    first = after_seqno
    if mended and mended[2] <= cas_max:
        first = max(first, min(mended[0], last_seqno))
    before = seqno_before(view.frames, vb_id, last_seqno, cas_max + 1, after_seqno=first)
    block = view.block_at(vb_id, before) if before > after_seqno else None
    return after_seqno if block is None else block.seqnos[bisect_right(block.seqnos, before) - 1]


def bytes_above(
    view: StoreView,
    vb_id: int,
    last_seqno: int,
    above_seqno: int,
    *,
    walked_blocks: int = WALKED_BLOCKS,
) -> int:
    """Return how many bytes of versions there are above a seqno: as exact as `seqno_below`."""
    seqno, size_bytes = last_seqno, 0
    for _ in range(walked_blocks):
        block = view.block_at(vb_id, seqno) if seqno > above_seqno else None
        if block is None:
            return size_bytes
        index = bisect_right(block.seqnos, above_seqno)
        size_bytes += len(block.body) - (block.ends[index - 1] if index else 0)
        seqno = block.seqno_before
    left = max(0, seqno - above_seqno)
    return size_bytes + left * size_bytes // (last_seqno - seqno)


def seqno_below(
    view: StoreView,
    vb_id: int,
    last_seqno: int,
    size_bytes: int,
    *,
    walked_blocks: int = WALKED_BLOCKS,
) -> int:
    """Return the last version that has at least so many bytes of versions above it, 0 if none.

    Exact within the last WALKED_BLOCKS blocks; further down it goes by their average.
    """
    seqno, walked_bytes = last_seqno, 0
    for _ in range(walked_blocks):
        block = view.block_at(vb_id, seqno) if seqno else None
        if block is None:
            return 0
        body_bytes = len(block.body)
        left_bytes = size_bytes - walked_bytes
        if left_bytes <= body_bytes:
            index = bisect_right(block.ends, body_bytes - left_bytes) - 1
            return block.seqnos[index] if index >= 0 else block.seqno_before
        walked_bytes += body_bytes
        seqno = block.seqno_before
    seqno -= (size_bytes - walked_bytes) * (last_seqno - seqno) // walked_bytes
    block = view.block_at(vb_id, seqno) if seqno > 0 else None
    return 0 if block is None else block.seqnos[bisect_right(block.seqnos, seqno) - 1]
