"""Checks of stream requests: what is answered, how a stream begins and ends."""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack
from typing import Any

from clients.conformance import packet as p
from clients.conformance import pages
from clients.conformance.check import (
    COLLECTIONS,
    MUTATION_SEQNO,
    QUIET_S,
    NotApplicableError,
    Run,
    Written,
    add,
    check,
    ended,
    need,
    need_parts,
    need_status,
)
from clients.conformance.checks.documents import NO_PARTITION
from clients.conformance.wire import SEQNO_MAX, Stream, Wire

_REQ = pages.STREAM_REQ


def written(run: Run, count: int = 5, value: bytes = b"v") -> list[Written]:
    """Return the tokens of new documents. Without tokens, the check is not applicable."""
    wire = run.kv()
    if MUTATION_SEQNO not in wire.features:
        raise NotApplicableError("HELLO does not grant mutation tokens")
    return run.fill(wire, count, value)


def after(run: Run, wire: Wire, first: Written, last: Written, **how: Any) -> Stream:
    """Open a stream of the changes from `first` to `last`, which are all there."""
    return run.opened(wire, first.seqno - 1, end=last.seqno, uuid=first.uuid, **how)


@check("request.ok", 'On an "OK" response the failover log is included.', _REQ)
def ok(run: Run) -> None:
    """A stream from 0 is OK, and the answer has the log that DCP_GET_FAILOVER_LOG has."""
    wire = run.dcp()
    stream = run.opened(wire)
    need_parts(stream.answer, value=True)
    asked = wire.ask(p.DCP_FAILOVER_LOG, run.vb)
    need(bool(stream.log), "the log is empty")
    need(stream.answer.value == asked.value, "the logs of the two answers differ")


@check("request.opaque", "will be used as opaque field in all commands sent for the stream.", _REQ)
def stream_opaque(run: Run) -> None:
    """Marker, mutations and STREAM_END have the request's opaque and partition."""
    tokens = written(run)
    wire = run.dcp()
    stream = after(run, wire, tokens[0], tokens[-1])
    for each in wire.messages(lambda one: one.opcode == p.STREAM_END):
        need(each.opaque == stream.opaque, f"the opaque of {each} is not 0x{stream.opaque:x}")
        need(each.field == run.vb, f"the partition of {each} is not {run.vb}")


@check("request.elsewhere", "If the VBucket the stream is requested for does not exist.", _REQ)
def elsewhere(run: Run) -> None:
    """A stream of a partition that is not there is NOT_MY_VBUCKET."""
    need_status(run.dcp().stream(NO_PARTITION).answer, p.NOT_MY_VBUCKET)


@check("request.twice", "If a stream for this VBucket already exists on the same connection.", _REQ)
def twice(run: Run) -> None:
    """A second stream of a partition on a connection is KEY_EEXISTS."""
    wire = run.dcp()
    run.opened(wire)
    need_status(wire.stream(run.vb).answer, p.EEXISTS)


@check("request.two-connections", "the same connection", _REQ)
def two_connections(run: Run) -> None:
    """Two connections stream one partition at the same time."""
    for _ in range(2):
        run.opened(run.dcp())


@check(
    "request.many",
    "In order to initiate multiple stream the consumer needs to send multiple commands.",
    _REQ,
)
def many(run: Run) -> None:
    """One connection streams several partitions."""
    answer = need_status(run.kv().ask(p.GET_ALL_VB_SEQNOS, extras=pack(">I", 1)))
    ids = [int.from_bytes(answer.value[at : at + 2], "big") for at in range(0, 40, 10)]
    if len(ids) * 10 > len(answer.value):
        raise NotApplicableError("fewer than four partitions are active here")
    wire = run.dcp()
    for vb_id in ids:
        need_status(wire.stream(vb_id).answer)


def _refused(number: str, sentence: str, title: str, bounds: Sequence[int], *statuses: int) -> None:
    """Add a check whose request counts from the high seqno: start, end, snapshot start, end."""

    def does(run: Run) -> None:
        last = written(run)[-1]
        start, end, first, final = (last.seqno + each for each in bounds)
        answer = run.dcp().stream(run.vb, start, end, last.uuid, (first, final)).answer
        need_status(answer, *statuses)

    wanted = " or ".join(map(p.status_name, statuses))
    add(f"request.{number}", sentence, _REQ, f"{title} is {wanted}.", does)


_ORDER = "The start sequence number must also be less than the end sequence number."
_BOUNDS = (
    "For all stream requests the snapshot start seqno must be less than or equal to the start seqno"
    " and the start seqno must be less than or equal to the snapshot end seqno."
)
_refused("start-above-end", _ORDER, "A start above the end", (0, -2, 0, 0), p.ERANGE)
_refused(
    "snapshot-above-start",
    _BOUNDS,
    "A snapshot that starts above the start",
    (-2, 5, -1, 0),
    p.ERANGE,
)
_refused(
    "snapshot-below-start",
    _BOUNDS,
    "A snapshot that ends below the start",
    (0, 5, -3, -1),
    p.ERANGE,
)
_refused(
    "start-above-high",
    "the start sequence number cannot be bigger than the current high sequence number in"
    " the VBucket.",
    "A start above the high seqno, with the newest uuid",
    (1000, 2000, 1000, 1000),
    p.ERANGE,
    p.ROLLBACK,
)


@check("request.extras", "Must have extras", _REQ)
def extras(run: Run) -> None:
    """A stream request without extras is EINVAL."""
    need_status(run.dcp().ask(p.DCP_STREAM_REQ, run.vb), p.EINVAL)


@check("request.short-extras", "Total 48 bytes", _REQ)
def short_extras(run: Run) -> None:
    """A stream request with 47 bytes of extras is EINVAL."""
    need_status(run.dcp().ask(p.DCP_STREAM_REQ, run.vb, extras=bytes(47)), p.EINVAL)


@check("request.key", "Must not have key", _REQ)
def key(run: Run) -> None:
    """A stream request with a key is EINVAL."""
    need_status(run.dcp().ask(p.DCP_STREAM_REQ, run.vb, extras=bytes(48), key=b"k"), p.EINVAL)


@check(
    "request.uuid-zero",
    "Set VBucket UUID to 0 to receive all data from the specified vbucket.",
    _REQ,
)
def uuid_zero(run: Run) -> None:
    """A stream from 0 with uuid 0 shows what was written."""
    tokens = written(run)
    wire = run.dcp()
    got = run.complete(wire, end=tokens[-1].seqno)
    seqnos = {int.from_bytes(each.extras[:8], "big") for each in got if each.opcode == p.MUTATION}
    need({each.seqno for each in tokens} <= seqnos, "changes are missing")


@check(
    "request.end",
    "If not 0 the server will end the stream when the complete snapshot containing this"
    " sequence number has been sent to the client.",
    _REQ,
)
def end(run: Run) -> None:
    """A stream with an end shows all up to it, then STREAM_END with reason 0."""
    tokens = written(run)
    wire = run.dcp()
    got = ended(wire, after(run, wire, tokens[0], tokens[-1]))
    need(got[-1].unpack("I") == (0,), f"the reason is {got[-1].extras.hex()}")
    seqnos = [int.from_bytes(each.extras[:8], "big") for each in got if each.opcode == p.MUTATION]
    need(tokens[-1].seqno in seqnos, f"seqno {tokens[-1].seqno} is missing in {seqnos}")


@check("request.no-end", "the end sequence number should be 2^64-1.", pages.BUILDING)
def no_end(run: Run) -> None:
    """A stream without an end shows what is written later."""
    tokens = written(run, 1)
    wire = run.dcp()
    run.opened(wire, tokens[0].seqno, uuid=tokens[0].uuid)
    later = run.write(run.kv(), run.key(50), b"later")
    got = wire.messages(lambda each: each.opcode == p.MUTATION)
    need(int.from_bytes(got[-1].extras[:8], "big") == later.seqno, f"it shows {got[-1]}")


@check(
    "request.resume",
    "the server won't send any data that the application has already received",
    pages.CONCEPTS,
)
def resume(run: Run) -> None:
    """A stream from a seqno shows only what is above it."""
    tokens = written(run, 6)
    wire = run.dcp()
    got = ended(wire, after(run, wire, tokens[3], tokens[-1]))
    seqnos = [int.from_bytes(each.extras[:8], "big") for each in got if each.opcode == p.MUTATION]
    need(seqnos == [each.seqno for each in tokens[3:]], f"it shows {seqnos}")


@check(
    "request.resume-in-snapshot",
    "use the start sequence of the last partial snapshot that was received.",
    _REQ,
)
def resume_in_snapshot(run: Run) -> None:
    """A request from the middle of a snapshot, with its bounds, is OK and shows the rest."""
    tokens = written(run, 6)
    wire = run.dcp()
    bounds = (tokens[0].seqno, tokens[-1].seqno)
    stream = run.opened(
        wire, tokens[2].seqno, end=tokens[-1].seqno, uuid=tokens[0].uuid, snapshot=bounds
    )
    got = ended(wire, stream)
    seqnos = [int.from_bytes(each.extras[:8], "big") for each in got if each.opcode == p.MUTATION]
    need(seqnos == [each.seqno for each in tokens[3:]], f"it shows {seqnos}")


@check(
    "request.caught-up",
    "The Start sequence number is the last sequence number that the Consumer received",
    pages.BUILDING,
)
def caught_up(run: Run) -> None:
    """A stream from the high seqno is OK, and nothing comes until there is a change."""
    last = written(run)[-1]
    wire = run.dcp()
    run.opened(wire, last.seqno, uuid=last.uuid)
    got = [each for each in wire.messages_for(QUIET_S) if each.opcode == p.MUTATION]
    need(not got, f"{len(got)} changes came again")


# -- flags -----------------------------------------------------------------------------------------


@check(
    "request.to-latest",
    "The server will overwrite the value of the end sequence number field with the value"
    " of the latest sequence number.",
    pages.ADD_STREAM,
)
def to_latest(run: Run) -> None:
    """Flag 0x04 ends the stream at the seqno that was the latest."""
    tokens = written(run)
    wire = run.dcp()
    got = run.complete(wire, tokens[0].seqno - 1, uuid=tokens[0].uuid, flags=0x04)
    need(got[-1].unpack("I") == (0,), f"the reason is {got[-1].extras.hex()}")
    seqnos = [int.from_bytes(each.extras[:8], "big") for each in got if each.opcode == p.MUTATION]
    need(tokens[-1].seqno in seqnos, f"it ended at {seqnos[-1:]} of {tokens[-1].seqno}")


@check(
    "request.disk-only",
    "items will be sent up to the sequence number specified by the end sequence number or"
    " the last on disk item when the stream is created.",
    pages.ADD_STREAM,
)
def disk_only(run: Run) -> None:
    """Flag 0x02 shows disk snapshots, and ends the stream."""
    tokens = written(run)
    wire = run.dcp()
    got = run.complete(wire, flags=0x02, end=SEQNO_MAX)
    markers = [each.unpack("QQI") for each in got if each.opcode == p.MARKER]
    need(all(kind & 0x02 for _, _, kind in markers), f"a marker is not of the disk: {markers}")
    last = max((end for _, end, _ in markers), default=0)
    need(last >= tokens[-1].seqno, f"it ends at {last} of {tokens[-1].seqno}")


@check(
    "request.active-only",
    "If the vbucket is not active, the request fails with error",
    pages.ADD_STREAM,
)
def active_only(run: Run) -> None:
    """Flag 0x10 on an active partition is OK."""
    run.opened(run.dcp(), flags=0x10)


@check(
    "request.strict-uuid",
    "check for vb_uuid match even at start_seqno 0 before adding the stream.",
    pages.ADD_STREAM,
)
def strict_uuid(run: Run) -> None:
    """Flag 0x20 with start 0 and an unknown uuid is ROLLBACK."""
    written(run, 1)
    answer = run.dcp().stream(run.vb, uuid=0xBAD0_0BAD, flags=0x20).answer
    need_status(answer, p.ROLLBACK)


@check(
    "request.strict-uuid-known",
    "Specifies that the server should check for vb_uuid match",
    pages.ADD_STREAM,
)
def strict_uuid_known(run: Run) -> None:
    """Flag 0x20 with start 0 and the newest uuid is OK."""
    uuid = written(run, 1)[0].uuid
    run.opened(run.dcp(), uuid=uuid, flags=0x20)


@check("request.from-latest", "this means the start parameter is ignored.", pages.ADD_STREAM)
def from_latest(run: Run) -> None:
    """Flag 0x40 shows only what is written later."""
    written(run)
    wire = run.dcp(COLLECTIONS)
    stream = wire.stream(run.vb, flags=0x40)
    need_status(stream.answer, may_refuse=True)
    later = run.write(run.kv(), run.key(50))
    got = wire.messages(lambda each: each.opcode == p.MUTATION)
    need(int.from_bytes(got[-1].extras[:8], "big") == later.seqno, f"it shows {got[-1]} first")


@check(
    "request.ignore-purged",
    "skip rollback if the client is behind the purge seqno",
    pages.ADD_STREAM,
)
def ignore_purged(run: Run) -> None:
    """Flag 0x80 is taken."""
    last = written(run)[-1]
    answer = run.dcp().stream(run.vb, last.seqno, uuid=last.uuid, flags=0x80).answer
    need_status(answer, may_refuse=True)


@check("request.unknown-flag", "If data in this packet is malformed or incomplete", _REQ)
def unknown_flag(run: Run) -> None:
    """A flag that is not defined is EINVAL."""
    need_status(run.dcp().stream(run.vb, flags=0x4000_0000).answer, p.EINVAL, p.NOT_SUPPORTED)


# -- the value -------------------------------------------------------------------------------------


def _value(number: str, sentence: str, value: bytes, *statuses: int) -> None:
    def does(run: Run) -> None:
        answer = run.dcp(COLLECTIONS).stream(run.vb, value=value).answer
        need_status(answer, *statuses)

    wanted = " or ".join(map(p.status_name, statuses))
    title = f"A stream request with the value {value.decode()} is {wanted}."
    add(f"value.{number}", sentence, pages.STREAM_VALUE, title, does)


_value(
    "unknown-key",
    "The stream-request code does not error for unknown keys.",
    b'{"conformance":1}',
    p.OK,
)
_value(
    "both-filters",
    "The stream-request will fail with `Invalid` if `collections` and `scope` are defined.",
    b'{"collections":["0"],"scope":"0"}',
    p.EINVAL,
)
_value(
    "collections-no-array",
    "The stream-request will fail if `collections` is not a JSON array",
    b'{"collections":"0"}',
    p.EINVAL,
)
_value(
    "scope-no-string",
    "The stream-request will fail if `scope` is not a JSON string",
    b'{"scope":0}',
    p.EINVAL,
)
_value(
    "uid-no-string",
    "The stream-request will fail if `uid` is not a JSON string",
    b'{"uid":1}',
    p.EINVAL,
)
_value(
    "purge-no-string",
    "The stream-request will fail if `purge_seqno` is not a JSON string.",
    b'{"purge_seqno":5}',
    p.EINVAL,
)
_value(
    "purge-no-number",
    "The stream-request will fail if `purge_seqno` value cannot be converted",
    b'{"purge_seqno":"many"}',
    p.EINVAL,
)
_value(
    "sid-not-enabled",
    "The stream-request will fail if `sid` is included and the client has not",
    b'{"sid":7}',
    p.STREAMID_INVALID,
)
_value("no-json", "encodes a JSON object to configure the stream", b"{no json", p.EINVAL)
_value("no-object", "encodes a JSON object to configure the stream", b"[]", p.EINVAL)
_value(
    "collections-empty",
    "The key specifies an array of collection-IDs",
    b'{"collections":["0"]}',
    p.OK,
)
_value(
    "scope",
    "The value is a JSON string representing the ID as a base-16 string",
    b'{"scope":"0"}',
    p.OK,
)
_value(
    "unknown-collection",
    "the set of collection IDs the stream must include",
    b'{"collections":["fffff0"]}',
    p.UNKNOWN_COLLECTION,
)
_value(
    "unknown-scope", "the scope-ID the stream must include", b'{"scope":"fffff0"}', p.UNKNOWN_SCOPE
)
_value("uid", "This value is optional and is only used to assist debugging", b'{"uid":"0"}', p.OK)


# -- closing ---------------------------------------------------------------------------------------


@check("close.ok", "to close the stream for a named vbucket as soon as possible.", pages.CLOSE)
def close_ok(run: Run) -> None:
    """CLOSE_STREAM of an open stream is OK."""
    wire = run.dcp()
    run.opened(wire)
    need_parts(need_status(wire.ask(p.DCP_CLOSE_STREAM, run.vb)))


@check(
    "close.none",
    "If a stream does not exist for the vbucket specfied on this connection.",
    pages.CLOSE,
)
def close_none(run: Run) -> None:
    """CLOSE_STREAM without a stream is KEY_ENOENT."""
    need_status(run.dcp().ask(p.DCP_CLOSE_STREAM, run.vb), p.ENOENT, p.STREAM_NOT_FOUND)


@check(
    "close.end-message",
    "will send [STREAM_END](./stream-end.md) message to the consumer indicating that the"
    " stream was closed by force.",
    pages.CLOSE,
)
def close_end_message(run: Run) -> None:
    """With the control, CLOSE_STREAM brings STREAM_END with reason 1."""
    wire = run.dcp(controls=[("send_stream_end_on_client_close_stream", "true")])
    stream = run.opened(wire)
    need_status(wire.ask(p.DCP_CLOSE_STREAM, run.vb))
    got = ended(wire, stream)
    need(got[-1].unpack("I") == (1,), f"the reason is {got[-1].extras.hex()}")


@check(
    "close.no-end-message",
    "The consumers should not expect any [STREAM_END](./stream-end.md) message.",
    pages.CLOSE,
)
def close_no_end_message(run: Run) -> None:
    """Without the control, CLOSE_STREAM brings no STREAM_END."""
    wire = run.dcp()
    run.opened(wire)
    need_status(wire.ask(p.DCP_CLOSE_STREAM, run.vb))
    got = [each for each in wire.messages_for(QUIET_S) if each.opcode == p.STREAM_END]
    need(not got, "STREAM_END came")


@check("close.silence", "will stop sending messages to the consumer on this stream.", pages.CLOSE)
def close_silence(run: Run) -> None:
    """After CLOSE_STREAM, changes are not sent any more."""
    wire = run.dcp()
    last = written(run, 1)[-1]
    run.opened(wire, last.seqno, uuid=last.uuid)
    need_status(wire.ask(p.DCP_CLOSE_STREAM, run.vb))
    run.write(run.kv(), run.key(60))
    got = [each for each in wire.messages_for(QUIET_S) if each.opcode == p.MUTATION]
    need(not got, f"{len(got)} changes came")


@check("close.reopen", "Sent to server controling an DCP stream to close the stream", pages.CLOSE)
def close_reopen(run: Run) -> None:
    """After CLOSE_STREAM, the partition can be streamed again on the connection."""
    wire = run.dcp()
    run.opened(wire)
    need_status(wire.ask(p.DCP_CLOSE_STREAM, run.vb))
    run.opened(wire)


@check(
    "close.extras",
    "If data in this packet is malformed or incomplete then this error is returned.",
    pages.CLOSE,
)
def close_extras(run: Run) -> None:
    """CLOSE_STREAM with extras is EINVAL."""
    wire = run.dcp()
    run.opened(wire)
    need_status(wire.ask(p.DCP_CLOSE_STREAM, run.vb, extras=bytes(4)), p.EINVAL)


@check(
    "close.elsewhere",
    "If a stream does not exist for the vbucket specfied on this connection.",
    pages.CLOSE,
)
def close_elsewhere(run: Run) -> None:
    """CLOSE_STREAM of a partition that is not there is an error."""
    answer = run.dcp().ask(p.DCP_CLOSE_STREAM, NO_PARTITION)
    need_status(answer, p.ENOENT, p.STREAM_NOT_FOUND, p.NOT_MY_VBUCKET)


@check("end.layout", "Must have extras", pages.STREAM_END)
def end_layout(run: Run) -> None:
    """STREAM_END has 4 bytes of extras, neither key nor value."""
    tokens = written(run, 1)
    wire = run.dcp()
    got = ended(wire, after(run, wire, tokens[0], tokens[0]))
    need_parts(got[-1], extras=4)


@check("end.at-once", "The stream has finished without error.", pages.STREAM_END)
def end_at_once(run: Run) -> None:
    """A stream that ends where it starts ends with reason 0, and shows nothing."""
    last = written(run)[-1]
    wire = run.dcp()
    stream = wire.stream(run.vb, last.seqno, last.seqno, last.uuid)
    if stream.answer.field == p.ERANGE:
        return  # the page asks for start < end, too
    need_status(stream.answer)
    got = ended(wire, stream)
    need([each.opcode for each in got] == [p.STREAM_END], f"it shows {len(got) - 1} messages")


@check("end.reopen", "indicate that the producer has no more messages to stream", pages.STREAM_END)
def end_reopen(run: Run) -> None:
    """After STREAM_END, the partition can be streamed again on the connection."""
    tokens = written(run, 2)
    wire = run.dcp()
    for _ in range(2):
        ended(wire, after(run, wire, tokens[0], tokens[1]))


@check(
    "end.connection-stays",
    "the Producer will send a [Stream End](commands/stream-end.md) message",
    pages.FLOW_OF,
)
def end_connection_stays(run: Run) -> None:
    """After the last STREAM_END the connection still answers."""
    tokens = written(run, 1)
    wire = run.dcp()
    ended(wire, after(run, wire, tokens[0], tokens[0]))
    need_status(wire.ask(p.DCP_FAILOVER_LOG, run.vb))
