"""Control entries of the log: changes of a partition or of the node, and not of documents.

Each is a CBOR document with a kind (`vbucket.model.entry.pack_control`):

    failover     log, rollback_to, epoch   the failover log, after everything above `rollback_to`
                                           was undone (None: nothing); `epoch` if the leader epoch
                                           is not that of the newest version
    epoch        epoch                     the leader epoch
    state        state                     the partition's state
    floor        seqno, purge              history floor and purge seqno
    purge        upto                      the same, written before compaction existed
    cas          mended                    the highest CAS was lowered
    manifest     manifest                  the collections (of the node)
    hw           seqnos                    [[vb_id, seqno], ...]: high watermarks of partitions with
                                           replicas (of the node). A start begins there
    durability   level                     what an answer promises (of the node)

`epoch`, `hw`, and failover logs of more than 25 versions need a log of format version 4.

Who calls it: the replay at a start and the merge, which must read them alike. Pure.
"""

from __future__ import annotations

from typing import Any


def floor_and_purge(document: dict[str, Any]) -> tuple[int, int]:
    """Return history floor and purge seqno of the entry that raises them."""
    if document["kind"] == "purge":
        return document["upto"] + 1, document["upto"]
    return document["seqno"], document["purge"]


def epoch_of(document: dict[str, Any]) -> int:
    """Return the leader epoch of an entry of kind `epoch` or `failover`.

    Entries from before leader epochs existed may lack it; then it is 0.
    """
    newest = document["log"][0][2:] if "log" in document else ()
    epoch: int = max(document.get("epoch", 0), *newest, 0)
    return epoch
