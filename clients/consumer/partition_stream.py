"""The state of one partition's stream in a consumer's core, and what a read brings. Pure.

    NEW -> ASKED -> OPEN -> DONE      finished, or closed for good
             |        |
             +--------+---> WAITING   requested again at `retry_at_ns`
             +--------+---> GONE      this node does not serve it, or the user paused it
             +------------> HELD      rolled back; the user decides what to do
             +------------> FAILED    refused for good

Its cursor (`clients.streaming.cursor`) has the position. The core has checked that items are inside
the open snapshot, in order, and of this partition (`misplaced`, `mixed_up`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import NamedTuple, cast

from clients.errors import StreamViolationError
from clients.event import (
    Deletion,
    Event,
    Mutation,
    Rollback,
    SeqnoAdvanced,
    SnapshotEnd,
    SnapshotStart,
    StreamOpened,
    SystemEvent,
)
from clients.position import Filter, Position, Versions, clipped
from clients.streaming.cursor import Cursor
from clients.streaming.mutations import Mutations, decoded

Item = Event | Mutations
"""An event, or consecutive mutations of one partition that are not decoded yet."""


class PartitionStreamState(Enum):
    """See the module."""

    NEW = auto()
    ASKED = auto()
    OPEN = auto()
    WAITING = auto()
    HELD = auto()
    DONE = auto()
    GONE = auto()
    FAILED = auto()


FINAL_STATES = frozenset({PartitionStreamState.DONE, PartitionStreamState.FAILED})
"""States after which a partition sends nothing more."""


class Wanted(NamedTuple):
    """The position from which to stream a partition; `position` None means from now.

    `ceiling`: with `until_now`, the known end; the stream ends there or lower.
    `now_seqno`: the seqno of "now", if it is known before the position is.
    """

    position: Position | None
    ceiling: int | None = None
    now_seqno: int | None = None


class PartitionStream(Cursor):
    """See the module. `position` is None for a stream that starts from now."""

    __slots__ = ("ceiling", "has_position", "now_seqno", "opaque", "retry_at_ns", "retry_ns",
                 "state", "target", "vb_id")  # fmt: skip

    def __init__(self, vb_id: int, position: Position | None) -> None:
        self.vb_id = vb_id
        self.state = PartitionStreamState.NEW
        self.target: int | None = None
        """Seqno at which the stream ends (`until_now`); None: it has no end, or it is unknown."""
        self.ceiling: int | None = None
        """The target before a rollback. The new target is not above it."""
        self.now_seqno: int | None = None
        """See Wanted."""
        self.opaque = 0
        """Opaque of its request while that is pending or the stream is open, otherwise 0."""
        self.retry_ns = 0
        self.retry_at_ns = 0
        self.place(position or Position())
        self.has_position = position is not None

    def place(self, position: Position) -> None:
        """Set the position."""
        super().place(position)
        self.has_position = True

    @property
    def is_over(self) -> bool:
        """Whether it needs nothing more from this node: finished, refused for good, or moved."""
        return self.state in FINAL_STATES or self.state is PartitionStreamState.GONE

    def open(self, versions: Versions) -> None:
        """The server accepted. Its failover log replaces the client's."""
        self.state = PartitionStreamState.OPEN
        self.versions = versions
        self.retry_ns = 0
        self.leave_snapshot()

    def move_over(self, mutations: Mutations) -> None:
        """Advance to the last of consecutive mutations, as `move` to each of them."""
        first, last, count = mutations.first_seqno, mutations.last_seqno, len(mutations)
        if first == self.range_end + 1 and last - first >= count:  # a gap, but not before the first
            seqnos = mutations.seqnos()
            dense = next(n for n, seqno in enumerate(seqnos) if seqno != first + n)
            self.advance(first, first + dense - 1, dense)
            first, count = seqnos[dense], count - dense
        self.advance(first, last, count)


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
        """Snapshots (start, end) that were open when it began, for `advance`."""
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
    """What one read has brought so far: the decoder and the stream requests add to it.

    Invariant: `markers` has the snapshot that was open in a partition before its first event of the
    batch. Positions in the middle of the batch are computed from it (`advance`).
    """

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


def wanted_of(stream: PartitionStream) -> Wanted:
    """Return what another connection needs to continue a stream."""
    ceiling = stream.ceiling if stream.target is None else stream.target
    if stream.has_position:
        return Wanted(stream.position(), ceiling)
    return Wanted(None, ceiling, stream.now_seqno)


def misplaced(stream: PartitionStream, seqno: int) -> StreamViolationError:
    """Return the error for a change whose seqno is outside the open snapshot or out of order."""
    if not stream.marker_end:
        what = f"a change with seqno {seqno} outside any snapshot"
    else:
        what = (
            f"a change with seqno {seqno} after seqno {stream.seqno} in the snapshot"
            f" {stream.marker_start} to {stream.marker_end}"
        )
    return StreamViolationError(what, vb_id=stream.vb_id)


def mixed_up(stream: PartitionStream, vb_id: int) -> StreamViolationError:
    """Return the error for a message that names another partition than its stream. Positions in
    the middle of a batch go by what changes name.
    """
    return StreamViolationError(
        f"a message of vbucket {vb_id} in the stream of this one, at seqno {stream.seqno}",
        vb_id=stream.vb_id,
    )


def advance(
    positions: dict[int, Position],
    events: Iterable[Event | Mutations],
    markers: Mapping[int, tuple[int, int]],
    collections: tuple[int, ...] | None,
    filter: Filter | None = None,  # noqa: A002 - the word that positions have for it
) -> None:
    """Advance `positions` by events, as the core does while it receives them.

    This computes positions in the middle of a batch. The positions at its end are in the batch.
    `markers`, `collections` and `filter` come from the batch: the snapshots that were open before
    it, and the selection of its new streams.
    """
    streams: dict[int, PartitionStream] = {}
    for event in events:
        stream = streams.get(event.vb_id)
        if stream is None:
            stream = PartitionStream(event.vb_id, positions.get(event.vb_id, Position()))
            streams[event.vb_id] = stream
            if event.vb_id in markers:
                stream.begin_snapshot(*markers[event.vb_id])
        match event:
            case Mutation() | Deletion() | SystemEvent() | SeqnoAdvanced():
                stream.move(event.seqno)
            case Mutations():
                stream.move_over(event)
            case SnapshotStart():
                stream.begin_snapshot(event.start_seqno, event.end_seqno)
            case SnapshotEnd():
                stream.complete_snapshot()
            case StreamOpened():
                stream.open(event.failover_log)
                stream.collections, stream.filter = collections, filter
            case Rollback():
                stream.place(_back_at(stream.position(), event.to_seqno))
            case _:
                stream.leave_snapshot()
    positions.update({vb_id: stream.position() for vb_id, stream in streams.items()})


def _back_at(position: Position, seqno: int) -> Position:
    """Return a position after a rollback to `seqno`."""
    if not seqno:
        return Position()
    versions = tuple(version for version in position.versions if version[1] <= seqno)
    is_below = seqno < position.base_seqno
    complete = ((seqno, seqno),) if is_below else clipped(position.complete, seqno)
    base_seqno = min(position.base_seqno, seqno)
    return position._replace(
        versions=versions, seqno=seqno, snap_start=seqno, snap_end=seqno, complete=complete,
        base_seqno=base_seqno,
    )  # fmt: skip
