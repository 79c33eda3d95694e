"""Faults of locks, of collections' maxTTL, of what is kept for consumers and of OBSERVE_SEQNO that
can be put in on purpose.

Each replaces one rule of the product by a wrong one, as those of `sim.cluster_bugs` do. Plans with
clients that lock documents (`sim.plan.locked`) reach them.
"""

from __future__ import annotations

from typing import Any, Final

from dcp.core import floors
from dcp.session import session_commands
from dcp.session.kv.documents import DocumentCommands, latest_expiry
from dcp.session.kv.reads import DocumentReadCommands
from dcp.wire.frame import Frame
from dcp.wire.message import OBSERVE_OLD
from sim.planting import Bug, Replaced, answering, one
from vbucket.engine.documents.locks import Lock, Locks
from vbucket.engine.partition import Partition
from vbucket.model.manifest import Collection

_unlock = DocumentReadCommands.unlock


def _open_to_all(
    locks: Locks, part: Partition, key: bytes, seqno: int, own_cas: int, cas: int
) -> int:
    """A change without the lock's CAS is compared with the document's, as if it was not locked."""
    lock = locks.of(part, key, seqno)
    return own_cas if lock is not None and cas == lock.cas else cas


def _for_ever(locks: Locks, part: Partition, key: bytes, seqno: int) -> Lock | None:
    """A lock is not over by itself."""
    lock = locks.held.get((part.vb_id, key))
    is_here = lock is not None and (lock.vb_uuid, lock.seqno) == (part.vb_uuid, seqno)
    return lock if is_here else None


def _unlock_by_any(commands: DocumentReadCommands, request: Frame) -> None:
    """An UNLOCK is made whatever CAS it has."""
    vb_id, key = commands._documents.locate(request.vb_id, request.key)
    lock = commands._engine.locks.held.get((vb_id, key))
    _unlock(commands, request if lock is None else request._replace(cas=lock.cas))


def _shown(_locks: Locks, _part: Partition, _key: bytes, _seqno: int, cas: int) -> int:
    """Readers see the CAS of a locked document."""
    return cas


def _capped_if_asked(_commands: DocumentCommands, collection: Collection, expiry: int) -> int:
    """A document without an expiry has none in a collection with a maxTTL."""
    latest = latest_expiry(_commands._engine.now_s, collection)
    return min(expiry, latest) if expiry and collection.max_ttl_s else expiry


def _capped_if_not_asked(_commands: DocumentCommands, collection: Collection, expiry: int) -> int:
    """An expiry that is asked for is kept, whatever the maxTTL says."""
    latest = latest_expiry(_commands._engine.now_s, collection)
    return expiry if expiry or not collection.max_ttl_s else latest


class _NewestEnd:
    """An older version is told to have ended where the newest one is."""

    @staticmethod
    def pack(form: int, *told: Any) -> bytes:
        *others, seqno, vb_uuid, _ended_seqno = told
        return OBSERVE_OLD.pack(form, *others, seqno, vb_uuid, seqno)


LOCK_BUGS: Final[dict[str, Bug]] = {
    "locked-is-changed": one(
        "a locked document is changed without the CAS of the lock",
        Locks, "cas_to_match", _open_to_all, nodes=1,
    ),
    "lock-never-ends": Bug(
        "a lock is there until somebody opens it",
        (Replaced(Locks, "of", _for_ever), Replaced(Locks, "sweep_if_due", answering())),
        nodes=1,
    ),
    "any-cas-unlocks": one(
        "an UNLOCK is made with any CAS", DocumentReadCommands, "unlock", _unlock_by_any, nodes=1
    ),
    "locked-shows-cas": one(
        "a read of a locked document shows its CAS", Locks, "shown_cas", _shown, nodes=1
    ),
    "max-ttl-needs-expiry": one(
        "a document without an expiry outlives the maxTTL of its collection",
        DocumentCommands, "_capped", _capped_if_asked, nodes=1,
    ),
    "max-ttl-is-passed": one(
        "an expiry above the maxTTL of a collection is kept",
        DocumentCommands, "_capped", _capped_if_not_asked, nodes=1,
    ),
    "synced-is-persisted": one(
        "OBSERVE_SEQNO calls persisted what is on the master's disk and is not committed",
        Partition, "persisted_seqno", property(lambda part: part.synced_seqno),
    ),
    "purge-passes-keep": one(
        "a purge passes the position of a consumer for which deletions are kept",
        floors, "purge_max", answering(), nodes=1,
    ),
    "version-ends-at-newest": one(
        "OBSERVE_SEQNO tells the newest seqno as the end of an older version",
        session_commands, "OBSERVE_OLD", _NewestEnd,
    ),
}  # fmt: skip
"""Name -> the bug."""
