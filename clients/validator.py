"""Checks that a stream of events follows the rules of DCP, and stores the documents. Pure.

Called by tests that consume, and by `Consumer(validate=True)`.

Rules, per partition. The first violation raises StreamViolationError:
- seqnos rise, and every change is inside an announced snapshot;
- a key occurs once in a snapshot, unless the marker allows duplicates (flag 0x20);
- a history snapshot (flag 0x10) has consecutive revisions of each key, and the previous values in
  it match the stored ones;
- a marker starts at the end of the previous snapshot + 1. The first marker of a stream starts
  between the requested snapshot start and the requested seqno + 1, so there is no gap;
- a snapshot reaches its end before the next marker, and before the stream ends with reason 0;
- a stream opens at the consumer's seqno, so reconnects cause no gap and no duplicate;
- no events come before a stream opens or after it ends;
- a rollback goes to a lower seqno. Differences make a state as of any.

The validator stores every version of each key. So a rollback can restore older versions, and
`compare` can list the differences from a server's documents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from clients.errors import StreamViolationError
from clients.event import (
    Deletion,
    Differences,
    Event,
    Mutation,
    Rollback,
    SeqnoAdvanced,
    SnapshotEnd,
    SnapshotStart,
    StreamEnded,
    StreamFailed,
    StreamOpened,
    SystemEvent,
)
from clients.position import Position
from dcp.wire.message import EndReason, MarkerFlag
from vbucket.model.manifest import SystemEventKind


class Held(NamedTuple):
    """A version of a document; `value` is None if it is a deletion."""

    value: bytes | None
    cas: int
    seqno: int


Key = tuple[int, bytes]
"""Collection id, logical key."""


class _Partition:
    """The state of one partition."""

    __slots__ = (
        "end",
        "held",
        "is_open",
        "keys",
        "marker",
        "opened_at",
        "revisions",
        "seqno",
        "snap_start",
    )

    def __init__(self) -> None:
        self.is_open = False
        self.seqno: int | None = None
        """None if the stream starts at "now" and has not opened yet."""
        self.snap_start = 0
        self.opened_at = 0
        self.end: int | None = None
        """End of the previous snapshot of this stream."""
        self.marker: SnapshotStart | None = None
        self.keys: set[Key] = set()
        self.revisions: dict[Key, int] = {}
        """Last revision of each key in the current history snapshot."""
        self.held: dict[Key, list[Held]] = {}
        """Versions by key, oldest first."""


class StreamValidator:
    """Checks one stream of events. Feed it every event, in order."""

    def __init__(self) -> None:
        self.event_count = 0
        self.rollback_count = 0
        self._partitions: dict[int, _Partition] = {}

    def begin(self, positions: Mapping[int, Position]) -> None:
        """Set the positions of a resuming consumer. Call this before the first event."""
        for vb_id, position in positions.items():
            self._partition(vb_id).seqno = position.seqno

    def observe(self, event: Event, stream_id: int = 0) -> None:
        """Check one event. Raises StreamViolationError, which says what is wrong and where.

        Streams of one partition with different stream ids are checked separately. In the methods
        below, the `vb_id` of such a stream is `stream_id << 16 | vb_id`.
        """
        self.event_count += 1
        partition = self._partition(stream_id << 16 | event.vb_id)
        _CHECKS[type(event)](self, partition, event)

    def documents(self, collection_id: int = 0) -> dict[bytes, Held]:
        """Return the current documents of a collection by key."""
        documents: dict[bytes, Held] = {}
        for vb_id in self._partitions:
            documents.update(self.documents_of(vb_id, collection_id))
        return documents

    def documents_of(self, vb_id: int, collection_id: int = 0) -> dict[bytes, Held]:
        """Return the current documents of one partition and collection by key."""
        return {
            key: versions[-1]
            for (of_id, key), versions in self._partition(vb_id).held.items()
            if of_id == collection_id and versions[-1].value is not None
        }

    def seqnos(self) -> dict[int, int]:
        """Return the current seqno of each partition."""
        return {vb_id: part.seqno or 0 for vb_id, part in self._partitions.items()}

    def compare(self, server: Mapping[bytes, bytes]) -> list[str]:
        """Describe each difference from a server's documents (key -> value)."""
        ours = self.documents()
        missing = [
            f"{key!r}: the server has it, the consumer does not"
            for key in sorted(server.keys() - ours.keys())
        ]
        extra = [
            f"{key!r}: the consumer has it (seqno {ours[key].seqno}), the server does not"
            for key in sorted(ours.keys() - server.keys())
        ]
        other = [
            f"{key!r}: the consumer has {(ours[key].value or b'')[:60]!r} (seqno"
            f" {ours[key].seqno}), the server has {server[key][:60]!r}"
            for key in sorted(ours.keys() & server.keys())
            if ours[key].value != server[key]
        ]
        return missing + extra + other

    # -- one method per event ------------------------------------------------------------------

    def on_opened(self, partition: _Partition, event: StreamOpened) -> None:
        """A stream opened, for the first time or after a reconnect."""
        if partition.seqno is not None and event.start_seqno != partition.seqno:
            raise _violation(
                event.vb_id,
                f"the stream opened at seqno {event.start_seqno}, but the consumer is at"
                f" {partition.seqno}",
            )
        partition.is_open = True
        partition.seqno = event.start_seqno
        partition.opened_at, partition.snap_start = event.start_seqno, event.snap_start_seqno
        partition.marker = None
        partition.end = None

    def on_marker(self, partition: _Partition, event: SnapshotStart) -> None:
        """A marker announced a snapshot."""
        self._need_open(partition, event.vb_id, f"a marker {_span(event)}")
        if partition.marker is not None:
            raise _violation(
                event.vb_id,
                f"a marker {_span(event)} before the snapshot {_span(partition.marker)} is"
                f" complete (at seqno {partition.seqno})",
            )
        if not event.start_seqno <= event.end_seqno or event.end_seqno <= (partition.seqno or 0):
            raise _violation(event.vb_id, f"a marker {_span(event)} at seqno {partition.seqno}")
        if partition.end is not None:
            if event.start_seqno != partition.end + 1:
                raise _violation(
                    event.vb_id,
                    f"a marker {_span(event)} after a snapshot that ended at {partition.end}:"
                    f" it must start at {partition.end + 1}",
                )
        elif not partition.snap_start <= event.start_seqno <= partition.opened_at + 1:
            raise _violation(
                event.vb_id,
                f"the first marker {_span(event)} of a stream requested at seqno"
                f" {partition.opened_at}, snapshot start {partition.snap_start}: it must start"
                " between the requested snapshot start and the requested seqno + 1",
            )
        partition.marker = event
        partition.keys.clear()
        partition.revisions.clear()

    def on_mutation(self, partition: _Partition, event: Mutation) -> None:
        """A document was set."""
        self._change(partition, event)
        held = Held(event.value, event.cas, event.seqno)
        partition.held.setdefault((event.collection_id, event.key), []).append(held)

    def on_deletion(self, partition: _Partition, event: Deletion) -> None:
        """A document was deleted."""
        self._change(partition, event)
        held = Held(None, event.cas, event.seqno)
        partition.held.setdefault((event.collection_id, event.key), []).append(held)

    def on_advanced(self, partition: _Partition, event: SeqnoAdvanced) -> None:
        """The seqno advanced without a change."""
        self._move(partition, event.vb_id, event.seqno)

    def on_system_event(self, partition: _Partition, event: SystemEvent) -> None:
        """A collection was created, changed or dropped. A drop deletes its documents."""
        self._move(partition, event.vb_id, event.seqno)
        if event.kind == SystemEventKind.DROP_COLLECTION:
            for (of_id, _), versions in partition.held.items():
                if of_id == event.collection_id:
                    versions.append(Held(None, 0, event.seqno))

    def on_complete(self, partition: _Partition, event: SnapshotEnd) -> None:
        """A snapshot is complete."""
        marker = partition.marker
        if marker is None or not event.end_seqno == marker.end_seqno == partition.seqno:
            raise _violation(
                event.vb_id,
                f"the end {event.end_seqno} of a snapshot at seqno {partition.seqno};"
                f" {'announced ' + _span(marker) if marker else 'no snapshot was announced'}",
            )
        partition.marker = None
        partition.end = event.end_seqno

    def on_ended(self, partition: _Partition, event: StreamEnded) -> None:
        """A stream ended."""
        self._need_open(partition, event.vb_id, f"a stream's end ({event.reason_text})")
        if event.reason == EndReason.OK and partition.marker is not None:
            raise _violation(
                event.vb_id,
                f"the stream ended with reason 0 (ok) at seqno {partition.seqno}, inside the"
                f" snapshot {_span(partition.marker)}",
            )
        partition.is_open = False
        partition.marker = None

    def on_rollback(self, partition: _Partition, event: Rollback) -> None:
        """Restore the documents as of the rollback's seqno."""
        if partition.seqno is not None and event.to_seqno >= partition.seqno:
            raise _violation(
                event.vb_id,
                f"a rollback to seqno {event.to_seqno}, which is not below the current seqno"
                f" {partition.seqno}",
            )
        self.rollback_count += 1
        partition.is_open = False
        partition.seqno = event.to_seqno
        for key, versions in list(partition.held.items()):
            while versions and versions[-1].seqno > event.to_seqno:
                versions.pop()
            if not versions:
                del partition.held[key]

    def on_differences(self, partition: _Partition, event: Differences) -> None:
        """Take over in what a partition differs. What was held before cannot be restored."""
        partition.is_open = False
        partition.seqno = event.to_seqno
        held = {key: versions[-1] for key, versions in partition.held.items()}
        for collection_id, key in event.gone:
            held.pop((collection_id, key), None)
        for each in event.changed:
            held[each.collection_id, each.key] = Held(each.value, each.cas, each.seqno)
        partition.held = {
            key: [last._replace(seqno=min(last.seqno, event.read_seqno))]
            for key, last in held.items()
        }

    def on_failed(self, partition: _Partition, _event: StreamFailed) -> None:
        """A stream failed for good."""
        partition.is_open = False

    # -- inside --------------------------------------------------------------------------------

    def _partition(self, vb_id: int) -> _Partition:
        partition = self._partitions.get(vb_id)
        if partition is None:
            partition = self._partitions[vb_id] = _Partition()
        return partition

    @staticmethod
    def _need_open(partition: _Partition, vb_id: int, what: str) -> None:
        if not partition.is_open:
            raise _violation(vb_id, f"{what} while no stream is open")

    def _move(self, partition: _Partition, vb_id: int, seqno: int) -> SnapshotStart:
        """Advance to a change's seqno; return the marker of its snapshot."""
        self._need_open(partition, vb_id, f"a change with seqno {seqno}")
        marker = partition.marker
        if marker is None:
            raise _violation(vb_id, f"a change with seqno {seqno} outside any snapshot")
        if not marker.start_seqno <= seqno <= marker.end_seqno:
            raise _violation(
                vb_id, f"a change with seqno {seqno} outside the snapshot {_span(marker)}"
            )
        if seqno <= (partition.seqno or 0):
            raise _violation(vb_id, f"a change with seqno {seqno} after seqno {partition.seqno}")
        partition.seqno = seqno
        return marker

    def _change(self, partition: _Partition, event: Mutation | Deletion) -> None:
        """Check a change before it is stored."""
        name, seqno = event.key, event.seqno
        key = (event.collection_id, name)
        marker = self._move(partition, event.vb_id, seqno)
        if not marker.flags & MarkerFlag.MAY_DUPLICATE_KEYS:
            if key in partition.keys:
                raise _violation(
                    event.vb_id,
                    f"key {name!r} twice in the snapshot {_span(marker)}, again at seqno {seqno}",
                )
            partition.keys.add(key)
        if not marker.flags & MarkerFlag.HISTORY:
            return
        before = partition.revisions.get(key)
        if before is not None and event.rev_seqno != before + 1:
            raise _violation(
                event.vb_id,
                f"key {name!r} at seqno {seqno} has revision {event.rev_seqno} after {before} in"
                f" the history snapshot {_span(marker)}: a version is missing",
            )
        partition.revisions[key] = event.rev_seqno
        held = partition.held.get(key)
        if event.previous_value is not None and held and held[-1].value != event.previous_value:
            raise _violation(
                event.vb_id,
                f"key {name!r} at seqno {seqno} has the previous value"
                f" {event.previous_value[:60]!r}, but the consumer has"
                f" {(held[-1].value or b'')[:60]!r} (seqno {held[-1].seqno})",
            )


_CHECKS: Final[dict[type, Callable[[StreamValidator, _Partition, Any], None]]] = {
    StreamOpened: StreamValidator.on_opened,
    SnapshotStart: StreamValidator.on_marker,
    Mutation: StreamValidator.on_mutation,
    Deletion: StreamValidator.on_deletion,
    SeqnoAdvanced: StreamValidator.on_advanced,
    SystemEvent: StreamValidator.on_system_event,
    SnapshotEnd: StreamValidator.on_complete,
    StreamEnded: StreamValidator.on_ended,
    Rollback: StreamValidator.on_rollback,
    Differences: StreamValidator.on_differences,
    StreamFailed: StreamValidator.on_failed,
}


def _span(marker: SnapshotStart) -> str:
    return f"{marker.start_seqno}..{marker.end_seqno}"


def _violation(vb_id: int, what: str) -> StreamViolationError:
    return StreamViolationError(what, vb_id=vb_id)
