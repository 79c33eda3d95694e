"""Limits of streams that are open and to come: the newest that matches counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.stream import stream_limits
from dcp.stream.stream_limits import StreamChoice, StreamLimits, TooManyLimitsError

NAMES = ("a", "b")
VB_IDS = (1, 2)
CHOICES = st.builds(StreamChoice, st.sampled_from((None, *NAMES)), st.sampled_from((None, *VB_IDS)))


@given(st.lists(st.tuples(CHOICES, st.sampled_from((None, 0, 5, 9)))))
def test_the_newest_limit_that_matches_counts(acts):
    limits = StreamLimits()
    plain = {(name, vb_id): None for name in NAMES for vb_id in VB_IDS}
    for choice, rate in acts:
        limits.set(choice, rate)
        for name, vb_id in plain:
            if choice.name in {None, name} and choice.vb_id in {None, vb_id}:
                plain[name, vb_id] = rate
    assert {pair: limits.of(*pair) for pair in plain} == plain
    assert len(limits.rows()) <= 9
    limits.set(StreamChoice(None, None), None)
    assert limits.rows() == []


def test_limits_are_bounded(monkeypatch):
    monkeypatch.setattr(stream_limits, "LIMITS_MAX", 3)
    limits = StreamLimits()
    for vb_id in range(3):
        limits.set(StreamChoice(None, vb_id), 7)
    with pytest.raises(TooManyLimitsError):
        limits.set(StreamChoice(None, 3), 7)
    assert (limits.of("x", 2), limits.of("x", 3)) == (7, None)
    limits.set(StreamChoice(None, 2), 8)
    assert limits.of("x", 2) == 8
