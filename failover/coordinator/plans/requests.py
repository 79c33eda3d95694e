"""What operators ask for: moves of copies and masters, failover, changes of the cluster's numbers.
Pure.

Each function takes a view and returns what to write, with a preview, or why it is refused
(`request_answers` says how to use that). Ask `refused_unreadable(view)` first. How far a plan is
says `plan_steps.progress_of(view)`.

A plan is one record, <root>plan, and there is one at a time. So the second of two requests at once
is refused, unless the first one is a cancellation or growth: those give way. The coordinator
carries the plan out (`plan_steps`) and deletes it at its end.

Who calls it: the admin interface of any node; the simulator.

Invariant: a request that changes nothing has no transactions.

`failover` gives partitions of a master to another copy, cleanly or not. Before an operator decides
on an unclean one, `unclean_preview` says what it would do to them, as far as a view tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Final

import msgspec

from failover.coordinator.plans.placement import Chain
from failover.coordinator.plans.plan import (
    compares_of_all,
    member_key,
    member_put,
    moves_of,
    number_notes,
    placed,
    plan_put,
    planned,
    prepared_of,
    removal,
    taken_over,
    unchanged,
    with_drained,
)
from failover.coordinator.plans.request_answers import (
    Answer,
    Prepared,
    RequestRefused,
    Stamp,
    member_named,
    name_of,
    plan_words,
    refused_by_plan,
    refused_unreadable,
)
from failover.coordinator.records import (
    ClusterRecord,
    KeyKind,
    OperatorCommand,
    PlanKind,
    ReportedPartition,
    encode_record,
)
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import TXN_OPERATIONS_MAX, Compare, Put, Txn, if_unchanged
from failover.rules.replication_record import ReplicationRecord

CLUSTER_COPIES_MAX: Final = 4
"""A master and three replicas: clients know no more."""
_EMPTYING: Final = frozenset({PlanKind.DRAIN, PlanKind.REMOVE})
"""Plans that move everything away from the node that they are about."""
MASTERS_RETURN_S_MAX: Final = 86_400.0
"""A longer time is a mistake: 0 turns the return of masters off."""


def rebalance(view: ClusterView, stamp: Stamp) -> Answer:
    """Spread copies and masters evenly over all members that are not drained."""
    what = "rebalance"
    return placed(view, stamp, what, PlanKind.REBALANCE, _cluster(view).copies)


def move(view: ClusterView, vb_id: int, to: str, stamp: Stamp) -> Answer:
    """Make a node the master of a partition. If it holds no copy, it gets that of the master."""
    member = member_named(view, to)
    if isinstance(member, RequestRefused):
        return member
    stored = view.partitions.get(vb_id)
    if stored is None:
        return RequestRefused(
            f"there is no partition {vb_id} with a readable record; 0 to "
            f"{max(view.partitions, default=0)} are there"
        )
    if why := _why_no_copies(view, member):
        return RequestRefused(why)
    record = stored.content.record
    copies = taken_over(view).get(vb_id, record.copies)
    others = [copy for copy in copies if copy != member]
    if member not in copies and len(others) >= _cluster(view).copies:
        others.remove(record.master if record.master in others else copies[0])
    wanted = {vb_id: (member, *others)}
    what = f"move partition {vb_id} to {name_of(view, member)}"
    return planned(view, stamp, what, PlanKind.MOVE, wanted)


def drain(view: ClusterView, node: str, stamp: Stamp) -> Answer:
    """Move all copies and masters away from a node, and give it none until `undrain`."""
    member = member_named(view, node)
    if isinstance(member, RequestRefused):
        return member
    what = f"drain {name_of(view, member)}"
    after = {member: with_drained(view, member, is_drained=True)}
    return placed(
        view, stamp, what, PlanKind.DRAIN, _cluster(view).copies, about=member, changed=after
    )


def undrain(view: ClusterView, node: str, stamp: Stamp) -> Answer:
    """Let a drained node have copies again. It gets those that are missing; `rebalance` moves
    others there. While the node is being drained or removed, it means "back": that is cancelled.
    """
    member = member_named(view, node)
    if isinstance(member, RequestRefused):
        return member
    what = f"undrain {name_of(view, member)}"
    if not view.members[member].content.is_drained:
        return Prepared(what, notes=(f"{name_of(view, member)} is not drained",))
    plan = None if view.plan is None else view.plan.content
    if plan is not None and plan.kind in _EMPTYING and plan.about == member:
        return cancel(view, stamp)
    put = member_put(view, with_drained(view, member, is_drained=False))
    compares = (*compares_of_all(view), unchanged(view, put.key))  # also beside another's plan
    notes = (
        "it gets copies where some are missing; `dcpctl cluster rebalance` moves others there",
    )
    assert stamp.operation
    return prepared_of(what, (), notes, compares, (put,))


def remove(view: ClusterView, node: str, stamp: Stamp) -> Answer:
    """Take a node out of the cluster: one without copies at once, a dead one after its copies were
    made elsewhere. Its process ends.
    """
    member = member_named(view, node)
    if isinstance(member, RequestRefused):
        return member
    name = name_of(view, member)
    if refused := refused_by_plan(view):
        return refused
    if len(view.members) == 1:
        return RequestRefused(f"{name} is the only node; stop it, and the cluster is gone")
    chains = taken_over(view)
    held = [
        stored.content.record
        for vb_id, stored in view.partitions.items()
        if member in {*stored.content.record.copies, *chains.get(vb_id, ())}
    ]
    if not held:
        return prepared_of(
            f"remove {name}", (), ("its process ends; its folder stays as it is",),
            (*compares_of_all(view), unchanged(view, member_key(view, member))),
            removal(view, member),
        )  # fmt: skip
    if member in view.alive:
        return RequestRefused(
            f"{name} holds copies of {len(held)} partitions; empty it first with `dcpctl cluster "
            f"drain {name}`, or stop it for good"
        )
    alone = sum(record.isr <= {member} for record in held)
    if alone:
        return RequestRefused(
            f"{name} is down and has the only copy in sync of {alone} partitions; start it again. "
            f"If it is lost, `dcpctl cluster failover {name} --unclean` gives up what only it has"
        )
    after = {member: with_drained(view, member, is_drained=True)}
    return placed(
        view, stamp, f"remove {name}", PlanKind.REMOVE, _cluster(view).copies, about=member,
        changed=after,
    )  # fmt: skip


def set_cluster(
    view: ClusterView,
    stamp: Stamp,
    *,
    copies: int | None = None,
    min_in_sync: int | None = None,
    masters_return_s: float | None = None,
) -> Answer:
    """Change the cluster's numbers; None leaves one as it is.

    `min_in_sync` 0: a majority of the copies. `masters_return_s` 0: masters stay where they are.
    """
    before = _cluster(view)
    after = msgspec.structs.replace(
        before,
        copies=before.copies if copies is None else copies,
        min_in_sync=before.min_in_sync if min_in_sync is None else min_in_sync or None,
        masters_return_s=before.masters_return_s if masters_return_s is None else masters_return_s,
    )
    if why := _why_not_numbers(after):
        return RequestRefused(why)
    what = _set_words(before, after)
    if before == after:
        return Prepared(what, notes=("the cluster has these numbers already",))
    if after.copies != before.copies:
        return placed(
            view, stamp, what, PlanKind.SET, after.copies, cluster=after,
            copies_before=before.copies,
        )  # fmt: skip
    if refused := refused_by_plan(view):
        return refused
    put = Put(view.keys.cluster, encode_record(after))
    return prepared_of(what, (), number_notes(view, after), compares_of_all(view), (put,))


def cancel(view: ClusterView, stamp: Stamp) -> Answer:
    """Stop the plan that is under way. Copies that are being filled are given up, and partitions
    with too many copies lose the surplus. None has fewer copies in sync than before the plan. A
    cancellation that waits for a dead node can be asked for again, and does without that node.
    """
    stored = view.plan
    if stored is None:
        return refused_unreadable(view) or RequestRefused("no plan is under way; nothing to cancel")
    plan = stored.content
    if plan.kind is PlanKind.GROW:
        return RequestRefused(
            "the cluster adds missing copies by itself, which cannot be cancelled; `dcpctl cluster "
            "set --copies N` with fewer copies ends it"
        )
    cluster, puts = _cluster(view), []
    if plan.copies_before:
        cluster = msgspec.structs.replace(cluster, copies=plan.copies_before)
        if cluster.min_in_sync is not None and cluster.min_in_sync > cluster.copies:
            cluster = msgspec.structs.replace(cluster, min_in_sync=cluster.copies)
        puts.append(Put(view.keys.cluster, encode_record(cluster)))
    compares = [*compares_of_all(view)]
    if plan.kind in _EMPTYING and plan.about in view.members:
        put = member_put(view, with_drained(view, plan.about, is_drained=False))
        puts.append(put)
        compares.append(unchanged(view, put.key))
    gone = set(view.members) - view.alive.keys() if plan.kind is PlanKind.CANCEL else set[str]()
    # All partitions of the plan, also those that are as they shall be: the coordinator may have
    # added a copy that this view does not show yet.
    wanted = {
        vb_id: _kept_chain(found.content.record, cluster.copies, gone)
        for vb_id in plan.chains
        if (found := view.partitions.get(vb_id)) is not None
    }
    put = plan_put(view, stamp, PlanKind.CANCEL, wanted)
    return prepared_of(
        f"cancel {plan_words(view, plan)}", moves_of(view, wanted), (), compares, (*puts, put)
    )


def _cluster(view: ClusterView) -> ClusterRecord:
    assert view.cluster is not None, "a cluster has a record; see `refused_unreadable`"
    return view.cluster.content


def _why_no_copies(view: ClusterView, member: str) -> str:
    """Return why a member cannot get a copy now; "" if it can."""
    name = name_of(view, member)
    if view.members[member].content.is_drained:
        return f"{name} is drained and gets no copy; `dcpctl cluster undrain {name}` lets it"
    if not view.stays(member):
        return f"{name} is down and cannot be filled; start it, or choose another node"
    return ""


def _why_not_numbers(cluster: ClusterRecord) -> str:
    """Return why a cluster cannot have these numbers; "" if it can."""
    copies, least, returns_s = cluster.copies, cluster.min_in_sync, cluster.masters_return_s
    if not 1 <= copies <= CLUSTER_COPIES_MAX:
        return f"{copies} copies are not possible; 1 to {CLUSTER_COPIES_MAX} are"
    if least is not None and not 1 <= least <= copies:
        return (
            f"min in-sync {least} is not possible with {copies} copies, because no write would be "
            f"taken; 1 to {copies} are, and 0 means a majority"
        )
    if not 0 <= returns_s <= MASTERS_RETURN_S_MAX:
        return (
            f"masters cannot return after {returns_s:g} s; 0 (never) to {MASTERS_RETURN_S_MAX:g} s "
            "are possible"
        )
    return ""


def _set_words(before: ClusterRecord, after: ClusterRecord) -> str:
    words = ["set"]
    if before.copies != after.copies:
        words.append(f"--copies {after.copies}")
    if before.min_in_sync != after.min_in_sync:
        words.append(f"--min-in-sync {after.min_in_sync or 0}")
    if before.masters_return_s != after.masters_return_s:
        words.append(f"--masters-return {after.masters_return_s:g}")
    return " ".join(words)


def _kept_chain(
    record: ReplicationRecord, count: int, without: Collection[str] = frozenset()
) -> Chain:
    """Return the copies that a cancelled move leaves, without those members if there are others."""
    full = [member for member in record.copies if member not in record.filling]
    full = [member for member in full if member not in without] or full
    ranked = sorted(full, key=lambda member: (member != record.master, member not in record.isr))
    kept = set(ranked[: max(count, 1)])
    return tuple(member for member in record.copies if member in kept)


def failover(
    view: ClusterView,
    stamp: Stamp,
    *,
    node: str | None = None,
    vb_id: int | None = None,
    is_unclean: bool = False,
) -> Answer:
    """Give the partitions of a master, or one partition, to another copy.

    Clean: a copy in sync takes over by handover. A dead master is followed without a command, as
    long as somebody is in sync. Unclean: the best copy that is left is elected where nobody of the
    in-sync set lives; answered changes may be lost, and the notes say so.
    """
    assert (node is None) != (vb_id is None), "a node or a partition"
    member = ""
    if node is not None:
        found = member_named(view, node)
        if isinstance(found, RequestRefused):
            return found
        member = found
    vb_ids = sorted(view.partitions) if vb_id is None else [vb_id]
    if vb_id is not None and vb_id not in view.partitions:
        return RequestRefused(f"there is no partition {vb_id} with a readable record")
    subject = name_of(view, member) if member else f"partition {vb_id}"
    if is_unclean:
        return _failover_uncleanly(view, vb_ids, member, subject)
    wanted: dict[int, Chain] = {}
    stuck: list[int] = []
    given = Counter[str]()
    taken = taken_over(view)
    for each in vb_ids:
        record = view.partitions[each].content.record
        if record.master is None or (member and record.master != member):
            continue
        chain = _with_other_first(view, record, taken.get(each, record.copies), given)
        if chain is None:
            stuck.append(each)
        else:
            wanted[each] = chain
    what = f"failover {subject}"
    if not wanted and not stuck:
        return Prepared(what, notes=(f"{subject} has no master to fail over",))
    if stuck:
        return RequestRefused(
            f"{len(stuck)} partitions ({stuck[0]} is the first) have no other copy in sync that "
            "runs; start the nodes that hold one. `--unclean` gives up what only lost copies have"
        )
    return planned(view, stamp, what, PlanKind.FAILOVER, wanted, about=member)


def _with_other_first(
    view: ClusterView, record: ReplicationRecord, copies: Chain, given: Counter[str]
) -> Chain | None:
    """Return the copies with the master last and another one in sync first: the one that was given
    the fewest partitions so far. None: there is none.
    """
    able = [
        member
        for member in copies
        if member in record.isr and member != record.master and view.stays(member)
        and not _is_drained(view, member)
    ]  # fmt: skip
    if not able:
        return None
    chosen = min(able, key=lambda member: given[member])
    given[chosen] += 1
    rest = [member for member in copies if member not in {chosen, record.master}]
    return (chosen, *rest, *((record.master,) if record.master in copies else ()))


def _is_drained(view: ClusterView, member: str) -> bool:
    stored = view.members.get(member)
    return stored is not None and stored.content.is_drained


def _failover_uncleanly(view: ClusterView, vb_ids: list[int], member: str, subject: str) -> Answer:
    """Return the commands for partitions of which nobody in sync lives."""
    lost: list[int] = []
    living: list[int] = []
    for vb_id in vb_ids:
        record = view.partitions[vb_id].content.record
        if member and member not in record.isr:
            continue
        is_anybody_there = any(each in view.alive for each in record.isr)
        (living if is_anybody_there else lost).append(vb_id)
    if not lost:
        return RequestRefused(
            f"{subject}: each partition still has a copy in sync on a node that is up, so no change"
            " has to be lost. Leave out --unclean; if that node has just died, wait for the end of "
            "its lease (its setting `lease`; 3 s by default)"
        )
    compares: list[Compare] = []
    puts: list[Put] = []
    for vb_id in lost:
        stored = view.partitions[vb_id]
        key = view.keys.of_partition(KeyKind.COMMAND, vb_id)
        command = OperatorCommand(elect_uncleanly_in_epoch=stored.content.record.epoch)
        compares.append(if_unchanged(stored.item.key, stored.item.mod_revision))
        puts.append(Put(key, encode_record(command)))
    masters = sorted({
        name_of(view, master)
        for vb_id in lost
        if (master := view.partitions[vb_id].content.record.master) is not None
    })  # fmt: skip
    what_is_lost = (
        f"{len(lost)} partitions: changes that only the members in sync had are lost, also those "
        "that were answered. A member that returns writes what it cuts off to discard files"
    )
    notes = [
        what_is_lost,
        f"the leases of the former masters ({', '.join(masters) or 'none'}) are over",
    ]
    if living:
        notes.append(f"{len(living)} partitions stay as they are: a copy in sync of them runs")
    size = TXN_OPERATIONS_MAX
    txns = tuple(
        Txn(tuple(compares[at : at + size]), tuple(puts[at : at + size]))
        for at in range(0, len(puts), size)
    )
    what = f"failover {subject} --unclean"
    return Prepared(what, (), tuple(notes), txns, puts[-1].key, puts[-1].value)


NAMED_MAX = 4
"""Partitions that are described one by one; more are counted."""


def unclean_notes(view: ClusterView, vb_ids: Iterable[int]) -> Iterator[str]:
    """Yield lines about partitions of which nobody in sync lives: who may take over, and where it
    ends.
    """
    takers = Counter[str]()
    hopeless: list[int] = []
    described: list[str] = []
    for vb_id in sorted(vb_ids):
        record = view.partitions[vb_id].content.record
        able = [
            member
            for member in record.copies
            if member in view.alive and member not in record.filling
        ]
        if not able:
            hopeless.append(vb_id)
            continue
        takers.update(able)
        described.append(_described(view, vb_id, record, able))
    if len(described) <= NAMED_MAX:
        yield from described
    else:
        told = ", ".join(
            f"{name_of(view, member)} of {takers[member]}" for member in sorted(takers)
        )
        yield f"copies that may take over, with what they have: {told}"
    if hopeless:
        yield (
            f"{len(hopeless)} partitions ({hopeless[0]} is the first) have no copy on a node "
            "that runs: nothing is elected there until you start one"
        )


def _described(
    view: ClusterView, vb_id: int, record: ReplicationRecord, able: Iterable[str]
) -> str:
    ends = "; ".join(f"{name_of(view, member)} {_end(view, vb_id, member)}" for member in able)
    gone = ", ".join(sorted(name_of(view, member) for member in record.isr))
    return f"partition {vb_id}: {gone} had all that was answered; {ends}"


def _end(view: ClusterView, vb_id: int, member: str) -> str:
    told = _report(view, vb_id, member)
    return "has not told where it ends" if told is None else f"ends at seqno {told.end_seqno}"


def _report(view: ClusterView, vb_id: int, member: str) -> ReportedPartition | None:
    stored = view.reports.get(member)
    if stored is None:
        return None
    return next((told for told in stored.content.partitions if told.vb_id == vb_id), None)
