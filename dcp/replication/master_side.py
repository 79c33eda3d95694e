"""What a replica's feed asks and tells the node core. `dcp.replication.leading` implements it."""

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
    """See the module."""

    def admit(
        self,
        feed: ReplicaFeed,
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

    def confirmed(self, feed: ReplicaFeed) -> None:
        """A replica has confirmed that this node is the master of what it follows."""

    def feed_closed(self, feed: ReplicaFeed) -> None:
        """The link is gone."""
