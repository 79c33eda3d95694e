"""What operators, and testers of consumers, do to a running node.

The admin interface calls it. Changes of partitions return when they are durable. Changes of streams
and faults act at once and are not stored.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from dcp.core.groups import GroupCycle
from dcp.server.net.connections import Connections, OpenConnection
from dcp.server.observe.elapsed import elapsed_ns
from dcp.server.observe.event_log import EventLog
from dcp.server.observe.meter import Meter
from dcp.server.operate.replicated_branches import BranchUnknownError, ReplicatedBranches
from dcp.server.operate.reports import (
    BranchManyReport,
    BranchRefusal,
    BranchReport,
    ExplainReport,
    FaultRow,
    MendReport,
    PurgeReport,
    StateReport,
    StreamLimit,
    StreamRow,
    VersionAnswer,
)
from dcp.server.storage.compaction_schedule import Compaction, CompactionReport
from dcp.server.storage.merging import Merging
from dcp.server.storage.waiters import CommitWaiters
from dcp.session.faults import Fault, FaultTable
from dcp.stream.active_stream import ActiveStream
from dcp.stream.producer import Producer
from dcp.stream.stream_limits import RateLimit, StreamChoice
from dcp.wire.message import EndReason
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.rules.explain import explain
from failover.rules.rollback import Question
from vbucket.engine import lifecycle
from vbucket.engine.engine import Engine
from vbucket.engine.mending import Mending
from vbucket.engine.partition import Branch, BranchRefusedError, FloorError, Partition, VbState
from vbucket.store.environment import StoreDamagedError

MERGE_WAIT_S: Final = 1.0
"""How long to wait for a merge before the memtable is checked again."""


class WritesRefusedError(Exception):
    """Nothing can change while writes are refused; the text says why."""


class _Found(NamedTuple):
    connection: OpenConnection
    producer: Producer
    stream: ActiveStream


class Operations:
    """See the module."""

    def __init__(
        self,
        engine: Engine,
        connections: Connections,
        merging: Merging,
        compaction: Compaction,
        commits: CommitWaiters,
        faults: FaultTable,
        groups: GroupCycle,
        meter: Meter,
        log: EventLog,
        *,
        copies: ReplicatedBranches | None = None,
    ) -> None:
        """`copies`: what branches partitions that have copies; None on a node alone."""
        self._engine = engine
        self._connections = connections
        self._merging = merging
        self._compaction = compaction
        self._commits = commits
        self._faults = faults
        self._groups = groups
        self._meter = meter
        self._log = log
        self._copies = copies

    # -- partitions ------------------------------------------------------------------------------

    async def branch(self, vb_id: int, at_seqno: int) -> BranchReport:
        """Branch a partition's history, on all its copies. Raises BranchRefusedError,
        BranchUnknownError, WritesRefusedError.
        """
        self._refuse_while_full()
        if self._copies is not None:
            return await self._copies.branch(vb_id, at_seqno)
        branch = lifecycle.branch(self._engine, vb_id, at_seqno)
        await self._durable("branch", branch)
        return _branch_report(branch)

    async def branch_or_zero(self, vb_id: int, at_seqno: int) -> BranchReport:
        """Branch at a seqno, or at 0 if the history does not reach back that far; then "reason"
        says why.

        Raises BranchRefusedError, BranchUnknownError, WritesRefusedError.
        """
        try:
            return await self.branch(vb_id, at_seqno)
        except FloorError as error:
            return msgspec.structs.replace(await self.branch(vb_id, 0), reason=str(error))

    async def branch_many(
        self, vb_ids: Sequence[int], at_seqno: int | None, fraction: float
    ) -> BranchManyReport:
        """Branch partitions together: each at a seqno, or (None) so that `fraction` of its changes
        is undone, the newest. One that is refused changes nothing for the others.

        Raises WritesRefusedError.
        """
        self._refuse_while_full()

        async def one(vb_id: int) -> BranchReport | BranchRefusal:
            high_seqno = self._engine.partitions[vb_id].high_seqno
            undone = math.ceil(high_seqno * fraction)
            try:
                return await self.branch(
                    vb_id, high_seqno - undone if at_seqno is None else at_seqno
                )
            except (BranchRefusedError, BranchUnknownError, StoreDamagedError) as error:
                return BranchRefusal(vb_id, str(error))

        chosen = dict.fromkeys(vb_ids)
        if self._copies is None:  # each is undone at once here: others are answered in between
            answers = [await one(vb_id) for vb_id in chosen]
        else:
            answers = await asyncio.gather(*map(one, chosen))
        return BranchManyReport(
            [answer for answer in answers if isinstance(answer, BranchReport)],
            [answer for answer in answers if isinstance(answer, BranchRefusal)],
        )

    async def failover(self, vb_id: int, lost_seqnos: int) -> BranchReport:
        """Simulate a promotion: a new version begins, and streams end with STATE_CHANGED.

        Raises BranchRefusedError, HasCopiesError, WritesRefusedError.
        """
        self._refuse_while_full()
        branch = lifecycle.failover(self._engine, vb_id, lost_seqnos)
        self._groups.end_reasons[vb_id] = EndReason.STATE_CHANGED
        self._meter.failovers += 1
        await self._durable("failover", branch)
        return _branch_report(branch)

    async def set_state(self, vb_id: int, state: VbState) -> StateReport:
        """Set the state of a partition. If it becomes active, it gets a new version.

        Raises HasCopiesError, WritesRefusedError.
        """
        self._refuse_while_full()
        before = self._engine.partitions[vb_id].state
        branch = lifecycle.set_state(self._engine, vb_id, state)
        if branch is not None:
            self._groups.end_reasons[vb_id] = EndReason.STATE_CHANGED
        await self._commits.until_partition(vb_id)
        self._log.info("state", vb_id=vb_id, before=before.name.lower(), now=state.name.lower())
        part = self._engine.partitions[vb_id]
        return StateReport(vb_id, state.name.lower(), before.name.lower(), str(part.vb_uuid))

    async def purge(self, vb_id: int, upto_seqno: int | None) -> PurgeReport:
        """Purge deletions; the next compaction drops them.

        Raises HasCopiesError, PurgeRefusedError, WritesRefusedError.
        """
        self._refuse_while_full()
        await self._commits.until_partition(vb_id)  # what was written before can be purged, too
        purge_seqno = lifecycle.purge(self._engine, vb_id, upto_seqno)
        await self._commits.until_partition(vb_id)
        self._log.info("purge", vb_id=vb_id, purge_seqno=purge_seqno)
        high_seqno = self._engine.partitions[vb_id].high_seqno
        return PurgeReport(vb_id, purge_seqno, high_seqno)

    async def mend_cas(self, vb_id: int) -> MendReport:
        """Bring a partition's CAS back to the clock, while writes continue.

        Raises MendingRefusedError, StoreDamagedError, WritesRefusedError.
        """
        self._refuse_while_full()
        mending = Mending(self._engine, vb_id, time.time_ns())
        while not mending.step(time.time_ns()):
            self._commits.kick()
            await asyncio.sleep(0)
            while not self._engine.keyspace.memtables.has_room:
                self._refuse_while_full()
                await self._merging.wait(MERGE_WAIT_S)
        await self._commits.until_partition(vb_id)
        report = MendReport(
            vb_id,
            documents=mending.documents,
            deletions=mending.deletions,
            cas_before=str(mending.before_cas),
            cas=str(self._engine.partitions[vb_id].max_cas),
        )
        self._log.info("CAS mended", **msgspec.structs.asdict(report))
        return report

    async def compact(
        self, vb_ids: Sequence[int], history_s: float | None, purge_age_s: float | None
    ) -> CompactionReport:
        """Compact partitions now. Windows that are None are those of the settings.

        Raises CompactionError.
        """
        windows = self._compaction.windows
        if history_s is not None:
            windows = windows._replace(history_ns=int(history_s * 1e9))
        if purge_age_s is not None:
            windows = windows._replace(purge_age_ns=int(purge_age_s * 1e9))
        report = await self._compaction.compact(vb_ids, windows)
        self._log.info("compacted on command", **msgspec.structs.asdict(report))
        return report

    async def explain(self, vb_id: int, question: Question) -> ExplainReport:
        """Say how a stream request would be answered, and why."""
        await self._commits.until_partition(vb_id)
        part = self._engine.partitions[vb_id]
        told = explain(question, part.failover, part.high_seqno, part.purge_seqno)
        return ExplainReport(
            vb_id,
            answer=told.answer,
            rollback_seqno=told.rollback_seqno,
            reason=told.reason,
            high_seqno=told.high_seqno,
            purge_seqno=told.purge_seqno,
            failover_log=[
                VersionAnswer(str(row.vb_uuid), row.from_seqno, row.upto_seqno, row.is_asked_for)
                for row in told.table
            ],
        )

    def _refuse_while_full(self) -> None:
        if self._engine.write_refusal:
            raise WritesRefusedError(self._engine.write_refusal)

    async def _durable(self, event: str, branch: Branch) -> None:
        await self._commits.until_partition(branch.vb_id)
        self._log.info(event, vb_id=branch.vb_id, seqno=branch.seqno, undone=branch.undone_seqnos)

    # -- streams ---------------------------------------------------------------------------------

    def streams(self, choice: StreamChoice) -> list[StreamRow]:
        """Return the state of the chosen streams."""
        now_ns = elapsed_ns()
        parts = self._engine.partitions
        return [
            StreamRow(
                name=_name(found.producer),
                peer=found.connection.logins.peer.address,
                vb=found.stream.vb_id,
                state=found.producer.phase_of(found.stream),
                seqno=found.stream.next_seqno - 1,
                high_seqno=parts[found.stream.vb_id].committed_seqno,
                lag_items=lag_of(found.stream, parts[found.stream.vb_id].committed_seqno),
                vb_uuid=str(version_at(parts[found.stream.vb_id], found.stream.next_seqno - 1)),
                asked_vb_uuid=str(found.stream.request.vb_uuid),
                asked_seqno=found.stream.request.start_seqno,
                unacked_bytes=found.producer.unacked_bytes,
                window_bytes=found.producer.window_bytes,
                bytes_per_s=None if (rate := found.stream.rate) is None else rate.bytes_per_s,
                age_s=round(max(0, now_ns - (found.stream.opened_ns or now_ns)) / 1e9, 1),
            )
            for found in self._chosen(choice)
        ]

    def stream_limits(self) -> list[StreamLimit]:
        """Return the limits of streams that are open and to come."""
        return [
            StreamLimit(choice.name, choice.vb_id, rate)
            for choice, rate in self._groups.hub.limits.rows()
        ]

    def end_streams(self, choice: StreamChoice, reason: EndReason) -> int:
        """End streams with STREAM_END; return how many."""
        chosen = list(self._chosen(choice))
        for found in chosen:
            found.producer.end(found.stream, reason)
        self._note("streams ended", choice, len(chosen), reason=reason.name.lower())
        return len(chosen)

    def limit_streams(self, choice: StreamChoice, bytes_per_s: int | None) -> int:
        """Slow streams down, stop them (0) or remove the limit (None); return how many are open.

        A speed limit and its removal also apply to streams that are opened later. A stop is for
        the open streams only: it stands for a stream that hangs, and its consumer may ask again.
        Raises TooManyLimitsError.
        """
        if bytes_per_s != 0:
            self._groups.hub.limits.set(choice, bytes_per_s)
        chosen = list(self._chosen(choice))
        for found in chosen:
            rate = None if bytes_per_s is None else RateLimit(bytes_per_s)
            found.producer.limit(found.stream, rate)
        self._note("streams limited", choice, len(chosen), bytes_per_s=bytes_per_s)
        return len(chosen)

    def drop_connections(self, choice: StreamChoice) -> int:
        """Cut the connections that have a chosen stream; return how many."""
        chosen = {found.connection for found in self._chosen(choice)}
        self._note("connections dropped", choice, len(chosen))
        for connection in chosen:
            connection.abort("dropped by an operator")
        return len(chosen)

    def _chosen(self, choice: StreamChoice) -> Iterator[_Found]:
        for connection in self._connections:
            producer = connection.session.state.producer
            if producer is None or choice.name not in {None, _name(producer)}:
                continue
            for stream in producer.streams():
                if choice.vb_id in {None, stream.vb_id}:
                    yield _Found(connection, producer, stream)

    def _note(self, event: str, choice: StreamChoice, count: int, **fields: object) -> None:
        self._log.info(event, name=choice.name, vb_id=choice.vb_id, count=count, **fields)

    # -- faults ----------------------------------------------------------------------------------

    def faults(self) -> list[FaultRow]:
        """Return the active rules."""
        return [_fault_row(fault) for fault in self._faults.rules]

    def set_fault(
        self,
        *,
        opcode: Opcode | None,
        vb_id: int | None,
        status: Status | None,
        delay_ms: int,
        disconnects: bool,
        count: int | None,
        probability: float,
        seed: int | None,
        rollback_seqno: int,
    ) -> FaultRow:
        """Set a rule. With the same seed it matches the same requests. Raises FaultError."""
        fault = self._faults.add(
            draws=random.Random(seed),  # noqa: S311 - not for secrets
            opcode=opcode,
            vb_id=vb_id,
            status=status,
            delay_ms=delay_ms,
            disconnects=disconnects,
            count=count,
            probability=probability,
            rollback_seqno=rollback_seqno,
        )
        row = _fault_row(fault)
        self._log.info("fault set", **msgspec.structs.asdict(row))
        return row

    def clear_faults(self, fault_id: int | None = None) -> int:
        """Remove one rule, or all; return how many there were."""
        cleared = self._faults.clear(fault_id)
        if cleared:
            self._log.info("faults cleared", fault=fault_id, count=cleared)
        return cleared


def lag_of(stream: ActiveStream, committed_seqno: int) -> int:
    """Return how many seqnos a stream still has to send."""
    return max(0, min(committed_seqno, stream.end_seqno) - (stream.next_seqno - 1))


def version_at(part: Partition, seqno: int) -> int:
    """Return the vb_uuid of the version in which a seqno lies."""
    entries = part.failover.entries
    return next((each.vb_uuid for each in entries if each.seqno <= seqno), entries[-1].vb_uuid)


def _name(producer: Producer) -> str:
    return producer.name.decode("utf-8", "replace")


def _branch_report(branch: Branch) -> BranchReport:
    current = branch.failover.current
    return BranchReport(
        vb=branch.vb_id,
        vb_uuid=str(current.vb_uuid),
        seqno=current.seqno,
        undone_seqnos=branch.undone_seqnos,
        undone_keys=branch.undone_keys,
    )


def _fault_row(fault: Fault) -> FaultRow:
    return FaultRow(
        id=fault.fault_id,
        opcode=None if fault.opcode is None else fault.opcode.name,
        vb=fault.vb_id,
        status=None if fault.status is None else fault.status.name,
        delay_ms=fault.delay_ms,
        disconnect=fault.disconnects,
        count=fault.count,
        probability=fault.probability,
        rollback_seqno=fault.rollback_seqno,
        met=fault.met,
    )
