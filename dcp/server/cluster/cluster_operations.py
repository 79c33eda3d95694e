"""What operators ask of a node about its cluster, and tell it: for the admin interface.

Reports are made from this node's view of the metadata store. They say so where the view is old.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from dcp.server.cluster.becoming_member import (
    Gate,
    NewMember,
    init_cluster,
    join_by_token,
    token_of,
)
from dcp.server.cluster.cluster_refusal import ClusterRefusedError
from dcp.server.cluster.enrolment import NewCluster
from dcp.server.cluster.replicated_node import ReplicatedNode
from dcp.server.operate.cluster_reports import (
    ClusterReport,
    NodeReport,
    PartitionReport,
    StoreReport,
)


class ClusterOperations:
    """See the module. `restart` restarts the node in its process, after the answer has left."""

    def __init__(
        self,
        newcomer: NewMember,
        replicated: ReplicatedNode | None,
        gate: Gate,
        restart: Callable[[], None],
    ) -> None:
        self._newcomer = newcomer
        self._gate = gate
        self._replicated = replicated
        self._restart = restart

    # -- changes -----------------------------------------------------------------------------------

    async def init(
        self, *, copies: int, min_in_sync: int | None, meta: str, name: str, rack: str
    ) -> str:
        """Make this node the first member; return the token. Raises ClusterRefusedError."""
        wanted = NewCluster(copies, min_in_sync)
        token = await init_cluster(
            self._newcomer, wanted, meta=meta, name=name, rack=rack, gate=self._gate
        )
        self._restart()
        return token.to_text()

    async def join(self, *, token: str, name: str, rack: str) -> str:
        """Make this node one more member; return the cluster's id. Raises
        ClusterRefusedError.
        """
        content = await join_by_token(self._newcomer, token, name=name, rack=rack, gate=self._gate)
        self._restart()
        return content.cluster

    def token(self) -> str:
        """Return the token for new members. Raises ClusterRefusedError."""
        return token_of(self._member().identity).to_text()

    # -- reports -----------------------------------------------------------------------------------

    def status(self) -> ClusterReport:
        """Return what this node knows of the cluster."""
        replicated = self._replicated
        if replicated is None:
            return ClusterReport(node="", cluster="")
        view = replicated.session.view
        records = [stored.content.record for stored in view.partitions.values()]
        leader = None if view.leader is None else view.leader.content.member
        cluster = view.cluster.content if view.cluster is not None else None
        sizes = Counter(len(record.isr) for record in records)
        return ClusterReport(
            node=replicated.identity.name,
            cluster=replicated.identity.cluster,
            copies=0 if cluster is None else cluster.copies,
            min_in_sync=replicated.identity.min_in_sync,
            coordinator=None if leader is None else self._name_of(leader),
            store=StoreReport(
                url=replicated.access.url, trouble=replicated.access.trouble,
                revision=view.revision,
            ),
            nodes=self._nodes(replicated),
            without_master=sum(record.master is None for record in records),
            served_here=replicated.served(),
            in_sync_sizes={str(size): sizes[size] for size in sorted(sizes)},
            problems=list(self._problems(replicated)),
        )  # fmt: skip

    def map(self) -> list[PartitionReport]:
        """Return the records of all partitions. Raises ClusterRefusedError on a node alone."""
        view = self._member().session.view
        name = self._name_of
        return [
            PartitionReport(
                vb=vb_id, epoch=record.epoch,
                master=None if record.master is None else name(record.master),
                wanted_master=None if record.wanted_master is None else name(record.wanted_master),
                copies=[name(member) for member in record.copies],
                in_sync=sorted(name(member) for member in record.isr),
                filling=sorted(name(member) for member in record.filling),
            )
            for vb_id, stored in sorted(view.partitions.items())
            for record in (stored.content.record,)
        ]  # fmt: skip

    def _member(self) -> ReplicatedNode:
        if self._replicated is None:
            raise ClusterRefusedError(
                "this node is in no cluster",
                "`dcpctl cluster init` makes it the first one of a new cluster, `dcpctl cluster "
                "join --token-file FILE` one more of another",
            )
        return self._replicated

    def _name_of(self, member: str) -> str:
        assert self._replicated is not None
        stored = self._replicated.session.view.members.get(member)
        return member if stored is None or not stored.content.name else stored.content.name

    def _nodes(self, replicated: ReplicatedNode) -> list[NodeReport]:
        view = replicated.session.view
        masters, copies, in_sync = Counter[str | None](), Counter[str](), Counter[str]()
        filling = Counter[str]()
        for stored in view.partitions.values():
            record = stored.content.record
            masters[record.master] += 1
            copies.update(record.copies)
            in_sync.update(record.isr)
            filling.update(record.filling)
        reports = [
            NodeReport(
                name=found.content.name, member=member, address=found.content.address,
                rack=found.content.rack, is_alive=member in view.alive, masters=masters[member],
                copies=copies[member], in_sync=in_sync[member], filling=filling[member],
            )
            for member, found in view.members.items()
        ]  # fmt: skip
        return sorted(reports, key=lambda report: report.name)

    def _problems(self, replicated: ReplicatedNode) -> list[str]:
        view, problems = replicated.session.view, []
        if trouble := replicated.access.trouble:
            problems.append(
                f"the metadata store does not answer ({trouble}). Masters go on; nobody is elected "
                "until it does. Start it again"
            )
        problems += replicated.own_problems()
        if replicated.wrong_store:
            problems.append(replicated.wrong_store)
        if not view.is_loaded:
            problems.append("this node has not read the metadata store yet, so it serves nothing")
        problems += [
            f"node {report.name} ({report.address}) is down. Start it again"
            for report in self._nodes(replicated)
            if not report.is_alive
        ]
        wanted = 0 if view.cluster is None else view.cluster.content.copies
        if len(view.members) < wanted:
            problems.append(
                f"{wanted} copies are wanted, and there are {len(view.members)} nodes. Add nodes "
                "with `dcpctl cluster join`"
            )
        if view.unreadable:
            problems.append(f"records cannot be read: {next(iter(view.unreadable.values()))}")
        records = [stored.content.record for stored in view.partitions.values()]
        if orphans := sum(record.master is None for record in records):
            problems.append(f"{orphans} partitions have no master")
        if behind := sum(len(record.isr) < len(record.copies) for record in records):
            problems.append(f"{behind} partitions have copies that are not in sync")
        return problems
