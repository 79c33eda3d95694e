"""Leads cuts of the cluster, while consumers of this node ask for closed times: the connections.

`failover.replication.cuts.cut_leader` says whom to dial, what to send and when a cut is complete.

Invariants
- a connection on which something unexpected comes is ended, and dialled again;
- what comes of a connection that was ended here counts no more.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable
from typing import cast

from scramp import ScramException

from dcp.server.access.link_tls import LinkTls
from dcp.server.cluster.member_link import DIAL_S, TLS_DIAL_S, LoginRefusedError, NodeLogin
from dcp.server.cluster.node_map import host_and_port, tls_address_of
from dcp.server.cluster.replicated_node import ReplicatedNode
from dcp.server.net.cut_timer import CutTimer
from dcp.server.observe.elapsed import elapsed_ns
from dcp.server.observe.event_log import EventLog
from dcp.server.observe.housekeeping import Tasks
from dcp.server.storage.closed_times import ClosedTimes
from dcp.session.nodes.cut_command import read_cut_answer
from dcp.stream.hub import StreamHub
from dcp.wire.frame import Frame, FrameDecoder, RemoteProtocolError
from dcp.wire.opcode import Opcode
from failover.coordinator.records import MemberRecord
from failover.replication.cuts.cut_leader import CutEffect, Due, HangUp, LedCuts, Say
from failover.rules.cut import DRAW_NS_MAX, Ask
from vbucket.engine.engine import Engine

_BODY_BYTES_MAX = 1 << 16


class CutPeer(asyncio.Protocol):
    """The connection to another node, a member of this id."""

    def __init__(self, rounds: CutRounds, member: str, login: NodeLogin) -> None:
        self._rounds = rounds
        self._member = member
        self._login = login
        self._decoder = FrameDecoder(_BODY_BYTES_MAX)
        self._transport: asyncio.Transport | None = None
        self._is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the login."""
        self._transport = cast("asyncio.Transport", transport)
        if self._is_over:
            self._transport.abort()
        else:
            self._transport.write(self._login.first())

    def data_received(self, data: bytes) -> None:
        """Take what the other node says."""
        try:
            for frame in self._decoder.feed(data):
                self._take(frame)
        except (LoginRefusedError, RemoteProtocolError, ScramException, ValueError):
            self.end()

    def _take(self, frame: Frame) -> None:
        if self._login.is_in and frame.opcode == Opcode.X_CUT:
            self._rounds.answered(self._member, self, frame)
            return
        self.send(self._login.take(frame))
        if self._login.is_in:
            self._rounds.connected(self._member, self)

    def connection_lost(self, _exc: Exception | None) -> None:
        """The connection is gone."""
        self._transport = None
        self._rounds.lost(self._member, self)

    def send(self, data: bytes) -> None:
        """Send bytes, if the connection stands."""
        if self._transport is not None:
            self._transport.write(data)

    def end(self) -> None:
        """End the connection, or that which is being made."""
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()


class CutRounds(CutTimer):
    """See the module. Lives on one event loop."""

    def __init__(
        self,
        replicated: ReplicatedNode,
        engine: Engine,
        hub: StreamHub,
        closed: ClosedTimes,
        tls: LinkTls | None,
        tasks: Tasks,
        log: EventLog,
    ) -> None:
        super().__init__(engine, hub, closed)
        self._replicated = replicated
        self._tls = tls
        self._tasks = tasks
        self._log = log
        self._cuts = replicated.core.master.cuts
        round_ = secrets.randbits(63) | 1
        self._led = LedCuts(replicated.core, engine, hub, replicated.member, round_)
        self._peers: dict[str, CutPeer] = {}
        self._timeout: asyncio.TimerHandle | None = None
        self._told_fault = False
        """Whether the log says that this node's clock is off."""

    def draw(self) -> None:
        """Begin a cut of the cluster, if somebody follows cuts here, and this node leads."""
        self._tell()
        members = self._replicated.session.view.members.keys() - self._replicated.links.cut_members
        self._carry_out(self._led.draw(elapsed_ns(), time.time_ns(), members))

    def next_ns(self) -> int:
        """See CutTimer: what leaders ask for. A clock that is off reserves nothing."""
        return self._cuts.asked_time

    def stop(self) -> None:
        """Draw no more cuts."""
        super().stop()
        if self._timeout is not None:
            self._timeout.cancel()
        self._carry_out(self._led.hang_up())

    def connected(self, member: str, peer: CutPeer) -> None:
        """A member has let this node in."""
        if self._peers.get(member) is peer:
            self._led.connected(member)

    def answered(self, member: str, peer: CutPeer, frame: Frame) -> None:
        """A member answers. Raises ValueError."""
        answer = read_cut_answer(frame)
        if self._peers.get(member) is peer:
            self._carry_out(self._led.answered(elapsed_ns(), time.time_ns(), member, answer))

    def lost(self, member: str, peer: CutPeer) -> None:
        """A member was not reached, or the connection to it is over."""
        if self._peers.get(member) is peer:
            del self._peers[member]
            self._carry_out(self._led.lost(elapsed_ns(), member))

    def _carry_out(self, effects: Iterable[CutEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Say):
                self._peers[effect.member].send(effect.data)
            elif isinstance(effect, HangUp):
                self._peers.pop(effect.member).end()
            elif isinstance(effect, Due):
                loop = asyncio.get_running_loop()
                self._timeout = loop.call_later(DRAW_NS_MAX / 1e9, self._late, effect.ask)
            else:
                login = self._replicated.access.login(self._tls)
                peer = self._peers[effect.member] = CutPeer(self, effect.member, login)
                record = self._replicated.session.view.members[effect.member].content
                self._tasks.begin(self._connect(effect.member, peer, record))
        self._replicated.after_acknowledgement()

    def _late(self, ask: Ask) -> None:
        self._carry_out(self._led.late(elapsed_ns(), ask))

    def _tell(self) -> None:
        fault = self._cuts.clock_fault
        if bool(fault) != self._told_fault:
            self._told_fault = bool(fault)
            text = "this node closes no times" if fault else "this node closes times again"
            self._log.warning(text, reason=fault or "its clock is right again")

    async def _connect(self, member: str, peer: CutPeer, record: MemberRecord) -> None:
        """Dial a node; it is dialled again later if that fails."""
        tls = self._tls
        try:
            host, port = host_and_port(record.address if tls is None else tls_address_of(record))
            context = None if tls is None else tls.context()
            async with asyncio.timeout(DIAL_S if tls is None else TLS_DIAL_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: peer, host, port, ssl=context,
                    server_hostname=host if context else None,
                )  # fmt: skip
        except (OSError, TimeoutError, ValueError):
            self.lost(member, peer)
