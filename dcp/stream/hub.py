"""Which connections follow which partition, so that a commit wakes only those that need it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from dcp.stream.active_stream import ActiveStream
from dcp.stream.group_leases import GroupLeases
from dcp.stream.remote_readers import RemoteReaders
from dcp.stream.stream_limits import StreamLimits
from dcp.wire.message import EndReason
from vbucket.engine.cut import Cut


class Follower(Protocol):
    """A producer connection as the hub sees it."""

    @property
    def stream_count(self) -> int:
        """Streams that are open on the connection."""

    def wake(self, vb_id: int) -> None:
        """The partition committed something."""

    def branched(self, vb_id: int, reason: EndReason) -> None:
        """The failover log of this partition changed."""

    def restated(self, vb_id: int) -> None:
        """The state of this partition changed."""

    def fenced(self, vb_id: int) -> None:
        """The partition may not answer now."""

    def begin_cut(self, cut: Cut) -> None:
        """The node drew a cut: streams stop there."""

    def supersede(self) -> None:
        """Another connection took this one's name: this one closes."""

    def reading(self, vb_id: int) -> Iterable[ActiveStream]:
        """Return the streams of this partition."""

    def end(self, stream: ActiveStream, reason: EndReason) -> None:
        """End a stream and tell the client why."""


class BatchTrace:
    """What the requests of the batch that a session takes now say about spans."""

    __slots__ = ("asked", "parent")

    def __init__(self) -> None:
        self.parent = ""  # the traceparent that the client has given last; "": none
        self.asked: dict[int, int] = {}  # opaque -> partition of the stream requests


class StreamHub:
    """The node's register of producer connections, by name, and of streams, by partition."""

    def __init__(self) -> None:
        self.trace: BatchTrace | None = None  # None: nobody makes spans
        self._followers: dict[int, dict[Follower, None]] = {}
        """Per partition, in order of arrival, so that the order of waking is deterministic."""
        self._names: dict[bytes, Follower] = {}
        self.cutting: dict[Follower, None] = {}  # negotiated closed times: they are told each cut
        self.cut_time = 0  # of the newest cut, or since when somebody waits for one; 0: nobody
        self.group_leases = GroupLeases()
        self.limits = StreamLimits()  # a producer looks there when it opens a stream
        self.remote = RemoteReaders()
        self.purged_past = self.too_slow = 0  # streams that ended: for a purge, for standing still

    @property
    def connection_count(self) -> int:
        """Producer connections that are open."""
        return len(self._names)

    @property
    def stream_count(self) -> int:
        """Streams that are open on all connections together."""
        open_now = {follower for group in self._followers.values() for follower in group}
        return sum(follower.stream_count for follower in open_now)

    def open(self, name: bytes, follower: Follower) -> None:
        """Register a producer; an older one of the same name is told to close."""
        older = self._names.get(name)
        self._names[name] = follower
        if older is not None:
            older.supersede()

    def close(self, name: bytes, follower: Follower) -> None:
        """Forget a producer and all that it follows."""
        if self._names.get(name) is follower:
            del self._names[name]
        self.cutting.pop(follower, None)
        for followers in self._followers.values():
            followers.pop(follower, None)

    def follow(self, vb_id: int, follower: Follower) -> None:
        """From now on, wake `follower` when the partition commits something."""
        self._followers.setdefault(vb_id, {})[follower] = None

    def unfollow(self, vb_id: int, follower: Follower) -> None:
        """Stop waking `follower` for this partition."""
        self._followers.get(vb_id, {}).pop(follower, None)

    def reading(self, vb_id: int) -> Iterator[ActiveStream]:
        """Return the streams of a partition."""
        for follower in self._followers.get(vb_id, ()):
            yield from follower.reading(vb_id)

    def end(self, stream: ActiveStream, reason: EndReason) -> None:
        """End a stream of any connection."""
        self.too_slow += reason == EndReason.TOO_SLOW
        for follower in tuple(self._followers.get(stream.vb_id, ())):
            if stream in follower.reading(stream.vb_id):
                follower.end(stream, reason)
                return

    def committed(self, vb_ids: Iterable[int]) -> None:
        """Wake the followers of these partitions."""
        followers = self._followers
        for vb_id in vb_ids if followers else ():
            for follower in followers.get(vb_id, ()):
                follower.wake(vb_id)

    def branched(self, vb_id: int, reason: EndReason = EndReason.ROLLBACK) -> None:
        """The partition's failover log changed: end the streams that began before."""
        for follower in tuple(self._followers.get(vb_id, ())):
            follower.branched(vb_id, reason)

    def restated(self, vb_id: int) -> None:
        """The partition's state changed: end the streams that the new state does not allow."""
        for follower in tuple(self._followers.get(vb_id, ())):
            follower.restated(vb_id)

    def fenced(self, vb_id: int) -> None:
        """The partition may not answer now: end its streams with reason 2. A consumer that reaches
        only a deposed master must notice that it stands still.
        """
        for follower in tuple(self._followers.get(vb_id, ())):
            follower.fenced(vb_id)
