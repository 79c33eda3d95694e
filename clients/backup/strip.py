"""The frames of a section as columns: where each is, what it is, and its key. Pure.

    Strip      all frames of a section; without their bytes, which chunks have
    Stretch    those of them that are wanted, with their bytes

Nearly all frames are mutations, whose heads are of one length: these are joined, and a field of
all of them is a slice with a stride. Where that does not hold, frames are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from struct import Struct
from typing import Final, NamedTuple

from clients.backup.chunk import Section
from dcp.wire.frame import HEADER_BYTES
from dcp.wire.message import MUTATION_EXTRAS, SYSTEM_EVENT_EXTRAS
from dcp.wire.opcode import Opcode
from vbucket.model.ids import time_ns_from_cas
from vbucket.model.manifest import SystemEventKind, collection_of, parse_system_event

_BODY: Final = Struct(">8xI")
_KIND: Final = Struct(">xBHB")
"""Opcode, key length, extras length."""
_CAS_SEQNO: Final = Struct(">16xQQ")
_SYSTEM_EVENT: Final = int(Opcode.DCP_SYSTEM_EVENT)
_MUTATION: Final = int(Opcode.DCP_MUTATION)
_KEY_AT: Final = HEADER_BYTES + MUTATION_EXTRAS.size
_HEAD_BYTES: Final = _KEY_AT + 1
"""Header and extras of a mutation, and the first byte of its key, which is its collection's."""


class Stretch(NamedTuple):
    """Frames of one chunk, in seqno order, as columns."""

    data: bytes
    starts: Sequence[int]
    ends: Sequence[int]
    """Where in `data` each begins and ends."""
    opcodes: bytes
    key_sizes: Sequence[int]
    extras_sizes: Sequence[int]
    first_bytes: bytes
    """The byte that each key begins with, which is that of its collection's id."""
    body_sizes: Sequence[int] | None
    """Of frames between which nothing is left out."""


class Strip:
    """See the module."""

    __slots__ = (
        "_body_sizes", "_ends", "_extras_sizes", "_first_bytes", "_key_sizes", "_opcodes",
        "_section", "_seqnos", "_starts",
    )  # fmt: skip

    def __init__(self, data: bytes, section: Section) -> None:
        """`data`: the chunk, which was checked against its checksum."""
        self._section = section
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
        self._seqnos: Sequence[int] = range(section.first_seqno, section.last_seqno + 1)
        if len(self._seqnos) != len(starts):
            self._seqnos = [seqno for _, seqno in map(_CAS_SEQNO.unpack_from, repeat(data), starts)]
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

    def __len__(self) -> int:
        """Return how many frames there are."""
        return len(self._starts)

    def is_within(self, low_seqno: int, high_seqno: int) -> bool:
        """Whether all of it is in (low, high]."""
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
        """Note the changes in (low, high]; return the first seqno that is later than `time_ns`,
        or 0.
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
            # Mostly so; the loop below does the same, change by change.
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
        return [
            data[(at := start + HEADER_BYTES + extras) : at + size]
            for start, extras, size in zip(
                self._starts, self._extras_sizes, self._key_sizes, strict=True
            )
        ]


def _apply_event(newest: dict[bytes, int], frame: bytes) -> None:
    """Forget what was in a collection that is dropped."""
    key_at = HEADER_BYTES + frame[4]
    value_at = key_at + int.from_bytes(frame[2:4], "big")
    _, kind, version = SYSTEM_EVENT_EXTRAS.unpack_from(frame, HEADER_BYTES)
    try:
        event = parse_system_event(kind, version, frame[key_at:value_at], frame[value_at:])
    except ValueError:
        return  # of a kind that is not known here: it drops nothing that we know of
    if event.kind == SystemEventKind.DROP_COLLECTION:
        gone = [key for key in newest if collection_of(key) == event.collection_id]
        for key in gone:
            del newest[key]
