"""The pytest plugin of dcpd: the fixtures, wherever dcpd is installed."""

from __future__ import annotations

from clients.testing.fixture import dcp_cluster, dcp_server

__all__ = ["dcp_cluster", "dcp_server"]
