"""Where a client sends an operation: the seam for the clients' routing core.

A single node serves every partition, so `OneNode` has no decisions to make.
"""

from __future__ import annotations

from typing import Protocol


class Routing(Protocol):
    """Decides to which node an operation goes."""

    def node_of(self, vb_id: int) -> str | None:
        """Return the node that serves a partition; None: nobody is known to."""

    def refused(self, vb_id: int, node: str, status: int, body: bytes) -> None:
        """A node has refused an operation of a partition."""

    def lost(self, node: str) -> None:
        """The connection to a node is gone, or could not be made."""

    def left_out(self, vb_id: int, node: str) -> None:
        """A node cannot read its copy of a partition."""

    def is_last(self, vb_id: int, node: str) -> bool:
        """Whether all copies of a partition but that of a node have said so."""


class OfMasters:
    """Clients that read from masters only."""

    def left_out(self, vb_id: int, node: str) -> None:
        """See Routing: they stay with the master."""

    def is_last(self, vb_id: int, node: str) -> bool:
        """See Routing."""
        return True


class OneNode(OfMasters):
    """All partitions are on one node."""

    def __init__(self, node: str) -> None:
        self._node = node

    def node_of(self, vb_id: int) -> str | None:
        """See Routing."""
        return self._node

    def refused(self, vb_id: int, node: str, status: int, body: bytes) -> None:
        """See Routing."""

    def lost(self, node: str) -> None:
        """See Routing."""
