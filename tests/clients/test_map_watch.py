"""The connection of a consumer that is there for the cluster's maps alone."""

from __future__ import annotations

import asyncio

import pytest
from scripted_peer import ScriptedPeer, config_of, reply
from test_consumer_map import pushed
from test_consumer_steering import until

from clients.address import parse_address
from clients.link import dials
from clients.link.dials import Dials, MapWatch
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status


@pytest.fixture
async def peers():
    async with ScriptedPeer() as first, ScriptedPeer() as second, ScriptedPeer() as third:
        for peer in (first, second, third):
            peer.handlers[Opcode.NOOP] = reply
        yield [first, second, third]


@pytest.fixture
async def told():
    return []


@pytest.fixture
async def watch(peers, told, monkeypatch):
    monkeypatch.setattr(dials, "CHECK_S", 0.05)
    monkeypatch.setattr(dials, "PAUSE_S", 0.01)

    address = parse_address(peers[0].address)
    watched = Dials(address, asyncio.Event(), timeout_s=0.2)
    watch = MapWatch(watched, lambda config, host: told.append((config, host)))
    yield watch
    await watch.close()


def places(peers):
    return [("127.0.0.1", peer.port) for peer in peers]


async def test_it_watches_beside_a_single_connection_only(peers, watch):
    nodes = places(peers)
    for used in ([], nodes[:2], nodes):
        watch.update(used, nodes)
        assert not watch.is_running
    watch.update(nodes[:1], nodes[:1])
    assert not watch.is_running, "there is no other node"
    watch.update(nodes[:1], nodes)
    assert watch.is_running
    await until(lambda: peers[1].connections + peers[2].connections == 1)
    assert not peers[0].connections
    watch.update(nodes[:2], nodes)
    assert not watch.is_running
    await until(lambda: not (peers[1]._writers or peers[2]._writers))


async def test_it_tells_the_map_of_its_node_and_those_that_are_pushed(peers, watch, told):
    newer = config_of([1], rev=9)
    nodes = places(peers[:2])
    peers[1].handlers[Opcode.NOOP] = lambda frame: pushed(newer) + reply(frame)
    watch.update(nodes[:1], nodes)
    await until(lambda: len(told) >= 2)
    assert told[:2] == [(peers[1].config, "127.0.0.1"), (newer, "127.0.0.1")]


async def test_a_silent_node_is_left_for_another_one(peers, watch):
    nodes = places(peers)
    watch.update(nodes[:1], nodes)
    others = peers[1:]
    await until(lambda: any(Opcode.NOOP in peer.opcodes() for peer in others))
    silent = next(peer for peer in others if peer.connections)
    other = next(peer for peer in others if peer is not silent)
    silent.held.clear()
    await until(lambda: Opcode.NOOP in other.opcodes())
    silent.held.set()


async def test_a_node_that_refuses_the_login_does_not_end_it(peers, watch):
    nodes = places(peers[:2])
    peers[1].handlers[Opcode.SASL_AUTH] = lambda frame: reply(frame, Status.AUTH_ERROR)
    watch.update(nodes[:1], nodes)
    await until(lambda: peers[1].connections >= 3)
    del peers[1].handlers[Opcode.SASL_AUTH]
    async with asyncio.timeout(10):
        await until(lambda: Opcode.NOOP in peers[1].opcodes())
