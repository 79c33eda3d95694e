"""Faults of replication that can be put in on purpose, to see that the checks find them.

Each replaces a rule of the product for the time of a run (`planted`), or makes nodes of another
type. The product has no switch for them: names are replaced where the product's
modules have imported them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from dcp.core.groups import Job, WriteGroup
from dcp.session.answers import held_answers
from dcp.session.answers import marks as answer_marks
from dcp.session.answers.held_answers import HeldAnswers
from dcp.stream.hub import StreamHub
from dcp.wire.message import StreamRequest
from dcp.wire.status import Status
from failover.coordinator.plans import plan_steps
from failover.coordinator.plans.placement import Chain
from failover.coordinator.record_writer import OutcomeKind, RecordWriter, WriterEffect
from failover.coordinator.records import StoredPartition
from failover.coordinator.seen_records import SeenRecords
from failover.coordinator.view import ClusterView, Stored
from failover.metadata.metastore import OutcomeUnknown, StoreResult
from failover.replication import link, master, mastership
from failover.replication.feed import ReplicaFeed
from failover.replication.master import Master
from failover.replication.mastership import Mastership
from failover.replication.messages import FORMAT_OLDEST, ReplicaPosition
from failover.replication.pace import FillPace
from failover.replication.replica import DroppedCopies, Replica
from failover.rules import election, isr, promotion
from failover.rules.history import FailoverLog
from failover.rules.isr import Acknowledgement, Candidate, Sender
from failover.rules.promotion import FirstStep
from failover.rules.replication_record import ReplicationRecord, add_copy, drop_copies, expand
from failover.rules.write_answer import WriteState
from sim.bugs import BUGS
from sim.cluster_node import ClusterNode
from sim.damage_bugs import DAMAGE_BUGS
from sim.lock_bugs import LOCK_BUGS
from sim.machine import Machine
from sim.metadata_bugs import METADATA_BUGS
from sim.network import Side
from sim.plan import MOVE_NODES
from sim.planting import Bug, Replaced, all_replaced, answering, one
from sim.serving import ServedConnection
from sim.wide_bugs import WIDE_BUGS
from vbucket.engine.keyspace import Keyspace
from vbucket.engine.partition import VbState
from vbucket.engine.replicated import ReplicatedChange
from vbucket.model.manifest import Manifest, events_between

# -- answers ---------------------------------------------------------------------------------------


def _done_with_the_watermark(state: WriteState, seqno: int) -> bool:
    return state.hw_seqno >= seqno


# -- the high watermark ----------------------------------------------------------------------------


def _nothing_unsynced(_following: Replica, _vb_id: int) -> int:
    """A replica acknowledges a message when it has applied it, before the sync."""
    return 0


_apply_changes = Replica.apply_changes
_apply_group = Replica.apply_group
_committed = Replica.committed


def _group_is_synced(following: Replica, changes: Sequence[ReplicatedChange]) -> int:
    """The same for whole groups."""
    _apply_changes(following, changes)
    return 0


def _whole_is_synced(
    following: Replica,
    payload: bytes,
    highs: dict[int, int],
    epochs: dict[int, int],
    body_bytes_max: int,
) -> tuple[int, dict[int, int]] | None:
    """The same for those that the loop in C applies."""
    applied = _apply_group(following, payload, highs, epochs, body_bytes_max)
    return None if applied is None else (0, applied[1])


def _told_early(following: Replica, seqnos: Mapping[int, int], *, is_synced: bool) -> None:
    """What is acknowledged need not be synced, so it is committed here when it is."""
    _committed(following, seqnos, is_synced=False)


_step_down = Master.step_down
_begin = Master.begin


def _step_down_remembering(core: Master, vb_id: int, why: str) -> None:
    former = vars(core).setdefault("former", {})[vb_id] = core.masterships[vb_id]
    core.watermarks.note_acknowledged(former)
    _step_down(core, vb_id, why)


def _begin_with_former(core: Master, vb_id: int, *args: Any, **named: Any) -> Any:
    """A master goes on with what members acknowledged when it was master before."""
    result = _begin(core, vb_id, *args, **named)
    former: Mastership | None = vars(core).get("former", {}).get(vb_id)
    if former is not None:
        core.masterships[vb_id]._acknowledged.update(former._acknowledged)
    return result


def _watermark_of_any_epoch(
    hw_seqno: int,
    epoch: int,
    members: Collection[str],
    acknowledged: Mapping[str, Acknowledgement],
    min_in_sync: int,
    sender: Sender | None,
) -> int:
    present = {
        member: Acknowledgement(epoch, given.synced_seqno) for member, given in acknowledged.items()
    }
    return isr.high_watermark(hw_seqno, epoch, members, present, min_in_sync, sender)


def _asked_set(
    confirmed: frozenset[str], asked: frozenset[str] | None, _parting: frozenset[str]
) -> frozenset[str]:
    """Who leaves does not count from the moment the master asks."""
    return confirmed if asked is None else asked


def _joins_at_watermark(
    candidate: Candidate, epoch: int, hw_seqno: int, _epoch_start_seqno: int
) -> bool:
    """A replica joins at the HW that its master knows, which is too low after a failover."""
    given = candidate.acknowledgement
    return given.epoch == epoch and given.synced_seqno >= hw_seqno


# -- epochs ----------------------------------------------------------------------------------------

_position = Replica.position


def _cut_to_watermark(
    core: Replica, vb_id: int, epoch: int
) -> tuple[StreamRequest, ReplicaPosition]:
    """A replica gives up what is above the HW that it knows, before it follows a new master."""
    part = core._engine.partitions[vb_id]
    if epoch > part.leader_epoch and part.committed_seqno < part.high_seqno:
        core.roll_back(vb_id, epoch, part.committed_seqno, part.committed_seqno)
    return _position(core, vb_id, epoch)


def _no_version(record: ReplicationRecord, log: FailoverLog, end_seqno: int) -> FirstStep:
    """A failover begins no version."""
    first = promotion.first_step(record, log, end_seqno)
    return first if first.branch_seqno is not None else FirstStep(None, None, first.committed_seqno)


def _takes_over_unchecked(handover: object, _log: FailoverLog, _end_seqno: int) -> bool:
    return handover is not None


_next_record = Master._next_record


def _hands_over_early(
    core: Master, of: Mastership, *, may_hand_over: bool = False
) -> ReplicationRecord | None:
    """A master hands over without waiting until all is committed. Either check alone is enough to
    keep the histories equal, so the bug leaves out both.
    """
    part, committed_seqno = of.part, of.part.committed_seqno
    part.committed_seqno = part.high_seqno
    try:
        return _next_record(core, of, may_hand_over=may_hand_over)
    finally:
        part.committed_seqno = committed_seqno


_written = RecordWriter._written


def _unknown_is_not_written(
    writer: RecordWriter, now_ns: int, result: StoreResult
) -> list[WriterEffect]:
    """A write without an answer is taken for one that did not happen; the next tick repeats it."""
    if isinstance(result, OutcomeUnknown):
        return writer._end(OutcomeKind.NOT_WRITTEN)
    return _written(writer, now_ns, result)


# -- the metadata store goes back ------------------------------------------------------------------


class ForgetsSeen(ClusterNode):
    """Its folder forgets with each process what records it has seen, and what it has told."""

    def __init__(self, machine: Machine, *args: Any) -> None:
        machine.seen = None
        super().__init__(machine, *args)


_note_partition = SeenRecords.note_partition


def _noted_by_epoch(seen: SeenRecords, vb_id: int, stored: Stored[StoredPartition]) -> bool:
    """A record is older than one that was seen if its epoch is: a change of the in-sync set does
    not count.
    """
    known = seen.record(vb_id)
    if known is not None and known.epoch == stored.content.record.epoch:
        seen._partitions.pop(vb_id)
    return _note_partition(seen, vb_id, stored)


# -- clients and consumers -------------------------------------------------------------------------


class ShowsSynced(ServedConnection):
    """Its streams show what is synced."""

    def _pump(self) -> None:
        if isinstance(self.state.sender, ReplicaFeed):
            super()._pump()
            return
        partitions = self._node.engine.partitions
        committed = [part.committed_seqno for part in partitions]
        for part in partitions:
            part.committed_seqno = max(part.committed_seqno, part.synced_seqno)
        try:
            super()._pump()
        finally:
            for part, seqno in zip(partitions, committed, strict=True):
                part.committed_seqno = seqno


class StreamsSynced(ClusterNode):
    """See ShowsSynced. Its streams are woken by each synced group."""

    def _accept(self, side: Side) -> None:
        ShowsSynced(self, side)

    def _done(self, job: Job) -> None:
        super()._done(job)
        if isinstance(job, WriteGroup):
            self.hub.committed(job.group.high_seqnos)


def _own_format(_newest: int, _oldest: int, own: int) -> int:
    """A master's node answers every greeting with its own newest format."""
    return own


def _at_once(_last_confirmed_ns: int, *, was_handed_over: bool) -> int:
    return 0


_depose = HeldAnswers.depose


def _depose_elsewhere(held: HeldAnswers, vb_ids: Iterable[int]) -> None:
    """Applied writes of a deposed master get NOT_MY_VBUCKET, without an error text: where one would
    stand, clients look for a map.
    """
    for batch in held.batches:
        if batch.marked is not None:
            batch.marked._error_body = lambda _text, _status: b""
    with all_replaced((Replaced(answer_marks, "AMBIGUOUS", Status.NOT_MY_VBUCKET),)):
        _depose(held, vb_ids)


def _keep_streams(_hub: StreamHub, _vb_id: int) -> None:
    """A partition that is fenced keeps its streams."""


# -- moves -----------------------------------------------------------------------------------------


def _outside_chain(
    _view: ClusterView, record: ReplicationRecord, chain: Chain, outside: Sequence[str]
) -> list[str]:
    """What is not wanted goes as soon as all that is wanted was added, filled or not."""
    stays = {record.master, record.wanted_master}
    return [copy for copy in outside if copy not in stays and set(chain) <= {*record.copies}]


def _dropped_unchecked(
    record: ReplicationRecord, members: Iterable[str], *, in_sync_min: int
) -> ReplicationRecord:
    return drop_copies(record, members, in_sync_min=0)


def _added_in_sync(record: ReplicationRecord, member: str) -> ReplicationRecord:
    """A copy that is added counts as full: the member may have been one before."""
    return expand(add_copy(record, member), (member,))


def _nothing_to_empty(_dropped: DroppedCopies, _vb_id: int, *, holds_copy: bool) -> None:
    """A member keeps what it has of partitions that it does not hold."""


_take_record = Mastership.take_record


def _take_record_only(
    mastership: Mastership, record: ReplicationRecord, revision: int = 0
) -> set[str]:
    """What a member acknowledged counts for the copy that it gets later."""
    acknowledged, levels = dict(mastership._acknowledged), dict(mastership._caught_up_ns)
    _take_record(mastership, record, revision)
    mastership._acknowledged, mastership._caught_up_ns = acknowledged, levels
    return set()


# -- collections -----------------------------------------------------------------------------------


_set_manifest = Keyspace.set_manifest


def _fenced_are_told(keyspace: Keyspace, manifest: Manifest) -> None:
    """A partition that is fenced gets system events, too."""
    events = events_between(keyspace.manifest, manifest)
    _set_manifest(keyspace, manifest)
    for part in keyspace.partitions:
        if part.state == VbState.FENCED:
            for event in events:
                keyspace._tell(part, event)


CLUSTER_BUGS: Final[dict[str, Bug]] = {
    "hw-counts-received": Bug(
        "the HW counts what was received, not synced",
        (
            Replaced(Replica, "unsynced_group", _nothing_unsynced),
            Replaced(Replica, "apply_changes", _group_is_synced),
            Replaced(Replica, "apply_group", _whole_is_synced),
            Replaced(Replica, "committed", _told_early),
        ),
    ),
    "old-epoch-counts": Bug(
        "an acknowledgement of an earlier epoch counts",
        (
            Replaced(Master, "step_down", _step_down_remembering),
            Replaced(Master, "begin", _begin_with_former),
            Replaced(mastership, "high_watermark", _watermark_of_any_epoch),
        ),
    ),
    "shrink-counts-early": one(
        "a shrink counts before it is confirmed", mastership, "effective_isr", _asked_set
    ),
    "joins-early": one(
        "a replica joins before the HW reached the epoch's start",
        mastership,
        "may_join",
        _joins_at_watermark,
    ),
    "truncates-to-hw": one("a replica truncates to the HW", Replica, "position", _cut_to_watermark),
    "no-version": one("a failover makes no version", master, "first_step", _no_version),
    "handover-unchecked": Bug(
        "a handover is taken unchecked",
        (
            Replaced(promotion, "takes_over", _takes_over_unchecked),
            Replaced(Master, "_next_record", _hands_over_early),
        ),
    ),
    "durable-by-few": one(
        "a durable write is answered although fewer than a majority of the copies are in sync",
        held_answers,
        "is_done",
        _done_with_the_watermark,
    ),
    "old-record-believed": one(
        "somebody is elected by a record that may be older than another one",
        election,
        "must_speak",
        answering(frozenset()),
        act="gone_back",
    ),
    "forgets-seen": Bug(
        "a node forgets at its restart what records it has seen",
        node=ForgetsSeen,
        act="gone_back",
    ),
    "unseen-shrink": one(
        "a change of an in-sync set does not count as seen",
        SeenRecords,
        "note_partition",
        _noted_by_epoch,
        act="gone_back",
    ),
    "streams-show-synced": Bug("streams show what is synced", node=StreamsSynced),
    "reads-unconfirmed": one(
        "reads need no confirmation", mastership, "may_answer_reads", answering(True)
    ),
    "promoted-at-once": one(
        "a promoted replica does not wait for its own confirmation to lapse",
        master,
        "serves_from_ns",
        _at_once,
    ),
    "applied-not-mine": one(
        "an applied write is answered NOT_MY_VBUCKET", HeldAnswers, "depose", _depose_elsewhere
    ),
    "unknown-sent-again": one(
        "a transaction with an unknown outcome is sent again",
        RecordWriter,
        "_written",
        _unknown_is_not_written,
    ),
    "deposed-keeps-streams": one(
        "a deposed master keeps its streams open", StreamHub, "fenced", _keep_streams
    ),
    "drops-early": Bug(
        "a copy is dropped before the new one is in sync",
        (
            Replaced(plan_steps, "_surplus", _outside_chain),
            Replaced(plan_steps, "drop_copies", _dropped_unchecked),
        ),
        nodes=MOVE_NODES,
    ),
    "added-is-full": one(
        "a copy that is added is taken for full",
        plan_steps,
        "add_copy",
        _added_in_sync,
        nodes=MOVE_NODES,
    ),
    "not-emptied": one(
        "a copy that was dropped is not emptied",
        DroppedCopies,
        "note",
        _nothing_to_empty,
        nodes=MOVE_NODES,
    ),
    "old-copy-counts": Bug(
        "an acknowledgement of an earlier copy counts",
        (
            Replaced(Mastership, "take_record", _take_record_only),
            Replaced(FillPace, "take_join", answering(True)),  # else it hardly ever joins in time
        ),
        nodes=MOVE_NODES,
    ),
    "older-is-told": Bug(
        "a replica tells a master of the format before what only the newest format has",
        (Replaced(link, "HELD_FORMAT", FORMAT_OLDEST),),
    ),
    "newest-is-chosen": one(
        "a master answers a replica of the format before in its own newest format",
        master,
        "common_format",
        _own_format,
    ),
    "fenced-are-told": one(
        "a partition that is handed over gets system events",
        Keyspace,
        "set_manifest",
        _fenced_are_told,
        act="collections",
    ),
}
"""Name -> the bug."""
PLANTED: Final = BUGS | CLUSTER_BUGS | WIDE_BUGS | DAMAGE_BUGS | METADATA_BUGS | LOCK_BUGS
"""All of them."""


def node_type(bug: str) -> type[Any] | None:
    """Return the type of nodes that a run with a bug has; None: the usual one."""
    found = PLANTED.get(bug)
    return None if found is None else found.node


@contextmanager
def planted(bug: str) -> Iterator[None]:
    """Put a bug in as long as the context lasts; "": nothing."""
    found = PLANTED.get(bug)
    with all_replaced(found.replaced if found is not None else ()):
        yield
