"""The server's side of one simulated connection: what dcp.server.net.connection does with sockets.

Invariants
- answers leave in order, each when what it changed or showed is committed;
- stream messages follow the answers, and nothing is produced for a peer that does not read;
- a session that is full goes on when its answers have left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dcp.session.access.auth import Authenticator
from dcp.session.access.rights import FULL_RIGHTS, Role
from dcp.session.answers.held_answers import HeldAnswers
from dcp.session.kv.range_scans import RangeScans
from dcp.session.node_facts import Limits, NodeFacts
from dcp.session.replication_port import NEWS_WAIT_NS, ReplicationPort
from dcp.session.session import Session
from dcp.session.state import ClientLogin, SessionParts, SessionState
from dcp.stream.hub import StreamHub
from dcp.stream.snapshots import Message
from sim.clock import Clock
from sim.network import Side
from sim.world import Host
from vbucket.engine.engine import Engine

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
    pump_bytes: int
    """Stream messages sent in one turn."""

    def kick(self) -> None:
        """Write what is pending."""

    def met(self, vb_id: int | None) -> None:
        """Somebody met damage in a partition."""

    def refuses(self, why: str) -> None:
        """The connection of a replica ends, because of what came on it."""

    replication: ReplicationPort | None
    """Where replicas come in; None: the node is alone."""
    held: Callable[[], HeldAnswers]
    """Makes what holds a connection's answers."""

    def before_commands(self) -> None:
        """Commands come next: what may not answer any more is fenced."""

    def after_commands(self) -> None:
        """Commands, or an acknowledgement of a replica, were handled."""


class ServedConnection:
    """See the module."""

    def __init__(self, node: Served, side: Side) -> None:
        self._node = node
        self.side = side
        self.name = side.name
        side.handler = self
        self.state = SessionState(
            SessionParts.of(
                node.engine,
                node.hub,
                node.facts,
                LIMITS,
                scans=node.scans,
                replication=node.replication,
            ),
            ClientLogin(node.authenticator, peer_is_loopback=True),
        )
        if node.replication is not None:  # a link of a replica's node may come in, without a login
            self.state.login.rights = FULL_RIGHTS.granted(Role.REPLICATE)
        self.state.schedule = self.schedule_pump
        self.session = Session(self.state)
        self.held = node.held()
        self._is_pump_scheduled = self._waits_with_news = False
        node.connections[self] = None

    # -- Handler -----------------------------------------------------------------------------------

    def on_bytes(self, data: bytes) -> None:
        clock = self._node.clock
        if (sender := self.state.sender) is not None:
            sender.heard(clock.monotonic_ns())
        self._node.before_commands()
        self.session.receive(data, clock.wall_ns())
        self._after_commands()

    def on_closed(self, why: str) -> None:
        self._forget()

    def on_writable(self) -> None:
        self._resume()
        self.schedule_pump()

    # -- what the node calls -----------------------------------------------------------------------

    def release(self) -> None:
        """Send the answers that may leave."""
        if not self.held.batches:
            return
        for batch in self.held.release():
            self.side.write(batch.answers)
        if not self.held.batches:
            self._resume()
            self.schedule_pump()
            self._close_if_done()

    def go_on(self) -> None:
        """Resume if the next request waited for a partition."""
        if self.state.pause.arrival.until_ns:
            self._resume()

    def tick(self) -> None:
        """Let time pass."""
        now_ns = self._node.clock.monotonic_ns()
        if self.held.next_expiry_ns is not None and self.held.next_expiry_ns <= now_ns:
            self.held.expire(now_ns)
            self.release()
        sender = self.state.sender
        if sender is not None and not sender.tick(now_ns):
            self._abort()

    def schedule_pump(self) -> None:
        """Send stream messages in a moment, or a little later if they can wait."""
        sender = self.state.sender
        if self._is_pump_scheduled or sender is None:
            return
        if not sender.can_wait:
            self._is_pump_scheduled = True
            self._node.host.after(0, self._pump)
        elif not self._waits_with_news and sender.has_output:
            self._waits_with_news = True
            self._node.host.after(NEWS_WAIT_NS, self._pump)

    # -- inside ------------------------------------------------------------------------------------

    def _after_commands(self) -> None:
        state = self.state
        if state.login.question is not None:
            self.session.ask_logins(self._node.clock.wall_ns())
        now_ns = self._node.clock.monotonic_ns()
        if state.answers:
            if data := self.held.take(state, now_ns):
                self.side.write(data)
        elif state.wait_group:
            self.held.carry(state, now_ns)
        for event, fields in state.notes.lines:
            if event == "damaged data":
                vb_id = fields["vb_id"]
                self._node.met(vb_id if isinstance(vb_id, int) else None)
        state.notes.lines.clear()
        self._node.after_commands()
        if state.sender is not None:
            self.schedule_pump()
        if self._node.engine.keyspace.has_pending:
            self._node.kick()
        if state.is_closing:
            if state.feed is not None:
                self._node.refuses(state.close_reason)
            self._close_if_done()
        elif state.pause.arrival.until_ns:
            wait_ns = max(0, state.pause.arrival.until_ns - self._node.clock.wall_ns())
            self._node.host.after(wait_ns, self.go_on)
        elif state.is_full and not self.held.batches:
            wait_ns = max(0, state.pause.until_ns - self._node.clock.wall_ns())
            self._node.host.after(wait_ns, self._resume)

    def _resume(self) -> None:
        may_go_on = not self.held.batches or self.state.pause.arrival.until_ns
        if self.state.is_full and may_go_on and self.side.is_open and self.side.can_write:
            self._node.before_commands()
            self.session.resume(self._node.clock.wall_ns())
            self._after_commands()

    def _pump(self) -> None:
        self._is_pump_scheduled = self._waits_with_news = False
        sender = self.state.sender
        if sender is None or not self.side.is_open:
            return
        if sender.is_superseded:
            self._abort()
            return
        if self.held.batches or not self.side.can_write:
            return  # `release` and `on_writable` schedule the next turn
        messages = sender.pump(self._node.pump_bytes)
        for vb_id, _ in sender.damages:
            self._node.met(vb_id)
        sender.damages.clear()
        if messages:
            self._send(messages)
        if sender.has_output:
            self.schedule_pump()

    def _send(self, messages: list[Message]) -> None:
        self.side.write(b"".join(messages))

    def _close_if_done(self) -> None:
        if self.state.is_closing and not (self.held.batches or self.state.answers):
            self.side.close()
            self._forget()

    def _abort(self) -> None:
        self.side.abort()
        self._forget()

    def _forget(self) -> None:
        if self.state.sender is not None:
            self.state.sender.close()
        self.held.clear()
        self.session.drop_received()
        self._node.connections.pop(self, None)
        if self._node.engine.keyspace.has_pending:
            self._node.kick()
