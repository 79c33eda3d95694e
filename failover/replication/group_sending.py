"""When a master's commit groups go to its replicas: before they are synced here, or after. Sans-IO.

    begun(group)     it is about to be written: replicas where all of it is in step get it now
    synced(group)    it is on disk: the others get it

So all disks of a group sync it at the same time, and a small write takes one sync and not two, one
after the other. A replica may then have more than its master's disk
(`failover.rules.isr.sendable_seqno` says why that is safe). Nothing is committed before it is
synced here, too. Where the death of this node would leave too few members in sync, a group is sent
when it is synced (`failover.rules.isr.may_send_unsynced`).

Who calls it: `failover.replication.leading`.

Invariants
- groups are begun and synced in turn: none is begun while another one is being written;
- a replica gets a group once, wholly or section by section;
- what goes section by section, and what is read from cursors, goes when it is synced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from failover.replication.feed import ReplicaFeed
from failover.replication.group import WholeGroup, WholeGroups, changes_for_replicas
from failover.replication.mastership import Mastership
from failover.rules.isr import may_send_unsynced
from vbucket.log.commit_group import CommitGroup


class _Begun(NamedTuple):
    """A group that some replicas got before it is synced here."""

    whole: WholeGroup
    feeds: tuple[ReplicaFeed, ...]


class GroupSending:
    """See the module. The tables are those of `Leading`."""

    def __init__(
        self,
        masterships: Mapping[int, Mastership],
        feeds: Mapping[str, ReplicaFeed],
        wholes: WholeGroups,
    ) -> None:
        self._masterships = masterships
        self._feeds = feeds
        self._wholes = wholes
        self._begun: _Begun | None = None

    def begun(self, now_ns: int, group: CommitGroup) -> bool:
        """A group is about to be written; return whether any replica gets it already."""
        assert self._begun is None, "one group is written at a time"
        if group.has_control or not self._feeds or not self._has_own(group):
            return False
        whole = self._begin_whole(now_ns, group)
        if whole is not None and not whole.sections and _outlives_this_node(whole):
            feeds = tuple(feed for feed in self._feeds.values() if feed.send_begun(whole))
            if feeds:
                self._begun = _Begun(whole, feeds)
        return self._begun is not None

    def synced(self, now_ns: int, group: CommitGroup) -> WholeGroup | None:
        """A group is on disk: those that have not got it get it now. Return what of it goes to all
        replicas wholly; None: nothing.
        """
        begun, self._begun = self._begun, None
        if not group.has_control and not self._has_own(group):
            return None  # all of it came from other masters
        if begun is None:
            whole, taken = self._begin_whole(now_ns, group), set()
        else:
            assert begun.whole.number == group.number, "groups are synced as they were begun"
            whole, taken = begun.whole, self._begun_synced(now_ns, begun)
        if whole is not None and (begun is None or not whole.left_out):
            taken |= {
                member
                for member, feed in self._feeds.items()
                if member not in taken and feed.send_whole(whole)
            }
        apart = set() if whole is None else whole.sections
        if (apart or len(taken) < len(self._feeds)) and (
            changes := changes_for_replicas(group.changes, self._masterships)
        ):
            few = {vb_id: changes[vb_id] for vb_id in apart & changes.keys()}
            for member, feed in self._feeds.items():
                feed.group_synced(few if member in taken else changes)
        return whole

    def _has_own(self, group: CommitGroup) -> bool:
        """Whether this node masters any partition of a group."""
        return not group.high_seqnos.keys().isdisjoint(self._masterships.keys())

    def _begun_synced(self, now_ns: int, begun: _Begun) -> set[str]:
        """A group that was sent before is synced; return who got it and still has the same link."""
        taken: set[str] = set()
        for feed in begun.feeds:
            if self._feeds.get(feed.member) is feed:
                feed.at(now_ns)
                feed.begun_synced(begun.whole)
                taken.add(feed.member)
        return taken

    def _begin_whole(self, now_ns: int, group: CommitGroup) -> WholeGroup | None:
        """Return what of a group all replicas can get as a whole; None: nothing."""
        for feed in self._feeds.values():
            feed.at(now_ns)
        whole = self._wholes.begin(group) if self._feeds else None
        if whole is None:
            return None
        apart = set().union(*(feed.out_of_step(whole) for feed in self._feeds.values()))
        if apart:
            if apart >= whole.seqnos.keys():
                return None
            whole.put_apart(apart)
        return whole


def _outlives_this_node(whole: WholeGroup) -> bool:
    """Whether enough members are in sync without this node, in all partitions of a group."""
    return all(
        may_send_unsynced(len(part.in_sync.members), part.in_sync.min_in_sync)
        for part in whole.shares
    )
