"""A new cluster configuration: taken over when it is newer, told and counted, and followed."""

from __future__ import annotations

import asyncio
import logging

import pytest
from scripted_peer import ScriptedPeer, config_of
from test_consumer_steering import until

from clients.address import parse_address
from clients.consumer.counters import ConsumerMetrics
from clients.consumer.options import ConsumerOptions
from clients.consumer.placement import Placement
from clients.consumer.streams import Wanted
from clients.errors import ConnectError


@pytest.fixture
async def placement():
    return Placement(
        parse_address("127.0.0.1:1"), ConsumerMetrics(), lambda _link: pytest.fail("no session"),
        ConsumerOptions(connect_timeout_s=1.0),
    )  # fmt: skip


async def test_a_newer_configuration_is_told_and_counted(placement, caplog):
    caplog.set_level(logging.INFO, "dcpd.consumer")
    placement.adopt(config_of([1], rev=1), "127.0.0.1")
    assert placement._metrics.topology_changes == 0
    placement.adopt(config_of([1, 2], [1] * 1024, rev=2), "127.0.0.1")
    assert placement.topology.node_of(5).kv_port == 2
    assert placement._metrics.topology_changes == 1
    assert "new cluster configuration (1, 2) (was (1, 1)): 2 nodes" in caplog.text


async def test_an_older_or_the_same_configuration_changes_nothing(placement):
    placement.adopt(config_of([1], rev=5), "127.0.0.1")
    for rev in (4, 5):
        placement.adopt(config_of([1, 2], [1] * 1024, rev=rev), "127.0.0.1")
    assert placement.topology.node_of(5).kv_port == 1
    # After a lost connection the same one may come again: that is no change.
    placement.cluster.topology = None
    placement.adopt(config_of([1], rev=5), "127.0.0.1")
    assert placement.topology is not None
    assert placement._metrics.topology_changes == 0


async def test_no_configuration_means_to_ask(placement):
    placement.adopt(config_of([1]), "127.0.0.1")
    placement.adopt(b"", "127.0.0.1")
    assert placement.topology is None


async def test_after_a_lost_connection_an_older_map_is_the_last_resort(placement):
    placement.adopt(config_of([1], rev=5), "127.0.0.1")
    placement.cluster.topology = None
    placement.adopt(config_of([1, 2], [1] * 1024, rev=4), "127.0.0.1")
    assert placement.topology is None, "its node is cut off, or late"
    placement.adopt(config_of([1, 2], [1] * 1024, rev=4), "127.0.0.1", is_last_resort=True)
    assert placement.topology.revision == (1, 4)


async def test_an_opening_that_is_given_up_leaves_no_connection(placement):
    """One node has answered, and the other one is silent."""
    async with ScriptedPeer() as good, ScriptedPeer() as silent:
        silent.held.clear()
        owners = [vb_id % 2 for vb_id in range(1024)]
        placement.adopt(config_of([good.port, silent.port], owners), "127.0.0.1")
        opening = asyncio.create_task(placement.links_of([0, 1]))
        await until(lambda: good.connections and silent.connections)
        opening.cancel()
        await asyncio.wait([opening])
        await until(lambda: not good._writers)
        silent.held.set()
        await placement.close()


async def test_opening_goes_by_the_known_map_after_a_loss(placement, monkeypatch, unused_tcp_port):
    """A connection that streams already is lost while the others are made, and no node answers."""

    async def refresh(*_, **__):
        raise ConnectError("no node answers")

    settle = placement._settle

    async def settle_and_lose(until_s):
        failure = await settle(until_s)
        placement.cluster.topology = None
        return failure

    placement.adopt(config_of([1, unused_tcp_port], [1] * 1024), "127.0.0.1")
    placement.wanted({0: Wanted(None)})
    monkeypatch.setattr(placement, "refresh", refresh)
    monkeypatch.setattr(placement, "_settle", settle_and_lose)
    with pytest.raises(ConnectError):
        await placement.place()
    await placement.close()
