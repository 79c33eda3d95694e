"""Counts and seqnos of a partition's collections other than the default one. Pure.

A change in the default collection does not touch it. Keyspace and merge keep one per partition,
with the same rules.

    other_high_seqno     the last change outside of the default collection, system events included
    default_high_seqno   the last change in the default collection before the run of changes that
                         ends with `other_high_seqno`; above that run the default collection's
                         high seqno is the partition's
    collections          collection id -> [high seqno, live documents], of collections that are not
                         gone

Invariants
- everything in (default_high_seqno, other_high_seqno] is outside of the default collection (or a
  gap);
- a collection counts from its first change on, also before the manifest has it: replicas may get
  the changes first. It counts until a manifest says that it is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vbucket.model.manifest import Manifest, collection_of


class CollectionCounts:
    """See the module."""

    __slots__ = ("collections", "default_high_seqno", "other_high_seqno")

    def __init__(self, document: Any = None) -> None:
        """Restore a tally from its `to_document` form; None: an empty one."""
        self.other_high_seqno = 0
        self.default_high_seqno = 0
        self.collections: dict[int, list[int]] = {}
        if document:
            self.other_high_seqno, self.default_high_seqno, collections = document
            self.collections = {key: list(numbers) for key, numbers in collections.items()}

    def to_document(self) -> list[Any] | None:
        """Return the stored form; None if it is empty."""
        if not self.other_high_seqno:
            return None
        return [self.other_high_seqno, self.default_high_seqno, self.collections]

    def note(self, key: bytes, seqno: int, seqno_before: int, manifest: Manifest) -> None:
        """Note a change outside the default collection; `seqno_before` is the previous change."""
        if self.other_high_seqno != seqno_before:
            self.default_high_seqno = seqno_before
        self.other_high_seqno = seqno
        collection_id = collection_of(key)
        numbers = self.collections.get(collection_id)
        if numbers is not None:
            numbers[0] = seqno
        elif not manifest.is_gone(collection_id):
            self.collections[collection_id] = [seqno, 0]

    def count(self, collection_id: int, documents: int) -> None:
        """Add to the number of live documents; a negative number subtracts."""
        self.collections.setdefault(collection_id, [0, 0])[1] += documents

    def take(
        self,
        other_high_seqno: int,
        default_high_seqno: int,
        changes: Iterable[tuple[int, int, int]],
        manifest: Manifest,
    ) -> None:
        """Take the seqnos after many changes, and for each collection that has some (id, high
        seqno, more documents).
        """
        self.other_high_seqno, self.default_high_seqno = other_high_seqno, default_high_seqno
        for collection_id, high_seqno, documents in changes:
            if not manifest.is_gone(collection_id):
                numbers = self.collections.setdefault(collection_id, [0, 0])
                numbers[0] = high_seqno
                numbers[1] += documents

    def forget(self, manifest: Manifest) -> int:
        """Forget collections that are gone; return how many documents they had."""
        gone = [key for key in self.collections if manifest.is_gone(key)]
        return sum(self.collections.pop(key)[1] for key in gone)

    @property
    def documents(self) -> int:
        """Live documents outside of the default collection."""
        return sum(documents for _, documents in self.collections.values())

    def default_seqno_at(self, seqno: int) -> int | None:
        """Return the default collection's last seqno at or below `seqno`. None: it is below the
        last run of other changes, and the caller must search for it.
        """
        if seqno > self.other_high_seqno:
            return seqno
        return self.default_high_seqno if seqno >= self.default_high_seqno else None

    def roll_back(self, seqno: int, backward: Iterable[tuple[int, bytes]]) -> None:
        """Correct the seqnos after everything above `seqno` was undone.

        `backward` yields (seqno, key) of the remaining changes, newest first; it is read only as
        far as needed.
        """
        if seqno >= self.other_high_seqno:
            return
        missing = {cid for cid, numbers in self.collections.items() if numbers[0] > seqno}
        for collection_id in missing:
            self.collections[collection_id][0] = 0
        self.other_high_seqno = self.default_high_seqno = 0
        for change_seqno, key in backward:
            if key[0] == 0:
                if self.other_high_seqno and not self.default_high_seqno:
                    self.default_high_seqno = change_seqno
            else:
                self.other_high_seqno = self.other_high_seqno or change_seqno
                collection_id = collection_of(key)
                if collection_id in missing:
                    missing.discard(collection_id)
                    self.collections[collection_id][0] = change_seqno
            if not missing and self.default_high_seqno:
                return
