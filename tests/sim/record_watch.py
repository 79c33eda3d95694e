"""Follows the records of partitions in the metadata store, also when the store goes back to a copy.

The newest record of a partition is the one with the highest rank that was ever written. While the
store has older ones, checkers go by the newest: it says who has what is committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from failover.coordinator.records import ClusterKeys, KeyKind, decode_partition
from failover.metadata.metastore import KeyValue, Range, RangeResult, WatchBatch, WatchMessage
from failover.metadata.revision_store import RevisionStore
from failover.rules.replication_record import ReplicationRecord
from memory.meta_store import MemoryWatch
from sim.store_client import ROOT

KEYS: Final = ClusterKeys(ROOT)

Changed = Callable[[int, ReplicationRecord | None, ReplicationRecord], None]
"""Called with a partition, its record before in this store, and its new one."""


class RecordWatch:
    """See the module. `changed` is called for each change of a record."""

    def __init__(self, changed: Changed) -> None:
        self._changed = changed
        self._records: dict[int, ReplicationRecord] = {}
        """As the store has them."""
        self._newest: dict[int, ReplicationRecord] = {}

    def follow(self, now_ns: int, store: RevisionStore) -> None:
        """Look at a store from now on, and at no other one."""
        found = store.apply(now_ns, Range(KEYS.root, is_prefix=True))
        assert isinstance(found, RangeResult)
        self._records = {}
        for item in found.items:
            self._take_item(item)
        records = self._records
        watch = MemoryWatch(ROOT, found.revision + 1, lambda message: self._take(records, message))
        store.subscribe(lambda: watch.catch_up(store))

    def _take(self, of: dict[int, ReplicationRecord], message: WatchMessage) -> None:
        assert isinstance(message, WatchBatch), message
        for event in message.events:
            if of is self._records and not event.is_delete:
                self._take_item(event.item)

    def _take_item(self, item: KeyValue) -> None:
        name = KEYS.parse(item.key)
        if name is None or name.kind is not KeyKind.PARTITION:
            return
        record, before = decode_partition(item).record, self._records.get(name.vb_id)
        self._records[name.vb_id] = record
        newest = self._newest.get(name.vb_id)
        if newest is None or record.rank > newest.rank:
            self._newest[name.vb_id] = record
        self._changed(name.vb_id, before, record)

    def newest(self, vb_id: int) -> ReplicationRecord:
        """Return the newest record of a partition that was ever written."""
        return self._newest[vb_id]

    @property
    def older(self) -> list[int]:
        """The partitions of which the store has an older record than there was."""
        return [
            vb_id
            for vb_id, record in sorted(self._records.items())
            if record.rank < self._newest[vb_id].rank
        ]
