"""Many stored frames of one partition, from one packet: read, checked, made to entries. Pure.

    value   frame, frame, ...   DCP_MUTATION, DCP_DELETION, DCP_EXPIRATION as streams send them

Key, value, flags, expiry, datatype, revision and CAS of a frame count; seqno and opaque do not: a
change gets the next seqno of the partition that it comes into.

Who calls it: the session reads and checks, the engine applies. Nothing that a client says of
lengths is believed: either every frame is sound, or none is taken (`MalformedFramesError`).

The fields of all frames are taken as columns, by calls that C makes for each frame; only packets
in which a check fails, or with removals, are looked at frame by frame.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from itertools import repeat
from operator import itemgetter, sub
from struct import Struct
from typing import Final, NamedTuple

from dcp.wire.frame import HEADER_BYTES, MAX_KEY_BYTES
from dcp.wire.message import PUT_FRAMES_MAX
from dcp.wire.opcode import Opcode
from vbucket.entry import (
    DELETION_ENTRY,
    DELETION_EXTRAS_BYTES,
    EXPIRATION_ENTRY,
    EXPIRATION_EXTRAS_BYTES,
    MUTATION_EXTRAS_BYTES,
    PREFIX,
)
from vbucket.manifest import DEFAULT_COLLECTION, decode_leb128

REV_SEQNO_MAX: Final = 2**48 - 1
CAS_MAX: Final = 2**63 - 1
"""A revision has 48 bits and a CAS 63, so that neither the next revision nor the next CAS of the
partition overflows."""
DATATYPE_MAX: Final = 0x01
"""JSON, the one datatype that is kept."""

_MUTATION: Final = int(Opcode.DCP_MUTATION)
_DELETION: Final = int(Opcode.DCP_DELETION)
_EXPIRATION: Final = int(Opcode.DCP_EXPIRATION)
_MAGIC: Final = 0x80
_DELETION_V2_EXTRAS_BYTES: Final = 21
_EXTRAS_BYTES: Final[dict[int, frozenset[int]]] = {
    _MUTATION: frozenset({MUTATION_EXTRAS_BYTES}),
    _DELETION: frozenset({DELETION_EXTRAS_BYTES, _DELETION_V2_EXTRAS_BYTES}),
    _EXPIRATION: frozenset({EXPIRATION_EXTRAS_BYTES}),
}

_ROW: Final = Struct(">BBHBBHI4xQ8xQ4xI7s")
"""Magic, opcode, key length, extras length, datatype, vbucket, body length, CAS, revision, expiry,
what follows it in a mutation's extras. Of a removal the last two mean nothing."""
_BODY: Final = 6
_PAD: Final = bytes(_ROW.size)
_NO_TAIL: Final = bytes(7)
_KEY_AT: Final = HEADER_BYTES + MUTATION_EXTRAS_BYTES
_KEY_BYTES_MAX: Final = MAX_KEY_BYTES + 1
"""As for every other command: the default collection's id and the longest key."""
_DATATYPE_AT: Final = 5
_TIME_AT: Final = 40
_OPAQUE_AT: Final = 12
_DEFAULT: Final = frozenset({DEFAULT_COLLECTION})
_put_opaque_cas_seqno: Final = Struct(">IQQ").pack_into
_pack_prefix: Final = PREFIX.pack
_unpack_row: Final = _ROW.unpack_from


class MalformedFramesError(Exception):
    """What came are no frames that can be stored; the text says which one, and why."""


class Row(NamedTuple):
    """The fields of `_ROW`."""

    magic: int
    opcode: int
    key_bytes: int
    extras_bytes: int
    datatype: int
    vb_id: int
    body_bytes: int
    cas: int
    rev_seqno: int
    expiry: int
    tail: bytes


class Frames:
    """Sound frames of one partition, as columns."""

    __slots__ = (
        "_buffer", "cas", "datatypes", "ends", "expiries", "has_default_keys_only", "keys",
        "opcodes", "removals", "rev_seqnos", "starts", "vb_id",
    )  # fmt: skip

    def __init__(self, data: bytes, vb_id: int) -> None:
        """Raises MalformedFramesError."""
        self.vb_id = vb_id
        self._buffer = buffer = bytearray(data)
        buffer += _PAD
        end = len(data)
        rows: list[tuple[int, int, int, int, int, int, int, int, int, int, bytes]] = []
        starts: list[int] = []
        at = 0
        for _ in range(PUT_FRAMES_MAX + 1):
            if at >= end:
                break
            row = _unpack_row(buffer, at)
            rows.append(row)
            starts.append(at)
            at += HEADER_BYTES + row[_BODY]
        if len(rows) > PUT_FRAMES_MAX:
            raise MalformedFramesError(f"a packet has at most {PUT_FRAMES_MAX} frames")
        if at != end or not rows:
            what = f"frame {len(rows) - 1} is cut short" if rows else "there is no frame"
            raise MalformedFramesError(what)
        self.starts: Sequence[int] = starts
        self.ends: Sequence[int] = [*starts[1:], end]
        (
            magics, self.opcodes, key_sizes, extras_sizes, self.datatypes, vb_ids, bodies, self.cas,
            self.rev_seqnos, self.expiries, tails,
        ) = zip(*rows, strict=True)  # fmt: skip
        is_plain = (
            set(self.opcodes) == {_MUTATION}
            and set(magics) == {_MAGIC}
            and set(extras_sizes) == {MUTATION_EXTRAS_BYTES}
            and set(vb_ids) == {vb_id}
            and set(tails) == {_NO_TAIL}
            and min(map(sub, bodies, key_sizes)) >= MUTATION_EXTRAS_BYTES
            and min(key_sizes) > 1
            and max(key_sizes) <= _KEY_BYTES_MAX
            and max(self.datatypes) <= DATATYPE_MAX
            and min(self.cas) > 0
            and max(self.cas) <= CAS_MAX
            and min(self.rev_seqnos) > 0
            and max(self.rev_seqnos) <= REV_SEQNO_MAX
        )
        self.removals: list[int] = []
        """Which of them are no mutations."""
        if is_plain:
            self.keys: Sequence[bytes] = [
                data[(at := start + _KEY_AT) : at + size]
                for start, size in zip(starts, key_sizes, strict=True)
            ]
        else:
            for index, row in enumerate(rows):
                problem = _problem_of(Row(*row), vb_id)
                if problem:
                    raise MalformedFramesError(f"frame {index}, at byte {starts[index]}: {problem}")
                if row[1] != _MUTATION:
                    self.removals.append(index)
            self.keys = [
                data[(at := start + HEADER_BYTES + extras) : at + size]
                for start, extras, size in zip(starts, extras_sizes, key_sizes, strict=True)
            ]
        self.has_default_keys_only = _DEFAULT.issuperset(map(itemgetter(0), self.keys))
        if not self.has_default_keys_only:
            self._check_collections()

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.keys)

    def _check_collections(self) -> None:
        for index, key in enumerate(self.keys):
            decoded = decode_leb128(key)
            if decoded is None or decoded[1] == len(key):
                what = "no collection id and key after it"
                raise MalformedFramesError(f"frame {index}: {what}: {key[:8].hex()}")

    def only(self, indexes: Sequence[int]) -> Frames:
        """Return some of them, in this order."""
        some = copy(self)
        for name in (
            "starts", "ends", "keys", "opcodes", "datatypes", "cas", "rev_seqnos", "expiries",
        ):  # fmt: skip
            column = getattr(self, name)
            setattr(some, name, [column[index] for index in indexes])
        some.removals = [at for at, opcode in enumerate(some.opcodes) if opcode != _MUTATION]
        return some

    def forget_datatypes(self) -> None:
        """What came without the feature JSON is not known to be any."""
        for start, datatype in zip(self.starts, self.datatypes, strict=True):
            if datatype:
                self._buffer[start + _DATATYPE_AT] = 0

    def entries(
        self, first_seqno: int, prev_seqnos: Iterable[int] | None, epoch: int
    ) -> list[bytes]:
        """Return them as entries with consecutive seqnos; `prev_seqnos` None: all keys are new."""
        count = len(self)
        seqnos = range(first_seqno, first_seqno + count)
        buffer, starts, ends = self._buffer, self.starts, self.ends
        with memoryview(buffer) as whole, whole[_OPAQUE_AT:] as view:
            deque(
                map(_put_opaque_cas_seqno, repeat(view), starts, repeat(0), self.cas, seqnos),
                maxlen=0,
            )
        data = bytes(buffer)
        if prev_seqnos is None:
            prev_seqnos = repeat(0, count)
            prefix = _pack_prefix(0, epoch)
            entries = [prefix + data[at:end] for at, end in zip(starts, ends, strict=True)]
        else:
            prev_seqnos = list(prev_seqnos)
            entries = [
                _pack_prefix(prev, epoch) + data[at:end]
                for prev, at, end in zip(prev_seqnos, starts, ends, strict=True)
            ]
        if self.removals:
            before = list(prev_seqnos)
            for index in self.removals:
                time_at = starts[index] + _TIME_AT
                time_s = int.from_bytes(data[time_at : time_at + 4], "big")
                entries[index] = self._removal(index, before[index], epoch, seqnos[index], time_s)
        return entries

    def _removal(self, index: int, prev_seqno: int, epoch: int, seqno: int, time_s: int) -> bytes:
        """Return the stored form: a stream's deletions may carry a time, which is their CAS's."""
        key, cas, rev_seqno = self.keys[index], self.cas[index], self.rev_seqnos[index]
        if self.opcodes[index] == _DELETION:
            head = DELETION_ENTRY.pack(
                prev_seqno, epoch, _MAGIC, _DELETION, len(key), DELETION_EXTRAS_BYTES, 0,
                self.vb_id, DELETION_EXTRAS_BYTES + len(key), 0, cas, seqno, rev_seqno, 0,
            )  # fmt: skip
        else:
            head = EXPIRATION_ENTRY.pack(
                prev_seqno, epoch, _MAGIC, _EXPIRATION, len(key), EXPIRATION_EXTRAS_BYTES, 0,
                self.vb_id, EXPIRATION_EXTRAS_BYTES + len(key), 0, cas, seqno, rev_seqno, time_s,
            )  # fmt: skip
        return head + key


def _problem_of(row: Row, vb_id: int) -> str:
    """Return what is wrong with a frame in words, "" if nothing is."""
    if row.magic != _MAGIC or row.opcode not in _EXTRAS_BYTES:
        return f"magic 0x{row.magic:02x} and opcode 0x{row.opcode:02x} are no change of a document"
    if row.extras_bytes not in _EXTRAS_BYTES[row.opcode]:
        return f"{row.extras_bytes} bytes of extras do not fit opcode 0x{row.opcode:02x}"
    if row.vb_id != vb_id:
        return f"it is of vbucket {row.vb_id}, the packet of {vb_id}"
    if not 1 < row.key_bytes <= _KEY_BYTES_MAX:
        return f"a key has 2 to {_KEY_BYTES_MAX} bytes with its collection id, not {row.key_bytes}"
    value_bytes = row.body_bytes - row.extras_bytes - row.key_bytes
    is_removal = row.opcode != _MUTATION
    if value_bytes < 0 or (is_removal and value_bytes):
        return f"a body of {row.body_bytes} bytes does not fit its extras and key"
    if row.datatype > DATATYPE_MAX:
        return f"datatype 0x{row.datatype:02x} was not negotiated"
    if not is_removal and row.tail != _NO_TAIL:
        return "lock time, nmeta and nru are 0 in what is stored"
    if not 0 < row.rev_seqno <= REV_SEQNO_MAX:
        return f"a revision is 1 to {REV_SEQNO_MAX}, not {row.rev_seqno}"
    if not 0 < row.cas <= CAS_MAX:
        return f"a CAS to keep is 1 to {CAS_MAX}, not {row.cas}"
    return ""
