"""What is on its way between the nodes of `support.copies`."""

from __future__ import annotations

from dcp.wire.frame import FrameDecoder
from dcp.wire.opcode import Opcode
from failover.replication.messages import GroupMessage, Message, unpack_entries, unpack_group
from support.copies import Copies
from vbucket.engine.engine import SET


def put(copies: Copies, vb_id: int, key: bytes = b"\0k") -> None:
    """Write a document on node a."""
    node = copies.a
    node.now_ns += 1 << 16
    node.engine.begin_batch(node.now_ns)
    assert node.engine.store(SET, vb_id, key, key + b"v", 0, 0, 0, 0)[0] == 0


def messages_to(copies: Copies, member: str) -> list[Message | GroupMessage]:
    """Return what is on its way to a member, without delivering it."""
    wire = next(wire for wire in copies.wires if wire.node.member == member)
    wire.take()
    kinds = {Opcode.X_REPLICA_ENTRIES: unpack_entries, Opcode.X_REPLICA_GROUP: unpack_group}
    frames = FrameDecoder().feed(wire.to_replica)
    return [kinds[Opcode(frame.opcode)](frame) for frame in frames if frame.opcode in kinds]


def groups_to(copies: Copies, member: str) -> list[bytes]:
    """Return the whole groups that are on their way to a member."""
    found = messages_to(copies, member)
    return [each.entries for each in found if isinstance(each, GroupMessage) and each.entries]
