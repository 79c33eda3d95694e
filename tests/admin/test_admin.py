"""The admin API, over HTTP against a really listening AdminServer."""

import asyncio
import http.client
import itertools
import json
from base64 import b64encode

import pytest

from dcp.server.access.users import USERS_FILE
from dcp.server.admin import AdminServer
from dcp.server.admin.answers import BODY_BYTES_MAX
from dcp.server.admin.routes.couchbase_routes import BLOCK_END
from dcp.server.operate.operations import StreamChoice
from dcp.wire.message import EndReason
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.rules.rollback import Question
from support.admin_node import CONFIG, GUEST
from vbucket.engine.partition import VbState


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
        is_json = response.headers.get_content_type().endswith("json")
        return response.status, json.loads(text) if is_json else text, response.headers

    async def ask(method, path, body=None, *, login=GUEST, content_type="application/json"):
        return await asyncio.to_thread(request, method, path, body, login, content_type)

    yield ask
    await server.stop()


async def test_probes_need_no_login(ask, node):
    assert (await ask("GET", "/livez", login=None))[0] == 200
    assert (await ask("GET", "/readyz", login=None))[0] == 200
    node.refusal_kind = node.unready_kind = "log_full"
    refused = (503, {"status": "writes are refused", "why": "log_full"})
    assert (await ask("GET", "/readyz", login=None))[:2] == refused
    node.refusal_kind, node.unready_kind = "", "metadata_store_older"
    nothing = (503, {"status": "nothing is served", "why": "metadata_store_older"})
    assert (await ask("GET", "/readyz", login=None))[:2] == nothing
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
    assert node.operations.told == []


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
    assert node.operations.told == [(1023, 7)]


async def test_a_branch_that_cannot_be_says_why(ask):
    status, document, _ = await ask("POST", "/api/v1/vbuckets/5/branch", {"at": 11})
    assert status == 409
    assert document["error"] == {
        "what": "partition 5 cannot branch at seqno 11",
        "where": "POST /api/v1/vbuckets/5/branch",
        "why": "partition 5 ends at seqno 10",
        "try": "dcpctl failover-log VB and dcpctl seqnos show the present state",
    }
    status, document, _ = await ask("POST", "/api/v1/vbuckets/5/branch", {"at": 6})
    assert (status, "damaged: a block of partition 5" in document["error"]["why"]) == (500, True)


async def test_vbuckets_that_do_not_exist(ask):
    for vb in ("1024", "-1", "x", "9" * 400):
        status, document, _ = await ask("POST", f"/api/v1/vbuckets/{vb}/branch", {"at": 0})
        assert (status, document["error"]["why"]) == (404, "partitions are numbered 0 to 1023")


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
    assert node.operations.told == []


async def test_bodies_are_limited_and_typed(ask, node):
    path = "/api/v1/vbuckets/5/branch"
    status, document, _ = await ask("POST", path, b" " * (BODY_BYTES_MAX + 1))
    assert (status, document["error"]["what"]) == (413, "the body is too long")
    # A form that a web page of another site could send without being asked.
    status, document, _ = await ask("POST", path, {"at": 1}, content_type="text/plain")
    assert (status, document["error"]["what"]) == (415, "the body must be JSON")
    assert node.operations.told == []


async def test_users_are_added_used_and_removed(ask, node):
    status, document, _ = await ask(
        "POST", "/api/v1/users", {"name": "alice", "password": "wonderland"}
    )
    assert (status, document) == (201, {"name": "alice"})
    status, document, _ = await ask("GET", "/api/v1/users", login="alice:wonderland")
    assert (status, document["error"]["why"].split(":")[0]) == (403, "it needs the role admin")
    await ask("POST", "/api/v1/users/alice/grant", {"role": "admin"})
    status, document, _ = await ask("GET", "/api/v1/users", login="alice:wonderland")
    assert (status, document["users"]) == (200, ["alice"])
    status, document, _ = await ask("DELETE", "/api/v1/users/alice")
    assert (status, "use --force" in document["error"]["why"]) == (409, True)
    assert (await ask("POST", "/api/v1/users/alice/revoke", {"role": "admin"}))[0] == 400
    assert (await ask("DELETE", "/api/v1/users/alice?force=true"))[0] == 200
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
    node.is_broken = True
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


async def test_refusals_are_logged_with_their_reason(ask, node):
    await ask("GET", "/api/v1/status", login=None)
    await ask("GET", "/api/v1/nothing")
    await ask("POST", "/api/v1/vbuckets/5/branch", {"at": 11})
    assert [(event, host, status) for event, host, status, _ in node.refusals] == [
        ("admin request refused", "127.0.0.1", 401),
        ("admin request refused", "127.0.0.1", 404),
        ("admin request refused", "127.0.0.1", 409),
    ]
    assert (
        node.refusals[2][3] == "partition 5 cannot branch at seqno 11: partition 5 ends at seqno 10"
    )


# -- what is done on purpose -------------------------------------------------------------------


async def test_partitions(ask, node):
    post = "/api/v1/vbuckets/17/"
    assert (await ask("POST", post + "failover", {}))[:2] == (200, {"vb": 17})
    await ask("POST", post + "failover", {"lose": 3})
    await ask("POST", post + "state", {"state": "dead"})
    await ask("POST", post + "purge", {})
    await ask("POST", post + "purge", {"upto": 5})
    assert node.operations.told == [
        ("failover", 17, 0),
        ("failover", 17, 3),
        (17, VbState.DEAD),
        ("purge", 17, None),
        ("purge", 17, 5),
    ]


async def test_partitions_that_refuse(ask, node):
    for action, body, status, why in (
        ("failover", {"lose": 11}, 409, "it has 10"),
        ("failover", {"lose": -1}, 400, "Expected `int` >= 0 - at `$.lose`"),
        ("state", {"state": "asleep"}, 400, "one of active, replica, pending, dead"),
        ("state", {"state": "fenced"}, 400, "one of active, replica, pending, dead, not"),
        ("state", {}, 400, '"state" (string)'),
        ("purge", {"upto": 10}, 409, "never the last"),
        ("purge", {"upto": True}, 400, '"upto" (integer, optional)'),
    ):
        found, document, _ = await ask("POST", f"/api/v1/vbuckets/17/{action}", body)
        assert (found, why in document["error"]["why"]) == (status, True), (action, body, document)
    assert node.operations.told == []


async def test_explain_rollback(ask, node):
    post = "/api/v1/vbuckets/17/explain-rollback"
    assert (await ask("POST", post, {"uuid": "18446744073709551615", "seqno": 5}))[0] == 200
    await ask(
        "POST",
        post,
        {
            "uuid": 7,
            "seqno": 5,
            "snap_start": 4,
            "snap_end": 9,
            "versions": [["7", 2], [6, 0]],
            "strict": True,
            "client_purge_seqno": 1,
        },
    )
    assert node.operations.told == [
        (17, Question(5, 2**64 - 1, 5, 5)),
        (17, Question(5, 7, 4, 9, ((7, 2), (6, 0)), strict=True, client_purge_seqno=1)),
    ]
    for wrong in (
        {"uuid": "x"},
        {"uuid": "-1"},
        {"uuid": 2**64},
        {"uuid": "1", "versions": [[1, 2, 3]]},
        {"uuid": "1", "versions": [[1, "2"]]},
        {"uuid": "1", "snap_end": -1},
    ):
        assert (await ask("POST", post, {"seqno": 1, **wrong}))[0] == 400, wrong


async def test_streams(ask, node):
    post = "/api/v1/streams/"
    assert (await ask("GET", "/api/v1/streams"))[1] == {"streams": [{"name": "x"}], "limits": []}
    await ask("GET", "/api/v1/streams?name=a%20b&vb=7")
    assert (await ask("POST", post + "close", {"vb": 7}))[:2] == (200, {"streams": 2})
    await ask("POST", post + "close", {"name": "x", "reason": "too_slow"})
    await ask("POST", post + "slow", {"bytes_per_s": 100})
    await ask("POST", post + "stall", {})
    await ask("POST", post + "resume", {})
    assert (await ask("POST", post + "drop", {"name": "x"}))[1] == {"connections": 1}
    everything = StreamChoice(None, None)
    assert node.operations.told == [
        everything,
        StreamChoice("a b", 7),
        (StreamChoice(None, 7), EndReason.CLOSED),
        (StreamChoice("x", None), EndReason.TOO_SLOW),
        (everything, 100),
        (everything, 0),
        (everything, None),
        ("drop", StreamChoice("x", None)),
    ]


async def test_streams_that_are_not_there(ask):
    post = "/api/v1/streams/"
    for action, body, status in (
        ("close", {"name": "nobody"}, 404),
        ("close", {"reason": "because"}, 400),
        ("close", {"vb": 1024}, 400),
        ("slow", {}, 400),
        ("slow", {"bytes_per_s": 0}, 400),
        ("stall", {"vb": "7"}, 400),
    ):
        found, document, _ = await ask("POST", post + action, body)
        assert found == status, (action, body, document)
    assert (await ask("GET", "/api/v1/streams?vb=x"))[0] == 400


async def test_faults(ask, node):
    path = "/api/v1/faults"
    rule = {
        "opcode": "get", "vb": 3, "status": "0x86", "delay_ms": 5, "count": 2, "probability": 0.5,
        "seed": 1, "rollback_seqno": 4,
    }  # fmt: skip
    assert (await ask("POST", path, rule))[:2] == (201, {"id": 1})
    assert node.operations.told == [
        {
            "opcode": Opcode.GET,
            "vb_id": 3,
            "status": Status.ETMPFAIL,
            "delay_ms": 5,
            "disconnects": False,
            "count": 2,
            "probability": 0.5,
            "seed": 1,
            "rollback_seqno": 4,
        }
    ]
    assert (await ask("GET", path))[:2] == (200, {"faults": []})
    assert (await ask("DELETE", path))[:2] == (200, {"cleared": 1})
    assert (await ask("DELETE", f"{path}/3"))[:2] == (200, {"cleared": 1})
    for wrong in ("9", "x", "-1"):
        assert (await ask("DELETE", f"{path}/{wrong}"))[0] == 404, wrong
    for wrong in ({"opcode": "GRAB"}, {"status": 1234}, {"vb": -1}, {"delay_ms": 7}, {"x": 1}):
        assert (await ask("POST", path, wrong))[0] == 400, wrong


async def test_metrics(ask):
    status, text, headers = await ask("GET", "/metrics")
    assert (status, text) == (200, b"dcpd_items 3\n")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert (await ask("GET", "/metrics?vbuckets=1"))[1] == b"dcpd_vb 1\n"
    assert (await ask("GET", "/metrics?vbuckets=0"))[1] == b"dcpd_items 3\n"


# -- the field's own ---------------------------------------------------------------------------


async def test_what_go_dcp_and_gocbcore_ask_for(ask):
    pools = (await ask("GET", "/pools"))[1]
    version, build, _edition = pools["implementationVersion"].split("-")
    assert [number.isdigit() for number in (*version.split("."), build)] == [True] * 4
    bucket = (await ask("GET", "/pools/default/buckets/default"))[1]
    assert (bucket["bucketType"], bucket["storageBackend"]) == ("membase", "couchstore")
    assert bucket["nodes"][0]["hostname"] == "127.0.0.1:8091"
    assert (bucket["numVBuckets"], bucket["collectionsManifestUid"]) == (1024, "a")
    assert (await ask("GET", "/pools/default/b/default"))[1] == CONFIG
    assert (await ask("GET", "/pools/default/nodeServices"))[1] == {"nodesExt": []}
    assert (await ask("GET", "/pools/default"))[1]["bucketNames"][0]["bucketName"] == "default"
    assert [b["bucketType"] for b in (await ask("GET", "/pools/default/buckets"))[1]] == ["membase"]
    whoami = (await ask("GET", "/whoami"))[1]
    assert (whoami["id"], {"role": "admin"} in whoami["roles"]) == ("guest", True)
    for path in ("buckets", "b", "bs", "bucketsStreaming"):
        assert (await ask("GET", f"/pools/default/{path}/other"))[0] == 404
    assert (await ask("GET", "/pools", login=None))[0] == 401


async def test_what_sdks_read_of_a_bucket(ask):
    bucket = (await ask("GET", "/pools/default/buckets/default"))[1]
    assert (bucket["controllers"], bucket["quota"]) == ({}, {"ram": 0, "rawRAM": 0})
    assert (bucket["replicaIndex"], bucket["maxTTL"]) == (False, 0)
    assert bucket["durabilityMinLevel"] == "none"
    assert bucket["conflictResolutionType"] == "seqno"
    assert bucket["nodes"][0]["services"] == ["kv"]
    assert (await ask("GET", "/pools/default/buckets/"))[1] == [bucket]


async def test_the_bucket_names_its_tls_port_where_there_is_one(ask, node):
    assert "httpsMgmt" not in (await ask("GET", "/pools/default"))[1]["nodes"][0]["ports"]
    services = {"mgmt": 8091, "kv": 11210, "mgmtSSL": 18091, "kvSSL": 11207}
    config = CONFIG | {"nodesExt": [{"services": services}]}
    node.bucket_config = lambda: json.dumps(config).encode()
    assert (await ask("GET", "/pools/default"))[1]["nodes"][0]["ports"]["httpsMgmt"] == 18091


async def test_there_is_one_bucket_and_it_stays(ask):
    form = {"content_type": "application/x-www-form-urlencoded"}
    buckets = "/pools/default/buckets"
    for path in (buckets, f"{buckets}/"):
        status, answer, _ = await ask("POST", path, b"name=default&ramQuota=100", **form)
        assert (status, answer["errors"]) == (
            400, {"name": "Bucket with given name already exists"}
        )  # fmt: skip
        status, answer, _ = await ask("POST", path, b"name=other&ramQuota=100", **form)
        assert status == 400
        assert "one bucket, 'default' (setting bucket)" in answer["errors"]["name"]
    assert (await ask("POST", f"{buckets}/default", b"ramQuota=200", **form))[0] == 400
    flush = await ask("POST", f"{buckets}/default/controller/doFlush", b"", **form)
    assert (flush[0], flush[1]["_"]) == (400, "Flush is disabled for the bucket")
    status, answer, _ = await ask("DELETE", f"{buckets}/default")
    assert (status, "the only bucket" in answer["_"]) == (403, True)
    status, answer, _ = await ask("POST", "/pools/default", b"memoryQuota=500", **form)
    assert (status, "memtable_bytes" in answer["errors"]["memoryQuota"]) == (400, True)
    for method, path in (
        ("DELETE", "none"), ("POST", "none"), ("POST", "none/controller/doFlush"),
    ):  # fmt: skip
        assert (await ask(method, f"{buckets}/{path}", b"", **form))[0] == 404
    assert (await ask("POST", buckets, b"name=x", login=None, **form))[0] == 401


async def test_the_bucket_has_the_name_of_the_setting(ask, node):
    node.bucket = "travel"
    bucket = (await ask("GET", "/pools/default/buckets/travel"))[1]
    assert bucket["uri"] == "/pools/default/buckets/travel"
    assert (await ask("GET", "/pools/default"))[1]["bucketNames"][0]["bucketName"] == "travel"
    assert (await ask("GET", "/pools/default/buckets/default"))[0] == 404
    assert (await ask("GET", "/pools/default/buckets/travel/scopes"))[0] == 200


@pytest.mark.parametrize("kind", ["bs", "bucketsStreaming"])
async def test_config_stream_sends_block_at_once_and_after_change(node, kind):
    server = AdminServer(node)
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    login = b64encode(GUEST.encode()).decode()
    writer.write(
        f"GET /pools/default/{kind}/default HTTP/1.1\r\nhost: localhost\r\n"
        f"authorization: Basic {login}\r\n\r\n".encode()
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    first = await reader.readuntil(BLOCK_END)
    assert b'"rev": 1' in first
    node.version = (1, 2)
    assert b'"rev": 2' in await reader.readuntil(BLOCK_END)
    node.is_ready = False
    await reader.readuntil(b"0\r\n\r\n")  # the stream ends with the server
    writer.close()
    await server.stop()


async def test_scopes_and_collections(ask, node):
    path = "/pools/default/buckets/default/scopes"
    form = {"content_type": "application/x-www-form-urlencoded"}
    assert (await ask("GET", path))[:2] == (200, {"uid": "a", "scopes": []})
    assert (await ask("POST", path, b"name=s", **form))[:2] == (200, {"uid": "a"})
    await ask("POST", f"{path}/s/collections", b"name=c&maxTTL=60", **form)
    await ask("POST", f"{path}/s/collections", b"name=d%25", **form)
    changed = await ask("PATCH", f"{path}/s/collections/c", b"maxTTL=90", **form)
    assert changed[:2] == (200, {"uid": "e"})
    for wrong in (b"maxTTL=-1", b"maxTTL=x", b"maxTTL=", b"maxTTL=99999999999"):
        assert (await ask("PATCH", f"{path}/s/collections/c", wrong, **form))[0] == 400
    assert (await ask("DELETE", f"{path}/s/collections/c"))[:2] == (200, {"uid": "d"})
    await ask("DELETE", f"{path}/s")
    assert node.collections.told == [
        ("create", "s"),
        ("create", "s", "c", 60),
        ("create", "s", "d%", 0),
        ("change", "s", "c", 90),
        ("drop", "s", "c"),
        ("drop", "s"),
    ]
    assert (await ask("POST", path, b"name=taken", **form))[0] == 409
    for wrong in (b"", b"name=", b"name=" + b"x" * 252, b"&" * 200, b"\xff=\xff"):
        assert (await ask("POST", path, wrong, **form))[0] == 400, wrong
    assert (await ask("POST", f"{path}/s/collections", b"name=c&maxTTL=x", **form))[0] == 400
    assert (await ask("POST", path, {"name": "s"}))[0] == 415


async def test_a_chunked_form_is_read_and_one_of_another_site_is_not(node):
    server = AdminServer(node)
    port = await server.start("127.0.0.1", 0)

    def send(**headers):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        headers["authorization"] = "Basic " + b64encode(GUEST.encode()).decode()
        headers["content-type"] = "application/x-www-form-urlencoded"
        path = "/pools/default/buckets/default/scopes"
        chunks = iter((b"na", b"me=s"))
        connection.request("POST", path, chunks, headers, encode_chunked=True)
        status = connection.getresponse().status
        connection.close()
        return status

    assert await asyncio.to_thread(send, **{"transfer-encoding": "chunked"}) == 200
    foreign = {"transfer-encoding": "chunked", "sec-fetch-site": "cross-site"}
    assert await asyncio.to_thread(send, **foreign) == 403
    assert node.collections.told == [("create", "s")]
    await server.stop()
