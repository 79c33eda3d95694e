"""The stored form of a change: a 12-byte prefix and the DCP frame that streams send.

    entry = prefix (12 bytes) + frame

    prefix   u64 seqno of the key's previous version in this partition (0: none)
             u32 leader epoch
    frame    DCP_MUTATION, DCP_DELETION or DCP_EXPIRATION exactly as a stream sends it, opaque 0;
             the key carries its collection id (unsigned LEB128; one zero byte for the default).
             Or DCP_SYSTEM_EVENT: it is stored with the key of vbucket.model.manifest.system_key,
             and streams send the name at the end of that key

A deletion is stored with the 18-byte extras of version 1; its time is its CAS. An expiry is stored
as DCP_EXPIRATION; streams that did not ask for that opcode get a deletion (dcp.stream.codec). The
value of a removal is empty, or a section of XATTRs (dcp.wire.xattrs) that outlives the document;
its datatype is 0x04 then. Log, memtable and blocks hold the same bytes, so nothing is encoded
twice. Entries that only the log holds (vbucket.model.control: a new partition version, a change of
state) have the opcode `LOG_CONTROL`, which is not sent on the wire, and a CBOR document as their
value.

The leader epoch of a change is that of the master that made it. It never falls with rising seqnos.

Who calls it: engine, log, store, merge. Big-endian.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from dcp.wire.opcode import Opcode
from vbucket.model.manifest import ManifestEvent, system_key

PREFIX: Final = Struct(">QI")
PREFIX_BYTES: Final = PREFIX.size
LOG_CONTROL: Final = 0xF0
"""Opcode of entries that never leave the log."""

MUTATION_ENTRY: Final = Struct(">QIHHHHI4xQQQII7x")
"""The part of a mutation's entry before its key: prev seqno, epoch; MUTATION_FORM, key length,
MUTATION_EXTRAS | datatype, vbucket, body length, (opaque), CAS; seqno, rev seqno, flags, expiry,
(lock time, nmeta, nru). Fields in parentheses are zero. Some adjacent fields are packed as one,
because every SET packs an entry."""
MUTATION_FORM: Final = 0x80 << 8 | Opcode.DCP_MUTATION
"""Magic and opcode."""
DELETION_ENTRY: Final = Struct(">QIBBHBBHIIQQQH")
"""The same for a deletion."""
EXPIRATION_ENTRY: Final = Struct(">QIBBHBBHIIQQQI")
"""The same for an expiry; its last field is the delete time, Unix seconds."""
SYSTEM_EVENT_ENTRY: Final = Struct(">QIBBHBBHIIQQIB")
"""The same for a system event; its kind and the version of its value follow the seqno."""
CONTROL_ENTRY: Final = Struct(">QIBBHBBHIIQ")

MUTATION_KEY_AT: Final = MUTATION_ENTRY.size  # 67
MUTATION_EXTRAS_BYTES: Final = 31
MUTATION_EXTRAS: Final = MUTATION_EXTRAS_BYTES << 8
"""The length of the extras, before the datatype."""
DELETION_EXTRAS_BYTES: Final = 18
EXPIRATION_EXTRAS_BYTES: Final = 20
SYSTEM_EVENT_EXTRAS_BYTES: Final = 13

META: Final = Struct(">13xBH1xB2xI4xQQQ")
"""opcode, key length, datatype, body length, CAS, seqno, rev seqno of any change (the last has no
meaning for a system event)."""
NEWEST: Final = Struct(">13xB3xB18xQQ")
"""opcode, datatype, seqno, rev seqno: what a change needs from the version that it replaces."""
OPCODE_AT: Final = PREFIX_BYTES + 1
DATATYPE_AT: Final = PREFIX_BYTES + 5
_VB_ID_AT: Final = PREFIX_BYTES + 6
VB_ID: Final = slice(_VB_ID_AT, _VB_ID_AT + 2)
"""Where an entry has its partition."""
LENGTHS: Final = Struct(">QIxBHBxHI")
"""prev seqno, epoch, opcode, key length, extras length, vbucket, body length."""
PREV_SEQNO: Final = Struct(">Q")
SEQNO: Final = Struct(">36xQ")
EXPIRY: Final = Struct(">56xI")
"""Of a mutation."""


class EntryHead(NamedTuple):
    """The fields before the key of an entry."""

    prev_seqno: int
    epoch: int
    opcode: int
    key_bytes: int
    extras_bytes: int
    vb_id: int
    body_bytes: int

    @property
    def entry_bytes(self) -> int:
        """Length of the whole entry."""
        return PREFIX_BYTES + 24 + self.body_bytes


def head_of(entry: bytes, offset: int = 0) -> EntryHead:
    """Return the head of the entry at `offset`. Raises struct.error if it is truncated."""
    return EntryHead(*LENGTHS.unpack_from(entry, offset))


def vb_id_of(entry: bytes) -> int:
    """Return the partition of an entry."""
    return int.from_bytes(entry[_VB_ID_AT : _VB_ID_AT + 2], "big")


def seqno_of(entry: bytes) -> int:
    """Return the seqno of a change."""
    seqno: int = SEQNO.unpack_from(entry)[0]
    return seqno


def prev_seqno_of(entry: bytes) -> int:
    """Return the seqno of the key's previous version, 0 if there is none."""
    seqno: int = PREV_SEQNO.unpack_from(entry)[0]
    return seqno


def is_deleted(entry: bytes) -> bool:
    """Whether the change leaves no document: a deletion, an expiry, a system event."""
    return entry[OPCODE_AT] != Opcode.DCP_MUTATION


def key_of(entry: bytes) -> bytes:
    """Return the key with its collection-id prefix."""
    head = head_of(entry)
    start = PREFIX_BYTES + 24 + head.extras_bytes
    return entry[start : start + head.key_bytes]


def key_in_frame(frame: bytes) -> bytes:
    """Return the key in a stored frame (an entry without its prefix)."""
    start = 24 + frame[4]
    return frame[start : start + (frame[2] << 8 | frame[3])]


def value_of(entry: bytes) -> bytes:
    """Return the value (b"" for a deletion)."""
    return entry[value_at(entry) :]


def value_at(entry: bytes) -> int:
    """Return where the value begins."""
    head = head_of(entry)
    return PREFIX_BYTES + 24 + head.extras_bytes + head.key_bytes


def expiry_of(entry: bytes) -> int:
    """Return the expiry of a document, absolute seconds, 0 if it has none."""
    expiry: int = EXPIRY.unpack_from(entry)[0]
    return expiry


def pack_system_event(vb_id: int, seqno: int, event: ManifestEvent, epoch: int = 0) -> bytes:
    """Return the entry of a system event; it has neither CAS nor previous version."""
    key, value = system_key(event), event.value()
    body = SYSTEM_EVENT_EXTRAS_BYTES + len(key) + len(value)
    head = SYSTEM_EVENT_ENTRY.pack(
        0, epoch, 0x80, Opcode.DCP_SYSTEM_EVENT, len(key), SYSTEM_EVENT_EXTRAS_BYTES, 0, vb_id,
        body, 0, 0, seqno, event.kind, event.version,
    )  # fmt: skip
    return head + key + value
