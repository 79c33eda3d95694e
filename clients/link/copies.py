"""Which copy of each partition a consumer with `from_replicas` reads. Pure.

The copies that are not the master's come first: those of the consumer's rack, then the others, each
partition with another one, so their nodes share the work. A copy that cannot serve a partition is
passed over: the next copy has its turn, and the master comes last. After RETURN_S all begin with
their first copy again, so masters carry nothing for long.

Positions are the same everywhere: a partition goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Final

from clients.errors import UnsupportedError
from clients.link.topology import Topology

RETURN_S: Final = 30.0
"""Longer than an election and the restart of a node take."""


class Copies:
    """See the module. Times are of any steady clock, in s."""

    def __init__(self, rack: str = "") -> None:
        """`rack`: copies there come first."""
        self._rack = rack
        self._turns: dict[int, int] = {}
        """Partition -> how many copies were passed over. Those with none are not in it."""
        self.return_s: float | None = None
        """When all begin with their first copy again; None: all do."""

    def chosen(self, newest: Topology) -> Topology:
        """Return the map as if each partition were active on the copy whose turn it is."""
        rows = zip(newest.vbucket_map, newest.replica_map, strict=bool(newest.replica_map))
        near = {at for at, node in enumerate(newest.nodes) if node.rack == self._rack != ""}
        chosen = tuple(self._index_of(vb_id, *row, near) for vb_id, row in enumerate(rows))
        return newest._replace(vbucket_map=chosen or newest.vbucket_map)

    def _index_of(self, vb_id: int, master: int, replicas: tuple[int, ...], near: Set[int]) -> int:
        at = vb_id % max(1, len(replicas))
        first = sorted((*replicas[at:], *replicas[:at]), key=lambda index: index not in near)
        order = (*first, *((master,) if master >= 0 else ()))
        return order[self._turns.get(vb_id, 0) % len(order)] if order else master

    def pass_over(self, vb_ids: Iterable[int], now_s: float) -> None:
        """The copies whose turn it is do not serve these partitions: the next ones do."""
        for vb_id in vb_ids:
            self._turns[vb_id] = self._turns.get(vb_id, 0) + 1
        if self._turns and self.return_s is None:
            self.return_s = now_s + RETURN_S

    def return_when_due(self, now_s: float) -> bool:
        """Begin with the first copies again, if it is time; return whether it was."""
        if self.return_s is None or now_s < self.return_s:
            return False
        self._turns.clear()
        self.return_s = None
        return True


def check_copies(topology: Topology, server: str) -> None:
    """Raise UnsupportedError if partitions have one copy each. If they have more, and none of these
    is in sync just now, masters serve until one is. A node that knows no masters yet, because it
    has just started, does not know what copies there are.
    """
    if not topology.replica_map and any(index >= 0 for index in topology.vbucket_map):
        raise UnsupportedError(
            "from_replicas: there is one copy of each partition, on its master",
            node=server,
            hint="Add copies with `dcpctl cluster set --copies 2`, or leave from_replicas out.",
        )
