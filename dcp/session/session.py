"""One client connection: bytes in, answers out. Sans-IO.

`receive` takes the bytes of one read and handles all complete packets in one loop. The document
commands, the hot path, get the header's fields as plain arguments; all others get a `Frame`. The
answers gather in `state.answers`. The shell sends them in order when the group `state.wait_group`
is committed.

Invariants
- responses keep the order of the requests;
- damaged data in the store fails only the request that needs it, with EINTERNAL;
- no input raises out of the session: a bad packet gets the protocol's answer, or the connection
  closes with a reason;
- what a peer can make the session keep is bounded: one incomplete packet, whose header is checked
  first, and ANSWER_BYTES_MAX of answers plus one. `state.held_bytes` counts the received bytes;
- while the outcome of a login is not known, no command is taken;
- the session is not entered while it handles a packet (asserted). What somebody else has to do is
  left in `state` as data, and the shell does it afterwards: send `answers`, ask `login_question`,
  log `notes`, commit, pump the producer, close;
- the same bytes get the same answers, however the network splits them.
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
from dcp.session.subdoc.subdoc_commands import CHANGES, SubdocCommands
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
from dcp.wire.status import RefusedError, Status
from vbucket.store.environment import StoreDamagedError

_unpack_header: Final = HEADER.unpack_from

BODY_EXTRA_BYTES: Final = 4096
"""Room for extras, key and framing beside the value in a body."""

GATHERED_BYTES_MIN: Final = 64 * 1024
"""A packet that misses more than this is gathered in a bytearray. Concatenating each piece would
copy the whole packet each time."""

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
"""Commands that keep a document's expiry if frame info 5 asks for it."""
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
"""Commands that always keep a document's expiry."""


class Session:
    """See the module."""

    def __init__(self, state: SessionState) -> None:
        self.state = state
        self._documents = DocumentCommands(state)
        self._subdoc = SubdocCommands(state, self._documents)
        self._hot = (
            self._documents.handlers()
            | WithMetaCommands(state, self._documents).handlers()
            | self._subdoc.handlers()
        )
        self._checked: dict[int, DocumentHandler] = {}
        """Handlers with a check of rights, for users who may not read and write everything. Made
        when the first such user needs them."""
        self._connection = connection = ConnectionCommands(state)
        self._updates = updates = UpdateCommands(state, self._documents)
        self._cold = (
            connection.handlers()
            | CollectionCommands(state).handlers()
            | updates.handlers()
            | ScanCommands(state, self._documents).handlers()
            | PutFramesCommand(state, self._documents).handlers()
            | DcpCommands(state).handlers()
        )
        self._body_bytes_max = state.limits.value_bytes_max + BODY_EXTRA_BYTES
        self._gathered = bytearray()
        """The beginning of a large packet; `state.buffer` is empty meanwhile."""
        self._missing_bytes = 0
        """Bytes still to come of the packet that is being gathered."""
        self._gate = FaultGate(state)
        self._is_entered = False
        """Whether a packet is being handled."""

    @property
    def is_logged_in(self) -> bool:
        """Whether commands are taken: a user is known, or the peer is local and none is needed."""
        return self.state.rights is not None

    def receive(self, data: bytes, now_ns: int) -> None:
        """Handle the bytes of one read; `now_ns` is Unix time."""
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
        """Go on with what is buffered. The caller has taken the answers."""
        state = self.state
        if now_ns < state.held_until_ns or state.login is not None:
            state.is_full = True
            state.held_bytes = len(state.buffer)
            return
        assert not self._is_entered, "nothing that a handler calls may call the session"
        self._is_entered = True
        state.is_full = state.waits_for_room = False
        state.unread_bytes = 0
        state.engine.begin_batch(now_ns)
        self._documents.now_s = now_ns // 1_000_000_000
        if state.flush is not None:
            self._updates.continue_flush(now_ns)
            if state.is_full:
                state.held_bytes = len(state.buffer)
                self._is_entered = False
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
                    except (RefusedError, StoreDamagedError) as error:
                        state.answer_error(opcode, opaque, vb_id, error)
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
        self._is_entered = False

    def ask_logins(self, now_ns: int) -> None:
        """Ask the authenticator the question that a SASL request left, and go on with its answer.

        The shell calls it after `receive` and `resume`, so that the authenticator never runs while
        a packet is handled. An answer that comes later goes to `login_checked`.
        """
        state = self.state
        while (question := state.take_login_question()) is not None:
            step = question.ask(state.authenticator, peer_is_loopback=state.peer_is_loopback)
            if step is None:
                return
            self.login_checked(step)
            self.resume(now_ns)

    def login_checked(self, step: AuthStep) -> None:
        """Answer the login under way. `resume` then handles what came after it."""
        assert not self._is_entered, "nothing that a handler calls may call the session"
        self._connection.login_checked(step)

    def drop_received(self) -> None:
        """Drop what was received and not handled: the connection is gone."""
        self.state.buffer = b""
        self.state.login_question = None  # it has a password
        self._gathered = bytearray()
        self.state.held_bytes = self._missing_bytes = 0

    def _keep_rest(self, buffer: bytes, position: int, missing_bytes: int) -> None:
        """Keep what is not handled; close if no packet can begin so."""
        state = self.state
        end = len(buffer)
        state.taken_bytes += position
        state.held_bytes = end - position
        if position < end < position + HEADER_BYTES and not state.is_closing:
            # A client of another protocol may never send 24 bytes.
            problem = self._problem_of(buffer[position], 0, 0)
            if problem:
                state.close(problem)
        if missing_bytes > GATHERED_BYTES_MIN:
            self._gathered += memoryview(buffer)[position:]
            self._missing_bytes = missing_bytes
            position = end
        state.buffer = buffer[position:] if position else buffer

    def _document_handlers(self) -> dict[int, DocumentHandler]:
        """Return the handlers that the loop calls directly; none if packets need checks first."""
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
        """Return whether a command that writes has to wait; the session is full then."""
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
                state.deny(opcode, opaque, why)
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
        """Handle one complete packet that the loop does not pass to a handler directly."""
        magic, opcode, key_len, extras_len, datatype, vb_id, _, opaque, cas = _unpack_header(
            buffer, position
        )
        if magic in {Magic.RESPONSE, Magic.SERVER_RESPONSE}:
            # The vb_id field of a response is its status.
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
        try:
            if value_at > body_end:
                raise RefusedError(Status.EINVAL, "extras and key are longer than the body")
            frame_ids = self._frame_ids(request) if request.framing else _NO_FRAME_IDS
            if opcode not in _BEFORE_LOGIN:
                self._check_rights(request)
            hot, cold = self._hot.get(opcode), self._cold.get(opcode)
            if PRESERVE_TTL_FRAME_ID in frame_ids and opcode in CHANGES:
                self._subdoc.change_preserving_expiry(request)
            elif PRESERVE_TTL_FRAME_ID in frame_ids and opcode not in _KEEP_THEIR_EXPIRY:
                if opcode not in _PRESERVE_EXPIRY:
                    raise RefusedError(Status.EINVAL, "this command has no expiry to preserve")
                self._documents.store_preserving_expiry(request)
            elif hot is not None:
                hot(opcode, key_len, extras_len, datatype, vb_id, opaque, cas, extras_at, body_end)
            elif cold is not None:
                cold(request)
            else:
                why = f"opcode 0x{opcode:02x} is not known here"
                raise RefusedError(Status.UNKNOWN_COMMAND, why)
        except (RefusedError, StoreDamagedError) as error:
            state.answer_error(opcode, opaque, vb_id, error)

    def _check_rights(self, request: Frame) -> None:
        """Raise RefusedError where the client may not do this."""
        state = self.state
        rights = state.rights
        if rights is None:
            if state.stale_user:
                why = f"user {state.stale_user!r} was removed; log in again (SASL_AUTH)"
                raise RefusedError(Status.AUTH_STALE, why)
            raise RefusedError(Status.EACCESS, "log in first (SASL_AUTH)")
        opcode = request.opcode
        if rights.is_full or not (opcode in self._cold or opcode in self._hot):
            return
        if why := state.denial(opcode, request.key):
            raise RefusedError(Status.EACCESS, why)

    def _frame_ids(self, request: Frame) -> frozenset[int]:
        """Return the ids of the frame infos of a flex request. Raises RefusedError."""
        known = _KNOWN_FRAMES if self.state.has_preserve_ttl else {BARRIER_FRAME_ID}
        frame_ids: set[int] = set()
        try:
            for frame_id, _ in frame_infos(request.framing):
                frame_ids.add(frame_id)
                names_stream = (
                    frame_id == STREAM_ID_FRAME and request.opcode == Opcode.DCP_CLOSE_STREAM
                )
                if frame_id not in known and not names_stream:
                    why = f"frame info {frame_id} is not known here"
                    raise RefusedError(Status.UNKNOWN_FRAME_INFO, why)
        except RemoteProtocolError as error:
            raise RefusedError(Status.EINVAL, str(error)) from error
        return frozenset(frame_ids)


_WRITES: Final = frozenset(
    opcode for opcode, need in NEEDS.items() if any(Role.WRITE in roles for roles in need.roles)
)
"""Commands that change documents. They wait while the store has fallen behind."""
_NO_FRAME_IDS: Final[frozenset[int]] = frozenset()
_NO_HANDLERS: Final[dict[int, DocumentHandler]] = {}
_NO_RUNS: Final[dict[int, Run]] = {}
_ACCEPTED_MAGICS: Final = frozenset(
    {Magic.REQUEST, Magic.FLEX_REQUEST, Magic.RESPONSE, Magic.SERVER_RESPONSE}
)
