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
- the same bytes get the same answers, however the network splits them;
- a request for a partition that is handed over to this node waits in its place, for as long as
  `dcp.session.replication_port` allows. What stands behind it waits, too.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from dcp.session.access.auth import AuthStep
from dcp.session.access.rights import NEEDS, Role
from dcp.session.answers.long_requests import LongRequest
from dcp.session.answers.long_steps import REMOVED, end_long, go_on
from dcp.session.collections import CollectionCommands
from dcp.session.fault_gate import FaultGate
from dcp.session.group_command import GroupCommand
from dcp.session.kv.counted_handlers import CountedHandlers
from dcp.session.kv.documents import DocumentCommands
from dcp.session.kv.documents import Handler as DocumentHandler
from dcp.session.kv.hash_reads import HashReads
from dcp.session.kv.reads import DocumentReadCommands
from dcp.session.kv.runs import DocumentRuns, Run
from dcp.session.kv.scans import ScanCommands
from dcp.session.kv.updates import UpdateCommands
from dcp.session.kv.values import SKIPPED_BYTES_MAX, remove_old, too_big
from dcp.session.kv.with_meta import PutFramesCommand, WithMetaCommands
from dcp.session.nodes.cut_command import CutCommand
from dcp.session.nodes.version_reads import VersionReads
from dcp.session.replication_port import ACK_BYTES, ACK_HEAD
from dcp.session.request_frames import (
    COMMAND_BYTES_MAX,
    NO_FRAMES,
    SHARES,
    SMALL_COMMANDS,
    RequestFrames,
    parse_frames,
)
from dcp.session.session_commands import ConnectionCommands
from dcp.session.state import SessionState
from dcp.session.streams import DcpCommands
from dcp.session.subdoc.subdoc_commands import CHANGES, SubdocCommands
from dcp.session.upkeep_commands import UpkeepCommands
from dcp.wire.frame import FLEX_HEADER, HEADER, HEADER_BYTES, Frame
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.status import RefusedError, Status
from failover.rules.write_answer import Durability, refusal_of
from vbucket.engine.documents.read_modify_write import Flush
from vbucket.engine.partition import VbState
from vbucket.store.environment import StoreDamagedError

_unpack_header: Final = HEADER.unpack_from

BODY_EXTRA_BYTES: Final = 4096
"""Room for extras, key and framing beside the value in a body."""

GATHERED_BYTES_MIN: Final = 64 * 1024
"""A packet that misses more than this is gathered in a bytearray. Concatenating each piece would
copy the whole packet each time."""

_BEFORE_LOGIN: Final = frozenset({
    Opcode.HELLO, Opcode.SASL_LIST_MECHS, Opcode.SASL_AUTH, Opcode.SASL_STEP, Opcode.NOOP,
    Opcode.VERSION, Opcode.QUIT, Opcode.QUITQ, Opcode.GET_ERROR_MAP,
})  # fmt: skip

_PRESERVE_EXPIRY: Final = frozenset({Opcode.SET, Opcode.SETQ, Opcode.REPLACE, Opcode.REPLACEQ})
"""Commands that keep a document's expiry if frame info 5 asks for it."""
_KEEP_THEIR_EXPIRY: Final = frozenset({
    Opcode.INCREMENT, Opcode.INCREMENTQ, Opcode.DECREMENT, Opcode.DECREMENTQ, Opcode.APPEND,
    Opcode.APPENDQ, Opcode.PREPEND, Opcode.PREPENDQ,
})  # fmt: skip
"""Commands that always keep a document's expiry."""


class Session:
    """See the module."""

    def __init__(self, state: SessionState) -> None:
        self.state = state
        self._documents = DocumentCommands(state)
        self._runs = DocumentRuns(state)
        self._subdoc = SubdocCommands(state, self._documents, self._runs)
        self._hot = (
            self._documents.handlers()
            | WithMetaCommands(state, self._documents).handlers()
            | self._subdoc.handlers()
        )
        self._marked: dict[int, DocumentHandler] = {}
        """Handlers that leave marks; made when marks are wanted first."""
        self._checked: dict[int, DocumentHandler] = {}
        """Handlers with a check, for users with fewer rights; made when the first needs them."""
        self._counting = CountedHandlers(state)
        self._connection = connection = ConnectionCommands(state)
        self._updates = updates = UpdateCommands(state, self._documents)
        dcp = DcpCommands(state)
        self._cold = (
            connection.handlers()
            | CollectionCommands(state).handlers()
            | updates.handlers()
            | DocumentReadCommands(state, self._documents).handlers()
            | ScanCommands(state).handlers()
            | UpkeepCommands(state).handlers()
            | GroupCommand(state).handlers()
            | VersionReads(state).handlers()
            | CutCommand(state).handlers()
            | HashReads(state).handlers()
            | PutFramesCommand(state, self._documents).handlers()
            | dcp.handlers()
        )
        self._dcp = dcp
        self._body_bytes_max = state.shared.limits.value_bytes_max + BODY_EXTRA_BYTES
        self._gathered = bytearray()
        """The beginning of a large packet; `state.buffer` is empty meanwhile."""
        self._missing_bytes = 0
        """Bytes still to come of the packet that is being gathered."""
        self._skip_bytes = 0
        """Bytes still to come of a body that was refused; they are not kept."""
        self._gate = FaultGate(state)
        self._is_entered = False
        """Whether a packet is being handled."""

    @property
    def is_logged_in(self) -> bool:
        """Whether commands are taken: a user is known, or the peer is local and none is needed."""
        return self.state.login.rights is not None

    def receive(self, data: bytes, now_ns: int) -> None:
        """Handle the bytes of one read; `now_ns` is Unix time."""
        state = self.state
        if state.close_reason:
            return
        if len(data) == ACK_BYTES and self._is_acknowledgement(data):
            assert state.feed is not None, "asked there"
            self._dcp.acknowledged(state.feed, data[HEADER_BYTES:])
            state.taken_bytes += ACK_BYTES
            return
        if self._skip_bytes:
            skipped = min(self._skip_bytes, len(data))
            self._skip_bytes -= skipped
            state.taken_bytes += skipped
            data = data[skipped:]
            if not data:
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

    @property
    def _has_faults(self) -> bool:
        """Whether a fault may stop a request."""
        return bool(self.state.shared.faults.rules) or self._gate.waiting is not None

    def _is_acknowledgement(self, data: bytes) -> bool:
        """Whether these bytes are one acknowledgement of a replica, and nothing comes before it. It
        takes a third of the time of other packets: each small write waits for some.
        """
        state = self.state
        return (
            state.feed is not None
            and data.startswith(ACK_HEAD)
            and not (state.buffer or self._skip_bytes or self._missing_bytes)
            and not (state.is_full or state.login.request or state.login.rights is None)
            and not self._has_faults
        )

    def resume(self, now_ns: int) -> None:
        """Go on with what is buffered. The caller has taken the answers."""
        state = self.state
        if now_ns < state.pause.until_ns or state.login.request is not None:
            state.is_full = True
            self._note_held(state.buffer, 0)
            return
        assert not self._is_entered, "nothing that a handler calls may call the session"
        self._is_entered = True
        state.is_full = state.pause.is_for_room = False
        state.unread_bytes = 0
        state.work = 0.0
        if self._begin(now_ns) and not self._took_last_step(now_ns):
            self._is_entered = False
            return
        buffer = state.buffer
        end = len(buffer)
        position = missing_bytes = 0
        body_bytes_max = self._body_bytes_max
        all_runs = self._runs
        hot = self._document_handlers()
        runs = all_runs.runs() if hot is self._hot or hot is self._marked else _NO_RUNS
        replication = state.shared.replication
        arriving = _NO_PARTITIONS if replication is None else replication.arriving
        is_held = False
        while end - position >= HEADER_BYTES and not (state.is_full or state.close_reason):
            magic, opcode, key_len, extras_len, datatype, vb_id, body_len, opaque, cas = (
                _unpack_header(buffer, position)
            )
            body_end = position + HEADER_BYTES + body_len
            if magic == 0x80 and body_end <= end and body_len <= body_bytes_max:
                run = runs.get(opcode)
                if run is not None and (after := run(position, end)) > position:
                    position = after
                    continue
                handler = hot.get(opcode)
                if handler is not None:
                    if vb_id in arriving and self._waits_for(opcode, now_ns):
                        is_held = True
                        break
                    try:
                        handler(
                            opcode, key_len, extras_len, datatype, vb_id, opaque, cas,
                            position + HEADER_BYTES, body_end,
                        )  # fmt: skip
                    except (RefusedError, StoreDamagedError) as error:
                        state.answer_error(opcode, opaque, vb_id, error)
                    position = body_end
                    continue
            if vb_id in arriving and body_end <= end and magic in _REQUEST_MAGICS:
                is_held = self._waits_for(opcode, now_ns)
                if is_held:
                    break
            after, missing_bytes = self._handle_other(buffer, position, end, now_ns)
            if after == position:
                break
            position = after
            if position == end:
                break
            hot = self._document_handlers()
            runs = all_runs.runs() if hot is self._hot or hot is self._marked else _NO_RUNS
        if state.pause.arrival.until_ns and not is_held:
            state.pause.arrival.end(now_ns)
        self._keep_rest(buffer, position, missing_bytes)
        self._is_entered = False

    def ask_logins(self, now_ns: int) -> None:
        """Ask the authenticator the question that a SASL request left, and go on with its answer.

        The shell calls it after `receive` and `resume`, so that the authenticator never runs while
        a packet is handled. An answer that comes later goes to `login_checked`.
        """
        login = self.state.login
        while (question := login.take_question()) is not None:
            step = question.ask(login.authenticator, peer_is_loopback=login.peer_is_loopback)
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
        self.state.login.question = None  # it has a password
        self._gathered = bytearray()
        self.state.held_bytes = self._missing_bytes = 0
        end_long(self.state)

    def _begin(self, now_ns: int) -> bool:
        """Begin a batch of commands; return whether a request that takes steps is under way."""
        state = self.state
        if state.first_change < 0 or not state.wait_group:
            # An earlier read may have brought no whole command. Its place is that of another group.
            state.first_change = len(state.engine.keyspace.pending)
        state.engine.begin_batch(now_ns)
        return state.unfinished is not None

    def _keep_rest(self, buffer: bytes, position: int, missing_bytes: int) -> None:
        """Keep what is not handled; close if no packet can begin so."""
        state = self.state
        state.taken_bytes += position
        self._note_held(buffer, position)
        if position < len(buffer) < position + HEADER_BYTES and not state.close_reason:
            # A client of another protocol may never send 24 bytes.
            problem = self._problem_of(buffer[position], 0, 0)
            if problem:
                state.close(problem)
        if missing_bytes > GATHERED_BYTES_MIN:
            self._gathered += memoryview(buffer)[position:]
            self._missing_bytes = missing_bytes
            position = len(buffer)
        state.buffer = buffer[position:] if position else buffer

    def _note_held(self, buffer: bytes, position: int) -> None:
        """Note how many received bytes are kept; the buffer is handled up to `position`."""
        state = self.state
        state.held_bytes = len(buffer) - position
        if isinstance(state.unfinished, LongRequest):
            state.held_bytes += state.unfinished.held_bytes

    def _handle_other(self, buffer: bytes, position: int, end: int, now_ns: int) -> tuple[int, int]:
        """Handle a packet that the loop does not pass to a handler directly. Return where the next
        one begins, or the same position if this one has to wait, and how many bytes are missing.
        """
        state = self.state
        magic, opcode, _, _, _, _, body_len, _, _ = _unpack_header(buffer, position)
        body_end = position + HEADER_BYTES + body_len
        problem = self._problem_of(magic, opcode, body_len)
        if problem:
            state.close(problem)
            return position, 0
        is_small = opcode in SMALL_COMMANDS and magic in _REQUEST_MAGICS
        if body_len > self._body_bytes_max or (is_small and body_len > COMMAND_BYTES_MAX):
            missing_bytes = self._refuse_body(buffer, position, end, body_end)
            return (position, missing_bytes) if missing_bytes else (min(body_end, end), 0)
        if body_end > end:
            return position, body_end - end
        if opcode in _WRITES and self._must_wait(opcode):
            return position, 0
        if not self._has_faults or not self._gate.stops(buffer, position, now_ns):
            self._take(buffer, position, body_end)
        elif self._gate.waiting is not None:
            return position, 0
        return body_end, 0

    def _refuse_body(self, buffer: bytes, position: int, end: int, body_end: int) -> int:
        """Refuse a request whose body is too long, and skip the body. Return 0, or how many bytes
        are missing to know its key, if a SET removes the document.
        """
        state = self.state
        magic, opcode, key_len, extras_len, _, vb_id, body_len, opaque, cas = _unpack_header(
            buffer, position
        )
        why = f"opcode 0x{opcode:02x} announces a body of {body_len} bytes"
        refusal: RefusedError = too_big(state, why)
        if body_len <= self._body_bytes_max:
            why += f"; this command takes at most {COMMAND_BYTES_MAX}"
            refusal = RefusedError(Status.EINVAL, why)
        first_answer, first_entry = len(state.answers), len(state.engine.keyspace.pending)
        if magic == Magic.REQUEST and opcode in _SETS and state.shared.limits.oversized_set_removes:
            key_at: int = position + HEADER_BYTES + extras_len
            missing_bytes: int = key_at + key_len - end
            if missing_bytes > 0:
                return missing_bytes
            key = buffer[key_at : key_at + key_len]
            try:
                if key and not state.denial(opcode, key):
                    remove_old(state, *self._documents.locate(vb_id, key), cas)
            except RefusedError as error:
                refusal = error
        state.answer_error(opcode, opaque, vb_id, refusal)
        if state.marks is not None:
            state.mark(opcode, opaque, first_answer, first_entry)
        self._skip_bytes = max(0, body_end - end)
        return 0

    def _document_handlers(self) -> dict[int, DocumentHandler]:
        """Return the handlers that the loop calls directly; none if packets need checks first."""
        state = self.state
        rights = state.login.rights
        if rights is None or self._has_faults or state.engine.writers_wait:
            return _NO_HANDLERS
        hot = self._hot
        if state.marks is not None:
            if not self._marked:
                self._marked = {opcode: self._with_mark(run) for opcode, run in hot.items()}
            hot = self._marked
        if rights.has_all_documents:
            return self._counting.of(hot) if state.shared.prefixes.is_on else hot
        if not self._checked:
            self._checked = {opcode: self._with_check(run) for opcode, run in hot.items()}
        return self._checked

    def _must_wait(self, opcode: int) -> bool:
        """Return whether a command that writes has to wait; the session is full then."""
        state, engine = self.state, self.state.engine
        if opcode == Opcode.X_PUT_FRAMES and engine.loads.is_full and self.is_logged_in:
            state.is_full = state.pause.is_for_room = True
        if engine.writers_wait and not engine.write_refusal and self.is_logged_in:
            state.is_full = state.pause.is_for_room = True
        return state.pause.is_for_room

    def _waits_for(self, opcode: int, now_ns: int) -> bool:
        """Return whether a request waits for its partition, which is arriving; the session is full
        then. Clients whose keys are hashed here name no partition.
        """
        state = self.state
        if not (opcode in self._hot or opcode in _WRITES) or opcode in _FLUSHES:
            return False
        if state.hello.hashes_keys or not self.is_logged_in or not state.pause.arrival.wait(now_ns):
            return False
        state.is_full = True
        return True

    def _with_check(self, run: DocumentHandler) -> DocumentHandler:
        state = self.state

        def checked(
            opcode: int, key_len: int, extras_len: int, datatype: int, vb_id: int, opaque: int,
            cas: int, start: int, end: int,
        ) -> None:  # fmt: skip
            key_at = start + extras_len
            why = state.denial(opcode, state.buffer[key_at : min(key_at + key_len, end)])
            if why:
                state.deny(opcode, opaque, why)
            else:
                run(opcode, key_len, extras_len, datatype, vb_id, opaque, cas, start, end)

        return checked

    def _with_mark(self, run: DocumentHandler) -> DocumentHandler:
        state, keyspace = self.state, self.state.engine.keyspace

        def marked(
            opcode: int, key_len: int, extras_len: int, datatype: int, vb_id: int, opaque: int,
            cas: int, start: int, end: int,
        ) -> None:  # fmt: skip
            first_answer, first_entry = len(state.answers), len(keyspace.pending)
            try:
                run(opcode, key_len, extras_len, datatype, vb_id, opaque, cas, start, end)
            except (RefusedError, StoreDamagedError) as error:
                state.answer_error(opcode, opaque, vb_id, error)
            state.mark(opcode, opaque, first_answer, first_entry)

        return marked

    def _took_last_step(self, now_ns: int) -> bool:
        """Go on with the request that takes steps; return whether others may be taken now."""
        state = self.state
        if isinstance(state.unfinished, Flush):
            self._continue_flush(now_ns)
        else:
            answered = len(state.answers)
            done = go_on(state, now_ns, self._check_guard)
            if done is not None and state.shared.prefixes.is_on:
                self._counting.count(done.opcode, done.wire_key, answered)
        if state.is_full:
            self._note_held(state.buffer, 0)
        return not state.is_full

    def _continue_flush(self, now_ns: int) -> None:
        """Take the next step of the flush under way."""
        state, request = self.state, self._updates.flush_request
        assert request is not None, "a flush has a request"
        first_answer, first_entry = len(state.answers), len(state.engine.keyspace.pending)
        self._updates.continue_flush(now_ns)
        if state.marks is not None:
            state.mark(request.opcode, request.opaque, first_answer, first_entry)

    def _problem_of(self, magic: int, opcode: int, body_len: int) -> str:
        if magic not in _ACCEPTED_MAGICS:
            return f"no request begins with byte 0x{magic:02x}"
        body_bytes_max, setting = SKIPPED_BYTES_MAX, "no setting changes that"
        if magic not in _REQUEST_MAGICS:
            body_bytes_max, setting = self._body_bytes_max, "setting value_bytes_max"
        login_bytes_max = self.state.shared.limits.login_body_bytes_max
        if not self.is_logged_in:
            body_bytes_max = min(login_bytes_max, self._body_bytes_max)
            setting = "setting login_body_bytes_max"
        if body_len > body_bytes_max:
            return (
                f"opcode 0x{opcode:02x} announces a body of {body_len} bytes; "
                f"at most {body_bytes_max} are taken ({setting})"
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
        first_answer, first_entry = len(state.answers), len(state.engine.keyspace.pending)
        try:
            if value_at > body_end:
                raise RefusedError(Status.EINVAL, "extras and key are longer than the body")
            frames = self._frames_of(request) if request.framing else NO_FRAMES
            if opcode not in _BEFORE_LOGIN:
                self._check_rights(request)
            state.current.durability = frames.durability
            if frames.durability is not None:
                self._check_guard(vb_id, frames.durability)
            hot, cold = self._hot.get(opcode), self._cold.get(opcode)
            if frames.preserves_expiry and opcode in CHANGES:
                self._subdoc.change_preserving_expiry(request)
            elif frames.preserves_expiry and opcode not in _KEEP_THEIR_EXPIRY:
                if opcode not in _PRESERVE_EXPIRY:
                    raise RefusedError(Status.EINVAL, "this command has no expiry to preserve")
                self._documents.store_preserving_expiry(request)
            elif hot is not None:
                hot(opcode, key_len, extras_len, datatype, vb_id, opaque, cas, extras_at, body_end)
            elif cold is not None:
                cold(request)
                state.spend(SHARES.get(opcode, 0))
                state.spend_changes(first_entry)
            else:
                why = f"opcode 0x{opcode:02x} is not known here"
                raise RefusedError(Status.UNKNOWN_COMMAND, why)
        except (RefusedError, StoreDamagedError) as error:
            state.answer_error(opcode, opaque, vb_id, error)
        if state.marks is not None:
            state.mark(opcode, opaque, first_answer, first_entry)
        state.current.durability = None

    def _check_guard(self, vb_id: int, durability: Durability) -> None:
        """Raise RefusedError if a change with a durability frame must not be applied. Changes
        without one find a hold (`Hold.REPLICATION`).
        """
        engine = self.state.engine
        if vb_id < engine.num_vbuckets:
            part = engine.partitions[vb_id]
            if part.guard is not None and part.state == VbState.ACTIVE:
                refusal = refusal_of(part.guard.write_state(durability))
                if refusal is not None:
                    raise RefusedError(refusal.status, f"partition {vb_id}: {refusal.reason}")

    def _check_rights(self, request: Frame) -> None:
        """Raise RefusedError where the client may not do this."""
        state = self.state
        rights = state.login.rights
        if rights is None:
            if state.login.stale_user:
                raise RefusedError(Status.AUTH_STALE, REMOVED.format(state.login.stale_user))
            raise RefusedError(Status.EACCESS, "log in first (SASL_AUTH)")
        opcode = request.opcode
        if rights.is_full or not (opcode in self._cold or opcode in self._hot):
            return
        if why := state.denial(opcode, request.key):
            raise RefusedError(Status.EACCESS, why)

    def _frames_of(self, request: Frame) -> RequestFrames:
        """Return what the frame infos of a flex request ask for. Raises RefusedError."""
        state = self.state
        frames = parse_frames(
            request.framing, request.opcode, has_preserve_ttl=state.hello.has_preserve_ttl,
            has_durability=state.hello.has_durability,
        )  # fmt: skip
        if frames.traceparent and (trace := state.shared.hub.trace) is not None:
            trace.parent = frames.traceparent
        if frames.durability is not None and not state.shared.limits.syncs_writes:
            why = "this server answers before a write is on disk (setting durability)"
            raise RefusedError(Status.DURABILITY_IMPOSSIBLE, why)
        return frames


_WRITES: Final = frozenset(
    opcode for opcode, need in NEEDS.items() if any(Role.WRITE in roles for roles in need.roles)
)
"""Commands that change documents. They wait while the store has fallen behind."""
_SETS: Final = frozenset({Opcode.SET, Opcode.SETQ})
_FLUSHES: Final = frozenset({Opcode.FLUSH, Opcode.FLUSHQ})
"""Writes that name no partition."""
_REQUEST_MAGICS: Final = frozenset({Magic.REQUEST, Magic.FLEX_REQUEST})
_NO_HANDLERS: Final[dict[int, DocumentHandler]] = {}
_NO_RUNS: Final[dict[int, Run]] = {}
_NO_PARTITIONS: Final[Set[int]] = frozenset()
_ACCEPTED_MAGICS: Final = frozenset(
    {Magic.REQUEST, Magic.FLEX_REQUEST, Magic.RESPONSE, Magic.SERVER_RESPONSE}
)
