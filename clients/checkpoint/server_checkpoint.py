"""A checkpoint in the server itself: one document per partition, `_dcpd:checkpoint:NAME:VB`.

The consumer can then run on any machine, and the members of a group can share the checkpoint. The
documents are ordinary documents of the default collection, so they are streamed like any other. A
consumer with this store does not return them (`hidden_keys`), and they do not cause another save.

A document is as durable as the server's answers. If history branches, an older position may come
back. The consumer then starts from there, so delivery is still at least once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from clients.address import ServerAddress
from clients.checkpoint.checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint
from clients.errors import CheckpointError, DcpdError
from clients.kv.client import KvClient
from clients.position import Position
from vbucket.model.ids import NUM_VBUCKETS

KEY_PREFIX: Final = "_dcpd:checkpoint:"
NAME_BYTES_MAX: Final = 200
"""A key has 250 bytes at most."""


class ServerCheckpoint:
    """A checkpoint in the server itself: one document per partition.

    The consumer can then run on any machine, and the members of a group can share the checkpoint.
    It opens on first use and closes with its consumer.
    """

    hidden_keys: Final = (KEY_PREFIX.encode(),)
    """Key prefixes that the consumer does not return. They cover all consumers' checkpoints.
    Otherwise the saves of two consumers would trigger each other."""

    def __init__(self, server: str | ServerAddress, name: str) -> None:
        if not 0 < len(name.encode()) <= NAME_BYTES_MAX:
            raise ValueError(f"a checkpoint's name has 1 to {NAME_BYTES_MAX} bytes")
        self.name = name
        self._server = server
        self._kv: KvClient | None = None

    async def load(self) -> Checkpoint:
        """Return the last saved checkpoint, {} if there is none. Raises CheckpointError."""
        kv = await self._open()
        keys = [self._key(vb_id) for vb_id in range(NUM_VBUCKETS)]
        checkpoint: Checkpoint = {}
        try:
            documents = await kv.get_many(keys)
        except DcpdError as error:
            raise CheckpointError(f"checkpoint {self.name!r} cannot be read: {error}") from error
        for key, document in documents.items():
            try:
                checkpoint.update(decode_checkpoint(document.value))
            except ValueError as error:
                raise CheckpointError(
                    f"checkpoint document {key.decode()!r}: {error}",
                    hint="Delete it to start that partition from the beginning.",
                ) from error
        return checkpoint

    async def save(self, checkpoint: Mapping[int, Position]) -> None:
        """Write the given positions; other partitions keep theirs."""
        await self.save_changes(checkpoint)

    async def save_changes(self, changed: Mapping[int, Position]) -> None:
        """Write the positions of some partitions. Raises CheckpointError."""
        kv = await self._open()
        async with kv.pipeline() as batch:
            for vb_id, position in changed.items():
                batch.set(self._key(vb_id), encode_checkpoint({vb_id: position}))
        failed = [result for result in batch.results if isinstance(result, DcpdError)]
        if failed:
            raise CheckpointError(
                f"checkpoint {self.name!r}: {len(failed)} of {len(changed)} positions were not"
                f" saved: {failed[0]}",
                hint=failed[0].hint,
            )

    async def close(self) -> None:
        """Close the connection."""
        kv, self._kv = self._kv, None
        if kv is not None:
            await kv.close()

    def _key(self, vb_id: int) -> str:
        return f"{KEY_PREFIX}{self.name}:{vb_id}"

    async def _open(self) -> KvClient:
        if self._kv is None:
            self._kv = await KvClient.open(self._server)
        return self._kv
