"""A mirror that lost its place: by its differences, and by a whole stream.

    python -m benchmarks.differences                      a million documents, 0.1 % of them differ
    python -m benchmarks.differences --documents 300000

The mirror is an LMDB file. It is made by a stream from 0. Then its positions name a version that
the server does not have, as if it had followed another server, and some of its documents change on
the server. Bytes are those that the server sent. The output is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.workload import key_of, values
from clients import KvClient, Mirror
from clients.address import parse_address
from clients.checkpoint.checkpoint import decode_position, encode_position
from clients.errors import DcpdError
from clients.kv.hash_reads import HashReader, differences
from clients.local_lmdb import LocalLmdb, rows_from
from clients.mirror.lmdb_mirror import FORMAT, VERSION
from clients.mirror.mirror_copy import MirrorCopy
from clients.testing import DcpServer

LOAD_BATCH = 5000


def lose_place(path: Path) -> None:
    """Make a mirror's positions those of a history that no server has."""
    file = LocalLmdb(path, FORMAT, version=VERSION)
    with file.writing() as transaction:
        for key, raw in list(rows_from(transaction, b"p")):
            position = decode_position(raw)
            if position.seqno:
                stray = position._replace(versions=((1, 0),))
                transaction.put(key, encode_position(stray))
    file.close()


async def load(server: str, documents: int, value_bytes: int) -> None:
    """Write documents; a server that is behind with its merges is waited for."""
    some = values(1, value_bytes)
    async with KvClient.connect(server) as kv:
        for at in range(0, documents, LOAD_BATCH):
            left = list(range(at, min(at + LOAD_BATCH, documents)))
            while left:
                pairs = [(key_of(number), some[number % len(some)]) for number in left]
                answers = await kv.set_many(pairs)
                pairs_of = zip(left, answers, strict=True)
                left = [number for number, answer in pairs_of if isinstance(answer, DcpdError)]


async def followed(server: str, path: Path) -> dict[str, Any]:
    """Catch up with a server; return seconds, bytes and how many partitions were compared."""
    began = time.perf_counter()
    async with Mirror(server, path) as view:
        seconds = time.perf_counter() - began
        received = view.consumer.metrics.wire_bytes + view.resync_bytes
        return {
            "seconds": round(seconds, 2), "bytes": received, "partitions": view.resyncs,
            "documents": len(view),
        }  # fmt: skip


async def compared(server: str, path: Path) -> dict[str, Any]:
    """Compare a mirror's file with the server."""
    began = time.perf_counter()
    reader, copy = await HashReader.open(parse_address(server)), MirrorCopy(str(path))
    try:
        found = [each async for some in differences(reader, copy) for each in some]
        seconds = time.perf_counter() - began
        return {
            "seconds": round(seconds, 2), "bytes": reader.received_bytes, "differences": len(found)
        }  # fmt: skip
    finally:
        await reader.close()
        await copy.close()


async def measure(
    server: str, documents: int, value_bytes: int, part: float, path: Path
) -> dict[str, Any]:
    """Measure all."""
    figures: dict[str, Any] = {"documents": documents, "part": part}
    await load(server, documents, value_bytes)
    figures["whole stream"] = await followed(server, path)
    figures["opened again"] = await followed(server, path)
    figures["equal: diff"] = await compared(server, path)
    lose_place(path)
    figures["equal: resync"] = await followed(server, path)
    async with KvClient.connect(server) as kv:
        step = round(1 / part)
        keys = [key_of(number) for number in range(0, documents, step)]
        await kv.set_many([(key, b"changed" * 20) for key in keys])
    figures["changed"] = len(keys)
    figures["differ: diff"] = await compared(server, path)
    lose_place(path)
    figures["differ: resync"] = await followed(server, path)
    figures["after: diff"] = await compared(server, path)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.differences")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--value-bytes", type=int, default=256)
    parser.add_argument("--part", type=float, default=0.001, help="of the documents that differ")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, DcpServer(Path(folder) / "data") as process:
        figures = asyncio.run(
            measure(
                process.address, options.documents, options.value_bytes, options.part,
                Path(folder) / "view",
            )
        )  # fmt: skip
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
