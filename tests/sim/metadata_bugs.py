"""Faults that can be put in on purpose: of what documents have beside their values, of when they
expire, and of what branches undo.

Each replaces one rule of the product by a wrong one, as those of `sim.cluster_bugs` do.
"""

from __future__ import annotations

from typing import Any, Final

from dcp.session.kv import updates
from dcp.session.subdoc.document_change import DocumentChange
from sim.planting import Bug, Replaced, all_replaced, answering, one
from vbucket.engine import replicated
from vbucket.engine.documents import read_modify_write
from vbucket.engine.documents.item_cache import ItemCache
from vbucket.engine.documents.read_modify_write import Counted, Touched
from vbucket.engine.engine import Engine, Outcome
from vbucket.engine.partition import Partition
from vbucket.model.manifest import DEFAULT_COLLECTION
from vbucket.store.due import DueDocuments
from vbucket.store.hashes import Tables, change_hashes, collections_of
from vbucket.store.key_record import StoredMeta
from vbucket.upkeep import partition_merge

_meta = Engine.meta
_count = read_modify_write.count
_touch = read_modify_write.touch
_store = DocumentChange.store
_remove = Engine.remove


def _without(**lost: int) -> Replaced:
    """Return how the present version of a document shows something else than it has."""

    def meta(engine: Engine, vb_id: int, key: bytes) -> StoredMeta | int:
        found = _meta(engine, vb_id, key)
        return found if isinstance(found, int) else found._replace(**lost)

    return Replaced(Engine, "meta", meta)


def _count_for_ever(*args: Any, **named: Any) -> Counted:
    """A counter is stored without the expiry that it had."""
    with all_replaced((_without(expiry=0),)):
        return _count(*args, **named)


def _touch_without_flags(*args: Any) -> Touched:
    """A touch stores a document without its flags."""
    with all_replaced((_without(flags=0),)):
        return _touch(*args)


def _change_for_ever(change: DocumentChange, _expiry: int, value_bytes_max: int) -> Outcome:
    """A change of a part stores a document without the expiry that was asked for."""
    return _store(change, 0, value_bytes_max)


def _remove_at_revision(
    engine: Engine, part: Partition, key: bytes, known: StoredMeta, *args: Any
) -> Outcome:
    """A deletion has the revision of the document."""
    before = known._replace(rev_seqno=max(0, known.rev_seqno - 1))
    return _remove(engine, part, key, before, *args)


def _hash_all_but_gone(changes: partition_merge._KeyChanges, tables: Tables) -> None:
    """Hashes keep a key that a rollback takes away."""
    gone = set(changes._gone)
    old = [item for item in changes._old.items() if item[0] not in gone]
    of = collections_of([*old, *changes._items]) | {DEFAULT_COLLECTION}
    change_hashes(tables, old, changes._items, of)


def _merged_as_if_not_cut(part: Partition, merged_seqno: int) -> None:
    """What a branch has undone since the freeze counts as merged."""
    part.merged_seqno = max(merged_seqno, part.merged_seqno)


METADATA_BUGS: Final[dict[str, Bug]] = {
    "counter-loses-expiry": one(
        "a counter loses its expiry when it counts", updates, "count", _count_for_ever, nodes=1
    ),
    "touch-loses-flags": one(
        "a touch stores a document without its flags",
        updates, "touch", _touch_without_flags, nodes=1,
    ),
    "part-loses-expiry": one(
        "a sub-document change does not store the expiry that comes with it",
        DocumentChange, "store", _change_for_ever, nodes=1,
    ),
    "deletion-keeps-revision": one(
        "a deletion has the revision of the document", Engine, "remove", _remove_at_revision,
        nodes=1,
    ),
    "hashes-keep-undone": one(
        "hashes keep a key that a rollback takes away",
        partition_merge._KeyChanges, "hash_into", _hash_all_but_gone, nodes=1,
    ),
    "cut-is-merged": one(
        "what was undone while a merge ran counts as merged",
        Partition, "become_merged", _merged_as_if_not_cut, nodes=1,
    ),
    "cache-survives-branch": one(
        "cached documents outlive a branch that empties their partition",
        ItemCache, "clear", answering(), nodes=1,
    ),
    "replicas-forget-due": Bug(
        "a replica does not note when documents expire, so nobody expires them after an election",
        (
            Replaced(replicated, "group_run", answering()),
            Replaced(DueDocuments, "add", answering()),
        ),
    ),
}  # fmt: skip
"""Name -> the bug."""
