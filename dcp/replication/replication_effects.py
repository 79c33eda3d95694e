"""What the node core of replication asks its shell to do. Pure."""

from __future__ import annotations

from typing import NamedTuple

from dcp.core.groups import Published


class Dial(NamedTuple):
    """Connect to a member's node; give the connection to the link (`ReplicationCore.links`)."""

    member: str


class MapChanged(NamedTuple):
    """The partition map that clients get has changed."""


ReplicationEffect = Published | Dial | MapChanged
