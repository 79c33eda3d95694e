"""Loads: documents of a restore go straight into the store, without memtable and log.

    request   partition, its version and the seqno before, packets of frames (`bulk`)
    report    the partition's record then; or why nothing was loaded

The transaction is the fact: all partitions of a call are in the store with it, records included, or
none is. The server holds writes to these partitions until it knows, and the log has nothing of them
that the store lacks (`vbucket.engine.loading.loads`). So log and store agree whenever a process
dies.

Nothing is believed of the packets: frames are checked as for every other way in. A partition is
loaded only if all its frames are sound and new: distinct keys that the store does not have, known
collections, no CAS above the limit. Otherwise nothing of it is loaded, and the server applies its
packets one by one, which also finds the words for what is wrong.

Who calls it: the store process. Pure: the database is an argument.

Invariants
- a load is repeated without effect: a partition that ends where the load would end has it already,
  because nobody else may have written to it;
- what is read of a partition is read before anything of it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from vbucket.engine.loading.bulk import Frames, MalformedFramesError
from vbucket.model.entry import key_of
from vbucket.model.manifest import Manifest, collection_of
from vbucket.native import entries_loop, new_staged
from vbucket.store.block import BODY_BYTES_TARGET
from vbucket.store.due import ExpiryRows
from vbucket.store.environment import KvEnv, KvWrite, StoreDamagedError
from vbucket.store.hashes import HashTables
from vbucket.store.records import BY_KEY_TABLE, STORE_FORMAT_VERSION, PartitionRecord
from vbucket.store.store import StoreView
from vbucket.upkeep.partition_merge import merge_partition, plain_changes, put_plain
from vbucket.upkeep.stage import Stage

_OLD_FORMAT: Final = "the store has an older format, which the next merge ends"
_OTHER_MANIFEST: Final = "the store has other collections than the server, until the next merge"


class Packet(NamedTuple):
    """A packet of a restore."""

    frames: int
    """How many it has."""
    value: bytes
    """The value of X_PUT_FRAMES."""
    number: int
    """Names it: it may travel to the store process before its request."""


class LoadRequest(NamedTuple):
    """What to load into one partition. Its fields travel as a list."""

    vb_id: int
    high_seqno: int
    """The partition's high seqno; the frames follow it."""
    vb_uuid: int
    epoch: int
    packets: Sequence[Packet]

    @property
    def frames(self) -> int:
        """How many there are."""
        return sum(packet.frames for packet in self.packets)


class LoadReport(NamedTuple):
    """What became of a request. The other fields are the partition's after the load; they mean
    nothing if `refusal` says why there was none.
    """

    vb_id: int
    refusal: str
    high_seqno: int = 0
    max_cas: int = 0
    item_count: int = 0
    tally: list[Any] | None = None


class _NotLoadedError(Exception):
    """A partition cannot be loaded; the text says why. Nothing of it was written."""


def load(
    env: KvEnv,
    requests: Sequence[LoadRequest],
    *,
    cas_max: int,
    manifest_uid: int,
    hash_tables: HashTables | None = None,
    before_commit: Callable[[], None] = lambda: None,
    body_bytes_target: int = BODY_BYTES_TARGET,
    native: bool = True,
) -> list[LoadReport]:
    """Load partitions in one transaction; durable on return. Return a report for each.

    `hash_tables`: those of the merges before. `native`: use the loops in C where they are built
    (the result is the same). Raises StoreFullError, StoreFailedError, and StoreDamagedError for
    damage that is found while writing; then nothing was loaded.
    """
    hash_tables = hash_tables or HashTables()
    with hash_tables.changing(env) as write:
        view = StoreView(write)
        node, manifest = view.node(), view.manifest()
        why = ""
        if node is None or node.format_version != STORE_FORMAT_VERSION:
            why = _OLD_FORMAT
        elif manifest.uid != manifest_uid:
            why = _OTHER_MANIFEST
        if why:
            return [LoadReport(request.vb_id, why) for request in requests]
        rows = ExpiryRows()
        loads = _Loads(
            write, manifest, rows, hash_tables, cas_max, body_bytes_target, native=native
        )
        reports = [loads.run(request) for request in requests]
        rows.write(write)
        before_commit()
    return reports


class _Loads:
    """The loads of one transaction."""

    def __init__(
        self,
        write: KvWrite,
        manifest: Manifest,
        rows: ExpiryRows,
        hash_tables: HashTables,
        cas_max: int,
        body_bytes_target: int,
        *,
        native: bool,
    ) -> None:
        self._write = write
        self._view = StoreView(write)
        self._manifest = manifest
        self._rows = rows
        self._hash_tables = hash_tables
        self._cas_max = cas_max
        self._body_bytes_target = body_bytes_target
        self._entries_of = entries_loop() if native else None
        self._quarantine = self._view.quarantine()

    def run(self, request: LoadRequest) -> LoadReport:
        """Load one partition."""
        try:
            record = self._record(request)
            if record.high_seqno != request.high_seqno + request.frames:
                stage = Stage(request.vb_id, record)
                loaded = self._load_natively(request, stage)
                record = self._load(request, stage) if loaded is None else loaded
        except (_NotLoadedError, MalformedFramesError) as error:
            return LoadReport(request.vb_id, str(error))
        return LoadReport(
            request.vb_id, "", record.high_seqno, record.max_cas, record.item_count, record.tally
        )

    def _record(self, request: LoadRequest) -> PartitionRecord:
        """Return the partition's record, if it is what the server takes it for."""
        vb_id = request.vb_id
        if vb_id in self._quarantine:
            raise _NotLoadedError("the partition is in quarantine")
        try:
            record = self._view.partition(vb_id)
        except StoreDamagedError as error:
            raise _NotLoadedError(str(error)) from error
        if record is None:
            raise _NotLoadedError("the store has no such partition")
        ends = (request.high_seqno, request.high_seqno + request.frames)
        if record.high_seqno not in ends or record.failover[0][0] != request.vb_uuid:
            raise _NotLoadedError("the partition changed")
        return record

    def _load_natively(self, request: LoadRequest, stage: Stage) -> PartitionRecord | None:
        """Load by the loops in C. None: nothing was written, and Python should look."""
        staged = None if self._entries_of is None else new_staged()
        if staged is None or self._entries_of is None:
            return None
        vb_id, seqno = request.vb_id, request.high_seqno + 1
        staged.open(vb_id)
        for count, packet, _ in request.packets:
            entries = self._entries_of(packet, count, vb_id, seqno, request.epoch, self._cas_max)
            if entries is None:
                return None
            if staged.add(entries, 0) != len(entries):
                return None
            seqno += count
        try:
            merged = plain_changes(
                self._write, stage, staged, self._hash_tables, self._body_bytes_target
            )
        except StoreDamagedError as error:
            raise _NotLoadedError(str(error)) from error
        if merged is None:
            return None
        items, _, _, _, _, _, _, versions, (_, _, collections) = merged
        known = self._manifest.collections
        assert versions == request.frames, "each frame is a version"
        if len(items) != versions or not all(found in known for found, _, _ in collections):
            return None
        if stage.record.keys:
            self._check_new(stage.record, [full_key for full_key, _ in items])
        return put_plain(self._write, stage, merged, self._manifest, self._rows, self._hash_tables)

    def _load(self, request: LoadRequest, stage: Stage) -> PartitionRecord:
        """Do the same in Python, for all kinds of frames."""
        vb_id, seqno = request.vb_id, request.high_seqno + 1
        for count, packet, _ in request.packets:
            frames = Frames(packet, count, vb_id, takes_xattrs=True)
            if max(frames.cas) > self._cas_max:
                raise _NotLoadedError("a CAS is too far ahead of the clock")
            stage.entries += frames.entries(seqno, None, request.epoch)
            seqno += count
        keys = sorted({key_of(entry) for entry in stage.entries})
        if len(keys) != len(stage.entries):
            raise _NotLoadedError("a key is there twice")
        known = self._manifest.collections
        if not all(collection_of(key) in known for key in keys):
            raise _NotLoadedError("a collection is not known")
        prefix = vb_id.to_bytes(2, "big")
        try:
            self._check_new(stage.record, [prefix + key for key in keys])
            tail = self._view.last_block(vb_id)
            if tail is not None:
                tail.checked_body()  # it may be packed again, after records were written
        except StoreDamagedError as error:
            raise _NotLoadedError(str(error)) from error
        if (tail.last_seqno if tail else 0) != stage.record.last_seqno:
            raise _NotLoadedError("blocks of the partition are missing")
        return merge_partition(
            self._write, self._view, stage, self._manifest, self._rows, self._hash_tables,
            self._body_bytes_target,
        )  # fmt: skip

    def _check_new(self, record: PartitionRecord, full_keys: Sequence[bytes]) -> None:
        """Raise _NotLoadedError if the store has one of these keys."""
        if not record.keys:
            return
        try:
            for _ in self._write.get_many(BY_KEY_TABLE, full_keys):
                raise _NotLoadedError("the partition has one of the keys")
        except StoreDamagedError as error:
            raise _NotLoadedError(str(error)) from error
