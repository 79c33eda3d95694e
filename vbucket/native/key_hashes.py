"""Hashes of documents, summed up in buckets: equal sums mean equal documents. Pure.

A document's hash is over its key (without the collection), its CAS and its revision. The hash of a
bucket is the sum of those of its documents, modulo 2^64, so it does not depend on their order, and
a document is added or taken out without the others. The first bits of the hash of a key say which
bucket is its own. So the sums of a table with fewer bits are sums of neighbours: a table of buckets
is the lowest level of a tree, and `at` gives the levels above it.

    fold(a, b)         the low and the high half of the product a * b, XORed
    state              K0 ^ length of the key; for each 8 bytes of the key, little-endian, the last
                       ones filled up with zeros: state = fold(state ^ word, K1)
    hash of a key      fold(state ^ K3, K2)
    of a document      fold(fold(hash of the key ^ CAS, K1) ^ revision, K3)

Two contents that differ have the same hash of a bucket by chance about once in 2^64. It is no
protection against somebody who looks for two such contents.

Who calls it: the store, which keeps such tables, and clients, which compare them with their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import ne
from struct import Struct
from typing import Final, NamedTuple

from vbucket.native import hash_loops

LOOPS: Final = hash_loops()
BITS_MAX: Final = 12
"""4,096 buckets of 8 bytes. A partition of more than 98,304 documents has larger buckets."""
BUCKET_DOCUMENTS: Final = 24
"""If there are more in each bucket, on average, all documents are counted again, into a table with
4 times the buckets. So a document is counted again 1.3 times in its life at most, on average."""
_BITS_STEP: Final = 2
_K0: Final = 0xA0761D6478BD642F
_K1: Final = 0xE7037ED1A0B428DB
_K2: Final = 0x8EBC6AF09C88C6E3
_K3: Final = 0x589965CC75374CC3
_MASK: Final = 2**64 - 1
_U64: Final = Struct(">Q")

Row = tuple[bytes, bytes]
"""Key and value of a row that has a document's CAS and revision."""


class RowForm(NamedTuple):
    """Where a row has what is hashed."""

    prefix_at: int
    prefix: bytes
    """What a key of the collection has there. The logical key follows it."""
    cas_at: int
    rev_at: int
    """In the value: both are big-endian, of 8 bytes."""
    opcode: int = -1
    """The first byte of the value of a document; -1: each row is one."""

    @property
    def stop(self) -> bytes:
        """The least key that comes after all keys with the prefix, which is not empty."""
        return self.prefix[:-1] + bytes([self.prefix[-1] + 1])


def hash_of_key(key: bytes) -> int:
    """Return the hash of a logical key."""
    state = _K0 ^ len(key)
    for at in range(0, len(key), 8):
        product = (state ^ int.from_bytes(key[at : at + 8], "little")) * _K1
        state = (product ^ product >> 64) & _MASK
    product = (state ^ _K3) * _K2
    return (product ^ product >> 64) & _MASK


def hash_of_document(key_hash: int, cas: int, rev_seqno: int) -> int:
    """Return the hash of a document; `key_hash` is that of its key."""
    product = (key_hash ^ cas) * _K1
    product = ((product ^ product >> 64) & _MASK ^ rev_seqno) * _K3
    return (product ^ product >> 64) & _MASK


def bits_for(documents: int) -> int:
    """Return how many bits a table of so many documents has: an even number up to BITS_MAX."""
    bits = 0
    while bits < BITS_MAX and documents > BUCKET_DOCUMENTS << bits:
        bits += _BITS_STEP
    return bits


class KeyHashes:
    """The sums of one collection's documents: 2^bits of them, as u64, big-endian."""

    __slots__ = ("bits", "documents", "sums")

    def __init__(self, bits: int = 0, documents: int = 0, sums: bytes = b"") -> None:
        if bits > BITS_MAX:
            raise ValueError(f"{bits} bits, above {BITS_MAX}")
        self.bits = bits
        self.documents = documents
        self.sums = bytearray(sums or 8 << bits)
        if len(self.sums) != 8 << bits:
            raise ValueError(f"{len(self.sums)} bytes are no sums of {bits} bits")

    def __eq__(self, other: object) -> bool:
        """Whether both stand for the same documents, as far as the one with fewer bits tells."""
        if not isinstance(other, KeyHashes):
            return NotImplemented
        bits = min(self.bits, other.bits)
        return self.documents == other.documents and self.at(bits) == other.at(bits)

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_small(self) -> bool:
        """Whether so many documents should have more buckets."""
        return self.bits < bits_for(self.documents)

    @property
    def is_much_too_small(self) -> bool:
        """Whether they should have 16 times the buckets, or more."""
        return self.bits + _BITS_STEP < bits_for(self.documents)

    def change(self, removed: list[Row], added: list[Row], form: RowForm) -> None:
        """Take documents out and add others. Rows that are no documents of `form` do not count."""
        self.documents += self._add(added, form, 1) - self._add(removed, form, -1)

    def at(self, bits: int) -> bytes:
        """Return the sums of a level of the tree with at most as many bits."""
        if bits == self.bits:
            return bytes(self.sums)
        sums = [sum_ for (sum_,) in _U64.iter_unpack(self.sums)]
        width = 1 << self.bits - bits
        parts = (sum(sums[at : at + width]) & _MASK for at in range(0, len(sums), width))
        return b"".join(map(_U64.pack, parts))

    def _add(self, rows: list[Row], form: RowForm, sign: int) -> int:
        if LOOPS is not None:
            return LOOPS.add(self.sums, self.bits, rows, sign, *form)
        sums, count = self.sums, 0
        for bucket, hash_ in _hashes(rows, form, self.bits):
            (before,) = _U64.unpack_from(sums, 8 * bucket)
            _U64.pack_into(sums, 8 * bucket, (before + sign * hash_) & _MASK)
            count += 1
        return count


def rows_of_buckets(rows: list[Row], form: RowForm, bits: int, wanted: bytes) -> list[Row]:
    """Return the rows of documents in some buckets: `wanted` has a byte, 0 or 1, for each."""
    if LOOPS is not None:
        return LOOPS.within(wanted, bits, rows, *form)
    return [row for row in rows for bucket, _ in _hashes([row], form, bits) if wanted[bucket]]


def differing(mine: bytes, other: bytes) -> bytes:
    """Return a byte for each bucket of two levels with the same bits: 1 if the sums differ."""
    return bytes(map(ne, memoryview(mine).cast("Q"), memoryview(other).cast("Q")))


def _hashes(rows: list[Row], form: RowForm, bits: int) -> Iterable[tuple[int, int]]:
    """Yield bucket and hash of each document among some rows."""
    start = form.prefix_at + len(form.prefix)
    least = max(form.cas_at, form.rev_at) + 8
    for key, value in rows:
        if key[form.prefix_at : start] != form.prefix or len(value) < least:
            continue
        if form.opcode >= 0 and value[0] != form.opcode:
            continue
        key_hash = hash_of_key(key[start:])
        (cas,), (rev,) = _U64.unpack_from(value, form.cas_at), _U64.unpack_from(value, form.rev_at)
        yield key_hash >> 64 - bits, hash_of_document(key_hash, cas, rev)
