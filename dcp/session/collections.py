"""Commands about collections: the manifest, and the ids of names.

Rules (kv_engine): a name is "scope.collection", and an empty part means the default one. It is in
the key or in the value. The answer to an unknown name carries the manifest's uid, so that a client
can tell whether it or the server is behind. Every answer waits until the manifest that it tells of
is committed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from struct import Struct
from typing import Final

import msgspec

from dcp.session.state import COLLECTIONS_OF_CLUSTER, SessionState
from dcp.wire.frame import Frame
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError, Status, UnknownNameError
from vbucket.model.manifest import InvalidManifestError, ManifestError, manifest_from_json

Handler = Callable[[Frame], None]

COLLECTION_ID_EXTRAS: Final = Struct(">QI")
"""Manifest uid, id of the collection or scope."""
PATH_BYTES_MAX: Final = 2 * 251 + 1


class CollectionCommands:
    """Handlers of these commands for one session."""

    def __init__(self, state: SessionState) -> None:
        self._state = state

    def handlers(self) -> dict[int, Handler]:
        """Return opcode -> handler."""
        return {
            Opcode.SET_COLLECTIONS_MANIFEST: self.set_manifest,
            Opcode.GET_COLLECTIONS_MANIFEST: self.manifest,
            Opcode.GET_COLLECTION_ID: self.collection_id,
            Opcode.GET_SCOPE_ID: self.scope_id,
        }

    def manifest(self, request: Frame) -> None:
        """Answer the manifest."""
        state = self._state
        state.observes_manifest()
        document = json.dumps(state.engine.keyspace.manifest.json(), separators=(",", ":"))
        state.answer(request, value=document.encode(), is_json=True)

    def set_manifest(self, request: Frame) -> None:
        """Replace the manifest, as cluster managers do."""
        state = self._state
        engine = state.engine
        if state.shared.replication is not None:
            raise RefusedError(Status.NOT_SUPPORTED, COLLECTIONS_OF_CLUSTER)
        if engine.write_refusal:
            raise RefusedError(Status.ETMPFAIL, engine.write_refusal)
        if why := engine.loads.why_busy():
            raise RefusedError(Status.ETMPFAIL, why)
        try:
            document = msgspec.json.decode(request.value, type=dict)
            after = manifest_from_json(engine.keyspace.manifest, document)
        except InvalidManifestError as error:
            raise RefusedError(Status.EINVAL, str(error)) from error
        except ManifestError as error:
            raise RefusedError(Status.CANNOT_APPLY_COLLECTIONS_MANIFEST, str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RefusedError(
                Status.EINVAL, f"the manifest is not a JSON object: {error}"
            ) from error
        if after != engine.keyspace.manifest:
            engine.keyspace.set_manifest(after)
        state.observes_manifest()
        state.notes.add("manifest set", uid=after.uid)
        state.answer(request)

    def collection_id(self, request: Frame) -> None:
        """Answer the id of "scope.collection"."""
        path = self._path_of(request)
        if path is None or path.count(".") != 1:
            context = 'name a collection as "scope.collection", in the key or in the value'
            raise RefusedError(Status.EINVAL, context)
        manifest = self._state.engine.keyspace.manifest
        if manifest.scope_id(path.partition(".")[0]) is None:
            self._answer_id(request, None, Status.UNKNOWN_SCOPE)
        else:
            self._answer_id(request, manifest.collection_id(path), Status.UNKNOWN_COLLECTION)

    def scope_id(self, request: Frame) -> None:
        """Answer the id of a scope. What follows a dot in the name is ignored."""
        path = self._path_of(request)
        if path is None or path.count(".") > 1:
            context = "name a scope, in the key or in the value"
            raise RefusedError(Status.EINVAL, context)
        scope_id = self._state.engine.keyspace.manifest.scope_id(path.partition(".")[0])
        self._answer_id(request, scope_id, Status.UNKNOWN_SCOPE)

    def _path_of(self, request: Frame) -> str | None:
        path = request.key or request.value
        if len(path) > PATH_BYTES_MAX or (request.key and request.value):
            return None
        return path.decode("utf-8", "replace")

    def _answer_id(self, request: Frame, found: int | None, status: Status) -> None:
        if found is None:
            raise UnknownNameError(status)
        state = self._state
        state.observes_manifest()
        extras = COLLECTION_ID_EXTRAS.pack(state.engine.keyspace.manifest.uid, found)
        state.answer(request, extras=extras)
