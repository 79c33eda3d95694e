"""Whatever a request to the admin interface holds: it is done, or refused with a reason."""

from __future__ import annotations

import json
import socket
from base64 import b64encode
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from support.server import DcpdProcess

NASTY = (
    "null", "true", "-1", "0", "1e400", "-1e400", "NaN", "1" + "0" * 400, str(2**63), str(2**64),
    "0.5", '""', '"x"', '"\\ud800"', '"\\u0000"', '"' + "9" * 5000 + '"', "[]", "[[]]",
    "[[1,2]]", '[["\\ud800",-1]]', "[-1]", "{}", '{"\\ud800":1}', '{"read":[{"prefix":"\\ud800"}]}',
    '{"read":5}', '{"read":[5]}', '{"admin":[{"prefix":"x"}]}', "[" * 5000,
)  # fmt: skip
ROUTES: dict[str, dict[str, str]] = {
    "POST /api/v1/vbuckets/5/branch": {"at": "0", "or_zero": "true"},
    "POST /api/v1/vbuckets/5/failover": {"lose": "0"},
    "POST /api/v1/vbuckets/5/state": {"state": '"active"'},
    "POST /api/v1/vbuckets/5/purge": {"upto": "0"},
    "POST /api/v1/vbuckets/5/explain-rollback": {
        "uuid": "1", "seqno": "1", "snap_start": "1", "snap_end": "1", "versions": "[]",
        "strict": "true", "ignore_purged": "true", "client_purge_seqno": "0",
    },
    "POST /api/v1/streams/close": {"name": '"x"', "vb": "1", "reason": '"closed"'},
    "POST /api/v1/streams/slow": {"name": '"x"', "vb": "1", "bytes_per_s": "100"},
    "POST /api/v1/streams/stall": {"name": '"x"', "vb": "1"},
    "POST /api/v1/streams/resume": {"name": '"x"', "vb": "1"},
    "POST /api/v1/streams/drop": {"name": '"x"', "vb": "1"},
    "POST /api/v1/faults": {
        "opcode": '"GET"', "vb": "1", "status": '"ETMPFAIL"', "delay_ms": "1",
        "disconnect": "false", "count": "1", "probability": "1", "seed": "1",
        "rollback_seqno": "0",
    },
    "POST /api/v1/consumers/keep": {"name": '"c"', "for": '"7d"', "bytes": '"5GiB"'},
    "POST /api/v1/consumers/forget": {"name": '"c"'},
    "POST /api/v1/compact": {"vbs": "[5]", "history": '"0"', "purge_age": '"0"'},
    "POST /api/v1/users": {"name": '"u"', "password": '"password"', "roles": '{"read":[{}]}'},
    "PUT /api/v1/users/u/password": {"password": '"password"'},
    "POST /api/v1/users/u/grant": {"role": '"read"', "prefix": '"p"', "collection": '"a.b"'},
    "POST /api/v1/users/u/revoke": {"role": '"read"', "prefix": '"p"', "collection": '"a.b"'},
}  # fmt: skip
LONG = "0" * 9 + "1024"
PATHS = (
    f"POST /api/v1/vbuckets/{LONG}/branch", "POST /api/v1/vbuckets/-1/branch",
    f"POST /api/v1/vbuckets/{'9' * 5000}/branch", "POST /api/v1/vbuckets/%C2%B2/branch",
    f"GET /api/v1/vbuckets/{LONG}/documents", "GET /api/v1/vbuckets/5/documents?at=-1",
    "GET /api/v1/vbuckets/5/documents?at=" + "9" * 5000, "GET /api/v1/vbuckets/5/documents?at=9",
    f"GET /api/v1/streams?vb={LONG}", "GET /api/v1/streams?vb=" + "9" * 5000,
    "GET /api/v1/streams?vb=%C2%B2", "GET /api/v1/streams?name=%ED%A0%80",
    "DELETE /api/v1/faults/x",
    "DELETE /api/v1/faults/" + "9" * 5000, "DELETE /api/v1/faults/%C2%B2",
    "DELETE /api/v1/users/%ED%A0%80", "DELETE /api/v1/users/%00", "GET /%ED%A0%80",
    "GET /pools/default/buckets/%ED%A0%80", "PATCH /api/v1/faults", "GET /metrics?vbuckets=x",
    "DELETE /pools/default/buckets/default/scopes/%ED%A0%80",
    "DELETE /pools/default/buckets/default/scopes/_default/collections/%00",
)  # fmt: skip
FORMS = (
    b"", b"name=", b"name=%ED%A0%80", b"name=%00", b"name=" + b"x" * 300, b"\xff",
    b"name=a&maxTTL=-1",
    b"name=a&maxTTL=9999999999", b"name=a&maxTTL=%C2%B2", b"&" * 40, b"name=_x", b"name=a.b",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DcpdProcess]:
    with DcpdProcess(tmp_path_factory.mktemp("admin") / "data") as server:
        yield server
        assert "Traceback" not in server.log_path.read_text()


def ask(
    server: DcpdProcess, what: str, body: bytes | None = None, kind: str = "application/json"
) -> int:
    """Send a request; a refusal has to say what, why and what to try."""
    method, path = what.split(" ", 1)
    connection = HTTPConnection("127.0.0.1", server.admin_port, timeout=30)
    headers = {
        "authorization": "Basic " + b64encode(b"guest:guest").decode(), "content-type": kind
    }  # fmt: skip
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    if response.status >= 400:
        error = json.loads(text)["error"]
        assert all(error[part] for part in ("what", "where", "why", "try")), error
    return response.status


@pytest.mark.parametrize("route", ROUTES)
def test_a_member_of_any_value(server: DcpdProcess, route: str) -> None:
    good = ROUTES[route]
    for member in good:
        for value in NASTY:
            body = ",".join(f'"{name}":{value if name == member else good[name]}' for name in good)
            assert ask(server, route, f"{{{body}}}".encode()) != 500, (member, value[:80])


@pytest.mark.parametrize("route", ROUTES)
def test_a_body_of_any_kind(server: DcpdProcess, route: str) -> None:
    for value in NASTY:
        assert ask(server, route, value.encode()) != 500, value[:80]
    for raw in (b"", b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"a":1}', b"{"):
        assert ask(server, route, raw) != 500, raw


def test_paths_and_queries_of_any_kind(server: DcpdProcess) -> None:
    for what in PATHS:
        body = b'{"at":0}' if what.startswith("POST") else None
        assert ask(server, what, body) != 500, what[:80]


def test_forms_of_any_kind(server: DcpdProcess) -> None:
    kind = "application/x-www-form-urlencoded"
    scopes = "POST /pools/default/buckets/default/scopes"
    for form in FORMS:
        for path in (scopes, f"{scopes}/_default/collections", f"{scopes}/none/collections"):
            assert ask(server, path, form, kind) != 500, (path, form[:80])


@pytest.mark.parametrize(
    "what",
    [
        f"POST /api/v1/vbuckets/{LONG}/branch", f"GET /api/v1/vbuckets/{LONG}/documents",
    ],
)  # fmt: skip
def test_a_partition_with_zeros_ahead_is_the_one_that_it_says(
    server: DcpdProcess, what: str
) -> None:
    assert ask(server, what, b'{"at":0}') == 404


def test_a_fault_is_taken_away_by_its_whole_number(server: DcpdProcess) -> None:
    body = b'{"status":"ETMPFAIL","vb":1000}'
    while ask(server, "POST /api/v1/faults", body) != 201:
        assert ask(server, "DELETE /api/v1/faults") == 200
    assert ask(server, f"DELETE /api/v1/faults/{'0' * 17}1234567") == 404


def test_what_was_refused_is_audited_without_harm(server: DcpdProcess) -> None:
    lines = (Path(server.data) / "audit.log").read_text().splitlines()
    assert all(json.loads(line, parse_constant=pytest.fail)["event"] for line in lines)


@pytest.mark.parametrize(
    "authorization",
    [b"Basic", b"Basic \xe9", b"Basic ====", b"Basic Og==", b"Basic /w==", b"\xff", b"Bearer x",
     b"Basic " + b"QUFB" * 4000, b"Basic " + b64encode("gu\0st:\ud800".encode("utf-8", "replace"))],
)  # fmt: skip
def test_a_login_of_any_kind_is_refused(server: DcpdProcess, authorization: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.admin_port), timeout=30) as connection:
        head = b"GET /whoami HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: "
        connection.sendall(head + authorization + b"\r\n\r\n")
        with connection.makefile("rb") as stream:
            assert stream.readline().split()[1] == b"401"
