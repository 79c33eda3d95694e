"""Facts about the server that sessions report: version, cluster configuration, statistics."""

from __future__ import annotations

from dcp.server.net.cluster_config import ClusterConfig
from dcp.server.observe.about import About
from dcp.server.report.stats import Rows, Stats


class ServerFacts:
    """The `NodeFacts` of all sessions."""

    version = About.version

    def __init__(self, config: ClusterConfig, stats: Stats) -> None:
        self.bucket = config.bucket
        self.bucket_config = config.bucket_config
        self.global_config = config.global_config
        self.config_version = config.config_version
        self.address_of = config.address_of
        self._stats = stats

    def stats(self, group: bytes) -> Rows | None:
        """Return the statistics of a group, None for an unknown group."""
        return self._stats.rows(group)
