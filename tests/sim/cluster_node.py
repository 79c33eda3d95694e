"""A simulated node of a cluster: SingleNode with the replication core of the product.

    records ──> ClusterSession ──> ReplicationCore <── links to masters, feeds of replicas

What a server's shell does with time, bytes and effects is done here in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from dcp.core.groups import Job, Published, WriteGroup
from dcp.server.cluster.node_map import RaisedLife
from dcp.server.cluster.shared_records import SharedManifest
from dcp.session.answers.held_answers import HeldAnswers
from dcp.stream.producer import Producer
from failover.coordinator.cluster_session import ClusterSession, SessionEffect, StoreDriver
from failover.coordinator.effects import ViewChanged
from failover.coordinator.map_life import NEVER_SENT, MapLife, MapVersion
from failover.coordinator.meta_restore import NodeTestimony, records_of
from failover.coordinator.partition_choices import CoordinatorSettings
from failover.coordinator.record_writer import WriteOutcome
from failover.coordinator.seen_records import SeenPiece, SeenRecords
from failover.coordinator.view import bucket_map
from failover.metadata.metastore import MetaStore
from failover.replication.effects import Dial, PartitionsArrived, ReplicationEffect, StepDue
from failover.replication.link import LinkState, ReplicaLink
from failover.replication.mastership import ReplicationSettings, Service
from failover.replication.messages import FORMAT
from failover.replication.node import NodeTurns, ReplicationCore
from failover.rules.replication_record import ReplicationRecord
from sim.cut_rounds import CutRounds
from sim.facts import CutOffFact, Facts, History, LostFact, Mastership
from sim.moments import NodeWatch, short
from sim.network import Side
from sim.node import Facades, SingleNode
from sim.plan import Plan
from sim.quarantine import keep
from sim.store_client import ROOT
from sim.world import MS, SECOND
from vbucket.engine.partition import BranchRefusedError, Partition, VbState
from vbucket.model.entry import META, key_of, prev_seqno_of, seqno_of
from vbucket.model.ids import draw_vb_uuid
from vbucket.model.manifest import SYSTEM_COLLECTION, is_ahead, missing_events
from vbucket.model.partition_map import MapNode, PartitionMap, bucket_config
from vbucket.model.receipt import CutOff, ElectionLoss

if TYPE_CHECKING:
    from sim.machine import Machine

CLUSTER_TICK_NS = 50 * MS
SEEN_REST_NS = 50 * MS
"""Time between two writes of what the folder has seen (`dcp.server.cluster.seen_file`)."""


NoteRecord = Callable[[int, ReplicationRecord], None]
"""Called with a partition and its new record."""


class ClusterFacades(Facades):
    """What sessions of a cluster's node tell: the map."""

    def __init__(self, node: ClusterNode) -> None:
        self._node = node
        self._config = NEVER_SENT, b""
        """The map that was told last, and its version: all refusals of a batch tell the same."""

    def bucket_config(self) -> bytes:
        """See Facades. A newer map is told as `dcp.server.cluster.node_map` does it."""
        node = self._node
        view, version = node.session.view, node.life.version()
        if node.member not in view.members:
            return b""
        is_newer = version > self._config[0] and node.life.may_tell(version)
        if is_newer and view.revision >= version.rev:
            self._config = version, bucket_config(node.map())
            node.told(version)
        return self._config[1]

    def config_version(self) -> tuple[int, int]:
        return max(self._config[0], (1, 1))


class LinkHandler:
    """The connection of a replica's link."""

    def __init__(self, node: ClusterNode, member: str, link: ReplicaLink) -> None:
        self._node = node
        self.member = member
        self.link = link
        self.side: Side | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.side is None and self.link.state is LinkState.CLOSED

    def connected(self, side: Side) -> None:
        self.side = side
        side.handler = self
        if self.link.state is LinkState.CLOSED:
            side.abort()
            self.side = None
            return
        self.flush()

    def failed(self, _why: str) -> None:
        self.link.closed()

    def flush(self) -> None:
        side = self.side
        if side is None:
            return
        if data := self.link.bytes_to_send():
            side.write(data)
        if self.link.state is LinkState.CLOSED:
            side.abort()
            self.side = None

    def on_bytes(self, data: bytes) -> None:
        self._node.link_bytes(self, data)

    def on_closed(self, why: str) -> None:
        self.side = None
        self._node.watch.cut_off(self.link.followed(), f"loses its master's connection ({why})")
        self.link.closed()

    def on_writable(self) -> None:
        self.flush()


class ClusterNode(SingleNode, NodeTurns):
    """See the module."""

    core_type = ReplicationCore
    note_committed: Callable[[str, Partition], None]
    """Called with this node's name and a partition whose high watermark it has raised."""

    def __init__(
        self, machine: Machine, plan: Plan, facts: Facts, store: MetaStore, note: NoteRecord
    ) -> None:
        self._note_record = note
        super().__init__(machine, plan, facts)
        self.facts = ClusterFacades(self)
        node = self.store.node()
        assert node is not None
        self.member = node.node_id
        self.session = ClusterSession(
            ROOT, self.member, machine.host.incarnation,
            CoordinatorSettings(elects_uncleanly=plan.unclean), lease_s=plan.lease_s,
        )  # fmt: skip
        self.life = MapLife(self.session.view, machine.sent_map)
        self._raised_life = RaisedLife(self.life, store)
        self.seen = SeenRecords(self.session.view.keys, machine.seen, is_kept_in_file=True)
        self._is_keeping = False
        self.driver = StoreDriver(self.session, store, self)
        settings = ReplicationSettings(
            min_in_sync=plan.min_in_sync,
            replica_lag_max_ns=plan.lag_ns,
            beat_ns=plan.beat_ns,
            unheard_ns=plan.unheard_ns,
            acknowledges_as_master=plan.acknowledge == "master",
            window_bytes=plan.window_bytes,
            section_bytes=plan.section_bytes,
            format=plan.format_at(self.name, self.host.incarnation),
        )
        self.core = self.core_type(
            self.engine, self.store, self.groups, self.session, settings,
            self, cluster="sim", now_ns=self.clock.monotonic_ns(), kept=self.seen,
        )  # fmt: skip
        if self.scrubber is not None:
            self.scrubber.view, self.scrubber.member = self.session.view, self.member
        self._manifest = SharedManifest(self.session, self.engine, store, self.core)
        self.replication = self.core.master
        self._handlers: list[LinkHandler] = []
        self._format = settings.format
        self._mixed: set[tuple[str, str]] = set()
        """Links with nodes of the format before that were told of: kind and member."""
        self.watch = NodeWatch(self._tell, self.engine.partitions)
        self._told: dict[int, int] = {}
        """Partition -> the epoch in which this node was last seen to serve it."""
        self._was_noted = False
        before = plan.format_at(self.name, max(self.host.incarnation - 1, 0))
        if self._format != before:
            kind = "upgraded" if self._format == FORMAT else "set back"
            self._tell(kind, f"speaks format {self._format} of replication from now on", -1)
        self.host.after(CLUSTER_TICK_NS, self._cluster_tick)
        if plan.cut_consumers:
            CutRounds(self, self._world.draw.getrandbits(63) | 1)

    # -- SingleNode --------------------------------------------------------------------------------

    def _begin_cuts(self) -> None:
        """It takes part in cuts of the cluster, as soon as it is a member (`__init__`)."""

    def _record_masterships(self) -> None:
        """A node of a cluster serves nothing at its start."""

    def held(self) -> HeldAnswers:
        """See Served."""
        return HeldAnswers(
            self.engine, commit_timeout_ns=self._plan.commit_timeout_ns,
            acknowledges_as_master=self._plan.acknowledge == "master",
        )  # fmt: skip

    def before_commands(self) -> None:
        """See Served."""
        self.fence(self.clock.monotonic_ns())

    def after_commands(self) -> None:
        """See Served."""
        self.carry_out()

    def begun(self, job: WriteGroup) -> None:
        """See SingleNode."""
        self.group_begins(self.clock.monotonic_ns(), job.group)

    def _done(self, job: Job) -> None:
        self.job_done(self.clock.monotonic_ns(), self.groups.done(job))
        if self.groups.has_work:
            self.kick()

    # -- NodeTurns ---------------------------------------------------------------------------------

    def feed(self) -> None:
        """See NodeTurns: streams are sent in the next event, and no time passes until then."""

    def acknowledge(self) -> None:
        """See NodeTurns: links are flushed when the turn ends, and no time passes until then."""

    def publish(self, published: Published) -> None:
        """See NodeTurns."""
        self.published(published)

    def end_turn(self) -> None:
        """See NodeTurns."""
        has_closed = False
        for handler in self._handlers:
            link = handler.link
            is_closed = link.state is LinkState.CLOSED
            if is_closed or link._out:
                handler.flush()
            has_closed = has_closed or is_closed
        if has_closed:
            self._handlers = [handler for handler in self._handlers if not handler.is_over]
        if self._plan.older_formats and self._format == FORMAT:
            self._note_formats()
        self._note_masterships()
        if self.engine.keyspace.has_pending:
            self.kick()

    def settle(self, vb_ids: Iterable[int]) -> None:
        """See SingleNode. A cluster's records say what is settled, not one of its nodes."""

    def ended(self) -> None:
        """See SimNode."""
        self.watch.cut_off(range(self._plan.partitions), "ends")
        self.driver.close()
        super().ended()

    # -- the cluster -------------------------------------------------------------------------------

    def map(self) -> PartitionMap:
        """Return the partition map as this node knows it."""
        view = self.session.view
        nodes = {
            member: MapNode(stored.content.address, 11210, 8091 + number)
            for number, (member, stored) in enumerate(sorted(view.members.items()))
        }
        version = self.life.version()
        return bucket_map(
            view, self._plan.partitions, self.member, nodes, rev=version.rev, rev_epoch=version.life
        )

    def told(self, version: MapVersion) -> None:
        """Clients are told a map of this version."""
        self.life.note_told(version)
        self._machine.sent_map = max(self._machine.sent_map, version)

    def testimony(self, operation: str) -> NodeTestimony:
        """Return what this node has, for a restoration of the records."""
        return NodeTestimony(
            member=self.member, operation=operation, life=self._machine.sent_map.life,
            records=records_of(self.seen.content().records), ends=self.core.held_logs(),
        )  # fmt: skip

    def now_ns(self) -> int:
        """See NodeShell."""
        return self.clock.monotonic_ns()

    def guarded(self, step: Callable[[], None]) -> None:
        """See NodeShell: what it raises ends the run."""
        step()

    def take(self, effect: SessionEffect) -> None:
        """See NodeShell."""
        now_ns = self.clock.monotonic_ns()
        if isinstance(effect, ViewChanged):
            self.seen.note_others(self.session.view)
            self.life.look()
            self._manifest.view_changed()
            self._note_records(effect.vb_ids)
            self.core.records_changed(now_ns, effect.vb_ids)
            self._keep_seen()
        elif isinstance(effect, WriteOutcome):
            self.core.outcome(now_ns, effect)
        self.carry_out()

    def _keep_seen(self) -> None:
        """Write what the folder has seen of the store, one write at a time."""
        if not self._is_keeping and (piece := self.seen.take_piece()) is not None:
            self._is_keeping = True
            took_ns = self._world.between(self._plan.sync_min_ns, self._plan.sync_max_ns)
            self.host.after(took_ns, self._seen_written, piece)

    def _seen_written(self, piece: SeenPiece) -> None:
        if self._machine.disk.is_full:
            self.seen.not_kept()
        else:
            self._machine.seen = piece.content
            self.seen.kept(piece)
            self.core.records_were_kept()
            self.carry_out()
        self.host.after(SEEN_REST_NS, self._seen_rested)

    def _seen_rested(self) -> None:
        self._is_keeping = False
        self._keep_seen()

    def _note_records(self, vb_ids: Iterable[int]) -> None:
        """Tell the cluster of new records, before this node acts on them."""
        for vb_id in sorted(vb_ids):
            stored = self.session.view.partitions.get(vb_id)
            if stored is not None:
                self._note_record(vb_id, stored.content.record)

    def ask_store(self, effects: Iterable[SessionEffect]) -> None:
        """See NodeShell."""
        self.driver.carry_out(effects)

    def depose(self, vb_ids: tuple[int, ...], _why: str) -> None:
        """See NodeShell."""
        for vb_id in vb_ids:
            self.note_tail(vb_id)
        for connection in list(self.connections):
            connection.held.depose(vb_ids)
            connection.release()

    def carry_out_one(self, effect: ReplicationEffect) -> None:
        """See NodeTurns."""
        if isinstance(effect, Published):
            self.published(effect)
        elif isinstance(effect, StepDue):
            self.core.step(self.clock.monotonic_ns())
        elif isinstance(effect, PartitionsArrived):
            for connection in tuple(self.connections):
                connection.go_on()
        elif isinstance(effect, Dial):
            self._dial(effect.member)
        elif isinstance(effect, CutOff):
            self._keep(effect)
        elif isinstance(effect, ElectionLoss):
            self._record.lost.append(LostFact(self._world.now_ns, self.name, effect))

    def _keep(self, cut: CutOff) -> None:
        """Write a quarantine file."""
        try:
            keep(self._machine.disk, cut)
        except OSError:
            self.core.replica.not_kept(cut)
            return
        stored = self.session.view.partitions.get(cut.vb_id)
        is_dropped = stored is not None and self.member not in stored.content.record.copies
        epoch = self.engine.partitions[cut.vb_id].leader_epoch if is_dropped else None
        self._record.cut_off.append(CutOffFact(self._world.now_ns, self.name, cut, epoch))
        self.core.replica.kept(cut)

    def _dial(self, member: str) -> None:
        link = self.core.replica.links[member]
        stored = self.session.view.members.get(member)
        handler = LinkHandler(self, member, link)
        self._handlers.append(handler)
        if stored is None:
            link.closed()
            return
        self._machine.network.connect(
            self.host, stored.content.address, handler.connected, handler.failed
        )

    def link_bytes(self, handler: LinkHandler, data: bytes) -> None:
        """Bytes came on a link."""
        handler.link.receive(data, self.clock.monotonic_ns())
        self.carry_out()

    def _note_formats(self) -> None:
        """Tell of links with nodes that speak the format before, once of each."""
        links, feeds = self._handlers, self.core.master.feeds
        found = {
            ("older master", each.member)
            for each in links
            if each.link.state is LinkState.READY and each.link._format < FORMAT
        }
        found |= {("older replica", name) for name, feed in feeds.items() if feed.format < FORMAT}
        for kind, member in sorted(found - self._mixed):
            self._mixed.add((kind, member))
            self._tell(kind, f"{short(member)} speaks the format of replication before", -1)

    def _cluster_tick(self) -> None:
        if self._has_begun:  # what is in the log is on disk, and it can be written
            self.driver.tick()
            self._raised_life.tick(self.clock.monotonic_ns(), self.clock.wall_ns() / SECOND)
            self.core.tick(self.clock.monotonic_ns())
            self.core.master.cuts.tick(self.clock.monotonic_ns())  # feeds tick with connections
            for vb_id in self.core.take_damages():
                self.met(vb_id)
            self.carry_out()
        self.host.after(CLUSTER_TICK_NS, self._cluster_tick)

    def _tell(self, kind: str, text: str, vb_id: int) -> None:
        self._world.tell(kind, self.name, text, vb_id if vb_id >= 0 else None)

    def _note_masterships(self) -> None:
        """Record what this node serves now."""
        has_changed = self.watch.look()
        self.watch.windows([
            member
            for member, feed in self.core.master.feeds.items()
            if feed.inflights.cost >= feed.window_bytes
        ])  # fmt: skip
        if self._was_noted and not has_changed:
            return
        self._was_noted = True
        for part in self.engine.partitions:
            if (window := part.incomplete_snapshot) is not None:
                self._record.snapshots.add((self.name, part.vb_id, window.end))
            epoch = part.leader_epoch
            if part.state == VbState.ACTIVE and self._told.get(part.vb_id) != epoch:
                self._told[part.vb_id] = epoch
                self._record.masterships.append(
                    Mastership(
                        self._world.now_ns, self.name, self.host.incarnation, part.vb_id, epoch,
                        part.vb_uuid, part.failover.current.seqno,
                    )
                )  # fmt: skip
                self._record_committed((part.vb_id,))

    def _record_committed(self, vb_ids: Iterable[int]) -> None:
        touched = tuple(vb_ids)
        super()._record_committed(touched)
        for vb_id in touched:
            self.note_committed(self.name, self.engine.partitions[vb_id])

    # -- what checkers ask -------------------------------------------------------------------------

    def branch(self, vb_id: int, share: float) -> bool:
        """See SimNode."""
        part = self.engine.partitions[vb_id]
        seqno = int(part.high_seqno * share)
        uuid = draw_vb_uuid(self._world.draw)
        try:
            self.core.master.want_branch(vb_id, seqno, uuid)
        except BranchRefusedError:
            return False
        self._record.excuse(self._world.now_ns, vb_id, seqno, "branch")
        return True

    def plans_floors(self, vb_id: int) -> bool:
        """See Kept."""
        return self.serves(vb_id)

    def serves_any(self) -> bool:
        """Whether it is the master of a partition, and serves it."""
        return any(self.serves(part.vb_id) for part in self.engine.partitions)

    def serves(self, vb_id: int) -> bool:
        """See SimNode."""
        return self._has_begun and self.engine.partitions[vb_id].state == VbState.ACTIVE

    def note_tail(self, vb_id: int) -> None:
        """Record what is not committed: also of that, a version has one history only."""
        part = self.engine.partitions[vb_id]
        if part.committed_seqno < part.high_seqno:
            with self._machine.env.as_written():
                entries = self.engine.versions.entries(
                    part, part.committed_seqno + 1, part.high_seqno, 1 << 30
                )
            tail = {seqno_of(entry): META.unpack_from(entry)[4] for entry in entries}
            versions = tuple(part.failover.pairs())
            self._record.histories.append(
                History(self._world.now_ns, self.name, vb_id, versions, part.high_seqno, {}, tail)
            )

    def mastered(self) -> Iterable[int]:
        """See Watched."""
        return self.core.master.masterships.keys()

    def would_answer(self, vb_id: int) -> bool:
        """See Watched."""
        leading, now_ns = self.core.master, self.clock.monotonic_ns()
        mastership = leading.masterships.get(vb_id)
        if mastership is None or self.engine.partitions[vb_id].state != VbState.ACTIVE:
            return False
        until_ns = mastership.confirmed_until_ns(leading.serving.confirmations(mastership))
        return mastership.service(now_ns, until_ns) in {Service.SERVING, Service.HANDING}

    def may_commit(self, vb_id: int) -> bool:
        """See Watched."""
        mastership = self.core.master.masterships[vb_id]
        return len(mastership.isr) >= mastership.min_in_sync

    def open_streams(self) -> list[tuple[int, str]]:
        """See Watched."""
        return [
            (stream.vb_id, connection.name)
            for connection in self.connections
            if isinstance(connection.state.sender, Producer)
            for stream in connection.state.sender.streams()
        ]

    def damages(self) -> list[str]:
        """See SimNode."""
        return [*super().damages(), *self._wrong_events()]

    def _wrong_events(self) -> Iterator[str]:
        """Look at the system events of the partitions that it serves: they are those of the
        manifest, and each is told once.
        """
        manifest, versions = self.engine.keyspace.manifest, self.engine.versions
        for part in self.engine.partitions:
            if part.state != VbState.ACTIVE or not part.tally.other_high_seqno:
                continue
            where, keys = f"{self.name}, vb {part.vb_id}", versions.system_keys(part)
            if is_ahead(keys, manifest) or missing_events(keys, manifest):
                yield f"{where}: its system events are not those of manifest {manifest.uid}"
            for entry in versions.entries(part, 1, part.high_seqno, 1 << 30):
                if key_of(entry)[0] == SYSTEM_COLLECTION and prev_seqno_of(entry):
                    yield f"{where}: the system event with seqno {seqno_of(entry)} was told before"

    def is_quiet(self) -> bool:
        """See SimNode."""
        return super().is_quiet() and all(
            part.committed_seqno == part.high_seqno for part in self.engine.partitions
        )
