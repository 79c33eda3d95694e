"""What a client knows of its cluster: which map counts, whom it asks, and when it tries again."""

from __future__ import annotations

import asyncio

import pytest
from scripted_peer import ScriptedPeer, config_of, reply
from test_consumer_steering import until

from clients.address import parse_address
from clients.errors import ConnectError
from clients.link.blocking_link import refresh_map
from clients.link.dials import Dials
from clients.link.topology import PAUSE_FIRST_S, ClusterMap, ClusterNode, Topology
from dcp.wire.opcode import Opcode

A, B, C = (ClusterNode(host, 1) for host in "abc")


def topology(rev, *active, nodes=(A, B, C)):
    return Topology((1, rev), nodes, active)


@pytest.fixture
def cluster():
    found = ClusterMap([A])
    assert found.adopt(topology(3, 0, 1, -1, 1))
    return found


def test_an_older_map_counts_only_as_the_last_resort(cluster):
    older, newer = topology(2, 1, 1, 1, 1), topology(4, 2, 2, 2, 2)
    assert not cluster.adopt(older)
    cluster.topology = None
    assert not cluster.adopt(older)
    assert cluster.adopt(older, is_last_resort=True)
    assert cluster.adopt(newer)
    assert cluster.topology is cluster.newest is newer


def test_partitions_are_due_by_node_after_its_pause(cluster):
    places, without = cluster.due(range(4), 0.0, 0.0)
    assert places == {A.place: [0], B.place: [1, 3]}
    assert [(vb_id, error.vb_id) for vb_id, error in without.items()] == [(2, 2)]
    assert cluster.is_stale
    assert cluster.due([0, 1], PAUSE_FIRST_S / 2, 0.0) == ({}, {})
    assert cluster.due([0, 1], 0.0, 0.0, free={B.place}) == ({B.place: [1]}, {})
    assert cluster.due([0, 1], None, 0.0) == ({A.place: [0], B.place: [1]}, {})
    assert cluster.due([0], PAUSE_FIRST_S, 0.0) == ({A.place: [0]}, {})
    assert cluster.pause_of(A.place).until_s == pytest.approx(3 * PAUSE_FIRST_S)
    assert cluster.has_paused
    cluster.progress(A.place, is_placed=True)
    assert cluster.pause_of(A.place).is_short


def test_a_node_that_left_the_map_keeps_no_pause(cluster):
    cluster.pause(C.place, 0.0, 0.0)
    cluster.adopt(topology(4, 0, 0, 0, 0, nodes=(A, B)))
    assert C.place not in cluster.pauses


def test_nodes_are_asked_in_turn_a_refusing_one_last(cluster):
    assert cluster.to_ask() == [A.place, B.place, C.place]
    assert cluster.to_ask() == [B.place, C.place, A.place]
    cluster.avoid = C.place
    assert cluster.wants_newer(is_placed=True)
    assert cluster.to_ask() == [A.place, B.place, C.place]
    assert not cluster.wants_newer(is_placed=True), "it was asked for"
    assert cluster.to_ask([("d", 1)]) == [C.place, A.place, ("d", 1), B.place]


def test_a_map_is_wanted_while_a_partition_has_no_node(cluster):
    assert not cluster.wants_newer(is_placed=False)
    cluster.is_stale = True
    assert cluster.wants_newer(is_placed=False)
    assert not cluster.wants_newer(is_placed=True)


async def test_the_other_nodes_are_asked_if_the_named_one_is_gone(unused_tcp_port):
    """Over asyncio, as consumers and backups, and over blocking sockets, as Spark's driver."""
    async with ScriptedPeer() as peer:
        ports = [unused_tcp_port, peer.port]
        peer.handlers[Opcode.GET_CLUSTER_CONFIG] = lambda frame: reply(
            frame, value=config_of(ports, [1] * 1024, rev=7)
        )
        address = parse_address(f"127.0.0.1:{unused_tcp_port}")
        dials = Dials(address, asyncio.Event())
        with pytest.raises(ConnectError):
            await dials.refreshed_link()
        nodes = tuple(ClusterNode("127.0.0.1", port) for port in ports)
        dials.cluster.adopt(topology(6, *[0] * 1024, nodes=nodes))
        link = await dials.refreshed_link()
        assert link.place == nodes[1].place
        assert dials.cluster.topology.revision == (1, 7)
        link.close()
        known = ClusterMap(nodes[:1])
        known.adopt(topology(6, *[0] * 1024, nodes=nodes))
        found = await asyncio.to_thread(refresh_map, known, address)
        assert found.place_of(5) == nodes[1].place


async def test_a_search_that_is_given_up_leaves_no_connection():
    """One node has an older map, and the other one is silent."""
    async with ScriptedPeer() as late, ScriptedPeer() as silent:
        late.handlers[Opcode.GET_CLUSTER_CONFIG] = lambda frame: reply(
            frame, value=config_of([late.port], rev=6)
        )
        silent.held.clear()
        dials = Dials(
            parse_address(f"127.0.0.1:{late.port},127.0.0.1:{silent.port}"), asyncio.Event()
        )
        dials.cluster.adopt(topology(7, *[0] * 1024, nodes=(ClusterNode("127.0.0.1", late.port),)))
        search = asyncio.create_task(dials.newest_link())
        await until(lambda: silent.connections == 1)
        assert late.connections == 1
        search.cancel()
        await asyncio.wait([search])
        await until(lambda: not late._writers)
        silent.held.set()
