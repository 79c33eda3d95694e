"""Packs stored frames of one partition into loads and requests of a restore. Pure.

A load is sent as one packet (X_PUT_FRAMES, an extension). If the server does not support it, or
refuses the packet, each frame is sent as SETQ_WITH_META or DELQ_WITH_META. With the option FIT_META
the commands are not quiet, because the answer carries the document's CAS.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct, pack
from typing import Final, NamedTuple

from clients.backup.selection import split_key
from dcp.wire.frame import HEADER, HEADER_BYTES
from dcp.wire.message import (
    FIT_META,
    PUT_FRAMES_BYTES_MAX,
    PUT_FRAMES_MAX,
    PUT_FRAMES_REQUEST,
    U32,
    U64,
)
from dcp.wire.opcode import Magic, Opcode
from vbucket.model.ids import vbucket_of

SKIP_CONFLICT_RESOLUTION: Final = 0x01
IS_EXPIRATION: Final = 0x10

FRAMES_BYTES_MAX: Final = PUT_FRAMES_BYTES_MAX - PUT_FRAMES_MAX * U32.size
"""Maximum bytes of frames in a packet. The rest is for the table of lengths."""

_HEAD: Final = Struct(">xBHBBHIIQQQII")
"""Opcode, key length, extras length, datatype, vbucket, body length, opaque, CAS, seqno, revision;
then flags and expiry of a mutation."""
_KEY_LEN_AT: Final = 2
_EXTRAS_LEN_AT: Final = 4
_VB_AT: Final = 6
_CAS_AT: Final = 16
_TIME: Final = Struct(">I")
_U16: Final = Struct(">H")
_REQUEST: Final = Struct(">BBHBBHIIQIIQQI")
"""A header; flags, expiry, revision, CAS, options."""
_EXTRAS_BYTES: Final = 28
_PAD: Final = bytes(_HEAD.size)
_MUTATION: Final = int(Opcode.DCP_MUTATION)
_EXPIRATION: Final = int(Opcode.DCP_EXPIRATION)


class Load(NamedTuple):
    """Consecutive frames of one partition. They fit in a packet, unless it is a single frame."""

    vb_id: int
    frames: bytes
    body_sizes: Sequence[int]
    """The length of each frame's body."""

    @property
    def changes(self) -> int:
        """The number of frames."""
        return len(self.body_sizes)


class Loader:
    """Collects a partition's frames into loads."""

    def __init__(self, vb_id: int) -> None:
        self._vb_id = vb_id
        self._parts: list[bytes] = []
        self._body_sizes: list[int] = []
        self._size_bytes = 0
        self._full: list[Load] = []

    def add(self, frame: bytes) -> None:
        """Add a frame."""
        if self._size_bytes + len(frame) > FRAMES_BYTES_MAX:
            self._close()
        self._gather(frame, (len(frame) - HEADER_BYTES,))

    def add_run(
        self, data: bytes, starts: Sequence[int], ends: Sequence[int], body_sizes: Sequence[int]
    ) -> None:
        """Add contiguous frames."""
        at, end = 0, len(starts)
        while at < end:
            limit = starts[at] + FRAMES_BYTES_MAX - self._size_bytes
            room = PUT_FRAMES_MAX - len(self._body_sizes)
            stop = bisect_right(ends, limit, at, min(end, at + room))
            if stop == at:
                if self._parts:
                    self._close()
                    continue
                stop = at + 1  # larger than a packet: a load of its own
            self._gather(data[starts[at] : ends[stop - 1]], body_sizes[at:stop])
            at = stop

    def take(self, *, is_last: bool) -> list[Load]:
        """Return the full loads; with `is_last` also the last, partial one."""
        if is_last:
            self._close()
        full, self._full = self._full, []
        return full

    def _gather(self, frames: bytes, body_sizes: Sequence[int]) -> None:
        self._parts.append(frames)
        self._body_sizes += body_sizes
        self._size_bytes += len(frames)
        if len(self._body_sizes) >= PUT_FRAMES_MAX or self._size_bytes >= FRAMES_BYTES_MAX:
            self._close()

    def _close(self) -> None:
        if self._parts:
            self._full.append(Load(self._vb_id, b"".join(self._parts), self._body_sizes))
        self._parts, self._body_sizes = [], []
        self._size_bytes = 0


def load_of(vb_id: int, frames: Sequence[bytes]) -> Load:
    """Return these frames as a load."""
    return Load(vb_id, b"".join(frames), [len(frame) - HEADER_BYTES for frame in frames])


def by_key(load: Load, num_vbuckets: int) -> list[Load]:
    """Return the frames of a load for a server with another number of partitions. Each goes where
    its key belongs there; those of one partition stay in order.
    """
    places: dict[int, list[bytes]] = {}
    for frame in frames_of_load(load):
        key_at = HEADER_BYTES + frame[_EXTRAS_LEN_AT]
        key = frame[key_at : key_at + _U16.unpack_from(frame, _KEY_LEN_AT)[0]]
        vb_id = vbucket_of(split_key(key)[1], num_vbuckets)
        moved = b"".join((frame[:_VB_AT], _U16.pack(vb_id), frame[_VB_AT + _U16.size :]))
        places.setdefault(vb_id, []).append(moved)
    return [load_of(vb_id, frames) for vb_id, frames in places.items()]


def loads_of(vb_id: int, frames: Iterable[bytes]) -> Iterator[Load]:
    """Yield the loads of a partition's frames."""
    loader = Loader(vb_id)
    for frame in frames:
        loader.add(frame)
        yield from loader.take(is_last=False)
    yield from loader.take(is_last=True)


def frames_of_load(load: Load) -> list[bytes]:
    """Return a load's frames one by one."""
    found = []
    at = 0
    for body_bytes in load.body_sizes:
        stop = at + HEADER_BYTES + body_bytes
        found.append(load.frames[at:stop])
        at = stop
    return found


def cas_of(frame: bytes) -> int:
    """Return the CAS of a frame."""
    cas: int = U64.unpack_from(frame, _CAS_AT)[0]
    return cas


def packet(load: Load, options: int) -> bytes:
    """Return a load as one request. Its frames are copied once."""
    count = load.changes
    extras = PUT_FRAMES_REQUEST.pack(options, count)
    sizes = pack(f">{count}I", *load.body_sizes)
    body_bytes = len(extras) + len(sizes) + len(load.frames)
    header = HEADER.pack(
        Magic.REQUEST, Opcode.X_PUT_FRAMES, 0, len(extras), 0, load.vb_id, body_bytes, 0, 0
    )
    return b"".join((header, extras, sizes, load.frames))


def single_packets(load: Load, options: int) -> list[bytes]:
    """Return one request per frame of a load. Opaques count from 0."""
    return [_single(frame, opaque, options) for opaque, frame in enumerate(frames_of_load(load))]


def _single(frame: bytes, opaque: int, options: int) -> bytes:
    opcode, key_len, extras_len, datatype, vb_id, _, _, cas, _, rev_seqno, flags, expiry = (
        _HEAD.unpack_from(frame + _PAD)
    )
    key_at = HEADER_BYTES + extras_len
    is_quiet = not options & FIT_META
    request, rest = Opcode.SETQ_WITH_META if is_quiet else Opcode.SET_WITH_META, frame[key_at:]
    if opcode != _MUTATION:
        request = Opcode.DELQ_WITH_META if is_quiet else Opcode.DEL_WITH_META
        flags = 0
        if opcode == _EXPIRATION:
            options |= IS_EXPIRATION
        expiry = _TIME.unpack_from(frame, 40)[0] if opcode == _EXPIRATION else 0
    head = _REQUEST.pack(
        0x80, request, key_len, _EXTRAS_BYTES, datatype, vb_id, _EXTRAS_BYTES + len(rest), opaque,
        0, flags, expiry, rev_seqno, cas, options,
    )  # fmt: skip
    return head + rest
