"""A backup of an in-memory node: the pure parts of `clients.backup.run` without links and threads.

`back_up` may be killed after so many bytes: what it wrote until then stays, as after SIGKILL.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping

from clients.backup.archive import Archive, create_archive
from clients.backup.chunk import Chunker
from clients.backup.feed import Feed
from clients.backup.intake import Intake
from clients.backup.manifest import RunRecord
from clients.backup.point import Point, chain_of
from clients.backup.reading import Reader, View
from clients.backup.run import SegmentWriter
from dcp.wire.feature import Feature
from dcp.wire.frame import HEADER
from dcp.wire.opcode import Opcode
from support.memory_node import MemoryNode

ROUNDS_MAX = 20_000
Documents = dict[bytes, bytes]


class KilledError(Exception):
    """The backup was killed where the test said."""


def memory_archive() -> Archive:
    """Return a new archive in memory."""
    return create_archive(f"memory://{uuid.uuid4().hex}", 1)


def back_up(  # noqa: C901  the whole of a run, in one place
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
    """Run a backup to its end and return the run; its time is the node's."""
    node.commit()
    runs = archive.runs()
    run = runs[-1].run + 1 if runs else 1
    found = archive.unfinished(run)
    if found:
        history = found[0][2].is_history
    writer = SegmentWriter(archive, run, node.now_ns, is_history=history)
    writer.adopt(found)
    legs = {}
    for _, _, footer in found:
        legs.update(footer.legs)
    intake = Intake(b"backup", history=history)
    feeds = {}
    for vb_id in vb_ids:
        feed = Feed(vb_id, run, chain_of(runs, vb_id), legs.get(vb_id, []), versions_max)
        feeds[vb_id] = feed
        intake.add(feed)
    peer = node.connect()
    peer.hello(Feature.SELECT_BUCKET, Feature.COLLECTIONS, Feature.JSON)
    chunker = Chunker(chunk_bytes=chunk_bytes)
    received = 0
    output = intake.begin()

    def write(chunks) -> None:
        for chunk in chunks:
            writer.add(chunk)
            if writer.open_bytes >= segment_bytes:
                writer.close()

    def take(part: bytes) -> None:
        for piece in intake.receive(part, node.now_ns):
            write(chunker.add(piece))
        for feed in intake.finished:
            write(chunker.finish(feed.vb_id))
        intake.finished.clear()

    for _ in range(ROUNDS_MAX):
        if output:
            peer.session.receive(output, node.now_ns)
        node.commit()
        state = peer.state
        data = b"".join(state.answers)
        state.answers.clear()
        if state.producer is not None:
            data += b"".join(state.producer.pump(piece_bytes))
        for at in range(0, len(data), piece_bytes):
            part = data[at : at + piece_bytes]
            received += len(part)
            take(part)
            if kill_after_bytes is not None and received >= kill_after_bytes:
                raise KilledError
        output = intake.take_output()
        intake.tick(node.now_ns + 10**12)
        output += intake.take_output()
        if all(feed.state.name == "DONE" for feed in feeds.values()):
            break
    else:
        raise AssertionError("the backup does not end")
    write(chunker.flush())
    writer.close()
    assert peer.state.producer is not None
    peer.state.producer.close()
    record = RunRecord(
        run=run, archive_id=archive.record.archive_id, server="memory", started_ns=node.now_ns,
        ended_ns=node.now_ns, is_history=history, is_resumed=bool(found), base_through=0,
        segments=writer.records,
        legs={vb_id: feed.legs() for vb_id, feed in feeds.items()},
        rollbacks={vb_id: feed.rollbacks for vb_id, feed in feeds.items() if feed.rollbacks},
        collections={
            key: (node.engine.manifest.path_of(key), 0) for key in node.engine.manifest.collections
        },
        changes=writer.changes, raw_bytes=writer.raw_bytes, wire_bytes=intake.wire_bytes,
    )  # fmt: skip
    archive.write_run(record)
    return record


def documents_of(reader: Reader, view: View) -> Documents:
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
    reader = Reader(archive, runs)
    states = {}
    for vb_id in vb_ids:
        view = reader.view(vb_id, point)
        assert not view.damages
        states[vb_id] = documents_of(reader, view)
    return states
