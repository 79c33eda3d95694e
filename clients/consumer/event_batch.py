"""What one read brings to a consumer's connection, while it is put together. Pure.

The decoder (`clients.consumer.core`) and the requests (`clients.consumer.stream_requests`) both add
to it.

Invariant: `markers` has the snapshot that was under way in a partition before its first event of
this batch, so that a user in the middle of the batch can tell where the partition stands.
"""

from __future__ import annotations

from clients.consumer.partition_stream import PartitionStream
from clients.event import Event


class OpenBatch:
    """See the module."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start empty. The previous events belong to their taker."""
        self.events: list[Event] = []
        self.touched: set[PartitionStream] = set()
        self.markers: dict[int, tuple[int, int]] = {}

    def touch(self, stream: PartitionStream) -> None:
        """Note that the batch concerns a partition, and the snapshot that it is in."""
        if stream not in self.touched:
            self.touched.add(stream)
            if stream.marker_end:
                self.markers[stream.vb_id] = (stream.marker_start, stream.marker_end)
