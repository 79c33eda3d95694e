"""docs/byte-traces.md: a conversation with a real session, each frame with its fields.

The node keeps everything in memory, and its clock and randomness are fixed, so the bytes are the
same every time.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from dcp.wire import message
from dcp.wire.feature import Feature
from dcp.wire.frame import HEADER_BYTES, Frame, FrameDecoder, pack_request, pack_response
from dcp.wire.message import (
    StreamRequest,
    pack_buffer_ack,
    pack_control,
    pack_open,
    pack_stream_request,
)
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from vbucket.model.ids import SEQNO_MAX

VB: Final = 92
"""The partition of key1, key153 and key621."""
PARTITIONS: Final = 1024
NOOP_AFTER_NS: Final = 200_000_000_000

HEAD = """# Byte traces

Generated from a conversation with the server's session code by `scripts/pages`; do not edit. A
test repeats the conversation and compares every byte.

Each frame is shown with its offset, its bytes and its fields. All numbers are big-endian. Every
frame begins with the same 24 bytes; [commands.md](commands.md) lists the extras of all commands,
and [streams.md](streams.md) has the rules. C is the client, S the server.

The partition is 92. Before the trace begins, another client has set `key1` to `1`, set `key153` to
`2`, set `key1` to `3` and deleted `key153`: seqnos 1 to 4.
"""

REQUEST_FIELDS: Final = {
    Opcode.DCP_OPEN: (message.OPEN_EXTRAS, ("reserved", "flags (0x01: producer)")),
    Opcode.DCP_STREAM_REQ: (
        message.STREAM_REQ_EXTRAS,
        ("flags", "reserved", "start seqno", "end seqno", "vb_uuid", "snapshot start",
         "snapshot end"),
    ),
    Opcode.DCP_SNAPSHOT_MARKER: (
        message.MARKER_EXTRAS,
        ("start seqno", "end seqno", "type (0x01 memory, 0x02 disk)"),
    ),
    Opcode.DCP_MUTATION: (
        message.MUTATION_EXTRAS,
        ("seqno", "revision", "flags", "expiry", "lock time", "nmeta", "nru"),
    ),
    Opcode.DCP_DELETION: (message.DELETION_EXTRAS, ("seqno", "revision", "nmeta")),
    Opcode.DCP_SYSTEM_EVENT: (
        message.SYSTEM_EVENT_EXTRAS,
        ("seqno", "kind (0: collection created)", "version of the value"),
    ),
    Opcode.DCP_SEQNO_ADVANCED: (message.U64, ("seqno",)),
    Opcode.DCP_STREAM_END: (message.U32, ("reason",)),
    Opcode.DCP_BUFFER_ACK: (message.U32, ("bytes",)),
}  # fmt: skip
"""Opcode -> layout of the extras of a request, and the names of its fields."""

CREATED_COLLECTION: Final = ((8, "uid of the manifest"), (4, "id of the scope"), (4, "id"))
"""The value of a system event: size and name of each field."""

OFFSET, BYTES = 4, 26
"""Columns of a line."""


class Trace:
    """Writes down what goes over one connection."""

    def __init__(self, node: MemoryNode) -> None:
        self._node = node
        self._peer = node.connect()
        self.parts: list[str] = []

    def section(self, title: str, text: str) -> None:
        """Begin a section."""
        self.parts.append(f"\n## {title}\n\n{text}\n")

    def send(self, text: str, data: bytes, *answers: str) -> list[Frame]:
        """Send a frame; write down it and its answers, of which each has its text."""
        self._frame("C", text, data)
        state = self._peer.state
        if state.producer is not None:
            state.producer.heard(self._node.now_ns)
        self._peer.session.receive(data, self._node.now_ns)
        self._peer.session.ask_logins(self._node.now_ns)
        self._node.commit()
        answered = b"".join(state.answers)
        state.answers.clear()
        return self._frames(answered, answers)

    def receive(self, *texts: str) -> list[Frame]:
        """Write down what the producer sends now."""
        sent = []
        while self._peer.producer.has_output:
            sent += list(self._peer.producer.pump(1 << 20))
        return self._frames(b"".join(sent), texts)

    def _frames(self, data: bytes, texts: tuple[str, ...]) -> list[Frame]:
        frames = FrameDecoder().feed(data)
        assert len(frames) == len(texts), (frames, texts)
        at = 0
        for frame, text in zip(frames, texts, strict=True):
            self._frame("S", text, data[at : at + frame.wire_bytes])
            at += frame.wire_bytes
        assert at == len(data)
        return frames

    def _frame(self, who: str, text: str, data: bytes) -> None:
        (frame,) = FrameDecoder().feed(data)
        kind = "" if frame.is_request else ", response"
        title = f"**{who}: {Opcode(frame.opcode).name}{kind}.** {text}".rstrip()
        has_collections = self._peer.state.hello.has_collections
        lines = "\n".join(fields_of(frame, data, has_collections=has_collections))
        self.parts.append(f"\n{title}\n\n```text\n{lines}\n```\n")


def line(at: int, data: bytes, meaning: str) -> list[str]:
    """Return the lines of one field: 8 bytes each, the meaning beside the first."""
    rows = [data[start : start + 8].hex(" ") for start in range(0, len(data), 8)]
    offsets = [f"{at + 8 * number:<{OFFSET}}" for number in range(len(rows))]
    texts = [meaning, *[""] * (len(rows) - 1)]
    return [
        f"{offset}{row:<{BYTES}}{text}".rstrip()
        for offset, row, text in zip(offsets, rows, texts, strict=True)
    ]


def fields_of(frame: Frame, data: bytes, *, has_collections: bool) -> list[str]:
    """Return a line for each field of a frame."""
    status = "partition" if frame.is_request else "status"
    named = "" if frame.is_request else f" {Status(frame.status).name}"
    header = (
        (1, f"magic: {Magic(frame.magic).name.lower().replace('_', ' ')}"),
        (1, f"opcode: {Opcode(frame.opcode).name}"),
        (2, f"key length: {len(frame.key)}"),
        (1, f"extras length: {len(frame.extras)}"),
        (1, f"datatype: {frame.datatype}"),
        (2, f"{status}: {frame.status}{named}"),
        (4, f"body length: {len(data) - HEADER_BYTES}"),
        (4, f"opaque: {frame.opaque}"),
        (8, f"CAS: {frame.cas}"),
    )
    lines, at = [], 0
    for size, meaning in header:
        lines += line(at, data[at : at + size], meaning)
        at += size
    key = key_of(frame, has_collections=has_collections)
    for size, meaning in (*extras_of(frame), *key, *value_of(frame)):
        lines += line(at, data[at : at + size], meaning)
        at += size
    assert at == len(data)
    return lines


def extras_of(frame: Frame) -> list[tuple[int, str]]:
    """Return size and meaning of each field of the extras."""
    known = REQUEST_FIELDS.get(Opcode(frame.opcode)) if frame.is_request else None
    if known is None or not frame.extras:
        return [(len(frame.extras), "extras")] if frame.extras else []
    layout, names = known
    sizes = [Struct(f">{code}").size for code in layout.format[1:]]
    values = layout.unpack(frame.extras)
    return [
        (size, f"{name}: {value}") for size, name, value in zip(sizes, names, values, strict=True)
    ]


def key_of(frame: Frame, *, has_collections: bool) -> list[tuple[int, str]]:
    """Return size and meaning of each field of the key."""
    key = frame.key
    if has_collections and frame.opcode == Opcode.DCP_MUTATION:
        return [(1, f"collection id: {key[0]}"), (len(key) - 1, f"key: {key[1:].decode()}")]
    name = "name" if frame.opcode == Opcode.DCP_SYSTEM_EVENT else "key"
    return [(len(key), f"{name}: {key.decode()}")] if key else []


def value_of(frame: Frame) -> list[tuple[int, str]]:
    """Return size and meaning of each field of the value."""
    value = frame.value
    if not value:
        return []
    if frame.opcode == Opcode.HELLO:
        codes = [value[at : at + 2] for at in range(0, len(value), 2)]
        names = [Feature(int.from_bytes(code, "big")).name for code in codes]
        return [(2, f"feature: {name}") for name in names]
    if frame.opcode == Opcode.DCP_SYSTEM_EVENT:
        fields, at = [], 0
        for size, name in CREATED_COLLECTION:
            fields.append((size, f"{name}: {int.from_bytes(value[at : at + size], 'big')}"))
            at += size
        return fields
    if frame.opcode == Opcode.DCP_STREAM_REQ and not frame.is_request:
        if frame.status == Status.ROLLBACK:
            return [(8, f"roll back to seqno {int.from_bytes(value, 'big')}")]
        fields = []
        for vb_uuid, seqno in message.parse_failover_log(value):
            fields += [(8, f"vb_uuid: {vb_uuid}"), (8, f"began at seqno: {seqno}")]
        return fields
    text = value.replace(b"\0", b"\\0").decode()
    return [(len(value), f"value: {text}")]


def stream_request(uuid: int, seqno: int, opaque: int) -> bytes:
    """Return the request of a client that holds everything up to a seqno."""
    asked = StreamRequest(0, seqno, SEQNO_MAX, uuid, seqno, seqno)
    return pack_stream_request(VB, asked, opaque)


def markdown() -> str:
    """Return the page."""
    return "".join([HEAD, *plain_session(), *session_with_collections()])


def plain_session() -> list[str]:
    """A session from the login to a rollback, without collections."""
    node = MemoryNode(partitions=PARTITIONS)
    writer = node.connect()
    writer.hello(Feature.XERROR)
    for key, value in ((b"key1", b"1"), (b"key153", b"2"), (b"key1", b"3")):
        writer.set(VB, key, value)
    writer.delete(VB, b"key153")
    node.commit()
    trace = Trace(node)
    log_in(trace)
    open_connection(trace)
    uuid = first_stream(trace, node, writer)
    keep_alive(trace, node)
    roll_back(trace, node, uuid)
    return trace.parts


def session_with_collections() -> list[str]:
    """A stream of one collection on another server."""
    node = MemoryNode(partitions=PARTITIONS)
    keyspace = node.engine.keyspace
    keyspace.set_manifest(keyspace.manifest.create_collection("_default", "orders"))
    writer = node.connect()
    writer.hello(Feature.XERROR, Feature.COLLECTIONS)
    writer.set(VB, b"\x08key1", b"1")
    writer.set(VB, b"\x00key153", b"2")
    node.commit()
    trace = Trace(node)
    trace.section(
        "With collections",
        "Another session, on a server with the collection `orders`, whose id is 8. Seqno 1\n"
        "created it, seqno 2 set `key1` in it, and seqno 3 set `key153` in the default collection.",
    )
    features = (Feature.XERROR, Feature.JSON, Feature.SELECT_BUCKET, Feature.COLLECTIONS)
    value = b"".join(code.to_bytes(2, "big") for code in features)
    trace.send(
        "As before, with COLLECTIONS. From now on, keys begin with their collection id. The login\n"
        "and the bucket are left out here.",
        pack_request(Opcode.HELLO, opaque=1, key=b"my-connector", value=value),
        "All are granted.",
    )
    trace.send("", pack_open(b"my-connector", 1, opaque=2), "Open.")
    trace.send(
        "With collections, this control is required before the first stream.",
        pack_control(b"enable_noop", b"true", opaque=3),
        "Accepted.",
    )
    asked = StreamRequest(0, 0, SEQNO_MAX, 0, 0, 0)
    trace.send(
        "A filter in the value: only collection 8. Without a value, everything is streamed.",
        pack_stream_request(VB, asked, 4, b'{"collections":["8"]}'),
        "The failover log.",
    )
    trace.receive(
        "The snapshot covers all three seqnos.",
        "The collection was created.",
        "The key is the id in LEB128 (one byte here), then the key itself.",
        "Seqno 3 does not match the filter, so this message ends the snapshot.",
    )
    return trace.parts


def log_in(trace: Trace) -> None:
    """Features, login and bucket."""
    trace.section(
        "Connect",
        "HELLO names the client and the features that it wants. The answer has those that it\n"
        "gets. XERROR allows statuses beyond memcached's; send it always.",
    )
    features = (Feature.XERROR, Feature.JSON, Feature.SELECT_BUCKET)
    trace.send(
        "",
        pack_request(
            Opcode.HELLO, opaque=1, key=b"my-connector",
            value=b"".join(code.to_bytes(2, "big") for code in features),
        ),
        "All three are granted.",
    )  # fmt: skip
    trace.send(
        "PLAIN is the simplest mechanism: a zero byte, the user, a zero byte, the password. Use\n"
        "SCRAM or TLS on a network.",
        pack_request(Opcode.SASL_AUTH, opaque=2, key=b"PLAIN", value=b"\0guest\0guest"),
        "Logged in.",
    )
    trace.send(
        "", pack_request(Opcode.SELECT_BUCKET, opaque=3, key=b"default"), "The bucket is selected."
    )


def open_connection(trace: Trace) -> None:
    """DCP_OPEN and its controls."""
    trace.section(
        "Open the DCP connection",
        "The name identifies the consumer. A second connection with the same name closes the\n"
        "first.",
    )
    trace.send("", pack_open(b"my-connector", 1, opaque=4), "Open.")
    trace.send("", pack_control(b"enable_noop", b"true", opaque=5), "Accepted.")
    trace.send(
        "The window: the server stops when so many bytes are not acknowledged.",
        pack_control(b"connection_buffer_size", b"1048576", opaque=6),
        "Accepted.",
    )


def first_stream(trace: Trace, node: MemoryNode, writer: Peer) -> int:
    """A stream from the beginning, its backlog, and a live change. Return the version."""
    trace.section(
        "The first stream",
        "The client holds nothing: version 0, seqno 0, snapshot 0 to 0. The end is the highest\n"
        "number, so the stream does not end.",
    )
    (answer,) = trace.send(
        "",
        stream_request(0, 0, opaque=7),
        "The value is the failover log, newest version first. Save it before the first change.",
    )
    uuid = message.parse_failover_log(answer.value)[0][0]
    sent = trace.receive(
        "The backlog is one snapshot. It leaves out seqnos 1 and 2, because 3 and 4 replaced them.",
        "`key1` is `3`.",
        "`key153` is deleted. The snapshot is complete: seqno 4 is its end.",
    )
    trace.send(
        "The sizes of the three messages, after they were processed. There is no answer.",
        pack_buffer_ack(sum(frame.wire_bytes for frame in sent)),
    )
    trace.section("A live change", "Another client sets `key621` to `4`.")
    writer.set(VB, b"key621", b"4")
    node.commit()
    trace.receive("The next snapshot starts at the previous end + 1.", "`key621` is `4`.")
    return uuid


def keep_alive(trace: Trace, node: MemoryNode) -> None:
    """A NOOP and its answer."""
    trace.section(
        "NOOP",
        "The server sends one every 180 seconds by default. A client that answers none for 360\n"
        "seconds is disconnected.",
    )
    peer = trace._peer  # noqa: SLF001
    peer.producer.tick(node.now_ns)
    node.now_ns += NOOP_AFTER_NS
    peer.producer.tick(node.now_ns)
    (noop,) = trace.receive("")
    trace.send(
        "The same opaque. NOOPs do not count for the window.",
        pack_response(Opcode.DCP_NOOP, opaque=noop.opaque),
    )


def roll_back(trace: Trace, node: MemoryNode, uuid: int) -> None:
    """A branch, the rollback, and the stream of the new version."""
    trace.section(
        "Rollback",
        "History branches at seqno 4: `key621` is undone, and a new version begins. The stream\n"
        "ends.",
    )
    node.engine.keyspace.branch(VB, 4)
    node.commit()
    trace.receive("Reason 6: history branched. The opaque is that of the stream request.")
    trace.send(
        "The client asks again from where it is: the old version, seqno 5.",
        stream_request(uuid, 5, opaque=8),
        "The histories part at 4. The client undoes what it has above that: `key621`.",
    )
    trace.send(
        "Seqno 4 was the end of a complete snapshot, so the client may continue there.",
        stream_request(uuid, 4, opaque=9),
        "Two versions now: the new one began at seqno 4.",
    )
    trace.section("The end", "The client closes the stream.")
    trace.send(
        "", pack_request(Opcode.DCP_CLOSE_STREAM, vb_id=VB, opaque=10), "Nothing more is sent."
    )
