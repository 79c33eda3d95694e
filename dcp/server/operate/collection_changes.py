"""Scopes and collections of the running node, for the admin interface.

A change applies to all commands at once. It returns when the change is durable.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

from dcp.server.observe.event_log import EventLog
from dcp.server.storage.waiters import CommitWaiters
from vbucket.engine.engine import Engine
from vbucket.model.manifest import (
    Manifest,
    ManifestError,
    UnknownCollectionIdError,
    UnknownScopeError,
)

Share = Callable[[Callable[[Manifest], Manifest]], Awaitable[Manifest]]
_NOT_FOUND: Final = (UnknownScopeError, UnknownCollectionIdError)


class CollectionsRefusedError(Exception):
    """A scope or collection cannot be created or dropped; the text says why."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class Collections:
    """The node's scopes and collections."""

    def __init__(
        self,
        engine: Engine,
        commits: CommitWaiters,
        log: EventLog,
        *,
        share: Share | None = None,
    ) -> None:
        """`share` changes the list of the whole cluster; None: the node is alone."""
        self._engine = engine
        self._commits = commits
        self._log = log
        self._share = share

    def manifest(self) -> dict[str, Any]:
        """Return the committed manifest: {"uid", "scopes": [{"name", "uid", "collections"}]}."""
        return self._engine.keyspace.committed_manifest.json()

    async def create_scope(self, scope: str) -> int:
        """Create a scope; return the manifest's uid. Raises CollectionsRefusedError."""
        return await self._change("scope created", scope, lambda now: now.create_scope(scope))

    async def drop_scope(self, scope: str) -> int:
        """Drop a scope and its collections."""
        return await self._change("scope dropped", scope, lambda now: now.drop_scope(scope))

    async def create_collection(self, scope: str, collection: str, max_ttl_s: int) -> int:
        """Create a collection; `max_ttl_s` 0: no limit for its documents."""
        return await self._change(
            "collection created",
            f"{scope}.{collection}",
            lambda now: now.create_collection(scope, collection, max_ttl_s),
        )

    async def change_max_ttl(self, scope: str, collection: str, max_ttl_s: int) -> int:
        """Change how long documents that are written from now on live at most; 0: no limit."""
        return await self._change(
            "collection changed",
            f"{scope}.{collection}",
            lambda now: now.change_max_ttl(scope, collection, max_ttl_s),
        )

    async def drop_collection(self, scope: str, collection: str) -> int:
        """Drop a collection."""
        return await self._change(
            "collection dropped",
            f"{scope}.{collection}",
            lambda now: now.drop_collection(scope, collection),
        )

    async def _change(self, event: str, path: str, change: Callable[[Manifest], Manifest]) -> int:
        engine = self._engine
        if engine.write_refusal:
            raise CollectionsRefusedError(HTTPStatus.SERVICE_UNAVAILABLE, engine.write_refusal)
        if why := engine.loads.why_busy():
            raise CollectionsRefusedError(HTTPStatus.SERVICE_UNAVAILABLE, why)
        try:
            if self._share is not None:
                after = await self._share(change)
            else:
                after = change(engine.keyspace.manifest)
                engine.keyspace.set_manifest(after)
        except ManifestError as error:
            is_unknown = isinstance(error, _NOT_FOUND)
            status = HTTPStatus.NOT_FOUND if is_unknown else HTTPStatus.BAD_REQUEST
            raise CollectionsRefusedError(status, str(error)) from error
        await self._commits.until_synced(engine.keyspace.manifest_group)
        self._log.info(event, path=path, manifest_uid=after.uid)
        return after.uid
