"""Which leader epochs the versions of documents in a partition can have. Pure.

Who calls it: `vbucket.check.partition_check`, with each block. The leader epoch of a change is that
of the master that made it, so in the living history of a partition

- epochs never fall with rising seqnos;
- what lies above the seqno at which a partition version began has at least the epoch in which that
  version began. It may have a higher one, because a handover begins an epoch and no version;
- what lies at or below that seqno has at most that epoch;
- no epoch is above the partition's leader epoch.
"""

from __future__ import annotations

from bisect import bisect_left

from failover.rules.history import FailoverLog


class EpochBounds:
    """See the module. `problem_of` takes blocks in the order of their seqnos."""

    def __init__(self, log: FailoverLog, leader_epoch: int, living_seqno: int) -> None:
        """`living_seqno`: the failover log may be newer than the store. Then it says nothing about
        versions above this seqno, which a rollback undid and the next merge removes.
        """
        oldest_first = log.entries[::-1]
        self._seqnos = [version.seqno for version in oldest_first]
        self._epochs = [version.epoch for version in oldest_first]
        self._leader_epoch = leader_epoch
        self._living_seqno = living_seqno
        self._last_epoch = 0

    def problem_of(self, first_seqno: int, last_seqno: int, epoch: int) -> str:
        """Return what is wrong with versions of one epoch, "" if nothing is."""
        before, self._last_epoch = self._last_epoch, max(epoch, self._last_epoch)
        where = f"seqnos {first_seqno} to {last_seqno} are of leader epoch {epoch}"
        if epoch > self._leader_epoch:
            return f"{where}, and the partition is in epoch {self._leader_epoch}"
        if epoch < before:
            return f"{where}, and what lies below is of epoch {before}"
        if first_seqno > self._living_seqno:
            return ""
        last_seqno = min(last_seqno, self._living_seqno)
        newest_below = bisect_left(self._seqnos, last_seqno) - 1
        if newest_below >= 0 and epoch < self._epochs[newest_below]:
            began = f"seqno {self._seqnos[newest_below]} in epoch {self._epochs[newest_below]}"
            return f"{where}, and their version began at {began}"
        oldest_above = bisect_left(self._seqnos, first_seqno)
        if oldest_above < len(self._seqnos) and epoch > self._epochs[oldest_above]:
            began = f"seqno {self._seqnos[oldest_above]} in epoch {self._epochs[oldest_above]}"
            return f"{where}, and a later version began at {began}"
        return ""
