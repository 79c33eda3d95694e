"""What a member does when a leader asks it to draw a cut: holds commits back, and lets streams go
to the cut when it is complete. Sans-IO.

Who calls it: `failover.replication.master` for sessions (`X_CUT`), and the shell of the node that
leads (`failover.replication.cuts.cut_leader`). The rule is in `failover.rules.cut`.

Invariants
- while a member holds a cut, no partition that it masters commits anything;
- a hold ends with its leader's word, or after HOLD_NS_MAX; then the cut is dropped here.
"""

from __future__ import annotations

from typing import Final

from dcp.stream.hub import StreamHub
from dcp.stream.pending_cut import begin_cut, cut_age_s
from failover.replication.commit import HighWatermarks
from failover.rules.cut import HOLD_NS_MAX, Ask, clock_fault, is_covered, why_not_drawn
from vbucket.engine.cut import UNCOVERED, Cut, close_time
from vbucket.engine.engine import Engine
from vbucket.engine.partition import Partition, VbState

LED_NS: Final = 300_000_000
"""For how long a member does not lead after one with a lower id has asked it."""
_ACTIVE: Final = VbState.ACTIVE


class CutMember:
    """See the module."""

    def __init__(
        self,
        engine: Engine,
        hub: StreamHub,
        watermarks: HighWatermarks,
        *,
        acknowledges_as_master: bool,
    ) -> None:
        self._engine = engine
        self._hub = hub
        self._watermarks = watermarks
        self.why_never = ""
        """Why this node takes part in no cut; "": it does."""
        if acknowledges_as_master:
            self.why_never = (
                "it answers writes that a failover may undo (acknowledge is master), so an answer"
                " cannot wait for a cut. Set acknowledge to committed"
            )
        self.why_not = ""
        """Why it did not draw the last cut that it was asked for; "": it did."""
        self.clock_fault = ""
        """How its clock was off at that time; "": it was not."""
        self.asked_time = 0
        """The time that it was to close last, and may close if its disk knows a later one."""
        self.led_by = ""
        """The leader with the lowest id of late."""
        self._led_ns: int | None = None
        self._held: Ask | None = None
        self._held_ns: int | None = None
        """When a hold or a leader was first seen by `tick`; None: not yet."""
        self._drawn: list[tuple[int, int] | None] = []
        self._seqnos: list[int] = []

    def draw(self, ask: Ask, clock_ns: int) -> str:
        """Draw a cut, if nothing speaks against it; return what does. `clock_ns` is Unix time."""
        why = self.why_never
        if not why and not self._hub.cutting:
            why = "nobody follows cuts here"
        self.clock_fault = clock_fault(ask, clock_ns)
        why = why or self.clock_fault or why_not_drawn(
            ask, self._held, first_open=self._engine.first_open_ns, is_led_by=self.led_by
        )  # fmt: skip
        if not why:
            self.asked_time = ask.time
            if ask.time > self._engine.closed_max:
                why = "its disk does not say yet that so late a time may be closed"
        self.why_not = why
        if not self.led_by or ask.leader <= self.led_by:
            self.led_by, self._led_ns = ask.leader, None
        if not why:
            self._held, self._held_ns = ask, None
            self._watermarks.held = set()
            close_time(self._engine, ask.time)
            partitions = self._engine.partitions
            self._seqnos = [part.high_seqno for part in partitions]
            self._drawn = [_life(part) if part.state is _ACTIVE else None for part in partitions]
        return why

    def complete(self, round_: int, time: int) -> bool:
        """All have drawn a cut: commit again, and let streams go there. False: it is not held."""
        held = self._held
        if held is None or (held.round, held.time) != (round_, time):
            return False
        seqnos = [
            seqno
            if is_covered(drawn, is_served=part.state is _ACTIVE, now=_life(part))
            else UNCOVERED
            for part, drawn, seqno in zip(
                self._engine.partitions, self._drawn, self._seqnos, strict=True
            )
        ]
        begin_cut(self._hub, Cut(time, seqnos, round_))
        self._release()
        return True

    def age_s(self, now_ns: int) -> float:
        """Return the age of this node's newest cut; 0: nobody follows cuts here."""
        return cut_age_s(self._hub, now_ns)

    def tick(self, now_ns: int) -> None:
        """Let time pass: drop a cut whose leader says no more, forget a leader of long ago."""
        if self._held is not None:
            self._held_ns = self._held_ns or now_ns
            if now_ns - self._held_ns >= HOLD_NS_MAX:
                self.why_not = "its leader did not say that all have drawn it"
                self._release()
        if self.led_by:
            self._led_ns = self._led_ns or now_ns
            if now_ns - self._led_ns >= LED_NS:
                self.led_by = ""

    def _release(self) -> None:
        self._held = None
        held, self._watermarks.held = self._watermarks.held, None
        self._watermarks.advance(held or ())


def _life(part: Partition) -> tuple[int, int]:
    """Return what changes when a partition has another master, or other history."""
    return part.leader_epoch, part.vb_uuid
