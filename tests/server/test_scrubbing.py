"""The scrubber is woken by what it waits for, and not by a clock."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.core.scrub_turns import AGAIN_S, CopyRepairs, DamageRow, ScrubTurns
from dcp.server.storage.process.scrubbing import Scrubbing
from vbucket.check.finding import Kind
from vbucket.check.scrub import AREAS, TABLE_AREAS, Damage, ScrubPlace, ScrubReport, TableScrub
from vbucket.store.block import block_key
from vbucket.store.environment import StoreDamagedError
from vbucket.store.lmdb.page_scan import Leaf
from vbucket.store.records import (
    BY_KEY_TABLE,
    BY_SEQNO_TABLE,
    EXPIRY_TABLE,
    FAILOVER_TABLE,
    META_TABLE,
    STATE_TABLE,
)

DAMAGE = [str(Kind.BLOCK), "store/data.mdb", "page 7", "its checksum is wrong", 5]


class Store:
    """The store process and its queue: each look notes its suspects, and finds the same."""

    def __init__(self) -> None:
        self.looks: list[list[int]] = []
        self.looked = asyncio.Event()

    async def do(self, _work: object, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        return await ask(self)

    async def scrub(self, _place: object, _end: object, suspects: list[int]) -> ScrubReport:
        self.looks.append(suspects)
        self.looked.set()
        return ScrubReport([len(AREAS), b""], 0, [DAMAGE] if suspects else [], 0.0, 0)

    async def look(self) -> list[int]:
        """Return the suspects of the next look."""
        async with asyncio.timeout(20):
            await self.looked.wait()
        self.looked.clear()
        return self.looks[-1]


class Merging:
    """Counts merges."""

    def __init__(self) -> None:
        self.count = 0
        self.ended: list[asyncio.Event] = []
        self.watch = self.ended.append
        self.log_mending = SimpleNamespace(take_mended=list)

    def end(self) -> None:
        self.count += 1
        for each in self.ended:
            each.set()


class Log:
    """Takes lines."""

    def write(self, *_: object, **__: object) -> None: ...

    info = warning = error = write


@pytest.mark.parametrize("starts_with_merge", [False, True])
async def test_who_meets_damage_and_each_merge_wake_the_scrubber(
    tmp_path: Path, starts_with_merge: bool
) -> None:
    store: Any = Store()
    merging: Any = Merging()
    log: Any = Log()
    end: Any = SimpleNamespace(synced_end=SimpleNamespace(to_document=list))
    reader: Any = SimpleNamespace(refresh=lambda: None)
    scrubbing = Scrubbing(tmp_path, store, merging, reader, end, log, log, 0.0)
    task = asyncio.create_task(scrubbing.run())
    try:
        await asyncio.sleep(0)
        assert store.looks == [], "no pass is due: only a command begins one"
        if starts_with_merge:
            merging.end()
            assert await store.look() == []
        scrubbing.met(5)
        scrubbing.met(None)
        assert await store.look() == [5]
        await asyncio.wait_for(scrubbing.found.wait(), 20)  # what repairs from copies waits for
        assert [row.vb for row in scrubbing.status.damages] == [5]
        merging.end()
        assert await store.look() == []
        assert len(store.looks) == 2 + starts_with_merge
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def test_a_partition_that_was_mended_is_looked_at_again() -> None:
    """What somebody meets there next is other damage; what stays is looked at later."""
    turns = ScrubTurns(0.0)
    for mended, looked_at in (("mended", [5]), ("", [])):
        turns.met(5)
        _, suspects = turns.next_piece(100.0)
        damage = Damage(*DAMAGE[:4], vb_id=5, mended=mended)
        report = ScrubReport([len(AREAS), b""], 0, [list(damage)], 0.0, 0)
        turns.read(report, suspects, 0, 100.0, 0.0)
        turns.met(5)
        assert turns.next_piece(101.0)[1] == looked_at


def test_damage_that_comes_again_is_asked_for_at_once() -> None:
    """A copy has mended the same block a moment ago. What stays is asked for after AGAIN_S."""
    turns, repairs = ScrubTurns(0.0), CopyRepairs()
    damage = Damage(*DAMAGE[:4], vb_id=5, seqnos=[1, 9], table=BY_SEQNO_TABLE, key=b"\0\5")
    found = ScrubReport([len(AREAS), b""], 0, [list(damage)], 0.0, 0)
    for now_s in (100.0, 101.0):
        turns.met(5)
        assert turns.next_piece(now_s)[1] == [5]
        turns.read(found, [5], 0, now_s, now_s)
        (row,) = repairs.due(turns.blocks_lacking(), now_s)
        for later_s, due in ((0.5, []), (AGAIN_S, [row]), (AGAIN_S + 1, [])):
            assert repairs.due(turns.blocks_lacking(), now_s + later_s) == due
        turns.mended(row, "versions were taken from another copy")
        assert turns.blocks_lacking() == []


def test_a_pass_that_begins_during_a_look_goes_on() -> None:
    turns = ScrubTurns(0.0)
    turns.met(5)
    place, suspects = turns.next_piece(100.0)
    turns.begin_pass(7.0, is_hurried=True)
    turns.read(ScrubReport(list(place), 0, [], 0.0, 0), suspects, 0, 100.0, 8.0)
    assert turns.status.is_running
    assert turns.next_piece(101.0) == (ScrubPlace(), [])


def test_a_clock_that_is_set_back_puts_off_one_pass_by_a_period() -> None:
    """And what a pass has found before that stays."""
    turns = ScrubTurns(1000.0)
    assert turns.due_in_s(1000.0, 50.0) == 50.0
    turns.begin_pass(2000.0, is_hurried=False)
    _, suspects = turns.next_piece(1.0)
    damage = Damage(*DAMAGE[:4], vb_id=5)
    report = ScrubReport([len(AREAS), b""], 0, [list(damage)], 0.0, 0)
    turns.read(report, suspects, 0, 1.0, 100.0)
    assert not turns.status.is_running
    assert [row.vb for row in turns.status.damages] == [5]
    assert turns.due_in_s(100.0, 50.0) == 50.0
    assert turns.due_in_s(140.0, 50.0) == 10.0
    turns.begin_pass(150.0, is_hurried=False)
    turns.read(
        ScrubReport([len(AREAS), b""], 0, [], 0.0, 0), turns.next_piece(9.0)[1], 0, 9.0, 151.0
    )
    assert turns.status.damages == []


PLACES: dict[str, list[bytes]] = {
    META_TABLE: [b"manifest", b"node"],
    FAILOVER_TABLE: [b"\0\0", b"\0\1"],
    STATE_TABLE: [b"\0\0", b"\0\1"],
    BY_SEQNO_TABLE: [block_key(0, 1), block_key(0, 9), block_key(1, 1)],
    # One name in three collections, and a name that others read as one of other bytes.
    BY_KEY_TABLE: [
        vb + collection + name
        for vb in (b"\0\0", b"\0\1")
        for collection in (b"\0", b"\x08", b"\x09")
        for name in (b"x0", b"\xff", b"\\xff")
    ],
    EXPIRY_TABLE: [bytes([1, 0, 0, second, 0, 0, 9]) for second in range(3)],
}
"""Places of each table at which a page may be damaged: pages of a record, or of a block."""


class DamagedTables:
    """Reads a store of which these pages cannot be read, and nothing else."""

    def __init__(self, places: set[tuple[str, bytes]]) -> None:
        self.places = places

    def leaf(self, table: str, key: bytes) -> Leaf:
        own = sorted(at for of, at in self.places if of == table and at >= key)
        return Leaf(
            [], [(at, at + b"\0", "its page is not what was written") for at in own], None, 0
        )

    def last_at_or_before(self, *_: object) -> None:
        raise StoreDamagedError("no record can be read")


class Told(ScrubTurns):
    """Notes what is told."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.found: list[tuple[str, bytes]] = []
        self.gone: list[tuple[str, bytes]] = []

    def tell_found(self, row: DamageRow) -> None:
        self.found.append(_place_of(row))

    def tell_gone(self, row: DamageRow) -> None:
        self.gone.append(_place_of(row))

    @property
    def listed(self) -> list[tuple[str, bytes]]:
        return sorted(map(_place_of, self.status.damages))

    def read_all(self, places: set[tuple[str, bytes]], now_s: float) -> None:
        """Make a pass."""
        reader: Any = DamagedTables(places)
        self.begin_pass(now_s, is_hurried=False)
        while self.status.is_running:
            place, suspects = self.next_piece(now_s)
            after, damages = place.next_area(), list[Damage]()
            if AREAS[place.area] in TABLE_AREAS:
                after, _, damages = TableScrub(reader).piece(place, 1, lambda: False)
            report = ScrubReport(list(after), 0, [list(each) for each in damages], 0.0, 0)
            self.read(report, suspects, 0, now_s, now_s)


def _place_of(row: DamageRow) -> tuple[str, bytes]:
    return row.table, bytes.fromhex(row.key)


_places = st.sets(st.sampled_from([(table, key) for table, keys in PLACES.items() for key in keys]))


@given(before=_places, after=_places, data=st.data())
def test_each_damage_is_told_also_if_two_read_the_same(
    before: set[tuple[str, bytes]], after: set[tuple[str, bytes]], data: st.DataObject
) -> None:
    """Once, until a pass does not find it again; what is mended leaves the others."""
    turns = Told()
    turns.read_all(before, 1.0)
    assert sorted(turns.found) == turns.listed == sorted(before)
    left = set(before)
    for place in data.draw(st.permutations(sorted(before)))[: len(before) // 2]:
        (row,) = (each for each in turns.status.damages if _place_of(each) == place)
        turns.mended(row, "a copy had it")
        left.remove(place)
        assert turns.listed == sorted(left)
    turns.found.clear()
    turns.read_all(after, 9.0)
    assert sorted(turns.found) == sorted(after - left)
    assert sorted(turns.gone) == sorted(left - after)
    assert turns.listed == sorted(after)
