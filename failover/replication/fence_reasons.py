"""Why a partition whose master this node is is not served: for clients that are refused, and for
the status. Pure.

Who calls it: sessions, by `Leading`, for the text of a refusal, and `leading_report`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

from failover.coordinator.cluster_view import ClusterView
from failover.replication.mastership import Mastership
from failover.replication.replica_feed import ReplicaFeed
from failover.rules.isr import CONFIRMATION_NS


class Fence(NamedTuple):
    """Why a partition is fenced."""

    why: str
    missing: tuple[str, ...] = ()
    """Members in sync that do not confirm this master."""


class FenceReasons:
    """See the module. `awaits_collections` has the partitions whose master has not read of all
    their collections. `store_trouble` tells why the metadata store does not answer; "": it does.
    """

    def __init__(
        self,
        view: ClusterView,
        member: str,
        masterships: Mapping[int, Mastership],
        feeds: Mapping[str, ReplicaFeed],
        awaits_collections: Container[int],
        store_trouble: Callable[[], str],
    ) -> None:
        self._view = view
        self._member = member
        self._masterships = masterships
        self._feeds = feeds
        self._awaits_collections = awaits_collections
        self._store_trouble = store_trouble

    def of(self, mastership: Mastership, now_ns: int) -> Fence:
        """Return why a partition that is fenced serves nobody."""
        if not mastership.is_ready:
            return Fence("the beginning of the new master's epoch is not on disk yet")
        if mastership.has_handed:
            return Fence("another node becomes the partition's master")
        if missing := self._missing(mastership, now_ns):
            why = "a copy in sync does not confirm the master, so it may answer nothing"
            return Fence(why, missing)
        if mastership.part.vb_id in self._awaits_collections:
            return Fence("the master has not read of all collections in the metadata store yet")
        return Fence("the new master waits until copies in sync have caught up")

    def text(self, vb_id: int, now_ns: int) -> str:
        """Return why a partition is fenced in words for clients; "" if this is not its master."""
        mastership = self._masterships.get(vb_id)
        if mastership is None:
            return ""
        why, missing = self.of(mastership, now_ns)
        if not missing:
            return why
        members = self._view.members
        names = [members[each].content.name if each in members else each for each in missing]
        text = f"no confirmation from {', '.join(names)} for a while that this node is its master"
        if self._store_trouble():
            text += "; no copy can leave the in-sync set while the metadata store is away"
        return text

    def _missing(self, mastership: Mastership, now_ns: int) -> tuple[str, ...]:
        """Return the members in sync that have not confirmed this master in time."""
        vb_id = mastership.part.vb_id
        late = []
        for other in sorted(mastership.isr - {self._member}):
            feed = self._feeds.get(other)
            confirmed_ns = None if feed is None else feed.confirmed_ns(vb_id)
            if confirmed_ns is None or now_ns - confirmed_ns >= CONFIRMATION_NS:
                late.append(other)
        return tuple(late)


def no_trouble() -> str:
    """Say that the metadata store answers, where nobody knows better."""
    return ""
