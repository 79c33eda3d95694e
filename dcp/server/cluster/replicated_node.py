"""The replication of a server that is a member of a cluster: time, bytes and effects of the cores.

    metadata store ──> StoreDriver ──> ClusterSession ──> ReplicationCore <── feeds, links
                                                                │
                       maps, connections, files, log  <── effects

The rules are in `failover.replication` and `failover.coordinator`. Here are the clock, the sockets
and the files. Everything runs on the server's event loop; only files are written in threads.

Invariants
- no partition is served before its record gives it to this process, and no other node is spoken to
  before this process is registered as the member;
- what comes after what is that of `NodeTurns`;
- an exception in the cores ends the server: what it would answer afterwards may be wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, NamedTuple

from dcp.core.groups import GroupCycle, Published
from dcp.server.access.link_tls import LinkTls
from dcp.server.access.users import Users
from dcp.server.cluster.cluster_file import KEYS_PREFIX, ClusterFile
from dcp.server.cluster.joining.enrolment import EnrolmentError, ask
from dcp.server.cluster.joining.process_facts import VERSION_ADVICE, facts_of, unfit_by
from dcp.server.cluster.member_link import MemberLinks
from dcp.server.cluster.meta_access import MetaAccess
from dcp.server.cluster.node_map import MapPace, NodeMap, SentMap
from dcp.server.cluster.own_records import OwnMembership, OwnRecords
from dcp.server.cluster.paced_work import Turns
from dcp.server.cluster.receipt_files import ElectionLog, keep_cut_off, keep_election
from dcp.server.cluster.seen_file import SeenFile
from dcp.server.cluster.shared_records import ManifestNotChangedError, SharedManifest, SharedUsers
from dcp.server.cluster.timeline import Timeline
from dcp.server.net.cluster_config import ClusterConfig
from dcp.server.net.connections import Connections
from dcp.server.observe.elapsed import elapsed_ns
from dcp.server.observe.event_log import EventLog, MembershipOverError
from dcp.server.observe.housekeeping import Tasks
from dcp.server.observe.meter import ClusterMeter
from dcp.server.operate.collection_changes import CollectionsRefusedError
from dcp.server.operate.replicated_branches import ReplicatedBranches
from dcp.server.storage.health import Health, OlderStore
from dcp.server.storage.process.scrubbing import Scrubbing
from dcp.session.answers.held_answers import HeldAnswers
from dcp.session.replication_port import ReplicationPort
from dcp.stream.hub import StreamHub
from failover.coordinator.cluster_session import ClusterSession, SessionEffect, StoreDriver
from failover.coordinator.coordinator import Elected
from failover.coordinator.effects import Notice, ViewChanged
from failover.coordinator.partition_choices import CoordinatorSettings
from failover.coordinator.plans.request_answers import name_of
from failover.coordinator.record_writer import OutcomeKind, WriteOutcome
from failover.coordinator.records import KeyKind, MemberRecord, owner_read, owner_trouble
from failover.coordinator.seen_records import older_records
from failover.metadata.metastore import Range, RangeResult, TxnResult
from failover.replication.effects import (
    BranchEnded,
    Dial,
    MapChanged,
    PartitionsArrived,
    ReplicationEffect,
    StepDue,
)
from failover.replication.mastership import ReplicationSettings
from failover.replication.node import NodeTurns, ReplicationCore
from vbucket.engine.engine import Engine
from vbucket.engine.partition import VbState
from vbucket.log.commit_group import CommitGroup
from vbucket.model.manifest import Manifest
from vbucket.model.receipt import CutOff, ElectionLoss, cut_off_receipt, election_receipt
from vbucket.store.store import Store

AGE_TURNS: Final = 10
"""Ticks between looks whether the metadata store is older than what nodes have seen."""
USERS_TURNS: Final = 100
"""Ticks between attempts to write users that could not be written."""
LEAVE_S: Final = 20.0
"""How long a stop waits for the next partition to be handed over."""
LEAVE_MAX_S: Final = 90.0
"""How long it waits for all of them."""
LEAVE_TICK_S: Final = 0.05
"""Time between looks whether that is done."""
OWNER_RETRY_S: Final = 0.5
"""Time between attempts to ask the metadata store whose it is."""


class ServerParts(NamedTuple):
    """The parts of the server that replication uses."""

    engine: Engine
    store: Store
    hub: StreamHub
    groups: GroupCycle
    connections: Connections
    config: ClusterConfig
    users: Users
    health: Health
    meter: ClusterMeter
    link_tls: LinkTls | None
    scrubbing: Scrubbing
    tasks: Tasks
    log: EventLog
    data_dir: Path
    kick: Callable[[object], None]
    """Commits what is pending, which a link has brought (None: somebody else)."""
    publish: Callable[[Published], None]
    """Tells the rest of the server what is committed."""


class ReplicationChoices(NamedTuple):
    """Settings of the node."""

    commit_timeout_ns: int
    acknowledges_as_master: bool
    replica_lag_max_ns: int
    beat_ns: int
    unheard_ns: int
    lease_s: int
    value_bytes_max: int
    fill_bytes_per_s: int = 0
    prefers_first: bool = True
    elects_uncleanly: bool = False


class ReplicatedNode(NodeTurns):
    """See the module. It implements ReplicationHooks and NodeShell."""

    def __init__(
        self,
        parts: ServerParts,
        member: str,
        identity: ClusterFile,
        choices: ReplicationChoices,
        access: MetaAccess,
    ) -> None:
        """`member` is the id of the data folder. Nothing is served until `start`."""
        self.identity = identity
        self.member = member
        self._parts = parts
        self._choices = choices
        self.session = session = ClusterSession(
            identity.root, member, identity.incarnation,
            CoordinatorSettings(choices.elects_uncleanly, choices.prefers_first),
            lease_s=choices.lease_s,
        )  # fmt: skip
        self.seen = self._open_seen()
        self._driver = StoreDriver(session, access.meta, self)
        self.core = ReplicationCore(
            parts.engine, parts.store, parts.groups, session,
            ReplicationSettings(
                min_in_sync=identity.min_in_sync,
                replica_lag_max_ns=choices.replica_lag_max_ns,
                beat_ns=choices.beat_ns,
                unheard_ns=choices.unheard_ns,
                acknowledges_as_master=choices.acknowledges_as_master,
                value_bytes_max=choices.value_bytes_max,
                fill_bytes_per_s=choices.fill_bytes_per_s,
            ),
            self, cluster=identity.cluster, now_ns=elapsed_ns(), kept=self.seen.records,
        )  # fmt: skip
        self.own_membership = OwnMembership(session, self.core, self.seen.records, identity.name)
        self.branches = ReplicatedBranches(parts.engine, self.core.master)
        self.access = access
        self.manifest = SharedManifest(session, parts.engine, access, self.core)
        self._users = SharedUsers(session.view, parts.users, access, parts.tasks, parts.log)
        self.own_records = OwnRecords(session, access.meta, parts.log)
        self.timeline = Timeline(session.view)
        self.links = MemberLinks(
            session, access.meta, parts.link_tls, parts.meter.links, parts.tasks, parts.log
        )
        self._elections = ElectionLog(session.view)
        self._loop = asyncio.get_running_loop()
        self.map = NodeMap(
            session.view, access.meta,
            SentMap(parts.data_dir, identity.cluster, parts.tasks, parts.log),
            MapPace(self._loop, partial(self.guarded, self._show_map)),
        )  # fmt: skip
        self._is_scheduled = self._has_started = self._is_stopped = False
        self._turns = Turns(self._loop, self.core)
        self.wrong_store = ""
        """Why the metadata store is not that of this cluster; "" if it is, or is not known."""
        self._effects: Final = self._handlers()

    def _handlers(self) -> dict[type, Callable[[Any], None]]:
        """Return what carries out each kind of effect."""
        return {
            Published: self.publish,
            Dial: self._dial,
            MapChanged: self._map_changed,
            CutOff: self._cut_off,
            ElectionLoss: self._election_loss,
            BranchEnded: self._branch_ended,
            StepDue: self._step,
            PartitionsArrived: self._arrived,
            Notice: self._notice,
        }

    def _open_seen(self) -> SeenFile:
        parts, session, cluster = self._parts, self.session, self.identity.cluster
        kept = partial(self.guarded, self._records_kept)
        keys = session.view.keys
        seen = SeenFile(parts.data_dir, cluster, keys, parts.tasks, parts.log, kept)
        session.reader.must_have_cluster = seen.records.has_cluster
        return seen

    @property
    def acknowledges_as_master(self) -> bool:
        """Whether a write is answered when this node's disk has it (setting acknowledge)."""
        return self._choices.acknowledges_as_master

    @property
    def port(self) -> ReplicationPort:
        """Where the nodes of replicas come in."""
        return self.core.master

    # -- ReplicationHooks --------------------------------------------------------------------------

    def held(self) -> HeldAnswers:
        """See ReplicationHooks."""
        return HeldAnswers(
            self._parts.engine,
            commit_timeout_ns=self._choices.commit_timeout_ns,
            acknowledges_as_master=self._choices.acknowledges_as_master,
        )

    def before_commands(self, now_ns: int) -> None:
        """See ReplicationHooks."""
        self.fence(now_ns)

    def after_commands(self) -> None:
        """See ReplicationHooks."""
        if self.core.has_effects and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self.guarded, self.carry_out)

    def after_acknowledgement(self) -> None:
        """See ReplicationHooks."""
        if self.core.has_effects:
            self.guarded(self.carry_out)

    # -- the server --------------------------------------------------------------------------------

    def show_first_map(self, own: MemberRecord) -> None:
        """Tell clients that this node exists, and serves nothing yet; `own` is its own record."""
        self.session.membership.introduce(facts_of(self._parts.data_dir, own))
        self.own_records.begin(own)
        self.map.begin(self._parts.config, self.identity.cluster, own)

    async def change_manifest(self, change: Callable[[Manifest], Manifest]) -> Manifest:
        """Change the collections of the cluster. Raises CollectionsRefusedError, ManifestError."""
        try:
            after, behind = await self.manifest.change(change)
        except ManifestNotChangedError as error:
            raise CollectionsRefusedError(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
        if behind:
            text = "collections are not on all nodes yet"
            self._parts.log.warning(text, manifest_uid=after.uid, nodes=", ".join(behind))
        return after

    def hosts(self) -> frozenset[str]:
        """Return the hosts at which the members are reached."""
        addresses = (stored.content.address for stored in self.session.view.members.values())
        return frozenset(address.rpartition(":")[0].strip("[]") for address in addresses)

    def served(self) -> int:
        """Return how many partitions this node serves now."""
        return sum(part.state == VbState.ACTIVE for part in self._parts.engine.partitions)

    def start(self, why_idle: str = "") -> None:
        """Take part in the cluster: what is in the log is on disk, and it can be written. With
        `why_idle` this node only follows the records, to tell its clients where the partitions are.
        """
        self.own_membership.take_part(why_idle)
        if not self._has_started:
            self._has_started = True
            self._parts.tasks.begin(self._begin())

    async def _begin(self) -> None:
        """Begin to tick once the metadata store has answered, and is that of this cluster: this
        node would write its own keys into another one, too.
        """
        cluster = self.identity.cluster
        while not self._is_stopped:
            with contextlib.suppress(EnrolmentError):  # it is away: there is nothing to serve by
                result = await ask(self.access.meta, owner_read(KEYS_PREFIX, cluster))
                if isinstance(result, TxnResult) and self._note_owner(result):
                    await self._check_versions()
                    self._turns.begin(partial(self.guarded, self._pass_time))
                    return
            self._look_at_store_age()
            await asyncio.sleep(OWNER_RETRY_S)

    async def _check_versions(self) -> None:
        """Raises MembershipOverError if a member that runs has another version, EnrolmentError if
        the store does not answer.
        """
        alive = Range(self.session.view.keys.of_members(KeyKind.ALIVE), is_prefix=True)
        result = await ask(self.access.meta, alive)
        if not isinstance(result, RangeResult):
            raise EnrolmentError("the metadata store does not answer")
        if why := unfit_by(result.items, self.member):
            raise MembershipOverError(f"{why}. {VERSION_ADVICE}")

    def _note_owner(self, result: TxnResult) -> bool:
        """Take what the store says about its owner, and tell if it is another cluster's."""
        wrong = owner_trouble(result, KEYS_PREFIX, self.identity.cluster)
        if wrong and not self.wrong_store:
            self._parts.log.error("wrong metadata store", reason=wrong)
        self.wrong_store = wrong
        return not wrong

    async def leave(self) -> None:
        """Hand over masterships, then get out of the in-sync sets, so that nobody waits for this
        node when it has stopped. It ends when nothing has moved for LEAVE_S, after LEAVE_MAX_S, or
        at once if nobody is there to take over.
        """
        view = self.session.view
        others = [name for name in view.members if name != self.member and view.stays(name)]
        if not self._turns.has_begun or self._is_stopped or not others or self.access.trouble:
            return
        until_ns = elapsed_ns() + int(LEAVE_MAX_S * 1e9)
        self.session.begin_to_leave(elapsed_ns())
        self.core.master.leave()
        await self._until_none(until_ns, lambda: len(self.core.master.masterships))
        self._driver.carry_out(self.session.leave())
        await self._until_none(until_ns, self._in_sync_count)

    async def _until_none(self, until_ns: int, count: Callable[[], int]) -> None:
        """Wait until none is left, while they get fewer and there is somebody to take over."""
        view = self.session.view
        fewest, moved_ns = count(), elapsed_ns()
        while fewest and not self._is_stopped:
            others = [name for name in view.members if name != self.member]
            if self.access.trouble or not any(map(view.stays, others)):
                return
            await asyncio.sleep(LEAVE_TICK_S)
            left, now_ns = count(), elapsed_ns()
            if left < fewest:
                fewest, moved_ns = left, now_ns
            if now_ns >= min(until_ns, moved_ns + int(LEAVE_S * 1e9)):
                return

    def _in_sync_count(self) -> int:
        """Return of how many partitions a master waits for this node."""
        records = (stored.content.record for stored in self.session.view.partitions.values())
        return sum(self.member in record.isr for record in records)

    def group_begun(self, group: CommitGroup) -> None:
        """A group is about to be written: the commit path calls this first."""
        self.group_begins(elapsed_ns(), group)

    def group_published(self, published: Published) -> None:
        """A job of the log is done: the commit path calls this instead of `publish`."""
        self.job_done(elapsed_ns(), published)

    # -- NodeTurns ---------------------------------------------------------------------------------

    def feed(self) -> None:
        """See NodeTurns: the loop would send it in its next turn."""
        self._parts.connections.feed()

    def acknowledge(self) -> None:
        """See NodeTurns."""
        self.links.flush()

    def publish(self, published: Published) -> None:
        """See NodeTurns."""
        self._parts.publish(published)

    def carry_out_one(self, effect: ReplicationEffect) -> None:
        """See NodeTurns."""
        self._effects[type(effect)](effect)

    def end_turn(self) -> None:
        """See NodeTurns."""
        self._is_scheduled = False
        self.links.flush()
        self.links.drop_ended()
        if self._parts.engine.keyspace.has_pending:
            self._parts.kick(None)

    def stop(self) -> None:
        """Take no further part: end links, watches and timers."""
        self.own_membership.stop()
        self._is_stopped = True
        self._driver.close()
        self._turns.stop()
        self.map.stop()
        self.seen.finish()
        self.links.close()

    # -- time and the store ------------------------------------------------------------------------

    def _pass_time(self) -> None:
        now_ns = elapsed_ns()
        self._driver.tick()
        self.core.master.serving.store_trouble = self.access.trouble
        for vb_id in self.core.take_damages():
            self._parts.scrubbing.met(vb_id)
        if self._turns.is_each(AGE_TURNS):
            self._look_at_store_age()
            self.timeline.look(time.time())
        if not self.own_membership.check():
            return
        self.map.raised.tick(now_ns, time.time())
        self.own_records.tick(now_ns)
        self.links.own.tick(now_ns)
        self.manifest.look(now_ns)
        self.core.time_passes(now_ns)
        self._turns.look_when_due(now_ns)
        if self._turns.is_each(USERS_TURNS):
            self._adopt_users()  # again, if it could not be written before
        self._turns.end()
        self.carry_out()

    @property
    def num_vbuckets(self) -> int:
        """How many partitions the cluster has."""
        return self._parts.engine.num_vbuckets

    @property
    def older_store(self) -> OlderStore:
        """Whether the metadata store is older than what nodes have seen, and since when."""
        return self._parts.health.older_store

    @property
    def is_store_emptied(self) -> bool:
        """Whether the store has no records of the cluster, although this node has seen some."""
        is_lost = bool(self.wrong_store) and self.seen.records.has_cluster
        return is_lost or self.session.reader.is_emptied

    def _look_at_store_age(self) -> None:
        view = self.session.view
        older = {each.vb_id for each in older_records(view)} | self.seen.records.older.keys()
        if self.is_store_emptied:
            older = set(range(self.num_vbuckets))
        self._parts.health.store_is_older(len(older), time.time(), serves=self.served() > 0)

    def _adopt_users(self) -> None:
        if not self.seen.records.is_older(self.session.view, KeyKind.USERS):
            self._users.adopt()

    def _records_kept(self) -> None:
        """More of the store's records is on disk here: masters wait for that."""
        self.core.records_were_kept()
        self.carry_out()

    def take(self, effect: SessionEffect) -> None:
        """See NodeShell."""
        self.guarded(partial(self._taken, effect))

    def _taken(self, effect: SessionEffect) -> None:
        now_ns = elapsed_ns()
        if isinstance(effect, ViewChanged):
            self.seen.records.note_others(self.session.view)
        may_act = self.own_membership.check()
        if isinstance(effect, ViewChanged):
            if was_set_back := self.map.life.look():
                self._parts.log.warning(was_set_back)
            self.manifest.view_changed()
            self._adopt_users()
            self.own_records.clock.view_changed()
            if may_act:
                self.core.records_changed(now_ns, effect.vb_ids)
            else:
                self._map_changed(MapChanged(tuple(effect.vb_ids)))
            self.seen.changed()
        elif isinstance(effect, WriteOutcome):
            self._parts.meter.elections["handover"] += _is_handover(effect)
            self.core.outcome(now_ns, effect)
        elif isinstance(effect, Elected):
            self._parts.meter.elections["clean" if effect.is_clean else "unclean"] += 1
            self._elections.note(effect)
        else:
            assert isinstance(effect, Notice), effect
            self._notice(effect)
        self.after_commands()

    def guarded(self, step: Callable[[], None]) -> None:
        """See NodeShell. All steps of the cores run so. An unexpected exception ends the server."""
        if self._is_stopped:
            return
        try:
            step()
        except Exception as error:  # noqa: BLE001 - a named supervision point
            self._parts.tasks.fail(error)

    def ask_store(self, effects: Iterable[SessionEffect]) -> None:
        """See NodeShell."""
        self._driver.carry_out(effects)

    def now_ns(self) -> int:
        """See NodeShell."""
        return elapsed_ns()

    def depose(self, vb_ids: tuple[int, ...], _why: str) -> None:
        """See NodeShell."""
        for connection in tuple(self._parts.connections.waiting):
            connection.depose(vb_ids)

    # -- effects -----------------------------------------------------------------------------------

    def _dial(self, effect: Dial) -> None:
        link = self.core.replica.links[effect.member]
        login = self.access.login(self._parts.link_tls)
        self.links.dial(link, effect.member, login, partial(self._link_moved, link))

    def cut_off(self, member: str) -> None:
        """End the link to another node, and dial it no more: see MemberLinks."""
        self.links.cut_off(member)
        self._link_moved(None)

    def _link_moved(self, link: object) -> None:
        self.guarded(partial(self._take_in, link))

    def _take_in(self, link: object) -> None:
        """Write what a link has brought, and acknowledge it, before anything else that follows."""
        if self._parts.engine.keyspace.has_pending:
            self._parts.kick(link)
        self.carry_out()

    def _map_changed(self, changed: MapChanged) -> None:
        self._parts.connections.release()  # a larger in-sync set may be what an answer waits for
        self.map.changed(changed.vb_ids)

    def _show_map(self) -> None:
        if self.map.update():
            self._parts.connections.tell_map()
        self._elections.tell(self._parts.log)

    def _cut_off(self, cut: CutOff) -> None:
        self._parts.tasks.begin(self._keep(cut))

    async def _keep(self, cut: CutOff) -> None:
        keep = partial(keep_cut_off, self._parts.data_dir, cut)
        try:
            path = await asyncio.to_thread(keep)
        except OSError as error:
            self._parts.log.error(
                "changes that a new master does not have cannot be written to a file; the "
                "partition waits", vb_id=cut.vb_id, reason=str(error),
            )  # fmt: skip
            self.core.replica.not_kept(cut)
            return
        self._parts.meter.receipts["cut_off"] += 1
        self._parts.log.warning("loss receipt", **cut_off_receipt(cut), path=str(path))
        self.core.replica.kept(cut)
        self.after_commands()

    def _election_loss(self, lost: ElectionLoss) -> None:
        self._parts.meter.receipts["unclean_election"] += 1
        self._parts.log.warning("loss receipt", **election_receipt(lost))
        self._parts.tasks.begin(self._keep_receipt(lost))

    async def _keep_receipt(self, lost: ElectionLoss) -> None:
        keep = partial(keep_election, self._parts.data_dir, lost, time.time())
        try:
            await asyncio.to_thread(keep)
        except OSError as error:
            self._parts.log.error(
                "the receipt of an unclean election cannot be written to a file; this log has it",
                vb_id=lost.vb_id, reason=str(error),
            )  # fmt: skip

    def _branch_ended(self, ended: BranchEnded) -> None:
        self._parts.log.info(
            "branch decided", vb_id=ended.vb_id, version=str(ended.vb_uuid),
            undone=ended.undone.seqnos, reason=ended.why_not or "all copies in sync rolled back",
        )  # fmt: skip
        self.branches.ended(ended)

    async def lose(self, vb_id: int, at_seqno: int) -> None:
        """Undo what answered writes changed above a seqno, with the receipt of an unclean election.

        Raises BranchRefusedError, BranchUnknownError.
        """
        part = self._parts.engine.partitions[vb_id]
        versions = tuple(part.failover.pairs())
        report = await self.branches.branch(vb_id, at_seqno)
        answered = at_seqno + report.undone_seqnos
        self._election_loss(
            ElectionLoss(vb_id, part.leader_epoch, versions, at_seqno, committed_seqno=answered)
        )

    def _step(self, _effect: StepDue) -> None:
        self._turns.steps.do_when_due(self._later)

    def _later(self, work: Callable[[], None]) -> None:
        self.guarded(work)
        self.guarded(self.carry_out)

    def _arrived(self, _effect: PartitionsArrived) -> None:
        self._parts.connections.arrived()

    def _notice(self, notice: Notice) -> None:
        """Log what a core says, with the names of nodes instead of the ids of their folders."""
        text, view = notice.text, self.session.view
        for member in view.members:
            text = text.replace(member, name_of(view, member))
        self._parts.log.info(text)


def _is_handover(outcome: WriteOutcome) -> bool:
    """Return whether a partition was handed over to another master."""
    record, before = outcome.change.record, outcome.change.before.content.record
    has_begun = record.handover is not None and record.epoch > before.epoch
    return has_begun and outcome.kind is OutcomeKind.WRITTEN
