"""A checkpoint in an LMDB file. A save writes only changed positions, in one transaction.

    name, zero byte, partition (u16, big-endian)   ->   a checkpoint file with one position

Several consumers of one process may share a file under different names.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final

from clients.checkpoint.checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint
from clients.checkpoint.claim import Claim
from clients.errors import CheckpointError
from clients.local_lmdb import LocalLmdb, rows_from
from clients.position import Position

FORMAT: Final = "dcpd-checkpoints"
NAME_BYTES_MAX: Final = 200
"""The same limit as for checkpoints in the server. LMDB allows keys of up to 511 bytes."""


class LmdbCheckpoint:
    """A checkpoint in an LMDB file. A save writes only the positions that changed.

    Several consumers of one process may share a file under different names. The file is opened when
    the consumer opens, and closed with it. One consumer at a time uses a name: a second one gets a
    CheckpointError when it opens. The lock ends with the process.
    """

    def __init__(self, path: str | Path, name: str = "consumer") -> None:
        if not name or "\0" in name or len(name.encode()) > NAME_BYTES_MAX:
            raise ValueError(f"a checkpoint's name has 1 to {NAME_BYTES_MAX} bytes, none of them 0")
        self._path = Path(path)
        self._prefix = name.encode() + b"\0"
        self._file: LocalLmdb | None = None
        # A name may have letters that no file name has.
        mark = sha256(name.encode()).hexdigest()[:16]
        lock = self._path.with_name(f".{self._path.name}.{mark}.lock")
        self._claim = Claim(lock, f"{self._path}, name {name!r}")

    def claim(self) -> None:
        """Keep other consumers of this name away until `close`. Raises CheckpointError."""
        self._claim.take()

    def load(self) -> Checkpoint:
        """Return the last saved checkpoint, {} if there is none. Raises CheckpointError."""
        checkpoint: Checkpoint = {}
        with self._open().reading() as transaction:
            for key, value in rows_from(transaction, self._prefix):
                try:
                    checkpoint.update(decode_checkpoint(bytes(value)))
                except ValueError as error:
                    raise CheckpointError(f"{self._path}: {key!r}: {error}") from error
        return checkpoint

    def save(self, checkpoint: Mapping[int, Position]) -> None:
        """Replace the whole checkpoint."""
        with self._open().writing() as transaction:
            for key, _ in list(rows_from(transaction, self._prefix)):
                transaction.delete(key)
            self._put(transaction, checkpoint)

    def save_changes(self, changed: Mapping[int, Position]) -> None:
        """Write the positions of some partitions. Others stay as they are."""
        with self._open().writing() as transaction:
            self._put(transaction, changed)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._claim.release()

    def _open(self) -> LocalLmdb:
        if self._file is None:
            self._file = LocalLmdb(self._path, FORMAT)
        return self._file

    def _put(self, transaction: object, positions: Mapping[int, Position]) -> None:
        for vb_id, position in positions.items():
            key = self._prefix + vb_id.to_bytes(2, "big")
            transaction.put(key, encode_checkpoint({vb_id: position}))  # type: ignore[attr-defined]
