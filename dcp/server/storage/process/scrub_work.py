"""The scrubber's pieces in the store process, between its other work.

What a piece, a merge or a client met is mended if this folder alone can prove what was there
(`vbucket.check.mend`). Either way it is in the report of the next piece.

Who calls it: `dcp.server.storage.process.store_process`. `vbucket.check.scrub` has what is checked;
here are the files. What a piece cost goes back with it: the server rests accordingly
(`dcp.core.store_schedule`).
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from dcp.server.storage.folder import log_path, store_path
from vbucket.check.finding import Kind
from vbucket.check.mend import lacking_in, mend, put_leaf, put_versions
from vbucket.check.scrub import (
    AREAS,
    LOG_AREA,
    Damage,
    LogScrub,
    Piece,
    ScrubPlace,
    TableScrub,
    segment_to_scrub,
)
from vbucket.log.end_mark import LogEnd
from vbucket.log.segment_files import read_segment, segment_name, segments_in
from vbucket.store.environment import KeptRows, StoreDamagedError
from vbucket.store.lmdb.lmdb_file import PageFile, check_file
from vbucket.store.lmdb.page_mend import PageMender
from vbucket.store.lmdb.page_scan import PageScan
from vbucket.store.lmdb.page_sums import SUMS_FILE_NAME, KnownSums
from vbucket.store.records import BY_SEQNO_TABLE

PIECE_S: Final = 0.01
"""How long a piece takes at most, but for one leaf or one segment's bytes."""
PIECE_BYTES: Final = 1 << 20
GIVEN_MAX: Final = 100
"""Small blocks of damaged leaves that wait for the others of their leaf."""
ROUNDS_MAX: Final = 64
"""So often one place is read again after something there was mended."""
PUT_BACK: Final = "it was written as it was, which the store process or a copy knew"
_STORE_FILE: Final = "store/data.mdb"


class ScrubReport(NamedTuple):
    """What a piece found and cost."""

    place: list[Any]
    """`ScrubPlace`: where to go on."""
    read_bytes: int
    damages: list[list[Any]]
    """`Damage` each."""
    busy_s: float
    """Processor time."""
    size_bytes: int
    """Of the store and the log: what a pass reads."""


class ScrubWork:
    """See the module."""

    def __init__(
        self, data_path: Path, kept: KeptRows | None = None, by_heart: KnownSums | None = None
    ) -> None:
        """`kept`: rows of tables as of the last commit. `by_heart`: who puts damaged checksums
        back, and has to know those of pages that are mended.
        """
        self._data_path = data_path
        self._by_heart = by_heart
        self._kept = {} if kept is None else kept
        self._file: PageFile | None = None
        self._segment: LogScrub | None = None
        self._met: list[Damage] = []
        """What was met since the last report, mended or not."""
        self._given: dict[bytes, list[bytes]] = {}
        """Versions from elsewhere that wait for others of the same leaf, by their key."""
        self._rounds = 0
        """How often the piece at the same place was read again after something was mended."""

    def piece(self, request: dict[str, Any]) -> ScrubReport:
        """Look at the partitions `suspects`, then read the next piece: `place`, and `log_end` as
        `LogEnd.to_document`. Nobody writes to the store meanwhile.
        """
        began_s = time.process_time()
        end_s = time.monotonic() + PIECE_S
        place = ScrubPlace(*request["place"])
        for vb_id in request["suspects"]:
            self.mend_partition(vb_id)
        if place.is_over:
            piece = Piece(place, 0, [])
        elif AREAS[place.area] == LOG_AREA:
            piece = self._log(place, LogEnd.from_document(request["log_end"]), end_s)
        else:
            piece = self._tables(place, end_s)
        damages, self._met = [*self._met, *piece.damages], []
        return ScrubReport(
            list(piece.place), piece.read_bytes, [list(each) for each in damages],
            time.process_time() - began_s, self._size_bytes(),
        )  # fmt: skip

    def _tables(self, place: ScrubPlace, end_s: float) -> Piece:
        folder = store_path(self._data_path)
        try:
            if place == ScrubPlace():
                check_file(folder)  # both meta pages, the list of tables, the free pages
            if self._file is None:
                self._file = PageFile(folder, self._by_heart)
            scrub = TableScrub(PageScan(self._file))
        except StoreDamagedError as error:
            damage = Damage(str(Kind.PAGES), _STORE_FILE, "the store's file", str(error))
            return Piece(ScrubPlace(AREAS.index(LOG_AREA)), 0, [damage])
        piece = scrub.piece(place, PIECE_BYTES, lambda: time.monotonic() >= end_s)
        damages = self._mended(piece.damages)
        mended = [each for each in damages if each.mended]
        if mended and self._rounds < ROUNDS_MAX:
            self._rounds += 1
            return Piece(place, 0, mended)  # what was behind these is read now
        self._rounds = 0
        return piece._replace(damages=damages)

    def mend_partition(self, vb_id: int) -> bool:
        """Look at all of a partition that somebody met damage in; return whether any was mended."""
        try:
            if self._file is None:
                self._file = PageFile(store_path(self._data_path), self._by_heart)
            for round_number in range(ROUNDS_MAX):
                found = TableScrub(PageScan(self._file)).partition(vb_id)
                damages = self._mended(found)
                mended = [each for each in damages if each.mended]
                self._met += mended
                if not mended:
                    self._met += damages
                    return round_number > 0
        except (StoreDamagedError, OSError):
            return False  # the pass names it
        return True

    def put_back(self, places: list[str]) -> None:
        """Take note of what the store itself has put back (`KvEnv.mend`)."""
        self._met += put_back_damages(places)

    def put_versions(self, request: dict[str, Any]) -> str:
        """Mend the block `key` with `entries` of another copy; return how, "" if that cannot be.
        Nobody writes to the store meanwhile.
        """
        with suppress(StoreDamagedError, OSError):
            if self._file is None:
                self._file = PageFile(store_path(self._data_path), self._by_heart)
            key, entries = request["key"], request["entries"]
            if len(self._given) >= GIVEN_MAX:
                self._given.clear()
            with PageMender(self._file) as mender:
                how = put_leaf(mender, key, {**self._given, key: entries})
                if how is None:
                    return put_versions(mender, key, entries)
                self._given[key] = entries
                if how:
                    self._given.clear()
                return how
        return ""

    def _mended(self, damages: list[Damage]) -> list[Damage]:
        """Mend what can be; return the damages, those that are mended with the word how."""
        if not any(each.table for each in damages):
            return damages
        assert self._file is not None, "they were found in it"
        done: list[Damage] = []
        for damage in damages:
            how = ""
            with suppress(StoreDamagedError, OSError):
                if damage.table:
                    with PageMender(self._file) as mender:
                        how = mend(mender, damage.table, damage.key, self._kept)
                        if not how and damage.table == BY_SEQNO_TABLE:
                            done += _parts(mender, damage)
                            continue
            done.append(damage._replace(mended=how))
        return done

    def _log(self, place: ScrubPlace, end: LogEnd, end_s: float) -> Piece:
        folder = log_path(self._data_path)
        if self._segment is None:
            found = segment_to_scrub(place, segments_in(folder), end)
            if found is None:
                return Piece(place.next_area(), 0, [])
            segment, size_bytes = found
            name = f"log/{segment_name(segment)}"
            try:
                data = read_segment(folder, segment)[:size_bytes]
            except KeyError:  # it was merged meanwhile
                after = (segment + 1).to_bytes(8, "big")
                return Piece(place._replace(key=after), 0, [])
            except OSError as error:
                after = (segment + 1).to_bytes(8, "big")
                what = f"it cannot be read: {error.strerror}"
                damage = Damage(str(Kind.LOG), name, f"segment {segment} of the log", what)
                return Piece(place._replace(key=after), 0, [damage])
            self._segment = LogScrub(segment, data, name)
        piece = self._segment.piece(place, PIECE_BYTES, lambda: time.monotonic() >= end_s)
        if piece.place != place:
            self._segment = None
        return piece

    def _size_bytes(self) -> int:
        paths = [store_path(self._data_path) / "data.mdb", *log_path(self._data_path).iterdir()]
        size_bytes = 0
        for path in paths:
            try:
                size_bytes += path.stat().st_size
            except FileNotFoundError:  # a segment was merged meanwhile
                continue
        return size_bytes


def put_back_damages(places: list[str]) -> list[Damage]:
    """Return the receipts of `KvEnv.mend`."""
    kind, what = str(Kind.PAGES), "it was not what was written last"
    return [
        Damage(
            kind, f"store/{SUMS_FILE_NAME}" if place == SUMS_FILE_NAME else _STORE_FILE, place,
            what, mended=PUT_BACK,
        )
        for place in places
    ]  # fmt: skip


def _parts(mender: PageMender, damage: Damage) -> list[Damage]:
    """Return what other copies can give for a damaged leaf of by_seqno: each part is a damage of
    its own. Without such parts it is the damage itself. Raises StoreDamagedError.
    """
    parts = [
        damage._replace(
            kind=str(Kind.BLOCK), vb_id=int.from_bytes(each.key[:2], "big"),
            where=f"partition {int.from_bytes(each.key[:2], 'big')}, table {BY_SEQNO_TABLE}",
            seqnos=[each.first_seqno, each.last_seqno], key=each.key,
        )
        for each in lacking_in(mender, damage.key)
    ]  # fmt: skip
    return parts or [damage]
