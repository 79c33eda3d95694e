"""Which copy of a partition is read, and when another one has its turn."""

from __future__ import annotations

import json
import random

import pytest

from clients.errors import UnsupportedError
from clients.link.copies import RETURN_S, Copies, check_copies
from clients.link.topology import ClusterNode, Topology, parse_topology
from vbucket.model.partition_map import MapNode, PartitionMap, bucket_config

NODES = tuple(ClusterNode("h", 1000 + at, 0, rack) for at, rack in enumerate(("a", "b", "b", "")))
MASTERS = (0, 1, 2, 3) * 4


def topology(replicas: tuple[tuple[int, ...], ...]) -> Topology:
    return Topology((1, 1), NODES, MASTERS, replicas)


ALL = topology(tuple(tuple(at for at in range(4) if at != master) for master in MASTERS))


def test_copies_share_the_partitions_and_masters_have_none() -> None:
    chosen = Copies().chosen(ALL).vbucket_map
    assert all(at != master for at, master in zip(chosen, MASTERS, strict=True))
    assert {chosen.count(at) for at in range(4)} <= {3, 4, 5}


def test_the_nearest_copy_comes_first_if_there_is_one() -> None:
    chosen = Copies("b").chosen(ALL).vbucket_map
    assert set(chosen) == {1, 2}
    assert set(Copies("elsewhere").chosen(ALL).vbucket_map) == {0, 1, 2, 3}


def test_a_partition_passes_all_copies_and_the_master_last() -> None:
    copies = Copies()
    for vb_id in range(len(MASTERS)):
        seen = []
        for _ in range(4):
            seen.append(copies.chosen(ALL).vbucket_map[vb_id])
            copies.pass_over([vb_id], 0.0)
        assert sorted(seen) == [0, 1, 2, 3]
        assert seen[-1] == MASTERS[vb_id]
        assert copies.chosen(ALL).vbucket_map[vb_id] == seen[0], "and begins again"


def test_damaged_copies_are_left_out_until_one_is_left() -> None:
    copies = Copies()
    for vb_id in range(len(MASTERS)):
        copies.pass_over([vb_id] * (vb_id // 4), 0.0)
        seen = []
        for left in (4, 3, 2, 1):
            assert copies.is_last(ALL, vb_id) == (left == 1)
            seen.append(copies.chosen(ALL).vbucket_map[vb_id])
            copies.leave_out(vb_id, NODES[seen[-1]].place, 0.0)
        assert sorted(seen) == [0, 1, 2, 3]
        assert vb_id >= 4 or seen[-1] == MASTERS[vb_id], "the master comes last"
        assert copies.is_last(ALL, vb_id)
        assert copies.chosen(ALL).vbucket_map[vb_id] in seen, "some copy is asked again"
    assert copies.return_when_due(RETURN_S)
    assert copies.chosen(ALL) == Copies().chosen(ALL)
    assert not any(copies.is_last(ALL, vb_id) for vb_id in range(len(MASTERS)))
    assert Copies().is_last(topology(()), 0), "a master alone"


def test_after_a_while_all_begin_with_their_first_copy() -> None:
    copies, first = Copies(), Copies().chosen(ALL)
    drawn = random.Random(1)
    for _ in range(50):
        copies.pass_over([drawn.randrange(16)], 5.0)
    assert copies.chosen(ALL) != first
    assert not copies.return_when_due(5.0 + RETURN_S - 0.1)
    assert copies.return_when_due(5.0 + RETURN_S)
    assert copies.chosen(ALL) == first
    assert not copies.return_when_due(100.0 + RETURN_S)


def test_without_copies_masters_serve_and_the_check_says_so() -> None:
    alone = topology(())
    assert Copies().chosen(alone) == alone
    with pytest.raises(UnsupportedError, match="one copy of each partition"):
        check_copies(alone, "h:1000")
    check_copies(ALL, "h:1000")


def test_copies_that_are_all_out_of_sync_come_back() -> None:
    """While the other nodes are dead, maps name masters only, beside the empty places. A node that
    has not read the metadata store yet names none.
    """
    raw = bucket_config(PartitionMap((MapNode("h", 1, 2),), ((0, -1, -1),) * 16).checked())
    none_left = parse_topology(raw, "h")
    check_copies(none_left, "h:1000")
    check_copies(topology(())._replace(vbucket_map=(-1,) * 16), "h:1000")
    copies = Copies()
    assert copies.chosen(none_left).vbucket_map == (0,) * 16
    assert copies.chosen(ALL) == Copies().chosen(ALL)


def test_maps_tell_the_racks_of_nodes() -> None:
    nodes = (MapNode("h", 1, 2, rack="r1"), MapNode("i", 1, 2))
    raw = bucket_config(PartitionMap(nodes, ((0, 1),) * 4).checked())
    assert [node.rack for node in parse_topology(raw, "h").nodes] == ["r1", ""]
    assert ["serverGroup" in each for each in json.loads(raw)["nodesExt"]] == [True, False]
