"""The documents of a mirror's file, for a comparison by hashes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clients.errors import CheckpointError
from clients.kv.differences import (
    Copy,
    Known,
    NotComparableError,
    Wanted,
    check_partition,
)
from clients.kv.held import ROW
from clients.mirror.lmdb_mirror import LmdbStore
from clients.mirror.mirror_state import rows_within
from dcp.wire.hash_reads import KeyVersion
from vbucket.native.key_hashes import KeyHashes


class MirrorCopy(Copy):
    """A mirror's file, which nobody follows meanwhile. Close it when done."""

    looks_up = True

    def __init__(self, path: str) -> None:
        """Raises CheckpointError, NotComparableError for a mirror of some prefixes."""
        self.name, self.num_vbuckets = path, 0
        if not Path(path).is_file():
            raise CheckpointError(f"{path}: there is no such file", hint="Name a mirror's file.")
        self._store = LmdbStore(path)
        self.partitions_seen = self._store.partitions_seen()
        subject = self._store.subject()
        self._collection_id = 0 if subject is None else subject[0]
        if subject is not None and subject[1]:
            self._store.close()
            raise NotComparableError(
                f"{path} mirrors some key prefixes only", hint="Hashes are those of all keys."
            )

    @property
    def only_collection(self) -> int:
        """See Copy."""
        return self._collection_id

    async def collections(self) -> dict[str, int]:
        """See Copy. The file does not have the name."""
        return {f"0x{self._collection_id:x}": self._collection_id}

    def select(self, collection_id: int) -> None:
        """See Copy. It is the one that the file has."""
        assert collection_id == self._collection_id, "no other was offered"

    async def close(self) -> None:
        """Close the file."""
        self._store.close()

    async def hashes(self, vb_ids: Sequence[int], bits: int) -> dict[int, KeyHashes]:  # noqa: ARG002
        """See Copy. The file has them."""
        found = {}
        for vb_id in vb_ids:
            table = found[vb_id] = self._store.hashes(vb_id)
            if table.documents:
                check_partition(self, vb_id, self._store.first_key(vb_id))
        return found

    async def versions(self, wanted: Wanted, known: Known) -> dict[int, list[KeyVersion]]:
        """See Copy."""
        found = {}
        for vb_id, each in wanted.items():
            others = [version.key for version in known.get(vb_id, ())]
            rows = rows_within(self._store, vb_id, *each, others)
            found[vb_id] = [
                KeyVersion(key, cas, 0, rev)
                for key, row in rows
                for cas, rev in (ROW.unpack_from(row),)
            ]
        return found
