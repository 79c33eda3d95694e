"""Keeps a `ClusterView` up to date: reads all keys once, then watches. Pure.

    READING --- all keys read ----> WATCHING --- Compacted --> READING
    READING --- no answer --------> PAUSED   --- pause over -> READING, or WATCHING where it was
    WATCHING --- Lost ------------> PAUSED
    any --- a new connection -----> READING: the store may be another one, so the view starts over

A store that has no record of the cluster, although there was one, has lost everything: it counts as
one that does not answer, and the view stays as it is.

A watch resumes at the view's revision + 1, which moves only with what was read or delivered. A
watch that delivers nothing for REWATCH_NS is begun again there: an idle watch and a dead one look
the same, and a new one costs one message.

Who calls it: the node's session with the store.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from failover.coordinator.cluster_view import ClusterView
from failover.coordinator.effects import (
    ANSWER_NS_MAX,
    RETRY_NS,
    Answered,
    CancelWatch,
    Delivered,
    Notice,
    StoreEffect,
    StoreEvent,
    Submit,
    Tag,
    Tick,
    ViewChanged,
    Watch,
)
from failover.metadata.metastore import Compacted, Lost, Range, RangeResult, WatchBatch

REWATCH_NS: Final = 5_000_000_000
"""How long a watch may be silent. It bounds how long a dead watch stays unnoticed."""

READER: Final = "reader"
EMPTIED_NS: Final = 1_000_000_000
"""Time between reads of a store that has lost all records."""
EMPTIED_TEXT: Final = (
    "cluster view: the metadata store has lost all records of this cluster. Nodes go on with what "
    "they know. `dcpctl cluster meta restore` builds the records anew"
)


class ReaderState(Enum):
    """See the module."""

    READING = auto()
    WATCHING = auto()
    PAUSED = auto()


ReaderEffect = StoreEffect | ViewChanged | Notice


class ViewReader:
    """See the module. Begins to read with the first event."""

    def __init__(self, view: ClusterView) -> None:
        self.view = view
        self.state = ReaderState.PAUSED
        self._must_read = True
        self._until_ns = 0
        """When the state ends by itself: a pause, a missing answer, a silent watch."""
        self.must_have_cluster = False
        """Whether the cluster's record was seen before."""
        self.is_emptied = False
        """Whether the store lacks it."""
        self._starts_over = True
        self._tag = Tag(READER, 0)
        self._watching: Tag | None = None

    def begin_again(self, now_ns: int) -> list[ReaderEffect]:
        """There is a new connection, perhaps to a store that went back: read all of it."""
        self._must_read = self._starts_over = True
        return self._read(now_ns)

    def on_event(self, now_ns: int, event: StoreEvent) -> list[ReaderEffect]:
        """Take one event; return what to do."""
        if isinstance(event, Tick):
            return self._tick(now_ns)
        if event.tag != self._tag:
            return []
        if isinstance(event, Answered):
            return self._answered(now_ns, event)
        return self._delivered(now_ns, event)

    def _tick(self, now_ns: int) -> list[ReaderEffect]:
        if now_ns < self._until_ns:
            return []
        return self._read(now_ns) if self._must_read else self._watch(now_ns)

    def _read(self, now_ns: int) -> list[ReaderEffect]:
        self.state = ReaderState.READING
        self._until_ns = now_ns + ANSWER_NS_MAX
        effects = self._end_watch()
        return [*effects, Submit(self._next_tag(), Range(self.view.keys.root, is_prefix=True))]

    def _watch(self, now_ns: int) -> list[ReaderEffect]:
        effects = self._end_watch()
        self.state = ReaderState.WATCHING
        self._until_ns = now_ns + REWATCH_NS
        self._watching = self._next_tag()
        return [*effects, Watch(self._watching, self.view.keys.root, self.view.revision + 1)]

    def _answered(self, now_ns: int, event: Answered) -> list[ReaderEffect]:
        assert self.state is ReaderState.READING
        if not isinstance(event.result, RangeResult):
            self._pause(now_ns)
            return [Notice(f"cluster view: the records were not read: {event.result}")]
        view, items = self.view, event.result.items
        knew_cluster = self.must_have_cluster or view.cluster is not None
        was_emptied = self.is_emptied
        self.is_emptied = knew_cluster and not any(item.key == view.keys.cluster for item in items)
        if self.is_emptied:
            self._pause(now_ns, EMPTIED_NS)
            return [] if was_emptied else [Notice(EMPTIED_TEXT)]
        before = view.unreadable.copy()
        take = view.start_over if self._starts_over else view.replace
        changed = take(items, event.result.revision)
        self._must_read = self._starts_over = False
        return [*self._watch(now_ns), ViewChanged(changed), *self._unreadable(before)]

    def _unreadable(self, before: dict[bytes, str]) -> list[ReaderEffect]:
        """Return a notice for each record that cannot be read and was not told before."""
        return [
            Notice(f"cluster: a record cannot be read: {text}")
            for key, text in self.view.unreadable.items()
            if before.get(key) != text
        ]

    def _delivered(self, now_ns: int, event: Delivered) -> list[ReaderEffect]:
        assert self.state is ReaderState.WATCHING
        message = event.message
        if isinstance(message, WatchBatch):
            self._until_ns = now_ns + REWATCH_NS
            before = self.view.unreadable.copy()
            return [ViewChanged(self.view.apply(message)), *self._unreadable(before)]
        self._watching = None
        if isinstance(message, Compacted):
            self._must_read = True
            return self._read(now_ns)
        assert isinstance(message, Lost)
        self._pause(now_ns)
        return [Notice(f"cluster view: the watch ended and begins again: {message.text}")]

    def _pause(self, now_ns: int, for_ns: int = RETRY_NS) -> None:
        self.state = ReaderState.PAUSED
        self._until_ns = now_ns + for_ns
        self._next_tag()

    def _end_watch(self) -> list[ReaderEffect]:
        tag, self._watching = self._watching, None
        return [CancelWatch(tag)] if tag is not None else []

    def _next_tag(self) -> Tag:
        self._tag = Tag(READER, self._tag.number + 1)
        return self._tag
