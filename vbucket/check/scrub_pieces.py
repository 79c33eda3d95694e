"""The order in which pieces of the store are read, and mended. Pure: a subclass opens the pages.

Whatever a piece, a merge or a client met is mended if this folder alone can prove what was there
(`vbucket.check.mend`). Either way it is told with the next piece.

Who subclasses it: `dcp.server.storage.process.scrub_work` for files, the simulator for its twin of
the store. Nobody writes to the store during a call.

Invariants
- partitions in which somebody met damage come before the piece;
- what is behind something that was mended is read again, ROUNDS_MAX times at one place at most;
- a small block from elsewhere waits until its whole leaf can be made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from vbucket.check.finding import Kind
from vbucket.check.mend import lacking_in, mend, put_leaf, put_versions
from vbucket.check.scrub import AREAS, LOG_AREA, Damage, Piece, ScrubPlace, TableScrub
from vbucket.store.environment import KeptRows, StoreDamagedError
from vbucket.store.lmdb.page_mend import PageMender
from vbucket.store.lmdb.page_scan import PageScan
from vbucket.store.lmdb.page_sums import SUMS_FILE_NAME
from vbucket.store.records import BY_SEQNO_TABLE

PIECE_BYTES: Final = 1 << 20
GIVEN_MAX: Final = 100
"""Small blocks of damaged leaves that wait for the others of their leaf."""
ROUNDS_MAX: Final = 64
"""So often one place is read again after something there was mended."""
PUT_BACK: Final = "it was written as it was, which the store process or a copy knew"
_STORE_FILE: Final = "store/data.mdb"


class ScrubPieces(ABC):
    """See the module."""

    piece_bytes = PIECE_BYTES

    def __init__(self, kept: KeptRows | None = None) -> None:
        """`kept`: rows of tables as of the last commit."""
        self._kept = {} if kept is None else kept
        self._met: list[Damage] = []
        """What was met since the last piece, mended or not."""
        self._given: dict[bytes, list[bytes]] = {}
        """Versions from elsewhere that wait for others of the same leaf, by their key."""
        self._rounds = 0
        """How often the piece at the same place was read again after something was mended."""

    @abstractmethod
    def reader(self) -> PageScan:
        """Return what reads the newest state. Raises StoreDamagedError."""

    @abstractmethod
    def mender(self) -> PageMender:
        """Return what writes pages. Raises OSError, StoreDamagedError."""

    @abstractmethod
    def check_file(self) -> None:
        """Look at what no table leads to. Raises StoreDamagedError."""

    @abstractmethod
    def log_piece(self, place: ScrubPlace, is_over: Callable[[], bool]) -> Piece:
        """Read the next piece of the log."""

    def next(
        self, place: ScrubPlace, suspects: Sequence[int], is_over: Callable[[], bool]
    ) -> Piece:
        """Look at the partitions `suspects`, then read a piece until it `is_over`."""
        for vb_id in suspects:
            self.mend_partition(vb_id)
        if place.is_over:
            piece = Piece(place, 0, [])
        elif AREAS[place.area] == LOG_AREA:
            piece = self.log_piece(place, is_over)
        else:
            piece = self._tables(place, is_over)
        damages, self._met = [*self._met, *piece.damages], []
        return piece._replace(damages=damages)

    def _tables(self, place: ScrubPlace, is_over: Callable[[], bool]) -> Piece:
        try:
            if place == ScrubPlace():
                self.check_file()
            scrub = TableScrub(self.reader())
        except StoreDamagedError as error:
            damage = Damage(str(Kind.PAGES), _STORE_FILE, "the store's file", str(error))
            return Piece(ScrubPlace(AREAS.index(LOG_AREA)), 0, [damage])
        piece = scrub.piece(place, self.piece_bytes, is_over)
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
            for round_number in range(ROUNDS_MAX):
                found = TableScrub(self.reader()).partition(vb_id)
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

    def put_versions(self, key: bytes, entries: list[bytes]) -> str:
        """Mend the block `key` with versions of another copy; return how, "" if that cannot be."""
        with suppress(StoreDamagedError, OSError):
            if len(self._given) >= GIVEN_MAX:
                self._given.clear()
            with self.mender() as mender:
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
        done: list[Damage] = []
        for damage in damages:
            how = ""
            with suppress(StoreDamagedError, OSError):
                if damage.table:
                    with self.mender() as mender:
                        how = mend(mender, damage.table, damage.key, self._kept)
                        if not how and damage.table == BY_SEQNO_TABLE:
                            done += _parts(mender, damage)
                            continue
            done.append(damage._replace(mended=how))
        return done


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
