"""Checks of the connection: packets, HELLO, logins, the bucket."""

from __future__ import annotations

from clients.conformance import packet as p
from clients.conformance import pages
from clients.conformance.check import (
    FIRST,
    MUTATION_SEQNO,
    PLAIN_FEATURES,
    FaultError,
    NotApplicableError,
    Run,
    active_partitions,
    add,
    check,
    need,
    need_parts,
    need_status,
)
from clients.conformance.packet import Packet, pack
from clients.conformance.wire import ClosedError, Wire

UNKNOWN_FEATURE = 0x7FF0
_BINARY = pages.BINARY


@check(FIRST, "You may retrict the returned values to a certain vBucket state.", pages.SEQNOS)
def answers(run: Run) -> None:
    """HELLO, login and SELECT_BUCKET are OK, and GET_ALL_VB_SEQNOS lists active partitions."""
    active_partitions(run)


@check("framing.opaque", "Opaque: Will be copied back to you in the response", _BINARY)
def opaque(run: Run) -> None:
    """The answer to a NOOP has the NOOP's opaque."""
    wire = run.raw()
    need_status(wire.expect(wire.send(p.NOOP, opaque=0xDEADBEEF)))


@check("framing.magic", "Response packet from server to client", _BINARY)
def magic(run: Run) -> None:
    """The answer to a plain request begins with 0x81."""
    answer = run.raw().ask(p.NOOP)
    need(answer.magic == p.RESPONSE, f"the magic is 0x{answer.magic:02x}")


@check("framing.opcode", "Magic number identifying the package", _BINARY)
def opcode(run: Run) -> None:
    """An answer has its request's opcode."""
    answer = run.raw().ask(p.VERSION)
    need(answer.opcode == p.VERSION, f"it is an answer to {p.opcode_name(answer.opcode)}")


@check("framing.noop-is-empty", "Used as a keep alive.", _BINARY)
def noop_is_empty(run: Run) -> None:
    """The answer to a NOOP has neither extras nor key nor value."""
    need_parts(need_status(run.raw().ask(p.NOOP)))


@check(
    "framing.version",
    "The server responds with a packet containing the version string in the body",
    _BINARY,
)
def version(run: Run) -> None:
    """VERSION is answered with a value that begins like x.y.z, without extras and key."""
    answer = need_status(run.raw().ask(p.VERSION))
    need_parts(answer, value=True)
    numbers = answer.value.split(b"-")[0].split(b".")
    is_version = len(numbers) >= 3 and all(each.isdigit() for each in numbers[:3])
    need(is_version, f"the version is {p.shown(answer.value)}")


@check(
    "framing.pipelined",
    "Clients should implement multi-get (still important for reducing network"
    " roundtrips!) as n pipelined requests",
    _BINARY,
)
def pipelined(run: Run) -> None:
    """A hundred NOOPs that are sent at once are all answered."""
    wire = run.raw()
    opaques = {wire.send(p.NOOP) for _ in range(100)}
    answered = {wire.receive().opaque for _ in range(100)}
    need(answered == opaques, f"{len(opaques - answered)} of 100 requests have no answer")


@check("framing.byte-by-byte", "General format of a packet", _BINARY)
def byte_by_byte(run: Run) -> None:
    """A request whose bytes come one by one is answered as any other."""
    wire = run.raw()
    for byte in pack(Packet(p.REQUEST, p.NOOP, 0, 7)):
        wire.send_bytes(bytes([byte]))
    need_status(wire.expect(7))


@check(
    "framing.unknown-opcode",
    "If the operation was successfully performed the status field is set to `No error`.",
    _BINARY,
)
def unknown_opcode(run: Run) -> None:
    """An opcode that nobody has is answered with an error, and the connection goes on."""
    wire = run.kv()
    answer = wire.ask(0xE9)
    need(answer.field != p.OK, "an unknown opcode is answered OK")
    need_status(wire.ask(p.NOOP))


def _refuses(wire: Wire, data: bytes, opaque: int) -> None:
    """Fail unless bytes are answered with an error, or end the connection."""
    wire.send_bytes(data)
    try:
        answer = wire.expect(opaque)
    except ClosedError:
        return
    need(answer.field != p.OK, f"{p.opcode_name(answer.opcode)} is answered OK")


@check(
    "framing.body-shorter-than-key",
    "Total body length: Length in bytes of extra + key + value",
    _BINARY,
)
def body_shorter_than_key(run: Run) -> None:
    """A GET with a key of 10 bytes in a body of 2 gets an error, or the connection ends."""
    data = bytearray(pack(Packet(p.REQUEST, p.GET, run.vb, 9, key=b"kk")))
    data[2:4] = (10).to_bytes(2, "big")
    _refuses(run.kv(), bytes(data), 9)


@check(
    "framing.body-too-long",
    "The server will disconnect a client trying to send a MCBP frame larger than a"
    " configured maximum size.",
    pages.SIZES,
)
def body_too_long(run: Run) -> None:
    """A header that announces 3.75 GiB is answered with an error, or the connection ends."""
    data = bytearray(pack(Packet(p.REQUEST, p.SET, run.vb, 9, extras=bytes(8), key=b"k")))
    data[8:12] = (0xF0000000).to_bytes(4, "big")
    _refuses(run.kv(), bytes(data), 9)


@check("framing.wrong-magic", "Magic: Magic number identifying the package", _BINARY)
def wrong_magic(run: Run) -> None:
    """A packet with the magic 0x13 gets an error, or the connection ends."""
    data = bytearray(pack(Packet(p.REQUEST, p.NOOP, 0, 9)))
    data[0] = 0x13
    _refuses(run.kv(), bytes(data), 9)


@check("framing.quit", "Close the connection to the server.", _BINARY)
def quit_(run: Run) -> None:
    """QUIT is answered, and the connection ends."""
    wire = run.raw()
    need_parts(need_status(wire.ask(p.QUIT)))
    need(wire.is_closed(), "the connection stays open")


@check("framing.quitq", "Quiet quit should not receive a response packet.", _BINARY)
def quitq(run: Run) -> None:
    """QUITQ ends the connection without an answer."""
    wire = run.raw()
    wire.send(p.QUITQ)
    try:
        answer = wire.receive()
    except ClosedError:
        return
    need(False, f"it is answered: {answer}")


def _refused_shape(number: str, sentence: str, title: str, opcode: int, **parts: bytes) -> None:
    def does(run: Run) -> None:
        wire = run.kv()
        answer = wire.ask(opcode, run.vb, **parts)
        need_status(answer, p.EINVAL)

    add(f"framing.{number}", sentence, _BINARY, f"{title} is EINVAL.", does)


_NO_EXTRAS = "MUST NOT have extras."
_refused_shape("get-extras", _NO_EXTRAS, "GET with extras", p.GET, key=b"k", extras=bytes(4))
_refused_shape("get-no-key", "MUST have key.", "GET without a key", p.GET)
_refused_shape("get-value", "MUST NOT have value.", "GET with a value", p.GET, key=b"k", value=b"v")
_refused_shape("set-no-extras", "MUST have extras.", "SET without extras", p.SET, key=b"k")
_refused_shape("set-no-key", "MUST have key.", "SET without a key", p.SET, extras=bytes(8))
_refused_shape(
    "delete-value", "MUST NOT have value.", "DELETE with a value", p.DELETE, key=b"k", value=b"v"
)
_refused_shape(
    "incr-extras",
    "Total 20 bytes",
    "INCREMENT with 8 bytes of extras",
    p.INCREMENT,
    key=b"k",
    extras=bytes(8),
)
_refused_shape("noop-key", "MUST NOT have key.", "NOOP with a key", p.NOOP, key=b"k")


# -- HELLO -----------------------------------------------------------------------------------------

_GRANTS = (
    "The server replies with all the features the client requested that the server agreed to"
    " enable."
)


@check("hello.subset", _GRANTS, _BINARY)
def subset(run: Run) -> None:
    """The answer names only requested features, each once, two bytes each."""
    wire = run.raw()
    asked = (*PLAIN_FEATURES, 0x0A, 0x12)
    answer = need_status(wire.hello(asked))
    need(len(answer.value) % 2 == 0, f"the value has {len(answer.value)} bytes")
    need(wire.features <= set(asked), f"it grants {sorted(wire.features - set(asked))} unasked")
    need(len(answer.value) == 2 * len(wire.features), "it names a feature twice")


@check("hello.unknown-feature", _GRANTS, _BINARY)
def unknown_feature(run: Run) -> None:
    """A feature that nobody has is left out, and is no error."""
    wire = run.raw()
    need_status(wire.hello((UNKNOWN_FEATURE, MUTATION_SEQNO)))
    need(UNKNOWN_FEATURE not in wire.features, f"0x{UNKNOWN_FEATURE:04x} is granted")


@check("hello.nothing", "SHOULD have key", _BINARY)
def nothing(run: Run) -> None:
    """HELLO without key and value is answered OK, with no feature."""
    answer = need_status(run.raw().ask(p.HELLO))
    need(not answer.value, f"it grants {p.shown(answer.value, as_hex=True)} unasked")


@check(
    "hello.json-agent",
    "If the first character is '{' the server will try to parse the key as JSON",
    _BINARY,
)
def json_agent(run: Run) -> None:
    """An agent in JSON is taken."""
    agent = b'{"a":"conformance/1","i":"0000000000000001/0000000000000002"}'
    need_status(run.raw().hello((MUTATION_SEQNO,), agent))


@check("hello.bad-json-agent", "SHOULD have key", _BINARY)
def bad_json_agent(run: Run) -> None:
    """An agent that only looks like JSON leaves the connection usable."""
    wire = run.raw()
    wire.hello((MUTATION_SEQNO,), b"{no json")
    need_status(wire.ask(p.NOOP))


@check("hello.odd-value", "a two byte value in network byte order.", _BINARY)
def odd_value(run: Run) -> None:
    """A list of features with an odd number of bytes is EINVAL."""
    need_status(run.raw().ask(p.HELLO, key=b"a", value=b"\0\4\0"), p.EINVAL)


@check("hello.extras", "MUST NOT have extra", _BINARY)
def extras(run: Run) -> None:
    """HELLO with extras is EINVAL."""
    need_status(run.raw().ask(p.HELLO, key=b"a", extras=b"\0\0\0\0"), p.EINVAL)


@check("hello.answer-parts", "MUST NOT have extras.", _BINARY)
def answer_parts(run: Run) -> None:
    """The answer has neither extras nor key."""
    need_parts(need_status(run.raw().hello((MUTATION_SEQNO,))), value=True)


@check("hello.again", _GRANTS, _BINARY)
def again(run: Run) -> None:
    """A second HELLO replaces what the first one had negotiated."""
    wire = run.kv()
    if MUTATION_SEQNO not in wire.features:
        raise NotApplicableError("HELLO does not grant mutation tokens")
    need_status(wire.hello(()))
    extras = bytes(8)
    answer = need_status(wire.ask(p.SET, run.vb, key=run.key(), extras=extras, value=b"v"))
    need(not answer.extras, "writes still have mutation tokens after a HELLO without them")


# -- logins and the bucket -------------------------------------------------------------------------


@check(
    "login.mechanisms",
    "The value is a textual string separated by space containing the available mechanisms.",
    pages.SASL,
)
def mechanisms(run: Run) -> None:
    """SASL_LIST_MECHS is answered with names, without extras and key."""
    answer = need_status(run.raw().ask(p.SASL_LIST_MECHS))
    need_parts(answer, value=True)
    need(bool(answer.value.split()), "there is no mechanism")


@check("login.mechanisms-key", "MUST NOT have key.", pages.SASL)
def mechanisms_key(run: Run) -> None:
    """SASL_LIST_MECHS with a key is EINVAL."""
    need_status(run.raw().ask(p.SASL_LIST_MECHS, key=b"k"), p.EINVAL)


@check(
    "login.plain", "When using PLAIN authentication the username and password is sent", pages.SASL
)
def plain(run: Run) -> None:
    """SASL_AUTH with PLAIN and the right password is OK."""
    if not run.target.user:
        raise NotApplicableError("no --user is given")
    run.logged_in()


@check(
    "login.wrong-password", "The SASL_AUTH request initiates the SASL authentication", pages.SASL
)
def wrong_password(run: Run) -> None:
    """A wrong password is AUTH_ERROR."""
    user = run.target.user or "guest"
    value = f"\0{user}\0not the password".encode()
    need_status(run.raw().ask(p.SASL_AUTH, key=b"PLAIN", value=value), p.AUTH_ERROR)


@check("login.unknown-user", "The SASL_AUTH request initiates the SASL authentication", pages.SASL)
def unknown_user(run: Run) -> None:
    """A user that is not there gets the same answer as a wrong password: AUTH_ERROR."""
    value = b"\0conformance-nobody\0x"
    need_status(run.raw().ask(p.SASL_AUTH, key=b"PLAIN", value=value), p.AUTH_ERROR)


@check("login.unknown-mechanism", "contains the authentication mechanism to use", pages.SASL)
def unknown_mechanism(run: Run) -> None:
    """A mechanism that is not listed is an error, and no login."""
    answer = run.raw().ask(p.SASL_AUTH, key=b"CONFORMANCE-1", value=b"x")
    need(answer.field != p.OK, "an unknown mechanism is answered OK")


_BINDS = (
    "The `select bucket` command is used to bind the connection to a given bucket on the server."
)


@check("bucket.select", _BINDS, _BINARY)
def select(run: Run) -> None:
    """SELECT_BUCKET is OK, and the answer has neither extras nor key."""
    answer = run.logged_in().ask(p.SELECT_BUCKET, key=run.target.bucket.encode())
    need_parts(need_status(answer), value=True)


@check("bucket.unknown", _BINDS, _BINARY)
def unknown(run: Run) -> None:
    """A bucket that is not there is KEY_ENOENT or EACCESS."""
    answer = run.logged_in().ask(p.SELECT_BUCKET, key=b"conformance-no-bucket")
    need_status(answer, p.ENOENT, p.EACCESS)


@check("bucket.no-key", "MUST have key", _BINARY)
def no_key(run: Run) -> None:
    """SELECT_BUCKET without a name is EINVAL, KEY_ENOENT or EACCESS."""
    need_status(run.logged_in().ask(p.SELECT_BUCKET), p.EINVAL, p.ENOENT, p.EACCESS)


@check("bucket.value", "MUST NOT have value", _BINARY)
def value(run: Run) -> None:
    """SELECT_BUCKET with a value is EINVAL."""
    wire = run.logged_in()
    key = run.target.bucket.encode()
    need_status(wire.ask(p.SELECT_BUCKET, key=key, value=b"v"), p.EINVAL)


@check(
    "bucket.config", "If successful, the command responds with the cluster configuration.", _BINARY
)
def config(run: Run) -> None:
    """GET_CLUSTER_CONFIG is answered with a JSON object that has a vBucketServerMap."""
    answer = need_status(run.kv().ask(p.GET_CLUSTER_CONFIG), may_refuse=True)
    document = answer.document()
    is_map = isinstance(document, dict) and "vBucketServerMap" in document
    need(is_map, "there is no vBucketServerMap in it")


@check("bucket.error-map", "The server will return a JSON-formatted error map", _BINARY)
def error_map(run: Run) -> None:
    """GET_ERROR_MAP with version 2 is answered with version, revision and errors."""
    answer = need_status(run.raw().ask(p.GET_ERROR_MAP, value=b"\0\2"), may_refuse=True)
    document = answer.document()
    is_map = isinstance(document, dict) and {"version", "revision", "errors"} <= set(document)
    need(is_map, "version, revision or errors are missing")


@check(
    "bucket.error-map-version",
    "which is formatted to either the version requested by the client, or a lower version",
    _BINARY,
)
def error_map_version(run: Run) -> None:
    """GET_ERROR_MAP with version 1 is answered with version 1."""
    answer = need_status(run.raw().ask(p.GET_ERROR_MAP, value=b"\0\1"), may_refuse=True)
    document = answer.document()
    given = document.get("version") if isinstance(document, dict) else None
    need(given == 1, f"the map has version {given}")


@check(
    "bucket.error-map-entries",
    "Each key represents the error code in hexadecimal format.",
    pages.ERROR_MAP,
)
def error_map_entries(run: Run) -> None:
    """Each entry has a hexadecimal code, and name, desc and attrs."""
    answer = need_status(run.raw().ask(p.GET_ERROR_MAP, value=b"\0\2"), may_refuse=True)
    document = answer.document()
    errors = document.get("errors") if isinstance(document, dict) else None
    if not isinstance(errors, dict) or not errors:
        raise FaultError("there are no errors in it")
    for code, entry in errors.items():
        is_hex = all(letter in "0123456789abcdef" for letter in code.lower())
        has_all = isinstance(entry, dict) and {"name", "desc", "attrs"} <= set(entry)
        need(is_hex and has_all, f"the entry {code!r} is {str(entry)[:80]}")
