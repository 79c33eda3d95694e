"""Checks of DCP connections: open, controls, NOOPs, flow control."""

from __future__ import annotations

from struct import pack

from clients.conformance import packet as p
from clients.conformance import pages
from clients.conformance.check import (
    COLLECTIONS,
    QUIET_S,
    SNAPPY,
    NotApplicableError,
    Run,
    add,
    check,
    need,
    need_parts,
    need_status,
)
from clients.conformance.packet import Packet
from clients.conformance.wire import ClosedError, SilenceError, Wire

NOOP_S = 1.0
"""The shortest interval of NOOPs that kv_engine takes; its page says 20."""


@check("open.producer", "requests a producer is created", pages.OPEN)
def producer(run: Run) -> None:
    """DCP_OPEN with flag 1 and a name is OK; the answer is empty."""
    need_parts(need_status(run.kv().open(run.dcp_name())))


@check("open.consumer", "if this bit is clear a consumer is created.", pages.OPEN)
def consumer(run: Run) -> None:
    """DCP_OPEN with flags 0 is OK."""
    need_status(run.kv().open(run.dcp_name(), 0), may_refuse=True)


@check("open.no-name", "Must have key", pages.OPEN)
def no_name(run: Run) -> None:
    """DCP_OPEN without a name is EINVAL."""
    need_status(run.kv().open(""), p.EINVAL)


@check("open.no-extras", "Must have an 8 byte extras section", pages.OPEN)
def no_extras(run: Run) -> None:
    """DCP_OPEN without extras is EINVAL."""
    need_status(run.kv().open(run.dcp_name(), extras=b""), p.EINVAL)


@check("open.short-extras", "Must have an 8 byte extras section", pages.OPEN)
def short_extras(run: Run) -> None:
    """DCP_OPEN with 4 bytes of extras is EINVAL."""
    need_status(run.kv().open(run.dcp_name(), extras=pack(">I", 1)), p.EINVAL)


@check("open.name-200", "the name take up no more space than 200 bytes.", pages.OPEN)
def name_200(run: Run) -> None:
    """A name of 200 bytes is OK."""
    need_status(run.kv().open(run.dcp_name().ljust(200, "n")))


@check("open.name-201", "the name take up no more space than 200 bytes.", pages.OPEN)
def name_201(run: Run) -> None:
    """A name of 201 bytes is refused, or the connection ends."""
    try:
        answer = run.kv().open(run.dcp_name().ljust(201, "n"))
    except ClosedError:
        return
    need(answer.field != p.OK, "a name of 201 bytes is answered OK")


@check("open.invalid-flag", "Should always be clear.", pages.OPEN)
def invalid_flag(run: Run) -> None:
    """DCP_OPEN with flag 2, which is invalid, is EINVAL."""
    need_status(run.kv().open(run.dcp_name(), 3), p.EINVAL)


@check(
    "open.same-name",
    "the established connection will be closed and the new connection will be created"
    " successfully.",
    pages.OPEN,
)
def same_name(run: Run) -> None:
    """A second connection with the name of an open one is OK, and the first ends."""
    name = run.dcp_name()
    first = run.dcp(name=name)
    run.dcp(name=name)
    need(first.is_closed(), "the first connection stays open")


@check("open.value", "If non-empty, the value must be a JSON object", pages.OPEN)
def value(run: Run) -> None:
    """DCP_OPEN with a value that is no JSON is EINVAL."""
    need_status(run.kv().open(run.dcp_name(), value=b"{no json"), p.EINVAL)


@check("open.consumer-name", "Only valid if `DCP type` is `Consumer`.", pages.OPEN)
def consumer_name(run: Run) -> None:
    """A producer with a `consumer_name` is EINVAL."""
    wire = run.kv()
    answer = wire.open(run.dcp_name(), value=b'{"consumer_name":"x"}', datatype=0)
    need_status(answer, p.EINVAL)


@check(
    "open.before-bucket",
    "Sent by an external entity to a producer or a consumer to create a logical channel.",
    pages.OPEN,
)
def before_bucket(run: Run) -> None:
    """A stream request on a connection that is no DCP connection is refused, or ends it."""
    wire = run.kv()
    try:
        answer = wire.stream(run.vb).answer
    except ClosedError:
        return
    need(answer.field != p.OK, "a stream request before DCP_OPEN is answered OK")


@check("open.flags-accepted", "Flags are specified as a bitmask in network byte order", pages.OPEN)
def flags_accepted(run: Run) -> None:
    """Each of the flags 0x04, 0x08, 0x20, 0x40 and 0x100 with 0x01 is OK."""
    for flag in (0x04, 0x08, 0x20, 0x40, 0x104):
        answer = run.kv(COLLECTIONS).open(run.dcp_name(), 1 | flag)
        need(answer.field == p.OK, f"flag 0x{flag:x} is answered {p.status_name(answer.field)}")


# -- controls --------------------------------------------------------------------------------------


def _control(number: str, sentence: str, key: str, text: str, *statuses: int) -> None:
    def does(run: Run) -> None:
        wire = run.dcp(COLLECTIONS) if key in _OF_COLLECTIONS else run.dcp()
        need_status(wire.control(key, text), *statuses, may_refuse=p.OK in statuses)

    wanted = " or ".join(map(p.status_name, statuses))
    title = f"Control {key} = {text or 'nothing'} is {wanted}."
    add(f"control.{number}", sentence, pages.CONTROL, title, does)


_OF_COLLECTIONS = frozenset({"max_marker_version", "change_streams"})
_INVALID = "Also, if the value of the control parameter is not valid."
_control("noop", 'should be set to either "true" or "false"', "enable_noop", "true", p.OK)
_control("noop-value", _INVALID, "enable_noop", "perhaps", p.EINVAL)
_control(
    "noop-interval",
    "an integer in string form between 20 and 10800",
    "set_noop_interval",
    "20",
    p.OK,
)
_control("noop-interval-text", _INVALID, "set_noop_interval", "often", p.EINVAL)
_control(
    "noop-interval-max",
    "an integer in string form between 20 and 10800",
    "set_noop_interval",
    "100000",
    p.EINVAL,
)
_control(
    "buffer",
    "an integer in string form between 1 and 2^32",
    "connection_buffer_size",
    "65536",
    p.OK,
)
_control("buffer-text", _INVALID, "connection_buffer_size", "large", p.EINVAL)
_control("buffer-negative", _INVALID, "connection_buffer_size", "-1", p.EINVAL)
for _priority in ("high", "medium", "low"):
    _control(
        f"priority-{_priority}",
        'The priority may be set to "high", "medium", or "low".',
        "set_priority",
        _priority,
        p.OK,
    )
_control("priority-value", _INVALID, "set_priority", "highest", p.EINVAL)
_control(
    "cursor-dropping",
    "Tells the server that the client can tolerate the server dropping",
    "supports_cursor_dropping",
    "true",
    p.OK,
)
_control(
    "stream-end",
    'the client expects "STREAM_END" msg when the client initiates the stream close.',
    "send_stream_end_on_client_close_stream",
    "true",
    p.OK,
)
_control(
    "expiry-opcode",
    "would like to receive expiry opcodes when an item is expired.",
    "enable_expiry_opcode",
    "true",
    p.OK,
)
_control(
    "stream-id",
    "would like to create multiple DCP streams for a vbucket.",
    "enable_stream_id",
    "true",
    p.OK,
)
_control(
    "oso",
    "Tells the server that the client supports out of order DCP.",
    "enable_out_of_order_snapshots",
    "true",
    p.OK,
)
_control(
    "oso-advanced",
    "a Seqno Advanced message is also included",
    "enable_out_of_order_snapshots",
    "true_with_seqno_advanced",
    p.OK,
)
for _order in ("round-robin", "sequential"):
    _control(
        f"backfill-{_order}",
        "Tells the server what order the client would like to receive backfills in.",
        "backfill_order",
        _order,
        p.OK,
    )
_control("backfill-value", _INVALID, "backfill_order", "at random", p.EINVAL)
_control(
    "status-codes",
    "Tells the DCP producer that it may receive status codes",
    "v7_dcp_status_codes",
    "true",
    p.OK,
)
_control(
    "history",
    "Enables the DCP connection to allow history snapshots in DCP streams.",
    "change_streams",
    "true",
    p.OK,
)
_control(
    "history-off",
    "A configuration of `false` is invalid and will be rejected.",
    "change_streams",
    "false",
    p.EINVAL,
    p.NOT_SUPPORTED,
)
_control(
    "marker-version",
    "Set the maximum snapshot marker format the client can accept.",
    "max_marker_version",
    "2.2",
    p.OK,
)
_control("marker-version-value", _INVALID, "max_marker_version", "9.9", p.EINVAL)
_control(
    "flatbuffers",
    "must send system events with a FlatBuffers value.",
    "flatbuffers_system_events",
    "true",
    p.OK,
)
_control(
    "cache-transfer",
    "Discover if the Producer supports and has enabled the cache transfer",
    "cache_transfer",
    "true",
    p.OK,
)
_control(
    "unknown-key",
    "If an invalid or incorrect control parameter was sent.",
    "conformance_no_such_key",
    "true",
    p.EINVAL,
    p.NOT_SUPPORTED,
)
_control("no-value", "Must have a value", "enable_noop", "", p.EINVAL)
_control("no-key", "Must have a key", "", "true", p.EINVAL)


@check(
    "control.compression",
    "Clients need to negotiate for snappy using HELO as a prerequisite",
    pages.CONTROL,
)
def compression(run: Run) -> None:
    """force_value_compression is refused without Snappy, and OK with it."""
    answer = run.dcp().control("force_value_compression", "true")
    need(answer.field != p.OK, "it is OK without Snappy")
    need_status(run.dcp(SNAPPY).control("force_value_compression", "true"), may_refuse=True)


@check(
    "control.before-open",
    "Sent by the Consumer to the Producer in order to configure connection settings.",
    pages.CONTROL,
)
def before_open(run: Run) -> None:
    """A control on a connection that is no DCP connection is refused, or ends it."""
    try:
        answer = run.kv().control("enable_noop", "true")
    except ClosedError:
        return
    need(answer.field != p.OK, "a control before DCP_OPEN is answered OK")


# -- NOOPs -----------------------------------------------------------------------------------------


def _with_noops(run: Run) -> Wire:
    wire = run.dcp()
    answer = wire.control("set_noop_interval", "1")
    if answer.field == p.EINVAL:
        raise NotApplicableError("NOOPs every second are refused; the page says 20 to 10800")
    need_status(answer)
    run.opened(wire)
    return wire


def _noop(wire: Wire, timeout_s: float = 5 * NOOP_S) -> Packet:
    """Return the next NOOP; other messages may come before."""
    while True:
        packet = wire.receive(timeout_s)
        if packet.opcode == p.DCP_NOOP and packet.is_request:
            return packet


@check(
    "noop.comes",
    "A No-Op message is sent by the Producer to the Consumer if the Producer has not sent"
    " any messages for a given interval of time.",
    pages.NOOP,
)
def noop_comes(run: Run) -> None:
    """With NOOPs every second, one comes to an idle stream."""
    need_parts(_noop(_with_noops(run)))


@check(
    "noop.again",
    "The Producer will expect a response when it sends the Consumer this message",
    pages.DEAD,
)
def noop_again(run: Run) -> None:
    """After an answered NOOP, the connection stays, and another comes."""
    wire = _with_noops(run)
    _noop(wire)
    _noop(wire)


@check(
    "noop.unanswered",
    "If no response is seen during this period then the Producer will disconnect.",
    pages.NOOP,
)
def noop_unanswered(run: Run) -> None:
    """A NOOP that is not answered ends the connection, if the server's idle limit is short."""
    wire = _with_noops(run)
    wire.answers_noops = False
    _noop(wire)
    if not wire.is_closed(3 * NOOP_S):
        raise NotApplicableError(
            "the connection is still open; since 5.0 it ends after dcp_idle_timeout, 360 s"
        )


@check("noop.to-producer", "If a No-Op reequest is sent to a Producer.", pages.NOOP)
def noop_to_producer(run: Run) -> None:
    """DCP_NOOP to a producer is refused, or ends the connection."""
    try:
        answer = run.dcp().ask(p.DCP_NOOP)
    except ClosedError:
        return
    need(answer.field != p.OK, "a producer answers DCP_NOOP with OK")


@check(
    "noop.off",
    "Dead connection detection is turned off by default and must be enabled by the Consumer.",
    pages.DEAD,
)
def noop_off(run: Run) -> None:
    """Without enable_noop, no NOOP comes."""
    wire = run.kv()
    need_status(wire.open(run.dcp_name()))
    if wire.control("set_noop_interval", "1").field != p.OK:
        raise NotApplicableError("NOOPs every second are refused")
    run.opened(wire)
    try:
        _noop(wire, 2 * NOOP_S)
    except SilenceError:
        return
    need(False, "a NOOP came")


# -- flow control ----------------------------------------------------------------------------------

WINDOW = 4096
VALUE = bytes(1000)


def _window(run: Run, size: int = WINDOW) -> tuple[Wire, int, list[Packet]]:
    """Fill a partition, and stream it through a window; return what came, and the end seqno."""
    kv = run.kv()
    written = run.fill(kv, 20, VALUE)
    wire = run.dcp(controls=[("connection_buffer_size", str(size))])
    run.opened(wire, written[0].seqno - 1, end=written[-1].seqno, uuid=written[0].uuid)
    return wire, written[-1].seqno, wire.messages_for(QUIET_S)


def _seqno(packet: Packet) -> int:
    return int.from_bytes(packet.extras[:8], "big") if packet.opcode == p.MUTATION else 0


@check(
    "flow.stops",
    "Once the Producer fills the Consumers buffer the Producer will put the connection to sleep",
    pages.FLOW,
)
def flow_stops(run: Run) -> None:
    """With a window of 4 KiB, 20 documents of 1,000 bytes do not all come."""
    _, end, got = _window(run)
    need(all(_seqno(each) != end for each in got), "all came without an acknowledgement")


@check(
    "flow.fills",
    "The Producer will continue to send messages to the Consumer as long as there is any"
    " available space in the Consumers buffer.",
    pages.FLOW,
)
def flow_fills(run: Run) -> None:
    """The server does not stop before the window is full."""
    _, _, got = _window(run)
    size = sum(each.size for each in got)
    need(size >= WINDOW, f"it stopped after {size} of {WINDOW} bytes")


@check(
    "flow.counts-packets",
    "In the acknowledgement we account for both data bytes and message header bytes.",
    pages.BUFFER_ACK,
)
def flow_counts_packets(run: Run) -> None:
    """All but the last packet are below the window: headers count."""
    _, _, got = _window(run)
    before_last = sum(each.size for each in got[:-1])
    need(before_last < WINDOW, f"{before_last} bytes were out before the last packet")


@check(
    "flow.goes-on",
    "the Producer will decrement the amount of bytes sent to the Consumer by the amount"
    " of bytes specified",
    pages.FLOW,
)
def flow_goes_on(run: Run) -> None:
    """With acknowledgements of all that came, the stream comes to its end."""
    wire, _, got = _window(run)
    while not any(each.opcode == p.STREAM_END for each in got):
        wire.send(p.BUFFER_ACK, extras=pack(">I", sum(each.size for each in got)))
        got = [wire.message()]


@check(
    "flow.ack-part",
    "The Producer will then continue to send data until it reaches the maximum send size.",
    pages.FLOW,
)
def flow_ack_part(run: Run) -> None:
    """Acknowledging one packet brings about one more, not all."""
    wire, end, got = _window(run)
    wire.send(p.BUFFER_ACK, extras=pack(">I", got[-1].size))
    more = wire.messages_for(QUIET_S)
    need(bool(more), "nothing came after the acknowledgement")
    need(len(more) <= 2 and all(_seqno(each) != end for each in more), f"{len(more)} came")


@check(
    "flow.overflows",
    "the server may send an item that would not fit into the Consumers buffer",
    pages.FLOW,
)
def flow_overflows(run: Run) -> None:
    """A document larger than the whole window comes."""
    _, _, got = _window(run, 128)
    need(any(each.opcode in {p.MARKER, p.MUTATION} for each in got), "nothing came")


@check(
    "flow.zero",
    "This means that the connection or streams will not use any flow control.",
    pages.FLOW,
)
def flow_zero(run: Run) -> None:
    """With a buffer size of 0, everything comes without acknowledgements."""
    _, end, got = _window(run, 0)
    need(any(_seqno(each) == end for each in got), "not all came")


@check(
    "flow.noop-is-free",
    "Every DCP [request](../../BinaryProtocol.md#magic-byte) message the server sends"
    " except for [no-op](commands/no-op.md) requires",
    pages.FLOW,
)
def flow_noop_is_free(run: Run) -> None:
    """A full window does not hold back the answer to a request."""
    wire, _, _ = _window(run)
    need_status(wire.ask(p.DCP_FAILOVER_LOG, run.vb))


@check("flow.ack-silent", "DCP consumers should not expect this", pages.BUFFER_ACK)
def flow_ack_silent(run: Run) -> None:
    """BUFFER_ACK has no answer: that of the request behind it comes first."""
    wire = run.dcp(controls=[("connection_buffer_size", "4096")])
    wire.send(p.BUFFER_ACK, extras=pack(">I", 0))
    asked = wire.send(p.DCP_FAILOVER_LOG, run.vb)
    answer = wire.receive()
    need(answer.opaque == asked, f"it is answered: {answer}")


@check("flow.ack-extras", "Must have a 4 byte extras section", pages.BUFFER_ACK)
def flow_ack_extras(run: Run) -> None:
    """BUFFER_ACK with 2 bytes of extras is EINVAL, or ends the connection."""
    wire = run.dcp(controls=[("connection_buffer_size", "4096")])
    try:
        need_status(wire.ask(p.BUFFER_ACK, extras=b"\0\0"), p.EINVAL)
    except ClosedError:
        return


@check(
    "flow.per-stream",
    "Current versions of Couchbase only support connection based flow control.",
    pages.FLOW,
)
def flow_per_stream(run: Run) -> None:
    """The control stream_buffer_size is refused, or taken."""
    answer = run.dcp().control("stream_buffer_size", "4096")
    need_status(answer, p.OK, p.EINVAL, *p.REFUSALS)
