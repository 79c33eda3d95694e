"""The scrubber's pieces in the store process, between its other work: the files.

Who calls it: `dcp.server.storage.process.store_process`. `vbucket.check.scrub` has what is checked,
`vbucket.check.scrub_pieces` the order. What a piece cost goes back with it: the server rests
accordingly (`dcp.core.store_schedule`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from dcp.server.storage.folder import log_path, store_path
from vbucket.check.finding import Kind
from vbucket.check.scrub import (
    AREAS,
    TABLE_AREAS,
    Damage,
    LogScrub,
    Piece,
    ScrubPlace,
    ScrubReport,
    segment_to_scrub,
)
from vbucket.check.scrub_pieces import PIECE_BYTES, ScrubPieces, put_back_damages
from vbucket.log.device import UnknownFormatError
from vbucket.log.end_mark import LogEnd
from vbucket.log.segment_files import read_segment, segment_name, segments_in
from vbucket.store.environment import KeptRows, StoreDamagedError, StoreFailedError
from vbucket.store.lmdb.environment_lmdb import put_metas_back
from vbucket.store.lmdb.lmdb_file import DATA_FILE_NAME, PageFile, check_file
from vbucket.store.lmdb.page_mend import PageMender
from vbucket.store.lmdb.page_scan import PageScan
from vbucket.store.lmdb.page_sums import KnownSums
from vbucket.store.lmdb.rows_copy import read_rows
from vbucket.store.records import RECORD_TABLES

_RECORDS: Final = frozenset(RECORD_TABLES)
_AT_RECORDS: Final = ScrubPlace(0, b"\1")
"""At the first record, past the look at the whole file: a start does that itself."""
PIECE_S: Final = 0.01
"""How long a piece takes at most, but for one leaf or one segment's bytes."""


class ScrubWork(ScrubPieces):
    """See the module."""

    def __init__(
        self, data_path: Path, kept: KeptRows | None = None, by_heart: KnownSums | None = None
    ) -> None:
        """`kept`: rows of tables as of the last commit. `by_heart`: who puts damaged checksums
        back, and has to know those of pages that are mended.
        """
        super().__init__(kept)
        self._data_path = data_path
        self._by_heart = by_heart
        self._file: PageFile | None = None
        self._segment: LogScrub | None = None
        self._log_end: LogEnd | None = None

    def piece(self, request: dict[str, Any]) -> ScrubReport:
        """Look at the partitions `suspects`, then read the next piece: `place`, and `log_end` as
        `LogEnd.to_document`.
        """
        began_s = time.process_time()
        end_s = time.monotonic() + PIECE_S
        self._log_end = LogEnd.from_document(request["log_end"])
        place = ScrubPlace(*request["place"])
        piece = self.next(place, request["suspects"], lambda: time.monotonic() >= end_s)
        return ScrubReport(
            list(piece.place), piece.read_bytes, [list(each) for each in piece.damages],
            time.process_time() - began_s, self._size_bytes(),
        )  # fmt: skip

    def before_start(self) -> list[Damage]:
        """Mend what a start reads of the store, before LMDB opens it: its meta pages, and the
        records of the node and of partitions. What cannot be mended is left to the start.
        """
        folder, damages = store_path(self._data_path), list[Damage]()
        if not (folder / DATA_FILE_NAME).exists():
            return damages
        with suppress(StoreDamagedError, StoreFailedError, UnknownFormatError, OSError):
            damages += put_back_damages(put_metas_back(folder))
            pages = self._pages()
            # Checksums of another state would call sound pages damaged.
            pages.sums.check_age(pages.sums.transaction, pages.newest().transaction)
            pages.follow()
            self._kept = read_rows(folder, pages.newest())
            damages += self._all_from(_AT_RECORDS, _RECORDS)
        return damages

    def _all_from(self, place: ScrubPlace, tables: frozenset[str]) -> list[Damage]:
        """Read these tables, the first ones; return what was mended."""
        mended: list[Damage] = []
        while AREAS[place.area] in tables:
            piece = self.next(place, [], lambda: False)
            mended += [each for each in piece.damages if each.mended]
            place = piece.place
        return mended

    def met_at_start(self, vb_id: int | None) -> list[Damage]:
        """Mend a partition in which a start met damage (None: all); return what was mended."""
        self._kept = {}  # the start may have written
        if vb_id is not None:
            self.mend_partition(vb_id)
        else:
            self._met += self._all_from(_AT_RECORDS, frozenset(TABLE_AREAS))
        met, self._met = self._met, []
        return [each for each in met if each.mended]

    def close(self) -> None:
        """Close the store's file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _pages(self) -> PageFile:
        if self._file is None:
            self._file = PageFile(store_path(self._data_path), self._by_heart)
        return self._file

    def reader(self) -> PageScan:
        """See ScrubPieces."""
        return PageScan(self._pages())

    def mender(self) -> PageMender:
        """See ScrubPieces."""
        return PageMender(self._pages())

    def check_file(self) -> None:
        """Look at both meta pages, the list of tables and the free pages."""
        check_file(store_path(self._data_path))

    def log_piece(self, place: ScrubPlace, is_over: Callable[[], bool]) -> Piece:
        """See ScrubPieces."""
        folder = log_path(self._data_path)
        if self._segment is None:
            found = segment_to_scrub(place, segments_in(folder), self._log_end)
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
        piece = self._segment.piece(place, PIECE_BYTES, is_over)
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
