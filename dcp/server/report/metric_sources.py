"""The sources of the metrics, and what a line of their tables is. (dcp.server.report.metrics itself
takes 60 ms to import.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from dcp.server.access.access import Access
from dcp.server.net.connections import Connections
from dcp.server.net.crowd import Crowd
from dcp.server.observe.about import About
from dcp.server.observe.event_log import RefusalLog
from dcp.server.observe.meter import Histogram, Meter
from dcp.server.report.consumer_watch import ChangeAges
from dcp.server.storage.health import Health
from dcp.server.storage.merging import Merging
from dcp.server.storage.process.scrubbing import Scrubbing
from dcp.session.faults import FaultTable
from dcp.stream.hub import StreamHub
from vbucket.engine.documents.expiry import Pager
from vbucket.engine.engine import Engine
from vbucket.engine.read_view import Views

if TYPE_CHECKING:
    from failover.coordinator.cluster_session import ClusterSession
    from failover.replication.node import ReplicationCore


class ClusterSources(NamedTuple):
    """What the metrics of a cluster's node are read from."""

    session: ClusterSession
    core: ReplicationCore
    store_seconds: Histogram
    """Round trips to the metadata store."""


class MetricSources(NamedTuple):
    """See the module."""

    about: About
    meter: Meter
    health: Health
    engine: Engine
    merging: Merging
    scrubbing: Scrubbing
    pager: Pager
    views: Views
    hub: StreamHub
    connections: Connections
    access: Access
    admin_crowd: Crowd
    faults: FaultTable
    refusals: RefusalLog
    ages: ChangeAges
    cluster: ClusterSources | None
    """None: the node is alone."""


Samples = Iterable[tuple[tuple[str, ...], float]]
"""(values of the labels, value)."""


class MetricSpec(NamedTuple):
    """One line of a table. `read` returns samples, or a Histogram for a histogram."""

    name: str
    kind: str
    unit: str
    labels: tuple[str, ...]
    meaning: str
    bad: str
    """What a bad value looks like, and what it means."""
    read: Callable[[MetricSources], Samples | Histogram]


def one(read: Callable[[MetricSources], float]) -> Callable[[MetricSources], Samples]:
    """Return the `read` of a metric without labels."""
    return lambda of: [((), read(of))]
