"""The master's side of a replication link: what one replica's node gets. Sans-IO.

    IN_STEP   the partition is in every group message: it has all that is synced here
    BEHIND    it is read from its cursor, from memory or from blocks, until it is level

Below the master's history floor versions may be gone. A replica that is there gets what is left up
to the floor as a snapshot: its seqnos have gaps, and it is of use only as a whole. The floor may
rise meanwhile; then so does the end of the snapshot. Nothing is held back for it. Only deletions
that are purged meanwhile can make a part useless (`_FedStream.is_overtaken`): then the stream is
ended, and the answer to the next request sends the replica to 0.

Who calls it: the session passes requests and acknowledgements on, the connection pumps messages
(it is to the connection what `dcp.stream.producer` is for consumers), and the node core reports
synced groups and answers what the feed asks (`MasterSide`).

Invariants
- only what is synced here is sent (`failover.isr.sendable_seqno`);
- at most `window_bytes` of messages are sent and not acknowledged, and one more section. A
  partition that does not fit into the window goes BEHIND: it costs a cursor, no memory, no wait;
- what the feed holds is bounded, whatever the replica does: messages count with what is remembered
  of them, and no more than QUESTIONS_MAX heartbeats are waiting for an answer;
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
    EntriesSection,
    FloorsTold,
    ReplicaPosition,
    SnapshotDone,
    Told,
    decode,
    pack_entries,
    pack_told,
    unpack_ack,
)
from dcp.session.replication_port import FeedAnswer, ReplicationError
from dcp.wire.frame import Frame
from dcp.wire.message import (
    STREAM_REQ_EXTRAS,
    EndReason,
    StreamRequest,
    pack_stream_end,
    parse_stream_request,
)
from vbucket.engine.engine import Engine
from vbucket.engine.partition import Partition
from vbucket.model.control import SnapshotWindow
from vbucket.model.entry import seqno_of
from vbucket.model.ids import SEQNO_MAX
from vbucket.store.environment import StoreDamagedError

WINDOW_BYTES: Final = 8 << 20
"""Entries on their way to one replica: at 100 MB/s, 80 ms of them."""
SECTION_BYTES: Final = 256 << 10
"""Entries of a partition that is behind, in one message: a fair share of a turn."""
RECORD_BYTES: Final = 256
"""What this node remembers of a message, and of each of its sections, until it is acknowledged."""
QUESTIONS_MAX: Final = 64
"""With so many unanswered questions no heartbeat is sent: the replica reads nothing."""
BEAT_NS: Final = 100_000_000
"""Time between heartbeats, and the longest time between two questions."""
SILENCE_NS_MAX: Final = 3_000_000_000
"""A replica that was not heard for so long is disconnected: it answers 10 questions a second."""


NEVER: Final = SEQNO_MAX
"""Above the number of every message."""


class FeedPace(Enum):
    """See the module."""

    IN_STEP = auto()
    BEHIND = auto()


class Followed(NamedTuple):
    """What a replica has acknowledged of a partition, in one message."""

    vb_id: int
    epoch: int
    seqno: int


class _FedStream:
    """One partition on the link."""

    __slots__ = (
        "confirmations",
        "epoch",
        "floors",
        "opaque",
        "pace",
        "safe_purge",
        "sent_seqno",
        "shown_seqno",
        "whole_number",
        "window",
    )

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
        self.pace = FeedPace.BEHIND
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

    def section(self, part: Partition, entries: Sequence[bytes]) -> EntriesSection:
        """Return a section, which tells the replica the high watermark."""
        self.shown_seqno = known_committed(part)
        return EntriesSection(part.vb_id, self.opaque, self.epoch, self.shown_seqno, entries)

    def is_overtaken(self, part: Partition) -> bool:
        """Whether deletions were purged that the replica has not got, of documents that it has."""
        return 0 < self.sent_seqno < part.purge_seqno and part.purge_seqno > self.safe_purge

    def news(self, part: Partition) -> list[bytes]:
        """Return the control entries that come before the next changes. A cursor meets none,
        because they are no changes.
        """
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


def known_committed(part: Partition) -> int:
    """Return up to which seqno a master knows that changes are committed. A history floor is, also
    where a new master does not know so much of others yet.
    """
    return max(part.committed_seqno, part.history_floor)


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
        section_bytes: int = SECTION_BYTES,
    ) -> None:
        self.member = member
        self.is_superseded = False
        """Whether a newer link of the same member has come: the connection closes."""
        self.damages: list[str] = []
        self._engine = engine
        self._side = side
        self._schedule = schedule
        self._is_closed = False
        self._window_bytes = window_bytes
        self._section_bytes = section_bytes
        self._streams: dict[int, _FedStream] = {}
        self._out: list[bytes] = []
        self._behind: dict[int, None] = {}
        """Partitions to read from their cursors, in turn."""
        self._stale: dict[int, None] = {}
        """Partitions whose high watermark the replica does not know, in the order they rose."""
        self._number = 0
        self._sent: deque[tuple[int, int, tuple[tuple[_FedStream, Followed], ...]]] = deque()
        """Messages with sections that are not acknowledged: number, cost, what they bring."""
        self._acknowledged_number = 0
        self._sent_bytes = 0
        """Their cost: their bytes and RECORD_BYTES for each part."""
        self._asked: deque[tuple[int, int]] = deque()
        """Questions that are not confirmed: question, when it was asked."""
        self._confirmations = 0
        self._confirmed_ns = 0
        """When the question was asked that was confirmed last."""
        self._now_ns = self._heard_ns = now_ns
        self._next_beat_ns = now_ns

    @property
    def asked_ns(self) -> int:
        """When the question was asked that the replica confirmed last; 0: none was."""
        return self._confirmed_ns

    # -- streams -----------------------------------------------------------------------------------

    def stream_request(self, request: Frame) -> FeedAnswer:
        """Answer the request for a partition. Raises ReplicationError."""
        if len(request.extras) != STREAM_REQ_EXTRAS.size:
            raise ReplicationError(
                f"a stream request has {STREAM_REQ_EXTRAS.size} bytes of extras, "
                f"not {len(request.extras)}"
            )
        if self._is_closed:
            raise ReplicationError(f"member {self.member} has a newer link")
        asked = parse_stream_request(request.extras)
        told = decode(request.value, ReplicaPosition)
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
        self._streams[vb_id] = _FedStream(epoch, opaque, seqno, self._confirmations, window)
        self._behind[vb_id] = None
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
        return stream is not None and stream.whole_number > self._acknowledged_number

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
        sections: list[EntriesSection] = []
        followed: list[tuple[_FedStream, Followed]] = []
        room = self._window_bytes - self._sent_bytes
        partitions = self._engine.partitions
        for vb_id, entries in changes.items():
            stream = self._streams.get(vb_id)
            if stream is None:
                continue
            size = sum(map(len, entries)) + RECORD_BYTES
            if stream.pace is FeedPace.BEHIND or size > room:
                stream.pace = FeedPace.BEHIND
                self._behind[vb_id] = None
                continue
            part = partitions[vb_id]
            sections.append(stream.section(part, entries))
            stream.sent_seqno = part.synced_seqno
            followed.append((stream, Followed(vb_id, stream.epoch, part.synced_seqno)))
            room -= size
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
        self, sections: Sequence[EntriesSection], followed: Sequence[tuple[_FedStream, Followed]]
    ) -> None:
        self._number += 1
        question = self._number
        self._asked.append((question, self._now_ns))
        message = pack_entries(self._number, question, sections)
        self._out.append(message)
        if sections:
            cost = len(message) + RECORD_BYTES * (1 + len(sections))
            self._sent.append((self._number, cost, tuple(followed)))
            self._sent_bytes += cost
        self._schedule()

    # -- the connection ----------------------------------------------------------------------------

    @property
    def has_output(self) -> bool:
        """Whether `pump` would return anything now."""
        return bool(self._out or ((self._stale or self._behind) and self._has_room))

    @property
    def _has_room(self) -> bool:
        return self._sent_bytes < self._window_bytes

    def pump(self, bytes_max: int) -> list[bytes]:
        """Return messages to send, about `bytes_max` of them."""
        while self._behind and self._has_room and bytes_max > 0:
            vb_id = next(iter(self._behind))
            del self._behind[vb_id]
            bytes_max -= self._catch_up(vb_id)
        if self._stale and self._has_room:
            self._send_watermarks()
        out, self._out = self._out, []
        return out

    def _catch_up(self, vb_id: int) -> int:
        """Send the next entries of a partition that is behind; return their bytes."""
        stream = self._streams.get(vb_id)
        if stream is None or stream.pace is FeedPace.IN_STEP:
            return 0
        part = self._engine.partitions[vb_id]
        if stream.is_overtaken(part):
            self.end(vb_id)  # the replica asks again, and learns what it can have
            return 0
        try:
            entries = self._next_entries(stream, part)
        except StoreDamagedError as error:
            self._fail(vb_id, str(error))
            return 0
        if entries:
            brought = Followed(vb_id, stream.epoch, stream.sent_seqno)
            section = stream.section(part, entries)
            is_whole = stream.window is None
            self._send([section], ((stream, brought),) if is_whole else ())
            if not is_whole:
                stream.whole_number = NEVER
            elif stream.whole_number == NEVER:
                stream.whole_number = self._number
        if stream.sent_seqno == part.synced_seqno and stream.window is None:
            stream.pace = FeedPace.IN_STEP
        else:
            self._behind[vb_id] = None
        return sum(map(len, entries))

    def _next_entries(self, stream: _FedStream, part: Partition) -> list[bytes]:
        """Return the next entries of a partition that is behind. Raises StoreDamagedError."""
        entries = stream.news(part)
        window, first_seqno = stream.window, stream.sent_seqno + 1
        end_seqno = part.synced_seqno if window is None else window.end
        if first_seqno <= end_seqno:
            changes = self._engine.versions.entries(
                part, first_seqno, end_seqno, self._section_bytes
            )
            last_seqno = seqno_of(changes[-1]) if changes else 0
            if not changes or (window is None and last_seqno - first_seqno + 1 != len(changes)):
                raise StoreDamagedError(
                    f"vb {part.vb_id}: versions between seqno {first_seqno} and {end_seqno} are "
                    f"missing (history floor {part.history_floor}), so member {self.member} cannot "
                    "continue; check the disk and restore a backup"
                )
            stream.sent_seqno = last_seqno
            entries += changes
        return entries + stream.end_snapshot(part)

    def _fail(self, vb_id: int, why: str) -> None:
        """End a stream that cannot be read here, rather than leave anything out."""
        self.damages.append(why)
        stream = self._streams.pop(vb_id)
        self._out.append(pack_stream_end(vb_id, stream.opaque, EndReason.BACKFILL_FAILED))

    def _send_watermarks(self) -> None:
        """Tell the replica the high watermarks that it does not know. What it acknowledges then is
        what it has, also where nothing was left to send.
        """
        sections: list[EntriesSection] = []
        followed: list[tuple[_FedStream, Followed]] = []
        for vb_id in self._stale:
            stream = self._streams.get(vb_id)
            if stream is None or stream.window is not None:
                continue
            part = self._engine.partitions[vb_id]
            if stream.shown_seqno != known_committed(part):
                sections.append(stream.section(part, ()))
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
        is_read = not self._out and len(self._asked) < QUESTIONS_MAX
        if now_ns >= self._next_beat_ns and is_read:  # else enough questions are on their way
            self._next_beat_ns = now_ns + BEAT_NS
            self._send((), ())
        return not self._is_closed and now_ns - self._heard_ns < SILENCE_NS_MAX

    def take_acknowledgement(self, extras: bytes) -> None:
        """Take an X_REPLICA_ACK. Raises ReplicationError."""
        number, question = unpack_ack(extras)
        if number > self._number or question > self._number:
            raise ReplicationError(
                f"member {self.member} acknowledges message {number} and question {question}; "
                f"the last one sent is {self._number}"
            )
        if question < number:
            raise ReplicationError(
                f"member {self.member} has synced message {number} and confirms question {question}"
                " only: it confirms a message's question before it syncs the message"
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
        if self.has_output:
            self._schedule()

    def close(self) -> None:
        """The connection is gone, or a newer link of the member has come."""
        self._is_closed = True
        self._streams.clear()
        self._behind.clear()
        self._stale.clear()
        self._side.feed_closed(self)
