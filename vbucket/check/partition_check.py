"""Checks one partition of a store off line: blocks, keys, and each against the other. Pure.

Who calls it: `vbucket.check.store_check`. A partition is sound if

- its blocks are undamaged, chained without a gap, and end with the record's `last_seqno`;
- every version names the previous one of its key, as far back as history is kept;
- the leader epochs of versions fit the failover log (`EpochBounds`);
- by_key has exactly the newest version of every key, and a look-up finds it;
- the record's counts match the data.

Memory is bounded: a partition with many keys is checked in slices, by the checksum of the key, and
its data is read once per slice. Damage is reported once: keys are not compared with versions in an
unreadable block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from struct import Struct
from struct import error as StructError  # noqa: N812 - the struct module names its error in lower case
from typing import Final

import google_crc32c

from dcp.wire.opcode import Opcode
from failover.rules.history import FailoverLog
from vbucket.check.finding import Finding, Kind
from vbucket.model.collection_counts import CollectionCounts
from vbucket.model.entry import OPCODE_AT, PREFIX_BYTES, key_in_frame
from vbucket.model.ids import SEQNO_MAX
from vbucket.model.manifest import DEFAULT_COLLECTION, SYSTEM_COLLECTION, Manifest, collection_of
from vbucket.store.block import Block, BlockDamagedError, block_key
from vbucket.store.due import due_item
from vbucket.store.environment import KvReader, StoreDamagedError
from vbucket.store.hashes import counted_hashes, read_hashes
from vbucket.store.key_record import BY_KEY_RECORD, RecordDamagedError, by_key_item, checked_meta
from vbucket.store.records import (
    BY_KEY_TABLE,
    BY_SEQNO_TABLE,
    EXPIRY_TABLE,
    Mended,
    PartitionRecord,
)


class EpochBounds:
    """Which leader epochs the versions of documents in a partition can have.

    `problem_of` takes blocks in the order of their seqnos. The leader epoch of a change is that of
    the master that made it, so in the living history of a partition
    - epochs never fall with rising seqnos;
    - what lies above the seqno at which a partition version began has at least the epoch in which
      that version began. It may have a higher one, because a handover begins an epoch and no
      version;
    - what lies at or below that seqno has at most that epoch;
    - no epoch is above the partition's leader epoch.
    """

    def __init__(self, log: FailoverLog, leader_epoch: int, living_seqno: int) -> None:
        """`living_seqno`: the failover log may be newer than the store. Then it says nothing about
        versions above this seqno, which a rollback undid and the next merge removes.
        """
        oldest_first = log.entries[::-1]
        self._seqnos = [version.seqno for version in oldest_first]
        self._epochs = [version.epoch for version in oldest_first]
        self._leader_epoch = leader_epoch
        self._living_seqno = living_seqno
        self._last_epoch = 0

    def problem_of(self, first_seqno: int, last_seqno: int, epoch: int) -> str:
        """Return what is wrong with versions of one epoch, "" if nothing is."""
        before, self._last_epoch = self._last_epoch, max(epoch, self._last_epoch)
        where = f"seqnos {first_seqno} to {last_seqno} are of leader epoch {epoch}"
        if epoch > self._leader_epoch:
            return f"{where}, and the partition is in epoch {self._leader_epoch}"
        if epoch < before:
            return f"{where}, and what lies below is of epoch {before}"
        if first_seqno > self._living_seqno:
            return ""
        last_seqno = min(last_seqno, self._living_seqno)
        newest_below = bisect_left(self._seqnos, last_seqno) - 1
        if newest_below >= 0 and epoch < self._epochs[newest_below]:
            began = f"seqno {self._seqnos[newest_below]} in epoch {self._epochs[newest_below]}"
            return f"{where}, and their version began at {began}"
        oldest_above = bisect_left(self._seqnos, first_seqno)
        if oldest_above < len(self._seqnos) and epoch > self._epochs[oldest_above]:
            began = f"seqno {self._seqnos[oldest_above]} in epoch {self._epochs[oldest_above]}"
            return f"{where}, and a later version began at {began}"
        return ""


SLICE_KEYS: Final = 250_000
"""Keys per slice; each takes about 250 bytes of memory."""
SLICE_OVERRUN: Final = 4
"""If a slice grows beyond this many times its size, by_key has lost most of its keys."""
FINDINGS_MAX: Final = 10
"""How many findings of one kind per partition are reported one by one; the rest is counted."""

_MUTATION: Final = int(Opcode.DCP_MUTATION)
_SYSTEM_EVENT: Final = int(Opcode.DCP_SYSTEM_EVENT)
_HEAD_BYTES: Final = 48
"""Of a frame: all that a by_key record is made of."""
_FRAME: Final = Struct(">BBHBxHI4xQQ").unpack_from
"""magic, opcode, key length, extras length, vbucket, body length, CAS, seqno."""
_DEFAULT: Final = bytes([DEFAULT_COLLECTION])
_SEQNO: Final = Struct(">24xQ").unpack_from
_EXPIRY: Final = slice(30, 34)
"""Of a by_key record."""
_NEVER: Final = bytes(4)
_CAS: Final = slice(2, 10)
"""Of a by_key record."""
_NO_PREFIX: Final = bytes(PREFIX_BYTES)
_crc32c = google_crc32c.value


class PartitionCheck:
    """One check of a partition. `steps` does the work; the counts are valid after it."""

    def __init__(
        self,
        reader: KvReader,
        vb_id: int,
        record: PartitionRecord,
        manifest: Manifest,
        *,
        slice_keys: int = SLICE_KEYS,
        cas_max: int = SEQNO_MAX,
        living_seqno: int = SEQNO_MAX,
    ) -> None:
        """`living_seqno`: see `EpochBounds`."""
        self._reader = reader
        self._vb_id = vb_id
        self._record = record
        self._manifest = manifest
        self._slice_keys = slice_keys
        self._where = f"partition {vb_id}"
        self._epochs = EpochBounds(
            FailoverLog.from_document(record.failover), record.epoch, living_seqno
        )
        self._prefix = vb_id.to_bytes(2, "big")
        self._stop = (vb_id + 1).to_bytes(2, "big")
        self._unknown: list[tuple[int, int]] = []
        """Seqnos (first, last) of blocks that cannot be read."""
        self._unkept_seqno = max(record.history_floor, record.purge_seqno)
        """Versions up to this seqno may be missing legitimately."""
        self._told: Counter[Kind] = Counter()
        self._live: Counter[int] = Counter()
        """Collection id -> documents."""
        self._max_cas = 0
        self._mended = Mended(*record.mended) if record.mended else Mended(0, 0, 0)
        self._cas_max = cas_max
        self._cas_limit = cas_max.to_bytes(8, "big")
        self._keys_ahead = 0
        """Keys whose newest version has a CAS that is too far ahead."""
        self._other_high_seqno = 0
        self._collection_seqnos: dict[int, int] = {}
        self._defaults_in_run = 0
        self.expiring = 0
        """Documents that have an expiry."""
        self.keys = 0
        self.versions = 0
        self.size_bytes = 0

    def steps(self) -> Iterator[Finding | None]:
        """Yield what is wrong, and None from time to time: `keys` and `size_bytes` have grown."""
        for finding in self._all():
            if finding is None:
                yield None
                continue
            self._told[finding.kind] += 1
            if self._told[finding.kind] <= FINDINGS_MAX:
                yield finding
        for kind, count in self._told.items():
            if count > FINDINGS_MAX:
                yield Finding(kind, self._where, f"{count - FINDINGS_MAX} more of this kind")

    def _all(self) -> Iterator[Finding | None]:
        try:
            slices = self._count_slices()
            for number in range(slices):
                newest: dict[bytes, bytes] = {}
                yield from self._blocks(newest, number, slices)
                yield from self._keys(newest, number, slices)
        except StoreDamagedError as error:
            yield Finding(Kind.PAGES, self._where, str(error))
            return
        if self._record.max_cas > self._cas_max or self._keys_ahead:
            yield self._found(
                Kind.CAS,
                f"{self._keys_ahead} keys have a CAS that is too far ahead of the clock; the "
                f"highest of the partition is {self._record.max_cas}",
            )
        if not self._unknown and not self._told.keys() & {Kind.KEY_RECORD, Kind.KEY_LOST, Kind.GAP}:
            yield from self._counts()
            yield from self._hashes()

    def _count_slices(self) -> int:
        if self._record.last_seqno <= self._slice_keys:
            return 1
        keys = sum(1 for _ in self._reader.range(BY_KEY_TABLE, self._prefix, self._stop))
        return 1 + keys // self._slice_keys

    # -- blocks --------------------------------------------------------------------------------

    def _blocks(self, newest: dict[bytes, bytes], number: int, slices: int) -> Iterator[Finding]:
        """Read every version; put the head of each key's newest one into `newest`.

        Findings about blocks are reported with the first slice only.
        """
        is_first = number == 0
        last_seqno = 0
        is_known = True
        stop = block_key(self._vb_id + 1, 0)
        for key, value in self._reader.range(BY_SEQNO_TABLE, block_key(self._vb_id, 0), stop):
            try:
                block = Block(key, value)
            except (BlockDamagedError, StructError) as error:
                # The next block tells how far this one reached.
                self._unknown.append((last_seqno + 1, self._record.last_seqno))
                is_known = False
                if is_first:
                    yield self._found(Kind.BLOCK, str(error))
                continue
            if not is_known:
                self._unknown[-1] = (self._unknown[-1][0], block.seqno_before)
            elif block.seqno_before != last_seqno:
                self._unknown.append((last_seqno + 1, block.seqno_before))
                if is_first:
                    yield self._gap(last_seqno, block.seqno_before)
            is_known, last_seqno = True, block.last_seqno
            if is_first:
                self.size_bytes += len(value)
                yield from self._look_up_block(key, block)
            yield from self._versions(block, newest, number, slices)
            if len(newest) > SLICE_OVERRUN * self._slice_keys:
                what = f"by_key lacks more than {len(newest) - self._slice_keys} keys"
                yield self._found(Kind.KEY_LOST, what)
                newest.clear()
                self._unknown.append((0, self._record.last_seqno))
        if is_first and is_known and last_seqno != self._record.last_seqno:
            self._unknown.append((last_seqno + 1, self._record.last_seqno))
            yield self._gap(last_seqno, self._record.last_seqno)

    def _look_up_block(self, key: bytes, block: Block) -> Iterator[Finding]:
        """The tree must lead to a block from its first seqno and from its last."""
        by_last = self._reader.last_at_or_before(
            BY_SEQNO_TABLE, block_key(self._vb_id, block.last_seqno)
        )
        if self._reader.get(BY_SEQNO_TABLE, key) is None or by_last is None or by_last[0] != key:
            what = f"the block of seqnos {block.first_seqno} to {block.last_seqno} is not found"
            yield self._found(Kind.PAGES, f"{what} by its seqnos: the tree above it is damaged")

    def _versions(
        self, block: Block, newest: dict[bytes, bytes], number: int, slices: int
    ) -> Iterator[Finding]:
        try:
            body = block.checked_body()
        except BlockDamagedError as error:
            if number == 0:
                yield self._found(Kind.BLOCK, str(error))
            self._unknown.append((block.first_seqno, block.last_seqno))
            return
        floor = self._record.history_floor
        start = 0
        if number == 0:
            span = block.first_seqno, block.last_seqno
            if problem := self._epochs.problem_of(*span, block.epoch):
                yield self._found(Kind.HISTORY, problem)
        for seqno, end, crc, prev_seqno in zip(
            block.seqnos, block.ends, block.frame_crcs, block.prev_seqnos, strict=True
        ):
            frame = body[start:end]
            start = end
            key = key_in_frame(frame)
            if number == 0 and (problem := self._problem_of(seqno, frame, key, crc)):
                yield self._found(Kind.BLOCK, f"the frame of seqno {seqno} {problem}")
            if slices > 1 and _crc32c(key) % slices != number:
                continue
            before = newest.get(key)
            newest[key] = frame[:_HEAD_BYTES]
            last = _SEQNO(before)[0] if before else 0
            # At or below the floor, older versions may be missing legitimately.
            if prev_seqno != last and seqno > floor:
                if self._may_be_gone(frame, key, prev_seqno, last):
                    continue
                what = f"key {key!r}: seqno {seqno} follows {prev_seqno}, and {last} is the one"
                yield self._found(Kind.HISTORY, f"{what} before it")

    def _may_be_gone(self, frame: bytes, key: bytes, prev_seqno: int, last: int) -> bool:
        """Whether the previous version of `frame`'s may be missing."""
        if frame[1] == _SYSTEM_EVENT or self._is_unknown(max(prev_seqno, last)):
            return True
        is_purged = prev_seqno <= self._record.purge_seqno or self._is_unreachable(key)
        return last == 0 and is_purged

    def _is_unreachable(self, key: bytes) -> bool:
        """Whether the collection of a key was dropped, so that compaction may remove all of it."""
        return key[0] != SYSTEM_COLLECTION and self._manifest.is_gone(collection_of(key))

    def _problem_of(self, seqno: int, frame: bytes, key: bytes, crc: int) -> str:
        """Count one version, and say what is wrong with it by itself; "" if nothing is."""
        self.versions += 1
        if key[:1] != _DEFAULT or self._record.tally:
            self._note(key, seqno)
        if _crc32c(frame) != crc:
            return "does not match its own checksum"
        magic, opcode, key_bytes, extras_bytes, vb_id, body_bytes, cas, found = _FRAME(frame)
        is_whole = magic == 0x80 and len(frame) == 24 + body_bytes
        if not (is_whole and key_bytes and extras_bytes + key_bytes <= body_bytes):
            return "is no whole frame"
        if (vb_id, found) != (self._vb_id, seqno):
            return f"says that it is partition {vb_id}, seqno {found}"
        if cas > self._max_cas and opcode != _SYSTEM_EVENT:
            is_mended = seqno <= self._mended.seqno and cas > self._mended.cas
            self._max_cas = self._max_cas if is_mended else cas
        return ""

    def _note(self, key: bytes, seqno: int) -> None:
        """What the tally of the record must agree with."""
        if key[0] == DEFAULT_COLLECTION:
            tally = self._record.tally
            if tally and tally[1] < seqno <= tally[0]:
                self._defaults_in_run += 1
        else:
            self._other_high_seqno = seqno
            self._collection_seqnos[collection_of(key)] = seqno

    # -- keys ----------------------------------------------------------------------------------

    def _keys(
        self, newest: dict[bytes, bytes], number: int, slices: int
    ) -> Iterator[Finding | None]:
        """Compare by_key with the newest versions; empties `newest`."""
        reader, prefix, live = self._reader, self._prefix, self._live
        for full_key, buffer in reader.range(BY_KEY_TABLE, prefix, self._stop):
            key = full_key[2:]
            if slices > 1 and _crc32c(key) % slices != number:
                continue
            value = bytes(buffer)
            self.keys += 1
            self.size_bytes += len(full_key) + len(value)
            if not self.keys & 0xFFFF:
                yield None
            head = newest.pop(key, None)
            if reader.get(BY_KEY_TABLE, full_key) != value:
                what = f"key {key!r} stands in by_key, but a look-up does not find it"
                yield self._found(Kind.KEY_LOST, what)
            self._keys_ahead += value[_CAS] > self._cas_limit
            if value[_EXPIRY] != _NEVER and (problem := self._lacks_row(full_key, value)):
                yield self._found(Kind.EXPIRY, f"key {key!r}: {problem}")
            if head is not None and by_key_item(prefix, key, _NO_PREFIX + head)[1] == value:
                if head[1] == _MUTATION:
                    live[collection_of(key)] += 1
                continue
            try:
                meta = checked_meta(full_key, value)
            except RecordDamagedError:
                yield self._found(Kind.KEY_RECORD, f"key {key!r}: does not match its checksum")
                continue
            if meta.opcode == _MUTATION:
                live[collection_of(key)] += 1
            if not self._is_unknown(meta.seqno):
                newest_is = (
                    f"the newest version is seqno {_SEQNO(head)[0]}"
                    if head
                    else "it is in no block"
                )
                what = f"key {key!r}: by_key has seqno {meta.seqno}, CAS {meta.cas}; {newest_is}"
                yield self._found(Kind.KEY_STALE, what)
        for key, head in newest.items():
            if self._is_purged(head) or self._is_unreachable(key):
                continue
            what = f"key {key!r} is not in by_key, its newest version is seqno {_SEQNO(head)[0]}"
            yield self._found(Kind.KEY_LOST, what)
        newest.clear()

    def _lacks_row(self, full_key: bytes, value: bytes) -> str:
        """Count a document that has an expiry, and say what is wrong with its row."""
        self.expiring += 1
        row, crc = due_item(int.from_bytes(value[_EXPIRY], "big"), full_key)
        if self._reader.get(EXPIRY_TABLE, row) == crc:
            return ""
        return "the expiry table has no such row for it"

    def _is_purged(self, head: bytes) -> bool:
        """Whether a key may be missing in by_key: its last version is a purged deletion."""
        return head[1] != _MUTATION and _SEQNO(head)[0] <= self._record.purge_seqno

    # -- counts --------------------------------------------------------------------------------

    def _counts(self) -> Iterator[Finding]:
        """Compare the partition's record with the data."""
        record, manifest = self._record, self._manifest
        tally = CollectionCounts(record.tally)
        item_count = record.item_count - tally.forget(manifest)
        live = {cid: count for cid, count in self._live.items() if not manifest.is_gone(cid)}
        if item_count != sum(live.values()):
            yield self._differs("item_count", item_count, sum(live.values()))
        for name, found in (("keys", self.keys), ("versions", self.versions)):
            if getattr(record, name) != found:
                yield self._differs(name, getattr(record, name), found)
        if record.high_seqno < record.last_seqno:
            yield self._differs("high_seqno", record.high_seqno, record.last_seqno)
        if record.max_cas < self._max_cas:
            yield self._differs("max_cas", record.max_cas, self._max_cas)
        for name in ("history_floor", "purge_seqno"):
            if getattr(record, name) > record.high_seqno:
                yield self._differs(name, getattr(record, name), record.high_seqno)
        yield from self._compare(
            "the last seqno of a collection", tally.other_high_seqno, self._other_high_seqno
        )
        if self._defaults_in_run:
            what = f"{self._defaults_in_run} changes of the default collection"
            yield self._found(Kind.COUNT, f"the record counts {what} as those of others")
        counted = manifest.collections.keys() | tally.collections.keys()
        counted |= {cid for cid in self._collection_seqnos if not manifest.is_gone(cid)}
        for cid in counted - {DEFAULT_COLLECTION}:
            seqno, documents = tally.collections.get(cid, (0, 0))
            if documents != live.get(cid, 0):
                yield self._differs(
                    f"documents of collection {cid:#x}", documents, live.get(cid, 0)
                )
            found = self._collection_seqnos.get(cid, 0)
            yield from self._compare(f"the last seqno of collection {cid:#x}", seqno, found)

    def _hashes(self) -> Iterator[Finding]:
        """The hashes of the documents of each collection, if they are as new as the record."""
        reader, vb_id, manifest = self._reader, self._vb_id, self._manifest
        try:
            recorded = read_hashes(reader, vb_id, self._record)
        except StoreDamagedError as error:
            yield self._found(Kind.HASHES, str(error))
            return
        if recorded is not None:
            found = counted_hashes(reader, vb_id)
            for cid in recorded.keys() | found.keys():
                if recorded.get(cid) != found.get(cid) and not manifest.is_gone(cid):
                    what = f"the hashes of collection {cid:#x} are not those of its documents"
                    yield self._found(Kind.COUNT, what)

    def _compare(self, name: str, recorded: int, found: int) -> Iterator[Finding]:
        """Seqnos may differ if the version that they name may be missing legitimately."""
        if recorded != found and max(recorded, found) > self._unkept_seqno:
            yield self._differs(name, recorded, found)

    # -- words ---------------------------------------------------------------------------------

    def _is_unknown(self, seqno: int) -> bool:
        return any(first <= seqno <= last for first, last in self._unknown)

    def _found(self, kind: Kind, what: str) -> Finding:
        return Finding(kind, self._where, what)

    def _differs(self, name: str, recorded: int, found: int) -> Finding:
        return self._found(Kind.COUNT, f"the record says {name} {recorded}, the data {found}")

    def _gap(self, last_seqno: int, seqno_before: int) -> Finding:
        what = f"after seqno {last_seqno} the versions up to {seqno_before} are missing"
        return self._found(Kind.GAP, what)


assert OPCODE_AT == PREFIX_BYTES + 1, "a frame's opcode is its second byte"
assert BY_KEY_RECORD.size == 38, "48 bytes of a frame make a by_key record"
