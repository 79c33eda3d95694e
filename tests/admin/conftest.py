"""What tests of the admin interface share. Those with an event loop run on both that there are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from dcp.server.access.users import USERS_FILE, Users
from support.admin_node import SmallNode


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """dcpd runs on uvloop where there is one."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def node(tmp_path: Path) -> SmallNode:
    return SmallNode(Users(tmp_path / USERS_FILE, iterations=4096), tmp_path)
