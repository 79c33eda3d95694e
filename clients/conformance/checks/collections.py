"""Checks of collections: keys, ids, filters, system events, SEQNO_ADVANCED, stream ids."""

from __future__ import annotations

import json
from struct import pack
from typing import Any

from clients.conformance import packet as p
from clients.conformance import pages
from clients.conformance.check import (
    COLLECTIONS,
    NotApplicableError,
    Run,
    Written,
    check,
    ended,
    need,
    need_parts,
    need_status,
)
from clients.conformance.packet import Packet
from clients.conformance.snapshots import CHANGES, fault_of, seqno_of
from clients.conformance.wire import Stream, Wire

_COLLECTIONS = pages.COLLECTIONS
_BEGIN, _END, _SCOPE_BEGIN = 0, 1, 3
NO_COLLECTION = 0xFFFFF0


def leb128(number: int) -> bytes:
    """Return an id as unsigned LEB128, as keys begin with it."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


# -- keys and ids ----------------------------------------------------------------------------------

_BEGINS = (
    "Memcached will expect that every document command (e.g. SET/GET) sent on a collections enabled"
    " connection encodes the collection-ID beginning at offset 0"
)


@check("collections.default-key", _BEGINS, _COLLECTIONS)
def default_key(run: Run) -> None:
    """A key of collection 0 is the document that connections without collections see."""
    run.write(run.kv(COLLECTIONS), b"\0" + run.key(), b"both")
    answer = need_status(run.kv().ask(p.GET, run.vb, key=run.key()))
    need(answer.value == b"both", f"the value is {p.shown(answer.value)}")


@check(
    "collections.unknown-id",
    "when a request is made, referencing a collection and the node could not match the"
    " collection against its manifest.",
    _COLLECTIONS,
)
def unknown_id(run: Run) -> None:
    """GET in a collection that is not there is UNKNOWN_COLLECTION, with the manifest's uid."""
    wire = run.kv(COLLECTIONS)
    answer = wire.ask(p.GET, run.vb, key=leb128(NO_COLLECTION) + b"k")
    document = need_status(answer, p.UNKNOWN_COLLECTION).document()
    need(isinstance(document, dict) and "manifest_uid" in document, "there is no manifest_uid")


@check(
    "collections.six-bytes",
    "For example encoding 0 as 6-bytes - 0x80.80.80.80.80.00 is invalid.",
    _COLLECTIONS,
)
def six_bytes(run: Run) -> None:
    """A collection id of six bytes is EINVAL."""
    answer = run.kv(COLLECTIONS).ask(p.GET, run.vb, key=b"\x80\x80\x80\x80\x80\x00k")
    need_status(answer, p.EINVAL)


@check(
    "collections.not-canonical",
    "KV-engine will fail the use of non-canonical encodings",
    _COLLECTIONS,
)
def not_canonical(run: Run) -> None:
    """Collection 0 as 0x80 0x00 is EINVAL."""
    need_status(run.kv(COLLECTIONS).ask(p.GET, run.vb, key=b"\x80\x00k"), p.EINVAL)


@check(
    "collections.manifest",
    "Get collections returns the value of the last successful set collection.",
    _COLLECTIONS,
)
def manifest(run: Run) -> None:
    """GET_COLLECTIONS_MANIFEST is JSON with uid and scopes, _default among them."""
    answer = need_status(run.kv(COLLECTIONS).ask(p.GET_MANIFEST), may_refuse=True)
    document = answer.document()
    need(isinstance(document, dict) and "uid" in document, "there is no uid")
    scopes = document.get("scopes")
    need(isinstance(scopes, list), "there are no scopes")
    names = [each.get("name") for each in scopes if isinstance(each, dict)]
    need("_default" in names, f"the scopes are {names}")


def _id_of(wire: Wire, opcode: int, path: str) -> int:
    """Return the id of a collection or a scope."""
    answer = need_status(wire.ask(opcode, value=path.encode()), may_refuse=True)
    need_parts(answer, extras=12)
    return int(answer.unpack("QI")[1])


@check(
    "collections.id",
    "Successful response includes an extras payload with two values.",
    _COLLECTIONS,
)
def id_(run: Run) -> None:
    """GET_COLLECTION_ID of _default._default, and of ".", is 0."""
    wire = run.kv(COLLECTIONS)
    for path in ("_default._default", "."):
        found = _id_of(wire, p.GET_COLLECTION_ID, path)
        need(found == 0, f"the id of {path!r} is {found}")


@check(
    "collections.scope-id", "Get scope ID interprets the value as a path to a scope", _COLLECTIONS
)
def scope_id(run: Run) -> None:
    """GET_SCOPE_ID of _default is 0."""
    found = _id_of(run.kv(COLLECTIONS), p.GET_SCOPE_ID, "_default")
    need(found == 0, f"the id is {found}")


@check(
    "collections.id-unknown",
    "but no collection could be found, this error is returned.",
    _COLLECTIONS,
)
def id_unknown(run: Run) -> None:
    """GET_COLLECTION_ID of a name that is not there is UNKNOWN_COLLECTION."""
    answer = run.kv(COLLECTIONS).ask(p.GET_COLLECTION_ID, value=b"_default.conformance-none")
    need_status(answer, p.UNKNOWN_COLLECTION, may_refuse=True)


@check(
    "collections.id-unknown-scope",
    "but the scope couldn't be found, this error is returned.",
    _COLLECTIONS,
)
def id_unknown_scope(run: Run) -> None:
    """GET_COLLECTION_ID in a scope that is not there is UNKNOWN_SCOPE."""
    answer = run.kv(COLLECTIONS).ask(p.GET_COLLECTION_ID, value=b"conformance-none.c")
    need_status(answer, p.UNKNOWN_SCOPE, may_refuse=True)


@check("collections.id-path", "The path does not contain one `.`", _COLLECTIONS)
def id_path(run: Run) -> None:
    """GET_COLLECTION_ID of a path with two dots is EINVAL."""
    answer = run.kv(COLLECTIONS).ask(p.GET_COLLECTION_ID, value=b"a.b.c")
    need_status(answer, p.EINVAL, may_refuse=True)


# -- streams ---------------------------------------------------------------------------------------


@check(
    "collections.stream-keys",
    "all keys with be prefixed with the collection-ID of the document encoded as a 32-bit",
    pages.MUTATION,
)
def stream_keys(run: Run) -> None:
    """On a connection with collections, keys of streams begin with their collection id."""
    token = run.write(run.kv(COLLECTIONS), b"\0" + run.key())
    wire = run.dcp(COLLECTIONS)
    got = _messages(run, wire, token.seqno - 1, token.seqno, token.uuid)
    keys = [each.key for each in got if each.opcode in CHANGES]
    need(keys == [b"\0" + run.key()], f"the keys are {keys}")


@check(
    "collections.stream-plain",
    "A DCP producer with collections enabled is the only way to access documents that are"
    " not in the default collection.",
    pages.OPEN,
)
def stream_plain(run: Run) -> None:
    """On a connection without collections, keys are plain, and no system events come."""
    token = run.write(run.kv(), run.key())
    got = run.complete(run.dcp(), end=token.seqno)
    need(not any(each.opcode == p.SYSTEM_EVENT for each in got), "a system event came")
    mine = [each.key for each in got if each.opcode in CHANGES and seqno_of(each) == token.seqno]
    need(mine == [run.key()], f"the key is {mine}")


def _messages(
    run: Run, wire: Wire, start: int, end: int, uuid: int, value: bytes = b""
) -> list[Packet]:
    return ended(wire, run.opened(wire, start, end=end, uuid=uuid, value=value))


class _Made:
    """A collection that the hook makes, and what was written to it and beside it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.kv = run.kv(COLLECTIONS)
        self.scope = "conformance"
        self.name = f"c{run.name[-9:]}"
        self.before = run.write(self.kv, b"\0" + run.key(1), b"before")
        run.hook("collection", scope=self.scope, collection=self.name)
        self.id = _id_of(self.kv, p.GET_COLLECTION_ID, f"{self.scope}.{self.name}")

    def key(self, number: int) -> bytes:
        return leb128(self.id) + self.run.key(number)

    def drop(self) -> None:
        self.run.hook("collection-drop", scope=self.scope, collection=self.name)

    def write(self, number: int) -> Written:
        return self.run.write(self.kv, self.key(number), b"inside")

    def beside(self, number: int) -> Written:
        """Write to the default collection."""
        return self.run.write(self.kv, b"\0" + self.run.key(number), b"beside")

    def filter(self, **more: Any) -> bytes:
        return json.dumps({"collections": [f"{self.id:x}"], **more}).encode()

    def stream(self, end: int, value: bytes = b"") -> list[Packet]:
        """Return the messages since the collection was made."""
        wire = self.run.dcp(COLLECTIONS)
        return _messages(self.run, wire, self.before.seqno, end, self.before.uuid, value)


def _events(messages: list[Packet], kind: int) -> list[Packet]:
    return [
        each for each in messages
        if each.opcode == p.SYSTEM_EVENT and each.unpack("QIB")[1] == kind
    ]  # fmt: skip


@check(
    "collections.begin", "A collection begins (it has been created or flushed)", pages.SYSTEM_EVENT
)
def begin(run: Run) -> None:
    """A new collection comes as event 0 with its name as key, before its documents."""
    made = _Made(run)
    last = made.write(2)
    got = made.stream(last.seqno)
    found = [each for each in _events(got, _BEGIN) if each.key == made.name.encode()]
    need(len(found) == 1, f"{len(found)} events have the name {made.name}")
    need((seqno_of(found[0]) or 0) < last.seqno, "the event comes after the document")


@check(
    "collections.begin-value",
    "The ID of the collection as a 4-byte integer (network endian)",
    pages.SYSTEM_EVENT,
)
def begin_value(run: Run) -> None:
    """The event's value has manifest uid, scope id and collection id; version 1 the max_ttl."""
    made = _Made(run)
    got = made.stream(made.write(2).seqno)
    found = [each for each in _events(got, _BEGIN) if each.key == made.name.encode()]
    need(bool(found), "there is no event")
    version = found[0].unpack("QIB")[2]
    fields = found[0].unpack("QII" if version == 0 else "QIII", "value")
    scope = _id_of(made.kv, p.GET_SCOPE_ID, made.scope)
    need(fields[1:3] == (scope, made.id), f"it says {fields[1:3]}, not {(scope, made.id)}")


@check("collections.end", "End collection system event has no key.", pages.SYSTEM_EVENT)
def end(run: Run) -> None:
    """A dropped collection comes as event 1 without a key, with its ids in the value."""
    made = _Made(run)
    made.write(2)
    made.drop()
    got = made.stream(made.beside(3).seqno)
    found = _events(got, _END)
    need(len(found) == 1, f"there are {len(found)} events of an end")
    need(not found[0].key, f"the key is {p.shown(found[0].key)}")
    need(found[0].unpack("QII", "value")[2] == made.id, "it names another collection")


@check("collections.dropped", "could not match the collection against its manifest.", _COLLECTIONS)
def dropped(run: Run) -> None:
    """After the drop, GET of a document in it is UNKNOWN_COLLECTION."""
    made = _Made(run)
    made.write(2)
    made.drop()
    need_status(made.kv.ask(p.GET, run.vb, key=made.key(2)), p.UNKNOWN_COLLECTION)


@check(
    "collections.filter",
    "to request the stream only includes items relating to the specified collection or"
    " collections.",
    pages.STREAM_VALUE,
)
def filter_(run: Run) -> None:
    """A stream with a filter shows the collection's changes and no others."""
    made = _Made(run)
    made.beside(2)
    inside = [made.write(number).seqno for number in (3, 4)]
    made.beside(5)
    last = made.write(6).seqno
    got = made.stream(last, made.filter())
    seqnos = [seqno_of(each) for each in got if each.opcode in CHANGES]
    need(seqnos == [*inside, last], f"it shows {seqnos}, not {[*inside, last]}")


@check(
    "collections.filter-markers",
    "The consumer should use the seqno in this opcode to check weather they have now"
    " fully received a snapshot or not.",
    pages.SEQNO_ADVANCED,
)
def filter_markers(run: Run) -> None:
    """A filtered stream whose last change is of another collection completes its snapshot."""
    made = _Made(run)
    made.write(2)
    last = made.beside(3).seqno
    got = made.stream(last, made.filter())
    fault = fault_of(got, made.before.seqno)
    need(not fault, fault)
    need(any(each.opcode == p.SEQNO_ADVANCED for each in got), "SEQNO_ADVANCED does not come")


@check("collections.advanced-layout", "Extra length (4)    : 0x8", pages.SEQNO_ADVANCED)
def advanced_layout(run: Run) -> None:
    """SEQNO_ADVANCED has 8 bytes of extras, neither key nor value."""
    made = _Made(run)
    last = made.beside(2).seqno
    for each in made.stream(last, made.filter()):
        if each.opcode == p.SEQNO_ADVANCED:
            need_parts(each, extras=8)


@check(
    "collections.scope-filter",
    "to request the stream only includes items relating to the collections of the specified scope.",
    pages.STREAM_VALUE,
)
def scope_filter(run: Run) -> None:
    """A stream with a scope shows what is in its collections, and nothing else."""
    made = _Made(run)
    made.beside(2)
    last = made.write(3).seqno
    scope = _id_of(made.kv, p.GET_SCOPE_ID, made.scope)
    got = made.stream(last, json.dumps({"scope": f"{scope:x}"}).encode())
    seqnos = [seqno_of(each) for each in got if each.opcode in CHANGES]
    need(seqnos == [last], f"it shows {seqnos}, not {[last]}")


@check(
    "collections.filter-empty",
    "all filtered collections or scope are now deleted and no more data is coming.",
    pages.STREAM_END,
)
def filter_empty(run: Run) -> None:
    """A stream whose only collection is dropped ends with reason 7."""
    made = _Made(run)
    last = made.write(2)
    wire = run.dcp(COLLECTIONS)
    stream = run.opened(wire, last.seqno, uuid=last.uuid, value=made.filter())
    made.drop()
    got = ended(wire, stream)
    need(got[-1].unpack("I") == (7,), f"the reason is {got[-1].extras.hex()}")


@check("collections.again", "A unique ID for the collection", _COLLECTIONS)
def again(run: Run) -> None:
    """A collection that is dropped and made again has another id, and no documents."""
    made = _Made(run)
    made.write(2)
    made.drop()
    run.hook("collection", scope=made.scope, collection=made.name)
    found = _id_of(made.kv, p.GET_COLLECTION_ID, f"{made.scope}.{made.name}")
    need(found != made.id, f"the id is {found} again")
    need_status(made.kv.ask(p.GET, run.vb, key=leb128(found) + run.key(2)), p.ENOENT)


@check(
    "collections.seqnos",
    "restricted to a certain collection for vBuckets in any alive state",
    pages.SEQNOS,
)
def seqnos(run: Run) -> None:
    """GET_ALL_VB_SEQNOS with a collection has the seqno of its last change."""
    made = _Made(run)
    inside = made.write(2).seqno
    made.beside(3)
    answer = need_status(made.kv.ask(p.GET_ALL_VB_SEQNOS, extras=pack(">II", 0, made.id)))
    entries = {
        int.from_bytes(answer.value[at : at + 2], "big"): int.from_bytes(
            answer.value[at + 2 : at + 10], "big"
        )
        for at in range(0, len(answer.value) - 9, 10)
    }
    need(entries.get(run.vb) == inside, f"it says {entries.get(run.vb)}, not {inside}")


@check("collections.scope-event", "A scope has been created", pages.SYSTEM_EVENT)
def scope_event(run: Run) -> None:
    """A stream from 0 shows the scope's creation (3) before its collection's (0)."""
    made = _Made(run)
    last = made.write(2).seqno
    got = run.complete(run.dcp(COLLECTIONS), end=last)
    scopes = [seqno_of(each) for each in _events(got, _SCOPE_BEGIN)
              if each.key == made.scope.encode()]  # fmt: skip
    begun = [seqno_of(each) for each in _events(got, _BEGIN) if each.key == made.name.encode()]
    need(bool(scopes) and bool(begun), f"the events are {scopes} and {begun}")
    need((scopes[0] or 0) < (begun[0] or 0), "the collection comes before its scope")


# -- stream ids ------------------------------------------------------------------------------------


def _with_ids(run: Run) -> Wire:
    return run.dcp(COLLECTIONS, controls=[("enable_stream_id", "true")])


def _stream_with(run: Run, wire: Wire, stream_id: object) -> Stream:
    return wire.stream(run.vb, value=json.dumps({"sid": stream_id}).encode())


@check(
    "stream-ids.two",
    "A client can create many DCP streams on the same vbucket using different values of sid.",
    pages.STREAM_VALUE,
)
def two(run: Run) -> None:
    """With the control, a connection streams a partition twice, with two ids."""
    wire = _with_ids(run)
    for stream_id in (7, 8):
        need_status(_stream_with(run, wire, stream_id).answer)


@check(
    "stream-ids.framing",
    "with the chosen value encoded in the message (using flexible framing.)",
    pages.STREAM_VALUE,
)
def framing(run: Run) -> None:
    """Each message of the stream has its id in the framing."""
    token = run.write(run.kv(), run.key())
    wire = _with_ids(run)
    stream = wire.stream(run.vb, end=token.seqno, value=b'{"sid":71}')
    need_status(stream.answer)
    for each in ended(wire, stream):
        need(each.stream_id == 71, f"the id of {each} is {each.stream_id}")


@check(
    "stream-ids.missing",
    "The request does not include a sid and the stream-ID feature is",
    pages.STREAM_REQ,
)
def missing(run: Run) -> None:
    """With the control, a request without an id is DCP_STREAMID_INVALID."""
    need_status(_with_ids(run).stream(run.vb).answer, p.STREAMID_INVALID)


@check("stream-ids.zero", "The stream-request will fail if `sid` is 0", pages.STREAM_VALUE)
def zero(run: Run) -> None:
    """The id 0 is refused."""
    answer = _stream_with(run, _with_ids(run), 0).answer
    need_status(answer, p.STREAMID_INVALID, p.EINVAL)


@check(
    "stream-ids.no-number",
    "The stream-request will fail if `sid` is not a JSON integer",
    pages.STREAM_VALUE,
)
def no_number(run: Run) -> None:
    """An id that is text is refused."""
    answer = _stream_with(run, _with_ids(run), "7").answer
    need_status(answer, p.STREAMID_INVALID, p.EINVAL)


@check(
    "stream-ids.in-use",
    "The stream-request will fail if `sid` is in use by a stream",
    pages.STREAM_VALUE,
)
def in_use(run: Run) -> None:
    """An id that a stream of the partition has is refused."""
    wire = _with_ids(run)
    need_status(_stream_with(run, wire, 7).answer)
    answer = _stream_with(run, wire, 7).answer
    need(answer.field != p.OK, "the same id is answered OK twice")


@check(
    "stream-ids.close",
    "The request does not include a stream-ID and the stream-ID feature is",
    pages.CLOSE,
)
def close(run: Run) -> None:
    """CLOSE_STREAM without the id is DCP_STREAMID_INVALID; with it, it is OK."""
    wire = _with_ids(run)
    need_status(_stream_with(run, wire, 7).answer)
    need_status(wire.ask(p.DCP_CLOSE_STREAM, run.vb), p.STREAMID_INVALID)
    need_status(wire.ask(p.DCP_CLOSE_STREAM, run.vb, framing=b"\x22\x00\x07"))


@check(
    "stream-ids.close-without-control",
    "The request includes a stream-ID (non zero) and the stream-ID feature is not",
    pages.CLOSE,
)
def close_without_control(run: Run) -> None:
    """Without the control, CLOSE_STREAM with an id is DCP_STREAMID_INVALID."""
    wire = run.dcp()
    run.opened(wire)
    answer = wire.ask(p.DCP_CLOSE_STREAM, run.vb, framing=b"\x22\x00\x07")
    need_status(answer, p.STREAMID_INVALID)


@check(
    "stream-ids.no-way-back", "once enabled on a producer, it cannot be disabled.", pages.CONTROL
)
def no_way_back(run: Run) -> None:
    """Control enable_stream_id = false after true is refused."""
    answer = _with_ids(run).control("enable_stream_id", "false")
    if answer.field in p.REFUSALS:
        raise NotApplicableError("the control takes only true")
    need_status(answer, p.EINVAL)
