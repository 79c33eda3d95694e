"""Consistent cuts of simulated nodes: what the server's shell does for them, in virtual time.

A node alone draws its own (`dcp.server.net.cut_timer`); nodes of a cluster draw each one together
(`dcp.server.cluster.cut_rounds`), through the product's cores and on the simulated network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp.server.cluster.cut_rounds import AGAIN_NS, SILENT_NS
from dcp.server.storage.closed_times import AHEAD_NS, LEFT_NS
from dcp.session.nodes.cut_command import CutAnswer, What, pack_ask, read_cut_answer
from dcp.wire.frame import FrameDecoder
from dcp.wire.opcode import Opcode
from failover.replication.cuts.cut_leader import CutLeader
from failover.rules.cut import DRAW_NS_MAX, Ask
from sim.network import Side
from sim.world import MS
from vbucket.engine.cut import close_time, draw_cut

if TYPE_CHECKING:
    from sim.cluster_node import ClusterNode
    from sim.node import SingleNode

CUT_NS = 100 * MS
"""How often cuts are drawn."""


class NodeCuts:
    """Draws the cuts of a node alone, while somebody follows them."""

    def __init__(self, node: SingleNode) -> None:
        self._node = node
        self._is_writing = False
        close_time(node.engine, node._machine.closed)
        node.host.after(CUT_NS, self._look)

    def _look(self) -> None:
        self._node.host.after(CUT_NS, self._look)
        if self._node.hub.cutting:
            self._reserve()
        self.draw()

    def draw(self) -> None:
        """Draw a cut, if it is wanted."""
        engine, now_ns = self._node.engine, self._node.clock.wall_ns()
        if not self._node.hub.cutting:
            return
        engine.begin_batch(now_ns)
        if engine.now_ns | 0xFFFF <= engine.closed_max:
            cut = draw_cut(engine, now_ns)
            for follower in self._node.hub.cutting:
                follower.begin_cut(cut)

    def _reserve(self) -> None:
        """See `dcp.server.storage.closed_times`."""
        node, next_ns = self._node, self.next_ns()
        if not self._is_writing and next_ns + LEFT_NS >= node.engine.closed_max:
            self._is_writing = True
            node.host.after(node.sync_ns(), self._reserved, next_ns + AHEAD_NS)

    def next_ns(self) -> int:
        """Return the time that is closed next, as far as is known."""
        return max(self._node.clock.wall_ns(), self._node.engine.first_open_ns)

    def _reserved(self, closed_max: int) -> None:
        node = self._node
        if not node._machine.disk.is_full:
            node._machine.closed = closed_max
            node.engine.closed_max = max(node.engine.closed_max, closed_max)
        self._is_writing = False


class CutLink:
    """The connection to another node, for cuts."""

    def __init__(self, rounds: CutRounds, member: str, late_ns: int) -> None:
        """What is sent leaves so much later."""
        self._rounds = rounds
        self._member = member
        self._decoder = FrameDecoder()
        self._late_ns = late_ns
        self.side: Side | None = None

    def connected(self, side: Side) -> None:
        """It stands."""
        self.side, side.handler = side, self
        if not self._rounds.has(self._member, self):
            side.abort()

    def failed(self, _why: str) -> None:
        """The other node cannot be reached now."""
        self._rounds.answered(self._member, None)

    def send(self, data: bytes) -> None:
        """Send bytes, if the connection stands then."""
        if self.side is not None:
            self.side.host.after(self._late_ns, self._write, self.side, data)

    def _write(self, side: Side, data: bytes) -> None:
        side.write(data)

    def end(self) -> None:
        """End the connection."""
        if self.side is not None:
            self.side.abort()
        self.on_closed("")

    # -- Handler -----------------------------------------------------------------------------------

    def on_bytes(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            assert frame.opcode == Opcode.X_CUT
            self._rounds.answered(self._member, read_cut_answer(frame))

    def on_closed(self, _why: str) -> None:
        self.side = None
        if self._rounds.has(self._member, self):
            self._rounds.answered(self._member, None)

    def on_writable(self) -> None:
        """Do nothing: what a leader says is short."""


class CutRounds(NodeCuts):
    """Leads cuts of the cluster, while somebody follows cuts at this node."""

    _node: ClusterNode

    def __init__(self, node: ClusterNode, round_: int) -> None:
        super().__init__(node)
        self._leader = CutLeader(node.member, round_)
        self._links: dict[str, CutLink] = {}
        self._dialled_ns: dict[str, int] = {}

    def draw(self) -> None:
        """Begin a cut of the cluster, if somebody follows cuts here, and this node leads."""
        node, now_ns = self._node, self._node.clock.monotonic_ns()
        cuts = node.core.master.cuts
        is_led = bool(cuts.led_by) and cuts.led_by < node.member
        if not node.hub.cutting or is_led or cuts.why_never or not node.serves_any():
            return
        if self._leader.ask is not None:
            return
        self._dial(now_ns)
        for name in self._silent(now_ns):
            self._links[name].end()
        reached = [name for name, link in self._links.items() if link.side is not None]
        clock_ns = self._clock_ns()
        ask, asked = self._leader.begin(reached, now_ns, clock_ns, node.engine.first_open_ns)
        for name in asked:
            self._links[name].send(pack_ask(What.DRAW, ask, self._leader.number))
        for name in self._leader.probes(now_ns):
            self._links[name].send(pack_ask(What.PROBE, ask, self._leader.number))
        node.before_commands()
        cuts.draw(ask, clock_ns)
        node.host.after(DRAW_NS_MAX, self._finish, ask)
        if self._leader.is_decided:
            self._finish(ask)

    def has(self, name: str, link: CutLink) -> bool:
        """Whether this is the connection to a member."""
        return self._links.get(name) is link

    def next_ns(self) -> int:
        """See NodeCuts: what leaders ask for."""
        return self._node.core.master.cuts.asked_time

    def answered(self, name: str, answer: CutAnswer | None) -> None:
        """A member answers; None: the connection to it is over."""
        if answer is None:
            self._links.pop(name, None)
            self._leader.lost(name)
        else:
            self._leader.answered(
                name, answer.number, self._node.clock.monotonic_ns(),
                offset_ns=answer.clock_ns - self._clock_ns(), first_open=answer.first_open,
                has_drawn=not answer.why_not,
            )  # fmt: skip
        if self._leader.ask is not None and self._leader.is_decided:
            self._finish(self._leader.ask)

    def _finish(self, ask: Ask) -> None:
        """All have drawn the cut, or time is over."""
        if self._leader.ask is not ask:
            return
        node = self._node
        for name in self._leader.finish():
            self._links[name].send(pack_ask(What.COMPLETE, ask))
        node.before_commands()
        node.core.master.cuts.complete(ask.round, ask.time)
        node.after_commands()

    def _clock_ns(self) -> int:
        engine = self._node.engine
        engine.begin_batch(self._node.clock.wall_ns())
        return engine.locks.now_ns

    def _silent(self, now_ns: int) -> list[str]:
        return [
            name
            for name, link in self._links.items()
            if link.side is not None and now_ns - self._leader.asked_ns(name) >= SILENT_NS
        ]

    def _dial(self, now_ns: int) -> None:
        node = self._node
        members = node.session.view.members
        for name, stored in sorted(members.items()):
            is_due = now_ns - self._dialled_ns.get(name, -AGAIN_NS) >= AGAIN_NS
            if name == node.member or name in self._links or not is_due:
                continue
            self._dialled_ns[name] = now_ns
            late_ns = node._world.below(node._plan.cut_late_ns + 1)
            link = self._links[name] = CutLink(self, name, late_ns)
            node._machine.network.connect(
                node.host, stored.content.address, link.connected, link.failed
            )
        for name in sorted(self._links.keys() - members.keys()):
            self._links[name].end()
