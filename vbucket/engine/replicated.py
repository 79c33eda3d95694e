"""Applies the changes of a partition's master to a replica. Sans-IO.

Who calls it: replication. Entries are applied unchanged: they have their seqno, CAS, revision and
leader epoch. They go into memory and into the open group, like changes of clients.

Documents that only the store knows are presumed to be there (`DeferredLookups`), so an entry costs
no look-up. `settle` corrects the counts; it comes before the store changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from dcp.wire.frame import HEADER_BYTES
from vbucket.engine.deferred_lookups import DeferredLookups
from vbucket.engine.engine import Engine
from vbucket.engine.keyspace import MUTATION
from vbucket.engine.partition import Partition
from vbucket.model.entry import META, PREFIX_BYTES, head_of
from vbucket.store.store import Store

_UNPACK_META = META.unpack_from


class ReplicatedChanges:
    """See the module."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self._engine = engine
        self._presumed = DeferredLookups(store, engine.partitions, engine.keyspace.count)

    def apply(self, part: Partition, entries: Sequence[bytes]) -> None:
        """Apply the next changes of a partition, in seqno order.

        The caller has checked them (dcp.replication.messages): their seqnos follow each other.
        """
        keyspace, due = self._engine.keyspace, self._engine.due
        for entry in entries:
            head = head_of(entry)
            key_at = PREFIX_BYTES + HEADER_BYTES + head.extras_bytes
            key = entry[key_at : key_at + head.key_bytes]
            _, _, _, _, cas, seqno, _ = _UNPACK_META(entry)
            assert seqno > part.high_seqno, f"vb {part.vb_id} at {part.high_seqno}: {seqno}"
            is_document = head.opcode == MUTATION
            was_document = self._presumed.was_document(part, key, head.prev_seqno)
            keyspace.apply(part, key, entry, seqno, is_document - was_document)
            part.max_cas = max(part.max_cas, cas)
            if is_document:
                due.add(entry)

    def settle(self) -> None:
        """Correct the counts of documents. Raises StoreDamagedError."""
        self._presumed.settle()
