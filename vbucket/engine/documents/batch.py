"""Atomic batches: changes of several documents that are made together, or not at all. Sans-IO.

    apply_batch(engine, changes)     checks all of them, then makes all of them

Who calls it: the session (`dcp.session.kv.batches`). It is for nodes alone: a partition with copies
commits by itself, so a failover could keep a part of a batch.

Invariants
- everything that can fail is done before the first change;
- all changes go into the open commit group, which is one record of the log: a crash keeps all or
  none (docs/consistent-cuts.md);
- all have one CAS, which is above those of their partitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from dcp.wire.status import RefusedError, Status
from dcp.wire.xattrs import DATATYPE_XATTR
from vbucket.engine.documents.json_value import datatype_of
from vbucket.engine.documents.kept_xattrs import with_xattrs
from vbucket.engine.engine import Engine, Outcome, refusal_of, unwritable
from vbucket.engine.keyspace import MUTATION
from vbucket.store.key_record import StoredMeta


class BatchMode(IntEnum):
    """What a change of a batch does. The first three are modes of `Engine.store`."""

    SET = 0
    ADD = 1
    REPLACE = 2
    DELETE = 3


class BatchChange(NamedTuple):
    """One change. `key` is the stored key, `expiry` absolute seconds (0: never). A `cas` other than
    0 must be the document's own.
    """

    mode: BatchMode
    vb_id: int
    key: bytes
    value: bytes
    flags: int
    expiry: int
    cas: int


class _Ready(NamedTuple):
    """A change that was checked, with all that had to be read for it."""

    change: BatchChange
    known: StoredMeta
    datatype: int
    value: bytes
    """The value with the XATTRs that stay; of a deletion these alone."""


class BatchRefusedError(Exception):
    """A change cannot be made, so none was. `index` says which one, `status` why."""

    def __init__(self, index: int, status: int) -> None:
        super().__init__(index, status)
        self.index = index
        self.status = status


def apply_batch(engine: Engine, changes: Sequence[BatchChange]) -> list[Outcome]:
    """Make all changes, which are of different keys; return what each got.

    Raises BatchRefusedError; RefusedError for a value that grows too large with its XATTRs, and
    StoreDamagedError. Nothing was changed then, except that documents that are due have expired.
    """
    ready = [_checked(engine, index, change) for index, change in enumerate(changes)]
    parts = [engine.partitions[change.vb_id] for change in changes]
    cas = max(engine.now_ns, *(part.max_cas + 1 for part in parts))
    made: list[Outcome] = []
    for (change, known, datatype, value), part in zip(ready, parts, strict=True):
        key = change.key
        part.max_cas = cas - 1  # the next change gets `cas`
        engine.locks.unlock(part, key)
        if change.mode is BatchMode.DELETE:
            engine.item_cache.take(part, key)
            made.append(engine.remove(part, key, known, value))
            continue
        engine.put(
            part, key, key + value, change.flags, change.expiry, datatype, known,
            keeps_xattrs=False,
        )  # fmt: skip
        made.append((0, cas, part.high_seqno))
    assert all(outcome[1] == cas for outcome in made), "one CAS for all"
    return made


def _checked(engine: Engine, index: int, change: BatchChange) -> _Ready:
    """Check that a change can be made, and read what it needs."""
    part, key = engine.partitions[change.vb_id], change.key
    if part.state != 1 or part.holds:
        raise BatchRefusedError(index, unwritable(part)[0])
    known = engine.meta_to_change(part, key)
    is_live = known.opcode == MUTATION
    cas = engine.locks.cas_to_match(part, key, known.seqno, known.cas, change.cas)
    if cas < 0 and change.mode is not BatchMode.ADD:
        raise BatchRefusedError(index, Status.LOCKED)
    mode = BatchMode.REPLACE if change.mode is BatchMode.DELETE else change.mode
    refusal = refusal_of(mode, cas, known.cas, is_live=is_live)
    if refusal is not None:
        raise BatchRefusedError(index, refusal[0])
    if change.mode is BatchMode.DELETE:
        return _Ready(change, known, 0, engine.kept_xattrs.of_removal(part, key, known))
    datatype, value = datatype_of(0, key + change.value, len(key)), change.value
    if is_live and known.datatype & DATATYPE_XATTR:
        xattrs = engine.kept_xattrs.of_document(part, key, engine.now_s)
        if xattrs:
            try:
                value = with_xattrs(xattrs, value)
            except RefusedError as error:
                raise BatchRefusedError(index, error.status) from error
            datatype |= DATATYPE_XATTR
    return _Ready(change, known, datatype, value)
