"""What a master's node can tell an operator: how far its replicas are, and what it cannot write.
Pure.

Who calls it: the shell, when somebody asks for the status. Nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from failover.replication.leading import Leading
from failover.replication.replica_feed import ReplicaFeed
from vbucket.engine.partition import VbState


class FollowerLag(NamedTuple):
    """How far one member's copies are behind the partitions whose master this node is."""

    member: str
    copies: int
    behind_partitions: int
    behind_changes: int
    """Changes that are on disk here and not known to be on disk there."""
    heard_ns: int | None
    """How long ago it was asked what it confirmed last; None: it has no link here."""


class Unwritable(NamedTuple):
    """A partition whose master this node is, and that takes no writes now."""

    vb_id: int
    why: str
    missing: tuple[str, ...] = ()
    """Members in sync that do not confirm this master."""


def follower_lags(leading: Leading, member: str, now_ns: int) -> list[FollowerLag]:
    """Return the lag of each member that has a copy of a partition of this master."""
    found: dict[str, list[int]] = {}
    for mastership in leading.masterships.values():
        leading.note_acknowledged(mastership)
        for copy in mastership.record.copies:
            if copy != member:
                behind = mastership.part.synced_seqno - mastership.acknowledged_seqno(copy)
                found.setdefault(copy, []).append(max(0, behind))
    return [
        FollowerLag(
            copy, len(behind), sum(map(bool, behind)), sum(behind),
            _heard_ns(leading.feeds.get(copy), now_ns),
        )
        for copy, behind in sorted(found.items())
    ]  # fmt: skip


def _heard_ns(feed: ReplicaFeed | None, now_ns: int) -> int | None:
    return None if feed is None or not feed.asked_ns else max(0, now_ns - feed.asked_ns)


def unwritable(leading: Leading, now_ns: int) -> Iterator[Unwritable]:
    """Yield the partitions of this master that take no writes now, and why."""
    for vb_id, mastership in leading.masterships.items():
        part = mastership.part
        if part.state == VbState.ACTIVE:
            if part.holds:
                yield Unwritable(vb_id, next(iter(part.holds.values())))
        else:
            yield Unwritable(vb_id, *leading.fences.of(mastership, now_ns))
