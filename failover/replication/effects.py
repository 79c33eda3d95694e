"""What the replication of a node asks its shell to do. Pure."""

from __future__ import annotations

from typing import NamedTuple

from dcp.core.groups import Published
from failover.coordinator.effects import Notice
from vbucket.model.receipt import CutOff, ElectionLoss


class Dial(NamedTuple):
    """Connect to a member's node; give the connection to the link (`Replica.links`)."""

    member: str


class MapChanged(NamedTuple):
    """The partition map that clients get has changed."""

    vb_ids: tuple[int, ...]
    """Partitions whose records are others now."""


class Undone(NamedTuple):
    """How much a branch undid."""

    seqnos: int
    keys: int
    """Keys whose newest version changed; see `vbucket.engine.partition.Branch`."""


class BranchEnded(NamedTuple):
    """A branch that was asked for here (`Master.want_branch`) is decided: answer the operator."""

    vb_id: int
    vb_uuid: int
    """The version that was asked for."""
    why_not: str
    """Why it is not known to be done; "": all copies in sync have rolled back."""
    undone: Undone = Undone(0, 0)
    """What this node undid for it."""


class StepDue(NamedTuple):
    """Call `ReplicationCore.step` soon: something need not wait for the next tick."""


class PartitionsArrived(NamedTuple):
    """Resume the sessions that wait for a partition: it is served, or will not be served soon."""


class Steps:
    """Asks the shell for a step between ticks (`StepDue`): once, until the step is taken."""

    def __init__(self, effects: list[ReplicationEffect]) -> None:
        self._effects = effects
        self.is_due = False

    def ask(self) -> None:
        """Ask for a step, unless the shell was asked already."""
        if not self.is_due:
            self.is_due = True
            self._effects.append(StepDue())


ReplicationEffect = (
    Published
    | Dial
    | MapChanged
    | CutOff
    | ElectionLoss
    | BranchEnded
    | StepDue
    | PartitionsArrived
    | Notice
)
"""CutOff: write the file, then answer with `Replica.kept` or `Replica.not_kept`.
ElectionLoss: write the receipt."""
