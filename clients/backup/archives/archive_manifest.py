"""The records of an archive and its runs: CBOR documents with checksums. Pure.

    file   magic (8; its last byte is the format version), u32 raw bytes, u32 CRC-32C of the rest;
           a zstd frame of CBOR

A run's manifest is written after its segments and finishes the run. Then a mark is written to
another folder. If the manifest is lost later, the mark shows that the run existed.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Final, NamedTuple

import cbor2
from google_crc32c import value as crc32c

from clients.backup.archives.archive_errors import ArchiveError, ArchiveFormatError
from clients.backup.archives.legs import Leg, Placed
from clients.backup.archives.segment import FORMAT_VERSION, RAW_BYTES_MAX, DamagedError, Footer
from clients.backup.archives.zstd import compress, decompress
from vbucket.model.ids import NUM_VBUCKETS

ARCHIVE_MAGIC: Final = b"DCPDARC" + bytes([FORMAT_VERSION])
RUN_MAGIC: Final = b"DCPDRUN" + bytes([FORMAT_VERSION])
MARK_MAGIC: Final = b"DCPDFIN" + bytes([FORMAT_VERSION])
PARTITION_COUNTS: Final = frozenset(1 << bits for bits in range(NUM_VBUCKETS.bit_length()))
BASE_SEGMENT: Final = "base-"
"""Begins the file names of segments of a base."""
_HEAD: Final = Struct(">8sII")


class ArchiveRecord(NamedTuple):
    """The archive itself."""

    archive_id: str
    created_ns: int
    partitions: int = NUM_VBUCKETS
    """How many the server has that is backed up: the first run tells."""


class MarkRecord(NamedTuple):
    """The mark of a finished run. Error texts use its other fields; its file name has the run."""

    run: int
    """0 before the first run is finished."""
    base_through: int = 0
    ended_ns: int = 0
    changes: int = 0


class SegmentRecord(NamedTuple):
    """A segment of a run, and the content that its footer must list."""

    path: str
    """Relative to the archive's folder."""
    size_bytes: int
    held: list[tuple[int, int, int, int]]
    """(partition, leg, first seqno, last seqno). It shows what is lost if the segment is lost."""


class RunRecord(NamedTuple):
    """A finished run."""

    run: int
    archive_id: str
    server: str
    started_ns: int
    ended_ns: int
    is_history: bool
    """Every version was streamed, not only the newest in a snapshot."""
    is_resumed: bool
    """The run was killed at least once."""
    base_through: int
    """Runs up to this one were folded into it and are gone; 0: none."""
    segments: list[SegmentRecord]
    legs: dict[int, list[Leg]]
    """By partition; partitions without new legs are left out."""
    rollbacks: dict[int, list[tuple[int, int]]]
    """By partition: (from seqno, to seqno) of each rollback."""
    collections: dict[int, tuple[str, int]]
    """Id -> (scope.collection, maximum time to live in s) as of the run's end."""
    changes: int
    raw_bytes: int
    wire_bytes: int
    """Bytes of stream messages that the server sent."""
    base_ended_ns: int = 0
    """End of the last run that was folded into this one; 0: none, or unknown."""
    is_other_server: bool = False
    """No partition shared a version with the runs before it: another server was backed up, or the
    same one with a new data folder."""

    @property
    def begins_ns(self) -> int:
        """The time before which states are lost, if older runs were folded into this one."""
        return self.base_ended_ns or self.started_ns

    @property
    def stored_bytes(self) -> int:
        """Size of its segments."""
        return sum(segment.size_bytes for segment in self.segments)

    def problem_as(self, run: int, archive_id: str) -> str | None:
        """Return why the manifest cannot be that of a run of an archive; None: it can.

        A copy has a right checksum wherever it lies. Read as another run, it would bring changes
        back out of their order, and the next run would get the number of a finished one.
        """
        if self.archive_id != archive_id:
            return f"it belongs to the archive {self.archive_id}, not to this one, {archive_id}"
        if self.run != run:
            return f"it is the manifest of run {self.run}"
        if self.base_through >= run:
            return f"it says that the runs up to {self.base_through} are folded into run {run}"
        paths: set[str] = set()
        for path, _, _ in self.segments:
            if not path.startswith(f"runs/{run:06}/"):
                return f"it lists {path}, which is not a segment of this run"
            if path in paths:
                return f"it lists {path} twice"
            paths.add(path)
        return None

    def wrote(self, footer: Footer, segment: SegmentRecord) -> bool:
        """Whether a footer is that of a segment of this run, and not of a file in its place."""
        is_base = segment.path.rpartition("/")[2].startswith(BASE_SEGMENT)
        return (
            footer.run == self.run
            and footer.held() == segment.held
            and footer.archive_id in {"", self.archive_id}
            and (is_base or footer.started_ns == self.started_ns)
        )

    def placed(self, vb_id: int) -> list[Placed]:
        """Return its legs of a partition."""
        return [Placed(self.run, leg) for leg in self.legs.get(vb_id, ())]


def pack_archive(record: ArchiveRecord) -> bytes:
    """Return the content of the archive's own file."""
    return _pack(ARCHIVE_MAGIC, {"id": record.archive_id, "created_ns": record.created_ns,
                                 "partitions": record.partitions})  # fmt: skip


def parse_archive(data: bytes) -> ArchiveRecord:
    """Return the archive's record. Raises DamagedError, ArchiveFormatError, ArchiveError."""
    document = _parse(ARCHIVE_MAGIC, data)
    try:
        count = document["partitions"]
        if count not in PARTITION_COUNTS:
            raise ArchiveError(
                f"the archive is from a server with {count} partitions; a power of two up to"
                f" {NUM_VBUCKETS} is supported"
            )
        return ArchiveRecord(str(document["id"]), int(document["created_ns"]), count)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"the document cannot be read: {error!r}") from error


def pack_mark(record: MarkRecord) -> bytes:
    """Return the mark of a finished run."""
    return _pack(MARK_MAGIC, record._asdict())


def parse_mark(data: bytes) -> MarkRecord:
    """Parse a mark. Fields of newer versions are ignored.

    Raises DamagedError, ArchiveFormatError.
    """
    document = _parse(MARK_MAGIC, data)
    try:
        return MarkRecord(*(int(document[name]) for name in MarkRecord._fields))
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"the document cannot be read: {error!r}") from error


def pack_run(record: RunRecord) -> bytes:
    """Return a run's manifest."""
    fields = record._asdict()
    if not record.base_ended_ns:
        del fields["base_ended_ns"]  # the same bytes as before this field existed
    if not record.is_other_server:
        del fields["is_other_server"]
    return _pack(
        RUN_MAGIC,
        {
            **fields,
            "segments": [
                [path, size, [list(item) for item in held]] for path, size, held in record.segments
            ],
            "legs": {
                vb_id: [leg.document() for leg in legs] for vb_id, legs in record.legs.items()
            },
            "rollbacks": {
                vb_id: [list(pair) for pair in pairs] for vb_id, pairs in record.rollbacks.items()
            },
            "collections": {key: list(value) for key, value in record.collections.items()},
        },
    )


def parse_run(data: bytes) -> RunRecord:
    """Parse a run's manifest. Fields of newer versions are ignored.

    Raises DamagedError, ArchiveFormatError.
    """
    found = _parse(RUN_MAGIC, data)
    document = {name: found[name] for name in RunRecord._fields if name in found}
    try:
        return RunRecord(**document)._replace(
            segments=[
                SegmentRecord(path, size, [(vb, leg, low, high) for vb, leg, low, high in held])
                for path, size, held in document["segments"]
            ],
            legs={
                vb_id: [Leg.of(item) for item in legs] for vb_id, legs in document["legs"].items()
            },
            rollbacks={
                vb_id: [(first, last) for first, last in pairs]
                for vb_id, pairs in document["rollbacks"].items()
            },
            collections={key: (path, ttl) for key, (path, ttl) in document["collections"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"the document cannot be read: {error!r}") from error


def _pack(magic: bytes, document: dict[str, Any]) -> bytes:
    raw = cbor2.dumps(document)
    packed = compress(raw)
    return _HEAD.pack(magic, len(raw), crc32c(packed)) + packed


def _parse(magic: bytes, data: bytes) -> dict[str, Any]:
    if len(data) < _HEAD.size:
        raise DamagedError("cut short")
    found, raw_bytes, checksum = _HEAD.unpack_from(data)
    if found != magic:
        if found[:-1] == magic[:-1] and found[-1] > FORMAT_VERSION:
            raise ArchiveFormatError(
                f"the archive has format version {found[-1]}; this program knows {FORMAT_VERSION}"
            )
        raise DamagedError("the first bytes are wrong")
    packed = data[_HEAD.size :]
    if crc32c(packed) != checksum or raw_bytes > RAW_BYTES_MAX:
        raise DamagedError("the checksum is wrong")
    try:
        document = cbor2.loads(decompress(packed, raw_bytes))
    except ValueError as error:
        raise DamagedError(str(error)) from error
    if not isinstance(document, dict):
        raise DamagedError("the document has missing or wrong fields")
    return document
