"""Checkpoints: a consumer's positions, stored in a file or in memory.

    file = CBOR {"format": "dcpd-checkpoint", "version": 3, "crc32": u32, "positions": bytes
                 [, "writer": text]}
    positions = CBOR {vb: position}
    position = [versions, seqno, snap_start, snap_end, complete, base_seqno, collections, filter]
    filter = [names of collections (null: the default one, []: all), key prefixes]; null: unknown

Version 1 has no collections, version 2 has no filter. Both can be read.

A file is replaced as a whole (new file, fsync, rename, fsync of the folder), so after a crash it is
the old or the new one. A file that cannot be read raises a CheckpointError that says what to do;
the consumer does not silently start from the beginning.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol
from zlib import crc32

import cbor2

from clients.checkpoint.claim import Claim
from clients.errors import CheckpointError
from clients.position import Filter, Position
from vbucket.model.ids import SEQNO_MAX

FORMAT: Final = "dcpd-checkpoint"
VERSION: Final = 3
_READ: Final = (1, 2, VERSION)
_FIELDS_1: Final = 6
"""Fields of a position of version 1."""
_FIELDS: Final = range(_FIELDS_1, len(Position._fields) + 1)
"""Possible numbers of fields of a position. Each version added one."""
_COLLECTION_ID_MAX: Final = 0xFFFF_FFFF

Checkpoint = dict[int, Position]
"""Position by partition."""


class CheckpointStore(Protocol):
    """Stores the checkpoint of a consumer. It is called in a thread, one call at a time; methods
    that are coroutines, of stores on the network, run on the consumer's event loop.

    A store may have more members:

    - `save_changes(changed)` is called instead of `save`, with the positions that changed;
    - `is_whole = True` says that the store belongs to one consumer and `save` replaces everything.
      Then `save` also gets the positions of partitions that are not followed now;
    - `claim()` is called before `load`, when the consumer opens. It raises CheckpointError if
      another consumer uses the checkpoint. `close()` ends the claim;
    - `close()` is called when the consumer closes;
    - `hidden_keys` are key prefixes of the default collection. The consumer does not return such
      documents, and does not save because of them. Stores in the followed server need this.

    A consumer that follows only some partitions (`group`, `vbuckets`) needs a store with one of the
    first two.
    """

    def load(self) -> Checkpoint | Awaitable[Checkpoint]:
        """Return the checkpoint saved last, {} where there is none. Raises CheckpointError."""

    def save(self, checkpoint: Mapping[int, Position]) -> Awaitable[None] | None:
        """Keep a checkpoint. Raises CheckpointError."""


class MemoryCheckpoint:
    """A checkpoint in memory, for tests and one-off consumers."""

    def __init__(self) -> None:
        self.saved: Checkpoint = {}

    def load(self) -> Checkpoint:
        """Return a copy of what was saved."""
        return dict(self.saved)

    def save(self, checkpoint: Mapping[int, Position]) -> None:
        """Keep a copy."""
        self.saved = dict(checkpoint)

    def save_changes(self, changed: Mapping[int, Position]) -> None:
        """Keep the positions of some partitions."""
        self.save(self.saved | dict(changed))


class CheckpointFile:
    """A checkpoint in one file. Each save replaces the file as a whole, durably.

    A damaged file raises a CheckpointError. The consumer never silently starts from the beginning.
    One consumer at a time uses it: a second one gets a CheckpointError when it opens. The lock is
    that of `.NAME.lock` beside the file, and ends with the process.
    """

    is_whole: Final = True

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._claim = Claim(self.path.with_name(f".{self.path.name}.lock"), str(self.path))

    def claim(self) -> None:
        """Keep other consumers away until `close`. Raises CheckpointError if one is there."""
        self._claim.take()

    def close(self) -> None:
        """Let other consumers use the file. May be repeated."""
        self._claim.release()

    def load(self) -> Checkpoint:
        """Return the checkpoint in the file, {} where there is no file."""
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error
        try:
            return decode_checkpoint(raw)
        except ValueError as error:
            raise CheckpointError(
                f"{self.path}: {error}",
                hint="Use another file, or move this one away to start from the beginning.",
            ) from error

    def save(self, checkpoint: Mapping[int, Position]) -> None:
        """Replace the file as a whole, durably."""
        folder = self.path.parent
        temporary = ""
        try:
            handle, temporary = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=folder)
            with os.fdopen(handle, "wb") as file:
                file.write(encode_checkpoint(checkpoint))
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(self.path)
            temporary = ""
            _sync_folder(folder)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {error.strerror}") from error
        finally:
            if temporary:
                Path(temporary).unlink(missing_ok=True)


def encode_position(position: Position) -> bytes:
    """Return a position as bytes, for a store of your own.

    It has a few hundred bytes, unless history branches often.
    """
    return cbor2.dumps(list(position))


def decode_position(raw: bytes) -> Position:
    """Return the position in the bytes of `encode_position`. Raises ValueError with the reason."""
    return _position(0, _cbor(raw, "the position"))


def encode_checkpoint(checkpoint: Mapping[int, Position], writer: str = "") -> bytes:
    """Return a checkpoint in the file's format. Equal checkpoints give equal bytes.

    `writer` names the consumer in stores that several could write to; see `writer_of`.
    """
    positions = cbor2.dumps({vb_id: list(checkpoint[vb_id]) for vb_id in sorted(checkpoint)})
    document = {
        "format": FORMAT,
        "version": VERSION,
        "crc32": crc32(positions),
        "positions": positions,
    }
    return cbor2.dumps(document | {"writer": writer} if writer else document)


def decode_checkpoint(raw: bytes) -> Checkpoint:
    """Return the checkpoint in `raw`. Raises ValueError, which says what is wrong."""
    document = _cbor(raw, "the file")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError("this is not a checkpoint of dcpd")
    if document.get("version") not in _READ:
        raise ValueError(
            f"checkpoint format {document.get('version')!r}; this program reads up to {VERSION}"
        )
    positions = document.get("positions")
    if not isinstance(positions, bytes) or crc32(positions) != document.get("crc32"):
        raise ValueError("the checkpoint is damaged (checksum mismatch)")
    entries = _cbor(positions, "the positions")
    if not isinstance(entries, dict):
        raise ValueError("the checkpoint has no map of positions")
    return {vb_id: _position(vb_id, entry) for vb_id, entry in entries.items()}


def writer_of(raw: bytes) -> str:
    """Return who wrote a checkpoint, "" if it does not say. Raises ValueError."""
    document = _cbor(raw, "the file")
    return str(document.get("writer", "")) if isinstance(document, dict) else ""


def _cbor(raw: bytes, what: str) -> Any:
    try:
        return cbor2.loads(raw)
    except (cbor2.CBORDecodeError, EOFError) as error:
        raise ValueError(f"{what} is cut short or damaged ({error})") from error


def _position(vb_id: object, entry: Any) -> Position:
    """Return a position after checking its invariants."""
    where = f"partition {vb_id!r}: "
    if not isinstance(vb_id, int) or not 0 <= vb_id < 65536:
        raise ValueError(f"{where}not a partition")
    if not isinstance(entry, list) or len(entry) not in _FIELDS:
        raise ValueError(f"{where}a position has {len(Position._fields)} fields")
    versions, seqno, snap_start, snap_end, complete, base_seqno = entry[:_FIELDS_1]
    if (
        not isinstance(versions, list)
        or not isinstance(complete, list)
        or any(not isinstance(pair, list) or len(pair) != 2 for pair in [*versions, *complete])
    ):
        raise ValueError(f"{where}versions and ranges must be pairs")
    numbers = [seqno, snap_start, snap_end, base_seqno]
    numbers += [number for pair in [*versions, *complete] for number in pair]
    if any(type(number) is not int or not 0 <= number <= SEQNO_MAX for number in numbers):
        raise ValueError(f"{where}a number is invalid")
    if not snap_start <= seqno <= snap_end:
        raise ValueError(f"{where}seqno {seqno} is outside the snapshot {snap_start}..{snap_end}")
    pairs = tuple((vb_uuid, began) for vb_uuid, began in versions)
    ranges = tuple((first, last) for first, last in complete)
    ids, raw_filter = [*entry[_FIELDS_1:], None, None][:2]
    collections, chosen = _collections(where, ids), _filter(where, raw_filter)
    return Position(pairs, seqno, snap_start, snap_end, ranges, base_seqno, collections, chosen)


def _filter(where: str, entry: Any) -> Filter | None:
    """Return the filter of a position, None if it has none."""
    if entry is None:
        return None
    if not isinstance(entry, list) or len(entry) != len(Filter._fields):
        raise ValueError(f"{where}a filter has {len(Filter._fields)} fields")
    names, prefixes = entry
    for kind, items in ((str, [] if names is None else names), (bytes, prefixes)):
        if not isinstance(items, list) or any(type(item) is not kind for item in items):
            raise ValueError(f"{where}the filter's names or prefixes are invalid")
    return Filter(None if names is None else tuple(names), tuple(prefixes))


def _collections(where: str, ids: Any) -> tuple[int, ...] | None:
    """Return the collection ids of a position, None if it has none."""
    if ids is None:
        return None
    if not isinstance(ids, list) or any(
        type(number) is not int or not 0 <= number <= _COLLECTION_ID_MAX for number in ids
    ):
        raise ValueError(f"{where}a collection id is invalid")
    return tuple(ids)


def _sync_folder(folder: Path) -> None:
    """Sync the folder, so that a rename in it is durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
