"""Checks of what streams are made of: documents, CAS, tokens, seqnos, failover logs, statistics."""

from __future__ import annotations

from struct import pack

from clients.conformance import packet as p
from clients.conformance import pages
from clients.conformance.check import (
    COLLECTIONS,
    JSON,
    MUTATION_SEQNO,
    NotApplicableError,
    Run,
    check,
    need,
    need_parts,
    need_status,
)
from clients.conformance.packet import MalformedError, Packet
from clients.conformance.wire import Wire, failover_log

_BINARY = pages.BINARY
_CAS = (
    "If the Data Version Check (CAS) is nonzero, the requested operation MUST only succeed if the"
    " item exists and has a CAS value identical to the provided value."
)
_WITH_SEQNO = (
    "If the client enabled the Mutation Seqno feature the extras should be set to 16 bytes"
    " containing the vbucket UUID in the first 8 bytes"
)
NO_PARTITION = 0xFFF0
"""A partition that no server has."""


def _get(run: Run, wire: Wire, key: bytes) -> Packet:
    return need_status(wire.ask(p.GET, run.vb, key=key))


@check("documents.get", "The get command gets a single key.", _BINARY)
def get(run: Run) -> None:
    """GET returns the value that was set, its flags in 4 bytes of extras, and no key."""
    wire = run.kv()
    run.write(wire, run.key(), b"one", flags=0x01020304)
    answer = _get(run, wire, run.key())
    need(answer.value == b"one", f"the value is {p.shown(answer.value)}")
    need(answer.unpack("I") == (0x01020304,), f"the flags are {answer.extras.hex()}")
    need(not answer.key, "GET returns the key")


@check("documents.getk", "adding the key into the response packet", _BINARY)
def getk(run: Run) -> None:
    """GETK returns the key, too."""
    wire = run.kv()
    run.write(wire, run.key())
    answer = need_status(wire.ask(p.GETK, run.vb, key=run.key()))
    need(answer.key == run.key(), f"the key is {p.shown(answer.key)}")


@check("documents.getq", "The getq command will not send a response on a cache miss.", _BINARY)
def getq(run: Run) -> None:
    """GETQ of a missing key has no answer: that of the NOOP behind it comes first."""
    wire = run.kv()
    wire.send(p.GETQ, run.vb, key=run.key())
    noop = wire.send(p.NOOP)
    answer = wire.receive()
    need(answer.opaque == noop, f"it is answered: {answer}")


@check("documents.missing", "will not send a response on a cache miss", _BINARY)
def missing(run: Run) -> None:
    """GET of a key that is not there is KEY_ENOENT."""
    need_status(run.kv().ask(p.GET, run.vb, key=run.key()), p.ENOENT)


@check("documents.set-answer", "MUST have CAS", _BINARY)
def set_answer(run: Run) -> None:
    """The answer to SET has a CAS, which GET returns, too."""
    wire = run.kv()
    written = run.write(wire, run.key())
    need(written.cas != 0, "the CAS is 0")
    found = _get(run, wire, run.key())
    need(found.cas == written.cas, f"SET says CAS {written.cas}, GET {found.cas}")


@check("documents.cas-changes", "CAS: Data version check", _BINARY)
def cas_changes(run: Run) -> None:
    """Each change of a document gives it another CAS."""
    wire = run.kv()
    seen = {run.write(wire, run.key(), b"%d" % number).cas for number in range(5)}
    need(len(seen) == 5, f"five changes have {len(seen)} different CAS")


@check("documents.cas-matches", _CAS, _BINARY)
def cas_matches(run: Run) -> None:
    """SET with the present CAS is OK."""
    wire = run.kv()
    cas = run.write(wire, run.key()).cas
    need_status(wire.ask(p.SET, run.vb, key=run.key(), extras=bytes(8), value=b"w", cas=cas))


@check("documents.cas-mismatch", _CAS, _BINARY)
def cas_mismatch(run: Run) -> None:
    """SET with another CAS is KEY_EEXISTS and changes nothing."""
    wire = run.kv()
    cas = run.write(wire, run.key(), b"old").cas
    answer = wire.ask(p.SET, run.vb, key=run.key(), extras=bytes(8), value=b"new", cas=cas + 1)
    need_status(answer, p.EEXISTS)
    need(_get(run, wire, run.key()).value == b"old", "the document changed all the same")


@check("documents.cas-missing", _CAS, _BINARY)
def cas_missing(run: Run) -> None:
    """SET with a CAS of a key that is not there is KEY_ENOENT."""
    answer = run.kv().ask(p.SET, run.vb, key=run.key(), extras=bytes(8), value=b"v", cas=7)
    need_status(answer, p.ENOENT)


@check("documents.add", "Add MUST fail if the item already exist.", _BINARY)
def add_(run: Run) -> None:
    """ADD is OK once; then it is KEY_EEXISTS."""
    wire = run.kv()
    parts = {"key": run.key(), "extras": bytes(8), "value": b"v"}
    need_status(wire.ask(p.ADD, run.vb, **parts))
    need_status(wire.ask(p.ADD, run.vb, **parts), p.EEXISTS, p.NOT_STORED)


@check("documents.replace", "Replace MUST fail if the item doesn't exist.", _BINARY)
def replace(run: Run) -> None:
    """REPLACE of a missing key is KEY_ENOENT."""
    answer = run.kv().ask(p.REPLACE, run.vb, key=run.key(), extras=bytes(8), value=b"v")
    need_status(answer, p.ENOENT, p.NOT_STORED)


@check("documents.delete", "Delete the item with the specific key.", _BINARY)
def delete(run: Run) -> None:
    """DELETE is OK, GET then KEY_ENOENT, and a second DELETE, too."""
    wire = run.kv()
    run.write(wire, run.key())
    run.delete(wire, run.key())
    need_status(wire.ask(p.GET, run.vb, key=run.key()), p.ENOENT)
    need_status(wire.ask(p.DELETE, run.vb, key=run.key()), p.ENOENT)


@check("documents.delete-cas", "CAS: Data version check", _BINARY)
def delete_cas(run: Run) -> None:
    """DELETE with another CAS is KEY_EEXISTS."""
    wire = run.kv()
    cas = run.write(wire, run.key()).cas
    need_status(wire.ask(p.DELETE, run.vb, key=run.key(), cas=cas + 1), p.EEXISTS)


@check("documents.quiet", "Success is considered the general case and is suppressed", _BINARY)
def quiet(run: Run) -> None:
    """SETQ that succeeds has no answer."""
    wire = run.kv()
    wire.send(p.SETQ, run.vb, key=run.key(), extras=bytes(8), value=b"q")
    noop = wire.send(p.NOOP)
    answer = wire.receive()
    need(answer.opaque == noop, f"it is answered: {answer}")
    need(_get(run, wire, run.key()).value == b"q", "the value was not stored")


@check(
    "documents.counter-seed", "seeding the value for this key with the provided initial", _BINARY
)
def counter_seed(run: Run) -> None:
    """INCREMENT of a missing key stores the initial value and answers it in 8 bytes."""
    answer = run.kv().ask(p.INCREMENT, run.vb, key=run.key(), extras=pack(">QQI", 5, 40, 0))
    need(need_status(answer).unpack("Q", "value") == (40,), f"it answers {answer.value.hex()}")


@check("documents.counter-missing", "operation will fail with NOT_FOUND", _BINARY)
def counter_missing(run: Run) -> None:
    """INCREMENT of a missing key with expiry 0xffffffff is KEY_ENOENT."""
    extras = pack(">QQI", 1, 0, 0xFFFFFFFF)
    need_status(run.kv().ask(p.INCREMENT, run.vb, key=run.key(), extras=extras), p.ENOENT)


@check(
    "documents.counter-floor",
    'Decrementing a counter will never result in a "negative value"',
    _BINARY,
)
def counter_floor(run: Run) -> None:
    """DECREMENT by more than is there answers 0."""
    wire = run.kv()
    run.write(wire, run.key(), b"3")
    answer = wire.ask(p.DECREMENT, run.vb, key=run.key(), extras=pack(">QQI", 5, 0, 0))
    need(need_status(answer).unpack("Q", "value") == (0,), f"it answers {answer.value.hex()}")


@check(
    "documents.counter-wraps", "Incrementing the counter may cause the counter to wrap.", _BINARY
)
def counter_wraps(run: Run) -> None:
    """INCREMENT of 2^64 - 1 by 1 answers 0."""
    wire = run.kv()
    run.write(wire, run.key(), b"18446744073709551615")
    answer = wire.ask(p.INCREMENT, run.vb, key=run.key(), extras=pack(">QQI", 1, 0, 0))
    need(need_status(answer).unpack("Q", "value") == (0,), f"it answers {answer.value.hex()}")


@check("documents.counter-text", "must be the ascii representation of the value", _BINARY)
def counter_text(run: Run) -> None:
    """INCREMENT of a value that is no number is DELTA_BADVAL."""
    wire = run.kv()
    run.write(wire, run.key(), b"three")
    answer = wire.ask(p.INCREMENT, run.vb, key=run.key(), extras=pack(">QQI", 1, 0, 0))
    need_status(answer, p.DELTA_BADVAL)


@check("documents.append", "MUST have value.", _BINARY)
def append(run: Run) -> None:
    """APPEND and PREPEND add to what is there; without a document they are NOT_STORED."""
    wire = run.kv()
    need_status(wire.ask(p.APPEND, run.vb, key=run.key(), value=b"x"), p.NOT_STORED, p.ENOENT)
    run.write(wire, run.key(), b"b")
    need_status(wire.ask(p.APPEND, run.vb, key=run.key(), value=b"c"))
    need_status(wire.ask(p.PREPEND, run.vb, key=run.key(), value=b"a"))
    value = _get(run, wire, run.key()).value
    need(value == b"abc", f"the value is {p.shown(value)}")


@check("documents.expiry", "expire with the provided expiration time", _BINARY)
def expiry(run: Run) -> None:
    """A document with an expiry in the past of 1970 is gone at once."""
    wire = run.kv()
    run.write(wire, run.key(), expiry=31 * 86_400)
    need_status(wire.ask(p.GET, run.vb, key=run.key()), p.ENOENT)


@check(
    "documents.json",
    "This bit means that the _document_ value is identified as JSON",
    pages.DOCUMENT,
)
def json(run: Run) -> None:
    """GET of a JSON value has datatype 0x01, of another value not, if the client asked for it."""
    wire = run.kv()
    if JSON not in wire.features:
        raise NotApplicableError("HELLO does not grant JSON")
    run.write(wire, run.key(1), b'{"a":1}', datatype=p.JSON)
    run.write(wire, run.key(2), b"{not json")
    found = [_get(run, wire, run.key(number)).datatype & p.JSON for number in (1, 2)]
    need(found == [1, 0], f"the bits of JSON and of another value are {found}")


# -- seqnos ----------------------------------------------------------------------------------------


def _tokens(run: Run) -> Wire:
    wire = run.kv()
    if MUTATION_SEQNO not in wire.features:
        raise NotApplicableError("HELLO does not grant mutation tokens")
    return wire


@check("seqnos.token", _WITH_SEQNO, _BINARY)
def token(run: Run) -> None:
    """The answers to SET, DELETE and INCREMENT have 16 bytes of extras."""
    wire = _tokens(run)
    run.write(wire, run.key())
    run.delete(wire, run.key())
    extras = pack(">QQI", 1, 1, 0)
    need_status(wire.ask(p.INCREMENT, run.vb, key=run.key(), extras=extras)).unpack("QQ")


@check("seqnos.no-token", _WITH_SEQNO, _BINARY)
def no_token(run: Run) -> None:
    """Without the feature, the answer to SET has no token."""
    wire = run.raw()
    need_status(wire.hello((8,)))
    if run.target.user:
        plain = f"\0{run.target.user}\0{run.target.password}".encode()
        need_status(wire.ask(p.SASL_AUTH, key=b"PLAIN", value=plain))
    need_status(wire.ask(p.SELECT_BUCKET, key=run.target.bucket.encode()))
    answer = wire.ask(p.SET, run.vb, key=run.key(), extras=bytes(8), value=b"v")
    need_parts(need_status(answer))


@check(
    "seqnos.rise",
    "Each mutation that occurs on a vBucket is assigned a number, which strictly increases",
    pages.TERMS,
)
def rise(run: Run) -> None:
    """The seqnos of changes, deletions and counters of a partition rise."""
    wire = _tokens(run)
    seqnos = [each.seqno for each in run.fill(wire, 5)]
    seqnos += [run.delete(wire, run.key(number)).seqno for number in range(3)]
    need(seqnos == sorted(set(seqnos)), f"the seqnos are {seqnos}")


@check(
    "seqnos.concurrent",
    "Each mutation that occurs on a vBucket is assigned a number, which strictly increases",
    pages.TERMS,
)
def concurrent(run: Run) -> None:
    """No two of 200 changes on four connections at the same time share a seqno, and on each
    connection they rise.
    """
    wires = [_tokens(run) for _ in range(4)]
    asked: list[tuple[Wire, int]] = []
    for number in range(200):
        wire = wires[number % 4]
        key = run.key(number)
        asked.append((wire, wire.send(p.SET, run.vb, key=key, extras=bytes(8), value=b"v")))
    seqnos = [need_status(wire.expect(opaque)).unpack("QQ")[1] for wire, opaque in asked]
    need(len(set(seqnos)) == 200, f"200 changes have {len(set(seqnos))} different seqnos")
    for first in range(4):
        mine = seqnos[first::4]
        need(mine == sorted(mine), f"on one connection they are {mine[:10]}...")


@check(
    "seqnos.token-version",
    "A unique identifier that is generated that is assigned to each VBucket.",
    pages.STREAM_REQ,
)
def token_version(run: Run) -> None:
    """A token has the uuid of the failover log's newest entry."""
    wire = _tokens(run)
    uuid = run.write(wire, run.key()).uuid
    log = failover_log(need_status(wire.ask(p.GET_FAILOVER_LOG, run.vb)))
    need(bool(log) and log[0][0] == uuid, f"the token says {uuid:x}, the log {log[:1]}")


def _all_seqnos(wire: Wire, extras: bytes = b"") -> dict[int, int]:
    answer = need_status(wire.ask(p.GET_ALL_VB_SEQNOS, extras=extras))
    need_parts(answer, value=True)
    if len(answer.value) % 10:
        raise MalformedError(f"{len(answer.value)} bytes are no multiple of 10")
    entries = [answer.value[at : at + 10] for at in range(0, len(answer.value), 10)]
    found = {int.from_bytes(each[:2], "big"): int.from_bytes(each[2:], "big") for each in entries}
    need(len(found) == len(entries), "a partition is named twice")
    need(list(found) == sorted(found), "the partitions are not in order")
    return found


@check("seqnos.active", "active: `0x01`", pages.SEQNOS)
def active(run: Run) -> None:
    """GET_ALL_VB_SEQNOS with state 1 lists partitions that take writes."""
    wire = run.kv()
    found = _all_seqnos(wire, pack(">I", 1))
    need(run.vb in found, f"partition {run.vb} takes part in no answer")
    run.write(wire, run.key())


@check("seqnos.all", "The vBuckets in the response are sorted by their number.", pages.SEQNOS)
def all_(run: Run) -> None:
    """GET_ALL_VB_SEQNOS lists 10 bytes for each partition, sorted."""
    need(run.vb in _all_seqnos(run.kv()), f"partition {run.vb} is missing")


@check(
    "seqnos.high",
    "find out the most recent sequence number in order to start a stream request",
    pages.SEQNOS,
)
def high(run: Run) -> None:
    """GET_ALL_VB_SEQNOS has at least the seqno of an answered change."""
    wire = _tokens(run)
    seqno = run.write(wire, run.key()).seqno
    listed = _all_seqnos(wire).get(run.vb)
    need(listed is not None and listed >= seqno, f"it says {listed} after seqno {seqno}")


@check("seqnos.unknown-state", "The `vbucket_state` is one of:", pages.SEQNOS)
def unknown_state(run: Run) -> None:
    """GET_ALL_VB_SEQNOS with state 9 is EINVAL."""
    need_status(run.kv().ask(p.GET_ALL_VB_SEQNOS, extras=pack(">I", 9)), p.EINVAL)


@check("seqnos.key", "Must not have key", pages.SEQNOS)
def seqnos_key(run: Run) -> None:
    """GET_ALL_VB_SEQNOS with a key is EINVAL."""
    need_status(run.kv().ask(p.GET_ALL_VB_SEQNOS, key=b"k"), p.EINVAL)


@check(
    "seqnos.collection",
    "Get All vBucket Sequence Numbers Binary Request (restricted to a certain collection",
    pages.SEQNOS,
)
def collection(run: Run) -> None:
    """With the default collection in the extras, the seqno is not above the partition's."""
    wire = run.kv(COLLECTIONS)
    seqno = run.write(wire, b"\0" + run.key()).seqno
    listed = _all_seqnos(wire, pack(">II", 0, 0)).get(run.vb)
    need(listed is not None and listed >= seqno, f"it says {listed} after seqno {seqno}")


@check(
    "seqnos.persisted",
    "Note that all items with a sequence number below this one will be persisted as well.",
    pages.PERSIST,
)
def persisted(run: Run) -> None:
    """SEQNO_PERSISTENCE of an answered change is OK, when it is on disk."""
    wire = _tokens(run)
    seqno = run.write(wire, run.key()).seqno
    answer = wire.ask(p.SEQNO_PERSISTENCE, run.vb, extras=pack(">Q", seqno))
    need_status(answer, p.OK, p.ETMPFAIL, may_refuse=True)


@check(
    "seqnos.persisted-extras", "If data in this packet is malformed or incomplete", pages.PERSIST
)
def persisted_extras(run: Run) -> None:
    """SEQNO_PERSISTENCE without its 8 bytes is EINVAL."""
    need_status(run.kv().ask(p.SEQNO_PERSISTENCE, run.vb), p.EINVAL, may_refuse=True)


@check("seqnos.persisted-elsewhere", "does not have the given VBucket", pages.PERSIST)
def persisted_elsewhere(run: Run) -> None:
    """SEQNO_PERSISTENCE of a partition that is not there is NOT_MY_VBUCKET."""
    answer = run.kv().ask(p.SEQNO_PERSISTENCE, NO_PARTITION, extras=bytes(8))
    need_status(answer, p.NOT_MY_VBUCKET, may_refuse=True)


# -- failover logs ---------------------------------------------------------------------------------

_ORDER = "The failover log will be in descending order of time"


def _log(run: Run, opcode: int) -> list[tuple[int, int]]:
    wire = run.dcp() if opcode == p.DCP_FAILOVER_LOG else run.kv()
    answer = need_status(wire.ask(opcode, run.vb))
    need_parts(answer, value=True)
    return failover_log(answer)


@check("failover-log.dcp", _ORDER, pages.FAILOVER_LOG)
def log_dcp(run: Run) -> None:
    """DCP_GET_FAILOVER_LOG has at least one entry, and no seqno rises from new to old."""
    seqnos = [seqno for _, seqno in _log(run, p.DCP_FAILOVER_LOG)]
    need(bool(seqnos), "the log is empty")
    need(seqnos == sorted(seqnos, reverse=True), f"the seqnos are {seqnos}")


@check("failover-log.kv", _ORDER, _BINARY)
def log_kv(run: Run) -> None:
    """GET_FAILOVER_LOG (0x96) answers the same as the DCP command."""
    need(_log(run, p.GET_FAILOVER_LOG) == _log(run, p.DCP_FAILOVER_LOG), "the two logs differ")


@check("failover-log.uuids", "a random VBucket UUID", pages.FAILURES)
def log_uuids(run: Run) -> None:
    """No uuid is 0, and none comes twice."""
    uuids = [uuid for uuid, _ in _log(run, p.DCP_FAILOVER_LOG)]
    need(0 not in uuids, "a uuid is 0")
    need(len(set(uuids)) == len(uuids), "a uuid comes twice")


@check("failover-log.oldest", "a high sequence number 0", pages.FAILURES)
def log_oldest(run: Run) -> None:
    """No entry is above the partition's high seqno."""
    _, seqno = run.high(run.kv())
    newest = _log(run, p.DCP_FAILOVER_LOG)[:1]
    need(bool(newest), "the log is empty")
    need(newest[0][1] <= seqno, f"the newest entry is {newest}, the high seqno {seqno}")


@check(
    "failover-log.elsewhere",
    "If the VBucket the stream is requested for does not exist.",
    pages.FAILOVER_LOG,
)
def log_elsewhere(run: Run) -> None:
    """DCP_GET_FAILOVER_LOG of a partition that is not there is NOT_MY_VBUCKET."""
    need_status(run.dcp().ask(p.DCP_FAILOVER_LOG, NO_PARTITION), p.NOT_MY_VBUCKET)


@check(
    "failover-log.kv-elsewhere",
    "If the VBucket the failover log is requested for does not exist.",
    _BINARY,
)
def log_kv_elsewhere(run: Run) -> None:
    """GET_FAILOVER_LOG of a partition that is not there is NOT_MY_VBUCKET."""
    need_status(run.kv().ask(p.GET_FAILOVER_LOG, NO_PARTITION), p.NOT_MY_VBUCKET)


@check("failover-log.extras", "Must not have extras", pages.FAILOVER_LOG)
def log_extras(run: Run) -> None:
    """DCP_GET_FAILOVER_LOG with extras is EINVAL."""
    need_status(run.dcp().ask(p.DCP_FAILOVER_LOG, run.vb, extras=bytes(4)), p.EINVAL)


@check("failover-log.key", "Must not have key", pages.FAILOVER_LOG)
def log_key(run: Run) -> None:
    """DCP_GET_FAILOVER_LOG with a key is EINVAL."""
    need_status(run.dcp().ask(p.DCP_FAILOVER_LOG, run.vb, key=b"k"), p.EINVAL)


# -- statistics ------------------------------------------------------------------------------------


def _stats(wire: Wire, key: bytes, value: bytes = b"") -> dict[str, str]:
    """Return a group of statistics, up to the packet without key and value."""
    opaque = wire.send(p.STAT, key=key, value=value, datatype=p.JSON if value else 0)
    found: dict[str, str] = {}
    while True:
        answer = need_status(wire.expect(opaque), may_refuse=True)
        if not answer.key and not answer.value:
            return found
        found[answer.key.decode(errors="replace")] = answer.value.decode(errors="replace")


@check(
    "stats.end",
    "The sequence of return packets is terminated with a packet that contains no key and no value.",
    _BINARY,
)
def stats_end(run: Run) -> None:
    """STAT without a key lists statistics, and an empty packet ends them."""
    need(bool(_stats(run.kv(), b"")), "there is no statistic")


@check(
    "stats.seqno",
    "to receive High Sequence Number/VBucket UUID pairs for all VBuckets",
    pages.VB_SEQNO_STAT,
)
def stats_seqno(run: Run) -> None:
    """STAT `vbucket-seqno VB` has the partition's high seqno and uuid."""
    wire = _tokens(run)
    written = run.write(wire, run.key())
    found = _stats(wire, b"vbucket-seqno %d" % run.vb)
    for name, wanted in (("high_seqno", written.seqno), ("uuid", written.uuid)):
        shown = found.get(f"vb_{run.vb}:{name}", found.get(f"vb_{run.vb}:vb_{name}"))
        need(shown == str(wanted), f"{name} is {shown}, the token says {wanted}")


@check(
    "stats.seqno-elsewhere",
    "If you specified a specific VBucket and that VBucket does not exist.",
    pages.VB_SEQNO_STAT,
)
def stats_seqno_elsewhere(run: Run) -> None:
    """STAT `vbucket-seqno` of a partition that is not there is NOT_MY_VBUCKET."""
    answer = run.kv().ask(p.STAT, key=b"vbucket-seqno %d" % NO_PARTITION)
    need_status(answer, p.NOT_MY_VBUCKET, may_refuse=True)


@check(
    "stats.takeover",
    'Always returns "does_not_exist" when no Stream name specified.',
    pages.TAKEOVER_STAT,
)
def stats_takeover(run: Run) -> None:
    """STAT `dcp-vbtakeover VB` has status does_not_exist, and the numbers that the page lists."""
    wire = run.kv()
    run.fill(wire, 3)
    found = _stats(wire, b"dcp-vbtakeover %d" % run.vb)
    need(found.get("status") == "does_not_exist", f"the status is {found.get('status')}")
    for name in ("on_disk_deletes", "vb_items", "chk_items", "estimate"):
        need(found.get(name, "").isdigit(), f"{name} is {found.get(name)}")


@check(
    "stats.dcp",
    "The connection name can be used to get statistics about the connection state",
    pages.FLOW_OF,
)
def stats_dcp(run: Run) -> None:
    """STAT `dcp` names an open connection."""
    name = run.dcp_name()
    run.dcp(name=name)
    found = _stats(run.kv(), b"dcp")
    need(any(name in key for key in found), "the connection's name is in none of them")


@check(
    "stats.dcp-skip",
    '"skip" - no stream statistics are generated',
    _BINARY,
)
def stats_dcp_skip(run: Run) -> None:
    """STAT `dcp` with the value {"stream_format":"skip"} leaves streams out."""
    name = run.dcp_name()
    run.opened(run.dcp(name=name))
    kv = run.kv(JSON)
    need(any(":stream_" in key for key in _stats(kv, b"dcp")), "streams are not shown at all")
    found = [key for key in _stats(kv, b"dcp", b'{"stream_format":"skip"}') if ":stream_" in key]
    need(not found, f"it has {found[:1]}")


@check(
    "stats.value",
    "If a value is present it must be a JSON payload (and the JSON datatype set)",
    _BINARY,
)
def stats_value(run: Run) -> None:
    """STAT with a value that is no JSON is EINVAL."""
    answer = run.kv(JSON).ask(p.STAT, key=b"dcp", value=b"{no json", datatype=p.JSON)
    need_status(answer, p.EINVAL)


@check("stats.value-unknown", "ignore unknown elements in the provided JSON.", _BINARY)
def stats_value_unknown(run: Run) -> None:
    """STAT `dcp` with a value of unknown elements is OK."""
    _stats(run.kv(JSON), b"dcp", b'{"conformance":1}')


@check("stats.random-key", "A random key and value", pages.RANDOM_KEY)
def random_key(run: Run) -> None:
    """GET_RANDOM_KEY answers a key and its value."""
    wire = run.kv()
    run.write(wire, run.key())
    answer = need_status(wire.ask(p.RANDOM_KEY), may_refuse=True)
    need(bool(answer.key), "there is no key in the answer")
