"""What tests of the server share."""

from __future__ import annotations

import pytest

from support.load import MEMTABLE
from support.memory_node import MemoryNode
from vbucket.engine.keyspace import Keyspace


@pytest.fixture
def keyspace() -> Keyspace:
    """Return an empty keyspace whose memtables hold `MEMTABLE`."""
    keyspace = MemoryNode().engine.keyspace
    keyspace.memtables.bytes_max = MEMTABLE
    return keyspace
