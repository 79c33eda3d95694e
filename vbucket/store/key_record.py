"""Records of the table by_key: the metadata of a key's newest version. Pure.

    key     vb u16, key with its collection id
    value   opcode u8, datatype u8, CAS u64, seqno u64, rev seqno u64, flags u32, expiry u32,
            CRC-32C of the key and these                                         (big-endian)

Who calls it: the store reads them, merge and the offline check make them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import add, itemgetter
from struct import Struct
from typing import Final, NamedTuple

import google_crc32c

from dcp.wire.opcode import Opcode
from vbucket.model.entry import DATATYPE_AT, OPCODE_AT, PREFIX_BYTES
from vbucket.store.environment import StoreDamagedError

BY_KEY_RECORD: Final = Struct(">BBQQQIII")
BY_KEY_NUMBERS: Final = Struct(">BxQQQ")
"""Opcode, CAS, seqno and revision of a record."""
MetaFields = tuple[int, int, int, int, int, int, int, int]
"""The fields of BY_KEY_RECORD."""
NO_EXPIRY: Final = bytes(4)
VERSION_BYTES: Final = slice(2, 26)
"""Where a record has CAS, seqno and revision, as three u64."""
expiry_bytes_of: Final = itemgetter(slice(BY_KEY_RECORD.size - 8, BY_KEY_RECORD.size - 4))
"""The expiry of a record, as bytes."""

_CRC_AT: Final = BY_KEY_RECORD.size - 4
_CAS_AT: Final = PREFIX_BYTES + 16
_MUTATION: Final = int(Opcode.DCP_MUTATION)
_REMOVAL_BYTES: Final = BY_KEY_RECORD.size - 12
"""Bytes copied from the entry of a removal, which has no flags and no expiry."""
_unpack: Final = BY_KEY_RECORD.unpack
_kind_of: Final = itemgetter(slice(OPCODE_AT, DATATYPE_AT + 1, DATATYPE_AT - OPCODE_AT))
_numbers_of: Final = itemgetter(slice(_CAS_AT, _CAS_AT + _CRC_AT - 2))
_opcode_of: Final = itemgetter(OPCODE_AT)
_fields_of: Final = itemgetter(slice(None, _CRC_AT))
_crc_of: Final = itemgetter(slice(_CRC_AT, None))
_pack_crc: Final = Struct(">I").pack
_crc32c = google_crc32c.value


class RecordDamagedError(StoreDamagedError):
    """A record of the store is damaged or missing."""


class StoredMeta(NamedTuple):
    """A key's newest version; `opcode` tells a mutation from a deletion."""

    opcode: int
    datatype: int
    cas: int
    seqno: int
    rev_seqno: int
    flags: int
    expiry: int


def by_key_items(
    vb_prefix: bytes, keys: Sequence[bytes], entries: Sequence[bytes]
) -> list[tuple[bytes, bytes]]:
    """Return key and value of the records for entries; `vb_prefix` is the partition's id, 2 bytes.

    The entry has the fields in the same order, so they are copied, not decoded. The loops run in C,
    because a merge makes hundreds of thousands of records.
    """
    full_keys = list(map(vb_prefix.__add__, keys))
    fields = list(map(add, map(_kind_of, entries), map(_numbers_of, entries)))
    if set(map(_opcode_of, entries)) != {_MUTATION}:
        fields = [
            each if each[0] == _MUTATION else each[:_REMOVAL_BYTES] + bytes(8) for each in fields
        ]
    crcs = map(_crc32c, map(add, full_keys, fields))
    return list(zip(full_keys, map(add, fields, map(_pack_crc, crcs)), strict=True))


def by_key_item(vb_prefix: bytes, key: bytes, entry: bytes) -> tuple[bytes, bytes]:
    """Return `by_key_items` of one entry."""
    return by_key_items(vb_prefix, [key], [entry])[0]


def check_records(records: Mapping[bytes, bytes]) -> None:
    """Raise RecordDamagedError if a record (full key -> value) does not match its checksum."""
    values = records.values()
    crcs = map(_crc32c, map(add, records, map(_fields_of, values)))
    if list(map(_pack_crc, crcs)) != list(map(_crc_of, values)):
        for full_key, value in records.items():
            checked_fields(full_key, value)


def checked_meta(full_key: bytes, value: bytes) -> StoredMeta:
    """Return the metadata in a record. Raises RecordDamagedError."""
    return StoredMeta._make(checked_fields(full_key, value)[:-1])


def checked_fields(full_key: bytes, value: bytes) -> MetaFields:
    """Return the fields of a record, the checksum last. Raises RecordDamagedError."""
    if len(value) == BY_KEY_RECORD.size:
        fields: MetaFields = _unpack(value)
        if _crc32c(full_key + value[:-4]) == fields[7]:
            return fields
    raise RecordDamagedError(
        f"partition {int.from_bytes(full_key[:2], 'big')}: the record of key {full_key[2:]!r} does "
        "not match its checksum; check the disk and restore a backup",
        int.from_bytes(full_key[:2], "big"),
    )
