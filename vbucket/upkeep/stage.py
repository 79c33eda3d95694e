"""What a merge will do to one partition, gathered from the log. Pure.

Who calls it: `vbucket.upkeep.merge`.
"""

from __future__ import annotations

from collections.abc import Collection
from operator import itemgetter
from typing import Any, Final

from vbucket.model.control import SnapshotWindow, floor_and_purge, snapshot_window
from vbucket.model.entry import seqno_of
from vbucket.store.hashes import Tables
from vbucket.store.records import Mended, PartitionRecord

_PAGE_BYTES: Final = 4096
_ROW_BYTES: Final = 64
"""What a row of by_key takes of a page besides its key, at most."""
cas_of: Final = itemgetter(slice(28, 36))
"""The CAS of an entry, as bytes."""


class Stage:
    """What the merge will do to one partition.

    Invariants: `entries` ascend. `high_seqno` is the partition's, without the entries since the
    last rollback. Stored versions above `trim_to` are removed (None: none; 0: all). Tombstones up
    to `purged_seqno` may be missing in the store. The CAS of entries before `cas_from` do not count
    for the highest CAS: the record has it already, or it was lowered.
    """

    __slots__ = (
        "cas_from", "entries", "hashes", "high_seqno", "purged_seqno", "record", "replaced",
        "stored", "trim_to", "vb_id", "written_pages",
    )  # fmt: skip

    def __init__(self, vb_id: int, record: PartitionRecord) -> None:
        self.vb_id = vb_id
        self.record = self.stored = record
        self.purged_seqno = record.purge_seqno
        self.high_seqno = record.high_seqno
        self.trim_to: int | None = None
        self.entries: list[bytes] = []
        self.cas_from = 0
        self.written_pages = 0
        """About how many pages its merge has changed, from above."""
        self.replaced: list[tuple[bytes, bytes]] = []
        """By the loops in C: the records that are replaced, and the hashes before."""
        self.hashes: Tables | None = None

    def wrote(
        self, keys: Collection[bytes], all_keys: int, blocks: list[tuple[bytes, bytes]]
    ) -> None:
        """Count what was written: these of `all_keys` keys to by_key, the blocks to by_seqno."""
        pages = len(keys)
        if pages:
            row_bytes = sum(map(len, keys)) // pages + _ROW_BYTES
            # A page is at least half full. Neighbours share one.
            pages = min(pages, 2 + 2 * all_keys * row_bytes // _PAGE_BYTES)
        self.written_pages += pages + sum(1 + len(block) // _PAGE_BYTES for _, block in blocks)

    def lower_cas(self, mended: list[int]) -> None:
        """Lower the highest CAS."""
        self.record = self.record._replace(max_cas=mended[1], mended=mended)
        self.cas_from = len(self.entries)

    def take_snapshot(self, document: dict[str, Any]) -> None:
        """Take note of a part of a snapshot, or of its end."""
        floor, purge = floor_and_purge(document)
        window = snapshot_window(document)
        record = self.record
        self.record = record._replace(
            history_floor=max(record.history_floor, floor),
            purge_seqno=max(record.purge_seqno, purge),
            max_cas=max(record.max_cas, document["cas"]),
            snapshot=None if window is None else list(window),
        )

    def roll_back(self, seqno: int) -> None:
        """Undo every version above `seqno`, staged or stored. The highest CAS is kept."""
        self.high_seqno = min(self.final_high_seqno(), seqno)
        if seqno < self.record.last_seqno:
            self.trim_to = seqno if self.trim_to is None else min(self.trim_to, seqno)
        self.record = self.record._replace(
            max_cas=self.final_max_cas(),
            history_floor=min(self.record.history_floor, seqno),
            purge_seqno=min(self.record.purge_seqno, max(0, seqno - 1)),
            mended=self.record.mended and list(Mended(*self.record.mended).cut(seqno)),
            snapshot=_window_after(self.record.snapshot, seqno),
        )
        entries = self.entries
        while entries and seqno_of(entries[-1]) > seqno:
            entries.pop()
        self.cas_from = len(entries)

    def final_high_seqno(self) -> int:
        """Return the partition's high seqno after this stage."""
        return max(self.high_seqno, seqno_of(self.entries[-1]) if self.entries else 0)

    def final_max_cas(self) -> int:
        """Return the partition's highest CAS after this stage, undone versions included."""
        staged = max(map(cas_of, self.entries[self.cas_from :]), default=b"")
        return max(self.record.max_cas, int.from_bytes(staged, "big"))


def _window_after(snapshot: list[int] | None, seqno: int) -> list[int] | None:
    """Return the window of an incomplete snapshot after a rollback."""
    if snapshot is None:
        return None
    window = SnapshotWindow.from_document(snapshot).after_rollback(seqno)
    return None if window is None else list(window)
