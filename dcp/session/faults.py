"""Faults on demand: requests that are answered with an error, late, or not at all. Sans-IO.

The admin API sets and clears rules. Sessions ask for each request, but only while there are rules,
so that a server without faults pays nothing.

The first rule that applies to a request, and whose draw succeeds, decides. A rule with a count is
removed after so many requests.
"""

from __future__ import annotations

from typing import Final

from dcp.wire.opcode import OPCODES, QUIET_FORMS, Opcode, OpGroup
from dcp.wire.status import Status
from vbucket.model.ids import Draws

DELAY_MS_MAX: Final = 600_000
RULES_MAX: Final = 256

_OF_A_PARTITION: Final = frozenset(
    int(opcode) for opcode, spec in OPCODES.items() if spec.group == OpGroup.DOCUMENT
) - {Opcode.FLUSH, Opcode.FLUSHQ} | {
    Opcode.GET_FAILOVER_LOG,
    Opcode.OBSERVE_SEQNO,
    Opcode.SEQNO_PERSISTENCE,
    Opcode.COMPACT_DB,
    Opcode.X_GROUP_BEAT,
    Opcode.DCP_STREAM_REQ,
    Opcode.DCP_CLOSE_STREAM,
    Opcode.DCP_GET_FAILOVER_LOG,
}
"""Opcodes whose header names a partition. In all other requests the field has no meaning."""


class FaultError(Exception):
    """A rule cannot be set; the text says why."""


class Fault:
    """One rule: which requests it applies to, and what happens to them."""

    __slots__ = (
        "count",
        "delay_ms",
        "disconnects",
        "draws",
        "fault_id",
        "met",
        "opcode",
        "probability",
        "rollback_seqno",
        "status",
        "vb_id",
    )

    def __init__(
        self,
        fault_id: int,
        *,
        opcode: Opcode | None,
        vb_id: int | None,
        status: Status | None,
        delay_ms: int,
        disconnects: bool,
        count: int | None,
        probability: float,
        rollback_seqno: int,
        draws: Draws,
    ) -> None:
        self.fault_id = fault_id
        self.opcode = opcode
        """None: any. A rule applies to the command's quiet form too."""
        self.vb_id = vb_id
        """None: any."""
        self.status = status
        """Status of the answer; None: the request is handled normally."""
        self.delay_ms = delay_ms
        """How long the request, and those behind it on its connection, wait."""
        self.disconnects = disconnects
        """Whether the connection closes instead of an answer."""
        self.count = count
        """How many more requests the rule applies to; None: no limit."""
        self.probability = probability
        self.rollback_seqno = rollback_seqno
        """The seqno in a ROLLBACK answer."""
        self.draws = draws
        self.met = 0
        """How many requests the rule was applied to."""

    def applies(self, opcode: int, vb_id: int) -> bool:
        """Whether the rule is about such a request."""
        if self.opcode is not None and QUIET_FORMS.get(opcode, opcode) != QUIET_FORMS.get(  # type: ignore[call-overload] # an IntEnum key equals its int
            self.opcode, self.opcode
        ):
            return False
        return self.vb_id is None or (vb_id == self.vb_id and opcode in _OF_A_PARTITION)


class FaultTable:
    """The rules of a node, in the order in which they were set."""

    def __init__(self) -> None:
        self.rules: list[Fault] = []
        self._last_id = 0

    def add(
        self,
        *,
        draws: Draws,
        opcode: Opcode | None = None,
        vb_id: int | None = None,
        status: Status | None = None,
        delay_ms: int = 0,
        disconnects: bool = False,
        count: int | None = None,
        probability: float = 1.0,
        rollback_seqno: int = 0,
    ) -> Fault:
        """Set a rule; `draws` decides by chance. Raises FaultError."""
        if status is None and not delay_ms and not disconnects:
            raise FaultError("it would do nothing: it needs a status, a delay or a disconnect")
        if status is not None and disconnects:
            raise FaultError("it either answers a status or disconnects")
        if status == Status.OK:
            raise FaultError(
                "status OK is no error: a command that was not executed must not be acknowledged"
            )
        if not 0 <= delay_ms <= DELAY_MS_MAX:
            raise FaultError(f"a delay is 0 to {DELAY_MS_MAX} ms")
        if not 0 < probability <= 1:
            raise FaultError("a probability is above 0, and 1 at most")
        if count is not None and count < 1:
            raise FaultError("a count is 1 or more")
        if len(self.rules) >= RULES_MAX:
            raise FaultError(f"{RULES_MAX} faults are set, the limit")
        self._last_id += 1
        fault = Fault(
            self._last_id, opcode=opcode, vb_id=vb_id, status=status, delay_ms=delay_ms,
            disconnects=disconnects, count=count, probability=float(probability),
            rollback_seqno=rollback_seqno, draws=draws,
        )  # fmt: skip
        self.rules.append(fault)
        return fault

    def clear(self, fault_id: int | None = None) -> int:
        """Remove one rule, or all of them; return how many were removed."""
        kept = [] if fault_id is None else [f for f in self.rules if f.fault_id != fault_id]
        gone = len(self.rules) - len(kept)
        self.rules = kept
        return gone

    def meet(self, opcode: int, vb_id: int) -> Fault | None:
        """Return the rule that decides about a request, and count the request; None: no rule."""
        for fault in self.rules:
            if fault.applies(opcode, vb_id) and fault.draws.random() < fault.probability:
                fault.met += 1
                if fault.count is not None:
                    fault.count -= 1
                    if not fault.count:
                        self.clear(fault.fault_id)
                return fault
        return None
