"""The kinds `crowd` and `logins`: many connections that stand still, and floods of logins.

`crowd`: connections from several addresses send a part of a request and stop, or continue byte by
byte: headers, bodies, TLS handshakes, HTTP requests. Others request much and read nothing.
Meanwhile new well-behaved clients have to be served and memory stays within the settings;
afterwards all memory and connections are released.

`logins`: 300 logins a second by PLAIN and SCRAM, wrong and right ones, from one address or many. No
wrong login may succeed; right logins from another address do.
"""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from scramp import ScramClient, ScramException

from dcp.wire.frame import pack_request
from dcp.wire.message import StreamRequest, pack_open, pack_stream_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient, login, request
from tests.soak.attack.case import Case, Fault
from tests.soak.attack.streams import PRODUCER
from tests.soak.attack.targets import (
    MIB,
    PASSWORDS,
    RECEIVE_BYTES_MAX,
    SEND_BYTES_MAX,
    Target,
    resident_bytes,
)
from vbucket.model.ids import vbucket_of

CASES_PER_TARGET: Final = 60
MEMORY_SLACK_BYTES: Final = 128 * MIB
"""On top of the two limits: answers while they are made, eight dumps with a line of 5 MiB each, and
what the allocator keeps."""
CONNECTION_BYTES: Final = MIB // 2
"""And for each connection: with TLS, asyncio alone has 256 KiB to read into."""
DRIP_EVERY_S: Final = 0.1
CHECK_EVERY_S: Final = 0.4
LOGINS_PER_S: Final = 300
GUESSERS: Final = 12
TRIES: Final = 3
"""At the limit a new connection may be closed for a newer one before its first packet comes."""
BUSY: Final = frozenset({Status.ETMPFAIL, Status.EBUSY})
MECHANISMS: Final = {
    b"SCRAM-SHA1": "SCRAM-SHA-1",
    b"SCRAM-SHA256": "SCRAM-SHA-256",
    b"SCRAM-SHA512": "SCRAM-SHA-512",
}


def get_target(case: Case) -> Target:
    return case.share("target", CASES_PER_TARGET, Target)


# -- crowd -----------------------------------------------------------------------------------------


class Sender(NamedTuple):
    """What one connection of the crowd does."""

    port: int
    first: bytes
    drip: bytes
    """Sent byte by byte afterwards, again and again."""
    reads: bool
    """Whether it reads what it is answered."""


def kv_half(draw: random.Random, target: Target) -> Sender:
    """A part of a packet: of its header or of its body."""
    size = draw.choice((100, 10_000, 60_000, 500_000))
    packet = pack_request(Opcode.SET, key=b"noise", value=bytes(size), extras=bytes(8))
    cut = draw.choice((1, 10, 24, len(packet) // 2, len(packet) - 1))
    return Sender(target.server.port, packet[:cut], draw.choice((b"", b"\0")), True)


def kv_text(draw: random.Random, target: Target) -> Sender:
    first = draw.choice((b"set noise 0 0 100000\r\nabc", b"get ", b"g", b"gets " + b"x" * 2000))
    return Sender(target.server.port, first, draw.choice((b"", b"a")), True)


def kv_unread(draw: random.Random, target: Target) -> Sender:
    """Request much, read nothing."""
    user = b"\0root\0" + PASSWORDS["root"].encode()
    begin = pack_request(Opcode.SASL_AUTH, key=b"PLAIN", value=user)
    begin += pack_request(Opcode.SELECT_BUCKET, key=b"default")
    if draw.random() < 0.5:
        gets = [
            pack_request(Opcode.GET, key=key, vb_id=vbucket_of(key))
            for key in draw.choices(target.large, k=draw.randint(1, 12))
        ]
        return Sender(target.server.port, begin + b"".join(gets), b"", False)
    begin += pack_open(b"unread-%d" % draw.getrandbits(40), PRODUCER)
    for vb_id in target.history.changes:
        begin += pack_stream_request(vb_id, StreamRequest(0, 0, 2**64 - 1, 0, 0, 0), opaque=vb_id)
    return Sender(target.server.port, begin, b"", False)


def tls_half(draw: random.Random, target: Target) -> Sender:
    hello = target.server.client_hello()
    cut = draw.choice((0, 1, 5, 100, len(hello)))
    server = target.server
    port = draw.choice((server.tls_port, server.admin_tls_port))
    return Sender(port, hello[:cut], b"", True)


def http_half(draw: random.Random, target: Target) -> Sender:
    """An unfinished HTTP request, which stops or goes on byte by byte."""
    head = request("GET", "/api/v1/status", login())
    post = request(
        "POST", "/api/v1/compact", login(), "content-type: application/json",
        "content-length: 60000",
    )  # fmt: skip
    chunked = request("POST", "/api/v1/compact", login(), "transfer-encoding: chunked")
    first, drip = draw.choice(
        ((b"", b""), (b"GE", b""), (head[:-2], b"x"), (head[:40], b"y"), (post, b" "),
         (post + b"{", b" "), (chunked, b"1"), (head[:-2] + b"a: " + b"b" * 15_000, b"b"))
    )  # fmt: skip
    return Sender(target.server.admin_port, first, drip, True)


def http_unread(draw: random.Random, target: Target) -> Sender:
    """Send many requests, or one with a long answer, and read nothing."""
    path = draw.choice(("/metrics?vbuckets=1", "/pools/default/buckets", "/api/v1/streams"))
    if draw.random() < 0.3:
        path = f"/api/v1/vbuckets/{vbucket_of(target.large[0])}/documents"
    return Sender(target.server.admin_port, request("GET", path, login()) * 30, b"", False)


SENDERS: Final[tuple[Callable[[random.Random, Target], Sender], ...]] = (
    kv_half, kv_half, kv_text, kv_unread, tls_half, http_half, http_half, http_unread,
)  # fmt: skip


class Member:
    """One connection of the crowd."""

    def __init__(self, sender: Sender, from_host: str) -> None:
        self._sender = sender
        self._unsent = sender.first
        self.is_open = True
        self._socket = socket.socket()
        self._socket.settimeout(5.0)
        if not sender.reads:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        try:
            self._socket.bind((from_host, 0))
            self._socket.connect(("127.0.0.1", sender.port))
        except OSError:
            self.close()
            return
        self._socket.setblocking(False)

    def go_on(self) -> None:
        """Send and read without waiting."""
        if not self.is_open:
            return
        try:
            with contextlib.suppress(BlockingIOError):
                data = self._unsent or self._sender.drip
                if data:
                    sent = self._socket.send(data)
                    self._unsent = self._unsent[sent:]
            if self._sender.reads:
                with contextlib.suppress(BlockingIOError):
                    if not self._socket.recv(1 << 16):
                        self.close()
        except OSError:
            self.close()

    def close(self) -> None:
        self.is_open = False
        self._socket.close()


def addresses(draw: random.Random) -> list[str]:
    own = ["127.0.0.1"] if draw.random() < 0.5 else []
    several = [f"127.0.{draw.randint(1, 250)}.{n}" for n in range(1, draw.randint(2, 9))]
    return own + several


def crowd(case: Case) -> None:
    target, draw = get_target(case), case.draw
    count = 40 if case.is_short else draw.choice((30, 80, 150, 250))
    hosts = addresses(draw)
    kinds = draw.sample(SENDERS, draw.randint(1, len(SENDERS)))
    names = sorted({kind.__name__ for kind in kinds})
    case.note(f"{count} connections from {len(hosts)} addresses: {', '.join(names)}")
    target.watch(case)
    members: list[Member] = []
    most_bytes = 0
    until_s = time.monotonic() + case.seconds(2.0, 6.0)
    check_at_s = 0.0
    try:
        while time.monotonic() < until_s:
            members = [member for member in members if member.is_open]
            for _ in range(min(20, count - len(members))):
                members.append(Member(draw.choice(kinds)(draw, target), draw.choice(hosts)))
            for member in members:
                member.go_on()
            if time.monotonic() > check_at_s:
                check_newcomer(case, target)
                check_at_s = time.monotonic() + CHECK_EVERY_S
            most_bytes = max(most_bytes, resident_bytes(target.server.pid))
            time.sleep(DRIP_EVERY_S)
    finally:
        for member in members:
            member.close()
    growth = most_bytes - target.rss_bytes
    case.note(f"{growth >> 20} MiB more")
    limit = RECEIVE_BYTES_MAX + SEND_BYTES_MAX + MEMORY_SLACK_BYTES + count * CONNECTION_BYTES
    text = f"memory grew by {growth} bytes; the bounds and the slack are {limit}"
    case.demand(growth < limit, Fault.BROKEN, text)
    target.check(case)


def check_newcomer(case: Case, target: Target) -> None:
    """A well-behaved client is served, with TLS and without, and over HTTP."""
    tries: list[str] = []
    key = target.history.keys[20]
    while len(tries) < TRIES:
        began_s = time.monotonic()
        try:
            with target.client("prober") as client:
                frame = client.ask(Opcode.GET, key=key, vb_id=vbucket_of(key))
                case.demand(not frame.status, Fault.WRONG, f"a newcomer's GET was {frame}")
            check_tls(target)
            return
        except (OSError, AssertionError) as error:
            if isinstance(error, AssertionError) and type(error) is not AssertionError:
                raise
            tries.append(f"{error!r} after {time.monotonic() - began_s:.1f} s")
    case.find(Fault.BROKEN, f"a newcomer was not served in {TRIES} tries: {tries}")


def check_tls(target: Target) -> None:
    """Send a request to both TLS ports."""
    server = target.server
    context = ssl.create_default_context(cafile=server.ca.path)
    asked = (
        (server.tls_port, pack_request(Opcode.NOOP)),
        (server.admin_tls_port, request("GET", "/readyz")),
    )
    for port, question in asked:
        with (
            socket.create_connection(("127.0.0.1", port), 20.0) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            connection.sendall(question)
            assert connection.recv(4096), f"port {port} closed"


# -- logins ----------------------------------------------------------------------------------------


class Guesser(threading.Thread):
    """Logs in again and again at a fixed rate."""

    def __init__(
        self, target: Target, draw: random.Random, hosts: list[str], until_s: float
    ) -> None:
        super().__init__(name="guesser", daemon=True)
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._target, self._draw, self._hosts, self._until_s = target, draw, hosts, until_s

    def run(self) -> None:
        pause_s = GUESSERS / LOGINS_PER_S
        due_s = time.monotonic() + self._draw.uniform(0, pause_s)
        while time.monotonic() < self._until_s:
            with (
                contextlib.suppress(OSError, AssertionError),
                RawClient(
                    self._target.server.port, from_host=self._draw.choice(self._hosts)
                ) as one,
            ):
                for _ in range(5):  # after so many wrong ones the server closes
                    time.sleep(max(0.0, due_s - time.monotonic()))
                    due_s += pause_s
                    if time.monotonic() > self._until_s:
                        return
                    self._guess(one)

    def _guess(self, client: RawClient) -> None:
        user = self._draw.choice(("root", "noisy", "nobody", "guest", "x" * 300))
        right = PASSWORDS.get(user, "guest" if user == "guest" else "")
        is_right = bool(right) and self._draw.random() < 0.1
        password = right if is_right else self._draw.choice(("", "wrong", right[:-1], "y" * 500))
        if self._draw.random() < 0.7:
            status = client.log_in(user, password).status
        else:
            status = scram(client, self._draw, user, password or "empty")
        self.answers[Status(status).name] += 1
        if not status and not is_right:
            self.wrong.append(f"{user} got in with {password[:40]!r}")


def scram(client: RawClient, draw: random.Random, user: str, password: str) -> int:
    """Log in by SCRAM; some attempts break off or send nonsense. Return the status."""
    name = draw.choice(list(MECHANISMS))
    if draw.random() < 0.4:
        nonsense = draw.choice((b"", b"n,,n=root,r=abc", b"n,,n=\xff", draw.randbytes(200)))
        frame = client.ask(Opcode.SASL_AUTH, key=name, value=nonsense)
        if frame.status == Status.AUTH_CONTINUE:
            frame = client.ask(Opcode.SASL_STEP, key=name, value=draw.randbytes(50))
        return frame.status
    exchange = ScramClient([MECHANISMS[name]], user, password)
    first = exchange.get_client_first().encode()
    frame = client.ask(Opcode.SASL_AUTH, key=name, value=first)
    if frame.status != Status.AUTH_CONTINUE:
        return frame.status
    try:
        exchange.set_server_first(frame.value.decode())
    except ScramException:
        return Status.AUTH_ERROR
    final = exchange.get_client_final().encode()
    return client.ask(Opcode.SASL_STEP, key=name, value=final).status


def logins(case: Case) -> None:
    target, draw = get_target(case), case.draw
    subnet = f"127.{draw.randint(10, 250)}.{draw.randint(1, 250)}"
    count = draw.choice((1, 3, 200))
    hosts = [f"{subnet}.{number + 1}" for number in range(count)]
    seconds = case.seconds(2.0, 5.0)
    case.note(f"{LOGINS_PER_S} logins a second from {count} addresses for {seconds:.1f} s")
    target.watch(case)
    until_s = time.monotonic() + seconds
    guessers = [
        Guesser(target, random.Random(draw.random()), hosts, until_s) for _ in range(GUESSERS)
    ]
    for guesser in guessers:
        guesser.start()
    statuses: Counter[str] = Counter()
    while time.monotonic() < until_s:
        statuses[log_in_once(target, f"127.0.{draw.randint(1, 250)}.{draw.randint(1, 250)}")] += 1
        time.sleep(0.1)
    for guesser in guessers:
        guesser.join(30.0)
        case.demand(not guesser.is_alive(), Fault.BROKEN, "a login was not answered for 30 s")
    answers = sum((guesser.answers for guesser in guessers), Counter[str]())
    case.note(f"answers {dict(answers)}, others' {dict(statuses)}")
    for guesser in guessers:
        case.demand(not guesser.wrong, Fault.WRONG, "; ".join(guesser.wrong[:3]))
    refused = {name for name in statuses if name not in {"OK", *(status.name for status in BUSY)}}
    case.demand(not refused, Fault.WRONG, f"right logins from other addresses were {refused}")
    case.demand(statuses["OK"], Fault.BROKEN, f"no right login succeeded: {dict(statuses)}")
    target.check(case)


def log_in_once(target: Target, host: str) -> str:
    """Log in with the right password from an address of its own; return the status."""
    with RawClient(target.server.port, from_host=host) as client:
        return Status(client.log_in("prober", PASSWORDS["prober"]).status).name
