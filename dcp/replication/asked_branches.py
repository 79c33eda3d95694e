"""Branches that operators have asked this node for, until the records say what became of them.
Sans-IO.

Who calls it: `dcp.replication.leading`.

Invariant: each branch that is asked for ends once, with a reason if it is not known to be done.
"""

from __future__ import annotations

from dcp.replication.mastership import Mastership
from dcp.replication.shell_effects import BranchEnded, ReplicationEffect
from failover.replication_record import BranchUnderWay, ReplicationRecord, start_branch
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

    def __init__(self, engine: Engine, member: str, effects: list[ReplicationEffect]) -> None:
        self._engine = engine
        self._member = member
        self._effects = effects
        self._asked: dict[int, _AskedBranch] = {}

    def want(self, vb_id: int, mastership: Mastership | None, branch: BranchUnderWay) -> str:
        """Begin to want a branch; return why it cannot begin, "" if it will."""
        part = self._engine.partitions[vb_id]
        if mastership is None or part.state != VbState.ACTIVE:
            return f"vb {vb_id}: this node does not serve it now; ask its master"
        if mastership.branch_wanted is not None or mastership.record.branch is not None:
            return f"vb {vb_id}: another branch is under way"
        try:
            mastership.check_branch(branch.seqno)
        except BranchRefusedError as error:
            return str(error)
        mastership.want_branch(branch)
        self._asked[vb_id] = _AskedBranch(branch)
        return ""

    def next_record(self, mastership: Mastership) -> ReplicationRecord | None:
        """Return the record with the branch that is wanted; None: it became impossible."""
        wanted, vb_id = mastership.branch_wanted, mastership.part.vb_id
        assert wanted is not None
        try:
            mastership.check_branch(wanted.seqno)
        except BranchRefusedError as error:  # somebody else has joined since, for example
            mastership.want_branch(None)
            self._asked.pop(vb_id, None)
            self._effects.append(BranchEnded(vb_id, wanted.vb_uuid, str(error)))
            return None
        return start_branch(mastership.record, wanted)

    def ended(
        self, vb_id: int, mastership: Mastership | None, record: ReplicationRecord
    ) -> BranchEnded | None:
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
