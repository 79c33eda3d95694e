"""The description of the HTTP API: it is valid, it is served, and real answers are as it says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urlencode

import pytest
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import validate

from clients.kv.sync_client import SyncKv
from dcp.server.admin.api_page import TAGS, described, markdown
from dcp.server.admin.application import admin_app
from dcp.server.admin.openapi import EVENT_DATA, PATH_FIELDS
from dcp.server.admin.origin import HostRule
from dcp.server.admin.routes.console_routes import SHOWS
from dcp.server.net.crowd import Crowd
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.admin_node import SmallNode
from support.raw_client import login
from support.server import DcpdProcess
from vbucket.model.ids import vbucket_of

ROOT = Path(__file__).parents[2]
VB = vbucket_of(b"key")
SCOPES = "/pools/default/buckets/{bucket}/scopes"
BUCKET = "/pools/default/buckets/{bucket}"


class Call(NamedTuple):
    """A request that is done, with its path as the description has it."""

    method: str
    path: str
    body: dict[str, Any] | None = None
    status: int = 200
    query: str = ""


BACKUP = {
    "id": "b1", "kind": "run", "archive_id": "a1", "archive": "/backups", "host": "h",
    "result": "running", "started_s": 1_800_000_000.5,
}  # fmt: skip

CALLS = (
    Call("GET", "/livez"),
    Call("GET", "/readyz"),
    Call("GET", "/metrics"),
    Call("GET", "/metrics", query="?vbuckets=1"),
    Call("GET", "/api/v1/openapi.json"),
    Call("GET", "/api/v1/status"),
    Call("GET", "/api/v1/vbuckets/{vb}/documents"),
    Call("GET", "/api/v1/vbuckets/{vb}/documents", query="?at=0"),
    Call("POST", "/api/v1/vbuckets/{vb}/explain-rollback",
         {"uuid": "1", "seqno": 1, "versions": [["7", 1], [8, 1]], "strict": None}),
    Call("GET", "/api/v1/streams", query=f"?name=described&vb={VB}"),
    Call("POST", "/api/v1/streams/slow", {"name": "described", "bytes_per_s": 1000}),
    Call("POST", "/api/v1/streams/stall", {"vb": VB}),
    Call("GET", "/api/v1/streams"),
    Call("POST", "/api/v1/streams/resume", {}),
    Call("POST", "/api/v1/streams/drop", {"name": "second"}),
    Call("POST", "/api/v1/streams/close", {"reason": "state_changed"}),
    Call("POST", "/api/v1/streams/close", {}, 404),
    Call("POST", "/api/v1/streams/drop", {"name": "nobody"}, 404),
    Call("POST", "/api/v1/consumers/keep", {"name": "c", "for": "7d", "bytes": "5GiB"}),
    Call("POST", "/api/v1/consumers/keep", {"name": "c", "for": "1s", "bytes": 1 << 20}, 400),
    Call("GET", "/api/v1/consumers"),
    Call("POST", "/api/v1/consumers/forget", {"name": "c"}),
    Call("POST", "/api/v1/consumers/forget", {"name": ""}, 400),
    Call("POST", "/api/v1/faults",
         {"opcode": "GET", "status": 0x86, "delay_ms": 1, "count": 2, "probability": 0.5}, 201),
    Call("POST", "/api/v1/faults", {"disconnect": True, "vb": 3}, 201),
    Call("GET", "/api/v1/faults"),
    Call("DELETE", "/api/v1/faults/{id}"),
    Call("DELETE", "/api/v1/faults/{id}", None, 404),
    Call("DELETE", "/api/v1/faults"),
    Call("POST", "/api/v1/vbuckets/{vb}/failover", {}),
    Call("POST", "/api/v1/vbuckets/{vb}/branch", {"at": 99}, 409),
    Call("POST", "/api/v1/vbuckets/{vb}/purge", {}),
    Call("POST", "/api/v1/vbuckets/{vb}/branch", {"at": 1, "or_zero": True}),
    Call("POST", "/api/v1/vbuckets/branch", {"vbs": [0, 1], "at": 0}),
    Call("POST", "/api/v1/vbuckets/{vb}/mend-cas", {}),
    Call("POST", "/api/v1/vbuckets/{vb}/state", {"state": "replica"}),
    Call("POST", "/api/v1/vbuckets/{vb}/state", {"state": "active"}),
    Call("POST", "/api/v1/compact", {"vbs": [VB], "history": "0s"}),
    Call("POST", "/api/v1/compact", {"history": "soon"}, 400),
    Call("POST", "/api/v1/scrub", {}),
    Call("POST", "/api/v1/repair", {"vb": VB, "key": "00", "entries": ""}, 404),
    Call("GET", "/api/v1/scrub"),
    Call("POST", "/api/v1/users",
         {"name": "alice", "password": "wonderland", "roles": {"read": [{"prefix": "a"}]}}, 201),
    Call("PUT", "/api/v1/users/{name}/password", {"password": "looking-glass"}),
    Call("POST", "/api/v1/users/{name}/grant", {"role": "write", "collection": "a.b"}),
    Call("POST", "/api/v1/users/{name}/revoke", {"role": "write", "collection": "a.b"}),
    Call("GET", "/api/v1/users"),
    Call("DELETE", "/api/v1/users/{name}"),
    Call("DELETE", "/api/v1/users/{name}", None, 404),
    Call("GET", "/api/v1/cluster/status"),
    Call("GET", "/api/v1/cluster/map", None, 409),
    Call("GET", "/api/v1/cluster/partitions/{vb}", None, 409),
    Call("GET", "/api/v1/cluster/receipts"),
    Call("POST", "/api/v1/cluster/secrets", {}, 409),
    Call("POST", "/api/v1/cluster/cut", {"node": "n2"}, 403),
    Call("POST", "/api/v1/cluster/heal", {}, 403),
    Call("POST", "/api/v1/cluster/token", {}, 409),
    Call("POST", "/api/v1/cluster/init", {"copies": 9}, 409),
    Call("POST", "/api/v1/cluster/join", {"token": "of no cluster"}, 409),
    Call("POST", "/api/v1/cluster/set", {"copies": 2, "dry_run": True}, 409),
    Call("POST", "/api/v1/cluster/rebalance", {}, 409),
    Call("POST", "/api/v1/cluster/cancel", {}, 409),
    Call("POST", "/api/v1/cluster/move", {"vb": 3, "to": "n2"}, 409),
    Call("POST", "/api/v1/cluster/drain", {"node": "n2"}, 409),
    Call("POST", "/api/v1/cluster/undrain", {"node": "n2"}, 409),
    Call("POST", "/api/v1/cluster/remove", {"node": "n2"}, 409),
    Call("POST", "/api/v1/cluster/failover", {"vb": 3, "unclean": True}, 409),
    Call("POST", "/api/v1/cluster/meta/testify", {}, 409),
    Call("POST", "/api/v1/cluster/meta/restore", {"operation": "one", "dry_run": True}, 409),
    Call("GET", "/api/v1/cluster/meta/export", None, 409),
    Call("GET", "/pools"),
    Call("GET", "/pools/default"),
    Call("POST", "/pools/default", {"memoryQuota": "1"}, 400),
    Call("GET", "/pools/default/nodeServices"),
    Call("GET", "/pools/default/buckets"),
    Call("GET", "/pools/default/buckets/"),
    Call("POST", "/pools/default/buckets", {"name": "other"}, 400),
    Call("POST", "/pools/default/buckets/", {"name": "other"}, 400),
    Call("GET", BUCKET),
    Call("POST", BUCKET, {}, 400),
    Call("DELETE", BUCKET, None, 403),
    Call("POST", f"{BUCKET}/controller/doFlush", {}, 400),
    Call("GET", "/pools/default/b/{bucket}"),
    Call("GET", "/whoami"),
    Call("GET", SCOPES),
    Call("POST", SCOPES, {"name": "s"}),
    Call("POST", f"{SCOPES}/{{scope}}/collections", {"name": "c", "maxTTL": "60"}),
    Call("POST", f"{SCOPES}/{{scope}}/collections", {"name": "c", "maxTTL": "soon"}, 400),
    Call("PATCH", f"{SCOPES}/{{scope}}/collections/{{collection}}", {"maxTTL": "90"}),
    Call("PATCH", f"{SCOPES}/{{scope}}/collections/{{collection}}", {"maxTTL": "-1"}, 400),
    Call("DELETE", f"{SCOPES}/{{scope}}/collections/{{collection}}"),
    Call("DELETE", f"{SCOPES}/{{scope}}"),
    Call("PUT", "/api/v1/documents", {"key": "described", "value": "1", "only_new": True}),
    Call("PUT", "/api/v1/documents", {"key": "described", "value": "1", "only_new": True}, 409),
    Call("PUT", "/api/v1/documents",
         {"key": "ZGVzY3JpYmVk", "key_encoding": "base64", "value": "/w==",
          "value_encoding": "base64", "cas": None, "flags": 7, "expiry": 0}),
    Call("GET", "/api/v1/documents", query="?key=described&versions=1"),
    Call("GET", "/api/v1/documents/keys", query="?prefix=d&limit=1"),
    Call("GET", "/api/v1/documents/keys", query="?position=nowhere", status=400),
    Call("DELETE", "/api/v1/documents", {"key": "described", "cas": "0"}),
    Call("DELETE", "/api/v1/documents", {"key": "described"}, 404),
    Call("GET", "/api/v1/documents", query="?key=described"),
    Call("GET", "/api/v1/documents", query="?key=", status=400),
    Call("GET", "/api/v1/vbuckets/{vb}"),
    Call("GET", "/api/v1/documents/sorted", query="?prefix=d&limit=1"),
    Call("GET", "/api/v1/documents/sorted", query="?position=nowhere", status=400),
    Call("GET", "/api/v1/cluster/page"),
    Call("GET", "/api/v1/settings"),
    Call("PUT", "/api/v1/settings/{key}", {"value": "debug"}),
    Call("PUT", "/api/v1/settings/{key}", {"value": "loud"}, 400),
    Call("POST", "/api/v1/backups", {**BACKUP, "kind": "verify"}, 404),
    Call("POST", "/api/v1/backups", BACKUP),
    Call("POST", "/api/v1/backups", {**BACKUP, "result": "fine"}, 400),
    Call("GET", "/api/v1/backups"),
    Call("GET", "/api/v1/log", query="?limit=3"),
    Call("GET", "/api/v1/log", query="?limit=all", status=400),
    Call("GET", "/api/v1/console/me"),
    Call("POST", "/api/v1/console/login", {}),
    Call("DELETE", "/api/v1/console/login"),
    Call("GET", "/api/v1/console/changes", query="?kind=nothing", status=400),
    Call("GET", "/api/v1/console/changes", query="?collection=none.none", status=400),
    Call("GET", "/api/v1/console/events", query="?show=nothing", status=400),
    # These do not end; the first event or document is read.
    *(Call("GET", "/api/v1/console/events", query=f"?show={show}") for show in SHOWS),
    Call("GET", "/api/v1/console/changes"),
    Call("GET", "/pools/default/bs/{bucket}"),
    Call("GET", "/pools/default/bucketsStreaming/{bucket}"),
)  # fmt: skip
PLACES = {
    "vb": VB, "id": 1, "name": "alice", "bucket": "default", "scope": "s", "collection": "c",
    "key": "log_level",
}  # fmt: skip
NOT_DESCRIBED = {("GET", "/"), ("GET", "/console/{name}")}
"""Routes (method, path) that are not part of the API: the files of the web console, for a
browser."""
EVENTS = "/api/v1/console/events"
IS_WANTED: dict[str, Callable[[Any], bool]] = {
    "overview": lambda event: bool(event["overview"]["slow"]),
    "partitions": lambda event: event["partitions"]["rates"] is not None,
    "consumers": lambda event: any(
        row["last_rollback"] and row["times"] for row in event["consumers"]["consumers"]
    ),
    "none": lambda event: True,
}
"""Page -> whether an event has what is only there after a while."""
EVENTS_MAX = 20
"""Limit of a wait, so that a failure does not hang: there is an event every two seconds."""
ENDLESS = (
    EVENTS,
    "/api/v1/console/changes",
    "/pools/default/bs/",
    "/pools/default/bucketsStreaming/",
)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return described()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DcpdProcess]:
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text("0123456789abcdef\n")
    data = tmp_path_factory.mktemp("described") / "data"
    with DcpdProcess(data, "--metrics-token", str(token)) as server:
        yield server


def routes_in(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {
        (method.upper(), path)
        for path, operations in document["paths"].items()
        for method in operations
    }


def send(
    server: DcpdProcess, call: Call, *, logs_in: bool = True, **headers: str
) -> tuple[HTTPResponse, bytes]:
    """Send a request with a JSON body, or a form on Couchbase's paths."""
    connection = HTTPConnection("127.0.0.1", server.admin_port, timeout=20)
    if logs_in:
        headers["authorization"] = login().partition(": ")[2]
    is_form = call.path.startswith("/pools")
    body = None
    if call.body is not None:
        body = urlencode(call.body) if is_form else json.dumps(call.body)
        headers["content-type"] = f"application/{'x-www-form-urlencoded' if is_form else 'json'}"
    try:
        connection.request(call.method, call.path.format(**PLACES) + call.query, body, headers)
        response = connection.getresponse()
        ends = not call.path.startswith(ENDLESS) or response.status != 200
        return response, response.read() if ends else piece_of(response)
    finally:
        connection.close()


def open_consumer(client: SyncKv, name: bytes) -> None:
    """Make the client's connection one for streams."""
    (link,) = client._exchange._links.values()
    link.request(Opcode.DCP_OPEN, key=name, extras=b"\0\0\0\0\0\0\0\1")
    link.request(Opcode.DCP_CONTROL, key=b"enable_noop", value=b"true")


def ask_for_stream(client: SyncKv, seqno: int, vb_uuid: int) -> int:
    """Ask for a stream of VB; return the status of the answer."""
    (link,) = client._exchange._links.values()
    numbers = (seqno, 2**64 - 1, vb_uuid, seqno, seqno)
    extras = bytes(8) + b"".join(number.to_bytes(8, "big") for number in numbers)
    return link.request(Opcode.DCP_STREAM_REQ, vb_id=VB, extras=extras).status


def piece_of(response: HTTPResponse) -> bytes:
    """Return the next event or document of an endless answer: up to an empty line."""
    lines: list[bytes] = []
    while line := response.readline().strip():
        lines.append(line)
    return b"\n".join(lines)


def data_of(event: bytes) -> Any:
    """Return the data of an event of the console."""
    name, _, data = event.partition(b"\n")
    assert name in {b"event: state", b"event: step"}
    return json.loads(data.removeprefix(b"data: "))


def event_when(
    document: dict[str, Any], server: DcpdProcess, show: str, is_wanted: Callable[[Any], bool]
) -> Any:
    """Return the first event, after the one with `me`, that is wanted. Check all until then."""
    schema = document["paths"][EVENTS]["get"]["responses"]["200"]["content"]["text/event-stream"]
    connection = HTTPConnection("127.0.0.1", server.admin_port, timeout=20)
    headers = {"authorization": login().partition(": ")[2]}
    try:
        connection.request("GET", f"{EVENTS}?show={show}", headers=headers)
        response = connection.getresponse()
        first = data_of(piece_of(response))
        check(document, schema[EVENT_DATA], first)
        assert first["me"]["user"] == "guest"
        for _ in range(EVENTS_MAX):
            event = data_of(piece_of(response))
            check(document, schema[EVENT_DATA], event)
            if is_wanted(event):
                return event
        raise AssertionError(event)
    finally:
        connection.close()


def strict(schema: Any) -> Any:
    """Return a schema that allows no members but those it names."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: strict(value) for name, value in schema.items()}
    if "properties" in schema:
        found.setdefault("additionalProperties", False)
    return found


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """Validate a value; references lead into the components."""
    whole = {**strict(schema), "components": strict(document["components"])}
    OAS31Validator(whole).validate(value)


def content_of(document: dict[str, Any], call: Call, status: int) -> dict[str, Any]:
    """Return what the description says about the answers of this status."""
    responses = document["paths"][call.path][call.method.lower()]["responses"]
    content: dict[str, Any] = responses.get(str(status), responses["default"])["content"]
    return content


def check_answer(document: dict[str, Any], call: Call, response: HTTPResponse, text: bytes) -> None:
    content = content_of(document, call, response.status)
    kind = response.headers.get_content_type()
    assert kind in content, (call, kind)
    if EVENT_DATA in content[kind]:
        check(document, content[kind][EVENT_DATA], data_of(text))
    elif content[kind]:
        check(document, content[kind]["schema"], json.loads(text))


def test_the_page_is_current() -> None:
    text = (ROOT / "docs" / "http-api.md").read_text()
    assert text == markdown(), "run: python -m dcp.server.admin.api_page > docs/http-api.md"


def test_the_document_is_valid(document: dict[str, Any]) -> None:
    validate(document)


def test_every_route_is_described(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"].endswith("."), f"{method} {path} has no summary"
            assert operation["tags"][0] in TAGS
    for name, (meaning, _) in PATH_FIELDS.items():
        assert meaning
        assert any(f"{{{name}}}" in path for path in document["paths"]), name
    for name, schema in document["components"]["schemas"].items():
        assert schema["description"].endswith("."), name


def test_no_route_is_undescribed(document: dict[str, Any], node: SmallNode) -> None:
    """What the application serves, however it came there."""
    app = admin_app(cast("Any", node), Crowd(), HostRule("127.0.0.1"))
    served = {
        (method, route.path)
        for route in app.routes
        for method in getattr(route, "methods", None) or ("*",)
        if method != "HEAD"  # which starlette adds to every GET
    }
    assert served - NOT_DESCRIBED == routes_in(document)


def test_every_route_is_called(document: dict[str, Any]) -> None:
    assert {(call.method, call.path) for call in CALLS} == routes_in(document)


def test_answers_are_as_described(document: dict[str, Any], server: DcpdProcess) -> None:
    with ExitStack() as open_until_the_end:
        for name in (b"described", b"second"):
            client = open_until_the_end.enter_context(server.connect())
            client.set(b"key", b"1")
            open_consumer(client, name)
            assert ask_for_stream(client, 0, vb_uuid=0) == Status.OK
        for call in CALLS:
            if call.body is not None:
                operation = document["paths"][call.path][call.method.lower()]
                content = operation.get("requestBody", {}).get("content", {})
                if call.status < 400 and "application/json" in content:
                    check(document, content["application/json"]["schema"], call.body)
            response, text = send(server, call)
            assert response.status == call.status, (call, text)
            check_answer(document, call, response, text)
            if call.path == "/api/v1/openapi.json":
                assert json.loads(text) == document


def test_events_are_as_described(document: dict[str, Any], server: DcpdProcess) -> None:
    """Also with a slow operation, and a consumer that had to roll back."""
    rule = Call("POST", "/api/v1/faults", {"opcode": "GET", "delay_ms": 150, "count": 1}, 201)
    assert send(server, rule)[0].status == 201
    with server.connect() as client:
        client.set(b"key", b"1")
        client.get(b"key")
        open_consumer(client, b"watched")
        assert ask_for_stream(client, 1000, vb_uuid=1) == Status.ROLLBACK
        assert ask_for_stream(client, 0, vb_uuid=0) == Status.OK
        for show in SHOWS:
            found = event_when(document, server, show, is_wanted=IS_WANTED[show])
            assert found.keys() == {"head", show} - {"none"}


def test_refusals_are_as_described(document: dict[str, Any], server: DcpdProcess) -> None:
    needs_none = {"/livez", "/readyz"}
    for call in CALLS:
        response, text = send(server, call, logs_in=False)
        assert (response.status == 401) == (call.path not in needs_none), call
        check_answer(document, call, response, text)
        response, text = send(server, call, **{"sec-fetch-site": "cross-site"})
        assert response.status == 403, call
        check_answer(document, call, response, text)
        if call.body is not None and not call.path.startswith("/pools"):
            response, text = send(server, call._replace(body={"unheard of": 1}))
            assert response.status == 400, call
            check_answer(document, call, response, text)


def test_a_refusal_is_a_problem_document(server: DcpdProcess) -> None:
    call = Call("POST", "/api/v1/vbuckets/{vb}/branch", {"at": 99})
    response, text = send(server, call)
    assert response.headers["content-type"] == "application/problem+json"
    problem = json.loads(text)
    details = problem.pop("error")
    assert problem == {
        "type": "about:blank",
        "title": "Conflict",
        "status": 409,
        "detail": f"{details['what']}: {details['why']}",
        "instance": "/api/v1/vbuckets/656/branch",
    }
    assert details["where"] == "POST /api/v1/vbuckets/656/branch"
    # Clients of Couchbase know another form.
    response, text = send(server, Call("GET", "/pools/default/b/none"))
    assert (response.status, response.headers["content-type"]) == (404, "application/json")
    assert set(json.loads(text)) == {"error"}
