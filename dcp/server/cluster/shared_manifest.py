"""Scopes and collections of a cluster: one list in the metadata store, in force on each node.

A change is written to the store first, compared with the list that it was made from. Each node
adopts the list when its view has it, and the masters tell their partitions' streams.

Invariant: a node never goes back to an older list.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from dcp.server.cluster.meta_access import MetaAccess
from dcp.server.cluster.shared_record import (
    MayBeReplacedError,
    NotReplacedError,
    replace_record,
)
from failover.coordinator.records import ManifestRecord, encode_record
from failover.coordinator.view import ClusterView
from vbucket.engine.engine import Engine
from vbucket.model.manifest import Manifest

TRIES: Final = 5
"""Attempts of a change, when other nodes change the list at the same time."""
SEEN_S: Final = 5.0
"""How long this node may take to see what was written."""


class ManifestNotChangedError(Exception):
    """The change may not have happened; the text says why."""


class SharedManifest:
    """See the module. `settle` is called before the engine's list changes."""

    def __init__(
        self, view: ClusterView, engine: Engine, access: MetaAccess, settle: Callable[[], None]
    ) -> None:
        self._view = view
        self._engine = engine
        self._access = access
        self._settle = settle
        self._adopted = asyncio.Event()

    def adopt(self) -> None:
        """Take the list of the view, if it is newer than the engine's."""
        stored = self._view.manifest
        keyspace = self._engine.keyspace
        if stored is not None and stored.content.uid > keyspace.manifest.uid:
            self._settle()
            keyspace.set_manifest(stored.content.manifest())
            self._adopted.set()
            self._adopted = asyncio.Event()

    async def change(self, change: Callable[[Manifest], Manifest]) -> Manifest:
        """Change the list of the cluster; return it when this node has it. Raises
        ManifestNotChangedError, and what `change` raises.
        """
        for _ in range(TRIES):
            stored = self._view.manifest
            if stored is None:
                raise ManifestNotChangedError("this node has not read the metadata store yet")
            after = change(stored.content.manifest())
            if trouble := self._access.trouble:
                raise ManifestNotChangedError(
                    f"the metadata store does not answer: {trouble}. Collections cannot change "
                    "before it does"
                )
            key, value = self._view.keys.manifest, encode_record(ManifestRecord.of(after))
            adopted = self._adopted
            try:
                is_replaced = await replace_record(self._access.meta, key, value, stored.item)
            except NotReplacedError as error:
                raise ManifestNotChangedError(str(error)) from error
            except MayBeReplacedError as error:
                raise ManifestNotChangedError(
                    f"the metadata store did not answer ({error}). List the collections to see "
                    "whether it happened"
                ) from error
            if is_replaced:
                await self._until_seen(after.uid)
                return after
            await self._wait(adopted)
        raise ManifestNotChangedError("others change the collections all the time; try again")

    async def _until_seen(self, uid: int) -> None:
        while self._engine.keyspace.manifest.uid < uid:
            await self._wait(self._adopted)

    async def _wait(self, adopted: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(SEEN_S):
                await adopted.wait()
        except TimeoutError:
            raise ManifestNotChangedError(
                f"this node has not seen the change within {SEEN_S:g} s"
            ) from None
