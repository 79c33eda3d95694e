"""`AtomicBatch`: changes of documents that are made together, or not at all.

async with kv.batch() as batch:
batch.set("account:1", b"90")
batch.set("account:2", b"110", cas=cas_of_2)
"""

from __future__ import annotations

from clients.operation import MutationResult, Operation, delete_operation, store_operation
from dcp.wire.opcode import Opcode


class AtomicBatch:
    """See the module, and `KvClient.batch` and `SyncKv.batch`, which make the changes."""

    def __init__(self) -> None:
        self.changes: list[Operation] = []
        self.results: list[MutationResult] = []
        """The results, in order, after the changes were made. All have one CAS."""

    def set(
        self, key: bytes | str, value: bytes, *, flags: int = 0, expiry_s: int = 0, cas: int = 0
    ) -> None:
        """Store a document; with a CAS only if it still has that CAS."""
        self.changes.append(store_operation(Opcode.SET, key, value, flags, expiry_s, cas))

    def add(self, key: bytes | str, value: bytes, *, flags: int = 0, expiry_s: int = 0) -> None:
        """Store a document that does not exist."""
        self.changes.append(store_operation(Opcode.ADD, key, value, flags, expiry_s))

    def replace(
        self, key: bytes | str, value: bytes, *, flags: int = 0, expiry_s: int = 0, cas: int = 0
    ) -> None:
        """Store a document that exists."""
        self.changes.append(store_operation(Opcode.REPLACE, key, value, flags, expiry_s, cas))

    def delete(self, key: bytes | str, *, cas: int = 0) -> None:
        """Delete a document that exists."""
        self.changes.append(delete_operation(key, cas))
