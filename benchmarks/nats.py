"""NATS JetStream's side of the benchmarks: its text protocol, and the bucket.

One operation is a client's `kv.put`: a publish to the key's subject that asks for the stream's
acknowledgement. JetStream uses its default, which syncs every two minutes. So an acknowledged value
is in the page cache but not on disk, and a power cut may lose it.

Rules: NATS client protocol, JetStream wire API, ADR-8 (key-value buckets are streams `KV_name`
with the subjects `$KV.name.>`).
"""

from __future__ import annotations

import base64
import itertools
import json
import socket
from pathlib import Path
from typing import Any, Final

from clients.cli.node.answers import AnswerError

BUCKET: Final = "benchmark"
STREAM: Final = f"KV_{BUCKET}"
SUBJECT: Final = f"$KV.{BUCKET}.".encode()
_INBOX: Final = b"_INBOX.benchmark.000"
_CONNECT: Final = b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n'
_PING: Final = b"PING\r\n"
"""The server sends one a few seconds after CONNECT; the next would come after an hour."""
_CONFIG: Final = """\
listen: "127.0.0.1:{port}"
ping_interval: "1h"  # the generator does not answer pings
jetstream {{ store_dir: {folder}, max_mem: 1G, max_file: 40G }}
"""


_NUMBERS: Final = itertools.count(1)


def subject_of(key: bytes) -> bytes:
    """The subject of a key. Keys of a bucket must not contain a colon."""
    return SUBJECT + key.replace(b":", b".")


def put_request(key: bytes, value: bytes) -> bytes:
    """One put: a publish with an acknowledgement to an inbox, set by `NatsCounter.outgoing`."""
    return b"PUB %b %b %d\r\n%b\r\n" % (subject_of(key), _INBOX, len(value), value)


def open_connection(connection: socket.socket, inbox: bytes = _INBOX) -> None:
    """Say CONNECT and subscribe to an inbox; return when the server has accepted both."""
    connection.sendall(_CONNECT + b"SUB %b 1\r\nPING\r\n" % inbox)
    buffer = b""
    while not buffer.endswith(b"PONG\r\n"):
        chunk = connection.recv(65_536)
        if not chunk or b"-ERR" in buffer:
            raise AnswerError(f"NATS refused the connection: {buffer[-200:]!r}")
        buffer += chunk


class NatsCounter:
    """Counts acknowledgements: a MSG line and a line of JSON, `{"stream":...,"seq":n}`."""

    def __init__(self) -> None:
        self.errors = 0
        self.first_error = ""
        self.inbox = b"_INBOX.benchmark.%03d" % next(_NUMBERS)
        """Inboxes are global in the server, so each connection needs its own."""
        self._operations = 0
        self._buffer = b""

    def begin(self, operations: int) -> None:
        self._operations, self._buffer = operations, b""

    def outgoing(self, batch: bytes) -> bytes:
        """Return the batch with this connection's inbox in every request."""
        return batch.replace(_INBOX, self.inbox)

    def feed(self, chunk: bytes) -> bool:
        buffer = self._buffer + chunk if self._buffer else chunk
        if _PING in buffer:
            buffer = buffer.replace(_PING, b"")
        self._buffer = buffer
        lines = buffer.count(b"\r\n")
        if lines < 2 * self._operations or not buffer.endswith(b"\r\n"):
            return False
        if lines > 2 * self._operations or not buffer.startswith(b"MSG "):
            raise AnswerError(f"not {self._operations} acknowledgements: {buffer[:120]!r}")
        wrong = self._operations - buffer.count(b'"seq":')
        if wrong:
            self.errors += wrong
            at = buffer.find(b'"error"')
            self.first_error = self.first_error or buffer[at : at + 120].decode(errors="replace")
        return True


def command(folder: Path, port: int) -> list[str]:
    """The command line; writes the configuration file that it names."""
    path = folder / "nats.conf"
    path.write_text(_CONFIG.format(port=port, folder=json.dumps(str(folder / "jetstream"))))
    return ["nats-server", "--config", str(path)]


def request(port: int, subject: str, document: dict[str, Any]) -> dict[str, Any]:
    """Send a request to JetStream's API over a new connection; return the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        open_connection(connection)
        body = json.dumps(document).encode()
        connection.sendall(b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), _INBOX, len(body), body))
        with connection.makefile("rb") as stream:
            line = stream.readline()
            if not line.startswith(b"MSG "):
                raise AnswerError(f"{subject} was answered with {line!r}")
            answer: dict[str, Any] = json.loads(stream.read(int(line.split()[-1])))
    return answer


def create_bucket(port: int, replicas: int = 1) -> None:
    """Create the bucket as `kv create` does, with a history of one, if it does not exist."""
    answer = request(
        port,
        f"$JS.API.STREAM.CREATE.{STREAM}",
        {
            "name": STREAM, "subjects": [f"$KV.{BUCKET}.>"], "max_msgs_per_subject": 1,
            "storage": "file", "retention": "limits", "discard": "new", "num_replicas": replicas,
            "allow_rollup_hdrs": True, "deny_delete": True, "max_age": 0, "max_msgs": -1,
            "max_bytes": -1, "max_consumers": -1, "max_msg_size": -1, "duplicate_window": 0,
        },
    )  # fmt: skip
    if "error" in answer:
        raise AnswerError(f"the bucket was refused: {answer['error']}")


def get(port: int, key: bytes) -> bytes | None:
    """Read one key; None if it does not exist. The first call creates the bucket."""
    document = {"last_by_subj": subject_of(key).decode()}
    answer = request(port, f"$JS.API.STREAM.MSG.GET.{STREAM}", document)
    error = answer.get("error")
    if error is None:
        return base64.b64decode(answer["message"]["data"])
    if error["err_code"] == _NO_SUCH_STREAM:
        create_bucket(port)
        return None
    if error["err_code"] == _NO_SUCH_MESSAGE:
        return None
    raise AnswerError(f"NATS answered {error}")


_NO_SUCH_STREAM: Final = 10_059
_NO_SUCH_MESSAGE: Final = 10_037
