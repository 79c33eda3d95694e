"""The driver's decisions: where the next batch ends in each partition, and which task reads it.
Pure.

    survey of the nodes + end of the last batch -> end of this batch      (`next_entries`)
    start and end of a batch                    -> steps to read          (`steps_between`)
    steps to read                               -> tasks                  (`tasks_of`)

Invariants
- the end of a batch is a state that the server can still produce: it is not below the purge seqno
  or the history floor, unless the partition is already there;
- a rollback goes to the seqno where the histories part, or to a complete state of the query below;
- a partition that would begin at 0 is compared with the table instead, if there is one (option
  `table`). That finds its state at a seqno of its own, at or above the planned end. So a branch
  might undo something of it without being below the end: until the table is at an end again
  (`Entry.compared`), a new version is reason enough to compare again, and no older state is
  complete;
- `steps_between` depends only on the two offsets. So a repeated batch gets the same plan, whatever
  happened on the server meanwhile. The reader finds out what is still available.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from clients.position import Position, Ranges, Versions
from clients.spark.offset import NO_PARTITIONS, NOTHING, Entry, Offset, decode, entry_at, trimmed
from clients.streaming.cursor import agreed_seqno, log_of, next_round
from clients.streaming.outcome import RollbackAsked
from failover.rules.history import FailoverLog
from failover.rules.rollback import Question, decide

TASK_ROWS_MIN: Final = 20_000
"""Minimum rows per task if there are several tasks. Starting a task takes 20 ms."""


class PartitionFacts(NamedTuple):
    """A node's data about a partition, all from one moment."""

    vb_id: int
    high_seqno: int
    purge_seqno: int
    history_floor: int
    versions: Versions
    """(vb_uuid, seqno at which it began), newest first."""

    @property
    def log(self) -> FailoverLog:
        """The failover log."""
        return log_of(self.versions, self.vb_id)


class GoneBack(NamedTuple):
    """A partition that must be rolled back, for errors and metrics."""

    vb_id: int
    from_seqno: int
    to_seqno: int
    versions: Versions
    """The versions that the query knew."""
    server_versions: Versions
    reason: str


class PlanStep(NamedTuple):
    """One partition's part of a batch: [a rollback,] then the changes above `start_seqno`."""

    vb_id: int
    start_seqno: int
    start_versions: Versions
    end_seqno: int
    end_versions: Versions
    rollback_to: int | None = None
    compares: bool = False
    """Compare the partition with the table instead."""


class Start(NamedTuple):
    """The position from which a partition continues, with its facts."""

    facts: PartitionFacts
    entry: Entry
    position: Position
    rollback: GoneBack | None
    compares: bool = False

    @property
    def least(self) -> int:
        """The lowest seqno at which the server can end a batch."""
        facts, seqno = self.facts, self.position.seqno
        return max(seqno, min(max(facts.history_floor, facts.purge_seqno), facts.high_seqno))


def start_of(
    entry: Entry, facts: PartitionFacts, *, compares: bool = False, is_lost: bool = False
) -> Start:
    """Return where a partition continues, by the same rule that the server uses.

    `compares`: if it would begin at 0, it is compared with the table. `is_lost`: it is, too, if it
    has no entry: the table has documents, and the query none yet.
    """
    at = entry.position
    has_branched = bool(entry.compared) and facts.versions[0] not in at.versions[:1]
    if has_branched or (compares and is_lost and entry == NOTHING):
        if compares and facts.high_seqno:
            return Start(facts, entry, Position(), None, compares=True)
        why = "a new version began after a comparison" if has_branched else "it has no entry"
        anew = GoneBack(facts.vb_id, at.seqno, 0, at.versions, facts.versions, why)
        return Start(facts, entry, Position(), anew)
    question = Question(at.seqno, at.vb_uuid, at.seqno, at.seqno, at.versions)
    decision = decide(question, facts.log, facts.high_seqno, facts.purge_seqno)
    if decision.rollback_seqno is None:
        return Start(facts, entry, at, None)
    asked = RollbackAsked(decision.rollback_seqno, facts.versions)
    back = next_round(at, asked, is_exact=True, vb_id=facts.vb_id)
    # That state is also on the server's branch, so the server's versions apply from here on.
    position = back._replace(versions=trimmed(facts.versions, back.seqno) if back.seqno else ())
    gone_back = GoneBack(
        facts.vb_id, at.seqno, back.seqno, at.versions, facts.versions, decision.reason
    )
    compares = compares and not back.seqno and bool(facts.high_seqno)
    return Start(facts, entry, position, gone_back, compares)


def next_entries(
    entries: Mapping[int, Entry],
    survey: Iterable[PartitionFacts],
    *,
    history: bool,
    rows_max: int | None = None,
    targets: Mapping[int, int] | None = None,
    compares: bool = False,
    is_lost: bool = False,
) -> tuple[dict[int, Entry], list[GoneBack]]:
    """Return where the next batch ends, and the partitions that it rolls back. `compares` and
    `is_lost`: see `start_of`.

    `rows_max`: maximum number of changes, shared fairly between partitions. A snapshot that the
    server can only send as a whole is not split. `targets`: seqnos above which nothing is read
    (Trigger.AvailableNow). Partitions that are missing in the survey stay where they are.
    """
    starts = [
        start_of(entries.get(facts.vb_id, NOTHING), facts, compares=compares, is_lost=is_lost)
        for facts in survey
    ]
    wants = {}
    for start in starts:
        vb_id, high = start.facts.vb_id, start.facts.high_seqno
        most = high if targets is None else min(high, targets.get(vb_id, 0))
        wants[vb_id] = max(most, start.least) - start.position.seqno
    granted = dict(wants)
    if rows_max is not None:  # comparisons do not count: they read what differs
        streamed = [start for start in starts if not start.compares]
        some = {start.facts.vb_id: wants[start.facts.vb_id] for start in streamed}
        granted |= shared(streamed, some, rows_max)
    result = dict(entries)
    for start in starts:
        vb_id = start.facts.vb_id
        end_seqno = start.position.seqno + granted[vb_id]
        result[vb_id] = _end_of(start, end_seqno, history=history)
    gone_back = [start.rollback for start in starts if start.rollback is not None]
    return result, [each for each in gone_back if each.from_seqno]


def are_at(
    cut: Mapping[int, Position], ends: Mapping[int, Entry], survey: Iterable[PartitionFacts]
) -> bool:
    """Return whether a planned batch ends exactly at a cut, which the server's history still has.

    It does not if history branched below the cut since, or compaction passed it.
    """
    for facts in survey:
        at = cut.get(facts.vb_id, Position())
        agreed = agreed_seqno(at.versions, at.seqno, facts.versions, facts.vb_id)
        if agreed < at.seqno or ends[facts.vb_id].seqno != at.seqno:
            return False
    return True


def _end_of(start: Start, end_seqno: int, *, history: bool) -> Entry:
    """Return the entry of a partition at a batch's end."""
    position, facts = start.position, start.facts
    is_same = start.rollback is None and not start.compares and end_seqno == position.seqno
    if is_same and (start.entry.compared or _has_versions(start, end_seqno)):
        return start.entry
    compared = _compared_after(start, end_seqno)
    rollback_to = start.rollback.to_seqno if start.rollback else None
    if compared:
        return entry_at(
            end_seqno, facts.versions, complete=((end_seqno, end_seqno),),
            rollback_to=0 if start.compares else rollback_to, compared=compared,
        )  # fmt: skip
    complete: Ranges = position.complete
    if end_seqno > position.seqno:
        complete = _complete_after(position, end_seqno, facts.history_floor, history=history)
    return entry_at(
        end_seqno, facts.versions, complete=complete, base_seqno=position.base_seqno,
        rollback_to=rollback_to,
    )  # fmt: skip


def _has_versions(start: Start, end_seqno: int) -> bool:
    """Whether a partition that stays where it is has the server's versions."""
    versions = trimmed(start.facts.versions, end_seqno) if end_seqno else ()
    return versions == start.position.versions


def _compared_after(start: Start, end_seqno: int) -> int:
    """Return how the table is at the end of a batch (`Entry.compared`)."""
    if start.compares:
        return 1
    before = start.entry.compared
    if start.rollback is not None or before in {0, 2}:
        return 0
    return 2 if end_seqno == start.facts.high_seqno else 1


def _complete_after(position: Position, end_seqno: int, floor: int, *, history: bool) -> Ranges:
    """Return the ranges with a complete state, after a batch up to `end_seqno`."""
    before: Ranges = position.complete or ((position.seqno, position.seqno),)
    if not history:
        return (*before, (end_seqno, end_seqno))
    if position.seqno < floor:  # up to the floor the server sends one de-duplicated snapshot
        return (*before, (min(floor, end_seqno), end_seqno))
    first, last = before[-1]
    assert last == position.seqno, "between batches a query has a complete state"
    return (*before[:-1], (first, end_seqno))


def shared(starts: Sequence[Start], wants: Mapping[int, int], rows_max: int) -> dict[int, int]:
    """Return how many changes of each partition go into a batch of at most `rows_max`.

    Indivisible parts come first, and at least one of them is taken, so there is progress. The rest
    is shared equally. What some partitions do not need goes to others; odd rows go in turn.
    """
    granted = dict.fromkeys(wants, 0)
    left = rows_max
    divisible = []
    for start in starts:
        vb_id = start.facts.vb_id
        need = start.least - start.position.seqno
        if need and (need <= left or left == rows_max):
            granted[vb_id] = need
            left = max(0, left - need)
        if granted[vb_id] == need and wants[vb_id] > need:
            divisible.append(vb_id)
    wanted = {vb_id: wants[vb_id] - granted[vb_id] for vb_id in divisible}
    level = _level(sorted(wanted.values()), left)
    for vb_id, want in wanted.items():
        granted[vb_id] += min(want, level)
        left -= min(want, level)
    # Less than one row each is left. The turn moves on with the seqnos that were read.
    eager = [vb_id for vb_id, want in wanted.items() if want > level]
    turn = sum(start.position.seqno for start in starts) % len(eager) if eager else 0
    for vb_id in (*eager[turn:], *eager[:turn])[:left]:
        granted[vb_id] += 1
    return granted


def _level(wants: Sequence[int], left: int) -> int:
    """Return the highest equal share, or the largest want if that is less. `wants` is sorted."""
    for index, want in enumerate(wants):
        others = len(wants) - index
        if want * others > left:
            return left // others
        left -= want
    return wants[-1] if wants else 0


def steps_between(start: Offset, end: Offset) -> list[PlanStep]:
    """Return what a batch between two offsets reads, by partition.

    Partitions without new changes are left out, also if only a new version began. The first batch
    starts at the base seqno in its end offset. Spark does not store the initial offset: if it
    repeats the first batch, it asks for that offset again, and "latest" may have moved on.
    """
    steps = []
    for name, text in end.items():
        if start.get(name) == text or name in NO_PARTITIONS:
            continue
        before = decode(start[name]) if name in start else NOTHING
        after = decode(text)
        versions, seqno = before.position.versions, before.seqno
        began = after.position.base_seqno
        if after.rollback_to is not None:
            seqno = after.rollback_to
            versions = trimmed(after.position.versions, seqno) if seqno else ()
        elif began != before.position.base_seqno:
            seqno, versions = began, trimmed(after.position.versions, began) if began else ()
        if seqno == after.seqno and after.rollback_to is None:
            continue
        step = PlanStep(int(name), seqno, versions, after.seqno, after.position.versions)
        compares = after.rollback_to == 0 and after.compared == 1
        steps.append(step._replace(rollback_to=after.rollback_to, compares=compares))
    return steps


def tasks_of(steps: Sequence[PlanStep], tasks_max: int) -> list[tuple[PlanStep, ...]]:
    """Split the steps of one node into ranges of partitions with about equally many changes."""
    rows = [step.end_seqno - step.start_seqno for step in steps]
    total = sum(rows)
    count = max(1, min(tasks_max, total // TASK_ROWS_MIN))
    tasks: list[list[PlanStep]] = [[]]
    done = 0
    for step, step_rows in zip(steps, rows, strict=True):
        if tasks[-1] and len(tasks) < count and done >= total * len(tasks) / count:
            tasks.append([])
        tasks[-1].append(step)
        done += step_rows
    return [tuple(task) for task in tasks if task]
