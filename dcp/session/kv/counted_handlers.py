"""Handlers of document commands that also count them by key prefix (`stats detail on`). Sans-IO."""

from __future__ import annotations

from typing import Final

from dcp.session.access.rights import split_key
from dcp.session.kv.documents import Handler
from dcp.session.state import SessionState
from dcp.session.subdoc.subdoc_commands import SINGLE_LOOKUPS
from dcp.wire.opcode import Opcode

_COUNTED_GETS: Final = frozenset(
    {
        Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ, Opcode.SUBDOC_MULTI_LOOKUP,
        *SINGLE_LOOKUPS,
    }
)  # fmt: skip
_COUNTED_DELETES: Final = frozenset(
    {Opcode.DELETE, Opcode.DELETEQ, Opcode.DEL_WITH_META, Opcode.DELQ_WITH_META}
)
_NO_HIT: Final = bytes(6) + b"\0\1"
"""What a quiet miss would have answered."""


class CountedHandlers:
    """The handlers of one session. They are made when the first command is counted."""

    def __init__(self, state: SessionState) -> None:
        self._state = state
        self._made: dict[int, Handler] = {}

    def of(self, handlers: dict[int, Handler]) -> dict[int, Handler]:
        """Return handlers that count. Runs do not, so there are none meanwhile."""
        if not self._made:
            self._made = {opcode: self._counting(run) for opcode, run in handlers.items()}
        return self._made

    def _counting(self, run: Handler) -> Handler:
        state = self._state

        def counting(
            opcode: int, key_len: int, extras_len: int, datatype: int, vb_id: int, opaque: int,
            cas: int, start: int, end: int,
        ) -> None:  # fmt: skip
            key_at = min(start + extras_len, end)
            wire_key = state.buffer[key_at : min(key_at + key_len, end)]
            answered = len(state.answers)
            run(opcode, key_len, extras_len, datatype, vb_id, opaque, cas, start, end)
            if state.unfinished is None:
                self.count(opcode, wire_key, answered)

        return counting

    def count(self, opcode: int, wire_key: bytes, answered: int) -> None:
        """Count a command that is done; `answered` is how many answers there were before it."""
        state = self._state
        _, key = split_key(wire_key, has_collections=state.hello.has_collections)
        if opcode in _COUNTED_GETS:
            answer = state.answers[-1] if len(state.answers) > answered else _NO_HIT
            state.shared.prefixes.got(key, is_hit=answer[6:8] == b"\0\0")
        elif opcode in _COUNTED_DELETES:
            state.shared.prefixes.deleted(key)
        else:
            state.shared.prefixes.stored(key)
