"""Whether the metadata store is older than what nodes have seen, as far as a view tells. Pure.

Each member says in its report what it has seen of the partitions that somebody misses a master of,
and of those whose record in the store is older (`failover.rules.election`).

Who calls it: the status of the cluster, and the restoration of the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from failover.coordinator.cluster_records import ReportedPartition
from failover.coordinator.cluster_view import ClusterView
from failover.coordinator.request_answers import name_of
from failover.rules.election import SuspectReport, knows_newer, must_speak
from failover.rules.isr import min_in_sync_of
from failover.rules.replication_record import ReplicationRecord

META_RESTORE = "dcpctl cluster meta restore"
"""What builds the records anew."""


class OlderRecord(NamedTuple):
    """A partition whose record in the store is older than one that was seen."""

    vb_id: int
    members: frozenset[str]
    """Who has seen a newer one."""


def _reports(view: ClusterView, vb_id: int) -> Iterator[SuspectReport]:
    for member, told in _told(view):
        if told.vb_id == vb_id:
            yield SuspectReport(
                member, told.epoch, told.version_epoch, told.end_seqno, 0, told.is_electable,
                told.seen, told.is_sure,
            )  # fmt: skip


def _told(view: ClusterView) -> Iterator[tuple[str, ReportedPartition]]:
    for member, stored in view.reports.items():
        if stored.item.mod_revision > view.begun_revision:
            for told in stored.content.partitions:
                yield member, told


def older_records(view: ClusterView) -> list[OlderRecord]:
    """Return the partitions whose record is older than what somebody says to have seen."""
    found: dict[int, set[str]] = {}
    for member, told in _told(view):
        stored = view.partitions.get(told.vb_id)
        if stored is not None and told.seen > stored.content.record.rank:
            found.setdefault(told.vb_id, set()).add(member)
    return [OlderRecord(vb_id, frozenset(members)) for vb_id, members in sorted(found.items())]


def silent_members(view: ClusterView, vb_id: int, record: ReplicationRecord) -> frozenset[str]:
    """Return the copies of which some have to report before anybody is elected by the record; none:
    it may be believed, or nobody misses its master.
    """
    reports = list(_reports(view, vb_id))
    needed = _needed(view, record)
    return must_speak(record, reports, 0, min_in_sync=needed) if reports else frozenset()


def _needed(view: ClusterView, record: ReplicationRecord) -> int:
    setting = None if view.cluster is None else view.cluster.content.min_in_sync
    return min_in_sync_of(setting, record.counted_copies)


def why_not_elected(view: ClusterView, vb_id: int, record: ReplicationRecord) -> tuple[str, str]:
    """Return why nobody is elected for a partition by its record, and what to do; ("", ""): nothing
    of the kind.
    """
    reports = list(_reports(view, vb_id))
    if newer := knows_newer(record, reports):
        names = names_of(view, newer)
        why = (
            f"the metadata store is older than what node {names} {_have(newer)} seen, so nobody is "
            "elected by it"
        )
        return why, f"`{META_RESTORE}` builds the records anew from what the nodes have"
    needed = _needed(view, record)
    if silent := must_speak(record, reports, 0, min_in_sync=needed):
        names = names_of(view, silent)
        some = len(silent) - needed + 1
        why = (
            f"nobody is elected before {some} of {names} {'has' if some == 1 else 'have'} said "
            "what the newest record is that it has seen: the metadata store may be older"
        )
        advice = f"Start {names}. What is lost for good, `{META_RESTORE} --accept-loss` gives up"
        return why, advice
    return "", ""


def names_of(view: ClusterView, members: frozenset[str]) -> str:
    """Return what the operator calls these members."""
    return ", ".join(sorted(name_of(view, member) for member in members))


def _have(members: frozenset[str]) -> str:
    return "has" if len(members) == 1 else "have"


def older_text(view: ClusterView, older: list[OlderRecord]) -> str:
    """Say of which partitions the store is older, and who knows it."""
    members = frozenset().union(*(each.members for each in older))
    return (
        f"the metadata store is older than what node {names_of(view, members)} {_have(members)} "
        f"seen: of {len(older)} partitions (vb {older[0].vb_id} is the first) it has an older "
        "record. Masters that run go on, nobody else is elected there, and no in-sync set changes"
    )
