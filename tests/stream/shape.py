"""What tests of streams write, and how they see what came: one short row per message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcp.wire.frame import Frame
from dcp.wire.message import (
    EndReason,
    parse_marker,
    parse_previous_value,
    parse_snapshot_end,
    parse_stream_end,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer

VB = 7


def connect(
    node: MemoryNode, *features: int, name: bytes = b"", flags: int = 1, **controls: str
) -> Peer:
    """Return a consumer of its own name that has negotiated what is told."""
    peer = node.connect()
    peer.hello(*features)
    assert peer.open(name or b"%d" % node.hub.connection_count, flags).status == Status.OK
    for key, value in controls.items():
        assert peer.control(key.encode(), value.encode()).status == Status.OK, key
    return peer


def set_all(node: MemoryNode, writer: Peer, keys: str) -> None:
    """Set each letter of `keys` as a key, in one group."""
    for key in keys:
        writer.set(VB, key.encode(), b"value")
    node.commit()


def shape(frames: list[Frame]) -> list[Any]:
    """Return the messages as rows, see ROWS."""
    return [ROWS[Opcode(frame.opcode)](frame) for frame in frames]


def marker_flags(frames: list[Frame]) -> list[int]:
    """Return the flags of the markers among the messages."""
    markers = [frame for frame in frames if frame.opcode == Opcode.DCP_SNAPSHOT_MARKER]
    return [parse_marker(frame).flags for frame in markers]


def _seqno(frame: Frame) -> int:
    return int.from_bytes(frame.extras[:8], "big")


def _removal(frame: Frame) -> str:
    return f"{_seqno(frame)}:-{frame.key.decode()}"


def _previous(frame: Frame) -> str:
    by_seqno, prev_seqno = parse_previous_value(frame)
    return f"{by_seqno} was {prev_seqno}={frame.value.decode()}"


ROWS: dict[Opcode, Callable[[Frame], Any]] = {
    Opcode.DCP_SNAPSHOT_MARKER: lambda frame: tuple(parse_marker(frame)[:2]),
    Opcode.DCP_MUTATION: lambda frame: f"{_seqno(frame)}:{frame.key.decode()}",
    Opcode.DCP_DELETION: _removal,
    Opcode.DCP_EXPIRATION: _removal,
    Opcode.DCP_SEQNO_ADVANCED: lambda frame: f"{_seqno(frame)}:",
    Opcode.DCP_SNAPSHOT_END: lambda frame: ("end", parse_snapshot_end(frame)),
    Opcode.DCP_PREVIOUS_VALUE: _previous,
    Opcode.DCP_STREAM_END: lambda frame: EndReason(parse_stream_end(frame)),
}
"""Markers as (start, end), changes as "seqno:key", removals with a minus before the key."""
