"""Checks of framing extras, durability, other changes, and of what is for consumers only."""

from __future__ import annotations

import time
from struct import pack

from clients.conformance import packet as p
from clients.conformance import pages
from clients.conformance.check import (
    NotApplicableError,
    Run,
    Written,
    add,
    check,
    ended,
    need,
    need_status,
)
from clients.conformance.checks.contents import change_of
from clients.conformance.checks.requests import after
from clients.conformance.packet import Packet
from clients.conformance.snapshots import CHANGES
from clients.conformance.wire import ClosedError, Wire

UNORDERED, ALT_REQUEST, SYNC_REPLICATION, PRESERVE_TTL = 0x0E, 0x10, 0x11, 0x14
_IMPOSSIBLE = 0xA1
_BINARY = pages.BINARY


def _set(run: Run, wire: Wire, framing: bytes, **how: int) -> Packet:
    """Return the answer to a SET with framing extras."""
    extras = pack(">II", 0, how.get("expiry", 0))
    return wire.ask(p.SET, run.vb, key=run.key(), extras=extras, value=b"f", framing=framing)


# -- framing extras --------------------------------------------------------------------------------


@check("frames.barrier", "No commands may be executed in parallel", _BINARY)
def barrier(run: Run) -> None:
    """SET with a barrier (frame info 0) is OK."""
    need_status(_set(run, run.kv(ALT_REQUEST), b"\0"))


_SERIES = "The framing extras is encoded as a series of variable-length `FrameInfo` objects."


@check("frames.unknown", _SERIES, _BINARY)
def unknown(run: Run) -> None:
    """SET with a frame info that nobody has is an error."""
    answer = _set(run, run.kv(ALT_REQUEST), b"\xd0")
    need(answer.field != p.OK, "an unknown frame info is answered OK")


@check("frames.cut-off", _SERIES, _BINARY)
def cut_off(run: Run) -> None:
    """SET with a frame info that is longer than the framing is an error, or ends the connection."""
    try:
        answer = _set(run, run.kv(ALT_REQUEST), b"\x13\1")
    except ClosedError:
        return
    need(answer.field != p.OK, "it is answered OK")


@check(
    "frames.preserve-ttl",
    "If the request modifies an existing document the expiry time from the existing document should"
    " be used",
    _BINARY,
)
def preserve_ttl(run: Run) -> None:
    """SET with frame info 5 keeps the document's expiry, as the stream shows."""
    wire = run.kv(ALT_REQUEST, PRESERVE_TTL)
    at = int(time.time()) + 100_000
    run.write(wire, run.key(), expiry=at)
    answer = need_status(_set(run, wire, b"\x50"))
    expiry = change_of(run, _token(answer)).unpack("QQIIIHB")[3]
    need(expiry == at, f"the expiry is {expiry}, not {at}")


def _token(answer: Packet) -> Written:
    uuid, seqno = answer.unpack("QQ")
    return Written(uuid, seqno, answer.cas)


# -- durability ------------------------------------------------------------------------------------

_DURABILITY_TABLE = "The first byte contains the durability level by using the following table:"


def _durable(run: Run, framing: bytes) -> Packet:
    return _set(run, run.kv(ALT_REQUEST, SYNC_REPLICATION), framing)


def _level(level: int, name: str) -> None:
    def does(run: Run) -> None:
        answer = _durable(run, bytes([0x11, level]))
        if answer.field == _IMPOSSIBLE:
            raise NotApplicableError("durability is impossible with the copies that are there")
        need_status(answer)

    add(f"durability.{name}", _DURABILITY_TABLE, _BINARY, f"SET with level {level} is OK.", does)


_level(1, "majority")
_level(2, "majority-and-persist")
_level(3, "persist-to-majority")


@check("durability.unknown-level", _DURABILITY_TABLE, _BINARY)
def unknown_level(run: Run) -> None:
    """SET with level 9 is an error."""
    answer = _durable(run, b"\x11\x09")
    need(answer.field != p.OK, "level 9 is answered OK")


@check("durability.length", "The size of the durability requirement is variable length.", _BINARY)
def length(run: Run) -> None:
    """A durability requirement of two bytes is an error: it has one or three."""
    answer = _durable(run, b"\x12\x01\x00")
    need(answer.field != p.OK, "two bytes are answered OK")


@check("durability.timeout", "If _timeout_ is specified, the valid range is 1..65535.", _BINARY)
def timeout(run: Run) -> None:
    """A timeout of 10 s is taken."""
    answer = _durable(run, b"\x13\x01" + pack(">H", 10_000))
    need_status(answer, p.OK, _IMPOSSIBLE)


@check(
    "durability.reserved-timeouts",
    "Values `0x0` and `0xffff` are reserved and will result in the request failing with"
    " `Status::Einval` (0x4) if used.",
    _BINARY,
)
def reserved_timeouts(run: Run) -> None:
    """The timeouts 0 and 0xffff are EINVAL."""
    for reserved in (0, 0xFFFF):
        need_status(_durable(run, b"\x13\x01" + pack(">H", reserved)), p.EINVAL)


@check(
    "durability.in-stream",
    "Tells the consumer that the message contains a key mutation.",
    pages.MUTATION,
)
def in_stream(run: Run) -> None:
    """A durable write comes once, as a mutation, on a connection without sync replication."""
    before = run.write(run.kv(), run.key(1))
    answer = _durable(run, b"\x11\x01")
    if answer.field == _IMPOSSIBLE:
        raise NotApplicableError("durability is impossible with the copies that are there")
    token = _token(need_status(answer))
    wire = run.dcp()
    got = ended(wire, after(run, wire, before, token))
    mine = [p.opcode_name(each.opcode) for each in got if each.key == run.key()]
    need(mine == ["MUTATION"], f"it comes as {mine}")


# -- changes by other commands ---------------------------------------------------------------------


@check("changes.touch", "Touch is used to set a new expiration time for an existing item.", _BINARY)
def touch(run: Run) -> None:
    """TOUCH comes as a mutation with the new expiry and the old value."""
    wire = run.kv()
    before = run.write(wire, run.key(), b"touched")
    at = int(time.time()) + 100_000
    need_status(wire.ask(p.TOUCH, run.vb, key=run.key(), extras=pack(">I", at)))
    got = _last_of(run, before)
    need(got.value == b"touched", f"the value is {p.shown(got.value)}")
    need(got.unpack("QQIIIHB")[3] == at, f"the expiry is {got.unpack('QQIIIHB')[3]}, not {at}")


def _last_of(run: Run, before: Written) -> Packet:
    """Return the last change of the check's key, which comes after another one."""
    wire = run.dcp()
    got = ended(wire, after(run, wire, before, run.write(run.kv(), run.key(99))))
    mine = [each for each in got if each.opcode in CHANGES and each.key == run.key()]
    need(bool(mine), f"no change of {p.shown(run.key())} comes")
    return mine[-1]


@check(
    "changes.gat",
    "GAT (Get and touch) and GATQ will return the value for the object",
    _BINARY,
)
def gat(run: Run) -> None:
    """GAT returns the value."""
    wire = run.kv()
    run.write(wire, run.key(), b"seen")
    answer = need_status(wire.ask(p.GAT, run.vb, key=run.key(), extras=pack(">I", 0)))
    need(answer.value == b"seen", f"the value is {p.shown(answer.value)}")


@check("changes.touch-missing", "set a new expiration time for an existing item", _BINARY)
def touch_missing(run: Run) -> None:
    """TOUCH of a key that is not there is KEY_ENOENT."""
    answer = run.kv().ask(p.TOUCH, run.vb, key=run.key(), extras=pack(">I", 0))
    need_status(answer, p.ENOENT)


@check(
    "changes.counter",
    "These commands will either add or remove the specified amount to the requested counter.",
    _BINARY,
)
def counter(run: Run) -> None:
    """A counter comes with its value as text."""
    wire = run.kv()
    answer = wire.ask(p.INCREMENT, run.vb, key=run.key(), extras=pack(">QQI", 1, 41, 0))
    need_status(answer)
    answer = wire.ask(p.INCREMENT, run.vb, key=run.key(), extras=pack(">QQI", 1, 0, 0))
    got = change_of(run, _token(need_status(answer)))
    need(got.value == b"42", f"the value is {p.shown(got.value)}")


@check("changes.append", "Mutations occur when transactions such as", pages.TERMS)
def append(run: Run) -> None:
    """APPEND comes as a mutation with the whole value."""
    wire = run.kv()
    before = run.write(wire, run.key(), b"first")
    need_status(wire.ask(p.APPEND, run.vb, key=run.key(), value=b", second"))
    got = _last_of(run, before)
    need(got.value == b"first, second", f"the value is {p.shown(got.value)}")


# -- for consumers only ----------------------------------------------------------------------------

_NO_CONSUMER = "If this message is sent to a connection that is not a consumer."


def _for_consumers(name: str, sentence: str, page: str, opcode: int, form: str) -> None:
    """Add a check that a producer does not take a message of a producer."""

    def does(run: Run) -> None:
        wire = run.dcp()
        run.opened(wire)
        extras = bytes(len(pack(form, *([0] * len(form.strip(">"))))))
        key = b"k" if opcode in {*CHANGES, p.PREPARE} else b""
        try:
            answer = wire.ask(opcode, run.vb, extras=extras, key=key)
        except ClosedError:
            return
        need(answer.field != p.OK, f"a producer answers {p.opcode_name(opcode)} with OK")

    title = f"{p.opcode_name(opcode)} to a producer is refused, or ends the connection."
    add(f"producers.{name}", sentence, page, title, does)


_for_consumers("marker", _NO_CONSUMER, pages.MARKER, p.MARKER, ">QQI")
_for_consumers("mutation", _NO_CONSUMER, pages.MUTATION, p.MUTATION, ">QQIIIHB")
_for_consumers("deletion", _NO_CONSUMER, pages.DELETION, p.DELETION, ">QQH")
_for_consumers("expiration", "(Disconnect)", pages.EXPIRATION, p.EXPIRATION, ">QQI")
_for_consumers("stream-end", _NO_CONSUMER, pages.STREAM_END, p.STREAM_END, ">I")
_for_consumers("system-event", _NO_CONSUMER, pages.SYSTEM_EVENT, p.SYSTEM_EVENT, ">QIB")
_for_consumers("flush", _NO_CONSUMER, pages.FLUSH, p.DCP_FLUSH, "")
_for_consumers(
    "add-stream",
    "If this command is sent to a producer endpoint.",
    pages.ADD_STREAM,
    p.DCP_ADD_STREAM,
    ">I",
)


@check(
    "producers.unordered",
    "you cannot start DCP on a connection set in unordered execution mode.",
    pages.UNORDERED,
)
def unordered(run: Run) -> None:
    """DCP_OPEN on a connection with the feature Unordered is refused, or ends it."""
    wire = run.kv(UNORDERED)
    try:
        answer = wire.open(run.dcp_name())
    except ClosedError:
        return
    need(answer.field != p.OK, "DCP_OPEN is answered OK")
