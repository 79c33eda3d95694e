"""Whom the leader of a cut asks, and who has drawn it. Sans-IO.

Who calls it: `dcp.server.cluster.cut_rounds`. The rule is in `failover.rules.cut`.

Invariants
- a leader says that a cut is complete only to members that have drawn it, and only when all of
  those have;
- a member that does not answer in time is asked again when it has answered. If that happens again
  and again, it is left out for a while, which doubles.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Final

from failover.rules.cut import DRAW_NS_MAX, Ask, first_open_of_all, median

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
