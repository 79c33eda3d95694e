"""Clients that negotiate no extension get the same bytes as ever.

`unaware_traffic.txt` is what two sessions sent and got before the first extension was there, line
by line: what is asked ("> "), what comes back ("< "), and the steps between ("-- ").
"""

from __future__ import annotations

from pathlib import Path

from dcp.wire.feature import Feature
from dcp.wire.frame import FrameDecoder, pack_request
from dcp.wire.message import (
    OPEN_EXTRAS,
    StreamRequest,
    pack_buffer_ack,
    pack_control,
    pack_stream_request,
)
from dcp.wire.opcode import Opcode
from support.memory_node import START_NS, MemoryNode, Peer
from vbucket.model.ids import NUM_VBUCKETS

VB = 7
END = 2**64 - 1
RECORDED = Path(__file__).with_name("unaware_traffic.txt")


class Recorder:
    """A session whose every byte is written down."""

    def __init__(self, lines: list[str], node: MemoryNode) -> None:
        self.lines = lines
        self.peer: Peer = node.connect()
        self.node = node

    def ask(self, opcode: int, **parts: int | bytes) -> None:
        self.send(pack_request(opcode, **parts))  # type: ignore[arg-type]

    def send(self, data: bytes) -> None:
        self.lines.append(f"> {data.hex()}")
        self.peer.session.receive(data, self.node.now_ns)
        self._answered(b"".join(self.peer.state.answers))
        self.peer.state.answers.clear()

    def pump(self) -> None:
        while self.peer.producer.has_output:
            self._answered(b"".join(self.peer.producer.pump(1 << 20)))

    def _answered(self, data: bytes) -> None:
        """One line for each message."""
        at = 0
        for frame in FrameDecoder().feed(data):
            self.lines.append(f"< {data[at : at + frame.wire_bytes].hex()}")
            at += frame.wire_bytes


def session(lines: list[str], node: MemoryNode, features: list[int], flags: int) -> Recorder:
    recorder = Recorder(lines, node)
    value = b"".join(code.to_bytes(2, "big") for code in features)
    recorder.ask(Opcode.HELLO, key=b"unaware", value=value, opaque=1)
    recorder.ask(Opcode.DCP_OPEN, key=b"unaware", extras=OPEN_EXTRAS.pack(0, flags), opaque=2)
    for key, text in (
        (b"enable_noop", b"true"),
        (b"set_noop_interval", b"180"),
        (b"set_priority", b"medium"),
        (b"connection_buffer_size", b"20971520"),
        (b"enable_expiry_opcode", b"true"),
        (b"send_stream_end_on_client_close_stream", b"true"),
    ):
        recorder.send(pack_control(key, text, 3))
    return recorder


def traffic(features: list[int], flags: int) -> list[str]:
    lines = [f"-- features {[*map(int, features)]}, flags {flags:#x}"]
    node = MemoryNode(seed=5, partitions=NUM_VBUCKETS)
    prefix = b"\0" if Feature.COLLECTIONS in features else b""
    value = b'{"uid":"0","unknown":1}' if prefix else b""
    writer = node.connect()
    writer.hello(Feature.JSON)

    def request(start: int, end: int, uuid: int, snap: tuple[int, int], opaque: int) -> bytes:
        return pack_stream_request(
            VB, StreamRequest(0, start, end, uuid, *snap), opaque, value=value
        )

    for n, key in enumerate((b"a", b"b", b"a", b"c")):
        writer.ask(Opcode.SET, vb_id=VB, key=key, value=b"%d" % n, extras=bytes(8), datatype=1)
    writer.ask(
        Opcode.SET, vb_id=VB, key=b"short", value=b"lived", extras=bytes(7) + b"\x05", datatype=0
    )
    writer.delete(VB, b"b")
    node.merge()
    client = session(lines, node, features, flags)
    client.ask(Opcode.DCP_GET_FAILOVER_LOG, vb_id=VB, opaque=4)
    lines.append("-- backlog of six writes, two superseded")
    client.send(request(0, END, 0, (0, 0), 0xAB))
    client.pump()
    lines.append("-- live: two groups; one expiry")
    node.now_ns = START_NS + 10 * 1_000_000_000
    writer.set(VB, b"a", b"live")
    node.commit()
    client.pump()
    assert writer.ask(Opcode.GET, vb_id=VB, key=b"short").status
    writer.delete(VB, b"c")
    node.commit()
    client.pump()
    client.send(pack_buffer_ack(200))
    lines.append("-- a branch ends the stream; what is asked again goes back")
    uuid = node.engine.partitions[VB].vb_uuid
    node.engine.keyspace.branch(VB, 7)
    node.commit()
    client.pump()
    client.send(request(9, END, uuid, (9, 9), 0xAC))
    client.send(request(9, END, uuid + 1, (9, 9), 0xAC))
    client.send(request(7, 8, uuid, (7, 7), 0xAD))
    writer.set(VB, b"d", b"after")
    node.commit()
    client.pump()
    lines.append("-- closed by the client, and refusals")
    client.send(request(8, END, 0, (8, 8), 0xAE))
    client.send(request(3, 2, 0, (3, 3), 0xAE))
    client.send(request(0, END, 0, (0, 0), 0xAF))
    client.ask(Opcode.DCP_CLOSE_STREAM, vb_id=VB, opaque=9)
    client.ask(Opcode.DCP_CLOSE_STREAM, vb_id=VB, opaque=10)
    client.send(pack_control(b"no_such_control", b"true", 11))
    client.pump()
    assert client.peer.producer.tick(node.now_ns)
    assert client.peer.producer.tick(node.now_ns + 180 * 1_000_000_000)
    client.pump()
    return lines


def all_traffic() -> list[str]:
    return [
        *traffic([], 0x01),
        *traffic([Feature.JSON, Feature.COLLECTIONS], 0x21),
    ]


def test_clients_that_negotiate_nothing_get_identical_bytes() -> None:
    assert all_traffic() == RECORDED.read_text().splitlines()
