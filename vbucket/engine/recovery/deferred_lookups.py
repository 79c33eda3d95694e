"""Counts documents during a replay without looking up each replaced version. Sans-IO.

If a change replaces a version in the store, the number of documents depends on whether that version
was a document. Looking up each of them took longer than the rest of a start. Most are documents, so
the replay presumes that all are. `settle` then looks them up together, in key order, and corrects
the counts.

Who calls it: `vbucket.engine.recovery.replay` and `vbucket.engine.replicated`.

Invariants
- a key is added at most once between two calls of `settle`, and what the store has of it does not
  change between: a key of the frozen layer, which a merge brings into the store, is not added.
  Where it has, because `settle` met damage before a merge, the partition is counted anew;
- `settle` comes before anything that reads the counts or changes what counts (branch, manifest).
"""

from __future__ import annotations

from collections import Counter

from vbucket.engine.keyspace import MUTATION, Keyspace
from vbucket.engine.partition import Partition
from vbucket.model.collection_counts import CollectionCounts
from vbucket.model.entry import OPCODE_AT, is_deleted
from vbucket.model.manifest import DEFAULT_COLLECTION, collection_of
from vbucket.store.environment import StoreDamagedError
from vbucket.store.store import Store


class DeferredLookups:
    """See the module."""

    def __init__(self, store: Store, keyspace: Keyspace) -> None:
        self._store = store
        self._keyspace = keyspace
        self.presumed: dict[int, list[bytes]] = {}
        """Partition -> keys that were presumed documents. It is always the same dictionary:
        loops in C add to it, too."""
        self._failed: dict[int, int] = {}
        """Partition that `settle` could not read -> up to which seqno it was merged then."""

    def was_document(self, part: Partition, key: bytes, prev_seqno: int) -> bool:
        """Return whether a key was a document before a change that replaces `prev_seqno`.

        If only the store knows, return True and look it up in `settle`.
        """
        entry = part.newest.get(key)
        if entry is None and part.frozen is not None:
            entry = part.frozen.newest.get(key)
        if entry is not None or not prev_seqno or not part.merged_seqno:
            return bool(entry and not is_deleted(entry))
        keys = self.presumed.get(part.vb_id)
        if keys is None:
            self.presumed[part.vb_id] = [key]
        else:
            keys.append(key)
        return True

    def settle(self) -> None:
        """Look up the presumed documents and correct the counts. Raises StoreDamagedError for a
        partition that cannot be read: its keys stay for the next call, and all others are done.
        """
        damage: StoreDamagedError | None = None
        for vb_id, keys in tuple(self.presumed.items()):
            part = self._keyspace.partitions[vb_id]
            try:
                if self._failed.get(vb_id, part.merged_seqno) != part.merged_seqno:
                    self._count_anew(part)
                else:
                    keys.sort()
                    for key in self._store.keys_without_document(vb_id, keys):
                        self._keyspace.count(part, key, 1)
            except StoreDamagedError as error:
                self._failed.setdefault(vb_id, part.merged_seqno)
                damage = error
                continue
            del self.presumed[vb_id]
            self._failed.pop(vb_id, None)
        if damage is not None:
            raise damage

    def forget(self, vb_id: int) -> None:
        """A partition is cut back: nothing of before counts any more."""
        self.presumed.pop(vb_id, None)
        self._failed.pop(vb_id, None)

    def _count_anew(self, part: Partition) -> None:
        """Count from what the last merge has counted, and what is in memory. Raises
        StoreDamagedError before anything is changed.
        """
        record = self._store.partition(part.vb_id)
        assert record is not None, "it was merged"
        newest = {} if part.frozen is None else dict(part.frozen.newest)
        newest |= part.newest
        keys = sorted(newest)
        without = set(self._store.keys_without_document(part.vb_id, keys))
        stored = CollectionCounts(record.tally)
        more = Counter({cid: documents for cid, (_, documents) in stored.collections.items()})
        more[DEFAULT_COLLECTION] = record.item_count - stored.documents
        for key in keys:
            entry = newest[key]
            is_document = bool(entry) and entry[OPCODE_AT] == MUTATION
            more[collection_of(key)] += is_document - (key not in without)
        for collection_id, numbers in part.tally.collections.items():
            numbers[1] = more[collection_id]
        part.item_count = more[DEFAULT_COLLECTION] + part.tally.documents
