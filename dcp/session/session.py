"""One client connection: bytes in, answers out. Sans-IO.

`receive` takes what one read brought in and works through all complete packets of it in one loop;
the document commands, the hot path, get the header's fields as plain arguments, everything else
gets a `Frame`. The answers gather in `state.answers`; the shell sends them, in order, when the
group `state.wait_group` is committed.

Invariants
- responses keep the order of the requests;
- data that the store finds damaged is answered with EINTERNAL, for the request that needs it alone;
- no input raises: bad frames are answered as the protocol defines, or the connection closes with
  a reason;
- what is kept of a peer is bounded: one incomplete packet (header checked before its body is
  waited for) and ANSWER_BYTES_MAX of answers plus one; `state.held_bytes` tells how much was
  received and is kept;
- while the outcome of a login is not known, no command is taken;
- the same bytes get the same answers however the network cut them.
"""

from __future__ import annotations

from typing import Final

from dcp.session.auth import AuthStep
from dcp.session.collections import CollectionCommands
from dcp.session.documents import DocumentCommands, Run
from dcp.session.documents import Handler as DocumentHandler
from dcp.session.fault_gate import FaultGate
from dcp.session.put_frames import PutFramesCommand
from dcp.session.rights import NEEDS, Role
from dcp.session.scans import ScanCommands
from dcp.session.session_commands import ConnectionCommands
from dcp.session.state import SessionState
from dcp.session.streams import DcpCommands
from dcp.session.updates import UpdateCommands
from dcp.session.with_meta import WithMetaCommands
from dcp.wire.frame import (
    FLEX_HEADER,
    HEADER,
    HEADER_BYTES,
    Frame,
    RemoteProtocolError,
    frame_infos,
)
from dcp.wire.message import STREAM_ID_FRAME
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.status import Status
from vbucket.store.environment import StoreDamagedError

_unpack_header: Final = HEADER.unpack_from

BODY_EXTRA_BYTES: Final = 4096
"""Room for extras, key and framing beside the value in a body."""

GATHERED_BYTES_MIN: Final = 64 * 1024
"""A packet that lacks more than this is gathered piece by piece. Adding each piece to what was
there before would cost a copy of the whole packet per piece."""

_BEFORE_LOGIN: Final = frozenset(
    {
        Opcode.HELLO,
        Opcode.SASL_LIST_MECHS,
        Opcode.SASL_AUTH,
        Opcode.SASL_STEP,
        Opcode.NOOP,
        Opcode.VERSION,
        Opcode.QUIT,
        Opcode.QUITQ,
        Opcode.GET_ERROR_MAP,
    }
)

BARRIER_FRAME_ID: Final = 0
PRESERVE_TTL_FRAME_ID: Final = 5
_KNOWN_FRAMES: Final = frozenset({BARRIER_FRAME_ID, PRESERVE_TTL_FRAME_ID})
_PRESERVE_EXPIRY: Final = frozenset({Opcode.SET, Opcode.SETQ, Opcode.REPLACE, Opcode.REPLACEQ})
"""Commands that keep a document's expiry where frame 5 asks for it."""
_KEEP_THEIR_EXPIRY: Final = frozenset(
    {
        Opcode.INCREMENT,
        Opcode.INCREMENTQ,
        Opcode.DECREMENT,
        Opcode.DECREMENTQ,
        Opcode.APPEND,
        Opcode.APPENDQ,
        Opcode.PREPEND,
        Opcode.PREPENDQ,
    }
)
"""Commands that keep a document's expiry anyway."""


class Session:
    """See the module."""

    def __init__(self, state: SessionState) -> None:
        self.state = state
        self._documents = DocumentCommands(state)
        self._hot = self._documents.handlers() | WithMetaCommands(state, self._documents).handlers()
        self._checked: dict[int, DocumentHandler] = {}
        """What users run that may not read and write everything; made for the first of them."""
        self._connection = connection = ConnectionCommands(state)
        self._cold = (
            connection.handlers()
            | CollectionCommands(state).handlers()
            | UpdateCommands(state, self._documents).handlers()
            | ScanCommands(state, self._documents).handlers()
            | PutFramesCommand(state, self._documents).handlers()
            | DcpCommands(state, connection).handlers()
        )
        self._body_bytes_max = state.limits.value_bytes_max + BODY_EXTRA_BYTES
        self._gathered = bytearray()
        """The beginning of a large packet; `state.buffer` is empty meanwhile."""
        self._missing_bytes = 0
        """What is not there yet of a packet that is being gathered."""
        self._gate = FaultGate(state)

    @property
    def is_logged_in(self) -> bool:
        """Whether commands are taken: a user is known, or the peer is local and none is needed."""
        return self.state.rights is not None

    def receive(self, data: bytes, now_ns: int) -> None:
        """Work through what a read brought in; `now_ns` is Unix time."""
        state = self.state
        if state.is_closing:
            return
        if self._missing_bytes > 0:
            self._gathered += data
            self._missing_bytes -= len(data)
            if self._missing_bytes > 0:
                state.held_bytes = len(self._gathered)
                return
            data, self._gathered = bytes(self._gathered), bytearray()
        state.buffer = state.buffer + data if state.buffer else data
        self.resume(now_ns)

    def resume(self, now_ns: int) -> None:
        """Go on with what is buffered, after the answers were taken away."""
        state = self.state
        if now_ns < state.held_until_ns or state.login is not None:
            state.is_full = True
            state.held_bytes = len(state.buffer)
            return
        state.is_full = state.waits_for_room = False
        state.unread_bytes = 0
        state.engine.begin_batch(now_ns)
        self._documents.now_s = now_ns // 1_000_000_000
        if state.flush is not None:
            state.continue_flush(now_ns)
            if state.is_full:
                state.held_bytes = len(state.buffer)
                return
        buffer = state.buffer
        end = len(buffer)
        position = missing_bytes = 0
        body_bytes_max = self._body_bytes_max
        documents = self._documents
        hot = self._document_handlers()
        runs = documents.runs() if hot is self._hot else _NO_RUNS
        while end - position >= HEADER_BYTES and not (state.is_full or state.is_closing):
            magic, opcode, key_len, extras_len, datatype, vb_id, body_len, opaque, cas = (
                _unpack_header(buffer, position)
            )
            body_end = position + HEADER_BYTES + body_len
            if magic == 0x80 and body_end <= end and body_len <= body_bytes_max:
                handler = hot.get(opcode)
                if handler is not None:
                    try:
                        handler(
                            opcode, key_len, extras_len, datatype, vb_id, opaque, cas,
                            position + HEADER_BYTES, body_end,
                        )  # fmt: skip
                    except StoreDamagedError as error:
                        state.answer_damage(opcode, opaque, error)
                    position = body_end
                    run = runs.get(opcode)
                    if run is not None and not state.is_full:
                        position = run(position, end)
                    continue
            problem = self._problem_of(magic, opcode, body_len)
            if problem:
                state.close(problem)
                break
            if body_end > end:
                missing_bytes = body_end - end
                break
            if opcode in _WRITES and self._must_wait():
                break
            if self._gate.is_open or not self._gate.stops(buffer, position, now_ns):
                self._take(buffer, position, body_end)
            elif self._gate.is_waiting:
                break
            hot = self._document_handlers()
            runs = documents.runs() if hot is self._hot else _NO_RUNS
            position = body_end
        self._keep_rest(buffer, position, missing_bytes)

    def login_checked(self, step: AuthStep) -> None:
        """Answer the login that was waited for; what came after it is taken with `resume`."""
        self._connection.login_checked(step)

    def drop_received(self) -> None:
        """Let go of what was received and not taken: the connection is gone."""
        self.state.buffer = b""
        self._gathered = bytearray()
        self.state.held_bytes = self._missing_bytes = 0

    def _keep_rest(self, buffer: bytes, position: int, missing_bytes: int) -> None:
        """Keep what is not consumed: the beginning of a packet, if a packet can begin so."""
        state = self.state
        end = len(buffer)
        state.taken_bytes += position
        state.held_bytes = end - position
        if position < end < position + HEADER_BYTES and not state.is_closing:
            # Whoever speaks another protocol may never send 24 bytes.
            problem = self._problem_of(buffer[position], 0, 0)
            if problem:
                state.close(problem)
        if missing_bytes > GATHERED_BYTES_MIN:
            self._gathered += memoryview(buffer)[position:]
            self._missing_bytes = missing_bytes
            position = end
        state.buffer = buffer[position:] if position else buffer

    def _document_handlers(self) -> dict[int, DocumentHandler]:
        """Return the handlers that requests reach without a look at their opcode's rules."""
        state = self.state
        rights = state.rights
        if rights is None or not self._gate.is_open or state.engine.writers_wait:
            return _NO_HANDLERS
        if rights.has_all_documents:
            return self._hot
        if not self._checked:
            self._checked = {opcode: self._with_check(run) for opcode, run in self._hot.items()}
        return self._checked

    def _must_wait(self) -> bool:
        """Whether a command that writes has to wait for room; the session is full then."""
        state, engine = self.state, self.state.engine
        if engine.writers_wait and not engine.write_refusal and self.is_logged_in:
            state.is_full = state.waits_for_room = True
        return state.waits_for_room

    def _with_check(self, run: DocumentHandler) -> DocumentHandler:
        state = self.state

        def checked(
            opcode: int, key_len: int, extras_len: int, datatype: int, vb_id: int, opaque: int,
            cas: int, start: int, end: int,
        ) -> None:  # fmt: skip
            # Compiled code takes no slice that ends before it begins.
            key_at = min(start + extras_len, end)
            why = state.denial(opcode, state.buffer[key_at : min(key_at + key_len, end)])
            if why:
                self._documents.refuse(opcode, opaque, Status.EACCESS, why)
            else:
                run(opcode, key_len, extras_len, datatype, vb_id, opaque, cas, start, end)

        return checked

    def _problem_of(self, magic: int, opcode: int, body_len: int) -> str:
        if magic not in _ACCEPTED_MAGICS:
            return f"no request begins with byte 0x{magic:02x}"
        body_bytes_max, setting = self._body_bytes_max, "value_bytes_max"
        login_bytes_max = self.state.limits.login_body_bytes_max
        if not self.is_logged_in and login_bytes_max < body_bytes_max:
            body_bytes_max, setting = login_bytes_max, "login_body_bytes_max"
        if body_len > body_bytes_max:
            return (
                f"opcode 0x{opcode:02x} announces a body of {body_len} bytes; "
                f"at most {body_bytes_max} are taken (setting {setting})"
            )
        return ""

    def _take(self, buffer: bytes, position: int, body_end: int) -> None:
        """Handle one complete packet that is not a document command of a plain request."""
        magic, opcode, key_len, extras_len, datatype, vb_id, _, opaque, cas = _unpack_header(
            buffer, position
        )
        if magic in {Magic.RESPONSE, Magic.SERVER_RESPONSE}:
            # That the peer lives is noted already; of a response the vb_id field is the status.
            if magic == Magic.RESPONSE and self.state.producer is not None:
                self.state.producer.answered(opcode, opaque, vb_id)
            return
        framing_len = 0
        if magic == Magic.FLEX_REQUEST:
            framing_len, key_len = FLEX_HEADER.unpack_from(buffer, position)[2:4]
        extras_at = position + HEADER_BYTES + framing_len
        key_at = extras_at + extras_len
        value_at = key_at + key_len
        request = Frame(
            magic, opcode, datatype, vb_id, opaque, cas,
            buffer[extras_at:key_at], buffer[key_at:value_at], buffer[value_at:body_end],
            buffer[position + HEADER_BYTES : extras_at],
        )  # fmt: skip
        state = self.state
        if value_at > body_end:
            state.refuse(request, Status.EINVAL, "extras and key are longer than the body")
            return
        frame_ids: set[int] = set()
        if request.framing and not self._accepts_framing(request, frame_ids):
            return
        if opcode not in _BEFORE_LOGIN and not self._may(request):
            return
        preserves_expiry = PRESERVE_TTL_FRAME_ID in frame_ids and opcode not in _KEEP_THEIR_EXPIRY
        if preserves_expiry and opcode not in _PRESERVE_EXPIRY:
            state.refuse(request, Status.EINVAL, "this command has no expiry to preserve")
            return
        hot, cold = self._hot.get(opcode), self._cold.get(opcode)
        try:
            if preserves_expiry:
                self._documents.store_preserving_expiry(request)
            elif hot is not None:
                hot(opcode, key_len, extras_len, datatype, vb_id, opaque, cas, extras_at, body_end)
            elif cold is not None:
                cold(request)
            else:
                state.refuse(
                    request, Status.UNKNOWN_COMMAND, f"opcode 0x{opcode:02x} is not known here"
                )
        except StoreDamagedError as error:
            state.answer_damage(opcode, opaque, error)

    def _may(self, request: Frame) -> bool:
        """Whether the client may do this; it is refused otherwise."""
        state = self.state
        rights = state.rights
        if rights is None:
            if state.stale_user:
                context = f"user {state.stale_user!r} was removed; log in again (SASL_AUTH)"
                state.refuse(request, Status.AUTH_STALE, context)
            else:
                state.refuse(request, Status.EACCESS, "log in first (SASL_AUTH)")
            return False
        opcode = request.opcode
        if rights.is_full or not (opcode in self._cold or opcode in self._hot):
            return True
        why = state.denial(opcode, request.key)
        if why:
            state.refuse(request, Status.EACCESS, why)
        return not why

    def _accepts_framing(self, request: Frame, frame_ids: set[int]) -> bool:
        """Whether all frame infos of a flex request are known; their ids go into `frame_ids`."""
        state = self.state
        known = _KNOWN_FRAMES if state.has_preserve_ttl else {BARRIER_FRAME_ID}
        try:
            for frame_id, _ in frame_infos(request.framing):
                frame_ids.add(frame_id)
                names_stream = (
                    frame_id == STREAM_ID_FRAME and request.opcode == Opcode.DCP_CLOSE_STREAM
                )
                if frame_id not in known and not names_stream:
                    problem = f"frame info {frame_id} is not known here"
                    state.refuse(request, Status.UNKNOWN_FRAME_INFO, problem)
                    return False
        except RemoteProtocolError as error:
            state.refuse(request, Status.EINVAL, str(error))
            return False
        return True


_WRITES: Final = frozenset(
    opcode for opcode, need in NEEDS.items() if any(Role.WRITE in roles for roles in need.roles)
)
"""Commands that change documents; they wait while the store has fallen behind."""
_NO_HANDLERS: Final[dict[int, DocumentHandler]] = {}
_NO_RUNS: Final[dict[int, Run]] = {}
_ACCEPTED_MAGICS: Final = frozenset(
    {Magic.REQUEST, Magic.FLEX_REQUEST, Magic.RESPONSE, Magic.SERVER_RESPONSE}
)
