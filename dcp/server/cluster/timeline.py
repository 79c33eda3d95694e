"""What happened in the cluster while this node looked on: for people, and only in memory.

A look compares the view of the metadata store with what it was at the look before. So what begins
and ends between two looks is not told. The same that goes on at the next look, as an election of
341 partitions or a rebalance does, is one event that counts more partitions.

Invariant: the last EVENTS_KEPT events are kept, and the memory does not grow.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from dcp.server.operate.cluster_reports import ClusterEvent
from failover.coordinator.plans.request_answers import name_of, plan_words
from failover.coordinator.view import ClusterView
from failover.rules.replication_record import ReplicationRecord

EVENTS_KEPT: Final = 200
GOES_ON_S: Final = 10.0
"""The same within this time is the same event."""


class _Subject(NamedTuple):
    """What an event is about; what differs in `count` only is the same event."""

    kind: str
    node: str = ""
    before: str = ""
    """Of masters: the node that was master before; "": none. Of a plan: its words."""


class _Event:
    """An event that may go on."""

    def __init__(self, subject: _Subject) -> None:
        self.subject = subject
        self.count = 0
        """Partitions."""
        self.at_s = 0.0


class Timeline:
    """See the module."""

    def __init__(self, view: ClusterView) -> None:
        self._events: deque[_Event] = deque(maxlen=EVENTS_KEPT)
        """The newest one last."""
        self._view = view
        self._revision = 0
        self._alive: frozenset[str] | None = None
        """None: there was no look yet."""
        self._leader: str | None = None
        self._plan = ""
        """The plan under way in words; "": none."""
        self._records: dict[int, ReplicationRecord] = {}

    def events(self) -> list[ClusterEvent]:
        """Return what was seen, the newest first."""
        return [
            ClusterEvent(at=event.at_s, kind=event.subject.kind, what=_words(event))
            for event in sorted(self._events, key=lambda event: -event.at_s)
        ]

    def look(self, now_s: float) -> None:
        """Note what is not as it was. `now_s` is Unix time."""
        view = self._view
        if not view.is_loaded or view.revision == self._revision:
            return
        self._revision = view.revision
        alive = frozenset(view.alive)
        leader = None if view.leader is None else view.leader.content.member
        plan = "" if view.plan is None else plan_words(view, view.plan.content)
        records = {vb_id: stored.content.record for vb_id, stored in view.partitions.items()}
        if self._alive is not None:
            found = Counter[_Subject](self._partitions(records))
            found.update(self._others(self._alive, alive, leader, plan))
            for subject, count in found.items():
                self._note(subject, count, now_s)
        self._alive, self._leader, self._plan, self._records = alive, leader, plan, records

    def _note(self, subject: _Subject, count: int, now_s: float) -> None:
        for event in self._events:
            if event.subject == subject and event.at_s >= now_s - GOES_ON_S:
                break
        else:
            event = _Event(subject)
            self._events.append(event)
        event.count += count
        event.at_s = now_s

    def _others(
        self, before: frozenset[str], alive: frozenset[str], leader: str | None, plan: str
    ) -> Iterator[_Subject]:
        for member in before - alive:
            yield _Subject("down", self._name(member))
        for member in alive - before:
            yield _Subject("up", self._name(member))
        if leader is not None and leader != self._leader:
            yield _Subject("coordinator", self._name(leader))
        if plan != self._plan and self._plan:
            yield _Subject("plan", before=f"ended: {self._plan}")
        if plan != self._plan and plan:
            yield _Subject("plan", before=f"begun: {plan}")

    def _partitions(self, records: dict[int, ReplicationRecord]) -> Iterator[_Subject]:
        """Yield elections, and who left and joined in-sync sets: one for each partition."""
        for vb_id, record in records.items():
            before = self._records.get(vb_id)
            if before is None or before is record:
                continue
            if before.master != record.master:
                kind = self._kind_of(record)
                yield _Subject(kind, self._name(record.master), self._name(before.master))
            for member in before.isr - record.isr:
                yield _Subject("left", self._name(member))
            for member in record.isr - before.isr:
                yield _Subject("joined", self._name(member))

    @staticmethod
    def _kind_of(record: ReplicationRecord) -> str:
        if record.master is None:
            return "orphaned"
        if record.unclean_epoch == record.epoch:
            return "unclean"
        return "elected" if record.handover is None else "moved"

    def _name(self, member: str | None) -> str:
        return "" if member is None else name_of(self._view, member)


def _words(event: _Event) -> str:
    kind, node, before = event.subject
    what = f"{event.count:,} partition{'' if event.count == 1 else 's'}"
    was = f"; before it was {before}" if before else ""
    return {
        "down": f"node {node} is down",
        "up": f"node {node} is up",
        "coordinator": f"node {node} is the coordinator",
        "plan": before,
        "orphaned": f"{what} lost their master{was}",
        "elected": f"node {node} was elected master of {what}{was}",
        "moved": f"node {node} took over as master of {what}{was}",
        "unclean": f"node {node} was elected master of {what} without being in sync{was}:"
        " answered changes may be lost",
        "left": f"node {node} left the in-sync sets of {what}",
        "joined": f"node {node} joined the in-sync sets of {what}",
    }[kind]
