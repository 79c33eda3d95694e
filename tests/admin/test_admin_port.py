"""An admin port that somebody sits on: deadlines, bounds, and health checks that always get in.

Deadlines are short here because they are arguments; nothing is timed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dcp.server.admin import AdminServer
from dcp.server.admin.answers import BODY_BYTES_MAX
from dcp.server.admin.routes.couchbase_routes import BLOCK_END
from dcp.server.net.crowd import Crowd, Phase, PortLimits
from support.admin_node import SmallNode
from support.credentials import TestCa
from support.raw_client import RawHttp, ask, login, request
from support.waiting import until_so

JSON = "content-type: application/json"
BRANCH = "/api/v1/vbuckets/5/branch"
STREAM = "/pools/default/bs/default"
HALF_HEADER = b"GET /api/v1/status HTTP/1.1\r\nhost: loc"
SHORT_S = 0.1
HALF_BODY = request("POST", BRANCH, login(), JSON, "content-length: 9") + b'{"at"'
NO_LOGIN_HALF_BODY = request("POST", BRANCH, JSON, "content-length: 9") + b'{"at"'


class Port:
    """A listening admin port, and connections to it that are closed at the end."""

    def __init__(self, node: SmallNode, limits: PortLimits, tls: ssl.SSLContext | None) -> None:
        self.crowd = Crowd(limits)
        self.server = AdminServer(node, self.crowd)
        self._tls = tls
        self._connections: list[RawHttp] = []
        self.client_tls: ssl.SSLContext | None = None

    async def start(self) -> None:
        self.port = await self.server.start("127.0.0.1", 0, self._tls)

    async def stop(self) -> None:
        """Stop while all connections are open."""
        await self.server.stop()

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    async def open(self, data: bytes = b"", from_host: str = "127.0.0.1") -> RawHttp:
        """Connect and send something; return once the server has let the connection in."""
        before = self.crowd.entered
        connection = await RawHttp.open(self.port, from_host)
        self._connections.append(connection)
        await until_so(lambda: self.crowd.entered > before)
        if data:
            await connection.send(data)
        return connection

    async def open_stream(self, from_host: str = "127.0.0.1") -> RawHttp:
        """Return a connection that has the first block of a stream."""
        stream = await self.open(request("GET", STREAM, login()), from_host)
        await stream.reader.readuntil(BLOCK_END)
        return stream

    async def is_alive(self, from_host: str = "127.0.0.1") -> None:
        """Health checks are answered."""
        for path in ("/livez", "/readyz"):
            found = await ask(self.port, "GET", path, from_host=from_host, tls=self.client_tls)
            assert found.status == 200

    async def is_well(self, from_host: str = "127.0.0.1") -> None:
        """Health checks and a usual request are answered."""
        await self.is_alive(from_host)
        found = await ask(self.port, "GET", "/api/v1/status", login(), from_host=from_host)
        assert found.status == 200


def phases(port: Port) -> list[Phase]:
    return [visitor.phase for visitor in port.crowd._visitors]


Serve = Callable[..., Awaitable[Port]]


@pytest.fixture
async def serve(node: SmallNode) -> AsyncIterator[Serve]:
    """Return a coroutine that starts a port with limits."""
    ports: list[Port] = []

    async def serve(tls: ssl.SSLContext | None = None, **limits: Any) -> Port:
        ports.append(Port(node, PortLimits(**limits), tls))
        await ports[-1].start()
        return ports[-1]

    yield serve
    for port in ports:
        port.close()
        await port.stop()


# -- who sits on the port ----------------------------------------------------------------------


@pytest.mark.parametrize("count", [80, 300])
@pytest.mark.parametrize("data", [HALF_HEADER, HALF_BODY], ids=["header", "body"])
async def test_half_sent_requests_keep_nobody_out(serve: Serve, count: int, data: bytes) -> None:
    port = await serve()
    sitting = []
    for _ in range(count):
        sitting.append(await port.open(data))
        await until_so(lambda: not len(port.crowd.requests))  # fewer logins at a time than places
    await port.is_well()
    assert len(port.crowd) <= 128
    rest = b"alhost\r\n" + login().encode() + b"\r\n\r\n" if data is HALF_HEADER else b":1 }"
    await sitting[-1].send(rest)
    assert (await sitting[-1].answer()).status == 200


@pytest.mark.parametrize(
    "data",
    [b"", HALF_HEADER, HALF_BODY, NO_LOGIN_HALF_BODY],
    ids=["silent", "header", "body", "no-login"],
)
async def test_the_longest_wait_makes_room_within_its_address(
    serve: Serve, node: SmallNode, data: bytes
) -> None:
    port = await serve(connections_max=16)
    other = await port.open(HALF_HEADER, "127.0.0.2")
    sitting = [await port.open(data) for _ in range(8)]
    await port.open(data)
    await sitting[0].rest()
    await port.open(data)
    await sitting[1].rest()
    await port.is_well()
    await port.is_well("127.0.0.2")
    await other.send(b"alhost\r\n" + login().encode() + b"\r\n\r\n")
    assert (await other.answer()).status == 200
    assert node.meter.admin_closed["crowded"] >= 2
    assert ("admin connection closed", "127.0.0.1") in [found[:2] for found in node.refusals]
    assert any("setting admin_connections_max" in reason for *_, reason in node.refusals)


async def test_many_addresses_together_keep_nobody_out(serve: Serve) -> None:
    port = await serve(connections_max=16)
    for number in range(40):
        await port.open(HALF_HEADER, f"127.0.1.{number % 20 + 1}")
        assert len(port.crowd) <= 16
    await port.is_well()
    await port.is_well("127.0.0.2")


async def test_an_answer_that_is_under_way_makes_no_room(serve: Serve, node: SmallNode) -> None:
    port = await serve(connections_max=16)
    stream = await port.open_stream()
    for _ in range(40):
        await port.open(HALF_HEADER)
    node.version = (1, 2)
    assert b'"rev": 2' in await stream.reader.readuntil(BLOCK_END)


# -- what comes too late -----------------------------------------------------------------------


async def test_half_a_header_is_answered_with_408(serve: Serve, node: SmallNode) -> None:
    port = await serve(request_timeout_s=SHORT_S)
    sitting = await port.open(HALF_HEADER)
    found = await sitting.answer()
    assert (found.status, found.headers["connection"]) == (408, "close")
    assert found.what == "the request did not arrive in time"
    assert found.body["error"]["why"] == (
        "the server waited 0.1 s for the whole header of a request (setting handshake_timeout)"
    )
    assert await sitting.rest() == b""
    assert node.meter.admin_closed["late"] == 1
    assert node.refusals[0][:2] == ("admin connection closed", "127.0.0.1")


async def test_a_byte_now_and_then_is_no_more_time(serve: Serve, node: SmallNode) -> None:
    port = await serve(request_timeout_s=SHORT_S)
    sitting = await port.open(b"GET /livez HTTP/1.1\r\nx: ")
    while not node.meter.admin_closed["late"]:
        with contextlib.suppress(ConnectionError):
            await sitting.send(b"y")
        await asyncio.sleep(SHORT_S / 5)  # the pace of the attack
    await sitting.rest()


async def test_silence_is_closed_without_a_word(serve: Serve) -> None:
    port = await serve(request_timeout_s=SHORT_S)
    assert await (await port.open()).rest() == b""


async def test_half_a_body_is_answered_with_408(
    serve: Serve, node: SmallNode, caplog: pytest.LogCaptureFixture
) -> None:
    port = await serve(request_timeout_s=SHORT_S)
    sitting = await port.open(HALF_BODY)
    found = await sitting.answer()
    assert (found.status, found.what) == (408, "the request did not arrive in time")
    assert "0.1 s for the whole body of a request" in found.body["error"]["why"]
    assert await sitting.rest() == b""
    assert node.meter.admin_closed["late"] == 1
    assert node.operations.told == []
    assert caplog.text == ""


async def test_half_a_body_that_nobody_reads_is_answered_and_closed(
    serve: Serve, node: SmallNode
) -> None:
    port = await serve(request_timeout_s=SHORT_S)
    sitting = await port.open(NO_LOGIN_HALF_BODY)
    assert (await sitting.answer()).status == 401
    assert await sitting.rest() == b""
    assert any("the rest of a body" in reason for *_, reason in node.refusals)


async def test_a_connection_idles_so_long_and_no_longer(serve: Serve, node: SmallNode) -> None:
    port = await serve(idle_timeout_s=SHORT_S)
    kept = await port.open()
    for _ in range(3):
        assert (await kept.ask("GET", "/livez")).status == 200
    assert await kept.rest() == b""
    assert node.refusals == []
    assert node.meter.admin_closed["late"] == 0


async def test_the_second_request_has_a_deadline_too(serve: Serve) -> None:
    port = await serve(request_timeout_s=SHORT_S)
    kept = await port.open()
    assert (await kept.ask("GET", "/livez")).status == 200
    await kept.send(HALF_HEADER)
    assert (await kept.answer()).status == 408


# -- who does not read -------------------------------------------------------------------------


class EndlessDumps:
    """A dump without an end, and how much of it was asked for."""

    vb_uuid = seqno = 1

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.is_closed = False

    async def open(self, vb_id: int, at_seqno: int | None) -> Any:
        return self

    async def lines(self, view: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                self.sent_bytes += 1 << 16
                yield bytes(1 << 16)
                await asyncio.sleep(0)
        finally:
            self.is_closed = True


async def test_a_reader_that_stops_holds_little_and_not_for_long(
    serve: Serve, node: SmallNode
) -> None:
    dumps = EndlessDumps()
    node.dumps = dumps  # type: ignore[attr-defined]
    port = await serve(unread_timeout_s=SHORT_S)
    reader = await port.open(request("GET", "/api/v1/vbuckets/5/documents", login()))
    reader.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await until_so(lambda: dumps.is_closed)
    await until_so(lambda: len(port.crowd) == len(port.crowd.streams) == 0)
    assert 0 < dumps.sent_bytes < 64 << 20  # what the system buffers, for the most part
    assert node.meter.admin_closed["late"] == 1
    assert any("to read its answer" in reason for *_, reason in node.refusals)


async def test_a_large_answer_that_is_not_read_goes_too(serve: Serve, node: SmallNode) -> None:
    node.page = lambda by_vbucket: bytes(64 << 20)
    port = await serve(unread_timeout_s=SHORT_S, idle_timeout_s=SHORT_S)
    reader = await port.open()
    reader.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await reader.send(request("GET", "/metrics", login(), "connection: close"))
    await until_so(lambda: len(port.crowd) == 0)


async def test_one_who_reads_slowly_gets_all_of_it(serve: Serve, node: SmallNode) -> None:
    node.page = lambda by_vbucket: bytes(40 << 20)
    port = await serve(unread_timeout_s=2)
    reader = await port.open(request("GET", "/metrics", login()))
    await reader.reader.readuntil(b"\r\n\r\n")
    for _ in range(40):
        assert len(await reader.reader.readexactly(1 << 20)) == 1 << 20
        await asyncio.sleep(0.07)  # the pace of the reader: all of it takes longer than the timeout


async def test_requests_ahead_of_their_answers_hold_one_answer(
    serve: Serve, node: SmallNode
) -> None:
    asked: list[int] = []

    def metrics(by_vbucket: bool) -> bytes:
        asked.append(1)
        return bytes(16 << 20)

    node.page = metrics
    port = await serve(unread_timeout_s=SHORT_S)
    reader = await port.open()
    reader.writer.transport.pause_reading()  # type: ignore[attr-defined]
    reader.writer.write(request("GET", "/metrics", login()) * 500)
    await until_so(lambda: asked and len(port.crowd) == 0)
    assert len(asked) <= 2


# -- what is under way at a time ---------------------------------------------------------------


async def test_streams_have_places_and_no_health_check_needs_one(serve: Serve) -> None:
    port = await serve(connections_max=16)
    streams = [await port.open_stream() for _ in range(4)]
    found = await ask(port.port, "GET", STREAM, login())
    assert (found.status, found.headers["retry-after"]) == (503, "1")
    assert found.what == "there are too many requests"
    assert "4 streams and dumps are running" in found.body["error"]["why"]
    await port.is_well()
    for _ in range(4):
        await port.open_stream("127.0.0.2")
    assert (await ask(port.port, "GET", STREAM, login(), from_host="127.0.0.3")).status == 503
    await port.is_well("127.0.0.3")
    streams[0].close()
    await until_so(lambda: len(port.crowd.streams) == 7)
    await port.open_stream()


async def test_a_stream_that_is_refused_gives_its_place_back(serve: Serve) -> None:
    port = await serve(connections_max=16)
    for _ in range(20):
        assert (await ask(port.port, "GET", f"{STREAM}s", login())).status == 404
    assert len(port.crowd.streams) == 0


async def test_work_under_way_is_bounded(serve: Serve, node: SmallNode) -> None:
    port = await serve(connections_max=16)
    may_end = asyncio.Event()

    async def branch(vb_id: int, at_seqno: int) -> dict[str, int]:
        await may_end.wait()
        return {"vb": vb_id}

    node.operations.branch = branch  # type: ignore[method-assign]
    post = request("POST", BRANCH, login(), JSON, "content-length: 9") + b'{"at": 1}'
    working = [await port.open(post) for _ in range(3)]
    await until_so(lambda: len(port.crowd.requests) == 3)
    found = await (await port.open(post)).answer()
    assert (found.status, "3 requests are running" in found.body["error"]["why"]) == (503, True)
    await port.is_alive()
    await port.is_well("127.0.0.2")
    may_end.set()
    assert [(await one.answer()).status for one in working] == [200] * 3
    await port.is_well()


async def test_passwords_under_examination_are_bounded(serve: Serve, node: SmallNode) -> None:
    port = await serve(connections_max=16)
    may_end = asyncio.Event()
    check = node.access.logins.rights_of_password

    async def slowly(*arguments: Any) -> Any:
        await asyncio.wait_for(may_end.wait(), 20)
        return await check(*arguments)

    node.access.logins.rights_of_password = slowly  # type: ignore[method-assign]
    try:
        guessing = [await port.open(request("GET", "/whoami", login())) for _ in range(3)]
        await until_so(lambda: len(port.crowd.requests) == 3)
        assert (await ask(port.port, "GET", "/whoami", login())).status == 503
        assert (await ask(port.port, "GET", "/whoami")).status == 401
        await port.is_alive()
    finally:
        may_end.set()
    assert [(await one.answer()).status for one in guessing] == [200] * 3


# -- what is no request ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n",
        b"GET /" + b"x" * 20_000,
        b"HEAD / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        request("POST", BRANCH, login(), JSON, "transfer-encoding: chunked") + b"zz\r\n",
        request("POST", BRANCH, JSON, "transfer-encoding: chunked") + b"zz\r\n",
        request("POST", BRANCH, JSON, "transfer-encoding: chunked") + b"2\r\n{}zz\r\n",
        request("POST", BRANCH, login(), JSON, "content-length: 2", "content-length: 3") + b"{}",
        request("GET", "/livez", "connection: upgrade", "upgrade: websocket") + b"\xff\xff\r\n\r\n",
    ],
    ids=str,
)
async def test_what_is_not_http_is_refused_quietly(
    serve: Serve, node: SmallNode, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    port = await serve()
    sitting = await port.open(data)
    assert (await sitting.rest())[:12] in {b"HTTP/1.1 400", b"HTTP/1.1 401", b"HTTP/1.1 200"}
    assert [event for event, *_ in node.refusals][:1] == ["admin request refused"]
    assert caplog.text == ""
    await until_so(lambda: len(port.crowd) == 0)
    await port.is_well()


async def test_a_chunk_that_is_none_after_the_answer_is_no_failure(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    port = await serve()
    sitting = await port.open(request("POST", BRANCH, JSON, "transfer-encoding: chunked"))
    assert (await sitting.answer()).status == 401
    await sitting.send(b"zz\r\n")
    assert await sitting.rest() == b""
    assert caplog.text == ""


async def test_client_that_leaves_in_middle_of_its_body_is_no_failure(
    serve: Serve, node: SmallNode, caplog: pytest.LogCaptureFixture
) -> None:
    port = await serve()
    for end in (RawHttp.close, lambda connection: connection.writer.write_eof()):
        sitting = await port.open(HALF_BODY)
        await until_so(lambda: Phase.BODY in phases(port))
        end(sitting)
        await until_so(lambda: len(port.crowd) == 0)
    assert caplog.text == ""
    assert node.operations.told == []


async def test_a_body_that_is_too_long_is_refused_before_its_end(serve: Serve) -> None:
    port = await serve()
    size = BODY_BYTES_MAX * 4
    sitting = await port.open(request("POST", BRANCH, login(), JSON, f"content-length: {size}"))
    await sitting.send(b" " * (BODY_BYTES_MAX + 1))
    assert (await sitting.answer()).status == 413


# -- TLS ---------------------------------------------------------------------------------------


@pytest.fixture
def contexts(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """For the server, and for a client."""
    ca = TestCa(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ca.issue())
    return context, ssl.create_default_context(cafile=ca.path)


HALF_HELLO = bytes.fromhex("16030100f8010000f40303")


@pytest.mark.parametrize("data", [b"", HALF_HELLO], ids=["silent", "half"])
async def test_half_a_handshake_counts_and_ends(
    serve: Serve, contexts: tuple[ssl.SSLContext, ssl.SSLContext], data: bytes
) -> None:
    port = await serve(contexts[0], connections_max=16)
    other = await port.open(data, "127.0.0.2")
    sitting = [await port.open(data) for _ in range(20)]
    assert len(port.crowd) <= 16
    await sitting[0].rest()
    port.client_tls = contexts[1]
    await port.is_alive()
    assert not other.reader.at_eof()

    short = await serve(contexts[0], request_timeout_s=SHORT_S)
    await (await short.open(data)).rest()
    await until_so(lambda: len(short.crowd) == 0)


async def test_after_the_handshake_the_same_deadlines_hold(
    serve: Serve, node: SmallNode, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    port = await serve(contexts[0], request_timeout_s=2 * SHORT_S, unread_timeout_s=SHORT_S)
    async with await RawHttp.open(port.port, tls=contexts[1]) as sitting:
        await sitting.send(HALF_HEADER)
        assert (await sitting.answer()).status == 408
        assert await sitting.rest() == b""
    node.page = lambda by_vbucket: bytes(64 << 20)
    async with await RawHttp.open(port.port, tls=contexts[1]) as reader:
        await reader.send(request("GET", "/metrics", login()))
        reader.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until_so(lambda: len(port.crowd) == 0)
        reader.writer.transport.abort()  # a close would wait 30 s for the end of TLS


# -- the end -----------------------------------------------------------------------------------


async def test_failed_unread_connection_does_not_keep_it_from_stopping(
    serve: Serve, node: SmallNode
) -> None:
    node.page = lambda by_vbucket: bytes(60_000)
    port = await serve()
    unread = await port.open()
    unread.writer.transport.pause_reading()  # type: ignore[attr-defined]
    assert port.server._server is not None
    state = port.server._server.server_state
    (connection,) = state.connections
    while not connection.transport.get_write_buffer_size():
        answered = state.total_requests
        await unread.send(request("GET", "/metrics", login()))
        await until_so(lambda answered=answered: state.total_requests > answered)  # type: ignore[misc]
    answered = state.total_requests
    await unread.send(request("POST", BRANCH, JSON, "transfer-encoding: chunked"))
    await until_so(lambda: state.total_requests > answered)
    await unread.send(b"zz\r\n")
    await until_so(connection.transport.is_closing)
    await port.stop()


async def test_whoever_sits_on_the_port_does_not_keep_it_from_stopping(
    node: SmallNode, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    node.page = lambda by_vbucket: bytes(64 << 20)
    for tls in (None, contexts[0]):
        port = Port(node, PortLimits(request_timeout_s=3600), tls)
        await port.start()
        await port.open()
        for data in (HALF_HEADER, HALF_BODY, NO_LOGIN_HALF_BODY, HALF_HELLO):
            await port.open(data)
        unread = await port.open(request("GET", "/metrics", login()))
        unread.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await port.stop()
        await until_so(lambda port=port: not port.server._opening)  # type: ignore[misc]
        await until_so(lambda port=port: len(port.crowd) == 0)  # type: ignore[misc]
        with pytest.raises(ConnectionError):
            await RawHttp.open(port.port)
        port.close()
