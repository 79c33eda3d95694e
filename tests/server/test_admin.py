"""The admin API, over HTTP against a really listening AdminServer."""

import asyncio
import http.client
import itertools
import json
from base64 import b64encode

import pytest

from dcp.server import users as users_module
from dcp.server.admin import BODY_BYTES_MAX, AdminServer
from dcp.server.users import USERS_FILE, Users
from vbucket.engine import BranchRefusedError

GUEST = "guest:guest"


class SmallNode:
    """What the API needs of a node."""

    def __init__(self, users):
        self.users = users
        self.is_ready = True
        self.branches = []

    def status(self):
        if self.branches == ["broken"]:
            raise KeyError("a fault")
        return {"version": "test", "items": 3}

    async def branch(self, vb_id, at_seqno):
        await asyncio.sleep(0)
        if at_seqno > 10:
            raise BranchRefusedError(f"vb {vb_id} ends at seqno 10")
        self.branches.append((vb_id, at_seqno))
        return {"vb": vb_id, "seqno": at_seqno}


@pytest.fixture
def node(tmp_path, monkeypatch):
    monkeypatch.setattr(users_module, "ITERATIONS", 4096)
    return SmallNode(Users(tmp_path / USERS_FILE))


@pytest.fixture
async def ask(node):
    """Return a coroutine that makes one request and gives (status, document, headers)."""
    server = AdminServer(node)
    port = await server.start("127.0.0.1", 0)
    assert port == server.port != 0

    def request(method, path, body, login, content_type):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        headers = {"connection": "close"}
        if login:
            headers["authorization"] = "Basic " + b64encode(login.encode()).decode()
        if body is not None:
            headers["content-type"] = content_type
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response.status, json.loads(text), response.headers

    async def ask(method, path, body=None, *, login=GUEST, content_type="application/json"):
        return await asyncio.to_thread(request, method, path, body, login, content_type)

    yield ask
    await server.stop()


async def test_probes_need_no_login(ask, node):
    assert (await ask("GET", "/livez", login=None))[0] == 200
    assert (await ask("GET", "/readyz", login=None))[0] == 200
    node.is_ready = False
    assert (await ask("GET", "/livez", login=None))[0] == 200
    assert (await ask("GET", "/readyz", login=None))[:2] == (503, {"status": "not ready"})


async def test_status(ask):
    assert (await ask("GET", "/api/v1/status"))[:2] == (200, {"version": "test", "items": 3})


async def test_everything_else_needs_one(ask, node):
    logins = (None, "guest:wrong", "nobody:guest", "guest", "\u00fc:\u00fc")
    paths = (
        ("GET", "/api/v1/status"),
        ("POST", "/api/v1/vbuckets/1/branch"),
        ("GET", "/api/v1/users"),
        ("POST", "/api/v1/users"),
        ("DELETE", "/api/v1/users/alice"),
    )
    for login, (method, path) in itertools.product(logins, paths):
        status, document, headers = await ask(method, path, {"at": 1}, login=login)
        assert (status, document["error"]["what"]) == (401, "log in first"), (login, path)
        assert headers["www-authenticate"] == 'Basic realm="dcpd"'
    assert node.branches == []


async def test_an_authorization_that_is_not_base64_is_refused(ask, node):
    server = AdminServer(node)
    port = await server.start("127.0.0.1", 0)

    def request():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/api/v1/status", headers={"authorization": "Basic %%%"})
        status = connection.getresponse().status
        connection.close()
        return status

    assert await asyncio.to_thread(request) == 401
    await server.stop()


async def test_branch(ask, node):
    status, document, _ = await ask("POST", "/api/v1/vbuckets/1023/branch", {"at": 7})
    assert (status, document) == (200, {"vb": 1023, "seqno": 7})
    assert node.branches == [(1023, 7)]


async def test_a_branch_that_cannot_be_says_why(ask):
    status, document, _ = await ask("POST", "/api/v1/vbuckets/5/branch", {"at": 11})
    assert status == 409
    assert document["error"] == {
        "what": "vbucket 5 cannot branch at seqno 11",
        "where": "POST /api/v1/vbuckets/5/branch",
        "why": "vb 5 ends at seqno 10",
        "try": "dcpctl failover-log 5 and dcpctl seqnos show what there is",
    }


async def test_vbuckets_that_do_not_exist(ask):
    for vb in ("1024", "-1", "x", "9" * 400):
        status, document, _ = await ask("POST", f"/api/v1/vbuckets/{vb}/branch", {"at": 0})
        assert (status, document["error"]["why"]) == (404, "vbuckets are numbered 0 to 1023")


async def test_bodies_that_are_not_what_is_asked_for(ask, node):
    for body in (
        b"",
        b"{",
        b"[]",
        b"[" * 50_000,
        {},
        {"at": "1"},
        {"at": True},
        {"at": 1.0},
        {"at": -1},
        {"at": 2**64},
        {"at": 1, "vb": 2},
    ):
        status, document, _ = await ask("POST", "/api/v1/vbuckets/5/branch", body)
        assert status == 400, body
        assert document["error"]["why"]
    assert node.branches == []


async def test_bodies_are_limited_and_typed(ask, node):
    path = "/api/v1/vbuckets/5/branch"
    status, document, _ = await ask("POST", path, b" " * (BODY_BYTES_MAX + 1))
    assert (status, document["error"]["what"]) == (413, "the body is too long")
    # A form that a web page of another site could send without being asked.
    status, document, _ = await ask("POST", path, {"at": 1}, content_type="text/plain")
    assert (status, document["error"]["what"]) == (415, "the body must be JSON")
    assert node.branches == []


async def test_users_are_added_used_and_removed(ask, node):
    status, document, _ = await ask(
        "POST", "/api/v1/users", {"name": "alice", "password": "wonderland"}
    )
    assert (status, document) == (201, {"name": "alice"})
    status, document, _ = await ask("GET", "/api/v1/users", login="alice:wonderland")
    assert (status, document) == (200, {"users": ["alice"]})
    assert (await ask("DELETE", "/api/v1/users/alice"))[0] == 200
    status, document, _ = await ask("DELETE", "/api/v1/users/alice")
    assert (status, document["error"]["what"]) == (404, "there is no user 'alice'")
    assert (await ask("GET", "/api/v1/status", login="alice:wonderland"))[0] == 401


async def test_users_that_cannot_be_added_or_removed(ask, node, tmp_path):
    status, document, _ = await ask("POST", "/api/v1/users", {"name": "bob", "password": "x"})
    assert status == 400
    assert "6 to 128" in document["error"]["why"]
    status, document, _ = await ask("DELETE", "/api/v1/users/guest")
    assert (status, document["error"]["what"]) == (409, "user 'guest' cannot be removed")
    (tmp_path / USERS_FILE).write_text("{")
    body = {"name": "bob", "password": "builder"}
    status, document, _ = await ask("POST", "/api/v1/users", body)
    assert (status, document["error"]["what"]) == (500, "the users were not changed")
    assert (await ask("DELETE", "/api/v1/users/bob"))[0] == 500


async def test_unknown_paths_and_methods(ask):
    status, document, _ = await ask("GET", "/api/v1/nothing")
    assert (status, document["error"]["where"]) == (404, "GET /api/v1/nothing")
    assert "/api/v1/status" in document["error"]["try"]
    status, _, headers = await ask("DELETE", "/api/v1/status")
    assert status == 405
    assert "GET" in headers["allow"]


async def test_a_fault_of_the_server_is_json_and_logged(ask, node, caplog):
    node.branches = ["broken"]
    status, document, _ = await ask("GET", "/api/v1/status")
    assert (status, document["error"]["why"]) == (500, "KeyError")
    assert "a fault" in caplog.text


async def test_a_port_that_is_taken_is_an_oserror(ask, node):
    first = AdminServer(node)
    port = await first.start("127.0.0.1", 0)
    second = AdminServer(node)
    with pytest.raises(OSError, match="in use"):
        await second.start("127.0.0.1", port)
    await second.stop()
    await first.stop()
    assert await second.start("127.0.0.1", port) == port
    await second.stop()
