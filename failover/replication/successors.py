"""Who gets the partitions of a node that is about to stop. Pure."""

from __future__ import annotations

from collections import Counter

from failover.coordinator.cluster_view import ClusterView
from failover.rules.replication_record import ReplicationRecord, want


class Successors:
    """Chooses a successor for each partition, so that each member gets about as many."""

    def __init__(self, view: ClusterView, member: str) -> None:
        self._view = view
        self._member = member
        self._given: Counter[str] = Counter()

    def able(self, record: ReplicationRecord) -> list[str]:
        """Return the members that could be the next master."""
        return [
            member
            for member in record.copies
            if member in record.isr and member != self._member and self._view.stays(member)
        ]

    def wanted(self, record: ReplicationRecord) -> ReplicationRecord:
        """Return the record with the member in sync that has been given the fewest partitions as
        the wanted master; without one if there is none.
        """
        able = self.able(record)
        if record.wanted_master in able:
            return record
        chosen = min(able, key=lambda member: self._given[member], default=None)
        if chosen is not None:
            self._given[chosen] += 1
        return want(record, chosen)
