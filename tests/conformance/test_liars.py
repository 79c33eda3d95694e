"""Servers that lie: the right check names each lie. And what is no server of DCP gets a verdict.

The liar is dcpd behind a proxy that alters what it says.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from struct import pack

import pytest

import clients.conformance.checks  # noqa: F401 - fills the table of checks
from clients.conformance import packet as p
from clients.conformance.check import (
    CHECKS,
    FAIL,
    FIRST,
    NOT_APPLICABLE,
    PASS,
    UNREADABLE,
    Run,
    Target,
    chosen,
    judge,
    judge_all,
)
from clients.conformance.packet import MalformedError, Packet
from clients.testing import DcpServer

Lie = Callable[[list[Packet]], list[Packet]]
"""Takes the packets that the server sent together, returns those that the client gets."""
TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def dcpd() -> Iterator[DcpServer]:
    with DcpServer() as server:
        yield server


def _listen(talk: Callable[[socket.socket], None]) -> socket.socket:
    """Let each connection be talked to in a thread of its own, until the listener is closed."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=_quietly, args=(talk, connection), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return listener


def _quietly(talk: Callable[[socket.socket], None], connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        talk(connection)


class Liar:
    """A proxy before dcpd; `lie` alters answers and messages, `request` what the client sends."""

    def __init__(self, dcpd: DcpServer, lie: Lie, request: Lie) -> None:
        self._dcpd, self._lie, self._request = dcpd, lie, request

    def talk(self, client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self._dcpd.port)) as server:
            back = threading.Thread(target=_pump, args=(server, client, self._lie), daemon=True)
            back.start()
            _pump(client, server, self._request)


def _pump(source: socket.socket, target: socket.socket, alter: Lie) -> None:
    """Pass packets on until one side ends."""
    target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = bytearray()
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            buffer += data
            packets = []
            try:
                while (taken := p.take(buffer)) is not None:
                    packets.append(taken[0])
                    del buffer[: taken[1]]
            except MalformedError:  # what a check sends on purpose is passed on as it is
                target.sendall(buffer)
                buffer.clear()
            target.sendall(b"".join(map(p.pack, alter(packets))))
        target.shutdown(socket.SHUT_WR)


def _plain(packets: list[Packet]) -> list[Packet]:
    return packets


def _each(opcode: int, change: Callable[[Packet], Packet | None], *, requests: bool = True) -> Lie:
    """Change, or leave out, the packets of an opcode."""

    def lie(packets: list[Packet]) -> list[Packet]:
        changed = [
            change(each) if each.opcode == opcode and each.is_request == requests else each
            for each in packets
        ]
        return [each for each in changed if each is not None]

    return lie


def _swapped(packets: list[Packet]) -> list[Packet]:
    """Swap the first two mutations that follow each other."""
    for at in range(len(packets) - 1):
        if packets[at].opcode == packets[at + 1].opcode == p.MUTATION:
            packets[at : at + 2] = [packets[at + 1], packets[at]]
            break
    return packets


def _doubled(packets: list[Packet]) -> list[Packet]:
    return [each for one in packets for each in ([one] * (1 + (one.opcode == p.MUTATION)))]


def _extras(at: int, data: bytes) -> Callable[[Packet], Packet]:
    return lambda one: one._replace(extras=one.extras[:at] + data + one.extras[at + len(data) :])


def _status(of: int, to: int) -> Callable[[Packet], Packet]:
    return lambda one: one._replace(field=to) if one.field == of else one


LIES: dict[str, tuple[str, Lie, str]] = {
    "no snapshot marker": (
        "snapshots.first", _each(p.MARKER, lambda _: None), "it is MUTATION"
    ),
    "two mutations swapped": ("snapshots.bounds", _swapped, "comes after"),
    "each mutation twice": ("snapshots.rise", _doubled, "comes after"),
    "a snapshot that ends too early": (
        "snapshots.bounds", _each(p.MARKER, _extras(8, bytes(7) + b"\1")), "snapshot"
    ),
    "the wrong opaque on mutations": (
        "request.opaque",
        _each(p.MUTATION, lambda one: one._replace(opaque=one.opaque ^ 1)),
        "the opaque of MUTATION",
    ),
    "the wrong opaque on answers": (
        "framing.opaque",
        _each(p.NOOP, lambda one: one._replace(opaque=one.opaque ^ 1), requests=False),
        "nothing came in time",
    ),
    "a wrong seqno to roll back to": (
        "rollback.unknown-uuid",
        _each(
            p.DCP_STREAM_REQ,
            lambda one: one._replace(value=pack(">Q", 1)) if one.field == p.ROLLBACK else one,
            requests=False,
        ),
        "it says roll back to 1, not 0",
    ),
    "another CAS": (
        "mutations.cas",
        _each(p.MUTATION, lambda one: one._replace(cas=one.cas + 1)),
        "the writer was answered",
    ),
    "a lost mutation": (
        "request.resume",
        _each(p.MUTATION, lambda one: None if one.key.endswith(b":4") else one),
        "it shows",
    ),
    "the wrong reason of an end": (
        "request.end", _each(p.STREAM_END, _extras(0, pack(">I", 3))), "the reason is 00000003"
    ),
    "no STREAM_END": (
        "end.layout", _each(p.STREAM_END, lambda _: None), "nothing came in time"
    ),
    "deletions with a byte too many": (
        "deletions.layout",
        _each(p.DELETION, lambda one: one._replace(extras=one.extras + b"\0")),
        "have 19 bytes, not 18",
    ),
    "no JSON bit": (
        "mutations.json",
        _each(p.MUTATION, lambda one: one._replace(datatype=0)),
        "the datatypes are [0, 0]",
    ),
    "no expiry": ("mutations.expiry", _each(p.MUTATION, _extras(20, bytes(4))), "the expiry is 0"),
    "revisions that stand still": (
        "mutations.revision", _each(p.MUTATION, _extras(8, pack(">Q", 1))), "has revision 1"
    ),
    "a uuid of 0": (
        "failover-log.uuids",
        _each(
            p.DCP_FAILOVER_LOG, lambda one: one._replace(value=bytes(8) + one.value[8:]),
            requests=False,
        ),
        "a uuid is 0",
    ),
    "half an entry in the failover log": (
        "failover-log.dcp",
        _each(
            p.DCP_FAILOVER_LOG, lambda one: one._replace(value=one.value[:-1]), requests=False
        ),
        "no multiple of 16",
    ),
    "everything in range": (
        "request.start-above-end",
        _each(p.DCP_STREAM_REQ, _status(p.ERANGE, p.OK), requests=False),
        "is answered OK, not ERANGE",
    ),
    "two streams of a partition": (
        "request.twice",
        _each(p.DCP_STREAM_REQ, _status(p.EEXISTS, p.OK), requests=False),
        "is answered OK, not KEY_EEXISTS",
    ),
    "every feature granted": (
        "hello.unknown-feature",
        _each(
            p.HELLO, lambda one: one._replace(value=one.value + b"\x7f\xf0"), requests=False
        ),
        "0x7ff0 is granted",
    ),
    "system events without collections": (
        "collections.stream-plain",
        _each(
            p.MARKER,
            lambda one: one._replace(opcode=p.SYSTEM_EVENT, extras=one.extras[8:16] + bytes(5)),
        ),
        "a system event came",
    ),
    "expirations as deletions": (
        "expirations.opcode",
        _each(p.EXPIRATION, lambda one: one._replace(opcode=p.DELETION)),
        "it is DELETION",
    ),
    "NOOPs with a value": (
        "noop.comes", _each(p.DCP_NOOP, lambda one: one._replace(value=b"v")), "has a value"
    ),
    "a filter that is ignored": (
        "value.both-filters",
        _each(p.DCP_STREAM_REQ, _status(p.EINVAL, p.OK), requests=False),
        "is answered OK, not EINVAL",
    ),
    "a value with another byte": (
        "mutations.large-value",
        _each(p.MUTATION, lambda one: one._replace(value=b"x" + one.value[1:])),
        "the value is another",
    ),
}  # fmt: skip
"""What the server does -> the check that says so, the lie, and words of its reason."""
IGNORED = {
    "the window is ignored": ("flow.stops", "connection_buffer_size", "all came"),
}
"""What the server does not hear -> the check, the control, and words of the reason."""


def _judged(server: socket.socket, only: str, timeout_s: float = TIMEOUT_S) -> dict[str, list[str]]:
    port = server.getsockname()[1]
    target = Target("127.0.0.1", port, "guest", "guest", timeout_s=timeout_s)
    with server:
        results = list(judge_all(target, chosen(only)))
    return {each.check.id: [each.outcome, each.reason, *each.exchange] for each in results}


@pytest.mark.parametrize("lie", LIES)
def test_the_right_check_names_a_lie(dcpd: DcpServer, lie: str) -> None:
    check, alters, says = LIES[lie]
    found = _judged(_listen(Liar(dcpd, alters, _plain).talk), check)
    assert found[FIRST][0] == PASS, found[FIRST]
    outcome, reason, *exchange = found[check]
    assert (outcome, says in reason) == (FAIL, True), reason
    assert exchange, "a failure shows its packets"


@pytest.mark.parametrize("lie", IGNORED)
def test_a_check_names_what_a_server_does_not_hear(dcpd: DcpServer, lie: str) -> None:
    check, control, says = IGNORED[lie]
    deaf = _each(
        p.CONTROL,
        lambda one: one._replace(value=b"0") if one.key == control.encode() else one,
    )
    found = _judged(_listen(Liar(dcpd, _plain, deaf).talk), check)
    outcome, reason, *_ = found[check]
    assert (outcome, says in reason) == (FAIL, True), reason


@pytest.mark.parametrize("check", sorted({each[0] for each in LIES.values()}))
def test_an_honest_server_passes_through_the_same_proxy(dcpd: DcpServer, check: str) -> None:
    found = _judged(_listen(Liar(dcpd, _plain, _plain).talk), check)
    assert found[check][0] == PASS, found[check]


SPOILED: dict[str, Callable[[random.Random, Packet], Packet]] = {
    "no value": lambda _, one: one._replace(value=b""),
    "another value": lambda dice, one: one._replace(value=dice.randbytes(len(one.value))),
    "JSON of another kind": lambda _, one: one._replace(
        value=b'{"scopes":3,"errors":[1],"version":null,"uid":[]}' if one.value else b""
    ),
    "no extras": lambda _, one: one._replace(extras=b""),
    "no key": lambda _, one: one._replace(key=b""),
    "another status": lambda dice, one: one if one.is_request else one._replace(
        field=dice.choice([0, 1, 4, 0x22, 0x23, 0x81])
    ),
    "framing": lambda dice, one: one._replace(
        magic=p.FLEX_REQUEST if one.is_request else p.FLEX_RESPONSE, framing=dice.randbytes(3)
    ),
}  # fmt: skip
KEPT = frozenset({p.HELLO, p.SASL_AUTH, p.SELECT_BUCKET, p.GET_ALL_VB_SEQNOS})
"""What is not spoiled, so that the checks are reached."""
SLOW = frozenset({"noop", "expirations", "flow"})


@pytest.mark.parametrize("how", SPOILED)
def test_whatever_a_server_sends_a_check_says_what_is_wrong(dcpd: DcpServer, how: str) -> None:
    """Each check ends with a verdict of its own, not with an error of Python."""
    dice = random.Random(how)

    def spoil(packets: list[Packet]) -> list[Packet]:
        return [one if one.opcode in KEPT else SPOILED[how](dice, one) for one in packets]

    names = ",".join(dict.fromkeys(e.group for e in CHECKS.values() if e.group not in SLOW))
    found = _judged(_listen(Liar(dcpd, spoil, _plain).talk), names, timeout_s=0.05)
    assert any(each[0] == FAIL for each in found.values())
    odd = {check: each[1] for check, each in found.items() if each[1].startswith(UNREADABLE)}
    assert odd == {}


def test_an_error_of_a_check_is_a_verdict_too(dcpd: DcpServer) -> None:
    def does(_run: Run) -> None:
        raise IndexError("no such message")

    one = CHECKS[FIRST]._replace(does=does)
    result = judge(one, Target("127.0.0.1", dcpd.port), 0)
    assert (result.outcome, UNREADABLE in result.reason) == (FAIL, True)


def _silent(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def _says(data: bytes, *, then_silent: bool) -> Callable[[socket.socket], None]:
    def talk(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(data)
        if then_silent:
            _silent(connection)

    return talk


def _closes(connection: socket.socket) -> None:
    connection.recv(1)


def _drips(connection: socket.socket) -> None:
    """Send one byte of an answer now and then, so that something always comes."""
    wait = threading.Event()
    for byte in p.pack(Packet(p.RESPONSE, p.HELLO, 0, 1, value=bytes(4_000))):
        connection.sendall(bytes([byte]))
        wait.wait(0.02)


def _floods(connection: socket.socket) -> None:
    while True:
        connection.sendall(p.pack(Packet(p.RESPONSE, p.NOOP, 0, 1)) * 1_000)


_LONG = bytearray(p.pack(Packet(p.RESPONSE, p.HELLO, 0, 0x1001)))
_LONG[8:12] = b"\xff\xff\xff\xff"
_SHORT = bytearray(p.pack(Packet(p.RESPONSE, p.HELLO, 0, 0x1001)))
_SHORT[2:4] = b"\0\x10"
_HALF = bytearray(p.pack(Packet(p.RESPONSE, p.HELLO, 0, 0x1001)))
_HALF[8:12] = b"\0\0\0\x64"
NO_SERVERS = {
    "says nothing": (_silent, "nothing came in time"),
    "closes at once": (_closes, "connection"),
    "speaks HTTP": (
        _says(b"HTTP/1.1 400 Bad Request\r\n\r\n", then_silent=False),
        "does not speak the binary protocol",
    ),
    "sends garbage": (_says(bytes(range(64)), then_silent=True), "does not speak"),
    "announces 4 GiB": (_says(bytes(_LONG), then_silent=True), "body has 4294967295 bytes"),
    "has a key longer than its body": (_says(bytes(_SHORT), then_silent=True), "lies about"),
    "sends half a packet": (
        _says(bytes(_HALF), then_silent=True), "nothing came in time but 24 bytes of a packet"
    ),
    "closes in a packet": (
        _says(bytes(_HALF), then_silent=False), "closed the connection after 24 bytes"
    ),
    "drips": (_drips, "nothing came in time but"),
    "floods": (_floods, ""),
    "answers everything with an error": (
        _says(p.pack(Packet(p.RESPONSE, p.HELLO, p.NOT_SUPPORTED, 0x1001)), then_silent=True),
        "HELLO is answered NOT_SUPPORTED, not OK",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_SERVERS)
def test_what_is_no_server_of_dcp_gets_a_verdict(kind: str) -> None:
    talk, says = NO_SERVERS[kind]
    found = _judged(_listen(talk), "", timeout_s=0.3)
    outcome, reason, *_ = found[FIRST]
    assert (outcome, says in reason) == (FAIL, True), reason
    others = {check: each for check, each in found.items() if check != FIRST}
    assert set(others) == set(CHECKS) - {FIRST}
    assert {each[0] for each in others.values()} == {NOT_APPLICABLE}
    assert all(each[1].startswith("not tried: ") for each in others.values())


@pytest.mark.parametrize("output", ["table", "json", "junit"])
def test_dcpctl_ends_with_1_and_without_a_traceback(output: str) -> None:
    with _listen(NO_SERVERS["speaks HTTP"][0]) as server:
        ran = subprocess.run(
            [sys.executable, "-m", "clients.cli", "--timeout", "300ms", "conformance", "server",
             f"127.0.0.1:{server.getsockname()[1]}", "-o", output],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    assert "does not speak the binary protocol" in ran.stdout
    if output == "json":
        last = json.loads(ran.stdout.splitlines()[-1])
        assert last["summary"]["fail"] == 1
