"""Thousands of connections, each with a request a second.

    python -m benchmarks.many text --port 11210 --pid 4711 --connections 10000

It opens the connections, measures what they add to the server's memory, and then sends on each of
them one GET a second, spread evenly. The output is one JSON document: bytes of memory for each
connection, the share of a core that the server took, and the latency of the GETs.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import sys
import time
from typing import Final

from benchmarks import workload
from benchmarks.peers import cpu_seconds, memory_bytes
from benchmarks.reading import resp_get
from clients.cli.node.answers import AnswerError
from clients.cli.node.histogram import Histogram

KEY: Final = b"small"
VALUE: Final = b"v" * 128
SETS: Final = {
    "text": workload.text_set(KEY, VALUE), "resp": workload.resp_command(b"SET", KEY, VALUE),
}  # fmt: skip
GETS: Final = {"text": workload.text_get(KEY), "resp": resp_get(KEY)}
TICK_SECONDS: Final = 0.002
SETTLE_SECONDS: Final = 2.0
AT_ONCE: Final = 100
"""Connections that are opened before the next ones: less than a listener's queue takes."""


def opened(port: int, count: int, request: bytes) -> list[socket.socket]:
    """Open connections; each has had one answer, so the server has set it up."""
    found: list[socket.socket] = []
    while len(found) < count:
        some = [
            socket.create_connection(("127.0.0.1", port), timeout=30)
            for _ in range(min(AT_ONCE, count - len(found)))
        ]
        for connection in some:
            connection.sendall(request)
        for connection in some:
            if not connection.recv(4096).endswith(b"\r\n"):
                raise AnswerError("not a whole answer")
        found += some
    return found


def run(options: argparse.Namespace) -> dict[str, float]:
    get, latency = GETS[options.protocol], Histogram()
    for connection in opened(options.port, 1, SETS[options.protocol]):
        connection.close()
    before = memory_bytes(options.pid)["Anonymous"]
    connections = opened(options.port, options.connections, get)
    time.sleep(SETTLE_SECONDS)
    added = memory_bytes(options.pid)["Anonymous"] - before
    sent_at = dict.fromkeys(connections, 0.0)
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        spent, began, sent = cpu_seconds(options.pid), time.perf_counter(), 0
        while (now := time.perf_counter()) < began + options.seconds:
            due = int((now - began) * options.connections)
            for number in range(sent, due):
                connection = connections[number % options.connections]
                sent_at[connection] = time.perf_counter()
                connection.sendall(get)
            sent = due
            for key, _ in selector.select(TICK_SECONDS):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.recv(4096)
                latency.add(int((time.perf_counter() - sent_at[key.fileobj]) * 1e6))
        seconds = time.perf_counter() - began
        share = (cpu_seconds(options.pid) - spent) / seconds
    for connection in connections:
        connection.close()
    return {
        "bytes_per_connection": round(added / options.connections),
        "share_of_a_core": round(share, 3),
        "operations_per_second": round(len(latency) / seconds, 1),
        "p50_us": latency.percentile(50),
        "p99_us": latency.percentile(99),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.many")
    parser.add_argument("protocol", choices=sorted(GETS))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pid", type=int, required=True, help="of the server")
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    print(json.dumps(run(parser.parse_args())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
