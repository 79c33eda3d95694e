"""Every answer of the admin port says that nobody keeps it, and requests have one length."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dcp.server.admin import AdminServer
from support.admin_node import SmallNode
from support.raw_client import RawHttp, ask, login, request

STATUS = "/api/v1/status"
BODY = b"0\r\n\r\n"


@pytest.fixture
async def port(node: SmallNode) -> AsyncIterator[int]:
    server = AdminServer(node)
    yield await server.start("127.0.0.1", 0)
    await server.stop()


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/livez", (), 200),
        ("GET", STATUS, (login(),), 200),
        ("GET", "/metrics", (login(),), 200),
        ("GET", "/api/v1/openapi.json", (login(),), 200),
        ("GET", "/pools/default", (login(),), 200),
        ("GET", STATUS, (), 401),
        ("GET", STATUS, (login(), "origin: http://elsewhere"), 403),
        ("GET", "/no/such/path", (login(),), 404),
        ("PUT", STATUS, (login(),), 405),
        ("POST", "/api/v1/vbuckets/5/branch", (login(),), 415),
        ("GET", "/\x01", (), 400),
    ],
)
async def test_every_answer_is_for_its_reader_only(
    port: int, method: str, path: str, headers: tuple[str, ...], status: int
) -> None:
    answer = await ask(port, method, path, *headers)
    assert answer.status == status
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_files_of_the_console_keep_their_own_headers(port: int) -> None:
    answer = await ask(port, "GET", "/console/")
    assert "cache-control" in answer.headers
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("path", [STATUS, "/livez", "/api/v1/vbuckets/5/branch"])
async def test_body_that_ends_in_two_places_is_refused(port: int, path: str, order: int) -> None:
    lengths = ["content-length: 5", "transfer-encoding: chunked"][::order]
    async with await RawHttp.open(port) as connection:
        await connection.send(request("POST", path, login(), *lengths) + BODY)
        # What a proxy believes to be the body's rest is no request here.
        await connection.send(request("GET", STATUS, login()))
        answer = await connection.answer()
        assert answer.status == 400
        assert "both Content-Length and Transfer-Encoding" in str(answer.body)
        assert answer.headers["connection"] == "close"
        assert await connection.rest() == b""


async def test_one_of_both_lengths_is_taken(port: int) -> None:
    for length in ("content-length: 0", "transfer-encoding: chunked"):
        body = BODY if "chunked" in length else b""
        async with await RawHttp.open(port) as connection:
            await connection.send(request("GET", STATUS, login(), length) + body)
            assert (await connection.answer()).status == 200
