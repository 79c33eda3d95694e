"""Changes of a cluster that operators ask for: previewed, then written to the metadata store.

    request ──> `requests`, with this node's view ──> preview ── dry run: the end
                                                         └─> transactions ──> the coordinator acts

Any node does it. The transactions compare what the request was decided by, so an old view, or two
requests at once, make a refusal and not a wrong change.

Invariant: a request whose outcome is not known is not reported as written, and not as refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from msgspec.structs import replace

from dcp.server.cluster.cluster_file import ClusterRefusedError
from dcp.server.cluster.joining.enrolment import EnrolmentError, ask, ask_again
from dcp.server.operate.cluster_requests import (
    ChangeReport,
    MasterFailoverRequest,
    MoveRequest,
    NodeChange,
    NodeRequest,
    PartitionChange,
    PlainRequest,
    PlanProgress,
    SetRequest,
)
from dcp.server.operate.replicated_branches import BranchUnknownError
from failover.coordinator.plans.plan_steps import progress_of, unseen_members
from failover.coordinator.plans.request_answers import (
    Answer,
    Prepared,
    RequestRefused,
    Stamp,
    gives_way,
    member_counts,
    member_named,
    name_of,
    plan_words,
    refused_unreadable,
    was_written,
    why_not_written,
)
from failover.coordinator.plans.requests import (
    cancel,
    drain,
    failover,
    move,
    rebalance,
    remove,
    set_cluster,
    unclean_notes,
    undrain,
)
from failover.coordinator.records import KeyKind
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import (
    OutcomeUnknown,
    Put,
    Range,
    RangeResult,
    StoreRefused,
    StoreRequest,
    StoreResult,
    Txn,
    TxnResult,
)
from vbucket.engine.partition import BranchRefusedError
from vbucket.model.ids import id_ranges

if TYPE_CHECKING:
    from dcp.server.cluster.replicated_node import ReplicatedNode

TRIES_MAX: Final = 5
"""How often a request is made anew."""
AGAIN_S: Final = 0.2
"""The pause before that: a view follows the store within milliseconds."""
JOINED_S: Final = 5.0
"""How long a rebalance waits for a member whose process is not seen. One that has just joined
restarts, recovers its folder and takes a lease, which takes a second or two."""
UNKNOWN_MAX: Final = 3
"""Attempts of a transaction whose answers are lost, before the outcome is told as unknown."""
_LOOK: Final = "Look at `dcpctl cluster status`, and try again"


class ChangedMeanwhileError(ClusterRefusedError):
    """Something that a request relies on changed before it was written; nothing was."""


class ClusterChanges:
    """See the module. Each request raises ClusterRefusedError."""

    def __init__(self, replicated: ReplicatedNode, *, is_test_mode: bool) -> None:
        self._view = replicated.session.view
        self._replicated = replicated
        self._is_test_mode = is_test_mode

    # -- requests ----------------------------------------------------------------------------------

    async def set(self, asked: SetRequest) -> ChangeReport:
        """Change numbers of the cluster."""
        if asked.copies is asked.min_in_sync is asked.masters_return_s is None:
            raise ClusterRefusedError(
                "no number is given", "Name --copies, --min-in-sync or --masters-return",
                status=HTTPStatus.BAD_REQUEST,
            )  # fmt: skip
        return await self._change(
            lambda view, stamp: set_cluster(
                view, stamp, copies=asked.copies, min_in_sync=asked.min_in_sync,
                masters_return_s=asked.masters_return_s,
            ),
            is_dry=asked.dry_run,
        )  # fmt: skip

    async def rebalance(self, asked: PlainRequest) -> ChangeReport:
        """Spread copies and masters evenly, also over a node that has just joined."""
        await self._until_seen()
        return await self._change(rebalance, is_dry=asked.dry_run)

    async def cancel(self, asked: PlainRequest) -> ChangeReport:
        """Stop the plan under way."""
        return await self._change(cancel, is_dry=asked.dry_run)

    async def move(self, asked: MoveRequest) -> ChangeReport:
        """Make a node a partition's master."""
        self._check_node(asked.to)
        self._check_partition(asked.vb)
        return await self._change(
            lambda view, stamp: move(view, asked.vb, asked.to, stamp), is_dry=asked.dry_run
        )

    async def drain(self, asked: NodeRequest) -> ChangeReport:
        """Move everything away from a node."""
        self._check_node(asked.node)
        return await self._change(
            lambda view, stamp: drain(view, asked.node, stamp), is_dry=asked.dry_run
        )

    async def undrain(self, asked: NodeRequest) -> ChangeReport:
        """Let a drained node have copies again."""
        self._check_node(asked.node)
        return await self._change(
            lambda view, stamp: undrain(view, asked.node, stamp), is_dry=asked.dry_run
        )

    async def remove(self, asked: NodeRequest) -> ChangeReport:
        """Take a node out of the cluster."""
        self._check_node(asked.node)
        return await self._change(
            lambda view, stamp: remove(view, asked.node, stamp), is_dry=asked.dry_run
        )

    async def failover(self, asked: MasterFailoverRequest) -> ChangeReport:
        """Give partitions of a master to another copy."""
        if (asked.node is None) == (asked.vb is None):
            raise ClusterRefusedError(
                "a failover is of one node or of one partition", "Name NODE, or --vb VB",
                status=HTTPStatus.BAD_REQUEST,
            )  # fmt: skip
        if asked.node is not None:
            self._check_node(asked.node)
        if asked.vb is not None:
            self._check_partition(asked.vb)
        shown = None if asked.shown_vbs is None else frozenset(asked.shown_vbs)

        def prepare(view: ClusterView, stamp: Stamp) -> Answer:
            return failover(view, stamp, node=asked.node, vb_id=asked.vb, is_unclean=asked.unclean)

        if not asked.lose:
            return await self._change(prepare, is_dry=asked.dry_run, shown=shown)
        report = await self._change(prepare, is_dry=True)  # it refuses what cannot be done
        note = await self._lose(asked)
        if not asked.dry_run:
            report = await self._change(prepare, is_dry=False)
        return replace(report, notes=[note, *report.notes], has_changes=True)

    async def _lose(self, asked: MasterFailoverRequest) -> str:
        """Undo the newest changes of a partition on all copies, as if its next master had not had
        them; say which. The receipt is that of an unclean election.
        """
        vb_id, replicated = asked.vb, self._replicated
        if vb_id is None or asked.unclean:
            raise ClusterRefusedError(
                "changes are lost of one partition, and by a failover to a copy in sync",
                "Name --vb VB, without --unclean", status=HTTPStatus.BAD_REQUEST,
            )  # fmt: skip
        if not self._is_test_mode:
            raise ClusterRefusedError(
                "a failover that loses answered changes is for tests, and this node is not in test "
                "mode", "Start the node with --test-mode on", status=HTTPStatus.FORBIDDEN,
            )  # fmt: skip
        mastership = replicated.core.master.masterships.get(vb_id)
        if mastership is None:
            master = self._view.partitions[vb_id].content.record.master or "nobody"
            raise ClusterRefusedError(
                f"this node is not the master of partition {vb_id}:"
                f" {name_of(self._view, master)} is",
                "Ask that node",
            )
        high_seqno = mastership.part.high_seqno
        if asked.lose > high_seqno:
            raise ClusterRefusedError(
                f"partition {vb_id} ends at seqno {high_seqno}; it cannot lose {asked.lose} changes"
            )
        at_seqno = high_seqno - asked.lose
        note = f"changes {at_seqno + 1} to {high_seqno} of partition {vb_id} are lost on all copies"
        try:
            mastership.check_branch(at_seqno)
            if not asked.dry_run:
                await replicated.lose(vb_id, at_seqno)
        except (BranchRefusedError, BranchUnknownError) as error:
            raise ClusterRefusedError(str(error)) from error
        return note

    # -- how it is done ----------------------------------------------------------------------------

    def _check_node(self, text: str) -> None:
        self._check_view()
        found = member_named(self._view, text)
        if isinstance(found, RequestRefused):
            raise ClusterRefusedError(found.text, "Name one of them", status=HTTPStatus.NOT_FOUND)

    def _check_partition(self, vb_id: int) -> None:
        if vb_id >= (count := self._replicated.num_vbuckets):
            raise ClusterRefusedError(
                f"there is no partition {vb_id}", f"Partitions are 0 to {count - 1}",
                status=HTTPStatus.NOT_FOUND,
            )  # fmt: skip

    def _check_view(self) -> None:
        """Refuse what would be decided by a view that is old for certain."""
        if trouble := self._replicated.access.trouble:
            raise ClusterRefusedError(
                f"the metadata store does not answer: {trouble}",
                "Nothing can change before it does; start it again",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
            )
        if refused := refused_unreadable(self._view):
            raise ClusterRefusedError(refused.text, status=HTTPStatus.SERVICE_UNAVAILABLE)

    async def _until_seen(self) -> None:
        """Wait until all members that may get copies are seen, for `JOINED_S` at most."""
        for _ in range(int(JOINED_S / AGAIN_S)):
            if not unseen_members(self._view):
                return
            await asyncio.sleep(AGAIN_S)

    async def _change(
        self,
        prepare: Callable[[ClusterView, Stamp], Answer],
        *,
        is_dry: bool,
        shown: frozenset[int] | None = None,
    ) -> ChangeReport:
        """Write a request. What it relies on may change meanwhile, for example because a node has
        just joined: then it is made anew from a newer view. `shown`: the partitions that it may
        elect uncleanly; None: all.
        """
        for tries_left in reversed(range(TRIES_MAX)):
            self._check_view()
            operation = f"{self._replicated.member}.{uuid4().hex}"
            prepared = prepare(self._view, Stamp(operation, time.time_ns() // 1_000_000))
            if isinstance(prepared, RequestRefused):
                raise ClusterRefusedError(prepared.text)
            _check_shown(_commanded(self._view, prepared), shown)
            report = self._report(prepared, operation)
            if is_dry or not prepared.txns:
                return report
            try:
                revision = await self._write(prepared)
            except ChangedMeanwhileError:
                if not tries_left:
                    raise
                await asyncio.sleep(AGAIN_S)
                continue
            return replace(report, is_written=True, revision=revision)
        raise AssertionError("the last try returns or raises")

    def _report(self, prepared: Prepared, operation: str) -> ChangeReport:
        """Return what a request would do."""
        view = self._view
        commanded = _commanded(view, prepared)
        return ChangeReport(
            what=prepared.what,
            has_changes=bool(prepared.txns),
            is_written=False,
            is_plan=prepared.has_plan,
            operation=operation,
            revision=view.revision,
            notes=[*prepared.notes, *unclean_notes(view, commanded)],
            nodes=[
                NodeChange(
                    node=counts.name, copies_before=counts.copies_before,
                    copies_after=counts.copies_after, masters_before=counts.masters_before,
                    masters_after=counts.masters_after,
                )
                for counts in member_counts(view, prepared.moves)
            ] if prepared.moves else [],
            moves=[
                PartitionChange(
                    vb=each.vb_id, before=[name_of(view, member) for member in each.present],
                    after=[name_of(view, member) for member in each.wanted],
                )
                for each in prepared.moves
            ],
            unclean_vbs=id_ranges(commanded),
        )  # fmt: skip

    async def _write(self, prepared: Prepared) -> int:
        """Write a request; return the revision after it."""
        revision = 0
        for txn in prepared.txns:
            revision = await self._write_one(prepared, txn)
        return revision

    async def _write_one(self, prepared: Prepared, txn: Txn) -> int:
        """Write one transaction; return its revision. An answer that is lost is looked up: the
        transaction may have happened, and may still happen.
        """
        was_unknown = False
        for _ in range(UNKNOWN_MAX):
            result = await self._ask(txn)
            if isinstance(result, TxnResult) and result.succeeded:
                return result.revision
            if was_unknown or isinstance(result, OutcomeUnknown):
                found = await self._ask_again(Range(prepared.check_key))
                if was_written(prepared, found.items):
                    return found.revision
            if isinstance(result, TxnResult):
                why = why_not_written(self._view, result)
                raise (ChangedMeanwhileError if gives_way(result) else ClusterRefusedError)(why)
            if isinstance(result, OutcomeUnknown):
                was_unknown = True
                continue
            raise _not_taken(result)
        raise ClusterRefusedError(
            "the metadata store did not answer, so it is not known whether this was written", _LOOK,
            status=HTTPStatus.SERVICE_UNAVAILABLE,
        )  # fmt: skip

    async def _ask(self, request: StoreRequest) -> StoreResult:
        try:
            return await ask(self._replicated.access.meta, request)
        except EnrolmentError as error:
            return OutcomeUnknown(error.why)

    async def _ask_again(self, request: Range) -> RangeResult:
        result = await ask_again(self._replicated.access.meta, request)
        if not isinstance(result, RangeResult):
            raise _not_taken(result)
        return result


def _not_taken(result: StoreResult) -> ClusterRefusedError:
    text = getattr(result, "text", str(result))
    told = "refuses this" if isinstance(result, StoreRefused) else "does not answer"
    return ClusterRefusedError(
        f"the metadata store {told}: {text}", _LOOK, status=HTTPStatus.SERVICE_UNAVAILABLE
    )


def _commanded(view: ClusterView, prepared: Prepared) -> list[int]:
    """Return the partitions that a request elects uncleanly."""
    keys = [put.key for txn in prepared.txns for put in txn.then if isinstance(put, Put)]
    parsed = [view.keys.parse(key) for key in keys]
    return [name.vb_id for name in parsed if name is not None and name.kind is KeyKind.COMMAND]


def _check_shown(commanded: list[int], shown: frozenset[int] | None) -> None:
    """Refuse to elect partitions uncleanly that the operator was not shown: more nodes may have
    died while the question stood.
    """
    if shown is None:
        return
    more = sorted(set(commanded) - shown)
    if more:
        raise ClusterRefusedError(
            f"{len(more)} partitions ({more[0]} is the first) have lost their last copy in sync "
            "since you were shown what may be lost, so more would be lost now",
            "Look at it again with --dry-run, and see whether those nodes come back",
        )


def plan_progress(view: ClusterView) -> PlanProgress | None:
    """Return how far the plan in a view is; None: there is none."""
    found = progress_of(view)
    if found is None or view.plan is None:
        return None
    return PlanProgress(
        operation=found.operation, what=plan_words(view, view.plan.content), kind=str(found.kind),
        partitions=found.partitions, done=found.done, filling=found.filling,
        handovers=found.handovers,
        waits_for={name_of(view, member): count for member, count in found.waits_for.items()},
    )  # fmt: skip
