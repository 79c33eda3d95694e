"""Says in words what a traced event carries: frames, messages of replication, news of the store.

A trace's hash is over lengths and checksums (`sim.world.Trace`). What is printed beside `--trace`
comes from here, and changes nothing. Messages that arrive in pieces are told with their last piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from dcp.session.replication_port import ReplicationError
from dcp.wire.frame import Frame, FrameDecoder, ProtocolError
from dcp.wire.message import (
    MUTATION_TOKEN,
    U64,
    parse_deletion,
    parse_failover_log,
    parse_marker,
    parse_mutation,
    parse_stream_end,
    parse_stream_request,
)
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.status import Status
from failover.metadata.metastore import Delete, Put, Range, Txn, WatchBatch
from failover.replication.messages import unpack_ack, unpack_entries, unpack_group
from sim.network import Side
from sim.world import Action, described, named
from vbucket.log.record import LogDamagedError, split_entries
from vbucket.model.control import control_document
from vbucket.model.entry import LOG_CONTROL, OPCODE_AT, is_deleted, key_of, seqno_of, vb_id_of

SHOWN: Final = 40
"""Bytes of a value, and letters of anything else that is long."""
ENTRIES_SHOWN: Final = 6


class Decoder:
    """See the module."""

    def __init__(self) -> None:
        self._streams: dict[Side, FrameDecoder] = {}

    def __call__(self, action: Action, args: tuple[Any, ...]) -> str:
        """Return what stands in the trace for an event."""
        side = getattr(action, "__self__", None)
        if isinstance(side, Side) and args and isinstance(args[0], bytes):
            return f"{side.name} gets {self._bytes(side, args[0])}"
        return " ".join([named(action), *map(_thing, args)])

    def _bytes(self, side: Side, data: bytes) -> str:
        if not data:
            return "the end"
        stream = self._streams.setdefault(side, FrameDecoder())
        try:
            frames = stream.feed(data)
        except ProtocolError as error:
            return f"{len(data)} bytes that are no frames: {error}"
        told = [_frame(frame) for frame in frames]
        if stream.buffered_bytes:
            told.append(f"{stream.buffered_bytes} bytes of a message")
        return "; ".join(told)


def _thing(thing: object) -> str:
    """Return an argument in words: requests of the store are told by their keys."""
    match thing:
        case Txn():
            return f"Txn({', '.join(map(_thing, thing.then)) or 'nothing'})"
        case Put():
            return f"put {thing.key.decode()} {thing.value[:SHOWN]!r}"
        case Delete() | Range():
            return f"{type(thing).__name__.lower()} {thing.key.decode()}"
        case WatchBatch():
            news = (
                f"{event.item.key.decode()} {'is gone' if event.is_delete else event.item.value}"
                for event in thing.events
            )
            return f"news of revision {thing.revision}: {', '.join(news)}"
        case tuple() if hasattr(thing, "_fields"):
            return f"{type(thing).__name__}{_short(thing)}"
        case bytes():
            return f"{len(thing)} bytes {thing[:SHOWN]!r}"
    return described(thing)


def _short(fields: Sequence[object]) -> str:
    text = ", ".join(str(field) for field in fields)
    return f"({text if len(text) <= SHOWN else text[:SHOWN] + '...'})"


def _frame(frame: Frame) -> str:
    name = Opcode(frame.opcode).name if frame.opcode in _OPCODES else f"0x{frame.opcode:02x}"
    try:
        if frame.is_request and frame.magic != Magic.SERVER_REQUEST:
            return f"{name} {_request(frame)}".rstrip()
        return f"answer to {name}: {_answer(frame)}"
    except (ProtocolError, ReplicationError, LogDamagedError, ValueError) as error:
        return f"{name} that cannot be read: {error}"


_OPCODES: Final = frozenset(int(opcode) for opcode in Opcode)


def _request(frame: Frame) -> str:
    match frame.opcode:
        case Opcode.X_REPLICA_ACK:
            number, question, seen = unpack_ack(frame.extras)
            return f"up to message {number} is on disk, confirms question {question}, {_seen(seen)}"
        case Opcode.X_REPLICA_ENTRIES:
            message = unpack_entries(frame)
            sections = "; ".join(
                f"vb {each.vb_id} epoch {each.epoch} committed {each.committed_seqno}:"
                f" {_entries(each.entries)}"
                for each in message.sections
            )
            return f"{message.number}, question {message.question}: {sections or 'a heartbeat'}"
        case Opcode.X_REPLICA_GROUP:
            group = unpack_group(frame)
            first, last = group.committed
            done = f", groups {first} to {last} are committed" if last else ""
            entries = _entries(split_entries(group.entries)) if group.entries else "nothing new"
            return f"{group.number}, question {group.question}{done}: {entries}"
        case Opcode.DCP_STREAM_REQ:
            asked = parse_stream_request(frame.extras)
            return (
                f"vb {frame.vb_id} from {asked.start_seqno} of version {asked.vb_uuid:x}, snapshot"
                f" {asked.snap_start_seqno} to {asked.snap_end_seqno}{_value(frame.value)}"
            )
        case Opcode.DCP_SNAPSHOT_MARKER:
            marker = parse_marker(frame)
            return f"vb {frame.vb_id} seqnos {marker.start_seqno} to {marker.end_seqno}"
        case Opcode.DCP_STREAM_END:
            return f"vb {frame.vb_id} reason {parse_stream_end(frame)}"
    seqno = ""
    if frame.opcode == Opcode.DCP_MUTATION:
        seqno = f" seqno {parse_mutation(frame).by_seqno}"
    elif frame.opcode in {Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION}:
        seqno = f" seqno {parse_deletion(frame).by_seqno}"
    key = f" {frame.key!r}" if frame.key else ""
    cas = f" CAS {frame.cas:x}" if frame.cas else ""
    return f"vb {frame.vb_id}{seqno}{key}{_value(frame.value)}{cas}"


def _answer(frame: Frame) -> str:
    status = Status(frame.status).name if frame.status in _STATUSES else f"0x{frame.status:02x}"
    if frame.opcode == Opcode.DCP_STREAM_REQ and frame.status == Status.ROLLBACK:
        return f"ROLLBACK to {U64.unpack_from(frame.value)[0]}"
    is_log = frame.opcode == Opcode.DCP_STREAM_REQ and not frame.value.startswith(b"{")
    if is_log and not frame.status:
        log = parse_failover_log(frame.value)
        return f"OK, versions {', '.join(f'{uuid:x} from {at}' for uuid, at in log)}"
    cas = f" CAS {frame.cas:x}" if frame.cas else ""
    token = ""
    if len(frame.extras) == MUTATION_TOKEN.size:
        uuid, seqno = MUTATION_TOKEN.unpack(frame.extras)
        token = f" version {uuid:x} seqno {seqno}"
    return f"{status}{cas}{token}{_value(frame.value)}"


_STATUSES: Final = frozenset(int(status) for status in Status)


def _value(value: bytes) -> str:
    if len(value) <= SHOWN:
        return f" {value!r}" if value else ""
    return f" {value[:SHOWN]!r}... ({len(value)} bytes)"


def _seen(seen: object) -> str:
    return f"has the records up to revision {getattr(seen, 'revision', 0)}"


def _entries(entries: Sequence[bytes]) -> str:
    told = list(_each(entries[:ENTRIES_SHOWN]))
    more = [f"and {len(entries) - ENTRIES_SHOWN} more"] * (len(entries) > ENTRIES_SHOWN)
    return ", ".join([*told, *more]) or "no entries"


def _each(entries: Sequence[bytes]) -> Iterator[str]:
    for entry in entries:
        if entry[OPCODE_AT] == LOG_CONTROL:
            yield f"control {control_document(entry)}"
        else:
            what = "deletes" if is_deleted(entry) else "sets"
            yield f"vb {vb_id_of(entry)} seqno {seqno_of(entry)} {what} {key_of(entry)[1:]!r}"
