"""Placement: even, on different racks, few moves, and always the same; against all small plans."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from failover.coordinator.plans import placement
from failover.coordinator.plans.placement import (
    FlowNetwork,
    PlacementError,
    copies_per_rack,
    plan_placement,
)

NAMES = [f"n{number}" for number in range(7)]


@st.composite
def clusters(draw, nodes_max=6, partitions_max=40, racks_max=3):
    """Nodes with racks or without, copies, and chains that may name nodes that are gone."""
    count = draw(st.integers(1, nodes_max))
    has_racks = draw(st.booleans())
    racks = {
        name: f"r{draw(st.integers(1, racks_max))}" if has_racks else ""
        for name in draw(st.permutations(NAMES))[:count]
    }
    chains = st.lists(st.sampled_from(NAMES), max_size=4, unique=True).map(tuple)
    size = draw(st.integers(0, partitions_max))
    present = {vb_id: draw(chains) for vb_id in range(size)}
    return racks, draw(st.integers(1, 4)), present


def loads(racks, chains):
    copies, masters = Counter(dict.fromkeys(racks, 0)), Counter(dict.fromkeys(racks, 0))
    for chain in chains:
        copies.update(chain)
        masters[chain[0]] += 1
    return copies, masters


def spread(counts):
    return max(counts.values()) - min(counts.values())


def sizes_of(racks):
    return Counter(racks.values())


@settings(max_examples=200)
@given(clusters())
def test_copies_are_on_different_nodes_and_racks(cluster):
    racks, copies, present = cluster
    plan = plan_placement(racks, copies, present)
    assert plan.wanted.keys() == present.keys()
    count = min(copies, len(racks))
    for chain in plan.wanted.values():
        assert len(chain) == len(set(chain)) == count
        assert set(chain) <= racks.keys()
        if all(racks.values()):
            sizes = sizes_of(racks)
            used = Counter(racks[member] for member in chain)
            assert max(used.values()) <= copies_per_rack(sizes.values(), count)
            if len(sizes) >= count:
                assert len(used) == count


@settings(max_examples=200)
@given(clusters())
def test_without_racks_copies_and_masters_are_within_one_of_even(cluster):
    racks, copies, present = cluster
    racks = dict.fromkeys(racks, "")
    copies_of, masters_of = loads(racks, plan_placement(racks, copies, present).wanted.values())
    assert spread(copies_of) <= 1
    assert spread(masters_of) <= 1


@settings(max_examples=100)
@given(clusters(), st.integers(1, 3))
def test_with_racks_of_one_size_they_are_too(cluster, per_rack):
    _, copies, present = cluster
    racks = {f"n{number}": f"r{number // per_rack}" for number in range(3 * per_rack)}
    copies_of, masters_of = loads(racks, plan_placement(racks, copies, present).wanted.values())
    assert spread(copies_of) <= 1
    assert spread(masters_of) <= 1


@settings(max_examples=100)
@given(clusters(), st.randoms())
def test_the_same_cluster_gives_the_same_plan_in_any_order(cluster, random):
    racks, copies, present = cluster

    def shuffled(table):
        items = list(table.items())
        random.shuffle(items)
        return dict(items)

    plan = plan_placement(racks, copies, present)
    assert plan_placement(shuffled(racks), copies, shuffled(present)) == plan


@settings(max_examples=100)
@given(clusters())
def test_a_plan_that_is_carried_out_leaves_nothing_to_do(cluster):
    racks, copies, present = cluster
    plan = plan_placement(racks, copies, present)
    assert plan_placement(racks, copies, plan.wanted).moves == ()


@settings(max_examples=100)
@given(clusters())
def test_moves_lead_from_what_is_there_to_what_is_wanted(cluster):
    racks, copies, present = cluster
    plan = plan_placement(racks, copies, present)
    moved = {move.vb_id: move for move in plan.moves}
    for vb_id, chain in present.items():
        move = moved.get(vb_id)
        if move is None:
            assert plan.wanted[vb_id] == chain
        else:
            assert (move.present, move.wanted) == (chain, plan.wanted[vb_id])
            assert set(move.wanted) == set(chain) - set(move.dropped) | set(move.added)


# ---- Against all plans


@lru_cache(maxsize=1000)
def has_new_master(move):
    return move.wanted[:1] != move.present[:1]


def placements(racks, partitions, copies):
    """All placements that keep the rule of racks: (holders of each partition, loads)."""
    members = [member for member, _ in racks]
    rack_of = dict(racks)
    per_rack = copies_per_rack(Counter(rack_of.values()).values(), copies)
    allowed = [
        frozenset(chosen)
        for chosen in combinations(members, copies)
        if max(Counter(rack_of[member] for member in chosen).values()) <= per_rack
    ]
    found = []
    for placed in product(allowed, repeat=partitions):
        counts = Counter(dict.fromkeys(members, 0))
        for chosen in placed:
            counts.update(chosen)
        found.append((placed, tuple(sorted(counts.values()))))
    return found


@settings(max_examples=300)
@given(clusters(nodes_max=4, partitions_max=4))
def test_no_other_plan_is_more_even_or_adds_less(cluster):
    racks, copies, present = cluster
    count = min(copies, len(racks))
    plan = plan_placement(racks, copies, present)
    rack_of = racks if all(racks.values()) else {member: member for member in racks}
    others = placements(tuple(sorted(rack_of.items())), len(present), count)
    wanted = [plan.wanted[vb_id] for vb_id in range(len(present))]
    own = tuple(sorted(loads(racks, wanted)[0].values()))
    # Even: no placement has a lower highest load, or a higher lowest one.
    assert own[-1] == min(counts[-1] for _, counts in others)
    assert own[0] == max(counts[0] for _, counts in others)

    def added(placed):
        return sum(len(nodes - set(present[vb_id])) for vb_id, nodes in enumerate(placed))

    fewest = min(added(placed) for placed, counts in others if counts == own)
    assert sum(len(move.added) for move in plan.moves) == fewest


def as_good(racks, count, plan, present):
    """Return the placements that are as even as a plan, and add as few copies."""
    rack_of = racks if all(racks.values()) else {member: member for member in racks}
    wanted = [plan.wanted[vb_id] for vb_id in range(len(present))]
    own = tuple(sorted(loads(racks, wanted)[0].values()))
    added = sum(len(move.added) for move in plan.moves)
    return [
        placed
        for placed, counts in placements(tuple(sorted(rack_of.items())), len(present), count)
        if counts == own
        and sum(len(nodes - set(present[vb_id])) for vb_id, nodes in enumerate(placed)) == added
    ]


@settings(max_examples=200)
@given(clusters(nodes_max=4, partitions_max=4))
def test_no_other_equally_small_plan_keeps_more_masters(cluster):
    racks, copies, present = cluster
    plan = plan_placement(racks, copies, present)
    share = -(-len(present) // len(racks))

    def may_stay(placed):
        firsts = (chain[0] for vb_id, chain in present.items() if {*chain[:1]} & {*placed[vb_id]})
        return sum(min(share, count) for count in Counter(firsts).values())

    others = as_good(racks, min(copies, len(racks)), plan, present)
    assert may_stay(plan.wanted) == max(map(may_stay, others))


@settings(max_examples=300)
@given(clusters(nodes_max=4, partitions_max=4), st.randoms())
def test_no_master_moves_if_an_equally_small_plan_moves_none(cluster, random):
    """Copies and masters together. The first of each chain is drawn anew, so masters are even."""
    racks, copies, present = cluster
    racks = dict.fromkeys(racks, "")
    firsts = random.sample(sorted(racks), len(racks)) * len(present)
    for vb_id, chain in present.items():
        present[vb_id] = (firsts[vb_id], *(each for each in chain if each != firsts[vb_id]))
    plan = plan_placement(racks, copies, present)
    others = as_good(racks, min(copies, len(racks)), plan, present)
    if any(all(chain[0] in placed[vb_id] for vb_id, chain in present.items()) for placed in others):
        assert not any(has_new_master(move) for move in plan.moves)


@settings(max_examples=200)
@given(clusters(nodes_max=4, partitions_max=4))
def test_no_other_choice_of_masters_moves_fewer(cluster):
    racks, copies, present = cluster
    racks = dict.fromkeys(racks, "")
    plan = plan_placement(racks, copies, present)
    fewest = len(present)
    for masters in product(*(sorted(plan.wanted[vb_id]) for vb_id in range(len(present)))):
        counts = Counter(dict.fromkeys(racks, 0))
        counts.update(masters)
        if spread(counts) <= 1:
            moved = (present[vb_id][:1] != (one,) for vb_id, one in enumerate(masters))
            fewest = min(fewest, sum(moved))
    assert sum(has_new_master(move) for move in plan.moves) == fewest


def test_fewer_copies_leave_every_master_where_it_is():
    racks = dict.fromkeys("ab", "")
    plan = plan_placement(racks, 1, {0: ("b", "a"), 1: ("a", "b")})
    assert plan.wanted == {0: ("b",), 1: ("a",)}


# ---- Sizes of the product


def nodes(count, racks=0):
    return {f"n{n:02}": f"r{n % racks}" if racks else "" for n in range(count)}


def test_a_node_more_gets_its_share_and_nothing_else_moves():
    before = plan_placement(nodes(3), 3, dict.fromkeys(range(1024), ()))
    plan = plan_placement(nodes(4), 3, before.wanted)
    assert sum(len(move.added) for move in plan.moves) == 768
    assert {member for move in plan.moves for member in move.added} == {"n03"}
    _, masters_of = loads(nodes(4), plan.wanted.values())
    assert set(masters_of.values()) == {256}


@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 4), (5, 4), (4, 4)])
def test_a_plan_costs_as_much_as_there_are_kinds_of_chains(before, after, monkeypatch):
    """Otherwise a plan for 1,024 partitions holds up the event loop for 20 to 80 ms."""
    chains = dict.fromkeys(range(1024), ())
    if before:
        chains = plan_placement(nodes(before), 3, chains).wanted
        # All orders of each chain, as after failovers: the most kinds that there can be.
        orders = {vb_id: vb_id // 4 % 3 for vb_id in chains}
        chains = {vb_id: chain[orders[vb_id]:] + chain[:orders[vb_id]]
                  for vb_id, chain in chains.items()}  # fmt: skip
    networks = []

    class Counted(FlowNetwork):
        def __init__(self):
            super().__init__()
            networks.append(self)

    monkeypatch.setattr(placement, "FlowNetwork", Counted)
    plan = plan_placement(nodes(after), 3, chains)
    assert len(plan.wanted) == 1024
    assert len(networks) == 2
    assert all(network.add_vertex() < 200 for network in networks)


@pytest.mark.parametrize("copies", [2, 1])
def test_fewer_copies_of_all_partitions_move_no_master(copies):
    before = plan_placement(nodes(4), 3, dict.fromkeys(range(1024), ())).wanted
    # As after failovers and their way back: chains in any order, masters even.
    before = {vb_id: (chain[0], *reversed(chain[1:])) for vb_id, chain in before.items()}
    plan = plan_placement(nodes(4), copies, before)
    assert not any(has_new_master(move) or move.added for move in plan.moves)
    assert len(plan.moves) == 1024


def test_a_drained_node_loses_all_and_the_others_keep_theirs():
    before = plan_placement(nodes(5), 2, dict.fromkeys(range(1024), ())).wanted
    left = {member: rack for member, rack in nodes(5).items() if member != "n02"}
    plan = plan_placement(left, 2, before)
    held = sum("n02" in chain for chain in before.values())
    assert sum(len(move.added) for move in plan.moves) == held
    assert all("n02" not in chain for chain in plan.wanted.values())
    assert {member for move in plan.moves for member in move.dropped} == {"n02"}


def test_racks_take_what_they_can_and_the_others_share_the_rest():
    racks = {"a1": "a", "b1": "b", "b2": "b", "c1": "c", "c2": "c", "c3": "c", "c4": "c"}
    plan = plan_placement(racks, 2, dict.fromkeys(range(700), ()))
    copies_of, masters_of = loads(racks, plan.wanted.values())
    assert {copies_of[f"c{number}"] for number in range(1, 5)} == {175}, "one copy in each rack"
    assert {copies_of[member] for member in ("a1", "b1", "b2")} == {233, 234}
    assert spread(masters_of) == 0
    plan = plan_placement(racks, 3, dict.fromkeys(range(700), ()))
    copies_of, _ = loads(racks, plan.wanted.values())
    assert dict(copies_of) == {"a1": 700, "b1": 350, "b2": 350} | {
        f"c{n}": 175 for n in range(1, 5)
    }


def test_a_rack_that_only_some_nodes_name_counts_for_nothing():
    some = {"a": "r1", "b": "r1", "c": ""}
    none = dict.fromkeys(some, "")
    present = dict.fromkeys(range(30), ())
    assert plan_placement(some, 2, present) == plan_placement(none, 2, present)


def test_without_a_node_there_is_no_plan():
    with pytest.raises(PlacementError, match="add one, or drain fewer"):
        plan_placement({}, 2, {0: ("a",)})


def test_flow_takes_the_cheaper_way_and_gives_it_back():
    network = FlowNetwork()
    source, a, b, sink = (network.add_vertex() for _ in range(4))
    edges = [
        network.add_edge(source, a, 1), network.add_edge(source, b, 1),
        network.add_edge(a, b, 1), network.add_edge(a, sink, 1, 5), network.add_edge(b, sink, 1),
    ]  # fmt: skip
    assert network.push(source, sink) == 2
    assert [network.flow_of(edge) for edge in edges] == [1, 1, 0, 1, 1]
