"""The bounds of the admin ports, without a port: who gets in, who makes room, who is too late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.server.net.crowd import Crowd, Phase, Places, PortLimits, TooManyError, Visitor, group_of

WAITING = [phase for phase in Phase if phase is not Phase.ANSWER]


def crowd_of(size: int = 16) -> Crowd:
    return Crowd(PortLimits(connections_max=size))


def enter(crowd: Crowd, host: str, now_s: float = 0.0) -> Visitor:
    """Let one in that nobody has to make room for."""
    visitor, leaver = crowd.enter(host, Phase.REQUEST, now_s)
    assert leaver is None
    return visitor


def test_address_makes_room_for_itself_from_half_of_bound_on() -> None:
    crowd = crowd_of()
    other = enter(crowd, "10.0.0.2")
    mine = [enter(crowd, "10.0.0.1", float(number)) for number in range(1, 9)]
    for oldest in mine:
        _, leaver = crowd.enter("10.0.0.1", Phase.REQUEST, 20.0)
        assert leaver is oldest
    assert len(crowd) == 9
    crowd.leave(other)
    assert len(crowd) == 8


def test_of_all_the_address_with_the_most_makes_room() -> None:
    crowd = crowd_of()
    few = [enter(crowd, f"10.0.1.{number}") for number in range(9)]
    many = [enter(crowd, "10.0.0.1", 5.0 + number) for number in range(7)]
    visitor, leaver = crowd.enter("10.0.2.1", Phase.REQUEST, 50.0)
    assert leaver is many[0]
    assert len(crowd) == 16
    crowd.leave(leaver)  # that it is gone is told again when its connection is closed
    crowd.leave(visitor)
    assert len(crowd) == 15
    assert few


def test_who_is_answered_stays() -> None:
    crowd = crowd_of()
    mine = [enter(crowd, "10.0.0.1", float(number)) for number in range(8)]
    for visitor in mine[:7]:
        crowd.moved(visitor, Phase.ANSWER, 10.0)
    assert crowd.enter("10.0.0.1", Phase.REQUEST, 20.0)[1] is mine[7]


def test_deadline_is_that_of_phase_and_counts_from_its_beginning() -> None:
    limits = PortLimits(request_timeout_s=10, idle_timeout_s=30, unread_timeout_s=60)
    crowd = Crowd(limits)
    visitor = enter(crowd, "10.0.0.1", 100.0)
    crowd.moved(visitor, Phase.REQUEST, 109.0)  # a byte of the header: no new deadline
    assert crowd.overdue(110.0) == []
    assert crowd.overdue(110.1) == [visitor]
    for phase, timeout_s in limits.deadlines().items():
        crowd.moved(visitor, Phase.ANSWER, 200.0)
        assert crowd.overdue(1e9) == []
        crowd.moved(visitor, phase, 300.0)
        assert crowd.overdue(300.0 + timeout_s) == []
        assert crowd.overdue(300.1 + timeout_s) == [visitor]
        assert f"the server waited {timeout_s:g} s for " in limits.late_text(phase)
    assert set(limits.deadlines()) == set(WAITING)


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("::1", "::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("?", "?"),
    ],
)
def test_addresses_of_ipv6_count_by_their_network(host: str, group: str) -> None:
    assert group_of(host) == group


def test_places_are_bounded_in_all_and_for_an_address() -> None:
    places = Places("dumps", 4)
    first = places.take("10.0.0.1")
    places.take("10.0.0.1")
    with pytest.raises(TooManyError, match="2 dumps are running, 2 of them from this address"):
        places.take("10.0.0.1")
    places.take("10.0.0.2")
    places.take("10.0.0.3")
    with pytest.raises(TooManyError, match="4 dumps are running, 0 of them"):
        places.take("10.0.0.4")
    first()
    places.take("10.0.0.4")()
    assert len(places) == 3


HOSTS = [f"10.0.0.{number}" for number in range(5)]
STEPS = st.lists(
    st.tuples(st.sampled_from(HOSTS), st.sampled_from(["enter", "request", "stream", "end"])),
    max_size=300,
)


@given(steps=STEPS, size=st.integers(16, 40))
def test_a_new_one_always_gets_in_and_no_answer_is_cut_for_it(
    steps: list[tuple[str, str]], size: int
) -> None:
    crowd = crowd_of(size)
    kinds = {"request": crowd.requests, "stream": crowd.streams}
    waiting: list[Visitor] = []
    answered: list[tuple[Visitor, object]] = []
    for now_s, (host, step) in enumerate(steps):
        if step == "enter":
            visitor, leaver = crowd.enter(host, Phase.REQUEST, now_s)
            if leaver is not None:
                assert leaver.phase is Phase.REQUEST
                waiting.remove(leaver)
            waiting.append(visitor)
        elif step == "end":
            if answered:
                visitor, give_back = answered.pop(0)
                assert callable(give_back)
                give_back()
                crowd.leave(visitor)
        else:
            mine = [visitor for visitor in waiting if visitor.host == host]
            if mine:
                try:
                    give_back = kinds[step].take(host)
                except TooManyError:
                    continue
                crowd.moved(mine[-1], Phase.ANSWER, now_s)
                waiting.remove(mine[-1])
                answered.append((mine[-1], give_back))
        assert len(crowd) == len(waiting) + len(answered) <= size
        hosts = [visitor.host for visitor in (*waiting, *(pair[0] for pair in answered))]
        assert all(hosts.count(one) <= size // 2 for one in HOSTS)
