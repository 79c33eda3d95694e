"""The names of collections by id, kept up to date by the stream that shows them."""

from __future__ import annotations

import json

from clients.event import SystemEvent
from vbucket.model.manifest import SystemEventKind


class CollectionNames(dict[int, str]):
    """Collection id -> scope.collection. Names of dropped collections stay: their last changes may
    still come.
    """

    def __init__(self, manifest: bytes) -> None:
        """`manifest`: the answer to GET_COLLECTIONS_MANIFEST."""
        scopes = json.loads(manifest)["scopes"]
        super().__init__(
            (int(item["uid"], 16), f"{scope['name']}.{item['name']}")
            for scope in scopes
            for item in scope["collections"]
        )
        self._scopes = {int(scope["uid"], 16): str(scope["name"]) for scope in scopes}

    def learn(self, event: SystemEvent) -> None:
        """Take a name from a system event."""
        if event.kind == SystemEventKind.CREATE_SCOPE:
            self._scopes[event.scope_id] = event.name
        elif event.kind == SystemEventKind.CREATE_COLLECTION:
            scope = self._scopes.get(event.scope_id, f"0x{event.scope_id:x}")
            self[event.collection_id] = f"{scope}.{event.name}"
