"""A segment: a file of chunks with an index. Pure.

    segment   magic (8), chunk ..., footer, trailer
    chunk     u32 stored bytes, u32 raw bytes, u32 CRC-32C of the stored bytes; a zstd frame
    footer    zstd frame of CBOR: run, number, started_ns, history, chunks, sections, legs, archive
    trailer   u64 offset of the footer, u32 its bytes, u32 its raw bytes, u32 CRC-32C of the footer
              and of these three numbers, magic (8)

Sections are records of fixed size (`SECTION`), sorted by partition. So those of one partition are
found without decoding the others: an archive of a thousand runs has a million sections.

A segment without a valid trailer was not finished. The last byte of both magics is the format
version. All numbers are big-endian.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from struct import Struct
from typing import Any, Final, NamedTuple

import cbor2
from google_crc32c import value as crc32c

from clients.backup.archives.archive_errors import ArchiveFormatError
from clients.backup.archives.chunk import RawChunk, Section
from clients.backup.archives.legs import Leg
from clients.backup.archives.zstd import LEVEL, compress, decompress

FORMAT_VERSION: Final = 1
MAGIC: Final = b"DCPDSEG" + bytes([FORMAT_VERSION])
END_MAGIC: Final = b"DCPDEND" + bytes([FORMAT_VERSION])
CHUNK_HEAD: Final = Struct(">III")
TRAILER: Final = Struct(">QIII8s")
_PLACE: Final = Struct(">QII")
_CHECKSUM: Final = Struct(">I")
"""The first three fields of the trailer, and the checksum after them."""
SECTION: Final = Struct(">HHIIIIQQ")
"""The fields of `Section`, in its order."""
_FIRST_FIELD: Final = Struct(">H")

RAW_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum raw size of a chunk or footer; a larger number is damage. A chunk exceeds its size by at
most one value, and values have up to 20 MiB."""


class DamagedError(Exception):
    """Data is damaged. The text says how."""


class Footer(NamedTuple):
    """The index of a segment."""

    run: int
    number: int
    started_ns: int
    """When its run began, Unix time in ns."""
    is_history: bool
    chunks: list[tuple[int, int]]
    """(offset, size with its head) of each chunk."""
    sections: bytes
    legs: dict[int, list[Leg]]
    archive_id: str = ""
    """Its archive; empty: an older program wrote it."""

    def section_count(self) -> int:
        """Return the number of sections."""
        return len(self.sections) // SECTION.size

    def section(self, index: int) -> Section:
        """Return a section."""
        return Section(*SECTION.unpack_from(self.sections, index * SECTION.size))

    def sections_of(self, vb_id: int) -> list[Section]:
        """Return a partition's sections, by leg and seqno."""
        table, size, first = self.sections, SECTION.size, _FIRST_FIELD
        index = bisect_left(
            range(self.section_count()),
            vb_id,
            key=lambda at: first.unpack_from(table, at * size)[0],
        )
        found = []
        while index < self.section_count():
            section = self.section(index)
            if section.vb_id != vb_id:
                break
            found.append(section)
            index += 1
        return found

    def held(self) -> list[tuple[int, int, int, int]]:
        """Return (partition, leg, first seqno, last seqno) of the segment's content."""
        return held_in(self.section(index) for index in range(self.section_count()))


def held_in(sections: Iterable[Section]) -> list[tuple[int, int, int, int]]:
    """Return (partition, leg, first seqno, last seqno) of the sections' content."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for section in sections:
        place = (section.vb_id, section.leg)
        first, last = found.get(place, (section.first_seqno, section.last_seqno))
        found[place] = (min(first, section.first_seqno), max(last, section.last_seqno))
    return [(*place, *reach) for place, reach in sorted(found.items())]


class SegmentBuilder:
    """Collects chunks; `finish` returns the segment's bytes."""

    def __init__(
        self, run: int, number: int, started_ns: int, *, is_history: bool, archive_id: str = ""
    ) -> None:
        self._head = (run, number, started_ns, is_history)
        self._archive_id = archive_id
        self._parts = [MAGIC]
        self.size_bytes = len(MAGIC)
        self._chunks: list[tuple[int, int]] = []
        self._sections: list[Section] = []
        self._legs: dict[int, list[Leg]] = {}

    def add(self, chunk: RawChunk, level: int = LEVEL) -> None:
        """Compress and append a chunk."""
        assert len(chunk.data) <= RAW_BYTES_MAX
        packed = compress(chunk.data, level)
        head = CHUNK_HEAD.pack(len(packed), len(chunk.data), crc32c(packed))
        number = len(self._chunks)
        self._chunks.append((self.size_bytes, len(head) + len(packed)))
        self._parts += (head, packed)
        self.size_bytes += len(head) + len(packed)
        self._sections += (section._replace(chunk=number) for section in chunk.sections)
        self._legs.update(chunk.legs)

    @property
    def is_empty(self) -> bool:
        """Whether there is no chunk."""
        return not self._chunks

    def held(self) -> list[tuple[int, int, int, int]]:
        """Return (partition, leg, first seqno, last seqno) of the content so far."""
        return held_in(self._sections)

    def finish(self) -> bytes:
        """Return the segment."""
        run, number, started_ns, is_history = self._head
        self._sections.sort(key=lambda item: (item.vb_id, item.leg, item.first_seqno))
        document = {
            "run": run, "number": number, "started_ns": started_ns, "history": is_history,
            "chunks": [list(chunk) for chunk in self._chunks],
            "sections": b"".join(SECTION.pack(*section) for section in self._sections),
            "legs": {
                vb_id: [leg.document() for leg in legs] for vb_id, legs in self._legs.items()
            },
        }  # fmt: skip
        if self._archive_id:
            document["archive"] = self._archive_id
        raw = cbor2.dumps(document)
        packed = compress(raw)
        place = _PLACE.pack(self.size_bytes, len(packed), len(raw))
        trailer = place + _CHECKSUM.pack(crc32c(packed + place)) + END_MAGIC
        return b"".join((*self._parts, packed, trailer))


def footer_place(trailer: bytes) -> tuple[int, int]:
    """Return offset and length of the footer, from a segment's last bytes (TRAILER.size).

    Raises DamagedError, ArchiveFormatError.
    """
    if len(trailer) != TRAILER.size:
        raise DamagedError("cut short")
    offset, size_bytes, _, _, magic = TRAILER.unpack(trailer)
    _check_magic(magic, END_MAGIC, "the trailer")
    return offset, size_bytes


def parse_footer(packed: bytes, trailer: bytes) -> Footer:
    """Return the footer. Raises DamagedError."""
    offset, size_bytes, raw_bytes, checksum, _ = TRAILER.unpack(trailer)
    found = crc32c(packed + trailer[: _PLACE.size])
    if len(packed) != size_bytes or found != checksum or raw_bytes > RAW_BYTES_MAX:
        raise DamagedError("the footer's checksum is wrong")
    try:
        document: Any = cbor2.loads(decompress(packed, raw_bytes))
        footer = Footer(
            document["run"], document["number"], document["started_ns"], document["history"],
            [(at, size) for at, size in document["chunks"]], document["sections"],
            {vb_id: [Leg.of(item) for item in legs] for vb_id, legs in document["legs"].items()},
            str(document.get("archive", "")),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"the footer cannot be read: {error}") from error
    if len(footer.sections) % SECTION.size or any(
        at < len(MAGIC) or at + size > offset for at, size in footer.chunks
    ):
        raise DamagedError("the footer does not fit the segment")
    return footer


def parse_chunk(stored: bytes) -> bytes:
    """Return a chunk's frames. Raises DamagedError."""
    if len(stored) < CHUNK_HEAD.size:
        raise DamagedError("cut short")
    size_bytes, raw_bytes, checksum = CHUNK_HEAD.unpack_from(stored)
    packed = stored[CHUNK_HEAD.size :]
    if len(packed) != size_bytes or raw_bytes > RAW_BYTES_MAX or crc32c(packed) != checksum:
        raise DamagedError("the checksum is wrong")
    try:
        return decompress(packed, raw_bytes)
    except ValueError as error:
        raise DamagedError(str(error)) from error


def check_head(head: bytes) -> None:
    """Check a segment's first bytes. Raises DamagedError, ArchiveFormatError."""
    _check_magic(head, MAGIC, "the beginning")


def _check_magic(found: bytes, wanted: bytes, where: str) -> None:
    if found == wanted:
        return
    if found[:-1] == wanted[:-1] and found[-1] > FORMAT_VERSION:
        raise ArchiveFormatError(
            f"a segment of format version {found[-1]}; this program knows {FORMAT_VERSION}"
        )
    raise DamagedError(f"{where} is not that of a segment")
