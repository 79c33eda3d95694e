"""The age of bytes that a client should have acknowledged, against a list of when each was sent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dcp.stream.ack_ages import MARK_NS, MARKS_MAX, AckAges

S = 1_000_000_000
WINDOW = 1000


def test_a_client_is_late_when_it_stops_acknowledging() -> None:
    ages = AckAges()
    ages.mark(0, 100)
    ages.acknowledged(100)
    ages.mark(10 * S, 50)
    assert ages.oldest_s(11 * S, WINDOW) == 0, "less than what it acknowledges together"
    ages.mark(20 * S, 150)
    assert ages.oldest_s(21 * S, WINDOW) == 0, "younger than two marks"
    assert ages.oldest_s(25 * S, WINDOW) == 5
    ages.acknowledged(1)
    ages.mark(30 * S, 149)
    assert ages.oldest_s(30 * S, WINDOW) == 20, "it acknowledges single bytes, and not those of 10"


def test_before_the_first_one_half_of_the_window_counts() -> None:
    ages = AckAges()
    ages.mark(0, WINDOW // 2)
    assert ages.oldest_s(100 * S, WINDOW) == 0
    ages.mark(3 * S, WINDOW // 2 + 1)
    assert ages.oldest_s(100 * S, WINDOW) == 97


@given(
    steps=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), max_size=3 * MARKS_MAX),
)
def test_an_age_is_never_too_long(steps: list[tuple[int, int]]) -> None:
    ages, sent_at, acked = AckAges(), list[int](), 0
    ages.acknowledged(0)  # it may acknowledge any number of bytes
    for number, (sent, wanted) in enumerate(steps):
        now_ns = number * MARK_NS
        sent_at += [now_ns] * sent
        ages.mark(now_ns, len(sent_at) - acked)
        processed = min(wanted, len(sent_at) - acked)
        ages.acknowledged(processed)
        acked += processed
        truth_s = (now_ns - sent_at[acked]) / S if acked < len(sent_at) else 0.0
        found_s = ages.oldest_s(now_ns, WINDOW)
        assert found_s <= truth_s
        assert found_s >= truth_s / 2 - 2 * MARK_NS / S
    assert len(ages._marks) <= MARKS_MAX
