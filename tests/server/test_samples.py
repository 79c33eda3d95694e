"""The last hour of figures: the ring, quantiles of histograms, and who is watched as a consumer."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.server.observe.meter import (
    NAMES_MAX,
    SLOW_KEPT,
    Histogram,
    LastRollbacks,
    SlowOperation,
    SlowOperations,
    command_of,
)
from dcp.server.observe.sample_ring import SampleRing
from dcp.server.report import consumer_watch
from dcp.server.report.consumer_watch import ChangeAges, ConsumerWatch, WatchedConsumer
from dcp.server.report.sampler import OwnChanges, quantile_of
from vbucket.engine.partition import VbState


@given(st.integers(0, 40), st.integers(1, 12), st.integers(0, 50))
def test_the_ring_has_the_last_rows_above_a_number(rows: int, capacity: int, after: int) -> None:
    ring = SampleRing(("a", "b"), capacity)
    for number in range(1, rows + 1):
        ring.add(1000 + number, (number, -number))
    wanted = [number for number in range(1, rows + 1) if number > max(after, rows - capacity)]
    times, figures = ring.after(after)
    assert times == [1000 + number for number in wanted]
    assert figures == {"a": wanted, "b": [-number for number in wanted]}
    for number in wanted:
        assert ring.number_at(1000 + number) == number
    assert ring.number_at(5000) == ring.last == rows
    assert ring.number_at(0) == max(0, rows - capacity)


def test_what_was_not_measured_is_none_and_figures_are_short() -> None:
    ring = SampleRing(("a",), 4)
    for value in (math.nan, 1.23456789, 123456.789):
        ring.add(1.23, (value,))
    assert ring.after(0) == ([1.2] * 3, {"a": [None, 1.235, 123457]})
    assert ring.last_time_s == 1.2


@pytest.mark.parametrize(
    ("counts", "share", "wanted"),
    [
        ((0, 0, 0, 0), 0.5, math.nan),
        ((10, 0, 0, 0), 0.5, 0.5),
        ((0, 10, 0, 0), 0.5, 1.5),
        ((0, 10, 0, 0), 1.0, 2.0),
        ((50, 0, 50, 0), 0.99, 3.96),
        ((1, 0, 0, 99), 0.99, 4.0),  # above all bounds: shown as the highest
    ],
)
def test_quantiles_lie_in_their_bucket(
    counts: tuple[int, ...], share: float, wanted: float
) -> None:
    assert quantile_of((1.0, 2.0, 4.0), counts, share) == pytest.approx(wanted, nan_ok=True)


@given(st.lists(st.floats(0, 20), min_size=1, max_size=60), st.sampled_from((0.5, 0.99)))
def test_a_quantile_is_off_by_a_bucket_at_most(values: list[float], share: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    exact = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    found = quantile_of(histogram.bounds, histogram.counts, share)
    place = next((i for i, bound in enumerate(histogram.bounds) if exact <= bound), None)
    if place is None:
        assert found == histogram.bounds[-1]
    else:
        low = histogram.bounds[place - 1] if place else 0
        assert low <= found <= histogram.bounds[place]


def test_slow_operations_and_rollbacks_are_bounded() -> None:
    slow, rollbacks = SlowOperations(0.1), LastRollbacks()
    for number in range(SLOW_KEPT + 10):
        slow.note(SlowOperation(number, "GET", 0.2, "", ""))
    assert slow.count == SLOW_KEPT + 10
    assert [row.time_s for row in slow.newest_first()][:2] == [SLOW_KEPT + 9, SLOW_KEPT + 8]
    assert len(slow.newest_first()) == SLOW_KEPT
    fields = {"vb_id": 1, "to_seqno": 2, "kind": "branched", "reason": "r"}
    for number in range(NAMES_MAX + 5):
        rollbacks.note({"name": f"c{number}", **fields}, number)
        rollbacks.note({"name": "often", **fields}, number)
    assert rollbacks.of("c0") is None
    assert rollbacks.of("often").rollbacks == NAMES_MAX + 5
    assert command_of(b"\x81\x01xx") == "SET"
    assert command_of(b"") == command_of(b"\x81\xf7") == "a command"


def test_changes_of_this_master_are_counted_and_nothing_else() -> None:
    def part(vb_id: int, seqno: int, *, version: int = 1, state: VbState = VbState.ACTIVE) -> Any:
        return SimpleNamespace(vb_id=vb_id, committed_seqno=seqno, vb_uuid=version, state=state)

    changes, copy = OwnChanges(), VbState.REPLICA
    looks = [
        ([part(0, 5), part(1, 100, state=copy)], 0),  # the first look, and a copy
        ([part(0, 8), part(1, 700, state=copy)], 3),
        ([part(0, 8), part(1, 900)], 0),  # it was elected: what came before is of another master
        ([part(0, 6, version=2), part(1, 904)], 4),  # one was branched, and went back
        ([part(0, 7, version=2), part(1, 904, state=copy)], 1),
    ]
    assert [changes.since_last(partitions) for partitions, _ in looks] == [
        expected for _, expected in looks
    ]


class Stream:
    def __init__(self, vb_id: int, next_seqno: int, phase: str = "live") -> None:
        self.vb_id = vb_id
        self.next_seqno = next_seqno
        self.end_seqno = 1 << 60
        self.rate = None
        self.phase = phase


class FollowerOf:
    """A connection with a producer, as far as the watch looks."""

    def __init__(self, name: str, *streams: Stream) -> None:
        producer = SimpleNamespace(
            name=name.encode(), streams=lambda: iter(streams), phase_of=lambda one: one.phase,
            unacked_bytes=0, window_bytes=0, unacked_s=lambda _now_ns: self.unacked_s,
        )  # fmt: skip
        self.logins = SimpleNamespace(peer=SimpleNamespace(address=f"peer of {name}"))
        self.unacked_s = 0.0
        state = SimpleNamespace(producer=producer, login=SimpleNamespace(user="u"))
        self.session = SimpleNamespace(state=state)


class Crew(list):
    @property
    def open(self):
        return self


def watch_of(*connections: FollowerOf) -> tuple[ConsumerWatch, Crew]:
    partitions = [SimpleNamespace(committed_seqno=100) for _ in range(4)]
    crew = Crew(connections)
    engine = SimpleNamespace(partitions=partitions, num_vbuckets=4)
    return ConsumerWatch(engine, crew, ChangeAges()), crew


def found(watch: ConsumerWatch) -> dict[str, WatchedConsumer]:
    return {consumer.name: consumer for consumer in watch.consumers()}


def test_consumers_lag_is_sum_of_its_streams_and_maps_is_largest() -> None:
    orders = FollowerOf("orders", Stream(0, 91), Stream(1, 101))
    audit = FollowerOf("audit", Stream(0, 51, "backlog"), Stream(2, 99, "stalled"))
    watch, _ = watch_of(orders, audit)
    watch.measure(1000)
    assert {name: one.lag_items for name, one in found(watch).items()} == {
        "orders": 10,
        "audit": 52,
    }
    assert {name: one.state for name, one in found(watch).items()} == {
        "orders": "live", "audit": "paused",
    }  # fmt: skip
    assert watch.vb_lags == [50, 0, 2, 0]
    assert watch.lag_items == 62


def test_lag_in_seconds_counts_what_was_not_acknowledged() -> None:
    orders = FollowerOf("orders", Stream(0, 101))
    watch, _ = watch_of(orders)
    orders.unacked_s = 7.0
    watch.measure(1000)
    assert (found(watch)["orders"].lag_items, found(watch)["orders"].lag_s) == (0, 7.0)


def test_consumer_that_goes_stays_an_hour_and_returns_as_itself() -> None:
    orders = FollowerOf("orders", Stream(0, 91))
    watch, crew = watch_of(orders)
    watch.measure(1000)
    crew.clear()
    watch.measure(1002)
    assert found(watch)["orders"].state == "gone"
    assert found(watch)["orders"].since_s == 1002
    assert watch.lag_items == 0
    crew.append(orders)
    watch.measure(1100)
    assert found(watch)["orders"].state == "live"
    assert found(watch)["orders"].lags.last == 2
    crew.clear()
    watch.measure(1102)
    watch.measure(1102 + consumer_watch.GONE_KEPT_S + 1)
    assert found(watch) == {}


def test_many_consumers_are_measured_in_turns_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer_watch, "CONSUMERS_MAX", 3)
    monkeypatch.setattr(consumer_watch, "STREAMS_AT_ONCE", 2)
    all_of_them = [FollowerOf(f"c{number}", Stream(0, 91)) for number in range(5)]
    watch, crew = watch_of(*all_of_them)
    for turn in range(3):
        watch.measure(1000 + turn)
    assert len(found(watch)) == 3
    assert watch.not_listed == 2
    measured = Counter(one.lags.last for one in found(watch).values())
    assert measured == {1: 3}, "each once in three turns"
    del crew[:2]
    for turn in range(8):
        watch.measure(1010 + turn)
    # Those that are gone made room for those that were not listed.
    assert set(found(watch)) == {"c2", "c3", "c4"}
    assert watch.not_listed == 0
