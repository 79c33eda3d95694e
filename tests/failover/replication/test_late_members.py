"""Members that acknowledge late leave in-sync sets, and come back when they are quick again."""

from __future__ import annotations

from collections import deque

from failover.replication.pace import (
    LATE_DIVISOR,
    RETURN_LAGS,
    STOOD_STILL_NS,
    LateMembers,
)
from failover.replication.progress import AckDelays, Inflight
from failover.rules.isr import NOBODY_LATE

MS = 1_000_000
LAG_MAX = 1000 * MS
TICK = 100 * MS
SLOW = 500 * MS
"""How long a sync of the slow member takes."""


class Clock:
    """Members whose messages are acknowledged after some time, and a look at every tick."""

    def __init__(self, *members: str) -> None:
        self.now_ns = 10**12
        self.sent: dict[str, deque[Inflight]] = {member: deque() for member in members}
        self.delays = {member: AckDelays(self.sent[member]) for member in members}
        self.late = LateMembers(LAG_MAX, self.now_ns)

    def tick(self, *, writes: bool = True, **delay_ns: int) -> None:
        """Acknowledge what was sent so long ago, and send a message."""
        self.now_ns += TICK
        for member, sent in self.sent.items():
            while sent and self.now_ns - sent[0].sent_ns >= delay_ns.get(member, 0):
                self.delays[member].acknowledged(sent.popleft(), self.now_ns)
            if writes:
                sent.append(Inflight(1, 1, self.now_ns))
        self.seen = self.late.look(self.now_ns, self.delays)

    def run(self, ns: int, *, writes: bool = True, **delay_ns: int) -> None:
        for _ in range(ns // TICK):
            self.tick(writes=writes, **delay_ns)


def test_member_that_is_late_for_lag_is_slow_and_others_are_not() -> None:
    clock = Clock("b", "c")
    clock.run(LAG_MAX)
    assert clock.seen == NOBODY_LATE
    began_ns = clock.now_ns
    while not clock.seen.slow:
        clock.tick(c=SLOW)
    assert clock.seen == ({"c"}, {"c"})
    assert LAG_MAX - TICK <= clock.now_ns - began_ns <= LAG_MAX + 2 * TICK


def test_one_late_acknowledgement_is_none_that_counts() -> None:
    clock = Clock("b")
    clock.run(SLOW, b=SLOW)
    clock.run(2 * TICK)
    clock.run(SLOW, b=SLOW)
    assert clock.seen.late == {"b"}
    assert not clock.seen.slow, "in between it was quick"


def test_rare_writes_show_a_slow_disk_too() -> None:
    """All partitions are level again and again, and each answer takes half a second."""
    clock = Clock("b")
    for _ in range(2):
        clock.tick(b=SLOW)
        clock.run(LAG_MAX - TICK, writes=False, b=SLOW)
        if not clock.seen.slow:
            assert not clock.sent["b"], "it has everything"
    assert clock.seen.slow == {"b"}


def test_silence_says_nothing_and_is_forgotten() -> None:
    clock = Clock("b")
    clock.tick(b=SLOW)
    clock.run(LAG_MAX, writes=False, b=SLOW)
    assert clock.seen.late == {"b"}
    assert not clock.seen.slow
    clock.run(RETURN_LAGS * LAG_MAX, writes=False)
    assert clock.seen == NOBODY_LATE


def test_a_slow_member_comes_back_after_it_was_quick_for_a_while() -> None:
    clock = Clock("b")
    clock.run(2 * LAG_MAX, b=SLOW)
    assert clock.seen.slow
    clock.run(RETURN_LAGS * LAG_MAX - 2 * TICK)
    assert clock.seen.slow, "not at once"
    clock.run(SLOW, b=SLOW)
    clock.run(RETURN_LAGS * LAG_MAX - 2 * TICK)
    assert clock.seen.slow, "it was late again"
    clock.run(3 * TICK)
    assert clock.seen == NOBODY_LATE


def test_a_master_that_stood_still_blames_nobody() -> None:
    clock = Clock("b")
    clock.run(LAG_MAX, b=LAG_MAX)
    clock.now_ns += STOOD_STILL_NS
    clock.tick(b=LAG_MAX)
    assert clock.seen == NOBODY_LATE
    clock.run(LAG_MAX // LATE_DIVISOR)
    assert not clock.seen.slow
