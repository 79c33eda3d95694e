"""The scrubber's part in the store process: reads the store and the log piece by piece while the
server runs, and names what is damaged. Pure: what reads pages, and the log's bytes, are arguments.

A pass goes through AREAS in order: the tables of the store, then the segments of the log. A piece
is a few leaves of a table, or groups of a segment. `ScrubPlace` says where the next piece begins;
it means the same after a merge, a compaction or a restart, because it is a key and no page.

Who calls it: dcp.server.storage.process.scrub_work, between other work of the store process, so
nobody writes meanwhile.

Invariants
- what is damaged does not stop a pass: it goes on at the next key whose page can be found;
- each piece moves the place on, so a pass ends;
- only what the store itself promises is checked: page checksums, the checksum of each record and
  block, and the chain of a partition's blocks. `dcpctl verify` compares the tables, too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import google_crc32c

from vbucket.check.finding import Kind
from vbucket.log.end_mark import LogEnd
from vbucket.log.record import LogDamagedError, scan_segment
from vbucket.model.entry import key_in_frame
from vbucket.model.manifest import decode_leb128
from vbucket.store.block import BLOCK_KEY, Block, BlockDamagedError, block_key
from vbucket.store.due import read_due
from vbucket.store.environment import StoreDamagedError
from vbucket.store.key_record import RecordDamagedError, check_records, checked_fields
from vbucket.store.records import (
    BY_KEY_TABLE,
    BY_SEQNO_TABLE,
    EXPIRY_TABLE,
    FAILOVER_TABLE,
    META_TABLE,
    STATE_TABLE,
    check_document,
)
from vbucket.store.store import StoreView, missing_blocks

if TYPE_CHECKING:
    from vbucket.store.lmdb.page_scan import Leaf, PageScan

LOG_AREA: Final = "log"
TABLE_AREAS: Final = (
    META_TABLE, FAILOVER_TABLE, STATE_TABLE, BY_SEQNO_TABLE, BY_KEY_TABLE, EXPIRY_TABLE,
)  # fmt: skip
"""Records of keys are mended from the versions, so these come first."""
AREAS: Final = (*TABLE_AREAS, LOG_AREA)
DAMAGES_MAX: Final = 50
"""A piece ends early after so many: a dead disk must not fill memory."""
_SEQNOS_MAX: Final = 5
_STORE_FILE: Final = "store/data.mdb"
_crc32c = google_crc32c.value


class ScrubPlace(NamedTuple):
    """Where the next piece begins. `key`: of the area's table, or a segment's number."""

    area: int = 0
    key: bytes = b"\0"

    @property
    def is_over(self) -> bool:
        """Whether the pass has come to its end."""
        return self.area >= len(AREAS)

    def next_area(self) -> ScrubPlace:
        """Return the beginning of the area after this one."""
        return ScrubPlace(self.area + 1)


class Damage(NamedTuple):
    """What a scrubber found, as far as it is known. Lists are [first, last]."""

    kind: str
    """One of vbucket.check.finding.Kind."""
    file: str
    """Relative to the data folder."""
    where: str
    what: str
    vb_id: int | None = None
    seqnos: list[int] | None = None
    keys: list[str] | None = None
    """From this key on, up to this one; both are named as text."""
    table: str = ""
    key: bytes = b""
    """A key of that table whose way meets it; "": it is not in a table."""
    mended: str = ""
    """How it was mended; "": it was not."""


class Piece(NamedTuple):
    """What was read."""

    place: ScrubPlace
    """Where to go on."""
    read_bytes: int
    damages: list[Damage]


class ScrubReport(NamedTuple):
    """What a piece found and cost, as the store process tells it."""

    place: list[Any]
    """`ScrubPlace`: where to go on."""
    read_bytes: int
    damages: list[list[Any]]
    """`Damage` each."""
    busy_s: float
    """Processor time."""
    size_bytes: int
    """Of the store and the log: what a pass reads."""


class TableScrub:
    """Reads pieces of the store's tables. Made anew for each piece."""

    def __init__(self, reader: PageScan) -> None:
        self._reader = reader
        self._last: tuple[int, int] | None = None
        """Partition and last seqno of the block before; None: unknown."""
        self._damages: list[Damage] = []

    def piece(self, place: ScrubPlace, bytes_max: int, is_over: Callable[[], bool]) -> Piece:
        """Read from a place on, at least one leaf, until `bytes_max` or until it `is_over`."""
        table, key = AREAS[place.area], place.key
        read_bytes = 0
        while True:
            leaf = self._reader.leaf(table, key)
            read_bytes += leaf.size_bytes
            self._take(table, leaf)
            if leaf.behind is None or leaf.behind <= key:
                self._end_of_partition(None)
                return Piece(place.next_area(), read_bytes, self._damages)
            key = leaf.behind
            if read_bytes >= bytes_max or len(self._damages) >= DAMAGES_MAX or is_over():
                return Piece(place._replace(key=key), read_bytes, self._damages)

    def _take(self, table: str, leaf: Leaf) -> None:
        for first, behind, why in leaf.damages:
            is_block = table == BY_SEQNO_TABLE and behind == first + b"\0"
            if is_block:
                behind = self._behind_block(first, leaf)  # noqa: PLW2901 - the block's own end
            self._damages.append(_page_damage(table, first, behind, why, is_block=is_block))
        if table == BY_KEY_TABLE:
            self._check_keys(leaf)
        elif table == BY_SEQNO_TABLE:
            unread = [(first, None) for first, _, _ in leaf.damages]
            for key, value in sorted([*leaf.found, *unread]):
                if value is None:
                    self._last = None  # nobody knows where this one ends
                else:
                    self._check_block(key, value, leaf)
        else:
            check = _check_row if table == EXPIRY_TABLE else check_document
            for key, value in leaf.found:
                try:
                    check(table, key, value)
                except StoreDamagedError as error:
                    self._damages.append(_record_damage(table, key, str(error)))

    def _behind_block(self, key: bytes, leaf: Leaf) -> bytes:
        """Return the key of the block after this one, whose own head may not be readable."""
        others = [each for each, _ in leaf.found] + [each for each, _, _ in leaf.damages]
        behind = min((each for each in others if each > key), default=leaf.behind)
        if behind is not None and behind[:2] == key[:2]:
            return behind
        vb_id = int.from_bytes(key[:2], "big")
        try:
            record = StoreView(self._reader).partition(vb_id)
        except StoreDamagedError:
            record = None
        return key if record is None else block_key(vb_id, record.last_seqno + 1)

    def _check_keys(self, leaf: Leaf) -> None:
        try:
            check_records(dict(leaf.found))
        except RecordDamagedError:
            for key, value in leaf.found:
                try:
                    checked_fields(key, value)
                except RecordDamagedError as error:
                    self._damages.append(_record_damage(BY_KEY_TABLE, key, str(error)))

    def _check_block(self, key: bytes, value: bytes, leaf: Leaf) -> None:
        try:
            block = Block(key, value)
        except (BlockDamagedError, struct.error) as error:
            self._last = None
            behind = self._behind_block(key, leaf)
            self._damages.append(_block_damage(key, str(error), behind))
            return
        if self._last is not None and self._last[0] != block.vb_id:
            self._end_of_partition(block.vb_id)
        if self._last is not None and self._last[1] != block.seqno_before:
            self._add_gap(block.vb_id, self._last[1], block.seqno_before)
        self._last = block.vb_id, block.last_seqno
        try:
            block.checked_body()
        except BlockDamagedError as error:
            self._damages.append(_body_damage(block, str(error)))

    def _end_of_partition(self, next_vb_id: int | None) -> None:
        """Compare where the blocks end with the partition's record."""
        if self._last is None:
            return
        vb_id, last_seqno = self._last
        self._last = None if next_vb_id is None else (next_vb_id, 0)
        try:
            record = StoreView(self._reader).partition(vb_id)
        except StoreDamagedError:
            return  # a finding of its own
        if record is not None and record.last_seqno != last_seqno:
            self._add_gap(vb_id, last_seqno, record.last_seqno)

    def _add_gap(self, vb_id: int, last_seqno: int, seqno_before: int) -> None:
        what = str(missing_blocks(vb_id, last_seqno, seqno_before))
        seqnos = [last_seqno + 1, seqno_before]
        self._damages.append(
            Damage(str(Kind.GAP), _STORE_FILE, f"partition {vb_id}", what, vb_id, seqnos)
        )

    def partition(self, vb_id: int) -> list[Damage]:
        """Read all that the tables have of one partition."""
        # A pass begins a table there: so the damage of its first leaf has the same name for both.
        start = vb_id.to_bytes(2, "big") if vb_id else ScrubPlace().key
        stop = (vb_id + 1).to_bytes(2, "big")
        for table in (STATE_TABLE, FAILOVER_TABLE, BY_SEQNO_TABLE, BY_KEY_TABLE):
            key = start
            while key < stop and len(self._damages) < DAMAGES_MAX:
                leaf = self._reader.leaf(table, key)
                self._take(table, leaf)
                if leaf.behind is None or leaf.behind <= key:
                    break
                key = leaf.behind
            self._last = None
        return self._damages


class LogScrub:
    """Reads pieces of one segment. Holds its bytes until it is read."""

    def __init__(self, segment: int, data: bytes, file: str) -> None:
        """`data` ends with the last group that is on disk."""
        self.segment = segment
        self._file = file
        self._read_bytes = 0
        self._groups = scan_segment(data, segment)
        self._size = len(data)

    def piece(self, place: ScrubPlace, bytes_max: int, is_over: Callable[[], bool]) -> Piece:
        """Read groups until `bytes_max` or until it `is_over`."""
        began = self._read_bytes
        damages: list[Damage] = []
        try:
            for group in self._groups:
                self._read_bytes = group.end
                if self._read_bytes - began >= bytes_max or is_over():
                    return Piece(place, self._read_bytes - began, damages)
        except LogDamagedError as error:
            where = f"segment {self.segment} of the log"
            damages.append(Damage(str(Kind.LOG), self._file, where, str(error)))
        after = ScrubPlace(place.area, (self.segment + 1).to_bytes(8, "big"))
        return Piece(after, max(0, self._size - began), damages)


def segment_to_scrub(
    place: ScrubPlace, segments: list[int], end: LogEnd | None
) -> tuple[int, int | None] | None:
    """Return the next segment to read, and how many of its bytes (None: all); None: there is none.

    `end`: how far the log is on disk. What follows is being written.
    """
    first = int.from_bytes(place.key, "big")
    for segment in segments:
        if segment < first:
            continue
        if end is None or segment < end.segment:
            return segment, None
        if segment == end.segment:
            return segment, end.size_bytes
    return None


def _check_row(_table: str, row: bytes, value: bytes) -> None:
    read_due(row, value)


def _page_damage(
    table: str, first: bytes, behind: bytes | None, why: str, *, is_block: bool
) -> Damage:
    """Name what a damaged page has: the keys from the first one up to the one behind it."""
    if table == BY_SEQNO_TABLE:
        return _block_damage(first, why, behind, kind=Kind.BLOCK if is_block else Kind.PAGES)
    return _record_damage(table, first, why, behind, kind=Kind.PAGES)


def _record_damage(
    table: str, key: bytes, why: str, behind: bytes | None = None, kind: Kind | None = None
) -> Damage:
    vb_id = int.from_bytes(key[:2], "big") if table != EXPIRY_TABLE else None
    if table == META_TABLE:
        vb_id = None
    keys = None
    if table == BY_KEY_TABLE:
        last = key[2:] if behind is None or behind == key + b"\0" else behind[2:]
        keys = [_text(key[2:]), _text(last)]
    if kind is None:
        kind = {BY_KEY_TABLE: Kind.KEY_RECORD, EXPIRY_TABLE: Kind.EXPIRY}.get(table, Kind.RECORD)
    where = f"table {table}" if vb_id is None else f"partition {vb_id}, table {table}"
    return Damage(str(kind), _STORE_FILE, where, why, vb_id, None, keys, table, key)


def _block_damage(
    key: bytes, why: str, behind: bytes | None = None, kind: Kind = Kind.BLOCK
) -> Damage:
    vb_id = int.from_bytes(key[:2], "big")
    seqnos = None
    if len(key) >= BLOCK_KEY.size:
        first = int.from_bytes(key[2:10], "big")
        is_same = behind is not None and behind[:2] == key[:2] and len(behind) == BLOCK_KEY.size
        last = int.from_bytes(behind[2:10], "big") - 1 if behind is not None and is_same else first
        seqnos = [first, last]
    where = f"partition {vb_id}, table {BY_SEQNO_TABLE}"
    return Damage(str(kind), _STORE_FILE, where, why, vb_id, seqnos, None, BY_SEQNO_TABLE, key)


def _body_damage(block: Block, why: str) -> Damage:
    """Name the versions of a block whose frames do not match their checksums."""
    body = bytes(block.body)
    starts = [0, *block.ends[:-1]]
    bad = []
    for seqno, start, end, crc in zip(
        block.seqnos, starts, block.ends, block.frame_crcs, strict=True
    ):
        if _crc32c(body[start:end]) != crc:
            bad.append((seqno, _text(key_in_frame(body[start:end]))))
    named = ", ".join(f"{seqno} (key {key})" for seqno, key in bad[:_SEQNOS_MAX])
    more = f" and {len(bad) - _SEQNOS_MAX} more" if len(bad) > _SEQNOS_MAX else ""
    seqnos = [bad[0][0], bad[-1][0]] if bad else [block.first_seqno, block.last_seqno]
    keys = [bad[0][1], bad[-1][1]] if bad else None
    where = f"partition {block.vb_id}, table {BY_SEQNO_TABLE}"
    what = f"{why}: seqno {named}{more}" if bad else why
    return Damage(
        str(Kind.BLOCK), _STORE_FILE, where, what, block.vb_id, seqnos, keys, BY_SEQNO_TABLE,
        block.key,
    )  # fmt: skip


def _text(key: bytes) -> str:
    """Return a stored key as people read it, without its collection's number."""
    head = decode_leb128(key)
    return (key if head is None else key[head[1] :]).decode("utf-8", "backslashreplace")
