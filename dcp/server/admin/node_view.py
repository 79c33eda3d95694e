"""What the admin interface shows and does of a node."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Protocol

from dcp.server.access.access import Access
from dcp.server.access.users import Users
from dcp.server.observe.meter import Meter
from dcp.server.operate.operations import Operations
from dcp.server.operate.partition_dump import Dumps


class CollectionsRefusedError(Exception):
    """A scope or collection cannot be made or dropped; the text says why."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class CollectionsView(Protocol):
    """Scopes and collections. Changes return the manifest's new uid once they are durable, and
    raise CollectionsRefusedError.
    """

    def manifest(self) -> dict[str, Any]:
        """Return the manifest as JSON: {"uid", "scopes": [{"name", "uid", "collections"}]}."""

    async def create_scope(self, scope: str) -> int:
        """Make a scope."""

    async def drop_scope(self, scope: str) -> int:
        """Drop a scope and its collections."""

    async def create_collection(self, scope: str, collection: str, max_ttl_s: int) -> int:
        """Make a collection; `max_ttl_s` 0: documents live as long as they say."""

    async def drop_collection(self, scope: str, collection: str) -> int:
        """Drop a collection."""


class NodeView(Protocol):
    """See the module."""

    users: Users
    meter: Meter
    access: Access
    operations: Operations
    dumps: Dumps
    is_ready: bool
    collections: CollectionsView

    @property
    def refusal_kind(self) -> str:
        """Which of `meter.REFUSAL_KINDS` it is, "" where writes are taken."""

    def status(self) -> dict[str, Any]:
        """Return what the node is and holds, as JSON."""

    def users_changed(self) -> None:
        """Let open connections know at once what their users may do now."""

    def metrics(self, *, by_vbucket: bool) -> bytes:
        """Return the metrics as Prometheus reads them."""

    def bucket_config(self) -> bytes:
        """Return the bucket's cluster configuration as JSON; "$HOST" stands for our address."""

    def global_config(self) -> bytes:
        """Return the node's cluster configuration without a bucket."""

    def config_version(self) -> tuple[int, int]:
        """Return (revEpoch, rev)."""

    def log_refusal(self, event: str, peer_host: str, **fields: object) -> None:
        """Log that somebody was refused something; at a bounded rate."""
