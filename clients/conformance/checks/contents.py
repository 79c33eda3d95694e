"""Checks of what a stream shows: mutations, deletions, expirations, XATTRs, Snappy."""

from __future__ import annotations

import time
from struct import pack
from typing import Any

import cramjam

from clients.conformance import packet as p
from clients.conformance import pages
from clients.conformance.check import (
    COLLECTIONS,
    SNAPPY,
    XATTR,
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
    marker_of,
    seqno_of,
)
from clients.conformance.wire import Wire

EXPIRES_S = 2
"""How long a document lives whose expiration a check waits for."""


def change_of(run: Run, token: Written, *features: int, **how: Any) -> Packet:
    """Return the message of a change."""
    wire = run.dcp(*features, **how)
    got = ended(wire, after(run, wire, token, token))
    for each in got:
        if each.opcode in CHANGES and seqno_of(each) == token.seqno:
            return each
    need(False, f"seqno {token.seqno} is not in the stream")
    raise AssertionError


# -- mutations -------------------------------------------------------------------------------------


@check("mutations.layout", "Total 31 bytes", pages.MUTATION)
def mutation_layout(run: Run) -> None:
    """A mutation has 31 bytes of extras, and key and value."""
    token = written(run, 1, b"some value")[0]
    got = change_of(run, token)
    got.unpack("QQIIIHB")
    need(got.key == run.key() and got.value == b"some value", f"it is {got}")


@check("mutations.cas", "CAS          (16-23)", pages.MUTATION)
def mutation_cas(run: Run) -> None:
    """A mutation has the CAS that the writer was answered."""
    token = written(run, 1)[0]
    got = change_of(run, token)
    need(got.cas == token.cas, f"CAS {got.cas}, the writer was answered {token.cas}")


@check("mutations.seqno", "by seqno   (24-31)", pages.MUTATION)
def mutation_seqno(run: Run) -> None:
    """A mutation has the seqno of the writer's token."""
    tokens = written(run, 3)
    for token in tokens:
        change_of(run, token)


@check("mutations.revision", "rev seqno  (32-39)", pages.MUTATION)
def mutation_revision(run: Run) -> None:
    """A new document has revision 1; each change adds one."""
    kv = run.kv()
    for expected in (1, 2, 3):
        token = run.write(kv, run.key(), b"%d" % expected)
        revision = change_of(run, token).unpack("QQIIIHB")[1]
        need(revision == expected, f"version {expected} has revision {revision}")


@check("mutations.flags", "flags      (40-43)", pages.MUTATION)
def mutation_flags(run: Run) -> None:
    """A mutation has the flags that were set."""
    token = run.write(run.kv(), run.key(), flags=0xCAFE0102)
    flags = change_of(run, token).unpack("QQIIIHB")[2]
    need(flags == 0xCAFE0102, f"the flags are 0x{flags:08x}")


@check("mutations.expiry", "expiration (44-47)", pages.MUTATION)
def mutation_expiry(run: Run) -> None:
    """A mutation has its expiry as a time since 1970; a relative one is made absolute."""
    at = int(time.time()) + 100_000
    kv = run.kv()
    expiry = change_of(run, run.write(kv, run.key(), expiry=at)).unpack("QQIIIHB")[3]
    need(expiry == at, f"the expiry is {expiry}, {at} was set")
    relative = change_of(run, run.write(kv, run.key(), expiry=100_000)).unpack("QQIIIHB")[3]
    need(abs(relative - at) < 60, f"the relative expiry is {relative}, about {at} was meant")


@check("mutations.no-meta", "Its length will be set in the nmeta field.", pages.MUTATION)
def mutation_no_meta(run: Run) -> None:
    """A mutation without extended metadata says nmeta 0, and lock time 0."""
    fields = change_of(run, written(run, 1)[0]).unpack("QQIIIHB")
    need(fields[4:6] == (0, 0), f"lock time and nmeta are {fields[4:6]}")


@check("mutations.empty-value", "May have value", pages.MUTATION)
def mutation_empty(run: Run) -> None:
    """A document without a value comes without one."""
    token = run.write(run.kv(), run.key(), b"")
    got = change_of(run, token)
    need(got.opcode == p.MUTATION and got.value == b"", f"it is {got}")


@check(
    "mutations.large-value", "a client must be ready to receive an item of this size.", pages.FLOW
)
def mutation_large(run: Run) -> None:
    """A document of 1 MB comes with each of its bytes."""
    value = bytes(range(256)) * 3_900
    token = run.write(run.kv(), run.key(), value)
    need(change_of(run, token).value == value, "the value is another")


@check("mutations.key-250", "nkey", pages.DOCUMENT)
def mutation_long_key(run: Run) -> None:
    """A key of 250 bytes comes with each of its bytes."""
    key = run.key().ljust(250, b"k")
    token = run.write(run.kv(), key)
    need(change_of(run, token).key == key, "the key is another")


@check("mutations.json", "could be a combination of 0, JSON.", pages.MUTATION)
def mutation_json(run: Run) -> None:
    """A JSON document has datatype 0x01; another one has 0."""
    kv = run.kv()
    kinds = [
        change_of(run, run.write(kv, run.key(at), value, datatype=bits)).datatype
        for at, (value, bits) in enumerate(((b'{"a":[1,2]}', p.JSON), (b"{nothing", 0)))
    ]
    need(kinds == [p.JSON, 0], f"the datatypes are {kinds}")


@check("mutations.no-value", "do not include the Document.", pages.OPEN)
def mutation_no_value(run: Run) -> None:
    """With DCP_OPEN flag 0x08, mutations have no value and datatype 0."""
    token = run.write(run.kv(), run.key(), b'{"a":1}', datatype=p.JSON)
    got = change_of(run, token, flags=1 | 0x08)
    need(not got.value and got.datatype == 0, f"it is {got}")


@check(
    "mutations.no-value-datatype",
    "Requests that the server preserves the original datatype",
    pages.OPEN,
)
def mutation_no_value_datatype(run: Run) -> None:
    """With flag 0x40 mutations have no value, and the document's datatype."""
    token = run.write(run.kv(), run.key(), b'{"a":1}', datatype=p.JSON)
    got = change_of(run, token, flags=1 | 0x40)
    need(not got.value and got.datatype == p.JSON, f"it is {got}")


# -- deletions and expirations ---------------------------------------------------------------------


def _deleted(run: Run) -> Written:
    kv = run.kv()
    run.write(kv, run.key(), b"to go")
    return run.delete(kv, run.key())


@check("deletions.layout", "Total 18 bytes", pages.DELETION)
def deletion_layout(run: Run) -> None:
    """A deletion has 18 bytes of extras, the key, and no value."""
    got = change_of(run, _deleted(run))
    need(got.opcode == p.DELETION, f"it is {got}")
    got.unpack("QQH")
    need(got.key == run.key() and not got.value, f"it is {got}")


@check(
    "deletions.layout-2",
    "If the DCP channel is opened with 'include delete-times' then all deletions sent"
    " will use the V2 format.",
    pages.DELETION,
)
def deletion_layout_2(run: Run) -> None:
    """With DCP_OPEN flag 0x20, a deletion has 21 bytes of extras."""
    got = change_of(run, _deleted(run), flags=1 | 0x20)
    need(got.opcode == p.DELETION, f"it is {got}")
    got.unpack("QQIB")


@check("deletions.time", "will have a timestamp value in the delete-time field", pages.OPEN)
def deletion_time(run: Run) -> None:
    """The delete time is 0, or about now."""
    got = change_of(run, _deleted(run), flags=1 | 0x20)
    at = got.unpack("QQIB")[2]
    need(at == 0 or abs(at - time.time()) < 3_600, f"the delete time is {at}")


@check("deletions.cas", "CAS          (16-23)", pages.DELETION)
def deletion_cas(run: Run) -> None:
    """A deletion has the CAS that its writer was answered, and a higher revision."""
    token = _deleted(run)
    got = change_of(run, token)
    need(got.cas == token.cas, f"CAS {got.cas}, the writer was answered {token.cas}")
    revision = got.unpack("QQH")[1]
    need(revision == 2, f"the deletion of a first version has revision {revision}")


@check("deletions.no-meta", "Its length will be set in the nmeta field.", pages.DELETION)
def deletion_no_meta(run: Run) -> None:
    """A deletion says nmeta 0 and datatype 0."""
    got = change_of(run, _deleted(run))
    need(got.unpack("QQH")[2] == 0 and got.datatype == 0, f"it is {got}")


@check(
    "deletions.again",
    "An event that deletes a key or changes the value a key points to.",
    pages.TERMS,
)
def deletion_again(run: Run) -> None:
    """A key that is deleted and stored again comes as a mutation, with a higher revision."""
    _deleted(run)
    token = run.write(run.kv(), run.key(), b"again")
    got = change_of(run, token)
    need(got.opcode == p.MUTATION and got.value == b"again", f"it is {got}")
    need(got.unpack("QQIIIHB")[1] == 3, f"the revision is {got.unpack('QQIIIHB')[1]}")


@check(
    "deletions.skipped-in-backfill",
    "the server doesn't send deletes/tombstones in the initial backfill",
    pages.OPEN,
)
def deletion_skipped(run: Run) -> None:
    """With flag 0x200, a backfill from 0 has none of the older deletions."""
    _deleted(run)
    last = run.write(run.kv(), run.key(5))
    wire = run.kv(COLLECTIONS)
    need_status(wire.open(run.dcp_name(), 1 | 0x200), may_refuse=True)
    need_status(wire.control("enable_noop", "true"))
    got = run.complete(wire, end=last.seqno)
    kinds = [marker_of(each).kind for each in got if each.opcode == p.MARKER]
    if not kinds or not kinds[0] & DISK:
        raise NotApplicableError("the stream does not begin with a backfill from disk")
    need(not any(each.opcode == p.DELETION for each in got), "a deletion came")


def _expired(run: Run) -> int:
    """Let a document expire; return the seqno before its end."""
    kv = run.kv()
    token = run.write(kv, run.key(), b"short", expiry=EXPIRES_S)
    deadline_s = time.monotonic() + max(run.target.timeout_s, 2 * EXPIRES_S)
    while kv.ask(p.GET, run.vb, key=run.key()).field == p.OK:
        need(time.monotonic() < deadline_s, f"it lives longer than {EXPIRES_S} s")
        time.sleep(0.1)
    return token.seqno


def _end_of(run: Run, wire: Wire, seqno: int) -> Packet:
    run.opened(wire, seqno, uuid=run.high(run.kv())[0])
    got = wire.messages(lambda each: each.opcode in {p.DELETION, p.EXPIRATION})
    return got[-1]


@check(
    "expirations.deletion",
    "by default DCP does not distinguish if a document was explicitly deleted or whether"
    " it was expired",
    pages.EXPIRY,
)
def expiration_deletion(run: Run) -> None:
    """Without the control, an expired document comes as a deletion."""
    got = _end_of(run, run.dcp(), _expired(run))
    need(got.opcode == p.DELETION and got.key == run.key(), f"it is {got}")


@check("expirations.opcode", "you can expect to receive an [expiration packet]", pages.EXPIRY)
def expiration_opcode(run: Run) -> None:
    """With enable_expiry_opcode and delete times, it comes as an expiration of 20 bytes."""
    wire = run.dcp(flags=1 | 0x20, controls=[("enable_expiry_opcode", "true")])
    got = _end_of(run, wire, _expired(run))
    need(got.opcode == p.EXPIRATION and got.key == run.key(), f"it is {got}")
    got.unpack("QQI")
    need(not got.value, f"it has a value: {p.shown(got.value)}")


@check(
    "expirations.deletes-stay",
    "identify for certain if the removal of a document is by explicit deletion or expiration.",
    pages.EXPIRY,
)
def expiration_deletes_stay(run: Run) -> None:
    """With the control, a deletion by a client still comes as a deletion, with 21 bytes."""
    token = _deleted(run)
    got = change_of(run, token, flags=1 | 0x20, controls=[("enable_expiry_opcode", "true")])
    need(got.opcode == p.DELETION, f"it is {got}")
    got.unpack("QQIB")


@check(
    "expirations.past",
    "this will cause the item to be deleted/expired as you would expect",
    pages.EXPIRY,
)
def expiration_get(run: Run) -> None:
    """The end of an expired document has a seqno of its own, above that of the document."""
    seqno = _expired(run)
    got = _end_of(run, run.dcp(), seqno)
    need((seqno_of(got) or 0) > seqno, f"it is {got}")


# -- XATTRs ----------------------------------------------------------------------------------------


def _with_xattr(run: Run) -> Written:
    """Store a document with the XATTR `tag`, whose value is "x"."""
    kv = run.kv(XATTR)
    run.write(kv, run.key(), b'{"a":1}', datatype=p.JSON)
    extras = pack(">HB", 3, 0x04)
    answer = kv.ask(p.SUBDOC_DICT_UPSERT, run.vb, key=run.key(), extras=extras, value=b'tag"x"')
    need_status(answer, may_refuse=True)
    uuid, seqno = answer.unpack("QQ")
    return Written(uuid, seqno, answer.cas)


def _xattrs(value: bytes) -> tuple[dict[bytes, bytes], bytes]:
    """Return the XATTRs and the body of a value; see docs/Document.md."""
    size = int.from_bytes(value[:4], "big")
    need(4 + size <= len(value), f"the XATTRs have {size} bytes, the value {len(value)}")
    found: dict[bytes, bytes] = {}
    at = 4
    while at < 4 + size:
        length = int.from_bytes(value[at : at + 4], "big")
        pair = value[at + 4 : at + 4 + length].split(b"\0")
        need(len(pair) == 3 and not pair[2], f"a pair is {p.shown(value[at : at + 4 + length])}")
        found[pair[0]] = pair[1]
        at += 4 + length
    return found, value[4 + size :]


@check(
    "xattrs.included",
    "messages should include any XATTRs associated with the Document.",
    pages.OPEN,
)
def xattrs_included(run: Run) -> None:
    """With flag 0x04, a mutation has datatype 0x04, the XATTRs and the body."""
    got = change_of(run, _with_xattr(run), flags=1 | 0x04)
    need(got.datatype & p.XATTR != 0, f"the datatype is 0x{got.datatype:02x}")
    found, body = _xattrs(got.value)
    need(found.get(b"tag") == b'"x"' and body == b'{"a":1}', f"they are {found}, {body!r}")


@check(
    "xattrs.left-out",
    "DCP without the value or xattr flags - datatype will never contain XATTR",
    pages.MUTATION,
)
def xattrs_left_out(run: Run) -> None:
    """Without the flag, the mutation has the body only, and no XATTR bit."""
    got = change_of(run, _with_xattr(run))
    need(not got.datatype & p.XATTR and got.value == b'{"a":1}', f"it is {got}")


@check(
    "xattrs.without-value",
    "`DCP_OPEN_NO_VALUE|DCP_OPEN_INCLUDE_XATTRS` - datatype will be 0 or XATTR.",
    pages.MUTATION,
)
def xattrs_without_value(run: Run) -> None:
    """With flags 0x04 and 0x08, the mutation has the XATTRs only, and datatype 0x04."""
    got = change_of(run, _with_xattr(run), flags=1 | 0x0C)
    need(got.datatype == p.XATTR, f"the datatype is 0x{got.datatype:02x}")
    found, body = _xattrs(got.value)
    need(b"tag" in found and not body, f"they are {found}, and a body {body!r}")


@check("xattrs.none", "datatype could be many combinations. e.g. 0, XATTR", pages.MUTATION)
def xattrs_none(run: Run) -> None:
    """With flag 0x04, a document without XATTRs has no XATTR bit."""
    got = change_of(run, written(run, 1)[0], flags=1 | 0x04)
    need(not got.datatype & p.XATTR and got.value == b"v", f"it is {got}")


# -- Snappy ----------------------------------------------------------------------------------------

_LONG = b'{"text":"' + b"the same again, " * 60 + b'"}'


def _snappy(data: bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(data))


def _plain(data: bytes) -> bytes:
    try:
        return bytes(cramjam.snappy.decompress_raw(data))
    except cramjam.DecompressionError as error:
        need(False, f"the value is no Snappy: {error}")
        raise AssertionError from None


@check(
    "snappy.forced",
    "Compresses values using snappy compression before sending them.",
    pages.CONTROL,
)
def snappy_forced(run: Run) -> None:
    """With force_value_compression, a long value comes with datatype 0x02, compressed."""
    token = run.write(run.kv(), run.key(), _LONG)
    wire = run.dcp(SNAPPY, controls=[("force_value_compression", "true")])
    got = [
        each for each in ended(wire, after(run, wire, token, token)) if each.opcode == p.MUTATION
    ]
    need(bool(got) and got[0].datatype & p.SNAPPY != 0, f"the datatype is {got[:1]}")
    need(_plain(got[0].value) == _LONG, "the value is another")


@check(
    "snappy.passive",
    "If the client has enabled compression, the SNAPPY datatype bit may also be present.",
    pages.MUTATION,
)
def snappy_passive(run: Run) -> None:
    """A value that was stored compressed comes compressed or plain, and says which."""
    kv = run.kv(SNAPPY)
    token = run.write(kv, run.key(), _snappy(_LONG), datatype=p.SNAPPY)
    got = change_of(run, token, SNAPPY)
    value = _plain(got.value) if got.datatype & p.SNAPPY else got.value
    need(value == _LONG, "the value is another")


@check(
    "snappy.not-negotiated",
    "In order to utilize the datatype bits the client needs to notify the server that it"
    " supports datatype bits",
    pages.BINARY,
)
def snappy_not_negotiated(run: Run) -> None:
    """A value that was stored compressed comes plain to a client without Snappy."""
    kv = run.kv(SNAPPY)
    token = run.write(kv, run.key(), _snappy(_LONG), datatype=p.SNAPPY)
    got = change_of(run, token)
    need(not got.datatype & p.SNAPPY and got.value == _LONG, f"it is {got}")


@check(
    "snappy.no-lie",
    "we try to inflate the object to verify that is in fact compressed.",
    pages.SIZES,
)
def snappy_lie(run: Run) -> None:
    """A SET that says Snappy about a value that is none is EINVAL."""
    kv = run.kv(SNAPPY)
    answer = kv.ask(
        p.SET, run.vb, key=run.key(), extras=bytes(8), value=b"\xff" * 20, datatype=p.SNAPPY
    )
    need_status(answer, p.EINVAL)
