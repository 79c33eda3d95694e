"""Counts documents during a replay without looking up each replaced version. Sans-IO.

If a change replaces a version in the store, the number of documents depends on whether that version
was a document. Looking up each of them took longer than the rest of a start. Most are documents, so
the replay presumes that all are. `settle` then looks them up together, in key order, and corrects
the counts.

Who calls it: `vbucket.engine.recovery.replay` and `vbucket.engine.replicated`.

Invariants
- a key is added at most once between two calls of `settle`, and what the store has of it does not
  change between: a key of the frozen layer, which a merge brings into the store, is not added;
- `settle` comes before anything that reads the counts or changes what counts (branch, manifest).
"""

from __future__ import annotations

from vbucket.engine.keyspace import Keyspace
from vbucket.engine.partition import Partition
from vbucket.model.entry import is_deleted
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
            keys.sort()
            try:
                without = self._store.keys_without_document(vb_id, keys)
            except StoreDamagedError as error:
                damage = error
                continue
            del self.presumed[vb_id]
            for key in without:
                self._keyspace.count(self._keyspace.partitions[vb_id], key, 1)
        if damage is not None:
            raise damage
