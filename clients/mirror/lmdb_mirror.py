"""A mirror's documents, journal and positions in one LMDB file, each batch in one transaction.

    d vb key               -> CAS (u64), revision (u64), value
    j vb seqno number      -> key length, key, and the row before (or its absence)
    s vb                   -> floor, entries of the journal, documents, and their hashes
                              (`KeyHashes`): the sums of up to 256 buckets
    h vb number            -> the sums of 256 further buckets
    p vb                   -> position
    w                      -> the mirrored selection: collection id (u32), key prefixes
    r                      -> 1: rows have a CAS and a revision. 2: partitions have hashes, too

Positions are written in the same transaction as the effects of the events, so a killed mirror
continues exactly where it was. So are hashes: one that lost its place reads what differs, not the
file. Batches are written on the caller's thread. In another thread LMDB
would be slow, because every put releases the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from struct import Struct
from typing import Any, Final

from clients.checkpoint.checkpoint import decode_position, encode_position
from clients.checkpoint.claim import Claim
from clients.errors import CheckpointError
from clients.kv.held import ROW, ROW_FORM
from clients.local_lmdb import LocalLmdb, rows_from
from clients.mirror.mirror_state import Changing, Taken, counted
from clients.position import Position
from vbucket.native.key_hashes import KeyHashes, Row

FORMAT: Final = "dcpd-mirror"
VERSION: Final = 4
"""Version 1 had positions without a filter; rows had no CAS and revision before 3; partitions had
no hashes before 4. All are read: rows get zeros, so a comparison finds that they differ from a
server's, and hashes are counted when the file is opened."""
_ENTRY: Final = Struct(">1sHQI")
_UNDO: Final = Struct(">?H")
"""Whether there was a value before, length of the key."""
_STATE: Final = Struct(">QQQ")
_SUBJECT: Final = b"w"
_HAS: Final = b"r"
_SUMS_BYTES: Final = 2048
"""Sums in one row: a small change of a large partition writes some of them only."""
_U32: Final = Struct(">I")


class LmdbStore:
    """A `MirrorStore` in one LMDB file."""

    def __init__(self, path: str | Path, *, is_durable: bool = True) -> None:
        """Raises CheckpointError, also if another mirror writes the file."""
        place = Path(path)
        self._claim = Claim(place.with_name(f".{place.name}.lock"), f"{place}", "mirror")
        self._claim.take()
        try:
            self._file = LocalLmdb(place, FORMAT, version=VERSION, is_durable=is_durable)
            with self._file.writing() as transaction:
                has = transaction.get(_HAS)
                if has is None:
                    _add_versions(transaction)
                if has != b"2":
                    _add_hashes(transaction)
        except BaseException:
            self._claim.release()
            raise

    @contextmanager
    def changing(self) -> Iterator[Changing]:
        """Give access for changes, in one transaction."""
        with self._file.writing() as transaction:
            change = _Change(transaction)
            yield change
            change.finish()

    def floor(self, vb_id: int) -> int:
        """See MirrorStore."""
        with self._file.reading() as transaction:
            return _State(transaction, vb_id).floor

    def positions(self) -> dict[int, Position]:
        """See MirrorStore."""
        with self._file.reading() as transaction:
            try:
                return {
                    int.from_bytes(key[1:], "big"): decode_position(value)
                    for key, value in rows_from(transaction, b"p")
                }
            except ValueError as error:
                raise CheckpointError(
                    f"{self._file.path}: {error}", hint="Delete the file to rebuild the mirror."
                ) from error

    def partitions_seen(self) -> int:
        """Return how many partitions there are at least: as many as end with the last position."""
        with self._file.reading() as transaction:
            last = max((row for row, _ in rows_from(transaction, b"p")), default=b"p")
        return 1 + int.from_bytes(last[1:], "big")

    def follow(self, collection_id: int, key_prefixes: tuple[bytes, ...]) -> bool:
        """See MirrorStore."""
        subject = _U32.pack(collection_id) + b"\0".join(
            prefix.hex().encode() for prefix in sorted(key_prefixes)
        )
        with self._file.writing() as transaction:
            before: bytes | None = transaction.get(_SUBJECT)
            if before == subject:
                return True
            rows = [
                row
                for kind in (b"d", b"j", b"s", b"h", b"p")
                for row, _ in rows_from(transaction, kind)
            ]
            for row in rows:
                transaction.delete(row)
            transaction.put(_SUBJECT, subject)
        return not rows

    def subject(self) -> tuple[int, bytes] | None:
        """Return the id of the mirrored collection, and its key prefixes as they are stored; None:
        nothing was mirrored yet.
        """
        with self._file.reading() as transaction:
            subject: bytes | None = transaction.get(_SUBJECT)
        if subject is None:
            return None
        return _U32.unpack_from(subject)[0], subject[_U32.size :]

    def get(self, vb_id: int, key: bytes) -> bytes | None:
        """See MirrorStore."""
        with self._file.reading() as transaction:
            row: bytes | None = transaction.get(_row(b"d", vb_id) + key)
        return None if row is None else row[ROW.size :]

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """See MirrorStore. Yields the documents of one moment, in one read transaction."""
        with self._file.reading() as transaction:
            for key, value in rows_from(transaction, b"d"):
                yield key[3:], value[ROW.size :]

    def hashes(self, vb_id: int) -> KeyHashes:
        """See MirrorStore."""
        with self._file.reading() as transaction:
            return _State(transaction, vb_id).hashes

    def keys(self, vb_id: int) -> list[bytes]:
        """See MirrorStore."""
        with self._file.reading() as transaction, transaction.cursor() as cursor:
            count = _State(transaction, vb_id).hashes.documents
            if not cursor.set_range(_row(b"d", vb_id)):
                return []
            return [row[3:] for row in islice(cursor.iternext(values=False), count)]

    def first_key(self, vb_id: int) -> bytes:
        """Return a key of a partition that is not empty."""
        with self._file.reading() as transaction:
            return next(rows_from(transaction, _row(b"d", vb_id)))[0][3:]

    def rows(self, vb_id: int, keys: Iterable[bytes]) -> list[Row]:
        """See MirrorStore."""
        prefix = _row(b"d", vb_id)
        with self._file.reading() as transaction:
            found = [(key, transaction.get(prefix + key)) for key in keys]
        return [(key, row) for key, row in found if row is not None]

    def count(self) -> int:
        """See MirrorStore."""
        with self._file.reading() as transaction:
            return sum(_STATE.unpack_from(value)[2] for _, value in rows_from(transaction, b"s"))

    def close(self) -> None:
        """See MirrorStore."""
        self._file.close()
        self._claim.release()


class _State:
    """What is stored of a partition beside documents and journal, and how one change leaves it."""

    __slots__ = ("_before", "added", "entries", "floor", "hashes", "number", "removed")

    def __init__(self, transaction: Any, vb_id: int) -> None:
        value = transaction.get(_row(b"s", vb_id)) or bytes(_STATE.size)
        self.floor: int
        self.entries: int
        self.floor, self.entries, documents = _STATE.unpack_from(value)
        sums = value[_STATE.size :]
        if len(sums) == _SUMS_BYTES:
            sums += b"".join(some for _, some in rows_from(transaction, _row(b"h", vb_id)))
        self._before: bytes = sums
        self.hashes = KeyHashes(max(len(sums) // 8, 1).bit_length() - 1, documents, sums)
        self.number = 0
        """Of the last entry in the journal that this change made."""
        self.removed: list[Row] = []
        self.added: list[Row] = []
        """Rows that the change takes out and adds, without values. Hashes do not have them yet."""

    def empty(self) -> None:
        """The partition is emptied."""
        self.floor = self.entries = 0
        self.removed, self.added, self.hashes, self._before = [], [], KeyHashes(), b""

    def write(self, transaction: Any, vb_id: int) -> None:
        """Write it, with the hashes after the change; of the sums, those that are others."""
        self.hashes.change(self.removed, self.added, ROW_FORM)
        if self.hashes.is_small:
            self.hashes, self._before = _counted(transaction, vb_id), b""
        sums, before = bytes(self.hashes.sums), self._before
        for number, at in enumerate(range(_SUMS_BYTES, len(sums), _SUMS_BYTES)):
            if (some := sums[at : at + _SUMS_BYTES]) != before[at : at + _SUMS_BYTES]:
                transaction.put(_row(b"h", vb_id) + bytes([number]), some)
        state = _STATE.pack(self.floor, self.entries, self.hashes.documents)
        transaction.put(_row(b"s", vb_id), state + sums[:_SUMS_BYTES])


class _Change:
    """One transaction; the states of touched partitions are written at its end."""

    def __init__(self, transaction: Any) -> None:
        self._transaction = transaction
        self._states: dict[int, _State] = {}

    def put(self, vb_id: int, key: bytes, row: bytes | None, seqno: int) -> None:
        """See Changing."""
        state = self._state(vb_id)
        before: bytes | None = self._transaction.get(_row(b"d", vb_id) + key)
        undo = _UNDO.pack(before is not None, len(key)) + key + (before or b"")
        # Each change has its own seqno, except that the drop of a collection deletes all its
        # documents at one seqno. So entries are also numbered.
        state.number += 1
        self._transaction.put(_ENTRY.pack(b"j", vb_id, seqno, state.number), undo)
        state.entries += 1
        self._set(vb_id, key, row, before)

    def undo(self, vb_id: int, to_seqno: int) -> None:
        """See Changing."""
        state = self._state(vb_id)
        assert to_seqno >= state.floor, "the journal does not reach that far"
        for place, undo in reversed(self._entries_above(vb_id, to_seqno)):
            has_before, key_bytes = _UNDO.unpack_from(undo)
            at = _UNDO.size + key_bytes
            key = undo[_UNDO.size : at]
            held = self._transaction.get(_row(b"d", vb_id) + key)
            self._set(vb_id, key, undo[at:] if has_before else None, held)
            self._transaction.delete(place)
            state.entries -= 1

    def trim(self, vb_id: int, entries_max: int) -> None:
        """See Changing."""
        state = self._state(vb_id)
        with self._transaction.cursor() as cursor:
            while state.entries > entries_max and cursor.set_range(_row(b"j", vb_id)):
                state.floor = max(state.floor, _ENTRY.unpack(cursor.key())[2])
                cursor.delete()
                state.entries -= 1

    def clear(self, vb_id: int) -> None:
        """See Changing."""
        self._state(vb_id).empty()
        for kind in (b"d", b"j", b"h"):
            for row, _ in list(rows_from(self._transaction, _row(kind, vb_id))):
                self._transaction.delete(row)

    def take_over(self, vb_id: int, taken: Taken) -> None:
        """See Changing. Entries below those that will come are left to `trim`."""
        state = self._state(vb_id)
        for key, row in taken.rows.items():
            self._set(vb_id, key, row, self._transaction.get(_row(b"d", vb_id) + key))
        for place, _ in self._entries_above(vb_id, taken.seqno):
            self._transaction.delete(place)
            state.entries -= 1
        state.floor = taken.read_seqno

    def keys(self, vb_id: int) -> list[bytes]:
        """See Changing."""
        return [row[3:] for row, _ in rows_from(self._transaction, _row(b"d", vb_id))]

    def place(self, positions: Mapping[int, Position]) -> None:
        """See Changing."""
        for vb_id, position in positions.items():
            self._transaction.put(_row(b"p", vb_id), encode_position(position))

    def finish(self) -> None:
        """Write the states of the touched partitions."""
        for vb_id, state in self._states.items():
            state.write(self._transaction, vb_id)

    def _state(self, vb_id: int) -> _State:
        state = self._states.get(vb_id)
        if state is None:
            state = self._states[vb_id] = _State(self._transaction, vb_id)
        return state

    def _entries_above(self, vb_id: int, seqno: int) -> list[tuple[bytes, bytes]]:
        first = _ENTRY.pack(b"j", vb_id, seqno + 1, 0)
        return list(rows_from(self._transaction, _row(b"j", vb_id), first))

    def _set(self, vb_id: int, key: bytes, row: bytes | None, before: bytes | None) -> None:
        state, place = self._states[vb_id], _row(b"d", vb_id) + key
        if before is not None:
            state.removed.append((key, before[: ROW.size]))
        if row is not None:
            self._transaction.put(place, row)
            state.added.append((key, row[: ROW.size]))
        elif before is not None:
            self._transaction.delete(place)


def _add_versions(transaction: Any) -> None:
    """Give the rows of an older version a CAS and a revision: zeros."""
    for key, value in list(rows_from(transaction, b"d")):
        transaction.put(key, bytes(ROW.size) + value)
    for key, undo in list(rows_from(transaction, b"j")):
        has_before, key_bytes = _UNDO.unpack_from(undo)
        at = _UNDO.size + key_bytes
        if has_before:
            transaction.put(key, undo[:at] + bytes(ROW.size) + undo[at:])


def _add_hashes(transaction: Any) -> None:
    """Count the documents of an older version."""
    for place, _ in list(rows_from(transaction, b"s")):
        vb_id = int.from_bytes(place[1:], "big")
        state = _State(transaction, vb_id)
        state.hashes = _counted(transaction, vb_id)
        state.write(transaction, vb_id)
    transaction.put(_HAS, b"2")


def _counted(transaction: Any, vb_id: int) -> KeyHashes:
    return counted(
        [(row[3:], value[: ROW.size]) for row, value in rows_from(transaction, _row(b"d", vb_id))]
    )


def _row(kind: bytes, vb_id: int) -> bytes:
    return kind + vb_id.to_bytes(2, "big")
