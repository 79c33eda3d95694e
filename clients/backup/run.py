"""A backup run with asyncio: stream from all nodes, write in a thread, finish with a manifest.

    server -> Link -> Intake -> Chunker -> queue -> thread: zstd, segment, write, read back

Called by `dcpctl backup run`, tests and the benchmark.

Invariants
- a written segment is self-contained. A killed run continues after the last change of its last
  segment. What was not in a segment yet is streamed again;
- the manifest is written when every partition has reached the high seqno that it had when the run
  asked, and that of the cluster's cut, and every segment was read back and compared;
- a cut of a cluster is taken only if no partition's stream goes beyond it. It is looked for while
  the streams run; partitions of which it has more are streamed once more, up to the cut;
- memory is bounded: chunks that wait for the thread (QUEUE_CHUNKS), an open segment
  (segment_writer.SEGMENT_BYTES), gathered frames (chunk.GATHERED_BYTES_MAX). If the queue is full,
  the run stops reading, and flow control then stops the server.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from clients.address import ServerAddress
from clients.backup.archives.archive import Archive
from clients.backup.archives.archive_errors import ArchiveError
from clients.backup.archives.archive_manifest import RunRecord
from clients.backup.archives.chunk import CHUNK_BYTES, Chunker, Piece, RawChunk
from clients.backup.archives.legs import Placed
from clients.backup.archives.lock import ArchiveLock
from clients.backup.archives.segment import Footer
from clients.backup.archives.segment_writer import SEGMENT_BYTES, SegmentWriter
from clients.backup.archives.zstd import LEVEL
from clients.backup.dialing import Dialing, Home
from clients.backup.feed import Feed
from clients.backup.intake import Intake
from clients.consumer.batch_reader import Cut
from clients.consumer.consumer import Consumer
from clients.errors import (
    TRANSIENT,
    DcpdError,
    OperationTimeoutError,
    StatusError,
    StreamViolationError,
    error_from_status,
)
from clients.link.copies import Copies, check_copies
from clients.link.dials import Dials
from clients.link.handshake import FEATURES
from clients.link.pipelined_link import Link
from clients.link.topology import Place
from dcp.wire.feature import Feature
from dcp.wire.frame import ProtocolError
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

QUEUE_CHUNKS: Final = 64
"""Chunks that wait for the thread: 16 MiB, a fraction of a second."""
GIVE_UP_AFTER_S: Final = 60.0
"""A run fails after this time without progress."""
ANSWER_TIMEOUT_S: Final = 10.0
"""Timeout for the list of collections, which the server has in memory."""
TICK_S: Final = 0.1
PAUSE_MAX_S: Final = 2.0
"""The longest pause between two attempts at a node."""
CUT_S: Final = 10.0
"""How long a run waits for a cut of the cluster."""
KEEP_S: Final = 5.0
"""How often a run checks whether the archive's lock needs renewal."""

PUSH_FEATURES: Final = (*FEATURES, Feature.JSON)
"""Features of a link for streaming. JSON is there because the datatype is stored too."""


class BackupProgress(NamedTuple):
    """The progress of a run."""

    seqnos_done: int
    seqnos_wanted: int
    partitions_done: int
    partitions: int
    changes: int
    wire_bytes: int


class RunReport(NamedTuple):
    """The result of a run."""

    record: RunRecord
    resumed_segments: int
    """Segments that were already written, because the run was killed before."""
    seconds: float
    history_was_refused: bool
    """History was requested, but a server cannot stream every version."""
    why_no_cut: str
    """Why the run of a cluster does not end at one moment; "" if it does, or the node is alone."""


class _Session:
    """One node's connection and its intake."""

    def __init__(self, backup: Backup, link: Link, intake: Intake) -> None:
        self.link = link
        self.intake = intake
        self.failure: DcpdError | None = None
        self._backup = backup

    def begin(self) -> None:
        """Take over the connection and request the partitions that were added."""
        self.link.write(self.intake.begin())
        self.link.hand_over(self._on_bytes, self._on_lost)

    def flush(self) -> None:
        """Send the intake's output."""
        output = self.intake.take_output()
        if output:
            self.link.write(output)

    def _on_bytes(self, data: bytes) -> None:
        if self.failure is not None:
            return
        failure: DcpdError | None = None
        try:
            self.intake.receive(data, time.monotonic_ns())
        except ProtocolError as error:
            failure = StreamViolationError(
                f"the server broke the protocol: {error}", node=self.link.node
            )
        except DcpdError as error:
            failure = error
        finally:
            # Also after an error: the feeds are positioned after the changes before it.
            self._backup.take(self, self.intake.take_pieces())
        if failure is None:
            self.flush()
        else:
            self._fail(failure)

    def _on_lost(self, error: DcpdError) -> None:
        if self.failure is None:
            self.failure = error
        self._backup.wake.set()

    def _fail(self, error: DcpdError) -> None:
        self.failure = error
        self.link.close()
        self._backup.wake.set()


class WriteQueue:
    """Chunks on their way to the thread that writes them, in order."""

    def __init__(self, chunks_max: int) -> None:
        self._chunks_max = chunks_max
        self._writer: SegmentWriter | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="backup-writer")
        self._writes: list[asyncio.Future[None]] = []
        """Chunks whose result was not looked at yet; those that are written, too."""
        self._waiting = 0
        """How many of them are not written yet."""

    @property
    def is_empty(self) -> bool:
        """Whether the results of all chunks were looked at."""
        return not self._writes

    @property
    def is_full(self) -> bool:
        """Whether more chunks wait than the run may hold: it has to stop reading."""
        return self._waiting > self._chunks_max

    @property
    def has_room(self) -> bool:
        """Whether a run that stopped reading may go on. It is less than not to be full, so that
        the run does not stop and go on with each chunk.
        """
        return self._waiting <= self._chunks_max // 2

    def begin(self, writer: SegmentWriter) -> None:
        """Write into the segments of this writer."""
        self._writer = writer

    def submit(self, chunk: RawChunk) -> asyncio.Future[None]:
        """Let the thread write a chunk. When the result calls back, the chunk waits no more."""
        assert self._writer is not None, "the run has begun"
        loop = asyncio.get_running_loop()
        written = loop.run_in_executor(self._executor, self._writer.add, chunk)
        written.add_done_callback(self._on_written)
        self._writes.append(written)
        self._waiting += 1
        return written

    def check(self) -> None:
        """Forget written chunks; raise errors of the thread."""
        while self._writes and self._writes[0].done():
            self._writes.pop(0).result()

    async def finish(self) -> None:
        """Return when all chunks are written, and the open segment. Raises errors of the thread."""
        assert self._writer is not None, "the run has begun"
        await asyncio.gather(*self._writes)
        self._writes.clear()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, self._writer.close)

    async def stop(self) -> None:
        """End the thread. After a failure, the results of waiting chunks do not matter."""
        await asyncio.gather(*self._writes, return_exceptions=True)
        await asyncio.to_thread(self._executor.shutdown, wait=True)

    def _on_written(self, _written: asyncio.Future[None]) -> None:
        self._waiting -= 1


class CutSearch:
    """Lets a run end at a cut of the cluster (docs/consistent-cuts.md), if its nodes tell one in
    time: each by itself would tell seqnos of another moment.
    """

    def __init__(self, address: ServerAddress, wake: asyncio.Event) -> None:
        self.why_no_cut = ""
        """Why none was found; "": it was, or none was needed, or it is still looked for."""
        self._address = address
        self._wake = wake
        self._task: asyncio.Task[None] | None = None
        """None: the run needs no cut, or the search was ended."""

    @property
    def is_under_way(self) -> bool:
        """Whether the run has to wait for `end` before it knows where its streams end."""
        return self._task is not None

    @property
    def has_ended(self) -> bool:
        """Whether there is a search to `end`."""
        return self._task is not None and self._task.done()

    def begin(self, feeds: dict[int, Feed]) -> None:
        """Look for a cut in the background, and give each feed its seqno."""
        self._task = asyncio.create_task(self._find(feeds))

    def end(self) -> None:
        """End a search that `has_ended`. Raises what it raised."""
        assert self._task is not None, "there is a search"
        task, self._task = self._task, None
        task.result()

    async def stop(self) -> None:
        """Look no further."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _find(self, feeds: dict[int, Feed]) -> None:
        consumer = Consumer(self._address, cuts=True, start="now")
        try:
            async with asyncio.timeout(CUT_S), consumer:
                async for cut in consumer.cuts():
                    if self.take(cut, feeds):
                        break
        except TimeoutError:
            self.why_no_cut = f"the nodes told no cut within {CUT_S:g} s"
        except (StatusError, *TRANSIENT) as error:
            self.why_no_cut = str(error)
        finally:
            self._wake.set()

    def take(self, cut: Cut, feeds: dict[int, Feed]) -> bool:
        """Let the feeds end at a cut; return False if a stream already goes beyond it."""
        seqnos = {vb_id: position.seqno for vb_id, position in cut.positions.items()}
        for vb_id, seqno in seqnos.items():
            target = feeds[vb_id].target
            if target is not None and target > seqno:
                return False
        for vb_id, seqno in seqnos.items():
            feeds[vb_id].cut_seqno = seqno
        return True


class BackupOptions(NamedTuple):
    """How a run is made. The values after `from_replicas` are limits, for tests."""

    history: bool = True
    """Stream every version, not only the newest in each snapshot."""
    level: int = LEVEL
    versions_max: int | None = None
    """Name only this many versions in a stream request (None: all), for comparisons."""
    give_up: int | None = None
    """The first lost or damaged run. It and all later runs are dropped."""
    from_replicas: bool = False
    """Read copies that are not masters. What they have then is backed up."""
    give_up_after_s: float = GIVE_UP_AFTER_S
    keep_s: float = KEEP_S
    queue_chunks: int = QUEUE_CHUNKS
    chunk_bytes: int = CHUNK_BYTES
    segment_bytes: int = SEGMENT_BYTES


_DEFAULT: Final = BackupOptions()


class Backup:
    """One run."""

    def __init__(
        self,
        archive: Archive,
        address: ServerAddress,
        options: BackupOptions = _DEFAULT,
        *,
        on_progress: Callable[[BackupProgress], None] | None = None,
    ) -> None:
        self.wake = asyncio.Event()
        self._archive = archive
        self._address = address
        self._options = options
        self._history = options.history
        self._on_progress = on_progress
        self._sessions: dict[Place, _Session] = {}
        self._feeds: dict[int, Feed] = {}
        self._dials = Dials(address, self.wake, features=PUSH_FEATURES, longest_s=PAUSE_MAX_S)
        self._copies = Copies() if options.from_replicas else None
        self._dialing = Dialing(self._dials, self._refresh, self._copies)
        self._chunker = Chunker(options.chunk_bytes)
        self._queue = WriteQueue(options.queue_chunks)
        self._wire_bytes = 0
        self._done = 0
        self._changes = 0
        self._is_paused = self._is_one_node = False
        self._history_was_refused = False
        self._search = CutSearch(address, self.wake)
        self._early: list[Feed] = []
        """Partitions whose streams have ended while the cut is looked for."""
        self._collections: dict[int, tuple[str, int]] = {}

    # -- the whole -----------------------------------------------------------------------------

    async def run(self) -> RunReport:
        """Back up; return when the manifest is written. Raises DcpdErrors.

        If it fails, the changes written so far are kept, and the next run continues after them.
        """
        began_s = time.monotonic()
        with self._archive.lock("backup run") as lock:
            runs, run, found = self._archive.begin_run(lock, self._options.give_up)
            started_ns = found[0][2].started_ns if found else time.time_ns()
            if found:
                self._history = found[0][2].is_history
            writer = SegmentWriter(
                self._archive, lock, run, started_ns,
                is_history=self._history, level=self._options.level,
                segment_bytes=self._options.segment_bytes,
            )  # fmt: skip
            writer.adopt(found)
            self._queue.begin(writer)
            try:
                await self._refresh()
                self._prepare_feeds(run, runs, found)
                self._dialing.add(self._feeds.values())
                if not self._is_one_node and self._copies is None:
                    self._search.begin(self._feeds)
                await self._follow(self._dialing, lock)
                await self._finish_writing()
            except DcpdError as error:
                if not isinstance(error, ArchiveError):
                    await self._finish_writing()  # keep the open segment for the next run
                raise
            finally:
                await self._search.stop()
                await self._dialing.close()
                for session in self._sessions.values():
                    session.link.close()
                await asyncio.sleep(0)  # lets the transports finish closing
                await self._queue.stop()
            record = self._record(writer, run, started_ns, is_resumed=bool(found))
            await asyncio.to_thread(self._archive.write_run, record, lock)
        return RunReport(
            record, len(found), time.monotonic() - began_s, self._history_was_refused,
            self._search.why_no_cut,
        )  # fmt: skip

    def take(self, session: _Session, pieces: list[Piece]) -> None:
        """Process the pieces of a read."""
        intake = session.intake
        for piece in pieces:
            self._changes += piece.changes
            for chunk in self._chunker.add(piece):
                self._submit(chunk)
        if intake.finished:
            for feed in intake.finished:
                for chunk in self._chunker.finish(feed.vb_id):
                    self._submit(chunk)
            self._early += intake.finished
            intake.finished.clear()
            if not self._search.is_under_way:
                self._end_streams()
        if intake.gone:
            if self._copies is not None:
                self._pass_over(self._copies, session.link.place, intake.gone)
            self._dialing.add_moved(intake.gone)
            intake.gone.clear()
            self.wake.set()
        if self._queue.is_full and not self._is_paused:
            self._is_paused = True
            for other in self._sessions.values():
                other.link.pause_reading()

    def _pass_over(self, copies: Copies, place: Place, gone: Sequence[Feed]) -> None:
        """A node does not serve these partitions, or cannot read them: other copies do."""
        now_s = time.monotonic()
        for feed in gone:
            if feed.is_damaged:
                copies.leave_out(feed.vb_id, place, now_s)
            else:
                copies.pass_over([feed.vb_id], now_s)

    # -- streaming -----------------------------------------------------------------------------

    def _prepare_feeds(
        self,
        run: int,
        runs: list[RunRecord],
        found: list[tuple[str, int, Footer]],
    ) -> None:
        topology = self._dials.cluster.topology
        assert topology is not None
        self._archive.follow_partitions(topology.num_vbuckets, is_empty=not (runs or found))
        legs = {}
        for _, _, footer in found:
            legs.update(footer.legs)
        for vb_id in range(topology.num_vbuckets):
            chain: list[Placed] = [placed for item in runs for placed in item.placed(vb_id)]
            feed = Feed(vb_id, run, chain, legs.get(vb_id, []), self._options.versions_max)
            self._feeds[vb_id] = feed

    def _end_search(self) -> None:
        """Go on once the search for a cut has ended. Raises what it raised."""
        if self._search.has_ended:
            self._search.end()
            self._end_streams()

    def _end_streams(self) -> None:
        """Partitions whose streams have ended are done, but for those of which the cut has more."""
        ended, self._early = self._early, []
        short = [feed for feed in ended if feed.is_short]
        for feed in short:
            feed.go_on()
        self._dialing.add(short)
        self._done += len(ended) - len(short)
        if short or self._done == len(self._feeds):
            self.wake.set()

    async def _follow(self, dialing: Dialing, lock: ArchiveLock) -> None:
        """Stream until every partition is done. Handle lost connections and moved partitions."""
        progress_at_s, progress = time.monotonic(), -1
        keep_at_s = time.monotonic() + self._options.keep_s
        while self._done < len(self._feeds):
            now_s = time.monotonic()
            self._end_search()
            self._collect_lost(dialing)
            for home in dialing.step(now_s, self._sessions):
                self._stream_from(home)
            if self._progress_mark() != progress:
                progress, progress_at_s = self._progress_mark(), now_s
                if dialing.is_idle:
                    dialing.reset()
            elif not self._queue.is_empty:
                progress_at_s = now_s  # the archive is slow, not the server
            elif now_s - progress_at_s > self._options.give_up_after_s:
                raise dialing.failure or OperationTimeoutError(
                    f"no change arrived for {self._options.give_up_after_s:g} s, and"
                    f" {len(self._feeds) - self._done} partitions are not finished",
                    node=self._address.node,
                )
            if now_s > keep_at_s:
                keep_at_s = now_s + self._options.keep_s
                await asyncio.to_thread(lock.keep)
            await self._tick()

    async def _tick(self) -> None:
        for session in self._sessions.values():
            session.intake.tick(time.monotonic_ns())
            session.flush()
        self._queue.check()
        self._report()
        self.wake.clear()
        try:
            async with asyncio.timeout(TICK_S):
                await self.wake.wait()
        except TimeoutError:
            pass

    def _progress_mark(self) -> int:
        return self._changes + self._done

    def _collect_lost(self, dialing: Dialing) -> None:
        """Collect the partitions of lost connections. Raises errors that are not transient."""
        for place, session in list(self._sessions.items()):
            if session.failure is None:
                continue
            if not isinstance(session.failure, TRANSIENT):
                raise session.failure
            del self._sessions[place]
            self._wire_bytes += session.intake.wire_bytes
            dialing.add_lost(session.intake.abandon())

    async def _refresh(self) -> None:
        """Get the map and the collections from the first node that answers."""
        link = await self._dials.refreshed_link()
        try:
            self._collections = await collections_of(link)
            assert self._dials.cluster.topology is not None
            self._is_one_node = self._dials.cluster.topology.is_alone
            if self._copies is not None and self._dials.cluster.newest is not None:
                check_copies(self._dials.cluster.newest, self._address.node)
                self._dials.cluster.topology = self._copies.chosen(self._dials.cluster.newest)
        finally:
            link.close()

    def _stream_from(self, home: Home) -> None:
        """Stream partitions from their node."""
        newest = self._dials.cluster.newest
        if self._copies is not None and newest is not None:
            for feed in home.feeds:
                feed.is_last = self._copies.is_last(newest, feed.vb_id)
        if home.link is None:
            session = self._sessions[home.place]
            session.intake.takes_replicas = self._is_one_node
            for feed in home.feeds:
                session.intake.add(feed)
            session.intake.ask()
            session.flush()
            return
        name = f"dcpd-backup-{secrets.token_hex(6)}".encode()
        intake = Intake(
            name, history=self._history, takes_replicas=self._is_one_node,
            from_replicas=self._copies is not None, node=home.link.node,
        )  # fmt: skip
        session = self._sessions[home.place] = _Session(self, home.link, intake)
        for feed in home.feeds:
            intake.add(feed)
        session.begin()
        if self._is_paused:
            home.link.pause_reading()

    # -- writing -------------------------------------------------------------------------------

    def _submit(self, chunk: RawChunk) -> None:
        self._queue.submit(chunk).add_done_callback(self._on_written)

    def _on_written(self, _written: asyncio.Future[None]) -> None:
        """A chunk is written, or failed: resume reading if there is room.

        At once, and not at the next tick: until then the thread would run out of chunks.
        """
        if self._is_paused and self._queue.has_room:
            self._is_paused = False
            for session in self._sessions.values():
                session.link.resume_reading()

    async def _finish_writing(self) -> None:
        for chunk in self._chunker.flush():
            self._submit(chunk)
        await self._queue.finish()

    def _report(self) -> None:
        if self._on_progress is None:
            return
        done = wanted = 0
        for feed in self._feeds.values():
            if feed.target is not None:
                wanted += max(0, feed.target - feed.start_seqno)
                done += max(0, feed.seqno - feed.start_seqno)
        self._on_progress(
            BackupProgress(done, wanted, self._done, len(self._feeds), self._changes, self._wire())
        )

    def _wire(self) -> int:
        return self._wire_bytes + sum(item.intake.wire_bytes for item in self._sessions.values())

    def _record(
        self, writer: SegmentWriter, run: int, started_ns: int, *, is_resumed: bool
    ) -> RunRecord:
        self._report()
        granted = [session.intake.has_history for session in self._sessions.values()]
        self._history_was_refused = self._history and not all(granted)
        strangers = {feed.is_of_other_server for feed in self._feeds.values()} - {None}
        return RunRecord(
            run=run,
            archive_id=self._archive.record.archive_id,
            server=self._address.node,
            started_ns=started_ns,
            ended_ns=time.time_ns(),
            is_history=self._history and not self._history_was_refused,
            is_resumed=is_resumed,
            base_through=0,
            segments=writer.records,
            legs={vb_id: legs for vb_id, feed in self._feeds.items() if (legs := feed.news())},
            rollbacks={
                vb_id: feed.rollbacks for vb_id, feed in self._feeds.items() if feed.rollbacks
            },
            collections=self._collections,
            changes=writer.changes,
            raw_bytes=writer.raw_bytes,
            wire_bytes=self._wire(),
            is_other_server=strangers == {True},
        )


async def collections_of(
    link: Link, *, answer_timeout_s: float = ANSWER_TIMEOUT_S
) -> dict[int, tuple[str, int]]:
    """Return a server's collections: id -> (scope.collection, maximum time to live in s).

    Raises OperationTimeoutError, StatusErrors, and ArchiveError for a malformed answer.
    """
    if not link.has_collections:
        return {0: ("_default._default", 0)}
    try:
        async with asyncio.timeout(answer_timeout_s):
            frame = await link.request(Opcode.GET_COLLECTIONS_MANIFEST)
    except TimeoutError:
        raise OperationTimeoutError(
            f"the server did not list its collections within {answer_timeout_s:g} s",
            node=link.node, hint="Check whether the server has stalled: dcpctl status",
        ) from None  # fmt: skip
    if frame.status in {Status.UNKNOWN_COMMAND, Status.NOT_SUPPORTED}:
        return {0: ("_default._default", 0)}
    if frame.status:
        raise error_from_status(frame.status, "collections", body=frame.value, node=link.node)
    try:
        return {
            int(item["uid"], 16): (f"{scope['name']}.{item['name']}", int(item.get("maxTTL", 0)))
            for scope in json.loads(frame.value)["scopes"]
            for item in scope["collections"]
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ArchiveError(f"the server's list of collections is malformed: {error!r}") from error
