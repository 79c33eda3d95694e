"""Changes that depend on what a document is: counters, append and prepend, touch; and flush.

Who calls it: the sessions of both protocols. The engine is single-threaded, so nothing comes
between a read and the write that follows it. Each change is one ordinary mutation.

Rules: memcached's and kv_engine's. A counter is stored as ASCII digits. A decrement stops at 0, an
increment wraps at 2^64. Counters and appends keep flags and expiry. Touching a document with the
expiry that it already has is no change.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from dcp.wire.status import RefusedError, Status
from vbucket.engine.engine import SET, Engine, Outcome, StoredDocument
from vbucket.engine.keyspace import MUTATION
from vbucket.engine.partition import Hold, VbState
from vbucket.engine.read_view import KeyWalk
from vbucket.model.datatype import SNAPPY
from vbucket.store.key_record import StoredMeta
from vbucket.store.plain_value import plain

COUNTER_MODULUS: Final = 2**64
_COUNTER_DIGITS_MAX: Final = 20

FLUSH_SLICE_KEYS: Final = 2_000
"""Keys per step of a flush: a step takes some milliseconds."""

_DATATYPE_RAW: Final = 0


class Counted(NamedTuple):
    """A counter after its change; `number` is 0 if `outcome` is a refusal."""

    outcome: Outcome
    number: int


class Touched(NamedTuple):
    """A document with its new expiry; None if `outcome` is a refusal."""

    outcome: Outcome
    document: StoredDocument | None


def count(
    engine: Engine,
    vb_id: int,
    key: bytes,
    delta: int,
    *,
    initial: int | None,
    expiry: int,
    cas: int = 0,
) -> Counted:
    """Add `delta` to a counter; a negative delta subtracts.

    A missing counter is created with `initial` and `expiry`; if `initial` is None the status is
    KEY_ENOENT. DELTA_BADVAL: the document is not a number.
    """
    meta = engine.meta(vb_id, key)
    if isinstance(meta, int) or meta.opcode != MUTATION:
        status = meta if isinstance(meta, int) else Status.KEY_ENOENT
        if status != Status.KEY_ENOENT or initial is None or cas:
            return Counted((status, 0, 0), 0)
        text = b"%d" % initial
        return Counted(engine.store(SET, vb_id, key, key + text, 0, expiry, 0, 0), initial)
    refusal = _refusal(engine, vb_id, key, meta, cas)
    if refusal:
        return Counted((refusal, 0, 0), 0)
    number = _number_of(_value_of(engine, vb_id, key))
    if number is None:
        return Counted((Status.DELTA_BADVAL, 0, 0), 0)
    number = (number + delta) % COUNTER_MODULUS if delta >= 0 else max(0, number + delta)
    body = key + b"%d" % number
    datatype = meta.datatype & ~SNAPPY
    outcome = engine.store(SET, vb_id, key, body, meta.flags, meta.expiry, datatype, cas)
    return Counted(outcome, number)


def extend(
    engine: Engine,
    vb_id: int,
    key: bytes,
    addition: bytes,
    *,
    is_prepended: bool,
    cas: int,
    value_bytes_max: int,
) -> Outcome:
    """Append bytes to a document, or prepend them. NOT_STORED: there is no document."""
    meta = engine.meta(vb_id, key)
    if isinstance(meta, int) or meta.opcode != MUTATION:
        is_missing = not isinstance(meta, int) or meta == Status.KEY_ENOENT
        status = Status.NOT_STORED if is_missing else meta
        assert isinstance(status, int)
        return status, 0, 0
    refusal = _refusal(engine, vb_id, key, meta, cas)
    if refusal:
        return refusal, 0, 0
    value = _value_of(engine, vb_id, key)
    if len(value) + len(addition) > value_bytes_max:
        return Status.E2BIG, 0, 0
    value = addition + value if is_prepended else value + addition
    # Two concatenated JSON documents are not JSON.
    return engine.store(SET, vb_id, key, key + value, meta.flags, meta.expiry, _DATATYPE_RAW, cas)


def touch(engine: Engine, vb_id: int, key: bytes, expiry: int) -> Touched:
    """Set the expiry of a document (absolute seconds, 0 never) and return the document."""
    meta = engine.meta(vb_id, key)
    if isinstance(meta, int):
        return Touched((meta, 0, 0), None)
    found = engine.get(vb_id, key)
    if isinstance(found, int):
        return Touched((found, 0, 0), None)
    if refusal := _refusal(engine, vb_id, key, meta, 0):
        return Touched((refusal, 0, 0), None)
    if expiry == meta.expiry:
        return Touched((Status.OK, meta.cas, meta.seqno), found)
    outcome = engine.store(SET, vb_id, key, key + found.value, meta.flags, expiry, meta.datatype, 0)
    return Touched(outcome, None if outcome[0] else found._replace(cas=outcome[1]))


def expiry_of(engine: Engine, vb_id: int, key: bytes) -> int | None:
    """Return a document's expiry, None if there is no document."""
    meta = engine.meta(vb_id, key)
    return None if isinstance(meta, int) or meta.opcode != MUTATION else meta.expiry


def _refusal(engine: Engine, vb_id: int, key: bytes, meta: StoredMeta, cas: int) -> int:
    part = engine.partitions[vb_id]
    cas = engine.locks.cas_to_match(part, key, meta.seqno, meta.cas, cas)
    if cas < 0:
        return Status.LOCKED
    return Status.KEY_EEXISTS if cas and cas != meta.cas else Status.OK


def _value_of(engine: Engine, vb_id: int, key: bytes) -> bytes:
    found = engine.get(vb_id, key)
    assert not isinstance(found, int), "its metadata said that it is there"
    return plain(found.datatype, found.value)[1]


def _number_of(value: bytes) -> int | None:
    """Return the number of a counter (unsigned, 64 bits), None if it is not a number."""
    if not 0 < len(value) <= _COUNTER_DIGITS_MAX or not value.isdigit():
        return None
    number = int(value)
    return number if number < COUNTER_MODULUS else None


class Flush:
    """Deletes in steps all documents that exist when it is created.

    Each document gets its own deletion, so streams see it. Documents written after the flush began
    stay: it deletes nothing above the seqno that the partition had then. A branch during the flush
    restores what it restores. Partitions that a restore loads documents into come last, after the
    load (`vbucket.engine.loading.loads`).
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.flushes += 1
        self._end_seqnos = [part.high_seqno for part in engine.partitions]
        self._left = list(range(engine.num_vbuckets))[::-1]
        """Partitions that are not done; the next one is the last."""
        self._loading: list[int] = []
        """Partitions to come back to after their loads."""
        self.is_waiting = False
        """Only such partitions are left: the next step comes later."""
        self._walk: KeyWalk | None = None
        """Of the partition, where it was begun."""

    def step(self, keys_max: int = FLUSH_SLICE_KEYS) -> bool:
        """Process about `keys_max` keys; return True when the flush is done.

        Raises RefusedError if a partition with replicas takes no writes now.
        """
        self.is_waiting = False
        while self._left:
            if keys_max <= 0:
                return False
            keys_max -= self._look_at(self._left[-1], keys_max)
        self._left, self._loading = self._loading, []
        self.is_waiting = bool(self._left)
        return not self._left

    def _look_at(self, vb_id: int, keys_max: int) -> int:
        """Continue with a partition; return how many keys were processed."""
        part = self._engine.partitions[vb_id]
        if part.state == VbState.FENCED or Hold.REPLICATION in part.holds:
            why = part.holds.get(Hold.REPLICATION, "its replicas have not confirmed its master")
            raise RefusedError(Status.ETMPFAIL, f"partition {part.vb_id}: {why}")
        end_seqno = self._end_seqnos[vb_id]
        keys: list[bytes] = []
        if part.item_count and end_seqno:
            if self._engine.loads.why_busy(vb_id):  # which makes more loads wait
                self._loading.append(vb_id)
            else:
                self._walk = self._walk or KeyWalk(self._engine, vb_id, end_seqno)
                keys = self._walk.take(keys_max)
        if not keys:
            self._left.pop()
            self._walk = None
        for key in keys:
            self._engine.delete_up_to(vb_id, key, end_seqno)
        return len(keys)
