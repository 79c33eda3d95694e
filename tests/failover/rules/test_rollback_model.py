"""The rollback rule against the brute-force model of model_history.py.

Goal: whatever happened to a partition, a client that obeys ends with the master's map, and is not
sent back further than what both sides know makes necessary.
Method: random worlds of branches, cuts, purges and promotions; at each request of a client, the
answer is compared with the truth found from full histories.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_history import (
    Client,
    Node,
    World,
    best_seqno,
    follow_to_the_end,
    survives,
)

SMALL = st.integers(0, 7)
ACTION = st.one_of(
    st.tuples(st.just("write"), SMALL, st.integers(1, 6), st.lists(SMALL, min_size=1, max_size=6)),
    st.tuples(st.just("replicate"), SMALL, SMALL, st.integers(0, 12), st.integers(0, 3)),
    st.tuples(st.just("promote"), SMALL),
    st.tuples(st.just("branch"), SMALL, st.integers(0, 6)),
    st.tuples(st.just("purge"), SMALL, st.integers(1, 20)),
    st.tuples(
        st.just("connect"), SMALL, SMALL,
        st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(0, 14),
    ),
)  # fmt: skip


def kind_of(client: Client, node: Node, back_to: int | None) -> str:
    """Name an answer by what it does, for the count of what the worlds exercise."""
    if client.seqno == 0:
        return "from the beginning"
    if back_to is None:
        return "inside a snapshot" if client.snap_start < client.seqno < client.snap_end else "ok"
    if back_to == 0:
        return "to 0, purged" if client.seqno < node.purge else "to 0"
    return "to the snapshot's start" if back_to == client.snap_start else "to the branch"


def check_answer(client: Client, node: Node, *, with_list: bool) -> str:
    """Compare one answer with the truth, then obey it to the end; return its kind."""
    question = client.question(with_list=with_list)
    answer = node.decide(question)
    back_to = answer.rollback_seqno
    goes_on_from = client.seqno if back_to is None else back_to
    below_purge = client.seqno < node.purge or best_seqno(client, node) < node.purge
    # A single vb_uuid may be told a point below the purge seqno; the next round says 0.
    if with_list or goes_on_from >= node.purge:
        assert survives(client, node, goes_on_from), answer.reason
    ours = {vb_uuid for vb_uuid, _ in node.log.pairs()}
    theirs = {vb_uuid for vb_uuid, _ in client.versions if with_list or vb_uuid == question.vb_uuid}
    if client.seqno and not ours & theirs:
        assert back_to == 0, answer.reason
    elif with_list and not below_purge:
        assert goes_on_from == best_seqno(client, node), answer.reason
    elif not below_purge and question.vb_uuid in ours:
        # What one vb_uuid names is shared up to where that version ends on the server.
        assert goes_on_from <= best_seqno(client, node), answer.reason
    kind = kind_of(client, node, back_to)

    tried = client.copy()
    answers = follow_to_the_end(tried, node, with_list=with_list)
    if len(answers) > 2:
        assert answers[1].rollback_seqno == 0, answers
    again = node.decide(tried.question(with_list=with_list))
    assert again.rollback_seqno is None, again.reason
    tried.receive(node, len(node.history), len(node.history))
    assert tried.content == _state_of(node), answer.reason
    return kind


def _state_of(node: Node) -> dict[int, int]:
    result: dict[int, int] = {}
    for number, key, is_delete in node.history:
        if is_delete:
            result.pop(key, None)
        else:
            result[key] = number
    return result


def run(actions: list[tuple], *, with_list: bool, entries_max: int) -> Counter[str]:
    world, kinds = World.new(entries_max=entries_max), Counter[str]()
    for name, *arguments in actions:
        if name != "connect":
            getattr(world, name)(*arguments)
            continue
        client, node = world.client_and_master(*arguments[:2])
        kinds[check_answer(client, node, with_list=with_list)] += 1
        follow_to_the_end(client, node, with_list=with_list)
        world.feed(*arguments)
    return kinds


@pytest.mark.parametrize("entries_max", [2, 25])
@pytest.mark.parametrize("with_list", [True, False])
@settings(max_examples=200, deadline=None)
@given(actions=st.lists(ACTION, min_size=4, max_size=40))
def test_an_obedient_client_ends_with_the_masters_map(actions, with_list, entries_max):
    run(actions, with_list=with_list, entries_max=entries_max)


def random_actions(rng: random.Random) -> list[tuple]:
    """A long history in which clients come back often; hypothesis prefers short ones."""
    actions: list[tuple] = [("write", 0, 6, [rng.randrange(8) for _ in range(6)])]
    for _ in range(rng.randrange(10, 45)):
        name = rng.choices(
            ["write", "replicate", "promote", "branch", "purge", "connect"], [6, 5, 2, 2, 1, 8]
        )[0]
        pick, other = rng.randrange(8), rng.randrange(8)
        arguments: dict[str, tuple] = {
            "write": (pick, rng.randrange(1, 7), [rng.randrange(8) for _ in range(6)]),
            "replicate": (pick, other, rng.randrange(13), rng.randrange(4)),
            "promote": (pick,),
            "branch": (pick, rng.randrange(7)),
            "purge": (pick, rng.randrange(1, 21)),
            "connect": (pick, other, [rng.randrange(1, 13) for _ in range(3)], rng.randrange(15)),
        }
        actions.append((name, *arguments[name]))
    return actions


@pytest.mark.parametrize("entries_max", [2, 25])
@pytest.mark.parametrize("with_list", [True, False])
def test_random_worlds_reach_every_kind_of_answer(with_list, entries_max):
    kinds = Counter[str]()
    for seed in range(400):
        kinds += run(
            random_actions(random.Random(seed)), with_list=with_list, entries_max=entries_max
        )
    wanted = {
        "from the beginning", "ok", "inside a snapshot", "to 0", "to 0, purged",
        "to the snapshot's start", "to the branch",
    }  # fmt: skip
    assert {kind for kind in wanted if kinds[kind] < 5} == set(), kinds
