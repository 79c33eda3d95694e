"""What a node is to its cluster, from its first start to its end. Pure.

    ALONE ──── a command to become a member ────> BECOMING
    BECOMING ─ it failed ───────────────────────> ALONE
    BECOMING ─ cluster.json is on disk ─────────> JOINED      the node restarts in its process
    (a start with cluster.json) ────────────────> MEMBER
    MEMBER ─── another process is the member ───> REPLACED
    any but REPLACED ── the node stops ─────────> LEAVING

TRANSITIONS is the whole table: what is not in it cannot happen, and raises AssertionError.

Invariants
- changes are taken in ALONE, and in MEMBER by the records of the cluster. In no other state: what
  is answered there would be lost;
- nothing leads from JOINED back to ALONE: who starts next on the folder is a member;
- LEAVING and REPLACED are final. A node that stops is not started again, whatever happens to a
  command that is still under way.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final


class Standing(Enum):
    """See the module."""

    ALONE = auto()
    BECOMING = auto()
    JOINED = auto()
    MEMBER = auto()
    REPLACED = auto()
    LEAVING = auto()


class Happening(Enum):
    """What happens to a node."""

    BEGUN = auto()
    """A command to become a member has begun."""
    FAILED = auto()
    """It has failed; cluster.json is not there."""
    FILED = auto()
    """cluster.json is on disk."""
    REPLACED = auto()
    """Another process is the member."""
    STOPPED = auto()
    """The node stops: by a signal, or to start again."""


TRANSITIONS: Final[dict[tuple[Standing, Happening], Standing]] = {
    (Standing.ALONE, Happening.BEGUN): Standing.BECOMING,
    (Standing.ALONE, Happening.STOPPED): Standing.LEAVING,
    (Standing.BECOMING, Happening.FAILED): Standing.ALONE,
    (Standing.BECOMING, Happening.FILED): Standing.JOINED,
    (Standing.BECOMING, Happening.STOPPED): Standing.LEAVING,
    (Standing.JOINED, Happening.STOPPED): Standing.LEAVING,
    (Standing.MEMBER, Happening.REPLACED): Standing.REPLACED,
    (Standing.MEMBER, Happening.STOPPED): Standing.LEAVING,
    (Standing.REPLACED, Happening.STOPPED): Standing.REPLACED,
    # A command that was under way when the node began to stop.
    (Standing.LEAVING, Happening.FAILED): Standing.LEAVING,
    (Standing.LEAVING, Happening.FILED): Standing.LEAVING,
    (Standing.LEAVING, Happening.STOPPED): Standing.LEAVING,
}

WHY_NOT: Final[dict[Standing, tuple[str, str]]] = {
    Standing.BECOMING: (
        "this node is becoming a member already, by another command",
        "Wait for that one, and then look at `dcpctl cluster status`",
    ),
    Standing.JOINED: (
        "this node has just become a member, and restarts",
        "Look at `dcpctl cluster status`",
    ),
    Standing.LEAVING: ("this node stops", "Start it again, then try again"),
}
"""Why a node cannot begin to become a member, and what to try."""


class Enrolment:
    """The standing of one node; see the module."""

    def __init__(self, standing: Standing = Standing.ALONE) -> None:
        self.standing = standing

    def happened(self, what: Happening) -> None:
        """Take note of what happened."""
        after = TRANSITIONS.get((self.standing, what))
        assert after is not None, f"a node that is {self.standing.name}: {what.name}"
        self.standing = after

    @property
    def takes_changes_alone(self) -> bool:
        """Whether the node takes changes without a cluster."""
        return self.standing is Standing.ALONE

    @property
    def restarts(self) -> bool:
        """Whether the node has to start again in its process."""
        return self.standing is Standing.JOINED
