"""When the store process does what, and how fast writers may go meanwhile. Sans-IO.

**Which work of the store process is next** (`StoreTurns`).

    FAILOVER_LOG   the versions of partitions that have branched    (storage.failover_logs)
    MERGE          sealed log segments into the store               (storage.merging)
    LOAD           documents of a restore into the store            (storage.loading)
    PLAN           which floors are worth raising                   (storage.compaction_schedule)
    COMPACTION     drops what the floors allow                      (storage.compaction_schedule)
    REPAIR         versions of another copy in place of damaged ones (cluster.repair.peer_repair)
    SCRUB          reads what nobody asks for, and looks for damage (storage.process.scrubbing)

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

Who calls it: dcp.server.storage.process.store_queue.

Invariants
- one turn at a time, and at most one waiting job of each kind;
- which kind is next depends only on what waits and what is owed;
- at most OWED_MAX_S is owed to any kind, and nothing once the queue is empty.

**What a merge covers, and what follows it** (`MergeCycle`).

    begin(segments)      the log has begun a new segment: which sealed segments to merge
    merged(report)       the store holds them: which segments to delete
    drop_slice()         forget a part of the frozen memtable, until it is gone

Who calls it: dcp.server.storage.merging with the store process; a node in memory directly.

Invariants
- one merge at a time: the engine freezes no second memtable before the first is merged;
- a merge covers exactly the sealed segments. Merged segments are deleted after the engine knows of
  the merge, and before the last slice, after which the next merge may begin;
- segments that a quarantine needs stay.

**How much of the time a merge works, while nobody waits for it** (`MergeDuty`).

    rotated(now_s)                    a memtable was set aside
    begin(now_s, usual_s) -> share    its merge begins, and may work for this share of the time
    hurry(now_s)                      somebody waits: it works all the time from now on
    told(now_s, part)                 so much of it is done
    left_s(now_s, usual_s)            how long it will take if it works all the time
    end()                             it is over, or failed
    worked_s(now_s)                   how long it has worked so far

A merge takes processor time and the disk from the event loop; on a machine with several nodes, from
the loops of all of them, and they often merge at the same time. But it has time until the next
memtable is full. So it takes half of that time, and rests between its steps
(dcp.server.storage.process.rests). Who hurries: dcp.server.storage.merging.

Invariants
- a merge does not rest at all if it would have to work for most of the time: compaction needs the
  rest of it, and writers would be paced for nothing;
- a merge that nobody hurries takes 1 / SHARE_MIN of its usual time at most;
- once it was hurried, it does not rest again.

**How writers are slowed down while a merge runs**, so that they need not stop (`Pacing`).

    taken(now_s, group_bytes, left_s)   a commit group was taken; a merge needs `left_s` more
    pause_s(now_s)                      how long the next group has to wait

The committer waits before it takes a group. That slows down all writers alike, because each of
them waits for its answer, and no reader. A merge makes room after `left_s`. Until then the
memtables may grow by the room that is left, so each group delays the next one by its share:

    group_bytes / room_bytes * left_s

A group that takes longer than that by itself is not delayed. Below PACED_FROM nothing waits. The
rest of the room is shared evenly: with less of it the pauses would be longer at the end.

Invariants
- a pause for one group is PAUSE_MAX_S at most. If that is not enough, the memtables get full and
  writers wait (dcp.server.storage.backpressure);
- a pause below GRAIN_S is put off until the next ones add up: a timer is not more precise.

**How fast the scrubber reads, and when a pass begins.**

    scrub_rest_s(...)      how long to rest after a piece
    scrub_due_in_s(...)    how long until the next pass begins

A pass takes `period_s` (setting `scrub_period`), because it reads at a constant rate; a small store
is through earlier, and the next pass begins a period after this one. A pass on command
(`dcpctl scrub start`) reads as fast as the processor's share allows.

Invariant: over any stretch of a pass the scrubber works for at most BUSY_MAX of the time, whatever
the period is. Then a pass takes longer than a period.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:  # the store process uses this module, and has no engine
    from vbucket.engine.engine import Engine
    from vbucket.engine.keyspace import Keyspace
    from vbucket.upkeep.merge import MergeReport

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
    REPAIR = 5
    SCRUB = 6


RATIO: Final = {Work.MERGE: 1.0, Work.LOAD: 0.6, Work.COMPACTION: 0.6, Work.SCRUB: 0.05}
"""What a kind is owed for a second of more urgent work. Dropping a version takes half as long as
merging one, so compaction keeps up even if merges follow each other without a pause."""
_ACCOUNT: Final = {
    Work.MERGE: Work.MERGE,
    Work.LOAD: Work.LOAD,
    Work.PLAN: Work.COMPACTION,
    Work.COMPACTION: Work.COMPACTION,
    Work.REPAIR: Work.SCRUB,
    Work.SCRUB: Work.SCRUB,
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


DROP_SLICE_VBUCKETS: Final = 8
"""Partitions whose frozen layer is dropped in one turn of the loop (docs/decisions.md)."""


class Merged(NamedTuple):
    """What a merge changed."""

    entered: dict[int, str]
    """Partitions that are in quarantine now -> why."""
    left: tuple[int, ...]
    """Partitions that are out of quarantine."""
    deletable: tuple[int, ...]
    """Segments that are not needed any more."""


class MergeCycle:
    """See the module. `kept`: merged segments that are kept for partitions in quarantine."""

    def __init__(self, engine: Engine, kept: Collection[int] = ()) -> None:
        self._engine = engine
        self._kept = frozenset(kept)
        self._sealed: tuple[int, ...] = ()
        self._next_vb = 0
        """The first partition whose frozen layer is not dropped yet."""

    def begin(self, segments: Sequence[int]) -> list[int]:
        """Return the segments to merge; `segments` are those of the log, the newest is not sealed.

        The caller repeats the merge until it succeeds.
        """
        self._sealed = tuple(segments[:-1])
        return [segment for segment in self._sealed if segment not in self._kept]

    def merged(self, report: MergeReport) -> Merged:
        """Take note that the store holds the sealed segments."""
        keyspace = self._engine.keyspace
        before = set(keyspace.quarantined)
        keyspace.merged(report)
        self._kept = frozenset(report.kept)
        self._next_vb = 0
        return Merged(
            {vb_id: why for vb_id, why in report.quarantined.items() if vb_id not in before},
            tuple(sorted(before - report.quarantined.keys())),
            tuple(segment for segment in self._sealed if segment not in self._kept),
        )

    def drop_slice(self) -> bool:
        """Drop the frozen layer of the next partitions; return whether the merge is over."""
        last_vb = min(self._next_vb + DROP_SLICE_VBUCKETS, self._engine.num_vbuckets)
        self._engine.keyspace.drop_frozen(self._next_vb, last_vb)
        self._next_vb = last_vb
        return last_vb == self._engine.num_vbuckets


TIME_SHARE: Final = 0.5
"""How much of the time in which a memtable gets full its merge should take."""
SHARE_MIN: Final = 0.2
"""A merge that rests for longer would gain little, and hold its memory and its segments of the log
for longer."""
SHARE_MAX: Final = 0.5
"""A merge that needs more than that does not rest. Under full load merges that rested for a part of
the time cost a server 8 % of its writes."""
SHARE_UNKNOWN: Final = 0.5
"""Of the first merges: nobody knows how long they will take."""
REST_MAX_S: Final = 0.02
"""The longest rest between two slices of dropping the frozen memtable."""


class MergeDuty:
    """See the module. Times are of any monotonic clock."""

    def __init__(self) -> None:
        self._rotated_s = 0.0
        self._filled_s = 0.0
        """How long the memtable that is merged took to get full; 0: not known."""
        self._since_s = 0.0
        """Since when the merge has worked with this share; 0: none is under way."""
        self._worked_s = 0.0
        """What it worked before that."""
        self._share = 1.0
        self._part = 0.0
        """How much of it was done when that was last told, 0 to 1."""
        self._first_s = self._first = 0.0
        """What it had worked when that was first told, and how much was done: what was before, the
        log was read."""
        self._expected_s = 0.0
        """How long it will have worked at its end, by what was told; 0: nothing was."""

    @property
    def is_under_way(self) -> bool:
        """Whether a merge is under way."""
        return bool(self._since_s)

    def rotated(self, now_s: float) -> None:
        """A memtable was set aside."""
        self._filled_s = now_s - self._rotated_s if self._rotated_s else 0.0
        self._rotated_s = now_s

    def begin(self, now_s: float, usual_s: float) -> float:
        """A merge begins; return the share of the time that it may work. `usual_s`: how long the
        last one worked; 0: there was none.
        """
        self._since_s, self._worked_s = now_s, 0.0
        self._part = self._expected_s = 0.0
        self._share = SHARE_UNKNOWN
        if usual_s and self._filled_s:
            needed = usual_s / (TIME_SHARE * self._filled_s)
            self._share = max(SHARE_MIN, needed) if needed <= SHARE_MAX else 1.0
        return self._share

    def hurry(self, now_s: float) -> None:
        """The merge works all the time from now on."""
        assert self._since_s, "a merge is under way"
        self._worked_s = self.worked_s(now_s)
        self._since_s, self._share = now_s, 1.0

    def end(self) -> None:
        """No merge is under way any more."""
        self._since_s = 0.0

    def worked_s(self, now_s: float) -> float:
        """Return how long the merge has worked so far, without its rests."""
        return self._worked_s + self._share * (now_s - self._since_s)

    def told(self, now_s: float, part: float) -> None:
        """Take note that so much of the merge is done, 0 to 1; 0: nobody knows. It is less than
        before if the merge has begun again.
        """
        if not part or part == self._part:
            return
        worked_s = self.worked_s(now_s)
        if part < self._part or not self._part:
            self._first_s, self._first = worked_s, part
        else:
            rate = (part - self._first) / max(worked_s - self._first_s, 1e-9)
            self._expected_s = worked_s + (1 - part) / rate
        self._part = part

    def left_s(self, now_s: float, usual_s: float) -> float:
        """Estimate how long the merge will take if it does not rest."""
        return left_of_merge_s(usual_s, self.worked_s(now_s), self._expected_s)

    def rest_s(self, worked_s: float) -> float:
        """Return how long to rest after a step that took so long; 0: there is no time to rest."""
        return min(REST_MAX_S, worked_s * (1 / self._share - 1))


PACED_FROM: Final = 1.1
"""Memtables that may be full before groups wait. A merge that is expected to take far too long,
because the one before it did, has a tenth of a memtable to end."""
PAUSE_MAX_S: Final = 0.05
GRAIN_S: Final = 0.001
RESERVE: Final = 64
"""One part of so many of a memtable stays free for a merge that takes longer than expected, and for
groups that are larger than the last one.
"""
USUAL_S_MIN: Final = 0.1
"""What a merge is expected to take at least: the first one has none before it."""
LEFT_S_MIN: Final = 0.1
"""What is left of a merge that told how much of it is done: its end is not told."""
LATE_SHARE: Final = 0.25
"""A merge may take this much longer than the last one. If it takes even longer, it is expected to
need this share of its time once more. Without that, a late merge would find the memtables full.
Both only until it has told how much of it is done."""


def left_of_merge_s(last_s: float, under_way_s: float, expected_s: float = 0.0) -> float:
    """Estimate how long a merge will take that has been under way for a while; the last one took
    `last_s`, and by what it has told it takes `expected_s` (0: it has told nothing).
    """
    if expected_s:
        return max(expected_s - under_way_s, LEFT_S_MIN)
    usual_s = max(USUAL_S_MIN, last_s) * (1 + LATE_SHARE)
    return max(usual_s - under_way_s, LATE_SHARE * under_way_s)


class Pacing:
    """See the module. Times are of any monotonic clock."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._not_before_s = 0.0
        self.paused_s = 0.0
        """Sum of all pauses."""

    @property
    def is_slowing(self) -> bool:
        """Whether a group may have to wait."""
        return self._not_before_s > 0

    def taken(self, now_s: float, group_bytes: int, left_s: float) -> None:
        """Take note of a group. `left_s`: the time until a merge makes room; 0: none runs."""
        keyspace = self._keyspace
        if not left_s or not self._is_due:
            self._not_before_s = 0.0
            return
        room_bytes = max(1, keyspace.memtables.room_bytes - keyspace.memtables.bytes_max // RESERVE)
        pause_s = min(PAUSE_MAX_S, group_bytes * left_s / room_bytes)
        self._not_before_s = max(self._not_before_s, now_s) + pause_s
        self.paused_s += pause_s

    def pause_s(self, now_s: float) -> float:
        """Return how long the next group has to wait; 0 if it need not."""
        pause_s = self._not_before_s - now_s
        return pause_s if pause_s >= GRAIN_S and self._is_due else 0.0

    @property
    def _is_due(self) -> bool:
        keyspace = self._keyspace
        held_bytes = keyspace.memtables.held_bytes
        return held_bytes >= PACED_FROM * keyspace.memtables.bytes_max


BUSY_MAX: Final = 0.05
"""The share of one processor core that a pass may take."""
SCRUB_FIRST_S: Final = 600.0
"""After a start the first pass ever waits so long: a server that starts has other things to do."""
SCRUB_REST_MAX_S: Final = 60.0
"""No rest is longer: settings change, and the progress should move."""
MENDED_REST_S: Final = 2.0
"""No rest for the processor is longer. A piece that only reads has one of 0.2 s: it was a mend that
took so long, and the next damage must not wait for it."""


def scrub_rest_s(
    busy_s: float, read_bytes: int, size_bytes: int, period_s: float, *, is_hurried: bool
) -> float:
    """Return how long to rest after a piece that took `busy_s` of a processor and read so many
    bytes, of `size_bytes` that there are. `is_hurried`: the pass was asked for.
    """
    for_processor_s = min(MENDED_REST_S, busy_s / BUSY_MAX - busy_s)
    if is_hurried or not period_s:
        return for_processor_s
    for_rate_s = min(SCRUB_REST_MAX_S, read_bytes * period_s / max(size_bytes, 1))
    return max(for_processor_s, for_rate_s)


def scrub_due_in_s(began_s: float, started_s: float, now_s: float, period_s: float) -> float | None:
    """Return how long until the next pass; None: only on command. The last one began at `began_s`
    (0: there was none), the process at `started_s`, Unix time. It is a period at most.
    """
    if not period_s:
        return None
    if not began_s:
        began_s = started_s + min(SCRUB_FIRST_S, period_s) - period_s
    return min(max(0.0, began_s + period_s - now_s), period_s)
