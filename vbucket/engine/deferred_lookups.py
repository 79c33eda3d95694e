"""Documents that a replay takes to be in the store, to be looked up together. Sans-IO.

A change that replaces a version in the store changes the number of documents by whether that
version was a document. Looking each one up while the log is applied took more than all the rest of
a start; most are documents. So all are presumed to be, and `settle` looks them up, partition by
partition in the order of their keys, and counts those in that were not.

Who calls it: `vbucket.engine.keyspace`, before anything is served.

Invariants
- a key is added at most once between two `settle`s, and the store does not change in between;
- whoever needs the counts, or changes what is counted (a branch, a manifest), settles first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vbucket.engine.partition import Partition
from vbucket.model.entry import is_deleted
from vbucket.store.store import Store


class DeferredLookups:
    """See the module. `count(partition, key, documents)` counts documents, more or less."""

    def __init__(
        self,
        store: Store,
        partitions: Sequence[Partition],
        count: Callable[[Partition, bytes, int], None],
    ) -> None:
        self._store = store
        self._partitions = partitions
        self._count = count
        self._keys: dict[int, list[bytes]] = {}

    def was_document(self, part: Partition, key: bytes, prev_seqno: int) -> bool:
        """Return whether a key was a document before a change that replaces `prev_seqno`.

        Of what only the store knows, it is presumed.
        """
        entry = part.newest.get(key)
        if entry is not None or not prev_seqno or not part.merged_seqno:
            return bool(entry and not is_deleted(entry))
        keys = self._keys.get(part.vb_id)
        if keys is None:
            self._keys[part.vb_id] = [key]
        else:
            keys.append(key)
        return True

    def settle(self) -> None:
        """Look all up; count in those that were none. Raises StoreDamagedError."""
        for vb_id, keys in self._keys.items():
            keys.sort()
            documents = self._store.documents_among(vb_id, keys)
            if len(documents) != len(keys):
                for key in keys:
                    if key not in documents:
                        self._count(self._partitions[vb_id], key, 1)
        self._keys.clear()
