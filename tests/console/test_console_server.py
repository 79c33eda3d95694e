"""The server's side of the web console: its files, who may ask for what, and its event stream."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from dcp.server.admin.routes.console_files import FOLDER, POLICY
from dcp.server.admin.routes.server_routes import _LOGIN
from dcp.server.config.sources import OPTIONS
from dcp.server.node import Node
from dcp.server.observe.meter import Meter
from dcp.server.observe.sample_ring import SAMPLES_KEPT
from dcp.session.access.rights import EVERYTHING, Rights, Role, Scope
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from support.cluster_here import Client, node_here, plain, until
from support.raw_client import RawHttp, ask, login, request
from vbucket.engine.partition import Hold
from vbucket.engine.read_view import ReadView
from vbucket.model.ids import vbucket_of
from vbucket.store.environment import StoreDamagedError

JSON = "content-type: application/json"
PAST = 3_000_000
"""An expiry above 30 days is a Unix time, so this one was in 1970."""
BYTES_MAX = 300_000
"""What the files of the console may take together."""


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """dcpd runs on uvloop."""
    return {"uvloop": uvloop.new_event_loop}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("console-server")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(folder: Path) -> AsyncIterator[Node]:
    """One node for all tests of this module, which use keys and users of their own."""
    async with node_here(folder, {"boss": "secret-of-boss"}) as running:
        yield running


def add_user(node: Node, name: str, *roles: Role, prefix: bytes = b"") -> str:
    """Add a user, and return the header of its login."""
    scope = Scope(prefix) if prefix else EVERYTHING
    node.access.users.add(name, "a-long-password", Rights(dict.fromkeys(roles, (scope,))))
    return login(name, "a-long-password")


async def put(node: Node, key: str, value: str, *headers: str, **fields: Any) -> Any:
    body = json.dumps({"key": key, "value": value, **fields}).encode()
    headers = headers or (login(),)
    return await ask(node.ports.admin, "PUT", "/api/v1/documents", *headers, JSON, body=body)


async def get(node: Node, path: str, *headers: str) -> Any:
    return await ask(node.ports.admin, "GET", path, *(headers or (login(),)))


async def events(node: Node, query: str, header: str = "") -> AsyncIterator[dict[str, Any]]:
    """Yield the data of events, and {"rights": True} when the rights have changed."""
    async with await RawHttp.open(node.ports.admin) as connection:
        path = f"/api/v1/console/events?{query}"
        await connection.send(request("GET", path, header or login()))
        head = await connection.reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.splitlines()[0], head
        assert b"text/event-stream" in head
        assert b"no-store" in head
        rest = b""
        while True:
            size = int((await connection.reader.readuntil(b"\r\n")).strip(), 16)
            rest += (await connection.reader.readexactly(size + 2))[:-2]
            if not size:
                return
            while b"\n\n" in rest:
                block, _, rest = rest.partition(b"\n\n")
                name, _, data = block.partition(b"\n")
                if name == b"event: rights":
                    yield {"rights": True}
                else:
                    yield json.loads(data.removeprefix(b"data: "))


# -- the files ---------------------------------------------------------------------------------


async def test_the_files_are_small_and_allow_no_other_script(node: Node) -> None:
    total = 0
    for path in sorted(FOLDER.iterdir()):
        found = await ask(node.ports.admin, "GET", f"/console/{path.name}")
        assert found.status == 200, path.name
        assert bytes(found.body) == path.read_bytes()
        total += len(found.body)
        assert found.headers["content-security-policy"] == POLICY
        assert found.headers["x-content-type-options"] == "nosniff"
        assert found.headers["x-frame-options"] == "DENY"
        assert found.headers["referrer-policy"] == "no-referrer"
        again = await ask(
            node.ports.admin, "GET", f"/console/{path.name}",
            f"if-none-match: {found.headers['etag']}",
        )  # fmt: skip
        assert (again.status, bytes(again.body)) == (304, b"")
    assert total < BYTES_MAX
    assert "unsafe" not in POLICY
    assert "default-src 'none'" in POLICY
    index = await ask(node.ports.admin, "GET", "/")
    assert bytes(index.body) == (FOLDER / "index.html").read_bytes()


RUNS_TOGETHER = re.compile(
    r"(?:[A-Za-z]|(?<!\" \")\})[.:,]?\n +"
    r"(?:<(?:code|b|strong|a)\b|\$\{(?:plural|whole|short|bytes|clock)\()"
)
"""A text that ends a line, and what follows it: htm drops the line break between them."""


async def test_no_text_of_a_page_runs_into_what_follows() -> None:
    assert RUNS_TOGETHER.findall("Try\n  <code>dcpctl</code>")
    for path in FOLDER.glob("page-*.js"):
        assert RUNS_TOGETHER.findall(path.read_text()) == [], path.name


async def test_page_needs_nothing_from_elsewhere_and_inlines_nothing() -> None:
    index = (FOLDER / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", index)
    for reference in re.findall(r'(?:src|href)="([^"]+)"', index):
        assert (FOLDER / reference.removeprefix("/console/")).is_file(), reference
    ours = [path for path in FOLDER.glob("*.js") if not path.name.startswith("vendor-")]
    assert len(ours) > 5
    for path in ours:
        text = path.read_text()
        assert "http:" not in text.replace("http://www.w3.org", ""), path.name
        assert not re.search(r"innerHTML|dangerouslySet|eval\(|document\.write|Storage", text)
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert (FOLDER / name).is_file(), name
            assert f'/console/{name}"' in index, f"{name} is not loaded early"
    licences = (FOLDER / "vendor-licences.txt").read_text()
    for path in FOLDER.glob("vendor-*.[jc]s*"):
        assert path.name in licences


@pytest.mark.parametrize(
    "path", ["/console/", "/console/nothing.js", "/console/..%2fanswers.py", "/console/%2e%2e/x",
             "/console/../answers.py", "/console/__init__.py", "/console//etc/passwd"],
)  # fmt: skip
async def test_no_other_file_is_served(node: Node, path: str) -> None:
    assert (await ask(node.ports.admin, "GET", path)).status == 404


# -- who may ask for what ----------------------------------------------------------------------


async def test_all_but_the_files_needs_a_login(node: Node) -> None:
    for method, path in (
        ("GET", "/api/v1/console/me"), ("GET", "/api/v1/console/events"),
        ("GET", "/api/v1/vbuckets/5"), ("GET", "/api/v1/documents?key=x"),
        ("GET", "/api/v1/documents/keys"), ("PUT", "/api/v1/documents"),
        ("DELETE", "/api/v1/documents"),
    ):  # fmt: skip
        assert (await ask(node.ports.admin, method, path)).status == 401, path


async def test_the_page_is_told_what_its_user_may_do(node: Node) -> None:
    reader = add_user(node, "reader", Role.READ)
    me = (await get(node, "/api/v1/console/me", reader)).body
    assert me["user"] == "reader"
    assert not me["is_test_mode"]
    assert me["may"] == {
        "read_documents": True, "write_documents": False, "dump": True, "history": True,
        "explain": False, "operate": False,
    }  # fmt: skip
    limited = add_user(node, "limited", Role.READ, Role.WRITE, prefix=b"a")
    may = (await get(node, "/api/v1/console/me", limited)).body["may"]
    assert (may["read_documents"], may["write_documents"], may["dump"]) == (True, True, False)
    nothing = add_user(node, "nothing")
    me = (await get(node, "/api/v1/console/me", nothing)).body
    assert set(me["may"].values()) == {False}
    assert (await get(node, "/api/v1/vbuckets/5", nothing)).status == 403
    assert (await get(node, "/api/v1/documents?key=x", nothing)).status == 403


async def test_rights_for_some_keys_hold_for_documents_too(node: Node) -> None:
    await put(node, "a:1", "x")
    await put(node, "b:1", "x")
    limited = add_user(node, "limited", Role.READ, Role.WRITE, prefix=b"a:")
    assert (await get(node, "/api/v1/documents?key=a:1", limited)).body["may_write"]
    refused = await get(node, "/api/v1/documents?key=b:1", limited)
    assert refused.status == 403
    assert "keys beginning with 'a:'" in refused.body["error"]["why"]
    keys = (await get(node, "/api/v1/documents/keys", limited)).body["keys"]
    assert [row["key"] for row in keys] == ["a:1"]
    assert (await put(node, "b:1", "y", limited)).status == 403
    assert (await put(node, "a:1", "y", limited)).status == 200
    reader = add_user(node, "reader", Role.READ)
    assert not (await get(node, "/api/v1/documents?key=a:1", reader)).body["may_write"]
    assert (await put(node, "a:1", "z", reader)).status == 403


async def test_faults_need_test_mode_where_others_reach_the_server(
    tmp_path: Path,
) -> None:
    rule = b'{"opcode": "GET", "status": "ETMPFAIL"}'
    for host, test_mode, status in (
        ("127.0.0.1", "off", 201), ("0.0.0.0", "off", 403), ("0.0.0.0", "on", 201),
    ):  # fmt: skip
        settings = {"host": host, "test_mode": test_mode}
        async with node_here(
            tmp_path / f"{host}-{test_mode}", {"boss": "b" * 9}, **settings
        ) as one:
            found = await ask(
                one.ports.admin, "POST", "/api/v1/faults", login("boss", "b" * 9), JSON, body=rule
            )
            assert found.status == status, (host, test_mode)
            if status == 403:
                assert "--test-mode" in found.body["error"]["try"]
            header = login("boss", "b" * 9)
            listed = await get(one, "/api/v1/faults", header)
            assert len(listed.body["faults"]) == (status == 201)


# -- documents ---------------------------------------------------------------------------------


async def test_a_change_needs_the_document_that_was_seen(node: Node) -> None:
    first = (await put(node, "key1", "1", only_new=True)).body
    assert (await put(node, "key1", "2", only_new=True)).status == 409
    second = (await put(node, "key1", "2", cas=first["cas"], flags=7)).body
    assert second["seqno"] == 2
    refused = await put(node, "key1", "3", cas=first["cas"])
    assert refused.status == 409
    assert "has changed" in refused.body["error"]["why"]
    found = (await get(node, "/api/v1/documents?key=key1")).body
    assert found["is_there"]
    assert [version["value"] for version in found["versions"]] == ["2", "1"]
    assert found["versions"][0]["flags"] == 7
    assert found["versions"][0]["is_json"]
    body = json.dumps({"key": "key1", "cas": second["cas"]}).encode()
    gone = await ask(node.ports.admin, "DELETE", "/api/v1/documents", login(), JSON, body=body)
    assert gone.body["seqno"] == 3
    found = (await get(node, "/api/v1/documents?key=key1")).body
    assert not found["is_there"]
    assert [version["kind"] for version in found["versions"]] == ["deleted", "set", "set"]
    assert (
        await ask(node.ports.admin, "DELETE", "/api/v1/documents", login(), JSON, body=body)
    ).status == 404


async def test_long_histories_and_long_values_come_in_pieces(node: Node) -> None:
    for number in range(7):
        await put(node, "k", str(number))
    seen: list[str] = []
    query = "key=k&versions=3"
    while True:
        found = (await get(node, f"/api/v1/documents?{query}")).body
        seen += [version["value"] for version in found["versions"]]
        if found["older_than"] is None:
            break
        query = f"key=k&versions=3&older_than={found['older_than']}"
    assert seen == list("6543210")
    node.engine.begin_batch(10**18)
    long = "ä" * 200_000
    vb_id, key = vbucket_of(b"long"), b"\0long"
    node.engine.store(0, vb_id, key, key + long.encode(), 0, 0, 0, 0)
    version = (await get(node, "/api/v1/documents?key=long")).body["versions"][0]
    assert version["is_cut"]
    assert version["value_bytes"] == 400_000
    assert version["value"] == "ä" * (256 * 1024 // 2)


async def test_keys_and_values_that_are_no_text(node: Node) -> None:
    raw = b64encode(b"\xff\0").decode()
    stored = await put(node, raw, raw, key_encoding="base64", value_encoding="base64")
    assert stored.status == 200
    found = (await get(node, "/api/v1/documents?key=%2FwA%3D&key_encoding=base64")).body
    assert (found["key"], found["key_encoding"]) == (raw, "base64")
    assert found["versions"][0]["value_encoding"] == "base64"
    for query in (
        "key=",
        "key=x&key_encoding=rot13",
        "key=x&versions=-1",
        "key=%2F&key_encoding=base64",
    ):
        assert (await get(node, f"/api/v1/documents?{query}")).status == 400, query
    assert (await get(node, "/api/v1/documents?key=x&collection=no.such")).status == 404
    assert (await get(node, "/api/v1/documents/keys?position=1024.")).status == 400
    for body in (
        b"[]", b'{"key": "x"}', b'{"key": 1, "value": ""}', b'{"key": "x", "value": "", "a": 1}',
        b'{"key": "x", "value": "", "flags": -1}', b'{"key": "x", "value": "", "cas": "-"}',
    ):  # fmt: skip
        answer = await ask(node.ports.admin, "PUT", "/api/v1/documents", login(), JSON, body=body)
        assert answer.status == 400, body


async def test_keys_come_in_pieces_and_each_once(node: Node) -> None:
    for number in range(60):
        await put(node, f"list:{number}", "x")
    await put(node, "other", "x")
    await put(node, "list:gone", "x", expiry=PAST)
    found: list[str] = []
    query = "prefix=list:&limit=7"
    position: str | None = ""
    while position is not None:
        answer = (await get(node, f"/api/v1/documents/keys?{query}&position={position}")).body
        assert len(answer["keys"]) <= 7
        found += [row["key"] for row in answer["keys"]]
        position = answer["next"]
    assert sorted(found) == sorted(f"list:{number}" for number in range(60))


async def test_a_change_waits_for_room_and_is_refused_with_the_reason(node: Node) -> None:
    engine = node.engine
    engine.let_writers_wait()
    waiting = asyncio.create_task(put(node, "patient", "x"))
    await until(lambda: len(node.serving.listeners._crowd.requests))
    engine.refuse_writes("", Hold.STORE_BEHIND)
    assert (await waiting).status == 200
    engine.refuse_writes("the disk is full", Hold.LOG_FULL)
    try:
        refused = await put(node, "patient", "y")
        assert refused.status == 503
        assert "the disk is full" in refused.body["error"]["why"]
        assert (await get(node, "/api/v1/documents?key=patient")).body["versions"][0][
            "value"
        ] == "x"
        async with aclosing(events(node, "show=none")) as stream:
            node.serving.sampler.sample()
            assert (await anext(stream))["head"]["why_not"] == "the disk is full"
    finally:
        engine.refuse_writes("", Hold.LOG_FULL)


async def test_a_locked_document_is_not_changed(node: Node) -> None:
    await put(node, "locked", "x")
    async with Client.connect(node) as client:
        await client.ask(plain("guest", "guest"))
        await client.ask(
            pack_request(Opcode.GET_AND_LOCK, key=b"locked", vb_id=vbucket_of(b"locked"))
        )
        refused = await put(node, "locked", "y")
    assert refused.status == 409
    assert "locked" in refused.body["error"]["why"]


async def test_a_damaged_partition_does_not_hide_the_keys_of_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        await put(node, f"spread:{number}", "x")
    damaged = vbucket_of(b"spread:3")
    read = node.views.open

    def damaged_there(vb_id: int, seqno: int | None = None, owner: str | None = None) -> ReadView:
        if vb_id == damaged:
            raise StoreDamagedError("a block")
        return read(vb_id, seqno, owner)

    monkeypatch.setattr(node.views, "open", damaged_there)
    found = (await get(node, "/api/v1/documents/keys?prefix=spread:")).body
    assert found["unreadable"] == [damaged]
    wanted = {f"spread:{number}" for number in range(20)}
    wanted -= {key for key in wanted if vbucket_of(key.encode()) == damaged}
    assert {row["key"] for row in found["keys"]} == wanted


async def test_a_changes_audit_line_has_neither_key_nor_value(node: Node, folder: Path) -> None:
    await put(node, "the-key", "the-value", flags=54321)
    audit = folder / "data" / "audit.log"
    await until(lambda: audit.exists() and "54321" in audit.read_text())
    assert "the-key" not in audit.read_text()
    assert "the-value" not in audit.read_text()


# -- the event stream --------------------------------------------------------------------------


async def test_a_page_gets_each_sample_once_also_after_it_was_away(node: Node) -> None:
    times: list[float] = []
    async with aclosing(events(node, "show=overview")) as stream:
        first = await anext(stream)
        assert first["me"]["user"] == "guest"
        assert first["head"]["is_ready"]
        times += first["overview"]["times"]
        node.serving.sampler.sample()
        second = await anext(stream)
        assert "me" not in second
        times += second["overview"]["times"]
    node.serving.sampler.sample()
    has = f"after={second['head']['sample']}"
    query = f"show=overview&{has}&boot={second['head']['boot']}"
    async with aclosing(events(node, query)) as stream:
        times += (await anext(stream))["overview"]["times"]
    assert len(times) == node.serving.sampler.ring.last
    assert times == sorted(times)
    # What it has of an earlier run of the server does not count.
    async with aclosing(events(node, f"show=overview&{has}&boot=earlier")) as stream:
        assert (await anext(stream))["overview"]["times"] == times


async def test_the_map_and_the_consumers_are_in_the_events(node: Node) -> None:
    await put(node, "key1", "x")
    async with aclosing(events(node, "show=partitions")) as stream:
        found = (await anext(stream))["partitions"]
        assert found["states"] == "a" * 1024
        assert sum(found["items"]) == sum(part.item_count for part in node.engine.partitions)
        assert found["items"][92] >= 1
        await put(node, "key1", "y")
        node.serving.sampler.sample()
        found = (await anext(stream))["partitions"]
        assert found["rates"][92] > 0
        assert found["history"][92] == node.engine.partitions[92].high_seqno
    async with aclosing(events(node, "show=consumers")) as stream:
        assert (await anext(stream))["consumers"]["consumers"] == []
    for query in ("show=what", "after=-1", "since=x", "since=-1"):
        assert (await get(node, f"/api/v1/console/events?{query}")).status == 400


async def test_the_stream_ends_when_the_rights_change(node: Node) -> None:
    header = add_user(node, "u", Role.READ)
    async with aclosing(events(node, "show=none", header)) as stream:
        assert not (await anext(stream))["me"]["may"]["operate"]
        node.access.users.grant("u", Role.ADMIN, EVERYTHING)
        node.serving.sampler.sample()
        assert await anext(stream) == {"rights": True}
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    async with aclosing(events(node, "show=none", header)) as stream:
        assert (await anext(stream))["me"]["may"]["operate"]
        node.access.users.remove("u")
        node.serving.sampler.sample()
        assert await anext(stream) == {"rights": True}


async def test_page_that_reads_nothing_costs_no_memory(node: Node) -> None:
    """Its events are not made: what it gets later is one event with all that is new."""
    made = 0
    view = node.serving.listeners._admin_parts.console.view
    original = view.partition_map

    def count() -> bytes:
        nonlocal made
        made += 1
        return original()

    view.partition_map = count  # type: ignore[method-assign]
    raw = socket.create_connection(("127.0.0.1", node.ports.admin))
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.sendall(request("GET", "/api/v1/console/events?show=partitions", login()))
    await until(lambda: made)
    for _ in range(SAMPLES_KEPT):
        node.serving.sampler.sample()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    # What is beyond the buffers of the two sockets was not made.
    assert made < SAMPLES_KEPT
    before = made
    for _ in range(20):
        node.serving.sampler.sample()
        await asyncio.sleep(0)
    assert made == before
    assert (await put(node, "still", "works")).status == 200
    async with aclosing(events(node, "show=partitions")) as stream:
        assert (await anext(stream))["head"]["sample"] == node.serving.sampler.ring.last
    raw.close()


@pytest.mark.parametrize("path", ["/api/v1/console/events", "/api/v1/vbuckets/5/documents"])
async def test_head_of_a_long_answer_is_refused_and_takes_no_place(node: Node, path: str) -> None:
    streams = node.serving.listeners._crowd.streams
    await until(lambda: not len(streams))
    async with await RawHttp.open(node.ports.admin) as connection:
        await connection.send(request("HEAD", path, login(), "connection: close"))
        head = await connection.rest()
        assert not len(streams)
    assert head.startswith(b"HTTP/1.1 405 ")
    assert b"\r\nallow: GET\r\n" in head


async def test_a_stop_of_the_server_ends_the_streams(tmp_path: Path) -> None:
    async with node_here(tmp_path, {}) as node:
        stream = events(node, "show=none")
        await anext(stream)
        stopping = asyncio.create_task(node.stop())
        async for _ in stream:
            pass  # a sample that came before
        await stopping


async def test_gets_of_both_protocols_are_counted(node: Node) -> None:
    before = node.engine.gets
    async with Client.connect(node) as client:
        await client.ask(plain("guest", "guest"))
        features = Feature.COLLECTIONS.to_bytes(2, "big")
        await client.ask(pack_request(Opcode.HELLO, key=b"test", value=features))
        # One that is handled alone, and a run of them; found or not.
        get = pack_request(Opcode.GET, key=b"\0key1", vb_id=92)
        client.send(get + get + get)
        for _ in range(3):
            await client.receive()
    assert node.engine.gets == before + 3
    reader, writer = await asyncio.open_connection("127.0.0.1", node.ports.kv)
    writer.write(b"get key1 nothing\r\n")
    await reader.readuntil(b"END\r\n")
    writer.close()
    assert node.engine.gets == before + 5


async def test_a_slow_command_is_kept_with_its_user(node: Node) -> None:
    rule = b'{"opcode": "GET", "delay_ms": 120, "count": 1}'
    path = "/api/v1/faults"
    assert (await ask(node.ports.admin, "POST", path, login(), JSON, body=rule)).status == 201
    async with Client.connect(node) as client:
        await client.ask(plain("guest", "guest"))
        await client.ask(pack_request(Opcode.GET, key=b"key1", vb_id=92))
    slow = node.meter.slow.newest_first()[0]
    assert (slow.what, slow.user) == ("GET", "guest")
    assert slow.seconds >= 0.12
    async with aclosing(events(node, "show=overview")) as stream:
        assert (await anext(stream))["overview"]["slow"][0]["what"] == "GET"


async def test_a_slow_sync_is_kept() -> None:
    meter = Meter()
    meter.sync_seconds.observe(0.5)
    meter.sync_seconds.observe(0.01)
    assert [row.what for row in meter.slow.newest_first()] == ["a sync of the log"]


async def test_documents_are_sorted_over_all_partitions(node: Node) -> None:
    keys = sorted(f"sorted:{number}" for number in range(25))
    for key in keys:
        assert (await put(node, key, f'{{"of": "{key}"}}')).status == 200
    assert (await put(node, "sorted:long", "x" * 1000)).status == 200
    seen: list[str] = []
    position = ""
    for _ in range(4):
        query = f"prefix=sorted:&limit=10&position={position}"
        found = (await get(node, f"/api/v1/documents/sorted?{query}")).body
        seen += [row["key"] for row in found["documents"]]
        position = found["next"]
        if position is None:
            break
    assert seen == [*keys, "sorted:long"]
    assert position is None
    last = found["documents"][-1]
    assert (last["value"], last["value_bytes"]) == ("x" * 400, 1000)
    exact = (await get(node, "/api/v1/documents/sorted?prefix=sorted:&limit=26")).body
    assert (len(exact["documents"]), exact["next"]) == (26, None)
    limited = add_user(node, "sorted-reader", Role.READ, prefix=b"sorted:1")
    found = (await get(node, "/api/v1/documents/sorted?prefix=sorted:", limited)).body
    assert [row["key"] for row in found["documents"]] == [
        key for key in keys if key.startswith("sorted:1")
    ]
    assert (await get(node, "/api/v1/documents/sorted?position=zz")).status == 400


async def test_a_session_takes_the_place_of_the_password(node: Node) -> None:
    header = "x-dcpd-console: 1"
    answer = await ask(
        node.ports.admin, "POST", "/api/v1/console/login", login(), header,
        "content-type: application/json", body=b"{}",
    )  # fmt: skip
    assert answer.status == 200
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    session = f"cookie: {cookie.partition(';')[0]}"
    path = "/api/v1/console/me"
    assert (await get(node, path, session, header)).body["user"] == "guest"
    assert (await get(node, path, session)).status == 401
    assert (await get(node, path, session, header, "origin: http://evil.example")).status == 403
    refused = await get(node, path, "cookie: dcpd-1=x", header)
    assert refused.status == 401
    assert "www-authenticate" not in refused.headers


async def test_the_log_is_kept_and_settings_hide_passwords(node: Node) -> None:
    node._log.warning("something odd", reason="x" * 900)
    line = (await get(node, "/api/v1/log?limit=1")).body["lines"][0]
    assert (line["level"], line["event"], len(line["fields"]["reason"])) == (
        "warning", "something odd", 500,
    )  # fmt: skip
    found = (await get(node, "/api/v1/settings")).body["settings"]
    assert len(found) == len(OPTIONS)
    assert _LOGIN.sub("//...@", "etcd://me:secret@host:1/x") == "etcd://...@host:1/x"
    reader = add_user(node, "no-admin", Role.READ)
    for path in ("/api/v1/log", "/api/v1/settings"):
        assert (await get(node, path, reader)).status == 403
