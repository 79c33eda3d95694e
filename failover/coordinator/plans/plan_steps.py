"""Carries a plan out: which records change next, and how far the plan is. Pure.

    copy wanted ──> added, being filled ──> in sync ──┐
                                                      ├─> the first is master ─> others dropped
    chain in sync ──> in the plan's order, handover ──┘

A partition's next step depends on its record and its wanted chain only. So a coordinator that
follows another one goes on where that stopped, and a partition that stands still holds up no other.

Who calls it: `failover.coordinator.partition_choices`, for the coordinator; `requests`, for
people.

Invariants
- a copy in sync is dropped only if as many as the chain has are in sync without it
- the master is never dropped: it hands over first
- a member is being filled with FILLING_MAX copies at most, and all that run with
  FILLING_IN_ALL_MAX
- the same view gives the same result
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from failover.coordinator.plans.placement import Chain, PlacementPlan, plan_placement
from failover.coordinator.record_writer import RecordChange
from failover.coordinator.records import PlanKind
from failover.coordinator.view import ClusterView
from failover.rules.isr import min_in_sync_of
from failover.rules.replication_record import (
    COPIES_MAX,
    ReplicationRecord,
    add_copy,
    drop_copies,
    reorder,
    want,
)

FILLING_MAX: Final = 128
"""Copies that one member fills at a time. A full copy protects at once, so fewer at a time protect
earlier; but each joins with a write to the metadata store, and one of 127 records takes as long as
one of a single record. The rate of bytes is bounded elsewhere
(`failover.replication.pace`)."""
FILLING_IN_ALL_MAX: Final = 512
"""Copies that all running members fill at a time: what masters read beside their work."""


class Progress(NamedTuple):
    """How far a plan is."""

    operation: str
    kind: PlanKind
    about: str
    asked_at_ms: int
    partitions: int
    """Partitions that the plan names."""
    done: int
    filling: int
    """Copies that are being filled for it now."""
    handovers: int
    """Partitions that have all their copies, and wait for their master."""
    waits_for: dict[str, int]
    """Members that do not run, or have no link to the master -> copies that wait for them."""


def eligible_members(view: ClusterView) -> dict[str, str]:
    """Return member -> rack of those that may have copies: not drained, and running or with copies
    already. One that is down and holds nothing cannot be filled.
    """
    holders = {copy for stored in view.partitions.values() for copy in stored.content.record.copies}
    return {
        member: stored.content.rack
        for member, stored in sorted(view.members.items())
        if not stored.content.is_drained and (view.stays(member) or member in holders)
    }


def unseen_members(view: ClusterView) -> list[str]:
    """Return the members that get no copy only because their process is not seen running: one that
    has just joined, or is down, and holds nothing yet.
    """
    able = eligible_members(view)
    return [
        member
        for member, stored in sorted(view.members.items())
        if member not in able and not stored.content.is_drained and member not in view.alive
    ]


def growth(view: ClusterView) -> PlacementPlan | None:
    """Return the placement to be reached if partitions have fewer copies than there can be; None:
    all have enough.
    """
    if view.cluster is None:
        return None
    racks = eligible_members(view)
    copies = min(view.cluster.content.copies, len(racks))
    present = {vb_id: stored.content.record.copies for vb_id, stored in view.partitions.items()}
    if all(len(chain) >= copies for chain in present.values()):
        return None
    return plan_placement(racks, copies, present)


def plan_changes(
    view: ClusterView, wanted: Mapping[int, Chain], busy: Collection[int]
) -> Iterator[RecordChange]:
    """Yield the next change of each partition that can change now, but for `busy` ones."""
    filling = Counter[str]()
    for stored in view.partitions.values():
        if stored.content.record.filling:
            filling.update(stored.content.record.filling)
    # What a node that is down was filling costs nobody anything, and must not hold up the others.
    in_all = sum(count for member, count in filling.items() if view.stays(member))
    able = {
        member
        for member in {member for chain in wanted.values() for member in chain}
        if member in view.members and view.stays(member) and filling[member] < FILLING_MAX
    }
    for vb_id, chain in wanted.items():
        found = view.partitions.get(vb_id)
        if found is None or vb_id in busy or is_done(view, found.content.record, chain):
            continue
        record = found.content.record
        kept = with_those_in_sync(view, record, chain)
        room = FILLING_IN_ALL_MAX - in_all
        after = next_record(view, record, kept, able if room >= len(kept) else ())
        if after is record or after is None:
            continue
        added = after.filling - record.filling
        filling.update(added)
        able.difference_update(member for member in added if filling[member] >= FILLING_MAX)
        in_all += len(added)
        yield RecordChange(vb_id, after, found)


def next_record(
    view: ClusterView, record: ReplicationRecord, chain: Chain, able: Collection[str]
) -> ReplicationRecord | None:
    """Return the record after the next step towards a chain, the same if there is none now. None:
    the partition has to wait. `able` are the members that can be filled now.
    """
    if record.master is None or record.branch is not None:
        return None  # an election or a branch comes first
    after = record
    if given_up := record.filling.difference(chain):
        after = drop_copies(after, given_up, in_sync_min=len(chain))
    for member in chain:
        if member not in after.copies and member in able and len(after.copies) < COPIES_MAX:
            after = add_copy(after, member)
    outside = [member for member in after.copies if member not in chain]
    if chain[0] in after.isr or not outside:
        ordered = (*(member for member in chain if member in after.copies), *outside)
        after = reorder(after, ordered) if ordered != after.copies else after
    master = _wanted_master(view, after, chain)
    if after.wanted_master != (None if master == after.master else master):
        after = want(after, master)
    surplus = _surplus(view, after, chain, outside) if outside else []
    return drop_copies(after, surplus, in_sync_min=len(chain)) if surplus else after


def _wanted_master(view: ClusterView, record: ReplicationRecord, chain: Chain) -> str | None:
    """Return who should be master now. It is the first of the chain, once that is in sync. While
    that does not run, a master that is not in the chain hands over to the next one that can.
    """
    first = chain[0]
    if record.master == first or (first in record.isr and view.stays(first)):
        return first
    if record.master in chain or view.stays(first):
        return record.master
    able = (member for member in chain if member in record.isr and view.stays(member))
    return next(able, record.master)


def _surplus(
    view: ClusterView, record: ReplicationRecord, chain: Chain, outside: Sequence[str]
) -> list[str]:
    """Return which of the copies that are not wanted can go now.

    Members count as in sync only while their processes run: the master takes dead ones out a moment
    later. Copies that are not in sync go last, because they may hold what others have lost.
    """
    in_sync = [member for member in record.isr if view.stays(member)]
    outside = [
        member
        for member in reversed(outside)
        if member not in {record.master, record.wanted_master}
    ]
    going = [member for member in outside if member in in_sync]
    going = going[: max(0, len(in_sync) - len(chain))]
    if set(chain) <= set(in_sync):
        going += [member for member in outside if member not in in_sync]
    setting = None if view.cluster is None else view.cluster.content.min_in_sync
    left = len(record.isr.difference(going))
    counted = record.counted_copies - len(set(going) - record.filling)
    is_enough = left >= max(len(chain), min_in_sync_of(setting, counted))
    return going if is_enough or record.isr.isdisjoint(going) else []


def with_those_in_sync(view: ClusterView, record: ReplicationRecord, chain: Chain) -> Chain:
    """Return the chain of a partition; while it is shorter than the cluster wants, with copies in
    sync beside it. A cancellation leaves such chains, and a plan that replaces it takes them over:
    nodes that were down when it was asked for come back, and copies that it gave up join before
    that is written. Copies of members that are drained are not kept.
    """
    if view.plan is None or view.cluster is None:
        return chain
    missing = view.cluster.content.copies - len(chain)
    if missing <= 0:
        return chain
    drained = {each for each, stored in view.members.items() if stored.content.is_drained}
    staying = (each for each in record.copies if each not in drained and view.stays(each))
    in_sync = (each for each in staying if each in record.isr)
    return (*chain, *[each for each in in_sync if each not in chain][:missing])


def is_done(view: ClusterView, record: ReplicationRecord, chain: Chain) -> bool:
    """Return whether a partition is as the plan wants it. A first copy that does not run becomes
    master when it is back (`ClusterRecord.masters_return_s`).
    """
    first, chain = chain[0], with_those_in_sync(view, record, chain)
    return (
        record.copies == chain
        and not record.filling
        and record.wanted_master in {None, record.master}
        and (record.master == first or (record.master is not None and not view.stays(first)))
    )


def is_plan_done(view: ClusterView, wanted: Mapping[int, Chain]) -> bool:
    """Return whether all partitions are as the plan wants them."""
    return all(
        (found := view.partitions.get(vb_id)) is not None
        and is_done(view, found.content.record, chain)
        for vb_id, chain in wanted.items()
    )


def progress_of(view: ClusterView) -> Progress | None:
    """Return how far the plan in the view is; None: there is none."""
    if view.plan is None:
        return None
    plan = view.plan.content
    done = filling = handovers = 0
    waits_for = Counter[str]()
    for vb_id, chain in view.wanted.items():
        found = view.partitions.get(vb_id)
        if found is None:
            continue
        record = found.content.record
        if is_done(view, record, chain):
            done += 1
            continue
        filling += len(record.filling.intersection(chain))
        handovers += record.isr.issuperset(chain) and record.master != chain[0]
        waits_for.update(
            each
            for each in chain
            if each not in record.isr
            and not (view.stays(each) and view.can_follow(each, record.master))
        )
    return Progress(
        plan.operation, plan.kind, plan.about, plan.asked_at_ms, len(plan.chains), done, filling,
        handovers, dict(waits_for),
    )  # fmt: skip
