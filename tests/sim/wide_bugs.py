"""Faults of documents, collections, streams and disks that can be put in on purpose.

Each replaces one rule of the product by a wrong one, as those of `sim.cluster_bugs` do. Plans that
are widened (`sim.plan.widened`) reach them.
"""

from __future__ import annotations

from typing import Any, Final

from dcp.core.store_schedule import MergeCycle
from dcp.session import streams
from dcp.session.answers import marks as answer_marks
from dcp.session.answers.held_answers import HeldAnswers
from dcp.session.kv import updates
from dcp.session.subdoc import json_operations
from dcp.session.subdoc.json_operations import Edit
from dcp.session.subdoc.json_scan import ValuePlace
from dcp.wire.status import Status
from failover.rules import rollback
from failover.rules.history import FailoverLog
from failover.rules.rollback import Decision, Question, RollbackKind
from sim.planting import ClusterBug, Replaced
from sim.view_bugs import VIEW_BUGS
from vbucket.engine import engine as engine_module
from vbucket.engine.documents import read_modify_write
from vbucket.engine.documents.expiry import Pager
from vbucket.engine.documents.read_modify_write import Counted, Touched, expiry_of
from vbucket.engine.engine import SET, Engine, Outcome, StoredDocument, _document_of
from vbucket.engine.keyspace import MUTATION, Keyspace
from vbucket.engine.partition import Partition
from vbucket.log import record
from vbucket.log.device_files import FileLogDevice
from vbucket.model.collection_counts import CollectionCounts
from vbucket.model.entry import OPCODE_AT
from vbucket.model.manifest import Manifest, ManifestEvent, SystemEventKind
from vbucket.store.key_record import StoredMeta

# -- expiries --------------------------------------------------------------------------------------

_touch = read_modify_write.touch


_ONE_BY_ONE = Replaced(engine_module, "set_run", lambda *_: None)
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


def _is_not_due(*_args: object, **_named: object) -> bool:
    return False


def _nothing_to_page(*_args: object, **_named: object) -> bool:
    return True


def _takes_all(*_args: object) -> bool:
    return True


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


def _nothing(*_args: object, **_named: object) -> None:
    """Leave something out."""


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

WIDE_BUGS: Final[dict[str, ClusterBug]] = {
    "touch-in-vain": ClusterBug(
        "a touch keeps the expiry", (_ONE_BY_ONE, Replaced(updates, "touch", _touch_in_vain)),
        nodes=1,
    ),
    "expiry-is-lost": ClusterBug(
        "a document is stored without its expiry",
        (_ONE_BY_ONE, Replaced(Engine, "put", _put_for_ever)),
        nodes=1,
    ),
    "due-is-answered": ClusterBug(
        "a due document is answered as long as nobody pages it out",
        (
            Replaced(Engine, "expire_if_due", _is_not_due),
            Replaced(Pager, "step", _nothing_to_page),
        ),
        nodes=1,
    ),
    "pages-anywhere": ClusterBug(
        "replicas expire documents themselves", (Replaced(Pager, "_takes_writes", _takes_all),)
    ),
    "revision-again": ClusterBug(
        "a document that is created again begins at revision 1",
        (Replaced(Engine, "meta_to_change", _revision_begins_again),), nodes=1,
    ),
    "last-one-wins": ClusterBug(
        "SET_WITH_META resolves no conflict",
        (Replaced(Engine, "put_with_meta", _last_one_wins),), nodes=1,
    ),
    "cas-of-the-clock": ClusterBug(
        "a CAS follows the wall clock back",
        (Replaced(Engine, "begin_batch", _cas_of_the_clock),), nodes=1,
    ),
    "cas-unchecked": ClusterBug(
        "a store does not compare the CAS", (Replaced(Engine, "store", _store_unchecked),), nodes=1
    ),
    "pushed-first": ClusterBug(
        "an element that is pushed to the end of a list comes first",
        (Replaced(json_operations, "_with_last", _as_first),), nodes=1,
    ),
    "counts-from-initial": ClusterBug(
        "a counter that is created gets the delta as well",
        (Replaced(updates, "count", _count_from_initial),), nodes=1,
    ),
    "appends-before": ClusterBug(
        "an APPEND comes before the document", (Replaced(updates, "extend", _extend_before),),
        nodes=1,
    ),
    "replica-shows-newest": ClusterBug(
        "GET_REPLICA answers what is not committed",
        (Replaced(Engine, "get_from_replica", _newest_from_replica),),
    ),
    "drop-keeps-count": ClusterBug(
        "documents of a dropped collection are counted",
        (Replaced(CollectionCounts, "forget", _forget_not_their_documents),), nodes=1,
    ),
    "collection-id-again": ClusterBug(
        "the id of a dropped collection comes back",
        (Replaced(Manifest, "create_collection", _create_with_a_free_id),), nodes=1,
    ),
    "drop-untold": ClusterBug(
        "streams do not tell that a collection is dropped",
        (Replaced(Keyspace, "_tell", _tell_no_drop),), nodes=1,
    ),
    "no-rollback": ClusterBug(
        "a consumer of another history goes on", (Replaced(streams, "decide", _goes_on),), nodes=1
    ),
    "rollback-miscounts": ClusterBug(
        "a rollback counts a document twice", (Replaced(Keyspace, "_is_live", _is_not_due),),
        nodes=1,
    ),
    "folder-unsynced": ClusterBug(
        "a new segment's name is not synced", (Replaced(FileLogDevice, "_sync_folder", _nothing),),
        nodes=1,
    ),
    "log-unsynced": ClusterBug(
        "a group is answered without a sync", (Replaced(FileLogDevice, "sync", _nothing),), nodes=1
    ),
    "checksum-unread": ClusterBug(
        "a record's checksum is not looked at",
        (Replaced(record, "_record_at", _record_unchecked),), nodes=1,
    ),
    "seal-unsynced": ClusterBug(
        "the end of a sealed segment is not synced",
        (Replaced(FileLogDevice, "_cut_durably", _cut_only),), nodes=1,
    ),
    "deletes-unmerged": ClusterBug(
        "a segment is deleted that was not merged",
        (Replaced(MergeCycle, "begin", _merges_too_little),), nodes=1,
    ),
    "level-is-nothing": ClusterBug(
        "a durable write is answered by the master's disk alone",
        (Replaced(HeldAnswers, "__init__", _any_held),),
    ),
    "timeout-is-success": ClusterBug(
        "a write that was not committed in time is answered with success",
        (Replaced(answer_marks, "AMBIGUOUS", Status.OK),),
    ),
    **VIEW_BUGS,
}  # fmt: skip
"""Name -> the bug."""
