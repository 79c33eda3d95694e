"""`Mirror`: a local copy of a server's documents that is kept up to date.

    async with Mirror("127.0.0.1:11210") as view:
        view["user:1"]                       # bytes; KeyError if there is no such document

When the block begins, the mirror has caught up with the server. With a path it is stored in an LMDB
file, and continues exactly where it was, even after a kill.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Unpack

from clients.address import ServerAddress
from clients.consumer.consumer import Consumer
from clients.consumer.node_session import LOG
from clients.consumer.options import ConsumerOptions, FollowArguments, prefixes_of
from clients.errors import DcpdError, OperationTimeoutError
from clients.event import Differences, Event, Rollback, StreamFailed, StreamOpened
from clients.kv.differences import version_of
from clients.kv.held import ROW_FORM, Held, HeldDocument
from clients.mirror.mirror_state import JOURNAL_MAX, MemoryStore, MirrorStore, rows_within, take
from clients.position import Position
from dcp.wire.hash_reads import KeyVersion
from vbucket.model.ids import NUM_VBUCKETS, vbucket_of
from vbucket.native.key_hashes import KeyHashes

CUT_PART_EVENTS: Final = 100_000
"""A cut of more events, such as the first, is applied in parts, so it need not be in memory."""
LOOK_AGAIN_S: Final = 0.1
"""How often `caught_up` checks while no event arrives."""


class _Received:
    """What the server sent: what is not stored yet, and of which partitions it sent something."""

    def __init__(self) -> None:
        self.positions: dict[int, Position] = {}
        """By partition: positions that are not stored yet."""
        self.events: list[Event] = []
        """Events that are not stored yet."""
        self.waiting: set[int] = set()
        """Partitions of these, if they are all Differences."""
        self._streamed: set[int] = set()
        """Partitions that the server has streamed: before, it may say ROLLBACK."""

    def add(self, events: list[Event], positions: Mapping[int, Position]) -> bool:
        """Take events, and the positions after them. Return whether they may wait for others: each
        Differences comes alone, and there may be one for each partition.
        """
        self._streamed |= {event.vb_id for event in events if isinstance(event, StreamOpened)}
        self.positions |= positions
        self.events += events
        if not (events and all(isinstance(event, Differences) for event in events)):
            return False
        self.waiting |= {event.vb_id for event in events}
        return True

    def stored(self) -> None:
        """The store has all of it."""
        self.positions, self.events, self.waiting = {}, [], set()

    def has(self, vb_id: int, done: Mapping[int, Position], seqno: int) -> bool:
        """Whether a mirror with these positions has a partition up to a seqno of the history that
        is streamed.
        """
        is_there = vb_id in done and done[vb_id].seqno >= seqno
        return is_there and vb_id in self._streamed and vb_id not in self.waiting


class _HeldDocuments(Held):
    """What a mirror holds of its collection."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror

    def _store(self, vb_id: int) -> MirrorStore:
        return self._mirror._stored(vb_id)  # noqa: SLF001 - of this module

    def documents(self, vb_id: int) -> Iterable[HeldDocument]:
        """See Held."""
        store = self._store(vb_id)
        versions = (version_of(row, ROW_FORM) for row in store.rows(vb_id, store.keys(vb_id)))
        return (HeldDocument(each.key, each.cas, each.rev_seqno) for each in versions)

    def hashes(self, vb_id: int) -> Mapping[int, KeyHashes]:
        """See Held."""
        return {self._mirror.consumer.collection_ids[0]: self._store(vb_id).hashes(vb_id)}

    def within(
        self,
        vb_id: int,
        collection_id: int,  # noqa: ARG002 - there is one
        buckets: tuple[int, bytes],
        known: Sequence[KeyVersion],
    ) -> list[KeyVersion]:
        """See Held. What the server has is looked up."""
        rows = rows_within(self._store(vb_id), vb_id, *buckets, [version.key for version in known])
        return [version_of(row, ROW_FORM) for row in rows]


class Mirror:
    """A local copy of a server's documents that is kept up to date. Read it like a mapping.

    Use it with `async with`: when the block begins, the mirror has caught up with the server. If
    history branches, the mirror undoes what the server undid.

    - `path`: the LMDB file; None: in memory.
    - `collection`: "scope.collection"; None: the default one.
    - `key_prefixes`: only documents whose key begins with one of them.
    - `journal_max`: changes per partition that can be undone. If history branches further back, the
      partition is loaded again.
    - `options`: those of ConsumerOptions that do not choose documents.

    A file that mirrors other documents is refused (CheckpointError). If the collection was dropped
    and created again, the file is emptied and the mirror starts again. So is a file of an older
    version with other documents. If a stream failed, reading the mirror raises that error, so it is
    never silently out of date.
    """

    def __init__(
        self,
        server: str | ServerAddress,
        path: str | Path | None = None,
        *,
        collection: str | None = None,
        key_prefixes: Iterable[str | bytes] | str | bytes = (),
        journal_max: int = JOURNAL_MAX,
        **options: Unpack[FollowArguments],
    ) -> None:
        self._path = path
        self._journal_max = journal_max
        self._server = server
        self._key_prefixes = prefixes_of(key_prefixes)
        self._options = ConsumerOptions(
            collections=collection, key_prefixes=self._key_prefixes, on_rollback=self._choose,
            held=None if self._key_prefixes else _HeldDocuments(self), **options,
        )  # fmt: skip
        self._store: MirrorStore = MemoryStore()
        self._between_cuts = asyncio.Lock()
        """With `cuts`: held by readers, and by the mirror while its documents are of no cut."""
        self._frontier = 0
        self._task: asyncio.Task[None] | None = None
        self._moved = asyncio.Event()
        self._failure: BaseException | None = None
        self._num_vbuckets = NUM_VBUCKETS
        self._was_opened = False
        self._received = _Received()
        self.consumer: Consumer
        """The consumer that follows the server (metrics, lag). Set when the mirror is open."""

    async def __aenter__(self) -> Mirror:
        """Connect, and catch up with the server as it is now."""
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop following."""
        await self.close()

    async def open(self, *, caught_up_within_s: float | None = None) -> None:
        """Connect and catch up. Raises what Consumer.open does, and OperationTimeoutError."""
        if self._path is not None:
            from clients.mirror.lmdb_mirror import LmdbStore

            self._store = LmdbStore(self._path)
        try:
            await self._open_consumer()
            if not self._store.follow(self.consumer.collection_ids[0], self._key_prefixes):
                LOG.warning("%s: is a mirror of other documents; it starts again", self._path)
                await self.consumer.close()
                await self._open_consumer()
            assert self.consumer.topology is not None
            self._num_vbuckets = self.consumer.topology.num_vbuckets
            if self._options.cuts:
                await self._between_cuts.acquire()
            self._task = asyncio.create_task(self._follow(), name="mirror")
            await self.caught_up(caught_up_within_s)
        except BaseException:
            await self.close()
            raise

    async def _open_consumer(self) -> None:
        # Partitions that are not in the store begin at 0.
        self.consumer = Consumer(self._server, self._options, start=self._store.positions())
        self._was_opened = True
        await self.consumer.open()

    async def close(self) -> None:
        """Stop following. A file keeps its content."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        try:
            if self._was_opened:
                await self.consumer.close()
        finally:
            self._store.close()

    async def caught_up(self, timeout_s: float | None = None) -> None:
        """Return when the mirror has everything that the server had at the time of the call.

        Raises OperationTimeoutError, and the error that stopped the mirror.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._catch_up()
        except TimeoutError:
            raise OperationTimeoutError(f"not caught up within {timeout_s:g} s") from None

    async def _catch_up(self) -> None:
        targets: dict[int, int] | None = None
        is_behind = True
        while is_behind:
            self._check()
            asked = await self.consumer.high_seqnos()
            if targets is None and len(asked) == len(self.consumer.followed):
                targets = asked
            elif targets is not None:
                # A branch may have lowered the seqnos to wait for.
                targets = {vb: min(seqno, asked.get(vb, seqno)) for vb, seqno in targets.items()}
            if targets is not None:
                is_by_cut = self._options.cuts  # received changes may wait for their cut
                done = self._store.positions() if is_by_cut else self.consumer.processed()
                targets = {
                    vb_id: seqno
                    for vb_id, seqno in targets.items()
                    if seqno and not self._received.has(vb_id, done, seqno)
                }
            # A refused stream is no longer followed. Its event will raise an error in `_follow`.
            is_refused = self.consumer.metrics.streams_failed > 0
            is_behind = targets is None or bool(targets) or is_refused
            if is_behind:
                self._moved.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN_S):
                        await self._moved.wait()

    # -- reading ---------------------------------------------------------------------------------

    def __getitem__(self, key: str | bytes) -> bytes:
        """Return a value. Raises KeyError."""
        value = self.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def get(self, key: str | bytes, default: bytes | None = None) -> bytes | None:
        """Return a value, or `default`."""
        self._check()
        name = key.encode() if isinstance(key, str) else key
        value = self._store.get(vbucket_of(name, self._num_vbuckets), name)
        return default if value is None else value

    def __contains__(self, key: str | bytes) -> bool:
        """Whether there is such a document."""
        return self.get(key) is not None

    def __len__(self) -> int:
        """Return the number of documents."""
        self._check()
        return self._store.count()

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield keys and values, in no particular order."""
        self._check()
        return self._store.items()

    def __iter__(self) -> Iterator[bytes]:
        """Yield keys."""
        return (key for key, _ in self.items())

    @property
    def resyncs(self) -> int:
        """How many partitions were brought to the server's state by their differences."""
        return self.consumer.metrics.resyncs

    @property
    def resync_bytes(self) -> int:
        """How many bytes the server has sent for the comparisons of `resyncs`."""
        return self.consumer.metrics.resync_bytes

    def positions(self) -> dict[int, Position]:
        """Return the mirror's position by partition."""
        return self._store.positions()

    @contextlib.asynccontextmanager
    async def at_frontier(self) -> AsyncIterator[int]:
        """Let the block read the documents as of one moment of the server (docs/consistent-cuts.md)
        and give it the closed time, a CAS. The mirror stands still meanwhile, so be quick.

        It needs the option `cuts`. Between such blocks a mirror with that option goes from cut to
        cut. Raises RuntimeError without the option, and the error that stopped the mirror.
        """
        if not self._options.cuts:
            raise RuntimeError("this mirror does not ask for cuts: give it the option cuts=True")
        async with self._between_cuts:
            self._check()
            yield self._frontier

    # -- following -------------------------------------------------------------------------------

    async def _follow(self) -> None:
        try:
            if self._options.cuts:
                await self._follow_cuts()
            async for events, positions in self.consumer.deliveries():
                for event in events:
                    if isinstance(event, StreamFailed):
                        raise event.error()
                self._take(events, positions)
            if not self._options.until_now:
                raise DcpdError(
                    "the stream ended: the collection was dropped, or the consumer was closed",
                    hint="Open a new mirror. A collection that is created again has a new id.",
                )
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._moved.set()
            self._reach_cut(self._frontier)  # readers get the error

    async def _follow_cuts(self) -> None:
        async for cut in self.consumer.cuts(CUT_PART_EVENTS):
            if cut.events:
                await self._leave_cut()
                changed = {event.vb_id for event in cut.events}
                positions = {vb_id: cut.positions[vb_id] for vb_id in changed}
                self._take(cut.events, positions, may_wait=False)
            if cut.time:
                self._reach_cut(cut.time)

    async def _leave_cut(self) -> None:
        """Wait for readers, and keep others out until the next cut is reached."""
        if self._frontier:
            await self._between_cuts.acquire()
            self._frontier = 0

    def _reach_cut(self, time: int) -> None:
        """The documents are those of a cut: let readers in."""
        if not self._frontier and self._between_cuts.locked():
            self._between_cuts.release()
        self._frontier = time

    def _take(
        self, events: list[Event], positions: Mapping[int, Position], *, may_wait: bool = True
    ) -> None:
        """Apply events, and store the positions after them. Each Differences comes alone: those of
        many partitions are stored together, with what follows.
        """
        if not (self._received.add(events, positions) and may_wait):
            self._store_received()

    def _store_received(self) -> None:
        received = self._received
        take(
            self._store, received.events, received.positions,
            collection_id=self.consumer.collection_ids[0], journal_max=self._journal_max,
        )  # fmt: skip
        received.stored()
        self._moved.set()

    def _stored(self, vb_id: int) -> MirrorStore:
        """Return the store when it has all that was received of a partition."""
        if vb_id in self._received.waiting:
            self._store_received()
        return self._store

    async def _choose(self, event: Rollback) -> Literal["undo", "restart"]:
        """Undo as far as the journal reaches."""
        await self._leave_cut()
        has_journal = event.to_seqno and event.to_seqno >= self._store.floor(event.vb_id)
        return "undo" if has_journal else "restart"

    def _check(self) -> None:
        if self._failure is not None and not isinstance(self._failure, asyncio.CancelledError):
            raise self._failure
