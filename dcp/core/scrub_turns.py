"""What the scrubber reads next, what is damaged, and which copies are asked for it. Sans-IO.

    met(vb_id)                    somebody met damage: its partition is looked at next
    due_in_s(...), begin_pass()   everything is read from the beginning
    next_piece(now_s)             where to read, and which partitions to look at first
    read(report, ...)             what that found: each damage is named once, or was mended
    blocks_lacking()              what another copy's versions could mend
    CopyRepairs, BlockRepair      which of these are asked for now, of whom, and what is taken

`dcp.server.storage.process.scrubbing` and `dcp.server.cluster.repair.peer_repair` run it with the
store process and sockets; the simulator runs it in virtual time.

Invariants
- at most ROWS_MAX damages are kept, the newest ones; each is told once, and again after a pass that
  did not find it. Damages at two places are two, also if they read the same: one that is mended
  leaves the other;
- what a pass finds no more is dropped at its end: it was repaired, or is gone;
- damage that was mended and comes again is new: it is looked at and asked for at once;
- a partition in which somebody meets what could not be mended is looked at once in AGAIN_S, and a
  block that no copy can give is asked for again after AGAIN_S.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from dcp.core.store_schedule import scrub_due_in_s
from dcp.session.nodes.version_reads import VersionsRead
from failover.rules.repair import sources, why_not_taken
from failover.rules.replication_record import ReplicationRecord
from vbucket.check.finding import ADVICE, Kind
from vbucket.check.scrub import AREAS, Damage, ScrubPlace, ScrubReport
from vbucket.engine.partition import Partition
from vbucket.log.record import LogDamagedError, split_entries
from vbucket.store.records import BY_SEQNO_TABLE

ROWS_MAX: Final = 100
DEATHS_MAX: Final = 2
"""So many processes may die at one place; then the pass leaves the rest of that area out."""
AGAIN_S: Final = 10.0
"""So often one damage that stays is looked at, or asked for, at most."""
SUSPECTS_MAX: Final = 8
"""Partitions that are looked at in one turn of the store process."""
TEXT_CHARS_MAX: Final = 500
_LOG_ADVICE: Final = (
    "the changes in it are still in this server's memory: take a backup now (dcpctl backup run), "
    "and do not stop the server before"
)
_Count = Annotated[int, Meta(ge=0)]
_Time = Annotated[float, Meta(description="Unix time in seconds.")]


class DamageRow(msgspec.Struct):
    """Something that is damaged."""

    kind: Annotated[str, Meta(description="As `dcpctl verify` names it.")]
    file: Annotated[str, Meta(description="Relative to the data folder.")]
    where: str
    what: str
    advice: Annotated[str, Meta(description="What to do.")]
    vb: Annotated[int | None, Meta(description="The partition, if it is known.")]
    seqnos: Annotated[list[int] | None, Meta(description="First and last seqno, if known.")]
    keys: Annotated[list[str] | None, Meta(description="From this key up to this one, if known.")]
    first_s: Annotated[_Time, Meta(description="When it was found first.")]
    last_s: Annotated[_Time, Meta(description="When it was found last.")]
    table: Annotated[str, Meta(description="Of the store; empty: it is elsewhere.")] = ""
    key: Annotated[str, Meta(description="A key of the table that leads to it, as hex.")] = ""

    @property
    def name(self) -> tuple[object, ...]:
        """What tells it from others. The place in the table has to be in it: people read keys
        without their collection, so two may look the same, and most tables have no seqnos or keys.
        """
        place = self.file, self.where, self.table, self.key
        return self.kind, *place, str(self.seqnos), str(self.keys)


class ScrubStatus(msgspec.Struct):
    """The progress of the scrubber, and what it found."""

    is_running: Annotated[bool, Meta(description="Whether a pass is under way.")] = False
    is_hurried: Annotated[bool, Meta(description="Whether it was asked for.")] = False
    area: Annotated[str, Meta(description="What it reads now: a table, or log.")] = ""
    began_s: Annotated[_Time, Meta(description="When the last pass began; 0: never.")] = 0.0
    read_bytes: Annotated[_Count, Meta(description="What it has read.")] = 0
    size_bytes: Annotated[_Count, Meta(description="Size of the store's file and the log.")] = 0
    busy_s: Annotated[float, Meta(description="Processor time that it took.")] = 0.0
    ended_s: Annotated[_Time, Meta(description="When a pass ended last; 0: never.")] = 0.0
    passes: Annotated[_Count, Meta(description="Passes that ended.")] = 0
    total_bytes: Annotated[_Count, Meta(description="What all passes have read.")] = 0
    trouble: Annotated[str, Meta(description='Why it does not go on; "": it does.')] = ""
    found: Annotated[_Count, Meta(description="Damages that were found ever.")] = 0
    mended: Annotated[_Count, Meta(description="Damages that were mended ever.")] = 0
    damages: Annotated[
        list[DamageRow], Meta(description="What is damaged now, as far as it is known.")
    ] = []


class ScrubTurns:
    """See the module. A subclass wakes who reads, and tells what was found. `now_s` is of any
    monotonic clock, `wall_s` Unix time.
    """

    def __init__(self, wall_s: float) -> None:
        self.status = ScrubStatus()
        self._started_s = wall_s
        self._found: set[tuple[object, ...]] = set()
        """What this pass has found, as far as this process has read it."""
        self._place = ScrubPlace()
        self._merges = 0
        """How many merges had ended when the store process was last asked what they met."""
        self._looked_s: dict[int, float] = {}
        """When a partition was looked at because somebody met damage, and nothing was mended."""
        self._deaths = 0
        """Of store processes at this place."""
        self._suspects: set[int] = set()
        """Partitions in which somebody met damage, until they were looked at."""
        self._is_of_pass = False
        """Whether what is asked for is a piece of a pass."""

    def wake(self) -> None:
        """A partition is to be looked at."""

    def tell_found(self, row: DamageRow) -> None:
        """Damage was found that was not known."""

    def tell_mended(self, row: DamageRow, how: str) -> None:
        """Damage was mended: write the receipt, and let readers look again."""

    def tell_gone(self, row: DamageRow) -> None:
        """A pass did not find it again."""

    def met(self, vb_id: int | None) -> None:
        """Somebody met damage: look at its partition next, if it is known."""
        if vb_id is not None:
            self._suspects.add(vb_id)
            self.wake()

    def is_asked_to_look(self, merges: int) -> bool:
        """Whether there is something to ask the store process for beside a pass. `merges`: how many
        have ended.
        """
        return bool(self._suspects) or self._merges != merges

    def due_in_s(self, wall_s: float, period_s: float) -> float | None:
        """Return how long until the next pass; None: only on command. A clock that was set back
        does not put it off by more than a period, however often this is asked.
        """
        self._started_s = min(self._started_s, wall_s)
        self.status.began_s = min(self.status.began_s, wall_s)
        return scrub_due_in_s(self.status.began_s, self._started_s, wall_s, period_s)

    def begin_pass(self, wall_s: float, *, is_hurried: bool) -> None:
        """Read everything, from now on."""
        status = self.status
        status.is_running, status.is_hurried = True, is_hurried
        status.began_s, status.read_bytes, status.busy_s = wall_s, 0, 0.0
        self._place = ScrubPlace()
        self._found.clear()
        status.area = AREAS[0]

    def next_piece(self, now_s: float) -> tuple[ScrubPlace, list[int]]:
        """Return where to read, and the partitions to look at before. One that was looked at just
        now has what cannot be mended.
        """
        before_s = now_s - AGAIN_S
        taken = sorted(self._suspects)[:SUSPECTS_MAX]
        self._suspects.difference_update(taken)
        self._is_of_pass = self.status.is_running
        place = self._place if self._is_of_pass else ScrubPlace(len(AREAS))
        return place, [vb_id for vb_id in taken if self._looked_s.get(vb_id, before_s) <= before_s]

    def read(
        self, report: ScrubReport, suspects: Sequence[int], merges: int, now_s: float, wall_s: float
    ) -> None:
        """Take what a piece found. `merges`: how many had ended when it was asked for."""
        status = self.status
        self._deaths = 0
        self._merges = merges
        was_mended = {Damage(*each).vb_id for each in report.damages if Damage(*each).mended}
        self._looked_s |= {vb_id: now_s for vb_id in suspects if vb_id not in was_mended}
        status.trouble = ""
        status.read_bytes += report.read_bytes
        status.total_bytes += report.read_bytes
        status.size_bytes = report.size_bytes
        status.busy_s += report.busy_s
        self._take([Damage(*each) for each in report.damages], wall_s)
        if self._is_of_pass:  # else one may have begun meanwhile
            self._go_on(ScrubPlace(*report.place), wall_s)

    def put_off(self, why: str, wall_s: float, *, has_died: bool) -> None:
        """A piece could not be read. `has_died`: the store process."""
        self.status.trouble = why
        self._deaths += has_died
        if self._deaths >= DEATHS_MAX:
            self._deaths = 0
            what = f"the store process died {DEATHS_MAX} times as it read this: {why}"
            damage = Damage(str(Kind.CRASH), "store/data.mdb", self.status.area, what)
            self._take([damage], wall_s)
            self._go_on(self._place.next_area(), wall_s)

    def blocks_lacking(self) -> list[DamageRow]:
        """Return the damages that another copy's versions could mend."""
        return [
            row for row in self.status.damages
            if row.kind == Kind.BLOCK and row.table == BY_SEQNO_TABLE and row.vb is not None
        ]  # fmt: skip

    def mended(self, row: DamageRow, how: str) -> None:
        """A damage is no more."""
        self.status.mended += 1
        if row.vb is not None:
            self._looked_s.pop(row.vb, None)
        self.status.damages = [each for each in self.status.damages if each.name != row.name]
        self.tell_mended(row, how)

    def _take(self, damages: list[Damage], wall_s: float) -> None:
        status = self.status
        known = {row.name: row for row in status.damages}
        for damage in damages:
            row = row_of(damage, wall_s)
            if damage.mended:
                self.mended(row, damage.mended)
                continue
            self._found.add(row.name)
            if (before := known.get(row.name)) is not None:
                before.last_s, before.what = wall_s, row.what
                continue
            known[row.name] = row
            status.damages = [*status.damages, row][-ROWS_MAX:]
            status.found += 1
            self.tell_found(row)

    def _go_on(self, place: ScrubPlace, wall_s: float) -> None:
        self._place = place
        status = self.status
        if not place.is_over:
            status.area = AREAS[place.area]
            return
        status.is_running = status.is_hurried = False
        status.area = ""
        status.ended_s = wall_s
        status.passes += 1
        # A clock that was set back tells nothing of what this pass has found.
        gone = [
            row
            for row in status.damages
            if row.last_s < status.began_s and row.name not in self._found
        ]
        for row in gone:
            self.tell_gone(row)
        status.damages = [row for row in status.damages if row not in gone]


def row_of(damage: Damage, wall_s: float) -> DamageRow:
    """Return a damage as it is told, found at this time."""
    kind = Kind(damage.kind)
    advice = _LOG_ADVICE if kind is Kind.LOG else ADVICE[kind]
    what = damage.what[:TEXT_CHARS_MAX]
    return DamageRow(
        damage.kind, damage.file, damage.where, what, advice, damage.vb_id, damage.seqnos,
        damage.keys, wall_s, wall_s, damage.table, damage.key.hex(),
    )  # fmt: skip


class CopyRepairs:
    """When other copies are asked for a damage."""

    def __init__(self) -> None:
        self._tried_s: dict[tuple[object, ...], float] = {}
        """By damage, since it was found first: when they were asked last."""

    def due(self, rows: Sequence[DamageRow], now_s: float) -> list[DamageRow]:
        """Return those of the damages that are asked for now; they count as asked for."""
        before_s = now_s - AGAIN_S
        tried = {_since(row): self._tried_s.get(_since(row), before_s) for row in rows}
        found = [row for row in rows if tried[_since(row)] <= before_s]
        self._tried_s = tried | {_since(row): now_s for row in found}
        return found


def _since(row: DamageRow) -> tuple[object, ...]:
    """Return what tells a damage from others, and from the same one that was mended before."""
    return row.first_s, *row.name


class BlockRepair:
    """One damage: whom to ask for its versions, in order, until those of one are what was there."""

    def __init__(self, row: DamageRow, record: ReplicationRecord | None, member: str) -> None:
        """`member`: this node."""
        assert row.vb is not None, "it is known"
        assert row.seqnos is not None, "a block has them"
        self.row = row
        self.vb_id = row.vb
        self.first_seqno, self.last_seqno = row.seqnos
        self._sources = iter([] if record is None else sources(record, member))
        self.why = "there is no other copy"
        """Why it is not mended so far."""

    def next_source(self) -> str | None:
        """Return the next member to ask; None: all were asked."""
        return next(self._sources, None)

    def take(self, part: Partition, name: str, answer: VersionsRead) -> list[bytes] | None:
        """Return the versions in an answer of a node; None: they may not be taken."""
        why = why_not_taken(
            part.failover, answer.failover, self.last_seqno,
            own_committed=part.committed_seqno, committed=answer.committed_seqno,
        )  # fmt: skip
        if why:
            self.why = f"node {name}: {why}"
            return None
        try:
            entries = split_entries(answer.entries)
        except LogDamagedError as error:
            self.why = f"the answer of node {name} is not one of versions: {error}"
            return None
        self.why = f"the versions of node {name} are not what was here, or not all"
        return entries
