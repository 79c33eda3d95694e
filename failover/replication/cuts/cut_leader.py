"""Whom the leader of a cut asks, who has drawn it, and what comes after what. Sans-IO.

    every 100 ms ──> LedCuts.draw ── X_CUT: draw ──> the other nodes ── answers, or DRAW_NS_MAX is
        over ── X_CUT: complete ──> those that have drawn

The node with the lowest member id of those that are asked for cuts leads; the others notice that it
asks them.

Who calls it: the shells, `dcp.server.cluster.cut_rounds` and that of a simulated node. They have
the clocks, the connections and the login, and carry out the effects. The rule is in
`failover.rules.cut`.

Invariants
- a leader says that a cut is complete only to members that have drawn it, and only when all of
  those have;
- it fences what it may not answer for before it draws a cut itself, and before it completes one;
- a member that does not answer in time is asked again when it has answered. If that happens again
  and again, it is left out for a while, which doubles;
- there is one connection to each other member, and none while nobody has asked for cuts for
  IDLE_NS. One on which nothing comes for SILENT_NS is ended, and dialled again: nobody says so when
  a machine is gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf
from typing import Final, NamedTuple

from dcp.session.nodes.cut_command import CutAnswer, What, pack_ask
from dcp.stream.hub import StreamHub
from failover.replication.effects import Dial
from failover.replication.node import ReplicationCore
from failover.rules.cut import DRAW_NS_MAX, Ask, first_open_of_all, median
from vbucket.engine.engine import Engine
from vbucket.engine.partition import VbState

AGAIN_NS: Final = 1_000_000_000
"""Time between two attempts to reach a member."""
IDLE_NS: Final = 10_000_000_000
SILENT_NS: Final = 5_000_000_000

_LEFT_OUT_NS: Final = 200_000_000
_LEFT_OUT_NS_MAX: Final = 5_000_000_000
"""For how long a member that answered late is left out, at the second time and at most."""


class _Peer:
    """What a leader knows of another member."""

    __slots__ = ("asked_ns", "first_open", "left_out_ns", "misses", "number", "offset_ns")

    def __init__(self) -> None:
        self.asked_ns: int | None = None
        """When it was asked what it has not answered; None: it has answered all."""
        self.number = 0
        """The number of the question that it was asked last."""
        self.offset_ns: int | None = None
        """How far its clock is ahead of this one's; None: it has not answered yet."""
        self.first_open = 0
        """The lowest CAS that it has not closed."""
        self.misses = 0
        self.left_out_ns = 0
        """Until when it is not asked to draw."""


class CutLeader:
    """See the module. `round_` is random, and of this process."""

    def __init__(self, member: str, round_: int) -> None:
        self._member = member
        self._round = round_
        self.number = 0
        """The number of the questions of the cut under way, from 1 to 2**32 - 1."""
        self._peers: dict[str, _Peer] = {}
        self._asked: set[str] = set()
        """Who was asked to draw the cut under way, and has not answered."""
        self._drawn: set[str] = set()
        self.ask: Ask | None = None
        """The cut that is under way; None: none is."""

    def begin(
        self, reached: Iterable[str], now_ns: int, clock_ns: int, first_open: int
    ) -> tuple[Ask, list[str]]:
        """Begin a cut; return it, and the members that are asked to draw it. The others of those
        that can be reached are asked for their clocks only (`probes`).
        """
        assert self.ask is None, "one cut after the other"
        self.number = self.number % (2**32 - 1) + 1
        reached = sorted(reached)
        self._peers = {each: self._peers.get(each) or _Peer() for each in reached}
        known = [peer for peer in self._peers.values() if peer.offset_ns is not None]
        agreed_ns = clock_ns + median(peer.offset_ns or 0 for peer in known)
        closed = [(clock_ns, first_open)]
        closed += [(clock_ns + (peer.offset_ns or 0), peer.first_open) for peer in known]
        time = max(agreed_ns, first_open_of_all(closed, agreed_ns)) | 0xFFFF
        self.ask = Ask(self._member, self._round, time, agreed_ns)
        self._drawn = set()
        self._asked = {
            member
            for member, peer in self._peers.items()
            if peer.asked_ns is None and peer.offset_ns is not None and now_ns >= peer.left_out_ns
        }
        for member in self._asked:
            self._peers[member].asked_ns = now_ns
            self._peers[member].number = self.number
        return self.ask, sorted(self._asked)

    def probes(self, now_ns: int) -> list[str]:
        """Return the members to ask for their clocks: they have answered all, and draw not yet."""
        found = []
        for member, peer in self._peers.items():
            if peer.asked_ns is None:
                peer.asked_ns, peer.number = now_ns, self.number
                found.append(member)
        return found

    def answered(
        self,
        member: str,
        number: int,
        now_ns: int,
        *,
        offset_ns: int,
        first_open: int,
        has_drawn: bool,
    ) -> None:
        """A member answered the question of this number, and said how far its clock is ahead of
        this node's, and what it has closed.
        """
        peer = self._peers.get(member)
        if peer is None or peer.asked_ns is None or peer.number != number:
            return
        is_late = now_ns - peer.asked_ns >= DRAW_NS_MAX
        peer.asked_ns, peer.offset_ns, peer.first_open = None, offset_ns, first_open
        if is_late:
            pause_ns = _LEFT_OUT_NS * (2**peer.misses - 1)
            peer.left_out_ns = now_ns + min(pause_ns, _LEFT_OUT_NS_MAX)
            peer.misses = min(peer.misses + 1, 8)
        else:
            peer.misses = max(0, peer.misses - 1)
        if member in self._asked:
            self._asked.discard(member)
            if has_drawn:
                self._drawn.add(member)

    def asked_ns(self, member: str) -> float:
        """Return when a member was asked what it has not answered; infinity: it owes nothing."""
        peer = self._peers.get(member)
        return inf if peer is None or peer.asked_ns is None else peer.asked_ns

    def lost(self, member: str) -> None:
        """The connection to a member is gone."""
        self._peers.pop(member, None)
        self._asked.discard(member)
        self._drawn.discard(member)

    @property
    def is_decided(self) -> bool:
        """Whether all that were asked have answered."""
        return not self._asked

    def finish(self) -> list[str]:
        """End the cut under way; return the members that have drawn it. Those that did not answer
        are asked again when they have.
        """
        self._asked.clear()
        self.ask = None
        return sorted(self._drawn)


class Say(NamedTuple):
    """Send bytes to a member."""

    member: str
    data: bytes


class HangUp(NamedTuple):
    """End the connection to a member. What still comes of it counts no more."""

    member: str


class Due(NamedTuple):
    """Call `LedCuts.late` with this cut after DRAW_NS_MAX."""

    ask: Ask


CutEffect = Dial | Say | HangUp | Due


class LedCuts:
    """See the module. Its callers carry out what it returns, and then the effects of `core`.

    A member that is dialled is `connected` or `lost` sooner or later; what comes from it is
    `answered`.
    """

    def __init__(
        self, core: ReplicationCore, engine: Engine, hub: StreamHub, member: str, round_: int
    ) -> None:
        """`member` is this node's; `round_` is random, and of this process."""
        self._core = core
        self._engine = engine
        self._hub = hub
        self._member = member
        self._leader = CutLeader(member, round_)
        self._dialled_ns: dict[str, int] = {}
        self._reached: dict[str, bool] = {}
        """Members with a connection -> whether they can be asked."""
        self._led_ns = 0
        """When this node led last."""

    def draw(self, now_ns: int, wall_ns: int, members: Collection[str]) -> list[CutEffect]:
        """Begin a cut of the cluster, if somebody follows cuts here, and this node leads."""
        cuts = self._core.master.cuts
        is_led = bool(cuts.led_by) and cuts.led_by < self._member
        if not self._hub.cutting or is_led or cuts.why_never or not self._serves():
            return self.hang_up() if now_ns - self._led_ns >= IDLE_NS else []
        if self._leader.ask is not None:
            return []
        self._led_ns = now_ns
        effects = self._look_at_connections(now_ns, members)
        reached = [name for name, can_be_asked in self._reached.items() if can_be_asked]
        clock_ns = self._clock_ns(wall_ns)
        ask, asked = self._leader.begin(reached, now_ns, clock_ns, self._engine.first_open_ns)
        number = self._leader.number
        effects += [Say(name, pack_ask(What.DRAW, ask, number)) for name in asked]
        probed = self._leader.probes(now_ns)
        effects += [Say(name, pack_ask(What.PROBE, ask, number)) for name in probed]
        self._core.check_fence(now_ns)
        cuts.draw(ask, clock_ns)
        effects.append(Due(ask))
        if self._leader.is_decided:
            effects += self.late(now_ns, ask)
        return effects

    def late(self, now_ns: int, ask: Ask) -> list[CutEffect]:
        """All have drawn the cut, or time is over."""
        if self._leader.ask is not ask:
            return []
        effects = [Say(name, pack_ask(What.COMPLETE, ask)) for name in self._leader.finish()]
        self._core.check_fence(now_ns)
        self._core.master.cuts.complete(ask.round, ask.time)
        return [*effects]

    def connected(self, member: str) -> None:
        """A member can be asked."""
        if member in self._reached:
            self._reached[member] = True

    def lost(self, now_ns: int, member: str) -> list[CutEffect]:
        """A member was not reached, or the connection to it is over."""
        self._reached.pop(member, None)
        self._leader.lost(member)
        return self._go_on(now_ns)

    def answered(
        self, now_ns: int, wall_ns: int, member: str, answer: CutAnswer
    ) -> list[CutEffect]:
        """A member answers."""
        self._leader.answered(
            member, answer.number, now_ns, offset_ns=answer.clock_ns - self._clock_ns(wall_ns),
            first_open=answer.first_open, has_drawn=not answer.why_not,
        )  # fmt: skip
        return self._go_on(now_ns)

    def hang_up(self) -> list[CutEffect]:
        """End all connections."""
        return [self._hang_up(name) for name in sorted(self._reached)]

    def _hang_up(self, member: str) -> HangUp:
        del self._reached[member]
        self._leader.lost(member)
        return HangUp(member)

    def _go_on(self, now_ns: int) -> list[CutEffect]:
        ask = self._leader.ask
        return self.late(now_ns, ask) if ask is not None and self._leader.is_decided else []

    def _serves(self) -> bool:
        return any(part.state is VbState.ACTIVE for part in self._engine.partitions)

    def _clock_ns(self, wall_ns: int) -> int:
        """Return this node's clock, as its changes have it."""
        self._engine.begin_batch(wall_ns)
        return self._engine.locks.now_ns

    def _look_at_connections(self, now_ns: int, members: Collection[str]) -> list[CutEffect]:
        """End connections to members that are gone or silent, and dial those that have none."""
        ended = [
            name for name in sorted(self._reached)
            if name not in members or now_ns - self._heard_ns(name) >= SILENT_NS
        ]  # fmt: skip
        effects: list[CutEffect] = [self._hang_up(name) for name in ended]
        for name in sorted(members):
            is_due = now_ns - self._dialled_ns.get(name, -AGAIN_NS) >= AGAIN_NS
            if name != self._member and name not in self._reached and is_due:
                self._dialled_ns[name] = now_ns
                self._reached[name] = False
                effects.append(Dial(name))
        return effects

    def _heard_ns(self, name: str) -> float:
        """Return since when a member owes an answer, or a login; infinity: it owes nothing."""
        return self._leader.asked_ns(name) if self._reached[name] else self._dialled_ns[name]
