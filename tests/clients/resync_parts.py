"""A node in memory that changes while somebody compares with it, for tests of resyncs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st

from clients.address import ServerAddress
from clients.event import Deletion, Event, Mutation
from clients.link.topology import Place, Topology, single_node
from clients.mirror.mirror_state import MemoryStore, take
from clients.position import Position
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, FrameDecoder, pack_request
from dcp.wire.message import parse_deletion, parse_mutation
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode
from vbucket.engine.lifecycle import PurgeRefusedError, branch, purge
from vbucket.engine.partition import BranchRefusedError
from vbucket.model.ids import vbucket_of

VB = 1
PARTITIONS = 2
KEYS = [key for key in (b"k%d" % n for n in range(1200)) if vbucket_of(key, PARTITIONS) == VB]
ADDRESS = ServerAddress("node", 1)


class PeerLink:
    """A connection to a node in memory, which `before` may change before each answer."""

    is_closed = False
    place: Place = ("node", 1)
    address = ADDRESS
    node = "node:1"

    def __init__(self, node: MemoryNode, before: Callable[[], None] = lambda: None) -> None:
        self.memory = node
        self.before = before
        self.peer = node.connect()
        self.batches = 0

    def topology(self) -> Topology:
        return single_node("node", 1, PARTITIONS)

    def take_opaques(self, _count: int) -> int:
        return 1

    def close(self) -> None:
        pass

    async def send_batch(
        self, packets: bytes, _opaque: int, count: int, *, is_open_ended: bool = False
    ) -> list[Frame]:
        self.before()
        self.batches += 1
        frames = [
            frame
            for request in FrameDecoder().feed(packets)
            for frame in self.peer.send(_packed(request))
        ]
        self.memory.commit()
        assert is_open_ended or len(frames) == count
        return frames


def _packed(request: Frame) -> bytes:
    return pack_request(
        request.opcode, vb_id=request.vb_id, opaque=request.opaque, extras=request.extras,
        key=request.key, value=request.value,
    )  # fmt: skip


def followed(node: MemoryNode, store: MemoryStore, position: Position) -> bool:
    """Take what a stream from a position sends; False: the server answers ROLLBACK."""
    peer = node.connect()
    peer.open()
    snap = position.snap_start, position.snap_end
    answer = peer.stream(VB, position.seqno, uuid=position.vb_uuid, snap=snap)
    if answer.status == Status.ROLLBACK:
        return False
    assert answer.status == Status.OK, answer
    events: list[Event] = []
    for frame in peer.drain():
        key = frame.key
        if frame.opcode == Opcode.DCP_MUTATION:
            sent = parse_mutation(frame)
            events.append(
                Mutation(VB, key, frame.value, sent.by_seqno, sent.rev_seqno, frame.cas, 0, 0)
            )
        elif frame.opcode in {Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION}:
            gone = parse_deletion(frame)
            events.append(Deletion(VB, key, gone.by_seqno, gone.rev_seqno, frame.cas))
    take(store, events, {})
    return True


Change = tuple[str, int, int]
changes = st.lists(
    st.tuples(
        st.sampled_from(["set", "set", "set", "delete", "merge", "purge", "branch", "crash"]),
        st.integers(0, 300), st.integers(1, 60),
    ),
    max_size=6,
)  # fmt: skip


def apply(node: MemoryNode, change: Change, prefix: bytes = b"") -> None:
    """Change a node. `prefix`: of the keys of a collection; the node knows it then."""
    kind, first, count = change
    part = node.engine.partitions[VB]
    peer = node.connect()
    if prefix:
        peer.hello(Feature.COLLECTIONS)
    match kind:
        case "set":
            for key in KEYS[first : first + count]:
                peer.set(VB, prefix + key, b"%d" % part.high_seqno)
        case "delete":
            for key in KEYS[first : first + count]:
                peer.delete(VB, prefix + key)
        case "merge":
            node.merge()
        case "purge":
            node.merge()
            with pytest.MonkeyPatch.context():
                try:
                    purge(node.engine, VB)
                except PurgeRefusedError:
                    return
            node.commit()
            node.merge()
            node.compact([VB])
        case "branch":
            node.commit()
            try:
                branch(node.engine, VB, max(part.high_seqno - count, 0))
            except BranchRefusedError:
                return
    node.commit()
