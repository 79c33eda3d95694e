"""A new cluster begins with several nodes: copies and masters are on all of them from the start.

    init ── the folder waits (FOUNDING_FILE) ── cluster_nodes run ── a record for each partition
         ── the file is gone

The first node of `--cluster init --cluster-nodes N` makes its cluster without partitions. When N
nodes take part it creates each partition's record once, with its copies spread over them and all of
them in sync: they hold nothing. So one election is all that a partition needs before it is served.
Otherwise the first node has all partitions, copies are added, filled and let in, and masters are
handed over: up to five changes of each record.

Who calls it: the node, once it takes part in its cluster.

Invariants
- only the process of the folder that made the cluster creates records, and only while FOUNDING_FILE
  is there. It is made before cluster.json, and goes when every partition has a record;
- no record is created that this folder has ever seen, or that the store has: one that the store
  has lost is never made anew here (`dcpctl cluster meta restore` does that);
- a node joins a cluster without partitions only if its folder has no change of any partition
  (`enrolment.is_pristine`), so every copy of a new record is in sync with every other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dcp.server.cluster.joining.enrolment import EnrolmentError, ask_again
from dcp.server.files.kept_twice import is_kept, remove_kept, write_kept
from dcp.server.observe.event_log import EventLog
from failover.coordinator.plans.placement import plan_placement
from failover.coordinator.plans.plan_steps import eligible_members
from failover.coordinator.records import KeyKind, StoredPartition, encode_partition
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import TXN_OPERATIONS_MAX, Put, Txn, if_absent
from failover.rules.replication_record import UNSEEN, create

if TYPE_CHECKING:
    from dcp.server.cluster.replicated_node import ReplicatedNode

FOUNDING_FILE: Final = "founding"
"""In the folder of a cluster's first node until all partitions have records."""
LOOK_S: Final = 0.02
AGAIN_S: Final = 0.5
"""Pause after the metadata store did not answer, or another write came between."""
TELL_S: Final = 10.0
"""Time between lines of the log about nodes that are missing."""


def begin_founding(data_dir: Path) -> None:
    """Note in a folder that its cluster has no partitions yet. Durable when it returns. Raises
    OSError.
    """
    write_kept(data_dir / FOUNDING_FILE, b"{}")


def first_records(view: ClusterView, vb_ids: Sequence[int], copies: int) -> dict[int, bytes]:
    """Return partition -> the record that it is created with: its copies, all in sync, the wanted
    master first. One of them is elected.
    """
    racks = eligible_members(view)
    wanted = plan_placement(racks, copies, dict.fromkeys(vb_ids, ())).wanted
    return {
        vb_id: encode_partition(StoredPartition(create(chain), "founding"))
        for vb_id, chain in wanted.items()
    }


async def found(replicated: ReplicatedNode, data_dir: Path, nodes: int, log: EventLog) -> None:
    """Create the records of a new cluster when so many nodes take part. It returns when all are
    there, or at once if this folder does not wait for that.
    """
    path = data_dir / FOUNDING_FILE
    if not is_kept(path):
        return
    await _until_there(replicated.session.view, nodes, log)
    while missing := _missing(replicated):
        try:
            await _create(replicated, missing)
        except EnrolmentError as error:
            log.warning("the partitions of the new cluster wait", reason=str(error))
        await asyncio.sleep(AGAIN_S if _missing(replicated) == missing else LOOK_S)
    await asyncio.to_thread(remove_kept, path)
    log.info("the partitions of the new cluster have copies and masters", nodes=nodes)


async def _until_there(view: ClusterView, nodes: int, log: EventLog) -> None:
    loop = asyncio.get_running_loop()
    told_s, counted = -TELL_S, -1
    while (there := len(_there(view))) < nodes:
        if there != counted or loop.time() - told_s >= TELL_S:
            told_s, counted = loop.time(), there
            log.info("a new cluster waits for nodes", there=there, cluster_nodes=nodes)
        await asyncio.sleep(LOOK_S)


def _there(view: ClusterView) -> list[str]:
    """Return who takes part, and has read all records: a report comes after that. Who reads a
    record later that names it takes it for an earlier process's, and waits for an election.
    """
    reports = view.reports
    return [
        member
        for member in view.members
        if view.stays(member)
        and member in reports
        and reports[member].item.mod_revision > view.alive[member].item.mod_revision
    ]


def _missing(replicated: ReplicatedNode) -> list[int]:
    """Return the partitions that never had a record."""
    view, seen = replicated.session.view, replicated.seen.records
    keys = ((vb_id, view.keys.of_partition(KeyKind.PARTITION, vb_id))
            for vb_id in range(replicated.num_vbuckets))  # fmt: skip
    return [vb_id for vb_id, key in keys if view.item(key) is None and seen.rank(vb_id) == UNSEEN]


async def _create(replicated: ReplicatedNode, vb_ids: Sequence[int]) -> None:
    """Create records that do not exist. Raises EnrolmentError."""
    view = replicated.session.view
    assert view.cluster is not None, "this node takes part"
    found = first_records(view, vb_ids, view.cluster.content.copies)
    puts = [
        Put(view.keys.of_partition(KeyKind.PARTITION, vb_id), value)
        for vb_id, value in found.items()
    ]
    for first in range(0, len(puts), TXN_OPERATIONS_MAX):
        some = tuple(puts[first : first + TXN_OPERATIONS_MAX])
        await ask_again(
            replicated.access.meta, Txn(tuple(if_absent(put.key) for put in some), some)
        )
