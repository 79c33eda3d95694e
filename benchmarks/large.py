"""Values of megabytes, and what others wait meanwhile.

    python -m benchmarks.large text --port 11210 --pid 4711 --value-mib 20

Eight connections SET values, each one at a time, and then GET them; another one GETs a small
document all the time. The output is one JSON document: MB/s and processor time of the server for
each GB of both, and the p99 of the small GETs meanwhile.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from benchmarks import workload
from benchmarks.many import GETS, SETS
from benchmarks.peers import cpu_seconds
from benchmarks.reading import resp_get
from clients.cli.node.answers import AnswerError
from clients.cli.node.histogram import Histogram

MIB: Final = 1 << 20
SMALL_BYTES_MAX: Final = 4096
REFUSED_SECONDS: Final = 0.05
"""Before a SET that was refused is sent again."""
LARGE_SET: Final[dict[str, Callable[[bytes, bytes], bytes]]] = {
    "text": workload.text_set,
    "resp": lambda key, value: workload.resp_command(b"SET", key, value),
}
STORED: Final = {"text": b"STORED\r\n", "resp": b"+OK\r\n"}
LARGE_GET: Final[dict[str, Callable[[bytes], bytes]]] = {
    "text": workload.text_get, "resp": resp_get,
}  # fmt: skip


def connected(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def ask(connection: socket.socket, request: bytes, answer_bytes: int, buffer: bytearray) -> None:
    """Send a request and read its answer, of known length."""
    connection.sendall(request)
    seen = 0
    while seen < answer_bytes:
        count = connection.recv_into(buffer)
        if not count:
            raise AnswerError("the server closed the connection")
        if not seen and bytes(buffer[:2]) not in {b"VA", b"$1"}:
            raise AnswerError(f"an answer begins with {bytes(buffer[:60])!r}")
        seen += count


class Run:
    """One phase: all connections work on keys of their own, others read meanwhile."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.value = b"v" * (options.value_mib * MIB)
        self._is_over = threading.Event()
        self.refused = 0
        self.small = Histogram()

    def _work(self, place: int, *, is_set: bool) -> None:
        protocol, rounds, buffer = self.options.protocol, self.options.rounds, bytearray(MIB)
        with connected(self.options.port) as connection:
            for key in map(workload.key_of, range(place * rounds, (place + 1) * rounds)):
                if is_set:
                    self._store(connection, LARGE_SET[protocol](key, self.value))
                    continue
                beside = b"$%d\r\n\r\n" % len(self.value)
                if protocol == "text":
                    beside = b"VALUE %b 0 %d\r\n\r\nEND\r\n" % (key, len(self.value))
                answer_bytes = len(beside) + len(self.value)
                ask(connection, LARGE_GET[protocol](key), answer_bytes, buffer)

    def _store(self, connection: socket.socket, request: bytes) -> None:
        """SET, again and again while the server says that it cannot now."""
        while True:
            connection.sendall(request)
            answer = connection.recv(SMALL_BYTES_MAX)
            if answer == STORED[self.options.protocol]:
                return
            if not answer.startswith(b"SERVER_ERROR writes are refused"):
                raise AnswerError(f"SET was answered {answer!r}")
            self.refused += 1
            time.sleep(REFUSED_SECONDS)

    def _read_small(self) -> None:
        with connected(self.options.port) as connection:
            connection.sendall(SETS[self.options.protocol])
            connection.recv(SMALL_BYTES_MAX)
            while not self._is_over.is_set():
                began = time.perf_counter()
                connection.sendall(GETS[self.options.protocol])
                connection.recv(SMALL_BYTES_MAX)
                self.small.add(int((time.perf_counter() - began) * 1e6))
                time.sleep(0.001)

    def measure(self, *, is_set: bool) -> dict[str, float]:
        options = self.options
        self._is_over.clear()
        self.small = Histogram()
        with ThreadPoolExecutor(1 + options.connections) as pool:
            reader = pool.submit(self._read_small)
            spent, began = cpu_seconds(options.pid), time.perf_counter()
            work = partial(self._work, is_set=is_set)
            try:
                list(pool.map(work, range(options.connections)))
            finally:
                self._is_over.set()
            seconds, spent = time.perf_counter() - began, cpu_seconds(options.pid) - spent
            reader.result()
        sent = options.connections * options.rounds * len(self.value)
        name = "set" if is_set else "get"
        return {
            f"{name}_mb_per_second": round(sent / seconds / 1e6, 1),
            f"{name}_cpu_s_per_gb": round(spent / sent * 1e9, 3),
            f"{name}_others_p99_us": self.small.percentile(99),
        }


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.large")
    parser.add_argument("protocol", choices=sorted(LARGE_SET))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pid", type=int, required=True, help="of the server")
    parser.add_argument("--value-mib", type=int, default=1)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=0, help="values of each connection")
    options = parser.parse_args()
    options.rounds = options.rounds or max(1, 64 // options.value_mib)
    run = Run(options)
    found = run.measure(is_set=True) | run.measure(is_set=False)
    print(json.dumps(found | {"refused_sets": run.refused}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
