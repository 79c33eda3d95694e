"""Faults of documents, collections, streams, disks, cuts, scans, hashes and batches that can be put
in on purpose.

Each replaces one rule of the product by a wrong one, as those of `sim.cluster_bugs` do. Plans that
are widened or probed (`sim.plan`) reach them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Final

from clients.consumer.batch_reader import CutMeeting
from dcp.core.store_schedule import MergeCycle
from dcp.session import streams
from dcp.session.answers import marks as answer_marks
from dcp.session.answers.held_answers import HeldAnswers
from dcp.session.kv import batches as batch_commands
from dcp.session.kv import updates
from dcp.session.kv.hash_reads import HashReads
from dcp.session.kv.scans import ScanCommands
from dcp.session.state import SessionState
from dcp.session.subdoc import json_operations
from dcp.session.subdoc.json_operations import Edit
from dcp.session.subdoc.json_scan import ValuePlace
from dcp.stream import pending_cut, producer
from dcp.stream.active_stream import ActiveStream
from dcp.stream.pending_cut import PendingCut
from dcp.wire.frame import Frame
from dcp.wire.status import Status
from failover.replication.cuts import cut_leader, cut_member
from failover.replication.cuts.cut_member import CutMember
from failover.rules import rollback
from failover.rules.cut import Ask
from failover.rules.history import FailoverLog
from failover.rules.rollback import Decision, Question, RollbackKind
from sim.planting import Bug, Replaced, all_replaced, answering, one
from vbucket.engine import cut as cut_module
from vbucket.engine import engine as engine_module
from vbucket.engine import hashes
from vbucket.engine.cut import Cut
from vbucket.engine.documents import batch as batch_module
from vbucket.engine.documents import read_modify_write
from vbucket.engine.documents.batch import BatchChange, apply_batch
from vbucket.engine.documents.expiry import Pager
from vbucket.engine.documents.read_modify_write import Counted, Touched, expiry_of
from vbucket.engine.engine import SET, Engine, Outcome, StoredDocument, _document_of
from vbucket.engine.keyspace import MUTATION, Keyspace
from vbucket.engine.partition import Partition
from vbucket.engine.read_view import ReadView
from vbucket.log import record, recovery
from vbucket.log.device_files import FileLogDevice
from vbucket.log.recovery import RecoveredGroup, Recovery
from vbucket.model.collection_counts import CollectionCounts
from vbucket.model.entry import OPCODE_AT
from vbucket.model.manifest import Manifest, ManifestEvent, SystemEventKind
from vbucket.native.key_hashes import KeyHashes, Row, RowForm
from vbucket.store.key_record import StoredMeta

# -- expiries --------------------------------------------------------------------------------------

_touch = read_modify_write.touch


_ONE_BY_ONE = Replaced(engine_module, "set_run", answering())
"""Changes do not go through the loop in C, which has no such faults to be planted."""


def _touch_in_vain(engine: Engine, vb_id: int, key: bytes, _expiry: int) -> Touched:
    """A touch writes the document with the expiry that it had."""
    found, expiry = engine.get(vb_id, key), expiry_of(engine, vb_id, key)
    if isinstance(found, int):
        return Touched((found, 0, 0), None)
    body = key + found.value
    outcome = engine.store(SET, vb_id, key, body, 0, expiry or 0, found.datatype, 0)
    return Touched(outcome, None if outcome[0] else found._replace(cas=outcome[1]))


_put = Engine.put


def _put_for_ever(
    engine: Engine, part: Partition, key: bytes, body: bytes, flags: int, expiry: int, *args: Any,
    **named: Any,
) -> int:  # fmt: skip
    return _put(engine, part, key, body, flags, 0, *args, **named)


# -- revision, CAS ---------------------------------------------------------------------------------

_meta_to_change = Engine.meta_to_change


def _revision_begins_again(engine: Engine, part: Partition, key: bytes) -> StoredMeta:
    """A document that is created again begins at revision 1."""
    known = _meta_to_change(engine, part, key)
    return known if known.opcode == MUTATION else known._replace(rev_seqno=0)


_put_with_meta = Engine.put_with_meta


def _last_one_wins(engine: Engine, *args: Any, **named: Any) -> Outcome:
    return _put_with_meta(engine, *args, **(named | {"resolves_conflict": False}))


_begin_batch = Engine.begin_batch


def _cas_of_the_clock(engine: Engine, now_ns: int) -> None:
    """The CAS is the time, whatever CAS there was before."""
    _begin_batch(engine, now_ns)
    for part in engine.partitions:
        part.max_cas = 0


_store = Engine.store


def _store_unchecked(
    engine: Engine, mode: int, vb_id: int, key: bytes, body: bytes, flags: int, expiry: int,
    datatype: int, _cas: int,
) -> Outcome:  # fmt: skip
    return _store(engine, mode, vb_id, key, body, flags, expiry, datatype, 0)


def _newest_from_replica(engine: Engine, part: Partition, key: bytes) -> StoredDocument | None:
    """A replica answers with what it received last."""
    entry = part.newest.get(key) or engine.versions.committed_entry(part, key)
    return _document_of(entry) if entry and entry[OPCODE_AT] == MUTATION else None


# -- changes of a part -----------------------------------------------------------------------------


def _as_first(array: ValuePlace, text: bytes, level: int, total: int) -> Edit:
    """What is pushed to the end of a list comes to its beginning."""
    new = text + b"," if array.total else text
    return Edit(array.at + 1, array.at + 1, new, level, total)


_count = read_modify_write.count


def _count_from_initial(
    engine: Engine, vb_id: int, key: bytes, delta: int, *, initial: int | None, **named: Any
) -> Counted:
    """A counter that is created gets the delta as well."""
    first = None if initial is None else initial + delta
    return _count(engine, vb_id, key, delta, initial=first, **named)


_extend = read_modify_write.extend


def _extend_before(engine: Engine, *args: Any, **named: Any) -> Outcome:
    return _extend(engine, *args, **(named | {"is_prepended": True}))


# -- collections -----------------------------------------------------------------------------------


def _forget_not_their_documents(counts: CollectionCounts, manifest: Manifest) -> int:
    for key in [key for key in counts.collections if manifest.is_gone(key)]:
        counts.collections.pop(key)
    return 0


_create_collection = Manifest.create_collection


def _create_with_a_free_id(manifest: Manifest, scope: str, name: str, ttl_s: int = 0) -> Manifest:
    """The id of a collection that was dropped is given again."""
    free = next(number for number in range(8, 1000) if number not in manifest.collections)
    return _create_collection(manifest._replace(next_collection_id=free), scope, name, ttl_s)


_tell = Keyspace._tell


def _tell_no_drop(keyspace: Keyspace, part: Partition, event: ManifestEvent) -> None:
    if event.kind != SystemEventKind.DROP_COLLECTION:
        _tell(keyspace, part, event)


# -- rollbacks -------------------------------------------------------------------------------------

_decide = rollback.decide


def _goes_on(question: Question, log: FailoverLog, high_seqno: int, purge_seqno: int) -> Decision:
    """A consumer whose version ended goes on where it is, if the partition reaches so far."""
    decision = _decide(question, log, high_seqno, purge_seqno)
    is_purge = decision.kind is RollbackKind.PURGED
    if decision.rollback_seqno is None or is_purge or question.start_seqno > high_seqno:
        return decision
    return Decision(None, "planted")


# -- the log ---------------------------------------------------------------------------------------


def _record_unchecked(data: bytes, at: int, salt: int) -> tuple[int, int, int, int, int] | None:
    """A record is good if its head looks so."""
    payload_at = at + record.RECORD_BYTES
    if payload_at > len(data):
        return None
    mark, kind, length, group, crc_before, crc = record.RECORD.unpack_from(data, at)
    end = payload_at + length
    if mark != salt >> 32 or kind != record.KIND_GROUP or end > len(data):
        return None
    return group, payload_at, end, crc_before, crc


def _cut_only(device: FileLogDevice, _segment: int, fd: int, size_bytes: int) -> None:
    """What is cut off a segment is not synced before the next one begins."""
    device._disk.cut(fd, size_bytes)


def _merges_too_little(cycle: MergeCycle, segments: Any) -> list[int]:
    """The newest sealed segment is not merged, and deleted."""
    return _begin_merge(cycle, segments)[:-1]


_begin_merge = MergeCycle.begin


def _any_held(held: HeldAnswers, *args: Any, **named: Any) -> None:
    """Answers with a durability frame leave like all others of a master that answers alone."""
    _held_init(held, *args, **named)
    held._needs_commit = False


_held_init = HeldAnswers.__init__


# -- cuts ------------------------------------------------------------------------------------------

_draw_cut = cut_module.draw_cut


def _cut_of_committed(engine: Engine, now_ns: int) -> Cut:
    """A cut notes what is committed of each partition, and not what has a CAS by then."""
    cut = _draw_cut(engine, now_ns)
    return cut._replace(seqnos=[part.committed_seqno for part in engine.partitions])


def _cut_above_all(engine: Engine, now_ns: int) -> Cut:
    """A cut notes no end for the partition that has the most."""
    cut = _draw_cut(engine, now_ns)
    longest = max(cut.seqnos)
    return cut._replace(seqnos=[seqno + 3 * (seqno == longest) for seqno in cut.seqnos])


_reached_by = PendingCut.reached_by


def _never_waits(cut: PendingCut, stream: ActiveStream) -> bool:
    """A stream that has reached a cut goes on."""
    _reached_by(cut, stream)
    return False


def _told_early(cut: PendingCut, drawn: Cut, streams: Any) -> None:
    """A cut waits for one stream only."""
    _pending_init(cut, drawn, streams)
    cut.behind = set(sorted(cut.behind, key=attrgetter("vb_id"))[:1])


_pending_init = PendingCut.__init__

# -- cuts of clusters ------------------------------------------------------------------------------

_draw = CutMember.draw


def _draw_and_go_on(member: CutMember, ask: Ask, clock_ns: int) -> str:
    """A member that has drawn a cut goes on committing."""
    why = _draw(member, ask, clock_ns)
    if not why:
        member._watermarks.held = None
    return why


def _any_meeting(meeting: CutMeeting[Any], following: Collection[Any], followed: set[int]) -> bool:
    """A consumer holds a cut when each connection waits at some cut."""
    is_cut = len(meeting._at) == len(following) > 0
    if is_cut:
        meeting.release()
    return is_cut


def _median_closed(members: Iterable[tuple[int, int]], _clock_ns: int) -> int:
    """The next time is above what half of the members have closed."""
    found = sorted(first for _, first in members)
    return found[(len(found) - 1) // 2]


# -- scans -----------------------------------------------------------------------------------------

_resolve = ReadView._resolve


def _resolve_newest(view: ReadView, key: bytes, *, with_value: bool) -> Any:
    """A view moves on with its partition."""
    view.seqno = max(view.seqno, view._part.high_seqno)
    return _resolve(view, key, with_value=with_value)


_create = ScanCommands.create


def _create_at_once(commands: ScanCommands, request: Frame) -> None:
    """The answer to a scan's request does not wait until what it shows is committed."""
    with all_replaced((Replaced(SessionState, "observes", answering()),)):
        _create(commands, request)


# -- hashes ----------------------------------------------------------------------------------------


def _change_without_removed(
    table: KeyHashes, _removed: list[Row], added: list[Row], form: RowForm
) -> None:
    """What a document was before stays in the sum."""
    table.documents += table._add(added, form, 1)


_rows_of = hashes._Work.rows_of


def _rows_of_all_but_last(work: Any, keys: list[bytes]) -> list[Row]:
    """The last key in memory is left out."""
    return _rows_of(work, keys)[:-1]


def _answer_at_once(reads: HashReads, request: Frame, extras: bytes, value: bytes) -> None:
    """An answer does not wait until what it tells is committed."""
    reads._state.answer(request, extras=extras, value=value)


# -- batches ---------------------------------------------------------------------------------------


def _apply_one_by_one(engine: Engine, changes: Sequence[BatchChange]) -> list[Outcome]:
    """Each change of a batch is checked when those before it are made."""
    made: list[Outcome] = []
    for index, change in enumerate(changes):
        try:
            made += apply_batch(engine, [change])
        except batch_module.BatchRefusedError as error:
            raise batch_module.BatchRefusedError(index, error.status) from error
    return made


def _apply_without_last(engine: Engine, changes: Sequence[BatchChange]) -> list[Outcome]:
    """The last change of a large batch is answered, and not made."""
    if len(changes) < 3:
        return apply_batch(engine, changes)
    made = apply_batch(engine, changes[:-1])
    last = engine.partitions[changes[-1].vb_id]
    return [*made, (0, made[0][1], last.high_seqno)]


# -- disks ----------------------------------------------------------------------------------------


def _present_only(recovery: Recovery) -> Iterator[RecoveredGroup]:
    """A start reads the segments that are there, as if none was missing."""
    segments = [
        number for number in recovery._device.segments() if number > recovery._after_segment
    ]
    for segment in segments:
        data = recovery._device.read(segment)
        recovery._is_known = False
        yield from recovery._groups_of(segment, data, is_newest=segment == segments[-1])
    recovery._check_end()
    recovery._is_scanned = True


WIDE_BUGS: Final[dict[str, Bug]] = {
    "touch-in-vain": Bug(
        "a touch keeps the expiry", (_ONE_BY_ONE, Replaced(updates, "touch", _touch_in_vain)),
        nodes=1,
    ),
    "expiry-is-lost": Bug(
        "a document is stored without its expiry",
        (_ONE_BY_ONE, Replaced(Engine, "put", _put_for_ever)),
        nodes=1,
    ),
    "due-is-answered": Bug(
        "a due document is answered as long as nobody pages it out",
        (
            Replaced(Engine, "expire_if_due", answering(False)),
            Replaced(Pager, "step", answering(True)),
        ),
        nodes=1,
    ),
    "pages-anywhere": one(
        "replicas expire documents themselves", Pager, "_takes_writes", answering(True)
    ),
    "revision-again": one(
        "a document that is created again begins at revision 1",
        Engine, "meta_to_change", _revision_begins_again, nodes=1,
    ),
    "last-one-wins": one(
        "SET_WITH_META resolves no conflict", Engine, "put_with_meta", _last_one_wins, nodes=1
    ),
    "cas-of-the-clock": one(
        "a CAS follows the wall clock back", Engine, "begin_batch", _cas_of_the_clock, nodes=1
    ),
    "cas-unchecked": one(
        "a store does not compare the CAS", Engine, "store", _store_unchecked, nodes=1
    ),
    "pushed-first": one(
        "an element that is pushed to the end of a list comes first",
        json_operations, "_with_last", _as_first, nodes=1,
    ),
    "counts-from-initial": one(
        "a counter that is created gets the delta as well",
        updates, "count", _count_from_initial, nodes=1,
    ),
    "appends-before": one(
        "an APPEND comes before the document", updates, "extend", _extend_before, nodes=1
    ),
    "replica-shows-newest": one(
        "GET_REPLICA answers what is not committed",
        Engine, "get_from_replica", _newest_from_replica,
    ),
    "drop-keeps-count": one(
        "documents of a dropped collection are counted",
        CollectionCounts, "forget", _forget_not_their_documents, nodes=1,
    ),
    "collection-id-again": one(
        "the id of a dropped collection comes back",
        Manifest, "create_collection", _create_with_a_free_id, nodes=1,
    ),
    "drop-untold": one(
        "streams do not tell that a collection is dropped",
        Keyspace, "_tell", _tell_no_drop, nodes=1,
    ),
    "no-rollback": one(
        "a consumer of another history goes on", streams, "decide", _goes_on, nodes=1
    ),
    "rollback-miscounts": one(
        "a rollback counts a document twice", Keyspace, "_is_live", answering(False), nodes=1
    ),
    "folder-unsynced": one(
        "a new segment's name is not synced", FileLogDevice, "_sync_folder", answering(), nodes=1
    ),
    "log-unsynced": one(
        "a group is answered without a sync", FileLogDevice, "sync", answering(), nodes=1
    ),
    "checksum-unread": one(
        "a record's checksum is not looked at", record, "record_at", _record_unchecked, nodes=1
    ),
    "seal-unsynced": one(
        "the end of a sealed segment is not synced",
        FileLogDevice, "_cut_durably", _cut_only, nodes=1,
    ),
    "deletes-unmerged": one(
        "a segment is deleted that was not merged",
        MergeCycle, "begin", _merges_too_little, nodes=1,
    ),
    "level-is-nothing": one(
        "a durable write is answered by the master's disk alone",
        HeldAnswers, "__init__", _any_held,
    ),
    "timeout-is-success": one(
        "a write that was not committed in time is answered with success",
        answer_marks, "AMBIGUOUS", Status.OK,
    ),
    "cut-of-committed": one(
        "a cut leaves out what has a CAS, and is not committed yet",
        pending_cut, "draw_cut", _cut_of_committed, nodes=1,
    ),
    "cut-beyond": one(
        "a cut has changes of one partition that came later",
        pending_cut, "draw_cut", _cut_above_all, nodes=1,
    ),
    "cut-passed": Bug(
        "streams pass a cut before it is told",
        (Replaced(PendingCut, "reached_by", _never_waits), Replaced(producer, "_live_run", None)),
        nodes=1,
    ),
    "cut-told-early": one(
        "a cut is told when the first stream has reached it",
        PendingCut, "__init__", _told_early, nodes=1,
    ),
    "cut-commits-on": one(
        "a node that has drawn a cut of the cluster commits before all have",
        CutMember, "draw", _draw_and_go_on,
    ),
    "cut-meets-anywhere": one(
        "a consumer takes cuts of several times for one", CutMeeting, "is_cut", _any_meeting
    ),
    "cut-closes-nothing": one(
        "a node that has drawn a cut gives changes a CAS below its time",
        cut_member, "close_time", answering(),
    ),
    "cut-held-for-ever": one(
        "a node waits for ever for a leader's word that a cut is complete",
        CutMember, "tick", answering(),
    ),
    "cut-waits-for-clock": one(
        "a node that has closed times ahead of its clock takes part again when the clock is there",
        cut_leader, "first_open_of_all", _median_closed,
    ),
    "scan-moves-on": one(
        "a scan shows what is written while it runs", ReadView, "_resolve", _resolve_newest
    ),
    "scan-uncommitted": one(
        "a scan shows what is not committed", ScanCommands, "create", _create_at_once
    ),
    "hashes-keep-old": one(
        "hashes keep what a document was before",
        KeyHashes, "change", _change_without_removed, nodes=1,
    ),
    "hashes-miss-one": one(
        "hashes leave out a document that is in memory",
        hashes._Work, "rows_of", _rows_of_all_but_last, nodes=1,
    ),
    "batch-one-by-one": one(
        "a batch that is refused was made in part",
        batch_commands, "apply_batch", _apply_one_by_one, nodes=1,
    ),
    "batch-lacks-last": one(
        "the last change of a batch is not made",
        batch_commands, "apply_batch", _apply_without_last, nodes=1,
    ),
    "gap-is-read-over": one(
        "a start does not miss segments of the log that its store lacks",
        Recovery, "groups", _present_only, nodes=1,
    ),
    "early-end-is-good": one(
        "a start does not look whether the log ends too early",
        recovery, "lost_end", answering(), nodes=1,
    ),
    "hashes-at-once": one(
        "hashes are told before the changes are committed", HashReads, "_answer", _answer_at_once
    ),
}  # fmt: skip
"""Name -> the bug."""
