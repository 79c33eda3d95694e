"""What happens in a run that a story tells: a kind, who it happened to, and words.

Processes, records and nodes tell their moments to the world (`World.tell`). That draws nothing and
makes no events, so a run is the same whether anybody reads them. `sim.reached` counts kinds, and
`sim.story` prints lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Final, NamedTuple

from failover.rules.replication_record import ReplicationRecord
from vbucket.engine.partition import Partition, VbState

STORE: Final = "store"
"""Who tells of records: the metadata store."""

_STATE: Final = attrgetter(
    "state", "leader_epoch", "vb_uuid", "incomplete_snapshot", "purge_seqno", "high_seqno"
)
Tell = Callable[[str, str, int], None]
"""Tells a kind, words and a partition of one node."""


class Moment(NamedTuple):
    """See the module. `vb_id` is None where a moment is about no single partition."""

    at_ns: int
    kind: str
    who: str
    vb_id: int | None
    text: str


def short(member: str) -> str:
    """Return a member as stories name it: n1 is the first folder of machine n1, n1-2 the next."""
    name, _, folder = member.rpartition("-")
    return name if folder == "1" else member


def names(members: Iterable[str]) -> str:
    """Return members in a fixed order."""
    return ", ".join(short(member) for member in sorted(members)) or "nobody"


def of_record(before: ReplicationRecord | None, record: ReplicationRecord) -> tuple[str, str]:
    """Return the kind of a record's change, and what it says."""
    says = (
        f"epoch {record.epoch}: master {names([record.master] if record.master else [])},"
        f" in-sync set {names(record.isr)}"
    )
    if before is None:
        return "record", f"{says}, copies {names(record.copies)}"
    if record.epoch > before.epoch:
        kind = _of_epoch(before, record)
        gone = before.isr - record.isr
        return kind, f"{says}{f' (without {names(gone)})' if gone else ''}"
    if record.copies != before.copies:
        return "copies", f"{says}, copies {names(record.copies)} instead of {names(before.copies)}"
    joined, left = record.isr - before.isr, before.isr - record.isr
    if joined:
        return "in-sync set grows", f"{names(joined)} joins: {says}"
    if left:
        return "in-sync set shrinks", f"{names(left)} leaves: {says}"
    if before.branch is not None and record.branch is None:
        return "branch done", says
    if record.wanted_master != before.wanted_master:
        wanted = record.wanted_master
        return "wanted master", f"{says}; wanted master {names([wanted] if wanted else [])}"
    return "record", says


def _of_epoch(before: ReplicationRecord, record: ReplicationRecord) -> str:
    if record.branch is not None and before.branch is None:
        return "branch"
    if record.handover is not None:
        return "handover"
    if record.master is None:
        return "record built anew"
    if record.unclean_epoch == record.epoch:
        return "unclean election"
    return "election of the same master" if record.master == before.master else "election"


class NodeWatch:
    """Looks at the partitions of one process, and tells what changed since it looked last."""

    def __init__(self, tell: Tell, partitions: Iterable[Partition]) -> None:
        self._tell = tell
        self._parts = tuple(partitions)
        self._seen = [*map(_STATE, self._parts)]
        self._full: set[str] = set()
        """Members whose windows are full."""

    def look(self) -> bool:
        """Tell what changed; return whether anything did."""
        seen, self._seen = self._seen, [*map(_STATE, self._parts)]
        if seen == self._seen:
            return False
        for part, before, now in zip(self._parts, seen, self._seen, strict=True):
            if now[-1] < before[-1]:
                self._rolled_back(part, before[-1])
            if now[:-1] != before[:-1]:
                self._changed(part, *before[:-1])
        return True

    def _rolled_back(self, part: Partition, from_seqno: int) -> None:
        to_seqno = part.high_seqno
        is_replica = part.state == VbState.REPLICA
        kind = "rollback of a replica" if is_replica else "rollback of a master"
        self._tell(
            f"{kind} to 0" if is_replica and not to_seqno else kind,
            f"gives up its changes from {from_seqno} down to {to_seqno}",
            part.vb_id,
        )

    def _changed(
        self, part: Partition, state: VbState, epoch: int, vb_uuid: int, window: object, purge: int
    ) -> None:
        vb_id, now = part.vb_id, part.incomplete_snapshot
        if now is not None and window is None:
            text = f"begins a snapshot from {now.start} to {now.end}"
            if now.purge > now.start:
                text += f"; deletions up to {now.purge} are purged"
            self._tell("snapshot begun", text, vb_id)
        elif now is None and window is not None:
            end = getattr(window, "end", 0)
            is_done = part.high_seqno >= end
            kind = "snapshot completed" if is_done else "snapshot given up"
            self._tell(kind, f"has {part.high_seqno} of a snapshot up to {end}", vb_id)
        if part.vb_uuid != vb_uuid:
            start = part.failover.current.seqno
            text = f"has version {part.vb_uuid:x} from {start} on, before that {vb_uuid:x}"
            self._tell("version", text, vb_id)
        if part.purge_seqno > purge:
            self._tell("purge", f"has purged deletions up to {part.purge_seqno}", vb_id)
        if part.state != state or (part.state == VbState.ACTIVE and part.leader_epoch != epoch):
            self._tell(_STATES[part.state], f"{_WORDS[part.state]} {_where(part)}", vb_id)

    def cut_off(self, vb_ids: Iterable[int], why: str) -> None:
        """Snapshots of these partitions that are under way do not go on for now."""
        for vb_id in vb_ids:
            if (window := self._parts[vb_id].incomplete_snapshot) is not None:
                self._tell("snapshot cut off", f"{why} within a snapshot up to {window.end}", vb_id)

    def windows(self, full: Iterable[str]) -> None:
        """Tell of members whose windows are full now, and were not before."""
        now = {*full}
        if now == self._full:
            return
        for member in sorted(now - self._full):
            text = f"has as much under way to {short(member)} as it may"
            self._tell("window full", text, -1)
        self._full = now


def _where(part: Partition) -> str:
    return (
        f"in epoch {part.leader_epoch}, version {part.vb_uuid:x}: changes up to"
        f" {part.high_seqno}, synced {part.synced_seqno}, committed {part.committed_seqno}"
    )


_STATES: Final = {
    VbState.ACTIVE: "mastership", VbState.REPLICA: "follows", VbState.PENDING: "promoted",
    VbState.DEAD: "dead", VbState.FENCED: "fence",
}  # fmt: skip
_WORDS: Final = {
    VbState.ACTIVE: "serves", VbState.REPLICA: "is a replica", VbState.PENDING: "prepares to serve",
    VbState.DEAD: "does not hold it", VbState.FENCED: "is master, and may not answer,",
}  # fmt: skip
