"""The collections manifest: which scopes and collections exist, and how keys refer to them. Pure.

    manifest   uid (rises by 1 with every change), scopes, collections, the next free ids
    key        collection id as unsigned LEB128, then the logical key

A manifest is immutable: `create_*` and `drop_*` return a new one. Streams get the differences
between two manifests as system events (`events_between`).

Rules of kv_engine: ids 0 to 7 are reserved. 0 is the default scope and the default collection. 1 is
the collection of system events, which clients cannot use. An LEB128 id has at most 5 bytes and no
padding. Our own rules: an id is not reused, so a key with the id of a dropped collection never
belongs to another one. The default scope and collection cannot be dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import IntEnum
from struct import Struct
from typing import Any, Final, NamedTuple

DEFAULT_SCOPE: Final = 0
DEFAULT_COLLECTION: Final = 0
DEFAULT_NAME: Final = "_default"
SYSTEM_COLLECTION: Final = 1
"""Collection id in the keys of system events."""
FIRST_FREE_ID: Final = 8
ID_MAX: Final = 0xFFFF_FFFF
"""Highest id of scopes and collections: the largest that keys and system events can hold."""
UID_MAX: Final = 2**64 - 1
"""Highest uid of a manifest: the largest that a system event can hold."""
SET_UID_MAX: Final = 2**63 - 1
"""Highest uid of a manifest that is set as a whole: half of the range is left for later changes."""
LEB128_BYTES_MAX: Final = 5
MAX_TTL_S_MAX: Final = 2**31 - 1
COLLECTIONS_MAX: Final = 1200
"""Couchbase's limit for the collections of a bucket, and for its scopes."""

_NAME: Final = re.compile(r"[A-Za-z0-9-][A-Za-z0-9_%-]{0,250}")


class SystemEventKind(IntEnum):
    """The kind of a system event, numbered as on the wire."""

    CREATE_COLLECTION = 0
    DROP_COLLECTION = 1
    CREATE_SCOPE = 3
    DROP_SCOPE = 4


class ManifestError(Exception):
    """A change of the manifest was refused; the text says why."""


class UnknownScopeError(ManifestError):
    """There is no such scope."""


class UnknownCollectionIdError(ManifestError):
    """There is no such collection."""


class InvalidManifestError(ManifestError):
    """A document is not a valid manifest."""


class NameTakenError(ManifestError):
    """A scope or collection of that name exists already.

    The official SDKs tell these errors apart by their text.
    """


class Collection(NamedTuple):
    """A collection. `max_ttl_s`: the longest life of a document, 0: no limit."""

    collection_id: int
    name: str
    scope_id: int
    max_ttl_s: int = 0


_COLLECTION_EVENT: Final = Struct(">QII")
_COLLECTION_TTL_EVENT: Final = Struct(">QIII")
_SCOPE_EVENT: Final = Struct(">QI")


class ManifestEvent(NamedTuple):
    """A change of the manifest as streams report it. `collection_id` is 0 in events of scopes."""

    kind: SystemEventKind
    manifest_uid: int
    scope_id: int
    collection_id: int = 0
    name: str = ""
    """Name of the created scope or collection, "" for a drop (as in kv_engine)."""
    max_ttl_s: int = 0

    @property
    def version(self) -> int:
        """Version of the value's layout."""
        return 1 if self.max_ttl_s else 0

    def value(self) -> bytes:
        """Return the event's data as DCP_SYSTEM_EVENT carries it."""
        if self.kind in {SystemEventKind.CREATE_SCOPE, SystemEventKind.DROP_SCOPE}:
            return _SCOPE_EVENT.pack(self.manifest_uid, self.scope_id)
        ids = (self.manifest_uid, self.scope_id, self.collection_id)
        if self.max_ttl_s:
            return _COLLECTION_TTL_EVENT.pack(*ids, self.max_ttl_s)
        return _COLLECTION_EVENT.pack(*ids)


def parse_system_event(kind: int, version: int, key: bytes, value: bytes) -> ManifestEvent:
    """Decode a DCP_SYSTEM_EVENT. Raises ValueError if it is unknown or malformed."""
    name = key.decode("utf-8", "replace")
    what = SystemEventKind(kind)
    if what in {SystemEventKind.CREATE_SCOPE, SystemEventKind.DROP_SCOPE}:
        layout = _SCOPE_EVENT
    else:
        layout = _COLLECTION_TTL_EVENT if version == 1 else _COLLECTION_EVENT
    if version > 1 or len(value) != layout.size:
        raise ValueError(f"system event {kind} of version {version} with {len(value)} bytes")
    manifest_uid, scope_id, *rest = layout.unpack(value)
    return ManifestEvent(
        what, manifest_uid, scope_id, rest[0] if rest else 0, name, rest[1] if rest[1:] else 0
    )


class Manifest(NamedTuple):
    """See the module. `scopes`: id -> name; `collections`: id -> Collection."""

    uid: int
    scopes: Mapping[int, str]
    collections: Mapping[int, Collection]
    next_scope_id: int = FIRST_FREE_ID
    next_collection_id: int = FIRST_FREE_ID

    # -- look-ups ------------------------------------------------------------------------------

    def scope_id(self, name: str) -> int | None:
        """Return the id of a scope ("" is the default one), None if it does not exist."""
        name = name or DEFAULT_NAME
        return next((scope_id for scope_id, known in self.scopes.items() if known == name), None)

    def collection_id(self, path: str) -> int | None:
        """Return the id of "scope.collection", None if it does not exist. Empty names mean the
        default ones.
        """
        scope, _, name = path.rpartition(".")
        scope_id = self.scope_id(scope)
        name = name or DEFAULT_NAME
        return next(
            (
                item.collection_id
                for item in self.collections.values()
                if item.scope_id == scope_id and item.name == name
            ),
            None,
        )

    def path_of(self, collection_id: int) -> str:
        """Return "scope.collection" of an existing collection."""
        item = self.collections[collection_id]
        return f"{self.scopes[item.scope_id]}.{item.name}"

    def in_scope(self, scope_id: int) -> list[Collection]:
        """Return the collections of a scope."""
        return [item for item in self.collections.values() if item.scope_id == scope_id]

    @property
    def has_dropped(self) -> bool:
        """Whether a collection was ever dropped, so keys without a collection may exist."""
        others = len(self.collections) - (DEFAULT_COLLECTION in self.collections)
        return self.next_collection_id - FIRST_FREE_ID != others

    def is_gone(self, collection_id: int) -> bool:
        """Whether there is no such collection, and there will be none.

        Ids are given in order and not reused. So a collection with a higher id may exist: a replica
        can have its documents before its node has read of it.
        """
        return collection_id not in self.collections and collection_id < self.next_collection_id

    # -- changes -------------------------------------------------------------------------------

    def create_scope(self, name: str) -> Manifest:
        """Return the manifest with a new, empty scope. Raises ManifestError."""
        _check_name("scope", name)
        if self.scope_id(name) is not None:
            raise NameTakenError(f'Scope with name "{name}" already exists')
        if len(self.scopes) >= COLLECTIONS_MAX:
            raise ManifestError(f"the limit, {len(self.scopes)} scopes, is reached; drop one first")
        _check_free("scope", self.next_scope_id)
        return self._replace(
            uid=self._next_uid(),
            scopes={**self.scopes, self.next_scope_id: name},
            next_scope_id=self.next_scope_id + 1,
        )

    def create_collection(self, scope: str, name: str, max_ttl_s: int = 0) -> Manifest:
        """Return the manifest with a new collection. Raises ManifestError."""
        _check_name("collection", name)
        _check_max_ttl(max_ttl_s)
        scope_id = self._known_scope(scope)
        if self.collection_id(f"{scope}.{name}") is not None:
            raise NameTakenError(f'Collection with name "{name}" already exists in scope "{scope}"')
        if len(self.collections) >= COLLECTIONS_MAX:
            raise ManifestError(
                f"the limit, {len(self.collections)} collections, is reached; drop one first"
            )
        _check_free("collection", self.next_collection_id)
        item = Collection(self.next_collection_id, name, scope_id, max_ttl_s)
        return self._replace(
            uid=self._next_uid(),
            collections={**self.collections, item.collection_id: item},
            next_collection_id=item.collection_id + 1,
        )

    def change_max_ttl(self, scope: str, name: str, max_ttl_s: int) -> Manifest:
        """Return the manifest with another maximum time to live of a collection: for documents that
        are written from then on. Raises ManifestError.
        """
        _check_max_ttl(max_ttl_s)
        self._known_scope(scope)
        collection_id = self.collection_id(f"{scope}.{name}") if name else None
        if collection_id is None:
            raise UnknownCollectionIdError(
                f'Collection with name "{name}" in scope "{scope}" is not found'
            )
        if collection_id == DEFAULT_COLLECTION:
            raise ManifestError("the default collection has no maxTTL, and cannot be changed")
        changed = self.collections[collection_id]._replace(max_ttl_s=max_ttl_s)
        return self._replace(
            uid=self._next_uid(), collections={**self.collections, collection_id: changed}
        )

    def drop_collection(self, scope: str, name: str) -> Manifest:
        """Return the manifest without a collection. Raises ManifestError."""
        self._known_scope(scope)
        collection_id = self.collection_id(f"{scope}.{name}") if name else None
        if collection_id is None:
            raise UnknownCollectionIdError(
                f'Collection with name "{name}" in scope "{scope}" is not found'
            )
        if collection_id == DEFAULT_COLLECTION:
            raise ManifestError("the default collection cannot be dropped")
        kept = {key: item for key, item in self.collections.items() if key != collection_id}
        return self._replace(uid=self._next_uid(), collections=kept)

    def drop_scope(self, name: str) -> Manifest:
        """Return the manifest without a scope and its collections. Raises ManifestError."""
        scope_id = self._known_scope(name)
        if scope_id == DEFAULT_SCOPE:
            raise ManifestError("the default scope cannot be dropped")
        return self._replace(
            uid=self._next_uid(),
            scopes={key: known for key, known in self.scopes.items() if key != scope_id},
            collections={
                key: item for key, item in self.collections.items() if item.scope_id != scope_id
            },
        )

    def _next_uid(self) -> int:
        if self.uid >= UID_MAX:
            raise ManifestError(
                f"the manifest has uid {self.uid:x}, the highest possible, so it cannot change any "
                "more. Move the data into a new folder with a backup"
            )
        return self.uid + 1

    def _known_scope(self, name: str) -> int:
        scope_id = self.scope_id(name) if name else None
        if scope_id is None:
            raise UnknownScopeError(f'Scope with name "{name}" is not found')
        return scope_id

    # -- forms ---------------------------------------------------------------------------------

    def json(self) -> dict[str, Any]:
        """Return the document of GET_COLLECTIONS_MANIFEST; ids are hexadecimal text."""
        return {
            "uid": f"{self.uid:x}",
            "scopes": [
                {
                    "name": name,
                    "uid": f"{scope_id:x}",
                    "collections": [_collection_json(item) for item in self.in_scope(scope_id)],
                }
                for scope_id, name in self.scopes.items()
            ],
        }

    def to_document(self) -> dict[str, object]:
        """Return the form that log and store hold."""
        return {
            "uid": self.uid,
            "scopes": dict(self.scopes),
            "collections": [list(item) for item in self.collections.values()],
            "next": [self.next_scope_id, self.next_collection_id],
        }

    @classmethod
    def from_document(cls, document: Any) -> Manifest:
        """Return the manifest of `to_document`."""
        items = [Collection(*item) for item in document["collections"]]
        return cls(
            document["uid"],
            dict(document["scopes"]),
            {item.collection_id: item for item in items},
            *document["next"],
        )


INITIAL_MANIFEST: Final = Manifest(
    0,
    {DEFAULT_SCOPE: DEFAULT_NAME},
    {DEFAULT_COLLECTION: Collection(DEFAULT_COLLECTION, DEFAULT_NAME, DEFAULT_SCOPE)},
)
"""The manifest of a new bucket."""


def manifest_from_json(before: Manifest, document: Mapping[str, Any]) -> Manifest:
    """Return the manifest of a JSON document as the successor of `before`.

    Raises InvalidManifestError for an invalid document, and ManifestError for a manifest that
    cannot follow: its uid is not higher, it reuses an id, renames something, or lacks the defaults.
    """
    try:
        uid = int(document["uid"], 16)
        scopes = {int(scope["uid"], 16): str(scope["name"]) for scope in document["scopes"]}
        items = [
            Collection(int(item["uid"], 16), str(item["name"]), int(scope["uid"], 16),
                       int(item.get("maxTTL", item.get("max_ttl", 0))))
            for scope in document["scopes"]
            for item in scope["collections"]
        ]  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidManifestError(f"not a collections manifest: {error!r}") from error
    collections = {item.collection_id: item for item in items}
    names = {(item.scope_id, item.name) for item in items}
    if len(names) != len(items) or len(collections) != len(items):
        raise InvalidManifestError("a manifest names a collection twice")
    if len(set(scopes.values())) != len(document["scopes"]):
        raise InvalidManifestError("a manifest names a scope twice")
    ttls = [item.max_ttl_s for item in items]
    limits = ((uid, SET_UID_MAX), *((key, ID_MAX) for key in (*scopes, *collections)))
    if not all(
        0 <= number <= top for number, top in (*limits, *((s, MAX_TTL_S_MAX) for s in ttls))
    ):
        raise InvalidManifestError("an id or a maximum time to live is out of range")
    for what, name in (
        *(("scope", name) for key, name in scopes.items() if key),
        *(("collection", item.name) for item in items if item.collection_id),
    ):
        try:
            _check_name(what, name)
        except ManifestError as error:
            raise InvalidManifestError(str(error)) from error
    after = Manifest(
        uid,
        scopes,
        collections,
        max((before.next_scope_id, *(key + 1 for key in scopes))),
        max((before.next_collection_id, *(key + 1 for key in collections))),
    )
    if after != before:
        _check_successor(before, after)
    return after


def _check_max_ttl(max_ttl_s: int) -> None:
    if not 0 <= max_ttl_s <= MAX_TTL_S_MAX:
        raise ManifestError(f"maxTTL must be 0 to {MAX_TTL_S_MAX} s, not {max_ttl_s}")


def _check_free(what: str, number: int) -> None:
    """Raise ManifestError if no id is left for a new scope or collection."""
    if number > ID_MAX:
        raise ManifestError(
            f"no {what} id is left, because a manifest with the highest one was set. Move the data "
            "into a new folder with a backup"
        )


def _check_successor(before: Manifest, after: Manifest) -> None:
    """Raise ManifestError if `after` cannot follow `before`."""
    if after.uid <= before.uid:
        raise ManifestError(f"uid {after.uid:x} is not above the current uid {before.uid:x}")
    if after.scopes.get(DEFAULT_SCOPE) != DEFAULT_NAME:
        raise ManifestError("the default scope cannot be dropped")
    if after.collections.get(DEFAULT_COLLECTION) != before.collections[DEFAULT_COLLECTION]:
        raise ManifestError("the default collection cannot be dropped or changed")
    for scope_id, name in after.scopes.items():
        if before.scopes.get(scope_id, name) != name:
            raise ManifestError(f"scope {scope_id:x} cannot be renamed")
        if scope_id not in before.scopes and scope_id < before.next_scope_id:
            raise ManifestError(f"scope id {scope_id:x} was used before, or is reserved")
    for key, item in after.collections.items():
        known = before.collections.get(key, item)
        if known._replace(max_ttl_s=item.max_ttl_s) != item:
            raise ManifestError(f"collection {key:x} cannot be changed, except for its maxTTL")
        if key not in before.collections and key < before.next_collection_id:
            raise ManifestError(f"collection id {key:x} was used before, or is reserved")


def events_between(before: Manifest, after: Manifest) -> list[ManifestEvent]:
    """Return the system events of a change: first drops, then creations.

    Only the last event has the new uid. So a consumer that has seen that uid has seen all events
    (as in kv_engine).
    """
    gone = [item for key, item in before.collections.items() if key not in after.collections]
    come = [item for key, item in after.collections.items() if key not in before.collections]
    kind = SystemEventKind
    events = [
        *(
            ManifestEvent(kind.DROP_COLLECTION, before.uid, item.scope_id, item.collection_id)
            for item in gone
        ),
        *(
            ManifestEvent(kind.DROP_SCOPE, before.uid, scope_id)
            for scope_id in before.scopes
            if scope_id not in after.scopes
        ),
        *(
            ManifestEvent(kind.CREATE_SCOPE, before.uid, scope_id, name=name)
            for scope_id, name in after.scopes.items()
            if scope_id not in before.scopes
        ),
        *(
            ManifestEvent(
                kind.CREATE_COLLECTION, before.uid, item.scope_id, item.collection_id, item.name,
                item.max_ttl_s,
            )
            for item in come
        ),
    ]  # fmt: skip
    if events:
        events[-1] = events[-1]._replace(manifest_uid=after.uid)
    return events


def _collection_json(item: Collection) -> dict[str, object]:
    document: dict[str, object] = {"name": item.name, "uid": f"{item.collection_id:x}"}
    if item.max_ttl_s:
        document["maxTTL"] = item.max_ttl_s
    return document


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ManifestError(
            f"{name[:60]!r} cannot be the name of a {what}: use 1 to 251 of A-Z a-z 0-9 _ - %, "
            "not _ or % first"
        )


# -- keys ------------------------------------------------------------------------------------------


SYSTEM_KEY: Final = Struct(">BBII")
"""Key under which a system event is stored: SYSTEM_COLLECTION, kind, scope id, collection id, then
the name of the created scope or collection. Each event has its own key, so a snapshot shows both
the creation and the drop of a collection. Keys of clients cannot begin with SYSTEM_COLLECTION."""


def system_key(event: ManifestEvent) -> bytes:
    """Return the key under which a partition stores an event."""
    head = SYSTEM_KEY.pack(SYSTEM_COLLECTION, event.kind, event.scope_id, event.collection_id)
    return head + event.name.encode()


def missing_events(keys: Iterable[bytes], manifest: Manifest) -> list[ManifestEvent]:
    """Return the events that a partition still lacks; `keys` are the system events that it has."""
    scopes: dict[int, str] = {DEFAULT_SCOPE: DEFAULT_NAME}
    collections = {DEFAULT_COLLECTION: INITIAL_MANIFEST.collections[DEFAULT_COLLECTION]}
    dropped_scopes, dropped_collections = set(), set()
    for key in sorted(keys):
        _, kind, scope_id, collection_id = SYSTEM_KEY.unpack_from(key)
        name = key[SYSTEM_KEY.size :].decode()
        if kind == SystemEventKind.CREATE_SCOPE:
            scopes[scope_id] = name
        elif kind == SystemEventKind.CREATE_COLLECTION:
            collections[collection_id] = Collection(collection_id, name, scope_id)
        elif kind == SystemEventKind.DROP_SCOPE:
            dropped_scopes.add(scope_id)
        else:
            dropped_collections.add(collection_id)
    told = Manifest(
        manifest.uid,
        {key: name for key, name in scopes.items() if key not in dropped_scopes},
        {key: item for key, item in collections.items() if key not in dropped_collections},
    )
    return events_between(told, manifest)


def is_ahead(keys: Iterable[bytes], manifest: Manifest) -> bool:
    """Whether a partition with these system events tells of a newer manifest than this one."""
    for key in keys:
        _, kind, scope_id, collection_id = SYSTEM_KEY.unpack_from(key)
        known: Mapping[int, object] = manifest.collections
        number, next_number = collection_id, manifest.next_collection_id
        if kind in {SystemEventKind.CREATE_SCOPE, SystemEventKind.DROP_SCOPE}:
            known, number, next_number = manifest.scopes, scope_id, manifest.next_scope_id
        is_drop = kind in {SystemEventKind.DROP_COLLECTION, SystemEventKind.DROP_SCOPE}
        if number >= next_number or (is_drop and number in known):
            return True
    return False


def encode_leb128(number: int) -> bytes:
    """Return a collection id (u32) as unsigned LEB128."""
    assert 0 <= number <= ID_MAX
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def decode_leb128(key: bytes) -> tuple[int, int] | None:
    """Return the collection id at the beginning of a key and its length. None if the id is
    truncated, padded, or above 32 bits.
    """
    number = shift = 0
    for length, byte in enumerate(key[:LEB128_BYTES_MAX], 1):
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            is_canonical = byte or length == 1
            return (number, length) if is_canonical and number <= ID_MAX else None
        shift += 7
    return None


def collection_of(key: bytes) -> int:
    """Return the collection id of a stored key."""
    if key[0] < 0x80:
        return key[0]
    decoded = decode_leb128(key)
    assert decoded is not None, f"a stored key without a collection id: {key[:8]!r}"
    return decoded[0]
