"""The node: wires the parts of a server, starts them, and stops them in order.

Start: lock the folder, open the store, replay the log's tail, begin a new segment, make new
versions if the last stop may have lost what somebody saw, listen. If the disk has no room for the
first writes, the node serves reads and tries again until there is room.
Stop: refuse new work, commit and answer what is pending, write the clean mark.

An unexpected exception in the commit path or a background task ends the process with its reason;
the next start recovers. In a session it ends that connection. In housekeeping
(dcp.server.observe.housekeeping) it is logged and counted, and the task goes on.

The parts do not know the node: each is given what it uses, and only dcp.server.main imports this.

Invariants
- LMDB is written by this process only before the store process starts and after it has ended;
- the clean mark is on disk only while no node runs on the folder;
- a stop ends within STOP_S, even if a disk or a client does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from dcp.core.floors import FloorCycle
from dcp.core.groups import GroupCycle
from dcp.core.store_schedule import MergeCycle
from dcp.server.access.access import Access
from dcp.server.access.users import FIRST_ADMIN, Users, add_first_admin
from dcp.server.access.users_file import UsersFileError
from dcp.server.admin.node_view import AdminParts, ConsoleParts
from dcp.server.config.settings import Settings
from dcp.server.config.sources import LiveSettings, plain_host_of
from dcp.server.files.kept_twice import is_kept
from dcp.server.listeners import Listeners, admin_crowd
from dcp.server.net.after_commit import AfterCommit
from dcp.server.net.cluster_config import ClusterConfig, Ports
from dcp.server.net.connection import ConnectionParts
from dcp.server.net.connections import Connections
from dcp.server.net.cut_timer import CutTimer
from dcp.server.net.sessions import Sessions
from dcp.server.net.ticks import Upkeep
from dcp.server.observe.about import About
from dcp.server.observe.event_log import EventLog, MembershipOverError, RefusalLog, event_of
from dcp.server.observe.housekeeping import BackgroundWork, Housekeeping, Tasks
from dcp.server.observe.meter import Meter
from dcp.server.observe.tracing import Tracing
from dcp.server.operate.backup_reports import Backups
from dcp.server.operate.collection_changes import Collections
from dcp.server.operate.consumer_desk import ConsumerDesk
from dcp.server.operate.document_desk import Documents
from dcp.server.operate.live_parts import LiveParts
from dcp.server.operate.operations import Operations
from dcp.server.operate.partition_dump import Dumps
from dcp.server.report.console_view import ConsoleView
from dcp.server.report.consumer_watch import ChangeAges
from dcp.server.report.metric_sources import ClusterSources, MetricSources
from dcp.server.report.sampler import Sampler
from dcp.server.report.stats import ServerFacts, Stats
from dcp.server.storage.closed_times import ClosedTimes
from dcp.server.storage.committer import Committer
from dcp.server.storage.compaction_schedule import Compaction
from dcp.server.storage.expiry_schedule import expire_when_due
from dcp.server.storage.failover_logs import FailoverLogs
from dcp.server.storage.folder import CLUSTER_FILE
from dcp.server.storage.health import Backpressure, Health
from dcp.server.storage.log_ahead import LogAhead
from dcp.server.storage.merging import Merging
from dcp.server.storage.opening import Storage
from dcp.server.storage.process.loading import Loading
from dcp.server.storage.process.log_mending import LogMending
from dcp.server.storage.process.scrubbing import Scrubbing
from dcp.server.storage.process.store_process import StoreProcess
from dcp.server.storage.process.store_queue import StoreQueue, StoreSupervisor
from dcp.server.storage.waiters import CommitWaiters
from dcp.session.answers.long_requests import LongQueue
from dcp.session.faults import FaultTable
from dcp.session.kv.prefix_counts import PrefixCounts
from dcp.session.kv.range_scans import RangeScans
from dcp.session.state import SessionParts
from dcp.stream.hub import StreamHub
from vbucket.engine.documents.expiry import Pager
from vbucket.engine.engine import Engine
from vbucket.engine.read_view import Views
from vbucket.log.device import LogWriteError, SyncFailedError
from vbucket.log.record import LogDamagedError
from vbucket.store.records import STORE_FORMAT_VERSION, kept_segments

if TYPE_CHECKING:
    from dcp.server.admin.probes_at_start import ProbesAtStart
    from dcp.server.cluster.cluster_file import ClusterFile
    from dcp.server.cluster.joining.becoming_member import NewMember
    from dcp.server.cluster.joining.enrolment import EnrolmentGate
    from dcp.server.cluster.meta_access import MetaAccess
    from dcp.server.cluster.operators.cluster_operations import ClusterOperations
    from dcp.server.cluster.replicated_node import ReplicatedNode
    from dcp.server.operate.cluster_reports import ClusterBrief

STOP_S: Final = 8.0
"""Time for a stop, shared by its steps. The command ends the process a little later."""
LISTENERS_STOP_S: Final = 2.5
DRAIN_S: Final = 4.0
"""Time for clients to read their last answers."""
ROOM_RETRY_S: Final = 2.0
"""How often a node that started on a full disk tries to make its first writes."""


class WriteParts(NamedTuple):
    """What changes, commits, merges and compacts."""

    groups: GroupCycle
    commits: CommitWaiters
    committer: Committer
    merging: Merging
    compaction: Compaction
    scrubbing: Scrubbing
    backpressure: Backpressure
    loading: Loading
    pager: Pager


class ServingParts(NamedTuple):
    """What clients and operators reach, and what looks after it while it is open."""

    listeners: Listeners
    upkeep: Upkeep
    sampler: Sampler


class Ending:
    """Whether the server ends, why, and until when."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.is_over = asyncio.Event()
        self.stopping: asyncio.Task[None] | None = None
        self.leave_s = 0.0
        """How long a stop may take to hand partitions over, before its own steps."""
        self.wants_restart = False
        """Whether the node stops to start again in this process, as a member of a cluster."""
        self._deadline_s = 0.0
        """Monotonic."""

    def begin(self) -> None:
        """The steps of a stop begin: STOP_S are left."""
        self._deadline_s = time.monotonic() + STOP_S

    def left_s(self, most_s: float) -> float:
        """Return how long a step of the stop may take."""
        return max(0.1, min(most_s, self._deadline_s - time.monotonic()))


class Node:
    """See the module. The public attributes are the parts; all exist once `start` has returned."""

    engine: Engine
    health: Health
    views: Views
    write: WriteParts
    serving: ServingParts

    def __init__(
        self,
        settings: Settings,
        users: Users,
        log: EventLog,
        *,
        accepts_log_loss: bool = False,
        room_retry_s: float = ROOM_RETRY_S,
        open_meta: Callable[[ClusterFile], MetaAccess] | None = None,
    ) -> None:
        """Load the files of TLS and the metrics token, if they are set; nothing else is opened.
        `open_meta` gives another metadata store than the one that the folder names.

        Raises TlsError, TokenError, TracingMissingError.
        """
        self._settings = settings
        self._users = users
        self._log = log
        self._accepts_log_loss = accepts_log_loss
        self._room_retry_s = room_retry_s
        self._open_meta = open_meta
        self.replicated: ReplicatedNode | None = None
        """The replication of a node of a cluster; None: the node is alone."""
        self.about = About(LiveSettings(settings))
        self.ports = Ports()
        self.meter = Meter(settings.slow_after_s)
        self.access = Access(settings, users, log)
        self.connections = Connections(settings)
        self._hub: StreamHub = StreamHub()
        self.meter.tracing = tracing_of(settings, self._hub)
        self._refusals = RefusalLog(log)
        self._background = BackgroundWork(Tasks(self._fail), Housekeeping(self.meter, log))
        self._store_queue = StoreQueue(StoreSupervisor(self._start_store_process), log)
        self.ending = Ending()
        self._storage: Storage
        self._config: ClusterConfig
        self._enrolment_gate: EnrolmentGate | None = None
        """Made with the first request about a cluster."""

    # -- start -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the folder, recover, and listen.

        Raises FolderError, PortTakenError, LogDamagedError, UnknownFormatError,
        StoreDamagedError, FirstAdminError, OSError.
        """
        open_storage = partial(
            Storage, self.about.data_dir, self._settings, accepts_log_loss=self._accepts_log_loss
        )
        if not self._is_of_cluster():
            self._storage = open_storage()
            await self._start(None)
            return
        from dcp.server.admin.probes_at_start import ProbesAtStart

        # In a thread: recovery may take long, and orchestrators ask whether the process lives.
        admin_host = plain_host_of(self._settings)
        async with ProbesAtStart(admin_host, self._settings.admin_port) as probes:
            self._storage = await self._opened_of_member(open_storage)
            await self._start(probes)

    async def _opened_of_member(self, open_storage: Callable[..., Storage]) -> Storage:
        """Open the folder of a member. A log that cannot be read is cut there, if the other copies
        do without what it had. Raises as `start`.
        """
        try:
            return await asyncio.to_thread(open_storage)
        except LogDamagedError as error:
            from dcp.server.cluster.repair.damaged_log import until_log_may_be_given_up

            await until_log_may_be_given_up(
                self.about.data_dir, self._settings, error, self._log, self._open_meta
            )
        reopen = partial(open_storage, accepts_log_loss=True, begins_versions=False)
        return await asyncio.to_thread(reopen)

    async def _start(self, probes: ProbesAtStart | None) -> None:
        """Start on the recovered folder."""
        self._storage.tell(self._log)
        try:
            with contextlib.suppress(UsersFileError):  # a full disk: the next start tries it again
                self._users.seal_file()
            self._add_first_admin()
            membership = await self._open_cluster()
        except BaseException:
            self._storage.close(is_clean=False)
            raise
        self._wire_storage(membership)
        self._wire_ports()
        self._follow_settings()
        try:
            await self._begin_writing()
            listener = None if probes is None else await probes.hand_over()
            await self.serving.listeners.start(listener)
            self._enter_cluster()
            await self.serving.listeners.serve()
        except BaseException:
            await self.stop()
            raise
        self.health.is_ready = True
        self.serving.upkeep.start()
        self.serving.sampler.start()
        if self.health.read_only_why:
            self._background.tasks.begin(self._begin_when_there_is_room())

    def _is_of_cluster(self) -> bool:
        """Whether this is a member, or becomes one now by its settings."""
        return self._settings.cluster != "none" or is_kept(self.about.data_dir / CLUSTER_FILE)

    def _add_first_admin(self) -> None:
        """Add the first user if there is none, before the node becomes a member: then the users are
        those of the cluster.
        """
        path = self._settings.admin_password_file
        if path is None or is_kept(self.about.data_dir / CLUSTER_FILE):
            return
        if add_first_admin(self._users, path):
            self._log.info("first user added", user=FIRST_ADMIN, password_file=str(path))

    def _enter_cluster(self) -> None:
        """Tell clients the map, and take part in the cluster if this is a node of one."""
        replicated = self.replicated
        if replicated is None:
            self._config.publish(self.ports)
            return
        from dcp.server.cluster.joining.becoming_member import own_record
        from dcp.server.cluster.joining.founding import found
        from dcp.server.cluster.repair.peer_repair import PeerRepair

        repair = PeerRepair(
            self.engine, replicated, self.access.link_tls, self.write.scrubbing, self._log
        )
        self._background.repeat("repair", repair.run)
        replicated.show_first_map(own_record(replicated, self._settings, self.ports))
        replicated.start(self.health.read_only_why)
        nodes = self._settings.cluster_nodes
        founding = found(replicated, self.about.data_dir, nodes, self._log)
        self._background.tasks.begin(founding)

    async def _open_cluster(self) -> tuple[ClusterFile, MetaAccess] | None:
        """Open the metadata store, if the folder is one of a cluster's node, or becomes it by the
        settings. Raises FolderError, PortTakenError.
        """
        if not self._is_of_cluster():
            return None
        from dcp.server.cluster.joining.becoming_member import entered

        identity, access = await entered(self._newcomer(), self._open_meta)
        if access.failed is not None:
            access.failed.add_done_callback(self._store_failed)
        return identity, access

    def _store_failed(self, failed: asyncio.Future[str]) -> None:
        if not failed.cancelled():
            self._fail(RuntimeError(failed.result()))

    def _newcomer(self) -> NewMember:
        from dcp.server.cluster.joining.becoming_member import NewMember

        storage = self._storage
        return NewMember(
            storage.engine, storage.node_id, self.about.data_dir, self._settings, self.ports,
            self._users, self.access, self._log,
        )  # fmt: skip

    def _cluster_operations(self) -> ClusterOperations:
        from dcp.server.cluster.operators.cluster_operations import ClusterOperations

        if self._enrolment_gate is None:
            from dcp.server.cluster.joining.enrolment import EnrolmentGate

            self._enrolment_gate = EnrolmentGate(
                self.engine, self.health, self._users, self.write.commits
            )
        return ClusterOperations(
            self._newcomer(), self.replicated, self._enrolment_gate, self._restart_soon
        )

    def _restart_soon(self) -> None:
        """Stop after the answer has left, and start again in this process. A node that stops
        already does not: cluster.json is on disk, and the next start is that of a member.
        """
        gate = self._enrolment_gate
        assert gate is not None, "it was entered"
        if gate.enrolment.restarts:
            self.ending.wants_restart = True
            self._background.tasks.begin(self.stop())

    async def _begin_writing(self) -> None:
        """Make the first writes and start everything that writes, if the disk has room for it."""
        why = self._storage.begin()
        self.health.read_only(why)
        if why:
            return
        await self._store_queue.start()
        self.write.committer.start()
        if self.replicated is None:
            self.write.loading.start()
        self._merge_what_is_replayed()
        settings = self._settings
        if settings.durability == "interval":
            self.write.committer.sync_every(settings.sync_interval_s)
        if settings.expiry_interval_s:
            expire = partial(
                expire_when_due, self.write.pager, self.engine, self.write.commits,
                self._refusals, interval_s=settings.expiry_interval_s,
            )  # fmt: skip
            self._background.repeat_writing("expiry", expire)
        self._background.repeat_writing("scrub", self.write.scrubbing.run)
        if settings.compact_interval_s:
            self._background.repeat_writing("compaction", self.write.compaction.run)

    async def _begin_when_there_is_room(self) -> None:
        while self.health.read_only_why:
            await asyncio.sleep(self._room_retry_s)
            await self._begin_writing()
        if self.replicated is not None:
            self.replicated.start()

    def _merge_what_is_replayed(self) -> None:
        """Merge if a lot was replayed, or if the store has an older format: a merge upgrades it."""
        format_version = self._storage.node.format_version
        if self.engine.keyspace.memtables.wants_freeze or format_version < STORE_FORMAT_VERSION:
            self.write.groups.begin_merge()
        self.write.committer.kick()
        self.write.backpressure.update()

    async def _start_store_process(self) -> StoreProcess:
        return await StoreProcess.start(
            self.about.data_dir,
            self._storage.folder.lock_fd,
            map_size_bytes=self._settings.map_size_bytes,
            silence_s=self._settings.store_silence_s,
        )

    # -- wiring ------------------------------------------------------------------------------------

    def _wire_storage(self, membership: tuple[ClusterFile, MetaAccess] | None) -> None:
        """Create what changes, commits, merges and compacts."""
        settings, storage, log = self._settings, self._storage, self._log
        tasks = self._background.tasks
        self.engine = engine = storage.engine
        self.health = health = Health(
            engine, log, let_writers_go_on=self.connections.writers_may_go_on
        )
        self.views = Views(engine, storage.store)
        groups = GroupCycle(engine, self._hub, syncs_groups=settings.durability == "commit")
        pager = Pager(engine, storage.store)
        commits = CommitWaiters(engine, self._kick)
        backpressure = Backpressure(engine, health, settings.write_wait_s)
        merging = Merging(
            engine, MergeCycle(engine, kept_segments(storage.store.quarantine())), groups,
            storage.device, self._store_queue, commits, backpressure, self.meter.merges, log,
            LogMending(storage.folder.log_path, storage.writer.kept),
        )  # fmt: skip
        compaction = Compaction(
            engine, FloorCycle(engine, storage.store, self._hub), self._hub, commits, merging,
            self._store_queue, health, self.meter, log, settings,
        )  # fmt: skip
        scrubbing = Scrubbing(
            self.about.data_dir, self._store_queue, merging, storage.store, storage.writer,
            self.access.audit, log, settings.scrub_period_s,
        )  # fmt: skip
        scrubbing.put_back(storage.env.mend())
        scrubbing.take_files(storage.mended)
        loading = Loading(
            engine, storage.store, commits, merging, self._store_queue, self._hub, tasks,
            self.meter, log, release=self.connections.loaded,
        )  # fmt: skip
        after_commit = AfterCommit(
            self.meter, commits, health, backpressure, self.connections,
            FailoverLogs(engine, self._store_queue, tasks, log), merging, tasks,
        )  # fmt: skip
        self._config = ClusterConfig(
            settings.host, storage.node_id, settings.bucket, engine.num_vbuckets
        )
        if membership is not None:
            after_commit.follow(self._wire_cluster(*membership, after_commit, groups, scrubbing))
        committer = Committer(
            groups, storage.writer, after_commit,
            LogAhead(storage.device, finds_room=settings.durability == "commit"),
            sync_seconds=self.meter.sync_seconds, pace=merging,
        )  # fmt: skip
        self.write = WriteParts(
            groups, commits, committer, merging, compaction, scrubbing, backpressure, loading,
            pager,
        )  # fmt: skip

    def _wire_cluster(
        self,
        identity: ClusterFile,
        access: MetaAccess,
        after_commit: AfterCommit,
        groups: GroupCycle,
        scrubbing: Scrubbing,
    ) -> ReplicatedNode:
        """Create the replication of a cluster's node."""
        from dcp.server.cluster.joining.becoming_member import replicated_node
        from dcp.server.cluster.joining.link_try import LinkTries
        from dcp.server.cluster.replicated_node import LEAVE_MAX_S, ServerParts

        self.ending.leave_s = LEAVE_MAX_S
        storage, tasks = self._storage, self._background.tasks
        parts = ServerParts(
            self.engine, storage.store, self._hub, groups, self.connections, self._config,
            self._users, self.health, self.meter.cluster, self.access.link_tls, scrubbing,
            tasks, self._log, self.about.data_dir,
            kick=self._kick, publish=after_commit.tell,
        )  # fmt: skip
        self.replicated = replicated_node(parts, storage.node_id, identity, self._settings, access)
        self._users.let_cluster_in(identity.secrets)
        tries = LinkTries(access, self.access.link_tls, tasks)
        self.access.logins.nodes.open(
            self._settings.cluster_tls, self.replicated.hosts, tries.dial_back
        )
        return self.replicated

    def _wire_ports(self) -> None:
        """Create what clients and operators use."""
        settings, engine, log, faults = self._settings, self.engine, self._log, FaultTable()
        write = self.write
        access, connections, health, meter = self.access, self.connections, self.health, self.meter
        config, replicated = self._config, self.replicated
        prefixes = PrefixCounts()
        stats = Stats(
            self.about, self.ports, engine, self._hub, connections, write.merging, write.scrubbing,
            health, prefixes,
        )  # fmt: skip
        scans = RangeScans(self.views, secrets.SystemRandom())
        sessions = Sessions(
            SessionParts(
                engine, self._hub, ServerFacts(config, stats), access.limits, faults, prefixes,
                LongQueue(), scans, None if replicated is None else replicated.port,
                replicated is not None and replicated.acknowledges_as_master,
            ),
            access, write.scrubbing, meter, log, self._refusals, self._background.tasks,
        )  # fmt: skip
        connection_parts = ConnectionParts(
            engine, write.committer, connections, access, sessions, meter, self._refusals,
            replicated,
        )  # fmt: skip
        crowd = admin_crowd(settings)
        sources = MetricSources(
            self.about, meter, health, engine, write.merging, write.scrubbing, write.pager,
            self.views, self._hub,
            connections, access, crowd, faults, self._refusals, ChangeAges(),
            self._cluster_sources(),
        )  # fmt: skip
        operations = Operations(
            engine, connections, write.merging, write.compaction, write.commits, faults,
            write.groups, meter, log,
            copies=None if replicated is None else replicated.branches,
        )  # fmt: skip
        sampler = Sampler(sources, self._background.housekeeping)
        documents = Documents(engine, self.views, write.commits, write.merging, sessions)
        is_test_mode = settings.test_mode == "on"
        console = ConsoleParts(
            ConsoleView(sources, sampler), engine, sampler, documents,
            is_test_mode, allows_faults=access.limits.allows_faults, brief=self._brief(sampler),
        )  # fmt: skip
        admin_parts = AdminParts(
            live=self.about.live, log=log, access=access,
            users=self._users, meter=meter, refusals=self._refusals, health=health,
            config=config, operations=operations,
            dumps=Dumps(engine, self.views, write.commits),
            collections=Collections(
                engine, write.commits, log,
                share=None if replicated is None else replicated.change_manifest,
            ),
            consumers=ConsumerDesk(
                engine, self.views, write.compaction.kept, write.commits, log
            ),
            backups=Backups(self.about.data_dir, log), cluster=self._cluster_operations,
            scrubbing=write.scrubbing,
            status=stats.status, metrics=partial(_metrics_page, sources),
            console=console, users_changed=partial(connections.apply_rights, access),
        )  # fmt: skip
        listeners = Listeners(
            settings, self.ports, access.tls_context, connection_parts, admin_parts, crowd, log
        )
        upkeep = Upkeep(
            connections, access, self.views, self._refusals, self._background.housekeeping,
            self._cut_timer(),
        )  # fmt: skip
        self.serving = ServingParts(listeners, upkeep, sampler)

    def _cut_timer(self) -> CutTimer:
        tasks = self._background.tasks
        closed = ClosedTimes(self.engine, self.about.data_dir, tasks, self._log)
        if self.replicated is None:
            return CutTimer(self.engine, self._hub, closed)
        from dcp.server.cluster.cut_rounds import CutRounds

        return CutRounds(
            self.replicated,
            self.engine,
            self._hub,
            closed,
            self.access.link_tls,
            tasks,
            self._log,
        )

    def _follow_settings(self) -> None:
        """Have the parts follow the settings that can change while the node runs."""
        LiveParts(
            self.about.live, self._log, self.meter, self.access, self.connections, self.engine,
            self.write.compaction, self.write.backpressure, self.write.scrubbing,
        ).follow()  # fmt: skip
        if self.replicated is not None:
            rate = self.replicated.core.master.pace.rate
            self.about.live.follow("rebalance_rate", rate.limit)

    def _brief(self, sampler: Sampler) -> Callable[[], ClusterBrief] | None:
        if self.replicated is None:
            return None
        from dcp.server.cluster.operators.cluster_figures import cluster_brief, measure_always

        self._background.repeat("figures", partial(measure_always, self.replicated, sampler))
        return partial(cluster_brief, self.replicated)

    def _cluster_sources(self) -> ClusterSources | None:
        replicated = self.replicated
        if replicated is None:
            return None
        seconds = replicated.access.meta.seconds
        return ClusterSources(replicated.session, replicated.core, seconds)

    def _kick(self, source: object = None) -> None:
        """Commit what is pending, which `source` may have brought; for parts that are created
        before the committer.
        """
        self.write.committer.kick(source)

    # -- while it runs -----------------------------------------------------------------------------

    def reload(self) -> None:
        """Read users and certificates again now (SIGHUP)."""
        self.access.tick()
        self.connections.apply_rights(self.access)
        self.access.reload_certificates(always=True)

    async def run_until_stopped(self) -> None:
        """Return after `stop`, or raise the failure that ended the server."""
        await self.ending.is_over.wait()
        if self.ending.failure is not None:
            raise self.ending.failure

    def _fail(self, error: Exception) -> None:
        """End the server because of a failure. No answer is sent from now on."""
        if self.ending.failure is not None:
            return
        self.ending.failure = error
        self.write.committer.halt()
        self.health.is_ready = False
        if isinstance(error, LogWriteError | SyncFailedError | MembershipOverError):
            self._log.error(event_of(error), reason=str(error))
        else:
            self._log.failure("server failed", error)
        self.connections.abort(f"the server failed: {error}")
        self.ending.is_over.set()

    # -- stop --------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Answer what was received, write the clean mark, close.

        Raises the error that the log or the store ended with. Further calls wait for the same stop.
        """
        if self.ending.stopping is None:
            self.ending.stopping = asyncio.get_running_loop().create_task(self._stop())
        await asyncio.shield(self.ending.stopping)

    async def _stop(self) -> None:
        try:
            await self._stop_in_order()
        finally:
            self.ending.is_over.set()

    async def _stop_in_order(self) -> None:
        self.health.is_ready = False
        self.engine.keyspace.holds_groups = False
        if self._enrolment_gate is not None:
            self._enrolment_gate.stopped()
        if self.replicated is not None and self.ending.failure is None:
            await self.replicated.leave()
        self.ending.begin()
        if self.replicated is not None:
            self.replicated.stop()
        for part in (self.serving.upkeep, self.serving.sampler, self.write.backpressure):
            part.stop()
        self._background.end_writing()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LISTENERS_STOP_S):
                await self.serving.listeners.stop()
        self.connections.finish("the server stops")
        if self.ending.failure is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.ending.left_s(DRAIN_S)):
                    await self._drain()
        self.connections.abort("the server stops")
        try:
            await self._stop_storage()
        finally:
            await self.access.close()
            if self.meter.tracing is not None:
                await asyncio.to_thread(self.meter.tracing.close)

    async def _drain(self) -> None:
        """Commit what is pending, and let clients read their answers."""
        await self.write.committer.drain()
        if not self.write.committer.room.full_why:
            await self.connections.until_all_gone()

    async def _stop_storage(self) -> None:
        await self._background.tasks.stop()
        if self.replicated is not None:
            await self.replicated.access.close()
        await self.write.merging.stop(self.ending.left_s(1.0))
        is_clean = self.ending.failure is None
        if not await self._store_queue.stop():
            is_clean = False
            self._log.error("the store process does not end: its disk does not answer")
        try:
            self.write.committer.stop()
        except SyncFailedError:
            is_clean = False
            raise
        finally:
            # Without the mark the next start treats this as a crash. That loses nothing that the
            # durability promises.
            if why := self._storage.close(is_clean=is_clean):
                self._log.error("no clean mark", reason=why)


def tracing_of(settings: Settings, hub: StreamHub) -> Tracing | None:
    """Return what makes spans; None: nobody asked for them. Raises TracingMissingError."""
    if settings.otel == "off":
        return None
    instance = settings.node_name or f"{settings.advertise_host or settings.host}:{settings.port}"
    return Tracing(hub, settings.otel_slow_s, instance=instance)


def _metrics_page(sources: MetricSources, *, by_vbucket: bool, is_openmetrics: bool) -> bytes:
    """Return the metrics. The import takes 60 ms, and not every server is asked for them."""
    from dcp.server.report.metrics import page

    return page(sources, by_vbucket=by_vbucket, is_openmetrics=is_openmetrics)
