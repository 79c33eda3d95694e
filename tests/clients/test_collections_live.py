"""Collections by our own clients against a live server, over a SIGKILL."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.consumer import Consumer
from clients.errors import NotFoundError, UnknownCollectionError
from clients.event import Mutation, StreamEnded, SystemEvent
from clients.kv import KvClient
from clients.mirror import Mirror
from dcp.wire.message import EndReason
from support.server import DcpdProcess
from vbucket.ids import vbucket_of
from vbucket.manifest import SystemEventKind

SCOPES = "/pools/default/buckets/default/scopes"
GUEST = "Basic " + base64.b64encode(b"guest:guest").decode()
VB = vbucket_of(b"k")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DcpdProcess]:
    with DcpdProcess(tmp_path / "data") as process:
        yield process


def rest(server: DcpdProcess, method: str, path: str, body: str = "") -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.admin_port}{path}",
        data=body.encode() or None,
        method=method,
        headers={"Authorization": GUEST, "Content-Type": "application/x-www-form-urlencoded"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read())


def create(server: DcpdProcess, name: str) -> None:
    rest(server, "POST", f"{SCOPES}/_default/collections", f"name={name}")


def drop(server: DcpdProcess, name: str) -> None:
    rest(server, "DELETE", f"{SCOPES}/_default/collections/{name}")


async def test_the_manifest_and_documents_survive_a_kill(server: DcpdProcess) -> None:
    create(server, "dropped")
    create(server, "kept")
    async with KvClient.connect(server.address) as kv:
        await kv.collection("_default.dropped").set("k", b"dropped")
        await kv.collection("_default.kept").set("k", b"kept")
        await kv.set("k", b"default")
    drop(server, "dropped")
    before = rest(server, "GET", SCOPES)
    assert before["uid"] == "3"
    server.restart_after_kill()
    assert rest(server, "GET", SCOPES) == before
    async with KvClient.connect(server.address) as kv:
        assert (await kv.get("k")).value == b"default"
        assert (await kv.collection("_default.kept").get("k")).value == b"kept"
        with pytest.raises(UnknownCollectionError):
            await kv.collection("_default.dropped").get("k")
        create(server, "dropped")
        assert rest(server, "GET", SCOPES)["scopes"][0]["collections"][-1]["uid"] == "a"
        with pytest.raises(NotFoundError):
            await kv.collection("_default.dropped").get("k")


async def test_an_id_that_went_stale_is_looked_up_again(server: DcpdProcess) -> None:
    create(server, "c")
    async with KvClient.connect(server.address) as kv:
        documents = kv.collection("_default.c")
        await documents.set("k", b"1")
        drop(server, "c")
        create(server, "c")
        with pytest.raises(NotFoundError):
            await documents.get("k")
        await documents.set("k", b"2")
        assert (await documents.get("k")).value == b"2"
        drop(server, "c")
        with pytest.raises(UnknownCollectionError, match=r"_default\.c"):
            await documents.get("k")


async def test_a_consumer_of_some_collections(server: DcpdProcess) -> None:
    for name in ("a", "b"):
        create(server, name)
    async with KvClient.connect(server.address) as kv:
        for name in ("a", "b"):
            await kv.collection(f"_default.{name}").set("k", name.encode())
        await kv.set("k", b"default")
    for collections, values in (
        (None, {(0, b"default")}),
        (["_default.b"], {(9, b"b")}),
        (["_default.a", 0], {(8, b"a"), (0, b"default")}),
        ("all", {(8, b"a"), (9, b"b"), (0, b"default")}),
    ):
        async with Consumer(
            server.address, vbuckets=[VB], collections=collections, until_now=True, validate=True
        ) as consumer:
            events = [event async for event in consumer]
        changes = [event for event in events if isinstance(event, Mutation)]
        assert {(event.collection_id, event.value) for event in changes} == values
        assert all(event.key == b"k" for event in changes)
        names = [event.name for event in events if isinstance(event, SystemEvent)]
        wanted = {None: [], "all": ["a", "b"]}
        expected = wanted.get(collections) if not isinstance(collections, list) else None
        assert names == (expected if expected is not None else [collections[0][-1]])


async def test_a_consumer_ends_with_the_last_collection_that_it_follows(
    server: DcpdProcess,
) -> None:
    create(server, "a")
    async with Consumer(
        server.address, vbuckets=[VB], collections=["_default.a"], validate=True
    ) as consumer:
        events: list[Any] = []
        async for event in consumer:
            events.append(event)
            if isinstance(event, SystemEvent) and event.kind == SystemEventKind.CREATE_COLLECTION:
                drop(server, "a")
    assert [event.kind for event in events if isinstance(event, SystemEvent)] == [
        SystemEventKind.CREATE_COLLECTION,
        SystemEventKind.DROP_COLLECTION,
    ]
    assert isinstance(events[-1], StreamEnded)
    assert (events[-1].reason, events[-1].will_resume) == (EndReason.FILTER_EMPTY, False)


async def test_a_consumer_of_no_such_collection(server: DcpdProcess) -> None:
    with pytest.raises(UnknownCollectionError, match="nowhere"):
        async with Consumer(server.address, collections=["_default.nowhere"]):
            pass


async def test_a_kept_mirror_of_a_collection_made_again_holds_nothing_of_the_one_before(
    server: DcpdProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "view"
    create(server, "c")
    async with KvClient.connect(server.address) as kv:
        await kv.collection("_default.c").set("old", b"1")
        async with Mirror(server.address, path, collection="_default.c") as view:
            assert dict(view.items()) == {b"old": b"1"}
        drop(server, "c")
        create(server, "c")
        async with Mirror(server.address, path, collection="_default.c") as view:
            assert dict(view.items()) == {}
            await kv.collection("_default.c").set("new", b"2")
            await view.caught_up()
            assert dict(view.items()) == {b"new": b"2"}
    assert "is a mirror of other documents" in caplog.text
