"""Locks of documents: GET_AND_LOCK and UNLOCK. Sans-IO.

A lock keeps everybody who does not know its CAS from changing a document for a while. It is kept in
memory only: a restart, a new version of the partition, and a change of the document end it.

Its CAS is drawn, from numbers that no document has. A CAS by the clock could be given again, to a
document, by a process that knows nothing of the lock: the next one here, or the next master.

Invariants
- a lock holds for one version of a document: the partition's vb_uuid and the document's seqno. So
  nothing that changes a document has to know of its lock, and a branch cannot leave one behind;
- no document has the CAS of a lock, and no other lock has it;
- a lock is over at `until_ns`, whether or not it was removed by then;
- there are at most LOCKS_MAX locks.

Who calls it: the engine, before changes, and the session's lock commands. While `held` is empty,
nobody needs to ask.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from vbucket.engine.partition import Partition
from vbucket.model.ids import Draws

LOCKED_CAS: Final = 2**64 - 1
"""The CAS of a locked document, as everybody but the holder of the lock sees it."""
LOCK_BIT: Final = 1 << 63
"""Documents' CAS are times, which do not have it before the year 2262."""
DRAWN_BITS: Final = 62
"""One bit of 64 is left out, so no lock has LOCKED_CAS."""
_REFUSED: Final = -1
LOCKS_MAX: Final = 100_000
"""A lock takes some 400 bytes: 40 MB."""
SWEEP_NS: Final = 1_000_000_000
"""Time between searches for locks that are over. Each looks at every lock: 10 ms at most."""


class Lock(NamedTuple):
    """See the module. `cas` opens it."""

    vb_uuid: int
    seqno: int
    cas: int
    until_ns: int


class Locks:
    """The locks of a node. Times are Unix nanoseconds."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self.held: dict[tuple[int, bytes], Lock] = {}
        """(partition, stored key) -> lock; some may be over."""
        self.now_ns = 0
        """The time. The engine sets it before each batch."""
        self._sweep_at_ns = 0

    def sweep_if_due(self) -> None:
        """Remove the locks that are over if the last search was long ago."""
        if self.now_ns >= self._sweep_at_ns:
            self._sweep()

    def of(self, part: Partition, key: bytes, seqno: int) -> Lock | None:
        """Return the lock of a document whose newest version is `seqno`; None: it is not locked."""
        lock = self.held.get((part.vb_id, key))
        if lock is None or lock.until_ns <= self.now_ns:
            return None
        return lock if (lock.vb_uuid, lock.seqno) == (part.vb_uuid, seqno) else None

    def lock(self, part: Partition, key: bytes, seqno: int, time_ns: int) -> int:
        """Lock a document that is not locked, for `time_ns`; return the CAS that opens the lock.

        0: there are too many locks.
        """
        assert self.of(part, key, seqno) is None, "it is locked already"
        if len(self.held) >= LOCKS_MAX and (part.vb_id, key) not in self.held:
            self._sweep()
            if len(self.held) >= LOCKS_MAX:
                return 0
        cas = LOCK_BIT | self._draws.getrandbits(DRAWN_BITS)
        self.held[part.vb_id, key] = Lock(part.vb_uuid, seqno, cas, self.now_ns + time_ns)
        return cas

    def unlock(self, part: Partition, key: bytes) -> None:
        """Remove the lock of a document, if there is one."""
        self.held.pop((part.vb_id, key), None)

    def take_back(self, part: Partition, key: bytes, cas: int) -> None:
        """Remove the lock that was given with this CAS, if it is still there: its client is told
        that nothing was done.
        """
        lock = self.held.get((part.vb_id, key))
        if lock is not None and lock.cas == cas:
            del self.held[part.vb_id, key]

    def put_back(self, part: Partition, key: bytes, lock: Lock) -> None:
        """Let a lock be there again, unless there is another one: who unlocked it is told that
        nothing was done. If the document was changed since, the lock is one of an older version.
        """
        if len(self.held) < LOCKS_MAX:
            self.held.setdefault((part.vb_id, key), lock)

    def cas_to_match(self, part: Partition, key: bytes, seqno: int, own_cas: int, cas: int) -> int:
        """Return the CAS that a change with `cas` has to match: the document's own if `cas` opens
        its lock, and `cas` itself if there is no lock. Negative: the document is locked.
        """
        lock = self.of(part, key, seqno) if self.held else None
        if lock is None:
            return cas
        return own_cas if cas == lock.cas else _REFUSED

    def shown_cas(self, part: Partition, key: bytes, seqno: int, cas: int) -> int:
        """Return the CAS that readers see of a document: LOCKED_CAS while it is locked."""
        return cas if self.of(part, key, seqno) is None else LOCKED_CAS

    def _sweep(self) -> None:
        """Remove the locks that are over."""
        now_ns = self.now_ns
        self._sweep_at_ns = now_ns + SWEEP_NS
        over = [place for place, lock in self.held.items() if lock.until_ns <= now_ns]
        for place in over:
            del self.held[place]
