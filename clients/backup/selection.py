"""Selects documents of an archive by key prefix and collection, and maps collections. Pure.

Names are "scope.collection". Keys in the archive contain collection ids; the name of an id comes
from the newest run that has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from clients.backup.archives.archive_errors import BackupError
from clients.backup.archives.archive_manifest import RunRecord
from vbucket.model.manifest import decode_leb128, encode_leb128


class Selection(NamedTuple):
    """The selected documents. Empty fields select everything."""

    prefix: bytes = b""
    """Only keys with this prefix (after the collection id)."""
    collections: tuple[str, ...] = ()
    """Only these collections."""
    mapping: Mapping[str, str] = {}
    """Collection in the archive -> target collection. Others keep their name."""


class Routes:
    """Where the documents of each collection id of an archive go."""

    def __init__(self, selection: Selection, runs: Sequence[RunRecord]) -> None:
        """Raises BackupError for a name that is in no run."""
        self.paths: dict[int, str] = {}
        """Id -> scope.collection, over all runs."""
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
        """Return the name of a collection; None if it is not selected."""
        path = self.paths.get(collection_id)
        wanted = self._selection.collections
        return path if path is not None and (not wanted or path in wanted) else None

    def target(self, collection_id: int) -> str | None:
        """Return the target collection of a collection; None if it is not selected."""
        path = self.source(collection_id)
        return None if path is None else self._selection.mapping.get(path, path)

    def key_prefixes(self, ids: Mapping[str, int]) -> dict[bytes, bytes]:
        """Return the key prefixes of selected collections: in the archive -> in the target.

        `ids`: the target's collections, name -> id. Collections that it lacks are left out.
        """
        found = {}
        for collection_id in self.paths:
            path = self.target(collection_id)
            if path is not None and path in ids:
                found[encode_leb128(collection_id)] = encode_leb128(ids[path])
        return found


def parse_mapping(items: Iterable[str]) -> dict[str, str]:
    """Parse "FROM=TO" items. Raises BackupError."""
    found = {}
    for item in items:
        source, equals, target = item.partition("=")
        if not equals or not source or target.count(".") != 1:
            raise BackupError(
                f"{item!r} is not a mapping", hint="Use SCOPE.COLLECTION=SCOPE.COLLECTION."
            )
        found[source] = target
    return found


def split_key(key: bytes) -> tuple[int, bytes]:
    """Return collection id and logical key of a stored key."""
    decoded = decode_leb128(key)
    if decoded is None:
        raise BackupError(f"a key without a collection id: {key[:40]!r}")
    return decoded[0], key[decoded[1] :]
