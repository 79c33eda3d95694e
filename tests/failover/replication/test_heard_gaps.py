"""Patience with nodes that are late again and again."""

from __future__ import annotations

from failover.replication.pace import GAPS_PATIENCE, PATIENCE_MAX, REMEMBERED_NS, HeardGaps

MS = 1_000_000
USUAL = 600 * MS
BEAT = 100 * MS


def test_a_node_that_is_in_time_gets_the_usual_patience() -> None:
    gaps = HeardGaps()
    for now_ns in range(0, 10_000 * MS, 100 * MS):
        gaps.note(now_ns, 150 * MS, BEAT)
        assert gaps.patience_ns(now_ns, USUAL) == USUAL


def test_patience_grows_with_the_longest_silence_and_has_an_end() -> None:
    gaps = HeardGaps()
    gaps.note(0, 400 * MS, BEAT)
    gaps.note(100 * MS, 100 * MS, BEAT)
    assert gaps.patience_ns(200 * MS, USUAL) == GAPS_PATIENCE * 400 * MS
    gaps.note(300 * MS, 60_000 * MS, BEAT)
    assert gaps.patience_ns(300 * MS, USUAL) == PATIENCE_MAX * USUAL


def test_a_silence_is_forgotten() -> None:
    gaps = HeardGaps()
    gaps.note(REMEMBERED_NS + 1, 400 * MS, BEAT)
    for now_ns in range(REMEMBERED_NS + 1, 2 * REMEMBERED_NS, 100 * MS):
        gaps.note(now_ns, 100 * MS, BEAT)
        assert gaps.patience_ns(now_ns, USUAL) > USUAL
    for now_ns in range(2 * REMEMBERED_NS, 4 * REMEMBERED_NS, 100 * MS):
        gaps.note(now_ns, 100 * MS, BEAT)
    assert gaps.patience_ns(4 * REMEMBERED_NS, USUAL) == USUAL


def test_a_silence_of_long_ago_does_not_count_after_another_one() -> None:
    gaps = HeardGaps()
    gaps.note(0, 400 * MS, BEAT)
    assert gaps.patience_ns(10 * REMEMBERED_NS, USUAL) == USUAL


def test_heartbeats_that_do_not_come_in_time_are_counted() -> None:
    gaps = HeardGaps()
    for gap_ns in (100 * MS, 199 * MS, 299 * MS):  # to two ticks
        gaps.note(0, gap_ns, BEAT)
    assert gaps.missed_beats == 0
    gaps.note(0, 300 * MS, BEAT)
    assert gaps.missed_beats == 1
    gaps.note(0, 1_250 * MS, BEAT)
    assert gaps.missed_beats == 11
