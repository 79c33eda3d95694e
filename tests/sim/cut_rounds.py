"""Consistent cuts of simulated nodes: what the server's shell does for them, in virtual time.

A node alone draws its own, nodes of a cluster draw each one together: when, and what comes after
what, the product's cores say, in the server's process, too (`failover.replication.cuts`). Here are
the clocks, the connections and the disk that knows the reserved times.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dcp.server.storage.closed_times import keep_closed, time_to_reserve
from dcp.session.nodes.cut_command import CutAnswer, read_cut_answer
from dcp.stream.pending_cut import draw_own_cut
from dcp.wire.frame import FrameDecoder
from dcp.wire.opcode import Opcode
from failover.replication.cuts.cut_leader import CutEffect, Due, HangUp, LedCuts, Say
from failover.rules.cut import DRAW_NS_MAX, Ask
from sim.network import Side
from sim.world import MS

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
        keep_closed(node.engine, node._machine.closed)
        node.host.after(CUT_NS, self._look)

    def _look(self) -> None:
        self._node.host.after(CUT_NS, self._look)
        if self._node.hub.cutting:
            self._reserve()
        self.draw()

    def draw(self) -> None:
        """Draw a cut, if it is wanted."""
        draw_own_cut(self._node.engine, self._node.hub, self._node.clock.wall_ns())

    def _reserve(self) -> None:
        """See `dcp.server.storage.closed_times`."""
        node = self._node
        closed_max = time_to_reserve(self.next_ns(), node.engine.closed_max)
        if closed_max is not None and not self._is_writing:
            self._is_writing = True
            node.host.after(node.sync_ns(), self._reserved, closed_max)

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
        if not self._rounds.connected(self._member, self):
            side.abort()

    def failed(self, _why: str) -> None:
        """The other node cannot be reached now."""
        self._rounds.lost(self._member, self)

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
            self._rounds.answered(self._member, self, read_cut_answer(frame))

    def on_closed(self, _why: str) -> None:
        self.side = None
        self._rounds.lost(self._member, self)

    def on_writable(self) -> None:
        """Do nothing: what a leader says is short."""


class CutRounds(NodeCuts):
    """Leads cuts of the cluster, while somebody follows cuts at this node."""

    _node: ClusterNode

    def __init__(self, node: ClusterNode, round_: int) -> None:
        super().__init__(node)
        self._led = LedCuts(node.core, node.engine, node.hub, node.member, round_)
        self._links: dict[str, CutLink] = {}

    def draw(self) -> None:
        """See CutTimer."""
        clock, members = self._node.clock, self._node.session.view.members
        self._carry_out(self._led.draw(clock.monotonic_ns(), clock.wall_ns(), members.keys()))

    def next_ns(self) -> int:
        """See NodeCuts: what leaders ask for."""
        return self._node.core.master.cuts.asked_time

    def connected(self, member: str, link: CutLink) -> bool:
        """A member can be asked; False: the connection was ended meanwhile."""
        is_ours = self._links.get(member) is link
        if is_ours:
            self._led.connected(member)
        return is_ours

    def answered(self, member: str, link: CutLink, answer: CutAnswer) -> None:
        """A member answers."""
        if self._links.get(member) is link:
            clock = self._node.clock
            now_ns, wall_ns = clock.monotonic_ns(), clock.wall_ns()
            self._carry_out(self._led.answered(now_ns, wall_ns, member, answer))

    def lost(self, member: str, link: CutLink) -> None:
        """A member was not reached, or the connection to it is over."""
        if self._links.get(member) is link:
            del self._links[member]
            self._carry_out(self._led.lost(self._node.clock.monotonic_ns(), member))

    def _carry_out(self, effects: Iterable[CutEffect]) -> None:
        node = self._node
        for effect in effects:
            if isinstance(effect, Say):
                self._links[effect.member].send(effect.data)
            elif isinstance(effect, HangUp):
                self._links.pop(effect.member).end()
            elif isinstance(effect, Due):
                node.host.after(DRAW_NS_MAX, self._late, effect.ask)
            else:
                self._dial(effect.member)
        node.after_commands()

    def _late(self, ask: Ask) -> None:
        self._carry_out(self._led.late(self._node.clock.monotonic_ns(), ask))

    def _dial(self, member: str) -> None:
        node = self._node
        late_ns = node._world.below(node._plan.cut_late_ns + 1)
        link = self._links[member] = CutLink(self, member, late_ns)
        address = node.session.view.members[member].content.address
        node._machine.network.connect(node.host, address, link.connected, link.failed)
