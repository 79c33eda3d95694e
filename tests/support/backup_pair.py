"""A backup of an in-memory node: the pure parts of `clients.backup.run` without links and threads.

`back_up` may be killed after a number of bytes of changes: what it wrote until then stays, as after
SIGKILL. Beside it: how to call `dcpctl backup` against a live server, and documents of that.
"""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Iterable, Mapping

from clients.address import parse_address
from clients.backup.archives.archive import Archive, create_archive
from clients.backup.archives.archive_manifest import RunRecord
from clients.backup.archives.chunk import Chunker, RawChunk
from clients.backup.archives.lock import LOCK_TIMES, ArchiveLock, LockTimes
from clients.backup.archives.point import Point, chain_of
from clients.backup.archives.segment_writer import SegmentWriter
from clients.backup.feed import Feed, FeedState
from clients.backup.intake import Intake
from clients.backup.reading import PointReader, View
from clients.link.blocking_link import SyncLink
from dcp.wire.feature import Feature
from dcp.wire.frame import HEADER
from dcp.wire.opcode import Opcode
from support.memory_node import MemoryNode
from vbucket.model.ids import vbucket_of

META = struct.Struct(">IIIQB")


def lines(out):
    return [json.loads(line) for line in out.splitlines()]


def backup(ctl, server, archive, *options):
    code, out, err = ctl(server, "backup", "run", "--archive", archive, "-o", "json", *options)
    assert code == 0, err
    return lines(out)[0]


def restore(ctl, to, archive, *options, code=0):
    found, out, err = ctl(to, "backup", "restore", "--archive", archive, "-o", "json", *options)
    assert found == code, err
    return lines(out)[0]


class Keys:
    """Documents of one server, with their metadata."""

    def __init__(self, server):
        self.link = SyncLink(parse_address(server.address))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.link.close()

    def set(self, key, value, *, flags=0, expiry=0):
        extras = struct.pack(">II", flags, expiry)
        frame = self.link.request(
            Opcode.SET, vb_id=vbucket_of(key), key=b"\0" + key, value=value, extras=extras
        )
        assert frame.status == 0
        return frame.cas

    def delete(self, key):
        vb_id = vbucket_of(key)
        assert self.link.request(Opcode.DELETE, vb_id=vb_id, key=b"\0" + key).status == 0

    def meta(self, key):
        """Deleted, flags, expiry, revision, datatype, CAS."""
        frame = self.link.request(
            Opcode.GET_META, vb_id=vbucket_of(key), key=b"\0" + key, extras=b"\2"
        )
        return (*META.unpack(frame.extras), frame.cas) if not frame.status else None

    def get(self, key):
        frame = self.link.request(Opcode.GET, vb_id=vbucket_of(key), key=b"\0" + key)
        return frame.value if not frame.status else None


def fill(server, prefix, count, size=100, first=0):
    """Write documents in one batch."""
    packets = []
    for number in range(first, first + count):
        key = b"\0%s%d" % (prefix, number)
        value = b"%d:" % number + bytes(size)
        head = HEADER.pack(
            0x80, Opcode.SETQ, len(key), 8, 0, vbucket_of(key[1:]), 8 + len(key) + len(value), 0, 0
        )
        packets.append(head + bytes(8) + key + value)
    with Keys(server) as keys:
        keys.link._write(b"".join(packets))
        assert keys.link.request(Opcode.NOOP).status == 0


def export(ctl, server, archive, *options):
    code, out, err = ctl(
        server, "backup", "export", "--archive", archive, "--to", "-", "--format", "jsonl", *options
    )
    assert code == 0, err
    return {document["key"]: document for document in lines(out)}


def seconds(time_ns):
    return f"{time_ns // 10**9}.{time_ns % 10**9:09}"


def high_seqnos(server):
    with Keys(server) as keys:
        frame = keys.link.request(Opcode.GET_ALL_VB_SEQNOS)
    return dict(struct.iter_unpack(">HQ", frame.value))


def high_seqno(server, vb_id):
    return high_seqnos(server)[vb_id]


def ends_of(record):
    return {vb_id: legs[-1].to_seqno for vb_id, legs in record.legs.items()}


ROUNDS_MAX = 20_000
Documents = dict[bytes, bytes]


class KilledError(Exception):
    """The backup was killed at the point that the test chose."""


def memory_archive(lock_times: LockTimes = LOCK_TIMES) -> Archive:
    """Return a new archive in memory."""
    return create_archive(f"memory://{uuid.uuid4().hex}", 1, lock_times=lock_times)


def back_up(
    node: MemoryNode,
    archive: Archive,
    vb_ids: Iterable[int],
    *,
    history: bool = True,
    versions_max: int | None = None,
    kill_after_bytes: int | None = None,
    piece_bytes: int = 4096,
    chunk_bytes: int = 300,
    segment_bytes: int = 600,
) -> RunRecord:
    """Run a backup to its end and return the run; its time is that of the node."""
    node.commit()
    with archive.lock("test") as lock:
        pair = _Pair(node, archive, lock, list(vb_ids), history=history, versions_max=versions_max,
                     chunk_bytes=chunk_bytes, segment_bytes=segment_bytes)  # fmt: skip
        received = 0
        for _ in range(ROUNDS_MAX):
            data = pair.exchange(piece_bytes)
            for at in range(0, len(data), piece_bytes):
                part = data[at : at + piece_bytes]
                received += pair.take(part)
                if kill_after_bytes is not None and received >= kill_after_bytes:
                    raise KilledError
            if all(feed.state is FeedState.DONE for feed in pair.feeds.values()):
                return pair.finish()
        raise AssertionError("the backup does not end")


class _Pair:
    """A node's session and an intake, each connected to the other."""

    def __init__(
        self, node: MemoryNode, archive: Archive, lock: ArchiveLock, vb_ids: list[int], *,
        history: bool, versions_max: int | None, chunk_bytes: int, segment_bytes: int,
    ) -> None:  # fmt: skip
        self.node, self.archive = node, archive
        self.lock = lock
        runs, self.run, self.found = archive.begin_run(lock)
        self.history = self.found[0][2].is_history if self.found else history
        self.started_ns = self.found[0][2].started_ns if self.found else node.now_ns
        self.writer = SegmentWriter(
            archive, lock, self.run, self.started_ns, is_history=self.history,
            segment_bytes=segment_bytes,
        )  # fmt: skip
        self.writer.adopt(self.found)
        legs = {}
        for _, _, footer in self.found:
            legs.update(footer.legs)
        self.intake = Intake(b"backup", history=self.history)
        self.feeds = {}
        for vb_id in vb_ids:
            chain = chain_of(runs, vb_id)
            feed = Feed(vb_id, self.run, chain, legs.get(vb_id, []), versions_max)
            self.feeds[vb_id] = feed
            self.intake.add(feed)
        self.peer = node.connect()
        self.peer.hello(Feature.SELECT_BUCKET, Feature.COLLECTIONS, Feature.JSON, Feature.XATTR)
        self.chunker = Chunker(chunk_bytes=chunk_bytes)
        self.output = self.intake.begin()

    def exchange(self, bytes_max: int) -> bytes:
        """Give the intake's output to the node; return the node's answer."""
        self.intake.tick(self.node.now_ns + 10**12)
        self.output += self.intake.take_output()
        if self.output:
            self.peer.session.receive(self.output, self.node.now_ns)
            self.peer.session.ask_logins(self.node.now_ns)
            self.output = b""
        state = self.peer.state
        while state.is_full:  # dear commands let others have a turn
            self.peer.session.resume(self.node.now_ns)
        self.node.commit()
        data = b"".join(state.answers)
        state.answers.clear()
        if state.producer is not None:
            data += b"".join(state.producer.pump(bytes_max))
        return data

    def take(self, part: bytes) -> int:
        """Give the intake the bytes of one read; return how many bytes of changes they had."""
        self.intake.receive(part, self.node.now_ns)
        pieces = self.intake.take_pieces()
        for piece in pieces:
            self._write(self.chunker.add(piece))
        for feed in self.intake.finished:
            self._write(self.chunker.finish(feed.vb_id))
        self.intake.finished.clear()
        self.output += self.intake.take_output()
        return sum(len(piece.data) for piece in pieces)

    def _write(self, chunks: Iterable[RawChunk]) -> None:
        for chunk in chunks:
            self.writer.add(chunk)

    def finish(self) -> RunRecord:
        """Write the rest, and the manifest."""
        node, writer = self.node, self.writer
        self._write(self.chunker.flush())
        writer.close()
        assert self.peer.state.producer is not None
        self.peer.state.producer.close()
        manifest = node.engine.keyspace.manifest
        record = RunRecord(
            run=self.run, archive_id=self.archive.record.archive_id, server="memory",
            started_ns=self.started_ns, ended_ns=node.now_ns, is_history=self.history,
            is_resumed=bool(self.found), base_through=0, segments=writer.records,
            legs={vb_id: legs for vb_id, feed in self.feeds.items() if (legs := feed.news())},
            rollbacks={vb_id: f.rollbacks for vb_id, f in self.feeds.items() if f.rollbacks},
            collections={key: (manifest.path_of(key), 0) for key in manifest.collections},
            changes=writer.changes, raw_bytes=writer.raw_bytes, wire_bytes=self.intake.wire_bytes,
        )  # fmt: skip
        self.archive.write_run(record, self.lock)
        return record


def documents_of(reader: PointReader, view: View) -> Documents:
    """Return the documents of a partition as of a point."""
    found = {}
    seqno_before = 0
    for data, start, stop in reader.frames(view):
        _, opcode, key_len, extras_len, _, _, _, _, _ = HEADER.unpack_from(data, start)
        seqno = int.from_bytes(data[start + 24 : start + 32], "big")
        assert seqno > seqno_before, "frames come in seqno order"
        seqno_before = seqno
        key_at = start + 24 + extras_len
        if opcode == Opcode.DCP_MUTATION:
            found[data[key_at : key_at + key_len]] = data[key_at + key_len : stop]
    return found


NEWEST = Point()


def state_as_of(
    archive: Archive, vb_ids: Iterable[int], point: Point = NEWEST
) -> Mapping[int, Documents]:
    """Return the documents of partitions as of a point; none of them may be damaged."""
    runs = point.runs_of(archive.runs())
    reader = PointReader(archive, runs)
    states = {}
    for vb_id in vb_ids:
        view = reader.view(vb_id, point)
        assert not view.damages
        states[vb_id] = documents_of(reader, view)
    return states
