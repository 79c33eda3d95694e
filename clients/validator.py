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

Mutations that come together (`observe_run`) are checked by the same rules, column by column. If one
breaks a rule, all of them are checked one by one, so the error is the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from operator import ge
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


_Version = tuple[bytes | None, int, int]
"""The fields of a Held, without its class: there are millions."""


class Columns(NamedTuple):
    """Mutations of one partition, in order, without XATTRs and previous values."""

    keys: Sequence[bytes]
    values: Sequence[bytes]
    seqnos: Sequence[int]
    rev_seqnos: Sequence[int]
    cas: Sequence[int]


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
        self.keys: defaultdict[int, set[bytes]] = defaultdict(set)
        """Collection -> keys of the current snapshot."""
        self.revisions: dict[tuple[int, bytes], int] = {}
        """Last revision of each key in the current history snapshot."""
        self.held: defaultdict[int, dict[bytes, list[_Version]]] = defaultdict(dict)
        """Collection -> versions by key, oldest first."""


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

    def observe_run(self, vb_id: int, columns: Columns, collection_id: int = 0) -> None:
        """Check mutations that come together. Raises StreamViolationError, as `observe` does for
        the first of them that breaks a rule.
        """
        if not self._take_run(self._partition(vb_id), columns, collection_id):
            for key, value, seqno, rev_seqno, cas in zip(*columns, strict=True):
                event = Mutation(vb_id, key, value, seqno, rev_seqno, cas, 0, 0)
                event.collection_id = collection_id
                self.observe(event)

    def documents(self, collection_id: int = 0) -> dict[bytes, Held]:
        """Return the current documents of a collection by key."""
        documents: dict[bytes, Held] = {}
        for vb_id in self._partitions:
            documents.update(self.documents_of(vb_id, collection_id))
        return documents

    def documents_of(self, vb_id: int, collection_id: int = 0) -> dict[bytes, Held]:
        """Return the current documents of one partition and collection by key."""
        return {
            key: Held(*versions[-1])
            for key, versions in self._partition(vb_id).held[collection_id].items()
            if versions[-1][0] is not None
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
        versions = partition.held[event.collection_id].setdefault(event.key, [])
        versions.append((event.value, event.cas, event.seqno))

    def on_deletion(self, partition: _Partition, event: Deletion) -> None:
        """A document was deleted."""
        self._change(partition, event)
        versions = partition.held[event.collection_id].setdefault(event.key, [])
        versions.append((None, event.cas, event.seqno))

    def on_advanced(self, partition: _Partition, event: SeqnoAdvanced) -> None:
        """The seqno advanced without a change."""
        self._move(partition, event.vb_id, event.seqno)

    def on_system_event(self, partition: _Partition, event: SystemEvent) -> None:
        """A collection was created, changed or dropped. A drop deletes its documents."""
        self._move(partition, event.vb_id, event.seqno)
        if event.kind == SystemEventKind.DROP_COLLECTION:
            for versions in partition.held[event.collection_id].values():
                versions.append((None, 0, event.seqno))

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
        for held in partition.held.values():
            for key, versions in list(held.items()):
                while versions and versions[-1][2] > event.to_seqno:
                    versions.pop()
                if not versions:
                    del held[key]

    def on_differences(self, partition: _Partition, event: Differences) -> None:
        """Take over in what a partition differs. What was held before cannot be restored."""
        partition.is_open = False
        partition.seqno = event.to_seqno
        for collection_id, key in event.gone:
            partition.held[collection_id].pop(key, None)
        for each in event.changed:
            newest: _Version = (each.value, each.cas, each.seqno)
            partition.held[each.collection_id][each.key] = [newest]
        for held in partition.held.values():
            for key, (*_, (value, cas, seqno)) in held.items():
                held[key] = [(value, cas, min(seqno, event.read_seqno))]

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

    def _take_run(self, partition: _Partition, columns: Columns, collection_id: int) -> bool:
        """Take mutations that break no rule; return False, and take none, if one does."""
        marker, seqnos = partition.marker, columns.seqnos
        if marker is None or not partition.is_open:
            return False
        is_inside = marker.start_seqno <= seqnos[0] and seqnos[-1] <= marker.end_seqno
        falls = any(map(ge, seqnos, islice(seqnos, 1, None)))
        if not is_inside or falls or seqnos[0] <= (partition.seqno or 0):
            return False
        is_unique = not marker.flags & _MAY_DUPLICATE_KEYS
        keys = set(columns.keys) if is_unique else set()
        known = partition.keys[collection_id]
        if is_unique and (len(keys) < len(columns.keys) or not known.isdisjoint(keys)):
            return False
        if marker.flags & _HISTORY and not _are_next(partition.revisions, columns, collection_id):
            return False
        if is_unique:
            known |= keys
        held = partition.held[collection_id]
        versions = zip(columns.values, columns.cas, seqnos, strict=True)
        for key, version in zip(columns.keys, versions, strict=True):
            if (before := held.get(key)) is None:
                held[key] = [version]
            else:
                before.append(version)
        partition.seqno = seqnos[-1]
        self.event_count += len(seqnos)
        return True

    def _change(self, partition: _Partition, event: Mutation | Deletion) -> None:
        """Check a change before it is stored."""
        name, seqno = event.key, event.seqno
        marker = self._move(partition, event.vb_id, seqno)
        if not marker.flags & _MAY_DUPLICATE_KEYS:
            keys = partition.keys[event.collection_id]
            if name in keys:
                raise _violation(
                    event.vb_id,
                    f"key {name!r} twice in the snapshot {_span(marker)}, again at seqno {seqno}",
                )
            keys.add(name)
        if not marker.flags & _HISTORY:
            return
        key = (event.collection_id, name)
        before = partition.revisions.get(key)
        if before is not None and event.rev_seqno != before + 1:
            raise _violation(
                event.vb_id,
                f"key {name!r} at seqno {seqno} has revision {event.rev_seqno} after {before} in"
                f" the history snapshot {_span(marker)}: a version is missing",
            )
        partition.revisions[key] = event.rev_seqno
        held = partition.held[event.collection_id].get(name)
        if event.previous_value is not None and held and held[-1][0] != event.previous_value:
            raise _violation(
                event.vb_id,
                f"key {name!r} at seqno {seqno} has the previous value"
                f" {event.previous_value[:60]!r}, but the consumer has"
                f" {(held[-1][0] or b'')[:60]!r} (seqno {held[-1][2]})",
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


_MAY_DUPLICATE_KEYS: Final = int(MarkerFlag.MAY_DUPLICATE_KEYS)
_HISTORY: Final = int(MarkerFlag.HISTORY)
"""Plain numbers: an enum's operators would take longer than the checks."""


def _are_next(
    revisions: dict[tuple[int, bytes], int], columns: Columns, collection_id: int
) -> bool:
    """Take the revisions of mutations in a history; return False, and take none, if one is missing
    before one of them.
    """
    taken: dict[tuple[int, bytes], int] = {}
    for name, rev_seqno in zip(columns.keys, columns.rev_seqnos, strict=True):
        key = (collection_id, name)
        before = taken.get(key, revisions.get(key))
        if before is not None and rev_seqno != before + 1:
            return False
        taken[key] = rev_seqno
    revisions |= taken
    return True


def _span(marker: SnapshotStart) -> str:
    return f"{marker.start_seqno}..{marker.end_seqno}"


def _violation(vb_id: int, what: str) -> StreamViolationError:
    return StreamViolationError(what, vb_id=vb_id)
