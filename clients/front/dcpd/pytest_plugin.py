"""The pytest plugin of dcpd: the fixture `dcp_server`, wherever dcpd is installed."""

from __future__ import annotations

from clients.testing.fixture import dcp_server

__all__ = ["dcp_server"]
