"""Replays the log's groups into an engine at a start. Sans-IO.

Who calls it: `vbucket.engine.recovery.startup`, before anything is served. Entries are applied
unchanged: they already have their seqno, CAS and revision. The store may have the first part of an
unfinished merge; its entries are passed over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dcp.wire.frame import HEADER_BYTES
from failover.rules.history import FailoverLog
from vbucket.engine.engine import Engine
from vbucket.engine.keyspace import MUTATION
from vbucket.engine.partition import Partition, VbState
from vbucket.engine.recovery.deferred_lookups import DeferredLookups
from vbucket.log.record import entries_from, entry_at, split_entries
from vbucket.model.control import (
    control_document,
    epoch_of,
    floor_and_purge,
    snapshot_window,
    watermarks_of,
)
from vbucket.model.entry import LOG_CONTROL, META, PREFIX_BYTES, head_of
from vbucket.model.manifest import Manifest
from vbucket.native import replay_run
from vbucket.store.records import Mended, PartMerged
from vbucket.store.store import Store

_UNPACK_META = META.unpack_from


class Replay:
    """See the module. `apply` groups in order, then `finish`."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self._engine = engine
        node = store.node()
        assert node is not None, "the store was created"
        self._part_merged = PartMerged(*(node.part_merged or (0, 0)))
        self._presumed = DeferredLookups(store, engine.keyspace)
        self._run = replay_run(engine.partitions)

    def apply_group(self, group: int, payload: bytes) -> None:
        """Apply a group of the log. Raises LogDamagedError if the lengths of its entries do not add
        up; then nothing of it was applied.
        """
        if group > self._part_merged.group:
            self._apply_payload(group, payload)
            return
        rollbacks = self._merged_rollbacks(payload)
        self._apply_payload(group, entries_from(payload, self._part_merged.vb_id))
        for vb_id, seqno in rollbacks:  # the store knows no watermarks
            self._lower_watermark(vb_id, seqno)

    def _apply_payload(self, group: int, payload: bytes) -> None:
        run, at = self._run, 0
        if run is None or not run.adds_up(payload):
            self.apply(group, split_entries(payload))
            return
        while at < len(payload):
            reached = run.apply(payload, at, self._presumed.presumed)
            self._engine.keyspace.memtables.active_bytes += reached - at
            at = reached
            if at < len(payload):
                entry = entry_at(payload, at)
                self._apply_entries([entry])
                at += len(entry)
        self._engine.keyspace.continue_after(group)

    def _merged_rollbacks(self, payload: bytes) -> list[tuple[int, int]]:
        """Return the rollbacks (partition, seqno) of a group that are in the store."""
        rollbacks = []
        for entry in split_entries(payload):
            head = head_of(entry)
            if head.opcode == LOG_CONTROL and head.vb_id < self._part_merged.vb_id:
                rollback_to = control_document(entry).get("rollback_to")
                if isinstance(rollback_to, int):
                    rollbacks.append((head.vb_id, rollback_to))
        return rollbacks

    def _lower_watermark(self, vb_id: int, seqno: int) -> None:
        known = self._engine.keyspace.known_watermarks
        known[vb_id] = min(known.get(vb_id, 0), seqno)

    def apply(self, group: int, entries: Iterable[bytes]) -> None:
        """Apply entries of a group."""
        self._apply_entries(entries)
        self._engine.keyspace.continue_after(group)

    def _apply_entries(self, entries: Iterable[bytes]) -> None:
        engine = self._engine
        partitions = engine.partitions
        for entry in entries:
            head = head_of(entry)
            engine.keyspace.memtables.active_bytes += head.entry_bytes
            if head.opcode == LOG_CONTROL:
                self._presumed.settle()
                self._apply_control(head.vb_id, control_document(entry))
                continue
            part = partitions[head.vb_id]
            key_at = PREFIX_BYTES + HEADER_BYTES + head.extras_bytes
            key = entry[key_at : key_at + head.key_bytes]
            _, _, _, _, cas, seqno, _ = _UNPACK_META(entry)
            assert seqno > part.high_seqno, f"{head.vb_id} at {part.high_seqno}: replay {seqno}"
            assert head.epoch <= part.leader_epoch, "no entry is of a later epoch"
            was_live = self._presumed.was_document(part, key, head.prev_seqno)
            if (head.opcode == MUTATION) != was_live:
                engine.keyspace.count(part, key, -1 if was_live else 1)
            if key[0]:
                part.tally.note(key, seqno, part.high_seqno, engine.keyspace.manifest)
            part.high_seqno = part.committed_seqno = part.synced_seqno = seqno
            part.max_cas = max(part.max_cas, cas)
            part.newest[key] = entry
            part.append_entry(entry)
            if head.opcode == MUTATION:
                engine.due.add(entry)

    def finish(self) -> None:
        """Finish after the last group: settle the document counts."""
        self._presumed.settle()

    def _apply_control(self, vb_id: int, document: dict[str, object]) -> None:
        engine = self._engine
        kind = document["kind"]
        if kind == "failover":
            part = engine.partitions[vb_id]
            rollback_to = document["rollback_to"]
            if rollback_to is not None:
                assert isinstance(rollback_to, int)
                engine.keyspace.roll_back(part, rollback_to)
                self._lower_watermark(vb_id, rollback_to)
            part.set_failover(FailoverLog.from_document(document["log"]))
            part.raise_epoch(epoch_of(dict(document)))
        elif kind == "epoch":
            engine.partitions[vb_id].raise_epoch(epoch_of(dict(document)))
        elif kind == "state":
            state = document["state"]
            assert isinstance(state, int)
            engine.partitions[vb_id].state = VbState(state)
        elif kind in {"floor", "purge"}:
            part = engine.partitions[vb_id]
            floor, purge = floor_and_purge(dict(document))
            part.history_floor = max(part.history_floor, floor)
            part.purge_seqno = max(part.purge_seqno, purge)
        elif kind == "snapshot":
            self._apply_snapshot(engine.partitions[vb_id], dict(document))
        elif kind == "cas":
            mended = document["mended"]
            assert isinstance(mended, list)
            engine.partitions[vb_id].lower_cas(Mended(*mended))
        elif kind == "manifest":
            engine.keyspace.replay_manifest(Manifest.from_document(document["manifest"]))
        elif kind == "hw":
            engine.keyspace.replay_watermarks(watermarks_of(document))
        else:
            # `durability` is for the shell, which reads it from the node record.
            assert kind == "durability", kind

    def _apply_snapshot(self, part: Partition, document: dict[str, Any]) -> None:
        floor, purge = floor_and_purge(document)
        part.incomplete_snapshot = snapshot_window(document)
        part.history_floor = max(part.history_floor, floor)
        part.purge_seqno = max(part.purge_seqno, purge)
        part.max_cas = max(part.max_cas, document["cas"])
