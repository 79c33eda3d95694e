"""The parts of the server that the admin interface uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcp.server.access.access import Access
from dcp.server.access.users import Users
from dcp.server.config.sources import LiveSettings
from dcp.server.net.cluster_config import ClusterConfig
from dcp.server.observe.event_log import EventLog, RefusalLog
from dcp.server.observe.meter import Meter
from dcp.server.operate.backup_reports import Backups
from dcp.server.operate.cluster_reports import ClusterBrief
from dcp.server.operate.collection_changes import Collections
from dcp.server.operate.consumer_desk import ConsumerDesk
from dcp.server.operate.document_desk import Documents
from dcp.server.operate.operations import Operations
from dcp.server.operate.partition_dump import Dumps
from dcp.server.operate.reports import StatusReport
from dcp.server.report.console_view import ConsoleView
from dcp.server.report.sampler import Sampler
from dcp.server.storage.health import Health
from dcp.server.storage.process.scrubbing import Scrubbing
from vbucket.engine.engine import Engine

if TYPE_CHECKING:
    from dcp.server.cluster.operators.cluster_operations import ClusterOperations


@dataclass(frozen=True)
class ConsoleParts:
    """What the web console uses in addition to the API."""

    view: ConsoleView
    engine: Engine
    sampler: Sampler
    documents: Documents
    is_test_mode: bool
    """Setting test_mode."""
    allows_faults: bool
    """Whether faults may be set: in test mode, or if only this machine can reach the server."""
    brief: Callable[[], ClusterBrief] | None
    """Returns whether the cluster is well; None: the node is alone."""


@dataclass(frozen=True)
class AdminParts:
    """See the module. Each set of routes gets the parts that it uses."""

    live: LiveSettings
    log: EventLog
    access: Access
    users: Users
    meter: Meter
    refusals: RefusalLog
    health: Health
    config: ClusterConfig
    operations: Operations
    dumps: Dumps
    collections: Collections
    backups: Backups
    scrubbing: Scrubbing
    consumers: ConsumerDesk
    status: Callable[[], StatusReport]
    console: ConsoleParts
    metrics: Callable[..., bytes]
    """Returns the metrics as text; by_vbucket: also those of each partition; is_openmetrics: in
    that format."""
    cluster: Callable[[], ClusterOperations]
    """Returns the commands about the cluster."""
    users_changed: Callable[[], None]
    """Gives open connections the current rights of their users."""
