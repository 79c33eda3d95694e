"""What a feed asks and tells the core of its node (`dcp.replication.replica_feed`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from dcp.replication.fed_stream import Followed
from dcp.replication.messages import ReplicaPosition
from dcp.replication.whole_groups import WholeGroup
from dcp.session.replication_port import FeedAnswer
from dcp.wire.message import StreamRequest

if TYPE_CHECKING:
    from dcp.replication.replica_feed import ReplicaFeed


class MasterSide(Protocol):
    """What the feed asks and tells the node core."""

    def admit(
        self,
        feed: ReplicaFeed,
        vb_id: int,
        asked: StreamRequest,
        told: ReplicaPosition,
        opaque: int,
    ) -> FeedAnswer:
        """Decide about a replica's stream request; open the stream if it may continue."""

    def acknowledged(self, member: str, followed: Sequence[Followed]) -> None:
        """A replica has synced these."""

    def groups_acknowledged(self, member: str, groups: Sequence[WholeGroup]) -> None:
        """A replica has synced what it got of these whole groups, all of it on streams that are
        open since.
        """

    def feed_closed(self, feed: ReplicaFeed) -> None:
        """The link is gone."""
