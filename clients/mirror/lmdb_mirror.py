"""A mirror's documents, journal and positions in one LMDB file, each batch in one transaction.

    d vb key               -> CAS (u64), revision (u64), value
    j vb seqno number      -> key length, key, and the row before (or its absence)
    s vb                   -> floor, entries of the journal, documents
    p vb                   -> position
    w                      -> the mirrored selection: collection id (u32), key prefixes
    r                      -> rows have a CAS and a revision

Positions are written in the same transaction as the effects of the events, so a killed mirror
continues exactly where it was. Batches are written on the caller's thread. In another thread LMDB
would be slow, because every put releases the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from struct import Struct
from typing import Any, Final

from clients.checkpoint.checkpoint import decode_position, encode_position
from clients.checkpoint.claim import Claim
from clients.errors import CheckpointError
from clients.local_lmdb import LocalLmdb, rows_from
from clients.mirror.mirror_state import ROW, Changing
from clients.position import Position
from vbucket.native.key_hashes import Row

FORMAT: Final = "dcpd-mirror"
VERSION: Final = 3
"""Version 1 had positions without a filter; rows had no CAS and revision before 3. Both are read:
rows get zeros, so a comparison finds that they differ from a server's."""
_ENTRY: Final = Struct(">1sHQI")
_UNDO: Final = Struct(">?H")
"""Whether there was a value before, length of the key."""
_STATE: Final = Struct(">QQQ")
_SUBJECT: Final = b"w"
_HAS_VERSIONS: Final = b"r"
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
                if transaction.get(_HAS_VERSIONS) is None:
                    _add_versions(transaction)
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
            return _state(transaction, vb_id)[0]

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
                row for kind in (b"d", b"j", b"s", b"p") for row, _ in rows_from(transaction, kind)
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

    def rows(self, vb_id: int) -> list[Row]:
        """See MirrorStore."""
        with self._file.reading() as transaction, transaction.cursor() as cursor:
            count = _state(transaction, vb_id)[2]
            if not cursor.set_range(_row(b"d", vb_id)):
                return []
            return [(key[3:], value) for key, value in islice(cursor, count)]

    def count(self) -> int:
        """See MirrorStore."""
        with self._file.reading() as transaction:
            return sum(_STATE.unpack(value)[2] for _, value in rows_from(transaction, b"s"))

    def close(self) -> None:
        """See MirrorStore."""
        self._file.close()
        self._claim.release()


class _Change:
    """One transaction; the states of touched partitions are written at its end."""

    def __init__(self, transaction: Any) -> None:
        self._transaction = transaction
        self._states: dict[int, list[int]] = {}
        self._numbers: dict[int, int] = {}

    def put(self, vb_id: int, key: bytes, row: bytes | None, seqno: int) -> None:
        """See Changing."""
        state = self._state(vb_id)
        place = _row(b"d", vb_id) + key
        before: bytes | None = self._transaction.get(place)
        undo = _UNDO.pack(before is not None, len(key)) + key + (before or b"")
        # Each change has its own seqno, except that the drop of a collection deletes all its
        # documents at one seqno. So entries are also numbered.
        number = self._numbers[vb_id] = self._numbers.get(vb_id, 0) + 1
        self._transaction.put(_ENTRY.pack(b"j", vb_id, seqno, number), undo)
        state[1] += 1
        self._set(state, place, row, is_there=before is not None)

    def undo(self, vb_id: int, to_seqno: int) -> None:
        """See Changing."""
        state = self._state(vb_id)
        assert to_seqno >= state[0], "the journal does not reach that far"
        first = _ENTRY.pack(b"j", vb_id, to_seqno + 1, 0)
        entries = [
            (key, value) for key, value in rows_from(self._transaction, _row(b"j", vb_id), first)
        ]
        for row, undo in reversed(entries):
            has_before, key_bytes = _UNDO.unpack_from(undo)
            at = _UNDO.size + key_bytes
            document = _row(b"d", vb_id) + undo[_UNDO.size : at]
            is_there = self._transaction.get(document) is not None
            self._set(state, document, undo[at:] if has_before else None, is_there=is_there)
            self._transaction.delete(row)
            state[1] -= 1

    def trim(self, vb_id: int, entries_max: int) -> None:
        """See Changing."""
        state = self._state(vb_id)
        with self._transaction.cursor() as cursor:
            while state[1] > entries_max and cursor.set_range(_row(b"j", vb_id)):
                state[0] = _ENTRY.unpack(cursor.key())[2]
                cursor.delete()
                state[1] -= 1

    def clear(self, vb_id: int) -> None:
        """See Changing."""
        for kind in (b"d", b"j"):
            for row, _ in list(rows_from(self._transaction, _row(kind, vb_id))):
                self._transaction.delete(row)
        self._states[vb_id] = [0, 0, 0]

    def begin_at(self, vb_id: int, seqno: int) -> None:
        """See Changing."""
        for row, _ in list(rows_from(self._transaction, _row(b"j", vb_id))):
            self._transaction.delete(row)
        self._state(vb_id)[:2] = [seqno, 0]

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
            self._transaction.put(_row(b"s", vb_id), _STATE.pack(*state))

    def _state(self, vb_id: int) -> list[int]:
        state = self._states.get(vb_id)
        if state is None:
            state = self._states[vb_id] = list(_state(self._transaction, vb_id))
        return state

    def _set(self, state: list[int], row: bytes, value: bytes | None, *, is_there: bool) -> None:
        if value is not None:
            self._transaction.put(row, value)
            state[2] += not is_there
        elif is_there:
            self._transaction.delete(row)
            state[2] -= 1


def _add_versions(transaction: Any) -> None:
    """Give the rows of an older version a CAS and a revision: zeros."""
    for key, value in list(rows_from(transaction, b"d")):
        transaction.put(key, bytes(ROW.size) + value)
    for key, undo in list(rows_from(transaction, b"j")):
        has_before, key_bytes = _UNDO.unpack_from(undo)
        at = _UNDO.size + key_bytes
        if has_before:
            transaction.put(key, undo[:at] + bytes(ROW.size) + undo[at:])
    transaction.put(_HAS_VERSIONS, b"1")


def _row(kind: bytes, vb_id: int) -> bytes:
    return kind + vb_id.to_bytes(2, "big")


def _state(transaction: Any, vb_id: int) -> tuple[int, int, int]:
    """Return floor, entries of the journal, documents."""
    value = transaction.get(_row(b"s", vb_id))
    floor, entries, documents = _STATE.unpack(value) if value else (0, 0, 0)
    return floor, entries, documents
