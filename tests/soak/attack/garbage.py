"""The kind `garbage`: input that is not the protocol, at every port.

    frames     random and mutated packets, as `tests.soak.fuzz` makes them, and memcached's text
    http       HTTP to the key-value port
    crossed    TLS to ports without it, and the other way round
    pages      admin requests that a web page could make a browser send: from another origin, or
               with a host name that resolves to this server. Each must be refused, reads included

They come without a login or from a user with few rights. In 40 % of the cases they come from a user
with all rights, on a server of their own whose documents are not checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from support.raw_client import RawClient, ask, login, request
from tests.soak.attack.case import AttackedServer, AttackError, Case, Fault
from tests.soak.attack.commands import dcpctl
from tests.soak.attack.crowds import get_target
from tests.soak.attack.probe import Watched
from tests.soak.attack.targets import PASSWORDS, Target
from tests.soak.fuzz import TEXT, piece

CASES_PER_SCRAP: Final = 60
THROWERS: Final = 4
VERIFY_EVERY: Final = 7
FOREIGN: Final = (
    ("evil.example", ()),
    ("", ()),
    ("127.0.0.1.evil.example", ()),
    ("{own}", ("origin: http://evil.example",)),
    ("{own}", ("origin: null",)),
    ("{own}", ("origin: http://127.0.0.1:1",)),
    ("{own}", ("sec-fetch-site: cross-site",)),
    ("{own}", ("sec-fetch-site: same-site",)),
    ("evil.example", ("origin: http://{own}",)),
)
"""Host, and headers that a browser adds for a page."""
ROUTES: Final = (
    ("GET", "/api/v1/status", b""),
    ("GET", "/metrics", b""),
    ("GET", "/api/v1/users", b""),
    ("GET", "/pools/default", b""),
    ("GET", "/api/v1/streams", b""),
    ("POST", "/api/v1/compact", b"{}"),
    ("POST", "/api/v1/users", b'{"name": "evil", "password": "evil-evil"}'),
    ("POST", "/api/v1/vbuckets/5/branch", b'{"at": 0}'),
    ("DELETE", "/api/v1/users/root", b""),
    ("OPTIONS", "/api/v1/users", b""),
    ("PUT", "/api/v1/users/root/password", b'{"password": "evil-evil"}'),
)


class Scrap:
    """A server whose documents are not checked."""

    def __init__(self, folder: Path, _draw: random.Random) -> None:
        self.server = AttackedServer(folder / "data", "--value-bytes-max", "1MiB")
        self.server.start()

    def close(self) -> None:
        self.server.close()


class Thrower(threading.Thread):
    """Sends garbage on one connection after another, and reads the answers."""

    def __init__(self, throw: Callable[[], None], until_s: float) -> None:
        super().__init__(name="thrower", daemon=True)
        self._throw, self._until_s = throw, until_s
        self.thrown = 0

    def run(self) -> None:
        while time.monotonic() < self._until_s:
            with contextlib.suppress(OSError):
                self._throw()
                self.thrown += 1


def exchange(port: int, data: bytes, pause_s: float = 0.02) -> None:
    """Send bytes, read for a moment, close."""
    with socket.create_connection(("127.0.0.1", port), 10.0) as connection:
        connection.sendall(data)
        connection.settimeout(pause_s)
        with contextlib.suppress(TimeoutError):
            while connection.recv(1 << 16):
                pass


def frames(port: int, draw: random.Random, user: str = "") -> None:
    """Send garbage on one connection, with or without a login first."""
    begin = b""
    if user:
        plain = f"\0{user}\0{PASSWORDS[user]}".encode()
        begin = pack_request(Opcode.SASL_AUTH, key=b"PLAIN", value=plain)
        begin += pack_request(Opcode.SELECT_BUCKET, key=b"default")
    data = begin + b"".join(piece(draw)[1] for _ in range(draw.randint(1, 6)))
    if draw.random() < 0.2:
        data = b"".join(draw.choices(TEXT, k=20)) + draw.randbytes(draw.randint(0, 300))
    exchange(port, data)


def http(port: int, draw: random.Random) -> None:
    exchange(port, request(draw.choice(("GET", "POST", "PRI")), draw.choice(("/", "*")), login()))


def crossed(target: Target, draw: random.Random) -> None:
    """Send TLS to a plain port, or plain bytes to a TLS port."""
    server = target.server
    plain, tls = (server.port, server.admin_port), (server.tls_port, server.admin_tls_port)
    if draw.random() < 0.5:
        exchange(draw.choice(plain), server.client_hello())
        return
    data = draw.choice((pack_request(Opcode.NOOP), request("GET", "/livez"), draw.randbytes(300)))
    exchange(draw.choice(tls), data)


def over_tls(target: Target, draw: random.Random) -> None:
    """Send garbage inside TLS."""
    server = target.server
    context = ssl.create_default_context(cafile=server.ca.path)
    port = draw.choice((server.tls_port, server.admin_tls_port))
    with (
        socket.create_connection(("127.0.0.1", port), 10.0) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall(piece(draw)[1])
        connection.settimeout(0.05)
        with contextlib.suppress(TimeoutError):
            while connection.recv(1 << 16):
                pass


def admin_noise(port: int, draw: random.Random) -> None:
    """Send malformed HTTP."""
    head = request("GET", "/api/v1/status", login())
    post = request("POST", "/api/v1/faults", login(), "content-type: application/json")
    bad_heads = (b"a b: c", b"content-length: -1", b"content-length: 5\r\ncontent-length: 6")
    noise = [
        draw.randbytes(200), head.replace(b"HTTP/1.1", b"HTTP/9.9"), b"\r\n" * 50,
        b"GET " + b"/" * 20_000 + b" HTTP/1.1\r\n\r\n",
        request("GET", "/%00%ff/../../etc/passwd", login()),
        post[:-2] + b"content-length: 9\r\n\r\n[[[[[[[[[",
        post[:-2] + b"transfer-encoding: chunked\r\n\r\nffffffffff\r\n",
        *(head[:-2] + bad + b"\r\n\r\n" for bad in bad_heads),
    ]  # fmt: skip
    exchange(port, draw.choice(noise))


async def check_pages(case: Case, server: AttackedServer) -> None:
    """Check that every request that a foreign page can cause is refused."""
    own = f"127.0.0.1:{server.admin_port}"
    for method, path, body in case.draw.sample(ROUTES, 4):
        host, headers = case.draw.choice(FOREIGN)
        more = [header.format(own=own) for header in headers]
        kind = "content-type: application/json"
        answer = await ask(
            server.admin_port, method, path, login(), kind, *more,
            host=host.format(own=own), body=body,
        )  # fmt: skip
        is_refused = answer.status in {400, 403}
        text = f"{method} {path} with Host {host!r}, {more}: {answer.status} {answer.body!r:.200}"
        case.demand(is_refused, Fault.WRONG, text)
        shared = [name for name in answer.headers if name.startswith("access-control-")]
        case.demand(not shared, Fault.WRONG, f"{method} {path} answers {shared} to a foreign page")


def throw(case: Case, throws: list[Callable[[], None]], seconds: float) -> int:
    """Send garbage for some time; return the number of connections."""
    until_s = time.monotonic() + seconds
    throwers = [Thrower(one, until_s) for one in throws]
    for thrower in throwers:
        thrower.start()
    for thrower in throwers:
        thrower.join(seconds + 30.0)
        case.demand(not thrower.is_alive(), Fault.BROKEN, "garbage was not taken for 30 s")
    return sum(thrower.thrown for thrower in throwers)


def run(case: Case) -> None:
    if case.draw.random() < 0.4:
        at_scrap(case)
        return
    target, draw = get_target(case), case.draw
    server = target.server
    draws = [random.Random(draw.random()) for _ in range(THROWERS)]
    ways: dict[str, Callable[[random.Random], None]] = {
        "frames": lambda one: frames(server.port, one, "" if target.needs_login else "noisy"),
        "frames as noisy": lambda one: frames(server.port, one, "noisy"),
        "frames as prober": lambda one: frames(server.port, one, "prober"),
        "http": lambda one: http(server.port, one),
        "crossed": lambda one: crossed(target, one),
        "over TLS": lambda one: over_tls(target, one),
        "admin noise": lambda one: admin_noise(server.admin_port, one),
    }
    chosen = [draw.choice(list(ways)) for _ in draws]
    case.note(f"{', '.join(sorted(set(chosen)))} and pages")
    target.watch(case)
    throws = [
        lambda way=ways[name], one=one: way(one) for name, one in zip(chosen, draws, strict=True)
    ]
    case.note(f"{throw(case, throws, case.seconds(1.0, 4.0))} connections")
    asyncio.run(check_pages(case, server))
    target.check(case)


def at_scrap(case: Case) -> None:
    """Send garbage with all rights: the server must survive, and its folder must be sound."""
    server = case.share("scrap", CASES_PER_SCRAP, Scrap).server
    draws = [random.Random(case.draw.random()) for _ in range(THROWERS)]
    case.watch(Watched(server.port, server.admin_port))
    throws = [lambda one=one: frames(server.port, one) for one in draws]
    case.note(f"all rights, {throw(case, throws, case.seconds(1.0, 4.0))} connections")
    case.rest()
    server.check(case)
    check_set(server)
    if case.seed % VERIFY_EVERY == 0 or case.is_short:
        case.demand(server.stop() == 0, Fault.BROKEN, "no clean stop")
        told = dcpctl("verify", "-o", "json", server.data)
        case.demand(not told.code, Fault.WRONG, f"verify: {told.text[-500:]}")
        server.start()
        check_set(server)


def check_set(server: AttackedServer) -> None:
    with RawClient(server.port) as client:
        frame = client.set(b"after", b"garbage")
        if frame.status:
            raise AttackError(Fault.BROKEN, f"a SET after garbage was {frame}")
