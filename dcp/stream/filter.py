"""Which changes a stream shows: its filter by collection, or what its connection can understand.

    connection without collections         the default collection, no system events
    collections, no filter                 everything
    collections, "collections": [...]      these, and their creations and drops
    collections, "scope": "..."            what is in the scope, now and later, and its events
    x_key_prefix, "key_prefixes": [...]    of those only keys that begin so; system events pass

Rules (kv_engine): items of dropped collections are left out. Creations and drops come in seqno
order among the changes. A stream ends with FILTER_EMPTY when its scope or the last collection of
its list is dropped.
"""

from __future__ import annotations

from collections.abc import Collection as Ids
from collections.abc import Mapping
from typing import Final

from dcp.wire.frame import HEADER_BYTES
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError, Status, UnknownNameError
from vbucket.model.manifest import (
    DEFAULT_COLLECTION,
    DEFAULT_SCOPE,
    FIRST_FREE_ID,
    SYSTEM_COLLECTION,
    SYSTEM_KEY,
    Manifest,
    SystemEventKind,
    collection_of,
    decode_leb128,
)
from vbucket.store.store import Accepts

_SYSTEM_EVENT: Final = int(Opcode.DCP_SYSTEM_EVENT)
_HEXADECIMAL: Final = frozenset("0123456789abcdefABCDEF")
PASSES_DEFAULT: Final = 1
"""The documents of the default collection, as long as there is one."""
PASSES_ALL: Final = 2
"""Everything, but for what dropped collections had. Above these two: the documents and events of
the one collection that has this id."""
_SCOPE_EVENTS: Final = frozenset({SystemEventKind.CREATE_SCOPE, SystemEventKind.DROP_SCOPE})


class StreamFilter:
    """See the module. `collections` None: all; `scope_id` None: not by scope; `key_prefixes` ():
    all keys, else those whose logical key begins with one of them.
    """

    __slots__ = (
        "_collections", "_is_over", "_prefixes", "_scope_id", "has_events", "is_limited",
        "may_advance", "passes",
    )  # fmt: skip

    def __init__(
        self,
        *,
        collections: Ids[int] | None = None,
        scope_id: int | None = None,
        has_events: bool = True,
        key_prefixes: tuple[bytes, ...] = (),
    ) -> None:
        self.has_events = has_events
        """Whether the stream shows system events."""
        self.may_advance = has_events or bool(key_prefixes)
        """Whether a snapshot may end on SEQNO_ADVANCED, because the client knows the message."""
        self._prefixes = key_prefixes
        self._collections = None if collections is None else set(collections)
        self._scope_id = scope_id
        self._is_over = False
        self.is_limited = collections is not None or scope_id is not None or bool(key_prefixes)
        """Whether the client asked for less than everything."""
        has_default = collections is None or DEFAULT_COLLECTION in collections
        is_in_scope = scope_id is None or scope_id == DEFAULT_SCOPE
        self.passes = PASSES_DEFAULT if has_default and is_in_scope and not key_prefixes else 0
        """What passes as a whole: PASSES_DEFAULT, PASSES_ALL, a collection's id, or 0, nothing."""
        if has_events and not self.is_limited:
            self.passes = PASSES_ALL
        if self.is_one_collection and has_events and not (has_default or key_prefixes):
            only = next(iter(self._collections or ()))
            self.passes = only if only >= FIRST_FREE_ID else 0  # lower ones are the numbers above

    @property
    def is_one_collection(self) -> bool:
        """Whether the client asked for exactly one collection."""
        return self._collections is not None and len(self._collections) == 1

    @property
    def is_empty(self) -> bool:
        """Whether the filter can never let anything through again."""
        return self._is_over or (self._collections is not None and not self._collections)

    def collection_ids(self, manifest: Manifest) -> list[int]:
        """Return the ids of the collections that the filter lets through now."""
        ids = manifest.collections
        if self._collections is not None:
            return [key for key in self._collections if key in ids]
        if self._scope_id is not None:
            return [item.collection_id for item in manifest.in_scope(self._scope_id)]
        return list(ids)

    def accepts(
        self, manifest: Manifest, start_seqno: int, other_high_seqno: int
    ) -> Accepts | None:
        """Return a test of stored keys for a snapshot from `start_seqno` on; None: all keys pass.

        `manifest` is the committed one. Above `other_high_seqno` the partition has changes of the
        default collection only.
        """
        if (
            not self.is_limited
            and DEFAULT_COLLECTION in manifest.collections
            and (other_high_seqno < start_seqno or (self.has_events and not manifest.has_dropped))
        ):
            return None
        allowed = frozenset(self.collection_ids(manifest))
        has_default = DEFAULT_COLLECTION in allowed
        if self._prefixes:
            return self._accepts_prefixes(allowed)
        if has_default and other_high_seqno < start_seqno:
            return None

        def accept(key: bytes) -> bool:
            first = key[0]
            if first == DEFAULT_COLLECTION:
                return has_default
            if first == SYSTEM_COLLECTION:
                return self._shows_event(key)
            return collection_of(key) in allowed

        return accept

    def _accepts_prefixes(self, allowed: frozenset[int]) -> Accepts:
        """Return the test of stored keys for a client that asked for key prefixes."""
        prefixes = self._prefixes
        # The default collection's id is one zero byte: its keys need no decoding.
        has_default = DEFAULT_COLLECTION in allowed

        def accept(key: bytes) -> bool:
            first = key[0]
            if first == DEFAULT_COLLECTION:
                return has_default and key.startswith(prefixes, 1)
            if first == SYSTEM_COLLECTION:
                return self._shows_event(key)
            decoded = decode_leb128(key)
            assert decoded is not None, "stored keys carry their collection"
            return decoded[0] in allowed and key.startswith(prefixes, decoded[1])

        return accept

    def _shows_event(self, key: bytes) -> bool:
        if not self.has_events:
            return False
        _, kind, scope_id, collection_id = SYSTEM_KEY.unpack_from(key)
        if self._scope_id is not None:
            return bool(scope_id == self._scope_id)
        if self._collections is not None:
            return kind not in _SCOPE_EVENTS and collection_id in self._collections
        return True

    def sent(self, frame: bytes) -> bool:
        """Note that a stored frame was sent; return whether the filter is empty after it."""
        if frame[1] != _SYSTEM_EVENT:
            return False
        _, kind, scope_id, collection_id = SYSTEM_KEY.unpack_from(frame, HEADER_BYTES + frame[4])
        if kind == SystemEventKind.DROP_COLLECTION and self._collections is not None:
            self._collections.discard(collection_id)
        elif kind == SystemEventKind.DROP_SCOPE and scope_id == self._scope_id:
            self._is_over = True
        return self.is_empty


def filter_of(
    document: Mapping[str, object], manifest: Manifest, key_prefixes: tuple[bytes, ...] = ()
) -> StreamFilter:
    """Return the filter that a stream request's JSON value asks for (connections with collections).

    Raises RefusedError. What is asked for must exist (kv_engine). The `uid`, which manifest
    the client has seen, is not used, as in today's kv_engine: the seqno tells which events are
    still to come, and a client that has seen more than this server is told to roll back.
    """
    if "collections" in document and "scope" in document:
        raise RefusedError(Status.EINVAL, "a filter names collections or a scope, not both")
    if not is_hexadecimal(document.get("uid", "0")):
        raise RefusedError(Status.EINVAL, "uid is hexadecimal text")
    if "scope" in document:
        scope = document["scope"]
        if not isinstance(scope, str) or not is_hexadecimal(scope):
            raise RefusedError(Status.EINVAL, "scope is hexadecimal text")
        if int(scope, 16) not in manifest.scopes:
            raise UnknownNameError(
                Status.UNKNOWN_SCOPE, f"there is no scope {scope} in manifest {manifest.uid:x}"
            )
        return StreamFilter(scope_id=int(scope, 16), key_prefixes=key_prefixes)
    if "collections" not in document:
        return StreamFilter(key_prefixes=key_prefixes)
    collections = document["collections"]
    if not isinstance(collections, list) or not collections:
        raise RefusedError(Status.EINVAL, "collections must be a list of hexadecimal ids")
    if not all(map(is_hexadecimal, collections)):
        raise RefusedError(Status.EINVAL, "collections must be a list of hexadecimal ids")
    ids = [int(item, 16) for item in collections]
    for collection_id in ids:
        if collection_id not in manifest.collections:
            raise UnknownNameError(
                Status.UNKNOWN_COLLECTION,
                f"there is no collection {collection_id:x} in manifest {manifest.uid:x}",
            )
    return StreamFilter(collections=ids, key_prefixes=key_prefixes)


def is_hexadecimal(text: object) -> bool:
    """Whether it is an id as the manifest writes it."""
    return isinstance(text, str) and 0 < len(text) <= 16 and _HEXADECIMAL.issuperset(text)


def unfiltered(*, has_collections: bool, key_prefixes: tuple[bytes, ...] = ()) -> StreamFilter:
    """Return the filter of a stream whose request names no collections."""
    if has_collections:
        return StreamFilter(key_prefixes=key_prefixes)
    return StreamFilter(
        collections=(DEFAULT_COLLECTION,), has_events=False, key_prefixes=key_prefixes
    )


EVERYTHING: Final = unfiltered(has_collections=True)
"""Of streams without a filter: all of them share it, as nothing that is sent changes it."""
DEFAULT_ONLY: Final = unfiltered(has_collections=False)
"""The same for clients that know no collections."""
