"""GETs over several connections with several in flight on each.

    python -m benchmarks.reading binary --port 11210 --keys 500000
    python -m benchmarks.reading text-100 --port 11210 --keys 500000 --pid 4711
    python -m benchmarks.reading memcached --port 11210 --keys 500000 --absent

All answers have the same length, so they are checked by slicing, which costs the generator almost
nothing. The output is one JSON document: keys a second, latency of a batch, and with `--pid` the
processor time of that server for each key. `memcached` is the binary protocol without HELLO; of
`text-100` and `resp-100` a request has 100 keys.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import selectors
import socket
import sys
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from benchmarks import workload
from benchmarks.generator import open_session
from benchmarks.peers import cpu_seconds
from clients.cli.node.answers import AnswerError
from clients.cli.node.histogram import Histogram

PREBUILT: Final = 131_072
"""Keys of requests built before the clock starts; they are sent in turn."""
KEY_BYTES: Final = len(workload.key_of(0))


class Form(NamedTuple):
    """A request, its keys, and its answers. `mark`: how one with a document begins."""

    make: Callable[..., bytes]
    keys: int
    beside_bytes: int
    """Of an answer, besides the values."""
    mark: bytes
    miss: bytes


def resp_get(key: bytes) -> bytes:
    return workload.resp_command(b"GET", key)


def resp_mget(*keys: bytes) -> bytes:
    return workload.resp_command(b"MGET", *keys)


def forms(value_bytes: int) -> dict[str, Form]:
    """Name -> form, for documents of this length, of three digits."""
    found, ok = b"$%d\r\n" % value_bytes, b"\x81\x00\x00\x00\x04\x00\x00\x00"
    line_bytes = len(b"VALUE  0 %d\r\n\r\n" % value_bytes) + KEY_BYTES
    missed = b"\x81\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x09" + bytes(12) + b"Not found"
    end, nothing = b"END\r\n", b"$-1\r\n"
    return {
        "binary": Form(workload.binary_get, 1, 28, ok, missed[:11] + bytes(13)),
        "memcached": Form(workload.memcached_get, 1, 28, ok, missed),
        "text": Form(workload.text_get, 1, line_bytes + len(end), b"VALUE ", end),
        "text-100": Form(workload.text_get, 100, 100 * line_bytes + len(end), b"VALUE ", end),
        "resp": Form(resp_get, 1, len(found) + 2, found, nothing),
        "resp-100": Form(resp_mget, 100, 6 + 100 * (len(found) + 2), b"*100\r\n",
                         b"*100\r\n" + 100 * nothing),
    }  # fmt: skip


NAMES: Final = sorted(forms(0))


class Reader:
    """One connection with one batch in flight."""

    def __init__(self, options: argparse.Namespace, place: int) -> None:
        rng = random.Random(options.seed * 1000 + place)
        form = forms(options.value_bytes)[options.protocol]
        first = options.keys if options.absent else 0
        drawn = (workload.key_of(first + rng.randrange(options.keys)) for _ in itertools.count())
        frames = [
            form.make(*itertools.islice(drawn, form.keys)) for _ in range(PREBUILT // form.keys)
        ]
        count = options.in_flight
        self.batches = itertools.cycle(
            [b"".join(frames[at : at + count]) for at in range(0, len(frames) - count + 1, count)]
        )
        self.keys = count * form.keys
        self.mark = form.miss if options.absent else form.mark
        found_bytes = form.beside_bytes + form.keys * options.value_bytes
        self.answer_bytes = len(form.miss) if options.absent else found_bytes
        self.batch_bytes = self.answer_bytes * count
        self.socket = socket.create_connection(("127.0.0.1", options.port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if options.protocol == "binary":
            open_session(self.socket)
        self.received: list[bytes] = []
        self.left_bytes = 0
        self.sent_at = 0.0

    def send(self) -> None:
        self.received, self.left_bytes = [], self.batch_bytes
        self.sent_at = time.perf_counter()
        self.socket.sendall(next(self.batches))

    def receive(self) -> bool:
        """Process what has arrived; True when the batch is answered. Raises AnswerError."""
        chunk = self.socket.recv(1 << 18)
        if not chunk:
            raise AnswerError("the server closed the connection")
        self.received.append(chunk)
        self.left_bytes -= len(chunk)
        if self.left_bytes > 0:
            return False
        answers = b"".join(self.received)
        for at, byte in enumerate(self.mark):
            column = answers[at :: self.answer_bytes]
            if column.count(byte) != len(column):
                raise AnswerError(f"not the answers asked for: {answers[:60]!r}")
        if self.left_bytes:
            raise AnswerError("too many bytes")
        return True


def run(options: argparse.Namespace) -> dict[str, float]:
    readers = [Reader(options, place) for place in range(options.connections)]
    histogram = Histogram()
    keys, spent, server = 0, 0.0, 0.0
    with selectors.DefaultSelector() as selector:
        for reader in readers:
            selector.register(reader.socket, selectors.EVENT_READ, reader)
            reader.send()
        began = measure_from = time.perf_counter() + 1
        end = measure_from + options.seconds
        while (now := time.perf_counter()) < end:
            if now >= measure_from and not spent:
                began, spent = now, time.process_time()
                server = cpu_seconds(options.pid) if options.pid else 0.0
            for key, _ in selector.select(30):
                reader = key.data
                if reader.receive():
                    if spent:
                        keys += reader.keys
                        histogram.add(int((time.perf_counter() - reader.sent_at) * 1e6))
                    reader.send()
    seconds = time.perf_counter() - began
    server = cpu_seconds(options.pid) - server if options.pid else 0.0
    for reader in readers:
        reader.socket.close()
    return {
        "operations_per_second": round(keys / seconds, 1),
        "p50_us": histogram.percentile(50),
        "p99_us": histogram.percentile(99),
        "generator_cpu_share": round((time.process_time() - spent) / seconds, 3),
        "server_us": round(1e6 * server / keys, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.reading")
    parser.add_argument("protocol", choices=NAMES)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pid", type=int, default=0, help="of the server")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--keys", type=int, default=500_000)
    parser.add_argument("--absent", action="store_true", help="keys that do not exist")
    parser.add_argument("--value-bytes", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    print(json.dumps(run(parser.parse_args())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
