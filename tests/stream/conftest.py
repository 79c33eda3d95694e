"""A node in memory with a writer and a consumer, as most tests of streams begin."""

from __future__ import annotations

import pytest

from support.memory_node import MemoryNode, Peer, node_for


@pytest.fixture
def node(request: pytest.FixtureRequest) -> MemoryNode:
    return node_for(request)


@pytest.fixture
def writer(node: MemoryNode) -> Peer:
    peer = node.connect()
    peer.hello()
    return peer


@pytest.fixture
def peer(node: MemoryNode) -> Peer:
    peer = node.connect()
    peer.hello()
    peer.open()
    return peer
