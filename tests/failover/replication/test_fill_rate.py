"""A fill goes as fast as writes bear, and always goes on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from failover.replication.pace import (
    CEILING_BYTES_PER_S,
    FLOOR_BYTES_PER_S,
    REST_NS,
    RESTART_NS,
    SLOW_MIN_NS,
    START_BYTES_PER_S,
    FillRate,
)

MS = 1_000_000
LOOK_NS = 100 * MS
MOST = 32 << 20
QUICK_NS, LATE_NS = 2 * MS, 400 * MS


class Filling:
    """A rate that is looked at every 100 ms."""

    def __init__(self, most: int = MOST) -> None:
        self.rate = FillRate(most)
        self.now_ns = 0

    def look(
        self,
        acknowledged_ns: int | None = QUICK_NS,
        lag_ns: int | None = 0,
        *,
        looks: int = 1,
        is_filling: bool = True,
    ) -> float:
        for _ in range(looks):
            self.now_ns += LOOK_NS
            self.rate.look(
                self.now_ns, acknowledged_ns=acknowledged_ns, lag_ns=lag_ns, is_filling=is_filling
            )
        return self.rate.bytes_per_s


def test_fill_that_disturbs_nothing_is_soon_at_full_rate() -> None:
    filling = Filling()
    assert filling.look(looks=15) == MOST
    assert Filling().look(None, None, looks=15) == MOST, "nobody writes"


def test_without_a_setting_it_goes_on_to_grow() -> None:
    assert Filling(0).look(looks=100) == CEILING_BYTES_PER_S


def test_slow_acknowledgements_slow_it_down() -> None:
    filling = Filling()
    filling.look(looks=15)
    assert filling.look(LATE_NS) == MOST / 2
    assert filling.look(LATE_NS) == MOST / 2, "what was sent before is still on its way"
    assert filling.look(LATE_NS, looks=REST_NS // LOOK_NS - 1) == MOST / 4


def test_a_late_event_loop_slows_it_down_where_nobody_writes() -> None:
    filling = Filling()
    filling.look(looks=15)
    assert filling.look(None, LATE_NS) == MOST / 2


def test_it_makes_progress_whatever_is_slow() -> None:
    filling = Filling()
    late_ns = LATE_NS
    for _ in range(200):
        late_ns = late_ns * 11 // 10  # slower each time, so that it never becomes usual
        assert filling.look(late_ns) >= FLOOR_BYTES_PER_S
    assert filling.rate.bytes_per_s == FLOOR_BYTES_PER_S


def test_after_a_fall_it_grows_slowly_until_all_is_calm() -> None:
    filling = Filling()
    filling.look(looks=15)
    slow = filling.look(LATE_NS)
    assert slow < filling.look(looks=10) < 1.2 * slow
    assert filling.look(looks=RESTART_NS // LOOK_NS + 15) == MOST


def test_a_disk_that_is_always_slow_stops_no_fill() -> None:
    filling = Filling()
    filling.look(4 * SLOW_MIN_NS, looks=100, is_filling=False)
    assert filling.look(4 * SLOW_MIN_NS, looks=15) == MOST


def test_disk_slow_for_another_reason_gives_the_rate_back() -> None:
    filling = Filling()
    filling.look(looks=15)
    filling.look(LATE_NS, looks=40)
    assert filling.rate.bytes_per_s < START_BYTES_PER_S
    assert filling.look(LATE_NS, looks=600) == MOST


def test_a_setting_below_the_floor_holds() -> None:
    filling = Filling(FLOOR_BYTES_PER_S // 4)
    assert filling.look(looks=20) == FLOOR_BYTES_PER_S // 4
    assert filling.look(LATE_NS, looks=20) == FLOOR_BYTES_PER_S // 4


def test_each_fill_begins_anew() -> None:
    filling = Filling()
    filling.look(looks=15)
    filling.look(LATE_NS, looks=9)
    assert filling.look(is_filling=False) == START_BYTES_PER_S
    assert filling.look(looks=15) == MOST


@given(
    st.lists(st.tuples(st.none() | st.integers(0, 10**12), st.none() | st.integers(0, 10**12),
                       st.booleans())),
    st.sampled_from([0, 1, FLOOR_BYTES_PER_S, MOST]),
)  # fmt: skip
def test_the_rate_stays_between_floor_and_setting(
    looks: list[tuple[int | None, int | None, bool]], most: int
) -> None:
    filling = Filling(most)
    bound = most or CEILING_BYTES_PER_S
    for acknowledged_ns, lag_ns, is_filling in looks:
        rate = filling.look(acknowledged_ns, lag_ns, is_filling=is_filling)
        assert min(bound, FLOOR_BYTES_PER_S) <= rate <= bound
