"""Processor time of the server's core: microseconds per operation.

    python -m benchmarks.cpu --keys 1000000

It runs in one process without sockets, with the log in memory and the store in LMDB. It counts
processor time, so the figures hold on a busy machine. The output is one JSON document.

- set_new, set_memory               a SET of a key that is new, or in memory
- set_plain, get_plain              the same for clients without HELLO: no collections, no tokens
- set_text, get_text, get_100_text  the same in the text protocol; get_100_text: 100 keys a line
- set_cached, set_merged            of a key in the store, in the item cache or not
- change_*                          other changes of documents in memory: set_expiring, set_quiet,
                                    set_cas, replace, append, add, delete, count, touch,
                                    get_and_touch
- text_*                            the same in the text protocol
- get_memory, get_cached, get_merged   the same for GET
- get_absent                        a GET of an absent key, with others in the store
- get_filling                       a GET from the store that goes into the item cache
- merge, merge_update               an entry of a merge: new keys, uniform updates of all keys
- compact                           a version that a compaction drops
- backfill_memory, backfill_merged  a change of a backlog, up to the bytes for the socket
- backfill_bare                    backfill_merged, for a client without collections
- live, live_received               a change that one stream is sent; the core of its consumer
- live_elsewhere                    a change that a stream of another collection is only told of

Changes, GETs, merge, merge_update, compact and live run in C if the loops are built
(vbucket/native); --without-loops runs their twins in Python.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from benchmarks import workload
from clients.consumer.core import ConsumerCore
from clients.consumer.streams import Wanted
from clients.position import Position
from dcp.server.storage.memory_share import GC_THRESHOLDS
from dcp.session.access.auth import AuthStep
from dcp.session.node_facts import Limits
from dcp.session.session import Session
from dcp.session.state import ClientLogin, SessionParts, SessionState
from dcp.session.text import TextSession
from dcp.stream import producer as producer_module
from dcp.stream.hub import StreamHub
from dcp.stream.producer import Producer
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.message import OPEN_EXTRAS, OpenFlag, StreamRequest, pack_stream_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from tests.memory.log_device import MemoryLogDevice
from vbucket.engine.engine import Engine
from vbucket.engine.recovery.startup import new_partitions
from vbucket.log.writer import LogWriter
from vbucket.model.ids import NUM_VBUCKETS, SEQNO_MAX, vbucket_of
from vbucket.store.lmdb.environment_lmdb import LmdbEnv
from vbucket.store.records import STORE_FORMAT_VERSION, TABLES, NodeRecord
from vbucket.store.store import Store
from vbucket.upkeep.compaction import Compactor, Floors
from vbucket.upkeep.merge import merge

BATCH: Final = 64
GROUP_BATCHES: Final = 8
"""Batches per commit group: about what 8 connections send during one sync."""
PUMP_BYTES: Final = 256 * 1024
CACHE_BYTES: Final = 1 << 40
WITHOUT_COLLECTIONS: Final = tuple(
    code for code in workload.FEATURES if code != Feature.COLLECTIONS
)
NOW_NS: Final = 1_800_000_000_000_000_000


class OpenDoor:
    """Lets everybody in as guest."""

    def mechanisms(self, peer_is_loopback: bool) -> list[str]:
        return ["PLAIN"] if peer_is_loopback else []

    def start(self, _mechanism: str, _initial: bytes, _peer_is_loopback: bool) -> AuthStep:
        return AuthStep(Status.OK, b"", None, "guest")

    def step(self, _exchange: object, _message: bytes) -> AuthStep:
        return AuthStep(Status.AUTH_ERROR)


class CoreNode:
    """Engine, store and sessions in this process."""

    version = "benchmark"
    bucket = "default"

    def __init__(self, folder: Path, *, native: bool = True) -> None:
        self.native = native
        drawn = random.Random(1)
        self.env = LmdbEnv(folder, TABLES)
        node = NodeRecord(STORE_FORMAT_VERSION, self.env.engine, "00", False, "commit", 0)

        self.store = Store.create(self.env, node, new_partitions(drawn, NUM_VBUCKETS))
        self.engine = Engine(self.store, drawn, NUM_VBUCKETS, 1 << 40)
        if not native:
            self.engine.set_run = self.engine.get_run = None
            producer_module._live_run = None  # type: ignore[misc]  # noqa: SLF001 - no other switch
        self.writer = LogWriter(MemoryLogDevice())
        self.writer.rotate()
        self.hub = StreamHub()

    def bucket_config(self) -> bytes:
        return b"{}"

    global_config = bucket_config

    def config_version(self) -> tuple[int, int]:
        return (1, 1)

    def address_of(self, _vb_id: int) -> str:
        return ""

    def stats(self, _group: bytes) -> list[tuple[str, str]] | None:
        return None

    def session(self, features: tuple[int, ...] | None = workload.FEATURES) -> Session:
        """Begin a session; `features` None: as memcached's clients do, without a word."""
        session = Session(
            SessionState(
                SessionParts.of(self.engine, self.hub, self, Limits()),
                ClientLogin(OpenDoor(), peer_is_loopback=True),
            )
        )
        for frame in () if features is None else workload.session_frames(features):
            session.receive(frame, NOW_NS)
            session.ask_logins(NOW_NS)
        session.state.answers.clear()
        return session

    def commit(self) -> None:
        group = self.engine.keyspace.take_group()
        if group is not None:
            self.writer.append(group.number, group.payload)
            self.writer.sync()
            self.engine.keyspace.group_synced(group)
            self.hub.committed(group.high_seqnos)

    def follow(
        self, value: bytes = b"", features: tuple[int, ...] = workload.FEATURES
    ) -> tuple[Session, Producer]:
        """Stream all partitions from the beginning, with the settings of our consumer."""
        session = self.session(features)
        name = b"follower %d" % self.hub.connection_count
        flags = OpenFlag.PRODUCER | OpenFlag.INCLUDE_DELETE_TIMES
        asked = StreamRequest(0, 0, SEQNO_MAX, 0, 0, 0)
        requests = [pack_request(Opcode.DCP_OPEN, key=name, extras=OPEN_EXTRAS.pack(0, flags))]
        requests += [
            pack_request(Opcode.DCP_CONTROL, key=key, value=b"true")
            for key in (b"enable_noop", b"enable_expiry_opcode", b"x_version_log",
                        b"x_snapshot_end")
        ]  # fmt: skip
        requests += [
            pack_stream_request(vb_id, asked, vb_id, value) for vb_id in range(NUM_VBUCKETS)
        ]
        session.receive(b"".join(requests), NOW_NS)
        while session.state.buffer:  # it opens some streams at a time
            session.state.answers.clear()
            session.state.is_full = False
            session.resume(NOW_NS)
        session.state.answers.clear()
        assert session.state.producer is not None
        assert session.state.producer.stream_count == NUM_VBUCKETS
        return session, session.state.producer

    def merge(self) -> tuple[int, float]:
        """Merge everything in memory; return the entries and the processor seconds."""
        self.commit()
        self.engine.keyspace.freeze()
        self.writer.rotate()
        device = self.writer.device
        segments = [(number, device.read(number)) for number in device.segments()[:-1]]
        began = time.process_time()
        report = merge(self.env, segments, native=self.native)
        seconds = time.process_time() - began
        self.engine.keyspace.merged(report)
        self.engine.keyspace.drop_frozen(0, NUM_VBUCKETS)
        for number, _ in segments:
            device.delete(number)
        return report.entries, seconds

    def compact(self) -> tuple[int, float]:
        """Compact as far as a raised floor lets it; return the versions and processor seconds."""
        todo = {
            vb_id: Floors(record.high_seqno * 9 // 10, 0)
            for vb_id, record in self.store.partitions().items()
        }
        compactor = Compactor(native=self.native)
        versions = 0
        began = time.process_time()
        while todo:
            report = compactor.run(self.env, list(todo), lambda: False, floors=todo)
            assert not report.damages
            versions += report.versions
            for vb_id in report.finished:
                del todo[vb_id]
        return versions, time.process_time() - began


def drive(node: CoreNode, session: Session | TextSession, batches: Iterable[bytes]) -> float:
    """Pass batches to a session, commit, discard the answers; return processor seconds."""
    state = session.state
    made = list(batches)
    began = time.process_time()
    for place, batch in enumerate(made):
        session.receive(batch, NOW_NS)
        if place % GROUP_BATCHES == GROUP_BATCHES - 1:
            b"".join(state.answers)
            state.answers.clear()
            state.is_full = False
            node.commit()
    node.commit()
    seconds = time.process_time() - began
    assert not state.held_bytes, "every batch was processed"
    state.answers.clear()
    return seconds


def backfill(node: CoreNode, features: tuple[int, ...] = workload.FEATURES) -> tuple[int, float]:
    """Stream everything; return bytes and processor seconds."""
    _, producer = node.follow(features=features)
    sent = 0
    began = time.process_time()
    while producer.has_output:
        sent += sum(map(len, producer.pump(PUMP_BYTES)))
    seconds = time.process_time() - began
    producer.close()
    return sent, seconds


def indexes(seed: int, keys: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(keys) for _ in range(count)]


def get_batches(
    wanted: list[int], make: Callable[[bytes], bytes] = workload.binary_get
) -> list[bytes]:
    frames = [make(workload.key_of(index)) for index in wanted]
    return [b"".join(frames[at : at + BATCH]) for at in range(0, len(frames), BATCH)]


def follow_with(core: ConsumerCore, session: Session) -> Producer:
    """Open the streams of a consumer's core, and read all that there is."""
    for vb_id in range(NUM_VBUCKETS):
        core.add(vb_id, Wanted(Position()))
    session.receive(core.begin(NOW_NS), NOW_NS)
    producer, state = session.state.producer, session.state
    assert producer is not None
    while state.answers or state.buffer or producer.has_output:
        received = b"".join([*state.answers, *producer.pump(PUMP_BYTES)])
        state.answers.clear()
        core.processed(core.receive(received, NOW_NS))
        assert core.failure is None, core.failure
        state.is_full = False
        session.receive(core.take_output(), NOW_NS)
        session.resume(NOW_NS)
    assert producer.stream_count == NUM_VBUCKETS
    return producer


def measure_live(node: CoreNode, keys: int, count: int, pool: list[bytes]) -> dict[str, float]:
    """Return the seconds to send every change at once, one commit group per batch of SETs, and
    those of a consumer's core that receives them.
    """
    writer, session = node.session(), node.session()
    core = ConsumerCore(b"live", has_collections=True)
    producer = follow_with(core, session)
    sending_s = receiving_s = 0.0
    for batch in workload.batches("binary", indexes(9, keys, count), BATCH, pool):
        writer.receive(batch, NOW_NS)
        writer.state.answers.clear()
        group = node.engine.keyspace.take_group()
        assert group is not None
        node.engine.keyspace.group_synced(group)
        began = time.process_time()
        node.hub.committed(group.high_seqnos)
        sent = []
        while producer.has_output:
            sent += producer.pump(PUMP_BYTES)
        data = b"".join(sent)
        done = time.process_time()
        core.processed(core.receive(data, NOW_NS))
        received = time.process_time()
        sending_s, receiving_s = sending_s + done - began, receiving_s + received - done
        session.receive(core.take_output(), NOW_NS)
    assert core.failure is None, core.failure
    producer.close()
    return {"live": sending_s / count, "live_received": receiving_s / count}


def measure_elsewhere(node: CoreNode, keys: int, count: int, pool: list[bytes]) -> float:
    """Return the seconds to tell a stream of one collection of each change of another one."""
    keyspace = node.engine.keyspace
    keyspace.set_manifest(keyspace.manifest.create_collection("_default", "elsewhere"))
    node.commit()
    uid = max(keyspace.manifest.collections)
    writer = node.session()
    _, producer = node.follow(b'{"collections": ["%x"]}' % uid)
    seconds = 0.0
    for batch in (b"", *workload.batches("binary", indexes(12, keys, count), BATCH, pool)):
        writer.receive(batch, NOW_NS)
        writer.state.answers.clear()
        node.commit()
        began = time.process_time()
        while producer.has_output:
            producer.pump(PUMP_BYTES)
        seconds += time.process_time() - began if batch else 0.0  # but for what it begins with
    producer.close()
    return seconds


def measure_changes(
    node: CoreNode, session: Session, keys: int, count: int, pool: list[bytes]
) -> dict[str, float]:
    """Other changes than SETs; of new keys where there must be no document before."""
    change, extras, count = workload.binary_change, workload.SET_EXTRAS, min(count, keys)
    chosen = [workload.key_of(index) for index in random.Random(8).sample(range(keys), count)]
    new = [b"new:%010d" % index for index in range(count)]
    cas = {}
    for key in chosen:
        meta = node.engine.newest_meta(vbucket_of(key), b"\0" + key)
        assert meta is not None
        cas[key] = meta.cas
    in_an_hour = extras[:4] + (3600).to_bytes(4, "big")
    counter = (1).to_bytes(8, "big") + bytes(12)
    made = {
        "set_cas": [change(workload.OP_SET, key, extras, pool[0], cas[key]) for key in chosen],
        "set_quiet": [change(workload.OP_SETQ, key, extras, pool[0]) for key in chosen],
        "set_expiring": [change(workload.OP_SET, key, in_an_hour, pool[0]) for key in chosen],
        "replace": [change(workload.OP_REPLACE, key, extras, pool[0]) for key in chosen],
        "touch": [change(workload.OP_TOUCH, key, in_an_hour[4:]) for key in chosen],
        "get_and_touch": [change(workload.OP_GAT, key, bytes(4)) for key in chosen],
        "append": [change(workload.OP_APPEND, key, b"", b"v") for key in chosen],
        "add": [change(workload.OP_ADD, key, extras, pool[0]) for key in new],
        "delete": [change(workload.OP_DELETE, key) for key in new],
        "count": [change(workload.OP_INCREMENT, key, counter) for key in new * 2],
    }
    seconds = {}
    for name, frames in made.items():
        batches = [b"".join(frames[at : at + BATCH]) for at in range(0, len(frames), BATCH)]
        seconds[f"change_{name}"] = drive(node, session, batches) / len(frames)
    return seconds


def measure_text_changes(
    node: CoreNode, session: TextSession, keys: int, count: int
) -> dict[str, float]:
    """The changes of the text protocol, of documents in memory."""
    count = min(count, keys)
    chosen = [workload.key_of(index) for index in random.Random(8).sample(range(keys), count)]
    new = [b"text:%010d" % index for index in range(count)]
    made = {
        "replace": [b"replace %b 0 0 1\r\n7\r\n" % key for key in chosen],
        "incr": [b"incr %b 1\r\n" % key for key in chosen],
        "cas": [b"cas %b 0 0 1 1\r\n7\r\n" % key for key in chosen],
        "touch": [b"touch %b 3600\r\n" % key for key in chosen],
        "add": [b"add %b 0 0 1\r\n7\r\n" % key for key in new],
        "delete": [b"delete %b\r\n" % key for key in new],
    }
    seconds = {}
    for name, lines in made.items():
        batches = [b"".join(lines[at : at + BATCH]) for at in range(0, len(lines), BATCH)]
        seconds[f"text_{name}"] = drive(node, session, batches) / len(lines)
    return seconds


def measure_upkeep(
    node: CoreNode, session: Session, updates: list[list[bytes]]
) -> dict[str, float]:
    """Merge uniform updates, each list for itself; then compact."""
    seconds = {}
    for batches in updates:
        node.merge()
        drive(node, session, batches)
    gc.collect()
    gc.freeze()
    entries, spent = node.merge()
    seconds["merge_update"] = spent / entries
    versions, spent = node.compact()
    seconds["compact"] = spent / versions
    return seconds


def measure(
    folder: Path, keys: int, count: int, value_bytes: int, *, native: bool = True
) -> dict[str, float]:
    """Everything, in microseconds per operation."""
    pool = workload.values(1, value_bytes)
    node = CoreNode(folder, native=native)
    session = node.session()
    gc.set_threshold(*GC_THRESHOLDS)
    seconds: dict[str, float] = {}

    def sets(wanted: Iterable[int]) -> list[bytes]:
        return list(workload.batches("binary", list(wanted), BATCH, pool))

    seconds["set_new"] = drive(node, session, sets(range(keys))) / keys
    gc.collect()
    gc.freeze()
    seconds["get_memory"] = drive(node, session, get_batches(indexes(1, keys, count))) / count
    plain, wanted = node.session(None), indexes(7, keys, count)
    plain_sets = list(workload.batches("memcached", wanted, BATCH, pool))
    seconds["set_plain"] = drive(node, plain, plain_sets) / count
    plain_gets = get_batches(wanted, workload.memcached_get)
    seconds["get_plain"] = drive(node, plain, plain_gets) / count
    text = TextSession(node.session(None).state)
    text_sets = list(workload.batches("text", wanted, BATCH, pool))
    seconds["set_text"] = drive(node, text, text_sets) / count
    seconds["get_text"] = drive(node, text, get_batches(wanted, workload.text_get)) / count
    made = [workload.key_of(index) for index in wanted]
    lines = [workload.text_get(*made[at : at + 100]) for at in range(0, count, 100)]
    seconds["get_100_text"] = drive(node, text, lines) / count
    _, spent = backfill(node)
    seconds["backfill_memory"] = spent / keys
    entries, spent = node.merge()
    seconds["merge"] = spent / entries
    sent, spent = backfill(node)
    seconds["backfill_merged"] = spent / keys
    _, spent = backfill(node, WITHOUT_COLLECTIONS)
    seconds["backfill_bare"] = spent / keys
    seconds["get_merged"] = drive(node, session, get_batches(indexes(2, keys, count))) / count
    absent = [keys + index for index in indexes(6, keys, count)]
    seconds["get_absent"] = drive(node, session, get_batches(absent)) / count
    cache = node.engine.item_cache
    misses = cache.misses
    cache.resize(CACHE_BYTES)
    order = random.Random(4).sample(range(keys), keys)
    seconds["get_filling"] = drive(node, session, get_batches(order)) / keys
    assert cache.misses == misses + keys, "each was read once"
    seconds["get_cached"] = drive(node, session, get_batches(indexes(2, keys, count))) / count
    assert cache.misses == misses + keys, "all were cached"
    half = keys // 2
    seconds["set_cached"] = drive(node, session, sets(indexes(3, half, count))) / count
    for part in node.engine.partitions:
        cache.clear(part)
    upper = [half + index for index in indexes(3, half, count)]
    seconds["set_merged"] = drive(node, session, sets(upper)) / count
    seconds["set_memory"] = drive(node, session, sets(upper)) / count
    updates = [sets(indexes(seed, keys, max(count, 3 * keys // 4))) for seed in (10, 11)]
    seconds |= measure_upkeep(node, session, updates)
    seconds |= measure_live(node, keys, count, pool)
    seconds["live_elsewhere"] = measure_elsewhere(node, keys, count, pool) / count
    drive(node, session, sets(range(keys)))
    seconds |= measure_changes(node, session, keys, count, pool)
    seconds |= measure_text_changes(node, text, keys, count)
    figures = {name: round(1e6 * each, 3) for name, each in seconds.items()}
    figures["backfill_merged_bytes_per_second"] = round(sent / (keys * seconds["backfill_merged"]))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.cpu")
    parser.add_argument("--keys", type=int, default=500_000)
    parser.add_argument("--operations", type=int, default=100_000, help="per figure, at least")
    parser.add_argument("--value-bytes", type=int, default=128)
    parser.add_argument("--without-loops", action="store_true", help="SETs, GETs, upkeep in Python")
    options = parser.parse_args()
    count = options.operations // BATCH * BATCH
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(
            Path(folder), options.keys, count, options.value_bytes,
            native=not options.without_loops,
        )  # fmt: skip
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
