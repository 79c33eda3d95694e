"""What a node keeps and tells of changes that a new master does not have. Pure.

    CutOff         a replica cuts off changes that may have been answered. They go to a discard
                   file before they are cut off
    ElectionLoss   an unclean election: the new master says where it begins. What lies above is lost

A discard file is

    head      8 bytes "dcpd-cut", u16 format, u32 length of the document
    document  JSON: partition, leader epoch, versions, number of entries
    entries   as the log stores them (vbucket.model.entry)
    crc       u32, CRC-32C of all before

A receipt is a JSON document for logs and operators. Numbers of 64 bits are decimal text in it, as
in the output of dcpctl.

Who calls it: the node core makes the effects, the shell writes files and receipts, `dcpctl
discarded show` reads a file. Big-endian.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Iterator
from struct import Struct
from typing import Any, Final, NamedTuple

import google_crc32c
import msgspec

from dcp.wire.opcode import Opcode
from vbucket.model.entry import DATATYPE_AT, head_of, key_of, seqno_of, value_of
from vbucket.model.manifest import decode_leb128

FORMAT: Final = 1
"""Version of discard files."""
MAGIC: Final = b"dcpd-cut"
_HEAD: Final = Struct(">8sHI")
_CRC: Final = Struct(">I")
DISCARD_BYTES_MAX: Final = 32 << 20
"""Entries of one file. More goes to several files, because a file is made in memory. It may be
longer by one entry."""
RECEIPT_KEYS_MAX: Final = 1000
"""Changes that a receipt lists. The file has all of them."""
KINDS: Final = {
    int(Opcode.DCP_MUTATION): "mutation",
    int(Opcode.DCP_DELETION): "deletion",
    int(Opcode.DCP_EXPIRATION): "expiration",
    int(Opcode.DCP_SYSTEM_EVENT): "system_event",
}
"""Opcode -> the name of the change in receipts."""


class DiscardDamagedError(Exception):
    """A discard file cannot be read; the text says why."""


class CutOff(NamedTuple):
    """A replica cuts off these changes. See `Replica.kept` for how the shell answers."""

    vb_id: int
    epoch: int
    """The leader epoch whose master does not have them."""
    versions: tuple[tuple[int, int], ...]
    """(vb_uuid, seqno at which it began) of this node, newest first."""
    entries: tuple[bytes, ...]
    """The changes, as the log stores them: at least one, seqnos ascending."""

    @property
    def first_seqno(self) -> int:
        """The seqno of the first change."""
        return seqno_of(self.entries[0])

    @property
    def last_seqno(self) -> int:
        """The seqno of the last change."""
        return seqno_of(self.entries[-1])

    @property
    def file_name(self) -> str:
        """Return the name of the discard file. The same changes give the same name, so a node
        that is interrupted writes the file again and makes no second one.
        """
        return (
            f"vb{self.vb_id:04d}-version{self.versions[0][0]}-epoch{self.epoch}"
            f"-{self.first_seqno}-{self.last_seqno}.cut"
        )


class ElectionLoss(NamedTuple):
    """A member became master by an unclean election, or is the first that serves after one."""

    vb_id: int
    epoch: int
    """Its leader epoch."""
    versions: tuple[tuple[int, int], ...]
    """(vb_uuid, seqno at which it began) before the election, newest first."""
    end_seqno: int
    """Its last seqno: changes of the former master above it are lost, and those of versions that
    `versions` does not name."""
    committed_seqno: int | None
    """The highest seqno that it knows was committed; None: it was never told. It knows that changes
    are lost if this is above `end_seqno`.
    """


class KeptChange(NamedTuple):
    """One change of a discard file."""

    seqno: int
    kind: str
    collection_id: int
    key: bytes
    """Without its collection id."""
    value: bytes
    datatype: int


def pack_cut_off(cut: CutOff) -> bytes:
    """Return the bytes of a discard file."""
    document = msgspec.json.encode(
        {
            "vb": cut.vb_id,
            "epoch": cut.epoch,
            "versions": _versions(cut.versions),
            "entries": len(cut.entries),
        }
    )
    data = b"".join((_HEAD.pack(MAGIC, FORMAT, len(document)), document, *cut.entries))
    return data + _CRC.pack(google_crc32c.value(data))


class CutHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The document of a discard file."""

    vb: int
    epoch: int
    versions: list[tuple[str, str]]
    entries: int


def unpack_head(data: bytes) -> CutHead:
    """Return the document of a discard file from its first bytes. The checksum is at the end of
    the file, and is not checked. Raises DiscardDamagedError.
    """
    size = _check_head(data)
    try:
        return msgspec.json.decode(data[_HEAD.size : _HEAD.size + size], type=CutHead)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DiscardDamagedError(f"its head cannot be read: {error}") from None


def _check_head(data: bytes) -> int:
    """Return how long the document is. Raises DiscardDamagedError."""
    if len(data) < _HEAD.size + _CRC.size:
        raise DiscardDamagedError(
            f"{len(data)} bytes are too few for a discard file; it was not written to its end"
        )
    magic, stored_format, size = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise DiscardDamagedError(f"no discard file: it begins with {magic!r}, not {MAGIC!r}")
    if stored_format != FORMAT:
        raise DiscardDamagedError(
            f"the file has format {stored_format}, this program reads format {FORMAT}. Use the"
            " version of dcpd that wrote it"
        )
    return int(size)


def unpack_cut_off(data: bytes) -> CutOff:
    """Return what a discard file holds. Raises DiscardDamagedError."""
    size = _check_head(data)
    body, stored_crc = data[: -_CRC.size], _CRC.unpack_from(data, len(data) - _CRC.size)[0]
    crc = google_crc32c.value(body)
    if crc != stored_crc:
        raise DiscardDamagedError(
            f"the checksum of its {len(body)} bytes is {crc:08x}, the file says {stored_crc:08x}:"
            " it is damaged, or was not written to its end. Look for another copy of the file"
        )
    start = _HEAD.size + size
    try:
        document = msgspec.json.decode(body[_HEAD.size : start], type=CutHead)
        versions = tuple((int(vb_uuid), int(seqno)) for vb_uuid, seqno in document.versions)
        entries = tuple(_entries(body, start))
    except (msgspec.DecodeError, ValueError, struct.error) as error:
        raise _wrong(str(error)) from None
    if not versions or not entries or len(entries) != document.entries:
        raise _wrong(f"{len(versions)} versions, {len(entries)} of {document.entries} entries")
    return CutOff(document.vb, document.epoch, versions, entries)


def _wrong(what: str) -> DiscardDamagedError:
    return DiscardDamagedError(
        f"its checksum is right, but its content is not: {what}. This is a bug in dcpd, please"
        " report it"
    )


def _entries(body: bytes, start: int) -> Iterator[bytes]:
    while start < len(body):
        end = start + head_of(body, start).entry_bytes
        if end > len(body):
            raise ValueError(f"an entry reaches to byte {end} of {len(body)}")
        yield body[start:end]
        start = end


def changes_of(cut: CutOff) -> Iterator[KeptChange]:
    """Yield the changes of a discard file, in the order of their seqnos."""
    for entry in cut.entries:
        head, stored_key = head_of(entry), key_of(entry)
        collection_id, size = decode_leb128(stored_key) or (0, 0)
        yield KeptChange(
            seqno_of(entry), KINDS.get(head.opcode, f"opcode {head.opcode:#x}"), collection_id,
            stored_key[size:], value_of(entry), entry[DATATYPE_AT],
        )  # fmt: skip


def cut_off_receipt(cut: CutOff) -> dict[str, Any]:
    """Return the receipt of changes that were cut off, after their file is on disk."""
    changes = [
        {
            "seqno": str(change.seqno), "kind": change.kind,
            "collection_id": change.collection_id, **_text(change.key),
        }
        for change, _ in zip(changes_of(cut), range(RECEIPT_KEYS_MAX), strict=False)
    ]  # fmt: skip
    return {
        "receipt": "cut_off",
        "vb": cut.vb_id,
        "epoch": cut.epoch,
        "versions": _versions(cut.versions),
        "first_seqno": str(cut.first_seqno),
        "last_seqno": str(cut.last_seqno),
        "count": len(cut.entries),
        "changes": changes,
        "file": cut.file_name,
    }


def election_receipt(lost: ElectionLoss) -> dict[str, Any]:
    """Return the receipt of an unclean election. Keys are not known yet: the members that return
    have them.
    """
    committed_seqno = lost.committed_seqno
    return {
        "receipt": "unclean_election",
        "vb": lost.vb_id,
        "epoch": lost.epoch,
        "versions": _versions(lost.versions),
        "end_seqno": str(lost.end_seqno),
        "committed_seqno": None if committed_seqno is None else str(committed_seqno),
        "known_lost": None if committed_seqno is None else max(0, committed_seqno - lost.end_seqno),
    }


def _versions(pairs: tuple[tuple[int, int], ...]) -> list[tuple[str, str]]:
    return [(str(vb_uuid), str(seqno)) for vb_uuid, seqno in pairs]


def _text(key: bytes) -> dict[str, str]:
    """Return a key as text, or as base64 with its encoding."""
    try:
        return {"key": key.decode()}
    except UnicodeDecodeError:
        return {"key": b64encode(key).decode(), "key_encoding": "base64"}
