"""Takeover: a stream hands its partition over to the client (stream request flag 0x01). Pure.

    SENDING --- all sent, nothing under way ------> SET_VBUCKET_STATE(pending)
    PENDING_ASKED --- client: OK -----------------> the partition is dead here
    DRAINING --- dead is committed, all is sent --> SET_VBUCKET_STATE(active)
    ACTIVE_ASKED --- client: OK ------------------> STREAM_END(0)

After the backlog every marker asks for an answer (flag 0x08), and the next one waits for it.

Which side is active when a step fails
- until the client has answered "pending", the partition stays active here;
- while DRAINING, the partition is dead here, and the client is not active either, because the
  message that makes it active was not sent yet. If the stream ends now, the partition becomes
  active here again. It is the same history, so no new version begins;
- from ACTIVE_ASKED on, the client may be active and may have taken writes, whether or not its
  answer arrives here. The partition stays dead here, and an operator decides: two active partitions
  of one history would be worse than none;
- after a crash of this server nothing tells DRAINING from ACTIVE_ASKED: a partition that is dead in
  the log stays dead.

Rules: kv_engine's takeover.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from dcp.wire.message import EndReason
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.engine.engine import Engine
from vbucket.engine.lifecycle import put_state
from vbucket.engine.partition import VbState

SENDING_NS_MAX: Final = 60 * 1_000_000_000
"""After so long in SENDING, writes are refused with a temporary failure, so that the stream can
catch up (kv_engine's dcp_takeover_max_time)."""


class TakeoverStep(Enum):
    """See the module."""

    SENDING = auto()
    PENDING_ASKED = auto()
    DRAINING = auto()
    ACTIVE_ASKED = auto()
    DONE = auto()


_TOO_FAST: Final = "writers have to wait until a takeover has caught up; try again soon"
_ASKED: Final = frozenset({TakeoverStep.PENDING_ASKED, TakeoverStep.ACTIVE_ASKED})


class Takeover:
    """The progress of one stream's takeover."""

    __slots__ = ("began_ns", "has_open_marker", "step")

    def __init__(self) -> None:
        self.step = TakeoverStep.SENDING
        self.has_open_marker = False
        """Whether a marker with flag 0x08 was sent and is not answered yet."""
        self.began_ns = 0
        """The time of the first `tick` in SENDING; 0: none yet."""

    @property
    def is_waiting(self) -> bool:
        """Whether the client has to answer before anything else is sent."""
        return self.has_open_marker or self.step in _ASKED

    @property
    def made_it_dead(self) -> bool:
        """Whether this takeover made the partition dead."""
        return self.step in {TakeoverStep.DRAINING, TakeoverStep.ACTIVE_ASKED, TakeoverStep.DONE}

    @property
    def is_done(self) -> bool:
        """Whether the client has the partition now."""
        return self.step is TakeoverStep.DONE

    def may_go_on(self, engine: Engine, vb_id: int) -> bool:
        """Whether the next step can be taken once the client has everything.

        False: the state "dead" is not committed yet.
        """
        assert not self.is_waiting
        return self.step is TakeoverStep.SENDING or engine.commits.is_committed(
            vb_id, engine.partitions[vb_id].last_group
        )

    def next_state(self) -> VbState:
        """Take the next step; return the state to ask the client for."""
        if self.step is TakeoverStep.SENDING:
            self.step = TakeoverStep.PENDING_ASKED
            return VbState.PENDING
        assert self.step is TakeoverStep.DRAINING
        self.step = TakeoverStep.ACTIVE_ASKED
        return VbState.ACTIVE

    def accepted(self, engine: Engine, vb_id: int) -> bool:
        """The client accepted the state that it was asked for. False: the takeover cannot go on."""
        part = engine.partitions[vb_id]
        if self.step is TakeoverStep.ACTIVE_ASKED:
            self.step = TakeoverStep.DONE
            return True
        if self.step is not TakeoverStep.PENDING_ASKED or part.state != VbState.ACTIVE:
            return False
        put_state(engine, vb_id, VbState.DEAD)
        part.release_writes(self)
        self.step = TakeoverStep.DRAINING
        return True

    def answered(self, engine: Engine, vb_id: int, opcode: int, status: int) -> EndReason | None:
        """The client answered a message of the stream. Return why the stream ends, if it does."""
        if opcode == Opcode.DCP_SNAPSHOT_MARKER and self.has_open_marker:
            self.has_open_marker = False
        elif opcode != Opcode.DCP_SET_VBUCKET_STATE:
            return None
        elif not status and not self.accepted(engine, vb_id):
            return EndReason.STATE_CHANGED
        if status != Status.OK:
            return EndReason.CLOSED  # the client refuses the partition
        return EndReason.OK if self.is_done else None

    def tick(self, engine: Engine, vb_id: int, now_ns: int) -> None:
        """Refuse writes once the stream has tried to catch up for too long."""
        if self.step is not TakeoverStep.SENDING:
            return
        self.began_ns = self.began_ns or now_ns
        if now_ns - self.began_ns >= SENDING_NS_MAX:
            engine.partitions[vb_id].hold_writes(self, _TOO_FAST)

    def abandon(self, engine: Engine, vb_id: int) -> None:
        """The stream ends: leave the partition in the safe state (see the module)."""
        part = engine.partitions[vb_id]
        part.release_writes(self)
        if self.step is TakeoverStep.DRAINING and part.state == VbState.DEAD:
            put_state(engine, vb_id, VbState.ACTIVE)
