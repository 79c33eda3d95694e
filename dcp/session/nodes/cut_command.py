"""X_CUT: the nodes of a cluster draw one cut. Sans-IO.

    request    u8 what, u64 round, u64 time, u64 agreed clock; key: the leader's member id. The role
               of nodes is needed
    answer     u64 clock of this node, u64 lowest CAS that it has not closed; value: why it did not
               draw the cut, "" if it did

Who calls it: the leader (`failover.replication.cuts.cut_leader`). The rule is in
`failover.rules.cut`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

from dcp.session.request_frames import refuse_stray
from dcp.session.state import SessionState
from dcp.wire.frame import Frame, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError, Status
from failover.rules.cut import Ask

_ASK: Final = Struct(">BQQQ")
_ANSWER: Final = Struct(">QQ")


class What(IntEnum):
    """What a leader says."""

    PROBE = 0
    """Say your clock."""
    DRAW = 1
    COMPLETE = 2


class CutAnswer(NamedTuple):
    """What a member answers."""

    number: int
    clock_ns: int
    first_open: int
    why_not: str


def pack_ask(what: What, ask: Ask, number: int = 0) -> bytes:
    """Return the request. Its answer has the same number."""
    extras = _ASK.pack(what, ask.round, ask.time, ask.clock_ns)
    return pack_request(Opcode.X_CUT, opaque=number, key=ask.leader.encode(), extras=extras)


def read_cut_answer(frame: Frame) -> CutAnswer:
    """Decode an answer. Raises ValueError."""
    if len(frame.extras) != _ANSWER.size:
        raise ValueError("it is no answer to X_CUT")
    clock_ns, first_open = _ANSWER.unpack(frame.extras)
    return CutAnswer(frame.opaque, clock_ns, first_open, frame.value.decode())


class CutCommand:
    """The handler of this command for one session."""

    def __init__(self, state: SessionState) -> None:
        self._state = state

    def handlers(self) -> dict[int, Callable[[Frame], None]]:
        """Return opcode -> handler."""
        return {Opcode.X_CUT: self.cut}

    def cut(self, request: Frame) -> None:
        """Do what the leader says, and answer. Raises RefusedError."""
        state, engine = self._state, self._state.engine
        refuse_stray(request, "value")
        if len(request.extras) != _ASK.size or not request.key or request.extras[0] not in {*What}:
            raise RefusedError(Status.EINVAL, "it takes u8 what, u64 round, time and clock, a key")
        if state.shared.replication is None:
            raise RefusedError(Status.NOT_SUPPORTED, "X_CUT is for nodes of a cluster")
        what, round_, time, clock_ns = _ASK.unpack(request.extras)
        own_ns, why, port = engine.locks.now_ns, "", state.shared.replication
        if what == What.DRAW:
            ask = Ask(request.key.decode("utf-8", "replace"), round_, time, clock_ns)
            why = port.draw_cut(ask, own_ns)
        elif what == What.COMPLETE and not port.complete_cut(round_, time):
            why = "it holds no such cut"
        extras = _ANSWER.pack(own_ns, engine.first_open_ns)
        state.answer(request, extras=extras, value=why.encode())
