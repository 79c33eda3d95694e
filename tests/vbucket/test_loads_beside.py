"""Loads beside other work: what a flush does meanwhile, and packets that travel ahead."""

from __future__ import annotations

from test_loads import VB, many

from dcp.session.state import FLUSH_PAUSE_NS
from dcp.wire.frame import FrameDecoder, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import LoadingNode, RestoringPeer
from vbucket.engine.engine import SET


def test_flush_waits_for_loads_and_ends_despite_more_packets() -> None:
    node = LoadingNode(partitions=8)
    restoring = RestoringPeer(node)
    restoring.put(VB, many(10))
    node.load()
    assert restoring.answers()
    node.engine.store(SET, 6, b"\0a", b"\0av", 0, 0, 0, 0)
    restoring.put(VB, many(10, b"\0x"))
    flusher = node.connect()
    packet = pack_request(Opcode.FLUSH)
    flusher.session.receive(packet, node.now_ns)
    for _ in range(3):
        node.now_ns += FLUSH_PAUSE_NS
        flusher.session.resume(node.now_ns)
        restoring.put(VB, many(10, b"\0y"))
        assert flusher.state.unfinished is not None
        assert not flusher.state.answers, "it is neither done nor refused"
    assert flusher.state.pause.until_ns == node.now_ns + FLUSH_PAUSE_NS, "it does not spin"
    assert node.engine.partitions[6].item_count == 0, "other partitions do not wait for a load"
    node.load()
    restoring.peer.session.resume(node.now_ns)
    node.now_ns += FLUSH_PAUSE_NS
    flusher.session.resume(node.now_ns)
    while flusher.state.unfinished is not None:
        flusher.session.resume(node.now_ns)
    assert [answer.status for answer in FrameDecoder().feed(b"".join(flusher.state.answers))] == [
        Status.OK
    ]
    part = node.engine.partitions[VB]
    assert part.item_count == 20, "what came after the flush began stays"
    assert node.engine.versions.newest_entry(part, b"\0k3")[13] == Opcode.DCP_DELETION


def test_packets_that_travel_ahead_are_those_of_the_loads() -> None:
    """Each once, in order, as many as there is room for; what is begun or applied does not."""
    node = LoadingNode(partitions=8)
    loads = node.engine.loads
    peer = RestoringPeer(node)
    asked: list[int] = []
    loads.on_packet = lambda: asked.append(1)
    for number in range(6):
        peer.put(number, many(5, vb_id=number))
    assert len(asked) == 6
    first, second = loads.ahead(2 * 5 * 70)
    assert (first.number, second.number) == (1, 2)
    assert loads.ahead(0) == []
    requests = node.begin_load()
    assert [packet for request in requests for packet in request.packets][:2] == [first, second]
    assert loads.ahead(1 << 20) == [], "they are sent with their load"
    peer.put(6, many(5, vb_id=6))
    node.end_load(node.load_into_store(requests))
    loads.refuse_all()
    assert loads.apply_next() == 7
    assert loads.apply_next() == 0
    assert loads.ahead(1 << 20) == []
