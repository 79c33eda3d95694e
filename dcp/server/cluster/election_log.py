"""Log lines about elections: one for each new master, however many partitions it got."""

from __future__ import annotations

from collections import Counter

from dcp.server.observe.event_log import EventLog
from failover.coordinator.coordinator import Elected
from failover.coordinator.view import ClusterView


class ElectionLog:
    """Gathers elections until `tell`."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._partitions: Counter[tuple[str, bool]] = Counter()
        """(Master, whether it was in sync) -> partitions."""

    def note(self, elected: Elected) -> None:
        """Gather one."""
        self._partitions[elected.record.master or "", elected.is_clean] += 1

    def tell(self, log: EventLog) -> None:
        """Log what was gathered."""
        for (member, is_clean), count in self._partitions.items():
            stored = self._view.members.get(member)
            name = member if stored is None else stored.content.name
            if is_clean:
                log.info("masters elected", master=name, partitions=count)
            else:
                log.error("masters elected that were not in sync", master=name, partitions=count)
        self._partitions.clear()
