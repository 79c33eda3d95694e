"""Buffers the bytes of a stream between reads, and decodes single frames. Pure.

The decoders of consumers, backups and Spark tasks share it. They decode changes themselves.

    data = buffer.take(read)            # None: there is no complete frame yet
    ... frame_at(data, at, len(data)) ...
    buffer.keep(data, at)               # what is left, from `at` on

Invariant: only one incomplete frame is kept. Its parts are joined when it is complete, so a large
frame that arrives in many reads is copied once.
"""

from __future__ import annotations

from dcp.wire.frame import HEADER, HEADER_BYTES, MAX_BODY_BYTES, Frame, RemoteProtocolError
from dcp.wire.opcode import Magic

_MAGICS = frozenset({Magic.REQUEST, Magic.RESPONSE, Magic.SERVER_REQUEST})


class FrameBuffer:
    """See the module."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._size_bytes = 0
        self._needed_bytes = HEADER_BYTES

    def take(self, data: bytes) -> bytes | None:
        """Return all bytes since the last complete frame; None if they are too few for a frame."""
        self._chunks.append(data)
        self._size_bytes += len(data)
        return None if self._size_bytes < self._needed_bytes else b"".join(self._chunks)

    def keep(self, data: bytes, at: int) -> None:
        """Keep the rest of `data`, the beginning of a frame, and note the length of that frame.

        Raises RemoteProtocolError if the length is above the limit.
        """
        self._size_bytes = len(data) - at
        self._chunks = [data[at:]] if self._size_bytes else []
        self._needed_bytes = HEADER_BYTES
        if self._size_bytes >= HEADER_BYTES:
            body = HEADER.unpack_from(data, at)[6]
            if body > MAX_BODY_BYTES:
                raise RemoteProtocolError(f"a body of {body} bytes; the limit is {MAX_BODY_BYTES}")
            self._needed_bytes += body


def frame_at(data: bytes, at: int, end: int) -> tuple[Frame, int] | None:
    """Return the frame at `at` and where it stops, None if it is not complete.

    Raises RemoteProtocolError if the bytes cannot be a frame.
    """
    magic, opcode, key_len, extras_len, datatype, status, body, opaque, cas = HEADER.unpack_from(
        data, at
    )
    if magic not in _MAGICS:
        raise RemoteProtocolError(f"no DCP message begins with byte 0x{magic:02x}")
    stop = at + HEADER_BYTES + body
    key_at = at + HEADER_BYTES + extras_len
    if key_at + key_len > stop:
        raise RemoteProtocolError(f"opcode 0x{opcode:02x}: key longer than the body")
    if stop > end:
        return None
    frame = Frame(
        magic, opcode, datatype, status, opaque, cas, data[at + HEADER_BYTES : key_at],
        data[key_at : key_at + key_len], data[key_at + key_len : stop],
    )  # fmt: skip
    return frame, stop
