"""Collects the events of one read of a consumer's connection. Pure.

The decoder (`clients.consumer.core`) and the requests (`clients.consumer.stream_requests`) add to
it.

Invariant: `markers` has the snapshot that was open in a partition before its first event of this
batch. Positions in the middle of the batch are computed from it.
"""

from __future__ import annotations

from clients.consumer.partition_stream import PartitionStream
from clients.event import Event


class OpenBatch:
    """See the module."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start empty. The previous events belong to whoever took them."""
        self.events: list[Event] = []
        self.touched: set[PartitionStream] = set()
        self.markers: dict[int, tuple[int, int]] = {}

    def touch(self, stream: PartitionStream) -> None:
        """Note that the batch affects a partition, and the snapshot that is open in it."""
        if stream not in self.touched:
            self.touched.add(stream)
            if stream.marker_end:
                self.markers[stream.vb_id] = (stream.marker_start, stream.marker_end)
