"""Processor time of sub-documents and XATTRs in the server's core: microseconds per operation.

    python -m benchmarks.subdocs --keys 50000

As benchmarks.cpu, with JSON documents of 1 KiB. Each figure is the lowest of several runs. The
output is one JSON document.

- get, set                      whole documents, for comparison
- lookup_key, lookup_nested     SUBDOC_MULTI_LOOKUP of one path, of one or three names
- lookup_element                of an element of an array
- mutate_key                    SUBDOC_MULTI_MUTATION of one path, a DICT_UPSERT
- mutate_element                a REPLACE of an element
- backfill                      a change of a backlog without XATTRs
- backfill_with                 the same with two XATTRs each, sent
- backfill_stripped             the same, for a consumer that did not ask for XATTRs
"""

from __future__ import annotations

import argparse
import gc
import json
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from benchmarks import workload
from benchmarks.cpu import BATCH, NOW_NS, PUMP_BYTES, CoreNode, drive, indexes
from dcp.server.storage.memory_share import GC_THRESHOLDS
from dcp.session.session import Session
from dcp.stream.producer import Producer
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.message import OPEN_EXTRAS, OpenFlag, StreamRequest, pack_stream_request
from dcp.wire.opcode import Opcode
from dcp.wire.xattrs import pack_xattrs
from vbucket.model.ids import NUM_VBUCKETS, SEQNO_MAX, vbucket_of

RUNS: Final = 5
DOCUMENT: Final = json.dumps(
    {
        "name": "user 17", "age": 31, "tags": ["a", "b", "c"],
        "address": {"street": "Main St 1", "city": "Bern", "geo": {"lat": 46.9, "lon": 7.4474}},
        "active": True, "balance": 1234.50, "notes": "x" * 560,
        "orders": [{"id": number, "sum": number * 1.5, "state": "paid"} for number in range(8)],
        "last": None,
    },
    separators=(",", ":"),
).encode()  # fmt: skip
XATTRS: Final = pack_xattrs([(b"_sync", b'{"rev":"1-abc","seq":17}'), (b"meta", b'{"by":"app"}')])
"""What Sync Gateway and an application might keep."""


def request(
    opcode: int, index: int, *, value: bytes = b"", extras: bytes = b"", kind: int = 0
) -> bytes:
    key = workload.key_of(index)
    return pack_request(
        opcode, vb_id=vbucket_of(key), key=b"\0" + key, value=value, extras=extras, datatype=kind
    )


def store(index: int) -> bytes:
    return request(Opcode.SET, index, value=DOCUMENT, extras=bytes(8), kind=1)


def store_with_xattrs(index: int) -> bytes:
    extras = struct.pack(">IIQQ", 0, 0, 2, NOW_NS)
    return request(Opcode.SET_WITH_META, index, value=XATTRS + DOCUMENT, extras=extras, kind=5)


def get(index: int) -> bytes:
    return request(Opcode.GET, index)


def lookup(path: bytes) -> Callable[[int], bytes]:
    spec = struct.pack(">BBH", Opcode.SUBDOC_GET, 0, len(path)) + path
    return lambda index: request(Opcode.SUBDOC_MULTI_LOOKUP, index, value=spec)


def mutation(opcode: int, path: bytes) -> Callable[[int], bytes]:
    def make(index: int) -> bytes:
        value = b"%d" % (index % 97)
        spec = struct.pack(">BBHI", opcode, 0, len(path), len(value)) + path + value
        return request(Opcode.SUBDOC_MULTI_MUTATION, index, value=spec)

    return make


OPERATIONS: Final[dict[str, Callable[[int], bytes]]] = {
    "get": get, "lookup_key": lookup(b"age"), "lookup_nested": lookup(b"address.geo.lon"),
    "lookup_element": lookup(b"orders[3].id"), "set": store,
    "mutate_key": mutation(Opcode.SUBDOC_DICT_UPSERT, b"age"),
    "mutate_element": mutation(Opcode.SUBDOC_REPLACE, b"orders[3].id"),
}  # fmt: skip


def batches(make: Callable[[int], bytes], wanted: Iterable[int]) -> list[bytes]:
    frames = [make(index) for index in wanted]
    return [b"".join(frames[at : at + BATCH]) for at in range(0, len(frames), BATCH)]


def session_of(node: CoreNode) -> Session:
    """A session with JSON and XATTRs."""
    session = node.session()
    features = (*workload.FEATURES, Feature.JSON, Feature.XATTR)
    value = b"".join(code.to_bytes(2, "big") for code in features)
    session.receive(pack_request(Opcode.HELLO, value=value), NOW_NS)
    session.state.answers.clear()
    return session


def backfill(node: CoreNode, flags: int) -> float:
    """Stream everything; return processor seconds."""
    session = session_of(node)
    name = b"subdocs %d" % node.hub.connection_count
    asked = StreamRequest(0, 0, SEQNO_MAX, 0, 0, 0)
    requests = [
        pack_request(Opcode.DCP_OPEN, key=name, extras=OPEN_EXTRAS.pack(0, flags)),
        pack_request(Opcode.DCP_CONTROL, key=b"enable_noop", value=b"true"),
        *(pack_stream_request(vb_id, asked, vb_id, b"") for vb_id in range(NUM_VBUCKETS)),
    ]
    session.receive(b"".join(requests), NOW_NS)
    producer = session.state.producer
    assert isinstance(producer, Producer)
    began = time.process_time()
    while producer.has_output:
        b"".join(producer.pump(PUMP_BYTES))
    seconds = time.process_time() - began
    producer.close()
    return seconds


def measure(folder: Path, keys: int, count: int) -> dict[str, float]:
    """Everything, in microseconds per operation."""
    gc.set_threshold(*GC_THRESHOLDS)
    figures: dict[str, float] = {}
    plain, include = OpenFlag.PRODUCER, OpenFlag.PRODUCER | OpenFlag.INCLUDE_XATTRS
    for name, make, asked in (
        ("full", store_with_xattrs, {"backfill_with": include, "backfill_stripped": plain}),
        ("plain", store, {"backfill": plain}),
    ):
        (folder / name).mkdir()
        node = CoreNode(folder / name)
        session = session_of(node)
        drive(node, session, batches(make, range(keys)))
        gc.collect()
        gc.freeze()
        for figure, flags in asked.items():
            figures[figure] = min(backfill(node, flags) for _ in range(RUNS)) / keys
    for name, operation in OPERATIONS.items():
        made = batches(operation, indexes(1, keys, count))
        figures[name] = min(drive(node, session, made) for _ in range(RUNS)) / count
    return {name: round(1e6 * each, 3) for name, each in figures.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.subdocs")
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--operations", type=int, default=50_000, help="per figure and run")
    options = parser.parse_args()
    count = options.operations // BATCH * BATCH
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options.keys, count)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
