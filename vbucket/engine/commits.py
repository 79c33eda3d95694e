"""Which commit groups are synced, and what of them each partition has committed. Sans-IO.

    in_flight                groups that go to the log
    synced(group)            its record is on disk. Partitions without replicas are committed up to
                             this group: answers may leave, and streams have something to send
    commit(vb_id, seqno)     all in-sync replicas of a partition have it up to this seqno, too

Who calls it: the keyspace, and the node core for partitions with replicas. Sessions ask
`is_committed` before an answer leaves.

Invariants
- groups are synced in the order in which they were taken;
- a partition commits its part of the groups in order, independently of other partitions;
- committed_group <= synced_group. Every partition has committed what the groups up to
  `committed_group` changed in it. Of later synced groups that holds for all partitions that are not
  in `lagging`;
- a partition commits nothing that this node has not synced.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from vbucket.engine.partition import Partition
from vbucket.log.commit_group import CommitGroup


class Commits:
    """See the module. `partitions` are those of the node, by number."""

    def __init__(self, partitions: Sequence[Partition]) -> None:
        self._partitions = partitions
        self.in_flight: list[CommitGroup] = []
        """Groups that the keyspace has closed and that are not synced."""
        self._uncommitted: dict[int, CommitGroup] = {}
        """Synced groups that some partition has not committed, by number, in order."""
        self.lagging: dict[int, int] = {}
        """Partitions that have not committed all that is synced -> the first such group."""
        self.synced_group = 0
        """Number of the last group that is in the log, as safe as the durability requires."""
        self.committed_group = 0

    def continue_after(self, group: int) -> None:
        """Continue after `group`, the last one in the log."""
        self.synced_group = self.committed_group = group

    def synced(self, group: CommitGroup, *, is_on_disk: bool = True) -> None:
        """Take note that a group is as safe in the log as the durability requires.

        It commits the group in all partitions that have no replicas.
        """
        assert self.in_flight, "a group is synced after it was taken"
        assert self.in_flight[0] is group, "groups are synced in the order they were taken"
        del self.in_flight[0]
        number = self.synced_group = group.number
        partitions, lagging, lags = self._partitions, self.lagging, False
        for vb_id, seqno in group.high_seqnos.items():
            part = partitions[vb_id]
            if is_on_disk:
                part.synced_seqno = seqno
            if part.has_copies:
                lags = True
                if vb_id not in lagging:
                    lagging[vb_id] = number
            else:
                part.committed_seqno = seqno
        if lags:
            self._uncommitted[number] = group
        elif not self._uncommitted:
            self.committed_group = number

    def all_synced(self) -> None:
        """Take note that everything in the log is on disk (durability `interval`)."""
        for part in self._partitions:
            part.synced_seqno = part.committed_seqno

    def commit(self, vb_id: int, seqno: int) -> bool:
        """Raise a partition's high watermark to a seqno; return whether that commits anything. It
        never falls. After the last of several calls, call `settle`.
        """
        part = self._partitions[vb_id]
        assert seqno <= part.synced_seqno, "nothing is committed that this node has not synced"
        commits = seqno > part.committed_seqno
        if commits:
            part.committed_seqno = seqno
        first = self.lagging.get(vb_id)
        if first is None:
            return commits
        for number, group in self._uncommitted.items():
            if number >= first and group.high_seqnos.get(vb_id, 0) > seqno:
                self.lagging[vb_id] = number
                return commits or number > first
        del self.lagging[vb_id]
        return True

    def commit_many(self, seqnos: Mapping[int, int]) -> Collection[int]:
        """Raise the high watermarks of many partitions, as `commit` does; return the partitions
        where that commits anything. Call `settle` then.
        """
        partitions, lagging = self._partitions, self.lagging
        others: list[int] = []
        for vb_id, seqno in seqnos.items():
            part = partitions[vb_id]
            if part.committed_seqno < seqno == part.synced_seqno:
                part.committed_seqno = seqno
                lagging.pop(vb_id, None)  # no synced group has more of it
            else:
                others.append(vb_id)
        if not others:
            return seqnos
        idle = {vb_id for vb_id in others if not self.commit(vb_id, seqnos[vb_id])}
        return [vb_id for vb_id in seqnos if vb_id not in idle]

    def settle(self) -> None:
        """Forget the groups that all their partitions have committed."""
        oldest = min(self.lagging.values(), default=self.synced_group + 1)
        for number in [number for number in self._uncommitted if number < oldest]:
            del self._uncommitted[number]
        self.committed_group = oldest - 1

    def is_committed(self, vb_id: int, group: int) -> bool:
        """Whether what this group and earlier ones changed in a partition is committed."""
        if group <= self.committed_group:
            return True
        lag = self.lagging.get(vb_id)
        return group <= self.synced_group and (lag is None or group < lag)

    def group_of(self, vb_id: int, seqno: int) -> int | None:
        """Return the number of the group that has this uncommitted change; None: the open group."""
        for group in (*self._uncommitted.values(), *self.in_flight):
            if group.high_seqnos.get(vb_id, 0) >= seqno:
                return group.number
        return None

    def loaded(self, vb_id: int, seqno: int) -> None:
        """Take note that the store has a partition up to this seqno: groups that only have control
        entries of it, and were taken before, do not end below.
        """
        for group in (*self._uncommitted.values(), *self.in_flight):
            if vb_id in group.high_seqnos:
                group.high_seqnos[vb_id] = seqno

    def cut(self, vb_id: int, seqno: int) -> None:
        """Take note that a branch has undone what lies above `seqno` in a partition."""
        for group in (*self._uncommitted.values(), *self.in_flight):
            if vb_id in group.high_seqnos:
                group.high_seqnos[vb_id] = min(group.high_seqnos[vb_id], seqno)
