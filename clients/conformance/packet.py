"""Packets of the binary protocol, for the conformance kit: packed, cut out of bytes, shown.

This is the kit's own reading of docs/BinaryProtocol.md. It shares no code with the server, so that
a fault in the one does not hide a fault in the other.
"""

from __future__ import annotations

import json
from struct import Struct
from typing import Any, Final, NamedTuple

REQUEST: Final = 0x80
RESPONSE: Final = 0x81
FLEX_REQUEST: Final = 0x08
FLEX_RESPONSE: Final = 0x18
SERVER_REQUEST: Final = 0x82
_REQUESTS: Final = frozenset({REQUEST, FLEX_REQUEST, SERVER_REQUEST})
_RESPONSES: Final = frozenset({RESPONSE, FLEX_RESPONSE})
_FLEX: Final = frozenset({FLEX_REQUEST, FLEX_RESPONSE})
_HEADER: Final = Struct(">BBHBBHIIQ")
_FLEX_HEADER: Final = Struct(">BBBBBBHIIQ")
HEADER_BYTES: Final = 24
_STREAM_ID: Final = 2
"""Id of the frame info that has a stream's id."""
_ESCAPE: Final = 15
"""In half of a frame info's first byte: the next byte has the rest of the number."""
BODY_BYTES_MAX: Final = 64 << 20
"""A longer body is a lie about its length: documents have at most 20 MiB, packets 30 MiB."""
SHOWN_BYTES: Final = 48
"""Bytes of a key, a value or extras that an exchange shows."""

GET, SET, ADD, REPLACE, DELETE, INCREMENT, DECREMENT, QUIT = range(8)
GETQ, NOOP, VERSION, GETK = 0x09, 0x0A, 0x0B, 0x0C
APPEND, PREPEND, STAT, SETQ, QUITQ, TOUCH, GAT, HELLO = (
    0x0E, 0x0F, 0x10, 0x11, 0x17, 0x1C, 0x1D, 0x1F,
)  # fmt: skip
SASL_LIST_MECHS, SASL_AUTH, GET_ALL_VB_SEQNOS = 0x20, 0x21, 0x48
DCP_OPEN, DCP_ADD_STREAM, DCP_CLOSE_STREAM, DCP_STREAM_REQ, DCP_FAILOVER_LOG = range(0x50, 0x55)
STREAM_END, MARKER, MUTATION, DELETION, EXPIRATION, DCP_FLUSH = range(0x55, 0x5B)
DCP_NOOP, BUFFER_ACK, CONTROL, SYSTEM_EVENT, PREPARE = range(0x5C, 0x61)
SEQNO_ADVANCED, OSO_SNAPSHOT = 0x64, 0x65
SELECT_BUCKET, OBSERVE_SEQNO, GET_FAILOVER_LOG = 0x89, 0x91, 0x96
GET_CLUSTER_CONFIG, RANDOM_KEY, SEQNO_PERSISTENCE = 0xB5, 0xB6, 0xB7
SET_MANIFEST, GET_MANIFEST, GET_COLLECTION_ID, GET_SCOPE_ID = 0xB9, 0xBA, 0xBB, 0xBC
SUBDOC_DICT_UPSERT, GET_ERROR_MAP = 0xC8, 0xFE

OPCODES: Final = {
    number: name
    for name, number in list(globals().items())
    if isinstance(number, int)
    and name.isupper()
    and not name.startswith("_")
    and not name.endswith(("REQUEST", "RESPONSE", "BYTES", "BYTES_MAX"))
}
"""Opcode -> its name."""

OK, ENOENT, EEXISTS, E2BIG, EINVAL, NOT_STORED, DELTA_BADVAL, NOT_MY_VBUCKET = range(8)
NO_BUCKET, STREAM_NOT_FOUND = 0x08, 0x0A
AUTH_ERROR, ERANGE, ROLLBACK, EACCESS = 0x20, 0x22, 0x23, 0x24
UNKNOWN_COMMAND, NOT_SUPPORTED, ETMPFAIL = 0x81, 0x83, 0x86
UNKNOWN_COLLECTION, UNKNOWN_SCOPE, STREAMID_INVALID = 0x88, 0x8C, 0x8D
STATUSES: Final = {
    OK: "OK", ENOENT: "KEY_ENOENT", EEXISTS: "KEY_EEXISTS", E2BIG: "E2BIG", EINVAL: "EINVAL",
    NOT_STORED: "NOT_STORED", DELTA_BADVAL: "DELTA_BADVAL", NOT_MY_VBUCKET: "NOT_MY_VBUCKET",
    NO_BUCKET: "NO_BUCKET", STREAM_NOT_FOUND: "DCP_STREAM_NOT_FOUND", AUTH_ERROR: "AUTH_ERROR",
    ERANGE: "ERANGE", ROLLBACK: "ROLLBACK", EACCESS: "EACCESS",
    UNKNOWN_COMMAND: "UNKNOWN_COMMAND", NOT_SUPPORTED: "NOT_SUPPORTED", ETMPFAIL: "ETMPFAIL",
    UNKNOWN_COLLECTION: "UNKNOWN_COLLECTION", UNKNOWN_SCOPE: "UNKNOWN_SCOPE",
    STREAMID_INVALID: "DCP_STREAMID_INVALID",
}  # fmt: skip
REFUSALS: Final = frozenset({UNKNOWN_COMMAND, NOT_SUPPORTED})
"""Statuses with which a server says that it does not have what was asked."""

JSON, SNAPPY, XATTR = 1, 2, 4
"""Bits of the datatype."""


class MalformedError(Exception):
    """Bytes that are no packet, or a packet that contradicts itself. The text says how."""


def frame_infos(framing: bytes) -> dict[int, bytes]:
    """Return the frame infos of flexible framing: id -> data. Raises MalformedError."""
    rest, found = list(framing), dict[int, bytes]()
    try:
        while rest:
            kind, length = divmod(rest.pop(0), 16)
            kind += rest.pop(0) if kind == _ESCAPE else 0
            length += rest.pop(0) if length == _ESCAPE else 0
            found[kind] = bytes(rest.pop(0) for _ in range(length))
    except IndexError:
        raise MalformedError(f"the frame infos {framing.hex()} are cut off") from None
    return found


def status_name(status: int) -> str:
    """Return what people call a status."""
    return STATUSES.get(status, f"0x{status:02x}")


def opcode_name(opcode: int) -> str:
    """Return what people call an opcode."""
    return OPCODES.get(opcode, f"0x{opcode:02x}")


class Packet(NamedTuple):
    """One packet. `field` is the status of a response and the partition of a request."""

    magic: int
    opcode: int
    field: int
    opaque: int
    cas: int = 0
    datatype: int = 0
    framing: bytes = b""
    extras: bytes = b""
    key: bytes = b""
    value: bytes = b""

    @property
    def is_request(self) -> bool:
        """Whether it asks or tells, not answers."""
        return self.magic in _REQUESTS

    @property
    def size(self) -> int:
        """All its bytes, as flow control counts them."""
        parts = (self.framing, self.extras, self.key, self.value)
        return HEADER_BYTES + sum(len(part) for part in parts)

    @property
    def stream_id(self) -> int | None:
        """The stream id of its flexible framing, None without one. Raises MalformedError."""
        info = frame_infos(self.framing).get(_STREAM_ID)
        return None if info is None else int.from_bytes(info, "big")

    def unpack(self, form: str, what: str = "extras") -> tuple[Any, ...]:
        """Unpack the extras, or the `value`. Raises MalformedError if they have another size."""
        layout, data = Struct(">" + form), self.value if what == "value" else self.extras
        if len(data) != layout.size:
            raise MalformedError(
                f"the {what} of {opcode_name(self.opcode)} have {len(data)} bytes,"
                f" not {layout.size}"
            )
        return layout.unpack(data)

    def document(self) -> Any:
        """Return the value, read as JSON. Raises MalformedError."""
        try:
            return json.loads(self.value)
        except (ValueError, RecursionError) as error:
            raise MalformedError(
                f"the value of {opcode_name(self.opcode)} is no JSON: {error}"
            ) from None

    def __str__(self) -> str:
        """Return the packet in one line, decoded."""
        name = opcode_name(self.opcode)
        if self.is_request:
            head = f"{name} vb {self.field}"
        else:
            head = f"{name} answer {status_name(self.field)}"
        parts = [f"opaque 0x{self.opaque:x}"]
        parts += [f"cas {self.cas}"] if self.cas else []
        parts += [f"datatype 0x{self.datatype:02x}"] if self.datatype else []
        parts += [f"framing {self.framing.hex()}"] if self.framing else []
        if self.extras:
            parts.append(_named_extras(self) or f"extras {shown(self.extras, as_hex=True)}")
        parts += [f"key {shown(self.key)}"] if self.key else []
        if self.value:
            parts.append(_named_value(self) or f"value {shown(self.value)}")
        return f"{head}: {', '.join(parts)}"


def shown(data: bytes | bytearray, *, as_hex: bool = False) -> str:
    """Return bytes as people read them, the first `SHOWN_BYTES`."""
    first = bytes(data[:SHOWN_BYTES])
    text = first.hex() if as_hex else repr(first)[1:]
    return text if len(data) <= SHOWN_BYTES else f"{text}... ({len(data)} bytes)"


_EXTRAS: Final[dict[tuple[int, bool], tuple[str, tuple[str, ...]]]] = {
    (SET, True): ("II", ("flags", "expiry")),
    (DCP_OPEN, True): ("II", ("seqno", "flags")),
    (DCP_STREAM_REQ, True): (
        "II5Q",
        ("flags", "reserved", "start", "end", "uuid", "snapshot start", "snapshot end"),
    ),
    (STREAM_END, True): ("I", ("reason",)),
    (MARKER, True): ("QQI", ("start", "end", "type")),
    (MUTATION, True): (
        "QQIIIHB", ("seqno", "revision", "flags", "expiry", "lock time", "nmeta", "nru"),
    ),
    (EXPIRATION, True): ("QQI", ("seqno", "revision", "delete time")),
    (SYSTEM_EVENT, True): ("QIB", ("seqno", "event", "version")),
    (SEQNO_ADVANCED, True): ("Q", ("seqno",)),
    (OSO_SNAPSHOT, True): ("I", ("flags",)),
    (BUFFER_ACK, True): ("I", ("bytes",)),
    (SET, False): ("QQ", ("uuid", "seqno")),
    (DELETE, False): ("QQ", ("uuid", "seqno")),
}  # fmt: skip
"""(Opcode, is it a request) -> layout and names of its extras."""


def _named_extras(packet: Packet) -> str:
    form, names = _EXTRAS.get((packet.opcode, packet.is_request), ("", ()))
    if packet.opcode == DELETION and len(packet.extras) == 18:
        form, names = "QQH", ("seqno", "revision", "nmeta")
    elif packet.opcode == DELETION:
        form, names = "QQIB", ("seqno", "revision", "delete time", "unused")
    layout = Struct(">" + form)
    if not form or layout.size != len(packet.extras):
        return ""
    fields = zip(names, layout.unpack(packet.extras), strict=True)
    return ", ".join(f"{name} {number}" for name, number in fields)


def _named_value(packet: Packet) -> str:
    if packet.opcode not in {DCP_STREAM_REQ, DCP_FAILOVER_LOG, GET_FAILOVER_LOG}:
        return ""
    if packet.field == ROLLBACK and len(packet.value) == 8 and not packet.is_request:
        return f"seqno {int.from_bytes(packet.value, 'big')}"
    if packet.is_request or packet.field or len(packet.value) % 16:
        return ""
    log = Struct(">QQ").iter_unpack(packet.value)
    return "log " + " ".join(f"{uuid:x}@{seqno}" for uuid, seqno in log)


def pack(packet: Packet) -> bytes:
    """Return a packet's bytes."""
    head = (packet.magic, packet.opcode)
    rest = (
        len(packet.extras), packet.datatype, packet.field, packet.size - HEADER_BYTES,
        packet.opaque, packet.cas,
    )  # fmt: skip
    if packet.magic in _FLEX:
        header = _FLEX_HEADER.pack(*head, len(packet.framing), len(packet.key), *rest)
    else:
        header = _HEADER.pack(*head, len(packet.key), *rest)
    return header + packet.framing + packet.extras + packet.key + packet.value


def take(data: bytes | bytearray) -> tuple[Packet, int] | None:
    """Return the first packet of what a server sent, and its bytes; None if more have to come.

    Raises MalformedError.
    """
    if data and data[0] not in _REQUESTS | _RESPONSES:
        raise MalformedError(
            f"the server does not speak the binary protocol: it sent {shown(data)}"
        )
    if len(data) < HEADER_BYTES:
        return None
    if data[0] in _FLEX:
        magic, opcode, framing_n, key_n, extras_n, datatype, field, body_n, opaque, cas = (
            _FLEX_HEADER.unpack_from(data)
        )
    else:
        magic, opcode, key_n, extras_n, datatype, field, body_n, opaque, cas = _HEADER.unpack_from(
            data
        )
        framing_n = 0
    named = f"{opcode_name(opcode)} (opaque 0x{opaque:x})"
    if body_n < framing_n + extras_n + key_n:
        raise MalformedError(
            f"{named} lies about its lengths: framing, extras and key have"
            f" {framing_n + extras_n + key_n} bytes, the body {body_n}"
        )
    if body_n > BODY_BYTES_MAX:
        raise MalformedError(f"{named} says that its body has {body_n} bytes")
    end = HEADER_BYTES + body_n
    if len(data) < end:
        return None
    extras = HEADER_BYTES + framing_n
    key = extras + extras_n
    value = key + key_n
    packet = Packet(
        magic, opcode, field, opaque, cas, datatype, bytes(data[HEADER_BYTES:extras]),
        bytes(data[extras:key]), bytes(data[key:value]), bytes(data[value:end]),
    )  # fmt: skip
    frame_infos(packet.framing)
    return packet, end
