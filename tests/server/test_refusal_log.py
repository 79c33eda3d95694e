"""Log lines about refusals: bounded per kind and peer, and every one that is left out is told."""

from hypothesis import given
from hypothesis import strategies as st

from dcp.server.observe.event_log import BURST, KEYS_MAX, LINES_PER_S, LogLimiter

steps = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["x", "y"]), st.floats(0, 20)),
    max_size=200,
)


@given(steps)
def test_lines_are_bounded_and_none_is_forgotten(events):
    limiter = LogLimiter()
    now_s = 0.0
    seen: dict = {}
    admitted: dict = {}
    told: dict = {}
    for event, peer, elapsed_s in events:
        now_s += elapsed_s
        for row in limiter.drain(now_s):
            told[row.event, row.peer] = told.get((row.event, row.peer), 0) + row.lines
        key = (event, peer)
        seen[key] = seen.get(key, 0) + 1
        left_out = limiter.admit(event, peer, now_s)
        if left_out is not None:
            admitted[key] = admitted.get(key, 0) + 1
            told[key] = told.get(key, 0) + left_out
        assert admitted.get(key, 0) <= BURST + now_s * LINES_PER_S + 1
    for row in limiter.drain(now_s + 1000):
        told[row.event, row.peer] = told.get((row.event, row.peer), 0) + row.lines
    for key, count in seen.items():
        assert admitted.get(key, 0) + told.get(key, 0) == count


def test_a_flood_leaves_some_lines_and_a_count():
    limiter = LogLimiter()
    lines = [limiter.admit("refused", "10.0.0.1", 0.0) for _ in range(1000)]
    assert lines == [0] * BURST + [None] * (1000 - BURST)
    assert limiter.admit("refused", "10.0.0.2", 0.0) == 0, "another peer has lines of its own"
    assert limiter.admit("denied", "10.0.0.1", 0.0) == 0, "so has another kind"
    assert limiter.drain(1.0) == [], "the next line may tell it"
    assert limiter.admit("refused", "10.0.0.1", 1 / LINES_PER_S) == 1000 - BURST


def test_a_peer_that_went_quiet_is_told_of_once():
    limiter = LogLimiter()
    for _ in range(BURST + 5):
        limiter.admit("refused", "10.0.0.1", 0.0)
    assert limiter.drain(100.0) == [("refused", "10.0.0.1", 5)]
    assert limiter.drain(200.0) == []


def test_many_peers_cost_no_more_than_some():
    limiter = LogLimiter()
    for _ in range(BURST + 3):
        limiter.admit("refused", "first", 0.0)
    for number in range(3 * KEYS_MAX):
        limiter.admit("refused", f"peer {number}", 1.0)
    assert len(limiter._buckets) == KEYS_MAX
    assert limiter.drain(1.0) == [("refused", "first", 3)], "what was counted is not lost"
