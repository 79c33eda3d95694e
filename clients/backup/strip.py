"""The frames of a section as columns: offsets, opcodes and keys. Pure.

    Strip      all frames of a section, without the chunk's bytes
    Stretch    selected frames of a strip, with the chunk's bytes

Nearly all frames are mutations, whose heads have the same length. The heads are joined, so a field
of all frames is a slice with a stride. Other sections are decoded frame by frame. Where the loops
in C are built (vbucket.native), they decode all sections.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from struct import Struct
from typing import Final, NamedTuple

from clients.backup.archives.chunk import Section
from dcp.wire.frame import HEADER_BYTES
from dcp.wire.message import MUTATION_EXTRAS, SYSTEM_EVENT_EXTRAS
from dcp.wire.opcode import Opcode
from vbucket.model.ids import time_ns_from_cas
from vbucket.model.manifest import SystemEventKind, collection_of, parse_system_event
from vbucket.native import ArchiveLoops, archive_loops

_BODY: Final = Struct(">8xI")
_KIND: Final = Struct(">xBHB")
"""Opcode, key length, extras length."""
_CAS_SEQNO: Final = Struct(">16xQQ")
_LOOPS: Final = archive_loops()
"""The same in C, where it is built."""
_SYSTEM_EVENT: Final = int(Opcode.DCP_SYSTEM_EVENT)
_MUTATION: Final = int(Opcode.DCP_MUTATION)
_KEY_AT: Final = HEADER_BYTES + MUTATION_EXTRAS.size
_HEAD_BYTES: Final = _KEY_AT + 1
"""Header and extras of a mutation, and the first byte of its key (of the collection id)."""


class Stretch(NamedTuple):
    """Frames of one chunk, in seqno order, as columns."""

    data: bytes
    starts: Sequence[int]
    ends: Sequence[int]
    """Start and end of each frame in `data`."""
    opcodes: bytes
    key_sizes: Sequence[int]
    extras_sizes: Sequence[int]
    first_bytes: bytes
    """First byte of each key, which belongs to its collection id."""
    body_sizes: Sequence[int] | None
    """Body lengths if the frames are contiguous, otherwise None."""


class Strip:
    """The frames of one section, as columns."""

    __slots__ = (
        "_body_sizes", "_ends", "_extras_sizes", "_first_bytes", "_key_sizes", "_opcodes",
        "_section", "_seqnos", "_starts",
    )  # fmt: skip

    def __init__(self, data: bytes, section: Section) -> None:
        """`data`: the chunk; its checksum was verified."""
        self._section = section
        if _LOOPS is not None and self._split(_LOOPS, data, section):
            return
        unpack = _BODY.unpack_from
        at, end = section.offset, section.offset + section.size_bytes
        body_sizes: list[int] = []
        while at < end:
            body_bytes = unpack(data, at)[0]
            body_sizes.append(body_bytes)
            at += HEADER_BYTES + body_bytes
        sizes = [body_bytes + HEADER_BYTES for body_bytes in body_sizes]
        starts = list(accumulate(sizes, initial=section.offset))
        self._ends = starts[1:]
        starts.pop()
        self._starts, self._body_sizes = starts, body_sizes
        self._seqnos = self._find_seqnos(data)
        heads = b"".join([data[at : at + _HEAD_BYTES] for at in starts])
        count = len(starts)
        self._opcodes = heads[1::_HEAD_BYTES]
        self._key_sizes: Sequence[int] = heads[3::_HEAD_BYTES]
        self._extras_sizes: Sequence[int] = heads[4::_HEAD_BYTES]
        self._first_bytes = heads[_KEY_AT::_HEAD_BYTES]
        is_plain = (
            len(heads) == count * _HEAD_BYTES
            and self._opcodes.count(_MUTATION) == count
            and heads[4::_HEAD_BYTES].count(MUTATION_EXTRAS.size) == count
            and not any(heads[2::_HEAD_BYTES])
        )
        if not is_plain:
            rows = zip(*map(_KIND.unpack_from, repeat(data), starts), strict=True)
            opcodes, self._key_sizes, self._extras_sizes = rows
            self._opcodes = bytes(opcodes)
            self._first_bytes = bytes([key[0] if key else 0 for key in self._keys(data)])

    def _split(self, loops: ArchiveLoops, data: bytes, section: Section) -> bool:
        """Do the same in C; False: nothing was done."""
        found = loops.split(data, section.offset, section.offset + section.size_bytes)
        if found is None:
            return False
        (
            self._starts, self._ends, self._body_sizes, self._opcodes, self._key_sizes,
            self._extras_sizes, self._first_bytes,
        ) = found  # fmt: skip
        self._seqnos = self._find_seqnos(data)
        return True

    def _find_seqnos(self, data: bytes) -> Sequence[int]:
        section = self._section
        if section.last_seqno + 1 - section.first_seqno == len(self._starts):
            return range(section.first_seqno, section.last_seqno + 1)
        unpacked = map(_CAS_SEQNO.unpack_from, repeat(data), self._starts)
        return [seqno for _, seqno in unpacked]

    def __len__(self) -> int:
        """Return the number of frames."""
        return len(self._starts)

    def is_within(self, low_seqno: int, high_seqno: int) -> bool:
        """Whether all frames are in (low, high]."""
        return low_seqno < self._section.first_seqno and self._section.last_seqno <= high_seqno

    def whole(self, data: bytes) -> Stretch:
        """Return all frames."""
        return Stretch(
            data, self._starts, self._ends, self._opcodes, self._key_sizes, self._extras_sizes,
            self._first_bytes, self._body_sizes,
        )  # fmt: skip

    def chosen(
        self, data: bytes, winners: frozenset[int] | set[int], low_seqno: int, high_seqno: int
    ) -> Stretch | None:
        """Return the frames with these seqnos, in (low, high]."""
        if self.is_within(low_seqno, high_seqno) and winners.issuperset(self._seqnos):
            return self.whole(data)
        indexes = [
            index
            for index, seqno in enumerate(self._seqnos)
            if seqno in winners and low_seqno < seqno <= high_seqno
        ]
        if not indexes:
            return None
        starts, ends, key_sizes, extras_sizes = (
            [column[index] for index in indexes]
            for column in (self._starts, self._ends, self._key_sizes, self._extras_sizes)
        )
        opcodes, firsts = (
            bytes([column[index] for index in indexes])
            for column in (self._opcodes, self._first_bytes)
        )
        return Stretch(data, starts, ends, opcodes, key_sizes, extras_sizes, firsts, None)

    def fold(
        self,
        newest: dict[bytes, int],
        data: bytes,
        low_seqno: int,
        high_seqno: int,
        time_ns: int | None,
    ) -> int:
        """Apply the changes in (low, high] to `newest`, up to `time_ns`.

        Return the first seqno later than `time_ns`, or 0 if there is none.
        """
        starts = self._starts
        is_early = True
        if time_ns is not None:
            all_cas = [cas for cas, _ in map(_CAS_SEQNO.unpack_from, repeat(data), starts)]
            is_early = time_ns_from_cas(max(all_cas)) <= time_ns
        if (
            is_early
            and _SYSTEM_EVENT not in self._opcodes
            and self.is_within(low_seqno, high_seqno)
        ):
            # The common case. The loop below does the same, change by change.
            newest.update(zip(self._keys(data), self._seqnos, strict=True))
            return 0
        rows = zip(self._seqnos, self._opcodes, self._keys(data), strict=True)
        for index, (seqno, opcode, key) in enumerate(rows):
            if low_seqno < seqno <= high_seqno:
                if (
                    not is_early
                    and time_ns is not None
                    and time_ns_from_cas(all_cas[index]) > time_ns
                ):
                    return int(seqno)
                if opcode == _SYSTEM_EVENT:
                    _apply_event(newest, data[starts[index] : self._ends[index]])
                else:
                    newest[key] = seqno
        return 0

    def _keys(self, data: bytes) -> list[bytes]:
        if _LOOPS is not None:
            section = self._section
            keys = _LOOPS.keys(data, section.offset, section.offset + section.size_bytes)
            if keys is not None:
                return keys
        return [
            data[(at := start + HEADER_BYTES + extras) : at + size]
            for start, extras, size in zip(
                self._starts, self._extras_sizes, self._key_sizes, strict=True
            )
        ]


def _apply_event(newest: dict[bytes, int], frame: bytes) -> None:
    """If a frame drops a collection, remove its keys."""
    key_at = HEADER_BYTES + frame[4]
    value_at = key_at + int.from_bytes(frame[2:4], "big")
    _, kind, version = SYSTEM_EVENT_EXTRAS.unpack_from(frame, HEADER_BYTES)
    try:
        event = parse_system_event(kind, version, frame[key_at:value_at], frame[value_at:])
    except ValueError:
        return  # an unknown kind of event: it drops nothing that this version knows
    if event.kind == SystemEventKind.DROP_COLLECTION:
        gone = [key for key in newest if collection_of(key) == event.collection_id]
        for key in gone:
            del newest[key]
