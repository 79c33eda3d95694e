"""Plans: how they are written down, and when they begin and end. Pure.

**Requests are written down as transactions**: plans, members and the cluster's numbers.

Who calls it: `requests`, and the coordinator.

Invariants
- every transaction compares what the request was decided by: the plan, the members, the cluster
- a plan names members that exist, and gives no copy to a drained one
- a plan that replaces a cancellation has the chains that this has not reached

**Plans begin and end**: missing copies are added without a request, and a plan that is done is
deleted.

Who calls it: the coordinator, when no record is to be written.

Invariants
- every transaction compares the coordinator's term and the plan that is in the view, and for a new
  plan the members and the cluster's numbers
- no operator's plan is replaced here. An automatic one is, when other members may have copies
- a member is removed only when no record names it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from failover.coordinator.plans.placement import Chain, PlacementError, PlannedMove, plan_placement
from failover.coordinator.plans.plan_steps import (
    eligible_members,
    growth,
    is_done,
    is_plan_done,
    unseen_members,
)
from failover.coordinator.plans.request_answers import (
    Answer,
    Prepared,
    RequestRefused,
    Stamp,
    name_of,
    plan_words,
    refused_by_plan,
)
from failover.coordinator.records import (
    ClusterRecord,
    KeyKind,
    MemberRecord,
    PlanKind,
    PlanRecord,
    RemovedRecord,
    encode_record,
)
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import (
    TXN_OPERATIONS_MAX,
    Compare,
    Delete,
    Operation,
    Put,
    Range,
    Txn,
    if_absent,
    if_created_at,
    if_unchanged,
)
from failover.rules.isr import min_in_sync_of

_COMPARES_SPARE: Final = 8
"""Compares of a transaction beside those of members."""


def placed(
    view: ClusterView,
    stamp: Stamp,
    what: str,
    kind: PlanKind,
    copies: int,
    *,
    about: str = "",
    changed: Mapping[str, MemberRecord] | None = None,
    cluster: ClusterRecord | None = None,
    copies_before: int = 0,
) -> Answer:
    """Plan all partitions anew, with members and cluster as they are changed by the request."""
    racks = {
        member: rack
        for member, rack in eligible_members(view).items()
        if not (changed and member in changed)
    }
    chains = {vb_id: stored.content.record.copies for vb_id, stored in view.partitions.items()}
    present = chains | taken_over(view)
    try:
        placement = plan_placement(racks, copies, present)
    except PlacementError:
        return RequestRefused(
            f"{what} leaves no node that may have copies; add a node with `dcpctl cluster join`, "
            "or undrain one"
        )
    notes = [
        f"{name_of(view, member)} gets no copy: it is a member and its process is not seen running."
        " Start it or look at its log, and ask again when `dcpctl cluster status` shows it up"
        for member in unseen_members(view)
        if not (changed and member in changed)
    ]
    if len(racks) < copies:
        notes.append(
            f"{copies} copies are wanted and {len(racks)} nodes may have one: each partition gets "
            f"{len(racks)} until more nodes join"
        )
    if any(racks.values()) and not all(racks.values()):
        unnamed = sorted(name_of(view, member) for member, rack in racks.items() if not rack)
        notes.append(
            f"racks do not count, because {', '.join(unnamed)} names none; name one with --rack "
            "when the node joins"
        )
    wanted = {each.vb_id: each.wanted for each in placement.moves}
    return planned(
        view, stamp, what, kind, wanted, about=about, changed=changed, cluster=cluster,
        copies_before=copies_before, notes=tuple(notes),
    )  # fmt: skip


def planned(
    view: ClusterView,
    stamp: Stamp,
    what: str,
    kind: PlanKind,
    wanted: Mapping[int, Chain],
    *,
    about: str = "",
    changed: Mapping[str, MemberRecord] | None = None,
    cluster: ClusterRecord | None = None,
    copies_before: int = 0,
    notes: tuple[str, ...] = (),
) -> Answer:
    """Return the request that writes these chains as the plan, and what else it changes. What a
    cancellation has still to do becomes a part of the plan.
    """
    if refused := refused_by_plan(view):
        return refused
    wanted = {**taken_over(view), **wanted}
    members = sorted({member for chain in wanted.values() for member in chain})
    if len(members) > TXN_OPERATIONS_MAX - _COMPARES_SPARE:
        return RequestRefused(f"{len(members)} nodes are too many for one plan")
    puts = [member_put(view, member) for member in (changed or {}).values()]
    if cluster is not None:
        puts.append(Put(view.keys.cluster, encode_record(cluster)))
        notes = (*notes, *number_notes(view, cluster))
    keys = {put.key for put in puts} | {member_key(view, member) for member in members}
    keys.discard(view.keys.cluster)
    compares = (*compares_of_all(view), *(unchanged(view, key) for key in sorted(keys)))
    if wanted:
        plan = plan_put(view, stamp, kind, wanted, about=about, copies_before=copies_before)
        puts.append(plan)
    elif all(view.value(put.key) == put.value for put in puts):
        return Prepared(what, notes=notes)
    return prepared_of(what, moves_of(view, wanted), notes, compares, puts)


def taken_over(view: ClusterView) -> dict[int, Chain]:
    """Return the chains of a cancellation under way that are not reached yet. Whoever replaces it
    has to reach them: it gives up copies that are being filled, and drops what is too many.
    """
    if view.plan is None or view.plan.content.kind is not PlanKind.CANCEL:
        return {}
    return {
        vb_id: chain
        for vb_id, chain in view.wanted.items()
        if (found := view.partitions.get(vb_id)) is not None
        and not is_done(view, found.content.record, chain)
    }


def moves_of(view: ClusterView, wanted: Mapping[int, Chain]) -> tuple[PlannedMove, ...]:
    """Return what chains change, by partition."""
    return tuple(
        PlannedMove(vb_id, view.partitions[vb_id].content.record.copies, chain)
        for vb_id, chain in sorted(wanted.items())
        if chain != view.partitions[vb_id].content.record.copies
    )


def plan_put(
    view: ClusterView,
    stamp: Stamp,
    kind: PlanKind,
    wanted: Mapping[int, Chain],
    *,
    about: str = "",
    copies_before: int = 0,
) -> Put:
    """Return what writes a plan."""
    plan = plan_record(
        stamp.operation, kind, wanted, asked_at_ms=stamp.asked_at_ms, about=about,
        copies_before=copies_before,
    )  # fmt: skip
    return Put(view.keys.plan, encode_record(plan))


def plan_record(
    operation: str,
    kind: PlanKind,
    wanted: Mapping[int, Chain],
    *,
    asked_at_ms: int = 0,
    about: str = "",
    copies_before: int = 0,
    members: Iterable[str] = (),
) -> PlanRecord:
    """Return a plan with these chains; `members` are named beside those of the chains."""
    named = sorted({*members, *(member for chain in wanted.values() for member in chain)})
    index = {member: number for number, member in enumerate(named)}
    return PlanRecord(
        operation=operation, kind=kind, asked_at_ms=asked_at_ms, about=about,
        copies_before=copies_before, members=tuple(named),
        chains={
            vb_id: tuple(index[member] for member in chain)
            for vb_id, chain in sorted(wanted.items())
        },
    )  # fmt: skip


def removal(view: ClusterView, member: str) -> tuple[Operation, ...]:
    """Return what removes a member: its record, its name, and what its process wrote."""
    stored = view.members.get(member)
    operations: list[Operation] = [Put(view.keys.removed, encode_record(RemovedRecord()))]
    operations += [
        Delete(view.keys.of_member(kind, member))
        for kind in (KeyKind.MEMBER, KeyKind.ALIVE, KeyKind.SUSPECT)
    ]
    if stored is not None and stored.content.name:
        operations.append(Delete(view.keys.of_name(stored.content.name)))
    return tuple(operations)


def compares_of_all(view: ClusterView) -> tuple[Compare, ...]:
    """Return the compares of every request: on the plan and the cluster's record."""
    return unchanged(view, view.keys.plan), unchanged(view, view.keys.cluster)


def unchanged(view: ClusterView, key: bytes) -> Compare:
    """Return the compare that holds while a key is as the view has it."""
    mod_revision = view.mod_revision(key)
    return if_unchanged(key, mod_revision) if mod_revision else if_absent(key)


def prepared_of(
    what: str,
    moves: tuple[PlannedMove, ...],
    notes: tuple[str, ...],
    compares: Iterable[Compare],
    then: Iterable[Operation],
) -> Prepared:
    """Return a request that one transaction writes. Its last operation shows that it happened."""
    operations = tuple(then)
    last = operations[-1]
    plan_key = next(compare.key for compare in compares)
    txn = Txn(tuple(compares), operations, (Range(plan_key),))
    value = last.value if isinstance(last, Put) else b""
    return Prepared(what, moves, notes, (txn,), last.key, value)


def member_key(view: ClusterView, member: str) -> bytes:
    """Return the key of a member's record."""
    return view.keys.of_member(KeyKind.MEMBER, member)


def member_put(view: ClusterView, record: MemberRecord) -> Put:
    """Return what writes a member's record."""
    return Put(member_key(view, record.member), encode_record(record))


def with_drained(view: ClusterView, member: str, *, is_drained: bool) -> MemberRecord:
    """Return a member's record, drained or not."""
    return msgspec.structs.replace(view.members[member].content, is_drained=is_drained)


def number_notes(view: ClusterView, cluster: ClusterRecord) -> tuple[str, ...]:
    """Say if writes stop with a number of members in sync that many partitions do not have."""
    records = [stored.content.record for stored in view.partitions.values()]
    short = sum(
        len(record.isr) < min_in_sync_of(cluster.min_in_sync, record.counted_copies)
        for record in records
    )
    if not short:
        return ()
    least = cluster.min_in_sync or "a majority"
    return (f"{short} partitions take no writes until {least} of their copies are in sync",)


MEMBERS_MAX: Final = TXN_OPERATIONS_MAX - 3
"""Members of an automatic plan: each takes a compare, beside those of term, plan and cluster."""


class KeptPlan(NamedTuple):
    """A transaction that begins or ends a plan, and what to log when it is written."""

    txn: Txn
    text: str


class PlanKeeper:
    """See the module. `owner` is unique to this process."""

    def __init__(self, view: ClusterView, owner: str) -> None:
        self._view = view
        self._owner = owner
        self._looked_at = 0
        """The view's revision when it was looked at last."""
        self._written_at = 0
        """The revision of the last transaction of this core: an older view does not have it."""

    def due(self, term: int) -> KeptPlan | None:
        """Return what begins or ends a plan now; None: nothing, or nothing has changed since."""
        view = self._view
        if view.revision == self._looked_at or view.revision < self._written_at:
            return None
        self._looked_at = view.revision
        if view.keys.plan in view.unreadable:
            return None
        plan = None if view.plan is None else view.plan.content
        if plan is not None and is_plan_done(view, view.wanted):
            return self._ended(plan, term)
        return self._grown(plan, term) if plan is None or plan.kind is PlanKind.GROW else None

    def written(self, revision: int) -> None:
        """The last step was written at a revision."""
        self._written_at = revision

    def failed(self) -> None:
        """The last step was not written, or nobody knows: look again."""
        self._looked_at = 0

    def _ended(self, plan: PlanRecord, term: int) -> KeptPlan:
        view = self._view
        then: list[Operation] = [Delete(view.keys.plan)]
        if plan.kind is PlanKind.REMOVE and plan.about in view.members:
            is_named = any(
                plan.about in stored.content.record.copies for stored in view.partitions.values()
            )
            then += () if is_named else removal(view, plan.about)
        compares = (if_created_at(view.keys.leader, term), unchanged(view, view.keys.plan))
        text = f"cluster: {plan_words(view, plan)} is done, {len(plan.chains)} partitions"
        return KeptPlan(Txn(compares, tuple(then)), text)

    def _grown(self, plan: PlanRecord | None, term: int) -> KeptPlan | None:
        view = self._view
        members = eligible_members(view)
        if plan is not None and set(plan.members) == members.keys():
            return None
        if not members or len(members) > MEMBERS_MAX:
            return None
        placement = growth(view)
        if placement is None:
            if plan is None or not self._is_in_vain(plan):
                return None
            return self._ended(plan, term)
        wanted = {move.vb_id: move.wanted for move in placement.moves}
        operation = f"{self._owner}.grow.{view.revision}"
        record = plan_record(operation, PlanKind.GROW, wanted, members=members)
        keys = [view.keys.of_member(KeyKind.MEMBER, member) for member in members]
        compares = (
            if_created_at(view.keys.leader, term),
            *compares_of_all(view),
            *(unchanged(view, key) for key in keys),
        )
        put = Put(view.keys.plan, encode_record(record))
        return KeptPlan(
            Txn(compares, (put,)), f"cluster: copies of {len(wanted)} partitions follow"
        )

    def _is_in_vain(self, plan: PlanRecord) -> bool:
        """Whether a plan waits for members that were removed, while no copy is being filled."""
        view = self._view
        is_filling = any(stored.content.record.filling for stored in view.partitions.values())
        return not is_filling and not set(plan.members) <= view.members.keys()
