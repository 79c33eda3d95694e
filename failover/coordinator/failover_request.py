"""Failover on request: give partitions of a master to another copy, cleanly or not. Pure.

Who calls it: the admin interface.
"""

from __future__ import annotations

from collections import Counter

from failover.coordinator.cluster_keys import KeyKind
from failover.coordinator.cluster_records import OperatorCommand, PlanKind, encode_record
from failover.coordinator.cluster_view import ClusterView
from failover.coordinator.copy_placement import Chain
from failover.coordinator.plan_writing import planned, taken_over
from failover.coordinator.request_answers import (
    Answer,
    Prepared,
    RequestRefused,
    Stamp,
    member_named,
    name_of,
)
from failover.metadata.metastore import TXN_OPERATIONS_MAX, Compare, Put, Txn, if_unchanged
from failover.rules.replication_record import ReplicationRecord


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
    subject = name_of(view, member) if member else f"vb {vb_id}"
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
            f"{len(stuck)} partitions (vb {stuck[0]} is the first) have no other copy in sync that "
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
