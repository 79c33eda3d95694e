"""All nodes change to another secret: nobody is shut out at any moment, however they get there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from failover.metadata.keyring import Keyring, KeyringError, next_step, number_of

OLD, NEW, THIRD = "0" * 43, "1." + "1" * 43, "2." + "2" * 43
STATES = st.sampled_from([(OLD,), (OLD, NEW), (NEW, OLD), (NEW,)])


def lets_in(server: tuple[str, ...], client: tuple[str, ...]) -> bool:
    return client[0] in server


@given(nodes=st.integers(1, 5), interrupted=st.integers(0, 30), order=st.randoms())
def test_nodes_let_each_other_in_at_each_moment(nodes, interrupted, order):
    """One node after the other takes its step, in any order; an attempt that ends in the middle is
    followed by another one.
    """
    rings = [Keyring([OLD]) for _ in range(nodes)]
    for taken in range(1000):
        now = [ring.secrets for ring in rings]
        steps = next_step(now, NEW)
        behind = [number for number in range(nodes) if steps[number] != now[number]]
        if not behind:
            break
        for number in order.sample(behind, len(behind)):
            with rings[number].step(steps[number]):
                pass
            assert all(lets_in(one.secrets, other.secrets) for one in rings for other in rings)
            if taken == interrupted:
                break
    assert {ring.secrets for ring in rings} == {(NEW,)}


@given(now=st.lists(STATES, min_size=1, max_size=5))
def test_it_ends_from_whatever_state_is_met(now):
    for _ in range(4):
        now = next_step(now, NEW)
    assert set(now) == {(NEW,)}


def test_a_step_keeps_what_is_in_use():
    ring = Keyring([OLD, NEW])
    with pytest.raises(KeyringError, match="has to stay"), ring.step([NEW]):
        pass
    assert ring.secrets == (OLD, NEW)


def test_a_step_that_fails_changes_nothing():
    ring = Keyring([OLD])
    with pytest.raises(OSError, match="full"), ring.step([OLD, NEW]):
        raise OSError("full")
    assert ring.secrets == (OLD,)


def test_two_steps_at_once_are_refused():
    ring = Keyring([OLD])
    with (
        ring.step([OLD, NEW]),
        pytest.raises(KeyringError, match="under way"),
        ring.step([OLD, THIRD]),
    ):
        pass
    assert ring.secrets == (OLD, NEW)


@pytest.mark.parametrize(
    ("secrets", "why"),
    [
        ([], "not 0"), ([OLD, NEW, THIRD], "not 3"), ([OLD, OLD], "different"),
        (["short"], "5 bytes"), ([OLD, "short"], "5 bytes"),
    ],
)  # fmt: skip
def test_secrets_that_cannot_be(secrets, why):
    with pytest.raises(KeyringError, match=why):
        Keyring(secrets)
    with pytest.raises(KeyringError, match=why), Keyring([OLD]).step(secrets):
        pass


def test_the_number_of_a_secret():
    assert [number_of(each) for each in (OLD, NEW, THIRD, "a.b", ".b")] == [0, 1, 2, 0, 0]
