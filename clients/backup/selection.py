"""Selects documents of an archive by key prefix and collection, and maps collections. Pure.

Names are "scope.collection". Collections of the archive are known by the ids that keys carry; the
names are those of the newest run in which an id was there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from clients.backup.archive_errors import BackupError
from clients.backup.archive_manifest import RunRecord
from vbucket.model.manifest import decode_leb128, encode_leb128


class Selection(NamedTuple):
    """What is wanted. Empty: everything."""

    prefix: bytes = b""
    """Only keys that begin so (without their collection)."""
    collections: tuple[str, ...] = ()
    """Only these."""
    mapping: Mapping[str, str] = {}
    """Collection of the archive -> collection that it goes into; others keep their name."""


class Routes:
    """For each collection id of an archive, where its documents go."""

    def __init__(self, selection: Selection, runs: Sequence[RunRecord]) -> None:
        """Raises BackupError for a name that no run knows."""
        self.paths: dict[int, str] = {}
        """Id -> scope.collection, of all runs."""
        self.max_ttl_s: dict[str, int] = {}
        for record in runs:
            for collection_id, (path, max_ttl_s) in record.collections.items():
                self.paths[collection_id] = path
                self.max_ttl_s[path] = max_ttl_s
        known = set(self.paths.values())
        for path in (*selection.collections, *selection.mapping):
            if path not in known:
                raise BackupError(
                    f"the archive has no collection {path!r}",
                    hint=f"Its collections are: {', '.join(sorted(known))}",
                )
        self._selection = selection

    def source(self, collection_id: int) -> str | None:
        """Return the name of a collection if its documents are wanted."""
        path = self.paths.get(collection_id)
        wanted = self._selection.collections
        return path if path is not None and (not wanted or path in wanted) else None

    def target(self, collection_id: int) -> str | None:
        """Return the name of the collection that documents go into, None: nowhere."""
        path = self.source(collection_id)
        return None if path is None else self._selection.mapping.get(path, path)

    def key_prefixes(self, ids: Mapping[str, int]) -> dict[bytes, bytes]:
        """Return, for each wanted collection, its id in keys of the archive -> in the target.

        `ids`: the target's collections, name -> id; what it does not have is left out.
        """
        found = {}
        for collection_id in self.paths:
            path = self.target(collection_id)
            if path is not None and path in ids:
                found[encode_leb128(collection_id)] = encode_leb128(ids[path])
        return found


def parse_mapping(items: Iterable[str]) -> dict[str, str]:
    """Return the mapping of "FROM=TO" items. Raises BackupError."""
    found = {}
    for item in items:
        source, equals, target = item.partition("=")
        if not equals or not source or target.count(".") != 1:
            raise BackupError(
                f"{item!r} is no mapping", hint="Write SCOPE.COLLECTION=SCOPE.COLLECTION."
            )
        found[source] = target
    return found


def split_key(key: bytes) -> tuple[int, bytes]:
    """Return collection id and logical key of a stored key."""
    decoded = decode_leb128(key)
    if decoded is None:
        raise BackupError(f"a key without a collection id: {key[:40]!r}")
    return decoded[0], key[decoded[1] :]
