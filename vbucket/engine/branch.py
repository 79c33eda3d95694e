"""A history branch: what it did, and where one cannot begin. Pure.

Who calls it: the keyspace, before it undoes anything, and who asks it for branches.
"""

from __future__ import annotations

from typing import NamedTuple

from failover.rules.history import FailoverLog
from vbucket.engine.partition import Partition


class BranchRefusedError(Exception):
    """A history branch cannot begin there; the text says why."""


class FloorError(BranchRefusedError):
    """The branch point is below the history floor. A branch at 0 is still possible."""


class Branch(NamedTuple):
    """A new partition version that an operator asked for.

    `undone_keys` counts the keys whose newest version changed. For a branch at 0 it counts the
    documents that were there: finding all keys would take longer than undoing them.
    """

    vb_id: int
    failover: FailoverLog
    seqno: int
    undone_seqnos: int
    undone_keys: int


def check_undo(part: Partition, at_seqno: int) -> None:
    """Raise BranchRefusedError if a partition cannot go back to a seqno."""
    vb_id = part.vb_id
    if at_seqno > part.high_seqno:
        raise BranchRefusedError(
            f"vb {vb_id} ends at seqno {part.high_seqno}; a branch cannot begin at {at_seqno}"
        )
    if 0 < at_seqno < part.history_floor:
        raise FloorError(
            f"vb {vb_id} cannot go back to {at_seqno}: its history floor is "
            f"{part.history_floor}, and older versions may have been removed by compaction. It can "
            f"go back to {part.history_floor} and above, or to 0"
        )
