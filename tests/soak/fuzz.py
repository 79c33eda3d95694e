"""Sends garbage to whole sessions: no crash, no hang, no unbounded memory.

Each round is one node in memory and a few connections. It depends on the round's number only, so a
failing round can be replayed. The input mixes noise, packets with lying headers, sound requests to
strange partitions, and ordinary conversations with some changed bytes, all cut anywhere. Partitions
change their state meanwhile.

Invariants, checked after each piece
- nothing raises;
- a session keeps at most one incomplete packet, and only one whose header was accepted;
- answers are well-formed packets, and at most the limit of them wait;
- the connection either continues or has said why it closes;
- memory at the end of a run is near what it was at the beginning.
"""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Final, NamedTuple

from cramjam import snappy

from dcp.session.access.rights import Rights, Role, Scope
from dcp.session.node_facts import Limits
from dcp.session.session import BODY_EXTRA_BYTES
from dcp.session.state import ANSWER_BYTES_MAX
from dcp.session.text import TextSession
from dcp.wire.frame import FLEX_HEADER, HEADER, FrameDecoder, pack_request
from dcp.wire.message import StreamRequest, pack_control, pack_open, pack_stream_request
from dcp.wire.opcode import Opcode
from support.memory_node import MemoryNode, Peer
from vbucket.engine.partition import VbState
from vbucket.model.ids import NUM_VBUCKETS

VALUE_BYTES_MAX: Final = 2048
PEERS: Final = 4
PIECES: Final = 60
FRAMES_IN_PIECE: Final = 40
OPCODES: Final = [int(opcode) for opcode in Opcode]
SOME_KEYS: Final = Rights(dict.fromkeys((Role.READ, Role.WRITE), (Scope(b"a"), Scope(b"longer"))))
"""A user whose every document command is checked."""
FEATURES: Final = (0x04, 0x06, 0x07, 0x08, 0x0A, 0x0B, 0x11, 0x12, 0x14, 0x1D)
USED_PARTITIONS: Final = (0, 5, 9)
STRANGE_PARTITIONS: Final = (*USED_PARTITIONS, 1023, 1024, 1025, 32_768, 65_535)
STATES: Final = (VbState.ACTIVE, VbState.ACTIVE, *VbState)
KEY: Final = b"\0a"
ARRAY_KEY: Final = b"array"
ARRAY_PARTITIONS: Final = USED_PARTITIONS[:2]
ARRAY_ITEMS: Final = 70_000
ARRAY: Final = b"[" + b"1," * (ARRAY_ITEMS - 1) + b"1]"
"""Above 128 KiB: sessions look at it in steps."""
LARGE_SHARE: Final = 0.25
"""Rounds with such a document."""
_PATH: Final = b"\0\1\0"
PARTS: Final[dict[int, tuple[bytes, bytes, bytes]]] = {
    **dict.fromkeys((0x00, 0x04, 0x09, 0x0C, 0x0D, 0x14, 0x83, 0x94, 0x95, 0xA0), (b"", KEY, b"")),
    **dict.fromkeys((0x01, 0x02, 0x03, 0x11, 0x12, 0x13), (bytes(8), KEY, b"1")),
    **dict.fromkeys((0x05, 0x06, 0x15, 0x16), (bytes(20), KEY, b"")),
    **dict.fromkeys((0x0E, 0x0F, 0x19, 0x1A), (b"", KEY, b"1")),
    **dict.fromkeys((0x1C, 0x1D, 0x1E), (bytes(4), KEY, b"")),
    **dict.fromkeys((0xA2, 0xA3, 0xA8, 0xA9), (bytes(15) + b"\1" + bytes(7) + b"\1", KEY, b"")),
    **dict.fromkeys((0xC5, 0xC6, 0xD2, 0xC9), (_PATH, KEY, b"a")),
    **dict.fromkeys((*range(0xC7, 0xC9), *range(0xCA, 0xD0)), (_PATH, KEY, b"a1")),
    Opcode.SUBDOC_MULTI_LOOKUP: (b"", KEY, b"\xc5\0\0\1a"),
    Opcode.SUBDOC_MULTI_MUTATION: (b"", KEY, b"\xc8\0\0\1\0\0\0\1a1"),
    Opcode.OBSERVE_SEQNO: (b"", b"", bytes(7) + b"\1"),
    Opcode.DCP_STREAM_REQ: (bytes(16) + b"\xff" * 8 + bytes(24), b"", b""),
    Opcode.DCP_BUFFER_ACK: (bytes(4), b"", b""),
    Opcode.RANGE_SCAN_CREATE: (b"", b"", b'{"collection":"0","range":{"start":"","end":"/w=="}}'),
    Opcode.RANGE_SCAN_CONTINUE: (bytes(28), b"", b""),
    Opcode.RANGE_SCAN_CANCEL: (bytes(16), b"", b""),
    Opcode.X_PUT_FRAMES: (bytes(8), b"", b""),
    Opcode.X_BATCH: (bytes(3) + b"\1", KEY, bytes(3) + b"\1" + bytes(19) + b"\1a1"),
}
"""Opcode -> extras, key and value of a request that is sound but for its partition."""
TEXT: Final = (
    b"get a b c\r\n", b"set a 0 0 3\r\nabc\r\n", b"delete a\r\n", b"incr a 1\r\n", b"stats\r\n",
    b"gets a\r\n", b"cas a 0 0 1 5\r\nx\r\n", b"touch a 5\r\n", b"version\r\n", b"noop\r\n",
    b"stats detail on\r\n", b"stats detail dump\r\n", b"stats detail off\r\n",
    b"set a 0 0 99999999999\r\n", b"append a 0 0 2 noreply\r\nzz\r\n", b"\r\n", b"quit\r\n",
)  # fmt: skip


class Round(NamedTuple):
    """The numbers of a round."""

    frames: int
    closed: int


def run_round(seed: int) -> Round:
    """Play one round. Raises AssertionError, or any exception that the code under test raises."""
    draw = random.Random(seed)
    node = MemoryNode(
        seed % 8, partitions=NUM_VBUCKETS
    )  # uuids matter little here, making them is expensive
    limits = Limits(
        value_bytes_max=VALUE_BYTES_MAX,
        syncs_writes=draw.random() < 0.8,
        oversized_set_removes=draw.random() < 0.5,
    )
    has_array = draw.random() < LARGE_SHARE
    if has_array:
        limits = limits._replace(value_bytes_max=2 * len(ARRAY))
        loader = node.connect(limits=limits)
        for vb_id in ARRAY_PARTITIONS:
            loader.send(
                pack_request(Opcode.SET, vb_id=vb_id, key=ARRAY_KEY, value=ARRAY, extras=bytes(8))
            )
        node.commit()
    peers = [connect(node, draw, limits) for _ in range(PEERS)]
    frames = closed = 0
    for _ in range(PIECES):
        place = draw.randrange(PEERS)
        is_of_array = has_array and draw.random() < 0.2
        count, data = (1, large_array(draw)) if is_of_array else piece(draw)
        frames += count
        feed(draw, peers[place], data)
        if draw.random() < 0.5:
            node.commit()
        if draw.random() < 0.02:
            node.merge()
        if draw.random() < 0.1:
            node.engine.partitions[draw.choice(USED_PARTITIONS)].state = draw.choice(STATES)
        pump(draw, peers[place])
        if peers[place].state.is_closing:
            closed += 1
            if peers[place].state.producer is not None:
                peers[place].state.producer.close()
            peers[place] = connect(node, draw, limits)
    return Round(frames, closed)


def connect(node: MemoryNode, draw: random.Random, limits: Limits) -> Peer:
    """Open a connection. Half of them shake hands as real clients do, some with few rights."""
    peer = node.connect(is_loopback=draw.random() < 0.8, limits=limits)
    if draw.random() < 0.15:
        peer.state.login.logged_in("fuzz", SOME_KEYS)
    if draw.random() < 0.15:
        peer.session = TextSession(peer.state)  # type: ignore[assignment]
        return peer
    if draw.random() < 0.5:
        peer.hello(*draw.sample(FEATURES, draw.randint(0, len(FEATURES))))
    if draw.random() < 0.5:
        peer.send(
            pack_open(
                b"fuzz%d" % draw.randrange(3), draw.choice((1, 1, 0x05, 0x105, 0x21, 0x09, 0x0D))
            )
            + pack_control(b"enable_noop", b"true")
            + pack_control(b"enable_out_of_order_snapshots", b"true")
            + pack_control(b"force_value_compression", draw.choice((b"true", b"false")))
            + pack_control(b"connection_buffer_size", b"%d" % draw.choice((0, 50, 5000)))
        )
    return peer


def feed(draw: random.Random, peer: Peer, data: bytes) -> None:
    """Send bytes cut anywhere, and check what the session keeps and says."""
    state, session = peer.state, peer.session
    decoder = FrameDecoder()
    position = 0
    is_text = isinstance(session, TextSession)
    while position < len(data) and not state.is_closing:
        size = draw.choice((1, 7, 24, 100, 1000, len(data)))
        session.receive(data[position : position + size], peer.node.now_ns)
        position += size
        answers = b"".join(state.answers)
        state.answers.clear()
        state.notes.lines.clear()
        assert len(answers) <= 2 * ANSWER_BYTES_MAX + state.shared.limits.value_bytes_max
        if not is_text:
            decoder.feed(answers)
        while state.is_full:
            session.resume(peer.node.now_ns)
            state.answers.clear()
            state.notes.lines.clear()
        kept = session._buffer if isinstance(session, TextSession) else state.buffer
        assert len(kept) <= state.shared.limits.value_bytes_max + BODY_EXTRA_BYTES + 24 + size
    if state.is_closing:
        assert state.close_reason, "a connection closes with a reason"


def pump(draw: random.Random, peer: Peer) -> None:
    """Send stream messages as a connection would."""
    producer = peer.state.producer
    if producer is None:
        return
    producer.tick(peer.node.now_ns)
    for _ in range(3):
        messages = producer.pump(draw.choice((100, 10_000)))
        FrameDecoder().feed(b"".join(messages))
        if not producer.has_output:
            break


def piece(draw: random.Random) -> tuple[int, bytes]:
    """Return a number of packets, good, bad or noise, as one run of bytes."""
    count = draw.randint(1, FRAMES_IN_PIECE)
    kind = draw.random()
    if kind < 0.05:
        return count, draw.randbytes(draw.randint(1, 400))
    if kind < 0.20:
        return count, b"".join(draw.choice(TEXT) for _ in range(count))
    make = lying_header if kind < 0.35 else strange_partition if kind < 0.45 else ordinary
    data = bytearray(b"".join(make(draw) for _ in range(count)))
    if kind > 0.7:
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return count, bytes(data)


def lying_header(draw: random.Random) -> bytes:
    """Return a packet whose lengths need not fit its body."""
    body = draw.randbytes(draw.choice((0, 1, 8, 20, 48, 60)))
    body_len = len(body) if draw.random() < 0.9 else draw.choice((0, 5, 2**31, 2**32 - 1))
    magic = draw.choice((0x80, 0x80, 0x80, 0x80, 0x08, 0x81, 0x82, 0x83, 0x18))
    opcode = draw.choice(OPCODES) if draw.random() < 0.8 else draw.randrange(256)
    return (
        HEADER.pack(
            magic,
            opcode,
            draw.choice((0, 1, 4, len(body), 251, 65535)),
            draw.choice((0, 4, 8, 20, 48, 255)),
            draw.choice((0, 1, 2, 255)),
            draw.choice((0, 5, 1023, 1024, 65535)),
            body_len,
            draw.getrandbits(32),
            draw.choice((0, 0, 1, 2**64 - 1)),
        )
        + body
    )


def strange_partition(draw: random.Random) -> bytes:
    """Return a sound request to a partition that may not exist."""
    opcode = draw.choice(OPCODES)
    return request_of(opcode, draw.choice(STRANGE_PARTITIONS), draw.getrandbits(32))


def request_of(opcode: int, vb_id: int, opaque: int) -> bytes:
    """Return a request with the parts that its command takes: it fails because of its partition, if
    it fails.
    """
    extras, key, value = PARTS.get(opcode, (b"", b"", b""))
    cas = int(opcode == Opcode.UNLOCK)
    return pack_request(
        opcode, vb_id=vb_id, opaque=opaque, cas=cas, extras=extras, key=key, value=value
    )


def ordinary(draw: random.Random) -> bytes:
    """Return a packet that a client could send."""
    key = b"\0" * (draw.random() < 0.7) + draw.choice((b"a", b"b", b"longer-key"))
    vb_id = draw.choice(USED_PARTITIONS)
    choice = draw.randrange(15)
    if choice >= 11:
        return subdocument(draw, vb_id, key)
    if choice < 3:
        value = draw.randbytes(draw.choice((0, 3, 200, VALUE_BYTES_MAX)))
        opcode = draw.choice((Opcode.SET, Opcode.SETQ, Opcode.ADD, Opcode.REPLACE))
        extras = struct.pack(">II", draw.getrandbits(32), draw.choice((0, 0, 10, 2**31)))
        return pack_request(opcode, vb_id=vb_id, key=key, value=value, extras=extras)
    if choice < 5:
        opcode = draw.choice((Opcode.GET, Opcode.GETKQ, Opcode.DELETE, Opcode.GETQ))
        return pack_request(opcode, vb_id=vb_id, key=key)
    if choice == 5:
        start = draw.choice((0, 0, 1, 5))
        request = StreamRequest(
            draw.choice((0, 0, 0x04, 0x40)), start, 2**64 - 1, draw.choice((0, 1)), start, start
        )
        value = draw.choice((b"", b"", b'{"uid":"0"}', b'{"collections":["0"]}', b"{"))
        return pack_stream_request(vb_id, request, draw.getrandbits(32), value)
    if choice == 6:
        return pack_request(Opcode.DCP_BUFFER_ACK, extras=struct.pack(">I", draw.getrandbits(16)))
    if choice == 7:
        return compressed_store(draw, vb_id, key)
    if choice == 8:
        extras = draw.choice((b"", b"", bytes(4), b"\0\0\0\x1e", b"\0\0\0\xff"))
        opcode = draw.choice((Opcode.GET_AND_LOCK, Opcode.GET_RANDOM_KEY, Opcode.GET_REPLICA))
        return pack_request(
            opcode, vb_id=vb_id, key=b"" if opcode == Opcode.GET_RANDOM_KEY else key, extras=extras
        )
    if choice == 9:
        cas = draw.choice((1, 2**64 - 1, 1_800_000_000_000_000_000 + draw.randrange(100)))
        return pack_request(Opcode.UNLOCK, vb_id=vb_id, key=key, cas=cas)
    opcode = draw.choice((Opcode.NOOP, Opcode.STAT, Opcode.GET_ALL_VB_SEQNOS, Opcode.VERSION))
    detail = draw.choice((b"", b"detail on", b"detail dump", b"detail off", b"settings"))
    return pack_request(opcode, key=detail if opcode == Opcode.STAT else b"")


def compressed_store(draw: random.Random, vb_id: int, key: bytes) -> bytes:
    """Return a store of a compressed value, perhaps with a durability frame, good or bad."""
    value = bytes(snappy.compress_raw(draw.randbytes(8) * draw.choice((1, 20, 256, 300))))
    if draw.random() < 0.3:
        value = draw.randbytes(draw.randint(0, 10)) + value[draw.randint(0, 3) :]
    opcode = draw.choice((Opcode.SET, Opcode.APPEND, Opcode.SETQ))
    extras = b"" if opcode == Opcode.APPEND else bytes(8)
    framing = draw.choice((b"", b"\x11\x01", b"\x13\x03\x01\0", b"\x11\x09", b"\x13\1\0\0"))
    body = len(framing) + len(extras) + len(key) + len(value)
    head = FLEX_HEADER.pack(
        0x08, opcode, len(framing), len(key), len(extras), draw.choice((0, 2, 3)), vb_id, body, 0, 0
    )
    return head + framing + extras + key + value


LOOKUPS: Final = (0x00, 0xC5, 0xC6, 0xD2)
MUTATIONS: Final = (
    0x01, 0x04, 0xC7, 0xC8, 0xC8, 0xC9, 0xCA, 0xCB, 0xCC, 0xCD, 0xCE, 0xCF, 0xD3,
)  # fmt: skip
PATHS: Final = (
    b"", b"a", b"a.b", b"a[0]", b"[0]", b"a[-1].x", b"`a.b`", b"a..b", b"_s.x", b"$document",
    b"$document.CAS", b"$XTOC", b"$vbucket", b"$no", b"x\xff", b"a" * 20, b"a.b" * 20,
)  # fmt: skip
JSON_VALUES: Final = (
    b"", b"1", b"-5", b"1.50", b'"text"', b"[]", b"{}", b"[1,2]", b'{"b":1}', b"1,2", b"tru", b"]",
    b"[" * 40 + b"]" * 40, b'"${Mutation.CAS}"', b'"${$document.CAS}"', b"\xff", b'{"a":{"b":[1]}}',
)  # fmt: skip
SECTIONS: Final = (
    b"\0\0\0\x08\0\0\0\x04u\x001\0", b"\0\0\0\x09\0\0\0\x05_s\x001\0", b"\0\0\0\x04\0\0\0\0",
    b"\0\0\1\0", b"",
)  # fmt: skip


def large_array(draw: random.Random) -> bytes:
    """Return a store of a large array, or a look-up into it, or a change of it."""
    vb_id = draw.choice(ARRAY_PARTITIONS)
    key = b"\0" * (draw.random() < 0.3) + ARRAY_KEY
    kind = draw.randrange(10)
    if kind == 0:
        return pack_request(Opcode.SET, vb_id=vb_id, key=key, value=ARRAY, extras=bytes(8))
    place = draw.choice((0, -1, ARRAY_ITEMS - 1, ARRAY_ITEMS, draw.randrange(ARRAY_ITEMS)))
    paths = [b"[%d]" % place, b"", b"[-1]", b"[0].a"]
    if kind < 5:
        specs = b"".join(
            struct.pack(">BBH", draw.choice(LOOKUPS), 0, len(path)) + path
            for path in draw.choices(paths, k=16)
        )
        return pack_request(Opcode.SUBDOC_MULTI_LOOKUP, vb_id=vb_id, key=key, value=specs)
    path, value = draw.choice(paths), draw.choice(JSON_VALUES)
    opcode = draw.choice(MUTATIONS[2:])
    if kind < 7:
        extras = struct.pack(">HB", len(path), 0)
        return pack_request(opcode, vb_id=vb_id, key=key, value=path + value, extras=extras)
    head = struct.pack(">BBHI", opcode, 0, len(path), len(value))
    specs = draw.randint(1, 16) * (head + path + value)
    return pack_request(Opcode.SUBDOC_MULTI_MUTATION, vb_id=vb_id, key=key, value=specs)


def subdocument(draw: random.Random, vb_id: int, key: bytes) -> bytes:
    """Return a sub-document request, a JSON document, or a change with XATTRs."""
    kind = draw.randrange(8)
    path, value = draw.choice(PATHS), draw.choice(JSON_VALUES)
    flags, doc_flags = (
        draw.choice((0, 0, 1, 4, 4, 5, 0x14, 0x80)),
        draw.choice((0, 0, 1, 2, 4, 5, 0x14, 9)),
    )
    if kind == 0:
        return pack_request(
            Opcode.SET, vb_id=vb_id, key=key, value=value, extras=bytes(8), datatype=1
        )
    if kind == 1:
        opcode = draw.choice((Opcode.SET_WITH_META, Opcode.DEL_WITH_META))
        extras = struct.pack(">IIQQ", 0, 0, draw.randint(1, 50), draw.randint(1, 2**60))
        section, datatype = draw.choice(SECTIONS), draw.choice((4, 4, 5, 6, 7))
        if datatype & 2 and draw.random() < 0.8:
            section = bytes(snappy.compress_raw(section + draw.choice((b"", b"x" * 90))))
        return pack_request(
            opcode, vb_id=vb_id, key=key, value=section, extras=extras, datatype=datatype
        )
    more = bytes([doc_flags]) * (draw.random() < 0.5)
    if kind < 4:
        opcode = draw.choice((*LOOKUPS, *MUTATIONS))
        extras = struct.pack(">HB", len(path), flags) + more
        takes_value = opcode not in (*LOOKUPS, 0xC9, 0xD3)
        body = path + value * takes_value
        return pack_request(opcode, vb_id=vb_id, key=key, value=body, extras=extras)
    is_lookup = kind < 6
    specs = b""
    for _ in range(draw.choice((1, 1, 2, 3, 17))):
        path, value = draw.choice(PATHS), draw.choice(JSON_VALUES)
        if is_lookup:
            specs += struct.pack(">BBH", draw.choice(LOOKUPS), flags, len(path)) + path
        else:
            head = struct.pack(">BBHI", draw.choice(MUTATIONS), flags, len(path), len(value))
            specs += head + path + value
    opcode = Opcode.SUBDOC_MULTI_LOOKUP if is_lookup else Opcode.SUBDOC_MULTI_MUTATION
    return pack_request(opcode, vb_id=vb_id, key=key, value=specs, extras=more)


def resident_bytes() -> int:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
