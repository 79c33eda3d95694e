"""Which members that have left an in-sync set still count, because not all of its members hold the
record durably that says so (`failover.rules.isr.is_held`). Pure.

The metadata store may go back to an older copy, in which they are in sync. Then each member of the
newer set knows better.

Who calls it: `failover.replication.leading`.

Invariant: to replicas this node says that it serves by the store's records only while all that it
masters is served, and no record of the store is older than one that was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from failover.coordinator.seen_records import SeenRecords
from failover.replication.feed import ReplicaFeed
from failover.replication.mastership import Mastership
from failover.replication.messages import NOT_SEEN, StoreSeen


class PartingMembers:
    """See the module. `link_of` tells the name of a member's connection to the store."""

    def __init__(
        self,
        member: str,
        masterships: Mapping[int, Mastership],
        feeds: Mapping[str, ReplicaFeed],
        kept: SeenRecords,
        link_of: Callable[[str], int | None],
    ) -> None:
        self._member = member
        self._masterships = masterships
        self._feeds = feeds
        self._kept = kept
        self._link_of = link_of
        self._parting: set[int] = set()
        self.serves_by = NOT_SEEN
        """By which records of the store this node serves all that it masters."""

    def note(self, vb_id: int) -> None:
        """A partition's record has changed."""
        if self._masterships[vb_id].has_parting:
            self._parting.add(vb_id)
            self._release((vb_id,))

    def release(self) -> list[int]:
        """Return the partitions where nobody counts any more who has left: this node, or a replica,
        has more of the store's records on disk.
        """
        return self._release(tuple(self._parting)) if self._parting else []

    def _release(self, vb_ids: Iterable[int]) -> list[int]:
        seen = {
            member: feed.seen.revision
            for member, feed in self._feeds.items()
            if feed.seen.link == self._link_of(member)
        }
        seen[self._member] = self._kept.kept_revision
        masterships = self._masterships
        held = [
            vb_id
            for vb_id in vb_ids
            if vb_id not in masterships or masterships[vb_id].members_saw(seen)
        ]
        self._parting.difference_update(held)
        return [vb_id for vb_id in held if vb_id in masterships]

    def note_serving(self, seen: StoreSeen, *, serves_all: bool) -> None:
        """Note by which records of the store this node serves, if it serves by all of them."""
        if seen.link != self.serves_by.link:
            self.serves_by = NOT_SEEN
        if serves_all and not self._parting:
            self.serves_by = seen
