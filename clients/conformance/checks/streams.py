"""Checks of how a stream goes: snapshots, their order, OSO, streams beside each other."""

from __future__ import annotations

import json
from struct import pack
from typing import Any

from clients.conformance import packet as p
from clients.conformance import pages
from clients.conformance.check import (
    COLLECTIONS,
    QUIET_S,
    NotApplicableError,
    Run,
    Written,
    check,
    ended,
    need,
    need_status,
)
from clients.conformance.checks.requests import after, written
from clients.conformance.packet import Packet
from clients.conformance.snapshots import (
    CHANGES,
    DISK,
    DUPLICATES,
    HISTORY,
    MEMORY,
    fault_of,
    marker_of,
    seqno_of,
)
from clients.conformance.wire import Wire

EXPIRES_S = 2
"""How long a document lives whose expiration a check waits for."""


def _shown(run: Run, tokens: list[Written], **how: Any) -> list[Packet]:
    """Return the messages of a stream of some changes."""
    wire = run.dcp(**how)
    return ended(wire, after(run, wire, tokens[0], tokens[-1]))


def _until(wire: Wire, seqno: int) -> list[Packet]:
    """Return the messages up to a seqno."""
    return wire.messages(lambda each: seqno_of(each) == seqno)


def _need_no_fault(messages: list[Packet], start: int) -> None:
    fault = fault_of(messages, start)
    need(not fault, fault)


# -- snapshots -------------------------------------------------------------------------------------


@check(
    "snapshots.first",
    "The first message that will be sent during a stream request is a [Snapshot"
    " Marker](commands/snapshot-marker.md).",
    pages.FLOW_OF,
)
def first(run: Run) -> None:
    """The first message of a stream is a marker."""
    got = _shown(run, written(run))
    need(got[0].opcode == p.MARKER, f"it is {got[0]}")


@check(
    "snapshots.layout",
    "V1 extras contains snapshot-type and the start and end seqnos.",
    pages.MARKER,
)
def layout(run: Run) -> None:
    """Without max_marker_version, markers have 20 bytes of extras, no key and no value."""
    for each in _shown(run, written(run)):
        if each.opcode == p.MARKER:
            each.unpack("QQI")
            need(not each.key and not each.value, f"it has a key or a value: {each}")


@check(
    "snapshots.bounds",
    "The purpose of this message is to tell the Consumer the sequence numbers that are"
    " part of the snapshot",
    pages.FLOW_OF,
)
def bounds(run: Run) -> None:
    """Every change is between its marker's start and end, and the end is reached."""
    tokens = written(run, 10)
    _need_no_fault(_shown(run, tokens), tokens[0].seqno - 1)


@check(
    "snapshots.rise",
    "Order is important because it allows applications to reason about causality",
    pages.CONCEPTS,
)
def rise(run: Run) -> None:
    """The seqnos of the whole partition, from 0, rise from message to message."""
    tokens = written(run, 20)
    got = run.complete(run.dcp(), end=tokens[-1].seqno)
    _need_no_fault(got, 0)


@check(
    "snapshots.unique-keys",
    "a series of commands that is guaranteed to contain a unique set of keys.",
    pages.MARKER,
)
def unique_keys(run: Run) -> None:
    """A key that changed ten times comes once in a snapshot, in its newest version."""
    kv = run.kv()
    tokens = [run.write(kv, run.key(), b"%d" % number) for number in range(10)]
    got = run.complete(run.dcp(), end=tokens[-1].seqno)
    _need_no_fault(got, 0)
    mine = [each for each in got if each.opcode == p.MUTATION and each.key == run.key()]
    need(bool(mine) and mine[-1].value == b"9", f"the last version is {mine[-1:]}")


@check("snapshots.type", "Specifies that the snapshot contains", pages.MARKER)
def type_(run: Run) -> None:
    """Each marker has the bit of memory or of disk, not both, and no unknown bit."""
    for each in _shown(run, written(run)):
        if each.opcode == p.MARKER:
            kind = marker_of(each).kind
            need(kind & 3 in {MEMORY, DISK}, f"the type is 0x{kind:02x}")
            need(kind < 0x40, f"the type is 0x{kind:02x}")


@check(
    "snapshots.start",
    "The first snapshot-marker of the stream will have the start-seqno set to the"
    " requested start-seqno.",
    pages.MARKER,
)
def start(run: Run) -> None:
    """The first marker starts at the requested start, or at the seqno after it."""
    tokens = written(run)
    wire = run.dcp()
    got = ended(wire, after(run, wire, tokens[2], tokens[-1]))
    begun = marker_of(got[0]).start
    need(begun in {tokens[2].seqno - 1, tokens[2].seqno}, f"start {begun}, asked {tokens[2].seqno}")


@check(
    "snapshots.successive",
    "Once all of the items from the first snapshot have been sent the Producer will check",
    pages.FLOW_OF,
)
def successive(run: Run) -> None:
    """Changes made while the stream is open come in further snapshots, in order."""
    tokens = written(run, 1)
    wire = run.dcp()
    run.opened(wire, tokens[0].seqno, uuid=tokens[0].uuid)
    kv = run.kv()
    got: list[Packet] = []
    for number in range(3):
        last = run.write(kv, run.key(number), b"later").seqno
        got += _until(wire, last)
    _need_no_fault(got, tokens[0].seqno)


@check(
    "snapshots.live-memory",
    "Specifies that the snapshot contains in-memory items only.",
    pages.MARKER,
)
def live_memory(run: Run) -> None:
    """A change that is made while a caught-up stream is open comes in a memory snapshot."""
    tokens = written(run, 1)
    wire = run.dcp()
    run.opened(wire, tokens[0].seqno, uuid=tokens[0].uuid)
    got = _until(wire, run.write(run.kv(), run.key(7)).seqno)
    kinds = [marker_of(each).kind for each in got if each.opcode == p.MARKER]
    need(all(kind & MEMORY for kind in kinds), f"the types are {kinds}")


@check(
    "snapshots.version-2-2",
    "_V2.2_ extends _V2.0_ to include two additional 8-byte field",
    pages.MARKER,
)
def version_2_2(run: Run) -> None:
    """With max_marker_version 2.2, each marker is of version 1, 2.0 or 2.2, and well formed."""
    tokens = written(run)
    wire = run.dcp(COLLECTIONS, controls=[("max_marker_version", "2.2")])
    got = ended(wire, after(run, wire, tokens[0], tokens[-1]))
    _need_no_fault(got, tokens[0].seqno - 1)
    need(any(each.opcode == p.MARKER for each in got), "there is no marker")


@check("snapshots.visible-seqno", "8b Max Visible Seqno", pages.MARKER)
def visible_seqno(run: Run) -> None:
    """In markers of version 2, the max visible seqno is not above the end."""
    tokens = written(run)
    wire = run.dcp(COLLECTIONS, controls=[("max_marker_version", "2.2")])
    got = ended(wire, after(run, wire, tokens[0], tokens[-1]))
    for each in got:
        if each.opcode == p.MARKER and len(each.extras) == 1:
            visible = int.from_bytes(each.value[20:28], "big")
            need(visible <= marker_of(each).end, f"max visible seqno {visible} in {each}")


@check("snapshots.history", "The snapshot represents a view of history", pages.MARKER)
def history(run: Run) -> None:
    """With change_streams, a snapshot with the history bit shows each version of a key."""
    kv = run.kv(COLLECTIONS)
    key = b"\0" + run.key()
    tokens = [run.write(kv, key, b"%d" % number) for number in range(5)]
    wire = run.dcp(COLLECTIONS, controls=[("change_streams", "true")])
    got = ended(wire, after(run, wire, tokens[0], tokens[-1]))
    kinds = [marker_of(each).kind for each in got if each.opcode == p.MARKER]
    if not any(kind & HISTORY for kind in kinds):
        raise NotApplicableError("no marker has the history bit: the collection keeps no history")
    values = [each.value for each in got if each.opcode == p.MUTATION and each.key == key]
    need(values == [b"0", b"1", b"2", b"3", b"4"], f"the versions are {values}")


@check("snapshots.may-duplicate", "The snapshot may contain duplicate keys", pages.MARKER)
def may_duplicate(run: Run) -> None:
    """Without change_streams, no marker says that keys may repeat."""
    for each in _shown(run, written(run)):
        if each.opcode == p.MARKER:
            need(not marker_of(each).kind & DUPLICATES, f"{each} says that keys may repeat")


@check(
    "snapshots.no-answer",
    "The client should not send a reply to this command unless the ack flag is set.",
    pages.MARKER,
)
def no_answer(run: Run) -> None:
    """Plain streams do not ask for acknowledgements of snapshots."""
    for each in _shown(run, written(run)):
        if each.opcode == p.MARKER:
            need(not marker_of(each).kind & 0x08, f"{each} asks for an answer")


@check(
    "snapshots.same-twice",
    "a snapshot (a full snapshot) is an immutable view of the KV store at an instance.",
    pages.CONCEPTS,
)
def same_twice(run: Run) -> None:
    """Two streams of the same range show the same changes."""
    tokens = written(run, 10)
    shown = [
        [(each.opcode, each.key, each.value, each.cas) for each in _shown(run, tokens)
         if each.opcode in CHANGES]
        for _ in range(2)
    ]  # fmt: skip
    need(shown[0] == shown[1], "the two streams differ")


@check(
    "snapshots.concurrent",
    "an application to know if an operation occurred before or after another operation.",
    pages.CONCEPTS,
)
def concurrent(run: Run) -> None:
    """A live stream of 200 concurrent changes obeys its markers and misses none."""
    base = written(run, 1)[0]
    wire = run.dcp()
    run.opened(wire, base.seqno, uuid=base.uuid)
    writers = [run.kv() for _ in range(4)]
    asked = [
        (writers[number % 4], writers[number % 4].send(
            p.SET, run.vb, key=run.key(number), extras=bytes(8), value=b"c"))
        for number in range(200)
    ]  # fmt: skip
    seqnos = {need_status(one.expect(opaque)).unpack("QQ")[1] for one, opaque in asked}
    got = _until(wire, max(seqnos))
    _need_no_fault(got, base.seqno)
    missing = seqnos - {seqno_of(each) for each in got}
    need(not missing, f"seqnos {sorted(missing)[:5]} are missing")


# -- OSO, idle streams -----------------------------------------------------------------------------


@check(
    "oso.only-if-enabled",
    "An OSO snapshot will only be transmitted if the client has enabled the feature",
    pages.OSO,
)
def oso_only_if_enabled(run: Run) -> None:
    """Without the control, no OSO_SNAPSHOT comes."""
    last = written(run)[-1]
    value = json.dumps({"collections": ["0"]}).encode()
    got = run.complete(run.dcp(COLLECTIONS), end=last.seqno, value=value)
    need(not any(each.opcode == p.OSO_SNAPSHOT for each in got), "OSO_SNAPSHOT came")


@check("oso.pairs", "This is the end of an OSO snapshot", pages.OSO)
def oso_pairs(run: Run) -> None:
    """With the control, each OSO_SNAPSHOT(start) has its OSO_SNAPSHOT(end), and no key."""
    last = written(run)[-1]
    wire = run.dcp(COLLECTIONS, controls=[("enable_out_of_order_snapshots", "true")])
    value = json.dumps({"collections": ["0"]}).encode()
    got = run.complete(wire, end=last.seqno, value=value)
    flags = [each.unpack("I")[0] for each in got if each.opcode == p.OSO_SNAPSHOT]
    if not flags:
        raise NotApplicableError("the server sent the backlog in order; it may")
    need(flags == [1, 2] * (len(flags) // 2), f"the flags are {flags}")


@check(
    "streams.idle",
    "If any message is sent from the Producer then the noop is rescheduled.",
    pages.DEAD,
)
def idle(run: Run) -> None:
    """A caught-up stream stays open and silent, and then shows the next change."""
    last = written(run)[-1]
    wire = run.dcp()
    run.opened(wire, last.seqno, uuid=last.uuid)
    need(not wire.messages_for(QUIET_S), "something came")
    later = run.write(run.kv(), run.key(70)).seqno
    _until(wire, later)


@check("streams.independent", "Starting VBucket Streams can be parallelized", pages.FLOW_OF)
def independent(run: Run) -> None:
    """Requests that are sent at once are all answered, each with its opaque."""
    answer = need_status(run.kv().ask(p.GET_ALL_VB_SEQNOS, extras=pack(">I", 1)))
    ids = [int.from_bytes(answer.value[at : at + 2], "big") for at in range(0, 80, 10)]
    if len(ids) * 10 > len(answer.value):
        raise NotApplicableError("fewer than eight partitions are active here")
    wire = run.dcp()
    extras = pack(">II5Q", 0, 0, 0, (1 << 64) - 1, 0, 0, 0)
    asked = [wire.send(p.DCP_STREAM_REQ, vb_id, extras=extras) for vb_id in ids]
    for opaque in asked:
        need_status(wire.expect(opaque))


@check(
    "streams.abandoned",
    "This connection will remain open until your client closes its socket.",
    pages.BUILDING,
)
def abandoned(run: Run) -> None:
    """A connection that is cut in the middle of a stream does not disturb another one."""
    tokens = written(run, 3)
    wire = run.dcp()
    run.opened(wire)
    wire.close()
    ended(other := run.dcp(), after(run, other, tokens[0], tokens[-1]))
