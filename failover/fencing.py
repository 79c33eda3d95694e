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

    Whoever is on the lower epoch reads the partition record again before it tries again.
    """
    if is_same_epoch(own_epoch, other_epoch):
        return None
    late = "here, which reads it again" if own_epoch < other_epoch else "at the peer"
    return (
        f"leader epoch {other_epoch} was sent, and {own_epoch} is known here: the partition record"
        f" is out of date {late}. Try again under the newer epoch."
    )
