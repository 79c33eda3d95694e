"""The version of the partition map, (life, rev), and what to do if the store was set back. Pure.

Clients follow the map with the highest pair (they call it revEpoch and rev), and so they ignore all
maps of a metadata store whose revisions begin again lower: one that was restored from a copy or
made anew. So the cluster's record has a *life*, which is part of the version. It is the wall clock
at which the cluster was made, in seconds. If a node that starts finds a version below the one that
it has told, the life is raised. One write does for all nodes: it compares the record, and a node
that finds a higher life than the one that it has told raises nothing.

Invariants
- within a life, rev never falls (`ClusterView.map_revision`, and the key `removed`);
- a version is told only if it is above all that this node has told, over its restarts as well.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from failover.coordinator.records import encode_record
from failover.coordinator.seen_records import older_records
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import Put, Txn, if_unchanged

FIRST_LIFE: Final = 1
"""The life of clusters that have none in their record, and before anything is known."""
FIRST_REV: Final = 1
"""Of the map before anything is known: any other is newer."""


class MapVersion(NamedTuple):
    """See the module."""

    life: int
    rev: int


NEVER_SENT: Final = MapVersion(0, 0)


def life_from(unix_s: float, *ended: int) -> int:
    """Return the life that begins now, above those that have ended."""
    return max(int(unix_s), *(life + 1 for life in (FIRST_LIFE, *ended)))


class MapLife:
    """See the module. `told` is what an earlier process of this folder has told last.

    While the store has older records of partitions than nodes have seen, nobody raises the life:
    the maps of a new life would name masters of long ago. `failover.coordinator.meta_restore`
    raises it.
    """

    def __init__(self, view: ClusterView, told: MapVersion = NEVER_SENT) -> None:
        self._view = view
        self._sent = told
        self._ended = 0
        """The life in which the store was set back; 0: it was not."""

    def version(self) -> MapVersion:
        """Return the version of the map as of the view."""
        view = self._view
        if not view.is_loaded:
            return MapVersion(FIRST_LIFE, FIRST_REV)
        life = view.life or self._sent.life or FIRST_LIFE
        return MapVersion(life, max(view.map_revision, FIRST_REV))

    def note_told(self, version: MapVersion) -> None:
        """Clients were told a map of this version."""
        self._sent = max(self._sent, version)

    def look(self) -> str:
        """Look at the view; return what is to be logged if the store turns out to be set back. It
        must be called with the first view that has records: later ones may have come as far again.
        """
        view, told = self._view, self._sent
        if not view.is_loaded or view.cluster is None or self.version() >= told:
            return ""
        if self._ended == told.life:
            return ""
        self._ended = told.life
        return (
            f"the metadata store was set back: clients know map {told.rev} of life {told.life}, and"
            f" the store has come to map {view.map_revision} of life {view.life}. Clients get its"
            " maps once the cluster has a higher life"
        )

    def may_tell(self, version: MapVersion) -> bool:
        """Whether clients may be told a version: it is above all that this folder has told."""
        if not self._view.is_loaded:
            return True  # before it nothing is known, and clients that know more stay with that
        return version.life > self._ended and version >= self._sent

    def raising(self, unix_s: float) -> Txn | None:
        """Return what raises the life; None: it need not be raised."""
        stored = self._view.cluster
        if not self._ended or stored is None or self._view.life > self._ended:
            return None
        if older_records(self._view):
            return None
        life = life_from(unix_s, self._ended, self._view.life)
        raised = msgspec.structs.replace(stored.content, life=life)
        key = self._view.keys.cluster
        compare = if_unchanged(key, stored.item.mod_revision)
        return Txn((compare,), (Put(key, encode_record(raised)),))
