"""The documents of a mirror's file, for a comparison by hashes."""

from __future__ import annotations

from pathlib import Path

from clients.errors import CheckpointError
from clients.kv.differences import NotComparableError, RowsCopy
from clients.mirror.lmdb_mirror import LmdbStore
from clients.mirror.mirror_state import ROW_FORM
from vbucket.native.key_hashes import Row


class MirrorCopy(RowsCopy):
    """A mirror's file, which nobody follows meanwhile. Close it when done."""

    def __init__(self, path: str) -> None:
        """Raises CheckpointError, NotComparableError for a mirror of some prefixes."""
        super().__init__(path, 0, ROW_FORM)
        if not Path(path).is_file():
            raise CheckpointError(f"{path}: there is no such file", hint="Name a mirror's file.")
        self._store = LmdbStore(path)
        self.partitions_seen = 1 + max(self._store.positions(), default=0)
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

    def rows(self, vb_id: int) -> list[Row]:
        """See RowsCopy."""
        return self._store.rows(vb_id)
