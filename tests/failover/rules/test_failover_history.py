"""The failover log: what stays, what goes, and where versions end."""

from __future__ import annotations

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from failover.rules.history import (
    EPOCH_MAX,
    FAILOVER_ENTRIES_MAX,
    FAILOVER_ENTRIES_SHOWN,
    FailoverLog,
    Version,
)


def test_a_new_partition_has_one_version_from_zero():
    log = FailoverLog.create(7, epoch=3)
    assert log.entries == (Version(7, 0, 3),)
    assert log.current == Version(7, 0, 3)
    assert log.upper_of(7, 40) == 40


def test_a_branch_ends_the_version_before_it():
    log = FailoverLog.create(7).branch(8, 900, epoch=2)
    assert log.entries == (Version(8, 900, 2), Version(7, 0, 0))
    assert log.upper_of(8, 1200) == 1200
    assert log.upper_of(7, 1200) == 900
    assert log.upper_of(9, 1200) is None


def test_a_branch_drops_versions_that_began_above_it():
    log = FailoverLog.create(1).branch(2, 500).branch(3, 900).branch(4, 700)
    assert log.pairs() == [(4, 700), (2, 500), (1, 0)]


def test_a_version_that_began_where_the_branch_is_stays_known():
    # Whoever followed version 2 shares everything up to 500 and must not be sent back to 0.
    log = FailoverLog.create(1).branch(2, 500).branch(3, 500)
    assert log.pairs() == [(3, 500), (2, 500), (1, 0)]
    assert log.upper_of(2, 800) == 500


def test_a_branch_below_everything_kept_leaves_only_itself():
    log = FailoverLog((Version(5, 500), Version(4, 400))).branch(6, 100)
    assert log.pairs() == [(6, 100)]


def test_the_oldest_entry_goes_when_there_are_too_many():
    log = FailoverLog.create(1)
    for vb_uuid in range(2, FAILOVER_ENTRIES_MAX + 3):
        log = log.branch(vb_uuid, vb_uuid * 10)
    assert len(log.entries) == FAILOVER_ENTRIES_MAX == 200
    assert log.current.vb_uuid == 202
    assert log.entries[-1].vb_uuid == 3
    assert log.upper_of(2, 5000) is None


def test_branch_without_epoch_begins_in_that_before_it():
    log = FailoverLog.create(1, epoch=4).branch(2, 5).branch(3, 6, 7)
    assert [version.epoch for version in log.entries] == [7, 4, 4]


def test_replica_that_gives_up_changes_forgets_versions_above():
    log = FailoverLog((Version(3, 90, 5), Version(2, 40, 4), Version(1, 10, 2)))
    assert log.cut(90) == log
    assert log.cut(89).pairs() == [(2, 40), (1, 10)]
    assert log.cut(40).current == Version(2, 40, 4)
    # What lies below the oldest version that is still known is part of its history.
    assert log.cut(9).pairs() == log.cut(0).pairs() == [(1, 10)]


def test_a_branch_leaves_the_log_it_came_from_alone():
    log = FailoverLog.create(1)
    log.branch(2, 5)
    assert log.pairs() == [(1, 0)]


@pytest.mark.parametrize(
    "entries",
    [
        (),
        (Version(0, 0),),
        (Version(1, 0), Version(1, 0)),
        (Version(2, 3), Version(1, 4)),
        (Version(1, -1),),
        (Version(1, 0, -1),),
        (Version(1, 0, EPOCH_MAX + 1),),
        (Version(2, 5, 3), Version(1, 0, 4)),
        (Version(2**64, 0),),
        tuple(Version(n, 0) for n in range(1, 202)),
    ],
)
def test_a_log_that_breaks_an_invariant_is_not_made(entries):
    with pytest.raises(AssertionError, match="failover log"):
        FailoverLog(entries)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (None, "NoneType"),
        ([], "found 0"),
        ([[1]], "entry 0"),
        ([[1, 0, 0, 0]], "entry 0"),
        ([5], "entry 0"),
        ([[2, 7], [1, "0"]], "entry 1"),
        ([[2, 7], [1, True]], "entry 1"),
        ([[2, 7], [2, 0]], "twice"),
        ([[2, 7], [1, 8]], "entry 1"),
        ([[0, 0]], "entry 0"),
        ([[2, 7, 1], [1, 0, 2]], "epoch 2 must be 0 to 1"),
    ],
)
def test_a_stored_log_that_is_wrong_is_refused_in_words(document, said):
    with pytest.raises(ValueError, match=said):
        FailoverLog.from_document(document)


def test_a_stored_log_may_lack_epochs():
    assert FailoverLog.from_document([[2, 7], (1, 0)]).entries == (Version(2, 7), Version(1, 0))


STEPS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), max_size=60)


@given(STEPS)
def test_any_branches_are_the_newest_part_of_the_lineage(steps):
    log, lineage = FailoverLog.create(1), [Version(1, 0)]
    epoch = 0
    for index, (seqno, later) in enumerate(steps):
        epoch += later
        made = Version(index + 2, seqno, epoch)
        log = log.branch(*made)
        lineage = [made, *(version for version in lineage if version.seqno <= seqno)]
        assert list(log.entries) == lineage[: len(log.entries)]
        high = seqno + 5
        for place, version in enumerate(log.entries):
            ends = [newer.seqno for newer in log.entries[:place]] or [high]
            assert log.upper_of(version.vb_uuid, high) == min(ends)
            assert log.uppers(high)[version.vb_uuid] == min(ends)
    assert FailoverLog.from_document(cbor2.loads(cbor2.dumps(log.to_document()))) == log


@given(st.integers(0, 450), st.lists(st.tuples(st.integers(1, 450), st.integers(0, 400))))
def test_a_log_keeps_200_versions_and_shows_25(failovers, branches):
    """Failovers at a rising end, and now and then a branch that goes back."""
    back = dict(branches)
    log, lineage, high = FailoverLog.create(1), [Version(1, 0)], 0
    for number in range(1, failovers + 1):
        high = min(high, back[number]) if number in back else high + number % 3
        made = Version(number + 1, high, number)
        log = log.branch(*made)
        lineage = [made, *(version for version in lineage if version.seqno <= high)][:200]
    assert list(log.entries) == lineage
    assert log.pairs() == [version[:2] for version in lineage]
    assert log.shown_pairs() == [version[:2] for version in lineage[:25]]
    assert (FAILOVER_ENTRIES_MAX, FAILOVER_ENTRIES_SHOWN) == (200, 25)


def test_log_below_its_newest_version_ends_in_an_older_one() -> None:
    """A replica takes over its master's log of versions before the changes: else it would be
    elected over another one that has all of the older version.
    """
    log = FailoverLog.create(7, epoch=2).branch(8, 60, 3).branch(9, 60, 4)
    assert [log.epoch_at(seqno) for seqno in (0, 15, 59, 60, 71)] == [2, 2, 2, 4, 4]
    assert log.branch(10, 15, 5).epoch_at(14) == 2
    cut = FailoverLog((Version(8, 60, 3),))
    assert cut.epoch_at(59) == 0
