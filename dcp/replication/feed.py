"""The master's side of a replication link: what one replica's node gets. Sans-IO.

    IN_STEP   the partition is in every group message: it has all that is synced here
    BEHIND    it is read from its cursor, from memory or from blocks, until it is level

Below the master's history floor versions may be gone. A replica that is there gets what is left up
to the floor as a snapshot: its seqnos have gaps, and it is of use only as a whole. The floor may
rise meanwhile; then so does the end of the snapshot. Nothing is held back for it. Only deletions
that are purged meanwhile can make a part useless (`_Stream.is_overtaken`): then the stream is
ended, and the answer to the next request sends the replica to 0.

Who calls it: the session passes requests and acknowledgements on, the connection pumps messages
(it is to the connection what `dcp.stream.producer` is for consumers), and the node core reports
synced groups and answers what the feed asks (`MasterSide`).

Invariants
- only what is synced here is sent (`failover.isr.sendable_seqno`);
- at most `window_bytes` of entries are sent and not acknowledged, and one more section. A partition
  that finds the window full goes BEHIND: it costs a cursor, no memory, and no wait;
- an acknowledgement counts for a partition if its stream was open when the message was made, and
  not for a part of a snapshot;
- a replica knows the master's floors before it gets a change that was made after they rose.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple, Protocol

from dcp.replication.messages import (
    FloorsTold,
    Position,
    Section,
    SnapshotDone,
    Told,
    decode,
    pack_entries,
    pack_told,
    unpack_ack,
)
from dcp.session.replication_port import FeedAnswer, ReplicationError
from dcp.wire.frame import Frame
from dcp.wire.message import EndReason, StreamRequest, pack_stream_end, parse_stream_request
from vbucket.engine.engine import Engine
from vbucket.engine.partition import Partition
from vbucket.model.control import SnapshotWindow
from vbucket.model.entry import seqno_of
from vbucket.model.ids import SEQNO_MAX
from vbucket.store.environment import StoreDamagedError

WINDOW_BYTES: Final = 8 << 20
"""Entries on their way to one replica: at 100 MB/s, 80 ms of them."""
BEAT_NS: Final = 100_000_000
"""Time between heartbeats, and the longest time between two questions."""
SILENCE_NS_MAX: Final = 3_000_000_000
"""A replica that was not heard for so long is disconnected: it answers 10 questions a second."""

NEVER: Final = SEQNO_MAX
"""Above the number of every message."""


class Pace(Enum):
    """See the module."""

    IN_STEP = auto()
    BEHIND = auto()


class Followed(NamedTuple):
    """What a replica has acknowledged of a partition, in one message."""

    vb_id: int
    epoch: int
    seqno: int


class _Stream:
    """One partition on the link."""

    __slots__ = (
        "confirmations", "epoch", "floors", "opaque", "pace", "safe_purge", "sent_seqno",
        "shown_seqno", "whole_number", "window",
    )  # fmt: skip

    def __init__(
        self,
        epoch: int,
        opaque: int,
        seqno: int,
        confirmations: int,
        window: SnapshotWindow | None,
    ) -> None:
        self.confirmations = confirmations
        """How many confirmations the link had when the stream was opened."""
        self.epoch = epoch
        self.opaque = opaque
        self.sent_seqno = seqno
        self.pace = Pace.BEHIND
        self.shown_seqno = -1
        """The high watermark that the replica was told last."""
        self.floors = FloorsTold(0, 0)
        """The floors that the replica was told while it was behind. Floors never fall, so these are
        the present ones only if it knows them."""
        self.window = window
        """The snapshot of which the replica has a part; None: what it has is whole."""
        self.whole_number = 0 if window is None else NEVER
        """The message that ends the last snapshot; NEVER: it was not sent yet."""
        self.safe_purge = 0 if window is None else window.purge
        """Deletions up to this seqno were purged, or superseded what they delete, before anything
        of the snapshot was read."""

    def is_overtaken(self, part: Partition) -> bool:
        """Whether deletions were purged that the replica has not got, of documents that it has."""
        return 0 < self.sent_seqno < part.purge_seqno and part.purge_seqno > self.safe_purge

    def news(self, part: Partition) -> list[bytes]:
        """Return the control entries that come before the next changes."""
        floors = FloorsTold(part.history_floor, part.purge_seqno)
        window = self.window
        if window is None and self.sent_seqno < floors.floor:
            self.window = SnapshotWindow(self.sent_seqno, *floors)
            # Who holds nothing gets no document that a deletion below the floor has deleted.
            self.safe_purge = 0 if self.sent_seqno else floors.floor
        elif window is not None:
            end = max(window.end, floors.floor)
            self.window = window._replace(end=end, purge=floors.purge)
        told: list[Told] = []
        if self.window is not None:
            if self.window != window:
                told.append(self.window)
        elif self.floors != floors:
            self.floors = floors
            told.append(floors)
        return [pack_told(part.vb_id, each) for each in told]

    def end_snapshot(self, part: Partition) -> list[bytes]:
        """Return the control entry that ends the snapshot if all of it is sent."""
        window = self.window
        if window is None or self.sent_seqno < window.end:
            return []
        self.window = None
        self.floors = FloorsTold(part.history_floor, part.purge_seqno)
        return [pack_told(part.vb_id, SnapshotDone(window.end, part.purge_seqno, part.max_cas))]


class MasterSide(Protocol):
    """What the feed asks and tells the node core."""

    def admit(
        self, feed: ReplicaFeed, vb_id: int, asked: StreamRequest, told: Position, opaque: int
    ) -> FeedAnswer:
        """Decide about a replica's stream request; open the stream if it may continue."""

    def acknowledged(self, member: str, followed: Sequence[Followed]) -> None:
        """A replica has synced these."""

    def feed_closed(self, feed: ReplicaFeed) -> None:
        """The link is gone."""


class ReplicaFeed:
    """See the module. `schedule` rings the connection, which pumps later."""

    def __init__(
        self,
        engine: Engine,
        member: str,
        side: MasterSide,
        schedule: Callable[[], None],
        *,
        now_ns: int,
        window_bytes: int = WINDOW_BYTES,
        section_bytes: int,
    ) -> None:
        self.member = member
        self.is_superseded = False
        """Whether a newer link of the same member has come: the connection closes."""
        self.damages: list[str] = []
        self._engine = engine
        self._side = side
        self._schedule = schedule
        self._window_bytes = window_bytes
        self._section_bytes = section_bytes
        self._streams: dict[int, _Stream] = {}
        self._out: list[bytes] = []
        self._behind: deque[int] = deque()
        """Partitions to read from their cursors, in turn."""
        self._stale: dict[int, None] = {}
        """Partitions whose high watermark the replica does not know, in the order they rose."""
        self._number = 0
        self._sent: deque[tuple[int, int, tuple[tuple[_Stream, Followed], ...]]] = deque()
        """Messages that are not acknowledged: number, bytes, what they bring."""
        self._sent_bytes = 0
        self._acknowledged_number = 0
        self._asked: deque[tuple[int, int]] = deque()
        """Questions that are not confirmed: question, when it was asked."""
        self._confirmations = 0
        self._confirmed_ns = 0
        """When the question was asked that was confirmed last."""
        self._now_ns = self._heard_ns = now_ns
        self._next_beat_ns = now_ns

    # -- streams -----------------------------------------------------------------------------------

    def stream_request(self, request: Frame) -> FeedAnswer:
        """Answer the request for a partition. Raises ReplicationError."""
        asked = parse_stream_request(request.extras)
        told = decode(request.value, Position)
        if request.vb_id >= self._engine.num_vbuckets:
            raise ReplicationError(f"there is no vb {request.vb_id} here")
        return self._side.admit(self, request.vb_id, asked, told, request.opaque)

    def open(
        self,
        vb_id: int,
        epoch: int,
        opaque: int,
        seqno: int,
        window: SnapshotWindow | None = None,
    ) -> None:
        """Feed a partition to the replica, which has everything up to `seqno`, or the part of the
        snapshot `window` up to there.
        """
        self._streams[vb_id] = _Stream(epoch, opaque, seqno, self._confirmations, window)
        self._behind.append(vb_id)
        self._stale[vb_id] = None
        self._schedule()

    def close_stream(self, vb_id: int) -> None:
        """The replica does not follow a partition any more."""
        self._streams.pop(vb_id, None)

    def end(self, vb_id: int) -> None:
        """Tell the replica that this node is not the partition's master any more."""
        stream = self._streams.pop(vb_id, None)
        if stream is not None:
            self._out.append(pack_stream_end(vb_id, stream.opaque, EndReason.STATE_CHANGED))
            self._schedule()

    def is_in_snapshot(self, vb_id: int) -> bool:
        """Whether the replica has only a part of a snapshot of a partition."""
        stream = self._streams.get(vb_id)
        if stream is None:
            return False
        return stream.whole_number > self._acknowledged_number

    def confirmed_ns(self, vb_id: int) -> int | None:
        """Return when the question was asked with which the replica last confirmed this master of
        a partition; None: it has not.

        The replica closes a stream before it confirms another master of the partition. So every
        confirmation that arrives while the stream is open is for this master.
        """
        stream = self._streams.get(vb_id)
        if stream is None or stream.confirmations == self._confirmations:
            return None
        return self._confirmed_ns

    # -- what the node core tells ------------------------------------------------------------------

    def group_synced(self, changes: Mapping[int, Sequence[bytes]]) -> None:
        """Send a synced group: partition -> its entries for replicas, floors included."""
        sections: list[Section] = []
        followed: list[tuple[_Stream, Followed]] = []
        room = self._window_bytes - self._sent_bytes
        partitions = self._engine.partitions
        for vb_id, entries in changes.items():
            stream = self._streams.get(vb_id)
            if stream is None or stream.pace is Pace.BEHIND:
                continue
            if room <= 0:
                stream.pace = Pace.BEHIND
                self._behind.append(vb_id)
                continue
            part = partitions[vb_id]
            sections.append(Section(vb_id, stream.epoch, part.committed_seqno, entries))
            stream.shown_seqno = part.committed_seqno
            stream.sent_seqno = part.synced_seqno
            followed.append((stream, Followed(vb_id, stream.epoch, part.synced_seqno)))
            room -= sum(map(len, entries))
        if sections:
            self._send(sections, followed)
        if self._behind:
            self._schedule()

    def hw_rose(self, vb_ids: Sequence[int]) -> None:
        """High watermarks have risen; the replica is told with the next message."""
        for vb_id in vb_ids:
            if vb_id in self._streams:
                self._stale[vb_id] = None
        if self._stale:
            self._schedule()

    def _send(
        self, sections: Sequence[Section], followed: Sequence[tuple[_Stream, Followed]]
    ) -> None:
        self._number += 1
        question = self._number
        self._asked.append((question, self._now_ns))
        message = pack_entries(self._number, question, sections)
        self._out.append(message)
        self._sent.append((self._number, len(message), tuple(followed)))
        self._sent_bytes += len(message)
        self._schedule()

    # -- the connection ----------------------------------------------------------------------------

    @property
    def has_output(self) -> bool:
        """Whether `pump` would return anything now."""
        return bool(self._out or self._stale or (self._behind and self._has_room))

    @property
    def _has_room(self) -> bool:
        return self._sent_bytes < self._window_bytes

    def pump(self, bytes_max: int) -> list[bytes]:
        """Return messages to send, about `bytes_max` of them."""
        while self._behind and self._has_room and bytes_max > 0:
            bytes_max -= self._catch_up(self._behind.popleft())
        if self._stale:
            self._send_watermarks()
        out, self._out = self._out, []
        return out

    def _catch_up(self, vb_id: int) -> int:
        """Send the next entries of a partition that is behind; return their bytes."""
        stream = self._streams.get(vb_id)
        if stream is None or stream.pace is Pace.IN_STEP:
            return 0
        part = self._engine.partitions[vb_id]
        try:
            entries = [] if stream.is_overtaken(part) else self._next_entries(stream, part)
        except StoreDamagedError as error:
            self.damages.append(str(error))
            entries = []
        if entries:
            # A floor is committed, also where a new master does not know so much of others yet.
            committed_seqno = max(part.committed_seqno, part.history_floor)
            stream.shown_seqno = part.committed_seqno
            section = Section(vb_id, stream.epoch, committed_seqno, entries)
            brought = Followed(vb_id, stream.epoch, stream.sent_seqno)
            is_whole = stream.window is None
            self._send([section], ((stream, brought),) if is_whole else ())
            if not is_whole:
                stream.whole_number = NEVER
            elif stream.whole_number == NEVER:
                stream.whole_number = self._number
        if stream.sent_seqno == part.synced_seqno and stream.window is None:
            stream.pace = Pace.IN_STEP
        elif entries:
            self._behind.append(vb_id)
        else:
            self.end(vb_id)  # the replica asks again, and learns what it can have
        return sum(map(len, entries))

    def _next_entries(self, stream: _Stream, part: Partition) -> list[bytes]:
        """Return the next entries of a partition that is behind; none if some are missing. Raises
        StoreDamagedError.
        """
        entries = stream.news(part)
        end_seqno = part.synced_seqno if stream.window is None else stream.window.end
        if stream.sent_seqno < end_seqno:
            changes = self._engine.versions.entries(
                part, stream.sent_seqno + 1, end_seqno, self._section_bytes
            )
            if not changes:
                raise StoreDamagedError(
                    f"vb {part.vb_id}: the versions from seqno {stream.sent_seqno + 1} to "
                    f"{end_seqno} are missing; check the disk and restore a backup"
                )
            stream.sent_seqno = seqno_of(changes[-1])
            entries += changes
        return entries + stream.end_snapshot(part)

    def _send_watermarks(self) -> None:
        """Tell the replica the high watermarks that it does not know. What it acknowledges then is
        what it has, also where nothing was left to send.
        """
        sections: list[Section] = []
        followed: list[tuple[_Stream, Followed]] = []
        for vb_id in self._stale:
            stream = self._streams.get(vb_id)
            committed_seqno = self._engine.partitions[vb_id].committed_seqno
            if stream is None or stream.window is not None:
                continue
            if stream.shown_seqno != committed_seqno:
                stream.shown_seqno = committed_seqno
                sections.append(Section(vb_id, stream.epoch, committed_seqno, ()))
                followed.append((stream, Followed(vb_id, stream.epoch, stream.sent_seqno)))
        self._stale.clear()
        if sections:
            self._send(sections, followed)

    def heard(self, now_ns: int) -> None:
        """Bytes have come from the replica; monotonic nanoseconds."""
        self._now_ns = self._heard_ns = now_ns

    def tick(self, now_ns: int) -> bool:
        """Ask whether this node is still the master, every BEAT_NS; False: disconnect."""
        self._now_ns = now_ns
        if now_ns >= self._next_beat_ns:
            self._next_beat_ns = now_ns + BEAT_NS
            self._send((), ())
        return now_ns - self._heard_ns < SILENCE_NS_MAX

    def take_acknowledgement(self, extras: bytes) -> None:
        """Take an X_REPLICA_ACK. Raises ReplicationError."""
        number, question = unpack_ack(extras)
        if number > self._number or question > self._number:
            raise ReplicationError(
                f"member {self.member} acknowledges message {number} and question {question}; "
                f"the last one sent is {self._number}"
            )
        self._acknowledged_number = max(self._acknowledged_number, number)
        newest: dict[int, Followed] = {}
        while self._sent and self._sent[0][0] <= number:
            _, size, followed = self._sent.popleft()
            self._sent_bytes -= size
            for stream, each in followed:
                # A stream that was closed and opened again may have left this message out.
                if self._streams.get(each.vb_id) is stream:
                    newest[each.vb_id] = each
        while self._asked and self._asked[0][0] <= question:
            self._confirmed_ns = self._asked.popleft()[1]
            self._confirmations += 1
        if newest:
            self._side.acknowledged(self.member, tuple(newest.values()))
        if self._behind and self._has_room:
            self._schedule()

    def close(self) -> None:
        """The connection is gone."""
        self._streams.clear()
        self._side.feed_closed(self)
