"""A real server for tests of DCP consumers. Failovers, rollbacks and faults are method calls.

    def test_my_consumer_survives_a_failover(dcp_server):    # a fixture of pytest
        consumer = start_mine(dcp_server.address)
        dcp_server.failover(17, lose=3)
        ...

    from dcpd.testing import DcpServer                       # without pytest

    with DcpServer() as server: ...

docs/testing-consumers.md has the details, for other languages too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clients.lazy_names import lazy_names

if TYPE_CHECKING:
    from clients.testing.cluster import ClusterWaitError, DcpCluster, WrongArgumentError
    from clients.testing.fixture import dcp_cluster, dcp_server
    from clients.testing.process import DcpServer, ServerRefusedError, ServerStartError

__getattr__ = lazy_names(
    __name__,
    {
        "process": "DcpServer ServerRefusedError ServerStartError",
        "cluster": "ClusterWaitError DcpCluster WrongArgumentError",
        "fixture": "dcp_cluster dcp_server",
    },
)

__all__ = [
    "ClusterWaitError", "DcpCluster", "DcpServer", "ServerRefusedError", "ServerStartError",
    "WrongArgumentError",    "dcp_cluster", "dcp_server",
]  # fmt: skip
