"""The scrubber: reads all that is stored at a rate, and names damage before a client meets it.

    run ── due, or start() ──> pieces of a pass, each a turn of the store process, with rests
                               (vbucket.check.scrub reads, dcp.core.store_schedule rests)
    found ──> an error in the event log, a line in the audit log, a row in the reports
    mended ─> a warning in the event log, a receipt in the audit log

A partition in which a client or a stream met damage is looked at next. What a merge met and
mended is told after it.

How far the pass came, and what it found, is in a file of the data folder, so a restart goes on.

Invariants
- a piece is the least urgent work of the store process (dcp.core.store_schedule). A stop may come
  at any time: at most SAVED_S of progress is read again then;
- at most ROWS_MAX damages are kept, the newest ones; each is told once, and again after a pass that
  did not find it;
- what a pass finds no more is dropped at its end: it was repaired, or is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from dcp.core.store_schedule import Work, scrub_due_in_s, scrub_rest_s
from dcp.server.access.audit import AuditLog
from dcp.server.access.users_file import replace_file
from dcp.server.observe.event_log import EventLog
from dcp.server.storage.merging import MergeTroubleError, Merging
from dcp.server.storage.process.scrub_work import ScrubReport, put_back_damages
from dcp.server.storage.process.store_process import StoreProcess, StoreProcessDiedError
from dcp.server.storage.process.store_queue import FAILURES, StoreQueue
from vbucket.check.finding import ADVICE, Kind
from vbucket.check.scrub import AREAS, Damage, ScrubPlace
from vbucket.log.segment_files import SEGMENT_NAME
from vbucket.log.writer import LogWriter
from vbucket.store.environment import StoreDamagedError
from vbucket.store.records import BY_SEQNO_TABLE
from vbucket.store.store import Store

SCRUB_FILE: Final = "scrub.json"
ROWS_MAX: Final = 100
SAVED_S: Final = 30.0
"""How often the progress is written to the file."""
TROUBLE_S: Final = 10.0
"""Pause after the store process could not read a piece."""
DEATHS_MAX: Final = 2
"""So many processes may die at one place; then the pass leaves the rest of that area out."""
AGAIN_S: Final = 10.0
"""A partition that somebody meets damage in is looked at so often, at most."""
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
        """What tells it from others."""
        return self.kind, self.where, str(self.seqnos), str(self.keys), self.file


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


class _Kept(msgspec.Struct):
    """The file."""

    area: int
    key: str
    status: ScrubStatus


class Scrubbing:
    """See the module. `run` is the background task."""

    def __init__(
        self,
        data_dir: Path,
        queue: StoreQueue,
        merging: Merging,
        store: Store,
        writer: LogWriter,
        audit: AuditLog,
        log: EventLog,
        period_s: float,
    ) -> None:
        """`period_s`: in what time everything is read; 0: only on command."""
        self._merging = merging
        self._store = store
        self._path = data_dir / SCRUB_FILE
        self._queue = queue
        self._writer = writer
        self._audit = audit
        self._log = log
        self.period_s = period_s
        self.status = ScrubStatus()
        self._place = ScrubPlace()
        self._started_s = time.time()
        self._saved_s = 0.0
        self._merges = 0
        """How many merges had ended when the store process was last asked what they met."""
        self._looked_s: dict[int, float] = {}
        """When a partition was looked at because somebody met damage there."""
        self._deaths = 0
        """Of store processes at this place."""
        self._suspects: set[int] = set()
        """Partitions in which somebody met damage, until they were looked at."""
        self._woken = asyncio.Event()
        merging.watch(self._woken)
        self.found = asyncio.Event()
        """Set when damage is found that was not known."""
        try:
            kept = read_scrub(data_dir)
            self.status, self._place = kept.status, ScrubPlace(kept.area, bytes.fromhex(kept.key))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            log.warning("progress of the scrubber lost", file=str(self._path), reason=str(error))

    async def run(self) -> None:
        """Read when it is due, until cancelled."""
        while True:
            if not self.status.is_running:
                due_s = scrub_due_in_s(
                    self.status.began_s, self._started_s, time.time(), self.period_s
                )
                if due_s is None or due_s > 0:
                    await self._rest(due_s)
                    if self._is_asked_to_look and (pause_s := await self._piece()):
                        await asyncio.sleep(pause_s)  # the store process is in trouble
                    continue
                self._begin(is_hurried=False)
            pause_s = await self._piece()
            if self.status.trouble:
                await asyncio.sleep(pause_s)
            else:
                await self._rest(pause_s)

    def start(self) -> ScrubStatus:
        """Begin a pass now, or let the one under way take all of its share of the processor."""
        if not self.status.is_running:
            self._begin(is_hurried=True)
            self._woken.set()
        elif not self.status.is_hurried:
            self.status.is_hurried = True
            self._woken.set()
        return self.status

    def set_period(self, period_s: float) -> None:
        """Follow the setting."""
        self.period_s = period_s
        self._woken.set()

    def brief(self) -> str:
        """Return the progress in a few words, for `dcpctl status`."""
        status = self.status
        damages = f"{len(status.damages)} damages" if status.damages else "nothing is damaged"
        if status.trouble:
            return f"does not go on: {status.trouble}; {damages}"
        if status.is_running:
            share = min(99, 100 * status.read_bytes // max(1, status.size_bytes))
            return f"{share} % of a pass is read; {damages}"
        if not status.ended_s:
            return "nothing was read yet"
        hours = max(0.0, time.time() - status.ended_s) / 3600
        return f"all was read {hours:.0f} h ago; {damages}"

    def met(self, vb_id: int | None) -> None:
        """Somebody met damage: look at its partition next, if it is known."""
        if vb_id is not None:
            self._suspects.add(vb_id)
            self._woken.set()

    def blocks_lacking(self) -> list[DamageRow]:
        """Return the damages that another copy's versions could mend."""
        return [
            row for row in self.status.damages
            if row.kind == Kind.BLOCK and row.table == BY_SEQNO_TABLE and row.vb is not None
        ]  # fmt: skip

    async def put_versions(self, row: DamageRow, entries: list[bytes], source: str) -> bool:
        """Mend a damage with versions of another copy; return whether that is done. Raises one of
        FAILURES.
        """
        key = bytes.fromhex(row.key)

        async def ask(process: StoreProcess) -> str:
            return await process.put_versions(key, entries)

        how = await self._queue.do(Work.REPAIR, ask)
        if how:
            self._tell_mended(row, f"{how} ({source})")
        return bool(how)

    def put_back(self, places: list[str]) -> None:
        """Write the receipts of what was put back when the store was opened."""
        self._found(put_back_damages(places))

    def _forget(self, row: DamageRow) -> None:
        self.status.damages = [each for each in self.status.damages if each.name != row.name]
        self._saved_s = 0.0

    def _begin(self, *, is_hurried: bool) -> None:
        status = self.status
        status.is_running, status.is_hurried = True, is_hurried
        status.began_s, status.read_bytes, status.busy_s = time.time(), 0, 0.0
        self._place = ScrubPlace()
        status.area = AREAS[0]
        self._log.info("scrubber began", is_hurried=is_hurried)

    @property
    def _is_asked_to_look(self) -> bool:
        return bool(self._suspects) or self._merges != self._merging.count

    def _take_suspects(self) -> list[int]:
        """Take partitions to look at. One that was looked at just now has what cannot be mended."""
        before_s = time.monotonic() - AGAIN_S
        taken = sorted(self._suspects)[:SUSPECTS_MAX]
        self._suspects.difference_update(taken)
        return [vb_id for vb_id in taken if self._looked_s.get(vb_id, before_s) <= before_s]

    async def _rest(self, seconds: float | None) -> None:
        """Return when it is time, when something has changed, or when somebody met damage."""
        if not self._is_asked_to_look:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._woken.wait()
        self._woken.clear()

    async def _piece(self) -> float:
        """Read one piece; return how long to rest."""
        status, suspects = self.status, self._take_suspects()
        place = self._place if status.is_running else ScrubPlace(len(AREAS))
        merges, end = self._merging.count, self._writer.synced_end

        async def ask(process: StoreProcess) -> ScrubReport:
            return await process.scrub(list(place), end.to_document(), suspects)

        try:
            report = await self._queue.do(Work.SCRUB, ask)
        except FAILURES as error:
            self._failed(error)
            return TROUBLE_S
        self._deaths = 0
        self._merges = merges
        self._looked_s |= dict.fromkeys(suspects, time.monotonic())
        status.trouble = ""
        status.read_bytes += report.read_bytes
        status.total_bytes += report.read_bytes
        status.size_bytes = report.size_bytes
        status.busy_s += report.busy_s
        await self._take([Damage(*each) for each in report.damages])
        if not status.is_running:
            if not self._saved_s:
                await self._save()
            return 0.0
        self._go_on(ScrubPlace(*report.place))
        if time.monotonic() - self._saved_s >= SAVED_S or not status.is_running:
            await self._save()
        return scrub_rest_s(
            report.busy_s, report.read_bytes, report.size_bytes, self.period_s,
            is_hurried=status.is_hurried,
        )  # fmt: skip

    async def _take(self, damages: list[Damage]) -> None:
        """Mend what of the log is in memory; then tell of all."""
        mending = self._merging.log_mending
        named = []
        for damage in damages:
            found = SEGMENT_NAME.match(Path(damage.file).name) if damage.kind == Kind.LOG else None
            if found is None or not mending.knows(int(found[1])):
                named.append(damage)
                continue
            with contextlib.suppress(OSError, MergeTroubleError):
                if await mending.mend([int(found[1])]):
                    continue
                await self._merging.merge_now()  # it is the newest segment's end
                continue
            named.append(damage)
        self._found(named + mending.take_mended())

    def _failed(self, error: Exception) -> None:
        if not self.status.trouble:
            self._log.warning("scrubber put off", reason=str(error), area=self.status.area)
        self.status.trouble = str(error)
        self._deaths += isinstance(error, StoreProcessDiedError)
        if self._deaths >= DEATHS_MAX:
            self._deaths = 0
            what = f"the store process died {DEATHS_MAX} times as it read this: {error}"
            self._found([Damage(str(Kind.CRASH), "store/data.mdb", self.status.area, what)])
            self._go_on(self._place.next_area())

    def _go_on(self, place: ScrubPlace) -> None:
        self._place = place
        if not place.is_over:
            self.status.area = AREAS[place.area]
            return
        status = self.status
        status.is_running = status.is_hurried = False
        status.area = ""
        status.ended_s = time.time()
        status.passes += 1
        for row in status.damages:
            if row.last_s < status.began_s:
                self._log.info("damage gone", where=row.where, file=row.file, seqnos=row.seqnos)
        status.damages = [row for row in status.damages if row.last_s >= status.began_s]
        self._log.info(
            "scrubber read everything", bytes=status.read_bytes, busy_s=round(status.busy_s, 3),
            took_s=round(status.ended_s - status.began_s, 1), damages=len(status.damages),
        )  # fmt: skip

    def _found(self, damages: list[Damage]) -> None:
        status, now_s = self.status, time.time()
        known = {row.name: row for row in status.damages}
        for damage in damages:
            row = _row(damage, now_s)
            if damage.mended:
                self._tell_mended(row, damage.mended)
                continue
            if (before := known.get(row.name)) is not None:
                before.last_s, before.what = now_s, row.what
                continue
            known[row.name] = row
            self.found.set()
            status.damages = [*status.damages, row][-ROWS_MAX:]
            status.found += 1
            facts = {
                "file": row.file, "where": row.where, "vb_id": row.vb, "seqnos": row.seqnos,
                "keys": row.keys, "kind": row.kind,
            }  # fmt: skip
            self._log.error("damage found", **facts, reason=row.what, advice=row.advice)
            self._audit.write("damage", **facts, why=row.what)
            self._saved_s = 0.0

    def _tell_mended(self, row: DamageRow, how: str) -> None:
        """Write the receipt of a repair, and let readers look again."""
        self.status.mended += 1
        self._forget(row)
        facts = {"file": row.file, "where": row.where, "vb_id": row.vb, "seqnos": row.seqnos}
        self._log.warning("damage mended", **facts, keys=row.keys, how=how)
        self._audit.write("repair", **facts, keys=row.keys, how=how, why=row.what)
        with contextlib.suppress(StoreDamagedError):  # the next merge looks again
            self._store.refresh()

    async def _save(self) -> None:
        self._saved_s = time.monotonic()
        kept = _Kept(self._place.area, self._place.key.hex(), self.status)
        try:
            await asyncio.to_thread(replace_file, self._path, msgspec.json.encode(kept) + b"\n")
        except OSError as error:
            self._log.warning("progress of the scrubber not kept", reason=str(error))


def read_scrub(data_dir: Path) -> _Kept:
    """Return what the file of a data folder holds. Raises OSError, msgspec.MsgspecError."""
    return msgspec.json.decode((data_dir / SCRUB_FILE).read_bytes(), type=_Kept)


def _row(damage: Damage, now_s: float) -> DamageRow:
    kind = Kind(damage.kind)
    advice = _LOG_ADVICE if kind is Kind.LOG else ADVICE[kind]
    what = damage.what[:TEXT_CHARS_MAX]
    return DamageRow(
        damage.kind, damage.file, damage.where, what, advice, damage.vb_id, damage.seqnos,
        damage.keys, now_s, now_s, damage.table, damage.key.hex(),
    )  # fmt: skip
