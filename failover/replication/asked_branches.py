"""The branches that operators asked this node for, until each is decided. Sans-IO.

    asked ── the record names it ──> recorded ── the whole in-sync set has rolled back ──> made
      └── refused, or another master ─────────────────────────────────────────────────> not made

Who calls it: `failover.replication.leading`, and `node` with every new record.
"""

from __future__ import annotations

from collections.abc import Mapping

from failover.replication.effects import BranchEnded
from failover.replication.mastership import Mastership
from failover.rules.replication_record import BranchUnderWay, ReplicationRecord
from vbucket.engine.branch import BranchRefusedError
from vbucket.engine.engine import Engine
from vbucket.engine.partition import VbState


class _AskedBranch:
    """A branch that was asked for here."""

    __slots__ = ("branch", "is_recorded")

    def __init__(self, branch: BranchUnderWay) -> None:
        self.branch = branch
        self.is_recorded = False
        """Whether a record was seen that names it."""


class AskedBranches:
    """See the module."""

    def __init__(self, engine: Engine, masterships: Mapping[int, Mastership], member: str) -> None:
        self._engine = engine
        self._masterships = masterships
        self._member = member
        self._asked: dict[int, _AskedBranch] = {}

    def want(self, vb_id: int, seqno: int, vb_uuid: int) -> str:
        """Ask for a branch of a partition; return why it cannot begin, "" if it will.

        The record says so first, then the whole in-sync set rolls back. The effect BranchEnded
        says when that is done.
        """
        mastership = self._masterships.get(vb_id)
        part = self._engine.partitions[vb_id]
        if mastership is None or part.state != VbState.ACTIVE:
            return f"vb {vb_id}: this node does not serve it now; ask its master"
        if mastership.branch_wanted is not None or mastership.record.branch is not None:
            return f"vb {vb_id}: another branch is under way"
        try:
            mastership.check_branch(seqno)
        except BranchRefusedError as error:
            return str(error)
        branch = BranchUnderWay(vb_uuid, seqno)
        mastership.want_branch(branch)
        self._asked[vb_id] = _AskedBranch(branch)
        return ""

    def give_up(self, vb_id: int) -> None:
        """A branch cannot be made any more."""
        self._asked.pop(vb_id, None)

    def ended(self, vb_id: int, record: ReplicationRecord) -> BranchEnded | None:
        """Return the end of a branch that was asked for here, if a new record says that it ended.

        A branch that a record names is finished, by this master or the next one, unless damaged
        data is in the way. All members in sync have the master's failover log by then.
        """
        asked = self._asked.get(vb_id)
        if asked is None:
            return None
        if record.branch == asked.branch:
            asked.is_recorded = True
            return None
        mastership = self._masterships.get(vb_id)
        if mastership is not None and mastership.branch_wanted == asked.branch:
            return None  # it is not written yet
        del self._asked[vb_id]
        vb_uuid = asked.branch.vb_uuid
        log = self._engine.partitions[vb_id].failover
        if (
            asked.is_recorded
            and record.branch is None
            and self._member in record.isr
            and vb_uuid in dict(log.pairs())
        ):
            return BranchEnded(vb_id, vb_uuid, "")
        return BranchEnded(
            vb_id, vb_uuid,
            f"vb {vb_id}: this node is not its master any more, or could not carry the branch out "
            f"(its log says why). If the failover log has version {vb_uuid}, the branch was made; "
            "otherwise ask the present master for it",
        )  # fmt: skip
