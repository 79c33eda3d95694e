"""The store: the merged changes, readable by key and by seqno.

    meta, failover, state         records (vbucket.store.records)
    by_key    vb + key            the key's newest version (vbucket.store.key_record)
    by_seqno  vb + first seqno    blocks of versions (vbucket.store.block)
    expiry    due + vb + key      when documents are due to expire (vbucket.store.due)

Formats: in format 4 a merge is one transaction. It can be read, and becomes format 5 with the first
merge, which the first start begins.

Who calls it: the engine reads through `Store`; the merge reads and writes through `StoreView` and
the functions here. Only the current writer calls `create` and `set_*`: the store process while the
server runs, the server before and after that.

Invariants
- the content depends only on the merged prefix of the log and on compaction. Only failover logs and
  history floors may be ahead of it; they are in the log, too;
- every value has a CRC-32C over key and value, checked on every read: a reader gets
  StoreDamagedError, never wrong data. Blocks are chained, so a missing block is noticed too;
- a reader sees one committed state until `refresh`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from dcp.wire.opcode import Opcode
from vbucket.log.device import UnknownFormatError
from vbucket.model.entry import PREFIX_BYTES, key_in_frame, key_of, seqno_of
from vbucket.model.ids import NUM_VBUCKETS
from vbucket.native.key_hashes import Row, RowForm, rows_of_buckets
from vbucket.store.block import (
    WITHOUT_XATTRS,
    Block,
    BlockDamagedError,
    OpenedBlocks,
    block_key,
    find_frame,
)
from vbucket.store.due import rows_end
from vbucket.store.environment import Buffer, KvEnv, KvReader, KvWrite, StoreDamagedError, with_room
from vbucket.store.hashes import (
    ROWS_AT_ONCE,
    SCANNED_RECORDS,
    Tables,
    rows_at_once,
    stored_hashes,
)
from vbucket.store.key_record import (
    MetaFields,
    StoredMeta,
    check_records,
    checked_fields,
    checked_meta,
)
from vbucket.store.records import (
    BY_KEY_TABLE,
    BY_SEQNO_TABLE,
    EXPIRY_TABLE,
    CleanEnd,
    NodeRecord,
    PartitionRecord,
    PartMerged,
    Quarantine,
    RecordView,
    put_clean_end,
    put_failover,
    put_node,
    put_partition,
    put_quarantine,
)
from vbucket.store.runs import CUTS, STRIPPED, RunBatch, cut_run_of_block, run_of_block

if TYPE_CHECKING:
    from vbucket.native.loops import KeyTree

_VB_PREFIXES: Final = tuple(vb_id.to_bytes(2, "big") for vb_id in range(NUM_VBUCKETS))
"""Made once; a store with fewer partitions uses the first of them."""
_NO_PREFIX: Final = bytes(PREFIX_BYTES)
_NO_END: Final = (1 << 64) - 1
_MUTATION: Final = int(Opcode.DCP_MUTATION)


Accepts = Callable[[bytes], bool]
"""Whether a filter accepts a change of this stored key."""

REFUSED_BYTES_MAX: Final = 1 << 20
"""How many refused bytes one call reads for a filter: some milliseconds."""


class FrameBatch(NamedTuple):
    """Frames of a backfill. Continue at `next_seqno`; it is end_seqno + 1 when nothing is left."""

    frames: list[bytes]
    next_seqno: int
    wire_bytes: int
    refused_bytes: int = 0
    """Bytes of frames that the filter refused: work without a result."""


class StoreView(RecordView):
    """Reads over one state: a snapshot, or the merge's transaction."""

    def meta(self, vb_id: int, key: bytes) -> StoredMeta | None:
        """Return a key's newest version (perhaps a deletion), None if there is none."""
        full_key = _VB_PREFIXES[vb_id] + key
        value = self._reader.get(BY_KEY_TABLE, full_key)
        if value is None:
            self.check_absent(vb_id, key)
            return None
        return checked_meta(full_key, bytes(value))

    def meta_fields(self, vb_id: int, key: bytes) -> MetaFields | None:
        """Return `meta` as a plain tuple with the checksum at its end, for the hot path of writes.

        None is not reliable, because a damaged tree may lead past a record: `check_absent` tells.
        """
        full_key = _VB_PREFIXES[vb_id] + key
        value = self._reader.get(BY_KEY_TABLE, full_key)
        return None if value is None else checked_fields(full_key, bytes(value))

    def check_absent(self, vb_id: int, key: bytes) -> None:
        """Raise StoreDamagedError if a key that was not found may exist.

        The look-up is correct if the pages that it read and the records around its end are sound.
        """
        for full_key, value in self._reader.neighbours(BY_KEY_TABLE, _VB_PREFIXES[vb_id] + key):
            checked_fields(full_key, bytes(value))

    def documents_among(self, vb_id: int, keys: Sequence[bytes]) -> set[bytes]:
        """Return the keys whose newest version is a document; fast if the keys ascend."""
        rows = self.rows_of(vb_id, keys)
        return {key[2:] for key, record in rows if record[0] == _MUTATION}

    def entry_of_key(self, vb_id: int, key: bytes, fields: MetaFields) -> bytes | None:
        """Return the entry of `meta_fields`, with zeros in place of its prefix.

        It does not open the block: the frame's checksum, key, seqno and CAS identify it. If they do
        not match, `entry` finds out what is damaged.
        """
        seqno = fields[3]
        found = self._reader.last_at_or_before(BY_SEQNO_TABLE, block_key(vb_id, seqno))
        frame = None if found is None else find_frame(*found, seqno, key, cas=fields[2])
        return self.entry(vb_id, seqno) if frame is None else _NO_PREFIX + frame

    def entry(self, vb_id: int, seqno: int) -> bytes | None:
        """Return the entry with this seqno, prefix included, None if there is none."""
        found = self._reader.last_at_or_before(BY_SEQNO_TABLE, block_key(vb_id, seqno))
        if found is not None:
            block = Block(*found)
            if block.vb_id == vb_id and block.last_seqno >= seqno:
                return block.entry(seqno)
        blocks = list(self._blocks(vb_id, seqno, seqno))  # raises when one is missing there
        if blocks:
            raise BlockDamagedError(
                f"partition {vb_id}: the block of seqno {seqno} is there, but a look-up does not "
                "find it; "
                "check the disk and restore a backup"
            )
        return None

    def entries(self, vb_id: int, start_seqno: int, end_seqno: int, bytes_max: int) -> list[bytes]:
        """Return the versions in [start, end], prefix included, until they exceed `bytes_max`.

        Raises StoreDamagedError.
        """
        found: list[bytes] = []
        size = 0
        for block in self._blocks(vb_id, start_seqno, end_seqno):
            low = bisect_left(block.seqnos, start_seqno)
            high = bisect_right(block.seqnos, end_seqno)
            for entry in block.entries(high)[low:]:
                found.append(entry)
                size += len(entry)
                if size >= bytes_max:
                    return found
        return found

    def frames(
        self,
        vb_id: int,
        start_seqno: int,
        end_seqno: int,
        opaque: bytes,
        skip: Container[int],
        bytes_max: int,
        accepts: Accepts | None = None,
    ) -> FrameBatch:
        """Return frames of the versions in [start, end] that are not in `skip`, in order.

        It stops as soon as `bytes_max` is reached, with at least one frame if there is one. Every
        frame gets the `opaque` (4 bytes). With `accepts`, it returns only frames whose key that
        accepts, and also stops after REFUSED_BYTES_MAX, perhaps with none. Raises
        StoreDamagedError.
        """
        frames: list[bytes] = []
        size = refused = 0
        for block in self._blocks(vb_id, start_seqno, end_seqno):
            body = block.checked_body()
            seqnos, ends = block.seqnos, block.ends
            low = bisect_left(seqnos, start_seqno)
            high = bisect_right(seqnos, end_seqno)
            while low < high:
                start = ends[low - 1] if low else 0
                # As many as fit if none is skipped; at least one.
                stop = bisect_left(ends, start + bytes_max - size, low, high - 1) + 1
                found = [
                    body[at : at + 12] + opaque + body[at + 16 : end]
                    for seqno, (at, end) in zip(
                        seqnos[low:stop], pairwise((start, *ends[low:stop])), strict=True
                    )
                    if seqno not in skip
                ]
                if accepts is not None:
                    there = sum(map(len, found))
                    found = [frame for frame in found if accepts(key_in_frame(frame))]
                    refused += there - sum(map(len, found))
                size += sum(map(len, found))
                frames += found
                low = stop
                if size >= bytes_max or refused >= REFUSED_BYTES_MAX:
                    next_seqno = seqnos[stop - 1] + 1
                    return FrameBatch(frames, min(next_seqno, end_seqno + 1), size, refused)
        return FrameBatch(frames, end_seqno + 1, size, refused)

    def runs(
        self,
        vb_id: int,
        start_seqno: int,
        end_seqno: int,
        opaque: int,
        skip: Collection[int],
        bytes_max: int,
        plain: int,
    ) -> RunBatch | None:
        """Return the frames of `frames`, joined, up to the first block that is not `plain`; None if
        the first block is not. Raises StoreDamagedError.
        """
        pieces: list[bytes | bytearray] = []
        size = last_seqno = 0
        for block in self._blocks(vb_id, start_seqno, end_seqno):
            seqnos, ends = block.seqnos, block.ends
            low = bisect_left(seqnos, start_seqno)
            high = bisect_right(seqnos, end_seqno)
            cuts = plain & CUTS
            if block.kinds & WITHOUT_XATTRS:
                cuts &= ~STRIPPED
            if plain & ~(block.kinds | CUTS) and low < high:
                return RunBatch(pieces, seqnos[low], size, last_seqno) if pieces else None
            while low < high:
                start = ends[low - 1] if low else 0
                stop = bisect_left(ends, start + bytes_max - size, low, high - 1) + 1
                if cuts:
                    run = cut_run_of_block(block, low, stop, opaque, skip, cuts)
                else:
                    run = run_of_block(block, low, stop, opaque, skip)
                size += sum(map(len, run))
                pieces += run
                last_seqno = seqnos[stop - 1]
                low = stop
                if size >= bytes_max:
                    return RunBatch(pieces, min(last_seqno, end_seqno) + 1, size, last_seqno)
        return RunBatch(pieces, end_seqno + 1, size, last_seqno)

    def backward(self, vb_id: int, seqno: int) -> Iterator[tuple[int, bytes]]:
        """Yield (seqno, key) of the versions at or below `seqno`, newest first."""
        while found := last_row(self._reader, vb_id, seqno):
            block = Block(*found)
            for entry in reversed(block.entries()):
                if seqno_of(entry) <= seqno:
                    yield seqno_of(entry), key_of(entry)
            seqno = block.first_seqno - 1
            if seqno <= 0:
                return

    def first_changes_after(self, vb_id: int, seqno: int, until_seqno: int) -> dict[bytes, int]:
        """Return, for every key that changed in (seqno, until_seqno], the seqno of its newest
        version <= `seqno`, or 0 if it had none.
        """
        changes: dict[bytes, int] = {}
        for block in self._blocks(vb_id, seqno + 1, until_seqno):
            low = bisect_left(block.seqnos, seqno + 1)
            high = bisect_right(block.seqnos, until_seqno)
            for entry, prev_seqno in zip(
                block.entries(high)[low:], block.prev_seqnos[low:high], strict=True
            ):
                if prev_seqno <= seqno:
                    changes[key_of(entry)] = prev_seqno
        return changes

    def keys(self, vb_id: int, after: bytes, limit: int) -> list[bytes]:
        """Return up to `limit` keys > `after` of a partition, ascending, deleted keys included."""
        found: list[bytes] = []
        prefix = vb_id.to_bytes(2, "big")
        stop = (vb_id + 1).to_bytes(2, "big")
        for key, value in self._reader.range(BY_KEY_TABLE, prefix + after + b"\x00", stop):
            if len(found) == limit:
                break
            checked_meta(key, bytes(value))
            found.append(key[2:])
        return found

    def hashes(self, vb_id: int, record: PartitionRecord) -> Tables | None:
        """Return the hashes of a partition's documents, None if there are none for this record."""
        return stored_hashes(self._reader, vb_id, record)

    def rows(self, vb_id: int, first: bytes, prefix: bytes) -> list[Row]:
        """Return up to ROWS_AT_ONCE records of the keys from `first` on that have a prefix."""
        rows = next(rows_at_once(self._reader, vb_id, first), [])
        while rows and not rows[-1][0].startswith(prefix, 2):
            rows.pop()
        return rows

    def rows_of(self, vb_id: int, keys: Sequence[bytes]) -> list[Row]:
        """Return the records of those keys that exist; fast if the keys ascend."""
        prefix = _VB_PREFIXES[vb_id]
        rows = list(self._reader.get_many(BY_KEY_TABLE, [prefix + key for key in keys]))
        check_records(dict(rows))
        if len(rows) < len(keys):
            found = {key for key, _ in rows}
            for key in keys:
                if prefix + key not in found:
                    self.check_absent(vb_id, key)
        return rows

    def due_rows(self, after: bytes, now_s: int) -> Iterator[tuple[bytes, Buffer]]:
        """Yield the rows of the expiry table > `after` that are due at `now_s`, the oldest first;
        `vbucket.store.due.read_due` reads one.
        """
        return self._reader.range(EXPIRY_TABLE, after + b"\x00", rows_end(now_s))

    def metas(self, vb_id: int, head: bytes = b"") -> Iterator[tuple[bytes, StoredMeta]]:
        """Yield (key, newest version) of the keys that begin with `head`, deleted keys included.

        Nothing may be written during the iteration. `head` must not end with the byte 0xff.
        """
        prefix = vb_id.to_bytes(2, "big") + head
        stop = (int.from_bytes(prefix, "big") + 1).to_bytes(len(prefix), "big")
        for key, value in self._reader.range(BY_KEY_TABLE, prefix, stop):
            yield key[2:], checked_meta(key, bytes(value))

    def count(self, vb_id: int, start_seqno: int, end_seqno: int) -> int:
        """Return how many versions are in [start, end]."""
        return sum(
            bisect_right(block.seqnos, end_seqno) - bisect_left(block.seqnos, start_seqno)
            for block in self._blocks(vb_id, start_seqno, end_seqno)
        )

    def block_at(self, vb_id: int, seqno: int) -> Block | None:
        """Return the last block that begins at or below `seqno`, None if there is none."""
        found = last_row(self._reader, vb_id, seqno)
        return None if found is None else Block(*found)

    def last_block(self, vb_id: int) -> Block | None:
        """Return the last block of a partition."""
        found = last_row(self._reader, vb_id)
        return None if found is None else Block(*found)

    def _blocks(self, vb_id: int, start_seqno: int, end_seqno: int) -> Iterator[Block]:
        """Yield the blocks that reach into [start, end]. Raises if one is missing there."""
        first_key, last_seqno = self._before(vb_id, start_seqno, end_seqno)
        for key, value in self._reader.range(BY_SEQNO_TABLE, first_key, _after(vb_id, end_seqno)):
            block = Block(key, value)
            if last_seqno is not None and block.seqno_before != last_seqno:
                raise missing_blocks(vb_id, last_seqno, block.seqno_before)
            last_seqno = block.last_seqno
            if last_seqno >= start_seqno:
                yield block
        last_seqno = last_seqno or 0
        if last_seqno >= end_seqno:
            return
        stop = (vb_id + 1).to_bytes(2, "big")
        following = next(self._reader.range(BY_SEQNO_TABLE, _after(vb_id, end_seqno), stop), None)
        if following is not None:
            seqno_before = Block(*following).seqno_before
        else:
            record = self.partition(vb_id)
            seqno_before = record.last_seqno if record else 0
        if seqno_before != last_seqno:
            raise missing_blocks(vb_id, last_seqno, seqno_before)

    def _before(self, vb_id: int, start_seqno: int, end_seqno: int) -> tuple[bytes, int | None]:
        """Return the key of the first block to read, and the last seqno before it, if known."""
        first_key = block_key(vb_id, start_seqno)
        try:
            found = self._reader.last_at_or_before(BY_SEQNO_TABLE, first_key)
        except StoreDamagedError:
            # If the next block continues one that ends below `start`, the damaged page has nothing
            # that is wanted.
            stop = _after(vb_id, end_seqno)
            following = next(self._reader.range(BY_SEQNO_TABLE, first_key, stop), None)
            if following is None or Block(*following).seqno_before >= start_seqno:
                raise
            return following[0], None
        if found is None or int.from_bytes(found[0][:2], "big") != vb_id:
            return block_key(vb_id, 0), 0
        return found[0], None


def last_row(reader: KvReader, vb_id: int, seqno: int = _NO_END) -> tuple[bytes, Buffer] | None:
    """Return the row of the last block of a partition that begins at or below `seqno`; None: it has
    none. What is damaged in the partition before it does not matter. Raises StoreDamagedError.
    """
    key, prefix = block_key(vb_id, seqno), _VB_PREFIXES[vb_id]
    try:
        found = reader.last_at_or_before(BY_SEQNO_TABLE, key)
    except StoreDamagedError:
        if next(reader.range(BY_SEQNO_TABLE, prefix, key + b"\0"), None) is None:
            return None
        raise
    return found if found is not None and found[0][:2] == prefix else None


class Store(StoreView):
    """The store as the engine sees it: a snapshot of a KvEnv that `refresh` renews.

    Raises UnknownFormatError if it has another format or was written with another database.
    """

    def __init__(self, env: KvEnv) -> None:
        self._env = env
        self._snapshot = env.snapshot()
        self._walks = OpenedBlocks()
        super().__init__(self._snapshot)
        node = self.node()
        if node is not None and node.engine_version != env.engine:
            raise UnknownFormatError(
                f"the store was written with {node.engine_version}, this program has {env.engine}; "
                "move the data with a backup"
            )

    @classmethod
    def create(
        cls, env: KvEnv, node: NodeRecord, partitions: Mapping[int, PartitionRecord]
    ) -> Store:
        """Write the first records of an empty store, in one transaction, and open it."""

        def create() -> None:
            with env.write() as write:
                assert StoreView(write).node() is None, "a store is created once"
                put_node(write, node)
                for vb_id, record in partitions.items():
                    put_partition(write, vb_id, record)

        with_room(env, create)
        return cls(env)

    def refresh(self) -> None:
        """Move to the newest committed state."""
        self._walks.clear()
        self._snapshot.refresh()

    def key_tree(self) -> KeyTree | None:
        """Return what looks up records of `by_key` in C, until the next `refresh`; None: there is
        no such thing here. A key that it does not find may exist, as with `meta_fields`.
        """
        return self._snapshot.tree(BY_KEY_TABLE)

    def rows_within(
        self, vb_id: int, first: bytes, form: RowForm, bits: int, wanted: bytes
    ) -> tuple[list[Row], bytes | None]:
        """Return the documents of some buckets (`rows_of_buckets`) among records of the keys from
        `first` on, and the key to go on from; None instead of it: there are no more records.

        The loop in C reads SCANNED_RECORDS. Python reads fewer, and names what is damaged.
        """
        tree, prefix = self.key_tree(), _VB_PREFIXES[vb_id]
        if tree is not None:
            found = tree.within(
                prefix + first, prefix + form.stop, SCANNED_RECORDS, wanted, bits, *form
            )
            if found is not None:
                rows, go_on = found
                return rows, go_on and go_on[2:]
        rows = self.rows(vb_id, first, form.prefix)
        go_on = rows[-1][0][2:] + b"\0" if len(rows) == ROWS_AT_ONCE else None
        return rows_of_buckets(rows, form, bits, wanted), go_on

    def rows_of(self, vb_id: int, keys: Sequence[bytes]) -> list[Row]:
        """See StoreView. The loop in C finds records, and proves that most other keys have none."""
        tree = self.key_tree()
        if tree is None:
            return super().rows_of(vb_id, keys)
        rows, unproven = tree.rows_of(_VB_PREFIXES[vb_id], list(keys))
        return sorted(rows + super().rows_of(vb_id, unproven)) if unproven else rows

    def read_trees(self) -> tuple[KeyTree, KeyTree] | None:
        """Return what looks up documents in C: `key_tree`, and the same for `by_seqno`."""
        keys, blocks = self._snapshot.tree(BY_KEY_TABLE), self._snapshot.tree(BY_SEQNO_TABLE)
        return None if keys is None or blocks is None else (keys, blocks)

    def keys_without_document(self, vb_id: int, keys: list[bytes]) -> list[bytes]:
        """Return the keys whose newest version is no document; fast if the keys ascend.

        The loop in C finds documents. Python looks up the rest, and names what is damaged.
        """
        tree = self.key_tree()
        unproven = keys if tree is None else tree.unproven(_VB_PREFIXES[vb_id], keys)
        if not unproven:
            return []
        documents = self.documents_among(vb_id, unproven)
        return [key for key in unproven if key not in documents]

    def close(self) -> None:
        """Close the snapshot; the environment stays open."""
        self._walks.clear()
        self._snapshot.close()

    def superseded(self, vb_id: int, start_seqno: int, end_seqno: int) -> set[int]:
        """Return the seqnos in [start, end] whose key has a newer version in [start, end]."""
        old: set[int] = set()
        found = super()._blocks(vb_id, start_seqno, end_seqno)
        for block in self._walks.keep(vb_id, start_seqno, end_seqno, found):
            prev_seqnos = block.prev_seqnos
            if max(prev_seqnos) >= start_seqno:
                low = bisect_left(block.seqnos, start_seqno)
                old.update(prev_seqnos[low : bisect_right(block.seqnos, end_seqno)])
        return {prev for prev in old if prev >= start_seqno}

    def _blocks(self, vb_id: int, start_seqno: int, end_seqno: int) -> Iterator[Block]:
        kept = self._walks.blocks(vb_id, start_seqno, end_seqno)
        return super()._blocks(vb_id, start_seqno, end_seqno) if kept is None else kept

    def begin(self, node: NodeRecord) -> None:
        """Replace the node's record at a start, and remove the clean end."""

        def put(write: KvWrite) -> None:
            put_node(write, node)
            put_clean_end(write, None)

        self._write(put)

    def end(self, clean_end: CleanEnd) -> None:
        """Set the clean mark at a clean stop, and say where the log ends.

        The record is read in the transaction that replaces it. Where the store process was killed
        as it committed a merge, LMDB shows that merge to the next writer and not to readers before;
        a record from a reader would take back which segments are merged.
        """

        def put(write: KvWrite) -> None:
            node = StoreView(write).node()
            assert node is not None, "a store that was started has a node"
            put_node(write, node._replace(clean_shutdown=True))
            put_clean_end(write, clean_end)

        self._write(put)

    def set_part_merged(self, part_merged: PartMerged) -> None:
        """Replace what is known of a merge that has not come to its end."""

        def put(write: KvWrite) -> None:
            node = StoreView(write).node()
            assert node is not None, "the store was created"
            put_node(write, node._replace(part_merged=list(part_merged)))

        self._write(put)

    def set_quarantine(self, items: Quarantine) -> None:
        """Replace the quarantine."""
        self._write(lambda write: put_quarantine(write, items))

    def set_failovers(self, logs: Mapping[int, list[list[int]]]) -> None:
        """Replace failover logs. The leader epochs are at least those of the newest entries."""

        def put(write: KvWrite) -> None:
            for vb_id, log in logs.items():
                put_failover(write, vb_id, log)

        self._write(put)

    def _write(self, put: Callable[[KvWrite], None]) -> None:
        """Write in one transaction. The snapshot is closed for that, because the map may grow."""

        def work() -> None:
            with self._env.write() as write:
                put(write)

        self.close()
        try:
            with_room(self._env, work)
        finally:
            self._snapshot.refresh()


def _after(vb_id: int, end_seqno: int) -> bytes:
    """Return the first key that is above every block which begins at or below `end_seqno`."""
    return block_key(vb_id, end_seqno) + b"\x00"


def missing_blocks(vb_id: int, last_seqno: int, seqno_before: int) -> BlockDamagedError:
    """Return the error that names a hole in the chain of blocks."""
    return BlockDamagedError(
        f"partition {vb_id}: after seqno {last_seqno} the versions up to {seqno_before} are "
        "missing in "
        "the store; check the disk and restore a backup"
    )
