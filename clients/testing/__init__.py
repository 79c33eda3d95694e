"""A real server for tests of DCP consumers. Failovers, rollbacks and faults are method calls.

    from clients.testing import dcp_server       # a pytest fixture

    def test_my_consumer_survives_a_failover(dcp_server):
        consumer = start_mine(dcp_server.address)
        dcp_server.failover(17, lose=3)
        ...

    with DcpServer() as server: ...              # without pytest

docs/testing-consumers.md has the details, for other languages too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clients.testing.process import DcpServer, ServerRefusedError, ServerStartError

if TYPE_CHECKING:
    from clients.testing.fixture import dcp_server

__all__ = ["DcpServer", "ServerRefusedError", "ServerStartError", "dcp_server"]


def __getattr__(name: str) -> Any:
    """Import pytest only when the fixture is used."""
    if name == "dcp_server":
        from clients.testing.fixture import dcp_server

        return dcp_server
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
