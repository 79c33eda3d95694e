"""What a request of an operator comes to: a refusal, or what to write, with a preview. Pure.

    answer = drain(view, "n2", stamp)                        see `requests`
    if isinstance(answer, RequestRefused): answer.text is one line: what, why, and what to try
    for txn in answer.txns:
        result = <submit txn>          TxnResult.succeeded: it is written
                                       otherwise `why_not_written(view, result)`
                                       OutcomeUnknown: read `answer.check_key`, ask `was_written`

Who calls it: `requests`, `requests`, and the admin interface.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple, TypeAlias

from failover.coordinator.plans.placement import PlannedMove
from failover.coordinator.plans.plan_steps import progress_of
from failover.coordinator.records import (
    PlanKind,
    PlanRecord,
    RecordUnreadableError,
    decode_record,
)
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import KeyValue, Txn, TxnResult

GIVES_WAY: Final = frozenset({PlanKind.GROW, PlanKind.CANCEL})
"""Plans that an operator's plan replaces. Growth begins again by itself; a cancellation ends with
the plan that replaces it, which takes over its chains (`plan`)."""


class Stamp(NamedTuple):
    """Who asks, and when."""

    operation: str
    """Unique to the request."""
    asked_at_ms: int
    """Wall clock, told to people only."""


class RequestRefused(NamedTuple):
    """The request is refused, and nothing changes."""

    text: str
    """One line: what, why, and what to try."""


class Prepared(NamedTuple):
    """What a request would do, and how to write it."""

    what: str
    """The request in words, for example `drain n2`."""
    moves: tuple[PlannedMove, ...] = ()
    """Partitions whose chain changes; members by id. `member_counts` sums them up."""
    notes: tuple[str, ...] = ()
    """What the operator should know before: one line each."""
    txns: tuple[Txn, ...] = ()
    """To be submitted in this order; (): there is nothing to do."""
    check_key: bytes = b""
    check_value: bytes = b""
    """The key that the last transaction writes, and its value; b"": it deletes the key."""

    @property
    def has_plan(self) -> bool:
        """Whether copies or masters move, which takes time; see `plan_steps.progress_of`."""
        return bool(self.moves) and bool(self.txns)


Answer: TypeAlias = Prepared | RequestRefused


class MemberCounts(NamedTuple):
    """Copies and preferred masters of one member, before a plan and after it."""

    member: str
    name: str
    copies_before: int
    copies_after: int
    masters_before: int
    masters_after: int


def name_of(view: ClusterView, member: str) -> str:
    """Return what the operator calls a member."""
    stored = view.members.get(member)
    return member if stored is None or not stored.content.name else stored.content.name


def member_named(view: ClusterView, text: str) -> str | RequestRefused:
    """Return the member with this name, id, or HOST:PORT of its key-value port."""
    found = [
        member
        for member, stored in sorted(view.members.items())
        if text in {stored.content.name, member, stored.content.address}
    ]
    if len(found) == 1:
        return found[0]
    names = ", ".join(sorted(name_of(view, member) for member in view.members)) or "none"
    return RequestRefused(f"there is no node {text!r} in this cluster; its nodes are {names}")


def member_counts(view: ClusterView, moves: Iterable[PlannedMove]) -> list[MemberCounts]:
    """Return what moves mean for each member, by name."""
    copies, masters = Counter[str](), Counter[str]()
    for stored in view.partitions.values():
        copies.update(stored.content.record.copies)
        masters[stored.content.record.copies[0]] += 1
    copies_after, masters_after = copies.copy(), masters.copy()
    for move_ in moves:
        copies_after.subtract(move_.present)
        copies_after.update(move_.wanted)
        masters_after.subtract(move_.present[:1])
        masters_after.update(move_.wanted[:1])
    found = [
        MemberCounts(
            member, name_of(view, member), copies[member], copies_after[member], masters[member],
            masters_after[member],
        )
        for member in view.members
    ]  # fmt: skip
    return sorted(found, key=lambda counts: counts.name)


def plan_words(view: ClusterView, plan: PlanRecord) -> str:
    """Return a plan in words, for example `drain n2`."""
    if plan.kind is PlanKind.GROW:
        return "the addition of missing copies"
    if plan.kind is PlanKind.SET:
        return "set --copies"
    about = name_of(view, plan.about) if plan.about else ""
    return f"{plan.kind} {about}".strip()


def refused_unreadable(view: ClusterView) -> RequestRefused | None:
    """Refuse requests while this node has not read the cluster's records, or cannot. Ask it before
    any other function here.
    """
    for key in (view.keys.cluster, view.keys.plan):
        if key in view.unreadable:
            return RequestRefused(view.unreadable[key])
    if not view.is_loaded or view.cluster is None:
        return RequestRefused(
            "this node has not read the metadata store yet; check that it runs, and try again"
        )
    return None


def why_not_written(view: ClusterView, result: TxnResult) -> str:
    """Return why a transaction of a request was not carried out, in one line."""
    assert not result.succeeded
    found = result.ranges[0].items if result.ranges else ()
    if not found:
        return (
            "the cluster changed at the same moment, so nothing was written; look at "
            "`dcpctl cluster status` and try again"
        )
    try:
        plan = decode_record(found[0], PlanRecord)
    except RecordUnreadableError as error:
        return str(error)
    return _under_way_text(view, plan)


def was_written(prepared: Prepared, found: Iterable[KeyValue]) -> bool:
    """Return whether a request whose outcome is unknown was written, by what its `check_key` has
    now. A plan that ended meanwhile counts as not written: `status` shows its result.
    """
    value = next((item.value for item in found), b"")
    return value == prepared.check_value


def refused_by_plan(view: ClusterView) -> RequestRefused | None:
    """Refuse a request while a plan is under way that gives way to no other."""
    if refused := refused_unreadable(view):
        return refused
    if view.plan is None or view.plan.content.kind in GIVES_WAY:
        return None
    return RequestRefused(_under_way_text(view, view.plan.content))


def gives_way(result: TxnResult) -> bool:
    """Return whether what stopped a transaction of a request is over, or gives way to it: then the
    request is worth another try with a newer view.
    """
    found = result.ranges[0].items if result.ranges else ()
    if not found:
        return True
    try:
        return decode_record(found[0], PlanRecord).kind in GIVES_WAY
    except RecordUnreadableError:
        return False


def _under_way_text(view: ClusterView, plan: PlanRecord) -> str:
    return (
        f"{plan_words(view, plan)} is under way: {done_text(view, plan)}. Wait for its end, or "
        "stop it with `dcpctl cluster cancel`"
    )


def done_text(view: ClusterView, plan: PlanRecord) -> str:
    """Return in words how far a plan is."""
    found = progress_of(view)
    if found is None or found.operation != plan.operation:
        return f"{len(plan.chains)} partitions are to change"
    return f"{found.done} of {found.partitions} partitions are done"
