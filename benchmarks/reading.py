"""GETs of existing keys, over several connections with several in flight on each.

    python -m benchmarks.reading binary --port 11210 --keys 500000

All answers have the same length, so they are checked by slicing, which costs the generator almost
nothing. The output is one JSON document.
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
from typing import Final

from benchmarks import workload
from benchmarks.generator import open_session
from clients.cli.node.answers import AnswerError
from clients.cli.node.histogram import Histogram

PREBUILT: Final = 131_072
"""Requests built before the clock starts; they are sent in turn."""
MARKS: Final = {"binary": (24 + 4, b"\x81\x00\x00\x00\x04\x00\x00\x00"), "resp": (8, b"$128\r\n")}
"""Bytes of an answer besides the value, and the beginning of a good answer."""


class Reader:
    """One connection with one batch in flight."""

    def __init__(self, options: argparse.Namespace, place: int) -> None:
        rng = random.Random(options.seed * 1000 + place)
        count = options.in_flight
        make = workload.binary_get if options.protocol == "binary" else resp_get
        frames = [make(workload.key_of(rng.randrange(options.keys))) for _ in range(PREBUILT)]
        self.batches = itertools.cycle(
            [b"".join(frames[at : at + count]) for at in range(0, len(frames), count)]
        )
        beside, self.mark = MARKS[options.protocol]
        self.answer_bytes = beside + options.value_bytes
        self.batch_bytes = self.answer_bytes * count
        self.socket = socket.create_connection(("127.0.0.1", options.port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if options.protocol == "binary":
            open_session(self.socket)
        self.received = b""
        self.sent_at = 0.0

    def send(self) -> None:
        self.received = b""
        self.sent_at = time.perf_counter()
        self.socket.sendall(next(self.batches))

    def receive(self) -> bool:
        """Process what has arrived; True when the batch is answered. Raises AnswerError."""
        chunk = self.socket.recv(1 << 18)
        if not chunk:
            raise AnswerError("the server closed the connection")
        self.received += chunk
        if len(self.received) < self.batch_bytes:
            return False
        for at, byte in enumerate(self.mark):
            column = self.received[at :: self.answer_bytes]
            if column.count(byte) != len(column):
                raise AnswerError(f"not the documents asked for: {self.received[:60]!r}")
        if len(self.received) > self.batch_bytes:
            raise AnswerError("too many bytes")
        return True


def resp_get(key: bytes) -> bytes:
    return workload.resp_command(b"GET", key)


def run(options: argparse.Namespace) -> dict[str, float]:
    readers = [Reader(options, place) for place in range(options.connections)]
    histogram = Histogram()
    operations = 0
    with selectors.DefaultSelector() as selector:
        for reader in readers:
            selector.register(reader.socket, selectors.EVENT_READ, reader)
            reader.send()
        measure_from = time.perf_counter() + 1
        end = measure_from + options.seconds
        began, spent = measure_from, 0.0
        while (now := time.perf_counter()) < end:
            if now >= measure_from and not spent:
                began, spent = now, time.process_time()
            for key, _ in selector.select(30):
                reader = key.data
                if reader.receive():
                    if spent:
                        operations += options.in_flight
                        histogram.add(int((time.perf_counter() - reader.sent_at) * 1e6))
                    reader.send()
    seconds = time.perf_counter() - began
    for reader in readers:
        reader.socket.close()
    return {
        "operations_per_second": round(operations / seconds, 1),
        "p50_us": histogram.percentile(50),
        "p99_us": histogram.percentile(99),
        "generator_cpu_share": round((time.process_time() - spent) / seconds, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.reading")
    parser.add_argument("protocol", choices=sorted(MARKS))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--keys", type=int, default=500_000)
    parser.add_argument("--value-bytes", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    print(json.dumps(run(parser.parse_args())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
