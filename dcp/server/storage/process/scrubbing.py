"""The scrubber: reads all that is stored at a rate, and names damage before a client meets it.

    run ── due, or start() ──> pieces of a pass, each a turn of the store process, with rests
                               (vbucket.check.scrub reads, dcp.core.store_schedule rests)
    found ──> an error in the event log, a line in the audit log, a row in the reports
    mended ─> a warning in the event log, a receipt in the audit log

`dcp.core.scrub_turns` says what is read next, and what is told. A partition in which a client or a
stream met damage is looked at next. What a merge met and mended is told after it.

How far the pass came, and what it found, is in a file of the data folder, so a restart goes on.

Invariant: a piece is the least urgent work of the store process (dcp.core.store_schedule). A stop
may come at any time: at most SAVED_S of progress is read again then.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from dcp.core.scrub_turns import DamageRow, ScrubStatus, ScrubTurns
from dcp.core.store_schedule import Work, scrub_rest_s
from dcp.server.access.audit import AuditLog
from dcp.server.files.kept_twice import mend_folder, read_kept, write_kept
from dcp.server.observe.event_log import EventLog
from dcp.server.storage.merging import MergeTroubleError, Merging
from dcp.server.storage.process.store_process import StoreProcess, StoreProcessDiedError
from dcp.server.storage.process.store_queue import FAILURES, StoreQueue
from vbucket.check.finding import Kind
from vbucket.check.scrub import Damage, ScrubPlace, ScrubReport
from vbucket.check.scrub_pieces import put_back_damages
from vbucket.log.segment_files import SEGMENT_NAME
from vbucket.log.writer import LogWriter
from vbucket.store.environment import StoreDamagedError
from vbucket.store.store import Store

SCRUB_FILE: Final = "scrub.json"
SAVED_S: Final = 30.0
"""How often the progress is written to the file."""
TROUBLE_S: Final = 10.0
"""Pause after the store process could not read a piece."""


class _Kept(msgspec.Struct):
    """The file."""

    area: int
    key: str
    status: ScrubStatus


class Scrubbing(ScrubTurns):
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
        super().__init__(time.time())
        self._merging = merging
        self._store = store
        self._data_dir = data_dir
        self._path = data_dir / SCRUB_FILE
        self._queue = queue
        self._writer = writer
        self._audit = audit
        self._log = log
        self.period_s = period_s
        self._saved_s = 0.0
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
                due_s = self.due_in_s(time.time(), self.period_s)
                if due_s is None or due_s > 0:
                    await self._rest(due_s)
                    if self.is_asked_to_look(self._merging.count):
                        await asyncio.sleep(await self._piece())  # if the process is in trouble
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

    def wake(self) -> None:
        """See ScrubTurns."""
        self._woken.set()

    async def put_versions(self, row: DamageRow, entries: list[bytes], source: str) -> bool:
        """Mend a damage with versions of another copy; return whether that is done. Raises one of
        FAILURES.
        """
        key = bytes.fromhex(row.key)

        async def ask(process: StoreProcess) -> str:
            return await process.put_versions(key, entries)

        how = await self._queue.do(Work.REPAIR, ask)
        if how:
            self.mended(row, f"{how} ({source})")
        return bool(how)

    def put_back(self, places: list[str]) -> None:
        """Write the receipts of what was put back when the store was opened."""
        self._take(put_back_damages(places), time.time())

    def take_files(self, damages: list[Damage]) -> None:
        """Take note of what was wrong with files that are kept twice."""
        self._take(damages, time.time())

    def _begin(self, *, is_hurried: bool) -> None:
        self.begin_pass(time.time(), is_hurried=is_hurried)
        self._log.info("scrubber began", is_hurried=is_hurried)

    async def _rest(self, seconds: float | None) -> None:
        """Return when it is time, when something has changed, or when somebody met damage."""
        if not self.is_asked_to_look(self._merging.count):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._woken.wait()
        self._woken.clear()

    async def _piece(self) -> float:
        """Read one piece; return how long to rest."""
        status = self.status
        was_running = status.is_running
        place, suspects = self.next_piece(time.monotonic())
        merges, end = self._merging.count, self._writer.synced_end
        if was_running and place == ScrubPlace():
            self.take_files(await asyncio.to_thread(mend_folder, self._data_dir))

        async def ask(process: StoreProcess) -> ScrubReport:
            return await process.scrub(list(place), end.to_document(), suspects)

        try:
            report = await self._queue.do(Work.SCRUB, ask)
        except FAILURES as error:
            if not status.trouble:
                self._log.warning("scrubber put off", reason=str(error), area=status.area)
            has_died = isinstance(error, StoreProcessDiedError)
            self.put_off(str(error), time.time(), has_died=has_died)
            return TROUBLE_S
        report = report._replace(damages=await self._mended_in_log(report.damages))
        self.read(report, suspects, merges, time.monotonic(), time.time())
        if was_running and not status.is_running:
            self._log.info(
                "scrubber read everything", bytes=status.read_bytes, busy_s=round(status.busy_s, 3),
                took_s=round(status.ended_s - status.began_s, 1), damages=len(status.damages),
            )  # fmt: skip
        is_old = time.monotonic() - self._saved_s >= SAVED_S
        if not self._saved_s or (was_running and (is_old or not status.is_running)):
            await self._save()
        if not was_running:
            return 0.0
        return scrub_rest_s(
            report.busy_s, report.read_bytes, report.size_bytes, self.period_s,
            is_hurried=status.is_hurried,
        )  # fmt: skip

    async def _mended_in_log(self, damages: list[list[Any]]) -> list[list[Any]]:
        """Mend what of the log is in memory; return what is to be told of all."""
        mending = self._merging.log_mending
        told = []
        for each in damages:
            damage = Damage(*each)
            found = SEGMENT_NAME.match(Path(damage.file).name) if damage.kind == Kind.LOG else None
            if found is None or not mending.knows(int(found[1])):
                told.append(each)
                continue
            with contextlib.suppress(OSError, MergeTroubleError):
                if await mending.mend([int(found[1])]):
                    continue
                await self._merging.merge_now()  # it is the newest segment's end
                continue
            told.append(each)
        return told + [list(each) for each in mending.take_mended()]

    def tell_found(self, row: DamageRow) -> None:
        """See ScrubTurns."""
        self.found.set()
        facts = {
            "file": row.file, "where": row.where, "vb_id": row.vb, "seqnos": row.seqnos,
            "keys": row.keys, "kind": row.kind,
        }  # fmt: skip
        self._log.error("damage found", **facts, reason=row.what, advice=row.advice)
        self._audit.write("damage", **facts, why=row.what)
        self._saved_s = 0.0

    def tell_mended(self, row: DamageRow, how: str) -> None:
        """See ScrubTurns."""
        self._saved_s = 0.0
        facts = {"file": row.file, "where": row.where, "vb_id": row.vb, "seqnos": row.seqnos}
        self._log.warning("damage mended", **facts, keys=row.keys, how=how)
        self._audit.write("repair", **facts, keys=row.keys, how=how, why=row.what)
        with contextlib.suppress(StoreDamagedError):  # the next merge looks again
            self._store.refresh()

    def tell_gone(self, row: DamageRow) -> None:
        """See ScrubTurns."""
        facts = {"where": row.where, "file": row.file, "seqnos": row.seqnos, "keys": row.keys}
        self._log.info("damage gone", **facts)

    async def _save(self) -> None:
        self._saved_s = time.monotonic()
        kept = _Kept(self._place.area, self._place.key.hex(), self.status)
        try:
            await asyncio.to_thread(write_kept, self._path, msgspec.json.encode(kept) + b"\n")
        except OSError as error:
            self._log.warning("progress of the scrubber not kept", reason=str(error))


def read_scrub(data_dir: Path) -> _Kept:
    """Return what the file of a data folder holds. Raises OSError, msgspec.MsgspecError."""
    return msgspec.json.decode(read_kept(data_dir / SCRUB_FILE).content, type=_Kept)
