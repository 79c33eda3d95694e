"""Web pages of other sites cannot use the admin port: the rule, and every route of a port."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dcp.server.admin import AdminServer
from dcp.server.admin.application import routes_of
from dcp.server.admin.origin import HostRule, host_of, page_refusal
from support.admin_node import SmallNode
from support.credentials import TestCa
from support.raw_client import RawHttp, ask, login

JSON = "content-type: application/json"
FORM = "content-type: application/x-www-form-urlencoded"
ALWAYS = (
    "localhost", "LOCALHOST:8091", "localhost.", "app.localhost", "127.0.0.1", "127.0.0.1:1",
    "127.8.9.10:8091", "[::1]", "[::1]:8091", "10.1.2.3:8091", "192.168.0.7", "[fd00::1]:9",
    "[::ffff:127.0.0.1]", "0.0.0.0:8091",
)  # fmt: skip
NEVER = (
    "evil.example", "evil.example:8091", "localhost.evil.example", "127.0.0.1.evil.example",
    "evillocalhost", "127.1", "2130706433", "0x7f000001", "", ":8091", "[", "[::1", "[evil]",
    "[::1]x", "[::1]8091", "localhost:80x", "localhost:²", "localhost:80:80", "a@localhost",
    "localhost,evil.example", "localhost evil.example", "::1", "\xff",
)  # fmt: skip


@pytest.mark.parametrize("host", ALWAYS)
def test_addresses_and_localhost_always_name_this_server(host: str) -> None:
    assert HostRule("127.0.0.1").allows(host)


@pytest.mark.parametrize("host", NEVER)
def test_other_names_and_nonsense_do_not(host: str) -> None:
    for rule in (HostRule("127.0.0.1"), HostRule("0.0.0.0", ("db.example", ".corp.example"))):
        assert not rule.allows(host)


@pytest.mark.parametrize(
    ("admin_hosts", "host", "allowed"),
    [
        (("db.example",), "DB.example:9", True),
        (("DB.Example",), "db.example", True),
        (("db.example",), "a.db.example", False),
        ((".corp.example",), "corp.example", True),
        ((".corp.example",), "a.b.corp.example:8091", True),
        ((".corp.example",), "evilcorp.example", False),
        (("a", "b"), "b", True),
        (("*",), "evil.example", True),
        ((), "node7", True),
    ],
)
def test_names_that_are_set_and_the_one_that_is_listened_on(
    admin_hosts: tuple[str, ...], host: str, allowed: bool
) -> None:
    assert HostRule("node7", admin_hosts).allows(host) is allowed


def test_a_host_is_what_stands_before_the_port() -> None:
    hosts = {"A:1": "a", "[::1]:2": "::1", "a.": "a", "a:": "a", "a:b": "", "[::1": "", "": ""}
    assert {text: host_of(text) for text in hosts} == hosts


def refusal(*headers: str) -> str:
    """Return why a request with these headers is refused, "" if it is not."""
    pairs = [header.partition(": ")[::2] for header in headers]
    raw = [(name.encode(), value.encode("latin-1")) for name, value in pairs]
    found = page_refusal(raw, HostRule("127.0.0.1"))
    return "" if found is None else " ".join(found)


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example", "http://127.0.0.1:9000", "http://127.0.0.1", "null", "",
        "http://localhost:8091", "file://", "http://127.0.0.1:80910", "ftp://127.0.0.1:8091",
        "http://evil@127.0.0.1:8091", "127.0.0.1:8091", "moz-extension://127.0.0.1:8091",
    ],
)  # fmt: skip
def test_an_origin_other_than_ones_own_is_foreign(origin: str) -> None:
    host = "host: 127.0.0.1:8091"
    assert "web page of another site" in refusal(host, f"origin: {origin}")
    two = refusal(host, "origin: http://127.0.0.1:8091", f"origin: {origin}")
    assert "web page of another site" in two
    assert "web page of another site" in refusal(f"origin: {origin}")


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("127.0.0.1:8091", "http://127.0.0.1:8091"),
        ("LOCALHOST:8091", "http://localhost:8091"),
        ("127.0.0.1", "http://127.0.0.1"),
        ("127.0.0.1:80", "http://127.0.0.1"),
        ("[::1]:443", "https://[::1]"),
        ("localhost", "https://localhost"),
    ],
)
def test_ones_own_origin_is_not(host: str, origin: str) -> None:
    assert refusal(f"host: {host}", f"origin: {origin}") == ""


def test_what_the_browser_says_of_the_site_counts() -> None:
    for site in ("cross-site", "same-site", "Cross-Site", "", "what"):
        assert "web page of another site" in refusal("host: localhost", f"sec-fetch-site: {site}")
    for site in ("none", "same-origin", "Same-Origin"):
        assert refusal("host: localhost", f"sec-fetch-site: {site}") == ""
    both = refusal("host: localhost", "sec-fetch-site: none", "sec-fetch-site: cross-site")
    assert "web page of another site" in both


def test_a_refusal_repeats_no_more_than_it_should() -> None:
    long = refusal(f"host: {'e' * 5000}")
    assert len(long) < 600
    assert "--admin-hosts NAME" in long
    assert "--admin-hosts evil.example" in refusal("host: evil.example:80")
    assert "--admin-hosts NAME" in refusal("host: x;reboot")
    assert len(refusal("host: localhost", f"origin: {'e' * 5000}")) < 600


# -- a port ------------------------------------------------------------------------------------


@pytest.fixture
async def port(node: SmallNode) -> AsyncIterator[int]:
    server = AdminServer(node, admin_hosts=("db.example",))
    yield await server.start("127.0.0.1", 0)
    await server.stop()


def concrete(path: str) -> str:
    """Fill in a route's parameters."""
    names = {"vb": "5", "id": "1", "name": "u", "bucket": "default", "scope": "s", "key": "k"}
    for name, value in (names | {"collection": "c"}).items():
        path = path.replace(f"{{{name}}}", value)
    assert "{" not in path
    return path


async def test_every_route_refuses_foreign_names_and_pages(node: SmallNode, port: int) -> None:
    routes = [(route.method, concrete(route.path)) for route in routes_of(node)]  # type: ignore[arg-type]
    routes += [("GET", "/nothing"), ("OPTIONS", "/api/v1/users"), ("PATCH", "/metrics")]
    for method, path in routes:
        for host, headers in (
            ("evil.example", ()),
            (f"127.0.0.1:{port}", ("origin: http://evil.example",)),
            (f"127.0.0.1:{port}", ("sec-fetch-site: cross-site",)),
            ("evil.example", (f"origin: http://127.0.0.1:{port}",)),
        ):
            found = await ask(port, method, path, login(), JSON, *headers, host=host, body=b"{}")
            if path in {"/livez", "/readyz"} and not headers:
                assert found.status == 200
                continue
            assert found.status == 403, (method, path, host, headers)
            assert set(found.body["error"]) == {"what", "where", "why", "try"}
            assert found.body["error"]["where"] == f"{method} {path}"
    assert node.operations.told == []
    assert node.collections.told == []
    assert node.users.names() == []
    assert node.meter.admin_refusals["403"] == len(node.refusals) > 4 * 30
    assert {event for event, *_ in node.refusals} == {"admin request refused"}
    assert any("DNS rebinding" in reason for *_, reason in node.refusals)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((JSON,), 200),
        ((JSON, "origin: http://db.example:99"), 200),
        ((JSON, "sec-fetch-site: same-origin"), 200),
        ((), 415),
        ((FORM,), 415),
        (("content-type: text/plain",), 415),
        (("content-type: text/plain; application/json",), 415),
    ],
)
async def test_ones_own_pages_and_other_clients_may_with_json(
    node: SmallNode, port: int, headers: tuple[str, ...], status: int
) -> None:
    post = ("POST", "/api/v1/vbuckets/5/branch", login())
    found = await ask(port, *post, *headers, host="db.example:99", body=b'{"at": 1}')
    assert found.status == status
    assert bool(node.operations.told) is (status == 200)


async def test_no_route_takes_a_body_of_a_type_that_a_form_can_send(
    node: SmallNode, port: int
) -> None:
    """But the scopes and collections of the field's API, which are forms. Its buckets refuse all
    changes, whatever the body is.
    """
    asked = 0
    for route in routes_of(node):  # type: ignore[arg-type]
        if route.method not in {"POST", "PUT"}:
            continue
        for kind in ("text/plain", "multipart/form-data; boundary=x", FORM.partition(": ")[2]):
            if kind in FORM and "/scopes" in route.path:
                continue
            asked += 1
            headers = (login(), f"content-type: {kind}")
            found = await ask(port, route.method, concrete(route.path), *headers, body=b"{}")
            is_bucket = route.path.startswith("/pools/default") and "/scopes" not in route.path
            assert found.status == 415 or (is_bucket and found.status == 400), (route.path, kind)
    assert asked > 40
    assert node.operations.told == []


async def test_a_client_without_host_is_no_browser(port: int) -> None:
    async with await RawHttp.open(port) as connection:
        await connection.send(f"GET /whoami HTTP/1.0\r\n{login()}\r\n\r\n".encode())
        assert (await connection.answer()).status == 200
    assert (await ask(port, "GET", "/whoami", login(), host=None)).status == 400  # HTTP/1.1
    two = await ask(port, "GET", "/whoami", login(), "host: localhost", host="evil.example")
    assert two.status == 400


async def test_over_tls_the_certificate_says_which_names_there_are(
    node: SmallNode, tmp_path: Path
) -> None:
    ca = TestCa(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ca.issue())
    client = ssl.create_default_context(cafile=ca.path)
    server = AdminServer(node)
    port = await server.start("127.0.0.1", 0, context)
    try:
        for host in ("db.example", "["):
            assert (await ask(port, "GET", "/whoami", login(), host=host, tls=client)).status == 200
            assert (await ask(port, "GET", "/livez/", host=host, tls=client)).status == 404
        foreign = (login(), "origin: https://evil.example")
        assert (await ask(port, "GET", "/whoami", *foreign, tls=client)).status == 403
    finally:
        await server.stop()
