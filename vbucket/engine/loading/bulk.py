"""Reads many stored frames of one partition from one packet, checks them, makes entries. Pure.

    value   u32 body length of each frame, then the frames: DCP_MUTATION, DCP_DELETION and
            DCP_EXPIRATION as streams send them

Key, value, flags, expiry, datatype, revision and CAS of a frame are kept. Seqno and opaque are
ignored: a change gets the next seqno of the partition.

Who calls it: the session reads and checks, the engine applies. All lengths are checked. If one
frame is malformed, the whole packet is refused (`MalformedFramesError`).

The table of lengths locates the frames without parsing each. The heads of mutations have one length
and are joined. So one field of all of them is a slice with a stride, and one comparison checks it.
Removals are checked one by one.

**Expiries.** A collection's maxTTL bounds the life of each document that is stored in it, from now
on. kv_engine applies it to SET_WITH_META, too (engines/ep/src/collections, `processExpiryTime`): an
expiry of 0, or a later one than allowed, becomes now + maxTTL. `limit_expiries` does that to a
packet before it is checked and stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import sub
from struct import Struct, pack, unpack, unpack_from
from typing import TYPE_CHECKING, Final, NamedTuple

from dcp.wire.frame import HEADER_BYTES, MAX_KEY_BYTES
from dcp.wire.message import CAS_SPECIAL, PUT_FRAMES_MAX, U32, U64
from dcp.wire.opcode import Opcode
from dcp.wire.xattrs import DATATYPE_XATTR, body_at, problem_of
from vbucket.model.entry import (
    DELETION_ENTRY,
    DELETION_EXTRAS_BYTES,
    EXPIRATION_ENTRY,
    EXPIRATION_EXTRAS_BYTES,
    META,
    MUTATION_EXTRAS_BYTES,
    PREFIX,
    PREFIX_BYTES,
)
from vbucket.model.manifest import decode_leb128

if TYPE_CHECKING:  # the store process takes frames from here, and no engine
    from vbucket.engine.partition import Partition
    from vbucket.engine.versions import Versions

REV_SEQNO_MAX: Final = 2**48 - 1
"""The highest revision, as in kv_engine: a change of a document that has it does not raise it."""
_DATATYPES: Final = bytes((0, 1, DATATYPE_XATTR, 1 | DATATYPE_XATTR))
"""JSON and XATTR, the bits of a datatype that are kept."""

_WITHOUT_XATTRS: Final = bytes((0, 1))
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
_NO_TAIL: Final = bytes(7)
_KEY_AT: Final = HEADER_BYTES + MUTATION_EXTRAS_BYTES
_HEAD_BYTES: Final = _KEY_AT + 1
"""What is looked at in a mutation: header, extras, and the byte that its collection's id begins
with. A mutation is never shorter."""
_STRIDE: Final = PREFIX_BYTES + _HEAD_BYTES
"""From one head to the next in entries."""
_KEY_BYTES_MAX: Final = MAX_KEY_BYTES + 1
"""As for every other command: the default collection's id and the longest key."""
_OPCODE_AT: Final = 1
_KEY_SIZE_AT: Final = 3
"""The second byte: keys are short."""
_DATATYPE_AT: Final = 5
_BODY_AT: Final = 8
_OPAQUE_AT: Final = 12
_CAS_AT: Final = 16
_SEQNO_AT: Final = 24
_REV_SEQNO_AT: Final = 32
_REV_SEQNO_HIGH_BYTES: Final = 2
"""Of its eight bytes: not 0 in a revision above the highest."""
_EXPIRY_AT: Final = 44
_TAIL_AT: Final = 48
_TIME_AT: Final = 40
"""Of an expiration."""
_ALIKE: Final = (
    (0, _MAGIC), (1, _MUTATION), (2, 0), (4, MUTATION_EXTRAS_BYTES),
    *((_REV_SEQNO_AT + at, 0) for at in range(_REV_SEQNO_HIGH_BYTES)),
    *((at, 0) for at in range(_TAIL_AT, _KEY_AT)),
)  # fmt: skip
"""Bytes that are the same in all heads, and what they are: keys are short, revisions have 48 bits,
nothing is behind the expiry. The partition's bytes come to them."""
_pack_prefix: Final = PREFIX.pack


class MalformedFramesError(Exception):
    """The packet has a frame that cannot be stored; the text says which one and why."""


class BulkRow(NamedTuple):
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
        "_ends", "_heads", "_starts", "_tails", "_value", "cas", "datatypes", "expiries",
        "has_default_keys_only", "keys", "opcodes", "removals", "vb_id",
    )  # fmt: skip

    def __init__(
        self,
        value: bytes,
        count: int,
        vb_id: int,
        *,
        fits_meta: bool = False,
        takes_xattrs: bool = False,
    ) -> None:
        """`fits_meta`: revisions that are too high become the highest. Raises
        MalformedFramesError.
        """
        self.vb_id = vb_id
        self._value = value
        body_sizes = _table(value, count)
        edges = list(
            accumulate([size + HEADER_BYTES for size in body_sizes], initial=count * U32.size)
        )
        if edges[-1] != len(value):
            said, there = edges[-1] - edges[0], len(value) - edges[0]
            raise MalformedFramesError(f"frames of {said} bytes are announced, {there} are there")
        self._ends: Sequence[int] = edges[1:]
        edges.pop()
        self._starts: Sequence[int] = edges
        heads = [value[at : at + _HEAD_BYTES] for at in edges]
        if len(heads[-1]) < _HEAD_BYTES:
            # Removals at the end may be shorter. Heads of removals reach into what follows.
            heads = [head.ljust(_HEAD_BYTES, b"\0") for head in heads]
        joined = b"".join(heads)
        high = (joined[_REV_SEQNO_AT + at :: _HEAD_BYTES] for at in range(_REV_SEQNO_HIGH_BYTES))
        if fits_meta and any(map(any, high)):
            heads = [_fitting(head) for head in heads]
            joined = b"".join(heads)
        self._heads: Sequence[bytes] = heads
        self.opcodes: Sequence[int] = joined[_OPCODE_AT::_HEAD_BYTES]
        self.datatypes: bytes = joined[_DATATYPE_AT::_HEAD_BYTES]
        self.removals: Sequence[int] = _removals_of(self.opcodes)
        """Which of them are no mutations."""
        self._tails: Sequence[bytes] = ()
        """The XATTRs of removals, b"" for all others; empty: no removal has any."""
        self.keys: Sequence[bytes]
        self.cas: Sequence[int]
        self.expiries: Sequence[int]
        """Of mutations; empty: none has any."""
        self.has_default_keys_only: bool
        if self.removals:
            self._take_mixed(body_sizes)
            self.has_default_keys_only = not any(key[0] for key in self.keys)
        else:
            found = _mutations(value, vb_id, joined, edges, body_sizes)
            if found is None:
                raise self._malformed(body_sizes)
            self.keys, self.cas, self.expiries = found
            self.has_default_keys_only = not any(joined[_KEY_AT::_HEAD_BYTES])
        if not self.has_default_keys_only:
            self._check_collections()
        if self.datatypes.translate(None, _WITHOUT_XATTRS):
            self._check_xattrs(takes_xattrs=takes_xattrs)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.keys)

    @property
    def rev_seqnos(self) -> Sequence[int]:
        """Return the revisions; only conflicts need them."""
        return _numbers(b"".join(self._heads), _REV_SEQNO_AT, len(self))

    def _take_mixed(self, body_sizes: Sequence[int]) -> None:
        """Read mutations as columns and removals one by one. Raises MalformedFramesError."""
        value, count = self._value, len(body_sizes)
        keys, cas, expiries = [b""] * count, [0] * count, [0] * count
        chosen = [at for at, opcode in enumerate(self.opcodes) if opcode == _MUTATION]
        if chosen:
            found = _mutations(
                value, self.vb_id, b"".join([self._heads[at] for at in chosen]),
                [self._starts[at] for at in chosen], [body_sizes[at] for at in chosen],
            )  # fmt: skip
            if found is None:
                raise self._malformed(body_sizes)
            for at, key, of_key in zip(chosen, found[0], found[1], strict=True):
                keys[at], cas[at] = key, of_key
            for at, expiry in zip(chosen, found[2], strict=False):
                expiries[at] = expiry
        for at in self.removals:
            row = self._row(at)
            if row.body_bytes != body_sizes[at] or _problem_of(row, self.vb_id):
                raise self._malformed(body_sizes)
            key_at = self._starts[at] + HEADER_BYTES + row.extras_bytes
            keys[at], cas[at] = value[key_at : key_at + row.key_bytes], row.cas
            if row.datatype & DATATYPE_XATTR:
                tails = list(self._tails) or [b""] * count
                tails[at] = value[key_at + row.key_bytes : self._ends[at]]
                self._tails = tails
        # Removals have nothing behind a mutation's head.
        removals = set(self.removals)
        self._starts = [
            -_HEAD_BYTES if at in removals else start for at, start in enumerate(self._starts)
        ]
        self._ends = [0 if at in removals else end for at, end in enumerate(self._ends)]
        self.keys, self.cas, self.expiries = keys, cas, expiries

    def _row(self, index: int) -> BulkRow:
        return BulkRow(*_ROW.unpack(self._heads[index][: _ROW.size]))

    def _malformed(self, body_sizes: Sequence[int]) -> MalformedFramesError:
        """Return what is wrong with the first frame that is not sound."""
        for index, body_bytes in enumerate(body_sizes):
            row = self._row(index)
            problem = _problem_of(row, self.vb_id)
            if row.body_bytes != body_bytes:
                problem = f"its body has {row.body_bytes} bytes, {body_bytes} are announced"
            if problem:
                where = f"frame {index}, at byte {self._starts[index]}"
                return MalformedFramesError(f"{where}: {problem}")
        raise AssertionError("every check of all frames is one of a single frame")

    def _check_collections(self) -> None:
        for index, key in enumerate(self.keys):
            decoded = decode_leb128(key)
            if decoded is None or decoded[1] == len(key):
                what = "no collection id and key after it"
                raise MalformedFramesError(f"frame {index}: {what}: {key[:8].hex()}")

    def _check_xattrs(self, *, takes_xattrs: bool) -> None:
        """Raise MalformedFramesError if XATTRs are not sound, or not expected."""
        for index, datatype in enumerate(self.datatypes):
            if not datatype & DATATYPE_XATTR:
                continue
            if self.opcodes[index] == _MUTATION:
                value_at = self._starts[index] + _KEY_AT + len(self.keys[index])
                value = self._value[value_at : self._ends[index]]
            else:
                value = self._tails[index]
            problem = problem_of(value)
            if not takes_xattrs:
                problem = "it has XATTRs, which were not negotiated (HELLO 0x06)"
            elif not problem and self.opcodes[index] != _MUTATION and body_at(value) != len(value):
                problem = "a removal has XATTRs and no body"
            if problem:
                raise MalformedFramesError(f"frame {index}: {problem}")

    def only(self, indexes: Sequence[int]) -> Frames:
        """Keep these of them, in this order, and forget the others; return itself."""
        self._starts = [self._starts[index] for index in indexes]
        self._ends = [self._ends[index] for index in indexes]
        self._heads = [self._heads[index] for index in indexes]
        self.opcodes = bytes([self.opcodes[index] for index in indexes])
        self.datatypes = bytes([self.datatypes[index] for index in indexes])
        if self._tails:
            self._tails = [self._tails[index] for index in indexes]
        self.keys = [self.keys[index] for index in indexes]
        self.cas = [self.cas[index] for index in indexes]
        if self.expiries:
            self.expiries = [self.expiries[index] for index in indexes]
        self.removals = _removals_of(self.opcodes)
        return self

    def replace_cas(self, replacements: Mapping[int, int]) -> None:
        """Give some of them, by index, another CAS."""
        heads, cas = list(self._heads), list(self.cas)
        for index, new in replacements.items():
            head = heads[index]
            heads[index] = head[:_CAS_AT] + U64.pack(new) + head[_SEQNO_AT:]
            cas[index] = new
        self._heads, self.cas = heads, cas

    def entries(
        self, first_seqno: int, prev_seqnos: Sequence[int] | None, epoch: int
    ) -> list[bytes]:
        """Return them as entries with consecutive seqnos; `prev_seqnos` None: all keys are new."""
        count, value = len(self), self._value
        prefix = _pack_prefix(0, epoch)
        stored = bytearray(prefix + prefix.join(self._heads))
        _put_numbers(stored, PREFIX_BYTES + _SEQNO_AT, range(first_seqno, first_seqno + count))
        for at in range(_OPAQUE_AT, _CAS_AT):
            stored[PREFIX_BYTES + at :: _STRIDE] = bytes(count)
        if prev_seqnos is not None:
            _put_numbers(stored, 0, prev_seqnos)
        heads = unpack(f"{_STRIDE}s" * count, stored)
        entries = [
            head + value[start + _HEAD_BYTES : end]
            for head, start, end in zip(heads, self._starts, self._ends, strict=True)
        ]
        for index in self.removals:
            prev_seqno = prev_seqnos[index] if prev_seqnos is not None else 0
            entries[index] = self._removal(index, prev_seqno, epoch, first_seqno + index)
        return entries

    def _removal(self, index: int, prev_seqno: int, epoch: int, seqno: int) -> bytes:
        """Return the stored form of a removal, without the time of a stream's deletion."""
        key, cas = self.keys[index], self.cas[index]
        body = key + self._tails[index] if self._tails else key
        datatype = DATATYPE_XATTR if len(body) > len(key) else 0
        rev_seqno: int = U64.unpack_from(self._heads[index], _REV_SEQNO_AT)[0]
        if self.opcodes[index] == _DELETION:
            head = DELETION_ENTRY.pack(
                prev_seqno, epoch, _MAGIC, _DELETION, len(key), DELETION_EXTRAS_BYTES,
                datatype, self.vb_id, DELETION_EXTRAS_BYTES + len(body), 0, cas, seqno,
                rev_seqno, 0,
            )  # fmt: skip
        else:
            time_s: int = U32.unpack_from(self._heads[index], _TIME_AT)[0]
            head = EXPIRATION_ENTRY.pack(
                prev_seqno, epoch, _MAGIC, _EXPIRATION, len(key), EXPIRATION_EXTRAS_BYTES,
                datatype, self.vb_id, EXPIRATION_EXTRAS_BYTES + len(body), 0, cas, seqno,
                rev_seqno, time_s,
            )  # fmt: skip
        return head + body


def _table(value: bytes, count: int) -> Sequence[int]:
    """Return the body length of each frame."""
    if not 0 < count <= PUT_FRAMES_MAX:
        raise MalformedFramesError(f"a packet has 1 to {PUT_FRAMES_MAX} frames, not {count}")
    if len(value) < count * U32.size:
        raise MalformedFramesError(f"{len(value)} bytes are no table of {count} lengths")
    return unpack_from(f">{count}I", value)


def _mutations(
    value: bytes, vb_id: int, heads: bytes, starts: Sequence[int], body_sizes: Sequence[int]
) -> tuple[list[bytes], Sequence[int], Sequence[int]] | None:
    """Return keys, CAS and expiries (empty: none has any); None where a frame is not sound."""
    count = len(starts)
    key_sizes = heads[_KEY_SIZE_AT::_HEAD_BYTES]
    cas = _numbers(heads, _CAS_AT, count)
    sizes = pack(f">{count}I", *body_sizes)
    is_sound = (
        all(
            heads[at::_HEAD_BYTES] == bytes((byte,)) * count
            for at, byte in (*_ALIKE, (6, vb_id >> 8), (7, vb_id & 0xFF))
        )
        and all(
            heads[_BODY_AT + at :: _HEAD_BYTES] == sizes[at :: U32.size] for at in range(U32.size)
        )
        and not heads[_DATATYPE_AT::_HEAD_BYTES].translate(None, _DATATYPES)
        and min(key_sizes) > 1
        and max(key_sizes) <= _KEY_BYTES_MAX
        and min(map(sub, body_sizes, key_sizes)) >= MUTATION_EXTRAS_BYTES
        and min(cas) > 0
        and max(cas) < CAS_SPECIAL
        # Low revisions mostly: none ends with a zero byte.
        and (
            0 not in heads[_REV_SEQNO_AT + 7 :: _HEAD_BYTES]
            or min(_numbers(heads, _REV_SEQNO_AT, count)) > 0
        )
    )
    if not is_sound:
        return None
    keys = [
        value[(at := start + _KEY_AT) : at + size]
        for start, size in zip(starts, key_sizes, strict=True)
    ]
    expiries: Sequence[int] = ()
    if any(heads[at::_HEAD_BYTES] != bytes(count) for at in range(_EXPIRY_AT, _TAIL_AT)):
        expiries = unpack(f">{count}I", _column(heads, _EXPIRY_AT, count, U32.size))
    return keys, cas, expiries


def _column(heads: bytes, at: int, count: int, size: int) -> bytearray:
    """Return a field of all heads, one after the other."""
    column = bytearray(size * count)
    for byte in range(size):
        column[byte::size] = heads[at + byte :: _HEAD_BYTES]
    return column


def _numbers(heads: bytes, at: int, count: int) -> Sequence[int]:
    return unpack(f">{count}Q", _column(heads, at, count, U64.size))


def _put_numbers(stored: bytearray, at: int, numbers: Sequence[int]) -> None:
    """Write a field of all entries' heads."""
    packed = pack(f">{len(numbers)}Q", *numbers)
    for byte in range(U64.size):
        stored[at + byte :: _STRIDE] = packed[byte :: U64.size]


def _fitting(head: bytes) -> bytes:
    """Return a head with the highest revision where it has a higher one."""
    rev_seqno: int = U64.unpack_from(head, _REV_SEQNO_AT)[0]
    if rev_seqno <= REV_SEQNO_MAX:
        return head
    return head[:_REV_SEQNO_AT] + U64.pack(REV_SEQNO_MAX) + head[_REV_SEQNO_AT + 8 :]


def _removals_of(opcodes: Sequence[int]) -> list[int]:
    if opcodes.count(_MUTATION) == len(opcodes):
        return []
    return [at for at, opcode in enumerate(opcodes) if opcode != _MUTATION]


def _problem_of(row: BulkRow, vb_id: int) -> str:
    """Return what is wrong with a frame in words, "" if nothing is."""
    if row.magic != _MAGIC or row.opcode not in _EXTRAS_BYTES:
        return f"magic 0x{row.magic:02x} and opcode 0x{row.opcode:02x} are no change of a document"
    if row.extras_bytes not in _EXTRAS_BYTES[row.opcode]:
        return f"{row.extras_bytes} bytes of extras do not fit opcode 0x{row.opcode:02x}"
    if row.vb_id != vb_id:
        return f"it is of partition {row.vb_id}, the packet of {vb_id}"
    if not 1 < row.key_bytes <= _KEY_BYTES_MAX:
        return f"a key has 2 to {_KEY_BYTES_MAX} bytes with its collection id, not {row.key_bytes}"
    value_bytes = row.body_bytes - row.extras_bytes - row.key_bytes
    is_removal = row.opcode != _MUTATION
    has_xattrs = bool(row.datatype & DATATYPE_XATTR)
    if value_bytes < 0 or (is_removal and bool(value_bytes) != has_xattrs):
        return f"a body of {row.body_bytes} bytes does not fit its extras and key"
    if row.datatype not in _DATATYPES:
        return f"datatype 0x{row.datatype:02x} was not negotiated"
    if not is_removal and row.tail != _NO_TAIL:
        return "lock time, nmeta and nru are 0 in what is stored"
    if not 0 < row.rev_seqno <= REV_SEQNO_MAX:
        return f"a revision is 1 to {REV_SEQNO_MAX}, not {row.rev_seqno}"
    if not 0 < row.cas < CAS_SPECIAL:
        return f"a document has no CAS {row.cas}"
    return ""


def limit_expiries(packet: bytes, count: int, latest: Mapping[int, int]) -> bytes:
    """Return the packet with no mutation that expires later than its collection allows.

    `latest` has, for each collection with a maxTTL, the latest expiry in Unix seconds. What is
    malformed stays as it is: whoever reads the packet next says what is wrong.
    """
    position = count * U32.size
    if not latest or not 0 < position <= len(packet):
        return packet
    limited = bytearray(packet)
    for body_bytes in unpack_from(f">{count}I", packet):
        end = position + HEADER_BYTES + body_bytes
        key_at = position + _KEY_AT
        if end > len(packet):
            break
        if packet[position + 1] == _MUTATION and key_at < end:
            decoded = decode_leb128(packet[key_at : key_at + 5])
            last = latest.get(decoded[0], 0) if decoded is not None else 0
            expiry = U32.unpack_from(packet, position + _EXPIRY_AT)[0]
            if last and not 0 < expiry <= last:
                U32.pack_into(limited, position + _EXPIRY_AT, last)
        position = end
    return bytes(limited)


# -- conflicts -------------------------------------------------------------------------------------

_unpack_meta: Final = META.unpack_from


def winners(
    versions: Versions,
    part: Partition,
    frames: Frames,
    *,
    cas_floor: int,
    cas_max: int,
    is_forced: bool,
) -> tuple[list[int], list[int], list[bool], dict[int, int]]:
    """Decide which frames win against what a partition has: those with a higher revision, or the
    same one and a higher CAS (kv_engine's conflict_resolution_mode seqno). Nothing is changed.

    Return the indexes of the frames that win, the seqno that each of these replaces, whether it
    replaces a document, and index -> new CAS for frames whose own is above `cas_max`. Such a CAS
    counts as 0 in a conflict. `is_forced`: all frames win.
    """
    below, newest = versions.meta_below, part.newest
    known: dict[bytes, tuple[int, int, int, int]] = {}
    indexes: list[int] = []
    prev_seqnos: list[int] = []
    live: list[bool] = []
    replaced: dict[int, int] = {}
    seqno, newest_cas = part.high_seqno, part.max_cas
    rows = zip(frames.keys, frames.opcodes, frames.rev_seqnos, frames.cas, strict=True)
    for index, (key, opcode, rev_seqno, own_cas) in enumerate(rows):
        old = known.get(key)
        if old is None:
            entry = newest.get(key)
            meta = _unpack_meta(entry) if entry else below(part, key, entry)
            old = (meta[0], meta[4], meta[5], meta[6])
        old_opcode, old_cas, prev_seqno, old_rev_seqno = old
        cas = own_cas if own_cas <= cas_max else 0
        if not is_forced and (rev_seqno, cas) <= (old_rev_seqno, old_cas):
            known[key] = old
            continue
        if not cas:
            replaced[index] = cas = max(cas_floor, newest_cas + 1)
        newest_cas = max(newest_cas, cas)
        seqno += 1
        known[key] = (opcode, cas, seqno, rev_seqno)
        indexes.append(index)
        prev_seqnos.append(prev_seqno)
        live.append(old_opcode == _MUTATION)
    return indexes, prev_seqnos, live, replaced


def are_new(part: Partition, keys: Sequence[bytes]) -> bool:
    """Return whether the keys are distinct and surely not in the partition."""
    if part.merged_seqno:
        return False
    distinct = set(keys)
    return len(distinct) == len(keys) and all(
        layer.newest.keys().isdisjoint(distinct) for layer in part.layers()
    )
