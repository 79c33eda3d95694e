"""A checkpoint in the server itself: one document per partition.

Each document lies in the partition that it is about (`vbucket.model.consumer_documents`), so that a
purge there can respect it. Older versions had `_dcpd:checkpoint:NAME:VB`, anywhere; such a document
is read where there is no newer one.

The consumer can then run on any machine, and the members of a group can share the checkpoint. The
documents are ordinary documents of the default collection, so they are streamed like any other. A
consumer with this store does not return them (`hidden_keys`), and they do not cause another save.

A document is as durable as the server's answers. If history branches, an older position may come
back. The consumer then starts from there, so delivery is still at least once.

Each document names its writer, a random text for each store object, and is written with the CAS
that was seen last. If another consumer with the same name writes a partition, the next save of this
one finds a document that it does not know, and fails. It knows what it read and wrote itself, and
older positions of the same writer: a failover may bring those back. No lock is left by a consumer
that is killed.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from clients.address import ServerAddress
from clients.checkpoint.checkpoint import (
    Checkpoint,
    decode_checkpoint,
    encode_checkpoint,
    writer_of,
)
from clients.errors import (
    CasMismatchError,
    CheckpointError,
    DcpdError,
    ExistsError,
    NotFoundError,
)
from clients.kv.client import KvClient
from clients.operation import MutationResult
from clients.position import Position
from vbucket.model.consumer_documents import (
    CHECKPOINT_PREFIX,
    NAME_BYTES_MAX,
    OWN_PREFIX,
    checkpoint_key,
)
from vbucket.model.ids import NUM_VBUCKETS

_CLASHES: Final = (CasMismatchError, ExistsError, NotFoundError)


class _Seen(NamedTuple):
    """What a partition's document was when it was last read or written here."""

    cas: int
    value: bytes


class ServerCheckpoint:
    """A checkpoint in the server itself: one document per partition.

    The consumer can then run on any machine, and the members of a group can share the checkpoint.
    It opens on first use and closes with its consumer. Two consumers that write the same partition
    under one name are noticed: a save of at least one of them raises CheckpointError.
    """

    hidden_keys: Final = (OWN_PREFIX,)
    """Key prefixes that the consumer does not return. They cover all consumers' checkpoints.
    Otherwise the saves of two consumers would trigger each other."""

    def __init__(self, server: str | ServerAddress, name: str) -> None:
        if not 0 < len(name.encode()) <= NAME_BYTES_MAX:
            raise ValueError(f"a checkpoint's name has 1 to {NAME_BYTES_MAX} bytes")
        self.name = name
        self._server = server
        self._kv: KvClient | None = None
        self._writer = secrets.token_hex(8)
        self._seen: dict[int, _Seen] = {}
        self._is_loaded = False

    async def load(self) -> Checkpoint:
        """Return the last saved checkpoint, {} if there is none. Raises CheckpointError."""
        kv = await self._open()
        keys = [checkpoint_key(self.name, vb_id) for vb_id in range(NUM_VBUCKETS)]
        older = [f"{CHECKPOINT_PREFIX}{self.name}:{vb_id}" for vb_id in range(NUM_VBUCKETS)]
        checkpoint: Checkpoint = {}
        try:
            documents = await kv.get_many([*older, *keys])
        except DcpdError as error:
            raise CheckpointError(f"checkpoint {self.name!r} cannot be read: {error}") from error
        self._seen.clear()
        names = set(keys)
        for key, document in documents.items():  # the newer ones come last
            try:
                positions = decode_checkpoint(document.value)
                checkpoint.update(positions)
                if key in names:
                    self._seen.update(dict.fromkeys(positions, _Seen(document.cas, document.value)))
            except ValueError as error:
                raise CheckpointError(
                    f"checkpoint document {key.decode()!r}: {error}",
                    hint="Delete it to start that partition from the beginning.",
                ) from error
        self._is_loaded = True
        return checkpoint

    async def claim_positions(self, vb_ids: Iterable[int]) -> Checkpoint:
        """Load the positions, and write those of some partitions again, as this store's. Whoever
        saved them before is refused from now on. Raises CheckpointError.
        """
        loaded = await self.load()
        mine = {vb_id: loaded[vb_id] for vb_id in vb_ids if vb_id in loaded}
        await self.save_changes(mine)
        return loaded

    async def save(self, checkpoint: Mapping[int, Position]) -> None:
        """Write the given positions; other partitions keep theirs."""
        await self.save_changes(checkpoint)

    async def save_changes(self, changed: Mapping[int, Position]) -> None:
        """Write the positions of some partitions. Raises CheckpointError."""
        values = {
            vb_id: encode_checkpoint({vb_id: position}, self._writer)
            for vb_id, position in changed.items()
        }
        failed = await self._write(values)
        clashes = [vb_id for vb_id, error in failed.items() if isinstance(error, _CLASHES)]
        if clashes:
            await self._look_again(clashes)
            again = await self._write({vb_id: values[vb_id] for vb_id in clashes})
            failed = {vb_id: failed[vb_id] for vb_id in failed.keys() - set(clashes)} | again
        if failed:
            error = next(iter(failed.values()))
            raise CheckpointError(
                f"checkpoint {self.name!r}: {len(failed)} of {len(changed)} positions were not"
                f" saved: {error}",
                hint=error.hint,
            )

    async def _write(self, values: Mapping[int, bytes]) -> dict[int, DcpdError]:
        """Write documents over what was seen of them; return the errors by partition."""
        kv = await self._open()
        async with kv.pipeline() as batch:
            for vb_id, value in values.items():
                seen = self._seen.get(vb_id)
                if seen is None and self._is_loaded:
                    batch.add(checkpoint_key(self.name, vb_id), value)
                else:
                    batch.set(checkpoint_key(self.name, vb_id), value, cas=seen.cas if seen else 0)
        failed: dict[int, DcpdError] = {}
        for (vb_id, value), result in zip(values.items(), batch.results, strict=True):
            if isinstance(result, DcpdError):
                failed[vb_id] = result
            elif isinstance(result, MutationResult):
                self._seen[vb_id] = _Seen(result.cas, value)
        return failed

    async def _look_again(self, vb_ids: Iterable[int]) -> None:
        """Read documents that are not as they were seen. Raises CheckpointError if another consumer
        wrote one.
        """
        kv = await self._open()
        keys = {checkpoint_key(self.name, vb_id): vb_id for vb_id in vb_ids}
        try:
            documents = await kv.get_many(list(keys))
        except DcpdError as error:
            raise CheckpointError(f"checkpoint {self.name!r} cannot be read: {error}") from error
        strangers = []
        for key, vb_id in keys.items():
            document = documents.get(key)
            if document is None:
                self._seen.pop(vb_id, None)
                continue
            if not self._is_known(vb_id, document.value):
                strangers.append(vb_id)
            # Known from here on: if the other one is gone, the next save is right.
            self._seen[vb_id] = _Seen(document.cas, document.value)
        if strangers:
            raise CheckpointError(
                f"checkpoint {self.name!r}: another consumer has saved partition {strangers[0]}"
                " under this name",
                hint="Stop one of them, or give each its own name. Members of a group need the"
                " same size.",
            )

    def _is_known(self, vb_id: int, value: bytes) -> bool:
        """Whether this consumer wrote a document, or one before it did, which it has read."""
        try:
            writer = writer_of(value)
            if writer == self._writer:
                return True
            seen = self._seen.get(vb_id)
            if seen is None or writer != writer_of(seen.value):
                return False
            return (
                decode_checkpoint(value)[vb_id].seqno <= decode_checkpoint(seen.value)[vb_id].seqno
            )
        except (ValueError, KeyError):
            return False

    async def close(self) -> None:
        """Close the connection."""
        kv, self._kv = self._kv, None
        if kv is not None:
            await kv.close()

    async def _open(self) -> KvClient:
        if self._kv is None:
            self._kv = await KvClient.open(self._server)
        return self._kv
