"""The file rows.copy: the rows of small tables as of one state of the store, for the next start.

    magic 8s, CRC-32C u32 of what follows, CBOR: [the state, table -> key -> value]

A leaf of records that is damaged while no process runs can be made again of it, as the store
process does from its memory. Who writes it: the store process at its start and after each request
that has changed something, and a clean stop. It is not synced: a power cut costs the copy only.

Invariant: the rows count only for the very state that they are of: its number, and where its trees
are. An older copy is of another state, so it never replaces anything.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

import cbor2
import google_crc32c

from vbucket.store.environment import KeptRows
from vbucket.store.lmdb.lmdb_pages import Meta

ROWS_FILE_NAME: Final = "rows.copy"
_MAGIC: Final = b"dcpdrows"
_CRC_BYTES: Final = 4


def write_rows(folder: Path, state: Meta, rows: KeptRows) -> None:
    """Write the rows of a state. A full disk leaves no copy."""
    body = cbor2.dumps([repr(state), rows])
    head = _MAGIC + google_crc32c.value(body).to_bytes(_CRC_BYTES, "big")
    path = folder / ROWS_FILE_NAME
    try:
        path.touch(mode=0o600)
        path.write_bytes(head + body)
    except OSError:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def read_rows(folder: Path, state: Meta) -> KeptRows:
    """Return the rows of a state; {}: there is no sound copy of them."""
    try:
        data = (folder / ROWS_FILE_NAME).read_bytes()
    except OSError:
        return {}
    at = len(_MAGIC) + _CRC_BYTES
    crc = int.from_bytes(data[len(_MAGIC) : at], "big")
    if not data.startswith(_MAGIC) or google_crc32c.value(data[at:]) != crc:
        return {}
    of_state, rows = cbor2.loads(data[at:])
    return dict(rows) if of_state == repr(state) else {}
