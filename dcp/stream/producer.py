"""A producer connection: many streams, one window, fair turns. Sans-IO.

    STREAM_REQ accepted -> BACKLOG -> LIVE -> ended
    each turn: [marker] frames ... until the snapshot's end, then the next marker

A stream is in its backlog until it has caught up once.

A stream holds no data. It is a cursor (next seqno, end of the snapshot under way) over what the
engine has in memory and in the store. So a slow consumer costs its cursor only, and no writer waits
for it.

Invariants
- within a snapshot seqnos rise, and keys are unique except in history snapshots. A snapshot ends on
  its announced end;
- the first marker starts at the requested snapshot start, each later one at the previous end + 1.
  It never starts at the first item, because a consumer that stops before that item would resume
  with a gap;
- nothing above the partition's committed_seqno is sent, of a master or of a replica;
- all messages of a stream, STREAM_END included, carry the opaque of its request;
- a stream's `state` (SendState) says why it sends nothing now. `_state_of` alone decides it. READY
  and WINDOW_FULL streams are in the ready queue, WAITS_FOR_BACKFILL streams in the waiting queue,
  all others in none;
- at most BACKLOGS_MAX backlogs are under way. While a stream waits for one, all places are taken
  or a stream that may take the free place is in the ready queue;
- a partition whose newest version is not committed yet sends nothing: the snapshots under way are
  undone, but a crash could bring them back;
- no stream passes a pending cut. A stream that is added ends it, as it may hold later changes;
- with a window of N bytes, streams stop as soon as N or more bytes are unacknowledged. Responses,
  NOOP and the STREAM_END of `end` are still sent.

Rules: DCP flow control and snapshots as kv_engine documents them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from dcp.stream.ack_ages import AckAges
from dcp.stream.active_stream import ActiveStream, SendState
from dcp.stream.filter import StreamFilter
from dcp.stream.hub import StreamHub
from dcp.stream.keepalive import Keepalive
from dcp.stream.pending_cut import PendingCut
from dcp.stream.snapshots import Message, SnapshotWriter
from dcp.stream.stream_limits import RateLimit
from dcp.stream.terms import Terms
from dcp.wire.message import (
    EndReason,
    StreamRequest,
    pack_closed_time,
    pack_set_vbucket_state,
    pack_stream_end,
)
from dcp.wire.opcode import Opcode
from vbucket.engine.cut import UNCOVERED, Cut
from vbucket.engine.engine import Engine
from vbucket.engine.partition import Layer, Partition, VbState
from vbucket.model.collection_counts import CollectionCounts
from vbucket.native import live_run
from vbucket.store.environment import StoreDamagedError

TURN_BYTES: Final = 128 * 1024
"""What a stream may send in one turn."""

BACKLOGS_MAX: Final = 16
"""Backlogs that a connection sends at once. Each one keeps the superseded seqnos of its snapshot,
so this limit keeps memory from growing with the number of partitions."""

# Enum members cost a look-up in their class each time, once per change of a live stream.
_REPLICA: Final = VbState.REPLICA
_SENDING: Final = SendState.SENDING
_READY: Final = SendState.READY
_WINDOW_FULL: Final = SendState.WINDOW_FULL
_WAITS_FOR_BACKFILL: Final = SendState.WAITS_FOR_BACKFILL
_WAITS_FOR_COMMIT: Final = SendState.WAITS_FOR_COMMIT
_WAITS_FOR_CLIENT: Final = SendState.WAITS_FOR_CLIENT
_WAITS_FOR_CUT: Final = SendState.WAITS_FOR_CUT
_CAUGHT_UP: Final = SendState.CAUGHT_UP
_RATE_LIMITED: Final = SendState.RATE_LIMITED
_STALLED: Final = SendState.STALLED
# Tuples, because hashing an Enum member costs more than comparing it with a few others.
_QUEUED: Final = (_READY, _WINDOW_FULL, _WAITS_FOR_BACKFILL)
_NOT_WOKEN: Final = (*_QUEUED, _STALLED, _WAITS_FOR_CUT)


_live_run: Final = live_run(
    ActiveStream, Partition, Layer, CollectionCounts, _CAUGHT_UP, _WAITS_FOR_CUT, _REPLICA
)


class Producer:
    """See the module. `schedule` rings the shell: there may be something to pump. It may only note
    that, because streams are woken amid other work.
    """

    can_wait = False
    """See ReplicaSender: consumers get everything at once."""

    def __init__(
        self,
        name: bytes,
        engine: Engine,
        hub: StreamHub,
        schedule: Callable[[], None],
        backlogs_max: int = BACKLOGS_MAX,
    ) -> None:
        self.name = name
        self._backlogs_max = backlogs_max
        self.window_bytes = 0
        """connection_buffer_size; 0 = no flow control."""
        self.unacked_bytes = 0
        self._ack_ages = AckAges()
        self.traceparent = ""
        """The span of the client in which it opens its streams (W3C); "": it gave none."""
        self.terms = Terms()
        self.snapshots = SnapshotWriter(engine, self.terms)
        self.sends_end_on_close = False
        self.has_expiry_opcode = False
        """The client asked for DCP_EXPIRATION (control enable_expiry_opcode)."""
        self.keepalive = Keepalive()
        self.is_superseded = False
        self.damages: list[tuple[int, str]] = []
        """What is damaged in the store, in words. The caller logs it and empties the list."""
        self._engine = engine
        self._commits = engine.commits
        self._hub = hub
        self._schedule = schedule
        self._streams: dict[int, ActiveStream] = {}
        """By `ActiveStream.key`; the key of a stream without a name is its partition's id."""
        self._by_vb: dict[int, tuple[ActiveStream, ...]] = {}
        self._takeovers: dict[int, ActiveStream] = {}
        """Streams that hand a partition over, by the opaque, which the client's answers carry."""
        self._ready: deque[ActiveStream] = deque()
        self._waiting: deque[ActiveStream] = deque()
        """Streams that wait until one of BACKLOGS_MAX backlogs ends."""
        self._backlogs = 0
        self._urgent: list[Message] = []
        self._limited: dict[int, ActiveStream] = {}
        """Streams that have a `rate`, by key."""

    @property
    def stream_count(self) -> int:
        """Streams that are open on this connection."""
        return len(self._streams)

    def has_stream(self, vb_id: int, stream_id: int = 0) -> bool:
        """Whether a stream of this partition (and name) is open on this connection."""
        return stream_id << 16 | vb_id in self._streams

    # -- commands ----------------------------------------------------------------------------

    def add_stream(
        self,
        vb_id: int,
        opaque: int,
        request: StreamRequest,
        stream_id: int = 0,
        *,
        stream_filter: StreamFilter,
    ) -> None:
        """Begin a stream; the caller has answered the request with OK."""
        part = self._engine.partitions[vb_id]
        stream = ActiveStream(part, opaque, request, stream_id, stream_filter)
        assert stream.key not in self._streams
        stream.skips_deletions = self.terms.skips_deletions and not request.start_seqno
        if request.start_seqno >= request.end_seqno:
            self._send_end(stream, EndReason.OK)
            return
        stream.opened_ns = self.keepalive.heard_ns
        if self.snapshots.cut is not None:
            self._leave_cut()
        self._streams[stream.key] = stream
        self._by_vb[vb_id] = (*self._by_vb.get(vb_id, ()), stream)
        if stream.takeover is not None:
            self._takeovers[opaque] = stream
        self._hub.follow(vb_id, self)
        self._settle(stream, _READY)
        bytes_per_s = self._hub.limits.of(self.name.decode("utf-8", "replace"), vb_id)
        if bytes_per_s is not None:
            self.limit(stream, RateLimit(bytes_per_s))

    def withdraw_stream(self, vb_id: int, stream_id: int) -> None:
        """Forget a stream whose request was refused after all, before anything of it was sent."""
        stream = self._streams.get(stream_id << 16 | vb_id)
        if stream is not None:
            self._forget(stream)

    def close_stream(self, vb_id: int, stream_id: int = 0) -> bool:
        """End a stream because the client asks for it; False: there is none."""
        stream = self._streams.get(stream_id << 16 | vb_id)
        if stream is None:
            return False
        self._forget(stream)
        if self.sends_end_on_close:
            self._send_end(stream, EndReason.CLOSED)
        return True

    def answered(self, opcode: int, opaque: int, status: int) -> None:
        """The client answered a message of this server. Takeovers wait for some of the answers, and
        the next NOOP for that to the last one.
        """
        if opcode == Opcode.DCP_NOOP:
            self.keepalive.answered()
            return
        stream = self._takeovers.get(opaque)
        if stream is None or stream.takeover is None:
            return
        reason = stream.takeover.answered(self._engine, stream.vb_id, opcode, status)
        if reason is None:
            self._wake(stream)
        else:
            self.end(stream, reason)

    def set_window(self, window_bytes: int) -> None:
        """Count what is sent from now on against a window; 0: no flow control."""
        self.window_bytes = window_bytes
        if not window_bytes:
            self.unacked_bytes = 0
        if self._ready:
            self._schedule()

    def acknowledge(self, processed_bytes: int) -> None:
        """Widen the window by the bytes that the client has processed."""
        counted_bytes = min(processed_bytes, self.unacked_bytes)
        if counted_bytes:
            self._ack_ages.acknowledged(counted_bytes)
            self.unacked_bytes -= counted_bytes
        if self._ready:
            self._schedule()

    def unacked_s(self, now_ns: int) -> float:
        """Return the age of the oldest bytes that the client should have acknowledged by now."""
        return self._ack_ages.oldest_s(now_ns, self.window_bytes) if self.window_bytes else 0.0

    def heard(self, now_ns: int) -> None:
        """Note that the client sent something; the clock is the steady one of `tick`."""
        self.keepalive.heard_ns = now_ns

    def tick(self, now_ns: int) -> bool:
        """Let time pass: send a NOOP if one is due. False: the peer is gone, so close."""
        if self.window_bytes:
            self._ack_ages.mark(now_ns, self.unacked_bytes)
        if self._limited:
            self._refill(now_ns)
        for stream in self._takeovers.values():
            if stream.takeover is not None and not stream.is_backlog:
                stream.takeover.tick(self._engine, stream.vb_id, now_ns)
        noop = self.keepalive.tick(now_ns)
        if noop:
            self._urgent.append(noop)
            self._schedule()
        return noop is not None

    # -- what the hub calls --------------------------------------------------------------------

    def wake(self, vb_id: int) -> None:
        """The partition committed something."""
        for stream in self._by_vb[vb_id]:
            if stream.state is _CAUGHT_UP or stream.state not in _NOT_WOKEN:
                stream.state = _READY
                self._ready.append(stream)
                self._schedule()

    def branched(self, vb_id: int, reason: EndReason) -> None:
        """The partition's failover log changed: end its streams, except those that began after."""
        for stream in self._by_vb[vb_id]:
            if stream.vb_uuid != self._engine.partitions[vb_id].vb_uuid:
                self.end(stream, reason)

    def restated(self, vb_id: int) -> None:
        """The partition's state changed: end the streams that the new state does not allow."""
        state = self._engine.partitions[vb_id].state
        for stream in self._by_vb[vb_id]:
            takeover = stream.takeover
            if takeover is not None and takeover.made_it_dead and state == VbState.DEAD:
                continue
            if state != VbState.ACTIVE and (state != VbState.REPLICA or stream.is_active_only):
                self.end(stream, EndReason.STATE_CHANGED)

    def fenced(self, vb_id: int) -> None:
        """The partition may not answer now: end its streams."""
        for stream in self._by_vb[vb_id]:
            self.end(stream, EndReason.STATE_CHANGED)

    def begin_cut(self, cut: Cut) -> None:
        """A cut was drawn: streams stop there, unless they go to another or it leaves some out."""
        if self.snapshots.cut is not None:
            self.snapshots.cut.note_next(cut)
        elif self._streams and all(cut.seqnos[key & 0xFFFF] != UNCOVERED for key in self._streams):
            self.snapshots.cut = PendingCut(cut, self._streams.values())
            self._schedule()

    def _leave_cut(self) -> None:
        """No cut is pending any more: the streams that wait for it go on."""
        cut, self.snapshots.cut = self.snapshots.cut, None
        for stream in cut.waiting if cut is not None else ():
            if stream.state is _WAITS_FOR_CUT:
                self._settle(stream, _READY)

    def supersede(self) -> None:
        """A newer connection has this one's name."""
        self.is_superseded = True
        self._schedule()

    def close(self) -> None:
        """The connection is gone."""
        self._hub.close(self.name, self)
        for stream in self._takeovers.values():
            assert stream.takeover is not None
            stream.takeover.abandon(self._engine, stream.vb_id)
        self.snapshots.cut = None
        self._takeovers.clear()
        self._by_vb.clear()
        self._streams.clear()
        self._ready.clear()
        self._waiting.clear()
        self._limited.clear()

    def reading(self, vb_id: int) -> Iterator[ActiveStream]:
        """Return the streams of a partition."""
        return iter(self._by_vb.get(vb_id, ()))

    # -- what operators do ---------------------------------------------------------------------

    def streams(self) -> Iterator[ActiveStream]:
        """Return the open streams."""
        return iter(tuple(self._streams.values()))

    def phase_of(self, stream: ActiveStream) -> str:
        """Return a stream's state as operators see it."""
        if stream.state is _STALLED:
            return "stalled"
        if stream.state is _WAITS_FOR_BACKFILL:
            return "waiting"
        return "backlog" if stream.is_backlog else "live"

    def end(self, stream: ActiveStream, reason: EndReason) -> None:
        """End a stream and tell the client why."""
        self._forget(stream)
        self._send_end(stream, reason)

    def limit(self, stream: ActiveStream, rate: RateLimit | None) -> None:
        """Slow a stream down, stop it (a rate of 0), or lift its limit (None).

        A stream that is stopped in the middle of its backlog keeps its place among BACKLOGS_MAX.
        """
        stream.rate = rate
        if rate is None:
            self._limited.pop(stream.key, None)
        else:
            self._limited[stream.key] = stream
        is_stopped = rate is not None and not rate.bytes_per_s
        if is_stopped or stream.state not in _QUEUED:
            self._unqueue(stream)
            part = self._engine.partitions[stream.vb_id]
            self._settle(stream, self._state_of(stream, part))
            self._admit()

    def _refill(self, now_ns: int) -> None:
        for stream in self._limited.values():
            rate = stream.rate
            assert rate is not None
            rate.refill(now_ns)
            if rate.allowance_bytes > 0 and stream.state is _RATE_LIMITED:
                self._wake(stream)

    # -- sending -------------------------------------------------------------------------------

    @property
    def has_output(self) -> bool:
        """Whether `pump` would return something now."""
        if self._urgent or (self._ready and self._window_left() > 0):
            return True
        cut = self.snapshots.cut
        return cut is not None and not cut.behind

    def pump(self, bytes_max: int) -> list[Message]:
        """Return about `bytes_max` of messages, or fewer when nothing more may be sent now."""
        out, self._urgent = self._urgent, []
        ready, partitions = self._ready, self._engine.partitions
        while ready and bytes_max > 0:
            window = self._window_left()
            if window <= 0:
                break
            if not ready[0].is_backlog:
                sent = self._send_live(out, min(window, bytes_max))
                if sent or not ready:
                    bytes_max -= sent
                    continue
            stream = ready.popleft()
            part = partitions[stream.vb_id]
            is_copy = part.has_copies and part.state is _REPLICA
            if is_copy and (reason := self._why_copy_ends(stream, part)) is not None:
                stream.state = _SENDING
                self.end(stream, reason)
                continue
            stream.state = state = self._state_of(stream, part)
            if state is not _READY:
                self._rest(stream, state)
                continue
            stream.state = _SENDING
            sent = self._take_turn(stream, part, out, min(TURN_BYTES, window, bytes_max))
            bytes_max -= sent + self.snapshots.refused_bytes
            self.snapshots.refused_bytes = 0
        cut = self.snapshots.cut
        if cut is not None and not cut.behind:
            # Ends of streams come first: those have not reached the cut.
            out += (*self._urgent, pack_closed_time(cut.cut.time, cut.cut.round))
            self._urgent = []
            self._leave_cut()
            if cut.next is not None:
                self.begin_cut(cut.next)
        return out

    def _send_live(self, out: list[Message], bytes_max: int) -> int:
        """Send whole snapshots of the first live streams in one call, as long as nothing about them
        is unusual; return the bytes. 0: the next stream has to take a turn, if there is one.
        """
        form, cut = self.snapshots.live_form, self.snapshots.cut
        if _live_run is None or form is None:
            return 0
        sent, seqnos = _live_run.send(
            self._ready, self._engine.partitions, self._commits.committed_group, bytes_max,
            TURN_BYTES, form, out, None if cut is None else (cut.seqnos, cut.behind, cut.waiting),
        )  # fmt: skip
        self._engine.streamed_seqnos += seqnos
        self._count(sent)
        return sent

    def _why_copy_ends(self, stream: ActiveStream, part: Partition) -> EndReason | None:
        """Return why a stream of a copy that is no master does not go on; None: it does."""
        try:
            return None if self.snapshots.may_go_on(stream, part) else EndReason.STATE_CHANGED
        except StoreDamagedError as error:
            self.damages.append((stream.vb_id, str(error)))
            return EndReason.BACKFILL_FAILED

    def _window_left(self) -> int:
        return self.window_bytes - self.unacked_bytes if self.window_bytes else TURN_BYTES

    def _count(self, sent_bytes: int) -> None:
        if self.window_bytes:
            self.unacked_bytes += sent_bytes

    def _state_of(self, stream: ActiveStream, part: Partition) -> SendState:
        """Decide whether a stream can send now, and if not, what it waits for.

        A stream that has only its STREAM_END to send is READY.
        """
        cut, rate = self.snapshots.cut, stream.rate
        is_at_cut = cut is not None and cut.reached_by(stream)
        if rate is not None and rate.allowance_bytes <= 0:
            return _RATE_LIMITED if rate.bytes_per_s else _STALLED
        if part.history_floor > part.committed_seqno or not self._commits.is_committed(
            part.vb_id, part.branch_group
        ):
            return _WAITS_FOR_COMMIT
        if stream.snap_end_seqno is None and stream.next_seqno <= stream.end_seqno:
            takeover = stream.takeover
            if takeover is not None and takeover.is_waiting:
                return _READY if stream.has_missed_a_purge(part) else _WAITS_FOR_CLIENT
            if part.committed_seqno < stream.next_seqno:
                if takeover is None:
                    return _CAUGHT_UP
                if not takeover.may_go_on(self._engine, stream.vb_id):
                    return _WAITS_FOR_COMMIT
            elif is_at_cut:
                return _READY if stream.has_missed_a_purge(part) else _WAITS_FOR_CUT
            elif stream.is_backlog and self._backlogs >= self._backlogs_max:
                return _READY if stream.has_missed_a_purge(part) else _WAITS_FOR_BACKFILL
        is_full = self.window_bytes and self.window_bytes <= self.unacked_bytes
        return _WINDOW_FULL if is_full else _READY

    def _take_turn(
        self, stream: ActiveStream, part: Partition, out: list[Message], bytes_max: int
    ) -> int:
        """Send the stream's next messages, then queue it again if it has more."""
        has_missed = stream.has_missed_a_purge(part)
        if has_missed or stream.has_lost_its_snapshot(part):
            self._hub.purged_past += has_missed
            self.end(stream, EndReason.ROLLBACK)
            return 0
        rate = stream.rate
        if rate is not None:
            bytes_max = min(bytes_max, rate.allowance_bytes)
        sent = 0
        try:
            if stream.snap_end_seqno is None:
                if self.snapshots.pass_over(stream, part):
                    stream.state = _READY
                    self._ready.appendleft(stream)  # it may have caught up
                    return 0
                sent = self._begin_turn(stream, part, out)
            end_seqno = stream.snap_end_seqno
            if end_seqno is not None and sent < bytes_max and stream.next_seqno <= end_seqno:
                sent += self.snapshots.send(stream, out, bytes_max - sent)
        except StoreDamagedError as error:
            self.damages.append((stream.vb_id, str(error)))
            self._count(sent)
            self.end(stream, EndReason.BACKFILL_FAILED)  # rather than leave anything out
            return sent
        if (
            end_seqno is not None
            and stream.next_seqno > end_seqno
            and (sent < bytes_max or not self.terms.has_snapshot_ends)
        ):
            sent += self._finish_snapshot(stream, part, out)
        reason = _end_reason(stream) if stream.snap_end_seqno is None else None
        if reason is not None:
            sent += self._end(stream, out, reason)
        if self.window_bytes:
            self.unacked_bytes += sent
        if rate is not None:
            rate.allowance_bytes -= sent
        if reason is None:
            stream.state = state = self._state_of(stream, part)
            if state is not _CAUGHT_UP:
                self._settle(stream, state)
        return sent

    def _begin_turn(self, stream: ActiveStream, part: Partition, out: list[Message]) -> int:
        """Begin the next snapshot, or take the next step of a takeover; return the bytes sent."""
        if stream.next_seqno > stream.end_seqno:
            return 0
        if part.committed_seqno >= stream.next_seqno:
            sent = self.snapshots.begin(stream, part, out)
            self._backlogs += stream.is_backlog
            cut = self.snapshots.cut
            if cut is not None and stream.limit_seqno > cut.seqnos[part.vb_id]:
                self._leave_cut()  # history up to a floor above the cut was given up
            return sent
        assert stream.takeover is not None, "a stream that has caught up takes no turn"
        stream.is_backlog = False
        self._admit()
        state = stream.takeover.next_state()
        message = pack_set_vbucket_state(stream.vb_id, stream.opaque, state)
        return self.snapshots.put(stream, out, message)

    def _finish_snapshot(self, stream: ActiveStream, part: Partition, out: list[Message]) -> int:
        end_seqno, was_backlog = stream.next_seqno - 1, stream.is_backlog
        sent = self.snapshots.finish(stream, out)
        if was_backlog:
            self._leave_backlog(stream)
            # The part of a history stream's backlog that has all versions is still to come.
            stream.is_backlog = self.terms.has_history and end_seqno == part.history_floor
        return sent

    def _leave_backlog(self, stream: ActiveStream) -> None:
        """A stream's backlog ends, or the stream ends in it: the next backlog may begin."""
        assert stream.is_backlog
        stream.is_backlog = False
        self._backlogs -= 1
        self._admit()

    def _admit(self) -> None:
        """If a backlog's place is free, let the next stream that waits for one take a turn."""
        if self._waiting and self._backlogs < self._backlogs_max:
            self._settle(self._waiting.popleft(), _READY)

    def _end(self, stream: ActiveStream, out: list[Message], reason: EndReason) -> int:
        self._forget(stream)
        return self.snapshots.put(stream, out, pack_stream_end(stream.vb_id, stream.opaque, reason))

    def _forget(self, stream: ActiveStream) -> None:
        vb_id = stream.vb_id
        del self._streams[stream.key]
        if self.snapshots.cut is not None:
            self.snapshots.cut.behind.discard(stream)
            self._schedule()
        others = tuple(other for other in self._by_vb[vb_id] if other is not stream)
        if others:
            self._by_vb[vb_id] = others
        else:
            del self._by_vb[vb_id]
            self._hub.unfollow(vb_id, self)
        self._limited.pop(stream.key, None)
        if stream.takeover is not None:
            if self._takeovers.get(stream.opaque) is stream:
                del self._takeovers[stream.opaque]
            stream.takeover.abandon(self._engine, vb_id)
        self._unqueue(stream)
        if stream.snap_end_seqno is None:
            self._admit()
        elif stream.is_backlog:
            self._leave_backlog(stream)

    def _wake(self, stream: ActiveStream) -> None:
        """What a stream waited for may have happened: let it take a turn."""
        if stream.state not in _NOT_WOKEN:
            self._settle(stream, _READY)

    def _settle(self, stream: ActiveStream, state: SendState) -> None:
        """Put a stream that is in no queue where its state belongs."""
        stream.state = state
        if state is _READY or state is _WINDOW_FULL:
            self._ready.append(stream)
            self._schedule()
        elif state is _WAITS_FOR_BACKFILL:
            self._waiting.append(stream)
        elif state is _WAITS_FOR_CUT:
            assert self.snapshots.cut is not None, "it waits for one"
            self.snapshots.cut.waiting.append(stream)

    def _rest(self, stream: ActiveStream, state: SendState) -> None:
        """A stream has come to the front of the ready queue and has nothing to send."""
        if state is _CAUGHT_UP:
            stream.is_backlog = False
        self._settle(stream, state)
        if state is not _WAITS_FOR_BACKFILL:
            self._admit()

    def _unqueue(self, stream: ActiveStream) -> None:
        """Take a stream out of its queue, if it is in one."""
        if stream.state is _WAITS_FOR_BACKFILL:
            self._waiting.remove(stream)
        elif stream.state in _QUEUED:
            self._ready.remove(stream)
        stream.state = _SENDING

    def _send_end(self, stream: ActiveStream, reason: EndReason) -> None:
        """Send STREAM_END even if the window is full. It counts against the window."""
        message = pack_stream_end(stream.vb_id, stream.opaque, reason)
        self._count(self.snapshots.put(stream, self._urgent, message))
        self._schedule()


def _end_reason(stream: ActiveStream) -> EndReason | None:
    """Return why a stream between two snapshots is over, None where it is not."""
    if stream.filter.is_empty:
        return EndReason.FILTER_EMPTY
    return EndReason.OK if stream.next_seqno > stream.end_seqno else None
