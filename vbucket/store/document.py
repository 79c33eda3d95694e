"""Documents of the store: records of the node, the collections and the partitions. Pure.

    value   CRC-32C of table, key and what follows; the record as CBOR

Who calls it: the store.
"""

from __future__ import annotations

from typing import Any, Final

import cbor2
import google_crc32c

from vbucket.store.environment import Buffer, place_of
from vbucket.store.key_record import RecordDamagedError

_CRC_BYTES: Final = 4
_crc32c = google_crc32c.value


def pack_document(table: str, key: bytes, document: Any) -> bytes:
    """Return the value for a document."""
    body = cbor2.dumps(document)
    return _crc(table, key, body) + body


def read_document(table: str, key: bytes, value: Buffer) -> Any:
    """Decode the document in a value. Raises RecordDamagedError."""
    check_document(table, key, value)
    return cbor2.loads(bytes(value[_CRC_BYTES:]))


def check_document(table: str, key: bytes, value: Buffer) -> None:
    """Raise RecordDamagedError if a value does not match its checksum."""
    if bytes(value[:_CRC_BYTES]) != _crc(table, key, bytes(value[_CRC_BYTES:])):
        raise RecordDamagedError(
            f"{place_of(table, key)}: the checksum does not match; check the disk and restore a "
            "backup"
        )


def _crc(table: str, key: bytes, body: bytes) -> bytes:
    crc: int = _crc32c(table.encode() + key + body)
    return crc.to_bytes(_CRC_BYTES, "big")
