"""The server's side of one simulated connection: what dcp.server.net.connection does with sockets.

Invariants
- answers leave in order, each when its commit group is committed;
- stream messages follow the answers, and nothing is produced for a peer that does not read;
- a session that is full goes on when its answers have left.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from dcp.session.auth import Authenticator
from dcp.session.range_scans import RangeScans
from dcp.session.session import Session
from dcp.session.state import Limits, NodeFacts, SessionState
from dcp.stream.hub import StreamHub
from dcp.stream.snapshots import Message
from sim.clock import Clock
from sim.network import Side
from sim.world import Host
from vbucket.engine.engine import Engine

PUMP_BYTES = 64 << 10
"""Stream messages sent in one turn."""
LIMITS = Limits()


class Served(Protocol):
    """What a connection needs from its node."""

    host: Host
    clock: Clock
    engine: Engine
    hub: StreamHub
    scans: RangeScans
    authenticator: Authenticator
    facts: NodeFacts
    connections: dict[ServedConnection, None]

    def kick(self) -> None:
        """Write what is pending."""

    @property
    def answered_group(self) -> int:
        """Answers that wait for this group or an earlier one may leave."""


class ServedConnection:
    """See the module."""

    def __init__(self, node: Served, side: Side) -> None:
        self._node = node
        self.side = side
        self.name = side.name
        side.handler = self
        self.state = SessionState(
            engine=node.engine,
            hub=node.hub,
            facts=node.facts,
            authenticator=node.authenticator,
            peer_is_loopback=True,
            limits=LIMITS,
            scans=node.scans,
        )
        self.state.schedule = self.schedule_pump
        self.session = Session(self.state)
        self._held: deque[tuple[int, bytes]] = deque()
        self._is_pump_scheduled = False
        node.connections[self] = None

    # -- Handler -----------------------------------------------------------------------------------

    def on_bytes(self, data: bytes) -> None:
        clock = self._node.clock
        if (producer := self.state.producer) is not None:
            producer.heard(clock.monotonic_ns())
        self.session.receive(data, clock.wall_ns())
        self._after_commands()

    def on_closed(self, why: str) -> None:
        self._forget()

    def on_writable(self) -> None:
        self._resume()
        self.schedule_pump()

    # -- what the node calls -----------------------------------------------------------------------

    def release(self) -> None:
        """Send the answers whose group is committed."""
        held, committed = self._held, self._node.answered_group
        if not held or held[0][0] > committed:
            return
        while held and held[0][0] <= committed:
            self.side.write(held.popleft()[1])
        if not held:
            self._resume()
            self.schedule_pump()
            self._close_if_done()

    def tick(self) -> None:
        """Let time pass."""
        producer = self.state.producer
        if producer is not None and not producer.tick(self._node.clock.monotonic_ns()):
            self._abort()

    def schedule_pump(self) -> None:
        """Send stream messages in a moment."""
        if not self._is_pump_scheduled and self.state.producer is not None:
            self._is_pump_scheduled = True
            self._node.host.after(0, self._pump)

    # -- inside ------------------------------------------------------------------------------------

    def _after_commands(self) -> None:
        state = self.state
        if state.login_question is not None:
            self.session.ask_logins(self._node.clock.wall_ns())
        if state.answers:
            data = b"".join(state.answers)
            state.answers.clear()
            if self._held or state.wait_group > self._node.answered_group:
                self._held.append((state.wait_group, data))
            else:
                self.side.write(data)
        state.notes.clear()
        if state.producer is not None:
            self.schedule_pump()
        if self._node.engine.keyspace.has_pending:
            self._node.kick()
        if state.is_closing:
            self._close_if_done()
        elif state.is_full and not self._held:
            wait_ns = max(0, state.held_until_ns - self._node.clock.wall_ns())
            self._node.host.after(wait_ns, self._resume)

    def _resume(self) -> None:
        if self.state.is_full and not self._held and self.side.is_open and self.side.can_write:
            self.session.resume(self._node.clock.wall_ns())
            self._after_commands()

    def _pump(self) -> None:
        self._is_pump_scheduled = False
        producer = self.state.producer
        if producer is None or not self.side.is_open:
            return
        if producer.is_superseded:
            self._abort()
            return
        if self._held or not self.side.can_write:
            return  # `release` and `on_writable` schedule the next turn
        messages = producer.pump(PUMP_BYTES)
        assert not producer.damages, producer.damages
        if messages:
            self._send(messages)
        if producer.has_output:
            self.schedule_pump()

    def _send(self, messages: list[Message]) -> None:
        self.side.write(b"".join(messages))

    def _close_if_done(self) -> None:
        if self.state.is_closing and not (self._held or self.state.answers):
            self.side.close()
            self._forget()

    def _abort(self) -> None:
        self.side.abort()
        self._forget()

    def _forget(self) -> None:
        if self.state.producer is not None:
            self.state.producer.close()
        self._held.clear()
        self.session.drop_received()
        self._node.connections.pop(self, None)
        if self._node.engine.keyspace.has_pending:
            self._node.kick()
