"""Which work of the store process is next. Sans-IO.

    FAILOVER_LOG   the versions of partitions that have branched    (storage.failover_logs)
    MERGE          sealed log segments into the store               (storage.merging)
    LOAD           documents of a restore into the store            (storage.loading)
    PLAN           which floors are worth raising                   (storage.compaction_schedule)
    COMPACTION     drops what the floors allow                      (storage.compaction_schedule)

    wants(work, now_s)                   work of this kind waits for its turn
    gives_up(work)                       it does not wait any more
    begin(now_s) -> work                 the turn of the most urgent kind; None: nothing waits
    end(now_s, goes_on=...)              the turn is over; with `goes_on` the work needs another one

This is all work of the store process. A turn is one request to it, which is not interrupted. Plans
and compactions take many short turns (SLICE_S), so a merge waits for one of them at most. A merge
takes one turn with all of its slices, and so does a load.

The most urgent kind is next, with one exception, so that nothing starves. Work that waits during
a turn of a more urgent kind is owed a part of that time (RATIO). Once a slice is owed, it goes
first, until it has had that time. So while it waits it gets at least RATIO / (1 + RATIO) of all
time, but for one turn of the other kinds.

Who calls it: dcp.server.storage.store_queue.

Invariants
- one turn at a time, and at most one waiting job of each kind;
- which kind is next depends only on what waits and what is owed;
- at most OWED_MAX_S is owed to any kind, and nothing once the queue is empty.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

SLICE_S: Final = 0.15
"""Duration of one slice of a long job. The commit of a transaction takes a tenth of it."""
OWED_MAX_S: Final = 16.0
"""A merge that waited for a disk for minutes need not wait for minutes afterwards."""


class Work(IntEnum):
    """Kinds of work, the most urgent first."""

    FAILOVER_LOG = 0
    MERGE = 1
    LOAD = 2
    PLAN = 3
    COMPACTION = 4


RATIO: Final = {Work.MERGE: 1.0, Work.LOAD: 0.6, Work.COMPACTION: 0.6}
"""What a kind is owed for a second of more urgent work. Dropping a version takes half as long as
merging one, so compaction keeps up even if merges follow each other without a pause."""
_ACCOUNT: Final = {
    Work.MERGE: Work.MERGE,
    Work.LOAD: Work.LOAD,
    Work.PLAN: Work.COMPACTION,
    Work.COMPACTION: Work.COMPACTION,
}
"""Whose time a kind spends: plans and compactions are parts of the same job."""


class StoreTurns:
    """See the module. Times are of any monotonic clock."""

    def __init__(self) -> None:
        self.running: Work | None = None
        self._began_s = 0.0
        self._waiting: dict[Work, float] = {}
        """Kind -> when it began to wait."""
        self._owed_s = dict.fromkeys(RATIO, 0.0)

    def wants(self, work: Work, now_s: float) -> None:
        """Have work of this kind wait for its turn."""
        assert work not in self._waiting, "one task at a time asks for each kind of work"
        self._waiting[work] = now_s

    def gives_up(self, work: Work) -> None:
        """Take note that nobody waits for this kind of work any more."""
        del self._waiting[work]
        self._forget_if_idle()

    def begin(self, now_s: float) -> Work | None:
        """Begin the next turn, if there is one; return its kind."""
        assert self.running is None, "one turn at a time"
        work = self._next()
        if work is not None:
            del self._waiting[work]
            self.running, self._began_s = work, now_s
        return work

    def end(self, now_s: float, *, goes_on: bool = False) -> None:
        """End the turn. With `goes_on` its work waits for another one from now on."""
        ended = self.running
        assert ended is not None, "a turn was begun"
        self.running = None
        for account, ratio in RATIO.items():
            owed_s = self._owed_s[account] + ratio * self._waited_s(account, ended, now_s)
            if _ACCOUNT.get(ended) == account:
                owed_s = max(0.0, owed_s - (now_s - self._began_s))
            self._owed_s[account] = min(owed_s, OWED_MAX_S)
        if goes_on:
            self.wants(ended, now_s)
        self._forget_if_idle()

    def ahead_s(self, work: Work, now_s: float) -> float:
        """Estimate how long waiting work waits for its turn: the running slice, and then what is
        owed to less urgent work.
        """
        running_s = 0.0 if self.running is None else now_s - self._began_s
        slice_s = 0.0 if self.running is None else SLICE_S
        others = [each for each in (*self._waiting, self.running) if each is not None]
        accounts = {_ACCOUNT[each] for each in others if each > work}
        owed_s = sum(self._owed_s[account] for account in accounts if self._is_owed(account))
        return max(0.0, max(slice_s, owed_s) - running_s)

    def _next(self) -> Work | None:
        owed = [work for work in self._waiting if self._is_owed(_ACCOUNT.get(work))]
        return min(owed or self._waiting, default=None)

    def _is_owed(self, account: Work | None) -> bool:
        return account is not None and self._owed_s[account] >= SLICE_S

    def _waited_s(self, account: Work, ended: Work, now_s: float) -> float:
        """Return how long work of an account has waited for the turn that ends."""
        waited_s = (
            now_s - max(since_s, self._began_s)
            for work, since_s in self._waiting.items()
            if work > ended and _ACCOUNT.get(work) == account
        )
        return max(waited_s, default=0.0)

    def _forget_if_idle(self) -> None:
        if self.running is None and not self._waiting:
            self._owed_s = dict.fromkeys(RATIO, 0.0)
