"""X_READ_HASHES: a client compares its documents with those of a partition. The bytes of it. Pure.

    request    extras u8 what, u8 bits, u32 collection; what it asks for:
      HASHES     -
      KEYS       key: the first one (logical, perhaps none there); value: u16 of each bucket of
                 2^bits
      DOCUMENTS  value: u64 seqno of each
      DIFFERING  value: u64 of each bucket of 2^bits, the hashes of what the client holds
    answer     extras u64 vb_uuid, u64 seqno, u64 documents, u8 bits, u8 more; value:
      HASHES     u64 of each bucket; fewer bits than asked for if the partition has no more
      KEYS       of each document of the buckets, ascending: u16 key length, key, u64 CAS, u64
                 seqno, u64 revision. more: ask again, from the last key and a zero byte on
      DOCUMENTS  the same, and u32 flags, u32 expiry, u8 datatype, u32 length, value. Seqnos whose
                 version is not there any more are left out. more: ask again for what is missing
      DIFFERING  u16 how many buckets differ, u16 of each, and their documents as KEYS answers. They
                 are buckets of 2^bits as the answer has it: fewer bits if the partition has no
                 more. more: ask for the rest as KEYS

HASHES, KEYS and DIFFERING show all documents of the collection as of the seqno that the answer
names.

Who calls it: `dcp.session.kv.hash_reads` answers, `clients.streaming.hash_reads` asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import compress
from struct import Struct, pack
from struct import error as StructError  # noqa: N812 - the struct module names its error in lower case
from typing import Final, NamedTuple

from dcp.wire.frame import Frame

ASKED: Final = Struct(">BBI")
TOLD: Final = Struct(">QQQBB")
BUCKET: Final = Struct(">H")
SEQNO: Final = Struct(">Q")
SEQNOS_MAX: Final = 4096
_KEY_BYTES: Final = Struct(">H")
_VERSION: Final = Struct(">QQQ")
_CONTENT: Final = Struct(">IIBI")


class What(IntEnum):
    """What a request asks for."""

    HASHES = 0
    KEYS = 1
    DOCUMENTS = 2
    DIFFERING = 3


class Told(NamedTuple):
    """The extras of an answer."""

    vb_uuid: int
    seqno: int
    documents: int
    bits: int
    has_more: int


class KeyVersion(NamedTuple):
    """A document without its content; `key` is the logical one."""

    key: bytes
    cas: int
    seqno: int
    rev_seqno: int


class SentDocument(NamedTuple):
    """A document: the value is not compressed, and has no XATTRs."""

    version: KeyVersion
    flags: int
    expiry_s: int
    datatype: int
    value: bytes


def pack_version(version: KeyVersion) -> bytes:
    """Return a key and its version as answers have them."""
    return _KEY_BYTES.pack(len(version.key)) + version.key + _VERSION.pack(*version[1:])


def pack_keys(rows: Iterable[tuple[bytes, bytes]], start: int, version: slice) -> bytes:
    """Return the same of rows: the key begins at `start`, and `version` is where the value has CAS,
    seqno and revision as they are sent.
    """
    key_bytes = _KEY_BYTES.pack
    return b"".join(
        [
            part
            for key, value in rows
            for part in (key_bytes(len(key) - start), key[start:], value[version])
        ]
    )


def pack_document(document: SentDocument) -> bytes:
    """Return a document as answers have it."""
    content = _CONTENT.pack(
        document.flags, document.expiry_s, document.datatype, len(document.value)
    )
    return pack_version(document.version) + content + document.value


def told(answer: Frame) -> Told:
    """Return the extras of an answer. Raises ValueError."""
    if len(answer.extras) != TOLD.size:
        raise ValueError(f"{len(answer.extras)} bytes of extras, not {TOLD.size}")
    return Told._make(TOLD.unpack(answer.extras))


def versions_in(value: bytes) -> list[KeyVersion]:
    """Return the keys and versions of an answer. Raises ValueError."""
    found, at, end = [], 0, len(value)
    key_bytes, numbers = _KEY_BYTES.unpack_from, _VERSION.unpack_from
    try:
        while at < end:  # inlined: there are many, and a call for each would double the cost
            start = at + _KEY_BYTES.size
            at = start + key_bytes(value, at)[0]
            found.append(KeyVersion(value[start:at], *numbers(value, at)))
            at += _VERSION.size
    except StructError as error:
        raise _cut_short(value) from error
    return found


def documents_in(value: bytes) -> list[SentDocument]:
    """Return the documents of an answer. Raises ValueError."""
    found = []
    for version, at, end in _documents(value):
        flags, expiry_s, datatype, _ = _CONTENT.unpack_from(value, at)
        body = value[at + _CONTENT.size : end]
        found.append(SentDocument(version, flags, expiry_s, datatype, body))
    return found


def _documents(value: bytes) -> Iterator[tuple[KeyVersion, int, int]]:
    """Yield each key and version, and where its content begins and ends."""
    at = 0
    try:
        while at < len(value):
            start = at + _KEY_BYTES.size
            at = start + _KEY_BYTES.unpack_from(value, at)[0]
            version = KeyVersion(value[start:at], *_VERSION.unpack_from(value, at))
            at += _VERSION.size
            end = at + _CONTENT.size + _CONTENT.unpack_from(value, at)[3]
            yield version, at, end
            at = end
    except StructError as error:
        raise _cut_short(value) from error
    if at != len(value):
        raise _cut_short(value)


def _cut_short(value: bytes) -> ValueError:
    return ValueError(f"an answer of {len(value)} bytes is cut short")


def pack_buckets(wanted: bytes) -> bytes:
    """Return how many buckets are wanted, and which; `wanted` has a byte, 0 or 1, for each."""
    numbers = list(compress(range(len(wanted)), wanted))
    return pack(f">{1 + len(numbers)}H", len(numbers), *numbers)


def buckets_in(value: bytes, bits: int, most: int) -> tuple[bytes, bytes]:
    """Return a byte for each of 2^bits buckets, 1 for those that an answer begins with, and the
    rest of the answer. `most`: the bits that were asked for. Raises ValueError.
    """
    if bits > most:
        raise ValueError(f"{bits} bits, where {most} were asked for")
    if len(value) < BUCKET.size:
        raise _cut_short(value)
    end = BUCKET.size * (1 + BUCKET.unpack_from(value)[0])
    wanted = bytearray(1 << bits)
    if end > len(value):
        raise _cut_short(value)
    for (number,) in BUCKET.iter_unpack(value[BUCKET.size : end]):
        if number >= len(wanted):
            raise ValueError(f"there is no bucket {number} of {len(wanted)}")
        wanted[number] = 1
    return bytes(wanted), value[end:]


def numbers_in(value: bytes, form: Struct, most: int) -> Sequence[int]:
    """Return the numbers of a request. Raises ValueError."""
    if len(value) % form.size or not 0 < len(value) <= most * form.size:
        raise ValueError(f"{len(value)} bytes are not 1 to {most} numbers of {form.size} bytes")
    return [number for (number,) in form.iter_unpack(value)]
