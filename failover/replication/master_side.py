"""What a replica's feed asks and tells the node core. `failover.replication.leading` implements
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from dcp.session.replication_port import FeedAnswer
from dcp.wire.message import StreamRequest
from failover.replication.group import WholeGroup
from failover.replication.messages import ReplicaPosition, StoreSeen
from failover.replication.progress import Followed

Feed_contra = TypeVar("Feed_contra", contravariant=True)
"""The feed, which is defined by who implements it: it uses this protocol itself."""


class MasterSide(Protocol[Feed_contra]):
    """See the module."""

    def admit(
        self,
        feed: Feed_contra,
        vb_id: int,
        asked: StreamRequest,
        told: ReplicaPosition,
        opaque: int,
    ) -> FeedAnswer | None:
        """Decide about a replica's stream request; open the stream if it may continue. None: it is
        decided when the epoch is known here, and its beginning on disk (`decide_waiting`).
        """

    def acknowledged(self, member: str, followed: Sequence[Followed]) -> None:
        """A replica has synced these."""

    def groups_acknowledged(self, member: str, groups: Sequence[WholeGroup]) -> None:
        """A replica has synced what it got of these whole groups, all of it on streams that are
        open since.
        """

    def confirmed(self, feed: Feed_contra) -> None:
        """A replica has confirmed that this node is the master of what it follows."""

    def serves_by(self) -> StoreSeen:
        """Return by which records of the metadata store this node serves all that it masters."""

    def records_were_kept(self) -> None:
        """A replica has more of the metadata store's records on disk: `ReplicaFeed.seen`."""

    def feed_closed(self, feed: Feed_contra) -> None:
        """The link is gone."""
