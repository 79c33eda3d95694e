"""The cursor of a partition: consumer, backup and Spark are at one place after the same items."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.backup.archives.legs import whole_states
from clients.backup.feed import Feed
from clients.consumer.streams import PartitionStream
from clients.errors import StreamViolationError
from clients.position import RANGES_MAX, Position, gone_back
from clients.spark.fetch_core import Stream
from clients.spark.plan import PlanStep
from clients.streaming.cursor import Cursor
from clients.streaming.outcome import RollbackAsked
from dcp.wire.message import MarkerFlag

LOG = ((77, 0),)
SNAPSHOTS = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), min_size=1, max_size=8)
"""For each snapshot the steps from one item's seqno to the next."""


def seqnos_of(snapshots: list[list[int]]) -> list[list[int]]:
    at = 0
    return [[at := at + step for step in steps] for steps in snapshots]


@given(SNAPSHOTS, st.data())
def test_three_clients_are_at_the_same_place_after_every_item(
    snapshots: list[list[int]], data: st.DataObject
) -> None:
    stream, feed = PartitionStream(7, Position()), Feed(7, 1, [], [])
    task = Stream(PlanStep(7, 0, (), 10**6, LOG, None))
    task.versions = LOG
    stream.open(LOG)
    feed.open(LOG)
    before = 0
    for seqnos in seqnos_of(snapshots):
        stream.begin_snapshot(before, seqnos[-1])
        feed.take_marker(before, seqnos[-1], 0)
        task.take_marker(before, seqnos[-1], is_history=False)
        for seqno in seqnos:
            stream.move(seqno)
            if seqno == seqnos[-1]:
                stream.complete_snapshot()
            feed.advance(seqno, seqno, 1)
            task.reach(seqno)
            place = stream.position()
            assert feed.position() == place
            assert task.position()[:4] == place[:4]
            assert whole_states(feed.chain()) == place.complete
            if seqno != seqnos[-1] and data.draw(st.booleans()):
                # The connection breaks; the server goes on with the rest of the snapshot.
                for cursor in (stream, task):
                    cursor.leave_snapshot()
                feed.stop()
                feed.open(LOG)
                for cursor in (stream, feed, task):
                    cursor.begin_snapshot(before, seqnos[-1])
        before = seqnos[-1]


def test_state_without_a_gap_is_complete_after_a_break_inside_it() -> None:
    feed = Feed(7, 1, [], [])
    feed.open(LOG)
    feed.take_marker(0, 10, 0)
    feed.advance(1, 5, 5)
    feed.stop()
    assert feed.position()[1:4] == (5, 0, 10)
    feed.open(LOG)
    feed.take_marker(0, 10, 0)
    feed.advance(6, 6, 1)
    first, second = feed.legs()
    assert first.ranges == ((0, 5),)
    assert second.ranges == ((5, 6),)
    feed.advance(10, 10, 1)
    assert feed.legs()[-1].ranges == ((5, 6), (10, 10))


def test_part_begun_in_no_complete_state_has_none_before_its_end() -> None:
    feed = Feed(7, 1, [], [])
    feed.open(LOG)
    feed.take_marker(0, 10, 0)
    feed.advance(4, 5, 2)
    feed.stop()
    feed.open(LOG)
    feed.take_marker(0, 10, 0)
    feed.advance(6, 6, 1)
    assert [leg.ranges for leg in feed.legs()] == [((0, 0),), ()]
    feed.advance(10, 10, 1)
    assert feed.legs()[-1].ranges == ((10, 10),)


def test_a_history_needs_no_snapshot_named_and_a_gap_ends_that() -> None:
    feed = Feed(7, 1, [], [])
    feed.open(LOG)
    feed.take_marker(0, 10, MarkerFlag.HISTORY)
    feed.advance(1, 4, 4)
    assert feed.position()[1:4] == (4, 4, 4)
    feed.advance(6, 7, 2)  # 5 was of a collection that is gone
    assert feed.position()[1:4] == (7, 4, 10)
    assert feed.legs()[-1].ranges == ((0, 4),)


def test_a_consumer_thins_its_ranges_out_and_a_backup_keeps_each() -> None:
    stream, feed = PartitionStream(7, Position()), Feed(7, 1, [], [])
    stream.open(LOG)
    feed.open(LOG)
    for seqno in range(2, 2 * RANGES_MAX + 40, 2):
        stream.begin_snapshot(seqno - 2, seqno)
        stream.move(seqno)
        stream.complete_snapshot()
        feed.take_marker(seqno - 2, seqno, 0)
        feed.advance(seqno, seqno, 1)
    assert len(stream.position().complete) < RANGES_MAX < len(feed.legs()[-1].ranges)


def test_spark_task_counts_changes_of_read_after_its_markers() -> None:
    task = Stream(PlanStep(7, 0, (), 10**6, LOG, None))
    task.take_marker(0, 10, is_history=False)
    task.take_marker(10, 20, is_history=False)
    task.reach(15)
    assert task.position()[1:4] == (15, 10, 20)
    task.take_marker(20, 30, is_history=False)
    task.reach(20)
    assert task.position()[1:4] == (20, 20, 30)
    task.reach(19)
    assert task.seqno == 20, "it does not go back"


@pytest.mark.parametrize(("seqno", "to"), [(7, 5), (5, 5), (4, 2), (0, 0)])
def test_rollback_goes_to_a_complete_state_at_or_below_the_seqno(seqno: int, to: int) -> None:
    held = Position(LOG, 9, 9, 9, ((0, 2), (5, 5), (9, 9)))
    cursor = Cursor()
    cursor.place(held)
    before = cursor.roll_back(RollbackAsked(seqno, ()), is_exact=True)
    assert before == held
    assert cursor.position()[:4] == gone_back(held, to)[:4]
    assert cursor.seqno == to


def test_marker_inside_snapshot_breaks_protocol_for_backup() -> None:
    feed = Feed(7, 1, [], [])
    feed.open(LOG)
    feed.take_marker(0, 10, 0)
    with pytest.raises(StreamViolationError, match="in the snapshot up to 10"):
        feed.take_marker(10, 12, 0)
