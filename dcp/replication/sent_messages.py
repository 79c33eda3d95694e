"""What a feed remembers of the messages that a replica has not acknowledged. Pure.

Who calls it: `dcp.replication.replica_feed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from dcp.replication.fed_stream import FedStream, Followed
from dcp.replication.whole_groups import WholeGroup

RECORD_BYTES: Final = 256
"""What this node remembers of a message, and of each of its sections, until it is acknowledged."""


class SentWhole(NamedTuple):
    """A whole group on its way."""

    group: WholeGroup
    seqnos: Mapping[int, int]
    """What the replica got of it."""
    streams_revision: int
    """Of the link's streams when it was sent (`StreamChanges`)."""


class Sent(NamedTuple):
    """A message that is not acknowledged."""

    number: int
    cost: int
    followed: tuple[tuple[FedStream, Followed], ...] = ()
    whole: SentWhole | None = None
