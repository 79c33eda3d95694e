"""Collects what one read of a consumer's connection brought, and hands it on. Pure.

The decoder (`clients.consumer.core`) and the requests (`clients.consumer.stream_requests`) add to
an `OpenBatch`. The reader (`clients.consumer.batch_reader`) returns a `Batch` to the user.

Invariants
- `markers` has the snapshot that was open in a partition before its first event of this batch.
  Positions in the middle of the batch are computed from it;
- decoding mutations changes neither their order nor the positions.
"""

from __future__ import annotations

from typing import cast

from clients.consumer.partition_stream import PartitionStream
from clients.event import Event
from clients.position import Filter, Position
from clients.streaming.mutations import Mutations, decoded

Item = Event | Mutations
"""An event, or consecutive mutations of one partition that are not decoded yet."""


class Batch:
    """The result of one read: items in order, and the positions of their partitions after them."""

    __slots__ = ("collections", "filter", "items", "markers", "positions", "wire_bytes")

    def __init__(
        self,
        items: list[Item],
        positions: dict[int, Position],
        wire_bytes: int,
        markers: dict[int, tuple[int, int]],
        collections: tuple[int, ...] | None = None,
        filter: Filter | None = None,  # noqa: A002 - the word that positions have for it
    ) -> None:
        self.items = items
        self.positions = positions
        self.wire_bytes = wire_bytes
        """Its bytes as flow control counts them; `ConsumerCore.processed` acknowledges them."""
        self.markers = markers
        """Snapshots (start, end) that were open when it began, for `partition_stream.advance`."""
        self.collections = collections
        self.filter = filter
        """Collections and filter of the streams that it opens, for the same function."""

    @property
    def events(self) -> list[Event]:
        """The items, decoded. Changes of this list change the batch."""
        self.decode()
        return cast("list[Event]", self.items)

    def decode(self, at: int = 0) -> None:
        """Replace mutations from index `at` on by an event for each. Earlier indexes stay."""
        if any(type(item) is Mutations for item in self.items[at:]):
            self.items[at:] = decoded(self.items[at:])


class OpenBatch:
    """See the module."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start empty. The previous items belong to whoever took them."""
        self.items: list[Item] = []
        self.touched: set[PartitionStream] = set()
        self.markers: dict[int, tuple[int, int]] = {}

    def touch(self, stream: PartitionStream) -> None:
        """Note that the batch affects a partition, and the snapshot that is open in it."""
        if stream not in self.touched:
            self.touched.add(stream)
            if stream.marker_end:
                self.markers[stream.vb_id] = (stream.marker_start, stream.marker_end)
