"""Applies the changes of a partition's master to a replica. Sans-IO.

Who calls it: replication. Entries are applied unchanged: they have their seqno, CAS, revision and
leader epoch. They go into memory and into the open group, like changes of clients.

Documents that only the store knows are presumed to be there (`DeferredLookups`), so an entry costs
no look-up. `settle` corrects the counts; it comes before the store changes.

There is one exception to both. The previous version that an entry names may not be the one that is
here: a snapshot leaves superseded versions out, and a master forgets a key with its purged
deletion, which may still be here. Such an entry is linked to the version that is here. Rollbacks,
compaction and snapshots for consumers follow these links.

Whole groups go through a loop in C (`apply_whole`) if it is built. It applies documents, deletions
and expiries of the default collection itself, and gives documents with an expiry, system events and
changes of other collections to `_apply_linked`, one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dcp.wire.frame import HEADER_BYTES
from dcp.wire.opcode import Opcode
from vbucket.engine.engine import Engine
from vbucket.engine.keyspace import MUTATION
from vbucket.engine.partition import Partition
from vbucket.engine.recovery.deferred_lookups import DeferredLookups
from vbucket.model.entry import (
    META,
    OPCODE_AT,
    PREFIX,
    PREFIX_BYTES,
    head_of,
    key_of,
    prev_seqno_of,
    seqno_of,
)
from vbucket.native import group_run
from vbucket.store.due import EXPIRY_AT, NO_EXPIRY
from vbucket.store.environment import StoreDamagedError
from vbucket.store.store import Store

_UNPACK_META = META.unpack_from
SYSTEM_EVENT: Final = int(Opcode.DCP_SYSTEM_EVENT)


ReplicatedChange = tuple[int, bytes, bytes, int, int, int, bool]
"""A change of a master that was checked: partition, key, entry, and the entry's seqno, previous
seqno and CAS; whether it leaves a document."""


class ReplicatedChanges:
    """See the module."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self._engine = engine
        self.damages: set[int] = set()
        """What `settle` met. The caller empties it."""
        self._presumed = DeferredLookups(store, engine.keyspace)
        self.group_run = group_run(
            engine.partitions, self._presumed.presumed, self._linked_one, self._apply_one
        )
        """Checks and applies whole groups in C; None: the loops are not built."""

    def apply(self, part: Partition, entries: Sequence[bytes]) -> None:
        """Apply the next changes of a partition, in seqno order.

        The caller has checked them (failover.replication.messages): their seqnos follow each other,
        or rise within the partition's incomplete snapshot. Raises StoreDamagedError before anything
        is changed.
        """
        if part.incomplete_snapshot is not None or part.purge_seqno:
            entries = self._linked(part, entries)
        keyspace, due = self._engine.keyspace, self._engine.due
        for entry in entries:
            head = head_of(entry)
            key_at = PREFIX_BYTES + HEADER_BYTES + head.extras_bytes
            key = entry[key_at : key_at + head.key_bytes]
            _, _, _, _, cas, seqno, _ = _UNPACK_META(entry)
            assert seqno > part.high_seqno, f"partition {part.vb_id} at {part.high_seqno}: {seqno}"
            is_document = head.opcode == MUTATION
            was_document = self._presumed.was_document(part, key, head.prev_seqno)
            keyspace.apply(part, key, entry, seqno, is_document - was_document)
            part.max_cas = max(part.max_cas, cas)
            if is_document:
                due.add(entry)

    def _linked(self, part: Partition, entries: Sequence[bytes]) -> list[bytes]:
        """Return the entries, each with the previous version of its key that is here."""
        has_gaps = part.incomplete_snapshot is not None
        newest: dict[bytes, int] = {}
        linked: list[bytes] = []
        for entry in entries:
            head = head_of(entry)
            key, prev_seqno = key_of(entry), head.prev_seqno
            if head.opcode != SYSTEM_EVENT and (has_gaps or not prev_seqno):
                known = newest.get(key)
                prev_seqno = self._seqno_here(part, key) if known is None else known
            newest[key] = seqno_of(entry)
            if prev_seqno == head.prev_seqno:
                linked.append(entry)
            else:
                linked.append(PREFIX.pack(prev_seqno, head.epoch) + entry[PREFIX_BYTES:])
        return linked

    def _seqno_here(self, part: Partition, key: bytes) -> int:
        """Return the seqno of the newest version of a key; 0: there is none."""
        entry = part.newest.get(key)
        if entry:
            return seqno_of(entry)
        return self._engine.versions.meta_below(part, key, entry)[5]

    def apply_group(self, changes: Sequence[ReplicatedChange]) -> int:
        """Apply changes of several partitions, in the order of the master's log. Return the commit
        group that has them here.

        The caller has checked them (failover.replication.messages): the seqnos of each
        partition follow each other, and no partition has a part of a snapshot. Raises
        StoreDamagedError before anything is changed.
        """
        self._apply_linked(self._all_linked(changes))
        return self._engine.keyspace.group

    def apply_whole(
        self,
        payload: bytes,
        highs: dict[int, int],
        epochs: dict[int, int],
        body_bytes_max: int,
    ) -> tuple[int, dict[int, int]] | None:
        """Check and apply the entries of a whole group in C. Return the commit group that has them
        here, and partition -> end seqno; `highs` is raised.

        None: nothing was changed; check the group in Python (failover.replication.messages,
        which explains the arguments), and call `apply_group`. Raises StoreDamagedError before
        anything is changed.
        """
        run, keyspace = self.group_run, self._engine.keyspace
        if run is None:
            return None
        ends = run.apply(
            payload, highs, epochs, body_bytes_max, keyspace.pending, keyspace.touched,
            keyspace.group,
        )  # fmt: skip
        return None if ends is None else (keyspace.group, ends)

    def _linked_one(self, part: Partition, entry: bytes) -> bytes:
        return self._linked(part, (entry,))[0]

    def _apply_one(self, change: ReplicatedChange) -> None:
        self._apply_linked((change,))

    def _apply_linked(self, changes: Sequence[ReplicatedChange]) -> None:
        engine = self._engine
        keyspace, due = engine.keyspace, engine.due
        partitions, was_document = keyspace.partitions, self._presumed.was_document
        group, touch = keyspace.group, keyspace.touched.append
        keyspace.pending += [change[2] for change in changes]
        for vb_id, key, entry, seqno, prev_seqno, cas, is_document in changes:
            part = partitions[vb_id]
            assert seqno == part.high_seqno + 1, f"partition {vb_id} at {part.high_seqno}: {seqno}"
            newest = part.newest
            before = newest.get(key)
            if before and before[OPCODE_AT] == MUTATION:
                documents = is_document - 1
            else:
                documents = is_document - was_document(part, key, prev_seqno)
            newest[key] = entry
            part.append_entry(entry)
            if part.last_group != group:
                part.last_group = group
                touch(part)
            if key[0]:
                part.tally.note(key, seqno, seqno - 1, keyspace.manifest)
                if documents:
                    keyspace.count(part, key, documents)
            elif documents:
                part.item_count += documents
            if cas > part.max_cas:  # noqa: PLR1730 - a call takes longer
                part.max_cas = cas
            if is_document and entry[EXPIRY_AT : EXPIRY_AT + 4] != NO_EXPIRY:
                due.add(entry)
            part.high_seqno = seqno

    def _all_linked(self, changes: Sequence[ReplicatedChange]) -> Sequence[ReplicatedChange]:
        """Return the changes, each with the previous version of its key that is here."""
        partitions = self._engine.partitions
        linked: list[ReplicatedChange] | None = None
        for place in [place for place, change in enumerate(changes) if not change[4]]:
            vb_id, key, entry, seqno, _, cas, is_document = changes[place]
            part = partitions[vb_id]
            if part.purge_seqno:
                (entry,) = self._linked(part, (entry,))
                if linked is None:
                    linked = list(changes)
                prev_seqno = prev_seqno_of(entry)
                linked[place] = (vb_id, key, entry, seqno, prev_seqno, cas, is_document)
        return changes if linked is None else linked

    def settle(self) -> None:
        """Correct the counts of documents. Damage must not end the node, because the changes are
        right: those of a partition that cannot be read are corrected once it is mended.
        """
        if not self._presumed.presumed:
            return
        try:
            self._presumed.settle()
        except StoreDamagedError as error:
            if error.vb_id is not None:
                self.damages.add(error.vb_id)

    def forget(self, vb_id: int) -> None:
        """A partition is cut back: nothing of before counts any more."""
        self._presumed.forget(vb_id)
