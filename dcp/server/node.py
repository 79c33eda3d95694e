"""The node: one folder of data, one engine, its log, its store process, its listeners.

This is where everything is wired. Start-up: lock the folder, open the store, replay the log's tail,
begin a new segment, make new versions if the last stop may have lost what somebody saw, listen.
Stop: no new work, what is pending is committed and answered, the clean mark is written.

Invariants
- LMDB is written by this process only before the store process starts and after it has ended;
- a merge covers exactly the sealed segments; they are deleted after the engine has taken note;
- the clean mark is on disk only while no node runs on the folder.
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
from dcp.server.access import Access
from dcp.server.admin.view import CollectionsView
from dcp.server.collections import Collections
from dcp.server.committer import Committer
from dcp.server.compaction import Compaction
from dcp.server.config import Settings, is_loopback, shown
from dcp.server.connection import ClientConnection
from dcp.server.dump import Dumps
from dcp.server.expiry import expire_when_due
from dcp.server.listeners import Listeners
from dcp.server.log_limiter import LogLimiter
from dcp.server.logging_setup import EventLog
from dcp.server.logins import PeerLogins
from dcp.server.merging import merge_patiently
from dcp.server.meter import Meter
from dcp.server.operations import Operations
from dcp.server.stats import stats, status_document
from dcp.server.storage import Storage
from dcp.server.store_process import StoreProcess, StoreProcessDiedError
from dcp.server.users import Users
from dcp.server.waiters import CommitWaiters
from dcp.session.faults import FaultTable
from dcp.session.range_scans import RangeScans
from dcp.session.state import SessionState
from dcp.stream.hub import StreamHub
from dcp.wire.message import EndReason
from dcp.wire.status import Status
from vbucket.device import SyncFailedError
from vbucket.device_files import FileLogDevice
from vbucket.engine import Engine
from vbucket.expiry import Pager
from vbucket.group import Group
from vbucket.ids import NUM_VBUCKETS
from vbucket.kvenv import StoreDamagedError, StoreFailedError, StoreFullError
from vbucket.partition_map import PartitionMap, bucket_config, global_config
from vbucket.store import STORE_FORMAT_VERSION
from vbucket.view import Views

TICK_S: Final = 0.25
"""How often connections are looked at for NOOP, idleness and slow handshakes."""
DROP_SLICE_VBUCKETS: Final = 8
"""Partitions whose frozen layer goes in one turn of the loop (docs/performance.md)."""
DRAIN_S: Final = 5.0
FORMAT_WAIT_S: Final = 0.1


class Node:
    """See the module."""

    version = __version__

    def __init__(self, settings: Settings, users: Users, log: EventLog) -> None:
        self._settings = settings
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
        self.connections_total: int = 0
        self.merge_count: int = 0
        self.merge_trouble: str = ""
        """Why the merge under way is put off; "" where it is not."""
        self.pid = os.getpid()
        self.is_ready: bool = False
        self._started_ns = time.monotonic_ns()
        self._log = log
        self._limiter = LogLimiter()
        self._metrics_page: Callable[..., bytes] | None = None
        self.access = Access(settings, users, log)
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
        self._store_process: StoreProcess | None = None
        self._deleting: asyncio.Future[None] | None = None
        """Segments that a merge made needless: removing 64 MiB takes milliseconds."""
        self._renewing = asyncio.Lock()
        self._merge_ended = asyncio.Condition()
        self.compaction = Compaction(self, settings)
        self.listeners = Listeners(self, settings)
        self.engine: Engine
        self.committer: Committer
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
            self._store_process = await self._start_store_process()
            self._merge_what_is_replayed()
            await self._listen()
        except BaseException:
            await self.stop()
            raise
        self.is_ready = True
        self._tick()
        if self.durability == "interval":
            self._sync_later()
        if self._settings.expiry_interval_s:
            expiring = expire_when_due(self, self.pager, self._settings.expiry_interval_s)
            self._expiring = self._spawn(expiring)
        if self._settings.compact_interval_s:
            self._compacting = self._spawn(self.compaction.run())

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
        for timer in (self._next_tick, self._next_sync):
            if timer is not None:
                timer.cancel()
        for task in (self._expiring, self._compacting):
            if task is not None:
                task.cancel()
        await self.listeners.stop()
        for connection in tuple(self.connections):
            connection.finish("the server stops")
        if self._failure is None:
            await self._drain()
        for connection in tuple(self.connections):
            connection.abort("the server stops")
        try:
            await self._stop_storage()
        finally:
            await asyncio.to_thread(self.access.audit.close)

    async def _drain(self) -> None:
        await self.committer.drain()
        if self.connections and not self.committer.full_why:
            self._all_gone.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_gone.wait(), DRAIN_S)

    async def _stop_storage(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._deleting is not None:
            await asyncio.wait([self._deleting])
        if self._store_process is not None:
            await self._store_process.stop()
        is_clean = self._failure is None
        try:
            self.committer.stop()
        except SyncFailedError:
            is_clean = False
            raise
        finally:
            # Without the mark the next start takes it for a crash, which loses nothing that was
            # promised.
            if why := self._storage.close(is_clean=is_clean):
                self._log.error("no clean mark", reason=why)

    # -- start-up ----------------------------------------------------------------------------------

    def _recover(self) -> None:
        self._storage = storage = Storage(self.data_dir, self._settings)
        self.engine = storage.engine
        if storage.torn is not None:
            self._log.warning("torn tail cut from the log", **storage.torn._asdict())
        if storage.new_versions:
            self._log.warning("new versions after an unclean stop", vbuckets=storage.new_versions)
        self.pager = Pager(self.engine, storage.store)
        self.views = Views(self.engine, storage.store)
        self.scans = RangeScans(self.views, lambda: secrets.token_bytes(16))
        self.collections = Collections(self.engine, self.until_group_committed, self.log_event)
        self.committer = Committer(
            self.engine,
            storage.device,
            syncs_groups=self.durability == "commit",
            on_commit=self._committed,
            on_rotated=self._rotated,
            on_full=self._log_full,
            on_failure=self._fail,
            sync_seconds=self.meter.sync_seconds,
        )
        self.committer.start()

    async def _start_store_process(self) -> StoreProcess:
        return await StoreProcess.start(
            self.data_dir,
            self._storage.folder.lock_fd,
            map_size_bytes=self._settings.map_size_bytes,
        )

    def _merge_what_is_replayed(self) -> None:
        """A merge also brings a store of an older format up to this one."""
        format_version = self._storage.node.format_version
        if self.engine.wants_freeze or format_version < STORE_FORMAT_VERSION:
            self.engine.freeze()
            self._rotated(self._storage.device.rotate())

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

    def _committed(self, group: Group) -> None:
        self.meter.groups += 1
        self.meter.changes += group.entries
        for vb_id in group.branched:
            self.hub.branched(vb_id, self.end_reasons.pop(vb_id, EndReason.ROLLBACK))
            self._spawn(self._keep_failover_log(vb_id))
        for vb_id in group.restated:
            self.hub.restated(vb_id)
        self.hub.committed(group.high_seqnos)
        self._waiters.committed(group.number)
        waiting = self.waiting
        if waiting:
            self.waiting = {
                connection for connection in waiting if connection.release(group.number)
            } | (self.waiting - waiting)

    async def _keep_failover_log(self, vb_id: int) -> None:
        """Write a new failover log to LMDB at once; the log segment has it already."""
        assert self._store_process is not None
        log = self.engine.partitions[vb_id].failover.to_document()
        try:
            await self._store_process.set_failover(vb_id, log)
        except (
            StoreProcessDiedError, StoreDamagedError, StoreFullError, StoreFailedError,
        ) as error:  # fmt: skip
            # The next merge writes it; recovery reads it from the log.
            self._log.warning("failover log not yet in LMDB", vb_id=vb_id, reason=str(error))

    @property
    def store_process(self) -> StoreProcess:
        """The store process that runs now."""
        assert self._store_process is not None, "the node was started"
        return self._store_process

    async def renew_store_process(self, failed: StoreProcess) -> None:
        """Replace a store process that died, or in which a commit failed: LMDB goes no further in
        it. Whoever notices first does it.
        """
        async with self._renewing:
            if self._store_process is failed:
                await failed.stop()
                self._store_process = await self._start_store_process()

    def refresh_store(self) -> None:
        """Read the store as it is now. What a merge under way may have put there already, and the
        engine does not know of, is behind the frozen layer until it does.
        """
        self._storage.store.refresh()

    async def wait_for_merge(self, timeout_s: float) -> None:
        """Return at the end of the next merge, or after a while."""
        async with self._merge_ended:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._merge_ended.wait(), timeout_s)

    async def merge_now(self) -> None:
        """Return when all that was applied by now is in the store."""
        group = self.engine.merge_soon()
        while self.engine.merged_group < group:
            self.committer.kick()
            async with self._merge_ended:
                await self._merge_ended.wait()
            if self.engine.merged_group < group:
                self.engine.merge_soon()  # that merge had begun before

    async def until_store_format(self) -> None:
        """Return when the store has this program's format: older programs refuse the folder then,
        and need not understand what is new in its log.
        """
        while self._storage.node.format_version < STORE_FORMAT_VERSION:
            await self.merge_now()
            await self.wait_for_merge(FORMAT_WAIT_S)

    def _rotated(self, segment: int) -> None:
        self._spawn(self._merge(segment))

    async def _merge(self, newest_segment: int) -> None:
        """Merge the sealed segments and let go of what was frozen, in slices."""
        device = self._storage.device
        segments = [segment for segment in device.segments() if segment < newest_segment]
        report = await merge_patiently(self, segments, self._log)
        self.engine.merged(report)
        # Before the last slice: then the next merge may begin, and must not find them any more.
        self._deleting = self.loop.run_in_executor(None, _delete, device, segments)
        await asyncio.shield(self._deleting)
        for first_vb in range(0, NUM_VBUCKETS, DROP_SLICE_VBUCKETS):
            self.engine.drop_frozen(first_vb, first_vb + DROP_SLICE_VBUCKETS)
            await asyncio.sleep(0)
        self.merge_count += 1
        async with self._merge_ended:
            self._merge_ended.notify_all()
        for connection in tuple(self.connections):
            connection.reading_may_change()

    def _log_full(self, why: str) -> None:
        """The log has no room for a group, or has room again ("")."""
        if why:
            self.engine.refuse_writes("writes are refused until there is room for the server's log")
            self._log.error("log full", reason=why)
        else:
            self.engine.refuse_writes("")
            self._log.info("log has room again")

    @property
    def write_refusal(self) -> str:
        """Why no writes are taken now; "" where that is not so."""
        return self.committer.full_why

    def _sync_later(self) -> None:
        self.committer.sync_soon()
        self._next_sync = self.loop.call_later(self._settings.sync_interval_s, self._sync_later)

    def _fail(self, error: Exception) -> None:
        """The log or the store cannot be trusted any more: no answer leaves from now on."""
        self._failure = error
        self.is_ready = False
        self._log.error("server failed", reason=str(error))
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

    def connection_opened(self, connection: ClientConnection) -> None:
        """Keep a connection, unless there are too many."""
        self.connections.add(connection)
        self.connections_total += 1
        if len(self.connections) > self._settings.connections_max:
            connection.abort(
                f"{self._settings.connections_max} connections are open, the limit "
                "(setting connections_max)"
            )

    def connection_closed(self, connection: ClientConnection) -> None:
        """Forget a connection."""
        self.connections.discard(connection)
        self.waiting.discard(connection)
        if not self.connections:
            self._all_gone.set()

    def _tick(self) -> None:
        now_ns = time.monotonic_ns()
        for connection in tuple(self.connections):
            connection.tick(now_ns)
        self.access.tick(self.connections)
        self.views.tick(now_ns)
        for event, peer, lines in self._limiter.drain(now_ns / 1e9):
            self._log.info("log lines left out", about=event, peer=peer, lines=lines)
        self._next_tick = self.loop.call_later(TICK_S, self._tick)

    def log_notes(
        self, connection: ClientConnection, notes: list[tuple[str, dict[str, object]]]
    ) -> None:
        """Log what a session noted, and count it."""
        for event, fields in notes:
            if event == "refused":
                status = fields["status"]
                assert isinstance(status, int)
                self.meter.refusals[Status(status).name] += 1
            elif event == "rollback":
                self.meter.rollbacks[str(fields["kind"])] += 1
            elif event == "fault":
                self.meter.faults += 1
            elif event == "denied":
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
        self._log.info(event, **{"peer": peer_host, **fields})

    def log_event(self, event: str, **fields: object) -> None:
        """Log one event with its fields."""
        self._log.info(event, **fields)

    def log_warning(self, event: str, **fields: object) -> None:
        """Log what an operator should look at."""
        self._log.warning(event, **fields)

    def log_detail(self, event: str, **fields: object) -> None:
        """Log what happens all the time, for whoever looks closely."""
        self._log.debug(event, **fields)

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
        return (time.monotonic_ns() - self._started_ns) // 1_000_000_000

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
            from dcp.server.metrics import page  # takes 60 ms to import, and not all are asked

            self._metrics_page = page
        return self._metrics_page(self, by_vbucket=by_vbucket)


def _delete(device: FileLogDevice, segments: list[int]) -> None:
    for segment in segments:
        device.delete(segment)
