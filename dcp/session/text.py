"""One client connection that speaks the classic memcached text protocol. Sans-IO.

The shell drives it like a binary `Session`: `receive` takes bytes, and the answers in
`state.answers` go through `dcp.session.answers.held_answers`. A connection speaks text if its
first byte is a letter or an empty line (`begins_text`), and does not change that.

These clients do not know partitions, so keys are hashed here. In a cluster, a key of another node
is refused with that node's address; nothing is passed on. They cannot log in, so they are served
only where the binary protocol takes guests.

Invariants
- responses keep the order of the requests, and do not depend on how the network splits the bytes;
- no input raises out of the session. Bad input is answered with ERROR or CLIENT_ERROR. The data
  block of a refused command is skipped and never read as commands;
- what a peer can make the session keep is bounded: LINE_BYTES_MAX of a line, one value, and
  ANSWER_BYTES_MAX of answers plus one. A get of many keys goes on when its first answers are sent,
  and one whose line is longer than LINE_BYTES_MAX is taken in parts.

Rules: memcached's doc/protocol.txt. `noreply` suppresses errors too, because clients that send it
do not read.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from itertools import chain
from typing import Final, NamedTuple

from dcp.session.answers.marks import TEXT_COMMAND, Mark
from dcp.session.kv.documents import absolute_expiry
from dcp.session.kv.runs import DocumentRuns
from dcp.session.kv.values import remove_old
from dcp.session.session_commands import REPORTED_VERSION
from dcp.session.state import CONTEXT_CHARS_MAX, SessionState
from dcp.wire.frame import HEADER_BYTES, MAX_KEY_BYTES, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError, Status
from vbucket.engine.documents.read_modify_write import Flush, count, extend, touch
from vbucket.engine.engine import ADD, REPLACE, SET, Outcome, StoredDocument
from vbucket.model.ids import DEFAULT_COLLECTION_PREFIX, vbucket_of
from vbucket.native import text_loops
from vbucket.store.environment import StoreDamagedError
from vbucket.store.plain_value import plain

LINE_BYTES_MAX: Final = 64 * 1024
"""Longest command line that is held. Of a longer get or gets the keys are taken and answered as
they arrive, so its length has no limit."""

KEY_BYTES: Final = 64
"""Memory that is counted for a key of a get under way; most keys are short."""

_LONG_PAST_S: Final = 1
"""Expiry of a document with a negative exptime, which means that it expires at once."""
_NO_CAS: Final = 1
"""A CAS that no document has. 0 would match every document."""
_UINT32_MAX: Final = 2**32 - 1
_UINT64_MAX: Final = 2**64 - 1
_DIGITS_MAX: Final = 20
_NOREPLY: Final = b"noreply"
_NEWLINE: Final = 0x0A
_APPEND, _PREPEND = 3, 4
_MODES: Final = {
    b"set": SET,
    b"cas": SET,
    b"add": ADD,
    b"replace": REPLACE,
    b"append": _APPEND,
    b"prepend": _PREPEND,
}

_CHANGES: Final = (
    b"set ", b"add ", b"repl", b"cas ", b"appe", b"prep", b"dele", b"incr", b"decr", b"touc",
)  # fmt: skip
"""How plain changes begin."""
_GET_HEADS: Final = [
    pack_request(Opcode.GETKQ, key=bytes(key_bytes))[:HEADER_BYTES]
    for key_bytes in range(MAX_KEY_BYTES + 1)
]
"""The header of a quiet GET, by the length of its key."""
_LOOPS: Final = text_loops()
_RUN_MIN: Final = 4
"""Commands that are prepared together after one of a run was for Python: the others are lost."""
_RUN_MAX: Final = 256

_ERROR: Final = b"ERROR\r\n"
_BAD_FORMAT: Final = b"CLIENT_ERROR bad command line format\r\n"
_BAD_CHUNK: Final = b"CLIENT_ERROR bad data chunk\r\n"
_BAD_DELTA: Final = b"CLIENT_ERROR invalid numeric delta argument\r\n"
_BAD_EXPTIME: Final = b"CLIENT_ERROR invalid exptime argument\r\n"
_TOO_LARGE: Final = b"SERVER_ERROR object too large for cache\r\n"
_NOT_NOW: Final = b"SERVER_ERROR try again later\r\n"
_STORED: Final = b"STORED\r\n"
_NOT_STORED: Final = b"NOT_STORED\r\n"
_NOT_FOUND: Final = b"NOT_FOUND\r\n"

_COMMON_ANSWERS: Final[dict[int, bytes]] = {
    Status.KEY_ENOENT: _NOT_FOUND,
    Status.KEY_EEXISTS: b"EXISTS\r\n",
    Status.NOT_STORED: _NOT_STORED,
    Status.E2BIG: _TOO_LARGE,
    Status.LOCKED: b"SERVER_ERROR another client locked the document\r\n",
    Status.DELTA_BADVAL: (b"CLIENT_ERROR cannot increment or decrement non-numeric value\r\n"),
}
"""Status of a change that failed -> answer."""
_DAMAGED: Final = b"SERVER_ERROR the stored data is damaged\r\n"


def begins_text(first_byte: int) -> bool:
    """Whether a connection that begins with this byte speaks the text protocol: it is a letter, or
    the first of an empty line.

    Commands are in lower case. A capital letter begins another protocol, such as HTTP, whose body
    could carry commands. So such a connection is answered ERROR and ends.
    """
    return 0x61 <= first_byte <= 0x7A or 0x41 <= first_byte <= 0x5A or first_byte in b"\r\n"


class _Store(NamedTuple):
    """A store command whose data block has not arrived yet."""

    name: bytes
    key: bytes
    flags: int
    expiry: int
    value_bytes: int
    cas: int
    is_quiet: bool


class _Read(NamedTuple):
    """A get under way, with the keys that are left. `expiry` is set if it touches them too."""

    keys: list[bytes]
    """In reverse: the next one is the last."""
    shows_cas: bool
    expiry: int | None
    is_last: bool = True
    """Whether the line ends with these keys."""


class TextSession:
    """See the module."""

    def __init__(self, state: SessionState) -> None:
        self.state = state
        self._engine = state.engine
        self._runs = DocumentRuns(state)
        self._run_commands = _RUN_MIN
        self._takers = dict.fromkeys(_CHANGES, self._take_changes) | {b"get ": self._take_gets}
        self._buffer = bytearray()
        self._store: _Store | None = None
        self._read: _Read | None = None
        self._read_mark: Mark | None = None
        """Of the last answers of a get under way."""
        self._long_get: bytes | None = None
        """The name of a get whose line goes on with what comes next in the buffer."""
        self._has_begun = False
        """Whether a line was handled."""
        self._flushes_quietly = False
        """Whether the last flush_all came with `noreply`."""
        self._skip_bytes = 0
        """Bytes to skip of the data block of a refused command."""
        self._skips_line = False
        """Whether to skip everything up to the next newline: the rest of a bad data block."""
        self._commands: dict[bytes, Callable[[bytes, list[bytes]], bytes]] = {
            **dict.fromkeys(_MODES, self._begin_store),
            **dict.fromkeys((b"get", b"gets"), self._get),
            **dict.fromkeys((b"gat", b"gats"), self._get_and_touch),
            **dict.fromkeys((b"incr", b"decr"), self._count),
            b"delete": self._delete,
            b"touch": self._touch,
            b"stats": self._stats,
            b"version": self._version,
            b"verbosity": self._verbosity,
            b"quit": self._quit,
        }

    @property
    def is_logged_in(self) -> bool:
        """Whether commands are taken: the peer is local, and guests are still taken."""
        return self.state.login.rights is not None

    def receive(self, data: bytes, now_ns: int) -> None:
        """Handle the bytes of one read; `now_ns` is Unix time."""
        state = self.state
        if state.close_reason:
            return
        if not self.is_logged_in:
            state.send(b"CLIENT_ERROR log in with SASL over the binary protocol\r\n")
            state.close("the text protocol has no login, and guests are not served there")
            return
        self._buffer += data
        self.resume(now_ns)

    def resume(self, now_ns: int) -> None:
        """Go on with what is buffered. The caller has taken the answers."""
        state = self.state
        state.is_full = state.pause.is_for_room = False
        state.unread_bytes = 0
        state.work = 0.0
        if state.first_change < 0 or not state.wait_group:  # as in Session._begin
            state.first_change = len(self._engine.keyspace.pending)
        self._engine.begin_batch(now_ns)
        handle = self._handle if state.marks is None else self._handle_with_marks
        if state.unfinished is not None:
            first_answer, first_entry = len(state.answers), len(self._engine.keyspace.pending)
            self._continue_flush(now_ns)
            if state.marks is not None:
                state.mark(TEXT_COMMAND, 0, first_answer, first_entry, is_read=False)
        position = 0
        try:
            while not (state.is_full or state.close_reason):
                is_reading = self._read is not None
                first_entry = len(self._engine.keyspace.pending)
                step = handle(position)
                state.spend_changes(first_entry)
                if step == position and not is_reading:
                    break
                position = step
                if position == len(self._buffer) and self._read is None:
                    break
        except StoreDamagedError as error:
            # The answer may be half sent, and the protocol has no way to take that back.
            state.send(_DAMAGED)
            state.close(f"damaged data: {error}")
        del self._buffer[:position]
        state.taken_bytes += position
        keys = self._read.keys if self._read is not None else ()
        state.held_bytes = len(self._buffer) + KEY_BYTES * len(keys)

    def drop_received(self) -> None:
        """Drop what was received and not handled: the connection is gone."""
        self._buffer = bytearray()
        self._read = self._store = self._long_get = None
        self.state.held_bytes = 0

    def _handle(self, position: int) -> int:
        """Go on with the get under way, or handle what begins at `position`; return the position
        behind it.
        """
        if self._read is None:
            return self._next_step(position)
        self._go_on_reading(self._read)
        return position

    def _handle_with_marks(self, position: int) -> int:
        """Do what `_handle` does, and leave a mark for an answer that waits."""
        state, read = self.state, self._read
        if read is not None and self._read_mark is not None and self._read_mark.is_replaced:
            self._end_reading(read)  # with an error that was answered already
            self._read_mark = None
            return position
        pending = self._engine.keyspace.pending
        first_answer, first_entry = len(state.answers), len(pending)
        position = self._handle(position)
        changes = read is None or read.expiry is not None
        is_read = not (changes and len(pending) > first_entry)
        mark = state.mark(TEXT_COMMAND, 0, first_answer, first_entry, is_read=is_read)
        self._read_mark = mark if read is not None else None
        return position

    def _next_step(self, position: int) -> int:
        """Handle what begins at `position`; return the position behind it, or the same position if
        bytes are missing.
        """
        buffer = self._buffer
        if self._skip_bytes:
            skipped = min(self._skip_bytes, len(buffer) - position)
            self._skip_bytes -= skipped
            return position + skipped
        if self._skips_line:
            newline = buffer.find(b"\n", position)
            self._skips_line = newline < 0
            return len(buffer) if newline < 0 else newline + 1
        if self._store is not None:
            return self._take_block(self._store, position)
        if self._long_get is not None:
            return self._take_keys(self._long_get, position)
        take = self._takers.get(bytes(buffer[position : position + 4]))
        if take is not None:
            after = take(position)
            if after > position or self.state.is_full:
                return after
        newline = buffer.find(b"\n", position, position + LINE_BYTES_MAX)
        if newline < 0:
            long_get = _LONG_GET.match(buffer, position, position + _LONG_GET_BYTES)
            if long_get is not None and len(buffer) - position >= LINE_BYTES_MAX:
                self._long_get = long_get[1]
                return long_get.end()
            if len(buffer) - position >= LINE_BYTES_MAX:
                self.state.send(b"CLIENT_ERROR line too long\r\n")
                self.state.close(f"a text command has more than {LINE_BYTES_MAX} bytes")
            return position
        line = bytes(buffer[position:newline])
        if _WRITES.match(line) and self._must_wait():
            return position
        self._take_line(line)
        return newline + 1

    def _take_line(self, line: bytes) -> None:
        name, *arguments = [part for part in line.removesuffix(b"\r").split(b" ") if part] or [b""]
        is_quiet = name not in _ALWAYS_ANSWERED and arguments[-1:] == [_NOREPLY]
        if name == b"flush_all":
            self._flush_all(arguments[: len(arguments) - is_quiet], is_quiet=is_quiet)
            return
        if is_quiet and name not in _MODES:
            del arguments[-1]
        handler = self._commands.get(name)
        is_first, self._has_begun = not self._has_begun, True
        if handler is None:
            self.state.send(_ERROR)
            if is_first and name[:1].isupper():
                self.state.close("a text connection begins with a capital letter, as HTTP does")
            return
        answer = handler(name, arguments)
        if answer and not is_quiet:
            self.state.send(answer)

    # -- stores --------------------------------------------------------------------------------

    def _take_changes(self, position: int) -> int:
        """Carry out the plain changes at `position` together, in the loop of changes; return where
        others begin. Beside replicas each answer has a mark of its own, so there are no runs.
        """
        state = self.state
        if _LOOPS is None or state.marks is not None or not self._has_runs():
            return position
        packet, text_ends, packet_ends = _LOOPS.changes(
            self._buffer, position, state.shared.limits.value_bytes_max, self._run_commands
        )
        if not packet or self._must_wait():
            return position
        answers, first_answer = state.answers, len(state.answers)
        state.buffer = packet
        taken = bisect_right(packet_ends, self._runs.change_run(0, len(packet)))
        state.buffer = b""
        if len(answers) > first_answer:
            outcomes = _LOOPS.outcomes(answers[first_answer:])
            answers[first_answer:] = [outcomes] if outcomes else []
        return self._ran(taken, text_ends, position)

    def _ran(self, taken: int, text_ends: list[int], position: int) -> int:
        """Note how many commands of a run were taken; return where others begin."""
        is_whole = taken == len(text_ends)
        self._run_commands = min(2 * self._run_commands, _RUN_MAX) if is_whole else _RUN_MIN
        if not taken:
            return position
        self._has_begun = True
        return text_ends[taken - 1]

    def _has_runs(self) -> bool:
        """Whether plain commands go through the loops, which know no prefixes and no locks."""
        engine = self._engine
        return not (
            _LOOPS is None or engine.set_run is None or engine.get_run is None
            or engine.locks.held or self.state.shared.prefixes.is_on
        )  # fmt: skip

    def _begin_store(self, name: bytes, arguments: list[bytes]) -> bytes:
        """Take the line of a store; its data block comes next."""
        is_quiet = arguments[-1:] == [_NOREPLY]
        fields = arguments[: len(arguments) - is_quiet]
        if len(fields) != 4 + (name == b"cas"):
            return _ERROR
        value_bytes = _number(fields[3], _UINT64_MAX)
        if value_bytes is None:
            return _BAD_CHUNK if fields[3].startswith(b"-") else _BAD_FORMAT
        flags = _number(fields[1], _UINT32_MAX)
        expiry = self._expiry(fields[2])
        cas = _number(fields[4], _UINT64_MAX) if name == b"cas" else 0
        if _is_bad_key(fields[0]) or flags is None or expiry is None or cas is None:
            self._skip_bytes = value_bytes + 2
            return _BAD_FORMAT
        if value_bytes > self.state.shared.limits.value_bytes_max:
            self._skip_bytes = value_bytes + 2
            if name == b"set":
                remove_old(self.state, *self._locate(fields[0]), 0)
            return _TOO_LARGE
        if name == b"cas":
            cas = cas or _NO_CAS
        self._store = _Store(name, fields[0], flags, expiry, value_bytes, cas, is_quiet)
        return b""

    def _take_block(self, store: _Store, position: int) -> int:
        """Store the value at `position` once it is complete."""
        buffer = self._buffer
        end = position + store.value_bytes
        if len(buffer) < end + 2:
            return position
        if self._must_wait():
            return position
        self._store = None
        if buffer[end : end + 2] != b"\r\n":
            self._skips_line = True
            if not store.is_quiet:
                self.state.send(_BAD_CHUNK)
            return end
        answer = self._apply(store, bytes(buffer[position:end]))
        if not store.is_quiet:
            self.state.send(answer)
        return end + 2

    def _apply(self, store: _Store, value: bytes) -> bytes:
        mode = _MODES[store.name]
        vb_id, key = self._locate(store.key)
        if mode in {_APPEND, _PREPEND}:
            outcome = extend(
                self._engine, vb_id, key, value, is_prepended=mode == _PREPEND, cas=0,
                value_bytes_max=self.state.shared.limits.value_bytes_max,
            )  # fmt: skip
        else:
            outcome = self._engine.store(
                mode, vb_id, key, key + value, store.flags, store.expiry, 0, store.cas
            )
        if mode in {ADD, REPLACE} and outcome[0] in {Status.KEY_EEXISTS, Status.KEY_ENOENT}:
            self.state.observes(vb_id)
            return _NOT_STORED
        if self.state.shared.prefixes.is_on:
            self.state.shared.prefixes.stored(store.key)
        return self._answer_of(vb_id, outcome, _STORED)

    # -- reads ---------------------------------------------------------------------------------

    def _get(self, name: bytes, arguments: list[bytes]) -> bytes:
        if not arguments:
            return _ERROR
        return self._begin_reading(arguments, shows_cas=name == b"gets", expiry=None)

    def _take_gets(self, position: int) -> int:
        """Answer the lines of `get` at `position` together; return where others begin. The keys
        that are left of a line go on as those of a long get.
        """
        if _LOOPS is None or not self._has_runs():
            return position
        state = self.state
        packet, text_ends, packet_ends = _LOOPS.gets(self._buffer, position, self._run_commands)
        if not packet:
            return position
        answers, first_answer = state.answers, len(state.answers)
        state.buffer = packet
        taken = bisect_right(packet_ends, self._runs.get_run(0, len(packet)))
        state.buffer = b""
        after = self._ran(taken, text_ends, position)
        if len(answers) > first_answer:
            found = b"".join(answers[first_answer:])
            answers[first_answer:] = [_LOOPS.values(found, False, True)]
        if after > position and self._buffer[after - 1] != _NEWLINE:
            self._long_get = b"get"
        return after

    def _get_and_touch(self, name: bytes, arguments: list[bytes]) -> bytes:
        if len(arguments) < 2:
            return _ERROR
        expiry = self._expiry(arguments[0])
        if expiry is None:
            return _BAD_EXPTIME
        return self._begin_reading(arguments[1:], shows_cas=name == b"gats", expiry=expiry)

    def _begin_reading(self, keys: list[bytes], *, shows_cas: bool, expiry: int | None) -> bytes:
        if any(map(_is_bad_key, keys)):
            return _BAD_FORMAT
        self._read = _Read(keys[::-1], shows_cas, expiry)
        return b""

    def _take_keys(self, name: bytes, position: int) -> int:
        """Take keys of a long get, LINE_BYTES_MAX at most; return the position behind them."""
        buffer, limit = self._buffer, position + LINE_BYTES_MAX
        end = buffer.find(b"\n", position, limit)
        is_last = end >= 0
        if not is_last:
            end = buffer.rfind(b" ", position, limit)
        if end < 0 and len(buffer) - position <= MAX_KEY_BYTES:
            return position  # the rest of a key is missing
        line = bytes(buffer[position:end]).removesuffix(b"\r") if end >= 0 else b""
        keys = [part for part in line.split(b" ") if part]
        read = _Read(keys[::-1], name == b"gets", None, is_last)
        if end < 0 or any(map(_is_bad_key, keys)):
            self._end_reading(read)
            self.state.send(_BAD_FORMAT)
            return min(limit, len(buffer)) if end < 0 else end + 1
        if is_last:
            self._long_get = None
        self._read = read
        return end + 1

    def _end_reading(self, read: _Read) -> None:
        """End a get with an error; skip the rest of its line."""
        self._read = self._long_get = None
        self._skips_line = not read.is_last

    def _go_on_reading(self, read: _Read) -> None:
        """Answer the keys that are left, until the session is full."""
        state, at, packet = self.state, 0, b""
        has_runs = read.expiry is None and self._has_runs()
        while read.keys and not state.is_full:
            if has_runs:
                if at == len(packet):
                    next_keys, at = read.keys[: -_RUN_MAX - 1 : -1], 0
                    heads = map(_GET_HEADS.__getitem__, map(len, next_keys))
                    packet = b"".join(chain.from_iterable(zip(heads, next_keys, strict=True)))
                after = self._answer_run(read, packet, at)
                if after > at:
                    at = after
                    continue
                at += HEADER_BYTES + len(read.keys[-1])
            if not self._answer_key(read):
                return
        if not read.keys:
            self._read = None
            if read.is_last:
                state.send(b"END\r\n")

    def _answer_run(self, read: _Read, packet: bytes, at: int) -> int:
        """Answer the next keys in the loop of GETs; return where others begin in the packet."""
        assert _LOOPS is not None
        state = self.state
        answers, first_answer = state.answers, len(state.answers)
        state.buffer = packet
        after = self._runs.get_run(at, len(packet))
        state.buffer = b""
        if not at and after == len(packet):
            del read.keys[-_RUN_MAX:]
        else:
            while at < after:
                at += HEADER_BYTES + len(read.keys.pop())
        if len(answers) > first_answer:
            found = b"".join(answers[first_answer:])
            answers[first_answer:] = [_LOOPS.values(found, read.shows_cas, False)]
        return after

    def _answer_key(self, read: _Read) -> bool:
        """Answer the next key; return whether the get goes on."""
        state = self.state
        key = read.keys.pop()
        found = self._look_up(key, read.expiry)
        if isinstance(found, int):
            if found == Status.KEY_ENOENT:
                return True
            self._end_reading(read)
            if found == Status.NOT_MY_VBUCKET:
                state.send(self._elsewhere(self._locate(key)[0]))
            else:
                state.send(_COMMON_ANSWERS.get(found, _NOT_NOW))
            return False
        flags = int.from_bytes(found.flags, "big")
        head = b"VALUE %b %d %d" % (key, flags, len(found.value))
        if read.shows_cas:
            head += b" %d" % found.cas
        state.send(b"%b\r\n%b\r\n" % (head, found.value))
        return True

    def _look_up(self, wire_key: bytes, expiry: int | None) -> StoredDocument | int:
        vb_id, key = self._locate(wire_key)
        self._engine.gets += 1
        found: StoredDocument | int | None
        if expiry is None:
            found = self._engine.get(vb_id, key)
        else:
            outcome, found = touch(self._engine, vb_id, key, expiry)
            if found is None:
                found = outcome[0]
        if found != Status.ETMPFAIL:  # it tells nothing about stored data
            self.state.observes_version(self._engine.partitions[vb_id], key)
        if self.state.shared.prefixes.is_on:
            self.state.shared.prefixes.got(wire_key, is_hit=isinstance(found, StoredDocument))
        if isinstance(found, StoredDocument):
            found = found._replace(value=plain(found.datatype, found.value)[1])
        return found

    # -- other changes -------------------------------------------------------------------------

    def _delete(self, _name: bytes, arguments: list[bytes]) -> bytes:
        if not arguments:
            return _ERROR
        if _is_bad_key(arguments[0]) or arguments[1:] not in ([], [b"0"]):
            return _BAD_FORMAT[:-2] + b".  Usage: delete <key> [noreply]\r\n"
        vb_id, key = self._locate(arguments[0])
        if self.state.shared.prefixes.is_on:
            self.state.shared.prefixes.deleted(arguments[0])
        return self._answer_of(vb_id, self._engine.delete(vb_id, key, 0), b"DELETED\r\n")

    def _count(self, name: bytes, arguments: list[bytes]) -> bytes:
        if len(arguments) != 2:
            return _ERROR
        if _is_bad_key(arguments[0]):
            return _BAD_FORMAT
        delta = _number(arguments[1], _UINT64_MAX)
        if delta is None:
            return _BAD_DELTA
        if name == b"decr":
            delta = -delta
        vb_id, key = self._locate(arguments[0])
        outcome, number = count(self._engine, vb_id, key, delta, initial=None, expiry=0)
        return self._answer_of(vb_id, outcome, b"%d\r\n" % number)

    def _touch(self, _name: bytes, arguments: list[bytes]) -> bytes:
        if len(arguments) != 2:
            return _ERROR
        if _is_bad_key(arguments[0]):
            return _BAD_FORMAT
        expiry = self._expiry(arguments[1])
        if expiry is None:
            return _BAD_EXPTIME
        vb_id, key = self._locate(arguments[0])
        outcome, _ = touch(self._engine, vb_id, key, expiry)
        return self._answer_of(vb_id, outcome, b"TOUCHED\r\n")

    def _flush_all(self, arguments: list[bytes], *, is_quiet: bool) -> None:
        """Delete all documents, in steps; the answer comes with the last one."""
        if self._engine.write_refusal:
            if not is_quiet:
                self.state.send(self._not_now())
        elif arguments in ([], [b"0"]):
            self.state.unfinished = Flush(self._engine)
            self._flushes_quietly = is_quiet
            self._continue_flush(0)
        elif not is_quiet:
            self.state.send(b"CLIENT_ERROR flush_all works at once; it takes no delay but 0\r\n")

    def _continue_flush(self, now_ns: int) -> None:
        """Take the next step of the flush under way; answer after the last one.

        Errors are answered despite `noreply`, or the client would believe that all is deleted.
        """
        state = self.state
        try:
            is_done = state.step_flush(now_ns)
        except StoreDamagedError as error:
            state.notes.add(
                "damaged data", command="flush_all", vb_id=error.vb_id, reason=str(error)
            )
            state.send(_DAMAGED)
        except RefusedError as error:
            state.send(b"SERVER_ERROR %b\r\n" % str(error)[:CONTEXT_CHARS_MAX].encode())
        else:
            if is_done and not self._flushes_quietly:
                state.send(b"OK\r\n")

    def _answer_of(self, vb_id: int, outcome: Outcome, success: bytes) -> bytes:
        """Return the answer to a change. It waits until what it tells is committed."""
        status = outcome[0]
        if status == Status.ETMPFAIL:  # it tells nothing about stored data
            return self._not_now(next(iter(self._engine.partitions[vb_id].holds.values()), ""))
        if status == Status.NOT_MY_VBUCKET:
            return self._elsewhere(vb_id)
        self.state.observes(vb_id)
        return _COMMON_ANSWERS.get(status, _NOT_NOW) if status else success

    def _elsewhere(self, vb_id: int) -> bytes:
        """Return the answer for a key of another node. It waits as other refusals of that kind."""
        self.state.elsewhere(self._engine.partitions[vb_id])
        return b"SERVER_ERROR %b\r\n" % self.state.place_text(vb_id).encode()

    def _not_now(self, why: str = "") -> bytes:
        why = why or self._engine.write_refusal
        return b"SERVER_ERROR %b\r\n" % why[:CONTEXT_CHARS_MAX].encode() if why else _NOT_NOW

    def _must_wait(self) -> bool:
        """Return whether a command that writes has to wait; the session is full then."""
        state = self.state
        if self._engine.writers_wait and not self._engine.write_refusal:
            state.is_full = state.pause.is_for_room = True
        return state.pause.is_for_room

    # -- the server ----------------------------------------------------------------------------

    def _stats(self, _name: bytes, arguments: list[bytes]) -> bytes:
        if arguments[:1] == [b"detail"]:
            return self._detail(b" ".join(arguments[1:]))
        if arguments == [b"reset"]:
            self.state.shared.prefixes.clear()
        stats = self.state.shared.facts.stats(b" ".join(arguments))
        if stats is None:
            return b"CLIENT_ERROR no such statistics\r\n"
        if arguments == [b"reset"]:
            return b"RESET\r\n"
        # A client may put a line break into the name of its DCP connection.
        lines = (" ".join(f"STAT {name} {value}".split()) for name, value in stats)
        return "".join(f"{line}\r\n" for line in lines).encode() + b"END\r\n"

    def _detail(self, argument: bytes) -> bytes:
        """Count by key prefix. These clients are guests, who may do everything."""
        prefixes = self.state.shared.prefixes
        if argument == b"dump":
            return prefixes.dump() + b"END\r\n"
        if prefixes.command(argument):
            return b"OK\r\n"
        return b"CLIENT_ERROR usage: stats detail on|off|dump\r\n"

    def _version(self, _name: bytes, _arguments: list[bytes]) -> bytes:
        return b"VERSION %b\r\n" % REPORTED_VERSION

    def _verbosity(self, _name: bytes, arguments: list[bytes]) -> bytes:
        is_level = len(arguments) == 1 and _number(arguments[0], _UINT32_MAX) is not None
        return b"OK\r\n" if is_level else _ERROR

    def _quit(self, _name: bytes, _arguments: list[bytes]) -> bytes:
        self.state.close("the client quit")
        return b""

    def _expiry(self, text: bytes) -> int | None:
        """Return an exptime as Unix time in seconds, 0 for never; None: it is invalid."""
        if text.startswith(b"-"):
            return None if _number(text[1:], _UINT64_MAX) is None else _LONG_PAST_S
        seconds = _number(text, _UINT32_MAX)
        return None if seconds is None else absolute_expiry(seconds, self._engine.now_s)

    def _locate(self, wire_key: bytes) -> tuple[int, bytes]:
        """Return the partition and the stored key of a key."""
        vb_id = vbucket_of(wire_key, self.state.engine.num_vbuckets)
        return vb_id, DEFAULT_COLLECTION_PREFIX + wire_key


_LONG_GET: Final = re.compile(rb" {0,8}(gets?) ")
_LONG_GET_BYTES: Final = 16
"""Where the name of a command and the space behind it end at the latest."""
_WRITES: Final = re.compile(rb" *(gats?|incr|decr|delete|touch|flush_all)\b")
"""Lines of commands that write. Stores are checked at their data block."""
_ALWAYS_ANSWERED: Final = frozenset({b"get", b"gets", b"gat", b"gats", b"stats", b"version"})
"""Commands without `noreply`: the word is a key there, or means nothing."""


def _is_bad_key(key: bytes) -> bool:
    return len(key) > MAX_KEY_BYTES


def _number(text: bytes, maximum: int) -> int | None:
    """Return an unsigned decimal number; None: it is not one, or too large."""
    if not text.isdigit() or len(text) > _DIGITS_MAX:
        return None
    number = int(text)
    return number if number <= maximum else None
