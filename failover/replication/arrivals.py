"""Partitions that were handed over to this node, and that it serves in a moment. Sans-IO.

    began ──> ARRIVING ── served, or another master, or ARRIVAL_NS_MAX is over ──> ended

A client that has the new map may ask before the first commit group of the epoch is on disk here.
Its request waits in its session (`dcp.session.arrival_wait`) instead of being refused: the refusal
would be sent behind the answers before it, and the request would come again after that.

Who calls it: `failover.replication.serving`. Sessions look at `vb_ids`.

Invariants
- only a handover brings an arrival. After a failover a master may have to wait for confirmations
  to lapse, which takes longer than a request should wait;
- an arrival ends after ARRIVAL_NS_MAX, and does not begin again in the same epoch.
"""

from __future__ import annotations

from typing import Final

from failover.replication.effects import PartitionsArrived, ReplicationEffect

ARRIVAL_NS_MAX: Final = 100_000_000
"""How long after its record a partition is expected to be served. The median is 15 to 35 ms on two
busy cores; a disk or a replica that takes longer may take any time."""


class Arrivals:
    """See the module. An end leaves an effect, so that the requests go on."""

    def __init__(self, effects: list[ReplicationEffect]) -> None:
        self._effects = effects
        self._began_ns: dict[int, int] = {}
        self.vb_ids = self._began_ns.keys()
        """The partitions that are arriving; the same object for ever."""

    def began(self, vb_id: int, now_ns: int) -> None:
        """The record of a handover has made this node a partition's master."""
        self._began_ns[vb_id] = now_ns

    def ended(self, vb_id: int) -> None:
        """A partition is served, or has another master; nothing happens if it was not arriving."""
        if self._began_ns.pop(vb_id, None) is not None:
            self._tell()

    def expire(self, now_ns: int) -> None:
        """End the arrivals that take too long: requests are refused from now on."""
        overdue = [
            vb_id
            for vb_id, began_ns in self._began_ns.items()
            if now_ns - began_ns >= ARRIVAL_NS_MAX
        ]
        for vb_id in overdue:
            self.ended(vb_id)

    def _tell(self) -> None:
        """Leave one effect, however many partitions it is about."""
        if not any(isinstance(effect, PartitionsArrived) for effect in self._effects):
            self._effects.append(PartitionsArrived())
