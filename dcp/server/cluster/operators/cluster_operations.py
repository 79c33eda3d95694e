"""What operators ask of a node about its cluster, and tell it: for the admin interface.

Reports are made from this node's view of the metadata store. They say so where the view is old.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from dcp.server.cluster.cluster_file import ClusterRefusedError, ClusterToken
from dcp.server.cluster.joining.becoming_member import (
    Gate,
    NewMember,
    check_init,
    check_join_by_token,
    init_cluster,
    join_by_token,
    token_of,
)
from dcp.server.cluster.joining.enrolment import NewCluster
from dcp.server.cluster.operators.cluster_changes import ClusterChanges
from dcp.server.cluster.operators.cluster_figures import cluster_page
from dcp.server.cluster.operators.cluster_status import (
    cluster_report,
    explain_partition,
    partition_report,
)
from dcp.server.cluster.operators.meta_desk import MetaDesk
from dcp.server.cluster.operators.secret_change import change_secrets
from dcp.server.cluster.receipt_files import receipts_in
from dcp.server.cluster.replicated_node import ReplicatedNode
from dcp.server.operate.cluster_reports import (
    ClusterPage,
    ClusterReport,
    ExplainedPartition,
    InitAnswer,
    InitRequest,
    JoinAnswer,
    JoinRequest,
    PartitionReport,
    ReceiptsReport,
)
from dcp.server.operate.cluster_requests import (
    CutRequest,
    CutsReport,
    SecretsReport,
    SecretsRequest,
)
from failover.coordinator.plans.request_answers import RequestRefused, member_named, name_of
from failover.metadata.etcd.settings import files_of_url


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

    async def init(self, asked: InitRequest) -> InitAnswer:
        """Make this node the first member. Raises ClusterRefusedError."""
        self._check_files(asked.meta)
        newcomer, wanted = self._newcomer, NewCluster(asked.copies, asked.min_in_sync)
        what = f"{newcomer.name_or(asked.name)} becomes the first node of a new cluster"
        if asked.dry_run:
            notes = await check_init(
                newcomer, wanted, meta=asked.meta, name=asked.name, rack=asked.rack
            )
            return InitAnswer(what=what, is_written=False, notes=notes)
        token = await init_cluster(
            newcomer, wanted, meta=asked.meta, name=asked.name, rack=asked.rack, gate=self._gate
        )
        self._restart()
        return InitAnswer(what=what, is_written=True, notes=[], token=token.to_text())

    async def join(self, asked: JoinRequest) -> JoinAnswer:
        """Make this node one more member. Raises ClusterRefusedError."""
        newcomer, notes = self._newcomer, list[str]()
        self._check_files(ClusterToken.from_text(asked.token).meta)
        if asked.dry_run:
            content, notes = await check_join_by_token(
                newcomer, asked.token, name=asked.name, rack=asked.rack
            )
        else:
            content = await join_by_token(
                newcomer, asked.token, name=asked.name, rack=asked.rack, gate=self._gate
            )
            self._restart()
        return JoinAnswer(
            what=f"{content.name} becomes a node of cluster {content.cluster}",
            is_written=not asked.dry_run, notes=notes, cluster=content.cluster,
        )  # fmt: skip

    def _check_files(self, url: str) -> None:
        """Raise ClusterRefusedError if a URL of a metadata store names files that nobody on this
        machine has named: they would be read, and sent to a host of the caller's choice.
        """
        named = files_of_url(url)
        if named and url != self._newcomer.settings.cluster_meta:
            raise ClusterRefusedError(
                f"the URL of the metadata store names files of this node: {', '.join(named)[:200]};"
                " over the network, nobody has a file of it read",
                "Start this node with that URL in its setting cluster_meta, and ask again",
                status=HTTPStatus.FORBIDDEN,
            )

    def token(self) -> str:
        """Return the token for new members. Raises ClusterRefusedError."""
        return token_of(self._member().identity).to_text()

    @property
    def changes(self) -> ClusterChanges:
        """What operators may ask of a cluster. Raises ClusterRefusedError on a node alone."""
        is_test_mode = self._newcomer.settings.test_mode == "on"
        return ClusterChanges(self._member(), is_test_mode=is_test_mode)

    async def secrets(self, asked: SecretsRequest) -> SecretsReport:
        """Take a step to another secret of the cluster. Raises ClusterRefusedError."""
        return await change_secrets(self._member(), self._newcomer, asked)

    def cut(self, asked: CutRequest) -> CutsReport:
        """End this node's link to another one, for tests. Raises ClusterRefusedError."""
        replicated = self._in_test_mode()
        view, own = replicated.session.view, replicated.session.membership.member
        member = member_named(view, asked.node)
        if member == own:
            member = RequestRefused("a node is cut off from another one, and this is itself")
        if isinstance(member, RequestRefused):
            raise ClusterRefusedError(member.text, "Name another", status=HTTPStatus.NOT_FOUND)
        replicated.cut_off(member)
        return self._cuts(replicated)

    def heal(self) -> CutsReport:
        """Let this node dial all others again. Raises ClusterRefusedError."""
        replicated = self._in_test_mode()
        replicated.links.cut_members.clear()
        return self._cuts(replicated)

    def _cuts(self, replicated: ReplicatedNode) -> CutsReport:
        view = replicated.session.view
        return CutsReport(sorted(name_of(view, each) for each in replicated.links.cut_members))

    def _in_test_mode(self) -> ReplicatedNode:
        if self._newcomer.settings.test_mode != "on":
            raise ClusterRefusedError(
                "cuts between nodes are for tests, and this node is not in test mode",
                "Start the node with --test-mode on", status=HTTPStatus.FORBIDDEN,
            )  # fmt: skip
        return self._member()

    @property
    def meta(self) -> MetaDesk:
        """The metadata store after it was lost. Raises ClusterRefusedError on a node alone."""
        return MetaDesk(self._member())

    # -- reports -----------------------------------------------------------------------------------

    def status(self) -> ClusterReport:
        """Return what this node knows of the cluster."""
        replicated = self._replicated
        if replicated is None:
            return ClusterReport(node="", cluster="", partitions=self._newcomer.engine.num_vbuckets)
        return cluster_report(replicated)

    def page(self) -> ClusterPage:
        """Return what the web console shows of the cluster."""
        replicated = self._replicated
        return ClusterPage(status=self.status()) if replicated is None else cluster_page(replicated)

    async def receipts(self) -> ReceiptsReport:
        """Return the loss receipts in the data folder of this node."""
        name = "" if self._replicated is None else self._replicated.identity.name
        return await asyncio.to_thread(receipts_in, self._newcomer.data_dir, name)

    def map(self) -> list[PartitionReport]:
        """Return the records of all partitions. Raises ClusterRefusedError on a node alone."""
        view = self._member().session.view
        return [
            partition_report(view, vb_id, stored.content.record)
            for vb_id, stored in sorted(view.partitions.items())
        ]

    def explain(self, vb_id: int) -> ExplainedPartition:
        """Return a partition's copies, and who may become its master. Raises ClusterRefusedError on
        a node alone, and without a record of the partition.
        """
        replicated = self._member()
        if vb_id not in replicated.session.view.partitions:
            raise ClusterRefusedError(
                f"the metadata store has no record of partition {vb_id} that can be read",
                "`dcpctl cluster status` says what is wrong with the store",
            )
        return explain_partition(replicated, vb_id)

    def _member(self) -> ReplicatedNode:
        if self._replicated is None:
            raise ClusterRefusedError(
                "this node is in no cluster",
                "`dcpctl cluster init` makes it the first one of a new cluster, `dcpctl cluster "
                "join --token-file FILE` one more of another",
            )
        return self._replicated
