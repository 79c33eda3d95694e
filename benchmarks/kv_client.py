"""Processor time of the key-value clients: microseconds per operation.

    python -m benchmarks.kv_client
    python -m benchmarks.kv_client --runs 9 --operations 200000

A child process answers every request at once. Only this process's time is counted, so the figures
hold on a busy machine. The output is one JSON document: for each figure the median of the runs.

- set_batch, get_batch     KvClient, batches of 4,096
- set_single, get_single   KvClient, 64 tasks that each send one operation at a time
- sync_set, sync_get       SyncKv, one operation at a time
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final

from clients.address import parse_address
from clients.kv.client import KvClient
from clients.kv.sync_client import SyncKv
from dcp.wire.frame import Frame, FrameDecoder, pack_response
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

BATCH: Final = 4096
TASKS: Final = 64
VALUE: Final = b"v" * 128
SINGLE_SHARE: Final = 4
"""Single operations cost many times as much as those of a batch, so there are fewer of them."""


def answer_to(frame: Frame) -> bytes:
    """Return what a server with one node answers."""
    match frame.opcode:
        case Opcode.HELLO:
            return pack_response(frame.opcode, opaque=frame.opaque, value=b"\0\x04\0\x12")
        case Opcode.GET_CLUSTER_CONFIG:
            return pack_response(frame.opcode, Status.KEY_ENOENT, opaque=frame.opaque)
        case Opcode.GET:
            return pack_response(
                frame.opcode, opaque=frame.opaque, extras=bytes(4), value=VALUE, cas=7
            )
        case Opcode.SET:
            return pack_response(frame.opcode, opaque=frame.opaque, extras=bytes(16), cas=7)
        case _:
            return pack_response(frame.opcode, opaque=frame.opaque)


def serve(port: Connection) -> None:
    """Answer one connection after the other, until the process is ended."""
    listener = socket.create_server(("127.0.0.1", 0))
    port.send(listener.getsockname()[1])
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        decoder = FrameDecoder()
        while data := connection.recv(256 * 1024):
            connection.sendall(b"".join(map(answer_to, decoder.feed(data))))
        connection.close()


async def batches(address: str, count: int) -> dict[str, float]:
    keys = [b"key-%07d" % n for n in range(BATCH)]
    pairs = [(key, VALUE) for key in keys]
    figures = {}
    async with KvClient.connect(address) as kv:
        for name in ("set_batch", "get_batch"):
            begun_s = time.process_time()
            for _ in range(count // BATCH):
                await (kv.set_many(pairs) if name == "set_batch" else kv.get_many(keys))
            figures[name] = (time.process_time() - begun_s) / (count // BATCH * BATCH) * 1e6
    return figures


async def singles(address: str, count: int) -> dict[str, float]:
    figures = {}
    async with KvClient.connect(address) as kv:

        async def work(name: str) -> None:
            for n in range(count // TASKS):
                key = b"key-%07d" % n
                await (kv.set(key, VALUE) if name == "set_single" else kv.get(key))

        for name in ("set_single", "get_single"):
            begun_s = time.process_time()
            await asyncio.gather(*(work(name) for _ in range(TASKS)))
            figures[name] = (time.process_time() - begun_s) / (count // TASKS * TASKS) * 1e6
    return figures


def blocking(address: str, count: int) -> dict[str, float]:
    figures = {}
    with SyncKv(parse_address(address)) as kv:
        for name in ("sync_set", "sync_get"):
            begun_s = time.process_time()
            for n in range(count):
                key = b"key-%07d" % n
                _ = kv.set(key, VALUE) if name == "sync_set" else kv.get(key)
            figures[name] = (time.process_time() - begun_s) / count * 1e6
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.kv_client", description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--operations", type=int, default=200_000)
    arguments = parser.parse_args()
    count = max(arguments.operations, BATCH)
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("fork").Process(target=serve, args=(there,), daemon=True)
    server.start()
    address = f"127.0.0.1:{here.recv()}"
    parts: list[Callable[[], dict[str, float]]] = [
        lambda: asyncio.run(batches(address, count)),
        lambda: asyncio.run(singles(address, count // SINGLE_SHARE)),
        lambda: blocking(address, count // SINGLE_SHARE),
    ]
    samples: dict[str, list[float]] = {}
    try:
        for _ in range(arguments.runs):
            for part in parts:
                for name, figure in part().items():
                    samples.setdefault(name, []).append(figure)
    finally:
        server.terminate()
        server.join()
    print(json.dumps({name: round(statistics.median(v), 3) for name, v in samples.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
