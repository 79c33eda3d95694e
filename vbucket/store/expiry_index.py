"""Maintains the expiry table: exactly one row for each document with an expiry.

Who calls it: the merge and compaction, for every by_key record that they replace or remove. They
collect the rows of all partitions and write them sorted at the end, because the table is ordered by
time.
"""

from __future__ import annotations

from typing import Final

from dcp.wire.opcode import Opcode
from vbucket.store.due import due_item
from vbucket.store.environment import KvWrite
from vbucket.store.key_record import StoredMeta
from vbucket.store.records import EXPIRY_TABLE

_MUTATION: Final = int(Opcode.DCP_MUTATION)


class ExpiryRows:
    """The rows that one transaction adds and removes."""

    def __init__(self) -> None:
        self._old: set[bytes] = set()
        self._new: dict[bytes, bytes] = {}

    def replace(self, vb_key: bytes, old: StoredMeta | None, expiry: int) -> None:
        """Note that the by_key record of `vb_key` changes from `old` to a document with `expiry`;
        0: without an expiry, or no document.
        """
        self.change(vb_key, expiry_of(old), expiry)

    def change(self, vb_key: bytes, old_expiry: int, expiry: int) -> None:
        """Note that the expiry of `vb_key` changes; 0: without an expiry, or no document."""
        if old_expiry == expiry:
            return
        if old_expiry:
            self._old.add(due_item(old_expiry, vb_key)[0])
        if expiry:
            row, value = due_item(expiry, vb_key)
            self._new[row] = value

    def write(self, write: KvWrite) -> None:
        """Write the collected rows."""
        for row in sorted(self._old - self._new.keys()):
            write.delete(EXPIRY_TABLE, row)
        write.put_sorted(EXPIRY_TABLE, sorted(self._new.items()))
        self._old.clear()
        self._new.clear()

    def __len__(self) -> int:
        """Return how many rows will be added."""
        return len(self._new)


def expiry_of(meta: StoredMeta | None) -> int:
    """Return when a document expires, 0 for never or no document."""
    return meta.expiry if meta is not None and meta.opcode == _MUTATION else 0
