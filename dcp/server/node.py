"""The node: one folder of data, one engine, its log, its store process, its listeners.

This is where everything is wired. Start-up: lock the folder, open the store, replay the log's tail,
begin a new segment, make new versions if the last stop may have lost what somebody saw, listen.
Where the disk has no room for that, the node serves reads, and tries again until there is some.
Stop: no new work, what is pending is committed and answered, the clean mark is written.

What becomes of an exception that nobody expected: in the commit path it ends the process, with its
reason, and the next start recovers; in a session it ends that connection; in housekeeping
(dcp.server.observe.housekeeping) it is logged and counted, and the task goes on.

Invariants
- LMDB is written by this process only before the store process starts and after it has ended;
- the clean mark is on disk only while no node runs on the folder;
- a stop comes to its end within STOP_S, whatever stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from dcp import __version__
from dcp.server.access.access import Access
from dcp.server.access.logins import PeerLogins
from dcp.server.access.users import Users
from dcp.server.admin.node_view import CollectionsView
from dcp.server.config.settings import Settings
from dcp.server.config.sources import is_loopback, shown
from dcp.server.listeners import Listeners
from dcp.server.net.connection import ClientConnection
from dcp.server.net.held_bytes import HeldBytes, receive_buffers, send_buffers
from dcp.server.net.newcomers import Newcomers
from dcp.server.net.tls_listener import TlsHandshake
from dcp.server.observe.event_log import EventLog
from dcp.server.observe.housekeeping import Housekeeping
from dcp.server.observe.log_limiter import LogLimiter
from dcp.server.observe.meter import Meter
from dcp.server.operate.collection_changes import Collections
from dcp.server.operate.operations import Operations
from dcp.server.operate.partition_dump import Dumps
from dcp.server.report.stats import stats, status_document
from dcp.server.storage.backpressure import Backpressure, Pressure
from dcp.server.storage.committer import Committer
from dcp.server.storage.compaction_schedule import Compaction
from dcp.server.storage.expiry_schedule import expire_when_due
from dcp.server.storage.merging import Merging
from dcp.server.storage.opening import READ_ONLY_TEXT, Storage
from dcp.server.storage.store_process import StoreProcess, StoreProcessDiedError
from dcp.server.storage.store_supervisor import StoreSupervisor
from dcp.server.storage.waiters import CommitWaiters
from dcp.session.faults import FaultTable
from dcp.session.range_scans import RangeScans
from dcp.session.state import SessionState
from dcp.stream.hub import StreamHub
from dcp.wire.message import EndReason
from vbucket.engine.engine import Engine
from vbucket.engine.expiry import Pager
from vbucket.engine.read_view import Views
from vbucket.log.commit_group import CommitGroup
from vbucket.log.device import LogWriteError, SyncFailedError
from vbucket.model.partition_map import PartitionMap, bucket_config, global_config
from vbucket.store.environment import StoreDamagedError, StoreFailedError, StoreFullError
from vbucket.store.quarantine import kept_segments
from vbucket.store.records import STORE_FORMAT_VERSION

TICK_S: Final = 0.25
"""How often connections are looked at for NOOP, idleness and slow handshakes."""
STOP_S: Final = 8.0
"""What a stop may take in all; its steps share it. The command ends the process a little later."""
LISTENERS_STOP_S: Final = 2.5
DRAIN_S: Final = 4.0
"""What clients get to take their last answers."""
ROOM_RETRY_S: Final = 2.0
"""How often a node that started on a full disk tries to make its first writes."""


_STORE_ERRORS: Final = (
    StoreDamagedError, StoreFailedError, StoreFullError, StoreProcessDiedError
)  # fmt: skip


class Node:
    """See the module."""

    version = __version__

    def __init__(
        self, settings: Settings, users: Users, log: EventLog, *, accepts_log_loss: bool = False
    ) -> None:
        self._settings = settings
        self._accepts_log_loss = accepts_log_loss
        self.users = users
        self.loop = asyncio.get_running_loop()
        self.data_dir = Path(settings.data)
        self.durability = settings.durability
        self.hub: StreamHub = StreamHub()
        self.meter: Meter = Meter()
        self.faults: FaultTable = FaultTable()
        self.operations = Operations(self, self.faults)
        self.dumps = Dumps(self)
        self.collections: CollectionsView
        self.end_reasons: dict[int, EndReason] = {}
        """Why streams end at the next branch of a partition, where it is not ROLLBACK."""
        self.connections: set[ClientConnection] = set()
        self.waiting: set[ClientConnection] = set()
        """Connections with answers that wait for a commit."""
        self.handshakes: set[TlsHandshake] = set()
        self.newcomers: Newcomers = Newcomers(settings.connections_max)
        self.receive_buffers: HeldBytes = receive_buffers(settings.receive_buffers_bytes_max)
        self.send_buffers: HeldBytes = send_buffers(settings.send_buffers_bytes_max)
        self.connections_total: int = 0
        self.pid = os.getpid()
        self.is_ready: bool = False
        self._started_s = time.monotonic()
        self.log = log
        self._limiter = LogLimiter()
        self._housekeeping = Housekeeping(self.meter, log)
        self._metrics_page: Callable[..., bytes] | None = None
        self.access: Access = Access(settings, users, log)
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiters = CommitWaiters()
        self._stopping: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._all_gone = asyncio.Event()
        self._failure: Exception | None = None
        self._next_tick: asyncio.TimerHandle | None = None
        self._next_sync: asyncio.TimerHandle | None = None
        self._expiring: asyncio.Task[None] | None = None
        self._compacting: asyncio.Task[None] | None = None
        self._stop_at_s = 0.0
        """By when a stop has to be done, monotonic."""
        self._was_refused = False
        """Whether the log says that writes are refused because the store is behind."""
        self._read_only_why = ""
        """Why the first writes could not be made yet; "" once they are."""
        self.store = StoreSupervisor(self._start_store_process)
        self.compaction = Compaction(self, settings)
        self.listeners: Listeners = Listeners(self, settings)
        self.engine: Engine
        self.committer: Committer
        self.merging: Merging
        self.backpressure: Backpressure
        self.pager: Pager
        self.views: Views
        self.scans: RangeScans
        self._storage: Storage
        self._map: PartitionMap
        self._bucket_config: bytes
        self._global_config: bytes

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the folder, recover, and listen.

        Raises FolderError, LogDamagedError, UnknownFormatError, StoreDamagedError, OSError.
        """
        self._recover()
        try:
            await self._begin_writing()
            await self._listen()
        except BaseException:
            await self.stop()
            raise
        self.is_ready = True
        self._tick()
        if self._read_only_why:
            self._spawn(self._begin_when_there_is_room())

    async def _begin_writing(self) -> None:
        """Make the first writes and start all that writes, where the disk has room for it."""
        why, was_read_only = self._storage.begin(), bool(self._read_only_why)
        self._read_only_why = why
        if why:
            if not was_read_only:
                self.engine.refuse_writes(READ_ONLY_TEXT)
                self.log.error("started read-only", reason=why)
            return
        if was_read_only:
            self.engine.refuse_writes("")
            self.log.info("the disk has room again, writes are taken")
        await self.store.start()
        self.committer.start()
        self._merge_what_is_replayed()
        if self.durability == "interval":
            self._sync_later()
        settings = self._settings
        if settings.expiry_interval_s:
            self._expiring = self._spawn(
                self._housekeeping.repeat(
                    "expiry", lambda: expire_when_due(self, settings.expiry_interval_s)
                )
            )
        if settings.compact_interval_s:
            self._compacting = self._spawn(
                self._housekeeping.repeat("compaction", self.compaction.run)
            )

    async def _begin_when_there_is_room(self) -> None:
        while self._read_only_why:
            await asyncio.sleep(ROOM_RETRY_S)
            await self._begin_writing()

    async def run_until_stopped(self) -> None:
        """Return after `stop`, or raise what made it impossible to go on."""
        await self._stopped.wait()
        if self._failure is not None:
            raise self._failure

    async def stop(self) -> None:
        """Answer what was received, write the clean mark, close.

        Raises what the log or the store ended with. Whoever calls it again waits for the same.
        """
        if self._stopping is None:
            self._stopping = self.loop.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        try:
            await self._stop_in_order()
        finally:
            self._stopped.set()

    async def _stop_in_order(self) -> None:
        self.is_ready = False
        self._stop_at_s = time.monotonic() + STOP_S
        for timer in (self._next_tick, self._next_sync):
            if timer is not None:
                timer.cancel()
        self.backpressure.stop()
        for task in (self._expiring, self._compacting):
            if task is not None:
                task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LISTENERS_STOP_S):
                await self.listeners.stop()
        for connection in tuple(self.connections):
            connection.finish("the server stops")
        if self._failure is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._stop_s_left(DRAIN_S)):
                    await self._drain()
        for connection in tuple(self.connections):
            connection.abort("the server stops")
        try:
            await self._stop_storage()
        finally:
            await self.access.close()

    def _stop_s_left(self, most_s: float) -> float:
        """Return what a step of the stop may take."""
        return max(0.1, min(most_s, self._stop_at_s - time.monotonic()))

    async def _drain(self) -> None:
        """Commit what is pending, and let clients take their answers."""
        await self.committer.drain()
        if self.connections and not self.committer.full_why:
            self._all_gone.clear()
            await self._all_gone.wait()

    async def _stop_storage(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.merging.stop(self._stop_s_left(1.0))
        is_clean = self._failure is None
        if not await self.store.stop():
            is_clean = False
            self.log.error("the store process does not end: its disk does not answer")
        try:
            self.committer.stop()
        except SyncFailedError:
            is_clean = False
            raise
        finally:
            # Without the mark the next start takes it for a crash, which loses nothing that was
            # promised.
            if why := self._storage.close(is_clean=is_clean):
                self.log.error("no clean mark", reason=why)

    # -- start-up ----------------------------------------------------------------------------------

    def _recover(self) -> None:
        self._storage = storage = Storage(
            self.data_dir, self._settings, accepts_log_loss=self._accepts_log_loss
        )
        self.engine = engine = storage.engine
        storage.tell(self.log)
        self.pager = Pager(engine, storage.store)
        self.views = Views(engine, storage.store)
        self.scans = RangeScans(self.views, lambda: secrets.token_bytes(16))
        self.collections = Collections(engine, self.until_group_committed, self.log.info)
        self.committer = Committer(
            engine,
            storage.writer,
            syncs_groups=self.durability == "commit",
            on_commit=self._committed,
            on_rotated=self._rotated,
            on_full=self._log_full,
            on_failure=self._fail,
            sync_seconds=self.meter.sync_seconds,
        )
        self.merging = Merging(
            engine, storage.device, self.store, self.meter, self.log,
            kick=self.committer.kick, on_merged=self._merged,
            kept=kept_segments(storage.store.quarantine()),
        )  # fmt: skip
        self.backpressure = Backpressure(
            engine,
            self._settings.write_wait_s,
            why=self.merging.why_behind,
            on_change=self._pressure_changed,
        )
        self.merging.on_trouble = self.backpressure.reword

    async def _start_store_process(self) -> StoreProcess:
        return await StoreProcess.start(
            self.data_dir,
            self._storage.folder.lock_fd,
            map_size_bytes=self._settings.map_size_bytes,
            silence_s=self._settings.store_silence_s,
        )

    def _merge_what_is_replayed(self) -> None:
        """A merge also brings a store of an older format up to this one."""
        format_version = self._storage.node.format_version
        wants_merge = self.engine.wants_freeze or format_version < STORE_FORMAT_VERSION
        if wants_merge and self.engine.has_pending:
            self.engine.merge_soon()  # changes came while the store started: after their group
        elif wants_merge:
            self.engine.freeze()
            self._rotated(self._storage.writer.rotate())
        self.committer.kick()
        self.backpressure.update()

    async def _listen(self) -> None:
        listeners = self.listeners
        await listeners.start()
        self._map = PartitionMap.single_node(
            host=self._settings.host,
            kv_port=listeners.kv_port,
            admin_port=listeners.admin_port,
            kv_tls_port=listeners.kv_tls_port,
            admin_tls_port=listeners.admin_tls_port,
        )
        self._bucket_config = bucket_config(self._map, bucket_uuid=self._storage.node.node_id)
        self._global_config = global_config(self._map)

    async def until_committed(self, vb_id: int) -> None:
        """Return when everything that was done to a partition is committed."""
        await self.until_group_committed(self.engine.partitions[vb_id].last_group)

    async def until_group_committed(self, group: int) -> None:
        """Return when a commit group is committed."""
        if group <= self.engine.committed_group:
            return
        self.committer.kick()
        await self._waiters.wait(group)

    # -- commits and merges ------------------------------------------------------------------------

    def _committed(self, group: CommitGroup) -> None:
        self.meter.groups += 1
        self.meter.changes += group.entries
        for vb_id in group.branched:
            self.hub.branched(vb_id, self.end_reasons.pop(vb_id, EndReason.ROLLBACK))
            self._spawn(self._keep_failover_log(vb_id))
        for vb_id in group.restated:
            self.hub.restated(vb_id)
        self.hub.committed(group.high_seqnos)
        self._waiters.committed(group.number)
        self.backpressure.update()
        waiting = self.waiting
        if waiting:
            self.waiting = {
                connection for connection in waiting if connection.release(group.number)
            } | (self.waiting - waiting)

    async def _keep_failover_log(self, vb_id: int) -> None:
        """Write a new failover log to LMDB at once; the log segment has it already."""
        log = self.engine.partitions[vb_id].failover.to_document()
        try:
            await self.store.process.set_failover(vb_id, log)
        except _STORE_ERRORS as error:
            # The next merge writes it; recovery reads it from the log.
            self.log.warning("failover log not yet in LMDB", vb_id=vb_id, reason=str(error))

    def refresh_store(self) -> None:
        """Read the newest store; the frozen layer hides what a merge under way has put there."""
        self._storage.store.refresh()

    def _rotated(self, segment: int) -> None:
        self._spawn(self.merging.merge(segment))

    def _merged(self) -> None:
        self.backpressure.update()
        if self.engine.has_pending:
            self.committer.kick()

    def _pressure_changed(self, pressure: Pressure, why: str) -> None:
        """Writers may go on, or are refused; while they only wait, nothing is to be done."""
        if why:
            self.log.error("writes refused", reason=why)
            self._was_refused = True
        elif pressure is Pressure.ROOM and self._was_refused:
            self.log.info("writes are taken again")
            self._was_refused = False
        if pressure is not Pressure.WAITING:
            for connection in tuple(self.connections):
                connection.writers_may_go_on()

    def _log_full(self, why: str) -> None:
        """The log has no room for a group, or has room again ("")."""
        if why:
            self.engine.refuse_writes("writes are refused until there is room for the server's log")
            self.log.error("log full", reason=why)
        else:
            self.engine.refuse_writes("")
            self.log.info("log has room again")

    @property
    def write_refusal(self) -> str:
        """Why no writes are taken now; "" where that is not so."""
        return self._read_only_why or self.committer.full_why or self.engine.write_refusal

    @property
    def refusal_kind(self) -> str:
        """Which of `meter.REFUSAL_KINDS` it is, "" where writes are taken."""
        if self._read_only_why or self.committer.full_why:
            return "read_only" if self._read_only_why else "log_full"
        return "store_behind" if self.engine.write_refusal else ""

    def _sync_later(self) -> None:
        self.committer.sync_soon()
        self._next_sync = self.loop.call_later(self._settings.sync_interval_s, self._sync_later)

    def _fail(self, error: Exception) -> None:
        """The log or the store cannot be trusted any more: no answer leaves from now on."""
        if self._failure is not None:
            return
        self._failure = error
        self.committer.halt()
        self.is_ready = False
        if isinstance(error, LogWriteError | SyncFailedError):
            self.log.error("server failed", reason=str(error))
        else:
            self.log.failure("server failed", error)
        for connection in tuple(self.connections):
            connection.abort(f"the server failed: {error}")
        self._stopped.set()

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            assert isinstance(error, Exception)
            self._fail(error)

    # -- connections -------------------------------------------------------------------------------

    def session_state(self, peer_host: str, logins: PeerLogins) -> SessionState:
        """Return the state of a new session for a peer."""
        return SessionState(
            engine=self.engine,
            hub=self.hub,
            facts=self,
            authenticator=logins,
            peer_is_loopback=is_loopback(peer_host),
            limits=self.access.limits,
            takes_anonymous=self.access.takes_anonymous,
            faults=self.faults,
            scans=self.scans,
        )

    @property
    def connection_count(self) -> int:
        """How many key-value connections there are, TLS handshakes included."""
        return len(self.connections) + len(self.handshakes)

    def connection_opened(self, connection: ClientConnection) -> None:
        """Keep a connection; where there are too many, a newcomer is closed, or this one."""
        self.connections.add(connection)
        self.connections_total += 1
        self.newcomers.enter(connection, self.connection_count)

    def connection_closed(self, connection: ClientConnection) -> None:
        """Forget a connection."""
        self.connections.discard(connection)
        self.waiting.discard(connection)
        self.newcomers.leave(connection)
        self.receive_buffers.forget(connection)
        self.send_buffers.forget(connection)
        if not self.connections:
            self._all_gone.set()

    def _tick(self) -> None:
        self._next_tick = self.loop.call_later(TICK_S, self._tick)
        now_ns = time.monotonic_ns()
        for connection in tuple(self.connections):
            connection.tick(now_ns)
        self._housekeeping.step("access", lambda: self.access.tick(self.connections))
        self._housekeeping.step("read views", lambda: self.views.tick(now_ns))
        self._housekeeping.step("log limits", lambda: self._limiter.tell(self.log, now_ns / 1e9))

    def session_failed(self, error: Exception) -> None:
        """A session failed, and its connection ends. If it left a change half done, so does the
        node.
        """
        self.meter.session_failures += 1
        self.log.failure("session failed", error)
        if broken := self.engine.broken_invariant():
            self._fail(RuntimeError(f"{broken}, because of {error!r}"))

    def log_notes(
        self, connection: ClientConnection, notes: list[tuple[str, dict[str, object]]]
    ) -> None:
        """Log what a session noted, and count it."""
        for event, fields in notes:
            self.meter.noted(event, fields)
            if event == "denied":
                self.access.denied(connection.peer, fields)
            self.log_refusal(event, connection.peer_host, peer=connection.peer, **fields)

    def log_refusal(self, event: str, peer_host: str, **fields: object) -> None:
        """Log that somebody was refused something; at a bounded rate per kind and host."""
        left_out = self._limiter.admit(event, peer_host, time.monotonic())
        if left_out is None:
            self.meter.suppressed_log_lines += 1
            return
        if left_out:
            fields["left_out_before"] = left_out
        self.log.info(event, **{"peer": peer_host, **fields})

    def users_changed(self) -> None:
        """Let open connections know at once what their users may do now."""
        self.access.apply_rights(self.connections)

    def reload(self) -> None:
        """Read users and certificates again now (SIGHUP)."""
        self.access.tick(self.connections)
        self.access.reload_certificates(always=True)

    # -- what sessions and the admin API ask -------------------------------------------------------

    def bucket_config(self) -> bytes:
        """Return the bucket's cluster configuration as JSON."""
        return self._bucket_config

    def global_config(self) -> bytes:
        """Return the node's cluster configuration without a bucket."""
        return self._global_config

    def config_version(self) -> tuple[int, int]:
        """Return (revEpoch, rev)."""
        return self._map.rev_epoch, self._map.rev

    def stats(self, group: bytes) -> list[tuple[str, str]] | None:
        """Return the statistics of a group."""
        return stats(self, group)

    def settings_shown(self) -> dict[str, Any]:
        """Return the settings as users write them."""
        return shown(self._settings)

    @property
    def uptime_s(self) -> int:
        """Seconds since the node was made."""
        return int(time.monotonic() - self._started_s)

    @property
    def now_s(self) -> int:
        """Unix time."""
        return int(time.time())

    def status(self) -> dict[str, Any]:
        """Return what `dcpctl status` and the admin API show."""
        return status_document(self)

    def metrics(self, *, by_vbucket: bool) -> bytes:
        """Return the metrics as Prometheus reads them."""
        if self._metrics_page is None:
            from dcp.server.report.metrics import page

            self._metrics_page = page
        return self._metrics_page(self, by_vbucket=by_vbucket)
