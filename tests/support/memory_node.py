"""A whole node without sockets or disks: engine, log and store on their in-memory versions.

Tests drive it with the bytes of real sessions. `commit`, `merge` and `crash` are separate steps, so
tests can choose every interleaving. The restores of a `LoadingNode` go straight into the store,
step by step.
"""

from __future__ import annotations

import random
import struct
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from dcp.core.floors import FloorCycle
from dcp.core.groups import GroupCycle, Job, LogTask, Published, WriteGroup
from dcp.core.store_schedule import MergeCycle
from dcp.session.answers.held_answers import HeldAnswers
from dcp.session.kv.range_scans import RangeScans
from dcp.session.node_facts import Limits
from dcp.session.replication_port import ReplicationPort
from dcp.session.session import Session
from dcp.session.state import ClientLogin, SessionParts, SessionState
from dcp.stream.hub import StreamHub
from dcp.stream.producer import Producer
from dcp.wire.feature import Feature
from dcp.wire.frame import HEADER_BYTES, Frame, FrameDecoder, pack_request
from dcp.wire.message import (
    FIT_META,
    OPEN_EXTRAS,
    PUT_FRAMES_REQUEST,
    OpenFlag,
    StreamRequest,
    pack_stream_request,
)
from dcp.wire.opcode import Opcode
from memory.kv_env import MemoryEnv
from memory.log_device import MemoryLogDevice
from support.credentials import OpenDoor
from vbucket.engine.engine import Engine
from vbucket.engine.loading.store_load import LoadReport, LoadRequest, load
from vbucket.engine.read_view import Views
from vbucket.engine.recovery.replay import Replay
from vbucket.engine.recovery.startup import new_partitions
from vbucket.log.commit_group import CommitGroup
from vbucket.log.end_mark import LogEnd
from vbucket.log.recovery import recover
from vbucket.log.writer import LogWriter
from vbucket.model.ids import NUM_VBUCKETS, SEQNO_MAX
from vbucket.store.block import BODY_BYTES_TARGET
from vbucket.store.environment import KvEnv
from vbucket.store.hashes import HashTables
from vbucket.store.lmdb.environment_lmdb import LmdbEnv
from vbucket.store.records import STORE_FORMAT_VERSION, TABLES, NodeRecord, kept_segments
from vbucket.store.store import Store
from vbucket.upkeep.compaction import STEP_BYTES, Compactor, Floors
from vbucket.upkeep.merge import MergeReport, merge
from vbucket.upkeep.retention import FloorStep

FEW_PARTITIONS = 16
"""Number of partitions of a node, unless a test asks for the product's number."""
START_NS = 1_800_000_000_000_000_000


@lru_cache(maxsize=16)
def _new_store(seed: int, partitions: int) -> tuple[dict[str, Any], Any]:
    """Return the tables of a new store, and the state of the node's randomness after it.

    Every test begins with a node, so it is made once per seed and number of partitions.
    """
    drawn = random.Random(seed)
    env = MemoryEnv(TABLES)
    node = NodeRecord(STORE_FORMAT_VERSION, env.engine, "00", False, "commit", 0)
    records = new_partitions(drawn, partitions)
    Store.create(env, node, records).close()
    return env.tables, drawn.getstate()


def node_for(request: pytest.FixtureRequest) -> MemoryNode:
    """Return a node; with the product's partitions if the test is marked `all_partitions`."""
    marked = request.node.get_closest_marker("all_partitions") is not None
    return MemoryNode(partitions=NUM_VBUCKETS if marked else FEW_PARTITIONS)


class StoppedError(Exception):
    """A merge was stopped before a commit."""


class MemoryNode:
    """See the module. Time does not move unless `now_ns` is changed.

    A start and every merge go over all partitions, so tests with many of them use few partitions.
    """

    version = "test"
    bucket = "default"

    def __init__(
        self,
        seed: int = 0,
        *,
        partitions: int = FEW_PARTITIONS,
        item_cache_bytes: int = 0,
        body_bytes_target: int = BODY_BYTES_TARGET,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        self.partitions = partitions
        self.set_sizes(body_bytes_target=body_bytes_target, step_bytes=step_bytes)
        self.item_cache_bytes = item_cache_bytes
        self.draws = random.Random(seed)
        self.now_ns = START_NS
        self.device = MemoryLogDevice()
        LogWriter(self.device).rotate()
        self.env: KvEnv = self._new_env(seed)
        self._open()

    def set_sizes(
        self, *, body_bytes_target: int = BODY_BYTES_TARGET, step_bytes: int = STEP_BYTES
    ) -> None:
        """Set the sizes of blocks and of compaction steps; a compaction under way starts again."""
        self.body_bytes_target = body_bytes_target
        self.step_bytes = step_bytes
        self._begin_compactor()

    def _begin_compactor(self) -> None:
        self.compactor = Compactor(
            step_bytes=self.step_bytes, body_bytes_target=self.body_bytes_target
        )

    def _new_env(self, seed: int) -> KvEnv:
        """Return the database of a new store."""
        env = MemoryEnv(TABLES)
        tables, random_state = _new_store(seed, self.partitions)
        env.tables = {name: rows.copy() for name, rows in tables.items()}
        self.draws.setstate(random_state)
        return env

    def _open(self) -> None:
        self.store = Store(self.env)
        self.hash_tables = HashTables()
        self.engine = Engine(
            self.store, self.draws, self.partitions, item_cache_bytes=self.item_cache_bytes
        )
        node = self.store.node()
        assert node is not None
        recovery = recover(
            self.device,
            node.merged_segment,
            merged_end=None if node.merged_end is None else LogEnd.from_document(node.merged_end),
        )
        replay = Replay(self.engine, self.store)
        for group in recovery.groups():
            replay.apply_group(group.group, group.payload)
        replay.finish()
        self.engine.keyspace.continue_after(recovery.end.group)
        self.torn = recovery.finish()
        self.writer = LogWriter(self.device, recovery.end)
        self.writer.rotate()
        self.hub = StreamHub()
        self.views = Views(self.engine, self.store)
        self.scans = RangeScans(self.views, self.draws)
        self.groups = GroupCycle(self.engine, self.hub, syncs_groups=True)
        self.merges = MergeCycle(self.engine, kept_segments(self.store.quarantine()))
        self.floors = FloorCycle(self.engine, self.store, self.hub)
        self.engine.begin_batch(self.now_ns)

    # -- steps ---------------------------------------------------------------------------------

    def commit(self) -> None:
        """Let the log do what it has to: write and sync the open group, and wake its waiters."""
        while (job := self.next_job()) is not None:
            self.finish(job)

    def next_job(self) -> Job | None:
        """Return what the log has to do next."""
        job = self.groups.next_job()
        if isinstance(job, WriteGroup):
            self.begun(job.group)
        return job

    def take(self) -> WriteGroup:
        """Take the open group, which is not empty; `finish` writes it."""
        job = self.next_job()
        assert isinstance(job, WriteGroup)
        return job

    def finish(self, job: Job) -> None:
        """Do a job of the log, as the committer does."""
        if isinstance(job, WriteGroup):
            self.writer.append(job.group.number, job.group.payload)
        if job is LogTask.ROTATE:
            self.writer.rotate()
        else:
            self.writer.sync()
        self.published(self.groups.done(job))

    def begun(self, group: CommitGroup) -> None:
        """A group is about to be written; for nodes that tell others."""

    def published(self, published: Published) -> None:
        """A job has made something visible; for nodes that tell others."""

    def begin_merge(self) -> None:
        """Freeze and seal; writes continue."""
        self.commit()
        if (
            not self.engine.keyspace.memtables.is_merging
        ):  # the commit may have begun one that was due
            self.groups.begin_merge()
            self.commit()

    def end_merge(self, *, is_answer_lost: bool = False) -> None:
        """Merge the sealed segments and drop the frozen layer. `is_answer_lost`: the store process
        dies after the merge, and another one is asked again.
        """
        segments = self.merges.begin(self.device.segments())
        sealed = [(segment, self.device.read(segment)) for segment in segments]
        report = self.merge_segments(sealed)
        if is_answer_lost:
            self.hash_tables = HashTables()
            report = self.merge_segments(sealed)
        for segment in self.merges.merged(report).deletable:
            self.device.delete(segment)
        while not self.merges.drop_slice():
            pass

    def stop_merge(self, slices: int) -> None:
        """Merge up to so many slices, of one partition each, and move on to what they left in the
        store. The store process died, and `end_merge` asks another one, or it is still at work.
        """
        segments = self.merges.begin(self.device.segments())
        sealed = [(segment, self.device.read(segment)) for segment in segments]
        commits = iter(range(slices))

        def before_commit() -> None:
            if next(commits, None) is None:
                raise StoppedError

        with suppress(StoppedError):
            merge(
                self.env, sealed,
                hash_tables=self.hash_tables, before_commit=before_commit,
                body_bytes_target=self.body_bytes_target, slice_pages=1,
                before_undo=self.compactor.begin_again,
            )  # fmt: skip
        self.store.refresh()

    def merge_segments(self, sealed: list[tuple[int, bytes]]) -> MergeReport:
        return merge(
            self.env, sealed,
            hash_tables=self.hash_tables,
            body_bytes_target=self.body_bytes_target, before_undo=self.compactor.begin_again,
        )  # fmt: skip

    def merge(self) -> None:
        self.begin_merge()
        self.end_merge()

    def raise_floor(self, vb_id: int, floor: int, purge: int) -> Floors:
        """Raise the floor as far as open streams and views allow, if the store is recent enough;
        return where it is now.
        """
        part = self.engine.partitions[vb_id]
        self.floors.advance(FloorStep(vb_id, part.vb_uuid, floor, purge), self.now_ns)
        return Floors(part.history_floor, part.purge_seqno)

    def compact(self, vb_ids: Iterable[int], *, slices: int | None = None) -> None:
        """Drop what the committed floors allow: `slices` steps, or everything."""
        todo = list(vb_ids)
        floors = self.floors.committed()
        while todo and slices != 0:
            report = self.compactor.run(self.env, todo, lambda: True, floors=floors)
            assert not report.damages
            todo = [vb_id for vb_id in todo if vb_id not in report.finished]
            slices = None if slices is None else slices - 1
            self.store.refresh()

    def crash(self, keep_unsynced_bytes: int = 0) -> None:
        """Lose what was not synced, and start again."""
        self.device = self.device.crash(keep_unsynced_bytes=keep_unsynced_bytes)
        self.store.close()
        self._begin_compactor()
        self._open()

    # -- facts for sessions ------------------------------------------------------------------------

    def bucket_config(self) -> bytes:
        return b'{"rev":1,"name":"default"}'

    def global_config(self) -> bytes:
        return b'{"rev":1}'

    def config_version(self) -> tuple[int, int]:
        return (1, 1)

    def address_of(self, vb_id: int) -> str:
        return f"node-of-{vb_id}:11210"

    def stats(self, group: bytes) -> list[tuple[str, str]] | None:
        return [("pid", "1")] if not group else None

    def connect(self, *, is_loopback: bool = True, limits: Limits | None = None) -> Peer:
        return Peer(self, is_loopback=is_loopback, limits=limits or Limits())


class LmdbNode(MemoryNode):
    """The same with its store in LMDB, in a temporary folder; `close` it."""

    def _new_env(self, seed: int) -> KvEnv:
        self._folder = tempfile.TemporaryDirectory()
        env = LmdbEnv(Path(self._folder.name) / "store", TABLES)
        node = NodeRecord(STORE_FORMAT_VERSION, env.engine, "00", False, "commit", 0)
        Store.create(env, node, new_partitions(self.draws, self.partitions)).close()
        return env

    def close(self) -> None:
        self.store.close()
        self.env.close()
        self._folder.cleanup()


class Peer:
    """A client connection to a MemoryNode: bytes in, frames out."""

    def __init__(self, node: MemoryNode, *, is_loopback: bool, limits: Limits) -> None:
        self.node = node
        self.state = SessionState(
            SessionParts.of(node.engine, node.hub, node, limits, scans=node.scans),
            ClientLogin(OpenDoor(), peer_is_loopback=is_loopback),
        )
        self.session = Session(self.state)
        self.decoder = FrameDecoder()

    def joins(self, replication: ReplicationPort) -> None:
        """Let its node be one of a cluster from now on. Its answers get no marks by that."""
        self.state.shared = self.state.shared._replace(replication=replication)

    def send(self, data: bytes) -> list[Frame]:
        """Send bytes; return the answers, whether or not they may be sent yet."""
        if self.state.producer is not None:
            self.state.producer.heard(self.node.now_ns)
        self.session.receive(data, self.node.now_ns)
        self.session.ask_logins(self.node.now_ns)
        frames = self._answers()
        while self.state.is_full:
            self.session.resume(self.node.now_ns)
            self.session.ask_logins(self.node.now_ns)
            frames += self._answers()
        return frames

    def _answers(self) -> list[Frame]:
        answers = b"".join(self.state.answers)
        self.state.answers.clear()
        return self.decoder.feed(answers)

    @property
    def must_wait(self) -> bool:
        """Whether the answers so far observed something that is not committed."""
        return self.state.wait_group > self.node.engine.commits.committed_group

    def ask(self, opcode: int, **parts: int | bytes) -> Frame:
        """Send one request and return its one answer."""
        frames = self.send(pack_request(opcode, **parts))  # type: ignore[arg-type]
        assert len(frames) == 1, frames
        return frames[0]

    def hello(self, *features: int) -> Frame:
        value = b"".join(code.to_bytes(2, "big") for code in features)
        return self.ask(Opcode.HELLO, key=b"test", value=value)

    def set(self, vb_id: int, key: bytes, value: bytes) -> Frame:
        """SET on a connection that names its partitions. The answer may be sent after a commit."""
        return self.ask(Opcode.SET, vb_id=vb_id, key=key, value=value, extras=bytes(8))

    def delete(self, vb_id: int, key: bytes) -> Frame:
        return self.ask(Opcode.DELETE, vb_id=vb_id, key=key)

    # -- streams -------------------------------------------------------------------------------

    @property
    def producer(self) -> Producer:
        assert self.state.producer is not None, "DCP_OPEN comes first"
        return self.state.producer

    def open(self, name: bytes = b"consumer", flags: int = OpenFlag.PRODUCER) -> Frame:
        """DCP_OPEN."""
        return self.ask(Opcode.DCP_OPEN, key=name, extras=OPEN_EXTRAS.pack(0, flags))

    def control(self, key: bytes, value: bytes) -> Frame:
        """DCP_CONTROL."""
        return self.ask(Opcode.DCP_CONTROL, key=key, value=value)

    def stream(
        self,
        vb_id: int,
        start: int = 0,
        end: int = SEQNO_MAX,
        *,
        uuid: int = 0,
        snap: tuple[int, int] | None = None,
        flags: int = 0,
        opaque: int = 7,
        value: bytes = b"",
    ) -> Frame:
        """STREAM_REQ; by default the snapshot is [start, start]."""
        snap_start, snap_end = snap or (start, start)
        asked = StreamRequest(flags, start, end, uuid, snap_start, snap_end)
        frames = self.send(pack_stream_request(vb_id, asked, opaque, value))
        assert len(frames) == 1, frames
        return frames[0]

    def pump(self, bytes_max: int = 1 << 20) -> list[Frame]:
        """Return the stream messages that the producer sends now."""
        return self.decoder.feed(b"".join(self.producer.pump(bytes_max)))

    def drain(self, bytes_max: int = 1 << 20) -> list[Frame]:
        """Pump until nothing more may be sent."""
        frames: list[Frame] = []
        while self.producer.has_output:
            frames += self.pump(bytes_max)
        return frames


FEATURES = (
    Feature.COLLECTIONS, Feature.JSON, Feature.XERROR, Feature.XATTR, Feature.X_PUT_FRAMES,
    Feature.X_FIT_META,
)  # fmt: skip


class LoadingNode(MemoryNode):
    """`load` is what the server's shell and its store process do."""

    loads_anything = True
    is_native = True

    def _open(self) -> None:
        super()._open()
        if self.loads_anything:
            self.engine.loads.on_work = lambda: None

    def load_into_store(
        self, requests: Sequence[LoadRequest], before_commit: Callable[[], None] = lambda: None
    ) -> list[LoadReport]:
        """The store process's part."""
        return load(
            self.env, requests, cas_max=self.engine.cas_max,
            manifest_uid=self.engine.keyspace.manifest.uid,
            hash_tables=self.hash_tables, before_commit=before_commit,
            body_bytes_target=self.body_bytes_target, native=self.is_native,
        )  # fmt: skip

    def begin_load(self) -> list[LoadRequest]:
        """What the shell asks for next."""
        if self.engine.loads.wants_merge:
            self.merge()
            self.engine.loads.note_merged()
        self.engine.begin_batch(self.now_ns)
        return self.engine.loads.begin()

    def end_load(self, reports: Sequence[LoadReport]) -> None:
        """Take note of the reports."""
        self.store.refresh()
        self.hub.committed(self.engine.loads.done(reports))
        self.apply()

    def apply(self) -> None:
        """Apply what is not loaded."""
        self.engine.begin_batch(self.now_ns)
        while self.engine.loads.apply_next():
            pass

    def load(self) -> None:
        """Load everything that waits."""
        while self.engine.loads.has_work:
            requests = self.begin_load()
            if requests:
                self.end_load(self.load_into_store(requests))
            self.apply()
        self.commit()


class OrdinaryNode(LoadingNode):
    """The same without loads."""

    loads_anything = False


class RestoringPeer:
    """A client that puts frames, and gets its answers as a connection sends them."""

    def __init__(self, node: MemoryNode) -> None:
        self.peer: Peer = node.connect()
        self.peer.hello(*FEATURES)
        self._node = node
        self._held = HeldAnswers(node.engine)
        self._decoder = FrameDecoder()

    def put(self, vb_id: int, frames: Sequence[bytes], options: int = FIT_META) -> list[Frame]:
        """Send one packet; return the answers that leave at once."""
        sizes = [len(frame) - HEADER_BYTES for frame in frames]
        value = struct.pack(f">{len(sizes)}I", *sizes) + b"".join(frames)
        return self.put_value(vb_id, value, len(frames), options)

    def put_value(
        self, vb_id: int, value: bytes, count: int, options: int = FIT_META
    ) -> list[Frame]:
        packet = pack_request(
            Opcode.X_PUT_FRAMES, vb_id=vb_id, value=value,
            extras=PUT_FRAMES_REQUEST.pack(options, count),
        )  # fmt: skip
        self.peer.session.receive(packet, self._node.now_ns)
        return self._decoder.feed(self._held.take(self.peer.state, 0))

    def answers(self) -> list[Frame]:
        """Return the answers that may leave now."""
        return self._decoder.feed(b"".join(batch.answers for batch in self._held.release()))
