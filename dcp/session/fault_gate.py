"""Applies the faults that are set (dcp.session.faults) to the requests of one session. Sans-IO."""

from __future__ import annotations

from typing import Final

from dcp.session.faults import Fault
from dcp.session.state import SessionState
from dcp.wire.frame import HEADER, HEADER_BYTES, pack_response
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
        self.waiting: Fault | None = None
        """The fault that delays the first request in the buffer."""

    def stops(self, buffer: bytes, position: int, now_ns: int) -> bool:
        """Return whether a fault keeps a complete request from being handled.

        The request is answered with an error, or the connection closes, or the request is delayed:
        then the session is full, and the request comes here again.
        """
        magic, opcode, key_len, extras_len, _, vb_id, _, opaque, _ = _unpack_header(
            buffer, position
        )
        if magic not in _REQUESTS:
            return False
        state = self._state
        if state.hello.hashes_keys and magic == Magic.REQUEST:
            key_at = position + HEADER_BYTES + extras_len
            key = buffer[key_at : key_at + key_len]
            vb_id = vbucket_of(key, state.engine.num_vbuckets)
        fault, self.waiting = self.waiting, None
        if fault is None:
            fault = state.shared.faults.meet(opcode, vb_id)
            if fault is None:
                return False
            state.notes.add("fault", fault=fault.fault_id, opcode=opcode, vb_id=vb_id)
            if fault.delay_ms:
                self.waiting = fault
                state.pause.until_ns = now_ns + fault.delay_ms * 1_000_000
                state.is_full = True
                return True
        if fault.disconnects:
            state.close(f"fault {fault.fault_id} disconnects")
        elif fault.status is None:
            return False
        elif opcode != Opcode.DCP_BUFFER_ACK:  # which is never answered
            self._answer(opcode, opaque, fault)
        return True

    def _answer(self, opcode: int, opaque: int, fault: Fault) -> None:
        assert fault.status is not None
        state = self._state
        if fault.status == Status.ROLLBACK:
            value = U64.pack(fault.rollback_seqno)
            state.send(pack_response(opcode, fault.status, opaque=opaque, value=value))
        elif fault.status == Status.NOT_MY_VBUCKET:
            state.answer_json(opcode, opaque, fault.status, state.map_news.with_refusal())
        else:
            state.refuse(opcode, opaque, fault.status, f"fault {fault.fault_id} is set")
