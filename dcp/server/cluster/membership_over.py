"""Why a process takes no further part in its cluster. Nothing is wrong with the program then."""

from __future__ import annotations


class MembershipOverError(RuntimeError):
    """Another process is the member, or has its address, or the versions differ. The text says what
    to do.
    """


class NodeRemovedError(MembershipOverError):
    """An operator has removed the node: its work is done."""
