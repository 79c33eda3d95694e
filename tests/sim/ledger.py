"""All that was ever committed, by version: what a partition held at any of its seqnos.

A node fills it when it publishes changes, before anybody is answered. So it has what compaction
drops later, and what a branch or an election cuts off.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from vbucket.engine.engine import FLAGS_AT
from vbucket.engine.partition import Partition
from vbucket.model.entry import META, expiry_of, is_deleted, key_of, seqno_of, value_of
from vbucket.model.ids import DEFAULT_COLLECTION_PREFIX

Log = tuple[tuple[int, int], ...]
"""(vb_uuid, seqno at which it began), newest first."""


class Reader(Protocol):
    """Where entries are read (`vbucket.engine.versions`)."""

    def entries(
        self, part: Partition, start_seqno: int, end_seqno: int, bytes_max: int
    ) -> list[bytes]:
        """Return the changes in [start, end]."""


class Change(NamedTuple):
    """A change of a document of the default collection. `value` is None if it was deleted."""

    key: bytes
    seqno: int
    cas: int
    rev_seqno: int
    value: bytes | None
    expiry_s: int
    flags: int = 0


class Point(NamedTuple):
    """From a time on, a partition was committed so far."""

    at_ns: int
    log: Log
    seqno: int


class Span(NamedTuple):
    """What a partition may have been at some moment of a time."""

    log: Log
    first_seqno: int
    last_seqno: int


class Ledger:
    """See the module."""

    def __init__(self) -> None:
        self._changes: dict[tuple[int, int], list[Change]] = {}
        """By partition and version, ascending."""
        self._ends: dict[tuple[int, int], int] = {}
        self._points: dict[int, list[Point]] = {}
        self._logs: dict[tuple[int, int], Log] = {}
        """The history that each version goes on from, itself first."""

    def committed(self, now_ns: int, part: Partition, reader: Reader) -> None:
        """Take what a master has committed of a partition."""
        vb_id, end, log = part.vb_id, part.committed_seqno, tuple(part.failover.pairs())
        points = self._points.setdefault(vb_id, [])
        is_known = (vb_id, log[0][0]) in self._ends
        is_last = bool(points) and points[-1].log[0] == log[0]
        if not is_known or (is_last and points[-1].seqno < end):  # else a former master tells it
            points.append(Point(now_ns, log, end))
        for number, (uuid, began) in enumerate(log):
            at = vb_id, uuid
            self._logs.setdefault(at, log[number:])
            known = self._ends.get(at, began)
            if number and known >= end and at in self._ends:
                return
            if known < end:
                changes = self._changes.setdefault(at, [])
                entries = reader.entries(part, known + 1, end, 1 << 40)
                changes += map(_change_of, _documents(entries))
            self._ends[at] = max(known, end)
            end = began

    def log_of(self, vb_id: int, uuid: int) -> Log:
        """Return the history of a version; () if nothing of it was ever committed."""
        return self._logs.get((vb_id, uuid), ())

    def change(self, vb_id: int, uuid: int, seqno: int) -> Change | None:
        """Return the change with a seqno of a version; None: there was none."""
        changes = self._changes.get((vb_id, uuid), [])
        at = bisect_right(changes, seqno, key=lambda change: change.seqno)
        return changes[at - 1] if at and changes[at - 1].seqno == seqno else None

    def changes(self, vb_id: int, log: Log, first: int, last: int) -> Iterator[Change]:
        """Yield the changes of a history, `first` to `last`."""
        ends = [last, *(began for _, began in log)]
        for (uuid, began), end in reversed(list(zip(log, ends, strict=False))):
            for change in self._changes.get((vb_id, uuid), ()):
                if max(first, began + 1) <= change.seqno <= min(end, last):
                    yield change

    def logs(self) -> Iterator[tuple[int, Log]]:
        """Yield each partition and version of which something was committed, with its history."""
        yield from ((vb_id, log) for (vb_id, _), log in self._logs.items())

    def state(self, vb_id: int, log: Log, seqno: int) -> dict[bytes, Change]:
        """Return the documents of a partition at a seqno of a history."""
        state: dict[bytes, Change] = {}
        for change in self.changes(vb_id, log, 1, seqno):
            advance(state, change)
        return state

    def spans(self, vb_id: int, began_ns: int, ended_ns: int) -> list[Span]:
        """Return what the partition may have been at some moment between two times."""
        points = self._points.get(vb_id, [])
        first = max(0, bisect_right(points, began_ns, key=lambda point: point.at_ns) - 1)
        spans: list[Span] = []
        for point in points[first:]:
            if point.at_ns > ended_ns:
                break
            if spans and spans[-1].log[0] == point.log[0]:
                spans[-1] = spans[-1]._replace(last_seqno=max(point.seqno, spans[-1].last_seqno))
            else:
                spans.append(Span(point.log, point.seqno, point.seqno))
        return spans

    def has_moved(self, vb_id: int, began_ns: int, ended_ns: int) -> bool:
        """Whether changes of a partition were committed between two times."""
        spans = self.spans(vb_id, began_ns, ended_ns)
        return len(spans) > 1 or any(span.first_seqno < span.last_seqno for span in spans)

    def values(self) -> dict[bytes, list[tuple[int, int]]]:
        """Return each value that was ever committed, with partition and seqno."""
        found: dict[bytes, list[tuple[int, int]]] = {}
        for (vb_id, _), changes in self._changes.items():
            for change in changes:
                if change.value is not None:
                    found.setdefault(change.value, []).append((vb_id, change.seqno))
        return found


def advance(state: dict[bytes, Change], change: Change) -> None:
    """Let a change happen."""
    if change.value is None:
        state.pop(change.key, None)
    else:
        state[change.key] = change


def end_of(log: Log, uuid: int, seqno: int) -> int | None:
    """Return where a version ends in a history that ends at a seqno; None: it is not in there."""
    end = seqno
    for version, began in log:
        if version == uuid:
            return end
        end = min(end, began)
    return None


def _documents(entries: Sequence[bytes]) -> Iterator[bytes]:
    return (entry for entry in entries if key_of(entry).startswith(DEFAULT_COLLECTION_PREFIX))


def _change_of(entry: bytes) -> Change:
    *_, cas, _, rev_seqno = META.unpack_from(entry)
    is_gone = is_deleted(entry)
    return Change(
        key_of(entry)[1:], seqno_of(entry), cas, rev_seqno,
        None if is_gone else value_of(entry), 0 if is_gone else expiry_of(entry),
        0 if is_gone else int.from_bytes(entry[FLAGS_AT : FLAGS_AT + 4], "big"),
    )  # fmt: skip
