"""Where a session's requests meet the faults that are set (dcp.session.faults). Sans-IO."""

from __future__ import annotations

from typing import Final

from dcp.session.faults import Fault
from dcp.session.state import SessionState
from dcp.wire.frame import HEADER, HEADER_BYTES, Frame
from dcp.wire.message import U64
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.status import Status
from vbucket.model.ids import vbucket_of

_unpack_header: Final = HEADER.unpack_from
_REQUESTS: Final = frozenset({Magic.REQUEST, Magic.FLEX_REQUEST})


class FaultGate:
    """One session's gate."""

    def __init__(self, state: SessionState) -> None:
        self._state = state
        self._waiting: Fault | None = None
        """What the first request in the buffer has met, and waits for."""

    @property
    def is_open(self) -> bool:
        """Whether every request passes without a look."""
        return self._waiting is None and not self._state.faults.rules

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits because a fault delays it."""
        return self._waiting is not None

    def stops(self, buffer: bytes, position: int, now_ns: int) -> bool:
        """Whether a complete request is not taken as ever: it is answered with an error here, the
        connection closes, or it waits: then `is_full` is set, and it comes here again.
        """
        magic, opcode, key_len, extras_len, _, vb_id, _, opaque, _ = _unpack_header(
            buffer, position
        )
        if magic not in _REQUESTS:
            return False
        state = self._state
        if state.hashes_keys and magic == Magic.REQUEST:
            key_at = position + HEADER_BYTES + extras_len
            key = buffer[key_at : key_at + key_len]
            vb_id = vbucket_of(key, state.engine.num_vbuckets)
        fault, self._waiting = self._waiting, None
        if fault is None:
            fault = state.faults.meet(opcode, vb_id)
            if fault is None:
                return False
            state.note("fault", fault=fault.fault_id, opcode=opcode, vb_id=vb_id)
            if fault.delay_ms:
                self._waiting = fault
                state.held_until_ns = now_ns + fault.delay_ms * 1_000_000
                state.is_full = True
                return True
        if fault.disconnects:
            state.close(f"fault {fault.fault_id} disconnects")
        elif fault.status is None:
            return False
        elif opcode != Opcode.DCP_BUFFER_ACK:  # which is never answered
            self._answer(Frame(magic, opcode, 0, vb_id, opaque, 0, b"", b"", b""), fault)
        return True

    def _answer(self, request: Frame, fault: Fault) -> None:
        assert fault.status is not None
        state = self._state
        if fault.status == Status.ROLLBACK:
            state.answer(request, fault.status, value=U64.pack(fault.rollback_seqno))
        elif fault.status == Status.NOT_MY_VBUCKET:
            config = state.facts.bucket_config()
            state.answer(request, fault.status, value=config, is_json=True)
        else:
            state.refuse(request, fault.status, f"fault {fault.fault_id} is set")
