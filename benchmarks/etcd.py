"""etcd's side of the benchmarks: gRPC as raw HTTP/2 frames, cheap enough for a load generator.

One operation is a Put of etcdserverpb.KV. It is durable when answered, and watchers can see it. A
request is one HEADERS frame, whose HPACK block uses no dynamic table and is the same for all
requests, and one DATA frame. Only the stream ids differ. So requests are built before the clock
starts, and get their ids when they are sent. A client library would be a bottleneck.

Rules: RFC 9113 (frames), RFC 7541 (HPACK), gRPC over HTTP/2, etcd's rpc.proto.
"""

from __future__ import annotations

import base64
import http.client
import json
import socket
from pathlib import Path
from struct import Struct
from typing import Any, Final

from clients.cli.node.answers import AnswerError

FRAME_HEAD: Final = Struct(">BHBBI")
"""Length (8 + 16 bits), type, flags, stream id."""
FRAME_HEAD_BYTES: Final = FRAME_HEAD.size
DATA, HEADERS, SETTINGS, GOAWAY, WINDOW_UPDATE = 0x0, 0x1, 0x4, 0x7, 0x8
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
_STREAM_ID: Final = Struct(">I")
_STREAM_ID_AT: Final = 5
_SETTING: Final = Struct(">HI")
_HEADER_TABLE_SIZE, _INITIAL_WINDOW_SIZE = 0x1, 0x4
_WINDOW_BYTES: Final = (1 << 31) - 1
_FIRST_WINDOW_BYTES: Final = 65_535
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return one HTTP/2 frame."""
    length = len(payload)
    return FRAME_HEAD.pack(length >> 16, length & 0xFFFF, kind, flags, stream_id) + payload


def _text(value: bytes) -> bytes:
    """An HPACK string without Huffman coding; all of ours are short."""
    assert len(value) < 127
    return bytes([len(value)]) + value


_PUT_HEADERS: Final = b"".join(
    [
        b"\x83\x86",  # :method POST, :scheme http: entries of the static table
        b"\x04" + _text(b"/etcdserverpb.KV/Put"),
        b"\x01" + _text(b"127.0.0.1"),
        b"\x0f\x10" + _text(b"application/grpc"),
        b"\x00" + _text(b"te") + _text(b"trailers"),
    ]
)
_PUT_HEADERS_FRAME: Final = frame(HEADERS, END_HEADERS, 0, _PUT_HEADERS)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def put_request(key: bytes, value: bytes) -> bytes:
    """One Put as two frames with the stream id 0, which `EtcdCounter.outgoing` replaces."""
    message = b"\x0a" + _varint(len(key)) + key + b"\x12" + _varint(len(value)) + value
    body = b"\0" + len(message).to_bytes(4, "big") + message
    return _PUT_HEADERS_FRAME + frame(DATA, END_STREAM, 0, body)


def open_connection(connection: socket.socket) -> None:
    """Exchange prefaces and settings: no dynamic table, and windows too large to matter."""
    settings = _SETTING.pack(_HEADER_TABLE_SIZE, 0) + _SETTING.pack(
        _INITIAL_WINDOW_SIZE, _WINDOW_BYTES
    )
    wider = (_WINDOW_BYTES - _FIRST_WINDOW_BYTES).to_bytes(4, "big")
    connection.sendall(
        _PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, wider)
        + frame(SETTINGS, ACK, 0)
    )  # fmt: skip


class EtcdCounter:
    """Counts answers: each is HEADERS, DATA and a HEADERS frame that ends the stream.

    An error has no DATA frame. Frames of the connection (settings, windows, pings) are skipped.
    """

    def __init__(self) -> None:
        self.errors = 0
        self.first_error = ""
        self._left = 0
        self._with_data = 0
        self._rest = b""
        self._next_id = 1

    def begin(self, operations: int) -> None:
        assert not self._left, "one batch at a time"
        self._left, self._with_data = operations, operations

    def outgoing(self, batch: bytes) -> bytearray:
        """Return the batch with the ids of its streams: odd, and each higher than the last."""
        out = bytearray(batch)
        at, next_id = 0, self._next_id
        while at < len(out):
            for _ in range(2):
                _STREAM_ID.pack_into(out, at + _STREAM_ID_AT, next_id)
                at += FRAME_HEAD_BYTES + (out[at] << 16 | out[at + 1] << 8 | out[at + 2])
            next_id += 2
        self._next_id = next_id
        return out

    def feed(self, chunk: bytes) -> bool:
        data = self._rest + chunk if self._rest else chunk
        at, end = 0, len(data) - FRAME_HEAD_BYTES
        while at <= end:
            stop = at + FRAME_HEAD_BYTES + (data[at] << 16 | data[at + 1] << 8 | data[at + 2])
            if stop > len(data):
                break
            kind = data[at + 3]
            if kind == DATA:
                self._with_data -= 1
            elif kind == HEADERS and data[at + 4] & END_STREAM:
                self._left -= 1
            elif kind == GOAWAY:
                raise AnswerError(f"etcd closes the connection: {data[at + 17 : stop]!r}")
            at = stop
        self._rest = data[at:]
        if self._left:
            return False
        if self._with_data:
            self.errors += self._with_data
            self.first_error = self.first_error or "an answer without a message (a gRPC error)"
        return True


def command(folder: Path, port: int, peer_ports: dict[str, int], name: str) -> list[str]:
    """The command line of a member: defaults except for the addresses. `peer_ports` are those of
    all members, by name.
    """
    client_url = f"http://127.0.0.1:{port}"
    peer_urls = {each: f"http://127.0.0.1:{number}" for each, number in peer_ports.items()}
    return [
        "etcd", "--data-dir", str(folder), "--logger", "zap", "--log-level", "error",
        "--name", name, "--listen-client-urls", client_url, "--advertise-client-urls", client_url,
        "--listen-peer-urls", peer_urls[name], "--initial-advertise-peer-urls", peer_urls[name],
        "--initial-cluster", ",".join(f"{each}={url}" for each, url in peer_urls.items()),
        "--quota-backend-bytes", str(8 << 30),
    ]  # fmt: skip


def get(port: int, key: bytes) -> bytes | None:
    """Read one key; None if it does not exist."""
    document = _gateway(port, "/v3/kv/range", {"key": base64.b64encode(key).decode()})
    found = document.get("kvs", [])
    return base64.b64decode(found[0]["value"]) if found else None


def status(port: int) -> dict[str, Any]:
    """Return what a member says of itself and of the leader."""
    return _gateway(port, "/v3/maintenance/status", {})


def _gateway(port: int, path: str, body: dict[str, str]) -> dict[str, Any]:
    """Ask etcd's JSON gateway."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        document: dict[str, Any] = json.loads(response.read())
    except (http.client.HTTPException, ValueError) as error:
        raise AnswerError(f"etcd's gateway answered: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise AnswerError(f"etcd's gateway answered {response.status}: {document}")
    return document
