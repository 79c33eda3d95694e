"""Leads cuts of the cluster, while consumers of this node ask for closed times.

    every 100 ms ──> draw ── X_CUT: draw ──> the other nodes ── answers, or DRAW_NS_MAX is over ──>
        ── X_CUT: complete ──> those that have drawn

The node with the lowest member id of those that are asked for cuts leads; the others notice that it
asks them. The cores are in `failover.replication.cuts`.

Invariants
- there is one connection to each other node, and none while nobody has asked for cuts for IDLE_NS;
- a connection on which something unexpected comes, or nothing for SILENT_NS, is ended, and dialled
  again: nobody says so when a machine is gone.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Final, cast

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
from dcp.session.nodes.cut_command import CutAnswer, What, pack_ask, read_cut_answer
from dcp.stream.hub import StreamHub
from dcp.wire.frame import Frame, FrameDecoder, RemoteProtocolError
from dcp.wire.opcode import Opcode
from failover.coordinator.records import MemberRecord
from failover.replication.cuts.cut_leader import CutLeader
from failover.rules.cut import DRAW_NS_MAX, Ask
from vbucket.engine.engine import Engine

AGAIN_NS: Final = 1_000_000_000
IDLE_NS: Final = 10_000_000_000
SILENT_NS: Final = 5_000_000_000
_BODY_BYTES_MAX: Final = 1 << 16


class CutPeer(asyncio.Protocol):
    """The connection to another node, a member of this id."""

    def __init__(self, rounds: CutRounds, member: str, login: NodeLogin) -> None:
        self._rounds = rounds
        self._member = member
        self._login = login
        self._decoder = FrameDecoder(_BODY_BYTES_MAX)
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        """Whether the connection stands."""
        return self._transport is not None

    @property
    def is_in(self) -> bool:
        """Whether the other node can be asked."""
        return self._login.is_in and self.is_open

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the login."""
        self._transport = cast("asyncio.Transport", transport)
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
            self._rounds.answered(self._member, read_cut_answer(frame))
        else:
            self.send(self._login.take(frame))

    def connection_lost(self, _exc: Exception | None) -> None:
        """The connection is gone."""
        self._transport = None
        self._rounds.answered(self._member, None)

    def send(self, data: bytes) -> None:
        """Send bytes, if the connection stands."""
        if self._transport is not None:
            self._transport.write(data)

    def end(self) -> None:
        """End the connection."""
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
        self._engine = engine
        self._tls = tls
        self._tasks = tasks
        self._log = log
        self._cuts = replicated.core.master.cuts
        self._leader = CutLeader(replicated.member, secrets.randbits(63) | 1)
        self._peers: dict[str, CutPeer] = {}
        self._dialled_ns: dict[str, int] = {}
        self._led_ns = 0
        """When this node led last."""
        self._timeout: asyncio.TimerHandle | None = None
        self._told_fault = False
        """Whether the log says that this node's clock is off."""

    def draw(self) -> None:
        """Begin a cut of the cluster, if somebody follows cuts here, and this node leads."""
        cuts, member, now_ns = self._cuts, self._replicated.member, elapsed_ns()
        self._tell()
        is_led = bool(cuts.led_by) and cuts.led_by < member
        if not self.hub.cutting or is_led or cuts.why_never or not self._replicated.served():
            if self._peers and now_ns - self._led_ns >= IDLE_NS:
                self._hang_up()
            return
        if self._leader.ask is not None:
            return
        self._led_ns = now_ns
        self._dial(now_ns)
        for name in self._silent(now_ns):
            self._peers[name].end()
        reached = [name for name, peer in self._peers.items() if peer.is_in]
        clock_ns = self._clock_ns()
        first_open = self._engine.first_open_ns
        ask, asked = self._leader.begin(reached, now_ns, clock_ns, first_open)
        for name in asked:
            self._peers[name].send(pack_ask(What.DRAW, ask, self._leader.number))
        for name in self._leader.probes(now_ns):
            self._peers[name].send(pack_ask(What.PROBE, ask, self._leader.number))
        self._replicated.core.check_fence(now_ns)
        cuts.draw(ask, clock_ns)
        loop = asyncio.get_running_loop()
        self._timeout = loop.call_later(DRAW_NS_MAX / 1e9, self._finish, ask)
        if self._leader.is_decided:
            self._finish(ask)

    def next_ns(self) -> int:
        """See CutTimer: what leaders ask for. A clock that is off reserves nothing."""
        return self._cuts.asked_time

    def stop(self) -> None:
        """Draw no more cuts."""
        super().stop()
        self._hang_up()

    def _hang_up(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
        for peer in tuple(self._peers.values()):
            peer.end()

    def _finish(self, ask: Ask) -> None:
        """All have drawn the cut, or time is over."""
        if self._leader.ask is not ask:
            return
        assert self._timeout is not None
        self._timeout.cancel()
        for name in self._leader.finish():
            self._peers[name].send(pack_ask(What.COMPLETE, ask))
        self._replicated.core.check_fence(elapsed_ns())
        self._cuts.complete(ask.round, ask.time)
        self._replicated.after_acknowledgement()

    def _clock_ns(self) -> int:
        """Return this node's clock, as its changes have it."""
        self._engine.begin_batch(time.time_ns())
        return self._engine.locks.now_ns

    def _tell(self) -> None:
        fault = self._cuts.clock_fault
        if bool(fault) != self._told_fault:
            self._told_fault = bool(fault)
            text = "this node closes no times" if fault else "this node closes times again"
            self._log.warning(text, reason=fault or "its clock is right again")

    def _silent(self, now_ns: int) -> list[str]:
        """Return who has not answered, or not let this node in, for too long."""
        return [
            name
            for name, peer in self._peers.items()
            if now_ns - (
                self._leader.asked_ns(name) if peer.is_in else self._dialled_ns[name]
            ) >= SILENT_NS
        ]  # fmt: skip

    def _dial(self, now_ns: int) -> None:
        members = self._replicated.session.view.members
        for name, stored in members.items():
            is_due = now_ns - self._dialled_ns.get(name, -AGAIN_NS) >= AGAIN_NS
            if name == self._replicated.member or name in self._peers or not is_due:
                continue
            if name in self._replicated.cut_members:
                continue
            self._dialled_ns[name] = now_ns
            self._tasks.begin(self._connect(name, stored.content))
        for name in self._peers.keys() - members.keys():
            self._peers[name].end()

    async def _connect(self, name: str, record: MemberRecord) -> None:
        """Dial a node; it is dialled again later if that fails."""
        tls = self._tls
        peer = self._peers[name] = CutPeer(self, name, self._replicated.access.login(tls))
        try:
            host, port = host_and_port(record.address if tls is None else tls_address_of(record))
            context = None if tls is None else tls.context()
            async with asyncio.timeout(DIAL_S if tls is None else TLS_DIAL_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: peer, host, port, ssl=context,
                    server_hostname=host if context else None,
                )  # fmt: skip
        except (OSError, TimeoutError, ValueError):
            self._peers.pop(name, None)

    def answered(self, name: str, answer: CutAnswer | None) -> None:
        """A member answers; None: the connection to it is over."""
        if answer is None:
            self._peers.pop(name, None)
            self._leader.lost(name)
        else:
            offset_ns = answer.clock_ns - self._clock_ns()
            self._leader.answered(
                name, answer.number, elapsed_ns(), offset_ns=offset_ns,
                first_open=answer.first_open, has_drawn=not answer.why_not,
            )  # fmt: skip
        ask = self._leader.ask
        if ask is not None and self._leader.is_decided:
            self._finish(ask)
