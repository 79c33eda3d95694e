"""When a cut of a cluster is one state of all that it covers. Pure.

    leader ── DRAW(time) ──> members      each notes its seqnos, and commits nothing from then on
    leader <── drawn ─────── members
    leader ── COMPLETE ────> those that have drawn: each commits again, and the cut counts there

docs/consistent-cuts.md has the rule and why it holds. No clock is compared for it: a clock only
gives a cut its name. Who calls it: `failover.replication.cuts`; tests/failover/rules/test_cut.py
searches all orders of its messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

CLOCK_OFF_NS_MAX: Final = 500_000_000
"""How far a member's clock may be from that of most members. Else it draws no cut: changes that it
makes would have a CAS far from the closed time."""
DRAW_NS_MAX: Final = 100_000_000
"""How long a leader waits for a member. It is asked again when it has answered."""
HOLD_NS_MAX: Final = 200_000_000
"""How long a member commits nothing, if its leader says no more."""


class Ask(NamedTuple):
    """What a leader asks members to draw."""

    leader: str
    """Its member id."""
    round: int
    """A number that this process of the leader drew: two leaders' cuts of one time differ in it."""
    time: int
    """The closed time, a CAS."""
    clock_ns: int
    """The clock of most members, Unix time."""


def median(offsets: Iterable[int]) -> int:
    """Return what most members have: the median of these offsets and of the leader's own, which is
    0. Of two in the middle it is the lower one.
    """
    found = sorted((0, *offsets))
    return found[(len(found) - 1) // 2]


def clock_fault(ask: Ask, own_clock_ns: int) -> str:
    """Return how a member's clock is too far from that of most nodes to draw a cut; "": it is
    near.
    """
    off_ns = own_clock_ns - ask.clock_ns
    if abs(off_ns) <= CLOCK_OFF_NS_MAX:
        return ""
    way = "ahead of" if off_ns > 0 else "behind"
    return f"its clock is {abs(off_ns) / 1e9:.1f} s {way} that of most nodes"


def first_open_of_all(members: Iterable[tuple[int, int]], clock_ns: int) -> int:
    """Return the lowest CAS that none of these members has closed, 0 if there are none: clock, and
    lowest CAS that it has not closed. Not of those whose clocks are off: they close nothing now.

    What one of them has closed was the clock of most members then. If that was set back since, all
    go on from there, or this one could take part in no cut until the clock is there again.
    """
    return max(
        (first for own_ns, first in members if abs(own_ns - clock_ns) <= CLOCK_OFF_NS_MAX),
        default=0,
    )


def why_not_drawn(ask: Ask, held: Ask | None, *, first_open: int, is_led_by: str) -> str:
    """Return why a member does not draw a cut; "": it does.

    `held` is the cut that it has drawn and that is not complete, `first_open` the lowest CAS that
    it has not closed, `is_led_by` a leader of a lower id that it has heard of late.
    """
    if is_led_by and is_led_by < ask.leader:
        return f"member {is_led_by} leads"
    if held is not None:
        return "it has drawn a cut that is not complete"
    if ask.time < first_open:
        return "it has closed a later time"
    return ""


def is_covered(drawn: tuple[int, int] | None, *, is_served: bool, now: tuple[int, int]) -> bool:
    """Whether a complete cut covers a partition at this member.

    `drawn` is its leader epoch and version when the cut was drawn, None if this member did not
    serve it as its master; `is_served` and `now` are of the moment in which the cut is complete. If
    they differ, another master may have answered writes that waited for nobody.
    """
    return is_served and drawn == now
