"""Begins and ends plans: missing copies are added without a request, and a plan that is done is
deleted. Pure.

Who calls it: the coordinator, when no record is to be written.

Invariants
- every transaction compares the coordinator's term and the plan that is in the view, and for a new
  plan the members and the cluster's numbers
- no operator's plan is replaced here. An automatic one is, when other members may have copies
- a member is removed only when no record names it
"""

from __future__ import annotations

from typing import Final, NamedTuple

from failover.coordinator.cluster_keys import KeyKind
from failover.coordinator.cluster_records import PlanKind, PlanRecord, encode_record
from failover.coordinator.cluster_view import ClusterView
from failover.coordinator.plan_steps import eligible_members, growth, is_plan_done
from failover.coordinator.plan_writing import compares_of_all, plan_record, removal, unchanged
from failover.coordinator.request_answers import plan_words
from failover.metadata.metastore import (
    TXN_OPERATIONS_MAX,
    Delete,
    Operation,
    Put,
    Txn,
    if_created_at,
)

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
            return None
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
