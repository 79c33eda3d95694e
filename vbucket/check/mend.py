"""Mends the store from what it holds itself, or from versions of another copy, and invents
nothing.

    a page with one flipped bit       its checksum names the bit
    a version with one flipped bit    so does the frame's, and the block's must agree
    a leaf of by_key                  rebuilt from the newest versions in the partition's blocks
    a leaf of by_seqno                rebuilt from its blocks (`vbucket.check.relist`)
    a leaf of records                 rebuilt from the rows that the process keeps in memory
    a branch                          rebuilt from the pages that nothing else leads to
    a block                           from another copy's versions (failover.rules.repair says
                                      which may be taken), byte for byte as its checksums say
    the checksum of a block's page    these versions make up the bytes that are there

Pure but for the pages: `PageMender` writes them. Who calls it: the store process, for what the
scrubber finds, and for what a merge meets.

Invariants
- what is put back is what was written: a second checksum proves each bit, and a rebuilt leaf has
  exactly the keys that the partition's records count;
- a partition whose blocks cannot all be read is not rebuilt from.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Final

import google_crc32c

from dcp.wire.opcode import Opcode
from vbucket.check.relist import RELISTED, Given, Lacking, left_by_compactions, relist
from vbucket.model.entry import OPCODE_AT, PREFIX_BYTES, key_of, prev_seqno_of, seqno_of
from vbucket.model.flipped_bit import unflipped
from vbucket.model.manifest import Manifest, collection_of
from vbucket.store.block import BLOCK_KEY, Block, block_key, build_blocks, may_have_size
from vbucket.store.environment import KeptRows, StoreDamagedError
from vbucket.store.key_record import by_key_items, check_records, checked_meta
from vbucket.store.lmdb.environment_lmdb import ROW_IN_LEAF_MAX
from vbucket.store.lmdb.lmdb_pages import BRANCH, MAIN_TABLE
from vbucket.store.lmdb.page_mend import BadPage, PageMender, ValuePlace
from vbucket.store.records import BY_KEY_TABLE, BY_SEQNO_TABLE, PartitionRecord
from vbucket.store.store import StoreView

RELINKED: Final = "the pages below it were found again, as many as the table counts"
REMEMBERED: Final = "its rows were written as the store process knew them"
BIT: Final = "one flipped bit was put back, as the checksum says"
REBUILT: Final = "the records of its keys were rebuilt from the partition's versions"
FROM_COPY: Final = "versions were taken from another copy, as the checksums say"
SUMMED: Final = "its checksum was written again: it has the versions of another copy"
_WHOLE: Final = 1 << 62
_READ_BYTES: Final = 4 << 20
_MENDS_MAX: Final = 8
"""Pages on the way to one key."""
UNLINKED_MAX: Final = 256
"""Ends of a snapshot that are tried for a block of a copy that was filled anew."""
_MUTATION: Final = int(Opcode.DCP_MUTATION)
_crc32c = google_crc32c.value


def mend(mender: PageMender, table: str, key: bytes, kept: KeptRows | None = None) -> str:
    """Mend what is damaged on the way to a key of a table; return how, "" if it cannot be.

    `kept`: tables whose rows the process that writes knows by heart. Raises OSError.
    """
    how: list[str] = []
    for _ in range(_MENDS_MAX):
        where, bad = table, None
        try:
            bad = mender.bad_page(table, key)
        except StoreDamagedError:  # the list of tables
            where, bad = MAIN_TABLE, mender.bad_page(MAIN_TABLE, table.encode())
        if bad is None:
            break
        if mender.put_bit_back(where, key, bad):
            how.append(BIT)
        elif where == BY_KEY_TABLE and bad.is_leaf and _rebuild(mender, key, bad):
            how.append(REBUILT)
        elif where == BY_SEQNO_TABLE and bad.is_leaf and relist(mender, key, bad, {})[0]:
            how.append(RELISTED)
        elif bad.is_leaf and _remember(mender, where, key, bad, kept or {}):
            how.append(REMEMBERED)
        elif bad.kind == BRANCH and _relink(mender, where, key, bad):
            how.append(RELINKED)
        else:
            return ""
    if table == BY_SEQNO_TABLE and not _mend_body(mender, key, how):
        return ""
    return "; ".join(dict.fromkeys(how))


def _mend_body(mender: PageMender, key: bytes, how: list[str]) -> bool:
    """Mend a version of a block of which one bit is flipped; return whether the block is sound."""
    found = mender.last_at_or_before(BY_SEQNO_TABLE, key)
    if found is None or found[0] != key:
        return True
    try:
        block = Block(key, found[1])
    except StoreDamagedError:
        return False
    body = bytes(block.body)
    if _crc32c(body) == block.body_crc:
        return True
    bad = [
        (start, end, crc)
        for (start, end), crc in zip(
            pairwise((0, *block.ends)), block.frame_crcs, strict=True
        )
        if _crc32c(body[start:end]) != crc
    ]  # fmt: skip
    place = mender.place_of_value(BY_SEQNO_TABLE, key)
    if len(bad) != 1 or place is None:
        return False
    start, end, crc = bad[0]
    frame = unflipped(body[start:end], crc)
    if frame is None or _crc32c(body[:start] + frame + body[end:]) != block.body_crc:
        return False
    mender.put_part(BY_SEQNO_TABLE, key, place, place.size - len(body) + start, frame)
    how.append(BIT)
    return True


def lacking_in(mender: PageMender, key: bytes) -> list[Lacking]:
    """Return the versions that a damaged leaf of by_seqno had itself; []: it is not damaged, or
    nobody can tell. Raises StoreDamagedError.
    """
    bad = mender.bad_page(BY_SEQNO_TABLE, key)
    return relist(mender, key, bad, {})[1] if bad is not None and bad.is_leaf else []


def put_leaf(mender: PageMender, key: bytes, given: Given) -> str | None:
    """Mend a leaf of by_seqno with versions from elsewhere; return how, "" if they do not prove
    right or others are lacking; None: it is not damaged. Raises OSError, StoreDamagedError.
    """
    bad = mender.bad_page(BY_SEQNO_TABLE, key)
    if bad is None or not bad.is_leaf:
        return None
    return f"{RELISTED}; {FROM_COPY}" if relist(mender, key, bad, given)[0] else ""


def put_versions(mender: PageMender, key: bytes, entries: Sequence[bytes]) -> str:
    """Mend a block with versions from another copy; return how, "" if they do not prove right.

    A block whose head is sound takes those of its versions that are damaged, each by its checksum.
    Otherwise, and where the disk cannot read it, the whole block is made of all of its versions,
    and the checksum of its first page, which has the block's checksums, must be the one that is
    known; or all of its bytes are those that are there. The other copy may have versions that this
    one has given up, and know what they replaced where this one was filled anew. Raises OSError,
    StoreDamagedError.
    """
    place = mender.place_of_value(BY_SEQNO_TABLE, key)
    if place is None or place.number is None:  # a small block of a leaf that was mended
        return FROM_COPY if mender.bad_page(BY_SEQNO_TABLE, key) is None else ""
    present = b""
    try:
        present = mender.bytes_at(BY_SEQNO_TABLE, key, place)
        block = Block(key, present)
    except (StoreDamagedError, struct.error):
        return _made_again(mender, key, place, present, entries)
    frames = {seqno_of(entry): entry[PREFIX_BYTES:] for entry in entries}
    pieces = []
    body = bytes(block.body)
    for seqno, (start, end), crc in zip(
        block.seqnos, pairwise((0, *block.ends)), block.frame_crcs, strict=True
    ):
        frame = body[start:end]
        if _crc32c(frame) != crc:
            frame = frames.get(seqno, b"")
        pieces.append(frame)
    if _crc32c(b"".join(pieces)) != block.body_crc:
        return ""
    value = present[: place.size - len(body)] + b"".join(pieces)
    if not mender.put_value(BY_SEQNO_TABLE, key, place, value):
        return _made_again(mender, key, place, present, entries)
    is_sound = mender.bad_page(BY_SEQNO_TABLE, key) is None
    return FROM_COPY if is_sound else ""


def _made_again(
    mender: PageMender, key: bytes, place: ValuePlace, present: bytes, entries: Sequence[bytes]
) -> str:
    """Make a whole block of another copy's versions, if it has the checksum that is known then;
    return how, "" if it has not. Where these versions make up the very bytes that are `present`,
    it is the checksum that became wrong: what compactions leave has less and less bytes, so the
    size of the value says which versions it has. Raises OSError, StoreDamagedError.
    """
    vb_id, first_seqno = BLOCK_KEY.unpack(key)
    before = mender.last_at_or_before(BY_SEQNO_TABLE, block_key(vb_id, first_seqno - 1))
    is_first = before is None or before[0][:2] != key[:2]
    seqno_before = 0 if is_first or before is None else Block(*before).last_seqno
    by_seqno = {seqno_of(entry): entry for entry in entries}
    own = [by_seqno[seqno] for seqno in sorted(by_seqno) if seqno >= first_seqno]
    fits = partial(may_have_size, place.size)
    left = left_by_compactions(mender, vb_id, own, fits)
    for taken in chain.from_iterable(map(_as_filled_anew, left)):
        made = build_blocks(vb_id, taken, seqno_before=seqno_before, body_bytes_target=_WHOLE)
        if len(made) != 1 or made[0][0] != key or len(made[0][1]) != place.size:
            continue
        if mender.put_value(BY_SEQNO_TABLE, key, place, made[0][1]):
            return FROM_COPY if mender.bad_page(BY_SEQNO_TABLE, key) is None else ""
        if made[0][1] == present and mender.put_sum(BY_SEQNO_TABLE, key, place):
            return SUMMED if mender.bad_page(BY_SEQNO_TABLE, key) is None else ""
    return ""


def _as_filled_anew(entries: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield versions as they are, and as copies have them that were filled anew: what came with the
    snapshot replaced nothing there. Where that ended is not known: most often behind all of them.
    """
    yield entries
    linked = [
        at for at, entry in enumerate(entries)
        if prev_seqno_of(entry) and entry[OPCODE_AT] != Opcode.DCP_SYSTEM_EVENT
    ]  # fmt: skip
    for count in range(len(linked), max(0, len(linked) - UNLINKED_MAX), -1):
        unlinked = list(entries)
        for at in linked[:count]:
            unlinked[at] = bytes(8) + entries[at][8:]
        yield unlinked


def _rebuild(mender: PageMender, key: bytes, bad: BadPage) -> bool:
    """Rebuild a leaf of by_key from the blocks of its partitions."""
    view = StoreView(mender)
    first = int.from_bytes(bad.low[:2], "big")
    try:
        records = {vb: record for vb, record in view.partitions().items() if vb >= first}
        last = max(records, default=0) if bad.high is None else int.from_bytes(bad.high[:2], "big")
        manifest = view.manifest()
        rows: list[tuple[bytes, bytes]] = []
        for vb_id in range(first, last + 1):
            record = records.get(vb_id)
            if record is not None:
                rows += _rows_of(mender, view, vb_id, record, manifest, bad)
    except (StoreDamagedError, _UnknownKeysError):
        return False
    check_records(dict(rows))
    return mender.put_rows(BY_KEY_TABLE, key, bad, rows)


def _remember(mender: PageMender, table: str, key: bytes, bad: BadPage, kept: KeptRows) -> bool:
    """Make a leaf again of the rows that are known by heart."""
    rows = sorted(kept.get(table, {}).items())
    own = [(at, row) for at, row in rows if bad.low <= at and (bad.high is None or at < bad.high)]
    if any(len(row) > ROW_IN_LEAF_MAX for _, row in own):
        return False
    try:
        is_known = bool(own) and mender.rows_counted(table) == len(rows)
    except StoreDamagedError:
        return False
    return is_known and mender.put_rows(table, key, bad, own)


def _relink(mender: PageMender, table: str, key: bytes, bad: BadPage) -> bool:
    """Rebuild a branch."""
    try:
        return mender.put_branch(table, key, bad)
    except StoreDamagedError:
        return False


class _UnknownKeysError(Exception):
    """Nobody can tell which keys a leaf had."""


def _rows_of(
    mender: PageMender, view: StoreView, vb_id: int, record: PartitionRecord, manifest: Manifest,
    bad: BadPage,
) -> list[tuple[bytes, bytes]]:  # fmt: skip
    """Return the records of a partition that a leaf had. Raises StoreDamagedError,
    _UnknownKeysError.
    """
    prefix = vb_id.to_bytes(2, "big")
    newest: dict[bytes, bytes] = {}
    next_seqno = 1
    while entries := view.entries(vb_id, next_seqno, record.last_seqno, _READ_BYTES):
        for entry in entries:
            key = key_of(entry)
            if bad.low <= prefix + key and (bad.high is None or prefix + key < bad.high):
                newest[key] = entry
        next_seqno = seqno_of(entries[-1]) + 1
    keys = sorted(newest)
    if not keys:
        return []
    may_be_gone = {
        key
        for key in keys
        if manifest.is_gone(collection_of(key))
        or (newest[key][OPCODE_AT] != _MUTATION and seqno_of(newest[key]) <= record.purge_seqno)
    }
    if may_be_gone:
        others = _keys_elsewhere(mender, vb_id, bad)
        if record.keys == others + len(keys) - len(may_be_gone):
            keys = [key for key in keys if key not in may_be_gone]
        elif record.keys != others + len(keys):
            raise _UnknownKeysError
    return by_key_items(prefix, keys, [newest[key] for key in keys])


def _keys_elsewhere(mender: PageMender, vb_id: int, bad: BadPage) -> int:
    """Count the records of a partition on other leaves. Raises StoreDamagedError."""
    prefix, stop = vb_id.to_bytes(2, "big"), (vb_id + 1).to_bytes(2, "big")
    count = 0
    if prefix < bad.low:
        count += sum(1 for _ in mender.range(BY_KEY_TABLE, prefix, bad.low))
    if bad.high is not None and bad.high < stop:
        for key, value in mender.range(BY_KEY_TABLE, bad.high, stop):
            checked_meta(key, bytes(value))
            count += 1
    return count
