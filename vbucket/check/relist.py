"""Makes a leaf of by_seqno, the list of a partition's blocks, again.

    blocks with pages of their own    are still in the file: each follows the one before
    small blocks                      stood in the leaf itself: what is missing between the others
                                      is made of versions of another copy, or of a backup, which
                                      may have versions that this copy has given up

Who calls it: `vbucket.check.mend`, and the store process for what came from elsewhere.

Invariants
- the blocks of each partition follow each other without a gap, up to the end that its record says;
- of a partition that got versions from elsewhere there are as many as its record counts, and none
  contradicts the record of its key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

from dcp.wire.opcode import Opcode
from vbucket.model.entry import OPCODE_AT, PREFIX_BYTES, key_of, seqno_of
from vbucket.store.block import BLOCK_KEY, Block, block_key, build_blocks, described_in, is_block_of
from vbucket.store.environment import StoreDamagedError
from vbucket.store.key_record import checked_meta
from vbucket.store.lmdb.environment_lmdb import ROW_IN_LEAF_MAX
from vbucket.store.lmdb.page_mend import BadPage, LargePlace, PageMender
from vbucket.store.records import BY_KEY_TABLE, BY_SEQNO_TABLE, PartitionRecord
from vbucket.store.store import StoreView

RELISTED: Final = "its blocks were found again, each following the one before"
_WHOLE: Final = 1 << 62
_NEVER: Final = 1 << 64
_floor_of: Final = itemgetter(0)
_DOCUMENT_OPCODES: Final = frozenset(
    {int(Opcode.DCP_MUTATION), int(Opcode.DCP_DELETION), int(Opcode.DCP_EXPIRATION)}
)

Given = Mapping[bytes, Sequence[bytes]]
"""Key of a `Lacking` -> the versions that came from elsewhere for it."""


class Lacking(NamedTuple):
    """Versions that a leaf had itself."""

    key: bytes
    """Of the block that they were in, at the earliest."""
    first_seqno: int
    last_seqno: int


def relist(
    mender: PageMender, key: bytes, bad: BadPage, given: Given
) -> tuple[bool, list[Lacking]]:
    """Make a leaf of by_seqno again; return whether that is done, and what it takes if not."""
    try:
        found = _rows(mender, bad, given)
    except (StoreDamagedError, ValueError):
        return False, []
    lacking = [each for each in found if isinstance(each, Lacking)]
    if lacking:
        return False, lacking
    rows = [each for each in found if not isinstance(each, Lacking)]
    are_within = all(bad.low <= at and (bad.high is None or at < bad.high) for at, _ in rows)
    return are_within and mender.put_rows(BY_SEQNO_TABLE, key, bad, rows), []


def _rows(
    mender: PageMender, bad: BadPage, given: Given
) -> list[tuple[bytes, bytes | LargePlace] | Lacking]:
    """Return the rows of a leaf, and what is missing between them. Raises StoreDamagedError,
    ValueError if what was given cannot be what was there.
    """
    records = StoreView(mender).partitions()
    last = max(records, default=0) if bad.high is None else int.from_bytes(bad.high[:2], "big")
    large = {block.key: (place, block) for place, block in _blocks_within(mender, bad, last)}
    rows: list[tuple[bytes, bytes | LargePlace] | Lacking] = []
    for vb_id in range(int.from_bytes(bad.low[:2], "big"), last + 1):
        record = records.get(vb_id)
        seqno, end = _ends_of(mender, vb_id, record, bad)
        own = sorted(each for each in large if each[:2] == vb_id.to_bytes(2, "big"))
        gaps: list[tuple[int, Lacking]] = []
        for at in [*own, None]:
            before = end if at is None else large[at][1].seqno_before
            if before < seqno:
                raise ValueError("the blocks do not follow each other")
            if before > seqno:
                key = max(block_key(vb_id, seqno + 1), bad.low)
                gaps.append((len(rows), Lacking(key, seqno + 1, before)))
                rows.append(gaps[-1][1])
            if at is not None:
                rows.append((at, large[at][0]))
                seqno = large[at][1].last_seqno
        came = {gap for _, gap in gaps if given.get(gap.key)}
        if len(came) < len(gaps):
            rows = [row for row in rows if row not in came]
        elif gaps:
            others = sum(len(large[at][1].seqnos) for at in own)
            others += _versions_elsewhere(mender, vb_id, bad)
            count = 0 if record is None else record.versions - others
            taken = [entry for _, gap in gaps for entry in given[gap.key]]
            taken = _as_many(mender, vb_id, taken, count)
            for place, gap in reversed(gaps):
                if made := _made(mender, vb_id, gap, taken):
                    rows[place : place + 1] = made
    return rows


def left_by_compactions(
    mender: PageMender, vb_id: int, entries: Sequence[bytes], fits: Callable[[int, int], bool]
) -> Iterator[list[bytes]]:
    """Yield all of these versions, and what compactions up to each seqno would leave of them, as
    far as that fits. `fits`: whether there may be so many versions, with so many bytes of frames.

    They drop versions that others have superseded, and deletions that were purged. What is newest
    of a key, its record says; of one that cannot be read nothing is dropped. What is dropped only
    grows with the seqno, so what is left is counted, and made only where it fits: the versions are
    as many as another node sends.
    """
    count, size_bytes = len(entries), sum(map(len, entries)) - PREFIX_BYTES * len(entries)
    if fits(count, size_bytes):
        yield list(entries)
    dropped_at = _dropped_at(mender, vb_id, entries)
    dropped = ((at, entry) for entry in entries if (at := dropped_at.get(seqno_of(entry), -1)) >= 0)
    for floor, some in groupby(sorted(dropped, key=_floor_of), key=_floor_of):
        for _, entry in some:
            count, size_bytes = count - 1, size_bytes - len(entry) + PREFIX_BYTES
        if count and fits(count, size_bytes):
            yield [each for each in entries if dropped_at.get(seqno_of(each), _NEVER) > floor]


def _dropped_at(mender: PageMender, vb_id: int, entries: Sequence[bytes]) -> dict[int, int]:
    """Return from which seqno on compactions drop versions, by the seqno of each; those that they
    keep are not in it.
    """
    next_of: dict[bytes, int] = {}
    dropped_at: dict[int, int] = {}
    for entry in reversed(entries):
        if entry[OPCODE_AT] not in _DOCUMENT_OPCODES:
            continue
        key, seqno = key_of(entry), seqno_of(entry)
        at: int | None = next_of.get(key)
        if at is None:
            with suppress(StoreDamagedError):
                at = _newest_seqno(mender, vb_id, key)
        if at is not None and at != seqno:
            dropped_at[seqno] = at
        next_of[key] = seqno
    return dropped_at


def _newest_seqno(mender: PageMender, vb_id: int, key: bytes) -> int:
    """Return the seqno of a key's newest version, 0 if the key has no record. Raises
    StoreDamagedError.
    """
    full_key = vb_id.to_bytes(2, "big") + key
    record = mender.get(BY_KEY_TABLE, full_key)
    return 0 if record is None else checked_meta(full_key, bytes(record)).seqno


def _as_many(mender: PageMender, vb_id: int, entries: Sequence[bytes], count: int) -> list[bytes]:
    """Return what is left of versions by the compaction that leaves so many. Raises ValueError if
    none does, StoreDamagedError.
    """
    for left in left_by_compactions(mender, vb_id, entries, lambda found, _: found == count):
        return left
    raise ValueError(f"partition {vb_id} had {count} versions there, and {len(entries)} came")


def _made(
    mender: PageMender, vb_id: int, gap: Lacking, versions: Sequence[bytes]
) -> list[tuple[bytes, bytes]]:
    """Return the block of versions from elsewhere; []: they do not prove right. Raises
    StoreDamagedError, ValueError.
    """
    entries = [each for each in versions if gap.first_seqno <= seqno_of(each) <= gap.last_seqno]
    if not entries or seqno_of(entries[-1]) != gap.last_seqno:
        return []
    view = StoreView(mender)
    for entry in entries:
        meta = view.meta(vb_id, key_of(entry))
        row_key = vb_id.to_bytes(2, "big") + key_of(entry)
        row = mender.get(BY_KEY_TABLE, row_key)
        if meta is None or row is None:
            continue  # a deletion that was purged
        newest = checked_meta(row_key, bytes(row))
        if newest.seqno < seqno_of(entry) or (
            newest.seqno == seqno_of(entry) and newest.cas != int.from_bytes(entry[28:36], "big")
        ):
            raise ValueError("a version contradicts the record of its key")
    seqno_before = gap.first_seqno - 1
    made = build_blocks(vb_id, entries, seqno_before=seqno_before, body_bytes_target=_WHOLE)
    return made if all(len(value) <= ROW_IN_LEAF_MAX for _, value in made) else []


def _ends_of(
    mender: PageMender, vb_id: int, record: PartitionRecord | None, bad: BadPage
) -> tuple[int, int]:
    """Return where a partition's blocks outside of a leaf end before it, and where those that it
    had end. Raises StoreDamagedError.
    """
    prefix = vb_id.to_bytes(2, "big")
    seqno, end = 0, 0 if record is None else record.last_seqno
    if bad.low[:2] == prefix and len(bad.low) == BLOCK_KEY.size:
        below = block_key(vb_id, BLOCK_KEY.unpack(bad.low)[1] - 1)
        before = mender.last_at_or_before(BY_SEQNO_TABLE, below)
        if before is not None and before[0][:2] == prefix:
            seqno = Block(*before).last_seqno
    if bad.high is not None and bad.high[:2] == prefix:
        behind = mender.first_at_or_after(BY_SEQNO_TABLE, bad.high)
        if behind is not None and behind[0][:2] == prefix:
            end = Block(*behind).seqno_before
    return seqno, end


def _versions_elsewhere(mender: PageMender, vb_id: int, bad: BadPage) -> int:
    """Count a partition's versions on other leaves. Raises StoreDamagedError."""
    first, stop = vb_id.to_bytes(2, "big"), (vb_id + 1).to_bytes(2, "big")
    count = 0
    for start, end in ((first, min(bad.low, stop)), (bad.high, stop)):
        if start is not None and start < end:
            rows = mender.range(BY_SEQNO_TABLE, max(start, first), end)
            count += sum(len(Block(*row).seqnos) for row in rows)
    return count


def _blocks_within(
    mender: PageMender, bad: BadPage, last_vb_id: int
) -> Iterator[tuple[LargePlace, Block]]:
    """Yield the blocks with pages of their own whose keys a leaf of by_seqno had, of partitions up
    to `last_vb_id`. Raises StoreDamagedError.

    A page does not say whose block it is, so that of each partition is tried.
    """
    first = int.from_bytes(bad.low[:2], "big")
    for number, value in mender.large_values():
        size, first_seqno = described_in(value)
        for vb_id in range(first, last_vb_id + 1):
            key = block_key(vb_id, first_seqno)
            is_within = key >= bad.low and (bad.high is None or key < bad.high)
            if is_within and is_block_of(key, value[:size]):
                with suppress(StoreDamagedError):
                    yield LargePlace(number, size), Block(key, value[:size])
