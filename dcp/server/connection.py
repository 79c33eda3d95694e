"""The socket side of a session: an asyncio protocol that moves bytes and keeps back-pressure.

Answers wait here until the group that they depend on is committed; stream messages follow the
answers. What is held for a peer is bounded: reading stops while the peer does not read, while too
many answers wait for the disk, and while a command that writes waits for room.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec, cast

from dcp.server.logins import PeerLogins
from dcp.session.session import Session
from dcp.session.text import TextSession, begins_text
from dcp.stream.snapshots import Message

if TYPE_CHECKING:
    from dcp.server.node import Node

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
"""Average length from which messages are handed over one by one: joining them copies all once more,
and is cheaper for short ones."""
PUMP_BYTES: Final = 256 << 10
"""Stream messages sent in one turn of the loop."""


def _supervised(
    method: Callable[Concatenate[ClientConnection, _P], None],
) -> Callable[Concatenate[ClientConnection, _P], None]:
    """Let an exception that nobody expected end the connection, and nothing else."""

    def run(self: ClientConnection, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a named supervision point
            self._failed(error)

    return cast("Callable[Concatenate[ClientConnection, _P], None]", wraps(method)(run))


class ClientConnection(asyncio.Protocol):
    """One accepted connection. The node keeps it in `node.connections` while it is open."""

    def __init__(self, node: Node, *, is_tls: bool = False) -> None:
        self._node = node
        self._is_tls = is_tls
        self._loop = node.loop
        self._meter = node.meter
        self._held: deque[tuple[int, bytes, int]] = deque()
        """Commit group, answers, when the requests were read."""
        self._held_bytes = 0
        self._is_write_paused = False
        self._is_read_paused = False
        self._is_pump_scheduled = False
        self._has_begun = False
        self._transport: asyncio.Transport
        self.session: Session | TextSession
        self.peer = ""
        self.peer_host = ""
        self.logins: PeerLogins
        self.opened_ns = 0
        self.heard_ns = 0

    # -- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up the session; refuse the connection where there are too many."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        address = transport.get_extra_info("peername") or ("", 0)
        self.peer_host = str(address[0])
        self.peer = f"{address[0]}:{address[1]}"
        self.opened_ns = self.heard_ns = time.monotonic_ns()
        self.logins = self._node.access.logins_of(str(address[0]), self.peer, is_tls=self._is_tls)
        self.session = Session(self._node.session_state(str(address[0]), self.logins))
        self.session.state.schedule = self.schedule_pump
        self._node.connection_opened(self)

    def connection_lost(self, _exc: Exception | None) -> None:
        """Forget the peer."""
        producer = self.session.state.producer
        if producer is not None:
            producer.close()
        if self._node.engine.has_pending:
            # A takeover that was given up gave its partition back, or a failure amid commands left
            # what was done before it: that must not wait for the next writer.
            self._node.committer.kick()
        self._held.clear()
        self._node.scans.leave(self.session.state)
        self.logins.leave()
        self._node.connection_closed(self)

    def data_received(self, data: bytes) -> None:
        """Hand what came in to the session and send what it answers."""
        self.heard_ns = time.monotonic_ns()
        if not self._has_begun:
            self._has_begun = True
            if begins_text(data[0]):
                self.session = TextSession(self.session.state)
        self._meter.received_bytes += len(data)
        try:
            if (producer := self.session.state.producer) is not None:
                producer.heard(self.heard_ns)
            self.session.receive(data, time.time_ns())
            self._after_commands()
        except Exception as error:  # noqa: BLE001 - a named supervision point
            self._failed(error)

    def eof_received(self) -> bool:
        """The peer will send nothing more: close once its answers are gone."""
        self.session.state.close("the client closed its side")
        self._close_if_done()
        return not self._is_tls  # TLS knows no half-closed connection

    def pause_writing(self) -> None:
        """The peer does not read: take nothing more from it, produce nothing more."""
        self._is_write_paused = True
        self._update_reading()

    @_supervised
    def resume_writing(self) -> None:
        """The peer reads again."""
        self._is_write_paused = False
        self._resume_session()
        self.schedule_pump()

    # -- what the node calls -----------------------------------------------------------------------

    def release(self, committed_group: int) -> bool:
        """Send the answers whose group is committed; return whether any still wait."""
        self._release(committed_group)
        return bool(self._held)

    @_supervised
    def _release(self, committed_group: int) -> None:
        held = self._held
        ready: list[bytes] = []
        now_ns = time.monotonic_ns()
        while held and held[0][0] <= committed_group:
            _, answers, read_ns = held.popleft()
            ready.append(answers)
            self._meter.answer_seconds.observe((now_ns - read_ns) / 1e9)
        if ready:
            data = ready[0] if len(ready) == 1 else b"".join(ready)
            self._held_bytes -= len(data)
            self._write(data)
        if not held:
            self._resume_session()
            self.schedule_pump()
            self._close_if_done()

    @_supervised
    def tick(self, now_ns: int) -> None:
        """Let time pass; monotonic nanoseconds."""
        reason = self._node.access.overdue(self, now_ns)
        producer = self.session.state.producer
        if producer is not None and not producer.tick(now_ns):
            reason = "nothing was heard of the DCP client"
        if reason:
            self.abort(reason)

    @_supervised
    def writers_may_go_on(self) -> None:
        """Writers need not wait any longer: there is room, or what writes is refused."""
        if self.session.state.waits_for_room:
            self._resume_session()

    def rights_changed(self, *, may_stream: bool) -> None:
        """What the user may do has changed; the session knows. A stream would not ask again."""
        if self.session.state.rights is None:
            self.logins.leave()
            self.opened_ns = time.monotonic_ns()  # as long as a new client may take to log in
        if self.session.state.producer is not None and not may_stream:
            self.abort("the user may not stream any more, or was removed")

    def schedule_pump(self) -> None:
        """Send stream messages in the next turn of the loop."""
        if not self._is_pump_scheduled and self.session.state.producer is not None:
            self._is_pump_scheduled = True
            self._loop.call_soon(self._pump)

    def abort(self, reason: str) -> None:
        """Close now; what is not sent is lost."""
        self._node.log_refusal("connection closed", self.peer_host, peer=self.peer, reason=reason)
        self._transport.abort()

    def finish(self, reason: str) -> None:
        """Close once the answers to what was received are gone."""
        self.session.state.close(reason)
        self._close_if_done()

    # -- inside ------------------------------------------------------------------------------------

    def _failed(self, error: Exception) -> None:
        """End this connection because of a fault of the program."""
        self._held.clear()
        self._held_bytes = 0
        self._node.session_failed(error)
        self.abort(f"the server failed in this session: {type(error).__name__}")

    def _after_commands(self) -> None:
        state = self.session.state
        node = self._node
        if state.answers:
            self._meter.answers += len(state.answers)
            data = b"".join(state.answers)
            state.answers.clear()
            if self._held or state.wait_group > node.engine.committed_group:
                self._held.append((state.wait_group, data, self.heard_ns))
                self._held_bytes += len(data)
                node.waiting.add(self)
            else:
                self._meter.answer_seconds.observe((time.monotonic_ns() - self.heard_ns) / 1e9)
                self._write(data)
        if node.engine.has_pending:
            if len(node.connections) == 1 and not (state.is_full or state.is_closing):
                node.committer.kick_now()  # nobody else could add to the group
            else:
                node.committer.kick()
        if state.notes:
            node.log_notes(self, state.notes)
            state.notes.clear()
            if state.notes_left_out:
                node.meter.suppressed_log_lines += state.notes_left_out
                state.notes_left_out = 0
        self._update_reading()
        if state.producer is not None:
            self.schedule_pump()
        if state.is_closing and state.flush is None:
            self._close_if_done()
        elif state.waits_for_room:
            pass  # the node calls `writers_may_go_on`
        elif state.is_full and not self._held and not self._is_write_paused:
            wait_ns = state.held_until_ns - time.time_ns() if state.held_until_ns else 0
            if wait_ns > 0:
                self._loop.call_later(wait_ns / 1e9, self._resume_session)
            else:
                self._loop.call_soon(self._resume_session)

    @_supervised
    def _resume_session(self) -> None:
        """Go on with commands that were left in the session's buffer, and with reading."""
        state = self.session.state
        may_go_on = not (self._held or self._is_write_paused or self._transport.is_closing())
        if state.is_full and may_go_on and not self._must_wait:
            self.session.resume(time.time_ns())
            self._after_commands()
        else:
            self._update_reading()

    @property
    def _must_wait(self) -> bool:
        """Whether the session's next command writes, and writers still wait."""
        engine = self._node.engine
        return (
            self.session.state.waits_for_room and engine.writers_wait and not engine.write_refusal
        )

    def _update_reading(self) -> None:
        pause = (
            self._is_write_paused or self.session.state.is_full or self._held_bytes > HELD_BYTES_MAX
        )
        if pause != self._is_read_paused and not self._transport.is_closing():
            self._is_read_paused = pause
            if pause:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    @_supervised
    def _pump(self) -> None:
        self._is_pump_scheduled = False
        producer = self.session.state.producer
        if producer is None or self._transport.is_closing():
            return
        if producer.is_superseded:
            self.abort("a newer connection has the same name")
            return
        if self._held or self._is_write_paused:
            return  # release() and resume_writing() schedule the next turn
        messages = producer.pump(PUMP_BYTES)
        for damage in producer.damages:
            self._node.log_event("backfill failed", peer=self.peer, reason=damage)
        producer.damages.clear()
        if messages:
            self._write_pieces(messages)
        if producer.has_output:
            self.schedule_pump()

    def _close_if_done(self) -> None:
        state = self.session.state
        if state.is_closing and not self._held and not state.answers and state.flush is None:
            if state.close_reason in _ORDINARY_ENDS:
                self._node.log_detail(
                    "connection closed", peer=self.peer, reason=state.close_reason
                )
            elif not self._transport.is_closing():
                self._node.log_refusal(
                    "connection closed", self.peer_host, peer=self.peer, reason=state.close_reason
                )
            self._transport.close()

    def _write_pieces(self, pieces: list[Message]) -> None:
        sent_bytes = sum(map(len, pieces))
        if sent_bytes < PIECE_BYTES_MIN * len(pieces):
            self._write(b"".join(pieces))
        else:
            self._meter.sent_bytes += sent_bytes
            self._transport.writelines(pieces)

    def _write(self, data: bytes) -> None:
        self._meter.sent_bytes += len(data)
        self._transport.write(data)
