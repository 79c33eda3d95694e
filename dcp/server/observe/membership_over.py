"""Why a process takes no further part in its cluster. Nothing is wrong with the program then."""

from __future__ import annotations


class MembershipOverError(RuntimeError):
    """Another process is the member, or has its address, or the versions differ. The text says what
    to do.
    """


class NodeRemovedError(MembershipOverError):
    """An operator has removed the node: its work is done."""


def event_of(error: Exception) -> str:
    """Return what the log calls the end of a server by this error."""
    return "removed from the cluster" if isinstance(error, NodeRemovedError) else "server failed"
