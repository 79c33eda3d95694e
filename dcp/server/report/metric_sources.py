"""The sources of the metrics. (dcp.server.report.metrics itself takes 60 ms to import.)"""

from __future__ import annotations

from typing import NamedTuple

from dcp.server.access.access import Access
from dcp.server.net.connections import Connections
from dcp.server.net.crowd import Crowd
from dcp.server.observe.about import About
from dcp.server.observe.meter import Meter
from dcp.server.storage.health import Health
from dcp.server.storage.merging import Merging
from dcp.session.faults import FaultTable
from dcp.stream.hub import StreamHub
from vbucket.engine.documents.expiry import Pager
from vbucket.engine.engine import Engine
from vbucket.engine.read_view import Views


class MetricSources(NamedTuple):
    """See the module."""

    about: About
    meter: Meter
    health: Health
    engine: Engine
    merging: Merging
    pager: Pager
    views: Views
    hub: StreamHub
    connections: Connections
    access: Access
    admin_crowd: Crowd
    faults: FaultTable
