"""The socket side of a session: an asyncio protocol that moves bytes and keeps back-pressure.

Answers wait here until their commit group is committed; stream messages follow the answers. Memory
for a peer is bounded: reading stops while the peer does not read, while too many answers wait for
the disk, while a command that writes waits for room, while a command waits for a partition that is
handed over to this node, while a password is checked, and while others are sent large answers.
Memory for all peers together has its own bounds (dcp.server.net.held_bytes).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, cast

from dcp.server.access.access import Access
from dcp.server.access.logins import KV_TLS, PeerLogins
from dcp.server.net.connections import LARGE_BYTES, Connections, OpenConnection
from dcp.server.net.held_bytes import PIECE_BYTES, TLS_PIECE_BYTES, Outgoing
from dcp.server.net.sessions import ReplicationHooks, Sessions
from dcp.server.observe.elapsed import elapsed_ns
from dcp.server.observe.event_log import RefusalLog
from dcp.server.observe.meter import TEXT_COMMAND, Meter, SlowOperation, command_of
from dcp.server.observe.tracing import Facts
from dcp.server.storage.committer import Committer
from dcp.session.access.auth import AuthStep
from dcp.session.answers.held_answers import HeldAnswers
from dcp.session.replication_port import NEWS_WAIT_NS
from dcp.session.session import Session
from dcp.session.text import TextSession, begins_text
from dcp.stream.hub import BatchTrace
from dcp.stream.snapshots import Message
from vbucket.engine.engine import Engine

_P = ParamSpec("_P")

WRITE_BUFFER_BYTES: Final = 1 << 20
"""Bytes in the transport above which nothing more is produced for the peer."""
HELD_BYTES_MAX: Final = 4 << 20
"""Bytes of answers waiting for the disk above which nothing more is read from the peer."""
_ORDINARY_ENDS: Final = frozenset(
    {"", "the client quit", "the client closed its side", "the server stops"}
)
"""Ends of connections that need no line in the log."""
PIECE_BYTES_MIN: Final = 1024
"""Average length from which messages are handed over one by one. Joining copies them once more,
which is cheaper for short messages."""
PUMP_BYTES: Final = 256 << 10
"""Stream messages sent in one turn of the loop."""
WATCHED_BYTES: Final = 4096
"""A connection that was just sent so many bytes is looked at soon: how much is not read yet?"""
TLS_READ_BUFFER_BYTES: Final = 64 << 10
"""Encrypted bytes above which nothing more is read from a TLS peer while reading is paused. The
bytes of one more read come on top."""


class ConnectionParts(NamedTuple):
    """The parts of the server that connections use."""

    engine: Engine
    committer: Committer
    connections: Connections
    access: Access
    sessions: Sessions
    meter: Meter
    refusals: RefusalLog
    replication: ReplicationHooks | None = None
    """None: the node is alone."""


def _supervised(
    method: Callable[Concatenate[ClientConnection, _P], None],
) -> Callable[Concatenate[ClientConnection, _P], None]:
    """Let an unexpected exception end this connection and nothing else."""

    def run(self: ClientConnection, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a named supervision point
            self._failed(error)

    return cast("Callable[Concatenate[ClientConnection, _P], None]", wraps(method)(run))


def _pump_all(pumping: list[OpenConnection]) -> None:
    connections = tuple(pumping)
    pumping.clear()
    for connection in connections:
        connection.pump_now()


class ClientConnection(asyncio.Protocol):
    """One accepted connection. It is in `Connections.open` while it is open."""

    def __init__(
        self, parts: ConnectionParts, *, end_handshake: Callable[[], None] | None = None
    ) -> None:
        """`end_handshake` is called after the TLS handshake; None: the connection has no TLS."""
        self._end_handshake = end_handshake
        self._outgoing = Outgoing(PIECE_BYTES if end_handshake is None else TLS_PIECE_BYTES)
        self._loop = asyncio.get_running_loop()
        self._parts = parts
        self._engine = parts.engine
        self._committer = parts.committer
        self._connections = parts.connections
        self._meter = parts.meter
        self._replication = parts.replication
        self._held = (
            HeldAnswers(parts.engine) if parts.replication is None else parts.replication.held()
        )
        self._largest_bytes = 0
        """Of the largest data since all was sent. It is kept until its last byte is sent, but the
        transport reports only what is left of its piece."""
        self._is_write_paused = False
        """Whether the transport has enough for now, or data waits for it."""
        self._is_read_paused = self._is_pump_scheduled = False
        self._next_news: asyncio.TimerHandle | None = None
        """Set while stream messages wait that can."""
        self._has_pumped = False
        """Whether messages were pumped since it was set."""
        self._is_aborted = self._has_begun = False
        self._traced = BatchTrace()
        """Of the newest batch."""
        self._is_new = True
        """Whether it is among the newcomers."""
        self._has_held = False
        """Whether it is among the connections that hold received bytes."""
        self._transport: asyncio.Transport
        self.session: Session | TextSession
        self.logins: PeerLogins
        self.heard_ns = elapsed_ns()

    # -- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up the session. If there are too many connections, refuse this one."""
        self._transport = cast("asyncio.Transport", transport)
        is_tls = self._end_handshake is not None
        high = TLS_PIECE_BYTES if is_tls else WRITE_BUFFER_BYTES
        self._transport.set_write_buffer_limits(high=high)
        address = transport.get_extra_info("peername") or ("", 0)
        host = str(address[0])
        self.logins = self._parts.access.logins_of(
            host, f"{host}:{address[1]}", is_tls=is_tls,
            certificate=transport.get_extra_info("peercert"),
        )  # fmt: skip
        self.logins.out_since_ns = self.heard_ns
        self.logins.on_outcome = self._login_checked
        if self._end_handshake is not None:
            self._end_handshake()
            self._end_handshake = None
            cast("Any", transport).set_read_buffer_limits(TLS_READ_BUFFER_BYTES)
        self.session = Session(self._parts.sessions.new_state(host, self.logins))
        self.session.state.schedule = self.schedule_pump
        if is_tls:
            self._connections.watched.add(self)  # nobody tells what its transport has received
        self._connections.opened(self)

    def connection_lost(self, _exc: Exception | None) -> None:
        """Forget the peer."""
        if (sender := self.session.state.sender) is not None:
            sender.close()
        if self._next_news is not None:
            self._next_news.cancel()
        if self._engine.keyspace.pending:
            # A takeover that was given up gave its partition back, or a failed command left changes
            # of commands before it. They must not wait for the next writer.
            self._committer.kick()
        self._held.clear()
        self._outgoing.clear()
        self.session.drop_received()  # now: a reference cycle keeps the session for a while
        self._parts.sessions.leave(self.session.state)
        self.logins.leave()
        self._connections.closed(self)

    def data_received(self, data: bytes) -> None:
        """Pass received bytes to the session and send its answers."""
        large = self._connections.large_answers
        if (large.is_spent or large.waiting) and large.keep(self, data):
            self._update_reading()
            self._note_received()
            return
        self.heard_ns = elapsed_ns()
        if not self._has_begun:
            self._has_begun = True
            if begins_text(data[0]):
                self.session = TextSession(self.session.state)
        self._meter.received_bytes += len(data)
        try:
            if (sender := self.session.state.sender) is not None:
                sender.heard(self.heard_ns)
            if self._replication is not None:
                self._replication.before_commands(self.heard_ns)
            if self._meter.tracing is not None:
                self._meter.tracing.begin(self._traced)
            self.session.receive(data, time.time_ns())
            if self._replication is not None and self._was_acknowledgement:
                self._replication.after_acknowledgement()
            else:
                self._after_commands()
        except Exception as error:  # noqa: BLE001 - a named supervision point
            self._failed(error)

    def eof_received(self) -> bool:
        """The peer will send nothing more: close once its answers are sent."""
        self.session.state.close("the client closed its side")
        self._close_if_done()
        return not self._is_tls  # TLS has no half-closed connections

    def pause_writing(self) -> None:
        """The peer does not read: stop reading from it and producing for it."""
        self._outgoing.is_paused = True
        self._wait_for_peer()

    @_supervised
    def resume_writing(self) -> None:
        """The peer reads again."""
        self._outgoing.is_paused = False
        if not self._outgoing.has_turn:
            self._write_on()

    # -- what other parts of the server call -------------------------------------------------------

    def release(self) -> bool:
        """Send the answers that may leave after a commit; return whether any still wait."""
        self._release()
        return bool(self._held.batches)

    @_supervised
    def _release(self) -> None:
        if ready := self._held.release():
            now_ns = elapsed_ns()
            for batch in ready:
                self._answered(batch.answers, (now_ns - batch.read_ns) / 1e9)
            self._write(b"".join([batch.answers for batch in ready]))
        if not self._held.batches:
            self._resume_session()
            self.schedule_pump()
            self._close_if_done()

    @_supervised
    def depose(self, vb_ids: tuple[int, ...]) -> None:
        """Replace the answers that wait for a commit in partitions with another master now."""
        self._held.depose(vb_ids)
        self._release()

    @_supervised
    def tell_map(self) -> None:
        """Push the newest map to a client that asked for that, when it reads."""
        state = self.session.state
        state.map_news.is_owed = self._is_write_paused
        if self._is_write_paused or self._transport.is_closing():
            return
        if packet := state.pushed_map():
            self._write(packet)

    @property
    def is_stranger(self) -> bool:
        """Whether nobody has logged in, or, if no login is needed, nothing was asked yet."""
        return self._is_new

    @property
    def waits_for_peer(self) -> bool:
        """Whether the peer must act before held data can move."""
        has_turn = self in self._connections.large_answers.waiting
        return self._is_write_paused or not (self.session.state.is_full or has_turn)

    @_supervised
    def tick(self, now_ns: int) -> None:
        """Let time pass; monotonic nanoseconds. Most connections have nothing to do then."""
        is_tls = self._is_tls
        if self._largest_bytes or is_tls:
            self._note_unsent()
        if is_tls:
            self._note_received()
        if self._held.next_expiry_ns is not None and self._held.next_expiry_ns <= now_ns:
            self._held.expire(now_ns)
            self._release()
        reason = self._parts.access.overdue(
            self.session, now_ns, self.logins.out_since_ns, self.heard_ns
        )
        sender = self.session.state.sender
        if sender is None:
            if not self._largest_bytes and not is_tls:
                self._connections.watched.discard(self)
        elif not sender.tick(now_ns):
            reason = "nothing was heard of the DCP client"
        if reason:
            self.abort(reason)

    @_supervised
    def writers_may_go_on(self) -> None:
        """Resume writers: there is room, or writes are refused."""
        if self.session.state.pause.is_for_room:
            self._resume_session()

    @_supervised
    def go_on(self) -> None:
        """Resume if the next request waited for a partition: it may have arrived."""
        if self.session.state.pause.arrival.until_ns:
            self._resume_session()

    def rights_changed(self, *, may_stream: bool) -> None:
        """React to changed rights; the session has them. A stream would not check them again."""
        if self.session.state.login.rights is None:
            self.logins.leave()
            self.logins.out_since_ns = elapsed_ns()  # as much time as a new client has to log in
            self._is_new = True
            self._connections.enter_newcomer(self)
        if self.session.state.sender is not None and not may_stream:
            self.abort("the user was removed or may not stream any more")

    def schedule_pump(self) -> None:
        """Send stream messages in the next turn of the loop, or a little later if they can wait."""
        sender = self.session.state.sender
        if self._is_pump_scheduled or sender is None:
            return
        if not sender.can_wait:
            self._is_pump_scheduled = True
            if not (pumping := self._connections.pumping):
                self._loop.call_soon(_pump_all, pumping)  # a turn for each costs as much as it does
            pumping.append(self)
            if self.session.state.feed is not None:
                self._connections.feeding.add(self)
        elif self._next_news is None and sender.has_output:
            self._has_pumped = False
            self._next_news = self._loop.call_later(NEWS_WAIT_NS / 1e9, self._tell_news)

    def pump_now(self) -> None:
        """Send the stream messages that are scheduled."""
        if self._is_pump_scheduled:
            self._pump()

    def abort(self, reason: str) -> None:
        """Close now; unsent data is lost."""
        write, peer = self._parts.refusals.write, self.logins.peer
        write("connection closed", peer.host, peer=peer.address, reason=reason)
        self._is_aborted = True
        self._transport.abort()

    def finish(self, reason: str) -> None:
        """Close once everything that was received is answered."""
        self.session.state.close(reason)
        self._close_if_done()

    @property
    def _was_acknowledgement(self) -> bool:
        """Whether all that was received is acknowledgements of a replica, which have no answer."""
        state = self.session.state
        if state.feed is None or state.close_reason or state.is_full:
            return False
        held = state.held_bytes or self._has_held
        return not (held or state.answers or state.notes.lines or state.wait_group)

    # -- inside ------------------------------------------------------------------------------------

    def _failed(self, error: Exception) -> None:
        """End this connection because of a bug."""
        self._held.clear()
        self._parts.sessions.failed(error)
        self.abort(f"the server failed in this session: {type(error).__name__}")

    def _after_commands(self) -> None:
        """Carry out what the session left to do: logins, answers, commit, log lines, streams."""
        state = self.session.state
        if state.login.question is not None:
            assert isinstance(self.session, Session), "text knows no login"
            self.session.ask_logins(time.time_ns())
        if self._is_new and state.taken_bytes and self.session.is_logged_in:
            self._is_new = False
            self._connections.newcomers.leave(self)
        if state.answers:
            self._meter.answers += len(state.answers)
            if data := self._held.take(state, self.heard_ns):
                self._answered(data, (elapsed_ns() - self.heard_ns) / 1e9)
                self._write(data)
            else:
                self._connections.waiting.add(self)
        elif state.wait_group and self._held.carry(state, self.heard_ns):
            self._connections.waiting.add(self)
        if state.notes.lines:
            peer = self.logins.peer
            self._parts.sessions.note(peer.address, peer.host, state.notes)
        self._update_reading()
        if state.held_bytes or self._has_held:
            self._note_received()
        if self._replication is not None:
            self._replication.after_commands()
        if state.sender is not None:
            self._connections.watched.add(self)
            self.schedule_pump()
        if self._engine.keyspace.pending:
            # `release` may run within this call, so nothing may follow it here.
            self._committer.kick(None if state.is_full or state.close_reason else self)
        if state.close_reason and not state.has_steps:
            self._close_if_done()
        elif state.is_full:
            self._go_on_soon()

    def _answered(self, answers: bytes, seconds: float) -> None:
        """Measure how long a batch of commands took, keep it if it was slow, note large answers."""
        if len(answers) >= LARGE_BYTES:
            self._connections.large_answers.sent(self, len(answers))
        meter = self._meter
        meter.answer_seconds.observe(seconds)
        if meter.tracing is None and seconds < meter.slow.slow_s:
            return
        is_text = isinstance(self.session, TextSession)
        what = TEXT_COMMAND if is_text else command_of(answers)
        peer, user = self.logins.peer.address, self.session.state.login.user or ""
        if meter.tracing is not None:
            facts: Facts = {"client.address": peer, "enduser.id": user}
            packets = b"" if is_text else answers
            meter.tracing.answered(what, packets, seconds, self._traced, facts)
        if seconds >= meter.slow.slow_s:
            meter.slow.note(SlowOperation(time.time(), what, seconds, peer, user))

    def _go_on_soon(self) -> None:
        """Continue with what is left in the session's buffer, unless something else will do so: a
        commit, a peer that reads, the check of a password, or the end of the wait for room.
        """
        state = self.session.state
        if state.pause.arrival.until_ns:
            wait_s = (state.pause.arrival.until_ns - time.time_ns()) / 1e9
            self._connections.awaiting_arrival.add(self, wait_s)
            return
        is_asked = state.login.request is not None
        if self._held.batches or self._is_write_paused or is_asked or state.pause.is_for_room:
            return
        wait_ns = state.pause.until_ns - time.time_ns() if state.pause.until_ns else 0
        if wait_ns > 0:
            self._loop.call_later(wait_ns / 1e9, self._resume_session)
        else:
            self._loop.call_soon(self._resume_session)

    @_supervised
    def _login_checked(self, step: AuthStep) -> None:
        """Answer a login after its password check, and continue with what came after it."""
        assert isinstance(self.session, Session), "text knows no login"
        self.session.login_checked(step)
        self._after_commands()

    def _note_received(self) -> None:
        """Count the received bytes that are kept."""
        state = self.session.state
        if self._is_aborted:
            return  # its buffers go with it
        held_bytes = state.held_bytes + len(self._connections.large_answers.waiting.get(self, b""))
        if self._is_tls:
            held_bytes += cast("Any", self._transport).get_read_buffer_size()
        if held_bytes or self._has_held:
            self._has_held = held_bytes > 0
            buffers = self._connections.receive_buffers
            buffers.note(self, held_bytes, taken_bytes=state.taken_bytes)

    def _note_unsent(self, *, has_moved: bool = False) -> None:
        """Count what the peer has not read yet."""
        waiting_bytes = self._outgoing.size
        unsent_bytes = self._transport.get_write_buffer_size() + waiting_bytes
        if unsent_bytes:
            unsent_bytes += max(0, self._largest_bytes - waiting_bytes)
        else:
            self._largest_bytes = 0
        if not self._is_aborted:
            self._connections.send_buffers.note(self, unsent_bytes, has_moved=has_moved)

    @_supervised
    def _resume_session(self) -> None:
        """Continue with commands that were left in the session's buffer, and with reading."""
        large = self._connections.large_answers
        if large.is_spent and large.takes_part(self):
            self._loop.call_soon(self._resume_session)
            return
        state = self.session.state
        may_go_on = not (self._is_write_paused or self._transport.is_closing())
        if self._held.batches:  # a wait that is over need not add the wait for older answers
            has_room = self._held.held_bytes <= HELD_BYTES_MAX
            may_go_on = may_go_on and has_room and state.pause.arrival.until_ns > 0
        if state.is_full and may_go_on and not self._must_wait:
            if self._replication is not None:
                self._replication.before_commands(elapsed_ns())
            if self._meter.tracing is not None:
                self._meter.tracing.begin(self._traced)
            self.session.resume(time.time_ns())
            self._after_commands()
        else:
            self._update_reading()

    @property
    def _must_wait(self) -> bool:
        """Whether the session's next command writes, and writers still wait."""
        engine = self._engine
        store_is_behind = engine.writers_wait and not engine.write_refusal
        return self.session.state.pause.is_for_room and (store_is_behind or engine.loads.is_full)

    def _update_reading(self) -> None:
        pause = (
            self._is_write_paused
            or self.session.state.is_full
            or self._held.held_bytes > HELD_BYTES_MAX
            or self in self._connections.large_answers.waiting
        )
        if pause != self._is_read_paused and not self._transport.is_closing():
            self._is_read_paused = pause
            if pause:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _tell_news(self) -> None:
        """Send the messages that have waited. If others took the older ones with them, the rest
        waits once more: a timer for each would cost as much as a message.
        """
        self._next_news = None
        if self._has_pumped:
            self.schedule_pump()
        else:
            self._pump()

    @_supervised
    def _pump(self) -> None:
        self._is_pump_scheduled = False
        self._has_pumped = True
        sender = self.session.state.sender
        if sender is None or self._transport.is_closing():
            return
        if sender.is_superseded:
            self.abort("a newer connection has the same name")
            return
        if self._held.batches or self._is_write_paused:
            return  # release() and resume_writing() schedule the next turn
        messages = sender.pump(PUMP_BYTES)
        if sender.damages:
            for vb_id, damage in sender.damages:
                self._parts.sessions.backfill_failed(self.logins.peer.address, vb_id, damage)
            sender.damages.clear()
        if len(messages) == 1:
            self._write(messages[0])
        elif messages:
            self._write_pieces(messages)
        if sender.has_output:
            self.schedule_pump()

    def _close_if_done(self) -> None:
        state = self.session.state
        if not state.close_reason:
            return
        is_busy = state.answers or state.has_steps or state.login.request is not None
        if not (is_busy or self._held.batches or self._outgoing.size):
            peer = self.logins.peer
            if state.close_reason in _ORDINARY_ENDS:
                self._parts.sessions.closed_as_usual(peer.address, state.close_reason)
            elif not self._transport.is_closing():
                self._parts.refusals.write(
                    "connection closed", peer.host, peer=peer.address, reason=state.close_reason
                )
            self._transport.close()

    @property
    def _is_tls(self) -> bool:
        return self.logins.peer.over == KV_TLS

    def _write_pieces(self, pieces: Sequence[Message]) -> None:
        sent_bytes = sum(map(len, pieces))
        if self._is_tls or self._outgoing.size or sent_bytes < PIECE_BYTES_MIN * len(pieces):
            self._write(b"".join(pieces))
        elif sent_bytes > PIECE_BYTES:
            for piece in pieces:
                self._write(piece)
        else:
            self._meter.sent_bytes += sent_bytes
            self._largest_bytes = max(self._largest_bytes, sent_bytes)
            self._transport.writelines(pieces)

    def _write(self, data: Message) -> None:
        size, outgoing = len(data), self._outgoing
        self._meter.sent_bytes += size
        if size > self._largest_bytes:
            self._largest_bytes = size
            if size >= WATCHED_BYTES:
                self._connections.watched.add(self)
        is_first = not outgoing.size
        if is_first and size <= outgoing.piece_bytes:
            self._transport.write(data)
            return
        outgoing.add(data)
        if is_first:
            outgoing.hand_over(self._transport, self._next_turn)
            if outgoing.size and not self._is_write_paused:
                self._wait_for_peer()

    def _wait_for_peer(self) -> None:
        self._is_write_paused = True
        self._update_reading()
        self._note_unsent(has_moved=True)

    @_supervised
    def _next_turn(self) -> None:
        self._outgoing.has_turn = False
        if not self._transport.is_closing():
            self._write_on()

    def _write_on(self) -> None:
        """Go on with the data that waits, and after it with the session."""
        self._outgoing.hand_over(self._transport, self._next_turn)
        self._note_unsent(has_moved=True)
        if self._outgoing.size or self._outgoing.is_paused:
            return
        self._is_write_paused = False
        if self.session.state.map_news.is_owed:
            self.tell_map()
        self._resume_session()
        self.schedule_pump()
        self._close_if_done()
