"""What the replication of a node asks its shell to do. Pure."""

from __future__ import annotations

from typing import NamedTuple

from dcp.core.groups import Published


class Dial(NamedTuple):
    """Connect to a member's node; give the connection to the link (`Following.links`)."""

    member: str


class MapChanged(NamedTuple):
    """The partition map that clients get has changed."""


class CutOff(NamedTuple):
    """A replica cuts off changes that may have been answered: keep them in a file, and tell.

    The shell carries it out before it writes another group: then the cut is not on disk yet.
    """

    vb_id: int
    epoch: int
    """The leader epoch whose master does not have them."""
    versions: tuple[tuple[int, int], ...]
    """(vb_uuid, seqno at which it began) of this node, newest first."""
    entries: tuple[bytes, ...]
    """The changes, as the log stores them."""


ReplicationEffect = Published | Dial | MapChanged | CutOff
