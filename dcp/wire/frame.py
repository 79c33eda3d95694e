"""Framing: a 24-byte header and a body; big-endian throughout.

`FrameDecoder` is the reading side of clients and tests: bytes in, `Frame` out. The server's session
has its own loop over the same header structs, because it handles whole batches.

Limits
- a body has at most `MAX_BODY_BYTES` (a value of 20 MiB as in kv_engine, plus room for key and
  extras). A longer one raises `RemoteProtocolError` before its body is buffered.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Final, NamedTuple

from dcp.wire.opcode import Magic

HEADER_BYTES: Final = 24
HEADER: Final = Struct(">BBHBBHIIQ")
"""magic, opcode, key length, extras length, datatype, vbucket or status, body length, opaque, CAS.

The opaque is echoed unchanged; its byte order does not matter."""

FLEX_HEADER: Final = Struct(">BBBBBBHIIQ")
"""The same for flex packets: the length of the framing extras and an 8-bit key length share the
field of the key length."""

MAX_KEY_BYTES: Final = 250
"""Longest logical key (memcached, Couchbase)."""

MAX_VALUE_BYTES: Final = 20 * 1024 * 1024
"""Largest value (Couchbase)."""

MAX_BODY_BYTES: Final = MAX_VALUE_BYTES + 4096


class ProtocolError(Exception):
    """The protocol was broken: `LocalProtocolError` by this side, `RemoteProtocolError` by the
    peer.
    """


class LocalProtocolError(ProtocolError):
    """The caller asked for something that the protocol cannot express."""


class RemoteProtocolError(ProtocolError):
    """The peer sent bytes that are no valid frame. The connection cannot be used any more."""


class Frame(NamedTuple):
    """One decoded packet. In a request, `status` is the vbucket id.

    `framing` holds the framing extras of a flex packet, and is b"" in other packets.
    """

    magic: int
    opcode: int
    datatype: int
    status: int
    opaque: int
    cas: int
    extras: bytes
    key: bytes
    value: bytes
    framing: bytes = b""

    @property
    def vb_id(self) -> int:
        """The vbucket id of a request (the same header field that holds a response's status)."""
        return self.status

    @property
    def is_request(self) -> bool:
        """Whether this is a request, a server-initiated one included."""
        return self.magic in {Magic.REQUEST, Magic.FLEX_REQUEST, Magic.SERVER_REQUEST}

    @property
    def wire_bytes(self) -> int:
        """Length of the packet on the wire. Flow control counts this."""
        return HEADER_BYTES + len(self.framing) + len(self.extras) + len(self.key) + len(self.value)


def pack_request(
    opcode: int,
    *,
    vb_id: int = 0,
    opaque: int = 0,
    cas: int = 0,
    extras: bytes = b"",
    key: bytes = b"",
    value: bytes = b"",
    datatype: int = 0,
    magic: int = Magic.REQUEST,
) -> bytes:
    """Return one request packet."""
    body = len(extras) + len(key) + len(value)
    return (
        HEADER.pack(magic, opcode, len(key), len(extras), datatype, vb_id, body, opaque, cas)
        + extras
        + key
        + value
    )


def pack_response(
    opcode: int,
    status: int = 0,
    *,
    opaque: int = 0,
    cas: int = 0,
    extras: bytes = b"",
    key: bytes = b"",
    value: bytes = b"",
    datatype: int = 0,
) -> bytes:
    """Return one response packet."""
    body = len(extras) + len(key) + len(value)
    return (
        HEADER.pack(
            Magic.RESPONSE, opcode, len(key), len(extras), datatype, status, body, opaque, cas
        )
        + extras
        + key
        + value
    )


def frame_infos(framing: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the id and the data of each frame info in the framing extras of a flex packet.

    Raises RemoteProtocolError after the last one if the extras are cut short.
    """
    position, end = 0, len(framing)
    while position < end:
        frame_id, length = framing[position] >> 4, framing[position] & 0x0F
        position += 1
        if frame_id == 15 and position < end:
            frame_id += framing[position]
            position += 1
        if length == 15 and position < end:
            length += framing[position]
            position += 1
        yield frame_id, framing[position : position + length]
        position += length
    if position != end:
        raise RemoteProtocolError("the framing extras are cut short")


_CLASSIC: Final = frozenset(
    {Magic.REQUEST, Magic.RESPONSE, Magic.SERVER_REQUEST, Magic.SERVER_RESPONSE}
)
_FLEX: Final = frozenset({Magic.FLEX_REQUEST, Magic.FLEX_RESPONSE})


class FrameDecoder:
    """Bytes in, frames out. It holds at most one incomplete frame and the bytes of one read."""

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._buffer = b""
        self._max_body_bytes = max_body_bytes

    @property
    def buffered_bytes(self) -> int:
        """Bytes that are held of an incomplete frame."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """Take the bytes of one read; return the frames that are complete now.

        Raises RemoteProtocolError if the bytes are no valid frame or the frame is too large. The
        frames before it in the same read are lost, and the connection is unusable.
        """
        buffer = self._buffer + data if self._buffer else data
        frames: list[Frame] = []
        append = frames.append
        unpack = HEADER.unpack_from
        position, end = 0, len(buffer)
        while end - position >= HEADER_BYTES:
            magic, opcode, key_len, extras_len, datatype, status, body_len, opaque, cas = unpack(
                buffer, position
            )
            framing_len = 0
            if magic not in _CLASSIC:
                if magic not in _FLEX:
                    raise RemoteProtocolError(f"no packet begins with byte 0x{magic:02x}")
                framing_len, key_len = key_len >> 8, key_len & 0xFF
            if body_len > self._max_body_bytes:
                raise RemoteProtocolError(
                    f"body of {body_len} bytes; at most {self._max_body_bytes} are allowed"
                )
            if framing_len + extras_len + key_len > body_len:
                raise RemoteProtocolError(
                    f"extras and key of opcode 0x{opcode:02x} are longer than its body"
                )
            start = position + HEADER_BYTES
            if end - start < body_len:
                break
            position = start + body_len
            extras_at = start + framing_len
            key_at = extras_at + extras_len
            value_at = key_at + key_len
            append(
                Frame(
                    magic,
                    opcode,
                    datatype,
                    status,
                    opaque,
                    cas,
                    buffer[extras_at:key_at],
                    buffer[key_at:value_at],
                    buffer[value_at:position],
                    buffer[start:extras_at] if framing_len else b"",
                )
            )
        self._buffer = buffer[position:] if position else buffer
        return frames
