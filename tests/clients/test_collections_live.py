"""Collections by our own clients against a live server, over a SIGKILL."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_consumer_steering import until

from clients.checkpoint.checkpoint import CheckpointFile, decode_position, encode_position
from clients.checkpoint.lmdb_checkpoint import LmdbCheckpoint
from clients.checkpoint.server_checkpoint import ServerCheckpoint
from clients.consumer.consumer import Consumer
from clients.errors import (
    CheckpointError,
    DcpdError,
    HistoryBranchedError,
    NotFoundError,
    UnknownCollectionError,
)
from clients.event import Mutation, Rollback, StreamEnded, SystemEvent
from clients.kv.client import KvClient
from clients.mirror.mirror import Mirror
from clients.position import Filter
from dcp.wire.message import EndReason
from support.server import DcpdProcess
from vbucket.model.ids import vbucket_of
from vbucket.model.manifest import SystemEventKind

SCOPES = "/pools/default/buckets/default/scopes"
GUEST = "Basic " + base64.b64encode(b"guest:guest").decode()
VB = vbucket_of(b"k")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DcpdProcess]:
    with DcpdProcess(tmp_path / "data") as process:
        yield process


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DcpdProcess]:
    """One for tests that make collections of their own and kill nothing."""
    with DcpdProcess(tmp_path_factory.mktemp("collections") / "data") as process:
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


async def test_consumer_ends_with_last_collection_that_it_follows(
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


async def test_kept_mirror_of_a_recreated_collection_drops_the_old_one(
    running: DcpdProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "view"
    create(running, "c")
    async with KvClient.connect(running.address) as kv:
        await kv.collection("_default.c").set("old", b"1")
        async with Mirror(running.address, path, collection="_default.c") as view:
            assert dict(view.items()) == {b"old": b"1"}
        drop(running, "c")
        create(running, "c")
        async with Mirror(running.address, path, collection="_default.c") as view:
            assert dict(view.items()) == {}
            await kv.collection("_default.c").set("new", b"2")
            await view.caught_up()
            assert dict(view.items()) == {b"new": b"2"}
    assert "is a mirror of other documents" in caplog.text


async def test_who_missed_a_recreated_collection_must_begin_anew(
    running: DcpdProcess, tmp_path: Path
) -> None:
    for kind in ("file", "lmdb", "server", "positions"):
        create(running, kind)
        await made_again_meanwhile(running, tmp_path / kind, kind)


async def made_again_meanwhile(server: DcpdProcess, path: Path, kind: str) -> None:
    name, positions = f"_default.{kind}", dict[int, bytes]()

    def options() -> dict[str, Any]:
        if kind == "positions":
            return {"start": {vb: decode_position(raw) for vb, raw in positions.items()}}
        makers = {
            "file": lambda: CheckpointFile(path),
            "lmdb": lambda: LmdbCheckpoint(path),
            "server": lambda: ServerCheckpoint(server.address, "me"),
        }
        return {"store": makers[kind]()}

    async def follow() -> list[Any]:
        async with Consumer(
            server.address, vbuckets=[VB], collections=name, until_now=True, validate=True,
            **options(),
        ) as consumer:  # fmt: skip
            events = [event async for event in consumer]
            held = consumer.checkpoint()
            positions.update({vb: encode_position(place) for vb, place in held.items()})
            if kind != "positions":
                await consumer.save()
        return [event for event in events if isinstance(event, Mutation | SystemEvent | Rollback)]

    async with KvClient.connect(server.address) as kv:
        await kv.collection(name).set("k", b"old")
        assert [type(event) for event in await follow()] == [SystemEvent, Mutation]
        assert await follow() == []
        drop(server, kind)
        create(server, kind)
        await kv.collection(name).set("k", b"new")
    told = await follow()
    assert [type(event) for event in told] == [Rollback, SystemEvent, Mutation]
    assert (told[0].to_seqno, told[2].value) == (0, b"new")
    new_id = told[1].collection_id
    assert f"collections {new_id - 1}, but {new_id} are followed" in told[0].reason
    assert await follow() == []


async def test_another_choice_of_collections_is_no_silent_gap(
    running: DcpdProcess, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        create(running, name)
    async with KvClient.connect(running.address) as kv:
        for name in ("one", "two"):
            await kv.collection(f"_default.{name}").set("k", name.encode())

    async def values(collections: list[str] | list[int], **options: Any) -> list[bytes]:
        async with Consumer(
            running.address, vbuckets=[VB], collections=collections, until_now=True,
            store=CheckpointFile(tmp_path / "state"), **options,
        ) as consumer:  # fmt: skip
            told = [event.value async for event in consumer if isinstance(event, Mutation)]
            await consumer.save()
        return told

    both = ["_default.one", "_default.two"]
    assert await values(["_default.one"]) == [b"one"]
    with pytest.raises(CheckpointError, match=r"it is for collections _default\.one ") as info:
        await values(both)
    assert "this consumer follows collections _default.one, _default.two" in str(info.value)
    # A checkpoint of an older version knows ids alone.
    store = CheckpointFile(tmp_path / "state")
    store.save({vb: position._replace(filter=None) for vb, position in store.load().items()})
    with pytest.raises(HistoryBranchedError, match=r"collections (\d+), but \1, \d+ are followed"):
        await values(both, on_rollback="fail")
    assert await values(both) == [b"one", b"two"]
    assert await values(both[::-1]) == []
    (position,) = store.load().values()
    assert position.filter == Filter(tuple(both))
    ids = position.collections
    assert ids is not None
    assert await values([int(number) for number in ids]) == [], "named otherwise, and the same"


async def test_mirror_of_collection_dropped_does_not_pretend_to_follow(
    running: DcpdProcess,
) -> None:
    create(running, "gone")
    async with (
        KvClient.connect(running.address) as kv,
        Mirror(running.address, collection="_default.gone", vbuckets=[VB]) as view,
    ):
        await kv.collection("_default.gone").set("k", b"1")
        await view.caught_up()
        assert view["k"] == b"1"
        drop(running, "gone")
        await until(lambda: view._task is not None and view._task.done())
        with pytest.raises(DcpdError, match="the stream ended: the collection was dropped"):
            view.get("k")
