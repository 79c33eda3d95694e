"""The fence of replication: both sides are on the same epoch, or nothing happens.

Who calls it: a master for every stream request and message of a replica, a replica for every
message of its master, the simulator and the model checker.

Without it a replica reconciles its log with a master that has been deposed, and then calls the
result the history of the present epoch (rule 2 of KIP-320).
"""

from __future__ import annotations


def is_same_epoch(own_epoch: int, other_epoch: int) -> bool:
    """Return whether two sides may act on each other's messages: they are on the same epoch."""
    return own_epoch == other_epoch


def refusal(own_epoch: int, other_epoch: int) -> str | None:
    """Return why a peer's request is refused, with both epochs; None if it is not.

    The side on the lower epoch reads the replication record again before the next attempt.
    """
    if is_same_epoch(own_epoch, other_epoch):
        return None
    behind = "this node" if own_epoch < other_epoch else "the peer"
    return (
        f"the peer sent leader epoch {other_epoch}, and this node is on {own_epoch}: {behind} has"
        " an old replication record. Read the record again, and try under the newer epoch."
    )


def is_same_copy(number: int | None, other_number: int | None) -> bool:
    """Return whether master and member speak of the same copy; None: the member holds none.

    The number of a copy rises when it is dropped and added again, which leaves the epoch. A member
    that has not seen this yet may still empty what it has.
    """
    return number == other_number
