"""The metadata store of a cluster after it was lost or went back to an older copy: what this node
has of it, and the restoration of its records.

    testify   this node writes into the store what its folder has seen, and where its logs end
    restore   reads what the nodes have testified, shows what would be written, and writes it
    export    the newest records that this folder has seen

Who calls it: the admin interface. `dcpctl cluster meta restore` asks all nodes to testify first.

Invariants
- each transaction compares every key that it writes with what was read, so whoever changes one
  meanwhile makes a refusal and not a wrong record;
- a testimony counts for the request that asked for it only.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import msgspec

from dcp.server.cluster.cluster_file import ClusterRefusedError
from dcp.server.cluster.joining.enrolment import EnrolmentError, ask_again
from dcp.server.operate.cluster_requests import (
    MetaExport,
    MetaRestoreReport,
    MetaRestoreRequest,
    TestifiedReport,
    TestifyingNode,
    TestifyRequest,
)
from failover.coordinator.meta_restore import (
    MetaRestore,
    MetaRestorePlan,
    NodeTestimony,
    records_of,
    testimony_key,
    unpack_testimony,
)
from failover.coordinator.records import KeyKind, MemberRecord, RecordUnreadableError
from failover.metadata.metastore import (
    LeaseGrant,
    LeaseResult,
    Put,
    Range,
    RangeResult,
    StoreRequest,
    StoreResult,
    Txn,
    TxnResult,
)
from vbucket.model.ids import id_ranges

if TYPE_CHECKING:
    from dcp.server.cluster.replicated_node import ReplicatedNode

TESTIMONY_LEASE_S: Final = 300
"""How long a testimony stays: a person reads the preview meanwhile."""
_AGAIN: Final = "Look at `dcpctl cluster status`, and do the same again: what is written counts"


class MetaDesk:
    """See the module. Each request raises ClusterRefusedError."""

    def __init__(self, replicated: ReplicatedNode) -> None:
        self._replicated = replicated
        self._keys = replicated.session.view.keys

    def export(self) -> MetaExport:
        """Return the newest records that this folder has seen, for people and other tools."""
        content = self._replicated.seen.records.content()
        records: dict[str, Any] = {
            name: msgspec.json.decode(seen.value)
            for name, seen in sorted(content.records.items())
            if name != KeyKind.USERS  # users.json has them, and their keys are not for printing
        }
        identity = self._replicated.identity
        return MetaExport(identity.cluster, identity.name, content.revision, records)

    # -- testimonies -------------------------------------------------------------------------------

    async def testify(self, asked: TestifyRequest) -> TestifiedReport:
        """Write what this node has into the store; return which nodes it knows."""
        replicated = self._replicated
        operation = asked.operation or f"{replicated.member}.{uuid4().hex}"
        told = NodeTestimony(
            member=replicated.member,
            operation=operation,
            life=replicated.map.sent.version.life,
            records=records_of(replicated.seen.records.content().records),
            ends=replicated.core.held_logs(),
        )
        lease = await self._ask(LeaseGrant(TESTIMONY_LEASE_S))
        lease_id = lease.lease_id if isinstance(lease, LeaseResult) else 0
        put = Put(testimony_key(self._keys, replicated.member), told.pack(), lease_id)
        await self._ask(Txn((), (put,)))
        return TestifiedReport(replicated.identity.name, operation, self._nodes())

    def _nodes(self) -> list[TestifyingNode]:
        """Return the members that this folder has seen."""
        records = self._replicated.seen.records.content().records
        members = [
            msgspec.json.decode(seen.value, type=MemberRecord)
            for name, seen in sorted(records.items())
            if name.startswith("member/")
        ]
        return [
            TestifyingNode(
                each.name or each.member, each.member, each.address, each.admin_port,
                each.admin_tls_port,
            )
            for each in members
        ]  # fmt: skip

    # -- the restoration ---------------------------------------------------------------------------

    async def restore(self, asked: MetaRestoreRequest) -> MetaRestoreReport:
        """Show what would be written, or write it."""
        read = await self._ask(Range(self._keys.root, is_prefix=True))
        assert isinstance(read, RangeResult)
        try:
            told = [
                unpack_testimony(item.value)
                for item in read.items
                if item.key.startswith(testimony_key(self._keys, ""))
            ]
            told = [each for each in told if each.operation == asked.operation]
            if not told:
                raise ClusterRefusedError(
                    "no node has testified for this request",
                    "Ask each node first, as `dcpctl cluster meta restore` does",
                )
            plan = MetaRestore(
                self._keys, read.items, told, operation=asked.operation, unix_s=time.time(),
                accepts_loss=asked.accept_loss,
            ).plan()  # fmt: skip
        except (RecordUnreadableError, ValueError) as error:
            raise ClusterRefusedError(str(error)) from None
        written = 0
        if not asked.dry_run:
            for txn in plan.txns:
                await self._write(txn, written)
                written += 1
        return self._report(plan, asked, is_written=not asked.dry_run)

    async def _write(self, txn: Txn, written: int) -> None:
        result = await self._ask(txn)
        if not isinstance(result, TxnResult):
            raise ClusterRefusedError(f"the metadata store does not answer: {result}", _AGAIN)
        if not result.succeeded:
            raise ClusterRefusedError(
                f"the metadata store has changed meanwhile; {written} transactions are written",
                _AGAIN,
            )

    def _report(
        self, plan: MetaRestorePlan, asked: MetaRestoreRequest, *, is_written: bool
    ) -> MetaRestoreReport:
        notes = list(plan.notes)
        for member, vb_ids in sorted(plan.silent.items()):
            notes.append(
                f"node {member} is missing, and may have the newest copy of {len(vb_ids)} "
                f"partitions: {id_ranges(vb_ids)}"
            )
        words = sorted(set(plan.ends.values()))
        for word in words[:8]:
            vb_ids = [vb_id for vb_id, text in plan.ends.items() if text == word]
            notes.append(f"{len(vb_ids)} partitions ({id_ranges(vb_ids)}): {word}")
        if len(words) > 8:
            notes.append(f"and {len(words) - 8} more")
        return MetaRestoreReport(
            has_changes=bool(plan.txns),
            is_written=is_written and bool(plan.txns),
            rebuilt=len(plan.rebuilt),
            rebuilt_vbs=id_ranges(plan.rebuilt),
            lossy=len(plan.lossy),
            lossy_vbs=id_ranges(plan.lossy),
            accepts_loss=asked.accept_loss,
            missing=sorted(plan.silent),
            notes=notes,
        )

    async def _ask(self, request: StoreRequest) -> StoreResult:
        try:
            return await ask_again(self._replicated.access.meta, request)
        except EnrolmentError as error:
            raise ClusterRefusedError(
                error.why, error.try_this, status=HTTPStatus.SERVICE_UNAVAILABLE
            ) from None
