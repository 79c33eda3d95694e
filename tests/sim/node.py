"""What a simulated node must offer, and a single node that offers it.

`SimNode` is the seam: machines, faults and checkers know nothing else of a node. `SingleNode` is
one whole node of the product without replication: start, sessions, engine, commit groups, log,
store, merges and streams are the real ones. This module only decides when each step takes place.

Invariants of SingleNode
- a group is written at once and synced after a while; only then is it committed, are its answers
  released and its streams woken. So a power cut can come between any two of these;
- one group is under way at a time; what arrives meanwhile is the next one;
- after a failed sync the process ends without another answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from struct import Struct
from typing import TYPE_CHECKING, Any, Protocol
from zlib import crc32

from dcp.core.groups import GroupCycle, Job, Published, WriteGroup
from dcp.session.answers.held_answers import HeldAnswers
from dcp.session.kv.range_scans import RangeScans
from dcp.session.replication_port import ReplicationPort
from dcp.stream.hub import StreamHub
from dcp.wire.opcode import Opcode
from sim.checkers.falling import Change, falls
from sim.clock import Clock
from sim.cut_rounds import NodeCuts
from sim.facts import Committed, Facts, History, Mastership, fingerprint
from sim.manifests import changed, ids, max_ttls
from sim.network import Side
from sim.node_scrubber import NodeScrubber
from sim.plan import Plan
from sim.serving import ServedConnection
from sim.twin_pages import TwinEnv
from sim.upkeep import Upkeep
from sim.world import MS, SECOND, Host
from support.credentials import OpenDoor
from tests.memory.log_device import SegmentsOf
from vbucket.check.store_check import StoreCheck
from vbucket.engine.documents.expiry import Pager
from vbucket.engine.engine import Engine
from vbucket.engine.partition import BranchRefusedError, Hold, Partition, VbState
from vbucket.engine.read_view import Views
from vbucket.engine.recovery.startup import Startup, recover_node
from vbucket.log.device import (
    LogFullError,
    LogWriteError,
    SyncFailedError,
    UnknownFormatError,
)
from vbucket.log.device_files import FileLogDevice
from vbucket.log.record import LogDamagedError
from vbucket.model.entry import is_deleted, key_of, value_of
from vbucket.model.ids import DEFAULT_COLLECTION_PREFIX
from vbucket.store.environment import StoreDamagedError
from vbucket.store.records import CleanEnd, put_failover

if TYPE_CHECKING:
    from sim.machine import Machine

_SEQNO = Struct(">Q")
_TWO_NUMBERS = Struct(">QQ")
TICK_NS = 100 * MS
"""How often NOOPs and marks are looked after."""
LISTEN_NS = 30 * MS
"""How long a start takes before the port is open."""
ROOM_RETRY_NS = 50 * MS
"""Pause before a full disk is tried again."""


class StartRefusedError(Exception):
    """A node refuses to start on what its disks hold; the text says why."""


class StartFailedError(Exception):
    """A start has failed for a reason that may pass: a failing sync, a full disk."""


class SimNode(Protocol):
    """A node's process on a machine."""

    def ended(self) -> None:
        """The process has ended: nothing of it runs any more."""

    def stop(self) -> None:
        """Stop in order, as after SIGTERM. The machine ends the process then."""

    def branch(self, vb_id: int, share: float) -> bool:
        """Branch a partition at about this share of its seqnos, as an operator does. Return
        whether it was accepted.

        It records the excuse, and settles it once the branch is committed or cannot be any more.
        """

    def change_collections(self) -> None:
        """Create a collection, or drop one; for a node alone."""

    def history_floor(self, vb_id: int) -> int:
        """Return the history floor of a partition."""

    def compact(self) -> None:
        """Merge all there is, and compact every partition."""

    def damages(self) -> list[str]:
        """Return what is wrong with the data that it holds: counts, and what `verify` finds."""

    def serves(self, vb_id: int) -> bool:
        """Whether this node is the partition's master and serves it."""

    def high_seqno(self, vb_id: int) -> int:
        """Return the newest seqno of a partition, committed or not."""

    def committed_seqno(self, vb_id: int) -> int:
        """Return the last committed seqno of a partition."""

    def would_answer(self, vb_id: int) -> bool:
        """Whether it would answer a request for a partition now."""

    def is_quiet(self) -> bool:
        """Whether everything that was written is committed."""

    def documents(self) -> dict[bytes, bytes]:
        """Return the committed documents of the partitions that it serves, by logical key."""

    def documents_of(self, vb_id: int) -> dict[bytes, bytes]:
        """Return the documents of a partition, by logical key, whoever serves it."""

    def histories(self) -> list[History]:
        """Return what it holds of each partition."""


class Facades:
    """What sessions tell about the node."""

    version = "sim"
    bucket = "default"

    def bucket_config(self) -> bytes:
        return b'{"rev":1,"name":"default"}'

    def global_config(self) -> bytes:
        return b'{"rev":1}'

    def config_version(self) -> tuple[int, int]:
        return (1, 1)

    def address_of(self, vb_id: int) -> str:
        return ""

    def stats(self, group: bytes) -> list[tuple[str, str]] | None:
        return None


class SingleNode:
    """See the module."""

    def __init__(self, machine: Machine, plan: Plan, facts: Facts) -> None:
        self.host: Host = machine.host
        self.clock: Clock = machine.clock
        self.name = machine.name
        self._machine = machine
        self._world = machine.world
        self._plan = plan
        self._record = facts
        self.authenticator = OpenDoor()
        self.facts = Facades()
        self.pump_bytes = plan.pump_bytes
        self.connections: dict[ServedConnection, None] = {}
        self._has_begun = False
        self._is_kicked = False
        self._is_stopped = False
        draw = self._world.draw
        self.device = machine.open_device(self.device_type)
        startup = recover_node(
            machine.env,
            self.device,
            num_vbuckets=plan.partitions,
            durability="commit",
            draws=draw,
            draw_node_id=lambda: machine.folder_id,
            memtable_bytes_max=plan.memtable_bytes,
            item_cache_bytes=plan.item_cache_bytes,
        )
        self._startup: Startup = startup
        self.store, self.engine, self.writer = startup.store, startup.engine, startup.writer
        self.engine: Engine
        self.hub = StreamHub()
        self.scans = RangeScans(Views(self.engine, self.store), draw)
        self.groups = GroupCycle(self.engine, self.hub, syncs_groups=True)
        self._upkeep = Upkeep(self, machine.env, plan, facts)
        self._pager = Pager(self.engine, self.store) if plan.has_expiries else None
        self.scrubber: NodeScrubber | None = None
        if isinstance(machine.env, TwinEnv):
            self.scrubber = NodeScrubber(self, machine.env, machine.network, plan.scrub_ns)
        self.engine.begin_batch(self.clock.wall_ns())
        self._record_masterships()
        self.host.after(LISTEN_NS, self._listen)
        self.host.after(TICK_NS, self._tick)
        if plan.cut_consumers:
            self._begin_cuts()

    replication: ReplicationPort | None = None
    device_type: type[FileLogDevice] = FileLogDevice

    def held(self) -> HeldAnswers:
        """See Served."""
        return HeldAnswers(self.engine)

    def before_commands(self) -> None:
        """See Served."""

    def after_commands(self) -> None:
        """See Served."""

    def before_merge(self) -> None:
        """See Kept."""

    def met(self, vb_id: int | None) -> None:
        """See Served and Kept."""
        if self.scrubber is None or not self.scrubber.may_be_damaged:
            self._record.problems.append(
                f"{self.name}, vb {vb_id}: says that sound data is damaged"
            )
        else:
            self._record.met_damage += 1
            self.scrubber.met(vb_id)

    def mend_partition(self, vb_id: int) -> bool:
        """See Kept."""
        return self.scrubber is not None and self.scrubber.pieces.mend_partition(vb_id)

    def after_merge(self, tables: Mapping[str, Any], why: Mapping[int, str]) -> bool:
        """See Kept. Where a merge names damage, an operator puts the disk right, and the process
        starts again from what the store was before: no quarantine is left.
        """
        if self.scrubber is None:
            return True
        if not why:
            self.scrubber.merged()
            return True
        env = self._machine.env
        assert isinstance(env, TwinEnv)
        assert env.put_right(f"a merge names it: {why}", None if -1 in why else list(why)), why
        env._put_back(dict(tables))
        self._die()
        return False

    def refuses(self, why: str) -> None:
        """See Served. What comes late on a link that a newer one replaced ends it, as it should."""
        if why.endswith("has a newer link"):
            return
        self._record.refused.append(f"{self.name} ends the connection of a replica: {why}")

    def plans_floors(self, vb_id: int) -> bool:
        """See Kept: a node alone plans those of all partitions."""
        return True

    def compact(self) -> None:
        """See SimNode."""
        if self._has_begun:
            self._upkeep.compact_all()

    def _begin_cuts(self) -> None:
        NodeCuts(self)

    def _record_masterships(self) -> None:
        """A node alone is the master of all partitions."""
        for part in self.engine.partitions:
            self._record_mastership(part)

    def _record_mastership(self, part: Partition) -> None:
        now_ns, record = self._world.now_ns, self._record
        record.masterships.append(
            Mastership(
                now_ns,
                self.name,
                self.host.incarnation,
                part.vb_id,
                part.leader_epoch,
                part.vb_uuid,
                part.failover.current.seqno,
            )
        )  # fmt: skip
        record.committed.append(
            Committed(now_ns, self.name, part.vb_id, part.vb_uuid, part.committed_seqno)
        )
        self._enter(part)

    def _listen(self) -> None:
        """Begin to write, and open the port. Without room for a segment, serve reads only."""
        if not self._has_begun:
            try:
                self._startup.begin()
            except LogFullError as error:
                self.engine.refuse_writes(str(error), Hold.LOG_FULL)
                self.host.after(ROOM_RETRY_NS, self._listen)
            except SyncFailedError:
                self._die()
                return
            else:
                self._has_begun = True
                self.engine.refuse_writes("", Hold.LOG_FULL)
        if self.name not in self._machine.network.listeners:
            self._machine.network.listen(self.host, self._accept)

    def _accept(self, side: Side) -> None:
        ServedConnection(self, side)

    # -- what the log does -------------------------------------------------------------------------

    def kick(self) -> None:
        """See Served."""
        if not self._is_kicked and self.groups.job is None and self._has_begun:
            self._is_kicked = True
            self.host.after(0, self._begin_job)

    def _begin_job(self) -> None:
        self._is_kicked = False
        job = self.groups.next_job()
        if isinstance(job, WriteGroup):
            self.begun(job)
            self._write(job)
        elif job is not None:
            self._rotate(job)

    def begun(self, job: WriteGroup) -> None:
        """A group is about to be written; for nodes that tell others."""

    def _write(self, job: WriteGroup) -> None:
        try:
            self.writer.append(job.group.number, job.group.payload)
        except LogFullError as error:
            self.engine.refuse_writes(str(error), Hold.LOG_FULL)
            self.host.after(ROOM_RETRY_NS, self._write, job)
            return
        self.engine.refuse_writes("", Hold.LOG_FULL)
        self.host.after(self.sync_ns(), self._sync, job)

    def sync_ns(self) -> int:
        """Draw how long a sync takes."""
        plan = self._plan
        took_ns = self._world.between(plan.sync_min_ns, plan.sync_max_ns)
        return took_ns + self._machine.slow_sync_ns

    def _sync(self, job: WriteGroup) -> None:
        try:
            self.writer.sync()
        except SyncFailedError:
            self._die()
            return
        self._done(job)

    def _rotate(self, job: Job) -> None:
        try:
            self.writer.rotate()
        except LogFullError:
            self.host.after(ROOM_RETRY_NS, self._rotate, job)
            return
        except SyncFailedError:
            self._die()
            return
        self._done(job)
        self._upkeep.merge_soon()

    def _done(self, job: Job) -> None:
        self.published(self.groups.done(job))
        if self.groups.has_work:
            self.kick()

    def published(self, published: Published) -> None:
        """Record what is committed, and release the answers that waited for it."""
        group = published.group
        if group is not None:
            self._record_committed(group.high_seqnos)
        self._record_committed(published.vb_ids)
        self.settle(published.branched)
        for vb_id in published.branched:
            document = self.engine.partitions[vb_id].failover.to_document()
            with self._machine.env.write() as write:
                put_failover(write, vb_id, document)
        for connection in list(self.connections):
            if connection.held.batches:
                connection.release()

    def settle(self, vb_ids: Iterable[int]) -> None:
        """What could cut back these partitions has happened, or never will."""
        for vb_id in vb_ids:
            self._record.settle(self._world.now_ns, vb_id)

    def _record_committed(self, vb_ids: Iterable[int]) -> None:
        now_ns, record = self._world.now_ns, self._record.committed.append
        for vb_id in vb_ids:
            part = self.engine.partitions[vb_id]
            record(Committed(now_ns, self.name, vb_id, part.vb_uuid, part.committed_seqno))
            self._enter(part)

    def _enter(self, part: Partition) -> None:
        if part.state in {VbState.ACTIVE, VbState.FENCED}:
            with self._machine.env.as_written():
                self._record.ledger.committed(self._world.now_ns, part, self.engine.versions)

    # -- time and the end --------------------------------------------------------------------------

    def _tick(self) -> None:
        for connection in list(self.connections):
            connection.tick()
        if self.hub.purged_past:
            self._record.problems.append(f"{self.name}: a purge has passed a connected consumer")
            self.hub.purged_past = 0
        self._expire()
        try:
            if self.writer.has_unsynced_mark:
                self.writer.sync_mark()
        except SyncFailedError:
            self._die()
            return
        self.host.after(TICK_NS, self._tick)

    def _expire(self) -> None:
        """Let what is due expire, though nobody asks for it."""
        if self._pager is not None and self._has_begun:
            self.before_commands()
            is_done = self._pager.step(self.clock.wall_ns())
            if self._pager.damages and self.scrubber is None:
                self._record.problems += self._pager.damages
            if is_done and not self._pager.damages:
                self._record.problems += self._overdue()
            self._pager.damages.clear()
            self.after_commands()
            if self.engine.keyspace.has_pending:
                self.kick()

    def _die(self) -> None:
        """A sync has failed: end the process without another answer."""
        self._machine.exited()

    def ended(self) -> None:
        """See SimNode. What was committed until now is kept for the checkers."""
        self.connections.clear()
        self.settle(part.vb_id for part in self.engine.partitions)
        if self._has_begun:
            self.store.refresh()  # it may know a block as it was when its page was wrong
            self._record.histories += self.histories()

    def stop(self) -> None:
        """See SimNode."""
        if not self._has_begun or self.groups.has_work:
            return  # the machine ends it anyway: a stop that took too long
        try:
            self.writer.sync()
            self.writer.sync_mark()
        except SyncFailedError:
            return
        parts = self.engine.partitions
        positions = {part.vb_id: (part.high_seqno, part.vb_uuid) for part in parts}
        self.store.end(CleanEnd(self.writer.end, positions))
        self.device.close()

    # -- what operators and checkers ask -----------------------------------------------------------

    def branch(self, vb_id: int, share: float) -> bool:
        """See SimNode."""
        part = self.engine.partitions[vb_id]
        seqno = int(part.high_seqno * share)
        if not self._has_begun:
            return False
        try:
            self.engine.keyspace.branch(vb_id, seqno)
        except StoreDamagedError:
            self.met(vb_id)
            return False
        except BranchRefusedError:
            return False
        self._record.excuse(self._world.now_ns, vb_id, seqno, "branch")
        self.kick()
        return True

    def change_collections(self) -> None:
        """See SimNode."""
        if self._has_begun:
            keyspace = self.engine.keyspace
            try:
                keyspace.set_manifest(changed(self._world, keyspace.manifest, self._plan.max_ttl_s))
            except StoreDamagedError as error:
                self.met(error.vb_id)
                return
            self._record.collections = ids(keyspace.manifest)
            self._record.max_ttls |= max_ttls(keyspace.manifest)
            self.kick()

    def serves(self, vb_id: int) -> bool:
        """See SimNode."""
        return self._has_begun

    def committed_seqno(self, vb_id: int) -> int:
        """See SimNode."""
        return self.engine.partitions[vb_id].committed_seqno

    def would_answer(self, vb_id: int) -> bool:
        """See SimNode."""
        return self.serves(vb_id)

    def high_seqno(self, vb_id: int) -> int:
        """See SimNode."""
        return self.engine.partitions[vb_id].high_seqno

    def history_floor(self, vb_id: int) -> int:
        """See SimNode."""
        return self.engine.partitions[vb_id].history_floor

    def is_quiet(self) -> bool:
        """See SimNode."""
        return not self.groups.has_work

    def documents(self) -> dict[bytes, bytes]:
        """See SimNode."""
        found: dict[bytes, bytes] = {}
        for part in self.engine.partitions:
            if self.serves(part.vb_id):
                found |= self.documents_of(part.vb_id)
        return found

    def documents_of(self, vb_id: int) -> dict[bytes, bytes]:
        """See SimNode."""
        with self._machine.env.as_written():
            entries = self._documents_of(self.engine.partitions[vb_id])
            return {logical_key(key_of(entry)): value_of(entry) for entry in entries}

    def _documents_of(self, part: Partition) -> Iterator[bytes]:
        """Yield the newest version of each document. One that is due exists until it expires. A
        collection counts before the manifest has it, too: a replica gets its changes first.
        """
        collections = self.engine.keyspace.manifest.collections | part.tally.collections.keys()
        for key in self._plan.stored_keys_of(part.vb_id, filter(None, collections)):
            entry = part.newest.get(key)
            if entry is None:
                entry = self.engine.versions.entry_below(part, key)
            if entry and not is_deleted(entry):
                yield entry

    def damages(self) -> list[str]:
        """See SimNode."""
        return [*self._wrong_counts(), *self._findings()]

    def _overdue(self) -> Iterator[str]:
        """Tell which documents are due, though the pager has looked for them."""
        engine, now_s = self.engine, self.clock.wall_ns() // SECOND
        if not engine.keyspace.memtables.has_room or engine.write_refusal:
            return
        if self.scrubber is not None and self.scrubber.may_be_damaged:
            return  # what could not be read is not looked for again until the next merge
        with self._machine.env.as_written():
            live = self._record.max_ttls.keys() & engine.keyspace.manifest.collections.keys()
            for stored, key in self._plan.expiring(sorted(live)):
                part = engine.partitions[self._plan.vb_of(key)]
                if part.state == VbState.ACTIVE and not part.holds:
                    meta = engine.newest_meta(part.vb_id, stored)
                    is_there = meta is not None and meta.opcode == Opcode.DCP_MUTATION
                    if meta is not None and is_there and 0 < meta.expiry <= now_s:
                        yield f"{self.name}, vb {part.vb_id}: {key!r} is due, and not paged out"

    def _wrong_counts(self) -> Iterator[str]:
        for part in self.engine.partitions:
            found = sum(1 for _ in self._documents_of(part))
            if found != part.item_count:
                yield (
                    f"{self.name}, vb {part.vb_id}: {found} documents, and it counts "
                    f"{part.item_count}"
                )

    def _findings(self) -> Iterator[str]:
        check = StoreCheck(
            self._machine.env.snapshot(), SegmentsOf(self.device),
            vb_ids=range(self._plan.partitions),
        )  # fmt: skip
        for finding in check.findings():
            if not finding.is_harmless:
                yield f"{self.name}: {finding.line()}"

    def histories(self) -> list[History]:
        """See SimNode."""
        with self._machine.env.as_written():
            return [self._history(part) for part in self.engine.partitions]

    def _history(self, part: Partition) -> History:
        end = part.committed_seqno
        entries: dict[int, int] = {}
        changes: list[Change] = []
        seqno = 1
        while seqno <= end:
            batch = self.engine.versions.frames(part.vb_id, seqno, end, bytes(4), (), 1 << 30)
            for frame in batch.frames:
                change = change_of(frame)
                changes.append(change)
                # A replica has purged deletions on any seqnos (vbucket.engine.resync).
                if not (change.is_deletion and change.seqno <= part.purge_seqno):
                    entries[change.seqno] = fingerprint(change.cas, crc32(frame))
            seqno = batch.next_seqno
        now_ns = self._world.now_ns
        versions = tuple(part.failover.pairs())
        self._record.problems += falls(f"{self.name}, vb {part.vb_id}", changes, part.purge_seqno)
        return History(now_ns, self.name, part.vb_id, versions, end, entries)


def logical_key(stored: bytes) -> bytes:
    """Return a key as clients use it; in a collection, with its prefix."""
    return stored[1:] if stored.startswith(DEFAULT_COLLECTION_PREFIX) else stored


def change_of(frame: bytes) -> Change:
    """Return what a stored frame of DCP says about a change."""
    key_at = 24 + frame[4]
    key = frame[key_at : key_at + int.from_bytes(frame[2:4], "big")]
    seqno, rev_seqno = _TWO_NUMBERS.unpack_from(frame, 24)
    opcode, cas = frame[1], _SEQNO.unpack_from(frame, 16)[0]
    is_event = opcode == Opcode.DCP_SYSTEM_EVENT
    is_deletion = opcode in {Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION}
    return Change(key, seqno, 0 if is_event else rev_seqno, cas, is_deletion)


def single(
    plan: Plan, facts: Facts, node_type: type[SingleNode] = SingleNode
) -> Callable[[Machine], SingleNode]:
    """Return how machines start a SingleNode."""

    def start(machine: Machine) -> SingleNode:
        try:
            return node_type(machine, plan, facts)
        except (LogDamagedError, UnknownFormatError, StoreDamagedError) as error:
            raise StartRefusedError(str(error)) from error
        except (LogWriteError, SyncFailedError) as error:
            raise StartFailedError(str(error)) from error

    return start
