"""Control entries of the log: changes of a partition or of the node, and not of documents.

Each is a CBOR document with a kind (`pack_control`):

    failover     log, rollback_to, epoch   the failover log, after everything above `rollback_to`
                                           was undone (None: nothing); `epoch` if the leader epoch
                                           is not that of the newest version
    epoch        epoch                     the leader epoch
    state        state                     the partition's state
    floor        seqno, purge              history floor and purge seqno
    snapshot     window, seqno, purge, cas a part of a de-duplicated snapshot of the master is here
                                           (`SnapshotWindow`; None: the whole of it is); history
                                           floor, purge seqno and highest CAS as of then
    purge        upto                      the same, written before compaction existed
    cas          mended                    the highest CAS was lowered
    manifest     manifest                  the collections (of the node)
    hw           vb_ids, seqnos            high watermarks of partitions with replicas (of the
                                           node), as u16 and u64. A start begins there
    durability   level                     what an answer promises (of the node)

`epoch`, `hw`, `snapshot`, and failover logs of more than 25 versions need a log of format
version 4.

Who calls it: the replay at a start and the merge, which must read them alike. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import cbor2

from vbucket.model.entry import CONTROL_ENTRY, LOG_CONTROL
from vbucket.model.ids import SEQNO_MAX


class SnapshotWindow(NamedTuple):
    """A de-duplicated snapshot of which a replica has a part. It ends at a history floor of the
    master, which is committed. `purge` is the master's purge seqno when the part was sent. A part
    that only its sender can continue has no end yet: `vbucket.engine.resync.UNENDED`.

    Invariant: start < end and purge < end.
    """

    start: int
    end: int
    purge: int

    @classmethod
    def from_document(cls, document: Any) -> SnapshotWindow:
        """Return the window of a control entry or a record. Raises ValueError."""
        if not isinstance(document, list) or len(document) != len(cls._fields):
            raise ValueError(f"{document!r} is no window of a snapshot")
        window = cls(*map(seqno_in, document))
        if not (window.start < window.end and window.purge < window.end):
            raise ValueError(f"a snapshot cannot have the window {document!r}")
        return window

    def after_rollback(self, seqno: int) -> SnapshotWindow | None:
        """Return the window after a rollback to a seqno; None: nothing of the snapshot is left."""
        return None if seqno <= self.start else self


def pack_control(vb_id: int, document: dict[str, object]) -> bytes:
    """Return a control entry, which only the log holds; `document["kind"]` is its kind."""
    value = cbor2.dumps(document)
    return CONTROL_ENTRY.pack(0, 0, 0x80, LOG_CONTROL, 0, 0, 0, vb_id, len(value), 0, 0) + value


def control_document(entry: bytes) -> dict[str, object]:
    """Return the document of a LOG_CONTROL entry."""
    document: dict[str, object] = cbor2.loads(entry[CONTROL_ENTRY.size :])
    return document


def seqno_in(number: Any) -> int:
    """Return a number of a document as a seqno. Raises ValueError."""
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= SEQNO_MAX:
        raise ValueError(f"{number!r} is no seqno")
    return number


def snapshot_window(document: dict[str, Any]) -> SnapshotWindow | None:
    """Return the window of an entry of kind `snapshot`. Raises ValueError."""
    window = document["window"]
    return None if window is None else SnapshotWindow.from_document(window)


def floor_and_purge(document: dict[str, Any]) -> tuple[int, int]:
    """Return history floor and purge seqno of the entry that raises them."""
    if document["kind"] == "purge":
        return document["upto"] + 1, document["upto"]
    return document["seqno"], document["purge"]


def watermarks_document(seqnos: Mapping[int, int]) -> dict[str, object]:
    """Return the entry of high watermarks. Byte strings, because many groups have one, and CBOR
    would take longer for the numbers than the rest of a small group takes.
    """
    count = len(seqnos)
    return {
        "kind": "hw",
        "vb_ids": struct.pack(f">{count}H", *seqnos),
        "seqnos": struct.pack(f">{count}Q", *seqnos.values()),
    }


def watermarks_of(document: Mapping[str, Any]) -> dict[int, int]:
    """Return partition -> high watermark of an entry."""
    count = len(document["vb_ids"]) // 2
    vb_ids = struct.unpack(f">{count}H", document["vb_ids"])
    return dict(zip(vb_ids, struct.unpack(f">{count}Q", document["seqnos"]), strict=True))


def epoch_of(document: dict[str, Any]) -> int:
    """Return the leader epoch of an entry of kind `epoch` or `failover`."""
    newest: int = document["log"][0][2] if "log" in document else 0
    epoch: int = max(newest, document.get("epoch", 0))
    return epoch
